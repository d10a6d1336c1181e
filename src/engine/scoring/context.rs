//! The scoring context: what a scoring function sees of a node.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use smallvec::{SmallVec, smallvec};

use crate::hardware::device_class::ClassId;
use crate::hardware::pool::Borrow;
use crate::hardware::spots::{DividedGpu, Spot};
use crate::model::device_state::{DeviceState, HoldRule};
use crate::model::fit::{CompiledRequest, Room};
use crate::model::node_state::{NodeState, SpotDevice};
use crate::scoring::cost::Ties;
use crate::scoring::fragmentation::Uses;
use crate::scoring::guests;
use crate::waste::compiled_mix::CompiledMix;
use crate::waste::expected_waste::ExpectedWaste;
use wire::device::DeviceKind;
use wire::ids::DeviceId;
use wire::units::{Demand, HostAmount, MemMib, Share};

/// A device that fits: its position on the node and what is taken of it.
pub type Taken = (usize, Demand);

/// The devices of a placement: one as a rule.
pub type TakenList = SmallVec<[Taken; 1]>;

/// What a scoring function sees of a node.
#[derive(Debug)]
pub struct ScoringContext<'a> {
    /// The node.
    pub node: &'a NodeState,
    /// Room of its devices, with or without holds.
    pub rooms: &'a [Room],
    /// What is requested.
    pub compiled: &'a CompiledRequest,
    /// The devices that fit, by position; at least as many as are requested.
    pub fits: &'a [Taken],
    /// Free CPU and host memory, with or without holds.
    pub host_free: HostAmount,
    /// The node's expected waste, if it was computed already.
    pub(crate) node_waste: &'a KeptNodeWaste,
}

/// Added to the memory of an instance in MiB that may be impossible to make.
const LAST: u32 = 1 << 29;

/// Added to that memory where the driver of the node is to be upgraded: pods there would soon be evicted.
const BEFORE_UPGRADE: u32 = 1 << 30;

impl ScoringContext<'_> {
    /// CPU and host memory that would be left.
    pub fn host_left(&self) -> HostAmount {
        self.host_free.left_after(self.compiled.host)
    }

    /// Memory in MiB of the MIG instance, for a request that takes any large enough one; else 0. More than any
    /// has where it is the last choice, and still more where an upgrade of the driver is to begin.
    pub(crate) fn instance_mib(&self, taken: &[Taken]) -> u32 {
        let first = taken.first().filter(|_| self.compiled.wants_any_instance());
        let mib = first.map_or(0, |(_, demand)| demand.memory.mib());
        let is_last = taken.iter().any(|(at, _)| self.node.is_last_choice(*at));
        let mib = u32::try_from(mib).unwrap_or(u32::MAX).min(LAST - 1);
        let has_gpu = !taken.is_empty();
        let is_upgraded_soon = has_gpu && self.node.driver_work().is_waiting();
        mib + if is_last { LAST } else { 0 } + if is_upgraded_soon { BEFORE_UPGRADE } else { 0 }
    }

    /// What decides between this placement and others that are equally good for packing.
    pub(crate) fn ties(&self, taken: &[Taken]) -> Ties {
        let proximity = self.node.topology().proximity(taken.iter().map(|(at, _)| *at));
        let restarts = match self.node.has_borrowers() {
            true => taken.iter().map(|fit| self.restarts(fit)).sum(),
            false => 0,
        };
        let preferred = match self.node.rule().borrow != Borrow::None {
            // An instance that is there takes no free units.
            _ if !taken.is_empty() && taken.iter().all(|(at, _)| self.is_instance(*at)) => {
                let units: u32 = taken.iter().map(|(at, _)| self.free_units(*at)).sum();
                usize::from(u8::MAX - u8::try_from(units).unwrap_or(u8::MAX))
            }
            true => (0..self.rooms.len()).filter(|at| self.is_empty_gpu(*at)).count(),
            false => 0,
        };
        Ties::new(proximity, restarts, preferred)
    }

    /// Whether a device is a MIG instance, made or not.
    fn is_instance(&self, position: usize) -> bool {
        let device = self.node.devices().get(position).map(DeviceState::device);
        device.is_none_or(|device| matches!(device.kind, DeviceKind::MigInstance { .. }))
    }

    /// Whether a device is a GPU that takes tenants, and nothing is allocated, held or used of it.
    fn is_empty_gpu(&self, position: usize) -> bool {
        let device_state = self.node.devices().get(position);
        device_state.is_some_and(|device_state| {
            is_untaken(device_state)
                && device_state.is_placeable()
                && device_state.device().kind == DeviceKind::Gpu
                && device_state.unallocated_use() == MemMib::ZERO
                && device_state.guests().is_empty()
        })
    }

    /// The free units of the GPU on which an instance would be made; zero for a device that is there.
    pub(crate) fn free_units(&self, position: usize) -> u32 {
        let offered = position.checked_sub(self.node.devices().len());
        let spots = self.node.spots();
        let Some((at, spot)) = offered.and_then(|at| Some((at, spots.get(at)?))) else { return 0 };
        let gpu = &spot.makeable.spot.gpu;
        // Those of one GPU lie beside each other.
        let is_own = |other: &&SpotDevice| other.makeable.spot.gpu == *gpu;
        let own = spots[..at].iter().rev().take_while(is_own);
        let own = own.chain(spots[at..].iter().take_while(is_own));
        let all = own.fold(0, |units, spot| units | spot.makeable.slot.units());
        let there = self.on_gpu_of(position).filter(|known| known.stays(HoldRule::Respected));
        let slots = there.filter_map(DeviceState::slot);
        let taken = slots.fold(0, |units, slot| units | slot.units());
        (all & !taken).count_ones()
    }

    /// Containers that would be restarted if this were taken of a device.
    fn restarts(&self, (position, demand): &Taken) -> usize {
        let device_state = self.node.devices().get(*position);
        device_state
            .map_or(0, |device_state| guests::restarts_for(self.node, device_state, *demand))
    }

    /// The fullest devices that fit.
    pub fn fullest(&self) -> TakenList {
        self.first_by(|(at, _)| self.rooms[*at].free.share)
    }

    /// The first devices by `key`, as many as are requested. On a tie: those nearest to each other,
    /// then the first by position.
    pub fn first_by<K: Ord>(&self, key: impl Fn(&Taken) -> K) -> TakenList {
        if self.compiled.count() == 1 {
            let has_borrowers = self.node.has_borrowers();
            let first = self
                .fits
                .iter()
                .min_by_key(|fit| (key(fit), if has_borrowers { self.restarts(fit) } else { 0 }));
            return first.copied().into_iter().collect();
        }
        self.nearest_of(self.fits.iter().map(|fit| (key(fit), *fit)).collect())
    }

    /// As many of these as are requested, the least `K` first. On a tie for the last ones: those
    /// nearest to each other and to the rest, then those for which fewer containers are restarted.
    fn nearest_of<K: Ord>(&self, mut keyed: Vec<(K, Taken)>) -> TakenList {
        keyed.sort_by(|(a, (at, _)), (b, (other, _))| (a, at).cmp(&(b, other)));
        let count = self.compiled.count();
        let Some(last) = count.checked_sub(1).and_then(|last| keyed.get(last)) else {
            return TakenList::new();
        };
        let sure = keyed.partition_point(|(key, _)| *key < last.0);
        let alike = keyed.partition_point(|(key, _)| *key <= last.0);
        let chosen: Vec<usize> = keyed[..sure].iter().map(|(_, (at, _))| *at).collect();
        let mut choice: Vec<Taken> = keyed[sure..alike].iter().map(|(_, fit)| *fit).collect();
        if self.node.has_borrowers() {
            choice.sort_by_key(|fit| self.restarts(fit)); // the first of those as near
        }
        let choice: Vec<usize> = choice.iter().map(|(at, _)| *at).collect();
        let nearest = self.node.topology().nearest(&chosen, &choice, count - sure);
        let fits = keyed.iter().map(|(_, fit)| *fit);
        fits.filter(|(at, _)| chosen.contains(at) || nearest.contains(at)).collect()
    }

    /// Devices that are all equal: those nearest to each other, then the first.
    pub(crate) fn any(&self) -> TakenList {
        self.first_by(|_| ())
    }

    /// The same with the `K` of the first one, if `key` depends only on the room of the device. It
    /// is computed once for devices with equal room.
    pub fn first_of_distinct_by<K: Ord + Copy>(&self, key: impl Fn(&Taken) -> K) -> (K, TakenList) {
        let distinct = (0..self.fits.len()).filter(|at| self.twin_before(*at).is_none());
        if self.compiled.count() == 1 && !self.node.has_borrowers() {
            let keyed = distinct.map(|at| (key(&self.fits[at]), at));
            let best = keyed.min().expect("at least as many devices fit as are requested");
            return (best.0, smallvec![self.fits[best.1]]);
        }
        let known: BTreeMap<usize, K> = distinct.map(|at| (at, key(&self.fits[at]))).collect();
        let keyed = (0..self.fits.len())
            .map(|at| (known[&self.twin_before(at).unwrap_or(at)], self.fits[at]));
        let keyed: Vec<(K, Taken)> = keyed.collect();
        let first = keyed.iter().map(|(key, _)| *key).min();
        let first = first.expect("at least as many devices fit as are requested");
        if self.compiled.count() == 1 {
            let equal = keyed.iter().filter(|(key, _)| *key == first).map(|(_, fit)| *fit);
            return (first, equal.min_by_key(|fit| self.restarts(fit)).into_iter().collect());
        }
        (first, self.nearest_of(keyed))
    }

    /// Which of the devices that fit is the first with equal room, if one before this one has that.
    fn twin_before(&self, at: usize) -> Option<usize> {
        let room = self.rooms[self.fits[at].0];
        self.fits[..at].iter().position(|earlier| self.rooms[earlier.0] == room)
    }

    /// Whether a MIG instance would be made on one of the places that fit.
    pub(crate) fn makes_instances(&self) -> bool {
        let devices = self.node.devices().len();
        self.fits.iter().any(|(position, _)| *position >= devices)
    }

    /// What it costs to make the MIG instances that a pod could get, in millionths of a GPU. Nothing for
    /// other devices.
    pub(crate) fn making(&self, mix: &CompiledMix) -> Making {
        if self.node.spots().is_empty() {
            return Making { costs: Vec::new() };
        }
        let divided: BTreeMap<&DeviceId, DividedGpu> =
            self.node.divided(HoldRule::Respected).collect();
        let costs = self.fits.iter().filter_map(|(position, _)| {
            let Spot { gpu, profile, start } = self.node.offered(*position)?.1?;
            Some((*position, mix.potentials.cost(divided.get(&gpu)?, &profile, start)?))
        });
        let mut costs: Vec<(usize, i64)> = costs.collect();
        costs.sort_unstable();
        Making { costs }
    }

    /// Tenants of a device, without holds.
    pub(crate) fn tenants(&self, position: usize) -> usize {
        match self.node.devices().get(position) {
            Some(device_state) => device_state.tenants().len(),
            None => self.on_gpu_of(position).map(|instance| instance.tenants().len()).sum(),
        }
    }

    /// Whether nothing of a device is allocated or held; of a MIG instance that is not made yet: of its GPU.
    pub(crate) fn is_empty(&self, position: usize) -> bool {
        match self.node.devices().get(position) {
            Some(device_state) => is_untaken(device_state),
            None => self.on_gpu_of(position).all(is_untaken),
        }
    }

    /// The instances on the GPU of one that is not made yet.
    fn on_gpu_of(&self, position: usize) -> impl Iterator<Item = &DeviceState> {
        let offered = self.node.offered(position);
        let gpu = offered.and_then(|(_, spot)| spot).map(|spot| spot.gpu);
        self.node.devices().iter().filter(move |instance| match &instance.device().kind {
            DeviceKind::MigInstance { parent, .. } => Some(parent) == gpu.as_ref(),
            DeviceKind::Gpu | DeviceKind::MigParent => false,
        })
    }

    /// What stays free on a device: the larger of share and memory, as a part of the device.
    pub(crate) fn left(&self, position: usize, taken: Demand) -> Share {
        let left = self.rooms[position].free.checked_sub(taken).expect("only what fits is taken");
        let capacity = match self.node.devices().get(position) {
            Some(device_state) => device_state.capacity().memory,
            None => self.rooms[position].free.memory,
        };
        left.share.max(Share::ratio(left.memory, capacity).unwrap_or(Share::ZERO))
    }

    /// Whether all devices that fit are of one class.
    pub fn is_of_one_class(&self) -> bool {
        let mut classes = self.fits.iter().map(|(position, _)| self.rooms[*position].class);
        let first = classes.next();
        classes.all(|class| Some(class) == first)
    }

    /// What stays free on the devices that take tenants at all.
    pub(crate) fn left_on_node(&self, taken: &[Taken]) -> Share {
        let open = (0..self.rooms.len()).filter(|position| {
            self.node.devices().get(*position).is_some_and(DeviceState::is_placeable)
        });
        total(open.map(|position| {
            let found = taken.iter().find(|(at, _)| *at == position);
            self.left(position, found.map_or(Demand::ZERO, |(_, demand)| *demand))
        }))
    }
}

fn is_untaken(device_state: &DeviceState) -> bool {
    device_state.allocated() == Demand::ZERO && device_state.on_hold() == Demand::ZERO
}

/// What MIG instances cost that are made on demand.
pub(crate) struct Making {
    /// By position, rising.
    costs: Vec<(usize, i64)>,
}

impl Making {
    /// The cost of these devices, in millionths of a GPU.
    pub(crate) fn of(&self, taken: &[Taken]) -> i64 {
        let costs = taken.iter().filter_map(|(at, _)| {
            let found = self.costs.binary_search_by_key(at, |(known, _)| *known).ok()?;
            Some(self.costs[found].1)
        });
        costs.sum()
    }
}

pub(crate) fn total(shares: impl Iterator<Item = Share>) -> Share {
    shares.fold(Share::ZERO, |sum, share| {
        sum.checked_add(share).expect("shares of one node fit into 64 bits")
    })
}

/// A node's expected waste, computed when it is first needed.
pub type KeptNodeWaste = OnceCell<NodeWaste>;

/// The expected waste of a node as it is.
#[derive(Clone, Debug)]
pub struct NodeWaste {
    /// What requests of several devices can use.
    pub(crate) uses: Uses,
    /// Free share of the devices that can be shared, in millionths.
    pub(crate) free: u64,
    /// The class of the first of them.
    pub(crate) class: ClassId,
    /// Waste for lack of CPU or host memory, less the worth of free GPUs together; in GPUs.
    pub(crate) host: f64,
    /// Room that requests of several devices cannot use, weighted by their part of the demand, in
    /// GPUs.
    pub(crate) several: f64,
}

impl NodeWaste {
    pub(crate) fn of(expected_waste: &ExpectedWaste, context: &ScoringContext<'_>) -> Self {
        let rooms = context.rooms.iter();
        let mut shareable = rooms.filter(|room| expected_waste.residuals.knows(room.class));
        let free = shareable.clone().map(|room| room.free.share.millionths()).sum();
        let class = shareable.next().map(|room| room.class).unwrap_or_default();
        let requests = &expected_waste.requests_of_several;
        let uses = Uses::of(requests, context.rooms);
        let fragments = uses.on(requests, context.rooms).fragments(context.host_free.cpu);
        let host = expected_waste.host(free, context.host_free);
        Self { uses, free, class, host, several: expected_waste.several(fragments) }
    }
}
