//! `/v1/advise`: which pods hold GPU memory without need, what request would have been enough, and
//! how finely each pool could be shared.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::control::shared::app::App;
use crate::hardware::device::PoolName;
use crate::hardware::units::{MemMib, Share};
use crate::ledger::usage::advice::{
    Advice, IDLE_FOR, PoolAdvice, SharingLimit, WATCHED_FOR, by_pool,
};
use crate::metrics::demand::Waste;

/// Pods in the list, those that waste most first.
const NAMED: usize = 1_000;

/// The advice.
#[derive(Debug, Serialize)]
pub struct AdviceView {
    /// Pods watched for long enough.
    pub watched_pods: usize,
    /// Of these, pods whose GPUs have not been busy for ten minutes.
    pub idle_pods: usize,
    /// How long a pod must have been watched, in seconds.
    pub watched_for_seconds: u64,
    /// The time after which a pod counts as idle, in seconds.
    pub idle_after_seconds: u64,
    /// Memory that could be given back.
    pub reclaimable_mib: u64,
    /// Compute share that would go with it.
    pub reclaimable_share_millionths: u64,
    /// By pool: how finely it could be shared.
    pub pools: Vec<PoolView>,
    /// Pods that could give something back.
    pub wasteful_pods: usize,
    /// The first of them, up to the limit of the query and at most 1,000; most waste first.
    pub pods: Vec<PodAdvice>,
}

/// How finely a pool could be shared.
#[derive(Debug, Serialize)]
pub struct PoolView {
    /// Name of the pool; empty for nodes without one.
    pub pool: String,
    /// Pods watched for long enough.
    pub tenants: usize,
    /// Slots of a GPU such that one slot would have been enough for 95 % of the pods: the smaller
    /// of the next two fields.
    pub bearable_replicas: u64,
    /// Slots with enough memory.
    pub replicas_by_memory: u64,
    /// Slots with enough time of the GPU; `None` if no load is reported.
    pub replicas_by_load: Option<u64>,
    /// What limits the number: `memory` or `load`; `None` if a GPU cannot be divided further.
    pub limited_by: Option<&'static str>,
}

/// Advice on one pod.
#[derive(Debug, Serialize)]
pub struct PodAdvice {
    /// `namespace/name`.
    pub pod: String,
    /// Its node.
    pub node: String,
    /// Positions of its devices in the node's `gpus` of `/v1/summary`.
    pub gpus: Vec<usize>,
    /// Memory that it holds.
    pub booked_mib: u64,
    /// Share that it holds.
    pub share_millionths: u64,
    /// Highest use of memory.
    pub peak_mib: u64,
    /// The part of what it holds that it did not exceed half of the time, in sixteenths.
    pub median_use_millionths: u64,
    /// The same for 95 % of the time.
    pub p95_use_millionths: u64,
    /// Mean part of the time in which its kernels ran on its GPUs; `None` if the driver does not
    /// report it.
    pub mean_load_millionths: Option<u64>,
    /// How long it was watched.
    pub watched_seconds: u64,
    /// How long none of its GPUs has been busy.
    pub idle_seconds: u64,
    /// Whether that counts as idle.
    pub is_idle: bool,
    /// Memory that would have been enough.
    pub enough_mib: u64,
    /// Memory that it could give back.
    pub reclaimable_mib: u64,
}

/// The query.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct AdviseQuery {
    /// Only pods of this namespace.
    pub(crate) namespace: Option<String>,
    /// Most pods in the list.
    limit: Option<usize>,
}

/// The current advice.
pub(crate) fn advise(app: &App, query: &AdviseQuery) -> AdviceView {
    let namespace = query.namespace.as_deref();
    let now = app.clock.now();
    let is_asked_for =
        |advice: &Advice| namespace.is_none_or(|wanted| wanted == advice.pod.namespace());
    let mut all = app.ledger.advice(now);
    all.retain(is_asked_for);
    let pools = by_pool(&all).into_iter().map(|(pool, advice)| PoolView {
        pool: pool.to_string(),
        tenants: advice.tenants,
        bearable_replicas: advice.slots(),
        replicas_by_memory: advice.by_memory,
        replicas_by_load: advice.by_load,
        limited_by: advice.limit().map(SharingLimit::name),
    });
    let sum = |of: &dyn Fn(&Advice) -> u64| all.iter().map(of).fold(0, u64::saturating_add);
    let with_something = || all.iter().filter(|advice| advice.reclaimable() > MemMib::ZERO);
    AdviceView {
        watched_pods: all.len(),
        idle_pods: all.iter().filter(|advice| advice.is_idle()).count(),
        watched_for_seconds: WATCHED_FOR.as_secs(),
        idle_after_seconds: IDLE_FOR.as_secs(),
        reclaimable_mib: sum(&|advice| advice.reclaimable().mib()),
        reclaimable_share_millionths: sum(&|advice| advice.reclaimable_share().millionths()),
        pools: pools.collect(),
        wasteful_pods: with_something().count(),
        pods: with_something()
            .take(query.limit.map_or(NAMED, |limit| limit.min(NAMED)))
            .map(|advice| PodAdvice {
                pod: advice.pod.to_string(),
                node: advice.node.clone(),
                gpus: advice.positions.clone(),
                booked_mib: advice.booked.mib(),
                share_millionths: advice.share.millionths(),
                peak_mib: advice.usage.peak.mib(),
                median_use_millionths: advice.usage.percentile(50).millionths(),
                p95_use_millionths: advice.usage.percentile(95).millionths(),
                mean_load_millionths: advice.usage.mean_load().map(Share::millionths),
                watched_seconds: advice.usage.watched_for(now).as_secs(),
                idle_seconds: advice.idle.as_secs(),
                is_idle: advice.is_idle(),
                enough_mib: advice.usage.enough().mib(),
                reclaimable_mib: advice.reclaimable().mib(),
            })
            .collect(),
    }
}

/// The waste by namespace, and advice on each pool.
pub(crate) fn waste(app: &App) -> (BTreeMap<String, Waste>, BTreeMap<PoolName, PoolAdvice>) {
    let all = app.ledger.advice(app.clock.now());
    let mut teams: BTreeMap<String, Waste> = BTreeMap::new();
    for advice in &all {
        let waste = teams.entry(advice.pod.namespace().to_owned()).or_default();
        let add = |sum: &mut Share, more: Share| *sum = sum.checked_add(more).unwrap_or(*sum);
        if advice.is_idle() {
            add(&mut waste.idle, advice.share);
        }
        add(&mut waste.share, advice.reclaimable_share());
        let memory = waste.memory.checked_add(advice.reclaimable());
        waste.memory = memory.unwrap_or(waste.memory);
    }
    (teams, by_pool(&all))
}
