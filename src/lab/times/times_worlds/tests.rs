use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::bursts::world::DAY;
use sim::trace::read::{parse_nodes, parse_pods};
use sim::trace::schedule::PodArrival;

const LOAD: f64 = 0.9;

fn trace() -> (Vec<TraceNode>, Vec<TracePod>) {
    let nodes = "sn,cpu_milli,memory_mib,gpu,model\na,64000,9000,8,V100\nb,32000,9000,4,P100\n";
    let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\ns,1000,1,1,200,\n\
                l,1000,1,1,600,A10\nw,1000,1,1,1000,\nm,30000,1,4,1000,\nn,1000,1,0,0,\n";
    let nodes = parse_nodes("nodes", nodes.as_bytes()).unwrap();
    (nodes, parse_pods("pods", pods.as_bytes()).unwrap())
}

fn kind(name: &str) -> TimesKind {
    KINDS.into_iter().find(|kind| kind.name == name).unwrap()
}

fn made(name: &str, seed: i64) -> TimedWorkload {
    let (nodes, pods) = trace();
    kind(name).workload(&nodes, &pods, TimesScale { nodes: 40, load: LOAD }, seed).unwrap()
}

/// What comes in the measured round, with the pods.
fn comers(world: &TimedWorkload) -> impl Iterator<Item = (&TracePod, PodArrival)> {
    let all = world.schedule.arrivals.iter().filter(|arrival| arrival.at > 0);
    all.map(|arrival| (&world.pods[arrival.pod], *arrival))
}

/// Mean hours by the first letter of the pod's name.
fn mean_hours(world: &TimedWorkload) -> BTreeMap<char, f64> {
    let mut stays: BTreeMap<char, Vec<f64>> = BTreeMap::new();
    for (pod, arrival) in comers(world) {
        let hours = arrival.stays.unwrap() as f64 / HOUR as f64;
        stays.entry(pod.name.chars().next().unwrap()).or_default().push(hours);
    }
    stays
        .into_iter()
        .map(|(name, all)| (name, all.iter().sum::<f64>() / all.len() as f64))
        .collect()
}

#[test]
fn a_kind_and_a_seed_decide_a_world() {
    let mut names = BTreeSet::new();
    for kind in KINDS {
        assert!(names.insert(kind.name));
        assert_eq!(made(kind.name, 3), made(kind.name, 3), "{}", kind.name);
        assert_ne!(made(kind.name, 3).schedule, made(kind.name, 4).schedule, "{}", kind.name);
    }
    assert_ne!(made("lifesize", 3).schedule, made("cpu-short", 3).schedule);
}

#[test]
fn pods_request_the_load_and_run_from_the_start() {
    for kind in KINDS {
        let world = made(kind.name, 5);
        let whole = capacity_milli(&world.nodes) as f64;
        let time = |pod: &TracePod, arrival: PodArrival| {
            pod.demand_milli() as f64 * arrival.stays.unwrap() as f64
        };
        let work: f64 = comers(&world).map(|(pod, arrival)| time(pod, arrival)).sum();
        let load = work / whole / ROUND as f64;
        assert!((LOAD..LOAD + 0.03).contains(&load), "{}: {load}", kind.name);
        let standing = world.schedule.arrivals.iter().filter(|arrival| arrival.at == 0);
        let running: u64 = standing.map(|a| world.pods[a.pod].demand_milli()).sum();
        let share = running as f64 / whole;
        assert!((0.4..1.4).contains(&share), "{}: {share} at the start", kind.name);
        assert_eq!(world.schedule.window, 1..1 + ROUND);
        let is_pools = kind.name == "pools";
        assert!(is_pools || world.pods.iter().all(|pod| pod.gpu_spec.is_empty()));
    }
}

#[test]
fn lifetimes_depend_on_what_a_pod_is() {
    let check = |name, expected: [f64; 4]| {
        let found = mean_hours(&made(name, 1));
        for (letter, hours) in "slwm".chars().zip(expected) {
            let ratio = found[&letter] / hours;
            assert!((0.8..1.25).contains(&ratio), "{name}, {letter}: {found:?}");
        }
    };
    check("lifesize", [1.0, 4.0, 8.0, 20.0]);
    check("antisize", [48.0, 48.0, 6.0, 2.0]);
    check("weekly", [3.0, 6.0, 8.0, 16.0]);
    check("services", [0.7 * 2.0 + 0.3 * 192.0, 0.7 * 4.0 + 0.3 * 192.0, 8.0, 12.0]);
}

#[test]
fn heavy_tails_have_the_same_means_and_a_few_long_lives() {
    let mut chance = chance_of("life", 1);
    let mean = 8 * HOUR;
    let mut longest = |lifetimes: Lifetimes| {
        let drawn: Vec<u64> = (0..200_000).map(|_| lifetimes.draw(mean, &mut chance)).collect();
        let found = drawn.iter().sum::<u64>() as f64 / drawn.len() as f64 / mean as f64;
        assert!((found - 1.0).abs() < 0.05, "{lifetimes:?}: {found}");
        drawn.iter().filter(|ticks| **ticks > 10 * mean).count()
    };
    assert!(longest(Lifetimes::Exponential) < 50);
    assert!(longest(Lifetimes::LogNormal) > 1000);
}

#[test]
fn fractions_come_by_day_and_fewer_pods_at_the_weekend() {
    let world = made("diurnal", 2);
    let (mut day, mut night) = ([0, 0], [0, 0]);
    for (pod, arrival) in comers(&world) {
        let is_fraction = usize::from(pod.num_gpu == 1 && pod.gpu_milli < 1000);
        let is_day = (arrival.at - 1) % DAY < DAY / 2;
        let counts = if is_day { &mut day } else { &mut night };
        counts[is_fraction] += 1;
    }
    // Over half a sine wave the mean is 2 / pi: 82 % of the one and 18 % of the other.
    assert!(day[1] > 3 * night[1] && night[0] > 3 * day[0], "{day:?}, {night:?}");
    let world = made("weekly", 2);
    let (mut week, mut weekend) = (0, 0);
    for (_, arrival) in comers(&world) {
        match (arrival.at - 1) / DAY {
            5 | 6 => weekend += 1,
            _ => week += 1,
        }
    }
    let ratio = f64::from(weekend) / 2.0 / (f64::from(week) / 6.0);
    assert!((ratio - 0.3).abs() < 0.05, "{ratio}");
}

#[test]
fn replicas_end_when_their_successors_come() {
    let world = made("releases", 1);
    let mut starts: BTreeMap<u64, usize> = BTreeMap::new();
    comers(&world).for_each(|(_, arrival)| *starts.entry(arrival.at).or_default() += 1);
    let mut replaced = 0_u64;
    for (pod, arrival) in comers(&world).filter(|(_, arrival)| starts[&arrival.at] >= 4) {
        let end = arrival.at + arrival.stays.unwrap();
        let next = if end > ROUND { end - ROUND } else { end };
        assert!(starts.get(&next).is_some_and(|replicas| *replicas >= 4), "{pod:?}");
        let hours = arrival.stays.unwrap() / HOUR;
        assert!((11..=36).contains(&hours), "{hours}");
        replaced += pod.demand_milli() * arrival.stays.unwrap();
    }
    let share = replaced as f64 / (capacity_milli(&world.nodes) as f64 * ROUND as f64);
    assert!((0.44..0.50).contains(&share), "half of the load: {share}");
}

#[test]
fn nodes_have_the_cpu_and_models_of_their_kind() {
    let cpu = |name| made(name, 1).nodes.iter().map(|node| node.cpu_milli).collect::<BTreeSet<_>>();
    assert_eq!(cpu("lifesize"), [32_000, 64_000].into());
    assert_eq!(cpu("cpu-short"), [19_200, 38_400].into());
    assert_eq!(cpu("cpu-plentiful"), [64_000, 128_000].into());
    let pools = made("pools", 1);
    let of = |model: &str| pools.nodes.iter().filter(|node| node.model == model).count();
    assert_eq!((of("T4"), of("G2")), (20, 20));
    assert!(pools.nodes.iter().all(|node| node.gpus == 8));
    let accepting = |spec: &[&str]| {
        let found = comers(&pools).filter(|(pod, _)| pod.gpu_spec == spec).count();
        found as f64 / comers(&pools).count() as f64
    };
    for (spec, expected) in [(&["T4"][..], 0.2), (&["G2"], 0.2), (&["T4", "G2"], 0.2), (&[], 0.4)] {
        let share = accepting(spec);
        assert!((share - expected).abs() < 0.05, "{spec:?}: {share}");
    }
}

#[test]
fn a_trace_without_such_pods_has_no_such_world() {
    let (nodes, pods) = trace();
    let scale = TimesScale { nodes: 4, load: LOAD };
    let several = &pods[3..];
    let refused = kind("releases").workload(&nodes, several, scale, 1).unwrap_err();
    assert!(matches!(refused, WorkloadError::NoDemand { .. }), "{refused}");
    assert!(kind("lifesize").workload(&nodes, several, scale, 1).is_ok());
    let scale = TimesScale { nodes: 4, load: 0.0 };
    let refused = kind("lifesize").workload(&nodes, &pods, scale, 1).unwrap_err();
    assert_eq!(refused, WorkloadError::MeanLoad { load: 0.0 });
}
