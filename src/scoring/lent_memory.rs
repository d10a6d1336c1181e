//! Memory that pods use above their request, where their pool lends it.
//!
//! It counts as free. So a pod may be allocated it, and then those who use it give it back: their
//! container is restarted. What each pod that runs on a device requests, or uses if that is more, is at
//! most its memory, at the latest when the next pod starts there.

use crate::hardware::device::PodUid;
use crate::hardware::units::{Demand, MemMib};
use crate::model::device_state::{BEYOND, DeviceState};

/// How much of a pod's memory counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
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
        let leaves = |uid: &PodUid| self.guests.get(uid).is_some_and(|guest| guest.is_leaving);
        self.running().filter(move |(uid, _)| !leaves(uid))
    }

    /// The memory that is missing for what all these pods request and one that comes with `more`, because
    /// some of them use more than they request. `part` says how much of each counts.
    ///
    /// Zero in pools that lend no memory.
    pub fn missing_memory(
        &self,
        tolerance: MemMib,
        more: MemMib,
        part: impl Fn(&PodUid) -> Taken,
    ) -> MemMib {
        if !self.rule.borrow.lends_memory() {
            return MemMib::ZERO;
        }
        let taken = self.taken_memory(tolerance, part).checked_add(more).unwrap_or(BEYOND.memory);
        taken.checked_sub(self.device.capacity()).unwrap_or(MemMib::ZERO)
    }

    /// Memory that no pod that runs here requests or uses.
    pub fn unused_memory(&self, tolerance: MemMib) -> MemMib {
        let taken = self.taken_memory(tolerance, |_| Taken::Use);
        self.device.capacity().checked_sub(taken).unwrap_or(MemMib::ZERO)
    }

    /// What these pods take of the memory, and others use of it.
    fn taken_memory(&self, tolerance: MemMib, part: impl Fn(&PodUid) -> Taken) -> MemMib {
        let taken = self.staying().map(|(uid, demand)| match part(uid) {
            Taken::Nothing => Some(MemMib::ZERO),
            Taken::Request => Some(demand.memory),
            Taken::Use => demand.memory.checked_add(self.borrowed_memory(uid, demand, tolerance)),
        });
        let mut taken = taken.chain([Some(self.used_by_others())]);
        let taken = taken.try_fold(MemMib::ZERO, |sum, one| sum.checked_add(one?));
        taken.unwrap_or(BEYOND.memory)
    }
}
