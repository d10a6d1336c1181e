//! The expected waste of free room.

use super::*;
use crate::model::device_state::HoldRule;
use crate::scoring::context::{KeptNodeWaste, ScoringContext, Taken};
use crate::scoring::{node_fixture, node_waste};
use crate::waste::compiled_mix::CompiledMix;
use crate::waste::scarcity::WasteChange;
use wire::units::MemMib;

fn expected_waste(node: &str, mix: &str) -> ExpectedWaste {
    let (node, classes) = node_fixture::node(node);
    node_fixture::compiled(mix, &node, &classes).expected_waste.expect("the mix requests GPUs")
}

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
}

#[test]
fn share_unusable_for_lack_of_cpu_is_the_mean_over_requests() {
    let four = "A:1000/1000 B:1000/1000 C:1000/1000 D:1000/1000";
    for (mix, cpu, unserved) in [
        ("1 whole cpu=8000", 32_000.0, 0.0),
        ("1 whole cpu=8000", 16_000.0, 2.0),
        ("1 whole cpu=8000", 0.0, 4.0),
        // half a GPU with four cores needs the same per GPU
        ("1 fraction=0.5 cpu=4000", 16_000.0, 2.0),
        // by demand: each whole GPU weighs as much as two halves
        ("1 whole cpu=8000; 2 fraction=0.5 cpu=2000", 16_000.0, 1.0),
        // of several GPUs too
        ("1 whole count=2 cpu=16000", 16_000.0, 2.0),
        // a pod without a GPU needs nothing beside GPUs
        ("1 whole cpu=8000; 5 cpu=64000", 16_000.0, 2.0),
    ] {
        close(expected_waste(four, mix).unserved(4.0, cpu, 1e9), unserved);
    }
    close(expected_waste(four, "1 whole cpu=8000").unserved(0.0, 0.0, 0.0), 0.0);
}

#[test]
fn nothing_is_expected_before_the_first_request_for_a_gpu() {
    let (node, classes) = node_fixture::node("A:1000/1000");
    for mix in ["", "3 cpu=1000", "1 mig=1g.5gb"] {
        assert!(node_fixture::compiled(mix, &node, &classes).expected_waste.is_none(), "{mix}");
    }
    let (mig, classes) = node_fixture::node("A=1g.5gb:500/500");
    assert!(
        node_fixture::compiled("1 whole", &mig, &classes).expected_waste.is_none(),
        "nothing to share"
    );
}

/// The position of the device that a request gets.
fn taken(node: &str, mix: &str, request: &str) -> usize {
    chosen(node, mix, request, &WasteWeights::default()).1
}

/// The same with the change of the expected waste.
fn chosen(node: &str, mix: &str, request: &str, weights: &WasteWeights) -> (WasteChange, usize) {
    let (node, classes) = node_fixture::node(node);
    let mut node_shapes = NodeShapes::default();
    node_shapes.count(&node);
    let mix = CompiledMix::weighted(weights, &node_fixture::mix(mix), &classes, &node_shapes);
    let compiled = node_fixture::compiled_request(request, &classes);
    let rooms = node.rooms(HoldRule::Respected);
    let fits: Vec<Taken> = (0..)
        .zip(rooms)
        .filter_map(|(at, room)| Some((at, crate::model::fit::fit(&compiled, room).ok()?)))
        .collect();
    let host_free = node.host_room(HoldRule::Respected);
    let node_waste = KeptNodeWaste::new();
    let context = ScoringContext {
        node: &node,
        rooms,
        compiled: &compiled,
        fits: &fits,
        host_free,
        node_waste: &node_waste,
    };
    let (change, taken) = {
        let making = context.making(&mix);
        node_waste::choose(&mix.expected_waste.unwrap(), &context, &mix.typical, &making)
    };
    (change, taken[0].0)
}

#[test]
fn memory_is_taken_where_it_is_the_smaller_part() {
    let node = "A:1000/1000@T4 B:4000/4000@A100";
    let gain = |share| {
        let weights = WasteWeights { share, residuals: 0.0, ..WasteWeights::default() };
        let (change, at) = chosen(node, "9 memory=500", "memory=500", &weights);
        (change.gain, at)
    };
    assert_eq!(
        gain(5.0),
        (gain(0.0).0 - 625_000, 1),
        "an eighth of the A100, at the price of five"
    );
    assert_eq!(taken(node, "9 memory=500", "memory=500"), 1);
}

#[test]
fn residuals_are_kept_for_requests_that_fill_them() {
    let mix = "3 fraction=0.7; 3 fraction=0.3";
    assert_eq!(taken("A:1000/1000 B:300/1000 C:700/1000", mix, "fraction=0.3"), 1);
    assert_eq!(taken("A:1000/1000 B:300/1000 C:700/1000", mix, "fraction=0.7"), 2);
    // half a GPU fits no residual exactly, so it goes to the one that no request needs whole
    assert_eq!(taken("A:1000/1000 B:600/1000 C:700/1000", mix, "fraction=0.5"), 1);
}

#[test]
fn opening_a_gpu_costs_less_the_more_is_known() {
    let node = "A:1000/1000 B:700/1000 C:1000/1000 D:1000/1000 E:1000/1000";
    let opening = |mix| expected_waste(node, mix).opening;
    close(opening("1 fraction=0.3"), 5.0);
    close(opening("4 fraction=0.3"), 2.5);
    close(opening("400 fraction=0.3"), 5.0 / libm::sqrt(5.0));
    // The residual of 0.2 fits no request. With few seen, it is left rather than a GPU opened.
    let place = |mix| taken("A:1000/1000 B:500/1000", mix, "fraction=0.3");
    assert_eq!(place("3 fraction=0.3; 3 fraction=0.7"), 1);
}

#[test]
fn few_requests_weigh_little_in_residuals() {
    let weight = |mix| expected_waste("A:1000/1000", mix).weights.residuals;
    close(weight("50 fraction=0.3"), 2.5);
    close(weight("450 fraction=0.3"), 4.5);
}

#[test]
fn scarce_cpu_leaves_small_unusable_pieces() {
    let pressure =
        |weight| Pressure { weight, gpus_per_cpu: 1e-4, rest: vec![0.0; HALF_CORES + 1] };
    let (one, two) = (40_000.0, 20_000.0);
    let apart = pressure(2.0);
    assert!(apart.waste(two) + apart.waste(two) < apart.waste(one));
    close(pressure(2.0).waste(0.0), 0.0);
    assert!(pressure(2.0).waste(1e12).is_finite(), "more cores than the table has");
}

/// Of a node of four GPUs in a cluster with this turnover.
fn in_time(mix: &str, turnover: u64) -> ExpectedWaste {
    let (node, classes) = node_fixture::node("A:1000/1000 B:1000/1000 C:1000/1000 D:1000/1000");
    let mut node_shapes = NodeShapes::default();
    node_shapes.count(&node);
    let mix = node_fixture::mix(mix).with_turnover(turnover);
    CompiledMix::of(&mix, &classes, &node_shapes).expected_waste.unwrap()
}

#[test]
fn where_pods_end_free_gpus_are_worth_more_together() {
    let host = |cpu| HostAmount { cpu: MilliCpu::new(cpu), memory: MemMib::new(1_000_000) };
    for (turnover, gpus, cpu, waste) in [
        (0, 4, 32_000, 0.0),
        (1_000_000, 4, 32_000, -4.0),
        (1_000_000, 2, 32_000, -1.0),
        (500_000, 2, 32_000, -0.5),
        (1_000_000, 0, 32_000, 0.0),
        // half of them lack CPU: they are wasted twice, as `J` has it, and only the others are together
        (1_000_000, 4, 16_000, 4.0 - 1.0),
    ] {
        let mut expected_waste = in_time("9 whole cpu=8000", turnover);
        expected_waste.pressure.weight = 0.0;
        close(expected_waste.host(gpus * 1_000_000, host(cpu)), waste);
    }
}

#[test]
fn where_pods_end_cpu_in_pieces_does_not_matter() {
    let weight = |turnover| in_time("9 whole cpu=0; 9 cpu=64000", turnover).pressure.weight;
    close(weight(1_000_000), 0.0);
    close(weight(500_000), weight(0) / 2.0);
    assert!(weight(0) > 0.0, "CPU is short");
}

#[test]
fn pods_without_gpu_leave_unusable_room() {
    let (node, classes) = node_fixture::node("A:1000/1000");
    let expected_waste =
        node_fixture::compiled("1 whole; 1 cpu=4000", &node, &classes).expected_waste.unwrap();
    for (half_cores, rest) in [(0, 0.0), (3, 1500.0), (8, 0.0), (11, 1500.0)] {
        close(expected_waste.pressure.rest[half_cores], rest);
    }
}
