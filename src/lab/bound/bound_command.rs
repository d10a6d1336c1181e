//! `gpupack-lab bound`: how much any policy could have allocated of the arrivals of a trace.

use clap::Args;
use cli::simulate::figures::mean_cell;
use cli::simulate::flags::{RunArgs, TraceArgs};
use cli::simulate::jobs::on_all_cores;
use cli::simulate::report::aligned;
use cli::simulate::simulate_command::{ARRIVED_LOAD, Output, print};
use serde::Serialize;
use sim::run::policy::SimPolicy;
use sim::run::replay::replay;

use crate::bound::upper_bound::{Bound, bounds};

/// Flags of `gpupack-lab bound`.
#[derive(Debug, Args)]
pub struct BoundArgs {
    #[command(flatten)]
    trace: TraceArgs,

    #[command(flatten)]
    run: RunArgs,

    /// Arrivals, as a multiple of the cluster's GPUs.
    #[arg(long, default_value_t = ARRIVED_LOAD)]
    load: f64,

    /// Take the files as they are, whatever the load.
    #[arg(long)]
    as_is: bool,

    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// Both bounds of a trace and seed, in percent.
#[derive(Debug, Serialize)]
struct BoundRow {
    trace: String,
    seed: i64,
    any_at_100: Option<f64>,
    any_last: f64,
    faithful_at_100: Option<f64>,
    faithful_last: f64,
}

/// The meaning of the bounds.
const LEGEND: &str = "\
any policy   what no policy exceeds, even one that knows all arrivals, refuses pods and moves others
faithful     the same for policies that lose no pod that arrived before FGD lost its first one
";

/// Runs `gpupack-lab bound`.
///
/// # Errors
/// What is wrong with the trace, or a bound that is not proven.
pub fn run(args: &BoundArgs) -> anyhow::Result<()> {
    let experiment = args.trace.experiment(&args.run, Vec::new(), false)?;
    let load = (!args.as_is).then_some(args.load);
    let traces = 0..experiment.traces.len();
    let tasks: Vec<(usize, i64)> =
        traces.flat_map(|trace| experiment.seeds.iter().map(move |seed| (trace, *seed))).collect();
    let rows = on_all_cores(&tasks, args.run.jobs, |(trace, seed)| -> anyhow::Result<BoundRow> {
        let workload = experiment.workload(*trace, load, *seed)?;
        let first_lost = replay(&workload, SimPolicy::FGD, *seed, 0, |_| {})?.first_lost;
        let both = bounds(&workload, first_lost)?;
        Ok(BoundRow {
            trace: experiment.traces[*trace].label.clone(),
            seed: *seed,
            any_at_100: both.any.at_100,
            any_last: both.any.last,
            faithful_at_100: both.faithful.at_100,
            faithful_last: both.faithful.last,
        })
    })?;
    let how = load.map_or_else(|| "as is".to_owned(), |load| format!("load {load}"));
    let text = match args.output {
        Output::Table => table(&experiment.title(&how), &rows, experiment.seeds.len()),
        Output::Json => serde_json::to_string_pretty(&rows)? + "\n",
        Output::Csv => {
            let mut writer = csv::Writer::from_writer(Vec::new());
            rows.iter().try_for_each(|row| writer.serialize(row))?;
            String::from_utf8(writer.into_inner()?)?
        }
    };
    Ok(print(&text)?)
}

/// The means over the seeds.
fn table(title: &str, rows: &[BoundRow], seeds: usize) -> String {
    let mut lines = Vec::new();
    for of_trace in rows.chunks(seeds) {
        let any: fn(&BoundRow) -> Bound =
            |row| Bound { at_100: row.any_at_100, last: row.any_last };
        let faithful: fn(&BoundRow) -> Bound =
            |row| Bound { at_100: row.faithful_at_100, last: row.faithful_last };
        for (name, of) in [("any policy", any), ("faithful", faithful)] {
            let at_100: Vec<f64> = of_trace.iter().filter_map(|row| of(row).at_100).collect();
            let last: Vec<f64> = of_trace.iter().map(|row| of(row).last).collect();
            let trace = of_trace[0].trace.clone();
            lines.push(vec![trace, name.to_owned(), mean_cell(&at_100, 2), mean_cell(&last, 2)]);
        }
    }
    let is_one = rows.len() == seeds;
    let lines = aligned(&["trace", "at most", "at 100 %", "last"], 2, lines, is_one);
    format!("{title}\n\n{lines}\n{LEGEND}")
}
