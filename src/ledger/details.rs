//! What agents say of their nodes beside the books: the driver, where devices sit, what ails them.
//!
//! For people to read. No device is given or refused because of it: whether a device may take tenants
//! is its [`Health`](crate::packing::device::Health), and which of several are near each other its
//! [`Nearness`](crate::packing::nearness::Nearness); both are in the books.

use std::collections::BTreeMap;
use std::time::Duration;

use super::books::{Ledger, locked};
use super::effect::Effect;
use super::protection::{DriverLimits, Protections, Told, evidence};
use super::sightings::Sightings;
use super::usage::Usages;
use crate::packing::details::DeviceDetails;
use crate::packing::device::{DeviceId, PodUid};
use crate::packing::node::{DeviceUse, NodeLedger};
use crate::packing::units::{MemMib, Share, Timestamp};

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
    /// The version of the books by which pods and devices were forgotten last.
    pruned_at: u64,
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

/// By what a report is judged.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Use within this of what is allowed is nobody's fault: the driver's own figures move by some MiB.
    pub tolerance: MemMib,
    /// What containers that share a GPU are given to.
    pub limits: DriverLimits,
    /// How long a pod that is no longer alone on its GPU may go on to use up to its limit.
    pub grace: Duration,
    /// No limit counts for more than this share of the GPU.
    pub max_limit: Share,
}

impl NodeDetails {
    /// How many pods are kept, in all its tables together.
    pub(super) fn entries(&self) -> usize {
        self.usages.count() + self.sightings.count() + self.protections.count()
    }

    /// Takes in a report, after the books have. Lists of processes come with every fifth or so; without
    /// one, only what the books no longer hold is forgotten, and that only when they have changed.
    fn take(
        &mut self,
        (version, books): (u64, &NodeLedger),
        (uses, report): (&[DeviceUse], DetailsReport),
        rules: Rules,
        now: Timestamp,
    ) -> Vec<Effect> {
        if let Some((driver, devices)) = report.inventory {
            (self.driver, self.devices) = (driver, devices);
        }
        self.conditions = report.conditions;
        if std::mem::replace(&mut self.pruned_at, version) != version {
            self.sightings.prune(books);
            self.usages.prune(books);
            self.protections.prune(books);
        }
        let mut effects = Vec::new();
        if uses.iter().any(|seen| seen.processes.is_some()) {
            effects = self.sightings.take(books, uses, rules, now);
            let seen = (uses, &report.tenants);
            self.usages.take(books, seen, &self.sightings, now);
            effects.extend(self.protections.take(books, seen, rules.limits, now));
        }
        effects
    }
}

impl Ledger {
    /// Notes what an accepted report of `node` says beside the books, and says what is new in it: pods that
    /// use more than they may, foreign use, and whose intended protection was not verified in time.
    pub fn note(
        &self,
        node: &str,
        seen: (&[DeviceUse], DetailsReport),
        rules: Rules,
        now: Timestamp,
    ) -> Vec<Effect> {
        let _stays = self.stay();
        let Some(at) = self.position(node) else { return Vec::new() };
        let slot = self.slot(at);
        let (mut effects, found) = slot.look(|version, books| {
            let mut details = locked(&slot.details);
            let effects = details.take((version, books), seen, rules, now);
            (effects, evidence(books, &details))
        });
        effects.extend(self.see_evidence(at, &found));
        effects
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

    fn note(ledger: &Ledger, node: &str, report: DetailsReport) {
        let rules = Rules {
            tolerance: MemMib::ZERO,
            limits: DriverLimits::Unused,
            grace: Duration::ZERO,
            max_limit: Share::WHOLE,
        };
        assert_eq!(ledger.note(node, (&[], report), rules, Timestamp::START), []);
    }

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
        note(&ledger, "n", report);
        assert_eq!(ledger.details("n").conditions.get(&id), Some(&sick));
        note(&ledger, "n", DetailsReport::default());
        let now = ledger.details("n");
        assert_eq!((now.driver, now.devices), (Some(driver), devices));
        assert!(now.conditions.is_empty());
        note(&ledger, "nobody", DetailsReport::default());
        assert_eq!(ledger.details("nobody"), NodeDetails::default());
    }
}
