//! Where room can be made for a pod: the node that loses least by it, and which pods it would lose.

use std::collections::{BTreeMap, BTreeSet};

use crate::hardware::device::{NodeName, PodUid, PoolName};
use crate::hardware::device_class::DeviceClasses;
use crate::hardware::units::{Demand, Share};
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::suggest::requeue::{NamedNodes, is_candidate};
use crate::model::device_state::{DeviceState, StandingHold};
use crate::model::event::LedgerEvent;
use crate::model::fit::{CompiledRequest, HostRule};
use crate::model::node_state::NodeState;
use crate::model::reservation::{PodRef, Reservation, ReservationState, Tenure};
use crate::mutation::{Mutation, mutated};
use crate::scoring::victims::{Loss, Preemptor, RoomToMake, room_to_make};

/// Nodes that are looked at closely, those first that may lose the least important pods.
const MOST_NODES: usize = 200;

/// Pods that would leave a node, beside those that gpupack chooses: by UID.
pub type PlannedVictims = BTreeMap<NodeName, BTreeSet<PodUid>>;

/// Who needs room, and where it may be made.
pub struct RoomRequest<'a> {
    /// The pod.
    pub uid: &'a PodUid,
    /// Its request.
    pub query: &'a PlacementRequest,
    /// Its priority.
    pub priority: i32,
    /// The nodes of its last *filter* call; `None` if there was none. kube-scheduler accepts them as
    /// they are.
    pub named: Option<&'a NamedNodes>,
    /// The nodes that kube-scheduler would accept without some pods, and these pods.
    pub planned: &'a PlannedVictims,
    /// Whether a less important pod may be evicted now.
    pub may_evict: &'a dyn Fn(&PodUid, Tenure) -> bool,
    /// Pods that have been asked to go.
    pub leaving: &'a BTreeSet<PodUid>,
    /// Whether what a standing hold keeps for this pod counts as free.
    pub is_passed: &'a dyn Fn(&PodUid) -> bool,
}

/// Room that can be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundRoom {
    /// The node.
    pub node: NodeName,
    /// Its pool.
    pub pool: PoolName,
    /// The pods to evict, with those that kube-scheduler planned. None if the room will be free
    /// anyway.
    pub victims: Vec<PodRef>,
    /// Other pods whose standing hold on the node ends for it.
    pub passed: Vec<PodUid>,
    pub(crate) at: usize,
    pub(crate) hold: StandingHold,
}

impl Ledger {
    /// The lowest priority of a pod that is placed; `None` if there is no such pod.
    pub fn lowest_priority(&self) -> Option<i32> {
        let mut lowest: Option<i32> = None;
        self.look_at_each(|node_state| {
            let held = node_state.reservations().values().filter_map(|held| held.tenure);
            let here = held.filter(|tenure| !tenure.is_ending).map(|tenure| tenure.priority).min();
            lowest = [lowest, here].into_iter().flatten().min();
        });
        lowest
    }

    /// The node that loses least if it makes room for a pod. Looks at all nodes, and locks one at a
    /// time: not for a thread that answers calls.
    pub fn find_room(&self, request: &RoomRequest<'_>) -> Option<FoundRoom> {
        let _stays = self.stay();
        let (node_table, classes) = (self.node_table(), self.cluster().classes.clone());
        let compiled = with_host(request, &classes);
        let none = BTreeSet::new();
        let mut open: Vec<(Option<i32>, usize, &BTreeSet<PodUid>)> = Vec::new();
        for (at, node_entry) in node_table.iter().enumerate() {
            let planned = request.planned.get(&node_entry.name);
            let is_named = request.named.is_some_and(|it| is_candidate(at, node_entry, Some(it)));
            let is_planned = planned.is_some() && is_candidate(at, node_entry, None);
            if !is_named && !is_planned {
                continue;
            }
            // A node that kube-scheduler accepts as it is loses no more than what gpupack chooses.
            let planned = planned.filter(|_| !is_named).unwrap_or(&none);
            let node_state = node_entry.read();
            let is_known = node_state.is_of_classes(classes.count());
            if is_known && let Some(bound) = lowest_loss(&node_state, &compiled, request, planned) {
                open.push((bound, at, planned));
            }
        }
        open.sort_by_key(|(bound, at, _)| (*bound, node_table.order(*at)));
        let mut best: Option<((Loss, u32), FoundRoom)> = None;
        for (bound, at, planned) in open.into_iter().take(MOST_NODES) {
            if best.as_ref().is_some_and(|((loss, _), _)| bound > loss.priority) {
                break;
            }
            let node_state = node_table[at].read().clone();
            if let Some((loss, found)) = room_on(at, &node_state, &compiled, request, planned) {
                let order = (loss, node_table.order(at));
                if best.as_ref().is_none_or(|(least, _)| order < *least) {
                    best = Some((order, found));
                }
            }
        }
        best.map(|(_, found)| found)
    }

    /// The room that was being made for a pod on a node by an earlier process, if it still can be. Its
    /// victims may be gone, with processes that still run and whose pods this process never saw.
    pub fn find_room_again(&self, node: &NodeName, request: &RoomRequest<'_>) -> Option<FoundRoom> {
        let _stays = self.stay();
        let at = self.position(node.as_str())?;
        let classes: DeviceClasses = self.cluster().classes.clone();
        let compiled = with_host(request, &classes);
        let mut node_state = self.node_entry(at).read().clone();
        if !node_state.is_of_classes(classes.count()) {
            return None;
        }
        let none = BTreeSet::new();
        let found = room_on(at, &node_state, &compiled, request, &none);
        let found = found.or_else(|| {
            node_state.forget_unallocated_use();
            room_on(at, &node_state, &compiled, request, &none)
        });
        found.map(|(_, found)| found)
    }

    /// Keeps the room that was found for the pod, as it becomes free. Its earlier standing hold
    /// ends, and those of less important pods there. Returns whether it is kept now.
    pub fn keep_found(&self, uid: &PodUid, found: &FoundRoom) -> (bool, Vec<LedgerEvent>) {
        let _stays = self.stay();
        if self.position(found.node.as_str()) != Some(found.at) {
            return (false, Vec::new()); // the node is gone
        }
        let mut events = self.stand_down(uid);
        events.extend(found.passed.iter().flat_map(|other| self.stand_down(other)));
        let kept = self.keep_room(uid, found.at, found.hold.clone(), &mut events);
        (kept.is_some(), events)
    }
}

/// The request, with CPU and host memory checked: what kube-scheduler said of a node may be old, and no
/// pod is to go in vain.
fn with_host(request: &RoomRequest<'_>, classes: &DeviceClasses) -> CompiledRequest {
    let query = request.query;
    CompiledRequest::new(query.gpu.clone(), query.host, HostRule::Checked, classes)
}

/// Room on a copy of one node.
fn room_on(
    at: usize,
    node: &NodeState,
    compiled: &CompiledRequest,
    request: &RoomRequest<'_>,
    planned: &BTreeSet<PodUid>,
) -> Option<(Loss, FoundRoom)> {
    let mut node = node.clone();
    node.release(request.uid);
    node.stand_down(request.uid);
    let holders: Vec<PodUid> = node.standing_holds().keys().cloned().collect();
    let passed: Vec<PodUid> =
        holders.into_iter().filter(|other| (request.is_passed)(other)).collect();
    passed.iter().for_each(|other| _ = node.stand_down(other));
    let preemptor =
        Preemptor { compiled, priority: request.priority, may_evict: request.may_evict };
    // A plan is a claim of a caller: it counts only if these pods may be evicted.
    let may_go = |uid: &PodUid| {
        let of_other = || node.others().get(uid).map(|other| other.tenure);
        let tenure = node.reservation(uid).map_or_else(of_other, |held| held.tenure);
        tenure.is_some_and(|it| it.priority < request.priority && (request.may_evict)(uid, it))
    };
    if !planned.iter().all(|uid| !node.has_pod(uid) || may_go(uid)) {
        return None;
    }
    let gone: BTreeSet<PodUid> = planned.union(request.leaving).cloned().collect();
    let RoomToMake { mut loss, victims, hold } = room_to_make(&node, &preemptor, &gone)?;
    let still_runs = |uid: &&PodUid| {
        let is_asked = request.leaving.contains(*uid) || is_leaving(node.reservation(uid));
        node.has_pod(uid) && !is_asked
    };
    let victims: BTreeSet<&PodUid> =
        victims.iter().chain(planned.iter().filter(still_runs)).collect();
    loss.count = victims.len();
    let other = |uid: &PodUid| node.others().get(uid).map(|other| other.tenure);
    let tenures = victims.iter().filter_map(|uid| match node.reservation(uid) {
        Some(held) => held.tenure,
        None => other(uid),
    });
    loss.priority = tenures.map(|tenure| tenure.priority).max().max(loss.priority);
    let victims = victims.into_iter().map(|uid| pod_on(&node, uid)).collect();
    let (pool, name) = (node.pool().clone(), node.name().clone());
    Some((loss, FoundRoom { node: name, pool, victims, passed, at, hold }))
}

fn pod_on(node: &NodeState, uid: &PodUid) -> PodRef {
    let other = || node.others().get(uid).map(|other| other.name.clone()).unwrap_or_default();
    let name = node.reservation(uid).map_or_else(other, |held| held.pod.name.clone());
    PodRef { uid: uid.clone(), name }
}

fn is_leaving(held: Option<&Reservation>) -> bool {
    held.is_some_and(|held| {
        matches!(held.state, ReservationState::Draining { .. })
            || held.tenure.is_some_and(|tenure| tenure.is_ending)
    })
}

/// The lowest priority that some victim must have at least, judged by amounts alone; `Some(None)` if
/// none may be needed. `None` if nothing helps. Takes no copy of the node.
fn lowest_loss(
    node: &NodeState,
    compiled: &CompiledRequest,
    request: &RoomRequest<'_>,
    planned: &BTreeSet<PodUid>,
) -> Option<Option<i32>> {
    node.placeable().ok()?;
    let kept: Vec<&StandingHold> = node
        .standing_holds()
        .iter()
        .filter(|(uid, _)| *uid == request.uid || (request.is_passed)(uid))
        .map(|(_, hold)| hold)
        .collect();
    let on_device = |device: &DeviceState| {
        let demand = compiled.demand_on(device.class()).ok()?;
        if !device.is_placeable() {
            return None;
        }
        let mut left: Vec<(Option<i32>, Demand)> = Vec::new();
        let own = kept.iter().flat_map(|hold| &hold.placement.devices);
        let own = own.filter(|placed| placed.id == device.device().id);
        left.extend(own.map(|placed| (None, placed.demand)));
        for (uid, held) in device.tenants() {
            let reservation = node.reservation(uid);
            let is_asked = planned.contains(uid) || request.leaving.contains(uid);
            if is_asked || is_leaving(reservation) {
                left.push((None, *held));
            } else if let Some(tenure) = reservation.and_then(|it| it.tenure)
                && (tenure.priority < request.priority || mutated(Mutation::PreemptsEqual))
                && (request.may_evict)(uid, tenure)
            {
                left.push((Some(tenure.priority), *held));
            }
        }
        left.sort();
        let mut free = device.free();
        let has = |free: Demand| free.share >= demand.share && free.memory >= demand.memory;
        let mut lowest = has(free).then_some(None);
        for (priority, held) in left {
            if lowest.is_some() {
                break;
            }
            let whole = Demand { share: Share::WHOLE, memory: device.capacity().memory };
            free = free.checked_add(held).unwrap_or(whole);
            lowest = has(free).then_some(priority);
        }
        lowest
    };
    let mut lowest: Vec<Option<i32>> = node.devices().iter().filter_map(on_device).collect();
    lowest.sort();
    lowest.get(compiled.count().checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests;
