//! The placement rules that the simulator can replay, under the names users type.
//!
//! The product's policies come first. The others are the yardsticks of the FGD paper (USENIX ATC'23,
//! "Beware of Fragmentation"); they exist in the simulator only.

use std::fmt;
use std::str::FromStr;

use crate::packing::baseline::Baseline;
use crate::packing::policy::{Policy, Strategy};

/// A placement rule of the simulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SimPolicy {
    /// A policy of the product as it serves pods. `fragmentation` learns the request mix from the
    /// arrivals, as it does in a cluster.
    Product(Policy),
    /// The paper's policy. The request mix is known beforehand.
    Fgd,
    /// Least left of CPU and GPU.
    BestFit,
    /// Least dot product of free and asked.
    DotProd,
    /// Used GPUs first.
    GpuPacking,
    /// Nodes with pods of the same number of GPUs first.
    GpuClustering,
    /// By chance.
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

    /// The name users type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Product(policy) => policy.name(),
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
            Self::Product(Policy::Fragmentation) => MixSource::Arrivals,
            Self::Fgd => MixSource::Population,
            Self::Product(Policy::BinPack | Policy::Spread)
            | Self::BestFit
            | Self::DotProd
            | Self::GpuPacking
            | Self::GpuClustering
            | Self::Random => MixSource::None,
        }
    }

    /// The strategy for one question; `chance` is drawn only where the rule plays with it.
    pub fn strategy(self, chance: impl FnOnce() -> u64) -> Strategy {
        match self {
            Self::Product(policy) => Strategy::Policy(policy),
            Self::Fgd => Strategy::Baseline(Baseline::Fgd),
            Self::BestFit => Strategy::Baseline(Baseline::BestFit),
            Self::DotProd => Strategy::Baseline(Baseline::DotProd),
            Self::GpuPacking => Strategy::Baseline(Baseline::GpuPacking),
            Self::GpuClustering => Strategy::Baseline(Baseline::GpuClustering),
            Self::Random => Strategy::Baseline(Baseline::Random { chance: chance() }),
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
#[error("there is no policy `{name}`; choose from {}", SimPolicy::ALL.map(SimPolicy::name).join(", "))]
pub struct UnknownSimPolicy {
    /// The offending name.
    pub name: String,
}

impl FromStr for SimPolicy {
    type Err = UnknownSimPolicy;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name)
            .ok_or_else(|| UnknownSimPolicy { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back_and_another_one_is_answered_with_the_list() {
        for policy in SimPolicy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
        }
        let refused = "FGD".parse::<SimPolicy>().unwrap_err().to_string();
        assert_eq!(
            refused,
            "there is no policy `FGD`; choose from fragmentation, binpack, spread, fgd, bestfit, \
             dotprod, gpupacking, gpuclustering, random"
        );
    }

    #[test]
    fn chance_is_drawn_by_the_rule_that_plays_with_it_only() {
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
