use super::*;
use crate::control::room::fixture::{ALL, Bed, waiting_pod};
use crate::ledger::fixture::{bound, pod, share_query, uid};
use crate::model::request::PodGroup;

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
        bed.ledger.reserve(&pod(name), node.as_str(), &share_query(1_000_000), bed.now).unwrap();
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
    bed.bound.see(&uid("x"), ("team".into(), "g".into()));
    bed.bound.see(&uid("x"), ("team".into(), "g".into()));
    bed.bound.see(&uid("y"), ("other".into(), "g".into()));
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
    bed.ledger.reserve(&pod("c"), node.as_str(), &share_query(1_000_000), bed.now).unwrap();
    bed.waiting.remove(&uid("c"));
    assert_eq!(kept_after(&mut bed, 1).0, names(&["a"]));
    let _events = bed.ledger.forget(&uid("c"));
    assert_eq!(kept_after(&mut bed, 1).0, names(&["a"]));
}
