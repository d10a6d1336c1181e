//! `gpupack simulate --stress`: replays worlds that are made from the trace, and compares the first
//! policy with the best of the others.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::cli::simulate::charts::{Album, load_charts};
use crate::cli::simulate::jobs::{Experiment, SimulateError, Trace};
use crate::cli::simulate::stress_report::StressReport;
use crate::model::policy::Policy;
use crate::sim::run::policy::SimPolicy;
use crate::sim::stress::worlds::{StressError, WORLDS, World};
use crate::sim::trace::workload::WorkloadError;

/// The default policies: ours, those it must not fall behind, and ours with the mix known before.
pub(crate) const STRESS_POLICIES: [SimPolicy; 5] = [
    SimPolicy::Product(Policy::Fragmentation),
    SimPolicy::Fgd,
    SimPolicy::BestFit,
    SimPolicy::Product(Policy::BinPack),
    SimPolicy::KnownMix,
];

/// The worlds with these names or beginnings of names, in their own order; all without any.
///
/// # Errors
/// A sentence that lists the names, for one that there is not.
pub(crate) fn worlds_of(names: &[String]) -> Result<Vec<World>, String> {
    let mut wanted = BTreeSet::new();
    for name in names {
        let before = wanted.len();
        wanted.extend(World::named(name).map(|world| world.name));
        if wanted.len() == before && World::named(name).next().is_none() {
            let all = WORLDS.map(|world| world.name).join(", ");
            return Err(format!("there is no world `{name}`; choose from {all}"));
        }
    }
    let is_wanted = |world: &World| names.is_empty() || wanted.contains(world.name);
    Ok(WORLDS.into_iter().filter(is_wanted).collect())
}

/// Replays the worlds of each trace, and draws them.
///
/// # Errors
/// [`SimulateError`].
pub(crate) fn stress(
    mut experiment: Experiment,
    worlds: &[World],
) -> Result<(StressReport, Album), SimulateError> {
    let mut left_out = Vec::new();
    let mut made = Vec::new();
    let first_seed = experiment.seeds.first().copied().unwrap_or_default();
    let is_one = experiment.traces.len() == 1;
    for trace in &experiment.traces {
        for world in worlds {
            let label = match is_one {
                true => world.name.to_owned(),
                false => format!("{} {}", trace.label, world.name),
            };
            match world.workload(&experiment.nodes, &trace.pods, first_seed) {
                Err(StressError::Workload(WorkloadError::NoDemand { .. })) => left_out.push(label),
                Err(error) => return Err(error.into()),
                Ok(_) => made.push((
                    *world,
                    Trace {
                        label,
                        pods: Arc::clone(&trace.pods),
                        unknown_model_pods: 0,
                        world: Some(*world),
                    },
                )),
            }
        }
    }
    let title = experiment.title("stress worlds");
    let measures = made.iter().map(|(world, _)| world.measure).collect();
    experiment.traces = made.into_iter().map(|(_, trace)| trace).collect();
    let results = experiment.arrivals(None)?;
    let album = Album::new(results.iter().map(load_charts));
    Ok((StressReport::new(title, results, measures, left_out), album))
}
