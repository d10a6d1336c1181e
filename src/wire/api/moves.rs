//! `GET /v1/moves`: moves of running pods that would help. gpupack proposes them and moves nothing.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::kind::{ApiVersion, MoveProposalsKind};

/// What could be moved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MoveProposals {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `MoveProposals`.
    pub kind: MoveProposalsKind,
    /// For pods that no node fits, the most important first; one pod stands for all equal requests.
    pub to_place: Vec<PlaceProposal>,
    /// GPUs that can be emptied onto others in use. Only while nothing waits.
    pub to_empty: Vec<EmptyProposal>,
}

/// Moves that make room for a waiting pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlaceProposal {
    /// `namespace/name`.
    pub pod: String,
    /// Waiting pods with the same request.
    pub pods: usize,
    /// Where it would fit after the moves.
    pub to: Location,
    /// The moves.
    pub moves: Vec<Move>,
}

/// Moves that leave a GPU without tenants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EmptyProposal {
    /// The node.
    pub node: String,
    /// UUID of the GPU.
    pub device_id: String,
    /// The moves.
    pub moves: Vec<Move>,
}

/// A running pod that would move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Move {
    /// `namespace/name`; empty if the caller may not see it.
    pub pod: String,
    /// Where it runs.
    pub from: Location,
    /// Where it would run.
    pub to: Location,
}

/// A node and devices of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Location {
    /// The node.
    pub node: String,
    /// UUIDs of the devices.
    pub device_ids: Vec<String>,
}
