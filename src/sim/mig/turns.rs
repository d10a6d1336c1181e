//! GPUs that are shared and divided by turns: what is refused, and how often a GPU is switched.
//!
//! A part of the demand is for MIG instances of a mix, the rest for parts of a GPU, a fifth of these for whole
//! ones. The part of MIG goes from 15 % to 85 % and back within a day of 12 mean lifetimes. Parts get the GPU with
//! the least room that is enough, instances the places of gpupack's policy.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt::Write;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::{Value, json};

use crate::hardware::layouts::LayoutId;
use crate::sim::mig::fleet::{Fleet, Instance};
use crate::sim::mig::packing::Packing;
use crate::sim::mig::policy::{Chooser, MigPolicy};
use crate::sim::mig::requests::drawn;
use crate::sim::mig::worlds::{Stage, World};
use crate::sim::trace::exponential::{MEAN_TICKS, exponential};

/// A day, in mean lifetimes.
const DAY: f64 = 12.0;

/// Days before requests count, and until the end.
const MEASURED: (f64, f64) = (1.0, 3.0);

/// The part of MIG is the same for so long, in mean lifetimes.
const STEP: f64 = 0.25;

/// Parts into which a GPU can be shared.
const PARTS: u32 = 8;

/// Which GPU a request opens that fits nowhere beside others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turns {
    /// Half of the GPUs are in MIG mode for ever.
    Halves,
    /// The first empty one, whatever its mode.
    AnyEmpty,
    /// An empty one of its mode, or else that of the other mode which has been empty for longest.
    OwnFirst,
}

impl Turns {
    /// All, the one of gpupack last.
    pub const ALL: [Self; 3] = [Self::Halves, Self::AnyEmpty, Self::OwnFirst];

    /// Its name in the output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Halves => "fixed halves",
            Self::AnyEmpty => "any empty GPU",
            Self::OwnFirst => "gpupack",
        }
    }
}

/// What came of one mix and seed.
#[derive(Clone, Copy, Debug, Default)]
struct Played {
    /// GPUs requested, and refused.
    requested: f64,
    refused: f64,
    switches: f64,
}

/// What a request wants.
#[derive(Clone, Copy, Debug)]
enum Wish {
    /// An instance of a type.
    Instance(usize),
    /// Parts of a GPU, as a number of [`PARTS`].
    Parts(u32),
}

/// All GPUs with what they have.
struct Yard<'a> {
    rule: Turns,
    /// Those on which an instance may be made.
    fleet: Fleet<'a>,
    chooser: Chooser<'a>,
    /// By GPU: the parts that are free, if it is shared.
    shared: Vec<Option<u32>>,
    /// By GPU: since when it is empty.
    empty_since: Vec<f64>,
    switches: u64,
    /// Where each request is that has parts of a GPU.
    parts: Vec<Option<(usize, u32)>>,
}

impl<'a> Yard<'a> {
    fn new(stage: &'a Stage, rule: Turns) -> Self {
        let fleet = Fleet::new(stage);
        let gpus = stage.gpus[0];
        let mut yard = Self {
            rule,
            fleet,
            chooser: Chooser::new(MigPolicy::Ours, stage),
            shared: vec![None; gpus],
            empty_since: vec![0.0; gpus],
            switches: 0,
            parts: Vec::new(),
        };
        for gpu in gpus / 2..gpus {
            yard.shared[gpu] = Some(PARTS);
            if rule != Turns::AnyEmpty {
                yard.fleet.leave(gpu);
            }
        }
        yard
    }

    fn is_empty(&self, gpu: usize) -> bool {
        match self.shared[gpu] {
            Some(free) => free == PARTS,
            None => self.fleet.gpu(gpu).1 == LayoutId::EMPTY,
        }
    }

    /// Of the empty GPUs of a mode that which has been empty for longest.
    fn longest_empty(&self, is_shared: bool) -> Option<usize> {
        let gpus = (0..self.shared.len()).filter(|gpu| self.shared[*gpu].is_some() == is_shared);
        let empty = gpus.filter(|gpu| self.is_empty(*gpu));
        empty.min_by(|a, b| self.empty_since[*a].total_cmp(&self.empty_since[*b]))
    }

    /// Makes an instance. Whether there was a place.
    fn put_instance(&mut self, number: usize, kind: usize) -> bool {
        let mut place = self.chooser.choose(&self.fleet, kind);
        if place.is_none()
            && self.rule == Turns::OwnFirst
            && let Some(gpu) = self.longest_empty(true)
        {
            self.fleet.join(gpu);
            self.switch(gpu, None);
            place = self.chooser.choose(&self.fleet, kind);
        }
        let Some((gpu, start)) = place else { return false };
        if self.shared[gpu].is_some() {
            self.switch(gpu, None);
        }
        self.fleet.put(number, Instance { gpu, start, kind });
        true
    }

    /// Gives parts of a GPU away. Whether there was room.
    fn put_parts(&mut self, number: usize, parts: u32) -> bool {
        let used = (0..self.shared.len()).filter(|gpu| !self.is_empty(*gpu));
        let free = used.filter_map(|gpu| Some((self.shared[gpu]?, gpu)));
        let best = free.filter(|(free, _)| *free >= parts).min().map(|(_, gpu)| gpu);
        let opened = || match self.rule {
            Turns::Halves => self.longest_empty(true),
            Turns::AnyEmpty => (0..self.shared.len()).find(|gpu| self.is_empty(*gpu)),
            Turns::OwnFirst => self.longest_empty(true).or_else(|| self.longest_empty(false)),
        };
        let Some(gpu) = best.or_else(opened) else { return false };
        if best.is_none() {
            let is_in_fleet = self.rule == Turns::AnyEmpty || self.shared[gpu].is_none();
            if is_in_fleet {
                self.fleet.leave(gpu);
            }
            if self.shared[gpu].is_none() {
                self.switch(gpu, Some(PARTS));
            }
        }
        if let Some(free) = &mut self.shared[gpu] {
            *free -= parts;
        }
        self.parts.resize(self.parts.len().max(number + 1), None);
        self.parts[number] = Some((gpu, parts));
        true
    }

    fn switch(&mut self, gpu: usize, shared: Option<u32>) {
        self.shared[gpu] = shared;
        self.switches += 1;
    }

    fn end(&mut self, number: usize, now: f64) {
        let gpu = match self.parts.get_mut(number).and_then(Option::take) {
            Some((gpu, parts)) => {
                if let Some(free) = &mut self.shared[gpu] {
                    *free += parts;
                }
                if self.rule == Turns::AnyEmpty && self.is_empty(gpu) {
                    self.fleet.join(gpu);
                }
                gpu
            }
            None => match self.fleet.end(number) {
                Some(instance) => instance.gpu,
                None => return,
            },
        };
        if self.is_empty(gpu) {
            self.empty_since[gpu] = now;
        }
    }
}

/// What requests need on average, and how many come in a mean lifetime at load 1.0 of one kind alone.
struct Demand<'a> {
    weights: &'a [u32],
    /// Most instances that all GPUs can hold.
    instances: f64,
    /// Most requests for parts.
    parts: f64,
    /// GPUs that an instance of each type has.
    of_kind: Vec<f64>,
}

/// The average of the parts that are requested: a fifth whole, the rest one to seven equally often.
const MEAN_PART: f64 = 0.2 + 0.8 * 0.5;

impl<'a> Demand<'a> {
    fn new(stage: &'a Stage) -> Self {
        let weights = &stage.weights[0];
        let all: u32 = weights.iter().sum();
        let parts: Vec<f64> =
            weights.iter().map(|weight| f64::from(*weight) / f64::from(all)).collect();
        let packing = Packing::of(&stage.classes, &stage.gpus, &stage.kinds);
        let axis = f64::from(stage.classes[0].layouts().geometry().axis);
        let gpus = f64::from(u32::try_from(stage.gpus[0]).expect("few"));
        Self {
            weights,
            instances: packing.most_requests(&parts),
            parts: gpus / MEAN_PART,
            of_kind: stage.units().iter().map(|units| units / axis).collect(),
        }
    }
}

/// The part of MIG at this time.
fn part_of_mig(at: f64) -> f64 {
    0.5 - 0.35 * libm::cos(std::f64::consts::TAU * at / DAY)
}

fn play(stage: &Stage, rule: Turns, load: f64, seed: u64) -> Played {
    let mut chance = ChaCha8Rng::seed_from_u64(seed);
    chance.set_stream(1_000 + stage.world.number());
    let mean = |chance: &mut ChaCha8Rng| exponential(chance) as f64 / MEAN_TICKS as f64;
    let (demand, mut yard) = (Demand::new(stage), Yard::new(stage, rule));
    let mut ends: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let (mut played, mut at, mut number) = (Played::default(), 0.0, 0);
    let mut before = 0;
    while at < MEASURED.1 * DAY {
        let until = (libm::floor(at / STEP) + 1.0) * STEP;
        let mig = part_of_mig(until - STEP / 2.0);
        let rates = (load * mig * demand.instances, load * (1.0 - mig) * demand.parts);
        let next = at + mean(&mut chance) / (rates.0 + rates.1);
        if next >= until {
            at = until; // arrivals without memory: what is left may be drawn again
            continue;
        }
        at = next;
        let unit = f64::from(chance.next_u32()) / 4_294_967_296.0;
        let wish = match unit * (rates.0 + rates.1) < rates.0 {
            true => Wish::Instance(drawn(&mut chance, demand.weights)),
            false if chance.next_u32() % 5 == 0 => Wish::Parts(PARTS),
            false => Wish::Parts(1 + chance.next_u32() % (PARTS - 1)),
        };
        let stays = mean(&mut chance);
        while let Some(Reverse((time, ended))) = ends.peek().copied()
            && f64::from_bits(time) <= at
        {
            ends.pop();
            yard.end(ended, f64::from_bits(time));
        }
        if at < MEASURED.0 * DAY {
            before = yard.switches;
        }
        let (size, is_placed) = match wish {
            Wish::Instance(kind) => {
                yard.chooser.observe(number, kind);
                (demand.of_kind[kind], yard.put_instance(number, kind))
            }
            Wish::Parts(parts) => {
                (f64::from(parts) / f64::from(PARTS), yard.put_parts(number, parts))
            }
        };
        if is_placed {
            ends.push(Reverse(((at + stays).to_bits(), number)));
        }
        if at >= MEASURED.0 * DAY {
            played.requested += size;
            played.refused += if is_placed { 0.0 } else { size };
        }
        number += 1;
    }
    let count = f64::from(u32::try_from(yard.switches - before).unwrap_or(u32::MAX));
    let gpus = f64::from(u32::try_from(stage.gpus[0]).expect("few"));
    played.switches = count / gpus / (MEASURED.1 - MEASURED.0);
    played
}

/// The rules on all mixes: refused demand in percent, and switches per GPU and day, as means over the seeds.
#[derive(Debug)]
pub struct TurnsComparison {
    gpus: NonZeroUsize,
    load: f64,
    worlds: Vec<World>,
    seeds: RangeInclusive<u64>,
    /// By rule and world.
    figures: Vec<Vec<(f64, f64)>>,
}

/// Plays all rules on all mixes and seeds.
pub fn compare(
    worlds: Vec<World>,
    gpus: NonZeroUsize,
    load: f64,
    seeds: RangeInclusive<u64>,
) -> TurnsComparison {
    let of = |rule: Turns| {
        let of_world = |world: &World| {
            let stage = Stage::new(*world, gpus.get());
            let all: Vec<Played> =
                seeds.clone().map(|seed| play(&stage, rule, load, seed)).collect();
            let count = f64::from(u32::try_from(all.len().max(1)).expect("few seeds"));
            let refused = all.iter().map(|it| 100.0 * it.refused / it.requested.max(1e-9));
            let switches = all.iter().map(|it| it.switches);
            (refused.sum::<f64>() / count, switches.sum::<f64>() / count)
        };
        worlds.iter().map(of_world).collect()
    };
    let figures = Turns::ALL.map(of).to_vec();
    TurnsComparison { gpus, load, worlds, seeds, figures }
}

impl TurnsComparison {
    /// As a table for people.
    pub fn table(&self) -> String {
        let seeds = self.seeds.clone().count();
        let mut text = format!(
            "GPUs shared and divided by turns, {} GPUs at load {}, {seeds} seeds\n\n{:<16}",
            self.gpus, self.load, "rule"
        );
        self.worlds.iter().for_each(|world| text += &format!(" {:>16}", world.name()));
        text += "\n";
        for (rule, figures) in Turns::ALL.iter().zip(&self.figures) {
            // Writing into a text cannot fail.
            let _ = write!(text, "{:<16}", rule.name());
            for (refused, switches) in figures {
                let _ = write!(text, " {:>16}", format!("{refused:.2} ({switches:.2})"));
            }
            text += "\n";
        }
        text + "\nDemand that fits nowhere in %, and in brackets the switches of a GPU per day of 12 mean \
                lifetimes.\n"
    }

    fn rows(&self) -> impl Iterator<Item = (&'static str, String, f64, f64)> {
        let by_rule = Turns::ALL.iter().zip(&self.figures);
        by_rule.flat_map(|(rule, figures)| {
            let worlds = self.worlds.iter().zip(figures);
            worlds.map(|(world, (refused, switches))| {
                let rounded = |value: f64| libm::round(value * 1e4) / 1e4;
                (rule.name(), world.name(), rounded(*refused), rounded(*switches))
            })
        })
    }

    /// The same as comma-separated values.
    pub fn csv(&self) -> String {
        let lines = self
            .rows()
            .map(|(rule, mix, refused, switches)| format!("{rule},{mix},{refused},{switches}\n"));
        std::iter::once("rule,mix,blocked_percent,switches_per_day\n".to_owned())
            .chain(lines)
            .collect()
    }

    /// The same in JSON.
    pub fn json(&self) -> String {
        let rows = self.rows().map(|(rule, mix, refused, switches)| {
            json!({"rule": rule, "mix": mix, "blocked_percent": refused, "switches_per_day": switches})
        });
        let rows: Vec<Value> = rows.collect();
        format!("{:#}\n", json!({"gpus": self.gpus, "load": self.load, "results": rows}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(load: f64) -> Vec<(f64, f64)> {
        let gpus = NonZeroUsize::new(40).expect("not zero");
        let found = compare(vec!["small".parse().expect("a mix")], gpus, load, 1..=3);
        found.figures.iter().map(|of_rule| of_rule[0]).collect()
    }

    #[test]
    fn switching_serves_more_than_fixed_halves_and_the_own_mode_first_switches_less() {
        let [halves, any, own] = figures(0.8)[..] else { panic!("three rules") };
        assert_eq!(halves.1, 0.0);
        assert!(own.0 * 2.0 < halves.0 && any.0 * 2.0 < halves.0, "{halves:?} {any:?} {own:?}");
        assert!(own.1 > 0.0 && own.1 < 0.8 * any.1, "{any:?} {own:?}");
    }

    #[test]
    fn a_day_is_half_mig() {
        let at: Vec<f64> = (0..48).map(|step| part_of_mig(f64::from(step) * STEP)).collect();
        let mean = at.iter().sum::<f64>() / 48.0;
        assert!(
            (mean - 0.5).abs() < 1e-9
                && (at[0] - 0.15).abs() < 1e-9
                && (at[24] - 0.85).abs() < 1e-9
        );
    }
}
