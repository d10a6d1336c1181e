//! The judge at every pod event, and everything the scenarios wait for.
//!
//! A watch of all pods, from before the first pod to the end of the scenario. After each event the
//! devices of its pod are summed up again, so that "at no moment above capacity" is what is tested, as far as
//! the API server sends its history.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::checker::{self, Load, Tenancy};
use crate::clock;
use crate::fleet::Fleet;

/// The pause after a failure of the watch: short, since nothing is judged meanwhile.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// A pod as the watch showed it last, and when it showed each state first.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// The last version; of a deleted pod, the one before.
    pub(crate) pod: Pod,
    /// First seen.
    pub(crate) created: Instant,
    /// First seen with a node.
    pub(crate) bound: Option<Instant>,
    /// The watch showed its deletion.
    pub(crate) gone: Option<Instant>,
    tenancy: Option<Tenancy>,
}

impl Seen {
    /// UUIDs of the devices, once placed.
    pub(crate) fn devices(&self) -> Vec<&str> {
        self.tenancy.iter().flat_map(|t| &t.uses).map(|used| used.device.as_str()).collect()
    }
}

/// Every pod that the watch showed, by name; a later pod of the same name replaces a deleted one.
pub(crate) type Pods = BTreeMap<String, Seen>;

#[derive(Debug, Default)]
struct History {
    pods: Pods,
    faults: Vec<String>,
    events: usize,
    /// Whether the API server may go away: then what happens meanwhile is not judged.
    may_break: bool,
}

/// The running watch.
pub(crate) struct Watching {
    history: Arc<Mutex<History>>,
    changes: watch::Receiver<usize>,
    task: JoinHandle<()>,
}

impl Watching {
    /// Starts the watch, and waits until it has its first list.
    pub(crate) async fn start(client: Client, fleet: Fleet) -> Self {
        Self::start_with(client, fleet, History::default()).await
    }

    /// The same where the API server may go away for a while.
    pub(crate) async fn start_unsteady(client: Client, fleet: Fleet) -> Self {
        Self::start_with(client, fleet, History { may_break: true, ..History::default() }).await
    }

    async fn start_with(client: Client, fleet: Fleet, history: History) -> Self {
        let history = Arc::new(Mutex::new(history));
        let (reported, mut changes) = watch::channel(0);
        let task = tokio::spawn(follow(client, fleet, Arc::clone(&history), reported));
        changes.wait_for(|events| *events > 1).await.expect("the watch can be started");
        Self { history, changes, task }
    }

    /// What `query` answers about the pods as they are now.
    pub(crate) fn ask<T>(&self, query: impl FnOnce(&Pods) -> T) -> T {
        query(&self.locked().pods)
    }

    /// Waits until `query` answers true. Fails at the limit, saying `what` did not happen.
    pub(crate) async fn until(
        &self,
        what: &str,
        limit: Duration,
        query: impl Fn(&Pods) -> bool,
    ) -> Duration {
        let started = clock::now();
        let mut changes = self.changes.clone();
        let happened = async {
            while !self.ask(&query) {
                changes.changed().await.expect("the watch runs as long as the scenario");
            }
        };
        if tokio::time::timeout(limit, happened).await.is_err() {
            panic!("not within {limit:?}: {what}; {}", self.ask(summary));
        }
        started.elapsed()
    }

    /// Waits until that many pods are bound.
    pub(crate) async fn until_bound(&self, count: usize, limit: Duration) -> Duration {
        self.until(&format!("{count} pods bound"), limit, |pods| bound(pods) >= count).await
    }

    /// Load of each device by the placements of bound pods.
    pub(crate) fn load(&self) -> Load {
        self.ask(load)
    }

    /// Forgets pods that are gone, so that a long scenario does not walk over them at each event.
    pub(crate) fn forget_gone(&self) {
        self.locked().pods.retain(|_, seen| seen.gone.is_none());
    }

    /// The verdict: how many events were judged.
    ///
    /// # Panics
    ///
    /// When any of them showed a fault.
    pub(crate) fn verdict(&self) -> usize {
        let history = self.locked();
        assert!(history.faults.is_empty(), "the checker found:\n{}", history.faults.join("\n"));
        history.events
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Load of each device by the placements of bound pods.
pub(crate) fn load(pods: &Pods) -> Load {
    checker::load(living(pods))
}

/// What kube-scheduler says of a pod that waits.
pub(crate) fn reason(seen: &Seen) -> String {
    let conditions = seen.pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().filter_map(|condition| condition.message.as_deref()).collect()
}

/// Bound pods that are not gone.
pub(crate) fn bound(pods: &Pods) -> usize {
    pods.values().filter(|seen| seen.bound.is_some() && seen.gone.is_none()).count()
}

/// Names of the pods that are gone or on their way, for scenarios that delete none that they count.
pub(crate) fn evicted(pods: &Pods) -> Vec<String> {
    let is_evicted =
        |seen: &Seen| seen.gone.is_some() || seen.pod.metadata.deletion_timestamp.is_some();
    let names = pods.iter().filter(|(_, seen)| is_evicted(seen)).map(|(name, _)| name);
    names.map(|name| name.rsplit('/').next().unwrap_or_default().to_owned()).collect()
}

/// Whether the pod of that name (without namespace) is bound.
pub(crate) fn is_bound(pods: &Pods, name: &str) -> bool {
    find(pods, name).is_some_and(|seen| seen.bound.is_some())
}

/// The pod of that name, without its namespace.
pub(crate) fn find<'a>(pods: &'a Pods, name: &str) -> Option<&'a Seen> {
    pods.values().find(|seen| seen.pod.metadata.name.as_deref() == Some(name))
}

fn living(pods: &Pods) -> impl Iterator<Item = &Tenancy> {
    pods.values().filter(|seen| seen.gone.is_none()).filter_map(|seen| seen.tenancy.as_ref())
}

/// For messages: how many pods exist, and which wait, with the scheduler's reason.
fn summary(pods: &Pods) -> String {
    let waits = |seen: &&Seen| seen.bound.is_none() && seen.gone.is_none();
    let waiting: Vec<String> = pods
        .values()
        .filter(waits)
        .take(10)
        .map(|seen| format!("{}: {}", checker::full_name(&seen.pod), reason(seen)))
        .collect();
    let count = pods.values().filter(waits).count();
    format!("{} bound, {count} waiting: {waiting:#?}", bound(pods))
}

async fn follow(
    client: Client,
    fleet: Fleet,
    history: Arc<Mutex<History>>,
    reported: watch::Sender<usize>,
) {
    let stream = watcher::watcher(Api::<Pod>::all(client), watcher::Config::default());
    let mut stream = stream.boxed();
    let mut listed: Vec<String> = Vec::new();
    while let Some(event) = stream.next().await {
        if event.is_err() {
            tokio::time::sleep(AGAIN_AFTER).await;
        }
        let mut history = history.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Ok(Event::Init) => {
                listed.clear();
                history.begin_again();
            }
            Ok(Event::InitApply(pod)) => {
                listed.push(checker::full_name(&pod));
                history.apply(pod, &fleet);
            }
            Ok(Event::InitDone) => history.keep(&listed),
            Ok(Event::Apply(pod)) => history.apply(pod, &fleet),
            Ok(Event::Delete(pod)) => history.delete(&checker::full_name(&pod)),
            Err(_) if history.may_break => {}
            Err(error) => history.faults.push(format!("the watch broke: {error}")),
        }
        history.events += 1;
        reported.send_replace(history.events);
    }
}

impl History {
    fn apply(&mut self, pod: Pod, fleet: &Fleet) {
        let name = checker::full_name(&pod);
        let tenancy = checker::tenancy(&pod, fleet).unwrap_or_else(|fault| {
            self.faults.push(fault);
            None
        });
        let now = clock::now();
        let is_bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        let same = self.pods.get(&name).filter(|seen| seen.pod.metadata.uid == pod.metadata.uid);
        let created = same.map_or(now, |seen| seen.created);
        let bound = same.and_then(|seen| seen.bound).or_else(|| is_bound.then_some(now));
        if let Some(moved) = same.filter(|s| s.tenancy.is_some() && s.tenancy != tenancy) {
            // It may end, and a pod that runs elsewhere may go home, or stay there for good.
            let is_move = |from: &Tenancy, to: &Tenancy| {
                *to == from.at_home() || *from == to.at_home() || to.uses == from.uses
            };
            let is_known = moved.tenancy.as_ref().zip(tenancy.as_ref());
            if is_known.is_some_and(|(from, to)| !is_move(from, to)) {
                self.faults.push(format!("{name} moved from {:?} to {tenancy:?}", moved.tenancy));
            }
        }
        let seen = Seen { pod, created, bound, gone: None, tenancy };
        self.pods.insert(name.clone(), seen);
        self.judge(&name, fleet);
    }

    /// A list begins: what it does not show has gone meanwhile.
    fn begin_again(&mut self) {
        if self.may_break {
            let now = clock::now();
            self.pods.values_mut().for_each(|seen| _ = seen.gone.get_or_insert(now));
        }
    }

    fn delete(&mut self, name: &str) {
        if let Some(seen) = self.pods.get_mut(name) {
            seen.gone = Some(clock::now());
        }
    }

    /// After a new list: pods that are not in it are gone.
    fn keep(&mut self, listed: &[String]) {
        for (name, seen) in &mut self.pods {
            if seen.gone.is_none() && !listed.contains(name) {
                seen.gone = Some(clock::now());
            }
        }
    }

    /// Sums up the devices of one pod: no other can have got more load by its change.
    fn judge(&mut self, name: &str, fleet: &Fleet) {
        let changed = self.pods.get(name).and_then(|seen| seen.tenancy.as_ref());
        let Some(changed) = changed else { return };
        let is_on = |device: &str| changed.uses.iter().any(|used| used.device == device);
        let beside = |other: &&Tenancy| other.uses.iter().any(|used| is_on(&used.device));
        let overloads = checker::overloads(living(&self.pods).filter(beside), fleet);
        self.faults.extend(overloads);
        if changed.home.is_some() {
            let at_home: Vec<Tenancy> = living(&self.pods).map(Tenancy::at_home).collect();
            self.faults.extend(checker::overloads(&at_home, fleet));
        }
    }
}
