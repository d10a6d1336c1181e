//! Memory limits of control groups, as drivers from r615 on have them.
//!
//! The driver keeps limits for all processes of a machine, so what one process sets another reads: they
//! are lines of the file `limits` beside the scenario.

use std::ffi::{CStr, c_char, c_uint};
use std::path::Path;

use super::{INVALID_ARGUMENT, NOT_SUPPORTED, OPERATING_SYSTEM, answer_for, scenario};

/// `nvmlMemoryLimits_v1_t` as it is read.
#[repr(C)]
pub struct MemoryLimits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

/// `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
pub struct NewMemoryLimits {
    name_space: *const c_char,
    soft: u64,
    hard: u64,
}

/// The control group that a caller names.
unsafe fn group_of<'a>(name_space: *const c_char) -> Result<&'a str, c_uint> {
    if name_space.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    let group = unsafe { CStr::from_ptr(name_space) }.to_str().map_err(|_| INVALID_ARGUMENT)?;
    if group.starts_with("/sys/fs/cgroup") { Ok(group) } else { Err(INVALID_ARGUMENT) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceSetMemoryLimits_v1(
    device: usize,
    limits: *const NewMemoryLimits,
) -> c_uint {
    answer_for("nvmlDeviceSetMemoryLimits_v1", device, |gpu| {
        if gpu.memory_limits.is_none() {
            return Err(NOT_SUPPORTED);
        }
        if device & 0xff != 0 || limits.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let NewMemoryLimits { name_space, soft, hard } = unsafe { limits.read() };
        let group = unsafe { group_of(name_space)? };
        let most = gpu.total_mib << 20;
        if soft > hard || soft > most || (hard > most && hard != u64::MAX) {
            return Err(INVALID_ARGUMENT);
        }
        // Only version 2 has this file in every group. Those of the scenario are there.
        let is_played = gpu.memory_limits.as_ref().is_some_and(|known| known.contains_key(group));
        if !is_played && !Path::new(group).join("cgroup.controllers").is_file() {
            return Err(OPERATING_SYSTEM);
        }
        scenario::write_line_to("limits", &format!("{} {soft} {hard} {group}", gpu.uuid));
        Ok(())
    })
}

/// The limits that were set last: soft and hard, in bytes.
fn set_before(uuid: &str, group: &str) -> Option<(u64, u64)> {
    let lines = scenario::lines_of("limits");
    let mut limits = lines.lines().rev().filter_map(|line| {
        let mut words = line.splitn(4, ' ');
        let (gpu, soft, hard) = (words.next()?, words.next()?, words.next()?);
        let is_it = gpu == uuid && words.next() == Some(group);
        is_it.then(|| Some((soft.parse().ok()?, hard.parse().ok()?)))?
    });
    limits.next()
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
        if limits.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let group = unsafe { group_of((*limits).name_space)? };
        let played = known.get(group).map(|mib| (0, mib << 20));
        let (soft, hard) = set_before(&gpu.uuid, group).or(played).unwrap_or((0, u64::MAX));
        unsafe {
            (*limits).soft = soft;
            (*limits).hard = hard;
            (*limits).used = gpu.limited_use.get(group).map_or(0, |mib| mib << 20);
        }
        Ok(())
    })
}
