use super::*;
use crate::bursts::columns::bursts_of;
use engine::hardware::pool::Borrow;
use sim::run::timeline::{Pace, timeline};
use sim::trace::churn::NodeOrder;
use sim::trace::read::{parse_nodes, parse_pods};
use wire::units::Share;

fn rule(borrow: Borrow) -> PoolRule {
    PoolRule { borrow, ..PoolRule::default() }
}

const MEMORY: Borrow = Borrow::Memory { most: Share::WHOLE };

fn named(figures: &BurstFigures) -> BTreeMap<&'static str, f64> {
    figures.named().into_iter().collect()
}

#[test]
fn who_lends_memory_refuses_fewer_bursts_and_no_pod_waits_longer() {
    let world = BurstWorld::drawn(42, 0.63, 1, 2);
    let none = play(&world, 42, rule(Borrow::None)).unwrap();
    let memory = play(&world, 42, rule(MEMORY)).unwrap();
    let (none, memory) = (named(&none), named(&memory));
    assert!((17.0..23.0).contains(&none["refused_percent"]), "one of five wants more: {none:?}");
    assert_eq!((none["recalls"], none["give_backs"], none["lost"]), (0.0, 0.0, 0.0));
    assert!(memory["refused_percent"] < none["refused_percent"] - 2.0, "{memory:?}");
    assert!(memory["served_percent"] > none["served_percent"], "{none:?} {memory:?}");
    assert!(memory["recalls"] > 0.0 && memory["give_backs"] > 0.0, "{memory:?}");
    let waiting = memory["whole_waiting_percent"] - none["whole_waiting_percent"];
    assert!(waiting < 3.0, "{none:?} {memory:?}");
}

#[test]
fn a_seed_gives_the_same_figures() {
    let world = BurstWorld::drawn(7, 0.7, 0, 1);
    let [one, two] = [(); 2].map(|()| play(&world, 7, rule(MEMORY)).unwrap().named());
    assert_eq!(one, two);
}

/// The figures of a trace: a node with two GPUs of 10,000 MiB, and these pods.
fn traced(nodes: &str, pods: &str, borrow: Borrow) -> BTreeMap<&'static str, f64> {
    traced_with("", nodes, pods, borrow)
}

/// The same, with more columns of nodes.
fn traced_with(
    columns: &str,
    nodes: &str,
    pods: &str,
    borrow: Borrow,
) -> BTreeMap<&'static str, f64> {
    let head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_memory_mib,limit_milli,\
        creation_time,deletion_time,burst_gap_seconds,burst_seconds,burst_memory_milli\n";
    let nodes = format!(
        "name,cpu_milli,memory_mib,gpu,model,gpu_memory_mib,other_use_mib,mig{columns}\n{nodes}"
    );
    let nodes = parse_nodes("n", nodes.as_bytes()).unwrap();
    let text = format!("{head}{pods}");
    let pods = parse_pods("p", text.as_bytes()).unwrap();
    let bursts = bursts_of(text.as_bytes(), &pods).unwrap();
    let workload = timeline(nodes, pods, Pace::Compress(1.0), NodeOrder::AsIs, 0).unwrap();
    let world = BurstWorld::traced(&workload, &bursts);
    named(&play(&world, 1, rule(borrow)).unwrap())
}

#[test]
fn a_notebook_of_a_trace_gets_its_bursts_only_where_memory_is_lent() {
    let node = "n,1000,1000,1,H100,10000,,\n";
    let pods = "nb,1,1,1,250,,1000,0,100000,100,50,800\nlast,1,1,0,0,,,99999,100000,,,\n";
    let none = traced(node, pods, Borrow::None);
    assert_eq!((none["refused_percent"], none["served_percent"]), (100.0, 0.0), "{none:?}");
    assert!((none["allocated_percent"] - 25.0).abs() < 0.1, "{none:?}");
    let memory = traced(node, pods, MEMORY);
    assert_eq!(memory["refused_percent"], 0.0, "{memory:?}");
    assert!(memory["served_percent"] > 99.0, "{memory:?}");
    assert!((memory["mean_slowdown"] - 1.0).abs() < 0.01, "{memory:?}");
    let used = traced(&node.replace("10000,,", "10000,0:3000,"), pods, MEMORY);
    assert_eq!(used["refused_percent"], 100.0, "3,000 MiB are used by others: {used:?}");
    for (limit, refused) in [(1000, 100.0), (900, 0.0)] {
        let pods = pods.replace(",,1000,0,", &format!(",,{limit},0,"));
        let slots = traced_with(",slots", "n,1000,1000,1,H100,10000,0:3000,,2\n", &pods, MEMORY);
        assert_eq!(slots["refused_percent"], refused, "{limit} is whole slots: {slots:?}");
    }
}

#[test]
fn a_guest_of_a_trace_goes_home_when_its_gpu_is_needed() {
    let pods = "one,1,1,1,500,,1000,0,100000,100,50,\ntwo,1,1,1,500,,1000,0,100000,100,50,\n\
        train,1,1,1,1000,,,50000,100000,,,\nlast,1,1,0,0,,,99999,100000,,,\n";
    let memory = traced("n,1000,1000,2,H100,10000,,\n", pods, MEMORY);
    assert!(memory["recalls"] > 0.0 && memory["refused_percent"] > 10.0, "{memory:?}");
    assert_eq!(memory["whole_waiting_percent"], 0.0, "{memory:?}");
    let none = traced("n,1000,1000,2,H100,10000,,\n", pods, Borrow::None);
    assert_eq!((none["recalls"], none["refused_percent"]), (0.0, 100.0), "{none:?}");
}

#[test]
fn pods_of_a_trace_may_have_several_gpus_instances_or_none() {
    let nodes = "a,9000,9000,2,H100,10000,,\nb,9000,9000,1,A100-SXM4-40GB,40000,,3g.20gb:19968\n";
    let pods = "pair,1,1,2,500,,,0,1000,,,\nhost,1,1,0,0,,,0,1000,,,\nmib,1,1,1,,4000,,0,1000,,,\n\
        large,1,1,1,1000,,,0,1000,,,\nlast,1,1,0,0,,,999,1000,,,\n";
    let figures = traced(nodes, pods, MEMORY);
    let allocated = figures["allocated_percent"];
    assert!((allocated - 140.0 / 3.0).abs() < 0.1, "1.4 of two GPUs and an instance: {figures:?}");
    assert_eq!(figures["whole_waiting_percent"], 100.0, "no whole GPU is left: {figures:?}");
    assert_eq!((figures["recalls"], figures["give_backs"]), (0.0, 0.0), "{figures:?}");
}
