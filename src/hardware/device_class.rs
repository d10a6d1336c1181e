//! Classes of devices: what a request sees of a device.

use crate::hardware::device::{Device, DeviceKind, MigProfile, ModelName};
use crate::hardware::pool::{InstanceUse, PoolRule, Replicas};
use crate::hardware::units::{Demand, MemMib, Share};

/// What a request sees of a device: two devices of one class take the same demand.
///
/// Clusters have few classes, so a request is compiled per class, not per device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceClass {
    /// Product name.
    pub model: ModelName,
    /// Schedulable memory.
    pub capacity: MemMib,
    /// GPU, MIG parent or MIG instance.
    pub kind: ClassKind,
    /// The number of slots; `None` if any part may be allocated.
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

    /// Product name in NVML's form: that of an instance ends in `MIG` and its profile.
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
    /// A GPU that can be shared or allocated whole.
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

/// All classes seen so far. Classes are only added, so an id stays valid.
#[derive(Clone, Debug, Default)]
pub struct DeviceClasses {
    classes: Vec<DeviceClass>,
}

impl DeviceClasses {
    /// The id of a class, added if it is new. Linear in the number of classes.
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

/// One value for each class that existed when this was made.
#[derive(Clone, Debug)]
pub struct PerClass<T>(Vec<T>);

impl<T> PerClass<T> {
    /// The value for a class.
    ///
    /// # Panics
    /// If the class was added later: the ledger makes such tables again whenever a class is added.
    pub fn of(&self, class: ClassId) -> &T {
        self.0.get(class.0).expect("tables are made again whenever a device class is added")
    }
}
