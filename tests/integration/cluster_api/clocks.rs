//! The clock of the extender's machine is wrong, in virtual time.

use std::sync::Arc;
use std::time::Duration;

use cli::serve::extender::settings;
use control::loops;
use control::shared::app::App;
use control::shared::leader::Replica;
use engine::ledger::nodes::state::Ledger;
use k8s_openapi::jiff;
use kube_api::config::file::Config;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::{PodWatch, Sink, WatchEvent};
use kube_api::request::placement::FenceWriter;
use kube_api::write::events::NoticeSender;
use kube_api::write::leader_lease::LeaseName;
use kube_api::write::target::PodKey;
use kube_api::write::term::Term;
use kube_api::write::writer::ApiWriter;
use runtime::clock::{Clock, SimulatedTime};
use runtime::step::api_server::Head;
use runtime::step::outside::Outside;
use serde_json::{Value, json};
use server::api::reports;
use server::scheduler::verbs;
use server::views::explain::explain_named;
use server::views::viewer::Viewer;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::{HostAmount, Timestamp};

use crate::harness::steps::carry_out_at;

/// The clock of the API server when a test begins, in seconds since 1970.
const BEGAN: u64 = 1_900_000_000;

const TEN_YEARS: i64 = 3_650 * 86_400;

/// How far the clock of the extender's machine is ahead, in seconds.
const AHEAD: [i64; 4] = [0, -90, 90, TEN_YEARS];

/// How long a pod that has started is not evicted, in seconds.
const PROTECTED_FOR: u64 = 20;

/// One process of an extender of a node with a GPU, which a pod has, and for which another one waits.
pub(super) struct Process {
    time: &'static SimulatedTime,
    /// When it started, in milliseconds of the test.
    started: u64,
    pub(super) app: Arc<App>,
    watch: PodWatch,
    _running: loops::RunningLoops,
}

/// The API server, and the process. Times are in milliseconds since the test began.
pub(super) struct Bed {
    now: u64,
    ahead: i64,
    /// Priority of the pod that has the GPU; that of the one that waits is 5.
    priority: i32,
    /// When the waiting pod was created.
    created: Option<u64>,
    pub(super) process: Process,
    has_lease: bool,
    lease: Option<Value>,
    /// The answer to every call, if it is the same.
    pub(super) status: Option<u16>,
    evicted: Vec<u64>,
    pub(super) runtime: tokio::runtime::Runtime,
}

fn time_of(millis: u64) -> String {
    let seconds = i64::try_from(BEGAN + millis / 1_000).unwrap();
    jiff::Timestamp::from_second(seconds).unwrap().to_string()
}

impl Bed {
    pub(super) fn new(ahead: i64, priority: i32) -> Self {
        Self::of(ahead, priority, false)
    }

    pub(super) fn of(ahead: i64, priority: i32, has_lease: bool) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let process = Process::start(ahead, 0, has_lease);
        let mut bed = Self {
            now: 0,
            ahead,
            priority,
            created: None,
            process,
            has_lease,
            lease: None,
            status: None,
            evicted: Vec::new(),
            runtime,
        };
        bed.list();
        bed
    }

    /// Another process on the same machine takes its place.
    fn restart(&mut self) {
        self.process = Process::start(self.ahead, self.now, self.has_lease);
        self.list();
    }

    /// The first lists arrive.
    fn list(&mut self) {
        let placement = json!({"v": 1, "isolation": "none",
            "devices": [{"id": "GPU-n1", "mib": 10_000, "share": 1_000_000}]});
        let running = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"uid": "lesser", "namespace": "team", "name": "lesser", "resourceVersion": "7",
                "annotations": {"gpu-fraction": "1", "placed.gpupack.dev/placement": placement.to_string()}},
            "spec": {"schedulerName": "gpupack", "priority": self.priority, "nodeName": "n1",
                "containers": [{"name": "main"}]},
            "status": {"phase": "Running", "startTime": time_of(0)}});
        let app = &self.process.app;
        app.ledger.see_node(&NodeName::new("n1"), HostAmount::ZERO, PoolName::new(""));
        app.ledger.set_listed(app.clock.now());
        self.report();
        // Lists of pods and nodes, and then watches of both.
        (0..4).for_each(|_| self.watches());
        self.process.watch.take(WatchEvent::ListBegins);
        self.process
            .watch
            .take(WatchEvent::Seen(SeenPod::from_json(&running.to_string()).unwrap()));
        if self.created.is_some() {
            self.show();
        }
        self.process.watch.take(WatchEvent::ListEnds);
        self.process.app.lead.set_fenced();
        if self.created.is_some() {
            self.filter();
        }
    }

    /// The agent of the node reports.
    fn report(&self) {
        let report = json!({"apiVersion": "gpupack.dev/v1alpha1", "agent": "agent",
            "sequence": 1 + self.now,
            "inventory": [{"id": "GPU-n1", "index": 0, "model": "NVIDIA L4", "memoryMib": 10_000,
                "reservedMib": 0, "kind": "Gpu", "healthy": true}],
            "devices": [{"id": "GPU-n1", "usedMib": 0, "healthy": true, "processes": []}]});
        let (status, _) = reports::answer(&self.process.app, "n1", report.to_string().as_bytes());
        assert!(status.is_success(), "{status}");
    }

    /// A call of the watches is answered.
    pub(super) fn watches(&self) {
        let app = &self.process.app;
        let status = self.status.unwrap_or(200);
        let date = Some(BEGAN + self.now / 1_000);
        app.outside.api_server().answered(app.clock.now(), Head { status, date });
    }

    fn waiting(&self) -> Value {
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"uid": "important", "namespace": "team", "name": "important",
                "resourceVersion": "7", "creationTimestamp": time_of(self.created.unwrap()),
                "annotations": {"gpu-fraction": "1"}},
            "spec": {"schedulerName": "gpupack", "priority": 5, "containers": [{"name": "main"}]},
            "status": {"phase": "Pending"}})
    }

    fn show(&mut self) {
        let waiting = SeenPod::from_json(&self.waiting().to_string()).unwrap();
        self.process.watch.take(WatchEvent::Seen(waiting));
    }

    /// kube-scheduler tries the pod that waits.
    fn filter(&self) {
        let call = json!({"Pod": self.waiting(), "Nodes": null, "NodeNames": ["n1"]}).to_string();
        let answer = verbs::filter(&self.process.app, call.as_bytes()).unwrap().0;
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        assert_eq!(answer["NodeNames"], json!([]), "{answer}");
    }

    /// A pod that needs the whole GPU is created.
    fn create(&mut self) {
        self.created = Some(self.now);
        self.show();
        self.filter();
    }

    /// Lets time pass in steps of 50 ms. A watch is begun again after 20 s, or 2 s after a failure.
    pub(super) fn pass(&mut self, time: u64) {
        let until = self.now + time;
        while self.now < until {
            self.now += 50;
            self.step();
        }
    }

    fn step(&mut self) {
        let now = Timestamp::from_millis(self.now - self.process.started);
        self.process.time.set(now);
        let every = if self.status.is_some() { 2_000 } else { 20_000 };
        if self.now.is_multiple_of(every) {
            self.watches();
        }
        if self.now.is_multiple_of(5_000) {
            self.report();
        }
        let app = Arc::clone(&self.process.app);
        let date = Some(BEGAN + self.now / 1_000);
        carry_out_at(&app, now, date, |request| self.answer(request));
    }

    fn answer(&mut self, request: &hyper::Request<Vec<u8>>) -> (u16, Value) {
        if let Some(status) = self.status {
            return (status, json!({"kind": "Status", "status": "Failure", "code": status}));
        }
        if request.uri().path().contains("/leases") {
            if request.method() != "GET" {
                let mut lease: Value = serde_json::from_slice(request.body()).unwrap();
                lease["metadata"]["resourceVersion"] = self.now.to_string().into();
                self.lease = Some(lease);
            }
            return self.lease.clone().map_or((404, json!({})), |lease| (200, lease));
        }
        if request.uri().path().ends_with("/eviction") {
            let body: Value = serde_json::from_slice(request.body()).unwrap();
            if body["deleteOptions"]["dryRun"].is_null() {
                self.evicted.push(self.now);
            }
            return (201, json!({"kind": "Status", "status": "Success", "code": 201}));
        }
        (200, self.created.map_or_else(|| json!({}), |_| self.waiting()))
    }

    fn is_kept(&self) -> bool {
        let standing = self.process.app.ledger.standing_nodes();
        standing.contains_key(&PodUid::new("important"))
    }

    /// After how many seconds since its creation room is kept for the waiting pod, at most `most`.
    fn kept_after(&mut self, most: u64) -> Option<u64> {
        let created = self.created.unwrap();
        while self.now < created + most * 1_000 {
            if self.is_kept() {
                return Some((self.now - created) / 1_000);
            }
            self.pass(50);
        }
        None
    }

    /// Its age as people see it.
    fn age(&self) -> u64 {
        let found = explain_named(&self.process.app, "team", "important", &Viewer::All);
        found.unwrap().age_seconds.unwrap()
    }
}

impl Process {
    fn start(ahead: i64, now: u64, has_lease: bool) -> Self {
        let wall = (BEGAN + now / 1_000).saturating_add_signed(ahead);
        let time: &'static SimulatedTime = Box::leak(Box::new(SimulatedTime::starting(wall)));
        let (clock, mut config) = (Clock::simulated(time), Config::default());
        config.preemption.protect = Duration::from_secs(PROTECTED_FOR);
        let term = match has_lease {
            true => Term::none(clock, FenceWriter::random()),
            false => Term::alone(clock, FenceWriter::random()),
        };
        let writer = ApiWriter::new(Outside::new(clock), config.api_timeout, term);
        let address = "http://replica-1:8080".to_owned();
        let replica = has_lease.then(|| Replica {
            identity: Replica::identity("gpupack-0", 1),
            pod: PodKey::new("gpu-system", "gpupack-0").unwrap(),
            lease: LeaseName { namespace: "gpu-system".to_owned(), name: "gpupack".to_owned() },
            holds_for: Duration::from_secs(3),
            address,
            secret: "secret".to_owned(),
        });
        let ledger = Arc::new(Ledger::new(settings(&config, &clock)));
        let app = App::new(ledger, config, writer, NoticeSender::unread());
        let app = Arc::new(match replica {
            Some(replica) => app.among(replica),
            None => app,
        });
        let sink: Arc<dyn Sink> = app.clone();
        let watch = PodWatch::new(Arc::clone(&app.ledger), sink, clock);
        let running = loops::start(&app);
        Self { time, started: now, app, watch, _running: running }
    }
}

#[test]
fn room_is_kept_for_a_pod_by_its_age_at_the_api_server_whatever_this_machine_says() {
    for ahead in AHEAD {
        let mut bed = Bed::new(ahead, 5);
        bed.pass(3_000);
        bed.create();
        let after = bed.kept_after(200);
        assert!(after.is_some_and(|after| (59..=62).contains(&after)), "{ahead}: {after:?}");
        assert!((58..=63).contains(&bed.age()), "{ahead}: {}", bed.age());
    }
}

#[test]
fn pods_are_evicted_for_one_that_has_waited_at_the_api_server_whatever_this_machine_says() {
    for ahead in AHEAD {
        let mut bed = Bed::new(ahead, 0);
        // The other pod runs for longer than it is protected.
        bed.pass(100_000);
        bed.create();
        bed.pass(5_000);
        let after = bed.evicted.first().map(|at| (at - bed.created.unwrap()) / 1_000);
        assert!(after.is_some_and(|after| after <= 4), "{ahead}: {after:?}");
    }
}

#[test]
fn a_pod_that_has_just_started_stays_whatever_this_machine_says() {
    for ahead in AHEAD {
        let mut bed = Bed::new(ahead, 0);
        bed.pass(1_000);
        bed.create();
        bed.pass((PROTECTED_FOR - 3) * 1_000);
        assert!(bed.evicted.is_empty(), "{ahead}: {:?}", bed.evicted);
        bed.pass(60_000);
        assert!(!bed.evicted.is_empty(), "{ahead}");
    }
}

#[test]
fn a_step_of_the_clock_changes_no_age() {
    for step in [-TEN_YEARS, -90, 90, TEN_YEARS] {
        let mut bed = Bed::new(0, 5);
        bed.create();
        bed.pass(20_000);
        bed.process.time.step_wall(step);
        assert!((19..=21).contains(&bed.age()), "{step}: {}", bed.age());
        let after = bed.kept_after(200);
        assert!(after.is_some_and(|after| (59..=62).contains(&after)), "{step}: {after:?}");
    }
}

#[test]
fn a_restart_changes_no_age() {
    for ahead in AHEAD {
        let mut bed = Bed::new(ahead, 5);
        bed.create();
        bed.pass(50_000);
        bed.restart();
        assert!((49..=51).contains(&bed.age()), "{ahead}: {}", bed.age());
        let after = bed.kept_after(200);
        assert!(after.is_some_and(|after| (59..=62).contains(&after)), "{ahead}: {after:?}");
        bed.restart();
        let after = bed.kept_after(200);
        assert!(after.is_some_and(|after| after <= 64), "{ahead}: again at once, {after:?}");
    }
}

#[test]
fn a_late_answer_changes_no_age() {
    let mut bed = Bed::new(-90, 5);
    bed.pass(3_000);
    bed.create();
    bed.pass(10_000);
    let app = Arc::clone(&bed.process.app);
    let sent = app.clock.now();
    let date = Some(BEGAN + bed.now / 1_000);
    bed.pass(40_000);
    for _ in 0..5 {
        app.outside.api_server().answered(sent, Head { status: 200, date });
        assert!((49..=51).contains(&bed.age()), "{}", bed.age());
    }
    // One that says so although it was sent just now.
    app.outside.api_server().answered(app.clock.now(), Head { status: 200, date });
    assert!((49..=51).contains(&bed.age()), "{}", bed.age());
}
