//! Which pods would have to leave a node so that another one fits there.
//!
//! Only the smallest sets count: none has a pod that could stay. `moves` decides where the pods go,
//! because it knows all nodes.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use crate::hardware::spots::{Makeable, Spot};
use crate::model::device_state::{DeviceState, HoldRule, Origin};
use crate::model::fit::{CompiledRequest, fit_host};
use crate::model::node_state::{NodeState, SpotDevice};
use crate::model::reservation::{PlacedDevice, Reservation};
use crate::scoring::plan;
use wire::device::{DeviceKind, Slot};
use wire::ids::PodUid;
use wire::units::{HostAmount, Share};

/// Most moves that are proposed for one waiting pod or one GPU: with each the number of sets grows.
pub const MOST_MOVES: usize = 3;

/// Pods that are tried: the smallest of a device; of a node those with the most CPU. More than
/// share a GPU in practice.
const MOST_TENANTS: usize = 12;

/// Pods that would have to leave a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clearing {
    /// What they have, all together.
    pub moved: Share,
    /// The pods.
    pub pods: BTreeSet<PodUid>,
}

impl Ord for Clearing {
    /// The cheaper first: fewer pods, then less moved.
    fn cmp(&self, other: &Self) -> Ordering {
        let cost = |one: &Self| (one.pods.len(), one.moved);
        cost(self).cmp(&cost(other)).then_with(|| self.pods.cmp(&other.pods))
    }
}

impl PartialOrd for Clearing {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The sets of at most `most` pods without which `compiled` fits on `node`: fewest pods first, then the
/// least share moved. Empty if it already fits, or if nothing helps.
pub fn clearings(node: &NodeState, compiled: &CompiledRequest, most: usize) -> Vec<Clearing> {
    let held = node.reservations().iter();
    let movable: Vec<_> = held.filter(|(_, held)| held.is_movable()).collect();
    let finder = Finder { node, compiled, most, movable };
    if finder.movable.is_empty() || plan::fits(node, compiled, HoldRule::Respected) {
        return Vec::new();
    }
    let candidates = finder.candidates().into_iter().flat_map(|pods| finder.with_host(pods));
    let candidates: BTreeSet<BTreeSet<PodUid>> = candidates.collect();
    let mut found: Vec<Clearing> = candidates
        .into_iter()
        .filter(|pods| plan::fits_without(node, compiled, pods))
        .map(|pods| Clearing { moved: finder.share_of(&pods), pods })
        .collect();
    found.sort();
    let whole = found.clone();
    found.retain(|one| {
        !whole
            .iter()
            .any(|other| other.pods.len() < one.pods.len() && other.pods.is_subset(&one.pods))
    });
    found
}

struct Finder<'a> {
    node: &'a NodeState,
    compiled: &'a CompiledRequest,
    most: usize,
    movable: Vec<(&'a PodUid, &'a Reservation)>,
}

impl Finder<'_> {
    fn share_of(&self, pods: &BTreeSet<PodUid>) -> Share {
        let held = self.movable.iter().filter(|(uid, _)| pods.contains(*uid));
        let parts = held.flat_map(|(_, held)| held.placement.parts());
        let millionths = parts.map(|(placed, spot)| match spot {
            Some(spot) => self.part_of_gpu(placed, spot),
            None => placed.demand.share.millionths(),
        });
        Share::from_millionths(millionths.sum())
    }

    /// How much of its GPU's memory an instance has, in millionths.
    fn part_of_gpu(&self, placed: &PlacedDevice, spot: &Spot) -> u64 {
        let gpu = self.node.devices().iter().find(|it| it.device().id == spot.gpu);
        let whole = gpu.map_or(0, |gpu| gpu.device().total.mib()).max(1);
        (placed.demand.memory.mib().saturating_mul(1_000_000) / whole).min(1_000_000)
    }

    /// Sets of pods whose end leaves enough room on the devices; ignores the host.
    fn candidates(&self) -> Vec<BTreeSet<PodUid>> {
        let mut by_device: Vec<Vec<BTreeSet<PodUid>>> = self
            .node
            .devices()
            .iter()
            .filter_map(|device_state| self.clear_device(device_state))
            .collect();
        let spots = self.node.spots().iter().filter_map(|spot| self.clear_spot(spot));
        by_device.extend(spots.map(|pods| vec![pods]));
        match self.compiled.count() {
            0 => vec![BTreeSet::new()],
            1 => by_device.into_iter().flatten().collect(),
            count => {
                // The cheapest sets of each device, combined from the cheapest devices.
                for sets in &mut by_device {
                    sets.sort_by_key(|pods| (pods.len(), self.share_of(pods)));
                }
                let mut cheapest: Vec<BTreeSet<PodUid>> =
                    by_device.into_iter().filter_map(|sets| sets.into_iter().next()).collect();
                cheapest.sort_by_key(|pods| (pods.len(), self.share_of(pods)));
                let all: BTreeSet<PodUid> = cheapest.into_iter().take(count).flatten().collect();
                if all.len() <= self.most { vec![all] } else { Vec::new() }
            }
        }
    }

    /// The pods whose MIG instances are in the way of one that could be made there. `None` if it does not
    /// serve the request, or others have an instance there.
    fn clear_spot(&self, spot: &SpotDevice) -> Option<BTreeSet<PodUid>> {
        self.compiled.demand_on(spot.class).ok()?;
        let Makeable { spot: Spot { gpu, profile, .. }, slot, .. } = &spot.makeable;
        let is_in_the_way = |it: &&DeviceState| match &it.device().kind {
            DeviceKind::MigInstance { parent, profile: other } if parent == gpu => {
                let units = it.slot().map_or(u32::MAX, Slot::units);
                units & slot.units() != 0 || (profile.has_media() && other.has_media())
            }
            _ => false,
        };
        let mut pods = BTreeSet::new();
        for device_state in self.node.devices().iter().filter(is_in_the_way) {
            if device_state.spot().as_ref() == Some(&spot.makeable.spot)
                && !device_state.is_leaving()
            {
                return None; // it is looked at as a device
            }
            if device_state.tenants().is_empty() && device_state.origin() == Origin::Found {
                return None;
            }
            pods.extend(device_state.tenants().keys().cloned());
        }
        let is_movable = |uid: &PodUid| self.movable.iter().any(|(known, _)| *known == uid);
        (pods.len() <= self.most && pods.iter().all(is_movable)).then_some(pods)
    }

    /// The sets of tenants of one device without which one part of the request fits there; the
    /// empty set if it already fits. `None` if the device can never take it.
    fn clear_device(&self, device_state: &DeviceState) -> Option<Vec<BTreeSet<PodUid>>> {
        let demand = self.compiled.demand_on(device_state.class()).ok()?;
        if !device_state.is_placeable() {
            return None;
        }
        let free = device_state.free();
        let mut tenants: Vec<(&PodUid, &Reservation)> = self
            .movable
            .iter()
            .filter(|(uid, _)| device_state.tenants().contains_key(*uid))
            .copied()
            .collect();
        tenants.sort_by_key(|(uid, _)| (device_state.tenants()[*uid], *uid));
        tenants.truncate(MOST_TENANTS);
        let enough = |chosen: &[usize]| {
            let freed = chosen
                .iter()
                .try_fold(free, |sum, at| sum.checked_add(device_state.tenants()[tenants[*at].0]));
            freed.is_some_and(|freed| freed.memory >= demand.memory && freed.share >= demand.share)
        };
        let mut found: Vec<Vec<usize>> = Vec::new();
        for chosen in subsets(tenants.len(), self.most) {
            if is_least(&found, &chosen) && enough(&chosen) {
                found.push(chosen);
            }
        }
        let named =
            |chosen: Vec<usize>| chosen.into_iter().map(|at| tenants[at].0.clone()).collect();
        Some(found.into_iter().map(named).collect())
    }

    /// The set itself if the host has room for the request. Otherwise the set plus each smallest
    /// group of further pods that frees enough of the host.
    fn with_host(&self, pods: BTreeSet<PodUid>) -> Vec<BTreeSet<PodUid>> {
        let free = self.node.host_room(HoldRule::Respected);
        let host =
            |uid: &PodUid| self.node.reservation(uid).map_or(HostAmount::ZERO, |held| held.host);
        let freed = pods.iter().map(host).try_fold(free, HostAmount::checked_add).unwrap_or(free);
        if fit_host(self.compiled, freed).is_ok() || pods.len() >= self.most {
            return vec![pods];
        }
        let mut others: Vec<&PodUid> =
            self.movable.iter().map(|(uid, _)| *uid).filter(|uid| !pods.contains(*uid)).collect();
        others.sort_by_key(|uid| (std::cmp::Reverse(host(uid).cpu), *uid));
        others.truncate(MOST_TENANTS);
        let mut found: Vec<Vec<usize>> = Vec::new();
        for chosen in subsets(others.len(), self.most - pods.len()) {
            let mut leaving = chosen.iter().map(|at| host(others[*at]));
            let room = leaving.try_fold(freed, HostAmount::checked_add);
            let is_enough = room.is_some_and(|room| fit_host(self.compiled, room).is_ok());
            if is_enough && is_least(&found, &chosen) {
                found.push(chosen);
            }
        }
        let with = |chosen: Vec<usize>| {
            pods.iter().cloned().chain(chosen.into_iter().map(|at| others[at].clone())).collect()
        };
        found.into_iter().map(with).collect()
    }
}

/// Whether no set is a part of `chosen`.
fn is_least(sets: &[Vec<usize>], chosen: &[usize]) -> bool {
    !sets.iter().any(|less| less.iter().all(|at| chosen.contains(at)))
}

/// All sets of at most `most` of the numbers below `count`, the smaller sets first.
fn subsets(count: usize, most: usize) -> impl Iterator<Item = Vec<usize>> {
    let mut sets: Vec<Vec<usize>> = vec![Vec::new()];
    let mut last = 0..1;
    for _ in 0..most {
        let from = sets.len();
        for at in last {
            let next = sets[at].last().map_or(0, |last| last + 1);
            for number in next..count {
                let mut set = sets[at].clone();
                set.push(number);
                sets.push(set);
            }
        }
        last = from..sets.len();
    }
    sets.into_iter()
}
