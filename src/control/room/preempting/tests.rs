use std::collections::BTreeMap;

use super::*;
use crate::room::fixture::{ALL, Bed, waiting_pod};
use engine::ledger::change::facts::PodFact;
use engine::ledger::change::reports::NodeReport;
use engine::ledger::ledger_fixture::{bound, free, pod, report, share_request, uid};
use engine::model::charge::Prices;
use engine::model::rejection::Rejection;
use engine::model::request::Amount;
use engine::model::reservation::Controller;
use engine::model::team::{TeamRules, TeamShare};
use engine::model::workload::Protection;
use wire::ids::{DeviceId, NodeName};
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{MemMib, Share};

/// The GPUs are full: `a` and `b`, with half of A each, `c` with B, `d` with C. The priority of
/// each is its position.
fn full() -> Bed {
    let bed = Bed::new(Duration::ZERO);
    let all = [("a", "n", "A", 500_000), ("b", "n", "A", 500_000), ("c", "n", "B", 1_000_000)];
    let all = all.into_iter().chain([("d", "m", "C", 1_000_000)]);
    for (priority, (name, node, device, millionths)) in (0..).zip(all) {
        bed.bind(name, node, device, millionths, priority);
    }
    bed
}

/// What is to be evicted this much later: for which pod, where, and which pods.
fn orders_after(bed: &mut Bed, seconds: u64) -> Vec<String> {
    bed.step_after(seconds).evict.iter().map(shown).collect()
}

/// The first pod was asked to go for this one.
fn ask(bed: &Bed, name: &str) -> bool {
    (1..99).any(|number| bed.preemptors.ask(&uid(name), number))
}

fn ended(bed: &Bed, name: &str, ended: Ended) {
    let number = (1..99).find(|number| bed.preemptors.is_making(&uid(name), *number));
    bed.preemptors.ended(&uid(name), number.unwrap(), ended);
}

/// The pod ends, and its processes are gone.
fn end(bed: &mut Bed, name: &str, sequence: u64) {
    bed.ledger.end_pod(&uid(name), bed.now);
    for sequence in [sequence, sequence + 1] {
        bed.ledger.report("n", &report("x", 7, sequence, "A B"), bed.now).unwrap();
    }
}

fn shown(order: &RoomOrder) -> String {
    let victims: Vec<&str> = order.victims.iter().map(|victim| &*victim.name).collect();
    let again = if order.is_begun { " again" } else { "" };
    format!("{} {}: {}{again}", order.pod.name, order.node, victims.join(" "))
}

#[test]
fn the_least_important_goes_and_its_room_is_kept_until_the_pod_is_bound() {
    let mut bed = full();
    bed.refused(waiting_pod("p", 500_000, 10), ALL);
    assert_eq!(orders_after(&mut bed, 0), [""; 0], "it has just been refused");
    assert_eq!(orders_after(&mut bed, 1), ["p n: a"]);
    assert!(bed.preemptors.has(&uid("p")) && !bed.preemptors.is_asked(&uid("p")));
    assert!(ask(&bed, "p"));
    for _ in 0..20 {
        assert_eq!(orders_after(&mut bed, 5), [""; 0], "draining is waited for");
    }
    end(&mut bed, "a", 2);
    assert_eq!(free(&bed.ledger), [0, 0], "kept");
    let step = bed.step_after(1);
    assert_eq!(step.ready.iter().map(|(_, pod)| &*pod.name).collect::<Vec<_>>(), ["p"]);
    bed.ledger.reserve(&pod("p"), "n", &share_request(500_000), bed.now).unwrap();
    bed.waiting.remove(&uid("p"));
    let step = bed.step_after(1);
    assert!(step.abandoned.is_empty() && step.given_up.is_empty(), "{step:?}");
    assert_eq!(bed.preemptors.count(), 0);
    bed.ledger.audit().unwrap();
}

#[test]
fn none_goes_for_a_pod_that_may_not_preempt_or_is_not_more_important() {
    let mut bed = full();
    bed.refused(WaitingPod { may_preempt: false, ..waiting_pod("never", 500_000, 10) }, ALL);
    bed.refused(waiting_pod("equal", 500_000, 0), ALL);
    bed.refused(waiting_pod("large", 1_000_000, 1), ALL);
    assert_eq!(orders_after(&mut bed, 10), [""; 0]);
    bed.rules.preemption.protect = Duration::from_secs(60);
    bed.refused(waiting_pod("p", 500_000, 10), ALL);
    assert_eq!(orders_after(&mut bed, 40), [""; 0], "all run for 50 seconds");
    assert_eq!(orders_after(&mut bed, 10), ["p n: a"]);
}

#[test]
fn several_pods_get_different_rooms_at_once_up_to_the_limit() {
    let mut bed = full();
    for name in ["p", "q", "r"] {
        bed.refused(waiting_pod(name, 500_000, 10), ALL);
    }
    bed.rules.preemption.at_once = 2;
    assert_eq!(orders_after(&mut bed, 5), ["p n: a", "q n: b"]);
    bed.rules.preemption.at_once = 8;
    assert_eq!(orders_after(&mut bed, 1), ["r n: c"]);
    // A less important one sees none of that as free.
    bed.refused(waiting_pod("s", 600_000, 3), ALL);
    assert_eq!(orders_after(&mut bed, 10), [""; 0], "`d` is as important");
}

#[test]
fn what_a_budget_protects_stays_and_others_are_tried() {
    let mut bed = full();
    bed.refused(waiting_pod("p", 500_000, 10), ALL);
    assert_eq!(orders_after(&mut bed, 2), ["p n: a"]);
    ended(&bed, "p", Ended::Protected(BTreeSet::from([uid("a")])));
    assert_eq!(orders_after(&mut bed, 1), ["p n: b"]);
    ended(&bed, "p", Ended::Denied);
    assert_eq!(orders_after(&mut bed, 1), [""; 0]);
    assert!(!bed.preemptors.has(&uid("p")) && bed.ledger.standing_count() == 0);
    assert_eq!(orders_after(&mut bed, 598), [""; 0], "it has no right");
    assert_eq!(orders_after(&mut bed, 2), ["p n: a"], "the budget is looked at again");
    ended(&bed, "p", Ended::Failed);
    assert_eq!(orders_after(&mut bed, 59), [""; 0]);
    assert_eq!(orders_after(&mut bed, 60), ["p n: a"]);
}

#[test]
fn a_pod_that_is_not_bound_gets_no_second_set_of_victims_for_a_while() {
    let mut bed = full();
    bed.refused(waiting_pod("p", 500_000, 10), ALL);
    assert_eq!(orders_after(&mut bed, 2), ["p n: a"]);
    ask(&bed, "p");
    end(&mut bed, "a", 2);
    assert_eq!(bed.step_after(1).ready.len(), 1);
    bed.bind("thief", "n", "A", 500_000, 0); // of another scheduler
    let step = bed.step_after(600);
    assert_eq!(step.evict, [], "what the thief has is not evicted for this hold");
    assert_eq!((step.given_up.len(), step.abandoned.len()), (1, 1));
    assert_eq!(orders_after(&mut bed, 59), [""; 0]);
    assert_eq!(orders_after(&mut bed, 1), ["p n: thief"], "only after a pause");
}

#[test]
fn no_pod_goes_for_one_whose_note_of_earlier_room_is_still_to_be_taken_away() {
    let mut bed = full();
    bed.refused(waiting_pod("p", 500_000, 10), ALL);
    bed.preemptors.owe_note(&uid("p"));
    assert_eq!(orders_after(&mut bed, 60), [""; 0]);
    bed.preemptors.forget(&uid("p"));
    assert_eq!(orders_after(&mut bed, 1), ["p n: a"]);
}

#[test]
fn a_more_important_pod_takes_the_room_over() {
    let mut bed = full();
    bed.refused(waiting_pod("p", 500_000, 10), ALL);
    assert_eq!(orders_after(&mut bed, 2), ["p n: a"]);
    ask(&bed, "p");
    bed.refused(waiting_pod("higher", 500_000, 20), ALL);
    let step = bed.step_after(1);
    assert_eq!(step.evict, [], "`a` has been asked to go");
    assert_eq!(step.abandoned.iter().map(|pod| &*pod.name).collect::<Vec<_>>(), ["p"]);
    assert!(bed.preemptors.has(&uid("higher")) && !bed.preemptors.has(&uid("p")));
}

#[test]
fn a_pod_whose_room_was_taken_over_pauses_for_long_only_if_another_was_asked_to_go() {
    for (is_asked, pause) in [(false, 5), (true, 60)] {
        let mut bed = full();
        bed.refused(waiting_pod("p", 500_000, 10), ALL);
        assert_eq!(orders_after(&mut bed, 2), ["p n: a"]);
        assert!(!is_asked || ask(&bed, "p"));
        bed.refused(waiting_pod("higher", 500_000, 20), ALL);
        let again: &[&str] = if is_asked { &[] } else { &["higher n: a"] };
        assert_eq!(orders_after(&mut bed, 1), again);
        assert_eq!(orders_after(&mut bed, pause - 1), [""; 0]);
        assert_eq!(orders_after(&mut bed, 1), ["p n: b"], "after {pause} s");
    }
}

#[test]
fn none_goes_for_room_that_a_more_important_pod_takes_over_at_once() {
    let mut bed = full();
    bed.rules.after = Duration::from_secs(1);
    end(&mut bed, "b", 2);
    bed.refused(waiting_pod("p", 1_000_000, 10), ALL);
    bed.refused(waiting_pod("higher", 400_000, 20), ALL); // it fits, and is not called again yet
    assert_eq!(orders_after(&mut bed, 2), [""; 0]);
    assert_eq!(bed.kept(), [("higher".to_owned(), "n".to_owned())]);
    assert_eq!(orders_after(&mut bed, 5), ["p n: c"], "a short pause later");
}

#[test]
fn a_plan_of_kube_scheduler_is_carried_out_without_a_filter_call() {
    let mut bed = full();
    bed.waiting.see(waiting_pod("p", 500_000, 10), bed.now);
    assert_eq!(orders_after(&mut bed, 5), [""; 0]);
    let plan = PlannedVictims::from([(NodeName::new("m"), BTreeSet::from([uid("d")]))]);
    bed.preemptors.plan(&uid("p"), plan.clone(), true, bed.now);
    assert_eq!(orders_after(&mut bed, 5), ["p m: d"]);
    let mut bed = full();
    bed.waiting.see(waiting_pod("p", 500_000, 3), bed.now);
    bed.preemptors.plan(&uid("p"), plan, true, bed.now);
    assert_eq!(orders_after(&mut bed, 5), [""; 0], "`d` is as important");
}

#[test]
fn a_later_process_goes_on_with_the_room_of_an_earlier_one() {
    let note = |victims: &[&str]| RoomNote {
        node: NodeName::new("n"),
        victims: victims.iter().map(|name| uid(name)).collect(),
    };
    for (victims, expected) in [
        (&["a"][..], vec![]), // nothing has happened
        (&["a", "gone"], vec!["p n: a again"]),
        (&["gone", "b"], vec!["p n: b again"]),
        (&["gone"], vec![]), // nothing that it may evict
        (&["d"], vec![]),    // on another node
    ] {
        let mut bed = full();
        bed.waiting.see(waiting_pod("p", 500_000, 10), bed.now);
        let step = bed.resume(&[(uid("p"), note(victims))]);
        assert_eq!(step.evict.iter().map(shown).collect::<Vec<_>>(), expected, "{victims:?}");
        assert_eq!(bed.preemptors.is_asked(&uid("p")), !expected.is_empty());
        assert_eq!(step.abandoned.len(), usize::from(expected.is_empty()));
    }
    // Some went for nothing: others do only after a pause, also if it leads again meanwhile.
    let mut bed = full();
    bed.refused(waiting_pod("p", 500_000, 10), ALL);
    assert_eq!(bed.resume(&[(uid("p"), note(&["gone"]))]).abandoned.len(), 1);
    assert_eq!(orders_after(&mut bed, 30), [""; 0]);
    bed.holds = std::mem::take(&mut bed.holds).without_lead();
    assert_eq!(orders_after(&mut bed, 29), [""; 0]);
    assert_eq!(orders_after(&mut bed, 2), ["p n: a"]);
    // The victim has gone, and its processes run on.
    let mut bed = full();
    bed.ledger.end_pod(&uid("a"), bed.now);
    bed.ledger.end_pod(&uid("b"), bed.now);
    bed.ledger.report("n", &report("x", 7, 2, "A B"), bed.now).unwrap();
    bed.ledger.report("n", &report("x", 7, 3, "A B"), bed.now).unwrap();
    let leftover = DeviceUse {
        used: Some(MemMib::new(50)),
        processes: Some(vec![ProcessUse { pod: Some(uid("gone")), memory: None }]),
        ..DeviceUse::idle(DeviceId::new("A").unwrap())
    };
    let uses = vec![leftover, DeviceUse::idle(DeviceId::new("B").unwrap())];
    let last = NodeReport { uses, ..report("x", 7, 4, "A B") };
    bed.ledger.report("n", &last, bed.now).unwrap();
    bed.waiting.see(waiting_pod("p", 1_000_000, 10), bed.now);
    let step = bed.resume(&[(uid("p"), note(&["gone"]))]);
    assert_eq!((step.evict, step.abandoned), (vec![], vec![]));
    assert!(bed.preemptors.is_asked(&uid("p")));
    assert_eq!(free(&bed.ledger), [0, 0], "kept");
    // A class of workloads protects from notes, too: it may be new since that process.
    let mut bed = full();
    protect(&bed, ("a", "n", "A"), 0, Protection::Always);
    bed.waiting.see(waiting_pod("p", 500_000, 10), bed.now);
    let step = bed.resume(&[(uid("p"), note(&["a", "gone"]))]);
    assert_eq!((step.evict, step.abandoned.len()), (vec![], 1));
    // A forged note evicts none that is as important.
    let mut bed = full();
    bed.waiting.see(waiting_pod("p", 500_000, 0), bed.now);
    let step = bed.resume(&[(uid("p"), note(&["a", "b", "c"]))]);
    assert_eq!((step.evict, step.abandoned.len()), (vec![], 1));
}

#[test]
fn room_that_others_leave_anyway_is_waited_for_and_not_forever() {
    let mut bed = full();
    let ending =
        Tenure { priority: 30, is_ending: true, ends_unix_seconds: 2_000, ..Tenure::default() };
    let fact = PodFact { tenure: ending, ..bound("d", "m", "C", 1_000_000) };
    bed.ledger.see_pod(&fact, bed.now);
    bed.refused(waiting_pod("p", 500_000, 10), ALL);
    for _ in 0..6 {
        assert_eq!(orders_after(&mut bed, 10), [""; 0], "`d` is about to end");
        assert_eq!(bed.ledger.standing_count(), 0, "and nothing is kept there");
    }
    assert_eq!(orders_after(&mut bed, 60), ["p n: a"], "it takes too long");
}

#[test]
fn pods_without_hope_keep_no_other_from_its_room() {
    let mut bed = full();
    for at in 0..100 {
        // As important as all that is large enough, each with a request of its own.
        bed.refused(waiting_pod(&format!("hopeless-{at}"), 900_000 + at, 1), ALL);
        bed.refused(waiting_pod(&format!("behind-{at}"), 900_000 + at, 1), ALL);
    }
    bed.refused(waiting_pod("small", 300_000, 1), ALL);
    let mut orders = Vec::new();
    for _ in 0..30 {
        orders.extend(orders_after(&mut bed, 1));
    }
    assert_eq!(orders, ["small n: a"]);
}

#[test]
fn rooms_of_less_important_pods_do_not_count_for_more_important_ones() {
    let mut bed = full();
    bed.rules.preemption.at_once = 1;
    bed.refused(waiting_pod("low", 500_000, 1), ALL);
    bed.refused(waiting_pod("also-low", 400_000, 1), ALL);
    assert_eq!(orders_after(&mut bed, 5), ["also-low n: a"]);
    bed.refused(waiting_pod("high", 1_000_000, 10), ALL);
    assert_eq!(orders_after(&mut bed, 1), ["high n: a b"], "`a` was not asked yet");
}

#[test]
fn a_budget_that_let_only_some_go_is_not_tried_again_soon() {
    let mut bed = full();
    bed.refused(waiting_pod("p", 1_000_000, 2), ALL);
    assert_eq!(orders_after(&mut bed, 2), ["p n: a b"]);
    ended(&bed, "p", Ended::Partly(BTreeSet::from([uid("b")])));
    for _ in 0..9 {
        assert_eq!(orders_after(&mut bed, 60), [""; 0], "`b` is protected");
    }
    assert_eq!(orders_after(&mut bed, 120), ["p n: a b"]);
}

#[test]
fn a_room_that_relies_on_another_names_it() {
    let mut bed = full();
    bed.refused(waiting_pod("p", 300_000, 10), ALL);
    bed.refused(waiting_pod("q", 500_000, 10), ALL);
    let step = bed.step_after(2);
    assert_eq!(step.evict.iter().map(shown).collect::<Vec<_>>(), ["p n: a", "q n: b"]);
    let after: Vec<usize> = step.evict.iter().map(|order| order.after.len()).collect();
    assert_eq!(after, [0, 1]);
    assert_eq!(bed.preemptors.was_asked(&uid("p"), step.evict[1].after[0].1), Some(false));
    ended(&bed, "p", Ended::Protected(BTreeSet::from([uid("a")])));
    bed.step_after(1);
    assert_eq!(bed.preemptors.was_asked(&uid("p"), step.evict[1].after[0].1), None);
}

#[test]
fn a_pod_whose_nodes_are_not_known_is_called_again_once() {
    let mut bed = full();
    let pod = waiting_pod("p", 500_000, 10);
    bed.waiting.see(pod.clone(), bed.now);
    bed.waiting.begin_call(pod, bed.now);
    let short = Rejection::Share { short: Share::from_millionths(1) };
    bed.waiting.refuse(&uid("p"), BTreeMap::from([(short, 2)]), None);
    let calls: Vec<usize> = (0..3).map(|_| bed.step_after(10).call_again.len()).collect();
    assert_eq!(calls, [1, 0, 0]);
}

/// 1.5 GPUs are guaranteed to the team of the waiting pods, 1 to `other`, and none to any other one.
fn with_teams(bed: &Bed) {
    let share =
        |millionths| TeamShare { guaranteed: Share::from_millionths(millionths), at_most: None };
    let teams = [("team", share(1_500_000)), ("other", share(1_000_000))];
    let teams = teams.map(|(name, share)| (name.to_owned(), share)).into();
    bed.ledger.teams.rule(TeamRules { teams, ..TeamRules::default() }, Prices::default());
}

#[test]
fn a_team_gets_back_what_is_guaranteed_to_it_at_any_priority() {
    let mut bed = Bed::new(Duration::ZERO);
    with_teams(&bed);
    bed.bind("other/first", "n", "A", 1_000_000, 3);
    bed.bind("other/over", "n", "B", 1_000_000, 2);
    bed.bind("none/over", "m", "C", 1_000_000, 1_000);
    bed.refused(waiting_pod("p", 500_000, 0), ALL);
    assert_eq!(
        orders_after(&mut bed, 2),
        ["p n: other/over"],
        "the least important over-quota pod"
    );
    bed.refused(waiting_pod("q", 1_000_000, 0), ALL);
    assert_eq!(orders_after(&mut bed, 1), ["q m: none/over"]);
    bed.refused(waiting_pod("r", 500_000, 2_000), ALL);
    assert_eq!(
        orders_after(&mut bed, 9),
        [""; 0],
        "`first` is guaranteed, and the team has its share"
    );
}

#[test]
fn an_over_quota_pod_evicts_none_of_another_team() {
    let mut bed = Bed::new(Duration::ZERO);
    with_teams(&bed);
    for (name, node, device) in [("none/a", "n", "A"), ("none/b", "n", "B"), ("team/c", "m", "C")] {
        bed.bind(name, node, device, 1_000_000, 1);
    }
    let over = WaitingPod { namespace: "none".to_owned(), ..waiting_pod("p", 1_000_000, 9) };
    bed.refused(over, ALL);
    assert_eq!(orders_after(&mut bed, 2), ["p n: none/a"], "within its team priority decides");
    bed.refused(waiting_pod("large", 1_000_000, 9), ALL);
    assert_eq!(orders_after(&mut bed, 1), ["large m: team/c"], "it would be over quota");
    bed.refused(waiting_pod("small", 500_000, 0), ALL);
    bed.refused(waiting_pod("same", 500_000, 0), ALL);
    assert_eq!(orders_after(&mut bed, 9), [""; 0], "the room for `large` counts");
}

#[test]
fn room_that_is_guaranteed_is_not_passed_on_to_another_team() {
    let mut bed = Bed::new(Duration::ZERO);
    with_teams(&bed);
    for (name, node, device) in [("x/a", "n", "A"), ("x/b", "n", "B"), ("x/c", "m", "C")] {
        bed.bind(name, node, device, 1_000_000, 1);
    }
    bed.refused(waiting_pod("p", 1_000_000, 0), ALL);
    assert_eq!(orders_after(&mut bed, 2), ["p m: x/c"]);
    let other = WaitingPod { namespace: "x".to_owned(), ..waiting_pod("q", 1_000_000, 9) };
    bed.refused(other, &["m"]);
    assert_eq!(orders_after(&mut bed, 9), [""; 0]);
}

#[test]
fn a_pod_of_a_team_goes_on_with_the_over_quota_pods_that_went_for_it() {
    let mut bed = Bed::new(Duration::ZERO);
    with_teams(&bed);
    for (name, node, device) in [("x/a", "n", "A"), ("x/b", "n", "B"), ("x/c", "m", "C")] {
        bed.bind(name, node, device, 1_000_000, 7);
    }
    bed.refused(waiting_pod("p", 1_000_000, 0), ALL);
    bed.ledger.end_pod(&uid("x/c"), bed.now);
    let note = RoomNote { node: NodeName::new("m"), victims: BTreeSet::from([uid("x/c")]) };
    let step = bed.resume(&[(uid("p"), note)]);
    assert!(step.abandoned.is_empty() && step.evict.is_empty(), "{step:?}");
    assert_eq!(bed.kept(), [("p".to_owned(), "m".to_owned())]);
    let note = RoomNote { node: NodeName::new("n"), victims: BTreeSet::from([uid("x/a")]) };
    bed.refused(waiting_pod("q", 1_000_000, 0), ALL);
    bed.ledger.end_pod(&uid("x/a"), bed.now);
    let step = bed.resume(&[(uid("q"), note)]);
    assert!(
        step.evict.is_empty(),
        "the guarantee is used up, and a note orders no eviction: {step:?}"
    );
}

#[test]
fn rooms_of_other_teams_are_not_in_the_way_of_what_is_guaranteed() {
    let mut bed = Bed::new(Duration::ZERO);
    with_teams(&bed);
    for (name, node, device) in [("x/a", "n", "A"), ("x/b", "n", "B"), ("x/c", "m", "C")] {
        bed.bind(name, node, device, 1_000_000, 1);
    }
    bed.rules.preemption.at_once = 1;
    let own = WaitingPod { namespace: "x".to_owned(), ..waiting_pod("q", 1_000_000, 9) };
    bed.refused(own, ALL);
    assert_eq!(orders_after(&mut bed, 2), ["q m: x/c"], "of its own team");
    bed.refused(waiting_pod("p", 1_000_000, 0), ALL);
    assert_eq!(orders_after(&mut bed, 1), ["p n: x/a"], "one at once for what is guaranteed");
    bed.refused(waiting_pod("r", 500_000, 0), ALL);
    assert_eq!(orders_after(&mut bed, 9), [""; 0], "and no more");
}

#[test]
fn room_that_pods_of_a_team_leave_is_for_no_other_team() {
    let mut bed = Bed::new(Duration::ZERO);
    with_teams(&bed);
    for (name, node, device) in [("team/a", "n", "A"), ("other/b", "n", "B"), ("none/c", "m", "C")]
    {
        bed.bind(name, node, device, 1_000_000, 0);
    }
    bed.refused(waiting_pod("q", 1_000_000, 5), &["n"]);
    assert_eq!(orders_after(&mut bed, 2), ["q n: team/a"], "within the team priority decides");
    assert!(ask(&bed, "q"));
    bed.ledger.end_pod(&uid("team/a"), bed.now);
    let over = WaitingPod { namespace: "none".to_owned(), ..waiting_pod("h", 1_000_000, 9) };
    bed.refused(over, &["n"]);
    assert_eq!(orders_after(&mut bed, 9), [""; 0]);
    assert_eq!(bed.kept(), [("q".to_owned(), "n".to_owned())]);
}

#[test]
fn what_is_guaranteed_passes_room_that_is_kept_for_over_quota_pods() {
    let mut bed = Bed::new(Duration::from_secs(5));
    with_teams(&bed);
    for (name, node, device) in [("other/a", "n", "A"), ("y/b", "n", "B"), ("z/c", "m", "C")] {
        bed.bind(name, node, device, 1_000_000, 0);
    }
    let first = WaitingPod {
        namespace: "none".to_owned(),
        may_preempt: false,
        ..waiting_pod("first", 1_000_000, 9)
    };
    bed.refused(first, &["m"]);
    bed.step_after(6);
    assert_eq!(bed.kept(), [("first".to_owned(), "m".to_owned())]);
    bed.refused(waiting_pod("p", 1_000_000, 0), &["m"]);
    assert_eq!(orders_after(&mut bed, 1), ["p m: z/c"]);
    assert_eq!(bed.kept(), [("p".to_owned(), "m".to_owned())]);
}

#[test]
fn a_team_that_falls_below_its_guarantee_is_looked_at_at_once() {
    let mut bed = Bed::new(Duration::ZERO);
    with_teams(&bed);
    for (name, node, device) in [("team/a", "n", "A"), ("team/b", "n", "B"), ("x/c", "m", "C")] {
        bed.bind(name, node, device, 750_000, 0);
    }
    bed.refused(waiting_pod("p", 750_000, 0), ALL);
    for _ in 0..6 {
        assert_eq!(orders_after(&mut bed, 10), [""; 0], "it has its guarantee");
    }
    bed.ledger.end_pod(&uid("team/a"), bed.now);
    for sequence in [2, 3] {
        bed.ledger.report("n", &report("x", 7, sequence, "A B"), bed.now).unwrap();
    }
    bed.bind("y/a", "n", "A", 750_000, 9);
    assert_eq!(orders_after(&mut bed, 1), ["p m: x/c"]);
}

#[test]
fn none_goes_for_a_pod_that_would_count_more_than_is_guaranteed_once_it_is_placed() {
    let mut bed = Bed::new(Duration::ZERO);
    with_teams(&bed);
    bed.bind("team/own", "m", "C", 1_000_000, 0);
    for (name, device) in [("none/a", "A"), ("none/b", "B")] {
        bed.bind(name, "n", device, 1_000_000, 0);
    }
    let memory = |mib| {
        let mut pod = waiting_pod("p", 1, 0);
        let gpu = pod.query.gpu.as_mut().unwrap();
        gpu.amount = Amount::Memory(MemMib::new(mib));
        pod
    };
    // Of a GPU of 80 GiB this is little; of one of 1,000 MiB it is 0.6.
    bed.refused(memory(600), ALL);
    assert_eq!(orders_after(&mut bed, 2), [""; 0], "1.6 GPUs, and 1.5 are guaranteed");
    bed.waiting.remove(&uid("p"));
    bed.refused(memory(500), ALL);
    assert_eq!(orders_after(&mut bed, 2), ["p n: none/a"]);
    assert_eq!(bed.ledger.teams.all(std::iter::empty())[2].used, Share::from_millionths(1_500_000));
}

/// Binds a pod that is there already again, with this protection of its class of workloads.
fn protect(bed: &Bed, (name, node, device): (&str, &str, &str), priority: i32, by: Protection) {
    let protection = Some(by);
    let tenure = Tenure { priority, started_unix_seconds: 1_000, protection, ..Tenure::default() };
    let reservation = bed.ledger.reservation(&uid(name)).unwrap();
    let millionths = reservation.placement.devices[0].demand.share.millionths();
    let fact = PodFact { tenure, ..bound(name, node, device, millionths) };
    bed.ledger.see_pod(&fact, bed.now);
}

#[test]
fn a_class_of_workloads_protects_its_pods_longer_or_shorter_than_others() {
    let mut bed = full();
    bed.rules.preemption.protect = Duration::from_secs(100);
    protect(&bed, ("a", "n", "A"), 0, Protection::Always);
    protect(&bed, ("b", "n", "A"), 1, Protection::Seconds(50));
    bed.refused(waiting_pod("p", 500_000, 10), ALL);
    assert_eq!(orders_after(&mut bed, 40), [""; 0], "both stay");
    assert_eq!(orders_after(&mut bed, 20), ["p n: b"], "its own time is over, and `a` stays");
    let mut bed = full();
    for (at, place) in
        [("a", "n", "A"), ("b", "n", "A"), ("c", "n", "B"), ("d", "m", "C")].into_iter().enumerate()
    {
        protect(&bed, place, i32::try_from(at).unwrap(), Protection::Always);
    }
    bed.refused(waiting_pod("p", 500_000, 10), ALL);
    assert_eq!(orders_after(&mut bed, 1_000), [""; 0]);
}

#[test]
fn a_class_that_is_never_evicted_keeps_nothing_that_is_guaranteed_to_another_team() {
    let mut bed = Bed::new(Duration::ZERO);
    with_teams(&bed);
    for (name, node, device) in
        [("none/over", "m", "C"), ("other/a", "n", "A"), ("team/b", "n", "B")]
    {
        bed.bind(name, node, device, 1_000_000, 1);
        protect(&bed, (name, node, device), 1, Protection::Always);
    }
    bed.refused(waiting_pod("p", 500_000, 9), ALL);
    assert_eq!(orders_after(&mut bed, 2), ["p m: none/over"]);
    // Within the team the class protects, and `other` has what is guaranteed to it.
    bed.refused(waiting_pod("q", 1_000_000, 9), ALL);
    assert_eq!(orders_after(&mut bed, 200), [""; 0]);
}

#[test]
fn an_over_quota_pod_of_a_protected_class_stays_as_long_as_one_without_a_class() {
    let mut bed = Bed::new(Duration::ZERO);
    with_teams(&bed);
    bed.rules.preemption.protect = Duration::from_secs(60);
    bed.bind("none/over", "m", "C", 1_000_000, 1);
    protect(&bed, ("none/over", "m", "C"), 1, Protection::Always);
    bed.refused(waiting_pod("p", 1_000_000, 9), &["m"]);
    assert_eq!(orders_after(&mut bed, 40), [""; 0]);
    assert_eq!(orders_after(&mut bed, 30), ["p m: none/over"]);
}

#[test]
fn room_that_was_made_is_first_after_a_restart() {
    let note = |victims: &[&str]| RoomNote {
        node: NodeName::new("n"),
        victims: victims.iter().map(|name| uid(name)).collect(),
    };
    let mut bed = Bed::new(Duration::from_secs(1));
    // A was made free for `p`; `line` waits for B.
    bed.bind("b", "n", "B", 1_000_000, 20);
    bed.bind("c", "m", "C", 1_000_000, 20);
    let older = WaitingPod {
        may_preempt: false,
        created_unix_seconds: 900,
        ..waiting_pod("line", 1_000_000, 10)
    };
    bed.refused(older, ALL);
    bed.refused(WaitingPod { created_unix_seconds: 990, ..waiting_pod("p", 1_000_000, 10) }, ALL);
    let step = bed.resume(&[(uid("line"), note(&[])), (uid("p"), note(&["gone"]))]);
    let query = share_request(1_000_000);
    let fits = |name| bed.ledger.fits_in_room_of(&uid(name), &query, None).is_some();
    let lost: Vec<&str> = step.abandoned.iter().map(|pod| &*pod.name).collect();
    assert!(fits("p") && !fits("line"), "p {}, line {}; lost {lost:?}", fits("p"), fits("line"));
}

#[test]
fn a_preemptor_does_not_take_the_room_made_for_another_one() {
    let mut bed = full();
    // `b` is about to end, and takes its time.
    let tenure =
        Tenure { priority: 1, is_ending: true, ends_unix_seconds: 5_000, ..Tenure::default() };
    bed.ledger.see_pod(&PodFact { tenure, ..bound("b", "n", "A", 500_000) }, bed.now);
    bed.refused(waiting_pod("p", 1_000_000, 10), ALL);
    assert_eq!(orders_after(&mut bed, 2), ["p n: a"]);
    assert!(ask(&bed, "p"));
    bed.refused(waiting_pod("q", 1_000_000, 10), ALL);
    assert_eq!(orders_after(&mut bed, 2), ["q n: c"]);
    assert!((1..99).any(|number| bed.preemptors.ask(&uid("q"), number)));
    end(&mut bed, "a", 2);
    end(&mut bed, "c", 4);
    let step = bed.step_after(1);
    let ready: Vec<&str> = step.ready.iter().map(|(_, pod)| &*pod.name).collect();
    let query = share_request(1_000_000);
    let got =
        bed.ledger.reserve(&pod("p"), "n", &query, bed.now).map(|it| it.devices[0].id.to_string());
    bed.waiting.remove(&uid("p"));
    bed.step_after(1);
    let mut log = Vec::new();
    for second in 0..130 {
        let step = bed.step_after(1);
        for (pod, node) in &step.given_up {
            log.push(format!("after {second} s {} gave up {node}", pod.name));
        }
        for order in &step.evict {
            log.push(format!("after {second} s evict {}", shown(order)));
        }
    }
    assert_eq!(ready, ["q"], "p gets {got:?}; then {log:?}");
}

#[test]
fn after_is_since_the_first_refusal() {
    let mut bed = full();
    bed.rules.preemption.after = Duration::from_secs(600);
    // It was gated, or its volume was missing, for a quarter of an hour.
    bed.refused(WaitingPod { created_unix_seconds: 100, ..waiting_pod("p", 500_000, 10) }, ALL);
    assert_eq!(orders_after(&mut bed, 0), [""; 0], "refused for the first time now");
}

#[test]
fn a_plan_of_kube_scheduler_with_a_pod_that_hangs_counts_for_nothing() {
    let mut bed = full();
    let tenure = Tenure { is_ending: true, ends_unix_seconds: 900, ..Tenure::default() };
    bed.ledger.see_pod(&PodFact { tenure, ..bound("a", "n", "A", 500_000) }, bed.now);
    bed.refused(waiting_pod("p", 500_000, 10), &["m"]);
    let plan = BTreeMap::from([(NodeName::new("n"), BTreeSet::from([uid("a")]))]);
    bed.preemptors.plan(&uid("p"), plan, true, bed.now);
    let mut all = Vec::new();
    for _ in 0..20 {
        for order in orders_after(&mut bed, 1) {
            all.push(order);
            ask(&bed, "p");
        }
    }
    assert_eq!(all, ["p m: d"]);
}

#[test]
fn important_pods_that_are_never_bound_have_few_evicted() {
    let mut bed = full();
    bed.rules.preemption.at_once = 1;
    for at in 0..20 {
        let controller = Some(Controller(1));
        let pod = waiting_pod(&format!("p{at:02}"), 1_000_000, 10);
        bed.refused(WaitingPod { controller, ..pod }, &["m"]);
    }
    let (mut evicted, mut sequence) = (0, 2);
    let mut ends: Option<PodUid> = None;
    for second in 0..1_800 {
        let step = bed.step_after(1);
        if let Some(victim) = ends.take() {
            bed.ledger.end_pod(&victim, bed.now);
            for _ in 0..2 {
                bed.ledger.report("m", &report("y", 8, sequence, "C"), bed.now).unwrap();
                sequence += 1;
            }
        }
        for order in &step.evict {
            bed.preemptors.ask(&order.pod.pod.uid, order.number);
            ends = Some(order.victims[0].uid.clone());
            evicted += 1;
        }
        if !step.given_up.is_empty() {
            bed.bind(&format!("v{second}"), "m", "C", 1_000_000, 0);
        }
    }
    assert!(evicted <= 6, "{evicted} were evicted for pods that nothing binds");
}
