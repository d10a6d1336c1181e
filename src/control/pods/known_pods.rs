//! What is noted of a pod beside an answer, and from which source.
//!
//! Any client can make up a pod, or name the UID of another one. So a caller's pod that the watch
//! also shows is noted only if the caller's request equals the pod's own. Of other pods a little is
//! kept for a while, since the watch may be behind kube-scheduler.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::shared::app::App;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::suggest::requeue::NamedNodes;
use engine::ledger::suggest::waiting::Unbound;
use engine::model::rejection::Rejection;
use engine::model::request::Purpose;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::write::events::NoticeReason;
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

impl App {
    /// Whether the watch shows a pod of ours that waits with this request. Only such a pod gets a
    /// hold.
    pub fn is_known_to_wait(&self, uid: &PodUid, query: &PlacementRequest) -> bool {
        self.pods.pending.get(uid).is_some_and(|pod| self.query(&pod).as_ref() == Some(query))
    }

    /// Counts pods as refused that a node fitted, and that nothing binds.
    pub fn doubt_fits(&self) {
        self.waiting.doubt_fits(self.clock.now(), |uid| self.ledger.reservation(uid).is_some());
    }

    /// Drops pods that no call has named for long.
    pub fn forget_unseen(&self) {
        self.binding.passed.tick(self.clock.now());
        self.waiting.tick(self.clock.now());
    }

    /// Compares the process that last wrote this version of a waiting pod with this process.
    /// `Equal`: this one, or none. `Less`: one that is gone; fence the pod first. `Greater`: one
    /// that may live.
    pub fn fenced(&self, pod: &SeenPod) -> Ordering {
        let (uid, now) = (&pod.pod.uid, self.clock.now());
        match self.writer.fenced(pod.fence) {
            Ordering::Greater if self.binding.other_fences.is_old(uid, pod.fence.digest, now) => {
                Ordering::Less
            }
            // With a Lease, no Binding of an earlier term can succeed any more.
            Ordering::Less if self.lead.replica.is_some() => Ordering::Equal,
            known => known,
        }
    }

    /// Whether a later process, which may live, last wrote where a bound pod runs: it does so from now on, and
    /// this one does not.
    pub(crate) fn is_of_later(&self, pod: &SeenPod) -> bool {
        let (uid, now) = (&pod.pod.uid, self.clock.now());
        if self.writer.fenced(pod.fence) != Ordering::Greater
            || mutated(Mutation::LaterPlacementOverwritten)
        {
            self.binding.other_placements.forget(uid);
            return false;
        }
        self.binding.other_placements.see(uid, pod.fence.digest, now);
        !self.binding.other_placements.is_old(uid, pod.fence.digest, now)
    }

    /// Notes who last wrote where a bound pod runs, while this process takes in its first list: that process had
    /// begun before this process, though a clock that was set back since may say otherwise.
    pub(crate) fn see_before(&self, pod: &SeenPod) {
        let is_first = self.lead.replica.is_none() && !self.ledger.is_listed();
        if is_first && self.writer.fenced(pod.fence) == Ordering::Greater {
            let (uid, now) = (&pod.pod.uid, self.clock.now());
            self.binding.other_placements.see_before(uid, pod.fence.digest, now);
        }
    }

    /// Whether an earlier process last wrote where a bound pod runs, and this one has written nothing there.
    pub(crate) fn is_of_earlier(&self, pod: &SeenPod) -> bool {
        let uid = &pod.pod.uid;
        self.writer.fenced(pod.fence) == Ordering::Less
            && !self.pods.edits.written().get(uid).is_some_and(|known| known.is_own)
    }

    /// Lets pods be requeued again that a later process wrote last, once that process is gone.
    pub(crate) fn take_over_waiting(&self) {
        let old = self.binding.other_fences.newly_old(self.clock.now());
        old.iter().for_each(|uid| self.waiting.requeuable(uid));
    }

    pub(crate) fn see_fence(&self, pod: &SeenPod) {
        let (uid, fence) = (&pod.pod.uid, pod.fence.digest);
        match self.writer.fenced(pod.fence) {
            Ordering::Greater => self.binding.other_fences.see(uid, fence, self.clock.now()),
            Ordering::Less | Ordering::Equal => self.binding.other_fences.forget(uid),
        }
    }

    /// Forgets what only counts while the watch shows the pod waiting.
    pub(crate) fn forget_waiting(&self, uid: &PodUid) {
        self.binding.passed.forget(uid);
        self.room.preemptors.forget_refused(uid);
        self.pods.without_gpu.remove(uid);
        self.binding.other_fences.forget(uid);
    }

    /// Whether a caller's request for a pod may be noted: it is the pod's own, or the watch does
    /// not show the pod.
    pub fn may_note(&self, uid: &PodUid, query: Option<&PlacementRequest>) -> bool {
        if self.pods.without_gpu.contains(uid) {
            return query.is_none();
        }
        let pending = self.pods.pending.get(uid);
        pending.is_none_or(|pod| query.is_some() && self.query(&pod).as_ref() == query)
    }

    /// Whether the answer may be noted with the waiting pods. A pod without a GPU, or with a faulty
    /// request, may have been changed since the watch showed it. Like a pod that the watch does not
    /// show yet, it counts once the watch shows the new request.
    fn may_wait(&self, uid: &PodUid, query: &PlacementRequest) -> bool {
        self.pods.without_gpu.contains(uid)
            || self.pods.pending.get(uid).is_some_and(|pod| pod.request.is_err())
            || self.may_note(uid, Some(query))
    }

    /// Notes that *filter* is called for a pod: its old hold ends, and the request mix learns its
    /// request.
    pub fn note_named(&self, pod: &SeenPod, query: &PlacementRequest, now: Timestamp) {
        let uid = &pod.pod.uid;
        if self.may_wait(uid, query) {
            self.waiting.begin_call(pod.waiting_with(query.clone()), now);
        }
        if !self.is_known_to_wait(uid, query) {
            return;
        }
        self.outbox.push(self.ledger.drop_chosen_hold(uid, query));
        self.pods.classes.see(pod);
        let is_probe = query.gpu.as_ref().is_some_and(|gpu| gpu.purpose == Purpose::Probe);
        if !is_probe {
            self.learn(uid, query);
        }
    }

    /// Lets the request mix follow, on another thread if that takes long.
    fn learn(&self, uid: &PodUid, query: &PlacementRequest) {
        if self.ledger.observe(uid.clone(), query) {
            let ledger = Arc::clone(&self.ledger);
            self.outside.work_later(move || ledger.learn_mix());
        }
    }

    /// Whether room may be held for a pod now.
    pub fn may_hold(&self, uid: &PodUid) -> bool {
        let now = self.clock.now();
        self.waiting.may_hold(uid, now, self.unbound(uid, now))
    }

    /// What would be held for a pod that nothing binds. Looks at all nodes then: not for a caller in the ledger.
    pub fn unbound(&self, uid: &PodUid, now: Timestamp) -> Unbound {
        let is_unbound = self.waiting.is_unbound(uid, now);
        let Some(state) = self.waiting.pod(uid).filter(|_| is_unbound) else {
            return Unbound::default();
        };
        let mut devices = 0_u64;
        self.ledger.look_at_each(|node| devices += node.devices().len() as u64);
        let at_most = devices.saturating_mul(self.config.standing_hold_at_most.millionths());
        Unbound { amount: self.ledger.most_of(&state.waiting.query), at_most }
    }

    /// Notes that no node fits a pod, and why.
    pub fn note_refused(
        &self,
        uid: &PodUid,
        query: &PlacementRequest,
        rejections: BTreeMap<Rejection, usize>,
        named: Option<NamedNodes>,
    ) {
        if self.may_wait(uid, query) {
            self.requeued(self.waiting.refuse(uid, rejections, named));
            if self.waiting.take_newly_refused() {
                self.room.new_rooms.look(); // when it has waited long enough others may be evicted for it
            }
        }
        if self.is_known_to_wait(uid, query) {
            self.ledger.keep_answers(query);
            self.reasons.refused(uid);
        }
    }

    /// Notes that some node fits a pod.
    pub fn note_fits(&self, uid: &PodUid, query: &PlacementRequest) {
        if self.may_wait(uid, query) {
            self.requeued(self.waiting.fits(uid));
        }
        if self.is_known_to_wait(uid, query) {
            self.ledger.keep_answers(query);
        }
    }

    /// Takes in a pod that the watch shows waiting for a GPU, with what earlier calls said about
    /// it.
    pub(crate) fn see_waiting(&self, pod: &SeenPod) {
        let (uid, now) = (&pod.pod.uid, self.clock.now());
        let to_hold = self.binding.passed.see(uid);
        let query = match &pod.request {
            Ok(_) => self.query(pod),
            Err(error) => {
                self.tell(&pod.pod, NoticeReason::GpuRequestRefused, error.to_string());
                None
            }
        };
        let Some(query) = query else { return self.waiting.remove(uid) };
        if let Some(node) = to_hold {
            self.outbox.push(self.ledger.hold(uid, node.as_str(), &query, now));
        }
        if self.waiting.see(pod.waiting_with(query.clone()), now) {
            self.learn(uid, &query);
            self.reasons.refused(uid);
        }
        // Last: room is only looked for again for a pod that waits.
        let is_of_earlier = self.writer.fenced(pod.fence) == Ordering::Less;
        self.room.preemptors.see_note(uid, pod.annotations.room_note.is_some(), is_of_earlier);
    }
}
