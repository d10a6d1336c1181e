//! The books of one node: who holds how much of which device, and what is left.
//!
//! Truth here is the list of reservations (as they were written) and the inventory (as it was
//! reported). The sums per device are derived from both and recomputed by [`NodeLedger::audit`].
//! Facts from outside may put more on a device than it has; then it is *overbooked*, nothing of it
//! is free, and nothing else stops. Only our own arithmetic is asserted.

use std::collections::BTreeMap;
use std::time::Duration;

use litemap::LiteMap;

use self::devices::share_ids;
pub use self::sums::AuditError;
use super::device::{NodeName, PodUid, PoolName};
pub use super::device_books::{
    CLEAN_REPORTS_TO_FREE, Claim, ClaimRule, DeviceBooks, DeviceUse, Evidence, ProcessUse,
};
use super::fit::{Misfit, Room};
use super::nearness::Nearness;
use super::pool::PoolRule;
use super::reservation::{Reservation, ReservationState};
use super::units::{HostAmount, MemMib, Timestamp};

/// Whether a node can take pods, as far as its agent and its Node object are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeState {
    /// No agent has reported it since we started.
    NeverReported,
    /// Its agent reports in time.
    Reporting,
    /// Its agent has been silent for too long.
    Silent,
    /// Its Node object was deleted; it stays while tenants are booked.
    Gone,
}

/// The books of one node.
#[derive(Clone, Debug)]
pub struct NodeLedger {
    name: NodeName,
    pool: PoolName,
    rule: PoolRule,
    state: NodeState,
    host_capacity: HostAmount,
    host_booked: HostAmount,
    host_claimed: HostAmount,
    devices: Vec<DeviceBooks>,
    nearness: Nearness,
    /// Room of the devices beside claims, and without regard to them: what every question reads.
    rooms: Vec<Room>,
    rooms_under_claims: Vec<Room>,
    reservations: LiteMap<PodUid, Reservation>,
    others: LiteMap<PodUid, HostAmount>,
    claims: BTreeMap<PodUid, Claim>,
    last_report: Option<Timestamp>,
    unmanaged_tolerance: MemMib,
}

impl NodeLedger {
    /// Empty books of a node of which nothing but the name is known.
    ///
    /// Use of a device that no booking covers is believed only above `unmanaged_tolerance`: the
    /// driver's own bookkeeping moves by some MiB.
    pub fn new(name: NodeName, unmanaged_tolerance: MemMib) -> Self {
        Self {
            name,
            pool: PoolName::new(""),
            rule: PoolRule::default(),
            state: NodeState::NeverReported,
            host_capacity: HostAmount::ZERO,
            host_booked: HostAmount::ZERO,
            host_claimed: HostAmount::ZERO,
            devices: Vec::new(),
            nearness: Nearness::default(),
            rooms: Vec::new(),
            rooms_under_claims: Vec::new(),
            reservations: LiteMap::new(),
            others: LiteMap::new(),
            claims: BTreeMap::new(),
            last_report: None,
            unmanaged_tolerance,
        }
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
    pub fn state(&self) -> NodeState {
        self.state
    }

    /// The devices, sorted by index and UUID.
    pub fn devices(&self) -> &[DeviceBooks] {
        &self.devices
    }

    /// How near they are to each other, in the same order.
    pub fn nearness(&self) -> &Nearness {
        &self.nearness
    }

    /// Room of each device, in the same order, with or without claims.
    pub fn rooms(&self, claims: ClaimRule) -> &[Room] {
        match claims {
            ClaimRule::Respected => &self.rooms,
            ClaimRule::Ignored => &self.rooms_under_claims,
        }
    }

    /// All reservations, by UID.
    pub fn reservations(&self) -> &LiteMap<PodUid, Reservation> {
        &self.reservations
    }

    /// Pods of which only processor time and memory matter, by UID.
    pub fn others(&self) -> &LiteMap<PodUid, HostAmount> {
        &self.others
    }

    /// All claims, by UID.
    pub fn claims(&self) -> &BTreeMap<PodUid, Claim> {
        &self.claims
    }

    /// Processor time and memory that the node offers to pods.
    pub fn host_capacity(&self) -> HostAmount {
        self.host_capacity
    }

    /// Processor time and memory that is left beside bookings and claims.
    pub fn host_free(&self) -> HostAmount {
        self.host_capacity.left_after(self.host_booked).left_after(self.host_claimed)
    }

    /// Processor time and memory that is left, with or without claims.
    pub fn host_room(&self, claims: ClaimRule) -> HostAmount {
        match claims {
            ClaimRule::Respected => self.host_free(),
            ClaimRule::Ignored => self.host_capacity.left_after(self.host_booked),
        }
    }

    /// When the last report was received.
    pub fn last_report(&self) -> Option<Timestamp> {
        self.last_report
    }

    /// Whether nothing is known here that is worth keeping.
    pub fn is_forgettable(&self) -> bool {
        self.state == NodeState::Gone
            && self.reservations.is_empty()
            && self.others.is_empty()
            && self.claims.is_empty()
    }

    /// The misfit of the node itself, whatever is asked.
    ///
    /// # Errors
    /// The [`Misfit`] that keeps every GPU pod away.
    pub fn placeable(&self) -> Result<(), Misfit> {
        match self.state {
            NodeState::NeverReported => Err(Misfit::NeverReported),
            NodeState::Silent => Err(Misfit::Silent),
            NodeState::Gone => Err(Misfit::NodeGone),
            NodeState::Reporting if self.devices.is_empty() => Err(Misfit::NoDevices),
            NodeState::Reporting => Ok(()),
        }
    }

    /// Notes what the Node object says.
    pub fn see_node(&mut self, capacity: HostAmount, pool: PoolName) {
        self.host_capacity = capacity;
        self.pool = pool;
        if self.state == NodeState::Gone {
            self.state = match self.last_report {
                Some(_) => NodeState::Silent, // until its agent speaks again
                None => NodeState::NeverReported,
            };
        }
    }

    /// Notes that the Node object was deleted.
    pub fn lose_node(&mut self) {
        self.state = NodeState::Gone;
    }

    /// Takes in a report: use of the devices, and with it the end of drained pods.
    ///
    /// Returns the pods whose room is free now.
    pub fn observe(&mut self, uses: &[DeviceUse], now: Timestamp) -> Vec<PodUid> {
        self.last_report = Some(now);
        if self.state != NodeState::Gone {
            self.state = NodeState::Reporting;
        }
        let freed = self.count_clean_report(uses, now);
        for uid in &freed {
            self.remove(uid);
        }
        let mut has_changed = false;
        for (at, seen) in uses.iter().enumerate() {
            // Agents name the devices in their order, nearly always.
            let is_it = |books: &DeviceBooks| books.device.id == seen.id;
            let there = self.devices.get(at).is_some_and(is_it).then_some(at);
            let Some(at) = there.or_else(|| self.devices.iter().position(is_it)) else { continue };
            let (reservations, others) = (&self.reservations, &self.others);
            let holds = |uid: &PodUid| reservations.contains_key(uid) || others.contains_key(uid);
            let books = &mut self.devices[at];
            let before = (books.health, books.unbooked());
            if let Some(list) = &seen.processes {
                books.see_leftovers(list, now, holds);
            }
            books.observe(seen, self.unmanaged_tolerance);
            has_changed |= before != (books.health, books.unbooked());
        }
        if has_changed {
            self.recompute_rooms();
        }
        freed
    }

    /// Whether the node reports no longer: its last report is older than `stale_after`.
    pub fn is_stale(&self, stale_after: Duration, now: Timestamp) -> bool {
        self.state == NodeState::Reporting
            && self.last_report.is_none_or(|last| now.since(last) > stale_after)
    }

    /// Marks a stale node silent: its tenants stay, it takes no new ones until it reports again.
    /// Returns whether it was stale.
    pub fn silence(&mut self, stale_after: Duration, now: Timestamp) -> bool {
        let is_stale = self.is_stale(stale_after, now);
        if is_stale {
            self.state = NodeState::Silent;
        }
        is_stale
    }

    /// Books `placement` for a pod: the one way in, for `bind` (assumed) and for facts (confirmed).
    /// An existing reservation of the pod is replaced; its claim ends.
    pub fn book(&mut self, mut reservation: Reservation) {
        let uid = reservation.pod.uid.clone();
        reservation.placement.node = self.name.clone();
        share_ids(&self.devices, &mut reservation);
        self.unclaim(&uid);
        self.others.remove(&uid);
        self.devices.iter_mut().for_each(|books| books.forget_leftover(&uid));
        self.reservations.insert(uid, reservation);
        self.recompute();
    }

    /// Notes that a pod of which only processor time and memory matter runs here.
    pub fn book_host(&mut self, uid: PodUid, host: HostAmount) {
        self.unclaim(&uid);
        self.reservations.remove(&uid);
        self.devices.iter_mut().for_each(|books| books.forget_leftover(&uid));
        self.others.insert(uid, host);
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

    /// Takes a pod out of the books. Returns whether it was there.
    pub fn remove(&mut self, uid: &PodUid) -> bool {
        let there = self.reservations.remove(uid).is_some() | self.others.remove(uid).is_some();
        if there {
            self.recompute();
        }
        there
    }

    /// Holds a place back for a pod. Replaces its earlier claim here.
    pub fn claim(&mut self, uid: PodUid, claim: Claim) {
        self.claims.insert(uid, claim);
        self.recompute();
    }

    /// Ends a claim. Returns it where there was one.
    pub fn unclaim(&mut self, uid: &PodUid) -> Option<Claim> {
        let claim = self.claims.remove(uid);
        if claim.is_some() {
            self.recompute();
        }
        claim
    }

    /// Whether a pod is in the books, with devices or without.
    pub fn holds(&self, uid: &PodUid) -> bool {
        self.reservations.contains_key(uid) || self.others.contains_key(uid)
    }

    /// How many pods are kept, in all its tables together.
    #[doc(hidden)] // for tests
    pub fn entries(&self) -> usize {
        let on_devices = self.devices.iter().map(DeviceBooks::entries).sum::<usize>();
        self.reservations.len() + self.others.len() + self.claims.len() + on_devices
    }

    /// The reservation of a pod.
    pub fn reservation(&self, uid: &PodUid) -> Option<&Reservation> {
        self.reservations.get(uid)
    }
}

mod devices;
mod drains;
mod sums;

#[cfg(test)]
mod tests;
