//! The request mix, compiled for the device classes and the nodes of a cluster.

use std::sync::Arc;

use crate::hardware::device_class::DeviceClasses;
use crate::hardware::spots::DividedGpu;
use crate::waste::expected_waste::ExpectedWaste;
use crate::waste::mig::potentials::Potentials;
use crate::waste::mix_rows::MixRows;
use crate::waste::request_mix::Mix;
use crate::waste::scarcity::ScarcityPrices;
use crate::waste::supply::{NodeShapes, Supply};
use crate::waste::weights::WasteWeights;

/// A mix compiled for every device class.
#[derive(Clone, Debug)]
pub struct CompiledMix {
    /// The typical requests, by which fragmentation is measured.
    pub typical: MixRows,
    /// The expected waste by all requests together; `None` before the first request for a GPU.
    pub(crate) expected_waste: Option<ExpectedWaste>,
    /// What MIG instances cost that are made on demand.
    pub(crate) potentials: Arc<Potentials>,
}

impl CompiledMix {
    /// Compiles each type for each device class, and estimates the waste on a cluster with
    /// `node_shapes`.
    pub fn of(mix: &Mix, classes: &DeviceClasses, node_shapes: &NodeShapes) -> Self {
        Self::weighted(&WasteWeights::default(), mix, classes, node_shapes)
    }

    /// The same with these weights of the terms of the estimate.
    pub fn weighted(
        weights: &WasteWeights,
        mix: &Mix,
        classes: &DeviceClasses,
        node_shapes: &NodeShapes,
    ) -> Self {
        let typical = mix.typical().iter().map(|(kind, tally)| (kind, tally.pods));
        Self {
            typical: MixRows::of(typical, classes),
            expected_waste: ExpectedWaste::new(mix, classes, node_shapes, weights),
            potentials: Arc::default(),
        }
    }

    /// The same with what it costs to make MIG instances on these GPUs. `earlier` saves time.
    #[must_use]
    pub fn with_divided(self, mix: &Mix, gpus: &[DividedGpu], earlier: &Self) -> Self {
        Self { potentials: Arc::new(Potentials::of(mix, gpus, &earlier.potentials)), ..self }
    }

    /// The same with the costs of MIG instances that an `earlier` one has.
    #[must_use]
    pub fn with_costs_of(self, earlier: &Self) -> Self {
        Self { potentials: Arc::clone(&earlier.potentials), ..self }
    }

    /// No mix at all, for requests that need none.
    pub fn none() -> Self {
        Self::of(&Mix::default(), &DeviceClasses::default(), &NodeShapes::default())
    }

    /// The scarcity prices with the room that is free now.
    pub fn prices(&self, supply: &Supply, has_gpu: bool) -> ScarcityPrices {
        let expected_waste = self.expected_waste.as_ref();
        expected_waste.map_or_else(ScarcityPrices::default, |expected_waste| {
            expected_waste.prices(supply, has_gpu)
        })
    }
}
