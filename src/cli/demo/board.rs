//! What the demo counts and measures, shared by the loop that schedules and the one that shows it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;

use crate::metrics::labels::Verb;

/// Calls of one verb that percentiles look back on. Bounds the memory of a demo that runs for days.
const LOOK_BACK: usize = 20_000;

/// Counts and times.
#[derive(Default)]
pub(crate) struct Board {
    figures: Mutex<Figures>,
}

/// What became of the pods, and how long the calls took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    /// The pods.
    pub(crate) pods: PodCounts,
    /// Last refusal of each pod that waits or was refused, by its UID.
    pub(crate) reasons: BTreeMap<String, String>,
    /// Most devices seen overbooked at once on a node that a pod was just bound to.
    pub(crate) overbooked_max: usize,
    filter: Times,
    prioritize: Times,
    bind: Times,
}

/// What became of the pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct PodCounts {
    /// They came.
    pub(crate) arrived: u64,
    /// They were bound.
    pub(crate) placed: u64,
    /// Of the placed ones: booked without HTTP, as the base load of a large fleet.
    pub(crate) placed_without_http: u64,
    /// They wait for room.
    pub(crate) waiting: u64,
    /// Their request is faulty and will never be placed.
    pub(crate) refused: u64,
    /// They ran and ended.
    pub(crate) ended: u64,
    /// They were deleted after waiting for long.
    pub(crate) withdrawn: u64,
    /// Binds that failed although filter had said yes.
    pub(crate) bind_conflicts: u64,
}

/// Times of the calls of one verb.
#[derive(Clone, Debug, Default)]
struct Times {
    calls: u64,
    micros_max: u64,
    last_micros: Vec<u64>,
}

/// Latency of one verb: whole HTTP calls, percentiles over the last calls, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Latency {
    /// Calls in all.
    pub(crate) calls: u64,
    /// Median of the last 20,000.
    pub(crate) p50_us: u64,
    /// 99th percentile of the last 20,000.
    pub(crate) p99_us: u64,
    /// Longest of all.
    pub(crate) max_us: u64,
}

impl Board {
    /// The figures, for reading or a change; held for moments, never across an await.
    pub(crate) fn figures(&self) -> MutexGuard<'_, Figures> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a call.
    pub(crate) fn called(&self, verb: Verb, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        if let Some(times) = self.figures().times_mut(verb) {
            times.add(micros);
        }
    }
}

impl Figures {
    /// Latency of a verb.
    pub(crate) fn latency(&self, verb: Verb) -> Latency {
        match verb {
            Verb::Filter => self.filter.latency(),
            Verb::Prioritize => self.prioritize.latency(),
            Verb::Bind => self.bind.latency(),
            // The demo's scheduler evicts no pod.
            Verb::Preempt => Latency::default(),
        }
    }

    /// How many pods wait or were refused for each reason, the most frequent first.
    pub(crate) fn by_reason(&self) -> Vec<(&str, usize)> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for reason in self.reasons.values() {
            *counts.entry(reason).or_default() += 1;
        }
        let mut counts: Vec<_> = counts.into_iter().collect();
        counts.sort_by_key(|(reason, count)| (std::cmp::Reverse(*count), *reason));
        counts
    }

    fn times_mut(&mut self, verb: Verb) -> Option<&mut Times> {
        match verb {
            Verb::Filter => Some(&mut self.filter),
            Verb::Prioritize => Some(&mut self.prioritize),
            Verb::Bind => Some(&mut self.bind),
            Verb::Preempt => None,
        }
    }
}

impl Times {
    fn add(&mut self, micros: u64) {
        if self.last_micros.len() < LOOK_BACK {
            self.last_micros.push(micros);
        } else {
            let at = usize::try_from(self.calls).unwrap_or(0) % LOOK_BACK;
            self.last_micros[at] = micros;
        }
        self.calls += 1;
        self.micros_max = self.micros_max.max(micros);
    }

    fn latency(&self) -> Latency {
        let mut sorted = self.last_micros.clone();
        sorted.sort_unstable();
        // The smallest value that at least `percent` of the calls do not exceed.
        let percentile = |percent: usize| {
            let rank = (sorted.len() * percent).div_ceil(100).max(1);
            sorted.get(rank - 1).copied().unwrap_or(0)
        };
        Latency {
            calls: self.calls,
            p50_us: percentile(50),
            p99_us: percentile(99),
            max_us: self.micros_max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_last_calls_and_the_maximum_of_all() {
        let board = Board::default();
        let latency = |board: &Board| board.figures().latency(Verb::Filter);
        assert_eq!(latency(&board), Latency::default());
        board.called(Verb::Filter, Duration::from_micros(9_000));
        for micros in (1..=200).cycle().take(LOOK_BACK) {
            board.called(Verb::Filter, Duration::from_micros(micros));
        }
        let seen = latency(&board);
        assert_eq!((seen.calls, seen.max_us), (20_001, 9_000));
        assert_eq!((seen.p50_us, seen.p99_us), (100, 198));
        board.called(Verb::Bind, Duration::from_micros(3));
        let one = board.figures().latency(Verb::Bind);
        assert_eq!((one.p50_us, one.p99_us, one.max_us), (3, 3, 3));
    }

    #[test]
    fn reasons_are_counted_by_pod() {
        let mut figures = Figures::default();
        for (uid, reason) in [("a", "x"), ("b", "y"), ("c", "y"), ("a", "z")] {
            figures.reasons.insert(uid.to_owned(), reason.to_owned());
        }
        assert_eq!(figures.by_reason(), [("y", 2), ("z", 1)]);
    }
}
