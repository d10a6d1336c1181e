//! `gpupack-lab bursts`: plays pods that use more than they request now and then, under each rule of a pool.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use cli::simulate::flags::RunArgs;
use cli::simulate::jobs::SimulateError;
use cli::simulate::simulate_command::{Output, print};
use sim::run::timeline::{Pace, timeline};
use sim::trace::churn::NodeOrder;
use sim::trace::read::{read_nodes, read_pods, size_up};

use crate::bursts::columns::read_bursts;
use crate::bursts::compare_rules::{Comparison, Source, compare};

/// Flags of `gpupack-lab bursts`.
#[derive(Debug, Args)]
pub struct BurstArgs {
    /// The part of the GPUs that pods request on average; a trace is run faster or slower for it. Without a
    /// trace pods are drawn for 64 GPUs.
    #[arg(value_name = "LOAD", required_unless_present = "nodes", value_parser = load)]
    load: Option<f64>,

    /// Node file of a trace.
    #[arg(long, value_name = "FILE", requires = "pods")]
    nodes: Option<PathBuf>,

    /// Pod file of a trace that has pods with bursts.
    #[arg(long, value_name = "FILE", requires = "nodes")]
    pods: Option<PathBuf>,

    #[command(flatten)]
    run: RunArgs,

    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// A part of the fleet that pods can request on average.
fn load(text: &str) -> Result<f64, String> {
    let load = text.parse::<f64>().ok().filter(|load| (0.05..=0.95).contains(load));
    load.ok_or_else(|| "it must be a number from 0.05 to 0.95".to_owned())
}

/// Runs `gpupack-lab bursts`.
///
/// # Errors
/// What is wrong with the trace.
pub fn run(args: &BurstArgs) -> Result<()> {
    let comparison = comparison(args)?;
    Ok(print(&match args.output {
        Output::Table => comparison.table(),
        Output::Json => comparison.json(),
        Output::Csv => comparison.csv(),
    })?)
}

fn comparison(args: &BurstArgs) -> Result<Comparison> {
    let seeds = args.run.all_seeds().iter().map(|seed| seed.unsigned_abs()).collect::<Vec<u64>>();
    let (Some(nodes), Some(path)) = (&args.nodes, &args.pods) else {
        let drawn = Source::Drawn(args.load.unwrap_or_default());
        return Ok(compare(&drawn, &seeds, args.run.jobs)?);
    };
    let nodes = read_nodes(nodes).map_err(SimulateError::Nodes)?;
    let mut pods = read_pods(path).map_err(SimulateError::Pods)?;
    size_up(&nodes, &mut pods);
    pods.iter_mut().for_each(|pod| pod.place(None));
    let bursts = read_bursts(path, &pods)?;
    ensure!(bursts.iter().any(Option::is_some), "no pod of --pods has `burst_gap_seconds`");
    let pace = args.load.map_or(Pace::Compress(1.0), Pace::Load);
    let workload = timeline(nodes, pods, pace, NodeOrder::AsIs, 0)?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let traced = Source::Traced { name: &name, workload: &workload, bursts: &bursts };
    Ok(compare(&traced, &seeds, args.run.jobs)?)
}
