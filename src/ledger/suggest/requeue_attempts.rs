//! Requeues of waiting pods: the stage of each, and how it ended.

use crate::hardware::device::PodUid;
use crate::hardware::units::Timestamp;
use crate::ledger::suggest::requeue::{Candidate, FreeRoom, Group};
use crate::ledger::suggest::waiting::{
    Pods, Progress, Stage, Touch, WaitingPod, WaitingPods, WaitingState,
};

impl WaitingState {
    /// The pod as one that can be requeued; `None` if the watch does not show it, if it was not
    /// refused, or if its next call is due anyway.
    pub(crate) fn candidate(&self) -> Option<Candidate> {
        let is_due = |touch: &Touch| !matches!(touch.stage, Stage::Asked(_));
        if !self.is_watched || self.refused.is_none() || self.touch.as_ref().is_some_and(is_due) {
            return None;
        }
        let WaitingPod { pod, question, priority, created_unix_seconds, .. } = &self.waiting;
        Some(Candidate {
            order: (std::cmp::Reverse(*priority), *created_unix_seconds, pod.uid.clone()),
            question: question.clone(),
            asked: self.asked.clone(),
        })
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
        let candidate = |uid| by_uid.get(uid).and_then(WaitingState::candidate);
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
    pub fn touch(&self, uid: &PodUid, room: &FreeRoom) -> Option<WaitingPod> {
        let touched = self.pods().change(uid, |state| {
            let candidate = state.candidate()?;
            if candidate.asked.is_some_and(|asked| !asked.may_have(room.arrival)) {
                return None;
            }
            state.touch = Some(Touch { node: room.arrival, stage: Stage::Sending });
            Some(state.waiting.clone())
        });
        touched.flatten()
    }

    /// Whether a requeue of the pod is being written.
    pub fn is_sending(&self, uid: &PodUid) -> bool {
        let pods = self.pods();
        let touch = pods.by_uid.get(uid).and_then(|state| state.touch);
        touch.is_some_and(|touch| touch.stage == Stage::Sending)
    }

    /// Notes that a requeue was written.
    pub fn touched(&self, uid: &PodUid, now: Timestamp) {
        self.end_stage(uid, Stage::Sending, Some(Stage::Sent(now)));
    }

    /// Notes that a requeue may not have been written: the pod can be requeued again.
    pub fn not_touched(&self, uid: &PodUid) {
        self.end_stage(uid, Stage::Sending, None);
    }

    /// Notes that this process may not requeue the pod. It tries again after the pod's next call,
    /// or when the pod becomes [`touchable`](Self::touchable).
    pub fn not_touchable(&self, uid: &PodUid, now: Timestamp) {
        self.end_stage(uid, Stage::Sending, Some(Stage::Unanswered(now)));
    }

    /// Notes that the pod can be requeued after all; room that appeared meanwhile is looked for.
    pub fn touchable(&self, uid: &PodUid) {
        let pods = &mut *self.pods();
        let is_left = |touch: &mut Touch| matches!(touch.stage, Stage::Unanswered(_));
        let left = pods.change(uid, |state| state.touch.take_if(is_left));
        if left.flatten().is_some() {
            pods.late.insert(uid.clone());
        }
    }

    fn end_stage(&self, uid: &PodUid, stage: Stage, next: Option<Stage>) {
        self.pods().change(uid, |state| {
            if let Some(touch) = state.touch.take_if(|touch| touch.stage == stage) {
                state.touch = next.map(|stage| Touch { stage, ..touch });
            }
        });
    }

    /// The progress of a requeued pod. A call that does not come in time is no longer waited for.
    pub fn progress(&self, uid: &PodUid, now: Timestamp) -> Progress {
        let pods = &mut *self.pods();
        let patience = pods.patience();
        let Some(state) = pods.by_uid.get_mut(uid) else { return Progress::Gone };
        match state.touch.as_ref().map(|touch| touch.stage) {
            Some(Stage::Sending) => Progress::Sending,
            Some(Stage::Sent(at) | Stage::Asked(at)) if at.plus(patience) > now => {
                Progress::Until(at.plus(patience))
            }
            Some(Stage::Sent(at)) => {
                pods.change(uid, |state| {
                    let late = |touch| Touch { stage: Stage::Unanswered(at), ..touch };
                    state.touch = state.touch.map(late);
                });
                Progress::Late
            }
            Some(Stage::Asked(_)) => {
                pods.change(uid, |state| state.touch = None);
                Progress::Late
            }
            Some(Stage::Unanswered(_)) => Progress::Waits { asked: state.asked_at },
            None if state.refused.is_none() => Progress::Fits,
            None => Progress::Waits { asked: state.asked_at },
        }
    }
}
