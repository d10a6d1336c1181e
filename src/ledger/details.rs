//! What agents say of their nodes beside the books: the driver, where devices sit, what ails them.
//!
//! For people to read. No device is given or refused because of it: whether a device may take tenants
//! is its [`Health`](crate::packing::device::Health), and which of several are near each other its
//! [`Nearness`](crate::packing::nearness::Nearness); both are in the books.

use std::collections::BTreeMap;

use super::books::{Ledger, locked};
use super::protection::{Protections, Told};
use super::sightings::Sightings;
use super::usage::Usages;
use crate::packing::details::DeviceDetails;
use crate::packing::device::{DeviceId, PodUid};

/// The driver of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Driver {
    /// Its version, for instance `580.95.05`.
    pub version: String,
    /// Newest CUDA that it can run, for instance `13.0`.
    pub cuda: Option<String>,
}

/// What ails a device, or did, and how its daemon of MPS is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Why it takes no new tenants, as the agent names it.
    pub ailment: Option<&'static str>,
    /// Number of the newest Xid since the agent's start, an application's fault or its own.
    pub last_xid: Option<u64>,
    /// How its control daemon of MPS is, as the agent names it; none where nobody looks after one.
    pub mps: Option<&'static str>,
}

impl Condition {
    /// Whether its daemon of MPS takes no clients, so that they run unlimited or not at all.
    pub fn is_mps_away(&self) -> bool {
        matches!(self.mps, Some("absent" | "faulted"))
    }
}

/// What an agent says of its node beside the books.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeDetails {
    /// The driver.
    pub driver: Option<Driver>,
    /// Devices of which anything is known, by UUID.
    pub devices: BTreeMap<DeviceId, DeviceDetails>,
    /// Devices of which anything is to be told, by UUID.
    pub conditions: BTreeMap<DeviceId, Condition>,
    /// What pods were seen to use.
    pub sightings: Sightings,
    /// What the driver confirms of tenants.
    pub protections: Protections,
    /// What pods were seen to use over time.
    pub usages: Usages,
}

/// The part of a report that belongs to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DetailsReport {
    /// Driver and devices, when the report carries the inventory.
    pub inventory: Option<(Option<Driver>, BTreeMap<DeviceId, DeviceDetails>)>,
    /// Conditions of this moment.
    pub conditions: BTreeMap<DeviceId, Condition>,
    /// What the driver tells of pods, for each device whose processes were listed.
    pub tenants: BTreeMap<DeviceId, BTreeMap<PodUid, Told>>,
}

impl Ledger {
    /// Notes what an accepted report of `node` says beside the books.
    pub fn note_details(&self, node: &str, report: DetailsReport) {
        let Some(at) = self.position(node) else { return };
        let slot = self.slot(at);
        let mut details = locked(&slot.details);
        if let Some((driver, devices)) = report.inventory {
            (details.driver, details.devices) = (driver, devices);
        }
        details.conditions = report.conditions;
    }

    /// What is known of a node beside the books; nothing of a node that is not known.
    pub fn details(&self, node: &str) -> NodeDetails {
        let known = self.position(node).map(|at| locked(&self.slot(at).details).clone());
        known.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::fixture;

    #[test]
    fn details_stay_until_the_next_inventory_and_conditions_until_the_next_report() {
        let ledger = fixture::ledger("A");
        let id = DeviceId::new("A").unwrap();
        let driver = Driver { version: "580".to_owned(), cuda: None };
        let sick = Condition { ailment: Some("xid"), last_xid: Some(79), mps: Some("idle") };
        let details = DeviceDetails { minor: Some(3), ..DeviceDetails::default() };
        let devices = BTreeMap::from([(id.clone(), details)]);
        let report = DetailsReport {
            inventory: Some((Some(driver.clone()), devices.clone())),
            conditions: BTreeMap::from([(id.clone(), sick)]),
            tenants: BTreeMap::new(),
        };
        ledger.note_details("n", report);
        assert_eq!(ledger.details("n").conditions.get(&id), Some(&sick));
        ledger.note_details("n", DetailsReport::default());
        let now = ledger.details("n");
        assert_eq!((now.driver, now.devices), (Some(driver), devices));
        assert!(now.conditions.is_empty());
        ledger.note_details("nobody", DetailsReport::default());
        assert_eq!(ledger.details("nobody"), NodeDetails::default());
    }
}
