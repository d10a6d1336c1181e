//! Families of MIG instances that are made on demand.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::{HistogramVec, IntCounterVec, IntGaugeVec};

use crate::metrics::fleet::OTHER;
use crate::metrics::make::{Make, count};
use wire::ids::MigProfile;

/// Buckets of the time that binds wait for instances, in seconds.
const MAKE_BUCKETS: [f64; 8] = [0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 15.0];

/// Most profiles with series of their own, those seen first: agents name them. All models together have fewer.
const MOST_PROFILES: usize = 100;

/// How far an instance is, as a label.
const STATES: [&str; 3] = ["promised", "made", "leaving"];

/// What an order is about, as a label.
const ACTIONS: [&str; 2] = ["make", "remove"];

/// What became of an order to make an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MakeResult {
    /// It is made, and bound to its pod.
    Made,
    /// The agent could not make it.
    Failed,
}

impl MakeResult {
    fn label(self) -> &'static str {
        match self {
            Self::Made => "made",
            Self::Failed => "failed",
        }
    }
}

/// The instances of one profile, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MigFigures {
    /// Those that gpupack makes: ordered and not reported yet, made, and about to be removed.
    pub instances: [u64; 3],
    /// How many more fit, GPU by GPU, if no others are made.
    pub placeable: u64,
}

/// The orders about MIG instances that agents cannot carry out, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailedMigOrders {
    /// Those to make an instance.
    pub to_make: u64,
    pub to_remove: u64,
}

pub(crate) struct MigFamilies {
    instances: IntGaugeVec,
    placeable: IntGaugeVec,
    orders: IntCounterVec,
    failed: IntGaugeVec,
    waits: HistogramVec,
    /// The profiles with series of their own.
    known: Mutex<BTreeSet<String>>,
}

impl MigFamilies {
    /// Makes all families. Profiles have series once they are seen.
    pub(crate) fn new(make: &Make<'_>) -> Self {
        Self {
            instances: make.int_gauges(
                "gpupack_mig_instances",
                "MIG instances that gpupack makes, by profile and state.",
                &["profile", "state"],
            ),
            placeable: make.int_gauges(
                "gpupack_mig_placeable",
                "MIG instances of a profile that could be made now, if no others are made.",
                &["profile"],
            ),
            orders: make.counters(
                "gpupack_mig_orders_total",
                "MIG instances that were ordered for pods, by profile and outcome.",
                &["profile", "outcome"],
            ),
            failed: {
                let failed = make.int_gauges(
                    "gpupack_mig_failed_orders",
                    "Orders about MIG instances that agents cannot carry out now, by action.",
                    &["action"],
                );
                ACTIONS.iter().for_each(|action| drop(failed.with_label_values(&[action])));
                failed
            },
            waits: make.histograms(
"gpupack_mig_make_seconds",
"Time that binds waited until the MIG instances of their pods were made, by profile.",
                &MAKE_BUCKETS,
                &["profile"],
            ),
            known: Mutex::default(),
        }
    }

    fn label(&self, profile: &MigProfile) -> String {
        let (name, mut known) = (profile.to_string(), self.known.lock());
        if known.contains(&name) || (known.len() < MOST_PROFILES && known.insert(name.clone())) {
            return name;
        }
        OTHER.to_owned()
    }

    pub(crate) fn ordered<'a>(
        &self,
        profiles: impl Iterator<Item = &'a MigProfile>,
        result: MakeResult,
    ) {
        for profile in profiles {
            let profile = self.label(profile);
            for outcome in [MakeResult::Made, MakeResult::Failed] {
                let counter = self.orders.with_label_values(&[&profile, outcome.label()]);
                counter.inc_by(u64::from(outcome == result));
            }
        }
    }

    /// Shows how many orders fail now.
    pub(crate) fn show_failed(&self, FailedMigOrders { to_make, to_remove }: FailedMigOrders) {
        for (action, number) in ACTIONS.into_iter().zip([to_make, to_remove]) {
            self.failed.with_label_values(&[action]).set(count(number));
        }
    }

    pub(crate) fn waited(&self, profile: &MigProfile, time: Duration) {
        self.waits.with_label_values(&[&self.label(profile)]).observe(time.as_secs_f64());
    }

    /// Shows what there is now. A profile that no GPU has any more has no gauge.
    pub(crate) fn show(&self, all: &BTreeMap<MigProfile, MigFigures>) {
        let mut by_label: BTreeMap<String, MigFigures> = BTreeMap::new();
        for (profile, figures) in all {
            let sum = by_label.entry(self.label(profile)).or_default();
            sum.placeable += figures.placeable;
            sum.instances.iter_mut().zip(figures.instances).for_each(|(sum, one)| *sum += one);
        }
        self.instances.reset();
        self.placeable.reset();
        for (profile, figures) in by_label {
            self.placeable.with_label_values(&[&profile]).set(count(figures.placeable));
            for (state, number) in STATES.into_iter().zip(figures.instances) {
                self.instances.with_label_values(&[&*profile, state]).set(count(number));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;
    use prometheus::core::Collector;

    use super::*;

    #[test]
    fn profiles_that_agents_make_up_share_one_series() {
        let families = MigFamilies::new(&Make(&Registry::new()));
        let profiles: Vec<MigProfile> =
            (0..2 * MOST_PROFILES).map(|at| MigProfile::new(format!("1g.{at}gb"))).collect();
        families.ordered(profiles.iter(), MakeResult::Made);
        profiles.iter().for_each(|profile| families.waited(profile, Duration::from_secs(1)));
        let figures = MigFigures { instances: [1, 2, 3], placeable: 4 };
        let all = profiles.iter().map(|profile| (profile.clone(), figures)).collect();
        families.show(&all);
        let series = |family: &dyn Collector| family.collect()[0].get_metric().len();
        assert_eq!(series(&families.orders), 2 * (MOST_PROFILES + 1));
        assert_eq!(series(&families.placeable), MOST_PROFILES + 1);
        assert_eq!(series(&families.waits), MOST_PROFILES + 1);
        let others = families.waits.with_label_values(&[OTHER]).get_sample_count();
        assert_eq!(usize::try_from(others).unwrap(), MOST_PROFILES);
        let others = families.instances.with_label_values(&[OTHER, "leaving"]);
        assert_eq!(others.get(), 3 * i64::try_from(MOST_PROFILES).unwrap());
        families.show(&BTreeMap::new());
        assert_eq!(series(&families.instances), 0);
    }
}
