//! The output of `gpupack-lab times`: a table per figure with a row per world, and a summary.
//!
//! The first policy is compared, seed by seed, with the best of the *baselines*, which are all others
//! except the variants of `fragmentation`. Of all figures, less is better.

use std::collections::BTreeMap;

use serde::Serialize;

use cli::simulate::figures::{mean, percent, percent_of, rounded};
use cli::simulate::jobs::Results;
use cli::simulate::report::{aligned, csv_name};
use sim::chart::draw::{Chart, Curve};
use sim::run::replay::{Overflow, TimedRun};
use sim::run::service::PodClass;

use crate::bursts::world::HOUR;
use crate::policies::all::is_baseline;

/// Figures of one replay, by name.
type Figures = BTreeMap<&'static str, f64>;

/// A figure.
struct Measure {
    name: &'static str,
    head: &'static str,
    of: fn(&TimedRun) -> f64,
}

/// Figures of lost pods, and of pods that have to wait.
const BLOCKED: [Measure; 2] = [
    Measure {
        name: "blocked_demand",
        head: "blocked demand, in % of the GPUs that pods requested",
        of: |run| percent_of(run.all.blocked_milli, run.all.demand_milli),
    },
    Measure {
        name: "blocked_gpu_hours",
        head: "blocked GPU-hours, in % of those that pods requested",
        of: |run| percent(run.all.blocked_time()),
    },
];

/// Figures of waiting pods.
const WAITING: [Measure; 4] = [
    Measure {
        name: "waiting_gpus",
        head: "GPUs that pods wait for, mean over time",
        of: |run| rounded(percent(run.all.waiting) * run.capacity_milli as f64 / 100_000.0),
    },
    Measure {
        name: "wait_p99_hours_fraction",
        head: "p99 wait of pods with a part of a GPU, in hours",
        of: |run| wait_p99_hours(run, PodClass::Fraction),
    },
    Measure {
        name: "wait_p99_hours_whole",
        head: "p99 wait of pods with one GPU, in hours",
        of: |run| wait_p99_hours(run, PodClass::Whole),
    },
    Measure {
        name: "wait_p99_hours_several",
        head: "p99 wait of pods with several GPUs, in hours",
        of: |run| wait_p99_hours(run, PodClass::Several),
    },
];

fn wait_p99_hours(run: &TimedRun, class: PodClass) -> f64 {
    let found = run.by_class.iter().find(|(known, _)| *known == class);
    found.map_or(0.0, |(_, figures)| rounded(figures.waits.p99 as f64 / HOUR as f64))
}

/// What is known of a world before it is played.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct WorldHead {
    pub(crate) kind: String,
    pub(crate) is_seen: bool,
    pub(crate) load: f64,
}

/// The replays of all worlds.
pub(crate) struct TimesReport {
    title: String,
    measures: Vec<Measure>,
    worlds: Vec<WorldFigures>,
    /// Kinds for which a trace has no pods.
    left_out: Vec<String>,
}

/// The figures of one world.
#[derive(Serialize)]
struct WorldFigures {
    #[serde(flatten)]
    head: WorldHead,
    results: Vec<PolicyFigures>,
}

/// One policy in one world: means over the seeds.
#[derive(Serialize)]
struct PolicyFigures {
    policy: &'static str,
    #[serde(flatten)]
    means: Figures,
    runs: Vec<SeedFigures>,
}

#[derive(Serialize)]
struct SeedFigures {
    seed: i64,
    #[serde(flatten)]
    figures: Figures,
}

/// How the first policy compares with the best baseline of each run, in one figure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
struct Against {
    runs: usize,
    /// Runs in which it is no more than that of the best baseline.
    at_or_below: usize,
    /// Its sum over the runs, as a multiple of that of the best baselines; `None` if theirs is zero.
    ratio: Option<f64>,
}

/// A row of the summary.
#[derive(Serialize)]
struct Summary {
    measure: &'static str,
    kinds: &'static str,
    #[serde(flatten)]
    against: Against,
}

/// The JSON output.
#[derive(Serialize)]
struct JsonTimes<'r> {
    worlds: &'r [WorldFigures],
    summary: Vec<Summary>,
    left_out: &'r [String],
}

impl WorldFigures {
    fn of(head: WorldHead, results: &Results<TimedRun>, measures: &[Measure]) -> Self {
        let figures = |run: &TimedRun| measures.iter().map(|m| (m.name, (m.of)(run))).collect();
        let results = results.by_policy.iter().map(|(policy, runs)| {
            let runs = runs.iter().map(|timed| &timed.run);
            let runs: Vec<SeedFigures> =
                runs.map(|run| SeedFigures { seed: run.seed, figures: figures(run) }).collect();
            let means = measures.iter().map(|measure| {
                let values: Vec<f64> = runs.iter().map(|run| run.figures[measure.name]).collect();
                (measure.name, mean(&values).map_or(0.0, rounded))
            });
            PolicyFigures { policy, means: means.collect(), runs }
        });
        Self { head, results: results.collect() }
    }

    /// Of each seed: the figure of the first policy, and the least of the baselines.
    fn pairs(&self, measure: &str) -> Vec<(f64, f64)> {
        let Some((ours, others)) = self.results.split_first() else { return Vec::new() };
        let runs = ours.runs.iter().enumerate().filter_map(|(place, run)| {
            let baselines = others.iter().filter(|other| is_baseline(other.policy));
            let values = baselines.filter_map(|other| other.runs.get(place));
            let least = values.map(|run| run.figures[measure]).reduce(f64::min)?;
            Some((run.figures[measure], least))
        });
        runs.collect()
    }

    fn row(&self, measure: &str) -> Vec<String> {
        let seen = if self.head.is_seen { "yes" } else { "no" };
        let mut row = vec![self.head.kind.clone(), seen.to_owned(), self.head.load.to_string()];
        row.extend(self.results.iter().map(|one| format!("{:.2}", one.means[measure])));
        row.extend(Against::of(&self.pairs(measure)).cells());
        row
    }
}

impl Against {
    fn of(pairs: &[(f64, f64)]) -> Self {
        let ours: f64 = pairs.iter().map(|(ours, _)| ours).sum();
        let least: f64 = pairs.iter().map(|(_, least)| least).sum();
        Self {
            runs: pairs.len(),
            at_or_below: pairs.iter().filter(|(ours, least)| ours <= least).count(),
            ratio: (least > 0.0).then(|| rounded(ours / least)),
        }
    }

    fn cells(self) -> [String; 2] {
        let ratio = self.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
        [format!("{}/{}", self.at_or_below, self.runs), ratio]
    }
}

impl TimesReport {
    /// A report on the replays of worlds, in the order of their heads.
    pub(crate) fn new(
        title: String,
        heads: Vec<WorldHead>,
        results: &[Results<TimedRun>],
        overflow: Overflow,
    ) -> Self {
        let measures: Vec<Measure> = match overflow {
            Overflow::Lost => BLOCKED.into(),
            Overflow::Queued => WAITING.into_iter().chain(BLOCKED).collect(),
        };
        let worlds = heads.into_iter().zip(results);
        let worlds = worlds.map(|(head, results)| WorldFigures::of(head, results, &measures));
        let worlds = worlds.collect();
        Self { title, measures, worlds, left_out: Vec::new() }
    }

    /// The same with the kinds that were left out.
    pub(crate) fn without(self, left_out: Vec<String>) -> Self {
        Self { left_out, ..self }
    }

    /// Tables for people.
    pub(crate) fn table(&self) -> String {
        let policies = self.worlds.first().map(|world| &world.results);
        let policies = policies.into_iter().flatten().map(|one| one.policy);
        let heads = ["kind", "seen", "load"].into_iter().chain(policies).chain(["wins", "ratio"]);
        let heads: Vec<&str> = heads.collect();
        let mut text = format!("{}\n", self.title);
        for measure in &self.measures {
            let rows = self.worlds.iter().map(|world| world.row(measure.name)).collect();
            text += &format!("\n{}\n{}", measure.head, aligned(&heads, 2, rows, false));
        }
        let rows = self.summary().into_iter().map(|one| {
            let names = [one.measure, one.kinds].map(str::to_owned);
            [&names[..], &one.against.cells()].concat()
        });
        let summary = aligned(&["summary", "kinds", "wins", "ratio"], 2, rows.collect(), false);
        let left_out = match self.left_out.is_empty() {
            true => String::new(),
            false => {
                format!("left out, as the trace has no such pods: {}\n", self.left_out.join(", "))
            }
        };
        format!("{text}\n{summary}\n{left_out}{LEGEND}")
    }

    /// JSON with a result per world and policy, and the summary.
    ///
    /// # Panics
    /// Never: all values are plain numbers and names.
    pub(crate) fn json(&self) -> String {
        let (worlds, left_out) = (&self.worlds[..], &self.left_out[..]);
        let report = JsonTimes { worlds, summary: self.summary(), left_out };
        serde_json::to_string_pretty(&report).expect("numbers and names are valid JSON") + "\n"
    }

    /// One CSV row per world, policy and seed.
    pub(crate) fn csv(&self) -> String {
        let names: Vec<&str> = self.measures.iter().map(|measure| measure.name).collect();
        let mut text = format!("kind,is_seen,load,policy,seed,{}\n", names.join(","));
        for WorldFigures { head, results } in &self.worlds {
            for (one, run) in results.iter().flat_map(|one| one.runs.iter().map(move |r| (one, r)))
            {
                let values: Vec<String> =
                    names.iter().map(|name| run.figures[name].to_string()).collect();
                text += &csv_name(&head.kind);
                let (is_seen, load, values) = (head.is_seen, head.load, values.join(","));
                text += &format!("{is_seen},{load},{},{},{values}\n", one.policy, run.seed);
            }
        }
        text
    }

    /// By world: the blocked demand of each policy, less the least of the baselines.
    pub(crate) fn chart(&self) -> Chart {
        let measure = BLOCKED[0].name;
        let rows = self.worlds.iter().map(|WorldFigures { head, .. }| {
            let unseen = if head.is_seen { "" } else { " *" };
            format!("{}{unseen} {}", head.kind, head.load)
        });
        let mut curves: Vec<Curve> = Vec::new();
        for (row, world) in self.worlds.iter().enumerate() {
            let baselines = world.results.iter().filter(|one| is_baseline(one.policy));
            let least = baselines.map(|one| one.means[measure]).reduce(f64::min).unwrap_or(0.0);
            for (place, one) in world.results.iter().enumerate() {
                if curves.len() <= place {
                    curves.push(Curve { label: one.policy.to_owned(), points: Vec::new() });
                }
                curves[place].points.push((one.means[measure] - least, row as f64));
            }
        }
        Chart {
            title: "Blocked demand by world (* unseen), less the least of the others".to_owned(),
            x_label: "points of the GPUs that pods requested; left of 0 is better".to_owned(),
            y_label: String::new(),
            rows: rows.collect(),
            curves,
        }
    }

    /// A row per figure and part of the kinds; none without a baseline.
    fn summary(&self) -> Vec<Summary> {
        let mut rows = Vec::new();
        for measure in self.measures.iter().map(|measure| measure.name) {
            for (kinds, is_seen) in [("seen", true), ("unseen", false)] {
                let worlds = self.worlds.iter().filter(|world| world.head.is_seen == is_seen);
                let pairs: Vec<(f64, f64)> =
                    worlds.flat_map(|world| world.pairs(measure)).collect();
                if !pairs.is_empty() {
                    rows.push(Summary { measure, kinds, against: Against::of(&pairs) });
                }
            }
        }
        rows
    }
}

/// The meaning of the columns.
const LEGEND: &str = "\
by policy        mean over the seeds; less is better
wins             runs in which the first policy is at or below the best of the others
ratio            its sum over the runs, as a multiple of the sum of the best of the others of each run
seen             kinds on which policies may be tuned; the others show what that is worth elsewhere
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_policy_is_compared_with_the_best_of_each_run() {
        let policy = |policy, values: [f64; 2]| {
            let runs = values.into_iter().zip(1..).map(|(value, seed)| SeedFigures {
                seed,
                figures: [("waiting_gpus", value)].into(),
            });
            PolicyFigures { policy, means: Figures::new(), runs: runs.collect() }
        };
        let mut world = WorldFigures {
            head: WorldHead { kind: "k".to_owned(), is_seen: true, load: 0.9 },
            results: vec![
                policy("fragmentation", [2.0, 3.0]),
                policy("known-mix", [0.0, 0.0]),
                policy("fgd", [2.0, 9.0]),
                policy("bestfit", [4.0, 2.0]),
            ],
        };
        let pairs = world.pairs("waiting_gpus");
        assert_eq!(pairs, [(2.0, 2.0), (3.0, 2.0)]);
        let against = Against::of(&pairs);
        assert_eq!(against, Against { runs: 2, at_or_below: 1, ratio: Some(1.25) });
        assert_eq!(against.cells(), ["1/2", "1.25"]);
        world.results.truncate(2);
        assert_eq!(world.pairs("waiting_gpus"), [], "no baseline");
        assert_eq!(Against::of(&[(1.0, 0.0)]).cells(), ["0/1", "-"]);
    }
}
