//! What a node has: devices, their capacity and health, as its agent reports them.
//!
//! A device is a GPU or a MIG instance of one. A GPU in MIG mode is in the inventory too, but has
//! no tenants itself: its instances have.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::api::condition::AddressingMode;
use crate::ids::{
    DeviceId, MAX_CLASSES_PER_NODE, MAX_DEVICE_MEMORY, MAX_DEVICES_PER_NODE, MAX_MIG_PLACES,
    MigProfile, ModelName, NotAUuid, PoolName,
};
use crate::units::MemMib;

/// NVML index of a GPU within its node. It may change at a reboot; the UUID does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceIndex(pub u32);

/// What kind of device this is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceKind {
    /// A GPU that can be shared or allocated whole.
    Gpu,
    /// A GPU in MIG mode: its instances have tenants, it has none.
    MigParent,
    /// One MIG instance: isolated by hardware, with memory of its own.
    MigInstance {
        /// UUID of its GPU.
        parent: DeviceId,
        /// Its profile, for instance `3g.40gb`.
        profile: MigProfile,
    },
}

/// Whether a device may take new tenants, as far as its node reports. In order of severity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// Works.
    #[default]
    Healthy,
    /// Kubelet allocates it through a device plugin: it keeps its tenants and takes no new one.
    KubeletOwned,
    /// Lost, needs a reset, or cannot be read: it keeps its tenants and takes no new one.
    Unhealthy,
}

/// One device of a node as its agent reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// UUID; unique in the whole cluster.
    pub id: DeviceId,
    /// NVML index (of the parent, for a MIG instance).
    pub index: DeviceIndex,
    /// Product name.
    pub model: ModelName,
    /// Memory of the board (or of the instance), with the driver's reserve.
    pub total: MemMib,
    /// Memory that the driver keeps; never allocated.
    pub reserved: MemMib,
    /// GPU, MIG parent or MIG instance.
    pub kind: DeviceKind,
    /// Whether it may take new tenants.
    pub health: Health,
}

impl Device {
    /// What can be allocated: NVML's total minus reserved. `NodeInventory::new` refuses a reserve
    /// above the total, so this is zero only for a device that has no memory to give.
    pub fn capacity(&self) -> MemMib {
        self.total.checked_sub(self.reserved).unwrap_or(MemMib::ZERO)
    }
}

/// Why an inventory is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InventoryError {
    /// A text that is no UUID.
    #[error(transparent)]
    DeviceId(#[from] NotAUuid),
    /// More devices than a node may report.
    #[error("`{count}` devices are reported, at most {MAX_DEVICES_PER_NODE} are allowed")]
    TooManyDevices {
        /// How many were reported.
        count: usize,
    },
    /// More kinds of devices than [`MAX_CLASSES_PER_NODE`].
    #[error(
        "devices of `{count}` kinds (by model, memory and MIG profile) are reported, at most \
         {MAX_CLASSES_PER_NODE} are allowed"
    )]
    TooManyClasses {
        /// How many were reported.
        count: usize,
    },
    /// More places for MIG instances than [`MAX_MIG_PLACES`].
    #[error(
        "`{count}` places for MIG instances are reported, at most {MAX_MIG_PLACES} are allowed"
    )]
    TooManyPlaces {
        /// How many were reported.
        count: usize,
    },
    /// More memory than [`MAX_DEVICE_MEMORY`].
    #[error("device `{id}` reports `{total}`, at most {MAX_DEVICE_MEMORY} are allowed")]
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
    /// A MIG instance of a device that is not in MIG mode.
    #[error("instance `{id}` names the device `{parent}`, which is not a GPU in MIG mode")]
    NoParent {
        /// The instance.
        id: DeviceId,
        /// The device.
        parent: DeviceId,
    },
    /// MIG instances with more memory than their GPU has.
    #[error(
        "with instance `{id}`, the instances of GPU `{parent}` have more memory than its {total}"
    )]
    InstanceMemory {
        /// The instance.
        id: DeviceId,
        /// The GPU.
        parent: DeviceId,
        /// Its memory.
        total: MemMib,
    },
}

/// GPU models that a pod accepts; empty means any.
///
/// A name matches if its words appear in the product name as whole words, next to each other and in
/// the same order, ignoring case. Words are runs of letters and digits: `A100` matches
/// `NVIDIA A100-SXM4-80GB`, `A10` does not.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelFilter {
    names: Vec<Arc<str>>,
}

impl ModelFilter {
    /// Accepts the models that one of `names` matches; without names, any model.
    pub fn new(names: impl IntoIterator<Item = impl Into<Arc<str>>>) -> Self {
        let mut names: Vec<Arc<str>> = names.into_iter().map(Into::into).collect();
        names.sort();
        names.dedup();
        Self { names }
    }

    /// Whether a text can be one of its names: letters, digits, blanks and `- . / ( ) + _`, which
    /// product names and MIG profiles consist of, with a letter or digit first, and one or `)` last.
    /// Any other character would mean nothing, so `!H100` would accept the H100.
    pub fn is_name(text: &str) -> bool {
        let bytes = text.as_bytes();
        bytes.first().is_some_and(u8::is_ascii_alphanumeric)
            && bytes.last().is_some_and(|last| last.is_ascii_alphanumeric() || *last == b')')
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b" -./()+_".contains(byte))
    }

    /// Whether this accepts every model.
    pub fn is_any(&self) -> bool {
        self.names.is_empty()
    }

    /// The accepted names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|name| &**name)
    }

    /// Whether `model` is accepted.
    pub fn matches(&self, model: &ModelName) -> bool {
        self.is_any() || {
            let product = words(model.as_str());
            self.names.iter().any(|name| {
                let wanted = words(name);
                !wanted.is_empty() && product.windows(wanted.len()).any(|run| run == wanted)
            })
        }
    }
}

/// Pools whose nodes a pod may use; by default all.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolFilter(Option<Arc<BTreeSet<PoolName>>>);

impl PoolFilter {
    /// Accepts these pools alone.
    pub fn only(pools: BTreeSet<PoolName>) -> Self {
        Self(Some(Arc::new(pools)))
    }

    /// Whether nodes of this pool are accepted.
    pub fn accepts(&self, pool: &PoolName) -> bool {
        self.0.as_ref().is_none_or(|pools| pools.contains(pool))
    }
}

pub fn words(text: &str) -> Vec<String> {
    text.split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_ascii_lowercase)
        .collect()
}

/// Where a device is in its host. `None` if the driver cannot say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceDetails {
    /// Minor number of its device file, `/dev/nvidia<minor>`.
    pub minor: Option<u32>,
    /// Its NUMA node.
    pub numa_node: Option<u32>,
    /// GPUs of the same node with an NVLink to it, by UUID, with the number of active links.
    pub neighbors: Vec<(DeviceId, u32)>,
    /// The part of its GPU that a MIG instance covers.
    pub slot: Option<Slot>,
    /// Streaming multiprocessors of a MIG instance.
    pub sm_count: Option<u32>,
    /// Streaming multiprocessors that the instances of a GPU in MIG mode share, as the driver lists them.
    pub multiprocessors: Option<u32>,
    /// How it addresses the memory of its host.
    pub addressing_mode: Option<AddressingMode>,
    /// Whether its size is that of the configuration: it has no memory of its own.
    pub is_size_configured: bool,
    /// Whether the driver can limit the memory of containers on it.
    pub can_limit_memory: bool,
    /// MIG instances that the node's agent can make on it; empty unless it is a GPU in MIG mode, and the agent
    /// may make any. Each profile once, in the agent's order.
    pub mig_profiles: Vec<MakeableProfile>,
    /// Whether an agent of gpupack made this MIG instance since the last boot.
    pub made_here: bool,
}

/// A profile of MIG instances that the agent of a node can make on a GPU, as NVML reports it. It
/// wins over what gpupack knows of the model, also for instances that are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MakeableProfile {
    /// Its name, for instance `1g.10gb` or `1g.10gb+me`.
    pub profile: MigProfile,
    /// Memory of an instance.
    pub memory: MemMib,
    /// Streaming multiprocessors of an instance; `None` if the driver does not report them.
    pub sm_count: Option<u32>,
    /// How many units it covers, at least 1; start and size together are at most 32.
    pub size: u32,
    /// Units at which it may begin, in rising order; at least one.
    pub starts: Vec<u32>,
}

impl MakeableProfile {
    /// Whether this is the profile of an instance that covers these units.
    pub fn is_at(&self, profile: &MigProfile, slot: Slot) -> bool {
        self.profile == *profile && self.size == slot.size && self.starts.contains(&slot.start)
    }
}

/// An order to make or to remove a MIG instance that the agent of a node could not carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedMigOrder {
    /// The GPU.
    pub gpu: DeviceId,
    /// Profile of the instance.
    pub profile: MigProfile,
    /// First unit of the instance.
    pub start: u32,
    /// The instance, if the order was to remove it.
    pub removed: Option<DeviceId>,
    /// What was in the way: one sentence, of 512 bytes at most and without control characters.
    pub error: String,
    /// The units of a GPU instance that was in the way, and that no inventory lists.
    pub hidden: Option<Slot>,
}

/// Most units of a GPU; in 2026 there are 12 at most.
pub const MAX_UNITS: u32 = 32;

/// The part of a GPU that a MIG instance covers, in units: 4 on an A30, 8 on an A100 or H100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The first unit.
    pub start: u32,
    /// How many units, at least 1.
    pub size: u32,
}

impl Slot {
    /// Its units, one bit each, without those above [`MAX_UNITS`].
    pub fn units(self) -> u32 {
        let all = u64::from(u32::MAX) >> (MAX_UNITS - self.size.min(MAX_UNITS));
        let all = all << self.start.min(MAX_UNITS) & u64::from(u32::MAX);
        u32::try_from(all).expect("the lower half of 64 bits")
    }
}
