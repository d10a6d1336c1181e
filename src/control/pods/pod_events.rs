//! Takes in what the watch shows of pods: those that wait, are bound, or are gone.

use std::sync::Arc;

use crate::bind::edits::see_written;
use crate::shared::app::App;
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::suggest::together::group_key;
use engine::model::event::LedgerEvent;
use engine::model::request::GpuRequest;
use engine::model::reservation::Tenure;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::start_failure::StartFailure;
use kube_api::pod::watch::Sink;
use kube_api::write::events::NoticeReason;
use wire::ids::{NodeName, PodUid};

impl App {
    /// Takes into the ledger a bound pod that was read before the watch shows it.
    pub fn see_bound(&self, seen: &SeenPod) {
        let fact = self.fact(seen, self.request(seen).map(Arc::new));
        let events = self.ledger.see_pod(&fact, self.clock.now());
        if self.ledger.is_over(&seen.pod.uid) {
            // It may have run unseen, and its processes may not have ended.
            self.ledger.wait_for_reports(seen.node.as_ref().map(NodeName::as_str));
        }
        self.outbox.push(events);
        // Of one whose end was seen nothing is noted: no list and no watch would say again that it ended.
        if !seen.life.is_terminal && !self.ledger.has_ended(&seen.pod.uid) {
            Sink::pod(self, seen);
        }
    }
}

impl App {
    /// Notes a pod that counts for its group: one that is bound, or has done its work.
    fn see_member(&self, pod: &SeenPod) {
        if let Some(group) = &pod.group {
            self.room.bound_groups.see(&pod.pod.uid, group_key(&pod.namespace, group), group.size);
        }
    }
}

impl Sink for App {
    fn events(&self, events: Vec<LedgerEvent>) {
        self.outbox.push(events);
    }

    fn request(&self, pod: &SeenPod) -> Option<GpuRequest> {
        self.ruled_request(pod)
    }

    fn fact(&self, pod: &SeenPod, request: Option<Arc<GpuRequest>>) -> PodFact {
        let class = self.request_rules.workloads.of(&pod.scheduling.priority_class);
        let bound_by_us = pod.fence.by.is_some() && self.writer.fenced(pod.fence).is_eq();
        let fact = pod.fact(request);
        let protection = class.and_then(|class| class.protection);
        let is_of_other = !self.lead.leading.is_here();
        let is_of_earlier = !is_of_other && self.is_of_earlier(pod);
        let moves = MoveFact { is_of_other, is_of_earlier, ..fact.moves };
        PodFact { bound_by_us, moves, tenure: Tenure { protection, ..fact.tenure }, ..fact }
    }

    fn pod(&self, pod: &SeenPod) {
        // For a pod that holds devices, the ledger reports that its placement was edited.
        if let Err(error) = &pod.placement
            && self.ledger.reservation(&pod.pod.uid).is_none()
        {
            let note = format!("its placement is ignored: {error}");
            self.tell(&pod.pod, NoticeReason::PlacementUnreadable, note);
        }
        match pod.is_unreadable()
            && (pod.placement != Ok(None) || self.config.serves(&pod.scheduling.scheduler))
        {
            true => drop(self.pods.unreadable.insert(pod.pod.uid.clone(), Arc::new(pod.clone()))),
            false => drop(self.pods.unreadable.remove(&pod.pod.uid)),
        }
        see_written(self, pod);
        self.pods.classes.see(pod);
        if pod.node.is_some()
            && let Some((_, accepted)) = self.binding.unseen_binds.remove(&pod.pod.uid)
        {
            self.metrics.watch_lagged(self.clock.precise().saturating_sub(accepted));
        }
        if pod.node.is_some() {
            self.see_before(pod);
        }
        match pod.node.is_some() && !pod.life.is_deleting {
            true => self.see_member(pod),
            false => self.room.bound_groups.forget(&pod.pod.uid),
        }
        if pod.containers.start_failure.is_none() {
            self.pods.start_failures.remove(&pod.pod.uid);
        }
        let uid = &pod.pod.uid;
        let waits = pod.node.is_none()
            && !pod.life.is_deleting
            && self.config.serves(&pod.scheduling.scheduler);
        if !waits {
            self.forget_waiting(uid);
            return self.settle_pod(uid);
        }
        self.see_fence(pod);
        let mut pod = pod.clone();
        pod.judge(&self.request_rules);
        if pod.request == Ok(None) {
            self.pods.without_gpu.insert(uid.clone());
            self.binding.passed.see(uid);
            return self.settle_pod(uid);
        }
        self.pods.without_gpu.remove(uid);
        let pod = Arc::new(pod);
        if pod.scheduling.is_gated {
            // A note from a verb, of a pod that the watch did not show yet, is newer than this.
            if self.pods.pending.remove(uid).is_some() {
                self.waiting.remove(uid);
            }
            self.pods.gated.insert(uid.clone(), pod);
            return;
        }
        self.pods.gated.remove(uid);
        self.pods.pending.insert(uid.clone(), Arc::clone(&pod));
        self.see_waiting(&pod);
    }

    fn start_failed(&self, pod: &SeenPod, failure: &StartFailure) {
        self.tell(&pod.pod, NoticeReason::GpuStartFailed, failure.note());
        if pod.life.is_terminal {
            return;
        }
        self.pods.start_failures.insert(pod.pod.uid.clone(), failure.clone());
        let container = pod.containers.gpu.as_ref();
        if let Some(refused) =
            container.filter(|container| failure.is_of_device_of(&container.name))
        {
            self.room.moves.refuse(&pod.pod.uid, &refused.name);
        }
    }

    fn listed_again(&self) {
        let is_follower = self.lead.has_replicas() && !self.lead.leading.is_here();
        // The leader may have bound pods meanwhile whose end this list shows, and processes be left of them.
        if is_follower {
            self.ledger.wait_for_reports(None);
        }
    }

    fn pod_ended(&self, uid: &PodUid) {
        self.pods.unreadable.remove(uid);
        self.pods.start_failures.remove(uid);
        self.pods.edits.forget(uid);
        self.room.bound_groups.forget(uid);
        self.forget_waiting(uid);
        self.settle_pod(uid);
        self.room.moves.forget(uid);
        self.binding.other_placements.forget(uid);
        self.binding.unseen_binds.remove(uid);
    }

    fn pod_succeeded(&self, pod: &SeenPod) {
        self.see_member(pod);
    }

    fn watched(&self, resource: &'static str, is_failure: bool) {
        self.metrics.watched(resource, is_failure);
    }
}
