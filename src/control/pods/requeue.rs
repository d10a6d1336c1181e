//! Which pod to requeue, and when, for room that appeared: one pod at a time per node.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::team_limit::PodInNamespace;
use engine::ledger::suggest::requeue::{Group, RequeueOrder};
use engine::ledger::suggest::waiting::{
    Change, Progress, Requeued, WaitingPod, WaitingPods, WaitingState,
};
use wire::ids::{NodeName, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// A pod that fits and is not bound after this time will not take the room. kube-scheduler binds
/// within a few hundred milliseconds; otherwise something else is in the way of the pod.
const BOUND_WITHIN: Duration = Duration::from_secs(2);

/// Pause before another look at a requeue that is still being written.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Longest pause between two looks at changed pods, so that few have changed when room appears.
const FOLLOW_EVERY: Duration = Duration::from_secs(1);

/// Changed pods that are taken over at once, while *filter* may have to wait.
const CHANGES_AT_ONCE: usize = 64;

/// Groups of pods after which the other nodes have to wait for the next step: about 10 ms.
const LOOKS: usize = 50_000;

/// Late groups for which one step looks for room, each on all nodes at worst. A pod is late if it
/// was refused before the watch showed it.
const LATE_AT_ONCE: usize = 8;

/// Nodes with new room, and the pods that were requeued for it. One pod at a time is requeued per
/// node. The next one follows only if the first did not take the room, so no requeue is in vain.
#[derive(Default)]
pub struct RequeueLoop {
    nodes: BTreeMap<NodeName, Chain>,
    order: RequeueOrder,
    /// Pods whose requeue is being written, for any node. If the write fails, the pod can be
    /// requeued for other room, which must not be forgotten until then.
    sending: RequeueOrder,
    /// Requests of late pods for which room is yet to be looked for. Many pods share one.
    late: BTreeSet<Group>,
}

/// The pods requeued for the room of one node.
struct Chain {
    /// Pods that were requeued for this room and did not take it. Other causes not to requeue a pod
    /// again are noted with the pod, for the room of every node.
    tried: BTreeSet<PodUid>,
    last: Option<PodUid>,
    /// Since when `last` fits some node.
    fits_since: Option<Timestamp>,
    /// When more room appeared since `last` was requeued.
    more_since: Option<Timestamp>,
    due: Timestamp,
}

/// What is to be done now.
#[derive(Debug, Default)]
pub struct RequeueStep {
    /// The pods to requeue, each with the node that has room for it.
    pub requeues: Vec<(NodeName, WaitingPod)>,
    /// How requeues ended for which no call came.
    pub ended: Vec<Requeued>,
}

impl RequeueLoop {
    /// Notes room that appeared. The pod that was just requeued for this node comes first. All
    /// others may be tried again, as there is more room than before.
    pub fn room(&mut self, nodes: Vec<NodeName>, now: Timestamp) {
        if mutated(Mutation::RoomLost) {
            return;
        }
        for node in nodes {
            match self.nodes.entry(node) {
                Entry::Occupied(mut known) => known.get_mut().has_more(now),
                Entry::Vacant(free) => {
                    free.insert(Chain::new(now));
                }
            }
        }
    }

    /// How long until there is something to do.
    pub fn rest(&self, now: Timestamp) -> Duration {
        if !self.late.is_empty() {
            return Duration::ZERO;
        }
        let next = self.nodes.values().map(|chain| chain.due).min();
        next.map_or(FOLLOW_EVERY, |due| due.since(now)).min(FOLLOW_EVERY)
    }

    /// What is to be done now. Takes some milliseconds with thousands of waiting pods: not for a
    /// thread that answers calls.
    pub fn step(&mut self, waiting: &WaitingPods, ledger: &Ledger, now: Timestamp) -> RequeueStep {
        let mut step = RequeueStep::default();
        self.nodes.retain(|_, chain| chain.goes_on(waiting, ledger, &mut step, now));
        self.gather_late(waiting);
        self.follow(|uid| waiting.is_sending(uid), || waiting.changes(CHANGES_AT_ONCE));
        self.catch_up(ledger, now);
        let due = self.nodes.iter().filter(|(_, chain)| chain.last.is_none() && chain.due <= now);
        let mut due: Vec<_> = due.map(|(node, chain)| (chain.due, node.clone())).collect();
        due.sort(); // oldest first: no node waits forever
        let mut looks = 0;
        for (_, node) in due {
            if looks > LOOKS {
                break;
            }
            looks += self.search(&node, waiting, ledger, &mut step, now);
        }
        step
    }

    /// Takes over which pods are being requeued, and which can be. The order matters: a write that
    /// ends in between is still in `sending`, or follows as a change.
    fn follow(
        &mut self,
        is_sending: impl Fn(&PodUid) -> bool,
        mut changes: impl FnMut() -> Option<(Vec<Change>, bool)>,
    ) {
        self.sending.retain(is_sending);
        loop {
            match changes() {
                None => self.order.clear(),
                Some((changes, is_all)) => {
                    changes.into_iter().for_each(|(uid, pod)| self.order.set(&uid, pod));
                    if is_all {
                        return;
                    }
                    std::thread::yield_now(); // to calls
                }
            }
        }
    }

    /// Takes over the late pods, before the changes. All late pods are among the changes that
    /// follow, so the one search for room finds them.
    fn gather_late(&mut self, waiting: &WaitingPods) {
        while let Some(late) = waiting.late(CHANGES_AT_ONCE) {
            if !mutated(Mutation::LateRoomLost) {
                self.late.extend(late);
            }
        }
    }

    /// Looks for room that appeared after a pod was refused and before the watch showed it. No
    /// chain may be left for that room.
    fn catch_up(&mut self, ledger: &Ledger, now: Timestamp) {
        for _ in 0..LATE_AT_ONCE {
            let Some(pods) = self.late.pop_first() else { return };
            if let Some(node) = ledger.node_with_room(&pods) {
                self.nodes.entry(node).or_insert_with(|| Chain::new(now));
            }
        }
    }

    /// Finds the pod to requeue for the room on `node`. Returns how many groups were looked at.
    fn search(
        &mut self,
        node: &NodeName,
        waiting: &WaitingPods,
        ledger: &Ledger,
        step: &mut RequeueStep,
        now: Timestamp,
    ) -> usize {
        let is_tried = self.nodes.get(node).is_some_and(|chain| !chain.tried.is_empty());
        if mutated(Mutation::OneTryPerRoom) && is_tried {
            self.nodes.remove(node);
            return 0;
        }
        let mut all_looks = 0;
        if let Some(chain) = self.nodes.get_mut(node)
            && let Some(room) = ledger.free_room(node.as_str())
        {
            loop {
                let (first, looks) = self.order.first(&room, &chain.tried);
                all_looks += looks;
                let Some(uid) = first else { break };
                if is_limited(waiting, ledger, &uid, node) {
                    chain.tried.insert(uid);
                    continue;
                }
                let candidate = self.order.take(&uid); // it comes back with its next change
                if let Some(pod) = waiting.requeue(&uid, room.arrival) {
                    self.sending.set(&uid, candidate);
                    chain.tried.insert(uid.clone());
                    (chain.last, chain.fits_since, chain.more_since) = (Some(uid), None, None);
                    chain.due = now.plus(LOOK_AGAIN);
                    step.requeues.push((node.clone(), pod));
                    return all_looks;
                }
            }
            let (first, looks) = self.sending.first(&room, &chain.tried);
            all_looks += looks;
            if first.is_some() {
                chain.due = now.plus(LOOK_AGAIN);
                return all_looks;
            }
        }
        self.nodes.remove(node);
        all_looks
    }
}

/// Whether a pod would count more on the node than its team may have, though it fits.
fn is_limited(waiting: &WaitingPods, ledger: &Ledger, uid: &PodUid, node: &NodeName) -> bool {
    if ledger.teams.rules().is_none() {
        return false;
    }
    let Some(WaitingState { waiting: pod, .. }) = waiting.pod(uid) else { return false };
    let named = PodInNamespace { uid, namespace: &pod.namespace };
    ledger.is_limited_on(named, &pod.query, node.as_str())
}

impl Chain {
    fn new(now: Timestamp) -> Self {
        Self { tried: BTreeSet::new(), last: None, fits_since: None, more_since: None, due: now }
    }

    /// Lets the others be tried again for more room. The last one gets a call about it anyway.
    fn has_more(&mut self, now: Timestamp) {
        self.tried.retain(|uid| self.last.as_ref() == Some(uid));
        self.more_since = Some(now);
    }

    fn goes_to_the_next(&mut self, now: Timestamp) {
        (self.last, self.due) = (None, now);
    }

    /// Notes what became of the pod that was requeued last. Whether this room may still need work.
    fn goes_on(
        &mut self,
        waiting: &WaitingPods,
        ledger: &Ledger,
        step: &mut RequeueStep,
        now: Timestamp,
    ) -> bool {
        let Some(last) = &self.last else { return true };
        // It has a placement, here or elsewhere, and kube-scheduler looks at the others after a
        // bind. It may have done so before there was more room.
        if ledger.reservation(last).is_some() {
            self.goes_to_the_next(now);
            return self.more_since.is_some();
        }
        match waiting.progress(last, now) {
            Progress::Sending => self.due = now.plus(LOOK_AGAIN),
            Progress::Until(at) => self.due = at,
            Progress::Fits => {
                self.due = self.fits_since.get_or_insert(now).plus(BOUND_WITHIN);
                if self.due <= now {
                    self.goes_to_the_next(now);
                }
            }
            Progress::Waits { called } => {
                if self.more_since.is_some_and(|more| called <= more) {
                    self.tried.remove(last); // its call may have come before that room
                }
                self.goes_to_the_next(now);
            }
            Progress::Late => {
                step.ended.push(Requeued::Unanswered);
                self.goes_to_the_next(now);
            }
            Progress::Gone => {
                step.ended.push(Requeued::Gone);
                self.goes_to_the_next(now);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests;
