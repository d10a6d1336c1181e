//! What facts, commands and time do to the books of the cluster.

use super::super::fixture::{
    asks, bound, free, hello, ledger, node, pod, report, say, seconds, see_node, uid,
};
use super::*;
use crate::ledger::commands::ReserveError;
use crate::ledger::facts::PodFact;
use crate::ledger::reading::Readiness;
use crate::packing::fit::Misfit;
use crate::packing::reservation::{Placement, ReservationState};
use crate::packing::units::{HostAmount, MemMib, MilliCpu};

fn room() -> Effect {
    Effect::Room(NodeName::new("n"))
}

fn reserve(ledger: &Ledger, name: &str, share: u64) -> Result<Placement, ReserveError> {
    ledger.reserve(&pod(name), "n", &asks(share), seconds(0))
}

#[test]
fn a_repeated_bind_gives_the_same_place_and_another_node_is_refused() {
    let ledger = ledger("A B");
    see_node(&ledger, "m");
    ledger.report("m", &hello("m", 1, "M"), seconds(0)).unwrap();
    let first = reserve(&ledger, "p", 500_000).unwrap();
    assert_eq!(reserve(&ledger, "p", 500_000), Ok(first.clone()));
    let elsewhere = ledger.reserve(&pod("p"), "m", &asks(500_000), seconds(0));
    assert_eq!(elsewhere, Err(ReserveError::HeldElsewhere { node: NodeName::new("n") }));
    ledger.confirm(&uid("p"));
    assert_eq!(reserve(&ledger, "p", 500_000), Ok(first));
    assert_eq!(ledger.forget(&uid("p")), [], "a bound pod is not forgotten");
    assert_eq!(free(&ledger), [500, 1000]);
    let unknown = ledger.reserve(&pod("q"), "nowhere", &asks(1), seconds(0));
    assert_eq!(unknown, Err(ReserveError::Misfit(Misfit::UnknownNode)));
}

#[test]
fn a_refused_binding_gives_its_room_back_and_the_pod_may_try_elsewhere() {
    let ledger = ledger("A");
    reserve(&ledger, "p", 500_000).unwrap();
    assert_eq!(ledger.forget(&uid("p")), [room()]);
    assert_eq!(ledger.forget(&uid("p")), []);
    assert_eq!(free(&ledger), [1000]);
    assert!(reserve(&ledger, "p", 1_000_000).is_ok());
}

#[test]
fn time_alone_never_frees_a_binding_that_is_undecided() {
    let ledger = ledger("A");
    reserve(&ledger, "p", 500_000).unwrap();
    ledger.tick(seconds(1_000_000));
    let state = || ledger.reservation(&uid("p")).unwrap().state;
    assert_eq!(state(), ReservationState::Assumed { since: seconds(0) });
    ledger.see_pod(&bound("p", "n", "A", 500_000), seconds(9));
    assert_eq!(state(), ReservationState::Confirmed);
}

#[test]
fn a_pod_is_booked_where_it_is_bound_with_what_is_written() {
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
fn a_pod_without_a_placement_is_told_of_and_its_reservation_ends() {
    let ledger = ledger("A");
    reserve(&ledger, "p", 500_000).unwrap();
    let fact = PodFact { placement: None, ..bound("p", "n", "A", 0) };
    let unplaced = Effect::Unplaced { pod: pod("p"), node: NodeName::new("n") };
    assert_eq!(ledger.see_pod(&fact, seconds(0)), [room(), unplaced]);
    assert_eq!(free(&ledger), [1000]);
    assert_eq!(reserve(&ledger, "p", 500_000), Err(ReserveError::Ended));
    let pending = PodFact { node: None, ..fact };
    assert_eq!(ledger.see_pod(&pending, seconds(0)), [], "a late copy");
    ledger.end_pod(&uid("p"), seconds(0));
    assert!(!node(&ledger, "n").holds(&uid("p")));
}

#[test]
fn keys_taken_away_from_a_bound_pod_free_nothing() {
    let ledger = ledger("A");
    let fact = bound("p", "n", "A", 400_000);
    ledger.see_pod(&fact, seconds(0));
    let stripped = PodFact { placement: None, ..fact };
    assert_eq!(ledger.see_pod(&stripped, seconds(0)), [edited("n")]);
    assert_eq!(free(&ledger), [600]);
}

fn edited(node: &str) -> Effect {
    Effect::PlacementEdited { pod: pod("p"), node: NodeName::new(node) }
}

#[test]
fn an_edited_placement_is_told_and_changes_nothing_of_what_a_pod_holds() {
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
            let told = ledger.see_pod(edit, seconds(1));
            let node = edit.node.as_ref().unwrap().as_str();
            // Of a pod that has ended nothing is told.
            assert_eq!(told, if state == "confirmed" { vec![edited(node)] } else { vec![] });
            assert_eq!((free(&ledger), state), (vec![100, 1000], state));
        }
        assert_eq!(ledger.see_pod(&ours, seconds(2)), [], "as it was written");
        ledger.end_pod(&uid("p"), seconds(3));
    }
    assert!(node(&ledger, "m").reservations().is_empty());
    assert_eq!(ledger.audit(), Ok(()));
}

#[test]
fn the_first_placement_seen_counts_and_may_then_change_only_beside_its_devices() {
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
fn an_ended_pod_is_not_booked_again_by_late_events() {
    let ledger = ledger("A");
    let fact = bound("p", "n", "A", 400_000);
    ledger.see_pod(&fact, seconds(0));
    assert_eq!(ledger.end_pod(&uid("p"), seconds(0)), []);
    assert_eq!(free(&ledger), [600], "its processes may still run");
    ledger.see_pod(&fact, seconds(1));
    assert_eq!(reserve(&ledger, "p", 1000), Err(ReserveError::Ended));
    let silent = Effect::Silent(NodeName::new("n"));
    assert_eq!(ledger.tick(seconds(30)), [silent], "no room on a node that is silent");
    assert!(ledger.reservation(&uid("p")).is_none());
    ledger.see_pod(&fact, seconds(31));
    assert!(ledger.reservation(&uid("p")).is_none());
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
    assert_eq!(ledger.answers(&asks(1000), &["n"]), [Err(Misfit::NodeGone)]);
    assert!(say(&ledger, &report("x", 7, 2, "A")).is_ok());
    assert_eq!(ledger.answers(&asks(1000), &["n"]), [Err(Misfit::NodeGone)]);
    see_node(&ledger, "n");
    assert_eq!(ledger.answers(&asks(1000), &["n"]), [Err(Misfit::Silent)]);
    say(&ledger, &report("x", 7, 3, "A")).unwrap();
    assert_eq!(free(&ledger), [600]);
    ledger.lose_node(&NodeName::new("n"));
    ledger.end_pod(&uid("p"), seconds(0));
    ledger.tick(seconds(30));
    assert_eq!(ledger.nodes().len(), 0);
    see_node(&ledger, "n");
    assert_eq!(ledger.answers(&asks(1000), &["n"]), [Err(Misfit::NeverReported)]);
}

#[test]
fn overbooking_by_facts_is_told_and_stops_nothing_else() {
    let ledger = ledger("A B");
    ledger.see_pod(&bound("p", "n", "A", 700_000), seconds(0));
    let overbooked =
        Effect::Overbooked { node: NodeName::new("n"), device: DeviceId::new("A").unwrap() };
    assert_eq!(ledger.see_pod(&bound("q", "n", "A", 400_000), seconds(0)), [overbooked]);
    assert_eq!(free(&ledger), [0, 1000]);
    assert_eq!(reserve(&ledger, "r", 1_000_000).unwrap().devices[0].id.as_str(), "B");
    assert_eq!(ledger.packing().overbooked, 1);
    assert_eq!(ledger.audit(), Ok(()));
}

#[test]
fn questions_wait_for_the_lists_and_then_for_nodes_that_hold_pods() {
    let ledger = Ledger::new(super::super::fixture::settings());
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
