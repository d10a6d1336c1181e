//! Memory limits of control groups, read from the driver (r615 and newer) and given to it. The bindings
//! lack these calls, so their symbols are looked up in the library again; the loader counts how often it is open.
//!
//! Safety: the symbols have the types of NVIDIA's reference (CUDA 13.4). Handles come from the same
//! library and are only passed back to it. The texts and the structures are locals that outlive the
//! calls, and the structures are their first and only versions, of 32 and 24 bytes.

#![expect(unsafe_code, reason = "C functions of NVML; see above")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_char};
use std::path::Path;

use libloading::Library;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

use crate::gpu::lent_limits::{GroupLimit, LimitDriver, SetLimit};
use crate::nvml::library::Handles;
use crate::processes::pods::PodsByProcess;
use wire::ids::MAX_DEVICE_MEMORY;
use wire::report::bodies::{ProcessUse, TenantReport};

/// NVML's value for a control group without a limit.
const UNLIMITED: u64 = u64::MAX;

/// `nvmlMemoryLimits_v1_t`, for reading.
#[repr(C)]
struct ReadLimits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

/// `nvmlSetMemoryLimits_v1_t`, for setting.
#[repr(C)]
struct NewLimits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
}

type ReadCall = unsafe extern "C" fn(nvmlDevice_t, *mut ReadLimits) -> nvmlReturn_t;

type SetCall = unsafe extern "C" fn(nvmlDevice_t, *const NewLimits) -> nvmlReturn_t;

/// The calls, if the driver has them.
pub(crate) struct MemoryLimits {
    read: ReadCall,
    set: Option<SetCall>,
    _library: Library,
}

impl MemoryLimits {
    /// Looks up the call in the open library; `None` if the driver is older.
    pub(crate) fn find(library: &Path) -> Option<Self> {
        unsafe {
            let library = Library::new(library).ok()?;
            let read = *library.get::<ReadCall>(b"nvmlDeviceGetMemoryLimits_v1\0").ok()?;
            let set =
                library.get::<SetCall>(b"nvmlDeviceSetMemoryLimits_v1\0").ok().map(|set| *set);
            Some(Self { read, set, _library: library })
        }
    }

    /// The limit in bytes of a control group on a GPU; `None` inside: no limit.
    ///
    /// # Errors
    /// The error of the driver, for instance that it has no limits here.
    pub(crate) fn hard(&self, gpu: &Device<'_>, group: &str) -> Result<Option<u64>, NvmlError> {
        self.read(gpu, group).map(|found| found.limit)
    }

    /// The limit of a control group on a GPU, and what it uses.
    ///
    /// # Errors
    /// As for [`MemoryLimits::hard`].
    pub(crate) fn read(&self, gpu: &Device<'_>, group: &str) -> Result<GroupLimit, NvmlError> {
        let group = CString::new(group).map_err(|_| NvmlError::InvalidArg)?;
        let mut limits =
            ReadLimits { name_space: group.as_ptr(), soft: 0, hard: UNLIMITED, used: 0 };
        match nvml_try(unsafe { (self.read)(gpu.handle(), &raw mut limits) }) {
            // The call works, and this group has no limit.
            Err(NvmlError::NotFound) => return Ok(GroupLimit { limit: None, used: 0 }),
            answer => answer?,
        }
        let limit = (limits.hard != UNLIMITED).then_some(limits.hard);
        Ok(GroupLimit { limit, used: limits.used })
    }

    /// Whether the driver has the call that sets limits.
    pub(crate) fn can_set(&self) -> bool {
        self.set.is_some()
    }

    /// Sets the limit of a control group on a GPU, in bytes. The driver guarantees it nothing.
    ///
    /// # Errors
    /// The error of the driver, for instance that the agent may not.
    pub(crate) fn set(&self, gpu: &Device<'_>, group: &str, bytes: u64) -> Result<(), NvmlError> {
        let group = CString::new(group).map_err(|_| NvmlError::InvalidArg)?;
        let set = self.set.ok_or(NvmlError::NotSupported)?;
        let limits = NewLimits { name_space: group.as_ptr(), soft: 0, hard: bytes };
        nvml_try(unsafe { set(gpu.handle(), &raw const limits) })
    }
}

/// The open driver, which reads and sets the limits of control groups.
pub(crate) struct OpenDriver<'a> {
    pub(crate) nvml: &'a Nvml,
    pub(crate) handles: &'a Handles,
    pub(crate) limits: &'a MemoryLimits,
}

impl LimitDriver for OpenDriver<'_> {
    fn read(&self, gpu: &str, group: &str) -> Option<GroupLimit> {
        self.limits.read(&self.handles.named(self.nvml, gpu)?, group).ok()
    }

    fn set(&self, gpu: &str, group: &str, bytes: u64) -> SetLimit {
        let device = self.handles.named(self.nvml, gpu).ok_or(NvmlError::NotFound);
        match device.and_then(|device| self.limits.set(&device, group, bytes)) {
            Ok(()) => SetLimit::Done,
            Err(NvmlError::NoPermission | NvmlError::NotSupported) => SetLimit::Refused,
            Err(error) => {
                tracing::debug!(gpu, group, %error, "a limit of memory could not be set");
                SetLimit::Failed
            }
        }
    }
}

/// The processes of a device.
pub(crate) struct Listed {
    pub(crate) processes: Vec<ProcessUse>,
    /// Those that are clients of MPS.
    pub(crate) mps_clients: BTreeSet<u32>,
    /// Percent of the time since the last list in which kernels of each process ran; processes
    /// without any are left out. `None` if the driver does not report it.
    pub(crate) busy: Option<BTreeMap<u32, u32>>,
}

/// The limit of a process; laxer values are greater.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Hold {
    /// A number of bytes.
    To(u64),
    Unknown,
    /// None: the driver knows its control groups, and they have no limit.
    Not,
}

impl Hold {
    /// The least limit of a process's control groups.
    fn of(groups: &[String], read: impl Fn(&str) -> Option<Option<u64>>) -> Self {
        let limits: Vec<Option<Option<u64>>> = groups.iter().map(|group| read(group)).collect();
        match limits.iter().flatten().flatten().min() {
            Some(bytes) => Self::To(*bytes),
            None if limits.is_empty() || limits.contains(&None) => Self::Unknown,
            None => Self::Not,
        }
    }

    /// The number of bytes, if it is one.
    fn bytes(self) -> Option<u64> {
        match self {
            Self::To(bytes) => Some(bytes),
            Self::Unknown | Self::Not => None,
        }
    }
}

/// The limits of a pod with processes on a device.
struct PodLimits {
    /// The driver's limit of each container.
    containers: BTreeMap<String, Hold>,
    /// Whether a process of it is a client of MPS.
    is_mps_client: bool,
    /// The sum of its processes' MPS limits, in MiB; `None` if a process has none.
    mps_mib: Option<u64>,
    /// Percent of the time in which its kernels ran.
    busy: u32,
}

impl PodLimits {
    /// That of a pod before any of its processes is counted.
    fn without_processes() -> Self {
        Self { containers: BTreeMap::new(), is_mps_client: false, mps_mib: Some(0), busy: 0 }
    }
}

/// Reports about the pods with processes on a device, without empty ones.
///
/// The limit of a pod is the sum of its containers' limits, and exists only if each of its
/// processes has one: a process without a limit could take everything. The limit of a container is
/// the least one of its control groups. MPS limits each client on its own, so here a pod's limit is
/// the sum over its processes. `mps_mib` gives the limit of one client.
pub(crate) fn tenants(
    device: &Device<'_>,
    limits: Option<&MemoryLimits>,
    listed: &Listed,
    pods: &PodsByProcess,
    mps_mib: impl Fn(u32) -> Option<u64>,
) -> Vec<TenantReport> {
    let mut by_pod: BTreeMap<&str, PodLimits> = BTreeMap::new();
    for process in &listed.processes {
        let Some(pod) = &process.pod_uid else { continue };
        let held = by_pod.entry(pod).or_insert_with(PodLimits::without_processes);
        let is_client = listed.mps_clients.contains(&process.pid);
        held.is_mps_client |= is_client;
        let busy = listed.busy.as_ref().and_then(|busy| busy.get(&process.pid)).unwrap_or(&0);
        held.busy = held.busy.saturating_add(*busy).min(100);
        held.mps_mib = held
            .mps_mib
            .filter(|_| is_client)
            .and_then(|sum| sum.checked_add(mps_mib(process.pid)?));
        let groups = limits.map(|_| pods.groups_of(process.pid)).unwrap_or_default();
        let hold = Hold::of(&groups, |group| limits?.hard(device, group).ok());
        // Without a container's name all are one container with an unknown limit.
        let container = held.containers.entry(groups.first().cloned().unwrap_or_default());
        container.and_modify(|known| *known = hold.max(*known)).or_insert(hold);
    }
    let reports = by_pod.into_iter().map(|(pod, held)| {
        let holds = held.containers.values();
        let sum = holds.clone().try_fold(0_u64, |sum, hold| sum.checked_add(hold.bytes()?));
        let read = sum.map(|bytes| bytes.div_ceil(1 << 20));
        let limit_mib = read.filter(is_believable_mib);
        let is_absurd = read != limit_mib;
        TenantReport {
            pod_uid: pod.to_owned(),
            limit_mib,
            is_unlimited: is_absurd || holds.clone().any(|hold| *hold == Hold::Not),
            is_mps_client: held.is_mps_client,
            mps_limit_mib: held.mps_mib.filter(is_believable_mib),
            busy_percent: listed.busy.as_ref().and_then(|_| u8::try_from(held.busy).ok()),
        }
    });
    reports.filter(says_anything).collect()
}

/// Whether a device may have this limit.
fn is_believable_mib(mib: &u64) -> bool {
    *mib <= MAX_DEVICE_MEMORY.mib()
}

/// Whether a report says more than that the pod is there.
fn says_anything(tenant: &TenantReport) -> bool {
    tenant.limit_mib.is_some()
        || tenant.is_unlimited
        || tenant.is_mps_client
        || tenant.busy_percent.is_some()
}
