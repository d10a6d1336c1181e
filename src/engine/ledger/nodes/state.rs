//! The state of all nodes, and the locks around it. The other folders of the ledger read and change
//! it: `query`, `change`, `usage` and `suggest`.
//!
//! Everything is behind `&self`: one short lock per node, no lock across I/O. A call returns as
//! [`LedgerEvent`]s what it changed for others; the caller passes them on.
//!
//! Lock order, so that no thread waits in a circle: membership, a session, `mixing`, `window`, `cluster`, a
//! shape table or an entry of `pods`, an entry of `holds`, `standing`, the state of one node, its expected
//! waste, its part of the supply. `node_table`, `ended`, `turnover`, entries of `owners`, details, the supply of the cluster and its
//! changes may be taken under any of these, and nothing under them. Gauges are taken first.
//!
//! Several threads make calls about one pod (verbs, watch, timers). What a call finds out about the
//! pod and what it does about it is one step: it locks the pod's entry of `pods` meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use dashmap::{DashMap, Entry};
use fixedbitset::FixedBitSet;
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::hardware::device_class::DeviceClasses;
use crate::hardware::pool::PoolRules;
use crate::hardware::spots::DividedGpu;
use crate::ledger::nodes::answer_cache::ShapeTables;
use crate::ledger::nodes::changes::{Changes, EndedPods, Session};
use crate::ledger::nodes::node_entry::{NodeEntry, SharedByNodes};
use crate::ledger::nodes::per_node::{FleetGauge, Gauge};
use crate::ledger::nodes::table::{NodeTable, VERSION_OF_VACANT};
use crate::ledger::nodes::teams::Teams;
use crate::model::device_state::HoldRule;
use crate::model::event::{LedgerEvent, StateBefore};
use crate::model::node_state::NodeState;
use crate::usage::node_details::NodeDetails;
use crate::waste::compiled_mix::CompiledMix;
use crate::waste::request_mix::{Mix, MixWindow};
use crate::waste::supply::{NodeShapes, Supply};
use crate::waste::turnover::Turnover;
use crate::waste::weights::WasteWeights;
use wire::ids::{DeviceId, NodeName, PodUid};
use wire::units::MemMib;

/// Settings that are fixed at the start.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How long a hold lasts at most.
    pub hold_for: Duration,
    /// Age of the last report from which a node counts as silent.
    pub stale_after: Duration,
    /// How long processes of an ended pod keep its devices, unless reports still list them.
    pub drain_limit: Duration,
    /// How long answers wait for the first report of nodes that have pods.
    pub warm_up: Duration,
    /// Use beyond what is allocated counts only above this.
    pub unmanaged_tolerance: MemMib,
    /// First session number to give to an agent; larger than any before a restart.
    pub first_session: u64,
}

/// Most nodes with which a node that only a pod names is still added: 2.6 KiB each.
const MAX_NAMED_NODES: usize = 20_000;

/// Gone nodes that are kept in case they return, 2.6 KiB each: this many, or one in sixteen.
const KEPT_GONE: usize = 64;

/// The entry at positions without a node. No node has its version.
fn vacant(tolerance: MemMib) -> NodeEntry {
    let mut node_state = NodeState::new(NodeName::new(""), tolerance);
    node_state.lose_node();
    let mut node_entry = NodeEntry::new(0, node_state, Arc::default());
    node_entry.version = VERSION_OF_VACANT.into();
    node_entry
}

/// What is the same for all nodes: device classes, and the request mix compiled for them.
pub(crate) struct ClusterModel {
    pub(crate) classes: DeviceClasses,
    mix: Arc<Mix>,
    node_shapes: NodeShapes,
    /// The GPUs on which MIG instances are made, as they were when the mix was compiled.
    divided: Vec<DividedGpu>,
    /// How the devices of each pool are shared.
    pub(crate) pools: PoolRules,
    weights: WasteWeights,
    pub(crate) compiled: Arc<CompiledMix>,
    pub(crate) mix_generation: u64,
}

impl ClusterModel {
    /// Lets `change` add classes, and compiles the mix again if it did.
    pub(crate) fn change_classes<T>(&mut self, change: impl FnOnce(&mut DeviceClasses) -> T) -> T {
        let before = self.classes.count();
        let answer = change(&mut self.classes);
        if self.classes.count() != before {
            self.compile_classes();
        }
        answer
    }

    /// The request mix.
    pub(crate) fn mix(&self) -> &Arc<Mix> {
        &self.mix
    }

    /// The nodes by shape.
    pub(crate) fn node_shapes(&self) -> &NodeShapes {
        &self.node_shapes
    }

    /// The same with another mix and other nodes, not compiled yet.
    fn with_mix(&self, mix: Arc<Mix>, node_shapes: NodeShapes, divided: Vec<DividedGpu>) -> Self {
        Self {
            classes: self.classes.clone(),
            mix,
            node_shapes,
            divided,
            pools: self.pools.clone(),
            weights: self.weights,
            compiled: Arc::clone(&self.compiled),
            mix_generation: self.mix_generation,
        }
    }

    /// Uses the mix of `next` from now on, which was compiled beforehand.
    fn adopt(&mut self, next: Self) {
        (self.mix, self.node_shapes, self.divided) = (next.mix, next.node_shapes, next.divided);
        self.compiled = next.compiled;
        if next.classes.count() == self.classes.count() {
            self.mix_generation += 1;
        } else {
            self.compile_classes();
        }
    }

    fn compile(&mut self) {
        let mix = CompiledMix::weighted(&self.weights, &self.mix, &self.classes, &self.node_shapes);
        let mix = match &self.divided[..] {
            [] => mix,
            divided => mix.with_divided(&self.mix, divided, &self.compiled),
        };
        self.compiled = Arc::new(mix);
        self.mix_generation += 1;
    }

    /// The same where only classes have come, on which what it costs to make MIG instances does not depend: with
    /// other lists of NVML in each report they come with each, and calls wait meanwhile.
    fn compile_classes(&mut self) {
        let mix = CompiledMix::weighted(&self.weights, &self.mix, &self.classes, &self.node_shapes);
        self.compiled = Arc::new(mix.with_costs_of(&self.compiled));
        self.mix_generation += 1;
    }
}

/// The ledger: the state of all nodes.
pub struct Ledger {
    /// How the ledger decides.
    pub settings: Settings,
    node_table: RwLock<Arc<NodeTable>>,
    pub(crate) pods: DashMap<PodUid, usize>,
    pub(crate) holds: DashMap<PodUid, usize>,
    /// Standing holds, one for each pool with a line. Taken before the state of a node.
    pub(crate) standing: Mutex<BTreeMap<PodUid, usize>>,
    pub(crate) owners: DashMap<DeviceId, usize>,
    /// What teams have. It may be locked under anything, and nothing under it.
    pub teams: Teams,
    /// Numbers of failure domains, from one on.
    pub(crate) domains: Mutex<BTreeMap<String, u32>>,
    cluster: RwLock<ClusterModel>,
    shared: Arc<SharedByNodes>,
    /// Held for reading while a name or a position of a node is used, for writing while positions
    /// pass on to other nodes.
    membership: RwLock<()>,
    /// The entry at positions without a node.
    vacant: Arc<NodeEntry>,
    /// Whether nodes have come, gone or changed their size since they were last counted.
    pub(crate) are_shapes_old: AtomicBool,
    pub(crate) window: Mutex<MixWindow>,
    pub(crate) turnover: Mutex<Turnover>,
    /// Held while the mix is made.
    mixing: Mutex<()>,
    ended: Mutex<EndedPods>,
    pub(crate) shapes: ShapeTables,
    pub(crate) gauge: Mutex<Gauge>,
    pub(crate) fleet: Mutex<FleetGauge>,
    pub(crate) next_session: AtomicU64,
    pub(crate) is_listed: AtomicBool,
    /// Whether the ledger has once been ready.
    pub(crate) is_ready: AtomicBool,
    pub(crate) listed_at: AtomicU64,
}

impl Ledger {
    /// A ledger without any node.
    pub fn new(settings: Settings) -> Self {
        let classes = DeviceClasses::default();
        let mix = Mix::default();
        let node_shapes = NodeShapes::default();
        let compiled = Arc::new(CompiledMix::of(&mix, &classes, &node_shapes));
        Self {
            settings,
            node_table: RwLock::default(),
            pods: DashMap::new(),
            holds: DashMap::new(),
            standing: Mutex::default(),
            owners: DashMap::new(),
            teams: Teams::default(),
            domains: Mutex::default(),
            cluster: RwLock::new(ClusterModel {
                classes,
                mix: Arc::new(mix),
                node_shapes,
                divided: Vec::new(),
                pools: PoolRules::default(),
                weights: WasteWeights::default(),
                compiled,
                mix_generation: 0,
            }),
            shared: Arc::default(),
            membership: RwLock::default(),
            vacant: Arc::new(vacant(settings.unmanaged_tolerance)),
            are_shapes_old: AtomicBool::new(false),
            window: Mutex::default(),
            turnover: Mutex::default(),
            mixing: Mutex::default(),
            ended: Mutex::default(),
            shapes: ShapeTables::default(),
            gauge: Mutex::default(),
            fleet: Mutex::default(),
            next_session: AtomicU64::new(settings.first_session),
            is_listed: AtomicBool::new(false),
            is_ready: AtomicBool::new(false),
            listed_at: AtomicU64::new(0),
        }
    }

    /// The entries of all nodes known now. Cheap: the list is copied only when a node is added.
    pub(crate) fn node_table(&self) -> Arc<NodeTable> {
        Arc::clone(&self.node_table.read())
    }

    pub(crate) fn node_entry(&self, at: usize) -> Arc<NodeEntry> {
        Arc::clone(&self.node_table()[at])
    }

    /// Keeps every node in its position meanwhile. A thread must not take it twice.
    pub(crate) fn stay(&self) -> RwLockReadGuard<'_, ()> {
        self.membership.read()
    }

    pub(crate) fn cluster(&self) -> RwLockReadGuard<'_, ClusterModel> {
        self.cluster.read()
    }

    pub(crate) fn cluster_mut(&self) -> RwLockWriteGuard<'_, ClusterModel> {
        self.cluster.write()
    }

    /// What is free in the whole cluster now.
    pub(crate) fn supply(&self) -> MutexGuard<'_, Supply> {
        self.shared.supply.lock()
    }

    /// How many nodes have come so far.
    pub(crate) fn arrivals(&self) -> u64 {
        self.shared.arrivals()
    }

    /// The nodes that changed, in their order.
    pub(crate) fn changes(&self) -> MutexGuard<'_, Changes> {
        self.shared.changes.lock()
    }

    /// Uses other weights of the terms of the policy `fragmentation` (simulation).
    pub fn weigh(&self, weights: WasteWeights) {
        let mut cluster = self.cluster_mut();
        cluster.weights = weights;
        cluster.compile();
    }

    /// Uses the same mix for other nodes from now on.
    pub(crate) fn mix_for_other_nodes(&self) {
        self.put_mix(None, self.mixing.lock());
    }

    /// Uses a mix that is made now.
    pub(crate) fn make_mix(&self, make: impl FnOnce(&mut MixWindow) -> Mix) {
        let turn = self.mixing.lock();
        let mix = make(&mut self.window.lock());
        self.put_mix(Some(Arc::new(mix)), turn);
    }

    /// Makes the mix again from the window. Takes milliseconds if it has thousands of types.
    pub fn learn_mix(&self) {
        let turn = self.mixing.lock();
        let turnover = self.turnover.lock().millionths();
        let (counts, made_at) = {
            let window = self.window.lock();
            (window.counts().clone(), window.moment(turnover))
        };
        let mix = Mix::of(&counts).with_turnover(turnover);
        let used = Arc::clone(self.cluster().mix());
        if mix.differs(&used) {
            self.window.lock().uses(Some(made_at));
            self.put_mix(Some(Arc::new(mix)), turn);
        }
    }

    /// Where the numbers of a node's orders begin. Each state of a node has begun at least one session, so no two have
    /// the same ones.
    fn first_order(&self) -> u64 {
        self.next_session.load(Ordering::Acquire).wrapping_shl(12)
    }

    /// Uses another mix, or the same one for other nodes. To compile thousands of types takes milliseconds, for
    /// which nothing that calls need is locked. `_turn` keeps the order: the mix that is made last is used last.
    fn put_mix(&self, mix: Option<Arc<Mix>>, _turn: MutexGuard<'_, ()>) {
        self.are_shapes_old.store(false, Ordering::Release);
        let mut node_shapes = NodeShapes::default();
        self.node_table().iter().for_each(|node_entry| node_shapes.count(&node_entry.read()));
        let divided = self.divided();
        let mut next = {
            let cluster = self.cluster();
            let is_same = (&cluster.node_shapes, &cluster.divided) == (&node_shapes, &divided);
            if mix.is_none() && is_same {
                return; // an agent said hello again
            }
            let mix = mix.unwrap_or_else(|| Arc::clone(&cluster.mix));
            cluster.with_mix(mix, node_shapes, divided)
        };
        next.compile();
        self.cluster_mut().adopt(next);
    }

    /// The GPUs on which MIG instances are made.
    fn divided(&self) -> Vec<DividedGpu> {
        let mut divided = Vec::new();
        for node_entry in self.node_table().iter() {
            let node = node_entry.read();
            let gpus = node.divided(HoldRule::Ignored);
            divided.extend(gpus.map(|(_, gpu)| gpu));
        }
        divided
    }

    /// Notes whether MIG instances have come or gone since the mix was compiled: each one changes what the
    /// next ones cost.
    pub(crate) fn look_at_divided(&self) {
        let divided = self.divided();
        if self.cluster().divided != divided {
            self.are_shapes_old.store(true, Ordering::Release);
        }
    }

    pub(crate) fn ended(&self) -> MutexGuard<'_, EndedPods> {
        self.ended.lock()
    }

    pub(crate) fn position(&self, node: &str) -> Option<usize> {
        self.node_table.read().position(node.as_bytes())
    }

    /// The position of a node; adds a new one.
    pub(crate) fn position_or_insert(&self, name: &NodeName) -> usize {
        if let Some(at) = self.position(name.as_str()) {
            return at;
        }
        let mut node_table = self.node_table.write();
        if let Some(at) = node_table.position(name.as_str().as_bytes()) {
            return at; // another thread was quicker
        }
        let mut node_state = NodeState::new(name.clone(), self.settings.unmanaged_tolerance);
        node_state.count_orders_from(self.first_order());
        node_state.lose_node(); // until its Node object is seen: a pod may name a node that is gone
        Arc::make_mut(&mut node_table)
            .add(name.as_str(), |at| NodeEntry::new(at, node_state, Arc::clone(&self.shared)))
    }

    /// The position of the node that a pod names; adds a new one, unless there are too many. A pod
    /// may name any node; a node that exists is always known.
    pub(crate) fn position_for_pod(&self, name: &NodeName) -> Option<usize> {
        match self.position(name.as_str()) {
            None if self.node_table().count() >= MAX_NAMED_NODES => None,
            None => Some(self.position_or_insert(name)),
            known => known,
        }
    }

    /// Puts a node into a failure domain.
    pub(crate) fn set_domain(&self, at: usize, domain: u32) {
        if self.node_table().domain(at) != domain {
            let mut node_table = self.node_table.write();
            Arc::make_mut(&mut node_table).set_domain(at, domain);
        }
    }

    /// Changes a node's state and returns the events of that.
    pub(crate) fn change_node(
        &self,
        at: usize,
        change: impl FnOnce(&mut NodeState),
    ) -> Vec<LedgerEvent> {
        self.node_entry(at).change(|node_state| {
            let before = StateBefore::of(node_state);
            change(node_state);
            before.events(node_state)
        })
    }

    /// Ends the hold of a pod, and returns the event of the room that appears.
    pub(crate) fn release(&self, uid: &PodUid) -> Option<LedgerEvent> {
        let mut events = Vec::new();
        self.holds.remove_if(uid, |_, at| {
            events = self.change_node(*at, |node_state| {
                node_state.release(uid);
            });
            true
        });
        events.pop()
    }

    /// Ends the standing hold of a pod, if it has one.
    pub fn stand_down(&self, uid: &PodUid) -> Vec<LedgerEvent> {
        let Some(at) = self.standing.lock().remove(uid) else { return Vec::new() };
        self.teams.let_go(uid);
        self.change_node(at, |node_state| {
            node_state.stand_down(uid);
        })
    }

    /// Ends all that is kept for a pod, and returns the events of the room that appears. The standing hold
    /// ends first: it takes nothing beside a hold on the same node.
    pub(crate) fn let_go(&self, uid: &PodUid) -> Vec<LedgerEvent> {
        let mut events = self.stand_down(uid);
        events.extend(self.release(uid));
        events
    }

    /// Ends the standing hold of a pod that goes on waiting. The room event comes also if nothing
    /// but CPU and host memory was kept, for which there is no other.
    pub fn give_up_room(&self, uid: &PodUid) -> Vec<LedgerEvent> {
        let node = self.standing_nodes().remove(uid);
        let mut events = self.stand_down(uid);
        let room = node.map(LedgerEvent::Room).filter(|room| !events.contains(room));
        events.extend(room);
        events
    }

    /// Runs `body` with the position of the pod's hold, unless the pod is on a node or has ended.
    pub(crate) fn while_unallocated<T: Default>(
        &self,
        uid: &PodUid,
        body: impl FnOnce(Option<usize>) -> T,
    ) -> T {
        let Entry::Vacant(_held) = self.pods.entry(uid.clone()) else { return T::default() };
        if self.ended().contains(uid) {
            return T::default();
        }
        body(self.holds.get(uid).map(|at| *at))
    }

    /// Removes pods from the index that node `at` no longer has.
    pub(crate) fn drop_index(&self, at: usize, ended: &[PodUid]) {
        let node_entry = self.node_entry(at);
        for uid in ended {
            self.pods.remove_if(uid, |_, held| {
                let is_gone = *held == at && !node_entry.read().has_pod(uid);
                if is_gone {
                    self.teams.forget(uid);
                }
                is_gone
            });
            self.holds.remove_if(uid, |_, held| {
                *held == at && !node_entry.read().holds().contains_key(uid)
            });
        }
        self.recycle(at);
    }

    /// Forgets gone nodes without pods, if there are many of them.
    pub(crate) fn forget_many_gone_nodes(&self) {
        let node_table = self.node_table();
        let gone =
            node_table.present().filter(|at| node_table[*at].read().is_forgettable()).count();
        if gone > KEPT_GONE.max(node_table.count() / 16) {
            self.forget_gone_nodes();
        }
    }

    /// Forgets all gone nodes without pods, and failure domains without nodes. New nodes get their
    /// positions.
    #[doc(hidden)] // for tests; otherwise time does it
    pub fn forget_gone_nodes(&self) {
        let _alone = self.membership.write();
        let node_table = self.node_table();
        let gone = node_table.present().filter(|at| node_table[*at].read().is_forgettable());
        let gone: FixedBitSet = gone.collect();
        gone.ones().for_each(|at| self.recycle(at));
        drop(node_table);
        let mut node_table = self.node_table.write();
        Arc::make_mut(&mut node_table).remove(&gone, &self.vacant);
        let used: BTreeSet<u32> = node_table.present().map(|at| node_table.domain(at)).collect();
        self.domains.lock().retain(|_, number| used.contains(number));
    }

    /// Reduces a deleted node without pods to its name, in case it returns.
    pub(crate) fn recycle(&self, at: usize) {
        let node_entry = self.node_entry(at);
        if Arc::ptr_eq(&node_entry, &self.vacant) || !node_entry.read().is_forgettable() {
            return;
        }
        let is_recycled = node_entry.change(|node_state| {
            if !node_state.is_forgettable() {
                return false; // a pod on it was seen, or the node itself
            }
            for device in node_state.devices() {
                self.owners.remove_if(&device.device().id, |_, owner| *owner == at);
            }
            let tolerance = self.settings.unmanaged_tolerance;
            *node_state = NodeState::new(node_state.name().clone(), tolerance);
            node_state.count_orders_from(self.first_order());
            node_state.lose_node();
            true
        });
        if is_recycled {
            *node_entry.session.lock() = Session::default();
            *node_entry.details.lock() = NodeDetails::default();
            node_entry.arrive_again();
        }
    }
}

#[cfg(test)]
mod tests;
