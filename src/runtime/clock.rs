//! The only reader of the operating system's clock.
//!
//! Everything else is handed a [`Timestamp`], so that tests and the simulator own the time.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use wire::units::Timestamp;

/// The clock of this process, started once in `main` and copied to every loop.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    source: Source,
}

#[derive(Clone, Copy, Debug)]
enum Source {
    /// The system's clock, and the time that [`Timestamp::START`] stands for.
    System(Instant),
    /// A time that a simulation sets, and the wall clock when the process started.
    Simulated(&'static SimulatedTime),
}

/// The time of one simulated process.
#[derive(Debug)]
pub struct SimulatedTime {
    /// Milliseconds since the start of the process.
    since_start: AtomicU64,
    /// The wall clock at the start, in seconds since 1970.
    started_unix_seconds: u64,
    /// How far somebody has set the wall clock forward since, in seconds.
    stepped: AtomicI64,
}

impl SimulatedTime {
    /// A process that starts at this time of the wall clock.
    pub const fn starting(started_unix_seconds: u64) -> Self {
        let (since_start, stepped) = (AtomicU64::new(0), AtomicI64::new(0));
        Self { since_start, started_unix_seconds, stepped }
    }

    /// Sets the wall clock forward by this many seconds, or back.
    pub fn step_wall(&self, seconds: i64) {
        self.stepped.fetch_add(seconds, Ordering::Relaxed);
    }

    /// Time since 1970 on the wall clock.
    fn since_1970(&self) -> Duration {
        let stepped = self.stepped.load(Ordering::Relaxed);
        let started = self.started_unix_seconds.saturating_add_signed(stepped);
        Duration::from_millis(started * 1_000 + self.since_start.load(Ordering::Relaxed))
    }

    /// From now on it is this late.
    pub fn set(&self, now: Timestamp) {
        self.since_start.store(now.millis(), Ordering::Relaxed);
    }
}

impl Clock {
    /// Starts the clock: from here on [`Clock::now`] counts.
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
    pub fn start() -> Self {
        Self { source: Source::System(Instant::now()) }
    }

    /// A clock that a simulation sets.
    pub const fn simulated(time: &'static SimulatedTime) -> Self {
        Self { source: Source::Simulated(time) }
    }

    /// A clock that was started so long ago, as far as the system has been up.
    #[doc(hidden)] // for tests of what takes long
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
    pub fn started_ago(ago: Duration) -> Self {
        let now = Instant::now();
        Self { source: Source::System(now.checked_sub(ago).unwrap_or(now)) }
    }

    /// The present moment, monotonic.
    pub fn now(&self) -> Timestamp {
        Timestamp::START.plus(self.precise())
    }

    /// Time since the start to the resolution of the system: for measuring how long something took.
    pub fn precise(&self) -> Duration {
        match self.source {
            Source::System(started) => started.elapsed(),
            Source::Simulated(time) => {
                Duration::from_millis(time.since_start.load(Ordering::Relaxed))
            }
        }
    }

    /// Seconds since 1970 on the wall clock, which may jump: for what people read, never for the
    /// ledger, nor for times of the API server's objects (`step/api_server`). Zero before 1970.
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
    pub fn unix_seconds(&self) -> u64 {
        match self.source {
            Source::System(_) => {
                SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs())
            }
            Source::Simulated(time) => time.since_1970().as_secs(),
        }
    }

    /// The same in microseconds.
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
    pub fn unix_micros(&self) -> i64 {
        let passed = match self.source {
            Source::System(_) => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            Source::Simulated(time) => time.since_1970(),
        };
        i64::try_from(passed.as_micros()).unwrap_or(i64::MAX)
    }

    /// How long ago a time since 1970 was; none for one to come.
    pub fn age_of(since_1970: Duration) -> Option<Duration> {
        UNIX_EPOCH.checked_add(since_1970)?.elapsed().ok()
    }
}
