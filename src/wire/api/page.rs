//! `GET /v1/summary` and `GET /v1/events`: what the page shows, and what is new since. `GET /v1/teams`.
//!
//! There are up to 40,000 GPUs, so the cells of the map are lists of numbers, not objects. The
//! server keeps the cells of nodes as JSON and writes them as the `N` of [`Summary`].

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::api::kind::{ApiVersion, SummaryDeltaKind, SummaryKind, TeamListKind};
use crate::api::state::{NodeReporting, Packing};
use crate::api::waiting::WaitingPod;

/// The query of `/v1/events`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventsQuery {
    /// The name (`at`) of the snapshot that the client has.
    pub after: Option<String>,
}

/// Everything that the page shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Summary<'a, N = NodeCell> {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `Summary`.
    pub kind: SummaryKind,
    /// Version of the extender.
    pub version: Cow<'a, str>,
    /// Name of this snapshot; deltas continue from it.
    pub at: String,
    /// Time in seconds since 1970.
    pub unix_seconds: u64,
    /// The figures.
    pub figures: Cow<'a, Figures>,
    /// The last hour, a point every 5 seconds, the oldest first.
    pub trend: Vec<TrendPoint>,
    /// Product names of GPUs; cells refer to them by position.
    pub models: Vec<Cow<'a, str>>,
    /// Namespaces of tenants; cells refer to them by position. Empty if the caller may not see its pods.
    pub namespaces: Vec<Cow<'a, str>>,
    /// The map: the nodes, by name.
    pub nodes: Vec<N>,
}

/// What is newer than a snapshot. A part without news is left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SummaryDelta<'a, N = NodeCell> {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `SummaryDelta`.
    pub kind: SummaryDeltaKind,
    /// Name of the snapshot to which this leads.
    pub at: String,
    /// Time in seconds since 1970.
    pub unix_seconds: u64,
    /// All figures, if one changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub figures: Option<Cow<'a, Figures>>,
    /// New points.
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    pub trend: Vec<TrendPoint>,
    /// New product names, each with its position.
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<(usize, Cow<'a, str>)>,
    /// New namespaces, each with its position.
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<(usize, Cow<'a, str>)>,
    /// Nodes that are new or changed.
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<N>,
    /// Names of nodes that are gone.
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    pub gone: Vec<Cow<'a, str>>,
}

/// The figures: how well the cluster is packed, and which pods wait.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Figures {
    /// Whether the extender answers kube-scheduler.
    pub readiness: Readiness,
    /// Nodes that hold pods and have not reported, while the extender waits for them.
    pub awaited_nodes: usize,
    /// How full and fragmented the cluster is.
    pub packing: Packing,
    /// Free share that no typical request can use, in millionths of a GPU.
    pub fragmented_share_millionths: u64,
    /// Pods that fitted on no node at the last try.
    pub waiting: usize,
    /// Seconds since the oldest of them was created.
    pub longest_wait_seconds: u64,
    /// The first 100 of them, by priority, then the oldest first.
    pub waiting_pods: Vec<WaitingPod>,
    /// Room that is kept for waiting pods, the first 100 by their order.
    pub kept_rooms: Vec<KeptRoom>,
    /// The first 100 teams by name. None unless the configuration gives shares to teams.
    pub teams: Vec<Team>,
}

/// Room that is kept for a waiting pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct KeptRoom {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// The node with the room.
    pub node: String,
    /// Why it is kept.
    pub reason: KeptReason,
    /// What of its devices is not free yet, in millionths of a device, in sum. The pod is bound once
    /// that is zero.
    pub lacks_millionths: u64,
}

/// Why room is kept for a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum KeptReason {
    /// The pod is the first of a line.
    FirstOfLine,
    /// Other pods are evicted for it.
    PodsLeave,
    /// It starts together with its group.
    Group,
}

/// What one team has of the GPUs. A pod counts as its markers do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Team {
    /// The name: a namespace, or a value of the label of the configuration.
    pub team: String,
    /// What is guaranteed to it, in millionths of a GPU.
    pub guaranteed_millionths: u64,
    /// Most that it may have; left out if there is no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_most_millionths: Option<u64>,
    /// What its pods have, with room that is kept for them.
    pub used_millionths: u64,
    /// What its over-quota pods have: these may be evicted for what is guaranteed to other teams.
    pub over_quota_millionths: u64,
    /// Its pods that have or keep GPUs.
    pub pods: usize,
    /// Its pods that fitted on no node at the last try.
    pub waiting: usize,
}

/// The teams, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TeamList {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `TeamList`.
    pub kind: TeamListKind,
    /// The teams.
    pub items: Vec<Team>,
}

/// Whether the extender answers kube-scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Readiness {
    /// It does.
    Ready,
    /// Not yet: pods and nodes are not listed.
    #[default]
    NotListed,
    /// Not yet: nodes that hold pods have not reported.
    AwaitingReports,
}

/// A point of the last hour, as a list: seconds since 1970; packing efficiency, fragmentation and
/// allocation in thousandths, `null` if there is none; waiting pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TrendPoint(pub (u64, Option<u64>, Option<u64>, Option<u64>, usize));

/// One node of the map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeCell {
    /// Name of the node.
    pub name: String,
    /// Whether its agent reports.
    pub state: NodeReporting,
    /// Its devices, by index.
    pub gpus: Vec<GpuCell>,
}

/// One device of the map, as a list: position of its model in `models`; capacity in MiB; flags
/// (`1` unhealthy, `2` overallocated, `4` divided into MIG instances, `8` allocated by kubelet, `16`
/// a MIG instance); memory in use beyond what is allocated, in thousandths; tenants; memory in use
/// in thousandths, rounded down to 20, `null` if unknown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GpuCell(pub (usize, u64, u8, u64, Vec<TenantCell>, Option<u64>));

/// One tenant of a device, as a list: position of its namespace in `namespaces`, `null` if the caller
/// may not see its pods; compute share and memory in thousandths of the device; flags (`1` the pod has ended and its processes may still
/// use the device, `2` no isolation of its memory is verified, `4` a guest: it runs here in free room and
/// is allocated another device, `8` it runs on another device, `16` memory in use above the request of a
/// pod that runs there, in thousandths rounded down to 20; it counts as free).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TenantCell(pub (Option<usize>, u64, u64, u8));
