//! The output of `gpupack simulate` for arrivals without times: figures per trace and policy, as a
//! table, JSON or CSV.
//!
//! All figures but counts are in percent. Allocation is of the cluster's GPUs, fragmentation of the
//! free room, packing efficiency of the occupied GPUs.

use std::cmp::Ordering;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use serde_json::Number;

use crate::simulate::figures::{Paired, cell, deviation, mean, mean_cell, percent, rounded};
use crate::simulate::jobs::{Results, Timed};
use sim::run::replay::Run;

/// All replays of one call.
#[derive(Debug)]
pub(crate) struct ArrivalReport {
    title: String,
    results: Vec<Results<Run>>,
}

/// The figures of one replay, or their means.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct ArrivalFigures<Count> {
    at_100: Option<f64>,
    last: f64,
    arrivals: Count,
    lost: Count,
    lost_before_90: Count,
    moves: Count,
    fragmentation_at_100: Option<f64>,
    fragmentation_at_end: f64,
    packing_efficiency: f64,
}

/// The JSON output; for one trace only its results.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum JsonReport<P> {
    One {
        /// Pods that accept only GPU models which no node has.
        unknown_model_pods: usize,
        results: Vec<P>,
    },
    Several {
        /// In the order of the flags.
        traces: Vec<JsonTrace<P>>,
    },
}

/// The results of one of several traces.
#[derive(Serialize)]
pub(crate) struct JsonTrace<P> {
    trace: String,
    unknown_model_pods: usize,
    results: Vec<P>,
}

/// One policy: means over the seeds, standard deviations of the two compared figures, and their
/// difference from those of `fgd`, seed by seed.
#[derive(Serialize)]
struct JsonResult {
    policy: &'static str,
    #[serde(flatten)]
    mean: ArrivalFigures<Number>,
    at_100_sd: Option<f64>,
    last_sd: Option<f64>,
    at_100_to_fgd: Option<Paired>,
    last_to_fgd: Option<Paired>,
    seeds: Vec<i64>,
    runs: Vec<JsonRun>,
}

#[derive(Serialize)]
struct JsonRun {
    seed: i64,
    #[serde(flatten)]
    figures: ArrivalFigures<u64>,
}

/// The results of all traces as JSON.
///
/// # Panics
/// Never: all values are plain numbers and names.
pub(crate) fn json_text<R, P: Serialize>(
    results: &[Results<R>],
    of: impl Fn(&Results<R>) -> Vec<P>,
) -> String {
    let report = match results {
        [one] => JsonReport::One { unknown_model_pods: one.unknown_model_pods, results: of(one) },
        several => {
            let traces = several.iter().map(|one| JsonTrace {
                trace: one.trace.clone(),
                unknown_model_pods: one.unknown_model_pods,
                results: of(one),
            });
            JsonReport::Several { traces: traces.collect() }
        }
    };
    let text = serde_json::to_string_pretty(&report).expect("numbers and names are valid JSON");
    text + "\n"
}

/// A table below its title: names to the left, figures to the right. With a single trace it leaves
/// out the first column, the trace.
pub fn aligned(heads: &[&str], names: usize, rows: Vec<Vec<String>>, is_one: bool) -> String {
    let skipped = usize::from(is_one);
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(&heads[skipped..]);
    for row in rows {
        table.add_row(&row[skipped..]);
    }
    for column in table.column_iter_mut().skip(names - skipped) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

impl ArrivalReport {
    /// A report on replays.
    #[must_use]
    pub(crate) fn new(title: String, results: Vec<Results<Run>>) -> Self {
        Self { title, results }
    }

    /// A table for people; figures of several seeds as mean ± standard deviation.
    #[must_use]
    pub(crate) fn table(&self) -> String {
        let mut rows = Vec::new();
        for result in &self.results {
            for (policy, runs) in &result.by_policy {
                let mut row = vec![result.trace.clone(), (*policy).to_owned()];
                row.extend(cells(runs, result.baseline()));
                rows.push(row);
            }
        }
        let rows = aligned(&HEADS, 2, rows, self.results.len() == 1);
        format!("{}\n\n{rows}\n{LEGEND}", self.title)
    }

    /// JSON with a result per policy; several traces by trace.
    #[must_use]
    pub(crate) fn json(&self) -> String {
        json_text(&self.results, |result| {
            let baseline = result.baseline();
            let policies = result.by_policy.iter();
            policies.map(|(policy, runs)| json_result(policy, runs, baseline)).collect()
        })
    }

    /// One CSV row per policy and seed, below the trace if there are several. A figure that the
    /// load did not reach is empty.
    #[must_use]
    pub(crate) fn csv(&self) -> String {
        let is_one = self.results.len() == 1;
        let mut text = String::from(if is_one { "" } else { "trace," });
        text.push_str(
            "policy,seed,at_100,last,arrivals,lost,lost_before_90,fragmentation_at_100,\
             fragmentation_at_end,packing_efficiency\n",
        );
        for result in &self.results {
            for Timed { run, .. } in result.by_policy.iter().flat_map(|(_, runs)| runs) {
                let row = figures(run);
                let values = [
                    run.policy.to_owned(),
                    run.seed.to_string(),
                    csv_value(row.at_100),
                    row.last.to_string(),
                    row.arrivals.to_string(),
                    row.lost.to_string(),
                    row.lost_before_90.to_string(),
                    csv_value(row.fragmentation_at_100),
                    row.fragmentation_at_end.to_string(),
                    row.packing_efficiency.to_string(),
                ];
                if !is_one {
                    text.push_str(&csv_name(&result.trace));
                }
                text.push_str(&values.join(","));
                text.push('\n');
            }
        }
        text
    }
}

/// A trace's name as the first value of a CSV row. It comes from a file name.
pub fn csv_name(name: &str) -> String {
    match name.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\",", name.replace('"', "\"\"")),
        false => format!("{name},"),
    }
}

fn csv_value(value: Option<f64>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

/// Heads of the table.
const HEADS: [&str; 12] = [
    "trace", "policy", "at 100 %", "to fgd", "wins", "last", "to fgd", "wins", "early", "fragm.",
    "effic.", "seconds",
];

/// The meaning of the columns.
const LEGEND: &str = "\
at 100 %, last   GPUs allocated when 100 % of the cluster had been requested, and at the end, in %
to fgd, wins     the same less that of `fgd`, seed by seed; seeds in which it is more
early            pods that fitted nowhere while less than 90 % had been requested
fragm.           free GPU room at 100 % load that typical pods cannot use, in %
effic.           how full the occupied GPUs are at the end, in %
seconds          time of one core per replay
";

/// The cells of a row after the names.
fn cells(runs: &[Timed<Run>], baseline: Option<&[Timed<Run>]>) -> Vec<String> {
    let values = |value: fn(&ArrivalFigures<u64>) -> Option<f64>| {
        runs.iter().filter_map(|timed| value(&figures(&timed.run))).collect::<Vec<f64>>()
    };
    let [at_100, at_100_wins] = Paired::cells(paired(runs, baseline, at_100));
    let [at_end, at_end_wins] = Paired::cells(paired(runs, baseline, at_end));
    let seconds: Vec<f64> = runs.iter().map(|timed| timed.time.as_secs_f64()).collect();
    vec![
        cell(&values(|f| f.at_100), 2),
        at_100,
        at_100_wins,
        cell(&values(|f| Some(f.last)), 2),
        at_end,
        at_end_wins,
        mean_cell(&values(|f| Some(f.lost_before_90 as f64)), 1),
        mean_cell(&values(|f| f.fragmentation_at_100), 1),
        mean_cell(&values(|f| Some(f.packing_efficiency)), 2),
        mean_cell(&seconds, 2),
    ]
}

/// The difference from the baseline; none for the baseline itself.
fn paired(
    runs: &[Timed<Run>],
    baseline: Option<&[Timed<Run>]>,
    value: fn(&Run) -> Option<f64>,
) -> Option<Paired> {
    let values =
        |runs: &[Timed<Run>]| runs.iter().map(|timed| value(&timed.run)).collect::<Vec<_>>();
    let baseline = baseline.filter(|baseline| !std::ptr::eq(*baseline, runs))?;
    Paired::of(&values(runs), &values(baseline), Ordering::Greater)
}

fn at_100(run: &Run) -> Option<f64> {
    run.curve.at_100()
}

fn at_end(run: &Run) -> Option<f64> {
    Some(run.curve.last())
}

fn json_result(
    policy: &'static str,
    runs: &[Timed<Run>],
    baseline: Option<&[Timed<Run>]>,
) -> JsonResult {
    let sd = |value: fn(&Run) -> Option<f64>| {
        deviation(&runs.iter().filter_map(|timed| value(&timed.run)).collect::<Vec<_>>())
    };
    let json_runs =
        runs.iter().map(|Timed { run, .. }| JsonRun { seed: run.seed, figures: figures(run) });
    JsonResult {
        policy,
        mean: means(runs),
        at_100_sd: sd(at_100),
        last_sd: sd(at_end),
        at_100_to_fgd: paired(runs, baseline, at_100),
        last_to_fgd: paired(runs, baseline, at_end),
        seeds: runs.iter().map(|timed| timed.run.seed).collect(),
        runs: json_runs.collect(),
    }
}

fn figures(run: &Run) -> ArrivalFigures<u64> {
    ArrivalFigures {
        at_100: run.curve.at_100().map(rounded),
        last: run.curve.last(),
        arrivals: run.arrivals,
        lost: run.lost,
        lost_before_90: run.lost_before_90,
        moves: run.moves,
        fragmentation_at_100: run.fragmentation_at_100().map(percent),
        fragmentation_at_end: percent(run.end.fragmentation),
        packing_efficiency: percent(run.end.efficiency),
    }
}

fn means(runs: &[Timed<Run>]) -> ArrivalFigures<Number> {
    let all: Vec<ArrivalFigures<u64>> = runs.iter().map(|timed| figures(&timed.run)).collect();
    let mean_of = |value: fn(&ArrivalFigures<u64>) -> Option<f64>| {
        mean(&all.iter().filter_map(value).collect::<Vec<_>>()).map(rounded)
    };
    let always = |value| mean_of(value).unwrap_or(0.0);
    let count = |value: fn(&ArrivalFigures<u64>) -> u64| {
        mean_count(&all.iter().map(value).collect::<Vec<_>>())
    };
    ArrivalFigures {
        at_100: mean_of(|f| f.at_100),
        last: always(|f| Some(f.last)),
        arrivals: count(|f| f.arrivals),
        lost: count(|f| f.lost),
        lost_before_90: count(|f| f.lost_before_90),
        moves: count(|f| f.moves),
        fragmentation_at_100: mean_of(|f| f.fragmentation_at_100),
        fragmentation_at_end: always(|f| Some(f.fragmentation_at_end)),
        packing_efficiency: always(|f| Some(f.packing_efficiency)),
    }
}

/// The mean of counts: an integer if it is one.
fn mean_count(counts: &[u64]) -> Number {
    let sum: u64 = counts.iter().sum();
    let among = u64::try_from(counts.len()).unwrap_or(u64::MAX).max(1);
    let whole = Number::from(sum / among);
    if sum.is_multiple_of(among) {
        return whole;
    }
    Number::from_f64(rounded(sum as f64 / among as f64)).unwrap_or(whole)
}
