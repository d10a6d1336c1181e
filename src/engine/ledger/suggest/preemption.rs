//! Where room can be made for a pod: the node that loses least by it, and which pods it would lose.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::hardware::device_class::DeviceClasses;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::query::team_limit::PodInNamespace;
use crate::ledger::suggest::requeue::{NamedNodes, is_candidate};
use crate::ledger::suggest::waiting::WaitingPod;
use crate::model::device_state::{DeviceState, HoldRule, StandingHold};
use crate::model::event::LedgerEvent;
use crate::model::fit::{CompiledRequest, HostRule, fit_host};
use crate::model::node_state::NodeState;
use crate::model::reservation::{PodRef, Reservation};
use crate::scoring::lacking::lacking;
use crate::scoring::plan;
use crate::scoring::victims::{
    Importance, Loss, MOST_SETS, Preemptor, RoomToMake, Victims, room_to_make,
};
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::{Demand, Share};

/// Nodes that are looked at closely, those first that may lose the least important pods: most of those
/// that could make room, and most in all.
const MOST_NODES: (usize, usize) = (200, 1_000);

/// Pods that would leave a node, beside those that gpupack chooses: by UID.
pub type PlannedVictims = BTreeMap<NodeName, BTreeSet<PodUid>>;

/// Who needs room, and where it may be made.
pub struct RoomRequest<'a> {
    /// The pod.
    pub uid: &'a PodUid,
    /// Its namespace.
    pub namespace: &'a str,
    /// Its request.
    pub query: &'a PlacementRequest,
    /// The nodes of its last *filter* call; `None` if there was none. kube-scheduler accepts them as
    /// they are.
    pub named: Option<&'a NamedNodes>,
    /// The nodes that kube-scheduler would accept without some pods, and these pods.
    pub planned: &'a PlannedVictims,
    /// How important a pod is; `None` if it is not to be evicted for this one.
    pub victim: &'a Victims<'a>,
    /// Pods that have been asked to go.
    pub leaving: &'a BTreeSet<PodUid>,
    /// Whether pods that are ending, and devices that drain, count as gone.
    pub leaving_is_gone: bool,
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
    /// The room that is kept for the pod there.
    pub hold: StandingHold,
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
        let mut open: Vec<(Option<Importance>, usize, &BTreeSet<PodUid>)> = Vec::new();
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
        let sets = Cell::new(MOST_SETS);
        let mut could = 0;
        for (bound, at, planned) in open.into_iter().take(MOST_NODES.1) {
            let is_worse = best.as_ref().is_some_and(|((loss, _), _)| bound > loss.highest);
            if is_worse || could >= MOST_NODES.0 {
                break;
            }
            let node_state = node_table[at].read().clone();
            let on = (at, &node_state, &sets);
            let may_have = |found: &FoundRoom| {
                let pod = PodInNamespace { uid: request.uid, namespace: request.namespace };
                self.may_have_placed(pod, request.query, &node_state, &found.hold.placement)
            };
            if let Some((loss, found)) = room_on(on, &compiled, request, planned)
                && may_have(&found)
            {
                could += 1;
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
        let sets = Cell::new(MOST_SETS);
        let found = room_on((at, &node_state, &sets), &compiled, request, &none);
        let found = found.or_else(|| {
            node_state.forget_unallocated_use();
            room_on((at, &node_state, &sets), &compiled, request, &none)
        });
        found.map(|(_, found)| found)
    }

    /// What a pod would count with this room.
    pub fn room_charge(&self, pod: &WaitingPod, found: &FoundRoom) -> Share {
        let _stays = self.stay();
        let node_entry = self.node_entry(found.at);
        let node_state = node_entry.read();
        self.teams.placed_charge(&node_state, &found.hold.placement, pod.query.gpu.as_ref())
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
    (at, node, sets): (usize, &NodeState, &Cell<usize>),
    compiled: &CompiledRequest,
    request: &RoomRequest<'_>,
    planned: &BTreeSet<PodUid>,
) -> Option<(Loss, FoundRoom)> {
    let mut node = node.clone();
    node.release(request.uid);
    node.stand_down(request.uid);
    let holders = node.standing_holds().iter().filter(|(other, _)| (request.is_passed)(other));
    let passed: Vec<(PodUid, StandingHold)> =
        holders.map(|(other, hold)| (other.clone(), hold.clone())).collect();
    passed.iter().for_each(|(other, _)| _ = node.stand_down(other));
    // A plan is a claim of a caller: it counts only if these pods may be evicted.
    let tenure = |uid: &PodUid| match node.reservation(uid) {
        Some(held) => held.tenure,
        None => node.others().get(uid).map(|other| other.tenure),
    };
    let importance = |uid: &PodUid| {
        let has_gpu = node.reservation(uid).is_some();
        tenure(uid).and_then(|it| (request.victim)(uid, it, has_gpu))
    };
    if !planned.iter().all(|uid| !node.has_pod(uid) || importance(uid).is_some()) {
        return None;
    }
    let preemptor = Preemptor {
        compiled,
        victim: request.victim,
        leaving_is_gone: request.leaving_is_gone,
        sets,
    };
    let none = BTreeSet::new();
    let leaving = if request.leaving_is_gone { request.leaving } else { &none };
    let gone: BTreeSet<PodUid> = planned.union(leaving).cloned().collect();
    let RoomToMake { mut loss, victims, mut hold } = room_to_make(&node, &preemptor, &gone)?;
    let still_runs = |uid: &&PodUid| {
        let is_asked =
            leaving.contains(*uid) || node.reservation(uid).is_some_and(Reservation::is_leaving);
        node.has_pod(uid) && !is_asked
    };
    let mut victims: BTreeSet<PodUid> =
        victims.iter().chain(planned.iter().filter(still_runs)).cloned().collect();
    let mut left = node.clone();
    let leaves = node.reservations().iter().filter(|(_, held)| held.is_leaving());
    let leaves = leaves.map(|(uid, _)| uid).filter(|_| request.leaving_is_gone);
    leaves.chain(leaving).for_each(|uid| _ = left.remove(uid));
    spare(&mut victims, planned, &left, compiled, &importance);
    victims.iter().for_each(|uid| _ = left.remove(uid));
    let passed = without_beside(passed, &mut left, compiled, &mut hold);
    loss.count = victims.len();
    loss.highest = victims.iter().filter_map(importance).max();
    let victims = victims.iter().map(|uid| pod_on(&node, uid)).collect();
    let (pool, name) = (node.pool().clone(), node.name().clone());
    Some((loss, FoundRoom { node: name, pool, victims, passed, at, hold }))
}

/// If CPU or memory explains a plan, those of its pods stay that need not go, the most important first.
fn spare(
    victims: &mut BTreeSet<PodUid>,
    planned: &BTreeSet<PodUid>,
    left: &NodeState,
    compiled: &CompiledRequest,
    importance: &dyn Fn(&PodUid) -> Option<Importance>,
) {
    if fit_host(compiled, left.host_room(HoldRule::Respected)).is_ok() {
        return;
    }
    let mut planned: Vec<PodUid> =
        victims.iter().filter(|uid| planned.contains(*uid)).cloned().collect();
    planned.sort_by_key(|uid| Reverse(importance(uid)));
    for uid in planned {
        let others = victims.iter().filter(|other| **other != uid);
        if plan::fits_without(left, compiled, others) {
            victims.remove(&uid);
        }
    }
}

/// The pods that lose their standing hold on a node that is `left`: not those beside which it fits. Room
/// is found beside these.
fn without_beside(
    mut passed: Vec<(PodUid, StandingHold)>,
    left: &mut NodeState,
    compiled: &CompiledRequest,
    hold: &mut StandingHold,
) -> Vec<PodUid> {
    passed.retain(|(other, kept)| {
        left.stand(other.clone(), kept.clone());
        let has_host = fit_host(compiled, left.host_room(HoldRule::Respected)).is_ok();
        let beside = lacking(left, compiled, None);
        let Some((_, beside)) = beside.filter(|(lacks, _)| *lacks == 0 && has_host) else {
            left.stand_down(other);
            return true;
        };
        *hold = StandingHold { kept_for: hold.kept_for, ..beside };
        false
    });
    passed.into_iter().map(|(other, _)| other).collect()
}

fn pod_on(node: &NodeState, uid: &PodUid) -> PodRef {
    let other = || node.others().get(uid).map(|other| other.name.clone()).unwrap_or_default();
    let name = node.reservation(uid).map_or_else(other, |held| held.pod.name.clone());
    PodRef { uid: uid.clone(), name }
}

/// How important some victim must be at least, judged by amounts alone; `Some(None)` if
/// none may be needed. `None` if nothing helps. Takes no copy of the node.
fn lowest_loss(
    node: &NodeState,
    compiled: &CompiledRequest,
    request: &RoomRequest<'_>,
    planned: &BTreeSet<PodUid>,
) -> Option<Option<Importance>> {
    node.placeable_for(compiled).ok()?;
    if node.intake().is_doubtful() {
        return None; // no pod ends for one that may get no GPU there
    }
    let kept: Vec<&StandingHold> = node
        .standing_holds()
        .iter()
        .filter(|(uid, _)| *uid == request.uid || (request.is_passed)(uid))
        .map(|(_, hold)| hold)
        .collect();
    // What a tenant's end would cost; `None` if it stays.
    let loss_of = |uid: &PodUid| -> Option<Option<Importance>> {
        let reservation = node.reservation(uid);
        let leaves =
            || request.leaving.contains(uid) || reservation.is_some_and(Reservation::is_leaving);
        if planned.contains(uid) || (request.leaving_is_gone && leaves()) {
            return Some(None);
        }
        let tenure = reservation.and_then(|it| it.tenure)?;
        (request.victim)(uid, tenure, true).map(Some)
    };
    let on_device = |device: &DeviceState| {
        let demand = compiled.demand_on(device.class()).ok()?;
        if !device.is_placeable() {
            return None;
        }
        let mut left: Vec<(Option<Importance>, Demand)> = Vec::new();
        let own = kept.iter().flat_map(|hold| &hold.placement.devices);
        let own = own.filter(|placed| placed.id == device.device().id);
        left.extend(own.map(|placed| (None, placed.demand)));
        let tenants = device.tenants().iter();
        left.extend(tenants.filter_map(|(uid, held)| Some((loss_of(uid)?, *held))));
        left.sort();
        let mut free = device.free();
        let has = |free: Demand| free.share >= demand.share && free.memory >= demand.memory;
        let mut lowest = has(free).then_some(None);
        for (importance, held) in left {
            if lowest.is_some() {
                break;
            }
            let whole = Demand { share: Share::WHOLE, memory: device.capacity().memory };
            free = free.checked_add(held).unwrap_or(whole);
            lowest = has(free).then_some(importance);
        }
        lowest
    };
    let mut lowest: Vec<Option<Importance>> = node.devices().iter().filter_map(on_device).collect();
    lowest.sort();
    let of_devices = lowest.get(compiled.count().checked_sub(1)?).copied();
    // Where an instance is to be made, any pod of the node may be in its way.
    let makes = node.makes_instances_for(compiled);
    let tenants = node.devices().iter().filter(|_| makes).flat_map(|it| it.tenants().iter());
    let has_own = makes && (!kept.is_empty() || plan::fits(node, compiled, HoldRule::Respected));
    let of_spots = tenants.filter_map(|(uid, _)| loss_of(uid)).chain(has_own.then_some(None));
    of_devices.into_iter().chain(of_spots).min()
}

#[cfg(test)]
mod tests;
