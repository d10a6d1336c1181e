//! What is noted of a pod beside an answer, and on whose word.
//!
//! Anyone who reaches the port can make up a pod, or name the UID of another one. So what a caller says of a
//! pod that the watch shows is noted only where it asks just what that pod asks for; of others a little is kept
//! for a moment, since the watch may be behind kube-scheduler.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::control::shared::app::{App, ClusterTruth, Truth};
use crate::hardware::device::PodUid;
use crate::hardware::units::Timestamp;
use crate::kube_api::pod::seen_pod::SeenPod;
use crate::kube_api::write::events::NoticeReason;
use crate::ledger::query::questions::PlacementRequest;
use crate::ledger::suggest::requeue::AskedNodes;
use crate::model::rejection::Rejection;

impl App {
    /// Whether the API server shows a pod as one of ours that waits for just this. Only for such a pod
    /// room is held back.
    pub fn is_known_to_wait(&self, uid: &PodUid, question: &PlacementRequest) -> bool {
        let is_it = |pod: &SeenPod| self.question(pod).as_ref() == Some(question);
        match self.truth {
            Truth::Cluster(_) => self.pending.get(uid).is_some_and(|pod| is_it(&pod)),
            Truth::Books => true,
        }
    }

    /// Drops what nobody has mentioned for long.
    pub fn forget_unseen(&self) {
        self.passed.tick(self.clock.now());
        self.waiting.tick(self.clock.now());
        if matches!(self.truth, Truth::Books) {
            self.pending.retain(|uid, pod| pod.request.is_err() || self.waiting.has(uid));
        }
    }

    /// Whether the watch shows a pod as one of ours without a node.
    pub fn is_shown_waiting(&self, uid: &PodUid) -> bool {
        self.pending.contains_key(uid) || self.without_gpu.contains(uid)
    }

    /// Which process is responsible for this version of a waiting pod: `Equal` for this one, `Less` for one
    /// that is gone, so that the pod is to be touched first, `Greater` for one that may live.
    pub fn touched(&self, cluster: &ClusterTruth, pod: &SeenPod) -> Ordering {
        let is_old = || self.other_touches.is_old(&pod.pod.uid, pod.touch, self.clock.now());
        match cluster.writer.touched(pod) {
            Ordering::Greater if is_old() => Ordering::Less,
            known => known,
        }
    }

    /// Lets pods be requeued again that a later process touched last, once that process is gone.
    pub(crate) fn take_over_waiting(&self) {
        let old = self.other_touches.newly_old(self.clock.now());
        old.iter().for_each(|uid| self.waiting.touchable(uid));
    }

    /// Notes a waiting pod that another process touched last.
    pub(crate) fn see_touch(&self, pod: &SeenPod) {
        let Truth::Cluster(cluster) = &self.truth else { return };
        let uid = &pod.pod.uid;
        match cluster.writer.touched(pod) {
            Ordering::Greater => self.other_touches.see(uid, pod.touch, self.clock.now()),
            Ordering::Less | Ordering::Equal => self.other_touches.forget(uid),
        }
    }

    /// Forgets what only counts while the watch shows a pod waiting.
    pub(crate) fn forget_waiting(&self, uid: &PodUid) {
        self.passed.forget(uid);
        self.without_gpu.remove(uid);
        self.other_touches.forget(uid);
    }

    /// Whether what a caller says of a pod may be noted: it asks just this, as the watch shows it, or the
    /// watch does not show it.
    pub(crate) fn may_note(&self, uid: &PodUid, question: Option<&PlacementRequest>) -> bool {
        let is_it = |pod: &SeenPod| question.is_some() && self.question(pod).as_ref() == question;
        match self.truth {
            Truth::Cluster(_) if self.without_gpu.contains(uid) => question.is_none(),
            Truth::Cluster(_) => self.pending.get(uid).is_none_or(|pod| is_it(&pod)),
            Truth::Books => true,
        }
    }

    /// Whether what became of a question may be noted with the pods that wait. A pod that the watch shows
    /// without a GPU, or with a faulty request, may ask for one since: like one that it does not show yet, it
    /// counts once it is shown so.
    fn may_wait(&self, uid: &PodUid, question: &PlacementRequest) -> bool {
        let is_faulty = || self.pending.get(uid).is_some_and(|pod| pod.request.is_err());
        self.without_gpu.contains(uid) || is_faulty() || self.may_note(uid, Some(question))
    }

    /// Notes that a pod is asked about: what it held back before is seen again, and its request is learnt from.
    pub(crate) fn note_asked(&self, pod: &SeenPod, question: &PlacementRequest, now: Timestamp) {
        let uid = &pod.pod.uid;
        if self.may_wait(uid, question) {
            self.waiting.ask(Self::waiting_pod(pod, question.clone()), now);
        }
        if !self.is_known_to_wait(uid, question) {
            return;
        }
        self.outbox.push(self.ledger.drop_hold(uid));
        if matches!(self.truth, Truth::Books) {
            self.pending.entry(uid.clone()).or_insert_with(|| Arc::new(pod.clone()));
        }
        self.teams.see(pod);
        self.ledger.learn(uid.clone(), question);
    }

    /// Notes that no node fits a pod, and why.
    pub(crate) fn note_refused(
        &self,
        uid: &PodUid,
        question: &PlacementRequest,
        rejections: BTreeMap<Rejection, usize>,
        asked: Option<AskedNodes>,
    ) {
        if self.may_wait(uid, question) {
            self.requeued(self.waiting.refuse(uid, rejections, asked));
        }
        if self.is_known_to_wait(uid, question) {
            self.ledger.keep_answers(question);
            self.reasons.refused(uid);
        }
    }

    /// Notes that some node fits a pod.
    pub(crate) fn note_fits(&self, uid: &PodUid, question: &PlacementRequest) {
        if self.may_wait(uid, question) {
            self.requeued(self.waiting.fits(uid));
        }
        if self.is_known_to_wait(uid, question) {
            self.ledger.keep_answers(question);
        }
    }

    /// Takes in a pod that the watch shows waiting for a GPU, with what was asked about it before.
    pub(crate) fn see_waiting(&self, pod: &SeenPod) {
        let (uid, now) = (&pod.pod.uid, self.clock.now());
        let to_hold = self.passed.see(uid);
        let question = match &pod.request {
            Ok(_) => self.question(pod),
            Err(error) => {
                self.tell(&pod.pod, NoticeReason::GpuRequestRefused, error.to_string());
                None
            }
        };
        let Some(question) = question else { return self.waiting.remove(uid) };
        if let Some(node) = to_hold {
            self.outbox.push(self.ledger.hold(uid, node.as_str(), &question, now));
        }
        if self.waiting.see(Self::waiting_pod(pod, question.clone()), now) {
            self.ledger.learn(uid.clone(), &question);
            self.reasons.refused(uid);
        }
    }
}
