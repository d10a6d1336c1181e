//! Which pods are evicted for an important GPU pod: the least important, no more than needed, and none that
//! does not help it.

use std::time::Duration;

use kube::api::DeleteParams;
use serde_json::{Value, json};

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::manifests::{self, Mode};
use crate::pods::PodPlan;
use crate::schedulers::SchedulerPlan;
use crate::testbed::{Setup, Stage, scenario, until_known};
use crate::watching::{Pods, evicted, is_bound};

const LIMIT: Duration = Duration::from_secs(60);

/// Much longer than kube-scheduler takes to evict a pod on each of seven nodes: 7 s were seen.
const LONG_ENOUGH: Duration = Duration::from_secs(20);

/// How long processes run on after their pod is gone, where draining matters.
const SLOW: u64 = 4_000;

#[test]
fn the_second_scheduler_makes_room_where_gpu_and_cpu_are_short() {
    scenario("preemption", |bed| async move {
        let stage = bed.stage(setup("preemption", SchedulerPlan::second(), json!({}))).await;
        prepare(&stage).await;
        less_important(&stage, |pod| pod).await;
        emptied(&stage).await;
        bystanders(&stage, |pod| pod).await;
        stage.judge().await;
    });
}

#[test]
fn in_place_makes_room_where_gpu_and_cpu_are_short_and_other_pods_still_preempt() {
    scenario("in-place-room", |bed| async move {
        let settings = json!({"scheduler_names": ["default-scheduler"]});
        let stage = bed.stage(setup("in-place-room", SchedulerPlan::in_place(), settings)).await;
        prepare(&stage).await;
        less_important(&stage, in_place).await;
        emptied(&stage).await;
        let before = stage.extender.calls("preempt").await;
        bystanders(&stage, in_place).await;
        let called = stage.extender.calls("preempt").await - before;
        assert!(called >= 1.0, "kube-scheduler called");
        other_pods_still_preempt(&stage).await;
        stage.judge().await;
    });
}

/// An important pod without a GPU, where such pods have all the CPU.
async fn other_pods_still_preempt(stage: &Stage) {
    let plain = |name: &str| {
        let pod = PodPlan::new(name).for_scheduler("default-scheduler").with_cpu("60");
        pod.important("e2e-high")
    };
    stage.cluster.add_pods(&[plain("fits")]).await;
    stage.watching.until("the free CPU taken", LIMIT, |pods| is_bound(pods, "fits")).await;
    stage.cluster.add_pods(&[plain("plain")]).await;
    let what = "an important pod without a GPU bound in the place of another";
    let took = stage.watching.until(what, LIMIT, |pods| is_bound(pods, "plain")).await;
    let count = stage.watching.ask(evicted).len();
    assert_eq!(count, 1, "one pod makes room for it");
    stage.figure(&format!("{what} after {} ms", clock::ms(took)));
}

/// Ends all pods, for what comes next on these nodes.
async fn emptied(stage: &Stage) {
    stage.cluster.delete_all_pods().await;
    let all_gone = |pods: &Pods| pods.values().all(|seen| seen.gone.is_some());
    stage.watching.until("all pods gone", LIMIT, all_gone).await;
    stage.watching.forget_gone();
    stage.until_ledgers_agree().await;
}

/// The pod as the cluster's own scheduler sends it to gpupack.
fn in_place(pod: PodPlan) -> PodPlan {
    pod.for_scheduler("default-scheduler").limited("gpupack.dev/gpu-share", "0")
}

/// Seven nodes with GPUs used by pods of the same priority as the waiting one; the CPU of six of them is
/// held by less important pods without a GPU: no unrelated pod is evicted.
async fn bystanders(stage: &Stage, ask: impl Fn(PodPlan) -> PodPlan) {
    let equal = |i| ask(PodPlan::fraction(format!("equal-{i}"), "1").important("e2e-high"));
    stage.cluster.add_pods(&(0..7).map(equal).collect::<Vec<_>>()).await;
    stage.watching.until_bound(7, LIMIT).await;
    let bystander = |i: usize| {
        let pod = PodPlan::new(format!("bystander-{i}")).with_cpu("60").important("e2e-low");
        pod.bound_by_others(&stage.fleet.nodes[i].name)
    };
    stage.cluster.add_pods(&(0..6).map(bystander).collect::<Vec<_>>()).await;
    stage.watching.until_bound(13, LIMIT).await;
    waits_and_evicts_no_pod(stage, ask).await;
}

/// Seven nodes, on each a less important pod with a whole GPU and most of the CPU. One makes room.
async fn less_important(stage: &Stage, ask: impl Fn(PodPlan) -> PodPlan) {
    let whole = |i| {
        let pod = PodPlan::fraction(format!("whole-{i}"), "1").with_cpu("60");
        ask(pod.important("e2e-low"))
    };
    stage.cluster.add_pods(&(0..7).map(whole).collect::<Vec<_>>()).await;
    stage.watching.until_bound(7, LIMIT).await;
    let high = ask(PodPlan::fraction("high", "0.5").with_cpu("8").important("e2e-high"));
    let took = bound_in(stage, &[high]).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let count = stage.watching.ask(evicted).len();
    stage.figure(&format!(
        "GPU and CPU are short: {count} of 7 less important pods evicted, and the important one bound \
         after {} ms",
        clock::ms(took)
    ));
    assert_eq!(count, 1);
}

#[test]
fn three_pods_at_once_get_the_room_of_the_three_least_important() {
    scenario("three-at-once", |bed| async move {
        let setup = setup_of(Fleet::new().with("three-at-once", 6, (1, A100)));
        let stage = bed.stage(setup).await;
        prepare(&stage).await;
        let held = |i: usize| {
            let (kind, class) =
                if i.is_multiple_of(2) { ("low", "e2e-low") } else { ("mid", "e2e-mid") };
            PodPlan::fraction(format!("{kind}-{i}"), "0.7").with_cpu("60").important(class)
        };
        stage.cluster.add_pods(&(0..6).map(held).collect::<Vec<_>>()).await;
        stage.watching.until_bound(6, LIMIT).await;
        // First two that lack only GPU room, then one that lacks CPU as well.
        let high = |i, cpu| {
            PodPlan::fraction(format!("high-{i}"), "0.7").with_cpu(cpu).important("e2e-high")
        };
        let all = [high(0, "1"), high(1, "1"), high(2, "8")];
        let took = bound_in(&stage, &all).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let gone = stage.watching.ask(evicted);
        stage.figure(&format!(
            "three important pods at once: {} evicted, all bound after {} ms",
            gone.join(", "),
            clock::ms(took)
        ));
        assert_eq!(gone, ["low-0", "low-2", "low-4"]);
        stage.judge().await;
    });
}

#[test]
fn no_other_pod_goes_while_the_room_drains_and_none_takes_it() {
    scenario("slow-drain", |bed| async move {
        let fleet = Fleet::new().with("slow-drain", 6, (1, A100)).lingering(SLOW);
        let mut stage = bed.stage(setup_of(fleet)).await;
        prepare(&stage).await;
        let low = |i| {
            let pod = PodPlan::fraction(format!("low-{i}"), "0.3").with_cpu("20");
            pod.important("e2e-low")
        };
        stage.cluster.add_pods(&(0..18).map(low).collect::<Vec<_>>()).await;
        stage.watching.until_bound(18, LIMIT).await;
        // Thieves of GPU room and of CPU, which wait already.
        let thieves = [
            PodPlan::fraction("gpu-thief", "0.3").important("e2e-low"),
            PodPlan::new("cpu-thief").with_cpu("40").important("e2e-low"),
        ];
        stage.cluster.add_pods(&thieves).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        stage.cluster.add_pods(&[high("first")]).await;
        let when = |pods: &Pods| evicted(pods).len() >= 2;
        stage.watching.until("two evictions", LIMIT, when).await;
        let until = |name| move |pods: &Pods| is_bound(pods, name);
        let took = stage.watching.until("the first bound", LIMIT, until("first")).await;
        let thieves = ["gpu-thief", "cpu-thief"];
        let early = stage.watching.ask(|pods| thieves.map(|thief| is_bound(pods, thief)));
        assert_eq!(early, [false, false], "what thieves took");
        let late = took.saturating_sub(Duration::from_millis(SLOW));
        // The same while gpupack is killed after the evictions.
        stage.cluster.add_pods(&[high("second")]).await;
        let when = |pods: &Pods| evicted(pods).len() >= 3;
        stage.watching.until("three evictions", LIMIT, when).await;
        let killed = clock::now();
        stage.extender.kill();
        stage.extender.start_again().await;
        let up = killed.elapsed();
        let again = stage.watching.until("the second bound", LIMIT, until("second")).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let gone = stage.watching.ask(evicted);
        stage.figure(&format!(
            "devices drain for {SLOW} ms: 2 of 18 pods evicted for the first, bound {} ms after that, \
             and no thief before; killed meanwhile (ready after {} ms), the second is bound {} ms \
             later; {} evicted in all",
            clock::ms(late),
            clock::ms(up),
            clock::ms(again),
            gone.len()
        ));
        assert_eq!(gone.len(), 3, "two for the first, and one more where it is: {gone:?}");
        stage.judge().await;
    });
}

#[test]
fn rights_budgets_and_policies_are_respected() {
    scenario("not-evicted", |bed| async move {
        let mut stage = bed.stage(setup_of(Fleet::new().with("not-evicted", 2, (1, A100)))).await;
        classes(&stage).await;
        manifests::delete(&stage.cluster.client, "evict.yaml", &["ClusterRoleBinding"]).await;
        nothing_is_evicted_without_the_right(&stage).await;
        emptied(&stage).await;
        manifests::apply(&stage.cluster.client, "evict.yaml", Mode::Keep).await;
        // A process that lacks the right tries again after minutes.
        stage.extender.kill();
        stage.extender.start_again().await;
        until_known(&stage.extender, stage.fleet.gpus(), Duration::from_secs(1)).await;
        no_pod_with_a_budget_goes(&stage).await;
        emptied(&stage).await;
        a_pod_with_two_budgets_stays_and_another_goes(&stage).await;
        stage.judge().await;
    });
}

/// And the log says so.
async fn nothing_is_evicted_without_the_right(stage: &Stage) {
    let low = ["low-0", "low-1"].map(|name| PodPlan::fraction(name, "0.9").important("e2e-low"));
    stage.cluster.add_pods(&low).await;
    stage.watching.until_bound(2, LIMIT).await;
    stage.cluster.add_pods(&[high("high")]).await;
    let started = clock::now();
    while stage.extender.logged("apply deploy/evict.yaml") == 0 {
        assert!(started.elapsed() < LIMIT, "the log does not say what is missing");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(stage.watching.ask(evicted).is_empty());
    stage.figure("without the right nothing is evicted, and the log names the missing role");
}

/// Nor one for a pod whose class never preempts.
async fn no_pod_with_a_budget_goes(stage: &Stage) {
    let low = |i| PodPlan::fraction(format!("low-{i}"), "0.9").important("e2e-low");
    stage.cluster.add_pods(&[low(0), low(1)]).await;
    stage.watching.until_bound(2, LIMIT).await;
    for name in ["low-0", "low-1"] {
        stage.cluster.set_phase(name, "Running").await; // budgets are about pods that run
    }
    let before = preempted(stage, "blocked").await;
    let budgets = stage.cluster.add_budget("low-0").await;
    stage.cluster.add_budget("low-1").await;
    let never = PodPlan::fraction("never", "0.5").important("e2e-never");
    let high = PodPlan::fraction("high", "0.9").important("e2e-high");
    stage.cluster.add_pods(&[high, never]).await;
    tokio::time::sleep(LONG_ENOUGH).await;
    let gone = stage.watching.ask(evicted);
    let blocked = preempted(stage, "blocked").await - before;
    stage.figure(&format!(
        "budgets of zero, and a pod that may not preempt: {} evicted, {blocked} dry runs refused",
        gone.len()
    ));
    assert!(gone.is_empty() && blocked >= 2.0, "{gone:?}, {blocked}");
    let removed = budgets.delete("low-0", &DeleteParams::default()).await;
    removed.expect("it is there");
    stage.watching.until("bound without the budget", LIMIT, |pods| is_bound(pods, "high")).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(stage.watching.ask(evicted), ["low-0"], "the other budget holds");
    assert!(!stage.watching.ask(|pods| is_bound(pods, "never")));
}

/// The API server evicts no pod with two budgets, and answers 500.
async fn a_pod_with_two_budgets_stays_and_another_goes(stage: &Stage) {
    let low = |name| PodPlan::fraction(name, "0.9").important("e2e-low");
    stage.cluster.add_pods(&[low("older")]).await;
    stage.watching.until_bound(1, LIMIT).await;
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    stage.cluster.add_pods(&[low("younger")]).await;
    stage.watching.until_bound(2, LIMIT).await;
    for name in ["older", "younger"] {
        stage.cluster.set_phase(name, "Running").await;
    }
    let blocked = preempted(stage, "blocked").await;
    stage.cluster.add_budget_of("one", "younger").await;
    stage.cluster.add_budget_of("other", "younger").await;
    stage.cluster.add_pods(&[PodPlan::fraction("high", "0.9").important("e2e-high")]).await;
    let until = |pods: &Pods| is_bound(pods, "high");
    let took = stage.watching.until("the important one bound", LIMIT, until).await;
    assert_eq!(stage.watching.ask(evicted), ["older"], "the younger one would be the first choice");
    assert!(preempted(stage, "blocked").await > blocked);
    stage.figure(&format!(
        "a pod with two budgets is left alone, and another one goes: bound after {} ms",
        clock::ms(took)
    ));
}

fn high(name: &str) -> PodPlan {
    PodPlan::fraction(name, "0.5").with_cpu("8").important("e2e-high")
}

/// Creates the pods, and waits until they are bound.
async fn bound_in(stage: &Stage, plans: &[PodPlan]) -> Duration {
    let started = clock::now();
    stage.cluster.add_pods(plans).await;
    let are_bound = |pods: &Pods| plans.iter().all(|plan| is_bound(pods, &plan.name));
    stage.watching.until("all important pods bound", LIMIT, are_bound).await;
    started.elapsed()
}

async fn preempted(stage: &Stage, outcome: &str) -> f64 {
    let label = format!("outcome=\"{outcome}\",reason=\"preemption\"");
    stage.extender.metric("gpupack_evictions_total", &label).await
}

fn setup(prefix: &str, plan: SchedulerPlan, settings: Value) -> Setup {
    let fleet = Fleet::new().with(prefix, 7, (1, A100));
    Setup { schedulers: vec![plan], settings, ..Setup::of(fleet) }
}

fn setup_of(fleet: Fleet) -> Setup {
    Setup { settings: json!({"standing_hold_after_seconds": 0}), ..Setup::of(fleet) }
}

/// An important pod that would be as well off on no node.
async fn waits_and_evicts_no_pod(stage: &Stage, ask: impl Fn(PodPlan) -> PodPlan) {
    let high = ask(high("high"));
    stage.cluster.add_pods(&[high]).await;
    tokio::time::sleep(LONG_ENOUGH).await;
    let (count, bound) = stage.watching.ask(|pods| (evicted(pods).len(), is_bound(pods, "high")));
    let queried = stage.extender.calls("filter").await;
    let preempt = stage.extender.calls("preempt").await;
    stage.figure(&format!(
        "an important GPU pod without room: {count} pods evicted in {LONG_ENOUGH:?}; \
         {queried} filter calls and {preempt} preempt calls in all"
    ));
    assert_eq!((count, bound), (0, false), "evicted, and whether it runs");
}

/// Gives gpupack the right to evict, and makes the classes.
async fn prepare(stage: &Stage) {
    manifests::apply(&stage.cluster.client, "evict.yaml", Mode::Keep).await;
    classes(stage).await;
}

async fn classes(stage: &Stage) {
    for (name, value) in [("e2e-high", 1_000), ("e2e-mid", 100), ("e2e-low", 10)] {
        stage.cluster.add_priority_class(name, value).await;
    }
    stage.cluster.add_class_that_never_preempts("e2e-never", 1_000).await;
}
