//! Orders about MIG instances that failed, and when they are tried again. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::mig::plan::{MigOrder, MigPlan, Obstacle};
use wire::report::bodies::MigFailure;
use wire::report::report_limits::{MAX_MIG_ERROR_BYTES, MAX_MIG_FAILURES};
use wire::units::Timestamp;

/// Pause before an order is tried again; it doubles with each failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Longest such pause. A refused call is cheap, but it may wait for a lock of the driver.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The orders that could not be carried out.
#[derive(Debug, Default)]
pub struct Attempts {
    failed: BTreeMap<MigOrder, Attempt>,
}

/// The failures of one order.
#[derive(Debug)]
struct Attempt {
    obstacle: Obstacle,
    count: u32,
    /// When it is tried again; `None` if nothing was tried, since it cannot be now.
    again: Option<Timestamp>,
}

impl Attempts {
    /// Takes out of a plan the steps that wait for another attempt.
    pub fn hold_back(&self, plan: &mut MigPlan, now: Timestamp) {
        plan.steps.retain(|step| {
            let attempt = self.failed.get(&step.order);
            attempt.and_then(|attempt| attempt.again).is_none_or(|again| again <= now)
        });
    }

    /// Notes that an order cannot be carried out now. As soon as it can be, it is tried.
    pub fn refuse(&mut self, order: MigOrder, obstacle: impl Into<Obstacle>) {
        let attempt = Attempt { obstacle: obstacle.into(), count: 0, again: None };
        self.failed.insert(order, attempt);
    }

    /// Notes that an order was tried and failed.
    pub fn fail(&mut self, order: &MigOrder, obstacle: impl Into<Obstacle>, now: Timestamp) {
        let count = self.failed.get(order).map_or(0, |before| before.count);
        let pause = FIRST_PAUSE.saturating_mul(1 << count.min(16)).min(LONGEST_PAUSE);
        let again = Some(now.plus(pause));
        let (obstacle, count) = (obstacle.into(), count.saturating_add(1));
        let attempt = Attempt { obstacle, count, again };
        self.failed.insert(order.clone(), attempt);
    }

    /// Notes that an order was carried out. What could not be on that GPU may be possible now.
    pub fn succeed(&mut self, order: &MigOrder) {
        self.failed.remove(order);
        let waits = |other: &MigOrder, attempt: &Attempt| {
            other.place.gpu != order.place.gpu || attempt.again.is_some()
        };
        self.failed.retain(|other, attempt| waits(other, attempt));
    }

    /// Forgets the orders that are not among these: they are done, or no longer given.
    pub fn keep(&mut self, open: &BTreeSet<MigOrder>) {
        self.failed.retain(|order, _| open.contains(order));
    }

    /// When the next order is to be tried again.
    pub fn next(&self) -> Option<Timestamp> {
        self.failed.values().filter_map(|attempt| attempt.again).min()
    }

    /// The failures, as they are reported: those that an extender would accept, the first 64.
    pub fn failures(&self) -> Vec<MigFailure> {
        let all = self.failed.iter().filter_map(|(order, Attempt { obstacle, .. })| {
            order.failed(sentence(&obstacle.error), obstacle.hidden)
        });
        all.filter(MigFailure::is_believable).take(MAX_MIG_FAILURES).collect()
    }
}

/// An error as it may be reported: printable, and cut.
fn sentence(error: &str) -> String {
    let mut text = error.replace(char::is_control, " ");
    while text.len() > MAX_MIG_ERROR_BYTES {
        text.pop();
    }
    if text.is_empty() { "it failed without a reason".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mig::plan::{MigStep, Unfinished, Units, Work};
    use wire::report::bodies::MakeInstance;

    fn order(start: u32) -> MigOrder {
        let (gpu, profile) = ("GPU-a".to_owned(), "1g.10gb".to_owned());
        MigOrder::to_make(MakeInstance { gpu, profile, start })
    }

    fn plan(start: u32) -> MigPlan {
        let (gpu, slot) = ("GPU-a".to_owned(), Units { start, size: 1 });
        let begun = Unfinished { gpu, profile: 19, slot, is_new: true };
        let step = MigStep { order: order(start), work: Work::Make, begun, devices: Vec::new() };
        MigPlan { steps: vec![step], failures: Vec::new() }
    }

    fn is_due(attempts: &Attempts, start: u32, millis: u64) -> bool {
        let mut plan = plan(start);
        attempts.hold_back(&mut plan, Timestamp::from_millis(millis));
        !plan.steps.is_empty()
    }

    #[test]
    fn a_failed_order_is_tried_again_after_growing_pauses() {
        let mut attempts = Attempts::default();
        assert!(is_due(&attempts, 0, 0));
        let mut now = 0;
        for pause in [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000] {
            attempts.fail(&order(0), "no room".to_owned(), Timestamp::from_millis(now));
            assert!(!is_due(&attempts, 0, now + pause - 1), "{pause}");
            assert!(is_due(&attempts, 0, now + pause) && is_due(&attempts, 1, now));
            now += pause;
            assert_eq!(attempts.next(), Some(Timestamp::from_millis(now)));
        }
        attempts.refuse(order(0), "no such profile".to_owned());
        assert!(is_due(&attempts, 0, 0) && attempts.next().is_none(), "nothing was tried");
        assert_eq!(attempts.failures().len(), 1);
        attempts.keep(&BTreeSet::from([order(1)]));
        assert!(is_due(&attempts, 0, 0) && attempts.failures().is_empty());
        assert_eq!(attempts.next(), None);
    }

    #[test]
    fn an_order_that_is_done_ends_its_failure_and_the_refusals_of_its_gpu() {
        let mut attempts = Attempts::default();
        attempts.fail(&order(0), "it is held".to_owned(), Timestamp::START);
        attempts.refuse(order(1), "instance `MIG-1` has these units");
        attempts.fail(&order(2), "it is held".to_owned(), Timestamp::START);
        attempts.succeed(&order(0));
        let starts: Vec<u32> = attempts.failures().iter().map(|it| it.start).collect();
        assert_eq!(starts, [2]);
    }

    #[test]
    fn only_failures_that_an_extender_accepts_are_reported() {
        let mut attempts = Attempts::default();
        let long = format!("line\n{}", "ä".repeat(600));
        attempts.fail(&order(0), long, Timestamp::START);
        attempts.fail(&order(1), String::new(), Timestamp::START);
        attempts.fail(&order(99), "far away".to_owned(), Timestamp::START);
        let failures = attempts.failures();
        assert_eq!(failures.len(), 2, "{failures:?}");
        assert!(failures[0].error.starts_with("line ä") && failures[0].error.len() <= 512);
        assert_eq!(failures[1].error, "it failed without a reason");
    }
}
