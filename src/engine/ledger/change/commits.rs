//! Commands: reserve room for a pod, confirm it, take it back.

use std::sync::Arc;

use dashmap::Entry;

use crate::ledger::nodes::state::Ledger;
use crate::ledger::nodes::teams::Teams;
use crate::ledger::query::queries::PlacementRequest;
use crate::model::device_state::{DeviceState, HoldRule, Origin};
use crate::model::event::LedgerEvent;
use crate::model::fit::CompiledRequest;
use crate::model::node_state::{InstanceOrders, NodeState};
use crate::model::rejection::Rejection;
use crate::model::reservation::{
    BorrowedMemory, Departure, Guest, MoveHome, Placement, PodRef, Reservation, ReservationState,
};
use crate::scoring::lent_memory::{OrderedLimits, ordered_limits};
use crate::scoring::{guests, plan};
use crate::waste::compiled_mix::CompiledMix;
use wire::device::DeviceKind;
use wire::ids::{DeviceId, NodeName, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::{Demand, MemMib, Share, Timestamp};

/// Why a reservation was not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// It does not fit on the current state.
    #[error("{}", .0.reason())]
    Rejection(Rejection),
    /// The pod already has a reservation on another node.
    #[error("pod is being bound to node `{node}`")]
    HeldElsewhere {
        /// That node.
        node: NodeName,
    },
    /// The pod has ended.
    #[error("pod has ended")]
    Ended,
}

/// What is to be posted for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToPost {
    /// Where it is placed, and runs.
    pub placement: Placement,
    /// The pods that must have left or given back memory before.
    pub waits_for: Vec<PodUid>,
    /// Whether memory is missing that it or others there request, or could be before the limits of those that run
    /// there are lowered.
    pub is_short: bool,
    /// Whether a device of it has been replaced since.
    pub is_gone: bool,
    /// What is still to be made of it.
    pub instance: ToMake,
}

/// Whether the MIG instances of a pod are there that gpupack makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToMake {
    /// They are, or there are none.
    Nothing,
    /// The agent is making one.
    Waits,
    /// The agent could not make one.
    Failed,
}

impl ToMake {
    fn of(node_state: &NodeState, placement: &Placement) -> Self {
        let placed = placement.devices.iter();
        let mut promised = placed.filter(|placed| is_promised(node_state, &placed.id));
        let has_failed = promised.clone().any(|placed| {
            node_state.has_failed(&placed.id) || node_state.held_open_at(&placed.id).is_some()
        });
        match promised.next() {
            None => Self::Nothing,
            Some(_) if has_failed => Self::Failed,
            Some(_) => Self::Waits,
        }
    }
}

/// Whether a device is a MIG instance that is not made yet.
fn is_promised(node_state: &NodeState, id: &DeviceId) -> bool {
    let mut devices = node_state.devices().iter();
    devices.any(|device| device.device().id == *id && device.origin() == Origin::Promised)
}

/// Memory of a device that a pod uses above its request, and others lack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Debt {
    /// The node.
    pub node: NodeName,
    /// The device.
    pub device: DeviceId,
    /// How much.
    pub borrowed: MemMib,
}

impl Ledger {
    /// Reserves room for a pod on a node, with the same fit function as *filter*, on the current
    /// state. A repeated call for the same pod and node gives the same placement.
    ///
    /// Takes the pod's own hold if it still fits; else a placement beside all holds; else any
    /// placement that fits if holds are ignored.
    ///
    /// # Errors
    /// [`ReserveError`]; the state is unchanged.
    pub fn reserve(
        &self,
        pod: &PodRef,
        node: &str,
        query: &PlacementRequest,
        now: Timestamp,
    ) -> Result<Placement, ReserveError> {
        self.reserve_for_bind(pod, node, query, now).map(|(placement, _)| placement)
    }

    /// The same, with the events of what was kept for the pod as the first of its line and is not
    /// taken.
    ///
    /// # Errors
    /// As [`Ledger::reserve`].
    pub fn reserve_for_bind(
        &self,
        pod: &PodRef,
        node: &str,
        query: &PlacementRequest,
        now: Timestamp,
    ) -> Result<(Placement, Vec<LedgerEvent>), ReserveError> {
        let _stays = self.stay();
        let at = self.position(node).ok_or(ReserveError::Rejection(Rejection::UnknownNode))?;
        let node_entry = self.node_entry(at);
        let cluster = self.cluster();
        let compiled = query.compile(&cluster.classes);
        let entry = self.pods.entry(pod.uid.clone());
        if self.ended().contains(&pod.uid) {
            return Err(ReserveError::Ended);
        }
        match entry {
            Entry::Occupied(held) if *held.get() != at => {
                let node = self.node_entry(*held.get()).name.clone();
                Err(ReserveError::HeldElsewhere { node })
            }
            Entry::Occupied(_) => match node_entry.read().reservation(&pod.uid) {
                Some(held) if matches!(held.state, ReservationState::Draining { .. }) => {
                    Err(ReserveError::Ended)
                }
                Some(held) => Ok((held.placement.clone(), Vec::new())),
                None => Err(ReserveError::Ended), // bound as a pod without a placement of gpupack
            },
            Entry::Vacant(free) => {
                let mut stood_here = false;
                let placement = node_entry
                    .change(|node_state| {
                        stood_here = node_state.standing_holds().contains_key(&pod.uid);
                        let mix = &cluster.compiled;
                        let pending = PendingBind { pod, query, compiled: &compiled, mix, now };
                        pending
                            .assume(node_state, &self.teams)
                            .map(|placement| spread(node_state, &pod.uid, placement))
                    })
                    .map_err(ReserveError::Rejection)?;
                let mut events = self.let_go(&pod.uid);
                events.extend(stood_here.then(|| LedgerEvent::Room(node_entry.name.clone())));
                free.insert(at);
                Ok((placement, events))
            }
        }
    }

    /// The guests of a node, or of all nodes, that are to go home and have not left yet.
    pub fn recalled(&self, node: Option<&str>) -> Vec<PodRef> {
        self.departing(node, |departure| {
            matches!(departure, Departure::Recalled | Departure::Settling)
        })
    }

    /// The same, with those whose containers have ended where they were guests.
    pub fn going_home(&self, node: Option<&str>) -> Vec<PodRef> {
        self.departing(node, |departure| match departure {
            Departure::Recalled | Departure::Settling | Departure::Restarted { .. } => true,
            Departure::Stays | Departure::Gone | Departure::Arrives { .. } => false,
        })
    }

    fn departing(&self, node: Option<&str>, is_one: impl Fn(Departure) -> bool) -> Vec<PodRef> {
        self.named_on(node, |node_state, departing| {
            let held = node_state.reservations().values();
            let held = held.filter(|held| is_one(held.departure));
            departing.extend(held.map(|held| held.pod.clone()));
        })
    }

    /// The pods that `look` adds for a node, or for all nodes.
    fn named_on(
        &self,
        node: Option<&str>,
        look: impl Fn(&NodeState, &mut Vec<PodRef>),
    ) -> Vec<PodRef> {
        let mut pods = Vec::new();
        match node {
            None => self.look_at_each(|node_state| look(node_state, &mut pods)),
            Some(node) => {
                if let Some(at) = self.position(node) {
                    self.node_entry(at).look(|_, node_state| look(node_state, &mut pods));
                }
            }
        }
        pods
    }

    /// The pods that are being bound to a device.
    pub fn binding_on(&self, node: &str, device: &DeviceId) -> Vec<PodRef> {
        let Some(at) = self.position(node) else { return Vec::new() };
        self.node_entry(at).look(|_, node_state| {
            let held = node_state.reservations().values().filter(|held| {
                let mut placed = held.placement.devices.iter();
                is_assumed(Some(held)) && placed.any(|placed| placed.id == *device)
            });
            held.map(|held| held.pod.clone()).collect()
        })
    }

    /// The placement to post for a pod that is being bound, and the pods that it waits for. A pod that was
    /// to be a guest is at home, if its room was given to another pod meanwhile.
    pub fn to_post(&self, uid: &PodUid) -> Option<ToPost> {
        let held = self.reservation(uid).filter(|held| is_assumed(Some(held)));
        if held.is_some_and(|held| held.departure == Departure::Recalled) {
            self.change_guest(uid, |node_state| node_state.start_at_home(uid));
        }
        self.reserved(uid)
    }

    /// The same, and changes nothing.
    fn reserved(&self, uid: &PodUid) -> Option<ToPost> {
        let at = self.pods.get(uid).map(|at| *at)?;
        self.node_entry(at).look(|_, node_state| {
            let placement = node_state.reservation(uid)?.placement.clone();
            let runs_on = placement.runs_on();
            let devices = node_state.devices().iter().filter(|device| {
                let id = &device.device().id;
                placement.devices.iter().any(|placed| placed.id == *id) || runs_on.contains(id)
            });
            let guests = devices.flat_map(DeviceState::guests);
            let leaving = guests.filter(|(_, guest)| guest.is_leaving).map(|(uid, _)| uid.clone());
            let here = node_state.devices().iter();
            let here = here.filter(|device| runs_on.contains(&device.device().id));
            let giving_back =
                here.clone().flat_map(|device| guests::in_the_way(node_state, device));
            let is_ignored = mutated(Mutation::LentMemoryIgnored);
            let giving_back = giving_back.filter(|_| !is_ignored);
            let waits_for = leaving.chain(giving_back).collect();
            let is_short = guests::is_short_of_memory(node_state, here.clone()) && !is_ignored;
            let is_short =
                is_short || !here.clone().all(|device| guests::may_start(node_state, device, uid));
            let mut all = placement.devices.iter().map(|placed| &placed.id).chain(&runs_on);
            let is_gone = !all.all(|id| has_device_for_pods(node_state, id));
            let instance = ToMake::of(node_state, &placement);
            Some(ToPost { placement, waits_for, is_short, is_gone, instance })
        })
    }

    /// Whether the devices of a placement that is about to be posted are still the pod's, and there. Changes
    /// nothing: a guest that is called home meanwhile moves after its bind.
    pub fn may_post(&self, uid: &PodUid, placement: &Placement) -> bool {
        self.reserved(uid).is_some_and(|held| {
            let is_same = held.placement.devices == placement.devices;
            is_same && !held.is_gone && held.instance == ToMake::Nothing
        })
    }

    /// What the agent of a node is to do about MIG instances; `None` if it makes none.
    pub fn instance_orders(&self, node: &str) -> Option<InstanceOrders> {
        self.node_entry(self.position(node)?).look(|_, node_state| {
            (!node_state.spots().is_empty()).then(|| node_state.instance_orders())
        })
    }

    /// The limits of memory that the agent of a node is to set; `None` if there are none.
    pub fn limit_orders(&self, node: &str) -> Option<Vec<OrderedLimits>> {
        let node_entry = self.node_entry(self.position(node)?);
        let orders = node_entry.look(|_, node_state| ordered_limits(node_state));
        (!orders.is_empty()).then_some(orders)
    }

    /// The pods on a node, or on all nodes, that are to give back the memory that they use above their
    /// request, and have no move under way.
    pub fn to_give_back(&self, node: Option<&str>) -> Vec<PodRef> {
        self.named_on(node, |node_state, all| {
            let chosen = guests::to_give_back(node_state);
            let held = chosen.iter().filter_map(|uid| node_state.reservation(uid));
            let held = held.filter(|held| !held.is_being_restarted());
            all.extend(held.map(|held| held.pod.clone()));
        })
    }

    /// Notes what becomes of the memory that a pod uses above its request.
    pub fn note_borrowed(&self, uid: &PodUid, borrowed: BorrowedMemory) -> Vec<LedgerEvent> {
        self.change_guest(uid, |node_state| node_state.note_borrowed(uid, borrowed))
    }

    /// Notes that no task takes back the memory of a pod any more.
    pub fn end_giving_back(&self, uid: &PodUid) -> Vec<LedgerEvent> {
        match self.is_held(uid, |held| held.borrowed == BorrowedMemory::GivingBack) {
            true => self.note_borrowed(uid, BorrowedMemory::Free),
            false => Vec::new(),
        }
    }

    /// What a pod uses above its request, while that is missing for others where it runs.
    pub fn owes_memory(&self, uid: &PodUid) -> Option<Debt> {
        let at = self.pods.get(uid).map(|at| *at)?;
        self.node_entry(at).look(|_, node_state| {
            let mut devices = node_state.devices().iter();
            let device =
                devices.find(|device| guests::in_the_way(node_state, device).contains(uid))?;
            let (_, demand) = device.staying().find(|(other, _)| *other == uid)?;
            Some(Debt {
                node: node_state.name().clone(),
                device: device.device().id.clone(),
                borrowed: device.borrowed_memory(uid, demand, node_state.tolerance()),
            })
        })
    }

    /// What a pod with one device may take of it when its container starts next, see [`guests::at_start`].
    pub fn at_start(&self, uid: &PodUid) -> Option<Demand> {
        let at = self.pods.get(uid).map(|at| *at)?;
        self.node_entry(at).look(|_, node_state| guests::at_start(node_state, uid))
    }

    /// Whether a container of a pod can start where the pod runs: no limit of others lets them take what it requests.
    pub fn may_start(&self, uid: &PodUid) -> bool {
        let Some(at) = self.pods.get(uid).map(|at| *at) else { return true };
        self.node_entry(at).look(|_, node_state| {
            let on = node_state.reservation(uid).map(|held| held.placement.runs_on());
            let mut devices = node_state.devices().iter();
            devices.all(|device| {
                let runs_here = on.as_ref().is_some_and(|on| on.contains(&device.device().id));
                !runs_here || guests::may_start(node_state, device, uid)
            })
        })
    }

    /// The same of a guest, at its home. Not while its node does not report.
    pub fn may_go_home(&self, uid: &PodUid) -> bool {
        self.look_at_guest(uid, |node_state| guests::may_go_home(node_state, uid))
    }

    /// When a report listed the processes of a device last.
    pub fn listed(&self, node: &str, device: &DeviceId) -> Option<Timestamp> {
        let at = self.position(node)?;
        self.node_entry(at).look(|_, node_state| {
            let mut devices = node_state.devices().iter();
            devices.find(|known| known.device().id == *device)?.listed()
        })
    }

    /// Whether the memory that a pod uses above its request cannot be taken back, and stays where it is:
    /// that of a guest on its way home goes with it.
    pub fn stays_with_memory(&self, uid: &PodUid) -> bool {
        self.is_held(uid, |held| held.borrowed == BorrowedMemory::Kept && !held.is_going_home())
    }

    /// Whether a pod has a reservation of which this is true.
    fn is_held(&self, uid: &PodUid, is_so: impl Fn(&Reservation) -> bool) -> bool {
        self.look_at_guest(uid, |node_state| node_state.reservation(uid).is_some_and(is_so))
    }

    /// Whether others must give back memory before a guest has what it requests at home.
    pub fn waits_for_memory_at_home(&self, uid: &PodUid) -> bool {
        self.look_at_guest(uid, |node_state| guests::waits_at_home(node_state, uid))
    }

    /// Whether a guest has to go home because of the device on which it is one.
    pub fn is_stranded(&self, uid: &PodUid) -> bool {
        self.look_at_guest(uid, |node_state| guests::is_stranded(node_state, uid))
    }

    /// Whether others use what a guest requests at home, and cannot be made to give it back.
    pub fn lacks_memory_at_home(&self, uid: &PodUid) -> bool {
        self.look_at_guest(uid, |node_state| guests::lacks_memory_at_home(node_state, uid))
    }

    /// Whether a pod moves to another MIG instance, or back from there: it is allocated both.
    pub fn changes_instances(&self, uid: &PodUid) -> bool {
        self.is_held(uid, Reservation::changes_instances)
    }

    /// Whether the MIG instance of a pod is still to be made.
    pub fn is_being_made(&self, uid: &PodUid) -> bool {
        self.look_at_guest(uid, |node_state| {
            let held = node_state.reservation(uid);
            held.is_some_and(|held| ToMake::of(node_state, &held.placement) != ToMake::Nothing)
        })
    }

    /// Lets a recalled guest stay, if its room is free again and no move is written. Whether it stays.
    pub fn let_stay(&self, uid: &PodUid) -> bool {
        if !self.look_at_guest(uid, |node_state| guests::may_stay(node_state, uid)) {
            return false; // no change, so that kept answers stay
        }
        let mut stays = false;
        self.change_guest(uid, |node_state| {
            stays = guests::may_stay(node_state, uid) && node_state.stay(uid);
        });
        stays
    }

    /// Calls a guest home that cannot start where it is one. Not one that is on its way there: its home may be in
    /// use by the container before.
    pub fn call_home(&self, uid: &PodUid) {
        if self.look_at_guest(uid, |node_state| is_guest_that_stays(node_state, uid)) {
            self.change_guest(uid, |node_state| {
                if is_guest_that_stays(node_state, uid) {
                    node_state.recall(std::slice::from_ref(uid));
                }
            });
        }
    }

    /// Notes the move that is written on a guest from now on, or that none is.
    pub fn write_move(&self, uid: &PodUid, leaving: Option<MoveHome>) {
        self.change_guest(uid, |node_state| node_state.write_move(uid, leaving));
    }

    /// Allocates a guest that cannot be moved the room where it runs, beside its home, if no other pod
    /// has that room. Whether that was done.
    pub fn settle_guest(&self, uid: &PodUid) -> bool {
        if !self.look_at_guest(uid, |node_state| guests::may_settle(node_state, uid)) {
            return false;
        }
        let mut is_settling = false;
        self.change_guest(uid, |node_state| {
            if guests::may_settle(node_state, uid) {
                node_state.settle_guest(uid);
                is_settling = true;
            }
        });
        is_settling
    }

    /// Notes that such a pod, whose move home is written, is on its way after all.
    pub fn goes_on(&self, uid: &PodUid) {
        self.change_guest(uid, |node_state| node_state.goes_on(uid));
    }

    /// Whether the last report of a node says what was after this time.
    pub fn is_sampled_after(&self, node: &NodeName, time: Timestamp) -> bool {
        let at = self.position(node.as_str());
        at.is_some_and(|at| self.node_entry(at).read().is_sampled_after(time))
    }

    /// Notes that it is written where such a pod is allocated now, and returns the events of the room
    /// that its home leaves.
    pub fn settled(&self, uid: &PodUid) -> Vec<LedgerEvent> {
        self.change_guest(uid, |node_state| node_state.settled(uid))
    }

    fn look_at_guest(&self, uid: &PodUid, look: impl FnOnce(&NodeState) -> bool) -> bool {
        let Some(at) = self.pods.get(uid).map(|at| *at) else { return false };
        self.node_entry(at).look(|_, node_state| look(node_state))
    }

    pub(crate) fn change_guest(
        &self,
        uid: &PodUid,
        change: impl FnOnce(&mut NodeState),
    ) -> Vec<LedgerEvent> {
        let _stays = self.stay();
        let at = self.pods.get(uid).map(|at| *at);
        at.map(|at| self.change_node(at, change)).unwrap_or_default()
    }

    /// Notes that the API server has accepted the Binding; the watch will say so too.
    pub fn confirm(&self, uid: &PodUid) {
        let _stays = self.stay();
        if let Some(at) = self.pods.get(uid).map(|at| *at) {
            let taken = self.node_entry(at).change(|node_state| {
                let had = running_share(node_state, uid);
                node_state.confirm(uid);
                running_share(node_state, uid).filter(|_| had.is_none())
            });
            if let Some(share) = taken {
                self.turnover.lock().start(share);
            }
        }
    }

    /// Gives a pod with a reservation another placement, before it is written, so that the watch
    /// does not take it for an edit. The caller has checked that it fits.
    pub fn replace_placement(&self, uid: &PodUid, to: Placement) -> Vec<LedgerEvent> {
        let _stays = self.stay();
        let (Entry::Occupied(mut held_at), Some(at)) =
            (self.pods.entry(uid.clone()), self.position(to.node.as_str()))
        else {
            return Vec::new();
        };
        let from = *held_at.get();
        let Some(held) = self.node_entry(from).read().reservation(uid).cloned() else {
            return Vec::new();
        };
        // Reserved on both nodes meanwhile, so that no other pod gets in between.
        let next = Reservation { placement: to, ..held };
        let mut events = self.change_node(at, |node_state| node_state.allocate(next));
        if from != at {
            held_at.insert(at);
            events.extend(self.change_node(from, |node_state| {
                node_state.remove(uid);
            }));
        }
        events
    }

    /// Takes back a reservation whose Binding was definitely refused. Confirmed ones stay.
    pub fn forget(&self, uid: &PodUid) -> Vec<LedgerEvent> {
        let Entry::Occupied(held) = self.pods.entry(uid.clone()) else { return Vec::new() };
        let mut is_gone = false;
        let events = self.change_node(*held.get(), |node_state| {
            let may_go = is_assumed(node_state.reservation(uid));
            is_gone = (may_go || mutated(Mutation::ConfirmedForgotten)) && node_state.remove(uid);
        });
        if is_gone {
            self.teams.forget(uid);
            held.remove();
        }
        events
    }
}

impl Ledger {
    /// The pods that are being bound.
    pub fn assumed(&self) -> Vec<PodRef> {
        let mut assumed = Vec::new();
        self.look_at_each(|node_state| {
            let held = node_state.reservations().values().filter(|held| is_assumed(Some(held)));
            assumed.extend(held.map(|held| held.pod.clone()));
        });
        assumed
    }

    /// The pods that are bound, or being bound.
    pub fn placed(&self) -> Vec<PodUid> {
        let mut placed = Vec::new();
        self.look_at_each(|node_state| {
            let held = node_state.reservations().values().filter(|held| !held.is_draining());
            placed.extend(held.map(|held| held.pod.uid.clone()));
        });
        placed
    }

    /// Whether a pod is on a node, bound or ending.
    pub fn has_pod(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid)
    }

    /// Whether a pod with a reservation is ending, or its devices drain, and it does not hang.
    pub fn is_leaving(&self, uid: &PodUid) -> bool {
        self.reservation(uid).is_some_and(|held| held.is_leaving())
    }

    /// Whether a pod should have ended, and has not.
    pub fn is_hung(&self, uid: &PodUid) -> bool {
        self.reservation(uid).is_some_and(|held| held.is_hung)
    }

    /// The node of a pod that is being bound with exactly this request.
    pub fn assumed_on(&self, uid: &PodUid, query: &PlacementRequest) -> Option<NodeName> {
        let held = self.reservation(uid).filter(|held| is_assumed(Some(held)))?;
        (held.request.as_deref() == query.gpu.as_ref()).then_some(held.placement.node)
    }
}

/// Whether a node has a device that can have tenants.
fn has_device_for_pods(node_state: &NodeState, id: &DeviceId) -> bool {
    let mut devices = node_state.devices().iter().map(DeviceState::device);
    devices.any(|device| device.id == *id && device.kind != DeviceKind::MigParent)
}

/// Whether a bound pod runs as a guest and is not on its way to another device.
fn is_guest_that_stays(node_state: &NodeState, uid: &PodUid) -> bool {
    node_state.reservation(uid).is_some_and(|held| {
        let is_settled = match held.departure {
            Departure::Stays | Departure::Arrives { clean_lists: Some(_) } => true,
            Departure::Arrives { clean_lists: None }
            | Departure::Recalled
            | Departure::Restarted { .. }
            | Departure::Gone
            | Departure::Settling => false,
        };
        is_settled
            && held.state == ReservationState::Confirmed
            && held.guest_on().is_some()
            && !held.changes_instances()
    })
}

/// A pod that is about to be bound to a node.
struct PendingBind<'a> {
    pod: &'a PodRef,
    query: &'a PlacementRequest,
    compiled: &'a CompiledRequest,
    mix: &'a CompiledMix,
    now: Timestamp,
}

impl PendingBind<'_> {
    /// Reserves room for the pod. Its hold ends only if there is a placement.
    fn assume(&self, node_state: &mut NodeState, teams: &Teams) -> Result<Placement, Rejection> {
        let pod = self.pod;
        let hold = node_state.release(&pod.uid);
        let standing = node_state.stand_down(&pod.uid);
        let on_hold = hold.as_ref().map(|hold| &hold.placement);
        let own = standing.as_ref().map(|standing| &standing.placement);
        let placed = self.place(node_state, on_hold, own).and_then(|placement| {
            // The last check: from here on it counts.
            let charge = teams.placed_charge(node_state, &placement, self.query.gpu.as_ref());
            let may_have = teams.admit(&pod.uid, pod.namespace(), charge);
            may_have.then_some(placement).ok_or(Rejection::TeamLimit)
        });
        let placement = placed.inspect_err(|_| {
            if let Some(hold) = hold {
                node_state.hold(pod.uid.clone(), hold);
            }
            if let Some(standing) = standing {
                node_state.stand(pod.uid.clone(), standing);
            }
        })?;
        node_state.allocate(Reservation {
            pod: pod.clone(),
            placement: placement.clone(),
            host: self.compiled.host,
            state: ReservationState::Assumed { since: self.now },
            request: self.compiled.gpu.clone().map(Arc::new),
            tenure: None,
            departure: Departure::Stays,
            borrowed: BorrowedMemory::Free,
            is_hung: false,
        });
        Ok(placement)
    }

    /// A placement for the pod: its hold, one beside all holds, the room that was kept for it, or any one if holds
    /// are ignored.
    fn place(
        &self,
        node_state: &NodeState,
        on_hold: Option<&Placement>,
        own_room: Option<&Placement>,
    ) -> Result<Placement, Rejection> {
        let (compiled, strategy) = (self.compiled, &self.query.strategy);
        if let Some(on_hold) = on_hold
            && (plan::still_fits(node_state, compiled, on_hold) || mutated(Mutation::HoldTrusted))
        {
            return Ok(on_hold.clone());
        }
        let beside = plan::evaluate(node_state, compiled, strategy, self.mix, HoldRule::Respected);
        if beside.is_err()
            && let Some(own_room) = own_room
            && plan::still_fits(node_state, compiled, own_room)
        {
            return Ok(own_room.clone());
        }
        let found = beside.or_else(|_| {
            plan::evaluate(node_state, compiled, strategy, self.mix, HoldRule::Ignored)
        })?;
        Ok(plan::placement(node_state, &found))
    }
}

/// Calls home the guests whose room the pod is allocated now, and lets the pod itself run where it has
/// most room, if it may be called home later.
fn spread(node_state: &mut NodeState, uid: &PodUid, placement: Placement) -> Placement {
    guests::recall_excess(node_state);
    let on = node_state.reservation(uid).and_then(|held| guests::start_place(node_state, held));
    let Some(on) = on else { return placement };
    node_state.lend(uid, on.clone());
    Placement { guest: Some(Guest { on, spot: None, leaving: None }), ..placement }
}

/// Whether a pod is being bound.
pub(crate) fn is_assumed(held: Option<&Reservation>) -> bool {
    held.is_some_and(|held| matches!(held.state, ReservationState::Assumed { .. }))
}

/// What a bound pod has of the GPUs of its node, all together; `None` before that, after its end, and if the
/// node does not have the devices that are written on the pod.
pub(crate) fn running_share(node_state: &NodeState, uid: &PodUid) -> Option<Share> {
    let held = node_state.reservation(uid)?;
    let devices = &held.placement.devices;
    let are_there = devices.iter().all(|placed| node_state.position_of(&placed.id).is_some());
    if held.state != ReservationState::Confirmed || !are_there {
        return None;
    }
    Some(held.placement.share()).filter(|share| *share > Share::ZERO)
}
