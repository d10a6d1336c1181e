//! Two processes of gpupack that overlap: what an old one may still do, and what a new one must know.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use control::shared::other_fences::GONE_AFTER;
use engine::ledger::query::reading::Readiness;
use engine::model::event::LedgerEvent;
use engine::model::reservation::ReservationState;
use kube_api::config::file::Config;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::Sink;
use runtime::clock::Clock;
use serde_json::{Map, json};
use server::api::background;
use tokio::sync::watch;
use wire::ids::NodeName;
use wire::units::Timestamp;

use super::binding::{Bed, node, other_binding, pod_of, requests};
use crate::harness::fake_api_server::{Fake, Fault};

const FENCE: &str = "placed.gpupack.dev/fence";

/// Fences of processes that started long before and after the one of the test.
const EARLIER: &str = "1-1 start-1";
const LATER: &str = "ffffffffff-1 start-1";

async fn ready(fake: &Fake) -> Bed {
    let bed = Bed::starting(fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
    bed.app.lead.set_fenced();
    bed.watch(fake);
    bed
}

#[tokio::test]
async fn a_stopping_process_posts_no_binding() {
    let fake = Fake::with_pod();
    let bed = ready(&fake).await;
    bed.app.lead.set_stopping();
    assert_eq!(bed.bind().await, "gpupack is stopping");
    assert_eq!((requests(&fake, "/binding"), bed.state()), (0, None));
    // In the middle of a bind: the first Binding did not land.
    let fake = Fake::with_pod().on_bind(Fault::Answer(503));
    fake.bed(|bed| bed.on_read.push_back(Fault::Answer(500)));
    let bed = ready(&fake).await;
    let stop = async {
        while requests(&fake, "/binding") == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        bed.app.lead.set_stopping();
    };
    let (error, ()) = tokio::join!(bed.bind(), stop);
    assert_eq!(error, "gpupack is stopping");
    assert_eq!((requests(&fake, "/binding"), bed.state()), (1, None), "it is taken back");
    assert_eq!(node(&fake), None);
}

#[tokio::test]
async fn an_undecided_bind_does_not_delay_shutdown() {
    let fake = Fake::with_pod().on_bind(Fault::Answer(503));
    fake.bed(|bed| bed.on_read.extend([Fault::Answer(500); 1_000]));
    let bed = ready(&fake).await;
    let stop = async {
        while requests(&fake, "GET") == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        bed.app.lead.set_stopping();
        bed.app.clock.precise()
    };
    let answer = async {
        let error = tokio::time::timeout(Duration::from_secs(10), bed.bind()).await;
        (error, bed.app.clock.precise())
    };
    let ((error, answered), stopped) = tokio::join!(answer, stop);
    assert_eq!(error.unwrap(), "the API server does not answer whether the pod is bound");
    let took = answered - stopped;
    assert!(took < Duration::from_millis(1_500), "{took:?}");
    assert_eq!(requests(&fake, "/binding"), 1);
    assert!(matches!(bed.state(), Some(ReservationState::Assumed { .. })), "its room is kept");
}

#[tokio::test]
async fn a_version_fenced_by_another_process_is_not_adopted() {
    for fence in [EARLIER, LATER, "requeue-1-2"] {
        let fake = Fake::with_pod().on_bind(Fault::FencedBefore(fence));
        let bed = ready(&fake).await;
        assert_eq!(bed.bind().await, "another gpupack process is responsible for the pod");
        assert_eq!((requests(&fake, "/binding"), node(&fake)), (1, None), "{fence}");
        assert_eq!(bed.state(), None, "{fence}");
    }
    // A version that somebody else wrote is.
    let fake = Fake::with_pod().on_bind(Fault::WrittenBefore);
    let bed = ready(&fake).await;
    assert_eq!((bed.bind().await.as_str(), node(&fake).as_deref()), ("", Some("n1")));
}

#[tokio::test]
async fn a_pod_of_an_earlier_process_is_fenced_before_it_is_bound() {
    for fence in [EARLIER, "requeue-1-2"] {
        let fake = Fake::with_pod();
        fake.bed(|bed| {
            bed.pod.as_mut().unwrap().annotations.insert(FENCE.to_owned(), fence.to_owned());
        });
        let bed = ready(&fake).await;
        // The watch is behind: the pod was written again.
        fake.bed(|bed| bed.pod.as_mut().unwrap().version += 1);
        assert_eq!((bed.bind().await.as_str(), node(&fake).as_deref()), ("", Some("n1")));
        let reported = fake.bed(|bed| bed.requests.clone());
        let first = |part: &str| reported.iter().position(|request| request.contains(part));
        assert!(first("PATCH") < first("/binding"), "{reported:?}");
        assert_eq!(requests(&fake, "/binding"), 1, "{reported:?}");
    }
}

#[tokio::test]
async fn a_pod_that_an_earlier_process_has_bound_to_the_node_is_bound() {
    let fake = Fake::with_pod();
    let bed = ready(&fake).await;
    fake.bed(|bed| assert_eq!(bed.bind(&other_binding("u1")).0, 201));
    assert_eq!(bed.bind().await, "", "kube-scheduler would write an error on a pod that runs");
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
}

#[tokio::test]
async fn a_pod_of_a_later_process_is_left_alone() {
    let fake = Fake::with_pod();
    fake.bed(|bed| {
        bed.pod.as_mut().unwrap().annotations.insert(FENCE.to_owned(), LATER.to_owned());
    });
    let bed = ready(&fake).await;
    assert_eq!(bed.bind().await, "another gpupack process is responsible for the pod");
    assert_eq!((requests(&fake, "/binding"), requests(&fake, "PATCH")), (0, 0));
    assert_eq!(bed.state(), None);
}

#[tokio::test]
async fn a_pod_of_a_later_ended_process_is_taken_over() {
    for fenced_again in [None, Some("ffffffffff-1 requeue-2")] {
        let fake = Fake::with_pod();
        let set_fence = |value: &str| {
            fake.bed(|bed| {
                let pod = bed.pod.as_mut().unwrap();
                pod.annotations.insert(FENCE.to_owned(), value.to_owned());
                pod.version += 1;
            });
        };
        set_fence(LATER);
        let clock = Clock::started_ago(GONE_AFTER);
        let bed = Bed::with_clock(&fake, clock).await;
        let shown = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
        bed.app.binding.other_fences.see(&shown.pod.uid, shown.fence.digest, Timestamp::START);
        fenced_again.into_iter().for_each(set_fence);
        bed.watch(&fake);
        let error = bed.bind().await;
        if fenced_again.is_some() {
            assert_eq!(error, "another gpupack process is responsible for the pod");
            assert_eq!((requests(&fake, "/binding"), requests(&fake, "PATCH")), (0, 0));
            assert_eq!(bed.app.entries()["fences of other processes"], 1);
        } else {
            assert_eq!((error.as_str(), node(&fake).as_deref()), ("", Some("n1")));
            let reported = fake.bed(|bed| bed.requests.clone());
            let first = |part: &str| reported.iter().position(|request| request.contains(part));
            assert!(first("PATCH") < first("/binding"), "it is fenced first: {reported:?}");
        }
        bed.app.pod_ended(&shown.pod.uid);
        assert_eq!(bed.app.entries()["fences of other processes"], 0);
    }
}

#[tokio::test]
async fn a_requeue_does_not_overwrite_the_fence_of_a_later_process() {
    for (fault, is_ours) in [(Fault::FencedBefore(LATER), false), (Fault::WrittenBefore, true)] {
        let fake = Fake::with_pod();
        let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
        bed.watch(&fake);
        let (stop, stopped) = watch::channel(false);
        let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
        until_ready(&bed).await;
        bed.watch(&fake);
        fake.bed(|bed| bed.on_fence.push_back(fault));
        refuse_and_free(&bed, &SeenPod::from_json(&pod_of(&fake).to_string()).unwrap());
        // At the start, in the version of the watch, and in the one that is there.
        let done = if is_ours { ("PATCH", 3) } else { ("GET", 1) };
        let until_done = async {
            while requests(&fake, done.0) < done.1 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), until_done).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        let fence = pod_of(&fake)["metadata"]["annotations"][FENCE].clone();
        let fence = fence.as_str().unwrap();
        assert_eq!((fence == LATER, fence.contains(" requeue-")), (!is_ours, is_ours), "{fence}");
        assert_eq!(requests(&fake, "PATCH"), if is_ours { 3 } else { 2 });
        stop.send_replace(true);
        running.await.unwrap();
    }
}

#[tokio::test]
async fn a_requeue_waits_for_the_end_of_a_later_process_and_no_longer() {
    let fake = Fake::with_pod();
    let gpu = json!([{"id": "GPU-a", "index": 0, "model": "NVIDIA L4", "memoryMib": 23_034,
        "reservedMib": 0, "kind": "Gpu", "healthy": true}]);
    let made = (Config::default(), Clock::started_ago(GONE_AFTER));
    let bed = Bed::made(&fake, made, json!({"gpu-fraction": "0.5"}), &gpu).await;
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    until_ready(&bed).await;
    fake.bed(|bed| {
        let pod = bed.pod.as_mut().unwrap();
        pod.annotations.insert(FENCE.to_owned(), LATER.to_owned());
    });
    // It was seen so long ago that its process is gone three seconds from now.
    let (app, pod) = (&bed.app, SeenPod::from_json(&pod_of(&fake).to_string()).unwrap());
    let at = Timestamp::from_millis(app.clock.now().millis() + 3_000 - 300_000);
    app.binding.other_fences.see(&pod.pod.uid, pod.fence.digest, at);
    bed.watch(&fake);
    refuse_and_free(&bed, &pod);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(requests(&fake, "PATCH"), 0, "it may live");
    let fenced = async {
        while requests(&fake, "PATCH") == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), fenced).await.unwrap();
    let fence = pod_of(&fake)["metadata"]["annotations"][FENCE].clone();
    assert!(fence.as_str().unwrap().contains(" requeue-"), "{fence}");
    stop.send_replace(true);
    running.await.unwrap();
}

#[tokio::test]
async fn a_refused_requeue_is_tried_again() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    until_ready(&bed).await;
    bed.watch(&fake);
    // An admission webhook of the cluster is away for a while.
    fake.bed(|bed| bed.on_fence.extend([403, 422].map(Fault::Answer)));
    refuse_and_free(&bed, &SeenPod::from_json(&pod_of(&fake).to_string()).unwrap());
    let is_requeued = || {
        let fence = pod_of(&fake)["metadata"]["annotations"][FENCE].clone();
        fence.as_str().is_some_and(|fence| fence.contains(" requeue-"))
    };
    let requeued = async {
        while !is_requeued() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(40), requeued).await.unwrap();
    stop.send_replace(true);
    running.await.unwrap();
}

#[tokio::test]
async fn a_stopping_process_requeues_no_pod() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    until_ready(&bed).await;
    bed.watch(&fake);
    bed.app.lead.set_stopping();
    refuse_and_free(&bed, &SeenPod::from_json(&pod_of(&fake).to_string()).unwrap());
    let failed = r#"gpupack_requeues_total{result="failed"} 1"#;
    let ended = async {
        while !String::from_utf8_lossy(&bed.app.metrics.text()).contains(failed) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), ended).await.unwrap();
    assert_eq!(requests(&fake, "PATCH"), 0, "its successor may have fenced the pod");
    stop.send_replace(true);
    running.await.unwrap();
}

/// *Filter* refuses the pod, and then room appears.
fn refuse_and_free(bed: &Bed, pod: &SeenPod) {
    let app = &bed.app;
    app.waiting.begin_call(pod.waiting_with(app.query(pod).unwrap()), app.clock.now());
    let queried = app.ledger.named_nodes(["n1"].iter());
    app.waiting.refuse(&pod.pod.uid, BTreeMap::new(), Some(queried));
    app.outbox.push(vec![LedgerEvent::Room(NodeName::new("n1"))]);
}

#[tokio::test]
async fn bindings_during_the_start_are_in_the_ledger_before_any_answer() {
    // The second request is refused by now: an earlier process may have had other rules.
    for asks in [json!({"gpu-fraction": "0.5"}), json!({"gpu-memory": "32"})] {
        let fake = Fake::with_pod();
        let bed = Bed::starting(&fake, Config::default(), asks).await;
        bed.watch(&fake);
        // The Binding of an earlier process lands after the list and before the fence; the watch is slow.
        fake.bed(|bed| assert_eq!(bed.bind(&other_binding("u1")).0, 201));
        let (stop, stopped) = watch::channel(false);
        let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
        until_ready(&bed).await;
        assert_eq!(bed.state(), Some(ReservationState::Confirmed));
        stop.send_replace(true);
        running.await.unwrap();
    }
}

#[tokio::test]
async fn a_pod_that_is_gone_at_the_start_waits_no_longer() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
    bed.watch(&fake);
    assert_eq!(bed.app.entries()["pending"], 1);
    fake.bed(|bed| bed.pod = None); // and the watch is late
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    until_ready(&bed).await;
    assert_eq!(bed.app.entries()["pending"], 0);
    stop.send_replace(true);
    running.await.unwrap();
}

#[tokio::test]
async fn a_pod_that_cannot_be_fenced_at_start_is_undecided() {
    let fake = Fake::with_pod();
    // 422 is also the answer of an admission policy, and none checks a Binding.
    fake.bed(|bed| bed.on_fence.extend([422, 403, 409].map(Fault::Answer)));
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
    bed.watch(&fake);
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(requests(&fake, "PATCH"), 1, "refused");
    assert_ne!(bed.app.readiness(), Readiness::Ready);
    until_ready(&bed).await;
    assert_eq!(requests(&fake, "PATCH"), 4);
    stop.send_replace(true);
    running.await.unwrap();
    let fence = pod_of(&fake)["metadata"]["annotations"][FENCE].clone();
    assert!(fence.as_str().unwrap().contains(" start-"), "{fence}");
}

#[tokio::test]
async fn a_pod_with_full_annotations_is_skipped_and_does_not_block_start() {
    let large = json!({"full": "x".repeat((256 << 10) - 19)});
    let many = (0..1_100).map(|at| (format!("full-{at}"), json!(""))).collect::<Map<_, _>>();
    for (mut asks, reported) in
        [(large, "annotations leave no room"), (many.into(), "too many annotations")]
    {
        let fake = Fake::with_pod();
        asks["gpu-fraction"] = "0.5".into();
        let bed = Bed::starting(&fake, Config::default(), asks).await;
        bed.watch(&fake);
        let (stop, stopped) = watch::channel(false);
        let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
        until_ready(&bed).await; // in less than the 90 s of a pod that cannot be fenced
        assert_eq!(requests(&fake, "PATCH"), 1);
        let version = || fake.bed(|bed| bed.pod.as_ref().unwrap().version);
        assert_eq!((bed.filter(&pod_of(&fake)).await, version()), (json!([]), 7));
        let error = bed.bind().await;
        assert!(error.contains(reported), "{error}");
        assert_eq!((requests(&fake, "/binding"), bed.app.entries()["holds"]), (0, 0));
        fake.bed(|bed| {
            let pod = bed.pod.as_mut().unwrap();
            pod.annotations.retain(|key, _| !key.starts_with("full"));
            pod.version += 1;
        });
        bed.watch(&fake);
        assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
        assert_eq!(bed.bind().await, "");
        stop.send_replace(true);
        running.await.unwrap();
    }
}

pub(crate) async fn until_ready(bed: &Bed) {
    let ready = async {
        while bed.app.readiness() != Readiness::Ready {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), ready).await.unwrap();
}
