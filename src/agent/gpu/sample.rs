//! A probe reads the devices of a node.
//!
//! One is [`crate::nvml::probe`]; `gpupack agent --simulate` and the demo have others. A probe
//! only reads. [`crate::node::run`] decides what is sent, when and to whom.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::gpu::health::XidCounts;
use wire::api::condition::DeviceFault;
use wire::report::bodies::{
    Allocation, AllocationState, ContainerReport, DeviceReport, DeviceUse, DriverReport,
    LimitsInForce, MigFailure,
};
use wire::units::Timestamp;

/// Whether to list processes. Listing costs milliseconds under a lock of the driver that also
/// stalls the workloads, so it is done less often than reading memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessSampling {
    /// Only memory, utilization and health.
    Skip,
    /// The processes of each device, too.
    List,
}

/// What a probe saw at one time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Sample {
    /// Everything that the node owns. Shared, since it rarely changes.
    pub inventory: Arc<[DeviceReport]>,
    /// The use of each device; no device twice.
    pub uses: Vec<DeviceUse>,
    /// The driver, if there is one and it reports its version.
    pub driver: Option<DriverReport>,
    /// Xids of each GPU since the agent's start, by UUID.
    pub xids: BTreeMap<String, XidCounts>,
    /// Number of devices that did not answer. Known ones are in the inventory as unhealthy.
    pub unreadable: usize,
    /// Whether a pod holds a device and none of its processes is known, or it sets limits of memory that a pod has. The
    /// agent hears of ends, and of pods that come, by replies alone.
    pub has_unwatched_pods: bool,
    /// Pods known to drain when the sample was taken, by UID; set by the sampler.
    pub draining: BTreeSet<String>,
    /// Orders about MIG instances that could not be carried out; set by the sampler.
    pub mig_failures: Vec<MigFailure>,
    /// The limits of memory that are in force, if the agent sets any; set by the sampler.
    pub memory_limits: Option<LimitsInForce>,
    /// The containers of pods that hold devices, each with whether it has the driver, as far as that is known.
    pub containers: Arc<[ContainerReport]>,
}

impl Sample {
    /// This sample for the time when no device can be read: the same devices, all unhealthy for
    /// this reason, with unknown use.
    pub fn unread(&self, fault: DeviceFault) -> Self {
        let uses = self.inventory.iter();
        let uses = uses.map(|device| DeviceUse::unread(device.uuid.clone(), fault));
        Self { uses: uses.collect(), ..self.clone() }
    }

    /// This sample without its lists of processes.
    pub fn without_lists(mut self) -> Self {
        for device in &mut self.uses {
            device.processes = None;
            device.tenants.clear();
        }
        self
    }

    /// Whether it has a list of processes.
    pub fn has_lists(&self) -> bool {
        self.uses.iter().any(|device| device.processes.is_some())
    }
}

/// Whether the pod of an allocation has ended and its devices are not free yet.
pub(crate) fn is_draining(allocation: &Allocation) -> bool {
    allocation.state == AllocationState::Draining
}

/// Reads the devices of one node.
pub trait Probe: Send {
    /// Reads all devices. A device that cannot be read is reported as unhealthy and does not hide
    /// the others. Lists processes if `processes` says so, or if one of the last lists has ended.
    ///
    /// # Errors
    /// [`ProbeError`] if no device at all can be read; the next call tries again.
    fn sample(&mut self, processes: ProcessSampling, now: Timestamp) -> Result<Sample, ProbeError>;

    /// Learns the allocations on the node. A simulated node plays them; a real one looks for
    /// processes that are left of ended pods.
    fn observe(&mut self, allocations: &[Allocation], now: Timestamp) {
        let _ = (allocations, now);
    }

    /// Whether [`Probe::sample`] may block and must not run on a thread of the event loop.
    fn may_block(&self) -> bool {
        true
    }

    /// Whether the next [`Probe::sample`] only reads. Otherwise it opens a library first, and looks every
    /// device up, which may take long.
    fn is_open(&self) -> bool {
        true
    }
}

/// Why nothing can be read on this node. Each error is retried; see [`crate::upkeep::renewal`] for those that only a new
/// container ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// The library does not exist or cannot be loaded.
    #[error(
        "NVIDIA's library `{library}` cannot be loaded ({cause}): install the NVIDIA driver on this \
         node, run the agent with the `nvidia` runtime class or mount the driver's libraries, or \
         name the library with `--nvml-library`; where the driver is loaded, set \
         `accept-nvidia-visible-devices-envvar-when-unprivileged` of the container toolkit to true"
    )]
    LibraryMissing {
        library: PathBuf,
        /// The error of the loader.
        cause: String,
    },
    /// It may not be open now: the driver is being replaced, or no extender has answered yet.
    #[error("NVIDIA's library is closed: {why}")]
    Closed {
        /// What the extender says.
        why: String,
    },
    /// The library exists, but the kernel module is not loaded.
    #[error(
        "NVIDIA's kernel driver is not loaded: check `lsmod` and the driver's installation on this \
         node"
    )]
    DriverNotLoaded,
    /// The versions of library and kernel module differ, as during an upgrade.
    #[error(
        "NVIDIA's library and kernel driver are of different versions, as during an upgrade: reload \
         the kernel driver or reboot the node when the upgrade is done"
    )]
    DriverMismatch,
    /// The driver lacks a required function.
    #[error(
        "NVIDIA's library lacks a function that is needed ({cause}): version R510 of the driver or \
         newer is required"
    )]
    DriverTooOld { cause: String },
    /// The library does not start, as it does for ever in a container with the rights of another time.
    #[error(
        "NVIDIA's library refuses to {what}: {cause}; the rights of this container to NVIDIA's devices may be gone, \
         as after `systemctl daemon-reload`"
    )]
    Refused {
        what: &'static str,
        /// The error of the library.
        cause: String,
    },
    #[error("NVIDIA's library refuses to {what}: {cause}")]
    Driver {
        what: &'static str,
        /// The error of the library.
        cause: String,
    },
    /// The library is still being opened, or waits for a change of a MIG instance, within its time.
    #[error("NVIDIA's library is being opened")]
    Opening,
    /// A call has not returned.
    #[error(
        "NVIDIA's library has not answered for {seconds} s: the driver or a GPU hangs; look for Xid \
         lines in the kernel's log (`dmesg`)"
    )]
    Hangs {
        /// How long the agent waited at least.
        seconds: u64,
    },
    /// The probe failed because of a bug in gpupack.
    #[error("the probe was interrupted: {cause}")]
    Interrupted { cause: String },
}

impl ProbeError {
    /// Whether the library itself said that it does not start, in a way that may last as long as the container.
    pub(crate) fn is_of_start(&self) -> bool {
        matches!(self, Self::DriverMismatch | Self::Refused { .. })
    }
}
