//! All devices of one node as its agent reported them, and which of them cannot be.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::hardware::mig;
use crate::hardware::mig::{Geometry, MigFault};
use crate::hardware::model_sizes::ModelSizes;
use crate::hardware::pool::PoolRule;
use crate::hardware::spots::{MigInventory, Spot, makeable};
use crate::hardware::topology::Topology;
use wire::device::{Device, DeviceDetails, DeviceKind, Health, InventoryError};
use wire::ids::{
    DeviceId, MAX_CLASSES_PER_NODE, MAX_DEVICE_MEMORY, MAX_DEVICES_PER_NODE, MAX_MIG_PLACES,
};
use wire::units::MemMib;

/// All devices of one node, sorted by index and UUID; no UUID appears twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInventory {
    devices: Vec<Device>,
    faults: BTreeMap<DeviceId, MigFault>,
    topology: Topology,
    mig: Arc<MigInventory>,
}

impl NodeInventory {
    /// Checks and sorts what an agent reported. The topology is unknown.
    ///
    /// # Errors
    /// As [`NodeInventory::placed`].
    pub fn new(devices: Vec<Device>) -> Result<Self, InventoryError> {
        Self::placed(devices, &BTreeMap::new())
    }

    /// Checks and sorts what an agent reported. `details` say where the devices are in the host, as
    /// far as that is known. A MIG instance that the model cannot have, or not at that unit, is
    /// kept as unhealthy: it keeps its tenants and takes no new ones. One that NVML lists for its GPU is sound.
    ///
    /// # Errors
    /// One [`InventoryError`] for the first fault: too many devices or classes of them, too much
    /// memory or reserve, a UUID twice, an instance without a GPU in MIG mode, more memory in the
    /// instances of a GPU than it has.
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
        let profiles = details.values().flat_map(|details| &details.mig_profiles);
        let count = profiles.map(|profile| profile.starts.len()).sum();
        if count > MAX_MIG_PLACES {
            return Err(InventoryError::TooManyPlaces { count });
        }
        let mig = Arc::new(MigInventory::of(&devices, details));
        let classes = devices.iter().map(|device| mig.class_of(device, PoolRule::default()));
        let count = classes.collect::<BTreeSet<_>>().len();
        if count > MAX_CLASSES_PER_NODE {
            return Err(InventoryError::TooManyClasses { count });
        }
        devices.sort_by(|a, b| (a.index, &a.id).cmp(&(b.index, &b.id)));
        let faults = mig::faults(&devices, details);
        for device in devices.iter_mut().filter(|device| faults.contains_key(&device.id)) {
            device.health = Health::Unhealthy;
        }
        refuse_impossible_instances(&devices)?;
        let topology = Topology::of(&devices, details);
        Ok(Self { devices, faults, topology, mig })
    }

    /// The same devices, where a GPU without memory of its own has the size of its model. It is healthy then, as
    /// far as an inventory says. Returns the GPUs that got a size, too.
    #[must_use]
    pub fn sized(mut self, sizes: &ModelSizes) -> (Self, Vec<DeviceId>) {
        let mut sized = Vec::new();
        let unsized_gpus = self
            .devices
            .iter_mut()
            .filter(|device| device.kind == DeviceKind::Gpu && device.total == MemMib::ZERO);
        for gpu in unsized_gpus {
            let Some(size) = sizes.of(&gpu.model) else { continue };
            (gpu.total, gpu.health) = (size.min(MAX_DEVICE_MEMORY), Health::Healthy);
            sized.push(gpu.id.clone());
        }
        (self, sized)
    }

    /// What can be made of MIG, and where the instances lie.
    pub fn mig(&self) -> &Arc<MigInventory> {
        &self.mig
    }

    /// One instance of each profile that can be made on a GPU, in a pool with this rule.
    pub(crate) fn makeable(&self, rule: PoolRule) -> Vec<Device> {
        let gpus = self.devices.iter().filter(|gpu| rule.mig.divides(gpu));
        let all = gpus.flat_map(|gpu| makeable(gpu, self.mig.profiles_of(&gpu.id)));
        let mut all: Vec<Device> = all.map(|makeable| makeable.device).collect();
        all.dedup_by(|a, b| a.kind == b.kind);
        all
    }

    /// The MIG instances that cannot be, with the cause.
    pub fn faults(&self) -> &BTreeMap<DeviceId, MigFault> {
        &self.faults
    }

    /// The MIG instances that NVML lists for their GPU and that the table of its model does not have, with
    /// where they lie. The list of NVML counts.
    pub fn not_in_table(&self) -> impl Iterator<Item = (&DeviceId, Spot)> {
        self.devices.iter().filter_map(|device| {
            let DeviceKind::MigInstance { parent, profile } = &device.kind else { return None };
            let gpu = self.devices.iter().find(|gpu| gpu.id == *parent)?;
            let geometry = Geometry::of(&gpu.model, gpu.total)?;
            let (slot, _) = self.mig.instance(&device.id)?;
            let mut listed = self.mig.profiles_of(parent).iter();
            let is_overruled =
                listed.any(|known| known.is_at(profile, slot)) && !geometry.has(profile, slot);
            is_overruled.then(|| {
                let (gpu, profile) = (gpu.id.clone(), profile.clone());
                (&device.id, Spot { gpu, profile, start: slot.start })
            })
        })
    }

    /// The topology of the devices, in their order.
    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The devices, sorted by index and UUID.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }
}

/// Refuses instances that are not on a GPU in MIG mode, or have more memory than it: that memory
/// would be allocated twice. Unhealthy ones take no new tenants: an agent may still report them
/// after the GPU was divided again, and nothing is known of their size.
fn refuse_impossible_instances(devices: &[Device]) -> Result<(), InventoryError> {
    let mut gpus: BTreeMap<&DeviceId, (&Device, MemMib)> =
        devices.iter().map(|device| (&device.id, (device, MemMib::ZERO))).collect();
    for device in devices {
        let DeviceKind::MigInstance { parent, .. } = &device.kind else { continue };
        let (id, is_ill) = (&device.id, device.health == Health::Unhealthy);
        let Some((gpu, taken)) = gpus.get_mut(parent) else {
            return Err(InventoryError::Orphan { id: id.clone(), parent: parent.clone() });
        };
        match gpu.kind {
            DeviceKind::Gpu if is_ill => continue,
            DeviceKind::MigParent => {}
            DeviceKind::Gpu | DeviceKind::MigInstance { .. } => {
                return Err(InventoryError::NoParent { id: id.clone(), parent: parent.clone() });
            }
        }
        if is_ill {
            continue;
        }
        *taken =
            taken.checked_add(device.total).filter(|sum| *sum <= gpu.total).ok_or_else(|| {
                InventoryError::InstanceMemory {
                    id: id.clone(),
                    parent: parent.clone(),
                    total: gpu.total,
                }
            })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
