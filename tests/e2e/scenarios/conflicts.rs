//! How often a bind is refused because somebody else was faster. Each refusal costs its pod
//! seconds of the scheduler's backoff.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::{GPUPACK, PodPlan};
use crate::schedulers::SchedulerPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::Pods;

/// Profile of the other scheduler.
const OTHER: &str = "gpupack-other";

#[test]
fn few_binds_are_refused_in_a_burst_of_one_scheduler_and_of_two() {
    scenario("conflicts", |bed| async move {
        let setup = Setup {
            settings: serde_json::json!({"scheduler_names": [GPUPACK, OTHER]}),
            ..Setup::of(Fleet::new().with("conflicts", 10, (8, A100)))
        };
        let mut stage = bed.stage(setup).await;
        burst(&stage, &[GPUPACK]).await;
        stage.cluster.delete_all_pods().await;
        let all_gone = |pods: &Pods| pods.values().all(|seen| seen.gone.is_some());
        stage.watching.until("all pods gone", Duration::from_secs(30), all_gone).await;
        stage.watching.forget_gone();
        stage.until_ledgers_agree().await;
        let other = stage.start_scheduler(SchedulerPlan::second_named(OTHER)).await;
        stage.schedulers.push(other);
        burst(&stage, &[GPUPACK, OTHER]).await;
    });
}

/// 320 quarters fill 80 GPUs to the last millionth.
async fn burst(stage: &Stage, schedulers: &[&str]) {
    let started = clock::now();
    let before: f64 = stage.extender.binds().await.values().sum();
    let plan = |i: usize| {
        let scheduler = schedulers[i % schedulers.len()];
        let name = format!("of-{}-{i}", schedulers.len());
        PodPlan::fraction(name, "0.25").for_scheduler(scheduler)
    };
    let plans: Vec<PodPlan> = (0..320).map(plan).collect();
    stage.cluster.add_pods(&plans).await;
    stage.watching.until_bound(320, Duration::from_secs(180)).await;
    let (count, took) = (schedulers.len(), clock::ms(started.elapsed()));
    stage.figure(&format!("320 pods of {count} schedulers fill 80 GPUs in {took} ms"));
    let binds = stage.extender.binds_of(before + 320.0).await;
    let total = binds.values().sum::<f64>() - before;
    // The pods are 320, so every further bind is one that failed at first.
    let conflicts = total - 320.0;
    let rate = 100.0 * conflicts / total;
    let mut errors = 0.0;
    for scheduler in &stage.schedulers {
        let result = "result=\"error\"";
        errors += scheduler.metric("scheduler_schedule_attempts_total", result).await;
    }
    stage.figure(&format!(
        "{conflicts} of {total} binds refused ({rate:.2} %), {errors} attempts ended as error; {binds:?}"
    ));
    let mut refusals: BTreeMap<String, usize> = BTreeMap::new();
    for event in stage.cluster.events().await {
        if event.reason == "FailedScheduling" {
            *refusals.entry(event.message).or_default() += 1;
        }
    }
    stage.figure(&format!("FailedScheduling events: {refusals:?}"));
    assert!(total >= 320.0, "every pod needs a bind; counted {total}");
    assert!(rate < 1.0, "{rate:.2} % of the binds of {count} schedulers were refused");
    stage.judge().await;
}
