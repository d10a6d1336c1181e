//! What was measured of each node, kept until the node changes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::slot::Slot;
use crate::packing::node::NodeLedger;

/// By position of the node, with the version of its books.
#[derive(Debug)]
pub(super) struct PerNode<T>(Vec<Option<(u64, T)>>);

impl<T> Default for PerNode<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> PerNode<T> {
    /// Measures the nodes that have changed. `measure` knows so many classes of devices: a node that got
    /// one of a newer class this very moment is measured the next time.
    pub(super) fn refresh(
        &mut self,
        slots: &[Arc<Slot>],
        classes: usize,
        measure: impl Fn(&NodeLedger) -> T,
    ) {
        self.0.resize_with(slots.len(), || None);
        for (slot, known) in slots.iter().zip(&mut self.0) {
            let version = slot.version.load(Ordering::Acquire);
            if known.as_ref().is_none_or(|(seen, _)| *seen != version) {
                let (seen, found) = slot.look(|version, books| {
                    (version, books.is_of_classes(classes).then(|| measure(books)))
                });
                *known = found.map(|found| (seen, found));
            }
        }
    }

    /// What is known of each node, by position.
    pub(super) fn all(&self) -> impl Iterator<Item = Option<&T>> {
        self.0.iter().map(|known| known.as_ref().map(|(_, found)| found))
    }
}
