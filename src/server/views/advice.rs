//! `/v1/advise`: which pods hold GPU memory without need, what request would have been enough, and
//! how finely each pool could be shared.

use crate::views::viewer::Viewer;
use control::shared::app::App;
use engine::ledger::usage::advice;
use engine::ledger::usage::advice::{Bursts, IDLE_FOR, WATCHED_FOR, by_pool};
use wire::api::advice::{Advice, AdviseQuery, BurstAdvice, PodAdvice, PoolAdvice, SharingLimit};
use wire::api::kind::{AdviceKind, ApiVersion};
use wire::api::state::DeviceAmount;
use wire::units::{MemMib, Share};

/// Pods in the list, those that waste most first.
const NAMED: usize = 1_000;

/// The current advice.
pub(crate) fn advise(app: &App, query: &AdviseQuery, viewer: &Viewer) -> Advice {
    let namespace = query.namespace.as_deref();
    let now = app.clock.now();
    let mut all = app.ledger.advice(now);
    all.retain(|advice| {
        let of = advice.pod.namespace();
        namespace.is_none_or(|wanted| wanted == of) && viewer.sees(of)
    });
    let pools = by_pool(&all).into_iter().map(|(pool, advice)| PoolAdvice {
        pool: pool.to_string(),
        tenants: advice.tenants,
        replicas: advice.slots(),
        replicas_by_memory: advice.by_memory,
        replicas_by_load: advice.by_load,
        limited_by: advice.limit().map(|limit| match limit {
            advice::SharingLimit::Memory => SharingLimit::Memory,
            advice::SharingLimit::Load => SharingLimit::Load,
        }),
        borrow: advice.borrow.name().to_owned(),
        borrowers: advice.borrowers,
    });
    let wasteful = all.iter().filter(|advice| advice.reclaimable() > MemMib::ZERO);
    Advice {
        api_version: ApiVersion::default(),
        kind: AdviceKind::default(),
        watched_pods: all.len(),
        idle_pods: all.iter().filter(|advice| advice.is_idle()).count(),
        watched_for_seconds: WATCHED_FOR.as_secs(),
        idle_after_seconds: IDLE_FOR.as_secs(),
        reclaimable: DeviceAmount {
            memory_mib: sum(&all, |advice| advice.reclaimable().mib()),
            share_millionths: sum(&all, |advice| advice.reclaimable_share().millionths()),
        },
        pools: pools.collect(),
        wasteful_pods: wasteful.clone().count(),
        pods: wasteful
            .take(query.limit.map_or(NAMED, |limit| limit.min(NAMED)))
            .map(|advice| PodAdvice {
                pod: advice.pod.to_string(),
                node: advice.node.clone(),
                gpus: advice.positions.clone(),
                allocated: DeviceAmount {
                    memory_mib: advice.allocated.mib(),
                    share_millionths: advice.share.millionths(),
                },
                peak_mib: advice.usage.peak.mib(),
                median_use_millionths: advice.usage.percentile(50).millionths(),
                p95_use_millionths: advice.usage.percentile(95).millionths(),
                mean_load_millionths: advice.usage.mean_load().map(Share::millionths),
                watched_seconds: advice.usage.watched_for(now).as_secs(),
                idle_seconds: advice.idle.as_secs(),
                idle: advice.is_idle(),
                sufficient_mib: advice.usage.enough().mib(),
                reclaimable_mib: advice.reclaimable().mib(),
            })
            .collect(),
        bursting: bursting(&all, query.limit.map_or(NAMED, |limit| limit.min(NAMED))),
    }
}

fn sum(all: &[advice::Advice], amount: impl Fn(&advice::Advice) -> u64) -> u64 {
    all.iter().map(amount).fold(0, u64::saturating_add)
}

/// The pods that use memory above their request, by name.
fn bursting(all: &[advice::Advice], most: usize) -> Vec<BurstAdvice> {
    let bursting = all.iter().filter_map(|advice| {
        Some(BurstAdvice {
            at_limit: advice.bursts()? == Bursts::AtLimit,
            pod: advice.pod.to_string(),
            allocated_mib: advice.allocated.mib(),
            limit_mib: advice.limit?.mib(),
            peak_mib: advice.usage.peak.mib(),
        })
    });
    let mut bursting: Vec<BurstAdvice> = bursting.collect();
    bursting.sort_by(|a, b| a.pod.cmp(&b.pod));
    bursting.truncate(most);
    bursting
}
