//! The scenario of bursts under several rules of a pool, as a table.

use std::fmt::Write;
use std::num::NonZeroUsize;

use serde_json::{Map, Value, json};

use cli::simulate::jobs::on_all_cores;
use engine::hardware::pool::{Borrow, PoolRule};
use engine::ledger::change::reports::ReportRefusal;
use sim::trace::schedule::TimedWorkload;
use sim::trace::workload::capacity_milli;
use wire::units::Share;

use crate::bursts::columns::TraceBursts;
use crate::bursts::scenario::{BurstFigures, play};
use crate::bursts::world::BurstWorld;

/// Days until anything is measured, and after that: as in the table of the docs.
const WARM_UP_DAYS: u64 = 2;
const MEASURED_DAYS: u64 = 14;

/// The figures of the rules, each a mean over all seeds.
#[derive(Debug)]
pub struct Comparison {
    /// What was played, for people.
    title: String,
    /// The same for programs.
    about: (&'static str, Value),
    seeds: usize,
    rows: Vec<(&'static str, BurstFigures)>,
}

/// The rules that are compared, by name.
fn rules() -> [(&'static str, PoolRule); 3] {
    let rule = |borrow| PoolRule { borrow, ..PoolRule::default() };
    let memory = Borrow::Memory { most: Share::WHOLE };
    [("none", rule(Borrow::None)), ("compute", rule(Borrow::Compute)), ("memory", rule(memory))]
}

/// The pods that come.
#[derive(Debug)]
pub enum Source<'t> {
    /// They are drawn, and request this part of 64 GPUs on average.
    Drawn(f64),
    /// They are those of a trace.
    Traced {
        /// Its name.
        name: &'t str,
        /// Its pods at their times.
        workload: &'t TimedWorkload,
        /// The bursts of each pod.
        bursts: &'t [Option<TraceBursts>],
    },
}

impl Source<'_> {
    fn world(&self, seed: u64) -> BurstWorld {
        match self {
            Self::Drawn(load) => BurstWorld::drawn(seed, *load, WARM_UP_DAYS, MEASURED_DAYS),
            Self::Traced { workload, bursts, .. } => BurstWorld::traced(workload, bursts),
        }
    }

    fn title(&self) -> String {
        match self {
            Self::Drawn(load) => {
                format!("bursts on 64 GPUs of 8 nodes at load {load}, {MEASURED_DAYS} days")
            }
            Self::Traced { workload: TimedWorkload { nodes, pods, schedule }, bursts, .. } => {
                let gpus = capacity_milli(nodes) / 1000;
                let bursting = bursts.iter().flatten().count();
                let hours = schedule.unit.from_ticks(schedule.window.end) / 3600.0;
                format!(
                    "bursts of {bursting} of {} pods on {gpus} GPUs of {} nodes, {hours:.1} hours",
                    pods.len(),
                    nodes.len()
                )
            }
        }
    }

    fn about(&self) -> (&'static str, Value) {
        match self {
            Self::Drawn(load) => ("load", json!(load)),
            Self::Traced { name, .. } => ("trace", json!(name)),
        }
    }
}

/// Plays the scenario with all rules and seeds, `jobs` runs at a time.
///
/// # Errors
/// A node of a trace that the ledger refuses.
pub fn compare(
    source: &Source<'_>,
    seeds: &[u64],
    jobs: Option<NonZeroUsize>,
) -> Result<Comparison, ReportRefusal> {
    let rules = rules();
    let runs: Vec<(usize, u64)> =
        seeds.iter().flat_map(|seed| (0..rules.len()).map(move |rule| (rule, *seed))).collect();
    let results = on_all_cores(&runs, jobs, |(rule, seed)| {
        play(&source.world(*seed), *seed, rules[*rule].1)
    })?;
    let mut rows: Vec<(&str, BurstFigures)> =
        rules.iter().map(|(name, _)| (*name, BurstFigures::default())).collect();
    // In the order of the seeds: sums of fractions depend on it.
    for ((rule, _), figures) in runs.iter().zip(&results) {
        rows[*rule].1.add(figures);
    }
    Ok(Comparison { title: source.title(), about: source.about(), seeds: seeds.len(), rows })
}

impl Comparison {
    /// As a table for people.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{}, {} seeds\n\n{:<22} {:>11} {:>8} {:>9} {:>9} \
             {:>9} {:>8} {:>8} {:>6}\n",
            self.title,
            self.seeds,
            "borrow",
            "allocated %",
            "served %",
            "refused %",
            "slowdown",
            "waiting %",
            "recalls",
            "in place",
            "lost",
        );
        for (name, figures) in &self.rows {
            let [allocated, served, refused, slowdown, waiting, recalls, in_place, lost] =
                figures.named().map(|(_, value)| value);
            // Writing into a text cannot fail.
            let _ = writeln!(
                text,
                "{name:<22} {allocated:>11.1} {served:>8.1} {refused:>9.1} {slowdown:>9.1} {waiting:>9.1} \
                 {recalls:>8.1} {in_place:>8.1} {lost:>6.1}"
            );
        }
        text += "\nserved: GPU time of bursts, of what they wanted. refused: bursts that did not get their \
                 memory.\nwaiting: pods of a whole GPU that waited for more than 10 s. recalls, in place \
                 and lost: guests moved\nhome, restarts to take memory back, and processes with memory that these \
                 ended, per 100\nnotebook-hours.\n";
        text
    }

    /// The same as comma-separated values.
    pub fn csv(&self) -> String {
        let mut text = String::from("borrow");
        let names = self.rows.first().map(|(_, figures)| figures.named().map(|(name, _)| name));
        names.into_iter().flatten().for_each(|name| text += &format!(",{name}"));
        text += "\n";
        for (name, figures) in &self.rows {
            text += &format!("\"{name}\"");
            figures.named().iter().for_each(|(_, value)| text += &format!(",{value}"));
            text += "\n";
        }
        text
    }

    /// The same in JSON.
    pub fn json(&self) -> String {
        let rows = self.rows.iter().map(|(name, figures)| {
            let mut row = Map::new();
            row.insert("borrow".to_owned(), json!(name));
            row.extend(figures.named().map(|(name, value)| (name.to_owned(), json!(value))));
            Value::Object(row)
        });
        let rows: Vec<Value> = rows.collect();
        let (name, value) = &self.about;
        format!("{:#}\n", json!({*name: value, "seeds": self.seeds, "rules": rows}))
    }
}
