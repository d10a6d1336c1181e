//! The charts of `gpupack simulate`: curves per policy, one trace after the other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::{fs, iter};

use serde::Serialize;

use crate::simulate::figures::{mean, percent, rounded};
use crate::simulate::jobs::{Results, Timed};
use sim::chart::draw::{Chart, ChartError, Curve, write_svg};
use sim::run::replay::{Overflow, Run, Sample, Stranded, TimedRun};
use sim::run::service::Moment;
use wire::units::Share;

/// Load from which a second, larger chart shows allocation: there policies differ.
const ZOOM_FROM: f64 = 85.0;

/// All charts of one call.
pub struct Album(Vec<Page>);

/// The charts of one trace, each with the name of its file.
pub struct Page {
    trace: String,
    pictures: Vec<(&'static str, Vec<Chart>)>,
}

/// A picture with its points.
#[derive(Serialize)]
struct JsonPicture<'c> {
    file: String,
    charts: Vec<JsonChart<'c>>,
}

#[derive(Serialize)]
struct JsonChart<'c> {
    title: &'c str,
    x: &'c str,
    y: &'c str,
    curves: BTreeMap<&'c str, Vec<(f64, f64)>>,
}

impl Album {
    /// The same with a page in front that has one picture.
    #[must_use]
    pub fn with_front(mut self, trace: &str, what: &'static str, chart: Chart) -> Self {
        self.0.insert(0, Page { trace: trace.to_owned(), pictures: vec![(what, vec![chart])] });
        self
    }

    /// The charts of all traces.
    pub fn new(pages: impl Iterator<Item = Page>) -> Self {
        Self(pages.collect())
    }

    /// Writes `<trace>-<what>.svg` for each picture, and `charts.json` with their points.
    ///
    /// # Errors
    /// [`ChartError`].
    ///
    /// # Panics
    /// Never: points are numbers that were drawn.
    pub fn write(&self, folder: &Path) -> Result<(), ChartError> {
        let mut listed = Vec::new();
        for page in &self.0 {
            for (what, charts) in &page.pictures {
                let file = format!("{}-{what}.svg", page.trace);
                write_svg(&folder.join(&file), charts)?;
                listed.push(JsonPicture { file, charts: charts.iter().map(json_chart).collect() });
            }
        }
        let path = folder.join("charts.json");
        let text = serde_json::to_string(&listed).expect("numbers and names are valid JSON");
        fs::write(&path, text + "\n").map_err(|source| ChartError::Write { path, source })
    }
}

impl Page {
    /// The same under another name.
    #[must_use]
    pub fn named(self, trace: String) -> Self {
        Self { trace, ..self }
    }
}

fn json_chart(chart: &Chart) -> JsonChart<'_> {
    let curves = chart.curves.iter().map(|curve| {
        let points = curve.points.iter().map(|(x, y)| (rounded(*x), rounded(*y)));
        (curve.label.as_str(), points.collect())
    });
    JsonChart {
        title: &chart.title,
        x: &chart.x_label,
        y: &chart.y_label,
        curves: curves.collect(),
    }
}

/// Allocation, fragmentation and packing efficiency against arrived load, and the stranded share.
pub fn load_charts(results: &Results<Run>) -> Page {
    let allocation = by_load(results, |run| {
        // Before the first arrival nothing is allocated.
        iter::once((0, 0.0)).chain(run.curve.columns()).collect()
    });
    let near = allocation.iter().map(|curve| Curve {
        label: curve.label.clone(),
        points: curve.points.iter().copied().filter(|(x, _)| *x >= ZOOM_FROM).collect(),
    });
    let near: Vec<Curve> = near.collect();
    let over_load = |title: &str, y_label: &str, curves| {
        chart([title, "arrived load (% of the cluster's GPUs)", y_label], curves)
    };
    let mut allocations = vec![over_load("GPU allocation", "allocated GPUs (%)", allocation)];
    if near.iter().any(|curve| curve.points.len() > 1) {
        allocations.push(over_load("GPU allocation near full load", "allocated GPUs (%)", near));
    }
    let fragmentation = vec![
        over_load(
            "Fragmentation: free room that typical pods cannot use",
            "free GPU room (%)",
            sampled_by_load(results, |sample| sample.fragmentation),
        ),
        over_load(
            "Packing efficiency: fullness of occupied GPUs",
            "mean (%)",
            sampled_by_load(results, |sample| sample.efficiency),
        ),
    ];
    let stranded = stranded("at 100 % load", results, |run| &run.stranded);
    let pictures = vec![
        ("allocation", allocations),
        ("fragmentation", fragmentation),
        ("stranded", vec![stranded]),
    ];
    Page { trace: results.trace.clone(), pictures }
}

/// A curve per policy of what was sampled as the load grew.
fn sampled_by_load(results: &Results<Run>, value: fn(&Sample) -> Share) -> Vec<Curve> {
    by_load(results, |run| {
        // An empty cluster has no efficiency.
        let sampled = run.samples.iter().filter(|sample| sample.load_percent > 0);
        let sampled = sampled.map(|sample| (sample.load_percent, percent(value(sample))));
        let last = run.curve.columns().last().map_or(0, |(x, _)| *x);
        sampled.chain([(last, percent(value(&run.end)))]).collect()
    })
}

/// Allocation, waiting demand, fragmentation and packing efficiency over time, and stranded share.
pub fn time_charts(results: &Results<TimedRun>, overflow: Overflow) -> Page {
    let runs = results.by_policy.iter().flat_map(|(_, runs)| runs);
    let unit = runs.map(|timed| timed.run.unit.name()).next().unwrap_or_default();
    let x_label = format!("time since measuring began ({unit})");
    let over_time = |title: &str, y_label: &str, value: fn(&Moment) -> Share| {
        chart([title, &x_label, y_label], by_time(results, value))
    };
    let allocation = over_time("GPU allocation", "allocated GPUs (%)", |m| m.allocation);
    let waiting = over_time("Waiting pods", "GPUs requested (% of all)", |m| m.waiting);
    let mut allocations = vec![allocation];
    if overflow == Overflow::Queued {
        allocations.push(waiting);
    }
    let fragmentation = vec![
        over_time(
            "Fragmentation: free room that typical pods cannot use",
            "free GPU room (%)",
            |m| m.fragmentation,
        ),
        over_time("Packing efficiency: fullness of occupied GPUs", "mean (%)", |m| m.efficiency),
    ];
    let room = over_time(
        "Room for the largest pods: free on nodes where one fits",
        "GPUs (% of all)",
        |m| m.room_for_largest,
    );
    let stranded = stranded("at the end", results, |run| &run.stranded);
    let pictures = vec![
        ("allocation", allocations),
        ("fragmentation", fragmentation),
        ("room", vec![room]),
        ("stranded", vec![stranded]),
    ];
    Page { trace: results.trace.clone(), pictures }
}

/// A panel with its title, x and y label.
fn chart([title, x_label, y_label]: [&str; 3], curves: Vec<Curve>) -> Chart {
    let [title, x_label, y_label] = [title, x_label, y_label].map(str::to_owned);
    Chart { title, x_label, y_label, rows: Vec::new(), curves }
}

/// A curve per policy: the mean over the seeds at each load of any of them. A run stays the same
/// between its loads, and after its end.
fn by_load(results: &Results<Run>, points: impl Fn(&Run) -> BTreeMap<u64, f64>) -> Vec<Curve> {
    let curves = results.by_policy.iter().map(|(policy, runs)| {
        let runs: Vec<_> = runs.iter().map(|timed| points(&timed.run)).collect();
        let loads: BTreeSet<u64> = runs.iter().flat_map(BTreeMap::keys).copied().collect();
        let points = loads.into_iter().filter_map(|load| {
            let reached = runs.iter().filter_map(|run| run.range(..=load).next_back());
            Some((load as f64, mean(&reached.map(|(_, y)| *y).collect::<Vec<_>>())?))
        });
        Curve { label: (*policy).to_owned(), points: points.collect() }
    });
    curves.collect()
}

/// A curve per policy during the measured time: the mean over the seeds, all sampled at the same
/// times.
fn by_time(results: &Results<TimedRun>, value: fn(&Moment) -> Share) -> Vec<Curve> {
    let curves = results.by_policy.iter().map(|(policy, runs)| {
        let measured =
            runs.first().map_or(0..0, |Timed { run, .. }| run.first_measured..run.moments.len());
        let points = measured.filter_map(|place| {
            let seeds = runs.iter();
            let seeds: Vec<_> =
                seeds.filter_map(|timed| Some((timed, timed.run.moments.get(place)?))).collect();
            let (timed, moment) = seeds.first()?;
            let values: Vec<f64> = seeds.iter().map(|(_, moment)| percent(value(moment))).collect();
            let since = moment.at - timed.run.moments[timed.run.first_measured].at;
            Some((timed.run.unit.from_ticks(since), mean(&values)?))
        });
        Curve { label: (*policy).to_owned(), points: points.collect() }
    });
    curves.collect()
}

/// How many GPUs have how much stranded share: steps per policy, over the GPUs of all seeds.
fn stranded<R>(when: &str, results: &Results<R>, of: fn(&R) -> &Stranded) -> Chart {
    let curves = results.by_policy.iter().map(|(policy, runs)| {
        let all = runs.iter().fold(Stranded::default(), |sum, timed| sum.and(of(&timed.run)));
        let cumulative = all.cumulative();
        let gpus = cumulative.last().map_or(1, |(_, gpus)| *gpus);
        let mut points: Vec<(f64, f64)> = Vec::new();
        for (milli, count) in cumulative {
            let (x, y) = (milli as f64 / 10.0, count as f64 * 100.0 / gpus as f64);
            points.extend(points.last().map(|(_, before)| (x, *before)));
            points.push((x, y));
        }
        // Without any GPU: a line at zero.
        points.push((100.0, points.last().map_or(0.0, |(_, y)| *y)));
        Curve { label: (*policy).to_owned(), points }
    });
    let title = format!("Stranded GPU room {when}");
    let x_label = "free share of a GPU that typical pods cannot use, at most (%)";
    chart([&title, x_label, "GPUs (%)"], curves.collect())
}
