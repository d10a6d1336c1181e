//! Policies for MIG instances, compared: as a table, as JSON, and as comma-separated values.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::mig::policy::MigPolicy;
use crate::mig::series::{Comparing, MigRun, runs};

/// Rounding of the output, in parts of a percent.
const PARTS: f64 = 1e4;

/// The figures of all worlds and seeds.
#[derive(Debug)]
pub struct MigComparison {
    comparing: Comparing,
    /// By world and seed.
    runs: Vec<Vec<MigRun>>,
}

/// Plays all worlds and seeds.
///
/// # Panics
/// Without a world, a policy or a seed.
pub fn compare(comparing: Comparing) -> MigComparison {
    let runs = runs(&comparing);
    assert!(runs.iter().all(|seeds| !seeds.is_empty()) && !runs.is_empty(), "there is a run");
    MigComparison { comparing, runs }
}

/// A row of the table.
struct MigRow {
    name: String,
    /// By world.
    figures: Vec<f64>,
    /// What stands after the mean.
    more: String,
}

impl MigComparison {
    /// A figure of each world, as mean over its seeds.
    fn by_world(&self, figure: impl Fn(&MigRun) -> f64) -> Vec<f64> {
        let means = self.runs.iter();
        means.map(|runs| runs.iter().map(&figure).sum::<f64>() / runs.len() as f64).collect()
    }

    fn is_churn(&self) -> bool {
        self.comparing.load.is_some()
    }

    /// In how many pairs of world and seed the first policy is better than another one, of all.
    fn won(&self, other: usize) -> String {
        let runs = || self.runs.iter().flatten();
        let is_better = |run: &&MigRun| match self.is_churn() {
            true => run.figures[0] < run.figures[other],
            false => run.figures[0] > run.figures[other],
        };
        format!("{}/{}", runs().filter(is_better).count(), runs().count())
    }

    /// How much of the gap between another policy and free repacking the first one closes, in percent, mean
    /// of the worlds. `None` without bounds.
    fn closed(&self, other: usize) -> Option<f64> {
        self.runs[0][0].bounds.get(1)?;
        let free = self.by_world(|run| run.bounds[1].1);
        let (ours, theirs) =
            (self.by_world(|run| run.figures[0]), self.by_world(|run| run.figures[other]));
        let pairs = ours.iter().zip(&theirs).zip(&free);
        let gaps = pairs.filter(|((_, theirs), free)| theirs > free);
        let parts: Vec<f64> =
            gaps.map(|((ours, theirs), free)| 100.0 * (theirs - ours) / (theirs - free)).collect();
        (!parts.is_empty()).then(|| mean(&parts))
    }

    fn rows(&self) -> Vec<MigRow> {
        let bounds = self.runs[0][0].bounds.iter().enumerate().map(|(at, (name, _))| MigRow {
            name: (*name).to_owned(),
            figures: self.by_world(|run| run.bounds[at].1),
            more: String::new(),
        });
        let policies = self.comparing.policies.iter().enumerate().map(|(at, policy)| {
            let figures = self.by_world(|run| run.figures[at]);
            let won = if at == 0 { String::new() } else { self.won(at) };
            let mut more = format!(" {won:>9}");
            let mut add = |value: Option<f64>| {
                more += &value.map_or_else(|| " ".repeat(9), |value| format!(" {value:>8.2}"));
            };
            if self.is_churn() {
                // one that moves instances is no other choice of places
                let is_alike = at > 0 && *policy != MigPolicy::OursWithMove;
                add(self.closed(at).filter(|_| is_alike));
                add(Some(mean(&self.by_world(|run| run.moves[at]))));
            } else {
                let parts = self.runs[0][0].bounds.first().map(|_| {
                    let bounds = self.by_world(|run| run.bounds[0].1);
                    let parts = figures.iter().zip(&bounds).map(|(own, most)| 100.0 * own / most);
                    parts.collect::<Vec<f64>>()
                });
                add(parts.as_deref().map(mean));
                add(parts.as_deref().map(least));
                add(Some(least(&self.by_world(|run| run.first_losses[at]))));
            }
            MigRow { name: policy.name().to_owned(), figures, more }
        });
        bounds.chain(policies).collect()
    }

    /// As a table for people.
    pub fn table(&self) -> String {
        let Comparing { gpus, load, .. } = &self.comparing;
        let seeds = self.runs[0].len();
        let how = match load {
            Some(load) => format!("churn at load {load}, demand that fits nowhere in %"),
            None => "arrivals up to load 1.0, memory units allocated in %".to_owned(),
        };
        let mut text = format!("MIG instances on {gpus} GPUs, {how}, {seeds} seeds\n\n");
        let names: Vec<String> = self.comparing.worlds.iter().map(|world| world.name()).collect();
        text += &format!("{:<18}", "policy");
        names.iter().for_each(|name| text += &format!(" {name:>0$}", width(name)));
        text += &format!(" {:>7} {:>9}", "mean", "won");
        text +=
            if self.is_churn() { "   closed    moves\n" } else { " of bound    worst  1st loss\n" };
        for MigRow { name, figures, more } in self.rows() {
            // Writing into a text cannot fail.
            let _ = write!(text, "{name:<18}");
            for (figure, name) in figures.iter().zip(&names) {
                let _ = write!(text, " {figure:>0$.2}", width(name));
            }
            let _ = writeln!(text, " {:>7.2}{more}", mean(&figures));
        }
        text += "\nwon: pairs of mix and seed in which the first policy is better.";
        text += match self.is_churn() {
            true => {
                " closed: part of the gap to free\nrepacking that it closes, mean of the mixes, in %. \
                     moves: requests for which another instance was\nmoved, in %.\n"
            }
            false => {
                " of bound, worst: part of what any\npolicy could allocate, mean and least of the \
                 mixes, in %. 1st loss: load in % at which a request is\nrefused first, least of \
                 the mixes.\n"
            }
        };
        text
    }

    /// One row per world, seed, and policy or bound.
    fn values(&self) -> Vec<[(&'static str, Value); 5]> {
        let (figure, more) = match self.is_churn() {
            true => ("blocked_percent", "moves_percent"),
            false => ("allocated_percent", "first_loss_percent"),
        };
        let mut rows = Vec::new();
        for (world, runs) in self.comparing.worlds.iter().zip(&self.runs) {
            for (seed, run) in self.comparing.seeds.iter().zip(runs) {
                let mut row = |name: &str, value: f64, other: Option<f64>| {
                    rows.push([
                        ("mix", json!(world.name())),
                        ("seed", json!(seed)),
                        ("policy", json!(name)),
                        (figure, json!(rounded(value))),
                        (more, json!(other.map(rounded))),
                    ]);
                };
                run.bounds.iter().for_each(|(name, value)| row(name, *value, None));
                let others = if self.is_churn() { &run.moves } else { &run.first_losses };
                for (at, policy) in self.comparing.policies.iter().enumerate() {
                    row(policy.name(), run.figures[at], others.get(at).copied());
                }
            }
        }
        rows
    }

    /// The figures of each seed as comma-separated values.
    pub fn csv(&self) -> String {
        let rows = self.values();
        let mut text = String::new();
        let mut line = |cells: Vec<String>| text += &(cells.join(",") + "\n");
        let names = rows.first().map(|row| row.each_ref().map(|(name, _)| (*name).to_owned()));
        names.into_iter().for_each(|names| line(names.into()));
        rows.iter().for_each(|row| line(row.iter().map(|(_, value)| cell(value)).collect()));
        text
    }

    /// The same in JSON.
    pub fn json(&self) -> String {
        let Comparing { gpus, load, .. } = &self.comparing;
        let rows = self.values().into_iter().map(|row| {
            Value::Object(row.map(|(name, value)| (name.to_owned(), value)).into_iter().collect())
        });
        let rows: Vec<Value> = rows.collect();
        format!("{:#}\n", json!({"gpus": gpus, "load": load, "results": rows}))
    }
}

/// The width of a world's column.
fn width(name: &str) -> usize {
    name.len().max(7)
}

fn cell(value: &Value) -> String {
    if value.is_null() { String::new() } else { value.to_string() }
}

fn mean(figures: &[f64]) -> f64 {
    figures.iter().sum::<f64>() / figures.len() as f64
}

fn least(figures: &[f64]) -> f64 {
    figures.iter().copied().fold(f64::INFINITY, f64::min)
}

fn rounded(value: f64) -> f64 {
    libm::round(value * PARTS) / PARTS
}

#[cfg(test)]
mod tests;
