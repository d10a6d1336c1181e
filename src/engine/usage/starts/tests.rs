use super::*;
use crate::ledger::ledger_fixture::share_request;
use crate::ledger::ledger_fixture::{
    bound, hello, ledger, node, pod, report, say, seconds, uid, uses,
};
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::query::team_limit::PodInNamespace;
use crate::model::event::LedgerEvent;
use crate::model::isolation::{DriverLimits, Rules};
use crate::model::request::{GpuRequest, Purpose};
use crate::usage::node_details::DetailsReport;
use std::time::Duration;
use wire::ids::NodeName;
use wire::units::{MemMib, Share, Timestamp};

const RULES: Rules = Rules {
    tolerance: MemMib::ZERO,
    limits: DriverLimits::Unused,
    grace: Duration::ZERO,
    max_limit: Share::WHOLE,
};

/// A node with device `A`, and quarters of it for pods.
fn with_pods(pods: &[&str]) -> Ledger {
    let ledger = ledger("A");
    for name in pods {
        ledger.see_pod(&bound(name, "n", "A", 250_000), Timestamp::START);
    }
    ledger
}

/// Containers such as `main=1 side`: with the id `1`, and not started.
fn wanted(containers: &str, choice: ContainerChoice) -> WantedContainers {
    let container = |text: &str| {
        let (name, id) = text.split_once('=').map_or((text, None), |(name, id)| (name, Some(id)));
        WantedContainer { name: name.to_owned(), id: id.map(str::to_owned) }
    };
    WantedContainers { containers: containers.split_whitespace().map(container).collect(), choice }
}

/// What an agent saw: `p/1+` is container `1` of pod `p` with the driver, `-` without, `o` one that is older.
fn seen(text: &str) -> StartedContainers {
    let mut all = StartedContainers::new();
    for word in text.split_whitespace() {
        let (pod, container) = word.split_once('/').unwrap();
        let (id, kind) = container.split_at(container.len() - 1);
        let started = StartedContainer { has_driver: kind == "+", is_older: kind == "o" };
        all.entry(uid(pod)).or_default().insert(id.to_owned(), started);
    }
    all
}

fn note(ledger: &Ledger, text: &str, now: Timestamp) -> Vec<LedgerEvent> {
    let report = DetailsReport { containers: Some(seen(text)), ..DetailsReport::default() };
    ledger.note("n", &[], report, RULES, now)
}

fn want(ledger: &Ledger, pod: &str, containers: &str) -> Vec<LedgerEvent> {
    let wanted = wanted(containers, ContainerChoice::Marked);
    ledger.see_containers(&uid(pod), &wanted, Timestamp::START)
}

fn sight(ledger: &Ledger, pod: &str) -> Sight {
    ledger.details("n").starts.of(&uid(pod))
}

fn blind(name: &str, container: &str) -> LedgerEvent {
    let (node, container) = (NodeName::new("n"), container.to_owned());
    LedgerEvent::Blind { pod: pod(name), node, container }
}

#[test]
fn only_containers_that_are_to_have_a_device_count() {
    for (containers, choice, seen, expected) in [
        ("main=1", ContainerChoice::Marked, "p/1-", Sight::Blind),
        ("main=1", ContainerChoice::Marked, "p/1+", Sight::Seen),
        ("main=1", ContainerChoice::Marked, "", Sight::Unknown),
        ("main", ContainerChoice::Marked, "p/1-", Sight::Unknown),
        // The sandbox, a sidecar, an earlier container.
        ("main=1", ContainerChoice::Marked, "p/0- p/2- p/3+", Sight::Unknown),
        ("main=1", ContainerChoice::Marked, "p/1+ p/2-", Sight::Seen),
        ("main=1 also=2", ContainerChoice::Marked, "p/1+ p/2-", Sight::Blind),
        ("main=1 also=2", ContainerChoice::Marked, "p/1+", Sight::Unknown),
        // No container is named: one with the driver is enough, and all must be without.
        ("main=1 side=2", ContainerChoice::Any, "p/1+ p/2-", Sight::Seen),
        ("main=1 side=2", ContainerChoice::Any, "p/2-", Sight::Unknown),
        ("main=1 side=2", ContainerChoice::Any, "p/1- p/2-", Sight::Blind),
        ("", ContainerChoice::Any, "p/1-", Sight::Unknown),
        ("", ContainerChoice::Marked, "p/1-", Sight::Unknown),
        // Of another pod.
        ("main=1", ContainerChoice::Marked, "q/1-", Sight::Unknown),
    ] {
        // In either order.
        for report_first in [true, false] {
            let ledger = with_pods(&["p", "q"]);
            let wanted = wanted(containers, choice);
            let say = |is_now: bool| {
                if is_now { note(&ledger, seen, seconds(1)) } else { Vec::new() }
            };
            say(report_first);
            ledger.see_containers(&uid("p"), &wanted, seconds(1));
            say(!report_first);
            assert_eq!(sight(&ledger, "p"), expected, "{containers} {choice:?} {seen}");
        }
    }
}

#[test]
fn a_blind_start_is_an_event_once_for_each_container() {
    let ledger = with_pods(&["p"]);
    assert_eq!(want(&ledger, "p", "main=1"), []);
    assert_eq!(note(&ledger, "p/1-", seconds(1)), [blind("p", "main")]);
    assert_eq!(note(&ledger, "p/1-", seconds(2)), []);
    assert_eq!(want(&ledger, "p", "main=1"), []);
    assert_eq!(ledger.blind().0, 1);
    assert_eq!(want(&ledger, "p", "main=2"), []);
    assert_eq!((sight(&ledger, "p"), ledger.blind().0), (Sight::Unknown, 0), "restarted");
    assert_eq!(note(&ledger, "p/1- p/2-", seconds(3)), [blind("p", "main")]);
    want(&ledger, "p", "main=3");
    assert_eq!(note(&ledger, "p/1- p/2- p/3+", seconds(3)), []);
    assert_eq!((sight(&ledger, "p"), ledger.blind().0), (Sight::Seen, 0));
}

#[test]
fn a_pod_that_uses_a_device_sees_it_whatever_its_mounts() {
    let ledger = with_pods(&["p"]);
    want(&ledger, "p", "main=1");
    let used = |pods: &[&str]| {
        let report = DetailsReport::default();
        ledger.note("n", &uses("A", pods), report, RULES, seconds(1));
        sight(&ledger, "p")
    };
    note(&ledger, "p/1-", seconds(1));
    assert_eq!(used(&[]), Sight::Blind);
    assert_eq!(used(&["p"]), Sight::Seen);
    assert_eq!(used(&[]), Sight::Seen, "its container is the same");
    want(&ledger, "p", "main=2");
    note(&ledger, "p/2-", seconds(2));
    assert_eq!(sight(&ledger, "p"), Sight::Blind, "this one is another");
}

#[test]
fn a_node_takes_no_pods_after_two_blind_ones_until_a_sign() {
    let takes = |ledger: &Ledger| node(ledger, "n").placeable().is_ok();
    let closed = || {
        let ledger = with_pods(&["p", "q", "r"]);
        for (name, id) in [("p", "main=1"), ("q", "main=2"), ("r", "main=3")] {
            want(&ledger, name, id);
        }
        note(&ledger, "p/1-", seconds(1));
        assert!(takes(&ledger), "one");
        let events = note(&ledger, "p/1- q/2-", seconds(2));
        assert_eq!(events, [blind("q", "main"), LedgerEvent::BlindNode(NodeName::new("n"))]);
        assert!(!takes(&ledger), "two");
        ledger
    };
    let room = LedgerEvent::Room(NodeName::new("n"));
    let ledger = closed();
    assert_eq!(note(&ledger, "r/3+", seconds(3)), std::slice::from_ref(&room));
    assert!(takes(&ledger), "a pod there sees its GPU");
    let ledger = closed();
    let reports = |sequence, now| {
        ledger.report("n", &report("x", 7, sequence, "A"), now).unwrap();
    };
    reports(2, seconds(300));
    assert!(!ledger.tick(seconds(301)).contains(&room));
    assert!(ledger.tick(seconds(302)).contains(&room));
    assert!(takes(&ledger), "one as a trial");
    ledger.see_pod(&bound("t", "n", "A", 250_000), seconds(303));
    assert!(!takes(&ledger), "no second one");
    want(&ledger, "t", "main=9");
    note(&ledger, "t/9-", seconds(304));
    reports(3, seconds(600));
    ledger.tick(seconds(603));
    assert!(!takes(&ledger), "it did not see its GPU either");
    ledger.tick(seconds(604));
    assert!(takes(&ledger), "another one");
    let ledger = closed();
    let again = say(&ledger, &report("x", 7, 9, "A")).unwrap();
    assert!(again.events.is_empty() && !takes(&ledger), "the same agent");
    assert!(say(&ledger, &hello("y", 1, "A")).unwrap().events.contains(&room));
    assert!(takes(&ledger), "the agent's container was made again");
}

#[test]
fn pods_of_before_the_agent_or_without_a_named_container_are_no_sign() {
    let ledger = with_pods(&["p", "q", "r"]);
    want(&ledger, "p", "main=1");
    want(&ledger, "q", "main=2");
    let any = wanted("main=3", ContainerChoice::Any);
    ledger.see_containers(&uid("r"), &any, seconds(1));
    let events = note(&ledger, "p/1o q/2o r/3-", seconds(1));
    assert_eq!(events, [blind("p", "main"), blind("q", "main"), blind("r", "main")]);
    assert_eq!(node(&ledger, "n").intake(), &crate::model::node::intake::Intake::default());
}

#[test]
fn what_is_kept_of_a_pod_is_bounded_and_goes_with_it() {
    let ledger = with_pods(&["p"]);
    want(&ledger, "p", "main=a");
    for from in 0..100_u32 {
        let many: Vec<String> = (0..30).map(|n| format!("p/{}-", from * 30 + n)).collect();
        note(&ledger, &(many.join(" ") + " p/a- gone/1-"), seconds(1));
    }
    let details = ledger.details("n");
    assert_eq!(details.starts.count(), 1);
    assert!(details.starts.0.values().all(|known| known.seen.len() <= MAX_KEPT));
    assert_eq!(sight(&ledger, "p"), Sight::Blind);
    ledger.end_pod(&uid("p"), seconds(2));
    for sequence in 10..13 {
        let used = uses("A", &[]);
        let clean = crate::ledger::change::reports::NodeReport {
            uses: used.clone(),
            ..report("x", 7, sequence, "A")
        };
        say(&ledger, &clean).unwrap();
        ledger.note("n", &used, DetailsReport::default(), RULES, seconds(3));
    }
    assert_eq!(ledger.details("n").starts.count(), 0);
}

#[test]
fn pods_that_fail_one_after_the_other_close_their_node_and_what_filter_accepts_can_be_reserved() {
    let ledger = ledger("A");
    let mut sequence = 1;
    let mut reports = |containers: &str| {
        sequence += 1;
        say(&ledger, &report("x", 7, sequence, "A")).unwrap();
        note(&ledger, containers, seconds(1));
    };
    let reserve = |name: &str, query: &PlacementRequest| {
        let found =
            ledger.answers_to(PodInNamespace { uid: &uid(name), namespace: "d" }, query, &["n"]);
        let reserved = ledger.reserve(&pod(name), "n", query, seconds(1));
        assert_eq!(found[0].is_ok(), reserved.is_ok(), "{name}");
        reserved.is_ok()
    };
    let work = share_request(250_000);
    for (name, id) in [("p", "1"), ("q", "2")] {
        assert!(reserve(name, &work));
        want(&ledger, name, &format!("main={id}"));
        reports(&format!("{name}/{id}-"));
        ledger.end_pod(&uid(name), seconds(1));
        reports("");
        reports("");
        assert!(ledger.reservation(&uid(name)).is_none());
    }
    assert!(!reserve("r", &work), "closed");
    let probe = GpuRequest { purpose: Purpose::Probe, ..work.gpu.clone().unwrap() };
    let probe = PlacementRequest { gpu: Some(probe), ..work.clone() };
    assert!(reserve("probe", &probe));
    ledger.tick(seconds(302));
    reports("");
    assert!(reserve("t", &work), "a trial");
    assert!(!reserve("u", &work), "no second one");
    ledger.forget(&uid("t"));
    assert!(reserve("u", &work), "the trial was not bound");
    want(&ledger, "probe", "probe=9");
    reports("probe/9+");
    assert!(reserve("v", &work), "a probe has the driver");
}
