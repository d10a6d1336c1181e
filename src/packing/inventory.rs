//! All devices of one node as its agent reported them, and what of that is not believed.

use std::collections::{BTreeMap, BTreeSet};

use super::details::DeviceDetails;
use super::device::{
    Device, DeviceId, DeviceKind, Health, MAX_DEVICE_MEMORY, MAX_DEVICES_PER_NODE,
};
use super::mig::{self, MigFault};
use super::nearness::Nearness;
use super::units::MemMib;

/// All devices of one node, sorted by index and UUID; no UUID appears twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInventory {
    devices: Vec<Device>,
    faults: BTreeMap<DeviceId, MigFault>,
    nearness: Nearness,
}

impl NodeInventory {
    /// Checks and sorts what an agent reported. Where the devices sit is not known.
    ///
    /// # Errors
    /// As [`NodeInventory::placed`].
    pub fn new(devices: Vec<Device>) -> Result<Self, InventoryError> {
        Self::placed(devices, &BTreeMap::new())
    }

    /// Checks and sorts what an agent reported. `details` say where the devices sit, as far as that is
    /// known. A MIG instance that its model cannot have, or not there, is kept as unhealthy: it takes no
    /// tenants, and those that it has stay booked.
    ///
    /// # Errors
    /// One [`InventoryError`] for the first fault found: too many devices, absurd memory, a UUID
    /// twice, an instance without its parent.
    pub fn placed(
        mut devices: Vec<Device>,
        details: &BTreeMap<DeviceId, DeviceDetails>,
    ) -> Result<Self, InventoryError> {
        if devices.len() > MAX_DEVICES_PER_NODE {
            return Err(InventoryError::TooManyDevices { count: devices.len() });
        }
        let mut ids = BTreeSet::new();
        for device in &devices {
            if device.total > MAX_DEVICE_MEMORY {
                return Err(InventoryError::Memory { id: device.id.clone(), total: device.total });
            }
            if device.reserved > device.total {
                return Err(InventoryError::Reserve {
                    id: device.id.clone(),
                    reserved: device.reserved,
                    total: device.total,
                });
            }
            if !ids.insert(device.id.clone()) {
                return Err(InventoryError::Twice { id: device.id.clone() });
            }
        }
        for device in &devices {
            if let DeviceKind::MigInstance { parent, .. } = &device.kind
                && !ids.contains(parent)
            {
                return Err(InventoryError::Orphan {
                    id: device.id.clone(),
                    parent: parent.clone(),
                });
            }
        }
        devices.sort_by(|a, b| (a.index, &a.id).cmp(&(b.index, &b.id)));
        let faults = mig::faults(&devices, |id| Some(details.get(id)?.slot?.start));
        for device in devices.iter_mut().filter(|device| faults.contains_key(&device.id)) {
            device.health = Health::Unhealthy;
        }
        let nearness = Nearness::of(&devices, details);
        Ok(Self { devices, faults, nearness })
    }

    /// The MIG instances that cannot be, with the reason.
    pub fn faults(&self) -> &BTreeMap<DeviceId, MigFault> {
        &self.faults
    }

    /// How near the devices are to each other, in their order.
    pub(super) fn nearness(&self) -> &Nearness {
        &self.nearness
    }

    /// The devices, sorted by index and UUID.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }
}

/// Why an inventory is not believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InventoryError {
    /// A UUID that cannot be one.
    #[error(
        "device id `{id}` is not a UUID of NVML: 1 to 96 letters, digits, `-` or `/` are allowed"
    )]
    DeviceId {
        /// The offending text, cut to 96 characters.
        id: String,
    },
    /// More devices than a node can hold.
    #[error("`{count}` devices are reported, at most {MAX_DEVICES_PER_NODE} are believed")]
    TooManyDevices {
        /// How many were reported.
        count: usize,
    },
    /// More memory than any device has.
    #[error("device `{id}` reports `{total}`, at most {MAX_DEVICE_MEMORY} are believed")]
    Memory {
        /// The device.
        id: DeviceId,
        /// The reported total.
        total: MemMib,
    },
    /// The driver's reserve is larger than the device.
    #[error("device `{id}` reports a reserve of `{reserved}` on a total of {total}")]
    Reserve {
        /// The device.
        id: DeviceId,
        /// The reported reserve.
        reserved: MemMib,
        /// The reported total.
        total: MemMib,
    },
    /// The same UUID twice in one inventory.
    #[error("device `{id}` is reported twice")]
    Twice {
        /// The device.
        id: DeviceId,
    },
    /// A MIG instance whose GPU is not in the inventory.
    #[error("instance `{id}` names the GPU `{parent}`, which is not reported")]
    Orphan {
        /// The instance.
        id: DeviceId,
        /// The missing GPU.
        parent: DeviceId,
    },
}
