//! Expected waste: how much of the free room the requests of the mix will not use.
//!
//! These are estimates, not amounts of the ledger. So they are floating-point numbers, here, in
//! `residual`, in `scarcity` and in `scoring/node_waste`. They use only operations that IEEE 754
//! rounds exactly and the functions of the `libm` crate, so they are equal on every machine. The
//! unit of waste is one GPU.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use crate::hardware::device_class::{ClassId, ClassKind, DeviceClasses};
use crate::model::request::{Amount, GpuRequest};
use crate::waste::demand::{WeightedRequest, WholeNodePrior};
use crate::waste::mix_rows::MixRows;
use crate::waste::numbers::{fixed, float, gpus};
use crate::waste::request_mix::{Mix, RequestType, Tally};
use crate::waste::residual::Residuals;
use crate::waste::scarcity::{Scarcity, ScarcityPrices};
use crate::waste::supply::{NodeShapes, Supply};
use crate::waste::weights::WasteWeights;
use wire::units::{Demand, HostAmount, MilliCpu, Share};

/// Load of CPU over load of GPUs above which CPU is expected to run out first: 1 plus two standard
/// deviations of the ratio in a window of the mix (0.01 to 0.02 each on the public trace).
const CPU_SHORT: f64 = 1.05;

/// Length of the table of unused CPU, in half cores: 256 cores.
const HALF_CORES: usize = 512;

/// What the mix says about the use of free room.
#[derive(Clone, Debug)]
pub(crate) struct ExpectedWaste {
    pub(crate) residuals: Residuals,
    needs: Vec<FourNeeds>,
    /// Requests of several devices, each weighted by its part of the GPU demand.
    pub(crate) requests_of_several: MixRows,
    /// Part of all GPU demand that is in requests of several devices.
    several_part: f64,
    scarcity: Scarcity,
    pressure: Pressure,
    /// Waste of opening an empty GPU, in GPUs.
    opening: f64,
    /// The worth of having free GPUs together on one node, over the square of their number.
    together: f64,
    weights: WasteWeights,
}

/// A request for all GPUs of the largest node, if that has several.
fn whole_node(node_shapes: &NodeShapes) -> Option<RequestType> {
    let count = u32::try_from(node_shapes.largest())
        .ok()
        .filter(|count| *count > 1)
        .and_then(NonZeroU32::new)?;
    let request = GpuRequest::several(Amount::Whole, count);
    Some(RequestType::new(Some(&request), MilliCpu::ZERO))
}

/// What it wastes to open an empty GPU although a residual would do. With few requests seen, or few
/// GPUs, the pods that would fill both exactly may never come.
fn opening(requests: f64, node_shapes: &NodeShapes, weight: f64) -> f64 {
    let among = requests.min(float(node_shapes.gpus()));
    weight / libm::sqrt(among.max(1.0))
}

/// What parts of the GPU demand need of the node beside each GPU. Four side by side, so that four
/// sums grow at once; unused ones at the end are zero.
#[derive(Clone, Copy, Debug, Default)]
struct FourNeeds {
    part: [f64; 4],
    gpus_per_cpu: [f64; 4],
    gpus_per_memory: [f64; 4],
}

/// How to leave CPU free if it runs out before the GPUs: in small pieces.
#[derive(Clone, Debug)]
struct Pressure {
    /// Weight; zero if there is enough CPU.
    weight: f64,
    /// GPUs per thousandth of a core, over the cluster.
    gpus_per_cpu: f64,
    /// By half cores that are free: what pods without a GPU leave unused of them, in thousandths of
    /// a core.
    rest: Vec<f64>,
}

impl ExpectedWaste {
    /// The expected waste for `mix`. `None` if it requests no GPU, or if no GPU can be shared.
    pub(crate) fn new(
        mix: &Mix,
        classes: &DeviceClasses,
        node_shapes: &NodeShapes,
        weights: &WasteWeights,
    ) -> Option<Self> {
        let types = &mix.types[..];
        let kinds: Vec<WeightedRequest<'_>> = types
            .iter()
            .map(|(kind, tally)| weighted_request(kind, *tally, classes, node_shapes))
            .collect();
        let demand: f64 = kinds.iter().map(|kind| kind.weight * kind.gpus).sum();
        if demand <= 0.0 {
            return None;
        }
        let several: Vec<(&RequestType, u64)> = types
            .iter()
            .zip(&kinds)
            .filter(|(_, kind)| kind.request.is_some_and(|request| request.count.get() > 1))
            .map(|((of, _), kind)| {
                (of, fixed(kind.weight * kind.gpus / demand, 1e6).unsigned_abs())
            })
            .collect();
        let whole_node = whole_node(node_shapes);
        let requests: f64 = kinds.iter().map(|kind| kind.weight).sum();
        let turnover = weights.turnover * float(mix.turnover) / 1e6;
        let pieces = weights.pieces * (1.0 - turnover);
        let prior = WholeNodePrior::after(requests, weights.whole_nodes);
        let several = several.into_iter().map(|(kind, part)| (kind, prior.known(part)));
        let added = whole_node.as_ref().map(|kind| (kind, prior.added()));
        let several = MixRows::of(several.chain(added), classes);
        Some(Self {
            residuals: Residuals::new(types, classes, weights.price_rounds),
            needs: needs(&kinds, demand, node_shapes),
            several_part: float(several.total) / 1e6,
            requests_of_several: several,
            scarcity: Scarcity::new(&kinds, demand, classes, node_shapes, prior, weights),
            pressure: Pressure::new(&kinds, demand, node_shapes, pieces),
            together: weights.together * turnover,
            opening: opening(requests, node_shapes, weights.opening),
            weights: WasteWeights {
                residuals: weights.residuals * requests / (requests + weights.doubt),
                ..*weights
            },
        })
    }

    /// The scarcity prices with the room that is free now.
    pub(crate) fn prices(&self, supply: &Supply, has_gpu: bool) -> ScarcityPrices {
        self.scarcity.prices(supply, has_gpu)
    }

    /// Expected waste in the residual `left` of a device, in GPUs; see [`Residuals::waste`].
    pub(crate) fn residual(&self, class: ClassId, left: Demand) -> f64 {
        let is_empty = left.share >= Share::WHOLE;
        let kept = if is_empty { self.opening } else { 0.0 };
        let waste = self.residuals.waste(class, left);
        waste.map_or(0.0, |waste| self.weights.residuals * waste - kept)
    }

    /// Expected waste for lack of CPU or host memory beside `free` millionths of GPUs, less the worth of having
    /// the others together on this node.
    pub(crate) fn host(&self, free: u64, host: HostAmount) -> f64 {
        let cpu = float(host.cpu.milli());
        let free = float(free) / 1e6;
        let unserved = self.unserved(free, cpu, float(host.memory.mib()));
        let served = free - unserved;
        self.weights.host * unserved + self.pressure.waste(cpu) - self.together * served * served
    }

    /// Room that requests of several devices cannot use, weighted by their part of the demand.
    pub(crate) fn several(&self, fragments: i128) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "estimates need no more than 53 bits")]
        let fragments = fragments as f64;
        fragments / float(self.requests_of_several.total.max(1)) / 1e6 * self.several_part
    }

    /// Cost of taking `share` millionths of GPUs that can be shared. It only matters for a request
    /// that takes more of one class than of another: one of memory.
    pub(crate) fn taking(&self, share: u64) -> f64 {
        self.weights.share * float(share) / 1e6
    }

    /// GPUs of `free` that stay unused for lack of CPU or host memory. The mean over the parts of
    /// the demand, each taken as if it were alone on the node.
    fn unserved(&self, free: f64, cpu: f64, memory: f64) -> f64 {
        if free <= 0.0 {
            return 0.0;
        }
        let (cpu, memory) = (cpu / free, memory / free);
        // Always in the same order, so the sum is the same on every machine. Nothing here can be
        // NaN, which `f64::min` and `max` would check for.
        let mut sums = [0.0; 4];
        for four in &self.needs {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let by_cpu = cpu * four.gpus_per_cpu[lane];
                let by_memory = memory * four.gpus_per_memory[lane];
                let served = if by_cpu < by_memory { by_cpu } else { by_memory };
                let unserved = 1.0 - served;
                *sum += four.part[lane] * if unserved > 0.0 { unserved } else { 0.0 };
            }
        }
        free * (sums[0] + sums[1] + (sums[2] + sums[3]))
    }
}

/// The needs of GPU demand. Needs that differ by less than a quarter are merged, so that there are
/// a few dozen at most.
fn needs(kinds: &[WeightedRequest<'_>], demand: f64, node_shapes: &NodeShapes) -> Vec<FourNeeds> {
    let gpus = float(node_shapes.gpus());
    let (cpu, memory) = node_shapes.host();
    let usual = ((cpu / gpus).max(1.0), (memory / gpus).max(1.0));
    let mut sums: BTreeMap<(i64, i64), (f64, f64, f64)> = BTreeMap::new();
    for kind in kinds.iter().filter(|kind| kind.gpus > 0.0) {
        let part = kind.weight * kind.gpus / demand;
        let cpu = (kind.cpu / kind.gpus).max(usual.0 * 1e-9);
        let memory = (kind.memory / kind.gpus).max(usual.1 * 1e-9);
        let sum = sums.entry((grid(cpu, usual.0), grid(memory, usual.1))).or_default();
        sum.0 += part;
        sum.1 += part * cpu;
        sum.2 += part * memory;
    }
    let sums: Vec<(f64, f64, f64)> = sums.into_values().collect();
    let mut needs = vec![FourNeeds::default(); sums.len().div_ceil(4)];
    for (at, (part, cpu, memory)) in sums.into_iter().enumerate() {
        let (four, lane) = (&mut needs[at / 4], at % 4);
        four.part[lane] = part;
        four.gpus_per_cpu[lane] = part / cpu;
        four.gpus_per_memory[lane] = part / memory;
    }
    needs
}

/// How far a value is from what is usual, in steps of about a quarter.
fn grid(value: f64, usual: f64) -> i64 {
    fixed(4.0 * libm::log(value / usual), 1.0)
}

impl Pressure {
    fn new(
        kinds: &[WeightedRequest<'_>],
        demand: f64,
        node_shapes: &NodeShapes,
        pieces: f64,
    ) -> Self {
        let gpus_per_cpu = float(node_shapes.gpus()) / node_shapes.host().0.max(1.0);
        let requested: f64 = kinds.iter().map(|kind| kind.weight * kind.cpu).sum();
        let load = requested / demand * gpus_per_cpu;
        let weight = pieces * (40.0 * (load - CPU_SHORT)).clamp(0.0, 2.0);
        Self { weight, gpus_per_cpu, rest: rest(kinds) }
    }

    /// Expected waste of `cpu` thousandths of a core that are free on one node.
    fn waste(&self, cpu: f64) -> f64 {
        let gpus = cpu * self.gpus_per_cpu;
        let half_cores = fixed(libm::floor(cpu / 500.0), 1.0);
        let rest = usize::try_from(half_cores).unwrap_or(0).min(HALF_CORES);
        self.weight * (gpus * gpus / 4.0 - self.rest[rest] * self.gpus_per_cpu)
    }
}

/// By half cores that are free: what pods without a GPU leave unused of them if all are of one
/// type; the mean over the types, weighted by CPU.
fn rest(kinds: &[WeightedRequest<'_>]) -> Vec<f64> {
    let mut rest = vec![0.0; HALF_CORES + 1];
    let without_gpu = kinds.iter().filter(|kind| kind.request.is_none() && kind.cpu > 0.0);
    let all: f64 = without_gpu.clone().map(|kind| kind.weight * kind.cpu).sum();
    for kind in without_gpu {
        let part = kind.weight * kind.cpu / all;
        for (free, rest) in
            (0..).map(|half_cores: u32| f64::from(half_cores) * 500.0).zip(&mut rest)
        {
            *rest += part * (free - libm::floor(free / kind.cpu) * kind.cpu);
        }
    }
    rest
}

fn weighted_request<'a>(
    kind: &'a RequestType,
    tally: Tally,
    classes: &DeviceClasses,
    node_shapes: &NodeShapes,
) -> WeightedRequest<'a> {
    let request = kind.gpu.as_ref();
    let share = classes.map(|class| {
        let demand = request.and_then(|request| request.demand_on(class).ok());
        demand.filter(|_| class.kind == ClassKind::Gpu).map(|demand| gpus(demand.share))
    });
    let (mut sum, mut there) = (0.0, 0.0);
    for (shape, nodes) in node_shapes.shapes() {
        if let Some(share) = share.of(shape.class) {
            let devices = float(nodes * shape.gpus);
            sum += devices * share;
            there += devices;
        }
    }
    let devices = request.map_or(0.0, |request| f64::from(request.count.get()));
    WeightedRequest {
        request,
        cpu: float(kind.cpu.milli()),
        memory: float(tally.memory) / float(tally.pods.max(1)),
        weight: float(tally.pods),
        gpus: if there > 0.0 { devices * sum / there } else { 0.0 },
    }
}

#[cfg(test)]
mod tests;
