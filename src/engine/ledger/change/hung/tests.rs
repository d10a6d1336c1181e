use super::*;
use crate::ledger::change::facts::PodFact;
use crate::ledger::ledger_fixture::{bound, ledger, report, say, uid, uses};
use crate::model::reservation::Tenure;

/// What is noted as hung this much later: the time on the wall clock begins at 1,000 s.
fn hung_at(ledger: &Ledger, seconds: u64) -> Vec<String> {
    let now = Timestamp::START.plus(Duration::from_secs(seconds));
    let unix_seconds = 1_000 + i64::try_from(seconds).unwrap();
    let hung = ledger.note_hung(now, unix_seconds).into_iter();
    hung.map(|hung| format!("{} {} {:?}", hung.pod, hung.node, hung.devices)).collect()
}

fn ending(name: &str, ends_unix_seconds: i64) -> PodFact {
    let tenure = Tenure { is_ending: true, ends_unix_seconds, ..Tenure::default() };
    PodFact { tenure, ..bound(name, "n", "A", 500_000) }
}

#[test]
fn a_pod_hangs_half_a_minute_after_it_was_to_have_ended() {
    let ledger = ledger("A");
    ledger.see_pod(&bound("runs", "n", "A", 500_000), Timestamp::START);
    ledger.see_pod(&ending("ends", 1_010), Timestamp::START);
    assert!(hung_at(&ledger, 40).is_empty());
    assert!(ledger.is_leaving(&uid("ends")));
    assert_eq!(hung_at(&ledger, 41), ["ends n [DeviceId(\"A\")]"]);
    assert!(!ledger.is_leaving(&uid("ends")), "nobody knows when");
    ledger.see_pod(&ending("ends", 1_010), Timestamp::START);
    assert!(hung_at(&ledger, 50).is_empty(), "it is said once");
    ledger.audit().unwrap();
}

#[test]
fn a_pod_that_is_to_end_hangs_at_once_where_kubelet_is_away() {
    let ledger = ledger("A");
    ledger.see_pod(&bound("runs", "n", "A", 500_000), Timestamp::START);
    ledger.see_pod(&ending("ends", 1_100), Timestamp::START);
    ledger.see_ready(&NodeName::new("n"), false);
    assert_eq!(hung_at(&ledger, 0).len(), 1);
    ledger.see_ready(&NodeName::new("n"), true);
    assert!(hung_at(&ledger, 1).is_empty());
    assert!(ledger.is_leaving(&uid("ends")), "kubelet is back");
}

#[test]
fn processes_that_outlive_their_pod_hang() {
    let ledger = ledger("A");
    ledger.see_pod(&bound("gone", "n", "A", 500_000), Timestamp::START);
    ledger.end_pod(&uid("gone"), Timestamp::START);
    assert!(hung_at(&ledger, 40).is_empty(), "no list shows them");
    let shown = |sequence| {
        let mut report = report("x", 7, sequence, "A");
        report.uses = uses("A", &["gone"]);
        say(&ledger, &report).unwrap();
    };
    shown(2);
    assert!(hung_at(&ledger, 29).is_empty());
    assert_eq!(hung_at(&ledger, 30).len(), 1);
}

#[test]
fn a_pod_that_hung_goes_on_hanging_once_it_is_deleted_by_force() {
    let ledger = ledger("A");
    ledger.see_pod(&ending("ends", 1_000), Timestamp::START);
    let mut shown = report("x", 7, 2, "A");
    shown.uses = uses("A", &["ends"]);
    say(&ledger, &shown).unwrap();
    assert_eq!(hung_at(&ledger, 31).len(), 1);
    ledger.end_pod(&uid("ends"), Timestamp::START.plus(Duration::from_secs(40)));
    let mut shown = report("x", 7, 3, "A");
    shown.uses = uses("A", &["ends"]);
    say(&ledger, &shown).unwrap();
    hung_at(&ledger, 41);
    assert!(!ledger.is_leaving(&uid("ends")), "its processes still run");
}
