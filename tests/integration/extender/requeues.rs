//! Room appears again and again while many pods with different requests wait: which are requeued, and what
//! that costs *filter*.
//!
//! The extender runs in this process, with a stand-in for the API server and kube-scheduler: it calls
//! the extender for a requeued pod, and binds it where it fits. Counts are asserted, times never.
//! `GPUPACK_REQUEUES="pods=10000 nodes=500 rooms=50 seconds=20"` measures: times of *filter* with and without
//! requeues, the share of a core that these take, and how long a stop takes in the midst of it. The CPU time
//! is that of the whole process: run this test alone for it.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::harness::fake_api_server::connected;
use crate::harness::ledger::{
    DEVICE_MIB, add_node, fraction, gpus, pod, request_of, seconds, settings,
};
use crate::harness::turns::turn;
use control::bind::binding;
use control::shared::app::App;
use engine::ledger::nodes::state::{Ledger, Settings};
use engine::ledger::query::reading::Readiness;
use engine::model::policy::Policy;
use hyper::{Request, Response};
use kube::Client;
use kube::client::Body;
use kube_api::config::file::Config;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::Sink;
use kube_api::write::events::NoticeSender;
use runtime::clock::Clock;
use serde_json::{Value, json};
use server::api::background;
use server::scheduler::verbs;
use tokio::sync::{mpsc, watch};

/// Longest time that anything may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Nodes of the other pool, and the pods that can use room there.
const OTHERS: usize = 5;

/// How much is going on.
struct Size {
    pods: usize,
    nodes: usize,
    rooms: u32,
    seconds: u64,
}

impl Size {
    fn named() -> Self {
        let mut size = Self { pods: 300, nodes: 10, rooms: 50, seconds: 1 };
        for word in variable("GPUPACK_REQUEUES").split_whitespace() {
            let (key, value) = word.split_once('=').unwrap_or_default();
            let number = value.parse().unwrap_or_else(|_| panic!("`{word}`"));
            match key {
                "pods" => size.pods = number,
                "nodes" => size.nodes = number,
                "rooms" => size.rooms = u32::try_from(number).expect("few"),
                "seconds" => size.seconds = u64::try_from(number).expect("few"),
                _ => panic!("GPUPACK_REQUEUES has `{word}`: not pods, nodes, rooms or seconds"),
            }
        }
        size
    }
}

#[expect(clippy::disallowed_methods, reason = "measured where cargo test is run")]
fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// What the stand-in has seen, by the name of the pod.
type Requeues = Arc<Mutex<BTreeMap<String, usize>>>;

/// An extender and the cluster around it.
struct Bed {
    app: Arc<App>,
    requeues: Requeues,
    /// The nodes of the pool that is full, and those of the other one.
    pools: [Vec<String>; 2],
}

fn client(requeues: Requeues, named: mpsc::UnboundedSender<String>) -> Client {
    let service = tower::service_fn(move |request: Request<Body>| {
        let name = request.uri().path().split('/').nth(6).unwrap_or_default().to_owned();
        let status = if request.method() == "PATCH" {
            *requeues
                .lock()
                .expect("no test holds it while it panics")
                .entry(name.clone())
                .or_default() += 1;
            let _ = named.send(name.clone());
            200
        } else {
            201
        };
        let body = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}});
        let answer =
            Response::builder().status(status).body(Body::from(body.to_string().into_bytes()));
        async move { Ok::<_, io::Error>(answer.expect("an answer of constants")) }
    });
    Client::new(service, "default")
}

/// Full nodes, each GPU with two halves in the first pool and with one whole in the other.
fn bed(size: &Size) -> (Bed, mpsc::UnboundedReceiver<String>) {
    // All pods wait since 1970; here room is for the one that is requeued for it.
    let config = Config { standing_hold_after: Duration::ZERO, ..Config::default() };
    let clock = Clock::start();
    let settings = Settings { stale_after: LIMIT * 100, ..settings() };
    let ledger = Arc::new(Ledger::new(settings));
    let name = |pool: &'static str| move |at: usize| format!("{pool}-{at}");
    let pools: [Vec<String>; 2] =
        [(0..size.nodes).map(name("full")).collect(), (0..OTHERS).map(name("other")).collect()];
    for node in pools.iter().flatten() {
        add_node(&ledger, node, &gpus(node, 1, "A100", DEVICE_MIB), seconds(0));
    }
    for (nodes, parts) in pools.iter().zip([2, 1]) {
        let tenants = nodes.iter().flat_map(|node| (0..parts).map(move |part| (node, part)));
        for (node, part) in tenants {
            let query = request_of(fraction(1_000_000 / parts), 1, Policy::BinPack);
            let tenant = pod(&format!("{node}/{part}"));
            ledger.reserve(&tenant, node, &query, clock.now()).expect("it fits");
        }
    }
    let (named, scheduler) = mpsc::unbounded_channel();
    let requeues = Requeues::default();
    let client = client(Arc::clone(&requeues), named);
    let writer = connected(client, LIMIT, clock);
    ledger.set_listed(clock.now());
    let app = Arc::new(App::new(ledger, config, writer, NoticeSender::unread()));
    (Bed { app, requeues, pools }, scheduler)
}

/// The body of a call about a pod. `ahead-7` waits for the first pool, all others for the other one.
fn body(bed: &Bed, name: &str) -> Vec<u8> {
    let number = name.split_once('-').map_or("", |(_, number)| number);
    let number: usize = number.parse().expect("names end in a number");
    let (annotations, nodes) = match name.split_once('-').map_or("", |(kind, _)| kind) {
        // Half of them are too large for half a GPU, the others require an absent model.
        "ahead" if number.is_multiple_of(2) => {
            (json!({"gpu-fraction": format!("0.{}", 60_000 + number)}), &bed.pools[0])
        }
        "ahead" => {
            let share = format!("0.{}", 10_000 + number);
            (json!({"gpu-fraction": share, "gpupack.dev/gpu-model": "H100"}), &bed.pools[0])
        }
        "probe" => (json!({"gpu-fraction": format!("0.9{number}")}), &bed.pools[0]),
        _ => (json!({"gpu-fraction": "0.9"}), &bed.pools[1]),
    };
    let pod = json!({
        "metadata": {"name": name, "namespace": "team", "uid": name, "resourceVersion": "7",
            "annotations": annotations,
            "creationTimestamp": if name.starts_with("ahead") { "2020-01-01T00:00:00Z" } else { "2021-01-01T00:00:00Z" }},
        "spec": {"schedulerName": "gpupack", "priority": if name.starts_with("ahead") { 5 } else { 0 },
            "containers": [{"name": "main"}]},
    });
    json!({"Pod": pod, "Nodes": null, "NodeNames": nodes}).to_string().into_bytes()
}

/// The watch shows the pod.
fn see(bed: &Bed, name: &str) {
    let body: Value = serde_json::from_slice(&body(bed, name)).expect("JSON");
    bed.app.pod(&SeenPod::from_json(&body["Pod"].to_string()).expect("a pod"));
}

/// Calls *filter*. Returns the nodes that fit.
fn filter(bed: &Bed, name: &str) -> Vec<String> {
    let (answer, _) = verbs::filter(&bed.app, &body(bed, name)).expect("a good body");
    let answer: Value = serde_json::from_slice(&answer).expect("JSON");
    assert!(answer["Error"].as_str().unwrap_or_default().is_empty(), "{answer}");
    serde_json::from_value(answer["NodeNames"].clone()).unwrap_or_default()
}

/// Plays kube-scheduler: calls for requeued pods, and binds those that fit.
async fn schedule(bed: Arc<Bed>, mut named: mpsc::UnboundedReceiver<String>) {
    while let Some(name) = named.recv().await {
        if let Some(node) = filter(&bed, &name).first() {
            let args =
                json!({"PodName": name, "PodNamespace": "team", "PodUID": name, "Node": node});
            let (answer, _) =
                binding::bind(&bed.app, args.to_string().as_bytes()).await.expect("a good body");
            assert_eq!(String::from_utf8(answer).expect("text"), r#"{"Error":""}"#);
        }
    }
}

/// Lets room appear and go on one node of the full pool after the other; on every tenth occasion also, for
/// good, on one of the other pool. The caller decides if a pod can use it.
async fn make_rooms(bed: &Bed, size: &Size, are_notified: bool) {
    let (app, clock) = (&bed.app, bed.app.clock);
    let (mut others, started) = (bed.pools[1].iter(), clock.precise());
    for room in 0..size.rooms * u32::try_from(size.seconds).expect("few") {
        let node = &bed.pools[0][usize::try_from(room).expect("few") % size.nodes];
        let tenant = pod(&format!("{node}/0"));
        let mut events = app.ledger.forget(&tenant.uid);
        assert_eq!(events.len(), 1);
        if are_notified
            && room.is_multiple_of(10)
            && let Some(node) = others.next()
        {
            events.extend(app.ledger.forget(&pod(&format!("{node}/0")).uid));
        }
        if are_notified {
            app.outbox.push(events);
        }
        let next = started + Duration::from_secs(1) * (room + 1) / size.rooms;
        tokio::time::sleep(next.saturating_sub(clock.precise())).await;
        let query = request_of(fraction(500_000), 1, Policy::BinPack);
        app.ledger.reserve(&tenant, node, &query, clock.now()).expect("it fits");
    }
}

/// Calls for a few pods again and again from a thread of its own until `stop`; returns how long that took
/// each time, in order.
fn probe(bed: &Bed, stop: &watch::Receiver<bool>) -> Vec<Duration> {
    let (clock, mut took) = (bed.app.clock, Vec::new());
    while !*stop.borrow() {
        let body = body(bed, &format!("probe-{}", took.len() % 3));
        let started = clock.precise();
        verbs::filter(&bed.app, &body).expect("a good body");
        took.push(clock.precise().saturating_sub(started));
        std::thread::sleep(Duration::from_millis(5));
    }
    took.sort();
    took
}

/// CPU time of this process in hundredths of a second.
fn cpu() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split(' ').collect();
    let ticks = |at: usize| fields.get(at).and_then(|it| it.parse::<u64>().ok()).unwrap_or(0);
    ticks(12) + ticks(13)
}

/// Prints a figure, also where the test harness hides the output of passing tests.
fn figure(text: &str) {
    let _shown = writeln!(io::stdout().lock(), "figure: requeues: {text}");
}

/// One phase: rooms that no pod or that every pod can use. Prints what it cost.
async fn phase(bed: &Arc<Bed>, size: &Size, are_notified: bool) {
    let (stop, stopped) = watch::channel(false);
    let prober = Arc::clone(bed);
    let probing = tokio::task::spawn_blocking(move || probe(&prober, &stopped));
    let before = cpu();
    make_rooms(bed, size, are_notified).await;
    let used = cpu() - before;
    stop.send_replace(true);
    let took = probing.await.expect("it does not panic");
    let at = |percent: usize| took[(took.len() - 1) * percent / 100];
    figure(&format!(
        "{} pods, {} nodes, {} rooms a second, {}: filter p50 {:?}, p99 {:?}, at most {:?}; {}.{:02} of a core",
        size.pods,
        size.nodes,
        size.rooms,
        if are_notified { "requeues" } else { "none" },
        at(50),
        at(99),
        at(100),
        used / size.seconds / 100,
        used / size.seconds % 100,
    ));
}

/// Sum of the samples of a family whose labels contain a text.
fn metric(bed: &Bed, family: &str, label: &str) -> u64 {
    let text = String::from_utf8(bed.app.metrics.text()).expect("text");
    let samples = text.lines().filter(|line| line.starts_with(family) && line.contains(label));
    samples
        .map(|line| line.rsplit(' ').next().and_then(|it| it.parse::<u64>().ok()).expect("a count"))
        .sum()
}

#[test]
fn only_pods_that_can_use_the_room_are_requeued() {
    let _turn = turn();
    let size = Size::named();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (bed, named) = {
        let _entered = runtime.enter();
        bed(&size)
    };
    let (bed, clock) = (Arc::new(bed), Clock::start());
    let (stop, stopped) = watch::channel(false);
    let started = runtime.block_on(async {
        let loops = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
        tokio::spawn(schedule(Arc::clone(&bed), named));
        let until = async |what: &str, is_so: &dyn Fn() -> bool| {
            let since = clock.precise();
            while !is_so() {
                assert!(clock.precise() - since < LIMIT, "not in time: {what}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        // The start requeues the pods that wait then.
        until("the start", &|| bed.app.readiness() == Readiness::Ready).await;
        for name in (0..size.pods).map(|at| format!("ahead-{at}")) {
            see(&bed, &name);
            assert!(filter(&bed, &name).is_empty());
        }
        let late: Vec<String> = (0..OTHERS).map(|at| format!("late-{at}")).collect();
        late.iter().for_each(|name| {
            see(&bed, name);
            assert!(filter(&bed, name).is_empty());
        });
        assert_eq!(bed.app.waiting.refused_count(), size.pods + OTHERS, "pods that wait");
        phase(&bed, &size, false).await;
        assert!(bed.requeues.lock().unwrap().is_empty());
        phase(&bed, &size, true).await;
        let is_bound = |name: &String| bed.app.ledger.reservation(&pod(name).uid).is_some();
        until("all are bound that can be", &|| late.iter().all(is_bound)).await;
        until("requeues have ended", &|| {
            metric(&bed, "gpupack_requeues_total", "helped") >= late.len() as u64
        })
        .await;
        let started = clock.precise();
        stop.send_replace(true);
        loops.await.unwrap();
        started
    });
    runtime.shutdown_timeout(LIMIT);
    figure(&format!("stopped after {:?}", clock.precise() - started));
    let requeues = bed.requeues.lock().unwrap().clone();
    assert!(requeues.keys().all(|name| name.starts_with("late")), "{requeues:?}");
    let useless = requeues.values().sum::<usize>() - OTHERS;
    assert!(useless <= 2 * OTHERS, "{requeues:?}");
    assert_eq!(metric(&bed, "gpupack_requeues_total", ""), (useless + OTHERS) as u64);
    bed.app.ledger.audit().unwrap();
}
