//! The output of `gpupack-lab stress`: a row per world, as a table, JSON or CSV.
//!
//! The first policy is compared with the best of the *baselines*, which are all others except the
//! variants of `fragmentation`. All figures are in percent, differences in points.

use std::collections::BTreeMap;

use serde::Serialize;

use cli::simulate::figures::{mean, percent, rounded};
use cli::simulate::jobs::{Results, Timed};
use cli::simulate::report::{aligned, csv_name};
use sim::run::policy::SimPolicy;
use sim::run::replay::Run;

use crate::policies::all::is_baseline;
use crate::stress::stress_worlds::Measure;

/// Loads that are compared, in percent of the GPUs: each of these steps.
const STEP: usize = 5;

/// The replays of all worlds.
pub(crate) struct StressReport {
    title: String,
    worlds: Vec<WorldFigures>,
    /// Worlds for which the trace has no pods.
    left_out: Vec<String>,
}

/// The figures of one world.
#[derive(Serialize)]
struct WorldFigures {
    world: String,
    measure: &'static str,
    /// Where the first policy is worst against the best baseline; `None` without any.
    worst: Option<Worst>,
    results: Vec<PolicyFigures>,
}

/// A difference from the best baseline.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Worst {
    difference: f64,
    load: u64,
    baseline: &'static str,
}

/// One policy in one world: means over the seeds.
#[derive(Serialize)]
struct PolicyFigures {
    policy: &'static str,
    #[serde(skip)]
    is_baseline: bool,
    /// At 100 % load; of packing efficiency, at the end.
    value: f64,
    /// The least of it over the seeds.
    least: f64,
    lost_before_90: f64,
    /// GPUs without a tenant, mean over the loads below.
    empty_gpus: f64,
    /// By load.
    curve: BTreeMap<u64, f64>,
    runs: Vec<SeedFigures>,
}

#[derive(Serialize)]
struct SeedFigures {
    seed: i64,
    value: f64,
    lost_before_90: u64,
    #[serde(skip)]
    points: BTreeMap<u64, (f64, u64)>,
}

/// The JSON output.
#[derive(Serialize)]
struct JsonStress<'r> {
    worlds: &'r [WorldFigures],
    left_out: &'r [String],
}

impl Measure {
    fn name(self) -> &'static str {
        match self {
            Self::Allocation => "allocation",
            Self::Efficiency => "efficiency",
        }
    }

    /// The first load that is compared.
    fn first(self) -> u64 {
        match self {
            Self::Allocation => 50,
            Self::Efficiency => 30,
        }
    }

    /// The figure at each load that is compared, and the empty GPUs then.
    fn points(self, run: &Run) -> BTreeMap<u64, (f64, u64)> {
        let columns: BTreeMap<u64, f64> = run.curve.columns().into_iter().collect();
        let last = run.end.load_percent;
        let mut loads: Vec<u64> = (self.first()..=last).step_by(STEP).collect();
        if self == Self::Efficiency {
            loads.push(last);
        }
        let points = loads.into_iter().filter_map(|load| {
            let reached = run.samples.partition_point(|sample| sample.load_percent <= load);
            let sample = match load == last {
                true => run.end,
                false => *run.samples.get(reached.checked_sub(1)?)?,
            };
            let value = match self {
                Self::Allocation => *columns.range(..=load).next_back()?.1,
                Self::Efficiency => percent(sample.efficiency),
            };
            Some((load, (value, sample.empty_gpus)))
        });
        points.collect()
    }
}

impl PolicyFigures {
    fn of(policy: &'static str, runs: &[Timed<Run>], measure: Measure) -> Self {
        let runs: Vec<SeedFigures> = runs
            .iter()
            .map(|Timed { run, .. }| {
                let points = measure.points(run);
                let at_end = points.last_key_value().map_or(0.0, |(_, (value, _))| *value);
                let value = match measure {
                    Measure::Allocation => run.curve.at_100().unwrap_or(at_end),
                    Measure::Efficiency => at_end,
                };
                let (seed, lost_before_90) = (run.seed, run.lost_before_90);
                SeedFigures { seed, value: rounded(value), lost_before_90, points }
            })
            .collect();
        let rounded_mean = |values: Vec<f64>| mean(&values).map_or(0.0, rounded);
        let loads = runs.first().map(|run| run.points.keys().copied().collect::<Vec<u64>>());
        let curve = loads.into_iter().flatten().filter_map(|load| {
            let values: Option<Vec<f64>> =
                runs.iter().map(|run| run.points.get(&load).map(|(value, _)| *value)).collect();
            Some((load, rounded(mean(&values?)?)))
        });
        let empty = runs.iter().flat_map(|run| run.points.values().map(|(_, gpus)| *gpus as f64));
        Self {
            policy,
            is_baseline: is_baseline(policy),
            value: rounded_mean(runs.iter().map(|run| run.value).collect()),
            least: runs.iter().map(|run| run.value).reduce(f64::min).unwrap_or(0.0),
            lost_before_90: rounded_mean(
                runs.iter().map(|run| run.lost_before_90 as f64).collect(),
            ),
            empty_gpus: rounded_mean(empty.collect()),
            curve: curve.collect(),
            runs,
        }
    }
}

impl WorldFigures {
    fn of(results: &Results<Run>, measure: Measure) -> Self {
        let policies = results.by_policy.iter();
        let figures: Vec<PolicyFigures> =
            policies.map(|(policy, runs)| PolicyFigures::of(policy, runs, measure)).collect();
        let worst = worst(&figures);
        let (world, measure) = (results.trace.clone(), measure.name());
        Self { world, measure, worst, results: figures }
    }

    fn row(&self) -> Vec<String> {
        let mut row = vec![self.world.clone(), self.measure.to_owned()];
        row.extend(self.results.iter().map(|one| format!("{:.2}", one.value)));
        let ours = self.results.first();
        row.push(ours.map_or_else(String::new, |ours| format!("{:.2}", ours.least)));
        match &self.worst {
            None => row.extend(["-", "-", "-"].map(str::to_owned)),
            Some(Worst { difference, load, baseline }) => {
                row.extend([format!("{difference:+.2}"), load.to_string(), (*baseline).to_owned()])
            }
        }
        let fgd = self.results.iter().find(|one| one.policy == SimPolicy::FGD.name);
        row.extend([ours, fgd].map(|one| {
            one.map_or_else(|| "-".to_owned(), |one| format!("{:.1}", one.lost_before_90))
        }));
        let most = self.results.iter().skip(1).filter(|one| one.is_baseline);
        let most = most.map(|one| one.empty_gpus).reduce(f64::max);
        row.push(match (ours, most) {
            (Some(ours), Some(most)) => format!("{:+.1}", ours.empty_gpus - most),
            _ => "-".to_owned(),
        });
        row
    }
}

/// Where the first policy falls behind the best baseline most.
fn worst(figures: &[PolicyFigures]) -> Option<Worst> {
    let (ours, others) = figures.split_first()?;
    let all = ours.curve.iter().filter_map(|(load, value)| {
        let baselines = others.iter().filter(|one| one.is_baseline);
        let best = baselines.filter_map(|one| Some((*one.curve.get(load)?, one.policy)));
        let (best, baseline) = best.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
        Some(Worst { difference: rounded(value - best), load: *load, baseline })
    });
    all.min_by(|a, b| a.difference.total_cmp(&b.difference))
}

impl StressReport {
    /// A report on the worlds, each with what is compared there.
    pub(crate) fn new(
        title: String,
        results: Vec<Results<Run>>,
        measures: Vec<Measure>,
        left_out: Vec<String>,
    ) -> Self {
        let worlds = results.iter().zip(measures);
        let worlds = worlds.map(|(results, measure)| WorldFigures::of(results, measure)).collect();
        Self { title, worlds, left_out }
    }

    /// A table for people.
    pub(crate) fn table(&self) -> String {
        let policies = self.worlds.first().map(|world| &world.results);
        let policies = policies.into_iter().flatten().map(|one| one.policy);
        let heads: Vec<&str> = ["world", "of"]
            .into_iter()
            .chain(policies)
            .chain(["least", "worst", "at", "against", "early", "fgd's", "empty"])
            .collect();
        let rows = self.worlds.iter().map(WorldFigures::row).collect();
        let rows = aligned(&heads, 2, rows, false);
        let left_out = match self.left_out.is_empty() {
            true => String::new(),
            false => {
                format!("left out, as the trace has no such pods: {}\n", self.left_out.join(", "))
            }
        };
        format!("{}\n\n{rows}\n{left_out}{LEGEND}", self.title)
    }

    /// JSON with a result per world and policy.
    ///
    /// # Panics
    /// Never: all values are plain numbers and names.
    pub(crate) fn json(&self) -> String {
        let report = JsonStress { worlds: &self.worlds, left_out: &self.left_out };
        serde_json::to_string_pretty(&report).expect("numbers and names are valid JSON") + "\n"
    }

    /// One CSV row per world, policy, seed and load.
    pub(crate) fn csv(&self) -> String {
        let mut text = String::from("world,measure,policy,seed,load,value,empty_gpus\n");
        for world in &self.worlds {
            for one in &world.results {
                for run in &one.runs {
                    for (load, (value, gpus)) in &run.points {
                        text.push_str(&csv_name(&world.world));
                        let (measure, policy, seed) = (world.measure, one.policy, run.seed);
                        let value = rounded(*value);
                        text.push_str(&format!(
                            "{measure},{policy},{seed},{load},{value},{gpus}\n"
                        ));
                    }
                }
            }
        }
        text
    }
}

/// The meaning of the columns.
const LEGEND: &str = "\
by policy        mean over the seeds: GPUs allocated at 100 % load, or how full occupied GPUs are at the end, in %
least            the least of it over the seeds, of the first policy
worst, at        the first policy less the best of the others, in points, at the load where it is worst
early, fgd's     pods that fitted nowhere while less than 90 % had been requested
empty            GPUs without a pod, mean over all loads, less those of the best of the others
";
