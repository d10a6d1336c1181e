//! Replays with times as JSON.

use std::cmp::Ordering;

use serde::Serialize;

use crate::simulate::figures::{Paired, deviation, mean, percent, rounded};
use crate::simulate::jobs::{Results, Timed};
use crate::simulate::report::json_text;
use crate::simulate::timed_figures::{State, TimedFigures, class_figures, figures, paired};
use sim::run::replay::TimedRun;
use sim::run::service::{Moment, PodClass};
use wire::units::Share;

/// JSON with a result per policy; several traces by trace.
pub(crate) fn timed_json(results: &[Results<TimedRun>]) -> String {
    json_text(results, |result| {
        let baseline = result.baseline();
        let policies = result.by_policy.iter();
        policies.map(|(policy, runs)| json_result(policy, runs, baseline)).collect()
    })
}

/// State of the cluster at one time, as the mean over the seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct JsonMoment {
    at: f64,
    allocation: f64,
    waiting_demand: f64,
    fragmentation: f64,
    packing_efficiency: f64,
    room_for_largest: f64,
}

#[derive(Serialize)]
struct JsonResult {
    policy: &'static str,
    time_unit: &'static str,
    #[serde(flatten)]
    figures: TimedFigures,
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
    figures: TimedFigures,
}

#[derive(Serialize)]
struct JsonRun {
    seed: i64,
    #[serde(flatten)]
    figures: TimedFigures,
    #[serde(flatten)]
    state: State,
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
    let sd =
        |value: fn(&TimedFigures) -> f64| deviation(&all.iter().map(value).collect::<Vec<_>>());
    let to_fgd = |value, better| paired(runs, baseline, value, better);
    let classes = PodClass::ALL.map(|class| JsonClass {
        class: class.name(),
        figures: TimedFigures::mean(&class_figures(runs, class)),
    });
    let json_runs = runs.iter().zip(&all).map(|(Timed { run, .. }, figures)| JsonRun {
        seed: run.seed,
        figures: figures.clone(),
        state: State::of(run),
    });
    JsonResult {
        policy,
        time_unit: runs.first().map_or("", |timed| timed.run.unit.name()),
        figures: TimedFigures::mean(&all),
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
        classes: classes.into(),
        over_time: over_time(runs),
        seeds: runs.iter().map(|timed| timed.run.seed).collect(),
        runs: json_runs.collect(),
    }
}

/// The cluster over time: all seeds are sampled at the same times.
fn over_time(runs: &[Timed<TimedRun>]) -> Vec<JsonMoment> {
    let Some(first) = runs.first() else { return Vec::new() };
    let moments = (0..first.run.moments.len()).map(|place| {
        let mean_of = |value: fn(&Moment) -> Share| {
            let seeds = runs.iter().filter_map(|timed| timed.run.moments.get(place));
            let values: Vec<f64> = seeds.map(|moment| percent(value(moment))).collect();
            rounded(mean(&values).unwrap_or(0.0))
        };
        JsonMoment {
            at: rounded(first.run.unit.from_ticks(first.run.moments[place].at)),
            allocation: mean_of(|m| m.allocation),
            waiting_demand: mean_of(|m| m.waiting),
            fragmentation: mean_of(|m| m.fragmentation),
            packing_efficiency: mean_of(|m| m.efficiency),
            room_for_largest: mean_of(|m| m.room_for_largest),
        }
    });
    moments.collect()
}
