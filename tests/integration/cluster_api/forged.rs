//! Calls that any client of the port can forge: about pods that do not exist, and with the UID of one
//! that there is.

use std::time::Duration;

use control::shared::passed::Verdict;
use engine::ledger::suggest::waiting::Unbound;
use kube_api::config::file::Config;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::Sink;
use serde_json::{Value, json};
use server::api::background;
use tokio::sync::watch;
use wire::ids::PodUid;

use super::binding::{Bed, node, pod_of, requests};
use crate::harness::fake_api_server::Fake;

/// The fake's pod as a caller may describe it.
fn forged(fake: &Fake, annotations: Value) -> Value {
    let mut pod = pod_of(fake);
    pod["metadata"]["annotations"] = annotations;
    pod["spec"]["priority"] = i32::MAX.into();
    pod["metadata"]["creationTimestamp"] = "1970-01-02T00:00:00Z".into();
    pod
}

/// The events that were queued: the test bed has no writer for them.
fn notices(bed: &Bed) -> u64 {
    bed.app.notices.counts().dropped
}

fn holds(bed: &Bed) -> usize {
    bed.app.entries()["holds"]
}

#[tokio::test]
async fn calls_with_the_name_of_another_pod_do_not_affect_it() {
    let fake = Fake::with_pod();
    let bed = Bed::new(&fake).await;
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    assert_eq!(holds(&bed), 1);
    for annotations in [json!({"gpu-fraction": "0.3"}), json!({}), json!({"gpu-count": "9"})] {
        let pod = forged(&fake, annotations);
        for path in ["/v1/filter", "/v1/prioritize"] {
            bed.send("POST", path, &json!({"Pod": pod, "NodeNames": ["n2"]})).await;
            assert_eq!(holds(&bed), 1, "{path} {pod}");
        }
    }
    // Nor does the pod get an event with a text of the caller.
    let (unreadable, reported) =
        (forged(&fake, json!({"gpu-fraction": "tell this"})), notices(&bed));
    bed.send("POST", "/v1/filter", &json!({"Pod": unreadable, "NodeNames": ["n2"]})).await;
    assert_eq!(notices(&bed), reported);
    let state = bed.app.waiting.pod(&PodUid::new("u1")).unwrap();
    let shown = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
    assert_eq!(Some(state.waiting.query), bed.app.query(&shown));
    assert_eq!((state.waiting.priority, state.refused), (0, None));
    let error = bed.bind_to("n2").await;
    assert!(
        error.contains("filter did not pass the pod"),
        "not by the body without a GPU: {error}"
    );
    // Even a call with its own request, for other nodes, adds to what was passed.
    bed.send("POST", "/v1/filter", &json!({"Pod": pod_of(&fake), "NodeNames": ["n2"]})).await;
    assert_eq!(bed.bind().await, "");
    assert_eq!(node(&fake).as_deref(), Some("n1"));
}

#[tokio::test]
async fn room_is_not_held_forever_for_a_pod_that_is_never_bound() {
    let fake = Fake::with_pod();
    let bed = Bed::new(&fake).await;
    let body = json!({"Pod": pod_of(&fake), "NodeNames": ["n1"]});
    let paths = ["filter", "filter", "prioritize", "filter", "prioritize"];
    for path in paths.into_iter().cycle().take(20) {
        bed.send("POST", &format!("/v1/{path}"), &body).await;
        assert_eq!(holds(&bed), 1, "calls cost nothing");
    }
    let pod = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
    let later = bed.app.clock.now().plus(Duration::from_secs(10));
    assert!(bed.app.waiting.is_unbound(&pod.pod.uid, later));
    let unbound = Unbound { amount: 2, at_most: 1 };
    assert!(!bed.app.waiting.may_hold(&pod.pod.uid, later, unbound), "others may have the room");
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    assert_eq!(bed.bind().await, "", "as it may");
}

#[tokio::test]
async fn a_pod_without_gpu_is_bound_where_it_passed_despite_other_calls() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({})).await;
    bed.app.lead.set_fenced();
    bed.watch(&fake);
    let body = json!({"Pod": pod_of(&fake), "NodeNames": ["n2"]});
    bed.send("POST", "/v1/filter", &body).await;
    bed.filter(&forged(&fake, json!({"gpu-fraction": "0.1"}))).await;
    assert_eq!(bed.bind_to("n2").await, "");
}

#[tokio::test]
async fn forged_pods_are_not_requeued_reported_or_learned() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-memory": "99999"})).await;
    bed.watch(&fake);
    let holder = forged(&fake, json!({"gpu-fraction": "1.0"}));
    let mut holder = SeenPod::from_json(&holder.to_string()).unwrap();
    holder.pod.uid = PodUid::new("holder");
    let whole = bed.app.query(&holder).unwrap();
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(background::run(bed.app.clone(), stopped));
    tokio::time::sleep(Duration::from_millis(200)).await;
    let fenced = requests(&fake, "PATCH");
    assert_eq!(fenced, 1, "the pod that waits, at the start");
    bed.app.ledger.reserve(&holder.pod, "n1", &whole, bed.app.clock.now()).unwrap();
    let mix = bed.app.entries()["mix"];
    for number in 0..20 {
        let mut pod = forged(&fake, json!({"gpu-fraction": "0.5"}));
        pod["metadata"]["uid"] = format!("made-up-{number}").into();
        assert_eq!(bed.filter(&pod).await, json!([]));
        pod["metadata"]["annotations"] = json!({"gpu-fraction": "7"});
        bed.filter(&pod).await;
    }
    bed.app.outbox.push(bed.app.ledger.forget(&holder.pod.uid));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(requests(&fake, "PATCH"), fenced);
    assert_eq!(notices(&bed), 0);
    assert_eq!((bed.app.waiting.all().len(), bed.app.entries()["mix"]), (1, mix));
    stop.send_replace(true);
    running.await.unwrap();
}

#[tokio::test]
async fn calls_before_the_watch_shows_the_pod_count_once_it_does() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-memory": "99999"})).await;
    bed.app.lead.set_fenced();
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!([]));
    let mix = bed.app.entries()["mix"];
    assert_eq!((bed.app.waiting.refused_count(), bed.app.waiting.count()), (0, 1));
    bed.watch(&fake);
    assert_eq!((bed.app.waiting.refused_count(), bed.app.waiting.count()), (1, 1));
    assert_eq!(bed.app.entries()["mix"], mix + 1);
}

#[tokio::test]
async fn a_rejection_counts_once_the_watch_shows_the_new_gpu_request() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({})).await;
    bed.app.lead.set_fenced();
    bed.watch(&fake);
    let without = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
    fake.bed(|bed| {
        let annotations = &mut bed.pod.as_mut().unwrap().annotations;
        annotations.insert("gpu-memory".to_owned(), "99999".to_owned());
    });
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!([]));
    let counts = || (bed.app.waiting.refused_count(), bed.app.waiting.count());
    assert_eq!(counts(), (0, 1));
    bed.watch(&fake);
    assert_eq!(counts(), (1, 1), "room that appears is looked for");
    // It was made up.
    bed.app.pod(&without);
    bed.filter(&pod_of(&fake)).await;
    bed.app.pod(&without);
    assert_eq!(counts(), (0, 0));
}

#[tokio::test]
async fn a_rejection_counts_once_the_watch_shows_the_corrected_request() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-memory": "much"})).await;
    bed.app.lead.set_fenced();
    bed.watch(&fake);
    let set = |memory: &str| {
        fake.bed(|bed| {
            let annotations = &mut bed.pod.as_mut().unwrap().annotations;
            annotations.insert("gpu-memory".to_owned(), memory.to_owned());
        });
    };
    let counts = || (bed.app.waiting.refused_count(), bed.app.waiting.count());
    set("99999");
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!([]));
    assert_eq!(counts(), (0, 1));
    bed.watch(&fake);
    assert_eq!(counts(), (1, 1), "room that appears is looked for");
    // The request changes again, and kube-scheduler's call for it arrives before the change.
    set("1000");
    bed.watch(&fake);
    assert_ne!(bed.filter(&pod_of(&fake)).await, json!([]));
    assert_eq!(counts(), (0, 1));
    set("99999");
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!([]));
    bed.watch(&fake);
    assert_eq!(counts(), (1, 1));
}

#[tokio::test]
async fn a_rejected_request_is_reported_once_the_watch_shows_the_pod() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "7"})).await;
    bed.filter(&pod_of(&fake)).await;
    assert_eq!(notices(&bed), 0);
    bed.watch(&fake);
    assert_eq!(notices(&bed), 1);
}

#[tokio::test]
async fn bind_of_an_unknown_pod_reads_nothing_unless_filter_passed_it() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({"gpu-fraction": "0.5"})).await;
    bed.app.lead.set_fenced();
    bed.filter(&pod_of(&fake)).await;
    let error = bed.bind_to("n2").await;
    assert!(error.contains("filter did not pass the pod"), "{error}");
    assert_eq!(requests(&fake, ""), 0);
    assert_eq!(bed.bind().await, "", "where it did, the pod is read");
}

#[tokio::test]
async fn binds_of_unknown_pods_delay_no_other_bind() {
    for (asks, gates) in [(json!({}), &[][..]), (json!({"gpu-fraction": "0.5"}), &["quota"])] {
        let fake = Fake::with_pod();
        fake.bed(|bed| bed.pod.as_mut().unwrap().gates = gates);
        let bed = Bed::starting(&fake, Config::default(), asks).await;
        bed.app.lead.set_fenced();
        bed.watch(&fake);
        fake.bed(|bed| bed.pod.as_mut().unwrap().gates = &[]); // the watch is late
        let made_up = (0..500).map(|at| {
            let bed = &bed;
            async move {
                let body = json!({"PodName": format!("made-up-{at}"), "PodNamespace": "team-a",
                    "PodUID": format!("made-up-{at}"), "Node": "n1"});
                bed.send("POST", "/v1/bind", &body).await
            }
        });
        let mut made_up = Box::pin(futures::future::join_all(made_up));
        while requests(&fake, "GET") < 16 {
            assert!(futures::poll!(made_up.as_mut()).is_pending());
            tokio::task::yield_now().await;
        }
        let (error, reported) = tokio::join!(bed.bind(), made_up);
        assert_eq!(error, "");
        assert!(
            reported.iter().any(|reported| reported.to_string().contains("too many")),
            "{:?}",
            reported[499]
        );
    }
}

#[tokio::test]
async fn forged_pods_displace_no_passed_pod_without_gpu() {
    let fake = Fake::with_pod();
    let bed = Bed::starting(&fake, Config::default(), json!({})).await;
    bed.app.lead.set_fenced();
    bed.watch(&fake);
    let real = pod_of(&fake);
    bed.filter(&real).await;
    let verdict = || bed.app.binding.passed.verdict(&PodUid::new("u1"), "n1", bed.app.clock.now());
    assert_eq!(verdict(), Verdict::Passed);
    for number in 0..4_100 {
        let mut pod = real.clone();
        pod["metadata"]["uid"] = format!("made-up-{number}").into();
        bed.filter(&pod).await;
    }
    bed.filter(&forged(&fake, json!({"gpu-fraction": "0.1"}))).await;
    assert_eq!(verdict(), Verdict::Passed);
    let waits = (bed.app.waiting.refused_count(), bed.app.waiting.all().len());
    assert_eq!(waits, (0, 0), "what others say of it does not count");
    bed.app.pod_ended(&PodUid::new("u1"));
    assert_eq!(bed.app.entries()["without a GPU"], 0);
}

#[tokio::test]
async fn no_room_is_held_for_a_pod_with_scheduling_gates() {
    let fake = Fake::with_pod();
    fake.bed(|bed| bed.pod.as_mut().unwrap().gates = &["quota"]);
    let bed = Bed::new(&fake).await;
    let body = json!({"Pod": pod_of(&fake), "NodeNames": ["n1"]});
    for path in ["/v1/filter", "/v1/prioritize"] {
        bed.send("POST", path, &body).await;
        assert_eq!(holds(&bed), 0, "{path}");
    }
    assert_eq!(bed.bind().await, "the pod has scheduling gates");
    assert_eq!((requests(&fake, "/binding"), bed.state()), (0, None));
    let gated = "it has scheduling gates: kube-scheduler ignores it until";
    let explained = bed.send("GET", "/v1/explain?pod=team-a/infer", &Value::Null).await;
    assert!(explained["verdict"].as_str().unwrap().starts_with(gated), "{explained}");
    let listed = bed.send("GET", "/v1/waiting", &Value::Null).await;
    assert_eq!((&listed["total"], listed["items"].as_array().unwrap().len()), (&json!(1), 1));
    assert!(listed["items"][0]["reason"].as_str().unwrap().starts_with(gated), "{listed}");
    // The gate is removed: a call before the watch shows this counts.
    fake.bed(|bed| {
        let pod = bed.pod.as_mut().unwrap();
        (pod.gates, pod.version) = (&[], 8);
    });
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    assert_eq!(holds(&bed), 0);
    bed.watch(&fake);
    assert_eq!(holds(&bed), 1);
    let explained = bed.send("GET", "/v1/explain?pod=team-a/infer", &Value::Null).await;
    assert!(explained["verdict"].as_str().unwrap().contains("1 of 1 node fits now"), "{explained}");
    assert_eq!((bed.bind().await.as_str(), node(&fake).as_deref()), ("", Some("n1")));
    assert_eq!(bed.app.entries()["gated"], 0);
}
