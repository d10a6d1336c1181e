//! Locks for tests that measure time, or need the cores for themselves: they run one after another.

use std::sync::{Mutex, MutexGuard, PoisonError};

static ROUNDS: Mutex<()> = Mutex::new(());

/// Waits until no other test holds the lock. Dropping the guard releases it, also in a failed test.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    ROUNDS.lock().unwrap_or_else(PoisonError::into_inner)
}
