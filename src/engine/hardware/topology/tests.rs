use proptest::prelude::*;

use super::*;
use crate::model::device_state::HoldRule;
use crate::model::node_state::NodeState;
use crate::model::policy::Policy;
use crate::scoring::cost::Cost;
use crate::scoring::strategy::Strategy as Ranking;
use crate::scoring::{node_fixture, plan};
use crate::waste::scarcity::ScarcityPrices;
use wire::device::{DeviceIndex, DeviceKind, Health};
use wire::ids::ModelName;
use wire::units::MemMib;

/// Devices written as `numa` or `numa:switch`: those of one switch have 4 links to each other.
fn details(text: &str) -> (Vec<Device>, BTreeMap<DeviceId, DeviceDetails>) {
    let words: Vec<(&str, &str)> =
        text.split_whitespace().map(|word| word.split_once(':').unwrap_or((word, ""))).collect();
    let id = |at: usize| DeviceId::new(&format!("GPU-{at}")).unwrap();
    let device = |at: usize| Device {
        id: id(at),
        index: DeviceIndex(u32::try_from(at).unwrap()),
        model: ModelName::new("GPU"),
        total: MemMib::new(1000),
        reserved: MemMib::ZERO,
        kind: DeviceKind::Gpu,
        health: Health::Healthy,
    };
    let sits = |at: usize| {
        let (numa, switch) = words[at];
        let others = (0..words.len()).filter(|other| *other != at && words[*other].1 == switch);
        let neighbors = others.filter(|_| !switch.is_empty()).map(|other| (id(other), 4));
        let neighbors = neighbors.collect();
        DeviceDetails { numa_node: numa.parse().ok(), neighbors, ..DeviceDetails::default() }
    };
    let all = 0..words.len();
    (all.clone().map(device).collect(), all.map(|at| (id(at), sits(at))).collect())
}

fn topology(text: &str) -> Topology {
    let (devices, details) = details(text);
    Topology::of(&devices, &details)
}

#[test]
fn the_proximity_of_a_placement_is_that_of_its_farthest_pair() {
    let of = |text: &str, places: &[usize]| topology(text).proximity(places.iter().copied());
    assert_eq!(of("0:a 1:a 1:b", &[0, 1]), Proximity::Linked);
    assert_eq!(of("0:a 1:a 1:b", &[1, 2]), Proximity::NumaNode);
    assert_eq!(of("0:a 1:a 1:b", &[0, 1, 2]), Proximity::Far);
    assert_eq!(of("? ?", &[0, 1]), Proximity::Far, "an unknown device is not near");
    assert_eq!(of("? ?", &[1]), Proximity::Linked, "no other device to be far from");
    assert_eq!(of("", &[]), Proximity::Linked);
}

#[test]
fn near_devices_are_chosen_and_remaining_groups_stay_together() {
    let of = |text: &str, chosen: &[usize], among: &[usize], wanted| {
        topology(text).nearest(chosen, among, wanted)
    };
    assert_eq!(of("0 1 0 1", &[], &[0, 1, 2, 3], 2), [0, 2]);
    assert_eq!(of("0:a 0:b 0:a 0:b", &[], &[1, 2, 3], 2), [1, 3], "links before the NUMA node");
    assert_eq!(of("0 1 0 1", &[3], &[0, 1, 2], 1), [1], "near the one that is allocated anyway");
    assert_eq!(of("0 0 0 1 1 0", &[], &[0, 1, 2, 3, 4, 5], 2), [3, 4], "four stay together");
    assert_eq!(of("0 0 0 1", &[], &[0, 1, 2, 3], 1), [3], "three stay together");
    assert_eq!(of("? ? ?", &[], &[0, 1, 2], 2), [0, 1], "the first if nothing is known");
    assert_eq!(of("0 0", &[], &[0, 1], 5), [0, 1]);
    assert_eq!(of("0 0", &[], &[], 1), [0; 0]);
}

#[test]
fn a_lost_device_loses_its_links() {
    let all = topology("0 1 0 1:a 1:a");
    assert_eq!(all.without(0), topology("1 0 1:a 1:a"));
    assert_eq!(all.without(4).without(3), topology("0 1 0"));
    assert_eq!(topology("?").without(0), topology(""));
}

#[test]
fn missing_neighbors_and_the_device_itself_are_ignored() {
    let (devices, mut details) = details("? ?");
    let id = |text| DeviceId::new(text).unwrap();
    let said = vec![(id("GPU-0"), u32::MAX), (id("GPU-9"), 1), (id("GPU-1"), u32::MAX)];
    details.get_mut(&id("GPU-0")).unwrap().neighbors = said;
    let found = Topology::of(&devices, &details);
    assert_eq!(*found.bonds, [0, u32::MAX, u32::MAX, 0], "one end is enough");
}

/// A node with these devices, all free.
fn node(text: &str) -> (NodeState, crate::hardware::device_class::DeviceClasses) {
    let (mut node, mut classes) = node_fixture::node("x:1000/1000");
    let (devices, details) = details(text);
    let inventory = crate::hardware::inventory::NodeInventory::placed(devices, &details).unwrap();
    node.replace_inventory(&inventory, &mut classes);
    (node, classes)
}

#[test]
fn every_policy_takes_near_devices_and_prefers_the_node_that_has_them() {
    for policy in Policy::ALL {
        for mix in ["", "1 fraction=0.5; 9 count=2 whole"] {
            let place = |text: &str| {
                let (node, classes) = node(text);
                let ask = node_fixture::compiled_request("whole count=2", &classes);
                let mix = node_fixture::compiled(mix, &node, &classes);
                let ranking = Ranking::Policy(policy);
                plan::evaluate(&node, &ask, &ranking, &mix, HoldRule::Respected).unwrap()
            };
            let taken: Vec<usize> = place("0 1 1 0").taken.iter().map(|(at, _)| *at).collect();
            assert_eq!(taken, [0, 3], "{policy} {mix}");
            let cost = |text| -> Cost { place(text).local_cost.cost(&ScarcityPrices::default()) };
            assert!(cost("0 1 1 0:a") < cost("? ? ? ?"), "{policy} {mix}");
            assert!(cost("0:a 1 1 0:a") < cost("0 1 1 0"), "{policy} {mix}");
        }
    }
}

/// Checks that no set of `wanted` devices is nearer than the set that is found.
fn nearest_of_all(seats: &[(u8, u8)], wanted: usize) {
    let words: Vec<String> =
        seats.iter().map(|(numa, switch)| format!("{numa}:{numa}{switch}")).collect();
    let topology = topology(&words.join(" "));
    let all: Vec<usize> = (0..seats.len()).collect();
    let found = topology.nearest(&[], &all, wanted);
    let wanted = wanted.min(all.len());
    assert_eq!(found.len(), wanted);
    let sets = (0_u32..1 << all.len()).filter(|set| set.count_ones() as usize == wanted);
    for set in sets {
        let set: Vec<usize> = all.iter().copied().filter(|at| set >> at & 1 == 1).collect();
        let worst =
            |set: &[usize]| pairs(set.iter().copied()).map(|(a, b)| topology.bond(a, b)).min();
        assert!(worst(&set) <= worst(&found), "{words:?}: {set:?}, {found:?}");
    }
}

#[test]
fn groups_that_lost_to_a_closer_set() {
    nearest_of_all(&[(1, 0), (2, 0), (0, 0), (0, 0), (2, 0), (0, 0)], 5);
    nearest_of_all(&[(1, 1), (0, 1), (1, 2), (1, 1), (0, 0), (0, 0)], 4);
}

proptest! {
    /// If switches lie within NUMA nodes, as on real boards, no set of this size is nearer.
    #[test]
    fn no_closer_set_exists_when_topology_comes_in_groups(
        seats in prop::collection::vec((0_u8..3, 0_u8..3), 1..8),
        wanted in 1_usize..6,
    ) {
        nearest_of_all(&seats, wanted);
    }
}
