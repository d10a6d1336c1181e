//! Flags that `gpupack simulate` shares with `gpupack-lab`: what is replayed, and how often.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use crate::simulate::jobs::{Experiment, SimulateError, Trace};
use sim::run::placed::keep_placements;
use sim::run::policy::SimPolicy;
use sim::trace::churn::NodeOrder;
use sim::trace::read::{pods_of_unknown_models, read_nodes, read_pods, size_up};

/// Most seeds of one call; a typing error should not run for a day.
const SEEDS_MAX: u64 = 10_000;

/// A trace.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// Node file of the trace (CSV: sn, cpu_milli, memory_mib, gpu, model). Optional: memory, models
    /// and MIG instances of GPUs, slots and other rules of a pool; see docs/simulator.md.
    #[arg(long, value_name = "FILE")]
    pub nodes: PathBuf,

    /// Pod file of the trace (CSV: name, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec); give
    /// it again to compare on several. Optional: GPU memory, MIG profile, slot, limit, isolation,
    /// policy, priority, times, and where pods run; see docs/simulator.md.
    #[arg(long, value_name = "FILE", required = true)]
    pub pods: Vec<PathBuf>,
}

/// Seeds and cores.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Seed of the arrival order and of the node order.
    #[arg(long, default_value_t = 42, conflicts_with = "seeds", allow_negative_numbers = true)]
    pub seed: i64,

    /// Several seeds, first and last one; figures are means over them.
    #[arg(long, value_name = "FIRST..LAST", allow_hyphen_values = true)]
    pub seeds: Option<Seeds>,

    /// Replays at a time [default: one per core].
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,
}

/// Seeds from the first to the last, both included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seeds(pub RangeInclusive<i64>);

impl FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        let (Ok(first), Ok(last)) = (first.parse::<i64>(), last.parse::<i64>()) else {
            return Err("expected two whole numbers such as 42..51".to_owned());
        };
        if first > last {
            return Err("the first seed is greater than the last one".to_owned());
        }
        if last.abs_diff(first) >= SEEDS_MAX {
            return Err(format!("more than {SEEDS_MAX} seeds"));
        }
        Ok(Self(first..=last))
    }
}

impl RunArgs {
    /// The seeds, in their order.
    pub fn all_seeds(&self) -> Vec<i64> {
        self.seeds.clone().map_or_else(|| vec![self.seed], |Seeds(seeds)| seeds.collect())
    }
}

impl TraceArgs {
    /// Replays of this trace, without moves, with nodes in an order of each seed. Pods that run stay where
    /// they are if they are to be `kept`.
    ///
    /// # Errors
    /// What is wrong with the files.
    pub fn experiment(
        &self,
        run: &RunArgs,
        policies: Vec<SimPolicy>,
        kept: bool,
    ) -> Result<Experiment, SimulateError> {
        let mut known = BTreeSet::new();
        if let Some(path) = self.pods.iter().find(|path| !known.insert(path.as_path())) {
            return Err(SimulateError::Repeated(path.clone()));
        }
        let nodes = read_nodes(&self.nodes).map_err(SimulateError::Nodes)?;
        let traces = self.pods.iter().zip(labels(&self.pods)).map(|(path, label)| {
            let mut pods = read_pods(path).map_err(SimulateError::Pods)?;
            size_up(&nodes, &mut pods);
            match kept {
                true => keep_placements(&nodes, &mut pods)?,
                false => pods.iter_mut().for_each(|pod| pod.place(None)),
            }
            let unknown_model_pods = pods_of_unknown_models(&nodes, &pods);
            Ok(Trace { label, pods, unknown_model_pods })
        });
        let traces = traces.collect::<Result<_, SimulateError>>()?;
        let (seeds, order, jobs) = (run.all_seeds(), NodeOrder::Shuffled, run.jobs);
        Ok(Experiment { nodes, traces, policies, seeds, most_moves: 0, order, jobs })
    }
}

/// Names of the traces for output: the file names without their common start up to its last `_`;
/// the paths if two names are the same.
fn labels(paths: &[PathBuf]) -> Vec<String> {
    let stems = paths.iter().map(|path| path.file_stem().unwrap_or_default());
    let stems: Vec<String> = stems.map(|stem| stem.to_string_lossy().into_owned()).collect();
    if stems.iter().collect::<BTreeSet<_>>().len() < stems.len() {
        let whole = paths.iter().map(|path| {
            let parts = path.iter().map(|part| part.to_string_lossy().replace('/', ""));
            parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
        });
        return whole.collect();
    }
    let [first, others @ ..] = &stems[..] else { return stems };
    let shared = others.iter().map(|other| {
        let same = first.char_indices().zip(other.chars());
        same.take_while(|((_, a), b)| a == b).last().map_or(0, |((at, a), _)| at + a.len_utf8())
    });
    let Some(shared) = shared.min() else { return stems };
    let cut = first[..shared].rfind('_').map_or(0, |at| at + 1);
    stems.iter().map(|stem| stem[cut..].to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_named_by_their_differing_path_parts() {
        for (paths, expected) in [
            (&["x/list_default.csv"][..], &["list_default"][..]),
            (&["list_default.csv", "y/list_cpu050.csv"], &["default", "cpu050"]),
            (&["list_cpu050.csv", "list_cpu100.csv"], &["cpu050", "cpu100"]),
            (&["a_b", "a_b_c"], &["b", "b_c"]),
            (&["é_x", "è_x"], &["é_x", "è_x"]),
            (&["/x/pods.csv", "y/pods.csv"], &["x-pods.csv", "y-pods.csv"]),
        ] {
            let paths: Vec<PathBuf> = paths.iter().map(PathBuf::from).collect();
            assert_eq!(labels(&paths), expected);
        }
    }
}
