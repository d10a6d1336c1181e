//! The books of one device: what it has, what is booked and claimed of it, and what is free.
//!
//! [`super::node`] keeps them; the sums here are derived from its reservations and claims.

use std::collections::BTreeMap;

use super::device::{ClassId, Device, DeviceId, DeviceKind, Health, PodUid};
use super::fit::Room;
use super::request::Demand;
use super::reservation::Placement;
use super::units::{HostAmount, MemMib, Share, Timestamp};

/// More than any device has: what written amounts come to that leave the range of the type.
pub(super) const BEYOND: Demand =
    Demand { memory: MemMib::new(u64::MAX), share: Share::from_millionths(u64::MAX) };

/// What an agent saw on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceUse {
    /// The device.
    pub id: DeviceId,
    /// Memory in use without the driver's reserve; `None` where the driver cannot say.
    pub used: Option<MemMib>,
    /// Share of the last period in which a kernel ran, 0 to 100; `None` where the driver cannot say.
    pub busy_percent: Option<u8>,
    /// Whether it may take new tenants.
    pub health: Health,
    /// Its processes; `None` when they were not sampled this time.
    pub processes: Option<Vec<ProcessUse>>,
}

/// One process on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessUse {
    /// The pod it belongs to; `None` for a process outside Kubernetes or one that cannot be joined.
    pub pod: Option<PodUid>,
    /// Its memory on the device; `None` where the driver cannot say, which is not zero.
    pub memory: Option<MemMib>,
}

/// One device with its books.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceBooks {
    pub(super) device: Device,
    pub(super) class: ClassId,
    pub(super) health: Health,
    pub(super) booked: Demand,
    pub(super) claimed: Demand,
    pub(super) tenants: BTreeMap<PodUid, Demand>,
    pub(super) used: Option<MemMib>,
    pub(super) busy_percent: Option<u8>,
    pub(super) unbooked: MemMib,
}

impl DeviceBooks {
    /// The device as it was reported.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What reservations hold.
    pub fn booked(&self) -> Demand {
        self.booked
    }

    /// What claims hold back.
    pub fn claimed(&self) -> Demand {
        self.claimed
    }

    /// The tenants with what each holds, by UID.
    pub fn tenants(&self) -> &BTreeMap<PodUid, Demand> {
        &self.tenants
    }

    /// Memory in use as the agent saw it last.
    pub fn used(&self) -> Option<MemMib> {
        self.used
    }

    /// Busy time of the last period in percent, as the agent saw it last.
    pub fn busy_percent(&self) -> Option<u8> {
        self.busy_percent
    }

    /// Memory in use that no booking covers: processes of no known pod, and what over-users take
    /// beyond their share. It is taken off what may be placed.
    pub fn unbooked(&self) -> MemMib {
        self.unbooked
    }

    /// Current health: the inventory's or the last report's, whichever is worse.
    pub fn health(&self) -> Health {
        self.health
    }

    /// All of the device.
    pub fn capacity(&self) -> Demand {
        Demand { memory: self.device.capacity(), share: Share::WHOLE }
    }

    /// Whether reservations hold more than the device has.
    pub fn is_overbooked(&self) -> bool {
        self.capacity().checked_sub(self.booked).is_none()
    }

    /// Whether this device can hold tenants at all.
    pub fn is_placeable(&self) -> bool {
        self.device.kind != DeviceKind::MigParent && self.health == Health::Healthy
    }

    /// Room without regard to claims; what `bind` may use.
    pub fn free_of_bookings(&self) -> Demand {
        self.left_of(self.capacity().checked_sub(self.booked))
    }

    /// Room beside bookings and claims; what questions see.
    pub fn free(&self) -> Demand {
        let left = self.capacity().checked_sub(self.booked);
        self.left_of(left.and_then(|left| left.checked_sub(self.claimed)))
    }

    /// `left` without the memory that is used outside the books. Nothing is free on a device whose
    /// books or use exceed it.
    fn left_of(&self, left: Option<Demand>) -> Demand {
        let Some(left) = left else { return Demand::ZERO };
        match left.memory.checked_sub(self.unbooked) {
            Some(memory) => Demand { memory, share: left.share },
            None => Demand { memory: MemMib::ZERO, share: left.share },
        }
    }

    /// The form in which the fit function sees this device, with or without claims.
    pub fn room(&self, claims: ClaimRule) -> Room {
        let free = match claims {
            ClaimRule::Respected => self.free(),
            ClaimRule::Ignored => self.free_of_bookings(),
        };
        Room { class: self.class, health: self.health, free }
    }

    /// Class of the device.
    pub fn class(&self) -> ClassId {
        self.class
    }
}

/// Whether claims of other pods count as taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimRule {
    /// They do: questions.
    Respected,
    /// They do not: the last resort of `bind`, which trusts the books alone.
    Ignored,
}

/// A place held back for a pod between its question and its bind. It lives beside the books.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Devices and amounts that are held back.
    pub placement: Placement,
    /// Processor time and memory outside the GPU.
    pub host: HostAmount,
    /// When it ends by itself.
    pub expires: Timestamp,
}

/// Memory in use on a device that no booking covers, zero within the tolerance.
///
/// Each tenant's use counts up to what it booked. Where the driver cannot say what a tenant uses, or
/// processes were not sampled, the tenant is taken to use all it booked.
pub(super) fn unbooked(books: &DeviceBooks, seen: &DeviceUse, tolerance: MemMib) -> MemMib {
    let Some(used) = seen.used else { return books.unbooked };
    let mut covered = MemMib::ZERO;
    for (uid, held) in &books.tenants {
        let own = match &seen.processes {
            None => None,
            Some(processes) => processes
                .iter()
                .filter(|process| process.pod.as_ref() == Some(uid))
                .map(|process| process.memory)
                .try_fold(MemMib::ZERO, |sum, memory| sum.checked_add(memory?)),
        };
        let counted = own.map_or(held.memory, |own| own.min(held.memory));
        covered = covered.checked_add(counted).unwrap_or(BEYOND.memory);
    }
    match used.checked_sub(covered) {
        Some(rest) if rest > tolerance => rest,
        _ => MemMib::ZERO,
    }
}
