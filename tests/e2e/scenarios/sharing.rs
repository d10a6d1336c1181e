//! Several pods on one GPU, and when the room of an ended one can be allocated again.

use std::time::Duration;

use serde_json::json;

use crate::checker::{SLOT, SLOTS};
use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::{find, is_bound};

/// Processes live that long after their pod, and so long after the drain time.
const LINGER: Duration = Duration::from_secs(13);

/// `drain_seconds`.
const DRAIN_SECONDS: u64 = 10;
/// A simulated agent learns that late, at worst, that a pod is gone.
const REPORT_PERIOD: Duration = Duration::from_secs(1);
/// From the processes' end to the next pod's bind.
const LIMIT: Duration = Duration::from_secs(2);

#[test]
fn a_fourth_pod_waits_until_the_processes_of_another_have_ended() {
    scenario("sharing", |bed| async move {
        let linger = u64::try_from(LINGER.as_millis()).expect("some seconds");
        let fleet = Fleet::new().with("sharing", 1, (1, A100)).lingering(linger);
        let settings = json!({"drain_seconds": DRAIN_SECONDS});
        let stage = bed.stage(Setup { settings, ..Setup::of(fleet) }).await;
        let three = [("a", "0.2"), ("b", "0.5"), ("c", "0.3")];
        let plans = three.map(|(name, fraction)| PodPlan::fraction(name, fraction));
        stage.cluster.add_pods(&plans).await;
        stage.watching.until_bound(3, Duration::from_secs(30)).await;
        let device = stage.fleet.uuids("sharing-00")[0].to_owned();
        for (name, _) in three {
            let same =
                stage.watching.ask(|pods| find(pods, name).map(|seen| seen.devices() == [&device]));
            assert_eq!(same, Some(true), "{name} is not on {device}");
        }
        stage.figure("0.2 + 0.5 + 0.3 share one GPU");
        fourth_waits(&stage).await;
        stage.judge().await;
    });
}

#[test]
fn slots_of_an_isolated_gpu_are_allocated_and_isolation_is_kept() {
    scenario("slots", |bed| async move {
        let fleet = Fleet::new().with("slots", 1, (1, A100));
        let settings = json!({"pools": {"": {"replicas": SLOTS, "enforcement": "mps"}}});
        let stage = bed.stage(Setup { settings, ..Setup::of(fleet) }).await;
        let slot = |name: &str| PodPlan::new(name).limited(SLOT, "1");
        let isolated = |name: &str, fraction, isolation| {
            PodPlan::fraction(name, fraction).annotated("gpupack.dev/isolation", isolation)
        };
        let plans = [
            slot("one"),
            slot("two"),
            PodPlan::fraction("three", "0.25"),
            isolated("four", "0.25", "memory"),
        ];
        stage.cluster.add_pods(&plans).await;
        stage.watching.until_bound(4, Duration::from_secs(30)).await;
        stage.figure("four slots of one GPU: two by resource, two by fraction");
        stage.cluster.add_pods(&[slot("fifth"), isolated("alone", "0.5", "hardware")]).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        for name in ["fifth", "alone"] {
            assert!(!stage.watching.ask(|pods| is_bound(pods, name)), "{name} is bound");
        }
        let events = stage.cluster.events().await;
        let reported = |name: &str, part: &str| {
            let mut of_pod = events.iter().filter(|event| event.pod == name);
            assert!(of_pod.any(|event| event.message.contains(part)), "{name}: {part}");
        };
        reported("alone", "no hardware isolation for part of a GPU");
        reported("four", "MPS is configured to limit the memory of each tenant of the GPU");
        let deleted = clock::now();
        stage.cluster.delete_pod("one").await;
        stage.watching.until("the slot is reused", LIMIT * 3, |pods| is_bound(pods, "fifth")).await;
        let waited = clock::ms(deleted.elapsed());
        stage.figure(&format!("a slot is reused {waited} ms after its pod was deleted"));
        stage.judge().await;
    });
}

async fn fourth_waits(stage: &Stage) {
    stage.cluster.add_pods(&[PodPlan::fraction("d", "0.1")]).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!stage.watching.ask(|pods| is_bound(pods, "d")), "bound without room");
    // By force, while its process runs.
    let deleted = clock::now();
    stage.cluster.delete_pod("a").await;
    let mut overdue = 0.0_f64;
    while deleted.elapsed() < LINGER - REPORT_PERIOD {
        assert!(!stage.watching.ask(|pods| is_bound(pods, "d")), "beside processes");
        let now = stage.extender.metric("gpupack_overdue_drains", "").await;
        let is_early = deleted.elapsed() < Duration::from_secs(DRAIN_SECONDS);
        assert!(!is_early || now < 0.5, "{now} pods hold room too long within the drain time");
        overdue = overdue.max(now);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!((overdue - 1.0).abs() < 0.5, "{overdue} pods hold room after the drain time");
    let late = LINGER + REPORT_PERIOD + LIMIT;
    stage.watching.until("the fourth pod bound", late, |pods| is_bound(pods, "d")).await;
    let waited = deleted.elapsed();
    assert!(waited >= LINGER, "bound {waited:?} after the deletion: the processes still ran");
    let after = waited.saturating_sub(LINGER);
    stage.figure(&format!(
        "0.1 waited for processes that ran {} ms after their pod, and was bound {} ms later",
        LINGER.as_millis(),
        clock::ms(after)
    ));
}
