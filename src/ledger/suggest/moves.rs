//! Proposals: running pods that could move so that a waiting one fits, or so that a GPU becomes
//! empty. Nothing is changed here; the simulator makes the moves, operators read them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::hardware::device::{DeviceId, NodeName, PodUid};
use crate::hardware::units::{Share, Timestamp};
use crate::ledger::nodes::node_entry::Slot;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::questions::PlacementRequest;
use crate::ledger::suggest::displacement::{Clearing, clearings};
use crate::model::device_state::HoldRule;
use crate::model::fit::HostRule;
use crate::model::node_state::NodeState;
use crate::model::policy::Policy;
use crate::model::reservation::{Placement, PodRef, Reservation, ReservationState};
use crate::scoring::cost::Cost;
use crate::scoring::plan;
use crate::scoring::plan::Place;
use crate::scoring::strategy::Strategy;

/// Ways to clear a node that are tried for one pod: the cheapest ones.
const TRIES: usize = 200;

/// A running pod, and where else it could run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The pod.
    pub pod: PodRef,
    /// Where it runs.
    pub from: Placement,
    /// Where it would go.
    pub to: Placement,
}

/// Moves that make room for a waiting pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relocation {
    /// Where the waiting pod would go.
    pub placement: Placement,
    /// The moves, in an order that is possible once the pods have stopped.
    pub moves: Vec<Move>,
}

/// Moves that leave a GPU without tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Emptying {
    /// The node.
    pub node: NodeName,
    /// The GPU.
    pub device: DeviceId,
    /// The moves.
    pub moves: Vec<Move>,
}

impl Ledger {
    /// The cheapest way to make room for a pod that fits on no node, with at most `most` moves:
    /// fewest pods, then the least share moved. `None` if it already fits, or if no way is found.
    pub fn moves(&self, question: &PlacementRequest, most: usize) -> Option<Relocation> {
        if self.best(question).is_some() {
            return None;
        }
        let slots = self.slots();
        let mut ways: Vec<(Clearing, &NodeName, usize)> = Vec::new();
        {
            let world = self.world();
            let ask = question.ask(&world.classes);
            for (at, slot) in slots.iter().enumerate() {
                let books = slot.read();
                if books.placeable().is_ok() {
                    let found = clearings(&books, &ask, most);
                    ways.extend(found.into_iter().map(|way| (way, &slot.name, at)));
                }
            }
        }
        ways.sort();
        ways.truncate(TRIES);
        ways.into_iter().find_map(|(way, _, at)| self.relocation(&slots, question, &way.pods, at))
    }

    /// GPUs that at most `most` moves each would empty, without use of another empty one; at most
    /// `count`, those with the least share in use first. No pod is in two of them.
    pub fn emptyings(&self, most: usize, count: usize) -> Vec<Emptying> {
        let slots = self.slots();
        let mut targets: Vec<(Share, NodeName, DeviceId, usize, BTreeSet<PodUid>)> = Vec::new();
        for (at, slot) in slots.iter().enumerate() {
            let books = slot.read();
            for device in books.devices().iter().filter(|device| device.is_placeable()) {
                let pods: BTreeSet<PodUid> = device.tenants().keys().cloned().collect();
                if (1..=most).contains(&pods.len()) {
                    let id = device.device().id.clone();
                    targets.push((device.booked().share, slot.name.clone(), id, at, pods));
                }
            }
        }
        targets.sort();
        targets.truncate(TRIES);
        let mut board = Board { ledger: self, slots: &slots, changed: BTreeMap::new() };
        let mut found = Vec::new();
        for (_, node, device, at, pods) in targets {
            if found.len() == count {
                break;
            }
            let before = board.changed.clone();
            match board.empty(at, &device, &pods) {
                Some(moves) => found.push(Emptying { node, device, moves }),
                None => board.changed = before,
            }
        }
        found
    }

    fn relocation(
        &self,
        slots: &[Arc<Slot>],
        question: &PlacementRequest,
        pods: &BTreeSet<PodUid>,
        at: usize,
    ) -> Option<Relocation> {
        let mut board = Board { ledger: self, slots, changed: BTreeMap::new() };
        let leaving = board.take_out(at, pods)?;
        let placement = board.place_on(at, question)?;
        board.book(at, guest(placement.clone(), question));
        let moves = board.rehome(leaving, &question.strategy, |_| true)?;
        Some(Relocation { placement, moves })
    }
}

/// The waiting pod with its placement, for the state of a proposal only.
fn guest(placement: Placement, question: &PlacementRequest) -> Reservation {
    Reservation {
        pod: PodRef { uid: PodUid::new("the waiting pod"), name: "the waiting pod".into() },
        placement,
        host: question.host,
        state: ReservationState::Assumed { since: Timestamp::START },
        request: None,
    }
}

/// The state of the nodes as it would be after some moves.
struct Board<'a> {
    ledger: &'a Ledger,
    slots: &'a [Arc<Slot>],
    changed: BTreeMap<usize, NodeState>,
}

impl Board<'_> {
    fn books(&mut self, at: usize) -> &mut NodeState {
        self.changed.entry(at).or_insert_with(|| self.slots[at].read().clone())
    }

    /// Takes pods out of a node; `None` if one of them may no longer move.
    fn take_out(&mut self, at: usize, pods: &BTreeSet<PodUid>) -> Option<Vec<Reservation>> {
        let books = self.books(at);
        let mut taken = Vec::new();
        for uid in pods {
            taken.push(books.reservation(uid).filter(|held| held.is_movable())?.clone());
            books.remove(uid);
        }
        Some(taken)
    }

    fn place_on(&mut self, at: usize, question: &PlacementRequest) -> Option<Placement> {
        let (place, _) = self.evaluate(at, question)?;
        Some(plan::placement(self.books(at), &place))
    }

    fn evaluate(&mut self, at: usize, question: &PlacementRequest) -> Option<(Place, Cost)> {
        let ledger = self.ledger;
        let books = self.books(at);
        let world = ledger.world();
        let ask = question.ask(&world.classes);
        let strategy = &question.strategy;
        let place =
            plan::evaluate(books, &ask, strategy, &world.compiled, HoldRule::Respected).ok()?;
        let rank = place.local_cost.rank(&ledger.prices(&world.compiled, question));
        Some((place, rank))
    }

    fn book(&mut self, at: usize, reservation: Reservation) {
        self.books(at).book(reservation);
    }

    /// Finds a placement for each of the pods, the largest first.
    fn rehome(
        &mut self,
        mut leaving: Vec<Reservation>,
        strategy: &Strategy,
        is_welcome: impl Fn(Cost) -> bool,
    ) -> Option<Vec<Move>> {
        let share = |held: &Reservation| {
            let shares = held.placement.devices.iter().map(|placed| placed.demand.share);
            shares.map(Share::millionths).sum::<u64>()
        };
        leaving.sort_by(|a, b| (Reverse(share(a)), &a.pod).cmp(&(Reverse(share(b)), &b.pod)));
        let mut moves = Vec::new();
        for held in leaving {
            let question = PlacementRequest {
                gpu: held.request.as_deref().cloned(),
                host: held.host,
                host_rule: HostRule::Checked,
                strategy: strategy.clone(),
            };
            let at = self.best(&question, &is_welcome)?;
            let to = self.place_on(at, &question)?;
            self.book(at, Reservation { placement: to.clone(), ..held.clone() });
            moves.push(Move { pod: held.pod, from: held.placement, to });
        }
        Some(moves)
    }

    /// The best node for a pod: kept answers for unchanged nodes, fresh ones for the rest.
    fn best(
        &mut self,
        question: &PlacementRequest,
        is_welcome: impl Fn(Cost) -> bool,
    ) -> Option<usize> {
        let changed: Vec<usize> = self.changed.keys().copied().collect();
        let here = changed.iter().filter_map(|at| Some((self.evaluate(*at, question)?.1, *at)));
        let here: Vec<(Cost, usize)> = here.collect();
        // A node may have come since the board was made.
        let is_asked = |at: usize| at < self.slots.len() && !changed.contains(&at);
        let elsewhere = self.ledger.ranked(question, is_asked);
        let all = here.into_iter().chain(elsewhere).filter(|(rank, _)| is_welcome(*rank));
        let name = |at: usize| &self.slots[at].name;
        let best = all.min_by(|a, b| (a.0, name(a.1)).cmp(&(b.0, name(b.1))));
        best.map(|(_, at)| at)
    }

    /// Moves a GPU's tenants to GPUs that are in use.
    fn empty(
        &mut self,
        at: usize,
        device: &DeviceId,
        pods: &BTreeSet<PodUid>,
    ) -> Option<Vec<Move>> {
        let mut devices = self.books(at).devices().iter();
        let books = devices.find(|books| books.device().id == *device)?;
        if !books.tenants().keys().eq(pods) {
            return None; // earlier moves have brought others
        }
        let leaving = self.take_out(at, pods)?;
        let opens_none = |rank| matches!(rank, Cost::BinPack { devices_opened: 0, .. });
        self.rehome(leaving, &Strategy::Policy(Policy::BinPack), opens_none)
    }
}

#[cfg(test)]
mod tests;
