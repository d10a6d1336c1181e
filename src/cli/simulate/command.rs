//! `gpupack simulate`: replays a trace under several policies and seeds, and compares them.
//!
//! Flags select one of three experiments and one of three forms of the result. Standard output gets
//! the result and nothing else.

use std::collections::BTreeSet;
use std::io::Write;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::{fs, io};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args, ValueEnum};

use crate::cli::simulate::charts::{Album, load_charts, time_charts};
use crate::cli::simulate::ends;
use crate::cli::simulate::jobs::{Experiment, SimulateError, Times, Trace, labels};
use crate::cli::simulate::report::Report;
use crate::cli::simulate::stress::{STRESS_POLICIES, stress, worlds_of};
use crate::cli::simulate::timed::TimedReport;
use crate::model::policy::Policy;
use crate::sim::bursts::compare::{Source, compare};
use crate::sim::chart::draw;
use crate::sim::mig::compare::compare as compare_mig;
use crate::sim::mig::policy::MigPolicy;
use crate::sim::mig::series::{Bounds, Comparing};
use crate::sim::mig::worlds::World;
use crate::sim::run::engine::Overflow;
use crate::sim::run::placed::keep_placements;
use crate::sim::run::policy::SimPolicy;
use crate::sim::run::timeline::{Pace, timeline};
use crate::sim::trace::churn::NodeOrder;
use crate::sim::trace::read::{TracePod, pods_of_unknown_models, read_nodes, read_pods, size_up};

/// Most seeds of one call; a typing error should not run for a day.
const SEEDS_MAX: u64 = 10_000;

/// Load of arrivals without times, by default: as in the paper.
const ARRIVED_LOAD: f64 = 1.3;

/// The default policies: ours, the paper's, and the best rule before it.
const DEFAULT_POLICIES: [SimPolicy; 3] =
    [SimPolicy::Product(Policy::Fragmentation), SimPolicy::Fgd, SimPolicy::BestFit];

/// Flags of `gpupack simulate`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("times").args(["churn", "timeline"]))]
#[command(group = ArgGroup::new("drawn").args(["chart", "charts"]))]
pub struct SimulateArgs {
    /// Node file of the trace (CSV: sn, cpu_milli, memory_mib, gpu, model). Optional: memory, models
    /// and MIG instances of GPUs, slots and other rules of a pool; see docs/simulator.md.
    #[arg(
        long,
        value_name = "FILE",
        required_unless_present_any = ["bursts", "mig"],
        requires = "pods"
    )]
    pub nodes: Option<PathBuf>,

    /// Pod file of the trace (CSV: name, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec); give
    /// it again to compare on several. Optional: GPU memory, MIG profile, slot, limit, isolation,
    /// policy, priority, times, and where pods run; see docs/simulator.md.
    #[arg(
        long,
        value_name = "FILE",
        required_unless_present_any = ["bursts", "mig"],
        requires = "nodes"
    )]
    pub pods: Vec<PathBuf>,

    /// Pods that use more than they request now and then, under each rule of `borrow`, requesting this
    /// part of the GPUs on average. With a trace: its pods with bursts at its own times, with LOAD
    /// faster or slower. Without one: drawn pods on 64 GPUs. See docs/simulator.md.
    #[arg(
        long,
        value_name = "LOAD",
        num_args = 0..=1,
        conflicts_with_all = ["policies", "times", "stress", "drawn", "load", "as_is", "bound", "moves"],
        value_parser = burst_load
    )]
    pub bursts: Option<Option<f64>>,

    /// Without a trace: requests of these mixes for MIG instances that are made on demand, under several
    /// policies: `all` nine mixes, or names; see docs/simulator.md.
    #[arg(
        long,
        value_name = "MIX",
        value_delimiter = ',',
        conflicts_with_all = ["nodes", "pods", "policies", "times", "stress", "drawn", "load", "bursts"],
        value_parser = mixes
    )]
    pub mig: Vec<Mixes>,

    /// GPUs for --mig.
    #[arg(
        long,
        value_name = "N",
        default_value = "100",
        requires = "mig",
        conflicts_with_all = ["nodes", "pods"]
    )]
    pub gpus: NonZeroUsize,

    /// With --mig: let instances end, so that requests are this part of what the GPUs can hold at best;
    /// without it none ends.
    #[arg(
        long,
        value_name = "LOAD",
        requires = "mig",
        conflicts_with_all = ["nodes", "pods"],
        value_parser = mig_load
    )]
    pub mig_churn: Option<f64>,

    /// Policy to replay; give it again to compare several [default: fragmentation, fgd, bestfit].
    /// `known-mix` is fragmentation with the mix known beforehand, `without-PART` one without a
    /// part of it: residuals, residual-prices, doubt, opening, host, pieces, several, kept-nodes, whole-nodes,
    /// scarce or rare.
    #[arg(long = "policy", value_name = "POLICY", value_delimiter = ',', value_parser = policies())]
    pub policies: Vec<SimPolicy>,

    /// Seed of the arrival order and of the node order.
    #[arg(long, default_value_t = 42, conflicts_with = "seeds", allow_negative_numbers = true)]
    pub seed: i64,

    /// Several seeds, first and last one; figures are means over them.
    #[arg(long, value_name = "FIRST..LAST", allow_hyphen_values = true)]
    pub seeds: Option<Seeds>,

    /// Arrivals to replay, as a multiple of the cluster's GPUs: pods are repeated or left out at
    /// random to reach it [default: 1.3]. With --timeline: the mean demand of pods; the trace is
    /// run faster or slower to reach it.
    #[arg(long, allow_negative_numbers = true, conflicts_with_all = ["churn", "compress"])]
    pub load: Option<f64>,

    /// Use the files as they are: pods arrive in the order of their rows, the upper node wins a
    /// tie, nothing is shuffled, repeated or left out, whatever the load; the seed is for `random`.
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

    /// Let pods drawn from the trace come and end at random times, so that they request this
    /// multiple of the cluster's GPUs on average; three mean lifetimes are measured after one.
    #[arg(long, value_name = "LOAD", allow_negative_numbers = true)]
    pub churn: Option<f64>,

    /// Let pods come and end at the trace's own times.
    #[arg(long)]
    pub timeline: bool,

    /// Let them come faster by this factor; they stay as long as in the trace.
    #[arg(
        long,
        value_name = "FACTOR",
        default_value_t = 1.0,
        requires = "timeline",
        allow_negative_numbers = true
    )]
    pub compress: f64,

    /// With times: a pod that fits nowhere waits until it does; without this flag it is lost.
    #[arg(long, requires = "times")]
    pub queue: bool,

    /// Keep room for the first waiting pod once it has waited so long, in mean lifetimes under churn, else
    /// in seconds: a standing hold.
    #[arg(
        long,
        value_name = "TIME",
        requires = "queue",
        allow_negative_numbers = true,
        value_parser = time
    )]
    pub standing_hold_after: Option<f64>,

    /// Move at most this many running pods, 1 to 3, for one that fits nowhere.
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub moves: u8,

    /// Replay stress worlds made from the trace: mixes that change while the cluster fills, small
    /// and half-empty fleets, other orders and sizes. The first policy is compared with the best of
    /// the others [default: fragmentation, fgd, bestfit, binpack, known-mix].
    #[arg(long, conflicts_with_all = ["times", "load", "as_is", "bound", "chart", "moves"])]
    pub stress: bool,

    /// Only worlds of this name, or whose names begin so; give it again for more.
    #[arg(long = "world", value_name = "NAME", value_delimiter = ',', requires = "stress")]
    pub worlds: Vec<String>,

    /// Replays at a time [default: one per core].
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,

    /// Also print how much any policy could have allocated; needs a build with `--features bound`.
    #[arg(long, conflicts_with = "times")]
    pub bound: bool,

    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    pub output: Output,

    /// Also draw the results of one trace into this SVG file.
    #[arg(long, value_name = "FILE")]
    pub chart: Option<PathBuf>,

    /// Also draw the results of each trace into SVG files in this folder, with the points as JSON.
    #[arg(long, value_name = "FOLDER")]
    pub charts: Option<PathBuf>,
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
fn time(text: &str) -> Result<f64, String> {
    let time = text.parse::<f64>().ok().filter(|time| (0.0..1e9).contains(time));
    time.ok_or_else(|| "expected a number from 0 to 1,000,000,000".to_owned())
}

fn policies() -> impl TypedValueParser<Value = SimPolicy> {
    let shown = SimPolicy::ALL.map(|policy| PossibleValue::new(policy.name()));
    let parts = SimPolicy::ABLATIONS.map(|policy| PossibleValue::new(policy.name()).hide(true));
    PossibleValuesParser::new(shown.into_iter().chain(parts))
        .try_map(|name| SimPolicy::from_str(&name))
}

/// Seeds from the first to the last, both included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seeds(pub RangeInclusive<i64>);

impl FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let seed = |part: &str| part.parse::<i64>().ok();
        let ends = text.split_once("..").unwrap_or((text, text));
        let (Some(first), Some(last)) = (seed(ends.0), seed(ends.1)) else {
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

/// Runs `gpupack simulate`.
///
/// # Errors
/// [`SimulateError`]. A reader that closes standard output early is not one.
pub fn run(args: &SimulateArgs) -> Result<(), SimulateError> {
    if let Some(load) = args.bursts {
        return bursts(args, load);
    }
    if !args.mig.is_empty() {
        return mig(args);
    }
    check_places(args)?;
    let worlds = worlds_of(&args.worlds).map_err(SimulateError::World)?;
    let experiment = experiment(args)?;
    if args.stress {
        let (report, album) = stress(experiment, &worlds)?;
        if let Some(folder) = &args.charts {
            album.write(folder)?;
        }
        return print(&match args.output {
            Output::Table => report.table(),
            Output::Json => report.json(),
            Output::Csv => report.csv(),
        });
    }
    let overflow = if args.queue { Overflow::Queued } else { Overflow::Lost };
    let (text, album) = match (args.churn, args.timeline) {
        (Some(load), _) => {
            let how = format!("churn at load {load}");
            played(args, &experiment, Times::Churn(load), overflow, &how)?
        }
        (None, true) => {
            let pace = args.load.map_or(Pace::Compress(args.compress), Pace::Load);
            let how = match pace {
                Pace::Compress(factor) => format!("own times, {factor} times as fast"),
                Pace::Load(load) => format!("own times at load {load}"),
            };
            played(args, &experiment, Times::Own(pace), overflow, &how)?
        }
        (None, false) => arrived(args, &experiment)?,
    };
    ends::write(&experiment, (args.write_pods.as_deref(), args.write_free.as_deref()))?;
    if let Some(path) = &args.chart {
        draw::write_svg(path, &album.all())?;
    }
    if let Some(folder) = &args.charts {
        album.write(folder)?;
    }
    print(&text)
}

/// Plays the scenario of bursts.
fn bursts(args: &SimulateArgs, load: Option<f64>) -> Result<(), SimulateError> {
    let seeds = args.seeds.clone().map_or(args.seed..=args.seed, |Seeds(seeds)| seeds);
    let seeds = seeds.start().unsigned_abs()..=seeds.end().unsigned_abs();
    let cores = args.jobs.or_else(|| std::thread::available_parallelism().ok());
    let cores = cores.unwrap_or(NonZeroUsize::MIN);
    let comparison = match (&args.nodes, &args.pods[..], load) {
        (None, _, Some(load)) => compare(&Source::Drawn(load), seeds, cores)?,
        (None, _, None) => return Err(SimulateError::NoBursts("LOAD, or --nodes and --pods")),
        (Some(nodes), [path], _) => {
            let nodes = read_nodes(nodes).map_err(SimulateError::Nodes)?;
            let mut pods = read_pods(path).map_err(SimulateError::Pods)?;
            size_up(&nodes, &mut pods);
            pods.iter_mut().for_each(|pod| pod.place(None));
            let has_bursts =
                |pod: &TracePod| pod.more.as_ref().is_some_and(|it| it.bursts.is_some());
            if !pods.iter().any(has_bursts) {
                return Err(SimulateError::NoBursts("a pod with `burst_gap_seconds` in --pods"));
            }
            let pace = load.map_or(Pace::Compress(1.0), Pace::Load);
            let workload = timeline(nodes, pods, pace, NodeOrder::AsIs, 0)?;
            let label = labels(std::slice::from_ref(path)).concat();
            compare(&Source::Traced(&label, &workload), seeds, cores)?
        }
        (Some(_), _, _) => return Err(SimulateError::NoBursts("one trace: give --pods once")),
    };
    print(&match args.output {
        Output::Table => comparison.table(),
        Output::Json => comparison.json(),
        Output::Csv => comparison.csv(),
    })
}

/// Plays requests for MIG instances.
fn mig(args: &SimulateArgs) -> Result<(), SimulateError> {
    let seeds = args.seeds.clone().map_or(args.seed..=args.seed, |Seeds(seeds)| seeds);
    let worlds: Vec<World> = args.mig.iter().flat_map(|Mixes(worlds)| worlds.clone()).collect();
    let cores = args.jobs.or_else(|| std::thread::available_parallelism().ok());
    let is_moved = |policy: &MigPolicy| *policy == MigPolicy::OursWithMove;
    let mut policies = MigPolicy::ALL.to_vec();
    // a move makes room for requests only where they are lost
    policies.retain(|policy| !is_moved(policy) || args.moves > 0);
    let comparison = compare_mig(Comparing {
        worlds,
        gpus: args.gpus,
        load: args.mig_churn,
        seeds: seeds.start().unsigned_abs()..=seeds.end().unsigned_abs(),
        policies,
        bounds: if args.bound { Bounds::All } else { Bounds::None },
        jobs: cores.unwrap_or(NonZeroUsize::MIN),
    });
    print(&match args.output {
        Output::Table => comparison.table(),
        Output::Json => comparison.json(),
        Output::Csv => comparison.csv(),
    })
}

/// One value of `--mig`: a world, or all mixes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mixes(Vec<World>);

fn mixes(name: &str) -> Result<Mixes, String> {
    match name {
        "all" => Ok(Mixes(World::mixes())),
        name => name.parse().map(|world| Mixes(vec![world])),
    }
}

/// A part of what GPUs can hold at best.
fn mig_load(text: &str) -> Result<f64, String> {
    let load = text.parse::<f64>().ok().filter(|load| (0.05..=2.0).contains(load));
    load.ok_or_else(|| "it must be a number from 0.05 to 2".to_owned())
}

/// A part of the fleet that pods can request on average.
fn burst_load(text: &str) -> Result<f64, String> {
    let load = text.parse::<f64>().ok().filter(|load| (0.05..=0.95).contains(load));
    load.ok_or_else(|| "it must be a number from 0.05 to 0.95".to_owned())
}

fn print(text: &str) -> Result<(), SimulateError> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

/// Replays arrivals without times.
fn arrived(args: &SimulateArgs, experiment: &Experiment) -> Result<(String, Album), SimulateError> {
    let load = (!args.as_is).then(|| args.load.unwrap_or(ARRIVED_LOAD));
    let how = load.map_or_else(|| "as is".to_owned(), |load| format!("load {load}"));
    let results = experiment.arrivals(load)?;
    let album = Album::new(results.iter().map(load_charts));
    let bounds = if args.bound { experiment.bounds(load)? } else { Vec::new() };
    let report = Report::new(experiment.title(&how), results, bounds);
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
    overflow: Overflow,
    how: &str,
) -> Result<(String, Album), SimulateError> {
    let results = experiment.timed(times, overflow, args.standing_hold_after)?;
    let album = Album::new(results.iter().map(|result| time_charts(result, overflow)));
    let report = TimedReport::new(experiment.title(how), results, overflow);
    let text = match args.output {
        Output::Table => report.table(),
        Output::Json => report.json(),
        Output::Csv => report.csv(),
    };
    Ok((text, album))
}

/// Whether charts can be written to their paths; checked before the replays.
fn check_places(args: &SimulateArgs) -> Result<(), SimulateError> {
    if let Some(path) = &args.chart {
        if args.pods.len() > 1 {
            return Err(SimulateError::OneChart);
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            return Err(SimulateError::NoFolder(folder.to_owned()));
        }
    }
    if let Some(folder) = &args.charts {
        let folder = folder.clone();
        fs::create_dir_all(&folder).map_err(|source| SimulateError::Folder { folder, source })?;
    }
    Ok(())
}

fn experiment(args: &SimulateArgs) -> Result<Experiment, SimulateError> {
    let mut policies = args.policies.clone();
    if policies.is_empty() {
        policies = if args.stress { STRESS_POLICIES.to_vec() } else { DEFAULT_POLICIES.to_vec() };
    }
    let mut named = BTreeSet::new();
    policies.retain(|policy| named.insert(*policy));
    let mut known = BTreeSet::new();
    if let Some(path) = args.pods.iter().find(|path| !known.insert(path.as_path())) {
        return Err(SimulateError::Repeated(path.clone()));
    }
    let nodes = args.nodes.as_deref().unwrap_or(Path::new(""));
    let nodes = read_nodes(nodes).map_err(SimulateError::Nodes)?;
    let trace = |(path, label): (&PathBuf, String)| {
        let mut pods = read_pods(path).map_err(SimulateError::Pods)?;
        size_up(&nodes, &mut pods);
        match args.keep_placements {
            true => keep_placements(&nodes, &mut pods)?,
            false => pods.iter_mut().for_each(|pod| pod.place(None)),
        }
        let unknown_model_pods = pods_of_unknown_models(&nodes, &pods);
        Ok(Trace { label, pods: Arc::new(pods), unknown_model_pods, world: None })
    };
    let traces = args.pods.iter().zip(labels(&args.pods)).map(trace);
    let traces = traces.collect::<Result<_, SimulateError>>()?;
    Ok(Experiment {
        nodes,
        traces,
        policies,
        seeds: args.seeds.clone().map_or(vec![args.seed], |seeds| seeds.0.collect()),
        most_moves: usize::from(args.moves),
        order: if args.as_is { NodeOrder::AsIs } else { NodeOrder::Shuffled },
        jobs: args.jobs,
    })
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
