//! Pods that should have ended and have not: no plan counts on their room.

use std::time::Duration;

use crate::ledger::nodes::state::Ledger;
use crate::model::reservation::{PodRef, Reservation, ReservationState};
use wire::ids::{DeviceId, NodeName};
use wire::units::Timestamp;

/// How long after its time to end a pod hangs. kubelet kills its containers at that time, and a driver that
/// is busy takes some seconds to end a process.
const HUNG_AFTER: Duration = Duration::from_secs(30);

/// A pod that hangs from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hung {
    /// The pod.
    pub pod: PodRef,
    /// Its node.
    pub node: NodeName,
    /// Its devices.
    pub devices: Vec<DeviceId>,
}

impl Ledger {
    /// Notes which pods hang at this time, also on the wall clock, and returns those that did not before. Looks at
    /// all nodes, and locks one at a time.
    pub fn note_hung(&self, now: Timestamp, unix_seconds: i64) -> Vec<Hung> {
        let _stays = self.stay();
        let node_table = self.node_table();
        let mut hung = Vec::new();
        for at in node_table.present() {
            let node_entry = &node_table[at];
            let is_ready = node_entry.is_ready();
            let hangs = |held: &Reservation| is_hung(held, is_ready, now, unix_seconds);
            let has_changed =
                node_entry.read().reservations().values().any(|held| hangs(held) != held.is_hung);
            if !has_changed {
                continue;
            }
            node_entry.change(|node_state| {
                let node = node_state.name().clone();
                for held in node_state.note_hung(hangs) {
                    let placed = held.placement.devices.iter();
                    let devices = placed.map(|placed| placed.id.clone()).collect();
                    hung.push(Hung { pod: held.pod.clone(), node: node.clone(), devices });
                }
            });
        }
        hung
    }
}

/// Whether a pod hangs: the time is over at which it was to have ended, or kubelet is away that should end it; or it
/// is gone and lists still show its processes.
fn is_hung(held: &Reservation, is_ready: bool, now: Timestamp, unix_seconds: i64) -> bool {
    match held.state {
        ReservationState::Assumed { .. } => false,
        ReservationState::Confirmed => held.tenure.is_some_and(|tenure| {
            let late = i64::try_from(HUNG_AFTER.as_secs()).unwrap_or(i64::MAX);
            let is_late = unix_seconds > tenure.ends_unix_seconds.saturating_add(late);
            tenure.is_ending && (is_late || !is_ready)
        }),
        ReservationState::Draining { since, clean_reports, shown } => {
            let is_late = shown.is_some() && now.since(since) >= HUNG_AFTER;
            clean_reports == 0 && (is_late || held.is_hung)
        }
    }
}

#[cfg(test)]
mod tests;
