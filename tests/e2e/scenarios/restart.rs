//! The ledger can be lost: a restarted extender rebuilds it from the pods.

use std::time::Duration;

use crate::clock;
use crate::fleet::{A10, A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, scenario};
use crate::watching::is_bound;

#[test]
fn a_restarted_extender_has_the_same_ledger() {
    scenario("restart", |bed| async move {
        let fleet =
            Fleet::new().with("restart-a100", 2, (2, A100)).with("restart-a10", 1, (2, A10));
        let mut stage = bed.stage(Setup::of(fleet)).await;
        let plans = [
            PodPlan::fraction("third", "0.33333"),
            PodPlan::memory("memory", 5_000),
            PodPlan::memory("both", 2_000).annotated("gpu-fraction", "0.4"),
            PodPlan::fraction("pair", "0.5").annotated("gpu-fraction-num-devices", "2"),
            PodPlan::fraction("whole", "1"),
            PodPlan::fraction("ended", "0.2"),
        ];
        stage.cluster.add_pods(&plans).await;
        stage.watching.until_bound(plans.len(), Duration::from_secs(30)).await;
        stage.cluster.set_phase("ended", "Succeeded").await;
        stage.until_ledgers_agree().await;
        let before = stage.extender.allocated().await;
        stage.extender.kill();
        let took = stage.extender.start_again().await;
        stage.until_ledgers_agree().await;
        assert_eq!(stage.extender.allocated().await, before);
        // No call has come since: what is requested in this cluster was read from the pods there are.
        let stranded = stage.extender.metric("gpupack_fragmentation_ratio", "").await;
        assert!(stranded > 0.0, "whole GPUs are requested, and some have only a part free");
        stage.figure(&format!("ready {} ms after SIGKILL, same ledger", clock::ms(took)));
        // Six GPUs; what is left is not enough for seven whole ones, and exactly what it is.
        stage.cluster.add_pods(&[PodPlan::fraction("late", "0.25")]).await;
        let limit = Duration::from_secs(30);
        let waited =
            stage.watching.until("a new pod bound", limit, |pods| is_bound(pods, "late")).await;
        stage.figure(&format!(
            "a pod created after the restart is bound in {} ms",
            clock::ms(waited)
        ));
        stage.until_ledgers_agree().await;
        stage.judge().await;
    });
}
