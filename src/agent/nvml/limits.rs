//! Memory limits of control groups, read back from the driver (r615 and newer). The bindings know nothing
//! of the call, so its symbol is looked up in the library once more; the loader counts who has it open.
//!
//! Safety: the symbol has the type of NVIDIA's reference (CUDA 13.4); handles come from the same library
//! and are only handed back to it; the text and the structure are locals that outlive the call, and the
//! structure is the first and only version of it, 32 bytes.

#![expect(unsafe_code, reason = "a C function of NVML; see above")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, c_char};
use std::path::Path;

use libloading::Library;
use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

use crate::agent::processes::pods::PodsByProcess;
use crate::hardware::device::MAX_DEVICE_MEMORY;
use crate::report::wire::{ProcessUse, TenantReport};

/// What NVML writes where a control group has no limit.
const UNLIMITED: u64 = u64::MAX;

/// `nvmlMemoryLimits_v1_t` as it is read.
#[repr(C)]
struct Limits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

type Read = unsafe extern "C" fn(nvmlDevice_t, *mut Limits) -> nvmlReturn_t;

/// The call, where the driver has it.
pub(crate) struct MemoryLimits {
    read: Read,
    /// Keeps the symbol loaded.
    _library: Library,
}

impl MemoryLimits {
    /// Looks the call up in the library that is open; none where the driver is older.
    pub(crate) fn find(library: &Path) -> Option<Self> {
        unsafe {
            let library = Library::new(library).ok()?;
            let read = *library.get::<Read>(b"nvmlDeviceGetMemoryLimits_v1\0").ok()?;
            Some(Self { read, _library: library })
        }
    }

    /// Bytes of a GPU's memory that the processes of a control group are held to; none: no limit.
    ///
    /// # Errors
    /// What the driver says, for instance that it has no limits here.
    pub(crate) fn hard(&self, gpu: &Device<'_>, group: &str) -> Result<Option<u64>, NvmlError> {
        let group = CString::new(group).map_err(|_| NvmlError::InvalidArg)?;
        let mut limits = Limits { name_space: group.as_ptr(), soft: 0, hard: UNLIMITED, used: 0 };
        nvml_try(unsafe { (self.read)(gpu.handle(), &raw mut limits) })?;
        Ok((limits.hard != UNLIMITED).then_some(limits.hard))
    }
}

/// The processes of a device.
pub(crate) struct Listed {
    /// Each once.
    pub(crate) processes: Vec<ProcessUse>,
    /// Those of them that are clients of MPS.
    pub(crate) mps_clients: BTreeSet<u32>,
    /// Percent of the time since the last list in which kernels of each process ran, those that had none left
    /// out; none where the driver does not say it.
    pub(crate) busy: Option<BTreeMap<u32, u32>>,
}

/// What holds a process, laxer ones later.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Hold {
    /// To so many bytes.
    To(u64),
    /// It cannot be read.
    Unknown,
    /// By nothing: the driver knows its control groups, and that they have no limit.
    Not,
}

impl Hold {
    /// The least limit of a process's control groups.
    fn of(groups: &[String], read: impl Fn(&str) -> Option<Option<u64>>) -> Self {
        let told: Vec<Option<Option<u64>>> = groups.iter().map(|group| read(group)).collect();
        match told.iter().flatten().flatten().min() {
            Some(bytes) => Self::To(*bytes),
            None if told.is_empty() || told.contains(&None) => Self::Unknown,
            None => Self::Not,
        }
    }
}

/// What holds a pod that has processes on a device.
struct Held {
    /// What the driver holds each container of it to.
    containers: BTreeMap<String, Hold>,
    /// Whether a process of it is a client of MPS.
    is_mps_client: bool,
    /// What its processes are held to by MPS, in MiB; none when one is held by nothing.
    mps_mib: Option<u64>,
    /// Percent of the time in which its kernels ran.
    busy: u32,
}

/// What is told of the pods that have processes on a device: those of which anything is.
///
/// A pod is held to the sum of what its containers are held to, and only if each of its processes is: one
/// without a limit could take everything. A container is held to the least limit of its control groups.
/// MPS holds each client to its own limit, so a pod is held to the sum of its processes' limits; what a
/// client of it may take is told by `mps_mib`.
pub(crate) fn tenants(
    (limits, device): (Option<&MemoryLimits>, &Device<'_>),
    listed: &Listed,
    pods: &PodsByProcess,
    mps_mib: impl Fn(u32) -> Option<u64>,
) -> Vec<TenantReport> {
    let mut by_pod: BTreeMap<&str, Held> = BTreeMap::new();
    let unheld =
        || Held { containers: BTreeMap::new(), is_mps_client: false, mps_mib: Some(0), busy: 0 };
    for process in &listed.processes {
        let Some(pod) = &process.pod_uid else { continue };
        let held = by_pod.entry(pod).or_insert_with(unheld);
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
        // Without a container's name all are one, of which nothing is known.
        let container = held.containers.entry(groups.first().cloned().unwrap_or_default());
        container.and_modify(|known| *known = hold.max(*known)).or_insert(hold);
    }
    let believable = |mib: &u64| *mib <= MAX_DEVICE_MEMORY.mib();
    let reports = by_pod.into_iter().map(|(pod, held)| {
        let bytes = |hold: &Hold| match hold {
            Hold::To(bytes) => Some(*bytes),
            Hold::Unknown | Hold::Not => None,
        };
        let holds = held.containers.values();
        let sum = holds.clone().try_fold(0_u64, |sum, hold| sum.checked_add(bytes(hold)?));
        let told = sum.map(|bytes| bytes.div_ceil(1 << 20));
        let limit_mib = told.filter(believable);
        let is_absurd = told != limit_mib;
        TenantReport {
            pod_uid: pod.to_owned(),
            limit_mib,
            is_unlimited: is_absurd || holds.clone().any(|hold| *hold == Hold::Not),
            is_mps_client: held.is_mps_client,
            mps_limit_mib: held.mps_mib.filter(believable),
            busy_percent: listed.busy.as_ref().and_then(|_| u8::try_from(held.busy).ok()),
        }
    });
    let is_told = |it: &TenantReport| {
        it.limit_mib.is_some() || it.is_unlimited || it.is_mps_client || it.busy_percent.is_some()
    };
    reports.filter(is_told).collect()
}
