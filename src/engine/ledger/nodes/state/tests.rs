//! What facts, commands and time do to the state of the cluster.

use std::num::NonZeroU32;

use super::*;
use crate::ledger::change::commits::ReserveError;
use crate::ledger::change::facts::PodFact;
use crate::ledger::ledger_fixture::{
    bound, free, hello, ledger, node, pod, report, say, seconds, see_node, share_request, uid,
};
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::query::reading::Readiness;
use crate::ledger::suggest::standing::Holder;
use crate::model::rejection::Rejection;
use crate::model::request::{Amount, GpuRequest, Isolation, Limit};
use crate::model::reservation::{Placement, ReservationState};
use wire::ids::PoolName;
use wire::units::{HostAmount, MemMib, MilliCpu, Share};

fn room() -> LedgerEvent {
    LedgerEvent::Room(NodeName::new("n"))
}

fn reserve(ledger: &Ledger, name: &str, share: u64) -> Result<Placement, ReserveError> {
    ledger.reserve(&pod(name), "n", &share_request(share), seconds(0))
}

/// How many nodes, and how many failure domains, are kept.
fn kept_nodes(ledger: &Ledger) -> (usize, usize) {
    (ledger.node_table().count(), ledger.domains.lock().len())
}

#[test]
fn a_repeated_bind_returns_the_same_placement_and_rejects_other_nodes() {
    let ledger = ledger("A B");
    see_node(&ledger, "m");
    ledger.report("m", &hello("m", 1, "M"), seconds(0)).unwrap();
    let first = reserve(&ledger, "p", 500_000).unwrap();
    assert_eq!(reserve(&ledger, "p", 500_000), Ok(first.clone()));
    let elsewhere = ledger.reserve(&pod("p"), "m", &share_request(500_000), seconds(0));
    assert_eq!(elsewhere, Err(ReserveError::HeldElsewhere { node: NodeName::new("n") }));
    ledger.confirm(&uid("p"));
    assert_eq!(reserve(&ledger, "p", 500_000), Ok(first));
    assert_eq!(ledger.forget(&uid("p")), [], "a bound pod is not forgotten");
    assert_eq!(free(&ledger), [500, 1000]);
    let unknown = ledger.reserve(&pod("q"), "nowhere", &share_request(1), seconds(0));
    assert_eq!(unknown, Err(ReserveError::Rejection(Rejection::UnknownNode)));
}

#[test]
fn a_rejected_binding_frees_its_room_and_the_pod_can_try_again() {
    let ledger = ledger("A");
    reserve(&ledger, "p", 500_000).unwrap();
    assert_eq!(ledger.forget(&uid("p")), [room()]);
    assert_eq!(ledger.forget(&uid("p")), []);
    assert_eq!(free(&ledger), [1000]);
    assert!(reserve(&ledger, "p", 1_000_000).is_ok());
}

#[test]
fn time_alone_never_frees_an_undecided_binding() {
    let ledger = ledger("A");
    reserve(&ledger, "p", 500_000).unwrap();
    ledger.tick(seconds(1_000_000));
    let state = || ledger.reservation(&uid("p")).unwrap().state;
    assert_eq!(state(), ReservationState::Assumed { since: seconds(0) });
    ledger.see_pod(&bound("p", "n", "A", 500_000), seconds(9));
    assert_eq!(state(), ReservationState::Confirmed);
}

#[test]
fn a_pod_is_allocated_where_it_is_bound_with_its_written_placement() {
    let ledger = ledger("A B");
    see_node(&ledger, "m");
    ledger.report("m", &hello("m", 1, "M"), seconds(0)).unwrap();
    reserve(&ledger, "p", 500_000).unwrap();
    let fact = bound("p", "m", "M", 300_000);
    assert_eq!(ledger.see_pod(&fact, seconds(1)), [room()], "room appears where it was held");
    assert_eq!(ledger.see_pod(&fact, seconds(1)), []);
    assert_eq!(free(&ledger), [1000, 1000]);
    let held = ledger.reservation(&uid("p")).unwrap();
    assert_eq!(Some(held.placement), fact.placement);
    assert_eq!(held.state, ReservationState::Confirmed);
    assert!(node(&ledger, "n").reservations().is_empty());
}

#[test]
fn a_pod_without_placement_is_reported_and_its_reservation_ends() {
    let ledger = ledger("A");
    reserve(&ledger, "p", 500_000).unwrap();
    let fact = PodFact { placement: None, ..bound("p", "n", "A", 0) };
    let unplaced = LedgerEvent::Unplaced { pod: pod("p"), node: NodeName::new("n") };
    assert_eq!(ledger.see_pod(&fact, seconds(0)), [room(), unplaced]);
    assert_eq!(free(&ledger), [1000]);
    assert_eq!(reserve(&ledger, "p", 500_000), Err(ReserveError::Ended));
    let pending = PodFact { node: None, ..fact };
    assert_eq!(ledger.see_pod(&pending, seconds(0)), [], "a late copy");
    ledger.end_pod(&uid("p"), seconds(0));
    assert!(!node(&ledger, "n").has_pod(&uid("p")));
}

#[test]
fn keys_removed_from_a_bound_pod_free_nothing() {
    let ledger = ledger("A");
    let fact = bound("p", "n", "A", 400_000);
    ledger.see_pod(&fact, seconds(0));
    let stripped = PodFact { placement: None, ..fact };
    assert_eq!(ledger.see_pod(&stripped, seconds(0)), [edited("n")]);
    assert_eq!(free(&ledger), [600]);
}

fn edited(node: &str) -> LedgerEvent {
    LedgerEvent::PlacementEdited { pod: pod("p"), node: NodeName::new(node) }
}

#[test]
fn an_edited_placement_is_reported_and_changes_no_reservation() {
    let ledger = ledger("A B");
    see_node(&ledger, "m");
    ledger.report("m", &hello("m", 1, "M"), seconds(0)).unwrap();
    reserve(&ledger, "p", 900_000).unwrap();
    ledger.confirm(&uid("p"));
    let ours = bound("p", "n", "A", 900_000);
    assert_eq!(ledger.see_pod(&ours, seconds(0)), []);
    let edits = [bound("p", "n", "A", 1), bound("p", "n", "B", 900_000), bound("p", "m", "M", 1)];
    for state in ["confirmed", "draining"] {
        for edit in &edits {
            let reported = ledger.see_pod(edit, seconds(1));
            let node = edit.node.as_ref().unwrap().as_str();
            // Nothing is reported of a pod that has ended.
            assert_eq!(reported, if state == "confirmed" { vec![edited(node)] } else { vec![] });
            assert_eq!((free(&ledger), state), (vec![100, 1000], state));
        }
        assert_eq!(ledger.see_pod(&ours, seconds(2)), [], "as it was written");
        ledger.end_pod(&uid("p"), seconds(3));
    }
    assert!(node(&ledger, "m").reservations().is_empty());
    assert_eq!(ledger.audit(), Ok(()));
}

#[test]
fn the_first_placement_seen_counts_and_its_devices_may_not_change() {
    let ledger = ledger("A");
    ledger.see_pod(&bound("p", "n", "A", 900_000), seconds(0));
    assert_eq!(ledger.see_pod(&bound("p", "n", "A", 500_000), seconds(1)), [edited("n")]);
    assert_eq!(free(&ledger), [100]);
    let resized = HostAmount { cpu: MilliCpu::new(7), memory: MemMib::new(7) };
    let fact = PodFact { host: resized, ..bound("p", "n", "A", 900_000) };
    assert_eq!(ledger.see_pod(&fact, seconds(2)), []);
    assert_eq!(ledger.reservation(&uid("p")).unwrap().host, resized);
}

#[test]
fn the_request_at_bind_time_counts_despite_later_edits() {
    let ours = bound("p", "n", "A", 10_000);
    let mut later = ours.request.as_deref().unwrap().clone();
    (later.isolation, later.limit) = (Isolation::Memory, Some(Limit::Fraction(Share::WHOLE)));
    let later = PodFact { request: Some(later.into()), ..ours.clone() };
    for way in ["chosen", "confirmed", "first seen"] {
        let ledger = ledger("A");
        match way {
            "first seen" => drop(ledger.see_pod(&ours, seconds(0))),
            _ => drop(reserve(&ledger, "p", 10_000).unwrap()),
        }
        if way == "confirmed" {
            ledger.confirm(&uid("p"));
        }
        assert_eq!(ledger.see_pod(&later, seconds(1)), []);
        assert_eq!(ledger.reservation(&uid("p")).unwrap().request, ours.request, "{way}");
        assert!(reserve(&ledger, "q", 500_000).is_ok(), "{way}");
    }
    // If no request is known, the first valid one counts.
    let ledger = ledger("A");
    ledger.see_pod(&PodFact { request: None, ..ours.clone() }, seconds(0));
    ledger.see_pod(&ours, seconds(1));
    ledger.see_pod(&later, seconds(2));
    assert_eq!(ledger.reservation(&uid("p")).unwrap().request, ours.request);
}

#[test]
fn after_a_start_a_pod_placed_without_isolation_requires_none() {
    let mut fact = bound("p", "n", "A", 10_000);
    let mut later = fact.request.as_deref().unwrap().clone();
    later.isolation = Isolation::Memory;
    fact.request = Some(later.into());
    let ledger = ledger("A");
    ledger.see_pod(&fact, seconds(0));
    assert_eq!(ledger.reservation(&uid("p")).unwrap().request, fact.request);
    assert!(reserve(&ledger, "q", 500_000).is_ok());
}

#[test]
fn a_placement_edited_before_it_is_read_for_the_first_time_changes_nothing() {
    let asked = || share_request(900_000).gpu.map(Arc::new);
    let ledger = ledger("A B");
    reserve(&ledger, "p", 900_000).unwrap();
    let mut edit = PodFact { request: asked(), ..bound("p", "n", "A", 1) };
    Arc::make_mut(edit.request.as_mut().unwrap()).min_memory = MemMib::new(64);
    assert_eq!(ledger.see_pod(&edit, seconds(1)), [edited("n")]);
    assert_eq!(free(&ledger), [100, 1000]);
    assert_eq!(ledger.reservation(&uid("p")).unwrap().state, ReservationState::Confirmed);
    assert_eq!(ledger.see_pod(&bound("p", "n", "A", 900_000), seconds(2)), []);
    // A Binding of another process: other devices, another request, or other amounts.
    let theirs = PodFact { bound_by_us: false, ..bound("q", "n", "B", 50_000) };
    for (other, left) in [
        (PodFact { request: asked(), ..theirs }, [100, 950]),
        (PodFact { request: asked(), ..bound("q", "n", "A", 50_000) }, [50, 1000]),
        (bound("q", "n", "B", 50_000), [100, 950]),
    ] {
        let ledger = crate::ledger::ledger_fixture::ledger("A B");
        ledger.see_pod(&bound("p", "n", "A", 900_000), seconds(0));
        reserve(&ledger, "q", 900_000).unwrap();
        ledger.see_pod(&other, seconds(1));
        assert_eq!(free(&ledger), left);
        assert_eq!(ledger.reservation(&uid("q")).unwrap().placement, other.placement.unwrap());
    }
}

#[test]
fn a_pod_without_gpu_gets_no_report_when_too_many_nodes_are_named() {
    let ledger = ledger("A");
    for at in 0..MAX_NAMED_NODES {
        ledger.position_or_insert(&NodeName::new(format!("m-{at}").as_str()));
    }
    let unplaced = LedgerEvent::Unplaced { pod: pod("p"), node: NodeName::new("one-more") };
    let fact = PodFact { placement: None, ..bound("p", "one-more", "X", 1) };
    assert_eq!(ledger.see_pod(&fact, seconds(0)), [unplaced]);
    let fact = PodFact { wants_gpu: false, request: None, ..fact };
    assert_eq!(ledger.see_pod(&fact, seconds(0)), []);
}

#[test]
fn late_events_do_not_allocate_an_ended_pod_again() {
    let ledger = ledger("A");
    let fact = bound("p", "n", "A", 400_000);
    ledger.see_pod(&fact, seconds(0));
    assert_eq!(ledger.end_pod(&uid("p"), seconds(0)), []);
    assert_eq!(free(&ledger), [600], "its processes may still run");
    ledger.see_pod(&fact, seconds(1));
    assert_eq!(reserve(&ledger, "p", 1000), Err(ReserveError::Ended));
    let silent = LedgerEvent::NotReporting(NodeName::new("n"));
    assert_eq!(ledger.tick(seconds(30)), [silent], "no room on a silent node");
    assert!(ledger.reservation(&uid("p")).is_none());
    ledger.see_pod(&fact, seconds(31));
    assert!(ledger.reservation(&uid("p")).is_none());
}

#[test]
fn each_pod_starts_once_and_ends_once_in_the_turnover() {
    let names: Vec<String> = (0..8).map(|at| format!("D{at}")).collect();
    let ledger = ledger(&names.join(" "));
    let per_mille = || ledger.turnover.lock().millionths() / 1_000;
    let whole = |at: usize| bound(&format!("{at}"), "n", &names[at], 1_000_000);
    for at in 0..4 {
        // bound by another process, and seen again
        (0..3).for_each(|_| drop(ledger.see_pod(&whole(at), seconds(0))));
    }
    for at in 4..7 {
        // by this one, and seen before it is confirmed, or afterwards
        let name = format!("{at}");
        let placement = reserve(&ledger, &name, 1_000_000).unwrap();
        let fact = PodFact { placement: Some(placement), ..whole(at) };
        if at == 5 {
            ledger.see_pod(&fact, seconds(0));
        }
        ledger.confirm(&uid(&name));
        ledger.confirm(&uid(&name));
        ledger.see_pod(&fact, seconds(0));
    }
    reserve(&ledger, "held", 500_000).unwrap();
    ledger.end_pod(&uid("held"), seconds(0));
    ledger.end_pod(&uid("waiting"), seconds(0));
    let beside = PodFact {
        pod: pod("beside"),
        wants_gpu: false,
        request: None,
        placement: None,
        ..whole(0)
    };
    ledger.see_pod(&beside, seconds(0));
    ledger.end_pod(&uid("beside"), seconds(0));
    // written by hand: no node has these devices
    for (name, node, device) in [("forged", "n", "X"), ("far", "nowhere", "D7")] {
        ledger.see_pod(&bound(name, node, device, 1_000_000), seconds(0));
        ledger.end_pod(&uid(name), seconds(0));
    }
    assert_eq!(per_mille(), 0, "none of these ran on a GPU");
    ledger.see_pod(&PodFact { is_terminal: true, ..whole(1) }, seconds(1));
    let one_of_seven = 1_000 / (50 + 7);
    assert_eq!(per_mille(), one_of_seven);
    ledger.end_pod(&uid("1"), seconds(2)); // its deletion
    ledger.see_pod(&whole(1), seconds(3));
    ledger.tick(seconds(60)); // it has drained
    ledger.end_pod(&uid("1"), seconds(61));
    assert_eq!(per_mille(), one_of_seven);
}

#[test]
fn pods_that_end_while_none_comes_make_another_mix() {
    let ledger = ledger("A B C D");
    ledger.learn(uid("first"), &share_request(500_000));
    let used = || ledger.cluster().mix().turnover;
    for round in 0..20 {
        for device in ["A", "B", "C", "D"] {
            let name = format!("{device}{round}");
            ledger.see_pod(&bound(&name, "n", device, 1_000_000), seconds(0));
            ledger.end_pod(&uid(&name), seconds(0));
        }
    }
    assert_eq!(used(), 0);
    ledger.tick(seconds(1));
    assert!(used() > 500_000, "{}", used());
}

#[test]
fn room_of_an_ended_pod_appears_when_its_drain_has_lasted_long_enough() {
    let ledger = ledger("A");
    ledger.see_pod(&bound("p", "n", "A", 400_000), seconds(0));
    ledger.end_pod(&uid("p"), seconds(0));
    let unsure = |sequence| {
        let mut unsure = report("x", 7, sequence, "A");
        unsure.uses[0].processes = None;
        unsure
    };
    ledger.report("n", &unsure(2), seconds(25)).unwrap();
    assert_eq!(ledger.tick(seconds(29)), []);
    assert_eq!(ledger.tick(seconds(30)), [room()]);
    assert_eq!(ledger.tick(seconds(30)), []);
    assert_eq!(free(&ledger), [1000]);
}

#[test]
fn a_deleted_node_keeps_its_tenants_and_returns_as_a_new_one() {
    let ledger = ledger("A");
    ledger.see_pod(&bound("p", "n", "A", 400_000), seconds(0));
    ledger.lose_node(&NodeName::new("n"));
    assert_eq!(ledger.answers(&share_request(1000), &["n"]), [Err(Rejection::NodeGone)]);
    assert!(say(&ledger, &report("x", 7, 2, "A")).is_ok());
    assert_eq!(ledger.answers(&share_request(1000), &["n"]), [Err(Rejection::NodeGone)]);
    see_node(&ledger, "n");
    assert_eq!(ledger.answers(&share_request(1000), &["n"]), [Err(Rejection::NotReporting)]);
    say(&ledger, &report("x", 7, 3, "A")).unwrap();
    assert_eq!(free(&ledger), [600]);
    ledger.lose_node(&NodeName::new("n"));
    ledger.end_pod(&uid("p"), seconds(0));
    ledger.tick(seconds(30));
    assert_eq!(ledger.nodes().len(), 0);
    see_node(&ledger, "n");
    assert_eq!(ledger.answers(&share_request(1000), &["n"]), [Err(Rejection::NeverReported)]);
}

#[test]
fn overallocation_by_facts_is_reported_and_affects_nothing_else() {
    let ledger = ledger("A B");
    ledger.see_pod(&bound("p", "n", "A", 700_000), seconds(0));
    let overallocated = LedgerEvent::Overallocated {
        node: NodeName::new("n"),
        device: DeviceId::new("A").unwrap(),
    };
    assert_eq!(ledger.see_pod(&bound("q", "n", "A", 400_000), seconds(0)), [overallocated]);
    assert_eq!(free(&ledger), [0, 1000]);
    assert_eq!(reserve(&ledger, "r", 1_000_000).unwrap().devices[0].id.as_str(), "B");
    assert_eq!(ledger.packing().overallocated, 1);
    assert_eq!(ledger.audit(), Ok(()));
}

#[test]
fn calls_wait_for_the_lists_and_then_for_nodes_with_pods() {
    let ledger = Ledger::new(crate::ledger::ledger_fixture::settings());
    assert_eq!(ledger.readiness(seconds(0)), Readiness::NotListed);
    see_node(&ledger, "n");
    see_node(&ledger, "empty");
    ledger.see_pod(&bound("p", "n", "A", 400_000), seconds(1));
    ledger.see_pod(&bound("q", "deleted", "X", 400_000), seconds(1));
    ledger.set_listed(seconds(1));
    ledger.set_listed(seconds(5));
    assert_eq!(ledger.readiness(seconds(2)), Readiness::AwaitingReports { nodes: 1 });
    assert_eq!(ledger.readiness(seconds(11)), Readiness::Ready, "warm-up is over");
    say(&ledger, &hello("x", 1, "A")).unwrap();
    assert_eq!(ledger.readiness(seconds(2)), Readiness::Ready);
    assert_eq!(free(&ledger), [600]);
}

/// Node `name` with one GPU, from its node object, domain and agent.
fn arrive(ledger: &Ledger, name: &str) {
    see_node(ledger, name);
    ledger.see_domain(&NodeName::new(name), &format!("domain-of-{name}"));
    ledger.report(name, &hello(name, 1, &format!("GPU-{name}")), seconds(0)).unwrap();
}

#[test]
fn names_of_short_lived_nodes_leave_few_entries() {
    let ledger = ledger("A");
    let query = share_request(500_000);
    for round in 0..10_000_u64 {
        let name = format!("node-{round}");
        arrive(&ledger, &name);
        if round.is_multiple_of(7) {
            // One pod ends later than its node; another names a node that never existed.
            let ended = format!("pod-{round}");
            ledger.see_pod(&bound(&ended, &name, &format!("GPU-{name}"), 400_000), seconds(0));
            ledger
                .see_pod(&bound(&format!("{ended}-x"), &format!("x-{round}"), "X", 1), seconds(0));
        }
        if round.is_multiple_of(97) {
            let names = ["n", name.as_str(), "node-1"];
            let fresh = names.map(|name| ledger.fresh_answer(&query, name));
            assert_eq!(ledger.answers(&query, &names), fresh, "{round}");
            let best = ledger.best(&query).map(|(_, cost)| cost);
            assert_eq!(best, fresh.into_iter().filter_map(Result::ok).min(), "{round}");
        }
        ledger.lose_node(&NodeName::new(name.as_str()));
        if round.is_multiple_of(7) {
            for pod in [format!("pod-{round}"), format!("pod-{round}-x")] {
                ledger.end_pod(&uid(&pod), seconds(0));
            }
        }
        ledger.tick(seconds(if round.is_multiple_of(50) { 100 } else { 0 }));
        ledger.report("n", &report("x", 7, round + 2, "A"), seconds(0)).unwrap();
    }
    ledger.tick(seconds(1_000));
    let (nodes, domains) = kept_nodes(&ledger);
    assert!(nodes <= KEPT_GONE + 1, "{nodes} nodes");
    assert!(domains <= KEPT_GONE + 1, "{domains} domains");
    let positions = ledger.node_table().len();
    assert!(positions <= 2 * KEPT_GONE, "{positions} positions");
    assert_eq!(ledger.owners.len(), 1, "of the node that stays");
    assert_eq!(ledger.nodes().len(), 1);
    assert_eq!(ledger.audit(), Ok(()));
}

#[test]
fn many_deleted_nodes_leave_few_entries_and_return_as_new_ones() {
    let ledger = ledger("A");
    let names: Vec<String> = (0..500).map(|at| format!("node-{at}")).collect();
    for _ in 0..3 {
        names.iter().for_each(|name| arrive(&ledger, name));
        ledger.see_pod(&bound("p", "node-7", "GPU-node-7", 400_000), seconds(0));
        assert_eq!(kept_nodes(&ledger).0, 501);
        names.iter().for_each(|name| ledger.lose_node(&NodeName::new(name.as_str())));
        ledger.tick(seconds(0));
        assert_eq!(kept_nodes(&ledger), (2, 1), "one holds a pod");
        assert_eq!(ledger.reservation(&uid("p")).unwrap().placement.node.as_str(), "node-7");
        assert_eq!(ledger.answers(&share_request(1), &["node-8"]), [Err(Rejection::UnknownNode)]);
    }
    assert_eq!(ledger.node_table().len(), 501);
}

#[test]
fn a_node_in_a_reused_position_has_its_own_figures() {
    let ledger = ledger("A");
    for (name, devices, count) in [("a", "X", 2), ("b", "Y Z", 3)] {
        see_node(&ledger, name);
        ledger.report(name, &hello(name, 1, devices), seconds(0)).unwrap();
        assert_eq!(ledger.packing().devices, count, "{name}");
        ledger.lose_node(&NodeName::new(name));
        ledger.forget_gone_nodes();
    }
    assert_eq!(ledger.node_table().len(), 2);
}

#[test]
fn pods_that_name_missing_nodes_create_few_entries() {
    let ledger = ledger("A");
    for at in 0..MAX_NAMED_NODES + 5 {
        let name = format!("x-{at:05}");
        ledger.see_pod(&bound(&name, &name, "X", 1), seconds(0));
    }
    assert_eq!(kept_nodes(&ledger).0, MAX_NAMED_NODES);
    let unplaced = LedgerEvent::Unplaced { pod: pod("p"), node: NodeName::new("z") };
    assert_eq!(ledger.see_pod(&bound("p", "z", "Z", 1), seconds(0)), [unplaced]);
    see_node(&ledger, "z");
    assert_eq!(ledger.see_pod(&bound("p", "z", "Z", 1), seconds(0)), [], "an existing node");
}

#[test]
fn recently_ended_pods_and_longer_draining_ones_are_remembered() {
    const MOST: usize = 20_000;
    let ledger = ledger("A");
    ledger.see_pod(&bound("p", "n", "A", 900_000), seconds(0));
    ledger.end_pod(&uid("p"), seconds(0));
    (0..MOST + 5).for_each(|at| drop(ledger.end_pod(&uid(&format!("{at}")), seconds(0))));
    let table = ledger.entries().into_iter().find(|(table, _)| *table == "ended");
    assert_eq!(table, Some(("ended", MOST)));
    assert_eq!(reserve(&ledger, &format!("{}", MOST + 4), 1), Err(ReserveError::Ended));
    assert_eq!(ledger.see_pod(&bound("p", "n", "A", 1), seconds(1)), [edited("n")]);
    assert_eq!(free(&ledger), [100]);
    let state = ledger.reservation(&uid("p")).unwrap().state;
    assert!(matches!(state, ReservationState::Draining { .. }), "it still ends: {state:?}");
}

#[test]
fn a_reused_node_position_carries_over_no_state() {
    let ledger = ledger("A");
    let (rounds, query) = (300, share_request(400_000));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..rounds {
                let name = format!("come-{}", round % 5);
                arrive(&ledger, &name);
                ledger.lose_node(&NodeName::new(name.as_str()));
                ledger.forget_gone_nodes();
            }
        });
        for thread in 0..2 {
            let (ledger, query) = (&ledger, &query);
            scope.spawn(move || {
                for round in 0..rounds {
                    let (pod_uid, name) =
                        (format!("{thread}-{round}"), format!("come-{}", round % 5));
                    let device = format!("GPU-{name}");
                    if thread == 0 {
                        ledger.see_pod(&bound(&pod_uid, &name, &device, 100_000), seconds(0));
                    } else {
                        drop(ledger.reserve(&pod(&pod_uid), &name, query, seconds(0)));
                    }
                    ledger.hold(&uid(&format!("c{pod_uid}")), &name, query, seconds(0));
                    if let Some(held) = ledger.reservation(&uid(&pod_uid)) {
                        assert_eq!(held.placement.node.as_str(), name);
                    }
                    ledger.drop_hold(&uid(&format!("c{pod_uid}")));
                    ledger.end_pod(&uid(&pod_uid), seconds(0));
                }
            });
        }
    });
    ledger.tick(seconds(1_000));
    ledger.forget_gone_nodes();
    assert_eq!((ledger.pods.len(), ledger.holds.len()), (0, 0));
    assert_eq!(kept_nodes(&ledger).0, 1);
    assert_eq!(ledger.audit(), Ok(()));
}

#[test]
fn room_appears_when_a_pod_leaves_the_host_to_others_where_some_of_it_is_kept() {
    let ledger = ledger("A B");
    let host = |cpu| HostAmount { cpu: MilliCpu::new(cpu), memory: MemMib::ZERO };
    ledger.see_node(&NodeName::new("n"), host(4_000), PoolName::new(""));
    let plain = |name: &str| PodFact {
        wants_gpu: false,
        placement: None,
        request: None,
        host: host(2_000),
        ..bound(name, "n", "A", 1)
    };
    for name in ["first", "second"] {
        ledger.see_pod(&plain(name), seconds(0));
    }
    assert_eq!(ledger.end_pod(&uid("first"), seconds(1)), [], "kube-scheduler counts the host");
    let kept = PlacementRequest { host: host(1_000), ..share_request(1_000_000) };
    assert!(ledger.stand(Holder::first(&uid("kept"), "", &kept), None, |_| true).0.is_some());
    let waiting = PlacementRequest { host: host(2_000), ..share_request(500_000) };
    let answer = || ledger.answers(&waiting, &["n".to_owned()]).remove(0);
    assert!(answer().is_err(), "room is kept for another pod");
    assert!(!ledger.takes_kept_host("n", host(1_000)), "as much is left beside it");
    assert_eq!(ledger.end_pod(&uid("second"), seconds(1)), [room()]);
    assert!(answer().is_ok());
}

#[test]
fn what_is_kept_of_a_host_stays_when_kube_scheduler_sees_the_end_of_a_pod_first() {
    let ledger = ledger("A B");
    let host = |cpu| HostAmount { cpu: MilliCpu::new(cpu), memory: MemMib::ZERO };
    ledger.see_node(&NodeName::new("n"), host(2_000), PoolName::new(""));
    let leaving =
        PodFact { host: host(2_000), request: None, ..bound("leaving", "n", "A", 500_000) };
    ledger.see_pod(&leaving, seconds(0));
    let kept = PlacementRequest { host: host(2_000), ..share_request(500_000) };
    let beside = PlacementRequest { host: host(1_000), ..share_request(500_000) };
    let answer = || ledger.answers(&beside, &["n".to_owned()]).remove(0);
    // kube-scheduler asks only about nodes that have the CPU: as it sees them, the pod has left.
    assert!(answer().is_ok() && !ledger.takes_kept_host("n", host(1_000)), "nothing is kept");
    assert!(ledger.stand(Holder::first(&uid("kept"), "", &kept), None, |_| true).0.is_some());
    assert_eq!(answer(), Err(Rejection::HostKept));
    assert!(ledger.takes_kept_host("n", host(1_000)), "nor may a pod without a GPU");
    assert!(!ledger.takes_kept_host("n", host(0)), "one that needs no CPU may");
    ledger.end_pod(&uid("leaving"), seconds(1));
    assert_eq!(answer(), Err(Rejection::HostKept), "still the other's");
}

#[test]
fn the_most_that_a_request_takes_is_of_the_devices_that_are_there() {
    let ledger = ledger("A B");
    let most = |amount, isolation| {
        let gpu =
            GpuRequest { isolation, ..GpuRequest::several(amount, NonZeroU32::new(2).unwrap()) };
        ledger.most_of(&PlacementRequest { gpu: Some(gpu), ..share_request(1) })
    };
    let [half, little] = [500_000, 10].map(Share::from_millionths);
    let memory = MemMib::new(750);
    assert_eq!(most(Amount::Fraction(half), Isolation::None), 1_000_000);
    assert_eq!(most(Amount::Memory(memory), Isolation::None), 1_500_000);
    assert_eq!(most(Amount::FractionAndMemory(little, memory), Isolation::None), 1_500_000);
    assert_eq!(
        most(Amount::Fraction(little), Isolation::Hardware),
        2_000_000,
        "no device serves it"
    );
    let plain = PlacementRequest { gpu: None, ..share_request(1) };
    assert_eq!(ledger.most_of(&plain), 0);
}

#[test]
fn room_appears_also_where_it_is_kept() {
    let ledger = ledger("A");
    ledger.see_pod(&bound("first", "n", "A", 1_000_000), seconds(0));
    let query = share_request(1_000_000);
    assert!(ledger.stand(Holder::first(&uid("kept"), "", &query), None, |_| true).0.is_some());
    assert_eq!(ledger.end_pod(&uid("first"), seconds(1)), [], "its processes may still run");
    let reported = |sequence| {
        let reported = ledger.report("n", &report("x", 7, sequence, "A"), seconds(sequence));
        reported.unwrap().events
    };
    assert_eq!([reported(2), reported(3)], [vec![], vec![room()]], "the second list after the end");
    assert_eq!(free(&ledger), [0], "for others nothing is free");
}
