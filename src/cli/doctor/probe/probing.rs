//! Starts a probe on each node, waits for what it says, and removes it, also when the command is ended.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube_api::request::placement::{DRIVER_MEMORY, UUIDS};
use parking_lot::Mutex;
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

/// A pod that is this much older than one of this command is left over: the command that made it waits no longer. Its
/// container has ended by then, or ends within its own deadline once it runs.
const LEFT_AFTER: SignedDuration = SignedDuration::from_secs(120);

/// Between two looks at a pod.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A probe, of the pods of one namespace.
struct Probing<'a> {
    reader: &'a Reader,
    pods: ObjectPath,
    /// Whether it is to end.
    is_stopped: AtomicBool,
    /// When the API server created the newest one.
    newest: Mutex<Option<Timestamp>>,
}

/// A probe that was there before.
struct Earlier {
    name: String,
    created: Option<Timestamp>,
}

/// Probes every node with GPUs.
pub(crate) async fn probed(plan: &CheckPlan<'_>, facts: &ClusterFacts) -> Findings {
    let Ok(agents) = &facts.fleet.daemon_set else { return vec![NO_AGENTS.with([])] };
    let config = facts.config.clone().unwrap_or_default();
    let probing = Probing {
        reader: plan.reader,
        pods: PODS.within(&facts.places.agents),
        is_stopped: AtomicBool::new(false),
        newest: Mutex::default(),
    };
    let earlier = match probing.earlier().await {
        Ok(earlier) => earlier,
        Err(why) => return vec![NOT_ALLOWED.with([&facts.places.agents, &why])],
    };
    let reporting = facts.fleet.reporting();
    let silent: Vec<&str> =
        facts.fleet.own().into_iter().filter(|name| !reporting.contains(name)).collect();
    let probes = reporting.into_iter().map(|node| {
        let pod = probe_pod(node, agents, &config);
        let probing = &probing;
        async move { (node.to_owned(), probing.outcome(&pod).await) }
    });
    let mut all =
        std::pin::pin!(futures::stream::iter(probes).buffered(AT_ONCE).collect::<Vec<_>>());
    let found = match stop_signal() {
        Ok(stopped) => tokio::select! {
            outcomes = &mut all => verdicts(&outcomes),
            () = stopped => {
                probing.is_stopped.store(true, Ordering::Relaxed);
                let _removed = all.await; // each removes its pod
                vec![INTERRUPTED.with([])]
            }
        },
        Err(_) => verdicts(&all.await),
    };
    let newest = *probing.newest.lock();
    for name in newest.map(|newest| left_over(&earlier, newest)).unwrap_or_default() {
        let _left = probing.removed(name).await; // the next one tries again
    }
    found.into_iter().chain(SILENT.about(&silent)).collect()
}

impl Probing<'_> {
    /// The probes that are there: of commands that run now, and of those that were killed.
    async fn earlier(&self) -> Result<Vec<Earlier>, String> {
        let query = format!("&labelSelector={}%3Dtrue", LABEL.replace('/', "%2F"));
        let probe = |pod: Value| Earlier {
            name: pod["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
            created: created(&pod),
        };
        self.reader.list(&self.pods, &query, probe).await.map_err(|why| words(&why))
    }

    async fn removed(&self, name: &str) -> Result<(), String> {
        match self.reader.delete(&self.pods.named(name)).await {
            Ok(()) | Err(Unread::Absent) => Ok(()),
            Err(why) => Err(words(&why)),
        }
    }

    /// Starts one, and removes it when it has ended.
    async fn outcome(&self, pod: &Value) -> Outcome {
        if self.is_stopped.load(Ordering::Relaxed) {
            return Outcome::Unknown("interrupted".to_owned());
        }
        let pod = match self.reader.create(&self.pods, pod).await {
            Ok(ReviewAnswer::Accepted(pod)) => pod,
            Ok(ReviewAnswer::Refused(why)) => return Outcome::NotAdmitted(why),
            Err(why) => return Outcome::Unknown(words(&why)),
        };
        let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        {
            let mut newest = self.newest.lock();
            *newest = (*newest).max(created(&pod));
        }
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
            if self.is_stopped.load(Ordering::Relaxed) {
                return Outcome::Unknown("interrupted".to_owned());
            }
            if waited >= ENDED_WITHIN {
                return Outcome::Unknown("the container has not ended within a minute".to_owned());
            }
            tokio::time::sleep(LOOK_EVERY).await;
            waited += LOOK_EVERY;
        }
    }
}

/// When the API server created a pod.
fn created(pod: &Value) -> Option<Timestamp> {
    pod["metadata"]["creationTimestamp"].as_str()?.parse().ok()
}

/// The names of those that no command waits for any more. Both times are of the API server: this machine's clock may
/// be another.
fn left_over(earlier: &[Earlier], newest: Timestamp) -> Vec<&str> {
    let is_left = |it: &&Earlier| {
        it.created.is_some_and(|created| newest.duration_since(created) > LEFT_AFTER)
    };
    earlier.iter().filter(is_left).map(|it| &*it.name).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_of_a_command_that_may_still_wait_is_left_alone() {
        let earlier = [
            ("old", "2026-01-01T00:00:00Z"),
            ("running", "2026-01-01T00:02:01Z"),
            ("later", "2026-01-01T00:05:00Z"),
            ("odd", "yesterday"),
        ];
        let earlier = earlier.map(|(name, at)| {
            let pod = serde_json::json!({"metadata": {"creationTimestamp": at}});
            Earlier { name: name.to_owned(), created: created(&pod) }
        });
        let newest = "2026-01-01T00:04:00Z".parse().unwrap();
        assert_eq!(left_over(&earlier, newest), ["old"]);
    }
}
