//! The figures of replays with times, as numbers to print.
//!
//! All figures but counts and times are in percent. Allocation and waiting demand are means over
//! time, of the cluster's GPUs. Blocked demand and blocked pods are of those that came.

use std::cmp::Ordering;

use serde::Serialize;

use crate::simulate::figures::{Paired, mean, percent, percent_of, rounded};
use crate::simulate::jobs::Timed;
use sim::run::replay::TimedRun;
use sim::run::service::{ClassFigures, Moment, PodClass};
use sim::trace::schedule::TimeUnit;
use wire::units::Share;

/// The figures of pods, or their means over the seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct TimedFigures {
    pub(crate) arrivals: f64,
    pub(crate) allocation: f64,
    pub(crate) blocked_demand: f64,
    pub(crate) blocked_pods: f64,
    pub(crate) waiting_demand: f64,
    pub(crate) still_waiting: f64,
    pub(crate) wait_p50: f64,
    pub(crate) wait_p90: f64,
    pub(crate) wait_p99: f64,
    pub(crate) wait_max: f64,
}

/// The names of [`TimedFigures`] in CSV.
pub(crate) const NAMES: &str = "arrivals,allocation,blocked_demand,blocked_pods,waiting_demand,still_waiting,\
                     wait_p50,wait_p90,wait_p99,wait_max";

/// State of the cluster, as the mean over the measured time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct State {
    pub(crate) fragmentation: f64,
    pub(crate) packing_efficiency: f64,
}

impl TimedFigures {
    /// Of one replay.
    pub(crate) fn of(class: &ClassFigures, unit: TimeUnit) -> Self {
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

    /// The mean of each figure.
    pub(crate) fn mean(all: &[Self]) -> Self {
        let mean_of = |value: fn(&Self) -> f64| {
            rounded(mean(&all.iter().map(value).collect::<Vec<_>>()).unwrap_or(0.0))
        };
        Self {
            arrivals: mean_of(|f| f.arrivals),
            allocation: mean_of(|f| f.allocation),
            blocked_demand: mean_of(|f| f.blocked_demand),
            blocked_pods: mean_of(|f| f.blocked_pods),
            waiting_demand: mean_of(|f| f.waiting_demand),
            still_waiting: mean_of(|f| f.still_waiting),
            wait_p50: mean_of(|f| f.wait_p50),
            wait_p90: mean_of(|f| f.wait_p90),
            wait_p99: mean_of(|f| f.wait_p99),
            wait_max: mean_of(|f| f.wait_max),
        }
    }

    /// The figures in the order of [`NAMES`].
    pub(crate) fn csv(&self) -> String {
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
    /// Of one replay.
    pub(crate) fn of(run: &TimedRun) -> Self {
        let measured = &run.moments[run.first_measured..];
        let mean_of = |value: fn(&Moment) -> Share| {
            let values: Vec<f64> = measured.iter().map(|moment| percent(value(moment))).collect();
            rounded(mean(&values).unwrap_or(0.0))
        };
        Self {
            fragmentation: mean_of(|m| m.fragmentation),
            packing_efficiency: mean_of(|m| m.efficiency),
        }
    }
}

/// The figures of each replay.
pub(crate) fn figures(runs: &[Timed<TimedRun>]) -> Vec<TimedFigures> {
    runs.iter().map(|Timed { run, .. }| TimedFigures::of(&run.all, run.unit)).collect()
}

/// Those of one class of pod.
pub(crate) fn class_figures(runs: &[Timed<TimedRun>], class: PodClass) -> Vec<TimedFigures> {
    let all = runs.iter().filter_map(|Timed { run, .. }| {
        let found = run.by_class.iter().find(|(known, _)| *known == class);
        found.map(|(_, figures)| TimedFigures::of(figures, run.unit))
    });
    all.collect()
}

/// The difference from the baseline; none for the baseline itself.
pub(crate) fn paired(
    runs: &[Timed<TimedRun>],
    baseline: Option<&[Timed<TimedRun>]>,
    value: fn(&TimedFigures) -> f64,
    better: Ordering,
) -> Option<Paired> {
    let baseline = baseline.filter(|baseline| !std::ptr::eq(*baseline, runs))?;
    let values =
        |runs| figures(runs).iter().map(|figures| Some(value(figures))).collect::<Vec<_>>();
    Paired::of(&values(runs), &values(baseline), better)
}
