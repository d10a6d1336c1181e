//! `gpupack simulate --write-pods` and `--write-free`: where pods are at the end, and what is free.

use std::path::Path;

use crate::simulate::jobs::{Experiment, SimulateError};
use sim::run::placed::{end_of, free_csv};
use sim::snapshot::replace::replace;
use sim::trace::write::pods_csv;

/// Writes the requested files, after a replay of the one trace under the first policy.
pub(crate) fn write(
    experiment: &Experiment,
    to_pods: Option<&Path>,
    to_free: Option<&Path>,
) -> Result<(), SimulateError> {
    if to_pods.is_none() && to_free.is_none() {
        return Ok(());
    }
    let ([trace], [policy, ..], [seed, ..]) =
        (&experiment.traces[..], &experiment.policies[..], &experiment.seeds[..])
    else {
        return Err(SimulateError::OneEnd);
    };
    let end = end_of(&experiment.nodes, &trace.pods, *policy, *seed)?;
    let (pods, free) = (pods_csv(&end.pods)?, free_csv(&end.free)?);
    let files = [to_pods.map(|path| (path, &pods[..])), to_free.map(|path| (path, &free[..]))];
    Ok(replace(&files.into_iter().flatten().collect::<Vec<_>>())?)
}
