use std::sync::Arc;

use super::*;
use crate::hardware::device_class::DeviceClasses;
use crate::hardware::pool::PoolRule;
use crate::hardware::units::Timestamp;
use crate::model::device_state::{DeviceUse, ProcessUse};
use crate::model::request::{Amount, GpuRequest};
use crate::model::reservation::{PlacedDevice, Tenure};
use crate::scoring::fixture::{node_of, tenant};

/// A node of a pool that lends.
fn lending(text: &str) -> NodeState {
    let mut classes = DeviceClasses::default();
    let mut node = node_of(text, &mut classes);
    node.share_by(PoolRule { borrow: Borrow::Compute, ..PoolRule::default() }, &mut classes);
    node
}

/// A pod with this part of a device of 1000 MiB, which may use all of it and be moved.
fn movable(name: &str, home: &str, part: u64) -> Reservation {
    let (memory, share) = (MemMib::new(part), Share::from_millionths(part * 1_000));
    let id = DeviceId::new(home).unwrap();
    let mut request = GpuRequest::one(Amount::Fraction(share));
    (request.limit, request.movable) = (Some(Limit::Fraction(Share::WHOLE)), Movable::Restart);
    let placed = PlacedDevice { id, demand: Demand { memory, share } };
    Reservation { request: Some(Arc::new(request)), ..tenant(name, vec![placed]) }
}

fn start(node: &mut NodeState, held: Reservation) -> Option<String> {
    let uid = held.pod.uid.clone();
    node.allocate(held);
    let on = start_place(node, node.reservation(&uid).unwrap());
    if let Some(on) = &on {
        node.lend(&uid, on.clone());
    }
    on.map(|on| on.to_string())
}

fn recalled(node: &mut NodeState) -> Vec<String> {
    recall_excess(node).iter().map(PodUid::to_string).collect()
}

#[test]
fn a_pod_starts_where_it_has_strictly_more_room_than_at_home() {
    for (text, held, on) in [
        ("A:1000/1000 B:1000/1000", movable("p", "A", 500), None), // alone at home
        ("A:500/1000 B:1000/1000", movable("p", "A", 500), Some("B")),
        ("A:500/1000 B:600/1000 C:1000/1000", movable("p", "A", 500), Some("C")),
        ("A:500/1000 B:500/1000", movable("p", "A", 500), None), // no more there
        ("A:500/1000 B:400/1000", movable("p", "A", 500), None), // too little
        ("A:500/1000 B!:1000/1000", movable("p", "A", 500), None),
        ("A:500/1000 B:1000/1000@T4", movable("p", "A", 500), None), // another class
        ("A:500/1000 B:2000/2000", movable("p", "A", 500), None),
    ] {
        assert_eq!(start(&mut lending(text), held).as_deref(), on, "{text}");
    }
}

#[test]
fn only_pods_that_may_be_moved_and_use_more_are_guests() {
    let with = |change: fn(&mut GpuRequest)| {
        let held = movable("p", "A", 500);
        let mut request = (**held.request.as_ref().unwrap()).clone();
        change(&mut request);
        Reservation { request: Some(Arc::new(request)), ..held }
    };
    for (what, held) in [
        ("not movable", with(|it| it.movable = Movable::Never)),
        ("no limit", with(|it| it.limit = None)),
        ("limit is request", with(|it| it.limit = Some(Limit::Memory(MemMib::new(500))))),
        ("isolated", with(|it| it.isolation = Isolation::Memory)),
        ("unknown", Reservation { request: None, ..movable("p", "A", 500) }),
    ] {
        assert_eq!(start(&mut lending("A:500/1000 B:1000/1000"), held), None, "{what}");
    }
    let (mut node, held) = (lending("A:500/1000 B:1000/1000"), movable("p", "A", 500));
    assert_eq!(start(&mut node, held.clone()).as_deref(), Some("B"));
    let mut classes = DeviceClasses::default();
    let mut other = node_of("A:500/1000 B:1000/1000", &mut classes);
    assert_eq!(start(&mut other, held), None, "the pool does not lend");
}

#[test]
fn the_fewest_and_least_important_guests_go() {
    let mut node = lending("A:0/1000 B:0/1000 C:1000/1000");
    node.remove(&PodUid::new("of-A"));
    node.remove(&PodUid::new("of-B"));
    let guest = |name: &str, home: &str, part, priority| {
        let tenure = Some(Tenure { priority, ..Tenure::default() });
        Reservation { tenure, ..movable(name, home, part) }
    };
    for held in [guest("a", "A", 200, 5), guest("b", "A", 300, 1), guest("c", "B", 400, 3)] {
        let uid = held.pod.uid.clone();
        node.allocate(held);
        node.lend(&uid, DeviceId::new("C").unwrap());
    }
    assert_eq!(recalled(&mut node), [""; 0], "all have room");
    let newcomer = |part| tenant("new", movable("new", "C", part).placement.devices);
    for (part, gone) in [
        (100, &[][..]),
        (300, &["b"]),
        (450, &["c"]),
        (700, &["b", "c"]),
        (1_000, &["b", "c", "a"]),
    ] {
        let mut node = node.clone();
        node.allocate(newcomer(part));
        assert_eq!(recalled(&mut node), gone, "{part}");
        assert_eq!(recalled(&mut node), [""; 0], "once");
    }
    // `b` is the first to go, and not enough for 450; `c` alone is.
    let mut node = node.clone();
    node.allocate(newcomer(450));
    assert_eq!(recalled(&mut node), ["c"]);
    assert!(!may_stay(&node, &PodUid::new("c")), "its room is taken");
    node.remove(&PodUid::new("new"));
    assert!(may_stay(&node, &PodUid::new("c")) && node.stay(&PodUid::new("c")));
}

#[test]
fn a_guest_that_ends_is_allocated_where_it_runs_until_its_processes_have_ended() {
    let mut node = lending("A:500/1000 B:1000/1000");
    assert_eq!(start(&mut node, movable("p", "A", 500)).as_deref(), Some("B"));
    node.drain(&PodUid::new("p"), Timestamp::START);
    let free: Vec<u64> = node.devices().iter().map(|it| it.free().memory.mib()).collect();
    assert_eq!(free, [500, 500]);
    assert!(node.devices()[1].guests().is_empty());
}

#[test]
fn what_a_guest_uses_within_its_request_counts_as_free() {
    for (used, free) in [(400, 1_000), (500, 1_000), (600, 900)] {
        let mut node = lending("A:500/1000 B:1000/1000");
        assert_eq!(start(&mut node, movable("p", "A", 500)).as_deref(), Some("B"));
        let process = ProcessUse { pod: Some(PodUid::new("p")), memory: Some(MemMib::new(used)) };
        let seen = DeviceUse {
            used: Some(MemMib::new(used)),
            processes: Some(vec![process]),
            ..DeviceUse::idle(DeviceId::new("B").unwrap())
        };
        node.observe(&[seen], Timestamp::START);
        assert_eq!(node.devices()[1].free().memory.mib(), free, "{used}");
    }
}

#[test]
fn a_guest_is_gone_after_two_lists_without_it() {
    let mut node = lending("A:500/1000 B:1000/1000");
    assert_eq!(start(&mut node, movable("p", "A", 500)).as_deref(), Some("B"));
    let uid = PodUid::new("p");
    let list = |pods: &[&str]| {
        let process = |pod: &&str| ProcessUse { pod: Some(PodUid::new(*pod)), memory: None };
        let processes = Some(pods.iter().map(process).collect());
        [DeviceUse { processes, ..DeviceUse::idle(DeviceId::new("B").unwrap()) }]
    };
    let is_left = |node: &NodeState| node.devices()[1].is_being_left();
    node.recall(std::slice::from_ref(&uid));
    (0..3).for_each(|_| drop(node.observe(&list(&[]), Timestamp::START)));
    assert!(is_left(&node), "its container has not ended: it may use the device again");
    node.restarted(&uid, Timestamp::START);
    for (pods, is_gone) in [(&[][..], false), (&["p"], false), (&[], false), (&[], true)] {
        node.observe(&list(pods), Timestamp::START);
        assert_eq!(!is_left(&node), is_gone, "{pods:?}");
    }
    assert!(node.devices()[1].guests().is_empty());
}
