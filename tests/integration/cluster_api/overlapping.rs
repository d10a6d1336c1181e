//! Two processes of gpupack that overlap: what an old one may still do, and what a new one must know.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpupack::clock::Clock;
use gpupack::config::file::Config;
use gpupack::control::shared::app::App;
use gpupack::control::shared::other_fences::GONE_AFTER;
use gpupack::hardware::device::NodeName;
use gpupack::hardware::units::Timestamp;
use gpupack::kube_api::pod::seen_pod::SeenPod;
use gpupack::kube_api::pod::watch::Sink;
use gpupack::ledger::query::reading::Readiness;
use gpupack::model::event::LedgerEvent;
use gpupack::model::reservation::ReservationState;
use gpupack::server::api::background;
use serde_json::{Map, json};
use tokio::sync::watch;

use super::binding::{Bed, node, other_binding, pod_of, requests};
use crate::harness::api_server::{Fake, Fault};

const TOUCH: &str = "placed.gpupack.dev/touch";

/// Touches of processes that started long before and after the one of the test.
const EARLIER: &str = "1-1 start-1";
const LATER: &str = "ffffffffff-1 start-1";

async fn ready(fake: &Fake) -> Bed {
    let bed = Bed::starting(fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
    bed.app.set_fenced();
    bed.watch(fake);
    bed
}

#[tokio::test]
async fn a_process_that_stops_posts_no_binding_any_more() {
    let fake = Fake::with_pod();
    let bed = ready(&fake).await;
    bed.app.set_stopping();
    assert_eq!(bed.bind().await, "gpupack is stopping");
    assert_eq!((requests(&fake, "/binding"), bed.state()), (0, None));
    // In the middle of a bind: the first Binding did not land.
    let fake = Fake::with_pod().on_bind(Fault::Answer(503));
    fake.world(|world| world.on_read.push_back(Fault::Answer(500)));
    let bed = ready(&fake).await;
    let stop = async {
        while requests(&fake, "/binding") == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        bed.app.set_stopping();
    };
    let (error, ()) = tokio::join!(bed.bind(), stop);
    assert_eq!(error, "gpupack is stopping");
    assert_eq!((requests(&fake, "/binding"), bed.state()), (1, None), "it is taken back");
    assert_eq!(node(&fake), None);
}

#[tokio::test]
async fn an_undecided_bind_does_not_hold_up_the_stop() {
    let fake = Fake::with_pod().on_bind(Fault::Answer(503));
    fake.world(|world| world.on_read.extend([Fault::Answer(500); 1_000]));
    let bed = ready(&fake).await;
    let stop = async {
        while requests(&fake, "GET") == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        bed.app.set_stopping();
        bed.app.clock.precise()
    };
    let answer = async {
        let error = tokio::time::timeout(Duration::from_secs(10), bed.bind()).await;
        (error, bed.app.clock.precise())
    };
    let ((error, answered), stopped) = tokio::join!(answer, stop);
    assert_eq!(error.unwrap(), "the API server does not say whether the pod is bound");
    let took = answered - stopped;
    assert!(took < Duration::from_millis(1_500), "{took:?}");
    assert_eq!(requests(&fake, "/binding"), 1);
    assert!(matches!(bed.state(), Some(ReservationState::Assumed { .. })), "its room is kept");
}

#[tokio::test]
async fn a_version_that_another_process_touched_is_not_adopted() {
    for touch in [EARLIER, LATER, "wake-1-2"] {
        let fake = Fake::with_pod().on_bind(Fault::TouchedBefore(touch));
        let bed = ready(&fake).await;
        assert_eq!(bed.bind().await, "another gpupack process is responsible for the pod");
        assert_eq!((requests(&fake, "/binding"), node(&fake)), (1, None), "{touch}");
        assert_eq!(bed.state(), None, "{touch}");
    }
    // A version that somebody else wrote is.
    let fake = Fake::with_pod().on_bind(Fault::WrittenBefore);
    let bed = ready(&fake).await;
    assert_eq!((bed.bind().await.as_str(), node(&fake).as_deref()), ("", Some("n1")));
}

#[tokio::test]
async fn a_pod_of_an_earlier_process_is_fenced_before_it_is_bound() {
    for touch in [EARLIER, "wake-1-2"] {
        let fake = Fake::with_pod();
        fake.world(|world| {
            world.pod.as_mut().unwrap().annotations.insert(TOUCH.to_owned(), touch.to_owned());
        });
        let bed = ready(&fake).await;
        // The watch is behind: the pod was written once more.
        fake.world(|world| world.pod.as_mut().unwrap().version += 1);
        assert_eq!((bed.bind().await.as_str(), node(&fake).as_deref()), ("", Some("n1")));
        let told = fake.world(|world| world.requests.clone());
        let first = |part: &str| told.iter().position(|request| request.contains(part));
        assert!(first("PATCH") < first("/binding"), "{told:?}");
        assert_eq!(requests(&fake, "/binding"), 1, "{told:?}");
    }
}

#[tokio::test]
async fn a_pod_that_an_earlier_process_has_bound_to_the_node_is_bound() {
    let fake = Fake::with_pod();
    let bed = ready(&fake).await;
    fake.world(|world| assert_eq!(world.bind(&other_binding("u1")).0, 201));
    assert_eq!(bed.bind().await, "", "kube-scheduler would write an error on a pod that runs");
    assert_eq!(bed.state(), Some(ReservationState::Confirmed));
}

#[tokio::test]
async fn a_pod_of_a_later_process_is_left_to_it() {
    let fake = Fake::with_pod();
    fake.world(|world| {
        world.pod.as_mut().unwrap().annotations.insert(TOUCH.to_owned(), LATER.to_owned());
    });
    let bed = ready(&fake).await;
    assert_eq!(bed.bind().await, "another gpupack process is responsible for the pod");
    assert_eq!((requests(&fake, "/binding"), requests(&fake, "PATCH")), (0, 0));
    assert_eq!(bed.state(), None);
}

#[tokio::test]
async fn a_pod_of_a_later_process_that_is_gone_is_taken_over() {
    for touched_again in [None, Some("ffffffffff-1 wake-2")] {
        let fake = Fake::with_pod();
        let set_touch = |value: &str| {
            fake.world(|world| {
                let pod = world.pod.as_mut().unwrap();
                pod.annotations.insert(TOUCH.to_owned(), value.to_owned());
                pod.version += 1;
            });
        };
        set_touch(LATER);
        let clock = Clock::started_ago(GONE_AFTER);
        let bed = Bed::with_clock(&fake, clock).await;
        let shown = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
        bed.app.other_touches.see(&shown.pod.uid, shown.touch, Timestamp::START);
        touched_again.into_iter().for_each(set_touch);
        bed.watch(&fake);
        let error = bed.bind().await;
        if touched_again.is_some() {
            assert_eq!(error, "another gpupack process is responsible for the pod");
            assert_eq!((requests(&fake, "/binding"), requests(&fake, "PATCH")), (0, 0));
            assert_eq!(bed.app.entries()["touches of others"], 1);
        } else {
            assert_eq!((error.as_str(), node(&fake).as_deref()), ("", Some("n1")));
            let told = fake.world(|world| world.requests.clone());
            let first = |part: &str| told.iter().position(|request| request.contains(part));
            assert!(first("PATCH") < first("/binding"), "it is fenced first: {told:?}");
        }
        bed.app.pod_ended(&shown.pod.uid);
        assert_eq!(bed.app.entries()["touches of others"], 0);
    }
}

#[tokio::test]
async fn a_requeue_leaves_the_touch_of_a_later_process_to_be_seen() {
    for (fault, is_ours) in [(Fault::TouchedBefore(LATER), false), (Fault::WrittenBefore, true)] {
        let fake = Fake::with_pod();
        let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
        bed.watch(&fake);
        let (stop, stopped) = watch::channel(false);
        let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
        until_ready(&bed).await;
        bed.watch(&fake);
        fake.world(|world| world.on_touch.push_back(fault));
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
        let touch = pod_of(&fake)["metadata"]["annotations"][TOUCH].clone();
        let touch = touch.as_str().unwrap();
        assert_eq!((touch == LATER, touch.contains(" wake-")), (!is_ours, is_ours), "{touch}");
        assert_eq!(requests(&fake, "PATCH"), if is_ours { 3 } else { 2 });
        stop.send_replace(true);
        running.await.unwrap();
    }
}

#[tokio::test]
async fn a_requeue_waits_for_the_end_of_a_later_process_and_no_longer() {
    let fake = Fake::with_pod();
    let gpu = json!([{"uuid": "GPU-a", "index": 0, "model": "NVIDIA L4", "memoryMib": 23_034,
        "reservedMib": 0, "kind": "Gpu", "healthy": true}]);
    let made = (Config::default(), Clock::started_ago(GONE_AFTER));
    let bed = Bed::made(&fake, made, json!({"gpu-fraction": "0.5"}), &gpu).await;
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    until_ready(&bed).await;
    fake.world(|world| {
        let pod = world.pod.as_mut().unwrap();
        pod.annotations.insert(TOUCH.to_owned(), LATER.to_owned());
    });
    // It was seen so long ago that its process is gone three seconds from now.
    let (app, pod) = (&bed.app, SeenPod::from_json(&pod_of(&fake).to_string()).unwrap());
    let at = Timestamp::from_millis(app.clock.now().millis() + 3_000 - 300_000);
    app.other_touches.see(&pod.pod.uid, pod.touch, at);
    bed.watch(&fake);
    refuse_and_free(&bed, &pod);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(requests(&fake, "PATCH"), 0, "it may live");
    let touched = async {
        while requests(&fake, "PATCH") == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), touched).await.unwrap();
    let touch = pod_of(&fake)["metadata"]["annotations"][TOUCH].clone();
    assert!(touch.as_str().unwrap().contains(" wake-"), "{touch}");
    stop.send_replace(true);
    running.await.unwrap();
}

#[tokio::test]
async fn a_process_that_stops_requeues_no_pod_any_more() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    until_ready(&bed).await;
    bed.watch(&fake);
    bed.app.set_stopping();
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
    app.waiting.ask(App::waiting_pod(pod, app.question(pod).unwrap()), app.clock.now());
    let asked = app.ledger.asked_nodes(["n1"].iter());
    app.waiting.refuse(&pod.pod.uid, BTreeMap::new(), Some(asked));
    app.outbox.push(vec![LedgerEvent::Room(NodeName::new("n1"))]);
}

#[tokio::test]
async fn what_lands_during_the_start_is_in_the_books_before_the_first_answer() {
    // The second request is refused by now: an earlier process may have had other rules.
    for asks in [json!({"gpu-fraction": "0.5"}), json!({"gpu-memory": "32"})] {
        let fake = Fake::with_pod();
        let bed = Bed::starting(&fake, Config::default(), asks).await;
        bed.watch(&fake);
        // The Binding of an earlier process lands after the list and before the touch; the watch is slow.
        fake.world(|world| assert_eq!(world.bind(&other_binding("u1")).0, 201));
        let (stop, stopped) = watch::channel(false);
        let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
        until_ready(&bed).await;
        assert_eq!(bed.state(), Some(ReservationState::Confirmed));
        stop.send_replace(true);
        running.await.unwrap();
    }
}

#[tokio::test]
async fn a_pod_that_may_not_be_touched_at_the_start_is_undecided() {
    let fake = Fake::with_pod();
    // 422 is what an admission policy answers as well, and none looks at a Binding.
    fake.world(|world| world.on_touch.extend([422, 403, 409].map(Fault::Answer)));
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
    let touch = pod_of(&fake)["metadata"]["annotations"][TOUCH].clone();
    assert!(touch.as_str().unwrap().contains(" start-"), "{touch}");
}

#[tokio::test]
async fn a_pod_whose_annotations_are_full_holds_up_no_start_and_is_left_out() {
    let large = json!({"full": "x".repeat((256 << 10) - 19)});
    let many = (0..1_100).map(|at| (format!("full-{at}"), json!(""))).collect::<Map<_, _>>();
    for (mut asks, told) in
        [(large, "annotations leave no room"), (many.into(), "too many annotations")]
    {
        let fake = Fake::with_pod();
        asks["gpu-fraction"] = "0.5".into();
        let bed = Bed::starting(&fake, Config::default(), asks).await;
        bed.watch(&fake);
        let (stop, stopped) = watch::channel(false);
        let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
        until_ready(&bed).await; // in less than the 90 s of a pod that may not be touched
        assert_eq!(requests(&fake, "PATCH"), 1);
        let version = || fake.world(|world| world.pod.as_ref().unwrap().version);
        assert_eq!((bed.filter(&pod_of(&fake)).await, version()), (json!([]), 7));
        let error = bed.bind().await;
        assert!(error.contains(told), "{error}");
        assert_eq!((requests(&fake, "/binding"), bed.app.entries()["claims"]), (0, 0));
        fake.world(|world| {
            let pod = world.pod.as_mut().unwrap();
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
