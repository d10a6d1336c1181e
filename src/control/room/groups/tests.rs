use std::collections::BTreeSet;

use super::*;
use crate::room::fixture::{ALL, Bed, waiting_pod};
use engine::ledger::ledger_fixture::{bound, pod, share_request, uid};
use engine::model::request::PodGroup;
use engine::model::reservation::Controller;
use wire::ids::NodeName;
use wire::units::Share;

fn bed() -> Bed {
    Bed::new(Duration::from_secs(1))
}

/// A pod of a group of this size, with a whole GPU, was refused.
fn refused(bed: &Bed, name: &str, group: &str, size: u32) {
    let group = Some(PodGroup { name: group.into(), size });
    bed.refused(WaitingPod { group, ..waiting_pod(name, 1_000_000, 0) }, ALL);
}

/// The pods for which room is kept this much later; what is noted on pods; what is no longer.
fn kept_after(bed: &mut Bed, seconds: u64) -> (Vec<String>, usize, usize) {
    let step = bed.step_after(seconds);
    let kept = bed.ledger.standing_nodes().into_keys().map(|uid| uid.to_string());
    (kept.collect(), step.noted.len(), step.abandoned.len())
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

#[test]
fn a_group_gets_room_when_all_of_its_pods_wait_and_fit() {
    let mut bed = bed();
    refused(&bed, "a", "g", 2);
    assert_eq!(kept_after(&mut bed, 1), (vec![], 0, 0), "one of two");
    refused(&bed, "b", "g", 2);
    assert_eq!(kept_after(&mut bed, 1), (names(&["a", "b"]), 2, 0));
    assert_eq!(kept_after(&mut bed, 1), (names(&["a", "b"]), 0, 0), "noted once");
    // A second group does not get a part of what it needs.
    refused(&bed, "c", "h", 2);
    refused(&bed, "d", "h", 2);
    assert_eq!(kept_after(&mut bed, 1), (names(&["a", "b"]), 0, 0), "one GPU is left");
    for name in ["a", "b"] {
        let node = bed.ledger.standing_nodes()[&uid(name)].clone();
        bed.ledger.reserve(&pod(name), node.as_str(), &share_request(1_000_000), bed.now).unwrap();
        bed.waiting.remove(&uid(name));
    }
    assert_eq!(kept_after(&mut bed, 5), (vec![], 0, 0));
    bed.ledger.audit().unwrap();
}

#[test]
fn room_of_a_group_that_is_not_bound_in_time_is_given_up_as_a_whole() {
    let mut bed = bed();
    for name in ["a", "b", "c"] {
        refused(&bed, name, "g", 3);
    }
    assert_eq!(kept_after(&mut bed, 1).0, names(&["a", "b", "c"]));
    assert_eq!(kept_after(&mut bed, 59).0, names(&["a", "b", "c"]));
    assert_eq!(kept_after(&mut bed, 1), (vec![], 0, 3));
    assert_eq!(kept_after(&mut bed, 59), (vec![], 0, 0), "a pause");
    assert_eq!(kept_after(&mut bed, 2).0, names(&["a", "b", "c"]));
}

#[test]
fn pods_that_are_bound_count() {
    let mut bed = bed();
    bed.bound.see(&uid("x"), ("team".into(), "g".into()), 3);
    bed.bound.see(&uid("x"), ("team".into(), "g".into()), 3);
    bed.bound.see(&uid("y"), ("other".into(), "g".into()), 3);
    bed.ledger.see_pod(&bound("x", "n", "A", 1_000_000), bed.now);
    refused(&bed, "a", "g", 3);
    assert_eq!(kept_after(&mut bed, 1).0, names(&[]), "two of three");
    refused(&bed, "b", "g", 3);
    assert_eq!(kept_after(&mut bed, 1).0, names(&["a", "b"]));
    bed.bound.forget(&uid("x"));
    assert_eq!(bed.bound.count(), 1);
}

#[test]
fn no_room_is_kept_for_a_group_that_has_lost_a_pod_before_it_started() {
    let mut bed = bed();
    for name in ["a", "b"] {
        refused(&bed, name, "g", 2);
    }
    assert_eq!(kept_after(&mut bed, 1).0, names(&["a", "b"]));
    bed.waiting.remove(&uid("b"));
    assert_eq!(kept_after(&mut bed, 1), (vec![], 0, 1));
    refused(&bed, "c", "g", 2);
    assert_eq!(kept_after(&mut bed, 1).0, names(&["a", "c"]), "another one in its place");
    // Once one of them has its place, the other one starts as well, whatever becomes of the first.
    let node = bed.ledger.standing_nodes()[&uid("c")].clone();
    bed.ledger.reserve(&pod("c"), node.as_str(), &share_request(1_000_000), bed.now).unwrap();
    bed.waiting.remove(&uid("c"));
    assert_eq!(kept_after(&mut bed, 1).0, names(&["a"]));
    let _events = bed.ledger.forget(&uid("c"));
    assert_eq!(kept_after(&mut bed, 1).0, names(&["a"]));
}

#[test]
fn a_group_that_has_waited_long_starts_with_the_next_step_once_it_fits() {
    let mut bed = bed();
    for (name, node, device) in [("x", "n", "A"), ("y", "n", "B"), ("z", "m", "C")] {
        bed.bind(name, node, device, 1_000_000, 0);
    }
    for name in ["a", "b"] {
        refused(&bed, name, "g", 2);
    }
    for _ in 0..300 {
        assert_eq!(kept_after(&mut bed, 1).0, names(&[]));
    }
    for (name, sequence) in [("x", 2), ("y", 4)] {
        bed.ledger.end_pod(&uid(name), bed.now);
        for sequence in [sequence, sequence + 1] {
            let report = engine::ledger::ledger_fixture::report("x", 7, sequence, "A B");
            bed.ledger.report("n", &report, bed.now).unwrap();
        }
        bed.holds.note_rooms([NodeName::new("n")].into());
        let expected: &[&str] = if name == "x" { &[] } else { &["a", "b"] };
        assert_eq!(kept_after(&mut bed, 0).0, names(expected), "after {name}");
    }
}

/// The pods of a group, each with a whole GPU, that this controller made, were refused.
fn refused_of(bed: &Bed, pods: &[&str], group: &str, controller: u64) {
    for name in pods {
        let group = Some(PodGroup { name: group.into(), size: u32::try_from(pods.len()).unwrap() });
        let controller = Some(Controller(controller));
        let pod = WaitingPod { group, controller, ..waiting_pod(name, 1_000_000, 0) };
        bed.refused(pod, ALL);
    }
}

/// Room that is kept within half an hour if no pod is ever bound, in thousandths of all GPUs, without the first 60 s
/// of each owner. Pods are named after theirs: `a-7`.
fn idle(bed: &mut Bed) -> u64 {
    let (mut idle, mut first) = (0, BTreeMap::<String, u64>::new());
    for _ in 0..1_800 {
        let kept = kept_after(bed, 1).0;
        let owner = |uid: &String| uid.split_once('-').map(|(_, owner)| owner.to_owned()).unwrap();
        let owners: BTreeSet<String> = kept.iter().map(owner).collect();
        for of in owners {
            let seconds = first.entry(of.clone()).or_default();
            *seconds += 1;
            let is_first = *seconds <= 60;
            idle += kept.iter().filter(|uid| owner(uid) == of && !is_first).count() as u64;
        }
    }
    idle * 1_000 / (3 * 1_800)
}

#[test]
fn groups_that_never_bind_leave_the_pool_to_others() {
    for owners in [1, 2, 10, 40] {
        let idle = idle(&mut bed_of(owners));
        assert!(idle <= 50, "{idle} thousandths, of {owners} owners");
    }
}

#[test]
fn single_pods_that_never_bind_leave_the_pool_to_others() {
    for owners in [1, 12] {
        let mut bed = bed();
        for owner in 0..owners {
            let controller = Some(Controller(owner));
            let pod = waiting_pod(&format!("a-{owner}"), 1_000_000, 0);
            bed.refused(WaitingPod { controller, created_unix_seconds: 0, ..pod }, ALL);
        }
        let idle = idle(&mut bed);
        assert!(idle <= 50, "{idle} thousandths, of {owners} owners");
    }
}

fn bed_of(owners: u64) -> Bed {
    let mut bed = bed();
    bed.rules.at_most = Share::from_millionths(250_000);
    for owner in 0..owners {
        let pods = ["a", "b", "c"].map(|name| format!("{name}-{owner}"));
        let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
        refused_of(&bed, &pods, &format!("g-{owner}"), owner);
    }
    bed
}

#[test]
fn only_one_group_of_a_pool_waits_for_more_than_ten_seconds_at_a_time() {
    let mut bed = bed();
    refused_of(&bed, &["a"], "g", 1);
    let of_other = |bed: &Bed, name: &str| {
        let group = Some(PodGroup { name: "h".into(), size: 1 });
        let pod =
            WaitingPod { group, namespace: "z".to_owned(), ..waiting_pod(name, 1_000_000, 0) };
        bed.refused(pod, ALL);
    };
    of_other(&bed, "b");
    assert_eq!(kept_after(&mut bed, 1).0, names(&["a", "b"]));
    assert_eq!(kept_after(&mut bed, 9).0, names(&["a", "b"]));
    assert_eq!(kept_after(&mut bed, 1).0, names(&["a"]), "the second one makes way");
    assert_eq!(kept_after(&mut bed, 49).0, names(&["a"]), "for as long");
    assert_eq!(kept_after(&mut bed, 1).0, names(&[]));
    assert_eq!(kept_after(&mut bed, 2).0, names(&["b"]), "then it is its turn");
    assert_eq!(kept_after(&mut bed, 57).0, names(&["b"]), "for longer, too");
}

#[test]
fn a_group_that_its_team_may_not_have_where_it_fits_wakes_no_step_again_and_again() {
    use engine::ledger::query::queries::PlacementRequest;
    use engine::model::charge::Prices;
    use engine::model::event::LedgerEvent;
    use engine::model::request::{Amount, GpuRequest};
    use engine::model::team::{TeamRules, TeamShare};
    use wire::units::MemMib;
    let mut bed = bed();
    let others = TeamShare { guaranteed: Share::ZERO, at_most: Some(Share::WHOLE) };
    bed.ledger.teams.rule(TeamRules { others, ..TeamRules::default() }, Prices::default());
    for name in ["a", "b"] {
        let group = Some(PodGroup { name: "g".into(), size: 2 });
        let amount = Amount::Memory(MemMib::new(800));
        let query = PlacementRequest { gpu: Some(GpuRequest::one(amount)), ..share_request(1) };
        bed.refused(WaitingPod { group, query, ..waiting_pod(name, 1, 0) }, ALL);
    }
    let mut busy = 0;
    for _ in 0..100 {
        let step = bed.step_after(0);
        let rooms: BTreeSet<NodeName> = step
            .events
            .iter()
            .filter_map(|it| match it {
                LedgerEvent::Room(node) => Some(node.clone()),
                _ => None,
            })
            .collect();
        busy += usize::from(!rooms.is_empty());
        bed.holds.note_rooms(rooms);
    }
    assert!(busy <= 2, "{busy} of 100 steps in no time wake the next one");
}

#[test]
fn groups_behind_many_others_are_looked_at() {
    let mut bed = bed();
    bed.bind("x", "n", "B", 1_000_000, 0);
    bed.bind("y", "m", "C", 1_000_000, 0);
    for group in 0..70 {
        for pod in 0..8 {
            refused(&bed, &format!("g{group:02}-{pod}"), &format!("g{group:02}"), 8);
        }
    }
    let group = Some(PodGroup { name: "last".into(), size: 1 });
    let pod = WaitingPod { group, created_unix_seconds: 1_001, ..waiting_pod("last", 500_000, 0) };
    bed.refused(pod, ALL);
    for _ in 0..120 {
        bed.holds.note_rooms([NodeName::new("n")].into());
        if !kept_after(&mut bed, 1).0.is_empty() {
            return;
        }
    }
    panic!("it fits for two minutes, and is never looked at");
}

#[test]
fn groups_behind_many_of_one_namespace_that_may_not_start_are_looked_at() {
    let mut bed = bed();
    bed.rules.at_most = Share::from_millionths(250_000);
    // One group of the namespace `team` has failed.
    refused_of(&bed, &["bad"], "bad", 9_999);
    for _ in 0..62 {
        bed.step_after(1);
    }
    bed.waiting.remove(&uid("bad"));
    bed.step_after(1);
    for group in 0..150 {
        for pod in 0..8 {
            let name = format!("g{group:03}-{pod}");
            let group_of = Some(PodGroup { name: format!("g{group:03}").into(), size: 8 });
            let controller = Some(Controller(group));
            let pod = WaitingPod { group: group_of, controller, ..waiting_pod(&name, 125_000, 0) };
            bed.refused(pod, ALL);
        }
    }
    let group = Some(PodGroup { name: "honest".into(), size: 1 });
    let honest = waiting_pod("honest", 500_000, 0);
    let honest =
        WaitingPod { group, namespace: "other".to_owned(), created_unix_seconds: 1_001, ..honest };
    bed.refused(honest, ALL);
    for at in 0..300 {
        let kept = kept_after(&mut bed, 1).0;
        if kept.contains(&"honest".to_owned()) {
            assert!(at <= 5, "after {at} s");
            return;
        }
    }
    panic!("two GPUs are free for five minutes, and it is never looked at");
}

#[test]
fn a_group_whose_pods_are_made_again_does_not_keep_the_pool_idle() {
    let mut bed = bed();
    refused_of(&bed, &["a-0", "b-0", "c-0"], "g", 7);
    let (mut idle, mut last) = (0, "a-0".to_owned());
    for second in 0..1_800 {
        if second % 50 == 49 {
            bed.waiting.remove(&uid(&last));
            last = format!("a-{second}");
            let group = Some(PodGroup { name: "g".into(), size: 3 });
            let controller = Some(Controller(7));
            bed.refused(WaitingPod { group, controller, ..waiting_pod(&last, 1_000_000, 0) }, ALL);
        }
        idle += kept_after(&mut bed, 1).0.len();
    }
    assert!(idle * 1_000 / (3 * 1_800) <= 100, "{} thousandths", idle * 1_000 / (3 * 1_800));
}

#[test]
fn a_new_controller_each_time_does_not_keep_the_pool_idle() {
    let mut bed = bed();
    bed.rules.at_most = Share::from_millionths(250_000);
    let (mut kept, mut controller) = (0, 0);
    let mut pods: Vec<String> = Vec::new();
    for _ in 0..1_800 {
        let now = kept_after(&mut bed, 1).0.len();
        kept += now;
        if now == 0 {
            pods.iter().for_each(|pod| bed.waiting.remove(&uid(pod)));
            controller += 1;
            pods = ["a", "b", "c"].map(|name| format!("{name}-{controller}")).into();
            let names: Vec<&str> = pods.iter().map(String::as_str).collect();
            refused_of(&bed, &names, &format!("g-{controller}"), controller);
        }
    }
    let thousandths = kept * 1_000 / (3 * 1_800);
    assert!(thousandths <= 33 + 50, "{thousandths} thousandths with the first wait");
}

#[test]
fn pods_of_a_group_that_are_deleted_together_are_one_failure_at_most() {
    let mut bed = bed();
    let names: Vec<String> = (0..45).map(|number| format!("p{number:02}")).collect();
    for name in &names {
        let group = Some(PodGroup { name: "g".into(), size: 45 });
        bed.refused(WaitingPod { group, ..waiting_pod(name, 40_000, 0) }, ALL);
    }
    kept_after(&mut bed, 1);
    assert_eq!(kept_after(&mut bed, 1).0.len(), 45);
    let node = bed.ledger.standing_nodes()[&uid("p00")].clone();
    bed.ledger.reserve(&pod("p00"), node.as_str(), &share_request(40_000), bed.now).unwrap();
    bed.waiting.remove(&uid("p00"));
    kept_after(&mut bed, 1);
    names[1..].iter().for_each(|name| bed.waiting.remove(&uid(name)));
    kept_after(&mut bed, 1);
    let other = waiting_pod("other", 1, 0);
    let owner = Owner::of(&other, &bed.ledger);
    assert!(!bed.holds.owners.is_paused(&owner, [&other], bed.now), "two seconds, not 88");
}

#[test]
fn a_group_whose_namespace_deleted_others_has_its_time() {
    let mut bed = bed();
    for number in 0..5 {
        let name = format!("c-{number}");
        refused_of(&bed, &[&name], &format!("g-{number}"), number);
        kept_after(&mut bed, 1);
        kept_after(&mut bed, 8);
        bed.waiting.remove(&uid(&name));
        kept_after(&mut bed, 1);
        kept_after(&mut bed, 600);
    }
    refused_of(&bed, &["a", "b"], "honest", 99);
    let kept = (0..90).take_while(|_| !kept_after(&mut bed, 1).0.is_empty()).count();
    assert_eq!(kept, 60);
}
