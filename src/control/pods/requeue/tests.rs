use std::collections::BTreeMap;

use super::*;
use crate::ledger::fixture::{asks, hello, ledger, pod, see_node};
use crate::model::rejection::Rejection;

/// A ledger with nodes `n` and `m` of one GPU each, and the pods that wait for room on them.
struct Bed {
    ledger: Ledger,
    waiting: WaitingPods,
    wakes: RequeueLoop,
    now: Timestamp,
    ended: Vec<Requeued>,
}

impl Bed {
    fn new() -> Self {
        let ledger = ledger("A");
        see_node(&ledger, "m");
        ledger.report("m", &hello("y", 1, "B"), Timestamp::START).unwrap();
        let (waiting, wakes) = (WaitingPods::default(), RequeueLoop::default());
        Self { ledger, waiting, wakes, now: Timestamp::START, ended: Vec::new() }
    }

    /// A bed with pods that were refused on both nodes, the first the oldest.
    fn with(names: &[&str]) -> Self {
        let bed = Self::new();
        for (name, age) in names.iter().zip(0..) {
            bed.refused((name, age, 0), &["m", "n"]);
        }
        bed
    }

    fn waiting_pod((name, age, priority): (&str, i64, i32)) -> WaitingPod {
        WaitingPod {
            pod: pod(name),
            namespace: "team".to_owned(),
            name: name.to_owned(),
            question: asks(500_000),
            priority,
            created_unix_seconds: age,
        }
    }

    /// kube-scheduler calls *filter* for a pod with that age and priority.
    fn asked(&self, pod: (&str, i64, i32)) {
        let pod = Self::waiting_pod(pod);
        self.waiting.see(pod.clone(), self.now);
        self.waiting.ask(pod, self.now);
    }

    /// The same, and none of these nodes fits.
    fn refused(&self, pod: (&str, i64, i32), nodes: &[&str]) -> Option<Requeued> {
        self.asked(pod);
        let asked = self.ledger.asked_nodes(nodes.iter());
        self.waiting.refuse(&PodUid::new(pod.0), BTreeMap::new(), Some(asked))
    }

    fn room(&mut self, node: &str) {
        self.wakes.room(vec![NodeName::new(node)], self.now);
    }

    /// The pods to requeue this much later. Each requeue is written at once.
    fn touched_after(&mut self, millis: u64) -> Vec<String> {
        self.now = self.now.plus(Duration::from_millis(millis));
        let step = self.wakes.step(&self.waiting, &self.ledger, self.now);
        self.ended.extend(step.ended);
        let names = step.touches.into_iter().map(|(_, pod)| {
            self.waiting.touched(&pod.pod.uid, self.now);
            pod.name
        });
        names.collect()
    }
}

#[test]
fn the_next_one_is_touched_only_where_the_first_took_no_room() {
    for took in [true, false] {
        let mut bed = Bed::with(&["a", "b"]);
        bed.room("n");
        assert_eq!(bed.touched_after(0), ["a"]);
        assert_eq!(bed.touched_after(5), [""; 0]);
        if took {
            bed.asked(("a", 0, 0));
            assert_eq!(bed.waiting.fits(&pod("a").uid), Some(Requeued::Helped));
            assert_eq!(bed.touched_after(1_500), [""; 0], "it is being bound");
            bed.ledger.reserve(&pod("a"), "n", &asks(500_000), bed.now).unwrap();
            bed.waiting.remove(&pod("a").uid);
            assert_eq!(bed.touched_after(2_000), [""; 0], "its binding is an event for all");
        } else {
            assert_eq!(bed.refused(("a", 0, 0), &["m", "n"]), Some(Requeued::Refused));
            assert_eq!(bed.touched_after(0), ["b"], "at once");
            assert_eq!(bed.refused(("b", 1, 0), &["m"]), Some(Requeued::LeftOut));
            assert_eq!(bed.touched_after(0), [""; 0], "all were tried");
        }
        assert!(bed.wakes.nodes.is_empty());
    }
}

#[test]
fn a_pod_that_fits_and_is_not_bound_leaves_the_room_to_the_next() {
    let mut bed = Bed::with(&["a", "b"]);
    bed.room("n");
    assert_eq!(bed.touched_after(0), ["a"]);
    bed.asked(("a", 0, 0));
    bed.waiting.fits(&pod("a").uid);
    assert_eq!(bed.touched_after(10), [""; 0]);
    assert_eq!(bed.touched_after(2_000), ["b"]);
}

#[test]
fn thousands_that_were_not_asked_about_the_node_are_passed_over() {
    let mut bed = Bed::new();
    for age in 0..1_000 {
        bed.refused((&format!("old-{age}"), age, 9), &["m"]);
    }
    bed.refused(("young", 5_000, 0), &["n"]);
    bed.room("n");
    assert_eq!(bed.touched_after(0), ["young"]);
    bed.waiting.remove(&pod("young").uid);
    bed.room("n");
    assert_eq!(bed.touched_after(0), [""; 0]);
    bed.room("m");
    assert_eq!(bed.touched_after(0), ["old-0"]);
}

#[test]
fn a_node_that_came_after_the_question_may_be_in_the_next_one() {
    let mut bed = Bed::with(&["a"]);
    see_node(&bed.ledger, "z");
    bed.ledger.report("z", &hello("z", 1, "C"), bed.now).unwrap();
    bed.room("z");
    assert_eq!(bed.touched_after(0), ["a"]);
    assert_eq!(bed.refused(("a", 0, 0), &["m", "n"]), Some(Requeued::LeftOut));
    bed.room("z");
    assert_eq!(bed.touched_after(0), [""; 0], "it was there when it was asked again");
    // The node is deleted and comes back: it may have other labels now.
    bed.ledger.lose_node(&NodeName::new("z"));
    see_node(&bed.ledger, "z");
    bed.ledger.report("z", &hello("again", 1, "C"), bed.now).unwrap();
    bed.room("z");
    assert_eq!(bed.touched_after(0), ["a"]);
    // The same if a call for the pod came meanwhile.
    bed.ledger.lose_node(&NodeName::new("z"));
    assert_eq!(bed.refused(("a", 0, 0), &["m", "n"]), Some(Requeued::LeftOut));
    see_node(&bed.ledger, "z");
    bed.ledger.report("z", &hello("once more", 1, "C"), bed.now).unwrap();
    bed.room("z");
    assert_eq!(bed.touched_after(0), ["a"]);
}

#[test]
fn nobody_is_touched_for_a_node_that_takes_no_new_pods() {
    let mut bed = Bed::with(&["a"]);
    bed.ledger.see_unschedulable(&NodeName::new("n"), true);
    bed.room("n");
    assert_eq!(bed.touched_after(0), [""; 0]);
    bed.ledger.see_unschedulable(&NodeName::new("n"), false);
    bed.room("n");
    assert_eq!(bed.touched_after(0), ["a"]);
}

#[test]
fn a_question_about_the_nominated_node_alone_leaves_the_others_open() {
    let mut bed = Bed::new();
    bed.asked(("a", 0, 0));
    bed.waiting.refuse(&pod("a").uid, BTreeMap::new(), None);
    bed.room("n");
    assert_eq!(bed.touched_after(0), ["a"]);
    bed.asked(("a", 0, 0));
    assert_eq!(bed.waiting.refuse(&pod("a").uid, BTreeMap::new(), None), None);
    assert_eq!(bed.touched_after(5), [""; 0], "the question about all nodes is to come");
    assert_eq!(bed.refused(("a", 0, 0), &["m"]), Some(Requeued::LeftOut));
}

#[test]
fn who_is_not_asked_about_is_not_touched_again_until_it_is() {
    let mut bed = Bed::with(&["a", "b"]);
    bed.room("n");
    assert_eq!(bed.touched_after(0), ["a"]);
    assert_eq!(bed.touched_after(249), [""; 0]);
    assert_eq!(bed.touched_after(1), ["b"]);
    assert_eq!(bed.ended, [Requeued::Unanswered]);
    assert_eq!(bed.refused(("b", 1, 0), &["m", "n"]), Some(Requeued::Refused));
    bed.room("n");
    assert_eq!(bed.touched_after(0), ["b"], "more room may be enough");
    bed.waiting.remove(&pod("b").uid);
    bed.room("m");
    assert_eq!(bed.touched_after(0), [""; 0]);
    assert_eq!(bed.refused(("a", 0, 0), &["m", "n"]), None, "too late to count");
    bed.room("m");
    assert_eq!(bed.touched_after(0), ["a"]);
}

#[test]
fn a_slow_scheduler_is_given_more_time() {
    let mut bed = Bed::with(&["a", "b"]);
    bed.room("n");
    assert_eq!(bed.touched_after(0), ["a"]);
    bed.now = bed.now.plus(Duration::from_millis(200));
    assert_eq!(bed.refused(("a", 0, 0), &["m", "n"]), Some(Requeued::Refused));
    assert_eq!(bed.touched_after(0), ["b"]);
    assert_eq!(bed.touched_after(799), [""; 0]);
    assert_eq!(bed.ended, []);
    bed.touched_after(1);
    assert_eq!(bed.ended, [Requeued::Unanswered]);
}

#[test]
fn a_touched_pod_that_is_gone_costs_no_time() {
    let mut bed = Bed::with(&["a", "b"]);
    bed.room("n");
    assert_eq!(bed.touched_after(0), ["a"]);
    bed.waiting.remove(&pod("a").uid); // as the reply to the write says
    assert_eq!(bed.touched_after(0), ["b"]);
    assert_eq!(bed.ended, [Requeued::Gone]);
}

#[test]
fn the_more_important_one_is_first_also_where_room_comes_in_parts() {
    let mut bed = Bed::new();
    bed.refused(("trivial", 0, 0), &["m", "n"]);
    bed.refused(("important", 1, 7), &["m", "n"]);
    bed.room("n");
    assert_eq!(bed.touched_after(0), ["important"]);
    bed.room("n");
    assert_eq!(bed.touched_after(1), [""; 0], "one at a time");
    assert_eq!(bed.refused(("important", 1, 7), &["m", "n"]), Some(Requeued::Refused));
    assert_eq!(bed.touched_after(1), ["trivial"]);
    bed.room("n");
    assert_eq!(bed.refused(("trivial", 0, 0), &["m", "n"]), Some(Requeued::Refused));
    assert_eq!(bed.touched_after(1), ["important"]);
}

#[test]
fn more_room_while_a_pod_is_bound_is_looked_at() {
    let mut bed = Bed::with(&["a", "b"]);
    bed.room("n");
    assert_eq!(bed.touched_after(0), ["a"]);
    bed.room("n");
    bed.asked(("a", 0, 0));
    bed.waiting.fits(&pod("a").uid);
    bed.ledger.reserve(&pod("a"), "n", &asks(500_000), bed.now).unwrap();
    bed.waiting.remove(&pod("a").uid);
    assert_eq!(bed.touched_after(0), ["b"]);
}

#[test]
fn whom_kube_scheduler_is_about_to_ask_needs_no_second_touch() {
    let mut bed = Bed::with(&["a"]);
    bed.room("m");
    assert_eq!(bed.touched_after(0), ["a"]);
    bed.room("n");
    assert_eq!(bed.touched_after(1), [""; 0], "its question will see this room as well");
    bed.asked(("a", 0, 0));
    bed.room("n");
    assert_eq!(bed.touched_after(1), ["a"], "this one may have come too late for it");
}

#[test]
fn a_touch_that_could_not_be_written_can_be_repeated() {
    let mut bed = Bed::with(&["a"]);
    bed.room("n");
    let step = bed.wakes.step(&bed.waiting, &bed.ledger, bed.now);
    assert_eq!(step.touches.len(), 1);
    assert_eq!(bed.touched_after(60_000), [""; 0], "it is still being written");
    bed.waiting.not_touched(&pod("a").uid);
    bed.room("n");
    assert_eq!(bed.touched_after(0), ["a"]);
    bed.waiting.ask(bed.waiting.pod(&pod("a").uid).unwrap().waiting, bed.now);
    let rejections = BTreeMap::from([(Rejection::Silent, 1)]);
    bed.waiting.refuse(&pod("a").uid, rejections, Some(bed.ledger.asked_nodes(["n"].iter())));
    bed.room("n");
    let step = bed.wakes.step(&bed.waiting, &bed.ledger, bed.now);
    assert_eq!(step.touches.len(), 1);
    bed.waiting.not_touchable(&pod("a").uid, bed.now);
    bed.room("n");
    assert_eq!(bed.touched_after(0), [""; 0], "nobody may touch it");
}

#[test]
fn room_is_kept_for_a_pod_whose_touch_for_another_node_may_not_come_about() {
    for is_written in [false, true] {
        let mut bed = Bed::with(&["a"]);
        bed.room("m");
        let step = bed.wakes.step(&bed.waiting, &bed.ledger, bed.now);
        assert_eq!(step.touches.len(), 1);
        bed.room("n");
        for _ in 0..3 {
            assert_eq!(bed.touched_after(250), [""; 0], "it is still being written");
        }
        bed.ledger.reserve(&pod("other"), "m", &asks(1_000_000), bed.now).unwrap();
        if is_written {
            bed.waiting.touched(&pod("a").uid, bed.now);
            assert_eq!(bed.touched_after(250), [""; 0], "its question sees both nodes");
            assert!(!bed.wakes.nodes.contains_key("n"));
        } else {
            bed.waiting.not_touched(&pod("a").uid);
            bed.room("m");
            assert_eq!(bed.touched_after(250), ["a"], "for the other room");
        }
    }
}

#[test]
fn room_that_no_pod_being_touched_can_use_is_not_kept() {
    let mut bed = Bed::new();
    bed.refused(("a", 0, 0), &["m"]);
    bed.room("m");
    let step = bed.wakes.step(&bed.waiting, &bed.ledger, bed.now);
    assert_eq!(step.touches.len(), 1);
    bed.room("n");
    assert_eq!(bed.touched_after(0), [""; 0]);
    assert_eq!(bed.wakes.nodes.len(), 1, "it was not asked about that node");
}

#[test]
fn room_that_appeared_before_the_watch_showed_the_pod_is_looked_for_once() {
    for has_room in [true, false] {
        let mut bed = Bed::new();
        bed.ledger.reserve(&pod("holder"), "n", &asks(1_000_000), bed.now).unwrap();
        let waiting = Bed::waiting_pod(("a", 0, 0));
        bed.waiting.ask(waiting.clone(), bed.now);
        let asked = bed.ledger.asked_nodes(["n"].iter());
        bed.waiting.refuse(&pod("a").uid, BTreeMap::new(), Some(asked));
        if has_room {
            bed.ledger.forget(&pod("holder").uid);
        }
        bed.room("n");
        assert_eq!(bed.touched_after(0), [""; 0], "the watch does not show it");
        assert!(bed.wakes.nodes.is_empty());
        assert!(bed.waiting.see(waiting.clone(), bed.now));
        let expected = if has_room { &["a"][..] } else { &[] };
        assert_eq!(bed.touched_after(1), expected, "there is room on the other node, too");
        bed.waiting.see(waiting, bed.now);
        bed.waiting.not_touched(&pod("a").uid);
        assert!(bed.waiting.late(9).is_none_or(|groups| groups.is_empty()));
    }
}

#[test]
fn one_look_for_room_does_for_all_late_pods_that_ask_the_same() {
    let mut bed = Bed::new();
    for node in ["n", "m"] {
        bed.ledger.reserve(&pod(node), node, &asks(1_000_000), bed.now).unwrap();
    }
    for at in 0..1_000 {
        let waiting = Bed::waiting_pod((&format!("{at}"), 0, 0));
        bed.waiting.ask(waiting.clone(), bed.now);
        let asked = bed.ledger.asked_nodes(["n", "m"].iter());
        bed.waiting.refuse(&waiting.pod.uid, BTreeMap::new(), Some(asked));
        bed.waiting.see(waiting, bed.now);
    }
    bed.ledger.forget(&pod("m").uid);
    assert_eq!(bed.touched_after(1), ["0"]);
    assert!(bed.wakes.late.is_empty() && bed.waiting.late(1).is_none(), "in one step");
}

#[test]
fn a_pod_that_becomes_late_during_a_step_is_looked_at_by_the_next() {
    let mut bed = Bed::new();
    let waiting = Bed::waiting_pod(("a", 0, 0));
    bed.waiting.ask(waiting.clone(), bed.now);
    let asked = bed.ledger.asked_nodes(["n", "m"].iter());
    bed.waiting.refuse(&waiting.pod.uid, BTreeMap::new(), Some(asked));
    bed.wakes.gather_late(&bed.waiting);
    bed.wakes.follow(|uid| bed.waiting.is_sending(uid), || bed.waiting.changes(CHANGES_AT_ONCE));
    bed.waiting.see(waiting, bed.now);
    bed.wakes.catch_up(&bed.ledger, bed.now);
    assert_eq!(bed.touched_after(1), ["a"]);
}

#[test]
fn a_late_pod_whose_question_is_being_answered_is_not_touched_for_that() {
    for fits in [true, false] {
        let mut bed = Bed::new();
        let waiting = Bed::waiting_pod(("a", 0, 0));
        bed.waiting.ask(waiting.clone(), bed.now);
        bed.waiting.see(waiting, bed.now);
        assert_eq!(bed.touched_after(1), [""; 0], "the answer may be this room");
        if fits {
            bed.waiting.fits(&pod("a").uid);
            assert_eq!(bed.touched_after(1), [""; 0]);
        } else {
            let asked = bed.ledger.asked_nodes(["n", "m"].iter());
            bed.waiting.refuse(&pod("a").uid, BTreeMap::new(), Some(asked));
            assert_eq!(bed.touched_after(1), ["a"], "the room came after the look at that node");
        }
    }
}

#[test]
fn a_touch_that_ends_while_changes_are_taken_over_is_not_lost() {
    for ends_late in [true, false] {
        let mut bed = Bed::with(&["a"]);
        bed.room("m");
        let step = bed.wakes.step(&bed.waiting, &bed.ledger, bed.now);
        assert_eq!(step.touches.len(), 1);
        let (waiting, uid) = (&bed.waiting, pod("a").uid);
        bed.wakes.follow(
            |sent| {
                let is_sending = waiting.is_sending(sent);
                if !ends_late {
                    waiting.not_touched(&uid);
                }
                is_sending
            },
            || {
                let changes = waiting.changes(9);
                if ends_late {
                    waiting.not_touched(&uid);
                }
                changes
            },
        );
        assert!(!bed.wakes.sending.is_empty() || !bed.wakes.order.is_empty());
    }
}
