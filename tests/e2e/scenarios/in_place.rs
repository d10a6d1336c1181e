//! The cluster's own kube-scheduler with `scheduler-config/in-place.yaml`.

use std::time::Duration;

use serde_json::json;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::schedulers::SchedulerPlan;
use crate::testbed::{Setup, scenario};
use crate::watching::is_bound;

/// Profile of the cluster's own scheduler.
const CLUSTER: &str = "default-scheduler";

#[test]
fn in_place_only_pods_with_a_marker_reach_the_extender() {
    scenario("in-place", |bed| async move {
        let setup = Setup {
            schedulers: vec![SchedulerPlan::in_place()],
            settings: json!({"scheduler_names": [CLUSTER]}),
            ..Setup::of(Fleet::new().with("in-place", 2, (2, A100)))
        };
        let mut stage = bed.stage(setup).await;
        let plain = |name: &str| PodPlan::new(name).for_scheduler(CLUSTER);
        let marked: Vec<PodPlan> = (0..8)
            .map(|i| {
                let marker = ["gpupack.dev/gpu-share", "gpupack.dev/gpu-memory"][i % 2];
                let pod = PodPlan::fraction(format!("gpu-{i}"), "0.5").for_scheduler(CLUSTER);
                pod.limited(marker, "0")
            })
            .collect();
        stage.cluster.add_pods(&marked).await;
        stage.watching.until_bound(8, Duration::from_secs(30)).await;
        let queried = stage.extender.calls("filter").await;
        assert!(queried >= 8.0, "the extender was asked {queried} times about 8 pods");
        stage.cluster.add_pods(&[plain("plain")]).await;
        let limit = Duration::from_secs(30);
        stage.watching.until("the plain pod bound", limit, |pods| is_bound(pods, "plain")).await;
        let again = stage.extender.calls("filter").await;
        assert!((again - queried).abs() < 0.5, "a call about a pod without a marker");
        stage.figure("8 pods with a marker placed, a pod without one bound without a call");
        stage.extender.kill();
        stage.cluster.add_pods(&[plain("still")]).await;
        let what = "a pod without a marker bound while the extender is dead";
        let took = stage.watching.until(what, limit, |pods| is_bound(pods, "still")).await;
        stage.figure(&format!("{what}, in {} ms", clock::ms(took)));
        stage.judge().await;
    });
}
