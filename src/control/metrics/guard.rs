//! Families of the memory guard.

use prometheus::{GaugeVec, IntCounterVec, IntGauge, IntGaugeVec};

use crate::metrics::labels::EditResult;
use crate::metrics::make::{Make, bytes};
use wire::units::MemMib;

/// Why a pod is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionReason {
    /// It uses more GPU memory than it may.
    OverLimit,
    /// A more important pod needs its room.
    Preemption,
}

impl EvictionReason {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Self::OverLimit => "over_limit",
            Self::Preemption => "preemption",
        }
    }
}

/// The outcome of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionResult {
    /// The API server ends the pod.
    Evicted,
    /// A disruption budget forbids it now.
    Blocked,
    /// The pod was already gone.
    Gone,
    /// The API server refused, or did not answer.
    Failed,
}

impl EvictionResult {
    /// The label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::Blocked => "blocked",
            Self::Gone => "gone",
            Self::Failed => "failed",
        }
    }
}

/// Pods without their GPU, and nodes that take no more for that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlindFigures {
    pub pods: usize,
    pub nodes: usize,
}

/// Use beyond what is allocated, for the gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutsideFigures {
    /// Over-limit pods, each counted once per device.
    pub over_limit_pods: u64,
    /// What they use beyond their limit.
    pub excess: MemMib,
    /// Untracked memory: used by processes of no pod that holds anything on the node.
    pub untracked: MemMib,
}

pub(crate) struct GuardFamilies {
    over_limit_pods: IntGauge,
    outside: GaugeVec,
    evictions: IntCounterVec,
    tenants: IntGaugeVec,
    placement_edits: IntCounterVec,
    overdue_drains: IntGauge,
    blind_pods: IntGauge,
    blind_nodes: IntGauge,
}

impl GuardFamilies {
    /// Makes all families, each series at zero.
    pub(crate) fn new(make: &Make<'_>) -> Self {
        let families = Self {
            over_limit_pods: make.int_gauge("gpupack_over_limit_pods",
                "Pods that use more memory of a GPU than they may, beyond the tolerance.",
            ),
            outside: make.gauges("gpupack_memory_beyond_allocated_bytes",
                "Device memory in use beyond what is allocated: above what pods may use, and by processes of no known pod.",
                &["kind"],
            ),
            evictions: make.counters("gpupack_evictions_total",
                "Attempts to evict pods, by reason and outcome.",
                &["reason", "outcome"],
            ),
            tenants: make.int_gauges("gpupack_tenants",
                "Tenants of devices by configured and by verified memory isolation.",
                &["state", "isolation"],
            ),
            placement_edits: make.counters("gpupack_placement_edits_total",
                "Edits by others of the placement annotations of bound pods, and results of restoring them.",
                &["result"],
            ),
            blind_pods: make.int_gauge("gpupack_blind_pods",
                "Pods whose container started without the NVIDIA driver, and so without its GPU.",
            ),
            blind_nodes: make.int_gauge("gpupack_blind_nodes",
                "Nodes that take no GPU pods, or one as a trial, because the last two pods got no GPU there.",
            ),
            overdue_drains: make.int_gauge("gpupack_overdue_drains",
                "Ended pods whose processes still run after drain_seconds; their room is not free.",
            ),
        };
        for result in [EditResult::Seen, EditResult::Restored, EditResult::Failed] {
            families.placement_edits.with_label_values(&[result.label()]);
        }
        for mode in ["none", "mps", "driver", "mig", "whole"] {
            families.show_tenants(mode, 0, 0);
        }
        families.show(OutsideFigures::default());
        for result in [
            EvictionResult::Evicted,
            EvictionResult::Blocked,
            EvictionResult::Gone,
            EvictionResult::Failed,
        ] {
            for reason in [EvictionReason::OverLimit, EvictionReason::Preemption] {
                families.evictions.with_label_values(&[reason.label(), result.label()]);
            }
        }
        families
    }

    /// Sets the gauges.
    pub(crate) fn show(&self, figures: OutsideFigures) {
        self.over_limit_pods.set(i64::try_from(figures.over_limit_pods).unwrap_or(i64::MAX));
        for (kind, memory) in [("over_limit", figures.excess), ("untracked", figures.untracked)] {
            self.outside.with_label_values(&[kind]).set(bytes(memory));
        }
    }

    /// Sets the number of tenants for which an isolation mode is configured, and is verified.
    pub(crate) fn show_tenants(&self, mode: &str, configured: u64, verified: u64) {
        for (state, tenants) in [("configured", configured), ("verified", verified)] {
            let gauge = self.tenants.with_label_values(&[state, mode]);
            gauge.set(i64::try_from(tenants).unwrap_or(i64::MAX));
        }
    }

    /// Counts an edit of a placement, or the outcome of writing it back.
    pub(crate) fn placement_edit(&self, result: EditResult) {
        self.placement_edits.with_label_values(&[result.label()]).inc();
    }

    /// Sets the number of ended pods that hold devices longer than `drain_seconds`.
    pub(crate) fn show_blind(&self, figures: BlindFigures) {
        let shown = [(&self.blind_pods, figures.pods), (&self.blind_nodes, figures.nodes)];
        shown
            .into_iter()
            .for_each(|(gauge, count)| gauge.set(i64::try_from(count).unwrap_or(i64::MAX)));
    }

    pub(crate) fn show_overdue_drains(&self, pods: usize) {
        self.overdue_drains.set(i64::try_from(pods).unwrap_or(i64::MAX));
    }

    /// Counts the outcome of an eviction.
    pub(crate) fn evicted(&self, reason: EvictionReason, result: EvictionResult) {
        self.evictions.with_label_values(&[reason.label(), result.label()]).inc();
    }
}
