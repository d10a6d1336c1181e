//! `GET /v1/waiting`: the pods that wait.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::api::kind::{ApiVersion, WaitingPodListKind};

/// The query of `/v1/waiting`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WaitingQuery {
    /// Only pods of this namespace.
    pub namespace: Option<String>,
    /// Most pods in the list.
    #[param(default = 500, maximum = 10_000)]
    pub limit: Option<usize>,
}

/// The waiting pods.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WaitingPodList {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `WaitingPodList`.
    pub kind: WaitingPodListKind,
    /// Number of waiting pods that match the query.
    pub total: usize,
    /// Number of those that are not in the list.
    pub omitted: usize,
    /// The others: first pods whose request is refused, then by priority and age, and last those
    /// with scheduling gates.
    pub items: Vec<WaitingPod>,
}

/// A waiting pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WaitingPod {
    /// `namespace/name`.
    pub pod: String,
    /// Its request, in words.
    pub request: String,
    /// Seconds since its creation.
    pub age_seconds: u64,
    /// Its priority.
    pub priority: i32,
    /// Its position among the pods that wait for the same GPUs; left out for a pod that does not
    /// wait for room.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueuePosition>,
    /// What is in its way.
    pub blocked_by: Obstacle,
    /// The closest obstacle, as kube-scheduler shows it.
    pub reason: String,
    /// What the closest node lacks, with its amount.
    pub missing: String,
    /// Nodes with that obstacle.
    pub nodes: usize,
    /// The cheapest change that would help now, if one is known. An explanation has more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suggestion: Option<String>,
}

/// What is in the way of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Obstacle {
    /// The nodes are not known, or gone.
    Node,
    /// No agent reports there.
    Agent,
    /// There is no GPU.
    Gpu,
    /// No device is of the requested kind.
    Kind,
    /// The pods of the namespace may use no pool that has nodes.
    Pool,
    /// No GPU is of an allowed model.
    Model,
    /// No device has the required isolation.
    Isolation,
    /// GPU memory.
    Memory,
    /// Compute share of a GPU.
    Compute,
    /// Number of GPUs.
    Devices,
    /// Every suitable GPU is unhealthy.
    Health,
    /// Kubelet allocates every suitable GPU.
    Kubelet,
    /// Host memory.
    HostMemory,
    /// CPU.
    Cpu,
    /// Room that is kept for a pod.
    Room,
    /// The other pods of its group, or room for all of them at the same time.
    Group,
    /// What its team may have.
    Team,
    /// A node fits, or the pod has scheduling gates: kube-scheduler decides.
    KubeScheduler,
    /// The request itself: it is refused.
    Request,
}

/// A position in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueuePosition {
    /// The position; the first is 1.
    pub position: usize,
    /// Pods in the queue; of more than 10,000 waiting pods the first 10,000 count.
    pub length: usize,
}
