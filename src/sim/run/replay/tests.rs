use super::*;
use crate::run::placed::{end_of, keep_placements};
use crate::trace::churn::{NodeOrder, churn};
use crate::trace::read::{TraceNode, parse_nodes, parse_pods, size_up};
use engine::model::node_state::NodeState;

fn node(name: &str, gpus: u32, model: &str) -> TraceNode {
    TraceNode {
        name: name.to_owned(),
        cpu_milli: 8000,
        memory_mib: 8192,
        gpus,
        model: model.to_owned(),
        more: None,
    }
}

/// A pod as `cpu_milli num_gpu gpu_milli models`.
fn pod(name: usize, text: &str) -> TracePod {
    let parts: Vec<&str> = text.split(' ').collect();
    TracePod {
        name: name.to_string(),
        cpu_milli: parts[0].parse().unwrap(),
        memory_mib: 1024,
        num_gpu: parts[1].parse().unwrap(),
        gpu_milli: parts[2].parse().unwrap(),
        gpu_spec: parts[3..].iter().map(|model| (*model).to_owned()).collect(),
        creation_time: None,
        deletion_time: None,
        more: None,
    }
}

fn run(nodes: &[TraceNode], pods: &[&str], policy: SimPolicy) -> Run {
    let pods = pods.iter().enumerate().map(|(name, text)| pod(name, text)).collect();
    replay(&Workload::as_is(nodes.to_vec(), pods), policy, 1, 0, |_| {}).unwrap()
}

#[test]
fn every_policy_places_exactly_the_pods_that_fit() {
    let nodes = [node("b", 2, "T4"), node("a", 1, "G2")];
    let early = ["9000 0 0", "1000 1 600 T4", "1000 1 600 T4", "1000 1 1000 G2", "4000 0 0"];
    let late = ["1000 1 500", "1000 2 1000", "1000 1 10 P100", "1000 1 400", "1000 1 400"];
    let pods: Vec<&str> = early.iter().chain(&late).copied().collect();
    for policy in SimPolicy::ALL {
        let run = run(&nodes, &pods, policy);
        assert_eq!((run.arrivals, run.lost, run.lost_before_90), (10, 4, 1), "{}", policy.name);
        assert_eq!((run.curve.at_100(), run.curve.last()), (Some(73.33), 100.0), "{}", policy.name);
    }
}

#[test]
fn the_state_is_sampled_as_the_load_grows_and_at_the_end() {
    let run = run(&[node("a", 2, "T4")], &["1000 1 500", "1000 1 1000", "0 0 0"], SimPolicy::FGD);
    let loads: Vec<u64> = run.samples.iter().map(|sample| sample.load_percent).collect();
    assert_eq!(loads, [0, 25, 75]);
    assert_eq!(run.fragmentation_at_100(), None);
    assert_eq!((run.curve.last(), run.end.load_percent), (75.0, 75));
    // One GPU is half full, one full. The pod of half a GPU can use the free half; the other two of
    // the three typical pods cannot.
    assert_eq!(run.end.efficiency, Share::from_millionths(750_000));
    assert_eq!(run.end.fragmentation, Share::from_millionths(666_666));
}

#[test]
fn the_first_of_two_equal_nodes_is_selected() {
    let nodes = [node("z", 1, "T4"), node("a", 1, "G2")];
    for (second, lost) in [("1000 1 1000 G2", 0), ("1000 1 1000 T4", 1)] {
        for policy in [SimPolicy::BESTFIT, SimPolicy::BINPACK] {
            let run = run(&nodes, &["1000 1 1000", second], policy);
            assert_eq!(run.lost, lost, "{} {second}", policy.name);
        }
    }
}

#[test]
fn an_empty_trace_can_be_replayed() {
    for policy in SimPolicy::ALL {
        let empty = run(&[], &[], policy);
        assert_eq!((empty.arrivals, empty.curve.at_100(), empty.samples.len()), (0, None, 1));
        let nowhere = run(&[node("a", 0, "")], &["1000 1 1000", "1000 0 0"], policy);
        assert_eq!((nowhere.arrivals, nowhere.lost, nowhere.curve.last()), (2, 1, 0.0));
    }
}

#[test]
fn a_node_with_too_many_gpus_is_rejected() {
    let workload = Workload::as_is(vec![node("a", 257, "T4")], Vec::new());
    let refused = replay(&workload, SimPolicy::FGD, 1, 0, |_| {}).unwrap_err();
    assert!(refused.to_string().contains("`257` devices"), "{refused}");
}

/// A replay with times on these nodes. A pod is `at stays cpu_milli num_gpu gpu_milli models`; all
/// is measured.
fn timed(nodes: &[TraceNode], pods: &[&str], overflow: Overflow) -> (TimedRun, Vec<NodeState>) {
    timed_with(nodes, pods, overflow, None)
}

/// The same with standing holds.
fn timed_with(
    nodes: &[TraceNode],
    pods: &[&str],
    overflow: Overflow,
    standing_after: Option<u64>,
) -> (TimedRun, Vec<NodeState>) {
    let times = |text: &str| {
        let mut parts = text.splitn(3, ' ');
        let mut time = || parts.next().unwrap().parse::<u64>().unwrap();
        (time(), time(), parts.next().unwrap().to_owned())
    };
    let rows: Vec<(u64, u64, String)> = pods.iter().map(|text| times(text)).collect();
    let arrival = |(pod, (at, stays, _)): (usize, &(u64, u64, String))| PodArrival {
        pod,
        at: *at,
        stays: Some(*stays),
    };
    let schedule = Schedule {
        arrivals: rows.iter().enumerate().map(arrival).collect(),
        window: 0..100,
        unit: TimeUnit::Second,
    };
    let pods: Vec<TracePod> =
        rows.iter().enumerate().map(|(name, (.., text))| pod(name, text)).collect();
    let cluster = SimCluster::new(nodes, &pods, SimPolicy::FGD, 1, 0).unwrap();
    let account = Account::new(schedule.window.clone());
    let mut replay = Replay::new(cluster, &pods, &schedule, overflow, account);
    replay.standing_after = standing_after;
    replay.play(|_| {});
    replay.cluster.ledger().audit().unwrap();
    let node_state = replay.cluster.ledger().nodes();
    let nodes = nodes.to_vec();
    let workload = TimedWorkload { nodes, pods: pods.clone(), schedule: schedule.clone() };
    let rules = ReplayRules { overflow, most_moves: 0, standing_after };
    let run = replay_timed(&workload, SimPolicy::FGD, 1, rules, |_| {});
    (run.unwrap(), node_state)
}

/// One GPU, three pods that need all of it at 0, 10 and 20, each for 40.
const RUSH: [&str; 3] = ["0 40 0 1 1000", "10 40 0 1 1000", "20 40 0 1 1000"];

#[test]
fn a_pod_that_fits_nowhere_is_lost_or_queued() {
    let nodes = [node("a", 1, "T4")];
    let (lost, node_state) = timed(&nodes, &RUSH, Overflow::Lost);
    assert_eq!((lost.all.arrivals, lost.all.blocked, lost.all.blocked_milli), (3, 2, 2000));
    let all = &lost.all;
    assert_eq!((all.demand_milli_ticks, all.blocked_milli_ticks), (120_000, 80_000));
    assert_eq!(all.blocked_time().millionths(), 666_666);
    assert_eq!((lost.all.allocation.millionths(), lost.all.waiting), (400_000, Share::ZERO));
    assert_eq!((lost.all.waits.max, lost.all.still_waiting), (0, 0));
    assert!(node_state[0].reservations().is_empty(), "the ended pod has left the ledger");

    // The second runs from 40 to 80, the third from 80 on.
    let (queued, node_state) = timed(&nodes, &RUSH, Overflow::Queued);
    assert_eq!((queued.all.arrivals, queued.all.blocked), (3, 2));
    assert_eq!(queued.all.allocation, Share::WHOLE);
    // The second waits from 10 to 40, the third from 20 to 80.
    assert_eq!(queued.all.waiting.millionths(), 900_000);
    let waits = queued.all.waits;
    assert_eq!((waits.p50, waits.p90, waits.p99, waits.max), (30, 60, 60, 60));
    assert_eq!(node_state[0].reservations().len(), 1);
    assert_eq!(queued.by_class[2], (PodClass::Whole, queued.all.clone()));
}

#[test]
fn the_oldest_fitting_pod_is_first_and_larger_ones_do_not_block_it() {
    let nodes = [node("a", 2, "T4")];
    // At 50 half a GPU is free: too little for the pod of two, enough for the youngest.
    let pods = ["0 50 0 1 500", "0 90 0 1 1000", "0 90 0 1 500", "5 9 0 2 1000", "6 9 0 1 400"];
    let (run, _) = timed(&nodes, &pods, Overflow::Queued);
    let of = |class: PodClass| &run.by_class.iter().find(|(known, _)| *known == class).unwrap().1;
    assert_eq!(of(PodClass::Fraction).waits.max, 44);
    assert_eq!(of(PodClass::Several).waits.max, 85);
    assert_eq!(run.all.still_waiting, 0);
    // Of two equal pods the older is taken; the younger waits to the end.
    let pods = ["0 90 0 2 1000", "5 90 0 1 1000", "6 90 0 2 1000", "7 90 0 1 1000"];
    let (run, node_state) = timed(&nodes, &pods, Overflow::Queued);
    assert_eq!((run.all.still_waiting, run.all.waits.max), (1, 94));
    assert_eq!(node_state[0].reservations().len(), 2);
}

#[test]
fn room_is_kept_for_the_first_that_has_waited_long_enough() {
    let nodes = [node("a", 2, "T4")];
    // Small pods take each half that becomes free, until room is kept for the pod of two GPUs.
    let pods: Vec<String> = (0..12).map(|at| format!("{} 20 0 1 1000", 5 * at)).collect();
    let mut pods: Vec<&str> = pods.iter().map(String::as_str).collect();
    pods.push("61 20 0 2 1000");
    pods.sort_by_key(|text| text.split(' ').next().unwrap().parse::<u64>().unwrap());
    let early = "3 20 0 2 1000";
    pods.insert(1, early);
    let several = |standing_after| {
        let (run, _) = timed_with(&nodes, &pods, Overflow::Queued, standing_after);
        let several = run.by_class.into_iter().find(|(class, _)| *class == PodClass::Several);
        let figures = several.unwrap().1;
        (figures.waits.p50, figures.waits.max, figures.still_waiting)
    };
    let (never, soon) = (several(None), several(Some(10)));
    assert_eq!((never.2, soon.2), (2, 1), "of two, still waiting at the end: {never:?}, {soon:?}");
}

/// The same file through the reader, so that it may have optional columns.
fn read(nodes: &str, pods: &str) -> (Vec<TraceNode>, Vec<TracePod>) {
    let nodes = parse_nodes("n.csv", nodes.as_bytes()).unwrap();
    let mut pods = parse_pods("p.csv", pods.as_bytes()).unwrap();
    size_up(&nodes, &mut pods);
    (nodes, pods)
}

#[test]
fn waiting_pods_get_room_by_priority_and_then_by_age() {
    let (nodes, pods) = read(
        "sn,cpu_milli,memory_mib,gpu,model\na,8000,8192,1,T4\n",
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,priority\n\
         first,1,1,1,1000,\nlow,1,1,1,1000,-1\nold,1,1,1,1000,0\nyoung,1,1,1,1000,0\n\
         high,1,1,1,1000,100\n",
    );
    let arrival = |pod| PodArrival { pod, at: u64::try_from(pod).unwrap(), stays: Some(10) };
    let schedule =
        Schedule { arrivals: (0..5).map(arrival).collect(), window: 0..60, unit: TimeUnit::Second };
    let cluster = SimCluster::new(&nodes, &pods, SimPolicy::BESTFIT, 1, 0).unwrap();
    let mut replay = Replay::new(cluster, &pods, &schedule, Overflow::Queued, Order::default());
    replay.play(|_| {});
    assert_eq!(replay.watcher.0, ["first", "high", "old", "young", "low"]);
}

/// The names of the pods in the order in which they were placed.
#[derive(Default)]
struct Order(Vec<String>);

impl Watcher for Order {
    fn arrive(&mut self, _new: NewPod<'_>, _cluster: &SimCluster) {}

    fn start(&mut self, pod: &TracePod, _since: u64, _seat: Seat) {
        self.0.push(pod.name.clone());
    }
}

#[test]
fn memory_instances_and_slots_are_placed_and_counted_by_what_they_take() {
    let (nodes, pods) = read(
        "sn,cpu_milli,memory_mib,gpu,model,gpu_memory_mib,mig,slots\n\
         a,8000,8192,1,T4,10000,,\n\
         b,8000,8192,1,L4,20000,,4\n\
         c,8000,8192,1,NVIDIA A100,40379,3g.20gb:19968 1g.5gb:4864,\n",
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_memory_mib,mig_profile,gpu_slots\n\
         memory,1,1,1,,9000,,\n\
         large,1,1,1,,11000,,\n\
         slot,1,1,1,,,,1\n\
         none,1,1,1,,,,1\n\
         part,1,1,1,,,3g.20gb,\n\
         small,1,1,1,,,1g.5gb,\n\
         again,1,1,1,,,1g.5gb,\n",
    );
    let binpack = SimPolicy::BINPACK;
    let end = end_of(&nodes, &pods, binpack, 1).unwrap();
    let place = |pod: &TracePod| {
        let placed = pod.placed()?;
        let (at, demand) = placed.devices[0];
        Some(format!("{} {at} {}", placed.node, demand.share.millionths()))
    };
    let placed: Vec<_> = end.pods.iter().map(|pod| place(pod).unwrap_or_default()).collect();
    // 11,000 MiB of 20,000 are three slots of 5,000.
    let expected =
        ["a 0 900000", "b 0 750000", "b 0 250000", "", "c 0.0 1000000", "c 0.1 1000000", ""];
    assert_eq!(placed, expected);
    let free: Vec<_> =
        end.free.iter().map(|room| (room.free.memory.mib(), room.free.share)).collect();
    let share = Share::from_millionths;
    let expected = [(1000, share(100_000)), (0, share(0)), (0, share(0)), (0, share(0))];
    assert_eq!(free, expected);
    let run = replay(&Workload::as_is(nodes, pods), binpack, 1, 0, |_| {}).unwrap();
    assert_eq!((run.arrivals, run.lost, run.curve.last()), (7, 2, 97.5), "3.9 of 4 devices");
}

#[test]
fn a_pod_that_stays_where_it_is_must_have_its_device_there() {
    let node = "sn,cpu_milli,memory_mib,gpu,model,mig\na,1,1,2,T4,1g.5gb:100|\n";
    let fault = |place: &str| {
        let pod = format!(
            "name,cpu_milli,memory_mib,num_gpu,gpu_milli,node,devices\n\
             w,1,1,1,5,,\np,1,1,1,500,{place}\n"
        );
        let (nodes, mut pods) = read(node, &pod);
        keep_placements(&nodes, &mut pods).map(|()| pods[0].name.clone())
    };
    assert_eq!(fault("a,0.0:100:1000"), Ok("p".to_owned()), "it comes first");
    assert_eq!(fault("a,1:100:1"), Ok("p".to_owned()));
    let told = |place: &str| fault(place).unwrap_err().to_string();
    assert_eq!(told("b,0:1:1"), "pod `p`, column `node`: the node file has no node `b`");
    for device in ["0", "0.1", "1.0", "2"] {
        let expected = format!("pod `p`, column `devices`: node `a` has no device `{device}`");
        assert_eq!(told(&format!("a,{device}:1:1")), expected);
    }
}

#[test]
fn an_ending_pod_frees_room_for_one_that_arrives_at_that_time() {
    let pods = ["0 40 8000 1 1000", "40 9 8000 1 1000", "49 9 8000 0 0", "58 1 8000 0 0"];
    let (run, node_state) = timed(&[node("a", 1, "T4")], &pods, Overflow::Lost);
    assert_eq!(run.all.blocked, 0);
    assert_eq!(run.by_class[0].1.arrivals, 2);
    assert!(node_state[0].reservations().is_empty());
    assert_eq!(node_state[0].host_free(), node_state[0].host_capacity());
}

#[test]
fn the_cluster_is_sampled_evenly_and_only_within_the_window() {
    let schedule = Schedule {
        arrivals: vec![
            PodArrival { pod: 0, at: 0, stays: Some(600) },
            PodArrival { pod: 0, at: 0, stays: Some(600) },
            PodArrival { pod: 0, at: 500, stays: None },
        ],
        window: 400..800,
        unit: TimeUnit::Second,
    };
    let nodes = vec![node("a", 2, "T4")];
    let workload = TimedWorkload { nodes, pods: vec![pod(0, "0 1 1000")], schedule };
    let rules = ReplayRules { overflow: Overflow::Lost, most_moves: 0, standing_after: None };
    let run = replay_timed(&workload, SimPolicy::BESTFIT, 1, rules, |_| {}).unwrap();
    assert_eq!((run.all.arrivals, run.all.blocked), (1, 1));
    assert_eq!(run.all.allocation.millionths(), 500_000, "both GPUs from 400 to 600");
    let at: Vec<u64> = run.moments.iter().map(|moment| moment.at).collect();
    assert_eq!((at.len(), at[1], at[80], run.first_measured), (81, 10, 800, 40));
    let allocation = run.moments.iter().map(|moment| moment.allocation.millionths());
    assert_eq!(allocation.filter(|share| *share == 1_000_000).count(), 60);
    assert_eq!(run.stranded.cumulative(), [(0, 2)]);
}

#[test]
fn every_waiting_pod_fits_nowhere() {
    let nodes: Vec<TraceNode> = ["a", "b", "c", "d"]
        .map(|name| node(name, 4, if name < "c" { "T4" } else { "G2" }))
        .to_vec();
    let kinds =
        ["500 1 300", "900 1 700 T4", "2000 1 1000", "100 2 1000 G2", "800 4 1000", "3000 0 0"];
    let pods: Vec<TracePod> =
        kinds.iter().enumerate().map(|(name, text)| pod(name, text)).collect();
    let workload = churn(nodes, pods, 1.5, NodeOrder::AsIs, 5).unwrap();
    let mut waited = 0;
    for length in (10..workload.schedule.arrivals.len()).step_by(7) {
        let mut schedule = workload.schedule.clone();
        schedule.arrivals.truncate(length);
        schedule.window = 0..schedule.arrivals[length - 1].at + 1;
        let (nodes, pods) = (&workload.nodes, &workload.pods);
        let cluster = SimCluster::new(nodes, pods, SimPolicy::BESTFIT, 1, 0).unwrap();
        let account = Account::new(schedule.window.clone());
        let mut replay = Replay::new(cluster, pods, &schedule, Overflow::Queued, account);
        replay.play(|_| {});
        let waiting: Vec<usize> = replay.queue.all().collect();
        for index in &waiting {
            let pod = &pods[schedule.arrivals[*index].pod];
            assert_eq!(replay.cluster.place(*index, pod), None, "{pod:?} after {length}");
        }
        replay.cluster.ledger().audit().unwrap();
        waited += waiting.len();
    }
    assert!(waited > 50, "{waited} pods waited: too few for a result");
}

#[test]
fn moves_free_room_for_a_pod_that_fits_nowhere() {
    // No single move empties a GPU here. Below, with 0.4 on each of the two, one does.
    let nodes = [node("a", 1, "T4"), node("b", 1, "T4")];
    let texts = ["1000 1 400 T4", "4000 1 700", "1000 1 300", "1000 1 1000"];
    let pods: Vec<TracePod> = texts.iter().enumerate().map(|(at, text)| pod(at, text)).collect();
    let workload = Workload::as_is(nodes.to_vec(), pods);
    let lost = |most_moves| {
        let run = replay(&workload, SimPolicy::SPREAD, 1, most_moves, |_| {});
        let run = run.unwrap();
        (run.lost, run.moves)
    };
    assert_eq!(lost(0), (1, 0));
    assert_eq!(lost(1), (1, 0), "0.3 has nowhere to go");
    let texts = ["1000 1 400", "4000 1 400", "1000 1 1000"];
    let pods: Vec<TracePod> = texts.iter().enumerate().map(|(at, text)| pod(at, text)).collect();
    let workload = Workload::as_is(nodes.to_vec(), pods);
    let spread = SimPolicy::SPREAD;
    let run = replay(&workload, spread, 1, 1, |_| {}).unwrap();
    assert_eq!((run.lost, run.moves, run.curve.last()), (0, 1, 90.0));
}
