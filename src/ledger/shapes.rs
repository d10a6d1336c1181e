//! The answers that are kept: requests come in few shapes, and between two questions of one shape only some
//! nodes changed. So the answer per node is kept per shape, with the version of the books it was found on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dashmap::DashMap;
use fixedbitset::FixedBitSet;

use super::changes::Changes;
use super::slot::Slot;
use crate::packing::fit::{HostRule, Misfit};
use crate::packing::policy::{Merit, Strategy};
use crate::packing::request::GpuRequest;
use crate::packing::units::HostAmount;

/// Answers that are kept in all, 48 bytes each: 64 shapes on 5,000 nodes take 15 MiB.
const KEPT_ANSWERS: usize = 64 * 5_000;

/// Shapes whose answers are kept: on few nodes as many as the answers allow, up to 1,024; on many at
/// least 64. When one more comes, the one that was not asked for the longest goes.
fn kept_shapes(nodes: usize) -> usize {
    (KEPT_ANSWERS / nodes.max(1)).clamp(64, 1_024)
}

/// What is kept of an answer: all of it but the prices of the day.
pub(super) type Kept = Result<Merit, Misfit>;

/// What decides the answer on given books.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Shape {
    pub(super) gpu: Option<GpuRequest>,
    pub(super) host: HostAmount,
    pub(super) host_rule: HostRule,
    pub(super) strategy: Strategy,
}

/// The kept answers to one shape, by position of the node.
#[derive(Default)]
pub(super) struct ShapeTable {
    /// The mix that the ranks are of.
    mix_generation: u64,
    /// Changes of nodes that were seen.
    seen: u64,
    /// The version of the books, and the answer that was found on them; stands for nothing where no answer
    /// is known.
    answers: Vec<(u64, Kept)>,
    /// The nodes with an answer.
    known: FixedBitSet,
    /// Those of them that fit. To go through these alone costs half of a look at each answer: what an
    /// answer is like cannot be foreseen by the processor.
    fitting: FixedBitSet,
}

impl ShapeTable {
    /// The answer for the node at a position.
    #[inline]
    pub(super) fn get(&self, at: usize) -> Option<&Kept> {
        self.known.contains(at).then(|| &self.answers[at].1)
    }

    /// Keeps an answer, found on books of that version.
    pub(super) fn keep(&mut self, at: usize, version: u64, answer: Kept) {
        self.answers[at] = (version, answer);
        self.known.insert(at);
        self.fitting.set(at, answer.is_ok());
    }

    /// Which of `nodes` have no answer.
    pub(super) fn unknown(&self, nodes: &FixedBitSet) -> FixedBitSet {
        let mut unknown = nodes.clone();
        unknown.difference_with(&self.known);
        unknown
    }

    /// What is known of those of `nodes` that fit, with their positions.
    pub(super) fn fitting(&self, nodes: &FixedBitSet) -> impl Iterator<Item = (usize, &Merit)> {
        let mut fitting = nodes.clone();
        fitting.intersect_with(&self.fitting);
        fitting.into_ones().filter_map(|at| Some((at, self.answers[at].1.as_ref().ok()?)))
    }

    /// Why those of `nodes` that are known not to fit do not.
    pub(super) fn misfits(&self, nodes: &FixedBitSet) -> impl Iterator<Item = &Misfit> {
        let mut misfits = nodes.clone();
        misfits.intersect_with(&self.known);
        misfits.difference_with(&self.fitting);
        misfits.into_ones().filter_map(|at| self.answers[at].1.as_ref().err())
    }

    /// Forgets the ranks that the strategy would not find again, under the mix of this generation. A misfit
    /// does not depend on either: it is kept as long as the books are the same.
    pub(super) fn follow_mix(&mut self, strategy: Strategy, generation: u64) {
        let is_other_mix = self.mix_generation != generation;
        if !strategy.is_repeatable() || (strategy.uses_mix() && is_other_mix) {
            self.known.difference_with(&self.fitting);
            self.fitting.clear();
        }
        self.mix_generation = generation;
    }

    /// Forgets the answers for nodes that have changed, and makes room for new ones.
    pub(super) fn catch_up(&mut self, changes: &Changes, slots: &[Arc<Slot>]) {
        match changes.since(&mut self.seen) {
            Some(nodes) => {
                for at in nodes.filter(|at| *at < self.answers.len()) {
                    self.known.remove(at);
                }
            }
            None => {
                for (at, (slot, (version, _))) in slots.iter().zip(&self.answers).enumerate() {
                    if *version != slot.version.load(Ordering::Acquire) {
                        self.known.remove(at);
                    }
                }
                // Of nodes that came later than these slots nothing can be said.
                self.known.remove_range(self.answers.len().min(slots.len())..);
            }
        }
        self.fitting.intersect_with(&self.known);
        let nodes = self.answers.len().max(slots.len());
        self.answers.resize(nodes, (0, Err(Misfit::UnknownNode)));
        self.known.grow(nodes);
        self.fitting.grow(nodes);
    }
}

/// The kept answers to the shapes asked last.
#[derive(Default)]
pub(super) struct ShapeTables {
    tables: DashMap<Shape, (Arc<Mutex<ShapeTable>>, Arc<AtomicU64>)>,
    clock: AtomicU64,
}

impl ShapeTables {
    /// The table of a shape, a new one where it is not kept.
    pub(super) fn table(&self, shape: Shape, nodes: usize) -> Arc<Mutex<ShapeTable>> {
        let tick = self.clock.fetch_add(1, Ordering::Relaxed);
        if let Some(found) = self.tables.get(&shape) {
            found.1.store(tick, Ordering::Relaxed);
            return Arc::clone(&found.0);
        }
        if self.tables.len() >= kept_shapes(nodes) {
            let last_asked = self
                .tables
                .iter()
                .map(|entry| (entry.value().1.load(Ordering::Relaxed), entry.key().clone()))
                .min();
            if let Some((_, oldest)) = last_asked {
                self.tables.remove(&oldest);
            }
        }
        let fresh = (Arc::default(), Arc::new(AtomicU64::new(tick)));
        Arc::clone(&self.tables.entry(shape).or_insert(fresh).0)
    }
}

const _: () = assert!(size_of::<(u64, Kept)>() <= 48);
