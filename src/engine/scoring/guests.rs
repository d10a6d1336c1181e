//! Where a pod starts that may run on another GPU than its home, and which guests go home.
//!
//! Guests have only room that is free: on each device, what is allocated, what is used beyond that, and
//! what guests request that stay is at most its capacity when another pod is allocated room, in both
//! dimensions. So any guest can go home, in any order, and no other pod has to move for that.
//!
//! Where a pool lends memory, pods may use more than they request. That counts as free, and is taken back
//! when what others request of the device is missing otherwise.

use std::cmp::Reverse;

use crate::hardware::pool::{Borrow, Enforcement};
use crate::model::device_state::DeviceState;
use crate::model::node_state::{NodeReporting, NodeState};
use crate::model::reservation::{BorrowedMemory, Departure, Reservation};
use crate::scoring::lent_memory::CountedMemory;
use wire::ids::{DeviceId, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::{Demand, MemMib, Share};

/// The device other than its home on which a pod has most room to use more than it requests, if it
/// may run there and has strictly more there than at home. It is allocated already and runs nowhere.
///
/// Complexity: linear in the devices of the node.
pub fn start_place(node: &NodeState, held: &Reservation) -> Option<DeviceId> {
    let mut best = (None, left(home_of(node, held)?).share);
    for (device, room) in places(node, held) {
        if room.share > best.1 {
            best = (Some(device.device().id.clone()), room.share);
        }
    }
    best.0
}

/// The device that a pod with one device is allocated.
fn home_of<'a>(node: &'a NodeState, held: &Reservation) -> Option<&'a DeviceState> {
    let [placed] = &held.placement.devices[..] else { return None };
    node.devices().iter().find(|device| device.device().id == placed.id)
}

/// The devices other than its home on which a pod could start, each with the room that it would leave there.
fn places<'a>(
    node: &'a NodeState,
    held: &Reservation,
) -> impl Iterator<Item = (&'a DeviceState, Demand)> {
    let home = home_of(node, held).zip(held.placement.devices.first());
    let home =
        home.filter(|(home, placed)| is_borrower(held, placed.demand, home) && takes_guests(home));
    let tolerance = node.tolerance();
    home.into_iter().flat_map(move |(home, placed)| {
        let (demand, class, id) = (placed.demand, home.class(), &home.device().id);
        node.devices().iter().filter_map(move |device| {
            let room = left(device).checked_sub(demand)?;
            let is_open = device.class() == class
                && takes_guests(device)
                && device.unused_memory(tolerance) >= demand.memory
                && device.device().id != *id
                && device.is_placeable()
                && !device.is_unread()
                && !device.is_being_left();
            is_open.then_some((device, room))
        })
    })
}

/// What a pod with one device may take of the device on which its container starts next, where limits are set
/// at the start and stay as they are: compute up to its limit where the pool lends it, and memory up to its
/// limit where the pool lends that and no other pod runs there, else what it requests.
pub fn at_start(node: &NodeState, uid: &PodUid) -> Option<Demand> {
    let held = node.reservation(uid)?;
    let [placed] = &held.placement.devices[..] else { return None };
    let on = held.guest_on().filter(|_| !held.is_going_home()).unwrap_or(&placed.id);
    let device = node.devices().iter().find(|device| device.device().id == *on)?;
    let share = held.compute_limit(device.rule(), placed.demand);
    let is_alone = device.running().all(|(other, _)| other == uid);
    let limit = held.memory_limit(device.rule(), placed.demand, device.capacity().memory);
    let memory = limit.filter(|_| is_alone).unwrap_or(placed.demand.memory);
    Some(Demand { memory, share })
}

/// Calls home the guests whose room others are allocated now. Returns them.
pub fn recall_excess(node: &mut NodeState) -> Vec<PodUid> {
    let has_none = node.devices().iter().all(|device| device.guests().is_empty());
    if has_none || mutated(Mutation::GuestsStay) {
        return Vec::new();
    }
    let devices = node.devices().iter();
    let leaving: Vec<PodUid> =
        devices.flat_map(|device| must_leave(node, device, Demand::ZERO)).collect();
    node.recall(&leaving);
    leaving
}

/// Calls home the guests of a node whose device there is gone, or has been ill for a minute, if their own one is
/// sound. What they run there is lost or will be. Returns them: none while the node does not report.
///
/// Complexity: linear in the pods of the node.
pub fn recall_stranded(node: &mut NodeState) -> Vec<PodUid> {
    if node.state() != NodeReporting::Reporting {
        return Vec::new();
    }
    let guests = node.reservations().iter().filter(|(_, held)| held.guest_on().is_some());
    let staying = guests
        .filter(|(_, held)| held.departure == Departure::Stays || held.is_arriving())
        .map(|(uid, _)| uid);
    let stranded: Vec<PodUid> = staying.filter(|uid| is_stranded(node, uid)).cloned().collect();
    node.recall(&stranded);
    stranded
}

/// Whether a guest has to go home because of the device on which it is one.
pub fn is_stranded(node: &NodeState, uid: &PodUid) -> bool {
    let held = node.reservation(uid).filter(|held| !held.changes_instances());
    let Some((held, on)) = held.and_then(|held| Some((held, held.guest_on()?))) else {
        return false;
    };
    let there = node.devices().iter().find(|device| device.device().id == *on);
    let is_lost = there.is_none_or(|device| device.is_lost);
    is_lost && home_of(node, held).is_some_and(DeviceState::is_placeable)
}

/// Containers that would be restarted if a pod were allocated `demand` of a device.
pub(crate) fn restarts_for(node: &NodeState, device: &DeviceState, demand: Demand) -> usize {
    let leaving = must_leave(node, device, demand);
    let gives_back = to_give_back_on(node, device, demand.memory, &leaving);
    leaving.len() + gives_back.iter().filter(|uid| !leaving.contains(uid)).count()
}

/// The guests of a device that must leave it if `more` of it is allocated: the fewest of those that matter
/// least.
///
/// Order: priority, no memory in use there, less of it, a smaller request, the UID.
fn must_leave(node: &NodeState, device: &DeviceState, more: Demand) -> Vec<PodUid> {
    let staying = device.guests().iter().filter(|(_, guest)| !guest.is_leaving);
    let mut guests: Vec<(&PodUid, Demand)> =
        staying.map(|(uid, guest)| (uid, guest.demand)).collect();
    guests.sort_by_key(|(uid, demand)| {
        (importance(node, uid), device.covered(uid), *demand, (*uid).clone())
    });
    if !takes_guests(device) {
        return guests.into_iter().map(|(uid, _)| uid.clone()).collect();
    }
    let leave = fewest(&guests, |leave| {
        let mut stay = guests.iter().filter(|guest| !leave.contains(guest));
        let all = taken(device)
            .and_then(|all| all.checked_add(more))
            .and_then(|all| stay.try_fold(all, |sum, (_, demand)| sum.checked_add(*demand)));
        all.is_some_and(|all| device.capacity().checked_sub(all).is_some())
    });
    leave.into_iter().map(|(uid, _)| uid.clone()).collect()
}

/// The first of `all`, until they are enough, without those that are not needed then; all of them if even
/// they are not enough.
fn fewest<T: Copy>(all: &[T], is_enough: impl Fn(&[T]) -> bool) -> Vec<T> {
    let mut chosen = Vec::new();
    for one in all {
        if is_enough(&chosen) {
            break;
        }
        chosen.push(*one);
    }
    // The last ones may have been enough.
    for at in (0..chosen.len()).rev() {
        let one = chosen.remove(at);
        if !is_enough(&chosen) {
            chosen.insert(at, one);
        }
    }
    chosen
}

/// The pods that are to give back the memory that they use above their request, beside those that are
/// doing so: on each device as few as needed of those that matter least, so that no memory is missing
/// for what others request. None if that would not be enough, or if the node does not report.
///
/// Order: priority, most above its request, the UID.
pub fn to_give_back(node: &NodeState) -> Vec<PodUid> {
    if node.state() != NodeReporting::Reporting {
        return Vec::new(); // no list would show that it is back
    }
    let devices = node.devices().iter();
    devices.flat_map(|device| to_give_back_on(node, device, MemMib::ZERO, &[])).collect()
}

/// The same of one device, if a pod came that requests `more` memory, and those that are `leaving` left.
fn to_give_back_on(
    node: &NodeState,
    device: &DeviceState,
    more: MemMib,
    leaving: &[PodUid],
) -> Vec<PodUid> {
    let is_enough = |chosen: &[&PodUid]| {
        let missing = device.missing_memory(node.tolerance(), more, |uid| match () {
            () if leaving.contains(uid) => CountedMemory::Nothing,
            () if gives_back(node, uid) || chosen.contains(&uid) => CountedMemory::Request,
            () => CountedMemory::Use,
        });
        missing == MemMib::ZERO
    };
    if is_enough(&[]) && !mutated(Mutation::TakesBackUnneeded) || mutated(Mutation::LentMemoryStays)
    {
        return Vec::new();
    }
    let mut borrowers: Vec<(i32, Reverse<MemMib>, &PodUid)> = borrowers(node, device)
        .filter(|(uid, _)| !gives_back(node, uid))
        .map(|(uid, borrowed)| (importance(node, uid), Reverse(borrowed), uid))
        .collect();
    borrowers.sort();
    let borrowers: Vec<&PodUid> = borrowers.into_iter().map(|(_, _, uid)| uid).collect();
    if !is_enough(&borrowers) {
        return Vec::new(); // others use it: restarts would help no pod
    }
    if mutated(Mutation::TakesBackUnneeded) {
        return borrowers.into_iter().cloned().collect();
    }
    fewest(&borrowers, is_enough).into_iter().cloned().collect()
}

/// The pods that must give back memory before all who run on a device have what they request.
pub fn in_the_way(node: &NodeState, device: &DeviceState) -> Vec<PodUid> {
    let is_short = is_short_of_memory(node, [device].into_iter());
    if !is_short && !mutated(Mutation::TakesBackUnneeded) {
        return Vec::new();
    }
    borrowers(node, device).map(|(uid, _)| uid.clone()).collect()
}

/// Whether a guest that is to go home has to wait, because what it requests there is in use: by pods that use
/// more than they request, or by guests that leave themselves. Of the latter one does not wait for those that
/// may wait for it: their move is not written yet, and their UID is larger.
pub fn waits_at_home(node: &NodeState, uid: &PodUid) -> bool {
    let held = node.reservation(uid);
    let Some(home) = held.and_then(|held| home_of(node, held)) else { return false };
    if !home.rule().borrow.lends_memory() {
        return false;
    }
    let leaving = home.guests().iter().filter(|(_, guest)| guest.is_leaving).map(|(uid, _)| uid);
    let before = leaving.filter(|other| {
        let guest = node.reservation(other).and_then(|held| held.placement.guest.as_ref());
        *other < uid || guest.is_some_and(|guest| guest.leaving.is_some())
    });
    let used = before.map(|other| home.covered(other));
    let used = used.fold(MemMib::ZERO, |sum, one| sum.checked_add(one).unwrap_or(sum));
    let is_used = !may_start(node, home, uid)
        || used > home.unused_memory(node.tolerance()) && !mutated(Mutation::LeavingUseIgnored);
    is_used || !in_the_way(node, home).is_empty()
}

/// Whether a recalled guest would lack at home what it requests, and no pod can be made to give that back: a
/// process without an allocation uses it, or a pod from which it cannot be taken.
pub fn lacks_memory_at_home(node: &NodeState, uid: &PodUid) -> bool {
    let held = node.reservation(uid);
    let Some(home) = held.and_then(|held| home_of(node, held)) else { return false };
    is_short_of_memory(node, [home].into_iter())
        && in_the_way(node, home).is_empty()
        && !mutated(Mutation::HomeMemoryIgnored)
}

/// Whether a pod may start on a device: where the driver limits what others may borrow there, these limits leave what
/// it requests.
pub fn may_start(node: &NodeState, device: &DeviceState, uid: &PodUid) -> bool {
    node.limits().leave_room(&device.device().id, uid) || mutated(Mutation::LimitsUnconfirmed)
}

/// The same of a guest, at its home. Not while the node does not report: no list would show that it has left.
pub fn may_go_home(node: &NodeState, uid: &PodUid) -> bool {
    if node.state() != NodeReporting::Reporting {
        return false;
    }
    let home = node.reservation(uid).and_then(|held| home_of(node, held));
    home.is_none_or(|home| may_start(node, home, uid))
}

/// Whether memory is missing on a device for all who run there.
pub fn is_short_of_memory<'a>(
    node: &NodeState,
    mut devices: impl Iterator<Item = &'a DeviceState>,
) -> bool {
    devices.any(|device| {
        let missing = device.missing_memory(node.tolerance(), MemMib::ZERO, |uid| {
            match mutated(Mutation::TakeBackBelieved) && gives_back(node, uid) {
                true => CountedMemory::Request,
                false => CountedMemory::Use,
            }
        });
        missing > MemMib::ZERO
    })
}

/// The pods that run on a device and use more of its memory than they request, with how much more.
pub fn borrowers<'a>(
    node: &'a NodeState,
    device: &'a DeviceState,
) -> impl Iterator<Item = (&'a PodUid, MemMib)> {
    let borrowed = device
        .staying()
        .map(|(uid, demand)| (uid, device.borrowed_memory(uid, demand, node.tolerance())));
    borrowed.filter(|(_, borrowed)| *borrowed > MemMib::ZERO)
}

/// Memory of a device that pods use above their requests, which counts as free.
pub fn memory_lent(node: &NodeState, device: &DeviceState) -> MemMib {
    let all = borrowers(node, device).map(|(_, borrowed)| borrowed);
    all.fold(MemMib::ZERO, |sum, one| sum.checked_add(one).unwrap_or(sum))
}

/// How much of what a pod may use above its request is free where it runs. From the best to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BurstRoom {
    /// All of it.
    All,
    /// A part.
    Part,
    /// Nothing.
    None,
}

impl BurstRoom {
    /// All of them, from the best to the worst.
    pub const ALL: [Self; 3] = [Self::All, Self::Part, Self::None];

    fn of<T: Ord + Default>(wanted: T, free: T) -> Option<Self> {
        match () {
            () if wanted == T::default() => None,
            () if free >= wanted => Some(Self::All),
            () if free > T::default() => Some(Self::Part),
            () => Some(Self::None),
        }
    }
}

/// The pods that run on a device and may use more than they request, each with how much of that is free there: of
/// compute and of memory, `None` where it may not use more. What other pods that run there request is not free, nor
/// is memory that they use. Each is counted as if no other one used more from now on.
///
/// Complexity: linear in the pods of the device.
pub fn burst_rooms<'a>(
    node: &'a NodeState,
    device: &'a DeviceState,
) -> impl Iterator<Item = (&'a PodUid, [Option<BurstRoom>; 2])> {
    let requested: u64 = device.staying().map(|(_, demand)| demand.share.millionths()).sum();
    let free_share = Share::WHOLE.millionths().saturating_sub(requested);
    let free_memory = device.unused_memory(node.tolerance()).mib();
    let lends = device.rule().borrow != Borrow::None;
    device.staying().filter(move |_| lends).filter_map(move |(uid, demand)| {
        let share = node.reservation(uid)?.compute_limit(device.rule(), demand);
        let share = share.millionths().saturating_sub(demand.share.millionths());
        let memory = device.memory_limit(uid).unwrap_or(demand.memory).mib();
        let memory = memory.saturating_sub(demand.memory.mib());
        let own = device.borrowed_memory(uid, demand, node.tolerance()).mib();
        let free_memory = free_memory.saturating_add(own);
        Some((uid, [BurstRoom::of(share, free_share), BurstRoom::of(memory, free_memory)]))
    })
}

/// Whether a pod is being made to give back what it uses above its request.
fn gives_back(node: &NodeState, uid: &PodUid) -> bool {
    node.reservation(uid).is_some_and(|held| held.borrowed == BorrowedMemory::GivingBack)
}

fn importance(node: &NodeState, uid: &PodUid) -> i32 {
    let tenure = node.reservation(uid).and_then(|held| held.tenure);
    tenure.map_or(0, |tenure| tenure.priority)
}

/// Whether a recalled guest may stay after all: its room is free again, and its pool still lends.
pub fn may_stay(node: &NodeState, uid: &PodUid) -> bool {
    !changes_instances(node, uid)
        && !is_stranded(node, uid)
        && has_room(node, uid, |device| taken(device).filter(|_| takes_guests(device)))
}

/// Whether a recalled guest could be allocated the room where it is: no other pod has it.
pub fn may_settle(node: &NodeState, uid: &PodUid) -> bool {
    !changes_instances(node, uid) && has_room(node, uid, |device| Some(device.allocated()))
}

/// Whether a recalled guest is allocated both places already, two MIG instances, and keeps them until it is home.
fn changes_instances(node: &NodeState, uid: &PodUid) -> bool {
    node.reservation(uid)
        .is_some_and(|held| held.departure == Departure::Recalled && held.changes_instances())
}

/// Whether a recalled guest has room beside what is taken of its device; `None`: no guest may stay there.
fn has_room(node: &NodeState, uid: &PodUid, taken: fn(&DeviceState) -> Option<Demand>) -> bool {
    let held = node.reservation(uid).filter(|held| held.departure == Departure::Recalled);
    let Some(held) = held else { return false };
    let (Some(on), [placed]) = (held.guest_on(), &held.placement.devices[..]) else { return false };
    let device = node.devices().iter().find(|device| device.device().id == *on);
    device.is_some_and(|device| {
        let taken = taken(device).and_then(|taken| taken.checked_add(device.lent()));
        let taken = taken.and_then(|taken| taken.checked_add(placed.demand));
        taken.is_some_and(|taken| device.capacity().checked_sub(taken).is_some())
    })
}

/// Whether a pod may be a guest: its container can be restarted elsewhere, and it may use more than
/// it requests.
fn is_borrower(held: &Reservation, demand: Demand, home: &DeviceState) -> bool {
    let (replicas, capacity) = (home.rule().replicas, home.capacity().memory);
    let is_above = match held.request.as_ref().and_then(|request| request.limit) {
        None => false,
        Some(limit) => match limit.share_of(replicas) {
            Some(limit) => limit > demand.share,
            None => limit.memory_of(replicas, capacity) > demand.memory,
        },
    };
    held.may_borrow() && is_above && demand != home.capacity()
}

/// Whether a device may have guests: a GPU, or a MIG instance that pods share, of a pool that lends, without
/// limits of its tenants.
fn takes_guests(device: &DeviceState) -> bool {
    let rule = device.rule();
    rule.borrow != Borrow::None
        && rule.enforcement == Enforcement::None
        && device.is_shared()
        && !device.requires_isolation
}

/// What is taken of a device beside guests: reservations, and use beyond them, such as that of processes
/// that outlive their pod. Guests do not share their room with either.
fn taken(device: &DeviceState) -> Option<Demand> {
    let beyond = Demand { memory: device.unallocated_use(), share: Share::ZERO };
    device.allocated().checked_add(beyond)
}

/// What is left of a device beside reservations, holds, use beyond them, and guests.
fn left(device: &DeviceState) -> Demand {
    let guests = device
        .guests()
        .values()
        .try_fold(device.free(), |left, guest| left.checked_sub(guest.demand));
    guests.unwrap_or(Demand { memory: MemMib::ZERO, share: Share::ZERO })
}

#[cfg(test)]
mod tests;
