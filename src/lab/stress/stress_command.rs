//! `gpupack-lab stress`: replays worlds that are made from a trace, and compares the first policy with the
//! best of the others.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use cli::simulate::charts::{Album, load_charts};
use cli::simulate::flags::{RunArgs, TraceArgs};
use cli::simulate::jobs::Experiment;
use cli::simulate::simulate_command::{Output, make_folder, policy_of, print};
use sim::run::policy::SimPolicy;
use sim::trace::workload::WorkloadError;

use crate::policies::all::{KNOWN_MIX, all};
use crate::stress::report::StressReport;
use crate::stress::stress_worlds::{StressError, StressWorld, WORLDS};

/// The default policies: ours, those it must not fall behind, and ours with the mix known before.
const POLICIES: [SimPolicy; 5] =
    [SimPolicy::FRAGMENTATION, SimPolicy::FGD, SimPolicy::BESTFIT, SimPolicy::BINPACK, KNOWN_MIX];

/// Flags of `gpupack-lab stress`.
#[derive(Debug, Args)]
pub struct StressArgs {
    #[command(flatten)]
    trace: TraceArgs,

    /// Only worlds of this name, or whose names begin so; give it again for more.
    #[arg(long = "world", value_name = "NAME", value_delimiter = ',')]
    worlds: Vec<String>,

    /// Policy to replay; give it again to compare several [default: fragmentation, fgd, bestfit, binpack,
    /// known-mix].
    #[arg(
        long = "policy",
        value_name = "POLICY",
        value_delimiter = ',',
        value_parser = policy_of(all())
    )]
    policies: Vec<SimPolicy>,

    #[command(flatten)]
    run: RunArgs,

    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    output: Output,

    /// Also draw the results of each world into SVG files in this folder, with the points as JSON.
    #[arg(long, value_name = "FOLDER")]
    charts: Option<PathBuf>,
}

/// Runs `gpupack-lab stress`.
///
/// # Errors
/// What is wrong with flags or trace.
pub fn run(args: &StressArgs) -> Result<()> {
    let worlds = worlds_of(&args.worlds)?;
    let chosen = if args.policies.is_empty() { &POLICIES } else { &args.policies[..] };
    make_folder(args.charts.as_ref())?;
    let experiment = args.trace.experiment(&args.run, chosen.to_vec(), false)?;
    let (report, album) = stress(experiment, &worlds)?;
    if let Some(folder) = &args.charts {
        album.write(folder)?;
    }
    Ok(print(&match args.output {
        Output::Table => report.table(),
        Output::Json => report.json(),
        Output::Csv => report.csv(),
    })?)
}

/// The worlds with these names or beginnings of names, in their own order; all without any.
fn worlds_of(names: &[String]) -> Result<Vec<StressWorld>> {
    let mut wanted = BTreeSet::new();
    for name in names {
        let before = wanted.len();
        wanted.extend(StressWorld::named(name).map(|world| world.name));
        if wanted.len() == before && StressWorld::named(name).next().is_none() {
            let all = WORLDS.map(|world| world.name).join(", ");
            bail!("--world: there is no world `{name}`; choose from {all}");
        }
    }
    let worlds = WORLDS.into_iter();
    Ok(worlds.filter(|world| names.is_empty() || wanted.contains(world.name)).collect())
}

/// Replays the worlds of each trace, and draws them.
fn stress(mut experiment: Experiment, worlds: &[StressWorld]) -> Result<(StressReport, Album)> {
    let title = experiment.title("stress worlds");
    let first_seed = experiment.seeds.first().copied().unwrap_or_default();
    let sources = std::mem::take(&mut experiment.traces);
    let (mut made, mut left_out) = (Vec::new(), Vec::new());
    for source in &sources {
        for world in worlds {
            let trace = source.world(world.name, sources.len());
            match world.workload(&experiment.nodes, &source.pods, first_seed) {
                Err(StressError::Workload(WorkloadError::NoDemand { .. })) => {
                    left_out.push(trace.label);
                }
                Err(error) => return Err(error.into()),
                Ok(_) => {
                    made.push((source, world));
                    experiment.traces.push(trace);
                }
            }
        }
    }
    let results = experiment.replays(|at, seed| -> Result<_> {
        let (source, world) = made[at];
        Ok(world.workload(&experiment.nodes, &source.pods, seed)?)
    })?;
    let album = Album::new(results.iter().map(load_charts));
    let measures = made.iter().map(|(_, world)| world.measure).collect();
    Ok((StressReport::new(title, results, measures, left_out), album))
}
