//! Free room, and how soon those that wait for it have it: groups that wait, pods behind groups that are
//! never bound, and an important pod on a full cluster.
//!
//! Each line says how long pods waited and how long GPUs were idle. `GPUPACK_KEPT_ROOM=long` lets groups
//! wait for more than a minute, has 40 groups that are never bound, and agents that report once a second.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::scene::{Scene, is_long, runs, seconds};
use crate::testbed::{Setup, scenario_within};
use crate::watching::{Pods, evicted, find, is_bound, reason};

/// For what happens at once.
const SOON: Duration = Duration::from_secs(30);

/// A whole scenario.
const ALL: Duration = Duration::from_secs(600);

/// That of groups, two of which may wait for five minutes.
const ALL_GROUPS: Duration = Duration::from_secs(1_200);

/// Pods in a group.
const SIZE: usize = 3;

/// How long a group may take from the end of the pods in its way to its last bind, on two busy cores. The
/// goal is 2 s from when their devices are free, which a plain pod sees a second after the end.
const GROUP_WITHIN: Duration = Duration::from_millis(3_500);

#[test]
fn a_group_that_has_waited_any_time_is_bound_soon_after_there_is_room() {
    scenario_within("free-groups", ALL_GROUPS, |bed| async move {
        let stage = bed.stage(Setup::of(Fleet::new().with("free-groups", 1, (6, A100)))).await;
        let mut scene = Scene::new(stage, Duration::ZERO).await;
        let plain = room_for(&mut scene, "plain", 0, Duration::from_secs(3)).await;
        let waits: &[u64] = if is_long() { &[4, 24, 300] } else { &[12] };
        let mut slowest = Duration::ZERO;
        for wait in waits {
            for groups in [1, 2] {
                let name = format!("g{wait}x{groups}");
                let took = room_for(&mut scene, &name, groups, Duration::from_secs(*wait)).await;
                for (at, took) in took.into_iter().enumerate() {
                    let what = format!("A3 waited {wait} s, group {} of {groups}", at + 1);
                    scene.row(&what, took, 0, 0.0);
                    slowest = slowest.max(took.unwrap_or(Duration::MAX));
                }
            }
        }
        scene.row("A3 a plain pod", plain[0], 0, 0.0);
        assert!(slowest < GROUP_WITHIN, "{slowest:?}");
        scene.stage.judge().await;
    });
}

/// Fills six GPUs, lets this many groups wait (or a plain pod), and ends as many pods as one needs, then as
/// many for the next. Returns how long after the end in question each was bound.
async fn room_for(
    scene: &mut Scene,
    name: &str,
    groups: usize,
    wait: Duration,
) -> Vec<Option<Duration>> {
    let holders: Vec<String> = (0..6).map(|at| format!("holder-{name}-{at}")).collect();
    let whole = |name: &String| PodPlan::fraction(name.as_str(), "1");
    scene.stage.cluster.add_pods(&holders.iter().map(whole).collect::<Vec<_>>()).await;
    let all: Vec<&str> = holders.iter().map(String::as_str).collect();
    assert!(scene.until_bound(&all, SOON).await, "six GPUs for six pods");
    let size = if groups == 0 { 1 } else { SIZE };
    let mut waiting: Vec<Vec<String>> = (0..groups.max(1))
        .map(|group| (0..size).map(|at| format!("{name}-{group}-{at}")).collect())
        .collect();
    let member = |group: usize, pod: &String| match groups {
        0 => whole(pod),
        _ => whole(pod)
            .annotated("gpupack.dev/group", &format!("{name}-{group}"))
            .annotated("gpupack.dev/group-size", &size.to_string()),
    };
    let each = waiting.iter().enumerate();
    let members = each.flat_map(|(group, pods)| pods.iter().map(move |pod| member(group, pod)));
    scene.stage.cluster.add_pods(&members.collect::<Vec<_>>()).await;
    scene.play(wait).await;
    let mut took = Vec::new();
    for ending in holders.chunks(size).take(groups.max(1)) {
        for holder in ending {
            scene.stage.cluster.delete_pod(holder).await;
        }
        let ended = clock::now();
        let are_bound =
            |pods: &Pods, group: &Vec<String>| group.iter().all(|name| is_bound(pods, name));
        let is_one = |pods: &Pods| waiting.iter().any(|group| are_bound(pods, group));
        scene.until(Duration::from_secs(90), is_one).await;
        let whole = |group: &mut Vec<String>| scene.stage.watching.ask(|it| are_bound(it, group));
        let last = waiting.extract_if(.., whole).next().map(|group| {
            group.iter().filter_map(|name| scene.bound_after(name, ended)).max().unwrap_or_default()
        });
        took.push(last);
    }
    scene.stage.cluster.delete_all_pods().await;
    scene.play(Duration::from_secs(2)).await;
    took
}

#[test]
fn pods_and_groups_whose_volumes_never_come_do_not_idle_a_pool() {
    if runs("free-never") {
        never_bound("free-never-groups", 10, (2, 4));
        never_bound("free-never-pods", 12, (1, 2));
        never_bound("free-never-many", 40, (2, 1));
    }
}

/// How long a pod may wait behind the first wait of pods that are never bound, and what is held for them before.
const BEHIND: Duration = Duration::from_secs(75);

/// The same after it: five seconds longer than without such pods.
const LATER: Duration = Duration::from_secs(8);

/// How much of a pool may be idle within five minutes while pods wait that it has room for, in GPU seconds.
const MOST_IDLE: f64 = 0.25 * 8.0 * 300.0;

/// Eight GPUs, groups of `size` pods with `count` GPUs each whose claims nobody provisions, and eight pods
/// that come later and want one GPU each.
fn never_bound(name: &'static str, groups: usize, (size, count): (usize, usize)) {
    scenario_within(name, ALL, move |bed| async move {
        // Room is kept for the first of a line before the others come.
        let settings = json!({"standing_hold_after_seconds": 4});
        let setup = Setup { settings, ..Setup::of(Fleet::new().with(name, 2, (4, A100))) };
        let mut scene = Scene::new(bed.stage(setup).await, Duration::ZERO).await;
        let pods = (0..groups).flat_map(|group| (0..size).map(move |at| (group, at)));
        let plan = |(group, at): (usize, usize)| {
            let pod = PodPlan::fraction(format!("never-{group}-{at}"), "1");
            let pod = match count {
                1 => pod,
                _ => pod.annotated("gpu-fraction-num-devices", &count.to_string()),
            };
            let pod = pod.claiming(&format!("claim-{group}-{at}"));
            match size {
                1 => pod,
                _ => pod
                    .annotated("gpupack.dev/group", &format!("never-{group}"))
                    .annotated("gpupack.dev/group-size", &size.to_string()),
            }
        };
        let plans: Vec<PodPlan> = pods.map(plan).collect();
        let claims = plans.iter().map(|plan| plan.name.replace("never", "claim"));
        scene.stage.cluster.add_claims(claims).await;
        scene.stage.cluster.add_pods(&plans).await;
        scene.play(Duration::from_secs(8)).await;
        let created = clock::now();
        let late: Vec<String> = (0..8).map(|at| format!("late-{at}")).collect();
        let whole = |name: &String| PodPlan::fraction(name.as_str(), "1");
        scene.stage.cluster.add_pods(&late.iter().map(whole).collect::<Vec<_>>()).await;
        let names: Vec<&str> = late.iter().map(String::as_str).collect();
        let limit = Duration::from_secs(300);
        let all_bound = scene.until_bound(&names, limit).await;
        let waited = created.elapsed().as_secs_f64();
        let idle = scene.idle(created);
        let mut bound: Vec<Option<Duration>> =
            names.iter().map(|name| scene.bound_after(name, created)).collect();
        bound.sort_by_key(|bound| bound.unwrap_or(Duration::MAX));
        let what = if size == 1 { "pods" } else { "groups" };
        let (first, unbound) = (bound[0], bound.iter().filter(|bound| bound.is_none()).count());
        let what = format!(
            "A4 {groups} {what} of {size} x {count}, first {}, unbound {unbound}",
            seconds(first)
        );
        scene.row(&what, bound[7], 0, idle);
        scene.stage.figure(&format!(
            "A4 of the pool {:.0} % idle for {waited:.0} s while pods wait that it has room for",
            100.0 * idle / (8.0 * waited)
        ));
        if !all_bound {
            let why = scene.stage.watching.ask(|pods| find(pods, "never-0-0").map(reason));
            scene.stage.figure(&format!("A4 one of those with a claim: {why:?}"));
        }
        let in_time = |it: &Option<Duration>| it.is_some_and(|it| it < BEHIND);
        let waits = stream(&mut scene, &names).await;
        // Each of them waits for one GPU, which is free.
        let waited: Option<Duration> = waits.iter().copied().sum();
        let all_idle = idle + waited.unwrap_or(Duration::MAX).as_secs_f64();
        scene.stage.figure(&format!(
            "A4 {all_idle:.0} GPU seconds idle within five minutes while one waits that is bound"
        ));
        assert!(bound.iter().all(in_time), "{name}: {bound:?}");
        let in_time = |wait: &Option<Duration>| wait.is_some_and(|wait| wait < LATER);
        assert!(waits.iter().all(in_time), "{name}: {waits:?}");
        assert!(all_idle < MOST_IDLE, "{name}: {all_idle} s");
        scene.stage.judge().await;
    });
}

/// How long one-GPU pods come, how many seconds apart, and how long each runs: a quarter of the pool.
const STREAM: (u64, u64, u64) = (240, 10, 20);

/// Ends these pods; then others come one after the other. Returns how long each waited, none if it still waits
/// after all.
async fn stream(scene: &mut Scene, before: &[&str]) -> Vec<Option<Duration>> {
    for name in before {
        scene.stage.cluster.delete_pod(name).await;
    }
    let (all, apart, runs) = STREAM;
    let runs = Duration::from_secs(runs);
    let count = usize::try_from(all / apart).expect("a few pods");
    let mut created: Vec<(String, Instant)> = Vec::new();
    let mut ended = BTreeSet::new();
    let started = clock::now();
    while started.elapsed() < Duration::from_secs(all) + 2 * runs {
        let due = Duration::from_secs(apart) * u32::try_from(created.len()).expect("a few pods");
        if created.len() < count && started.elapsed() >= due {
            let name = format!("stream-{}", created.len());
            created.push((name.clone(), clock::now()));
            scene.stage.cluster.add_pods(&[PodPlan::fraction(name, "1")]).await;
        }
        let has_run = |(name, at): &&(String, Instant)| {
            scene.bound_after(name, *at).is_some_and(|after| at.elapsed() - after >= runs)
        };
        for (name, _) in created.iter().filter(has_run) {
            if ended.insert(name.clone()) {
                scene.stage.cluster.delete_pod(name).await;
            }
        }
        scene.step().await;
    }
    for (name, _) in &created {
        scene.stage.cluster.delete_pod(name).await;
    }
    let mut waits: Vec<Option<Duration>> =
        created.iter().map(|(name, at)| scene.bound_after(name, *at)).collect();
    waits.sort_by_key(|wait| wait.unwrap_or(Duration::MAX));
    let unbound = waits.iter().filter(|wait| wait.is_none()).count();
    let (median, last) = (waits[count / 2], waits[count - 1]);
    scene.stage.figure(&format!(
        "A4 {count} one-GPU pods by turns on the pool of 8: median {} s, slowest {} s, {unbound} unbound",
        seconds(median),
        seconds(last)
    ));
    waits
}

/// Time between two reports where an agent reports what changes.
const AT_ONCE: Duration = Duration::from_millis(100);

/// Rounds of which the median counts.
const ROUNDS: usize = 5;

/// The goals with two busy cores: 0.4 s from the end of the last process, which is seen with the second
/// report after it; 2 s in all; 0.6 s for a pod that waits.
const FROM_LAST: Duration = Duration::from_millis(700);
const IN_ALL: Duration = Duration::from_millis(2_500);
const FREED: Duration = Duration::from_millis(700);

#[test]
fn an_important_pod_on_a_full_cluster_and_one_that_waits_have_freed_room_soon() {
    freed_soon("free-soon", AT_ONCE);
    // The figures where agents report once a second; no goal.
    if runs("free-each-second") {
        freed_soon("free-each-second", Duration::from_secs(1));
    }
}

fn freed_soon(name: &'static str, report_every: Duration) {
    scenario_within(name, ALL, move |bed| async move {
        let fleet = Fleet::new().with(name, ROUNDS, (1, A100));
        let stage = bed.stage(Setup { report_every, ..Setup::of(fleet) }).await;
        let mut scene = Scene::new(stage, Duration::ZERO).await;
        let low = |at| PodPlan::fraction(format!("low-{at}"), "0.5").important("e2e-low");
        scene.stage.cluster.add_pods(&(0..2 * ROUNDS).map(low).collect::<Vec<_>>()).await;
        scene.stage.watching.until_bound(2 * ROUNDS, SOON).await;
        let mut rounds: [Vec<Duration>; 4] = [const { Vec::new() }; 4];
        for round in 0..ROUNDS {
            let name = format!("high-{round}");
            let created = clock::now();
            scene.stage.cluster.add_pods(&[high(&name)]).await;
            assert!(scene.until_bound(&[&name], SOON).await, "{name} is not bound");
            let gone = gone_since(&scene, created);
            let [first, .., last] = gone[..] else { panic!("{} are gone", gone.len()) };
            assert_eq!(gone.len(), 2, "two share a GPU");
            let all = scene.bound_after(&name, created).expect("it is bound");
            let parts = [first - created, last - first, created + all - last, all];
            rounds.iter_mut().zip(parts).for_each(|(times, time)| times.push(time));
            // Begins somewhere else in the extender's second.
            scene.play(Duration::from_millis(1_370)).await;
        }
        let evictions = scene.stage.watching.ask(evicted).len();
        let mut freed = Vec::new();
        for round in 0..ROUNDS {
            let name = format!("next-{round}");
            scene.stage.cluster.add_pods(&[high(&name)]).await;
            let is_refused =
                |pods: &Pods| find(pods, &name).is_some_and(|it| !reason(it).is_empty());
            assert!(scene.until(SOON, is_refused).await, "{name} is not refused");
            scene.play(Duration::from_millis(530)).await;
            let ended = clock::now();
            scene.stage.cluster.delete_pod(&format!("high-{round}")).await;
            assert!(scene.until_bound(&[&name], SOON).await, "{name} is not bound");
            freed.push(scene.bound_after(&name, ended).expect("it is bound"));
        }
        let [first, apart, last, all] = rounds.map(spread);
        let freed = spread(freed);
        let line = |what: &str, (median, range): &(Duration, String)| {
            let median = median.as_secs_f64();
            format!("A9 {what:<41} median {median:>6.2} s   {range}")
        };
        scene.stage.figure(&line("from the pod to the first victim gone", &first));
        scene.stage.figure(&line("from the first to the last victim gone", &apart));
        scene.stage.figure(&line("from the last victim gone to the Binding", &last));
        scene.stage.figure(&line("the whole", &all));
        scene.stage.figure(&line("freed room to the Binding of one that waits", &freed));
        scene.stage.figure(&format!("A9 {evictions} evictions for {ROUNDS} whole GPUs"));
        assert_eq!(evictions, 2 * ROUNDS);
        let medians = [last.0, all.0, freed.0];
        let are_soon = medians.iter().zip([FROM_LAST, IN_ALL, FREED]).all(|(it, most)| *it <= most);
        assert!(are_soon || report_every > AT_ONCE, "{medians:?}");
        scene.stage.judge().await;
    });
}

fn high(name: &str) -> PodPlan {
    PodPlan::fraction(name, "1").important("e2e-high")
}

/// When pods were gone since then, the first one first.
fn gone_since(scene: &Scene, since: Instant) -> Vec<Instant> {
    let mut gone: Vec<Instant> = scene
        .stage
        .watching
        .ask(|pods| pods.values().filter_map(|seen| seen.gone).filter(|at| *at >= since).collect());
    gone.sort_unstable();
    gone
}

/// The median, and the least and the most.
fn spread(mut times: Vec<Duration>) -> (Duration, String) {
    times.sort_unstable();
    let (least, most) = (times[0].as_secs_f64(), times[times.len() - 1].as_secs_f64());
    (times[times.len() / 2], format!("({least:.2} to {most:.2})"))
}
