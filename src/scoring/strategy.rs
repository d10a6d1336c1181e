//! The policies: which of the devices and nodes that fit is the best one.
//!
//! A policy gives every placement a [`Cost`], an ordered struct whose field order is the policy.
//! Smaller is better. Placements of equal cost are ordered by the name of the node, so the answer
//! is the same on every replica.

use std::cmp::Reverse;

use crate::model::policy::Policy;
use crate::scoring::baseline::Baseline;
use crate::scoring::context::{ScoringContext, TakenList, total};
use crate::scoring::cost::{Cost, LocalCost};
use crate::scoring::node_waste;
use crate::waste::compiled_mix::CompiledMix;

/// What gives costs: a policy of the product, or a baseline of the literature in the simulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Strategy {
    /// A policy of the product.
    Policy(Policy),
    /// A baseline of the literature.
    Baseline(Baseline),
}

impl Strategy {
    /// Whether equal states give equal costs: then a cost can be kept until the node changes.
    pub fn is_repeatable(self) -> bool {
        match self {
            Self::Policy(_) => true,
            Self::Baseline(baseline) => !matches!(baseline, Baseline::Random { .. }),
        }
    }

    /// The strategy without the chance of this call; the same placements fit under both.
    pub fn without_chance(self) -> Self {
        match self {
            Self::Baseline(Baseline::Random { .. }) => {
                Self::Baseline(Baseline::Random { chance: 0 })
            }
            Self::Policy(_) | Self::Baseline(_) => self,
        }
    }

    /// Whether the costs depend on the request mix.
    pub fn uses_mix(self) -> bool {
        matches!(self, Self::Policy(Policy::Fragmentation) | Self::Baseline(Baseline::Fgd))
    }
}

impl Strategy {
    /// The devices that this strategy takes on a node, and their cost.
    pub(crate) fn choose(
        self,
        context: &ScoringContext<'_>,
        mix: &CompiledMix,
    ) -> (LocalCost, TakenList) {
        if let (Self::Policy(Policy::Fragmentation), Some(expected_waste)) =
            (self, &mix.expected_waste)
        {
            let (waste_change, taken) = node_waste::choose(expected_waste, context, &mix.typical);
            return (
                LocalCost::WasteChange(
                    context.instance_mib(&taken),
                    waste_change,
                    context.reach(&taken),
                ),
                taken,
            );
        }
        let (rank, taken) = self.rank(context, mix);
        (LocalCost::Ranked(rank), taken)
    }

    fn rank(self, context: &ScoringContext<'_>, mix: &CompiledMix) -> (Cost, TakenList) {
        match self {
            // Before the first request there is nothing to expect.
            Self::Policy(Policy::BinPack | Policy::Fragmentation) => {
                let taken = context.first_by(|(position, demand)| {
                    (context.is_empty(*position), context.left(*position, *demand))
                });
                let rank = Cost::BinPack {
                    instance_mib: context.instance_mib(&taken),
                    devices_opened: taken.iter().filter(|(at, _)| context.is_empty(*at)).count(),
                    left_on_devices: total(taken.iter().map(|(at, d)| context.left(*at, *d))),
                    left_on_node: context.left_on_node(&taken),
                    reach: context.reach(&taken),
                };
                (rank, taken)
            }
            Self::Policy(Policy::Spread) => {
                let taken = context.first_by(|(position, demand)| {
                    (context.tenants(*position), Reverse(context.left(*position, *demand)))
                });
                let rank = Cost::Spread {
                    instance_mib: context.instance_mib(&taken),
                    tenants_met: taken.iter().map(|(at, _)| context.tenants(*at)).sum(),
                    left_on_devices: Reverse(total(
                        taken.iter().map(|(at, d)| context.left(*at, *d)),
                    )),
                    left_on_node: Reverse(context.left_on_node(&taken)),
                    reach: context.reach(&taken),
                };
                (rank, taken)
            }
            Self::Baseline(baseline) => baseline.choose(context, mix),
        }
    }
}

#[cfg(test)]
mod tests;
