use std::collections::BTreeMap;

use super::*;
use crate::room::fixture::{ALL, Bed, waiting_pod};
use engine::ledger::ledger_fixture::uid;
use engine::ledger::suggest::waiting::WaitingPod;
use engine::model::charge::Prices;
use engine::model::rejection::Rejection;
use engine::model::request::PodGroup;
use engine::model::team::{TeamRules, TeamShare};
use wire::units::Share;

/// The team of all pods may have one GPU.
fn bed() -> Bed {
    let bed = Bed::new(Duration::ZERO);
    let others = TeamShare { guaranteed: Share::ZERO, at_most: Some(Share::WHOLE) };
    bed.ledger.teams.rule(TeamRules { others, ..TeamRules::default() }, Prices::default());
    bed
}

fn limited(bed: &Bed, name: &str, millionths: u64, priority: i32) {
    let pod = waiting_pod(name, millionths, priority);
    bed.waiting.see(pod.clone(), bed.now);
    call(bed, name, millionths, priority);
}

fn call(bed: &Bed, name: &str, millionths: u64, priority: i32) {
    bed.waiting.begin_call(waiting_pod(name, millionths, priority), bed.now);
    let named = bed.ledger.named_nodes(ALL.iter());
    bed.waiting.refuse(&uid(name), BTreeMap::from([(Rejection::TeamLimit, 2)]), Some(named));
}

fn called(bed: &mut Bed, seconds: u64) -> Vec<String> {
    let step = bed.step_after(seconds);
    step.call_again.into_iter().map(|pod| pod.name).collect()
}

#[test]
fn the_pods_that_a_team_may_have_are_called_once() {
    let mut bed = bed();
    bed.bind("team/x", "n", "A", 600_000, 0);
    bed.bind("team/y", "n", "B", 400_000, 0);
    limited(&bed, "never", 1_100_000, 9);
    limited(&bed, "p", 500_000, 0);
    limited(&bed, "q", 300_000, 0);
    limited(&bed, "important", 300_000, 5);
    assert_eq!(called(&mut bed, 1), [""; 0], "it is at its limit");
    bed.ledger.end_pod(&uid("team/y"), bed.now);
    assert_eq!(called(&mut bed, 31), [""; 0], "it drains until the next tick");
    bed.ledger.tick(bed.now);
    assert_eq!(called(&mut bed, 1), ["important"], "`q` does not fit beside it");
    assert_eq!(called(&mut bed, 1), [""; 0]);
    assert_eq!(called(&mut bed, 10), ["important", "q"], "no call came: it is in the way of none");
    assert_eq!(called(&mut bed, 10), ["q"], "and called again later each time");
    assert_eq!(called(&mut bed, 10), ["important"]);
    call(&bed, "important", 300_000, 5);
    assert_eq!(called(&mut bed, 1), ["important"], "it was refused again");
    bed.ledger.end_pod(&uid("team/x"), bed.now);
    bed.ledger.tick(bed.now.plus(Duration::from_secs(31)));
    bed.waiting.remove(&uid("important"));
    call(&bed, "q", 300_000, 0);
    assert_eq!(called(&mut bed, 32), ["p", "q"], "both have room together");
}

#[test]
fn a_pod_that_counts_too_much_where_it_fits_is_called_when_its_team_may_have_more() {
    let mut bed = bed();
    bed.bind("team/x", "n", "A", 600_000, 0);
    bed.bind("team/y", "n", "B", 200_000, 0);
    let call = |bed: &Bed| {
        bed.waiting.begin_call(waiting_pod("p", 100_000, 0), bed.now);
        let named = bed.ledger.named_nodes(ALL.iter());
        let rejections = BTreeMap::from([(Rejection::TeamLimitHere, 1), (Rejection::NoDevices, 1)]);
        bed.waiting.refuse(&uid("p"), rejections, Some(named));
    };
    bed.waiting.see(waiting_pod("p", 100_000, 0), bed.now);
    call(&bed);
    assert_eq!(called(&mut bed, 1), [""; 0], "nothing has changed since its call");
    assert_eq!(called(&mut bed, 1), [""; 0]);
    bed.ledger.end_pod(&uid("team/y"), bed.now);
    bed.ledger.tick(bed.now.plus(Duration::from_secs(31)));
    assert_eq!(called(&mut bed, 1), ["p"], "its team may have more");
    assert_eq!(called(&mut bed, 1), [""; 0]);
    call(&bed);
    assert_eq!(called(&mut bed, 1), [""; 0], "it was refused again");
    assert_eq!(called(&mut bed, 10), ["p"], "larger GPUs may be free");
    call(&bed);
    assert_eq!(called(&mut bed, 11), [""; 0], "later each time");
    assert_eq!(called(&mut bed, 20), ["p"]);
}

#[test]
fn a_group_that_its_team_may_not_have_is_not_looked_for() {
    let mut bed = bed();
    for at in 0..2 {
        let group = PodGroup { name: "g".into(), size: 2 };
        let pod = WaitingPod { group: Some(group), ..waiting_pod(&format!("g-{at}"), 600_000, 0) };
        bed.refused(pod, ALL);
    }
    let step = bed.step_after(5);
    assert!(step.events.is_empty() && bed.kept().is_empty(), "{step:?}");
    let mut bed = Bed::new(Duration::ZERO);
    let others =
        TeamShare { guaranteed: Share::ZERO, at_most: Some(Share::from_millionths(1_200_000)) };
    bed.ledger.teams.rule(TeamRules { others, ..TeamRules::default() }, Prices::default());
    for at in 0..2 {
        let group = PodGroup { name: "g".into(), size: 2 };
        let pod = WaitingPod { group: Some(group), ..waiting_pod(&format!("g-{at}"), 600_000, 0) };
        bed.refused(pod, ALL);
    }
    bed.step_after(5);
    assert_eq!(bed.kept().len(), 2);
    assert_eq!(bed.ledger.teams.left("team"), Some(0));
}

#[test]
fn no_room_is_kept_that_the_team_may_not_have() {
    let mut bed = bed();
    bed.rules.after = Duration::from_secs(5);
    for (pod, node, device) in [("other/x", "n", "A"), ("other/y", "n", "B"), ("other/z", "m", "C")]
    {
        bed.bind(pod, node, device, 600_000, 0);
    }
    assert!(bed.ledger.teams.admit_kept(&uid("x"), "team", Share::from_millionths(600_000)));
    bed.refused(waiting_pod("p", 500_000, 0), ALL);
    bed.step_after(6);
    assert_eq!(bed.kept(), []);
    bed.ledger.teams.let_go(&uid("x"));
    bed.step_after(1);
    assert_eq!(bed.kept().len(), 1);
    assert_eq!(bed.ledger.teams.left("team"), Some(500_000));
}
