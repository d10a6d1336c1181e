//! What is wrong with certificates: when it is logged, and when a pass is tried again.

use std::collections::BTreeMap;
use std::time::Duration;

/// Pause after a first failure. It doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Longest pause after a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What was wrong at the last look, by what it is about.
#[derive(Debug, Default)]
pub struct Faults {
    present: BTreeMap<&'static str, Vec<String>>,
}

impl Faults {
    /// Notes what is wrong with one thing now: nothing, if it is well. Returns what was not wrong at the last
    /// look. So a fault is new again if its thing was well in between.
    pub fn note(&mut self, about: &'static str, found: Vec<String>) -> Vec<String> {
        let before = self.present.remove(about).unwrap_or_default();
        let new = found.iter().filter(|line| !before.contains(line)).cloned().collect();
        if !found.is_empty() {
            self.present.insert(about, found);
        }
        new
    }
}

/// Pauses that grow from failure to failure.
#[derive(Debug, Default)]
pub struct Pauses {
    /// The last one; `None` after a success.
    last: Option<Duration>,
}

impl Pauses {
    /// Something failed.
    pub fn grow(&mut self) {
        let next = self.last.map_or(FIRST_PAUSE, |last| 2 * last);
        self.last = Some(next.min(LONGEST_PAUSE));
    }

    /// Something succeeded.
    pub fn reset(&mut self) {
        self.last = None;
    }

    /// The pause after what failed last; `None` after a success.
    pub fn after_failure(&self) -> Option<Duration> {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_new_when_it_begins_and_when_it_comes_back() {
        let mut faults = Faults::default();
        let mut note = |about, found: &[&str]| {
            let found = found.iter().map(ToString::to_string).collect();
            faults.note(about, found).join(", ")
        };
        assert_eq!(note("a", &["x"]), "x");
        assert_eq!(note("a", &["x"]), "");
        assert_eq!(note("b", &["x"]), "x", "about something else");
        assert_eq!(note("a", &["x", "y"]), "y", "two at once");
        assert_eq!(note("a", &["y", "x"]), "");
        assert_eq!(note("a", &[]), "");
        assert_eq!(note("a", &["x"]), "x", "it was well in between");
    }

    #[test]
    fn pauses_grow_until_a_success() {
        let mut pauses = Pauses::default();
        assert_eq!(pauses.after_failure(), None);
        let mut seconds = || {
            pauses.grow();
            pauses.after_failure().unwrap_or_default().as_secs()
        };
        assert_eq!([0; 7].map(|_| seconds()), [1, 2, 4, 8, 16, 30, 30]);
        pauses.reset();
        assert_eq!(pauses.after_failure(), None);
        pauses.grow();
        assert_eq!(pauses.after_failure(), Some(FIRST_PAUSE));
    }
}
