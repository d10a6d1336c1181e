//! The state that remains of ended pods, counted table by table.

use std::sync::Arc;
use std::time::Duration;

use control::pods::chargeback;
use control::shared::app::App;
use control::shared::passed::Verdict;
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::model::reservation::{ReservationState, Tenure};
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::{PodWatch, Sink, WatchEvent};
use kube_api::write::events::NoticeReason;
use serde_json::{Value, json};
use wire::ids::PodUid;
use wire::units::Timestamp;

use super::binding::{Bed, pod_of};
use crate::harness::fake_api_server::{Fake, Fault};

const PODS: u64 = 10_000;

/// Pod number `at` as the API server has it. A few request what does not fit.
fn pod(at: u64, node: Option<&str>) -> Value {
    let queried = match at % 100 {
        0 => json!({"gpu-memory": "99999"}),
        _ => json!({"gpu-fraction": format!("0.01{}", at % 900)}),
    };
    json!({
        "metadata": {"uid": format!("uid-{at}"), "namespace": format!("team-{}", at % 7),
            "name": format!("pod-{at}"), "resourceVersion": "7",
            "annotations": queried},
        "spec": {"schedulerName": "gpupack", "containers": [{"name": "main"}], "nodeName": node,
            "priorityClassName": format!("class-{}", at % 3)},
    })
}

fn seen(pod: &Value) -> SeenPod {
    SeenPod::from_json(&pod.to_string()).unwrap()
}

/// The agent's report number `sequence`, with a process of `running`.
async fn report(bed: &Bed, sequence: u64, running: &[String]) {
    let processes: Vec<Value> =
        running.iter().map(|uid| json!({"pid": 7, "podUid": uid, "memoryMib": 100})).collect();
    let report = json!({
        "apiVersion": "gpupack.dev/v1alpha1", "agent": "agent-of-n1", "session": 1, "sequence": sequence,
        "devices": [{"id": "GPU-a", "usedMib": 100 * processes.len(), "healthy": true,
            "processes": processes}],
    });
    bed.send("PUT", "/v1/nodes/n1/report", &report).await;
}

/// One pod from its creation to its start, as verbs and watch show it.
async fn start(bed: &Bed, at: u64) -> PodUid {
    let waiting = pod(at, None);
    let app = &bed.app;
    app.pod(&seen(&waiting));
    let bound = seen(&pod(at, Some("n1")));
    // The path over HTTP takes the most time, and leaves no more state than the ledger does.
    if at.is_multiple_of(10) {
        let body = json!({"Pod": waiting, "NodeNames": ["n1"]});
        let answer = bed.send("POST", "/v1/filter", &body).await;
        if answer["NodeNames"] != json!(["n1"]) {
            assert!(at.is_multiple_of(100), "{answer}");
            return bound.pod.uid;
        }
    }
    let now = app.clock.now();
    let query = app.query(&bound).unwrap();
    let placement = app.ledger.reserve(&bound.pod, "n1", &query, now).unwrap();
    app.ledger.confirm(&bound.pod.uid);
    let fact = PodFact {
        pod: bound.pod.clone(),
        node: bound.node.clone(),
        host: bound.host,
        is_terminal: false,
        wants_gpu: true,
        request: None,
        placement: Some(placement),
        bound_by_us: true,
        moves: MoveFact::default(),
        tenure: Tenure::default(),
    };
    assert_eq!(app.ledger.see_pod(&fact, now), []);
    app.pod(&bound);
    app.tell(&bound.pod, NoticeReason::GpuPlaced, "placed".to_owned());
    bound.pod.uid
}

/// Some pods from their creation to their end.
async fn lives(bed: &Bed, pods: std::ops::Range<u64>) {
    let mut running = Vec::new();
    for at in pods.clone() {
        running.push(start(bed, at).await);
    }
    let uids: Vec<String> = running.iter().map(ToString::to_string).collect();
    report(bed, 10 * pods.start + 2, &uids).await;
    chargeback::account(&bed.app);
    for uid in &running {
        bed.app.outbox.push(bed.app.ledger.end_pod(uid, bed.app.clock.now()));
        bed.app.pod_ended(uid);
    }
    for sequence in [3, 4] {
        report(bed, 10 * pods.start + sequence, &[]).await;
    }
    bed.app.forget_unseen();
    let _told = bed.app.outbox.take().await;
}

#[tokio::test]
async fn a_pod_that_ends_before_the_watch_shows_it_bound_leaves_no_state() {
    let fake = Fake::with_pod();
    let bed = Bed::new(&fake).await;
    let (uid, app) = (PodUid::new("u1"), &bed.app);
    let tables = ["waiting", "pending", "binds", "unseen binds", "written annotations"];
    let kept = || tables.map(|table| app.entries()[table]);
    let verdict = || app.binding.passed.verdict(&uid, "n1", app.clock.now());
    bed.filter(&pod_of(&fake)).await;
    assert_eq!(kept(), [1, 1, 0, 0, 0]);
    assert_eq!(bed.bind().await, "");
    assert_eq!((kept(), verdict()), ([0, 0, 0, 1, 1], Verdict::Passed));
    app.pod_ended(&uid);
    assert_eq!((kept(), verdict()), ([0; 5], Verdict::Unknown));
}

/// The watch was cut off between the Binding and the end of the pod, and begins again with a list. The
/// Binding is answered, or it is not.
#[tokio::test]
async fn a_pod_that_ends_before_the_watch_shows_it_at_all_drains_after_a_list() {
    for is_answered in [true, false] {
        let fake = match is_answered {
            true => Fake::with_pod(),
            false => Fake::with_pod().on_bind(Fault::Answer(503)),
        };
        let bed = Bed::new(&fake).await;
        let (uid, app) = (PodUid::new("u1"), &bed.app);
        let mut watch = PodWatch::new(Arc::clone(&app.ledger), Arc::<App>::clone(app), app.clock);
        watch.take(WatchEvent::ListBegins);
        watch.take(WatchEvent::ListEnds);
        bed.filter(&pod_of(&fake)).await;
        let state = || app.ledger.reservation(&uid).map(|held| held.state);
        if is_answered {
            assert_eq!(bed.bind().await, "");
            assert_eq!(state(), Some(ReservationState::Confirmed));
        } else {
            fake.bed(|bed| bed.on_read.extend([Fault::Answer(500); 1_000]));
            let hangs_up = Duration::from_millis(300);
            assert!(tokio::time::timeout(hangs_up, bed.bind()).await.is_err(), "it is undecided");
            assert!(matches!(state(), Some(ReservationState::Assumed { .. })), "{:?}", state());
        }
        watch.take(WatchEvent::ListBegins);
        watch.take(WatchEvent::ListEnds);
        assert!(matches!(state(), Some(ReservationState::Draining { .. })), "{:?}", state());
        assert_eq!(app.entries()["unseen binds"], 0);
    }
}

#[tokio::test]
async fn state_of_ended_pods_is_bounded_in_every_table() {
    let fake = Fake::with_pod();
    let bed = Bed::new(&fake).await;
    // One pod of the bed waits, and is forgotten like all others.
    bed.app.pod_ended(&PodUid::new("u1"));
    for first in (0..PODS).step_by(50) {
        lives(&bed, first..first + 50).await;
    }
    bed.app.ledger.tick(Timestamp::from_millis(bed.app.clock.now().millis() + 600_000));
    chargeback::account(&bed.app);
    bed.app.forget_unseen();
    let bounds = [
        ("nodes", 1),
        ("devices", 1),
        ("ended", 20_000),
        ("notices", 16_384),
        ("shapes", 1_024),
        ("mix", 4_000),
        ("reasons", 10_500),
    ];
    for (table, entries) in bed.app.entries() {
        let bound = bounds.iter().find(|(name, _)| *name == table).map_or(0, |(_, bound)| *bound);
        assert!(entries <= bound, "{entries} entries in `{table}`, at most {bound}");
    }
}
