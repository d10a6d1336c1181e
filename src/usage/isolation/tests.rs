use super::*;
use crate::hardware::device::DeviceDetails;
use crate::hardware::pool::{Enforcement, PoolRule};
use crate::ledger::fixture::{bound, ledger, node, seconds, uid, uses};
use crate::ledger::nodes::state::Ledger;
use crate::model::isolation::Rules;
use crate::usage::node_details::{Condition, DetailsReport, Driver};

/// The node with one GPU of 1000 MiB: `p` has half of it, and reports may say more of it.
fn tenanted(share: u64) -> Ledger {
    let ledger = ledger("A");
    ledger.see_pod(&bound("p", "n", "A", share), Timestamp::START);
    ledger
}

fn note(
    ledger: &Ledger,
    (node, uses): (&str, &[DeviceUse]),
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
    ledger.note(node, (uses, report), rules, seconds(at))
}

/// A report that keeps the conditions of the devices.
fn known(ledger: &Ledger) -> DetailsReport {
    DetailsReport { conditions: ledger.details("n").conditions, ..DetailsReport::default() }
}

/// A list with a process of `p`, reported so. Returns if an event says what is missing.
fn list(ledger: &Ledger, told: Option<Told>, limits: DriverLimits, at: u64) -> bool {
    let told = told.map(|told| (uid("p"), told)).into_iter().collect();
    let told = BTreeMap::from([(DeviceId::new("A").unwrap(), told)]);
    let report = DetailsReport { tenants: told, ..known(ledger) };
    let effects = note(ledger, ("n", &uses("A", &["p"])), report, limits, at);
    let is_news = |it: &LedgerEvent| matches!(it, LedgerEvent::Unprotected { .. });
    let is_room = |it: &LedgerEvent| matches!(it, LedgerEvent::Room(_));
    assert!(effects.iter().all(|it| is_news(it) || is_room(it)), "{effects:?}");
    effects.iter().any(is_news)
}

/// Configured and verified mode of the pod.
fn modes(ledger: &Ledger, limits: DriverLimits) -> String {
    let books = node(ledger, "n");
    let device = &books.devices()[0];
    let held = device.tenants()[&uid("p")];
    let found = ledger.details("n").protections.of(device, (&uid("p"), held), limits);
    let tenants = ledger.protections(limits);
    assert!(tenants[&found.intended].0 == 1 && tenants[&found.verified].1 == 1, "{tenants:?}");
    format!("{} {}", found.intended.name(), found.verified.name())
}

fn limit(mib: u64) -> Option<Told> {
    Some(Told { limit: Some(MemMib::new(mib)), ..Told::default() })
}

/// A client of MPS, whose processes have this limit.
fn client(mib: Option<u64>) -> Option<Told> {
    let mps_limit = mib.map(MemMib::new);
    Some(Told { is_mps_client: true, mps_limit, ..Told::default() })
}

#[test]
fn only_what_is_read_back_is_verified() {
    let mps = client(None);
    let of_clients = DriverLimits::OfClients;
    let (unused, intended) = (DriverLimits::Unused, DriverLimits::Intended);
    for (told, limits, modes_then) in [
        (None, unused, "none none"),
        (mps, unused, "mps none"),
        (limit(500), unused, "driver driver"),
        (limit(501), unused, "none none"),
        (None, intended, "driver none"),
        (mps, intended, "driver none"),
        (limit(501), intended, "driver none"),
        (limit(500), intended, "driver driver"),
        (None, of_clients, "mps none"),
        (mps, of_clients, "mps none"),
        (client(Some(501)), of_clients, "mps none"),
        (client(Some(500)), of_clients, "mps mps"),
        (client(Some(500)), unused, "mps mps"),
        (client(Some(500)), intended, "driver mps"),
        (limit(500), of_clients, "driver driver"),
    ] {
        let ledger = tenanted(500_000);
        list(&ledger, told, limits, 0);
        assert_eq!(modes(&ledger, limits), modes_then, "{told:?} {limits:?}");
    }
    assert_eq!(modes(&tenanted(1_000_000), intended), "whole whole");
}

#[test]
fn a_lack_of_protection_is_told_once_after_some_seconds() {
    let ledger = tenanted(500_000);
    let (limits, too_much) = (DriverLimits::Intended, limit(501));
    for (told, at, is_effect) in [
        (None, 0, false),
        (too_much, 9, false),
        (too_much, 10, true),
        (None, 99, false),
        (limit(500), 100, false),
        (None, 101, false),
        (None, 111, true),
    ] {
        assert_eq!(list(&ledger, told, limits, at), is_effect, "{told:?} at {at}");
    }
    let clients = tenanted(500_000);
    for (told, at, is_effect) in [
        (client(None), 0, false),
        (client(Some(501)), 10, true),
        (client(Some(500)), 11, false),
        (None, 12, false),
        (None, 22, true),
    ] {
        let found = list(&clients, told, DriverLimits::OfClients, at);
        assert_eq!(found, is_effect, "{told:?} at {at}");
    }
    let unasked = tenanted(500_000);
    assert!(!list(&unasked, client(None), DriverLimits::Unused, 0));
    assert!(!list(&unasked, client(None), DriverLimits::Unused, 99), "its own affair");
    assert!(!list(&unasked, None, DriverLimits::Unused, 0));
    assert!(!list(&unasked, None, DriverLimits::Unused, 99), "nobody asked for it");
}

#[test]
fn what_a_pool_promises_is_held_against_what_was_found() {
    let ledger = tenanted(500_000);
    let share_by = |enforcement| {
        let rule = PoolRule { enforcement, ..PoolRule::default() };
        let at = ledger.position("n").unwrap();
        ledger.world_mut().change_classes(|classes| {
            ledger.slot(at).change(|books| books.share_by(rule, classes));
        });
    };
    share_by(Enforcement::Driver);
    let evidence = || node(&ledger, "n").devices()[0].evidence().name();
    let unlimited = Some(Told { is_unlimited: true, ..Told::default() });
    for (told, at, expected) in [
        (None, 0, "intended"),
        (None, 99, "intended"), // what cannot be read proves nothing
        (limit(500), 100, "verified"),
        (unlimited, 101, "intended"),
        (unlimited, 111, "missing"),
        (limit(501), 112, "missing"),
        (limit(500), 113, "verified"),
    ] {
        list(&ledger, told, DriverLimits::Intended, at);
        assert_eq!(evidence(), expected, "{told:?} at {at}");
    }
    let id = DeviceId::new("A").unwrap();
    let driver = Driver { version: "580".to_owned(), cuda: None };
    for (can_limit_memory, expected) in [(false, "missing"), (true, "verified")] {
        let known = DeviceDetails { can_limit_memory, ..DeviceDetails::default() };
        let devices = BTreeMap::from([(id.clone(), known)]);
        let inventory = Some((Some(driver.clone()), devices));
        let report = DetailsReport { inventory, ..DetailsReport::default() };
        note(&ledger, ("n", &[]), report, DriverLimits::Intended, 120);
        list(&ledger, limit(500), DriverLimits::Intended, 120);
        assert_eq!(evidence(), expected, "the driver knows limits: {can_limit_memory}");
    }
    share_by(Enforcement::Mps);
    let limits = DriverLimits::OfClients;
    for (told, daemon, at, expected) in [
        (client(Some(500)), "Serving", 200, "verified"),
        (client(None), "Serving", 201, "intended"), // its environment cannot be read
        (client(None), "Serving", 219, "intended"),
        (None, "Serving", 220, "missing"), // no client, and reported
        (client(Some(500)), "Absent", 221, "missing"),
        (client(Some(500)), "Idle", 222, "verified"),
    ] {
        let condition = Condition { mps: Some(daemon), ..Condition::default() };
        let conditions = BTreeMap::from([(id.clone(), condition)]);
        let report = DetailsReport { conditions, ..DetailsReport::default() };
        note(&ledger, ("n", &[]), report, limits, at);
        list(&ledger, told, limits, at);
        assert_eq!(evidence(), expected, "{told:?} {daemon} at {at}");
    }
    // The rule of the pool precedes what the webhook does elsewhere.
    for at in [230, 250] {
        assert!(!list(&ledger, client(Some(500)), DriverLimits::Intended, at));
        assert_eq!(evidence(), "verified", "at {at}");
    }
}

#[test]
fn a_pod_without_processes_is_not_waited_for() {
    let ledger = tenanted(500_000);
    for at in [0, 99] {
        let seen = ("n", &uses("A", &[])[..]);
        let effects = note(&ledger, seen, known(&ledger), DriverLimits::Intended, at);
        assert_eq!(effects, []);
    }
    assert_eq!(modes(&ledger, DriverLimits::Intended), "driver none");
    let seen = ("nobody", &uses("A", &["p"])[..]);
    assert_eq!(note(&ledger, seen, known(&ledger), DriverLimits::Intended, 0), []);
}
