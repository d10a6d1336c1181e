//! The output of `gpupack simulate` for pods that come and end: figures per trace and policy, the
//! same by class of pod, and the cluster over time, as a table, JSON or CSV.

use std::cmp::Ordering;

use crate::simulate::figures::{Paired, cell, mean_cell};
use crate::simulate::jobs::{Results, Timed};
use crate::simulate::report::{aligned, csv_name};
use crate::simulate::timed_figures::{NAMES, State, TimedFigures, class_figures, figures, paired};
use crate::simulate::timed_json::timed_json;
use sim::run::replay::{Overflow, TimedRun};
use sim::run::service::PodClass;
use sim::trace::schedule::TimeUnit;

/// All replays of one call.
#[derive(Debug)]
pub(crate) struct TimedReport {
    title: String,
    results: Vec<Results<TimedRun>>,
    overflow: Overflow,
}

impl TimedReport {
    /// A report on replays.
    #[must_use]
    pub(crate) fn new(title: String, results: Vec<Results<TimedRun>>, overflow: Overflow) -> Self {
        Self { title, results, overflow }
    }

    /// Two tables for people: policies, and policies by class of pod.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        let is_one = self.results.len() == 1;
        let (mut rows, mut by_class) = (Vec::new(), Vec::new());
        for result in &self.results {
            for (policy, runs) in &result.by_policy {
                let names = vec![result.trace.clone(), (*policy).to_owned()];
                let cells = self.cells(runs, result.baseline());
                rows.push([names.clone(), cells].concat());
                for class in PodClass::ALL {
                    let name = class.name().replace('_', " ");
                    let cells = self.class_cells(&class_figures(runs, class));
                    by_class.push([names.clone(), vec![name], cells].concat());
                }
            }
        }
        let (heads, class_heads, legend) = match self.overflow {
            Overflow::Lost => (&LOST_HEADS[..], &LOST_CLASS_HEADS[..], LOST_LEGEND),
            Overflow::Queued => (&QUEUE_HEADS[..], &QUEUE_CLASS_HEADS[..], QUEUE_LEGEND),
        };
        let rows = aligned(heads, 2, rows, is_one);
        let by_class = aligned(class_heads, 3, by_class, is_one);
        let legend = legend.replace("UNIT", self.unit().name());
        format!("{}\n\n{rows}\n{by_class}\n{legend}{COMMON_LEGEND}", self.title)
    }

    fn unit(&self) -> TimeUnit {
        let runs = self.results.iter().flat_map(|result| &result.by_policy);
        let first = runs.flat_map(|(_, runs)| runs).next();
        first.map_or(TimeUnit::Lifetime, |timed| timed.run.unit)
    }

    fn cells(&self, runs: &[Timed<TimedRun>], baseline: Option<&[Timed<TimedRun>]>) -> Vec<String> {
        let all = figures(runs);
        let values = |value: fn(&TimedFigures) -> f64| each(&all, value);
        let to_fgd = |value| Paired::cells(paired(runs, baseline, value, Ordering::Less));
        let mut cells = vec![cell(&values(|f| f.allocation), 2)];
        match self.overflow {
            Overflow::Lost => {
                cells.push(cell(&values(|f| f.blocked_demand), 2));
                cells.extend(to_fgd(|f| f.blocked_demand));
                cells.push(cell(&values(|f| f.blocked_pods), 2));
            }
            Overflow::Queued => {
                cells.push(cell(&values(|f| f.waiting_demand), 2));
                cells.extend(to_fgd(|f| f.waiting_demand));
                cells.push(cell(&values(|f| f.blocked_pods), 2));
                cells.extend(self.wait_cells(&all));
            }
        }
        let states: Vec<State> = runs.iter().map(|timed| State::of(&timed.run)).collect();
        cells.push(mean_cell(&each(&states, |state| state.fragmentation), 1));
        cells.push(mean_cell(&each(&states, |state| state.packing_efficiency), 2));
        let seconds: Vec<f64> = runs.iter().map(|timed| timed.time.as_secs_f64()).collect();
        cells.push(mean_cell(&seconds, 2));
        cells
    }

    fn class_cells(&self, all: &[TimedFigures]) -> Vec<String> {
        let mut cells = vec![
            mean_cell(&each(all, |f| f.arrivals), 0),
            mean_cell(&each(all, |f| f.allocation), 2),
            mean_cell(&each(all, |f| f.blocked_demand), 2),
            mean_cell(&each(all, |f| f.blocked_pods), 2),
        ];
        if self.overflow == Overflow::Queued {
            cells.push(mean_cell(&each(all, |f| f.waiting_demand), 2));
            cells.extend(self.wait_cells(all));
        }
        cells
    }

    fn wait_cells(&self, all: &[TimedFigures]) -> [String; 4] {
        let digits = match self.unit() {
            TimeUnit::Lifetime => 3,
            TimeUnit::Second => 0,
        };
        let waits: [fn(&TimedFigures) -> f64; 4] =
            [|f| f.wait_p50, |f| f.wait_p90, |f| f.wait_p99, |f| f.wait_max];
        waits.map(|value| mean_cell(&each(all, value), digits))
    }

    /// JSON with a result per policy; several traces by trace.
    #[must_use]
    pub(crate) fn json(&self) -> String {
        timed_json(&self.results)
    }

    /// One CSV row per policy, seed and class of pod, `all` first; below the trace if there are
    /// several.
    #[must_use]
    pub(crate) fn csv(&self) -> String {
        let is_one = self.results.len() == 1;
        let trace_head = if is_one { "" } else { "trace," };
        let mut text = format!("{trace_head}policy,seed,class,{NAMES}\n");
        for result in &self.results {
            let trace = if is_one { String::new() } else { csv_name(&result.trace) };
            for Timed { run, .. } in result.by_policy.iter().flat_map(|(_, runs)| runs) {
                let (policy, seed) = (run.policy, run.seed);
                let classes = run.by_class.iter().map(|(class, figures)| (class.name(), figures));
                for (class, figures) in [("all", &run.all)].into_iter().chain(classes) {
                    let figures = TimedFigures::of(figures, run.unit).csv();
                    text.push_str(&format!("{trace}{policy},{seed},{class},{figures}\n"));
                }
            }
        }
        text
    }
}

/// One value of each seed.
fn each<T>(all: &[T], value: fn(&T) -> f64) -> Vec<f64> {
    all.iter().map(value).collect()
}

const LOST_HEADS: [&str; 10] = [
    "trace",
    "policy",
    "allocated",
    "blocked",
    "to fgd",
    "wins",
    "pods blocked",
    "fragm.",
    "effic.",
    "seconds",
];
const LOST_CLASS_HEADS: [&str; 7] =
    ["trace", "policy", "class", "pods", "allocated", "blocked", "pods blocked"];
const QUEUE_HEADS: [&str; 14] = [
    "trace",
    "policy",
    "allocated",
    "waiting",
    "to fgd",
    "wins",
    "pods delayed",
    "p50",
    "p90",
    "p99",
    "max",
    "fragm.",
    "effic.",
    "seconds",
];
const QUEUE_CLASS_HEADS: [&str; 12] = [
    "trace",
    "policy",
    "class",
    "pods",
    "allocated",
    "delayed",
    "pods delayed",
    "waiting",
    "p50",
    "p90",
    "p99",
    "max",
];

const LOST_LEGEND: &str = "\
allocated        GPUs allocated, average over time, in % of all
blocked          GPUs that lost pods requested, in % of what all pods requested
to fgd, wins     the same less that of `fgd`, seed by seed; seeds in which it is less
pods blocked     lost pods, in % of all pods
";
const QUEUE_LEGEND: &str = "\
allocated        GPUs allocated, average over time, in % of all
waiting          GPUs that waiting pods request, average over time, in % of all GPUs
to fgd, wins     the same less that of `fgd`, seed by seed; seeds in which it is less
delayed          GPUs that pods requested which had to wait, in % of what all requested
pods delayed     pods that had to wait, in % of all pods
p50 to max       how long pods waited, those at once included, in UNIT; who still waits: so far
";
const COMMON_LEGEND: &str = "\
fragm.           free GPU room that typical pods cannot use, average over time, in %
effic.           how full the occupied GPUs are, average over time, in %
seconds          time of one core per replay
";
