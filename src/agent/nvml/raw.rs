//! Calls that `nvml-wrapper` lacks or breaks, through its table of symbols. Each function is safe to
//! call. The only other unsafe code of the product is in `raw_mig`, `cgroup_limits` and `library`.
//!
//! What is wrong with the wrapper's own (0.13): process lists take two calls and fail if a process
//! appears between them. Events lose the GPU instance, and unknown kinds of events. The kind of an
//! NVLink's other end is always *unknown*. Ids and positions of MIG instances are missing.
//!
//! Safety, for all: symbols come from the open library that `nvml` keeps loaded, with the types of
//! NVIDIA's header; handles come from the same library and are only passed back to it, which checks
//! them; every pointer leads to a local that outlives the call and has the size that the call gets.

#![expect(unsafe_code, reason = "the C functions of NVML; see above")]

use std::ffi::CStr;
use std::fmt::Display;
use std::mem;

use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlDeviceAddressingMode_t,
    nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_ATS as ATS,
    nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_HMM as HMM,
    nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_NONE as OFF, nvmlEventSet_t,
    nvmlEventTypeGpuRecoveryAction, nvmlEventTypeGpuUnavailableError,
    nvmlEventTypeXidCriticalError, nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
    nvmlProcessInfo_t,
};

use crate::gpu::health::GpuEvent;
use wire::api::condition::AddressingMode;
use wire::api::state::MigPlacement;
use wire::report::report_limits::MAX_PROCESSES_PER_DEVICE;

/// Room for processes at first: more than a GPU in use has.
const PROCESSES_EXPECTED: usize = 256;

/// Most processes that are read: the bound of a report for one device.
const PROCESSES_MAX: usize = MAX_PROCESSES_PER_DEVICE;

/// How often a list that outgrew its buffer is read again.
const LIST_ATTEMPTS: usize = 3;

/// NVML's value for an unknown amount: all bits set.
const NOT_AVAILABLE: u64 = u64::MAX;

/// NVML's value for "no instance".
const NO_INSTANCE: u32 = u32::MAX;

/// How long one read of events waits. Zero might mean "forever" for some driver; the documentation
/// is silent about it.
const EVENT_WAIT_MS: u32 = 1;

/// Most events that are read at once; the rest follows the next time.
const EVENTS_MAX: usize = 64;

/// Room for a UUID: NVML's own constant for the longest says 96.
const UUID_BYTES: usize = 96;

/// The kinds of events to register: an Xid, a GPU that is not available, a new recovery action.
/// Memory errors are not among them: those that matter come as Xids too.
const XID: u64 = nvmlEventTypeXidCriticalError as u64;
const UNAVAILABLE: u64 = nvmlEventTypeGpuUnavailableError as u64;
const RECOVERY: u64 = nvmlEventTypeGpuRecoveryAction as u64;

/// A symbol of the library, or the error if the library lacks it.
pub(crate) fn symbol<F: Copy, E: Display>(symbol: &Result<F, E>) -> Result<F, NvmlError> {
    match symbol {
        Ok(function) => Ok(*function),
        Err(error) => Err(NvmlError::FailedToLoadSymbol(error.to_string())),
    }
}

/// The lists of processes of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProcessList {
    Compute,
    /// Compute processes that are clients of MPS.
    Mps,
    Graphics,
}

/// One process on a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process {
    /// Its id on the host.
    pub(crate) pid: u32,
    /// Its memory in bytes; `None` if the driver does not report it.
    pub(crate) used_bytes: Option<u64>,
}

impl Process {
    fn from_nvml(info: nvmlProcessInfo_t) -> Self {
        let used = info.usedGpuMemory;
        Self { pid: info.pid, used_bytes: (used != NOT_AVAILABLE).then_some(used) }
    }
}

/// Reads one list of processes of a device, in one call if it has the usual length.
///
/// # Errors
/// `InsufficientSize` for a list that is longer than any report, or that keeps growing.
pub(crate) fn processes(
    nvml: &Nvml,
    device: &Device<'_>,
    list: ProcessList,
) -> Result<Vec<Process>, NvmlError> {
    let lib = nvml.lib();
    let read = match list {
        ProcessList::Compute => symbol(&lib.nvmlDeviceGetComputeRunningProcesses_v3),
        ProcessList::Mps => symbol(&lib.nvmlDeviceGetMPSComputeRunningProcesses_v3),
        ProcessList::Graphics => symbol(&lib.nvmlDeviceGetGraphicsRunningProcesses_v3),
    }?;
    let mut room = PROCESSES_EXPECTED;
    for _ in 0..LIST_ATTEMPTS {
        let empty: nvmlProcessInfo_t = unsafe { mem::zeroed() };
        let mut buffer = vec![empty; room];
        let mut count = u32::try_from(room).unwrap_or(u32::MAX);
        let code = unsafe { read(device.handle(), &raw mut count, buffer.as_mut_ptr()) };
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        match nvml_try(code) {
            Ok(()) => {
                buffer.truncate(count);
                return Ok(buffer.into_iter().map(Process::from_nvml).collect());
            }
            // More processes may come before the next call.
            Err(NvmlError::InsufficientSize(_)) if room < PROCESSES_MAX => {
                room = count.saturating_add(PROCESSES_EXPECTED).clamp(room, PROCESSES_MAX);
            }
            Err(error) => return Err(error),
        }
    }
    Err(NvmlError::InsufficientSize(None))
}

/// Whether the NVLink `link` of a device leads to a switch.
pub(crate) fn leads_to_switch(
    nvml: &Nvml,
    device: &Device<'_>,
    link: u32,
) -> Result<bool, NvmlError> {
    let read = symbol(&nvml.lib().nvmlDeviceGetNvLinkRemoteDeviceType)?;
    let mut kind = 0;
    nvml_try(unsafe { read(device.handle(), link, &raw mut kind) })?;
    Ok(kind == nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH)
}

/// The id of the GPU instance that a MIG device belongs to.
pub(crate) fn gpu_instance_id(nvml: &Nvml, instance: &Device<'_>) -> Result<u32, NvmlError> {
    let read = symbol(&nvml.lib().nvmlDeviceGetGpuInstanceId)?;
    let mut id = 0;
    nvml_try(unsafe { read(instance.handle(), &raw mut id) })?;
    Ok(id)
}

/// Position of the GPU instance `id` on `gpu`. Drivers require privileges for it.
pub(crate) fn slot(nvml: &Nvml, gpu: &Device<'_>, id: u32) -> Result<MigPlacement, NvmlError> {
    let find = symbol(&nvml.lib().nvmlDeviceGetGpuInstanceById)?;
    let read = symbol(&nvml.lib().nvmlGpuInstanceGetInfo)?;
    unsafe {
        let mut instance = mem::zeroed();
        nvml_try(find(gpu.handle(), id, &raw mut instance))?;
        let mut info = mem::zeroed();
        nvml_try(read(instance, &raw mut info))?;
        let place = info.placement;
        Ok(MigPlacement { start: place.start, size: place.size })
    }
}

/// How a device addresses the memory of its host. Drivers from R550 on say so.
pub(crate) fn addressing_mode(
    nvml: &Nvml,
    device: &Device<'_>,
) -> Result<AddressingMode, NvmlError> {
    let read = symbol(&nvml.lib().nvmlDeviceGetAddressingMode)?;
    let size = u32::try_from(size_of::<nvmlDeviceAddressingMode_t>()).unwrap_or(0);
    let mut mode = nvmlDeviceAddressingMode_t { version: size | 1 << 24, value: 0 };
    nvml_try(unsafe { read(device.handle(), &raw mut mode) })?;
    Ok(match mode.value {
        OFF => AddressingMode::Off,
        HMM => AddressingMode::Hmm,
        ATS => AddressingMode::Ats,
        _ => AddressingMode::Other,
    })
}

/// Identity of the device behind a handle; the same device has the same number.
pub(crate) fn identity(device: &Device<'_>) -> usize {
    unsafe { device.handle() }.addr()
}

/// The device of an event, by a handle that other calls may never have returned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventDevice(nvmlDevice_t);

impl EventDevice {
    /// As [`identity`] has it.
    pub(crate) fn identity(self) -> usize {
        self.0.addr()
    }

    /// Its UUID.
    pub(crate) fn uuid(self, nvml: &Nvml) -> Result<String, NvmlError> {
        let read = symbol(&nvml.lib().nvmlDeviceGetUUID)?;
        let mut buffer = [0_u8; UUID_BYTES];
        let room = u32::try_from(UUID_BYTES).unwrap_or(0);
        nvml_try(unsafe { read(self.0, buffer.as_mut_ptr().cast(), room) })?;
        let text = CStr::from_bytes_until_nul(&buffer).ok().and_then(|text| text.to_str().ok());
        text.map(str::to_owned).ok_or(NvmlError::NoData)
    }
}

/// Events of devices. [`EventSet::free`] it before the library is closed.
#[derive(Debug)]
pub(crate) struct EventSet(nvmlEventSet_t);

// SAFETY: NVML may be called from any thread, and the set is only ever passed back to it.
unsafe impl Send for EventSet {}

impl EventSet {
    /// An empty set.
    pub(crate) fn create(nvml: &Nvml) -> Result<Self, NvmlError> {
        let lib = nvml.lib();
        let create = symbol(&lib.nvmlEventSetCreate)?;
        // Without these two functions it could be filled, but neither read nor freed.
        symbol(&lib.nvmlEventSetFree)?;
        symbol(&lib.nvmlEventSetWait_v2)?;
        let mut set = std::ptr::null_mut();
        nvml_try(unsafe { create(&raw mut set) })?;
        Ok(Self(set))
    }

    /// Registers the supported health events of a device.
    pub(crate) fn register(&self, nvml: &Nvml, device: &Device<'_>) -> Result<(), NvmlError> {
        let lib = nvml.lib();
        let (ask, kinds_of) = (
            symbol(&lib.nvmlDeviceRegisterEvents)?,
            symbol(&lib.nvmlDeviceGetSupportedEventTypes)?,
        );
        let mut kinds = 0;
        nvml_try(unsafe { kinds_of(device.handle(), &raw mut kinds) })?;
        kinds &= XID | UNAVAILABLE | RECOVERY;
        if kinds == 0 {
            return Err(NvmlError::NotSupported);
        }
        nvml_try(unsafe { ask(device.handle(), kinds, self.0) })
    }

    /// The events since the last call, each with its device.
    pub(crate) fn read(&self, nvml: &Nvml) -> Result<Vec<(EventDevice, GpuEvent)>, NvmlError> {
        let wait = symbol(&nvml.lib().nvmlEventSetWait_v2)?;
        let mut events = Vec::new();
        for _ in 0..EVENTS_MAX {
            let data = unsafe {
                let mut data = mem::zeroed();
                match nvml_try(wait(self.0, &raw mut data, EVENT_WAIT_MS)) {
                    Ok(()) => data,
                    Err(NvmlError::Timeout) => break,
                    // They must not be lost with the set.
                    Err(_) if !events.is_empty() => break,
                    Err(error) => return Err(error),
                }
            };
            let instance = (data.gpuInstanceId != NO_INSTANCE).then_some(data.gpuInstanceId);
            let event = match data.eventType {
                XID => GpuEvent::Xid { number: data.eventData, instance },
                UNAVAILABLE => GpuEvent::Unavailable,
                RECOVERY => GpuEvent::RecoveryChanged,
                // Its data means something else: the number of a memory error is no Xid.
                _ => continue,
            };
            events.push((EventDevice(data.device), event));
        }
        Ok(events)
    }

    /// Frees the set.
    pub(crate) fn free(self, nvml: &Nvml) {
        if let Ok(free) = symbol(&nvml.lib().nvmlEventSetFree) {
            // A failure needs no handling: the library closes next.
            let _ = unsafe { free(self.0) };
        }
    }
}
