//! `gpupack simulate`: replays a trace under several policies and seeds, and compares them.
//!
//! Flags select one of three experiments and one of three forms of the result. Standard output gets
//! the result and nothing else.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::{fs, io};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args, ValueEnum};

use crate::simulate::charts::{Album, load_charts, time_charts};
use crate::simulate::ends;
use crate::simulate::flags::{RunArgs, TraceArgs};
use crate::simulate::jobs::{Experiment, SimulateError, Times};
use crate::simulate::report::ArrivalReport;
use crate::simulate::timed::TimedReport;
use sim::run::policy::SimPolicy;
use sim::run::replay::Overflow;
use sim::run::timeline::Pace;
use sim::trace::churn::NodeOrder;

/// Load of arrivals without times, by default: as in the paper.
pub const ARRIVED_LOAD: f64 = 1.3;

/// The default policies: ours, the paper's, and the best rule before it.
const DEFAULT_POLICIES: [SimPolicy; 3] =
    [SimPolicy::FRAGMENTATION, SimPolicy::FGD, SimPolicy::BESTFIT];

/// Flags of `gpupack simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    #[command(flatten)]
    trace: TraceArgs,

    /// Policy to replay; give it again to compare several [default: fragmentation, fgd, bestfit].
    #[arg(
        long = "policy",
        value_name = "POLICY",
        value_delimiter = ',',
        value_parser = policy_of(SimPolicy::ALL.to_vec())
    )]
    pub policies: Vec<SimPolicy>,

    #[command(flatten)]
    run: RunArgs,

    /// Arrivals to replay, as a multiple of the cluster's GPUs: pods are repeated or left out at
    /// random to reach it [default: 1.3]. With --timeline: the mean demand of pods; the trace is
    /// run faster or slower to reach it.
    #[arg(long, allow_negative_numbers = true, conflicts_with_all = ["churn", "compress"])]
    pub load: Option<f64>,

    /// Use the files as they are: pods arrive in the order of their rows, the upper node wins a
    /// tie, nothing is shuffled, repeated or left out, whatever the load.
    #[arg(long)]
    pub as_is: bool,

    /// Let the pods that run, by the columns `node` and `devices` of the pod file, stay where they
    /// are; the policy places the others after them.
    #[arg(long, requires = "as_is")]
    pub keep_placements: bool,

    /// Also write the pods into this file (CSV), each with node and devices where the first policy
    /// places it: it can be replayed with --keep-placements.
    #[arg(long, value_name = "FILE", requires = "as_is")]
    pub write_pods: Option<PathBuf>,

    /// Also write what is free on each device after the last pod into this file (CSV), under the
    /// first policy.
    #[arg(long, value_name = "FILE", requires = "as_is")]
    pub write_free: Option<PathBuf>,

    #[command(flatten)]
    times: TimesArgs,

    /// Move at most this many running pods, 1 to 3, for one that fits nowhere.
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub moves: u8,

    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    pub output: Output,

    /// Also draw the results of each trace into SVG files in this folder, with the points as JSON.
    #[arg(long, value_name = "FOLDER")]
    pub charts: Option<PathBuf>,
}

/// Times at which pods come and end, and what waits.
#[derive(Debug, Args)]
#[group(skip)] // else usage lines would list it
#[command(group = ArgGroup::new("times").args(["churn", "timeline"]))]
struct TimesArgs {
    /// Let pods drawn from the trace come and end at random times, so that they request this
    /// multiple of the cluster's GPUs on average; three mean lifetimes are measured after one.
    #[arg(long, value_name = "LOAD", allow_negative_numbers = true)]
    churn: Option<f64>,

    /// Let pods come and end at the trace's own times.
    #[arg(long)]
    timeline: bool,

    /// Let them come faster by this factor; they stay as long as in the trace.
    #[arg(
        long,
        value_name = "FACTOR",
        default_value_t = 1.0,
        requires = "timeline",
        allow_negative_numbers = true
    )]
    compress: f64,

    /// With times: a pod that fits nowhere waits until it does; without this flag it is lost.
    #[arg(long, requires = "times")]
    queue: bool,

    /// Keep room for the first waiting pod once it has waited so long, in mean lifetimes under churn, else
    /// in seconds: a standing hold.
    #[arg(
        long,
        value_name = "TIME",
        requires = "queue",
        allow_negative_numbers = true,
        value_parser = time
    )]
    standing_hold_after: Option<f64>,
}

impl TimesArgs {
    /// The times, and what to say of them; `None` for arrivals without times.
    fn chosen(&self, load: Option<f64>) -> Option<(Times, String)> {
        if let Some(load) = self.churn {
            return Some((Times::Churn(load), format!("churn at load {load}")));
        }
        let pace = load.map_or(Pace::Compress(self.compress), Pace::Load);
        let how = match pace {
            Pace::Compress(factor) => format!("own times, {factor} times as fast"),
            Pace::Load(load) => format!("own times at load {load}"),
        };
        self.timeline.then_some((Times::Own(pace), how))
    }
}

/// Form of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table for people, with the time the replays took.
    Table,
    /// One object with a result per policy; the same bytes for the same input.
    Json,
    /// One row per policy and seed; the same bytes for the same input.
    Csv,
}

/// A time that is not below zero, and less than any replay lasts.
pub fn time(text: &str) -> Result<f64, String> {
    let time = text.parse::<f64>().ok().filter(|time| (0.0..1e9).contains(time));
    time.ok_or_else(|| "expected a number from 0 to 1,000,000,000".to_owned())
}

/// Reads the name of one of these policies.
pub fn policy_of(known: Vec<SimPolicy>) -> impl TypedValueParser<Value = SimPolicy> {
    let names: Vec<&str> = known.iter().map(|policy| policy.name).collect();
    PossibleValuesParser::new(names).try_map(move |name| {
        known.iter().find(|policy| policy.name == name).copied().ok_or("it is none of them")
    })
}

/// Runs `gpupack simulate`.
///
/// # Errors
/// [`SimulateError`]. A reader that closes standard output early is not one.
pub fn run(args: &SimulateArgs) -> Result<(), SimulateError> {
    make_folder(args.charts.as_ref())?;
    let experiment = experiment(args)?;
    let (text, album) = match args.times.chosen(args.load) {
        Some((times, how)) => played(args, &experiment, times, &how)?,
        None => arrived(args, &experiment)?,
    };
    ends::write(&experiment, args.write_pods.as_deref(), args.write_free.as_deref())?;
    if let Some(folder) = &args.charts {
        album.write(folder)?;
    }
    Ok(print(&text)?)
}

/// Prints a result. A reader that closes standard output early is no error.
///
/// # Errors
/// Of standard output.
pub fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Replays arrivals without times.
fn arrived(args: &SimulateArgs, experiment: &Experiment) -> Result<(String, Album), SimulateError> {
    let load = (!args.as_is).then(|| args.load.unwrap_or(ARRIVED_LOAD));
    let how = load.map_or_else(|| "as is".to_owned(), |load| format!("load {load}"));
    let results = experiment.arrivals(load)?;
    let album = Album::new(results.iter().map(load_charts));
    let report = ArrivalReport::new(experiment.title(&how), results);
    let text = match args.output {
        Output::Table => report.table(),
        Output::Json => report.json(),
        Output::Csv => report.csv(),
    };
    Ok((text, album))
}

/// Replays pods that come and end.
fn played(
    args: &SimulateArgs,
    experiment: &Experiment,
    times: Times,
    how: &str,
) -> Result<(String, Album), SimulateError> {
    let overflow = if args.times.queue { Overflow::Queued } else { Overflow::Lost };
    let results = experiment.timed(times, overflow, args.times.standing_hold_after)?;
    let album = Album::new(results.iter().map(|result| time_charts(result, overflow)));
    let report = TimedReport::new(experiment.title(how), results, overflow);
    let text = match args.output {
        Output::Table => report.table(),
        Output::Json => report.json(),
        Output::Csv => report.csv(),
    };
    Ok((text, album))
}

/// Makes the folder for charts; called before the replays.
///
/// # Errors
/// [`SimulateError::Folder`].
pub fn make_folder(charts: Option<&PathBuf>) -> Result<(), SimulateError> {
    if let Some(folder) = charts {
        let folder = folder.clone();
        fs::create_dir_all(&folder).map_err(|source| SimulateError::Folder { folder, source })?;
    }
    Ok(())
}

fn experiment(args: &SimulateArgs) -> Result<Experiment, SimulateError> {
    let mut policies = args.policies.clone();
    if policies.is_empty() {
        policies = DEFAULT_POLICIES.to_vec();
    }
    let mut named = BTreeSet::new();
    policies.retain(|policy| named.insert(policy.name));
    let mut experiment = args.trace.experiment(&args.run, policies, args.keep_placements)?;
    experiment.most_moves = usize::from(args.moves);
    experiment.order = if args.as_is { NodeOrder::AsIs } else { NodeOrder::Shuffled };
    Ok(experiment)
}
