//! The memory guard on a real API server: it reports over-limit pods, and evicts only when requested.

use std::time::Duration;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, DeleteParams};
use serde_json::json;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::manifests::{self, Mode};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::find;

const LIMIT: Duration = Duration::from_secs(30);

/// How long pods that must stay are watched: several usage samples and several ticks of the guard.
const QUIET: Duration = Duration::from_secs(6);

/// Lets two pods share one GPU: `greedy` uses twice its share, `modest` all of its own.
async fn shared(stage: &Stage) {
    let plans = ["greedy", "modest"].map(|name| PodPlan::fraction(name, "0.4"));
    stage.cluster.add_pods(&plans).await;
    stage.watching.until_bound(2, LIMIT).await;
}

fn fleet(name: &str) -> Fleet {
    let fleet = Fleet::new().with(name, 1, (1, A100));
    fleet.using(&format!("{name}/greedy"), 200).using(&format!("{name}/modest"), 100)
}

/// Waits for an event of a pod; gives its text.
async fn event(stage: &Stage, pod: &str, reason: &str) -> String {
    let started = clock::now();
    loop {
        let events = stage.cluster.events().await;
        let found = events.into_iter().find(|event| event.pod == pod && event.reason == reason);
        if let Some(found) = found {
            return found.message;
        }
        assert!(started.elapsed() < LIMIT, "{pod} has no event {reason}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn is_there(stage: &Stage, pod: &str) -> bool {
    stage.watching.ask(|pods| {
        find(pods, pod).is_some_and(|seen| seen.pod.metadata.deletion_timestamp.is_none())
    })
}

async fn evictions(stage: &Stage, outcome: &str) -> f64 {
    let label = format!("outcome=\"{outcome}\",reason=\"over_limit\"");
    stage.extender.metric("gpupack_evictions_total", &label).await
}

#[test]
fn an_over_limit_pod_is_reported_and_evicted_only_on_request() {
    scenario("guard", |bed| async move {
        manifests::apply(&bed.cluster.client, "evict.yaml", Mode::Keep).await;
        let mut stage = bed.stage(Setup::of(fleet("guard"))).await;
        shared(&stage).await;
        only_reported_by_default(&stage).await;
        // A disruption budget without a computed status allows no eviction of running pods.
        let budgets = stage.cluster.add_budget("greedy").await;
        stage.cluster.set_phase("greedy", "Running").await;
        stage.stop_gpupack();
        stage.start_gpupack(&json!({"guard": {"evict": true}})).await;
        evicted_unless_a_budget_prevents_it(&stage, &budgets).await;
        stage.judge().await;
    });
}

async fn only_reported_by_default(stage: &Stage) {
    let reported = event(stage, "greedy", "GpuOverLimit").await;
    // 0.4 of 81,320 MiB, and twice that.
    for part in ["uses 65056 MiB", "may use 32528 MiB", "32528 MiB too much", "gpu-memory"] {
        assert!(reported.contains(part), "{part} in {reported}");
    }
    tokio::time::sleep(QUIET).await;
    assert!(is_there(stage, "greedy") && is_there(stage, "modest"));
    assert!((stage.extender.metric("gpupack_over_limit_pods", "").await - 1.0).abs() < 0.5);
    let queried = stage.extender.metric("gpupack_evictions_total", "").await;
    assert!(queried < 0.5, "{queried} evictions were requested");
    stage.figure("an over-limit pod is reported and stays, without `guard.evict`");
}

async fn evicted_unless_a_budget_prevents_it(stage: &Stage, budgets: &Api<PodDisruptionBudget>) {
    let started = clock::now();
    while evictions(stage, "blocked").await + evictions(stage, "evicted").await < 0.5 {
        assert!(started.elapsed() < LIMIT, "no eviction was requested");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(is_there(stage, "greedy"), "a disruption budget was ignored");
    stage.figure("a disruption budget prevents the eviction of an over-limit pod");
    budgets.delete("greedy", &DeleteParams::default()).await.expect("it is there");
    let reported = event(stage, "greedy", "GpuEvicted").await;
    assert!(reported.contains("65056 MiB") && reported.contains("32528 MiB"), "{reported}");
    assert!(!is_there(stage, "greedy"));
    stage.figure(&format!("an over-limit pod is evicted: {reported}"));
    tokio::time::sleep(QUIET).await;
    assert!(is_there(stage, "modest"), "a pod within its share was evicted");
    assert!((evictions(stage, "evicted").await - 1.0).abs() < 0.5);
    assert!(evictions(stage, "failed").await < 0.5);
}
