//! The request mix, worked out for the classes of devices and the nodes of a cluster.

use crate::hardware::device_class::DeviceClasses;
use crate::waste::expected_waste::Forecast;
use crate::waste::mix_rows::MixRows;
use crate::waste::request_mix::Mix;
use crate::waste::scarcity::Prices;
use crate::waste::supply::{Census, Supply};
use crate::waste::term::Term;

/// A mix worked out for every class of device.
#[derive(Clone, Debug)]
pub struct CompiledMix {
    /// The typical requests: what fragmentation is measured by.
    pub(crate) typical: MixRows,
    /// What all requests together make of free room; none before the first request for a GPU.
    pub(crate) forecast: Option<Forecast>,
}

impl CompiledMix {
    /// Works out what each type means on each class of device, and what is to be expected of a
    /// cluster with the nodes of `census`.
    pub fn of(mix: &Mix, classes: &DeviceClasses, census: &Census) -> Self {
        Self::without(None, mix, classes, census)
    }

    /// The same with a part of the judgement left out.
    pub fn without(
        left_out: Option<Term>,
        mix: &Mix,
        classes: &DeviceClasses,
        census: &Census,
    ) -> Self {
        let typical = mix.typical().iter().map(|(kind, tally)| (kind, tally.pods));
        Self {
            typical: MixRows::of(typical, classes),
            forecast: Forecast::new(&mix.types, classes, census, left_out),
        }
    }

    /// No mix at all, for questions that need none.
    pub fn none() -> Self {
        Self::of(&Mix::default(), &DeviceClasses::default(), &Census::default())
    }

    /// What the cluster is short of, with what is free of it now.
    pub fn prices(&self, supply: &Supply, has_gpu: bool) -> Prices {
        let forecast = self.forecast.as_ref();
        forecast.map_or_else(Prices::default, |forecast| forecast.prices(supply, has_gpu))
    }
}
