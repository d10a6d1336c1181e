//! Two extenders run: the old one has posted a Binding that a slow API server holds, and its successor
//! gives the room away meanwhile.

use std::time::Duration;

use serde_json::json;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::{GPUPACK, PodPlan};
use crate::proxy::Faults;
use crate::schedulers::SchedulerPlan;
use crate::testbed::{Setup, scenario};
use crate::watching::bound;

/// Profile of the scheduler that calls the successor.
const OTHER: &str = "gpupack-other";

/// How long the network holds a Binding of the old extender: less than a call may take.
const HELD_FOR: Duration = Duration::from_secs(4);

#[test]
fn a_stopping_extender_allocates_nothing_after_its_successor_starts() {
    overlap("overlap-stopping", true);
}

#[test]
fn an_extender_unaware_of_its_successor_allocates_nothing() {
    overlap("overlap-unaware", false);
}

fn overlap(name: &'static str, is_stopped: bool) {
    scenario(name, move |bed| async move {
        let held = Faults { hold_percent: 100, delay: HELD_FOR, ..Faults::default() };
        let settings = json!({"scheduler_names": [GPUPACK, OTHER]});
        let setup = Setup {
            settings: settings.clone(),
            faults: Some((held, 1)),
            ..Setup::of(Fleet::new().with(name, 1, (1, A100)))
        };
        let stage = bed.stage(setup).await;
        stage.cluster.add_pods(&[PodPlan::fraction("first", "0.6")]).await;
        let started = clock::now();
        while stage.proxy.as_ref().expect("the scenario has a proxy").harm().held == 0 {
            assert!(started.elapsed() < Duration::from_secs(10), "no Binding was posted");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let posted = clock::now();
        if is_stopped {
            stage.extender.stop_gently();
        }
        let successor = stage.start_successor(settings).await;
        let ready = clock::ms(posted.elapsed());
        let _other = stage.start_scheduler_of(&successor, SchedulerPlan::second_named(OTHER)).await;
        stage.cluster.add_pods(&[PodPlan::fraction("second", "0.6").for_scheduler(OTHER)]).await;
        stage.watching.until_bound(1, Duration::from_secs(30)).await;
        let waited = clock::ms(posted.elapsed());
        stage.figure(&format!("successor ready after {ready} ms, a pod bound after {waited} ms"));
        // The held Binding arrives, is refused, and one that were posted again would be held as long.
        tokio::time::sleep((HELD_FOR * 3).saturating_sub(posted.elapsed())).await;
        assert_eq!(stage.watching.ask(bound), 1, "two pods of 0.6 are bound to one GPU");
        stage.judge().await;
    });
}
