//! Families of guests and their moves.

use std::time::Duration;

use prometheus::{Histogram, IntCounterVec, IntGauge};

use crate::metrics::make::Make;

/// Buckets of the time that binds wait for guests, in seconds.
const RECALL_BUCKETS: [f64; 8] = [0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 15.0];

/// How a move home ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveResult {
    /// No process of the pod is left where it was a guest.
    Done,
    /// The pod cannot be moved.
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

pub(crate) struct MoveFamilies {
    guests: IntGauge,
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
            moves: make.counters(
                "gpupack_moves_total",
                "Moves of pods to the GPU that they are allocated, by outcome.",
                &["outcome"],
            ),
            waits: make.histogram(
                "gpupack_bind_recall_seconds",
                "Time that binds waited until pods that borrowed the room had left.",
                &RECALL_BUCKETS,
            ),
        };
        for outcome in [MoveResult::Done, MoveResult::Failed] {
            families.moves.with_label_values(&[outcome.label()]);
        }
        families
    }

    pub(crate) fn moved(&self, result: MoveResult) {
        self.moves.with_label_values(&[result.label()]).inc();
    }

    pub(crate) fn waited(&self, time: Duration) {
        self.waits.observe(time.as_secs_f64());
    }

    pub(crate) fn guests(&self, count: usize) {
        self.guests.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}
