//! Where a request fits, and at what cost. Nothing here changes the state of a node.
//!
//! The answers to a shape of request are kept (`nodes/answer_cache`), so that a call looks only at
//! nodes that changed since. The test `properties` compares kept answers with fresh ones.
//!
//! A call may leave a *hold* beside the reservations: room kept for the pod until its bind, so that
//! the call about the next pod does not count it as free.

use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use dashmap::Entry;
use fixedbitset::FixedBitSet;

use crate::hardware::device_class::DeviceClasses;
use crate::hardware::spots::Spot;
use crate::ledger::nodes::answer_cache::{KeptAnswer, Shape, ShapeTable};
use crate::ledger::nodes::narrowing::{Choice, Choosing, Keys};
use crate::ledger::nodes::ranking::RankedNode;
use crate::ledger::nodes::state::{ClusterModel, Ledger};
use crate::ledger::nodes::table::NodeTable;
use crate::model::device_state::{Hold, HoldRule};
use crate::model::event::LedgerEvent;
use crate::model::fit::{CompiledRequest, HostRule};
use crate::model::node_state::NodeState;
use crate::model::policy::Policy;
use crate::model::rejection::Rejection;
use crate::model::request::GpuRequest;
use crate::scoring::cost::Cost;
use crate::scoring::plan;
use crate::scoring::plan::CostedPlacement;
use crate::scoring::strategy::Strategy;
use crate::waste::compiled_mix::CompiledMix;
use crate::waste::scarcity::ScarcityPrices;
use wire::ids::{NodeName, PodUid};
use wire::units::{HostAmount, Timestamp};

/// Most holds at once. Each is for one pod between two verbs, so only a runaway caller makes more;
/// then new pods get none, and bind alone decides.
const MAX_HOLDS: usize = 10_000;

/// How long a place is held that was promised to a pod: kube-scheduler may first wait before it tries the pod again.
const PROMISES_LAST: Duration = Duration::from_secs(30);

/// Most device classes that nodes outside the ledger may add to those of the cluster: each takes
/// memory and time for all nodes.
const MOST_NEW_CLASSES: usize = 16;

/// The request of one pod, and how to score its placements.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PlacementRequest {
    /// Its GPU request; `None` for a pod without.
    pub gpu: Option<GpuRequest>,
    /// Its CPU and host memory.
    pub host: HostAmount,
    /// Whether they are checked here.
    pub host_rule: HostRule,
    /// What gives placements their cost.
    pub strategy: Strategy,
}

impl PlacementRequest {
    /// The request compiled for every device class.
    pub(crate) fn compile(&self, classes: &DeviceClasses) -> CompiledRequest {
        CompiledRequest::new(self.gpu.clone(), self.host, self.host_rule, classes)
    }
}

/// Places of MIG instances on a node that an earlier process promised to a pod.
#[derive(Clone, Copy, Debug)]
pub struct PromisedSpots<'a> {
    /// The pod.
    pub pod: &'a PodUid,
    /// The node.
    pub node: &'a str,
    /// The places.
    pub spots: &'a [Spot],
}

/// The answer for one node: the cost of the best placement, or why there is none.
pub type NodeAnswer = Result<Cost, Rejection>;

/// A request with the kept answers of its shape.
struct Evaluation<'a> {
    node_table: &'a NodeTable,
    cluster: &'a ClusterModel,
    query: &'a PlacementRequest,
    compiled: CompiledRequest,
    prices: ScarcityPrices,
    table: &'a mut ShapeTable,
}

impl Evaluation<'_> {
    /// The answer for a node.
    #[inline]
    fn answer(&mut self, name: &str) -> NodeAnswer {
        self.node_table
            .position(name.as_bytes())
            .map_or(Err(Rejection::UnknownNode), |at| self.answer_at(at))
    }

    /// The answer for the node at a position.
    #[inline]
    fn answer_at(&mut self, at: usize) -> NodeAnswer {
        self.kept_at(at).map(|local_cost| local_cost.cost(&self.prices))
    }

    #[inline]
    fn kept_at(&mut self, at: usize) -> KeptAnswer {
        match self.table.get(at) {
            Some(kept) => *kept,
            None => self.look_at(at),
        }
    }

    /// Looks at those of `nodes` that have changed.
    fn look_at_all(&mut self, nodes: &FixedBitSet) {
        for at in self.table.unknown(nodes).ones() {
            let _ = self.look_at(at); // kept, to be read by the caller
        }
    }

    #[cold]
    fn look_at(&mut self, at: usize) -> KeptAnswer {
        let cluster = self.cluster;
        let (version, answer) = self.node_table[at].look_with_waste(
            cluster.mix_generation,
            |node_state, node_waste| {
                let strategy = &self.query.strategy;
                let holds = HoldRule::Respected;
                let mix = &cluster.compiled;
                plan::evaluate_with(node_state, &self.compiled, strategy, mix, holds, node_waste)
            },
        );
        let answer = answer.map(|place| place.local_cost);
        self.table.keep(at, self.node_table.order(at), version, answer);
        answer
    }

    /// The node at a position, to be compared with others, if its kept answer is that it fits.
    fn candidate(&self, at: usize) -> Option<RankedNode> {
        let local_cost = self.table.get(at)?.as_ref().ok()?;
        Some(RankedNode { key: local_cost.key(&self.prices), order: self.node_table.order(at), at })
    }

    /// The best of `nodes`, at most `most`, in the order of their costs.
    fn best_of(&mut self, nodes: &FixedBitSet, most: usize) -> Vec<RankedNode> {
        self.look_at_all(nodes);
        // With few names, these are read instead of all nodes in order until these are found.
        let are_many = nodes.count_ones(..) > self.node_table.len() / 8;
        if let Some(ranking) = self.table.ranking(self.node_table).filter(|_| are_many) {
            let in_order = ranking.in_order(&self.prices);
            return in_order.filter(|node| nodes.contains(node.at)).take(most).collect();
        }
        let fitting = self.table.fitting(nodes).into_ones();
        least(fitting.filter_map(|at| self.candidate(at)), most)
    }
}

/// The least of `all`, at most `most`, in their order.
fn least<T: Ord>(mut all: impl Iterator<Item = T>, most: usize) -> Vec<T> {
    let mut kept: BinaryHeap<T> = all.by_ref().take(most).collect();
    for one in all {
        if let Some(mut greatest) = kept.peek_mut().filter(|greatest| one < **greatest) {
            *greatest = one;
        }
    }
    kept.into_sorted_vec()
}

impl Ledger {
    /// The answer for each of `nodes`, in their order.
    pub fn answers(&self, query: &PlacementRequest, nodes: &[impl AsRef<str>]) -> Vec<NodeAnswer> {
        self.evaluation(query, |evaluation| {
            nodes.iter().map(|name| evaluation.answer(name.as_ref())).collect()
        })
    }

    /// Which of `nodes` fit, with their costs as numbers.
    pub fn keys(&self, query: &PlacementRequest, nodes: impl Iterator<Item: AsRef<[u8]>>) -> Keys {
        self.evaluation(query, |evaluation| {
            let node_table = evaluation.node_table;
            let at: Vec<Option<usize>> =
                nodes.map(|name| node_table.position(name.as_ref())).collect();
            let mut listed = FixedBitSet::with_capacity(node_table.len());
            listed.extend(at.iter().flatten().copied());
            evaluation.look_at_all(&listed);
            // In the order of the answers: that of the list jumps all over the memory.
            let (mut places, mut keys) = (vec![None; node_table.len()], Vec::new());
            let mut best: Option<(RankedNode, usize)> = None;
            for node in
                evaluation.table.fitting(&listed).ones().filter_map(|at| evaluation.candidate(at))
            {
                if best.is_none_or(|(best, _)| node < best) {
                    best = Some((node, keys.len()));
                }
                places[node.at] = Some(keys.len());
                keys.push(node.key);
            }
            let places = at.into_iter().map(|at| places[at?]).collect();
            Keys { places, keys, best: best.map(|(_, place)| place) }
        })
    }

    /// The best of `nodes`: at most `most`, and at least one if any fits. Counts the others by
    /// reason. See [`Choice`].
    pub fn choose(
        &self,
        query: &PlacementRequest,
        nodes: impl Iterator<Item: AsRef<[u8]>>,
        most: usize,
    ) -> Choice {
        self.evaluation(query, |evaluation| {
            let node_table = evaluation.node_table;
            let ((listed, unknown), most) = (node_table.listed(nodes), most.max(1));
            let best = evaluation.best_of(&listed, most);
            let mut choosing = Choosing::new(most, best, |at| node_table.domain(at));
            if node_table.have_domains() {
                for at in evaluation.table.fitting(&listed).ones() {
                    let domain = node_table.domain(at);
                    if !choosing.is_led(domain)
                        && let Some(node) = evaluation.candidate(at)
                    {
                        choosing.leads(node, domain);
                    }
                }
            }
            let mut refused = evaluation.table.refused(&listed);
            refused[Rejection::UnknownNode.position()] += unknown;
            let kept = choosing.end().into_iter().map(|at| node_table[at].name.clone());
            Choice { kept: kept.collect(), refused }
        })
    }

    /// The best of all nodes, with its cost; ties go to the first name. `None` if none fits.
    pub fn best(&self, query: &PlacementRequest) -> Option<(NodeName, Cost)> {
        self.evaluation(query, |evaluation| {
            let node_table = evaluation.node_table;
            let mut all = FixedBitSet::with_capacity(node_table.len());
            all.extend(node_table.present());
            let at = evaluation.best_of(&all, 1).first()?.at;
            Some((node_table[at].name.clone(), evaluation.answer_at(at).ok()?))
        })
    }

    /// The cost of each node that fits and for which `is_named` is true, by position.
    pub(crate) fn ranked(
        &self,
        query: &PlacementRequest,
        is_named: impl Fn(usize) -> bool,
    ) -> Vec<(Cost, usize)> {
        self.evaluation(query, |evaluation| {
            let nodes = evaluation.node_table.present().filter(|at| is_named(*at));
            nodes.filter_map(|at| Some((evaluation.answer_at(at).ok()?, at))).collect()
        })
    }

    /// Lets `look` see the answer of each node, without a look at nodes that did not change.
    pub(crate) fn look_at_answers(
        &self,
        query: &PlacementRequest,
        mut look: impl FnMut(&NodeName, NodeAnswer),
    ) {
        self.evaluation(query, |evaluation| {
            let node_table = evaluation.node_table;
            for at in node_table.present() {
                let answer = evaluation.answer_at(at);
                let is_gone = answer == Err(Rejection::NodeGone);
                if !(is_gone && node_table[at].read().is_forgettable()) {
                    look(&node_table[at].name, answer);
                }
            }
        });
    }

    /// The answer for one node, computed without kept answers, to check these against.
    pub fn fresh_answer(&self, query: &PlacementRequest, node: &str) -> NodeAnswer {
        let at = self.position(node).ok_or(Rejection::UnknownNode)?;
        let cluster = self.cluster();
        let compiled = query.compile(&cluster.classes);
        let place = evaluate(&self.node_entry(at).read(), &compiled, query, &cluster)?;
        Ok(place.local_cost.cost(&self.prices(&cluster.compiled, query)))
    }

    /// The answers for `count` nodes that are not in the ledger (Node objects of a caller).
    /// `make` makes one node, and adds its device classes to a copy of the ledger's, so that the
    /// mix also holds for them. It is called twice for each, so that only one node is in memory.
    /// Nodes beyond `MOST_NEW_CLASSES` new classes count as without devices.
    pub fn answers_on(
        &self,
        query: &PlacementRequest,
        count: usize,
        make: impl Fn(usize, &mut DeviceClasses) -> Option<NodeState>,
    ) -> Vec<NodeAnswer> {
        // A copy: the ledger does not wait for a client with made-up nodes.
        let (mut classes, mix, node_shapes) = {
            let cluster = self.cluster();
            (cluster.classes.clone(), Arc::clone(cluster.mix()), cluster.node_shapes().clone())
        };
        let most = classes.count() + MOST_NEW_CLASSES;
        let mut judged = FixedBitSet::with_capacity(count);
        for at in 0..count {
            let mut with_its = classes.clone();
            let is_node = make(at, &mut with_its).is_some();
            if is_node && with_its.count() <= most {
                judged.insert(at);
                classes = with_its;
            }
        }
        let compiled = query.compile(&classes);
        let mix = CompiledMix::of(&mix, &classes, &node_shapes);
        let prices = self.prices(&mix, query);
        let answers = (0..count).map(|at| {
            let node = judged.contains(at).then(|| make(at, &mut classes)).flatten();
            let node = node.ok_or(Rejection::NoDevices)?;
            let place =
                plan::evaluate(&node, &compiled, &query.strategy, &mix, HoldRule::Respected)?;
            Ok(place.local_cost.cost(&prices))
        });
        answers.collect()
    }

    /// The current scarcity prices, the same for all nodes.
    pub(crate) fn prices(&self, mix: &CompiledMix, query: &PlacementRequest) -> ScarcityPrices {
        match query.strategy {
            Strategy::Policy(Policy::Fragmentation) => {
                mix.prices(&self.supply(), query.gpu.is_some())
            }
            Strategy::Policy(Policy::BinPack | Policy::Spread) | Strategy::Custom(_) => {
                ScarcityPrices::default()
            }
        }
    }

    /// Notes that an existing pod has this request: its kept answers outlast those for made-up
    /// requests.
    pub fn keep_answers(&self, query: &PlacementRequest) {
        self.shapes.prefer(&shape(query));
    }

    /// Runs `body` with the request and the kept answers of its shape.
    fn evaluation<T>(
        &self,
        query: &PlacementRequest,
        body: impl FnOnce(&mut Evaluation<'_>) -> T,
    ) -> T {
        let node_table = self.node_table();
        let cluster = self.cluster();
        let table = self.shapes.table(shape(query), node_table.len());
        let mut table = table.lock();
        table.follow_mix(&query.strategy, cluster.mix_generation);
        table.catch_up(&self.changes(), &node_table);
        body(&mut Evaluation {
            node_table: &node_table,
            cluster: &cluster,
            query,
            compiled: query.compile(&cluster.classes),
            prices: self.prices(&cluster.compiled, query),
            table: &mut table,
        })
    }

    /// Holds the best placement on `node` for a pod; its earlier hold ends. There is none without
    /// room there, with too many holds, or for a pod that is on a node or has ended.
    pub fn hold(
        &self,
        pod: &PodUid,
        node: &str,
        query: &PlacementRequest,
        now: Timestamp,
    ) -> Vec<LedgerEvent> {
        let _stays = self.stay();
        let found = self.position(node).filter(|_| self.holds.len() < MAX_HOLDS);
        let cluster = self.cluster();
        let compiled = query.compile(&cluster.classes);
        self.while_unallocated(pod, |held_at| {
            // An earlier hold on another node leaves room there. One on this node ends in the same
            // change, so that only a difference between the two counts.
            let mut events = Vec::new();
            if held_at != found {
                events.extend(self.release(pod));
            }
            let Some(at) = found else { return events };
            let node_entry = self.node_entry(at);
            let is_promised = held_at == found
                && node_entry.look(|_, node_state| has_promise(node_state, pod, &compiled));
            if is_promised {
                return events;
            }
            let entry = self.holds.entry(pod.clone());
            let mut is_held = false;
            events.extend(self.change_node(at, |node_state| {
                node_state.release(pod);
                let standing = node_state.stand_down(pod);
                if let Ok(place) = evaluate(node_state, &compiled, query, &cluster) {
                    let placement = plan::placement(node_state, &place);
                    let expires = now.plus(self.settings.hold_for);
                    let host = compiled.host;
                    let hold = Hold { placement, host, expires, is_promise: false };
                    node_state.hold(pod.clone(), hold);
                    is_held = true;
                }
                if let Some(standing) = standing {
                    node_state.stand(pod.clone(), standing);
                }
            }));
            if is_held {
                entry.insert(at);
            } else if let Entry::Occupied(ended) = entry {
                ended.remove();
            }
            events
        })
    }

    /// Holds places of MIG instances for a pod: an earlier process had promised them to it. Its own calls do
    /// not end that. Not if there is no room there, or too many holds; nor for a pod that has a hold, is on a node or
    /// has ended. `may_hold` is asked last, and does not look at the ledger, which is locked. The events; `None` if it
    /// is not held.
    pub fn keep_promise(
        &self,
        promised: PromisedSpots<'_>,
        query: &PlacementRequest,
        now: Timestamp,
        may_hold: impl FnOnce() -> bool,
    ) -> Option<Vec<LedgerEvent>> {
        let PromisedSpots { pod, node, spots } = promised;
        let _stays = self.stay();
        let at = self.position(node).filter(|_| self.holds.len() < MAX_HOLDS)?;
        let cluster = self.cluster();
        let compiled = query.compile(&cluster.classes);
        self.while_unallocated(pod, |held_at| {
            let entry = self.holds.entry(pod.clone());
            if held_at.is_some() {
                return None;
            }
            // Only looked at first: a change ends kept answers.
            let node_entry = self.node_entry(at);
            let found =
                node_entry.look(|_, node_state| plan::on_spots(node_state, &compiled, spots));
            if found.is_none() || !may_hold() {
                return None;
            }
            let mut is_held = false;
            let events = self.change_node(at, |node_state| {
                let Some(placement) = plan::on_spots(node_state, &compiled, spots) else { return };
                let expires = now.plus(PROMISES_LAST);
                let host = compiled.host;
                let hold = Hold { placement, host, expires, is_promise: true };
                node_state.hold(pod.clone(), hold);
                is_held = true;
            });
            is_held.then(|| {
                entry.insert(at);
                events
            })
        })
    }

    /// The node where a place is held for a pod that an earlier process promised to it with this request, as long as
    /// it fits there.
    pub fn promised_on(&self, pod: &PodUid, query: &PlacementRequest) -> Option<NodeName> {
        let at = self.holds.get(pod).map(|at| *at)?;
        let cluster = self.cluster();
        let compiled = query.compile(&cluster.classes);
        self.node_entry(at).look(|_, node_state| {
            has_promise(node_state, pod, &compiled).then(|| node_state.name().clone())
        })
    }

    /// Ends the hold of a pod that will be bound to `node`, if it is on another node.
    pub fn drop_hold_elsewhere(&self, pod: &PodUid, node: &str) -> Vec<LedgerEvent> {
        let is_there = self.holds.get(pod).is_none_or(|at| Some(*at) == self.position(node));
        if is_there { Vec::new() } else { self.drop_hold(pod) }
    }

    /// Ends the hold of a pod, if it has one: its next *filter* sees that room again.
    pub fn drop_hold(&self, pod: &PodUid) -> Vec<LedgerEvent> {
        self.release(pod).into_iter().collect()
    }

    /// The same, unless an earlier process promised that place to the pod, and it still fits there.
    pub fn drop_chosen_hold(&self, pod: &PodUid, query: &PlacementRequest) -> Vec<LedgerEvent> {
        match self.promised_on(pod, query) {
            Some(_) => Vec::new(),
            None => self.drop_hold(pod),
        }
    }
}

/// Whether the hold of a pod is a place that was promised to it, and still fits.
fn has_promise(node_state: &NodeState, pod: &PodUid, compiled: &CompiledRequest) -> bool {
    let hold = node_state.holds().get(pod).filter(|hold| hold.is_promise);
    hold.is_some_and(|hold| plan::still_fits(node_state, compiled, &hold.placement))
}

/// What decides the answers to a request.
fn shape(query: &PlacementRequest) -> Shape {
    Shape {
        gpu: query.gpu.as_ref().map(GpuRequest::shape),
        host: query.host,
        host_rule: query.host_rule,
        strategy: query.strategy.clone(),
    }
}

/// The best placement in this state of a node.
pub(crate) fn evaluate(
    node_state: &NodeState,
    compiled: &CompiledRequest,
    query: &PlacementRequest,
    cluster: &ClusterModel,
) -> Result<CostedPlacement, Rejection> {
    plan::evaluate(node_state, compiled, &query.strategy, &cluster.compiled, HoldRule::Respected)
}

#[cfg(test)]
mod tests;
