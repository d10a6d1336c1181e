//! Room in one pool while many older pods wait for another: the pod that can use it is requeued, others
//! are left alone.
//!
//! And SIGTERM while room comes and goes that none of many waiting pods can use.
//!
//! `GPUPACK_REQUEUES="ahead=1000"` says how many wait; without it they are few. No time is asserted but a
//! limit far above what it takes.

use std::cell::Cell;
use std::time::Duration;

use futures::future::join_all;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::testbed::{Setup, Stage, scenario_within};
use crate::watching::{Pods, Seen, Watching, is_bound};

/// Two seconds for each of 60 pods ahead would be four times as long.
const LIMIT: Duration = Duration::from_secs(30);

/// A whole GPU in millionths.
const WHOLE: u64 = 1_000_000;

#[test]
fn room_is_not_offered_to_pods_that_wait_for_another_pool() {
    let ahead = ahead();
    let limit = Duration::from_secs(300) + Duration::from_secs(1) * u32::try_from(ahead).unwrap();
    scenario_within("requeues", limit, |bed| async move {
        // Processes outlive their pod: kube-scheduler has tried all pods long before there is room.
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
        until_refused(&stage.watching, ahead).await;
        stage.cluster.add_pods(&[PodPlan::fraction("last", "0.5").only_on("rb-00")]).await;
        until_refused(&stage.watching, ahead + 1).await;

        let before = stage.extender.metric("gpupack_requeues_total", "").await;
        stage.cluster.delete_pod("holder-rb").await;
        let ended = clock::now();
        let device = stage.fleet.uuids("rb-00")[0];
        let room = async {
            while stage.extender.allocated().await.get(device).is_some_and(|load| load.1 == WHOLE) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            ended.elapsed()
        };
        let bound = stage.watching.until("the last is bound", LIMIT, |pods| is_bound(pods, "last"));
        let (room, bound) = tokio::join!(room, bound);
        let fences = stage.extender.metric("gpupack_requeues_total", "").await - before;
        stage.figure(&format!(
            "{ahead} ahead: room {} ms after the end of the holder, bound after {} ms, {fences} fences",
            clock::ms(room),
            clock::ms(bound),
        ));
        assert!(fences <= 3.0, "{fences} requeues for one pod that can use the room");
        for result in ["node_left_out", "refused", "gone", "failed"] {
            assert_eq!(
                stage.extender.metric("gpupack_requeues_total", result).await,
                0.0,
                "{result}"
            );
        }
        stage.until_ledgers_agree().await;
        stage.judge().await;
    });
}

/// Longest time that a shutdown may take; a release build takes at most two seconds.
const STOPPED_WITHIN: Duration = Duration::from_secs(15);

/// How long room comes and goes before the stop.
const ROOMS_FOR: Duration = Duration::from_secs(5);

/// Time between two reports of an agent there. Room of an ended pod is free with the second.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// Nodes on which it does.
const NODES: usize = 20;

#[test]
fn shutdown_does_not_wait_for_requeues() {
    let ahead = ahead();
    let limit = Duration::from_secs(300) + Duration::from_secs(1) * u32::try_from(ahead).unwrap();
    scenario_within("requeues-stop", limit, |bed| async move {
        let fleet = Fleet::new().with("rs", NODES, (1, A100));
        let mut stage = bed.stage(Setup { report_every: REPORT_EVERY, ..Setup::of(fleet) }).await;
        let halves = (0..2 * NODES).map(|i| half(&stage.fleet, i % NODES, i / NODES));
        stage.cluster.add_pods(&halves.collect::<Vec<_>>()).await;
        stage.watching.until_bound(2 * NODES, LIMIT).await;
        // All different, and too large for the room beside a half.
        let fraction = |i: usize| format!("0.{}", 60_000 + i);
        let others = (0..ahead).map(|i| PodPlan::fraction(format!("ahead-{i}"), &fraction(i)));
        stage.cluster.add_pods(&others.collect::<Vec<_>>()).await;
        until_refused(&stage.watching, ahead).await;
        let waiting = stage.extender.metric("gpupack_waiting_pods", "").await;
        assert_eq!(waiting, ahead as f64, "their requests are sound");

        let rooms = Cell::new(0);
        let Stage { cluster, watching, extender, fleet, .. } = &mut stage;
        let come_and_go = join_all((0..NODES).map(|node| {
            let (cluster, watching, fleet, rooms) = (&*cluster, &*watching, &*fleet, &rooms);
            async move {
                for round in 2.. {
                    cluster.delete_pod(&half(fleet, node, round - 2).name).await;
                    let next = half(fleet, node, round);
                    if !is_scheduled(node) {
                        tokio::time::sleep(4 * REPORT_EVERY).await; // until there is room
                    }
                    cluster.add_pods(std::slice::from_ref(&next)).await;
                    while !watching.ask(|pods| is_bound(pods, &next.name)) {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    rooms.set(rooms.get() + 1);
                }
            }
        }));
        let stopped = async {
            tokio::time::sleep(ROOMS_FOR).await;
            let made = rooms.get();
            let queried = clock::now();
            extender.stop_gently();
            let status = loop {
                if let Some(status) = extender.ended() {
                    break status;
                }
                assert!(
                    queried.elapsed() < STOPPED_WITHIN,
                    "it runs {STOPPED_WITHIN:?} after SIGTERM"
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            };
            (made, queried.elapsed(), status)
        };
        let (made, took, status) = tokio::select! {
            stopped = stopped => stopped,
            _ = come_and_go => unreachable!("it goes on"),
        };
        stage.figure(&format!(
            "{ahead} different pods wait, {made} rooms came and went in {ROOMS_FOR:?}, ended {} ms after SIGTERM",
            clock::ms(took)
        ));
        assert!(status.success(), "{status}");
        assert!(made > 0, "no room appeared and vanished");
        stage.judge().await;
    });
}

/// Half of the GPU of that node, for the round.
fn half(fleet: &Fleet, node: usize, round: usize) -> PodPlan {
    let (name, on) = (format!("half-{node}-{round}"), format!("rs-{node:02}"));
    if is_scheduled(node) {
        return PodPlan::fraction(name, "0.5").only_on(&on);
    }
    let uuid = fleet.uuids(&on)[0];
    let mib = fleet.device(uuid).expect("it is part of the fleet").1.capacity_mib() / 2;
    PodPlan::new(name).placed_on(uuid, mib, WHOLE / 2).bound_by_others(&on)
}

/// Whether kube-scheduler binds the halves of that node, after a requeue. Those of every second node are
/// bound when they are created, as kube-scheduler takes seconds to get through a thousand pods that wait.
fn is_scheduled(node: usize) -> bool {
    node.is_multiple_of(2)
}

fn ahead() -> usize {
    let text = clock::variable("GPUPACK_REQUEUES").unwrap_or_else(|| "ahead=60".to_owned());
    let number = text.strip_prefix("ahead=").and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("GPUPACK_REQUEUES is `{text}`: not `ahead=` with a number"))
}

/// Waits until this many pods were rejected on every node.
async fn until_refused(watching: &Watching, count: usize) {
    let is_refused = |seen: &&Seen| {
        let status = seen.pod.status.as_ref();
        let mut conditions = status.and_then(|it| it.conditions.as_ref()).into_iter().flatten();
        seen.bound.is_none() && conditions.any(|it| it.reason.as_deref() == Some("Unschedulable"))
    };
    let are_refused = |pods: &Pods| pods.values().filter(is_refused).count() >= count;
    let limit = LIMIT + Duration::from_millis(100) * u32::try_from(count).unwrap();
    watching.until("all that wait are refused", limit, are_refused).await;
}
