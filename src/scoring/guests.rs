//! Where a pod starts that may run on another GPU than its home, and which guests go home.
//!
//! Guests have only room that is free: on each device, what is allocated, what is used beyond that, and
//! what guests request that stay is at most its capacity when another pod is allocated room, in both
//! dimensions. So any guest can go home, in any order, and no other pod has to move for that.
//!
//! Where a pool lends memory, pods may use more than they request. That counts as free, and is taken back
//! when what others request of the device is missing otherwise.

use std::cmp::Reverse;

use crate::hardware::device::{DeviceId, DeviceKind, PodUid};
use crate::hardware::pool::{Borrow, Enforcement};
use crate::hardware::units::{Demand, MemMib, Share};
use crate::model::device_state::DeviceState;
use crate::model::node_state::{NodeReporting, NodeState};
use crate::model::request::Limit;
use crate::model::reservation::{BorrowedMemory, Departure, Reservation};
use crate::mutation::{Mutation, mutated};
use crate::scoring::lent_memory::Taken;

/// The device other than its home on which a pod has most room to use more than it requests, if it
/// may run there and has strictly more there than at home. It is allocated already and runs nowhere.
///
/// Complexity: linear in the devices of the node.
pub fn start_place(node: &NodeState, held: &Reservation) -> Option<DeviceId> {
    let [placed] = &held.placement.devices[..] else { return None };
    let home = node.devices().iter().find(|it| it.device().id == placed.id)?;
    if !is_borrower(held, placed.demand, home) || !takes_guests(home) {
        return None;
    }
    let mut best = (None, left(home).share);
    for device in node.devices() {
        let is_open = device.class() == home.class() && takes_guests(device);
        let room = left(device).checked_sub(placed.demand);
        let is_unused = device.unused_memory(node.tolerance()) >= placed.demand.memory;
        if let Some(room) = room
            && is_open
            && is_unused
            && device.device().id != placed.id
            && device.is_placeable()
            && !device.is_unread()
            && !device.is_being_left()
            && room.share > best.1
        {
            best = (Some(device.device().id.clone()), room.share);
        }
    }
    best.0
}

/// What a pod with one device may take of the device on which its container starts next, where limits are set
/// at the start and stay as they are: compute up to its limit where the pool lends it, and memory up to its
/// limit where the pool lends that and no other pod runs there, else what it requests.
pub fn at_start(node: &NodeState, uid: &PodUid) -> Option<Demand> {
    let held = node.reservation(uid)?;
    let [placed] = &held.placement.devices[..] else { return None };
    let on = held.guest_on().filter(|_| !held.is_going_home()).unwrap_or(&placed.id);
    let device = node.devices().iter().find(|it| it.device().id == *on)?;
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
    let leaving: Vec<PodUid> =
        node.devices().iter().flat_map(|it| must_leave(node, it, Demand::ZERO)).collect();
    node.recall(&leaving);
    leaving
}

/// Containers that would be restarted if a pod were allocated `demand` of a device.
pub(crate) fn restarts_for(node: &NodeState, device: &DeviceState, demand: Demand) -> usize {
    let leaving = must_leave(node, device, demand);
    let gives_back = to_give_back_on(node, device, (demand.memory, &leaving));
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
    let key = |uid: &PodUid| (importance(node, uid), device.covered(uid));
    guests.sort_by_key(|(uid, demand)| (key(uid), *demand, (*uid).clone()));
    if !takes_guests(device) {
        return guests.into_iter().map(|(uid, _)| uid.clone()).collect();
    }
    let has_room_without = |leave: &[(&PodUid, Demand)]| {
        let mut stay = guests.iter().filter(|guest| !leave.contains(guest));
        let all = taken(device)
            .and_then(|all| all.checked_add(more))
            .and_then(|all| stay.try_fold(all, |sum, (_, it)| sum.checked_add(*it)));
        all.is_some_and(|all| device.capacity().checked_sub(all).is_some())
    };
    let leave = fewest(&guests, has_room_without);
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
    let none = (MemMib::ZERO, &[][..]);
    node.devices().iter().flat_map(|device| to_give_back_on(node, device, none)).collect()
}

/// The same of one device, if a pod came that requests so much memory, and these pods left.
fn to_give_back_on(
    node: &NodeState,
    device: &DeviceState,
    (more, leaving): (MemMib, &[PodUid]),
) -> Vec<PodUid> {
    let gives_back = |uid: &PodUid| gives_back(node, uid);
    let is_enough = |chosen: &[&PodUid]| {
        let part = |uid: &PodUid| match () {
            () if leaving.contains(uid) => Taken::Nothing,
            () if gives_back(uid) || chosen.contains(&uid) => Taken::Request,
            () => Taken::Use,
        };
        device.missing_memory(node.tolerance(), more, part) == MemMib::ZERO
    };
    if is_enough(&[]) && !mutated(Mutation::TakesBackUnneeded) || mutated(Mutation::LentMemoryStays)
    {
        return Vec::new();
    }
    let mut borrowers: Vec<(i32, Reverse<MemMib>, &PodUid)> = borrowers(node, device)
        .filter(|(uid, _)| !gives_back(uid))
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

/// Whether memory is missing on a device for all who run there.
pub fn is_short_of_memory<'a>(
    node: &NodeState,
    mut devices: impl Iterator<Item = &'a DeviceState>,
) -> bool {
    devices.any(|device| {
        let part = |uid: &PodUid| match mutated(Mutation::TakeBackBelieved) && gives_back(node, uid)
        {
            true => Taken::Request,
            false => Taken::Use,
        };
        device.missing_memory(node.tolerance(), MemMib::ZERO, part) > MemMib::ZERO
    })
}

/// The pods that run on a device and use more of its memory than they request, with how much more.
pub fn borrowers<'a>(
    node: &'a NodeState,
    device: &'a DeviceState,
) -> impl Iterator<Item = (&'a PodUid, MemMib)> {
    let borrowed = |(uid, demand)| (uid, device.borrowed_memory(uid, demand, node.tolerance()));
    device.staying().map(borrowed).filter(|(_, borrowed)| *borrowed > MemMib::ZERO)
}

/// Memory of a device that pods use above their requests, which counts as free.
pub fn memory_lent(node: &NodeState, device: &DeviceState) -> MemMib {
    let all = borrowers(node, device).map(|(_, borrowed)| borrowed);
    all.fold(MemMib::ZERO, |sum, one| sum.checked_add(one).unwrap_or(sum))
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
    has_room(node, uid, |device| taken(device).filter(|_| takes_guests(device)))
}

/// Whether a recalled guest could be allocated the room where it is: no other pod has it.
pub fn may_settle(node: &NodeState, uid: &PodUid) -> bool {
    has_room(node, uid, |device| Some(device.allocated()))
}

/// Whether a recalled guest has room beside what is taken of its device; `None`: no guest may stay there.
fn has_room(node: &NodeState, uid: &PodUid, taken: fn(&DeviceState) -> Option<Demand>) -> bool {
    let Some(held) = node.reservation(uid).filter(|it| it.departure == Departure::Recalled) else {
        return false;
    };
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
    let is_above = match held.request.as_ref().and_then(|request| request.limit) {
        None => false,
        Some(Limit::Fraction(limit)) => limit > demand.share,
        Some(Limit::Memory(limit)) => limit > demand.memory,
    };
    held.may_borrow() && is_above && demand != home.capacity()
}

/// Whether a device may have guests: a whole GPU of a pool that lends, without limits of its tenants.
fn takes_guests(device: &DeviceState) -> bool {
    let rule = device.rule();
    rule.borrow != Borrow::None
        && rule.enforcement == Enforcement::None
        && device.device().kind == DeviceKind::Gpu
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
