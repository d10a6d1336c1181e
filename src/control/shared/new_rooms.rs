//! Where room appeared, for the loop that keeps room for pods.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::hardware::device::NodeName;
use crate::step::news::News;

/// The nodes with new room that the loop has yet to look at.
#[derive(Default)]
pub(crate) struct NewRooms {
    nodes: Mutex<BTreeSet<NodeName>>,
    is_due: AtomicBool,
    news: News,
}

impl NewRooms {
    /// Notes where room appeared. Never waits.
    pub(crate) fn note(&self, nodes: &[NodeName]) {
        if !nodes.is_empty() {
            self.nodes.lock().extend(nodes.iter().cloned());
            self.look();
        }
    }

    /// Lets the loop look now, for another reason. Never waits.
    pub(crate) fn look(&self) {
        self.is_due.store(true, Ordering::Release);
        self.news.ring();
    }

    /// Waits until the loop is to look.
    pub(crate) async fn due(&self) {
        self.news.until(|| self.is_due.load(Ordering::Acquire)).await;
    }

    /// Takes the nodes; what happens from now on is for the next look.
    pub(crate) fn take(&self) -> BTreeSet<NodeName> {
        self.is_due.store(false, Ordering::Release);
        std::mem::take(&mut *self.nodes.lock())
    }
}
