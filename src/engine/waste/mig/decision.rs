//! Where to make a MIG instance: GPU and start together, by one potential per GPU.
//!
//! ```text
//! w̄   = Σ w_r v_r
//! ρ_r = w_r v_r / (20 w̄²) · ( (F + √(1 + Σ N_r v_r²)) / (S_r + √(N_r + 1)) )²
//! W(ℓ) = H(ℓ) − Σ_r ρ_r A_r(ℓ)
//! cost(GPU, start) = W(ℓ with the instance) − W(ℓ)
//! ```
//!
//! `H` is what the free units waste under the mix, in units of memory; `A_r` are the spots that are
//! expected for requests of type *r*, and `ρ_r` is what one of them is worth. What comes and goes varies
//! like the root of what runs: a spot is worth much when there are fewer of them than that. So the price
//! of opening an empty GPU and the reserve of whole GPUs follow from the worth of the large profiles.
//!
//! The least cost wins; then fewest free units on the GPU, the order of devices, the lowest start. Roots
//! and the four operations are exact to the last bit on every machine. What follows is in integers. So the
//! same requests get the same places everywhere.

use crate::hardware::layouts::{LayoutId, Start};
use crate::waste::mig::class::{MigClass, MigClassId};
use crate::waste::mig::mask_waste::whole;
use crate::waste::mig::mig_supply::MigSupply;
use crate::waste::mig::mix::{MigMix, Typical};
use crate::waste::mig::types::MigType;
use crate::waste::numbers::float;

/// The 20 above: with 10 to 40 equally many requests are blocked, within 3 %.
const DOUBT: f64 = 20.0;

/// What a placement costs, in 10⁻¹² units of memory; smaller is better, and below zero is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MigCost(pub i128);

/// A GPU that may take an instance.
#[derive(Clone, Copy, Debug)]
pub struct MigCandidate<D> {
    /// The GPU; lesser ones win a tie.
    pub device: D,
    /// Its class.
    pub class: MigClassId,
    /// Its layout.
    pub layout: LayoutId,
}

/// Where an instance is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen<D> {
    /// The GPU.
    pub device: D,
    /// Where it begins there.
    pub start: Start,
    /// What that costs.
    pub cost: MigCost,
}

/// Tables that decisions use one after the other, so that none allocates memory.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    /// Entries of the tables with another number are of earlier decisions.
    decision: u64,
    classes: Vec<ClassScratch>,
}

#[derive(Clone, Debug, Default)]
struct ClassScratch {
    /// What a spot of each profile is worth, in millionths of a unit.
    worth: Vec<i64>,
    /// `W` by layout, in 10⁻¹² units.
    potentials: Vec<(u64, i128)>,
    /// The best start by layout.
    best: Vec<(u64, Option<(MigCost, Start)>)>,
}

/// One decision, at the counters of now: the worth of spots is computed once, and the best start once per
/// layout.
#[derive(Debug)]
pub struct Decision<'a> {
    classes: &'a [MigClass],
    mix: &'a MigMix,
    kind: &'a MigType,
    scratch: &'a mut Scratch,
}

impl<'a> Decision<'a> {
    /// The decision where to put a request of type `kind`.
    pub fn new(
        classes: &'a [MigClass],
        mix: &'a MigMix,
        supply: &MigSupply,
        kind: &'a MigType,
        scratch: &'a mut Scratch,
    ) -> Self {
        scratch.renew(classes);
        let worths = worths(mix, supply);
        for (typical, worth) in mix.typical().iter().zip(worths) {
            for (class, profile) in typical.kind.accepted() {
                if let Some(class) = scratch.classes.get_mut(class.0) {
                    class.worth[profile.position()] += worth;
                }
            }
        }
        Self { classes, mix, kind, scratch }
    }

    /// `W` of a layout, in 10⁻¹² units: what the GPU wastes, less what its spots are worth.
    pub fn potential(&mut self, class: MigClassId, layout: LayoutId) -> i128 {
        let ClassScratch { worth, potentials, .. } = &mut self.scratch.classes[class.0];
        let (decision, potential) = &mut potentials[layout.position()];
        if *decision != self.scratch.decision {
            let spots = self.classes[class.0].spots_of(layout);
            let spots = spots.iter().zip(worth.iter());
            let worth: i128 =
                spots.map(|(spots, worth)| i128::from(*spots) * i128::from(*worth)).sum();
            let waste = i128::from(self.mix.waste_of(class)[layout.position()]) * 1_000_000;
            (*decision, *potential) = (self.scratch.decision, waste - worth);
        }
        *potential
    }

    /// The start of least cost on a GPU with this layout, the lowest of equal ones; `None` if the request
    /// does not fit there.
    pub fn best(&mut self, class: MigClassId, layout: LayoutId) -> Option<(MigCost, Start)> {
        let (decision, best) = self.scratch.classes[class.0].best[layout.position()];
        if decision == self.scratch.decision {
            return best;
        }
        let profile = self.kind.on(class)?;
        let now = self.potential(class, layout);
        let starts = self.classes[class.0].layouts().starts(layout, profile);
        let best =
            starts.map(|(start, with)| (MigCost(self.potential(class, with) - now), start)).min();
        let decision = self.scratch.decision;
        self.scratch.classes[class.0].best[layout.position()] = (decision, best);
        best
    }

    /// The best of all candidates. `None` if the request fits on none. A GPU whose media engines are taken
    /// must not be a candidate for a request for these.
    pub fn choose<D: Ord + Copy>(
        &mut self,
        candidates: impl IntoIterator<Item = MigCandidate<D>>,
    ) -> Option<Chosen<D>> {
        let costs = candidates.into_iter().filter_map(|MigCandidate { device, class, layout }| {
            let (cost, start) = self.best(class, layout)?;
            let free = self.classes[class.0].layouts().free_units(layout);
            Some((cost, free, device, start))
        });
        let (cost, _, device, start) = costs.min()?;
        Some(Chosen { device, start, cost })
    }
}

impl Scratch {
    fn renew(&mut self, classes: &[MigClass]) {
        self.decision += 1;
        self.classes.resize_with(classes.len(), ClassScratch::default);
        for (scratch, class) in self.classes.iter_mut().zip(classes) {
            let layouts = class.layouts();
            scratch.worth.clear();
            scratch.worth.resize(layouts.profiles().count(), 0);
            scratch.potentials.resize(layouts.count(), (0, 0));
            scratch.best.resize(layouts.count(), (0, None));
        }
    }
}

/// `ρ` of each typical type, in millionths of a unit, rounded down.
fn worths<'a>(mix: &'a MigMix, supply: &'a MigSupply) -> impl Iterator<Item = i64> + use<'a> {
    let typical = mix.typical().iter();
    let vary = typical.map(|kind| float(supply.running(kind.id)) * kind.units * kind.units);
    let vary: f64 = vary.sum();
    let room = float(supply.free_units()) + libm::sqrt(1.0 + vary);
    let scale = DOUBT * mix.mean_units() * mix.mean_units();
    mix.typical().iter().map(move |Typical { id, kind, weight, units }| {
        let spots = float(supply.fits(kind)) + libm::sqrt(float(supply.running(*id)) + 1.0);
        let per_spot = room / spots;
        whole(weight * units / scale * (per_spot * per_spot) * 1e6)
    })
}

#[cfg(test)]
mod tests;
