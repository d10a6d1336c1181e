//! When a pod of a kind of world comes, and how long it stays.
//!
//! Times are ticks of a [`TimeUnit::Second`](sim::trace::schedule::TimeUnit): milliseconds.

use std::f64::consts::TAU;
use std::num::NonZeroU64;

use rand_chacha::ChaCha8Rng;

use crate::bursts::world::{DAY, HOUR, lognormal};
use sim::run::service::PodClass;
use sim::trace::churn::index_below;
use sim::trace::exponential::{MEAN_TICKS, exponential};
use sim::trace::read::TracePod;

/// The time that is played, in rounds.
pub(crate) const ROUND: u64 = 8 * DAY;

/// Sigma of the logarithm of heavy-tailed lifetimes.
const SIGMA: f64 = 1.5;

/// How likely a pod comes at the weekend, of other days.
const WEEKEND: f64 = 0.3;

/// Mean lifetimes in hours: of pods below half a GPU, below a GPU, of one, and of several.
pub(crate) type MeanHours = [u64; 4];

/// How lifetimes are distributed about their mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lifetimes {
    Exponential,
    /// Their logarithm is normal, with [`SIGMA`]: a few pods stay many times as long as the others.
    LogNormal,
}

/// When pods come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rhythm {
    /// At any time.
    Even,
    /// Pods below one GPU by day, the others by night.
    DayAndNight,
    /// Fewer on days 6 and 7.
    Weekly,
}

/// The mean lifetime of a pod.
pub(crate) fn mean_of(means: MeanHours, pod: &TracePod) -> u64 {
    let [small, large, whole, several] = means;
    let hours = match (pod.num_gpu, pod.gpu_milli) {
        (2.., _) => several,
        (_, ..500) => small,
        (_, ..1000) => large,
        (_, 1000..) => whole,
    };
    hours * HOUR
}

impl Lifetimes {
    /// A lifetime with this mean, at least one tick.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
    pub(crate) fn draw(self, mean: u64, chance: &mut ChaCha8Rng) -> u64 {
        let ticks = match self {
            Self::Exponential => {
                let wide = u128::from(exponential(chance)) * u128::from(mean);
                u64::try_from(wide / u128::from(MEAN_TICKS)).unwrap_or(u64::MAX)
            }
            Self::LogNormal => {
                let median = mean as f64 / libm::exp(SIGMA * SIGMA / 2.0);
                lognormal(chance, median, SIGMA) as u64
            }
        };
        ticks.max(1)
    }
}

impl Rhythm {
    /// Whether a pod that would come at this time comes.
    pub(crate) fn keeps(self, pod: &TracePod, created: u64, chance: &mut ChaCha8Rng) -> bool {
        let likely = match self {
            Self::Even => 1.0,
            Self::DayAndNight => {
                let sun = libm::sin(TAU * (created % DAY) as f64 / DAY as f64);
                let is_of_day = PodClass::of(pod) == PodClass::Fraction;
                (1.0 + if is_of_day { sun } else { -sun }) / 2.0
            }
            Self::Weekly => match created / DAY {
                5 | 6 => WEEKEND,
                _ => 1.0,
            },
        };
        (below(1_000_000, chance) as f64) < likely * 1e6
    }
}

/// A uniform number below `choices`, which is at least one.
pub(crate) fn below(choices: u64, chance: &mut ChaCha8Rng) -> u64 {
    index_below(NonZeroU64::new(choices).unwrap_or(NonZeroU64::MIN), chance) as u64
}
