//! Short ways to make families, and numbers as gauges show them.

use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts};

use crate::packing::units::{MemMib, Share};

/// A share as whoever reads a dashboard knows it: in GPUs.
#[expect(clippy::cast_precision_loss, reason = "a gauge is a float; the books are not")]
pub(super) fn ratio(share: Share) -> f64 {
    share.millionths() as f64 / Share::WHOLE.millionths() as f64
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float; the books are not")]
pub(super) fn bytes(memory: MemMib) -> f64 {
    memory.mib() as f64 * 1_048_576.0
}

pub(super) fn count(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float; seconds are far below 2^53")]
pub(super) fn whole(number: u64) -> f64 {
    number as f64
}

pub(super) fn valid<T>(made: prometheus::Result<T>) -> T {
    made.expect("families are constants, and a test makes them")
}

pub(super) fn counter(name: &str, help: &str) -> IntCounter {
    valid(IntCounter::new(name, help))
}

pub(super) fn counters(name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    valid(IntCounterVec::new(Opts::new(name, help), labels))
}

pub(super) fn int_gauge(name: &str, help: &str) -> IntGauge {
    valid(IntGauge::new(name, help))
}

pub(super) fn int_gauges(name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    valid(IntGaugeVec::new(Opts::new(name, help), labels))
}

pub(super) fn gauge(name: &str, help: &str) -> Gauge {
    valid(Gauge::new(name, help))
}

pub(super) fn gauges(name: &str, help: &str, labels: &[&str]) -> GaugeVec {
    valid(GaugeVec::new(Opts::new(name, help), labels))
}
