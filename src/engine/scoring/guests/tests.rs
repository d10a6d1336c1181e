use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::hardware::device_class::DeviceClasses;
use crate::hardware::pool::{InstanceUse, PoolRule, Replicas};
use crate::model::device_state::HoldRule;
use crate::model::policy::Policy;
use crate::model::request::{Amount, GpuRequest, Isolation, Limit, Movable};
use crate::model::reservation::{Guest, MoveHome, PlacedDevice, Tenure};
use crate::scoring::cost::Cost;
use crate::scoring::lent_memory::ordered_limits;
use crate::scoring::node_fixture::{self, node_of, tenant};
use crate::scoring::plan;
use crate::scoring::strategy::Strategy;
use crate::waste::scarcity::ScarcityPrices;
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::Timestamp;

/// A node of a pool that lends.
fn lending(text: &str) -> NodeState {
    let mut classes = DeviceClasses::default();
    let mut node = node_of(text, &mut classes);
    node.share_by(PoolRule { borrow: Borrow::Compute, ..PoolRule::default() }, &mut classes);
    node
}

/// A node of a pool that lends memory, up to this share of a device.
fn lending_memory(text: &str, most: u64) -> NodeState {
    let mut classes = DeviceClasses::default();
    let mut node = node_of(text, &mut classes);
    let borrow = Borrow::Memory { most: Share::from_millionths(most * 1_000) };
    node.share_by(PoolRule { borrow, ..PoolRule::default() }, &mut classes);
    node
}

/// Lists what pods use of a device.
fn observe(node: &mut NodeState, device: &str, uses: &[(&str, u64)]) {
    let process = |(pod, mib): &(&str, u64)| ProcessUse {
        pod: Some(PodUid::new(*pod)),
        memory: Some(MemMib::new(*mib)),
    };
    let seen = DeviceUse {
        used: Some(MemMib::new(uses.iter().map(|(_, mib)| mib).sum())),
        processes: Some(uses.iter().map(process).collect()),
        ..DeviceUse::idle(DeviceId::new(device).unwrap())
    };
    node.observe(&[seen], Timestamp::START);
}

fn owing(node: &NodeState) -> Vec<String> {
    to_give_back(node).iter().map(PodUid::to_string).collect()
}

fn free_mib(node: &NodeState) -> u64 {
    node.devices()[0].free().memory.mib()
}

#[test]
fn borrowed_memory_is_free_up_to_the_limit() {
    for (most, used, free) in [
        (1_000, 300, 700),
        (1_000, 1_000, 700), // all of it is lent
        (600, 600, 700),
        (600, 650, 650), // above the operator's limit, so it is not free
    ] {
        let mut node = lending_memory("A:1000/1000", most);
        node.allocate(movable("p", "A", 300));
        observe(&mut node, "A", &[("p", used)]);
        assert_eq!(free_mib(&node), free, "{most} {used}");
    }
    let mut node = lending_memory("A:1000/1000", 1_000);
    node.allocate(Reservation { request: None, ..movable("p", "A", 300) });
    observe(&mut node, "A", &[("p", 800)]);
    assert_eq!(free_mib(&node), 200, "nothing takes it back from a pod that may not be restarted");
}

#[test]
fn use_that_no_list_explains_yet_is_not_free() {
    let mut node = lending_memory("A:1000/1000", 1_000);
    node.allocate(movable("p", "A", 300));
    let seen = DeviceUse {
        used: Some(MemMib::new(800)),
        processes: None,
        ..DeviceUse::idle(DeviceId::new("A").unwrap())
    };
    node.observe(&[seen], Timestamp::START);
    assert_eq!(free_mib(&node), 200);
    // Two lists show that no pod that has ended is left.
    (0..2).for_each(|_| observe(&mut node, "A", &[("p", 800)]));
    assert_eq!(free_mib(&node), 700);
}

#[test]
fn no_pod_gives_memory_back_because_another_may_have_ended() {
    let mut node = lending_memory("A:1000/1000", 1_000);
    node.allocate(movable("p", "A", 300));
    let seen = DeviceUse {
        used: Some(MemMib::new(1_000)),
        processes: None,
        ..DeviceUse::idle(DeviceId::new("A").unwrap())
    };
    node.observe(&[seen], Timestamp::START);
    observe(&mut node, "A", &[("p", 1_000)]);
    assert_eq!(owing(&node), [""; 0], "it uses all of the memory, and no other pod is there");
    assert!(!is_short_of_memory(&node, node.devices().iter()));
}

#[test]
fn memory_is_given_back_when_others_request_it() {
    let mut node = lending_memory("A:1000/1000", 1_000);
    let with_priority = |name: &str, part, priority| {
        let tenure = Some(Tenure { priority, ..Tenure::default() });
        Reservation { tenure, ..movable(name, "A", part) }
    };
    for held in [with_priority("a", 100, 5), with_priority("b", 100, 1), with_priority("c", 100, 1)]
    {
        node.allocate(held);
    }
    observe(&mut node, "A", &[("a", 300), ("b", 200), ("c", 250)]);
    assert_eq!(owing(&node), [""; 0], "all have room");
    let newcomer = |part| tenant("new", movable("new", "A", part).placement.devices);
    for (part, gives_back) in [
        (250, &[][..]),
        (300, &["c"]), // the less important ones first, of these the one with most above its request
        (400, &["c"]),
        (401, &["b", "c"]),
        (700, &["a", "b", "c"]),
    ] {
        let mut node = node.clone();
        node.allocate(newcomer(part));
        let mut found = owing(&node);
        found.sort();
        assert_eq!(found, gives_back, "{part}");
        assert_eq!(is_short_of_memory(&node, node.devices().iter()), part > 250, "{part}");
    }
    // What is on its way back counts, until a list shows that it is there.
    node.allocate(newcomer(400));
    let c = PodUid::new("c");
    node.note_borrowed(&c, BorrowedMemory::GivingBack);
    assert_eq!(owing(&node), [""; 0]);
    let way = |node: &NodeState| in_the_way(node, &node.devices()[0]).len();
    assert_eq!(way(&node), 3);
    observe(&mut node, "A", &[("a", 300), ("b", 200), ("c", 90)]);
    node.note_borrowed(&c, BorrowedMemory::Free);
    assert_eq!((owing(&node).len(), way(&node)), (0, 0));
}

#[test]
fn no_pod_gives_memory_back_where_that_helps_none() {
    let mut node = lending_memory("A:1000/1000", 1_000);
    node.allocate(movable("p", "A", 300));
    node.allocate(tenant("q", movable("q", "A", 500).placement.devices));
    // Processes of no pod use 250, so 50 are missing also if `p` gives all back.
    observe(&mut node, "A", &[("p", 400), ("other", 250)]);
    assert_eq!(owing(&node), [""; 0]);
    observe(&mut node, "A", &[("p", 400), ("other", 150)]);
    assert_eq!(owing(&node), ["p"]);
    // Nor where no list would show it.
    node.silence(std::time::Duration::ZERO, Timestamp::from_millis(1_000));
    assert_eq!(owing(&node), [""; 0]);
}

#[test]
fn borrowed_memory_is_not_free_in_a_pool_that_no_longer_lends() {
    let mut classes = DeviceClasses::default();
    let mut node = node_of("A:1000/1000", &mut classes);
    let borrow = Borrow::Memory { most: Share::WHOLE };
    node.share_by(PoolRule { borrow, ..PoolRule::default() }, &mut classes);
    node.allocate(movable("p", "A", 300));
    observe(&mut node, "A", &[("p", 800)]);
    assert_eq!(free_mib(&node), 700);
    node.share_by(PoolRule { borrow: Borrow::Compute, ..PoolRule::default() }, &mut classes);
    assert_eq!((free_mib(&node), node.audit()), (200, Ok(())));
}

#[test]
fn memory_that_cannot_be_taken_back_is_not_free() {
    let all = |node: &mut NodeState| {
        node.allocate(movable("p", "A", 300));
        observe(node, "A", &[("p", 800)]);
    };
    let mut node = lending_memory("A:1000/1000", 1_000);
    all(&mut node);
    node.note_borrowed(&PodUid::new("p"), BorrowedMemory::Kept);
    assert_eq!((free_mib(&node), node.audit()), (200, Ok(())));
    observe(&mut node, "A", &[("p", 800)]);
    assert_eq!(free_mib(&node), 200);
    // Of a pod that has ended, until its processes have.
    let mut node = lending_memory("A:1000/1000", 1_000);
    all(&mut node);
    node.drain(&PodUid::new("p"), Timestamp::START);
    assert_eq!((free_mib(&node), node.audit()), (200, Ok(())));
    (0..2).for_each(|_| observe(&mut node, "A", &[]));
    assert_eq!(free_mib(&node), 1_000);
}

#[test]
fn a_guest_takes_no_memory_that_others_use() {
    for (used, on) in [(500, Some("B")), (501, None)] {
        let mut node = lending_memory("A:500/1000 B:1000/1000", 1_000);
        node.allocate(movable("q", "B", 100));
        observe(&mut node, "B", &[("q", used)]);
        assert_eq!(start(&mut node, movable("p", "A", 500)).as_deref(), on, "{used}");
    }
}

/// The devices that a request gets on a node, and the costs of that by policy.
fn place(node: &NodeState, classes: &DeviceClasses, request: &str) -> (String, Vec<Cost>) {
    let compiled = node_fixture::compiled_request(request, classes);
    let mix = node_fixture::compiled("1 fraction=0.5; 1 whole", node, classes);
    let places = [Policy::BinPack, Policy::Fragmentation].map(|policy| {
        let strategy = Strategy::Policy(policy);
        plan::evaluate(node, &compiled, &strategy, &mix, HoldRule::Respected).unwrap()
    });
    let names = places.iter().map(|place| {
        let placement = plan::placement(node, place);
        placement.devices.iter().map(|placed| placed.id.to_string()).collect::<Vec<_>>().join(" ")
    });
    let names: Vec<String> = names.collect();
    assert_eq!(names[0], names[1], "{request}");
    let prices = ScarcityPrices::default();
    (names[0].clone(), places.iter().map(|place| place.local_cost.cost(&prices)).collect())
}

#[test]
fn of_equal_places_the_one_with_the_fewest_restarts_is_taken() {
    let mut classes = DeviceClasses::default();
    let mut node = node_of("A:500/1000 B:1000/1000 C:1000/1000 D:1000/1000", &mut classes);
    let borrow = Borrow::Memory { most: Share::WHOLE };
    node.share_by(PoolRule { borrow, ..PoolRule::default() }, &mut classes);
    assert_eq!(place(&node, &classes, "whole").0, "B");
    let lend = |node: &mut NodeState, pod: &str, on: &str, part| {
        node.allocate(movable(pod, "A", part));
        node.lend(&PodUid::new(pod), DeviceId::new(on).unwrap());
    };
    lend(&mut node, "p", "B", 200);
    lend(&mut node, "q", "C", 100);
    let (name, with_none) = place(&node, &classes, "whole");
    assert_eq!(name, "D", "no guest is there");
    assert_eq!(place(&node, &classes, "whole count=2").0, "B D", "of the others the first");
    lend(&mut node, "r", "D", 100);
    lend(&mut node, "s", "D", 50);
    let (name, with_one) = place(&node, &classes, "whole");
    assert_eq!(name, "B", "one guest goes, and it is the first such device");
    let restarts = |costs: &[Cost]| -> Vec<usize> {
        costs.iter().map(|cost| cost.ties().restarts()).collect()
    };
    assert_eq!((restarts(&with_none), restarts(&with_one)), (vec![0, 0], vec![1, 1]));
    // A part leaves room for the guest.
    assert_eq!(place(&node, &classes, "fraction=0.8").0, "B");
    assert_eq!(place(&node, &classes, "fraction=0.9").0, "C");
    assert_eq!(place(&node, &classes, "whole count=2").0, "B C", "one guest of each, two are on D");
    // Who uses more than it requests is restarted, too.
    let mut node = node_of("A:1000/1000 B:1000/1000", &mut classes);
    node.share_by(PoolRule { borrow, ..PoolRule::default() }, &mut classes);
    node.allocate(movable("p", "A", 300));
    node.allocate(movable("q", "B", 300));
    observe(&mut node, "A", &[("p", 700)]);
    assert_eq!(place(&node, &classes, "fraction=0.3").0, "A");
    assert_eq!(place(&node, &classes, "fraction=0.31").0, "B");
}

#[test]
fn a_pool_that_lends_spreads_over_the_empty_gpus() {
    let mut classes = DeviceClasses::default();
    for (borrow, expected) in [(Borrow::None, Ordering::Equal), (Borrow::Compute, Ordering::Less)] {
        let rule = PoolRule { borrow, ..PoolRule::default() };
        let mut cost = |text| {
            let mut node = node_of(text, &mut classes);
            node.share_by(rule, &mut classes);
            place(&node, &classes, "fraction=0.5").1[1]
        };
        let (one, two) =
            (cost("A:500/1000 B:1000/1000"), cost("A:500/1000 B:1000/1000 C:1000/1000"));
        assert_eq!(two.cmp(&one), expected);
    }
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
fn a_limit_that_is_set_at_the_start_is_above_the_request_where_no_other_pod_runs() {
    let starts = |node: &NodeState, name: &str| {
        let most = at_start(node, &PodUid::new(name)).unwrap();
        (most.memory.mib(), most.share.millionths())
    };
    let mut node = lending_memory("A:1000/1000 B:1000/1000", 800);
    assert_eq!(start(&mut node, movable("p", "A", 300)), None);
    assert_eq!(starts(&node, "p"), (800, 1_000_000), "alone; at most what the operator lends");
    assert_eq!(start(&mut node, movable("q", "A", 700)).as_deref(), Some("B"));
    assert_eq!(starts(&node, "q"), (800, 1_000_000), "alone where it is a guest");
    assert_eq!(starts(&node, "p"), (800, 1_000_000), "who is away does not run there");
    node.allocate(Reservation { request: None, ..movable("r", "B", 1_000) });
    assert_eq!(recalled(&mut node), ["q"]);
    assert_eq!(starts(&node, "q"), (700, 1_000_000), "beside `p` at home");
    assert_eq!(starts(&node, "r").0, 1_000);
    let mut node = lending_memory("A:1000/1000", 1_000);
    let mut request = GpuRequest::one(Amount::Fraction(Share::from_millionths(300_000)));
    request.limit = Some(Limit::Fraction(Share::from_millionths(600_000)));
    node.allocate(Reservation { request: Some(Arc::new(request)), ..movable("s", "A", 300) });
    assert_eq!(starts(&node, "s"), (300, 600_000), "nobody could take memory back");
    let mut node = lending("A:1000/1000");
    node.allocate(movable("t", "A", 300));
    assert_eq!(starts(&node, "t"), (300, 1_000_000), "the pool lends compute alone");
    node.share_by(PoolRule::default(), &mut DeviceClasses::default());
    assert_eq!(starts(&node, "t"), (300, 300_000));
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
fn a_pod_is_a_guest_of_a_mig_instance_of_the_same_profile_where_they_are_shared() {
    for (instances, text, on) in [
        (InstanceUse::Shared, "A=3g.40gb:500/1000 B=3g.40gb:1000/1000", Some("B")),
        (InstanceUse::Shared, "A=3g.40gb:500/1000 B=4g.40gb:1000/1000", None),
        (InstanceUse::Shared, "A=3g.40gb:500/1000 B:1000/1000", None),
        (InstanceUse::Whole, "A=3g.40gb:500/1000 B=3g.40gb:1000/1000", None),
    ] {
        for borrow in [Borrow::Compute, Borrow::Memory { most: Share::WHOLE }] {
            let mut classes = DeviceClasses::default();
            let mut node = node_of(text, &mut classes);
            node.share_by(PoolRule { borrow, instances, ..PoolRule::default() }, &mut classes);
            assert_eq!(start(&mut node, movable("p", "A", 500)).as_deref(), on, "{text}");
        }
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
        ("not movable", with(|request| request.movable = Movable::Never)),
        ("no limit", with(|request| request.limit = None)),
        ("limit is request", with(|request| request.limit = Some(Limit::Memory(MemMib::new(500))))),
        ("isolated", with(|request| request.isolation = Isolation::Memory)),
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
    let free: Vec<u64> = node.devices().iter().map(|device| device.free().memory.mib()).collect();
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

/// Its pod is gone, and it still runs.
#[test]
fn guests_make_way_for_what_is_used_beyond_allocations() {
    for (leftover, gone) in [(0, &[][..]), (200, &[]), (300, &["p"])] {
        let mut node = lending("A:500/1000 B:1000/1000");
        assert_eq!(start(&mut node, movable("p", "A", 500)).as_deref(), Some("B"));
        let process =
            ProcessUse { pod: Some(PodUid::new("gone")), memory: Some(MemMib::new(leftover)) };
        let seen = DeviceUse {
            used: Some(MemMib::new(leftover)),
            processes: Some(if leftover == 0 { Vec::new() } else { vec![process] }),
            ..DeviceUse::idle(DeviceId::new("B").unwrap())
        };
        node.observe(&[seen], Timestamp::START);
        assert_eq!(recalled(&mut node), [""; 0], "{leftover} beside the guest alone");
        node.allocate(tenant("new", movable("new", "B", 300).placement.devices));
        assert_eq!(recalled(&mut node), gone, "{leftover}");
        let uid = PodUid::new("p");
        assert!(!may_stay(&node, &uid), "{leftover}");
        for _ in 0..2 {
            let idle = DeviceUse::idle(DeviceId::new("B").unwrap());
            node.observe(&[idle], Timestamp::START);
        }
        assert_eq!(may_stay(&node, &uid), !gone.is_empty(), "{leftover}");
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

#[test]
fn what_a_list_shows_of_a_pod_counts_as_its_own_once_it_is_known() {
    let mut node = lending_memory("A:1000/1000", 1_000);
    node.allocate(movable("p", "A", 500));
    observe(&mut node, "A", &[("p", 700), ("q", 250)]);
    assert_eq!(node.devices()[0].unallocated_use(), MemMib::new(250), "q is not known yet");
    node.allocate(movable("q", "A", 100));
    assert_eq!(node.devices()[0].unallocated_use(), MemMib::ZERO);
    let borrowed: Vec<_> =
        borrowers(&node, &node.devices()[0]).map(|(_, borrowed)| borrowed.mib()).collect();
    assert_eq!((borrowed, owing(&node)), (vec![200, 150], vec![]), "no memory is missing");
}

#[test]
fn a_guest_waits_for_the_memory_of_those_that_leave_its_home_and_they_not_for_it() {
    let leaving =
        |written: bool| written.then(|| MoveHome { container: "c".into(), cpu_milli: 10 });
    for (other, is_written, waits) in
        [("a", false, true), ("a", true, true), ("z", false, false), ("z", true, true)]
    {
        let mut node = lending_memory("A:1000/1000 B:1000/1000", 1_000);
        node.allocate(movable("p", "A", 500));
        node.lend(&PodUid::new("p"), DeviceId::new("B").unwrap());
        node.allocate(movable(other, "B", 500));
        node.lend(&PodUid::new(other), DeviceId::new("A").unwrap());
        observe(&mut node, "A", &[(other, 900)]);
        let both = ["p", other].map(PodUid::new);
        assert!(!waits_at_home(&node, &both[0]), "{other} stays: it gives memory back");
        node.recall(&both);
        node.write_move(&both[1], leaving(is_written));
        assert_eq!(waits_at_home(&node, &both[0]), waits, "{other} {is_written}");
        observe(&mut node, "A", &[(other, 400)]);
        assert!(!waits_at_home(&node, &both[0]), "there is room for both");
    }
}

#[test]
fn a_guest_does_not_go_home_while_no_list_would_show_that_it_has_left() {
    let uid = PodUid::new("p");
    let mut node = lending_memory("A:1000/1000 B:1000/1000", 1_000);
    node.allocate(movable("p", "A", 500));
    node.lend(&uid, DeviceId::new("B").unwrap());
    node.recall(std::slice::from_ref(&uid));
    assert!(may_go_home(&node, &uid));
    node.silence(std::time::Duration::ZERO, Timestamp::from_millis(1_000));
    assert!(!may_go_home(&node, &uid));
}

#[test]
fn a_pod_that_moves_out_counts_in_both_places_until_lists_show_that_it_has_left() {
    let (uid, b) = (PodUid::new("p"), DeviceId::new("B").unwrap());
    let moved_out = |clean_lists| {
        let mut node = lending_memory("A:1000/1000 B:1000/1000", 1_000);
        let mut held = movable("p", "A", 500);
        held.placement.guest = Some(Guest { on: b.clone(), spot: None, leaving: None });
        node.allocate(Reservation { departure: Departure::Arrives { clean_lists }, ..held });
        node
    };
    let runs = |node: &NodeState| -> Vec<usize> {
        node.devices().iter().map(|device| device.running().count()).collect()
    };
    let mut node = moved_out(None);
    observe(&mut node, "A", &[]);
    observe(&mut node, "A", &[]);
    assert_eq!(runs(&node), [1, 1], "its container has not been restarted");
    assert!(node.reservation(&uid).unwrap().is_being_restarted());
    node.moved_out(&uid);
    assert!(
        !node.reservation(&uid).unwrap().is_being_restarted(),
        "it may use memory here for long"
    );
    for (uses, running) in [(&[][..], [1, 1]), (&[("p", 5)], [1, 1]), (&[], [1, 1]), (&[], [0, 1])]
    {
        observe(&mut node, "A", uses);
        assert_eq!(runs(&node), running, "{uses:?}");
    }
    assert_eq!(node.reservation(&uid).unwrap().departure, Departure::Stays);
    // It ends on its way: both are taken until its processes have ended.
    let mut node = moved_out(None);
    node.drain(&uid, Timestamp::START);
    let allocated = node.devices().iter().map(|device| device.allocated().memory.mib());
    assert_eq!(allocated.collect::<Vec<_>>(), [500, 500]);
    // It is called home on its way.
    let mut node = moved_out(None);
    node.recall(std::slice::from_ref(&uid));
    assert!(node.reservation(&uid).unwrap().is_going_home());
}

#[test]
fn a_guest_that_cannot_be_restarted_counts_in_both_places_until_it_can() {
    let uid = PodUid::new("p");
    let mut node = lending_memory("A:1000/1000 B:1000/1000", 1_000);
    node.allocate(movable("p", "A", 500));
    node.lend(&uid, DeviceId::new("B").unwrap());
    node.goes_on(&uid);
    assert_eq!(node.reservation(&uid).unwrap().departure, Departure::Stays);
    node.write_move(&uid, Some(MoveHome { container: "c".into(), cpu_milli: 10 }));
    assert!(may_settle(&node, &uid));
    node.settle_guest(&uid);
    let allocated = |node: &NodeState| -> Vec<u64> {
        node.devices().iter().map(|device| device.allocated().memory.mib()).collect()
    };
    assert_eq!(allocated(&node), [500, 500]);
    node.goes_on(&uid);
    assert_eq!(allocated(&node), [500, 0]);
    assert!(node.reservation(&uid).unwrap().is_going_home());
}

/// The limits that are ordered on A, in MiB, with the number of the order.
fn ordered(node: &NodeState) -> (u64, String) {
    let all = ordered_limits(node);
    let [order] = &all[..] else { return (0, String::new()) };
    let limits = order.limits.iter().map(|(uid, limit, keeps)| {
        format!("{uid}={}{}", limit.mib(), if *keeps { "+" } else { "" })
    });
    (order.number, limits.collect::<Vec<_>>().join(" "))
}

/// A node whose driver limits pods, and whose agent sets the limits of A.
fn limited(text: &str, in_force: u64) -> NodeState {
    let mut classes = DeviceClasses::default();
    let mut node = node_of(text, &mut classes);
    let borrow = Borrow::Memory { most: Share::WHOLE };
    let rule = PoolRule { borrow, driver_limits: true, ..PoolRule::default() };
    node.share_by(rule, &mut classes);
    put_in_force(&mut node, in_force);
    node
}

fn put_in_force(node: &mut NodeState, number: u64) {
    node.note_limits(BTreeMap::from([(DeviceId::new("A").unwrap(), number)]));
}

#[test]
fn what_nobody_requests_or_uses_is_split_among_those_that_may_borrow() {
    let mut node = limited("A:1000/1000", 0);
    assert_eq!(ordered(&node), (0, String::new()));
    node.allocate(movable("p", "A", 300));
    assert_eq!(ordered(&node), (1, "p=1000".to_owned()), "alone");
    node.allocate(movable("q", "A", 300));
    assert_eq!(ordered(&node), (2, "p=500 q=500".to_owned()), "equal parts of the rest");
    // A pod that may not be moved borrows nothing, and keeps its request.
    node.allocate(Reservation { request: None, ..movable("r", "A", 200) });
    assert_eq!(ordered(&node), (3, "p=400 q=400".to_owned()));
    observe(&mut node, "A", &[("p", 390), ("q", 100)]);
    assert_eq!(ordered(&node), (3, "p=445 q=355".to_owned()), "what it uses is its own");
    observe(&mut node, "A", &[("p", 390), ("q", 100), ("x", 200)]);
    assert_eq!(ordered(&node).1, "p=390 q=300", "others use the rest");
    let uid = PodUid::new("p");
    node.note_borrowed(&uid, BorrowedMemory::GivingBack);
    assert_eq!(ordered(&node).1, "p=300 q=300", "its growth is stopped");
    node.note_borrowed(&uid, BorrowedMemory::Kept);
    assert_eq!(ordered(&node).1.split(' ').next(), Some("p=300+"), "it may borrow no more");
    node.release(&PodUid::new("r"));
    assert_eq!(ordered(&node).0, 3, "no pod has come");
}

#[test]
fn a_guest_does_not_go_home_to_memory_that_cannot_be_taken_back() {
    for (used_by, is_kept, waits, lacks) in
        [("q", false, true, false), ("q", true, false, true), ("x", false, false, true)]
    {
        let mut node = lending_memory("A:1000/1000 B:1000/1000", 1_000);
        node.allocate(movable("p", "A", 500));
        node.lend(&PodUid::new("p"), DeviceId::new("B").unwrap());
        node.allocate(movable("q", "A", 500));
        node.recall(&[PodUid::new("p")]);
        let uses = if used_by == "q" { vec![("q", 700)] } else { vec![("q", 500), ("x", 200)] };
        observe(&mut node, "A", &uses);
        if is_kept {
            node.note_borrowed(&PodUid::new("q"), BorrowedMemory::Kept);
        }
        let uid = PodUid::new("p");
        assert_eq!(waits_at_home(&node, &uid), waits, "{used_by} {is_kept}: it will be given back");
        assert_eq!(lacks_memory_at_home(&node, &uid), lacks, "{used_by} {is_kept}");
        observe(&mut node, "A", &[("q", 500)]);
        assert!(!lacks_memory_at_home(&node, &uid), "{used_by} {is_kept}: there is room");
    }
}

#[test]
fn a_limit_is_no_higher_than_what_the_pod_may_use() {
    let mut node = limited("A:1000/1000", 0);
    let mut request = GpuRequest::one(Amount::Fraction(Share::from_millionths(200_000)));
    request.limit = Some(Limit::Fraction(Share::from_millionths(250_000)));
    request.movable = Movable::Restart;
    node.allocate(Reservation { request: Some(Arc::new(request)), ..movable("p", "A", 200) });
    node.allocate(movable("q", "A", 200));
    node.allocate(movable("r", "A", 200));
    assert_eq!(ordered(&node).1, "p=250 q=375 r=375", "others get what it cannot use");
}

#[test]
fn a_pod_waits_until_the_limits_of_others_leave_its_memory_free() {
    let leaves = |node: &NodeState, uid: &str| {
        node.limits().leave_room(&DeviceId::new("A").unwrap(), &PodUid::new(uid))
    };
    let mut node = limited("A:1000/1000", 0);
    node.allocate(movable("p", "A", 300));
    assert!(leaves(&node, "p"), "it is alone");
    node.allocate(Reservation { request: None, ..movable("q", "A", 300) });
    assert!(!leaves(&node, "q") && leaves(&node, "p"), "`q` borrows nothing");
    put_in_force(&mut node, 1);
    assert!(!leaves(&node, "q"), "the order before it came");
    put_in_force(&mut node, 2);
    assert!(leaves(&node, "q"));
    // Who borrowed once may have a limit above its request until the next order is in force.
    node.note_borrowed(&PodUid::new("p"), BorrowedMemory::Kept);
    node.allocate(Reservation { request: None, ..movable("r", "A", 300) });
    assert!(!leaves(&node, "r"));
    put_in_force(&mut node, 3);
    assert!(leaves(&node, "r"));
    // A guest that comes home waits in the same way, and all do where the agent starts again.
    put_in_force(&mut node, 0);
    assert!(!leaves(&node, "r"));
}

#[test]
fn no_pod_borrows_memory_whose_limit_the_agent_does_not_set() {
    let mut node = limited("A:1000/1000", 0);
    node.note_limits(BTreeMap::new());
    node.allocate(movable("p", "A", 300));
    observe(&mut node, "A", &[("p", 700)]);
    assert_eq!((ordered(&node).0, free_mib(&node)), (0, 300), "what it uses is not free");
    put_in_force(&mut node, 0);
    observe(&mut node, "A", &[("p", 700)]);
    assert_eq!((ordered(&node), free_mib(&node)), ((1, "p=1000".to_owned()), 700));
    node.note_limits(BTreeMap::new());
    assert_eq!(free_mib(&node), 300, "the agent sets them no more");
    put_in_force(&mut node, 0);
    // Where nothing is lent any more, limits are lowered again.
    node.share_by(PoolRule::default(), &mut DeviceClasses::default());
    assert_eq!(ordered(&node).1, "p=300+");
}

proptest! {
    #[test]
    fn all_limits_of_a_device_together_are_no_more_than_it_has(
        pods in prop::collection::vec((100..300_u64, 0..700_u64, any::<bool>(), 0..3_u8), 1..4),
        others in 0..300_u64,
    ) {
        let mut node = limited("A:1000/1000", 0);
        let names = ["p", "q", "r"];
        let mut seen = vec![("x", others)];
        for (name, (request, used, borrows, state)) in names.iter().zip(&pods) {
            let held = movable(name, "A", *request);
            let request = held.request.clone().filter(|_| *borrows);
            node.allocate(Reservation { request, ..held });
            seen.push((name, *used));
            let borrowed = [BorrowedMemory::Free, BorrowedMemory::GivingBack, BorrowedMemory::Kept];
            node.note_borrowed(&PodUid::new(*name), borrowed[usize::from(*state)]);
        }
        observe(&mut node, "A", &seen);
        let device = &node.devices()[0];
        let all = ordered_limits(&node);
        let limits = all.first().map_or(&[][..], |order| &order.limits);
        let limit_of = |uid: &PodUid| limits.iter().find(|(other, ..)| other == uid).map(|(_, limit, _)| limit.mib());
        let (mut own, mut most) = (device.used_by_others().mib(), device.used_by_others().mib());
        for (uid, demand) in device.users() {
            let counts = demand.memory.max(device.covered(uid)).mib();
            let limit = limit_of(uid).unwrap_or(demand.memory.mib());
            prop_assert!(limit >= demand.memory.mib() && limit <= 1_000);
            own += counts;
            most += counts.max(limit);
        }
        prop_assert!(most <= own.max(1_000), "{most} of {own}: {limits:?}");
    }
}

#[test]
fn a_pod_that_is_away_may_still_have_its_limit_at_home() {
    let leaves = |node: &NodeState, uid: &str| {
        node.limits().leave_room(&DeviceId::new("A").unwrap(), &PodUid::new(uid))
    };
    let mut node = limited("A:1000/1000 B:1000/1000", 0);
    node.allocate(movable("p", "A", 300));
    node.lend(&PodUid::new("p"), DeviceId::new("B").unwrap());
    assert_eq!(ordered(&node), (1, "p=300+".to_owned()));
    node.allocate(movable("q", "A", 300));
    assert!(!leaves(&node, "q"), "its container may never have left");
    assert_eq!(ordered(&node), (2, "p=300+ q=1000".to_owned()), "it uses nothing here");
    put_in_force(&mut node, 2);
    assert!(leaves(&node, "q"));
    node.allocate(Reservation { request: None, ..movable("whole", "B", 1_000) });
    assert_eq!(recalled(&mut node), ["p"]);
    assert!(!may_go_home(&node, &PodUid::new("p")), "`q` may use what it requests");
    assert_eq!(ordered(&node), (3, "p=500 q=500".to_owned()));
    put_in_force(&mut node, 3);
    assert!(may_go_home(&node, &PodUid::new("p")));
}

#[test]
fn a_pod_bursts_into_what_no_other_pod_requests_or_uses_where_it_runs() {
    use BurstRoom::{All, None as Nothing, Part};
    let rooms = |node: &NodeState, on: usize| {
        let device = &node.devices()[on];
        let found = burst_rooms(node, device);
        found.map(|(uid, rooms)| (uid.to_string(), rooms)).collect::<BTreeMap<_, _>>()
    };
    let of = |name: &str, rooms| (name.to_owned(), rooms);
    let mut node = lending_memory("A:1000/1000 B:1000/1000", 1_000);
    node.allocate(movable("p", "A", 500));
    assert_eq!(rooms(&node, 0), [of("p", [Some(All); 2])].into(), "it is alone");
    // A pod without a limit is not counted as one that bursts.
    node.allocate(Reservation { request: None, ..movable("q", "A", 300) });
    observe(&mut node, "A", &[("p", 600), ("q", 300)]);
    let expected = [of("p", [Some(Part); 2]), of("q", [None; 2])];
    assert_eq!(rooms(&node, 0), expected.into(), "100 of 500 it has, and 100 are free");
    node.allocate(Reservation { request: None, ..movable("r", "A", 200) });
    observe(&mut node, "A", &[("p", 500), ("q", 300), ("r", 200)]);
    assert_eq!(rooms(&node, 0)["p"], [Some(Nothing); 2]);
    // Elsewhere it has room, as soon as it runs there.
    node.lend(&PodUid::new("p"), DeviceId::new("B").unwrap());
    observe(&mut node, "A", &[("q", 300), ("r", 200)]);
    assert_eq!(rooms(&node, 1), [of("p", [Some(All); 2])].into());
    assert!(!rooms(&node, 0).contains_key("p"));
    node.share_by(PoolRule::default(), &mut DeviceClasses::default());
    assert!(rooms(&node, 1).is_empty(), "a pool that lends nothing");
}

#[test]
fn a_limit_in_a_pool_with_slots_is_whole_slots() {
    let mut node = lending_memory("A:1000/1000 B:1000/1000", 1_000);
    let rule = PoolRule { replicas: Replicas::new(4), ..node.rule() };
    node.share_by(rule, &mut DeviceClasses::default());
    node.allocate(Reservation { request: None, ..movable("q", "A", 250) });
    let pod = |limit| {
        let mut request = GpuRequest::one(Amount::Fraction(Share::from_millionths(300_000)));
        request.limit = Some(limit);
        request.movable = Movable::Restart;
        Reservation { request: Some(Arc::new(request)), ..movable("p", "A", 500) }
    };
    for (limit, memory, share) in [
        (Limit::Fraction(Share::from_millionths(900_000)), Some(750), 750_000),
        (Limit::Fraction(Share::from_millionths(740_000)), None, 500_000),
        (Limit::Fraction(Share::from_millionths(400_000)), None, 500_000),
        (Limit::Fraction(Share::WHOLE), Some(1_000), 1_000_000),
        (Limit::Memory(MemMib::new(999)), Some(750), 500_000),
    ] {
        let held = pod(limit);
        let demand = held.placement.devices[0].demand;
        let found = held.memory_limit(rule, demand, MemMib::new(1_000)).map(MemMib::mib);
        assert_eq!(
            (found, held.compute_limit(rule, demand).millionths()),
            (memory, share),
            "{limit:?}"
        );
        node.allocate(held.clone());
        assert_eq!(start_place(&node, &held).is_some(), memory.is_some(), "{limit:?}");
    }
}
