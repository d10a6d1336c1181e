//! How a device is shared, as in `/v1/state`.

use serde::Serialize;

use crate::hardware::device::{Device, DeviceKind};
use crate::hardware::mig::Geometry;
use crate::model::device_state::DeviceState;
use crate::model::node_state::NodeState;

/// How a device is shared.
#[derive(Debug, Serialize)]
pub struct SharingView {
    /// Part of its GPU's compute that a MIG instance has, in millionths, if the model is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_millionths: Option<u64>,
    /// Its slots, all and free; none if it is not cut into slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<SlotsView>,
    /// Isolation of its tenants as the operator configured it: `none`, `mps` or `driver`.
    pub protection: &'static str,
    /// What is known of that: `intended`, `verified` of every tenant that was seen, or `missing`.
    pub protection_evidence: &'static str,
}

/// The slots of a device.
#[derive(Debug, Serialize)]
pub struct SlotsView {
    /// Number of slots.
    pub all: u32,
    /// Free slots.
    pub free: u32,
}

impl SharingView {
    /// How a device of `node` is shared.
    pub(crate) fn of(node: &NodeState, books: &DeviceState) -> Self {
        Self {
            compute_millionths: compute_of(node, books.device()),
            slots: books.slots().map(|(all, free)| SlotsView { all, free }),
            protection: books.promised_guard().name(),
            protection_evidence: books.evidence().name(),
        }
    }
}

/// The part of its GPU's compute that a MIG instance has.
fn compute_of(node: &NodeState, device: &Device) -> Option<u64> {
    let DeviceKind::MigInstance { parent, profile } = &device.kind else { return None };
    let parent = node.devices().iter().map(DeviceState::device).find(|it| it.id == *parent)?;
    let share = Geometry::of(&parent.model, parent.total)?.compute_of(profile)?;
    Some(share.millionths())
}
