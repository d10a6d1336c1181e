//! Classes of devices: what a request sees of a device.

use std::collections::BTreeSet;

use crate::hardware::pool::{InstanceUse, PoolRule, Replicas};
use wire::device::{Device, DeviceKind};
use wire::ids::{MigProfile, ModelName};
use wire::units::{Demand, MemMib, Share};

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
    /// Which part of its GPU a MIG instance is, by the list of NVML. `None` for other devices, and for models that
    /// have a table.
    pub part: Option<GpuPart>,
}

/// Which part of its GPU a MIG instance is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuPart {
    /// Its part of the slices, rounded down.
    pub slices: Share,
    /// What it has of both slices and units, rounded down: a quarter for `2g.20gb` of eight units.
    pub slices_and_units: Share,
    /// Memory of the instance that is the whole GPU.
    pub usable: MemMib,
}

impl DeviceClass {
    /// The class of a device in a pool with this rule, as far as its node's list of MIG profiles does not matter.
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
        let (model, capacity) = (device.model.clone(), device.capacity());
        Self { model, capacity, kind, replicas, part: None }
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

/// Names a class of [`DeviceClasses`]. No two classes ever have the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId {
    position: u32,
    /// How many classes were added before.
    added: u32,
}

impl ClassId {
    /// The position in tables. Another class may get it once no device is of this one any more.
    pub fn position(self) -> usize {
        usize::try_from(self.position).expect("a position in memory")
    }

    /// Whether the class was among the first `count` that were added.
    pub fn is_of_first(self, count: usize) -> bool {
        usize::try_from(self.added).is_ok_and(|added| added < count)
    }
}

/// The classes of all devices. A class that no device has any more leaves its position to another
/// one, so that devices which come and go do not fill the memory.
#[derive(Clone, Debug, Default)]
pub struct DeviceClasses {
    /// By position; `None` where no class is.
    classes: Vec<Option<(DeviceClass, ClassId)>>,
    added: u32,
}

/// Stands for a position without a class: no request fits there.
fn no_class() -> DeviceClass {
    DeviceClass {
        model: ModelName::new(""),
        capacity: MemMib::ZERO,
        kind: ClassKind::MigParent,
        replicas: None,
        part: None,
    }
}

impl DeviceClasses {
    /// The id of a class that is known. Linear in the number of classes.
    pub fn known(&self, class: &DeviceClass) -> Option<ClassId> {
        let mut known = self.classes.iter().flatten();
        known.find(|(known, _)| known == class).map(|(_, id)| *id)
    }

    /// The id of a class, added if it is new. Linear in the number of classes.
    pub fn id_of(&mut self, class: DeviceClass) -> ClassId {
        if let Some(id) = self.known(&class) {
            return id;
        }
        let vacant = self.classes.iter().position(Option::is_none);
        let position = vacant.unwrap_or(self.classes.len());
        let id = ClassId {
            position: u32::try_from(position).expect("few classes at a time"),
            added: self.added,
        };
        self.added = self.added.checked_add(1).expect("the caller asks for room first");
        if position == self.classes.len() {
            self.classes.push(None);
        }
        self.classes[position] = Some((class, id));
        id
    }

    /// Whether `more` new classes can have a name of their own.
    pub fn can_name(&self, more: usize) -> bool {
        u32::try_from(more).is_ok_and(|more| self.added.checked_add(more).is_some())
    }

    /// Forgets all classes but these.
    pub fn keep_only(&mut self, used: &BTreeSet<ClassId>) {
        for class in &mut self.classes {
            class.take_if(|(_, id)| !used.contains(id));
        }
    }

    /// One value per position; a position without a class counts as a class that takes nothing.
    pub fn map<T>(&self, value: impl FnMut(&DeviceClass) -> T) -> PerClass<T> {
        let none = no_class();
        let known = self.classes.iter().map(|known| known.as_ref());
        let classes = known.map(|known| known.map_or(&none, |(class, _)| class));
        PerClass(classes.map(value).collect())
    }

    /// How many classes were ever added: it grows with each new one.
    pub fn count(&self) -> usize {
        usize::try_from(self.added).expect("classes in memory")
    }

    /// How many are kept now.
    pub fn kept(&self) -> usize {
        self.classes.iter().flatten().count()
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
        self.0
            .get(class.position())
            .expect("tables are made again whenever a device class is added")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_without_devices_leaves_its_position_and_not_its_name() {
        let class = |model: &str| DeviceClass { model: ModelName::new(model), ..no_class() };
        let mut classes = DeviceClasses::default();
        let [a, b] = ["A", "B"].map(|model| classes.id_of(class(model)));
        assert_eq!((a, classes.count(), classes.kept()), (classes.id_of(class("A")), 2, 2));
        classes.keep_only(&BTreeSet::from([b]));
        assert_eq!((classes.known(&class("A")), classes.kept()), (None, 1));
        let of =
            |classes: &DeviceClasses, id| classes.map(|class| class.model.clone()).of(id).clone();
        assert_eq!(of(&classes, a).as_str(), "", "a copy of a node that is older");
        let c = classes.id_of(class("C"));
        assert_eq!((c.position(), c == a, c.is_of_first(2)), (a.position(), false, false));
        assert_eq!((of(&classes, c), of(&classes, b)), (class("C").model, class("B").model));
        let again = classes.id_of(class("A"));
        assert_eq!((again.position(), again.is_of_first(3), classes.count()), (2, false, 4));
    }
}
