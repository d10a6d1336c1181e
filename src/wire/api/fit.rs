//! `GET /v1/fit`: where a request would fit now; `GET /v1/fragmentation`: where free share is
//! that no typical request can use.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::kind::{ApiVersion, FitKind, FragmentationKind};

/// Where a request fits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Fit {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `Fit`.
    pub kind: FitKind,
    /// The request, in words.
    pub request: String,
    /// GPUs that it could get, wholly or in part; each that could be one of several.
    pub gpus: usize,
    /// Number of nodes that fit.
    pub nodes: usize,
    /// By node: positions of these GPUs in the `gpus` of the node in `/v1/summary`.
    pub gpus_by_node: BTreeMap<String, Vec<usize>>,
}

/// The free share that no typical request can use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Fragmentation {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `Fragmentation`.
    pub kind: FragmentationKind,
    /// By node, in millionths of a GPU. Nodes without any are left out.
    pub share_millionths_by_node: BTreeMap<String, u64>,
}
