//! A stage whose pods take their time to end, and what is measured of kept room there: how long a pod
//! waits, how many others are evicted, and how long GPUs are idle meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::binaries;
use crate::clock;
use crate::cluster::Cluster;
use crate::manifests::{self, Mode};
use crate::testbed::Stage;
use crate::watching::{Pods, find, is_bound};

/// How often the scene looks at its pods.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// A stage, and the kubelet of all its nodes: a pod that is asked to go is gone some time later.
pub(crate) struct Scene {
    /// What is played on.
    pub(crate) stage: Stage,
    /// How long pods take to end.
    takes: Duration,
    /// Pods that never end.
    hung: BTreeSet<String>,
    /// When each pod was asked to go, by name.
    asked: BTreeMap<String, Instant>,
}

impl Scene {
    /// A scene where gpupack may evict pods, with the classes `e2e-high` and `e2e-low`.
    pub(crate) async fn new(stage: Stage, takes: Duration) -> Self {
        manifests::apply(&stage.cluster.client, "evict.yaml", Mode::Keep).await;
        for (name, value) in [("e2e-high", 1_000), ("e2e-low", 10)] {
            stage.cluster.add_priority_class(name, value).await;
        }
        Self { stage, takes, hung: BTreeSet::new(), asked: BTreeMap::new() }
    }

    /// The same where pods take this long to end.
    pub(crate) fn ending_after(self, takes: Duration) -> Self {
        Self { takes, ..self }
    }

    /// From now on this pod never ends.
    pub(crate) fn hang(&mut self, pod: &str) {
        self.hung.insert(pod.to_owned());
    }

    /// Ends the pods whose time has come. Takes a moment.
    pub(crate) async fn step(&mut self) {
        let now = clock::now();
        let leaving: Vec<(String, String)> = self.stage.watching.ask(|pods| {
            let asked = pods.values().filter(|seen| {
                seen.gone.is_none() && seen.pod.metadata.deletion_timestamp.is_some()
            });
            let name = |text: &Option<String>| text.clone().unwrap_or_default();
            asked
                .map(|seen| (name(&seen.pod.metadata.namespace), name(&seen.pod.metadata.name)))
                .collect()
        });
        for (namespace, name) in leaving {
            let asked = *self.asked.entry(name.clone()).or_insert(now);
            if !self.hung.contains(&name) && now - asked >= self.takes {
                Cluster { namespace, ..self.stage.cluster.clone() }.delete_pod(&name).await;
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }

    /// Plays on for this long.
    pub(crate) async fn play(&mut self, time: Duration) {
        let started = clock::now();
        while started.elapsed() < time {
            self.step().await;
        }
    }

    /// Plays on until `query` answers true, at most this long. Returns whether it did.
    pub(crate) async fn until(&mut self, limit: Duration, query: impl Fn(&Pods) -> bool) -> bool {
        let started = clock::now();
        while started.elapsed() < limit {
            if self.stage.watching.ask(&query) {
                return true;
            }
            self.step().await;
        }
        false
    }

    /// The same until all of these pods are bound.
    pub(crate) async fn until_bound(&mut self, names: &[&str], limit: Duration) -> bool {
        self.until(limit, |pods| names.iter().all(|name| is_bound(pods, name))).await
    }

    /// Plays on until a pod has a standing hold.
    ///
    /// # Panics
    ///
    /// When none has one after a minute.
    pub(crate) async fn until_kept(&mut self) {
        let started = clock::now();
        while self.stage.extender.metric("gpupack_standing_holds", "").await < 1.0 {
            assert!(started.elapsed() < Duration::from_secs(60), "no room is kept");
            self.step().await;
        }
    }

    /// How long after `since` the pod was bound.
    pub(crate) fn bound_after(&self, name: &str, since: Instant) -> Option<Duration> {
        let bound = self.stage.watching.ask(|pods| find(pods, name).and_then(|seen| seen.bound));
        bound.map(|bound| bound.saturating_duration_since(since))
    }

    /// How long after `since` the pod was asked to go.
    pub(crate) fn asked_after(&self, name: &str, since: Instant) -> Option<Duration> {
        self.asked.get(name).map(|asked| asked.saturating_duration_since(since))
    }

    /// Pods that were asked to go since then, in that order.
    pub(crate) fn asked_since(&self, since: Instant) -> Vec<String> {
        let mut asked: Vec<_> = self.asked.iter().filter(|(_, at)| **at >= since).collect();
        asked.sort_by_key(|(_, at)| **at);
        asked.into_iter().map(|(name, _)| name.clone()).collect()
    }

    /// For how many seconds since then GPUs had no pod, summed over the GPUs of all nodes.
    pub(crate) fn idle(&self, since: Instant) -> f64 {
        self.idle_without("", since)
    }

    /// The same without this node.
    pub(crate) fn idle_without(&self, left_out: &str, since: Instant) -> f64 {
        let now = clock::now();
        let nodes = self.stage.fleet.nodes.iter().filter(|node| node.name != left_out);
        let uuids = nodes.flat_map(|node| &node.gpus);
        self.stage
            .watching
            .ask(|pods| uuids.map(|gpu| idle_of(pods, &gpu.uuid, since, now).as_secs_f64()).sum())
    }

    /// Prints a line of the table.
    pub(crate) fn row(&self, what: &str, bound: Option<Duration>, evictions: usize, idle: f64) {
        let bound = seconds(bound);
        self.stage.figure(&format!(
            "{what:<44} bound {bound:>7} s   evictions {evictions:>2}   GPU idle {idle:>6.1} s"
        ));
    }
}

/// Seconds with one decimal, or `never`.
pub(crate) fn seconds(time: Option<Duration>) -> String {
    time.map_or_else(|| "never".to_owned(), |time| format!("{:.2}", time.as_secs_f64()))
}

/// For how long no pod had this GPU.
fn idle_of(pods: &Pods, uuid: &str, since: Instant, now: Instant) -> Duration {
    let on = pods.values().filter(|seen| seen.devices().contains(&uuid));
    let mut spans: Vec<(Instant, Instant)> = on
        .filter_map(|seen| Some((seen.bound?.max(since), seen.gone.unwrap_or(now).min(now))))
        .collect();
    spans.sort_unstable();
    let (mut idle, mut until) = (Duration::ZERO, since);
    for (from, to) in spans {
        idle += from.saturating_duration_since(until);
        until = until.max(to);
    }
    idle + now.saturating_duration_since(until)
}

/// Whether scenarios run that take minutes, or show in another way what a shorter one shows.
pub(crate) fn is_long() -> bool {
    clock::variable("GPUPACK_KEPT_ROOM").is_some_and(|value| value == "long")
}

/// The same of one scenario, which says so if it does not run.
pub(crate) fn runs(name: &str) -> bool {
    if !is_long() {
        binaries::say(&format!("skipped: {name} because GPUPACK_KEPT_ROOM is not `long`"));
    }
    is_long()
}
