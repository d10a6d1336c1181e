use super::*;
use crate::ledger::books::Ledger;
use crate::ledger::fixture::{asks, ledger, pod, seconds, see_node, uid};

fn ask(waiting: &WaitingPods, name: &str) {
    let pod = WaitingPod {
        pod: pod(name),
        namespace: "team".to_owned(),
        name: name.to_owned(),
        question: asks(500_000),
        priority: 0,
        created_unix_seconds: 0,
    };
    waiting.ask(pod, seconds(0));
}

fn refuse(waiting: &WaitingPods, ledger: &Ledger, name: &str, nodes: &[String]) {
    ask(waiting, name);
    let asked = ledger.asked_nodes(nodes.iter());
    waiting.refuse(&uid(name), BTreeMap::new(), Some(asked));
}

#[test]
fn pods_that_were_asked_about_the_same_nodes_share_one_set() {
    let (ledger, waiting) = (ledger("A"), WaitingPods::default());
    let names: Vec<String> = (0..10).map(|at| format!("m-{at}")).collect();
    names.iter().for_each(|name| see_node(&ledger, name));
    for pod in 0..1_000 {
        refuse(&waiting, &ledger, &format!("{pod}"), &names[pod % 2..]);
    }
    assert_eq!(waiting.pods().asked.len(), 2);
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
    assert!(waiting.pods().asked.len() <= FEW_SETS, "{}", waiting.pods().asked.len());
}

#[test]
fn changes_are_told_once_in_parts_and_all_pods_where_too_many_are_lost() {
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
fn changes_that_nobody_follows_take_bounded_memory() {
    let waiting = WaitingPods::default();
    for round in 0..MAX_WAITING + 10 {
        let name = format!("{round}");
        ask(&waiting, &name);
        waiting.remove(&uid(&name));
    }
    assert!(waiting.pods().changed.len() <= MAX_WAITING);
    assert!(waiting.pods().by_uid.is_empty());
    assert_eq!(waiting.changes(9), None);
}
