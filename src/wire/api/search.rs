//! `GET /v1/search`: pods, nodes and namespaces by a part of their name.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::api::kind::{ApiVersion, SearchResultsKind};

/// The query of `/v1/search`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct SearchQuery {
    /// The text, of at most 317 bytes.
    #[param(required)]
    pub q: Option<String>,
}

/// The results: the first 20 of each kind, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SearchResults {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `SearchResults`.
    pub kind: SearchResultsKind,
    /// Nodes whose name contains the text.
    pub nodes: Vec<String>,
    /// The same for namespaces of pods that hold a GPU or wait for one.
    pub namespaces: Vec<String>,
    /// The same for pods that hold a GPU or wait for one.
    pub pods: Vec<FoundPod>,
    /// Number of results, listed or not.
    pub totals: SearchTotals,
}

/// Number of results.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SearchTotals {
    /// Nodes.
    pub nodes: usize,
    /// Namespaces.
    pub namespaces: usize,
    /// Pods.
    pub pods: usize,
}

/// A pod in the results.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
pub struct FoundPod {
    /// `namespace/name`.
    pub pod: String,
    /// Its node; left out while it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Positions of its devices in the `gpus` of the node in `/v1/summary`.
    pub gpus: Vec<usize>,
}
