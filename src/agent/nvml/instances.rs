//! The MIG instances of the open library: what can be made, what is there, and one change at a time.
//!
//! The MIG mode of a GPU is only read. A change may take seconds, and other calls for the same GPU
//! may wait for it in the driver.

use std::collections::{BTreeMap, BTreeSet};

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::gpu::sample::ProbeError;
use crate::mig::plan::{GpuInstance, GpuLayout, Layouts, MigStep, NumberedProfile, Units, Work};
use crate::nvml::library::Handles;
use crate::nvml::raw::ProcessList;
use crate::nvml::raw_mig::{InstanceHandle, ProfileInfo};
use crate::nvml::trouble::library_error;
use crate::nvml::{raw, raw_mig};
use wire::report::bodies::MigProfileReport;
use wire::report::report_limits::{MAX_MIG_PROFILES, MAX_MIG_STARTS};

/// NVML's code for a change for which there is no room.
const INSUFFICIENT_RESOURCES: u32 = 23;

/// Why an instance without a process cannot be removed. Monitors keep its capability file open and are in no list:
/// NVIDIA/DCGM #276.
const HELD_OPEN: &str =
    "a process or a monitor (DCGM, dcgm-exporter, GPU feature discovery) has it open (IN_USE)";

/// Most MIG devices of one GPU that are looked at.
const DEVICES_MAX: u32 = 32;

/// What can be made on a GPU in MIG mode; nothing if the driver does not let this process. `None` if the driver does not
/// list it yet.
///
/// # Errors
/// The driver's error, other than that it lacks these calls or does not let this process make them.
pub(crate) fn profiles(
    nvml: &Nvml,
    gpu: &Device<'_>,
) -> Result<Option<Vec<NumberedProfile>>, NvmlError> {
    match makeable(nvml, gpu) {
        Err(NvmlError::NotSupported) => Ok(None),
        answer => unless_refused(answer).map(Some),
    }
}

/// The largest profile of a GPU, with all that its instances share. `None` if the driver does not list its profiles.
///
/// # Errors
/// As for [`profiles`].
pub(crate) fn largest(nvml: &Nvml, gpu: &Device<'_>) -> Result<Option<ProfileInfo>, NvmlError> {
    let infos = unless_refused(infos(nvml, gpu))?;
    let largest = infos.into_iter().max_by_key(|info| (info.multiprocessors, info.memory_mib));
    Ok(largest.filter(|info| info.multiprocessors > 0))
}

/// A list; an empty one if the driver lacks it or does not give it to this process.
fn unless_refused<T>(list: Result<Vec<T>, NvmlError>) -> Result<Vec<T>, NvmlError> {
    match list {
        Err(
            NvmlError::NoPermission
            | NvmlError::NotSupported
            | NvmlError::FunctionNotFound
            | NvmlError::FailedToLoadSymbol(_)
            | NvmlError::UnexpectedVariant(25),
        ) => Ok(Vec::new()),
        answer => answer,
    }
}

fn makeable(nvml: &Nvml, gpu: &Device<'_>) -> Result<Vec<NumberedProfile>, NvmlError> {
    let all = listed_on(nvml, gpu)?;
    for profile in &all {
        // Only those who may list instances may make them.
        raw_mig::instances(nvml, gpu, profile.id, profile.most)?;
    }
    Ok(all)
}

/// The profiles of a GPU as NVML describes them.
fn infos(nvml: &Nvml, gpu: &Device<'_>) -> Result<Vec<ProfileInfo>, NvmlError> {
    let mut all = Vec::new();
    for number in 0..raw_mig::PROFILE_NUMBERS {
        match raw_mig::profile(nvml, gpu, number) {
            Ok(info) => all.push(info),
            // Each model has some of them, and each driver knows some of them.
            Err(NvmlError::NotSupported | NvmlError::InvalidArg) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(all)
}

/// The profiles of a GPU with the places of their instances. Outside MIG mode, too: there NVIDIA documents
/// NOT_SUPPORTED for the instances.
fn listed_on(nvml: &Nvml, gpu: &Device<'_>) -> Result<Vec<NumberedProfile>, NvmlError> {
    let mut all: Vec<NumberedProfile> = Vec::new();
    for info in infos(nvml, gpu)? {
        let places = raw_mig::placements(nvml, gpu, info.id)?;
        let Some(Units { size, .. }) = places.first().copied() else { continue };
        let starts: BTreeSet<u32> =
            places.iter().filter(|place| place.size == size).map(|place| place.start).collect();
        let report = MigProfileReport {
            profile: info.name,
            memory_mib: info.memory_mib,
            sm_count: (info.multiprocessors > 0).then_some(info.multiprocessors),
            size,
            starts: starts.into_iter().take(MAX_MIG_STARTS).collect(),
        };
        let is_new = all.iter().all(|known| known.report.profile != report.profile);
        if is_new && all.len() < MAX_MIG_PROFILES {
            all.push(NumberedProfile { id: info.id, most: info.most, report });
        }
    }
    Ok(all)
}

/// What the driver lists for each GPU, by UUID, whether it is in MIG mode or not.
///
/// # Errors
/// [`ProbeError`] if a GPU cannot be read.
pub(crate) fn listed(nvml: &Nvml) -> Result<KnownProfiles, ProbeError> {
    let count = nvml.device_count();
    let count = count.map_err(|error| library_error("count the GPUs", &error))?;
    let listed = (0..count).map(|index| {
        let gpu = nvml.device_by_index(index)?;
        Ok((gpu.uuid()?, unless_refused(listed_on(nvml, &gpu))?))
    });
    listed
        .collect::<Result<KnownProfiles, NvmlError>>()
        .map_err(|error| library_error("list MIG profiles", &error))
}

/// What can be made on each GPU in MIG mode, by UUID; read once.
pub(crate) type KnownProfiles = BTreeMap<String, Vec<NumberedProfile>>;

/// The open library for one round of changes, with the handles of its GPUs.
pub(crate) struct Round<'a> {
    pub(crate) nvml: &'a Nvml,
    pub(crate) handles: Handles,
}

impl<'a> Round<'a> {
    /// In which no GPU was looked up yet.
    pub(crate) fn new(nvml: &'a Nvml) -> Self {
        Self { nvml, handles: Handles::default() }
    }

    /// The GPU with this UUID, once [`layouts`] has found it.
    fn gpu(&self, uuid: &str) -> Result<Device<'a>, NvmlError> {
        self.handles.named(self.nvml, uuid).ok_or(NvmlError::NotFound)
    }
}

/// Which GPUs to look at. To look a MIG device up takes long on large nodes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Looked<'a> {
    AtAll,
    /// At those with these UUIDs.
    At(&'a BTreeSet<String>),
}

/// The instances of the GPUs that are looked at and answer.
///
/// # Errors
/// [`ProbeError`] if no GPU can be read.
pub(crate) fn layouts(
    round: &mut Round<'_>,
    looked: Looked<'_>,
    known: &mut KnownProfiles,
) -> Result<Layouts, ProbeError> {
    let nvml = round.nvml;
    let count = nvml.device_count();
    let count = count.map_err(|error| library_error("count the GPUs", &error))?;
    round.handles.expect(count);
    let mut layouts = Layouts::default();
    for index in 0..count {
        let named = round.handles.gpu(nvml, index).and_then(|gpu| Ok((gpu.uuid()?, gpu)));
        // One without a name has no order: that says that it does not answer.
        let Ok((uuid, gpu)) = named else { continue };
        round.handles.name(index, &uuid);
        if let Looked::At(gpus) = looked
            && !gpus.contains(&uuid)
        {
            continue;
        }
        match layout(nvml, &gpu, &uuid, known) {
            Ok(layout) => layouts.gpus.push(layout),
            Err(error) => {
                layouts.unread.insert(uuid, cause(&error));
            }
        }
    }
    Ok(layouts)
}

/// The minor number of a GPU, once [`layouts`] has found it.
///
/// # Errors
/// The meaning of the driver's error, for people.
pub(crate) fn minor_number(round: &Round<'_>, uuid: &str) -> Result<u32, String> {
    let minor = round.gpu(uuid).and_then(|gpu| gpu.minor_number());
    minor.map_err(|error| format!("the minor number of the GPU is not known: {}", cause(&error)))
}

/// The instances of one GPU.
pub(crate) fn layout_of(
    round: &Round<'_>,
    uuid: &str,
    known: &mut KnownProfiles,
) -> Result<GpuLayout, NvmlError> {
    layout(round.nvml, &round.gpu(uuid)?, uuid, known)
}

fn layout<'a>(
    nvml: &'a Nvml,
    gpu: &Device<'a>,
    uuid: &str,
    known: &mut KnownProfiles,
) -> Result<GpuLayout, NvmlError> {
    let is_in_mig_mode = match gpu.mig_mode() {
        Ok(mode) => mode.current == 1,
        Err(NvmlError::NotSupported) => false,
        Err(error) => return Err(error),
    };
    let mut layout = GpuLayout { uuid: uuid.to_owned(), is_in_mig_mode, ..GpuLayout::default() };
    if !is_in_mig_mode {
        known.remove(uuid);
        return Ok(layout);
    }
    let devices = mig_devices(nvml, gpu)?;
    layout.profiles = match known.get(uuid) {
        Some(profiles) => profiles.clone(),
        None => {
            let profiles = makeable(nvml, gpu)?;
            known.insert(uuid.to_owned(), profiles.clone());
            profiles
        }
    };
    for profile in &layout.profiles {
        for found in raw_mig::instances(nvml, gpu, profile.id, profile.most)? {
            let own_devices = devices.iter().filter(|device| device.instance == found.id);
            layout.instances.push(GpuInstance {
                id: found.id,
                profile: found.profile,
                slot: found.slot,
                devices: own_devices.map(|device| device.uuid.clone()).collect(),
            });
        }
    }
    Ok(layout)
}

/// A MIG device of a GPU.
struct MigDevice<'a> {
    /// Number of its GPU instance.
    instance: u32,
    uuid: String,
    device: Device<'a>,
}

/// The MIG devices of a GPU.
fn mig_devices<'a>(nvml: &'a Nvml, gpu: &Device<'a>) -> Result<Vec<MigDevice<'a>>, NvmlError> {
    let mut devices = Vec::new();
    for position in 0..gpu.mig_device_count()?.min(DEVICES_MAX) {
        match gpu.mig_device_by_index(position) {
            Ok(device) => devices.push(MigDevice {
                instance: raw::gpu_instance_id(nvml, &device)?,
                uuid: device.uuid()?,
                device,
            }),
            Err(NvmlError::NotFound | NvmlError::InvalidArg) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(devices)
}

/// Why a step was not carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    /// What was seen there is another one now.
    #[error("others have changed it meanwhile, so it is looked at again")]
    Anothers,
    /// What was in the way.
    #[error("{0}")]
    Refused(String),
}

impl From<String> for StepError {
    fn from(error: String) -> Self {
        Self::Refused(error)
    }
}

/// Carries out one step.
///
/// # Errors
/// What was in the way. Then nothing has changed, except that a GPU instance
/// may be left without its compute instance; the next plan completes or removes it.
pub(crate) fn carry_out(round: &Round<'_>, step: &MigStep) -> Result<(), StepError> {
    let nvml = round.nvml;
    let gpu = round.gpu(&step.begun.gpu).map_err(|error| cause(&error))?;
    match step.work {
        Work::Make => {
            let instance = raw_mig::create(nvml, &gpu, step.begun.profile, step.begun.slot);
            let instance = instance.map_err(|error| cause(&error))?;
            let made = raw_mig::create_compute(nvml, instance).map_err(|error| {
                let cause = format!("its compute instance cannot be made: {}", cause(&error));
                match raw_mig::destroy(nvml, instance) {
                    Ok(()) => cause,
                    Err(error) => format!("{cause}; its GPU instance stays: {error}"),
                }
            });
            Ok(made?)
        }
        Work::Complete(id) => {
            let instance = raw_mig::instance(nvml, &gpu, id);
            let made = instance.and_then(|instance| raw_mig::create_compute(nvml, instance));
            let made = made
                .map_err(|error| format!("its compute instance cannot be made: {}", cause(&error)));
            Ok(made?)
        }
        Work::Remove(id) => remove(nvml, &gpu, id, step),
    }
}

/// Removes a GPU instance that no process uses, if it still is the one that was seen.
fn remove<'a>(nvml: &'a Nvml, gpu: &Device<'a>, id: u32, step: &MigStep) -> Result<(), StepError> {
    let devices = mig_devices(nvml, gpu).map_err(|error| cause(&error))?;
    for found in devices.iter().filter(|found| found.instance == id) {
        if let Some(pid) = a_process(nvml, &found.device)? {
            return Err(format!("process {pid} uses it").into());
        }
    }
    let instance = seen_instance(nvml, gpu, id, step)?;
    let removed = raw_mig::computes(nvml, instance).and_then(|computes| {
        for compute in computes {
            raw_mig::destroy_compute(nvml, compute)?;
        }
        raw_mig::destroy(nvml, instance)
    });
    let removed = removed.map_err(|error| match error {
        NvmlError::InUse => HELD_OPEN.to_owned(),
        other => cause(&other),
    });
    Ok(removed?)
}

/// The GPU instance of this number, if it is the one that the step is about: others may have removed that one
/// since, and the driver gives its number to the next one.
fn seen_instance<'a>(
    nvml: &'a Nvml,
    gpu: &Device<'a>,
    id: u32,
    step: &MigStep,
) -> Result<InstanceHandle, StepError> {
    let found = raw_mig::instance(nvml, gpu, id).and_then(|handle| {
        let info = raw_mig::info(nvml, handle)?;
        let there = mig_devices(nvml, gpu)?.into_iter().filter(|device| device.instance == id);
        Ok((handle, info, there.map(|device| device.uuid).collect::<BTreeSet<String>>()))
    });
    let (handle, info, devices) = found.map_err(|error| cause(&error))?;
    let is_place = (info.profile, info.slot) == (step.begun.profile, step.begun.slot);
    match is_place && devices.iter().eq(step.devices.iter().collect::<BTreeSet<_>>()) {
        true => Ok(handle),
        false => Err(StepError::Anothers),
    }
}

/// A process on an instance, if there is any.
fn a_process(nvml: &Nvml, device: &Device<'_>) -> Result<Option<u32>, String> {
    for list in [ProcessList::Compute, ProcessList::Mps, ProcessList::Graphics] {
        match (raw::processes(nvml, device, list), list) {
            (Ok(processes), _) => {
                if let Some(process) = processes.first() {
                    return Ok(Some(process.pid));
                }
            }
            // Drivers and devices without these have no such processes.
            (
                Err(
                    NvmlError::NotSupported
                    | NvmlError::FunctionNotFound
                    | NvmlError::FailedToLoadSymbol(_),
                ),
                ProcessList::Mps | ProcessList::Graphics,
            ) => {}
            (Err(error), _) => {
                return Err(format!("its processes cannot be listed: {}", cause(&error)));
            }
        }
    }
    Ok(None)
}

/// The meaning of the driver's error, for people.
fn cause(error: &NvmlError) -> String {
    match error {
        NvmlError::UnexpectedVariant(INSUFFICIENT_RESOURCES) => {
            "the driver has no room for it there (INSUFFICIENT_RESOURCES)".to_owned()
        }
        NvmlError::InUse => {
            "something uses the whole GPU, such as a profiler or a monitor (IN_USE)".to_owned()
        }
        NvmlError::NoPermission => {
            "the agent may not change MIG instances: its container needs root, `privileged`, and \
             the driver's file `capabilities/mig/config` (NO_PERMISSION)"
                .to_owned()
        }
        NvmlError::FailedToLoadSymbol(cause) => {
            format!("the driver is too old for MIG on demand: {cause}")
        }
        NvmlError::UnexpectedVariant(code) => format!("the driver refuses with code {code}"),
        other => format!("the driver refuses: {other}"),
    }
}
