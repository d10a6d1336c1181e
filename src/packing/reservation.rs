//! Who holds what: placements, and the life of a reservation from bind to the end of its processes.

use std::fmt;
use std::sync::Arc;

use super::device::{DeviceId, NodeName, PodUid};
use super::request::{Demand, GpuRequest};
use super::units::{HostAmount, Timestamp};

/// A pod: its UID, which decides, and its name, which is only shown.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodRef {
    /// UID given by the API server; never reused.
    pub uid: PodUid,
    /// `namespace/name`, for people.
    pub name: Arc<str>,
}

impl PodRef {
    /// Its namespace and name; both empty where the text is not of both.
    pub fn parts(&self) -> (&str, &str) {
        self.name.split_once('/').unwrap_or_default()
    }

    /// Its namespace; empty where it has none.
    pub fn namespace(&self) -> &str {
        self.parts().0
    }
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// What a placement intends to hold a tenant to its memory, from weak to strong. What is verified on
/// the node is reported apart from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protection {
    /// Nothing holds the tenants of the GPU to their memory.
    #[default]
    None,
    /// MPS is to hold each of them to its memory.
    Mps,
    /// The driver is to hold each of them to its memory.
    Driver,
    /// The hardware does: a MIG instance, or a GPU that has one tenant by construction.
    Hardware,
}

impl Protection {
    /// The name in annotations and views.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mps => "mps",
            Self::Driver => "driver",
            Self::Hardware => "hardware",
        }
    }
}

/// An amount of one device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlacedDevice {
    /// The device.
    pub id: DeviceId,
    /// What is taken of it.
    pub demand: Demand,
}

/// Where a pod is placed: a node, and an amount on each of one or more distinct devices of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Placement {
    /// The node.
    pub node: NodeName,
    /// The devices, in the order in which the container sees them; none twice, at least one.
    pub devices: Vec<PlacedDevice>,
    /// The intended protection.
    pub protection: Protection,
}

/// How far a reservation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReservationState {
    /// Bind has chosen; whether the API server accepted is not known yet. Time alone never frees it.
    Assumed {
        /// When bind chose.
        since: Timestamp,
    },
    /// The API server says that the pod is bound with this placement.
    Confirmed,
    /// The pod is terminal or gone; its processes may still hold the device.
    Draining {
        /// When the end of the pod was seen.
        since: Timestamp,
        /// Reports received since then, one after the other, that list no process of the pod.
        clean_reports: u32,
        /// When the last report since then came that lists a process of the pod.
        shown: Option<Timestamp>,
    },
}

/// What one pod holds on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// The pod.
    pub pod: PodRef,
    /// Devices and amounts, as they were written.
    pub placement: Placement,
    /// Processor time and memory outside the GPU.
    pub host: HostAmount,
    /// How far it has come.
    pub state: ReservationState,
    /// What it asked for, where that is known: without it nobody can say where else it could run.
    pub request: Option<Arc<GpuRequest>>,
}

impl Reservation {
    /// Whether it may be proposed to move: bound for certain, not about to end, and known well enough
    /// to find it another place.
    pub fn is_movable(&self) -> bool {
        self.state == ReservationState::Confirmed && self.request.is_some()
    }
}
