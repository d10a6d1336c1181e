//! `GET /v1/state`: nodes, their devices, the tenants of these, and all pods.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::api::condition::{AddressingMode, DeviceFault, MpsState};
use crate::api::kind::{ApiVersion, StateKind};

/// The query of `/v1/state`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StateQuery {
    /// Only this node, and the pods on it; without it all nodes and pods.
    pub node: Option<String>,
}

/// The ledger at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `State`.
    pub kind: StateKind,
    /// How full and fragmented the cluster is; left out if one node was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packing: Option<Packing>,
    /// The nodes, by name.
    pub nodes: Vec<Node>,
    /// The pods on these nodes; without a query also the waiting pods. Only those that the caller may
    /// see.
    pub pods: Vec<Pod>,
}

/// How full and fragmented the cluster is. Ratios in millionths.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Packing {
    /// Devices that can have tenants.
    pub devices: u64,
    /// Devices with at least one tenant.
    pub occupied: u64,
    /// Overallocated devices.
    pub overallocated: u64,
    /// Allocated share over capacity.
    pub allocation_millionths: u64,
    /// Mean fullness of the occupied devices.
    pub efficiency_millionths: u64,
    /// Part of the free share that no typical request can use.
    pub fragmentation_millionths: u64,
}

/// CPU and host memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HostAmount {
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Host memory.
    pub memory_mib: u64,
}

/// A part of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceAmount {
    /// Memory of the device.
    pub memory_mib: u64,
    /// Compute share in millionths of the device.
    pub share_millionths: u64,
}

/// Whether the agent of a node reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum NodeReporting {
    /// It has not reported since the extender started.
    NeverReported,
    /// It reports.
    Reporting,
    /// It has stopped reporting. The node takes no new GPU pods.
    NotReporting,
    /// The node was deleted; some of its pods may still run.
    Gone,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// Name of the node.
    pub name: String,
    /// Its pool; empty if it has none.
    pub pool: String,
    /// Whether its agent reports.
    pub state: NodeReporting,
    /// What it offers to pods.
    pub capacity: HostAmount,
    /// What is free of that.
    pub free: HostAmount,
    /// Version of its driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Newest CUDA version that its driver can run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuda: Option<String>,
    /// Whether the kernel module `nvidia-uvm` is not loaded there: CUDA fails in every container.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lacks_uvm: bool,
    /// Why it takes no pods, or only one, though its agent reports: the last two pods that started there did not get
    /// their GPU. Left out if they did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blind_starts: Option<BlindStarts>,
    /// Its devices, by index.
    pub devices: Vec<Device>,
}

/// What a node takes on which the last pods did not get their GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum BlindStarts {
    /// No pod, until a pod there sees a GPU or the agent's container is made again; after five minutes a trial.
    Closed,
    /// One pod, as a trial.
    Trial,
    /// No other pod than the one that is there as a trial.
    Tried,
}

/// Whether a pod got the GPU that is allocated to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum PodSight {
    /// Not known: no container has started yet, or its mounts cannot be read.
    #[default]
    Unknown,
    /// The container that is to have it has no driver, and no process of the pod uses a device.
    Blind,
    /// The container has the driver, or a process of the pod uses one of its devices.
    Seen,
}

/// What a device is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum DeviceKind {
    /// A physical GPU.
    #[default]
    Gpu,
    /// A physical GPU that is divided into MIG instances, and has no tenants itself.
    MigParent,
    /// A MIG instance.
    MigInstance,
}

/// Whether a device takes new tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Health {
    /// It does.
    Healthy,
    /// It does not, because of a fault.
    Unhealthy,
    /// It does not, because kubelet allocates it (a device plugin).
    KubeletOwned,
}

/// How far a MIG instance is that gpupack makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum InstanceState {
    /// It is promised to a pod, and made when that is bound.
    Promised,
    /// It is there.
    Made,
    /// It has no tenant and is being removed.
    Leaving,
}

/// How many more instances of a profile fit on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlaceableProfile {
    /// The profile.
    pub profile: String,
    /// How many.
    pub count: usize,
}

/// An order about a MIG instance that the agent of a node cannot carry out. It tries it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailedMigOrder {
    /// Profile of the instance.
    pub profile: String,
    /// First unit of the instance.
    pub start: u32,
    /// Whether it is to be removed, not made.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub removal: bool,
    /// What is in the way, in the words of the agent: one sentence.
    pub error: String,
}

/// A device: a GPU or a MIG instance. What is not known is left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// UUID.
    pub id: String,
    /// NVML index.
    pub index: u32,
    /// Product name.
    pub model: String,
    /// What it is.
    pub kind: DeviceKind,
    /// MIG profile of an instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_profile: Option<String>,
    /// Whether it is a MIG instance that pods share.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared_instance: bool,
    /// Position of a MIG instance on its GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_placement: Option<MigPlacement>,
    /// How far an instance is that gpupack makes; left out of those that others made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<InstanceState>,
    /// On a GPU on which gpupack makes instances: the units into which it is divided, see `migPlacement`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig_units: Option<u32>,
    /// On a GPU on which gpupack makes instances: how many more of each profile fit, if no other is made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub placeable: Vec<PlaceableProfile>,
    /// Orders about MIG instances of this GPU that its agent cannot carry out now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_failures: Vec<FailedMigOrder>,
    /// Part of its GPU's compute that a MIG instance has, in millionths.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_millionths: Option<u64>,
    /// Streaming multiprocessors of a MIG instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_count: Option<u32>,
    /// Its slots, if its pool divides GPUs into slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<Slots>,
    /// How its tenants are kept apart.
    pub isolation: DeviceIsolation,
    /// Whether it takes new tenants.
    pub health: Health,
    /// Why it takes none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<DeviceFault>,
    /// Number of the newest Xid since its agent's start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_xid: Option<u64>,
    /// State of its MPS control daemon; left out if no agent watches one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsState>,
    /// Number of its device node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// NUMA node of the host that it is attached to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// GPUs that it reaches over NVLink.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neighbors: Vec<Neighbor>,
    /// How it addresses the memory of its host; left out if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addressing_mode: Option<AddressingMode>,
    /// Whether its driver can limit the memory of a container.
    pub can_limit_memory: bool,
    /// Whether its agent sets such limits: without that, no pod borrows memory where the driver limits it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sets_memory_limits: bool,
    /// Schedulable memory.
    pub capacity_mib: u64,
    /// Whether that is the size of its model in the configuration, since it has no memory of its own. What is used of
    /// it is not known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub capacity_configured: bool,
    /// What its tenants hold.
    pub allocated: DeviceAmount,
    /// Room that is held for pods until they are bound.
    pub held: DeviceAmount,
    /// What is free for pods.
    pub free: DeviceAmount,
    /// Memory in use, as the agent saw it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_mib: Option<u64>,
    /// Memory in use beyond what is allocated.
    pub used_beyond_allocated_mib: u64,
    /// Untracked memory: of no pod that gpupack placed there. As of the last list of processes.
    pub untracked_mib: u64,
    /// Over-limit pods, by UID; not all of them are tenants.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub over_limit_pods: Vec<OverLimitPod>,
    /// Whether facts from outside put more on it than it has.
    pub overallocated: bool,
    /// Its tenants, by UID.
    pub tenants: Vec<Tenant>,
    /// Pods that run on it in free room, and are allocated another device of the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guests: Vec<Guest>,
}

/// A pod that runs on another device than the one that it is allocated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Guest {
    /// UID of the pod; empty if the caller may not see it.
    pub pod_uid: String,
    /// `namespace/name`; empty if the caller may not see it.
    pub pod: String,
    /// What it requests. That is not allocated here, and counts as free.
    pub borrowed: DeviceAmount,
    /// Whether it is on its way to the device that it is allocated.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// Memory in use, as of the last list of processes; left out if the driver does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_mib: Option<u64>,
}

/// Position of a MIG instance, in units of its GPU's axis, as NVML has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigPlacement {
    /// The first unit.
    pub start: u32,
    /// Number of units.
    pub size: u32,
}

/// The slots of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Slots {
    /// Number of slots.
    pub total: u32,
    /// Free slots.
    pub free: u32,
}

/// A GPU that another one reaches over NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Neighbor {
    /// UUID.
    pub id: String,
    /// Active links.
    pub links: u32,
}

/// What limits the memory of tenants that share a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum IsolationMode {
    /// Nothing.
    None,
    /// NVIDIA MPS. Its clients must cooperate.
    Mps,
    /// The driver.
    Driver,
    /// The hardware: it is a MIG instance.
    Mig,
    /// Nothing has to: the pod has the whole device.
    Whole,
}

/// The isolation that the pool configures for a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceIsolation {
    /// What the operator configured; `Mig` for a MIG instance.
    pub configured: IsolationMode,
    /// Whether it is in force; left out if nothing has to be verified: without isolation, and for
    /// a MIG instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verification: Option<Verification>,
}

/// Whether the configured isolation of a device is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Verification {
    /// No agent has checked it.
    Pending,
    /// The agent verified it for every tenant that it saw.
    Verified,
    /// The agent saw that it is not in force.
    Missing,
}

/// A pod that uses more of a device than it may.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct OverLimitPod {
    /// UID of the pod; empty if the caller may not see it.
    pub pod_uid: String,
    /// `namespace/name`; empty if the node has no reservation of it, or the caller may not see it.
    pub pod: String,
    /// Memory that it uses.
    pub used_mib: u64,
    /// Memory that it may use: what it holds, or its limit if that is more.
    pub allowed_mib: u64,
    /// How many usage samples in a row, up to the last, show this.
    pub samples: u32,
}

/// The state of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum PodState {
    /// It waits for a node.
    Waiting,
    /// *bind* has chosen; the outcome of its Binding is not known yet.
    Assumed,
    /// The API server has accepted its Binding.
    Confirmed,
    /// It has ended; its processes may still use the device.
    Draining,
}

/// A tenant of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tenant {
    /// UID of the pod; empty if the caller may not see it.
    pub pod_uid: String,
    /// `namespace/name`; empty if the caller may not see it.
    pub pod: String,
    /// The state of its reservation.
    pub state: PodState,
    /// What it holds of the device.
    pub allocated: DeviceAmount,
    /// Memory that it may use where it runs, if that is more than it holds: in pools that lend memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_mib: Option<u64>,
    /// Memory in use where it runs, as of the last list of processes; left out if the driver does not
    /// report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_mib: Option<u64>,
    /// What limits its memory.
    pub isolation: TenantIsolation,
    /// The device on which it runs, if that is another one of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runs_on: Option<String>,
    /// Whether it is on its way from there to this device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub comes_home: bool,
    /// Whether it should have ended by now and has not: no room is planned where it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hangs: bool,
}

/// What limits the memory of one tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TenantIsolation {
    /// What was requested or configured.
    pub configured: IsolationMode,
    /// What was read back on the node.
    pub verified: IsolationMode,
    /// Who holds it to its memory; left out by extenders that do not say so yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_by: Option<MemoryHolder>,
}

/// Who holds a pod to its memory on a device, the weakest first. Only what was verified counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub enum MemoryHolder {
    /// Nothing limits it.
    Nobody,
    /// gpupack evicts it while it uses more than it may, if the driver reports what it uses.
    Guard,
    /// NVIDIA MPS. Its clients must cooperate.
    Mps,
    /// The driver.
    Driver,
    /// The MIG instance that it has for itself.
    Mig,
    /// Nothing has to: it has the whole GPU.
    Whole,
}

impl MemoryHolder {
    /// In words, after "memory held by".
    pub const fn words(self) -> &'static str {
        match self {
            Self::Nobody => "nobody",
            Self::Guard => "guard",
            Self::Mps => "MPS",
            Self::Driver => "driver",
            Self::Mig => "MIG instance",
            Self::Whole => "whole GPU",
        }
    }
}

/// The weakest isolation that a pod accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum RequestedIsolation {
    /// None: it trusts its neighbors.
    #[default]
    None,
    /// Every tenant of the device is limited to its memory.
    Memory,
    /// A MIG instance or a whole GPU.
    Hardware,
}

impl RequestedIsolation {
    /// Whether it is the default.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }
}

/// What a pod requests of GPUs. What it does not request is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodRequest {
    /// Number of devices.
    pub devices: u32,
    /// Compute share of each device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_millionths: Option<u64>,
    /// Memory of each device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Profile of the MIG instances.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_profile: Option<String>,
    /// Whether it requests one slot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub slot: bool,
    /// Models that it accepts; empty for any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<String>,
    /// The weakest isolation that it accepts.
    #[serde(default, skip_serializing_if = "RequestedIsolation::is_none")]
    pub isolation: RequestedIsolation,
    /// Limit of the share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_share_millionths: Option<u64>,
    /// Limit of the memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_memory_mib: Option<u64>,
    /// The policy that it chooses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Least memory of a part of a device, a rule of the operator.
    pub min_memory_mib: u64,
    /// Whether a whole MIG instance may serve it, a rule of the operator.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_instance: bool,
}

/// A pod: a placed one with what it holds, or a waiting one with its request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pod {
    /// UID of the pod.
    pub pod_uid: String,
    /// `namespace/name`; empty if only the UID is known, as for pods without a GPU.
    pub pod: String,
    /// Its node, once it is placed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Its state.
    pub state: PodState,
    /// CPU and host memory.
    pub host: HostAmount,
    /// Number of devices.
    pub devices: u32,
    /// Compute share of each device; left out if the request has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_millionths: Option<u64>,
    /// Memory of each device; left out if the request has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_memory_mib: Option<u64>,
    /// MIG profile, if the devices are MIG instances.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_profile: Option<String>,
    /// Models that a waiting pod accepts; empty for any. Empty for a placed pod.
    pub models: Vec<String>,
    /// Its request, as it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<PodRequest>,
    /// The configured isolation with which it was placed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolation: Option<IsolationMode>,
    /// Its priority; only of waiting pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Creation time in seconds since 1970; only of waiting pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created_unix_seconds: Option<u64>,
    /// Why one of its containers cannot start, if its device is the cause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_failure: Option<String>,
    /// Whether its containers got the devices that are allocated to it. Which of them they got is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<PodSight>,
}
