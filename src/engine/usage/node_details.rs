//! What agents report of their nodes beside their state: driver, where devices are, faults.
//!
//! For people to read. But for the isolation that is verified with it, it decides nothing about placement: whether
//! a device may take tenants is its [`Health`](wire::device::Health), and which devices are near each other is its
//! [`Topology`](crate::hardware::topology::Topology). The node's state has both.

use std::collections::BTreeMap;

use crate::hardware::pool::ConfiguredIsolation;
use crate::hardware::spots::Spot;
use crate::model::device_state::{DeviceState, Verification};
use crate::model::event::LedgerEvent;
use crate::model::isolation::{DriverLimits, Mode, Rules};
use crate::model::node_state::NodeState;
use crate::usage::history::Usages;
use crate::usage::samples::UsageSamples;
use crate::usage::starts::{PodStart, Starts};
use crate::usage::tenant_isolation::{IsolationTable, ReportedLists, SeenTenant, tenant_isolation};
use wire::device::{DeviceDetails, FailedMigOrder};
use wire::ids::{DeviceId, PodUid};
use wire::seen::{Condition, DeviceUse, Driver, ReportedTenant, StartedContainers};
use wire::units::Timestamp;

/// What an agent reports of its node beside its state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeDetails {
    /// The driver.
    pub driver: Option<Driver>,
    /// Details by UUID, of devices with any.
    pub devices: BTreeMap<DeviceId, DeviceDetails>,
    /// Conditions by UUID, of devices with any.
    pub conditions: BTreeMap<DeviceId, Condition>,
    /// Orders about MIG instances that the agent cannot carry out, as of the last report.
    pub mig_failures: Vec<FailedMigOrder>,
    /// What pods were seen to use.
    pub usage_samples: UsageSamples,
    /// What the driver confirms of tenants.
    pub isolation: IsolationTable,
    /// What pods used over time.
    pub usages: Usages,
    /// Whether pods got their GPU.
    pub starts: Starts,
    /// The version of the node at which pods and devices were last forgotten.
    pruned_at: u64,
}

/// The part of a report with these details.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DetailsReport {
    /// Driver and devices, when the report carries the inventory.
    pub inventory: Option<(Option<Driver>, BTreeMap<DeviceId, DeviceDetails>)>,
    /// Conditions at the time of the report.
    pub conditions: BTreeMap<DeviceId, Condition>,
    /// What the driver reports of pods, for each device whose processes were listed.
    pub tenants: BTreeMap<DeviceId, BTreeMap<PodUid, ReportedTenant>>,
    /// Orders about MIG instances that the agent cannot carry out at the time of the report.
    pub mig_failures: Vec<FailedMigOrder>,
    /// The orders about limits of memory that the agent has in force: their term, and each GPU whose limits it sets.
    pub limits: Option<(u64, BTreeMap<DeviceId, u64>)>,
    /// What the agent saw of the containers of pods, if that is news.
    pub containers: Option<StartedContainers>,
}

impl NodeDetails {
    /// Why the agent cannot make an instance at one of these spots, as it reports it.
    pub(crate) fn why_not_made<'a>(
        &self,
        mut spots: impl Iterator<Item = &'a Spot>,
    ) -> Option<&str> {
        let failed = spots.find_map(|spot| {
            let mut not_made = self.mig_failures.iter().filter(|order| order.removed.is_none());
            not_made.find(|order| Spot::of_failed(order) == *spot)
        });
        failed.map(|order| order.error.as_str())
    }

    /// Why the agent cannot remove an instance, as it reports it.
    pub(crate) fn why_not_removed(&self, id: &DeviceId) -> Option<String> {
        let mut failed = self.mig_failures.iter();
        let order = failed.find(|order| order.removed.as_ref() == Some(id))?;
        Some(format!("instance `{id}` on these units cannot be removed: {}", order.error))
    }

    /// How many pods are kept, in all its tables together.
    pub(crate) fn entries(&self) -> usize {
        let samples = self.usages.count() + self.usage_samples.count();
        samples + self.isolation.count() + self.starts.count()
    }

    /// Forgets what the node no longer has, if it has changed.
    pub(crate) fn prune(&mut self, version: u64, node_state: &NodeState) {
        if std::mem::replace(&mut self.pruned_at, version) != version {
            self.usage_samples.prune(node_state);
            self.usages.prune(node_state);
            self.isolation.prune(node_state);
            self.starts.prune(node_state);
        }
    }

    /// Which pods have started since, with their GPU or without.
    pub(crate) fn started(&mut self, node_state: &NodeState) -> Vec<PodStart> {
        self.starts.judge(node_state)
    }

    /// Applies a report, after the node's state did.
    pub(crate) fn take(
        &mut self,
        node_state: &NodeState,
        uses: &[DeviceUse],
        report: DetailsReport,
        rules: Rules,
        now: Timestamp,
    ) -> Vec<LedgerEvent> {
        if let Some((driver, devices)) = report.inventory {
            (self.driver, self.devices) = (driver, devices);
        }
        if let Some(started) = report.containers {
            self.starts.see(node_state, started);
        }
        self.starts.see_lists(node_state, uses);
        (self.conditions, self.mig_failures) = (report.conditions, report.mig_failures);
        let mut events = Vec::new();
        if uses.iter().any(|seen| seen.processes.is_some()) {
            events = self.usage_samples.take(node_state, uses, rules, now);
            let lists = ReportedLists { uses, tenants: &report.tenants };
            self.usages.take(node_state, lists, &self.usage_samples, now);
            events.extend(self.isolation.take(node_state, lists, rules.limits, now));
        }
        events
    }
}

/// Of each device with news: whether the isolation that its pool configures is in force.
///
/// It is missing where the driver has no limits or the MPS daemon takes no clients. It is also
/// missing if a tenant that should be limited certainly has no limit, or one above its share, for
/// longer than [`VERIFIED_WITHIN`]. What cannot be read proves nothing.
pub(crate) fn verification(
    node_state: &NodeState,
    details: &NodeDetails,
) -> Vec<(DeviceId, Verification)> {
    let devices = node_state.devices().iter();
    let found = devices.map(|device| (device, details.verification_of(device)));
    let news = found.filter(|(device, found)| device.verification() != *found);
    news.map(|(device, found)| (device.device().id.clone(), found)).collect()
}

impl NodeDetails {
    fn verification_of(&self, device: &DeviceState) -> Verification {
        let id = &device.device().id;
        let (mode, is_hopeless) = match device.configured_isolation() {
            ConfiguredIsolation::Driver => {
                let can_limit = self.devices.get(id).is_some_and(|known| known.can_limit_memory);
                (Mode::Driver, self.driver.is_some() && !can_limit)
            }
            ConfiguredIsolation::Mps => {
                (Mode::Mps, self.conditions.get(id).is_some_and(Condition::is_mps_away))
            }
            ConfiguredIsolation::None | ConfiguredIsolation::Hardware => {
                return Verification::Configured;
            }
        };
        if is_hopeless {
            return Verification::Missing;
        }
        let listed = self.isolation.devices.get(id);
        let tenants = device.tenants().iter().filter_map(|(uid, demand)| {
            let seen = listed?.get(uid)?;
            let found = tenant_isolation(device, uid, *demand, seen.reported, DriverLimits::Unused);
            (found.configured == mode).then_some((seen, found.verified == mode))
        });
        let tenants: Vec<(&SeenTenant, bool)> = tenants.collect();
        let is_missing = tenants.iter().any(|(seen, is_verified)| {
            !is_verified && seen.is_reported && is_unisolated(&seen.reported, mode)
        });
        if is_missing {
            Verification::Missing
        } else if !tenants.is_empty() && tenants.iter().all(|(_, is_verified)| *is_verified) {
            Verification::Verified
        } else {
            Verification::Configured
        }
    }
}

/// Whether a tenant that should be limited in this mode certainly has no limit, or one that is too high.
fn is_unisolated(reported: &ReportedTenant, mode: Mode) -> bool {
    match mode {
        Mode::Mps => !reported.is_mps_client || reported.mps_limit.is_some(),
        _ => reported.is_unlimited || reported.limit.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::ledger_fixture;
    use crate::ledger::nodes::state::Ledger;
    use crate::model::reservation::Placement;
    use std::time::Duration;
    use wire::api::condition::{DeviceFault, MpsState};
    use wire::ids::NodeName;
    use wire::units::{MemMib, Share};

    fn note(ledger: &Ledger, node: &str, report: DetailsReport) {
        let rules = Rules {
            tolerance: MemMib::ZERO,
            limits: DriverLimits::Unused,
            grace: Duration::ZERO,
            max_limit: Share::WHOLE,
        };
        assert_eq!(ledger.note(node, &[], report, rules, Timestamp::START), []);
    }

    #[test]
    fn details_stay_until_the_next_inventory_conditions_until_the_report() {
        let ledger = ledger_fixture::ledger("A");
        let id = DeviceId::new("A").unwrap();
        let driver = Driver { version: "580".to_owned(), cuda: None, lacks_uvm: false };
        let sick = Condition {
            fault: Some(DeviceFault::Xid),
            last_xid: Some(79),
            mps: Some(MpsState::Idle),
            ..Condition::default()
        };
        let details = DeviceDetails { minor: Some(3), ..DeviceDetails::default() };
        let devices = BTreeMap::from([(id.clone(), details)]);
        let report = DetailsReport {
            inventory: Some((Some(driver.clone()), devices.clone())),
            conditions: BTreeMap::from([(id.clone(), sick)]),
            ..DetailsReport::default()
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

    #[test]
    fn a_spot_has_the_failure_of_the_order_to_make_its_instance_until_the_next_report() {
        let ledger = ledger_fixture::ledger("A");
        let failed = |start, removed, error: &str| FailedMigOrder {
            error: error.to_owned(),
            ..ledger_fixture::failed_mig_order("A", start, removed)
        };
        let spots = [0, 1, 2].map(|start| Spot::of_failed(&failed(start, None, "")));
        let placement = |spot: &Spot| Placement {
            node: NodeName::new("n"),
            devices: Vec::new(),
            isolation: ConfiguredIsolation::None,
            guest: None,
            spots: vec![None, Some(spot.clone())],
        };
        let found = || spots.each_ref().map(|spot| ledger.why_not_made(&placement(spot)));
        let mig_failures = vec![failed(1, Some("MIG-1"), "in use"), failed(2, None, "no room")];
        note(&ledger, "n", DetailsReport { mig_failures, ..DetailsReport::default() });
        assert_eq!(found(), [None, None, Some("no room".to_owned())]);
        note(&ledger, "n", DetailsReport::default());
        assert_eq!(found(), [None, None, None]);
    }
}
