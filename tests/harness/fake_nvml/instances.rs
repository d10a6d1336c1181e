//! MIG instances that are made and removed while the library is open.
//!
//! A GPU with a `mig_model` has the profiles and placements of that model, from `profiles.json`. Its
//! instances are in the file `instances.json` beside the scenario, since the driver keeps them when
//! the process that made them ends. They are gone after a boot (another `boot` in the scenario), and
//! not there while the GPU is not in MIG mode.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::kernel;
use super::scenario::{Gpu, Process, Scenario};

/// Name of the file with the instances.
pub(crate) const FILE: &str = "instances.json";

/// Compute slices of every model of `profiles.json`.
const SLICES: u32 = 7;

/// There is no room for it.
pub(crate) const INSUFFICIENT_RESOURCES: c_uint = 23;
/// A process uses it, or something on it.
pub(crate) const IN_USE: c_uint = 19;

/// A profile of a model.
#[derive(Deserialize)]
pub(crate) struct Profile {
    pub name: String,
    /// The number that calls take.
    pub id: c_uint,
    /// Its position in NVML's list of profiles.
    pub number: c_uint,
    /// Compute slices.
    pub slices: c_uint,
    pub sms: c_uint,
    pub memory_mib: u64,
    /// Units of memory.
    pub size: c_uint,
    pub starts: Vec<c_uint>,
    /// Most instances on one GPU.
    pub most: c_uint,
    /// Positions of its compute profiles in NVML's list; none: the usual ones of a GPU instance.
    #[serde(default)]
    pub computes: Vec<c_uint>,
}

/// Profiles by model.
static PROFILES: LazyLock<BTreeMap<String, Vec<Profile>>> = LazyLock::new(|| {
    serde_json::from_str(include_str!("profiles.json")).expect("the file is part of the source")
});

/// The profiles of a GPU on which instances can be made, in MIG mode or not.
pub(crate) fn profiles_of(gpu: &Gpu) -> &'static [Profile] {
    let model = gpu.mig_model.as_ref();
    model.and_then(|model| PROFILES.get(model)).map_or(&[], Vec::as_slice)
}

/// What exists, of all GPUs.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Made {
    boot: u64,
    /// Number of the next UUID.
    next: u64,
    /// GPU instances by the UUID of the GPU.
    gpus: BTreeMap<String, Vec<Instance>>,
}

/// A GPU instance.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Instance {
    pub id: c_uint,
    pub profile: c_uint,
    pub start: c_uint,
    pub computes: Vec<Compute>,
}

/// A compute instance.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Compute {
    pub id: c_uint,
    pub slices: c_uint,
    pub uuid: String,
}

/// Held while the file is changed.
static CHANGE: Mutex<()> = Mutex::new(());

impl Made {
    /// What the file says for this scenario. Without a file, or after a boot: what the scenario has
    /// at a boot.
    fn read(path: &Path, scenario: &Scenario) -> Self {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let known = serde_json::from_str(&text).ok().filter(|it: &Self| it.boot == scenario.boot);
        let is_new = known.is_none();
        let mut made = known.unwrap_or_else(|| Self { boot: scenario.boot, ..Self::default() });
        for gpu in &scenario.gpus {
            if gpu.mig.is_none() {
                made.gpus.remove(&gpu.uuid);
                continue;
            }
            for (name, start) in gpu.at_boot.iter().filter(|_| is_new) {
                let profile = profiles_of(gpu).iter().find(|it| it.name == *name);
                let profile = profile.expect("the scenario names profiles of the model");
                let id = made.create(gpu, profile.id, *start).expect("they fit at a boot");
                made.create_compute(gpu, id, profile.slices).expect("it is empty");
            }
        }
        made
    }

    pub(crate) fn of(&self, gpu: &Gpu) -> &[Instance] {
        self.gpus.get(&gpu.uuid).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn instance(&self, gpu: &Gpu, id: c_uint) -> Option<&Instance> {
        self.of(gpu).iter().find(|it| it.id == id)
    }

    /// Makes a GPU instance if it is legal and there is room. Returns its number.
    pub(crate) fn create(
        &mut self,
        gpu: &Gpu,
        profile: c_uint,
        start: c_uint,
    ) -> Result<c_uint, c_uint> {
        if gpu.mig.is_none() {
            return Err(super::NOT_SUPPORTED);
        }
        let find = |id| profiles_of(gpu).iter().find(|it| it.id == id);
        let wanted = find(profile).ok_or(super::INVALID_ARGUMENT)?;
        if !wanted.starts.contains(&start) {
            return Err(super::INVALID_ARGUMENT);
        }
        let there = self.gpus.entry(gpu.uuid.clone()).or_default();
        let known = |it: &Instance| find(it.profile).map(|profile| (it.start, profile));
        let others: Vec<_> = there.iter().filter_map(known).collect();
        let overlaps =
            others.iter().any(|(at, it)| *at < start + wanted.size && start < *at + it.size);
        let slices: u32 = others.iter().map(|(_, it)| it.slices).sum();
        let same = others.iter().filter(|(_, it)| it.id == profile).count();
        if overlaps || slices + wanted.slices > SLICES || same >= wanted.most as usize {
            return Err(INSUFFICIENT_RESOURCES);
        }
        let id = (1..).find(|id| there.iter().all(|it| it.id != *id)).unwrap_or(1);
        there.push(Instance { id, profile, start, computes: Vec::new() });
        Ok(id)
    }

    /// Makes a compute instance of so many slices. Returns its number.
    pub(crate) fn create_compute(
        &mut self,
        gpu: &Gpu,
        instance: c_uint,
        slices: c_uint,
    ) -> Result<c_uint, c_uint> {
        let number = self.next;
        let boot = self.boot;
        let instance = self.found(gpu, instance)?;
        let all = profiles_of(gpu).iter().find(|it| it.id == instance.profile);
        let all = all.ok_or(super::INVALID_ARGUMENT)?.slices;
        let taken: u32 = instance.computes.iter().map(|it| it.slices).sum();
        if taken + slices > all {
            return Err(INSUFFICIENT_RESOURCES);
        }
        let id = (0..).find(|id| instance.computes.iter().all(|it| it.id != *id)).unwrap_or(0);
        let uuid = format!("MIG-{boot:08x}-0000-4000-8000-{number:012x}");
        instance.computes.push(Compute { id, slices, uuid });
        self.next += 1;
        Ok(id)
    }

    pub(crate) fn destroy_compute(
        &mut self,
        gpu: &Gpu,
        instance: c_uint,
        id: c_uint,
    ) -> Result<(), c_uint> {
        let instance = self.found(gpu, instance)?;
        let has_process = gpu.mig_processes.get(&instance.start).is_some_and(|all| !all.is_empty());
        if has_process || gpu.monitored.contains(&instance.start) {
            return Err(IN_USE);
        }
        let before = instance.computes.len();
        instance.computes.retain(|it| it.id != id);
        if instance.computes.len() < before { Ok(()) } else { Err(super::INVALID_ARGUMENT) }
    }

    pub(crate) fn destroy(&mut self, gpu: &Gpu, id: c_uint) -> Result<(), c_uint> {
        let instance = self.found(gpu, id)?;
        if !instance.computes.is_empty() || gpu.monitored.contains(&instance.start) {
            return Err(IN_USE);
        }
        self.gpus.entry(gpu.uuid.clone()).or_default().retain(|it| it.id != id);
        Ok(())
    }

    fn found(&mut self, gpu: &Gpu, id: c_uint) -> Result<&mut Instance, c_uint> {
        let there = self.gpus.get_mut(&gpu.uuid).ok_or(super::INVALID_ARGUMENT)?;
        there.iter_mut().find(|it| it.id == id).ok_or(super::INVALID_ARGUMENT)
    }
}

/// What exists now.
pub(crate) fn read(scenario: &Scenario) -> Option<Made> {
    let path = super::scenario::path()?.with_file_name(FILE);
    Some(Made::read(&path, scenario))
}

/// Changes what exists, and writes it in one step. A refused change leaves no trace.
pub(crate) fn change<T>(
    scenario: &Scenario,
    change: impl FnOnce(&mut Made) -> Result<T, c_uint>,
) -> Result<T, c_uint> {
    let _guard = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
    let path = super::scenario::path().ok_or(super::UNKNOWN)?.with_file_name(FILE);
    let mut made = Made::read(&path, scenario);
    let result = change(&mut made)?;
    let text = serde_json::to_string(&made).map_err(|_| super::UNKNOWN)?;
    let new = path.with_extension("new");
    let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path));
    written.map_err(|_| super::OPERATING_SYSTEM)?;
    kernel::show(scenario, Some(&made));
    Ok(result)
}

/// Adds the MIG devices that exist to a scenario, one for each compute instance.
pub(crate) fn add_devices(scenario: &mut Scenario, made: &Made) {
    for gpu in &mut scenario.gpus {
        let devices: Vec<Option<Gpu>> = made
            .of(gpu)
            .iter()
            .flat_map(|instance| instance.computes.iter().map(move |it| (instance, it)))
            .map(|(instance, compute)| device(gpu, instance, compute))
            .collect();
        if let Some(mig) = gpu.mig.as_mut().filter(|_| gpu.mig_model.is_some()) {
            *mig = devices;
        }
    }
}

/// The MIG device of a compute instance.
fn device(gpu: &Gpu, instance: &Instance, compute: &Compute) -> Option<Gpu> {
    let profile = profiles_of(gpu).iter().find(|it| it.id == instance.profile)?;
    let part = match compute.slices {
        all if all == profile.slices => String::new(),
        slices => format!("{slices}c."),
    };
    let processes: Vec<Process> =
        gpu.mig_processes.get(&instance.start).cloned().unwrap_or_default();
    Some(Gpu {
        uuid: compute.uuid.clone(),
        name: format!("{} MIG {part}{}", gpu.name, profile.name),
        total_mib: profile.memory_mib,
        used_mib: processes.iter().filter_map(|it| it.used_mib).sum(),
        processes,
        slot: Some((instance.id, instance.start, profile.size)),
        compute: compute.id,
        sms: Some(profile.sms * compute.slices / profile.slices),
        ..Gpu::default()
    })
}
