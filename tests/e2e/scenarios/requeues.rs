//! Room in one pool while many older pods wait for another: the pod that can use it is touched, the others
//! are left alone.
//!
//! `GPUPACK_REQUEUES="ahead=1000"` says how many wait ahead of it; without it they are few. No time is
//! asserted but a limit far above what it takes.

use std::time::Duration;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario_within};
use crate::watching::{Pods, Seen, is_bound};

/// Two seconds for each of 60 pods ahead would be four times as long.
const LIMIT: Duration = Duration::from_secs(30);

/// A whole GPU in millionths.
const WHOLE: u64 = 1_000_000;

#[test]
fn room_is_not_offered_to_pods_that_wait_for_another_pool() {
    let ahead = ahead();
    let limit = Duration::from_secs(300) + Duration::from_secs(1) * u32::try_from(ahead).unwrap();
    scenario_within("requeues", limit, |bed| async move {
        // Processes outlive their pod: kube-scheduler has looked at all pods long before there is room.
        let fleet = Fleet::new().lingering(2_000 + 10 * ahead as u64);
        let fleet = fleet.with("ra", 1, (1, A100)).with("rb", 1, (1, A100));
        let stage = bed.stage(Setup::of(fleet)).await;
        let holders = ["ra", "rb"].map(|pool| {
            PodPlan::fraction(format!("holder-{pool}"), "1").only_on(&format!("{pool}-00"))
        });
        stage.cluster.add_pods(&holders).await;
        stage.watching.until_bound(2, LIMIT).await;
        let others = (0..ahead).map(|i| PodPlan::fraction(format!("ahead-{i}"), "0.5"));
        let others: Vec<PodPlan> = others.map(|plan| plan.only_on("ra-00")).collect();
        stage.cluster.add_pods(&others).await;
        until_refused(&stage, ahead).await;
        stage.cluster.add_pods(&[PodPlan::fraction("last", "0.5").only_on("rb-00")]).await;
        until_refused(&stage, ahead + 1).await;

        let before = stage.extender.metric("gpupack_wakeups_total", "").await;
        stage.cluster.delete_pod("holder-rb").await;
        let ended = clock::now();
        let device = stage.fleet.uuids("rb-00")[0];
        let room = async {
            while stage.extender.booked().await.get(device).is_some_and(|load| load.1 == WHOLE) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            ended.elapsed()
        };
        let bound = stage.watching.until("the last is bound", LIMIT, |pods| is_bound(pods, "last"));
        let (room, bound) = tokio::join!(room, bound);
        let touches = stage.extender.metric("gpupack_wakeups_total", "").await - before;
        stage.figure(&format!(
            "{ahead} ahead: room {} ms after the end of the holder, bound after {} ms, {touches} touches",
            clock::ms(room),
            clock::ms(bound),
        ));
        assert!(touches <= 3.0, "{touches} touches for one pod that can use the room");
        for result in ["node_left_out", "refused", "gone", "failed"] {
            assert_eq!(
                stage.extender.metric("gpupack_requeues_total", result).await,
                0.0,
                "{result}"
            );
        }
        stage.until_books_agree().await;
        stage.judge().await;
    });
}

fn ahead() -> usize {
    let text = clock::variable("GPUPACK_REQUEUES").unwrap_or_else(|| "ahead=60".to_owned());
    let number = text.strip_prefix("ahead=").and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("GPUPACK_REQUEUES is `{text}`: not `ahead=` with a number"))
}

/// Waits until so many pods were refused everywhere.
async fn until_refused(stage: &Stage, count: usize) {
    let is_refused = |seen: &&Seen| {
        let status = seen.pod.status.as_ref();
        let mut conditions = status.and_then(|it| it.conditions.as_ref()).into_iter().flatten();
        seen.bound.is_none() && conditions.any(|it| it.reason.as_deref() == Some("Unschedulable"))
    };
    let are_refused = |pods: &Pods| pods.values().filter(is_refused).count() >= count;
    let limit = LIMIT + Duration::from_millis(100) * u32::try_from(count).unwrap();
    stage.watching.until("all that wait are refused", limit, are_refused).await;
}
