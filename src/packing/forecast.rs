//! What is to be expected of free room: how much of it will end as waste, given what is asked for.
//!
//! Estimates, not books: here alone in `packing` numbers are floating. They use only operations that
//! IEEE 754 rounds exactly and the functions of the `libm` crate, so they are equal on every machine.
//! Every waste is in GPUs.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::device::{ClassId, ClassKind, DeviceClasses};
use super::fit::Room;
use super::fragmentation::Usability;
use super::holes::Holes;
use super::mix::{MixRows, RequestType};
use super::policy::{Scene, Taken};
use super::request::GpuRequest;
use super::supply::{Census, Supply};
use super::units::{HostAmount, Share};

const HOLE: f64 = 1.5;
const CPU_SHORT: f64 = 1.8;
const CPU_PART: f64 = 0.55;
const SEVERAL: f64 = 0.3;
const CONSOLIDATE: f64 = 0.3;

/// What the mix says about the use of free room.
#[derive(Clone, Debug)]
pub(super) struct Forecast {
    holes: Holes,
    cpu: Need,
    several: MixRows,
    /// Part of all GPU demand that comes in requests of several devices.
    several_part: f64,
    /// Parts of all GPU demand by number of whole devices.
    by_count: Vec<(usize, f64)>,
    /// Classes that a part of all GPU demand is bound to.
    bound: Vec<(Vec<usize>, f64)>,
    consolidate: f64,
}

/// How much of a node's processor time goes with GPU share: mean, and variance per GPU.
#[derive(Clone, Copy, Debug, Default)]
struct Need {
    mean: f64,
    variance: f64,
}

/// How a place changes the worth of the node's free room. The prices of the day weigh the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worth {
    /// Expected waste that it avoids, in millionths of a GPU.
    pub gain: i64,
    /// Room for requests of several devices that it spares, in millionths of a GPU.
    pub spared: i64,
    /// Class of the devices it takes.
    pub class: ClassId,
    /// Share it takes, in millionths of a GPU.
    pub share: i64,
}

/// What the cluster is short of: the numbers of the day, for all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prices {
    /// Of room for requests of several devices, in thousandths.
    several: i64,
    /// Of share on each class of device, in thousandths.
    by_class: Vec<i64>,
}

impl Prices {
    /// What a place costs, in billionths of a GPU: less is better.
    pub fn cost(&self, worth: Worth) -> i64 {
        let scarce = self.by_class.get(worth.class.position()).copied().unwrap_or(0);
        scarce * worth.share - 1000 * worth.gain - self.several * worth.spared
    }
}

fn float(value: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "estimates need no more than 53 bits")]
    {
        value as f64
    }
}

/// Rounds to whole parts of 1/`parts`. No estimate is believed beyond a million, so that costs fit.
fn fixed(value: f64, parts: f64) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "clamped; no number is zero")]
    {
        libm::round(value.clamp(-1e6, 1e6) * parts) as i64
    }
}

fn gpus(share: Share) -> f64 {
    float(share.millionths()) / 1e6
}

/// One type with what it is expected to take.
struct Kind<'a> {
    request: Option<&'a GpuRequest>,
    cpu: f64,
    weight: f64,
    /// Share on all its devices together, the mean over the cluster's GPUs that it accepts.
    gpus: f64,
}

impl Forecast {
    /// The forecast for `types`; none where they ask for no GPU, or no GPU is there to be shared.
    pub(super) fn new(
        types: &[(RequestType, u64)],
        classes: &DeviceClasses,
        census: &Census,
    ) -> Option<Self> {
        let kinds: Vec<Kind<'_>> =
            types.iter().map(|(kind, count)| kind_of(kind, *count, classes, census)).collect();
        let demand: f64 = kinds.iter().map(|kind| kind.weight * kind.gpus).sum();
        if demand <= 0.0 {
            return None;
        }
        let part = |kind: &Kind<'_>| kind.weight * kind.gpus / demand;
        let several = types.iter().zip(&kinds).filter(|((kind, _), _)| is_several(kind));
        let several: Vec<(&RequestType, u64)> = several
            .map(|((kind, _), known)| (kind, fixed(part(known), 1e6).unsigned_abs()))
            .collect();
        let several_part = several.iter().map(|(_, weight)| float(*weight) / 1e6).sum();
        let mut by_count: BTreeMap<usize, f64> = BTreeMap::new();
        for kind in &kinds {
            let Some(request) = kind.request.filter(|request| request.count.get() > 1) else {
                continue;
            };
            let count = usize::try_from(request.count.get()).expect("counts are small");
            *by_count.entry(count).or_default() += part(kind);
        }
        let (all_cpu, all_gpus) = totals(census);
        let pressure = match all_cpu > 0.0 {
            true => {
                kinds.iter().map(|kind| kind.weight * kind.cpu).sum::<f64>() / demand
                    * (all_gpus / all_cpu)
            }
            false => 0.0,
        };
        Some(Self {
            holes: Holes::new(types, classes),
            cpu: Need::of(&kinds),
            several: MixRows::of(several.into_iter(), classes),
            several_part,
            by_count: by_count.into_iter().collect(),
            bound: bound(&kinds, demand, classes, census),
            consolidate: CONSOLIDATE * libm::pow(pressure, 6.0),
        })
    }

    /// What the cluster is short of, with what is free of it now.
    pub(super) fn prices(&self, supply: &Supply) -> Prices {
        let free = float(supply.free());
        let excess = self
            .by_count
            .iter()
            .map(|(count, part)| part * free / (float(supply.on_nodes_with(*count)) + 1e5));
        let excess = excess.fold(0.0, f64::max).min(4.0);
        let mut by_class = Vec::new();
        for (classes, part) in &self.bound {
            let there: f64 = classes.iter().map(|class| float(supply.of_class(*class))).sum();
            let scarcity = part * (free + 1e3) / (there + 1e5);
            for class in classes {
                by_class.resize(by_class.len().max(class + 1), 0.0);
                by_class[*class] += scarcity;
            }
        }
        Prices {
            several: fixed(10.0 * excess * excess * excess, 1e3),
            by_class: by_class.iter().map(|e: &f64| fixed(2.5 * e.min(3.0), 1e3)).collect(),
        }
    }

    /// The devices whose use leaves the node's room worth most, and by how much.
    pub(super) fn choose(&self, scene: &Scene<'_>, typical: &MixRows) -> (Worth, Vec<Taken>) {
        let usability = Usability::of(&self.several, scene.rooms);
        let after_host = scene.host_left();
        let before = self.waste(scene.rooms, &[], scene.host_free, &usability);
        let change = |taken: &[Taken]| {
            let after = self.waste(scene.rooms, taken, after_host, &usability);
            (fixed(before.0 - after.0, 1e6), fixed(before.1 - after.1, 1e6))
        };
        let count = scene.ask.count();
        let (change, taken) = if count == 0 || (scene.ask.is_whole() && scene.is_of_one_class()) {
            let taken = scene.fits[..count].to_vec();
            (change(&taken), taken)
        } else {
            // Devices of several classes may be worth the same; then it counts who wants them.
            let typical = (!scene.is_of_one_class()).then(|| Usability::of(typical, scene.rooms));
            let alone = |fit: &Taken| {
                let fit = std::slice::from_ref(fit);
                let (gain, spared) = change(fit);
                let wanted = typical.as_ref().map(|all| all.fragments_after(fit, after_host.cpu));
                (Reverse(gain), Reverse(spared), wanted)
            };
            let ((gain, spared, _), taken) = scene.first_of_distinct_by(alone);
            (if taken.len() == 1 { (gain.0, spared.0) } else { change(&taken) }, taken)
        };
        let share: u64 = taken.iter().map(|(_, demand)| demand.share.millionths()).sum();
        let class = taken.first().or(scene.fits.first()).map(|(at, _)| scene.rooms[*at].class);
        let worth = Worth {
            gain: change.0,
            spared: change.1,
            class: class.unwrap_or_default(),
            share: i64::try_from(share).expect("a node has few GPUs"),
        };
        (worth, taken)
    }

    /// Expected waste of a node with `taken` gone from its `rooms`, and the part of its room that
    /// requests of several devices cannot use.
    fn waste(
        &self,
        rooms: &[Room],
        taken: &[Taken],
        host: HostAmount,
        usability: &Usability<'_>,
    ) -> (f64, f64) {
        let mut hole = 0.0;
        let mut free = 0.0;
        for (position, room) in rooms.iter().enumerate() {
            let gone = taken.iter().find(|(at, _)| *at == position);
            let left = match gone {
                None => room.free,
                Some((_, demand)) => room.free.checked_sub(*demand).unwrap_or_default(),
            };
            let Some(waste) = self.holes.waste(room.class, left) else { continue };
            hole += waste;
            free += gpus(left.share);
        }
        let total = usability.fragments_after(taken, host.cpu);
        #[expect(clippy::cast_precision_loss, reason = "estimates need no more than 53 bits")]
        let several = total as f64 / float(self.several.total.max(1)) / 1e6 * self.several_part;
        let cpu = float(host.cpu.milli());
        let short = self.cpu.short(free, cpu);
        let consolidated = self.consolidate * (cpu / 12_000.0) * (cpu / 12_000.0) / 8.0;
        let fixed = HOLE * hole + CPU_SHORT * short + SEVERAL * several - consolidated;
        (fixed, several)
    }
}

impl Need {
    fn of(kinds: &[Kind<'_>]) -> Self {
        let with_gpu = || kinds.iter().filter(|kind| kind.gpus > 0.0);
        let gpus: f64 = with_gpu().map(|kind| kind.weight * kind.gpus).sum();
        let mean = with_gpu().map(|kind| kind.weight * kind.cpu).sum::<f64>() / gpus;
        let square = |kind: &Kind<'_>| {
            let off = kind.cpu - mean * kind.gpus;
            kind.weight * off * off
        };
        Self { mean, variance: with_gpu().map(square).sum::<f64>() / gpus }
    }

    /// GPUs that stay unused for want of processor time: the expected excess of a normal need.
    fn short(self, gpus: f64, cpu: f64) -> f64 {
        let per_gpu = CPU_PART * self.mean;
        if per_gpu <= 0.0 || gpus <= 0.0 {
            return 0.0;
        }
        let (mean, deviation) = (per_gpu * gpus, libm::sqrt(self.variance * gpus));
        if deviation <= 0.0 {
            return (mean - cpu).max(0.0) / per_gpu;
        }
        let z = (mean - cpu) / deviation;
        if z < -6.0 {
            return 0.0;
        }
        let below = 0.5 * libm::erfc(-z / std::f64::consts::SQRT_2);
        let density = libm::exp(-0.5 * z * z) / 2.506_628_274_631_000_2;
        ((mean - cpu) * below + deviation * density) / per_gpu
    }
}

fn is_several(kind: &RequestType) -> bool {
    kind.gpu.as_ref().is_some_and(|request| request.count.get() > 1)
}

/// Processor time and GPUs of the cluster.
fn totals(census: &Census) -> (f64, f64) {
    census.shapes().fold((0.0, 0.0), |(cpu, gpus), (shape, nodes)| {
        let nodes = float(nodes);
        (cpu + nodes * float(shape.host.cpu.milli()), gpus + nodes * float(shape.gpus))
    })
}

fn kind_of<'a>(
    kind: &'a RequestType,
    count: u64,
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
    let gpus = if there > 0.0 { devices * sum / there } else { 0.0 };
    Kind { request, cpu: float(kind.cpu.milli()), weight: float(count), gpus }
}

/// The classes that demand is bound to: by the models it accepts, or because few nodes are large
/// enough for it.
fn bound(
    kinds: &[Kind<'_>],
    demand: f64,
    classes: &DeviceClasses,
    census: &Census,
) -> Vec<(Vec<usize>, f64)> {
    let (_, all_gpus) = totals(census);
    let mut sets: BTreeMap<Vec<usize>, f64> = BTreeMap::new();
    for kind in kinds.iter().filter(|kind| kind.gpus > 0.0) {
        let Some(request) = kind.request else { continue };
        let accepts = classes.map(|class| request.demand_on(class).is_ok());
        let (mut accepted, mut large, mut large_gpus, mut all) = (vec![], vec![], 0.0, true);
        for (shape, nodes) in census.shapes() {
            let class = shape.class.position();
            if !accepts.of(shape.class) {
                all = false;
                continue;
            }
            accepted.push(class);
            let is_large = shape.gpus >= u64::from(request.count.get())
                && float(shape.host.cpu.milli()) >= kind.cpu;
            if is_large {
                large.push(class);
                large_gpus += float(nodes * shape.gpus);
            }
        }
        let is_rare = !large.is_empty() && large_gpus * 4.0 < all_gpus;
        if all && !is_rare {
            continue;
        }
        let mut set = if is_rare { large } else { accepted };
        set.sort_unstable();
        set.dedup();
        *sets.entry(set).or_default() += kind.weight * kind.gpus / demand;
    }
    sets.into_iter().collect()
}
