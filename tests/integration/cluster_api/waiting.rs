//! Which pods count as waiting: they are forgotten by whoever hears first that they wait no more. And what a
//! pod is told that gets very little.

use std::sync::Arc;
use std::time::Duration;

use gpupack::clock::Clock;
use gpupack::config::file::Config;
use gpupack::kube_api::pod::seen_pod::SeenPod;
use gpupack::kube_api::pod::watch::Sink;
use gpupack::server::api::background;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::binding::{Bed, pod_of, requests};
use super::overlapping::until_ready;
use crate::harness::api_server::Fake;

/// Pods that wait, as the queue for requeues has them and as the watch shows them.
fn waiting(bed: &Bed) -> (usize, usize) {
    let entries = bed.app.entries();
    (entries["waiting"], entries["pending"])
}

async fn asked() -> (Fake, Bed) {
    let fake = Fake::with_pod();
    let bed = Bed::new(&fake).await;
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    assert_eq!(waiting(&bed), (1, 1));
    (fake, bed)
}

#[tokio::test]
async fn a_touch_that_finds_its_pod_gone_ends_its_wait() {
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
    let question = bed.app.question(&other).unwrap();
    bed.app.ledger.reserve(&other.pod, "n1", &question, bed.app.clock.now()).unwrap();
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!([]));
    assert_eq!(waiting(&bed), (1, 1));
    // It is deleted, and the watch is late.
    fake.world(|world| world.pod = None);
    bed.app.outbox.push(bed.app.ledger.forget(&other.pod.uid));
    let forgotten = async {
        while waiting(&bed) != (0, 0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(20), forgotten).await;
    assert!(in_time.is_ok(), "{} touches", requests(&fake, "PATCH"));
    stop.send_replace(true);
    running.await.unwrap();
}

#[tokio::test]
async fn a_bound_pod_waits_no_more_before_the_watch_says_so() {
    let (_fake, bed) = asked().await;
    assert_eq!(bed.bind().await, "");
    assert_eq!(waiting(&bed), (0, 0));
}

#[tokio::test]
async fn a_pod_that_the_watch_shows_otherwise_waits_no_more() {
    let changes: [fn(&mut Value); 4] = [
        |pod| pod["spec"]["nodeName"] = "n1".into(),
        |pod| pod["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z".into(),
        |pod| pod["spec"]["schedulerName"] = "another".into(),
        |pod| pod["metadata"]["annotations"] = json!({}),
    ];
    for change in changes {
        let (fake, bed) = asked().await;
        let mut pod = pod_of(&fake);
        change(&mut pod);
        bed.app.pod(&SeenPod::from_json(&pod.to_string()).unwrap());
        assert_eq!(waiting(&bed), (0, 0), "{pod}");
    }
    let (fake, bed) = asked().await;
    let pod = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
    bed.app.pod_ended(&pod.pod.uid);
    assert_eq!(waiting(&bed), (0, 0));
}

#[tokio::test]
async fn a_late_event_of_a_gated_pod_takes_away_no_refusal() {
    let fake = Fake::with_pod();
    fake.world(|world| world.pod.as_mut().unwrap().gates = &["quota"]);
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-memory": "99999"})).await;
    bed.app.set_fenced();
    bed.watch(&fake);
    let gated = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
    fake.world(|world| world.pod.as_mut().unwrap().gates = &[]);
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!([]));
    // Another change of before the gate was taken away.
    bed.app.pod(&gated);
    assert_eq!(waiting(&bed), (1, 0));
    bed.watch(&fake);
    assert_eq!((waiting(&bed), bed.app.waiting.refused_count()), ((1, 1), 1));
    // A pod that was shown without gates is not looked at again while it has some.
    bed.app.pod(&gated);
    assert_eq!(waiting(&bed), (0, 0));
}

#[tokio::test]
async fn a_pod_that_gets_less_than_a_cuda_context_takes_is_warned() {
    for (memory, is_small) in [("511", true), ("512", false)] {
        let fake = Fake::with_pod();
        let gpu = json!([{"uuid": "GPU-a", "index": 0, "model": "NVIDIA L4", "memoryMib": 23_034,
            "reservedMib": 0, "kind": "Gpu", "healthy": true}]);
        let asks = json!({"gpu-memory": memory});
        let mut bed = Bed::made(&fake, (Config::default(), Clock::start()), asks, &gpu).await;
        bed.app.set_fenced();
        bed.watch(&fake);
        let writer = bed.notices.take().unwrap();
        assert_eq!(bed.bind().await, "");
        drop(bed); // so that nothing more is told
        tokio::time::timeout(Duration::from_secs(20), writer.run()).await.unwrap();
        let told = fake.world(|world| world.events.clone());
        let reasons: Vec<&str> = told.iter().filter_map(|it| it["reason"].as_str()).collect();
        let expected = ["GpuPlaced", "GpuMemorySmall"];
        assert_eq!(reasons, expected[..1 + usize::from(is_small)], "{memory} MiB");
        if let [_, small] = &told[..] {
            assert_eq!(
                (&small["type"], &small["regarding"]["uid"]),
                (&json!("Warning"), &json!("u1"))
            );
            let note = small["note"].as_str().unwrap();
            assert!(note.contains("511 MiB") && note.contains("512 MiB"), "{note}");
        }
    }
}
