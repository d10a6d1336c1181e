//! No pod is evicted for a GPU pod: kube-scheduler cannot know whether that would help.

use std::time::Duration;

use serde_json::json;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::schedulers::SchedulerPlan;
use crate::testbed::{Setup, Stage, Testbed, scenario};
use crate::watching::{Pods, is_bound};

const LIMIT: Duration = Duration::from_secs(60);

/// Much longer than kube-scheduler takes to evict a pod on each of seven nodes: 7 s were seen.
const LONG_ENOUGH: Duration = Duration::from_secs(20);

/// How many pods are gone or on their way, and none was deleted by the scenario.
fn evicted(pods: &Pods) -> usize {
    let is_evicted = |seen: &&crate::watching::Seen| {
        seen.gone.is_some() || seen.pod.metadata.deletion_timestamp.is_some()
    };
    pods.values().filter(is_evicted).count()
}

#[test]
fn the_second_scheduler_evicts_no_unrelated_pod() {
    scenario("bystanders", |bed| async move {
        let (plan, settings) = (SchedulerPlan::second(), json!({}));
        let stage = bystanders(bed, plan, settings, |pod| pod).await;
        stage.judge().await;
    });
}

#[test]
fn the_second_scheduler_evicts_no_gpu_pod() {
    scenario("less-important", |bed| async move {
        let (plan, settings) = (SchedulerPlan::second(), json!({}));
        less_important(bed, plan, settings, |pod| pod).await.judge().await;
    });
}

#[test]
fn in_place_evicts_no_unrelated_pod_and_other_pods_still_preempt() {
    scenario("bystanders-in-place", |bed| async move {
        let settings = json!({"scheduler_names": ["default-scheduler"]});
        let stage = bystanders(bed, SchedulerPlan::in_place(), settings, in_place).await;
        assert!(stage.extender.calls("preempt").await >= 1.0, "kube-scheduler called");
        let plain = |name: &str| {
            let pod = PodPlan::new(name).for_scheduler("default-scheduler").with_cpu("60");
            pod.important("e2e-high")
        };
        stage.cluster.add_pods(&[plain("fits")]).await;
        stage.watching.until("the free CPU taken", LIMIT, |pods| is_bound(pods, "fits")).await;
        stage.cluster.add_pods(&[plain("plain")]).await;
        let what = "an important pod without a GPU bound in the place of another";
        let took = stage.watching.until(what, LIMIT, |pods| is_bound(pods, "plain")).await;
        let count = stage.watching.ask(evicted);
        assert_eq!(count, 1, "one pod makes room for it");
        stage.figure(&format!("{what} after {} ms", clock::ms(took)));
        stage.judge().await;
    });
}

#[test]
fn in_place_evicts_no_gpu_pod() {
    scenario("less-important-in-place", |bed| async move {
        let settings = json!({"scheduler_names": ["default-scheduler"]});
        let plan = SchedulerPlan::in_place();
        less_important(bed, plan, settings, in_place).await.judge().await;
    });
}

/// The pod as the cluster's own scheduler sends it to gpupack.
fn in_place(pod: PodPlan) -> PodPlan {
    pod.for_scheduler("default-scheduler").limited("gpupack.dev/gpu-share", "0")
}

/// Seven nodes with GPUs used by pods of the same priority as the waiting one; the CPU of six of them is
/// held by less important pods without a GPU.
async fn bystanders(
    bed: Testbed,
    plan: SchedulerPlan,
    settings: serde_json::Value,
    ask: impl Fn(PodPlan) -> PodPlan,
) -> Stage {
    let prefix = bed.name;
    let stage = bed.stage(setup(prefix, plan, settings)).await;
    classes(&stage).await;
    let equal = |i| ask(PodPlan::fraction(format!("equal-{i}"), "1").important("e2e-high"));
    stage.cluster.add_pods(&(0..7).map(equal).collect::<Vec<_>>()).await;
    stage.watching.until_bound(7, LIMIT).await;
    let bystander = |i| {
        let pod = PodPlan::new(format!("bystander-{i}")).with_cpu("60").important("e2e-low");
        pod.bound_by_others(&format!("{prefix}-{i:02}"))
    };
    stage.cluster.add_pods(&(0..6).map(bystander).collect::<Vec<_>>()).await;
    stage.watching.until_bound(13, LIMIT).await;
    waits_and_evicts_no_pod(&stage, ask).await;
    stage
}

/// Seven nodes, on each a less important pod with a whole GPU and most of the CPU.
async fn less_important(
    bed: Testbed,
    plan: SchedulerPlan,
    settings: serde_json::Value,
    ask: impl Fn(PodPlan) -> PodPlan,
) -> Stage {
    let prefix = bed.name;
    let stage = bed.stage(setup(prefix, plan, settings)).await;
    classes(&stage).await;
    let whole = |i| {
        let pod = PodPlan::fraction(format!("whole-{i}"), "1").with_cpu("60");
        ask(pod.important("e2e-low"))
    };
    stage.cluster.add_pods(&(0..7).map(whole).collect::<Vec<_>>()).await;
    stage.watching.until_bound(7, LIMIT).await;
    waits_and_evicts_no_pod(&stage, ask).await;
    stage
}

fn setup(prefix: &str, plan: SchedulerPlan, settings: serde_json::Value) -> Setup {
    let fleet = Fleet::new().with(prefix, 7, (1, A100));
    Setup { schedulers: vec![plan], settings, ..Setup::of(fleet) }
}

async fn waits_and_evicts_no_pod(stage: &Stage, ask: impl Fn(PodPlan) -> PodPlan) {
    let high = ask(PodPlan::fraction("high", "0.5").with_cpu("8").important("e2e-high"));
    stage.cluster.add_pods(&[high]).await;
    tokio::time::sleep(LONG_ENOUGH).await;
    let (count, bound) = stage.watching.ask(|pods| (evicted(pods), is_bound(pods, "high")));
    let queried = stage.extender.calls("filter").await;
    let preempt = stage.extender.calls("preempt").await;
    stage.figure(&format!(
        "an important GPU pod without room: {count} pods evicted in {LONG_ENOUGH:?}; \
         {queried} filter calls and {preempt} preempt calls in all"
    ));
    assert_eq!((count, bound), (0, false), "evicted, and whether it runs");
}

async fn classes(stage: &Stage) {
    for (name, value) in [("e2e-high", 1_000), ("e2e-low", 10)] {
        stage.cluster.add_priority_class(name, value).await;
    }
}
