//! Proposals: running pods that could move so that a waiting one fits, or so that a GPU becomes
//! empty. Nothing is changed here; the simulator makes the moves, operators read them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::ledger::nodes::node_entry::NodeEntry;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::own_room::OwnRoom;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::suggest::displacement::{Clearing, clearings};
use crate::model::device_state::HoldRule;
use crate::model::fit::{CompiledRequest, HostRule};
use crate::model::node_state::NodeState;
use crate::model::policy::Policy;
use crate::model::reservation::{
    BorrowedMemory, Departure, Placement, PodRef, Reservation, ReservationState,
};
use crate::scoring::cost::Cost;
use crate::scoring::plan;
use crate::scoring::plan::CostedPlacement;
use crate::scoring::strategy::Strategy;
use wire::ids::{DeviceId, NodeName, PodUid};
use wire::units::{Share, Timestamp};

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
    /// fewest pods, then the least share moved. The pod has `own` room. `None` if it already fits, or if no
    /// way is found.
    pub fn moves(
        &self,
        query: &PlacementRequest,
        own: &OwnRoom,
        most: usize,
    ) -> Option<Relocation> {
        if self.best(query).is_some() {
            return None;
        }
        let node_table = self.node_table();
        let mut ways: Vec<(Clearing, &NodeName, usize)> = Vec::new();
        {
            let cluster = self.cluster();
            let compiled = query.compile(&cluster.classes);
            if own.nodes().any(|node_state| plan::fits(node_state, &compiled, HoldRule::Respected))
            {
                return None;
            }
            for (at, node_entry) in node_table.iter().enumerate() {
                let found = match own.on(&node_entry.name) {
                    Some(node_state) => ways_on(node_state, &compiled, most),
                    None => ways_on(&node_entry.read(), &compiled, most),
                };
                ways.extend(found.into_iter().map(|way| (way, &node_entry.name, at)));
            }
        }
        ways.sort();
        ways.truncate(TRIES);
        ways.into_iter()
            .find_map(|(way, _, at)| self.relocation((&node_table, own), query, &way.pods, at))
    }

    /// GPUs that at most `most` moves each would empty, without use of another empty one; at most
    /// `count`, those with the least share in use first. No pod is in two of them.
    pub fn emptyings(&self, most: usize, count: usize) -> Vec<Emptying> {
        let node_table = self.node_table();
        let mut targets: Vec<(Share, NodeName, DeviceId, usize, BTreeSet<PodUid>)> = Vec::new();
        for (at, node_entry) in node_table.iter().enumerate() {
            let node_state = node_entry.read();
            for device in node_state.devices().iter().filter(|device| device.is_placeable()) {
                let pods: BTreeSet<PodUid> = device.tenants().keys().cloned().collect();
                if (1..=most).contains(&pods.len()) {
                    let id = device.device().id.clone();
                    targets.push((device.allocated().share, node_entry.name.clone(), id, at, pods));
                }
            }
        }
        targets.sort();
        targets.truncate(TRIES);
        let mut board = Board::new(self, &node_table);
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
        (node_table, own): (&[Arc<NodeEntry>], &OwnRoom),
        query: &PlacementRequest,
        pods: &BTreeSet<PodUid>,
        at: usize,
    ) -> Option<Relocation> {
        let mut board = Board::new(self, node_table);
        if let Some(node_state) = own.on(&node_table[at].name) {
            board.changed.insert(at, node_state.clone());
        }
        let leaving = board.take_out(at, pods)?;
        let placement = board.place_on(at, query)?;
        board.allocate(at, guest(placement.clone(), query));
        let moves = board.rehome(leaving, &query.strategy, |_| true)?;
        Some(Relocation { placement, moves })
    }
}

/// The ways to make room on a node.
fn ways_on(node_state: &NodeState, compiled: &CompiledRequest, most: usize) -> Vec<Clearing> {
    match node_state.placeable_for(compiled) {
        // No pod moves for one that may get no GPU there.
        Ok(()) if !node_state.intake().is_doubtful() => clearings(node_state, compiled, most),
        Ok(()) | Err(_) => Vec::new(),
    }
}

/// The waiting pod with its placement, for the state of a proposal only.
pub(crate) fn guest(placement: Placement, query: &PlacementRequest) -> Reservation {
    Reservation {
        pod: PodRef { uid: PodUid::new("the waiting pod"), name: "the waiting pod".into() },
        placement,
        host: query.host,
        state: ReservationState::Assumed { since: Timestamp::START },
        request: None,
        tenure: None,
        departure: Departure::Stays,
        borrowed: BorrowedMemory::Free,
        is_hung: false,
    }
}

/// The state of the nodes as it would be after some moves.
pub(crate) struct Board<'a> {
    ledger: &'a Ledger,
    node_table: &'a [Arc<NodeEntry>],
    changed: BTreeMap<usize, NodeState>,
}

impl<'a> Board<'a> {
    /// The nodes as they are.
    pub(crate) fn new(ledger: &'a Ledger, node_table: &'a [Arc<NodeEntry>]) -> Self {
        Self { ledger, node_table, changed: BTreeMap::new() }
    }

    pub(crate) fn node_state(&mut self, at: usize) -> &mut NodeState {
        self.changed.entry(at).or_insert_with(|| self.node_table[at].read().clone())
    }

    /// Takes pods out of a node; `None` if one of them may no longer move.
    fn take_out(&mut self, at: usize, pods: &BTreeSet<PodUid>) -> Option<Vec<Reservation>> {
        let node_state = self.node_state(at);
        let mut taken = Vec::new();
        for uid in pods {
            taken.push(node_state.reservation(uid).filter(|held| held.is_movable())?.clone());
            node_state.remove(uid);
        }
        Some(taken)
    }

    pub(crate) fn place_on(&mut self, at: usize, query: &PlacementRequest) -> Option<Placement> {
        let (place, _) = self.evaluate(at, query)?;
        Some(plan::placement(self.node_state(at), &place))
    }

    fn evaluate(&mut self, at: usize, query: &PlacementRequest) -> Option<(CostedPlacement, Cost)> {
        let ledger = self.ledger;
        let node_state = self.node_state(at);
        let cluster = ledger.cluster();
        let compiled = query.compile(&cluster.classes);
        let strategy = &query.strategy;
        let place =
            plan::evaluate(node_state, &compiled, strategy, &cluster.compiled, HoldRule::Respected)
                .ok()?;
        let cost = place.local_cost.cost(&ledger.prices(&cluster.compiled, query));
        Some((place, cost))
    }

    pub(crate) fn allocate(&mut self, at: usize, reservation: Reservation) {
        self.node_state(at).allocate(reservation);
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
            let query = PlacementRequest {
                gpu: held.request.as_deref().cloned(),
                host: held.host,
                host_rule: HostRule::Checked,
                strategy: strategy.clone(),
            };
            let at = self.best(&query, |_| true, &is_welcome)?;
            let to = self.place_on(at, &query)?;
            self.allocate(at, Reservation { placement: to.clone(), ..held.clone() });
            moves.push(Move { pod: held.pod, from: held.placement, to });
        }
        Some(moves)
    }

    /// The best node for a pod, of those where it may go: kept answers for unchanged nodes, fresh ones
    /// for the rest.
    pub(crate) fn best(
        &mut self,
        query: &PlacementRequest,
        may: impl Fn(usize) -> bool,
        is_welcome: impl Fn(Cost) -> bool,
    ) -> Option<usize> {
        let changed: Vec<usize> = self.changed.keys().copied().filter(|at| may(*at)).collect();
        let here = changed.iter().filter_map(|at| Some((self.evaluate(*at, query)?.1, *at)));
        let here: Vec<(Cost, usize)> = here.collect();
        // A node may have come since the board was made.
        let is_changed = |at: usize| self.changed.contains_key(&at);
        let is_named = |at: usize| at < self.node_table.len() && !is_changed(at) && may(at);
        let elsewhere = self.ledger.ranked(query, is_named);
        let all = here.into_iter().chain(elsewhere).filter(|(cost, _)| is_welcome(*cost));
        let name = |at: usize| &self.node_table[at].name;
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
        let mut devices = self.node_state(at).devices().iter();
        let node_state = devices.find(|node_state| node_state.device().id == *device)?;
        if !node_state.tenants().keys().eq(pods) {
            return None; // earlier moves have brought others
        }
        let leaving = self.take_out(at, pods)?;
        let opens_none = |cost| matches!(cost, Cost::BinPack { devices_opened: 0, .. });
        self.rehome(leaving, &Strategy::Policy(Policy::BinPack), opens_none)
    }
}

#[cfg(test)]
mod tests;
