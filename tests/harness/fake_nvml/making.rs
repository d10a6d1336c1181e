//! The calls that make and remove MIG instances.
//!
//! A handle of a GPU instance is that of its GPU, a mark, and its number; one of a compute instance
//! has a number more.

use std::ffi::{c_char, c_uint};

use super::instances::{Instance, Profile, change, profiles_of, read};
use super::mig::GpuInstanceInfo;
use super::scenario::{Gpu, Scenario};
use super::{
    ARGUMENT_VERSION_MISMATCH, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED,
    answer_in, put, put_text, rights,
};

/// In handles of GPU instances and compute instances.
const MARK: usize = 1 << 32;

/// Where the number of a compute instance begins, counted from one.
const COMPUTE: u32 = 40;

/// Slices of the compute profiles, by their position in NVML's list: the newest header ends with
/// `7_SLICE_NVL`.
const COMPUTE_SLICES: [c_uint; 9] = [1, 2, 3, 4, 7, 8, 6, 1, 7];

/// Compute profiles of a GPU instance, unless its profile names others.
const USUAL_COMPUTES: c_uint = 5;

/// `nvmlGpuInstanceProfileInfo_v2_t`: 152 bytes, version 2.
const PROFILE_V2: c_uint = 152 | (2 << 24);

/// Length of the name in it.
const NAME: usize = 96;

/// `nvmlGpuInstancePlacement_t`.
#[repr(C)]
pub struct Placement {
    start: c_uint,
    size: c_uint,
}

/// `nvmlGpuInstanceProfileInfo_v2_t`.
#[repr(C)]
pub struct ProfileInfo {
    version: c_uint,
    id: c_uint,
    is_p2p_supported: c_uint,
    slices: c_uint,
    instances: c_uint,
    multiprocessors: c_uint,
    engines: [c_uint; 5],
    memory_mib: u64,
    name: [c_char; NAME],
}

/// `nvmlComputeInstanceProfileInfo_t`.
#[repr(C)]
pub struct ComputeProfileInfo {
    id: c_uint,
    slices: c_uint,
    instances: c_uint,
    multiprocessors: c_uint,
    engines: [c_uint; 5],
}

/// The GPU of a marked handle.
fn gpu_of(handle: usize) -> usize {
    handle & 0xffff_ff00
}

/// The GPU instance of a marked handle.
pub(crate) fn number_of(handle: usize) -> Result<c_uint, c_uint> {
    let is_marked = handle & MARK != 0;
    let number = c_uint::try_from(handle & 0xff).map_err(|_| INVALID_ARGUMENT)?;
    is_marked.then_some(number).ok_or(INVALID_ARGUMENT)
}

/// The handle of a compute instance of a marked one.
pub(crate) fn compute_handle(instance: usize, id: c_uint) -> usize {
    instance | (id as usize + 1) << COMPUTE
}

/// The number in such a handle.
pub(crate) fn compute_number(compute: usize) -> Result<c_uint, c_uint> {
    let id = (compute >> COMPUTE).checked_sub(1).ok_or(INVALID_ARGUMENT)?;
    c_uint::try_from(id).map_err(|_| INVALID_ARGUMENT)
}

fn marked(device: usize, id: c_uint) -> usize {
    gpu_of(device) | MARK | id as usize
}

/// Answers a call that needs the right to configure MIG.
fn answer_config(
    symbol: &str,
    device: usize,
    call: impl FnOnce(&Scenario, &Gpu) -> Result<(), c_uint>,
) -> c_uint {
    answer_mig(symbol, device, |scenario, gpu| {
        rights::may_configure(gpu)?;
        call(scenario, gpu)
    })
}

/// Answers a call about a GPU that can be in MIG mode.
fn answer_mig(
    symbol: &str,
    device: usize,
    call: impl FnOnce(&Scenario, &Gpu) -> Result<(), c_uint>,
) -> c_uint {
    answer_in(symbol, gpu_of(device), |scenario, gpu| {
        if profiles_of(gpu).is_empty() {
            return Err(NOT_SUPPORTED);
        }
        call(scenario, gpu)
    })
}

fn profile(gpu: &Gpu, id: c_uint) -> Result<&'static Profile, c_uint> {
    profiles_of(gpu).iter().find(|it| it.id == id).ok_or(INVALID_ARGUMENT)
}

/// Slices of a compute profile that a GPU instance has.
fn slices_of(profile: &Profile, number: c_uint) -> Result<c_uint, c_uint> {
    let slices = COMPUTE_SLICES.get(number as usize).copied().ok_or(INVALID_ARGUMENT)?;
    let is_its = match profile.computes.is_empty() {
        true => number < USUAL_COMPUTES,
        false => profile.computes.contains(&number),
    };
    if is_its && slices <= profile.slices { Ok(slices) } else { Err(NOT_SUPPORTED) }
}

/// The position of the compute profile with so many slices that a GPU instance has.
pub(crate) fn slices_at(profile: &Profile, slices: c_uint) -> Option<c_uint> {
    (0..)
        .zip(COMPUTE_SLICES)
        .map(|(number, _)| number)
        .find(|number| slices_of(profile, *number) == Ok(slices))
}

/// The GPU instance of a marked handle, and its profile.
fn instance_of(
    scenario: &Scenario,
    gpu: &Gpu,
    handle: usize,
) -> Result<(Instance, &'static Profile), c_uint> {
    let made = read(scenario).ok_or(INVALID_ARGUMENT)?;
    let instance = made.instance(gpu, number_of(handle)?).ok_or(INVALID_ARGUMENT)?;
    Ok((instance.clone(), profile(gpu, instance.profile)?))
}

/// Writes handles into a buffer of the caller, and how many they are.
unsafe fn put_all(buffer: *mut usize, count: *mut c_uint, handles: &[usize]) -> Result<(), c_uint> {
    if buffer.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    for (offset, handle) in handles.iter().enumerate() {
        unsafe { buffer.add(offset).write(*handle) };
    }
    unsafe { put(count, c_uint::try_from(handles.len()).unwrap_or(0)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceProfileInfoV(
    device: usize,
    number: c_uint,
    info: *mut ProfileInfo,
) -> c_uint {
    answer_mig("nvmlDeviceGetGpuInstanceProfileInfoV", device, |_, gpu| {
        if info.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        if unsafe { (*info).version } != PROFILE_V2 {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        let known = profiles_of(gpu).iter().find(|it| it.number == number).ok_or(NOT_SUPPORTED)?;
        let mut name = [0; NAME];
        let length = c_uint::try_from(NAME).unwrap_or(0);
        unsafe {
            put_text(name.as_mut_ptr(), length, &format!("MIG {}", known.name))?;
            put(
                info,
                ProfileInfo {
                    version: PROFILE_V2,
                    id: known.id,
                    is_p2p_supported: 0,
                    slices: known.slices,
                    instances: known.most,
                    multiprocessors: known.sms,
                    engines: [1, 0, 0, 0, 0],
                    memory_mib: known.memory_mib,
                    name,
                },
            )
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    device: usize,
    id: c_uint,
    placements: *mut Placement,
    count: *mut c_uint,
) -> c_uint {
    answer_config("nvmlDeviceGetGpuInstancePossiblePlacements_v2", device, |_, gpu| {
        let known = profile(gpu, id)?;
        let there = c_uint::try_from(known.starts.len()).unwrap_or(0);
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        if !placements.is_null() {
            if unsafe { count.read() } < there {
                return Err(INSUFFICIENT_SIZE);
            }
            for (offset, start) in known.starts.iter().enumerate() {
                let place = Placement { start: *start, size: known.size };
                unsafe { placements.add(offset).write(place) };
            }
        }
        unsafe { put(count, there) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstances(
    device: usize,
    id: c_uint,
    instances: *mut usize,
    count: *mut c_uint,
) -> c_uint {
    answer_config("nvmlDeviceGetGpuInstances", device, |scenario, gpu| {
        if gpu.mig.is_none() {
            return Err(NOT_SUPPORTED); // profiles and placements are listed outside MIG mode, too
        }
        profile(gpu, id)?;
        let made = read(scenario).ok_or(INVALID_ARGUMENT)?;
        let of_it = made.of(gpu).iter().filter(|it| it.profile == id);
        let handles: Vec<usize> = of_it.map(|it| marked(device, it.id)).collect();
        unsafe { put_all(instances, count, &handles) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceCreateGpuInstanceWithPlacement(
    device: usize,
    id: c_uint,
    placement: *const Placement,
    instance: *mut usize,
) -> c_uint {
    answer_config("nvmlDeviceCreateGpuInstanceWithPlacement", device, |scenario, gpu| {
        if placement.is_null() || instance.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let Placement { start, size } = unsafe { placement.read() };
        if profile(gpu, id)?.size != size {
            return Err(INVALID_ARGUMENT);
        }
        let number = change(scenario, |made| made.create(gpu, id, start))?;
        unsafe { put(instance, marked(device, number)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceDestroy(instance: usize) -> c_uint {
    answer_config("nvmlGpuInstanceDestroy", instance, |scenario, gpu| {
        let number = number_of(instance)?;
        change(scenario, |made| made.destroy(gpu, number))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
    instance: usize,
    number: c_uint,
    engines: c_uint,
    info: *mut ComputeProfileInfo,
) -> c_uint {
    let symbol = "nvmlGpuInstanceGetComputeInstanceProfileInfo";
    answer_mig(symbol, instance, |scenario, gpu| {
        let (_, profile) = instance_of(scenario, gpu, instance)?;
        let slices = slices_of(profile, number)?;
        if engines != 0 {
            return Err(INVALID_ARGUMENT);
        }
        let info_of_it = ComputeProfileInfo {
            id: number,
            slices,
            instances: profile.slices / slices,
            multiprocessors: profile.sms * slices / profile.slices,
            engines: [0; 5],
        };
        unsafe { put(info, info_of_it) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceCreateComputeInstance(
    instance: usize,
    number: c_uint,
    compute: *mut usize,
) -> c_uint {
    answer_config("nvmlGpuInstanceCreateComputeInstance", instance, |scenario, gpu| {
        let (_, profile) = instance_of(scenario, gpu, instance)?;
        let slices = slices_of(profile, number)?;
        let id = number_of(instance)?;
        let made = change(scenario, |made| made.create_compute(gpu, id, slices))?;
        unsafe { put(compute, compute_handle(instance, made)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceGetComputeInstances(
    instance: usize,
    number: c_uint,
    computes: *mut usize,
    count: *mut c_uint,
) -> c_uint {
    answer_config("nvmlGpuInstanceGetComputeInstances", instance, |scenario, gpu| {
        let (there, profile) = instance_of(scenario, gpu, instance)?;
        let slices = slices_of(profile, number)?;
        let of_it = there.computes.iter().filter(|it| it.slices == slices);
        let handles: Vec<usize> = of_it.map(|it| compute_handle(instance, it.id)).collect();
        unsafe { put_all(computes, count, &handles) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlComputeInstanceDestroy(compute: usize) -> c_uint {
    answer_config("nvmlComputeInstanceDestroy", compute, |scenario, gpu| {
        let number = number_of(compute)?;
        let id = compute_number(compute)?;
        change(scenario, |made| made.destroy_compute(gpu, number, id))
    })
}

/// The handle of the GPU instance `id`.
pub(crate) fn instance_by_id(
    scenario: &Scenario,
    gpu: &Gpu,
    (device, id): (usize, c_uint),
) -> Result<usize, c_uint> {
    let made = read(scenario).ok_or(INVALID_ARGUMENT)?;
    made.instance(gpu, id).ok_or(NOT_FOUND)?;
    Ok(marked(device, id))
}

/// Whether a handle is one of a GPU instance that was made.
pub(crate) fn is_made(handle: usize) -> bool {
    handle & MARK != 0
}

/// What NVML says of the GPU instance of a marked handle.
pub(crate) fn info(handle: usize, info: *mut GpuInstanceInfo) -> c_uint {
    answer_mig("nvmlGpuInstanceGetInfo", handle, |scenario, gpu| {
        let (there, profile) = instance_of(scenario, gpu, handle)?;
        let device = gpu_of(handle);
        let slot = (there.id, profile.id, there.start, profile.size);
        unsafe { put(info, GpuInstanceInfo::new(device, slot)) }
    })
}
