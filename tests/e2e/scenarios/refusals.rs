//! Pods that cannot be placed: a reason that does not change, an event, and no hot loop.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::json;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::{Pods, evicted, is_bound};

/// Requests that must be refused, with the key that the refusal must name.
fn refusable() -> Vec<(PodPlan, &'static str)> {
    let fraction = |name: &str, value: &str| (PodPlan::fraction(name, value), "gpu-fraction");
    let memory =
        |name: &str, value: &str| (PodPlan::new(name).annotated("gpu-memory", value), "gpu-memory");
    let half = |name: &str, key: &'static str, value: &str| {
        (PodPlan::fraction(name, "0.5").annotated(key, value), key)
    };
    vec![
        fraction("above-one", "1.5"),
        fraction("zero", "0"),
        fraction("word", "half"),
        fraction("precise", "0.123456"),
        fraction("exponent", "5e-1"),
        memory("unit", "8Gi"),
        memory("negative", "-5"),
        half("no-devices", "gpu-fraction-num-devices", "0"),
        half("container", "gpu-fraction-container-name", "other"),
        half("typo", "gpupack.dev/gpu-modle", "A100"),
        (PodPlan::new("count-alone").annotated("gpu-fraction-num-devices", "2"), "num-devices"),
        half("limit", "gpu-fraction.limit", "0.25"),
        half("rival", "kai.scheduler/container.main.gpu-memory.portion.limit", "0.8"),
        memory("tiny", "63"),
    ]
}

#[test]
fn pods_that_cannot_be_placed_are_told_why_and_cause_no_loop() {
    scenario("refusals", |bed| async move {
        let settings = json!({"other_resources": ["nvidia.com/hostdev"]});
        let fleet = Fleet::new().with("refusals", 2, (2, A100));
        let mut stage = bed.stage(Setup { settings, ..Setup::of(fleet) }).await;
        bad_annotations(&stage).await;
        emptied(&stage).await;
        resources_that_kube_scheduler_counts(&stage).await;
        emptied(&stage).await;
        stage.stop_gpupack();
        stage.start_gpupack(&json!({"preemption": {"enabled": false}})).await;
        gpus_full_of_less_important_pods(&stage).await;
        stage.judge().await;
    });
}

async fn emptied(stage: &Stage) {
    stage.cluster.delete_all_pods().await;
    let all_gone = |pods: &Pods| pods.values().all(|seen| seen.gone.is_some());
    stage.watching.until("all pods gone", Duration::from_secs(30), all_gone).await;
    stage.watching.forget_gone();
    stage.until_ledgers_agree().await;
}

/// Each is refused with an event, and without a loop.
async fn bad_annotations(stage: &Stage) {
    let refusable = refusable();
    let plans: Vec<PodPlan> = refusable.iter().map(|(plan, _)| plan.clone()).collect();
    stage.cluster.add_pods(&plans).await;
    let calls = quiet_calls(stage).await;
    let most = 2.0 * plans.len() as f64;
    let (all, pods) = (stage.extender.calls("filter").await, plans.len());
    stage.figure(&format!(
        "{pods} refused pods: {all} filter calls in all, {calls} of them in the last 10 s"
    ));
    assert!(calls <= most, "{calls} filter calls in 10 s: a hot loop");
    for (plan, key) in &refusable {
        assert!(!stage.watching.ask(|pods| is_bound(pods, &plan.name)), "{} bound", plan.name);
        reported_why(stage, &plan.name, key).await;
    }
    stage.cluster.add_pods(&[PodPlan::fraction("good", "0.5")]).await;
    let limit = Duration::from_secs(30);
    let took = stage.watching.until("a good pod bound", limit, |pods| is_bound(pods, "good")).await;
    stage.figure(&format!("a good pod is bound beside them in {} ms", clock::ms(took)));
}

/// The shipped configuration leaves to gpupack what it serves, and counts the rest of NVIDIA's group.
async fn resources_that_kube_scheduler_counts(stage: &Stage) {
    let half = |name: &str| PodPlan::fraction(name, "0.5");
    stage
        .cluster
        .add_pods(&[
            half("network").limited("nvidia.com/hostdev", "1"),
            PodPlan::new("instance").limited("nvidia.com/mig-1g.10gb.me", "1"),
            PodPlan::new("whole").limited("nvidia.com/gpu", "1"),
            PodPlan::new("hami")
                .limited("nvidia.com/gpu", "1")
                .limited("nvidia.com/gpumem", "4096"),
            half("limited").limited("koordinator.sh/gpu-core", "0"),
        ])
        .await;
    let limit = Duration::from_secs(60);
    stage
        .watching
        .until("the sound ones bound", limit, |pods| {
            is_bound(pods, "whole") && is_bound(pods, "limited")
        })
        .await;
    for (name, part) in [
        ("network", "Insufficient nvidia.com/hostdev"),
        ("instance", "no device of the requested kind"),
        ("hami", "Insufficient nvidia.com/gpumem"),
    ] {
        until_said(stage, name, part).await;
        assert!(!stage.watching.ask(|pods| is_bound(pods, name)), "{name} bound");
    }
    stage.figure("whole GPUs and MIG instances are gpupack's, nvidia.com/hostdev is counted");
}

/// Waits until the scheduler has said this of the pod.
async fn until_said(stage: &Stage, name: &str, part: &str) {
    let started = clock::now();
    loop {
        let events = stage.cluster.events().await.into_iter().filter(|event| event.pod == name);
        let said: Vec<String> = events.map(|event| event.message).collect();
        if said.iter().any(|text| text.contains(part)) {
            return;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{name}: {said:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// gpupack evicts none of them here.
async fn gpus_full_of_less_important_pods(stage: &Stage) {
    let low: Vec<PodPlan> = (0..4).map(|i| PodPlan::fraction(format!("low-{i}"), "0.8")).collect();
    stage.cluster.add_pods(&low).await;
    stage.watching.until_bound(low.len(), Duration::from_secs(30)).await;
    stage.cluster.add_priority_class("e2e-important", 1_000).await;
    let high = PodPlan::fraction("high", "0.5").important("e2e-important");
    stage.cluster.add_pods(&[high]).await;
    let calls = quiet_calls(stage).await;
    stage.figure(&format!("{calls} filter calls in 10 s about an important pod without room"));
    assert!(calls <= 1.0, "{calls} filter calls in 10 s: a hot loop");
    assert!(!stage.watching.ask(|pods| is_bound(pods, "high")), "bound without room");
    assert_eq!(stage.watching.ask(evicted), Vec::<String>::new());
}

/// Filter calls in ten seconds that begin two seconds after now.
async fn quiet_calls(stage: &Stage) -> f64 {
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = stage.extender.calls("filter").await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    stage.extender.calls("filter").await - before
}

/// The pod has an event that names the key, and the scheduler was always given the same text.
async fn reported_why(stage: &Stage, name: &str, key: &str) {
    let mut messages: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for event in stage.cluster.events().await.into_iter().filter(|event| event.pod == name) {
        messages.entry(event.reason).or_default().insert(event.message);
    }
    let scheduler = messages.get("FailedScheduling").map_or(0, BTreeSet::len);
    assert_eq!(scheduler, 1, "{name}: the scheduler's texts are {messages:#?}");
    let ours = messages.iter().filter(|(reason, _)| *reason != "FailedScheduling");
    let named = ours.flat_map(|(_, texts)| texts).any(|text| text.contains(key));
    assert!(named, "{name}: no gpupack event names `{key}`: {messages:#?}");
}
