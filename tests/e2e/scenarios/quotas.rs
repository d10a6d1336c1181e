//! What GPU pods count against a ResourceQuota of a real API server, in each form of request.
//!
//! There is no controller manager here: the test writes the status of each quota, as that would.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::clock;
use crate::cluster::SeenEvent;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::is_bound;
use crate::webhook::{Webhook, dry_run, reported};

const LIMIT: Duration = Duration::from_secs(30);

/// How many pods of a form a quota has room for.
const ADMITTED: u64 = 2;

const MARKERS: [&str; 3] = ["gpupack.dev/gpu-share", "gpupack.dev/gpu-memory", "gpupack.dev/gpus"];

#[test]
fn no_form_of_request_goes_around_a_quota() {
    scenario("quotas", |bed| async move {
        let plane = bed.plane;
        let quota = json!({
            "required": true, "reference_memory_mib": 40_000,
            "models": {"A10": {"memory_mib": 20_000, "weight": 0.5}},
        });
        let pools = json!({"slots": {"replicas": 4}});
        let settings = json!({"quota": quota, "pools": pools});
        let setup = Setup {
            settings: settings.clone(),
            ..Setup::of(Fleet::new().with("quotas", 1, (4, A100)))
        };
        let stage = bed.stage(setup).await;
        // Older than the webhook: without markers.
        stage.cluster.add_pods(&[PodPlan::fraction("older", "0.25")]).await;
        refused(&stage, "older", "`gpupack.dev/gpu-share` is `0`").await;
        let _webhook = Webhook::start(plane, &stage.cluster, settings).await;
        let mut tried = 0;
        for (form, (plan, counts)) in forms().into_iter().enumerate() {
            for (marker, count) in MARKERS.into_iter().zip(counts) {
                admitted_up_to(&stage, form, &plan, (marker, count)).await;
                tried += 1;
            }
        }
        stage.figure(&format!(
            "{} forms of request, each under quotas on {} markers: in all {tried} cases as many pods as \
             the quota allows, and no more",
            forms().len(),
            MARKERS.len(),
        ));
        edited(&stage).await;
        stage.cluster.delete_all_pods().await;
        stage.judge().await;
    });
}

/// Each form of request, and what one pod counts: share, memory, devices.
fn forms() -> Vec<(PodPlan, [u64; 3])> {
    let new = || PodPlan::new("p");
    vec![
        (PodPlan::fraction("p", "0.5"), [500_000, 20_000, 1]),
        (
            PodPlan::fraction("p", "0.00001").annotated("gpu-fraction-num-devices", "3"),
            [750_000, 30_000, 3],
        ),
        (PodPlan::memory("p", 10_000), [250_000, 10_000, 1]),
        (PodPlan::memory("p", 64).annotated("gpu-fraction-num-devices", "2"), [500_000, 20_000, 2]),
        (PodPlan::fraction("p", "0.1").annotated("gpu-memory", "30000"), [750_000, 30_000, 1]),
        (
            PodPlan::memory("p", 64).annotated("gpupack.dev/isolation", "hardware"),
            [142_858, 5_000, 1],
        ),
        (
            PodPlan::memory("p", 64)
                .annotated("gpupack.dev/isolation", "hardware")
                .annotated("gpupack.dev/gpu-model", "MIG 3g.20gb"),
            [428_572, 20_480, 1],
        ),
        (
            PodPlan::fraction("p", "1").annotated("gpupack.dev/gpu-model", "A10"),
            [1_000_000, 20_000, 1],
        ),
        (new().limited("nvidia.com/gpu", "2"), [2_000_000, 80_000, 2]),
        (new().limited("nvidia.com/mig-1g.5gb", "1"), [142_858, 5_120, 1]),
        (new().limited("nvidia.com/gpu.shared", "1"), [250_000, 10_000, 1]),
        (
            new().annotated("nvidia.com/container.main.gpu-memory.request", "1Gi"),
            [250_000, 10_000, 1],
        ),
        // Its own markers are those of less.
        (
            PodPlan::fraction("p", "0.5").limited(MARKERS[0], "1").limited(MARKERS[2], "0"),
            [500_000, 20_000, 1],
        ),
    ]
}

/// A quota for two pods admits two, and one that is less by one admits one.
async fn admitted_up_to(stage: &Stage, form: usize, plan: &PodPlan, (marker, count): (&str, u64)) {
    let api = stage.cluster.pods();
    let key = format!("requests.{marker}");
    for (hard, most) in [(ADMITTED * count, ADMITTED), (ADMITTED * count - 1, ADMITTED - 1)] {
        let quota = format!("form-{form}-{}-{most}", &marker["gpupack.dev/".len()..]);
        give(stage, &quota, &key, hard).await;
        let mut admitted = Vec::new();
        let refusal = loop {
            let mut pod = json!(plan.to_pod());
            let name = format!("{quota}-{}", admitted.len());
            pod["metadata"]["name"] = name.clone().into();
            pod["spec"]["schedulingGates"] = json!([{"name": "e2e/gate"}]);
            let pod: Pod = serde_json::from_value(pod).expect("still a pod");
            match api.create(&PostParams::default(), &pod).await {
                Ok(_) => admitted.push(name),
                Err(error) => break reported(&error),
            }
            assert!(admitted.len() as u64 <= most, "{plan:?} under {key} {hard}: none is refused");
        };
        let is_by_quota = refusal.contains("exceeded quota") && refusal.contains(&key);
        assert!(is_by_quota, "{plan:?} under {key} {hard}: {refusal}");
        assert_eq!(admitted.len() as u64, most, "{plan:?} under {key} {hard}: {refusal}");
        for name in admitted {
            stage.cluster.delete_pod(&name).await;
        }
        take(stage, &quota).await;
    }
}

fn quotas(stage: &Stage) -> Api<ResourceQuota> {
    Api::namespaced(stage.cluster.client.clone(), &stage.cluster.namespace)
}

/// Makes a quota and waits until the API server follows it.
async fn give(stage: &Stage, name: &str, key: &str, hard: u64) {
    let hard: Value = json!({key: hard.to_string()});
    let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name},
        "spec": {"hard": hard}});
    let quota: ResourceQuota = serde_json::from_value(quota).expect("a quota");
    quotas(stage).create(&PostParams::default(), &quota).await.expect("a good quota");
    let status = json!({"status": {"hard": hard, "used": {key: "0"}}});
    let written =
        quotas(stage).patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await;
    written.expect("a good status");
    let large = PodPlan::new("large").limited("nvidia.com/gpu", "64").to_pod();
    let follows = |refusal: Option<String>| {
        refusal.is_some_and(|text| text.contains(&format!("exceeded quota: {name},")))
    };
    until(stage, &large, follows).await;
}

/// Deletes it and waits until the API server follows.
async fn take(stage: &Stage, name: &str) {
    quotas(stage).delete(name, &DeleteParams::default()).await.expect("it is there");
    let large = PodPlan::new("large").limited("nvidia.com/gpu", "64").to_pod();
    until(stage, &large, |refusal| refusal.is_none()).await;
}

async fn until(stage: &Stage, pod: &Pod, is_met: impl Fn(Option<String>) -> bool) {
    let started = clock::now();
    loop {
        let refusal = dry_run(&stage.cluster.pods(), pod).await.err();
        if is_met(refusal.clone()) {
            return;
        }
        assert!(started.elapsed() < LIMIT, "the API server does not follow: {refusal:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// An edit of the annotations after creation gets a pod nothing.
async fn edited(stage: &Stage) {
    let api = stage.cluster.pods();
    let mut pods = Vec::new();
    for name in ["edited", "untouched"] {
        let mut pod = json!(PodPlan::fraction(name, "0.25").to_pod());
        pod["spec"]["schedulingGates"] = json!([{"name": "e2e/gate"}]);
        let pod: Pod = serde_json::from_value(pod).expect("still a pod");
        pods.push(api.create(&PostParams::default(), &pod).await.expect("a good pod"));
    }
    let patch = async |name: &str, patch: Value| {
        let patched = api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        patched.expect("nothing forbids it");
    };
    patch("edited", json!({"metadata": {"annotations": {"gpu-fraction": "1"}}})).await;
    for name in ["edited", "untouched"] {
        patch(name, json!({"spec": {"schedulingGates": null}})).await;
    }
    stage.watching.until("untouched bound", LIMIT, |pods| is_bound(pods, "untouched")).await;
    refused(stage, "edited", "`gpupack.dev/gpu-share` is `250000`").await;
    assert!(!stage.watching.ask(|pods| is_bound(pods, "edited")));
    stage.figure("a pod whose annotations were raised after its creation is not placed");
}

async fn refused(stage: &Stage, name: &str, part: &str) {
    let started = clock::now();
    loop {
        let events = stage.cluster.events().await;
        let is_it = |event: &&SeenEvent| event.pod == name && event.reason == "GpuRequestRefused";
        if let Some(event) = events.iter().find(is_it) {
            assert!(event.message.contains(part), "{}", event.message);
            assert!(event.message.contains("create the pod again"), "{}", event.message);
            return;
        }
        assert!(started.elapsed() < LIMIT, "no event about {name}: {events:#?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
