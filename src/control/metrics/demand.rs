//! Families of the demand: waiting pods, time to placement, and what accounts hold and use.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use prometheus::{CounterVec, GaugeVec, HistogramVec, IntGaugeVec};

use crate::metrics::fleet::OTHER;
use crate::metrics::make::{Make, count, ratio, whole};
use engine::model::rejection::Rejection;
use engine::scoring::device_figures::{OTHER_SIZES, SIZES};
use wire::units::Share;

/// The reason of a waiting pod without a *filter* call so far.
const NOT_CALLED: &str = "not_called";

/// Buckets of the time to placement in seconds, from a tenth of a second to a day.
const PLACEMENT_BUCKETS: [f64; 14] =
    [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3_600.0, 21_600.0, 86_400.0];

/// Most namespaces and priority classes with their own series: those that were seen first. The rest
/// count as [`OTHER`], always, because a counter cannot change its name.
const MOST_NAMESPACES: usize = 200;
const MOST_CLASSES: usize = 50;

/// Waiting pods, by size and closest obstacle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueFigures {
    /// Number of pods, by name of the size and by obstacle.
    pub pods: BTreeMap<(&'static str, Option<&'static str>), u64>,
    /// Creation of the oldest pod, in seconds since 1970, by obstacle.
    pub oldest: BTreeMap<Option<&'static str>, u64>,
}

/// What an account held and used since the last call: millionths of a GPU, and MiB, times milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccountUse {
    pub share_allocated: u128,
    /// Share in which kernels ran, as far as known.
    pub share_used: u128,
    pub memory_allocated: u128,
    /// Memory in use, as far as known.
    pub memory_used: u128,
}

/// What a team may have and has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TeamFigures {
    pub name: String,
    /// What is guaranteed to it.
    pub guaranteed: Share,
    /// Most that it may have.
    pub at_most: Option<Share>,
    pub used: Share,
    /// What its over-quota pods have.
    pub over_quota: Share,
    pub waiting: u64,
}

pub(crate) struct DemandFamilies {
    waiting: IntGaugeVec,
    oldest: GaugeVec,
    placement: HistogramVec,
    share: CounterVec,
    memory: CounterVec,
    team: GaugeVec,
    team_waiting: IntGaugeVec,
    names: Mutex<(LabelValues, LabelValues)>,
}

/// Values of a label, and whether each has its own series.
#[derive(Default)]
struct LabelValues(BTreeMap<String, bool>);

impl LabelValues {
    /// The label of a value: the value if it has its own series, of which there are at most `most`.
    fn label<'a>(&mut self, value: &'a str, most: usize) -> &'a str {
        let known = self.0.len();
        // Folded values are kept only to count them, up to this number.
        if known >= 16 * most && !self.0.contains_key(value) {
            return OTHER;
        }
        let is_own = *self.0.entry(value.to_owned()).or_insert(known < most);
        if is_own { value } else { OTHER }
    }
}

fn sizes() -> impl Iterator<Item = &'static str> {
    SIZES.into_iter().map(|size| size.name).chain(OTHER_SIZES)
}

fn reasons() -> impl Iterator<Item = &'static str> {
    Rejection::LABELS.into_iter().chain([NOT_CALLED])
}

impl DemandFamilies {
    /// Makes all families. Those of sizes and obstacles begin with all series at zero.
    pub(crate) fn new(make: &Make<'_>) -> Self {
        let of_team = ["namespace", "priority_class", "kind"];
        let families = Self {
            waiting: make.int_gauges(
                "gpupack_waiting_pods",
                "GPU pods that fit no node at the last attempt, by size and closest obstacle.",
                &["size", "reason"],
            ),
            oldest: make.gauges(
                "gpupack_waiting_oldest_created_timestamp_seconds",
                "When the oldest waiting pod was created; 0 if no pod waits.",
                &["reason"],
            ),
            placement: make.histograms(
                "gpupack_time_to_placement_seconds",
                "From the creation of a pod to its accepted bind, in whole seconds.",
                &PLACEMENT_BUCKETS,
                &["size"],
            ),
            share: make.float_counters(
                "gpupack_share_seconds_total",
                "Compute share times time, in GPU-seconds: allocated, and in which kernels ran.",
                &of_team,
            ),
            memory: make.float_counters(
                "gpupack_memory_byte_seconds_total",
                "Device memory times time: allocated, and seen in use.",
                &of_team,
            ),
            team: make.gauges(
                "gpupack_team_gpus",
                "What teams may have and have of the GPUs, where the configuration says.",
                &["team", "kind"],
            ),
            team_waiting: make.int_gauges(
                "gpupack_team_waiting_pods",
                "GPU pods of a team that fit no node at the last attempt.",
                &["team"],
            ),
            names: Mutex::default(),
        };
        sizes().for_each(|size| drop(families.placement.with_label_values(&[size])));
        families.show(&QueueFigures::default());
        families
    }

    /// Sets the gauges of waiting pods.
    pub(crate) fn show(&self, queue: &QueueFigures) {
        for size in sizes() {
            for reason in reasons() {
                let obstacle = Some(reason).filter(|reason| *reason != NOT_CALLED);
                let pods = queue.pods.get(&(size, obstacle)).copied().unwrap_or(0);
                self.waiting.with_label_values(&[size, reason]).set(count(pods));
            }
        }
        for reason in reasons() {
            let obstacle = Some(reason).filter(|reason| *reason != NOT_CALLED);
            let created = queue.oldest.get(&obstacle).copied().unwrap_or(0);
            self.oldest.with_label_values(&[reason]).set(whole(created));
        }
    }

    /// Records that a pod was placed `after_seconds` after its creation.
    pub(crate) fn placed(&self, size: &'static str, after_seconds: u64) {
        self.placement.with_label_values(&[size]).observe(whole(after_seconds));
    }

    /// Adds what the pods of a namespace and priority class held and used.
    pub(crate) fn used(&self, namespace: &str, class: &str, used: AccountUse) {
        let mut names = self.names.lock();
        let namespace = names.0.label(namespace, MOST_NAMESPACES);
        let class = names.1.label(class, MOST_CLASSES);
        let gpu_seconds = 1e-9;
        let byte_seconds = 1_048_576.0 / 1e3;
        for (family, kind, amount, unit) in [
            (&self.share, "allocated", used.share_allocated, gpu_seconds),
            (&self.share, "used", used.share_used, gpu_seconds),
            (&self.memory, "allocated", used.memory_allocated, byte_seconds),
            (&self.memory, "used", used.memory_used, byte_seconds),
        ] {
            family.with_label_values(&[namespace, class, kind]).inc_by(float(amount) * unit);
        }
    }

    /// Sets what each team may have and has. Teams beyond the first 200 by name share their series.
    pub(crate) fn show_teams(&self, teams: &[TeamFigures]) {
        self.team.reset();
        self.team_waiting.reset();
        for (at, team) in teams.iter().enumerate() {
            let name = if at < MOST_NAMESPACES { team.name.as_str() } else { OTHER };
            let amounts = [
                ("guaranteed", Some(team.guaranteed)),
                ("at_most", team.at_most),
                ("used", Some(team.used)),
                ("over_quota", Some(team.over_quota)),
            ];
            for (kind, amount) in amounts {
                if let Some(amount) = amount {
                    self.team.with_label_values(&[name, kind]).add(ratio(amount));
                }
            }
            self.team_waiting.with_label_values(&[name]).add(count(team.waiting));
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a counter is a float")]
fn float(whole: u128) -> f64 {
    whole as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_without_own_series_stays_in_other() {
        let mut names = LabelValues::default();
        assert_eq!(
            [names.label("a", 2), names.label("b", 2), names.label("c", 2)],
            ["a", "b", OTHER]
        );
        assert_eq!([names.label("c", 2), names.label("a", 2)], [OTHER, "a"]);
        (0..1_000).for_each(|at| assert_eq!(names.label(&format!("n{at}"), 2), OTHER));
        assert_eq!(names.0.len(), 32, "the maximum number of names is kept");
    }
}
