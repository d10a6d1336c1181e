//! All nodes, by position, and their positions by name.

use std::hash::{BuildHasher, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use fixedbitset::FixedBitSet;
use hashbrown::{DefaultHashBuilder, HashTable};

use crate::ledger::nodes::node_entry::NodeEntry;

/// The entries of all nodes. A node keeps its position while it exists or has pods; see
/// [`crate::ledger::nodes::state::Ledger::forget_gone_nodes`]. Then the position is vacant until
/// another node gets it. The [`era`] of a version tells the two nodes apart.
///
/// A call names thousands of nodes in any order, and takes most of its time to find them. So names
/// lie one behind the other, for the CPU's cache. They are chosen inside the cluster, not by
/// clients that would let their hashes collide.
#[derive(Clone, Default)]
pub(crate) struct NodeTable {
    all: Vec<Arc<NodeEntry>>,
    /// Number of the failure domain of each; zero without one.
    domains: Vec<u32>,
    have_domains: bool,
    /// The names, without anything between them.
    names: String,
    /// Positions without a node.
    vacant: Vec<u32>,
    /// Nodes so far that got the position of another one.
    reuses: u64,
    /// Grows when a node comes or goes.
    generation: u64,
    positions: HashTable<NamePosition>,
    hasher: DefaultHashBuilder,
    /// The positions in the order of the names.
    in_order: Vec<u32>,
    /// The index of each node in that order. It decides between nodes of equal cost, which are
    /// often many.
    orders: Vec<u32>,
}

/// Where the name of a node lies, and the node.
#[derive(Clone, Copy)]
struct NamePosition {
    start: u32,
    length: u32,
    at: u32,
}

impl NamePosition {
    #[inline]
    fn name<'a>(&self, names: &'a str) -> &'a [u8] {
        let start = index(self.start);
        &names.as_bytes()[start..start + index(self.length)]
    }
}

impl NodeTable {
    /// The position of a node. Once for each name of a call: a function call would cost a tenth of it.
    #[inline(always)]
    pub(crate) fn position(&self, node: &[u8]) -> Option<usize> {
        let hash = hash(&self.hasher, node);
        let known = self.positions.find(hash, |known| is_same(known.name(&self.names), node));
        known.map(|known| index(known.at))
    }

    /// Which nodes are among `nodes`, and how many of `nodes` are unknown.
    pub(crate) fn listed(&self, nodes: impl Iterator<Item: AsRef<[u8]>>) -> (FixedBitSet, usize) {
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

    /// Adds a new node. Returns its position.
    pub(crate) fn add(&mut self, node: &str, make: impl FnOnce(usize) -> NodeEntry) -> usize {
        self.generation += 1;
        let at = match self.vacant.pop() {
            Some(vacant) => {
                self.reuses += 1;
                let mut node_entry = make(index(vacant));
                node_entry.version = first_version(self.reuses).into();
                self.all[index(vacant)] = Arc::new(node_entry);
                index(vacant)
            }
            None => {
                let at = self.all.len();
                self.all.push(Arc::new(make(at)));
                self.domains.push(0);
                self.orders.push(0);
                at
            }
        };
        self.insert_name(node, number(at));
        let nodes = &self.all;
        let order = self.in_order.partition_point(|at| nodes[index(*at)].name.as_str() < node);
        self.in_order.insert(order, number(at));
        self.orders[at] = number(order);
        for later in &self.in_order[order + 1..] {
            self.orders[index(*later)] += 1;
        }
        at
    }

    /// Adds the name of the node at a position.
    fn insert_name(&mut self, node: &str, at: u32) {
        let known =
            NamePosition { start: number(self.names.len()), length: number(node.len()), at };
        self.names.push_str(node);
        let (names, hasher) = (&self.names, &self.hasher);
        self.positions.insert_unique(hash(hasher, node.as_bytes()), known, |known| {
            hash(hasher, known.name(names))
        });
    }

    /// Removes the nodes at these positions; `vacant` fills them until others come.
    pub(crate) fn remove(&mut self, gone: &FixedBitSet, vacant: &Arc<NodeEntry>) {
        self.generation += 1;
        for at in gone.ones() {
            self.all[at] = Arc::clone(vacant);
            self.domains[at] = 0;
            self.vacant.push(number(at));
        }
        self.in_order.retain(|at| !gone.contains(index(*at)));
        self.names.clear();
        self.positions.clear();
        for order in 0..self.in_order.len() {
            let at = self.in_order[order];
            self.orders[index(at)] = number(order);
            let node_entry = Arc::clone(&self.all[index(at)]);
            self.insert_name(node_entry.name.as_str(), at);
        }
        self.have_domains = self.domains.iter().any(|domain| *domain > 0);
    }

    /// The positions with a node, in the order of the names.
    pub(crate) fn present(&self) -> impl Iterator<Item = usize> {
        self.in_order.iter().map(|at| index(*at))
    }

    /// How many nodes there are.
    pub(crate) fn count(&self) -> usize {
        self.in_order.len()
    }

    /// The version of the set of nodes.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// The index of the node at a position in the order of all names.
    #[inline]
    pub(crate) fn order(&self, at: usize) -> u32 {
        self.orders[at]
    }

    /// Number of the failure domain of the node at a position; zero without one.
    #[inline]
    pub(crate) fn domain(&self, at: usize) -> u32 {
        self.domains[at]
    }

    /// Whether any node is in a failure domain.
    pub(crate) fn have_domains(&self) -> bool {
        self.have_domains
    }

    /// Puts the node at a position into a failure domain.
    pub(crate) fn set_domain(&mut self, at: usize, domain: u32) {
        self.domains[at] = domain;
        self.have_domains |= domain > 0;
    }
}

impl Deref for NodeTable {
    type Target = [Arc<NodeEntry>];

    fn deref(&self) -> &[Arc<NodeEntry>] {
        &self.all
    }
}

#[inline]
fn hash(hasher: &DefaultHashBuilder, name: &[u8]) -> u64 {
    let mut hash = hasher.build_hasher();
    hash.write(name);
    hash.finish()
}

/// Whether two names are equal. Names are short: steps of eight bytes are faster than `memcmp`.
#[inline]
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let (Some(last), Some(other_last)) = (one.last_chunk::<8>(), other.last_chunk::<8>()) else {
        return one == other;
    };
    let (words, other_words) = (one.as_chunks::<8>().0, other.as_chunks::<8>().0);
    one.len() == other.len()
        && last == other_last
        && words.iter().zip(other_words).all(|(word, other)| word == other)
}

/// Bits of a version that count changes. The rest tells apart the nodes that had the same position.
const CHANGE_BITS: u32 = 36;

/// The first version of an entry that reuses a position, from the count of such reuses.
fn first_version(reuses: u64) -> u64 {
    (reuses << CHANGE_BITS) + 1
}

/// The version of the entry without a node: of an era that no node has.
pub(crate) const VERSION_OF_VACANT: u64 = u64::MAX << CHANGE_BITS;

/// The part of a version that tells which node of a position it is for.
pub(crate) fn era(version: u64) -> u64 {
    version >> CHANGE_BITS
}

pub(crate) fn number(at: usize) -> u32 {
    u32::try_from(at).expect("a cluster has fewer nodes, and less than 4 GiB of names")
}

#[inline]
pub(crate) fn index(at: u32) -> usize {
    usize::try_from(at).expect("a position in memory")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::node_state::NodeState;
    use wire::ids::NodeName;
    use wire::units::MemMib;

    #[test]
    fn names_are_equal_only_if_all_bytes_are() {
        for length in 0..40 {
            let name: Vec<u8> = (b'0'..).take(length).collect();
            assert!(is_same(&name, &name.clone()));
            assert!(!is_same(&name, &[&name[..], b"0"].concat()));
            for at in 0..length {
                let mut other = name.clone();
                other[at] ^= 1;
                assert!(!is_same(&name, &other), "{length} {at}");
            }
        }
    }

    #[test]
    fn nodes_are_found_by_name_and_sorted_by_name() {
        let mut node_table = NodeTable::default();
        let names = ["m", "c", "x", "a", "ca", "", "y-0", "b"];
        for name in names {
            let node_state = NodeState::new(NodeName::new(name), MemMib::ZERO);
            node_table.add(name, |at| NodeEntry::new(at, node_state, Arc::default()));
        }
        let mut sorted = names;
        sorted.sort_unstable();
        for (at, name) in names.iter().enumerate() {
            assert_eq!(node_table.position(name.as_bytes()), Some(at));
            assert_eq!(sorted[index(node_table.order(at))], *name);
        }
        let (listed, unknown) = node_table.listed(["b", "d", "m", "b"].iter());
        assert_eq!((listed.ones().collect::<Vec<_>>(), unknown), (vec![0, 7], 1));
    }
}
