use super::*;
use crate::ledger::ledger_fixture::{ledger, pod, seconds, see_node, share_request, uid};
use crate::ledger::nodes::state::Ledger;

fn named(name: &str) -> WaitingPod {
    WaitingPod {
        pod: pod(name),
        namespace: "team".to_owned(),
        name: name.to_owned(),
        query: share_request(500_000),
        priority: 0,
        may_preempt: true,
        controller: None,
        edition: 0,
        group: None,
        created_unix_seconds: 0,
    }
}

/// The watch shows a pod, and *filter* is called for it.
fn begin_call(waiting: &WaitingPods, name: &str) {
    waiting.see(named(name), seconds(0));
    waiting.begin_call(named(name), seconds(0));
}

fn refuse(waiting: &WaitingPods, ledger: &Ledger, name: &str, nodes: &[String]) {
    begin_call(waiting, name);
    let named = ledger.named_nodes(nodes.iter());
    waiting.refuse(&uid(name), BTreeMap::new(), Some(named));
}

#[test]
fn pods_with_equal_node_lists_share_one_set() {
    let (ledger, waiting) = (ledger("A"), WaitingPods::default());
    let names: Vec<String> = (0..10).map(|at| format!("m-{at}")).collect();
    names.iter().for_each(|name| see_node(&ledger, name));
    for pod in 0..1_000 {
        refuse(&waiting, &ledger, &format!("{pod}"), &names[pod % 2..]);
    }
    assert_eq!(waiting.pods().named.len(), 2);
    // Of sets that no pod has any more only few are left.
    for at in 0..1_000 {
        let some: Vec<String> = names
            .iter()
            .enumerate()
            .filter(|(bit, _)| at >> bit & 1 == 1)
            .map(|it| it.1.clone())
            .collect();
        refuse(&waiting, &ledger, "one", &some);
    }
    assert!(waiting.pods().named.len() <= FEW_SETS, "{}", waiting.pods().named.len());
}

#[test]
fn changes_are_sent_once_in_parts_or_as_all_pods_after_loss() {
    let (ledger, waiting) = (ledger("A"), WaitingPods::default());
    ["a", "b", "c"].iter().for_each(|name| refuse(&waiting, &ledger, name, &["n".to_owned()]));
    waiting.remove(&uid("c"));
    let (first, is_all) = waiting.changes(2).unwrap();
    assert!(!is_all && first.len() == 2 && first.iter().all(|(_, pod)| pod.is_some()));
    assert_eq!(waiting.changes(2), Some((vec![(uid("c"), None)], true)));
    assert_eq!(waiting.changes(2), Some((vec![], true)));
    waiting.change_all();
    waiting.remove(&uid("a"));
    assert_eq!(waiting.changes(2), None);
    let (all, is_all) = waiting.changes(2).unwrap();
    assert!(is_all && all.len() == 1 && all[0].0 == uid("b"));
}

#[test]
fn changes_without_a_subscriber_use_bounded_memory() {
    let waiting = WaitingPods::default();
    for round in 0..MAX_WAITING + 10 {
        let name = format!("{round}");
        begin_call(&waiting, &name);
        waiting.remove(&uid(&name));
    }
    assert!(waiting.pods().changed.len() <= MAX_WAITING);
    assert!(waiting.pods().by_uid.is_empty());
    assert_eq!(waiting.changes(9), None);
}

#[test]
fn forged_pods_displace_each_other_and_are_never_requeued() {
    let (ledger, waiting) = (ledger("A"), WaitingPods::default());
    refuse(&waiting, &ledger, "real", &["n".to_owned()]);
    waiting.changes(9);
    for number in 0..2 * MAX_UNSEEN {
        let made_up = WaitingPod { priority: i32::MAX, ..named(&format!("made-up-{number}")) };
        waiting.begin_call(made_up, seconds(1));
    }
    assert_eq!((waiting.count(), waiting.all().len()), (MAX_UNSEEN + 1, 1));
    assert_eq!(waiting.refused_count(), 1);
    assert!(waiting.named("team", "made-up-9000").is_none());
    assert_eq!(waiting.changes(9), Some((vec![], true)), "no candidate among them");
    waiting.tick(seconds(601));
    assert_eq!((waiting.count(), waiting.pods().unseen.len()), (1, 0));
}

#[test]
fn a_watched_pod_replaces_an_unconfirmed_one() {
    let waiting = WaitingPods::default();
    waiting.begin_call(named("made-up"), seconds(0));
    (0..MAX_WAITING).for_each(|at| _ = waiting.see(named(&format!("{at}")), seconds(1)));
    assert_eq!((waiting.count(), waiting.all().len()), (MAX_WAITING, MAX_WAITING));
    waiting.begin_call(named("late"), seconds(2));
    assert!(!waiting.has(&uid("late")), "no existing pod is displaced");
}

#[test]
fn a_pod_rejected_before_the_watch_showed_it_can_be_requeued() {
    let (ledger, waiting) = (ledger("A"), WaitingPods::default());
    let refused = || {
        waiting.begin_call(named("a"), seconds(0));
        let named = ledger.named_nodes(["n".to_owned()].iter());
        waiting.refuse(&uid("a"), BTreeMap::new(), Some(named));
    };
    refused();
    assert_eq!(waiting.changes(9), Some((vec![], true)));
    assert!(waiting.see(named("a"), seconds(0)), "it had a call");
    let (changed, _) = waiting.changes(9).unwrap();
    assert!(matches!(&changed[..], [(_, Some(candidate))] if candidate.named.is_some()));
    assert!(!waiting.see(named("a"), seconds(0)), "once");
    // That request was another one: the pod's own call is still to come.
    waiting.remove(&uid("a"));
    refused();
    assert!(!waiting.see(WaitingPod { query: share_request(1), ..named("a") }, seconds(0)));
    assert!(matches!(&waiting.changes(9).unwrap().0[..], [(_, None)]));
}

/// Whether room of half a GPU may be held for a pod at this time, if pods that nothing binds may have so much together.
fn may_hold(waiting: &WaitingPods, name: &str, time: u64, at_most: u64) -> bool {
    if !waiting.has(&uid(name)) {
        waiting.see(WaitingPod { query: share_request(500_000), ..named(name) }, seconds(time));
    }
    waiting.may_hold(&uid(name), seconds(time), Unbound { amount: 500_000, at_most })
}

#[test]
fn trial_calls_cost_no_holds() {
    let waiting = WaitingPods::default();
    for name in ["a", "b", "c", "d"] {
        assert!((0..100).all(|_| may_hold(&waiting, name, 0, 0)), "{name}");
        assert!(may_hold(&waiting, name, 9, 0), "{name}, whose own hold is replaced");
    }
}

#[test]
fn pods_that_nothing_binds_share_little_room() {
    let waiting = WaitingPods::default();
    for name in ["a", "b", "c"] {
        assert!(may_hold(&waiting, name, 0, 0));
    }
    assert!(may_hold(&waiting, "a", 10, 1_000_000));
    assert!(may_hold(&waiting, "b", 11, 1_000_000));
    assert!(!may_hold(&waiting, "c", 12, 1_000_000), "two have all of it");
    assert!(may_hold(&waiting, "a", 13, 1_000_000), "its own is replaced");
    assert!(may_hold(&waiting, "new", 14, 0), "a pod that comes is no such pod");
    assert!(may_hold(&waiting, "c", 21, 1_000_000), "the hold of the second one has ended");
    waiting.remove(&uid("a"));
    assert!(may_hold(&waiting, "b", 22, 1_000_000), "the first one is bound");
    assert!(!may_hold(&waiting, "b", 299, 499_999));
    assert!(may_hold(&waiting, "b", 300, 0), "minutes later as a new one");
}

#[test]
fn no_caller_changes_what_the_watch_shows() {
    let waiting = WaitingPods::default();
    waiting.see(named("a"), seconds(0));
    waiting.begin_call(WaitingPod { query: share_request(1), ..named("a") }, seconds(1));
    let state = waiting.pod(&uid("a")).unwrap();
    assert_eq!((&state.waiting, &state.refused), (&named("a"), &None));
    waiting.begin_call(WaitingPod { priority: i32::MAX, ..named("a") }, seconds(1));
    let state = waiting.pod(&uid("a")).unwrap();
    assert_eq!((state.waiting.priority, state.refused.is_some()), (0, true));
}

#[test]
fn a_call_does_not_wait_for_a_look_at_all_pods() {
    let waiting = WaitingPods::default();
    let all = 10 * LOOKED_AT_ONCE;
    (0..all).for_each(|at| begin_call(&waiting, &format!("{at}")));
    let (begins, begun) = std::sync::mpsc::channel();
    let (ends, ended) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let waiting = &waiting;
        scope.spawn(move || {
            begun.recv().unwrap();
            waiting.begin_call(named("new"), seconds(0));
            ends.send(()).unwrap();
        });
        let (mut seen, mut seen_before) = (BTreeSet::new(), None);
        waiting.look_at_each(|state| {
            assert!(seen.insert(state.waiting.name.clone()), "{} twice", state.waiting.name);
            let is_first_of_some = seen.len() % LOOKED_AT_ONCE == 1;
            if seen.len() == 1 {
                begins.send(()).unwrap();
            }
            // It may have to wait for those that are locked now.
            if is_first_of_some && seen_before.is_none() {
                let is_answered = ended.recv_timeout(Duration::from_millis(100)).is_ok();
                seen_before = is_answered.then_some(seen.len());
            }
        });
        assert!(seen_before.is_some_and(|seen| seen < all), "{seen_before:?}");
        seen.remove("new");
        assert_eq!(seen.len(), all);
    });
}

#[test]
fn the_first_of_a_line_is_found_among_many() {
    let waiting = WaitingPods::default();
    for at in 0..10 * LOOKED_AT_ONCE {
        let query = share_request(if at % 2 == 0 { 500_000 } else { 250_000 });
        let created_unix_seconds = i64::try_from(1_000 - at).unwrap();
        let pod = WaitingPod { query, created_unix_seconds, ..named(&format!("{at}")) };
        waiting.see(pod, seconds(0));
    }
    let firsts = waiting.firsts(|state| state.waiting.name != "639");
    let names: Vec<String> = firsts.into_iter().map(|first| first.waiting.name).collect();
    assert_eq!(names, ["638", "637"]);
}

#[test]
fn a_pod_that_only_calls_name_is_forgotten_some_time_after_the_last_one() {
    let waiting = WaitingPods::default();
    waiting.begin_call(named("a"), seconds(0));
    waiting.begin_call(named("b"), seconds(0));
    begin_call(&waiting, "shown");
    waiting.begin_call(named("b"), seconds(1));
    waiting.tick(seconds(0).plus(UNSEEN_FOR));
    let has = |name: &str| waiting.has(&uid(name));
    assert!(!has("a") && has("b") && has("shown"));
    waiting.tick(seconds(0).plus(2 * UNSEEN_FOR));
    assert!(!has("b") && has("shown"));
}
