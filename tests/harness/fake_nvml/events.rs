//! Faults: event sets, and the field with the recovery action.
//!
//! The scenario lists all events since the start. Each set has read them up to a place of its own,
//! which is the end of the list when a device is registered first.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{INVALID_ARGUMENT, NEW_HANDLE, NOT_SUPPORTED, SUCCESS, answer, answer_for, put};

/// Nothing has happened within the time.
const TIMEOUT: c_uint = 10;

/// All kinds of events.
const ALL_KINDS: u64 = 0xff9f;

/// The field with the recovery action, and NVML's tag for an unsigned 32-bit value.
const RECOVERY_ACTION: c_uint = 230;
const UNSIGNED_INT: c_uint = 1;

/// `nvmlEventData_t`.
#[repr(C)]
pub struct EventData {
    device: usize,
    kind: u64,
    data: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// One event set.
#[derive(Default)]
struct EventSet {
    /// Events of the scenario that it has passed; none before a device is registered.
    passed: Option<usize>,
    /// Kinds of events that are requested, by the position of the GPU.
    queried: BTreeMap<usize, u64>,
}

/// The sets by their handles.
static SETS: Mutex<BTreeMap<usize, EventSet>> = Mutex::new(BTreeMap::new());

fn sets() -> MutexGuard<'static, BTreeMap<usize, EventSet>> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetCreate(set: *mut usize) -> c_uint {
    answer("nvmlEventSetCreate", |_| {
        let mut sets = sets();
        let handle = sets.keys().next_back().map_or(1, |last| last + 1);
        sets.insert(handle, EventSet::default());
        unsafe { put(set, handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetFree(set: usize) -> c_uint {
    answer("nvmlEventSetFree", |_| sets().remove(&set).map(|_| ()).ok_or(INVALID_ARGUMENT))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetSupportedEventTypes(
    device: usize,
    kinds: *mut u64,
) -> c_uint {
    answer_for("nvmlDeviceGetSupportedEventTypes", device, |gpu| unsafe {
        put(kinds, gpu.event_types.unwrap_or(ALL_KINDS))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceRegisterEvents(device: usize, kinds: u64, set: usize) -> c_uint {
    let mut happened = 0;
    let counted = answer("nvmlDeviceRegisterEvents", |scenario| {
        happened = scenario.events.len();
        Ok(())
    });
    if counted != SUCCESS {
        return counted;
    }
    answer_for("nvmlDeviceRegisterEvents", device, |gpu| {
        if kinds & !gpu.event_types.unwrap_or(ALL_KINDS) != 0 {
            return Err(NOT_SUPPORTED);
        }
        let mut sets = sets();
        let set = sets.get_mut(&set).ok_or(INVALID_ARGUMENT)?;
        set.passed.get_or_insert(happened);
        *set.queried.entry((device >> 8) - 1).or_default() |= kinds;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait_v2(
    set: usize,
    data: *mut EventData,
    timeout_ms: c_uint,
) -> c_uint {
    let code = answer("nvmlEventSetWait_v2", |scenario| {
        let mut sets = sets();
        let set = sets.get_mut(&set).ok_or(INVALID_ARGUMENT)?;
        let passed = set.passed.unwrap_or(scenario.events.len());
        let new = scenario.events.iter().zip(1..).skip(passed);
        let reported = new.filter(|(event, _)| {
            let queried = set.queried.get(&event.gpu).copied().unwrap_or(0);
            event.unasked || queried & event.kind != 0
        });
        let (event, number) = reported.min_by_key(|(_, number)| *number).ok_or(TIMEOUT)?;
        set.passed = Some(number);
        let instance = event.instance.unwrap_or(c_uint::MAX);
        let reported = EventData {
            device: (event.gpu + 1) << 8 | if event.by_new_handle { NEW_HANDLE } else { 0 },
            kind: event.kind,
            data: event.data,
            gpu_instance: instance,
            compute_instance: c_uint::MAX,
        };
        unsafe { put(data, reported) }
    });
    if code == TIMEOUT {
        std::thread::sleep(std::time::Duration::from_millis(u64::from(timeout_ms)));
    }
    code
}

/// `nvmlFieldValue_t`.
#[repr(C)]
pub struct FieldValue {
    field_id: c_uint,
    scope_id: c_uint,
    timestamp: i64,
    latency_us: i64,
    value_type: c_uint,
    code: c_uint,
    value: u64,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetFieldValues(
    device: usize,
    count: c_int,
    values: *mut FieldValue,
) -> c_uint {
    answer_for("nvmlDeviceGetFieldValues", device, |gpu| {
        let count = usize::try_from(count).map_err(|_| INVALID_ARGUMENT)?;
        if values.is_null() || count == 0 {
            return Err(INVALID_ARGUMENT);
        }
        for offset in 0..count {
            let value = unsafe { &mut *values.add(offset) };
            match gpu.recovery_action.filter(|_| value.field_id == RECOVERY_ACTION) {
                Some(action) => {
                    (value.code, value.value_type, value.value) = (SUCCESS, UNSIGNED_INT, action);
                }
                None => value.code = NOT_SUPPORTED,
            }
        }
        Ok(())
    })
}
