//! Where a GPU sits: minor number, PCI address, NUMA node, addressing mode, NVLinks.

use std::ffi::{c_char, c_uint, c_ulong};

use super::scenario::{Gpu, Link};
use super::{
    ARGUMENT_VERSION_MISMATCH, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_SUPPORTED, answer_for, put,
};

/// `nvmlDeviceAddressingMode_v1_t`: 8 bytes, version 1.
const ADDRESSING_MODE_V1: c_uint = 8 | (1 << 24);

/// `nvmlDeviceAddressingMode_v1_t`.
#[repr(C)]
pub struct AddressingMode {
    version: c_uint,
    value: c_uint,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
pub struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_sub_system_id: c_uint,
    bus_id: [c_char; 32],
}

/// Writes the PCI address of what is on `bus`.
unsafe fn put_bus(pci: *mut PciInfo, bus: c_uint) -> Result<(), c_uint> {
    let mut bus_id = [0; 32];
    for (letter, byte) in bus_id.iter_mut().zip(format!("00000000:{bus:02X}:00.0").bytes()) {
        *letter = c_char::from_ne_bytes([byte]);
    }
    let address = PciInfo {
        bus_id_legacy: [0; 16],
        domain: 0,
        bus,
        device: 0,
        pci_device_id: 0,
        pci_sub_system_id: 0,
        bus_id,
    };
    unsafe { put(pci, address) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMinorNumber(device: usize, minor: *mut c_uint) -> c_uint {
    answer_for("nvmlDeviceGetMinorNumber", device, |gpu| unsafe {
        put(minor, gpu.minor.ok_or(NOT_SUPPORTED)?)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: usize, pci: *mut PciInfo) -> c_uint {
    answer_for("nvmlDeviceGetPciInfo_v3", device, |gpu| unsafe {
        put_bus(pci, gpu.bus.ok_or(NOT_SUPPORTED)?)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryAffinity(
    device: usize,
    words: c_uint,
    set: *mut c_ulong,
    _scope: c_uint,
) -> c_uint {
    answer_for("nvmlDeviceGetMemoryAffinity", device, |gpu| {
        let node = gpu.numa_node.ok_or(NOT_SUPPORTED)?;
        let (word, bit) = (node / c_ulong::BITS, node % c_ulong::BITS);
        if word >= words || set.is_null() {
            return Err(INSUFFICIENT_SIZE);
        }
        for at in 0..words {
            let value = if at == word { 1 << bit } else { 0 };
            unsafe { set.add(at as usize).write(value) };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetAddressingMode(
    device: usize,
    mode: *mut AddressingMode,
) -> c_uint {
    answer_for("nvmlDeviceGetAddressingMode", device, |gpu| {
        if mode.is_null() || device & 0xff != 0 {
            return Err(INVALID_ARGUMENT);
        }
        if unsafe { (*mode).version } != ADDRESSING_MODE_V1 {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        let value = gpu.addressing_mode.ok_or(NOT_SUPPORTED)?;
        unsafe { put(mode, AddressingMode { version: ADDRESSING_MODE_V1, value }) }
    })
}

/// The link of this number.
fn link(gpu: &Gpu, number: c_uint) -> Result<Link, c_uint> {
    if gpu.links.is_empty() {
        return Err(NOT_SUPPORTED);
    }
    gpu.links.get(number as usize).copied().ok_or(INVALID_ARGUMENT)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkState(
    device: usize,
    number: c_uint,
    state: *mut c_uint,
) -> c_uint {
    answer_for("nvmlDeviceGetNvLinkState", device, |gpu| {
        let is_up = !matches!(link(gpu, number)?, Link::Down);
        unsafe { put(state, c_uint::from(is_up)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(
    device: usize,
    number: c_uint,
    kind: *mut c_uint,
) -> c_uint {
    answer_for("nvmlDeviceGetNvLinkRemoteDeviceType", device, |gpu| {
        let remote = match link(gpu, number)? {
            Link::Gpu(_) => 0,
            Link::Switch(_) => 2,
            Link::Down => 255,
        };
        unsafe { put(kind, remote) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: usize,
    number: c_uint,
    pci: *mut PciInfo,
) -> c_uint {
    answer_for("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, |gpu| match link(gpu, number)? {
        Link::Gpu(bus) | Link::Switch(bus) => unsafe { put_bus(pci, bus) },
        Link::Down => Err(NOT_SUPPORTED),
    })
}
