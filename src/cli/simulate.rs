//! `gpupack simulate`: replays a trace under several policies and seeds, and compares them.
//!
//! Replays are independent, so they run on all cores; each one stays on one core. The output does not
//! depend on which ends first. Standard output carries the result and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::simulate_bound::SeedBounds;
use super::simulate_report::{Report, Timed};
use crate::clock::Clock;
use crate::ledger::reports::ReportRefusal;
use crate::packing::policy::Policy;
use crate::sim::bound::{BoundError, bounds};
use crate::sim::chart::{self, ChartError};
use crate::sim::engine::replay;
use crate::sim::policy::SimPolicy;
use crate::sim::trace::{TraceError, TraceNode, TracePod, read_nodes, read_pods};
use crate::sim::workload::{Workload, WorkloadError, capacity_milli};

/// Most seeds of one call; a typing error should not run for a day.
const SEEDS_MAX: u64 = 10_000;

/// Steps of the progress bar per replay.
const STEPS: usize = 100;

/// What is compared when no policy is named: ours, the paper's, and the best rule before it.
const DEFAULT_POLICIES: [SimPolicy; 3] =
    [SimPolicy::Product(Policy::Fragmentation), SimPolicy::Fgd, SimPolicy::BestFit];

/// Flags of `gpupack simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// Node file of the trace (CSV: sn, cpu_milli, memory_mib, gpu, model).
    #[arg(long, value_name = "FILE")]
    pub nodes: PathBuf,

    /// Pod file of the trace (CSV: name, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec).
    #[arg(long, value_name = "FILE")]
    pub pods: PathBuf,

    /// Policy to replay; give it again to compare several [default: fragmentation, fgd, bestfit].
    #[arg(long = "policy", value_name = "POLICY", value_delimiter = ',', value_parser = policies())]
    pub policies: Vec<SimPolicy>,

    /// Seed of the arrival order and of node ranks.
    #[arg(long, default_value_t = 42, conflicts_with = "seeds", allow_negative_numbers = true)]
    pub seed: i64,

    /// Several seeds, first and last one; figures are means over them.
    #[arg(long, value_name = "FIRST..LAST", allow_hyphen_values = true)]
    pub seeds: Option<Seeds>,

    /// Arrivals to replay, as a multiple of the cluster's GPUs: pods are repeated or left out at
    /// random to reach it.
    #[arg(long, default_value_t = 1.3, allow_negative_numbers = true)]
    pub load: f64,

    /// Take the files at their word: pods arrive in the order of their rows, the upper node wins a
    /// tie, nothing is shuffled, repeated or left out, whatever the load; the seed is for `random`.
    #[arg(long)]
    pub as_is: bool,

    /// Also tell how much any policy could have allocated; needs a build with `--features bound`.
    #[arg(long)]
    pub bound: bool,

    /// Form of the result on standard output.
    #[arg(long, value_enum, default_value_t = Output::Table)]
    pub output: Output,

    /// Also draw allocation and fragmentation against arrived load into this SVG file.
    #[arg(long, value_name = "FILE")]
    pub chart: Option<PathBuf>,
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

fn policies() -> impl TypedValueParser<Value = SimPolicy> {
    PossibleValuesParser::new(SimPolicy::ALL.map(SimPolicy::name))
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
            return Err("the first seed is larger than the last one".to_owned());
        }
        if last.abs_diff(first) >= SEEDS_MAX {
            return Err(format!("these are more than {SEEDS_MAX} seeds"));
        }
        Ok(Self(first..=last))
    }
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// The node file.
    #[error("--nodes{}", needs(.0, "sn, cpu_milli, memory_mib, gpu, model"))]
    Nodes(#[source] TraceError),
    /// The pod file.
    #[error("--pods{}", needs(.0, "name, cpu_milli, memory_mib, num_gpu, gpu_milli"))]
    Pods(#[source] TraceError),
    /// No workload can be made of the two.
    #[error("cannot make a workload of these files")]
    Workload(#[from] WorkloadError),
    /// A node that is not believed.
    #[error("cannot build the cluster of the node file")]
    Cluster(#[from] ReportRefusal),
    /// The bounds.
    #[error("--bound")]
    Bound(#[from] BoundError),
    /// The chart cannot be written where it should be.
    #[error("--chart needs an existing folder: `{}` is none", .0.display())]
    NoFolder(PathBuf),
    /// The chart.
    #[error("--chart")]
    Chart(#[from] ChartError),
    /// Standard output.
    #[error("cannot write the result")]
    Output(#[from] io::Error),
}

/// What the file must be, for one that seems to be another file altogether.
fn needs(error: &TraceError, columns: &str) -> String {
    match error {
        TraceError::MissingColumn { .. } => format!(" needs a CSV file with the columns {columns}"),
        TraceError::Open { .. }
        | TraceError::Read { .. }
        | TraceError::Empty { .. }
        | TraceError::TooLarge { .. }
        | TraceError::RepeatedColumn { .. }
        | TraceError::RowLength { .. }
        | TraceError::Value { .. }
        | TraceError::RepeatedName { .. } => String::new(),
    }
}

impl SimulateError {
    /// Exit code of the program: 2 where the call or a file handed in is at fault, else 1.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Nodes(_)
            | Self::Pods(_)
            | Self::Workload(_)
            | Self::Cluster(_)
            | Self::NoFolder(_)
            | Self::Bound(BoundError::NoSolver) => 2,
            Self::Bound(BoundError::Forced { .. } | BoundError::Unsolved { .. })
            | Self::Chart(_)
            | Self::Output(_) => 1,
        }
    }
}

/// Runs `gpupack simulate`.
///
/// # Errors
/// [`SimulateError`]. A reader that closes standard output early is not one.
pub fn run(args: &SimulateArgs) -> Result<(), SimulateError> {
    if let Some(path) = &args.chart {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
            return Err(SimulateError::NoFolder(folder.to_owned()));
        }
    }
    let experiment = Experiment::of(args)?;
    let bounds = if args.bound { experiment.bounds()? } else { SeedBounds::default() };
    let report = Report::new(experiment.title(), experiment.replays()?, bounds);
    if let Some(path) = &args.chart {
        chart::write_svg(path, &report.charts())?;
    }
    let text = match args.output {
        Output::Table => report.table(),
        Output::Json => report.json(),
        Output::Csv => report.csv(),
    };
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

/// What is to be replayed.
struct Experiment {
    nodes: Vec<TraceNode>,
    pods: Vec<TracePod>,
    policies: Vec<SimPolicy>,
    seeds: Vec<i64>,
    /// None to take the files as they are.
    load: Option<f64>,
}

impl Experiment {
    fn of(args: &SimulateArgs) -> Result<Self, SimulateError> {
        let mut policies = args.policies.clone();
        if policies.is_empty() {
            policies = DEFAULT_POLICIES.to_vec();
        }
        let mut named = BTreeSet::new();
        policies.retain(|policy| named.insert(*policy));
        Ok(Self {
            nodes: read_nodes(&args.nodes).map_err(SimulateError::Nodes)?,
            pods: read_pods(&args.pods).map_err(SimulateError::Pods)?,
            policies,
            seeds: args.seeds.clone().map_or(vec![args.seed], |seeds| seeds.0.collect()),
            load: (!args.as_is).then_some(args.load),
        })
    }

    /// One line that says what the figures are of.
    fn title(&self) -> String {
        let gpus = capacity_milli(&self.nodes) / 1000;
        let seeds = match self.seeds[..] {
            [first, .., last] => format!("seeds {first}..{last}"),
            _ => self.seeds.iter().map(|seed| format!("seed {seed}")).collect(),
        };
        let load = match self.load {
            Some(load) => format!("load {load}"),
            None => "as is".to_owned(),
        };
        let (nodes, pods) = (self.nodes.len(), self.pods.len());
        format!("{nodes} nodes, {gpus} GPUs; {pods} pods, {load}, {seeds}")
    }

    fn workload(&self, seed: i64) -> Result<Workload, WorkloadError> {
        let (nodes, pods) = (self.nodes.clone(), self.pods.clone());
        match self.load {
            Some(load) => Workload::paper(nodes, pods, seed, load),
            None => Ok(Workload::as_is(nodes, pods)),
        }
    }

    /// All replays, policy by policy and in the order of the seeds.
    fn replays(&self) -> Result<Vec<Timed>, SimulateError> {
        let jobs: Vec<(SimPolicy, i64)> = self
            .policies
            .iter()
            .flat_map(|policy| self.seeds.iter().map(|seed| (*policy, *seed)))
            .collect();
        let bar = progress_bar(jobs.len());
        let next = AtomicUsize::new(0);
        let done: Mutex<BTreeMap<usize, Result<Timed, SimulateError>>> = Mutex::default();
        let work = || {
            loop {
                let place = next.fetch_add(1, Ordering::Relaxed);
                let Some((policy, seed)) = jobs.get(place) else { return };
                let result = self.replay(*policy, *seed, &bar);
                if result.is_err() {
                    next.store(jobs.len(), Ordering::Relaxed);
                }
                let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                done.insert(place, result);
            }
        };
        let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        thread::scope(|scope| {
            for _ in 0..cores.min(jobs.len()) {
                scope.spawn(work);
            }
        });
        bar.finish_and_clear();
        done.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
    }

    /// The bounds of each seed, one after the other.
    fn bounds(&self) -> Result<SeedBounds, SimulateError> {
        let of_seed = |seed: &i64| {
            let workload = self.workload(*seed)?;
            let baseline = replay(&workload, SimPolicy::Fgd, *seed, |_| {})?;
            Ok((*seed, bounds(&workload, baseline.first_lost)?))
        };
        self.seeds.iter().map(of_seed).collect::<Result<_, SimulateError>>().map(SeedBounds)
    }

    fn replay(
        &self,
        policy: SimPolicy,
        seed: i64,
        bar: &ProgressBar,
    ) -> Result<Timed, SimulateError> {
        let started = ThreadTime::now();
        let workload = self.workload(seed)?;
        let arrivals = workload.arrivals.len().max(1);
        let run = replay(&workload, policy, seed, |arrived| {
            let steps = |arrived: usize| arrived * STEPS / arrivals;
            if steps(arrived) > steps(arrived - 1) {
                bar.inc(u64::try_from(steps(arrived) - steps(arrived - 1)).unwrap_or(0));
            }
        })?;
        Ok(Timed { run, time: started.elapsed() })
    }
}

/// A bar on standard error with the time that is left; hidden where that is no terminal.
fn progress_bar(jobs: usize) -> ProgressBar {
    let steps = u64::try_from(jobs * STEPS).unwrap_or(u64::MAX);
    let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("replaying {wide_bar} {percent} % ETA {eta}");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Time that this thread has run on a core, where Linux says so; else time that has passed.
struct ThreadTime {
    on_core: Option<Duration>,
    passed: Clock,
}

impl ThreadTime {
    fn now() -> Self {
        Self { on_core: on_core(), passed: Clock::start() }
    }

    fn elapsed(&self) -> Duration {
        match (self.on_core, on_core()) {
            (Some(before), Some(now)) => now.saturating_sub(before),
            _ => self.passed.precise(),
        }
    }
}

/// The first number of `/proc/thread-self/schedstat`: nanoseconds on a core.
fn on_core() -> Option<Duration> {
    let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanoseconds = text.split_whitespace().next()?.parse().ok()?;
    (nanoseconds > 0).then(|| Duration::from_nanos(nanoseconds))
}
