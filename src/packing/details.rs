//! Where devices sit, as far as the driver tells.

use super::device::DeviceId;

/// Where a device sits. Each is none where the driver cannot say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceDetails {
    /// Number of its device node, `/dev/nvidia<minor>`.
    pub minor: Option<u32>,
    /// NUMA node of the host that it is attached to.
    pub numa_node: Option<u32>,
    /// GPUs of the same node that it reaches by NVLink, with the number of active links, by UUID.
    pub neighbours: Vec<(DeviceId, u32)>,
    /// Where a MIG instance lies on its GPU.
    pub slot: Option<Slot>,
    /// Streaming multiprocessors of a MIG instance.
    pub sm_count: Option<u32>,
    /// Whether the driver can hold containers to an amount of its memory.
    pub can_limit_memory: bool,
}

/// Where a MIG instance lies on its GPU, in units of the axis: 4 on an A30, 8 on an A100 or H100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The first unit.
    pub start: u32,
    /// How many units, at least 1.
    pub size: u32,
}
