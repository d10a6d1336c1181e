//! How long it takes to check every node for a new shape: `Ledger::answers`.
//!
//! *typical* has a mix of 100 types of requests, the more the longer for `fragmentation`; *policy* has the
//! mix of the cluster's own pods. Run with `cargo bench --bench fragmentation`.

mod common;
#[path = "common/runs.rs"]
mod runs;
#[path = "common/typical.rs"]
mod typical;

use std::hint::black_box;

use common::{Cluster, cluster, requests};
use criterion::Criterion;
use engine::ledger::query::queries::PlacementRequest;
use engine::model::policy::Policy;
use engine::model::request::{Amount, GpuRequest};
use runs::SIZES;
use typical::hundred_typical;
use wire::units::MemMib;

/// The answers are right before they are fast.
fn check(cluster: &Cluster, query: &PlacementRequest) {
    let Cluster { ledger, names } = cluster;
    let kept = ledger.answers(query, names);
    for (name, answer) in names.iter().zip(&kept).step_by(7) {
        assert_eq!(*answer, ledger.fresh_answer(query, name), "{name}");
    }
    assert!(kept.iter().any(Result::is_ok), "a half full cluster has room for some GB");
}

/// A shape that is no longer cached when it comes again: of few nodes 1,024 shapes are. The sizes stay
/// small, so that a long run requests no more.
fn new_shape(requested: &mut u64, policy: Policy) -> PlacementRequest {
    *requested += 1;
    requests(GpuRequest::one(Amount::Memory(MemMib::new(1024 + *requested % 4096))), policy)
}

fn fragmentation(criterion: &mut Criterion) {
    for nodes in SIZES {
        let cluster = cluster(nodes);
        let mut requested = 0;
        for policy in Policy::ALL {
            check(&cluster, &new_shape(&mut requested, policy));
            criterion.bench_function(&format!("{policy}/{nodes}"), |bencher| {
                bencher.iter(|| {
                    let new = new_shape(&mut requested, policy);
                    cluster.ledger.answers(black_box(&new), &cluster.names)
                });
            });
        }
        cluster.ledger.set_mix(hundred_typical());
        check(&cluster, &new_shape(&mut requested, Policy::Fragmentation));
        criterion.bench_function(&format!("typical-100/{nodes}"), |bencher| {
            bencher.iter(|| {
                let new = new_shape(&mut requested, Policy::Fragmentation);
                cluster.ledger.answers(black_box(&new), &cluster.names)
            });
        });
    }
}

fn main() {
    let mut criterion = runs::criterion();
    fragmentation(&mut criterion);
    criterion.final_summary();
}
