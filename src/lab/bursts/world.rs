//! What comes in the scenario of bursts: pods with their lives, and what each does meanwhile. Without a
//! trace they are of four kinds.
//!
//! Everything is drawn from the seed and the number of the pod, so all rules meet the same pods and bursts.
//! It is a model: no public trace has bursts, and the memory of each tenant over time.

use std::num::NonZeroU32;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use engine::ledger::query::queries::PlacementRequest;
use engine::model::fit::HostRule;
use engine::model::policy::Policy;
use engine::model::request::{Amount, GpuRequest, Limit, Movable};
use engine::scoring::strategy::Strategy;
use sim::run::cluster::query_of;
use sim::trace::dimensions::MoreOfNode;
use sim::trace::exponential::{MEAN_TICKS, exponential};
use sim::trace::read::TraceNode;
use sim::trace::schedule::TimedWorkload;
use wire::units::{HostAmount, MemMib, Share};

use crate::bursts::columns::TraceBursts;

/// Milliseconds.
pub(crate) type Ms = u64;

pub(crate) const SECOND: Ms = 1_000;
pub(crate) const HOUR: Ms = 3_600 * SECOND;
pub(crate) const DAY: Ms = 24 * HOUR;

/// Millionths of a GPU.
const WHOLE: u64 = 1_000_000;

/// How much longer gaps between bursts are at night.
const NIGHT: f64 = 6.0;

/// What a pod is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BurstKind {
    /// Bursts with gaps; its container may be restarted.
    Notebook,
    /// Short requests, fewer at night.
    Inference,
    /// Always busy.
    Training,
    /// A whole GPU, always busy.
    Whole,
    /// Bursts with gaps, as its trace says; its container may be restarted.
    Traced(TraceBursts),
}

impl BurstKind {
    /// Whether it uses more than it requests now and then.
    pub(crate) fn has_bursts(self) -> bool {
        match self {
            Self::Notebook | Self::Traced(_) => true,
            Self::Inference | Self::Training | Self::Whole => false,
        }
    }
}

/// One kind: its part of what is allocated, the median life in hours with the sigma of its logarithm, and
/// requests with limits in millionths, equally often.
struct About {
    kind: BurstKind,
    part: f64,
    life: (f64, f64),
    sizes: &'static [(u64, u64)],
}

const KINDS: [About; 4] = [
    About {
        kind: BurstKind::Notebook,
        part: 0.55,
        life: (6.0, 1.0),
        sizes: &[(125_000, 500_000), (250_000, 800_000), (500_000, WHOLE)],
    },
    About {
        kind: BurstKind::Inference,
        part: 0.15,
        life: (24.0, 0.8),
        sizes: &[(250_000, 500_000), (500_000, WHOLE)],
    },
    About { kind: BurstKind::Training, part: 0.10, life: (4.0, 1.0), sizes: &[(500_000, WHOLE)] },
    About { kind: BurstKind::Whole, part: 0.20, life: (1.5, 0.8), sizes: &[(WHOLE, WHOLE)] },
];

/// A pod before it is placed.
#[derive(Clone, Debug)]
pub(crate) struct Comer {
    pub(crate) kind: BurstKind,
    pub(crate) comes: Ms,
    pub(crate) stays: Ms,
    pub(crate) query: PlacementRequest,
}

/// A fleet, and the pods that come to it.
#[derive(Clone, Debug)]
pub struct BurstWorld {
    pub(crate) nodes: Vec<TraceNode>,
    /// In the order in which they come.
    pub(crate) comers: Vec<Comer>,
    /// Parts of a device's memory that bursts are counted in; `None`: MiB.
    pub(crate) parts: Option<u64>,
    /// When measuring begins.
    pub(crate) begins: Ms,
    /// When it ends.
    pub(crate) ends: Ms,
}

const NODES: usize = 8;
const GPUS_EACH: u32 = 8;
const GPU_MIB: u64 = 81_920;

impl BurstWorld {
    /// Pods that request `load` of 64 GPUs on average, measured for `days` days after `warm_up` days.
    pub fn drawn(seed: u64, load: f64, warm_up: u64, days: u64) -> Self {
        let gpu_memory = vec![MemMib::new(GPU_MIB)];
        let more = MoreOfNode { gpu_memory, ..MoreOfNode::default() };
        let nodes = (0..NODES).map(|number| TraceNode {
            name: format!("node-{number}"),
            cpu_milli: 1 << 30,
            memory_mib: 1 << 40,
            gpus: GPUS_EACH,
            model: "H100".to_owned(),
            more: Some(Box::new(more.clone())),
        });
        let nodes: Vec<TraceNode> = nodes.collect();
        let gpus = NODES * usize::try_from(GPUS_EACH).unwrap_or_default();
        let days = warm_up + days;
        let comers = comers(seed, gpus, load, days);
        Self { nodes, comers, parts: Some(WHOLE), begins: warm_up * DAY, ends: days * DAY }
    }

    /// The pods of a trace at its times, with the bursts of each. Those without are always busy, and use what
    /// they request.
    pub fn traced(workload: &TimedWorkload, bursts: &[Option<TraceBursts>]) -> Self {
        let TimedWorkload { nodes, pods, schedule } = workload;
        let comers = schedule.arrivals.iter().map(|arrival| {
            let (pod, bursts) = (&pods[arrival.pod], bursts[arrival.pod]);
            let mut query = query_of(pod, Strategy::Policy(Policy::Fragmentation));
            if let (Some(gpu), Some(_)) = (&mut query.gpu, bursts) {
                gpu.movable = Movable::Restart;
            }
            let whole = if pod.gpu_milli >= 1000 { BurstKind::Whole } else { BurstKind::Training };
            Comer {
                kind: bursts.map_or(whole, BurstKind::Traced),
                comes: arrival.at,
                stays: arrival.stays.unwrap_or(Ms::MAX / 2).max(1),
                query,
            }
        });
        let (begins, ends) = (schedule.window.start, schedule.window.end);
        Self { nodes: nodes.clone(), comers: comers.collect(), parts: None, begins, ends }
    }
}

/// What a pod of this kind and size requests, with its limit, in millionths of a GPU.
fn query(kind: BurstKind, request: u64, limit: u64) -> PlacementRequest {
    let amount = match kind {
        BurstKind::Whole => Amount::Whole,
        _ => Amount::Fraction(Share::from_millionths(request)),
    };
    let mut gpu = GpuRequest::several(amount, NonZeroU32::MIN);
    if kind != BurstKind::Whole {
        gpu.limit = Some(Limit::Fraction(Share::from_millionths(limit)));
    }
    if kind == BurstKind::Notebook {
        gpu.movable = Movable::Restart;
    }
    PlacementRequest {
        gpu: Some(gpu),
        host: HostAmount::ZERO,
        host_rule: HostRule::Checked,
        strategy: Strategy::Policy(Policy::Fragmentation),
    }
}

/// The pods of `days` days that request `load` of `gpus` on average, in the order in which they come.
fn comers(seed: u64, gpus: usize, load: f64, days: u64) -> Vec<Comer> {
    let mut all = Vec::new();
    for (number, about) in (0..).zip(&KINDS) {
        let mut chance = ChaCha8Rng::seed_from_u64(seed.wrapping_mul(4).wrapping_add(number));
        let sizes: f64 = about.sizes.iter().map(|(request, _)| *request as f64).sum();
        let mean_request = sizes / about.sizes.len() as f64 / WHOLE as f64;
        let (median, sigma) = about.life;
        let mean_life = median * HOUR as f64 * libm::exp(sigma * sigma / 2.0);
        let pause = mean_request * mean_life / (load * gpus as f64 * about.part);
        let mut comes = 0;
        loop {
            comes += whole(pause * exponential(&mut chance) as f64 / MEAN_TICKS as f64);
            if comes >= days * DAY {
                break;
            }
            let stays = whole(lognormal(&mut chance, median * HOUR as f64, sigma)).max(SECOND);
            let size = usize::try_from(chance.next_u32()).unwrap_or_default() % about.sizes.len();
            let (request, limit) = about.sizes[size];
            let query = query(about.kind, request, limit);
            all.push(Comer { kind: about.kind, comes, stays, query });
        }
    }
    all.sort_by_key(|comer| comer.comes);
    all
}

/// One burst of a pod: work in milliseconds of a whole GPU, and memory in the parts of its world.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Burst {
    pub(crate) work: Ms,
    pub(crate) memory: u64,
    /// Whether its memory is kept afterwards, for an hour at most.
    pub(crate) keeps: bool,
}

/// What one pod does, one thing after the other.
pub(crate) struct Habits {
    chance: ChaCha8Rng,
}

impl Habits {
    pub(crate) fn of(seed: u64, pod: usize) -> Self {
        let pod = u64::try_from(pod).unwrap_or(u64::MAX);
        Self { chance: ChaCha8Rng::seed_from_u64(seed.rotate_left(32) ^ pod) }
    }

    /// Time until its next burst.
    pub(crate) fn gap(&mut self, kind: BurstKind, now: Ms) -> Ms {
        let is_night = !(8 * HOUR..20 * HOUR).contains(&(now % DAY));
        let times = if is_night { NIGHT } else { 1.0 };
        match kind {
            BurstKind::Notebook => whole(times * lognormal(&mut self.chance, 300_000.0, 1.3)),
            BurstKind::Inference => whole(times * lognormal(&mut self.chance, 20_000.0, 0.8)),
            BurstKind::Training | BurstKind::Whole => 0,
            BurstKind::Traced(bursts) => self.about(bursts.gap_seconds),
        }
    }

    /// A random time with this mean.
    fn about(&mut self, seconds: u64) -> Ms {
        let mean = (seconds * SECOND) as f64;
        whole(mean * exponential(&mut self.chance) as f64 / MEAN_TICKS as f64)
    }

    /// A random part of an amount.
    fn part_of(&mut self, amount: u64) -> u64 {
        amount * u64::from(self.chance.next_u32() >> 22) / 1_024
    }

    /// Its next burst, of a pod with this request and limit. Those that are always busy have one that never
    /// ends.
    pub(crate) fn burst(&mut self, kind: BurstKind, request: u64, limit: u64) -> Burst {
        match kind {
            BurstKind::Notebook => {
                let work = whole(lognormal(&mut self.chance, 40_000.0, 1.6)).max(1);
                let is_large = self.chance.next_u32().is_multiple_of(5);
                let memory = match is_large {
                    true => request + 1 + self.part_of(limit - request - 1),
                    false => request / 5 + self.part_of(request - request / 5),
                };
                let keeps = self.chance.next_u32() % 5 < 3;
                Burst { work, memory, keeps }
            }
            BurstKind::Inference => {
                let work = whole(lognormal(&mut self.chance, 5_000.0, 0.8)).max(1);
                Burst { work, memory: request * 4 / 5, keeps: true }
            }
            BurstKind::Training | BurstKind::Whole => {
                Burst { work: Ms::MAX, memory: request, keeps: true }
            }
            BurstKind::Traced(bursts) => {
                let work = self.about(bursts.seconds).max(1);
                Burst { work, memory: limit * bursts.memory_milli / 1000, keeps: false }
            }
        }
    }
}

/// A number with this median whose logarithm is normal with this sigma.
pub(crate) fn lognormal(chance: &mut ChaCha8Rng, median: f64, sigma: f64) -> f64 {
    let mut uniform = || (f64::from(chance.next_u32()) + 0.5) / 4_294_967_296.0;
    let (radius, angle) = (libm::sqrt(-2.0 * libm::log(uniform())), uniform());
    median * libm::exp(sigma * radius * libm::cos(std::f64::consts::TAU * angle))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the whole part of a time or amount, which is not negative"
)]
fn whole(number: f64) -> u64 {
    number as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_request_the_load_on_average_and_a_seed_repeats_them() {
        let (days, gpus) = (60, 64);
        let requested = |comer: &Comer| match &comer.query.gpu.as_ref().unwrap().amount {
            Amount::Fraction(share) => share.millionths() as f64,
            _ => WHOLE as f64,
        };
        let all = comers(7, gpus, 0.63, days);
        let taken: f64 =
            all.iter().map(|comer| requested(comer) / WHOLE as f64 * comer.stays as f64).sum();
        let load = taken / (days * DAY) as f64 / gpus as f64;
        assert!((load - 0.63).abs() < 0.04, "{load}");
        assert!(all.iter().zip(comers(7, gpus, 0.63, days)).all(|(a, b)| a.comes == b.comes));
        assert!(all.windows(2).all(|two| two[0].comes <= two[1].comes));
    }

    #[test]
    fn one_burst_of_five_wants_more_than_the_request() {
        let (request, limit) = (250_000, 800_000);
        let mut habits = Habits::of(1, 1);
        let bursts: Vec<Burst> =
            (0..20_000).map(|_| habits.burst(BurstKind::Notebook, request, limit)).collect();
        let large = bursts.iter().filter(|burst| burst.memory > request).count();
        assert!((3_800..4_200).contains(&large), "{large}");
        assert!(bursts.iter().all(|burst| burst.memory <= limit && burst.memory > 0));
        let mut works: Vec<Ms> = bursts.iter().map(|burst| burst.work).collect();
        works.sort_unstable();
        assert!((38_000..42_000).contains(&works[10_000]), "{}", works[10_000]);
    }
}
