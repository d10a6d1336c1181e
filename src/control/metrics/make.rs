//! Shorthands for families, and numbers in the form of gauges.

use prometheus::core::Collector;
use prometheus::{
    CounterVec, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    IntGauge, IntGaugeVec, Opts, Registry,
};

use wire::units::{MemMib, Share};

/// A share in GPUs, as readers of a dashboard expect.
#[expect(clippy::cast_precision_loss, reason = "a gauge is a float; the ledger is not")]
pub(crate) fn ratio(share: Share) -> f64 {
    share.millionths() as f64 / Share::WHOLE.millionths() as f64
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float; the ledger is not")]
pub(crate) fn bytes(memory: MemMib) -> f64 {
    memory.mib() as f64 * 1_048_576.0
}

pub(crate) fn count(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "a gauge is a float; seconds are far below 2^53")]
pub(crate) fn whole(number: u64) -> f64 {
    number as f64
}

pub(crate) fn valid<T>(made: prometheus::Result<T>) -> T {
    made.expect("families are constants, and a test makes them")
}

/// Makes families and registers them.
pub(crate) struct Make<'a>(pub(crate) &'a Registry);

impl Make<'_> {
    fn registered<F: Collector + Clone + 'static>(&self, made: prometheus::Result<F>) -> F {
        let family = valid(made);
        valid(self.0.register(Box::new(family.clone())));
        family
    }

    pub(crate) fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.registered(IntCounter::new(name, help))
    }

    pub(crate) fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.registered(IntCounterVec::new(Opts::new(name, help), labels))
    }

    pub(crate) fn float_counters(&self, name: &str, help: &str, labels: &[&str]) -> CounterVec {
        self.registered(CounterVec::new(Opts::new(name, help), labels))
    }

    pub(crate) fn int_gauge(&self, name: &str, help: &str) -> IntGauge {
        self.registered(IntGauge::new(name, help))
    }

    pub(crate) fn int_gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.registered(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    pub(crate) fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.registered(Gauge::new(name, help))
    }

    pub(crate) fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.registered(GaugeVec::new(Opts::new(name, help), labels))
    }

    pub(crate) fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.registered(Histogram::with_opts(opts))
    }

    pub(crate) fn histograms(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
        labels: &[&str],
    ) -> HistogramVec {
        let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.registered(HistogramVec::new(opts, labels))
    }
}
