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
mod tests;
