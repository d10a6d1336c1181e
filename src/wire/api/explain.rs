//! `GET /v1/explain`: why one pod waits, and what would help.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::api::kind::{ApiVersion, ExplanationKind};
use crate::api::moves::Move;
use crate::api::waiting::{Obstacle, QueuePosition};

/// The query of `/v1/explain`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ExplainQuery {
    /// The pod: `namespace/name`.
    #[param(required)]
    pub pod: Option<String>,
}

/// Why a pod waits, or where it is placed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `Explanation`.
    pub kind: ExplanationKind,
    /// `namespace/name`.
    pub pod: String,
    /// One sentence.
    pub verdict: String,
    /// Its request, in words.
    pub request: String,
    /// What is in its way; left out for a placed pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked_by: Option<Obstacle>,
    /// Who holds a placed pod to its memory; the weakest of its devices counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<String>,
    /// Seconds since its creation; only of waiting pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_seconds: Option<u64>,
    /// Its position among the pods that fit on no node and wait for the same GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueuePosition>,
    /// Number of nodes on which it fits now.
    pub fitting_nodes: usize,
    /// The first twenty of them by name.
    pub fits_on: Vec<String>,
    /// Containers that are restarted when it is placed, because they borrow its room: the fewest of these
    /// nodes.
    pub restarts: usize,
    /// Why the others refuse, by groups of similar nodes, the closest first.
    pub refusals: Vec<Refusal>,
    /// The smallest changes that would help now, each checked, the cheapest first; then what an
    /// operator could do.
    pub suggestions: Vec<String>,
    /// The cheapest moves of running pods that would make room, if a few are enough.
    pub moves: Vec<Move>,
    /// Unknown facts that might matter.
    pub unknown: Vec<String>,
    /// Each refusing node, by name.
    pub nodes: Vec<NodeRefusal>,
}

/// Nodes of one pool with the same GPUs that refuse for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Refusal {
    /// Number of nodes.
    pub nodes: usize,
    /// What is in the way of the pod there.
    pub blocked_by: Obstacle,
    /// The reason, as kube-scheduler shows it.
    pub reason: String,
    /// What the closest node lacks, with its amount.
    pub missing: String,
    /// The closest node.
    pub closest_node: String,
    /// Their pool; empty if they have none.
    pub pool: String,
    /// The GPUs of each: `8 × NVIDIA L4 (23034 MiB)`.
    pub gpus: String,
    /// Whether the pod would fit if other pods ended.
    pub fits_if_pods_end: bool,
}

/// A node that refuses the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeRefusal {
    /// Name of the node.
    pub name: String,
    /// The reason, as kube-scheduler shows it.
    pub reason: String,
    /// What the node lacks, with its amount.
    pub missing: String,
}
