//! Which waiting pod to requeue for room that appeared on a node: the most important and then
//! oldest one whose last *filter* call named this node, and that fits there.
//!
//! Thousands of pods wait with different requests, and dozens of nodes have new room each second.
//! So pods with the same request and the same nodes are one group. A group is tried once, on a copy
//! of one node: this takes no lock of *filter*, and neither reads nor replaces its kept answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fixedbitset::FixedBitSet;

use crate::hardware::device_class::DeviceClasses;
use crate::ledger::nodes::node_entry::NodeEntry;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::model::device_state::{DeviceState, HoldRule};
use crate::model::fit::CompiledRequest;
use crate::model::node_state::NodeState;
use crate::model::request::{Amount, GpuRequest};
use crate::scoring::plan;
use wire::ids::{NodeName, PodUid};
use wire::units::{Demand, MemMib, Share};

/// Compiled requests that are kept, about 300 bytes each.
const KEPT_REQUESTS: usize = 20_000;

/// The nodes that a *filter* call named.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NamedNodes {
    /// By position in the ledger.
    nodes: FixedBitSet,
    /// Nodes that had come before the call. A newer one may be in the next call.
    arrivals: u64,
}

impl Arrival {
    /// The node at a position.
    pub(crate) fn of(at: usize, node_entry: &NodeEntry) -> Self {
        Self { at, since: node_entry.since() }
    }
}

/// Whether a pod may be bound to the node now, as far as its Node object and the last call for the
/// pod say; `None`: any node.
pub(crate) fn is_candidate(at: usize, node_entry: &NodeEntry, named: Option<&NamedNodes>) -> bool {
    named.is_none_or(|named| named.may_have(Arrival::of(at, node_entry))) && node_entry.takes_pods()
}

impl NamedNodes {
    /// Its size in bytes.
    pub(crate) fn size(&self) -> usize {
        self.nodes.len().div_ceil(8) + size_of::<Self>()
    }

    /// Whether the call named this node, or could not have.
    pub(crate) fn may_have(&self, node: Arrival) -> bool {
        node.since >= self.arrivals || self.nodes.contains(node.at)
    }
}

/// A node, and how many had come before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    at: usize,
    since: u64,
}

/// A copy of a node with room, on which many requests are tried.
#[derive(Debug)]
pub struct FreeRoom {
    /// The node, and how many had come before it.
    pub arrival: Arrival,
    node: NodeState,
    classes: DeviceClasses,
    /// No device has more free than this.
    most: Demand,
}

impl Ledger {
    /// The nodes that a call names.
    pub fn named_nodes(&self, nodes: impl Iterator<Item: AsRef<[u8]>>) -> NamedNodes {
        let arrivals = self.arrivals();
        NamedNodes { nodes: self.node_table().listed(nodes).0, arrivals }
    }

    /// The room on a node. `None` if it takes no pods now, or if nothing on it is free.
    pub fn free_room(&self, node: &str) -> Option<FreeRoom> {
        let _stays = self.stay();
        let at = self.position(node)?;
        let cluster = self.cluster();
        let node_entry = self.node_entry(at);
        if !node_entry.takes_pods() {
            return None;
        }
        let node = node_entry.read().clone();
        node.placeable().ok()?;
        let most = if node.spots().is_empty() { most_free(node.devices())? } else { ANY };
        let arrival = Arrival::of(at, &node_entry);
        Some(FreeRoom { arrival, node, classes: cluster.classes.clone(), most })
    }
}

impl Ledger {
    /// A node that takes one of these pods now, among those that their last call named or could not
    /// have. Looks at all nodes at worst, and locks one at a time.
    pub fn node_with_room(&self, pods: &Group) -> Option<NodeName> {
        let (node_table, classes) = (self.node_table(), self.cluster().classes.clone());
        let compiled = pods.query.compile(&classes);
        for (at, node_entry) in node_table.iter().enumerate() {
            if !is_candidate(at, node_entry, pods.named.as_deref()) {
                continue;
            }
            let node = node_entry.read();
            let is_known = node.is_of_classes(classes.count());
            if is_known && plan::fits(&node, &compiled, HoldRule::Respected) {
                return Some(node_entry.name.clone());
            }
        }
        None
    }
}

impl Ledger {
    /// Whether a request fits on this node now, where its last call named the node or could not have.
    pub fn fits_now(
        &self,
        node: &NodeName,
        query: &PlacementRequest,
        named: Option<&NamedNodes>,
    ) -> bool {
        let Some(at) = self.position(node.as_str()) else { return false };
        let compiled = query.compile(&self.cluster().classes);
        let node_entry = self.node_entry(at);
        is_candidate(at, &node_entry, named)
            && plan::fits(&node_entry.read(), &compiled, HoldRule::Respected)
    }
}

/// More than is free on any device.
const ANY: Demand = Demand { memory: MemMib::new(u64::MAX), share: Share::WHOLE };

/// An upper bound of what is free on each device; `None` if nothing is.
fn most_free(devices: &[DeviceState]) -> Option<Demand> {
    // Amounts on a device with slots are rounded, so they cannot be compared here.
    if devices.iter().any(|device| device.slots().is_some()) {
        return Some(ANY);
    }
    let free = devices.iter().map(DeviceState::free);
    let memory = free.clone().map(|free| free.memory).max()?;
    let share = free.map(|free| free.share).max()?;
    (memory > MemMib::ZERO && share > Share::ZERO).then_some(Demand { memory, share })
}

/// The least that a request takes of each device of any class.
fn least_of(query: &PlacementRequest) -> Demand {
    match query.gpu.as_ref().map(|gpu| &gpu.amount) {
        Some(Amount::Fraction(share)) => Demand { memory: MemMib::ZERO, share: *share },
        Some(Amount::Memory(memory)) => Demand { memory: *memory, share: Share::ZERO },
        Some(Amount::FractionAndMemory(share, memory)) => Demand { memory: *memory, share: *share },
        Some(Amount::Whole | Amount::MigInstance(_)) => {
            Demand { memory: MemMib::ZERO, share: Share::WHOLE }
        }
        Some(Amount::SharedSlot) | None => Demand::ZERO,
    }
}

/// The order in which pods are requeued: higher priority first, then older, then by UID.
pub(crate) type Order = (std::cmp::Reverse<i32>, i64, PodUid);

/// A waiting pod that can be requeued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub(crate) order: Order,
    pub(crate) query: PlacementRequest,
    /// The nodes of its last call; `None` if the next one may name any node.
    pub(crate) named: Option<Arc<NamedNodes>>,
}

/// Pods with the same request and the same nodes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    query: Arc<PlacementRequest>,
    named: Option<Arc<NamedNodes>>,
}

impl Candidate {
    pub(crate) fn into_group(self) -> (Order, Group) {
        let Self { order, mut query, named } = self;
        query.gpu = query.gpu.as_ref().map(GpuRequest::shape);
        (order, Group { query: Arc::new(query), named })
    }
}

/// The waiting pods that can be requeued. It belongs to one thread, and follows the changes of
/// [`WaitingPods::changes`](crate::ledger::suggest::waiting::WaitingPods::changes).
#[derive(Default)]
pub struct RequeueOrder {
    pods: BTreeMap<PodUid, (Order, Group)>,
    groups: BTreeMap<Group, BTreeSet<Order>>,
    /// The groups by their first pod, each with the least that it takes of a device.
    heads: BTreeMap<Order, (Demand, Group)>,
    /// Requests compiled for `classes` device classes.
    share_request: BTreeMap<Arc<PlacementRequest>, CompiledRequest>,
    classes: usize,
}

impl RequeueOrder {
    /// Whether no pod can be requeued.
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }

    /// Forgets all pods.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Updates one pod; `None` if it cannot be requeued now.
    pub fn set(&mut self, uid: &PodUid, candidate: Option<Candidate>) {
        if let Some((order, group)) = self.pods.remove(uid) {
            self.change(group, |pods| {
                pods.remove(&order);
            });
        }
        let Some((order, group)) = candidate.map(Candidate::into_group) else { return };
        // The known group already shares its request with its pods.
        let known = self.groups.get_key_value(&group).map(|(known, _)| known.clone());
        let group = known.unwrap_or(group);
        self.pods.insert(uid.clone(), (order.clone(), group.clone()));
        self.change(group, |pods| {
            pods.insert(order);
        });
    }

    /// Removes a pod and returns it.
    pub fn take(&mut self, uid: &PodUid) -> Option<Candidate> {
        let (order, Group { query, named }) = self.pods.get(uid)?.clone();
        self.set(uid, None);
        Some(Candidate { order, query: PlacementRequest::clone(&query), named })
    }

    /// Keeps only the pods for which `stays` is true.
    pub fn retain(&mut self, stays: impl Fn(&PodUid) -> bool) {
        let gone: Vec<PodUid> = self.pods.keys().filter(|uid| !stays(uid)).cloned().collect();
        gone.iter().for_each(|uid| self.set(uid, None));
    }

    /// Changes the pods of a group, and updates its first pod in `heads`.
    fn change(&mut self, group: Group, change: impl FnOnce(&mut BTreeSet<Order>)) {
        let pods = self.groups.entry(group.clone()).or_default();
        let before = pods.first().cloned();
        change(pods);
        let now = pods.first().cloned();
        if now.is_none() {
            self.groups.remove(&group);
        }
        if before == now {
            return;
        }
        if let Some(before) = before {
            self.heads.remove(&before);
        }
        match now {
            Some(now) => {
                self.heads.insert(now, (least_of(&group.query), group));
            }
            None => {
                self.share_request.remove(&group.query);
            }
        }
    }

    /// The first pod, not among `tried`, that fits on the node and whose next call may name it;
    /// with the number of groups that were tried.
    pub fn first(&mut self, room: &FreeRoom, tried: &BTreeSet<PodUid>) -> (Option<PodUid>, usize) {
        if self.classes != room.classes.count() {
            self.share_request.clear();
            self.classes = room.classes.count();
        }
        let (mut first, mut looks): (Option<&Order>, usize) = (None, 0);
        for (head, (least, group)) in &self.heads {
            if first.is_some_and(|first| first < head) {
                break;
            }
            looks += 1;
            let is_small = least.memory <= room.most.memory && least.share <= room.most.share;
            let may_be_named =
                || group.named.as_ref().is_none_or(|named| named.may_have(room.arrival));
            if !is_small || !may_be_named() || !fits(&mut self.share_request, room, &group.query) {
                continue;
            }
            let untried = self.groups[group].iter().find(|(.., uid)| !tried.contains(uid));
            first = first.into_iter().chain(untried).min();
        }
        (first.map(|(.., uid)| uid.clone()), looks)
    }
}

/// Whether the request fits on the node; keeps the compiled request.
fn fits(
    share_request: &mut BTreeMap<Arc<PlacementRequest>, CompiledRequest>,
    room: &FreeRoom,
    query: &Arc<PlacementRequest>,
) -> bool {
    let fits = |compiled: &CompiledRequest| plan::fits(&room.node, compiled, HoldRule::Respected);
    if let Some(compiled) = share_request.get(query) {
        return fits(compiled);
    }
    let compiled = query.compile(&room.classes);
    let fits = fits(&compiled);
    if share_request.len() < KEPT_REQUESTS {
        share_request.insert(Arc::clone(query), compiled);
    }
    fits
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::ledger::ledger_fixture::{bound, hello, ledger, see_node, share_request, uid};
    use wire::units::Timestamp;

    #[test]
    fn the_first_pod_of_the_groups_is_the_first_of_all_pods() {
        let ledger = ledger("A");
        see_node(&ledger, "m");
        ledger.report("m", &hello("y", 1, "B"), Timestamp::START).unwrap();
        ledger.see_pod(&bound("there", "n", "A", 400_000), Timestamp::START);
        let rooms = ["m", "n"].map(|node| ledger.free_room(node).unwrap());
        let sets = [&["m"][..], &["n"], &["m", "n"], &[]]
            .map(|names| Arc::new(ledger.named_nodes(names.iter())));
        let mut chance = ChaCha8Rng::seed_from_u64(7);
        let mut order = RequeueOrder::default();
        let mut pods: BTreeMap<PodUid, Candidate> = BTreeMap::new();
        for _ in 0..3_000 {
            let uid = uid(&format!("{}", chance.random_range(0..40)));
            let candidate = chance.random_bool(0.7).then(|| Candidate {
                order: (Reverse(chance.random_range(0..3)), chance.random_range(0..9), uid.clone()),
                query: share_request(100_000 * chance.random_range(1..=10)),
                named: sets.get(chance.random_range(0..5)).cloned(),
            });
            order.set(&uid, candidate.clone());
            pods.remove(&uid);
            pods.extend(candidate.map(|candidate| (uid, candidate)));
            let tried: BTreeSet<PodUid> =
                pods.keys().filter(|_| chance.random_bool(0.2)).cloned().collect();
            for (room, name) in rooms.iter().zip(["m", "n"]) {
                let can = pods.iter().filter(|(uid, pod)| {
                    !tried.contains(*uid)
                        && pod.named.as_ref().is_none_or(|named| named.may_have(room.arrival))
                        && ledger.fresh_answer(&pod.query, name).is_ok()
                });
                let expected = can.map(|(_, pod)| &pod.order).min().map(|(.., uid)| uid.clone());
                assert_eq!(order.first(room, &tried).0, expected);
            }
            assert_eq!(order.pods.len(), pods.len());
            assert_eq!(order.groups.len(), order.heads.len());
        }
        pods.keys().for_each(|uid| order.set(uid, None));
        assert!(order.is_empty() && order.groups.is_empty() && order.heads.is_empty());
        assert!(order.share_request.is_empty(), "deleted pods leave no state");
    }

    #[test]
    fn large_searches_do_not_evict_cached_filter_answers() {
        let ledger = ledger("A");
        let kept = share_request(300_000);
        ledger.answers(&kept, &["n"]);
        let tables = ledger.shapes.count();
        let mut order = RequeueOrder::default();
        for age in 0..3_000 {
            let uid = uid(&format!("{age}"));
            // The first 2,999 are too large, the more so the older they are.
            let query = share_request(if age < 2_999 { 2_000_000 - age } else { 1_000_000 });
            let age = i64::try_from(age).unwrap();
            let candidate = Candidate { order: (Reverse(0), age, uid.clone()), query, named: None };
            order.set(&uid, Some(candidate));
        }
        let room = ledger.free_room("n").unwrap();
        let (first, looks) = order.first(&room, &BTreeSet::new());
        assert_eq!((first, looks), (Some(uid("2999")), 3_000));
        assert_eq!(order.share_request.len(), 1, "a request larger than all room is not compiled");
        assert_eq!(ledger.shapes.count(), tables);
    }

    #[test]
    fn a_node_without_room_is_left_out() {
        let ledger = ledger("A");
        assert!(ledger.free_room("n").is_some());
        ledger.see_pod(&bound("all", "n", "A", 1_000_000), Timestamp::START);
        assert!(ledger.free_room("n").is_none());
        assert!(ledger.free_room("unknown").is_none());
    }
}
