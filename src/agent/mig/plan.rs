//! What to do about the MIG instances of a node: orders and present state in, calls out. Pure.
//!
//! Instances are removed first, then the state is read again, and then they are made. Nothing is
//! done twice: what is there already needs no call. An instance that is not ordered to go stays,
//! except one without a compute instance that the agent began itself.

use std::collections::{BTreeMap, BTreeSet};

use wire::api::state::MigPlacement;
use wire::report::bodies::{MakeInstance, MigFailure, MigOrders, MigProfileReport};

/// A GPU and its MIG instances, as NVML shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuLayout {
    pub uuid: String,
    /// Whether it is in MIG mode.
    pub is_in_mig_mode: bool,
    /// What can be made on it.
    pub profiles: Vec<NumberedProfile>,
    pub instances: Vec<GpuInstance>,
}

/// A profile with the driver's number for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberedProfile {
    /// The number that other calls take.
    pub id: u32,
    /// Most instances of it on one GPU.
    pub most: u32,
    /// What is reported of it.
    pub report: MigProfileReport,
}

/// The GPUs of a node at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layouts {
    pub gpus: Vec<GpuLayout>,
    /// UUIDs of the others, each with its error.
    pub unread: BTreeMap<String, String>,
    /// Instances begun here that no container could use yet; in `gpus` they have no devices.
    pub nodeless: Vec<Nodeless>,
}

impl Layouts {
    /// UUIDs of the MIG devices on an instance, also if it has no device nodes.
    fn devices_on(&self, gpu: &GpuLayout, instance: &GpuInstance) -> Vec<String> {
        let mut all = self.nodeless.iter();
        let nodeless = all.find(|it| it.gpu == gpu.uuid && it.slot == instance.slot);
        nodeless.map_or(&instance.devices, |it| &it.devices).clone()
    }

    /// What keeps the instance at this place from being ready, if it is one without device nodes.
    pub fn nodeless_at(&self, place: &Unfinished) -> Option<Obstacle> {
        let mut all = self.nodeless.iter();
        let found = all.find(|it| it.gpu == place.gpu && it.slot == place.slot)?;
        Some(Obstacle { error: found.error.clone(), hidden: Some(found.slot) })
    }
}

/// A GPU instance whose device nodes are not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodeless {
    pub gpu: String,
    /// The units that it covers.
    pub slot: Units,
    /// UUIDs of the MIG devices that are on it all the same.
    pub devices: Vec<String>,
    /// Why they are not: one sentence.
    pub error: String,
}

/// A GPU instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInstance {
    /// The driver's number for it.
    pub id: u32,
    pub profile: u32,
    /// The units that it covers.
    pub slot: Units,
    /// UUIDs of the MIG devices on it: one for each compute instance.
    pub devices: Vec<String>,
}

/// A run of units on a GPU.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct Units {
    /// The first one.
    pub start: u32,
    /// How many, at least 1.
    pub size: u32,
}

impl Units {
    /// The unit after the last one.
    fn end(self) -> u32 {
        self.start.saturating_add(self.size)
    }

    fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }
}

/// An instance that the agent has begun to make or to remove: a crash may have left a part of it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Unfinished {
    pub gpu: String,
    pub profile: u32,
    /// The units that it covers.
    pub slot: Units,
    /// Whether it is being made, not removed.
    pub is_new: bool,
}

impl Unfinished {
    /// Whether this GPU instance is it.
    pub fn is(&self, gpu: &GpuLayout, instance: &GpuInstance) -> bool {
        self.gpu == gpu.uuid && self.profile == instance.profile && self.slot == instance.slot
    }
}

/// One change of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigStep {
    /// The order that it carries out, as it is reported if it fails.
    pub order: MigOrder,
    pub work: Work,
    pub begun: Unfinished,
    /// UUIDs of the MIG devices on its GPU instance, as this was seen. The driver gives its number to another
    /// instance as soon as it is gone.
    pub devices: Vec<String>,
}

impl MigStep {
    /// What is in the way of it, by the driver's word.
    pub fn refused(&self, error: String) -> Obstacle {
        let is_left = self.order.wish == Wish::Cleared;
        Obstacle { error, hidden: is_left.then_some(self.begun.slot) }
    }
}

/// The work of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Remove the GPU instance of this number, with its compute instances.
    Remove(u32),
    /// Make a GPU instance and a compute instance that spans it.
    Make,
    /// Make the compute instance that the GPU instance of this number lacks.
    Complete(u32),
}

/// An order, for its failures and its pauses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MigOrder {
    pub place: MakeInstance,
    /// What is to become of it.
    pub wish: Wish,
}

/// What is to become of an instance.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wish {
    /// It is to be there.
    There,
    /// The instance of this UUID is to go.
    Gone(String),
    /// What is left of it is to go. That is no order: its failure says only that the units are taken, which no
    /// inventory shows.
    Cleared,
}

impl MigOrder {
    /// The order to make an instance.
    pub fn to_make(place: MakeInstance) -> Self {
        Self { place, wish: Wish::There }
    }

    /// The report that it could not be carried out.
    pub fn failed(&self, error: String, hidden: Option<Units>) -> Option<MigFailure> {
        let instance = match &self.wish {
            Wish::There => None,
            Wish::Gone(uuid) => Some(uuid.clone()),
            Wish::Cleared if hidden.is_none() => return None,
            Wish::Cleared => None,
        };
        let MakeInstance { gpu, profile, start } = self.place.clone();
        let hidden = hidden.map(|Units { start, size }| MigPlacement { start, size });
        Some(MigFailure { gpu, profile, start, instance, error, hidden })
    }
}

/// What is in the way of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    pub error: String,
    /// The units of a GPU instance that no inventory lists: it has no compute instance.
    pub hidden: Option<Units>,
}

impl<T: Into<String>> From<T> for Obstacle {
    fn from(error: T) -> Self {
        Self { error: error.into(), hidden: None }
    }
}

/// Steps, and orders that cannot be carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigPlan {
    /// What to do, in this order.
    pub steps: Vec<MigStep>,
    /// What is in the way of the other orders.
    pub failures: Vec<(MigOrder, Obstacle)>,
}

impl MigPlan {
    /// All orders that it is about.
    pub fn orders(&self) -> impl Iterator<Item = MigOrder> {
        let steps = self.steps.iter().map(|step| step.order.clone());
        steps.chain(self.failures.iter().map(|(order, _)| order.clone()))
    }
}

impl GpuLayout {
    /// The place of an instance in the words of an order.
    fn place(&self, instance: &GpuInstance) -> MakeInstance {
        let named = self.profiles.iter().find(|profile| profile.id == instance.profile);
        let profile = named.map_or_else(
            || format!("profile {}", instance.profile),
            |profile| profile.report.profile.clone(),
        );
        MakeInstance { gpu: self.uuid.clone(), profile, start: instance.slot.start }
    }

    /// An instance that is to go.
    pub(crate) fn begun(&self, instance: &GpuInstance) -> Unfinished {
        let (gpu, is_new) = (self.uuid.clone(), false);
        Unfinished { gpu, profile: instance.profile, slot: instance.slot, is_new }
    }
}

/// What to remove: the instances that are ordered to go, unless they are also ordered to be there,
/// and what is left of an instance that the agent began and that is not ordered. An instance that
/// is not there is gone already.
pub fn removals(orders: &MigOrders, layouts: &Layouts, unfinished: &[Unfinished]) -> MigPlan {
    let wanted: BTreeSet<&MakeInstance> = orders.make.iter().collect();
    let goes: BTreeSet<&String> = orders.remove.iter().collect();
    let mut plan = MigPlan::default();
    for (gpu, instance) in
        layouts.gpus.iter().flat_map(|gpu| gpu.instances.iter().map(move |own| (gpu, own)))
    {
        let place = gpu.place(instance);
        if wanted.contains(&place) {
            continue;
        }
        let ordered = instance.devices.iter().filter(|uuid| goes.contains(uuid)).count();
        let started = unfinished.iter().find(|started| started.is(gpu, instance));
        let left = started.filter(|_| instance.devices.is_empty());
        if ordered == 0 && left.is_none() {
            continue;
        }
        let uuid = instance.devices.iter().find(|uuid| goes.contains(uuid));
        let wish = uuid.map_or(Wish::Cleared, |uuid| Wish::Gone(uuid.clone()));
        let order = MigOrder { place, wish };
        if ordered < instance.devices.len() {
            let error = "its GPU instance has other compute instances, which are not to go";
            plan.failures.push((order, error.into()));
            continue;
        }
        // What was never ready stays so: if it cannot be removed, it is still not given to pods.
        let begun = left.cloned().unwrap_or_else(|| gpu.begun(instance));
        let (work, devices) = (Work::Remove(instance.id), layouts.devices_on(gpu, instance));
        plan.steps.push(MigStep { order, work, begun, devices });
    }
    plan
}

/// What to make of what is ordered and not there.
pub fn makes(orders: &MigOrders, layouts: &Layouts, unfinished: &[Unfinished]) -> MigPlan {
    let wanted: BTreeSet<&MakeInstance> = orders.make.iter().collect();
    let mut plan = MigPlan::default();
    for place in wanted {
        let order = MigOrder::to_make(place.clone());
        match make(place, layouts, unfinished) {
            Ok(Some((work, begun))) => {
                plan.steps.push(MigStep { order, work, begun, devices: Vec::new() });
            }
            Ok(None) => {}
            Err(error) => plan.failures.push((order, error)),
        }
    }
    plan
}

/// The work for one order; `None` if the instance is there.
fn make(
    place: &MakeInstance,
    layouts: &Layouts,
    unfinished: &[Unfinished],
) -> Result<Option<(Work, Unfinished)>, Obstacle> {
    let gpu = layouts.gpus.iter().find(|gpu| gpu.uuid == place.gpu);
    let gpu = gpu.ok_or_else(|| {
        let error = layouts.unread.get(&place.gpu).cloned();
        error.unwrap_or_else(|| "the node has no such GPU, or it does not answer".to_owned())
    })?;
    if !gpu.is_in_mig_mode {
        return Err("the GPU is not in MIG mode".into());
    }
    let known = gpu.profiles.iter().find(|profile| profile.report.profile == place.profile);
    let known = known.ok_or("the driver has no such profile for this GPU")?;
    if !known.report.starts.contains(&place.start) {
        let error = format!("an instance of this profile cannot begin at unit {}", place.start);
        return Err(error.into());
    }
    let slot = Units { start: place.start, size: known.report.size };
    let begun = Unfinished { gpu: gpu.uuid.clone(), profile: known.id, slot, is_new: true };
    let Some(there) = gpu.instances.iter().find(|instance| instance.slot.overlaps(slot)) else {
        return Ok(Some((Work::Make, begun)));
    };
    let is_it = begun.is(gpu, there);
    if let Some(obstacle) = layouts.nodeless_at(&Unfinished { slot: there.slot, ..begun.clone() }) {
        return Err(obstacle);
    }
    if is_it && !there.devices.is_empty() {
        return Ok(None);
    }
    if is_it && unfinished.iter().any(|started| started.is(gpu, there)) {
        return Ok(Some((Work::Complete(there.id), begun)));
    }
    let MakeInstance { profile, start, .. } = gpu.place(there);
    Err(match there.devices.first() {
        Some(uuid) => {
            format!("instance `{uuid}` ({profile} at unit {start}) has these units").into()
        }
        None => Obstacle {
            error: format!(
                "a GPU instance without compute instance ({profile} at unit {start}), which \
                 gpupack did not make, has these units"
            ),
            hidden: Some(there.slot),
        },
    })
}

#[cfg(test)]
mod tests;
