//! All nodes at a moment, in the order in which they were first seen, with their positions by name.

use std::hash::{BuildHasher, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use fixedbitset::FixedBitSet;
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
    positions: HashTable<Known>,
    hasher: DefaultHashBuilder,
}

/// Where the name of a node lies, and the node.
#[derive(Clone, Copy)]
struct Known {
    start: u32,
    length: u32,
    at: u32,
}

impl Known {
    #[inline]
    fn name<'a>(&self, names: &'a str) -> &'a [u8] {
        let start = index(self.start);
        &names.as_bytes()[start..start + index(self.length)]
    }
}

impl Slots {
    /// The position of a node.
    #[inline]
    pub(super) fn position(&self, node: &str) -> Option<usize> {
        let is_it = |known: &Known| known.name(&self.names) == node.as_bytes();
        self.positions.find(hash(&self.hasher, node.as_bytes()), is_it).map(|it| index(it.at))
    }

    /// Which nodes are among `nodes`, and how many of these are none of ours.
    pub(super) fn listed(&self, nodes: impl Iterator<Item: AsRef<str>>) -> (FixedBitSet, usize) {
        let mut listed = FixedBitSet::with_capacity(self.all.len());
        let mut unknown = 0;
        for node in nodes {
            match self.position(node.as_ref()) {
                Some(at) => listed.insert(at),
                None => unknown += 1,
            }
        }
        (listed, unknown)
    }

    /// Adds a node that is not there yet. Answers its position.
    pub(super) fn add(&mut self, node: &str, make: impl FnOnce(usize) -> Slot) -> usize {
        let at = self.all.len();
        self.all.push(Arc::new(make(at)));
        self.domains.push(0);
        let length = number(node.len());
        let known = Known { start: number(self.names.len()), length, at: number(at) };
        self.names.push_str(node);
        let (names, hasher) = (&self.names, &self.hasher);
        let hash_of = |known: &Known| hash(hasher, known.name(names));
        self.positions.insert_unique(hash(hasher, node.as_bytes()), known, hash_of);
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
fn hash(hasher: &DefaultHashBuilder, name: &[u8]) -> u64 {
    let mut hash = hasher.build_hasher();
    hash.write(name);
    hash.finish()
}

fn number(at: usize) -> u32 {
    u32::try_from(at).expect("all names of a cluster have less than 4 GiB")
}

#[inline]
fn index(at: u32) -> usize {
    usize::try_from(at).expect("a position in memory")
}
