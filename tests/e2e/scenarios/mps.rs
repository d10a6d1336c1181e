//! Shares under MPS, as a real API server takes and keeps them.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::find;
use crate::webhook::{Webhook, policies, reported};

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn shares_become_clients_with_the_limits_of_their_placement() {
    scenario("mps", |bed| async move {
        let plane = bed.plane;
        let webhook = json!({"memory_limit": "mps", "mps_thread_percentage": "share"});
        let settings = json!({"webhook": webhook});
        let fleet = Fleet::new().with("mps", 1, (3, A100));
        let stage = bed.stage(Setup { settings: settings.clone(), ..Setup::of(fleet) }).await;
        let _webhook = Webhook::start(plane, &stage.cluster, settings).await;
        policies(&stage.cluster).await;
        let plans = [
            PodPlan::fraction("part", "0.25"),
            PodPlan::memory("memory", 4_096),
            PodPlan::fraction("whole", "1"),
        ];
        stage.cluster.add_pods(&plans).await;
        stage.watching.until_bound(plans.len(), LIMIT).await;
        let part = stored(&stage, "part");
        let mounts = &part["spec"]["containers"][0]["volumeMounts"];
        assert_eq!(
            *mounts,
            json!([
                {"name": "gpupack-mps", "mountPath": "/run/gpupack-mps",
                 "subPathExpr": "$(GPUPACK_DEVICE_UUIDS)/pipe"},
                {"name": "gpupack-mps", "mountPath": "/dev/shm", "subPath": "shm"},
            ])
        );
        let limits = |pod: &Value| {
            let written = &pod["metadata"]["annotations"];
            ["memory-limit", "thread-percentage"]
                .map(|key| written[format!("placed.gpupack.dev/mps-{key}")].clone())
        };
        // A quarter of 81320 MiB, and 4096 of them are 5 %.
        assert_eq!(limits(&part), [json!("0=20330M"), json!("25")]);
        assert_eq!(limits(&stored(&stage, "memory")), [json!("0=4096M"), json!("5")]);
        assert_eq!(stored(&stage, "whole")["spec"]["volumes"], Value::Null);
        stage.figure("2 shares are clients of MPS with limits of their own, a whole GPU is none");
        refused(&stage).await;
        stage.judge().await;
    });
}

/// A pod as the watch shows it.
fn stored(stage: &Stage, name: &str) -> Value {
    let pod = stage.watching.ask(|pods| find(pods, name).map(|seen| seen.pod.clone()));
    json!(pod.expect("it is there"))
}

async fn refused(stage: &Stage) {
    let api = stage.cluster.pods();
    let share = || json!(PodPlan::fraction("bad", "0.5").to_pod());
    let mut own = share();
    own["spec"]["containers"][0]["env"] =
        json!([{"name": "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "value": "0=80G"}]);
    let mut folder = share();
    folder["spec"]["volumes"] = json!([{"name": "v", "hostPath": {"path": "/run/gpupack/mps"}}]);
    let several =
        json!(PodPlan::fraction("bad", "0.5").annotated("gpu-fraction-num-devices", "2").to_pod());
    for (pod, part) in
        [(own, "remove the variable"), (folder, "remove it"), (several, "a part of one GPU")]
    {
        let pod: Pod = serde_json::from_value(pod).expect("still a pod");
        let message = api.create(&PostParams::default(), &pod).await.map_err(|e| reported(&e));
        let message = message.expect_err(part);
        assert!(message.contains(part), "{message}");
    }
    let parameters = PatchParams::default();
    let mount = json!([{"name": "gpupack-mps", "mountPath": "/all"}]);
    let debug = json!({"name": "debug", "image": "local/none", "volumeMounts": mount});
    let patch = Patch::Strategic(json!({"spec": {"ephemeralContainers": [debug]}}));
    let added = api.patch_ephemeral_containers("part", &parameters, &patch).await;
    let message = added.map_err(|error| reported(&error)).expect_err("it would see all pipes");
    assert!(message.contains("container `debug` mounts"), "{message}");
    let keys = json!({"placed.gpupack.dev/mps-memory-limit": "0=80000M"});
    let patch = Patch::Merge(json!({"metadata": {"annotations": keys}}));
    let widened = api.patch("part", &parameters, &patch).await;
    let message = widened.map_err(|error| reported(&error)).expect_err("it is gpupack's");
    assert!(message.contains("written only by gpupack"), "{message}");
    stage.figure("3 pods, a debug container and an edit that would widen a limit are refused");
}
