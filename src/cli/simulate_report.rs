//! What `gpupack simulate` prints: figures per policy, as a table, JSON, CSV or a chart.
//!
//! All figures but counts are in percent. Allocation is of the cluster's GPUs, fragmentation of the
//! room that is free, packing efficiency of the occupied GPUs.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;
use serde_json::Number;

use super::simulate_bound::{self, JsonBounds, SeedBounds};
use crate::packing::units::Share;
use crate::sim::chart::{Chart, Curve};
use crate::sim::engine::Run;
use crate::sim::policy::SimPolicy;

/// Load from which the chart shows allocation once more, larger: where policies differ.
const ZOOM_FROM: f64 = 85.0;

/// One replay with the time it took.
#[derive(Debug)]
pub(super) struct Timed {
    /// What it gave.
    pub(super) run: Run,
    /// Time of one core.
    pub(super) time: Duration,
}

/// All replays of one call.
#[derive(Debug)]
pub(super) struct Report {
    title: String,
    results: Vec<(SimPolicy, Vec<Timed>)>,
    bounds: SeedBounds,
}

/// The figures of one replay, or their means.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Figures<Count> {
    at_100: Option<f64>,
    last: f64,
    arrivals: Count,
    lost: Count,
    lost_before_90: Count,
    fragmentation_at_100: Option<f64>,
    fragmentation_at_end: f64,
    packing_efficiency: f64,
}

#[derive(Serialize)]
struct JsonReport {
    results: Vec<JsonResult>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bounds: Option<JsonBounds>,
}

/// One policy: means over the seeds, and standard deviations of the two figures that are compared.
#[derive(Serialize)]
struct JsonResult {
    policy: &'static str,
    #[serde(flatten)]
    mean: Figures<Number>,
    at_100_sd: Option<f64>,
    last_sd: Option<f64>,
    seeds: Vec<i64>,
    runs: Vec<JsonRun>,
}

#[derive(Serialize)]
struct JsonRun {
    seed: i64,
    #[serde(flatten)]
    figures: Figures<u64>,
}

impl Report {
    /// A report on replays, grouped by policy in the order in which they come, and on their bounds.
    #[must_use]
    pub(super) fn new(title: String, replays: Vec<Timed>, bounds: SeedBounds) -> Self {
        let mut results: Vec<(SimPolicy, Vec<Timed>)> = Vec::new();
        for timed in replays {
            let policy = timed.run.policy;
            match results.iter_mut().find(|(known, _)| *known == policy) {
                Some((_, runs)) => runs.push(timed),
                None => results.push((policy, vec![timed])),
            }
        }
        Self { title, results, bounds }
    }

    /// A table for people; figures of several seeds as mean ± standard deviation.
    #[must_use]
    pub(super) fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(COLUMNS);
        for (policy, runs) in &self.results {
            let of = |value: fn(&Figures<u64>) -> Option<f64>| {
                runs.iter().filter_map(|timed| value(&figures(&timed.run))).collect::<Vec<f64>>()
            };
            let seconds: Vec<f64> = runs.iter().map(|timed| timed.time.as_secs_f64()).collect();
            table.add_row([
                policy.name().to_owned(),
                cell(&of(|f| f.at_100), 2),
                cell(&of(|f| Some(f.last)), 2),
                cell(&of(|f| Some(f.lost as f64)), 0),
                cell(&of(|f| Some(f.lost_before_90 as f64)), 0),
                cell(&of(|f| f.fragmentation_at_100), 1),
                cell(&of(|f| Some(f.packing_efficiency)), 2),
                mean(&seconds).map_or_else(|| "-".to_owned(), |mean| format!("{mean:.2}")),
            ]);
        }
        for row in self.bounds.rows() {
            table.add_row(row);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let rows: String = table.lines().map(|line| format!("{}\n", line.trim_end())).collect();
        let bounds = if self.bounds.0.is_empty() { "" } else { simulate_bound::LEGEND };
        format!("{}\n\n{rows}\n{LEGEND}{bounds}", self.title)
    }

    /// One JSON object with a result per policy.
    ///
    /// # Panics
    /// Never: all values are plain numbers and names.
    #[must_use]
    pub(super) fn json(&self) -> String {
        let results = self.results.iter().map(|(policy, runs)| JsonResult {
            policy: policy.name(),
            mean: means(runs),
            at_100_sd: deviation(
                &runs.iter().filter_map(|t| t.run.curve.at_100()).collect::<Vec<_>>(),
            ),
            last_sd: deviation(&runs.iter().map(|t| t.run.curve.last()).collect::<Vec<_>>()),
            seeds: runs.iter().map(|timed| timed.run.seed).collect(),
            runs: runs
                .iter()
                .map(|timed| JsonRun { seed: timed.run.seed, figures: figures(&timed.run) })
                .collect(),
        });
        let report = JsonReport { results: results.collect(), bounds: self.bounds.json() };
        let text = serde_json::to_string_pretty(&report).expect("numbers and names are valid JSON");
        text + "\n"
    }

    /// One CSV row per policy and seed. A figure that the load did not reach is empty.
    #[must_use]
    pub(super) fn csv(&self) -> String {
        let mut text = String::from(
            "policy,seed,at_100,last,arrivals,lost,lost_before_90,fragmentation_at_100,\
             fragmentation_at_end,packing_efficiency\n",
        );
        for timed in self.results.iter().flat_map(|(_, runs)| runs) {
            let (run, row) = (&timed.run, figures(&timed.run));
            let figure = |value: Option<f64>| value.map(|v| v.to_string()).unwrap_or_default();
            let values = [
                run.policy.name().to_owned(),
                run.seed.to_string(),
                figure(row.at_100),
                row.last.to_string(),
                row.arrivals.to_string(),
                row.lost.to_string(),
                row.lost_before_90.to_string(),
                figure(row.fragmentation_at_100),
                row.fragmentation_at_end.to_string(),
                row.packing_efficiency.to_string(),
            ];
            text.push_str(&values.join(","));
            text.push('\n');
        }
        for row in self.bounds.csv_rows() {
            // What policies have and bounds have not stays empty.
            text.push_str(&row);
            text.push_str(",,,,,,\n");
        }
        text
    }

    /// Allocation, allocation near full load, and fragmentation, each against arrived load.
    #[must_use]
    pub(super) fn charts(&self) -> Vec<Chart> {
        let allocation = self.curves(|run| {
            // Before the first arrival nothing is allocated.
            iter::once((0, 0.0)).chain(run.curve.columns()).collect()
        });
        let fragmentation = self.curves(|run| {
            let sampled = run.samples.iter().map(|s| (s.load_percent, percent(s.fragmentation)));
            let last = run.curve.columns().last().map_or(0, |(x, _)| *x);
            sampled.chain([(last, percent(run.end.fragmentation))]).collect()
        });
        let near = allocation.iter().map(|curve| Curve {
            label: curve.label.clone(),
            points: curve.points.iter().copied().filter(|(x, _)| *x >= ZOOM_FROM).collect(),
        });
        let near: Vec<Curve> = near.collect();
        let chart = |title: &str, y_label: &str, curves| Chart {
            title: title.to_owned(),
            x_label: "arrived load (% of the cluster's GPUs)".to_owned(),
            y_label: y_label.to_owned(),
            curves,
        };
        let mut charts = vec![chart("GPU allocation", "allocated GPUs (%)", allocation)];
        if near.iter().any(|curve| curve.points.len() > 1) {
            charts.push(chart("GPU allocation near full load", "allocated GPUs (%)", near));
        }
        charts.push(chart(
            "Fragmentation: free room that typical pods cannot use",
            "free GPU room (%)",
            fragmentation,
        ));
        charts
    }

    /// A curve per policy: the mean over the seeds at each load that any of them has. Between the
    /// loads of a run, and after its end, nothing changes.
    fn curves(&self, points: impl Fn(&Run) -> BTreeMap<u64, f64>) -> Vec<Curve> {
        let curve = |(policy, runs): &(SimPolicy, Vec<Timed>)| {
            let runs: Vec<_> = runs.iter().map(|timed| points(&timed.run)).collect();
            let loads: BTreeSet<u64> = runs.iter().flat_map(BTreeMap::keys).copied().collect();
            let point = |x: u64| {
                let at_x = runs.iter().filter_map(|run| run.range(..=x).next_back());
                Some((x as f64, mean(&at_x.map(|(_, y)| *y).collect::<Vec<_>>())?))
            };
            Curve {
                label: policy.name().to_owned(),
                points: loads.into_iter().filter_map(point).collect(),
            }
        };
        self.results.iter().map(curve).collect()
    }
}

/// Heads of the table.
const COLUMNS: [&str; 8] = [
    "policy",
    "at 100 %",
    "last",
    "lost",
    "lost before 90 %",
    "fragmentation",
    "efficiency",
    "seconds",
];

/// What they mean.
const LEGEND: &str = "\
at 100 %, last   GPUs allocated when 100 % of the cluster had been asked for, and at the end, in %
lost             pods that fitted nowhere; before 90 %: while less than 90 % had been asked for
fragmentation    free GPU room at 100 % load that typical pods cannot use, in %
efficiency       how full the occupied GPUs are at the end, in %
seconds          time of one core per replay
";

fn figures(run: &Run) -> Figures<u64> {
    Figures {
        at_100: run.curve.at_100().map(rounded),
        last: run.curve.last(),
        arrivals: run.arrivals,
        lost: run.lost,
        lost_before_90: run.lost_before_90,
        fragmentation_at_100: run.fragmentation_at_100().map(percent),
        fragmentation_at_end: percent(run.end.fragmentation),
        packing_efficiency: percent(run.end.efficiency),
    }
}

fn means(runs: &[Timed]) -> Figures<Number> {
    let all: Vec<Figures<u64>> = runs.iter().map(|timed| figures(&timed.run)).collect();
    let of = |value: fn(&Figures<u64>) -> Option<f64>| {
        mean(&all.iter().filter_map(value).collect::<Vec<_>>()).map(rounded)
    };
    let always = |value| of(value).unwrap_or(0.0);
    let count =
        |value: fn(&Figures<u64>) -> u64| mean_count(&all.iter().map(value).collect::<Vec<_>>());
    Figures {
        at_100: of(|f| f.at_100),
        last: always(|f| Some(f.last)),
        arrivals: count(|f| f.arrivals),
        lost: count(|f| f.lost),
        lost_before_90: count(|f| f.lost_before_90),
        fragmentation_at_100: of(|f| f.fragmentation_at_100),
        fragmentation_at_end: always(|f| Some(f.fragmentation_at_end)),
        packing_efficiency: always(|f| Some(f.packing_efficiency)),
    }
}

/// The mean of counts: a whole number where it is one.
fn mean_count(counts: &[u64]) -> Number {
    let sum: u64 = counts.iter().sum();
    let among = u64::try_from(counts.len()).unwrap_or(u64::MAX).max(1);
    let whole = || Number::from(sum / among);
    if sum.is_multiple_of(among) {
        return whole();
    }
    Number::from_f64(rounded(sum as f64 / among as f64)).unwrap_or_else(whole)
}

/// A share in percent, to four decimals, which is all it has.
fn percent(share: Share) -> f64 {
    share.millionths() as f64 / 10_000.0
}

/// To four decimals: enough to compare, and no noise of floating point.
pub(super) fn rounded(value: f64) -> f64 {
    (value * 10_000.0).round() / 10_000.0
}

/// The mean; none of no values.
pub(super) fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The standard deviation of a sample; none of less than two values.
fn deviation(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|_| values.len() > 1)?;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some(rounded((squares / (values.len() - 1) as f64).sqrt()))
}

/// Mean and, of several values, standard deviation.
fn cell(values: &[f64], digits: usize) -> String {
    match (mean(values), deviation(values)) {
        (None, _) => "-".to_owned(),
        (Some(mean), None) => format!("{mean:.digits$}"),
        (Some(mean), Some(sd)) => format!("{mean:.digits$} ± {sd:.digits$}"),
    }
}
