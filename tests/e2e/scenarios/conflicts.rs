//! How often a bind is refused because somebody else was faster. Each refusal costs its pod
//! seconds of the scheduler's backoff.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::{GPUPACK, PodPlan};
use crate::schedulers::SchedulerPlan;
use crate::testbed::{Setup, Stage, scenario};

/// Profile of the other scheduler.
const OTHER: &str = "gpupack-other";

#[test]
fn one_scheduler_has_no_bind_conflicts_in_a_burst() {
    scenario("conflicts-one", |bed| async move {
        let setup = Setup::of(Fleet::new().with("one", 10, (8, A100)));
        let stage = bed.stage(setup).await;
        burst(&stage, &[GPUPACK]).await;
    });
}

#[test]
fn two_schedulers_have_few_bind_conflicts_in_a_burst() {
    scenario("conflicts-two", |bed| async move {
        let setup = Setup {
            schedulers: vec![SchedulerPlan::second(), SchedulerPlan::second_named(OTHER)],
            settings: serde_json::json!({"scheduler_names": [GPUPACK, OTHER]}),
            ..Setup::of(Fleet::new().with("two", 10, (8, A100)))
        };
        let stage = bed.stage(setup).await;
        burst(&stage, &[GPUPACK, OTHER]).await;
    });
}

/// 320 quarters fill 80 GPUs to the last millionth.
async fn burst(stage: &Stage, schedulers: &[&str]) {
    let started = clock::now();
    let plan = |i: usize| {
        let scheduler = schedulers[i % schedulers.len()];
        PodPlan::fraction(format!("pod-{i}"), "0.25").for_scheduler(scheduler)
    };
    let plans: Vec<PodPlan> = (0..320).map(plan).collect();
    stage.cluster.add_pods(&plans).await;
    stage.watching.until_bound(320, Duration::from_secs(180)).await;
    stage.figure(&format!("320 pods fill 80 GPUs in {} ms", clock::ms(started.elapsed())));
    let binds = stage.extender.binds_of(320.0).await;
    let total: f64 = binds.values().sum();
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
    assert!(rate < 1.0, "{rate:.2} % of the binds were refused");
    stage.judge().await;
}
