//! Worlds in which pods come and end, with lifetimes that depend on what they are.
//!
//! Each world is made from any trace, and decided by its kind and a seed: nodes and pods are drawn from
//! the trace until pods request as much GPU time as the load says. The time is a circle, as for
//! [`sim::run::timeline`]: at the start the pods run that the round before has left. No time is stretched,
//! so that a day is a day at every load, and replaced replicas end when their successors come.

use rand_chacha::ChaCha8Rng;

use crate::bursts::world::HOUR;
use crate::stress::draw::{chance_of, fleet, possible};
use crate::times::life::{Lifetimes, MeanHours, ROUND, Rhythm, below, mean_of};
use sim::run::service::PodClass;
use sim::run::timeline::{Stay, in_rounds};
use sim::trace::read::{TraceNode, TracePod};
use sim::trace::schedule::{TimedWorkload, load_micro};
use sim::trace::workload::{ARRIVALS_MAX, WorkloadError, capacity_milli};

/// Of the pods below one GPU in the kind `services`, those that stay, in percent.
const STAYING: u64 = 30;

/// GPU time of replicated services in the kind `releases`, in percent of all.
const REPLICATED: u128 = 50;

/// The models of the nodes of `pools`.
const MODELS: [&str; 2] = ["T4", "G2"];

/// A kind of world.
#[derive(Debug, Clone, Copy)]
pub struct TimesKind {
    /// The name that users type.
    pub name: &'static str,
    /// Whether policies may be tuned on it. Runs of the others show what tuning is worth elsewhere.
    pub is_seen: bool,
    mean_hours: MeanHours,
    lifetimes: Lifetimes,
    rhythm: Rhythm,
    nodes: NodesOf,
    services: Services,
}

/// What is played: how large a cluster, and how much of it pods request.
#[derive(Debug, Clone, Copy)]
pub struct TimesScale {
    /// Number of nodes.
    pub nodes: usize,
    /// GPU time that pods request, of that of the cluster.
    pub load: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NodesOf {
    /// Those of the trace, with this many hundredths of their CPU.
    Trace(u64),
    /// Those with the most GPUs, half of each of two models; pods accept one, both or any.
    Pools,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Services {
    /// There are none.
    None,
    /// A part of the pods below one GPU stays, until its copy of the next round comes.
    Staying,
    /// A part of the GPU time is that of equal replicas, which are all replaced at once, again and again.
    Replicated,
}

const LIFESIZE: TimesKind = TimesKind {
    name: "lifesize",
    is_seen: true,
    mean_hours: [1, 4, 8, 20],
    lifetimes: Lifetimes::Exponential,
    rhythm: Rhythm::Even,
    nodes: NodesOf::Trace(100),
    services: Services::None,
};

/// All kinds, in the order of the documentation.
pub const KINDS: [TimesKind; 10] = [
    LIFESIZE,
    TimesKind { name: "antisize", mean_hours: [48, 48, 6, 2], ..LIFESIZE },
    TimesKind {
        name: "diurnal",
        mean_hours: [3, 3, 8, 8],
        rhythm: Rhythm::DayAndNight,
        ..LIFESIZE
    },
    TimesKind { name: "pools", nodes: NodesOf::Pools, ..LIFESIZE },
    TimesKind { name: "heavy-tails", lifetimes: Lifetimes::LogNormal, ..LIFESIZE },
    TimesKind {
        name: "weekly",
        is_seen: false,
        mean_hours: [3, 6, 8, 16],
        rhythm: Rhythm::Weekly,
        ..LIFESIZE
    },
    TimesKind {
        name: "releases",
        mean_hours: [24, 24, 24, 24],
        services: Services::Replicated,
        ..LIFESIZE
    },
    TimesKind {
        name: "services",
        is_seen: false,
        mean_hours: [2, 4, 8, 12],
        services: Services::Staying,
        ..LIFESIZE
    },
    TimesKind { name: "cpu-short", nodes: NodesOf::Trace(60), ..LIFESIZE },
    TimesKind { name: "cpu-plentiful", is_seen: false, nodes: NodesOf::Trace(200), ..LIFESIZE },
];

impl TimesKind {
    /// The world of this kind, made from a trace.
    ///
    /// # Errors
    /// [`WorkloadError::NoDemand`] if the trace has no pods that the kind needs, or another one about
    /// nodes or load.
    pub fn workload(
        &self,
        nodes: &[TraceNode],
        pods: &[TracePod],
        scale: TimesScale,
        seed: i64,
    ) -> Result<TimedWorkload, WorkloadError> {
        let mut chance = chance_of(self.name, seed);
        let nodes = self.nodes.draw(nodes, scale.nodes, &mut chance)?;
        let mut pods: Vec<TracePod> =
            pods.iter().filter(|p| p.demand_milli() > 0).cloned().collect();
        pods.iter_mut().for_each(|pod| pod.gpu_spec.clear());
        let pods = possible(&nodes, &pods);
        let whole =
            load_micro(scale.load)? * u128::from(capacity_milli(&nodes)) * u128::from(ROUND);
        let target = whole / 1_000_000;
        let mut comers = Comers { kind: self, load: scale.load, chance, drawn: Drawn::default() };
        if self.services == Services::Replicated {
            let single: Vec<&TracePod> = pods.iter().filter(|pod| pod.num_gpu == 1).collect();
            comers.until(target * REPLICATED / 100, &single, Comers::service)?;
        }
        comers.until(target, &pods.iter().collect::<Vec<_>>(), Comers::single)?;
        let Drawn { pods, mut stays, .. } = comers.drawn;
        stays.sort_by_key(|stay| stay.created);
        let too_many = WorkloadError::TooManyArrivals { load: scale.load };
        let schedule = in_rounds(&stays, ROUND).ok_or(too_many)?;
        Ok(TimedWorkload { nodes, pods, schedule })
    }
}

impl NodesOf {
    fn draw(
        self,
        nodes: &[TraceNode],
        count: usize,
        chance: &mut ChaCha8Rng,
    ) -> Result<Vec<TraceNode>, WorkloadError> {
        match self {
            Self::Trace(percent) => {
                let mut drawn = fleet(nodes, count, chance)?;
                drawn.iter_mut().for_each(|node| node.cpu_milli = node.cpu_milli * percent / 100);
                Ok(drawn)
            }
            Self::Pools => {
                let most = nodes.iter().map(|node| node.gpus).max().unwrap_or(0);
                let large: Vec<TraceNode> =
                    nodes.iter().filter(|node| node.gpus == most).cloned().collect();
                let mut drawn = fleet(&large, count, chance)?;
                for (node, model) in drawn.iter_mut().zip(MODELS.iter().cycle()) {
                    (node.model, node.more) = ((*model).to_owned(), None);
                }
                Ok(drawn)
            }
        }
    }
}

/// The pods of a world, with their times.
#[derive(Default)]
struct Drawn {
    pods: Vec<TracePod>,
    stays: Vec<Stay>,
    /// GPU time that they request, in thousandths of a GPU times ticks.
    demand: u128,
}

/// Draws them.
struct Comers<'k> {
    kind: &'k TimesKind,
    load: f64,
    chance: ChaCha8Rng,
    drawn: Drawn,
}

impl Comers<'_> {
    /// Calls `draw` with one of `pods` again and again, until all request the GPU time `target`.
    fn until(
        &mut self,
        target: u128,
        pods: &[&TracePod],
        draw: fn(&mut Self, &TracePod),
    ) -> Result<(), WorkloadError> {
        if pods.is_empty() {
            return Err(WorkloadError::NoDemand { pods: 0 });
        }
        while self.drawn.demand < target {
            if self.drawn.stays.len() >= ARRIVALS_MAX {
                return Err(WorkloadError::TooManyArrivals { load: self.load });
            }
            let at = usize::try_from(below(pods.len() as u64, &mut self.chance));
            draw(self, pods[at.expect("below the length of a list")]);
        }
        Ok(())
    }

    /// One pod, if the rhythm lets it come.
    fn single(&mut self, pod: &TracePod) {
        let created = below(ROUND, &mut self.chance);
        if !self.kind.rhythm.keeps(pod, created, &mut self.chance) {
            return;
        }
        let can_stay = self.kind.services == Services::Staying;
        let is_staying = can_stay
            && PodClass::of(pod) == PodClass::Fraction
            && below(100, &mut self.chance) < STAYING;
        let stays = match is_staying {
            true => ROUND,
            false => {
                let mean = mean_of(self.kind.mean_hours, pod);
                self.kind.lifetimes.draw(mean, &mut self.chance)
            }
        };
        let gpu_spec = self.gpu_spec();
        self.push(pod, gpu_spec, created, stays);
    }

    /// 4 to 20 replicas, all replaced at once every 12 to 36 hours, rounded down so that a round has a whole
    /// number of releases.
    fn service(&mut self, pod: &TracePod) {
        let replicas = 4 + below(17, &mut self.chance);
        let hours = 12 + below(25, &mut self.chance);
        let releases = (ROUND / HOUR).div_ceil(hours);
        let first = below(ROUND / releases, &mut self.chance);
        let release = |number: u64| first + number * ROUND / releases;
        for number in 0..releases {
            let (created, replaced) = (release(number), release(number + 1));
            for _ in 0..replicas {
                self.push(pod, Vec::new(), created, replaced - created);
            }
        }
    }

    /// The models that the next pod accepts.
    fn gpu_spec(&mut self) -> Vec<String> {
        if self.kind.nodes != NodesOf::Pools {
            return Vec::new();
        }
        let accepted = match below(5, &mut self.chance) {
            0 => &MODELS[..1],
            1 => &MODELS[1..],
            2 => &MODELS[..],
            _ => &[],
        };
        accepted.iter().map(|model| (*model).to_owned()).collect()
    }

    fn push(&mut self, pod: &TracePod, gpu_spec: Vec<String>, created: u64, stays: u64) {
        let drawn = &mut self.drawn;
        let name = format!("{}-{}", pod.name, drawn.pods.len());
        drawn.stays.push(Stay { pod: drawn.pods.len(), created, stays });
        drawn.pods.push(TracePod { name, gpu_spec, ..pod.clone() });
        drawn.demand += u128::from(pod.demand_milli()) * u128::from(stays);
    }
}

#[cfg(test)]
mod tests {
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
        let cpu =
            |name| made(name, 1).nodes.iter().map(|node| node.cpu_milli).collect::<BTreeSet<_>>();
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
        for (spec, expected) in
            [(&["T4"][..], 0.2), (&["G2"], 0.2), (&["T4", "G2"], 0.2), (&[], 0.4)]
        {
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
}
