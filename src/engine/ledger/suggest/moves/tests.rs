//! Which moves make room, and that the room is there once they are made.

use super::*;
use crate::ledger::ledger_fixture::{bound, hello, ledger, node, seconds, see_node, share_request};
use crate::model::request::{Amount, GpuRequest};

/// A ledger of node `n` with the GPUs of `names` and node `m` with one GPU `M`, and pods on them,
/// each as `pod@GPU`, with its millionths.
fn cluster(names: &str, pods: &[(&str, u64)]) -> Ledger {
    let ledger = ledger(names);
    see_node(&ledger, "m");
    ledger.report("m", &hello("y", 1, "M"), seconds(0)).unwrap();
    for (pod, share) in pods {
        let (name, device) = pod.split_once('@').unwrap();
        let at = if device == "M" { "m" } else { "n" };
        ledger.see_pod(&bound(name, at, device, *share), seconds(0));
    }
    ledger
}

fn whole() -> PlacementRequest {
    PlacementRequest { gpu: Some(GpuRequest::one(Amount::Whole)), ..share_request(0) }
}

/// The moves as `pod>GPU`.
fn reported(moves: &[Move]) -> Vec<String> {
    let to = |one: &Move| one.to.devices[0].id.to_string();
    moves.iter().map(|one| format!("{}>{}", one.pod.name, to(one))).collect()
}

/// Makes the moves, and checks that the pod fits then.
fn carry_out(ledger: &Ledger, query: &PlacementRequest, way: &Relocation) {
    assert!(ledger.best(query).is_none(), "moves are for pods that fit nowhere");
    for one in &way.moves {
        let held = ledger.reservation(&one.pod.uid).unwrap();
        assert_eq!(held.placement, one.from);
        ledger.replace_placement(&one.pod.uid, one.to.clone());
        let share = one.to.devices[0].demand.share.millionths();
        let device = one.to.devices[0].id.to_string();
        let fact = bound(&one.pod.name, one.to.node.as_str(), &device, share);
        assert_eq!(ledger.see_pod(&fact, seconds(1)), [], "a newer write of our own");
    }
    for name in ["n", "m"] {
        let overallocated =
            node(ledger, name).devices().iter().any(|device| device.is_overallocated());
        assert!(!overallocated, "{name}");
    }
    let node = way.placement.node.as_str();
    ledger
        .reserve(&crate::ledger::ledger_fixture::pod("waiting"), node, query, seconds(1))
        .unwrap();
    ledger.audit().unwrap();
}

#[test]
fn moves_take_the_fewest_and_then_the_smallest_pods() {
    for (names, pods, most, expected) in [
        // the smaller neighbor of two halves
        ("A B", vec![("a@A", 500_000), ("b@B", 400_000), ("c@M", 1_000_000)], 1, vec!["b>A"]),
        // to another node
        ("A", vec![("a@A", 500_000), ("c@M", 500_000)], 1, vec!["a>M"]),
        // one large rather than two small ones
        (
            "A B",
            vec![("a@A", 100_000), ("b@A", 100_000), ("c@B", 600_000), ("d@M", 900_000)],
            3,
            vec!["c>A"],
        ),
        // two, the larger one first
        (
            "A B",
            vec![("a@A", 300_000), ("b@A", 200_000), ("c@B", 500_000), ("d@M", 600_000)],
            1,
            vec!["c>A"],
        ),
        (
            "A B",
            vec![("a@A", 300_000), ("b@A", 200_000), ("c@B", 600_000), ("d@M", 700_000)],
            2,
            vec!["a>B", "b>M"],
        ),
    ] {
        let ledger = cluster(names, &pods);
        let way = ledger
            .moves(&whole(), &OwnRoom::default(), most)
            .unwrap_or_else(|| panic!("no way for {pods:?}"));
        let reported = reported(&way.moves);
        assert_eq!(reported.len(), expected.len(), "{pods:?}: {reported:?}");
        if expected.len() == 1 {
            assert_eq!(reported, expected, "{pods:?}");
        }
        carry_out(&ledger, &whole(), &way);
    }
}

#[test]
fn nothing_is_proposed_where_nothing_helps() {
    let full = [("a@A", 600_000), ("b@B", 600_000), ("c@M", 600_000)];
    let two = [("a@A", 300_000), ("b@A", 200_000), ("c@B", 600_000), ("d@M", 700_000)];
    let free = [("a@A", 600_000), ("c@M", 600_000)];
    for (pods, most) in [(&full[..], 3), (&two[..], 1), (&free[..], 3)] {
        let ledger = cluster("A B", pods);
        assert_eq!(ledger.moves(&whole(), &OwnRoom::default(), most), None, "{pods:?}");
    }
    // a pod without a known request stays where it is
    let ledger = cluster("A B", &[("a@A", 500_000), ("c@M", 1_000_000)]);
    let unknown = bound("b", "n", "B", 500_000);
    ledger.see_pod(&crate::ledger::change::facts::PodFact { request: None, ..unknown }, seconds(0));
    let way = ledger.moves(&whole(), &OwnRoom::default(), 3).unwrap();
    assert_eq!(reported(&way.moves), ["a>B"]);
}

#[test]
fn a_gpu_is_emptied_by_moves_to_gpus_in_use() {
    let ledger = cluster("A B C", &[("a@A", 300_000), ("b@B", 500_000), ("c@M", 900_000)]);
    let found = ledger.emptyings(2, 5);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(
        (found[0].device.as_str(), reported(&found[0].moves)),
        ("A", vec!["a>B".to_owned()])
    );
    // an empty GPU is not used for it
    let ledger = cluster("A B C", &[("a@A", 600_000), ("b@B", 600_000), ("c@M", 900_000)]);
    assert_eq!(ledger.emptyings(2, 5), []);
}
