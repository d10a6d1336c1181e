//! Limits log lines that any client can cause: one per second for each reason, with a count of the
//! rest.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;

/// Pause between two lines for one reason.
const PAUSE: Duration = Duration::from_secs(1);

/// What a line is about: constant texts, so that there are few.
type Reason = (&'static str, &'static str);

/// When the last line was written for each reason, and how many were left out since.
#[derive(Default)]
pub struct LogLimit {
    last: Mutex<BTreeMap<Reason, (Duration, u64)>>,
}

impl LogLimit {
    /// No line was written yet.
    pub const fn new() -> Self {
        Self { last: Mutex::new(BTreeMap::new()) }
    }

    /// Whether a line may be written now, on the precise clock; then how many were left out since
    /// the last.
    pub fn admits(&self, reason: Reason, now: Duration) -> Option<u64> {
        let mut last = self.last.lock();
        let Some((at, left_out)) = last.get_mut(&reason) else {
            last.insert(reason, (now, 0));
            return Some(0);
        };
        if now.saturating_sub(*at) < PAUSE {
            *left_out += 1;
            return None;
        }
        *at = now;
        Some(std::mem::take(left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_log_lines_are_written_once_a_second_and_counted() {
        let limit = LogLimit::new();
        let admitted =
            |reason, millis| limit.admits(("filter", reason), Duration::from_millis(millis));
        assert_eq!(admitted("a", 0), Some(0));
        (1..1_000).for_each(|millis| assert_eq!(admitted("a", millis), None));
        assert_eq!(admitted("b", 999), Some(0), "another reason");
        assert_eq!((admitted("a", 1_000), admitted("a", 2_000)), (Some(999), Some(0)));
    }
}
