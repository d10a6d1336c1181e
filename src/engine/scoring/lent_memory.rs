//! Memory that pods use above their request, where their pool lends it.
//!
//! It counts as free. So a pod may be allocated it, and then those who use it give it back: their
//! container is restarted. What each pod that runs on a device requests, or uses if that is more, is at
//! most its memory, at the latest when the next pod starts there.

use std::collections::BTreeMap;

use crate::model::device_state::{BEYOND, DeviceState};
use crate::model::isolation::LimitOrder;
use crate::model::node_state::NodeState;
use crate::model::reservation::BorrowedMemory;
use wire::ids::{DeviceId, PodUid};
use wire::units::{Demand, MemMib};

/// How much of a pod's memory counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedMemory {
    /// It leaves.
    Nothing,
    /// It gives back what it uses above its request.
    Request,
    /// Its request, or what it uses if that is more.
    Use,
}

impl DeviceState {
    /// What a pod uses above its request where it may use more. Up to `tolerance` above it counts as
    /// nothing.
    pub fn borrowed_memory(&self, uid: &PodUid, demand: Demand, tolerance: MemMib) -> MemMib {
        let excess = self.covered(uid).checked_sub(demand.memory).unwrap_or(MemMib::ZERO);
        let may_borrow = self.memory_limits.contains_key(uid);
        if may_borrow && excess > tolerance { excess } else { MemMib::ZERO }
    }

    /// The pods that run here or come home, each with what it requests. Guests on their way home are left
    /// out.
    pub(crate) fn staying(&self) -> impl Iterator<Item = (&PodUid, Demand)> {
        self.running()
            .filter(|(uid, _)| !self.guests.get(*uid).is_some_and(|guest| guest.is_leaving))
    }

    /// The memory that is missing for what all these pods request and one that comes with `more`, because
    /// some of them use more than they request. `part` says how much of each counts.
    ///
    /// Zero in pools that lend no memory.
    pub fn missing_memory(
        &self,
        tolerance: MemMib,
        more: MemMib,
        part: impl Fn(&PodUid) -> CountedMemory,
    ) -> MemMib {
        if !self.rule.borrow.lends_memory() {
            return MemMib::ZERO;
        }
        let taken = self.taken_memory(tolerance, part).checked_add(more).unwrap_or(BEYOND.memory);
        taken.checked_sub(self.device.capacity()).unwrap_or(MemMib::ZERO)
    }

    /// Memory that no pod that runs here requests or uses.
    pub fn unused_memory(&self, tolerance: MemMib) -> MemMib {
        let taken = self.taken_memory(tolerance, |_| CountedMemory::Use);
        self.device.capacity().checked_sub(taken).unwrap_or(MemMib::ZERO)
    }

    /// What these pods take of the memory, and others use of it.
    fn taken_memory(&self, tolerance: MemMib, part: impl Fn(&PodUid) -> CountedMemory) -> MemMib {
        let taken = self.staying().map(|(uid, demand)| match part(uid) {
            CountedMemory::Nothing => Some(MemMib::ZERO),
            CountedMemory::Request => Some(demand.memory),
            CountedMemory::Use => {
                demand.memory.checked_add(self.borrowed_memory(uid, demand, tolerance))
            }
        });
        let mut taken = taken.chain([Some(self.used_by_others())]);
        let taken = taken.try_fold(MemMib::ZERO, |sum, one| sum.checked_add(one?));
        taken.unwrap_or(BEYOND.memory)
    }
}

/// Limits of the driver for the pods of one GPU that may use more than they request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrderedLimits {
    /// The GPU.
    pub gpu: DeviceId,
    /// Number of the order.
    pub number: u64,
    /// The limit of each pod, and whether it keeps what it uses above.
    pub limits: Vec<(PodUid, MemMib, bool)>,
}

/// The limits that the agent of a node is to set.
pub fn ordered_limits(node: &NodeState) -> Vec<OrderedLimits> {
    let orders = node.devices().iter().filter_map(|device| {
        let gpu = device.device().id.clone();
        let order = node.limits().order(&gpu)?;
        order.borrowers().next()?;
        let limits = granted(node, device, order);
        Some(OrderedLimits { gpu, number: order.number, limits })
    });
    orders.collect()
}

/// How much the pods of an order may use: what they request, or use if that is more, and an equal part of what is left
/// then, up to their own limits. All together, with what others request or use, that is no more than there is.
///
/// A pod that is to give back what it uses above its request, or cannot, gets its request: that stops its growth.
fn granted(
    node: &NodeState,
    device: &DeviceState,
    order: &LimitOrder,
) -> Vec<(PodUid, MemMib, bool)> {
    let users: BTreeMap<&PodUid, Demand> = device.users().collect();
    // Of a tenant that is away only what it still uses counts.
    let mut taken = device.users().map(|(uid, demand)| match device.is_away(uid) {
        true => device.covered(uid),
        false => demand.memory.max(device.covered(uid)),
    });
    let taken = taken.try_fold(device.used_by_others(), MemMib::checked_add);
    let room = taken.and_then(|taken| device.device().capacity().checked_sub(taken));
    let mut room = room.unwrap_or(MemMib::ZERO).mib();
    let mut borrowers: Vec<(u64, &PodUid, MemMib)> = Vec::new();
    let mut limits = Vec::new();
    for uid in order.borrowers() {
        let Some(demand) = users.get(uid).copied() else { continue };
        let borrowed = node.reservation(uid).map(|held| held.borrowed);
        let is_free = borrowed == Some(BorrowedMemory::Free) && !device.is_away(uid);
        match device.memory_limit(uid).filter(|_| is_free) {
            Some(limit) => {
                let own = demand.memory.max(device.covered(uid));
                borrowers.push((limit.mib().saturating_sub(own.mib()), uid, own));
            }
            None => {
                // Nothing takes back what it uses above, which is not free.
                let keeps = borrowed != Some(BorrowedMemory::GivingBack);
                limits.push((uid.clone(), demand.memory, keeps));
            }
        }
    }
    borrowers.sort();
    let count = borrowers.len();
    for (at, (wanted, uid, own)) in borrowers.into_iter().enumerate() {
        let share = room / u64::try_from(count - at).unwrap_or(u64::MAX);
        let more = wanted.min(share);
        room -= more;
        // What it uses above its own limit is not free either.
        let keeps = wanted == 0 && own == device.covered(uid);
        limits.push((uid.clone(), MemMib::new(own.mib().saturating_add(more)), keeps));
    }
    limits.sort();
    limits
}
