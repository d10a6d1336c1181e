//! The cluster's own kube-scheduler with `scheduler-config/in-place.yaml`, without and with the webhook.

use std::time::Duration;

use serde_json::json;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::schedulers::SchedulerPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::{Pods, find, is_bound};
use crate::webhook::{Webhook, unconfigure};

/// Profile of the cluster's own scheduler.
const CLUSTER: &str = "default-scheduler";

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn in_place_only_pods_with_a_marker_reach_the_extender_and_the_webhook_marks_them() {
    scenario("in-place", |bed| async move {
        let plane = bed.plane;
        let names = json!([CLUSTER]);
        let setup = Setup {
            schedulers: vec![SchedulerPlan::in_place()],
            settings: json!({"scheduler_names": names}),
            ..Setup::of(Fleet::new().with("in-place", 2, (2, A100)))
        };
        let mut stage = bed.stage(setup).await;
        pods_without_a_marker_cause_no_call(&stage).await;
        stage.cluster.delete_all_pods().await;
        let webhook = json!({"take_over_whole_gpus": true});
        let settings = json!({"scheduler_names": names, "webhook": webhook});
        let webhook = Webhook::start(plane, &stage.cluster, settings).await;
        marked_and_converted(&stage).await;
        drop(webhook);
        unconfigure(&stage.cluster).await;
        stage.extender.kill();
        stage.cluster.add_pods(&[PodPlan::new("still").for_scheduler(CLUSTER)]).await;
        let what = "a pod without a marker bound while the extender is dead";
        let took = stage.watching.until(what, LIMIT, |pods| is_bound(pods, "still")).await;
        stage.figure(&format!("{what}, in {} ms", clock::ms(took)));
        stage.judge().await;
    });
}

async fn pods_without_a_marker_cause_no_call(stage: &Stage) {
    let marked: Vec<PodPlan> = (0..8)
        .map(|i| {
            let marker = ["gpupack.dev/gpu-share", "gpupack.dev/gpu-memory"][i % 2];
            let pod = PodPlan::fraction(format!("gpu-{i}"), "0.5").for_scheduler(CLUSTER);
            pod.limited(marker, "0")
        })
        .collect();
    stage.cluster.add_pods(&marked).await;
    stage.watching.until_bound(8, LIMIT).await;
    let queried = stage.extender.calls("filter").await;
    assert!(queried >= 8.0, "the extender was asked {queried} times about 8 pods");
    stage.cluster.add_pods(&[PodPlan::new("plain").for_scheduler(CLUSTER)]).await;
    stage.watching.until("the plain pod bound", LIMIT, |pods| is_bound(pods, "plain")).await;
    let again = stage.extender.calls("filter").await;
    assert!((again - queried).abs() < 0.5, "a call about a pod without a marker");
    stage.figure("8 pods with a marker placed, a pod without one bound without a call");
}

/// The webhook marks pods and converts whole GPUs.
async fn marked_and_converted(stage: &Stage) {
    let plans = [
        PodPlan::fraction("share", "0.5"),
        PodPlan::memory("memory", 4_096),
        PodPlan::new("whole").limited("nvidia.com/gpu", "2"),
    ];
    let plans = plans.map(|plan| plan.for_scheduler(CLUSTER));
    stage.cluster.add_pods(&plans).await;
    let all = |pods: &Pods| plans.iter().all(|plan| is_bound(pods, &plan.name));
    stage.watching.until("the marked pods bound", LIMIT, all).await;
    let whole = stage.watching.ask(|pods| find(pods, "whole").map(|seen| seen.devices().len()));
    assert_eq!(whole, Some(2), "as many as were requested by resource");
    stage.figure("a share, an amount of memory and two whole GPUs placed, no marker in a template");
    stage.until_ledgers_agree().await;
}
