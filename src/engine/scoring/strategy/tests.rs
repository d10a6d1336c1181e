//! Which placement each policy prefers.

use crate::hardware::topology::Proximity;
use crate::scoring::cost::Ties;
use proptest::prelude::{Just, Strategy as Any, any, prop_oneof, proptest};
use proptest::prop_assert_eq;
use wire::units::Share;

use super::*;
use crate::model::device_state::HoldRule;
use crate::scoring::plan::CostedPlacement;
use crate::scoring::{node_fixture, plan};
use crate::waste::scarcity::ScarcityPrices;

fn place(node: &str, request: &str, policy: Policy, mix: &str) -> CostedPlacement {
    let (node, classes) = node_fixture::node(node);
    let compiled = node_fixture::compiled_request(request, &classes);
    let mix = node_fixture::compiled(mix, &node, &classes);
    plan::evaluate(&node, &compiled, &Strategy::Policy(policy), &mix, HoldRule::Respected).unwrap()
}

fn share(millionths: u64) -> Share {
    Share::from_millionths(millionths)
}

fn cost(node: &str, request: &str, policy: Policy) -> Cost {
    place(node, request, policy, "1 fraction=0.5; 9 whole")
        .local_cost
        .cost(&ScarcityPrices::default())
}

/// Both nodes take the request, and the first one is the better placement.
fn check_better(policy: Policy, request: &str, better: &str, worse: &str) {
    let is_better = cost(better, request, policy) < cost(worse, request, policy);
    assert!(is_better, "{request}: {better} is not better than {worse}");
}

#[test]
fn binpack_opens_no_device_where_it_can_fill_one() {
    for (request, better, worse) in [
        ("fraction=0.3", "A:400/1000 B:1000/1000", "A:1000/1000"),
        ("fraction=0.3", "A:300/1000", "A:400/1000"),
        ("fraction=0.3", "A:300/1000 B:200/1000", "A:300/1000 B:900/1000"),
        ("fraction=0.3 count=2", "A:500/1000 B:500/1000", "A:300/1000 B:1000/1000"),
    ] {
        check_better(Policy::BinPack, request, better, worse);
    }
}

#[test]
fn spread_minimizes_the_number_of_neighbors() {
    for (request, better, worse) in [
        ("fraction=0.3", "A:1000/1000", "A:900/1000"),
        ("fraction=0.3", "A:700/1000", "A:600/1000"),
        ("fraction=0.3", "A:1000/1000 B:900/1000", "A:1000/1000 B:300/1000"),
        ("fraction=0.3 count=2", "A:400/1000 B:1000/1000", "A:900/1000 B:900/1000"),
    ] {
        check_better(Policy::Spread, request, better, worse);
    }
}

#[test]
fn fragmentation_prefers_the_node_with_the_least_new_waste() {
    for (request, better, worse) in [
        ("fraction=0.5", "A:500/1000", "A:1000/1000"),
        ("fraction=0.3", "A:300/1000", "A:500/1000"),
        // as many devices, as opening one costs less in a larger cluster
        ("whole", "A:1000/1000 B:0/1000 C:0/1000", "A:1000/1000 B:300/1000 C:1000/1000,0.2"),
    ] {
        let cost = |node| cost(node, request, Policy::Fragmentation);
        assert!(cost(better) <= cost(worse), "{request}: {better}, {worse}");
    }
    check_better(Policy::Fragmentation, "fraction=0.5", "A:500/1000", "A:1000/1000");
}

#[test]
fn a_cost_counts_the_room_that_stays_free_for_tenants() {
    let node = "A:600/1000 B!:900/1000 C=1g.5gb:500/500";
    let cost = place(node, "fraction=0.4", Policy::BinPack, "").local_cost;
    let left = Cost::BinPack {
        instance_mib: 0,
        devices_opened: 0,
        left_on_devices: share(200_000),
        ties: Ties::new(Proximity::Linked, 0, 0),
        left_on_node: share(1_200_000), // of A and C; B is unhealthy, and a MIG parent has no tenants
    };
    assert_eq!(cost, LocalCost::Ranked(left));
    let cost = place(node, "fraction=0.4", Policy::Spread, "").local_cost;
    let left = Cost::Spread {
        instance_mib: 0,
        tenants_met: 1,
        left_on_devices: Reverse(share(200_000)),
        left_on_node: Reverse(share(1_200_000)),
        ties: Ties::new(Proximity::Linked, 0, 0),
    };
    assert_eq!(cost, LocalCost::Ranked(left));
}

#[test]
fn the_least_requested_model_is_chosen_for_whole_devices() {
    let mix = "9 fraction=0.5 model=T4; 1 fraction=0.5 model=A100";
    let node = "A:1000/1000@T4 B:1000/1000@A100 C:1000/1000@T4";
    let taken = |request| {
        let place = place(node, request, Policy::Fragmentation, mix);
        place.taken.iter().map(|(position, _)| *position).collect::<Vec<_>>()
    };
    assert_eq!(taken("whole"), [1]);
    assert_eq!(taken("fraction=1"), [1]);
    assert_eq!(taken("whole model=T4"), [0]);
    assert_eq!(taken("whole count=2"), [1, 0]);
}

#[test]
fn the_smallest_instance_that_is_enough_wins_under_every_policy() {
    let request = "memory=400 isolation=hardware";
    for policy in Policy::ALL {
        for mix in ["", "9 memory=400 isolation=hardware; 1 fraction=0.5"] {
            let key =
                |node| place(node, request, policy, mix).local_cost.key(&ScarcityPrices::default());
            // The larger one is alone on its node, or the only free one beside tenants.
            for large in [
                "A=3g.20gb:2000/2000",
                "A=3g.20gb:2000/2000 B=3g.20gb:0/2000",
                "A=2g.10gb:1000/1000 B:0/9000",
            ] {
                for small in ["A=1g.5gb:500/500", "A=1g.5gb:500/500 B:9000/9000 C:10/9000"] {
                    assert!(key(small) < key(large), "{policy}, `{mix}`: {small}, {large}");
                }
            }
        }
    }
    check_better(
        Policy::BinPack,
        request,
        "A=1g.5gb:500/500 B=1g.5gb:0/500",
        "A=1g.5gb:500/500 B=1g.5gb:500/500",
    );
}

#[test]
fn policies_are_named_as_the_annotation_writes_them() {
    for policy in Policy::ALL {
        assert_eq!(policy.to_string().parse(), Ok(policy));
    }
    let message = "Binpack".parse::<Policy>().unwrap_err().to_string();
    assert!(message.contains("`Binpack`") && message.contains("`spread`"), "{message}");
}

/// Any cost of one strategy, near others as a rule.
fn any_cost(strategy: u8) -> impl Any<Value = Cost> {
    let share = prop_oneof![4 => 0..5_u64, 1 => 0..(1_u64 << 31)];
    let few = prop_oneof![4 => 0..4_usize, 1 => 0..256_usize];
    let number = prop_oneof![4 => -3..3_i64, 1 => any::<i64>()];
    let proximity =
        prop_oneof![Just(Proximity::Linked), Just(Proximity::NumaNode), Just(Proximity::Far)];
    let ties = (proximity, 0..300_usize, 0..300_usize);
    let ties = ties.prop_map(|(proximity, restarts, empty)| Ties::new(proximity, restarts, empty));
    let instance = prop_oneof![Just(0), 0..3_u32, 0..(1_u32 << 31)];
    let any = (few, share.clone(), share, ties, number, instance);
    any.prop_map(move |(few, a, b, ties, number, instance_mib)| {
        let (a, b) = (self::share(a), self::share(b));
        match strategy {
            0 => Cost::BinPack {
                instance_mib,
                devices_opened: few,
                left_on_devices: a,
                left_on_node: b,
                ties,
            },
            1 => Cost::Spread {
                instance_mib,
                tenants_met: few,
                left_on_devices: Reverse(a),
                left_on_node: Reverse(b),
                ties,
            },
            2 => Cost::Fragmentation { instance_mib, cost: number, ties },
            _ => Cost::Custom { score: Reverse(number) },
        }
    })
}

proptest! {
    #[test]
    fn keys_are_in_cost_order(
        (a, b) in (0..4_u8).prop_flat_map(|strategy| (any_cost(strategy), any_cost(strategy)))
    ) {
        prop_assert_eq!(a.key().cmp(&b.key()), a.cmp(&b));
    }
}
