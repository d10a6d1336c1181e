//! A killed extender, lost and late replies, and two schedulers, all together.

use std::time::Duration;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::{GPUPACK, PodPlan};
use crate::proxy::Faults;
use crate::schedulers::SchedulerPlan;
use crate::testbed::{Setup, Stage, scenario};
use crate::watching::bound;

/// Profile of the other scheduler.
const OTHER: &str = "gpupack-other";

const FAULTS: Faults = Faults {
    drop_reply_percent: 8,
    delay_percent: 8,
    hold_percent: 8,
    refuse_percent: 8,
    delay: Duration::from_secs(2),
};

#[test]
fn a_killed_extender_and_lost_replies_cause_no_double_allocation() {
    scenario("chaos", |bed| async move {
        let seed = u64::try_from(clock::number("GPUPACK_E2E_SEED", 1)).expect("64 bits");
        let setup = Setup {
            schedulers: vec![SchedulerPlan::second(), SchedulerPlan::second_named(OTHER)],
            settings: serde_json::json!({"scheduler_names": [GPUPACK, OTHER]}),
            faults: Some((FAULTS, seed)),
            ..Setup::of(Fleet::new().with("chaos", 10, (8, A100)))
        };
        let mut stage = bed.stage(setup).await;
        let started = clock::now();
        // 300 pods of a quarter on 80 GPUs: nearly full at the end: double allocation would show.
        let plans: Vec<PodPlan> = (0..300)
            .map(|i| {
                let scheduler = if i % 2 == 0 { GPUPACK } else { OTHER };
                PodPlan::fraction(format!("chaos-{i}"), "0.25").for_scheduler(scheduler)
            })
            .collect();
        let cluster = stage.cluster.clone();
        let creating = tokio::spawn(async move { cluster.add_pods(&plans).await });
        kill_twice(&mut stage).await;
        creating.await.expect("the pods are created");
        stage.watching.until_bound(300, Duration::from_secs(240)).await;
        stage.figure(&format!("300 pods bound in {} ms", clock::ms(started.elapsed())));
        report(&stage, seed).await;
        stage.until_ledgers_agree().await;
        stage.judge().await;
    });
}

/// SIGKILL with binds in flight, twice.
async fn kill_twice(stage: &mut Stage) {
    for count in [60, 160] {
        stage.watching.until_bound(count, Duration::from_secs(120)).await;
        stage.extender.kill();
        let survivors = stage.watching.ask(bound);
        let took = stage.extender.start_again().await;
        let took = clock::ms(took);
        stage.figure(&format!("killed with {survivors} pods bound, ready again after {took} ms"));
    }
}

async fn report(stage: &Stage, seed: u64) {
    let harm = stage.proxy.as_ref().expect("the scenario has a proxy").harm();
    stage.figure(&format!("seed {seed}: {harm:?}"));
    let binds = stage.extender.binds().await;
    stage.figure(&format!("binds by outcome since the last start: {binds:?}"));
}
