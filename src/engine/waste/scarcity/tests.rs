//! What becomes dear, and when.

use super::*;
use crate::model::node_state::NodeState;
use crate::scoring::node_fixture;
use crate::waste::compiled_mix::CompiledMix;
use crate::waste::supply::NodeSupply;

/// A cluster of the nodes of these texts, with one table of classes.
fn cluster(nodes: &[&str]) -> (Vec<NodeState>, DeviceClasses, NodeShapes, Supply) {
    let mut classes = DeviceClasses::default();
    let (mut node_shapes, mut supply) = (NodeShapes::default(), Supply::default());
    let mut made = Vec::new();
    for text in nodes {
        let node = node_fixture::node_of(text, &mut classes);
        node_shapes.count(&node);
        supply.replace(&NodeSupply::default(), &NodeSupply::of(&node));
        made.push(node);
    }
    (made, classes, node_shapes, supply)
}

fn prices(nodes: &[&str], mix: &str, has_gpu: bool) -> ScarcityPrices {
    let (_, classes, node_shapes, supply) = cluster(nodes);
    CompiledMix::of(&node_fixture::mix(mix), &classes, &node_shapes).prices(&supply, has_gpu)
}

const PAIR: &str = "A:1000/1000 B:1000/1000";
const SPLIT: &str = "A:900/1000 B:1000/1000";

#[test]
fn room_for_several_devices_is_scarce_when_nearly_all_is_needed() {
    let price = |nodes: &[&str]| prices(nodes, "100000 whole count=2; 200000 whole", true).several;
    let (plenty, some, none) =
        (price(&[PAIR, PAIR, PAIR]), price(&[PAIR, PAIR, SPLIT]), price(&[SPLIT, SPLIT]));
    assert!(plenty < some && some < none, "{plenty}, {some}, {none}");
    assert_eq!(none, 20_000, "the price never exceeds that");
    assert_eq!(prices(&[PAIR], "1000000 whole", true).several, 0, "nobody requests several");
    let early = prices(&[SPLIT], "10 whole", true).several;
    assert!(early > 0, "with few samples, a pod may request several");
}

#[test]
fn nodes_stay_whole_while_there_is_other_room() {
    // No pod has requested two devices for long: only the prior for whole nodes is left.
    let kept = |nodes: &[&str], mix| prices(nodes, mix, true).several;
    let shares = "4000 fraction=0.5";
    let (broken, full) = ("C:500/1000 D:1000/1000", "C:500/1000 D:500/1000");
    assert!(kept(&[PAIR, broken], shares) > 20_000, "the other device of the second node is free");
    assert!(kept(&[PAIR, full], shares) < 100, "one of the pairs has to be broken");
    // As a price of the room itself it is the same, however much demand there is for it.
    let per_room =
        |mix, part: f64| (float(kept(&[PAIR, broken], mix).unsigned_abs()) * part).round();
    let few = per_room("3600 whole; 200 whole count=2", 0.1 * 4000.0 / 4050.0 + 0.3 / 81.0);
    assert!((few - 100.0).abs() < 2.0, "{few}");
    // Room that some demand is bound to is no other room.
    let (pair, single) = ("A:1000/1000@T4 B:1000/1000@T4", "C:1000/1000@A100");
    assert!(kept(&[pair, single], shares) > 20_000);
    assert!(kept(&[pair, single], "3000 fraction=0.5; 1000 fraction=0.5 model=A100") < 100);
}

#[test]
fn a_model_is_scarce_for_all_when_some_pods_accept_nothing_else() {
    let nodes = ["A:1000/1000@T4 B:1000/1000@T4", "C:1000/1000@A100"];
    let bound = prices(&nodes, "1 whole model=A100; 1 whole", true);
    assert!(bound.by_class[1] > 0 && bound.by_class[0] == 0, "{bound:?}");
    let free = prices(&nodes, "2 whole", true);
    assert!(free.by_class.iter().all(|price| *price < bound.by_class[1]), "{free:?}");
    // a pod without a GPU takes no model away
    let without = prices(&nodes, "1 whole model=A100; 1 whole", false);
    assert!(without.by_class.get(1).is_none_or(|price| *price < bound.by_class[1]), "{without:?}");
}

#[test]
fn a_placement_costs_its_waste_and_its_scarcity_price() {
    let waste_change = WasteChange { gain: 5, spared: 2, class: ClassId::default(), share: 3 };
    let free = ScarcityPrices::default();
    assert_eq!(free.cost(&waste_change), -5_000);
    let dear = ScarcityPrices { several: 10, by_class: vec![100] };
    assert_eq!(dear.cost(&waste_change), 3 * 100 - 5_000 - 2 * 10);
}
