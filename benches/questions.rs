//! How long a question about all nodes takes: `Ledger::answers` and the choice of the best.
//!
//! *known*: the shape was asked before and one node has changed since. *new*: the shape was never asked,
//! so every node is looked at. Run with `cargo bench --bench questions`.

mod common;

use std::hint::black_box;

use common::{Cluster, SIZES, asks, cluster, host};
use criterion::Criterion;
use gpupack::ledger::questions::{Answer, Question};
use gpupack::packing::device::{NodeName, PoolName};
use gpupack::packing::policy::Policy;
use gpupack::packing::request::{Amount, GpuRequest};
use gpupack::packing::units::{MemMib, Share};

/// The position of the best node, by rank and then by name: names are sorted.
fn best(answers: &[Answer]) -> Option<usize> {
    let fitting = answers.iter().enumerate().filter_map(|(at, answer)| Some((answer.ok()?, at)));
    fitting.min().map(|(_, at)| at)
}

/// The answers are right before they are fast.
fn check(cluster: &Cluster, question: &Question) {
    let Cluster { ledger, names } = cluster;
    ledger.answers(question, names);
    let kept = ledger.answers(question, names);
    for (name, answer) in names.iter().zip(&kept).step_by(7) {
        assert_eq!(*answer, ledger.fresh_answer(question, name), "{name}");
    }
    let best = best(&kept).map(|at| NodeName::new(names[at].as_str()));
    assert_eq!(best, ledger.best(question).map(|(name, _)| name));
    assert!(best.is_some(), "a half full cluster has room for a quarter of a GPU");
}

fn questions(criterion: &mut Criterion) {
    for nodes in SIZES {
        let cluster = cluster(nodes);
        let Cluster { ledger, names } = &cluster;
        for policy in Policy::ALL {
            let quarter = GpuRequest::one(Amount::Fraction(Share::from_millionths(250_000)));
            let known = asks(quarter, policy);
            check(&cluster, &known);
            let changed = NodeName::new(names[nodes / 2].as_str());
            let id = format!("known/{policy}/{nodes}");
            criterion.bench_function(&id, |bencher| {
                bencher.iter(|| {
                    ledger.see_node(&changed, host(), PoolName::new(""));
                    best(&ledger.answers(black_box(&known), names))
                });
            });
            let mut asked = 0;
            let id = format!("new/{policy}/{nodes}");
            criterion.bench_function(&id, |bencher| {
                bencher.iter(|| {
                    // A size that is no longer kept when its turn comes again: of few nodes 1,024
                    // shapes are. The sizes stay small, so that a long run asks for no more.
                    asked += 1;
                    let size = 1024 + asked % 4096;
                    let new = asks(GpuRequest::one(Amount::Memory(MemMib::new(size))), policy);
                    best(&ledger.answers(black_box(&new), names))
                });
            });
        }
    }
}

fn main() {
    let mut criterion = common::criterion();
    questions(&mut criterion);
    criterion.final_summary();
}
