//! What is measured inside one process, without HTTP.

use std::collections::BTreeSet;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};

use control::shared::app::App;
use engine::hardware::pool::ConfiguredIsolation;
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::Ledger;
use engine::ledger::suggest::preemption::{PlannedVictims, RoomRequest};
use engine::model::policy::Policy;
use engine::model::request::{Amount, GpuRequest};
use engine::model::reservation::{
    BorrowedMemory, Departure, PlacedDevice, Placement, Reservation, ReservationState, Tenure,
};
use engine::scoring::victims::less_important;
use runtime::clock::Clock;
use server::api::reports;
use sim::chart::draw::Curve;
use wire::units::{HostAmount, MemMib, Share, Timestamp};

use super::common::{Cluster, cluster, hello, pod, requests};
use super::extender::extender;
use super::typical::hundred_typical;
use super::{Row, median_us, shown};

/// The lines, and the curves of those that are drawn.
pub(crate) fn measure(sizes: &[usize]) -> (Vec<Row>, Vec<Curve>) {
    let clock = Clock::start();
    let mut decision = Row::new("the decision alone, after one bind elsewhere", "≤ 20 µs");
    let mut new = Row::new("a new shape, 100 typical requests", "≤ 10 ms");
    let mut reserve = Row::new("reservations a second, one core", "≥ 50,000");
    let mut report = Row::new("one report of an agent, without HTTP", "≤ 20 µs");
    let mut query = Row::new(
        "a call about all nodes after one bind elsewhere, alone and while a thread reports without \
         pause",
        "≤ 100 µs more",
    );
    let mut room = Row::new(
        "which pods to evict for all 8 GPUs of a node, and for half of a GPU if all are full",
        "≤ 50 ms",
    );
    let mut curve = Curve { label: "decision".to_owned(), points: Vec::new() };
    for &nodes in sizes {
        eprintln!("inside: {nodes} nodes");
        let cluster = cluster(nodes);
        let took = decide(clock, &cluster);
        curve.points.push((nodes as f64, took));
        decision.measured.push((nodes, shown(took)));
        let pair = pairs(clock, &cluster);
        reserve.measured.push((nodes, format!("{:.0}", 1e6 / pair)));
        new.measured.push((nodes, shown(new_shape(clock, &cluster))));
        report.measured.push((nodes, shown(reported(clock, nodes))));
        query.measured.push((nodes, beside_reports(clock, nodes)));
        room.measured.push((nodes, make_room(clock, &cluster)));
    }
    (vec![decision, new, reserve, report, query, room], vec![curve])
}

fn decide(clock: Clock, Cluster { ledger, names }: &Cluster) -> f64 {
    let quarter = GpuRequest::one(Amount::Fraction(Share::from_millionths(250_000)));
    let (known, elsewhere) = (requests(quarter.clone(), Policy::Fragmentation), pod("elsewhere"));
    let (node, _) = ledger.best(&known).expect("a half full cluster has room");
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let bind = || {
        let bound = ledger.reserve(&elsewhere, node.as_str(), &known, Timestamp::START);
        assert!(bound.is_ok(), "a node that passed filter accepts the pod");
        ledger.forget(&elsewhere.uid);
    };
    let alone = median_us(clock, 201, bind);
    let both = median_us(clock, 201, || {
        bind();
        black_box(ledger.best(black_box(&known)));
    });
    assert_eq!(ledger.choose(&known, names.iter(), 50).kept.len(), 50);
    both - alone
}

/// A bind and its end.
fn pairs(clock: Clock, Cluster { ledger, names }: &Cluster) -> f64 {
    let tenth = GpuRequest::one(Amount::Fraction(Share::from_millionths(100_000)));
    let (query, pod) = (requests(tenth, Policy::Fragmentation), pod("bench"));
    let (node, _) = ledger.best(&query).expect("a half full cluster has room");
    assert!(names.iter().any(|name| name == node.as_str()));
    median_us(clock, 2_001, || {
        let made = ledger.reserve(&pod, node.as_str(), black_box(&query), Timestamp::START);
        assert!(made.is_ok(), "a node that passed filter accepts the pod");
        ledger.forget(&pod.uid);
    })
}

fn new_shape(clock: Clock, Cluster { ledger, names }: &Cluster) -> f64 {
    ledger.set_mix(hundred_typical());
    let mut requested = 0;
    median_us(clock, 21, || {
        requested += 1;
        let size = Amount::Memory(MemMib::new(1024 + requested));
        let query = requests(GpuRequest::one(size), Policy::Fragmentation);
        black_box(ledger.answers(black_box(&query), names));
    })
}

/// The search for victims, in the cluster as it is and in one whose GPUs are all full.
fn make_room(clock: Clock, Cluster { ledger, names }: &Cluster) -> String {
    let placed = ledger.nodes().into_iter().flat_map(|node| {
        let held: Vec<Reservation> = node.reservations().values().cloned().collect();
        held
    });
    let placed: Vec<Reservation> = placed.collect();
    for (at, held) in (0..).zip(&placed) {
        ledger.see_pod(&bound(held, at % 7), Timestamp::START);
    }
    let none = PlannedVictims::new();
    let named = ledger.named_nodes(names.iter());
    let search = |gpu: GpuRequest| {
        let query = requests(gpu, Policy::Fragmentation);
        let request = RoomRequest {
            uid: &pod("important").uid,
            namespace: "team",
            query: &query,
            named: Some(&named),
            planned: &none,
            victim: &less_important(1_000),
            leaving: &BTreeSet::new(),
            leaving_is_gone: true,
            is_passed: &|_| false,
        };
        median_us(clock, 11, || {
            let found = black_box(ledger.find_room(black_box(&request)));
            assert!(found.is_some_and(|found| !found.victims.is_empty()));
        })
    };
    let all = GpuRequest::several(Amount::Whole, NonZeroU32::new(8).expect("eight"));
    let took_all = search(all);
    fill(ledger);
    let half = GpuRequest::one(Amount::Fraction(Share::from_millionths(500_000)));
    format!("{}, {}", shown(took_all), shown(search(half)))
}

/// Gives what is free of each GPU to one pod.
fn fill(ledger: &Ledger) {
    for node in ledger.nodes() {
        for device in node.devices() {
            let (id, free) = (device.device().id.clone(), device.free());
            let placement = Placement {
                node: node.name().clone(),
                devices: vec![PlacedDevice { id: id.clone(), demand: free }],
                isolation: ConfiguredIsolation::None,
                guest: None,
                spots: Vec::new(),
            };
            let held = Reservation {
                pod: pod(&format!("fills-{id}")),
                placement,
                host: HostAmount::ZERO,
                state: ReservationState::Confirmed,
                request: None,
                tenure: None,
                departure: Departure::Stays,
                borrowed: BorrowedMemory::Free,
                is_hung: false,
            };
            ledger.see_pod(&bound(&held, 3), Timestamp::START);
        }
    }
}

fn bound(held: &Reservation, priority: i32) -> PodFact {
    PodFact {
        pod: held.pod.clone(),
        node: Some(held.placement.node.clone()),
        host: held.host,
        is_terminal: false,
        wants_gpu: true,
        request: held.request.clone(),
        placement: Some(held.placement.clone()),
        bound_by_us: true,
        moves: MoveFact::default(),
        tenure: Tenure { priority, ..Tenure::default() },
    }
}

/// Reports of one node in one session.
struct Reporter {
    node: String,
    session: u64,
    uses: String,
    sequence: u64,
}

impl Reporter {
    fn greet(app: &App, node: usize, name: &str) -> Self {
        let again = NodeReport { sequence: 2, ..hello(node, name) };
        let receipt = app.ledger.report(name, &again, app.clock.now());
        let session = receipt.expect("a hello is accepted").session;
        let node_state = app.ledger.node(name).expect("a node of the cluster");
        let uses = node_state.devices().iter().map(|device| {
            serde_json::json!({"id": device.device().id.as_str(), "usedMib": 100,
                "busyPercent": 40, "healthy": true})
        });
        let uses = serde_json::Value::from(uses.collect::<Vec<_>>()).to_string();
        Self { node: name.to_owned(), session, uses, sequence: 2 }
    }

    fn report(&mut self, app: &App) {
        self.sequence += 1;
        let Self { node, session, uses, sequence } = self;
        let body = format!(
            r#"{{"apiVersion":"gpupack.dev/v1alpha1","agent":"{node}","session":{session},"sequence":{sequence},"devices":{uses}}}"#
        );
        let (status, _) = reports::answer(app, node, black_box(body.as_bytes()));
        assert!(status.is_success(), "{status}");
    }
}

fn reported(clock: Clock, nodes: usize) -> f64 {
    let (app, names) = extender(nodes, 50);
    let mut reporter = Reporter::greet(&app, nodes / 2, &names[nodes / 2]);
    median_us(clock, 2_001, || reporter.report(&app))
}

/// The time of a call without and with concurrent reports of all nodes, one after the other.
fn beside_reports(clock: Clock, nodes: usize) -> String {
    let (app, names) = extender(nodes, 50);
    let mut reporters: Vec<Reporter> =
        names.iter().enumerate().map(|(at, name)| Reporter::greet(&app, at, name)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let quiet = queries(clock, &app, &names);
    let is_over = AtomicBool::new(false);
    let busy = std::thread::scope(|threads| {
        threads.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                reporters.iter_mut().for_each(|reporter| reporter.report(&app));
            }
        });
        let busy = queries(clock, &app, &names);
        is_over.store(true, Ordering::Relaxed);
        busy
    });
    format!("{quiet}; {busy}")
}

/// Median, 99th percentile and maximum of many calls about all nodes.
fn queries(clock: Clock, app: &App, names: &[&str]) -> String {
    const QUERIES: usize = 2_000;
    let tenth = GpuRequest::one(Amount::Fraction(Share::from_millionths(100_000)));
    let (query, pod) = (requests(tenth, Policy::Fragmentation), pod("elsewhere"));
    let mut took: Vec<f64> = (0..QUERIES)
        .map(|number| {
            let node = names[number * 7 % names.len()];
            let is_bound = app.ledger.reserve(&pod, node, &query, Timestamp::START).is_ok();
            let started = clock.precise();
            black_box(app.ledger.choose(black_box(&query), names.iter(), 50));
            let took = (clock.precise() - started).as_secs_f64() * 1e6;
            if is_bound {
                app.ledger.forget(&pod.uid);
            }
            took
        })
        .collect();
    took.sort_unstable_by(f64::total_cmp);
    let [median, p99, longest] =
        [QUERIES / 2, QUERIES * 99 / 100, QUERIES - 1].map(|at| shown(took[at]));
    format!("{median}, p99 {p99}, longest {longest}")
}
