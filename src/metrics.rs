//! Prometheus families. Labels are closed sets: verbs, outcomes, reasons and states, never names of
//! pods or texts of errors; every series exists with zero from the start.

use std::time::Duration;

use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

use self::guard::GuardFamilies;
pub use self::guard::{EvictionResult, OutsideFigures};
pub use self::labels::{BindResult, Outcome, ReportResult, Verb};
use crate::packing::fit::Misfit;
use crate::packing::fragmentation::Packing;
use crate::packing::moves::MOST_MOVES;
use crate::packing::units::{MemMib, Share};

/// The memory guard.
mod guard;
/// The values of labels.
mod labels;

/// Latency buckets in seconds: 10 microseconds to 1 second in steps of 1, 2.5 and 5.
const LATENCY_BUCKETS: [f64; 16] = [
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1,
    5e-1, 1.0,
];

/// Nodes by the state of their agent, for the gauge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    /// Reports in time.
    pub reporting: i64,
    /// Reports no longer.
    pub silent: i64,
    /// Never reported since the start.
    pub never: i64,
}

/// All families of the extender.
pub struct Metrics {
    registry: Registry,
    verb_duration: HistogramVec,
    refusals: IntCounterVec,
    binds: IntCounterVec,
    claims: IntGauge,
    wakeups: IntCounter,
    reports: IntCounterVec,
    report_interval: Histogram,
    events_lost: IntCounter,
    audits: IntCounter,
    audit_failures: IntCounter,
    ready: IntGauge,
    waiting: IntGauge,
    typical_requests: IntGauge,
    placeable_by_moves: IntGaugeVec,
    emptiable: IntGauge,
    nodes: IntGaugeVec,
    gpus: IntGaugeVec,
    overbooked: IntGauge,
    share: GaugeVec,
    memory: GaugeVec,
    efficiency: Gauge,
    fragmentation: Gauge,
    guard: GuardFamilies,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers all families, each series at zero.
    ///
    /// # Panics
    /// Never: the names are constants, and a test registers them.
    #[expect(clippy::too_many_lines, reason = "one line per family, in the order of the fields")]
    pub fn new() -> Self {
        let build = int_gauges(
            "gpupack_build_info",
            "1, with the version of the running program as label.",
            &["version", "component"],
        );
        build.with_label_values(&[env!("CARGO_PKG_VERSION"), "extender"]).set(1);
        let registry = Registry::new();
        let metrics = Self {
            guard: GuardFamilies::register(&registry),
            registry,
            verb_duration: valid(HistogramVec::new(
                HistogramOpts::new(
                    "gpupack_verb_duration_seconds",
                    "Time from the whole request to the whole answer of an extender verb.",
                )
                .buckets(LATENCY_BUCKETS.to_vec()),
                &["verb", "outcome"],
            )),
            refusals: counters(
                "gpupack_refusals_total",
                "Nodes refused by filter, by reason.",
                &["reason"],
            ),
            binds: counters("gpupack_binds_total", "Binds by outcome.", &["outcome"]),
            claims: int_gauge("gpupack_claims", "Places held back between question and bind."),
            typical_requests: int_gauge(
                "gpupack_typical_requests",
                "Types of requests that free room is judged by.",
            ),
            wakeups: counter("gpupack_wakeups_total", "Waiting pods woken because room appeared."),
            reports: counters("gpupack_reports_total", "Agent reports by result.", &["result"]),
            report_interval: valid(Histogram::with_opts(
                HistogramOpts::new(
                    "gpupack_report_interval_seconds",
                    "Time between two accepted reports of one node.",
                )
                .buckets(vec![0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]),
            )),
            events_lost: counter(
                "gpupack_events_dropped_total",
                "Pod events not written because the queue was full.",
            ),
            audits: counter("gpupack_ledger_audits_total", "Audits of the ledger."),
            audit_failures: counter(
                "gpupack_ledger_audit_failures_total",
                "Audits that found sums differing from the reservations.",
            ),
            ready: int_gauge("gpupack_ready", "1 when questions are answered."),
            waiting: int_gauge("gpupack_waiting_pods", "GPU pods that no node fitted last time."),
            placeable_by_moves: int_gauges(
                "gpupack_waiting_pods_movable",
                "Waiting pods for which so many moves of running pods would make room.",
                &["moves"],
            ),
            emptiable: int_gauge(
                "gpupack_gpus_emptiable",
                "GPUs whose tenants would fit on other GPUs in use; looked for while no pod waits.",
            ),
            nodes: int_gauges("gpupack_nodes", "Nodes by the state of their agent.", &["state"]),
            gpus: int_gauges("gpupack_gpus", "Devices by occupation.", &["state"]),
            overbooked: int_gauge(
                "gpupack_gpus_overbooked",
                "Devices on which facts from outside put more than they have.",
            ),
            share: gauges(
                "gpupack_share_gpus",
                "Compute share in GPUs: capacity, booked, free, and the part of free that no typical \
                 request can use (fragmented).",
                &["state"],
            ),
            memory: gauges(
                "gpupack_memory_bytes",
                "Device memory: capacity and booked.",
                &["state"],
            ),
            efficiency: gauge(
                "gpupack_packing_efficiency_ratio",
                "Mean fullness of the occupied GPUs: the larger of booked share and booked memory.",
            ),
            fragmentation: gauge(
                "gpupack_fragmentation_ratio",
                "Part of the free compute share that no typical request can use, in the mean.",
            ),
        };
        metrics.register(build);
        metrics.preset();
        metrics
    }

    fn register(&self, build: IntGaugeVec) {
        let families: Vec<Box<dyn prometheus::core::Collector>> = vec![
            Box::new(build),
            Box::new(self.verb_duration.clone()),
            Box::new(self.refusals.clone()),
            Box::new(self.binds.clone()),
            Box::new(self.claims.clone()),
            Box::new(self.wakeups.clone()),
            Box::new(self.reports.clone()),
            Box::new(self.report_interval.clone()),
            Box::new(self.events_lost.clone()),
            Box::new(self.audits.clone()),
            Box::new(self.audit_failures.clone()),
            Box::new(self.ready.clone()),
            Box::new(self.waiting.clone()),
            Box::new(self.typical_requests.clone()),
            Box::new(self.placeable_by_moves.clone()),
            Box::new(self.emptiable.clone()),
            Box::new(self.nodes.clone()),
            Box::new(self.gpus.clone()),
            Box::new(self.overbooked.clone()),
            Box::new(self.share.clone()),
            Box::new(self.memory.clone()),
            Box::new(self.efficiency.clone()),
            Box::new(self.fragmentation.clone()),
        ];
        for family in families {
            valid(self.registry.register(family));
        }
    }

    /// Makes every series exist before its first event.
    fn preset(&self) {
        for verb in [Verb::Filter, Verb::Prioritize, Verb::Bind] {
            for outcome in [Outcome::Ok, Outcome::Refused, Outcome::Error] {
                self.verb_duration.with_label_values(&[verb.label(), outcome.label()]);
            }
        }
        for reason in Misfit::LABELS {
            self.refusals.with_label_values(&[reason]);
        }
        self.refusals.with_label_values(&["bad_request"]);
        for result in
            [BindResult::Bound, BindResult::Conflict, BindResult::Refused, BindResult::Undecided]
        {
            self.binds.with_label_values(&[result.label()]);
        }
        for result in [ReportResult::Accepted, ReportResult::Ignored, ReportResult::Refused] {
            self.reports.with_label_values(&[result.label()]);
        }
        self.set_moves(&[0; MOST_MOVES], 0);
    }

    /// Notes a call of a verb.
    pub fn verb(&self, verb: Verb, outcome: Outcome, took: Duration) {
        let labels = [verb.label(), outcome.label()];
        self.verb_duration.with_label_values(&labels).observe(took.as_secs_f64());
    }

    /// Notes `nodes` refusals by filter for one reason.
    pub fn refused(&self, misfit: Misfit, nodes: usize) {
        let nodes = u64::try_from(nodes).unwrap_or(u64::MAX);
        self.refusals.with_label_values(&[misfit.label()]).inc_by(nodes);
    }

    /// Notes a pod whose annotations are refused.
    pub fn refused_request(&self) {
        self.refusals.with_label_values(&["bad_request"]).inc();
    }

    /// Notes the end of a bind.
    pub fn bind(&self, result: BindResult) {
        self.binds.with_label_values(&[result.label()]).inc();
    }

    /// Notes that a waiting pod was woken.
    pub fn woke(&self) {
        self.wakeups.inc();
    }

    /// Notes a report, and the time since the one before.
    pub fn report(&self, result: ReportResult, since_last: Option<Duration>) {
        self.reports.with_label_values(&[result.label()]).inc();
        if let Some(interval) = since_last {
            self.report_interval.observe(interval.as_secs_f64());
        }
    }

    /// Notes an audit of the ledger.
    pub fn audited(&self, faults: usize) {
        self.audits.inc();
        self.audit_failures.inc_by(u64::try_from(faults).unwrap_or(u64::MAX));
    }

    /// Takes over how many events were lost since the start.
    pub fn set_events_lost(&self, lost: u64) {
        self.events_lost.inc_by(lost.saturating_sub(self.events_lost.get()));
    }

    /// Sets how many waiting pods so many moves would help, for each number of moves, and how many
    /// GPUs moves would empty.
    pub fn set_moves(&self, placeable: &[usize; MOST_MOVES], emptiable: usize) {
        for (moves, pods) in (1..).zip(placeable) {
            let gauge = self.placeable_by_moves.with_label_values(&[&format!("{moves}")]);
            gauge.set(i64::try_from(*pods).unwrap_or(i64::MAX));
        }
        self.emptiable.set(i64::try_from(emptiable).unwrap_or(i64::MAX));
    }

    /// Sets the gauges of what is used outside of the books.
    pub fn set_outside(&self, figures: OutsideFigures) {
        self.guard.show(figures);
    }

    /// Sets how many tenants a mode of protection is meant for, and is verified for.
    pub fn set_tenants(&self, mode: &'static str, counts: (u64, u64)) {
        self.guard.show_tenants(mode, counts);
    }

    /// Notes the end of an eviction.
    pub fn evicted(&self, result: EvictionResult) {
        self.guard.evicted(result);
    }

    /// Sets the gauges of the service.
    pub fn set_service(&self, is_ready: bool, claims: usize, waiting: usize) {
        self.ready.set(i64::from(is_ready));
        self.claims.set(i64::try_from(claims).unwrap_or(i64::MAX));
        self.waiting.set(i64::try_from(waiting).unwrap_or(i64::MAX));
    }

    /// Sets the gauges of the fleet.
    pub fn set_fleet(&self, packing: &Packing, nodes: NodeCounts, typical_requests: usize) {
        self.typical_requests.set(i64::try_from(typical_requests).unwrap_or(i64::MAX));
        for (state, value) in
            [("reporting", nodes.reporting), ("silent", nodes.silent), ("never", nodes.never)]
        {
            self.nodes.with_label_values(&[state]).set(value);
        }
        let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        self.gpus.with_label_values(&["occupied"]).set(count(packing.occupied));
        self.gpus.with_label_values(&["empty"]).set(count(packing.devices - packing.occupied));
        self.overbooked.set(count(packing.overbooked));
        for (state, share) in [
            ("capacity", packing.capacity_share),
            ("booked", packing.booked_share),
            ("free", packing.free_share),
            ("fragmented", packing.fragmented_share()),
        ] {
            self.share.with_label_values(&[state]).set(ratio(share));
        }
        for (state, memory) in
            [("capacity", packing.capacity_memory), ("booked", packing.booked_memory)]
        {
            self.memory.with_label_values(&[state]).set(bytes(memory));
        }
        self.efficiency.set(ratio(packing.efficiency()));
        self.fragmentation.set(ratio(packing.fragmentation()));
    }

    /// All families in the text format.
    pub fn text(&self) -> Vec<u8> {
        let mut text = Vec::new();
        valid(TextEncoder::new().encode(&self.registry.gather(), &mut text));
        text
    }
}

/// A share as whoever reads a dashboard knows it: in GPUs.
#[expect(clippy::cast_precision_loss, reason = "a gauge is a float; the books are not")]
fn ratio(share: Share) -> f64 {
    share.millionths() as f64 / Share::WHOLE.millionths() as f64
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float; the books are not")]
fn bytes(memory: MemMib) -> f64 {
    memory.mib() as f64 * 1_048_576.0
}

fn valid<T>(made: prometheus::Result<T>) -> T {
    made.expect("families are constants, and a test makes them")
}

fn counter(name: &str, help: &str) -> IntCounter {
    valid(IntCounter::new(name, help))
}

fn counters(name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    valid(IntCounterVec::new(Opts::new(name, help), labels))
}

fn int_gauge(name: &str, help: &str) -> IntGauge {
    valid(IntGauge::new(name, help))
}

fn int_gauges(name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    valid(IntGaugeVec::new(Opts::new(name, help), labels))
}

fn gauge(name: &str, help: &str) -> Gauge {
    valid(Gauge::new(name, help))
}

fn gauges(name: &str, help: &str, labels: &[&str]) -> GaugeVec {
    valid(GaugeVec::new(Opts::new(name, help), labels))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_exists_before_its_first_event() {
        let metrics = Metrics::new();
        metrics.set_fleet(&Packing::default(), NodeCounts::default(), 0);
        let text = String::from_utf8(metrics.text()).unwrap();
        for part in [
            "gpupack_verb_duration_seconds_count{outcome=\"refused\",verb=\"bind\"} 0",
            "gpupack_refusals_total{reason=\"silent\"} 0",
            "gpupack_binds_total{outcome=\"conflict\"} 0",
            "gpupack_nodes{state=\"never\"} 0",
            "gpupack_ready 0",
            "gpupack_build_info{component=\"extender\"",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
