//! The pods that wait for a GPU: what they ask for, why they were refused, and what became of their last
//! touch.
//!
//! kube-scheduler looks again at a parked pod only when something it watches changes, and a freed GPU
//! is nothing it watches. So gpupack touches one waiting pod per freed room: the most important and
//! oldest one that fits there now, chosen in `requeue`. Its binding is an event that makes kube-scheduler
//! look at the others. What the pod's next question says about the node tells whether the touch helped.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::hardware::device::PodUid;
use crate::hardware::units::Timestamp;
use crate::ledger::query::questions::PlacementRequest;
use crate::ledger::suggest::requeue::{Arrival, AskedNodes, Candidate};
use crate::model::rejection::Rejection;
use crate::model::reservation::PodRef;

/// A pod known only from a verb, not from the watch, is dropped after this time: longer than any
/// delay of a watch, shorter than an operator's patience with memory.
const UNSEEN_FOR: Duration = Duration::from_secs(600);

/// Most pods that are remembered; beyond it new ones get no wake-up. 500 bytes each.
const MAX_WAITING: usize = 200_000;

/// Most pods that verbs mentioned and the watch does not show, be it that it is late: anyone can make them up.
const MAX_UNSEEN: usize = 4_096;

/// How long a touched pod's next question may take at least, and at most. kube-scheduler asks within some
/// milliseconds while it has nothing else to do; one with thousands of pods in its queue takes longer, and
/// how long it took for other pods tells.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(2));

/// A question that comes later after a touch has another cause. kube-scheduler goes through thousands of
/// pods in less.
const BUSY_FOR: Duration = Duration::from_secs(30);

/// Most memory for the nodes that pods were asked about, each set once. Pods beyond it may be requeued for
/// room on any node.
const ASKED_BYTES: usize = 16 << 20;

/// Sets from which those that no pod has any more are looked for.
const FEW_SETS: usize = 64;

/// Most times that room is held for a pod that is not bound, and the time within. kube-scheduler tries again after
/// seconds; then something else than GPUs is in the way, or another client asks in its place.
const MOST_HOLDS: (u32, Duration) = (5, Duration::from_secs(300));

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
    pub question: PlacementRequest,
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
    pub refused: Option<BTreeMap<Rejection, usize>>,
    /// The nodes of its last question; none while that is answered, and where there was none.
    pub(crate) asked: Option<Arc<AskedNodes>>,
    /// When that began.
    pub(crate) asked_at: Timestamp,
    /// Whether its last question, if there was one, is answered.
    pub(crate) is_answered: bool,
    pub(crate) touch: Option<Touch>,
    /// How often room was held for it, since when.
    holds: (u32, Timestamp),
    pub(crate) is_watched: bool,
    seen: Timestamp,
}

impl WaitingState {
    /// A pod that was never asked about.
    pub fn unasked(waiting: WaitingPod, now: Timestamp) -> Self {
        Self {
            waiting,
            refused: None,
            asked: None,
            asked_at: now,
            is_answered: true,
            touch: None,
            holds: (0, now),
            is_watched: false,
            seen: now,
        }
    }

    /// The closest misfit of its last question, with the number of nodes; none where it was not refused,
    /// or no node was asked about.
    pub fn closest(&self) -> Option<(Rejection, usize)> {
        let rejections =
            self.refused.iter().flatten().map(|(rejection, nodes)| (*rejection, *nodes));
        rejections.max_by_key(|(rejection, _)| rejection.closeness())
    }
}

/// A pod that changed, as one that can be requeued; none where it cannot.
pub type Change = (PodUid, Option<Candidate>);

/// All waiting pods.
#[derive(Default)]
pub struct WaitingPods {
    pods: Mutex<Pods>,
}

#[derive(Default)]
pub(crate) struct Pods {
    pub(crate) by_uid: BTreeMap<PodUid, WaitingState>,
    /// The pods that only verbs mentioned, the one that was mentioned the longest ago first.
    unseen: BTreeSet<(Timestamp, PodUid)>,
    /// Whether there is no watch, so that a pod that a verb mentions counts as shown.
    is_unwatched: bool,
    /// Refused before the watch showed them.
    pub(crate) late: BTreeSet<PodUid>,
    /// Pods that changed since whoever requeues them looked.
    changed: BTreeSet<PodUid>,
    /// Whether there were too many changes to remember: any pod may have changed.
    pub(crate) is_all_changed: bool,
    /// The nodes that pods were asked about, each set once.
    asked: BTreeSet<Arc<AskedNodes>>,
    /// How many sets there may be before those that are in use are counted again.
    sets_at_ease: usize,
    /// The longest time that the next question of touched pods took lately.
    slowest: Duration,
}

impl Pods {
    /// Notes that a pod changed.
    fn changed(&mut self, uid: &PodUid) {
        if self.changed.len() >= MAX_WAITING {
            self.changed.clear();
            self.is_all_changed = true;
        }
        if !self.is_all_changed {
            self.changed.insert(uid.clone());
        }
    }

    /// Lets `change` change a pod where it waits.
    pub(crate) fn change<T>(
        &mut self,
        uid: &PodUid,
        change: impl FnOnce(&mut WaitingState) -> T,
    ) -> Option<T> {
        let state = self.by_uid.get_mut(uid)?;
        let changed = change(state);
        if state.is_watched {
            self.changed(uid);
        }
        Some(changed)
    }

    /// Adds a pod. Where there are too many, the unseen one makes way that was mentioned the longest ago.
    fn add(&mut self, waiting: WaitingPod, now: Timestamp, is_watched: bool) {
        let are_many_unseen = !is_watched && self.unseen.len() >= MAX_UNSEEN;
        if are_many_unseen || self.by_uid.len() >= MAX_WAITING {
            let Some((_, oldest)) = self.unseen.pop_first() else { return };
            self.by_uid.remove(&oldest);
        }
        let uid = waiting.pod.uid.clone();
        if !is_watched {
            self.unseen.insert((now, uid.clone()));
        }
        let fresh = WaitingState { is_watched, ..WaitingState::unasked(waiting, now) };
        self.by_uid.insert(uid, fresh);
    }

    /// The same set of nodes, as other pods have it; none where there are too many.
    fn shared(&mut self, asked: AskedNodes) -> Option<Arc<AskedNodes>> {
        if let Some(known) = self.asked.get(&asked) {
            return Some(Arc::clone(known));
        }
        if self.asked.len() >= self.sets_at_ease.max(FEW_SETS) {
            self.asked.retain(|set| Arc::strong_count(set) > 1);
            self.sets_at_ease = 2 * self.asked.len();
        }
        if self.asked.len() >= ASKED_BYTES / asked.size() {
            return None;
        }
        let asked = Arc::new(asked);
        self.asked.insert(Arc::clone(&asked));
        Some(asked)
    }

    /// The pods that the watch shows.
    fn shown(&self) -> impl Iterator<Item = &WaitingState> {
        self.by_uid.values().filter(|state| state.is_watched)
    }

    pub(crate) fn patience(&self) -> Duration {
        (4 * self.slowest).clamp(PATIENCE.0, PATIENCE.1)
    }
}

impl WaitingPods {
    /// Those of a demo, where no watch shows any and verbs are all that there is.
    pub fn without_watch() -> Self {
        Self { pods: Mutex::new(Pods { is_unwatched: true, ..Pods::default() }) }
    }

    /// Notes a pending pod that the watch reports. Whether a verb has asked just this about it before, whose
    /// answer counts from now on.
    pub fn see(&self, waiting: WaitingPod, now: Timestamp) -> bool {
        let (pods, uid) = (&mut *self.pods(), waiting.pod.uid.clone());
        let Some(state) = pods.by_uid.get_mut(&uid) else {
            pods.add(waiting, now, true);
            return false;
        };
        let was_unseen = !std::mem::replace(&mut state.is_watched, true);
        let before = std::mem::replace(&mut state.seen, now);
        let is_asked = was_unseen && state.waiting.question == waiting.question;
        if was_unseen && !is_asked {
            (state.refused, state.asked) = (None, None);
        }
        let has_changed = state.waiting != waiting;
        let is_other = !was_unseen && state.waiting.question != waiting.question;
        state.waiting = waiting;
        if is_other {
            // kube-scheduler may have asked this already, before it was shown: its answer did not count.
            state.refused.get_or_insert_default();
            (state.asked, state.is_answered) = (None, true);
        }
        if is_other || (is_asked && state.refused.is_some()) {
            pods.late.insert(uid.clone());
        }
        if was_unseen {
            pods.unseen.remove(&(before, uid.clone()));
        }
        if was_unseen || has_changed {
            pods.changed(&uid);
        }
        is_asked
    }

    /// Notes a pod that a verb asks about, as refused until [`WaitingPods::fits`] says otherwise:
    /// room that appears while the question is answered must find it, wherever that is. Of a pod that the
    /// watch shows nothing is replaced by what a caller says, and another question about it counts for
    /// nothing.
    pub fn ask(&self, waiting: WaitingPod, now: Timestamp) {
        let (pods, uid) = (&mut *self.pods(), waiting.pod.uid.clone());
        match pods.by_uid.get_mut(&uid) {
            None => pods.add(waiting, now, pods.is_unwatched),
            Some(state) if state.is_watched && !pods.is_unwatched => {
                if state.waiting.question != waiting.question {
                    return;
                }
            }
            Some(state) => {
                let before = std::mem::replace(&mut state.seen, now);
                state.waiting = waiting;
                if pods.unseen.remove(&(before, uid.clone())) {
                    pods.unseen.insert((now, uid.clone()));
                }
            }
        }
        let touched = pods.change(&uid, |state| {
            state.refused.get_or_insert_default();
            (state.asked, state.asked_at, state.is_answered) = (None, now, false);
            let touch = state.touch.take()?;
            let (stage, sent) = match touch.stage {
                Stage::Sending => (Some(Stage::Asked(now)), None),
                Stage::Sent(at) => (Some(Stage::Asked(now)), Some(at)),
                Stage::Asked(at) => (Some(Stage::Asked(at)), None),
                Stage::Unanswered(at) => (None, Some(at)),
            };
            state.touch = stage.map(|stage| Touch { stage, ..touch });
            sent
        });
        if let Some(sent) = touched.flatten()
            && now.since(sent) < BUSY_FOR
        {
            pods.slowest = now.since(sent).min(PATIENCE.1).max(pods.slowest * 3 / 4);
        }
    }

    /// Counts that room is to be held for the pod. Answers whether it may be, as it was held few times lately.
    pub fn may_hold(&self, uid: &PodUid, now: Timestamp) -> bool {
        let pods = &mut *self.pods();
        pods.by_uid.get_mut(uid).is_none_or(|WaitingState { holds: (times, since), .. }| {
            if *times == 0 || now.since(*since) >= MOST_HOLDS.1 {
                (*times, *since) = (0, now);
            }
            *times = times.saturating_add(1);
            *times <= MOST_HOLDS.0
        })
    }

    /// Notes that at least one node fits the pod. Answers how its touch ended by that.
    pub fn fits(&self, uid: &PodUid) -> Option<Requeued> {
        let ended = self.pods().change(uid, |state| {
            (state.refused, state.is_answered) = (None, true);
            let is_asked = |touch: &mut Touch| matches!(touch.stage, Stage::Asked(_));
            state.touch.take_if(is_asked).map(|_| Requeued::Helped)
        });
        ended.flatten()
    }

    /// Notes why no node fitted, and which nodes were asked about: none where the question was only about
    /// the node that kube-scheduler has nominated the pod to, after which it asks about all. Answers how
    /// its touch ended by that.
    pub fn refuse(
        &self,
        uid: &PodUid,
        rejections: BTreeMap<Rejection, usize>,
        asked: Option<AskedNodes>,
    ) -> Option<Requeued> {
        let pods = &mut *self.pods();
        if !pods.by_uid.contains_key(uid) {
            return None;
        }
        let is_about_all = asked.is_some();
        let asked = asked.and_then(|asked| pods.shared(asked));
        let ended = pods.change(uid, |state| {
            state.refused = Some(rejections);
            (state.asked, state.is_answered) = (asked, true);
            let is_asked = |touch: &mut Touch| matches!(touch.stage, Stage::Asked(_));
            let touch = state.touch.take_if(|touch| is_about_all && is_asked(touch))?;
            let named = state.asked.as_ref().is_none_or(|asked| asked.may_have(touch.node));
            Some(if named { Requeued::Refused } else { Requeued::LeftOut })
        });
        ended.flatten()
    }

    /// Forgets a pod that is bound or gone.
    pub fn remove(&self, uid: &PodUid) {
        let pods = &mut *self.pods();
        pods.late.remove(uid);
        match pods.by_uid.remove(uid) {
            Some(state) if state.is_watched => pods.changed(uid),
            Some(state) => _ = pods.unseen.remove(&(state.seen, uid.clone())),
            None => {}
        }
    }

    /// Pods that changed since the last call, at most `most`, each as one that can be requeued or not; and
    /// whether these are all. `None` once where there were more changes than are remembered: then every pod
    /// is new to the caller.
    pub fn changes(&self, most: usize) -> Option<(Vec<Change>, bool)> {
        let pods = &mut *self.pods();
        if std::mem::take(&mut pods.is_all_changed) {
            pods.changed = pods.by_uid.keys().cloned().collect();
            return None;
        }
        let mut changes = Vec::new();
        while changes.len() < most
            && let Some(uid) = pods.changed.pop_first()
        {
            let candidate = pods.by_uid.get(&uid).and_then(WaitingState::candidate);
            changes.push((uid, candidate));
        }
        Some((changes, pods.changed.is_empty()))
    }

    /// Whether the pod is one of those that wait.
    pub fn has(&self, uid: &PodUid) -> bool {
        self.pods().by_uid.contains_key(uid)
    }

    /// How many pods are remembered, those included that the watch does not show.
    pub fn count(&self) -> usize {
        self.pods().by_uid.len()
    }

    /// The pod with this UID.
    pub fn pod(&self, uid: &PodUid) -> Option<WaitingState> {
        self.pods().by_uid.get(uid).cloned()
    }

    /// The pod with this namespace and name.
    pub fn named(&self, namespace: &str, name: &str) -> Option<WaitingState> {
        let pods = self.pods();
        let is_it = |state: &&WaitingState| {
            state.waiting.namespace == namespace && state.waiting.name == name
        };
        pods.shown().find(is_it).cloned()
    }

    /// All waiting pods that the watch shows, the most important and then oldest first.
    pub fn all(&self) -> Vec<WaitingState> {
        let mut all: Vec<_> = self.pods().shown().cloned().collect();
        all.sort_by(|a, b| order(&a.waiting).cmp(&order(&b.waiting)));
        all
    }

    /// Lets `look` see the same pods, in no order that means anything. They are held meanwhile.
    pub fn look_at_each(&self, look: impl FnMut(&WaitingState)) {
        self.pods().shown().for_each(look);
    }

    /// Pods that no node fitted last time.
    pub fn refused_count(&self) -> usize {
        self.pods().shown().filter(|state| state.refused.is_some()).count()
    }

    /// Pods that the watch never reported and no verb mentioned for long are dropped.
    pub fn tick(&self, now: Timestamp) {
        let pods = &mut *self.pods();
        let is_unwatched = pods.is_unwatched;
        let is_old = |state: &WaitingState| {
            (!state.is_watched || is_unwatched) && now.since(state.seen) >= UNSEEN_FOR
        };
        pods.unseen.retain(|(seen, _)| now.since(*seen) < UNSEEN_FOR);
        let old = pods.by_uid.extract_if(.., |_, state| is_old(state));
        let old: Vec<PodUid> = old.map(|(uid, _)| uid).collect();
        old.iter().for_each(|uid| pods.changed(uid));
    }

    pub(crate) fn pods(&self) -> MutexGuard<'_, Pods> {
        self.pods.lock()
    }
}

/// Smaller first: higher priority, then older, then by UID.
fn order(waiting: &WaitingPod) -> (std::cmp::Reverse<i32>, i64, &PodUid) {
    (std::cmp::Reverse(waiting.priority), waiting.created_unix_seconds, &waiting.pod.uid)
}

/// A touch whose question is still to come, or is being answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Touch {
    /// The node that had room for it.
    pub(crate) node: Arrival,
    pub(crate) stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The API server has not answered yet.
    Sending,
    /// Since then kube-scheduler has reason to ask about the pod.
    Sent(Timestamp),
    /// It asked for the first time after the touch, then.
    Asked(Timestamp),
    /// It did not ask in time: in-tree filters may leave no node, and a change that lets them makes
    /// kube-scheduler ask without us. Until it asks, another touch would be in vain.
    Unanswered(Timestamp),
}

/// How a touch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requeued {
    /// The next question found a node that fits.
    Helped,
    /// The next question named the node, and nothing fitted, there neither.
    Refused,
    /// The next question did not name the node.
    LeftOut,
    /// There was no question in time.
    Unanswered,
    /// The pod is gone.
    Gone,
}

/// Where a pod stands that was touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It is not one of those that wait.
    Gone,
    /// The touch is being written.
    Sending,
    /// Its question is to be expected, or to be answered, until then.
    Until(Timestamp),
    /// That did not happen in time.
    Late,
    /// A node fits; it has yet to be bound.
    Fits,
    /// It waits, and its last question began then.
    Waits {
        /// When.
        asked: Timestamp,
    },
}

#[cfg(test)]
mod tests;
