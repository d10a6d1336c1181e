//! What the two parts of an agent say to each other: a closed list.
//!
//! One part speaks to the network, the other one to the driver. Both are processes of one image in one pod, so their
//! versions never differ, and a field that is not known is an error.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::gpu::sample::Sample;
use wire::ids::MAX_DEVICES_PER_NODE;
use wire::report::bodies::{
    Allocation, ClearOrders, ClearOutcome, LimitOrders, MAX_BODY_BYTES, MigOrders,
};
use wire::report::report_limits::{MAX_CONTAINERS, MAX_PROCESSES_PER_DEVICE};

/// Longest message with orders, in bytes. Those of a large node have about ten thousand.
pub(crate) const LONGEST_ORDERS: usize = 2 << 20;

/// Longest message with a sample, in bytes: a report, which has the same lists, is no longer.
pub(crate) const LONGEST_SEEN: usize = MAX_BODY_BYTES;

/// All that the part of the driver has to know: what extenders say now. Each message replaces the one before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Orders {
    /// The allocations on the node, those of all extenders together.
    pub allocations: Vec<Allocation>,
    /// Whether an extender answers; otherwise these are the last known ones.
    pub is_answered: bool,
    pub library: LibraryUse,
    /// MIG instances to make and to remove, as the newest leader orders. `None`: no orders stand.
    pub mig: Option<MigOrders>,
    /// Limits of memory to set. `None`: no orders stand.
    pub limits: Option<LimitOrders>,
    /// The GPU whose past faults are to be forgotten. `None`: no orders stand.
    pub clear: Option<ClearOrders>,
    /// UUIDs of the devices that kubelet hands out; `None` before these are known.
    pub of_kubelet: Option<BTreeSet<String>>,
}

impl Orders {
    /// Whether its set is short enough to be true; lists of orders are bounded where they are obeyed.
    pub(crate) fn is_sane(&self) -> bool {
        self.of_kubelet.as_ref().is_none_or(|devices| devices.len() <= MAX_DEVICES_PER_NODE)
    }
}

/// Whether NVIDIA's library may be open.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LibraryUse {
    /// No extender has answered this agent yet: what counted before counts.
    #[default]
    Unknown,
    /// It may.
    Open,
    /// It may not, for this reason.
    Closed(String),
}

/// What the part of the driver has seen, and what became of orders that say so nowhere else.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Seen {
    /// The newest sample; `None` before the first.
    pub sample: Option<Arc<Sample>>,
    /// What became of the order to clear a GPU that stands.
    pub clear_outcome: Option<ClearOutcome>,
}

impl Seen {
    /// Whether its lists are short enough to be true. What is in them the extender checks, as in any report.
    pub(crate) fn is_sane(&self) -> bool {
        let Some(sample) = &self.sample else { return true };
        let is_listed = |count: usize| count <= MAX_PROCESSES_PER_DEVICE;
        let mut processes = sample.uses.iter().map(|device| device.processes.as_ref());
        sample.inventory.len() <= MAX_DEVICES_PER_NODE
            && sample.uses.len() <= MAX_DEVICES_PER_NODE
            && sample.xids.len() <= MAX_DEVICES_PER_NODE
            && sample.containers.len() <= MAX_CONTAINERS
            && processes.all(|listed| listed.is_none_or(|all| is_listed(all.len())))
    }
}
