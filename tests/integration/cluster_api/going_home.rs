//! A guest on its way home, in virtual time: kubelet and the agent do what a test says.

use std::sync::Arc;
use std::time::Duration;

use cli::serve::extender::settings;
use control::loops;
use control::shared::app::App;
use engine::hardware::pool::{Borrow, PoolRule, PoolRules};
use engine::ledger::nodes::state::{Ledger, Settings};
use engine::model::reservation::Departure;
use kube_api::config::file::Config;
use kube_api::config::guard::GuardConfig;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::{PodWatch, Sink, WatchEvent};
use kube_api::request::placement::{FenceWriter, encode};
use kube_api::write::events::{NoticeReason, NoticeWriter, notices};
use kube_api::write::term::Term;
use kube_api::write::writer::ApiWriter;
use runtime::clock::{Clock, SimulatedTime};
use runtime::step::outside::Outside;
use serde_json::{Value, json};
use server::api::reports;
use server::views::explain::explain_named;
use server::views::viewer::Viewer;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::{HostAmount, MemMib, MilliCpu, Share, Timestamp};

use super::recalling::guest_placement;
use crate::harness::fake_api_server::{Fake, TIMEOUT};
use crate::harness::steps::carry_out;

/// What NVIDIA's runtime says of a device that the driver has lost.
const LOST: &str = "failed to get device handle from UUID: Not Found: unknown";

/// A pod that has half of GPU-a and runs on GPU-b.
fn guest() -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"uid": "guest", "namespace": "team-a", "name": "guest", "resourceVersion": "1",
            "annotations": {"gpu-fraction": "0.5", "gpu-fraction.limit": "1",
                "gpupack.dev/movable": "restart"}},
        "spec": {"schedulerName": "gpupack", "nodeName": "n1", "containers": [{"name": "main",
            "resources": {"requests": {"cpu": "100m"}},
            "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]}]},
    });
    for (key, value) in encode(&guest_placement(500_000)).unwrap() {
        pod["metadata"]["annotations"][key] = value.into();
    }
    pod
}

/// One process of gpupack with a node of two GPUs, and what is around it.
struct Bed {
    time: &'static SimulatedTime,
    now: u64,
    app: Arc<App>,
    watch: PodWatch,
    writer: NoticeWriter,
    fake: Fake,
    runtime: tokio::runtime::Runtime,
    _running: loops::RunningLoops,
    pod: Value,
    /// The GPU on which the agent sees a process of the pod; `None` for none.
    process_on: Option<&'static str>,
    reports: u64,
    /// Whether the agent reports.
    is_reporting: bool,
    /// MiB of GPU-a that a process of the host uses.
    used_by_host: u64,
    /// The container that the agent sees without the driver.
    blind: Option<String>,
    /// What the agent says of the GPUs.
    gpus: Gpus,
    resizes: usize,
    /// Whether they are refused, with how many requests there were in all.
    refuses_resizes: bool,
    requests: usize,
    /// How many evictions were requested.
    evictions: usize,
}

/// How the GPUs are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Gpus {
    Sound,
    /// GPU-b takes no pods.
    OtherIll,
    /// No GPU does.
    AllIll,
    /// GPU-b is not there.
    OtherGone,
}

impl Bed {
    fn new(pod: Value) -> Self {
        Self::lending(pod, Borrow::Compute)
    }

    fn lending(pod: Value, borrow: Borrow) -> Self {
        Self::with(pod, borrow, Config::default())
    }

    fn with(pod: Value, borrow: Borrow, config: Config) -> Self {
        let time: &'static SimulatedTime = Box::leak(Box::new(SimulatedTime::starting(1_000_000)));
        let clock = Clock::simulated(time);
        let lends = PoolRule { borrow, ..PoolRule::default() };
        let pools = PoolRules::new([(PoolName::new(""), lends)]);
        let config = Config { pools: pools.clone(), ..config };
        let term = Term::alone(clock, FenceWriter::random());
        let writer = ApiWriter::new(Outside::new(clock), config.api_timeout, term);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let fake = Fake::with_pod();
        let client = {
            let _entered = runtime.enter();
            fake.client()
        };
        let (events, queue) = notices(client, "replica-0".to_owned(), 99, TIMEOUT);
        let ledger =
            Arc::new(Ledger::new(Settings { first_session: 1, ..settings(&config, &clock) }));
        ledger.share_by(pools);
        let app = Arc::new(App::new(ledger, config, writer, events));
        let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(1 << 18) };
        app.ledger.see_node(&NodeName::new("n1"), host, PoolName::new(""));
        let sink: Arc<dyn Sink> = app.clone();
        let watch = PodWatch::new(Arc::clone(&app.ledger), sink, clock);
        let running = loops::start(&app);
        let mut bed = Self {
            time,
            now: 0,
            app,
            watch,
            writer: queue,
            fake,
            runtime,
            _running: running,
            pod,
            process_on: None,
            reports: 0,
            is_reporting: true,
            used_by_host: 0,
            gpus: Gpus::Sound,
            blind: None,
            resizes: 0,
            refuses_resizes: false,
            requests: 0,
            evictions: 0,
        };
        bed.watch.take(WatchEvent::ListBegins);
        bed.show();
        bed.watch.take(WatchEvent::ListEnds);
        bed.app.ledger.set_listed(bed.app.clock.now());
        bed.report();
        bed.app.lead.set_fenced();
        bed
    }

    /// The watch shows the pod as it is.
    fn show(&mut self) {
        let seen = SeenPod::from_json(&self.pod.to_string()).unwrap();
        self.watch.take(WatchEvent::Seen(seen));
    }

    fn report(&mut self) {
        self.reports += 1;
        let there = match self.gpus {
            Gpus::OtherGone => &["GPU-a"][..],
            Gpus::Sound | Gpus::OtherIll | Gpus::AllIll => &["GPU-a", "GPU-b"],
        };
        let is_ill = |id: &str| match self.gpus {
            Gpus::Sound | Gpus::OtherGone => false,
            Gpus::OtherIll => id == "GPU-b",
            Gpus::AllIll => true,
        };
        let uses = there.iter().map(|id| {
            let is_there = self.process_on == Some(id);
            let own = json!({"pid": 7, "podUid": "guest", "memoryMib": 100});
            let of_host = if *id == "GPU-a" { self.used_by_host } else { 0 };
            let other = json!({"pid": 9, "memoryMib": of_host});
            let processes = is_there.then_some(own).into_iter();
            let processes = processes.chain((of_host > 0).then_some(other));
            json!({"id": id, "usedMib": of_host + if is_there { 100 } else { 0 },
                "healthy": !is_ill(id), "processes": processes.collect::<Vec<_>>()})
        });
        let gpu = |(at, id): (usize, &&str)| {
            json!({"id": id, "index": at, "model": "NVIDIA L4", "memoryMib": 23_000,
                "reservedMib": 0, "kind": "Gpu", "healthy": true})
        };
        let mut report = json!({"apiVersion": "gpupack.dev/v1alpha1", "agent": "agent",
            "sequence": self.reports, "devices": uses.collect::<Vec<_>>()});
        report["inventory"] = there.iter().enumerate().map(gpu).collect();
        if let Some(id) = &self.blind {
            report["containers"] = json!([{"podUid": "guest", "id": id, "hasDriver": false}]);
        }
        if self.reports > 1 {
            report["session"] = 1.into();
        }
        let (status, body) = reports::answer(&self.app, "n1", report.to_string().as_bytes());
        assert!(status.is_success(), "{status}: {}", String::from_utf8_lossy(&body));
    }

    /// Lets time pass in steps of 50 ms, with a report in each second.
    fn pass(&mut self, seconds: u64) {
        let until = self.now + 1_000 * seconds;
        while self.now < until {
            self.now += 50;
            let now = Timestamp::from_millis(self.now);
            self.time.set(now);
            let app = Arc::clone(&self.app);
            carry_out(&app, now, |request| self.answer(request));
            if self.is_reporting && self.now.is_multiple_of(1_000) {
                self.report();
            }
        }
    }

    /// The API server: it keeps the pod, and the watch shows each change.
    fn answer(&mut self, request: &hyper::Request<Vec<u8>>) -> (u16, Value) {
        let path = request.uri().path();
        self.requests += 1;
        self.evictions += usize::from(path.ends_with("/eviction"));
        if self.refuses_resizes && path.ends_with("/resize") {
            return (403, json!({"kind": "Status", "status": "Failure", "code": 403}));
        }
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        if !path.contains("/pods/guest") {
            return (404, json!({}));
        }
        if request.method().as_str() == "PATCH" {
            let metadata = &mut self.pod["metadata"];
            if body["metadata"]["resourceVersion"] != metadata["resourceVersion"] {
                return (409, json!({"kind": "Status", "status": "Failure", "code": 409}));
            }
            let written = body["metadata"]["annotations"].as_object().cloned();
            for (key, value) in written.into_iter().flatten() {
                metadata["annotations"][key] = value;
            }
            let version: u64 = metadata["resourceVersion"].as_str().unwrap().parse().unwrap();
            metadata["resourceVersion"] = (version + 1).to_string().into();
            if path.ends_with("/resize") {
                self.resizes += 1;
                let resources = &body["spec"]["containers"][0]["resources"];
                self.pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] =
                    resources["requests"]["cpu"].clone();
            }
            self.show();
        }
        (200, self.pod.clone())
    }

    /// Kubelet's status of the container: it has carried out the CPU request that the pod has.
    fn status(&mut self, id: &str, state: Value) {
        let requests = self.pod["spec"]["containers"][0]["resources"]["requests"].clone();
        self.pod["status"] = json!({"phase": "Running", "containerStatuses": [{"name": "main",
            "image": "", "imageID": "", "ready": false, "restartCount": 1, "containerID": id,
            "state": state, "resources": {"requests": requests}}]});
        self.show();
    }

    /// The runtime refuses to start the container.
    fn refuse(&mut self) {
        let waiting = json!({"reason": "RunContainerError", "message": LOST});
        self.status("containerd://1", json!({"waiting": waiting}));
    }

    fn run(&mut self, id: &str, on: &'static str) {
        self.process_on = Some(on);
        self.status(id, json!({"running": {}}));
    }

    fn departure(&self) -> Departure {
        self.app.ledger.reservation(&PodUid::new("guest")).unwrap().departure
    }

    /// Where its next container starts, as the annotation says.
    fn starts_on(&self) -> Value {
        self.pod["metadata"]["annotations"]["placed.gpupack.dev/uuids"].clone()
    }

    /// Calls it home because another pod needs the room.
    fn need_room(&self) {
        let other = json!({"metadata": {"uid": "train", "namespace": "team-a", "name": "train",
                "resourceVersion": "7", "annotations": {"gpu-fraction": "1"}},
            "spec": {"schedulerName": "gpupack", "containers": [{"name": "main"}]}});
        let other = SeenPod::from_json(&other.to_string()).unwrap();
        let query = self.app.query(&other).unwrap();
        self.app.ledger.reserve(&other.pod, "n1", &query, self.app.clock.now()).unwrap();
    }

    /// The events that were written, as reason and note.
    fn told(self) -> Vec<(String, String)> {
        self.app.ledger.audit().unwrap();
        let running = tokio::time::timeout;
        self.runtime.block_on(async {
            let _ended = running(Duration::from_millis(300), self.writer.run()).await;
        });
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let events = self.fake.bed(|bed| std::mem::take(&mut bed.events));
        events.iter().map(|it| (text(&it["reason"]), text(&it["note"]))).collect()
    }
}

/// How often a reason is told.
fn count(told: &[(String, String)], reason: &str) -> usize {
    told.iter().filter(|(it, _)| it == reason).count()
}

#[test]
fn a_guest_that_cannot_start_where_it_is_one_is_sent_home_once() {
    // The second process of gpupack has seen nothing of what came before.
    for is_started_again in [false, true] {
        let mut bed = Bed::new(guest());
        bed.refuse();
        if is_started_again {
            bed = Bed::new(bed.pod);
        }
        assert_eq!(bed.starts_on(), "GPU-b");
        bed.pass(2);
        assert_eq!((bed.starts_on(), bed.resizes), (json!("GPU-a"), 1));
        bed.refuse(); // kubelet has not tried again yet
        bed.pass(5);
        assert_eq!(bed.departure(), Departure::Gone);
        bed.refuse(); // at home, too
        let written = bed.pod["metadata"]["resourceVersion"].clone();
        bed.pass(60);
        assert_eq!(bed.pod["metadata"]["resourceVersion"], written, "nothing is written any more");
        let told = bed.told();
        let moved: Vec<_> = told.iter().filter(|(reason, _)| reason == "GpuMoved").collect();
        assert_eq!(moved.len(), 1, "{told:?}");
        assert!(moved[0].1.contains("its container could not be started there"), "{moved:?}");
        assert!(count(&told, "GpuStartFailed") >= 1 && count(&told, "GpuMoveFailed") == 0);
    }
}

#[test]
fn a_container_without_its_gpu_is_restarted_where_its_pod_allows_it_and_not_for_ever() {
    for (movable, most) in [("restart", 3), ("never", 0)] {
        let mut pod = guest();
        pod["metadata"]["annotations"]["gpupack.dev/movable"] = movable.into();
        let mut bed = Bed::new(pod);
        for (start, first) in (1..).zip(["a", "b", "c", "d"]) {
            let id = format!("{first}{}", "0".repeat(63));
            bed.status(&format!("containerd://{id}"), json!({"running": {}}));
            bed.blind = Some(id);
            bed.pass(10);
            assert_eq!(bed.resizes, most.min(start), "{movable}, start {start}");
        }
        let told = bed.told();
        assert!(count(&told, "GpuStartFailed") > 0, "{told:?}");
        assert_eq!(count(&told, "GpuMoveFailed"), 0, "{told:?}");
    }
}

#[test]
fn a_guest_that_starts_after_all_stays_and_without_reports_none_is_moved() {
    let mut bed = Bed::new(guest());
    bed.is_reporting = false;
    bed.pass(20);
    bed.refuse();
    bed.pass(20);
    assert_eq!((bed.departure(), bed.starts_on()), (Departure::Recalled, json!("GPU-b")));
    bed.run("containerd://2", "GPU-b");
    bed.pass(5);
    assert_eq!((bed.departure(), bed.starts_on()), (Departure::Stays, json!("GPU-b")));
    bed.is_reporting = true;
    bed.pass(20);
    assert_eq!((bed.departure(), bed.resizes), (Departure::Stays, 0));
}

#[test]
fn a_guest_counts_on_both_gpus_after_a_minute_in_which_kubelet_shows_no_sign_of_its_resize() {
    let mut bed = Bed::new(guest());
    bed.run("containerd://1", "GPU-b");
    bed.need_room();
    bed.pass(2);
    assert_eq!((bed.starts_on(), bed.resizes), (json!("GPU-a"), 1));
    bed.pass(57);
    assert_eq!(bed.departure(), Departure::Recalled);
    bed.pass(5);
    assert_eq!((bed.departure(), bed.resizes), (Departure::Settling, 1));
    let node = bed.app.ledger.node("n1").unwrap();
    let uid = PodUid::new("guest");
    assert!(node.devices().iter().all(|device| device.tenants().contains_key(&uid)));
    assert_eq!(bed.starts_on(), "GPU-a", "a late kubelet still moves it");
    bed.run("containerd://2", "GPU-a");
    bed.pass(12);
    assert_eq!(bed.departure(), Departure::Gone);
    let told = bed.told();
    let fails: Vec<_> = told.iter().filter(|(reason, _)| reason == "GpuMoveFailed").collect();
    assert_eq!(fails.len(), 1, "{told:?}");
    assert!(fails[0].1.contains("did not carry out its resize within 60 s"), "{fails:?}");
}

/// Its container does not end at all, or the next one was started where the one before ran.
#[test]
fn a_process_that_is_left_where_a_pod_was_a_guest_is_told_once() {
    for reports in [true, false] {
        let mut bed = Bed::new(guest());
        bed.run("containerd://1", "GPU-b");
        bed.need_room();
        bed.pass(2);
        assert_eq!((bed.starts_on(), bed.resizes), (json!("GPU-a"), 1));
        bed.run("containerd://2", "GPU-b");
        bed.is_reporting = reports;
        bed.pass(29);
        let uid = PodUid::new("guest");
        assert!(matches!(bed.departure(), Departure::Restarted { .. }), "{:?}", bed.departure());
        let is_told = |bed: &Bed| !bed.app.is_due(&uid, NoticeReason::GpuMoveFailed);
        assert!(!is_told(&bed));
        bed.pass(3);
        assert_eq!(is_told(&bed), reports, "without lists nothing is seen");
        bed.pass(120);
        bed.is_reporting = true;
        bed.run("containerd://3", "GPU-a");
        bed.pass(5);
        assert_eq!((bed.departure(), bed.resizes), (Departure::Gone, 1));
        let told = bed.told();
        assert_eq!(count(&told, "GpuMoveFailed"), usize::from(reports), "{told:?}");
    }
}

#[test]
fn a_later_process_tells_of_a_process_that_is_left_as_well() {
    let mut bed = Bed::new(guest());
    bed.run("containerd://1", "GPU-b");
    bed.need_room();
    bed.pass(2);
    bed.run("containerd://2", "GPU-b");
    let mut later = Bed::new(bed.pod);
    later.process_on = Some("GPU-b");
    later.pass(5);
    assert!(matches!(later.departure(), Departure::Restarted { .. }), "{:?}", later.departure());
    later.pass(90);
    let told = later.told();
    assert_eq!(count(&told, "GpuMoveFailed"), 1, "{told:?}");
}

#[test]
fn a_guest_that_runs_stays_when_another_of_its_containers_fails() {
    let mut bed = Bed::new(guest());
    bed.refuse();
    bed.run("containerd://2", "GPU-b");
    let waiting = json!({"reason": "RunContainerError", "message": LOST});
    let beside = json!({"name": "beside", "image": "", "imageID": "", "ready": false, "restartCount": 1,
        "state": {"waiting": waiting}});
    bed.pod["status"]["containerStatuses"].as_array_mut().unwrap().push(beside);
    bed.show();
    assert!(bed.app.pods.start_failures.contains_key(&PodUid::new("guest")));
    bed.pass(20);
    assert_eq!((bed.departure(), bed.resizes), (Departure::Stays, 0));
}

#[test]
fn a_guest_goes_home_from_a_gpu_that_vanishes_or_takes_no_pods_any_more() {
    for gpus in [Gpus::OtherIll, Gpus::OtherGone] {
        let mut bed = Bed::new(guest());
        bed.run("containerd://1", "GPU-b");
        bed.pass(3);
        assert_eq!((bed.departure(), bed.resizes), (Departure::Stays, 0), "{gpus:?}");
        bed.gpus = gpus;
        if gpus == Gpus::OtherIll {
            bed.pass(55); // one read that fails is no reason
            assert_eq!((bed.departure(), bed.resizes), (Departure::Stays, 0));
            bed.pass(7);
        }
        bed.pass(3);
        assert_eq!((bed.starts_on(), bed.resizes), (json!("GPU-a"), 1), "{gpus:?}");
        bed.run("containerd://2", "GPU-a");
        bed.pass(5);
        assert_eq!(bed.departure(), Departure::Gone, "{gpus:?}");
        // The GPU is back: nothing more is done.
        bed.gpus = Gpus::Sound;
        bed.pass(20);
        assert_eq!((bed.starts_on(), bed.resizes), (json!("GPU-a"), 1), "{gpus:?}");
        let told = bed.told();
        let notes = |reason: &str| -> Vec<&str> {
            told.iter().filter(|(it, _)| it == reason).map(|(_, note)| note.as_str()).collect()
        };
        let [moved] = notes("GpuMoved")[..] else { panic!("{told:?}") };
        assert!(moved.contains("because that device is gone or ill"), "{moved}");
        let [lost] = notes("DeviceLost")[..] else { panic!("{told:?}") };
        let (what, when) = match gpus {
            Gpus::OtherIll => ("is ill", " and this lasts for a minute"),
            _ => ("has vanished", ""),
        };
        let note = format!(
            "the device GPU-b on node n1, where it runs as a guest, {what}: its container is restarted on its own one, \
             GPU-a, if that one is sound{when}"
        );
        assert_eq!(lost, note);
    }
}

#[test]
fn a_guest_whose_own_gpu_takes_no_pods_either_stays() {
    let mut bed = Bed::new(guest());
    bed.run("containerd://1", "GPU-b");
    bed.gpus = Gpus::AllIll;
    bed.pass(100);
    assert_eq!((bed.departure(), bed.resizes), (Departure::Stays, 0));
}

#[test]
fn a_guest_that_cannot_stay_waits_for_memory_at_home_and_says_so() {
    for gpus in [Gpus::Sound, Gpus::OtherGone] {
        let mut bed = Bed::lending(guest(), Borrow::Memory { most: Share::WHOLE });
        bed.used_by_host = 20_000;
        bed.pass(3);
        bed.gpus = gpus;
        bed.refuse();
        bed.pass(20);
        assert_eq!((bed.departure(), bed.resizes), (Departure::Recalled, 0), "{gpus:?}");
        bed.used_by_host = 0;
        bed.pass(3);
        assert_eq!((bed.starts_on(), bed.resizes), (json!("GPU-a"), 1), "{gpus:?}");
        let told = bed.told();
        assert_eq!(count(&told, "GpuMoveFailed"), 1, "{told:?}");
        assert!(told.iter().any(|(_, note)| note.contains("no longer use memory of its own GPU")));
    }
}

#[test]
fn a_guest_of_a_lost_gpu_that_cannot_be_moved_is_tried_again_and_again() {
    for gpus in [Gpus::OtherGone, Gpus::OtherIll] {
        let mut bed = Bed::new(guest());
        bed.run("containerd://1", "GPU-b");
        bed.refuses_resizes = true;
        bed.gpus = gpus;
        bed.pass(240);
        assert_eq!((bed.departure(), bed.starts_on()), (Departure::Recalled, json!("GPU-b")));
        assert!((6..160).contains(&bed.requests), "{gpus:?}: {}", bed.requests);
        let explained = explain_named(&bed.app, "team-a", "guest", &Viewer::All).unwrap();
        let is_missing = explained.verdict.contains("where it runs as a guest, is not there");
        assert_eq!(is_missing, gpus == Gpus::OtherGone, "{}", explained.verdict);
        bed.refuses_resizes = false;
        bed.pass(70);
        assert_eq!((bed.starts_on(), bed.resizes), (json!("GPU-a"), 1), "{gpus:?}");
        let told = bed.told();
        let fails = told.iter().filter(|(reason, _)| reason == "GpuMoveFailed");
        let fails: Vec<_> = fails.map(|(_, note)| note).collect();
        assert!((2..8).contains(&fails.len()), "{fails:?}");
        assert!(fails[0].contains("delete it to get another place"), "{fails:?}");
    }
}

/// The version before moved pods that used no GPU. It may have ended right after its first write: the pod still runs at
/// home, and what is written says that it is a guest. So it goes home like any other.
#[test]
fn a_pod_that_the_version_before_let_start_elsewhere_goes_home_when_its_room_is_needed() {
    for has_moved in [false, true] {
        let mut pod = guest();
        pod["metadata"]["annotations"]["placed.gpupack.dev/fence"] = "1-7 placement".into();
        let mut bed = Bed::new(pod);
        bed.run("containerd://1", if has_moved { "GPU-b" } else { "GPU-a" });
        bed.pass(20);
        let uid = PodUid::new("guest");
        let placement = guest_placement(500_000);
        assert_eq!(bed.app.ledger.reservation(&uid).unwrap().placement, placement, "it stays");
        assert_eq!((bed.departure(), bed.resizes), (Departure::Stays, 0));
        bed.need_room();
        bed.pass(2);
        assert_eq!((bed.starts_on(), bed.resizes), (json!("GPU-a"), 1), "{has_moved}");
        bed.run("containerd://2", "GPU-a");
        bed.pass(5);
        assert_eq!(bed.departure(), Departure::Gone);
        let told = bed.told();
        assert_eq!((count(&told, "GpuMoved"), count(&told, "GpuMoveFailed")), (1, 0), "{told:?}");
    }
}

/// The same, and it cannot be moved: it may run on either GPU, so no other pod gets one of them. One that this version
/// let start there is allocated that GPU alone.
#[test]
fn a_pod_that_the_version_before_let_start_elsewhere_counts_on_both_gpus_if_it_cannot_be_moved() {
    for (fence, used_by_host, counts_on_both) in [
        ("1-7 placement", 0, true),
        ("1-7 placement", 20_000, true),
        ("1-7 placed", 0, false),
        ("1-7 bind", 20_000, false),
    ] {
        let mut pod = guest();
        pod["metadata"]["annotations"]["placed.gpupack.dev/fence"] = fence.into();
        let config = Config { recall: Duration::from_secs(1), ..Config::default() };
        let mut bed = Bed::with(pod, Borrow::Memory { most: Share::WHOLE }, config);
        bed.run("containerd://1", if counts_on_both { "GPU-a" } else { "GPU-b" });
        (bed.refuses_resizes, bed.used_by_host) = (true, used_by_host);
        bed.pass(3);
        bed.need_room();
        bed.pass(30); // its bind gives up soon
        let held = bed.app.ledger.reservation(&PodUid::new("guest")).unwrap();
        assert_eq!(held.placement.guest.is_some(), counts_on_both, "{fence}: {held:?}");
        assert_eq!(held.has_both(), counts_on_both, "{fence}: {held:?}");
        let home = held.placement.devices[0].id.to_string();
        assert_eq!(home, if counts_on_both { "GPU-a" } else { "GPU-b" });
        if counts_on_both && used_by_host == 0 {
            bed.refuses_resizes = false;
            bed.pass(10);
            assert_eq!((bed.starts_on(), bed.resizes), (json!("GPU-a"), 1), "it goes home later");
        }
        bed.app.ledger.audit().unwrap();
    }
}

/// The watch of a process that takes over from the version before may be late: the pod seems to use a GPU on which it
/// has nothing.
#[test]
fn a_pod_that_the_version_before_let_start_elsewhere_is_not_evicted_before_the_watch_shows_that() {
    for was_moved in [true, false] {
        let mut pod = guest();
        let moved = pod["metadata"]["annotations"].clone();
        for (key, value) in encode(&guest_placement(500_000).at_home()).unwrap() {
            pod["metadata"]["annotations"][key] = value.into();
        }
        let tolerance = MemMib::ZERO;
        let guard = GuardConfig { evict: true, tolerance };
        let config = Config { guard, ..Config::default() };
        let mut bed = Bed::with(pod, Borrow::Compute, config);
        if was_moved {
            bed.pod["metadata"]["annotations"] = moved;
            bed.pod["metadata"]["annotations"]["placed.gpupack.dev/fence"] = "1-7 placement".into();
        }
        bed.process_on = Some("GPU-b");
        bed.pass(60);
        assert_eq!(bed.evictions > 0, !was_moved);
        if was_moved {
            bed.show();
            let on = bed.app.ledger.reservation(&PodUid::new("guest")).unwrap();
            assert_eq!(on.guest_on().map(ToString::to_string), Some("GPU-b".to_owned()));
        }
    }
}
