//! The requests of a mix, compiled for each device class.

use std::collections::BTreeMap;

use crate::hardware::device_class::{DeviceClass, DeviceClasses, PerClass};
use crate::model::request::GpuRequest;
use crate::waste::request_mix::RequestType;
use wire::units::{Demand, MilliCpu};

/// Requests compiled for every device class.
#[derive(Clone, Debug)]
pub struct MixRows {
    /// One row per GPU request; types that differ only in CPU share a row. Types without a GPU have
    /// none, as they use no GPU room.
    pub(crate) rows: Vec<MixRow>,
    /// Sum of the weights of all types, those without a GPU included.
    pub(crate) total: u64,
    /// Whether room on a device of this class counts. A device that is allocated whole has no
    /// fragments.
    pub(crate) shareable: PerClass<bool>,
}

impl MixRows {
    /// The rows of `types` with their weights.
    pub(crate) fn of<'a>(
        types: impl Iterator<Item = (&'a RequestType, u64)>,
        classes: &DeviceClasses,
    ) -> Self {
        let mut by_request: BTreeMap<&GpuRequest, BTreeMap<MilliCpu, u64>> = BTreeMap::new();
        let mut total = 0;
        for (kind, weight) in types {
            total += weight;
            let Some(request) = &kind.gpu else { continue };
            *by_request.entry(request).or_default().entry(kind.cpu).or_default() += weight;
        }
        let rows = by_request.into_iter().map(|(request, weights)| MixRow {
            count: request.count.get(),
            demand: classes.map(|class| request.demand_on(class).ok()),
            weights: running_sums(weights),
        });
        let shareable = classes.map(DeviceClass::is_shareable);
        Self { rows: rows.collect(), total, shareable }
    }
}

pub(crate) fn running_sums(weights: BTreeMap<MilliCpu, u64>) -> Vec<(MilliCpu, u64)> {
    let mut sum = 0;
    let sums = weights.into_iter().map(|(cpu, weight)| {
        sum += weight;
        (cpu, sum)
    });
    sums.collect()
}

/// The typical requests with one GPU request.
#[derive(Clone, Debug)]
pub(crate) struct MixRow {
    /// How many devices each needs.
    pub(crate) count: u32,
    /// What each takes of a device; `None` if it can never run there.
    pub(crate) demand: PerClass<Option<Demand>>,
    /// How often a request for at most this much CPU was seen; ascending.
    weights: Vec<(MilliCpu, u64)>,
}

impl MixRow {
    /// How often a request was seen that needs no more than `cpu`.
    pub(crate) fn weight_within(&self, cpu: MilliCpu) -> u64 {
        let affordable = self.weights.partition_point(|(needed, _)| *needed <= cpu);
        affordable.checked_sub(1).map_or(0, |last| self.weights[last].1)
    }
}
