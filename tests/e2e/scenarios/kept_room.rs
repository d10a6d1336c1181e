//! Room that is kept for one pod while others need it: two kinds of it on one GPU, on a node that leaves,
//! on a GPU that a hung pod never frees, and beside a replica that goes last.
//!
//! Each line says how long the pod waited, how many others were evicted, and how long GPUs were idle.
//! `GPUPACK_KEPT_ROOM=long` also runs those that take minutes, or show the same in another way.

use std::time::Duration;

use serde_json::{Value, json};

use crate::clock;
use crate::fleet::{A100, Fleet};
use crate::pods::PodPlan;
use crate::scene::{Scene, runs, seconds};
use crate::testbed::{Setup, Stage, Testbed, scenario_within};
use crate::watching::{Pods, find, is_bound};

/// For what happens at once.
const SOON: Duration = Duration::from_secs(30);

/// How long is looked at a pod that should be bound long before.
const LIMIT: Duration = Duration::from_secs(150);

/// A whole scenario.
const ALL: Duration = Duration::from_secs(400);

/// How long a victim takes to end: longer than a pod whose room went to another one rests.
const ENDS_WITHIN: u64 = 12;

/// From the end of a victim to the bind, and before it from the pod to the eviction, with two busy cores.
const MARGIN: Duration = Duration::from_secs(9);

/// A second or two of a GPU from one pod to the next, on two busy cores.
const MOST_IDLE: f64 = 5.0;

#[test]
fn room_of_an_ending_pod_is_kept_for_one_pod_alone() {
    scenario_within("kept-one-gpu", ALL, |bed| async move {
        let mut scene = scene(bed, 1, json!({})).await;
        scene.stage.cluster.add_pods(&[low("v")]).await;
        assert!(scene.until_bound(&["v"], SOON).await);
        scene.stage.cluster.add_pods(&[low("q")]).await;
        scene.until_kept().await;
        let created = clock::now();
        scene.stage.cluster.add_pods(&[high("p")]).await;
        scene.until_bound(&["p"], LIMIT).await;
        let bound = scene.bound_after("p", created);
        let (gone, idle) = (scene.asked_since(created), scene.idle(created));
        scene.row("A1 one GPU, a standing hold", bound, gone.len(), idle);
        assert_eq!(gone, ["v"], "one has to go");
        assert!(bound.is_some_and(|bound| bound < ends_within() + MARGIN), "{bound:?}");
        assert!(idle < MOST_IDLE, "{idle} s");
        scene.stage.judge().await;
    });
}

#[test]
fn of_two_equal_pods_the_one_for_which_another_ended_is_bound() {
    if !runs("kept-two-equal") {
        return;
    }
    scenario_within("kept-two-equal", ALL, |bed| async move {
        let mut scene = scene(bed, 3, json!({})).await;
        // On the first node, which is taken where several are alike.
        let holders = [low("v"), high("h-0"), high("h-1")];
        let nodes = scene.stage.fleet.nodes.iter().map(|node| node.name.clone());
        let on = holders.into_iter().zip(nodes).map(|(pod, node)| pod.only_on(&node));
        scene.stage.cluster.add_pods(&on.collect::<Vec<_>>()).await;
        assert!(scene.until_bound(&["h-0", "h-1", "v"], SOON).await);
        let created = clock::now();
        scene.stage.cluster.add_pods(&[high("p-0"), high("p-1")]).await;
        let either = |pods: &Pods| is_bound(pods, "p-0") || is_bound(pods, "p-1");
        scene.until(LIMIT, either).await;
        let bound = ["p-0", "p-1"]
            .into_iter()
            .find_map(|name| Some((name, scene.bound_after(name, created)?)));
        let events = scene.stage.cluster.events().await;
        let made = events.iter().find(|event| event.reason == "GpuRoomMade");
        let made = made.map_or("nobody", |event| event.pod.as_str());
        let (gone, idle) = (scene.asked_since(created), scene.idle(created));
        let after = bound.map(|(_, after)| after);
        let name = bound.map_or("nobody", |(name, _)| name);
        scene.row(
            &format!("A1 two equal, room for {made}, {name} has it"),
            after,
            gone.len(),
            idle,
        );
        assert_eq!(gone, ["v"], "one has to go");
        assert!(after.is_some_and(|after| after < ends_within() + MARGIN), "{after:?}");
        assert!(idle < MOST_IDLE, "{idle} s");
        assert_eq!(made, name, "the pod for which the other ended");
        scene.stage.judge().await;
    });
}

#[test]
fn a_team_gets_all_the_room_that_was_made_for_its_guarantee() {
    if !runs("kept-team") {
        return;
    }
    scenario_within("kept-team", ALL, |bed| async move {
        let shares = json!({"teams": {"vision": {"guaranteed": 2}}});
        let mut scene = scene(bed, 2, json!({"shares": shares})).await;
        let speech = scene.stage.cluster.beside("speech", json!({})).await;
        let vision = scene.stage.cluster.beside("vision", json!({})).await;
        speech.add_pods(&[low("s-0"), low("s-1")]).await;
        assert!(scene.until_bound(&["s-0", "s-1"], SOON).await);
        speech.add_pods(&[low("q")]).await;
        scene.until_kept().await;
        let created = clock::now();
        let wanted = ["v-0", "v-1"];
        vision.add_pods(&wanted.map(low)).await;
        scene.until_bound(&wanted, LIMIT).await;
        let bound = wanted.map(|name| scene.bound_after(name, created));
        let (gone, idle) = (scene.asked_since(created), scene.idle(created));
        for (name, bound) in wanted.iter().zip(bound) {
            scene.row(&format!("A1 a team with 2 guaranteed, {name}"), bound, gone.len(), idle);
        }
        assert_eq!(gone.len(), 2, "two have to go: {gone:?}");
        let in_time = |it: &Option<_>| it.is_some_and(|it| it < ends_within() + MARGIN);
        assert!(bound.iter().all(in_time), "{bound:?}");
        assert!(idle < 2.0 * MOST_IDLE, "{idle} s");
        scene.stage.judge().await;
    });
}

#[test]
fn room_on_a_node_that_leaves_is_made_elsewhere_at_once() {
    node_leaves("kept-cordoned", true);
    if runs("kept-deleted") {
        node_leaves("kept-deleted", false);
    }
}

/// How long after a node has left a pod of another is asked to go, on two busy cores.
const SEEN_WITHIN: Duration = Duration::from_secs(6);

/// Two nodes; the one where room is made leaves while the victim ends.
fn node_leaves(name: &'static str, is_cordoned: bool) {
    scenario_within(name, ALL, move |bed| async move {
        let mut scene = scene(bed, 2, json!({})).await;
        scene.stage.cluster.add_pods(&[low("v-0"), low("v-1")]).await;
        assert!(scene.until_bound(&["v-0", "v-1"], SOON).await);
        let created = clock::now();
        scene.stage.cluster.add_pods(&[high("p")]).await;
        let is_asked = |pods: &Pods| ["v-0", "v-1"].iter().any(|name| is_leaving(pods, name));
        assert!(scene.until(SOON, is_asked).await, "none is evicted");
        scene.play(Duration::from_secs(2)).await;
        let first = scene.asked_since(created).remove(0);
        let node = scene.stage.watching.ask(|pods| node_of(pods, &first)).expect("it is bound");
        let left = clock::now();
        match is_cordoned {
            true => scene.stage.cluster.cordon(&node).await,
            false => scene.stage.cluster.delete_node(&node).await,
        }
        scene.until_bound(&["p"], LIMIT).await;
        let bound = scene.bound_after("p", left);
        let gone = scene.asked_since(created);
        let next = gone.get(1).and_then(|name| scene.asked_after(name, left));
        let what = if is_cordoned { "cordoned" } else { "deleted" };
        let what = format!("A2 node {what}, next try after {} s", seconds(next));
        scene.row(&what, bound, gone.len(), scene.idle_without(&node, left));
        assert_eq!(gone.len(), 2, "{name}: one on each node: {gone:?}");
        assert!(next.is_some_and(|next| next < SEEN_WITHIN), "{name}: {next:?}");
        assert!(bound.is_some_and(|bound| bound < ends_within() + MARGIN), "{name}: {bound:?}");
        scene.stage.judge().await;
    });
}

#[test]
fn a_pod_that_hangs_holds_up_no_important_one() {
    hung("kept-hung-lost", true);
    if runs("kept-hung") {
        hung("kept-hung", false);
    }
}

/// How long the others there take to end.
const SOON_ENDED: Duration = Duration::from_secs(2);

/// How long after it is created a pod is evicted for an important one that fits beside no other.
const MADE_WITHIN: Duration = Duration::from_secs(13);

/// Three nodes; on one a pod was asked to go and its process stays.
fn hung(name: &'static str, is_lost: bool) {
    scenario_within(name, ALL, move |bed| async move {
        let mut scene = scene(bed, 3, json!({})).await.ending_after(SOON_ENDED);
        let nodes: Vec<String> =
            scene.stage.fleet.nodes.iter().map(|node| node.name.clone()).collect();
        let names = ["hung", "v-1", "v-2"];
        let pods = names.iter().zip(&nodes).map(|(name, node)| {
            let pod = low(name).only_on(node);
            if *name == "hung" { pod.ending_within(1) } else { pod }
        });
        scene.stage.cluster.add_pods(&pods.collect::<Vec<_>>()).await;
        assert!(scene.until_bound(&names, SOON).await);
        scene.hang("hung");
        scene.stage.cluster.ask_to_end("hung").await;
        if is_lost {
            scene.stage.cluster.lose_kubelet(&nodes[0]).await;
            scene.play(Duration::from_secs(2)).await;
        } else {
            scene.play(Duration::from_secs(33)).await;
        }
        let how = if is_lost { "node lost" } else { "past its time" };
        let mut late = Vec::new();
        for name in ["first", "second"] {
            let created = clock::now();
            scene.stage.cluster.add_pods(&[high(name)]).await;
            scene.until_bound(&[name], LIMIT).await;
            let bound = scene.bound_after(name, created);
            let gone = scene.asked_since(created);
            let next = gone.first().and_then(|name| scene.asked_after(name, created));
            let what = format!("A6 hung, {how}, {name}, evicts after {} s", seconds(next));
            scene.row(&what, bound, gone.len(), scene.idle(created));
            let limit = MADE_WITHIN + SOON_ENDED + MARGIN;
            let in_time = next.is_some_and(|next| next < MADE_WITHIN)
                && bound.is_some_and(|bound| bound < limit);
            if !in_time || gone.len() != 1 {
                late.push((name, next, bound, gone));
            }
        }
        assert!(late.is_empty(), "{how}: {late:?}");
        scene.stage.judge().await;
    });
}

#[test]
fn room_that_only_its_own_predecessor_frees_is_for_others() {
    scenario_within("kept-replica", ALL, |bed| async move {
        let mut scene = scene(bed, 2, json!({})).await;
        let replica =
            |name: &str, revision: &str| PodPlan::fraction(name, "0.6").replica_of("web", revision);
        let old = ["old-0", "old-1"].map(|name| replica(name, "5d4f"));
        scene.stage.cluster.add_pods(&old).await;
        assert!(scene.until_bound(&["old-0", "old-1"], SOON).await);
        scene.stage.cluster.add_pods(&[replica("new-0", "7c9b")]).await;
        // Long enough for a standing hold, whether or not there is one.
        scene.play(Duration::from_secs(6)).await;
        let holds = scene.stage.extender.metric("gpupack_standing_holds", "").await;
        let created = clock::now();
        let small = ["small-0", "small-1"];
        scene.stage.cluster.add_pods(&small.map(|name| PodPlan::fraction(name, "0.4"))).await;
        scene.until_bound(&small, SOON).await;
        let bound = small.map(|name| scene.bound_after(name, created));
        for (name, bound) in small.iter().zip(bound) {
            scene.row(&format!("A7 rolling update, {holds} kept, {name}"), bound, 0, 0.0);
        }
        let in_time = |it: &Option<_>| it.is_some_and(|it| it < Duration::from_secs(5));
        assert!(bound.iter().all(in_time), "{bound:?}");
        scene.stage.judge().await;
    });
}

/// This many nodes with a GPU each, whose pods take their time to end. Room is kept after 2 s.
async fn scene(bed: Testbed, nodes: usize, settings: Value) -> Scene {
    let mut settings = settings;
    settings["standing_hold_after_seconds"] = 2.into();
    let fleet = Fleet::new().with(bed.name, nodes, (1, A100));
    let stage: Stage = bed.stage(Setup { settings, ..Setup::of(fleet) }).await;
    Scene::new(stage, ends_within()).await
}

fn ends_within() -> Duration {
    Duration::from_secs(ENDS_WITHIN)
}

fn low(name: &str) -> PodPlan {
    PodPlan::fraction(name, "1").ending_within(ENDS_WITHIN).important("e2e-low")
}

fn high(name: &str) -> PodPlan {
    PodPlan::fraction(name, "1").ending_within(ENDS_WITHIN).important("e2e-high")
}

fn is_leaving(pods: &Pods, name: &str) -> bool {
    find(pods, name).is_some_and(|seen| seen.pod.metadata.deletion_timestamp.is_some())
}

fn node_of(pods: &Pods, name: &str) -> Option<String> {
    find(pods, name)?.pod.spec.as_ref()?.node_name.clone()
}
