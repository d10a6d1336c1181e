//! How long *filter* takes from the body to its answer, without HTTP, and how long the decision in it.
//!
//! *decision* is `Ledger::choose` for a known shape, after one bind on another node; *call* is
//! `verbs::filter` on bodies of 4.4 KB and all names, that keeps the best 50 nodes; *call-all* keeps all
//! that fit. Run with `cargo bench --bench filter`.

#[path = "common/bodies.rs"]
mod bodies;
mod common;
#[path = "common/extender.rs"]
mod extender;
#[path = "common/runs.rs"]
mod runs;
#[path = "common/shown.rs"]
mod shown;

use std::hint::black_box;

use bodies::bodies;
use common::{pod, requests, some_request};
use control::shared::app::App;
use criterion::Criterion;
use engine::ledger::query::queries::NodeAnswer;
use engine::model::policy::Policy;
use engine::model::request::{Amount, GpuRequest};
use extender::extender;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use runs::SIZES;
use serde_json::Value;
use server::scheduler::verbs;
use shown::show;
use wire::units::{Share, Timestamp};

/// The nodes that remain are the best that fit, compared with a check of every node without index.
fn check(app: &App, body: &[u8], keep: usize) {
    let (answer, _) = verbs::filter(app, body).expect("a body as kube-scheduler sends it");
    let answer: Value = serde_json::from_slice(&answer).expect("an answer is JSON");
    let requested: Value = serde_json::from_slice(body).expect("a body is JSON");
    let pod = kube_api::pod::seen_pod::SeenPod::from_json(&requested["Pod"].to_string());
    let query = app.query(&pod.expect("a sound pod")).expect("it requests a GPU");
    let names = requested["NodeNames"].as_array().expect("names were sent").iter();
    let names: Vec<&str> = names.map(|name| name.as_str().expect("a name")).collect();
    let fresh = |name: &&str| -> NodeAnswer { app.ledger.fresh_answer(&query, name) };
    let mut fitting: Vec<_> =
        names.iter().filter_map(|name| Some((fresh(name).ok()?, *name))).collect();
    fitting.sort_unstable();
    fitting.truncate(keep);
    let kept = answer["NodeNames"].as_array().expect("some node fits").iter();
    let kept: Vec<&str> = kept.map(|name| name.as_str().expect("a name")).collect();
    let wanted: Vec<&str> = fitting.iter().map(|(_, name)| *name).collect();
    assert_eq!(kept, wanted);
}

fn filter(criterion: &mut Criterion) {
    for nodes in SIZES {
        let (app, names) = extender(nodes, 50);
        let bodies = bodies(&names);
        show(&app, &bodies);
        if nodes > 100 {
            check(&app, &bodies[0], 50);
        }
        let (pod, mut rng) = (pod("elsewhere"), ChaCha8Rng::seed_from_u64(3));
        let elsewhere = requests(some_request(&mut rng), Policy::Fragmentation);
        let (node, _) = app.ledger.best(&elsewhere).expect("a half full cluster has room");
        let bind_elsewhere = || {
            let bound = app.ledger.reserve(&pod, node.as_str(), &elsewhere, Timestamp::START);
            assert!(bound.is_ok(), "a node that passed filter accepts the pod");
        };
        let quarter = GpuRequest::one(Amount::Fraction(Share::from_millionths(250_000)));
        let known = requests(quarter, Policy::Fragmentation);
        let listed: Vec<&str> = names.iter().map(String::as_str).collect();
        criterion.bench_function(&format!("decision/{nodes}"), |bencher| {
            bencher.iter(|| {
                bind_elsewhere();
                app.ledger.forget(&pod.uid);
                app.ledger.choose(black_box(&known), listed.iter(), 50)
            });
        });
        let mut turn = 0;
        criterion.bench_function(&format!("call/{nodes}"), |bencher| {
            bencher.iter(|| {
                turn += 1;
                bind_elsewhere();
                app.ledger.forget(&pod.uid);
                verbs::filter(&app, black_box(&bodies[turn % bodies.len()]))
            });
        });
    }
    for nodes in SIZES {
        let (app, names) = extender(nodes, 0);
        let bodies = bodies(&names);
        show(&app, &bodies);
        let mut turn = 0;
        criterion.bench_function(&format!("call-all/{nodes}"), |bencher| {
            bencher.iter(|| {
                turn += 1;
                verbs::filter(&app, black_box(&bodies[turn % bodies.len()]))
            });
        });
    }
}

fn main() {
    let mut criterion = runs::criterion();
    filter(&mut criterion);
    criterion.final_summary();
}
