//! The pods that wait for a GPU: what they ask for, why they were refused, and which of them to wake
//! when room appears.
//!
//! kube-scheduler looks again at a parked pod only when something it watches changes, and a freed GPU
//! is nothing it watches. So gpupack touches one waiting pod per freed room: the most important and
//! oldest one that fits there now. Its binding is an event that makes kube-scheduler look at the
//! others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use super::books::{Ledger, locked};
use super::questions::Question;
use crate::packing::device::{NodeName, PodUid};
use crate::packing::fit::Misfit;
use crate::packing::reservation::PodRef;
use crate::packing::units::Timestamp;

/// A pod that was woken is not woken again for this long: kube-scheduler takes some milliseconds to
/// ask about it, and a second later it has certainly asked or never will.
const WAKE_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// A pod known only from a verb, not from the watch, is dropped after this time: longer than any
/// delay of a watch, shorter than an operator's patience with memory.
const UNSEEN_FOR: Duration = Duration::from_secs(600);

/// Most pods that are remembered; beyond it new ones get no wake-up. 500 bytes each.
const MAX_WAITING: usize = 200_000;

/// A pod without a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingPod {
    /// The pod.
    pub pod: PodRef,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// What is asked about it.
    pub question: Question,
    /// Its priority; the larger the more important.
    pub priority: i32,
    /// When it was created, in seconds since 1970.
    pub created_unix_seconds: i64,
}

/// A waiting pod and what became of its last question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingState {
    /// The pod.
    pub waiting: WaitingPod,
    /// The misfits of its last question with the number of nodes, when no node fitted.
    pub refused: Option<BTreeMap<Misfit, usize>>,
    is_watched: bool,
    seen: Timestamp,
    woken: Option<Timestamp>,
}

impl WaitingState {
    /// The closest misfit of its last question, with the number of nodes; none where it was not refused,
    /// or no node was asked about.
    pub fn closest(&self) -> Option<(Misfit, usize)> {
        let misfits = self.refused.iter().flatten().map(|(misfit, nodes)| (*misfit, *nodes));
        misfits.max_by_key(|(misfit, _)| misfit.closeness())
    }
}

/// Whom to wake for room that appeared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wake {
    /// This pod, now.
    Pod(Box<WaitingPod>),
    /// Nobody before then: whoever fits was woken a moment ago for other room.
    Later(Timestamp),
    /// Nobody who waits fits there.
    Nobody,
}

/// All waiting pods.
#[derive(Default)]
pub struct WaitingPods {
    pods: Mutex<BTreeMap<PodUid, WaitingState>>,
}

impl WaitingPods {
    /// Notes a pending pod that the watch reports.
    pub fn see(&self, waiting: WaitingPod, now: Timestamp) {
        self.note(waiting, now, true);
    }

    /// Notes a pod that a verb asks about, as refused until [`WaitingPods::fits`] says otherwise:
    /// room that appears while the question is answered must find it.
    pub fn ask(&self, waiting: WaitingPod, now: Timestamp) {
        let uid = waiting.pod.uid.clone();
        self.note(waiting, now, false);
        if let Some(state) = self.pods().get_mut(&uid) {
            state.refused.get_or_insert_default();
        }
    }

    fn note(&self, waiting: WaitingPod, now: Timestamp, is_watched: bool) {
        let mut pods = self.pods();
        let is_full = pods.len() >= MAX_WAITING;
        match pods.get_mut(&waiting.pod.uid) {
            Some(state) => {
                state.waiting = waiting;
                state.seen = now;
                state.is_watched |= is_watched;
            }
            None if is_full => {}
            None => {
                let uid = waiting.pod.uid.clone();
                let fresh =
                    WaitingState { waiting, refused: None, is_watched, seen: now, woken: None };
                pods.insert(uid, fresh);
            }
        }
    }

    /// Notes that at least one node fits the pod.
    pub fn fits(&self, uid: &PodUid) {
        if let Some(state) = self.pods().get_mut(uid) {
            state.refused = None;
        }
    }

    /// Notes why no node fitted.
    pub fn refuse(&self, uid: &PodUid, misfits: BTreeMap<Misfit, usize>) {
        if let Some(state) = self.pods().get_mut(uid) {
            state.refused = Some(misfits);
        }
    }

    /// Forgets a pod that is bound or gone.
    pub fn remove(&self, uid: &PodUid) {
        self.pods().remove(uid);
    }

    /// Whether the pod is one of those that wait.
    pub fn has(&self, uid: &PodUid) -> bool {
        self.pods().contains_key(uid)
    }

    /// The pod with this UID.
    pub fn pod(&self, uid: &PodUid) -> Option<WaitingState> {
        self.pods().get(uid).cloned()
    }

    /// The pod with this namespace and name.
    pub fn named(&self, namespace: &str, name: &str) -> Option<WaitingState> {
        let pods = self.pods();
        let is_it = |state: &&WaitingState| {
            state.waiting.namespace == namespace && state.waiting.name == name
        };
        pods.values().find(is_it).cloned()
    }

    /// All waiting pods, the most important and then oldest first.
    pub fn all(&self) -> Vec<WaitingState> {
        let mut all: Vec<_> = self.pods().values().cloned().collect();
        all.sort_by(|a, b| order(&a.waiting).cmp(&order(&b.waiting)));
        all
    }

    /// Lets `look` see all waiting pods, in no order that means anything. They are held meanwhile.
    pub fn look_at_each(&self, look: impl FnMut(&WaitingState)) {
        self.pods().values().for_each(look);
    }

    /// Pods that no node fitted last time.
    pub fn refused_count(&self) -> usize {
        self.pods().values().filter(|state| state.refused.is_some()).count()
    }

    /// Pods that the watch never reported and no verb mentioned for long are dropped.
    pub fn tick(&self, now: Timestamp) {
        self.pods().retain(|_, state| state.is_watched || now.since(state.seen) < UNSEEN_FOR);
    }

    /// The pod to wake now that room appeared on `node`: the first refused pod that fits there and
    /// was not `tried` for that room yet. One that was woken a moment ago, for room elsewhere, is
    /// left to take that; where it alone fits, it is woken again if it does not.
    pub fn to_wake(
        &self,
        ledger: &Ledger,
        node: &NodeName,
        tried: &BTreeSet<PodUid>,
        now: Timestamp,
    ) -> Wake {
        let mut refused: Vec<(WaitingPod, Option<Timestamp>)> = self
            .pods()
            .values()
            .filter(|state| state.refused.is_some())
            .filter(|state| !tried.contains(&state.waiting.pod.uid))
            .map(|state| (state.waiting.clone(), state.woken))
            .collect();
        refused.sort_by(|(a, _), (b, _)| order(a).cmp(&order(b)));
        let mut known: BTreeMap<Question, bool> = BTreeMap::new();
        let mut fits = |question: &Question| {
            *known.entry(question.clone()).or_insert_with(|| {
                ledger.answers(question, &[node.as_str()]).iter().all(Result::is_ok)
            })
        };
        let mut later: Option<Timestamp> = None;
        for (waiting, woken) in refused.into_iter().filter(|(waiting, _)| fits(&waiting.question)) {
            let again = woken.map(|woken| woken.plus(WAKE_AGAIN_AFTER)).filter(|at| *at > now);
            if again.is_some() {
                later = later.min(again).or(again);
                continue;
            }
            if let Some(state) = self.pods().get_mut(&waiting.pod.uid) {
                state.woken = Some(now);
            }
            return Wake::Pod(Box::new(waiting));
        }
        later.map_or(Wake::Nobody, Wake::Later)
    }

    fn pods(&self) -> MutexGuard<'_, BTreeMap<PodUid, WaitingState>> {
        locked(&self.pods)
    }
}

/// Smaller first: higher priority, then older, then by UID.
fn order(waiting: &WaitingPod) -> (std::cmp::Reverse<i32>, i64, &PodUid) {
    (std::cmp::Reverse(waiting.priority), waiting.created_unix_seconds, &waiting.pod.uid)
}
