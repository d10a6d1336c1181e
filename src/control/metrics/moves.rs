//! Families of guests and their moves.

use std::time::Duration;

use prometheus::{Gauge, Histogram, IntCounterVec, IntGauge, IntGaugeVec};

use crate::metrics::make::{Make, bytes, ratio};
use wire::units::{MemMib, Share};

/// Buckets of the time that binds wait for guests, in seconds.
const RECALL_BUCKETS: [f64; 8] = [0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 15.0];

/// Why the container of a pod is restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveReason {
    /// It is a guest, and goes home.
    Recall,
    /// It uses more memory than it requests, which others lack.
    TakeBack,
}

impl MoveReason {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Recall, Self::TakeBack];

    fn label(self) -> &'static str {
        match self {
            Self::Recall => "recall",
            Self::TakeBack => "take_back",
        }
    }
}

/// How a move ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveResult {
    /// No process of the pod is left where it was a guest, or it uses no memory that others lack, or it starts
    /// elsewhere.
    Done,
    /// The pod cannot be moved, or its memory cannot be taken back.
    Failed,
}

impl MoveResult {
    fn label(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}

/// What pods borrow now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LentFigures {
    /// Pods that run on another GPU than their own.
    pub guests: usize,
    pub share: Share,
    /// Memory that pods use above their requests.
    pub memory: MemMib,
    /// Pods that may use more compute, and memory, than they request: those for which all of that is free where they
    /// run, a part of it, and nothing.
    pub bursts: [[usize; 3]; 2],
}

/// What pods may use more of, in the order of [`LentFigures::bursts`].
const DIMENSIONS: [&str; 2] = ["compute", "memory"];

/// How much of that is free, in the same order.
const ROOMS: [&str; 3] = ["all", "part", "none"];

pub(crate) struct MoveFamilies {
    guests: IntGauge,
    share: Gauge,
    memory: Gauge,
    bursts: IntGaugeVec,
    moves: IntCounterVec,
    waits: Histogram,
}

impl MoveFamilies {
    /// Makes all families, each series at zero.
    pub(crate) fn new(make: &Make<'_>) -> Self {
        let families = Self {
            guests: make.int_gauge(
                "gpupack_guests",
                "Pods that run on another GPU than the one that they are allocated.",
            ),
            share: make.gauge(
                "gpupack_lent_gpus",
                "GPU share that such pods request of the GPUs where they run, which counts as free.",
            ),
            memory: make.gauge(
                "gpupack_lent_memory_bytes",
                "Memory that pods use above their requests in pools that lend it, which counts as free.",
            ),
            bursts: make.int_gauges(
                "gpupack_burst_pods",
                "Pods that may use more than they request in pools that lend, by how much of that is free where they \
                 run.",
                &["dimension", "room"],
            ),
            moves: make.counters(
                "gpupack_moves_total",
                "Restarts of pods that borrow, by reason and outcome.",
                &["reason", "outcome"],
            ),
            waits: make.histogram(
                "gpupack_bind_recall_seconds",
                "Time that binds waited until pods that borrowed the room had left.",
                &RECALL_BUCKETS,
            ),
        };
        families.lent(LentFigures::default());
        for reason in MoveReason::ALL {
            for outcome in [MoveResult::Done, MoveResult::Failed] {
                families.moves.with_label_values(&[reason.label(), outcome.label()]);
            }
        }
        families
    }

    pub(crate) fn moved(&self, reason: MoveReason, result: MoveResult) {
        self.moves.with_label_values(&[reason.label(), result.label()]).inc();
    }

    pub(crate) fn count(&self, reason: MoveReason, result: MoveResult) -> u64 {
        self.moves.with_label_values(&[reason.label(), result.label()]).get()
    }

    pub(crate) fn waited(&self, time: Duration) {
        self.waits.observe(time.as_secs_f64());
    }

    pub(crate) fn lent(&self, lent: LentFigures) {
        self.guests.set(i64::try_from(lent.guests).unwrap_or(i64::MAX));
        self.share.set(ratio(lent.share));
        self.memory.set(bytes(lent.memory));
        for (dimension, counts) in DIMENSIONS.iter().zip(lent.bursts) {
            for (room, count) in ROOMS.iter().zip(counts) {
                let count = i64::try_from(count).unwrap_or(i64::MAX);
                self.bursts.with_label_values(&[*dimension, *room]).set(count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus::{Registry, TextEncoder};

    use super::*;

    #[test]
    fn each_room_for_bursts_has_a_series() {
        let registry = Registry::new();
        let families = MoveFamilies::new(&Make(&registry));
        let text = || TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        let series = |room: &str, count: usize| {
            let [dimension, room] = ["memory", room].map(|label| format!("\"{label}\""));
            format!("gpupack_burst_pods{{dimension={dimension},room={room}}} {count}\n")
        };
        assert!(text().contains(&series("none", 0)), "{}", text());
        families.lent(LentFigures { bursts: [[0; 3], [3, 2, 1]], ..LentFigures::default() });
        for (room, count) in [("all", 3), ("part", 2), ("none", 1)] {
            assert!(text().contains(&series(room, count)), "{}", text());
        }
    }
}
