//! How tenants are isolated from each other, by what rules reports are judged, and orders about limits of memory.

use std::collections::BTreeMap;
use std::time::Duration;

use wire::ids::{DeviceId, PodUid};
use wire::units::{MemMib, Share};

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

/// The limits of memory that the agent of a node is to give to the driver, where pods borrow memory.
///
/// A pod may have a limit above its request as long as no other one needs the memory. When a pod comes, a new order
/// begins. It may start once the agent has the order in force: then what all may use at most, the new pod's request
/// included, is no more than there is.
#[derive(Clone, Debug, Default)]
pub struct LimitOrders {
    /// The order of each device.
    given: BTreeMap<DeviceId, LimitOrder>,
    /// The devices whose limits the agent sets, each with the number of the order in force, by its last report.
    in_force: BTreeMap<DeviceId, u64>,
    /// Number of the newest order.
    count: u64,
}

/// The pods of one device whose limits are to be set together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitOrder {
    /// Its number: another one each time that a pod comes, or requests more.
    pub number: u64,
    /// What each pod that runs there, or is about to, requests; nothing of one that is away. The flag says whether its
    /// limit may be above its request, or might since it came.
    pods: BTreeMap<PodUid, (MemMib, bool)>,
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

    /// Notes what the agent has in force. Whether it sets the limits of other devices than before.
    pub(crate) fn note(&mut self, in_force: BTreeMap<DeviceId, u64>) -> bool {
        let has_changed = !in_force.keys().eq(self.in_force.keys());
        self.in_force = in_force;
        has_changed
    }

    /// Whether this is in force already.
    pub(crate) fn has(&self, in_force: &BTreeMap<DeviceId, u64>) -> bool {
        self.in_force == *in_force
    }

    /// The order of a device.
    pub fn order(&self, device: &DeviceId) -> Option<&LimitOrder> {
        self.given.get(device)
    }

    /// Gives the orders for devices with these pods, each with its request and whether it may use more.
    pub(crate) fn give(
        &mut self,
        devices: impl Iterator<Item = (DeviceId, BTreeMap<PodUid, (MemMib, bool)>)>,
    ) {
        let mut before = std::mem::take(&mut self.given);
        for (device, mut pods) in devices {
            let earlier = before.remove(&device);
            let known = earlier.as_ref().map(|order| &order.pods);
            let mut has_come = earlier.is_none();
            for (uid, (request, borrows)) in &mut pods {
                let known = known.and_then(|pods| pods.get(uid));
                *borrows |= known.is_some_and(|(_, borrowed)| *borrowed);
                has_come |= known.is_none_or(|(before, _)| before < request);
            }
            self.count += u64::from(has_come);
            let number = earlier.filter(|_| !has_come).map_or(self.count, |order| order.number);
            self.given.insert(device, LimitOrder { number, pods });
        }
    }

    /// Whether a pod can start on a device: no other one there may use more than it requests, or the limits that
    /// leave its request free are in force.
    pub fn leave_room(&self, device: &DeviceId, uid: &PodUid) -> bool {
        self.given.get(device).is_none_or(|order| {
            let lends = order.borrowers().any(|other| other != uid);
            !lends || self.in_force.get(device) == Some(&order.number)
        })
    }
}
