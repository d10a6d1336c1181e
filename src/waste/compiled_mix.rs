//! The request mix, worked out for the classes of devices and the nodes of a cluster.

use crate::hardware::device_class::DeviceClasses;
use crate::waste::expected_waste::ExpectedWaste;
use crate::waste::mix_rows::MixRows;
use crate::waste::request_mix::Mix;
use crate::waste::scarcity::ScarcityPrices;
use crate::waste::supply::{NodeShapes, Supply};
use crate::waste::term::CostTerm;

/// A mix worked out for every class of device.
#[derive(Clone, Debug)]
pub struct CompiledMix {
    /// The typical requests: what fragmentation is measured by.
    pub(crate) typical: MixRows,
    /// What all requests together make of free room; none before the first request for a GPU.
    pub(crate) expected_waste: Option<ExpectedWaste>,
}

impl CompiledMix {
    /// Works out what each type means on each class of device, and what is to be expected of a
    /// cluster with the nodes of `census`.
    pub fn of(mix: &Mix, classes: &DeviceClasses, node_shapes: &NodeShapes) -> Self {
        Self::without(None, mix, classes, node_shapes)
    }

    /// The same with a part of the judgement left out.
    pub fn without(
        left_out: Option<CostTerm>,
        mix: &Mix,
        classes: &DeviceClasses,
        node_shapes: &NodeShapes,
    ) -> Self {
        let typical = mix.typical().iter().map(|(kind, tally)| (kind, tally.pods));
        Self {
            typical: MixRows::of(typical, classes),
            expected_waste: ExpectedWaste::new(&mix.types, classes, node_shapes, left_out),
        }
    }

    /// No mix at all, for questions that need none.
    pub fn none() -> Self {
        Self::of(&Mix::default(), &DeviceClasses::default(), &NodeShapes::default())
    }

    /// What the cluster is short of, with what is free of it now.
    pub fn prices(&self, supply: &Supply, has_gpu: bool) -> ScarcityPrices {
        let expected_waste = self.expected_waste.as_ref();
        expected_waste.map_or_else(ScarcityPrices::default, |expected_waste| {
            expected_waste.prices(supply, has_gpu)
        })
    }
}
