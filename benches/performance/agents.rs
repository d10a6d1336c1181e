//! Agents of all nodes, simulated by this process over keep-alive connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio::time::MissedTickBehavior;
use wire::api::kind::{ApiVersion, ReportKind};
use wire::report::bodies::{Reply, Report, report_path};

use super::objects::{inventory, node_name, uses};

/// Most connections. Nodes beyond share them.
const CONNECTIONS: usize = 5_000;

/// Files that this process, and the extender, need beside the connections.
const OTHER_FILES: usize = 200;

/// Most samples a second.
const SAMPLES: usize = 5_000;

/// Connections that are opened concurrently: fewer than the backlog of a listener.
const OPENED_AT_ONCE: usize = 64;

/// Seconds between two reports of a node without changes. Each of them has lists of processes.
const HEARTBEAT: u64 = 5;

/// One node in N has changes and reports in each period. 50 pods that start and end in each
/// second on 5,000 nodes, each of which lets its node report for five seconds, are as many.
const CHANGING: u64 = 20;

/// A connection to an extender.
pub(crate) struct Connection {
    calls: SendRequest<Full<Bytes>>,
    address: String,
}

impl Connection {
    pub(crate) async fn open(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.expect("the extender listens");
        stream.set_nodelay(true).expect("a socket");
        let (calls, talk) = handshake(TokioIo::new(stream)).await.expect("a fresh connection");
        tokio::spawn(talk);
        Self { calls, address: address.to_owned() }
    }

    /// Status and body of the answer; `None` if the connection broke.
    pub(crate) async fn call(
        &mut self,
        method: Method,
        path: &str,
        body: impl Into<Bytes>,
    ) -> Option<(StatusCode, Bytes)> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, &self.address)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body.into()))
            .expect("a sound request");
        self.calls.ready().await.ok()?;
        let answer = self.calls.send_request(request).await.ok()?;
        let status = answer.status();
        Some((status, answer.into_body().collect().await.ok()?.to_bytes()))
    }
}

/// What the agents do now.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Connecting,
    Greeting,
    Reporting,
    Knocking,
    Quiet,
}

/// What has become of their reports.
#[derive(Default)]
struct Counts {
    connected: AtomicU64,
    greeted: AtomicU64,
    taken: AtomicU64,
    failed: AtomicU64,
}

/// The agents. They end with their runtime.
pub(crate) struct Agents {
    phase: watch::Sender<Phase>,
    counts: Arc<Counts>,
    pub(crate) connections: u64,
    nodes: u64,
    /// Seconds between two samples of a node.
    pub(crate) every: u64,
}

impl Agents {
    /// Connects the agents of this many nodes to the extender at `address`. They send nothing yet.
    pub(crate) fn start(address: &str, nodes: usize) -> Self {
        let (phase, phases) = watch::channel(Phase::Connecting);
        let counts = Arc::<Counts>::default();
        let connections =
            nodes.min(CONNECTIONS).min(open_files().saturating_sub(OTHER_FILES)).max(1);
        let every = u64::try_from(nodes.div_ceil(SAMPLES)).expect("few seconds");
        let opening = Arc::new(Semaphore::new(OPENED_AT_ONCE));
        for number in 0..connections {
            let agents: Vec<Agent> = (number..nodes).step_by(connections).map(Agent::new).collect();
            let (address, opening) = (address.to_owned(), Arc::clone(&opening));
            let (phases, counts) = (phases.clone(), Arc::clone(&counts));
            tokio::spawn(async move {
                let turn = opening.acquire().await.expect("it is never closed");
                let connection = Connection::open(&address).await;
                drop(turn);
                counts.connected.fetch_add(1, Ordering::Relaxed);
                speak(connection, agents, phases, &counts, every).await;
            });
        }
        let number = |count: usize| u64::try_from(count).expect("lengths fit into 64 bits");
        Self { phase, counts, connections: number(connections), nodes: number(nodes), every }
    }

    pub(crate) fn are_connected(&self) -> bool {
        self.counts.connected.load(Ordering::Relaxed) == self.connections
    }

    /// Lets each say hello, once.
    pub(crate) fn greet(&self) {
        self.phase.send_replace(Phase::Greeting);
    }

    pub(crate) fn have_greeted(&self) -> bool {
        self.counts.greeted.load(Ordering::Relaxed) == self.nodes
    }

    /// Lets each report what has changed, and its heartbeats.
    pub(crate) fn report(&self) {
        self.phase.send_replace(Phase::Reporting);
    }

    /// Lets each agent call a path that is not there as often, over the same connections: the cost of HTTP.
    pub(crate) fn knock(&self) {
        self.phase.send_replace(Phase::Knocking);
    }

    /// Lets no agent send anything.
    pub(crate) fn hush(&self) {
        self.phase.send_replace(Phase::Quiet);
    }

    /// Reports that were taken, and knocks that were answered, so far.
    ///
    /// # Panics
    /// When one was not.
    pub(crate) fn taken(&self) -> u64 {
        let failed = self.counts.failed.load(Ordering::Relaxed);
        assert_eq!(failed, 0, "reports that were not accepted");
        self.counts.taken.load(Ordering::Relaxed)
    }
}

/// Files that this process may have open.
fn open_files() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let soft = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    soft.unwrap_or(1_024)
}

struct Agent {
    node: usize,
    name: String,
    session: Option<u64>,
    allocations_version: Option<u64>,
    sequence: u64,
    /// Seconds of its heartbeat that have passed; each node begins at another one.
    seconds: u64,
}

impl Agent {
    fn new(node: usize) -> Self {
        Self {
            node,
            name: node_name(node),
            session: None,
            allocations_version: None,
            sequence: 0,
            seconds: u64::try_from(node).expect("few nodes") / CHANGING % HEARTBEAT,
        }
    }

    /// What it would say that many seconds later: nothing, or a report that has lists or has none.
    fn next(&mut self, every: u64) -> Option<bool> {
        self.seconds += every;
        let has_lists = self.seconds >= HEARTBEAT;
        if has_lists {
            self.seconds %= HEARTBEAT;
        }
        let is_changing = u64::try_from(self.node).is_ok_and(|node| node % CHANGING == 0);
        (has_lists || is_changing).then_some(has_lists)
    }

    /// Says what a real one would say, and whether that was taken.
    async fn say(&mut self, connection: &mut Connection, has_lists: bool) -> bool {
        self.sequence += 1;
        let report = Report {
            api_version: ApiVersion::default(),
            kind: ReportKind::default(),
            agent: self.name.clone(),
            session: self.session,
            sequence: self.sequence,
            inventory: self.session.is_none().then(|| inventory(self.node)),
            driver: None,
            allocations_version: self.allocations_version,
            devices: uses(self.node, has_lists),
            mig_failures: Vec::new(),
            memory_limits: None,
            mig_promises: None,
            clear_outcome: None,
            containers: None,
        };
        let body = serde_json::to_vec(&report).expect("a report cannot fail");
        let answer = connection.call(Method::PUT, &report_path(&self.name), body).await;
        let Some((StatusCode::OK, body)) = answer else { return false };
        let reply: Reply = serde_json::from_slice(&body).expect("a reply");
        (self.session, self.allocations_version) = (Some(reply.session), reply.allocations_version);
        true
    }
}

async fn speak(
    mut connection: Connection,
    mut agents: Vec<Agent>,
    mut phase: watch::Receiver<Phase>,
    counts: &Counts,
    every: u64,
) {
    let count = |is_taken: bool| {
        if is_taken { &counts.taken } else { &counts.failed }.fetch_add(1, Ordering::Relaxed);
    };
    if phase.wait_for(|phase| *phase == Phase::Greeting).await.is_err() {
        return;
    }
    for agent in &mut agents {
        count(agent.say(&mut connection, true).await);
        counts.greeted.fetch_add(1, Ordering::Relaxed);
    }
    let period = Duration::from_secs(every) / u32::try_from(agents.len()).expect("few nodes");
    let is_busy = |phase: &Phase| matches!(phase, Phase::Reporting | Phase::Knocking);
    while let Ok(now) = phase.wait_for(is_busy).await.map(|phase| *phase) {
        tokio::time::sleep(period.mul_f64(rand::random())).await;
        let mut tick = tokio::time::interval(period);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for at in (0..agents.len()).cycle() {
            tick.tick().await;
            if *phase.borrow() != now {
                break;
            }
            let Some(has_lists) = agents[at].next(every) else { continue };
            count(if now == Phase::Knocking {
                let answer = connection.call(Method::GET, "/nothing", "").await;
                answer.is_some_and(|(status, _)| status == StatusCode::NOT_FOUND)
            } else {
                agents[at].say(&mut connection, has_lists).await
            });
        }
    }
}
