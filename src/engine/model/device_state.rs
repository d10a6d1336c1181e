//! The state of one device: its capacity, what is allocated and held of it, and what is free.
//!
//! [`crate::model::node_state`] derives the sums here from its reservations and holds.

use std::time::Duration;
use wire::seen::{DeviceUse, ProcessUse};

use litemap::LiteMap;

use crate::hardware::device_class::{ClassId, DeviceClass};
use crate::hardware::pool::{ConfiguredIsolation, InstanceUse, PoolRule};
use crate::hardware::spots::Spot;
use crate::model::fit::{NeighborIsolation, Room};
use crate::model::request::Isolation;
use crate::model::reservation::{Placement, Reservation};
use wire::device::{Device, DeviceKind, Health, Slot};
use wire::ids::{DeviceId, MigProfile, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::{Demand, HostAmount, MemMib, Share, Timestamp};

/// Reports without a process of an ended pod that free its room. One is not enough: it may have
/// been sampled before the pod ended. The second was sampled after the reply to the first.
pub const CLEAN_REPORTS_TO_FREE: u32 = 2;

/// More than any device has. It stands for a sum of written amounts that overflows its type.
pub(crate) const BEYOND: Demand =
    Demand { memory: MemMib::new(u64::MAX), share: Share::from_millionths(u64::MAX) };

/// Whether the isolation that a pool's rule configures is in force on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verification {
    /// It is configured. No agent has checked it.
    #[default]
    Configured,
    /// The node's agent has seen that it is in force.
    Verified,
    /// The node's agent has seen that it is not. Then nothing limits the tenants.
    Missing,
}

impl Verification {
    /// The name in views.
    pub fn name(self) -> &'static str {
        match self {
            Self::Configured => "configured",
            Self::Verified => "verified",
            Self::Missing => "missing",
        }
    }
}

/// A pod that runs on a device, or may still, and is allocated another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceGuest {
    /// What it requests.
    pub demand: Demand,
    /// Whether it is on its way home.
    pub is_leaving: bool,
}

/// Where a device comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// It is there, and gpupack leaves it as it is: a GPU, or a MIG instance that others made.
    #[default]
    Found,
    /// A MIG instance that an agent of gpupack made. It is removed when it has no tenant.
    Made,
    /// A MIG instance that is promised to a pod, and made when the pod is bound.
    Promised,
}

/// How long a device must have been ill before what runs there as a guest goes home. A read that fails once is no
/// reason to restart it.
const LOST_AFTER: Duration = Duration::from_secs(60);

/// One device with its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceState {
    pub(crate) device: Device,
    pub(crate) class: ClassId,
    pub(crate) rule: PoolRule,
    pub(crate) origin: Origin,
    /// The part of its GPU that a MIG instance covers, if known.
    pub(crate) slot: Option<Slot>,
    /// Whether it is a MIG instance that the node's agent cannot remove, by its last report.
    pub(crate) is_held_open: bool,
    pub(crate) verification: Verification,
    /// Whether some tenant has no isolation, and whether some tenant requires it of all.
    pub(crate) has_unisolated: bool,
    pub(crate) requires_isolation: bool,
    pub(crate) health: Health,
    /// Since when no report says that it is healthy.
    pub(crate) ill_since: Option<Timestamp>,
    /// Whether that has been so for [`LOST_AFTER`].
    pub(crate) is_lost: bool,
    pub(crate) allocated: Demand,
    pub(crate) on_hold: Demand,
    pub(crate) tenants: LiteMap<PodUid, Demand>,
    /// Pods that run here in free room, and are allocated elsewhere.
    pub(crate) guests: LiteMap<PodUid, DeviceGuest>,
    /// Tenants that run elsewhere, as guests.
    pub(crate) away: Vec<PodUid>,
    /// The most that tenants and guests may use here, of those that may use more than they request.
    pub(crate) memory_limits: LiteMap<PodUid, MemMib>,
    /// Whether the node's agent sets limits of the driver here.
    pub(crate) sets_limits: bool,
    pub(crate) used: Option<MemMib>,
    pub(crate) busy_percent: Option<u8>,
    /// Use that the last list of processes, or a report since, shows beyond what is allocated, and
    /// what processes use that outlive the drain of their pod.
    pub(crate) untracked: MemMib,
    /// What each tenant used of its allocated memory at the last list of processes.
    pub(crate) covered: LiteMap<PodUid, MemMib>,
    pub(crate) unallocated_use: MemMib,
    /// Use beyond what is allocated, also within the tolerance.
    outside: MemMib,
    /// Whether a report has yet to name it: processes of pods that ended before may use it.
    pub(crate) is_unread: bool,
    /// When a report listed its processes last.
    pub(crate) listed: Option<Timestamp>,
    /// Pods that have nothing on the node, but whose processes the lists show.
    leftovers: LiteMap<PodUid, Leftover>,
}

impl DeviceState {
    /// The state of a device without tenants. What was seen of it `before` still counts.
    pub(crate) fn new(
        device: Device,
        class: ClassId,
        rule: PoolRule,
        before: Option<Self>,
    ) -> Self {
        let fresh = Self {
            class,
            rule,
            origin: Origin::Found,
            slot: None,
            is_held_open: false,
            verification: Verification::default(),
            has_unisolated: false,
            requires_isolation: false,
            health: device.health,
            ill_since: None,
            is_lost: false,
            allocated: Demand::ZERO,
            on_hold: Demand::ZERO,
            tenants: LiteMap::new(),
            guests: LiteMap::new(),
            away: Vec::new(),
            memory_limits: LiteMap::new(),
            sets_limits: false,
            used: None,
            busy_percent: None,
            untracked: MemMib::ZERO,
            covered: LiteMap::new(),
            unallocated_use: MemMib::ZERO,
            outside: MemMib::ZERO,
            is_unread: false,
            listed: None,
            leftovers: LiteMap::new(),
            device,
        };
        let Some(before) = before else { return fresh };
        // Health is the worse of both until the next report.
        Self {
            health: fresh.health.max(before.health),
            ill_since: before.ill_since,
            is_lost: before.is_lost,
            is_held_open: before.is_held_open,
            verification: before.verification,
            used: before.used,
            busy_percent: before.busy_percent,
            untracked: before.untracked,
            covered: before.covered,
            unallocated_use: before.unallocated_use,
            outside: before.outside,
            is_unread: before.is_unread,
            listed: before.listed,
            leftovers: before.leftovers,
            ..fresh
        }
    }

    /// The device as it was reported.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where it comes from.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// The part of its GPU that a MIG instance covers, if known.
    pub fn slot(&self) -> Option<Slot> {
        self.slot
    }

    /// Where it lies, if gpupack makes it: GPU, profile and first unit.
    pub(crate) fn place(&self) -> Option<(&DeviceId, &MigProfile, u32)> {
        match (&self.device.kind, self.origin) {
            (DeviceKind::MigInstance { parent, profile }, Origin::Made | Origin::Promised) => {
                Some((parent, profile, self.slot?.start))
            }
            _ => None,
        }
    }

    /// Whether it is a MIG instance that is there, made by gpupack or not, with the profile of this spot and
    /// not known to lie elsewhere.
    pub(crate) fn lies_at(&self, spot: &Spot) -> bool {
        let DeviceKind::MigInstance { parent, profile } = &self.device.kind else { return false };
        self.origin != Origin::Promised
            && (parent, profile) == (&spot.gpu, &spot.profile)
            && self.slot.is_none_or(|slot| slot.start == spot.start)
    }

    /// The same as a spot.
    pub fn spot(&self) -> Option<Spot> {
        let (gpu, profile, start) = self.place()?;
        Some(Spot { gpu: gpu.clone(), profile: profile.clone(), start })
    }

    /// Whether gpupack made it and no pod has it: it is to be removed, and given to no pod.
    pub fn is_leaving(&self) -> bool {
        self.origin == Origin::Made && self.tenants.is_empty() && self.on_hold == Demand::ZERO
    }

    /// Whether a MIG instance stays, so that no other can be made on its units: a pod has it, or the agent cannot
    /// remove it.
    pub(crate) fn stays(&self, holds: HoldRule) -> bool {
        self.is_kept(holds) || self.origin == Origin::Made && self.is_held_open
    }

    /// Whether a MIG instance is not to be removed.
    pub(crate) fn is_kept(&self, holds: HoldRule) -> bool {
        let is_kept = match holds {
            HoldRule::Respected => self.on_hold != Demand::ZERO,
            HoldRule::Ignored => false,
        };
        match self.origin {
            Origin::Found => true,
            Origin::Promised if mutated(Mutation::PromisedPlaceFree) => false,
            Origin::Promised => is_kept || !self.tenants.is_empty(),
            Origin::Made => {
                is_kept
                    || !self.tenants.is_empty()
                    || self.health != Health::Healthy
                    || self.unallocated_use() > MemMib::ZERO
            }
        }
    }

    /// The units that a MIG instance takes of a place for another one: all of them if only one may have the media
    /// engines. `None` if the two can be there together.
    pub(crate) fn units_taken_of(
        &self,
        gpu: &DeviceId,
        profile: &MigProfile,
        slot: Slot,
    ) -> Option<u32> {
        let DeviceKind::MigInstance { parent, profile: own } = &self.device.kind else {
            return None;
        };
        if parent == gpu && own.has_media() && profile.has_media() {
            return Some(slot.units());
        }
        let units = self.slot.map_or(u32::MAX, Slot::units) & slot.units();
        Some(units).filter(|units| parent == gpu && *units != 0)
    }

    /// Whether no pod has it, others made it, and it covers the place of an instance that a pod is to get again,
    /// as after a boot. It is given to no other pod: that pod waits for its place.
    pub(crate) fn is_in_the_way_of(&self, promised: &Self) -> bool {
        let is_free = self.origin == Origin::Found && self.tenants.is_empty();
        let place = promised.place().zip(promised.slot).filter(|_| is_free);
        place.is_some_and(|((gpu, profile, _), slot)| {
            self.units_taken_of(gpu, profile, slot).is_some()
        })
    }

    /// What reservations take.
    pub fn allocated(&self) -> Demand {
        self.allocated
    }

    /// What holds take.
    pub fn on_hold(&self) -> Demand {
        self.on_hold
    }

    /// The tenants with what each has, by UID.
    pub fn tenants(&self) -> &LiteMap<PodUid, Demand> {
        &self.tenants
    }

    /// The guests, by UID. They take room that counts as free.
    pub fn guests(&self) -> &LiteMap<PodUid, DeviceGuest> {
        &self.guests
    }

    /// The pods that run here, each with what it requests: tenants that are not guests elsewhere, and
    /// guests. A list that shows a pod here is newer than what the watch has shown of its move.
    pub fn running(&self) -> impl Iterator<Item = (&PodUid, Demand)> {
        self.users().filter(|(uid, _)| {
            self.guests.contains_key(*uid)
                || !self.away.contains(*uid)
                || self.covered(uid) > MemMib::ZERO
        })
    }

    /// Whether a tenant runs on another device.
    pub fn is_away(&self, uid: &PodUid) -> bool {
        self.away.contains(uid)
    }

    /// What guests request that stay.
    pub fn lent(&self) -> Demand {
        let staying = self.guests.values().filter(|guest| !guest.is_leaving);
        staying.fold(Demand::ZERO, |sum, guest| sum.checked_add(guest.demand).unwrap_or(BEYOND))
    }

    /// The most memory that a pod may use here, if that is more than it requests.
    pub fn memory_limit(&self, uid: &PodUid) -> Option<MemMib> {
        self.memory_limits.get(uid).copied()
    }

    /// What a pod used at the last list of processes, of what it may use.
    pub fn covered(&self, uid: &PodUid) -> MemMib {
        self.covered.get(uid).copied().unwrap_or(MemMib::ZERO)
    }

    /// When a report listed its processes last.
    pub fn listed(&self) -> Option<Timestamp> {
        self.listed
    }

    /// What borrowers use, as one number: equal states have equal ones.
    pub(crate) fn borrowers_use(&self) -> u64 {
        let uses = self.memory_limits.keys().map(|uid| self.covered(uid).mib());
        uses.fold(0, |digest: u64, used| digest.wrapping_mul(1_000_003).wrapping_add(used + 1))
    }

    /// Notes that no pod may use more than its request from now on.
    pub(crate) fn lends_nothing(&mut self) {
        let borrowers: Vec<PodUid> = self.memory_limits.keys().cloned().collect();
        borrowers.iter().for_each(|uid| self.lends_no_more(uid));
    }

    /// Whether a guest is on its way home that may still run here.
    pub fn is_being_left(&self) -> bool {
        self.guests.values().any(|guest| guest.is_leaving)
    }

    /// Memory in use, from the last report.
    pub fn used(&self) -> Option<MemMib> {
        self.used
    }

    /// Busy time of the last period in percent, from the last report.
    pub fn busy_percent(&self) -> Option<u8> {
        self.busy_percent
    }

    /// Memory in use beyond what is allocated: by processes of no known pod, and by over-limit
    /// pods. It is not free. For listed processes of ended pods it is at least 1 MiB, up to the
    /// drain limit, so that no pod gets the whole device beside them.
    pub fn unallocated_use(&self) -> MemMib {
        match self.leftovers.values().all(|leftover| leftover.is_over) {
            true => self.used_by_others(),
            false => self.used_by_others().max(MemMib::new(1)),
        }
    }

    /// The same as it was seen, also where no list has shown yet who uses nothing.
    pub(crate) fn used_by_others(&self) -> MemMib {
        match self.leftovers.values().all(|leftover| leftover.is_over) {
            true => self.unallocated_use,
            false => self.unallocated_use.max(self.outside),
        }
    }

    /// The worse of the health in the inventory and that in the last report.
    pub fn health(&self) -> Health {
        self.health
    }

    /// All of the device.
    pub fn capacity(&self) -> Demand {
        Demand { memory: self.device.capacity(), share: Share::WHOLE }
    }

    /// Whether reservations take more than the device has.
    pub fn is_overallocated(&self) -> bool {
        self.capacity().checked_sub(self.allocated).is_none()
    }

    /// Whether this device can have tenants at all.
    pub fn is_placeable(&self) -> bool {
        self.device.kind != DeviceKind::MigParent && self.health == Health::Healthy
    }

    /// Whether a report has yet to name it. Nothing is free on it until one does.
    pub fn is_unread(&self) -> bool {
        self.is_unread
    }

    /// Room if holds are ignored; what `bind` may use.
    pub fn unallocated(&self) -> Demand {
        self.left_of(self.capacity().checked_sub(self.allocated))
    }

    /// Keeps what is left of `demand` for the first pod of a line.
    pub(crate) fn stand(&mut self, demand: Demand) {
        let left = self.capacity().checked_sub(self.allocated);
        let left = left.and_then(|left| left.checked_sub(self.on_hold)).unwrap_or(Demand::ZERO);
        let kept =
            Demand { memory: demand.memory.min(left.memory), share: demand.share.min(left.share) };
        self.on_hold = self.on_hold.checked_add(kept).unwrap_or(BEYOND);
    }

    /// Room beside reservations and holds; what *filter* sees.
    pub fn free(&self) -> Demand {
        let left = self.capacity().checked_sub(self.allocated);
        self.left_of(left.and_then(|left| left.checked_sub(self.on_hold)))
    }

    /// `left` without the memory that is used beyond what is allocated. Nothing is free on an
    /// overallocated device, or on one whose use is not known yet; no memory is free where use
    /// exceeds the rest.
    fn left_of(&self, left: Option<Demand>) -> Demand {
        let Some(left) = left.filter(|_| !self.is_unread) else { return Demand::ZERO };
        match left.memory.checked_sub(self.unallocated_use()) {
            Some(memory) => Demand { memory, share: left.share },
            None => Demand { memory: MemMib::ZERO, share: left.share },
        }
    }

    /// The form in which the fit function sees this device.
    pub fn room(&self, holds: HoldRule) -> Room {
        let free = match holds {
            HoldRule::Respected => self.free(),
            HoldRule::Ignored => self.unallocated(),
        };
        let neighbors = self.neighbors();
        Room { class: self.class, health: self.health, free, neighbors, is_covered: false }
    }

    /// How the tenants are isolated from each other.
    pub fn neighbors(&self) -> NeighborIsolation {
        NeighborIsolation {
            guard: self.guard(),
            is_isolation_missing: self.configured_isolation() != self.guard(),
            has_unisolated: self.has_unisolated || self.unallocated_use() > MemMib::ZERO,
            requires_isolation: self.requires_isolation,
        }
    }

    /// The configured isolation of tenants that share the device.
    pub fn configured_isolation(&self) -> ConfiguredIsolation {
        self.rule.enforcement.on(&self.device.kind)
    }

    /// The isolation that scheduling relies on: none if the agent saw that it is not in force.
    pub fn guard(&self) -> ConfiguredIsolation {
        match self.verification {
            Verification::Configured | Verification::Verified => self.configured_isolation(),
            Verification::Missing => ConfiguredIsolation::None,
        }
    }

    /// Whether the configured isolation is verified.
    pub fn verification(&self) -> Verification {
        self.verification
    }

    /// The isolation of a tenant that takes `demand`.
    pub fn isolation_of(&self, demand: Demand) -> ConfiguredIsolation {
        if demand == self.capacity() { ConfiguredIsolation::Hardware } else { self.guard() }
    }

    /// How the device is shared.
    pub fn rule(&self) -> PoolRule {
        self.rule
    }

    /// Whether pods share it: a GPU, or a MIG instance where their pool shares them.
    pub fn is_shared(&self) -> bool {
        match self.device.kind {
            DeviceKind::Gpu => true,
            DeviceKind::MigInstance { .. } => self.rule.instances == InstanceUse::Shared,
            DeviceKind::MigParent => false,
        }
    }

    /// Slots, and how many of them are free; `None` where the device is not cut into slots.
    pub fn slots(&self) -> Option<(u32, u32)> {
        let capacity = self.device.capacity();
        let replicas = DeviceClass::of(&self.device, self.rule).replicas?;
        Some((replicas.count(), replicas.slots_in(self.free(), capacity)))
    }

    /// Counts a tenant's part in the isolation of all.
    pub(crate) fn note_neighbors(&mut self, held: &Reservation) {
        self.has_unisolated |= held.placement.isolation == ConfiguredIsolation::None;
        // A pod that requests isolation is not placed without it. This one requested it afterwards.
        let isolation = held.request.as_ref().map(|request| request.isolation);
        let is_held = held.placement.isolation != ConfiguredIsolation::None;
        self.requires_isolation |= is_held && isolation == Some(Isolation::Memory);
    }

    /// How much memory a pod may use here that has `demand`; `None` if none is lent to it.
    pub(crate) fn lent_to(&self, held: &Reservation, demand: Demand) -> Option<MemMib> {
        let is_lent = self.is_shared() && (!self.rule.driver_limits || self.sets_limits);
        held.memory_limit(self.rule, demand, self.device.capacity()).filter(|_| is_lent)
    }

    /// Notes how much a pod may use here that has `demand`.
    pub(crate) fn note_memory_limit(&mut self, held: &Reservation, demand: Demand) {
        if let Some(limit) = self.lent_to(held, demand) {
            self.memory_limits.insert(held.pod.uid.clone(), limit);
        }
    }

    /// Class of the device.
    pub fn class(&self) -> ClassId {
        self.class
    }
}

/// Whether holds of other pods count as taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldRule {
    /// They do: for *filter* and *prioritize*, and at first for `bind`.
    Respected,
    /// They do not: the last resort of `bind`, which relies on reservations alone.
    Ignored,
}

/// Room kept for a pod between *filter* and *bind*.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Devices and amounts that are kept.
    pub placement: Placement,
    /// CPU and host memory.
    pub host: HostAmount,
    /// When it ends automatically.
    pub expires: Timestamp,
    /// Whether an earlier process promised this very place to the pod: its own calls do not end it.
    pub is_promise: bool,
}

/// Why room is kept for a pod until it is bound. What becomes free of a device goes to the first of these
/// that is kept there: what victims leave is for the pod for which they went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeptFor {
    /// Other pods are evicted for it.
    Preemptor,
    /// It starts with its group.
    Group,
    /// It is the first of a line.
    Line,
}

/// Room kept for a pod until it is bound there: what is free of it now, and what others leave of it later.
/// All that is kept on a device is never more than it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandingHold {
    /// Why.
    pub kept_for: KeptFor,
    /// Devices and amounts, free or not.
    pub placement: Placement,
    /// CPU and host memory.
    pub host: HostAmount,
}

impl DeviceState {
    /// Applies a report. Use of up to `tolerance` beyond what is allocated is ignored.
    ///
    /// A tenant's use counts up to what it may use. Where the driver cannot say what a tenant uses, it
    /// counts as all of that. Without a list of processes, untracked memory of the last list still
    /// counts, up to the memory in use, and so does what was seen beyond what is allocated since:
    /// a pod that is placed later does not explain it.
    pub(crate) fn observe(&mut self, seen: &DeviceUse, tolerance: MemMib, now: Timestamp) {
        self.health = seen.health.max(self.device.health);
        self.ill_since = (self.health != Health::Healthy).then(|| self.ill_since.unwrap_or(now));
        self.is_lost = self.ill_since.is_some_and(|since| now.since(since) >= LOST_AFTER);
        self.busy_percent = seen.busy_percent;
        self.used = seen.used;
        self.is_unread = false;
        let Some(used) = seen.used else { return };
        if let Some(processes) = &seen.processes {
            let covered = self
                .users()
                .map(|(uid, held)| (uid.clone(), self.part_of(uid, held, used_by(processes, uid))));
            let mut all = LiteMap::with_capacity(self.tenants.len() + self.guests.len());
            all.extend(covered);
            self.covered = all;
            self.untracked = beyond(used, self.covered.values().copied());
        }
        let allocated = self.count_others(used, tolerance);
        if seen.processes.is_none() {
            self.untracked = self.untracked.max(allocated);
        }
    }

    /// Counts what is used beyond what is allocated. Returns the least that it can be.
    fn count_others(&mut self, used: MemMib, tolerance: MemMib) -> MemMib {
        let allocated = beyond(used, self.allowances());
        self.outside = self.untracked.min(used).max(allocated);
        self.unallocated_use = if self.outside > tolerance { self.outside } else { MemMib::ZERO };
        allocated
    }

    /// How much of what a pod uses counts as its own; all that it has, if its use is not known.
    fn part_of(&self, uid: &PodUid, held: Demand, used: Option<MemMib>) -> MemMib {
        let most = self.memory_limit(uid).unwrap_or(held.memory);
        used.map_or(held.memory, |used| used.min(most))
    }

    /// Notes that a pod is known now of which the last list showed processes that use so much, if that is known.
    pub(crate) fn explain(&mut self, uid: &PodUid, memory: Option<MemMib>, tolerance: MemMib) {
        let held = self.users().find(|(user, _)| *user == uid).map(|(_, held)| held);
        let (Some(held), Some(used)) = (held, self.used) else { return };
        let own = self.part_of(uid, held, memory);
        self.covered.insert(uid.clone(), own);
        self.untracked = self.untracked.checked_sub(own).unwrap_or(MemMib::ZERO);
        self.count_others(used, tolerance);
    }

    /// The most memory that each of them may use. Before the first list it is not known who uses more than
    /// it requests.
    fn allowances(&self) -> impl Iterator<Item = MemMib> {
        self.users().map(|(uid, held)| {
            let limit = self.memory_limit(uid).filter(|_| self.listed.is_some());
            limit.unwrap_or(held.memory)
        })
    }

    /// The pods whose use is explained, each with what it requests: tenants and guests.
    pub(crate) fn users(&self) -> impl Iterator<Item = (&PodUid, Demand)> {
        let guests = self.guests.iter().map(|(uid, guest)| (uid, guest.demand));
        self.tenants.iter().map(|(uid, held)| (uid, *held)).chain(guests)
    }

    /// How many entries of pods are kept.
    pub(crate) fn entries(&self) -> usize {
        self.tenants.len() + self.guests.len() + self.covered.len() + self.leftovers.len()
    }

    /// Notes that a tenant is removed although its processes may still run. The memory that they
    /// were seen to use stays taken.
    pub(crate) fn outlived(&mut self, uid: &PodUid) {
        let left = self.covered.remove(uid).unwrap_or(MemMib::ZERO);
        self.outlived_by(left);
    }

    /// Notes that a pod may use no more than its request from now on. What it uses above is not free.
    pub(crate) fn lends_no_more(&mut self, uid: &PodUid) {
        if self.memory_limits.remove(uid).is_none() {
            return;
        }
        let demand = self.tenants.get(uid).copied();
        let demand = demand.or_else(|| self.guests.get(uid).map(|guest| guest.demand));
        let requested = demand.map_or(MemMib::ZERO, |demand| demand.memory);
        if let Some(covered) = self.covered.get_mut(uid)
            && let Some(excess) = covered.checked_sub(requested)
        {
            *covered = requested;
            self.outlived_by(excess);
        }
    }

    /// Notes that so much memory in use is no longer that of a tenant.
    fn outlived_by(&mut self, left: MemMib) {
        self.untracked = self.untracked.checked_add(left).unwrap_or(BEYOND.memory);
        self.unallocated_use = self.unallocated_use.checked_add(left).unwrap_or(BEYOND.memory);
    }
}

/// What the processes of a pod use, if that is known of each.
fn used_by(list: &[ProcessUse], uid: &PodUid) -> Option<MemMib> {
    let mut own = list.iter().filter(|process| process.pod.as_ref() == Some(uid));
    own.try_fold(MemMib::ZERO, |sum, process| sum.checked_add(process.memory?))
}

/// The part of `used` that the `parts` do not explain.
fn beyond(used: MemMib, mut parts: impl Iterator<Item = MemMib>) -> MemMib {
    let explained = parts.try_fold(MemMib::ZERO, MemMib::checked_add);
    explained.and_then(|explained| used.checked_sub(explained)).unwrap_or(MemMib::ZERO)
}

/// Most pods without a reservation whose processes are remembered for one device. One of them is
/// enough to keep the device from being given away whole.
const MAX_LEFTOVERS: usize = 64;

/// Processes of a pod that has nothing on the node. The pod has ended, and was forgotten in a
/// restart or was seen again after its drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Leftover {
    /// When the first list showed them.
    since: Timestamp,
    /// What they use, by the last list, if that is known.
    memory: Option<MemMib>,
    /// Successive lists after that without them.
    clean_reports: u32,
    /// Whether they have run for so long that only their use counts.
    is_over: bool,
}

impl DeviceState {
    /// Notes which pods without anything on the node a list of processes shows.
    pub(crate) fn see_leftovers(
        &mut self,
        list: &[ProcessUse],
        now: Timestamp,
        holds: impl Fn(&PodUid) -> bool,
    ) {
        let seen = || list.iter().filter_map(|process| process.pod.as_ref());
        for (uid, leftover) in &mut self.leftovers {
            let is_shown = seen().any(|seen| seen == uid);
            leftover.clean_reports = if is_shown { 0 } else { leftover.clean_reports + 1 };
            leftover.memory = used_by(list, uid);
        }
        self.leftovers.retain(|_, leftover| leftover.clean_reports < CLEAN_REPORTS_TO_FREE);
        for uid in seen().filter(|uid| !holds(uid)) {
            if self.leftovers.len() < MAX_LEFTOVERS && !self.leftovers.contains_key(uid) {
                self.leftovers.insert(uid.clone(), Leftover::new(now, used_by(list, uid)));
            }
        }
    }

    /// Notes that something uses the device which no list has shown yet: a pod may have ended before
    /// the start. Two lists say whether one has.
    pub(crate) fn suspect_leftovers(&mut self, used: Option<MemMib>, now: Timestamp) {
        let Some(used) = used.filter(|_| self.listed.is_none()) else { return };
        let unknown = PodUid::new("");
        if beyond(used, self.allowances()) > MemMib::ZERO && !self.leftovers.contains_key(&unknown)
        {
            self.leftovers.insert(unknown, Leftover::new(now, None));
        }
    }

    /// The next list is the first of another agent.
    pub(crate) fn forget_clean_reports(&mut self) {
        self.leftovers.iter_mut().for_each(|(_, leftover)| leftover.clean_reports = 0);
    }

    /// As if nothing beyond what is allocated were used: what is used so may drain.
    pub(crate) fn forget_unallocated_use(&mut self) {
        (self.unallocated_use, self.outside) = (MemMib::ZERO, MemMib::ZERO);
        self.leftovers.clear();
    }

    /// Notes that a pod has something on the node, so that its processes are known. What they use, if the last
    /// list says so.
    pub(crate) fn forget_leftover(&mut self, uid: &PodUid) -> Option<Option<MemMib>> {
        self.leftovers.remove(uid).map(|leftover| leftover.memory)
    }

    /// Whether [`DeviceState::end_leftovers`] would end anything now.
    pub(crate) fn is_leftover_due(&self, limit: Duration, now: Timestamp) -> bool {
        self.leftovers.values().any(|leftover| leftover.is_due(limit, now))
    }

    /// Ends the entries that are `limit` old: from now on only their use counts.
    pub(crate) fn end_leftovers(&mut self, limit: Duration, now: Timestamp) {
        let all = self.leftovers.iter_mut().map(|(_, leftover)| leftover);
        all.filter(|leftover| leftover.is_due(limit, now)).for_each(|due| due.is_over = true);
    }
}

impl Leftover {
    fn new(since: Timestamp, memory: Option<MemMib>) -> Self {
        Self { since, memory, clean_reports: 0, is_over: false }
    }

    fn is_due(&self, limit: Duration, now: Timestamp) -> bool {
        !self.is_over && now.since(self.since) >= limit
    }
}
