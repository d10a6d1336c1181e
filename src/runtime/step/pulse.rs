//! Whether the process has just been frozen.

use std::sync::atomic::{AtomicU64, Ordering};

use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// The process was frozen, or far too slow, if its last tick is older, in milliseconds.
const LATE: u64 = 3_000;

/// The same for the first tick after a freeze: what was sent before it may come after a second, shorter one.
const LATE_AGAIN: u64 = 1_500;

/// For this time after that, in milliseconds, what arrives may have been sent before.
const OLD_FOR: u64 = 500;

/// Tells a process that it was frozen: by SIGSTOP, or by a pause of its virtual machine. What then
/// arrives was sent before, and says nothing of now.
#[derive(Debug, Default)]
pub struct Pulse {
    /// The last tick, in milliseconds on the clock; zero before the first.
    last: AtomicU64,
    /// The tick after the last freeze.
    resumed: AtomicU64,
}

impl Pulse {
    /// Notes a tick. There is one in each second.
    pub fn tick(&self, now: Timestamp) {
        let last = self.last.swap(now.millis().max(1), Ordering::AcqRel);
        if self.is_late(last, now) {
            self.resumed.store(now.millis(), Ordering::Release);
        }
    }

    /// Whether what arrives now may be older than it seems.
    pub fn was_frozen(&self, now: Timestamp) -> bool {
        let resumed = self.resumed.load(Ordering::Acquire);
        let is_recent = resumed > 0 && now.millis() < resumed + OLD_FOR;
        let is_due = self.is_late(self.last.load(Ordering::Acquire), now);
        (is_recent || is_due) && !mutated(Mutation::FrozenReportTaken)
    }

    /// When the process went on after it was frozen last: what it knew before may be old.
    pub fn resumed(&self, now: Timestamp) -> Option<Timestamp> {
        if self.is_late(self.last.load(Ordering::Acquire), now) {
            return Some(now);
        }
        let resumed = self.resumed.load(Ordering::Acquire);
        (resumed > 0).then(|| Timestamp::from_millis(resumed))
    }

    fn is_late(&self, last: u64, now: Timestamp) -> bool {
        let most = if last == self.resumed.load(Ordering::Acquire) { LATE_AGAIN } else { LATE };
        last > 0 && now.millis() > last + most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_arrives_after_a_freeze_is_old_for_a_moment() {
        let (pulse, at) = (Pulse::default(), Timestamp::from_millis);
        assert!(!pulse.was_frozen(at(60_000)), "it has not begun");
        pulse.tick(at(0));
        pulse.tick(at(1_000));
        assert!(!pulse.was_frozen(at(4_000)), "a slow tick");
        assert_eq!(pulse.resumed(at(4_000)), None);
        assert!(pulse.was_frozen(at(4_001)), "before the tick that comes late");
        pulse.tick(at(9_000));
        assert!(pulse.was_frozen(at(9_499)), "from a buffer");
        assert!(!pulse.was_frozen(at(9_500)), "sent since");
        assert_eq!(pulse.resumed(at(9_500)), Some(at(9_000)));
        assert_eq!(pulse.resumed(at(10_501)), Some(at(10_501)), "frozen again");
        assert!(pulse.was_frozen(at(10_501)), "frozen again, before the tick that comes late");
        pulse.tick(at(11_000));
        assert!(pulse.was_frozen(at(11_499)), "from a buffer");
        assert!(!pulse.was_frozen(at(11_500)), "sent since");
        pulse.tick(at(12_000));
        pulse.tick(at(14_900));
        assert!(!pulse.was_frozen(at(17_900)), "slow ticks");
    }
}
