//! What a GPU pod counts against quotas: the markers that admission writes into it.
//!
//! A charge is a price. It is decided before the pod has a place, so it depends on the request and
//! on prices that the operator sets, never on a device, and it never changes what is allocated. It
//! is rounded up and never zero. A request that may get more than one model counts as the dearest
//! of them, so that vague requests are not cheap.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::hardware::mig::{GEOMETRIES, Geometry};
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

impl Prices {
    /// Whether models differ in weight.
    pub fn are_weighted(&self) -> bool {
        self.models.iter().any(|price| price.weight != Share::WHOLE)
    }

    /// What a whole GPU of this model is worth, in GPUs of the reference.
    pub fn weight_of(&self, model: &ModelName) -> Share {
        let name = words(model.as_str());
        let is_of = |price: &&ModelPrice| {
            let model = words(&price.model);
            !model.is_empty() && name.windows(model.len()).any(|run| *run == model)
        };
        self.models.iter().find(is_of).map_or(Share::WHOLE, |price| price.weight)
    }

    /// What `request` counts.
    pub fn charge(&self, request: &GpuRequest) -> Charge {
        let mut dearest = Charge::default();
        for (memory, weight) in self.asked(request) {
            let (share, memory) = self.of_one(request, memory);
            let equivalents = up(share, weight.millionths(), WHOLE);
            dearest.share = dearest.share.max(share);
            dearest.memory = dearest.memory.max(memory);
            dearest.equivalents = dearest.equivalents.max(equivalents);
        }
        let times = |amount: u64| amount.max(1).saturating_mul(u64::from(request.count.get()));
        Charge {
            share: times(dearest.share),
            memory: times(dearest.memory),
            devices: times(1),
            equivalents: times(dearest.equivalents),
        }
    }

    /// Memory and weight of all GPUs that a request may mean. A name without a price of its own,
    /// such as `NVIDIA`, may mean any, and so counts as the reference.
    fn asked(&self, request: &GpuRequest) -> Vec<(MemMib, Share)> {
        let reference = (self.reference, Share::WHOLE);
        if request.models.is_any() {
            return vec![reference];
        }
        let mut asked = Vec::new();
        for name in request.models.names() {
            let name = words(name);
            let has = |all: &[String], part: &[String]| {
                !part.is_empty() && all.windows(part.len()).any(|run| run == part)
            };
            let mut is_priced = false;
            for price in &self.models {
                let model = words(&price.model);
                let is_whole = has(&name, &model);
                is_priced |= is_whole;
                // `A100` may also be an `A100 80GB` with a price of its own.
                if is_whole || has(&model, &name) {
                    asked.push((price.memory, price.weight));
                }
            }
            if !is_priced {
                asked.push(reference);
            }
        }
        asked
    }

    /// Share and memory of one device, where a GPU has `memory`.
    fn of_one(&self, request: &GpuRequest, memory: MemMib) -> (u64, u64) {
        let whole = (WHOLE, memory.mib());
        let part_of_memory = |part: MemMib| up(part.mib(), WHOLE, memory.mib()).min(WHOLE);
        let (share, part) = match &request.amount {
            Amount::Fraction(share) => {
                (share.millionths(), up(share.millionths(), memory.mib(), WHOLE))
            }
            Amount::Memory(part) => (part_of_memory(*part), part.mib()),
            Amount::FractionAndMemory(share, part) => (
                share.millionths().max(part_of_memory(*part)),
                part.mib().max(up(share.millionths(), memory.mib(), WHOLE)),
            ),
            Amount::Whole => whole,
            Amount::MigInstance(profile) => of_instance(profile, &request.models).unwrap_or(whole),
            Amount::SharedSlot => {
                self.replicas.first().map_or(whole, |replicas| slots(*replicas, 1, memory))
            }
        };
        match (&request.amount, request.isolation) {
            (Amount::Whole | Amount::MigInstance(_), _)
            | (Amount::SharedSlot, Isolation::None | Isolation::Memory) => (share, part),
            (_, Isolation::None | Isolation::Memory) => {
                let demand =
                    Demand { memory: MemMib::new(part), share: Share::from_millionths(share) };
                let (in_slots, of_slots) = self.in_slots(demand, memory);
                match request.by_instance {
                    true => alone((in_slots, of_slots), memory, &request.models),
                    false => (in_slots, of_slots),
                }
            }
            (Amount::SharedSlot, Isolation::Hardware) => whole,
            (
                Amount::Fraction(_) | Amount::Memory(_) | Amount::FractionAndMemory(..),
                Isolation::Hardware,
            ) => alone((share, part), memory, &request.models),
        }
    }
}

impl Prices {
    /// The most that a part of a GPU takes, since pools with slots give whole ones.
    fn in_slots(&self, demand: Demand, memory: MemMib) -> (u64, u64) {
        let plain = (demand.share.millionths(), demand.memory.mib());
        self.replicas.iter().fold(plain, |most, replicas| {
            let rounded = slots(*replicas, replicas.slots_for(demand, memory), memory);
            (most.0.max(rounded.0), most.1.max(rounded.1))
        })
    }
}

/// Share and memory of `count` slots of a GPU.
fn slots(replicas: Replicas, count: u32, memory: MemMib) -> (u64, u64) {
    let (count, of) = (u64::from(count), u64::from(replicas.count()));
    (up(WHOLE, count, of), up(memory.mib(), count, of))
}

/// `amount · times / parts`, rounded up.
fn up(amount: u64, times: u64, parts: u64) -> u64 {
    let all = u128::from(amount) * u128::from(times);
    u64::try_from(all.div_ceil(u128::from(parts.max(1)))).unwrap_or(u64::MAX)
}

/// Share and memory of a MIG instance on one of these models, by the name of its profile; `None` if it has
/// none of the form `<slices>g.<GB>gb`.
pub(crate) fn of_instance(profile: &MigProfile, models: &ModelFilter) -> Option<(u64, u64)> {
    let (slices, rest) = profile.as_str().split_once("g.")?;
    let (gigabytes, _) = rest.split_once("gb")?;
    let slices: NonZeroU32 = slices.parse().ok()?;
    let gigabytes: NonZeroU32 = gigabytes.parse().ok()?;
    let has_it = |geometry: &&Arc<Geometry>| geometry.profile(profile).is_some();
    // The dearest: `1g.24gb` is one of four on an RTX PRO 6000, and one of seven on an H100.
    let all = GEOMETRIES.iter().filter(has_it);
    let accepted = all.clone().filter(|geometry| geometry.may_be(models));
    let fewest = accepted.map(|it| it.slices()).min();
    let of = fewest.or_else(|| all.map(|it| it.slices()).min()).unwrap_or(7);
    let share = up(WHOLE, u64::from(slices.get()), of).min(WHOLE);
    Some((share, u64::from(gigabytes.get()) * 1024))
}

/// The most that a part of a GPU with `memory` takes, if its pod may be alone on a MIG instance of these models:
/// the smallest that has the part, or the dearest that they name, such as `MIG 7g.80gb`.
fn alone((share, part): (u64, u64), memory: MemMib, models: &ModelFilter) -> (u64, u64) {
    let (least_share, least) = instance_for(part, memory.mib());
    let named = models.names().filter_map(|name| named_instance(name, memory));
    named.fold((share.max(least_share), part.max(least)), |most, named| {
        (most.0.max(named.0), most.1.max(named.1))
    })
}

/// Share and memory of the dearest MIG instance that a name of a model means; `None` if it names no instance.
/// Words after `MIG` are the first of a profile. A whole GPU, with `memory`, if no known profile has them.
fn named_instance(name: &str, memory: MemMib) -> Option<(u64, u64)> {
    let wanted = words(name);
    let after = wanted.iter().position(|word| word == "mig").map(|at| &wanted[at + 1..]);
    let of_model = ModelFilter::new([name]);
    if after.is_none() && GEOMETRIES.iter().any(|geometry| geometry.may_be(&of_model)) {
        return None;
    }
    let is_meant = |profile: &str| {
        let own = words(profile);
        match after {
            Some(after) => own.starts_with(&after[..after.len().min(own.len())]),
            None => !wanted.is_empty() && own.windows(wanted.len()).any(|run| run == wanted),
        }
    };
    let all = GEOMETRIES.iter().flat_map(|geometry| &geometry.profiles);
    let meant = all.map(|profile| profile.name.as_str()).filter(|profile| is_meant(profile));
    let any = ModelFilter::default();
    let charges = meant.filter_map(|profile| of_instance(&MigProfile::new(profile), &any));
    let dearest = charges.reduce(|most, next| (most.0.max(next.0), most.1.max(next.1)));
    dearest.or_else(|| after.map(|_| (WHOLE, memory.mib())))
}

/// Share and memory of the smallest MIG instance of a GPU with `whole` MiB that has `part`.
fn instance_for(part: u64, whole: u64) -> (u64, u64) {
    let sizes =
        [(1, 8), (2, 4), (4, 2)].map(|(slices, parts)| (up(WHOLE, slices, 7), whole / parts));
    sizes.into_iter().find(|(_, memory)| part <= *memory).unwrap_or((WHOLE, whole))
}

#[cfg(test)]
mod tests;
