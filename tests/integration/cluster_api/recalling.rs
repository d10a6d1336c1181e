//! Binds that wait for guests, which are called home and do not leave in time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use control::room::standing::{StandingHolds, StandingRules};
use engine::hardware::pool::{Borrow, ConfiguredIsolation, PoolRule, PoolRules};
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::model::reservation::{BorrowedMemory, Guest, PlacedDevice, Placement, PodRef, Tenure};
use engine::model::team::TeamShare;
use kube_api::config::file::Config;
use kube_api::config::pods::quota::SharesConfig;
use kube_api::config::preemption::PreemptionConfig;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::pod::watch::Sink;
use serde_json::{Value, json};
use wire::ids::{DeviceId, NodeName, PodUid, PoolName};
use wire::units::{Demand, MemMib, Share};

use super::binding::{Bed, pod_of};
use crate::harness::fake_api_server::Fake;

fn gpu(at: usize, id: &str) -> Value {
    json!({"id": id, "index": at, "model": "NVIDIA L4", "memoryMib": 23_000, "reservedMib": 0,
        "kind": "Gpu", "healthy": true})
}

const TEAM: TeamShare =
    TeamShare { guaranteed: Share::ZERO, at_most: Some(Share::from_millionths(4_000_000)) };

/// Two GPUs of a pool that lends, of a team with a limit; binds wait so long for guests.
async fn lending(fake: &Fake, recall: Duration) -> Bed {
    let lends = PoolRule { borrow: Borrow::Compute, ..PoolRule::default() };
    let pools = PoolRules::new([(PoolName::new(""), lends)]);
    let shares = SharesConfig::of([("team-a".to_owned(), TEAM)].into_iter());
    let config = Config { recall, pools, shares, ..Config::default() };
    Bed::with(fake, config, &json!([gpu(0, "GPU-a"), gpu(1, "GPU-b")])).await
}

/// The placement of a pod that has this part of one GPU of [`gpu`], and runs on the other one.
pub(super) fn guest_placement(millionths: u64) -> Placement {
    let id = |name: &str| DeviceId::new(name).unwrap();
    let share = Share::from_millionths(millionths);
    let demand = Demand { memory: share.of(MemMib::new(23_000)), share };
    Placement {
        node: NodeName::new("n1"),
        devices: vec![PlacedDevice { id: id("GPU-a"), demand }],
        isolation: ConfiguredIsolation::None,
        guest: Some(Guest { on: id("GPU-b"), spot: None, leaving: None }),
        spots: Vec::new(),
    }
}

/// A pod that has three quarters of one GPU, and runs on the other one.
fn guest(bed: &Bed) -> PodFact {
    let placement = guest_placement(750_000);
    let pod = PodRef { uid: PodUid::new("guest"), name: "team-a/guest".into() };
    let seen = SeenPod::from_json(&pod_named("guest", 0).to_string()).unwrap();
    PodFact {
        pod,
        node: Some(NodeName::new("n1")),
        host: seen.host,
        is_terminal: false,
        wants_gpu: true,
        request: bed.app.query(&seen).and_then(|query| query.gpu).map(Arc::new),
        placement: Some(placement),
        bound_by_us: false,
        moves: MoveFact::default(),
        tenure: Tenure::default(),
    }
}

/// A pod that waits for a whole GPU.
fn pod_named(name: &str, priority: i32) -> Value {
    json!({"metadata": {"uid": name, "namespace": "team-a", "name": name, "resourceVersion": "7",
            "annotations": {"gpu-fraction": "1"}},
        "spec": {"schedulerName": "gpupack", "priority": priority,
            "containers": [{"name": "main"}]}})
}

/// One step of the loop that keeps room. Returns for whom it is kept then.
fn step(holds: &mut StandingHolds, bed: &Bed) -> BTreeSet<PodUid> {
    let (app, at_most) = (&bed.app, Share::WHOLE);
    let preemption = PreemptionConfig { enabled: false, ..PreemptionConfig::default() };
    let rules = StandingRules { after: Duration::from_secs(1), at_most, preemption };
    let facts = (&app.waiting, &app.room.preemptors, &*app.ledger, &app.room.bound_groups);
    holds.step(facts, rules, (app.clock.now(), 1_000_000));
    kept(bed)
}

fn kept(bed: &Bed) -> BTreeSet<PodUid> {
    bed.app.ledger.standing_nodes().into_keys().collect()
}

/// The loop that keeps room knows nothing of what a bind keeps beside it, and would never end that.
#[tokio::test]
async fn room_that_is_given_up_while_its_bind_waits_for_guests_is_not_kept_again() {
    for is_given_up in [false, true] {
        let fake = Fake::with_pod();
        let bed = lending(&fake, Duration::from_secs(1)).await;
        // All is taken, and room is kept for the pod.
        let now = bed.app.clock.now();
        for name in ["a", "b"] {
            let other = SeenPod::from_json(&pod_named(name, 0).to_string()).unwrap();
            let query = bed.app.query(&other).unwrap();
            bed.app.ledger.reserve(&other.pod, "n1", &query, now).unwrap();
        }
        assert_eq!(bed.filter(&pod_of(&fake)).await, json!([]));
        let mut holds = StandingHolds::default();
        let own = BTreeSet::from([PodUid::new("u1")]);
        assert_eq!(step(&mut holds, &bed), own);
        // Now only a guest is in its way.
        for name in ["a", "b"] {
            bed.app.ledger.forget(&PodUid::new(name));
        }
        bed.app.ledger.see_pod(&guest(&bed), now);
        assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
        let first = pod_named("first", 5);
        let meanwhile = async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            assert_eq!(kept(&bed), BTreeSet::new(), "the bind has taken it");
            if is_given_up {
                bed.app.pod(&SeenPod::from_json(&first.to_string()).unwrap());
                assert_eq!(bed.filter(&first).await, json!([]));
            }
            step(&mut holds, &bed);
        };
        let (error, ()) = tokio::join!(bed.bind(), meanwhile);
        assert!(error.contains("are being moved"), "{error}");
        let expected = if is_given_up { BTreeSet::from([PodUid::new("first")]) } else { own };
        assert_eq!(kept(&bed), expected);
        // The guest has one of four, and what is kept is half a GPU or a whole one.
        let left = if is_given_up { 2_000_000 } else { 2_500_000 };
        assert_eq!(bed.app.ledger.teams.left("team-a"), Some(left));
        bed.app.ledger.audit().unwrap();
    }
}

#[tokio::test]
async fn a_bind_that_waits_for_guests_ends_if_its_gpu_is_replaced() {
    let fake = Fake::with_pod();
    let bed = lending(&fake, Duration::from_secs(2)).await;
    // A quarter of GPU-a is left beside the guest's home, so the pod gets GPU-b, where the guest is.
    bed.app.ledger.see_pod(&guest(&bed), bed.app.clock.now());
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    let comes_home = async || {
        let state = bed.text("/v1/state?node=n1").await;
        let state: Value = serde_json::from_str(&state).unwrap();
        let tenant = &state["nodes"][0]["devices"][0]["tenants"][0];
        assert_eq!(tenant["runsOn"], json!("GPU-b"), "{state:#}");
        tenant["comesHome"].clone()
    };
    assert_eq!(comes_home().await, Value::Null);
    let meanwhile = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(comes_home().await, json!(true));
        let uses = ["GPU-a", "GPU-c"]
            .map(|id| json!({"id": id, "usedMib": 0, "healthy": true, "processes": []}));
        let hello = json!({
            "apiVersion": "gpupack.dev/v1alpha1", "agent": "agent-of-n1", "sequence": 2,
            "inventory": [gpu(0, "GPU-a"), gpu(1, "GPU-c")], "devices": uses,
        });
        bed.send("PUT", "/v1/nodes/n1/report", &hello).await;
    };
    let (error, ()) = tokio::join!(bed.bind(), meanwhile);
    assert!(error.contains("no GPU on the node"), "{error}");
    assert_eq!(bed.state(), None, "its reservation is taken back");
    bed.app.ledger.audit().unwrap();
}

/// What it uses above its request goes with it.
#[tokio::test]
async fn a_bind_waits_for_a_guest_whose_memory_could_not_be_taken_back() {
    let fake = Fake::with_pod();
    let bed = lending(&fake, Duration::from_secs(3)).await;
    let uid = PodUid::new("guest");
    bed.app.ledger.see_pod(&guest(&bed), bed.app.clock.now());
    bed.app.ledger.note_borrowed(&uid, BorrowedMemory::Kept);
    assert!(bed.app.ledger.stays_with_memory(&uid), "nobody calls it home");
    assert_eq!(bed.filter(&pod_of(&fake)).await, json!(["n1"]));
    let meanwhile = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(!bed.app.ledger.stays_with_memory(&uid), "it is called home");
        bed.app.ledger.end_pod(&uid, bed.app.clock.now());
        for sequence in 2..4 {
            let uses = ["GPU-a", "GPU-b"]
                .map(|id| json!({"id": id, "usedMib": 0, "healthy": true, "processes": []}));
            let report = json!({
                "apiVersion": "gpupack.dev/v1alpha1", "agent": "agent-of-n1", "session": 1,
                "sequence": sequence, "devices": uses,
            });
            bed.send("PUT", "/v1/nodes/n1/report", &report).await;
        }
    };
    let (error, ()) = tokio::join!(bed.bind(), meanwhile);
    assert_eq!(error, "");
    bed.app.ledger.audit().unwrap();
}

#[tokio::test]
async fn explain_says_who_goes_home_for_a_pod_and_how_much_a_guest_may_use() {
    let fake = Fake::with_pod();
    let bed = lending(&fake, Duration::from_secs(1)).await;
    let explain = async |pod: &str| {
        let text = bed.text(&format!("/v1/explain?pod=team-a/{pod}")).await;
        let found: Value = serde_json::from_str(&text).unwrap();
        (found["verdict"].as_str().unwrap().to_owned(), found["restarts"].clone())
    };
    bed.filter(&pod_of(&fake)).await;
    let (verdict, restarts) = explain("infer").await;
    assert!(!verdict.contains("restarted") && restarts == 0, "{verdict}");

    let mut own = pod_named("guest", 0);
    own["metadata"]["annotations"] = json!({"gpu-fraction": "0.75", "gpu-fraction.limit": "1",
        "gpupack.dev/movable": "restart"});
    let own = SeenPod::from_json(&own.to_string()).unwrap();
    let request = bed.app.query(&own).and_then(|query| query.gpu).map(Arc::new);
    bed.app.ledger.see_pod(&PodFact { request, ..guest(&bed) }, bed.app.clock.now());
    bed.filter(&pod_of(&fake)).await;
    let (verdict, restarts) = explain("infer").await;
    assert!(verdict.contains("a pod that borrows its room is restarted first"), "{verdict}");
    assert_eq!(restarts, 1);
    let (verdict, _) = explain("guest").await;
    for part in [
        "GPU-a (Confirmed); it runs on GPU-b until another pod needs that",
        "; while that is free there, it may use 1 of the compute and 17250 MiB",
    ] {
        assert!(verdict.contains(part), "{verdict}");
    }
    let infer = SeenPod::from_json(&pod_of(&fake).to_string()).unwrap();
    let query = bed.app.query(&infer).unwrap();
    bed.app.ledger.reserve(&infer.pod, "n1", &query, bed.app.clock.now()).unwrap();
    let (verdict, _) = explain("guest").await;
    assert!(verdict.contains("; it is being moved there from GPU-b"), "{verdict}");
}
