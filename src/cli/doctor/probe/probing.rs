//! Starts a probe on each node, waits for what it says, and removes it, also when the command is ended.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::StreamExt as _;
use kube_api::request::placement::{DRIVER_MEMORY, UUIDS};
use serde_json::Value;

use crate::base::reader::{ObjectPath, Reader, ReviewAnswer, Unread};
use crate::doctor::cluster_facts::{CheckPlan, ClusterFacts};
use crate::doctor::finding::Findings;
use crate::doctor::probe::probe_pod::{LABEL, probe_pod};
use crate::doctor::probe::verdict::{
    INTERRUPTED, NO_AGENTS, NOT_ALLOWED, Outcome, SILENT, verdicts,
};
use crate::doctor::rights::PODS;
use runtime::process::signals::stop_signal;
use wire::api::commands::SeenDevices;

/// Probes at a time.
const AT_ONCE: usize = 32;

/// How long the scheduler may take, and then the container with its image.
const PLACED_WITHIN: Duration = Duration::from_secs(20);
const ENDED_WITHIN: Duration = Duration::from_secs(60);

/// Between two looks at a pod.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A probe, of the pods of one namespace.
struct Probing<'a> {
    reader: &'a Reader,
    pods: ObjectPath,
}

/// Probes every node with GPUs.
pub(crate) async fn probed(plan: &CheckPlan<'_>, facts: &ClusterFacts) -> Findings {
    let Ok(agents) = &facts.fleet.daemon_set else { return vec![NO_AGENTS.with([])] };
    let config = facts.config.clone().unwrap_or_default();
    let probing = Probing { reader: plan.reader, pods: PODS.within(&facts.places.agents) };
    if let Err(why) = probing.swept().await {
        return vec![NOT_ALLOWED.with([&facts.places.agents, &why])];
    }
    let reporting = facts.fleet.reporting();
    let silent: Vec<&str> =
        facts.fleet.own().into_iter().filter(|name| !reporting.contains(name)).collect();
    let probes = reporting.into_iter().map(|node| {
        let pod = probe_pod(node, agents, &config);
        let probing = &probing;
        async move { (node.to_owned(), probing.outcome(&pod).await) }
    });
    let all = futures::stream::iter(probes).buffered(AT_ONCE).collect::<Vec<_>>();
    let found = match stop_signal() {
        Ok(stopped) => tokio::select! {
            outcomes = all => verdicts(&outcomes),
            () = stopped => vec![INTERRUPTED.with([])],
        },
        Err(_) => verdicts(&all.await),
    };
    // What a signal has left, or what could not be removed.
    let _left = probing.swept().await;
    found.into_iter().chain(SILENT.about(&silent)).collect()
}

impl Probing<'_> {
    /// Removes all probes, also those of a command that was killed.
    async fn swept(&self) -> Result<(), String> {
        let query = format!("&labelSelector={}%3Dtrue", LABEL.replace('/', "%2F"));
        let name = |pod: Value| pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let names = self.reader.list(&self.pods, &query, name).await.map_err(|why| words(&why))?;
        for name in names {
            self.removed(&name).await?;
        }
        Ok(())
    }

    async fn removed(&self, name: &str) -> Result<(), String> {
        match self.reader.delete(&self.pods.named(name)).await {
            Ok(()) | Err(Unread::Absent) => Ok(()),
            Err(why) => Err(words(&why)),
        }
    }

    /// Starts one, and removes it when it has ended.
    async fn outcome(&self, pod: &Value) -> Outcome {
        let created = match self.reader.create(&self.pods, pod).await {
            Ok(ReviewAnswer::Accepted(created)) => created,
            Ok(ReviewAnswer::Refused(why)) => return Outcome::NotAdmitted(why),
            Err(why) => return Outcome::Unknown(words(&why)),
        };
        let name = created["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let outcome = self.waited(&name).await;
        match self.removed(&name).await {
            Ok(()) => outcome,
            Err(why) => Outcome::Unknown(format!("pod {name} cannot be removed: {why}")),
        }
    }

    async fn waited(&self, name: &str) -> Outcome {
        let target = self.pods.named(name);
        let mut waited = Duration::ZERO;
        loop {
            let pod: Value = match self.reader.object(&target).await {
                Ok(pod) => pod,
                Err(why) => return Outcome::Unknown(words(&why)),
            };
            let is_placed = pod["spec"]["nodeName"].is_string();
            if let Some(outcome) = stuck(&pod) {
                return outcome;
            }
            if matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed")) {
                return seen(&pod);
            }
            if !is_placed && waited >= PLACED_WITHIN {
                return Outcome::NotPlaced(unplaced(&pod));
            }
            if waited >= ENDED_WITHIN {
                return Outcome::Unknown("the container has not ended within a minute".to_owned());
            }
            tokio::time::sleep(LOOK_EVERY).await;
            waited += LOOK_EVERY;
        }
    }
}

fn words(why: &Unread) -> String {
    match why {
        Unread::Absent => "not found".to_owned(),
        Unread::Forbidden(right) => format!("the right to {right}"),
        Unread::Failed(text) => text.clone(),
    }
}

/// Why the scheduler has not placed it.
fn unplaced(pod: &Value) -> String {
    let conditions = pod["status"]["conditions"].as_array();
    let mut all = conditions.into_iter().flatten().filter(|it| it["type"] == "PodScheduled");
    let said = all.find_map(|it| it["message"].as_str());
    said.unwrap_or("the scheduler has not looked at it").to_owned()
}

/// What its container waits for, if that does not end.
fn stuck(pod: &Value) -> Option<Outcome> {
    let status = &pod["status"]["containerStatuses"][0];
    let (state, ended) = (&status["state"]["waiting"], &status["state"]["terminated"]);
    let text = |state: &Value| state["message"].as_str().unwrap_or_default().to_owned();
    match (state["reason"].as_str(), ended["reason"].as_str()) {
        (Some("RunContainerError" | "CreateContainerError"), _) => {
            Some(Outcome::NotStarted(text(state)))
        }
        (_, Some("StartError" | "ContainerCannotRun")) => Some(Outcome::NotStarted(text(ended))),
        (Some(reason @ ("ErrImagePull" | "ImagePullBackOff" | "InvalidImageName")), _) => {
            Some(Outcome::Unknown(format!("{reason}: {}", text(state))))
        }
        _ => None,
    }
}

/// What it left in its status, and what the ledger held for it.
fn seen(pod: &Value) -> Outcome {
    let ended = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
    let text = ended["message"].as_str().unwrap_or_default();
    let Ok(seen) = serde_json::from_str::<SeenDevices>(text) else {
        let why = pod["status"]["message"].as_str().unwrap_or(text);
        return Outcome::Unknown(format!("it left nothing that can be read: {why}"));
    };
    let of = |key: &str| pod["metadata"]["annotations"][key].as_str().unwrap_or_default();
    let placed: BTreeSet<String> =
        of(UUIDS).split(',').filter(|uuid| !uuid.is_empty()).map(str::to_owned).collect();
    let env = pod["spec"]["containers"][0]["env"].as_array();
    let is_limited = env.into_iter().flatten().any(|it| it["name"] == "NVIDIA_GPU_MEMORY_LIMIT");
    let limit_mib = of(DRIVER_MEMORY).parse().ok().filter(|_| is_limited);
    Outcome::Seen { placed, limit_mib, seen }
}
