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

/// The Binding of an extender that has died may still be on its way when the next one has read all
/// pods. It must not land on room that the next one has allocated to others.
#[test]
fn a_late_binding_of_a_dead_extender_causes_no_double_allocation() {
    scenario("late", |bed| async move {
        let held = Faults { hold_percent: 100, delay: Duration::from_secs(5), ..Faults::default() };
        let fleet = Fleet::new().with("late", 1, (1, A100));
        let setup = Setup {
            schedulers: vec![SchedulerPlan::second(), SchedulerPlan::second_named(OTHER)],
            settings: serde_json::json!({"scheduler_names": [GPUPACK, OTHER]}),
            faults: Some((held, 1)),
            ..Setup::of(fleet)
        };
        let mut stage = bed.stage(setup).await;
        stage.cluster.add_pods(&[PodPlan::fraction("first", "0.6")]).await;
        let started = clock::now();
        while stage.proxy.as_ref().expect("the scenario has a proxy").harm().held == 0 {
            assert!(started.elapsed() < Duration::from_secs(10), "no Binding was posted");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let posted = clock::now();
        stage.extender.kill();
        // No call comes for the first pod again, so the second one gets the room.
        drop(stage.schedulers.remove(0));
        stage.proxy.as_ref().expect("the scenario has a proxy").set(Faults::default());
        let took = stage.extender.start_again().await;
        let second = PodPlan::fraction("second", "0.6").for_scheduler(OTHER);
        stage.cluster.add_pods(&[second]).await;
        stage.watching.until_bound(1, Duration::from_secs(30)).await;
        let (took, waited) = (clock::ms(took), clock::ms(posted.elapsed()));
        stage
            .figure(&format!("ready {took} ms after SIGKILL, another pod bound after {waited} ms"));
        // The held Binding arrives five seconds after it was posted.
        tokio::time::sleep(Duration::from_secs(7).saturating_sub(posted.elapsed())).await;
        assert_eq!(stage.watching.ask(bound), 1, "two pods of 0.6 are bound to one GPU");
        stage.until_ledgers_agree().await;
        stage.judge().await;
    });
}
