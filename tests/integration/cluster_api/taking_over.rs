//! A replica takes over from a leader, pods of which ran and ended before its own watch showed them.

use std::sync::Arc;
use std::time::Duration;

use cli::serve::extender::settings;
use control::lead::informing::take_message;
use control::loops;
use control::shared::app::App;
use control::shared::in_flight::{HeldPod, Message, NamedPod};
use control::shared::leader::Replica;
use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::reading::Readiness;
use kube_api::config::file::Config;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::{PodWatch, Sink, WatchEvent};
use kube_api::request::placement::HOLD;
use kube_api::write::events::NoticeSender;
use kube_api::write::leader_lease::LeaseName;
use kube_api::write::target::PodKey;
use kube_api::write::term::Term;
use kube_api::write::writer::ApiWriter;
use runtime::clock::{Clock, SimulatedTime};
use runtime::step::outside::Outside;
use serde_json::{Value, json};
use server::api::reports;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::{HostAmount, MemMib, Timestamp};

use crate::harness::steps::carry_out;

const NODES: [&str; 2] = ["n1", "n2"];

/// A follower of two nodes with a GPU each, and the API server around it.
struct Bed {
    time: &'static SimulatedTime,
    now: u64,
    app: Arc<App>,
    _running: loops::RunningLoops,
    lease: Value,
    /// Status and body of the answer to the fence of a pod, and to other changes of it.
    on_fence: (u16, Value),
    /// How often a note of room was to be taken away.
    taken_away: usize,
    fences: usize,
    /// Whether pods are listed between the fence and its answer.
    is_listed_meanwhile: bool,
    /// Whether the watch shows between the fence and its answer that the pod is gone.
    is_gone_meanwhile: bool,
}

impl Bed {
    /// The Lease names the follower as informed, or it does not. Steps run outside of a task of tokio,
    /// which would have a budget.
    fn new(is_informed: bool, on_fence: (u16, Value)) -> Self {
        let time: &'static SimulatedTime = Box::leak(Box::new(SimulatedTime::starting(1_000_000)));
        let (clock, config) = (Clock::simulated(time), Config::default());
        let address = "http://replica-2:8080".to_owned();
        let own = Replica {
            identity: Replica::identity("gpupack-1", 2),
            pod: PodKey::new("gpu-system", "gpupack-1").unwrap(),
            lease: LeaseName { namespace: "gpu-system".to_owned(), name: "gpupack".to_owned() },
            holds_for: Duration::from_secs(3),
            address,
            secret: "secret-2".to_owned(),
        };
        let informed = if is_informed { own.identity.clone() } else { String::new() };
        let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": "gpupack", "namespace": "gpu-system", "resourceVersion": "1",
                "annotations": {"gpupack.dev/address": "http://replica-1:8080",
                    "gpupack.dev/page-address": "http://replica-1:8080",
                    "gpupack.dev/handed-over": "0", "gpupack.dev/informed": informed,
                    "gpupack.dev/secret": "secret-1", "gpupack.dev/term": "7"}},
            "spec": {"holderIdentity": Replica::identity("gpupack-0", 1),
                "leaseDurationSeconds": 3, "leaseTransitions": 1,
                "acquireTime": "2026-01-01T00:00:00.000000Z",
                "renewTime": "2026-01-01T00:00:00.000000Z"}});
        let writer = ApiWriter::new(Outside::new(clock), config.api_timeout, Term::none(clock, 2));
        let ledger = Arc::new(Ledger::new(settings(&config, &clock)));
        let app = App::new(ledger, config, writer, NoticeSender::unread());
        let app = Arc::new(app.among(own));
        let running = loops::start(&app);
        let mut bed = Self {
            time,
            now: 0,
            app,
            _running: running,
            lease,
            on_fence,
            taken_away: 0,
            fences: 0,
            is_listed_meanwhile: false,
            is_gone_meanwhile: false,
        };
        for name in NODES {
            bed.app.ledger.see_node(&NodeName::new(name), HostAmount::ZERO, PoolName::new(""));
        }
        bed.list();
        bed.app.ledger.set_listed(bed.app.clock.now());
        NODES.iter().for_each(|name| bed.report(name));
        bed.pass(100); // it reads the Lease
        bed
    }

    /// A list of pods, which has none.
    fn list(&self) {
        self.app.pods.lists.complete(self.app.pods.lists.begin());
    }

    /// The first report of an agent run.
    fn report(&self, node: &str) {
        let id = format!("GPU-{node}");
        let report = json!({"apiVersion": "gpupack.dev/v1alpha1",
            "agent": format!("agent-{}", self.now), "sequence": 1,
            "inventory": [{"id": id, "index": 0, "model": "NVIDIA L4", "memoryMib": 23_034,
                "reservedMib": 0, "kind": "Gpu", "healthy": true}],
            "devices": [{"id": id, "usedMib": 0, "healthy": true, "processes": []}]});
        let (status, _) = reports::answer(&self.app, node, report.to_string().as_bytes());
        assert!(status.is_success(), "{status}");
    }

    /// The leader names a pod whose Binding may be on its way.
    fn told(&self, node: Option<&str>) {
        let node = node.map(str::to_owned);
        let named = |name: &str| NamedPod {
            namespace: "team".to_owned(),
            name: name.to_owned(),
            uid: "u1".to_owned(),
            node: node.clone(),
        };
        let message = || Message {
            term: 7,
            secret: "secret-1".to_owned(),
            to: Replica::identity("gpupack-1", 2),
            bindings: vec![named("infer")],
            holds: Vec::new(),
        };
        assert!(!take_message(&self.app, message()), "its list began before");
        self.list();
        assert!(take_message(&self.app, message()));
    }

    /// Lets time pass in steps of 50 ms.
    fn pass(&mut self, time: u64) {
        let until = self.now + time;
        while self.now < until {
            self.now += 50;
            let now = Timestamp::from_millis(self.now);
            self.time.set(now);
            let app = Arc::clone(&self.app);
            carry_out(&app, now, |request| self.answer(request));
            if self.app.pods.lists.is_wanted() && self.app.lead.leading.is_here() {
                self.list();
            }
        }
    }

    fn answer(&mut self, request: &hyper::Request<Vec<u8>>) -> (u16, Value) {
        let path = request.uri().path();
        match request.method().as_str() {
            "PUT" => {
                self.lease = serde_json::from_slice(request.body()).unwrap();
                self.lease["metadata"]["resourceVersion"] = json!(self.now.to_string());
                (200, self.lease.clone())
            }
            "GET" if path.contains("/leases/") => (200, self.lease.clone()),
            "PATCH" if path.ends_with("/pods/infer") => {
                self.fences += 1;
                if self.is_listed_meanwhile {
                    self.list();
                }
                if self.is_gone_meanwhile {
                    let uid = PodUid::new("u1");
                    self.app.ledger.end_pod(&uid, self.app.clock.now());
                    self.app.pod_ended(&uid);
                }
                let body: Value = serde_json::from_slice(request.body()).unwrap();
                let annotations = body["metadata"]["annotations"].as_object().unwrap();
                self.taken_away += usize::from(annotations.get(HOLD).is_some_and(Value::is_null));
                self.on_fence.clone()
            }
            _ => (404, json!({})),
        }
    }

    /// Which nodes have something free.
    fn free(&self) -> Vec<&'static str> {
        let is_free = |name: &&&str| {
            let node = self.app.ledger.node(name).unwrap();
            node.devices().iter().any(|device| device.free().memory > MemMib::ZERO)
        };
        NODES.iter().filter(is_free).copied().collect()
    }

    /// The leader does not renew the Lease any more. Which nodes have something free when this
    /// replica leads.
    fn takes_over(&mut self) -> Vec<&'static str> {
        assert_eq!(self.free(), NODES);
        self.pass(4_500);
        assert!(self.app.lead.leading.is_here());
        assert_eq!(self.app.readiness(), Readiness::Ready);
        self.free()
    }
}

fn pod(node: Option<&str>, phase: &str) -> Value {
    json!({"metadata": {"uid": "u1", "namespace": "team", "name": "infer", "resourceVersion": "9",
            "annotations": {"gpu-fraction": "0.5"}},
        "spec": {"schedulerName": "gpupack", "nodeName": node, "containers": [{"name": "main"}]},
        "status": {"phase": phase}})
}

#[test]
fn a_limit_that_the_leader_lowers_is_no_edit_for_a_follower() {
    let mut bed = Bed::new(true, (404, json!({})));
    let sink: Arc<dyn Sink> = bed.app.clone();
    let mut watch = PodWatch::new(Arc::clone(&bed.app.ledger), sink, bed.app.clock);
    let limited = |limit: &str| {
        let mut pod = pod(Some("n1"), "Running");
        let devices = json!([{"id": "GPU-n1", "mib": 11_517, "share": 500_000}]);
        let placement = json!({"v": 1, "devices": devices, "isolation": "none"});
        for (key, value) in [
            ("devices", "runtime.nvidia.com/gpu=GPU-n1"),
            ("uuids", "GPU-n1"),
            ("placement", &placement.to_string()),
            ("mps-memory-limit", limit),
        ] {
            pod["metadata"]["annotations"][format!("placed.gpupack.dev/{key}")] = value.into();
        }
        WatchEvent::Seen(SeenPod::from_json(&pod.to_string()).unwrap())
    };
    for event in [WatchEvent::ListBegins, limited("0=23034M"), WatchEvent::ListEnds] {
        watch.take(event);
    }
    assert!(bed.app.ledger.reservation(&PodUid::new("u1")).is_some());
    watch.take(limited("0=11517M"));
    assert_eq!(bed.app.pods.edits.count(), 0, "the leader may have written it");
    bed.pass(4_500);
    assert!(bed.app.lead.leading.is_here());
    watch.take(limited("0=11517M"));
    assert_eq!(bed.app.pods.edits.count(), 0);
    watch.take(limited("0=23034M"));
    assert_eq!(bed.app.pods.edits.count(), 1, "nobody else may");
}

#[test]
fn nodes_wait_for_a_report_if_a_follower_lists_pods_again() {
    let seen = |node, phase| SeenPod::from_json(&pod(node, phase).to_string()).unwrap();
    // Meanwhile the leader bound it, and it ended; perhaps it is deleted.
    for later in [None, Some(seen(Some("n1"), "Succeeded"))] {
        let mut bed = Bed::new(true, (404, json!({})));
        let sink: Arc<dyn Sink> = bed.app.clone();
        let (ledger, clock) = (Arc::clone(&bed.app.ledger), bed.app.clock);
        let mut watch = PodWatch::new(ledger, sink, clock);
        for event in
            [WatchEvent::ListBegins, WatchEvent::Seen(seen(None, "Pending")), WatchEvent::ListEnds]
        {
            watch.take(event);
        }
        assert_eq!(bed.free(), NODES, "nothing is missed before the first list");
        watch.take(WatchEvent::ListBegins);
        later.into_iter().for_each(|pod| _ = watch.take(WatchEvent::Seen(pod)));
        watch.take(WatchEvent::ListEnds);
        assert_eq!(bed.free(), [""; 0]);
        NODES.iter().for_each(|name| bed.report(name));
        assert_eq!(bed.takes_over(), NODES);
    }
}

#[test]
fn a_node_where_a_pod_may_have_run_unseen_takes_pods_after_its_next_report() {
    let gone = (404, json!({}));
    for (on_fence, named, free) in [
        (gone.clone(), Some("n1"), &["n2"][..]),
        (gone, None, &[]), // by a leader of an earlier version
        ((200, pod(Some("n1"), "Succeeded")), Some("n1"), &["n2"]),
        ((200, pod(None, "Pending")), Some("n1"), &NODES),
    ] {
        let what = format!("{on_fence:?} {named:?}");
        let mut bed = Bed::new(true, on_fence);
        bed.told(named);
        assert_eq!(bed.fences, 0, "{what}");
        assert_eq!(bed.takes_over(), free, "{what}");
        assert_eq!(bed.fences, 1, "{what}");
        NODES.iter().for_each(|name| bed.report(name));
        assert_eq!(bed.free(), NODES, "{what}");
    }
}

#[test]
fn a_replica_that_takes_over_uninformed_waits_for_a_report_of_each_node() {
    let mut bed = Bed::new(false, (404, json!({})));
    assert_eq!(bed.takes_over(), [""; 0]);
    bed.report("n2");
    assert_eq!(bed.free(), ["n2"]);
}

/// The list has no such pod: it is gone since it was fenced, and the watch will not say so.
#[test]
fn pods_are_listed_again_if_a_list_came_before_the_answer_to_a_fence() {
    for is_listed_meanwhile in [false, true] {
        let mut bed = Bed::new(true, (200, pod(Some("n1"), "Running")));
        bed.told(Some("n1"));
        bed.is_listed_meanwhile = is_listed_meanwhile;
        let before = bed.app.pods.lists.count();
        bed.takes_over();
        let lists = bed.app.pods.lists.count().zip(before).map(|(now, before)| now - before);
        assert_eq!(lists, Some(if is_listed_meanwhile { 2 } else { 0 }));
    }
}

/// Nothing says once more that it is gone. The rest of its group would be bound without it.
#[test]
fn a_pod_of_a_group_that_is_gone_before_the_answer_to_its_fence_does_not_count_for_its_group() {
    for (is_gone_meanwhile, count) in [(false, 1), (true, 0)] {
        let mut bound = pod(Some("n1"), "Running");
        bound["metadata"]["annotations"]["gpupack.dev/group"] = json!("g");
        bound["metadata"]["annotations"]["gpupack.dev/group-size"] = json!("2");
        let mut bed = Bed::new(true, (200, bound));
        bed.told(Some("n1"));
        bed.is_gone_meanwhile = is_gone_meanwhile;
        bed.takes_over();
        assert_eq!(bed.app.room.bound_groups.count(), count);
    }
}

/// Else a later process would go on with room that this one does not keep.
#[test]
fn a_note_of_room_is_taken_away_until_that_succeeds() {
    let mut noted = pod(None, "Pending");
    noted["metadata"]["annotations"][HOLD] = json!(r#"{"v":1,"node":"n3","victims":["gone"]}"#);
    let mut bed = Bed::new(true, (503, json!({})));
    bed.app.pod(&SeenPod::from_json(&noted.to_string()).unwrap());
    bed.takes_over();
    bed.pass(10_000);
    let tries = bed.taken_away;
    assert!((3..6).contains(&tries), "there is no such node, and the pauses grow: {tries}");
    bed.on_fence = (200, noted);
    bed.pass(100_000);
    assert_eq!(bed.taken_away, tries + 1);
}

/// kube-scheduler may be about to bind the pod there: no other pod gets the room before.
#[test]
fn the_holds_of_the_last_leader_are_taken_over() {
    for (node, is_waiting, count) in [("n1", true, 1), ("n1", false, 0), ("n9", true, 0)] {
        let mut bed = Bed::new(true, (404, json!({})));
        let sink: Arc<dyn Sink> = bed.app.clone();
        let mut watch = PodWatch::new(Arc::clone(&bed.app.ledger), sink, bed.app.clock);
        let waiting = SeenPod::from_json(&pod(None, "Pending").to_string()).unwrap();
        watch.take(WatchEvent::ListBegins);
        if is_waiting {
            watch.take(WatchEvent::Seen(waiting));
        }
        watch.take(WatchEvent::ListEnds);
        let message = || Message {
            term: 7,
            secret: "secret-1".to_owned(),
            to: Replica::identity("gpupack-1", 2),
            bindings: Vec::new(),
            holds: vec![HeldPod { uid: "u1".to_owned(), node: node.to_owned() }],
        };
        assert!(!take_message(&bed.app, message()), "its list began before");
        bed.list();
        assert!(take_message(&bed.app, message()));
        assert_eq!(bed.app.ledger.hold_count(), 0, "the leader has it");
        bed.takes_over();
        assert_eq!(bed.app.ledger.hold_count(), count, "{node} {is_waiting}");
        let held = bed.app.ledger.node("n1").unwrap().holds().len();
        assert_eq!(held, count);
    }
}
