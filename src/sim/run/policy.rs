//! The placement rules that the simulator can replay, by the names that users type.
//!
//! The product's policies come first. The others, from the FGD paper (USENIX ATC'23, "Beware of
//! Fragmentation"), are for comparison; they exist in the simulator only.

use crate::run::baseline::Baseline;
use engine::model::policy::Policy;
use engine::scoring::strategy::{CustomCost, Strategy};
use engine::waste::weights::WasteWeights;

/// A placement rule of the simulator.
#[derive(Debug, Clone, Copy)]
pub struct SimPolicy {
    /// The name that users type.
    pub name: &'static str,
    /// Where the rule gets the request mix from.
    pub mix: MixSource,
    /// Weights of the terms of `fragmentation`, if they are not those of the product.
    pub weights: Option<WasteWeights>,
    /// The strategy for one call, from a number that is drawn for it.
    pub strategy: fn(u64) -> Strategy,
}

impl SimPolicy {
    /// The policy of the product. It learns the request mix from the arrivals, as in a cluster.
    pub const FRAGMENTATION: Self = Self::new("fragmentation", MixSource::Arrivals, |_| {
        Strategy::Policy(Policy::Fragmentation)
    });

    /// The product's policy of this name.
    pub const BINPACK: Self =
        Self::new("binpack", MixSource::None, |_| Strategy::Policy(Policy::BinPack));

    /// The product's policy of this name.
    pub const SPREAD: Self =
        Self::new("spread", MixSource::None, |_| Strategy::Policy(Policy::Spread));

    /// The paper's policy. It knows the request mix from the start.
    pub const FGD: Self = Self::new("fgd", MixSource::Population, |_| {
        Strategy::Custom(CustomCost::new(Baseline::Fgd))
    });

    /// Least left of CPU and GPU.
    pub const BESTFIT: Self = Self::new("bestfit", MixSource::None, |_| {
        Strategy::Custom(CustomCost::new(Baseline::BestFit))
    });

    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 5] =
        [Self::FRAGMENTATION, Self::BINPACK, Self::SPREAD, Self::FGD, Self::BESTFIT];

    /// A rule with the weights of the product.
    #[must_use]
    pub const fn new(name: &'static str, mix: MixSource, strategy: fn(u64) -> Strategy) -> Self {
        Self { name, mix, weights: None, strategy }
    }
}

/// Where a rule gets the request mix from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MixSource {
    /// It needs none.
    None,
    /// From the pods that have arrived so far.
    Arrivals,
    /// From all pods of the trace, before the first one arrives.
    Population,
}
