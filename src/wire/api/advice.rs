//! `GET /v1/advise`: which pods hold GPU memory without need, what request would have been enough,
//! and how finely each pool could be shared.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::api::kind::{AdviceKind, ApiVersion};
use crate::api::state::DeviceAmount;

/// The query of `/v1/advise`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct AdviseQuery {
    /// Only pods of this namespace.
    pub namespace: Option<String>,
    /// Most pods in the list.
    #[param(default = 1_000, maximum = 1_000)]
    pub limit: Option<usize>,
}

/// The advice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Advice {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `Advice`.
    pub kind: AdviceKind,
    /// Pods watched for long enough.
    pub watched_pods: usize,
    /// Of these, pods whose GPUs have not been busy for long.
    pub idle_pods: usize,
    /// How long a pod must have been watched.
    pub watched_for_seconds: u64,
    /// The time after which a pod counts as idle.
    pub idle_after_seconds: u64,
    /// What could be given back, of all watched pods together.
    pub reclaimable: DeviceAmount,
    /// By pool: how finely it could be shared.
    pub pools: Vec<PoolAdvice>,
    /// Number of pods that could give something back.
    pub wasteful_pods: usize,
    /// The first of them, up to the limit; those that could give most back first.
    pub pods: Vec<PodAdvice>,
    /// Pods that have used memory above their request, where their pool lends it, by name; at most as many.
    #[serde(default)]
    pub bursting: Vec<BurstAdvice>,
}

/// A pod that uses memory above its request now and then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BurstAdvice {
    /// `namespace/name`.
    pub pod: String,
    /// Memory that it holds.
    pub allocated_mib: u64,
    /// Memory that it may use.
    pub limit_mib: u64,
    /// Highest use of memory.
    pub peak_mib: u64,
    /// Whether it reaches its limit, or almost: it would probably use more.
    pub at_limit: bool,
}

/// How finely a pool could be shared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolAdvice {
    /// Name of the pool; empty for nodes without one.
    pub pool: String,
    /// Pods watched for long enough.
    pub tenants: usize,
    /// Slots of a GPU such that one slot would have been enough for 95 % of the pods: the smaller
    /// of the next two fields.
    pub replicas: u64,
    /// Slots with enough memory.
    pub replicas_by_memory: u64,
    /// Slots with enough time of the GPU; left out if no load is reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas_by_load: Option<u64>,
    /// What limits the number; left out if a GPU cannot be divided further.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<SharingLimit>,
    /// What it lends: `none`, `compute` or `memory`; see docs/borrowing.md.
    #[serde(default)]
    pub borrow: String,
    /// Pods watched that may borrow: with a limit, and allowed to be restarted.
    #[serde(default)]
    pub borrowers: usize,
}

/// What limits how finely a GPU could be shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum SharingLimit {
    /// Memory.
    Memory,
    /// Load.
    Load,
}

/// Advice on one pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodAdvice {
    /// `namespace/name`.
    pub pod: String,
    /// Its node.
    pub node: String,
    /// Positions of its devices in the `gpus` of the node in `/v1/summary`.
    pub gpus: Vec<usize>,
    /// What it holds.
    pub allocated: DeviceAmount,
    /// Highest use of memory.
    pub peak_mib: u64,
    /// The part of its memory that it did not exceed half of the time, in sixteenths.
    pub median_use_millionths: u64,
    /// The same for 95 % of the time.
    pub p95_use_millionths: u64,
    /// Mean part of the time in which its kernels ran on its GPUs; left out if the driver does not
    /// report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_load_millionths: Option<u64>,
    /// How long it was watched.
    pub watched_seconds: u64,
    /// How long none of its GPUs has been busy.
    pub idle_seconds: u64,
    /// Whether that counts as idle.
    pub idle: bool,
    /// Memory that would have been enough.
    pub sufficient_mib: u64,
    /// Memory that it could give back.
    pub reclaimable_mib: u64,
}
