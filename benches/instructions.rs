//! Instructions of the hot paths, counted by callgrind and held against bounds: where times are noisy,
//! counts are not. The bounds are a tenth above what was counted last, so that they fail for a wrong shape
//! (a check of every node instead of changed ones), not for small compiler changes.
//!
//! `cargo bench --bench instructions` needs valgrind and `cargo install gungraun-runner@0.20.0 --locked`.

#![expect(missing_docs, unused_qualifications, reason = "the macros of the harness write them")]

#[path = "common/bodies.rs"]
mod bodies;
mod common;
#[path = "common/extender.rs"]
mod extender;
#[path = "common/shown.rs"]
mod shown;

use std::hint::black_box;

use bodies::bodies;
use common::{host, pod, requests};
use control::shared::app::App;
use engine::ledger::query::queries::PlacementRequest;
use engine::model::policy::Policy;
use engine::model::request::{Amount, GpuRequest};
use extender::extender;
use gpupack_server::scheduler::verbs;
use gungraun::prelude::*;
use gungraun::{Callgrind, EventKind};
use shown::show;
use wire::ids::{NodeName, PoolName};
use wire::units::{MemMib, Share, Timestamp};

/// Nodes of the cluster: few, since callgrind takes fifty times as long to make it.
const NODES: usize = 1_000;

/// What a measured call is given.
struct Bench {
    app: App,
    names: Vec<String>,
    bodies: Vec<Vec<u8>>,
}

fn query() -> PlacementRequest {
    requests(
        GpuRequest::one(Amount::Fraction(Share::from_millionths(250_000))),
        Policy::Fragmentation,
    )
}

/// A cluster whose answers and node order are cached, except for one node that has changed since.
fn warm() -> Bench {
    let (app, names) = extender(NODES, 50);
    let bodies = bodies(&names);
    show(&app, &bodies);
    for body in std::iter::repeat_n(&bodies[..6], 8).flatten() {
        verbs::filter(&app, body).expect("a body as kube-scheduler sends it");
        verbs::prioritize(&app, body).expect("a body as kube-scheduler sends it");
    }
    app.ledger.answers(&query(), &names);
    app.ledger.see_node(&NodeName::new(names[NODES / 2].as_str()), host(), PoolName::new(""));
    Bench { app, names, bodies }
}

fn limit(instructions: u64) -> LibraryBenchmarkConfig {
    let mut config = LibraryBenchmarkConfig::default();
    config.tool(Callgrind::default().hard_limits([(EventKind::Ir, instructions)]));
    config
}

#[library_benchmark(config = limit(280_000))]
#[bench::of_1000_nodes(args = (), setup = warm)]
fn decision(bench: Bench) -> (usize, Bench) {
    let names: Vec<&str> = bench.names.iter().map(String::as_str).collect();
    let choice = bench.app.ledger.choose(black_box(&query()), names.iter(), 50);
    assert_eq!(choice.kept.len(), 50);
    (choice.kept.len(), bench)
}

#[library_benchmark(config = limit(768_000))]
#[bench::of_1000_nodes(args = (), setup = warm)]
fn filter(bench: Bench) -> (Vec<u8>, Bench) {
    let answer = verbs::filter(&bench.app, black_box(&bench.bodies[1]));
    (answer.expect("a body as kube-scheduler sends it").0, bench)
}

#[library_benchmark(config = limit(1_307_000))]
#[bench::of_1000_nodes(args = (), setup = warm)]
fn prioritize(bench: Bench) -> (Vec<u8>, Bench) {
    let answer = verbs::prioritize(&bench.app, black_box(&bench.bodies[1]));
    (answer.expect("a body as kube-scheduler sends it").0, bench)
}

#[library_benchmark(config = limit(10_570_000))]
#[bench::of_1000_nodes(args = (), setup = warm)]
fn shape_of_new_request(bench: Bench) -> (usize, Bench) {
    let new = requests(GpuRequest::one(Amount::Memory(MemMib::new(3_333))), Policy::Fragmentation);
    let answers = bench.app.ledger.answers(black_box(&new), &bench.names);
    (answers.len(), bench)
}

#[library_benchmark(config = limit(28_600))]
#[bench::of_1000_nodes(args = (), setup = warm)]
fn reserve(bench: Bench) -> Bench {
    let pod = pod("bench");
    let node = bench.names[7].as_str();
    let reserved = bench.app.ledger.reserve(&pod, node, black_box(&query()), Timestamp::START);
    assert!(reserved.is_ok(), "half of the node is free");
    bench
}

library_benchmark_group!(
    name = hot,
    benchmarks = [decision, filter, prioritize, shape_of_new_request, reserve]
);

main!(library_benchmark_groups = hot);
