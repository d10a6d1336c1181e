//! What tasks wait for: a state that may have changed, and a flag that is set once.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Wakes the tasks that wait for a state, in the order in which they wait. Tokio's channels wake
/// them in an order of chance, so a simulation would not be replayed exactly.
#[derive(Debug, Default)]
pub struct News {
    rings: Notify,
}

impl News {
    /// Says that the state has changed.
    pub fn ring(&self) {
        self.rings.notify_waiters();
    }

    /// Waits until the state is so; it is looked at now, and after each change.
    pub async fn until(&self, is_so: impl Fn() -> bool) {
        loop {
            let mut rings = pin!(self.rings.notified());
            rings.as_mut().enable();
            if is_so() {
                return;
            }
            rings.await;
        }
    }
}

/// Not set at first.
#[derive(Debug, Default)]
pub struct Flag {
    is_set: AtomicBool,
    news: News,
}

impl Flag {
    /// Sets it for good.
    pub fn set(&self) {
        self.is_set.store(true, Ordering::Release);
        self.news.ring();
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }

    /// Waits until it is set.
    pub async fn wait(&self) {
        self.news.until(|| self.is_set()).await;
    }
}
