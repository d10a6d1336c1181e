//! A stand-in for NVIDIA's library: answers the calls of the agent, and those of NVIDIA's container
//! toolkit, from a scenario file.
//!
//! Test equipment. Built as an example, so that `cargo test` leaves `libfake_nvml.so` in
//! `target/<profile>/examples`, and loaded by the same `lib_path` as the real library. The scenario
//! (`scenario::Scenario` as JSON) is the file named by the environment variable
//! `FAKE_NVML_SCENARIO`, else `scenario.json` beside the library itself, so that a test copies the
//! library and has a scenario of its own. It is read again when it has changed: a test changes the
//! hardware below a running agent by replacing the file.
//!
//! While it is open, its process has the file `nvidiactl` beside the scenario open, as a process that keeps a
//! driver from being unloaded.
//!
//! It is strict where it matters: version words are checked, buffers are never overrun, counts are
//! answered in NVML's two steps, events come once, to registered sets, and not from before they
//! registered, and calls before `nvmlInit_v2` fail. What a caller without rights gets in MIG mode is in `rights`, what the
//! kernel shows of it in `kernel`, and what waits while a GPU changes in `busy`. A function that a driver lacks is not in the
//! copy of the library.

#![expect(unsafe_code, reason = "a C interface: symbols without mangling, pointers of the caller")]
#![expect(missing_docs, clippy::missing_safety_doc, reason = "nvml.h documents them")]

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fs::File;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use self::scenario::{Gpu, Process, Scenario};

mod busy;
pub mod events;
mod instances;
mod kernel;
pub mod limits;
pub mod making;
pub mod mig;
pub mod profile_of;
mod rights;
mod scenario;
pub mod topology;

const SUCCESS: c_uint = 0;
const UNINITIALIZED: c_uint = 1;
const INVALID_ARGUMENT: c_uint = 2;
const NOT_SUPPORTED: c_uint = 3;
const NO_PERMISSION: c_uint = 4;
const NOT_FOUND: c_uint = 6;
const INSUFFICIENT_SIZE: c_uint = 7;
const OPERATING_SYSTEM: c_uint = 17;
const ARGUMENT_VERSION_MISMATCH: c_uint = 25;
const UNKNOWN: c_uint = 999;

/// `nvmlMemory_v2_t`: 40 bytes, version 2.
const MEMORY_V2: c_uint = 40 | (2 << 24);

/// NVML's value for "not available".
const NOT_AVAILABLE: u64 = u64::MAX;

/// `nvmlMemory_v2_t`.
#[repr(C)]
pub struct Memory {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlUtilization_t`.
#[repr(C)]
pub struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
pub struct ProcessInfo {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// How often the library is initialised.
static STARTS: AtomicUsize = AtomicUsize::new(0);

/// The device file that is open while the library is.
static CONTROL: Mutex<Option<File>> = Mutex::new(None);

/// Answers a call, or fails as the scenario says.
fn answer(symbol: &str, call: impl FnOnce(&Scenario) -> Result<(), c_uint>) -> c_uint {
    if symbol != "nvmlInit_v2" && STARTS.load(Ordering::SeqCst) == 0 {
        return UNINITIALIZED;
    }
    let Some(scenario) = scenario::current() else { return UNKNOWN };
    if scenario.journal {
        scenario::write_line(symbol);
    }
    if let Some(delay) = scenario.delays_ms.get(symbol) {
        std::thread::sleep(Duration::from_millis(*delay));
    }
    if symbol != "nvmlShutdown"
        && let Some(code) = scenario.staleness()
    {
        return code;
    }
    match scenario.failures.get(symbol) {
        Some(code) => *code,
        None => call(&scenario).err().unwrap_or(SUCCESS),
    }
}

/// The part of a MIG device's handle by which it ends with the instance, above that of its place.
const OWN: usize = 40;

/// In handles of GPUs that only events have.
pub(crate) const NEW_HANDLE: usize = 1 << 60;

/// The handle of the MIG device with this UUID at a place.
fn instance_handle(place: usize, uuid: &str) -> usize {
    let sum = |sum: usize, byte: u8| sum.wrapping_mul(31).wrapping_add(usize::from(byte));
    (uuid.bytes().fold(0, sum) & 0xffff | 1) << OWN | place
}

/// The device of a handle: GPUs count from one in steps of 256, their instances in between.
fn device_of(scenario: &Scenario, handle: usize) -> Option<&Gpu> {
    let place = handle & ((1 << OWN) - 1);
    let gpu = scenario.gpus.get((place >> 8).wrapping_sub(1))?;
    match place & 0xff {
        0 => Some(gpu),
        number => {
            let instance = gpu.mig.as_ref()?.get(number - 1)?.as_ref()?;
            let is_it = place == handle || instance_handle(place, &instance.uuid) == handle;
            is_it.then_some(instance)
        }
    }
}

/// Answers a call about one device.
fn answer_for(
    symbol: &str,
    device: usize,
    call: impl FnOnce(&Gpu) -> Result<(), c_uint>,
) -> c_uint {
    answer_in(symbol, device, |_, device| call(device))
}

/// The same for a call that looks at the whole scenario, too.
fn answer_in(
    symbol: &str,
    device: usize,
    call: impl FnOnce(&Scenario, &Gpu) -> Result<(), c_uint>,
) -> c_uint {
    let position = ((device & ((1 << OWN) - 1)) >> 8).wrapping_sub(1);
    let _turn = busy::wait(symbol, position);
    answer(symbol, |scenario| {
        let device = device_of(scenario, device).ok_or(INVALID_ARGUMENT)?;
        match device.failures.get(symbol).or_else(|| device.failures.get("*")) {
            Some(code) => Err(*code),
            None => call(scenario, device),
        }
    })
}

/// Writes through a pointer of the caller.
unsafe fn put<T>(target: *mut T, value: T) -> Result<(), c_uint> {
    if target.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    unsafe { target.write(value) };
    Ok(())
}

/// Writes a text with its final zero into a buffer of the caller. Letters are one byte each, so that
/// a scenario can have bytes that are no text.
unsafe fn put_text(buffer: *mut c_char, length: c_uint, text: &str) -> Result<(), c_uint> {
    if buffer.is_null() || text.chars().count() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    for (offset, letter) in text.chars().chain(['\0']).enumerate() {
        let byte = u8::try_from(letter).unwrap_or(b'?');
        unsafe { buffer.add(offset).write(c_char::from_ne_bytes([byte])) };
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_uint {
    let code = answer("nvmlInit_v2", |_| Ok(()));
    // One step: another thread may shut down at the same time.
    let mut control = CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
    if code == SUCCESS && STARTS.fetch_add(1, Ordering::SeqCst) == 0 {
        let file = scenario::path().map(|path| path.with_file_name("nvidiactl"));
        *control = file.and_then(|file| File::create(file).ok());
    }
    code
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_uint {
    let code = answer("nvmlShutdown", |_| Ok(()));
    let less = |starts: usize| starts.checked_sub(1);
    let mut control = CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
    match STARTS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) {
        Ok(before) => {
            if before == 1 {
                *control = None;
            }
            code
        }
        Err(_) => UNINITIALIZED,
    }
}

/// The words for a return code, which the container toolkit puts into its errors. Works before the
/// start, too.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: c_uint) -> *const c_char {
    let words = match code {
        SUCCESS => c"Success",
        UNINITIALIZED => c"Uninitialized",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        NO_PERMISSION => c"Insufficient Permissions",
        NOT_FOUND => c"Not Found",
        instances::IN_USE => c"In use by another client",
        instances::INSUFFICIENT_RESOURCES => c"Insufficient Resources",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        OPERATING_SYSTEM => c"Operating System Error",
        ARGUMENT_VERSION_MISMATCH => c"Argument Version Mismatch",
        _ => c"Unknown Error",
    };
    words.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(text: *mut c_char, length: c_uint) -> c_uint {
    answer("nvmlSystemGetDriverVersion", |scenario| {
        let version = scenario.driver.as_deref().unwrap_or("580.95.05");
        unsafe { put_text(text, length, version) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> c_uint {
    answer("nvmlSystemGetCudaDriverVersion_v2", |scenario| unsafe {
        put(version, scenario.cuda.unwrap_or(13_000))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_uint {
    answer("nvmlDeviceGetCount_v2", |scenario| {
        let there = c_uint::try_from(scenario.gpus.len()).unwrap_or(0);
        unsafe { put(count, scenario.count.unwrap_or(there)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(
    index: c_uint,
    device: *mut usize,
) -> c_uint {
    let handle = (index as usize + 1) << 8;
    answer_for("nvmlDeviceGetHandleByIndex_v2", handle, |_| unsafe { put(device, handle) })
}

/// NVIDIA's container toolkit finds devices by UUID: GPUs, and instances of those in MIG mode.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByUUID(
    uuid: *const c_char,
    device: *mut usize,
) -> c_uint {
    answer("nvmlDeviceGetHandleByUUID", |scenario| {
        if uuid.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let uuid = unsafe { CStr::from_ptr(uuid) }.to_str().map_err(|_| INVALID_ARGUMENT)?;
        let handles = scenario.gpus.iter().zip(1_usize..).flat_map(|(gpu, number)| {
            let instances = gpu.mig.iter().flatten().zip(1..);
            let instances = instances.filter_map(|(it, at)| Some((it.as_ref()?, at)));
            let all = std::iter::once((gpu, 0)).chain(instances);
            all.map(move |(it, at)| match number << 8 | at {
                place if at == 0 => (it.uuid.as_str(), place),
                place => (it.uuid.as_str(), instance_handle(place, &it.uuid)),
            })
        });
        let mut found = handles.filter(|(known, _)| *known == uuid);
        unsafe { put(device, found.next().ok_or(NOT_FOUND)?.1) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(
    device: usize,
    text: *mut c_char,
    length: c_uint,
) -> c_uint {
    answer_for("nvmlDeviceGetUUID", device, |gpu| unsafe { put_text(text, length, &gpu.uuid) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(
    device: usize,
    text: *mut c_char,
    length: c_uint,
) -> c_uint {
    answer_for("nvmlDeviceGetName", device, |gpu| unsafe { put_text(text, length, &gpu.name) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetIndex(device: usize, index: *mut c_uint) -> c_uint {
    answer_for("nvmlDeviceGetIndex", device, |gpu| {
        let position = c_uint::try_from((device >> 8) - 1).unwrap_or(0);
        unsafe { put(index, gpu.index.unwrap_or(position)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: usize, memory: *mut Memory) -> c_uint {
    answer_for("nvmlDeviceGetMemoryInfo_v2", device, |gpu| {
        if memory.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        if unsafe { (*memory).version } != MEMORY_V2 {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        rights::may_read(gpu, device)?;
        let bytes = |mib: u64| (mib << 20) + gpu.odd_bytes;
        let (total, reserved) = (bytes(gpu.total_mib), bytes(gpu.reserved_mib));
        let used = bytes(gpu.used_mib);
        let free = total.saturating_sub(reserved).saturating_sub(used);
        unsafe { put(memory, Memory { version: MEMORY_V2, total, reserved, free, used }) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUtilizationRates(
    device: usize,
    rates: *mut Utilization,
) -> c_uint {
    answer_for("nvmlDeviceGetUtilizationRates", device, |gpu| {
        if gpu.mig.is_some() || device & 0xff != 0 {
            return Err(NOT_SUPPORTED);
        }
        unsafe { put(rates, Utilization { gpu: gpu.busy_percent, memory: 0 }) }
    })
}

/// `nvmlProcessUtilizationSample_t`.
#[repr(C)]
pub struct ProcessUtilization {
    pid: c_uint,
    time: u64,
    sm: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
}

/// One entry for each process with a sample after `last_seen`: the mean of those, and the time of the last.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    device: usize,
    samples: *mut ProcessUtilization,
    count: *mut c_uint,
    last_seen: u64,
) -> c_uint {
    answer_for("nvmlDeviceGetProcessUtilization", device, |gpu| {
        if gpu.mig.is_some() || device & 0xff != 0 {
            return Err(NOT_SUPPORTED);
        }
        let of = |process: &Process| {
            let new = process.samples.iter().filter(|(time, _)| *time > last_seen);
            let time = new.clone().map(|(time, _)| *time).max()?;
            let sum: c_uint = new.clone().map(|(_, percent)| *percent).sum();
            let sm = sum / c_uint::try_from(new.count()).ok()?;
            Some(ProcessUtilization {
                pid: process.pid,
                time,
                sm,
                memory: 0,
                encoder: 0,
                decoder: 0,
            })
        };
        let reported: Vec<ProcessUtilization> = gpu.processes.iter().filter_map(of).collect();
        if reported.is_empty() {
            return Err(NOT_FOUND);
        }
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let room = unsafe { count.read() } as usize;
        unsafe { put(count, c_uint::try_from(reported.len()).unwrap_or(0))? };
        if samples.is_null() || reported.len() > room {
            return Err(INSUFFICIENT_SIZE);
        }
        for (offset, sample) in reported.into_iter().enumerate() {
            unsafe { samples.add(offset).write(sample) };
        }
        Ok(())
    })
}

/// Answers a call for one of the process lists: the count first, then the entries.
unsafe fn put_processes(
    gpu: &Gpu,
    list: &str,
    count: *mut c_uint,
    infos: *mut ProcessInfo,
) -> Result<(), c_uint> {
    let wanted = |process: &&Process| process.lists.iter().any(|name| name == list);
    let processes: Vec<&Process> = gpu.processes.iter().filter(wanted).collect();
    if count.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    let room = unsafe { count.read() } as usize;
    unsafe { put(count, c_uint::try_from(processes.len()).unwrap_or(0))? };
    if processes.len() > room || (infos.is_null() && !processes.is_empty()) {
        return Err(INSUFFICIENT_SIZE);
    }
    for (offset, process) in processes.into_iter().enumerate() {
        let used = process.used_mib.map_or(NOT_AVAILABLE, |mib| mib << 20);
        let info = ProcessInfo {
            pid: process.pid,
            used,
            gpu_instance: c_uint::MAX,
            compute_instance: c_uint::MAX,
        };
        unsafe { infos.add(offset).write(info) };
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: usize,
    count: *mut c_uint,
    infos: *mut ProcessInfo,
) -> c_uint {
    answer_for("nvmlDeviceGetComputeRunningProcesses_v3", device, |gpu| unsafe {
        rights::may_read(gpu, device)?;
        put_processes(gpu, "compute", count, infos)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
    device: usize,
    count: *mut c_uint,
    infos: *mut ProcessInfo,
) -> c_uint {
    answer_for("nvmlDeviceGetMPSComputeRunningProcesses_v3", device, |gpu| unsafe {
        rights::may_read(gpu, device)?;
        put_processes(gpu, "mps", count, infos)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: usize,
    count: *mut c_uint,
    infos: *mut ProcessInfo,
) -> c_uint {
    answer_for("nvmlDeviceGetGraphicsRunningProcesses_v3", device, |gpu| unsafe {
        rights::may_read(gpu, device)?;
        put_processes(gpu, "graphics", count, infos)
    })
}
