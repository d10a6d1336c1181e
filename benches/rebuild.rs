//! How long it takes to rebuild the ledger from the lists of the API server: nodes, the inventory that
//! their agents report, and the pods with what is written on them, 16 per node.
//!
//! Run with `cargo bench --bench rebuild`.

mod common;
#[path = "common/runs.rs"]
mod runs;

use std::sync::Arc;

use common::{Cluster, cluster, empty, hello, host};
use criterion::{BatchSize, Criterion};
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::Ledger;
use engine::waste::request_mix::{EarlierPod, RequestType, Stage};
use runs::SIZES;
use wire::ids::{NodeName, PoolName};
use wire::units::{Share, Timestamp};

/// What the API server and the agents say of a cluster.
struct Facts {
    nodes: Vec<(NodeName, NodeReport)>,
    pods: Vec<PodFact>,
}

fn facts(of: &Cluster) -> Facts {
    let node_state = of.ledger.nodes();
    let pods = node_state.iter().flat_map(|node| {
        let fact = |held: &engine::model::reservation::Reservation| PodFact {
            pod: held.pod.clone(),
            node: Some(node.name().clone()),
            host: held.host,
            is_terminal: false,
            wants_gpu: true,
            request: held.request.clone(),
            placement: Some(held.placement.clone()),
            bound_by_us: false,
            moves: MoveFact::default(),
            tenure: held.tenure.unwrap_or_default(),
        };
        node.reservations().values().map(fact).collect::<Vec<_>>()
    });
    let pods = pods.collect();
    let name = |(at, name): (usize, &String)| (NodeName::new(name.as_str()), hello(at, name));
    Facts { nodes: of.names.iter().enumerate().map(name).collect(), pods }
}

/// In the order of a start: nodes and pods are listed, then agents report.
fn rebuild(facts: &Facts) -> Ledger {
    let ledger = empty();
    for (name, _) in &facts.nodes {
        ledger.see_node(name, host(), PoolName::new(""));
    }
    for fact in &facts.pods {
        ledger.see_pod(fact, Timestamp::START);
    }
    let pods = (1..).zip(&facts.pods).map(|(second, fact)| EarlierPod {
        uid: fact.pod.uid.clone(),
        kind: RequestType::new(fact.request.as_deref(), fact.host.cpu),
        memory: fact.host.memory,
        created_unix_seconds: second,
        share: Share::WHOLE,
        stage: Stage::Runs,
    });
    ledger.recall(&pods.collect::<Vec<_>>());
    ledger.set_listed(Timestamp::START);
    for (name, report) in &facts.nodes {
        ledger.report(name.as_str(), report, Timestamp::START).expect("a hello is accepted");
    }
    ledger
}

fn all(criterion: &mut Criterion) {
    for nodes in SIZES {
        let before = cluster(nodes);
        let facts = Arc::new(facts(&before));
        let after = rebuild(&facts);
        assert_eq!(after.audit(), Ok(()));
        let allocated = |ledger: &Ledger| ledger.packing().allocation();
        assert_eq!(allocated(&after), allocated(&before.ledger), "the same ledger");
        let pods = facts.pods.len();
        criterion.bench_function(&format!("{nodes} nodes, {pods} pods"), |bencher| {
            bencher.iter_batched(
                || Arc::clone(&facts),
                |facts| rebuild(&facts),
                BatchSize::PerIteration,
            );
        });
    }
}

fn main() {
    let mut criterion = runs::criterion();
    all(&mut criterion);
    criterion.final_summary();
}
