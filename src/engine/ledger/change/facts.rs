//! Facts: what the API server says about nodes and pods, what pods request, and that time passes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dashmap::Entry;

use crate::hardware::pool::{Borrow, PoolRule};
use crate::ledger::change::commits::{is_assumed, running_share};
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::model::event::LedgerEvent;
use crate::model::node_state::{NodeReporting, NodeState};
use crate::model::request::{GpuRequest, Movable};
use crate::model::reservation::{
    BorrowedMemory, Departure, OtherPod, Placement, PodRef, Reservation, ReservationState, Tenure,
};
use crate::scoring::guests;
use crate::waste::request_mix::{EarlierPod, Mix, RequestType, Stage};
use crate::waste::turnover::EarlierStart;
use wire::driver_work::DriverWork;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::mutation::{Mutation, mutated};
use wire::units::{HostAmount, Timestamp};

/// Types of requests of which the mix is made within a fraction of a millisecond.
const FEW_TYPES: usize = 256;

/// What the API server says about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFact {
    /// The pod.
    pub pod: PodRef,
    /// Its node; `None` while it waits.
    pub node: Option<NodeName>,
    /// Its CPU and host memory.
    pub host: HostAmount,
    /// Whether all its containers have ended for good.
    pub is_terminal: bool,
    /// Whether it requests GPU room, in valid or invalid form.
    pub wants_gpu: bool,
    /// Its request, if valid.
    pub request: Option<Arc<GpuRequest>>,
    /// The placement written on it, if valid.
    pub placement: Option<Placement>,
    /// Whether this process wrote its Binding, as far as the pod shows.
    pub bound_by_us: bool,
    /// What it shows about a move.
    pub moves: MoveFact,
    /// Its priority and start.
    pub tenure: Tenure,
}

/// What a pod shows about a move home.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveFact {
    /// Whether its container has ended where it was a guest, after the move was written.
    pub has_left: bool,
    /// Whether another process moves pods, so that what is written counts. Of this process's own
    /// moves the ledger knows more than a watch that may be behind.
    pub is_of_other: bool,
    /// Whether a process before this one, which acts, wrote it, and this one nothing yet: its watch may show only
    /// now that the pod starts elsewhere.
    pub is_of_earlier: bool,
}

impl PodFact {
    fn edited(&self, node: &NodeName) -> LedgerEvent {
        LedgerEvent::PlacementEdited { pod: self.pod.clone(), node: node.clone() }
    }

    fn unplaced(&self, node: &NodeName) -> LedgerEvent {
        LedgerEvent::Unplaced { pod: self.pod.clone(), node: node.clone() }
    }
}

impl Ledger {
    /// Notes that a node exists, with the CPU and host memory that it offers.
    pub fn see_node(&self, name: &NodeName, host: HostAmount, pool: PoolName) -> Vec<LedgerEvent> {
        let _stays = self.stay();
        let at = self.position_or_insert(name);
        let (mut is_new, mut was_gone, mut is_moved) = (false, false, false);
        let is_shared_again = self.share_pool(at, &pool);
        let mut events = self.change_node(at, |node_state| {
            was_gone = node_state.state() == NodeReporting::Gone;
            is_new = node_state.host_capacity() != host || is_shared_again;
            is_moved = *node_state.pool() != pool;
            node_state.see_node(host, pool);
        });
        if was_gone {
            self.node_entry(at).arrive_again(); // *filter* calls could not name it meanwhile
        }
        // What did not fit under the old rule of the pool, or might not use the old pool, may fit now.
        let room = LedgerEvent::Room(name.clone());
        if (is_shared_again || is_moved)
            && !events.contains(&room)
            && self.node_entry(at).read().placeable().is_ok()
        {
            events.push(room);
        }
        self.are_shapes_old.fetch_or(is_new, Ordering::AcqRel);
        events
    }

    /// Notes the failure domain of a node. Nodes of the same one may fail together.
    pub fn see_domain(&self, node: &NodeName, domain: &str) {
        let _stays = self.stay();
        let number = match domain {
            "" => 0,
            name => {
                let mut domains = self.domains.lock();
                match domains.get(name) {
                    Some(known) => *known,
                    None => {
                        let taken: BTreeSet<u32> = domains.values().copied().collect();
                        let next = (1..).find(|number| !taken.contains(number));
                        let next = next.expect("a cluster has fewer domains");
                        domains.insert(name.to_owned(), next);
                        next
                    }
                }
            }
        };
        self.set_domain(self.position_or_insert(node), number);
    }

    /// Notes whether a node's object says that it takes no new pods (`spec.unschedulable`). No
    /// answer depends on it: kube-scheduler leaves it out where it must. Its room requeues no pod.
    pub fn see_unschedulable(&self, node: &NodeName, is_unschedulable: bool) {
        let _stays = self.stay();
        let node_entry = self.node_entry(self.position_or_insert(node));
        node_entry.is_unschedulable.store(is_unschedulable, Ordering::Release);
    }

    /// Notes whether a node's kubelet is ready. Where it is not, no new pod comes, and pods whose deletion was
    /// requested hang.
    pub fn see_ready(&self, node: &NodeName, is_ready: bool) {
        let _stays = self.stay();
        self.node_entry(self.position_or_insert(node)).see_ready(is_ready);
    }

    /// Notes what NVIDIA's tools do with the driver of a node. Where it takes pods again, room appears.
    pub fn see_driver_work(&self, node: &NodeName, driver_work: DriverWork) -> Vec<LedgerEvent> {
        let _stays = self.stay();
        let at = self.position_or_insert(node);
        if self.node_entry(at).read().driver_work() == driver_work {
            return Vec::new();
        }
        let events = self.change_node(at, |node_state| node_state.see_driver_work(driver_work));
        if mutated(Mutation::UpgradeEndUnnoticed) { Vec::new() } else { events }
    }

    /// Why no process of a node may have its driver open, if so; `None` too if the node is not known.
    pub fn closes_library(&self, node: &str) -> Option<String> {
        let at = self.position(node).filter(|_| !mutated(Mutation::LibraryStaysOpen))?;
        self.node_entry(at).read().driver_work().closes_library()
    }

    /// Notes that a node was deleted. Its pods keep what they have until they are gone.
    pub fn lose_node(&self, name: &NodeName) {
        let _stays = self.stay();
        let Some(at) = self.position(name.as_str()) else { return };
        self.node_entry(at).change(NodeState::lose_node);
        self.are_shapes_old.store(true, Ordering::Release);
        self.recycle(at);
    }

    /// Notes what the API server says about a pod. Twice, late or in another order: the result is
    /// the same.
    ///
    /// What is written on a pod counts when the ledger first sees it: it keeps that placement and
    /// request. It also keeps what [`Ledger::reserve`] chose for its request, once the API server
    /// has accepted it. If another client edits the placement, an event says so.
    pub fn see_pod(&self, fact: &PodFact, now: Timestamp) -> Vec<LedgerEvent> {
        let uid = &fact.pod.uid;
        if fact.is_terminal {
            return self.end_pod(uid, now);
        }
        let Some(node) = &fact.node else { return Vec::new() };
        let _stays = self.stay();
        let Some(at) = self.position_for_pod(node) else {
            // A pod without a GPU counts only with what it takes of a node that exists.
            return Vec::from_iter(fact.wants_gpu.then(|| fact.unplaced(node)));
        };
        let entry = self.pods.entry(uid.clone());
        if self.ended().contains(uid) && !mutated(Mutation::EndedPodComesBack) {
            return Vec::new();
        }
        let mut held_at = entry.or_insert(at);
        if *held_at != at && keeps_devices(self.node_entry(*held_at).read().reservation(uid)) {
            return vec![fact.edited(node)];
        }
        let before = std::mem::replace(&mut *held_at, at);
        let (mut had, mut taken) = (None, None);
        let mut events = self.let_go(uid);
        if before != at {
            events.extend(self.change_node(before, |node_state| {
                had = running_share(node_state, uid);
                node_state.remove(uid);
            }));
        }
        let (mut is_placed, mut is_edited, mut is_made_again) = (true, false, false);
        events.extend(self.change_node(at, |node_state| {
            had = had.or(running_share(node_state, uid));
            is_edited = take_in(fact, node_state, now);
            guests::recall_excess(node_state);
            self.teams.see(uid, node_state);
            is_placed = node_state.reservation(uid).is_some();
            taken = running_share(node_state, uid);
            is_made_again = fact
                .placement
                .as_ref()
                .is_some_and(|written| node_state.has_made_again(uid, written));
        }));
        if let (None, Some(share)) = (had, taken) {
            self.turnover.lock().start(share);
        }
        if is_edited {
            events.push(fact.edited(node));
        } else if is_made_again {
            events.push(LedgerEvent::MadeAgain { pod: fact.pod.clone() });
        }
        if fact.wants_gpu && !is_placed {
            events.push(fact.unplaced(node));
        }
        events
    }

    /// Notes that a pod is terminal or gone. Its devices are free once its processes have ended.
    pub fn end_pod(&self, uid: &PodUid, now: Timestamp) -> Vec<LedgerEvent> {
        self.ended().remember(uid);
        let entry = self.pods.entry(uid.clone());
        let mut events = self.let_go(uid);
        let Entry::Occupied(held) = entry else { return events };
        let at = *held.get();
        let (mut is_gone, mut given_back) = (false, None);
        events.extend(self.change_node(at, |node_state| {
            given_back = running_share(node_state, uid);
            node_state.drain(uid, now);
            self.teams.see(uid, node_state);
            is_gone = !node_state.has_pod(uid);
        }));
        if is_gone {
            self.teams.forget(uid);
            held.remove();
            self.recycle(at);
        }
        if let Some(share) = given_back {
            self.turnover.lock().end(share);
        }
        events
    }

    /// Whether a pod has ended and left nothing behind: its devices are free.
    pub fn is_over(&self, uid: &PodUid) -> bool {
        self.reservation(uid).is_none() && self.has_ended(uid)
    }

    /// Whether a pod has ended. Its processes may still run.
    pub fn has_ended(&self, uid: &PodUid) -> bool {
        self.ended().contains(uid)
    }

    /// Notes that pods and nodes have been listed completely.
    pub fn set_listed(&self, now: Timestamp) {
        if !self.is_listed.swap(true, Ordering::AcqRel) {
            self.listed_at.store(now.millis(), Ordering::Release);
        }
    }

    /// Time has passed: nodes that do not report, drains that lasted too long, holds that are due. Pods that end
    /// while none comes make another mix, too.
    pub fn tick(&self, now: Timestamp) -> Vec<LedgerEvent> {
        let mut events = Vec::new();
        let turnover = self.turnover.lock().millionths();
        if self.window.lock().turns_otherwise(turnover) {
            self.learn_mix();
        }
        if mutated(Mutation::ReservationTimesOut) {
            for pod in self.assumed() {
                let state = self.reservation(&pod.uid).map(|held| held.state);
                if let Some(ReservationState::Assumed { since }) = state
                    && now.since(since) >= Duration::from_secs(5)
                {
                    events.extend(self.forget(&pod.uid));
                }
            }
        }
        self.look_at_divided();
        if self.are_shapes_old.load(Ordering::Acquire) {
            self.mix_for_other_nodes();
        }
        self.forget_many_gone_nodes();
        let node_table = self.node_table();
        for at in node_table.present() {
            let node_entry = &node_table[at];
            let (is_stale, is_due) = {
                let node_state = node_entry.read();
                let is_stale = node_state.is_stale(self.settings.stale_after, now);
                (is_stale, node_state.is_anything_due(self.settings.drain_limit, now))
            };
            if is_stale
                && node_entry
                    .change(|node_state| node_state.silence(self.settings.stale_after, now))
            {
                events.push(LedgerEvent::NotReporting(node_entry.name.clone()));
            }
            if is_due {
                let mut ended = Vec::new();
                events.extend(self.change_node(at, |node_state| {
                    ended = node_state.expire(self.settings.drain_limit, now);
                }));
                self.drop_index(at, &ended);
            }
        }
        events
    }

    /// Learns from a request, so that the request mix follows what pods request.
    pub fn learn(&self, uid: PodUid, query: &PlacementRequest) {
        if self.observe(uid, query) {
            self.learn_mix();
        }
    }

    /// The same for a thread that answers calls. Returns whether the mix is due and has more than 256 types:
    /// to make it takes milliseconds then, and [`Ledger::learn_mix`] is for another thread.
    #[must_use]
    pub fn observe(&self, uid: PodUid, query: &PlacementRequest) -> bool {
        let kind = RequestType::new(query.gpu.as_ref(), query.host.cpu);
        let (is_due, is_large) = {
            let mut window = self.window.lock();
            let is_due = window.observe(uid, kind, query.host.memory);
            let is_due = is_due && window.can_differ(self.turnover.lock().millionths());
            (is_due, window.counts().len() > FEW_TYPES)
        };
        if is_due && !is_large {
            self.learn_mix();
        }
        is_due && is_large
    }

    /// Learns from the pods that came before the process started, oldest first.
    pub fn recall(&self, pods: &[EarlierPod]) {
        let started = pods.iter().filter(|pod| pod.stage != Stage::Waits);
        let started = started.map(|pod| EarlierStart {
            created: pod.created_unix_seconds,
            share: pod.share,
            has_ended: pod.stage == Stage::Ended,
        });
        let turnover = {
            let mut turnover = self.turnover.lock();
            turnover.recall(&started.collect::<Vec<_>>());
            turnover.millionths()
        };
        self.make_mix(|window| {
            for EarlierPod { uid, kind, memory, .. } in pods {
                window.observe(uid.clone(), kind.clone(), *memory);
            }
            let made_at = window.moment(turnover);
            window.uses(Some(made_at));
            window.mix().with_turnover(turnover)
        });
    }

    /// Sets the mix, if it is known beforehand (simulation).
    pub fn set_mix(&self, mix: Mix) {
        self.make_mix(|window| {
            window.uses(None);
            mix
        });
    }
}

/// Takes in what the API server shows of a pod that is bound to this node. Whether that is an edit of what it has.
fn take_in(fact: &PodFact, node_state: &mut NodeState, now: Timestamp) -> bool {
    let held = node_state.reservation(&fact.pod.uid);
    let kept_before = held.filter(|held| {
        let is_kept = keeps_devices(Some(held)) || is_as_chosen(fact, held);
        is_kept && !mutated(Mutation::EditBelieved)
    });
    match (kept_before, &fact.placement) {
        (Some(held), written) => {
            let held = moved(fact, held, node_state.rule(), now);
            let is_edited =
                !written.as_ref().is_some_and(|written| is_written(written, &held.placement));
            node_state.allocate(kept(fact, &held, node_state));
            return is_edited;
        }
        (None, Some(written)) => {
            let request = fact.request.clone();
            let request = request.or_else(|| held.and_then(|held| held.request.clone()));
            let found = confirmed(fact, written.clone(), request);
            let rule = node_state.rule();
            node_state.allocate(moved(fact, &found, rule, now));
        }
        (None, None) => {
            let (name, host) = (fact.pod.name.clone(), fact.host);
            let other = OtherPod { name, host, tenure: fact.tenure };
            node_state.allocate_host(fact.pod.uid.clone(), other);
        }
    }
    false
}

/// The reservation for a written placement.
fn confirmed(fact: &PodFact, written: Placement, request: Option<Arc<GpuRequest>>) -> Reservation {
    Reservation {
        pod: fact.pod.clone(),
        placement: written,
        host: fact.host,
        state: ReservationState::Confirmed,
        request,
        tenure: Some(fact.tenure),
        departure: Departure::Stays,
        borrowed: BorrowedMemory::Free,
        is_hung: false,
    }
}

/// A reservation with the devices and request that it already had, and the rest as the API server
/// has it now. MIG instances that were made again are those that are written, once they are there.
fn kept(fact: &PodFact, held: &Reservation, node_state: &NodeState) -> Reservation {
    match held.state {
        ReservationState::Draining { .. } => held.clone(),
        ReservationState::Assumed { .. } | ReservationState::Confirmed => {
            let request = held.request.clone().or_else(|| fact.request.clone());
            let (departure, borrowed, is_hung) = (held.departure, held.borrowed, held.is_hung);
            let mut placement = held.placement.clone();
            if let Some(written) = &fact.placement {
                node_state.take_written(&mut placement, written);
            }
            Reservation { departure, borrowed, is_hung, ..confirmed(fact, placement, request) }
        }
    }
}

/// A reservation after what the pod shows about where it runs.
fn moved(fact: &PodFact, held: &Reservation, rule: PoolRule, now: Timestamp) -> Reservation {
    let request = held.request.as_deref();
    let is_restartable = request.is_some_and(|request| request.movable == Movable::Restart);
    // The version before this one moved such pods to other MIG instances.
    let changes_instances = rule.mig.makes() && is_restartable;
    // The version before this one also let pods start elsewhere that used no GPU.
    let lends = rule.borrow != Borrow::None;
    let may_be_moved = lends && held.may_borrow() || changes_instances;
    let mut held = held.clone();
    let written = fact.placement.as_ref();
    let is_of_another = fact.moves.is_of_other || fact.moves.is_of_earlier;
    if let Some(written) = written
        && is_of_another
        && changes_instances
        && has_other_instance(written, &held.placement)
    {
        // It has arrived: its versions in between are not shown.
        held.placement = written.clone();
        held.departure = match written.guest {
            None => Departure::Stays,
            Some(_) => Departure::Arrives { clean_lists: Some(0) },
        };
    }
    // This process has not called it home, so no pod needs its room.
    let is_of_stayer = fact.moves.is_of_earlier && held.departure == Departure::Stays;
    if (fact.moves.is_of_other || is_of_stayer)
        && let (Some(own), Some(written)) = (&held.placement.guest, written)
        && written.guest.is_none()
        && written.runs_on() == [own.on.clone()]
    {
        held.take_guest_room(); // it cannot be moved
    }
    // Taken for an edit, it would start where nothing is counted for it.
    let is_late = fact.moves.is_of_earlier && may_be_moved && held.placement.guest.is_none();
    if (fact.moves.is_of_other || is_late)
        && let Some(written) = written
        && is_same_home(written, &held.placement)
        && starts_elsewhere(written, &held)
    {
        // This process sees no more of it than lists show.
        let departure = Departure::Arrives { clean_lists: Some(0) };
        let departure = if written.guest.is_some() { departure } else { Departure::Stays };
        (held.placement.guest, held.departure) = (written.guest.clone(), departure);
    }
    let Some(guest) = &mut held.placement.guest else { return held };
    let seen = written.and_then(|written| written.guest.as_ref());
    let Some(seen) = seen.filter(|seen| seen.is_at_place_of(guest)) else { return held };
    // A move home is always possible, also one that another process wrote.
    let is_begun = guest.leaving.is_none() && seen.leaving.is_some();
    if is_begun || fact.moves.is_of_other {
        guest.leaving.clone_from(&seen.leaving);
    }
    let is_shown = guest.leaving.is_some() && guest.leaving == seen.leaving;
    held.departure = match held.departure {
        Departure::Stays | Departure::Recalled | Departure::Arrives { .. }
            if is_shown && (fact.moves.has_left || mutated(Mutation::RestartBelieved)) =>
        {
            Departure::Restarted { since: now, clean_lists: 0 }
        }
        Departure::Stays | Departure::Arrives { .. } if guest.leaving.is_some() => {
            Departure::Recalled
        }
        Departure::Recalled if guest.leaving.is_none() && fact.moves.is_of_other => {
            Departure::Stays
        }
        known => known,
    };
    held
}

/// Whether a pod has another MIG instance with the same profile than it had.
fn has_other_instance(written: &Placement, held: &Placement) -> bool {
    match (&written.spots[..], &held.spots[..]) {
        ([Some(now)], [Some(before)]) => now != before && now.profile == before.profile,
        _ => false,
    }
}

/// Whether it is written that the container of a pod which runs at home starts on another device, or that such a
/// pod stays at home after all.
fn starts_elsewhere(written: &Placement, held: &Reservation) -> bool {
    match (held.guest_on(), &written.guest) {
        (None, _) => has_staying_guest(written),
        (Some(_), None) => has_staying_guest(&held.placement),
        (Some(on), Some(guest)) => {
            let is_other = guest.on != *on;
            is_other && has_staying_guest(&held.placement) && has_staying_guest(written)
        }
    }
}

/// Whether the pod is a guest without a written move home.
fn has_staying_guest(placement: &Placement) -> bool {
    placement.guest.as_ref().is_some_and(|guest| guest.leaving.is_none())
}

/// Whether a pod that shows this placement shows what the ledger has. Its move may not be shown yet.
fn is_written(written: &Placement, held: &Placement) -> bool {
    is_same_home(written, held) && written.is_guest_as(held)
}

/// Whether both allocate the same, also if MIG instances were made again since.
fn is_same_home(written: &Placement, held: &Placement) -> bool {
    written.at_home() == held.at_home() || written.is_on_spots_of(held)
}

/// Whether the pod runs on devices of its reservation, despite later edits of its annotations.
fn keeps_devices(held: Option<&Reservation>) -> bool {
    held.is_some_and(|held| !held.placement.devices.is_empty()) && !is_assumed(held)
}

/// Whether the pod shows that the Binding of this reservation arrived: it has the placement, or a
/// Binding of this process for the same request and devices. In that case another client has edited
/// the amounts before they were read. A Binding of another process may have other amounts.
fn is_as_chosen(fact: &PodFact, held: &Reservation) -> bool {
    let Some(written) = &fact.placement else { return false };
    let chosen = &held.placement;
    let is_same_request = match (fact.request.as_deref(), held.request.as_deref()) {
        // The least memory is the operator's rule, which the watch does not add.
        (Some(now), Some(then)) => {
            GpuRequest { min_memory: then.min_memory, ..now.clone() } == *then
        }
        _ => false,
    };
    let are_same_devices = written.node == chosen.node
        && written.devices.len() == chosen.devices.len()
        && written.devices.iter().zip(&chosen.devices).all(|(own, its)| own.id == its.id);
    is_written(written, chosen) || (fact.bound_by_us && is_same_request && are_same_devices)
}
