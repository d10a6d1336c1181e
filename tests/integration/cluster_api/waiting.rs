//! Which pods count as waiting: the first source that shows the end of the wait removes them. And what a
//! pod with a very small request is told in an event.

use std::sync::Arc;
use std::time::Duration;

use kube_api::config::file::Config;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::Sink;
use runtime::clock::Clock;
use serde_json::{Value, json};
use server::api::background;
use tokio::sync::watch;

use super::binding::{Bed, pod_of, requests};
use super::overlapping::until_ready;
use crate::harness::fake_api_server::Fake;

/// Pods that wait, as the queue for requeues has them and as the watch shows them.
fn waiting(bed: &Bed) -> (usize, usize) {
    let entries = bed.app.entries();
    (entries["waiting"], entries["pending"])
}

async fn queried() -> (Fake, Bed) {
    let fake = Fake::with_pod();
    let bed = Bed::new(&fake).await;
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    assert_eq!(waiting(&bed), (1, 1));
    (fake, bed)
}

#[tokio::test]
async fn a_requeue_of_a_missing_pod_ends_its_wait() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(background::run(Arc::clone(&bed.app), stopped));
    until_ready(&bed).await;
    bed.watch(&fake);
    let mut other = pod_of(&fake);
    other["metadata"]["uid"] = "other".into();
    other["metadata"]["annotations"] = json!({"gpu-fraction": "1"});
    let other = SeenPod::from_json(&other.to_string()).unwrap();
    let query = bed.app.query(&other).unwrap();
    bed.app.ledger.reserve(&other.pod, "n1", &query, bed.app.clock.now()).unwrap();
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!([]));
    assert_eq!(waiting(&bed), (1, 1));
    // It is deleted, and the watch is late.
    fake.bed(|bed| bed.pod = None);
    bed.app.outbox.push(bed.app.ledger.forget(&other.pod.uid));
    let forgotten = async {
        while waiting(&bed) != (0, 0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(20), forgotten).await;
    assert!(in_time.is_ok(), "{} fences", requests(&fake, "PATCH"));
    stop.send_replace(true);
    running.await.unwrap();
}

#[tokio::test]
async fn a_bound_pod_stops_waiting_before_the_watch_shows_it() {
    let (_fake, bed) = queried().await;
    assert_eq!(bed.bind().await, "");
    assert_eq!(waiting(&bed), (0, 0));
}

#[tokio::test]
async fn a_pod_changed_in_the_watch_stops_waiting() {
    let changes: [fn(&mut Value); 4] = [
        |pod| pod["spec"]["nodeName"] = "n1".into(),
        |pod| pod["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z".into(),
        |pod| pod["spec"]["schedulerName"] = "another".into(),
        |pod| pod["metadata"]["annotations"] = json!({}),
    ];
    for change in changes {
        let (fake, bed) = queried().await;
        let mut pod = pod_of(&fake);
        change(&mut pod);
        bed.app.pod(&SeenPod::from_json(&pod.to_string()).unwrap());
        assert_eq!(waiting(&bed), (0, 0), "{pod}");
    }
    let (fake, bed) = queried().await;
    let pod = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
    bed.app.pod_ended(&pod.pod.uid);
    assert_eq!(waiting(&bed), (0, 0));
}

#[tokio::test]
async fn a_late_event_of_a_gated_pod_keeps_its_rejection() {
    let fake = Fake::with_pod();
    fake.bed(|bed| bed.pod.as_mut().unwrap().gates = &["quota"]);
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-memory": "99999"})).await;
    bed.app.lead.set_fenced();
    bed.watch(&fake);
    let gated = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
    fake.bed(|bed| bed.pod.as_mut().unwrap().gates = &[]);
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!([]));
    // Another change from before the gate was removed.
    bed.app.pod(&gated);
    assert_eq!(waiting(&bed), (1, 0));
    bed.watch(&fake);
    assert_eq!((waiting(&bed), bed.app.waiting.refused_count()), ((1, 1), 1));
    // A pod that was shown without gates is not checked again while it has some.
    bed.app.pod(&gated);
    assert_eq!(waiting(&bed), (0, 0));
}

#[tokio::test]
async fn a_request_below_the_cuda_context_size_gets_a_warning() {
    for (memory, is_small) in [("511", true), ("512", false)] {
        let fake = Fake::with_pod();
        let gpu = json!([{"id": "GPU-a", "index": 0, "model": "NVIDIA L4", "memoryMib": 23_034,
            "reservedMib": 0, "kind": "Gpu", "healthy": true}]);
        let asks = json!({"gpu-memory": memory});
        let mut bed = Bed::made(&fake, (Config::default(), Clock::start()), asks, &gpu).await;
        bed.app.lead.set_fenced();
        bed.watch(&fake);
        let writer = bed.notices.take().unwrap();
        assert_eq!(bed.bind().await, "");
        drop(bed); // so that no more events are sent
        tokio::time::timeout(Duration::from_secs(20), writer.run()).await.unwrap();
        let reported = fake.bed(|bed| bed.events.clone());
        let reasons: Vec<&str> = reported.iter().filter_map(|it| it["reason"].as_str()).collect();
        let expected = ["GpuPlaced", "GpuMemorySmall"];
        assert_eq!(reasons, expected[..1 + usize::from(is_small)], "{memory} MiB");
        if let [_, small] = &reported[..] {
            assert_eq!(
                (&small["type"], &small["regarding"]["uid"]),
                (&json!("Warning"), &json!("u1"))
            );
            let note = small["note"].as_str().unwrap();
            assert!(note.contains("511 MiB") && note.contains("512 MiB"), "{note}");
        }
    }
}

#[tokio::test]
async fn placements_are_events_unless_the_operator_leaves_them_out() {
    for (placed_events, takes_devices) in
        [(true, true), (true, false), (false, true), (false, false)]
    {
        let fake = Fake::with_pod();
        let config = Config { placed_events, ..Config::default() };
        let gpu = json!([{"id": "GPU-a", "index": 0, "model": "NVIDIA L4", "memoryMib": 23_034,
            "reservedMib": 0, "kind": "Gpu", "healthy": true}]);
        let asks = json!({"gpu-fraction": "0.5"});
        let mut bed = Bed::made(&fake, (config, Clock::start()), asks, &gpu).await;
        let writer = bed.notices.take().unwrap();
        let mut pod = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
        pod.containers.takes_devices = takes_devices;
        let (app, query) = (&bed.app, bed.app.query(&pod).unwrap());
        let placement = app.ledger.reserve(&pod.pod, "n1", &query, app.clock.now()).unwrap();
        app.tell_placed(&pod, &placement);
        drop(bed); // so that no more events are sent
        tokio::time::timeout(Duration::from_secs(20), writer.run()).await.unwrap();
        // A pod that does not see its GPU hears of it in any case.
        let expected = usize::from(placed_events || !takes_devices);
        assert_eq!(fake.bed(|bed| bed.events.len()), expected);
    }
}
