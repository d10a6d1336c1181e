//! What is to be expected of free room: how much of it will end as waste, given what is asked for.
//!
//! Estimates, not books: here, in `holes` and in `prices` numbers are floating. They use only operations
//! that IEEE 754 rounds exactly and the functions of the `libm` crate, so they are equal on every
//! machine. Every waste is in GPUs.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroU32;

use super::device::{ClassId, ClassKind, DeviceClasses};
use super::fit::Room;
use super::fragmentation::Usability;
use super::holes::Holes;
use super::mix::{MixRows, RequestType, Tally};
use super::policy::{Scene, Taken};
use super::prices::{Prices, Scarcity, Worth};
use super::request::{Amount, GpuRequest};
use super::supply::{Census, Supply};
use super::units::{HostAmount, MilliCpu, Share};

/// GPUs of waste that a wasted GPU in holes counts for.
const HOLE: f64 = 5.0;

/// The same for GPU share that processor time and memory of the node will not serve.
const HOST: f64 = 2.0;

/// Requests after which the need of processor time is believed.
const BELIEVED: f64 = 1000.0;

/// Requests that what is believed beforehand counts for.
const PRIOR: f64 = 50.0;

/// Part of GPU demand that is believed beforehand to come for whole nodes.
const WHOLE_NODES: f64 = 0.3;

/// Half cores up to which the rest of processor time is tabled: 256 cores.
const HALF_CORES: usize = 512;

/// What the mix says about the use of free room.
#[derive(Clone, Debug)]
pub(super) struct Forecast {
    holes: Holes,
    needs: Vec<Need>,
    several: MixRows,
    /// Part of all GPU demand that comes in requests of several devices.
    several_part: f64,
    scarcity: Scarcity,
    pressure: Pressure,
}

/// One type of request with what it is expected to take.
pub(super) struct Kind<'a> {
    /// The request; none for a pod without GPU.
    pub(super) request: Option<&'a GpuRequest>,
    /// Processor time, in thousandths of a core.
    pub(super) cpu: f64,
    /// Main memory, in MiB: the mean.
    pub(super) memory: f64,
    /// How often it was seen.
    pub(super) weight: f64,
    /// Share on all its devices together: the mean over the cluster's GPUs that it accepts.
    pub(super) gpus: f64,
}

/// What is believed of requests for whole nodes before much has been asked for: a job of that kind is
/// rare and large, and where no node is left for it when it comes, it waits longest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// Part of the belief that is not from requests.
    prior: f64,
}

impl Expected {
    /// After so many requests.
    fn after(requests: f64) -> Self {
        Self { prior: PRIOR / (requests + PRIOR) }
    }

    /// The part of all GPU demand that is taken to be for whole nodes, in millionths.
    fn prior(self) -> u64 {
        fixed(self.prior * WHOLE_NODES, 1e6).unsigned_abs()
    }

    /// What remains of a part of the demand that was seen.
    fn known(self, part: u64) -> u64 {
        fixed(float(part) * (1.0 - self.prior), 1.0).unsigned_abs()
    }

    /// The same for all demand by number of devices.
    pub(super) fn by_count(self, census: &Census, parts: &mut BTreeMap<usize, f64>) {
        parts.values_mut().for_each(|part| *part *= 1.0 - self.prior);
        let largest = usize::try_from(census.largest()).unwrap_or(usize::MAX);
        if largest > 1 {
            *parts.entry(largest).or_default() += self.prior * WHOLE_NODES;
        }
    }
}

/// A request for all GPUs of the largest node, where that has several.
fn whole_node(census: &Census) -> Option<RequestType> {
    let count = u32::try_from(census.largest())
        .ok()
        .filter(|count| *count > 1)
        .and_then(NonZeroU32::new)?;
    let request = GpuRequest::several(Amount::Whole, count);
    Some(RequestType::new(Some(&request), MilliCpu::ZERO))
}

/// What a part of GPU demand needs of the node beside each GPU.
#[derive(Clone, Copy, Debug)]
struct Need {
    part: f64,
    gpus_per_cpu: f64,
    gpus_per_memory: f64,
}

/// How processor time is best left free.
#[derive(Clone, Debug)]
struct Pressure {
    /// Above zero in small pieces, below zero in large ones.
    weight: f64,
    /// GPUs per thousandth of a core, over the cluster.
    gpus_per_cpu: f64,
    /// By half cores: what pods without a GPU leave unused of so much, in thousandths of a core.
    rest: Vec<f64>,
}

impl Forecast {
    /// The forecast for `types`; none where they ask for no GPU, or no GPU is there to be shared.
    pub(super) fn new(
        types: &[(RequestType, Tally)],
        classes: &DeviceClasses,
        census: &Census,
    ) -> Option<Self> {
        let kinds: Vec<Kind<'_>> =
            types.iter().map(|(kind, tally)| kind_of(kind, *tally, classes, census)).collect();
        let demand: f64 = kinds.iter().map(|kind| kind.weight * kind.gpus).sum();
        if demand <= 0.0 {
            return None;
        }
        let is_several = |kind: &&GpuRequest| kind.count.get() > 1;
        let several: Vec<(&RequestType, u64)> = types
            .iter()
            .zip(&kinds)
            .filter(|(_, kind)| kind.request.filter(is_several).is_some())
            .map(|((of, _), kind)| {
                (of, fixed(kind.weight * kind.gpus / demand, 1e6).unsigned_abs())
            })
            .collect();
        let whole_node = whole_node(census);
        let expected = Expected::after(kinds.iter().map(|kind| kind.weight).sum());
        let several = several.into_iter().map(|(kind, part)| (kind, expected.known(part)));
        let prior = whole_node.as_ref().map(|kind| (kind, expected.prior()));
        let several = MixRows::of(several.chain(prior), classes);
        Some(Self {
            holes: Holes::new(types, classes),
            needs: needs(&kinds, demand, census),
            several_part: float(several.total) / 1e6,
            several,
            scarcity: Scarcity::new(&kinds, demand, classes, census, expected),
            pressure: Pressure::new(&kinds, demand, census),
        })
    }

    /// What the cluster is short of, with what is free of it now.
    pub(super) fn prices(&self, supply: &Supply, has_gpu: bool) -> Prices {
        self.scarcity.prices(supply, has_gpu)
    }

    /// The devices whose use leaves the node's room worth most, and by how much.
    pub(super) fn choose(&self, scene: &Scene<'_>, typical: &MixRows) -> (Worth, Vec<Taken>) {
        let node = Node::of(self, scene);
        let count = scene.ask.count();
        let (change, taken) = if count == 0 || (scene.ask.is_whole() && scene.is_of_one_class()) {
            let taken = scene.fits[..count].to_vec();
            (node.change(&taken), taken)
        } else {
            // Devices of several classes may be worth the same; then it counts who wants them.
            let typical = (!scene.is_of_one_class()).then(|| Usability::of(typical, scene.rooms));
            let left = scene.host_left().cpu;
            let alone = |fit: &Taken| {
                let fit = std::slice::from_ref(fit);
                let (gain, spared) = node.change(fit);
                let wanted = typical.as_ref().map(|all| all.fragments_after(fit, left));
                (Reverse(gain), Reverse(spared), wanted)
            };
            let ((gain, spared, _), taken) = scene.first_of_distinct_by(alone);
            (if taken.len() == 1 { (gain.0, spared.0) } else { node.change(&taken) }, taken)
        };
        let class = taken.first().map_or(node.class, |(at, _)| scene.rooms[*at].class);
        let share = match taken.len() {
            0 => node.free,
            _ => taken.iter().map(|(_, demand)| demand.share.millionths()).sum(),
        };
        let share = i64::try_from(share).expect("a node has few GPUs");
        (Worth { gain: change.0, spared: change.1, class, share }, taken)
    }

    /// Waste by what is free of the host beside `free` millionths of GPUs.
    fn host(&self, free: u64, host: HostAmount) -> f64 {
        let cpu = float(host.cpu.milli());
        let unserved = self.unserved(float(free) / 1e6, cpu, float(host.memory.mib()));
        HOST * unserved + self.pressure.waste(cpu)
    }

    /// Room that requests of several devices cannot use, weighed by their part of the demand.
    fn several(&self, fragments: i128) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "estimates need no more than 53 bits")]
        let fragments = fragments as f64;
        fragments / float(self.several.total.max(1)) / 1e6 * self.several_part
    }

    /// GPUs of `free` that stay unused for want of processor time or memory: the mean over the demand,
    /// each part of it taken as if it were alone on the node.
    fn unserved(&self, free: f64, cpu: f64, memory: f64) -> f64 {
        if free <= 0.0 {
            return 0.0;
        }
        let (cpu, memory) = (cpu / free, memory / free);
        let unserved = |need: &Need| {
            let served = (cpu * need.gpus_per_cpu).min(memory * need.gpus_per_memory);
            need.part * (1.0 - served).max(0.0)
        };
        // Four sums side by side: always in the same order, and without waiting for each other.
        let mut sums = [0.0; 4];
        for four in self.needs.chunks(4) {
            for (sum, need) in sums.iter_mut().zip(four) {
                *sum += unserved(need);
            }
        }
        free * (sums[0] + sums[1] + (sums[2] + sums[3]))
    }
}

/// One node for one question: what is the same for all its devices is worked out once.
struct Node<'a> {
    forecast: &'a Forecast,
    scene: &'a Scene<'a>,
    usability: Usability<'a>,
    /// Free share of the devices that can be shared, in millionths.
    free: u64,
    /// The class of the first of them.
    class: ClassId,
    /// Waste of the host's making as it is, and of several devices' room.
    before: (f64, f64),
    /// The former after a share is taken, for the share that was asked for last.
    after: Cell<Option<(u64, f64)>>,
}

impl<'a> Node<'a> {
    fn of(forecast: &'a Forecast, scene: &'a Scene<'a>) -> Self {
        let shareable = || scene.rooms.iter().filter(|room| forecast.holes.knows(room.class));
        let free = shareable().map(|room| room.free.share.millionths()).sum();
        let usability = Usability::of(&forecast.several, scene.rooms);
        let several = forecast.several(usability.fragments(scene.host_free.cpu));
        let before = (forecast.host(free, scene.host_free), several);
        let class = shareable().next().map(|room| room.class).unwrap_or_default();
        Self { forecast, scene, usability, free, class, before, after: Cell::new(None) }
    }

    /// The waste that taking these devices avoids, and the room for several that it spares, both in
    /// millionths of a GPU.
    fn change(&self, taken: &[Taken]) -> (i64, i64) {
        let mut holes = 0.0;
        let mut share = 0;
        for (position, demand) in taken {
            let Room { class, free, .. } = self.scene.rooms[*position];
            let left = free.checked_sub(*demand).expect("only what fits is tried");
            let waste = |left| self.forecast.holes.waste(class, left).unwrap_or(0.0);
            holes += waste(free) - waste(left);
            if self.forecast.holes.knows(class) {
                share += demand.share.millionths();
            }
        }
        let left = self.scene.host_left();
        let host = match self.after.get() {
            Some((known, host)) if known == share => host,
            _ => self.forecast.host(self.free - share, left),
        };
        self.after.set(Some((share, host)));
        let several = self.forecast.several(self.usability.fragments_after(taken, left.cpu));
        (fixed(HOLE * holes + self.before.0 - host, 1e6), fixed(self.before.1 - several, 1e6))
    }
}

/// The needs of GPU demand. Those that differ by less than a quarter are put together, so that there
/// are a few dozen at most.
fn needs(kinds: &[Kind<'_>], demand: f64, census: &Census) -> Vec<Need> {
    let gpus = float(census.gpus());
    let (cpu, memory) = census.host();
    let usual = ((cpu / gpus).max(1.0), (memory / gpus).max(1.0));
    let grid = |value: f64, usual: f64| fixed(4.0 * libm::log(value / usual), 1.0);
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
    let need = |(part, cpu, memory)| Need {
        part,
        gpus_per_cpu: part / cpu,
        gpus_per_memory: part / memory,
    };
    sums.into_values().map(need).collect()
}

impl Pressure {
    fn new(kinds: &[Kind<'_>], demand: f64, census: &Census) -> Self {
        let gpus_per_cpu = float(census.gpus()) / census.host().0.max(1.0);
        let asked: f64 = kinds.iter().map(|kind| kind.weight * kind.cpu).sum();
        let pods: f64 = kinds.iter().map(|kind| kind.weight).sum();
        let load = if pods < BELIEVED { 0.0 } else { asked / demand * gpus_per_cpu };
        let weight = (40.0 * (load - 1.1)).clamp(-0.05, 2.0);
        Self { weight, gpus_per_cpu, rest: rest(kinds) }
    }

    /// Waste by `cpu` thousandths of a core that are free on one node.
    fn waste(&self, cpu: f64) -> f64 {
        let gpus = cpu * self.gpus_per_cpu;
        let together = self.weight * gpus * gpus / 4.0;
        let half_cores = fixed(libm::floor(cpu / 500.0), 1.0);
        let rest = usize::try_from(half_cores).unwrap_or(0).min(HALF_CORES);
        together - self.weight.max(0.0) * self.rest[rest] * self.gpus_per_cpu
    }
}

/// By half cores that are free: what pods without a GPU leave unused of them, if all are of one type;
/// the mean over the types by the processor time they ask for.
fn rest(kinds: &[Kind<'_>]) -> Vec<f64> {
    let mut rest = vec![0.0; HALF_CORES + 1];
    let without = || kinds.iter().filter(|kind| kind.request.is_none() && kind.cpu > 0.0);
    let all: f64 = without().map(|kind| kind.weight * kind.cpu).sum();
    for kind in without() {
        let part = kind.weight * kind.cpu / all;
        for (free, rest) in
            (0..).map(|half_cores: u32| f64::from(half_cores) * 500.0).zip(&mut rest)
        {
            *rest += part * (free - libm::floor(free / kind.cpu) * kind.cpu);
        }
    }
    rest
}

fn kind_of<'a>(
    kind: &'a RequestType,
    tally: Tally,
    classes: &DeviceClasses,
    census: &Census,
) -> Kind<'a> {
    let request = kind.gpu.as_ref();
    let share = classes.map(|class| {
        let demand = request.and_then(|request| request.demand_on(class).ok());
        demand.filter(|_| class.kind == ClassKind::Gpu).map(|demand| gpus(demand.share))
    });
    let (mut sum, mut there) = (0.0, 0.0);
    for (shape, nodes) in census.shapes() {
        if let Some(share) = share.of(shape.class) {
            let devices = float(nodes * shape.gpus);
            sum += devices * share;
            there += devices;
        }
    }
    let devices = request.map_or(0.0, |request| f64::from(request.count.get()));
    Kind {
        request,
        cpu: float(kind.cpu.milli()),
        memory: float(tally.memory) / float(tally.pods.max(1)),
        weight: float(tally.pods),
        gpus: if there > 0.0 { devices * sum / there } else { 0.0 },
    }
}

/// The number, to 53 bits.
pub(super) fn float(value: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "estimates need no more than 53 bits")]
    {
        value as f64
    }
}

/// Rounds to whole parts of 1/`parts`. No estimate is believed beyond a million, so that costs fit.
pub(super) fn fixed(value: f64, parts: f64) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "clamped; what is no number is zero")]
    {
        libm::round(value.clamp(-1e6, 1e6) * parts) as i64
    }
}

fn gpus(share: Share) -> f64 {
    float(share.millionths()) / 1e6
}

#[cfg(test)]
mod tests;
