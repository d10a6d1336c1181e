use std::sync::Arc;

use super::*;
use crate::hardware::inventory::NodeInventory;
use crate::hardware::pool::{Borrow, Enforcement, PoolRule, PoolRules};
use crate::ledger::change::facts::PodFact;
use crate::ledger::change::reports::NodeReport;
use crate::ledger::ledger_fixture::{
    bound, hello, inventory, ledger, node, say, seconds, uid, uses,
};
use crate::ledger::nodes::state::Ledger;
use crate::model::isolation::Rules;
use crate::model::request::{GpuRequest, Limit, Movable};
use crate::usage::node_details::DetailsReport;
use wire::api::condition::MpsState;
use wire::device::{Device, DeviceDetails};
use wire::ids::{MigProfile, PoolName};
use wire::seen::{Condition, Driver};
use wire::units::MemMib;

/// The node with one GPU of 1000 MiB: `p` has half of it, and reports may say more of it.
fn tenanted(share: u64) -> Ledger {
    let ledger = ledger("A");
    ledger.see_pod(&bound("p", "n", "A", share), Timestamp::START);
    ledger
}

fn note(
    ledger: &Ledger,
    node: &str,
    uses: &[DeviceUse],
    report: DetailsReport,
    limits: DriverLimits,
    at: u64,
) -> Vec<LedgerEvent> {
    let rules = Rules {
        tolerance: MemMib::new(u64::MAX),
        limits,
        grace: Duration::ZERO,
        max_limit: Share::WHOLE,
    };
    ledger.note(node, uses, report, rules, seconds(at))
}

/// A report that keeps the conditions of the devices.
fn known(ledger: &Ledger) -> DetailsReport {
    DetailsReport { conditions: ledger.details("n").conditions, ..DetailsReport::default() }
}

/// A list with a process of `p`, reported so. Returns if an event says what is missing.
fn list(ledger: &Ledger, reported: Option<ReportedTenant>, limits: DriverLimits, at: u64) -> bool {
    let reported = reported.map(|reported| (uid("p"), reported)).into_iter().collect();
    let reported = BTreeMap::from([(DeviceId::new("A").unwrap(), reported)]);
    let report = DetailsReport { tenants: reported, ..known(ledger) };
    let events = note(ledger, "n", &uses("A", &["p"]), report, limits, at);
    let is_news = |event: &LedgerEvent| matches!(event, LedgerEvent::NoIsolation { .. });
    let is_room = |event: &LedgerEvent| matches!(event, LedgerEvent::Room(_));
    assert!(events.iter().all(|event| is_news(event) || is_room(event)), "{events:?}");
    events.iter().any(is_news)
}

/// Configured and verified mode of the pod.
fn modes(ledger: &Ledger, limits: DriverLimits) -> String {
    let node_state = node(ledger, "n");
    let device = &node_state.devices()[0];
    let held = device.tenants()[&uid("p")];
    let found = ledger.details("n").isolation.of(device, &uid("p"), held, limits);
    let tenants = ledger.isolation(limits);
    assert!(tenants[&found.configured].0 == 1 && tenants[&found.verified].1 == 1, "{tenants:?}");
    format!("{} {}", found.configured.name(), found.verified.name())
}

fn limit(mib: u64) -> Option<ReportedTenant> {
    Some(ReportedTenant { limit: Some(MemMib::new(mib)), ..ReportedTenant::default() })
}

/// An MPS client whose processes have this limit.
fn client(mib: Option<u64>) -> Option<ReportedTenant> {
    let mps_limit = mib.map(MemMib::new);
    Some(ReportedTenant { is_mps_client: true, mps_limit, ..ReportedTenant::default() })
}

#[test]
fn only_what_is_read_back_is_verified() {
    let mps = client(None);
    let of_clients = DriverLimits::OfClients;
    let (unused, configured) = (DriverLimits::Unused, DriverLimits::Configured);
    for (reported, limits, modes_then) in [
        (None, unused, "none none"),
        (mps, unused, "mps none"),
        (limit(500), unused, "driver driver"),
        (limit(501), unused, "none none"),
        (None, configured, "driver none"),
        (mps, configured, "driver none"),
        (limit(501), configured, "driver none"),
        (limit(500), configured, "driver driver"),
        (None, of_clients, "mps none"),
        (mps, of_clients, "mps none"),
        (client(Some(501)), of_clients, "mps none"),
        (client(Some(500)), of_clients, "mps mps"),
        (client(Some(500)), unused, "mps mps"),
        (client(Some(500)), configured, "driver mps"),
        (limit(500), of_clients, "driver driver"),
    ] {
        let ledger = tenanted(500_000);
        list(&ledger, reported, limits, 0);
        assert_eq!(modes(&ledger, limits), modes_then, "{reported:?} {limits:?}");
    }
    assert_eq!(modes(&tenanted(1_000_000), configured), "whole whole");
}

#[test]
fn clients_that_borrow_may_have_limits_up_to_what_they_may_use() {
    let ledger = tenanted(500_000);
    let mut fact = bound("q", "n", "A", 300_000);
    let request = fact.request.take().unwrap();
    let request = GpuRequest {
        limit: Some(Limit::Fraction(Share::from_millionths(600_000))),
        movable: Movable::Restart,
        ..GpuRequest::clone(&request)
    };
    ledger.see_pod(&PodFact { request: Some(Arc::new(request)), ..fact }, Timestamp::START);
    let lends = PoolRule { borrow: Borrow::Memory { most: Share::WHOLE }, ..PoolRule::default() };
    for (rule, limit, mode) in [
        (PoolRule::default(), 300, Mode::Mps),
        (PoolRule::default(), 301, Mode::None),
        (lends, 600, Mode::Mps),
        (lends, 601, Mode::None),
    ] {
        ledger.share_by(PoolRules::new([(PoolName::new(""), rule)]));
        let node_state = node(&ledger, "n");
        let device = &node_state.devices()[0];
        let held = device.tenants()[&uid("q")];
        let reported = client(Some(limit)).unwrap();
        let found = tenant_isolation(device, &uid("q"), held, reported, DriverLimits::OfClients);
        assert_eq!((found.configured, found.verified), (Mode::Mps, mode), "{limit}");
    }
}

#[test]
fn a_whole_device_isolates_only_its_single_tenant() {
    let gpu = inventory("A").devices()[0].clone();
    let parent = Device {
        id: DeviceId::new("P").unwrap(),
        kind: DeviceKind::MigParent,
        total: MemMib::new(2000),
        ..gpu.clone()
    };
    let (of, profile) = (parent.id.clone(), MigProfile::new("1g.5gb"));
    let instance = Device { kind: DeviceKind::MigInstance { parent: of, profile }, ..gpu.clone() };
    for (devices, alone) in [(vec![gpu], Mode::Whole), (vec![instance, parent], Mode::Mig)] {
        let ledger = tenanted(1_000_000);
        let inventory = Some(NodeInventory::new(devices).unwrap());
        say(&ledger, &NodeReport { inventory, ..hello("y", 1, "A") }).unwrap();
        let found = || {
            let node_state = node(&ledger, "n");
            let device =
                node_state.devices().iter().find(|device| device.device().id.as_str() == "A");
            let (device, seen) = (device.unwrap(), ReportedTenant::default());
            let held = device.tenants()[&uid("p")];
            let found = tenant_isolation(device, &uid("p"), held, seen, DriverLimits::Unused);
            (found.configured, found.verified)
        };
        assert_eq!(found(), (alone, alone));
        ledger.see_pod(&bound("q", "n", "A", 100_000), seconds(0));
        assert_eq!(found(), (Mode::None, Mode::None), "another pod was bound beside it");
        ledger.forget(&uid("q"));
        ledger.end_pod(&uid("q"), seconds(0));
        assert_eq!(found(), (Mode::None, Mode::None), "its processes may still run");
    }
}

#[test]
fn missing_isolation_is_reported_once_after_some_seconds() {
    let ledger = tenanted(500_000);
    let (limits, too_much) = (DriverLimits::Configured, limit(501));
    for (reported, at, is_event) in [
        (None, 0, false),
        (too_much, 9, false),
        (too_much, 10, true),
        (None, 99, false),
        (limit(500), 100, false),
        (None, 101, false),
        (None, 111, true),
    ] {
        assert_eq!(list(&ledger, reported, limits, at), is_event, "{reported:?} at {at}");
    }
    let clients = tenanted(500_000);
    for (reported, at, is_event) in [
        (client(None), 0, false),
        (client(Some(501)), 10, true),
        (client(Some(500)), 11, false),
        (None, 12, false),
        (None, 22, true),
    ] {
        let found = list(&clients, reported, DriverLimits::OfClients, at);
        assert_eq!(found, is_event, "{reported:?} at {at}");
    }
    let unasked = tenanted(500_000);
    assert!(!list(&unasked, client(None), DriverLimits::Unused, 0));
    assert!(!list(&unasked, client(None), DriverLimits::Unused, 99), "its own affair");
    assert!(!list(&unasked, None, DriverLimits::Unused, 0));
    assert!(!list(&unasked, None, DriverLimits::Unused, 99), "nobody requested it");
}

#[test]
fn configured_isolation_is_compared_with_verified_isolation() {
    let ledger = tenanted(500_000);
    let share_by = |enforcement| {
        let rule = PoolRule { enforcement, ..PoolRule::default() };
        let at = ledger.position("n").unwrap();
        ledger.cluster_mut().change_classes(|classes| {
            ledger.node_entry(at).change(|node_state| node_state.share_by(rule, classes));
        });
    };
    share_by(Enforcement::Driver);
    let verification = || node(&ledger, "n").devices()[0].verification().name();
    let unlimited = Some(ReportedTenant { is_unlimited: true, ..ReportedTenant::default() });
    for (reported, at, expected) in [
        (None, 0, "configured"),
        (None, 99, "configured"), // an unreadable limit verifies nothing
        (limit(500), 100, "verified"),
        (unlimited, 101, "configured"),
        (unlimited, 111, "missing"),
        (limit(501), 112, "missing"),
        (limit(500), 113, "verified"),
    ] {
        list(&ledger, reported, DriverLimits::Configured, at);
        assert_eq!(verification(), expected, "{reported:?} at {at}");
    }
    let id = DeviceId::new("A").unwrap();
    let driver = Driver { version: "580".to_owned(), cuda: None, lacks_uvm: false };
    for (can_limit_memory, expected) in [(false, "missing"), (true, "verified")] {
        let known = DeviceDetails { can_limit_memory, ..DeviceDetails::default() };
        let devices = BTreeMap::from([(id.clone(), known)]);
        let inventory = Some((Some(driver.clone()), devices));
        let report = DetailsReport { inventory, ..DetailsReport::default() };
        note(&ledger, "n", &[], report, DriverLimits::Configured, 120);
        list(&ledger, limit(500), DriverLimits::Configured, 120);
        assert_eq!(verification(), expected, "the driver knows limits: {can_limit_memory}");
    }
    share_by(Enforcement::Mps);
    let limits = DriverLimits::OfClients;
    for (reported, daemon, at, expected) in [
        (client(Some(500)), MpsState::Serving, 200, "verified"),
        (client(None), MpsState::Serving, 201, "configured"), // its environment cannot be read
        (client(None), MpsState::Serving, 219, "configured"),
        (None, MpsState::Serving, 220, "missing"), // no client, and reported
        (client(Some(500)), MpsState::Absent, 221, "missing"),
        (client(Some(500)), MpsState::Idle, 222, "verified"),
    ] {
        let condition = Condition { mps: Some(daemon), ..Condition::default() };
        let conditions = BTreeMap::from([(id.clone(), condition)]);
        let report = DetailsReport { conditions, ..DetailsReport::default() };
        note(&ledger, "n", &[], report, limits, at);
        list(&ledger, reported, limits, at);
        assert_eq!(verification(), expected, "{reported:?} {daemon:?} at {at}");
    }
    // The rule of the pool precedes what the webhook does elsewhere.
    for at in [230, 250] {
        assert!(!list(&ledger, client(Some(500)), DriverLimits::Configured, at));
        assert_eq!(verification(), "verified", "at {at}");
    }
}

#[test]
fn a_pod_without_processes_delays_nothing() {
    let ledger = tenanted(500_000);
    for at in [0, 99] {
        let limits = DriverLimits::Configured;
        let events = note(&ledger, "n", &uses("A", &[]), known(&ledger), limits, at);
        assert_eq!(events, []);
    }
    assert_eq!(modes(&ledger, DriverLimits::Configured), "driver none");
    let (uses, limits) = (uses("A", &["p"]), DriverLimits::Configured);
    assert_eq!(note(&ledger, "nobody", &uses, known(&ledger), limits, 0), []);
}
