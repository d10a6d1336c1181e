//! How long the look at every node takes that a shape needs which was never asked: `Ledger::answers`.
//!
//! *typical* has a mix of 100 types of requests, the more the longer for `fragmentation`; *policy* has the
//! mix of the cluster's own pods. Run with `cargo bench --bench fragmentation`.

mod common;
#[path = "common/runs.rs"]
mod runs;

use std::collections::BTreeMap;
use std::hint::black_box;

use common::{Cluster, asks, cluster};
use criterion::Criterion;
use gpupack::ledger::questions::Question;
use gpupack::packing::mix::{Mix, RequestType, Tally};
use gpupack::packing::policy::Policy;
use gpupack::packing::request::{Amount, GpuRequest};
use gpupack::packing::units::{MemMib, MilliCpu, Share};
use runs::SIZES;

/// The answers are right before they are fast.
fn check(cluster: &Cluster, question: &Question) {
    let Cluster { ledger, names } = cluster;
    let kept = ledger.answers(question, names);
    for (name, answer) in names.iter().zip(&kept).step_by(7) {
        assert_eq!(*answer, ledger.fresh_answer(question, name), "{name}");
    }
    assert!(kept.iter().any(Result::is_ok), "a half full cluster has room for some GB");
}

/// A shape that is no longer kept when its turn comes again: of few nodes 1,024 shapes are. The sizes stay
/// small, so that a long run asks for no more.
fn never_asked(asked: &mut u64, policy: Policy) -> Question {
    *asked += 1;
    asks(GpuRequest::one(Amount::Memory(MemMib::new(1024 + *asked % 4096))), policy)
}

/// A mix of 105 types of requests, of which 100 are typical: they cover 95 % of all pods.
fn hundred_typical() -> Mix {
    let kind = |number: u64| {
        let size = 9_000 * (number + 1);
        let amount = match number % 3 {
            0 => Amount::Fraction(Share::from_millionths(size)),
            1 => Amount::Memory(MemMib::new(size / 16)),
            _ => Amount::Fraction(Share::from_millionths(1_000_000 - size)),
        };
        let mut tally = Tally::default();
        tally.count(MemMib::new(8192));
        let cpu = MilliCpu::new(1000 * (1 + number % 8));
        (RequestType::new(Some(&GpuRequest::one(amount)), cpu), tally)
    };
    let mix = Mix::of(&(0..105).map(kind).collect::<BTreeMap<_, _>>());
    assert_eq!(mix.typical().len(), 100);
    mix
}

fn fragmentation(criterion: &mut Criterion) {
    for nodes in SIZES {
        let cluster = cluster(nodes);
        let mut asked = 0;
        for policy in Policy::ALL {
            check(&cluster, &never_asked(&mut asked, policy));
            criterion.bench_function(&format!("{policy}/{nodes}"), |bencher| {
                bencher.iter(|| {
                    let new = never_asked(&mut asked, policy);
                    cluster.ledger.answers(black_box(&new), &cluster.names)
                });
            });
        }
        cluster.ledger.set_mix(hundred_typical());
        check(&cluster, &never_asked(&mut asked, Policy::Fragmentation));
        criterion.bench_function(&format!("typical-100/{nodes}"), |bencher| {
            bencher.iter(|| {
                let new = never_asked(&mut asked, Policy::Fragmentation);
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
