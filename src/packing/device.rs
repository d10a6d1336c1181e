//! What a node owns: devices, their capacity and health, as its agent reports them.
//!
//! A device is whatever a pod can be placed on: a GPU, or one MIG instance of a GPU. A GPU in MIG
//! mode is in the inventory too, but holds nobody itself: its instances do.

use std::fmt;
use std::sync::Arc;

pub use super::inventory::{InventoryError, NodeInventory};
use super::pool::{InstanceUse, PoolRule, Replicas};
use super::request::Demand;
use super::units::{MemMib, Share};

/// Most devices one node may report: 16 GPUs of 7 MIG instances and their parents fit twice over.
pub const MAX_DEVICES_PER_NODE: usize = 256;

/// Largest memory of one device that is believed: 16 TiB, about 50 times the largest GPU of 2026.
pub const MAX_DEVICE_MEMORY: MemMib = MemMib::new(16 << 20);

/// Declares a cheap, ordered name type: a shared string that is only compared and printed.
macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Wraps the name as it is; nothing is checked here.
            pub fn new(name: impl Into<Arc<str>>) -> Self {
                Self(name.into())
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

name_type! {
    /// Name of a node, as Kubernetes spells it.
    NodeName
}
name_type! {
    /// Value of the configured pool label of a node; empty where the node has none.
    PoolName
}
name_type! {
    /// Product name of a GPU as NVML reports it, for instance `NVIDIA A100-SXM4-80GB`.
    ModelName
}
name_type! {
    /// UID of a pod, as the API server gave it.
    PodUid
}
name_type! {
    /// Name of a MIG profile without the prefix, for instance `3g.40gb`.
    MigProfile
}

/// UUID of a device as NVML reports it (`GPU-…` or `MIG-…`).
///
/// Only ASCII letters, digits, `-` and `/` (old MIG form), at most 96 characters: it becomes part of
/// an annotation value and of a CDI device name, where a comma or a space would change the meaning.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(Arc<str>);

impl DeviceId {
    /// Checks and wraps a UUID.
    ///
    /// # Errors
    /// [`InventoryError::DeviceId`] when it is empty, too long or has other characters.
    pub fn new(id: &str) -> Result<Self, InventoryError> {
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'/';
        if id.is_empty() || id.len() > 96 || !id.bytes().all(legal) {
            let shown: String = id.chars().take(96).collect();
            return Err(InventoryError::DeviceId { id: shown });
        }
        Ok(Self(id.into()))
    }

    /// The UUID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl MigProfile {
    /// Whether a request for `self` means this profile. Resource names have no `+`, so that NVIDIA's
    /// device plugin writes `1g.10gb.me` for `1g.10gb+me`.
    pub fn means(&self, profile: &Self) -> bool {
        self == profile || *self.0 == profile.0.replace('+', ".")
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// NVML index of a GPU within its node. It may change at a reboot; the UUID does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceIndex(pub u32);

/// What kind of device this is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceKind {
    /// A GPU that can be shared or given away whole.
    Gpu,
    /// A GPU in MIG mode: its instances hold tenants, it does not.
    MigParent,
    /// One MIG instance: hardware-isolated, with memory of its own.
    MigInstance {
        /// UUID of the GPU it is cut from.
        parent: DeviceId,
        /// Its profile, for instance `3g.40gb`.
        profile: MigProfile,
    },
}

/// Whether a device may take new tenants, as far as its node is concerned; what is worse comes later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// Works.
    #[default]
    Healthy,
    /// Kubelet hands it out by itself, to whom it likes: keeps its tenants and takes no new one.
    KubeletOwned,
    /// Lost, needs a reset, or cannot be read: keeps its tenants and takes no new one.
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
    /// Memory on the board (or of the instance), before the driver's reserve.
    pub total: MemMib,
    /// Memory that the driver keeps; never placed on.
    pub reserved: MemMib,
    /// GPU, MIG parent or MIG instance.
    pub kind: DeviceKind,
    /// Whether it may take new tenants.
    pub health: Health,
}

impl Device {
    /// Schedulable memory: NVML total minus reserved. [`NodeInventory::new`] refuses a device whose
    /// reserve exceeds its total, so this is zero only for a device that has none.
    pub fn capacity(&self) -> MemMib {
        self.total.checked_sub(self.reserved).unwrap_or(MemMib::ZERO)
    }
}

/// What a request sees of a device: two devices of one class take the same demand.
///
/// Clusters have few classes, so what a request means is worked out per class, not per device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceClass {
    /// Product name.
    pub model: ModelName,
    /// Schedulable memory.
    pub capacity: MemMib,
    /// GPU, MIG parent or MIG instance.
    pub kind: ClassKind,
    /// Into how many slots it is cut; none where any part may be taken.
    pub replicas: Option<Replicas>,
}

impl DeviceClass {
    /// The class of a device in a pool with this rule.
    pub fn of(device: &Device, rule: PoolRule) -> Self {
        let kind = match (&device.kind, rule.instances) {
            (DeviceKind::Gpu, _) => ClassKind::Gpu,
            (DeviceKind::MigParent, _) => ClassKind::MigParent,
            (DeviceKind::MigInstance { profile, .. }, InstanceUse::Whole) => {
                ClassKind::MigInstance(profile.clone())
            }
            (DeviceKind::MigInstance { profile, .. }, InstanceUse::Shared) => {
                ClassKind::SharedInstance(profile.clone())
            }
        };
        let replicas = match kind {
            ClassKind::Gpu | ClassKind::SharedInstance(_) => rule.replicas,
            ClassKind::MigParent | ClassKind::MigInstance(_) => None,
        };
        Self { model: device.model.clone(), capacity: device.capacity(), kind, replicas }
    }

    /// Whether such a device may have several tenants.
    pub fn is_shareable(&self) -> bool {
        match self.kind {
            ClassKind::Gpu | ClassKind::SharedInstance(_) => true,
            ClassKind::MigParent | ClassKind::MigInstance(_) => false,
        }
    }

    /// All of such a device.
    pub fn whole(&self) -> Demand {
        Demand { memory: self.capacity, share: Share::WHOLE }
    }

    /// Product name as NVML spells it: that of an instance ends in `MIG` and its profile.
    pub fn product(&self) -> ModelName {
        match &self.kind {
            ClassKind::Gpu | ClassKind::MigParent => self.model.clone(),
            ClassKind::MigInstance(profile) | ClassKind::SharedInstance(profile) => {
                ModelName::new(format!("{} MIG {profile}", self.model))
            }
        }
    }
}

/// [`DeviceKind`] without the identity of the parent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClassKind {
    /// A GPU that can be shared or given away whole.
    Gpu,
    /// A GPU in MIG mode.
    MigParent,
    /// A MIG instance of this profile that has one tenant.
    MigInstance(MigProfile),
    /// A MIG instance of this profile that is shared.
    SharedInstance(MigProfile),
}

/// Position of a class in [`DeviceClasses`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(usize);

impl ClassId {
    /// The position.
    pub fn position(self) -> usize {
        self.0
    }
}

/// All classes seen so far; classes are only ever added, so an id stays valid.
#[derive(Clone, Debug, Default)]
pub struct DeviceClasses {
    classes: Vec<DeviceClass>,
}

impl DeviceClasses {
    /// The id of a class, added when it is new. Linear in the number of classes.
    pub fn id_of(&mut self, class: DeviceClass) -> ClassId {
        let known = self.classes.iter().position(|known| *known == class);
        ClassId(known.unwrap_or_else(|| {
            self.classes.push(class);
            self.classes.len() - 1
        }))
    }

    /// One value per class, in the order of their ids.
    pub fn map<T>(&self, value: impl FnMut(&DeviceClass) -> T) -> PerClass<T> {
        PerClass(self.classes.iter().map(value).collect())
    }

    /// How many classes are known.
    pub fn count(&self) -> usize {
        self.classes.len()
    }
}

/// One value for each class that was known when this was made.
#[derive(Clone, Debug)]
pub struct PerClass<T>(Vec<T>);

impl<T> PerClass<T> {
    /// The value for a class.
    ///
    /// # Panics
    /// When the class was added later: the ledger makes such tables anew whenever a class is added.
    pub fn of(&self, class: ClassId) -> &T {
        self.0.get(class.0).expect("tables are made anew whenever a device class is added")
    }
}

#[cfg(test)]
mod tests;
