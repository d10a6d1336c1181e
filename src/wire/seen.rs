//! What an agent sees on a device and of the driver, apart from what the device is.

use std::collections::BTreeMap;

use crate::api::condition::{DeviceFault, MpsState};
use crate::device::Health;
use crate::ids::{DeviceId, PodUid};
use crate::units::MemMib;

/// What an agent saw on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceUse {
    /// The device.
    pub id: DeviceId,
    /// Memory in use without the driver's reserve; `None` where the driver cannot say.
    pub used: Option<MemMib>,
    /// Percent of the last period in which a kernel ran; `None` where the driver cannot say.
    pub busy_percent: Option<u8>,
    /// Whether it may take new tenants.
    pub health: Health,
    /// Its processes; `None` when they were not sampled this time.
    pub processes: Option<Vec<ProcessUse>>,
}

impl DeviceUse {
    /// A healthy device that nothing uses.
    pub fn idle(id: DeviceId) -> Self {
        let (used, processes) = (Some(MemMib::ZERO), Some(Vec::new()));
        Self { id, used, busy_percent: None, health: Health::Healthy, processes }
    }
}

/// One process on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessUse {
    /// Its pod; `None` for a process outside Kubernetes, or one whose pod is not found.
    pub pod: Option<PodUid>,
    /// Its memory on the device; `None` where the driver cannot say, which is not zero.
    pub memory: Option<MemMib>,
}

/// What an agent reports of a pod with processes on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedTenant {
    /// The driver's limit for all its processes, read back.
    pub limit: Option<MemMib>,
    /// Whether one of its processes certainly has no limit.
    pub is_unlimited: bool,
    /// Whether one of its processes is a client of MPS.
    pub is_mps_client: bool,
    /// The MPS limit of all its processes together, if each is a client of a serving daemon.
    pub mps_limit: Option<MemMib>,
    /// Percent of the time since the last list in which its kernels ran; `None` where the driver
    /// cannot say whose kernels run.
    pub busy_percent: Option<u8>,
}

/// The driver of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// Its version, for instance `580.95.05`.
    pub version: String,
    /// Newest CUDA that it can run, for instance `13.0`.
    pub cuda: Option<String>,
    /// Whether its module `nvidia-uvm`, without which CUDA fails, is certainly not loaded.
    pub lacks_uvm: bool,
}

/// What an agent saw of a container of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartedContainer {
    /// Whether a library of the driver is mounted in it.
    pub has_driver: bool,
    /// Whether it began before the agent, which has the driver.
    pub is_older: bool,
}

/// What an agent saw of the containers of pods, by pod and id.
pub type StartedContainers = BTreeMap<PodUid, BTreeMap<String, StartedContainer>>;

/// What is or was wrong with a device, and the state of its MPS daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Why it takes no new tenants.
    pub fault: Option<DeviceFault>,
    /// Newest Xid since the agent's start, a fault of an application or of the device.
    pub last_xid: Option<u64>,
    /// The newest event that is a fault of it, by the agent's clock; `None` if there is none.
    pub fault_event: Option<u64>,
    /// State of its MPS control daemon; `None` if the agent watches none.
    pub mps: Option<MpsState>,
}

impl Condition {
    /// Whether its MPS daemon takes no clients, so that they run unlimited or not at all.
    pub fn is_mps_away(&self) -> bool {
        matches!(self.mps, Some(MpsState::Absent | MpsState::Faulted))
    }
}
