//! What operators see of a set of devices: what is allocated, free or stranded, and which requests
//! would still fit. Figures of disjoint sets add up.
//!
//! Every device is in exactly one [`DeviceCondition`]. All its share is in exactly one part of a
//! [`ShareParts`], so the parts add up to the capacity.

use crate::model::device_state::DeviceState;
use crate::model::node_state::{NodeReporting, NodeState};
use crate::model::request::{Amount, GpuRequest};
use crate::scoring::fragmentation::{add, add_memory, fullness, stranded_by_device};
use crate::waste::compiled_mix::CompiledMix;
use wire::device::{DeviceKind, Health};
use wire::ids::ModelName;
use wire::units::{Demand, MemMib, Share};

/// What a device is for the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceCondition {
    /// It has no tenants.
    Empty,
    /// It has tenants, and room for more.
    Shared,
    /// Nothing of it is free.
    Full,
    /// It is unhealthy.
    Unhealthy,
    /// Kubelet allocates it through a device plugin.
    KubeletOwned,
    /// Its node does not report.
    NotReporting,
}

impl DeviceCondition {
    /// All conditions.
    pub const ALL: [Self; 6] = [
        Self::Empty,
        Self::Shared,
        Self::Full,
        Self::Unhealthy,
        Self::KubeletOwned,
        Self::NotReporting,
    ];

    /// Its name, in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Shared => "shared",
            Self::Full => "full",
            Self::Unhealthy => "unhealthy",
            Self::KubeletOwned => "kubelet_owned",
            Self::NotReporting => "not_reporting",
        }
    }

    /// The condition of a device of a node.
    pub fn of(node: &NodeState, device_state: &DeviceState) -> Self {
        let free = device_state.unallocated();
        match (node.state(), device_state.health()) {
            (
                NodeReporting::NeverReported | NodeReporting::NotReporting | NodeReporting::Gone,
                _,
            ) => Self::NotReporting,
            (NodeReporting::Reporting, Health::Unhealthy) => Self::Unhealthy,
            (NodeReporting::Reporting, Health::KubeletOwned) => Self::KubeletOwned,
            (NodeReporting::Reporting, Health::Healthy) => {
                match free.share == Share::ZERO || free.memory == MemMib::ZERO {
                    true => Self::Full,
                    false if device_state.tenants().is_empty() => Self::Empty,
                    false => Self::Shared,
                }
            }
        }
    }

    /// Whether new tenants may come.
    pub fn is_open(self) -> bool {
        matches!(self, Self::Empty | Self::Shared | Self::Full)
    }
}

/// A request for one device, for comparison: a share alone, or memory alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Its name, in metrics.
    pub name: &'static str,
    amount: Least,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Least {
    Share(Share),
    Memory(MemMib),
}

const fn share(name: &'static str, millionths: u64) -> Size {
    Size { name, amount: Least::Share(Share::from_millionths(millionths)) }
}

const fn gib(name: &'static str, gib: u64) -> Size {
    Size { name, amount: Least::Memory(MemMib::new(gib * 1024)) }
}

/// The number of [`SIZES`]. A type with `SIZES.len()` would make the compiler call functions to know
/// its length, which ends in a cycle when it optimizes (`E0391`).
const SIZE_COUNT: usize = 13;

/// The sizes for which room is reported, each kind in rising order.
pub const SIZES: [Size; SIZE_COUNT] = [
    share("0.1", 100_000),
    share("0.25", 250_000),
    share("0.5", 500_000),
    share("0.75", 750_000),
    share("1", 1_000_000),
    gib("1GiB", 1),
    gib("2GiB", 2),
    gib("4GiB", 4),
    gib("8GiB", 8),
    gib("16GiB", 16),
    gib("24GiB", 24),
    gib("40GiB", 40),
    gib("80GiB", 80),
];

/// Names of requests that are larger than [`SIZES`] or of another kind.
pub const OTHER_SIZES: [&str; 7] = ["2", "4", "8", "more", "moreGiB", "mig", "slot"];

impl Size {
    /// What it takes of a device with that capacity; `None` if the device is too small.
    fn demand_on(self, capacity: Demand) -> Option<Demand> {
        match self.amount {
            Least::Share(share) => Some(Demand { share, memory: share.of(capacity.memory) }),
            Least::Memory(memory) => {
                let share = Share::ratio(memory, capacity.memory)?;
                (share <= Share::WHOLE).then_some(Demand { share, memory })
            }
        }
    }

    /// The name of the smallest size that covers the whole request, over all its devices.
    pub fn of(request: &GpuRequest) -> &'static str {
        let count = u64::from(request.count.get());
        let share = match &request.amount {
            Amount::Fraction(share) | Amount::FractionAndMemory(share, _) => *share,
            Amount::Whole => Share::WHOLE,
            Amount::Memory(memory) => {
                let all = MemMib::new(memory.mib().saturating_mul(count));
                let mut sizes = SIZES.iter();
                let size =
                    sizes.find(|size| matches!(size.amount, Least::Memory(most) if all <= most));
                return size.map_or("moreGiB", |size| size.name);
            }
            Amount::MigInstance(_) => return "mig",
            Amount::SharedSlot => return "slot",
        };
        let all = Share::from_millionths(share.millionths().saturating_mul(count));
        let mut sizes = SIZES.iter();
        let size = sizes.find(|size| matches!(size.amount, Least::Share(most) if all <= most));
        match (size, all.millionths().div_ceil(Share::WHOLE.millionths())) {
            (Some(size), _) => size.name,
            (None, 0..=2) => "2",
            (None, 3..=4) => "4",
            (None, 5..=8) => "8",
            (None, _) => "more",
        }
    }
}

/// The room for one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SizeRoom {
    /// Requests of the size that would fit, if all were placed on these devices.
    pub fitting: u64,
    /// Free memory of the devices on which not even one fits.
    pub stranded: MemMib,
}

/// The parts of the compute share of devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareParts {
    /// Allocated.
    pub allocated: Share,
    /// Free, but typical requests cannot use it, on average over the mix.
    pub stranded: Share,
    /// Free and usable.
    pub free: Share,
    /// Of devices that take no tenants.
    pub unavailable: Share,
}

/// Steps of free share: of eleven, the first is nothing and the last a whole device.
pub const FREE_STEPS: usize = 11;

/// Numbers of tenants that are counted separately: 0 to 8, and more.
pub const TENANT_STEPS: usize = 10;

/// The figures of a set of devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceFigures {
    /// Devices by condition, in the order of [`DeviceCondition::ALL`].
    pub devices: [u64; DeviceCondition::ALL.len()],
    /// Overallocated devices.
    pub overallocated: u64,
    /// Open devices by free share: tenths, rounded down.
    pub by_free_share: [u64; FREE_STEPS],
    /// Open devices by number of tenants.
    pub by_tenants: [u64; TENANT_STEPS],
    /// The parts of the compute share.
    pub share: ShareParts,
    /// Free share of the device that has most of it.
    pub largest_share: Share,
    /// Free memory of the device that has most of it.
    pub largest_memory: MemMib,
    /// Open devices with tenants, and the sum of their fullness in millionths: see
    /// [`PackingSums::efficiency`](crate::scoring::fragmentation::PackingSums::efficiency).
    pub occupied: (u64, u64),
    /// The room for each of [`SIZES`].
    pub room: [SizeRoom; SIZE_COUNT],
}

impl DeviceFigures {
    /// Figures of the devices of a node, model by model. MIG parents have no tenants and are left
    /// out.
    ///
    /// # Panics
    /// Never for amounts within the limits that are checked on input.
    pub fn of(node: &NodeState, mix: &CompiledMix) -> Vec<(ModelName, Self)> {
        let mut by_model: Vec<(ModelName, Self)> = Vec::new();
        let stranded = stranded_by_device(node, mix);
        for (position, device_state) in node.devices().iter().enumerate() {
            let device = device_state.device();
            if device.kind == DeviceKind::MigParent {
                continue;
            }
            let at = by_model.iter().position(|(model, _)| *model == device.model);
            let at = at.unwrap_or_else(|| {
                by_model.push((device.model.clone(), Self::default()));
                by_model.len() - 1
            });
            let of_no_use = stranded.iter().find(|(at, _)| *at == position);
            by_model[at].1.count(
                node,
                device_state,
                of_no_use.map_or(Share::ZERO, |(_, share)| *share),
            );
        }
        by_model
    }

    /// Counts one device, with the part of its free share that is stranded.
    fn count(&mut self, node: &NodeState, device_state: &DeviceState, stranded: Share) {
        let condition = DeviceCondition::of(node, device_state);
        let (capacity, allocated) = (device_state.capacity(), device_state.allocated());
        self.devices[condition as usize] += 1;
        self.overallocated += u64::from(device_state.is_overallocated());
        let held = Demand {
            share: allocated.share.min(capacity.share),
            memory: allocated.memory.min(capacity.memory),
        };
        let left = capacity.checked_sub(held).expect("at most the capacity is held");
        self.share.allocated = add(self.share.allocated, held.share);
        // Nothing of an overallocated device is free, even if one dimension has some left.
        if !condition.is_open() || device_state.is_overallocated() {
            return self.share.unavailable = add(self.share.unavailable, left.share);
        }
        let free = device_state.unallocated();
        let stranded = stranded.min(free.share);
        self.share.stranded = add(self.share.stranded, stranded);
        self.share.free = add(self.share.free, rest(free.share, stranded));
        self.share.unavailable = add(self.share.unavailable, rest(left.share, free.share));
        self.largest_share = self.largest_share.max(free.share);
        self.largest_memory = self.largest_memory.max(free.memory);
        let tenths = usize::try_from(free.share.millionths() / 100_000).expect("a small number");
        self.by_free_share[tenths.min(FREE_STEPS - 1)] += 1;
        let tenants = device_state.tenants().len();
        self.by_tenants[tenants.min(TENANT_STEPS - 1)] += 1;
        if tenants > 0 {
            self.occupied.0 += 1;
            self.occupied.1 += fullness(device_state).millionths();
        }
        for (room, size) in self.room.iter_mut().zip(SIZES) {
            match size.demand_on(capacity).map_or(0, |demand| times(free, demand)) {
                0 => room.stranded = add_memory(room.stranded, free.memory),
                fitting => room.fitting += fitting,
            }
        }
    }

    /// Adds the figures of other devices.
    pub fn add(&mut self, other: &Self) {
        add_counts(&mut self.devices, &other.devices);
        add_counts(&mut self.by_free_share, &other.by_free_share);
        add_counts(&mut self.by_tenants, &other.by_tenants);
        self.overallocated += other.overallocated;
        self.share.allocated = add(self.share.allocated, other.share.allocated);
        self.share.stranded = add(self.share.stranded, other.share.stranded);
        self.share.free = add(self.share.free, other.share.free);
        self.share.unavailable = add(self.share.unavailable, other.share.unavailable);
        self.largest_share = self.largest_share.max(other.largest_share);
        self.largest_memory = self.largest_memory.max(other.largest_memory);
        self.occupied.0 += other.occupied.0;
        self.occupied.1 += other.occupied.1;
        for (room, more) in self.room.iter_mut().zip(&other.room) {
            room.fitting += more.fitting;
            room.stranded = add_memory(room.stranded, more.stranded);
        }
    }
}

fn add_counts(sums: &mut [u64], counts: &[u64]) {
    sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
}

/// How often `demand` fits into `free`.
fn times(free: Demand, demand: Demand) -> u64 {
    let share = free.share.millionths().checked_div(demand.share.millionths());
    let memory = free.memory.mib().checked_div(demand.memory.mib());
    share.unwrap_or(u64::MAX).min(memory.unwrap_or(u64::MAX))
}

fn rest(all: Share, part: Share) -> Share {
    all.checked_sub(part).expect("a part of it")
}

#[cfg(test)]
mod tests;
