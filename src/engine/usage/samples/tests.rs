use super::*;
use crate::hardware::pool::{PoolRule, PoolRules};
use crate::ledger::change::facts::PodFact;
use crate::ledger::ledger_fixture::{bound, hello, ledger, report, say, seconds, uid};
use crate::ledger::nodes::state::Ledger;
use crate::model::isolation::DriverLimits;
use crate::model::request::{Limit, Movable};
use crate::model::reservation::Guest;
use crate::usage::node_details::DetailsReport;
use wire::ids::PoolName;
use wire::seen::ProcessUse;

fn note(ledger: &Ledger, node: &str, uses: &[DeviceUse]) -> Vec<LedgerEvent> {
    note_at(ledger, node, uses, Timestamp::START)
}

fn note_at(ledger: &Ledger, node: &str, uses: &[DeviceUse], now: Timestamp) -> Vec<LedgerEvent> {
    let rules = Rules {
        tolerance: MemMib::new(50),
        limits: DriverLimits::Unused,
        grace: Duration::from_secs(30),
        max_limit: Share::from_millionths(900_000),
    };
    ledger.note(node, uses, DetailsReport::default(), rules, now)
}

/// A report of one device with these processes; `?` is an amount that the driver cannot say.
fn list(device: &str, processes: &str) -> Vec<DeviceUse> {
    let mut uses = crate::ledger::ledger_fixture::uses(device, &[]);
    let process = |text: &str| {
        let (pod, mib) = text.split_once('=').unwrap();
        let pod = (pod != "host").then(|| uid(pod));
        ProcessUse { pod, memory: (mib != "?").then(|| MemMib::new(mib.parse().unwrap())) }
    };
    uses[0].processes = Some(processes.split_whitespace().map(process).collect());
    uses
}

/// The ledger with two GPUs of 1000 MiB; `p` has half of A, `q` a fifth of A, `r` half of B.
fn tenanted() -> Ledger {
    let ledger = ledger("A B");
    for (name, device, share) in [("p", "A", 500_000), ("q", "A", 200_000), ("r", "B", 500_000)] {
        ledger.see_pod(&bound(name, "n", device, share), Timestamp::START);
    }
    ledger
}

fn shown(events: &[LedgerEvent]) -> String {
    let shown = events.iter().map(|event| match event {
        LedgerEvent::Overuse { device, pod, used, allowed, .. } => {
            format!("{pod} {}/{} on {device}", used.mib(), allowed.mib())
        }
        LedgerEvent::Untracked { device, used, .. } => {
            format!("foreign {} on {device}", used.mib())
        }
        other => format!("{other:?}"),
    });
    shown.collect::<Vec<_>>().join(", ")
}

fn check(ledger: &Ledger, processes: &str, events: &str, over: &str) {
    let reported = note(ledger, "n", &list("A", processes));
    assert_eq!(shown(&reported), events, "{processes}");
    let found = ledger.over_limit_pods();
    let rows = found.iter().map(|over| {
        format!("{} +{} x{}", over.pod(), over.seen.excess().mib(), over.seen.lists_over)
    });
    assert_eq!(rows.collect::<Vec<_>>().join(", "), over, "{processes}");
}

#[test]
fn an_over_limit_pod_is_reported_once_and_counted_with_each_list() {
    let ledger = tenanted();
    check(&ledger, "p=500 q=250", "", "");
    check(&ledger, "p=400 p=151 q=200", "p 551/500 on A", "p +51 x1");
    check(&ledger, "p=600 q=251", "q 251/200 on A", "p +100 x2, q +51 x1");
    check(&ledger, "p=550 q=300", "", "q +100 x2");
    check(&ledger, "p=600", "p 600/500 on A", "p +100 x1");
    check(&ledger, "p=600 p=?", "", "");
    check(&ledger, "", "", "");
}

#[test]
fn a_report_without_lists_changes_nothing() {
    let ledger = tenanted();
    check(&ledger, "p=600", "p 600/500 on A", "p +100 x1");
    let mut uses = list("A", "");
    uses[0].processes = None;
    assert_eq!(note(&ledger, "n", &uses), []);
    assert_eq!(ledger.over_limit_pods().len(), 1);
}

#[test]
fn a_pod_on_a_device_without_reservation_is_over_its_limit() {
    let ledger = tenanted();
    check(&ledger, "r=51", "r 51/0 on A", "r +51 x1");
}

/// `p` with half of A, and this limit.
fn limited(limit: Limit) -> PodFact {
    let mut fact = bound("p", "n", "A", 500_000);
    let mut request = (**fact.request.as_ref().unwrap()).clone();
    request.limit = Some(limit);
    fact.request = Some(request.into());
    fact
}

#[test]
fn a_pod_alone_on_its_gpu_may_use_its_limit_and_no_more() {
    for (limit, allowed) in [
        (Limit::Fraction(Share::from_millionths(800_000)), 800),
        (Limit::Memory(MemMib::new(700)), 700),
        (Limit::Memory(MemMib::new(1)), 500),
        (Limit::Fraction(Share::WHOLE), 900), // the highest that the operator allows
        (Limit::Memory(MemMib::new(5_000)), 900),
    ] {
        let ledger = ledger("A B");
        ledger.see_pod(&limited(limit), Timestamp::START);
        check(&ledger, &format!("p={}", allowed + 50), "", "");
        let reported = format!("p {}/{allowed} on A", allowed + 51);
        check(&ledger, &format!("p={}", allowed + 51), &reported, "p +51 x1");
        check(&ledger, "", "", "");
    }
}

#[test]
fn a_pool_that_lends_compute_lends_no_memory() {
    let ledger = ledger("A B");
    let rule = PoolRule { borrow: Borrow::Compute, ..PoolRule::default() };
    ledger.share_by(PoolRules::new([(PoolName::new(""), rule)]));
    ledger.see_pod(&limited(Limit::Fraction(Share::WHOLE)), Timestamp::START);
    check(&ledger, "p=550", "", "");
    check(&ledger, "p=551", "p 551/500 on A", "p +51 x1");
}

#[test]
fn a_pool_that_lends_memory_lends_it_to_pods_that_may_be_restarted() {
    for (movable, allowed) in [(Movable::Never, 500), (Movable::Restart, 900)] {
        let ledger = ledger("A B");
        let borrow = Borrow::Memory { most: Share::from_millionths(900_000) };
        let rule = PoolRule { borrow, ..PoolRule::default() };
        ledger.share_by(PoolRules::new([(PoolName::new(""), rule)]));
        let mut fact = limited(Limit::Fraction(Share::WHOLE));
        let mut request = (**fact.request.as_ref().unwrap()).clone();
        request.movable = movable;
        fact.request = Some(request.into());
        ledger.see_pod(&fact, Timestamp::START);
        ledger.see_pod(&bound("q", "n", "A", 50_000), Timestamp::START); // also beside others
        check(&ledger, &format!("p={} q=1", allowed + 50), "", "");
        let reported = format!("p {}/{allowed} on A", allowed + 51);
        check(&ledger, &format!("p={} q=1", allowed + 51), &reported, "p +51 x1");
    }
}

#[test]
fn a_guest_may_use_its_request_where_it_runs() {
    let ledger = ledger("A B");
    let mut fact = limited(Limit::Fraction(Share::WHOLE));
    let guest = Guest { on: DeviceId::new("B").unwrap(), spot: None, leaving: None };
    fact.placement.as_mut().unwrap().guest = Some(guest);
    ledger.see_pod(&fact, Timestamp::START);
    let of = |events: &[LedgerEvent]| shown(events);
    assert_eq!(of(&note(&ledger, "n", &list("B", "p=550"))), "");
    assert_eq!(
        of(&note(&ledger, "n", &list("B", "p=900"))),
        "",
        "its limit, while it is alone there"
    );
    ledger.see_pod(&bound("q", "n", "B", 200_000), seconds(1));
    assert_eq!(of(&note_at(&ledger, "n", &list("B", "p=551 q=1"), seconds(2))), "", "the grace");
    let late = note_at(&ledger, "n", &list("B", "p=551 q=1"), seconds(40));
    assert_eq!(of(&late), "p 551/500 on B");
}

#[test]
fn lists_from_before_a_move_was_seen_do_not_count() {
    let ledger = ledger("A B");
    let mut fact = limited(Limit::Fraction(Share::WHOLE));
    let mut request = (**fact.request.as_ref().unwrap()).clone();
    request.movable = Movable::Restart;
    fact.request = Some(request.into());
    ledger.see_pod(&fact, Timestamp::START);
    for times in [1, 2] {
        note(&ledger, "n", &list("B", "p=500"));
        assert_eq!(ledger.over_limit_pods()[0].seen.lists_over, times, "it has nothing there");
    }
    let guest = Guest { on: DeviceId::new("B").unwrap(), spot: None, leaving: None };
    fact.placement.as_mut().unwrap().guest = Some(guest);
    fact.moves.is_of_other = true;
    ledger.see_pod(&fact, seconds(1));
    assert_eq!(ledger.over_limit_pods(), [], "it runs there");
    ledger.see_pod(&bound("q", "n", "B", 200_000), seconds(1));
    let late = note_at(&ledger, "n", &list("B", "p=551 q=1"), seconds(40));
    assert_eq!(shown(&late), "p 551/500 on B");
    assert_eq!(ledger.over_limit_pods()[0].seen.lists_over, 1);
}

#[test]
fn a_pod_with_a_new_neighbor_must_shrink_within_the_grace() {
    let ledger = ledger("A B");
    let at = |seconds_now: u64, processes: &str| {
        shown(&note_at(&ledger, "n", &list("A", processes), seconds(seconds_now)))
    };
    ledger.see_pod(&limited(Limit::Fraction(Share::from_millionths(800_000))), seconds(0));
    assert_eq!(at(0, "p=800"), "");
    assert_eq!(at(100, "p=800"), "", "alone, for any time");
    ledger.see_pod(&bound("q", "n", "A", 200_000), seconds(101));
    assert_eq!(at(105, "p=800"), "", "the grace begins");
    ledger.see_pod(&bound("r", "n", "A", 100_000), seconds(120));
    assert_eq!(at(134, "p=800 q=100"), "", "and does not restart with the next neighbor");
    assert_eq!(at(134, "p=851"), "p 851/800 on A", "the limit counts until then");
    assert_eq!(at(135, "p=540"), "");
    assert_eq!(at(140, "p=800"), "p 800/500 on A");
    for pod in ["q", "r"] {
        ledger.end_pod(&uid(pod), seconds(141));
    }
    assert_eq!(at(145, "p=800"), "", "they are draining, and it was reported");
    assert_eq!(ledger.over_limit_pods().len(), 1);
    say(&ledger, &report("x", 7, 2, "A B")).unwrap();
    say(&ledger, &report("x", 7, 3, "A B")).unwrap();
    assert_eq!(at(150, "p=800"), "", "alone again");
    assert_eq!(ledger.over_limit_pods(), []);
}

#[test]
fn a_list_without_the_pod_or_its_use_does_not_shorten_its_grace() {
    for processes in ["p=?", "q=100", ""] {
        let ledger = ledger("A B");
        let at = |seconds_now: u64, processes: &str| {
            shown(&note_at(&ledger, "n", &list("A", processes), seconds(seconds_now)))
        };
        ledger.see_pod(&limited(Limit::Fraction(Share::from_millionths(800_000))), seconds(0));
        assert_eq!(at(0, ""), "", "it has not begun");
        assert_eq!(at(5, "p=800"), "");
        ledger.see_pod(&bound("q", "n", "A", 200_000), seconds(101));
        assert_eq!(at(105, "p=800"), "", "the grace begins");
        assert_eq!(at(110, processes), "", "{processes}");
        assert_eq!(at(115, "p=800"), "", "and continues: {processes}");
        assert_eq!(at(134, processes), "", "{processes}");
        assert_eq!(at(135, "p=800"), "p 800/500 on A", "no longer than that: {processes}");
    }
}

#[test]
fn the_grace_of_a_pod_begins_even_if_the_list_lacks_it() {
    let ledger = ledger("A B");
    let at = |seconds_now: u64, processes: &str| {
        shown(&note_at(&ledger, "n", &list("A", processes), seconds(seconds_now)))
    };
    ledger.see_pod(&limited(Limit::Fraction(Share::from_millionths(800_000))), seconds(0));
    assert_eq!(at(0, "p=800"), "");
    ledger.see_pod(&bound("q", "n", "A", 200_000), seconds(1));
    assert_eq!(at(5, "p=?"), "", "it begins");
    assert_eq!(at(34, "p=800"), "");
    assert_eq!(at(35, "p=800"), "p 800/500 on A");
    assert_eq!(ledger.details("n").usage_samples.count(), 2, "both tenants");
    ledger.end_pod(&uid("p"), seconds(36));
    ledger.end_pod(&uid("q"), seconds(36));
    say(&ledger, &report("x", 7, 2, "A B")).unwrap();
    say(&ledger, &report("x", 7, 3, "A B")).unwrap();
    assert_eq!(at(40, ""), "");
    assert_eq!(ledger.details("n").usage_samples.count(), 0, "it goes with what they hold");
}

#[test]
fn a_second_tenant_has_no_grace_except_after_a_restart() {
    let ledger = ledger("A B");
    ledger.see_pod(&bound("q", "n", "A", 200_000), seconds(0));
    ledger.see_pod(&limited(Limit::Fraction(Share::from_millionths(800_000))), seconds(0));
    let at = |seconds_now: u64, processes: &str| {
        shown(&note_at(&ledger, "n", &list("A", processes), seconds(seconds_now)))
    };
    assert_eq!(at(5, "p=700"), "", "the first list: it may have been alone until now");
    assert_eq!(at(35, "p=700"), "p 700/500 on A");
    assert_eq!(at(40, ""), "");
    assert_eq!(at(45, "p=700"), "p 700/500 on A", "no grace for a new start beside others");
}

#[test]
fn untracked_memory_is_reported_when_it_begins_and_summed() {
    let ledger = tenanted();
    check(&ledger, "host=30 x=20", "", "");
    check(&ledger, "host=30 x=21 p=600", "p 600/500 on A, foreign 51 on A", "p +100 x1");
    check(&ledger, "host=900 p=600", "", "p +100 x2");
    let expected = UnallocatedUse {
        over_limit_pods: 1,
        excess: MemMib::new(100),
        untracked: MemMib::new(900),
    };
    assert_eq!(ledger.outside(), expected);
    check(&ledger, "host=18446744073709551615 x=1", "", "");
    assert_eq!(ledger.outside().untracked, BEYOND, "absurd sums cause no failure");
}

#[test]
fn pods_and_devices_that_are_gone_are_forgotten() {
    let ledger = tenanted();
    check(&ledger, "p=600", "p 600/500 on A", "p +100 x1");
    ledger.end_pod(&uid("p"), seconds(1));
    let reported = note(&ledger, "n", &list("A", "p=700"));
    assert_eq!(shown(&reported), "", "it is ending");
    say(&ledger, &report("x", 7, 2, "A B")).unwrap();
    say(&ledger, &report("x", 7, 3, "A B")).unwrap();
    assert_eq!(ledger.over_limit_pods(), [], "it has left the ledger");
    say(&ledger, &hello("y", 1, "B")).unwrap();
    assert_eq!(note(&ledger, "n", &list("A", "host=900")), []);
    assert_eq!(ledger.outside(), UnallocatedUse::default());
    assert_eq!(note(&ledger, "nobody", &list("A", "host=900")), []);
}
