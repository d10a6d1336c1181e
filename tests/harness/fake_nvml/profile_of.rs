//! What NVIDIA's container toolkit asks about a MIG device: its parent, its numbers and its profile.

use std::ffi::c_uint;

use super::instances::profiles_of;
use super::making::{compute_handle, compute_number, is_made, number_of, slices_at};
use super::{INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, answer_for, answer_in, instances, put};

/// Bytes in a MiB.
const MIB: u64 = 1 << 20;

/// `nvmlMemory_t`.
#[repr(C)]
pub struct MemoryV1 {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlGpuInstanceProfileInfo_t`.
#[repr(C)]
pub struct ProfileInfoV1 {
    id: c_uint,
    is_p2p_supported: c_uint,
    slices: c_uint,
    instances: c_uint,
    multiprocessors: c_uint,
    engines: [c_uint; 5],
    memory_mib: u64,
}

/// `nvmlComputeInstanceInfo_t`.
#[repr(C)]
pub struct ComputeInstanceInfo {
    device: usize,
    instance: usize,
    id: c_uint,
    profile: c_uint,
    start: c_uint,
    size: c_uint,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
    device: usize,
    parent: *mut usize,
) -> c_uint {
    answer_for("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device, |gpu| {
        gpu.slot.ok_or(INVALID_ARGUMENT)?;
        unsafe { put(parent, device & 0xff00) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeInstanceId(device: usize, id: *mut c_uint) -> c_uint {
    answer_for("nvmlDeviceGetComputeInstanceId", device, |gpu| {
        gpu.slot.ok_or(NOT_SUPPORTED)?;
        unsafe { put(id, gpu.compute) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: usize, memory: *mut MemoryV1) -> c_uint {
    answer_for("nvmlDeviceGetMemoryInfo", device, |gpu| {
        let (total, used) = (gpu.total_mib * MIB, gpu.used_mib * MIB);
        unsafe { put(memory, MemoryV1 { total, free: total - used, used }) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceProfileInfo(
    device: usize,
    number: c_uint,
    info: *mut ProfileInfoV1,
) -> c_uint {
    answer_for("nvmlDeviceGetGpuInstanceProfileInfo", device, |gpu| {
        let known = profiles_of(gpu).iter().find(|it| it.number == number).ok_or(NOT_SUPPORTED)?;
        let info_of_it = ProfileInfoV1 {
            id: known.id,
            is_p2p_supported: 0,
            slices: known.slices,
            instances: known.most,
            multiprocessors: known.sms,
            engines: [1, 0, 0, 0, 0],
            memory_mib: known.memory_mib,
        };
        unsafe { put(info, info_of_it) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceGetComputeInstanceById(
    instance: usize,
    id: c_uint,
    compute: *mut usize,
) -> c_uint {
    answer_in("nvmlGpuInstanceGetComputeInstanceById", instance & 0xff00, |scenario, gpu| {
        let made = instances::read(scenario).ok_or(INVALID_ARGUMENT)?;
        let there = made.instance(gpu, number_of(instance)?).ok_or(INVALID_ARGUMENT)?;
        there.computes.iter().find(|it| it.id == id).ok_or(NOT_FOUND)?;
        unsafe { put(compute, compute_handle(instance, id)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlComputeInstanceGetInfo_v2(
    compute: usize,
    info: *mut ComputeInstanceInfo,
) -> c_uint {
    answer_in("nvmlComputeInstanceGetInfo_v2", compute & 0xff00, |scenario, gpu| {
        if !is_made(compute) {
            return Err(INVALID_ARGUMENT);
        }
        let (number, id) = (number_of(compute)?, compute_number(compute)?);
        let made = instances::read(scenario).ok_or(INVALID_ARGUMENT)?;
        let there = made.instance(gpu, number).ok_or(INVALID_ARGUMENT)?;
        let found = there.computes.iter().find(|it| it.id == id).ok_or(NOT_FOUND)?;
        let known = profiles_of(gpu).iter().find(|it| it.id == there.profile);
        let profile = known.and_then(|known| slices_at(known, found.slices));
        let info_of_it = ComputeInstanceInfo {
            device: compute & 0xff00,
            instance: compute,
            id,
            profile: profile.ok_or(INVALID_ARGUMENT)?,
            start: 0,
            size: found.slices,
        };
        unsafe { put(info, info_of_it) }
    })
}
