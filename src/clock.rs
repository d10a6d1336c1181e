//! The only reader of the operating system's clock.
//!
//! Everything else is handed a [`Timestamp`], so that tests and the simulator own the time.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::hardware::units::Timestamp;

/// The clock of this process, started once in `main` and copied to every loop.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// The time that [`Timestamp::START`] stands for.
    started: Instant,
}

impl Clock {
    /// Starts the clock: from here on [`Clock::now`] counts.
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
    pub fn start() -> Self {
        Self { started: Instant::now() }
    }

    /// A clock that was started so long ago, as far as the system has been up.
    #[doc(hidden)] // for tests of what takes long
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
    pub fn started_ago(ago: Duration) -> Self {
        let now = Instant::now();
        Self { started: now.checked_sub(ago).unwrap_or(now) }
    }

    /// The present moment, monotonic.
    pub fn now(&self) -> Timestamp {
        Timestamp::START.plus(self.started.elapsed())
    }

    /// Time since the start to the resolution of the system: for measuring how long something took.
    pub fn precise(&self) -> Duration {
        self.started.elapsed()
    }

    /// Seconds since 1970 on the wall clock, which may jump: for what people read, never for the
    /// ledger. Zero before 1970.
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
    pub fn unix_seconds(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs())
    }

    /// How long ago a time since 1970 was; none for one to come.
    pub fn age_of(since_1970: Duration) -> Option<Duration> {
        UNIX_EPOCH.checked_add(since_1970)?.elapsed().ok()
    }
}
