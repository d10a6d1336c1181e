//! A taint on GPU nodes, which only pods with a GPU of gpupack tolerate without saying so.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, scenario};
use crate::watching::{Pods, find, is_bound};
use crate::webhook::Webhook;

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn gpu_pods_alone_land_on_nodes_with_the_taint() {
    scenario("taints", |bed| async move {
        let plane = bed.plane;
        let stage = bed.stage(Setup::of(Fleet::new().with("taints", 1, (1, A100)))).await;
        let taint = json!({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"});
        let nodes: Api<Node> = Api::all(stage.cluster.client.clone());
        let patch = Patch::Merge(json!({"spec": {"taints": [taint]}}));
        let tainted = nodes.patch("taints-00", &PatchParams::default(), &patch).await;
        tainted.expect("nodes can be tainted");
        let early = PodPlan::fraction("early", "0.25");
        stage.cluster.add_pods(&[early]).await;
        stage
            .watching
            .until("no webhook, no toleration", LIMIT, |pods| kept_off(pods, "early"))
            .await;
        let settings = json!({"webhook": {"tolerated_taints": ["nvidia.com/gpu"]}});
        let _webhook = Webhook::start(plane, &stage.cluster, settings).await;
        let plans = [PodPlan::fraction("gpu", "0.25"), PodPlan::new("beside")];
        stage.cluster.add_pods(&plans).await;
        stage.watching.until("the GPU pod bound", LIMIT, |pods| is_bound(pods, "gpu")).await;
        stage.watching.until("no GPU, no toleration", LIMIT, |pods| kept_off(pods, "beside")).await;
        stage.figure("a GPU pod placed on a node with a taint, a pod without a GPU kept off it");
        stage.judge().await;
    });
}

/// Whether kube-scheduler said that the taint keeps the pod off the node.
fn kept_off(pods: &Pods, name: &str) -> bool {
    let status = find(pods, name).and_then(|seen| seen.pod.status.as_ref());
    let conditions = status.and_then(|status| status.conditions.as_ref());
    let mut messages = conditions.into_iter().flatten().filter_map(|one| one.message.as_deref());
    messages.any(|message| message.contains("untolerated taint"))
}
