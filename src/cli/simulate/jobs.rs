//! The replays of one call: traces × policies × seeds, on all cores.
//!
//! Replays are independent, so they run on all cores; each one stays on one core. The results do
//! not depend on which ends first.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{fs, io, thread};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;

use crate::cli::simulate::bound::SeedBounds;
use crate::clock::Clock;
use crate::ledger::change::reports::ReportRefusal;
use crate::sim::bound::upper_bound::{BoundError, Bounds, bounds};
use crate::sim::chart::draw::ChartError;
use crate::sim::run::engine::{Overflow, Run, TimedRun, replay, replay_timed};
use crate::sim::run::placed::PlacementFault;
use crate::sim::run::policy::SimPolicy;
use crate::sim::run::timeline::{Pace, timeline};
use crate::sim::snapshot::replace::ReplaceError;
use crate::sim::stress::worlds::{StressError, World};
use crate::sim::trace::churn::{NodeOrder, churn};
use crate::sim::trace::read::{TraceNode, TracePod};
use crate::sim::trace::table::TraceError;
use crate::sim::trace::workload::{Workload, WorkloadError, capacity_milli};

/// Steps of the progress bar per replay.
const STEPS: usize = 100;

/// The replays to run.
#[derive(Debug)]
pub(crate) struct Experiment {
    pub(crate) nodes: Vec<TraceNode>,
    pub(crate) traces: Vec<Trace>,
    pub(crate) policies: Vec<SimPolicy>,
    pub(crate) seeds: Vec<i64>,
    pub(crate) order: NodeOrder,
    /// Most moves of running pods for one that fits nowhere.
    pub(crate) most_moves: usize,
    /// Replays at a time; by default one per core.
    pub(crate) jobs: Option<NonZeroUsize>,
}

/// The pods of one file.
#[derive(Debug)]
pub(crate) struct Trace {
    /// Its name in tables.
    pub(crate) label: String,
    pub(crate) pods: Arc<Vec<TracePod>>,
    /// Pods that accept only GPU models which no node has.
    pub(crate) unknown_model_pods: usize,
    /// The stress world that is made of it.
    pub(crate) world: Option<World>,
}

/// When pods come, in replays with times.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Times {
    /// At random, so that they request this multiple of the cluster's GPUs on average.
    Churn(f64),
    /// At the times of the trace.
    Own(Pace),
}

/// The replays of one trace.
#[derive(Debug)]
pub(crate) struct Results<R> {
    /// Name of the trace in tables.
    pub(crate) trace: String,
    /// Its pods that accept only GPU models which no node has.
    pub(crate) unknown_model_pods: usize,
    /// The policies in the order of the flags, each with its replays in the order of the seeds.
    pub(crate) by_policy: Vec<(SimPolicy, Vec<Timed<R>>)>,
}

/// One replay with the time it took.
#[derive(Debug)]
pub(crate) struct Timed<R> {
    /// The result.
    pub(crate) run: R,
    /// CPU time of one core.
    pub(crate) time: Duration,
}

/// One replay to run.
struct Job<'e> {
    trace: &'e Trace,
    policy: SimPolicy,
    seed: i64,
}

impl<R> Results<R> {
    /// The replays of the policy with which others are compared, if it is among them.
    pub(crate) fn baseline(&self) -> Option<&[Timed<R>]> {
        let found = self.by_policy.iter().find(|(policy, _)| *policy == SimPolicy::Fgd);
        found.map(|(_, runs)| runs.as_slice())
    }
}

impl Experiment {
    /// The subject of the figures, in a line; `how` says when pods come. One more line for each
    /// trace with pods that cannot fit.
    pub(crate) fn title(&self, how: &str) -> String {
        let gpus = capacity_milli(&self.nodes) / 1000;
        let seeds = match self.seeds[..] {
            [first, .., last] => format!("seeds {first}..{last}"),
            _ => self.seeds.iter().map(|seed| format!("seed {seed}")).collect(),
        };
        let pods = match &self.traces[..] {
            [trace] => format!("{} pods", trace.pods.len()),
            traces => format!("{} traces", traces.len()),
        };
        let odd = self.traces.iter().filter(|trace| trace.unknown_model_pods > 0).map(|trace| {
            let (label, all, odd) = (&trace.label, trace.pods.len(), trace.unknown_model_pods);
            format!("\n{label}: {odd} of {all} pods accept only GPU models that no node has")
        });
        let odd: String = odd.collect();
        format!("{} nodes, {gpus} GPUs; {pods}, {how}, {seeds}{odd}", self.nodes.len())
    }

    /// Replays arrivals without times, up to `load` times the cluster, or the files as they are.
    pub(crate) fn arrivals(&self, load: Option<f64>) -> Result<Vec<Results<Run>>, SimulateError> {
        self.on_all_cores(&self.policies, |job, bar| {
            let workload = self.workload(job, load)?;
            let steps = bar.steps(workload.arrivals.len());
            Ok(replay(&workload, job.policy, job.seed, self.most_moves, steps)?)
        })
    }

    /// How much any policy could have allocated of the same arrivals, trace by trace.
    pub(crate) fn bounds(&self, load: Option<f64>) -> Result<Vec<SeedBounds>, SimulateError> {
        let results = self.on_all_cores(&[SimPolicy::Fgd], |job, bar| {
            let workload = self.workload(job, load)?;
            let steps = bar.steps(workload.arrivals.len());
            let baseline = replay(&workload, job.policy, job.seed, 0, steps)?;
            Ok((job.seed, bounds(&workload, baseline.first_lost)?))
        })?;
        let of_trace = |result: Results<(i64, Bounds)>| {
            let runs = result.by_policy.into_iter().flat_map(|(_, runs)| runs);
            SeedBounds(runs.map(|timed| timed.run).collect())
        };
        Ok(results.into_iter().map(of_trace).collect())
    }

    fn workload(&self, job: &Job<'_>, load: Option<f64>) -> Result<Workload, SimulateError> {
        if let Some(world) = &job.trace.world {
            return Ok(world.workload(&self.nodes, &job.trace.pods, job.seed)?);
        }
        let (nodes, pods) = (self.nodes.clone(), job.trace.pods.to_vec());
        Ok(match load {
            Some(load) => Workload::paper(nodes, pods, job.seed, load)?,
            None => Workload::as_is(nodes, pods),
        })
    }

    /// Replays pods that come and end.
    pub(crate) fn timed(
        &self,
        times: Times,
        overflow: Overflow,
        standing_after: Option<f64>,
    ) -> Result<Vec<Results<TimedRun>>, SimulateError> {
        self.on_all_cores(&self.policies, |job, bar| {
            let (nodes, pods) = (self.nodes.clone(), job.trace.pods.to_vec());
            let workload = match times {
                Times::Churn(load) => churn(nodes, pods, load, self.order, job.seed),
                Times::Own(pace) => timeline(nodes, pods, pace, self.order, job.seed),
            }?;
            let steps = bar.steps(workload.schedule.arrivals.len());
            let unit = workload.schedule.unit;
            let after = standing_after.map(|after| unit.to_ticks(after));
            let most = self.most_moves;
            Ok(replay_timed(&workload, job.policy, job.seed, overflow, (most, after), steps)?)
        })
    }

    /// Runs `work` for each trace, policy and seed.
    fn on_all_cores<R: Send>(
        &self,
        policies: &[SimPolicy],
        work: impl Fn(&Job<'_>, &Bar) -> Result<R, SimulateError> + Sync,
    ) -> Result<Vec<Results<R>>, SimulateError> {
        let mut jobs = Vec::new();
        for trace in &self.traces {
            for policy in policies {
                jobs.extend(self.seeds.iter().map(|seed| Job {
                    trace,
                    policy: *policy,
                    seed: *seed,
                }));
            }
        }
        let bar = Bar::new(jobs.len());
        let next = AtomicUsize::new(0);
        let done: Mutex<BTreeMap<usize, Result<Timed<R>, SimulateError>>> = Mutex::default();
        let worker = || {
            loop {
                let place = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(place) else { return };
                let started = ThreadTime::now();
                let result = work(job, &bar).map(|run| Timed { run, time: started.elapsed() });
                if result.is_err() {
                    next.store(jobs.len(), Ordering::Relaxed);
                }
                let mut done = done.lock();
                done.insert(place, result);
            }
        };
        let cores = self.jobs.or_else(|| thread::available_parallelism().ok());
        thread::scope(|scope| {
            for _ in 0..cores.map_or(1, NonZeroUsize::get).min(jobs.len()) {
                scope.spawn(worker);
            }
        });
        bar.0.finish_and_clear();
        let done = done.into_inner().into_values();
        Ok(self.grouped(policies, done.collect::<Result<Vec<Timed<R>>, SimulateError>>()?))
    }

    /// The replays by trace and policy; they are in the order of the jobs.
    fn grouped<R>(&self, policies: &[SimPolicy], done: Vec<Timed<R>>) -> Vec<Results<R>> {
        let mut done = done.into_iter();
        let mut results = Vec::new();
        for trace in &self.traces {
            let of = |policy: &SimPolicy| (*policy, done.by_ref().take(self.seeds.len()).collect());
            let by_policy = policies.iter().map(of).collect();
            results.push(Results {
                trace: trace.label.clone(),
                unknown_model_pods: trace.unknown_model_pods,
                by_policy,
            });
        }
        results
    }
}

/// Names of the traces for output: the file names without their common start up to its last `_`;
/// the paths if two names are the same.
pub(crate) fn labels(paths: &[PathBuf]) -> Vec<String> {
    let stem = |path: &PathBuf| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let stems: Vec<String> = paths.iter().map(stem).collect();
    if stems.iter().collect::<BTreeSet<_>>().len() < stems.len() {
        let whole = |path: &PathBuf| {
            let parts = path.iter().map(|part| part.to_string_lossy().replace('/', ""));
            parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
        };
        return paths.iter().map(whole).collect();
    }
    let [first, others @ ..] = &stems[..] else { return stems };
    let shared = |other: &String| {
        let same = first.char_indices().zip(other.chars());
        same.take_while(|((_, a), b)| a == b).last().map_or(0, |((at, a), _)| at + a.len_utf8())
    };
    let Some(shared) = others.iter().map(shared).min() else { return stems };
    let cut = first[..shared].rfind('_').map_or(0, |at| at + 1);
    stems.iter().map(|stem| stem[cut..].to_owned()).collect()
}

/// A bar on standard error with the remaining time; hidden if that is no terminal.
struct Bar(ProgressBar);

impl Bar {
    fn new(jobs: usize) -> Self {
        let steps = u64::try_from(jobs * STEPS).unwrap_or(u64::MAX);
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("replaying {wide_bar} {percent} % ETA {eta}");
        Self(bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    /// Returns a function that advances the bar; it takes the number of arrivals so far.
    fn steps(&self, arrivals: usize) -> impl FnMut(usize) {
        let steps = move |arrived: usize| arrived * STEPS / arrivals.max(1);
        move |arrived| {
            if steps(arrived) > steps(arrived - 1) {
                self.0.inc(u64::try_from(steps(arrived) - steps(arrived - 1)).unwrap_or(0));
            }
        }
    }
}

/// CPU time of this thread, where Linux reports it, otherwise elapsed time.
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
    #[error("cannot make a workload from these files")]
    Workload(#[from] WorkloadError),
    /// No stress world can be made of them.
    #[error("cannot make a stress world from these files")]
    Stress(#[from] StressError),
    /// A world that does not exist.
    #[error("--world: {0}")]
    World(String),
    /// A node that is not valid.
    #[error("cannot build the cluster of the node file")]
    Cluster(#[from] ReportRefusal),
    /// A pod that runs where nothing is.
    #[error("--keep-placements")]
    Placement(#[from] PlacementFault),
    /// A file about the end of a replay.
    #[error("cannot write the end of the replay")]
    End(#[from] ReplaceError),
    /// The same, as a table.
    #[error("cannot write the end of the replay")]
    Table(#[from] csv::Error),
    /// The folder of the chart does not exist.
    #[error("--chart needs an existing folder: `{}` is not one", .0.display())]
    NoFolder(PathBuf),
    /// The folder for charts cannot be created.
    #[error("--charts: cannot create the folder `{}`", .folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// One picture for several traces.
    #[error("--chart draws one trace: use --charts with a folder for several")]
    OneChart,
    /// One end for several traces.
    #[error("--write-pods and --write-free write the end of one trace: give --pods once")]
    OneEnd,
    /// Bursts of nothing.
    #[error("--bursts needs {0}")]
    NoBursts(&'static str),
    /// A trace cannot be compared with itself.
    #[error("--pods `{}` is given twice", .0.display())]
    Repeated(PathBuf),
    /// The bounds.
    #[error("--bound")]
    Bound(#[from] BoundError),
    /// The chart.
    #[error("--chart")]
    Chart(#[from] ChartError),
    /// Standard output.
    #[error("cannot write the result")]
    Output(#[from] io::Error),
}

/// The columns that the file must have, for one that seems to be another file altogether.
pub(crate) fn needs(error: &TraceError, columns: &str) -> String {
    match error {
        TraceError::MissingColumn(..) => format!(" needs a CSV file with the columns {columns}"),
        TraceError::Open(..) | TraceError::Read(..) | TraceError::Refused(..) => String::new(),
    }
}

impl SimulateError {
    /// Exit code of the program: 2 if the flags or an input file are wrong, otherwise 1.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Nodes(_)
            | Self::Pods(_)
            | Self::Workload(_)
            | Self::Placement(_)
            | Self::Stress(_)
            | Self::World(_)
            | Self::Cluster(_)
            | Self::NoFolder(_)
            | Self::OneChart
            | Self::OneEnd
            | Self::NoBursts(_)
            | Self::Repeated(_)
            | Self::Bound(BoundError::NoSolver | BoundError::Dimensions { .. }) => 2,
            Self::Bound(BoundError::Forced { .. } | BoundError::Unsolved { .. })
            | Self::Folder { .. }
            | Self::Chart(_)
            | Self::End(_)
            | Self::Table(_)
            | Self::Output(_) => 1,
        }
    }
}
