//! MIG mode and instances.

use std::ffi::c_uint;

use super::{INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED};
use super::{answer_for, answer_in, instance_handle, making, put, rights};

/// A GPU may have as many instances as this.
const MAX_INSTANCES: c_uint = 7;

/// `nvmlDeviceAttributes_t`.
#[repr(C)]
pub struct Attributes {
    multiprocessors: c_uint,
    others: [c_uint; 7],
    memory_mib: u64,
}

/// `nvmlGpuInstanceInfo_t`.
#[repr(C)]
pub struct GpuInstanceInfo {
    device: usize,
    id: c_uint,
    profile: c_uint,
    start: c_uint,
    size: c_uint,
}

impl GpuInstanceInfo {
    /// Of a GPU: number, profile, start and size.
    pub(crate) fn new(
        device: usize,
        (id, profile, start, size): (c_uint, c_uint, c_uint, c_uint),
    ) -> Self {
        Self { device, id, profile, start, size }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(
    device: usize,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> c_uint {
    answer_for("nvmlDeviceGetMigMode", device, |gpu| {
        let mode = c_uint::from(gpu.mig.is_some());
        let next = gpu.mig_pending.map_or(mode, c_uint::from);
        unsafe { put(current, mode).and_then(|()| put(pending, next)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceIsMigDeviceHandle(
    device: usize,
    is_instance: *mut c_uint,
) -> c_uint {
    answer_for("nvmlDeviceIsMigDeviceHandle", device, |_| unsafe {
        put(is_instance, c_uint::from(device & 0xff != 0))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(
    device: usize,
    count: *mut c_uint,
) -> c_uint {
    answer_for("nvmlDeviceGetMaxMigDeviceCount", device, |gpu| {
        let most = if gpu.mig.is_some() { MAX_INSTANCES } else { 0 };
        unsafe { put(count, gpu.mig_count.unwrap_or(most)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: usize,
    index: c_uint,
    instance: *mut usize,
) -> c_uint {
    answer_for("nvmlDeviceGetMigDeviceHandleByIndex", device, |gpu| {
        let mig = gpu.mig.as_ref().ok_or(NOT_SUPPORTED)?;
        let found = mig.get(index as usize).and_then(Option::as_ref).ok_or(NOT_FOUND)?;
        let place = device | (index as usize + 1);
        unsafe { put(instance, instance_handle(place, &found.uuid)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceId(device: usize, id: *mut c_uint) -> c_uint {
    answer_for("nvmlDeviceGetGpuInstanceId", device, |gpu| unsafe {
        put(id, gpu.slot.ok_or(NOT_SUPPORTED)?.0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceById(
    device: usize,
    id: c_uint,
    instance: *mut usize,
) -> c_uint {
    answer_in("nvmlDeviceGetGpuInstanceById", device, |scenario, gpu| {
        let mig = gpu.mig.as_ref().ok_or(NOT_SUPPORTED)?;
        rights::may_configure(gpu)?;
        if gpu.mig_model.is_some() {
            let handle = making::instance_by_id(scenario, gpu, (device, id))?;
            return unsafe { put(instance, handle) };
        }
        let slots = mig.iter().map(|it| it.as_ref().and_then(|it| it.slot));
        let found = slots.zip(1..).find(|(slot, _)| slot.is_some_and(|slot| slot.0 == id));
        let (_, number): (_, usize) = found.ok_or(NOT_FOUND)?;
        unsafe { put(instance, device | number) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlGpuInstanceGetInfo(
    instance: usize,
    info: *mut GpuInstanceInfo,
) -> c_uint {
    if making::is_made(instance) {
        return making::info(instance, info);
    }
    answer_for("nvmlGpuInstanceGetInfo", instance, |gpu| {
        let (id, start, size) = gpu.slot.ok_or(INVALID_ARGUMENT)?;
        let device = instance & !0xff;
        unsafe { put(info, GpuInstanceInfo::new(device, (id, 0, start, size))) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetAttributes_v2(
    device: usize,
    attributes: *mut Attributes,
) -> c_uint {
    answer_for("nvmlDeviceGetAttributes_v2", device, |gpu| {
        let multiprocessors = gpu.sms.ok_or(NOT_SUPPORTED)?;
        let memory_mib = gpu.total_mib;
        unsafe { put(attributes, Attributes { multiprocessors, others: [0; 7], memory_mib }) }
    })
}
