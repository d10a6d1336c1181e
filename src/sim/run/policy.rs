//! The placement rules that the simulator can replay, by the names that users type.
//!
//! The product's policies come first. The others, from the FGD paper (USENIX ATC'23, "Beware of
//! Fragmentation"), are for comparison; they exist in the simulator only.

use std::fmt;
use std::str::FromStr;

use crate::model::policy::Policy;
use crate::scoring::strategy::{CustomCost, Strategy};
use crate::sim::run::ablation::CostTerm;
use crate::sim::run::baseline::Baseline;

/// A placement rule of the simulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SimPolicy {
    /// A policy of the product as it serves pods. `fragmentation` learns the request mix from the
    /// arrivals, as it does in a cluster.
    Product(Policy),
    /// `fragmentation` with the request mix known from the start: shows what learning costs.
    KnownMix,
    /// `fragmentation` without one term: shows what that gains.
    Without(CostTerm),
    /// The paper's policy. It knows the request mix from the start.
    Fgd,
    /// Least left of CPU and GPU.
    BestFit,
    /// Least dot product of free and requested amounts.
    DotProd,
    /// Used GPUs first.
    GpuPacking,
    /// Nodes with pods of the same number of GPUs first.
    GpuClustering,
    /// At random.
    Random,
}

impl SimPolicy {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 9] = [
        Self::Product(Policy::Fragmentation),
        Self::Product(Policy::BinPack),
        Self::Product(Policy::Spread),
        Self::Fgd,
        Self::BestFit,
        Self::DotProd,
        Self::GpuPacking,
        Self::GpuClustering,
        Self::Random,
    ];

    /// Variants of `fragmentation` that show what each part gains.
    pub const ABLATIONS: [Self; 13] = [
        Self::KnownMix,
        Self::Without(CostTerm::ALL[0]),
        Self::Without(CostTerm::ALL[1]),
        Self::Without(CostTerm::ALL[2]),
        Self::Without(CostTerm::ALL[3]),
        Self::Without(CostTerm::ALL[4]),
        Self::Without(CostTerm::ALL[5]),
        Self::Without(CostTerm::ALL[6]),
        Self::Without(CostTerm::ALL[7]),
        Self::Without(CostTerm::ALL[8]),
        Self::Without(CostTerm::ALL[9]),
        Self::Without(CostTerm::ALL[10]),
        Self::Without(CostTerm::ALL[11]),
    ];

    /// The name that users type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Product(policy) => policy.name(),
            Self::KnownMix => "known-mix",
            Self::Without(CostTerm::Residuals) => "without-residuals",
            Self::Without(CostTerm::ResidualPrices) => "without-residual-prices",
            Self::Without(CostTerm::Doubt) => "without-doubt",
            Self::Without(CostTerm::Opening) => "without-opening",
            Self::Without(CostTerm::Host) => "without-host",
            Self::Without(CostTerm::Pieces) => "without-pieces",
            Self::Without(CostTerm::Several) => "without-several",
            Self::Without(CostTerm::KeptNodes) => "without-kept-nodes",
            Self::Without(CostTerm::Share) => "without-share",
            Self::Without(CostTerm::WholeNodes) => "without-whole-nodes",
            Self::Without(CostTerm::Scarce) => "without-scarce",
            Self::Without(CostTerm::Rare) => "without-rare",
            Self::Fgd => "fgd",
            Self::BestFit => "bestfit",
            Self::DotProd => "dotprod",
            Self::GpuPacking => "gpupacking",
            Self::GpuClustering => "gpuclustering",
            Self::Random => "random",
        }
    }

    /// Where the rule gets the request mix from.
    #[must_use]
    pub fn mix_source(self) -> MixSource {
        match self {
            Self::Product(Policy::Fragmentation) | Self::Without(_) => MixSource::Arrivals,
            Self::KnownMix | Self::Fgd => MixSource::Population,
            Self::Product(Policy::BinPack | Policy::Spread)
            | Self::BestFit
            | Self::DotProd
            | Self::GpuPacking
            | Self::GpuClustering
            | Self::Random => MixSource::None,
        }
    }

    /// The strategy for one call; `chance` is drawn only if the rule needs it.
    pub fn strategy(self, chance: impl FnOnce() -> u64) -> Strategy {
        let custom = |baseline| Strategy::Custom(CustomCost::new(baseline));
        match self {
            Self::Product(policy) => Strategy::Policy(policy),
            Self::KnownMix | Self::Without(_) => Strategy::Policy(Policy::Fragmentation),
            Self::Fgd => custom(Baseline::Fgd),
            Self::BestFit => custom(Baseline::BestFit),
            Self::DotProd => custom(Baseline::DotProd),
            Self::GpuPacking => custom(Baseline::GpuPacking),
            Self::GpuClustering => custom(Baseline::GpuClustering),
            Self::Random => custom(Baseline::Random { chance: chance() }),
        }
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

impl fmt::Display for SimPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no rule of the simulator has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no policy `{name}`; choose from {}, {}",
    SimPolicy::ALL.map(SimPolicy::name).join(", "),
    SimPolicy::ABLATIONS.map(SimPolicy::name).join(", ")
)]
pub struct UnknownSimPolicy {
    /// The offending name.
    pub name: String,
}

impl FromStr for SimPolicy {
    type Err = UnknownSimPolicy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let mut known = Self::ALL.into_iter().chain(Self::ABLATIONS);
        known
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownSimPolicy { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back_and_an_unknown_one_gets_the_list() {
        for policy in SimPolicy::ALL.into_iter().chain(SimPolicy::ABLATIONS) {
            assert_eq!(policy.name().parse(), Ok(policy));
        }
        let refused = "FGD".parse::<SimPolicy>().unwrap_err().to_string();
        assert_eq!(
            refused,
            "there is no policy `FGD`; choose from fragmentation, binpack, spread, fgd, bestfit, \
             dotprod, gpupacking, gpuclustering, random, known-mix, without-residuals, \
             without-residual-prices, without-doubt, without-opening, without-host, \
             without-pieces, without-several, without-kept-nodes, without-share, \
             without-whole-nodes, without-scarce, without-rare"
        );
    }

    #[test]
    fn only_the_random_policy_draws_random_numbers() {
        for policy in SimPolicy::ALL {
            let mut drawn = false;
            policy.strategy(|| {
                drawn = true;
                1
            });
            assert_eq!(drawn, policy == SimPolicy::Random, "{policy}");
        }
    }
}
