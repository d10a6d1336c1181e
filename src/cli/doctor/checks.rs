//! The checks, in the order of their lines: from what was read, each by its rule.

use crate::base::reader::Unread;
use crate::doctor::cluster_facts::{AdmissionFacts, CheckPlan, ClusterFacts, DeployedParts};
use crate::doctor::finding::{Findings, Found, lines};
use crate::doctor::nodes::ClusterFleet;
use crate::doctor::operator::driver_upgrades::upgrades;
use crate::doctor::operator::mig_monitors::monitors;
use crate::doctor::operator::mig_rights::mig_rights;
use crate::doctor::parts::{
    Images, deployment, kubernetes, leader, namespace, quotas, runtime_classes, start_failures,
    versions, workload_classes,
};
use crate::doctor::probe::probing::probed;
use crate::doctor::proof::certificates::{api_service, served};
use crate::doctor::scheduler_checks::{ExpectedSettings, of_file, of_map};
use crate::doctor::table::*;
use crate::doctor::{admission, nodes, rights};
use wire::api::commands::Check;

/// What is looked at, and the rule.
type Rule = fn(&ClusterFacts, &CheckPlan<'_>) -> Found;

const RULES: [Rule; 25] = [
    |facts, _| Ok(namespaces(facts).into()),
    |facts, _| deployment("extender", &facts.parts.extender),
    led,
    |facts, _| Ok(facts.configured.clone()),
    |facts, _| rights::held(&facts.rights),
    own_scheduler,
    scheduler,
    |facts, _| nodes::agents(&facts.fleet),
    |facts, _| nodes::kubelets(&facts.fleet),
    |facts, _| nodes::ends(&facts.fleet),
    |facts, _| nodes::owners(&facts.fleet),
    |facts, _| mig_rights(&facts.fleet),
    |facts, _| monitors(&facts.monitors, &facts.fleet),
    |facts, _| upgrades(&facts.operator),
    |facts, plan| versions(plan.program, &images(&facts.parts, &facts.fleet)),
    |facts, _| runtime_classes(&facts.user_pods.runtime_classes, facts.config.as_ref()),
    |facts, _| start_failures(&facts.user_pods.events),
    |facts, _| quotas(&facts.user_pods.quotas),
    |facts, _| workload_classes(facts.config.as_ref(), &facts.user_pods.priority_classes),
    admission,
    dry_run,
    |facts, _| match facts.admission.trials {
        Some(_) => {
            admission::devices_policy(&facts.admission.devices_policy, facts.config.as_ref())
        }
        None => Ok(Findings::new()),
    },
    |facts, _| admission::compared(&facts.admission.policies),
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
        if plan.probes {
            step("what containers get, by a probe on each node");
            found.extend(probed(plan, &facts).await);
        }
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

/// Which replica leads, where there is an extender.
fn led(facts: &ClusterFacts, plan: &CheckPlan<'_>) -> Found {
    let DeployedParts { extender, extender_pods, .. } = &facts.parts;
    match extender {
        Ok(extender) => leader(extender, &facts.lease, extender_pods, plan.now_unix_seconds),
        Err(_) => Ok(Findings::new()),
    }
}

/// The Deployment of kube-scheduler, where its file is compared.
fn own_scheduler(facts: &ClusterFacts, plan: &CheckPlan<'_>) -> Found {
    let is_compared = facts.config.is_some() && plan.scheduler_file.is_none();
    match is_compared && facts.parts.scheduler.is_ok() {
        true => deployment("kube-scheduler for GPU pods", &facts.parts.scheduler),
        false => Ok(Findings::new()),
    }
}

fn scheduler(facts: &ClusterFacts, plan: &CheckPlan<'_>) -> Found {
    let config = facts.config.as_ref().ok_or_else(|| NOT_COMPARED.with([]))?;
    let mig_profiles = &facts.fleet.mig_profiles();
    let expected = ExpectedSettings { config, mig_profiles, service: &facts.service };
    match &plan.scheduler_file {
        Some(text) => of_file(text, &expected),
        None => of_map(&facts.parts.scheduler_file, &facts.parts.scheduler, &expected),
    }
}

/// Images of pods; where none is known, those of Deployments.
fn images<'a>(parts: &'a DeployedParts, fleet: &'a ClusterFleet) -> [Images<'a>; 3] {
    let extender = parts.extender_pods.iter().flatten().map(|pod| pod.image.as_str());
    let agents = fleet.pods.iter().flatten().map(|pod| pod.image.as_str());
    let parts = [
        ("extender", extender.collect::<Vec<_>>(), &parts.extender),
        ("webhook", Vec::new(), &parts.webhook),
        ("agents", agents.collect(), &fleet.daemon_set),
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
    let ClusterFacts { admission: AdmissionFacts { webhooks, trials, .. }, places, .. } = facts;
    let config = facts.config.as_ref();
    let there = facts.namespaces.as_ref().map(|all| all.keys().cloned().collect());
    let there = there.map_err(Clone::clone);
    let of_deployment = match trials.is_some() || facts.parts.webhook.is_ok() {
        true => lines(deployment("webhook", &facts.parts.webhook)),
        false => Findings::new(),
    };
    let own = [&*places.system, &*places.agents];
    let configured = lines(admission::configured(webhooks, config, &there, own));
    let all = webhooks.iter().filter(|_| trials.is_some());
    let unsent = all.zip(config).filter_map(|(all, config)| admission::templates(all, config));
    Ok(of_deployment.into_iter().chain(configured).chain(unsent).collect())
}

fn dry_run(facts: &ClusterFacts, plan: &CheckPlan<'_>) -> Found {
    let webhook = facts.admission.webhooks.iter().find_map(|all| admission::own(all));
    match (&facts.admission.trials, webhook) {
        (Some([good, bad]), Some(webhook)) => {
            let trials = admission::Trials { namespace: &plan.places.trial, good, bad };
            admission::dry_run(&trials, webhook, facts.config.as_ref())
        }
        _ => Ok(Findings::new()),
    }
}
