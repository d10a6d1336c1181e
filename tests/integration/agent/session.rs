//! The agent's conversation with a fake extender on the loopback.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use agent::node::client::Proof;
use agent::node::config::AgentConfig;
use agent::node::replicas::Resolver;
use agent::node::run::run_node;
use agent::nvml::probe::NvmlProbe;
use agent::processes::pods::PodsByProcess;
use agent::upkeep::condition::Upkeep;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::put;
use axum::{Json, Router};
use cli::simulated::fleet::Fleet;
use cli::simulated::run::run_fleet;
use runtime::clock::Clock;
use server::reports::checked_report::CheckedReport;
use tokio::runtime::Runtime;
use wire::api::error::{Error, ErrorReason};
use wire::api::kind::{ApiVersion, ReplyKind};
use wire::report::bodies::{AllocatedDevice, Allocation, AllocationState, Outcome, Reply, Report};

/// What the fake extender knows and how it replies.
#[derive(Default)]
struct Bed {
    /// Every report that arrived, with its node.
    reports: Vec<(String, Report)>,
    /// Session of each node.
    sessions: BTreeMap<String, u64>,
    /// Statuses of the next answers.
    refusals: VecDeque<u16>,
    /// What replies carry, unless the report names their version.
    allocations: Vec<Allocation>,
}

type Shared = Arc<Mutex<Bed>>;

/// A fake extender with its own threads: when it is dropped, its connections break.
struct Extender {
    bed: Shared,
    address: SocketAddr,
    _threads: Threads,
}

struct Threads(Option<Runtime>);

impl Drop for Threads {
    fn drop(&mut self) {
        self.0.take().unwrap().shutdown_background();
    }
}

impl Extender {
    fn start(bed: Shared, address: &str) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.unwrap();
        let listener = std::net::TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let app =
            Router::new().route("/v1/nodes/{node}/report", put(take)).with_state(Arc::clone(&bed));
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, app).await.unwrap();
        });
        Self { bed, address, _threads: Threads(Some(runtime)) }
    }

    fn new() -> Self {
        Self::start(Shared::default(), "127.0.0.1:0")
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// Answers one report.
async fn take(
    State(bed): State<Shared>,
    Path(node): Path<String>,
    Json(report): Json<Report>,
) -> Response {
    let _: CheckedReport = CheckedReport::of(report.clone()).unwrap();
    let mut bed = bed.lock().unwrap();
    bed.reports.push((node.clone(), report.clone()));
    let refuse = |status: u16, reason: Option<ErrorReason>| {
        let body = Error { reason, ..Error::new("no".to_owned()) };
        (StatusCode::from_u16(status).unwrap(), Json(body)).into_response()
    };
    if let Some(status) = bed.refusals.pop_front() {
        return refuse(status, None);
    }
    let known = bed.sessions.get(&node).copied();
    let session = match report.session {
        None => known.unwrap_or(0) + 1,
        Some(named) if Some(named) == known => named,
        Some(_) => return refuse(409, Some(ErrorReason::SessionExpired)),
    };
    bed.sessions.insert(node, session);
    let version = version(&bed.allocations);
    let is_known = report.allocations_version == Some(version);
    Json(Reply {
        api_version: ApiVersion::default(),
        kind: ReplyKind::default(),
        session,
        outcome: Outcome::Accepted,
        allocations_version: Some(version),
        allocations: (!is_known).then(|| bed.allocations.clone()),
        mig_orders: None,
        memory_limits: None,
        clear_orders: None,
        close_library: None,
    })
    .into_response()
}

fn version(allocations: &[Allocation]) -> u64 {
    let mut hasher = DefaultHasher::new();
    serde_json::to_vec(allocations).unwrap().hash(&mut hasher);
    hasher.finish()
}

fn fleet(linger_ms: u64, nodes: usize) -> Fleet {
    let nodes: Vec<String> = (0..nodes)
        .map(|n| {
            format!(
                r#"{{"name":"n{n}","cpu_milli":1,"memory_mib":1,
                "gpus":[{{"uuid":"GPU-{n}","model":"Tesla T4","memory_mib":15360}}]}}"#
            )
        })
        .collect();
    let nodes = nodes.join(",");
    Fleet::from_json(&format!(r#"{{"process_linger_ms":{linger_ms},"nodes":[{nodes}]}}"#)).unwrap()
}

fn allocation(state: AllocationState) -> Allocation {
    let part =
        AllocatedDevice { uuid: "GPU-0".to_owned(), memory_mib: 1_000, share_millionths: 100_000 };
    Allocation {
        pod_uid: "pod".to_owned(),
        pod: "d/pod".to_owned(),
        state,
        devices: vec![part],
        is_guest: false,
    }
}

/// Runs the agent in the background; dropping it ends it.
struct Agent(tokio::task::JoinHandle<()>);

impl Agent {
    fn start(extenders: &[&Extender], fleet: Fleet, period_ms: u64) -> Self {
        let extenders = extenders.iter().map(|extender| extender.url()).collect();
        Self::start_with(extenders, Resolver::default(), fleet, period_ms)
    }

    fn start_with(
        extenders: Vec<String>,
        resolver: Resolver,
        fleet: Fleet,
        period_ms: u64,
    ) -> Self {
        let config = AgentConfig {
            extenders,
            proof: Proof::default(),
            resolver,
            period: Duration::from_millis(period_ms),
            clock: Clock::start(),
            metrics: None,
            mig: None,
            limits: None,
            clearing: None,
            upkeep: Upkeep::default(),
            gate: None,
        };
        Self(tokio::spawn(async move {
            run_fleet(&config, &fleet, std::future::pending()).await.unwrap();
        }))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Waits until `done` holds for the fake extender, and returns its value.
async fn until<T>(
    extender: &Extender,
    what: &str,
    mut done: impl FnMut(&mut Bed) -> Option<T>,
) -> T {
    for _ in 0..2_000 {
        if let Some(found) = done(&mut extender.bed.lock().unwrap()) {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not within 20 s: {what}");
}

/// Waits for `count` more reports.
async fn more_reports(extender: &Extender, count: usize) {
    let before = extender.bed.lock().unwrap().reports.len();
    until(extender, "more reports", |bed| (bed.reports.len() >= before + count).then_some(()))
        .await;
}

/// Pods listed on the first device by the newest report.
fn pods(bed: &Bed) -> Option<usize> {
    let (_, report) = bed.reports.last()?;
    Some(report.devices.first()?.processes.as_ref()?.len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hello_carries_the_inventory_and_later_reports_do_not() {
    let extender = Extender::new();
    let _agent = Agent::start(&[&extender], fleet(0, 1), 20);
    more_reports(&extender, 5).await;
    let bed = extender.bed.lock().unwrap();
    let (node, hello) = &bed.reports[0];
    assert_eq!((node.as_str(), hello.session, hello.inventory.is_some()), ("n0", None, true));
    let later = &bed.reports[1..];
    assert!(later.iter().all(|(_, report)| report.session == Some(1)));
    assert!(later.iter().all(|(_, report)| report.inventory.is_none()));
    assert!(bed.reports.iter().all(|(_, report)| report.agent == hello.agent));
    assert!(bed.reports.is_sorted_by(|(_, a), (_, b)| a.sequence < b.sequence));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_session_restarts_with_a_greater_sequence() {
    let extender = Extender::new();
    let _agent = Agent::start(&[&extender], fleet(0, 1), 20);
    more_reports(&extender, 3).await;
    extender.bed.lock().unwrap().sessions.insert("n0".to_owned(), 7);
    until(&extender, "a second session", |bed| {
        let (_, last) = bed.reports.last()?;
        (last.session == Some(8)).then_some(())
    })
    .await;
    let bed = extender.bed.lock().unwrap();
    let hellos: Vec<&Report> =
        bed.reports.iter().map(|(_, it)| it).filter(|it| it.session.is_none()).collect();
    assert_eq!(hellos.len(), 2);
    assert!(hellos[1].inventory.is_some());
    assert!(bed.reports.is_sorted_by(|(_, a), (_, b)| a.sequence < b.sequence));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_outlives_its_reservation_and_its_end_is_seen_soon() {
    let extender = Extender::new();
    let clock = Clock::start();
    let _agent = Agent::start(&[&extender], fleet(600, 1), 1_000);
    extender.bed.lock().unwrap().allocations = vec![allocation(AllocationState::Confirmed)];
    until(&extender, "the process", |bed| (pods(bed) == Some(1)).then_some(())).await;
    let used = extender.bed.lock().unwrap().reports.last().unwrap().1.devices[0].used_mib;
    assert_eq!(used, Some(600), "60 percent of what is allocated");
    let (reported, reports_before) = {
        let mut bed = extender.bed.lock().unwrap();
        bed.allocations = vec![allocation(AllocationState::Draining)];
        (clock.now(), bed.reports.len())
    };
    until(&extender, "its end", |bed| (pods(bed) == Some(0)).then_some(())).await;
    let took = clock.now().since(reported);
    assert!(took >= Duration::from_millis(600), "{took:?}");
    let quick = extender.bed.lock().unwrap().reports.len() - reports_before;
    assert!(quick >= 3, "one to hear of it, one that it still runs, one that it ended: {quick}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_agent_survives_rejections_and_a_lost_extender() {
    let (first, peer) = (Extender::new(), Extender::new());
    let _agent = Agent::start(&[&first, &peer], fleet(0, 1), 20);
    first.bed.lock().unwrap().refusals = [503, 500, 429].into();
    more_reports(&first, 6).await;
    let (bed, address) = (Arc::clone(&first.bed), first.address.to_string());
    drop(first);
    more_reports(&peer, 20).await;
    let reports_before = bed.lock().unwrap().reports.len();
    // The port is free for a moment only: another test may take it, then this one waits in vain.
    let again = Extender::start(Arc::clone(&bed), &address);
    more_reports(&again, 3).await;
    let bed = bed.lock().unwrap();
    assert_eq!(bed.reports[reports_before].1.session, Some(1), "the session stands");
    assert!(bed.reports.is_sorted_by(|(_, a), (_, b)| a.sequence <= b.sequence));
    let peer_bed = peer.bed.lock().unwrap();
    assert_eq!(peer_bed.reports.iter().filter(|(_, it)| it.session.is_none()).count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_address_of_a_name_is_a_replica_while_it_is_there() {
    let [first, second, third] = [Extender::new(), Extender::new(), Extender::new()];
    let known = Arc::new(Mutex::new(Some(vec![first.address, second.address])));
    let asked = Arc::clone(&known);
    let resolver = Resolver::new(move |host, port| {
        assert_eq!((host.as_str(), port), ("replicas.test", 8_080));
        let found = asked.lock().unwrap().clone();
        let found = found.ok_or_else(|| std::io::Error::other("no such name"));
        Box::pin(std::future::ready(found))
    });
    let url = vec!["http://replicas.test:8080".to_owned()];
    let _agent = Agent::start_with(url, resolver, fleet(0, 2), 50);
    let both_report = async |extender: &Extender| {
        until(extender, "reports of both nodes", |bed| {
            let of = |node| bed.reports.iter().filter(|(name, _)| name == node).count();
            (of("n0") >= 3 && of("n1") >= 3).then_some(())
        })
        .await;
    };
    both_report(&first).await;
    both_report(&second).await;
    // One that starts is found; one without a name is kept while it answers.
    *known.lock().unwrap() = Some(vec![first.address, third.address]);
    both_report(&third).await;
    more_reports(&second, 4).await;
    // One without a name that does not answer is gone, also when another process gets its address.
    let (bed, address) = (Arc::clone(&second.bed), second.address.to_string());
    drop(second);
    tokio::time::sleep(Duration::from_millis(4_500)).await;
    let other = Extender::start(Arc::clone(&bed), &address);
    let before = bed.lock().unwrap().reports.len();
    // Without an answer of the name server everything stays.
    *known.lock().unwrap() = None;
    tokio::time::sleep(Duration::from_millis(5_500)).await;
    assert_eq!(bed.lock().unwrap().reports.len(), before, "nobody reports there");
    more_reports(&first, 4).await;
    more_reports(&third, 4).await;
    for extender in [&first, &third] {
        let bed = extender.bed.lock().unwrap();
        assert!(bed.sessions.values().all(|session| *session == 1), "one link for each node");
    }
    // When all are lost, the new one is found.
    *known.lock().unwrap() = Some(vec![other.address]);
    drop((first, third));
    more_reports(&other, 4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_reports_every_node_in_each_period() {
    let extender = Extender::new();
    let _agent = Agent::start(&[&extender], fleet(0, 200), 200);
    until(&extender, "three reports of each node", |bed| {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for (node, _) in &bed.reports {
            *counts.entry(node).or_default() += 1;
        }
        (counts.len() == 200 && counts.values().all(|count| *count >= 3)).then_some(())
    })
    .await;
    let bed = extender.bed.lock().unwrap();
    assert_eq!(bed.sessions.len(), 200);
    assert!(bed.sessions.values().all(|session| *session == 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_driver_stays_silent_and_stops_on_signal() {
    let extender = Extender::new();
    let config = AgentConfig {
        extenders: vec![extender.url()],
        proof: Proof::default(),
        resolver: Resolver::default(),
        period: Duration::from_millis(20),
        clock: Clock::start(),
        metrics: None,
        mig: None,
        limits: None,
        clearing: None,
        upkeep: Upkeep::default(),
        gate: None,
    };
    let probe = NvmlProbe::new(Some("/nowhere/libnvidia-ml.so.1".into()), PodsByProcess::new("/"));
    let stop = tokio::time::sleep(Duration::from_millis(200));
    run_node(&config, "n0", probe, stop).await.unwrap();
    assert!(extender.bed.lock().unwrap().reports.is_empty());
}
