//! The messages between agent and extender: `PUT /v1/nodes/{node}/report` and its reply.
//!
//! The agent reports what the node has (inventory) and how it is used. The reply carries the node's
//! allocations, so that the agent needs no watch. Both sides use these types; the extender checks a report and
//! converts it into those of its model (`server/reports`), and no unchecked value goes further.
//!
//! The agent begins without a session, with the full inventory. The reply issues a session number;
//! later reports carry it, and a sequence number that only grows. A report of an older session gets
//! 409 and [`ErrorReason::SessionExpired`](crate::api::error::ErrorReason), and the agent begins
//! again. An impossible report gets 422; 503 means *later*.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::condition::{AddressingMode, ClearResult, DeviceFault, MpsState};
use crate::api::kind::{ApiVersion, LibraryAnswerKind, ReplyKind, ReportKind};
use crate::api::state::{DeviceKind, MigPlacement, Neighbor};
use crate::json_object;

/// The only API version that this side writes and reads. It changes when older sides would read
/// something false. What is only added keeps it: both sides ignore unknown fields, and missing
/// optional fields have their default.
pub const API_VERSION: &str = "gpupack.dev/v1alpha1";

/// Largest body of a report or reply, in bytes: 16 full GPUs with 4,096 processes each need 6 MiB.
pub const MAX_BODY_BYTES: usize = 8 << 20;

/// The path of a node's reports; Kubernetes node names need no escaping.
pub fn report_path(node: &str) -> String {
    format!("/v1/nodes/{node}/report")
}

/// Where the agent of a node asks whether it may open NVIDIA's library.
pub fn library_path(node: &str) -> String {
    format!("/v1/nodes/{node}/library")
}

/// One report of an agent about its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `Report`; may be left out.
    #[serde(default)]
    pub kind: ReportKind,
    /// Random id of this run of the agent, at most 64 characters.
    pub agent: String,
    /// The session that the extender issued. Without it the report begins a session, and must have
    /// the inventory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<u64>,
    /// Grows with the reports of one run of the agent, from the time of its start on, in milliseconds since
    /// 1970: while an agent reports, one that began earlier is refused. A report without an answer is sent
    /// again with the same number: the extender accepts one of the two.
    pub sequence: u64,
    /// All devices of the node: at the beginning of a session, and after a change.
    #[serde(
        default,
        deserialize_with = "json_object::optional_list",
        skip_serializing_if = "Option::is_none"
    )]
    pub inventory: Option<Vec<DeviceReport>>,
    /// The driver, if it reports its version; sent with the inventory.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub driver: Option<DriverReport>,
    /// `allocationsVersion` of this session's last reply; without it the reply has all allocations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocations_version: Option<u64>,
    /// Observed use, one entry for each device that could be read.
    #[serde(default, deserialize_with = "json_object::list")]
    pub devices: Vec<DeviceUse>,
    /// Orders about MIG instances that could not be carried out, as long as they are given.
    #[serde(
        default,
        deserialize_with = "json_object::list",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub mig_failures: Vec<MigFailure>,
    /// The limits of memory that the agent has in force; left out if it sets none.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub memory_limits: Option<LimitsInForce>,
    /// What the last leader promised to pods of this node: for the next one, which may know nothing of that.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub mig_promises: Option<MigPromises>,
    /// The containers of pods that hold devices here, as far as their mounts can be read: at the beginning of a
    /// session, and after a change.
    #[serde(
        default,
        deserialize_with = "json_object::optional_list",
        skip_serializing_if = "Option::is_none"
    )]
    pub containers: Option<Vec<ContainerReport>>,
    /// What became of the order to clear a GPU, as long as it is given.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub clear_outcome: Option<ClearOutcome>,
}

/// What became of an order to clear a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClearOutcome {
    /// Term of the leader that gave it.
    pub term: u64,
    /// Its number.
    pub number: u64,
    /// What became of it.
    pub result: ClearResult,
    /// Why the GPU still takes no tenants, if it was refused. Left out: the agent does not see that GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<DeviceFault>,
}

/// A container of a pod, and whether it got the driver when it was made. That never changes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerReport {
    /// UID of the pod.
    pub pod_uid: String,
    /// Its id in the container runtime, as the pod's status has it behind `://`.
    pub id: String,
    /// Whether `libcuda.so` or `libnvidia-ml.so` is mounted in it.
    pub has_driver: bool,
    /// Whether it began before this agent, which has the driver: where it has none, that is no sign for later ones.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_older: bool,
}

/// The MIG instances that a leader promised to pods which were not bound yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigPromises {
    /// Term of that leader.
    pub term: u64,
    /// The instances, some of which may be there by now.
    #[serde(default, deserialize_with = "json_object::list")]
    pub instances: Vec<MigPromise>,
}

/// A MIG instance that is promised to a pod until the pod is bound.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigPromise {
    /// UID of the pod.
    pub pod_uid: String,
    /// UUID of the GPU.
    pub gpu: String,
    /// Profile of the instance.
    pub profile: String,
    /// Its first unit.
    pub start: u32,
}

/// The orders about limits of memory that an agent has in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LimitsInForce {
    /// Term of the leader that gave them.
    pub term: u64,
    /// The GPUs that they are about.
    #[serde(default, deserialize_with = "json_object::list")]
    pub gpus: Vec<NumberedGpu>,
}

/// A GPU, and the number of an order about it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NumberedGpu {
    /// UUID of the GPU.
    pub gpu: String,
    /// Number of the order, another one each time that it begins again. 0 for a GPU whose limits the agent sets, before
    /// its first order.
    pub number: u64,
}

/// An order about a MIG instance that could not be carried out; the agent tries it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigFailure {
    /// UUID of the GPU.
    pub gpu: String,
    /// Profile of the instance, for instance `1g.10gb`.
    pub profile: String,
    /// First unit of the instance.
    pub start: u32,
    /// UUID of the instance, if the order was to remove it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// One sentence: what was in the way.
    pub error: String,
    /// The units of a GPU instance that was in the way, and that no inventory lists: it has no compute instance. None
    /// that overlaps it can be made either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden: Option<MigPlacement>,
}

/// The driver of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DriverReport {
    /// Its version, for instance `580.95.05`.
    pub version: String,
    /// Newest CUDA version that it supports, for instance `13.0`; left out if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<String>,
    /// Whether the kernel module `nvidia-uvm` is certainly not loaded: then CUDA fails in every container.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lacks_uvm: bool,
}

/// One device of the inventory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceReport {
    /// NVML's UUID.
    #[serde(rename = "id")]
    pub uuid: String,
    /// NVML's index; that of the parent for a MIG instance.
    pub index: u32,
    /// Product name.
    pub model: String,
    /// Memory of the board or instance in MiB, before the driver's reserve; 0 if it has none of its own.
    pub memory_mib: u64,
    /// Memory that the driver reserves for itself, in MiB.
    #[serde(default)]
    pub reserved_mib: u64,
    /// GPU, MIG parent or MIG instance.
    #[serde(default)]
    pub kind: DeviceKind,
    /// UUID of the GPU that has this MIG instance.
    #[serde(rename = "parentId", default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Profile of a MIG instance, for instance `3g.40gb`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig_profile: Option<String>,
    /// Whether it can take new tenants.
    pub healthy: bool,
    /// Number of its device file, `/dev/nvidia<minor>`; not always equal to its index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// NUMA node of the host to which it is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// GPUs of the same node that it is connected to by NVLink.
    #[serde(
        default,
        deserialize_with = "json_object::list",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub neighbors: Vec<Neighbor>,
    /// Position of a MIG instance on its GPU.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub mig_placement: Option<MigPlacement>,
    /// Streaming multiprocessors of a MIG instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_count: Option<u32>,
    /// Streaming multiprocessors that the instances of a GPU in MIG mode share, if the driver lists its profiles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiprocessors: Option<u32>,
    /// How it addresses the memory of its host; left out if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addressing_mode: Option<AddressingMode>,
    /// Whether the driver can limit the memory of containers on it, and reports the limits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub can_limit_memory: bool,
    /// On a GPU in MIG mode: the instances that this agent can make on it. Empty if it may make none.
    #[serde(
        default,
        deserialize_with = "json_object::list",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub mig_profiles: Vec<MigProfileReport>,
    /// Whether an agent of gpupack made this MIG instance since the last boot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub made_here: bool,
}

/// A profile of MIG instances that an agent can make on a GPU, as NVML reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigProfileReport {
    /// Its name, for instance `1g.10gb` or `1g.10gb+me`.
    pub profile: String,
    /// Memory of an instance in MiB.
    pub memory_mib: u64,
    /// Streaming multiprocessors of an instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_count: Option<u32>,
    /// How many units of the GPU's memory it covers, as in `migPlacement`.
    pub size: u32,
    /// Units at which it may begin, in rising order.
    pub starts: Vec<u32>,
}

impl DeviceReport {
    /// A healthy device with nothing but a name, an index and a kind.
    pub fn new(uuid: String, index: u32, model: String, kind: DeviceKind) -> Self {
        Self {
            uuid,
            index,
            model,
            memory_mib: 0,
            reserved_mib: 0,
            kind,
            parent: None,
            mig_profile: None,
            healthy: true,
            minor: None,
            numa_node: None,
            neighbors: Vec::new(),
            mig_placement: None,
            sm_count: None,
            multiprocessors: None,
            addressing_mode: None,
            can_limit_memory: false,
            mig_profiles: Vec::new(),
            made_here: false,
        }
    }
}

/// Observed use of one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceUse {
    /// NVML's UUID.
    #[serde(rename = "id")]
    pub uuid: String,
    /// Used memory in MiB, without the driver's reserve; left out if the driver does not report
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_mib: Option<u64>,
    /// Percent of time in which a kernel ran; left out if the driver does not report it (MIG).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<u8>,
    /// Whether the device can take new tenants now.
    pub healthy: bool,
    /// Why it cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<DeviceFault>,
    /// Number of the newest Xid that the driver reported, whatever its cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_xid: Option<u64>,
    /// The newest event of the driver because of which it, or one of its MIG instances, takes no tenants: milliseconds
    /// of the agent's own clock, which tell it from other events. Left out: there is none, or its fault has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault_event: Option<u64>,
    /// State of its MPS control daemon; left out if no agent runs one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsState>,
    /// Its processes. Left out: not listed this time. Empty: listed, and there are none.
    #[serde(
        default,
        deserialize_with = "json_object::optional_list",
        skip_serializing_if = "Option::is_none"
    )]
    pub processes: Option<Vec<ProcessUse>>,
    /// Pods with processes on it about which the driver says more than their memory; with the list.
    #[serde(
        default,
        deserialize_with = "json_object::list",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub tenants: Vec<TenantReport>,
}

/// What the driver says about a pod with processes on a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TenantReport {
    /// The pod.
    pub pod_uid: String,
    /// The memory limit that the driver applies, read back: the sum over the containers, in MiB.
    /// Left out if the driver confirms no limit for at least one process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_mib: Option<u64>,
    /// Whether a process certainly has no limit; `false` if limits cannot be read.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_unlimited: bool,
    /// Whether one of its processes is an MPS client.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_mps_client: bool,
    /// The memory limit by MPS in MiB: the sum over its processes, by their environments.
    /// Left out if one is no client of the device's daemon or shows no limit, or if the daemon does
    /// not serve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps_limit_mib: Option<u64>,
    /// Percent of the time since the last list in which kernels of its processes ran, together at
    /// most 100. Left out if the driver does not report whose kernels ran: in MIG mode, beside MPS
    /// clients, in the first list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<u8>,
}

impl DeviceUse {
    /// The report of a device whose use cannot be read.
    pub fn unread(uuid: String, fault: DeviceFault) -> Self {
        Self {
            uuid,
            used_mib: None,
            busy_percent: None,
            healthy: false,
            fault: Some(fault),
            last_xid: None,
            fault_event: None,
            mps: None,
            processes: None,
            tenants: Vec::new(),
        }
    }
}

/// One process on one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProcessUse {
    /// Process id on the host.
    pub pid: u32,
    /// Pod of the process; left out for one of the host. For a static pod this is the hash of its
    /// manifest: the annotation `kubernetes.io/config.hash` of its mirror pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// Its memory on the device in MiB; left out if the driver does not report it, which is not zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
}

/// The extender's answer to a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Reply {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `Reply`.
    pub kind: ReplyKind,
    /// The session to use from now on.
    pub session: u64,
    /// What became of the report.
    pub outcome: Outcome,
    /// Version of the allocations, for the next report of the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocations_version: Option<u64>,
    /// Allocations on this node; left out if the version that the report names is still current.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocations: Option<Vec<Allocation>>,
    /// MIG instances to make and to remove. Left out by a replica that gives no orders.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub mig_orders: Option<MigOrders>,
    /// Limits of memory to set. Left out by a replica that gives no orders, and where none are set.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub memory_limits: Option<LimitOrders>,
    /// The GPU whose past faults are to be forgotten. Left out by a replica that gives no orders.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub clear_orders: Option<Box<ClearOrders>>,
    /// Why the agent is to close NVIDIA's library and to keep it closed, as label and value of its
    /// Node object. Left out: the library may be open. Every replica says what it knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub close_library: Option<String>,
}

/// Whether the agent of a node may open NVIDIA's library: what an agent asks that has nothing to
/// report yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LibraryAnswer {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `LibraryAnswer`.
    pub kind: LibraryAnswerKind,
    /// As in a reply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub close_library: Option<String>,
}

/// What a leader orders about past faults of GPUs, at most one order at a time. The agent obeys the newest term, as for
/// `migOrders`, and carries each order out once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClearOrders {
    /// Term of the leader that gives them; it grows with each change of the leader.
    pub term: u64,
    /// The order, until its outcome is reported or its time is over.
    #[serde(
        default,
        deserialize_with = "json_object::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub order: Option<ClearOrder>,
}

/// The order to forget the faults that past events stand for, of a GPU and its MIG instances.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClearOrder {
    /// Its number: no other order of this term has it.
    pub number: u64,
    /// UUID of the GPU.
    pub gpu: String,
    /// `faultEvent` of it in the last report that the leader had. If there has been another event, it is not cleared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault_event: Option<u64>,
}

/// The limits that the driver is to have for pods that may use more memory than they request.
///
/// The agent lowers limits first. It raises others only once no pod uses more than its new limit: so what all may use
/// together never grows beyond what the orders say. Limits stay when a replica does not answer any more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct LimitOrders {
    /// Term of the leader that gives them; it grows with each change of the leader.
    pub term: u64,
    /// The GPUs with such pods.
    #[serde(default, deserialize_with = "json_object::list")]
    pub gpus: Vec<GpuLimits>,
}

/// The limits for the pods of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuLimits {
    /// UUID of the GPU.
    pub gpu: String,
    /// Number of the order: another one each time that a pod comes.
    pub number: u64,
    /// The pods; limits of others are left as they are.
    #[serde(default, deserialize_with = "json_object::list")]
    pub pods: Vec<PodLimit>,
}

/// How much memory of a GPU a pod may use.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodLimit {
    /// UID of the pod.
    pub pod_uid: String,
    /// The most memory of all its containers together, in MiB.
    pub limit_mib: u64,
    /// Whether it uses more than that, and cannot be made to give it back: only its growth is to be stopped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_more: bool,
}

/// All MIG instances that are to be made and removed on a node at this moment.
///
/// The agent removes first and makes then. An order stands until the next reply of the same
/// replica, or until that replica no longer answers. What is done already is done once only.
///
/// The agent obeys the newest term that it has heard from any replica in the last 30 s. So a new leader may give an
/// empty set of orders: it ends those of the leader before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigOrders {
    /// Term of the leader that gives them; it grows with each change of the leader.
    pub term: u64,
    /// Instances that are to be there.
    #[serde(default, deserialize_with = "json_object::list")]
    pub make: Vec<MakeInstance>,
    /// UUIDs of instances that are to go. One with a process stays, and so does one that is to be
    /// there.
    #[serde(default)]
    pub remove: Vec<String>,
    /// What is promised to pods that are not bound yet. The agent reports it until it gets other orders.
    #[serde(
        default,
        deserialize_with = "json_object::list",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub promises: Vec<MigPromise>,
}

/// A MIG instance that is to be there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MakeInstance {
    /// UUID of the GPU, which is in MIG mode.
    pub gpu: String,
    /// Its profile, one of those in `migProfiles` of the GPU.
    pub profile: String,
    /// Its first unit, one of the `starts` of that profile.
    pub start: u32,
}

/// What became of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Outcome {
    /// It is in the ledger.
    Accepted,
    /// It was repeated or out of order, and changed nothing.
    Ignored,
}

/// What one pod holds on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Allocation {
    /// UID of the pod.
    pub pod_uid: String,
    /// `namespace/name`, for people.
    pub pod: String,
    /// State of the reservation.
    pub state: AllocationState,
    /// Amounts of the devices that it runs on.
    pub devices: Vec<AllocatedDevice>,
    /// Whether it may be moved to another device soon. Each sample is to be reported meanwhile.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_guest: bool,
}

/// State of a reservation; later states are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub enum AllocationState {
    /// *bind* has chosen the node and devices.
    Assumed,
    /// The pod is bound here.
    Confirmed,
    /// The pod has ended, or is moved to another device; its processes may still run.
    Draining,
}

/// Amounts of one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedDevice {
    /// NVML's UUID.
    #[serde(rename = "id")]
    pub uuid: String,
    /// Memory, in MiB.
    pub memory_mib: u64,
    /// Compute share in millionths.
    pub share_millionths: u64,
}
