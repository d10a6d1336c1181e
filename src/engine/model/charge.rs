//! What a GPU pod counts against quotas: the markers that admission writes into it.
//!
//! A charge is a price. It is decided before the pod has a place, so it depends on the request and
//! on prices that the operator sets, never on a device, and it never changes what is allocated. It
//! is rounded up and never zero. A request that may get more than one model counts as the dearest
//! of them, so that vague requests are not cheap.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use crate::hardware::mig::GEOMETRIES;
use crate::hardware::pool::Replicas;
use crate::model::request::{Amount, GpuRequest, Isolation};
use wire::device::{ModelFilter, words};
use wire::ids::{MigProfile, ModelName};
use wire::units::{Demand, MemMib, Share};

const WHOLE: u64 = Share::WHOLE.millionths();

/// What a whole GPU of some models counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelPrice {
    /// The models: those whose names have these words.
    pub model: String,
    /// The memory of a GPU.
    pub memory: MemMib,
    /// What a GPU is worth, in GPUs of the reference.
    pub weight: Share,
}

/// The prices of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prices {
    /// The memory of the GPU that a request is charged for if it names no model with a price of its
    /// own. Its weight is 1.
    pub reference: MemMib,
    /// Models that count less than the reference.
    pub models: Vec<ModelPrice>,
    /// Into how many slots pools cut their devices, each number once.
    pub replicas: BTreeSet<Replicas>,
}

impl Default for Prices {
    fn default() -> Self {
        Self { reference: MemMib::new(81_920), models: Vec::new(), replicas: BTreeSet::new() }
    }
}

/// What a pod counts, all of its devices together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charge {
    /// Compute, in millionths of a GPU.
    pub share: u64,
    /// Memory, in MiB.
    pub memory: u64,
    /// Devices: GPUs, parts of GPUs, or MIG instances.
    pub devices: u64,
    /// Compute weighed by model, in millionths of a GPU of the reference.
    pub equivalents: u64,
}

/// What one device counts: compute in millionths of a GPU, memory in MiB.
#[derive(Clone, Copy)]
pub(crate) struct DeviceCharge {
    pub(crate) share: u64,
    memory: u64,
}

impl DeviceCharge {
    /// A share of a GPU with `whole` memory.
    fn of_share(share: Share, whole: MemMib) -> Self {
        let share = share.millionths();
        Self { share, memory: up(share, whole.mib(), WHOLE) }
    }

    /// A part of the `whole` memory of a GPU.
    fn of_memory(part: MemMib, whole: MemMib) -> Self {
        Self { share: up(part.mib(), WHOLE, whole.mib()).min(WHOLE), memory: part.mib() }
    }

    /// The larger of both, of compute and of memory.
    fn max(self, other: Self) -> Self {
        Self { share: self.share.max(other.share), memory: self.memory.max(other.memory) }
    }
}

impl Prices {
    /// Whether models differ in weight.
    pub fn are_weighted(&self) -> bool {
        self.models.iter().any(|price| price.weight != Share::WHOLE)
    }

    /// What a whole GPU of this model is worth, in GPUs of the reference.
    pub fn weight_of(&self, model: &ModelName) -> Share {
        let name = words(model.as_str());
        let mut prices = self.models.iter();
        let price = prices.find(|price| has_run(&name, &words(&price.model)));
        price.map_or(Share::WHOLE, |price| price.weight)
    }

    /// What `request` counts.
    pub fn charge(&self, request: &GpuRequest) -> Charge {
        let mut dearest = Charge::default();
        for (memory, weight) in self.meant_gpus(request) {
            let DeviceCharge { share, memory } = self.of_one(request, memory);
            let equivalents = up(share, weight.millionths(), WHOLE);
            dearest.share = dearest.share.max(share);
            dearest.memory = dearest.memory.max(memory);
            dearest.equivalents = dearest.equivalents.max(equivalents);
        }
        let count = u64::from(request.count.get());
        Charge {
            share: dearest.share.max(1).saturating_mul(count),
            memory: dearest.memory.max(1).saturating_mul(count),
            devices: count,
            equivalents: dearest.equivalents.max(1).saturating_mul(count),
        }
    }

    /// Memory and weight of all GPUs that a request may mean. A name without a price of its own,
    /// such as `NVIDIA`, may mean any, and so counts as the reference.
    fn meant_gpus(&self, request: &GpuRequest) -> Vec<(MemMib, Share)> {
        let reference = (self.reference, Share::WHOLE);
        if request.models.is_any() {
            return vec![reference];
        }
        let mut meant = Vec::new();
        for name in request.models.names() {
            let name = words(name);
            let mut is_priced = false;
            for price in &self.models {
                let model = words(&price.model);
                let is_whole = has_run(&name, &model);
                is_priced |= is_whole;
                // `A100` may also be an `A100 80GB` with a price of its own.
                if is_whole || has_run(&model, &name) {
                    meant.push((price.memory, price.weight));
                }
            }
            if !is_priced {
                meant.push(reference);
            }
        }
        meant
    }

    /// What one device counts, where a GPU has `memory`.
    fn of_one(&self, request: &GpuRequest, memory: MemMib) -> DeviceCharge {
        let whole = DeviceCharge { share: WHOLE, memory: memory.mib() };
        let charge = match &request.amount {
            Amount::Fraction(share) => DeviceCharge::of_share(*share, memory),
            Amount::Memory(part) => DeviceCharge::of_memory(*part, memory),
            Amount::FractionAndMemory(share, part) => {
                DeviceCharge::of_share(*share, memory).max(DeviceCharge::of_memory(*part, memory))
            }
            Amount::Whole => whole,
            Amount::MigInstance(profile) => of_instance(profile, &request.models).unwrap_or(whole),
            Amount::SharedSlot => {
                self.replicas.first().map_or(whole, |replicas| slots(*replicas, 1, memory))
            }
        };
        match (&request.amount, request.isolation) {
            (Amount::Whole | Amount::MigInstance(_), _)
            | (Amount::SharedSlot, Isolation::None | Isolation::Memory) => charge,
            (_, Isolation::None | Isolation::Memory) => {
                let in_slots = self.in_slots(charge, memory);
                match request.by_instance {
                    true => alone(in_slots, memory, &request.models),
                    false => in_slots,
                }
            }
            (Amount::SharedSlot, Isolation::Hardware) => whole,
            (
                Amount::Fraction(_) | Amount::Memory(_) | Amount::FractionAndMemory(..),
                Isolation::Hardware,
            ) => alone(charge, memory, &request.models),
        }
    }
}

impl Prices {
    /// The most that a part of a GPU takes, since pools with slots give whole ones.
    fn in_slots(&self, charge: DeviceCharge, memory: MemMib) -> DeviceCharge {
        let DeviceCharge { share, memory: part } = charge;
        let demand = Demand { memory: MemMib::new(part), share: Share::from_millionths(share) };
        let rounded = self
            .replicas
            .iter()
            .map(|replicas| slots(*replicas, replicas.slots_for(demand, memory), memory));
        rounded.fold(charge, DeviceCharge::max)
    }
}

/// What `count` slots of a GPU count.
fn slots(replicas: Replicas, count: u32, memory: MemMib) -> DeviceCharge {
    let (count, of) = (u64::from(count), u64::from(replicas.count()));
    DeviceCharge { share: up(WHOLE, count, of), memory: up(memory.mib(), count, of) }
}

/// Whether these words stand in a text, one after the other.
fn has_run(text: &[String], part: &[String]) -> bool {
    !part.is_empty() && text.windows(part.len()).any(|run| run == part)
}

/// `amount · times / parts`, rounded up.
fn up(amount: u64, times: u64, parts: u64) -> u64 {
    let all = u128::from(amount) * u128::from(times);
    u64::try_from(all.div_ceil(u128::from(parts.max(1)))).unwrap_or(u64::MAX)
}

/// What a MIG instance on one of these models counts, by the name of its profile; `None` if it has
/// none of the form `<slices>g.<GB>gb`.
pub(crate) fn of_instance(profile: &MigProfile, models: &ModelFilter) -> Option<DeviceCharge> {
    let (slices, rest) = profile.as_str().split_once("g.")?;
    let (gigabytes, _) = rest.split_once("gb")?;
    let slices: NonZeroU32 = slices.parse().ok()?;
    let gigabytes: NonZeroU32 = gigabytes.parse().ok()?;
    // The dearest: `1g.24gb` is one of four on an RTX PRO 6000, and one of seven on an H100.
    let all = GEOMETRIES.iter().filter(|geometry| geometry.profile(profile).is_some());
    let accepted = all.clone().filter(|geometry| geometry.may_be(models));
    let fewest = accepted.map(|geometry| geometry.slices()).min();
    let of = fewest.or_else(|| all.map(|geometry| geometry.slices()).min()).unwrap_or(7);
    let share = up(WHOLE, u64::from(slices.get()), of).min(WHOLE);
    Some(DeviceCharge { share, memory: u64::from(gigabytes.get()) * 1024 })
}

/// The most that a part of a GPU with `memory` counts, if its pod may be alone on a MIG instance of these models:
/// the smallest that has the part, or the dearest that they name, such as `MIG 7g.80gb`.
fn alone(part: DeviceCharge, memory: MemMib, models: &ModelFilter) -> DeviceCharge {
    let smallest = instance_for(part.memory, memory.mib());
    let named = models.names().filter_map(|name| named_instance(name, memory));
    named.fold(part.max(smallest), DeviceCharge::max)
}

/// What the dearest MIG instance counts that a name of a model means; `None` if it names no instance.
/// Words after `MIG` are the first of a profile. A whole GPU, with `memory`, if no known profile has them.
fn named_instance(name: &str, memory: MemMib) -> Option<DeviceCharge> {
    let wanted = words(name);
    let after = wanted.iter().position(|word| word == "mig").map(|at| &wanted[at + 1..]);
    let of_model = ModelFilter::new([name]);
    if after.is_none() && GEOMETRIES.iter().any(|geometry| geometry.may_be(&of_model)) {
        return None;
    }
    let all = GEOMETRIES.iter().flat_map(|geometry| &geometry.profiles);
    let meant = all.map(|profile| profile.name.as_str()).filter(|profile| {
        let own = words(profile);
        match after {
            Some(after) => own.starts_with(&after[..after.len().min(own.len())]),
            None => has_run(&own, &wanted),
        }
    });
    let any = ModelFilter::default();
    let charges = meant.filter_map(|profile| of_instance(&MigProfile::new(profile), &any));
    let dearest = charges.reduce(DeviceCharge::max);
    dearest.or_else(|| after.map(|_| DeviceCharge { share: WHOLE, memory: memory.mib() }))
}

/// What the smallest MIG instance of a GPU with `whole` MiB counts that has `part`.
fn instance_for(part: u64, whole: u64) -> DeviceCharge {
    let sizes = [(1, 8), (2, 4), (4, 2)]
        .map(|(slices, parts)| DeviceCharge { share: up(WHOLE, slices, 7), memory: whole / parts });
    let smallest = sizes.into_iter().find(|size| part <= size.memory);
    smallest.unwrap_or(DeviceCharge { share: WHOLE, memory: whole })
}

#[cfg(test)]
mod tests;
