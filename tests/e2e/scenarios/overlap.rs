//! Two extenders: the old one has posted a Binding that a slow API server holds, and its successor gives the
//! room away meanwhile. The Binding must not land on it.

use std::time::Duration;

use serde_json::json;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::{GPUPACK, PodPlan};
use crate::proxy::Faults;
use crate::schedulers::SchedulerPlan;
use crate::testbed::{Setup, Stage, scenario, until_known};
use crate::watching::{Pods, bound};

/// Profile of the scheduler that calls the successor.
const OTHER: &str = "gpupack-other";

/// How long the network holds a Binding of the old extender: less than a call may take.
const HELD_FOR: Duration = Duration::from_secs(4);

/// What the old extender does when its successor starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Old {
    /// It goes on, unaware of its successor.
    GoesOn,
    Stops,
    IsKilled,
}

#[test]
fn a_held_binding_of_an_extender_lands_on_no_room_of_its_successor() {
    scenario("overlap", |bed| async move {
        let held = Faults { hold_percent: 100, delay: HELD_FOR, ..Faults::default() };
        let setup = Setup {
            settings: json!({"scheduler_names": [GPUPACK, OTHER]}),
            faults: Some((held, 1)),
            ..Setup::of(Fleet::new().with("overlap", 1, (1, A100)))
        };
        let mut stage = bed.stage(setup).await;
        for (round, old) in [Old::GoesOn, Old::Stops, Old::IsKilled].into_iter().enumerate() {
            overlap(&mut stage, old, round).await;
        }
    });
}

async fn overlap(stage: &mut Stage, old: Old, round: usize) {
    let [first, second] = ["first", "second"].map(|name| format!("{name}-{round}"));
    let held = |stage: &Stage| stage.proxy.as_ref().expect("the scenario has a proxy").harm().held;
    let held_before = held(stage);
    stage.cluster.add_pods(&[PodPlan::fraction(first, "0.6")]).await;
    let started = clock::now();
    while held(stage) == held_before {
        assert!(started.elapsed() < Duration::from_secs(10), "{old:?}: no Binding was posted");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let posted = clock::now();
    match old {
        Old::GoesOn => {}
        Old::Stops => stage.extender.stop_gently(),
        Old::IsKilled => stage.extender.kill(),
    }
    let successor = stage.start_successor(json!({"scheduler_names": [GPUPACK, OTHER]})).await;
    let ready = clock::ms(posted.elapsed());
    let other = stage.start_scheduler_of(&successor, SchedulerPlan::second_named(OTHER)).await;
    stage.cluster.add_pods(&[PodPlan::fraction(second, "0.6").for_scheduler(OTHER)]).await;
    let one = |pods: &Pods| bound(pods) == 1;
    stage.watching.until("one of two bound", Duration::from_secs(30), one).await;
    let waited = clock::ms(posted.elapsed());
    stage.figure(&format!(
        "{old:?}: successor ready after {ready} ms, a pod bound after {waited} ms"
    ));
    // The held Binding arrives, is refused, and one that were posted again would be held as long.
    tokio::time::sleep((HELD_FOR * 3).saturating_sub(posted.elapsed())).await;
    assert_eq!(stage.watching.ask(bound), 1, "{old:?}: two pods of 0.6 are bound to one GPU");
    // Of the one that gave the room away: it kept none for the pod that was refused.
    stage.until_ledger_agrees(&successor.extender).await;
    stage.judge().await;
    drop((other, successor));
    stage.extender.kill();
    stage.cluster.delete_all_pods().await;
    let all_gone = |pods: &Pods| pods.values().all(|seen| seen.gone.is_some());
    stage.watching.until("all pods gone", Duration::from_secs(30), all_gone).await;
    stage.watching.forget_gone();
    stage.extender.start_again().await;
    until_known(&stage.extender, stage.fleet.gpus(), Duration::from_secs(1)).await;
    stage.until_ledgers_agree().await;
}
