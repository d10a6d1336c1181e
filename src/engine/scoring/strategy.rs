//! The policies: which of the devices and nodes that fit is the best one.
//!
//! A policy gives every placement a [`Cost`], an ordered struct whose field order is the policy.
//! Smaller is better. Placements of equal cost are ordered by the name of the node, so the answer
//! is the same on every replica.

use std::cmp::{Ordering, Reverse};
use std::fmt::Debug;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::model::policy::Policy;
use crate::scoring::context::{ScoringContext, TakenList, total};
use crate::scoring::cost::{Cost, LocalCost};
use crate::scoring::node_waste;
use crate::waste::compiled_mix::CompiledMix;

/// Costs of another source than the policies of the product; only the simulator has any.
pub trait PlacementCost: Debug + Send + Sync {
    /// Its name. Under strategies of one name the same placements fit.
    fn name(&self) -> &'static str;

    /// The devices that it takes of those that fit, and its score: the highest is the best.
    fn choose(&self, context: &ScoringContext<'_>, mix: &CompiledMix) -> (i64, TakenList);

    /// Whether equal states give equal costs: then a cost can be kept until the node changes.
    fn is_repeatable(&self) -> bool {
        true
    }

    /// Whether the costs depend on the request mix.
    fn uses_mix(&self) -> bool {
        false
    }
}

/// A `PlacementCost`; equal to others of its name.
#[derive(Clone, Debug)]
pub struct CustomCost(Arc<dyn PlacementCost>);

impl CustomCost {
    /// Costs of this source.
    pub fn new(cost: impl PlacementCost + 'static) -> Self {
        Self(Arc::new(cost))
    }
}

impl PartialEq for CustomCost {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for CustomCost {}

impl PartialOrd for CustomCost {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for CustomCost {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.name().cmp(other.0.name())
    }
}

impl Hash for CustomCost {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.name().hash(state);
    }
}

/// What gives costs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Strategy {
    /// A policy of the product.
    Policy(Policy),
    /// Anything else, in the simulator.
    Custom(CustomCost),
}

impl Strategy {
    /// Whether equal states give equal costs: then a cost can be kept until the node changes.
    pub fn is_repeatable(&self) -> bool {
        match self {
            Self::Policy(_) => true,
            Self::Custom(cost) => cost.0.is_repeatable(),
        }
    }

    /// Whether the costs depend on the request mix.
    pub fn uses_mix(&self) -> bool {
        match self {
            Self::Policy(policy) => *policy == Policy::Fragmentation,
            Self::Custom(cost) => cost.0.uses_mix(),
        }
    }
}

impl Strategy {
    /// The devices that this strategy takes on a node, and their cost.
    pub(crate) fn choose(
        &self,
        context: &ScoringContext<'_>,
        mix: &CompiledMix,
    ) -> (LocalCost, TakenList) {
        if let (Self::Policy(Policy::Fragmentation), Some(expected_waste)) =
            (self, &mix.expected_waste)
        {
            let making = context.making(mix);
            let (waste_change, taken) =
                node_waste::choose(expected_waste, context, &mix.typical, &making);
            return (
                LocalCost::WasteChange(
                    context.instance_mib(&taken),
                    waste_change,
                    context.ties(&taken),
                ),
                taken,
            );
        }
        let (cost, taken) = self.cost(context, mix);
        (LocalCost::Ranked(cost), taken)
    }

    fn cost(&self, context: &ScoringContext<'_>, mix: &CompiledMix) -> (Cost, TakenList) {
        match self {
            // Before the first request there is nothing to expect.
            Self::Policy(Policy::BinPack | Policy::Fragmentation) => {
                let making = context.making(mix);
                let taken = context.first_by(|fit| {
                    let (position, demand) = fit;
                    let made_for = making.of(std::slice::from_ref(fit));
                    let left = context.left(*position, *demand);
                    (context.is_empty(*position), made_for, left, context.free_units(*position))
                });
                let cost = Cost::BinPack {
                    instance_mib: context.instance_mib(&taken),
                    devices_opened: taken.iter().filter(|(at, _)| context.is_empty(*at)).count(),
                    left_on_devices: total(taken.iter().map(|(at, d)| context.left(*at, *d))),
                    left_on_node: context.left_on_node(&taken),
                    ties: context.ties(&taken),
                };
                (cost, taken)
            }
            Self::Policy(Policy::Spread) => {
                let taken = context.first_by(|(position, demand)| {
                    (context.tenants(*position), Reverse(context.left(*position, *demand)))
                });
                let cost = Cost::Spread {
                    instance_mib: context.instance_mib(&taken),
                    tenants_met: taken.iter().map(|(at, _)| context.tenants(*at)).sum(),
                    left_on_devices: Reverse(total(
                        taken.iter().map(|(at, d)| context.left(*at, *d)),
                    )),
                    left_on_node: Reverse(context.left_on_node(&taken)),
                    ties: context.ties(&taken),
                };
                (cost, taken)
            }
            Self::Custom(custom) => {
                let (score, taken) = custom.0.choose(context, mix);
                (Cost::Custom { score: Reverse(score) }, taken)
            }
        }
    }
}

#[cfg(test)]
mod tests;
