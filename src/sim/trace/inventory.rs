//! What a row of a trace means in the terms of the ledger: the devices of a node.

use crate::trace::dimensions::{DeviceAt, MoreOfNode, TraceInstance};
use engine::hardware::inventory::NodeInventory;
use engine::hardware::mig::Geometry;
use wire::device::{Device, DeviceIndex, DeviceKind, Health, InventoryError};
use wire::ids::{DeviceId, MigProfile, ModelName};
use wire::units::MemMib;

/// A device with its place in the trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceDevice {
    pub at: DeviceAt,
    pub device: Device,
}

/// The GPUs of a row of the node file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowOfNode<'r> {
    pub(crate) gpus: u32,
    pub(crate) model: &'r str,
    pub(crate) more: Option<&'r MoreOfNode>,
}

impl<'r> RowOfNode<'r> {
    /// Its devices: each GPU, followed by its instances. `rank` makes their UUIDs unique; their
    /// order is that of the trace.
    pub(crate) fn devices(self, rank: usize) -> Result<Vec<TraceDevice>, InventoryError> {
        let mut devices = Vec::new();
        for gpu in 0..self.gpus {
            let instances = self.instances(gpu);
            let id = DeviceId::new(&format!("GPU-{rank:07}-{gpu:03}"))?;
            let kind = if instances.is_empty() { DeviceKind::Gpu } else { DeviceKind::MigParent };
            let at = DeviceAt { gpu, instance: None };
            devices.push(self.device(at, id.clone(), self.total(gpu), kind));
            for (number, instance) in (0..).zip(instances) {
                let own = DeviceId::new(&format!("MIG-{rank:07}-{gpu:03}-{number:03}"))?;
                let (parent, profile) = (id.clone(), instance.profile.clone());
                let kind = DeviceKind::MigInstance { parent, profile };
                let at = DeviceAt { gpu, instance: Some(number) };
                devices.push(self.device(at, own, instance.memory, kind));
            }
        }
        Ok(devices)
    }

    /// The inventory of these devices.
    pub(crate) fn inventory(devices: &[TraceDevice]) -> Result<NodeInventory, InventoryError> {
        NodeInventory::new(devices.iter().map(|device| device.device.clone()).collect())
    }

    fn device(self, at: DeviceAt, id: DeviceId, total: MemMib, kind: DeviceKind) -> TraceDevice {
        let is_ill = self.more.is_some_and(|more| more.unavailable.contains(&at));
        let device = Device {
            id,
            index: DeviceIndex(at.gpu),
            model: ModelName::new(self.model_of(at.gpu)),
            total,
            reserved: MemMib::ZERO,
            kind,
            health: if is_ill { Health::Unhealthy } else { Health::Healthy },
        };
        TraceDevice { at, device }
    }

    /// Model of a GPU.
    fn model_of(self, gpu: u32) -> &'r str {
        let own = self.more.and_then(|more| more.gpu_models.get(position(gpu)));
        own.map_or(self.model, String::as_str)
    }

    /// Schedulable memory of a GPU.
    pub(crate) fn memory_of(self, gpu: u32) -> MemMib {
        let known = self.more.map_or(&[][..], |more| &more.gpu_memory);
        let own = match known {
            [all] => Some(all),
            _ => known.get(position(gpu)),
        };
        own.copied().unwrap_or_else(|| usual_memory(self.model_of(gpu)))
    }

    /// Memory on the board: instances together may have more of it than a GPU that is not divided.
    fn total(self, gpu: u32) -> MemMib {
        let (memory, instances) = (self.memory_of(gpu), self.instances(gpu));
        if instances.is_empty() {
            return memory;
        }
        if let Some(listed) = Geometry::of(&ModelName::new(self.model_of(gpu)), memory) {
            return memory.max(MemMib::new(listed.total_mib));
        }
        let mut own = instances.iter().map(|instance| instance.memory);
        let sum = own.try_fold(MemMib::ZERO, MemMib::checked_add);
        memory.max(sum.unwrap_or(MemMib::ZERO))
    }

    pub(crate) fn instances(self, gpu: u32) -> &'r [TraceInstance] {
        self.more
            .as_ref()
            .and_then(|more| more.instances.get(position(gpu)))
            .map_or(&[], Vec::as_slice)
    }

    /// The usual memory of an instance, where its model is listed.
    pub(crate) fn memory_of_profile(self, gpu: u32, profile: &MigProfile) -> Option<MemMib> {
        let model = ModelName::new(self.model_of(gpu));
        let known = Geometry::of(&model, self.memory_of(gpu))?.profile(profile)?;
        Some(MemMib::new(known.memory_mib))
    }

    /// How many devices can have pods: instances count, GPUs in MIG mode do not.
    pub(crate) fn placeable(self) -> u64 {
        if self.more.is_none_or(|more| more.instances.is_empty()) {
            return u64::from(self.gpus);
        }
        let counts = (0..self.gpus).map(|gpu| self.instances(gpu).len().max(1));
        counts.map(|count| u64::try_from(count).unwrap_or(u64::MAX)).sum()
    }
}

pub(crate) fn position(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Memory of a GPU whose file names the model and not the memory: the public trace. It decides
/// nothing there: pods request shares only, and memory follows the share. The trace hides what `G1`
/// to `G3` are.
fn usual_memory(model: &str) -> MemMib {
    MemMib::new(match model {
        "T4" => 15_360,
        "A10" | "G2" => 24_576,
        "V100M32" => 32_768,
        "G3" => 81_920,
        _ => 16_384,
    })
}
