//! The state of one node: what each pod has of which device, and what is free.
//!
//! The truth here is the list of reservations (as written) and the inventory (as reported). The
//! sums per device are derived from both; [`NodeState::audit`] derives them again. Facts from
//! outside may put more on a device than it has. It is then *overallocated*: nothing of it is free,
//! and nothing else stops. Only gpupack's own arithmetic is asserted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use litemap::LiteMap;

use crate::hardware::device_class::{ClassId, DeviceClasses};
use crate::hardware::inventory::NodeInventory;
use crate::hardware::mig::Geometry;
use crate::hardware::pool::PoolRule;
use crate::hardware::spots::{DividedGpu, Makeable, MigInventory, Spot, makeable};
use crate::hardware::topology::Topology;
use crate::model::device_state::{
    BEYOND, CLEAN_REPORTS_TO_FREE, DeviceGuest, DeviceState, Hold, HoldRule, Origin, StandingHold,
    Verification,
};
use crate::model::fit::{CompiledRequest, NeighborIsolation, Room};
use crate::model::isolation::LimitOrders;
use crate::model::node::intake::{Intake, Start};
use crate::model::rejection::Rejection;
use crate::model::request::Purpose;
use crate::model::reservation::{
    BorrowedMemory, Controller, Departure, Guest, MoveHome, OtherPod, PlacedDevice, Placement,
    PodRef, Reservation, ReservationState,
};
use wire::device::{Device, DeviceKind, Health, Slot};
use wire::driver_work::{DriverWork, UpgradeState};
use wire::ids::{DeviceId, MigProfile, NodeName, PodUid, PoolName};
use wire::mutation::{Mutation, mutated};
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{Demand, HostAmount, MemMib, MilliCpu, Share, Timestamp};

/// Whether a node can take pods, as far as its agent and its Node object are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeReporting {
    /// No agent has reported it since the extender started.
    NeverReported,
    /// Its agent reports in time.
    Reporting,
    /// Its agent has not reported for too long.
    NotReporting,
    /// Its Node object was deleted. It stays while pods have something there.
    Gone,
}

/// How long no pod gets an instance that could not be made.
pub const FAILED_FOR: Duration = Duration::from_secs(60);

/// What the agent of a node is to do about MIG instances.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstanceOrders {
    /// What is to be there.
    pub make: Vec<Spot>,
    /// What is to go.
    pub remove: Vec<DeviceId>,
    /// What is promised to pods that are being bound.
    pub promises: Vec<(PodUid, Spot)>,
}

/// A MIG instance that could be made on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpotDevice {
    /// The instance.
    pub makeable: Makeable,
    /// Its class.
    pub class: ClassId,
}

/// The state of one node.
#[derive(Clone, Debug)]
pub struct NodeState {
    name: NodeName,
    pool: PoolName,
    rule: PoolRule,
    state: NodeReporting,
    driver_work: DriverWork,
    host_capacity: HostAmount,
    host_allocated: HostAmount,
    host_held: HostAmount,
    devices: Vec<DeviceState>,
    /// The MIG instances that could be made, whether there is room for them or not.
    spots: Arc<[SpotDevice]>,
    /// The GPUs of the spots, each with what it may have, if that is known.
    divided: Arc<[(DeviceId, Option<Arc<Geometry>>)]>,
    mig: Arc<MigInventory>,
    /// Spots at which an instance could not be made, by id, with the time of the last failure.
    failed: BTreeMap<DeviceId, Timestamp>,
    limits: LimitOrders,
    topology: Topology,
    /// Room of the devices, with holds respected and with holds ignored. Each verb reads it.
    rooms: Vec<Room>,
    rooms_under_holds: Vec<Room>,
    reservations: LiteMap<PodUid, Reservation>,
    others: LiteMap<PodUid, OtherPod>,
    holds: BTreeMap<PodUid, Hold>,
    standing: BTreeMap<PodUid, StandingHold>,
    last_report: Option<Timestamp>,
    /// When the last two reports came, if both are of one session of its agent; the last one second.
    of_session: [Option<Timestamp>; 2],
    unmanaged_tolerance: MemMib,
    intake: Intake,
}

impl NodeState {
    /// The state of a node of which only the name is known.
    ///
    /// Use of a device beyond what is allocated counts only above `unmanaged_tolerance`: the
    /// driver's figures vary by some MiB.
    pub fn new(name: NodeName, unmanaged_tolerance: MemMib) -> Self {
        Self {
            name,
            pool: PoolName::new(""),
            rule: PoolRule::default(),
            state: NodeReporting::NeverReported,
            driver_work: DriverWork::default(),
            host_capacity: HostAmount::ZERO,
            host_allocated: HostAmount::ZERO,
            host_held: HostAmount::ZERO,
            devices: Vec::new(),
            spots: Arc::default(),
            divided: Arc::default(),
            mig: Arc::default(),
            failed: BTreeMap::new(),
            limits: LimitOrders::default(),
            topology: Topology::default(),
            rooms: Vec::new(),
            rooms_under_holds: Vec::new(),
            reservations: LiteMap::new(),
            others: LiteMap::new(),
            holds: BTreeMap::new(),
            standing: BTreeMap::new(),
            last_report: None,
            of_session: [None; 2],
            unmanaged_tolerance,
            intake: Intake::default(),
        }
    }

    /// Numbers its orders from here on: an agent may still name those of an earlier state of the node.
    pub fn count_orders_from(&mut self, number: u64) {
        self.limits.count_from(number);
    }

    /// The limits of memory that its agent is to set.
    pub fn limits(&self) -> &LimitOrders {
        &self.limits
    }

    /// Notes which limits its agent has in force, by device the number of the order.
    pub fn note_limits(&mut self, in_force: BTreeMap<DeviceId, u64>) {
        if self.limits.note(in_force) {
            for device_state in self.devices.iter_mut().filter(|it| it.rule.driver_limits) {
                if !self.limits.are_set(&device_state.device.id) {
                    device_state.lends_nothing();
                }
            }
            self.recompute_devices();
        }
    }

    /// Whether its agent has these in force already.
    pub fn has_limits(&self, in_force: &BTreeMap<DeviceId, u64>) -> bool {
        self.limits.has(in_force)
    }

    /// Derives the orders about limits of memory.
    fn order_limits(&mut self) {
        let Self { devices, limits, reservations, .. } = self;
        // Also where nothing is lent any more: pods may still have limits above their requests.
        let may = |uid: &PodUid| reservations.get(uid).is_some_and(Reservation::may_have_borrowed);
        let set = devices.iter().filter(|it| it.sets_limits);
        let orders = set.filter_map(|it| {
            // One that is away may still have its container here, with its limit. If it comes home, a pod comes.
            let memory = |uid: &PodUid, demand: Demand| match it.is_away(uid) {
                true => MemMib::ZERO,
                false => demand.memory,
            };
            let here = it.users();
            let pods = here.map(|(uid, demand)| (uid.clone(), (memory(uid, demand), may(uid))));
            let pods: BTreeMap<PodUid, (MemMib, bool)> = pods.collect();
            (!pods.is_empty()).then(|| (it.device.id.clone(), pods))
        });
        let orders: Vec<_> = orders.collect();
        limits.give(orders.into_iter());
    }

    /// Name of the node.
    pub fn name(&self) -> &NodeName {
        &self.name
    }

    /// Its pool.
    pub fn pool(&self) -> &PoolName {
        &self.pool
    }

    /// Whether it can take pods.
    pub fn state(&self) -> NodeReporting {
        self.state
    }

    /// The devices, sorted by index and UUID.
    pub fn devices(&self) -> &[DeviceState] {
        &self.devices
    }

    /// The topology of the devices, in the same order.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The MIG instances that could be made here.
    pub fn spots(&self) -> &[SpotDevice] {
        &self.spots
    }

    /// The device at a position of [`NodeState::rooms`], and where it lies if gpupack makes it.
    pub fn offered(&self, position: usize) -> Option<(&Device, Option<Spot>)> {
        if let Some(device_state) = self.devices.get(position) {
            return Some((&device_state.device, device_state.spot()));
        }
        let makeable = &self.spots.get(position - self.devices.len())?.makeable;
        Some((&makeable.device, Some(makeable.spot.clone())))
    }

    /// The position of a device in [`NodeState::rooms`].
    pub fn position_of(&self, id: &DeviceId) -> Option<usize> {
        let at = self.devices.iter().position(|device_state| device_state.device.id == *id);
        let spot = || self.spots.iter().position(|spot| spot.makeable.device.id == *id);
        at.or_else(|| Some(self.devices.len() + spot()?))
    }

    /// Room of each device, in the same order, and then of each MIG instance that could be made. Nothing is
    /// free of one that overlaps another which stays.
    pub fn rooms(&self, holds: HoldRule) -> &[Room] {
        match holds {
            HoldRule::Respected => &self.rooms,
            HoldRule::Ignored => &self.rooms_under_holds,
        }
    }

    /// All reservations, by UID.
    pub fn reservations(&self) -> &LiteMap<PodUid, Reservation> {
        &self.reservations
    }

    /// The pods without a placement, by UID.
    pub fn others(&self) -> &LiteMap<PodUid, OtherPod> {
        &self.others
    }

    /// All holds, by UID.
    pub fn holds(&self) -> &BTreeMap<PodUid, Hold> {
        &self.holds
    }

    /// All standing holds, by UID.
    pub fn standing_holds(&self) -> &BTreeMap<PodUid, StandingHold> {
        &self.standing
    }

    /// CPU and host memory that the node offers to pods.
    pub fn host_capacity(&self) -> HostAmount {
        self.host_capacity
    }

    /// CPU and host memory left beside pods and holds.
    pub fn host_free(&self) -> HostAmount {
        self.host_capacity.left_after(self.host_allocated).left_after(self.host_held)
    }

    /// CPU and host memory left, with holds respected or ignored.
    pub fn host_room(&self, holds: HoldRule) -> HostAmount {
        match holds {
            HoldRule::Respected => self.host_free(),
            HoldRule::Ignored => self.host_capacity.left_after(self.host_allocated),
        }
    }

    /// Whether a pod with these host amounts would take what standing holds keep of the host. That the node has
    /// them at all is for others to judge: kube-scheduler asks only about nodes that have, and when a pod ends it
    /// may know so before this state does.
    pub fn takes_kept_host(&self, host: HostAmount) -> bool {
        let free = self.host_free();
        let alone = self.standing.iter().filter(|(uid, _)| self.stands_alone(uid));
        let kept = sum_host(alone.map(|(_, hold)| hold.host));
        (host.cpu > free.cpu && kept.cpu > MilliCpu::ZERO)
            || (host.memory > free.memory && kept.memory > MemMib::ZERO)
    }

    /// CPU and host memory that a pod of a controller could have here beside all holds, if all pods left that
    /// it can wait for.
    pub fn host_beside_holds(&self, controller: Option<Controller>) -> HostAmount {
        let stays = self.reservations.values().filter(|held| held.outlasts(controller));
        let stays = sum_host(stays.map(|held| held.host));
        self.host_capacity.left_after(self.host_held).left_after(stays)
    }

    /// What a pod of a controller cannot have of a device however long it waits: what is kept for others there,
    /// and what pods have that do not end for it.
    pub fn out_of_reach(&self, device: &DeviceId, controller: Option<Controller>) -> Demand {
        let stays = self.reservations.values().filter(|held| held.outlasts(controller));
        let kept = self.standing.iter().filter(|(uid, _)| self.stands_alone(uid));
        let all = stays.map(|held| &held.placement).chain(kept.map(|(_, hold)| &hold.placement));
        let there = all.flat_map(|it| &it.devices).filter(|placed| placed.id == *device);
        there.map(|placed| placed.demand).fold(Demand::ZERO, sum)
    }

    /// When the last report was received.
    pub fn last_report(&self) -> Option<Timestamp> {
        self.last_report
    }

    /// Whether the state holds nothing that must be kept.
    pub fn is_forgettable(&self) -> bool {
        self.state == NodeReporting::Gone
            && self.reservations.is_empty()
            && self.others.is_empty()
            && self.holds.is_empty()
            && self.standing.is_empty()
    }

    /// The rejection of the node itself, for any request.
    ///
    /// # Errors
    /// The [`Rejection`] of every GPU pod.
    pub fn placeable(&self) -> Result<(), Rejection> {
        let DriverWork { upgrade, mig } = self.driver_work;
        match self.state {
            NodeReporting::Gone => return Err(Rejection::NodeGone),
            // First of all: its agent may be away for this reason.
            NodeReporting::NeverReported
            | NodeReporting::Reporting
            | NodeReporting::NotReporting => {
                let refuses = |state: &UpgradeState| {
                    state.refuses_pods() && !mutated(Mutation::UpgradeIgnored)
                };
                if let Some(state) = upgrade.filter(refuses) {
                    return Err(Rejection::DriverUpgrade(state));
                }
                if let Some(change) = mig.filter(|_| !mutated(Mutation::MigChangeIgnored)) {
                    return Err(Rejection::MigChange(change));
                }
            }
        }
        match self.state {
            NodeReporting::NeverReported => Err(Rejection::NeverReported),
            NodeReporting::NotReporting => Err(Rejection::NotReporting),
            NodeReporting::Gone => Err(Rejection::NodeGone),
            NodeReporting::Reporting if self.devices.is_empty() => Err(Rejection::NoDevices),
            NodeReporting::Reporting if !self.intake.takes_pods() => Err(Rejection::BlindStarts),
            NodeReporting::Reporting => Ok(()),
        }
    }

    /// The rejection of the node itself, for this request.
    ///
    /// # Errors
    /// As [`placeable`](Self::placeable), and if the request may not use the node's pool. A probe may find out
    /// whether containers get their GPU again.
    pub fn placeable_for(&self, compiled: &CompiledRequest) -> Result<(), Rejection> {
        let purpose = compiled.gpu.as_ref().map_or(Purpose::Work, |request| request.purpose);
        match (self.placeable(), purpose) {
            (Err(Rejection::BlindStarts), Purpose::Probe) => {}
            (placeable, Purpose::Work | Purpose::Probe) => placeable?,
        }
        match &compiled.gpu {
            Some(request) if !request.pools.accepts(&self.pool) => Err(Rejection::Pool),
            Some(_) | None => Ok(()),
        }
    }

    /// Whether the last pods that started here got their GPU.
    pub fn intake(&self) -> &Intake {
        &self.intake
    }

    /// Notes that a pod started with its GPU or without.
    pub fn note_start(&mut self, pod: &PodUid, start: Start, now: Timestamp) {
        self.intake = self.intake.after_start(pod, start, now);
    }

    /// Notes that another agent reports. It has the driver if a device can be read.
    pub fn note_new_agent(&mut self, uses: &[DeviceUse]) {
        if uses.iter().any(|seen| seen.health != Health::Unhealthy) {
            self.intake = self.intake.after_new_agent();
        }
    }

    /// Notes what the Node object says.
    pub fn see_node(&mut self, capacity: HostAmount, pool: PoolName) {
        self.host_capacity = capacity;
        self.pool = pool;
        if self.state == NodeReporting::Gone {
            self.state = match self.last_report {
                Some(_) => NodeReporting::NotReporting, // until its agent reports again
                None => NodeReporting::NeverReported,
            };
        }
    }

    /// Notes what NVIDIA's tools do with its driver.
    pub fn see_driver_work(&mut self, driver_work: DriverWork) {
        self.driver_work = driver_work;
    }

    /// What NVIDIA's tools do with its driver.
    pub fn driver_work(&self) -> DriverWork {
        self.driver_work
    }

    /// Notes that the Node object was deleted.
    pub fn lose_node(&mut self) {
        self.state = NodeReporting::Gone;
        self.driver_work = DriverWork::default();
    }

    /// Applies a report: use of the devices, and with it the end of drained pods.
    ///
    /// Returns the pods whose room is free now.
    pub fn observe(&mut self, uses: &[DeviceUse], now: Timestamp) -> Vec<PodUid> {
        self.last_report = Some(now);
        self.of_session = [self.of_session[1], Some(now)];
        if self.state != NodeReporting::Gone {
            self.state = NodeReporting::Reporting;
        }
        let freed = self.count_clean_report(uses, now);
        for uid in &freed {
            self.remove(uid);
        }
        self.count_clean_lists(uses, now);
        let mut has_changed = false;
        for (at, seen) in uses.iter().enumerate() {
            // Agents nearly always name the devices in the order of the ledger.
            let is_it = |device_state: &DeviceState| device_state.device.id == seen.id;
            let there = self.devices.get(at).is_some_and(is_it).then_some(at);
            let Some(at) = there.or_else(|| self.devices.iter().position(is_it)) else { continue };
            let (reservations, others) = (&self.reservations, &self.others);
            let holds = |uid: &PodUid| reservations.contains_key(uid) || others.contains_key(uid);
            let device_state = &mut self.devices[at];
            let standing = |it: &DeviceState| (it.health, it.unallocated_use(), it.is_unread);
            let before = standing(device_state);
            match &seen.processes {
                _ if mutated(Mutation::LeftoversIgnored) => {}
                Some(list) => device_state.see_leftovers(list, now, holds),
                None => device_state.suspect_leftovers(seen.used, now),
            }
            if seen.processes.is_some() {
                device_state.listed = Some(now);
            }
            device_state.observe(seen, self.unmanaged_tolerance, now);
            has_changed |= before != standing(device_state);
        }
        if has_changed {
            self.recompute_rooms();
        }
        freed
    }

    /// Whether the node has stopped reporting: its last report is older than `stale_after`.
    pub fn is_stale(&self, stale_after: Duration, now: Timestamp) -> bool {
        self.state == NodeReporting::Reporting
            && self.last_report.is_none_or(|last| now.since(last) > stale_after)
    }

    /// Marks a stale node as not reporting: its tenants stay, it takes no new ones until it reports again.
    /// Returns whether it was stale.
    pub fn silence(&mut self, stale_after: Duration, now: Timestamp) -> bool {
        let is_stale = self.is_stale(stale_after, now);
        if is_stale && !mutated(Mutation::SilentNodeTakesPods) {
            self.state = NodeReporting::NotReporting;
        }
        is_stale
    }

    /// Enters a reservation: the one way in, for `bind` (assumed) and for facts (confirmed).
    /// Replaces an existing reservation of the pod and ends its hold.
    pub fn allocate(&mut self, mut reservation: Reservation) {
        let uid = reservation.pod.uid.clone();
        let came = match reservation.state {
            ReservationState::Assumed { since } => Some(since),
            ReservationState::Confirmed | ReservationState::Draining { .. } => self.last_report,
        };
        if let (false, Some(came)) = (self.reservations.contains_key(&uid), came) {
            self.intake = self.intake.after_placing(&uid, came);
        }
        reservation.placement.node = self.name.clone();
        let is_any = |_: &DeviceId| true; // the next inventory gives it what is there
        find_instances((&self.spots, &self.devices), &mut reservation.placement, is_any, is_any);
        share_ids(&self.devices, &mut reservation);
        self.release(&uid);
        self.others.remove(&uid);
        let devices = self.devices.iter_mut().enumerate();
        let listed = devices.filter_map(|(at, it)| Some((at, it.forget_leftover(&uid)?)));
        let listed: Vec<(usize, Option<MemMib>)> = listed.collect();
        self.reservations.insert(uid.clone(), reservation);
        self.recompute();
        if listed.is_empty() || mutated(Mutation::ListedUseForgotten) {
            return;
        }
        for (at, memory) in listed {
            self.devices[at].explain(&uid, memory, self.unmanaged_tolerance);
        }
        self.recompute_rooms();
    }

    /// Notes that a pod without a GPU runs here, with its CPU and host memory.
    pub fn allocate_host(&mut self, uid: PodUid, other: OtherPod) {
        self.release(&uid);
        self.reservations.remove(&uid);
        for device_state in &mut self.devices {
            device_state.forget_leftover(&uid);
        }
        self.others.insert(uid, other);
        self.recompute();
    }

    /// Notes that the API server knows the pod as bound with its placement.
    pub fn confirm(&mut self, uid: &PodUid) {
        if let Some(reservation) = self.reservations.get_mut(uid)
            && matches!(reservation.state, ReservationState::Assumed { .. })
        {
            reservation.state = ReservationState::Confirmed;
        }
    }

    /// Removes a pod. Returns whether it was there.
    pub fn remove(&mut self, uid: &PodUid) -> bool {
        self.intake = self.intake.after_leaving(uid);
        let there = self.reservations.remove(uid).is_some() | self.others.remove(uid).is_some();
        if there && !mutated(Mutation::StaleSums) {
            self.recompute();
        }
        there
    }

    /// Keeps room for a pod. Replaces its earlier hold here.
    pub fn hold(&mut self, uid: PodUid, hold: Hold) {
        self.holds.insert(uid, hold);
        self.recompute();
    }

    /// Ends a hold. Returns it if there was one.
    pub fn release(&mut self, uid: &PodUid) -> Option<Hold> {
        let hold = self.holds.remove(uid);
        if hold.is_some() {
            self.recompute();
        }
        hold
    }

    /// On a copy: as if processes of pods that have ended were gone.
    pub(crate) fn forget_unallocated_use(&mut self) {
        self.devices.iter_mut().for_each(DeviceState::forget_unallocated_use);
        self.recompute_rooms();
    }

    /// Keeps room for the first pod of a line. Replaces its earlier standing hold here.
    pub fn stand(&mut self, uid: PodUid, hold: StandingHold) {
        self.standing.insert(uid, hold);
        self.recompute();
    }

    /// Ends a standing hold. Returns it if there was one.
    pub fn stand_down(&mut self, uid: &PodUid) -> Option<StandingHold> {
        let hold = self.standing.remove(uid);
        if hold.is_some() {
            self.recompute();
        }
        hold
    }

    /// Whether a pod has nothing here but a standing hold. Otherwise that takes nothing.
    fn stands_alone(&self, uid: &PodUid) -> bool {
        !self.holds.contains_key(uid) && !self.has_pod(uid)
    }

    /// Whether a pod is on the node, with devices or without.
    pub fn has_pod(&self, uid: &PodUid) -> bool {
        self.reservations.contains_key(uid) || self.others.contains_key(uid)
    }

    /// How many pods are kept, in all tables together.
    #[doc(hidden)] // for tests
    pub fn entries(&self) -> usize {
        let on_devices = self.devices.iter().map(DeviceState::entries).sum::<usize>();
        let kept = self.holds.len() + self.standing.len();
        self.reservations.len() + self.others.len() + kept + on_devices
    }

    /// The reservation of a pod.
    pub fn reservation(&self, uid: &PodUid) -> Option<&Reservation> {
        self.reservations.get(uid)
    }
}

/// Gives a placement the instances that are at its spots and not known yet, or else the spots. Those that are
/// `named` are other pods' own.
fn find_instances(
    (spots, devices): (&[SpotDevice], &[DeviceState]),
    placement: &mut Placement,
    is_known: impl Fn(&DeviceId) -> bool,
    is_named: impl Fn(&DeviceId) -> bool,
) {
    for (placed, spot) in placement.devices.iter_mut().zip(&placement.spots) {
        let Some(spot) = spot else { continue };
        // It stays the pod's also if the agent does not know any more that it made it.
        let keeps = |it: &DeviceState| {
            let may_be = it.origin == Origin::Made || !mutated(Mutation::ForgottenInstanceFreed);
            it.device.id == placed.id && it.lies_at(spot) && may_be
        };
        if devices.iter().any(keeps) {
            continue;
        }
        let makeable = spots.iter().map(|known| &known.makeable).find(|it| it.spot == *spot);
        let Some(makeable) = makeable else { continue };
        let found = new_at(devices, spot, &is_known);
        // One that others made at this place, or that the agent does not know any more: none can be made there,
        // and no order removes it.
        let is_its =
            |it: &&DeviceState| it.origin == Origin::Found && it.slot.is_some() && it.lies_at(spot);
        let given = || devices.iter().find(|it| is_its(it) && !is_named(&it.device.id));
        let found = found.or_else(given);
        *placed = whole(found.map_or(&makeable.device, |it| &it.device));
    }
}

/// The instance that gpupack made at a spot, unless it was known before.
fn new_at<'a>(
    devices: &'a [DeviceState],
    spot: &Spot,
    is_known: impl Fn(&DeviceId) -> bool,
) -> Option<&'a DeviceState> {
    let place = Some((&spot.gpu, &spot.profile, spot.start));
    let mut made = devices.iter().filter(|it| it.origin == Origin::Made);
    let is_new = |id: &DeviceId| !is_known(id) || mutated(Mutation::OldInstanceGiven);
    made.find(|it| it.place() == place && is_new(&it.device.id))
}

/// Gives a pod that moves to another instance the one that is there and not known yet, or else the spot.
fn find_other(
    (spots, devices): (&[SpotDevice], &[DeviceState]),
    placement: &mut Placement,
    is_known: impl Fn(&DeviceId) -> bool,
) {
    let Some(Guest { on, spot: Some(spot), .. }) = &mut placement.guest else { return };
    if devices.iter().any(|it| it.device.id == *on && it.lies_at(spot)) {
        return;
    }
    let makeable = spots.iter().map(|known| &known.makeable).find(|it| it.spot == *spot);
    let Some(makeable) = makeable else { return };
    let found = new_at(devices, spot, is_known);
    *on = found.map_or(&makeable.device, |it| &it.device).id.clone();
}

/// All of an instance, also if it has some MiB more or less than its profile says.
fn whole(instance: &Device) -> PlacedDevice {
    let demand = Demand { memory: instance.capacity(), share: Share::WHOLE };
    PlacedDevice { id: instance.id.clone(), demand }
}

/// Lets a reservation share the texts of its ids with the devices. Its own copies would be a third
/// of the memory that a pod takes.
fn share_ids(devices: &[DeviceState], reservation: &mut Reservation) {
    for placed in &mut reservation.placement.devices {
        if let Some(device_state) =
            devices.iter().find(|device_state| device_state.device.id == placed.id)
        {
            placed.id = device_state.device.id.clone();
        }
    }
    if let Some(guest) = &mut reservation.placement.guest
        && let Some(found) = devices.iter().find(|it| it.device.id == guest.on)
    {
        guest.on = found.device.id.clone();
    }
}

impl NodeState {
    /// Replaces the inventory; reservations stay, also those on devices that are gone.
    pub fn replace_inventory(&mut self, inventory: &NodeInventory, classes: &mut DeviceClasses) {
        let mut old: BTreeMap<DeviceId, DeviceState> = self
            .devices
            .drain(..)
            .map(|device_state| (device_state.device.id.clone(), device_state))
            .collect();
        // In the first inventory all instances are old: an earlier process may have ordered to remove them.
        let devices = inventory.devices().iter().map(|device| &device.id);
        let known: BTreeSet<DeviceId> = match old.is_empty() {
            true => devices.cloned().collect(),
            false => old.keys().cloned().collect(),
        };
        self.devices = inventory
            .devices()
            .iter()
            .map(|device| {
                let before = old.remove(&device.id);
                let class = classes.id_of(inventory.mig().class_of(device, self.rule));
                DeviceState::new(device.clone(), class, self.rule, before)
            })
            .collect();
        self.topology = inventory.topology().clone();
        self.mig = Arc::clone(inventory.mig());
        self.find_spots(classes);
        self.find_instances(&known);
        for (_, reservation) in self.reservations.iter_mut() {
            share_ids(&self.devices, reservation);
        }
        self.recompute_devices();
    }

    /// Gives new pods nothing of the devices that are not `known` yet until a report names them:
    /// processes of pods that ended before may use them.
    pub fn wait_for_use(&mut self, known: &[DeviceId]) {
        let are_there = self.devices.iter_mut().filter(|it| it.origin != Origin::Promised);
        for device_state in are_there {
            let is_new = !known.contains(&device_state.device.id);
            device_state.is_unread |= is_new && !mutated(Mutation::UnreadIsFree);
        }
        self.recompute_rooms();
    }

    /// Whether all devices are of the first `count` classes. A list of classes that was read
    /// earlier may lack those of devices that came since.
    pub fn is_of_classes(&self, count: usize) -> bool {
        self.classes().all(|class| class.is_of_first(count))
    }

    /// The classes of its devices, and of the MIG instances that could be made.
    pub fn classes(&self) -> impl Iterator<Item = ClassId> {
        let devices = self.devices.iter().map(|device_state| device_state.class);
        devices.chain(self.spots.iter().map(|spot| spot.class))
    }

    /// Whether some pod runs on another device than its own, or may use more memory than it requests.
    pub fn has_borrowers(&self) -> bool {
        let borrows = |it: &DeviceState| !it.guests.is_empty() || !it.memory_limits.is_empty();
        self.devices.iter().any(borrows)
    }

    /// How the devices are shared.
    pub fn rule(&self) -> PoolRule {
        self.rule
    }

    /// Shares the devices by another rule from now on. Tenants keep what they have.
    pub fn share_by(&mut self, rule: PoolRule, classes: &mut DeviceClasses) {
        self.rule = rule;
        for device_state in &mut self.devices {
            if !rule.borrow.lends_memory() {
                device_state.lends_nothing();
            }
            device_state.class = classes.id_of(self.mig.class_of(&device_state.device, rule));
            device_state.rule = rule;
        }
        self.find_spots(classes);
        let known = self.devices.iter().map(|it| it.device.id.clone()).collect();
        self.find_instances(&known);
        self.recompute_devices();
    }

    /// Lists the MIG instances that could be made, and says which of those that are there gpupack made.
    fn find_spots(&mut self, classes: &mut DeviceClasses) {
        let (mig, rule) = (Arc::clone(&self.mig), self.rule);
        let mut spots = Vec::new();
        for gpu in self.devices.iter().map(|it| &it.device) {
            if !rule.mig.divides(gpu) {
                continue;
            }
            let profiles = mig.profiles_of(&gpu.id);
            spots.extend(makeable(gpu, profiles).map(|makeable| {
                let class = classes.id_of(mig.class_of(&makeable.device, rule));
                SpotDevice { makeable, class }
            }));
        }
        for device_state in &mut self.devices {
            let DeviceKind::MigInstance { parent, .. } = &device_state.device.kind else {
                continue;
            };
            let Some((slot, is_made)) = mig.instance(&device_state.device.id) else { continue };
            let is_made = is_made || mutated(Mutation::ForeignInstanceRemoved);
            let is_ours = is_made && spots.iter().any(|spot| spot.makeable.spot.gpu == *parent);
            device_state.slot = Some(slot);
            device_state.origin = if is_ours { Origin::Made } else { Origin::Found };
        }
        let gpus: BTreeSet<&DeviceId> = spots.iter().map(|it| &it.makeable.spot.gpu).collect();
        let gpus = self.devices.iter().filter(|it| gpus.contains(&it.device.id));
        let divided = gpus.map(|it| (it.device.id.clone(), mig.geometry_of(&it.device))).collect();
        (self.spots, self.divided) = (spots.into(), divided);
    }

    /// What can be made of MIG, and where the instances lie, by the last inventory.
    pub fn mig(&self) -> &MigInventory {
        &self.mig
    }

    /// The GPUs on which instances are made, without those of which no geometry is known.
    pub fn divided(&self, holds: HoldRule) -> impl Iterator<Item = (&DeviceId, DividedGpu)> {
        let known = self.divided.iter().filter_map(|(gpu, known)| {
            let own = self.devices.iter().find(|it| it.device.id == *gpu)?;
            Some((gpu, &own.device.model, known.as_ref()?))
        });
        known.map(move |(gpu, model, geometry)| {
            let of = |it: &DeviceState| match &it.device.kind {
                DeviceKind::MigInstance { parent, profile } if parent == gpu && it.stays(holds) => {
                    Some((profile.clone(), it.slot?.start))
                }
                _ => None,
            };
            let instances = self.devices.iter().filter_map(of).collect();
            let (model, geometry) = (model.clone(), Arc::clone(geometry));
            (gpu, DividedGpu { model, geometry, instances })
        })
    }

    /// Gives each placement on a spot the instance that has appeared there: it was made, or made again. An
    /// instance that was `known` before is given to no pod: an order to remove it may be under way. Nor is
    /// one that another pod names, which others had made before: a UUID may come again. If an instance has
    /// gone, the placement gets the spot, where another one is to be made.
    fn find_instances(&mut self, known: &BTreeSet<DeviceId>) {
        if self.spots.is_empty() {
            return;
        }
        let all = self.reservations.values().map(|held| &held.placement);
        let given = all.flat_map(Placement::parts).filter(|(_, spot)| spot.is_none());
        let named: BTreeSet<DeviceId> = given.map(|(placed, _)| placed.id.clone()).collect();
        let is_bound = |held: &Reservation| held.state == ReservationState::Confirmed;
        let held = self.reservations.iter_mut();
        let held = held.map(|(_, held)| (is_bound(held), &mut held.placement));
        let holds = self.holds.values_mut().map(|hold| (false, &mut hold.placement));
        let is_ignored = mutated(Mutation::NamedInstanceGiven);
        let is_named = |id: &DeviceId| named.contains(id) && !is_ignored;
        let is_known = |id: &DeviceId| known.contains(id) || is_named(id);
        // What is made at the spot of a standing hold is that of a pod which has to end first.
        for (is_bound, placement) in held.chain(holds) {
            // A pod that is not bound yet can go elsewhere.
            let is_others = |id: &DeviceId| !is_bound || is_named(id);
            find_instances((&self.spots, &self.devices), placement, is_known, is_others);
        }
        for (_, held) in self.reservations.iter_mut().filter(|(_, held)| held.changes_instances()) {
            find_other((&self.spots, &self.devices), &mut held.placement, is_known);
        }
    }

    /// Gives a placement whose instances are not there those that are written on its pod, if these are: another
    /// process knew them first.
    pub fn take_written(&self, placement: &mut Placement, written: &Placement) {
        if !written.is_on_spots_of(placement) {
            return;
        }
        let its = placement.devices.iter_mut().zip(&placement.spots).zip(&written.devices);
        for ((placed, spot), written) in its {
            let Some(spot) = spot else { continue };
            let is_made = |it: &DeviceState| it.device.id == placed.id && it.lies_at(spot);
            if self.devices.iter().any(is_made) {
                continue;
            }
            let is_it = |it: &&DeviceState| it.device.id == written.id && it.lies_at(spot);
            match self.devices.iter().find(is_it) {
                Some(there) => *placed = whole(&there.device),
                // The first inventory says whether it lies there.
                None if self.spots.is_empty() => placed.id = written.id.clone(),
                None => {}
            }
        }
    }

    /// What the agent is to do now: the instances to make, those of pods that are bound or being bound; and
    /// those to remove, which no pod has. No pod gets one of the latter.
    pub fn instance_orders(&self) -> InstanceOrders {
        let is_bound = |uid: &PodUid| {
            let state = self.reservations.get(uid).map(|held| held.state);
            state.is_some_and(|state| !matches!(state, ReservationState::Draining { .. }))
        };
        let promised = self.devices.iter().filter(|it| it.origin == Origin::Promised);
        let promised = promised.filter(|it| it.tenants.keys().any(is_bound));
        let is_kept = mutated(Mutation::IdleInstanceStays);
        let idle = self
            .devices
            .iter()
            .filter(|it| it.is_leaving() && !it.is_kept(HoldRule::Respected) && !it.is_unread)
            .filter(|_| !is_kept);
        let idle: Vec<&DeviceState> = idle.collect();
        // An idle one at the same place has to go before: the agent lets stay what is to be there.
        let is_open = |spot: &Spot| !idle.iter().any(|it| it.lies_at(spot));
        InstanceOrders {
            make: promised.filter_map(DeviceState::spot).filter(is_open).collect(),
            remove: idle.iter().map(|it| it.device.id.clone()).collect(),
            promises: self.promises(),
        }
    }

    fn promises(&self) -> Vec<(PodUid, Spot)> {
        let is_open = |held: &Reservation| matches!(held.state, ReservationState::Assumed { .. });
        let open = self.reservations.iter().filter(|(_, held)| is_open(held));
        let open = open.map(|(uid, held)| (uid, &held.placement));
        let kept = self.holds.iter().filter(|(_, hold)| hold.is_promise);
        let all = open.chain(kept.map(|(uid, hold)| (uid, &hold.placement)));
        let spots = all.flat_map(|(uid, placement)| {
            placement.spots.iter().flatten().map(|spot| (uid.clone(), spot.clone()))
        });
        spots.collect()
    }

    /// Notes which instances the agent cannot remove. No other is promised on their units meanwhile.
    pub fn note_held_open(&mut self, held_open: &BTreeSet<DeviceId>) {
        if self.has_held_open(held_open) {
            return;
        }
        for device_state in &mut self.devices {
            device_state.is_held_open = held_open.contains(&device_state.device.id);
        }
        self.recompute_rooms();
    }

    /// Whether these of its instances cannot be removed, and no others.
    pub fn has_held_open(&self, held_open: &BTreeSet<DeviceId>) -> bool {
        self.devices.iter().all(|it| it.is_held_open == held_open.contains(&it.device.id))
    }

    /// The instance that the agent cannot remove, on the units of the spot with this id.
    pub fn held_open_at(&self, id: &DeviceId) -> Option<&DeviceId> {
        let spot = self.spots.iter().map(|it| &it.makeable).find(|it| it.device.id == *id)?;
        let (gpu, profile) = (&spot.spot.gpu, &spot.spot.profile);
        let mut held_open = self.devices.iter().filter(|it| it.is_held_open);
        let found = held_open.find(|it| it.units_taken_of(gpu, profile, spot.slot).is_some())?;
        Some(&found.device.id)
    }

    /// Notes that the agent could not make instances there, if it is so because of units on which an instance lies
    /// that no inventory has, with those. No pod gets one until [`FAILED_FOR`] later.
    pub fn note_failures(
        &mut self,
        failed: impl IntoIterator<Item = (Spot, Option<Slot>)>,
        now: Timestamp,
    ) {
        let of = |id: &DeviceId| self.spots.iter().find(|it| it.makeable.device.id == *id);
        let mut new = BTreeSet::new();
        for (spot, hidden) in failed {
            // It can be made as soon as that one is gone.
            let id = spot.id().filter(|_| hidden.is_none());
            if id.is_some_and(|id| self.held_open_at(&id).is_some()) {
                continue;
            }
            let hidden = hidden.map_or(0, Slot::units);
            let overlapping = self.spots.iter().map(|it| &it.makeable);
            let overlapping =
                overlapping.filter(|it| it.spot.gpu == spot.gpu && it.slot.units() & hidden != 0);
            new.extend(overlapping.map(|it| it.device.id.clone()));
            let spot = spot.id().as_ref().and_then(of);
            new.extend(spot.map(|it| it.makeable.device.id.clone()));
        }
        let is_news = new.iter().any(|id| !self.failed.contains_key(id));
        self.failed.extend(new.into_iter().map(|id| (id, now)));
        if is_news {
            self.recompute_rooms();
        }
    }

    /// Whether an instance could not be made at this spot a short time ago.
    pub fn has_failed(&self, id: &DeviceId) -> bool {
        self.failed.contains_key(id)
    }

    /// The part of a spot's units, in millionths, on which instances lie that end with their pods. `None` if
    /// one lies there that no pod has, such as one of others, or if none could be made a short time ago.
    pub fn covered_part(&self, spot: &SpotDevice, controller: Option<Controller>) -> Option<u64> {
        let Makeable { spot: Spot { gpu, profile, .. }, slot, device } = &spot.makeable;
        if self.has_failed(&device.id) {
            return None;
        }
        let mut covered = 0;
        for device_state in &self.devices {
            let Some(units) = device_state.units_taken_of(gpu, profile, *slot) else { continue };
            if !device_state.stays(HoldRule::Respected) {
                continue;
            }
            let is_left = device_state.origin == Origin::Made
                && device_state.tenants().is_empty()
                && device_state.stays(HoldRule::Ignored);
            let is_anothers =
                self.out_of_reach(&device_state.device.id, controller) != Demand::ZERO;
            if device_state.origin == Origin::Found || is_left || is_anothers {
                return None;
            }
            covered |= units;
        }
        let whole = u64::from(slot.units().count_ones().max(1));
        Some((u64::from(covered.count_ones()) * Share::WHOLE.millionths()).div_ceil(whole))
    }

    /// Whether a position of [`NodeState::rooms`] is the last choice: that of an instance on a GPU where another
    /// one could not be made a short time ago.
    pub fn is_last_choice(&self, position: usize) -> bool {
        let spot = position.checked_sub(self.devices.len()).and_then(|at| self.spots.get(at));
        let Some(SpotDevice { makeable, .. }) = spot else { return false };
        if self.failed.is_empty() {
            return false;
        }
        let mut same = self.spots.iter().map(|it| &it.makeable);
        same.any(|it| it.spot.gpu == makeable.spot.gpu && self.has_failed(&it.device.id))
    }

    /// Whether a MIG instance could be made for a request, whatever is there now.
    pub fn makes_instances_for(&self, compiled: &CompiledRequest) -> bool {
        self.spots.iter().any(|spot| compiled.demand_on(spot.class).is_ok())
    }

    /// The ids of the spots where a MIG instance can be made now, beside all holds.
    pub fn open_spots(&self) -> impl Iterator<Item = &DeviceId> {
        let takes_pods = self.placeable().is_ok();
        let rooms = self.rooms.iter().skip(self.devices.len());
        let is_hidden = mutated(Mutation::PlaceUnnoticed);
        let open = self.spots.iter().zip(rooms).filter(move |(_, room)| {
            !is_hidden && takes_pods && room.free != Demand::ZERO && room.health == Health::Healthy
        });
        open.map(|(spot, _)| &spot.makeable.device.id)
    }

    /// How many more instances of each profile could be made on a GPU, if no other is made.
    pub fn placeable_instances(&self, gpu: &DeviceId) -> BTreeMap<MigProfile, usize> {
        let mut counts = BTreeMap::new();
        let rooms = self.rooms.iter().skip(self.devices.len());
        let own = self.spots.iter().zip(rooms).filter(|(spot, _)| spot.makeable.spot.gpu == *gpu);
        for (spot, room) in own {
            let profile = &spot.makeable.spot.profile;
            let count: &mut usize = counts.entry(profile.clone()).or_default();
            let most = if profile.has_media() { 1 } else { usize::MAX };
            *count += usize::from(room.free != Demand::ZERO && *count < most);
        }
        counts
    }

    /// Whether all instances of a pod are there, and some are others than those written on it: they were made
    /// again.
    pub fn has_made_again(&self, uid: &PodUid, written: &Placement) -> bool {
        let Some(held) = self.reservations.get(uid) else { return false };
        let is_there = |placed: &PlacedDevice| {
            let mut devices = self.devices.iter();
            devices.any(|it| it.device.id == placed.id && it.origin != Origin::Promised)
        };
        let held = &held.placement;
        held.devices != written.devices
            && held.is_on_spots_of(written)
            && held.devices.iter().all(is_there)
    }

    /// The pods that are bound and have instances which were made again since they had `before`.
    pub fn made_again(&self, before: &LiteMap<PodUid, Reservation>) -> Vec<PodRef> {
        let bound = self.reservations.values().filter(|it| it.state == ReservationState::Confirmed);
        let again = bound.filter(|held| {
            let old = before.get(&held.pod.uid);
            old.is_some_and(|old| {
                old.state == ReservationState::Confirmed
                    && self.has_made_again(&held.pod.uid, &old.placement)
            })
        });
        again.map(|held| held.pod.clone()).collect()
    }

    /// The pods that are bound and whose instances are gone since they had `before`, with these. Others are to be
    /// made in their place.
    pub fn lost_instances(&self, before: &LiteMap<PodUid, Reservation>) -> Vec<(PodRef, DeviceId)> {
        let is_promised = |id: &DeviceId| {
            let mut devices = self.devices.iter();
            devices.any(|it| it.device.id == *id && it.origin == Origin::Promised)
        };
        let bound = |held: &&Reservation| held.state == ReservationState::Confirmed;
        let lost = self.reservations.values().filter(bound).flat_map(|held| {
            let old = before.get(&held.pod.uid).filter(bound);
            let old = old.into_iter().flat_map(|old| &old.placement.devices);
            let changed = old.zip(&held.placement.devices).filter(|(old, now)| old.id != now.id);
            let lost = changed.filter(|(_, now)| is_promised(&now.id));
            lost.map(|(old, _)| (held.pod.clone(), old.id.clone()))
        });
        lost.collect()
    }

    /// Adds the instances that are promised to pods and not made yet.
    fn note_promises(&mut self) {
        self.devices.retain(|device_state| device_state.origin != Origin::Promised);
        if self.spots.is_empty() {
            return;
        }
        let held = self.reservations.values().map(|held| &held.placement);
        let holds = self.holds.values().map(|hold| &hold.placement);
        let standing = self.standing.values().map(|hold| &hold.placement);
        let all = held.chain(holds).chain(standing).flat_map(|placement| &placement.devices);
        let guests = self.reservations.values().filter_map(Reservation::guest_on);
        let ids: BTreeSet<&DeviceId> = all.map(|placed| &placed.id).chain(guests).collect();
        for spot in self.spots.iter().filter(|spot| ids.contains(&spot.makeable.device.id)) {
            let mut promised =
                DeviceState::new(spot.makeable.device.clone(), spot.class, self.rule, None);
            (promised.origin, promised.slot) = (Origin::Promised, Some(spot.makeable.slot));
            self.devices.push(promised);
        }
    }

    /// Notes what the node's agent found about the configured isolation of a device.
    pub fn set_verification(&mut self, id: &DeviceId, verification: Verification) {
        if let Some(device_state) =
            self.devices.iter_mut().find(|device_state| device_state.device.id == *id)
        {
            device_state.verification = verification;
        }
        self.recompute_rooms();
    }

    /// Removes a device. Its tenants keep their reservations.
    pub fn lose_device(&mut self, id: &DeviceId) {
        if let Some(at) = self.devices.iter().position(|device_state| device_state.device.id == *id)
        {
            self.devices.remove(at);
            self.topology = self.topology.without(at);
        }
        self.recompute_rooms();
    }
}

impl NodeState {
    /// Derives all sums again, and compares them.
    ///
    /// # Errors
    /// [`AuditError`] naming what differs: gpupack's own arithmetic is broken.
    pub fn audit(&self) -> Result<(), AuditError> {
        let mut fresh = self.clone();
        fresh.recompute();
        let rooms = (&fresh.rooms, &fresh.rooms_under_holds);
        if fresh.devices != self.devices || rooms != (&self.rooms, &self.rooms_under_holds) {
            return Err(AuditError::Devices { node: self.name.clone() });
        }
        let host = (self.host_allocated, self.host_held);
        if (fresh.host_allocated, fresh.host_held) != host {
            return Err(AuditError::Host { node: self.name.clone() });
        }
        Ok(())
    }

    /// Derives all sums again. A node has few tenants, so this is cheap, and no error can grow.
    fn recompute(&mut self) {
        self.recompute_devices();
        let allocated = self.reservations.values().map(|held| held.host);
        self.host_allocated =
            sum_host(allocated.chain(self.others.values().map(|other| other.host)));
        let held = self.holds.values().map(|hold| hold.host);
        let standing = self.standing.iter().filter(|(uid, _)| self.stands_alone(uid));
        self.host_held = sum_host(held.chain(standing.map(|(_, hold)| hold.host)));
    }

    fn recompute_devices(&mut self) {
        self.note_promises();
        for device_state in &mut self.devices {
            device_state.sets_limits = self.limits.are_set(&device_state.device.id);
            device_state.allocated = Demand::ZERO;
            device_state.on_hold = Demand::ZERO;
            device_state.tenants.clear();
            device_state.guests.clear();
            device_state.away.clear();
            device_state.memory_limits.clear();
            (device_state.has_unisolated, device_state.requires_isolation) = (false, false);
        }
        for (uid, reservation) in &self.reservations {
            for placed in &reservation.placement.devices {
                if let Some(device_state) = device_mut(&mut self.devices, &placed.id) {
                    device_state.allocated = sum(device_state.allocated, placed.demand);
                    let held = device_state.tenants.entry(uid.clone()).or_default();
                    *held = sum(*held, placed.demand);
                    device_state.note_neighbors(reservation);
                    device_state.note_memory_limit(reservation, placed.demand);
                }
            }
            let Some(on) = reservation.guest_on() else { continue };
            let Some(PlacedDevice { id: home, demand }) = reservation.placement.devices.first()
            else {
                continue;
            };
            let is_leaving = reservation.is_going_home();
            if reservation.has_both() {
                if let Some(device_state) = device_mut(&mut self.devices, on) {
                    device_state.allocated = sum(device_state.allocated, *demand);
                    device_state.tenants.insert(uid.clone(), *demand);
                    device_state.note_neighbors(reservation);
                    device_state.note_memory_limit(reservation, *demand);
                }
                continue;
            }
            if let Some(device_state) = device_mut(&mut self.devices, on) {
                let guest = DeviceGuest { demand: *demand, is_leaving };
                device_state.guests.insert(uid.clone(), guest);
                device_state.note_memory_limit(reservation, *demand);
            }
            // On its way it may run in either place.
            let is_at_home = is_leaving || reservation.is_arriving();
            if let Some(device_state) = device_mut(&mut self.devices, home).filter(|_| !is_at_home)
            {
                device_state.away.push(uid.clone());
            }
        }
        for hold in self.holds.values() {
            for placed in &hold.placement.devices {
                if let Some(device_state) = device_mut(&mut self.devices, &placed.id) {
                    device_state.on_hold = sum(device_state.on_hold, placed.demand);
                }
            }
        }
        let mut standing: Vec<&StandingHold> =
            self.standing.iter().filter(|(uid, _)| self.stands_alone(uid)).map(|it| it.1).collect();
        standing.sort_by_key(|hold| hold.kept_for);
        for hold in standing {
            for placed in &hold.placement.devices {
                if let Some(device_state) = device_mut(&mut self.devices, &placed.id) {
                    device_state.stand(placed.demand);
                }
            }
        }
        self.order_limits();
        self.recompute_rooms();
    }

    fn recompute_rooms(&mut self) {
        let rooms = |holds| -> Vec<Room> {
            let rooms = self.devices.iter().map(move |device_state| device_state.room(holds));
            if self.spots.is_empty() {
                return rooms.collect();
            }
            let divided = Divided::of(&self.devices, holds);
            let promised =
                |it: &&DeviceState| it.origin == Origin::Promised && !it.tenants.is_empty();
            let promised: Vec<&DeviceState> = self.devices.iter().filter(promised).collect();
            let rooms = self.devices.iter().zip(rooms).map(|(it, room)| {
                let place = it.place().zip(it.slot);
                let is_covered = place.is_some_and(|((gpu, profile, _), slot)| {
                    !it.stays(holds) && divided.covers(gpu, profile, slot)
                });
                let is_blocked =
                    it.origin == Origin::Promised && self.is_blocked(it, &divided, holds);
                let is_anothers = promised.iter().any(|promised| it.is_in_the_way_of(promised));
                match it.is_leaving() || is_anothers || is_covered || is_blocked {
                    true => closed(room),
                    false => room,
                }
            });
            rooms.chain(self.spots.iter().map(|spot| self.room_of(spot, &divided))).collect()
        };
        (self.rooms, self.rooms_under_holds) =
            (rooms(HoldRule::Respected), rooms(HoldRule::Ignored));
    }

    /// Whether what is promised cannot be had for now, so that no other pod may get it: room may be kept on a GPU
    /// before the last instance there has ended.
    fn is_blocked(&self, promised: &DeviceState, divided: &Divided<'_>, holds: HoldRule) -> bool {
        let Some(((gpu, profile, _), slot)) = promised.place().zip(promised.slot) else {
            return false;
        };
        let is_in_the_way = |it: &DeviceState| {
            let overlaps = it.units_taken_of(gpu, profile, slot).is_some();
            overlaps && it.device.id != promised.device.id && it.stays(holds)
        };
        divided.health.get(gpu) != Some(&Health::Healthy)
            || divided.unread.contains(gpu)
            || self.has_failed(&promised.device.id)
            || self.devices.iter().any(is_in_the_way)
    }

    /// The room of an instance that could be made. Those that are there, or promised, are devices.
    fn room_of(&self, spot: &SpotDevice, divided: &Divided<'_>) -> Room {
        let Makeable { spot: Spot { gpu, profile, start }, slot, device } = &spot.makeable;
        let room = Room {
            class: spot.class,
            health: divided.health.get(gpu).copied().unwrap_or(Health::Unhealthy),
            free: Demand { memory: device.capacity(), share: Share::WHOLE },
            neighbors: NeighborIsolation::default(),
            is_covered: false,
        };
        let is_closed = divided.unread.contains(gpu)
            || divided.places.contains(&(gpu, profile, *start))
            || self.failed.contains_key(&device.id)
            || divided.covers(gpu, profile, *slot);
        if is_closed { closed(room) } else { room }
    }
}

fn closed(room: Room) -> Room {
    Room { free: Demand::ZERO, is_covered: true, ..room }
}

/// What is on the GPUs that are divided.
#[derive(Default)]
struct Divided<'a> {
    health: BTreeMap<&'a DeviceId, Health>,
    /// Those that a report has yet to name: it may show instances that an earlier leader ordered.
    unread: BTreeSet<&'a DeviceId>,
    /// By GPU: the units that instances cover which stay, and whether one has the media engines.
    covered: BTreeMap<&'a DeviceId, (u32, bool)>,
    /// Where instances lie that are offered as devices: GPU, profile and first unit.
    places: BTreeSet<(&'a DeviceId, &'a MigProfile, u32)>,
}

impl<'a> Divided<'a> {
    fn of(devices: &'a [DeviceState], holds: HoldRule) -> Self {
        let mut divided = Self::default();
        for device_state in devices {
            let DeviceKind::MigInstance { parent, profile } = &device_state.device.kind else {
                let gpu = &device_state.device.id;
                divided.health.insert(gpu, device_state.health);
                divided.unread.extend(device_state.is_unread.then_some(gpu));
                continue;
            };
            divided.places.extend(device_state.place().filter(|_| !device_state.is_leaving()));
            if device_state.stays(holds) {
                let (units, has_media) = divided.covered.entry(parent).or_default();
                // Of an instance that lies anywhere no other may be made.
                *units |= device_state.slot.map_or(u32::MAX, Slot::units);
                *has_media |= profile.has_media();
            }
        }
        divided
    }

    /// Whether an instance cannot be made there.
    fn covers(&self, gpu: &DeviceId, profile: &MigProfile, slot: Slot) -> bool {
        let (units, has_media) = self.covered.get(gpu).copied().unwrap_or_default();
        units & slot.units() != 0 || (has_media && profile.has_media())
    }
}

fn device_mut<'a>(devices: &'a mut [DeviceState], id: &DeviceId) -> Option<&'a mut DeviceState> {
    devices.iter_mut().find(|device_state| device_state.device.id == *id)
}

/// The sum of two written amounts. They are facts from outside, so an overflow stops nothing: the
/// device is overallocated. Each change derives the sums again, so nothing is subtracted from it.
fn sum(left: Demand, right: Demand) -> Demand {
    left.checked_add(right).unwrap_or(BEYOND)
}

/// The sum of CPU and host memory of pods, with the same reasoning as [`sum`].
fn sum_host(mut amounts: impl Iterator<Item = HostAmount>) -> HostAmount {
    let beyond = HostAmount { cpu: MilliCpu::new(u64::MAX), memory: BEYOND.memory };
    amounts.try_fold(HostAmount::ZERO, HostAmount::checked_add).unwrap_or(beyond)
}

/// Broken arithmetic of gpupack: the derived sums differ from what they are derived from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuditError {
    /// The sums of a device.
    #[error("sums of the devices of node `{node}` differ from its reservations")]
    Devices {
        /// The node.
        node: NodeName,
    },
    /// The sums of CPU and host memory.
    #[error("sums of CPU and memory of node `{node}` differ from its pods")]
    Host {
        /// The node.
        node: NodeName,
    },
    /// What a team has.
    #[error("pod `{pod}` counts for its team and has nothing, or has devices and does not count")]
    Team {
        /// The pod.
        pod: PodUid,
    },
}

impl NodeState {
    /// Counts this report for each pod that has left a device, if it lists the processes there. The
    /// pod is at home after enough lists without a process of it.
    fn count_clean_lists(&mut self, uses: &[DeviceUse], now: Timestamp) {
        let are_there = self.devices.iter().filter(|it| it.origin != Origin::Promised);
        let present: Vec<&DeviceId> = are_there.map(|it| &it.device.id).collect();
        let mut is_any_gone = false;
        for (uid, reservation) in &mut self.reservations {
            let Some(on) = reservation.placement.guest.as_ref().map(|guest| &guest.on) else {
                continue;
            };
            let home = reservation.placement.devices.first().map(|placed| &placed.id);
            let left = if reservation.is_arriving() { home.unwrap_or(on) } else { on };
            let list = uses.iter().find(|seen| seen.id == *left).map(|seen| &seen.processes);
            let is_shown =
                |list: &Vec<ProcessUse>| list.iter().any(|it| it.pod.as_ref() == Some(uid));
            let is_clean = list.and_then(Option::as_ref).map(|list| !is_shown(list));
            let (clean_lists, next) = match &mut reservation.departure {
                Departure::Restarted { since, clean_lists } => {
                    if is_clean == Some(false) {
                        *since = now; // time ends nothing that lists show
                    }
                    (clean_lists, Departure::Gone)
                }
                Departure::Arrives { clean_lists: Some(clean_lists) } => {
                    (clean_lists, Departure::Stays)
                }
                _ => continue,
            };
            match is_clean {
                Some(true) => *clean_lists += 1,
                Some(false) => *clean_lists = 0,
                None => {}
            }
            let enough = if mutated(Mutation::OneCleanList) { 1 } else { CLEAN_REPORTS_TO_FREE };
            if *clean_lists >= enough || !present.contains(&left) {
                (reservation.departure, is_any_gone) = (next, true);
            }
        }
        if is_any_gone {
            self.recompute();
        }
    }

    /// Ends departures that have lasted for `limit`: what the processes use that are left counts as
    /// untracked from now on.
    fn end_departures(&mut self, limit: Duration, now: Timestamp) {
        let mut is_any = false;
        for (_, held) in self.reservations.iter_mut() {
            if is_left(held, limit, now) {
                (held.departure, is_any) = (Departure::Gone, true);
            }
        }
        if is_any {
            self.recompute();
        }
    }

    /// Lets a pod start on another device than its own, before it is written. The caller has checked
    /// that it has room there.
    pub fn lend(&mut self, uid: &PodUid, on: DeviceId) {
        self.change_guest(uid, |reservation| {
            reservation.placement.guest = Some(Guest { on, spot: None, leaving: None });
        });
    }

    /// The same for a pod that runs at home, and goes to another MIG instance, as the version before did.
    #[cfg(test)]
    pub(crate) fn move_out(&mut self, uid: &PodUid, on: DeviceId, spot: Spot) {
        self.change_guest(uid, |reservation| {
            reservation.placement.guest = Some(Guest { on, spot: Some(spot), leaving: None });
            reservation.departure = Departure::Arrives { clean_lists: None };
        });
    }

    /// Notes that the container of such a pod has ended at home.
    #[cfg(test)]
    pub(crate) fn moved_out(&mut self, uid: &PodUid) {
        self.change_guest(uid, |reservation| {
            if reservation.is_arriving() {
                reservation.departure = Departure::Arrives { clean_lists: Some(0) };
            }
        });
    }

    /// Lets a guest that has not started yet start at home.
    pub fn start_at_home(&mut self, uid: &PodUid) {
        self.change_guest(uid, |reservation| {
            (reservation.placement.guest, reservation.departure) = (None, Departure::Stays);
        });
    }

    /// Calls guests home.
    pub fn recall(&mut self, uids: &[PodUid]) {
        for uid in uids {
            if let Some(reservation) = self.reservations.get_mut(uid)
                && (reservation.departure == Departure::Stays || reservation.is_arriving())
                && reservation.placement.guest.is_some()
            {
                reservation.departure = Departure::Recalled;
            }
        }
        if !uids.is_empty() {
            self.recompute();
        }
    }

    /// Lets a guest stay that was recalled, unless its move is written. Whether it stays.
    pub fn stay(&mut self, uid: &PodUid) -> bool {
        let mut stays = false;
        self.change_guest(uid, |reservation| {
            let is_written =
                reservation.placement.guest.as_ref().is_some_and(|guest| guest.leaving.is_some());
            if reservation.departure == Departure::Recalled && !is_written {
                reservation.departure = Departure::Stays;
                stays = true;
            }
        });
        stays
    }

    /// Notes what is written on a pod about its move home, or that nothing is any more.
    pub fn write_move(&mut self, uid: &PodUid, leaving: Option<MoveHome>) {
        self.change_guest(uid, |reservation| {
            let Some(guest) = &mut reservation.placement.guest else { return };
            let is_ordered = leaving.is_some();
            guest.leaving = leaving;
            if is_ordered
                && (reservation.departure == Departure::Stays || reservation.is_arriving())
            {
                reservation.departure = Departure::Recalled;
            }
        });
    }

    /// Notes that the container of a recalled pod has ended where it was a guest.
    pub fn restarted(&mut self, uid: &PodUid, now: Timestamp) {
        self.change_guest(uid, |reservation| {
            if reservation.departure == Departure::Recalled {
                reservation.departure = Departure::Restarted { since: now, clean_lists: 0 };
            }
        });
    }

    /// Allocates a pod the room where it is a guest as well as its home: it cannot be moved.
    pub fn settle_guest(&mut self, uid: &PodUid) {
        self.change_guest(uid, |reservation| reservation.departure = Departure::Settling);
    }

    /// Sends a pod home that counts on both devices, if its move is written.
    pub fn goes_on(&mut self, uid: &PodUid) {
        self.change_guest(uid, |reservation| {
            let is_written =
                reservation.placement.guest.as_ref().is_some_and(|it| it.leaving.is_some());
            if reservation.departure == Departure::Settling && is_written {
                reservation.departure = Departure::Recalled;
            }
        });
    }

    /// Frees the home of a pod that is written as allocated the room where it runs.
    pub fn settled(&mut self, uid: &PodUid) {
        self.change_guest(uid, |reservation| {
            if reservation.departure == Departure::Settling {
                reservation.take_guest_room();
            }
        });
    }

    /// Notes what becomes of the memory that a pod uses above its request.
    pub fn note_borrowed(&mut self, uid: &PodUid, borrowed: BorrowedMemory) {
        if borrowed == BorrowedMemory::Kept {
            let uses = self.devices.iter_mut();
            uses.for_each(|device_state| device_state.lends_no_more(uid));
        }
        self.change_guest(uid, |reservation| reservation.borrowed = borrowed);
    }

    /// Use of a device beyond what is allocated that is ignored.
    pub fn tolerance(&self) -> MemMib {
        self.unmanaged_tolerance
    }

    fn change_guest(&mut self, uid: &PodUid, change: impl FnOnce(&mut Reservation)) {
        if let Some(reservation) = self.reservations.get_mut(uid) {
            change(reservation);
            share_ids(&self.devices, reservation);
            self.recompute();
        }
    }
}

impl Reservation {
    /// Gives it the device where it is a guest instead of its home.
    pub(crate) fn take_guest_room(&mut self) {
        self.placement = self.settled_placement();
        self.departure = Departure::Stays;
    }
}

/// How long a list that shows a process of an ended pod counts at least: the time of six lists.
const SHOWN_FOR: Duration = Duration::from_secs(30);

impl NodeState {
    /// Notes that the pod is terminal or gone. Its CPU and host memory are free immediately, its
    /// devices when its processes are gone, however long reports list them. That also holds for a
    /// node without a report: its agent may be late after a restart; without one it gets no pods.
    ///
    /// Returns whether the pod is removed now.
    pub fn drain(&mut self, uid: &PodUid, now: Timestamp) -> bool {
        let has_devices = |held: &&mut Reservation| {
            !held.placement.devices.is_empty() && !mutated(Mutation::DrainsAreFree)
        };
        let Some(reservation) = self.reservations.get_mut(uid).filter(has_devices) else {
            return self.remove(uid);
        };
        if !matches!(reservation.state, ReservationState::Draining { .. }) {
            let uses = self.devices.iter_mut();
            uses.for_each(|device_state| device_state.lends_no_more(uid));
            reservation.state =
                ReservationState::Draining { since: now, clean_reports: 0, shown: None };
            reservation.host = HostAmount::ZERO;
            let uses = |home: &DeviceState| home.covered(uid) > MemMib::ZERO;
            let placement = &reservation.placement;
            let is_home =
                |it: &&DeviceState| placement.devices.iter().any(|own| own.id == it.device.id);
            let is_at_home =
                placement.guest.is_some() && self.devices.iter().filter(is_home).any(uses);
            match reservation.departure {
                // Its processes may be in both places.
                Departure::Arrives { .. } => reservation.departure = Departure::Settling,
                Departure::Stays if is_at_home => reservation.departure = Departure::Settling,
                Departure::Stays | Departure::Settling => reservation.take_guest_room(), // it never goes home
                Departure::Recalled | Departure::Restarted { .. } | Departure::Gone => {}
            }
            self.recompute();
        }
        false
    }

    /// Counts this report for each draining pod without a process in it, and lists pods with enough
    /// of these. A process that it lists keeps the room. A report proves nothing if it leaves out a
    /// device of the pod, or if processes were not sampled on some device: they may run on any. The
    /// parent of MIG instances has no processes of its own to sample.
    fn count_clean_report(&mut self, uses: &[DeviceUse], now: Timestamp) -> Vec<PodUid> {
        let is_parent = |seen: &DeviceUse| {
            let is_it =
                |device: &Device| device.kind == DeviceKind::MigParent && device.id == seen.id;
            self.devices.iter().any(|device_state| is_it(&device_state.device))
        };
        let is_complete = !uses.iter().any(|seen| seen.processes.is_none() && !is_parent(seen));
        let runs = |uid: &PodUid| {
            let mut processes = uses.iter().flat_map(|seen| seen.processes.iter().flatten());
            processes.any(|process| process.pod.as_ref() == Some(uid))
        };
        // No process can run on what is not made yet.
        let are_there = self.devices.iter().filter(|it| it.origin != Origin::Promised);
        let present: Vec<&DeviceId> =
            are_there.map(|device_state| &device_state.device.id).collect();
        let is_seen = |placed: &PlacedDevice| {
            !present.contains(&&placed.id) || uses.iter().any(|seen| seen.id == placed.id)
        };
        let mut freed = Vec::new();
        for (uid, reservation) in &mut self.reservations {
            let is_there =
                |on: &DeviceId| is_seen(&PlacedDevice { id: on.clone(), demand: Demand::ZERO });
            let is_covered = reservation.placement.devices.iter().all(is_seen)
                && reservation.guest_on().is_none_or(is_there);
            if let ReservationState::Draining { clean_reports, shown, .. } = &mut reservation.state
            {
                if runs(uid) {
                    (*clean_reports, *shown) = (0, Some(now));
                } else if (is_complete && is_covered) || mutated(Mutation::UncoveredReportFrees) {
                    *clean_reports += 1;
                }
                let is_listed = is_complete || mutated(Mutation::UncoveredReportFrees);
                let enough =
                    if mutated(Mutation::OneCleanReport) { 1 } else { CLEAN_REPORTS_TO_FREE };
                if is_listed && *clean_reports >= enough {
                    freed.push(uid.clone());
                }
            }
        }
        freed
    }

    /// Another agent reports from now on. Of two lists that free a device, the agent must have sent
    /// the second after the reply to the first, so both must be of one agent.
    pub(crate) fn forget_clean_reports(&mut self) {
        for (_, reservation) in &mut self.reservations {
            if let ReservationState::Draining { clean_reports, .. } = &mut reservation.state {
                *clean_reports = 0;
            }
            if let Departure::Restarted { clean_lists, .. }
            | Departure::Arrives { clean_lists: Some(clean_lists) } = &mut reservation.departure
            {
                *clean_lists = 0;
            }
        }
        self.devices.iter_mut().for_each(DeviceState::forget_clean_reports);
        self.of_session = [None; 2];
    }

    /// Whether the last report says what was after this time: its agent sent it after the reply to one that came later.
    pub fn is_sampled_after(&self, time: Timestamp) -> bool {
        self.of_session[0].is_some_and(|before| before >= time)
    }

    /// Whether [`NodeState::expire`] would end anything now.
    pub fn is_anything_due(&self, drain_limit: Duration, now: Timestamp) -> bool {
        self.holds.values().any(|hold| hold.expires <= now)
            || self.intake.is_due(now)
            || self.failed.values().any(|failed| now.since(*failed) >= FAILED_FOR)
            || self.reservations.values().any(|held| is_drained(held, drain_limit, now))
            || self.reservations.values().any(|held| is_left(held, drain_limit, now))
            || self
                .devices
                .iter()
                .any(|device_state| device_state.is_leftover_due(drain_limit, now))
    }

    /// Pods that have drained for `drain_limit`: reports still list their processes.
    pub fn overdue_drains(&self, drain_limit: Duration, now: Timestamp) -> usize {
        let is_overdue = |held: &&Reservation| is_older(held, drain_limit, now);
        self.reservations.values().filter(is_overdue).count()
    }

    /// Notes which pods hang, and returns those that did not before.
    pub(crate) fn note_hung(&mut self, hangs: impl Fn(&Reservation) -> bool) -> Vec<Reservation> {
        let mut hung = Vec::new();
        for (_, held) in self.reservations.iter_mut() {
            let (is_hung, was_hung) = (hangs(held), held.is_hung);
            held.is_hung = is_hung;
            hung.extend((is_hung && !was_hung).then(|| held.clone()));
        }
        hung
    }

    /// Ends due holds, and drains that have lasted `drain_limit` while no report shows a process.
    /// After that time processes of ended pods count by their use alone. Lists the pods.
    pub fn expire(&mut self, drain_limit: Duration, now: Timestamp) -> Vec<PodUid> {
        let overdue = |held: &Reservation| is_drained(held, drain_limit, now);
        let drained = self.reservations.iter().filter(|(_, held)| overdue(held));
        let is_due = |hold: &Hold| hold.expires <= now && !mutated(Mutation::HoldsStay);
        let on_hold = self.holds.iter().filter(|(_, hold)| is_due(hold));
        let ended: Vec<PodUid> = drained
            .map(|(uid, _)| uid.clone())
            .chain(on_hold.map(|(uid, _)| uid.clone()))
            .collect();
        for uid in &ended {
            self.release(uid);
            if self.reservations.get(uid).is_some_and(overdue) {
                self.devices.iter_mut().for_each(|device_state| device_state.outlived(uid));
                self.remove(uid);
            }
        }
        self.end_departures(drain_limit, now);
        self.intake = self.intake.after_time(now);
        let count = self.failed.len();
        self.failed.retain(|_, failed| now.since(*failed) < FAILED_FOR);
        if self.failed.len() < count {
            self.recompute_rooms();
        }
        if self.devices.iter().any(|device_state| device_state.is_leftover_due(drain_limit, now)) {
            self.devices
                .iter_mut()
                .for_each(|device_state| device_state.end_leftovers(drain_limit, now));
            self.recompute_rooms();
        }
        ended
    }
}

/// Whether a pod has drained for `drain_limit`.
fn is_older(held: &Reservation, drain_limit: Duration, now: Timestamp) -> bool {
    match held.state {
        ReservationState::Draining { since, .. } => now.since(since) >= drain_limit,
        ReservationState::Assumed { .. } | ReservationState::Confirmed => false,
    }
}

/// Whether processes of a pod are left for `limit` on a device that it has left.
fn is_left(held: &Reservation, limit: Duration, now: Timestamp) -> bool {
    match held.departure {
        Departure::Restarted { since, .. } => now.since(since) >= limit,
        Departure::Stays
        | Departure::Recalled
        | Departure::Gone
        | Departure::Arrives { .. }
        | Departure::Settling => false,
    }
}

/// Whether time ends a drain: it has lasted long enough, and no recent report lists a process of
/// the pod. A process that still runs may compute, so the room is not free.
fn is_drained(held: &Reservation, drain_limit: Duration, now: Timestamp) -> bool {
    let is_shown = match held.state {
        ReservationState::Draining { shown: Some(shown), .. } => {
            now.since(shown) < drain_limit.max(SHOWN_FOR)
        }
        _ => false,
    };
    is_older(held, drain_limit, now) && !is_shown
}

#[cfg(test)]
mod tests;
