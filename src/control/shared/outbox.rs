//! Ledger events that background loops have yet to handle.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use engine::model::event::LedgerEvent;
use runtime::step::news::News;
use wire::ids::NodeName;

/// Ledger events that wait for a background loop. A set: the same event twice is one.
#[derive(Default)]
pub struct Outbox {
    events: Mutex<BTreeSet<LedgerEvent>>,
    filled: Notify,
    nudged: Notify,
}

impl Outbox {
    /// Adds events; never waits.
    pub fn push(&self, events: Vec<LedgerEvent>) {
        if events.is_empty() {
            return;
        }
        self.events.lock().extend(events);
        self.filled.notify_one();
    }

    /// Makes the loop look again without a ledger event. Never waits.
    pub fn nudge(&self) {
        self.nudged.notify_one();
    }

    /// Waits for a nudge.
    pub async fn nudged(&self) {
        self.nudged.notified().await;
    }

    pub(crate) fn count(&self) -> usize {
        self.events.lock().len()
    }

    /// Waits until there are events and takes them all.
    pub async fn take(&self) -> Vec<LedgerEvent> {
        loop {
            let taken = {
                let mut events = self.events.lock();
                std::mem::take(&mut *events)
            };
            if !taken.is_empty() {
                return taken.into_iter().collect();
            }
            self.filled.notified().await;
        }
    }
}

/// The nodes with new room that the loop which keeps room for pods has yet to look at.
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

/// The nodes on which room appeared.
pub fn rooms(events: &[LedgerEvent]) -> Vec<NodeName> {
    let nodes = events.iter().filter_map(|event| match event {
        LedgerEvent::Room(node) => Some(node.clone()),
        LedgerEvent::Overallocated { .. }
        | LedgerEvent::DeviceLost { .. }
        | LedgerEvent::Impossible { .. }
        | LedgerEvent::NotInTable { .. }
        | LedgerEvent::NoGeometry { .. }
        | LedgerEvent::Unplaced { .. }
        | LedgerEvent::MadeAgain { .. }
        | LedgerEvent::InstanceLost { .. }
        | LedgerEvent::PlacementEdited { .. }
        | LedgerEvent::Overuse { .. }
        | LedgerEvent::Untracked { .. }
        | LedgerEvent::NoIsolation { .. }
        | LedgerEvent::Blind { .. }
        | LedgerEvent::BlindNode(_)
        | LedgerEvent::NotReporting(_) => None,
    });
    nodes.collect()
}
