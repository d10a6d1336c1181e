//! The scenario of bursts under several rules of a pool, as a table.

use std::fmt::Write;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use crate::hardware::pool::{Borrow, PoolRule};
use crate::hardware::units::Share;
use crate::ledger::change::reports::ReportRefusal;
use crate::sim::bursts::scenario::{Figures, play};
use crate::sim::bursts::world::World;
use crate::sim::trace::read::TracePod;
use crate::sim::trace::schedule::TimedWorkload;
use crate::sim::trace::workload::capacity_milli;

/// Days until anything is measured, and after that: as in the table of the docs.
const DAYS: (u64, u64) = (2, 14);

/// The figures of the rules, each a mean over all seeds.
#[derive(Debug)]
pub struct Comparison {
    /// What was played, for people.
    title: String,
    /// The same for programs.
    about: (&'static str, Value),
    seeds: usize,
    rows: Vec<(&'static str, Figures)>,
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
    /// They are those of a trace of this name.
    Traced(&'t str, &'t TimedWorkload),
}

impl Source<'_> {
    fn world(&self, seed: u64) -> World {
        match self {
            Self::Drawn(load) => World::drawn(seed, *load, DAYS),
            Self::Traced(_, workload) => World::traced(workload),
        }
    }

    fn title(&self) -> String {
        match self {
            Self::Drawn(load) => {
                format!("bursts on 64 GPUs of 8 nodes at load {load}, {} days", DAYS.1)
            }
            Self::Traced(_, TimedWorkload { nodes, pods, schedule }) => {
                let gpus = capacity_milli(nodes) / 1000;
                let bursting =
                    |pod: &&TracePod| pod.more.as_ref().is_some_and(|it| it.bursts.is_some());
                let bursting = pods.iter().filter(bursting).count();
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
            Self::Traced(name, _) => ("trace", json!(name)),
        }
    }
}

/// Plays the scenario with all rules and seeds, `jobs` runs at a time.
///
/// # Errors
/// A node of a trace that the ledger refuses.
pub fn compare(
    source: &Source<'_>,
    seeds: RangeInclusive<u64>,
    jobs: NonZeroUsize,
) -> Result<Comparison, ReportRefusal> {
    let (rules, seeds): (_, Vec<u64>) = (rules(), seeds.collect());
    let runs: Vec<(usize, u64)> =
        seeds.iter().flat_map(|seed| (0..rules.len()).map(move |rule| (rule, *seed))).collect();
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<Result<Figures, ReportRefusal>>>> =
        Mutex::new(vec![None; runs.len()]);
    thread::scope(|scope| {
        for _ in 0..jobs.get().min(runs.len()) {
            scope.spawn(|| {
                while let Some((rule, seed)) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let figures = play(&source.world(*seed), *seed, rules[*rule].1);
                    let at = runs.iter().position(|run| *run == (*rule, *seed));
                    results.lock()[at.expect("it is one of them")] = Some(figures);
                }
            });
        }
    });
    let mut rows: Vec<(&str, Figures)> =
        rules.iter().map(|(name, _)| (*name, Figures::default())).collect();
    // In the order of the seeds: sums of fractions depend on it.
    for ((rule, _), figures) in runs.iter().zip(results.into_inner()) {
        rows[*rule].1.add(&figures.expect("each has been played")?);
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
