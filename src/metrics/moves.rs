//! Families of guests and their moves.

use std::time::Duration;

use prometheus::{Histogram, IntCounterVec, IntGauge};

use crate::metrics::make::Make;

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
    /// No process of the pod is left where it was a guest, or it uses no memory that others lack.
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
                "Restarts of pods that borrow, by reason and outcome.",
                &["reason", "outcome"],
            ),
            waits: make.histogram(
                "gpupack_bind_recall_seconds",
                "Time that binds waited until pods that borrowed the room had left.",
                &RECALL_BUCKETS,
            ),
        };
        for reason in [MoveReason::Recall, MoveReason::TakeBack] {
            for outcome in [MoveResult::Done, MoveResult::Failed] {
                families.moves.with_label_values(&[reason.label(), outcome.label()]);
            }
        }
        families
    }

    pub(crate) fn moved(&self, reason: MoveReason, result: MoveResult) {
        self.moves.with_label_values(&[reason.label(), result.label()]).inc();
    }

    pub(crate) fn waited(&self, time: Duration) {
        self.waits.observe(time.as_secs_f64());
    }

    pub(crate) fn guests(&self, count: usize) {
        self.guests.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}
