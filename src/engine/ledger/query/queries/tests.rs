//! Holds: what they keep, for how long, and from which pods.

use super::*;
use crate::ledger::ledger_fixture::{
    bound, free, hello, ledger, node, pod, seconds, see_node, share_request, uid,
};
use wire::driver_work::{DriverWork, MigChange, UpgradeState};

fn room() -> LedgerEvent {
    LedgerEvent::Room(NodeName::new("n"))
}

#[test]
fn a_hold_hides_room_from_other_requests_until_it_ends() {
    let ledger = ledger("A");
    assert_eq!(ledger.hold(&uid("p"), "n", &share_request(600_000), seconds(1)), []);
    assert_eq!(free(&ledger), [400]);
    assert!(ledger.answers(&share_request(500_000), &["n"])[0].is_err());
    assert!(ledger.answers(&share_request(400_000), &["n"])[0].is_ok());
    assert_eq!(ledger.tick(seconds(5)), []);
    assert_eq!(ledger.tick(seconds(6)), [room()]);
    assert_eq!((free(&ledger), ledger.hold_count()), (vec![1000], 0));
}

#[test]
fn bind_uses_its_own_hold_and_respects_the_ledger_past_other_holds() {
    let ledger = ledger("A B");
    ledger.hold(&uid("p"), "n", &share_request(600_000), seconds(1));
    ledger.hold(&uid("q"), "n", &share_request(600_000), seconds(1));
    let reserved =
        |name: &str, share| ledger.reserve(&pod(name), "n", &share_request(share), seconds(1));
    let own = reserved("q", 600_000).unwrap();
    assert_eq!(own.devices[0].id.as_str(), "B");
    assert_eq!(ledger.hold_count(), 1);
    assert_eq!(free(&ledger), [400, 400]);
    let beside = reserved("r", 400_000).unwrap();
    assert_eq!(beside.devices[0].id.as_str(), "A", "a placement beside the hold of p");
    let over = reserved("s", 600_000).unwrap();
    assert_eq!(over.devices[0].id.as_str(), "A", "holds never reject a bind");
    assert!(reserved("p", 600_000).is_err(), "a hold is no guarantee");
    assert_eq!(ledger.hold_count(), 1, "a rejected bind keeps the hold until it ends");
    assert_eq!(ledger.audit(), Ok(()));
}

#[test]
fn a_new_hold_replaces_the_previous_one_of_the_pod() {
    let ledger = ledger("A");
    see_node(&ledger, "m");
    let hold = |share, node: &str| ledger.hold(&uid("p"), node, &share_request(share), seconds(1));
    assert_eq!(hold(600_000, "n"), []);
    assert_eq!(hold(600_000, "n"), [], "the same room is not new room");
    assert_eq!(free(&ledger), [400]);
    assert_eq!(hold(500_000, "n"), [room()], "a tenth appeared");
    assert_eq!(hold(900_000, "n"), []);
    assert_eq!((free(&ledger), ledger.hold_count()), (vec![100], 1));
    assert_eq!(hold(100_000, "m"), [room()], "there is no room at m, and none is held here");
    assert_eq!((free(&ledger), ledger.hold_count()), (vec![1000], 0));
    hold(600_000, "n");
    assert_eq!(hold(1_000_001, "n"), [room()]);
    assert_eq!((free(&ledger), ledger.hold_count()), (vec![1000], 0));
    assert_eq!(hold(1000, "nowhere"), []);
}

#[test]
fn an_allocated_or_ended_pod_gets_no_hold() {
    let ledger = ledger("A");
    ledger.reserve(&pod("p"), "n", &share_request(100_000), seconds(0)).unwrap();
    ledger.see_pod(&bound("q", "n", "A", 100_000), seconds(0));
    ledger.end_pod(&uid("r"), seconds(0));
    for name in ["p", "q", "r"] {
        assert_eq!(ledger.hold(&uid(name), "n", &share_request(100_000), seconds(0)), []);
    }
    assert_eq!((free(&ledger), ledger.hold_count()), (vec![800], 0));
}

#[test]
fn the_number_of_holds_is_bounded() {
    let ledger = ledger("A");
    for i in 0..=MAX_HOLDS {
        ledger.holds.insert(uid(&format!("other-{i}")), 0);
    }
    ledger.hold(&uid("p"), "n", &share_request(100_000), seconds(0));
    assert_eq!(free(&ledger), [1000]);
    assert!(ledger.reserve(&pod("p"), "n", &share_request(100_000), seconds(0)).is_ok());
}

#[test]
fn a_hold_ends_with_its_pod_its_bind_or_its_node() {
    let ledger = ledger("A");
    let hold = || ledger.hold(&uid("p"), "n", &share_request(600_000), seconds(1));
    hold();
    assert_eq!(ledger.drop_hold(&uid("p")), [room()]);
    hold();
    ledger.lose_node(&NodeName::new("n"));
    assert_eq!(ledger.tick(seconds(10)), [], "there is no room on a deleted node");
    assert_eq!(ledger.hold_count(), 0);
    assert_eq!(node(&ledger, "n").devices().len(), 0, "the deleted node is forgotten then");
}

#[test]
fn a_hold_on_another_node_ends_when_another_process_binds_the_pod() {
    let ledger = ledger("A");
    see_node(&ledger, "m");
    ledger.hold(&uid("p"), "n", &share_request(600_000), seconds(1));
    assert_eq!(ledger.see_pod(&bound("p", "m", "M", 600_000), seconds(1)), [room()]);
    assert_eq!((free(&ledger), ledger.hold_count()), (vec![1000], 0));
    ledger.hold(&uid("q"), "n", &share_request(600_000), seconds(1));
    assert_eq!(ledger.end_pod(&uid("q"), seconds(1)), [room()]);
}

#[test]
fn a_node_whose_driver_is_to_be_upgraded_is_the_last_choice() {
    let of = |upgrade| DriverWork { upgrade, mig: None };
    for policy in Policy::ALL {
        let ledger = ledger("A");
        see_node(&ledger, "m");
        ledger.report("m", &hello("y", 1, "B"), seconds(0)).unwrap();
        ledger.reserve(&pod("other"), "n", &share_request(300_000), seconds(0)).unwrap();
        let strategy = Strategy::Policy(policy);
        let query = PlacementRequest { strategy, ..share_request(500_000) };
        let best = || {
            let names = ["m", "n"];
            let kept = ledger.choose(&query, names.into_iter(), 1).kept;
            assert_eq!(kept, [ledger.best(&query).unwrap().0], "{policy:?}");
            let fresh = names.map(|name| ledger.fresh_answer(&query, name));
            assert_eq!(ledger.answers(&query, &names), fresh, "{policy:?}");
            kept[0].clone()
        };
        let first = best();
        let second = NodeName::new(if first.as_str() == "m" { "n" } else { "m" });
        for state in UpgradeState::ALL.into_iter().filter(|state| state.is_waiting()) {
            ledger.see_driver_work(&first, of(Some(state)));
            assert_eq!(best(), second, "{policy:?} {state:?}");
            ledger.see_driver_work(&second, of(Some(state)));
            assert_eq!(best(), first, "{policy:?}: among equals the policy decides");
            ledger.see_driver_work(&second, of(Some(UpgradeState::Cordon)));
            assert_eq!(best(), first, "{policy:?}: it takes pods all the same");
            ledger.see_driver_work(&first, of(None));
            ledger.see_driver_work(&second, of(None));
            assert_eq!(best(), first, "{policy:?}");
        }
    }
}

#[test]
fn room_appears_when_work_on_the_driver_has_ended() {
    let ledger = ledger("A");
    let name = NodeName::new("n");
    let of = |upgrade, mig| DriverWork { upgrade, mig };
    let reserve = |name| ledger.reserve(&pod(name), "n", &share_request(100_000), seconds(0));
    for state in UpgradeState::ALL.into_iter().filter(|state| state.refuses_pods()) {
        assert_eq!(ledger.see_driver_work(&name, of(Some(state), None)), [], "{state:?}");
        let refused = Err(Rejection::DriverUpgrade(state));
        assert_eq!(ledger.answers(&share_request(100_000), &["n"]), [refused]);
        assert!(reserve("p").is_err(), "{state:?}");
    }
    assert_eq!(ledger.see_driver_work(&name, of(None, Some(MigChange::Pending))), []);
    assert!(reserve("p").is_err(), "MIG Manager goes on");
    assert_eq!(ledger.see_driver_work(&name, of(Some(UpgradeState::Required), None)), [room()]);
    assert!(reserve("p").is_ok());
    assert_eq!(ledger.closes_library("n"), None);
    assert_eq!(ledger.closes_library("nowhere"), None);
}
