//! A flag that is set once, and wakes the tasks that wait for it in their order.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// Not set at first. Tokio's own channels wake waiting tasks in an order of chance.
#[derive(Debug, Default)]
pub struct Flag {
    is_set: AtomicBool,
    news: Notify,
}

impl Flag {
    /// Sets it for good.
    pub fn set(&self) {
        self.is_set.store(true, Ordering::Release);
        self.news.notify_waiters();
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }

    /// Waits until it is set.
    pub async fn wait(&self) {
        while !self.is_set() {
            let mut news = pin!(self.news.notified());
            news.as_mut().enable();
            if !self.is_set() {
                news.await;
            }
        }
    }
}
