//! *bind* over HTTP against the fake API server: what the books say after each fault.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use gpupack::cli::extender::settings;
use gpupack::clock::Clock;
use gpupack::cluster::events::notices;
use gpupack::cluster::pod::SeenPod;
use gpupack::cluster::watch::Sink;
use gpupack::config::Config;
use gpupack::extender::app::{App, ClusterTruth, Truth};
use gpupack::extender::bind::settle_abandoned;
use gpupack::extender::server::{Service, router};
use gpupack::ledger::books::{Ledger, Settings};
use gpupack::packing::device::{NodeName, PodUid, PoolName};
use gpupack::packing::reservation::ReservationState;
use gpupack::packing::units::{HostAmount, MemMib, MilliCpu};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::fake::{Fake, Fault, TIMEOUT};

pub(crate) struct Bed {
    pub(crate) app: Arc<App>,
    router: Router,
}

impl Bed {
    /// An extender on the fake API server, with node `n1` of one GPU; the fake's pod waits for half
    /// of one.
    pub(crate) async fn new(fake: &Fake) -> Self {
        let config = Config::default();
        let clock = Clock::start();
        let stale_after = Duration::from_secs(3_600);
        let settings = Settings { stale_after, first_session: 1, ..settings(&config, &clock) };
        let (events, _) = notices(fake.client(), "replica-0".to_owned(), 1, TIMEOUT);
        let truth = ClusterTruth { writer: fake.writer(), notices: events };
        let ledger = Arc::new(Ledger::new(settings));
        let truth = Truth::Cluster(Box::new(truth));
        let app = Arc::new(App::new(ledger, clock, config, truth));
        let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(1 << 18) };
        app.ledger.see_node(&NodeName::new("n1"), host, PoolName::new(""));
        app.ledger.set_listed(app.clock.now());
        app.set_fenced();
        let set_log_level = Arc::new(|_: &str| Ok(()));
        let bed = Self { router: router(Service { app: Arc::clone(&app), set_log_level }), app };
        let hello = json!({
            "schema_version": 1, "agent": "agent-of-n1", "sequence": 1,
            "inventory": [{"uuid": "GPU-a", "index": 0, "model": "NVIDIA L4", "memory_mib": 23_034,
                "reserved_mib": 0, "kind": "gpu", "healthy": true}],
            "devices": [{"uuid": "GPU-a", "used_mib": 0, "healthy": true, "processes": []}],
        });
        bed.send("PUT", "/v1/nodes/n1/report", &hello).await;
        let annotations = json!({"gpu-fraction": "0.5"});
        fake.world(|world| {
            let pod = world.pod.as_mut().unwrap();
            pod.annotations = serde_json::from_value(annotations.clone()).unwrap();
        });
        let pod = json!({
            "metadata": {"uid": "u1", "namespace": "team-a", "name": "infer",
                "resourceVersion": "7", "annotations": annotations},
            "spec": {"schedulerName": "gpupack", "containers": [{"name": "main"}]},
        });
        bed.app.pod(&SeenPod::from_json(&pod.to_string()).unwrap());
        bed
    }

    async fn send(&self, method: &str, path: &str, body: &Value) -> Value {
        let request = Request::builder().method(method).uri(path);
        let request = request.body(Body::from(body.to_string())).unwrap();
        let answer = self.router.clone().oneshot(request).await.unwrap();
        assert!(answer.status().is_success(), "{path}: {}", answer.status());
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        serde_json::from_slice(&body).unwrap()
    }

    /// Binds the pod to `n1`; the error, empty on success.
    pub(crate) async fn bind(&self) -> String {
        let body = json!({
            "PodName": "infer", "PodNamespace": "team-a", "PodUID": "u1", "Node": "n1",
        });
        let answer = self.send("POST", "/v1/bind", &body).await;
        answer["Error"].as_str().unwrap().to_owned()
    }

    fn state(&self) -> Option<ReservationState> {
        self.app.ledger.reservation(&PodUid::new("u1")).map(|held| held.state)
    }
}

fn node(fake: &Fake) -> Option<String> {
    fake.world(|world| world.pod.as_ref().unwrap().node.clone())
}

#[tokio::test]
async fn a_refused_bind_does_not_free_the_room_of_another_that_lands() {
    // The first Binding is made, but its answer is lost; the second is refused meanwhile.
    let fake = Fake::with_pod().on_bind(Fault::SilentAfterCommit).on_bind(Fault::Answer(403));
    let bed = Bed::new(&fake).await;
    let (first, second) = tokio::join!(bed.bind(), bed.bind());
    assert_eq!((first.as_str(), node(&fake).as_deref()), ("", Some("n1")));
    assert!(second.contains("code 403"), "{second}");
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
    assert_eq!(bed.bind().await, "", "a third finds it bound");
    bed.app.ledger.audit().unwrap();
}

#[tokio::test]
async fn a_refused_bind_takes_its_room_back() {
    let fake = Fake::with_pod().on_bind(Fault::Answer(403));
    let bed = Bed::new(&fake).await;
    assert!(bed.bind().await.contains("code 403"));
    assert_eq!((bed.state(), node(&fake)), (None, None));
    assert_eq!(bed.bind().await, "");
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
}

#[tokio::test]
async fn an_undecided_bind_goes_on_when_its_caller_hangs_up() {
    for fault in [Fault::SilentAfterCommit, Fault::LateAfterTouch, Fault::Answer(503)] {
        let fake = Fake::with_pod().on_bind(fault);
        // The API server cannot be read while the caller waits.
        fake.world(|world| world.on_read.extend([Fault::Answer(500); 1_000]));
        let bed = Bed::new(&fake).await;
        let hangs_up = Duration::from_millis(300);
        let answer = tokio::time::timeout(hangs_up, bed.bind()).await;
        assert!(answer.is_err(), "undecided is no answer: {answer:?}");
        assert!(bed.app.binds.abandoned().is_empty(), "it is seen to");
        settle_abandoned(&bed.app).await;
        assert!(matches!(bed.state(), Some(ReservationState::Assumed { .. })), "{fault:?}");
        fake.world(|world| world.on_read.clear());
        assert_eq!(bed.bind().await, "", "the next call waits for it");
        assert_eq!(node(&fake).as_deref(), Some("n1"));
        assert_eq!(bed.state(), Some(ReservationState::Confirmed));
    }
}
