//! When pods come and how long they stay: one form for arrivals without times, for the trace's own
//! times and for churn, so that one event loop replays them all.
//!
//! Times are whole ticks. Their length depends on the source of the times ([`TimeUnit`]).

use std::ops::Range;

use crate::trace::exponential::MEAN_TICKS;
use crate::trace::read::{TraceNode, TracePod};
use crate::trace::workload::WorkloadError;

/// Largest load on average, in multiples of the cluster's GPUs.
const MEAN_LOAD_MAX: f64 = 10.0;

/// One pod that comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodArrival {
    /// Position of the pod in the list that the schedule belongs to.
    pub pod: usize,
    /// When it comes, in ticks.
    pub at: u64,
    /// How long it runs once it is placed, in ticks; `None` if it never ends.
    pub stays: Option<u64>,
}

/// The pods that come, in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Arrivals in order of time; those at the same time come in this order.
    pub arrivals: Vec<PodArrival>,
    /// The measured time, in ticks; the run ends with it.
    pub window: Range<u64>,
    /// The unit of the times.
    pub unit: TimeUnit,
}

/// A cluster, the pods of a trace, and when they come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimedWorkload {
    /// The cluster in tie-break order: among nodes of equal score the earlier one wins.
    pub nodes: Vec<TraceNode>,
    /// The pods that the schedule draws from.
    pub pods: Vec<TracePod>,
    pub schedule: Schedule,
}

/// The unit in which times are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeUnit {
    /// Mean lifetimes of a pod.
    Lifetime,
    /// Seconds.
    Second,
}

impl TimeUnit {
    /// Ticks of one unit.
    #[must_use]
    pub fn ticks(self) -> u64 {
        match self {
            Self::Lifetime => MEAN_TICKS,
            Self::Second => 1000,
        }
    }

    /// Its name, for axes and heads.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lifetime => "mean lifetimes",
            Self::Second => "seconds",
        }
    }

    /// A time in this unit, not below zero, in ticks.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
    pub fn to_ticks(self, time: f64) -> u64 {
        (time * self.ticks() as f64).round() as u64
    }

    /// A time in ticks in this unit.
    #[must_use]
    pub fn from_ticks(self, ticks: u64) -> f64 {
        ticks as f64 / self.ticks() as f64
    }
}

impl Schedule {
    /// `pods` pods, one per tick, that never end.
    #[must_use]
    pub fn in_order(pods: usize) -> Self {
        let arrivals = (0_u64..).zip(0..pods).map(|(at, pod)| PodArrival { pod, at, stays: None });
        let arrivals: Vec<PodArrival> = arrivals.collect();
        let end = arrivals.last().map_or(0, |last| last.at + 1);
        Self { arrivals, window: 0..end, unit: TimeUnit::Second }
    }
}

/// A mean load in millionths of the cluster's GPUs.
///
/// # Errors
/// [`WorkloadError::MeanLoad`] outside of its range.
pub fn load_micro(load: f64) -> Result<u128, WorkloadError> {
    micro(load, MEAN_LOAD_MAX).ok_or(WorkloadError::MeanLoad { load })
}

/// `value` in millionths; `None` unless it is at least one of them and at most `max`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the value was found to lie between 1 and a number that fits"
)]
pub(crate) fn micro(value: f64, max: f64) -> Option<u128> {
    let scaled = (value * 1e6).round();
    (scaled >= 1.0 && value <= max).then_some(scaled as u128)
}
