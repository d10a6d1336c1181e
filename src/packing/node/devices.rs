//! The devices of a node: which there are, how its pool has them shared, and what is known of that.

use std::collections::BTreeMap;

use super::super::device::{DeviceClass, DeviceClasses, DeviceId, NodeInventory};
use super::super::device_books::{DeviceBooks, Evidence};
use super::super::pool::PoolRule;
use super::super::reservation::Reservation;
use super::NodeLedger;

/// Lets a reservation share the texts of its ids with the devices: it may come with its own, and they would
/// be a third of what is kept of a pod.
pub(super) fn share_ids(devices: &[DeviceBooks], reservation: &mut Reservation) {
    for placed in &mut reservation.placement.devices {
        if let Some(books) = devices.iter().find(|books| books.device.id == placed.id) {
            placed.id = books.device.id.clone();
        }
    }
}

impl NodeLedger {
    /// Replaces the inventory; reservations stay, also those on devices that are gone.
    pub fn replace_inventory(&mut self, inventory: &NodeInventory, classes: &mut DeviceClasses) {
        let mut old: BTreeMap<DeviceId, DeviceBooks> =
            self.devices.drain(..).map(|books| (books.device.id.clone(), books)).collect();
        self.devices = inventory
            .devices()
            .iter()
            .map(|device| {
                let before = old.remove(&device.id);
                let class = classes.id_of(DeviceClass::of(&device, self.rule));
                DeviceBooks::new(device.clone(), class, self.rule, before)
            })
            .collect();
        self.nearness = inventory.nearness().clone();
        for (_, reservation) in self.reservations.iter_mut() {
            share_ids(&self.devices, reservation);
        }
        self.recompute_devices();
    }

    /// Whether all devices are of the first so many classes. A list of classes that was read a moment ago
    /// may lack those of devices that came since.
    pub fn is_of_classes(&self, count: usize) -> bool {
        self.devices.iter().all(|books| books.class.position() < count)
    }

    /// How the devices are shared.
    pub fn rule(&self) -> PoolRule {
        self.rule
    }

    /// Shares the devices by another rule from now on. Tenants keep what they have.
    pub fn share_by(&mut self, rule: PoolRule, classes: &mut DeviceClasses) {
        self.rule = rule;
        for books in &mut self.devices {
            books.class = classes.id_of(DeviceClass::of(&books.device, rule));
            books.rule = rule;
        }
        self.recompute_rooms();
    }

    /// Notes what the node's agent found of the intended protection of a device.
    pub fn see_evidence(&mut self, id: &DeviceId, evidence: Evidence) {
        if let Some(books) = self.devices.iter_mut().find(|books| books.device.id == *id) {
            books.evidence = evidence;
        }
        self.recompute_rooms();
    }

    /// Takes a device out of the inventory; its tenants stay booked.
    pub fn lose_device(&mut self, id: &DeviceId) {
        if let Some(at) = self.devices.iter().position(|books| books.device.id == *id) {
            self.devices.remove(at);
            self.nearness = self.nearness.without(at);
        }
        self.recompute_rooms();
    }
}
