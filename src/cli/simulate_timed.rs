//! What `gpupack simulate` prints of pods that come and end: figures per trace and policy, the same by
//! class of pod, and the cluster over time, as a table, JSON or CSV.
//!
//! All figures but counts and times are in percent: allocation and waiting demand of the cluster's
//! GPUs in the mean over time, blocked demand and pods of those that came.

use std::cmp::Ordering;

use serde::Serialize;

use super::figures::{Paired, cell, deviation, mean, mean_cell, percent, percent_of, rounded};
use super::simulate_jobs::{Results, Timed};
use super::simulate_report::{aligned, csv_name, json_text};
use crate::packing::units::Share;
use crate::sim::engine::{Overflow, TimedRun};
use crate::sim::schedule::TimeUnit;
use crate::sim::service::{ClassFigures, Moment, PodClass};

/// All replays of one call.
#[derive(Debug)]
pub(super) struct TimedReport {
    title: String,
    results: Vec<Results<TimedRun>>,
    overflow: Overflow,
}

/// What pods got, or the mean of that over the seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Figures {
    arrivals: f64,
    allocation: f64,
    blocked_demand: f64,
    blocked_pods: f64,
    waiting_demand: f64,
    still_waiting: f64,
    wait_p50: f64,
    wait_p90: f64,
    wait_p99: f64,
    wait_max: f64,
}

/// The names of [`Figures`], as CSV has them.
const NAMES: &str = "arrivals,allocation,blocked_demand,blocked_pods,waiting_demand,still_waiting,\
                     wait_p50,wait_p90,wait_p99,wait_max";

/// State of the cluster, in the mean over the time that is measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct State {
    fragmentation: f64,
    packing_efficiency: f64,
}

/// State of the cluster at a moment, in the mean over the seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct JsonMoment {
    at: f64,
    allocation: f64,
    waiting_demand: f64,
    fragmentation: f64,
    packing_efficiency: f64,
}

#[derive(Serialize)]
struct JsonResult {
    policy: &'static str,
    time_unit: &'static str,
    #[serde(flatten)]
    figures: Figures,
    #[serde(flatten)]
    state: State,
    allocation_sd: Option<f64>,
    blocked_demand_sd: Option<f64>,
    blocked_pods_sd: Option<f64>,
    waiting_demand_sd: Option<f64>,
    to_fgd: JsonPaired,
    classes: Vec<JsonClass>,
    over_time: Vec<JsonMoment>,
    seeds: Vec<i64>,
    runs: Vec<JsonRun>,
}

/// Each figure less that of `fgd`, seed by seed.
#[derive(Serialize)]
struct JsonPaired {
    allocation: Option<Paired>,
    blocked_demand: Option<Paired>,
    blocked_pods: Option<Paired>,
    waiting_demand: Option<Paired>,
}

#[derive(Serialize)]
struct JsonClass {
    class: &'static str,
    #[serde(flatten)]
    figures: Figures,
}

#[derive(Serialize)]
struct JsonRun {
    seed: i64,
    #[serde(flatten)]
    figures: Figures,
    #[serde(flatten)]
    state: State,
}

impl Figures {
    fn of(class: &ClassFigures, unit: TimeUnit) -> Self {
        let time = |ticks: u64| rounded(unit.from_ticks(ticks));
        Self {
            arrivals: class.arrivals as f64,
            allocation: percent(class.allocation),
            blocked_demand: percent_of(class.blocked_milli, class.demand_milli),
            blocked_pods: percent_of(class.blocked, class.arrivals),
            waiting_demand: percent(class.waiting),
            still_waiting: class.still_waiting as f64,
            wait_p50: time(class.waits.p50),
            wait_p90: time(class.waits.p90),
            wait_p99: time(class.waits.p99),
            wait_max: time(class.waits.max),
        }
    }

    fn mean(all: &[Self]) -> Self {
        let of = |value: fn(&Self) -> f64| {
            rounded(mean(&all.iter().map(value).collect::<Vec<_>>()).unwrap_or(0.0))
        };
        Self {
            arrivals: of(|f| f.arrivals),
            allocation: of(|f| f.allocation),
            blocked_demand: of(|f| f.blocked_demand),
            blocked_pods: of(|f| f.blocked_pods),
            waiting_demand: of(|f| f.waiting_demand),
            still_waiting: of(|f| f.still_waiting),
            wait_p50: of(|f| f.wait_p50),
            wait_p90: of(|f| f.wait_p90),
            wait_p99: of(|f| f.wait_p99),
            wait_max: of(|f| f.wait_max),
        }
    }

    fn csv(&self) -> String {
        let values = [
            self.arrivals,
            self.allocation,
            self.blocked_demand,
            self.blocked_pods,
            self.waiting_demand,
            self.still_waiting,
            self.wait_p50,
            self.wait_p90,
            self.wait_p99,
            self.wait_max,
        ];
        values.map(|value| value.to_string()).join(",")
    }
}

impl State {
    fn of(run: &TimedRun) -> Self {
        let measured = &run.moments[run.first_measured..];
        let of = |value: fn(&Moment) -> Share| {
            let values: Vec<f64> = measured.iter().map(|moment| percent(value(moment))).collect();
            rounded(mean(&values).unwrap_or(0.0))
        };
        Self { fragmentation: of(|m| m.fragmentation), packing_efficiency: of(|m| m.efficiency) }
    }
}

impl TimedReport {
    /// A report on replays.
    #[must_use]
    pub(super) fn new(title: String, results: Vec<Results<TimedRun>>, overflow: Overflow) -> Self {
        Self { title, results, overflow }
    }

    /// Two tables for people: policies, and policies by class of pod.
    #[must_use]
    pub(super) fn table(&self) -> String {
        let is_one = self.results.len() == 1;
        let (mut rows, mut by_class) = (Vec::new(), Vec::new());
        for result in &self.results {
            for (policy, runs) in &result.by_policy {
                let names = vec![result.trace.clone(), policy.name().to_owned()];
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
        let unit = match self.unit() {
            TimeUnit::Lifetime => "mean lifetimes",
            TimeUnit::Second => "seconds",
        };
        let legend = legend.replace("UNIT", unit);
        format!("{}\n\n{rows}\n{by_class}\n{legend}{COMMON_LEGEND}", self.title)
    }

    fn unit(&self) -> TimeUnit {
        let runs = self.results.iter().flat_map(|result| &result.by_policy);
        let first = runs.flat_map(|(_, runs)| runs).next();
        first.map_or(TimeUnit::Lifetime, |timed| timed.run.unit)
    }

    fn cells(&self, runs: &[Timed<TimedRun>], baseline: Option<&[Timed<TimedRun>]>) -> Vec<String> {
        let all = figures(runs);
        let of = |value: fn(&Figures) -> f64| all.iter().map(value).collect::<Vec<f64>>();
        let to_fgd = |value: fn(&Figures) -> f64| {
            let dash = || "-".to_owned();
            let paired = paired(runs, baseline, value, Ordering::Less);
            paired.map_or([dash(), dash()], |paired| [paired.cell(2), paired.won()])
        };
        let mut cells = vec![cell(&of(|f| f.allocation), 2)];
        match self.overflow {
            Overflow::Lost => {
                cells.push(cell(&of(|f| f.blocked_demand), 2));
                cells.extend(to_fgd(|f| f.blocked_demand));
                cells.push(cell(&of(|f| f.blocked_pods), 2));
            }
            Overflow::Queued => {
                cells.push(cell(&of(|f| f.waiting_demand), 2));
                cells.extend(to_fgd(|f| f.waiting_demand));
                cells.push(cell(&of(|f| f.blocked_pods), 2));
                cells.extend(self.wait_cells(&all));
            }
        }
        let states: Vec<State> = runs.iter().map(|timed| State::of(&timed.run)).collect();
        let state = |value: fn(&State) -> f64| states.iter().map(value).collect::<Vec<f64>>();
        cells.push(mean_cell(&state(|s| s.fragmentation), 1));
        cells.push(mean_cell(&state(|s| s.packing_efficiency), 2));
        let seconds: Vec<f64> = runs.iter().map(|timed| timed.time.as_secs_f64()).collect();
        cells.push(mean_cell(&seconds, 2));
        cells
    }

    fn class_cells(&self, all: &[Figures]) -> Vec<String> {
        let of = |value: fn(&Figures) -> f64| all.iter().map(value).collect::<Vec<f64>>();
        let mut cells = vec![
            mean_cell(&of(|f| f.arrivals), 0),
            mean_cell(&of(|f| f.allocation), 2),
            mean_cell(&of(|f| f.blocked_demand), 2),
            mean_cell(&of(|f| f.blocked_pods), 2),
        ];
        if self.overflow == Overflow::Queued {
            cells.push(mean_cell(&of(|f| f.waiting_demand), 2));
            cells.extend(self.wait_cells(all));
        }
        cells
    }

    fn wait_cells(&self, all: &[Figures]) -> [String; 4] {
        let digits = match self.unit() {
            TimeUnit::Lifetime => 3,
            TimeUnit::Second => 0,
        };
        let waits: [fn(&Figures) -> f64; 4] =
            [|f| f.wait_p50, |f| f.wait_p90, |f| f.wait_p99, |f| f.wait_max];
        waits.map(|value| mean_cell(&all.iter().map(value).collect::<Vec<f64>>(), digits))
    }

    /// JSON with a result per policy; several traces by trace.
    #[must_use]
    pub(super) fn json(&self) -> String {
        json_text(&self.results, |result| {
            let baseline = result.baseline();
            let policies = result.by_policy.iter();
            policies.map(|(policy, runs)| json_result(policy.name(), runs, baseline)).collect()
        })
    }

    /// One CSV row per policy, seed and class of pod, `all` first; below the trace where there are
    /// several.
    #[must_use]
    pub(super) fn csv(&self) -> String {
        let is_one = self.results.len() == 1;
        let trace_head = if is_one { "" } else { "trace," };
        let mut text = format!("{trace_head}policy,seed,class,{NAMES}\n");
        for result in &self.results {
            let trace = if is_one { String::new() } else { csv_name(&result.trace) };
            for Timed { run, .. } in result.by_policy.iter().flat_map(|(_, runs)| runs) {
                let (policy, seed) = (run.policy, run.seed);
                let classes = run.by_class.iter().map(|(class, figures)| (class.name(), figures));
                for (class, figures) in [("all", &run.all)].into_iter().chain(classes) {
                    let figures = Figures::of(figures, run.unit).csv();
                    text.push_str(&format!("{trace}{policy},{seed},{class},{figures}\n"));
                }
            }
        }
        text
    }
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
allocated        GPUs allocated in the mean over time, in % of all
blocked          GPUs that lost pods asked for, in % of what all pods asked for
to fgd, wins     the same less that of `fgd`, seed by seed; seeds in which it is less
pods blocked     lost pods, in % of all pods
";
const QUEUE_LEGEND: &str = "\
allocated        GPUs allocated in the mean over time, in % of all
waiting          GPUs that waiting pods ask for, in the mean over time, in % of all GPUs
to fgd, wins     the same less that of `fgd`, seed by seed; seeds in which it is less
delayed          GPUs that pods asked for which had to wait, in % of what all asked for
pods delayed     pods that had to wait, in % of all pods
p50 to max       how long pods waited, those at once included, in UNIT; who still waits: so far
";
const COMMON_LEGEND: &str = "\
fragm.           free GPU room that typical pods cannot use, in the mean over time, in %
effic.           how full the occupied GPUs are, in the mean over time, in %
seconds          time of one core per replay
";

fn figures(runs: &[Timed<TimedRun>]) -> Vec<Figures> {
    runs.iter().map(|Timed { run, .. }| Figures::of(&run.all, run.unit)).collect()
}

fn class_figures(runs: &[Timed<TimedRun>], class: PodClass) -> Vec<Figures> {
    let of = |timed: &Timed<TimedRun>| {
        let run = &timed.run;
        let found = run.by_class.iter().find(|(known, _)| *known == class);
        found.map(|(_, figures)| Figures::of(figures, run.unit))
    };
    runs.iter().filter_map(of).collect()
}

/// What is above the baseline, unless this is the baseline itself.
fn paired(
    runs: &[Timed<TimedRun>],
    baseline: Option<&[Timed<TimedRun>]>,
    value: fn(&Figures) -> f64,
    better: Ordering,
) -> Option<Paired> {
    let baseline = baseline.filter(|baseline| !std::ptr::eq(*baseline, runs))?;
    let of = |runs| figures(runs).iter().map(|figures| Some(value(figures))).collect::<Vec<_>>();
    Paired::of(&of(runs), &of(baseline), better)
}

fn json_result(
    policy: &'static str,
    runs: &[Timed<TimedRun>],
    baseline: Option<&[Timed<TimedRun>]>,
) -> JsonResult {
    let all = figures(runs);
    let states: Vec<State> = runs.iter().map(|timed| State::of(&timed.run)).collect();
    let state = |value: fn(&State) -> f64| {
        rounded(mean(&states.iter().map(value).collect::<Vec<_>>()).unwrap_or(0.0))
    };
    let sd = |value: fn(&Figures) -> f64| deviation(&all.iter().map(value).collect::<Vec<_>>());
    let to_fgd = |value, better| paired(runs, baseline, value, better);
    let class = |class: PodClass| JsonClass {
        class: class.name(),
        figures: Figures::mean(&class_figures(runs, class)),
    };
    let run = |(timed, figures): (&Timed<TimedRun>, &Figures)| JsonRun {
        seed: timed.run.seed,
        figures: figures.clone(),
        state: State::of(&timed.run),
    };
    JsonResult {
        policy,
        time_unit: runs.first().map_or("", |timed| timed.run.unit.name()),
        figures: Figures::mean(&all),
        state: State {
            fragmentation: state(|s| s.fragmentation),
            packing_efficiency: state(|s| s.packing_efficiency),
        },
        allocation_sd: sd(|f| f.allocation),
        blocked_demand_sd: sd(|f| f.blocked_demand),
        blocked_pods_sd: sd(|f| f.blocked_pods),
        waiting_demand_sd: sd(|f| f.waiting_demand),
        to_fgd: JsonPaired {
            allocation: to_fgd(|f| f.allocation, Ordering::Greater),
            blocked_demand: to_fgd(|f| f.blocked_demand, Ordering::Less),
            blocked_pods: to_fgd(|f| f.blocked_pods, Ordering::Less),
            waiting_demand: to_fgd(|f| f.waiting_demand, Ordering::Less),
        },
        classes: PodClass::ALL.map(class).into(),
        over_time: over_time(runs),
        seeds: runs.iter().map(|timed| timed.run.seed).collect(),
        runs: runs.iter().zip(&all).map(run).collect(),
    }
}

/// The cluster over time: all seeds are looked at at the same moments.
fn over_time(runs: &[Timed<TimedRun>]) -> Vec<JsonMoment> {
    let Some(first) = runs.first() else { return Vec::new() };
    let moment = |place: usize| {
        let of = |value: fn(&Moment) -> Share| {
            let seeds = runs.iter().filter_map(|timed| timed.run.moments.get(place));
            let values: Vec<f64> = seeds.map(|moment| percent(value(moment))).collect();
            rounded(mean(&values).unwrap_or(0.0))
        };
        JsonMoment {
            at: rounded(first.run.unit.from_ticks(first.run.moments[place].at)),
            allocation: of(|m| m.allocation),
            waiting_demand: of(|m| m.waiting),
            fragmentation: of(|m| m.fragmentation),
            packing_efficiency: of(|m| m.efficiency),
        }
    };
    (0..first.run.moments.len()).map(moment).collect()
}
