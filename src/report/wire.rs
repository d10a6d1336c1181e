//! What an agent and the extender say to each other: `PUT /v1/nodes/{node}/report` and its reply.
//!
//! The agent says what the node owns (inventory) and how it is used; the reply carries the node's
//! bookings, so that the agent needs no watch of its own. Both sides import these types; the
//! extender turns a report into the words of [`crate::model`] by
//! [`Report::from_json`], and nothing unchecked goes further.
//!
//! A conversation: the agent says hello (no session, full inventory), the reply issues a session
//! number, later reports carry it and a sequence number that only grows. A report of an older
//! session is refused with 409 and [`Refusal::SESSION_EXPIRED`], whereupon the agent says hello
//! again; an absurd one with 422; 503 means *later*.

use serde::{Deserialize, Serialize};

use crate::model::reservation::{Reservation, ReservationState};
use crate::report::condition::{Ailment, MpsState};

/// The schema that this side writes. It reads one older and one newer: fields that it does not know
/// are ignored, optional fields that are missing have their default.
pub const SCHEMA_VERSION: u32 = 1;

/// Largest body of a report or of a reply: 16 full GPUs with 4,096 processes each come to 6 MiB.
pub const MAX_BODY_BYTES: usize = 8 << 20;

/// Whether this side understands `version`.
pub fn is_readable(version: u32) -> bool {
    version.abs_diff(SCHEMA_VERSION) <= 1
}

/// The path of a node's reports; Kubernetes node names need no escaping.
pub fn report_path(node: &str) -> String {
    format!("/v1/nodes/{node}/report")
}

/// One report of an agent about its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Version of the schema it is written in.
    pub schema_version: u32,
    /// Random id of this run of the agent, at most 64 characters.
    pub agent: String,
    /// The session that the extender issued; none says hello and must carry the inventory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<u64>,
    /// Grows with the reports of one run of the agent. One that is sent again in place of a report without an
    /// answer has the same: the extender takes in one of them.
    pub sequence: u64,
    /// Everything that the node owns: with hello, when it changed and when the extender asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inventory: Option<Vec<DeviceReport>>,
    /// The driver, where it tells its version; goes with the inventory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<DriverReport>,
    /// The [`Reply::bookings_version`] of this session's last reply; none to be told the bookings anyway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bookings_version: Option<u64>,
    /// Observed use, one entry per device that could be read.
    #[serde(default)]
    pub devices: Vec<DeviceUse>,
}

/// The driver of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverReport {
    /// Its version, for instance `580.95.05`.
    pub version: String,
    /// Newest CUDA that it can run, for instance `13.0`; none where it cannot say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<String>,
}

/// One device of the inventory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// NVML's UUID.
    pub uuid: String,
    /// NVML's index (of the parent, for a MIG instance).
    pub index: u32,
    /// Product name.
    pub model: String,
    /// Memory on the board or of the instance, before the driver's reserve.
    pub memory_mib: u64,
    /// Memory that the driver keeps for itself.
    #[serde(default)]
    pub reserved_mib: u64,
    /// GPU, MIG parent or MIG instance.
    #[serde(default)]
    pub kind: Kind,
    /// UUID of the GPU that a MIG instance is cut from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Profile of a MIG instance, for instance `3g.40gb`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Whether it may take new tenants.
    pub healthy: bool,
    /// Number of its device node, `/dev/nvidia<minor>`; not always its index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// NUMA node of the host that it is attached to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// GPUs of the same node that it reaches by NVLink, by UUID.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neighbours: Vec<Neighbour>,
    /// Where a MIG instance lies on its GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<Slot>,
    /// Streaming multiprocessors of a MIG instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_count: Option<u32>,
    /// Whether the driver can hold containers to an amount of its memory, and tells of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub can_limit_memory: bool,
}

impl DeviceReport {
    /// A healthy device of which nothing but its name is known.
    pub fn new(uuid: String, index: u32, model: String, kind: Kind) -> Self {
        Self {
            uuid,
            index,
            model,
            memory_mib: 0,
            reserved_mib: 0,
            kind,
            parent: None,
            profile: None,
            healthy: true,
            minor: None,
            numa_node: None,
            neighbours: Vec::new(),
            slot: None,
            sm_count: None,
            can_limit_memory: false,
        }
    }
}

/// A GPU that another one reaches by NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// NVML's UUID.
    pub uuid: String,
    /// Active links, directly or through switches.
    pub links: u32,
}

/// Where a MIG instance lies on its GPU, in units of the axis: 4 on an A30, 8 on an A100 or H100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// The first unit.
    pub start: u32,
    /// How many units.
    pub size: u32,
}

/// What kind of device it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A GPU that can be shared or given away whole.
    #[default]
    Gpu,
    /// A GPU in MIG mode.
    MigParent,
    /// An instance of a GPU in MIG mode.
    MigInstance,
}

/// Observed use of one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceUse {
    /// NVML's UUID.
    pub uuid: String,
    /// Memory in use without the driver's reserve; none where the driver cannot say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_mib: Option<u64>,
    /// Percent of time in which a kernel ran; none where the driver cannot say (MIG).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<u8>,
    /// Whether the device may take new tenants now.
    pub healthy: bool,
    /// Why it may not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ailment: Option<Ailment>,
    /// Number of the newest Xid that the driver told about it, an application's fault or its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_xid: Option<u64>,
    /// How its control daemon of MPS is; none where nobody looks after one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsState>,
    /// Processes on it. None: not looked for this time. Empty: looked for, there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<Vec<ProcessUse>>,
    /// Pods with processes on it of which the driver tells more than their memory. Goes with the list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<TenantReport>,
}

/// What the driver tells of a pod with processes on a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantReport {
    /// The pod.
    pub pod_uid: String,
    /// What the driver holds it to, read back: the limits of its containers together. None: at least one
    /// process of it has no limit that the driver confirms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_mib: Option<u64>,
    /// Whether a process of it is known to have no limit; where limits cannot be read, it is not known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_unlimited: bool,
    /// Whether a process of it is a client of MPS.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_mps_client: bool,
    /// What MPS holds it to, by the environment of its processes: their limits together. None: at least one
    /// is no client of the device's daemon, or has no limit that can be read, or the daemon does not serve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps_limit_mib: Option<u64>,
    /// Percent of the time since the last list in which its kernels ran: of all its processes together, 100
    /// at most. None where the driver does not say whose kernels run: in MIG mode, beside clients of MPS, of
    /// the first list, and of older agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<u8>,
}

impl DeviceUse {
    /// What is said of a device whose use cannot be read.
    pub fn unread(uuid: String, ailment: Ailment) -> Self {
        Self {
            uuid,
            used_mib: None,
            busy_percent: None,
            healthy: false,
            ailment: Some(ailment),
            last_xid: None,
            mps: None,
            processes: None,
            tenants: Vec::new(),
        }
    }
}

/// One process on one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessUse {
    /// Process id on the host.
    pub pid: u32,
    /// Pod that it belongs to; none for a process of the host. Of a static pod this is the hash of
    /// its manifest, the value of the annotation `kubernetes.io/config.hash` of its mirror pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// Its memory on the device; none where the driver cannot say, which is not zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
}

/// The extender's answer to a report that it read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// Version of the schema it is written in.
    pub schema_version: u32,
    /// The session to use from now on.
    pub session: u64,
    /// Whether the report counted.
    pub outcome: Outcome,
    /// Whether the next report must carry the inventory.
    #[serde(default)]
    pub send_inventory: bool,
    /// Version of the bookings, for the next report of the session; none of older extenders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bookings_version: Option<u64>,
    /// What is booked on this node; none where the version that the report names still stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bookings: Option<Vec<Booking>>,
}

/// Whether a report counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is in the books.
    Accepted,
    /// It was repeated or came out of order, and changed nothing.
    Ignored,
}

/// What one pod holds on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Booking {
    /// UID of the pod.
    pub pod_uid: String,
    /// `namespace/name`, for people.
    pub pod: String,
    /// How far the reservation has come.
    pub state: BookingState,
    /// Amount of each device.
    pub devices: Vec<BookedDevice>,
}

impl Booking {
    /// A reservation as the agent sees it.
    pub fn from_reservation(reservation: &Reservation) -> Self {
        let devices = reservation.placement.devices.iter();
        Self {
            pod_uid: reservation.pod.uid.to_string(),
            pod: reservation.pod.name.to_string(),
            state: match reservation.state {
                ReservationState::Assumed { .. } => BookingState::Assumed,
                ReservationState::Confirmed => BookingState::Confirmed,
                ReservationState::Draining { .. } => BookingState::Draining,
            },
            devices: devices
                .map(|placed| BookedDevice {
                    uuid: placed.id.to_string(),
                    memory_mib: placed.demand.memory.mib(),
                    share_millionths: placed.demand.share.millionths(),
                })
                .collect(),
        }
    }
}

/// How far a reservation has come; later states are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BookingState {
    /// Bind has chosen.
    Assumed,
    /// The pod is bound here.
    Confirmed,
    /// The pod has ended; its processes may not have.
    Draining,
}

/// An amount of one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BookedDevice {
    /// NVML's UUID.
    pub uuid: String,
    /// Memory.
    pub memory_mib: u64,
    /// Compute share in millionths.
    pub share_millionths: u64,
}

/// Body of an answer with status 409, 422 or 503.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// What was wrong, for people.
    pub error: String,
    /// What was wrong, for the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Refusal {
    /// Reason of a 409: the session is not the newest one issued for this node; say hello again.
    pub const SESSION_EXPIRED: &str = "session_expired";
}
