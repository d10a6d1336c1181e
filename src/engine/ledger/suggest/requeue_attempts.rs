//! Requeues of waiting pods: the stage of each, and how it ended.

use crate::ledger::suggest::requeue::{Arrival, Candidate, Group};
use crate::ledger::suggest::waiting::{
    Pods, Progress, Requeue, Stage, WaitingPod, WaitingPods, WaitingState,
};
use crate::model::rejection::Rejection;
use wire::ids::PodUid;
use wire::units::Timestamp;

impl WaitingState {
    /// The pod as one that can be requeued for room; `None` if the watch does not show it, if it was
    /// not refused, if its team has as much as it may have, or if its next call is due anyway.
    pub(crate) fn candidate(&self) -> Option<Candidate> {
        let is_due = |requeue: &Requeue| !matches!(requeue.stage, Stage::Called(_));
        if !self.is_watched
            || self.refused.is_none()
            || self.is_at_team_limit()
            || self.requeue.as_ref().is_some_and(is_due)
        {
            return None;
        }
        let WaitingPod { pod, query, priority, created_unix_seconds, .. } = &self.waiting;
        Some(Candidate {
            order: (std::cmp::Reverse(*priority), *created_unix_seconds, pod.uid.clone()),
            query: query.clone(),
            named: self.named.clone(),
        })
    }

    /// Whether its last call found its team at its limit.
    pub fn is_at_team_limit(&self) -> bool {
        self.was_refused_for(Rejection::TeamLimit)
    }

    /// Whether its last call found nodes where it would count more than its team may have.
    pub fn is_limited_somewhere(&self) -> bool {
        self.was_refused_for(Rejection::TeamLimitHere)
    }

    fn was_refused_for(&self, rejection: Rejection) -> bool {
        self.refused.as_ref().is_some_and(|refused| refused.contains_key(&rejection))
    }
}

impl WaitingState {
    /// The same; `None` also for a pod of a group, which is requeued when there is room for all of it.
    pub(crate) fn single_candidate(&self) -> Option<Candidate> {
        self.candidate().filter(|_| self.waiting.group.is_none())
    }
}

impl WaitingPods {
    /// The requests of up to `most` pods, each pod once, that were refused before the watch showed
    /// them and can be requeued: room that appeared meanwhile went to others. A pod whose call is
    /// not answered yet stays for later, since the answer may use that room.
    pub fn late(&self, most: usize) -> Option<Vec<Group>> {
        let Pods { late, by_uid, .. } = &mut *self.pods();
        let is_answered = |uid: &PodUid| by_uid.get(uid).is_none_or(|state| state.is_answered);
        let taken = late.extract_if(.., |uid| is_answered(uid)).take(most);
        let taken: Vec<PodUid> = taken.collect();
        let candidate = |uid| by_uid.get(uid).and_then(WaitingState::single_candidate);
        let candidates = taken.iter().filter_map(candidate);
        let groups = candidates.map(|candidate| candidate.into_group().1).collect();
        (!taken.is_empty()).then_some(groups)
    }

    /// Marks every pod as changed, because the reader of the changes has lost them.
    pub fn change_all(&self) {
        self.pods().is_all_changed = true;
    }

    /// Notes that the pod will be requeued for room on a node. `None` if it has changed, so that it
    /// cannot be requeued for that.
    pub fn requeue(&self, uid: &PodUid, node: Arrival) -> Option<WaitingPod> {
        let requeued = self.pods().change(uid, |state| {
            let candidate = state.candidate()?;
            if candidate.named.is_some_and(|named| !named.may_have(node)) {
                return None;
            }
            state.requeue = Some(Requeue { node, stage: Stage::Sending });
            Some(state.waiting.clone())
        });
        requeued.flatten()
    }

    /// Whether a requeue of the pod is being written.
    pub fn is_sending(&self, uid: &PodUid) -> bool {
        let pods = self.pods();
        let requeue = pods.by_uid.get(uid).and_then(|state| state.requeue);
        requeue.is_some_and(|requeue| requeue.stage == Stage::Sending)
    }

    /// Notes that a requeue was written.
    pub fn requeued(&self, uid: &PodUid, now: Timestamp) {
        self.end_stage(uid, Stage::Sending, Some(Stage::Sent(now)));
    }

    /// Notes that a requeue may not have been written: the pod can be requeued again.
    pub fn requeue_failed(&self, uid: &PodUid) {
        self.end_stage(uid, Stage::Sending, None);
    }

    /// Notes that this process may not requeue the pod now, so that others get the room. It tries
    /// again after the pod's next call, or when the pod becomes [`requeuable`](Self::requeuable).
    pub fn not_requeuable(&self, uid: &PodUid, now: Timestamp) {
        self.end_stage(uid, Stage::Sending, Some(Stage::Unanswered(now)));
    }

    /// Notes that the pod can be requeued after all; room that appeared meanwhile is looked for.
    pub fn requeuable(&self, uid: &PodUid) {
        let pods = &mut *self.pods();
        let is_left = |requeue: &mut Requeue| matches!(requeue.stage, Stage::Unanswered(_));
        let left = pods.change(uid, |state| state.requeue.take_if(is_left));
        if left.flatten().is_some() {
            pods.late.insert(uid.clone());
        }
    }

    fn end_stage(&self, uid: &PodUid, stage: Stage, next: Option<Stage>) {
        self.pods().change(uid, |state| {
            if let Some(requeue) = state.requeue.take_if(|requeue| requeue.stage == stage) {
                state.requeue = next.map(|stage| Requeue { stage, ..requeue });
            }
        });
    }

    /// The progress of a requeued pod. A call that does not come in time is no longer waited for.
    pub fn progress(&self, uid: &PodUid, now: Timestamp) -> Progress {
        let pods = &mut *self.pods();
        let patience = pods.patience();
        let Some(state) = pods.by_uid.get_mut(uid) else { return Progress::Gone };
        match state.requeue.as_ref().map(|requeue| requeue.stage) {
            Some(Stage::Sending) => Progress::Sending,
            Some(Stage::Sent(at) | Stage::Called(at)) if at.plus(patience) > now => {
                Progress::Until(at.plus(patience))
            }
            Some(Stage::Sent(at)) => {
                pods.change(uid, |state| {
                    let late = |requeue| Requeue { stage: Stage::Unanswered(at), ..requeue };
                    state.requeue = state.requeue.map(late);
                });
                Progress::Late
            }
            Some(Stage::Called(_)) => {
                pods.change(uid, |state| state.requeue = None);
                Progress::Late
            }
            Some(Stage::Unanswered(_)) => Progress::Waits { called: state.called_at },
            None if state.refused.is_none() => Progress::Fits,
            None => Progress::Waits { called: state.called_at },
        }
    }
}
