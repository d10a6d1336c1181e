//! What request would have been enough for pods that were watched long enough, which pods are idle,
//! and how finely each pool could be shared.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::hardware::pool::Borrow;
use crate::ledger::nodes::node_entry::NodeEntry;
use crate::ledger::nodes::state::Ledger;
use crate::model::node_state::NodeState;
use crate::model::request::Movable;
use crate::model::reservation::{PodRef, Reservation};
use crate::usage::history::Usage;
use wire::ids::PoolName;
use wire::units::{MemMib, Share, Timestamp};

/// How long a pod must have been watched before there is advice about it.
pub const WATCHED_FOR: Duration = Duration::from_secs(600);

/// How long the GPUs of a pod must not have been busy for it to be idle.
pub const IDLE_FOR: Duration = Duration::from_secs(600);

/// Largest number of slots that is advised for a pool.
const MOST_SLOTS: u64 = 64;

/// Percent of a pool's tenants that must fit in a slot.
const SERVED_PERCENT: usize = 95;

/// The advice about one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The pod.
    pub pod: PodRef,
    /// Its node.
    pub node: String,
    /// Pool of the node.
    pub pool: PoolName,
    /// What it was seen to use.
    pub usage: Usage,
    /// Its devices, by their positions in the node's state.
    pub positions: Vec<usize>,
    /// Memory allocated to it on all its devices.
    pub allocated: MemMib,
    /// Share allocated to it, likewise.
    pub share: Share,
    /// Memory of its devices.
    pub capacity: MemMib,
    /// How long none of its GPUs has been busy.
    pub idle: Duration,
    /// What its pool lends.
    pub borrow: Borrow,
    /// Memory that it may use, if that is more than is allocated to it, because its pool lends memory.
    pub limit: Option<MemMib>,
    /// Whether it may run elsewhere or use more than it requests: it has a limit and may be restarted.
    pub may_borrow: bool,
}

/// How a pod uses memory that it borrows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bursts {
    /// Above its request, and within its limit.
    WithinLimit,
    /// Up to its limit, or above: it would probably use more.
    AtLimit,
}

impl Advice {
    /// Whether its GPUs have not been busy for long.
    pub fn is_idle(&self) -> bool {
        self.idle >= IDLE_FOR
    }

    /// Whether it has used memory above its request where its pool lends that.
    pub fn bursts(&self) -> Option<Bursts> {
        let limit = self.limit?;
        let almost = MemMib::new(limit.mib() / 20 * 19);
        match self.usage.peak {
            peak if peak >= almost => Some(Bursts::AtLimit),
            peak if peak > self.allocated => Some(Bursts::WithinLimit),
            _ => None,
        }
    }

    /// Memory that it does not need: all of an idle pod's, else what is beyond enough.
    pub fn reclaimable(&self) -> MemMib {
        let enough = if self.is_idle() { MemMib::ZERO } else { self.usage.enough() };
        self.allocated.checked_sub(enough).unwrap_or(MemMib::ZERO)
    }

    /// The same as a share of its devices, at most what it has.
    pub fn reclaimable_share(&self) -> Share {
        let part = Share::ratio(self.reclaimable(), self.allocated).unwrap_or(Share::ZERO);
        let millionths = u128::from(self.share.millionths()) * u128::from(part.millionths());
        let millionths = u64::try_from(millionths / 1_000_000).unwrap_or(u64::MAX);
        Share::from_millionths(millionths.min(self.share.millionths()))
    }
}

/// What the tenants of one pool could share: slots per GPU such that 95 % of them would have had
/// enough in one. 1: none; 64: as many as a GPU can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolAdvice {
    /// Tenants that were watched for long enough.
    pub tenants: usize,
    /// Slots with enough memory, by the highest use of each tenant.
    pub by_memory: u64,
    /// Slots with enough GPU time, by the mean load of each tenant; `None` if no load is known.
    pub by_load: Option<u64>,
    /// What it lends.
    pub borrow: Borrow,
    /// Tenants that may borrow.
    pub borrowers: usize,
}

/// What keeps the tenants of a pool from more slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharingLimit {
    /// Their memory.
    Memory,
    /// Their load.
    Load,
}

impl SharingLimit {
    /// Its name, in answers and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Load => "load",
        }
    }
}

impl PoolAdvice {
    /// Slots that would have had enough of both, as far as load is known.
    pub fn slots(&self) -> u64 {
        self.by_load.map_or(self.by_memory, |by_load| by_load.min(self.by_memory))
    }

    /// What allows no more than that; `None` at the largest number.
    pub fn limit(&self) -> Option<SharingLimit> {
        match self.slots() {
            MOST_SLOTS => None,
            slots if slots < self.by_memory => Some(SharingLimit::Load),
            _ => Some(SharingLimit::Memory),
        }
    }
}

impl Ledger {
    /// The advice about all pods that were watched long enough; the pods with the most unneeded
    /// memory first. O(pods).
    pub fn advice(&self, now: Timestamp) -> Vec<Advice> {
        let mut all = Vec::new();
        for node_entry in self.node_table().iter() {
            advise(node_entry, now, &mut all);
        }
        all.sort_by(|a, b| {
            let most_first = b.reclaimable().cmp(&a.reclaimable());
            most_first.then_with(|| a.pod.name.cmp(&b.pod.name))
        });
        all
    }
}

fn advise(node_entry: &Arc<NodeEntry>, now: Timestamp, all: &mut Vec<Advice>) {
    let node_state = node_entry.read();
    let details = node_entry.details.lock();
    for (uid, held) in node_state.reservations() {
        let Some(usage) = details.usages.of(uid) else { continue };
        if usage.watched_for(now) < WATCHED_FOR {
            continue;
        }
        if let Some(advice) = advice_on(&node_state, held, *usage, now) {
            all.push(advice);
        }
    }
}

/// The advice about a pod; `None` if it has a device that is gone.
fn advice_on(
    node_state: &NodeState,
    held: &Reservation,
    usage: Usage,
    now: Timestamp,
) -> Option<Advice> {
    let (mut allocated, mut share, mut capacity) = (MemMib::ZERO, Share::ZERO, MemMib::ZERO);
    let mut positions = Vec::new();
    for part in &held.placement.devices {
        let position = node_state.devices().iter().position(|on| on.device().id == part.id)?;
        let device = &node_state.devices()[position];
        positions.push(position);
        allocated = allocated.checked_add(part.demand.memory)?;
        share = share.checked_add(part.demand.share)?;
        capacity = capacity.checked_add(device.capacity().memory)?;
    }
    Some(Advice {
        pod: held.pod.clone(),
        node: node_state.name().to_string(),
        pool: node_state.pool().clone(),
        usage,
        positions,
        allocated,
        share,
        capacity,
        idle: usage.idle_for(now),
        borrow: node_state.rule().borrow,
        limit: memory_limit(node_state, held),
        may_borrow: held
            .request
            .as_ref()
            .is_some_and(|request| request.movable == Movable::Restart && request.limit.is_some()),
    })
}

/// Memory that a pod may use where it runs, if that is more than it requests.
fn memory_limit(node_state: &NodeState, held: &Reservation) -> Option<MemMib> {
    let on = held.placement.runs_on();
    let device =
        node_state.devices().iter().find(|device| Some(&device.device().id) == on.first())?;
    device.memory_limit(&held.pod.uid)
}

/// What each pool could have, by the highest use of memory and the mean load of its tenants.
pub fn by_pool(all: &[Advice]) -> BTreeMap<PoolName, PoolAdvice> {
    let mut slots: BTreeMap<PoolName, ([Vec<u64>; 2], Borrow, usize)> = BTreeMap::new();
    for advice in all {
        let entry = slots.entry(advice.pool.clone()).or_default();
        let ([memory, load], borrow, borrowers) = entry;
        *borrow = advice.borrow;
        *borrowers += usize::from(advice.may_borrow);
        memory.push(parts(advice.capacity.mib(), advice.usage.enough().mib()));
        if let Some(mean) = advice.usage.mean_load() {
            load.push(parts(Share::WHOLE.millionths(), mean.millionths()));
        }
    }
    let pools = slots.into_iter().map(|(pool, ([memory, load], borrow, borrowers))| {
        let tenants = memory.len();
        let (by_memory, by_load) = (for_most(memory).unwrap_or(1), for_most(load));
        (pool, PoolAdvice { tenants, by_memory, by_load, borrow, borrowers })
    });
    pools.collect()
}

/// How many parts of this size a whole has, between 1 and 64.
fn parts(whole: u64, part: u64) -> u64 {
    (whole / part.max(1)).clamp(1, MOST_SLOTS)
}

/// The number of slots that is fine enough for 95 % of the tenants.
fn for_most(mut slots: Vec<u64>) -> Option<u64> {
    slots.sort_unstable();
    let spared = slots.len() * (100 - SERVED_PERCENT) / 100;
    slots.get(spared).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scarcer_of_memory_and_load_limits_a_pool() {
        for (by_memory, by_load, slots, limit) in [
            (4, None, 4, Some("memory")),
            (4, Some(4), 4, Some("memory")),
            (4, Some(2), 2, Some("load")),
            (4, Some(64), 4, Some("memory")),
            (64, Some(1), 1, Some("load")),
            (64, Some(64), 64, None),
            (64, None, 64, None),
        ] {
            let (borrow, borrowers) = (Borrow::None, 0);
            let advice = PoolAdvice { tenants: 1, by_memory, by_load, borrow, borrowers };
            assert_eq!(advice.slots(), slots, "{advice:?}");
            assert_eq!(advice.limit().map(SharingLimit::name), limit, "{advice:?}");
        }
    }

    #[test]
    fn one_tenant_in_twenty_may_exceed_the_estimate() {
        let slots = |many: usize| std::iter::repeat_n(8, many).chain([1]).collect();
        assert_eq!(for_most(slots(19)), Some(8));
        assert_eq!(for_most(slots(18)), Some(1));
        assert_eq!((for_most(Vec::new()), parts(10, 0), parts(10, 11)), (None, 10, 1));
    }
}
