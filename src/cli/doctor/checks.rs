//! The checks, in the order of their lines: from what was read, each by its rule.

use crate::base::reader::Unread;
use crate::doctor::cluster_facts::{CheckPlan, ClusterFacts};
use crate::doctor::finding::{Findings, Found, lines};
use crate::doctor::parts::{
    Images, deployment, kubernetes, leader, namespace, quotas, runtime_classes, start_failures,
    versions, workload_classes,
};
use crate::doctor::proof::certificates::{api_service, served};
use crate::doctor::scheduler_checks::{ExpectedSettings, of_file, of_map};
use crate::doctor::table::*;
use crate::doctor::{admission, nodes, rights};
use wire::api::commands::Check;

/// What is looked at, and the rule.
type Rule = fn(&ClusterFacts, &CheckPlan<'_>) -> Found;

const RULES: [Rule; 22] = [
    |facts, _| Ok(namespaces(facts).into()),
    |facts, _| deployment("extender", &facts.extender),
    |facts, plan| match &facts.extender {
        Ok(extender) => leader(extender, &facts.lease, &facts.extender_pods, plan.now_unix_seconds),
        Err(_) => Ok(Findings::new()),
    },
    |facts, _| Ok(facts.configured.clone()),
    |facts, _| rights::held(&facts.rights),
    own_scheduler,
    scheduler,
    |facts, _| nodes::agents(&facts.fleet),
    |facts, _| nodes::kubelets(&facts.fleet),
    |facts, _| nodes::ends(&facts.fleet),
    |facts, _| nodes::owners(&facts.fleet),
    |facts, plan| versions(plan.program, &images(facts)),
    |facts, _| runtime_classes(&facts.runtime_classes, facts.config.as_ref()),
    |facts, _| start_failures(&facts.events),
    |facts, _| quotas(&facts.quotas),
    |facts, _| workload_classes(facts.config.as_ref(), &facts.priority_classes),
    admission,
    dry_run,
    |facts, _| match facts.trials {
        Some(_) => admission::devices_policy(&facts.devices_policy, facts.config.as_ref()),
        None => Ok(Findings::new()),
    },
    |facts, _| admission::compared(&facts.policies),
    |facts, _| match &facts.config {
        Some(config) => api_service(&facts.api_service, config.tls.is_some()),
        None => Ok(Findings::new()),
    },
    |facts, plan| {
        let found = facts.certificates.iter().map(|certificate| {
            served(certificate.as_ref().map_err(Clone::clone)?, plan.now_unix_seconds)
        });
        Ok(found.flat_map(lines).collect())
    },
];

/// Checks everything. `step` learns what is read now.
pub(crate) async fn checked(plan: &CheckPlan<'_>, step: &dyn Fn(&str)) -> Findings {
    step("the API server");
    let (version, reviews) = tokio::join!(plan.version(), plan.reviews());
    let mut found = lines(kubernetes(&version));
    found.extend(lines(rights::reviewed(&reviews)));
    if !rights::has_none(&reviews) {
        let facts = ClusterFacts::read(plan, step).await;
        found.extend(RULES.iter().flat_map(|rule| lines(rule(&facts, plan))));
    }
    found
}

fn namespaces(facts: &ClusterFacts) -> [Check; 2] {
    let places = &facts.places;
    [(&places.system, "restricted"), (&places.agents, "privileged")].map(|(name, standard)| {
        let all = facts.namespaces.as_ref().map_err(Clone::clone);
        let labels = all.and_then(|all| all.get(name).cloned().ok_or(Unread::Absent));
        namespace(name, &labels, standard)
    })
}

/// The Deployment of kube-scheduler, where its file is compared.
fn own_scheduler(facts: &ClusterFacts, plan: &CheckPlan<'_>) -> Found {
    let is_compared = facts.config.is_some() && plan.scheduler_file.is_none();
    match is_compared && facts.scheduler.is_ok() {
        true => deployment("kube-scheduler for GPU pods", &facts.scheduler),
        false => Ok(Findings::new()),
    }
}

fn scheduler(facts: &ClusterFacts, plan: &CheckPlan<'_>) -> Found {
    let config = facts.config.as_ref().ok_or_else(|| NOT_COMPARED.with([]))?;
    let mig_profiles = &facts.fleet.mig_profiles();
    let expected = ExpectedSettings { config, mig_profiles, service: &facts.service };
    match &plan.scheduler_file {
        Some(text) => of_file(text, &expected),
        None => of_map(&facts.scheduler_file, &facts.scheduler, &expected),
    }
}

/// Images of pods; where none is known, those of Deployments.
fn images(facts: &ClusterFacts) -> [Images<'_>; 3] {
    let extender = facts.extender_pods.iter().flatten().map(|pod| pod.image.as_str());
    let agents = facts.fleet.pods.iter().flatten().map(|pod| pod.image.as_str());
    let parts = [
        ("extender", extender.collect::<Vec<_>>(), &facts.extender),
        ("webhook", Vec::new(), &facts.webhook),
        ("agents", agents.collect(), &facts.fleet.daemon_set),
    ];
    parts.map(|(part, mut images, workload)| {
        if images.is_empty() {
            images.extend(workload.iter().map(|workload| workload.image()));
        }
        Images { part, images }
    })
}

/// The webhook's Deployment and configuration; where it is installed, also what it does not hear of.
fn admission(facts: &ClusterFacts, _: &CheckPlan<'_>) -> Found {
    let ClusterFacts { webhooks, config, places, .. } = facts;
    let config = config.as_ref();
    let there = facts.namespaces.as_ref().map(|all| all.keys().cloned().collect());
    let there = there.map_err(Clone::clone);
    let of_deployment = match facts.trials.is_some() || facts.webhook.is_ok() {
        true => lines(deployment("webhook", &facts.webhook)),
        false => Findings::new(),
    };
    let own = [&*places.system, &*places.agents];
    let configured = lines(admission::configured(webhooks, config, &there, own));
    let all = webhooks.iter().filter(|_| facts.trials.is_some());
    let unsent = all.zip(config).filter_map(|(all, config)| admission::templates(all, config));
    Ok(of_deployment.into_iter().chain(configured).chain(unsent).collect())
}

fn dry_run(facts: &ClusterFacts, plan: &CheckPlan<'_>) -> Found {
    let webhook = facts.webhooks.iter().find_map(|all| admission::own(all));
    match (&facts.trials, webhook) {
        (Some([good, bad]), Some(webhook)) => {
            let trials = admission::Trials { namespace: &plan.places.trial, good, bad };
            admission::dry_run(&trials, webhook, facts.config.as_ref())
        }
        _ => Ok(Findings::new()),
    }
}
