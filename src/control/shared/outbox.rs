//! Effects that background loops have still to see to.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::hardware::device::NodeName;
use crate::model::event::LedgerEvent;

/// Effects that wait for a background loop. A set: the same effect twice is one.
#[derive(Default)]
pub struct Outbox {
    effects: Mutex<BTreeSet<LedgerEvent>>,
    filled: Notify,
    nudged: Notify,
}

impl Outbox {
    /// Adds effects; never waits.
    pub fn push(&self, effects: Vec<LedgerEvent>) {
        if effects.is_empty() {
            return;
        }
        self.effects.lock().extend(effects);
        self.filled.notify_one();
    }

    /// Tells that there is something to do besides. Never waits.
    pub fn nudge(&self) {
        self.nudged.notify_one();
    }

    /// Waits for a nudge.
    pub async fn nudged(&self) {
        self.nudged.notified().await;
    }

    /// How many effects wait.
    pub(crate) fn count(&self) -> usize {
        self.effects.lock().len()
    }

    /// Waits until there are effects and takes them all.
    pub async fn take(&self) -> Vec<LedgerEvent> {
        loop {
            let taken = {
                let mut effects = self.effects.lock();
                std::mem::take(&mut *effects)
            };
            if !taken.is_empty() {
                return taken.into_iter().collect();
            }
            self.filled.notified().await;
        }
    }
}

/// The nodes on which room appeared.
pub fn rooms(effects: &[LedgerEvent]) -> Vec<NodeName> {
    let room = |effect: &LedgerEvent| match effect {
        LedgerEvent::Room(node) => Some(node.clone()),
        LedgerEvent::Overbooked { .. }
        | LedgerEvent::DeviceLost { .. }
        | LedgerEvent::Impossible { .. }
        | LedgerEvent::Unplaced { .. }
        | LedgerEvent::PlacementEdited { .. }
        | LedgerEvent::Overuse { .. }
        | LedgerEvent::Foreign { .. }
        | LedgerEvent::Unprotected { .. }
        | LedgerEvent::Silent(_) => None,
    };
    effects.iter().filter_map(room).collect()
}
