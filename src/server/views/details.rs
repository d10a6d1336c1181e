//! Location and health of devices, as in `/v1/state`.

use serde::Serialize;

use crate::hardware::device::{DeviceDetails, DeviceId};
use crate::usage::node_details::{Condition, NodeDetails};

/// What is known of a device beside its allocations; unknown values are left out.
#[derive(Debug, Default, Serialize)]
pub struct DetailsView {
    /// Why it takes no new tenants, if its agent says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ailment: Option<&'static str>,
    /// Number of the newest Xid since its agent's start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_xid: Option<u64>,
    /// State of its MPS control daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mps: Option<&'static str>,
    /// Number of its device node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// NUMA node of the host that it is attached to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// GPUs reached over NVLink.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub neighbours: Vec<NeighbourView>,
    /// Position of a MIG instance on its GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<SlotView>,
    /// Streaming multiprocessors of a MIG instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_count: Option<u32>,
    /// Whether its driver can limit the memory of a container.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub can_limit_memory: bool,
}

/// A GPU that another one reaches over NVLink.
#[derive(Debug, Serialize)]
pub struct NeighbourView {
    /// UUID.
    pub id: String,
    /// Active links.
    pub links: u32,
}

/// Position of a MIG instance, in units of its GPU's axis.
#[derive(Debug, Serialize)]
pub struct SlotView {
    /// The first unit.
    pub start: u32,
    /// How many units.
    pub size: u32,
}

impl DetailsView {
    /// The details of the device `id` on `node`.
    pub fn of(node: &NodeDetails, id: &DeviceId) -> Self {
        let condition = node.conditions.get(id).copied().unwrap_or_default();
        let Condition { fault: ailment, last_xid, mps } = condition;
        let Some(device) = node.devices.get(id) else {
            return Self { ailment, last_xid, mps, ..Self::default() };
        };
        let DeviceDetails {
            minor,
            numa_node,
            neighbors: neighbours,
            slot,
            sm_count,
            can_limit_memory,
        } = device;
        let neighbour =
            |(id, links): &(DeviceId, u32)| NeighbourView { id: id.to_string(), links: *links };
        Self {
            ailment,
            last_xid,
            mps,
            minor: *minor,
            numa_node: *numa_node,
            neighbours: neighbours.iter().map(neighbour).collect(),
            slot: slot.map(|slot| SlotView { start: slot.start, size: slot.size }),
            sm_count: *sm_count,
            can_limit_memory: *can_limit_memory,
        }
    }
}
