//! *bind* over HTTP against the fake API server: the ledger after each fault.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use cli::serve::extender::settings;
use control::bind::settle::settle_abandoned;
use control::shared::app::App;
use engine::ledger::nodes::state::{Ledger, Settings};
use engine::model::reservation::ReservationState;
use http_body_util::BodyExt;
use kube_api::config::file::Config;
use kube_api::containers::mps::ClientLimits;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::Sink;
use kube_api::write::events::{NoticeWriter, notices};
use kube_api::write::target::BindTarget;
use runtime::clock::Clock;
use serde_json::{Value, json};
use server::api::server::router;
use server::page::service::Service;
use tower::ServiceExt;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::{HostAmount, MemMib, MilliCpu};

use crate::harness::fake_api_server::{Fake, Fault, TIMEOUT, connected};

pub(crate) struct Bed {
    pub(crate) app: Arc<App>,
    router: Router,
    /// The writer of events about pods; other tests have none.
    pub(crate) notices: Option<NoticeWriter>,
}

impl Bed {
    /// An extender on the fake API server, with node `n1` of one GPU; the fake's pod waits for half
    /// of one.
    pub(crate) async fn new(fake: &Fake) -> Self {
        let bed = Self::starting(fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
        bed.app.lead.set_fenced();
        bed.watch(fake);
        bed
    }

    /// The same before it is ready, when the watch has shown no pod.
    pub(crate) async fn starting(fake: &Fake, config: Config, annotations: Value) -> Self {
        let gpu = json!([{"id": "GPU-a", "index": 0, "model": "NVIDIA L4", "memoryMib": 23_034,
            "reservedMib": 0, "kind": "Gpu", "healthy": true}]);
        let made = Self::made(fake, (config, Clock::start()), annotations, &gpu).await;
        Self { notices: None, ..made }
    }

    /// The same with this clock.
    pub(crate) async fn with_clock(fake: &Fake, clock: Clock) -> Self {
        let gpu = json!([{"id": "GPU-a", "index": 0, "model": "NVIDIA L4", "memoryMib": 23_034,
             "reservedMib": 0, "kind": "Gpu", "healthy": true}]);
        let asks = json!({"gpu-fraction": "0.5"});
        let bed = Self::made(fake, (Config::default(), clock), asks, &gpu).await;
        bed.app.lead.set_fenced();
        Self { notices: None, ..bed }
    }

    /// The same as [`Bed::new`] with this configuration and these devices.
    pub(crate) async fn with(fake: &Fake, config: Config, inventory: &Value) -> Self {
        let asks = json!({"gpu-fraction": "0.5"});
        let bed = Self::made(fake, (config, Clock::start()), asks, inventory).await;
        bed.app.lead.set_fenced();
        bed.watch(fake);
        Self { notices: None, ..bed }
    }

    /// One whose events are still to be written, with this clock and these devices.
    pub(crate) async fn made(
        fake: &Fake,
        (config, clock): (Config, Clock),
        annotations: Value,
        inventory: &Value,
    ) -> Self {
        let stale_after = Duration::from_secs(3_600);
        let settings = Settings { stale_after, first_session: 1, ..settings(&config, &clock) };
        let (events, writer) = notices(fake.client(), "replica-0".to_owned(), 9, TIMEOUT);
        let ledger = Arc::new(Ledger::new(settings));
        ledger.share_by(config.pools.clone());
        let api = connected(fake.client(), TIMEOUT, clock);
        let app = Arc::new(App::new(ledger, config, api, events));
        let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(1 << 18) };
        app.ledger.see_node(&NodeName::new("n1"), host, PoolName::new(""));
        app.ledger.set_listed(app.clock.now());
        let set_log_level = Arc::new(|_: &str| Ok(()));
        let router = router(Service::new(Arc::clone(&app), set_log_level));
        let bed = Self { app, router, notices: Some(writer) };
        let uses: Vec<Value> = inventory.as_array().into_iter().flatten().map(|device| {
            json!({"id": device["id"], "usedMib": 0, "healthy": true, "processes": []})
        }).collect();
        let hello = json!({
            "apiVersion": "gpupack.dev/v1alpha1", "agent": "agent-of-n1", "sequence": 1,
            "inventory": inventory, "devices": uses,
        });
        bed.send("PUT", "/v1/nodes/n1/report", &hello).await;
        fake.bed(|bed| {
            let pod = bed.pod.as_mut().unwrap();
            pod.annotations.append(&mut serde_json::from_value(annotations).unwrap());
        });
        bed
    }

    /// The watch shows the fake's pod.
    pub(crate) fn watch(&self, fake: &Fake) {
        self.app.pod(&SeenPod::from_json(&pod_of(fake).to_string()).unwrap());
    }

    /// Calls *filter* for the fake's pod; returns the nodes that pass.
    pub(crate) async fn filter(&self, pod: &Value) -> Value {
        let body = json!({"Pod": pod, "Nodes": null, "NodeNames": ["n1"]});
        self.send("POST", "/v1/filter", &body).await["NodeNames"].take()
    }

    pub(crate) async fn send(&self, method: &str, path: &str, body: &Value) -> Value {
        serde_json::from_str(&self.called(method, path, body).await).unwrap()
    }

    pub(crate) async fn text(&self, path: &str) -> String {
        self.called("GET", path, &Value::Null).await
    }

    async fn called(&self, method: &str, path: &str, body: &Value) -> String {
        let request = Request::builder().method(method).uri(path);
        let request = request.header("content-type", "application/json");
        let request = request.body(Body::from(body.to_string())).unwrap();
        let answer = self.router.clone().oneshot(request).await.unwrap();
        assert!(answer.status().is_success(), "{path}: {}", answer.status());
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        String::from_utf8(body.to_vec()).unwrap()
    }

    /// Binds the pod to `n1`; the error, empty on success.
    pub(crate) async fn bind(&self) -> String {
        self.bind_to("n1").await
    }

    pub(crate) async fn bind_to(&self, node: &str) -> String {
        let body = json!({
            "PodName": "infer", "PodNamespace": "team-a", "PodUID": "u1", "Node": node,
        });
        let answer = self.send("POST", "/v1/bind", &body).await;
        answer["Error"].as_str().unwrap().to_owned()
    }

    pub(crate) fn state(&self) -> Option<ReservationState> {
        self.app.ledger.reservation(&PodUid::new("u1")).map(|held| held.state)
    }
}

pub(crate) fn node(fake: &Fake) -> Option<String> {
    fake.bed(|bed| bed.pod.as_ref().unwrap().node.clone())
}

/// The fake's pod, as the API server shows it.
pub(crate) fn pod_of(fake: &Fake) -> Value {
    fake.bed(|bed| {
        let pod = bed.pod.as_ref().unwrap();
        json!({
            "metadata": {"uid": pod.uid, "namespace": "team-a", "name": "infer",
                "resourceVersion": pod.version.to_string(), "annotations": pod.annotations},
            "spec": {"schedulerName": pod.scheduler, "containers": [{"name": "main"}],
                "schedulingGates": pod.gates.iter().map(|name| json!({"name": name})).collect::<Vec<_>>()},
        })
    })
}

/// Requests so far whose method and path contain `part`.
pub(crate) fn requests(fake: &Fake, part: &str) -> usize {
    fake.bed(|bed| bed.requests.iter().filter(|reported| reported.contains(part)).count())
}

#[tokio::test]
async fn two_calls_at_once_post_one_binding() {
    // The Binding of the first call is made, but its answer is lost; a second one would be refused.
    let fake = Fake::with_pod().on_bind(Fault::SilentAfterCommit).on_bind(Fault::Answer(403));
    let bed = Bed::new(&fake).await;
    let (first, second) = tokio::join!(bed.bind(), bed.bind());
    assert_eq!((first.as_str(), second.as_str()), ("", ""));
    assert_eq!((requests(&fake, "/binding"), node(&fake).as_deref()), (1, Some("n1")));
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
    assert_eq!(bed.bind().await, "", "a third finds it bound");
    bed.app.ledger.audit().unwrap();
}

#[tokio::test]
async fn a_later_call_first_settles_the_undecided_earlier_one() {
    // The Binding of the earlier call may still land; the next one is refused, and its room given back.
    let fake = Fake::with_pod().on_bind(Fault::Answer(403));
    let bed = Bed::new(&fake).await;
    let pod = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
    let query = bed.app.query(&pod).unwrap();
    let placement = bed.app.ledger.reserve(&pod.pod, "n1", &query, bed.app.clock.now()).unwrap();
    let target = BindTarget::new(&pod, &placement, &ClientLimits::default()).unwrap();
    let mut turn = bed.app.binding.binds.take(&pod.pod.uid).await;
    *turn.on_its_way = Some(target);
    drop(turn);
    assert!(bed.bind().await.contains("code 403"));
    let reported = fake.bed(|bed| bed.requests.clone());
    let first = |part: &str| reported.iter().position(|request| request.contains(part));
    assert!(first("PATCH").is_some() && first("PATCH") < first("/binding"), "{reported:?}");
    assert_eq!((bed.state(), node(&fake)), (None, None));
}

#[tokio::test]
async fn a_rejected_bind_frees_its_room() {
    let fake = Fake::with_pod().on_bind(Fault::Answer(403));
    let bed = Bed::new(&fake).await;
    assert!(bed.bind().await.contains("code 403"));
    assert_eq!((bed.state(), node(&fake)), (None, None));
    assert_eq!(bed.app.pods.edits.written_count(), 0, "nothing is written on it");
    assert_eq!(bed.bind().await, "");
    assert_eq!(bed.app.pods.edits.written_count(), 1);
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
}

#[tokio::test]
async fn an_undecided_bind_continues_after_its_caller_disconnects() {
    for fault in [Fault::SilentAfterCommit, Fault::LateAfterFence, Fault::Answer(503)] {
        let fake = Fake::with_pod().on_bind(fault);
        // The API server cannot be read while the caller waits.
        fake.bed(|bed| bed.on_read.extend([Fault::Answer(500); 1_000]));
        let bed = Bed::new(&fake).await;
        let hangs_up = Duration::from_millis(300);
        let answer = tokio::time::timeout(hangs_up, bed.bind()).await;
        assert!(answer.is_err(), "undecided is not an answer: {answer:?}");
        assert!(bed.app.binding.binds.abandoned().is_empty(), "it is seen to");
        settle_abandoned(&bed.app).await;
        assert!(matches!(bed.state(), Some(ReservationState::Assumed { .. })), "{fault:?}");
        fake.bed(|bed| bed.on_read.clear());
        assert_eq!(bed.bind().await, "", "the next call waits for it");
        assert_eq!(node(&fake).as_deref(), Some("n1"));
        assert_eq!(bed.state(), Some(ReservationState::Confirmed));
    }
}

#[tokio::test]
async fn a_pod_that_is_gone_before_its_binding_is_settled_may_have_run() {
    let fake = Fake::with_pod().on_bind(Fault::SilentAfterCommit);
    fake.bed(|bed| bed.on_read.extend([Fault::Answer(500); 1_000]));
    let bed = Bed::new(&fake).await;
    let call = tokio::time::timeout(Duration::from_millis(300), bed.bind()).await;
    assert!(call.is_err() && node(&fake).is_some(), "bound, and the answer is lost");
    fake.bed(|bed| {
        bed.pod = None; // deleted by force: its processes may still run
        bed.on_read.clear();
    });
    assert_ne!(bed.bind().await, "", "it waits until the first call has ended");
    assert!(matches!(bed.state(), Some(ReservationState::Draining { .. })), "{:?}", bed.state());
}

/// From 400 ms after a call on, the answer could come after kube-scheduler's timeout.
fn impatient() -> Config {
    let scheduler_timeout = TIMEOUT + Duration::from_millis(900);
    Config { api_timeout: TIMEOUT, scheduler_timeout, ..Config::default() }
}

#[tokio::test]
async fn no_binding_is_posted_after_the_caller_may_have_timed_out() {
    // Whether the first Binding landed is not known for half a second.
    let fake = Fake::with_pod().on_bind(Fault::Answer(503));
    fake.bed(|bed| bed.on_read.push_back(Fault::Answer(500)));
    let bed = Bed::starting(&fake, impatient(), json!({"gpu-fraction": "0.5"})).await;
    bed.app.lead.set_fenced();
    bed.watch(&fake);
    let (first, second) = tokio::join!(bed.bind(), bed.bind());
    for error in [first, second] {
        assert!(error.contains("before kube-scheduler gives up"), "{error}");
    }
    assert_eq!(requests(&fake, "/binding"), 1, "the second call waited too long for the first");
    assert_eq!((bed.state(), node(&fake)), (None, None), "the reservation is taken back");
    assert_eq!(bed.bind().await, "", "a new call has its own time");
}

#[tokio::test]
async fn binds_waiting_for_an_undecided_pod_displace_no_other_bind() {
    let fake = Fake::with_pod().on_bind(Fault::Answer(503));
    fake.bed(|bed| bed.on_read.extend([Fault::Answer(500); 1_000]));
    let bed = Bed::starting(&fake, impatient(), json!({"gpu-fraction": "0.5"})).await;
    bed.app.lead.set_fenced();
    bed.watch(&fake);
    let mut other = pod_of(&fake);
    other["metadata"]["uid"] = "u2".into();
    bed.app.pod(&SeenPod::from_json(&other.to_string()).unwrap());
    let hangs_up = Duration::from_millis(50);
    assert!(tokio::time::timeout(hangs_up, bed.bind()).await.is_err(), "it is undecided");
    let same_pod = futures::future::join_all((0..512).map(|_| bed.bind()));
    let another = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let body = json!({
            "PodName": "infer", "PodNamespace": "team-a", "PodUID": "u2", "Node": "n2",
        });
        bed.send("POST", "/v1/bind", &body).await["Error"].take()
    };
    let (errors, another) =
        tokio::time::timeout(Duration::from_secs(20), async { tokio::join!(same_pod, another) })
            .await
            .expect("no call takes longer than kube-scheduler waits");
    let another = another.as_str().unwrap();
    assert!(!another.is_empty() && !another.contains("too many binds"), "{another}");
    let too_many = errors.iter().filter(|error| error.contains("too many binds")).count();
    let too_late = errors.iter().filter(|error| error.contains("gives up")).count();
    assert_eq!((too_many, too_late), (510, 2));
    assert!(matches!(bed.state(), Some(ReservationState::Assumed { .. })));
}

#[tokio::test]
async fn abandoned_bindings_are_settled_in_parallel() {
    let fake = Fake::with_pod();
    let bed = Bed::new(&fake).await;
    let target = |uid: usize| {
        let mut pod = pod_of(&fake);
        pod["metadata"]["uid"] = format!("abandoned-{uid}").into();
        let pod = SeenPod::from_json(&pod.to_string()).unwrap();
        BindTarget::without_gpu(&pod, &NodeName::new("n1")).unwrap()
    };
    for uid in 0..32 {
        let target = target(uid);
        let mut turn = bed.app.binding.binds.take(target.uid()).await;
        *turn.on_its_way = Some(target);
    }
    fake.bed(|bed| bed.on_read.extend([Fault::SilentAfterCommit; 32]));
    let started = bed.app.clock.precise();
    settle_abandoned(&bed.app).await;
    let took = bed.app.clock.precise() - started;
    assert!(
        took < TIMEOUT * 20,
        "one after the other they would take {:?}: {took:?}",
        TIMEOUT * 32
    );
    assert_eq!(bed.app.binding.binds.abandoned().len(), 32, "none was settled");
    settle_abandoned(&bed.app).await;
    assert_eq!(bed.app.binding.binds.abandoned().len(), 0);
}

#[tokio::test]
async fn a_reservation_of_a_dead_bind_is_settled() {
    for is_bound in [false, true] {
        let fake = Fake::with_pod();
        let bed = Bed::new(&fake).await;
        let pod = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
        let query = bed.app.query(&pod).unwrap();
        bed.app.ledger.reserve(&pod.pod, "n1", &query, bed.app.clock.now()).unwrap();
        if is_bound {
            // What the task posted has landed, and the watch has not shown it.
            fake.bed(|bed| bed.bind(&other_binding(&bed.pod.as_ref().unwrap().uid)));
        } else {
            // It is still on its way.
            fake.bed(|bed| bed.after_fence.push(other_binding("u1")));
        }
        let turn = bed.app.binding.binds.take(&pod.pod.uid).await;
        settle_abandoned(&bed.app).await;
        assert!(matches!(bed.state(), Some(ReservationState::Assumed { .. })), "a bind goes on");
        drop(turn);
        settle_abandoned(&bed.app).await;
        let expected = is_bound.then_some(ReservationState::Confirmed);
        assert_eq!(bed.state(), expected);
        assert_eq!(node(&fake).is_some(), is_bound);
        let late = if is_bound { vec![] } else { vec![409] };
        assert_eq!(fake.bed(|bed| bed.late_answers.clone()), late, "it can no longer land");
        bed.app.ledger.audit().unwrap();
    }
}

/// A Binding of version 7 to the first half of the GPU of `n1`, as another process would post it.
pub(crate) fn other_binding(uid: &str) -> Value {
    let placement = json!({
        "v": 1, "devices": [{"id": "GPU-a", "mib": 11_517, "share": 500_000}], "isolation":"none",
    });
    json!({
        "metadata": {"uid": uid, "resourceVersion": "7", "annotations": {
            "placed.gpupack.dev/placement": placement.to_string(),
            "placed.gpupack.dev/devices": "runtime.nvidia.com/gpu=GPU-a",
        }},
        "target": {"name": "n1"},
    })
}

#[tokio::test]
async fn a_pod_without_a_gpu_is_bound_while_warming_up() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({})).await;
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    assert_eq!(bed.bind().await, "");
    assert_eq!(node(&fake).as_deref(), Some("n1"));
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
    assert_eq!(bed.bind().await, "gpupack is warming up");
}

#[tokio::test]
async fn a_pod_that_bind_finds_bound_is_taken_in_if_the_watch_has_shown_it() {
    // Another process bound it; this one was frozen, and its watch shows it with a gate.
    for (called_with, is_bound_there) in [("n1", true), ("n2", false)] {
        for is_shown in [true, false] {
            let fake = Fake::with_pod();
            let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
            bed.app.lead.set_fenced();
            if is_shown {
                fake.bed(|bed| bed.pod.as_mut().unwrap().gates = &["example.com/gate"]);
                bed.watch(&fake);
            }
            fake.bed(|bed| bed.bind(&other_binding("u1")));
            let error = bed.bind_to(called_with).await;
            assert_eq!(error.is_empty(), is_bound_there, "{called_with}: {error}");
            // Else it may have been deleted since it was read, and no event would show that again.
            let expected = is_shown.then_some(ReservationState::Confirmed);
            assert_eq!(bed.state(), expected, "{called_with}");
            assert_eq!(
                requests(&fake, "/binding") + requests(&fake, "PATCH"),
                0,
                "nothing is written"
            );
        }
    }
}

#[tokio::test]
async fn a_pod_being_bound_still_fits_where_its_room_is_held() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.6"})).await;
    bed.app.lead.set_fenced();
    bed.watch(&fake);
    let pod = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
    let query = bed.app.query(&pod).unwrap();
    bed.app.ledger.reserve(&pod.pod, "n1", &query, bed.app.clock.now()).unwrap();
    let mut larger = pod_of(&fake);
    larger["metadata"]["annotations"]["gpu-fraction"] = "0.9".into();
    assert_eq!(bed.filter(&larger).await, json!([]), "no room is held for that");
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    assert_eq!(bed.bind().await, "");
    let mut other = pod_of(&fake);
    other["metadata"]["uid"] = "u2".into();
    assert_eq!(bed.filter(&other).await, json!([]), "others do not");
}

#[tokio::test]
async fn only_gpupack_pods_are_bound_and_only_where_filter_passed_them() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
    bed.app.lead.set_fenced();
    let forged = pod_of(&fake);
    fake.bed(|bed| bed.pod.as_mut().unwrap().scheduler = "default-scheduler");
    assert_eq!(bed.filter(&forged).await, json!(["n1"]));
    let error = bed.bind().await;
    assert!(error.contains("scheduler `default-scheduler`"), "{error}");
    fake.bed(|bed| bed.pod.as_mut().unwrap().scheduler = "gpupack");
    let error = bed.bind_to("n2").await;
    assert!(error.starts_with("filter did not pass the pod on this node"), "{error}");
    assert_eq!(requests(&fake, "/binding"), 0);
    assert_eq!((bed.bind().await.as_str(), node(&fake).as_deref()), ("", Some("n1")));
}

#[tokio::test]
async fn room_is_held_only_for_pods_that_the_watch_shows() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.6"})).await;
    bed.app.lead.set_fenced();
    let real = pod_of(&fake);
    for number in 0..160 {
        let mut forged = real.clone();
        forged["metadata"]["uid"] = format!("made-up-{number}").into();
        assert_eq!(bed.filter(&forged).await, json!(["n1"]), "call {number}");
        let body = json!({"Pod": forged, "Nodes": null, "NodeNames": ["n1"]});
        bed.send("POST", "/v1/prioritize", &body).await;
    }
    assert_eq!(bed.app.ledger.hold_count(), 0);
    // kube-scheduler may see a pod before the watch does: room is held once that shows it.
    assert_eq!(bed.filter(&real).await, json!(["n1"]));
    assert_eq!(bed.app.ledger.hold_count(), 0);
    bed.watch(&fake);
    assert_eq!(bed.app.ledger.hold_count(), 1);
    let mut other = real.clone();
    other["metadata"]["uid"] = "u2".into();
    assert_eq!(bed.filter(&other).await, json!([]));
    assert_eq!(bed.filter(&real).await, json!(["n1"]), "its own room is no obstacle");
    assert_eq!(bed.app.ledger.hold_count(), 1, "held immediately now");
    // A call that contradicts an existing pod makes no hold and ends none.
    let mut larger = real.clone();
    larger["metadata"]["annotations"]["gpu-fraction"] = "1".into();
    bed.filter(&larger).await;
    assert_eq!(bed.app.ledger.hold_count(), 1);
}

/// The driver is given a limit of a GPU, in the form of the annotation that the hook's variable is filled
/// from; of a MIG instance it takes none.
#[tokio::test]
async fn the_limit_of_the_driver_is_written_for_gpus_and_never_for_instances() {
    let gpu = json!({"id": "GPU-a", "index": 0, "model": "NVIDIA A100-SXM4-40GB",
        "memoryMib": 40_960, "reservedMib": 0, "kind": "Gpu", "healthy": true});
    let mut parent = gpu.clone();
    parent["kind"] = "MigParent".into();
    let instance = json!({"id": "MIG-a", "index": 0, "model": "NVIDIA A100-SXM4-40GB",
        "memoryMib": 4_864, "reservedMib": 0, "kind": "MigInstance", "parentId": "GPU-a",
        "migProfile": "1g.5gb", "healthy": true});
    for (inventory, device, limit) in
        [(json!([gpu]), "GPU-a", Some("20480")), (json!([parent, instance]), "MIG-a", None)]
    {
        let config = "webhook: {memory_limit: driver}\npools: {'': {mig_instances: shared}}";
        let fake = Fake::with_pod();
        let bed = Bed::with(&fake, Config::from_yaml(config).unwrap(), &inventory).await;
        assert_eq!(bed.bind().await, "");
        let written = fake.bed(|bed| bed.pod.as_ref().unwrap().annotations.clone());
        let written = |key: &str| written.get(&format!("placed.gpupack.dev/{key}")).cloned();
        assert_eq!(written("uuids").as_deref(), Some(device));
        assert_eq!(written("driver-memory-limit").as_deref(), limit, "{device}");
    }
}

#[tokio::test]
async fn driver_and_mps_limit_a_pod_to_its_request_and_ignore_its_limit() {
    for (by, key, written) in
        [("driver", "driver-memory-limit", "11517"), ("mps", "mps-memory-limit", "0=11517M")]
    {
        let fake = Fake::with_pod();
        let config = Config::from_yaml(&format!("webhook: {{memory_limit: {by}}}")).unwrap();
        let asks = json!({"gpu-fraction": "0.5", "gpu-fraction.limit": "1"});
        let bed = Bed::starting(&fake, config, asks).await;
        bed.app.lead.set_fenced();
        bed.watch(&fake);
        assert_eq!(bed.bind().await, "");
        let all = fake.bed(|bed| bed.pod.as_ref().unwrap().annotations.clone());
        let limit = all.get(&format!("placed.gpupack.dev/{key}"));
        assert_eq!(limit.map(String::as_str), Some(written), "{by}");
    }
}
