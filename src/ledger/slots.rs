//! All nodes at a moment, in the order in which they were first seen, with their positions by name.

use std::hash::BuildHasher;
use std::ops::Deref;
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::slot::Slot;

/// The slots of all nodes. A node keeps its position for good; see [`super::books::Ledger::recycle`].
///
/// A question names thousands of nodes in any order, and most of its time goes into finding them. So names
/// lie one behind the other, where the processor has them at hand. Nobody outside the cluster chooses them,
/// to let them collide.
#[derive(Clone, Default)]
pub(super) struct Slots {
    all: Vec<Arc<Slot>>,
    /// Number of the failure domain of each; zero where it names none.
    domains: Vec<u32>,
    /// The names, without anything between them.
    names: String,
    /// Where each of them ends.
    ends: Vec<usize>,
    positions: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl Slots {
    /// The position of a node.
    #[inline]
    pub(super) fn position(&self, node: &str) -> Option<usize> {
        let is_it = |at: &u32| name_at(&self.names, &self.ends, index(*at)) == node;
        self.positions.find(self.hasher.hash_one(node), is_it).map(|at| index(*at))
    }

    /// Adds a node that is not there yet. Answers its position.
    pub(super) fn add(&mut self, node: &str, make: impl FnOnce(usize) -> Slot) -> usize {
        let at = self.all.len();
        self.all.push(Arc::new(make(at)));
        self.domains.push(0);
        self.names.push_str(node);
        self.ends.push(self.names.len());
        let number = u32::try_from(at).expect("a cluster has fewer nodes");
        let (names, ends, hasher) = (&self.names, &self.ends, &self.hasher);
        let hash = |at: &u32| hasher.hash_one(name_at(names, ends, index(*at)));
        self.positions.insert_unique(hasher.hash_one(node), number, hash);
        at
    }

    /// Number of the failure domain of the node at a position; zero where it names none.
    #[inline]
    pub(super) fn domain(&self, at: usize) -> u32 {
        self.domains[at]
    }

    /// Puts the node at a position into a failure domain.
    pub(super) fn set_domain(&mut self, at: usize, domain: u32) {
        self.domains[at] = domain;
    }
}

impl Deref for Slots {
    type Target = [Arc<Slot>];

    fn deref(&self) -> &[Arc<Slot>] {
        &self.all
    }
}

#[inline]
fn name_at<'a>(names: &'a str, ends: &[usize], at: usize) -> &'a str {
    let start = at.checked_sub(1).map_or(0, |before| ends[before]);
    &names[start..ends[at]]
}

#[inline]
fn index(at: u32) -> usize {
    usize::try_from(at).expect("a position in memory")
}
