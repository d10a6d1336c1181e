//! The pods that wait for a GPU: their requests, why they were refused, and the result of their
//! last requeue.
//!
//! kube-scheduler looks again at a parked pod only when something that it watches changes. A freed
//! GPU is nothing that it watches. So gpupack requeues one waiting pod per freed room: the most
//! important and oldest one that fits there, chosen in `requeue`. Its binding is an event that
//! makes kube-scheduler look at the others. The pod's next call shows whether the requeue helped.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::suggest::requeue::{Arrival, Candidate, NamedNodes, is_candidate};
use crate::model::device_state::HoldRule;
use crate::model::rejection::Rejection;
use crate::model::request::PodGroup;
use crate::model::reservation::{Controller, PodRef};
use crate::scoring::plan;
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// A pod that only a verb mentioned is dropped after this time: longer than any delay of a watch,
/// short enough to save memory.
const UNSEEN_FOR: Duration = Duration::from_secs(600);

/// Most pods that are remembered, 500 bytes each; new ones beyond it get no requeue.
const MAX_WAITING: usize = 200_000;

/// Most pods that verbs mentioned and the watch does not show yet: any client can make them up.
const MAX_UNSEEN: usize = 4_096;

/// Least and most time for the next call of a requeued pod. An idle kube-scheduler calls within
/// milliseconds; one with thousands of pods in its queue takes longer. The time that other pods
/// needed gives the value between.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(2));

/// A call that comes later after a requeue has another cause. kube-scheduler needs less for
/// thousands of pods.
const BUSY_FOR: Duration = Duration::from_secs(30);

/// Most memory for the nodes that calls named, each set once. Pods beyond it may be requeued for
/// room on any node.
const NAMED_BYTES: usize = 16 << 20;

/// A pod that fits and is not bound within this time is requeued for room again: another client may
/// have called in its name. kube-scheduler calls *bind* within milliseconds, or after its own plugins.
const UNBOUND_FOR: Duration = Duration::from_secs(10);

/// The number of sets from which unused ones are removed.
const FEW_SETS: usize = 64;

/// Pods that one look at all of them locks at a time.
const LOOKED_AT_ONCE: usize = 64;

/// How long room is held for a pod that is not bound, however often calls name it: a trial of a whole group
/// names each of its pods many times before the first bind. After that something else prevents the bind, or
/// another client calls in its name.
const HELD_FREELY: Duration = Duration::from_secs(10);

/// When room is held for it freely again.
const HELD_AGAIN_AFTER: Duration = Duration::from_secs(300);

/// A pod without a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingPod {
    /// The pod.
    pub pod: PodRef,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// What it requests.
    pub query: PlacementRequest,
    /// Its priority; the larger the more important.
    pub priority: i32,
    /// Whether less important pods may be evicted for it.
    pub may_preempt: bool,
    /// When it was created, in seconds since 1970.
    pub created_unix_seconds: i64,
    /// What made it, if a controller did.
    pub controller: Option<Controller>,
    /// The pods of its namespace with which it starts.
    pub group: Option<PodGroup>,
    /// Differs after an edit of its metadata by others, and after a new condition of kube-scheduler.
    pub edition: u64,
}

/// A waiting pod and the result of its last call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingState {
    /// The pod.
    pub waiting: WaitingPod,
    /// The rejections of its last call with the number of nodes, if no node fitted.
    pub refused: Option<BTreeMap<Rejection, usize>>,
    /// The nodes of its last call; `None` while that call runs, and before the first.
    pub named: Option<Arc<NamedNodes>>,
    /// When that call began.
    pub called_at: Timestamp,
    /// Whether its last call, if there was one, is answered.
    pub is_answered: bool,
    pub(crate) requeue: Option<Requeue>,
    /// Since when room has been held for it, and it was not bound.
    held_since: Option<Timestamp>,
    /// Since when no node fits it.
    pub refused_since: Option<Timestamp>,
    pub(crate) is_watched: bool,
    seen: Timestamp,
}

impl WaitingState {
    /// A pod without a *filter* call yet.
    pub fn without_call(waiting: WaitingPod, now: Timestamp) -> Self {
        Self {
            waiting,
            refused: None,
            named: None,
            called_at: now,
            is_answered: true,
            requeue: None,
            held_since: None,
            refused_since: None,
            is_watched: false,
            seen: now,
        }
    }

    /// The closest rejection of its last call, with the number of nodes; `None` if it was not
    /// refused, or if no node was named.
    pub fn closest(&self) -> Option<(Rejection, usize)> {
        let rejections =
            self.refused.iter().flatten().map(|(rejection, nodes)| (*rejection, *nodes));
        rejections.max_by_key(|(rejection, _)| rejection.closeness())
    }
}

/// A pod that changed, as one that can be requeued; `None` if it cannot.
pub type Change = (PodUid, Option<Candidate>);

/// All waiting pods.
#[derive(Default)]
pub struct WaitingPods {
    pods: Mutex<Pods>,
}

#[derive(Default)]
pub(crate) struct Pods {
    pub(crate) by_uid: BTreeMap<PodUid, WaitingState>,
    /// The pods that only verbs mentioned, those mentioned longest ago first.
    unseen: BTreeSet<(Timestamp, PodUid)>,
    /// Refused before the watch showed them.
    pub(crate) late: BTreeSet<PodUid>,
    /// Pods that a node fitted, by the time of that call.
    fitting: BTreeSet<(Timestamp, PodUid)>,
    /// Pods that changed since the thread that requeues them looked.
    changed: BTreeSet<PodUid>,
    /// Whether there were too many changes to remember: any pod may have changed.
    pub(crate) is_all_changed: bool,
    /// The nodes that calls named, each set once.
    named: BTreeSet<Arc<NamedNodes>>,
    /// The number of sets at which unused ones are removed next.
    sets_at_ease: usize,
    /// The longest recent time from a requeue to the next call.
    slowest: Duration,
    /// What is held for pods that nothing binds, in millionths of a GPU, and until when.
    unbound: BTreeMap<PodUid, (Timestamp, u64)>,
    /// Whether a pod that may have others evicted was refused for the first time since this was taken.
    is_newly_refused: bool,
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

    /// Lets `change` change a pod, if it waits.
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

    /// Adds a pod. If there are too many, it replaces the unseen one of the longest ago.
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
        let fresh = WaitingState { is_watched, ..WaitingState::without_call(waiting, now) };
        self.by_uid.insert(uid, fresh);
    }

    /// The same set of nodes, shared with other pods; `None` if there are too many.
    fn shared(&mut self, named: NamedNodes) -> Option<Arc<NamedNodes>> {
        if let Some(known) = self.named.get(&named) {
            return Some(Arc::clone(known));
        }
        if self.named.len() >= self.sets_at_ease.max(FEW_SETS) {
            self.named.retain(|set| Arc::strong_count(set) > 1);
            self.sets_at_ease = 2 * self.named.len();
        }
        if self.named.len() >= NAMED_BYTES / named.size() {
            return None;
        }
        let named = Arc::new(named);
        self.named.insert(Arc::clone(&named));
        Some(named)
    }

    /// The pods that the watch shows.
    fn shown(&self) -> impl Iterator<Item = &WaitingState> {
        self.by_uid.values().filter(|state| state.is_watched)
    }

    /// The next pods that the watch shows, [`LOOKED_AT_ONCE`] at most, and the UID after which others follow.
    fn some_shown(&self, after: Option<&PodUid>) -> (Vec<&WaitingState>, Option<PodUid>) {
        let range = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let pods = self.by_uid.range::<PodUid, _>(range).take(LOOKED_AT_ONCE);
        let pods: Vec<(&PodUid, &WaitingState)> = pods.collect();
        let last = pods.last().filter(|_| pods.len() == LOOKED_AT_ONCE);
        let last = last.map(|(uid, _)| (*uid).clone());
        let shown = pods.into_iter().map(|(_, state)| state).filter(|state| state.is_watched);
        (shown.collect(), last)
    }

    pub(crate) fn patience(&self) -> Duration {
        (4 * self.slowest).clamp(PATIENCE.0, PATIENCE.1)
    }
}

impl WaitingPods {
    /// Notes a pending pod that the watch reports. Returns whether a verb made the same request for
    /// it before; then that answer counts from now on.
    pub fn see(&self, waiting: WaitingPod, now: Timestamp) -> bool {
        let (pods, uid) = (&mut *self.pods(), waiting.pod.uid.clone());
        let Some(state) = pods.by_uid.get_mut(&uid) else {
            pods.add(waiting, now, true);
            return false;
        };
        let was_unseen = !std::mem::replace(&mut state.is_watched, true);
        let before = std::mem::replace(&mut state.seen, now);
        let is_named = was_unseen && state.waiting.query == waiting.query;
        if was_unseen && !is_named {
            (state.refused, state.named) = (None, None);
        }
        let has_changed = state.waiting != waiting;
        let is_other = !was_unseen && state.waiting.query != waiting.query;
        state.waiting = waiting;
        if is_other {
            // kube-scheduler may have made this request already; its answer did not count then.
            state.refused.get_or_insert_default();
            (state.named, state.is_answered) = (None, true);
        }
        if is_other || (is_named && state.refused.is_some()) {
            pods.late.insert(uid.clone());
        }
        if was_unseen {
            pods.unseen.remove(&(before, uid.clone()));
        }
        if was_unseen || has_changed {
            pods.changed(&uid);
        }
        is_named
    }

    /// Notes a pod of a *filter* call, as refused until [`WaitingPods::fits`] is called: room that
    /// appears during the call must find it, on any node. A caller cannot change a pod that the
    /// watch shows; a call with another request for it is ignored.
    pub fn begin_call(&self, waiting: WaitingPod, now: Timestamp) {
        let (pods, uid) = (&mut *self.pods(), waiting.pod.uid.clone());
        match pods.by_uid.get_mut(&uid) {
            None => pods.add(waiting, now, false),
            Some(state) if state.is_watched => {
                if state.waiting.query != waiting.query {
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
        let requeued = pods.change(&uid, |state| {
            if state.is_at_team_limit() {
                state.refused = None; // what that said is old now
            }
            state.refused.get_or_insert_default();
            (state.named, state.called_at, state.is_answered) = (None, now, false);
            let requeue = state.requeue.take()?;
            let (stage, sent) = match requeue.stage {
                Stage::Sending => (Some(Stage::Called(now)), None),
                Stage::Sent(at) => (Some(Stage::Called(now)), Some(at)),
                Stage::Called(at) => (Some(Stage::Called(at)), None),
                Stage::Unanswered(at) => (None, Some(at)),
            };
            state.requeue = stage.map(|stage| Requeue { stage, ..requeue });
            sent
        });
        if let Some(sent) = requeued.flatten()
            && now.since(sent) < BUSY_FOR
        {
            pods.slowest = now.since(sent).min(PATIENCE.1).max(pods.slowest * 3 / 4);
        }
    }

    /// Whether room has been held for a pod for long, and nothing has bound it.
    pub fn is_unbound(&self, uid: &PodUid, now: Timestamp) -> bool {
        let since = self.pods().by_uid.get(uid).and_then(|state| state.held_since);
        since.is_some_and(|since| now.since(since) >= HELD_FREELY)
    }

    /// Whether room may be held for the pod now. Pods that nothing binds have at most so much held together; others
    /// as they need.
    pub fn may_hold(&self, uid: &PodUid, now: Timestamp, unbound: Unbound) -> bool {
        let pods = &mut *self.pods();
        let Some(state) = pods.by_uid.get_mut(uid) else { return true };
        let since = state.held_since.filter(|since| now.since(*since) < HELD_AGAIN_AFTER);
        let since = *state.held_since.insert(since.unwrap_or(now));
        if now.since(since) < HELD_FREELY || mutated(Mutation::HoldsUnlimited) {
            return true;
        }
        pods.unbound.retain(|_, (until, _)| *until > now);
        let others = pods.unbound.iter().filter(|(other, _)| *other != uid);
        let held: u64 = others.map(|(_, (_, amount))| amount).sum();
        let may = held.saturating_add(unbound.amount) <= unbound.at_most;
        if may {
            pods.unbound.insert(uid.clone(), (now.plus(HELD_FREELY), unbound.amount));
        }
        may
    }

    /// Notes that at least one node fits the pod. Returns how its requeue ended.
    pub fn fits(&self, uid: &PodUid) -> Option<Requeued> {
        let pods = &mut *self.pods();
        let (called, ended) = pods.change(uid, |state| {
            (state.refused, state.refused_since, state.is_answered) = (None, None, true);
            let is_named = |requeue: &mut Requeue| matches!(requeue.stage, Stage::Called(_));
            let ended = state.requeue.take_if(is_named).map(|_| Requeued::Helped);
            (state.called_at, ended)
        })?;
        if pods.fitting.len() < MAX_WAITING {
            pods.fitting.insert((called, uid.clone()));
        }
        ended
    }

    /// The pods that a node fitted ten seconds ago, and when they were called.
    fn take_old_fits(&self, now: Timestamp) -> BTreeSet<(Timestamp, PodUid)> {
        let fitting = &mut self.pods().fitting;
        let is_old = |(called, _): &(Timestamp, PodUid)| now.since(*called) >= UNBOUND_FOR;
        let count = fitting.iter().take_while(|it| is_old(it)).count();
        (0..count).filter_map(|_| fitting.pop_first()).collect()
    }

    /// Counts pods as refused that a node fitted ten seconds ago, and that nothing binds.
    pub fn doubt_fits(&self, now: Timestamp, is_being_bound: impl Fn(&PodUid) -> bool) {
        let mut old = self.take_old_fits(now);
        // Not while these are locked: who looks at the ledger may hold a part of it and wait for them.
        old.retain(|(_, uid)| !is_being_bound(uid));
        let pods = &mut *self.pods();
        for (called, uid) in old {
            let is_last = |state: &WaitingState| {
                state.is_watched && state.refused.is_none() && state.called_at == called
            };
            if pods.by_uid.get(&uid).is_some_and(is_last) {
                pods.change(&uid, |state| _ = state.refused.get_or_insert_default());
                pods.late.insert(uid);
            }
        }
    }

    /// Notes why no node fitted, and which nodes the call named. `named` is `None` if it named only
    /// the node that kube-scheduler has nominated for the pod; a call about all nodes follows.
    /// Returns how its requeue ended.
    pub fn refuse(
        &self,
        uid: &PodUid,
        rejections: BTreeMap<Rejection, usize>,
        named: Option<NamedNodes>,
    ) -> Option<Requeued> {
        let pods = &mut *self.pods();
        if !pods.by_uid.contains_key(uid) {
            return None;
        }
        let is_about_all = named.is_some();
        let named = named.and_then(|named| pods.shared(named));
        let mut is_new = false;
        let ended = pods.change(uid, |state| {
            is_new = state.refused_since.is_none() && state.waiting.may_preempt;
            state.refused_since.get_or_insert(state.called_at);
            state.refused = Some(rejections);
            (state.named, state.is_answered) = (named, true);
            let is_named = |requeue: &mut Requeue| matches!(requeue.stage, Stage::Called(_));
            let requeue = state.requeue.take_if(|requeue| is_about_all && is_named(requeue))?;
            let named = state.named.as_ref().is_none_or(|named| named.may_have(requeue.node));
            Some(if named { Requeued::Refused } else { Requeued::LeftOut })
        });
        pods.is_newly_refused |= is_new;
        ended.flatten()
    }

    /// Whether a pod that may have others evicted was refused for the first time since the last time that this was
    /// asked.
    pub fn take_newly_refused(&self) -> bool {
        std::mem::take(&mut self.pods().is_newly_refused)
    }

    /// Notes that another process answered the calls so far: any pod may have been refused, for any
    /// node. Room that appeared is looked for.
    pub fn take_over(&self) {
        let pods = &mut *self.pods();
        let uids: Vec<PodUid> = pods.shown().map(|it| it.waiting.pod.uid.clone()).collect();
        for uid in uids {
            pods.change(&uid, |state| _ = state.refused.get_or_insert_default());
            pods.late.insert(uid);
        }
    }

    /// Forgets a pod that is bound or gone.
    pub fn remove(&self, uid: &PodUid) {
        let pods = &mut *self.pods();
        pods.late.remove(uid);
        pods.unbound.remove(uid);
        match pods.by_uid.remove(uid) {
            Some(state) if state.is_watched => pods.changed(uid),
            Some(state) => _ = pods.unseen.remove(&(state.seen, uid.clone())),
            None => {}
        }
    }

    /// Pods that changed since the last call, at most `most`, each as one that can be requeued or
    /// not; and whether these are all. `None` once after more changes than are remembered: then
    /// every pod may have changed.
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
            let candidate = pods.by_uid.get(&uid).and_then(WaitingState::single_candidate);
            changes.push((uid, candidate));
        }
        Some((changes, pods.changed.is_empty()))
    }

    /// Whether the pod waits.
    pub fn has(&self, uid: &PodUid) -> bool {
        self.pods().by_uid.contains_key(uid)
    }

    /// How many pods are remembered, with those that the watch does not show.
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
        let mut all = Vec::new();
        self.look_at_each(|state| all.push(state.clone()));
        all.sort_by(|a, b| a.waiting.order().cmp(&b.waiting.order()));
        all
    }

    /// Lets `look` see the same pods, in no order. Some of them are locked at a time: no call waits for
    /// thousands.
    pub fn look_at_each(&self, mut look: impl FnMut(&WaitingState)) {
        self.look_at_some(|pods| pods.iter().for_each(|state| look(state)));
    }

    fn look_at_some(&self, mut look: impl FnMut(&[&WaitingState])) {
        let (mut pods, mut last) = (self.pods(), None);
        loop {
            let (some, next) = pods.some_shown(last.as_ref());
            look(&some);
            if next.is_none() {
                return;
            }
            last = next;
            MutexGuard::unlocked_fair(&mut pods, std::thread::yield_now);
        }
    }

    /// The first pod of each line, the most important and then oldest first: of the pods for which
    /// `may` is true and whose requests, and nodes of the last call, are the same.
    pub fn firsts(&self, may: impl Fn(&WaitingState) -> bool) -> Vec<WaitingState> {
        self.firsts_apart(may, |_| ())
    }

    /// The same, with a line of its own for each value of `apart`.
    pub fn firsts_apart<T: Ord>(
        &self,
        may: impl Fn(&WaitingState) -> bool,
        apart: impl Fn(&WaitingPod) -> T,
    ) -> Vec<WaitingState> {
        let mut firsts: BTreeMap<_, WaitingState> = BTreeMap::new();
        self.look_at_some(|pods| {
            // Pods of one line are the rule: of these, one is copied.
            let mut of_some: BTreeMap<_, &WaitingState> = BTreeMap::new();
            for state in pods.iter().filter(|state| may(state)) {
                let named = state.named.as_ref().map(Arc::as_ptr);
                let line = (&state.waiting.query, named, apart(&state.waiting));
                let first = of_some.entry(line).or_insert(state);
                if state.waiting.order() < first.waiting.order() {
                    *first = state;
                }
            }
            for ((query, named, apart), state) in of_some {
                // The copies keep the sets of nodes, and so their addresses.
                match firsts.entry((query.clone(), named, apart)) {
                    Entry::Vacant(free) => _ = free.insert(state.clone()),
                    Entry::Occupied(mut first)
                        if state.waiting.order() < first.get().waiting.order() =>
                    {
                        first.insert(state.clone());
                    }
                    Entry::Occupied(_) => {}
                }
            }
        });
        let mut firsts: Vec<WaitingState> = firsts.into_values().collect();
        firsts.sort_by(|a, b| a.waiting.order().cmp(&b.waiting.order()));
        firsts
    }

    /// Pods that fitted on no node last time.
    pub fn refused_count(&self) -> usize {
        let mut count = 0;
        self.look_at_each(|state| count += usize::from(state.refused.is_some()));
        count
    }

    /// Drops pods that the watch never showed and no verb mentioned for long.
    pub fn tick(&self, now: Timestamp) {
        let pods = &mut *self.pods();
        let is_old = |seen| now.since(seen) >= UNSEEN_FOR;
        let unseen = pods.unseen.extract_if(.., |(seen, _)| is_old(*seen));
        let old: Vec<PodUid> = unseen.map(|(_, uid)| uid).collect();
        for uid in old {
            pods.by_uid.remove(&uid);
            pods.changed(&uid);
        }
    }

    pub(crate) fn pods(&self) -> MutexGuard<'_, Pods> {
        self.pods.lock()
    }
}

impl WaitingPod {
    /// Its place in a line, smaller first: higher priority, then older, then by UID.
    pub fn order(&self) -> (std::cmp::Reverse<i32>, i64, &PodUid) {
        (std::cmp::Reverse(self.priority), self.created_unix_seconds, &self.pod.uid)
    }
}

/// What is held of GPUs for pods that nothing binds, in millionths of one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unbound {
    /// The most that would be held for one.
    pub amount: u64,
    /// The most for all of them.
    pub at_most: u64,
}

/// A requeue whose next call is still to come, or is being answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Requeue {
    /// The node that had room for it.
    pub(crate) node: Arrival,
    pub(crate) stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The API server has not answered yet.
    Sending,
    /// Since then kube-scheduler has reason to call about the pod.
    Sent(Timestamp),
    /// Its first call after the requeue began then.
    Called(Timestamp),
    /// No call came in time: in-tree filters may leave no node. If a change lets them,
    /// kube-scheduler calls without a requeue. Until it does, another requeue would be useless.
    Unanswered(Timestamp),
}

/// How a requeue ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requeued {
    /// The next call found a node that fits.
    Helped,
    /// The next call named the node, and no node fitted, not even this one.
    Refused,
    /// The next call did not name the node.
    LeftOut,
    /// No call came in time.
    Unanswered,
    /// The pod is gone.
    Gone,
}

/// The progress of a requeued pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It does not wait.
    Gone,
    /// The requeue is being written.
    Sending,
    /// Its next call, or the answer to it, is due until then.
    Until(Timestamp),
    /// That did not happen in time.
    Late,
    /// A node fits; the pod is not bound yet.
    Fits,
    /// It waits, and its last call began then.
    Waits {
        /// When.
        called: Timestamp,
    },
}

impl Ledger {
    /// Whether a waiting pod fits on a node where it may go.
    pub fn fits_on_named(&self, WaitingState { waiting, named, .. }: &WaitingState) -> bool {
        let cluster = self.cluster();
        let compiled = waiting.query.compile(&cluster.classes);
        let node_table = self.node_table();
        node_table.iter().enumerate().any(|(at, node_entry)| {
            is_candidate(at, node_entry, named.as_deref())
                && plan::fits(&node_entry.read(), &compiled, HoldRule::Respected)
        })
    }
}

#[cfg(test)]
mod tests;
