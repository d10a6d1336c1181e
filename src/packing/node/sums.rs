//! The derived sums of a node's books: made anew at each change, and compared by the audit.

use super::super::device::{DeviceId, NodeName};
use super::super::device_books::{BEYOND, ClaimRule, DeviceBooks};
use super::super::request::Demand;
use super::super::units::{HostAmount, MilliCpu};
use super::NodeLedger;

impl NodeLedger {
    /// Whether the derived sums agree with the reservations, claims and inventory. Recomputes all.
    ///
    /// # Errors
    /// [`AuditError`] naming what differs: our own arithmetic is broken.
    pub fn audit(&self) -> Result<(), AuditError> {
        let mut fresh = self.clone();
        fresh.recompute();
        let rooms = (&fresh.rooms, &fresh.rooms_under_claims);
        if fresh.devices != self.devices || rooms != (&self.rooms, &self.rooms_under_claims) {
            return Err(AuditError::Devices { node: self.name.clone() });
        }
        let host = (self.host_booked, self.host_claimed);
        if (fresh.host_booked, fresh.host_claimed) != host {
            return Err(AuditError::Host { node: self.name.clone() });
        }
        Ok(())
    }

    /// Derives all sums anew. A node has few tenants, so this is cheap and cannot drift.
    pub(super) fn recompute(&mut self) {
        self.recompute_devices();
        let booked = self.reservations.values().map(|held| held.host);
        self.host_booked = sum_host(booked.chain(self.others.values().copied()));
        self.host_claimed = sum_host(self.claims.values().map(|claim| claim.host));
    }

    pub(super) fn recompute_devices(&mut self) {
        for books in &mut self.devices {
            books.booked = Demand::ZERO;
            books.claimed = Demand::ZERO;
            books.tenants.clear();
            (books.has_unheld, books.needs_guard) = (false, false);
        }
        for (uid, reservation) in &self.reservations {
            for placed in &reservation.placement.devices {
                if let Some(books) = device_mut(&mut self.devices, &placed.id) {
                    books.booked = sum(books.booked, placed.demand);
                    let held = books.tenants.entry(uid.clone()).or_default();
                    *held = sum(*held, placed.demand);
                    books.note_company(reservation);
                }
            }
        }
        for claim in self.claims.values() {
            for placed in &claim.placement.devices {
                if let Some(books) = device_mut(&mut self.devices, &placed.id) {
                    books.claimed = sum(books.claimed, placed.demand);
                }
            }
        }
        self.recompute_rooms();
    }

    pub(super) fn recompute_rooms(&mut self) {
        let room = |claims| self.devices.iter().map(move |books| books.room(claims)).collect();
        (self.rooms, self.rooms_under_claims) =
            (room(ClaimRule::Respected), room(ClaimRule::Ignored));
    }
}

fn device_mut<'a>(devices: &'a mut [DeviceBooks], id: &DeviceId) -> Option<&'a mut DeviceBooks> {
    devices.iter_mut().find(|books| books.device.id == *id)
}

/// The sum of two written amounts. They are facts from outside, so an absurd sum stops nothing: the
/// device is overbooked. Sums are derived anew at each change, so nothing is subtracted from it.
fn sum(left: Demand, right: Demand) -> Demand {
    left.checked_add(right).unwrap_or(BEYOND)
}

/// The sum of what pods take of the host, with the same reasoning as [`sum`].
fn sum_host(mut amounts: impl Iterator<Item = HostAmount>) -> HostAmount {
    let beyond = HostAmount { cpu: MilliCpu::new(u64::MAX), memory: BEYOND.memory };
    amounts.try_fold(HostAmount::ZERO, HostAmount::checked_add).unwrap_or(beyond)
}

/// Our own arithmetic is broken: the derived sums differ from what they are derived from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuditError {
    /// The sums of a device.
    #[error("sums of the devices of node `{node}` differ from its reservations")]
    Devices {
        /// The node.
        node: NodeName,
    },
    /// The sums of processor time and memory.
    #[error("sums of CPU and memory of node `{node}` differ from its pods")]
    Host {
        /// The node.
        node: NodeName,
    },
}
