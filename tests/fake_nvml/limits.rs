//! Memory limits of control groups, as drivers from r615 on have them.

use std::ffi::{CStr, c_char, c_uint};

use super::{INVALID_ARGUMENT, NOT_SUPPORTED, answer_for};

/// `nvmlMemoryLimits_v1_t` as it is read.
#[repr(C)]
pub struct MemoryLimits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryLimits_v1(
    device: usize,
    limits: *mut MemoryLimits,
) -> c_uint {
    answer_for("nvmlDeviceGetMemoryLimits_v1", device, |gpu| {
        let known = gpu.memory_limits.as_ref().ok_or(NOT_SUPPORTED)?;
        if device & 0xff != 0 {
            return Err(INVALID_ARGUMENT); // MIG handles are rejected
        }
        if limits.is_null() || unsafe { (*limits).name_space }.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let group = unsafe { CStr::from_ptr((*limits).name_space) }.to_str();
        let group = group.map_err(|_| INVALID_ARGUMENT)?;
        if !group.starts_with("/sys/fs/cgroup") {
            return Err(INVALID_ARGUMENT);
        }
        unsafe {
            (*limits).soft = 0;
            (*limits).hard = known.get(group).map_or(u64::MAX, |mib| mib << 20);
            (*limits).used = 0;
        }
        Ok(())
    })
}
