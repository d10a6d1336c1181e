//! One walk over all devices of the open library.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::MemoryInfo;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
use nvml_wrapper::{Device, Nvml};

use crate::gpu::health::{GpuHealth, RecoveryAction};
use crate::gpu::sample::{ProbeError, ProcessSampling};
use crate::mig::capabilities;
use crate::mps::daemons::MpsDaemons;
use crate::nvml::cgroup_limits::{Listed, MemoryLimits};
use crate::nvml::details::{Details, ListedUse};
use crate::nvml::library::{Handles, MigPosition};
use crate::nvml::raw::{EventSet, ProcessList};
use crate::nvml::trouble::{Trouble, required, start_error, unless_lost, unless_unsupported};
use crate::nvml::utilization::Utilization;
use crate::nvml::{cgroup_limits, instances, raw, utilization};
use crate::processes::pods::PodsByProcess;
use wire::api::condition::{DeviceFault, MpsState};
use wire::api::state::DeviceKind;
use wire::ids::MAX_DEVICES_PER_NODE;
use wire::report::bodies::{DeviceReport, DeviceUse, MigProfileReport, ProcessUse};
use wire::report::report_limits::MAX_PROCESSES_PER_DEVICE;
use wire::units::Timestamp;

/// NVML counts bytes.
const BYTES_PER_MIB: u64 = 1 << 20;

/// Most MIG instances of one GPU that are read; today's have 7.
const INSTANCES_MAX: u32 = 32;

/// A device that answered.
pub(crate) struct SeenDevice {
    pub(crate) report: DeviceReport,
    pub(crate) usage: DeviceUse,
}

/// A device that did not answer; it may be a known one.
pub(crate) struct Failure {
    /// Its UUID, if it answered that.
    pub(crate) uuid: Option<String>,
    pub(crate) fault: DeviceFault,
}

/// The result of one walk.
#[derive(Default)]
pub(crate) struct Sweep {
    pub(crate) seen: Vec<SeenDevice>,
    /// Devices that did not answer.
    pub(crate) failures: Vec<Failure>,
}

/// Walks over all devices.
pub(crate) struct Sweeper<'a> {
    pub(crate) nvml: &'a Nvml,
    /// The devices that were looked up.
    pub(crate) handles: &'a mut Handles,
    /// Whether to look for MIG devices that were not there before.
    pub(crate) may_have_new: bool,
    /// The set of events; none if the driver has none.
    pub(crate) events: Option<&'a EventSet>,
    /// UUID of each GPU with registered events, by the identity of its handle.
    pub(crate) registered: &'a mut BTreeMap<usize, String>,
    pub(crate) details: &'a mut BTreeMap<String, Details>,
    /// Health of each GPU, by UUID.
    pub(crate) health: &'a mut BTreeMap<String, GpuHealth>,
    /// Devices as they were last read successfully, by UUID.
    pub(crate) known: &'a BTreeMap<String, DeviceReport>,
    /// Reads memory limits; none if the driver has none.
    pub(crate) limits: Option<&'a MemoryLimits>,
    /// Finds the pod of a process.
    pub(crate) pods: &'a PodsByProcess,
    /// The last read utilization of each GPU's processes, by UUID.
    pub(crate) utilization_seen: &'a mut BTreeMap<String, Utilization>,
    /// The MPS daemons, if the agent watches them.
    pub(crate) mps: Option<&'a MpsDaemons>,
    /// What can be made on each GPU in MIG mode, by UUID; none if the agent makes nothing.
    pub(crate) mig_profiles: Option<&'a mut BTreeMap<String, Vec<MigProfileReport>>>,
    /// The kernel's list of MIG instances.
    pub(crate) capabilities: &'a Path,
    /// UUIDs of the GPUs that have instances which the library hides, as of the last look at all of their places.
    pub(crate) hiding: &'a mut BTreeSet<String>,
    pub(crate) now: Timestamp,
    pub(crate) processes: ProcessSampling,
}

/// What a device says of its memory.
enum Memory {
    Read(MemoryInfo),
    /// It has none of its own.
    Absent,
    /// The driver does not let this process read it.
    Refused,
}

/// What a kept handle was good for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    /// The instance was read by it.
    Read,
    /// There is none.
    Absent,
    /// It leads to no instance any more.
    Ended,
}

/// A GPU as its instances see it.
struct Parent<'a> {
    gpu: &'a Device<'a>,
    /// By which the library counts it.
    position: u32,
    uuid: &'a str,
    index: u32,
}

impl<'a> Sweeper<'a> {
    /// Reads all devices that answer.
    pub(crate) fn sweep(mut self) -> Result<Sweep, ProbeError> {
        let count = self.nvml.device_count();
        let count = count.map_err(|error| start_error("count the GPUs", &error))?;
        self.handles.expect(count);
        let most = u32::try_from(MAX_DEVICES_PER_NODE).unwrap_or(u32::MAX);
        let mut sweep = Sweep::default();
        for position in 0..count.min(most) {
            let mut uuid = None;
            let gpu = required(self.handles.gpu(self.nvml, position));
            let fault = match gpu.and_then(|gpu| self.gpu(&gpu, position, &mut uuid, &mut sweep)) {
                Ok(()) => continue,
                Err(Trouble::Library(error)) => return Err(error),
                Err(Trouble::Unsupported) => DeviceFault::NotAnswering,
                Err(Trouble::Device(fault)) => fault,
            };
            if fault == DeviceFault::NotAnswering {
                self.handles.forget(position); // the library may no longer know it
            }
            sweep.fail(uuid, fault);
        }
        Ok(sweep)
    }

    /// Reads one GPU and, in MIG mode, its instances. Sets `known_uuid` to its UUID once that is known.
    fn gpu(
        &mut self,
        gpu: &Device<'_>,
        position: u32,
        known_uuid: &mut Option<String>,
        sweep: &mut Sweep,
    ) -> Result<(), Trouble> {
        let uuid = required(gpu.uuid())?;
        *known_uuid = Some(uuid.clone());
        self.handles.name(position, &uuid);
        let model = required(gpu.name())?;
        let index = unless_unsupported(gpu.index())?.unwrap_or(position);
        let in_mig_mode = match gpu.mig_mode() {
            // Not for a known parent: as a whole GPU it would be allocated beside its instances.
            Err(
                NvmlError::NotSupported
                | NvmlError::FunctionNotFound
                | NvmlError::FailedToLoadSymbol(_),
            ) if !self.was_parent(&uuid) => false,
            answer => required(answer)?.current == 1,
        };
        let kind = if in_mig_mode { DeviceKind::MigParent } else { DeviceKind::Gpu };
        if self.known.get(&uuid).is_some_and(|device| device.kind != kind) {
            // The driver may have bound the GPU again.
            self.details.remove(&uuid);
            self.registered.retain(|_, known| *known != uuid);
        }
        self.learn_health(gpu, &uuid)?;
        if !self.details.contains_key(&uuid) {
            let mut details = Details::of_gpu(self.nvml, gpu, self.limits)?;
            if in_mig_mode {
                details.largest = unless_lost(instances::largest(self.nvml, gpu))?.flatten();
            }
            self.details.insert(uuid.clone(), details);
        } else if let Some(details) = self.details.get_mut(&uuid)
            && self.processes == ProcessSampling::List
        {
            details.learn_limits(gpu, self.limits);
            if in_mig_mode && details.largest.is_none() {
                details.largest = unless_lost(instances::largest(self.nvml, gpu))?.flatten();
            }
        }
        let mig_profiles = self.makeable(gpu, &uuid, kind)?;
        let report = DeviceReport::new(uuid.clone(), index, model, kind);
        self.push(gpu, DeviceReport { mig_profiles, ..report }, sweep)?;
        if in_mig_mode {
            let parent = Parent { gpu, position, uuid: &uuid, index };
            let at = sweep.seen.len() - 1;
            self.instances(&parent, sweep)?;
            let (before, its_own) = sweep.seen.split_at_mut(at + 1);
            let shared = its_own.iter().map(|instance| instance.report.memory_mib).sum();
            let SeenDevice { report, usage } = &mut before[at];
            if usage.used_mib.is_none() {
                // Where its size is not known, it is no less than theirs: an extender would refuse the report.
                report.memory_mib = report.memory_mib.max(shared);
            }
            if self.hiding.contains(&uuid) {
                usage.fault = Some(DeviceFault::InstancesHidden);
            }
        } else {
            self.hiding.remove(&uuid);
            self.handles.note_whole(position);
        }
        Ok(())
    }

    /// What this agent can make on a GPU; read once while the GPU is in MIG mode. What is not supported is not listed
    /// yet, as before a switch of the mode is done: it is read again.
    fn makeable(
        &mut self,
        gpu: &Device<'_>,
        uuid: &str,
        kind: DeviceKind,
    ) -> Result<Vec<MigProfileReport>, Trouble> {
        let Some(known) = &mut self.mig_profiles else { return Ok(Vec::new()) };
        if kind != DeviceKind::MigParent {
            known.remove(uuid);
            return Ok(Vec::new());
        }
        if let Some(profiles) = known.get(uuid) {
            return Ok(profiles.clone());
        }
        let found = unless_lost(instances::profiles(self.nvml, gpu))?.flatten();
        let Some(found) = found else { return Ok(Vec::new()) };
        let profiles: Vec<MigProfileReport> =
            found.into_iter().map(|profile| profile.report).collect();
        if profiles.is_empty() {
            tracing::warn!(gpu = uuid, "the driver lets the agent make no MIG instances");
        }
        known.insert(uuid.to_owned(), profiles.clone());
        Ok(profiles)
    }

    /// Whether a device was a GPU in MIG mode when it was last read successfully.
    fn was_parent(&self, uuid: &str) -> bool {
        self.known.get(uuid).is_some_and(|device| device.kind == DeviceKind::MigParent)
    }

    /// Registers the events of a GPU once. Reads its recovery action with each list of processes,
    /// and at once if its health is in doubt.
    fn learn_health(&mut self, gpu: &Device<'_>, uuid: &str) -> Result<(), Trouble> {
        if let Some(events) = self.events
            && !self.registered.contains_key(&raw::identity(gpu))
        {
            // A GPU without events has none; its recovery action is read all the same.
            match unless_unsupported(events.register(self.nvml, gpu)) {
                Ok(_) => {
                    self.registered.insert(raw::identity(gpu), uuid.to_owned());
                }
                Err(Trouble::Unsupported | Trouble::Device(DeviceFault::NotAnswering)) => {}
                Err(other) => return Err(other),
            }
        }
        let health = self.health.entry(uuid.to_owned()).or_default();
        if self.processes == ProcessSampling::List || health.is_in_doubt() {
            match wish(gpu) {
                Ok(action) => health.learn_wish(Some(action)),
                // The driver is older than the field.
                Err(
                    NvmlError::NotSupported
                    | NvmlError::InvalidArg
                    | NvmlError::FunctionNotFound
                    | NvmlError::FailedToLoadSymbol(_),
                ) => health.learn_wish(None),
                Err(error) => {
                    health.miss_wish();
                    unless_lost(Err::<(), _>(error))?;
                }
            }
        }
        Ok(())
    }

    /// Reads the MIG instances of a GPU: those whose handles were kept, and then others, if there may be any. If a
    /// handle has ended, its instance may have another position now.
    fn instances(&mut self, parent: &Parent<'_>, sweep: &mut Sweep) -> Result<(), Trouble> {
        // The highest possible number, not the current one: gaps answer "not found".
        let most = required(parent.gpu.mig_device_count())?;
        let failures = sweep.failures.len();
        let mut looks = self.may_have_new || !self.handles.is_walked(parent.position);
        let mut unread = Vec::new();
        for device in 0..most.min(INSTANCES_MAX) {
            let at = MigPosition { gpu: parent.position, device };
            let kept = self.kept(at, parent, sweep)?;
            looks |= kept == Kept::Ended;
            if kept != Kept::Read {
                unread.push(at);
            }
        }
        if looks {
            let minor = self.details.get(parent.uuid).and_then(|details| details.minor);
            let listed = minor.and_then(|minor| capabilities::of_gpu(self.capabilities, minor));
            for at in unread {
                self.look_up(at, parent, sweep)?;
            }
            if sweep.failures.len() == failures {
                self.learn_hidden(parent, minor.zip(listed), sweep);
            }
        }
        self.handles.walked(parent.position, most.min(INSTANCES_MAX));
        Ok(())
    }

    /// Compares the kernel's list from before a look at all places of a GPU with what was found. An instance that was
    /// removed meanwhile is not hidden.
    fn learn_hidden(
        &mut self,
        parent: &Parent<'_>,
        listed: Option<(u32, BTreeSet<u32>)>,
        sweep: &Sweep,
    ) {
        let its_own =
            sweep.seen.iter().filter(|it| it.report.parent.as_deref() == Some(parent.uuid));
        let numbers = its_own.map(|it| self.details.get(&it.report.uuid)?.instance);
        // One without a number may be any of them.
        let Some(found) = numbers.collect::<Option<BTreeSet<u32>>>() else { return };
        let is_hiding = listed.is_some_and(|(minor, before)| {
            before.difference(&found).next().is_some()
                && capabilities::of_gpu(self.capabilities, minor).is_some_and(|now| {
                    before.intersection(&now).any(|instance| !found.contains(instance))
                })
        });
        match is_hiding {
            true => self.hiding.insert(parent.uuid.to_owned()),
            false => self.hiding.remove(parent.uuid),
        };
    }

    /// Reads a MIG instance by the handle that was kept of it. The handle is forgotten if it has ended with its
    /// instance, or leads to one that another handle leads to, too.
    fn kept(
        &mut self,
        at: MigPosition,
        parent: &Parent<'_>,
        sweep: &mut Sweep,
    ) -> Result<Kept, Trouble> {
        let nvml: &'a Nvml = self.nvml;
        let Some(instance) = self.handles.instance(nvml, at) else { return Ok(Kept::Absent) };
        if !sweep.has_instance(&instance) {
            match self.instance(&instance, parent, &mut None, sweep) {
                Ok(()) => return Ok(Kept::Read),
                Err(Trouble::Library(error)) => return Err(Trouble::Library(error)),
                Err(Trouble::Unsupported | Trouble::Device(_)) => {}
            }
        }
        self.handles.forget_instance(at);
        Ok(Kept::Ended)
    }

    /// Looks a MIG instance up, keeps its handle and reads it, if there is one.
    fn look_up(
        &mut self,
        at: MigPosition,
        parent: &Parent<'_>,
        sweep: &mut Sweep,
    ) -> Result<(), Trouble> {
        let instance = match parent.gpu.mig_device_by_index(at.device) {
            Err(NvmlError::NotFound | NvmlError::InvalidArg) => return Ok(()),
            other => required(other),
        };
        if let Ok(instance) = &instance {
            if sweep.has_instance(instance) {
                return Ok(()); // a kept handle leads to it
            }
            // It may have the UUID of an earlier one of another profile.
            if let Ok(uuid) = instance.uuid() {
                self.details.remove(&uuid);
            }
            self.handles.keep(at, instance);
        }
        let mut uuid = None;
        match instance.and_then(|instance| self.instance(&instance, parent, &mut uuid, sweep)) {
            Ok(()) => {}
            Err(Trouble::Library(error)) => return Err(Trouble::Library(error)),
            Err(Trouble::Unsupported) => sweep.fail(uuid, DeviceFault::NotAnswering),
            Err(Trouble::Device(fault)) => sweep.fail(uuid, fault),
        }
        Ok(())
    }

    /// Reads one MIG instance; its name is that of the GPU followed by ` MIG <profile>`.
    fn instance(
        &mut self,
        instance: &Device<'_>,
        parent: &Parent<'_>,
        known_uuid: &mut Option<String>,
        sweep: &mut Sweep,
    ) -> Result<(), Trouble> {
        let uuid = required(instance.uuid())?;
        *known_uuid = Some(uuid.clone());
        let name = required(instance.name())?;
        let (model, profile) =
            name.rsplit_once(" MIG ").ok_or(Trouble::Device(DeviceFault::Absurd))?;
        if !self.details.contains_key(&uuid) {
            let details = Details::of_instance(self.nvml, parent.gpu, instance)?;
            self.details.insert(uuid.clone(), details);
        }
        let report = DeviceReport {
            parent: Some(parent.uuid.to_owned()),
            mig_profile: Some(profile.to_owned()),
            ..DeviceReport::new(uuid, parent.index, model.to_owned(), DeviceKind::MigInstance)
        };
        self.push(instance, report, sweep)
    }

    /// Reads memory and use of one device and adds it to the sweep.
    fn push(
        &mut self,
        device: &Device<'_>,
        mut report: DeviceReport,
        sweep: &mut Sweep,
    ) -> Result<(), Trouble> {
        let memory = match device.memory_info() {
            // GPUs with unified memory have none of their own: nothing can be shared there.
            Err(NvmlError::NotSupported) => Memory::Absent,
            Err(NvmlError::NoPermission) => Memory::Refused,
            other => match required(other)? {
                memory if memory.total > 0 => Memory::Read(memory),
                _ => Memory::Absent,
            },
        };
        if let Memory::Read(memory) = &memory {
            report.memory_mib = memory.total / BYTES_PER_MIB;
            report.reserved_mib = memory.reserved.div_ceil(BYTES_PER_MIB);
        } else if let Some(known) = self.known.get(&report.uuid) {
            (report.memory_mib, report.reserved_mib) = (known.memory_mib, known.reserved_mib);
        }
        let busy_percent = match report.kind {
            DeviceKind::Gpu => unless_lost(device.utilization_rates())?.map(|rates| rates.gpu),
            DeviceKind::MigParent | DeviceKind::MigInstance => None,
        };
        let listed = match (self.processes, report.kind) {
            // The processes of a parent are those of its instances.
            (ProcessSampling::Skip, _) | (ProcessSampling::List, DeviceKind::MigParent) => None,
            (ProcessSampling::List, DeviceKind::Gpu | DeviceKind::MigInstance) => {
                self.processes_on(device)?
            }
        };
        let listed = match listed {
            Some(listed) if report.kind == DeviceKind::Gpu && listed.mps_clients.is_empty() => {
                let busy =
                    utilization::read(device, &report.uuid, self.utilization_seen, self.now)?;
                Some(Listed { busy, ..listed })
            }
            // In MIG mode the driver has no utilization, and may list MPS clients as their server.
            listed => listed,
        };
        let (used_mib, fault) = self.use_of(&report, &memory, listed.as_ref());
        let mps = self.mps.and_then(|daemons| daemons.state(&report.uuid, self.now));
        let (processes, tenants) = match listed {
            None => (None, Vec::new()),
            Some(listed) => {
                // The driver takes no MIG handle: an instance is a limit of its own.
                let limits = self.limits.filter(|_| report.kind == DeviceKind::Gpu);
                let uuid = report.uuid.as_str();
                let serving = self.mps.filter(|_| mps == Some(MpsState::Serving));
                let mps_mib = |pid| serving?.limit_mib(self.pods, pid, uuid);
                let tenants = cgroup_limits::tenants(device, limits, &listed, self.pods, mps_mib);
                (Some(listed.processes), tenants)
            }
        };
        if let Some(details) = self.details.get(&report.uuid) {
            details.complete(&mut report);
        }
        let usage = DeviceUse {
            uuid: report.uuid.clone(),
            used_mib,
            busy_percent: busy_percent.and_then(|percent| u8::try_from(percent.min(100)).ok()),
            healthy: true,
            fault,
            last_xid: None,
            fault_event: None,
            mps,
            processes,
            tenants,
        };
        sweep.seen.push(SeenDevice { report, usage });
        Ok(())
    }

    /// Memory in use of a device in MiB, and its fault if that is not known. Where the memory is part of the
    /// host's, it is the sum over the processes of the last list.
    fn use_of(
        &mut self,
        report: &DeviceReport,
        memory: &Memory,
        listed: Option<&Listed>,
    ) -> (Option<u64>, Option<DeviceFault>) {
        let memory = match (memory, report.kind) {
            (Memory::Read(memory), _) => memory,
            (Memory::Absent, _) => return (None, Some(DeviceFault::NoMemory)),
            // From its first instance on it answers those alone that may monitor all of them.
            (Memory::Refused, DeviceKind::MigParent) => return (None, None),
            (Memory::Refused, _) => return (None, Some(DeviceFault::NoPermission)),
        };
        let details = self.details.get_mut(&report.uuid);
        match details.filter(|details| details.is_part_of_the_host()) {
            // A parent has no tenants, and no list.
            Some(details) if report.kind != DeviceKind::MigParent => {
                if self.processes == ProcessSampling::List {
                    details.listed_use =
                        ListedUse::of(listed.map(|listed| listed.processes.as_slice()));
                }
                let used_mib = details.listed_use.mib();
                (used_mib, used_mib.is_none().then_some(DeviceFault::UnknownUse))
            }
            Some(_) | None => (Some(memory.used.div_ceil(BYTES_PER_MIB)), None),
        }
    }

    /// All processes on a device, each once; `None` if any of its lists cannot be read: from part
    /// of a list some pods would seem to have ended.
    fn processes_on(&self, device: &Device<'_>) -> Result<Option<Listed>, Trouble> {
        let mut by_pid: BTreeMap<u32, Option<u64>> = BTreeMap::new();
        let mut mps_clients = BTreeSet::new();
        for list in [ProcessList::Compute, ProcessList::Mps, ProcessList::Graphics] {
            let Some(processes) = self.list(device, list)? else { return Ok(None) };
            for process in processes {
                let used = process.used_bytes.map(|bytes| bytes.div_ceil(BYTES_PER_MIB));
                // A process in two lists has its whole memory in both. The greater amount counts,
                // and a known one is greater than an unknown one.
                let known = by_pid.entry(process.pid).or_insert(used);
                *known = used.max(*known);
                if matches!(list, ProcessList::Mps) {
                    mps_clients.insert(process.pid);
                }
            }
        }
        if by_pid.len() > MAX_PROCESSES_PER_DEVICE {
            return Ok(None);
        }
        // A process that has a listed id but began later is another process.
        let listed = self.pods.now();
        let processes = by_pid.into_iter().map(|(pid, memory_mib)| ProcessUse {
            pid,
            pod_uid: self.pods.pod_of(pid, listed).map(|uid| uid.to_string()),
            memory_mib,
        });
        Ok(Some(Listed { processes: processes.collect(), mps_clients, busy: None }))
    }

    /// One list of processes; `None` if it cannot be read. Drivers and devices without MPS or
    /// graphics have no such list, and no such processes.
    fn list(
        &self,
        device: &Device<'_>,
        list: ProcessList,
    ) -> Result<Option<Vec<raw::Process>>, Trouble> {
        match (raw::processes(self.nvml, device, list), list) {
            (
                Err(
                    NvmlError::NotSupported
                    | NvmlError::FunctionNotFound
                    | NvmlError::FailedToLoadSymbol(_),
                ),
                ProcessList::Mps | ProcessList::Graphics,
            ) => Ok(Some(Vec::new())),
            (answer, _) => unless_lost(answer),
        }
    }
}

impl Sweep {
    /// Whether this MIG instance was read, among the last.
    fn has_instance(&self, instance: &Device<'_>) -> bool {
        let mut last = self.seen.iter().rev().take(INSTANCES_MAX as usize);
        instance.uuid().is_ok_and(|uuid| last.any(|seen| seen.report.uuid == uuid))
    }

    /// Notes that a device did not answer.
    fn fail(&mut self, uuid: Option<String>, fault: DeviceFault) {
        self.failures.push(Failure { uuid, fault });
    }
}

/// The recovery action that the driver requests for a GPU.
fn wish(gpu: &Device<'_>) -> Result<RecoveryAction, NvmlError> {
    let values = gpu.field_values_for(&[FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)])?;
    let sample = values.into_iter().next().ok_or(NvmlError::NoData)??;
    match sample.value? {
        SampleValue::U32(number) => Ok(RecoveryAction::from_nvml(u64::from(number))),
        SampleValue::U64(number) => Ok(RecoveryAction::from_nvml(number)),
        SampleValue::I64(number) => {
            Ok(RecoveryAction::from_nvml(u64::try_from(number).unwrap_or(u64::MAX)))
        }
        SampleValue::F64(_) => Err(NvmlError::NoData),
    }
}
