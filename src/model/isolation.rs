//! How tenants are isolated from each other.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::hardware::device::{DeviceId, PodUid};
use crate::hardware::units::{MemMib, Share, Timestamp};

/// What limits the memory of a tenant of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// Nothing: time slicing alone.
    None,
    /// Limits of MPS, with which clients must cooperate.
    Mps,
    /// A limit of the driver on the container's control group.
    Driver,
    /// A MIG instance of its own.
    Mig,
    /// It has the whole GPU: there are no neighbors.
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

/// The rules by which a report is judged.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Use of up to this much above the allowed amount is ignored: NVML's figures vary by some MiB.
    pub tolerance: MemMib,
    /// What limits containers that share a GPU.
    pub limits: DriverLimits,
    /// How long a pod that is no longer alone on its GPU may still use memory up to its limit.
    pub grace: Duration,
    /// Limits above this share of the GPU count as this share.
    pub max_limit: Share,
}

/// Whether the driver or MPS limits containers that share a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverLimits {
    /// Neither does.
    Unused,
    /// The driver does.
    Configured,
    /// MPS does, with the containers as its clients.
    OfClients,
}

/// A driver may round a soft limit down by less than this.
const ROUNDED_BY: MemMib = MemMib::new(4);

/// How long memory is not taken back for a soft limit that a report does not name any more: agents start again, and
/// miss answers.
const MISSED_FOR: Duration = Duration::from_secs(10);

/// The limits of memory that the agent of a node is to give to the driver, where pods borrow memory.
///
/// A pod may have a limit above its request as long as no other one needs the memory. When a pod comes, a new order
/// begins. It may start once the agent has the order in force: then what all may use at most, the new pod's request
/// included, is no more than there is.
#[derive(Clone, Debug, Default)]
pub struct LimitOrders {
    /// The order of each device.
    given: BTreeMap<DeviceId, LimitOrder>,
    /// The devices whose limits the agent sets, by its last report.
    in_force: BTreeMap<DeviceId, DeviceLimits>,
    /// Soft limits that reports named a short time ago and name no more, with the time of the first one without.
    missed: BTreeMap<(DeviceId, PodUid), (MemMib, Timestamp)>,
    /// Number of the newest order.
    count: u64,
}

/// What an agent has in force on one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Number of the order.
    pub number: u64,
    /// The pods to which the driver guarantees memory by soft limits, each with how much.
    pub soft: BTreeMap<PodUid, MemMib>,
}

/// The pods of one device whose limits are to be set together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitOrder {
    /// Its number: another one each time that a pod comes, or requests more.
    pub number: u64,
    /// What each pod that runs there, or is about to, requests; nothing of one that is away. The flag says whether its
    /// limit may be above its request, or might since it came.
    pods: BTreeMap<PodUid, (MemMib, bool)>,
    /// Whether soft limits guarantee what all request, so that limits are not split.
    is_soft: bool,
}

impl LimitOrder {
    /// The pods whose limits may be above their request.
    pub fn borrowers(&self) -> impl Iterator<Item = &PodUid> {
        self.pods.iter().filter(|(_, (_, borrows))| *borrows).map(|(uid, _)| uid)
    }
}

impl LimitOrders {
    /// Numbers orders from here on.
    pub(crate) fn count_from(&mut self, number: u64) {
        self.count = number;
    }

    /// Whether the agent sets the limits of a device.
    pub fn are_set(&self, device: &DeviceId) -> bool {
        self.in_force.contains_key(device)
    }

    /// Whether a soft limit guarantees so much memory to a pod on a device, by the last report.
    pub(crate) fn guarantee(&self, device: &DeviceId, uid: &PodUid, memory: MemMib) -> bool {
        let found = self.in_force.get(device).and_then(|it| it.soft.get(uid));
        found.is_some_and(|soft| soft.mib() + ROUNDED_BY.mib() >= memory.mib())
    }

    /// The same by one of the last reports.
    pub(crate) fn have_guaranteed(&self, device: &DeviceId, uid: &PodUid, memory: MemMib) -> bool {
        let missed = self.missed.get(&(device.clone(), uid.clone()));
        self.guarantee(device, uid, memory)
            || missed.is_some_and(|(soft, _)| soft.mib() + ROUNDED_BY.mib() >= memory.mib())
    }

    /// Notes what the agent has in force, and which soft limits it may have named to an earlier process. Whether it sets
    /// the limits of other devices than before, or other soft limits.
    pub(crate) fn note(
        &mut self,
        in_force: BTreeMap<DeviceId, DeviceLimits>,
        presumed: Vec<((DeviceId, PodUid), MemMib)>,
        now: Timestamp,
    ) -> bool {
        let before = std::mem::replace(&mut self.in_force, in_force);
        self.missed.extend(presumed.into_iter().map(|(key, soft)| (key, (soft, now))));
        let is_there = |all: &BTreeMap<DeviceId, DeviceLimits>, (id, uid): &(DeviceId, PodUid)| {
            all.get(id).is_some_and(|it| it.soft.contains_key(uid))
        };
        let mut has_changed = !before.keys().eq(self.in_force.keys())
            || !before.values().map(|it| &it.soft).eq(self.in_force.values().map(|it| &it.soft));
        for (id, limits) in before {
            for (uid, soft) in limits.soft {
                let key = (id.clone(), uid);
                if !is_there(&self.in_force, &key) {
                    self.missed.insert(key, (soft, now));
                }
            }
        }
        let count = self.missed.len();
        let in_force = &self.in_force;
        self.missed
            .retain(|key, (_, since)| now.since(*since) < MISSED_FOR && !is_there(in_force, key));
        has_changed |= count != self.missed.len();
        has_changed
    }

    /// Forgets the soft limits of other pods on other devices.
    pub(crate) fn retain_soft(&mut self, counts: impl Fn(&DeviceId, &PodUid) -> bool) {
        for (id, limits) in &mut self.in_force {
            limits.soft.retain(|uid, _| counts(id, uid));
        }
        self.missed.retain(|(id, uid), _| counts(id, uid));
    }

    /// Whether this is in force already, and nothing else changes now.
    pub(crate) fn has(&self, in_force: &BTreeMap<DeviceId, DeviceLimits>, now: Timestamp) -> bool {
        let is_over = |(_, since): &(MemMib, Timestamp)| now.since(*since) >= MISSED_FOR;
        self.in_force == *in_force && !self.missed.values().any(is_over)
    }

    /// The order of a device.
    pub fn order(&self, device: &DeviceId) -> Option<&LimitOrder> {
        self.given.get(device)
    }

    /// Gives the orders for devices with these pods, each with its request and whether it may use more, and whether soft
    /// limits guarantee what all request. Another order begins when a pod comes, and when limits are split again.
    pub(crate) fn give(
        &mut self,
        devices: impl Iterator<Item = (DeviceId, BTreeMap<PodUid, (MemMib, bool)>, bool)>,
    ) {
        let mut before = std::mem::take(&mut self.given);
        for (device, mut pods, is_soft) in devices {
            let earlier = before.remove(&device);
            let known = earlier.as_ref().map(|order| &order.pods);
            let mut has_come = earlier.as_ref().is_none_or(|order| order.is_soft && !is_soft);
            for (uid, (request, borrows)) in &mut pods {
                let known = known.and_then(|pods| pods.get(uid));
                *borrows |= known.is_some_and(|(_, borrowed)| *borrowed);
                has_come |= known.is_none_or(|(before, _)| before < request);
            }
            self.count += u64::from(has_come);
            let number = earlier.filter(|_| !has_come).map_or(self.count, |order| order.number);
            self.given.insert(device, LimitOrder { number, pods, is_soft });
        }
    }

    /// Whether a pod can start on a device: no other one there may use more than it requests, or the limits that
    /// leave its request free are in force.
    pub fn leave_room(&self, device: &DeviceId, uid: &PodUid) -> bool {
        self.given.get(device).is_none_or(|order| {
            let lends = order.borrowers().any(|other| other != uid);
            !lends || self.in_force.get(device).is_some_and(|it| it.number == order.number)
        })
    }
}
