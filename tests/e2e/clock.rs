//! The clock and the environment, read in one place each.

use std::ffi::OsString;
use std::time::{Duration, Instant};

/// A moment on the monotonic clock.
#[expect(clippy::disallowed_methods, reason = "tests measure real programs in real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// An environment variable that is set and not empty.
#[expect(clippy::disallowed_methods, reason = "the testbed is configured where cargo test is run")]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The same for a path, which need not be UTF-8.
pub(crate) fn path_variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// A whole number from the environment, or the default.
pub(crate) fn number(name: &str, default: usize) -> usize {
    variable(name).map_or(default, |text| {
        text.parse().unwrap_or_else(|_| panic!("{name} must be a whole number, not `{text}`"))
    })
}

/// The duration in whole milliseconds, for figures.
pub(crate) fn ms(duration: Duration) -> u128 {
    duration.as_millis()
}
