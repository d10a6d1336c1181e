//! A pod that is force-deleted while its processes continue.

use std::time::Duration;

use serde_json::json;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, scenario};
use crate::watching::is_bound;

const LIMIT: Duration = Duration::from_secs(60);

/// How long the processes keep running.
const LINGER: Duration = Duration::from_secs(20);

#[test]
fn room_of_a_pod_deleted_by_force_is_free_when_its_processes_are_gone() {
    scenario("drains", |bed| async move {
        let linger = u64::try_from(LINGER.as_millis()).expect("some seconds");
        let fleet = Fleet::new().with("drains", 1, (1, A100)).lingering(linger);
        let settings = json!({"drain_seconds": 10});
        let stage = bed.stage(Setup { settings, ..Setup::of(fleet) }).await;
        stage.cluster.add_pods(&[PodPlan::fraction("first", "0.9")]).await;
        stage.watching.until("first bound", LIMIT, |pods| is_bound(pods, "first")).await;
        // Its process runs as soon as the agent has the reservation.
        tokio::time::sleep(Duration::from_secs(3)).await;
        stage.cluster.delete_pod("first").await;
        let deleted = clock::now();
        stage.cluster.add_pods(&[PodPlan::fraction("second", "0.9")]).await;
        let mut overdue = 0.0_f64;
        while deleted.elapsed() < LINGER - Duration::from_secs(2) {
            assert!(!stage.watching.ask(|pods| is_bound(pods, "second")), "beside processes");
            overdue = overdue.max(stage.extender.metric("gpupack_overdue_drains", "").await);
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        assert!((overdue - 1.0).abs() < 0.5, "{overdue} pods hold room after the drain time");
        stage.watching.until("second bound", LIMIT, |pods| is_bound(pods, "second")).await;
        stage.figure(&format!(
            "bound {} ms after the other was deleted, whose processes ran for {} ms",
            clock::ms(deleted.elapsed()),
            clock::ms(LINGER)
        ));
        stage.judge().await;
    });
}
