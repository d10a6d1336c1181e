//! The GPUs of this node, read through NVML. The only file that uses `nvml-wrapper`.
//!
//! Everything is keyed on UUIDs: NVML's indices change between boots and its handles die with a MIG
//! instance, so devices are looked up anew for each sample. The library is opened at the first
//! sample and again after the driver was reloaded, so a missing driver, or one in the middle of an
//! upgrade, costs samples and no restart.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::PathBuf;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

use super::probe::{Probe, ProbeError, ProcessSampling, Sample};
use super::processes::PodsByProcess;
use crate::packing::units::Timestamp;
use crate::report::{DeviceReport, DeviceUse, Kind, ProcessUse};

/// What is loaded unless a path is given; the loader's search path decides where from.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// How often a list is read anew that outgrew its buffer while it was being read.
const LIST_ATTEMPTS: usize = 3;

/// Reads the GPUs of this node.
pub struct NvmlProbe {
    /// The library to load.
    library: PathBuf,
    /// Finds the pod of a process.
    pods: PodsByProcess,
    /// The library while it is open.
    nvml: Option<Nvml>,
    /// Devices as they were last read well, by UUID: what a lost device is reported as.
    known: BTreeMap<String, DeviceReport>,
}

/// How a failed call is to be taken.
enum Trouble {
    /// The driver cannot say; the rest can be believed.
    Unsupported,
    /// This device cannot be used now.
    Device,
    /// Nothing can be read until the library is opened anew.
    Library(ProbeError),
}

/// What one sweep over the devices found.
#[derive(Default)]
struct Sweep {
    /// Devices that answered.
    inventory: Vec<DeviceReport>,
    /// Their use.
    uses: Vec<DeviceUse>,
    /// How many devices did not answer; they may be known ones.
    unreadable: usize,
}

impl NvmlProbe {
    /// A probe that loads `library` (NVIDIA's own where none is named) at the first sample.
    pub fn new(library: Option<PathBuf>, pods: PodsByProcess) -> Self {
        let library = library.unwrap_or_else(|| PathBuf::from(LIBRARY));
        Self { library, pods, nvml: None, known: BTreeMap::new() }
    }

    /// Opens the library.
    fn open(&self) -> Result<Nvml, ProbeError> {
        let path: &OsStr = self.library.as_os_str();
        let nvml = Nvml::builder().lib_path(path).init().map_err(|error| match error {
            NvmlError::LibloadingError(cause) => ProbeError::LibraryMissing {
                library: self.library.clone(),
                cause: cause.to_string(),
            },
            NvmlError::LibraryNotFound => ProbeError::LibraryMissing {
                library: self.library.clone(),
                cause: error.to_string(),
            },
            error => library_error("start", &error),
        })?;
        if nvml.lib().nvmlShutdown.is_err() {
            // The wrapper calls it at the end, and panics when it is not there.
            std::mem::forget(nvml);
            return Err(ProbeError::DriverTooOld { cause: "nvmlShutdown".to_owned() });
        }
        Ok(nvml)
    }

    /// Reports the known devices that did not answer as unhealthy, and remembers the others.
    fn settle(&mut self, mut sweep: Sweep) -> Sample {
        sweep.distrust_duplicates();
        let seen: BTreeSet<&str> =
            sweep.inventory.iter().map(|device| device.uuid.as_str()).collect();
        let mut missing: Vec<DeviceReport> = Vec::new();
        if sweep.unreadable > 0 {
            let unseen = self.known.values().filter(|known| !seen.contains(known.uuid.as_str()));
            missing.extend(unseen.cloned().map(|known| DeviceReport { healthy: false, ..known }));
        }
        sweep.uses.extend(missing.iter().map(|device| DeviceUse {
            uuid: device.uuid.clone(),
            used_mib: None,
            busy_percent: None,
            healthy: false,
            processes: None,
        }));
        sweep.inventory.extend(missing);
        self.known = sweep.inventory.iter().map(|it| (it.uuid.clone(), it.clone())).collect();
        sweep.inventory.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        let unreadable = sweep.unreadable;
        Sample { inventory: sweep.inventory.into(), uses: sweep.uses, unreadable }
    }
}

impl Sweep {
    /// Keeps one of several devices that answer with the same UUID, as unhealthy: it cannot be told
    /// which of them a container would get.
    fn distrust_duplicates(&mut self) {
        let mut seen = BTreeSet::new();
        let mut twice = BTreeSet::new();
        self.inventory.retain(|device| {
            let is_new = seen.insert(device.uuid.clone());
            if !is_new {
                twice.insert(device.uuid.clone());
            }
            is_new
        });
        for device in self.inventory.iter_mut().filter(|device| twice.contains(&device.uuid)) {
            device.healthy = false;
        }
        let mut seen = BTreeSet::new();
        self.uses.retain(|device| seen.insert(device.uuid.clone()));
        for device in self.uses.iter_mut().filter(|device| twice.contains(&device.uuid)) {
            (device.healthy, device.processes) = (false, None);
        }
    }
}

impl Probe for NvmlProbe {
    fn sample(&mut self, processes: ProcessSampling, _: Timestamp) -> Result<Sample, ProbeError> {
        let nvml = match self.nvml.take() {
            Some(open) => open,
            None => self.open()?,
        };
        let sweep = Sweeper { nvml: &nvml, pods: &self.pods, processes }.sweep()?;
        // Kept only now: after an error of the whole library it is closed, and opened anew.
        self.nvml = Some(nvml);
        Ok(self.settle(sweep))
    }
}

/// One walk over all devices.
struct Sweeper<'a> {
    /// The open library.
    nvml: &'a Nvml,
    /// Finds the pod of a process.
    pods: &'a PodsByProcess,
    /// Whether to list processes.
    processes: ProcessSampling,
}

impl Sweeper<'_> {
    /// Reads all devices that answer.
    fn sweep(&self) -> Result<Sweep, ProbeError> {
        let count = self.nvml.device_count();
        let count = count.map_err(|error| library_error("count the GPUs", &error))?;
        let mut sweep = Sweep::default();
        for position in 0..count {
            let gpu = self.nvml.device_by_index(position);
            match required(gpu).and_then(|gpu| self.gpu(&gpu, position, &mut sweep)) {
                Ok(()) => {}
                Err(Trouble::Library(error)) => return Err(error),
                Err(Trouble::Unsupported | Trouble::Device) => sweep.unreadable += 1,
            }
        }
        Ok(sweep)
    }

    /// Reads one GPU and, where it is in MIG mode, its instances.
    fn gpu(&self, gpu: &Device<'_>, position: u32, sweep: &mut Sweep) -> Result<(), Trouble> {
        let uuid = required(gpu.uuid())?;
        let model = required(gpu.name())?;
        let index = unless_unsupported(gpu.index())?.unwrap_or(position);
        let in_mig_mode = unless_unsupported(gpu.mig_mode())?.is_some_and(|mode| mode.current == 1);
        let kind = if in_mig_mode { Kind::MigParent } else { Kind::Gpu };
        let report = DeviceReport {
            uuid: uuid.clone(),
            index,
            model,
            memory_mib: 0,
            reserved_mib: 0,
            kind,
            parent: None,
            profile: None,
            healthy: true,
        };
        self.push(gpu, report, sweep)?;
        if in_mig_mode {
            self.instances(gpu, &uuid, index, sweep)?;
        }
        Ok(())
    }

    /// Reads the MIG instances of the GPU `parent`.
    fn instances(
        &self,
        gpu: &Device<'_>,
        parent: &str,
        index: u32,
        sweep: &mut Sweep,
    ) -> Result<(), Trouble> {
        // The most there can be, not how many there are: gaps answer "not found".
        let most = unless_unsupported(gpu.mig_device_count())?.unwrap_or(0);
        for position in 0..most {
            let instance = match gpu.mig_device_by_index(position) {
                Err(NvmlError::NotFound | NvmlError::InvalidArg) => continue,
                other => required(other),
            };
            match instance.and_then(|instance| self.instance(&instance, parent, index, sweep)) {
                Ok(()) => {}
                Err(Trouble::Library(error)) => return Err(Trouble::Library(error)),
                Err(Trouble::Unsupported | Trouble::Device) => sweep.unreadable += 1,
            }
        }
        Ok(())
    }

    /// Reads one MIG instance; its name is that of the GPU followed by ` MIG <profile>`.
    fn instance(
        &self,
        instance: &Device<'_>,
        parent: &str,
        index: u32,
        sweep: &mut Sweep,
    ) -> Result<(), Trouble> {
        let uuid = required(instance.uuid())?;
        let name = required(instance.name())?;
        let (model, profile) = name.rsplit_once(" MIG ").ok_or(Trouble::Device)?;
        let report = DeviceReport {
            uuid,
            index,
            model: model.to_owned(),
            memory_mib: 0,
            reserved_mib: 0,
            kind: Kind::MigInstance,
            parent: Some(parent.to_owned()),
            profile: Some(profile.to_owned()),
            healthy: true,
        };
        self.push(instance, report, sweep)
    }

    /// Reads memory and use of one device and adds both to the sweep.
    fn push(
        &self,
        device: &Device<'_>,
        mut report: DeviceReport,
        sweep: &mut Sweep,
    ) -> Result<(), Trouble> {
        let memory = match required(device.memory_info()) {
            Err(Trouble::Unsupported) => None,
            other => Some(other?),
        };
        // Parts with unified memory have none of their own: nothing can be shared there.
        report.healthy = memory.is_some();
        report.memory_mib = memory.as_ref().map_or(0, |memory| memory.total / BYTES_PER_MIB);
        report.reserved_mib =
            memory.as_ref().map_or(0, |memory| memory.reserved.div_ceil(BYTES_PER_MIB));
        let busy_percent = match report.kind {
            Kind::Gpu => unless_unsupported(device.utilization_rates())?.map(|rates| rates.gpu),
            Kind::MigParent | Kind::MigInstance => None,
        };
        let processes = match (self.processes, report.kind) {
            // A parent lists its instances' processes once more.
            (ProcessSampling::Skip, _) | (ProcessSampling::List, Kind::MigParent) => None,
            (ProcessSampling::List, Kind::Gpu | Kind::MigInstance) => self.processes_on(device)?,
        };
        sweep.uses.push(DeviceUse {
            uuid: report.uuid.clone(),
            used_mib: memory.map(|memory| memory.used.div_ceil(BYTES_PER_MIB)),
            busy_percent: busy_percent.and_then(|percent| u8::try_from(percent.min(100)).ok()),
            healthy: report.healthy,
            processes,
        });
        sweep.inventory.push(report);
        Ok(())
    }

    /// All processes on a device, whatever they do there, each once; none where the driver cannot
    /// list the compute processes.
    fn processes_on(&self, device: &Device<'_>) -> Result<Option<Vec<ProcessUse>>, Trouble> {
        let Some(compute) = list(|| device.running_compute_processes())? else {
            return Ok(None);
        };
        let mps = list(|| device.mps_running_compute_processes())?.unwrap_or_default();
        let graphics = list(|| device.running_graphics_processes())?.unwrap_or_default();
        let mut by_pid: BTreeMap<u32, Option<u64>> = BTreeMap::new();
        for process in compute.into_iter().chain(mps).chain(graphics) {
            let used = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes.div_ceil(BYTES_PER_MIB)),
                UsedGpuMemory::Unavailable => None,
            };
            // The same process in two lists has its whole memory in both: the greater one counts,
            // and a known amount is greater than an unknown one.
            let known = by_pid.entry(process.pid).or_insert(used);
            *known = used.max(*known);
        }
        let processes = by_pid.into_iter().map(|(pid, memory_mib)| ProcessUse {
            pid,
            pod_uid: self.pods.pod_of(pid).map(|uid| uid.to_string()),
            memory_mib,
        });
        Ok(Some(processes.collect()))
    }
}

/// NVML counts bytes.
const BYTES_PER_MIB: u64 = 1 << 20;

/// A list of processes; read again when it grew between NVML's count and its answer.
fn list(
    read: impl Fn() -> Result<Vec<ProcessInfo>, NvmlError>,
) -> Result<Option<Vec<ProcessInfo>>, Trouble> {
    for _ in 1..LIST_ATTEMPTS {
        match read() {
            Err(NvmlError::InsufficientSize(_)) => {}
            other => return unless_unsupported(other),
        }
    }
    match read() {
        // A list that will not hold still is no sign of a broken device.
        Err(NvmlError::InsufficientSize(_)) => Ok(None),
        other => unless_unsupported(other),
    }
}

/// The answer, or none where the driver cannot say.
fn unless_unsupported<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, Trouble> {
    match answer.map_err(trouble) {
        Ok(value) => Ok(Some(value)),
        Err(Trouble::Unsupported) => Ok(None),
        Err(other) => Err(other),
    }
}

/// The answer of a call without which no device can be reported.
fn required<T>(answer: Result<T, NvmlError>) -> Result<T, Trouble> {
    answer.map_err(|error| match error {
        NvmlError::FailedToLoadSymbol(cause) => {
            Trouble::Library(ProbeError::DriverTooOld { cause })
        }
        other => trouble(other),
    })
}

/// How a failed call is to be taken.
fn trouble(error: NvmlError) -> Trouble {
    match error {
        NvmlError::NotSupported
        | NvmlError::NoPermission
        | NvmlError::NoData
        | NvmlError::FunctionNotFound
        | NvmlError::FailedToLoadSymbol(_)
        // Argument of an unknown version; deprecated.
        | NvmlError::UnexpectedVariant(25 | 26) => Trouble::Unsupported,
        NvmlError::Uninitialized
        | NvmlError::DriverNotLoaded
        | NvmlError::LibRmVersionMismatch
        | NvmlError::LibraryNotFound => Trouble::Library(library_error("read the GPUs", &error)),
        // Lost, needs a reset, interrupt trouble, "unknown", and whatever a later driver invents.
        _ => Trouble::Device,
    }
}

/// A failure of the whole library, with its mend.
fn library_error(what: &'static str, error: &NvmlError) -> ProbeError {
    match error {
        NvmlError::DriverNotLoaded => ProbeError::DriverNotLoaded,
        NvmlError::LibRmVersionMismatch => ProbeError::DriverMismatch,
        NvmlError::FailedToLoadSymbol(cause) => ProbeError::DriverTooOld { cause: cause.clone() },
        other => ProbeError::Driver { what, cause: other.to_string() },
    }
}

impl std::fmt::Debug for NvmlProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NvmlProbe")
            .field("library", &self.library)
            .field("is_open", &self.nvml.is_some())
            .field("devices", &self.known.len())
            .finish_non_exhaustive()
    }
}
