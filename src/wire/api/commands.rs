//! What `gpupack top`, `gpupack doctor`, `gpupack clear` and `gpupack demo` print with `--output json`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::condition::{ClearResult, DeviceFault};
use crate::api::kind::{
    ApiVersion, ClearRequestKind, ClearedKind, DemoSummaryKind, DeviceListKind, DiagnosisKind,
    NodeListKind, SeenDevicesKind, TenantListKind,
};
use crate::api::state::{Device, DeviceKind, Node, NodeReporting, Packing, Tenant};

/// The body of `PUT /v1/gpus/{gpu}`: that the agent forgets the faults of past events on this GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClearRequest {
    /// Version of this body; may be left out.
    #[serde(default)]
    pub api_version: ApiVersion,
    /// `ClearRequest`; may be left out.
    #[serde(default)]
    pub kind: ClearRequestKind,
    /// Node of the GPU.
    pub node: String,
    /// `order` of an earlier answer, to wait for its outcome; without it a new order is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<String>,
}

/// The answer to it, and `gpupack clear`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Cleared {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `Cleared`.
    pub kind: ClearedKind,
    /// Node of the GPU.
    pub node: String,
    /// UUID of the GPU.
    pub gpu: String,
    /// Id of the order.
    pub order: String,
    /// What became of it. Left out as long as that is not known: ask again with `order`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<ClearResult>,
    /// Why the GPU still takes no tenants, if the order was refused. Left out: its agent does not see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<DeviceFault>,
}

/// `gpupack top nodes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeList {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `NodeList`.
    pub kind: NodeListKind,
    /// The nodes.
    pub items: Vec<Node>,
}

/// `gpupack top gpus`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceList {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `DeviceList`.
    pub kind: DeviceListKind,
    /// The devices.
    pub items: Vec<DeviceItem>,
}

/// A device with its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceItem {
    /// Name of its node.
    pub node: String,
    /// Whether the agent of its node reports.
    pub node_state: NodeReporting,
    /// Pool of its node; empty if it has none.
    pub pool: String,
    /// The device.
    pub device: Device,
}

/// `gpupack top tenants`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TenantList {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `TenantList`.
    pub kind: TenantListKind,
    /// The tenants, once for each of their devices.
    pub items: Vec<TenantItem>,
}

/// A tenant with its device and node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TenantItem {
    /// Name of the node.
    pub node: String,
    /// NVML index of the device.
    pub device_index: u32,
    /// UUID of the device.
    pub device_id: String,
    /// The tenant.
    pub tenant: Tenant,
}

/// `gpupack demo`: everything at its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DemoSummary {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `DemoSummary`.
    pub kind: DemoSummaryKind,
    /// Number of nodes.
    pub nodes: usize,
    /// Seed of the fleet and of the stream of pods.
    pub seed: u64,
    /// Number of pods, by what became of them.
    pub pods: PodCounts,
    /// Why pods wait or were refused, the most frequent reason first.
    pub not_placed: Vec<NotPlaced>,
    /// How full and fragmented the fleet is.
    pub packing: Packing,
    /// The most GPUs of one node that were overallocated at one time; more than 0 is a fault.
    pub overallocated_max: usize,
    /// Errors in the ledger, for people.
    pub faults: Vec<String>,
    /// What pods borrowed, and the restarts for that; left out without `--bursts`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub borrowing: Option<DemoBorrowing>,
    /// Milliseconds until the base load was placed.
    pub filled_after_ms: u64,
    /// Milliseconds until the end.
    pub ended_after_ms: u64,
}

/// Number of pods of a demo.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodCounts {
    /// All.
    pub arrived: u64,
    /// Those that were placed.
    pub placed: u64,
    /// Placed pods of the base load of a large fleet.
    pub placed_without_http: u64,
    /// Those that wait.
    pub waiting: u64,
    /// Those with an invalid request, which are never placed.
    pub refused: u64,
    /// Those that have ended.
    pub ended: u64,
    /// Those that were deleted after a long wait.
    pub withdrawn: u64,
    /// Binds that failed although *filter* had accepted the node.
    pub bind_conflicts: u64,
}

/// What pods of a demo borrowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DemoBorrowing {
    /// Bursts that got the memory that they wanted.
    pub bursts: u64,
    /// Bursts for which their GPU had no memory.
    pub bursts_refused: u64,
    /// Containers that were restarted to move their pod home.
    pub recalls: u64,
    /// Containers that were restarted in place, to take memory back.
    pub take_backs: u64,
    /// Restarts that were not made, since others before had been in vain.
    pub failed: u64,
}

/// Pods of a demo that are not placed for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NotPlaced {
    /// The reason, as kube-scheduler shows it.
    pub reason: String,
    /// Number of pods.
    pub pods: usize,
}

/// `gpupack doctor`: what was checked of an installation, and what to fix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Diagnosis {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `Diagnosis`.
    pub kind: DiagnosisKind,
    /// Number of checks, by their state.
    pub counts: CheckCounts,
    /// The checks, in their order.
    pub items: Vec<Check>,
}

/// Number of checks, by their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CheckCounts {
    /// As it should be.
    pub ok: usize,
    /// Something to look at.
    pub warning: usize,
    /// Something to fix.
    pub problem: usize,
    /// Not checked.
    pub not_checked: usize,
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum CheckState {
    /// It is as it should be.
    Ok,
    /// It works, and is worth a look.
    Warning,
    /// It does not work, or not as intended.
    Problem,
    /// It could not be read.
    NotChecked,
}

/// One thing that was checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    /// What was checked; several items can have one name.
    pub check: String,
    /// How it ended.
    pub state: CheckState,
    /// What was found.
    pub found: String,
    /// What to do; left out if nothing has to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// `gpupack-agent devices`: what the container in which it runs has of the GPUs of its node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SeenDevices {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `SeenDevices`.
    pub kind: SeenDevicesKind,
    /// What NVML lists, at most 16.
    pub items: Vec<SeenDevice>,
    /// How many more it lists.
    #[serde(default)]
    pub left_out: usize,
    /// Why NVML lists nothing, or not everything; left out if it lists all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether the driver's module is loaded on the node; left out if that cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module_loaded: Option<bool>,
    /// `NVIDIA_VISIBLE_DEVICES` of the container: a runtime of NVIDIA that acts on it changes it to `void`.
    pub visible_devices: String,
}

/// A device that NVML lists in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SeenDevice {
    /// UUID.
    pub uuid: String,
    /// GPU, GPU in MIG mode, or MIG instance.
    #[serde(rename = "type")]
    pub device_kind: DeviceKind,
    /// Its memory as NVML reports it here, in MiB: under a limit of the driver, that limit.
    pub memory_mib: u64,
}
