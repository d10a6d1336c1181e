//! How long *prioritize* takes from the body to its answer, without HTTP, for all nodes.
//!
//! Run with `cargo bench --bench prioritize`.

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
use control::shared::app::App;
use criterion::Criterion;
use extender::extender;
use runs::SIZES;
use serde_json::Value;
use server::scheduler::verbs;
use shown::show;

/// Every node has a score: zero if the pod does not fit, and 100 only for the best one.
fn check(app: &App, body: &[u8]) {
    let (answer, _) = verbs::prioritize(app, body).expect("a body as kube-scheduler sends it");
    let answer: Value = serde_json::from_slice(&answer).expect("an answer is JSON");
    let requested: Value = serde_json::from_slice(body).expect("a body is JSON");
    let pod = kube_api::pod::seen_pod::SeenPod::from_json(&requested["Pod"].to_string());
    let pod = pod.expect("a sound pod");
    app.ledger.drop_hold(&pod.pod.uid); // it held the best place back
    let query = app.query(&pod).expect("it requests a GPU");
    let scores = answer.as_array().expect("a list");
    assert_eq!(scores.len(), requested["NodeNames"].as_array().expect("names were sent").len());
    let mut seen = Vec::new();
    for entry in scores {
        let (name, score) = (entry["Host"].as_str(), entry["Score"].as_i64());
        let (name, score) = (name.expect("a name"), score.expect("a score"));
        match app.ledger.fresh_answer(&query, name) {
            Ok(rank) => seen.push((rank, score)),
            Err(_) => assert_eq!(score, 0, "{name} does not fit"),
        }
    }
    assert_eq!(seen.iter().filter(|(_, score)| *score == 100).count(), 1);
    seen.sort_unstable_by_key(|(rank, score)| (*rank, -score));
    assert!(seen.is_sorted_by(|a, b| a.1 >= b.1), "a lower cost has no lower score");
}

fn prioritize(criterion: &mut Criterion) {
    for nodes in SIZES {
        let (app, names) = extender(nodes, 50);
        let bodies = bodies(&names);
        show(&app, &bodies);
        check(&app, &bodies[0]);
        let mut turn = 0;
        criterion.bench_function(&format!("call/{nodes}"), |bencher| {
            bencher.iter(|| {
                turn += 1;
                verbs::prioritize(&app, black_box(&bodies[turn % bodies.len()]))
            });
        });
    }
}

fn main() {
    let mut criterion = runs::criterion();
    prioritize(&mut criterion);
    criterion.final_summary();
}
