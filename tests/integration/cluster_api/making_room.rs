//! Evictions for an important pod, in virtual time: what changes between the decision and the evictions.

use std::sync::Arc;

use cli::serve::extender::settings;
use control::loops;
use control::shared::app::App;
use engine::ledger::nodes::state::Ledger;
use engine::model::team::TeamShare;
use kube_api::config::file::Config;
use kube_api::config::pods::quota::SharesConfig;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::{PodWatch, Sink, WatchEvent};
use kube_api::request::placement::{FENCE, HOLD};
use runtime::clock::{Clock, SimulatedTime};
use serde_json::{Value, json};
use server::api::reports;
use server::scheduler::verbs;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::{HostAmount, MemMib, Share, Timestamp};

use crate::harness::steps::carry_out;

/// Longer than a process pauses that is not frozen, in ms.
const FROZEN_FOR: u64 = 4_000;

/// A pod. Without devices it waits.
fn pod(namespace: &str, name: &str, priority: i32, share: &str, device: Option<&str>) -> Value {
    let placement = device.map(|device| {
        json!({"v": 1, "isolation": "none",
            "devices": [{"id": device, "mib": 5_000, "share": 500_000}]})
        .to_string()
    });
    let mut annotations = json!({"gpu-fraction": share});
    if let Some(placement) = placement {
        annotations["placed.gpupack.dev/placement"] = placement.into();
    }
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"uid": name, "namespace": namespace, "name": name, "resourceVersion": "7",
            "annotations": annotations},
        "spec": {"schedulerName": "gpupack", "priority": priority, "containers": [{"name": "main"}],
            "nodeName": device.map(|_| "n1")},
        "status": {"phase": if device.is_some() { "Running" } else { "Pending" }}})
}

/// An extender of two nodes with a GPU each. One and a half GPUs are guaranteed to team `red`. It has half
/// of the first one, and a pod waits for all of it, for which one of each team has to go.
struct Bed {
    time: &'static SimulatedTime,
    now: u64,
    app: Arc<App>,
    _running: loops::RunningLoops,
    /// Whether another pod gets what is guaranteed to the team while the note of the room is written.
    has_rival: bool,
    /// Whether the process is frozen while the note of the room is written, and what another one does meanwhile.
    freezes: Option<Successor>,
    evicted: Vec<String>,
}

/// What a later process does while this one is frozen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Successor {
    None,
    Begins,
    Binds,
}

impl Bed {
    fn new(has_rival: bool) -> Self {
        let time: &'static SimulatedTime = Box::leak(Box::new(SimulatedTime::starting(1_000_000)));
        let (clock, mut config) = (Clock::simulated(time), Config::default());
        let guaranteed = Share::from_millionths(1_500_000);
        let share = TeamShare { guaranteed, at_most: None };
        config.shares = SharesConfig::of([("red".to_owned(), share)].into_iter());
        config.quota.reference = MemMib::new(10_000);
        let ledger = Arc::new(Ledger::new(settings(&config, &clock)));
        let app = Arc::new(App::alone(ledger, config, clock));
        let running = loops::start(&app);
        let bed = Self {
            time,
            now: 0,
            app,
            _running: running,
            has_rival,
            freezes: None,
            evicted: Vec::new(),
        };
        let nodes = ["n1", "n2"];
        for name in nodes {
            bed.app.ledger.see_node(&NodeName::new(name), HostAmount::ZERO, PoolName::new(""));
        }
        bed.app.ledger.set_listed(bed.app.clock.now());
        nodes.iter().for_each(|name| bed.report(name));
        let sink: Arc<dyn Sink> = bed.app.clone();
        let mut watch = PodWatch::new(Arc::clone(&bed.app.ledger), sink, clock);
        let pods = [
            pod("blue", "owed", 9, "0.5", Some("GPU-n1")),
            pod("red", "lesser", 0, "0.5", Some("GPU-n1")),
            pod("red", "important", 5, "1", None),
        ];
        watch.take(WatchEvent::ListBegins);
        for pod in &pods {
            watch.take(WatchEvent::Seen(SeenPod::from_json(&pod.to_string()).unwrap()));
        }
        watch.take(WatchEvent::ListEnds);
        bed.app.lead.set_fenced();
        let call = json!({"Pod": pods[2], "Nodes": null, "NodeNames": ["n1"]}).to_string();
        let answer: Value =
            serde_json::from_slice(&verbs::filter(&bed.app, call.as_bytes()).unwrap().0).unwrap();
        assert_eq!(answer["NodeNames"], json!([]), "{answer}");
        bed
    }

    fn report(&self, node: &str) {
        let id = format!("GPU-{node}");
        let report = json!({"apiVersion": "gpupack.dev/v1alpha1", "agent": "agent", "sequence": 1,
            "inventory": [{"id": id, "index": 0, "model": "NVIDIA L4", "memoryMib": 10_000,
                "reservedMib": 0, "kind": "Gpu", "healthy": true}],
            "devices": [{"id": id, "usedMib": 0, "healthy": true, "processes": []}]});
        let (status, _) = reports::answer(&self.app, node, report.to_string().as_bytes());
        assert!(status.is_success(), "{status}");
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
        }
    }

    fn answer(&mut self, request: &hyper::Request<Vec<u8>>) -> (u16, Value) {
        let path = request.uri().path();
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let important = || pod("red", "important", 5, "1", None);
        match request.method().as_str() {
            "POST" if path.ends_with("/eviction") => {
                if body["deleteOptions"]["dryRun"].is_null() {
                    self.evicted.push(body["metadata"]["name"].as_str().unwrap().to_owned());
                }
                (201, json!({"kind": "Status", "status": "Success", "code": 201}))
            }
            "PATCH" => {
                let note = body["metadata"]["annotations"][HOLD].as_str();
                let is_room = note.is_some_and(|note| note.contains("owed"));
                if is_room && std::mem::take(&mut self.has_rival) {
                    let rival = pod("red", "rival", 0, "0.5", None);
                    let rival = SeenPod::from_json(&rival.to_string()).unwrap();
                    let (query, now) = (self.app.query(&rival).unwrap(), self.app.clock.now());
                    self.app.ledger.reserve(&rival.pod, "n2", &query, now).unwrap();
                }
                if is_room && self.freezes.is_some() {
                    self.now += FROZEN_FOR;
                    self.time.set(Timestamp::from_millis(self.now));
                }
                (200, important())
            }
            "GET" if path.ends_with("/important") && self.freezes == Some(Successor::Binds) => {
                (200, pod("red", "important", 5, "1", Some("GPU-n1")))
            }
            "GET" if path.ends_with("/important") && self.freezes == Some(Successor::Begins) => {
                let mut fenced = important();
                fenced["metadata"]["annotations"][FENCE] = "ffffffffff-1 start".into();
                (200, fenced)
            }
            _ => (200, important()),
        }
    }
}

#[test]
fn none_is_evicted_for_a_pod_whose_team_lost_what_is_guaranteed_to_it_since_that_was_decided() {
    let important = PodUid::new("important");
    let mut bed = Bed::new(false);
    bed.pass(1_500);
    bed.evicted.sort();
    assert_eq!(bed.evicted, ["lesser", "owed"]);
    assert!(bed.app.room.preemptors.is_asked(&important));
    let mut bed = Bed::new(true);
    bed.pass(1_500);
    assert!(!bed.has_rival, "the note of the room was written");
    assert_eq!(bed.evicted, [""; 0]);
    assert!(!bed.app.room.preemptors.is_asked(&important), "no other room relies on it");
    bed.pass(10_000);
    assert_eq!(bed.evicted, [""; 0]);
}

#[test]
fn a_process_that_was_frozen_and_replaced_evicts_none() {
    for (successor, gone) in [
        (Successor::None, &["lesser", "owed"][..]),
        (Successor::Begins, &[]),
        (Successor::Binds, &[]),
    ] {
        let mut bed = Bed::new(false);
        bed.freezes = Some(successor);
        bed.pass(FROZEN_FOR + 1_000);
        bed.evicted.sort();
        assert_eq!(bed.evicted, gone, "{successor:?}");
        let is_bound = bed.app.ledger.reservation(&PodUid::new("important")).is_some();
        assert_eq!(is_bound, successor == Successor::Binds, "it was told so");
    }
}
