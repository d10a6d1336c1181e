//! The books of all nodes: facts come in here, and reservations are made here.
//!
//! Everything is behind `&self`: one short lock per node, no lock across I/O. What a call changed
//! beyond the books is returned as [`Effect`]s; the caller tells the world.
//!
//! Lock order, so that nothing can wait in a circle: a session, `world`, a shape table or an entry of
//! `pods`, an entry of `claims`, the books of one node. `slots`, `ended` and entries of `owners` may be
//! taken under any of these, and nothing is taken under them.
//!
//! Calls about one pod come from several threads (verbs, watch, timers). What they find out about the
//! pod and what they do about it is one step, since the pod's entry of `pods` is held meanwhile.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use dashmap::{DashMap, Entry};

use super::questions::{Question, ShapeTables};
use super::reports::Session;
use crate::packing::device::{DeviceClasses, DeviceId, NodeName, PodUid, PoolName};
use crate::packing::fit::{Ask, Misfit};
use crate::packing::fragmentation::Packing;
use crate::packing::mix::{CompiledMix, Mix, MixWindow, RequestType};
use crate::packing::node::{AuditError, ClaimRule, NodeLedger, NodeState};
use crate::packing::plan;
use crate::packing::reservation::{Placement, PodRef, Reservation, ReservationState};
use crate::packing::units::{HostAmount, MemMib, Timestamp};

/// Ended pods that are remembered, so that a late event cannot book them again. More than a cluster
/// ends between the event and its late copy; 100 bytes each.
const REMEMBERED_ENDS: usize = 20_000;

/// What the ledger is told once, at the start.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How long a claim lasts at most.
    pub claim_for: Duration,
    /// Age of the last report from which a node counts as silent.
    pub stale_after: Duration,
    /// How long an ended pod's processes may hold its devices at most.
    pub drain_limit: Duration,
    /// How long answers wait for the first report of nodes that hold pods.
    pub warm_up: Duration,
    /// Use that no booking covers is believed above this.
    pub unmanaged_tolerance: MemMib,
    /// First session number to give to an agent; larger than any given before a restart.
    pub first_session: u64,
}

/// What the API server says about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFact {
    /// The pod.
    pub pod: PodRef,
    /// Its node; none while it waits.
    pub node: Option<NodeName>,
    /// What it takes of the node outside its GPUs.
    pub host: HostAmount,
    /// Whether all its containers have ended for good.
    pub is_terminal: bool,
    /// Whether it asks for GPU room, in whatever valid or invalid form.
    pub wants_gpu: bool,
    /// The placement written on it, where there is a valid one.
    pub placement: Option<Placement>,
}

/// What a change means beyond the books.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// Room may have appeared on this node: waiting pods that fit now should be woken.
    Room(NodeName),
    /// More is booked on a device than it has.
    Overbooked {
        /// The node.
        node: NodeName,
        /// The device.
        device: DeviceId,
    },
    /// A pod with a GPU request runs without a placement of ours: only its observed use counts.
    Unplaced {
        /// The pod.
        pod: PodRef,
        /// Its node.
        node: NodeName,
    },
    /// A node's agent went silent.
    Silent(NodeName),
}

/// Why a reservation was not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// It does not fit on today's books.
    #[error("{}", .0.reason())]
    Misfit(Misfit),
    /// The pod already holds a reservation on another node.
    #[error("pod is being bound to node `{node}`")]
    HeldElsewhere {
        /// That node.
        node: NodeName,
    },
    /// The pod has ended.
    #[error("pod has ended")]
    Ended,
}

/// Whether questions can be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Pods and nodes have not been listed yet.
    NotListed,
    /// Nodes that hold pods have not reported yet.
    AwaitingReports {
        /// How many.
        nodes: usize,
    },
    /// Yes.
    Ready,
}

/// One node: its books, and a number that grows with each change of them.
pub(super) struct Slot {
    pub(super) name: NodeName,
    pub(super) version: AtomicU64,
    books: Mutex<NodeLedger>,
    pub(super) session: Mutex<Session>,
}

impl Slot {
    fn new(books: NodeLedger) -> Self {
        Self {
            name: books.name().clone(),
            version: AtomicU64::new(1),
            books: Mutex::new(books),
            session: Mutex::new(Session::default()),
        }
    }

    /// The books, for reading. A panic while they were held cannot leave them half-changed in a way
    /// that matters: sums are derived anew at the next change, and `audit` compares them.
    pub(super) fn read(&self) -> MutexGuard<'_, NodeLedger> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the books; the version grows while they are held.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut NodeLedger) -> T) -> T {
        let mut books = self.read();
        let answer = change(&mut books);
        self.version.fetch_add(1, Ordering::Release);
        answer
    }
}

/// What is the same for all nodes: the classes of devices and the request mix worked out for them.
pub(super) struct World {
    pub(super) classes: DeviceClasses,
    mix: Mix,
    pub(super) compiled: Arc<CompiledMix>,
    pub(super) mix_generation: u64,
}

impl World {
    /// Lets `change` add classes, and works out the mix anew when it did.
    pub(super) fn change_classes<T>(&mut self, change: impl FnOnce(&mut DeviceClasses) -> T) -> T {
        let before = self.classes.count();
        let answer = change(&mut self.classes);
        if self.classes.count() != before {
            self.compiled = Arc::new(self.mix.compile(&self.classes));
        }
        answer
    }

    /// The request mix.
    pub(super) fn mix(&self) -> &Mix {
        &self.mix
    }

    fn replace_mix(&mut self, mix: Mix) {
        self.compiled = Arc::new(mix.compile(&self.classes));
        self.mix = mix;
        self.mix_generation += 1;
    }
}

/// All nodes.
pub struct Ledger {
    pub(super) settings: Settings,
    slots: RwLock<Arc<Vec<Arc<Slot>>>>,
    index: DashMap<NodeName, usize>,
    pods: DashMap<PodUid, usize>,
    pub(super) claims: DashMap<PodUid, usize>,
    pub(super) owners: DashMap<DeviceId, usize>,
    world: RwLock<World>,
    window: Mutex<MixWindow>,
    ended: Mutex<Ended>,
    pub(super) shapes: ShapeTables,
    pub(super) next_session: AtomicU64,
    is_listed: AtomicBool,
    listed_at: AtomicU64,
}

impl Ledger {
    /// A ledger without any node.
    pub fn new(settings: Settings) -> Self {
        let classes = DeviceClasses::default();
        let mix = Mix::default();
        let compiled = Arc::new(mix.compile(&classes));
        Self {
            settings,
            slots: RwLock::default(),
            index: DashMap::new(),
            pods: DashMap::new(),
            claims: DashMap::new(),
            owners: DashMap::new(),
            world: RwLock::new(World { classes, mix, compiled, mix_generation: 0 }),
            window: Mutex::default(),
            ended: Mutex::default(),
            shapes: ShapeTables::default(),
            next_session: AtomicU64::new(settings.first_session),
            is_listed: AtomicBool::new(false),
            listed_at: AtomicU64::new(0),
        }
    }

    // --- facts -----------------------------------------------------------------------------------

    /// Notes that a node exists, with what it offers outside its GPUs.
    pub fn see_node(&self, name: &NodeName, host: HostAmount, pool: PoolName) -> Vec<Effect> {
        let at = self.slot_of(name);
        self.change_slot(at, |books| books.see_node(host, pool))
    }

    /// Notes that a node was deleted. Its tenants stay booked until their pods are gone.
    pub fn lose_node(&self, name: &NodeName) {
        let Some(at) = self.position(name.as_str()) else { return };
        self.slot(at).change(NodeLedger::lose_node);
        self.recycle(at);
    }

    /// Notes what the API server says about a pod. Twice, late or in another order: the books end
    /// the same.
    pub fn see_pod(&self, fact: &PodFact, now: Timestamp) -> Vec<Effect> {
        let uid = &fact.pod.uid;
        if fact.is_terminal {
            return self.end_pod(uid, now);
        }
        let Some(node) = &fact.node else { return Vec::new() };
        let at = self.slot_of(node);
        let entry = self.pods.entry(uid.clone());
        if self.ended().contains(uid) {
            return Vec::new();
        }
        let mut held_at = entry.or_insert(at);
        let before = std::mem::replace(&mut *held_at, at);
        let mut effects = self.unclaim(uid).into_iter().collect::<Vec<_>>();
        if before != at {
            effects.extend(self.change_slot(before, |books| {
                books.remove(uid);
            }));
        }
        let mut is_placed = true;
        effects.extend(self.change_slot(at, |books| {
            match &fact.placement {
                Some(written) => {
                    books.book(confirmed(fact, written.clone(), books.reservation(uid)));
                }
                None if is_confirmed(books.reservation(uid)) => {} // its keys were taken away: it still runs
                None => books.book_host(uid.clone(), fact.host),
            }
            is_placed = books.reservation(uid).is_some();
        }));
        if fact.wants_gpu && !is_placed {
            effects.push(Effect::Unplaced { pod: fact.pod.clone(), node: node.clone() });
        }
        effects.extend(self.overbooked(at, fact.placement.as_ref()));
        effects
    }

    /// Notes that a pod is terminal or gone. Its devices are free once its processes are.
    pub fn end_pod(&self, uid: &PodUid, now: Timestamp) -> Vec<Effect> {
        self.ended().remember(uid);
        let entry = self.pods.entry(uid.clone());
        let mut effects = self.unclaim(uid).into_iter().collect::<Vec<_>>();
        let Entry::Occupied(held) = entry else { return effects };
        let at = *held.get();
        let mut is_gone = false;
        effects.extend(self.change_slot(at, |books| {
            books.drain(uid, now);
            is_gone = !books.holds(uid);
        }));
        if is_gone {
            held.remove();
            self.recycle(at);
        }
        effects
    }

    /// Notes that pods and nodes have been listed completely.
    pub fn set_listed(&self, now: Timestamp) {
        if !self.is_listed.swap(true, Ordering::AcqRel) {
            self.listed_at.store(now.millis(), Ordering::Release);
        }
    }

    /// Time has passed: silent nodes, drains that lasted too long, claims that are due.
    pub fn tick(&self, now: Timestamp) -> Vec<Effect> {
        let mut effects = Vec::new();
        let slots = self.slots();
        for (at, slot) in slots.iter().enumerate() {
            let (is_stale, is_due) = {
                let books = slot.read();
                let is_stale = books.is_stale(self.settings.stale_after, now);
                (is_stale, books.is_anything_due(self.settings.drain_limit, now))
            };
            if is_stale && slot.change(|books| books.silence(self.settings.stale_after, now)) {
                effects.push(Effect::Silent(slot.name.clone()));
            }
            if is_due {
                let mut ended = Vec::new();
                effects.extend(self.change_slot(at, |books| {
                    ended = books.expire(self.settings.drain_limit, now);
                }));
                self.drop_index(at, &ended);
            }
        }
        effects
    }

    /// Learns from a request, so that free room is judged by what is really asked for.
    pub fn learn(&self, uid: PodUid, kind: RequestType) {
        let mix = {
            let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
            window.observe(uid, kind).then(|| window.mix())
        };
        if let Some(mix) = mix {
            self.world_mut().replace_mix(mix);
        }
    }

    /// Sets the mix, where it is known beforehand (simulation).
    pub fn set_mix(&self, mix: Mix) {
        self.world_mut().replace_mix(mix);
    }

    // --- commands --------------------------------------------------------------------------------

    /// Reserves room for a pod on a node, with the fit function that answered its question, on the
    /// books of this moment. A repeated call for the same pod and node gives the same placement.
    ///
    /// Its own claim is taken where it still fits the books; else a place beside all claims; else
    /// any place that the books allow.
    ///
    /// # Errors
    /// [`ReserveError`]; the books are as they were.
    pub fn reserve(
        &self,
        pod: &PodRef,
        node: &str,
        question: &Question,
        now: Timestamp,
    ) -> Result<Placement, ReserveError> {
        let at = self.position(node).ok_or(ReserveError::Misfit(Misfit::UnknownNode))?;
        let slot = self.slot(at);
        let world = self.world();
        let ask = question.ask(&world.classes);
        let entry = self.pods.entry(pod.uid.clone());
        if self.ended().contains(&pod.uid) {
            return Err(ReserveError::Ended);
        }
        match entry {
            Entry::Occupied(held) if *held.get() != at => {
                let node = self.slot(*held.get()).name.clone();
                Err(ReserveError::HeldElsewhere { node })
            }
            Entry::Occupied(_) => match slot.read().reservation(&pod.uid) {
                Some(held) if matches!(held.state, ReservationState::Draining { .. }) => {
                    Err(ReserveError::Ended)
                }
                Some(held) => Ok(held.placement.clone()),
                None => Err(ReserveError::Ended), // bound as a pod without a place of ours
            },
            Entry::Vacant(free) => {
                let placement = slot
                    .change(|books| assume(books, pod, &ask, question, &world.compiled, now))
                    .map_err(ReserveError::Misfit)?;
                self.unclaim(&pod.uid);
                free.insert(at);
                Ok(placement)
            }
        }
    }

    /// Notes that the API server has accepted the Binding; the watch will say so too.
    pub fn confirm(&self, uid: &PodUid) {
        if let Some(at) = self.pods.get(uid).map(|at| *at) {
            self.slot(at).change(|books| books.confirm(uid));
        }
    }

    /// Takes back a reservation whose Binding was definitely refused. Confirmed ones stay.
    pub fn forget(&self, uid: &PodUid) -> Vec<Effect> {
        let Entry::Occupied(held) = self.pods.entry(uid.clone()) else { return Vec::new() };
        let mut is_gone = false;
        let effects = self.change_slot(*held.get(), |books| {
            is_gone = is_assumed(books.reservation(uid)) && books.remove(uid);
        });
        if is_gone {
            held.remove();
        }
        effects
    }

    // --- reading ---------------------------------------------------------------------------------

    /// Whether questions can be answered now.
    pub fn readiness(&self, now: Timestamp) -> Readiness {
        if !self.is_listed.load(Ordering::Acquire) {
            return Readiness::NotListed;
        }
        let listed_at = Timestamp::from_millis(self.listed_at.load(Ordering::Acquire));
        if now.since(listed_at) >= self.settings.warm_up {
            return Readiness::Ready;
        }
        let slots = self.slots();
        let waits = |slot: &&Arc<Slot>| {
            let books = slot.read();
            books.state() == NodeState::NeverReported && !books.reservations().is_empty()
        };
        match slots.iter().filter(waits).count() {
            0 => Readiness::Ready,
            nodes => Readiness::AwaitingReports { nodes },
        }
    }

    /// A copy of the books of one node.
    pub fn node(&self, name: &str) -> Option<NodeLedger> {
        self.position(name).map(|at| self.slot(at).read().clone())
    }

    /// Copies of the books of all nodes, by name.
    pub fn nodes(&self) -> Vec<NodeLedger> {
        let mut nodes: Vec<NodeLedger> =
            self.slots().iter().map(|slot| slot.read().clone()).collect();
        nodes.retain(|node| !node.is_forgettable());
        nodes.sort_by(|a, b| a.name().cmp(b.name()));
        nodes
    }

    /// Lets `look` see the books of each node, one after the other, in no particular order, without a
    /// copy. Each node is held meanwhile, so `look` must be short and must not ask the ledger.
    pub fn look_at_each(&self, mut look: impl FnMut(&NodeLedger)) {
        for slot in self.slots().iter() {
            let books = slot.read();
            if !books.is_forgettable() {
                look(&books);
            }
        }
    }

    /// The state of each node, in no particular order.
    pub fn node_states(&self) -> Vec<NodeState> {
        self.slots().iter().map(|slot| slot.read().state()).collect()
    }

    /// When a node's last report was received.
    pub fn last_report(&self, node: &str) -> Option<Timestamp> {
        self.position(node).and_then(|at| self.slot(at).read().last_report())
    }

    /// The reservation of a pod.
    pub fn reservation(&self, uid: &PodUid) -> Option<Reservation> {
        let at = self.pods.get(uid).map(|at| *at)?;
        self.slot(at).read().reservation(uid).cloned()
    }

    /// Pods whose Binding has been undecided for `limit`.
    pub fn overdue(&self, limit: Duration, now: Timestamp) -> Vec<PodRef> {
        self.slots().iter().flat_map(|slot| slot.read().overdue(limit, now)).collect()
    }

    /// How full and how fragmented the cluster is: O(nodes × typical requests × devices).
    pub fn packing(&self) -> Packing {
        self.packed(&self.world().compiled)
    }

    /// The same against a mix from outside, so that two clusters can be compared by one measure.
    pub fn packing_against(&self, mix: &Mix) -> Packing {
        self.packed(&mix.compile(&self.world().classes))
    }

    fn packed(&self, mix: &CompiledMix) -> Packing {
        let slots = self.slots();
        let nodes = slots.iter().map(|slot| Packing::of(&slot.read(), mix));
        nodes.fold(Packing::default(), Packing::and)
    }

    /// The typical requests as they are seen now.
    pub fn mix(&self) -> Mix {
        self.world().mix.clone()
    }

    /// Claims that are held now.
    pub fn claim_count(&self) -> usize {
        self.claims.len()
    }

    /// Checks the derived sums of every node.
    ///
    /// # Errors
    /// One [`AuditError`] per node whose sums differ.
    pub fn audit(&self) -> Result<(), Vec<AuditError>> {
        let faults: Vec<_> =
            self.slots().iter().filter_map(|slot| slot.read().audit().err()).collect();
        if faults.is_empty() { Ok(()) } else { Err(faults) }
    }

    // --- inside ----------------------------------------------------------------------------------

    /// The slots of all nodes known now. Cheap: the list is copied only when a node is added.
    pub(super) fn slots(&self) -> Arc<Vec<Arc<Slot>>> {
        Arc::clone(&self.slots.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn slot(&self, at: usize) -> Arc<Slot> {
        Arc::clone(&self.slots()[at])
    }

    pub(super) fn world(&self) -> RwLockReadGuard<'_, World> {
        self.world.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn world_mut(&self) -> RwLockWriteGuard<'_, World> {
        self.world.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> MutexGuard<'_, Ended> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn position(&self, node: &str) -> Option<usize> {
        self.index.get(node).map(|at| *at)
    }

    /// The position of a node, made where it is new.
    fn slot_of(&self, name: &NodeName) -> usize {
        if let Some(at) = self.position(name.as_str()) {
            return at;
        }
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        *self.index.entry(name.clone()).or_insert_with(|| {
            let mut books = NodeLedger::new(name.clone(), self.settings.unmanaged_tolerance);
            books.lose_node(); // until its Node object is seen: a pod may name a node that is gone
            Arc::make_mut(&mut slots).push(Arc::new(Slot::new(books)));
            slots.len() - 1
        })
    }

    /// Changes a node's books and says whether room appeared by it.
    pub(super) fn change_slot(
        &self,
        at: usize,
        change: impl FnOnce(&mut NodeLedger),
    ) -> Vec<Effect> {
        self.slot(at).change(|books| {
            let before = free_by_device(books);
            change(books);
            let grew = has_grown(&before, &free_by_device(books));
            if grew { vec![Effect::Room(books.name().clone())] } else { Vec::new() }
        })
    }

    /// Ends the claim of a pod. Room appears by it.
    pub(super) fn unclaim(&self, uid: &PodUid) -> Option<Effect> {
        let mut effects = Vec::new();
        self.claims.remove_if(uid, |_, at| {
            effects = self.change_slot(*at, |books| {
                books.unclaim(uid);
            });
            true
        });
        effects.pop()
    }

    /// Runs `body` with the position of the pod's claim, unless the pod is booked or has ended.
    pub(super) fn while_unbooked<T: Default>(
        &self,
        uid: &PodUid,
        body: impl FnOnce(Option<usize>) -> T,
    ) -> T {
        let Entry::Vacant(_held) = self.pods.entry(uid.clone()) else { return T::default() };
        if self.ended().contains(uid) {
            return T::default();
        }
        body(self.claims.get(uid).map(|at| *at))
    }

    /// Forgets where pods are that node `at` no longer holds.
    pub(super) fn drop_index(&self, at: usize, ended: &[PodUid]) {
        let slot = self.slot(at);
        for uid in ended {
            self.pods.remove_if(uid, |_, held| *held == at && !slot.read().holds(uid));
            let is_claimed = || slot.read().claims().contains_key(uid);
            self.claims.remove_if(uid, |_, held| *held == at && !is_claimed());
        }
        self.recycle(at);
    }

    /// Lets a deleted node without tenants keep nothing but its name, for the case that it returns.
    fn recycle(&self, at: usize) {
        let slot = self.slot(at);
        if !slot.read().is_forgettable() {
            return;
        }
        let is_recycled = slot.change(|books| {
            if !books.is_forgettable() {
                return false; // a pod of it was seen, or the node itself
            }
            for device in books.devices() {
                self.owners.remove_if(&device.device().id, |_, owner| *owner == at);
            }
            let tolerance = self.settings.unmanaged_tolerance;
            *books = NodeLedger::new(books.name().clone(), tolerance);
            books.lose_node();
            true
        });
        if is_recycled {
            *slot.session.lock().unwrap_or_else(PoisonError::into_inner) = Session::default();
        }
    }

    fn overbooked(&self, at: usize, placement: Option<&Placement>) -> Vec<Effect> {
        let Some(placement) = placement else { return Vec::new() };
        let slot = self.slot(at);
        let books = slot.read();
        let placed = |id: &DeviceId| placement.devices.iter().any(|device| device.id == *id);
        books
            .devices()
            .iter()
            .filter(|device| device.is_overbooked() && placed(&device.device().id))
            .map(|device| Effect::Overbooked {
                node: books.name().clone(),
                device: device.device().id.clone(),
            })
            .collect()
    }
}

/// Books a place for the pod. Its claim ends only when there is one.
fn assume(
    books: &mut NodeLedger,
    pod: &PodRef,
    ask: &Ask,
    question: &Question,
    mix: &CompiledMix,
    now: Timestamp,
) -> Result<Placement, Misfit> {
    let claim = books.unclaim(&pod.uid);
    let claimed = claim.as_ref().map(|claim| claim.placement.clone());
    let placement = place(books, ask, question, mix, claimed).inspect_err(|_| {
        if let Some(claim) = claim {
            books.claim(pod.uid.clone(), claim);
        }
    })?;
    books.book(Reservation {
        pod: pod.clone(),
        placement: placement.clone(),
        host: ask.host,
        state: ReservationState::Assumed { since: now },
    });
    Ok(placement)
}

/// A place for the pod: its claim, a place beside all claims, or any place the books allow.
fn place(
    books: &NodeLedger,
    ask: &Ask,
    question: &Question,
    mix: &CompiledMix,
    claimed: Option<Placement>,
) -> Result<Placement, Misfit> {
    if let Some(claimed) = claimed.filter(|claimed| plan::still_fits(books, ask, claimed)) {
        return Ok(claimed);
    }
    let beside = plan::evaluate(books, ask, question.strategy, mix, ClaimRule::Respected);
    let found = beside
        .or_else(|_| plan::evaluate(books, ask, question.strategy, mix, ClaimRule::Ignored))?;
    Ok(plan::placement(books, ask, &found))
}

/// The reservation that a written placement stands for. A pod that is draining stays so.
fn confirmed(fact: &PodFact, written: Placement, held: Option<&Reservation>) -> Reservation {
    let state = match held.map(|held| held.state) {
        Some(state @ ReservationState::Draining { .. }) => state,
        _ => ReservationState::Confirmed,
    };
    Reservation { pod: fact.pod.clone(), placement: written, host: fact.host, state }
}

fn is_assumed(held: Option<&Reservation>) -> bool {
    held.is_some_and(|held| matches!(held.state, ReservationState::Assumed { .. }))
}

fn is_confirmed(held: Option<&Reservation>) -> bool {
    held.is_some() && !is_assumed(held)
}

/// Free memory and share of each device that can be placed on, in millionths and MiB.
fn free_by_device(books: &NodeLedger) -> Vec<(DeviceId, u64, u64)> {
    if books.placeable().is_err() {
        return Vec::new();
    }
    let placeable = books.devices().iter().filter(|device| device.is_placeable());
    placeable
        .map(|device| {
            let free = device.free();
            (device.device().id.clone(), free.memory.mib(), free.share.millionths())
        })
        .collect()
}

fn has_grown(before: &[(DeviceId, u64, u64)], after: &[(DeviceId, u64, u64)]) -> bool {
    after.iter().any(|(id, memory, share)| {
        let old = before.iter().find(|(known, ..)| known == id);
        old.is_none_or(|(_, old_memory, old_share)| memory > old_memory || share > old_share)
            && *memory > 0
            && *share > 0
    })
}

/// The pods that ended last, so that a late event cannot book them again.
#[derive(Default)]
struct Ended {
    order: VecDeque<PodUid>,
    uids: BTreeSet<PodUid>,
}

impl Ended {
    fn remember(&mut self, uid: &PodUid) {
        if self.uids.insert(uid.clone()) {
            self.order.push_back(uid.clone());
        }
        if self.order.len() > REMEMBERED_ENDS
            && let Some(oldest) = self.order.pop_front()
        {
            self.uids.remove(&oldest);
        }
    }

    fn contains(&self, uid: &PodUid) -> bool {
        self.uids.contains(uid)
    }
}

#[cfg(test)]
mod tests;
