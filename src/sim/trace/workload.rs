//! Makes the arrivals that one experiment replays from a trace.
//!
//! [`Workload::paper`] is the workload of the FGD paper (USENIX ATC'23, "Beware of Fragmentation")
//! as its simulator makes it, number for number, so that results can be compared seed by seed.
//! [`Workload::as_is`] takes the files as they are. Arrivals come one after another: only
//! [`crate::run::timeline`] uses the times in the trace. This module decides nothing about
//! placement.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use crate::trace::go_rand::GoRand;
use crate::trace::read::{TraceNode, TracePod};

/// Largest load accepted, in multiples of the cluster's GPUs.
pub const LOAD_MAX: f64 = 100.0;
/// Most arrivals generated. Otherwise a trace of nearly only CPU pods would be repeated forever.
pub const ARRIVALS_MAX: usize = 4_000_000;

/// What one experiment replays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// The cluster in tie-break order: among nodes of equal score the earlier one wins.
    pub nodes: Vec<TraceNode>,
    /// The pods in the order they arrive. Names are unique.
    pub arrivals: Vec<TracePod>,
    /// The pods from which the arrivals were drawn, and the paper takes its "typical pods": the
    /// trace sorted by name, or the arrivals themselves if they are replayed as they are.
    pub population: Vec<TracePod>,
}

/// Why no workload can be made of a trace.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WorkloadError {
    /// The load is not a number in range.
    #[error("load `{load}` is not allowed, expected more than 0 and at most {LOAD_MAX}")]
    Load { load: f64 },
    /// The mean load of a replay with times is not a number in range.
    #[error("mean load `{load}` is not allowed, expected more than 0 and at most 10")]
    MeanLoad { load: f64 },
    /// The factor is out of range: as given, or as the load needs it.
    #[error("times `{compress}` as fast is not allowed, expected more than 0 and at most 1e8")]
    Compress { compress: f64 },
    /// A pod without a time cannot be replayed at its time.
    #[error("pod `{pod}` has no `creation_time`: its file cannot be replayed by its own times")]
    NoTime { pod: String },
    /// A pod that ends before it begins.
    #[error("the `deletion_time` of pod `{pod}` lies before its `creation_time`")]
    Backwards { pod: String },
    /// At this pace too many pods would run at once.
    #[error("times `{compress}` as fast, more than {ARRIVALS_MAX} pods would run at once")]
    TooManyRunning { compress: f64 },
    /// A load is relative to the cluster's GPUs, and there are none.
    #[error("none of the `{nodes}` nodes has a GPU")]
    NoGpus {
        /// How many nodes were given.
        nodes: usize,
    },
    /// Repeating pods that request no GPU never adds load.
    #[error("none of the `{pods}` pods requests a GPU, so no load can be reached")]
    NoDemand {
        /// How many pods were given.
        pods: usize,
    },
    /// The load needs more pods than are generated.
    #[error("load `{load}` needs more than {ARRIVALS_MAX} arrivals of this trace")]
    TooManyArrivals { load: f64 },
}

impl Workload {
    /// The paper's workload for `seed`: shuffled, then brought to `load` times the cluster's GPUs.
    ///
    /// In order, all draws from one generator seeded as Go's `rand.Seed`:
    /// 1. the pods are sorted by name, and one number is drawn and dropped (the paper's simulator
    ///    logs it);
    /// 2. the pods are shuffled;
    /// 3. below the load, copies of pods drawn from the sorted list are appended, until one would
    ///    exceed it. That test counts a pod of several GPUs as one, so the last copy may overshoot.
    ///    Above the load, pods drawn from the arrivals are removed until it is no longer exceeded.
    ///    At the load exactly, nothing is drawn;
    /// 4. a permutation gives each node, sorted by name, its position in the tie-break order.
    ///
    /// The copy made at step `i` is called `<pod>-tuned-<i>`, as there.
    ///
    /// # Errors
    /// Any [`WorkloadError`].
    pub fn paper(
        mut nodes: Vec<TraceNode>,
        mut pods: Vec<TracePod>,
        seed: i64,
        load: f64,
    ) -> Result<Self, WorkloadError> {
        let target = TargetLoad::new(&nodes, load)?;
        if pods.iter().all(|pod| pod.demand_milli() == 0) {
            return Err(WorkloadError::NoDemand { pods: pods.len() });
        }
        pods.sort_by(|a, b| a.name.cmp(&b.name));
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        let population = pods.clone();

        let mut rand = GoRand::new(seed);
        rand.int63();
        rand.shuffle(&mut pods);
        target.proximity(&mut pods, &population, &mut rand)?;
        let ranks = rand.perm(nodes.len());
        let mut ranked: Vec<_> = ranks.into_iter().zip(nodes).collect();
        ranked.sort_by_key(|(rank, _)| *rank);
        let nodes = ranked.into_iter().map(|(_, node)| node).collect();
        Ok(Self { nodes, arrivals: pods, population })
    }

    /// The files' own order: row 1 arrives first, and of nodes of equal score the upper row wins.
    /// Nothing is shuffled, repeated or left out.
    #[must_use]
    pub fn as_is(nodes: Vec<TraceNode>, pods: Vec<TracePod>) -> Self {
        Self { nodes, population: pods.clone(), arrivals: pods }
    }

    /// Capacity of the cluster, in thousandths of a GPU.
    #[must_use]
    pub fn capacity_milli(&self) -> u64 {
        capacity_milli(&self.nodes)
    }
}

/// What `pods` request together, in thousandths of a GPU.
#[must_use]
pub fn demand_milli(pods: &[TracePod]) -> u64 {
    pods.iter().map(TracePod::demand_milli).sum()
}

/// Capacity of `nodes` together, in thousandths of a GPU.
#[must_use]
pub fn capacity_milli(nodes: &[TraceNode]) -> u64 {
    nodes.iter().map(TraceNode::capacity_milli).sum()
}

/// The demand of a load.
struct TargetLoad {
    load: f64,
    demand_milli: f64,
}

impl TargetLoad {
    fn new(nodes: &[TraceNode], load: f64) -> Result<Self, WorkloadError> {
        if !(load > 0.0 && load <= LOAD_MAX) {
            return Err(WorkloadError::Load { load });
        }
        match capacity_milli(nodes) {
            0 => Err(WorkloadError::NoGpus { nodes: nodes.len() }),
            capacity => Ok(Self { load, demand_milli: load * capacity as f64 }),
        }
    }

    /// Whether `demand` is above the target. Floating point, as in the paper's simulator, so that
    /// the decision at the very edge is the same.
    fn exceeded_by(&self, demand: u64) -> bool {
        demand as f64 > self.demand_milli
    }

    fn proximity(
        &self,
        arrivals: &mut Vec<TracePod>,
        population: &[TracePod],
        rand: &mut GoRand,
    ) -> Result<(), WorkloadError> {
        let demand = demand_milli(arrivals);
        if self.exceeded_by(demand) {
            self.trim(arrivals, demand, rand);
        } else if (demand as f64) < self.demand_milli {
            self.inflate(arrivals, population, rand)?;
        }
        Ok(())
    }

    fn inflate(
        &self,
        arrivals: &mut Vec<TracePod>,
        population: &[TracePod],
        rand: &mut GoRand,
    ) -> Result<(), WorkloadError> {
        let names: BTreeSet<&str> = population.iter().map(|pod| pod.name.as_str()).collect();
        let choices = NonZeroUsize::new(population.len()).expect("some pod has demand");
        let mut demand = demand_milli(arrivals);
        let mut copies: u64 = 0;
        loop {
            let pod = &population[rand.intn(choices)];
            if self.exceeded_by(demand + u64::from(pod.gpu_milli)) {
                return Ok(());
            }
            if arrivals.len() >= ARRIVALS_MAX {
                return Err(WorkloadError::TooManyArrivals { load: self.load });
            }
            let mut name = format!("{}-tuned-{copies}", pod.name);
            // Only in a trace that was itself written from a workload.
            while names.contains(name.as_str()) {
                name.push_str("-again");
            }
            demand += pod.demand_milli();
            arrivals.push(TracePod { name, ..pod.clone() });
            copies += 1;
        }
    }

    fn trim(&self, arrivals: &mut Vec<TracePod>, mut demand: u64, rand: &mut GoRand) {
        while self.exceeded_by(demand) {
            let choices = NonZeroUsize::new(arrivals.len()).expect("demand comes from pods");
            demand -= arrivals.remove(rand.intn(choices)).demand_milli();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, gpus: u32) -> TraceNode {
        let model = String::from("T4");
        TraceNode {
            name: name.to_owned(),
            cpu_milli: 8000,
            memory_mib: 4096,
            gpus,
            model,
            more: None,
        }
    }

    fn pod(name: &str, num_gpu: u32, gpu_milli: u32) -> TracePod {
        TracePod {
            name: name.to_owned(),
            cpu_milli: 1000,
            memory_mib: 512,
            num_gpu,
            gpu_milli,
            gpu_spec: Vec::new(),
            creation_time: None,
            deletion_time: None,
            more: None,
        }
    }

    fn trace() -> (Vec<TraceNode>, Vec<TracePod>) {
        let nodes = vec![node("c", 2), node("a", 1), node("b", 1)];
        let pods = vec![pod("y", 1, 250), pod("x", 1, 500), pod("w", 0, 0), pod("z", 2, 1000)];
        (nodes, pods)
    }

    fn paper(seed: i64, load: f64) -> Result<Workload, WorkloadError> {
        let (nodes, pods) = trace();
        Workload::paper(nodes, pods, seed, load)
    }

    fn names(pods: &[TracePod]) -> Vec<&str> {
        pods.iter().map(|pod| pod.name.as_str()).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_workload_in_any_row_order() {
        let (mut nodes, mut pods) = trace();
        nodes.reverse();
        pods.reverse();
        let turned = Workload::paper(nodes, pods, 42, 1.3).unwrap();
        assert_eq!(turned, paper(42, 1.3).unwrap());
        assert_eq!(names(&turned.population), ["w", "x", "y", "z"]);
    }

    #[test]
    fn seeds_differ_in_arrivals_and_in_node_order() {
        let all: Vec<Workload> = (0..20).map(|seed| paper(seed, 1.3).unwrap()).collect();
        assert!(all.iter().any(|other| other.arrivals != all[0].arrivals));
        assert!(all.iter().any(|other| other.nodes != all[0].nodes));
    }

    #[test]
    fn copies_fill_the_load_and_exceed_it_by_less_than_one_pod() {
        for seed in 0..200 {
            let workload = paper(seed, 1.3).unwrap();
            let target = workload.capacity_milli() * 13 / 10;
            assert!(demand_milli(&workload.arrivals) < target + 1000, "seed {seed}");
            assert!(demand_milli(&workload.arrivals) + 1000 > target, "seed {seed}");
            let unique: BTreeSet<&str> = names(&workload.arrivals).into_iter().collect();
            assert_eq!(unique.len(), workload.arrivals.len(), "seed {seed}");
        }
    }

    #[test]
    fn above_the_load_pods_are_removed_until_it_is_met() {
        for seed in 0..200 {
            let workload = paper(seed, 0.5).unwrap();
            assert!(demand_milli(&workload.arrivals) <= 2000, "seed {seed}");
            assert!(workload.arrivals.len() < 4, "seed {seed}");
        }
    }

    #[test]
    fn at_the_exact_load_the_trace_is_only_shuffled() {
        let (nodes, pods) = trace();
        let load = demand_milli(&pods) as f64 / capacity_milli(&nodes) as f64;
        let workload = Workload::paper(nodes, pods, 42, load).unwrap();
        let mut arrived = names(&workload.arrivals);
        arrived.sort_unstable();
        assert_eq!(arrived, ["w", "x", "y", "z"]);
    }

    #[test]
    fn a_copy_never_has_the_name_of_a_pod_of_the_trace() {
        let pods = vec![pod("a", 1, 1000), pod("a-tuned-0", 0, 0), pod("a-tuned-1", 0, 0)];
        let workload = Workload::paper(vec![node("n", 8)], pods, 1, 1.0).unwrap();
        let unique: BTreeSet<&str> = names(&workload.arrivals).into_iter().collect();
        assert_eq!(unique.len(), workload.arrivals.len());
    }

    #[test]
    fn as_is_keeps_every_row_in_its_place() {
        let (nodes, pods) = trace();
        let workload = Workload::as_is(nodes.clone(), pods.clone());
        assert_eq!((&workload.nodes, &workload.arrivals), (&nodes, &pods));
        assert_eq!((demand_milli(&workload.arrivals), workload.capacity_milli()), (2750, 4000));
    }

    #[test]
    fn an_unreachable_load_is_rejected() {
        let (nodes, pods) = trace();
        for load in [0.0, -1.0, 100.1, f64::NAN, f64::INFINITY] {
            let refused = paper(42, load).unwrap_err();
            assert!(matches!(refused, WorkloadError::Load { .. }), "{refused}");
        }
        let refused = Workload::paper(vec![node("a", 0)], pods, 42, 1.3).unwrap_err();
        assert_eq!(refused, WorkloadError::NoGpus { nodes: 1 });
        let refused = Workload::paper(nodes.clone(), vec![pod("a", 0, 0)], 42, 1.3).unwrap_err();
        assert_eq!(refused, WorkloadError::NoDemand { pods: 1 });
        let refused = Workload::paper(nodes, Vec::new(), 42, 1.3).unwrap_err();
        assert_eq!(refused, WorkloadError::NoDemand { pods: 0 });
    }
}
