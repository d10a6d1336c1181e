//! What a change of the ledger means for others: which pods to requeue, what to report.

use crate::hardware::listed::ListFault;
use crate::hardware::mig::MigFault;
use crate::hardware::spots::Spot;
use crate::model::device_state::{DeviceState, HoldRule, Origin};
use crate::model::isolation::Mode;
use crate::model::node_state::{NodeReporting, NodeState};
use crate::model::reservation::PodRef;
use wire::device::Health;
use wire::ids::{DeviceId, NodeName};
use wire::units::{Demand, HostAmount, MemMib, Share};

/// What a change means for others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LedgerEvent {
    /// Room may have appeared on this node: waiting pods that fit now should be requeued.
    Room(NodeName),
    /// More than the device has is allocated from now on.
    Overallocated {
        /// The node.
        node: NodeName,
        /// The device.
        device: DeviceId,
    },
    /// A device that has tenants has vanished or takes no new ones.
    DeviceLost {
        /// The node.
        node: NodeName,
        /// The device.
        device: DeviceId,
        /// Why it takes none; `None` for a device that has vanished.
        health: Option<Health>,
    },
    /// An agent reports a MIG instance that cannot exist. Nothing is placed on it.
    Impossible {
        /// The node.
        node: NodeName,
        /// The instance.
        device: DeviceId,
        /// Why it cannot exist.
        fault: MigFault,
    },
    /// A MIG instance has appeared that NVML lists for its GPU and that the table of its model does not have.
    /// It takes pods like any other.
    NotInTable {
        /// The node.
        node: NodeName,
        /// Where the instance lies.
        spot: Spot,
    },
    /// The model of a GPU has no table, and what NVML lists for it gives no geometry: its instances are made at the
    /// first free spot.
    NoGeometry {
        /// The node.
        node: NodeName,
        /// The GPU.
        device: DeviceId,
        /// Why not.
        fault: ListFault,
    },
    /// A pod with a GPU request runs without a placement of gpupack. Only its observed use counts.
    Unplaced {
        /// The pod.
        pod: PodRef,
        /// Its node.
        node: NodeName,
    },
    /// A MIG instance of a pod was made again, for instance after a reboot. It has another UUID now, which
    /// the annotations of the pod do not show.
    MadeAgain {
        /// The pod.
        pod: PodRef,
    },
    /// The MIG instance that was made for a pod is gone while the pod is bound to it. Another one is to be made
    /// at its place.
    InstanceLost {
        /// The pod.
        pod: PodRef,
        /// Its node.
        node: NodeName,
        /// The instance that is gone.
        device: DeviceId,
    },
    /// The placement annotations of a pod are not those that it was bound with: another client
    /// changed or removed them. The ledger keeps what it had.
    PlacementEdited {
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
    /// Processes without a reservation on the node use a device from now on.
    Untracked {
        /// The node.
        node: NodeName,
        /// The device.
        device: DeviceId,
        /// What they use.
        used: MemMib,
    },
    /// Driver or MPS should limit a pod's memory, and after some seconds this is not verified.
    NoIsolation {
        /// The node.
        node: NodeName,
        /// The device.
        device: DeviceId,
        /// The pod.
        pod: PodRef,
        /// The configured isolation.
        configured: Mode,
        /// Its verified limit, where that is more than what it has.
        limit: Option<MemMib>,
    },
    /// A container that is to have the devices of a pod has started without the driver.
    Blind {
        /// The pod.
        pod: PodRef,
        /// Its node.
        node: NodeName,
        /// The container.
        container: String,
    },
    /// The last pods that started on a node did not get their GPU: it takes no more from now on.
    BlindNode(NodeName),
    /// A node's agent stopped reporting.
    NotReporting(NodeName),
}

/// What of a node's state decides about events; compared before and after a change.
pub(crate) struct StateBefore {
    state: NodeReporting,
    devices: Vec<(DeviceId, DeviceBefore)>,
    /// Where a MIG instance can be made.
    open_spots: Vec<DeviceId>,
    /// CPU and host memory beside what is kept of them, if some is: kube-scheduler does not know of that.
    host_beside_kept: Option<HostAmount>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct DeviceBefore {
    health: Health,
    unallocated_use: MemMib,
    /// Zero where no pod can be placed on the device or node.
    free: Demand,
    /// The same beside pods alone.
    free_under_holds: Demand,
    is_overallocated: bool,
    /// Whether pods are allocated it, or run there as guests.
    is_held: bool,
    is_unread: bool,
    /// Room that guests on their way home still use.
    is_being_left: bool,
    /// What borrowers use: which of them a pod would displace depends on it.
    borrowers_use: u64,
}

impl DeviceBefore {
    fn of(device: &DeviceState, open: Demand, under_holds: Demand, takes_pods: bool) -> Self {
        let is_open = takes_pods && device.is_placeable();
        Self {
            health: device.health(),
            unallocated_use: device.unallocated_use(),
            free: if is_open { open } else { Demand::ZERO },
            free_under_holds: if is_open { under_holds } else { Demand::ZERO },
            is_overallocated: device.is_overallocated(),
            // What is not made yet cannot be lost.
            is_held: (!device.tenants().is_empty() || !device.guests().is_empty())
                && device.origin() != Origin::Promised,
            is_unread: device.is_unread(),
            is_being_left: device.is_being_left(),
            borrowers_use: device.borrowers_use(),
        }
    }

    fn can_be_lost(self) -> bool {
        self.is_held && self.health == Health::Healthy
    }
}

impl StateBefore {
    /// The state now.
    pub(crate) fn of(node_state: &NodeState) -> Self {
        let now = devices_now(node_state);
        let is_kept = !node_state.standing_holds().is_empty();
        Self {
            state: node_state.state(),
            devices: now.map(|(id, device)| (id.clone(), device)).collect(),
            open_spots: node_state.open_spots().cloned().collect(),
            host_beside_kept: is_kept.then(|| node_state.host_free()),
        }
    }

    /// Whether the state is still the same. Then there are no events, and kept answers still hold,
    /// if reservations and holds are the same.
    pub(crate) fn is_that_of(&self, node_state: &NodeState) -> bool {
        let before = self.devices.iter().map(|(id, device)| (id, *device));
        self.state == node_state.state()
            && before.eq(devices_now(node_state))
            && self.open_spots.iter().eq(node_state.open_spots())
    }

    /// The events of the change since then.
    pub(crate) fn events(&self, node_state: &NodeState) -> Vec<LedgerEvent> {
        let node = node_state.name();
        let now = devices_now(node_state).map(|(id, now)| (id, self.device(id), now));
        let now: Vec<_> = now.collect();
        let is_kept = !node_state.standing_holds().is_empty();
        let grew = now.iter().any(|(_, before, now)| {
            let was_left = before.is_some_and(|before| before.is_being_left);
            let free = before.map_or(Demand::ZERO, |before| before.free);
            let under_holds = before.map_or(Demand::ZERO, |before| before.free_under_holds);
            was_left && !now.is_being_left && now.free != Demand::ZERO
                || has_grown(free, now.free)
                // The pod for which it is kept may wait for it.
                || is_kept && has_grown(under_holds, now.free_under_holds)
        });
        // Both have the order of the inventory.
        let mut known = self.open_spots.iter();
        let grew = grew
            || node_state.open_spots().any(|spot| !known.any(|known| known == spot))
            || self.has_more_host(node_state);
        let room = grew.then(|| LedgerEvent::Room(node.clone()));
        let overallocated = now.iter().filter(|(_, before, now)| {
            now.is_overallocated && !before.is_some_and(|before| before.is_overallocated)
        });
        let overallocated = overallocated.map(|(id, ..)| LedgerEvent::Overallocated {
            node: node.clone(),
            device: (*id).clone(),
        });
        let held = self.devices.iter().filter(|(_, before)| before.can_be_lost());
        let lost = held.filter_map(|(id, _)| {
            let now = now.iter().find(|(known, ..)| *known == id);
            let health = now.map(|(.., now)| now.health);
            let is_lost = health != Some(Health::Healthy);
            is_lost.then(|| LedgerEvent::DeviceLost {
                node: node.clone(),
                device: id.clone(),
                health,
            })
        });
        room.into_iter().chain(overallocated).chain(lost).collect()
    }
}

/// Whether there is room, and more than before in memory or share.
fn has_grown(before: Demand, now: Demand) -> bool {
    (now.memory > before.memory || now.share > before.share)
        && now.memory > MemMib::ZERO
        && now.share > Share::ZERO
}

impl StateBefore {
    fn device(&self, id: &DeviceId) -> Option<DeviceBefore> {
        let known = self.devices.iter().find(|(known, _)| known == id);
        known.map(|(_, device)| *device)
    }

    /// Whether pods that were refused for what is kept of the host may fit now. kube-scheduler tries them when a pod
    /// ends, perhaps before this process knows of it.
    fn has_more_host(&self, node_state: &NodeState) -> bool {
        let Some(before) = self.host_beside_kept else { return false };
        let now = node_state.host_free();
        now.cpu > before.cpu || now.memory > before.memory
    }
}

fn devices_now(node_state: &NodeState) -> impl Iterator<Item = (&DeviceId, DeviceBefore)> {
    let takes_pods = node_state.placeable().is_ok();
    // Not what is free of the device alone: others may be made where it lies.
    let rooms = node_state.rooms(HoldRule::Respected).iter().map(|room| room.free);
    let rooms = rooms.zip(node_state.rooms(HoldRule::Ignored).iter().map(|room| room.free));
    let devices = node_state.devices().iter().zip(rooms);
    devices.map(move |(device, (open, under_holds))| {
        (&device.device().id, DeviceBefore::of(device, open, under_holds, takes_pods))
    })
}
