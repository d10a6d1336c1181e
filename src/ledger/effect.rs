//! What a change of the books means beyond them: whom to wake, what to tell.

use super::protection::Mode;
use crate::packing::device::{DeviceId, Health, NodeName};
use crate::packing::mig::MigFault;
use crate::packing::node::{DeviceBooks, NodeLedger};
use crate::packing::reservation::PodRef;
use crate::packing::units::MemMib;

/// What a change means beyond the books.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// Room may have appeared on this node: waiting pods that fit now should be woken.
    Room(NodeName),
    /// From now on more is booked on a device than it has.
    Overbooked {
        /// The node.
        node: NodeName,
        /// The device.
        device: DeviceId,
    },
    /// A device that holds pods has vanished or takes no new ones any more.
    DeviceLost {
        /// The node.
        node: NodeName,
        /// The device.
        device: DeviceId,
        /// Why it takes none; nothing of a device that has vanished.
        health: Option<Health>,
    },
    /// A MIG instance is reported that cannot be; nothing is placed on it.
    Impossible {
        /// The node.
        node: NodeName,
        /// The instance.
        device: DeviceId,
        /// Why it cannot be.
        fault: MigFault,
    },
    /// A pod with a GPU request runs without a placement of ours: only its observed use counts.
    Unplaced {
        /// The pod.
        pod: PodRef,
        /// Its node.
        node: NodeName,
    },
    /// A pod uses more of a device than it may, for the first time or again.
    Overuse {
        /// The node.
        node: NodeName,
        /// The device.
        device: DeviceId,
        /// The pod.
        pod: PodRef,
        /// What it uses.
        used: MemMib,
        /// What it may use.
        allowed: MemMib,
    },
    /// From now on processes of no pod that holds anything on the node use a device.
    Foreign {
        /// The node.
        node: NodeName,
        /// The device.
        device: DeviceId,
        /// What they use.
        used: MemMib,
    },
    /// Driver or MPS was meant to hold a pod to its memory, and after some seconds it is not known to.
    Unprotected {
        /// The node.
        node: NodeName,
        /// The device.
        device: DeviceId,
        /// The pod.
        pod: PodRef,
        /// What was meant to hold it.
        intended: Mode,
        /// What it is held to, where that is more than it holds.
        limit: Option<MemMib>,
    },
    /// A node's agent went silent.
    Silent(NodeName),
}

/// What of a node's books decides about effects: compared before and after a change.
pub(super) struct Standing {
    free: Vec<(DeviceId, u64, u64)>,
    overbooked: Vec<DeviceId>,
    /// Healthy devices that hold pods.
    tenanted: Vec<DeviceId>,
}

impl Standing {
    /// How the books stand now.
    pub(super) fn of(books: &NodeLedger) -> Self {
        let overbooked = books.devices().iter().filter(|device| device.is_overbooked());
        Self {
            free: free_by_device(books),
            overbooked: overbooked.map(|device| device.device().id.clone()).collect(),
            tenanted: healthy(books)
                .filter(|device| !device.tenants().is_empty())
                .map(|device| device.device().id.clone())
                .collect(),
        }
    }

    /// What the change since then means.
    pub(super) fn effects(&self, books: &NodeLedger) -> Vec<Effect> {
        let now = Self::of(books);
        let node = books.name();
        let grew = has_grown(&self.free, &now.free).then(|| Effect::Room(node.clone()));
        let fresh = now.overbooked.into_iter().filter(|device| !self.overbooked.contains(device));
        let overbooked = fresh.map(|device| Effect::Overbooked { node: node.clone(), device });
        let health = |id: &DeviceId| {
            let known = books.devices().iter().find(|device| device.device().id == *id);
            known.map(DeviceBooks::health)
        };
        let tenanted = self.tenanted.iter().map(|device| (device, health(device)));
        let lost = tenanted.filter(|(_, health)| *health != Some(Health::Healthy));
        let lost = lost.map(|(device, health)| {
            let (node, device) = (node.clone(), device.clone());
            Effect::DeviceLost { node, device, health }
        });
        grew.into_iter().chain(overbooked).chain(lost).collect()
    }
}

fn healthy(books: &NodeLedger) -> impl Iterator<Item = &DeviceBooks> {
    books.devices().iter().filter(|device| device.health() == Health::Healthy)
}

/// Free memory and share of each device that can be placed on, in millionths and MiB.
fn free_by_device(books: &NodeLedger) -> Vec<(DeviceId, u64, u64)> {
    if books.placeable().is_err() {
        return Vec::new();
    }
    let placeable = books.devices().iter().filter(|device| device.is_placeable());
    placeable
        .map(|device| {
            let free = device.free();
            (device.device().id.clone(), free.memory.mib(), free.share.millionths())
        })
        .collect()
}

fn has_grown(before: &[(DeviceId, u64, u64)], after: &[(DeviceId, u64, u64)]) -> bool {
    after.iter().any(|(id, memory, share)| {
        let old = before.iter().find(|(known, ..)| known == id);
        old.is_none_or(|(_, old_memory, old_share)| memory > old_memory || share > old_share)
            && *memory > 0
            && *share > 0
    })
}
