//! What is measured inside one process, without HTTP.

use std::hint::black_box;

use gpupack::clock::Clock;
use gpupack::extender::reports;
use gpupack::ledger::reports::NodeReport;
use gpupack::packing::policy::Policy;
use gpupack::packing::request::{Amount, GpuRequest};
use gpupack::packing::units::{MemMib, Share, Timestamp};
use gpupack::sim::chart::Curve;

use super::common::{Cluster, asks, cluster, hello, pod};
use super::extender::extender;
use super::typical::hundred_typical;
use super::{Row, median_us, shown};

/// The lines, and the curves of those that are drawn.
pub(crate) fn measure(sizes: &[usize]) -> (Vec<Row>, Vec<Curve>) {
    let clock = Clock::start();
    let mut decision = Row::new("the decision alone, after one bind elsewhere", "≤ 20 µs");
    let mut new = Row::new("a shape never asked, 100 typical requests", "≤ 10 ms");
    let mut reserve = Row::new("reservations a second, one core", "≥ 50,000");
    let mut report = Row::new("one report of an agent, without HTTP", "≤ 20 µs");
    let mut curve = Curve { label: "decision".to_owned(), points: Vec::new() };
    for &nodes in sizes {
        eprintln!("inside: {nodes} nodes");
        let cluster = cluster(nodes);
        let took = decide(clock, &cluster);
        curve.points.push((nodes as f64, took));
        decision.measured.push((nodes, shown(took)));
        let pair = pairs(clock, &cluster);
        reserve.measured.push((nodes, format!("{:.0}", 1e6 / pair)));
        new.measured.push((nodes, shown(never_asked(clock, &cluster))));
        report.measured.push((nodes, shown(reported(clock, nodes))));
    }
    (vec![decision, new, reserve, report], vec![curve])
}

fn decide(clock: Clock, Cluster { ledger, names }: &Cluster) -> f64 {
    let quarter = GpuRequest::one(Amount::Fraction(Share::from_millionths(250_000)));
    let (known, elsewhere) = (asks(quarter.clone(), Policy::Fragmentation), pod("elsewhere"));
    let (node, _) = ledger.best(&known).expect("a half full cluster has room");
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let bind = || {
        let bound = ledger.reserve(&elsewhere, node.as_str(), &known, Timestamp::START);
        assert!(bound.is_ok(), "a node that said yes takes the pod");
        ledger.forget(&elsewhere.uid);
    };
    let alone = median_us(clock, 201, bind);
    let both = median_us(clock, 201, || {
        bind();
        black_box(ledger.best(black_box(&known)));
    });
    assert_eq!(ledger.choose(&known, &names, 16).kept.len(), 16);
    both - alone
}

/// A bind and its end.
fn pairs(clock: Clock, Cluster { ledger, names }: &Cluster) -> f64 {
    let tenth = GpuRequest::one(Amount::Fraction(Share::from_millionths(100_000)));
    let (question, pod) = (asks(tenth, Policy::Fragmentation), pod("bench"));
    let (node, _) = ledger.best(&question).expect("a half full cluster has room");
    assert!(names.iter().any(|name| name == node.as_str()));
    median_us(clock, 2_001, || {
        let made = ledger.reserve(&pod, node.as_str(), black_box(&question), Timestamp::START);
        assert!(made.is_ok(), "a node that said yes takes the pod");
        ledger.forget(&pod.uid);
    })
}

fn never_asked(clock: Clock, Cluster { ledger, names }: &Cluster) -> f64 {
    ledger.set_mix(hundred_typical());
    let mut asked = 0;
    median_us(clock, 21, || {
        asked += 1;
        let size = Amount::Memory(MemMib::new(1024 + asked));
        let question = asks(GpuRequest::one(size), Policy::Fragmentation);
        black_box(ledger.answers(black_box(&question), names));
    })
}

fn reported(clock: Clock, nodes: usize) -> f64 {
    let (app, names) = extender(nodes, 16);
    let node = names[nodes / 2].as_str();
    let again = NodeReport { sequence: 2, ..hello(nodes / 2, node) };
    let receipt = app.ledger.report(node, &again, app.clock.now());
    let session = receipt.expect("a hello is accepted").session;
    let books = app.ledger.node(node).expect("a node of the cluster");
    let uses = books.devices().iter().map(|device| {
        serde_json::json!({"uuid": device.device().id.as_str(), "used_mib": 100,
            "busy_percent": 40, "healthy": true})
    });
    let uses = serde_json::Value::from(uses.collect::<Vec<_>>());
    let mut sequence = 2;
    median_us(clock, 2_001, || {
        sequence += 1;
        let body = format!(
            r#"{{"schema_version":1,"agent":"{node}","session":{session},"sequence":{sequence},"devices":{uses}}}"#
        );
        let (status, _) = reports::answer(&app, node, black_box(body.as_bytes()));
        assert!(status.is_success(), "{status}");
    })
}
