//! How long one bind locks the ledger of its node: `Ledger::reserve` and its undo, `Ledger::forget`.
//!
//! *pair* is one of each, so that every iteration has the same ledger; *held* has a hold made before
//! it, as prioritize leaves one. Run with `cargo bench --bench reserve`.

mod common;
#[path = "common/runs.rs"]
mod runs;

use std::hint::black_box;

use common::{Cluster, cluster, pod, requests, some_request};
use criterion::Criterion;
use engine::model::policy::Policy;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use runs::SIZES;
use wire::units::Timestamp;

fn reserve(criterion: &mut Criterion) {
    for nodes in SIZES {
        let Cluster { ledger, names } = cluster(nodes);
        let pod = pod("bench");
        for policy in Policy::ALL {
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            let query = requests(some_request(&mut rng), policy);
            let (best, _) = ledger.best(&query).expect("a half full cluster has room");
            let node = best.as_str();
            let placement = ledger.reserve(&pod, node, &query, Timestamp::START);
            let placement = placement.expect("a node that passed filter accepts the pod");
            assert_eq!(ledger.reserve(&pod, node, &query, Timestamp::START), Ok(placement));
            ledger.forget(&pod.uid);
            assert!(ledger.reservation(&pod.uid).is_none());

            let id = format!("pair/{policy}/{nodes}");
            criterion.bench_function(&id, |bencher| {
                bencher.iter(|| {
                    let made = ledger.reserve(&pod, node, black_box(&query), Timestamp::START);
                    ledger.forget(&pod.uid);
                    made
                });
            });
            let id = format!("held/{policy}/{nodes}");
            criterion.bench_function(&id, |bencher| {
                bencher.iter(|| {
                    ledger.hold(&pod.uid, node, black_box(&query), Timestamp::START);
                    let made = ledger.reserve(&pod, node, &query, Timestamp::START);
                    ledger.forget(&pod.uid);
                    made
                });
            });
        }
        assert_eq!(ledger.audit(), Ok(()));
        assert_eq!((names.len(), ledger.hold_count()), (nodes, 0));
    }
}

fn main() {
    let mut criterion = runs::criterion();
    reserve(&mut criterion);
    criterion.final_summary();
}
