//! What a GPU pod counts against quotas: the markers that admission writes into it.
//!
//! A charge is a price. It is decided before the pod has a place, so it depends on the request and
//! on prices that the operator sets, never on a device, and it never changes what is allocated. It
//! is rounded up and never zero. A request that may get more than one model counts as the dearest
//! of them, so that vague requests are not cheap.

use std::num::NonZeroU32;

use crate::hardware::device::{MigProfile, words};
use crate::hardware::mig::{GEOMETRIES, Geometry};
use crate::hardware::pool::Replicas;
use crate::hardware::units::{MemMib, Share};
use crate::model::request::{Amount, GpuRequest, Isolation};

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
    /// The fewest slots into which a pool cuts its devices.
    pub replicas: Option<Replicas>,
}

impl Default for Prices {
    fn default() -> Self {
        Self { reference: MemMib::new(81_920), models: Vec::new(), replicas: None }
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
            let is_meant = |price: &&ModelPrice| {
                let model = words(&price.model);
                !model.is_empty() && name.windows(model.len()).any(|run| run == model)
            };
            let before = asked.len();
            let meant = self.models.iter().filter(is_meant);
            asked.extend(meant.map(|price| (price.memory, price.weight)));
            if asked.len() == before {
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
            Amount::MigInstance(profile) => of_instance(profile).unwrap_or(whole),
            Amount::SharedSlot => self.replicas.map_or(whole, |replicas| {
                let count = u64::from(replicas.count());
                (up(WHOLE, 1, count), up(memory.mib(), 1, count))
            }),
        };
        match (&request.amount, request.isolation) {
            (Amount::Whole | Amount::MigInstance(_), _)
            | (_, Isolation::None | Isolation::Memory) => (share, part),
            (Amount::SharedSlot, Isolation::Hardware) => whole,
            (
                Amount::Fraction(_) | Amount::Memory(_) | Amount::FractionAndMemory(..),
                Isolation::Hardware,
            ) => {
                let (least_share, least) = instance_for(part, memory.mib());
                (share.max(least_share), part.max(least))
            }
        }
    }
}

/// `amount · times / parts`, rounded up.
fn up(amount: u64, times: u64, parts: u64) -> u64 {
    let all = u128::from(amount) * u128::from(times);
    u64::try_from(all.div_ceil(u128::from(parts.max(1)))).unwrap_or(u64::MAX)
}

/// Share and memory of a MIG instance, by the name of its profile; `None` if it has none of the
/// form `<slices>g.<GB>gb`.
fn of_instance(profile: &MigProfile) -> Option<(u64, u64)> {
    let (slices, rest) = profile.as_str().split_once("g.")?;
    let (gigabytes, _) = rest.split_once("gb")?;
    let slices: NonZeroU32 = slices.parse().ok()?;
    let gigabytes: NonZeroU32 = gigabytes.parse().ok()?;
    let has_it = |geometry: &&Geometry| geometry.profile(profile).is_some();
    let is_of_four = GEOMETRIES.iter().filter(has_it).any(|geometry| geometry.axis == 4);
    let of = if is_of_four { 4 } else { 7 };
    let share = up(WHOLE, u64::from(slices.get()), of).min(WHOLE);
    Some((share, u64::from(gigabytes.get()) * 1024))
}

/// Share and memory of the smallest MIG instance of a GPU with `whole` MiB that has `part`; such a
/// pod is alone on it.
fn instance_for(part: u64, whole: u64) -> (u64, u64) {
    let sizes =
        [(1, 8), (2, 4), (4, 2)].map(|(slices, parts)| (up(WHOLE, slices, 7), whole / parts));
    sizes.into_iter().find(|(_, memory)| part <= *memory).unwrap_or((WHOLE, whole))
}

#[cfg(test)]
mod tests;
