//! The kept answers. Requests come in few shapes, and few nodes change between two calls. So the
//! answer per node is kept per shape, with the version of the node that it is for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use fixedbitset::FixedBitSet;
use parking_lot::Mutex;

use crate::ledger::nodes::changes::Changes;
use crate::ledger::nodes::ranking::Ranking;
use crate::ledger::nodes::table::{NodeTable, era};
use crate::model::fit::HostRule;
use crate::model::rejection::Rejection;
use crate::model::request::GpuRequest;
use crate::scoring::cost::LocalCost;
use crate::scoring::strategy::Strategy;
use wire::units::HostAmount;

/// Answers kept in total, 48 bytes each, and about as much for the order of those that fit: 64
/// shapes on 5,000 nodes take about 30 MiB.
const KEPT_ANSWERS: usize = 64 * 5_000;

/// Shapes whose answers are kept: on few nodes as many as the answers allow, up to 1,024; on many
/// at least 64. For a new one the eighth goes that was not used for the longest time: with one at a time,
/// each new shape would look at all.
fn kept_shapes(nodes: usize) -> usize {
    (KEPT_ANSWERS / nodes.max(1)).clamp(64, 1_024)
}

/// What is kept of an answer: all but the current scarcity prices.
pub(crate) type KeptAnswer = Result<LocalCost, Rejection>;

/// What decides the answer on a given state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Shape {
    pub(crate) gpu: Option<GpuRequest>,
    pub(crate) host: HostAmount,
    pub(crate) host_rule: HostRule,
    pub(crate) strategy: Strategy,
}

/// The kept answers to one shape, by position of the node.
#[derive(Default)]
pub(crate) struct ShapeTable {
    /// The mix that the costs are for.
    mix_generation: u64,
    /// Changes of nodes that were seen.
    seen: u64,
    /// The version of the node, and its answer at that version; meaningless for a node that is not
    /// in `known`.
    answers: Vec<(u64, KeptAnswer)>,
    /// The nodes with an answer.
    known: FixedBitSet,
    /// Those of them that fit.
    fitting: FixedBitSet,
    /// How many of them do not, by reason.
    refused: Refused,
    /// Those that fit in the order of their costs, if that is kept.
    ranking: Option<Ranking>,
    /// Calls since many nodes changed at once.
    calm: i32,
    /// The list of nodes that the answers are for.
    generation: u64,
}

/// Successive calls with few changed nodes before each; from then on the order of costs is kept. To
/// make it takes as long as a few looks at all nodes.
const CALM: i32 = 4;

/// Calls after which the order is tried again, once it was found to be of little use.
const AFTER_SCATTERED: i32 = 1_000;

/// How many nodes may have changed since the last call so that the order of costs is kept.
fn few(nodes: usize) -> usize {
    (nodes / 64).max(2)
}

/// Numbers of nodes, in the order of [`Rejection::LABELS`].
pub(crate) type Refused = [usize; Rejection::LABELS.len()];

impl ShapeTable {
    /// The answer for the node at a position.
    #[inline]
    pub(crate) fn get(&self, at: usize) -> Option<&KeptAnswer> {
        self.known.contains(at).then(|| &self.answers[at].1)
    }

    /// Keeps an answer that was not known, found at that version of the node.
    pub(crate) fn keep(&mut self, at: usize, order: u32, version: u64, answer: KeptAnswer) {
        self.answers[at] = (version, answer);
        self.known.insert(at);
        self.fitting.set(at, answer.is_ok());
        match (&answer, &mut self.ranking) {
            (Ok(local_cost), Some(ranking)) => ranking.insert(at, order, local_cost),
            (Ok(_), None) => {}
            (Err(rejection), _) => self.refused[rejection.position()] += 1,
        }
    }

    /// Forgets an answer.
    fn forget(&mut self, at: usize, node_table: &NodeTable) {
        if !self.known.contains(at) {
            return;
        }
        self.known.remove(at);
        match (&self.answers[at].1, &mut self.ranking) {
            // A node that came after the list of nodes of the `Ranking` is not in it.
            (Ok(local_cost), Some(ranking)) if at < ranking.nodes => {
                ranking.remove(at, node_table.order(at), local_cost);
            }
            (Ok(_), _) => {}
            (Err(rejection), _) => self.refused[rejection.position()] -= 1,
        }
    }

    /// Which of `nodes` have no answer.
    pub(crate) fn unknown(&self, nodes: &FixedBitSet) -> FixedBitSet {
        let mut unknown = nodes.clone();
        unknown.difference_with(&self.known);
        unknown
    }

    /// Which of `nodes` fit.
    pub(crate) fn fitting(&self, nodes: &FixedBitSet) -> FixedBitSet {
        let mut fitting = nodes.clone();
        fitting.intersect_with(&self.fitting);
        fitting
    }

    /// How many of `nodes`, all of them known, do not fit, by reason.
    pub(crate) fn refused(&self, nodes: &FixedBitSet) -> Refused {
        let mut among = self.known.clone();
        among.difference_with(&self.fitting);
        let mut others = among.clone();
        others.difference_with(nodes);
        among.intersect_with(nodes);
        // Nearly all calls are about nearly all nodes.
        if among.count_ones(..) < others.count_ones(..) {
            return self.count_refused(among);
        }
        let others = self.count_refused(others);
        std::array::from_fn(|reason| self.refused[reason] - others[reason])
    }

    fn count_refused(&self, nodes: FixedBitSet) -> Refused {
        let mut refused = Refused::default();
        for at in nodes.into_ones() {
            if let Err(rejection) = &self.answers[at].1 {
                refused[rejection.position()] += 1;
            }
        }
        refused
    }

    /// Those that fit in the order of their costs, if it pays to keep that order: to keep one node
    /// in order takes as long as a look at fifty.
    pub(crate) fn ranking(&mut self, node_table: &NodeTable) -> Option<&Ranking> {
        if self.ranking.as_ref().is_some_and(Ranking::is_scattered) {
            (self.ranking, self.calm) = (None, CALM - AFTER_SCATTERED);
        }
        if self.ranking.is_none() && self.calm >= CALM {
            let fitting = self.fitting.ones().take_while(|at| *at < node_table.len());
            let fitting = fitting.filter_map(|at| {
                let local_cost = self.answers[at].1.as_ref().ok()?;
                Some((at, node_table.order(at), local_cost))
            });
            self.ranking = Some(Ranking::of(node_table.len(), fitting));
        }
        self.ranking.as_ref()
    }

    /// Forgets costs that the strategy would not find again, under the mix of this generation. A
    /// rejection depends on neither: it is kept until the node changes.
    pub(crate) fn follow_mix(&mut self, strategy: &Strategy, generation: u64) {
        let is_other_mix = self.mix_generation != generation;
        if !strategy.is_repeatable() || (strategy.uses_mix() && is_other_mix) {
            self.known.difference_with(&self.fitting);
            self.fitting.clear();
            (self.ranking, self.calm) = (None, 0);
        }
        self.mix_generation = generation;
    }

    /// Forgets the answers for nodes that had the position of another one.
    fn forget_others(&mut self, node_table: &NodeTable) {
        self.generation = node_table.generation();
        for (at, node_entry) in node_table.iter().enumerate().take(self.answers.len()) {
            if era(self.answers[at].0) != era(node_entry.version.load(Ordering::Acquire)) {
                self.forget(at, node_table);
            }
        }
    }

    /// Forgets the answers for nodes that have changed, and makes room for new ones.
    pub(crate) fn catch_up(&mut self, changes: &Changes, node_table: &NodeTable) {
        let is_other_list = self.generation != node_table.generation();
        let (known, mut seen) = (self.answers.len(), self.seen);
        let changed = changes.since(&mut seen);
        // A new node adds a name, so the order of names changes.
        let is_of_other_names = is_other_list && self.ranking.is_some();
        let is_calm = changed.as_ref().is_some_and(|nodes| nodes.len() <= few(node_table.len()))
            && !is_of_other_names;
        self.calm = if is_calm { self.calm.saturating_add(1) } else { self.calm.min(0) };
        if !is_calm {
            self.ranking = None;
        }
        if is_other_list {
            self.forget_others(node_table);
        }
        match changed {
            Some(nodes) => {
                for at in nodes.filter(|at| *at < known) {
                    self.forget(at, node_table);
                }
            }
            None => {
                for (at, node_entry) in node_table.iter().enumerate().take(known) {
                    if self.answers[at].0 != node_entry.version.load(Ordering::Acquire) {
                        self.forget(at, node_table);
                    }
                }
                // Nothing is known of nodes that came later than this list of nodes.
                for at in node_table.len()..known {
                    self.forget(at, node_table);
                }
            }
        }
        self.seen = seen;
        self.fitting.intersect_with(&self.known);
        let nodes = known.max(node_table.len());
        self.answers.resize(nodes, (0, Err(Rejection::UnknownNode)));
        self.known.grow(nodes);
        self.fitting.grow(nodes);
    }
}

/// Marks the shapes that existing pods request: any other shape is replaced before them.
const PREFERRED: u64 = 1 << 63;

/// The kept answers of the shapes used last.
#[derive(Default)]
pub(crate) struct ShapeTables {
    tables: DashMap<Shape, (Arc<Mutex<ShapeTable>>, Arc<AtomicU64>)>,
    clock: AtomicU64,
}

impl ShapeTables {
    /// How many shapes are kept, at most 1,024.
    pub(crate) fn count(&self) -> usize {
        self.tables.len()
    }

    /// The table of a shape, a new one if it is not kept.
    pub(crate) fn table(&self, shape: Shape, nodes: usize) -> Arc<Mutex<ShapeTable>> {
        let tick = self.clock.fetch_add(1, Ordering::Relaxed);
        if let Some(found) = self.tables.get(&shape) {
            let _ = found.1.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |before| {
                Some((before & PREFERRED) | tick)
            });
            return Arc::clone(&found.0);
        }
        if self.tables.len() >= kept_shapes(nodes) {
            self.drop_unused();
        }
        let fresh = (Arc::default(), Arc::new(AtomicU64::new(tick)));
        Arc::clone(&self.tables.entry(shape).or_insert(fresh).0)
    }

    fn drop_unused(&self) {
        let times = self.tables.iter().map(|entry| entry.value().1.load(Ordering::Relaxed));
        let mut times: Vec<u64> = times.collect();
        let others = times.iter().filter(|used| **used & PREFERRED == 0).count();
        let most = if others == 0 { times.len() } else { others };
        if most > 0 {
            let last_that_goes = (times.len() / 8).min(most - 1);
            let latest = *times.select_nth_unstable(last_that_goes).1;
            self.tables.retain(|_, (_, used)| used.load(Ordering::Relaxed) > latest);
        }
    }
}

impl ShapeTables {
    /// Keeps a shape longer than those of pods that may be forged.
    pub(crate) fn prefer(&self, shape: &Shape) {
        if let Some(found) = self.tables.get(shape) {
            found.1.fetch_or(PREFERRED, Ordering::Relaxed);
        }
    }
}

const _: () = assert!(size_of::<(u64, KeptAnswer)>() <= 48);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::nodes::node_entry::NodeEntry;
    use crate::model::node_state::NodeState;
    use crate::scoring::cost::{Cost, Ties};
    use wire::ids::NodeName;
    use wire::units::{MemMib, MilliCpu};

    fn node_table(count: usize) -> NodeTable {
        let mut node_table = NodeTable::default();
        for name in (0..count).map(|at| format!("{at:03}")) {
            let node_state = NodeState::new(NodeName::new(name.as_str()), MemMib::ZERO);
            node_table.add(&name, |at| NodeEntry::new(at, node_state, Arc::default()));
        }
        node_table
    }

    fn fits(cost: i64) -> KeptAnswer {
        Ok(LocalCost::Ranked(Cost::Fragmentation { instance_mib: 0, cost, ties: Ties::default() }))
    }

    /// The positions in the order of costs, if that order is kept.
    fn order(table: &mut ShapeTable, node_table: &NodeTable) -> Option<Vec<usize>> {
        let ranking = table.ranking(node_table)?;
        Some(ranking.in_order(&Default::default()).map(|node| node.at).collect())
    }

    #[test]
    fn the_order_is_cached_while_few_nodes_change() {
        let (mut table, mut changes, node_table) =
            (ShapeTable::default(), Changes::default(), node_table(3));
        table.catch_up(&changes, &node_table);
        for (at, answer) in [fits(7), Err(Rejection::NotReporting), fits(5)].into_iter().enumerate()
        {
            table.keep(at, node_table.order(at), 1, answer);
        }
        assert_eq!(order(&mut table, &node_table), None);
        (1..CALM).for_each(|_| table.catch_up(&changes, &node_table));
        assert_eq!(order(&mut table, &node_table), Some(vec![2, 0]));
        changes.note(2);
        table.catch_up(&changes, &node_table);
        assert_eq!(order(&mut table, &node_table), Some(vec![0]), "nothing is known of that node");
        table.keep(2, node_table.order(2), 2, fits(9));
        assert_eq!(order(&mut table, &node_table), Some(vec![0, 2]));
        let refused = |table: &ShapeTable| table.refused[Rejection::NotReporting.position()];
        assert_eq!(refused(&table), 1);
        (0..3).for_each(|at| changes.note(at));
        table.catch_up(&changes, &node_table);
        assert_eq!((order(&mut table, &node_table), refused(&table)), (None, 0));
    }

    #[test]
    fn readers_with_an_older_node_list_ignore_newer_nodes() {
        let (mut table, mut changes) = (ShapeTable::default(), Changes::default());
        let (older, newer) = (node_table(2), node_table(3));
        table.catch_up(&changes, &newer);
        (0..3).for_each(|at| table.keep(at, newer.order(at), 1, fits(1)));
        (0..CALM).for_each(|_| table.catch_up(&changes, &older));
        assert_eq!(order(&mut table, &older), Some(vec![0, 1]));
        changes.note(2);
        table.catch_up(&changes, &older);
        assert_eq!(order(&mut table, &older), Some(vec![0, 1]));
        table.catch_up(&changes, &newer);
        assert_eq!(order(&mut table, &newer), None, "the new node changed the order of names");
    }

    #[test]
    fn shapes_of_forged_pods_displace_no_real_shape() {
        let tables = ShapeTables::default();
        let shape = |milli| Shape {
            gpu: None,
            host: HostAmount { cpu: MilliCpu::new(milli), memory: MemMib::ZERO },
            host_rule: HostRule::Checked,
            strategy: Strategy::Policy(crate::model::policy::Policy::Spread),
        };
        tables.table(shape(0), 1);
        tables.prefer(&shape(0));
        tables.table(shape(0), 1); // its preference outlasts the next call
        (1..5_000).for_each(|milli| drop(tables.table(shape(milli), 1)));
        assert!(tables.tables.contains_key(&shape(0)) && !tables.tables.contains_key(&shape(1)));
        assert_eq!(kept_shapes(1), 1_024);
        assert_eq!(tables.count(), 1_001, "129 went 31 times, and 105 came since");
        assert!(tables.tables.contains_key(&shape(4_999)), "the latest");
    }

    #[test]
    fn of_full_tables_an_eighth_goes_and_no_real_shape_before_a_forged_one() {
        let shape = |milli| Shape {
            gpu: None,
            host: HostAmount { cpu: MilliCpu::new(milli), memory: MemMib::ZERO },
            host_rule: HostRule::Checked,
            strategy: Strategy::Policy(crate::model::policy::Policy::Spread),
        };
        let kept = |real: u64| {
            let tables = ShapeTables::default();
            for milli in 0..1_024 {
                tables.table(shape(milli), 1);
                (milli < real).then(|| tables.prefer(&shape(milli)));
            }
            tables.table(shape(1_024), 1);
            (0..=1_024).filter(|milli| tables.tables.contains_key(&shape(*milli))).collect()
        };
        let (none, all): (Vec<u64>, Vec<u64>) = (kept(0), kept(1_024));
        assert_eq!(none, (129..=1_024).collect::<Vec<_>>());
        assert_eq!(all, none);
        let (some, last): (Vec<u64>, Vec<u64>) = (kept(1_000), (0..1_000).chain([1_024]).collect());
        assert_eq!(some, last);
    }
}
