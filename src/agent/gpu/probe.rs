//! What a probe is: something that reads the devices of a node.
//!
//! There are two, [`crate::agent::nvml::probe`] and [`crate::agent::simulated::probe`]. A probe reads and never decides; what is
//! sent when and to whom is the business of [`crate::agent::node::run`].

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use crate::agent::gpu::health::XidCounts;
use crate::hardware::units::Timestamp;
use crate::report::condition::Ailment;
use crate::report::wire::{Booking, DeviceReport, DeviceUse, DriverReport};

/// Whether processes are to be listed. Listing costs milliseconds under a lock of the driver that
/// also stalls the workloads, so it is done more rarely than reading memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessSampling {
    /// Memory, utilisation and health alone.
    Skip,
    /// The processes of each device, too.
    List,
}

/// What a probe saw at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Everything that the node owns. Shared, since it rarely changes.
    pub inventory: Arc<[DeviceReport]>,
    /// How it is used; no device twice.
    pub uses: Vec<DeviceUse>,
    /// The driver, where there is one and it tells its version.
    pub driver: Option<DriverReport>,
    /// Xids of each GPU since the agent's start, by UUID.
    pub xids: BTreeMap<String, XidCounts>,
    /// How many devices did not answer. Those known from before are in the inventory as unhealthy.
    pub unreadable: usize,
    /// Pods that were known to drain when it was taken, by UID; the sampler says it.
    pub draining: BTreeSet<String>,
}

impl Sample {
    /// What is left of this sample when the driver is away: the devices as they were, none of them
    /// usable, nothing known of their use.
    pub fn without_driver(&self) -> Self {
        let unread =
            |device: &DeviceReport| DeviceUse::unread(device.uuid.clone(), Ailment::DriverAway);
        Self { uses: self.inventory.iter().map(unread).collect(), ..self.clone() }
    }
}

/// Reads the devices of one node.
pub trait Probe: Send {
    /// Reads all devices. A device that cannot be read is reported as unhealthy and does not hide
    /// the others.
    ///
    /// # Errors
    /// [`ProbeError`] when no device at all can be read; the next call tries anew.
    fn sample(&mut self, processes: ProcessSampling, now: Timestamp) -> Result<Sample, ProbeError>;

    /// Learns what is booked on the node: a simulated node plays it, a real one looks for what is left of
    /// ended pods.
    fn observe(&mut self, bookings: &[Booking], now: Timestamp) {
        let _ = (bookings, now);
    }

    /// Whether [`Probe::sample`] may block, so that it must not run on a thread of the event loop.
    fn may_block(&self) -> bool {
        true
    }
}

/// Why nothing can be read on this node. Each is tried again without a restart.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// The library is not there or cannot be loaded.
    #[error(
        "NVIDIA's library `{library}` cannot be loaded ({cause}): install the NVIDIA driver on this \
         node, run the agent with the `nvidia` runtime class or mount the driver's libraries, or \
         name the library with `--nvml-library`"
    )]
    LibraryMissing {
        /// The library.
        library: PathBuf,
        /// What the loader said.
        cause: String,
    },
    /// The library is there, the kernel module is not.
    #[error(
        "NVIDIA's kernel driver is not loaded: check `lsmod` and the driver's installation on this \
         node"
    )]
    DriverNotLoaded,
    /// Library and kernel module differ, as in the middle of an upgrade.
    #[error(
        "NVIDIA's library and kernel driver are of different versions, as during an upgrade: reload \
         the kernel driver or reboot the node when the upgrade is done"
    )]
    DriverMismatch,
    /// The driver lacks something that cannot be done without.
    #[error(
        "NVIDIA's library lacks a function that is needed ({cause}): version R510 of the driver or \
         newer is required"
    )]
    DriverTooOld {
        /// The missing function.
        cause: String,
    },
    /// Anything else.
    #[error("NVIDIA's library refuses to {what}: {cause}")]
    Driver {
        /// What was tried.
        what: &'static str,
        /// What the library said.
        cause: String,
    },
    /// A call has not come back.
    #[error(
        "NVIDIA's library has not answered for {seconds} s: the driver or a GPU hangs; look for Xid \
         lines in the kernel's log (`dmesg`)"
    )]
    Hangs {
        /// How long it was waited for at least.
        seconds: u64,
    },
    /// The probe ended by a defect of ours.
    #[error("the probe was interrupted: {cause}")]
    Interrupted {
        /// What is known.
        cause: String,
    },
}
