//! Pods that the version before was moving to other MIG instances. Kept for this version alone.

use crate::ledger::nodes::state::Ledger;
use crate::model::reservation::{Departure, Reservation, ReservationState};
use wire::ids::PodUid;

impl Ledger {
    /// Calls home the pods that the version before was moving to other MIG instances, where that is not finished: what
    /// is written on them does not say whether they have started there.
    pub fn call_back(&self) {
        for node_entry in self.node_table().iter() {
            let strays: Vec<PodUid> = {
                let node_state = node_entry.read();
                let held = node_state.reservations().values().filter(|held| is_stray(held));
                held.map(|held| held.pod.uid.clone()).collect()
            };
            for uid in strays {
                self.change_guest(&uid, |node_state| {
                    if node_state.reservation(&uid).is_some_and(is_stray) {
                        node_state.recall(std::slice::from_ref(&uid));
                    }
                });
            }
        }
    }
}

/// Whether a pod that is bound was to be moved to another instance.
fn is_stray(held: &Reservation) -> bool {
    let guest = held.placement.guest.as_ref();
    guest.is_some_and(|guest| guest.spot.is_some())
        && held.state == ReservationState::Confirmed
        && matches!(held.departure, Departure::Stays | Departure::Arrives { .. })
}

#[cfg(test)]
mod tests;
