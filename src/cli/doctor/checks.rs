//! The checks, in the order of their lines: from what was read, each by its rule.

use crate::base::reader::Unread;
use crate::doctor::facts::{Facts, Labels, Plan};
use crate::doctor::finding::{Findings, Found, lines};
use crate::doctor::parts::{
    Images, deployment, kubernetes, leader, namespace, quotas, runtime_classes, start_failures,
    versions, workload_classes,
};
use crate::doctor::proof::certificates::{api_service, served};
use crate::doctor::scheduler::{Expected, of_file, of_map};
use crate::doctor::table::*;
use crate::doctor::{admission, nodes, rights};
use wire::api::commands::Check;

/// What is looked at, and the rule.
type Rule = fn(&Facts, &Plan<'_>) -> Found;

const RULES: [Rule; 22] = [
    |it, _| Ok(namespaces(it).into()),
    |it, _| deployment("extender", &it.extender),
    |it, plan| match &it.extender {
        Ok(extender) => leader(extender, &it.lease, &it.extender_pods, plan.now_unix_seconds),
        Err(_) => Ok(Findings::new()),
    },
    |it, _| Ok(it.configured.clone()),
    |it, _| rights::held(&it.rights),
    own_scheduler,
    scheduler,
    |it, _| nodes::agents(&it.fleet),
    |it, _| nodes::kubelets(&it.fleet),
    |it, _| nodes::ends(&it.fleet),
    |it, _| nodes::owners(&it.fleet),
    |it, plan| versions(plan.program, &images(it)),
    |it, _| runtime_classes(&it.runtime_classes, it.config.as_ref()),
    |it, _| start_failures(&it.events),
    |it, _| quotas(&it.quotas),
    |it, _| workload_classes(it.config.as_ref(), &it.priority_classes),
    admission,
    dry_run,
    |it, _| match it.trials {
        Some(_) => admission::devices_policy(&it.devices_policy, it.config.as_ref()),
        None => Ok(Findings::new()),
    },
    |it, _| admission::compared(&it.policies),
    |it, _| match &it.config {
        Some(config) => api_service(&it.api_service, config.tls.is_some()),
        None => Ok(Findings::new()),
    },
    |it, plan| {
        let now = plan.now_unix_seconds;
        let of = |it: &Result<_, Check>| {
            it.as_ref().map_err(Clone::clone).and_then(|it| served(it, now))
        };
        Ok(it.certificates.iter().flat_map(|it| lines(of(it))).collect())
    },
];

/// Checks everything. `step` learns what is read now.
pub(crate) async fn checked(plan: &Plan<'_>, step: &dyn Fn(&str)) -> Findings {
    step("the API server");
    let (version, reviews) = tokio::join!(plan.version(), plan.reviews());
    let mut found = lines(kubernetes(&version));
    found.extend(lines(rights::reviewed(&reviews)));
    if !rights::has_none(&reviews) {
        let facts = Facts::read(plan, step).await;
        found.extend(RULES.iter().flat_map(|rule| lines(rule(&facts, plan))));
    }
    found
}

fn namespaces(facts: &Facts) -> [Check; 2] {
    let labels = |name: &str| {
        let all: &Labels = facts.namespaces.as_ref().map_err(Clone::clone)?;
        all.get(name).cloned().ok_or(Unread::Absent)
    };
    [(&facts.places.system, "restricted"), (&facts.places.agents, "privileged")]
        .map(|(name, standard)| namespace(name, &labels(name), standard))
}

/// The Deployment of kube-scheduler, where its file is compared.
fn own_scheduler(facts: &Facts, plan: &Plan<'_>) -> Found {
    let is_compared = facts.config.is_some() && plan.scheduler_file.is_none();
    match is_compared && facts.scheduler.is_ok() {
        true => deployment("kube-scheduler for GPU pods", &facts.scheduler),
        false => Ok(Findings::new()),
    }
}

fn scheduler(facts: &Facts, plan: &Plan<'_>) -> Found {
    let config = facts.config.as_ref().ok_or_else(|| NOT_COMPARED.with([]))?;
    let mig_profiles = &facts.fleet.mig_profiles();
    let expected = Expected { config, mig_profiles, service: &facts.service };
    match &plan.scheduler_file {
        Some(text) => of_file(text, &expected),
        None => of_map(&facts.scheduler_file, &facts.scheduler, &expected),
    }
}

/// Images of pods; where none is known, those of Deployments.
fn images(facts: &Facts) -> [Images<'_>; 3] {
    let extender = facts.extender_pods.iter().flatten().map(|pod| pod.image.as_str());
    let agents = facts.fleet.pods.iter().flatten().map(|pod| pod.image.as_str());
    let parts = [
        ("extender", extender.collect::<Vec<_>>(), &facts.extender),
        ("webhook", Vec::new(), &facts.webhook),
        ("agents", agents.collect(), &facts.fleet.daemon_set),
    ];
    parts.map(|(part, of_pods, workload)| {
        let of_workload = workload.iter().map(|it| it.image()).filter(|_| of_pods.is_empty());
        let images = of_workload.collect::<Vec<_>>();
        Images { part, images: [of_pods, images].concat() }
    })
}

/// The webhook's Deployment and configuration; where it is installed, also what it does not hear of.
fn admission(facts: &Facts, _: &Plan<'_>) -> Found {
    let Facts { webhooks, config, places, .. } = facts;
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

fn dry_run(facts: &Facts, plan: &Plan<'_>) -> Found {
    let webhook = facts.webhooks.iter().find_map(|all| admission::own(all));
    match (&facts.trials, webhook) {
        (Some([good, bad]), Some(webhook)) => {
            let trials = admission::Trials { namespace: &plan.places.trial, good, bad };
            admission::dry_run(&trials, webhook, facts.config.as_ref())
        }
        _ => Ok(Findings::new()),
    }
}
