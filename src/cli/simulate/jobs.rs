//! The replays of one call: traces × policies × seeds, on all cores.
//!
//! Replays are independent, so they run on all cores; each one stays on one core. The results do
//! not depend on which ends first.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{fs, io, thread};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;

use engine::ledger::change::reports::ReportRefusal;
use runtime::clock::Clock;
use sim::chart::draw::ChartError;
use sim::run::placed::PlacementFault;
use sim::run::policy::SimPolicy;
use sim::run::replay::{Overflow, ReplayRules, Run, TimedRun, replay, replay_timed};
use sim::run::timeline::{Pace, timeline};
use sim::snapshot::replace::ReplaceError;
use sim::trace::churn::{NodeOrder, churn};
use sim::trace::read::{TraceNode, TracePod};
use sim::trace::schedule::TimedWorkload;
use sim::trace::table::TraceError;
use sim::trace::workload::{Workload, WorkloadError, capacity_milli};

/// Steps of the progress bar per replay.
const STEPS: usize = 100;

/// The replays to run.
#[derive(Debug)]
pub struct Experiment {
    pub nodes: Vec<TraceNode>,
    /// The pods of each trace.
    pub traces: Vec<Trace>,
    pub policies: Vec<SimPolicy>,
    pub seeds: Vec<i64>,
    /// Which of equal nodes comes first, in replays with times.
    pub order: NodeOrder,
    /// Most moves of running pods for one that fits nowhere.
    pub most_moves: usize,
    /// Replays at a time; by default one per core.
    pub jobs: Option<NonZeroUsize>,
}

/// The pods of one file.
#[derive(Debug)]
pub struct Trace {
    pub label: String,
    /// In the order of its rows.
    pub pods: Vec<TracePod>,
    /// Pods that accept only GPU models which no node has.
    pub unknown_model_pods: usize,
}

impl Trace {
    /// A world of this name that is made from this one of `of` traces. Its pods are drawn when it is played.
    #[must_use]
    pub fn world(&self, name: &str, of: usize) -> Self {
        let label = if of == 1 { name.to_owned() } else { format!("{} {name}", self.label) };
        Self { label, pods: Vec::new(), unknown_model_pods: 0 }
    }
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
pub struct Results<R> {
    /// Name of the trace in tables.
    pub trace: String,
    /// Its pods that accept only GPU models which no node has.
    pub unknown_model_pods: usize,
    /// The policies by name, in the order of the flags, each with its replays in the order of the seeds.
    pub by_policy: Vec<(&'static str, Vec<Timed<R>>)>,
}

/// One replay with the time it took.
#[derive(Debug)]
pub struct Timed<R> {
    pub run: R,
    /// CPU time of one core.
    pub time: Duration,
}

/// One replay to run.
struct Job {
    trace: usize,
    policy: SimPolicy,
    seed: i64,
}

impl<R> Results<R> {
    /// The replays of the policy with which others are compared, if it is among them.
    pub(crate) fn baseline(&self) -> Option<&[Timed<R>]> {
        let found = self.by_policy.iter().find(|(policy, _)| *policy == SimPolicy::FGD.name);
        found.map(|(_, runs)| runs.as_slice())
    }
}

impl Experiment {
    /// The subject of the figures, in a line; `how` says when pods come. One more line for each
    /// trace with pods that cannot fit.
    pub fn title(&self, how: &str) -> String {
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
    ///
    /// # Errors
    /// What is wrong with nodes, pods or load.
    pub fn arrivals(&self, load: Option<f64>) -> Result<Vec<Results<Run>>, SimulateError> {
        self.replays(|trace, seed| Ok(self.workload(trace, load, seed)?))
    }

    /// The arrivals of the trace at this position.
    ///
    /// # Errors
    /// [`WorkloadError`].
    pub fn workload(
        &self,
        trace: usize,
        load: Option<f64>,
        seed: i64,
    ) -> Result<Workload, WorkloadError> {
        let (nodes, pods) = (self.nodes.clone(), self.traces[trace].pods.clone());
        match load {
            Some(load) => Workload::paper(nodes, pods, seed, load),
            None => Ok(Workload::as_is(nodes, pods)),
        }
    }

    /// Replays what `workload` makes of the trace at a position, and of a seed.
    ///
    /// # Errors
    /// Of `workload`, or a node that is not valid.
    pub fn replays<E: From<ReportRefusal> + Send>(
        &self,
        workload: impl Fn(usize, i64) -> Result<Workload, E> + Sync,
    ) -> Result<Vec<Results<Run>>, E> {
        self.each(|job, bar| {
            let workload = workload(job.trace, job.seed)?;
            let steps = bar.steps(workload.arrivals.len());
            Ok(replay(&workload, job.policy, job.seed, self.most_moves, steps)?)
        })
    }

    /// Replays pods that come and end.
    pub(crate) fn timed(
        &self,
        times: Times,
        overflow: Overflow,
        standing_after: Option<f64>,
    ) -> Result<Vec<Results<TimedRun>>, SimulateError> {
        self.timed_replays(overflow, standing_after, |trace, seed| {
            let (nodes, pods) = (self.nodes.clone(), self.traces[trace].pods.clone());
            Ok(match times {
                Times::Churn(load) => churn(nodes, pods, load, self.order, seed),
                Times::Own(pace) => timeline(nodes, pods, pace, self.order, seed),
            }?)
        })
    }

    /// Replays what `workload` makes of the trace at a position, and of a seed, at its times.
    ///
    /// # Errors
    /// Of `workload`, or a node that is not valid.
    pub fn timed_replays<E: From<ReportRefusal> + Send>(
        &self,
        overflow: Overflow,
        standing_after: Option<f64>,
        workload: impl Fn(usize, i64) -> Result<TimedWorkload, E> + Sync,
    ) -> Result<Vec<Results<TimedRun>>, E> {
        self.each(|job, bar| {
            let workload = workload(job.trace, job.seed)?;
            let steps = bar.steps(workload.schedule.arrivals.len());
            let unit = workload.schedule.unit;
            let after = standing_after.map(|after| unit.to_ticks(after));
            let rules =
                ReplayRules { overflow, most_moves: self.most_moves, standing_after: after };
            Ok(replay_timed(&workload, job.policy, job.seed, rules, steps)?)
        })
    }

    /// Runs `work` for each trace, policy and seed.
    fn each<R: Send, E: Send>(
        &self,
        work: impl Fn(&Job, &Bar) -> Result<R, E> + Sync,
    ) -> Result<Vec<Results<R>>, E> {
        let mut jobs = Vec::new();
        for trace in 0..self.traces.len() {
            for policy in &self.policies {
                let seeds = self.seeds.iter();
                jobs.extend(seeds.map(|seed| Job { trace, policy: *policy, seed: *seed }));
            }
        }
        let bar = Bar::new(jobs.len());
        let done = on_all_cores(&jobs, self.jobs, |job| {
            let started = ThreadTime::now();
            work(job, &bar).map(|run| Timed { run, time: started.elapsed() })
        });
        bar.0.finish_and_clear();
        Ok(self.grouped(done?))
    }

    /// The replays by trace and policy; they are in the order of the jobs.
    fn grouped<R>(&self, done: Vec<Timed<R>>) -> Vec<Results<R>> {
        let mut done = done.into_iter();
        let mut results = Vec::new();
        for trace in &self.traces {
            let policies = self.policies.iter();
            let by_policy = policies
                .map(|policy| (policy.name, done.by_ref().take(self.seeds.len()).collect()));
            results.push(Results {
                trace: trace.label.clone(),
                unknown_model_pods: trace.unknown_model_pods,
                by_policy: by_policy.collect(),
            });
        }
        results
    }
}

/// Runs `work` on each task, this many at a time; by default one per core. The results are in the order of
/// the tasks, whichever ends first.
///
/// # Errors
/// The error of a task, after which no other begins.
pub fn on_all_cores<T: Sync, R: Send, E: Send>(
    tasks: &[T],
    jobs: Option<NonZeroUsize>,
    work: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let next = AtomicUsize::new(0);
    let done: Mutex<BTreeMap<usize, Result<R, E>>> = Mutex::default();
    let worker = || {
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(place) else { return };
            let result = work(task);
            if result.is_err() {
                next.store(tasks.len(), Ordering::Relaxed);
            }
            done.lock().insert(place, result);
        }
    };
    let cores = jobs.or_else(|| thread::available_parallelism().ok());
    thread::scope(|scope| {
        for _ in 0..cores.map_or(1, NonZeroUsize::get).min(tasks.len()) {
            scope.spawn(worker);
        }
    });
    done.into_inner().into_values().collect()
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
    #[error("--nodes{}", needs(.0, "sn, cpu_milli, memory_mib, gpu, model"))]
    Nodes(#[source] TraceError),
    #[error("--pods{}", needs(.0, "name, cpu_milli, memory_mib, num_gpu, gpu_milli"))]
    Pods(#[source] TraceError),
    /// No workload can be made of the two.
    #[error("cannot make a workload from these files")]
    Workload(#[from] WorkloadError),
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
    /// The folder for charts cannot be created.
    #[error("--charts: cannot create the folder `{}`", .folder.display())]
    Folder {
        folder: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// One end for several traces.
    #[error("--write-pods and --write-free write the end of one trace: give --pods once")]
    OneEnd,
    /// A trace cannot be compared with itself.
    #[error("--pods `{}` is given twice", .0.display())]
    Repeated(PathBuf),
    #[error("--charts")]
    Chart(#[from] ChartError),
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
            | Self::Cluster(_)
            | Self::OneEnd
            | Self::Repeated(_) => 2,
            Self::Folder { .. }
            | Self::Chart(_)
            | Self::End(_)
            | Self::Table(_)
            | Self::Output(_) => 1,
        }
    }
}
