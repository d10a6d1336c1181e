//! The MIG instances that gpupack can make: which profiles a GPU may have, and where.
//!
//! A *spot* is a profile and its first unit on a GPU. Its instance need not exist: it is made when a pod is
//! bound there, and removed after the pod. The UUID of an instance is another one each time it is made, the
//! spot stays the same.
//!
//! Source: `nvmlGpuInstanceProfileInfo_t` and `nvmlGpuInstancePlacement_t` of NVML, as the agent reports
//! them. Instances of one GPU must not overlap, and one of them may have the media engines.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::hardware::device_class::{ClassKind, DeviceClass};
use crate::hardware::listed::ListFault;
use crate::hardware::mig::Geometry;
use crate::hardware::pool::PoolRule;
use wire::device::{
    Device, DeviceDetails, DeviceKind, FailedMigOrder, Health, MakeableProfile, Slot,
};
use wire::ids::{DeviceId, MigProfile, ModelName};
use wire::units::MemMib;

/// A MIG instance by where it lies, whether it exists or not.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Spot {
    /// The GPU.
    pub gpu: DeviceId,
    /// The profile.
    pub profile: MigProfile,
    /// The first unit.
    pub start: u32,
}

impl Spot {
    /// Where the instance of a failed order lies, or was to lie.
    pub fn of_failed(order: &FailedMigOrder) -> Self {
        Self { gpu: order.gpu.clone(), profile: order.profile.clone(), start: order.start }
    }

    /// The id that stands for its instance until that is made. No UUID of NVML has this form. `None` if
    /// it would be too long.
    pub fn id(&self) -> Option<DeviceId> {
        let profile = self.profile.as_str().replace(['.', '+'], "-");
        DeviceId::new(&format!("{}/{}/{profile}", self.gpu, self.start)).ok()
    }
}

/// A GPU on which instances are made, and those that stay on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DividedGpu {
    /// Its product name.
    pub model: ModelName,
    /// What it may have.
    pub geometry: Arc<Geometry>,
    /// What it has: profile and first unit.
    pub instances: Vec<(MigProfile, u32)>,
}

/// An instance that could be made on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Makeable {
    /// Where it would lie.
    pub spot: Spot,
    /// The units that it would cover.
    pub slot: Slot,
    /// The instance as a device, under the id of its spot.
    pub device: Device,
}

impl Makeable {
    /// Whether its instance cannot be there together with the `other` one.
    pub fn excludes(&self, other: &Self) -> bool {
        let have_media = self.spot.profile.has_media() && other.spot.profile.has_media();
        let is_one_gpu = self.spot.gpu == other.spot.gpu;
        is_one_gpu && (self.slot.units() & other.slot.units() != 0 || have_media)
    }
}

/// All instances that could be made on a GPU in MIG mode, by profile and start. Those overlap of course:
/// which of them can be made is a matter of those that are there.
pub fn makeable<'a>(
    gpu: &'a Device,
    profiles: &'a [MakeableProfile],
) -> impl Iterator<Item = Makeable> + 'a {
    profiles.iter().flat_map(move |profile| {
        let starts = profile.starts.iter();
        starts.filter_map(move |start| {
            let spot =
                Spot { gpu: gpu.id.clone(), profile: profile.profile.clone(), start: *start };
            let device = Device {
                id: spot.id()?,
                index: gpu.index,
                model: gpu.model.clone(),
                total: profile.memory,
                reserved: MemMib::ZERO,
                kind: DeviceKind::MigInstance {
                    parent: gpu.id.clone(),
                    profile: profile.profile.clone(),
                },
                health: Health::Healthy,
            };
            Some(Makeable { spot, slot: Slot { start: *start, size: profile.size }, device })
        })
    })
}

/// What an inventory says of MIG: what can be made on which GPU, and where the instances lie that are there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigInventory {
    /// By GPU.
    pub profiles: Vec<(DeviceId, Arc<[MakeableProfile]>)>,
    /// By instance: where it lies, and whether an agent of gpupack made it.
    pub instances: Vec<(DeviceId, Slot, bool)>,
    /// By GPU whose model has no table: the geometry of its list.
    pub listed: Vec<(DeviceId, Result<Arc<Geometry>, ListFault>)>,
}

/// Most different lists of one node that give a geometry. GPUs of one model have one list.
const MOST_LISTS: usize = 8;

/// The geometries of the GPUs whose models have no table. Equal lists are looked at once.
fn listed(
    devices: &[Device],
    details: &BTreeMap<DeviceId, DeviceDetails>,
) -> Vec<(DeviceId, Result<Arc<Geometry>, ListFault>)> {
    let mut known = Vec::new();
    let mut all = Vec::new();
    for gpu in devices {
        let list = details.get(&gpu.id).map_or(&[][..], |details| &details.mig_profiles);
        if list.is_empty() || Geometry::of(&gpu.model, gpu.total).is_some() {
            continue;
        }
        let earlier = known.iter().find(|(key, _): &&(_, Result<_, _>)| *key == (gpu.total, list));
        let geometry = match earlier {
            Some((_, geometry)) => Result::clone(geometry),
            None if known.len() == MOST_LISTS => Err(ListFault::Lists),
            None => {
                let geometry = Geometry::listed(gpu.total, list).map(Arc::new);
                known.push(((gpu.total, list), geometry.clone()));
                geometry
            }
        };
        all.push((gpu.id.clone(), geometry));
    }
    all
}

impl MigInventory {
    /// What the details of devices say.
    pub fn of(devices: &[Device], details: &BTreeMap<DeviceId, DeviceDetails>) -> Self {
        let gpus = details.iter().filter(|(_, details)| !details.mig_profiles.is_empty());
        let profiles = gpus.map(|(id, details)| (id.clone(), details.mig_profiles.clone().into()));
        let instances = details
            .iter()
            .filter_map(|(id, details)| Some((id.clone(), details.slot?, details.made_here)));
        Self {
            profiles: profiles.collect(),
            instances: instances.collect(),
            listed: listed(devices, details),
        }
    }

    /// What can be made on a GPU.
    pub fn profiles_of(&self, gpu: &DeviceId) -> &[MakeableProfile] {
        let found = self.profiles.iter().find(|(id, _)| id == gpu);
        found.map_or(&[], |(_, profiles)| profiles)
    }

    /// What a GPU may have: by the table of its model, or else by what NVML lists for it.
    pub fn geometry_of(&self, gpu: &Device) -> Option<Arc<Geometry>> {
        let known = Geometry::of(&gpu.model, gpu.total).or_else(|| self.listed_for(&gpu.id));
        known.cloned()
    }

    fn listed_for(&self, gpu: &DeviceId) -> Option<&Arc<Geometry>> {
        let (_, geometry) = self.listed.iter().find(|(id, _)| id == gpu)?;
        geometry.as_ref().ok()
    }

    /// Why the list of a GPU whose model has no table gives no geometry.
    pub fn list_fault(&self, gpu: &DeviceId) -> Option<&ListFault> {
        let (_, geometry) = self.listed.iter().find(|(id, _)| id == gpu)?;
        geometry.as_ref().err()
    }

    /// The class of a device of this inventory, or of an instance that can be made on a GPU of it.
    pub fn class_of(&self, device: &Device, rule: PoolRule) -> DeviceClass {
        let class = DeviceClass::of(device, rule);
        let part = match (&device.kind, &class.kind) {
            (DeviceKind::MigInstance { parent, profile }, ClassKind::MigInstance(_)) => {
                let geometry = self.listed_for(parent);
                geometry.and_then(|geometry| Some(geometry.part_of(geometry.profile(profile)?)))
            }
            _ => None,
        };
        DeviceClass { part, ..class }
    }

    /// Where an instance lies, and whether an agent of gpupack made it.
    pub fn instance(&self, id: &DeviceId) -> Option<(Slot, bool)> {
        let found = self.instances.iter().find(|(of, ..)| of == id);
        found.map(|(_, slot, is_made)| (*slot, *is_made))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::device::DeviceIndex;

    #[test]
    fn a_slot_covers_its_units() {
        for (start, size, bits) in
            [(0, 1, 0b1), (4, 2, 0b11_0000), (0, 8, 0xff), (0, 32, u32::MAX), (31, 8, 1 << 31)]
        {
            assert_eq!(Slot { start, size }.units(), bits, "{start} {size}");
        }
        assert_eq!(
            (Slot { start: 40, size: 1 }.units(), Slot { start: 0, size: 0 }.units()),
            (0, 0)
        );
    }

    #[test]
    fn equal_lists_have_one_geometry_and_a_node_has_few_lists() {
        let gpu = |number: u32| Device {
            id: DeviceId::new(&format!("GPU-{number:02}")).unwrap(),
            index: DeviceIndex(number),
            model: ModelName::new("NVIDIA B300"),
            total: MemMib::new(100_000),
            reserved: MemMib::ZERO,
            kind: DeviceKind::MigParent,
            health: Health::Healthy,
        };
        let devices: Vec<Device> = (0..20).map(gpu).collect();
        let details = devices.iter().map(|device| {
            let row = MakeableProfile {
                profile: MigProfile::new("1g.90gb"),
                memory: MemMib::new(90_000),
                sm_count: Some(100 + device.index.0 / 2),
                size: 1,
                starts: vec![0],
            };
            let own = DeviceDetails { mig_profiles: vec![row], ..DeviceDetails::default() };
            (device.id.clone(), own)
        });
        let mig = MigInventory::of(&devices, &details.collect());
        for (at, gpu) in devices.iter().enumerate() {
            let own = mig.geometry_of(gpu);
            assert_eq!(own.is_some(), at / 2 < MOST_LISTS, "{at}");
            let fault = own.is_none().then_some(&ListFault::Lists);
            assert_eq!(mig.list_fault(&gpu.id), fault, "{at}");
            let twin = mig.geometry_of(&devices[at ^ 1]);
            assert!(own.zip(twin).is_none_or(|(own, twin)| Arc::ptr_eq(&own, &twin)), "{at}");
        }
        let known =
            Device { model: ModelName::new("NVIDIA A30"), total: MemMib::new(24_576), ..gpu(0) };
        assert!(!mig.geometry_of(&known).unwrap().is_listed(), "the table comes first");
    }

    #[test]
    fn what_can_be_made_has_ids_of_its_own() {
        let gpu = Device {
            id: DeviceId::new("GPU-a").unwrap(),
            index: DeviceIndex(3),
            model: ModelName::new("NVIDIA A30"),
            total: MemMib::new(24_576),
            reserved: MemMib::ZERO,
            kind: DeviceKind::MigParent,
            health: Health::Healthy,
        };
        let row = |name: &str, size, starts: &[u32]| MakeableProfile {
            profile: MigProfile::new(name),
            memory: MemMib::new(5_952),
            sm_count: None,
            size,
            starts: starts.to_vec(),
        };
        let rows = [row("1g.6gb+me", 1, &[0, 3]), row("2g.12gb", 2, &[2])];
        let all: Vec<Makeable> = makeable(&gpu, &rows).collect();
        let ids: Vec<&str> = all.iter().map(|makeable| makeable.device.id.as_str()).collect();
        assert_eq!(ids, ["GPU-a/0/1g-6gb-me", "GPU-a/3/1g-6gb-me", "GPU-a/2/2g-12gb"]);
        assert_eq!(all[1].slot, Slot { start: 3, size: 1 });
        assert_eq!((rows[0].profile.has_media(), rows[1].profile.has_media()), (true, false));
    }
}
