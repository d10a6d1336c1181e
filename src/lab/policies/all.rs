//! All policies that the lab can replay, by name.

use engine::scoring::strategy::{CustomCost, Strategy};
use sim::run::policy::{MixSource, SimPolicy};

use crate::policies::ablation::ablations;
use crate::policies::literature::Baseline;

/// `fragmentation` with the request mix known from the start: shows what learning costs.
pub const KNOWN_MIX: SimPolicy =
    SimPolicy { name: "known-mix", mix: MixSource::Population, ..SimPolicy::FRAGMENTATION };

fn custom(baseline: Baseline) -> Strategy {
    Strategy::Custom(CustomCost::new(baseline))
}

/// Rules of the literature that `gpupack simulate` does not have.
const LITERATURE: [SimPolicy; 4] = [
    SimPolicy::new("dotprod", MixSource::None, |_| custom(Baseline::DotProd)),
    SimPolicy::new("gpupacking", MixSource::None, |_| custom(Baseline::GpuPacking)),
    SimPolicy::new("gpuclustering", MixSource::None, |_| custom(Baseline::GpuClustering)),
    SimPolicy::new("random", MixSource::None, |chance| custom(Baseline::Random { chance })),
];

/// Whether `policy` is one that `fragmentation` is compared with, and no variant of it.
pub(crate) fn is_baseline(policy: &str) -> bool {
    let is_ours = [SimPolicy::FRAGMENTATION.name, KNOWN_MIX.name].contains(&policy);
    !is_ours && !policy.starts_with("without-")
}

/// All of them, those of `gpupack simulate` first.
#[must_use]
pub fn all() -> Vec<SimPolicy> {
    [&SimPolicy::ALL[..], &LITERATURE, &[KNOWN_MIX], &ablations()].concat()
}
