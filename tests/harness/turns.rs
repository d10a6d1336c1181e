//! Turns: tests that measure time, or need the cores for themselves, run one after another.

use std::sync::{Mutex, MutexGuard, PoisonError};

static TURNS: Mutex<()> = Mutex::new(());

/// Waits until no other test holds a turn. It ends when the guard is dropped, also by a failed test.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    TURNS.lock().unwrap_or_else(PoisonError::into_inner)
}
