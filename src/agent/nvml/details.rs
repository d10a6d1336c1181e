//! Facts that stay the same while the library is open: location and links of a device. They are
//! read once per device and opening. What the driver does not report is left out.

use std::collections::BTreeMap;
use std::path::Path;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::PciInfo;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::NVML_AFFINITY_SCOPE_NODE;

use crate::nvml::cgroup_limits::MemoryLimits;
use crate::nvml::raw;
use crate::nvml::raw_mig::ProfileInfo;
use crate::nvml::trouble::{Trouble, unless_lost};
use crate::processes::pods::{CGROUP_ROOT, read_lossily};
use wire::api::condition::AddressingMode;
use wire::api::state::{DeviceKind, MigPlacement, Neighbor};
use wire::report::bodies::{DeviceReport, DriverReport, ProcessUse};

/// Most NVLinks of a GPU that are read; NVIDIA's own constant says 18.
const LINKS_MAX: u32 = 36;

/// Words of the set of NUMA nodes: 1,024 nodes.
const NUMA_WORDS: usize = 16;

/// Most that is read of `/proc/devices`, which has a short line for each driver.
const MAX_DEVICES_BYTES: u64 = 64 << 10;

/// Domain, bus and device of a PCI address.
type PciAddress = (u32, u32, u32);

/// The constant facts of a device.
#[derive(Clone, Debug, Default)]
pub(crate) struct Details {
    pci: Option<PciAddress>,
    /// Active NVLinks by the address at their other end.
    links: BTreeMap<PciAddress, u32>,
    /// Active NVLinks that lead to a switch.
    switch_links: u32,
    /// Number of its device node.
    pub(crate) minor: Option<u32>,
    /// NUMA node of the host that it is attached to.
    numa_node: Option<u32>,
    /// The id of its GPU instance; only of a MIG instance.
    pub(crate) instance: Option<u32>,
    /// Its position on the GPU; only of a MIG instance.
    slot: Option<MigPlacement>,
    /// Its streaming multiprocessors; only of a MIG instance.
    sm_count: Option<u32>,
    /// The largest instance that it can have; only of a GPU in MIG mode.
    pub(crate) largest: Option<ProfileInfo>,
    /// How it addresses the memory of its host.
    addressing_mode: Option<AddressingMode>,
    /// What processes used at the last list; only where that is not what the driver says is in use.
    pub(crate) listed_use: ListedUse,
    /// Whether the driver supports limits of its memory; `None`: it has not said so yet.
    can_limit_memory: Option<bool>,
}

/// The memory of all processes on a device, as of their last list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ListedUse {
    /// The list was not read, or a process of it has no figure.
    #[default]
    Unknown,
    Mib(u64),
}

impl ListedUse {
    /// That of a list; none: it could not be read.
    pub(crate) fn of(processes: Option<&[ProcessUse]>) -> Self {
        let known = processes.and_then(|list| {
            list.iter().try_fold(0_u64, |sum, process| sum.checked_add(process.memory_mib?))
        });
        known.map_or(Self::Unknown, Self::Mib)
    }

    /// The amount, if it is known.
    pub(crate) fn mib(self) -> Option<u64> {
        match self {
            Self::Mib(mib) => Some(mib),
            Self::Unknown => None,
        }
    }
}

impl Details {
    /// Asks the driver again whether it supports limits of the memory of `gpu`, if it has not said so yet.
    pub(crate) fn learn_limits(&mut self, gpu: &Device<'_>, limits: Option<&MemoryLimits>) {
        self.can_limit_memory = self.can_limit_memory.or_else(|| can_limit_memory(gpu, limits));
    }

    /// Whether its memory belongs to the operating system of the host, as on Grace. The driver then counts pages
    /// as used that no process has.
    pub(crate) fn is_part_of_the_host(&self) -> bool {
        self.addressing_mode == Some(AddressingMode::Ats)
    }

    /// The constant facts of a GPU.
    pub(crate) fn of_gpu(
        nvml: &Nvml,
        gpu: &Device<'_>,
        limits: Option<&MemoryLimits>,
    ) -> Result<Self, Trouble> {
        let mut details = Self {
            can_limit_memory: can_limit_memory(gpu, limits),
            addressing_mode: unless_lost(raw::addressing_mode(nvml, gpu))?,
            pci: unless_lost(gpu.pci_info())?.as_ref().map(address),
            minor: unless_lost(gpu.minor_number())?,
            numa_node: unless_lost(gpu.memory_affinity(NUMA_WORDS, NVML_AFFINITY_SCOPE_NODE))?
                .and_then(|set| first_bit(&set)),
            ..Self::default()
        };
        for number in 0..LINKS_MAX {
            let link = gpu.link_wrapper_for(number);
            let is_active = match link.is_active() {
                Err(NvmlError::InvalidArg | NvmlError::NotSupported) => break,
                other => unless_lost(other)?.unwrap_or(false),
            };
            if !is_active {
                continue;
            }
            if unless_lost(raw::leads_to_switch(nvml, gpu, number))? == Some(true) {
                details.switch_links += 1;
            } else if let Some(remote) = unless_lost(link.remote_pci_info())? {
                *details.links.entry(address(&remote)).or_default() += 1;
            }
        }
        Ok(details)
    }

    /// The constant facts of a MIG instance of `gpu`.
    pub(crate) fn of_instance(
        nvml: &Nvml,
        gpu: &Device<'_>,
        instance: &Device<'_>,
    ) -> Result<Self, Trouble> {
        let id = unless_lost(raw::gpu_instance_id(nvml, instance))?;
        let slot = match id {
            Some(id) => unless_lost(raw::slot(nvml, gpu, id))?,
            None => None,
        };
        let attributes = unless_lost(instance.attributes())?;
        let sm_count =
            attributes.map(|attributes| attributes.multiprocessor_count).filter(|count| *count > 0);
        let addressing_mode = unless_lost(raw::addressing_mode(nvml, gpu))?;
        Ok(Self { instance: id, slot, sm_count, addressing_mode, ..Self::default() })
    }

    /// Writes them into the report of the device.
    pub(crate) fn complete(&self, report: &mut DeviceReport) {
        report.minor = self.minor;
        report.numa_node = self.numa_node;
        report.mig_placement = self.slot;
        report.sm_count = self.sm_count;
        report.can_limit_memory = self.can_limit_memory == Some(true);
        report.addressing_mode = self.addressing_mode;
        report.multiprocessors = self.largest.as_ref().map(|whole| whole.multiprocessors);
        if report.kind == DeviceKind::MigParent && report.memory_mib == 0 {
            // It does not let this process read its own.
            report.memory_mib = self.largest.as_ref().map_or(0, |whole| whole.memory_mib);
        }
    }

    /// Active NVLinks from here to `other`, directly or through switches. All switches of a node
    /// form one fabric, in which two GPUs have as many links as the one with fewer.
    fn links_to(&self, other: &Self) -> u32 {
        let direct = other.pci.and_then(|pci| self.links.get(&pci).copied()).unwrap_or(0);
        direct.saturating_add(self.switch_links.min(other.switch_links))
    }
}

/// Whether the driver supports limits of the memory of a GPU: the call for those of the root group works. Other errors
/// than that it does not show nothing; they may be those of any call.
fn can_limit_memory(gpu: &Device<'_>, limits: Option<&MemoryLimits>) -> Option<bool> {
    let Some(limits) = limits else { return Some(false) };
    match limits.hard(gpu, CGROUP_ROOT) {
        Ok(_) => Some(true),
        Err(NvmlError::NotSupported | NvmlError::FunctionNotFound) => Some(false),
        Err(_) => None,
    }
}

/// The known GPUs that `uuid` reaches over NVLink, by UUID.
pub(crate) fn neighbors(all: &BTreeMap<String, Details>, uuid: &str) -> Vec<Neighbor> {
    let Some(here) = all.get(uuid) else { return Vec::new() };
    let others = all.iter().filter(|(other, _)| *other != uuid);
    let reached = others.map(|(other, details)| (other, here.links_to(details)));
    reached
        .filter(|(_, links)| *links > 0)
        .map(|(other, links)| Neighbor { id: other.clone(), links })
        .collect()
}

/// The driver of the node, if it reports its version.
pub(crate) fn driver(nvml: &Nvml) -> Option<DriverReport> {
    let version = nvml.sys_driver_version().ok().filter(|version| !version.is_empty())?;
    // 1000 times the major version and 10 times the minor one.
    let cuda = nvml.sys_cuda_driver_version().ok().filter(|cuda| *cuda > 0);
    let cuda = cuda.map(|cuda| format!("{}.{}", cuda / 1_000, cuda % 1_000 / 10));
    let report = DriverReport { version, cuda, lacks_uvm: false };
    report.is_believable().then_some(report)
}

/// The same driver, with whether its module `nvidia-uvm` is loaded. It is, if the kernel has device numbers for it;
/// unlike `/dev`, the list of these is the host's in every container. A list that cannot be read proves nothing.
pub(crate) fn with_modules(driver: &DriverReport, proc_root: &Path) -> DriverReport {
    let devices = read_lossily(&proc_root.join("devices"), MAX_DEVICES_BYTES);
    let lacks_uvm = devices.is_some_and(|devices| !has_device(&devices, "nvidia-uvm"));
    if lacks_uvm && !driver.lacks_uvm {
        tracing::warn!(
            "the kernel module nvidia-uvm is not loaded: CUDA fails in containers of this node, unless the container \
             toolkit loads it (`modprobe nvidia-uvm`, or `nvidia-modprobe -u`)"
        );
    }
    DriverReport { lacks_uvm, ..driver.clone() }
}

/// Whether `/proc/devices` has a number for this name.
fn has_device(devices: &str, name: &str) -> bool {
    let mut names = devices.lines().filter_map(|line| line.trim().split_once(' '));
    names.any(|(_, device)| device.trim() == name)
}

fn address(pci: &PciInfo) -> PciAddress {
    (pci.domain, pci.bus, pci.device)
}

/// Position of the first bit that is set.
fn first_bit(set: &[std::ffi::c_ulong]) -> Option<u32> {
    let (position, word) = (0..).zip(set).find(|(_, word)| **word != 0)?;
    Some(position * std::ffi::c_ulong::BITS + word.trailing_zeros())
}
