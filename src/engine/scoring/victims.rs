//! Which pods a node would have to lose so that a more important one fits there.
//!
//! First the most important of them is made as unimportant as possible, then their number, then what
//! they have in sum, then how long they have run. Of small sets the best is found for certain.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::model::device_state::{HoldRule, KeptFor, StandingHold};
use crate::model::fit::{CompiledRequest, HostRule, fit_host};
use crate::model::node_state::NodeState;
use crate::model::reservation::{Reservation, ReservationState, Tenure};
use crate::scoring::lacking::lacking;
use crate::scoring::plan;
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};
use wire::units::{Demand, HostAmount, Share};

/// Sets of pods that one search tries, on all nodes together, beyond the first one found on each.
pub const MOST_SETS: usize = 20_000;

/// Room that a node would have without some pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomToMake {
    /// How much would be lost: the less the better.
    pub loss: Loss,
    /// The pods to evict, by UID. None if the room will be free anyway.
    pub victims: BTreeSet<PodUid>,
    /// The room.
    pub hold: StandingHold,
}

/// How important a pod is as a victim; the least important go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Importance {
    /// Whether it is within what is guaranteed to its team, if that counts.
    pub is_guaranteed: bool,
    /// Its priority.
    pub priority: i32,
}

/// Says how important a pod is, which has GPUs or not; `None` if it may not be evicted.
pub type Victims<'a> = dyn Fn(&PodUid, Tenure, bool) -> Option<Importance> + 'a;

/// The pods with a lower priority than this.
pub fn less_important(than: i32) -> impl Fn(&PodUid, Tenure, bool) -> Option<Importance> {
    move |_, Tenure { priority, .. }, _| {
        let is_less = priority < than || (priority == than && mutated(Mutation::PreemptsEqual));
        is_less.then_some(Importance { is_guaranteed: true, priority })
    }
}

/// What evictions cost; the first difference decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Loss {
    /// The most important victim.
    pub highest: Option<Importance>,
    /// The number of victims.
    pub count: usize,
    /// What they have of devices, in sum.
    pub share: Share,
    /// When they started, in seconds since 1970 and in sum: the less they have done, the better.
    pub started: Reverse<i64>,
}

/// For whom room is to be made.
pub struct Preemptor<'a> {
    /// Its request.
    pub compiled: &'a CompiledRequest,
    /// How important a pod is; `None` if it is not to be evicted for this one.
    pub victim: &'a Victims<'a>,
    /// Whether pods that are ending, and devices that drain, count as gone. They may take long.
    pub leaving_is_gone: bool,
    /// Sets that may still be tried: see [`MOST_SETS`].
    pub sets: &'a Cell<usize>,
}

/// A pod that may be evicted.
struct Tenant<'a> {
    uid: &'a PodUid,
    tenure: Tenure,
    importance: Importance,
    held: &'a Reservation,
}

impl Tenant<'_> {
    fn share(&self) -> Share {
        let shares = self.held.placement.devices.iter().map(|placed| placed.demand.share);
        Share::from_millionths(shares.map(Share::millionths).sum())
    }
}

/// The pods that `node` would have to lose, beside those that leave anyway: `gone`, pods that are
/// ending, and pods that drain. Holds on `node` count as taken.
///
/// `None` if the request would not fit even without all pods that may be evicted.
pub fn room_to_make(
    node: &NodeState,
    preemptor: &Preemptor<'_>,
    gone: &BTreeSet<PodUid>,
) -> Option<RoomToMake> {
    node.placeable_for(preemptor.compiled).ok()?;
    if node.intake().is_doubtful() {
        return None; // no pod ends for one that may get no GPU there
    }
    let mut left = node.clone();
    let leaves = |(uid, held): &(&PodUid, &Reservation)| {
        (preemptor.leaving_is_gone && held.is_leaving()) || gone.contains(*uid)
    };
    node.reservations().iter().filter(leaves).for_each(|(uid, _)| _ = left.remove(uid));
    gone.iter().for_each(|uid| _ = left.remove(uid));
    let before = left.clone();
    let tenants = before.reservations().iter().filter_map(|pod| may_go(preemptor, pod));
    let mut tenants: Vec<Tenant<'_>> = tenants.collect();
    // The least important first; of equal ones the youngest.
    tenants.sort_by_key(|tenant| {
        (tenant.importance, Reverse(tenant.tenure.started_unix_seconds), tenant.uid)
    });
    let Preemptor { compiled, sets, .. } = preemptor;
    let search = Search { node: &before, compiled, tenants, sets };
    let chosen = search.best()?;
    let victims: BTreeSet<PodUid> =
        chosen.iter().map(|at| search.tenants[*at].uid.clone()).collect();
    victims.iter().for_each(|uid| _ = left.remove(uid));
    let (lacks, hold) = lacking(&left, preemptor.compiled, None)?;
    let hold = StandingHold { kept_for: KeptFor::Preemptor, ..hold };
    (lacks == 0).then(|| RoomToMake { loss: search.loss(&chosen), victims, hold })
}

/// A pod with what it has, if it may be evicted.
fn may_go<'a>(
    preemptor: &Preemptor<'_>,
    (uid, held): (&'a PodUid, &'a Reservation),
) -> Option<Tenant<'a>> {
    let tenure = held.tenure.filter(|_| held.state == ReservationState::Confirmed)?;
    let importance = (preemptor.victim)(uid, tenure, true).filter(|_| !tenure.is_ending)?;
    Some(Tenant { uid, tenure, importance, held })
}

struct Search<'a> {
    node: &'a NodeState,
    compiled: &'a CompiledRequest,
    /// The least important first.
    tenants: Vec<Tenant<'a>>,
    sets: &'a Cell<usize>,
}

impl Search<'_> {
    /// Positions of the best victims, in order.
    fn best(&self) -> Option<Vec<usize>> {
        if self.fits_without(&[]) {
            return Some(Vec::new());
        }
        let few = self.few_priorities()?;
        let mut best = self.give_back((0..few).collect());
        // A smaller set of the same priorities, or one of as many pods that have less.
        let devices = self.devices();
        let makes_instances = self.makes_instances();
        let is_of_use = |at: &usize| {
            let mut placed = self.tenants[*at].held.placement.devices.iter();
            placed.any(|placed| devices.iter().any(|device| device.id == placed.id))
                || makes_instances
                || !self.has_host()
        };
        let useful: Vec<usize> = (0..few).filter(is_of_use).collect();
        for count in 1..=best.len() {
            let mut found: Option<Vec<usize>> = None;
            let mut sets = Sets::new(useful.len(), count);
            while let Some(set) = sets.next() {
                let Some(left) = self.sets.get().checked_sub(1) else {
                    return Some(found.unwrap_or(best));
                };
                self.sets.set(left);
                let set: Vec<usize> = set.iter().map(|at| useful[*at]).collect();
                // Of equal losses the youngest, which are in front.
                let order = |set: &Vec<usize>| (self.loss(set), set.clone());
                let is_better = || order(&set) < order(found.as_ref().unwrap_or(&best));
                if self.may_be_enough(&set, &devices) && is_better() && self.fits_without(&set) {
                    found = Some(set);
                }
            }
            if let Some(found) = found {
                best = found;
                break;
            }
        }
        Some(best)
    }

    /// How many of the tenants have at most the lowest priority without which it fits.
    fn few_priorities(&self) -> Option<usize> {
        let mut ends: Vec<usize> = Vec::new();
        for (at, tenant) in self.tenants.iter().enumerate() {
            let is_last =
                self.tenants.get(at + 1).is_none_or(|next| next.importance != tenant.importance);
            ends.extend(is_last.then_some(at + 1));
        }
        let fits = |end: &usize| self.fits_without(&(0..*end).collect::<Vec<_>>());
        let last = *ends.last()?;
        if !fits(&last) {
            return None;
        }
        // To lose more pods never makes less room.
        let first = ends.partition_point(|end| !fits(end));
        ends.get(first).copied()
    }

    /// Leaves out what need not go: the most important first, and of equal ones the largest.
    fn give_back(&self, mut all: Vec<usize>) -> Vec<usize> {
        let mut order = all.clone();
        order.sort_by_key(|at| {
            let tenant = &self.tenants[*at];
            (Reverse(tenant.importance), tenant.share(), *at)
        });
        for at in order {
            let without: Vec<usize> = all.iter().copied().filter(|other| *other != at).collect();
            if self.fits_without(&without) {
                all = without;
            }
        }
        all
    }

    fn fits_without(&self, gone: &[usize]) -> bool {
        plan::fits_without(self.node, self.compiled, gone.iter().map(|at| self.tenants[*at].uid))
    }

    fn loss(&self, victims: &[usize]) -> Loss {
        let tenants = || victims.iter().map(|at| &self.tenants[*at]);
        let started = tenants().map(|tenant| tenant.tenure.started_unix_seconds);
        Loss {
            highest: tenants().map(|tenant| tenant.importance).max(),
            count: victims.len(),
            share: Share::from_millionths(tenants().map(|it| it.share().millionths()).sum()),
            started: Reverse(started.fold(0, i64::saturating_add)),
        }
    }

    fn has_host(&self) -> bool {
        fit_host(self.compiled, self.node.host_room(HoldRule::Respected)).is_ok()
    }

    /// What is free of each device that could serve the request, and what it would take there.
    fn devices(&self) -> Vec<Open> {
        let devices = self.node.devices().iter().filter(|device| device.is_placeable());
        let open = devices.filter_map(|device| {
            let demand = self.compiled.demand_on(device.class()).ok()?;
            Some(Open { id: device.device().id.clone(), free: device.free(), demand })
        });
        open.collect()
    }

    /// Whether a MIG instance could be made for the request, for which others of other profiles may go.
    fn makes_instances(&self) -> bool {
        self.node.makes_instances_for(self.compiled)
    }

    /// Whether the amounts alone would be enough: quick, and never wrong when it says no.
    fn may_be_enough(&self, set: &[usize], devices: &[Open]) -> bool {
        let tenants = || set.iter().map(|at| self.tenants[*at].held);
        let has_room = |open: &&Open| {
            let placed = tenants().flat_map(|held| &held.placement.devices);
            let left = placed.filter(|placed| placed.id == open.id).map(|placed| placed.demand);
            let free = left.into_iter().try_fold(open.free, Demand::checked_add);
            free.is_none_or(|free| {
                free.memory >= open.demand.memory && free.share >= open.demand.share
            })
        };
        let host = || {
            let mut hosts = tenants().map(|held| held.host);
            let free = self.node.host_room(HoldRule::Respected);
            let free = hosts.try_fold(free, HostAmount::checked_add);
            free.is_none_or(|free| fit_host(self.compiled, free).is_ok())
        };
        let is_checked = self.compiled.host_rule == HostRule::Checked;
        let has_devices = self.makes_instances()
            || devices.iter().filter(has_room).count() >= self.compiled.count();
        has_devices && (!is_checked || host())
    }
}

/// A device that could serve a request.
struct Open {
    id: wire::ids::DeviceId,
    free: Demand,
    demand: Demand,
}

/// All sets of `count` of the first `of` numbers, in order.
struct Sets {
    of: usize,
    next: Option<Vec<usize>>,
}

impl Sets {
    fn new(of: usize, count: usize) -> Self {
        Self { of, next: (count <= of).then(|| (0..count).collect()) }
    }

    fn next(&mut self) -> Option<Vec<usize>> {
        let set = self.next.take()?;
        let mut next = set.clone();
        let count = next.len();
        let may_grow = |at: &usize| next[*at] + 1 + (count - 1 - at) < self.of;
        if let Some(at) = (0..count).rev().find(may_grow) {
            let from = next[at] + 1;
            for (behind, number) in next[at..].iter_mut().zip(from..) {
                *behind = number;
            }
            self.next = Some(next);
        }
        Some(set)
    }
}

#[cfg(test)]
mod tests;
