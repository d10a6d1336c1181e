//! Families of the extender itself: its replica, the calls that it answers, and what it hears of the cluster.

use prometheus::{Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge};

use crate::metrics::labels::{BindResult, Outcome, ReportResult, RequeueResult, Verb};
use crate::metrics::make::Make;
use engine::model::rejection::Rejection;

/// Latency buckets in seconds: 10 microseconds to 1 second in steps of 1, 2.5 and 5.
const LATENCY_BUCKETS: [f64; 16] = [
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1,
    5e-1, 1.0,
];

/// What a replica says of itself.
pub(crate) struct ReplicaFamilies {
    pub(crate) leader: IntGauge,
    pub(crate) ready: IntGauge,
    pub(crate) token_refused: Gauge,
    pub(crate) audit_failures: IntCounter,
    pub(crate) certificate_expiry: GaugeVec,
}

/// Calls of kube-scheduler, and what follows from them.
pub(crate) struct CallFamilies {
    pub(crate) verb_duration: HistogramVec,
    pub(crate) refusals: IntCounterVec,
    pub(crate) binds: IntCounterVec,
    pub(crate) requeues: IntCounterVec,
    pub(crate) holds: IntGauge,
    pub(crate) standing_holds: IntGauge,
}

/// What agents report, and what the watches bring.
pub(crate) struct NewsFamilies {
    pub(crate) reports: IntCounterVec,
    pub(crate) oldest_report: Gauge,
    pub(crate) watch_lag: Histogram,
    pub(crate) watch_events: IntCounterVec,
}

impl ReplicaFamilies {
    pub(crate) fn new(make: &Make<'_>) -> Self {
        Self {
            leader: make.int_gauge("gpupack_leader", "1 on the replica that leads, else 0."),
            ready: make.int_gauge(
                "gpupack_ready",
                "1 when calls are answered; 0 on a replica that does not lead.",
            ),
            token_refused: make.gauge(
                "gpupack_token_refused_seconds",
                "For how long the API server has answered nothing but 401; 0 if it accepts the token.",
            ),
            audit_failures: make.counter(
                "gpupack_ledger_audit_failures_total",
                "Nodes whose sums differed from their reservations.",
            ),
            certificate_expiry: make.gauges(
                "gpupack_certificate_expiry_timestamp_seconds",
                "When the certificate ends, in seconds since 1970; 0 if it is not known.",
                &["certificate"],
            ),
        }
    }
}

impl CallFamilies {
    /// Each series at zero; the holds are of the cluster.
    pub(crate) fn new(make: &Make<'_>, make_of_cluster: &Make<'_>) -> Self {
        let families = Self {
            verb_duration: make.histograms(
                "gpupack_verb_duration_seconds",
                "Time from the whole request to the whole answer of an extender verb.",
                &LATENCY_BUCKETS,
                &["verb", "outcome"],
            ),
            refusals: make.counters(
                "gpupack_refusals_total",
                "Nodes refused by filter, by reason.",
                &["reason"],
            ),
            binds: make.counters("gpupack_binds_total", "Binds by outcome.", &["outcome"]),
            requeues: make.counters(
                "gpupack_requeues_total",
                "Requeues that ended, by result.",
                &["result"],
            ),
            holds: make_of_cluster.int_gauge(
                "gpupack_holds",
                "Holds: room kept for pods between *filter* and *bind*.",
            ),
            standing_holds: make_of_cluster.int_gauge(
                "gpupack_standing_holds",
                "Standing holds: room kept for the first pods of lines until they are bound.",
            ),
        };
        families.preset();
        families
    }

    /// Creates the series of closed sets before their first event.
    fn preset(&self) {
        for verb in [Verb::Filter, Verb::Prioritize, Verb::Bind, Verb::Preempt] {
            for outcome in [Outcome::Ok, Outcome::Refused, Outcome::Error] {
                self.verb_duration.with_label_values(&[verb.label(), outcome.label()]);
            }
        }
        for reason in Rejection::LABELS {
            self.refusals.with_label_values(&[reason]);
        }
        self.refusals.with_label_values(&["bad_request"]);
        for result in
            [BindResult::Bound, BindResult::Conflict, BindResult::Refused, BindResult::Undecided]
        {
            self.binds.with_label_values(&[result.label()]);
        }
        for result in RequeueResult::ALL {
            self.requeues.with_label_values(&[result.label()]);
        }
    }
}

impl NewsFamilies {
    /// Each series at zero.
    pub(crate) fn new(make: &Make<'_>) -> Self {
        let families = Self {
            reports: make.counters(
                "gpupack_reports_total",
                "Agent reports by result.",
                &["result"],
            ),
            oldest_report: make.gauge(
                "gpupack_oldest_report_timestamp_seconds",
                "Oldest last report of the nodes that are reporting; 0 if no node is.",
            ),
            watch_lag: make.histogram(
                "gpupack_watch_lag_seconds",
                "From posting a Binding to the watch event that shows the pod bound.",
                &[1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0],
            ),
            watch_events: make.counters(
                "gpupack_watch_events_total",
                "What the watches brought: changes, and failures after which they started again.",
                &["resource", "kind"],
            ),
        };
        for result in ReportResult::ALL {
            families.reports.with_label_values(&[result.label()]);
        }
        for resource in ["pods", "nodes"] {
            for kind in ["change", "failure"] {
                families.watch_events.with_label_values(&[resource, kind]);
            }
        }
        families
    }
}
