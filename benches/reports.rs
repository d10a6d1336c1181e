//! How long a report of an agent takes from its body to the reply, without HTTP: 8 GPUs, half full, each
//! tenant with a process.
//!
//! *steady* is a report between two lists of processes, *lists* one that has them, as each heartbeat. Run
//! with `cargo bench --bench reports`.

mod common;
#[path = "common/extender.rs"]
mod extender;
#[path = "common/runs.rs"]
mod runs;

use std::hint::black_box;

use common::hello;
use control::shared::app::App;
use criterion::Criterion;
use engine::ledger::change::reports::NodeReport;
use extender::extender;
use runs::SIZES;
use serde_json::{Value, json};
use server::api::reports;

/// A report of the node as its agent would send it, with a session and without inventory.
fn report(app: &App, node: &str, with_lists: bool) -> Value {
    let node_state = app.ledger.node(node).expect("a node of the cluster");
    let uses = node_state.devices().iter().map(|device| {
        let used: u64 = device.tenants().values().map(|held| held.memory.mib()).sum();
        let mut seen = json!({"id": device.device().id.as_str(), "usedMib": used / 2,
            "busyPercent": 40, "healthy": true});
        if with_lists {
            let tenants = device.tenants().iter();
            seen["processes"] = tenants
                .map(|(uid, held)| json!({"pid": 4711, "podUid": uid.as_str(), "memoryMib": held.memory.mib() / 2}))
                .collect();
        }
        seen
    });
    json!({"apiVersion": "gpupack.dev/v1alpha1", "agent": node, "session": 1, "sequence": 2,
        "devices": uses.collect::<Vec<_>>()})
}

fn send(app: &App, node: &str, report: &mut Value, sequence: &mut u64) -> Value {
    *sequence += 1;
    report["sequence"] = (*sequence).into();
    let (status, reply) = reports::answer(app, node, report.to_string().as_bytes());
    assert!(status.is_success(), "{status}: {}", String::from_utf8_lossy(&reply));
    serde_json::from_slice(&reply).expect("a reply is JSON")
}

fn all(criterion: &mut Criterion) {
    for nodes in SIZES {
        let (app, names) = extender(nodes, 16);
        let mut sequence = 1;
        for (kind, with_lists) in [("steady", false), ("lists", true)] {
            let node = names[nodes / 2].as_str();
            let mut report = report(&app, node, with_lists);
            sequence += 1;
            let again = NodeReport { sequence, ..hello(nodes / 2, node) };
            let receipt = app.ledger.report(node, &again, app.clock.now());
            report["session"] = receipt.expect("a hello is accepted").session.into();
            let reply = send(&app, node, &mut report, &mut sequence);
            assert_eq!(reply["outcome"], "Accepted");
            assert!(!reply["allocations"].as_array().expect("a list").is_empty(), "half full");
            // The sequence number is the last thing that changes: bodies are cut at it.
            let text = report.to_string();
            let (head, tail) = text.split_once("\"sequence\":").expect("it is there");
            let tail = tail.trim_start_matches(|c: char| c.is_ascii_digit());
            criterion.bench_function(&format!("{kind}/{nodes}"), |bencher| {
                bencher.iter(|| {
                    sequence += 1;
                    let body = format!("{head}\"sequence\":{sequence}{tail}");
                    reports::answer(&app, node, black_box(body.as_bytes()))
                });
            });
        }
        assert_eq!(app.ledger.audit(), Ok(()));
    }
}

fn main() {
    let mut criterion = runs::criterion();
    all(&mut criterion);
    criterion.final_summary();
}
