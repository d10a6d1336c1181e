//! What holds tenants to their memory: what is intended, beside what was verified on the node.
//!
//! Verified is only what was read back, or what the hardware is: a limit that the driver confirms, the limits
//! of clients of MPS whose daemon serves them, a MIG instance. Clients of MPS must co-operate: a program that
//! does not want to be held is not, so such limits never count as isolation by hardware.

use std::collections::BTreeMap;
use std::time::Duration;

use litemap::LiteMap;

use super::books::{Ledger, locked};
use super::details::NodeDetails;
use super::effect::Effect;
use crate::packing::device::{DeviceId, DeviceKind, PodUid};
use crate::packing::node::{DeviceBooks, DeviceUse, Evidence, NodeLedger};
use crate::packing::request::Demand;
use crate::packing::reservation::{Protection as PoolGuard, ReservationState};
use crate::packing::units::{MemMib, Share, Timestamp};

/// How long processes of a pod may run before their intended protection must have been verified. Two
/// regular lists of processes fall into it.
pub const VERIFIED_WITHIN: Duration = Duration::from_secs(10);

/// What holds a tenant of a device to its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Nothing: time slicing alone.
    None,
    /// Limits of MPS, with which clients must co-operate.
    Mps,
    /// A limit of the driver on the container's control group.
    Driver,
    /// A MIG instance of its own.
    Mig,
    /// It has the whole GPU: there are no neighbours.
    Whole,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 5] = [Self::None, Self::Mps, Self::Driver, Self::Mig, Self::Whole];

    /// Its name, in state and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mps => "mps",
            Self::Driver => "driver",
            Self::Mig => "mig",
            Self::Whole => "whole",
        }
    }
}

/// Whether containers that share a GPU are given to the driver to be limited, or to MPS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverLimits {
    /// They are not.
    Unused,
    /// They are, to the driver.
    Intended,
    /// They are, as clients of MPS.
    OfClients,
}

/// What an agent tells of a pod with processes on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// What the driver holds all its processes to, read back.
    pub limit: Option<MemMib>,
    /// Whether a process of it is known to have no limit.
    pub is_unlimited: bool,
    /// Whether a process of it is a client of MPS.
    pub is_mps_client: bool,
    /// What MPS holds all its processes to together, where each is a client of a daemon that serves.
    pub mps_limit: Option<MemMib>,
    /// Percent of the time since the last list in which its kernels ran; none where the driver does not say
    /// whose kernels run.
    pub busy_percent: Option<u8>,
}

/// The protection of one tenant of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// What is meant to hold it.
    pub intended: Mode,
    /// What is known to hold it.
    pub verified: Mode,
}

/// What the driver confirms of the tenants of one node, as of the last list of each device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Protections {
    devices: LiteMap<DeviceId, LiteMap<PodUid, Seen>>,
}

/// One pod with processes on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    told: Told,
    /// Since when its intended protection could have been verified and was not.
    unverified: Option<Timestamp>,
    /// Whether that was told.
    is_told: bool,
}

impl Protections {
    /// The protection of a pod that holds so much of a device.
    pub fn of(
        &self,
        books: &DeviceBooks,
        (uid, held): (&PodUid, Demand),
        limits: DriverLimits,
    ) -> Protection {
        let device = &books.device().id;
        let seen = self.devices.get(device).and_then(|pods| pods.get(uid));
        protection(books, held, seen.map(|seen| seen.told).unwrap_or_default(), limits)
    }

    /// How many pods are kept, once for each device.
    pub(super) fn count(&self) -> usize {
        self.devices.values().map(LiteMap::len).sum()
    }

    /// Forgets devices that the books do not have.
    pub(super) fn prune(&mut self, books: &NodeLedger) {
        self.devices.retain(|id, _| books.devices().iter().any(|it| it.device().id == *id));
    }

    /// Takes in what the driver tells, for each device whose processes were listed.
    pub(super) fn take(
        &mut self,
        books: &NodeLedger,
        (uses, told): (&[DeviceUse], &BTreeMap<DeviceId, BTreeMap<PodUid, Told>>),
        limits: DriverLimits,
        now: Timestamp,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        for device in books.devices() {
            let id = &device.device().id;
            let list = uses.iter().find(|seen| seen.id == *id).and_then(|it| it.processes.as_ref());
            let Some(list) = list else { continue };
            let before = self.devices.remove(id).unwrap_or_default();
            let mut all = LiteMap::with_capacity(device.tenants().len());
            for (uid, held) in device.tenants() {
                if !list.iter().any(|process| process.pod.as_ref() == Some(uid)) {
                    continue;
                }
                let told = told.get(id).and_then(|pods| pods.get(uid)).copied().unwrap_or_default();
                let earlier = before.get(uid);
                let found = protection(device, *held, told, limits);
                let is_promised = match found.intended {
                    Mode::Driver => true,
                    Mode::Mps => {
                        limits == DriverLimits::OfClients
                            || device.promised_guard() == PoolGuard::Mps
                    }
                    Mode::None | Mode::Mig | Mode::Whole => false,
                };
                let is_awaited = is_promised && found.verified != found.intended;
                let since = earlier.and_then(|earlier| earlier.unverified).unwrap_or(now);
                let mut seen = Seen {
                    told,
                    unverified: is_awaited.then_some(since),
                    is_told: is_awaited && earlier.is_some_and(|earlier| earlier.is_told),
                };
                let reservation = books.reservation(uid);
                let pod = reservation.filter(|it| it.state == ReservationState::Confirmed);
                if let (true, false, Some(pod)) = (is_awaited, seen.is_told, pod)
                    && now.since(since) >= VERIFIED_WITHIN
                {
                    seen.is_told = true;
                    effects.push(Effect::Unprotected {
                        node: books.name().clone(),
                        device: id.clone(),
                        pod: pod.pod.clone(),
                        intended: found.intended,
                        limit: told.limit.or(told.mps_limit),
                    });
                }
                all.insert(uid.clone(), seen);
            }
            self.devices.insert(id.clone(), all);
        }
        effects
    }
}

/// What protects a tenant that holds `held` of a device, by what the driver `told` of it. A tenant that
/// has only a part of a MIG instance has neighbours like one that has a part of a GPU.
fn protection(books: &DeviceBooks, held: Demand, told: Told, limits: DriverLimits) -> Protection {
    let both = |mode| Protection { intended: mode, verified: mode };
    let has_all = held.share >= Share::WHOLE && held.memory >= books.capacity().memory;
    match &books.device().kind {
        DeviceKind::MigInstance { .. } if has_all => return both(Mode::Mig),
        DeviceKind::Gpu if has_all => return both(Mode::Whole),
        DeviceKind::MigInstance { .. } | DeviceKind::Gpu | DeviceKind::MigParent => {}
    }
    let is_gpu = books.device().kind == DeviceKind::Gpu;
    let within = |limit: Option<MemMib>| limit.is_some_and(|limit| limit <= held.memory);
    let (is_held, is_held_by_mps) = (within(told.limit), within(told.mps_limit));
    let is_promised = is_gpu && limits == DriverLimits::Intended;
    let intended = match books.promised_guard() {
        PoolGuard::Driver => Mode::Driver,
        _ if is_held => Mode::Driver,
        PoolGuard::Mps => Mode::Mps,
        _ if is_promised => Mode::Driver,
        _ if limits == DriverLimits::OfClients || told.is_mps_client => Mode::Mps,
        PoolGuard::None | PoolGuard::Hardware => Mode::None,
    };
    let verified = match (is_held, is_held_by_mps) {
        (true, _) => Mode::Driver,
        (false, true) => Mode::Mps,
        (false, false) => Mode::None,
    };
    Protection { intended, verified }
}

/// What is known now of the protection that a pool promises, of the devices where that is news.
///
/// It is missing where the driver has no limits at all or the daemon of MPS takes no clients, and where a
/// tenant that should be held is known to be held by nothing, or to more than its share, for longer than
/// [`VERIFIED_WITHIN`]. What cannot be read proves nothing.
pub(super) fn evidence(books: &NodeLedger, details: &NodeDetails) -> Vec<(DeviceId, Evidence)> {
    let of = |device: &DeviceBooks| {
        let id = &device.device().id;
        let is_told_of = details.driver.is_some();
        let can_limit = || details.devices.get(id).is_some_and(|known| known.can_limit_memory);
        let condition = || details.conditions.get(id).copied().unwrap_or_default();
        let (mode, is_hopeless) = match device.promised_guard() {
            PoolGuard::Driver => (Mode::Driver, is_told_of && !can_limit()),
            PoolGuard::Mps => (Mode::Mps, condition().is_mps_away()),
            PoolGuard::None | PoolGuard::Hardware => return Evidence::Intended,
        };
        if is_hopeless {
            return Evidence::Missing;
        }
        let listed = details.protections.devices.get(id);
        let held = |(uid, demand): (&PodUid, &Demand)| {
            let seen = listed?.get(uid)?;
            let found = protection(device, *demand, seen.told, DriverLimits::Unused);
            (found.intended == mode).then_some((seen, found.verified == mode))
        };
        let tenants: Vec<_> = device.tenants().iter().filter_map(held).collect();
        let is_unheld = |told: &Told| match mode {
            Mode::Mps => !told.is_mps_client || told.mps_limit.is_some(),
            _ => told.is_unlimited || told.limit.is_some(),
        };
        let lacks = |seen: &Seen| seen.is_told && is_unheld(&seen.told);
        if tenants.iter().any(|(seen, is_verified)| !is_verified && lacks(seen)) {
            Evidence::Missing
        } else if !tenants.is_empty() && tenants.iter().all(|(_, is_verified)| *is_verified) {
            Evidence::Verified
        } else {
            Evidence::Intended
        }
    };
    let found = books.devices().iter().map(|device| (device, of(device)));
    let news = found.filter(|(device, found)| device.evidence() != *found);
    news.map(|(device, found)| (device.device().id.clone(), found)).collect()
}

/// How many tenants each mode is meant to protect, and is known to.
pub type Census = BTreeMap<Mode, (u64, u64)>;

impl Ledger {
    /// Notes what is known now of the protection of devices, and says what follows.
    pub(super) fn see_evidence(&self, at: usize, found: &[(DeviceId, Evidence)]) -> Vec<Effect> {
        if found.is_empty() {
            return Vec::new();
        }
        // Whoever was kept away for want of protection may fit again, though nothing became free.
        let is_room = found.iter().any(|(_, evidence)| *evidence != Evidence::Missing);
        let mut effects: Vec<Effect> =
            is_room.then(|| Effect::Room(self.slot(at).name.clone())).into_iter().collect();
        effects.extend(self.change_slot(at, |books| {
            for (id, evidence) in found {
                books.see_evidence(id, *evidence);
            }
        }));
        effects
    }

    /// Tenants by mode: how many it is meant to protect, and how many it is known to. A pod counts once
    /// for each device that it holds.
    pub fn protections(&self, limits: DriverLimits) -> Census {
        let mut census: Census = Mode::ALL.into_iter().map(|mode| (mode, (0, 0))).collect();
        for slot in self.slots().iter() {
            let books = slot.read();
            let details = locked(&slot.details);
            for device in books.devices() {
                for (uid, held) in device.tenants() {
                    let found = details.protections.of(device, (uid, *held), limits);
                    census.entry(found.intended).or_default().0 += 1;
                    census.entry(found.verified).or_default().1 += 1;
                }
            }
        }
        census
    }
}

#[cfg(test)]
mod tests;
