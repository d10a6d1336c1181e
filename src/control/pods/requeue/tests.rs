use std::collections::BTreeMap;

use super::*;
use engine::ledger::ledger_fixture::{hello, ledger, pod, see_node, share_request};
use engine::model::rejection::Rejection;

/// A ledger with nodes `n` and `m` of one GPU each, and the pods that wait for room on them.
struct Bed {
    ledger: Ledger,
    waiting: WaitingPods,
    requeues: RequeueLoop,
    now: Timestamp,
    ended: Vec<Requeued>,
}

impl Bed {
    fn new() -> Self {
        let ledger = ledger("A");
        see_node(&ledger, "m");
        ledger.report("m", &hello("y", 1, "B"), Timestamp::START).unwrap();
        let (waiting, requeues) = (WaitingPods::default(), RequeueLoop::default());
        Self { ledger, waiting, requeues, now: Timestamp::START, ended: Vec::new() }
    }

    /// A bed with pods that were refused on both nodes, the first the oldest.
    fn with(names: &[&str]) -> Self {
        let bed = Self::new();
        for (name, age) in names.iter().zip(0..) {
            bed.refused(name, age, 0, &["m", "n"]);
        }
        bed
    }

    fn waiting_pod(name: &str, age: i64, priority: i32) -> WaitingPod {
        WaitingPod {
            pod: pod(name),
            namespace: "team".to_owned(),
            name: name.to_owned(),
            query: share_request(500_000),
            priority,
            may_preempt: true,
            controller: None,
            edition: 0,
            group: None,
            created_unix_seconds: age,
        }
    }

    /// kube-scheduler calls *filter* for a pod with that age and priority.
    fn named(&self, name: &str, age: i64, priority: i32) {
        let pod = Self::waiting_pod(name, age, priority);
        self.waiting.see(pod.clone(), self.now);
        self.waiting.begin_call(pod, self.now);
    }

    /// The same, and none of these nodes fits.
    fn refused(&self, name: &str, age: i64, priority: i32, nodes: &[&str]) -> Option<Requeued> {
        self.named(name, age, priority);
        let named = self.ledger.named_nodes(nodes.iter());
        self.waiting.refuse(&PodUid::new(name), BTreeMap::new(), Some(named))
    }

    fn room(&mut self, node: &str) {
        self.requeues.room(vec![NodeName::new(node)], self.now);
    }

    /// The pods to requeue this much later. Each requeue is written immediately.
    fn requeued_after(&mut self, millis: u64) -> Vec<String> {
        self.now = self.now.plus(Duration::from_millis(millis));
        let step = self.requeues.step(&self.waiting, &self.ledger, self.now);
        self.ended.extend(step.ended);
        let names = step.requeues.into_iter().map(|(_, pod)| {
            self.waiting.requeued(&pod.pod.uid, self.now);
            pod.name
        });
        names.collect()
    }
}

#[test]
fn the_next_pod_is_requeued_only_if_the_first_used_no_room() {
    for took in [true, false] {
        let mut bed = Bed::with(&["a", "b"]);
        bed.room("n");
        assert_eq!(bed.requeued_after(0), ["a"]);
        assert_eq!(bed.requeued_after(5), [""; 0]);
        if took {
            bed.named("a", 0, 0);
            assert_eq!(bed.waiting.fits(&pod("a").uid), Some(Requeued::Helped));
            assert_eq!(bed.requeued_after(1_500), [""; 0], "it is being bound");
            bed.ledger.reserve(&pod("a"), "n", &share_request(500_000), bed.now).unwrap();
            bed.waiting.remove(&pod("a").uid);
            assert_eq!(bed.requeued_after(2_000), [""; 0], "its binding is an event for all");
        } else {
            assert_eq!(bed.refused("a", 0, 0, &["m", "n"]), Some(Requeued::Refused));
            assert_eq!(bed.requeued_after(0), ["b"], "at once");
            assert_eq!(bed.refused("b", 1, 0, &["m"]), Some(Requeued::LeftOut));
            assert_eq!(bed.requeued_after(0), [""; 0], "all were tried");
        }
        assert!(bed.requeues.nodes.is_empty());
    }
}

#[test]
fn a_fitting_pod_that_is_not_bound_leaves_room_to_the_next() {
    let mut bed = Bed::with(&["a", "b"]);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), ["a"]);
    bed.named("a", 0, 0);
    bed.waiting.fits(&pod("a").uid);
    assert_eq!(bed.requeued_after(10), [""; 0]);
    assert_eq!(bed.requeued_after(2_000), ["b"]);
}

#[test]
fn a_pod_that_nobody_binds_after_an_answer_is_requeued_again() {
    for is_being_bound in [false, true] {
        let mut bed = Bed::with(&["a"]);
        bed.named("a", 0, 0); // by another client
        bed.waiting.fits(&pod("a").uid);
        bed.room("n");
        assert_eq!(bed.requeued_after(9_900), [""; 0], "it fits");
        bed.waiting.doubt_fits(bed.now, |_| is_being_bound);
        assert_eq!(bed.requeued_after(100), [""; 0], "it is early");
        bed.waiting.doubt_fits(bed.now, |_| is_being_bound);
        let requeued = bed.requeued_after(1);
        assert_eq!(requeued, if is_being_bound { vec![] } else { vec!["a"] });
    }
}

#[test]
fn pods_that_did_not_name_the_node_are_skipped() {
    let mut bed = Bed::new();
    for age in 0..1_000 {
        bed.refused(&format!("old-{age}"), age, 9, &["m"]);
    }
    bed.refused("young", 5_000, 0, &["n"]);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), ["young"]);
    bed.waiting.remove(&pod("young").uid);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), [""; 0]);
    bed.room("m");
    assert_eq!(bed.requeued_after(0), ["old-0"]);
}

#[test]
fn a_node_added_after_the_call_may_be_in_the_next_call() {
    let mut bed = Bed::with(&["a"]);
    see_node(&bed.ledger, "z");
    bed.ledger.report("z", &hello("z", 1, "C"), bed.now).unwrap();
    bed.room("z");
    assert_eq!(bed.requeued_after(0), ["a"]);
    assert_eq!(bed.refused("a", 0, 0, &["m", "n"]), Some(Requeued::LeftOut));
    bed.room("z");
    assert_eq!(bed.requeued_after(0), [""; 0], "the room was there at its next call");
    // The node is deleted and comes back: it may have other labels now.
    bed.ledger.lose_node(&NodeName::new("z"));
    see_node(&bed.ledger, "z");
    bed.ledger.report("z", &hello("again", 1, "C"), bed.now).unwrap();
    bed.room("z");
    assert_eq!(bed.requeued_after(0), ["a"]);
    // The same if a call for the pod came meanwhile.
    bed.ledger.lose_node(&NodeName::new("z"));
    assert_eq!(bed.refused("a", 0, 0, &["m", "n"]), Some(Requeued::LeftOut));
    see_node(&bed.ledger, "z");
    bed.ledger.report("z", &hello("once more", 1, "C"), bed.now).unwrap();
    bed.room("z");
    assert_eq!(bed.requeued_after(0), ["a"]);
}

#[test]
fn no_pod_is_requeued_for_a_node_that_accepts_no_new_pods() {
    let mut bed = Bed::with(&["a"]);
    bed.ledger.see_unschedulable(&NodeName::new("n"), true);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), [""; 0]);
    bed.ledger.see_unschedulable(&NodeName::new("n"), false);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), ["a"]);
}

#[test]
fn a_call_for_the_nominated_node_alone_leaves_the_others_open() {
    let mut bed = Bed::new();
    bed.named("a", 0, 0);
    bed.waiting.refuse(&pod("a").uid, BTreeMap::new(), None);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), ["a"]);
    bed.named("a", 0, 0);
    assert_eq!(bed.waiting.refuse(&pod("a").uid, BTreeMap::new(), None), None);
    assert_eq!(bed.requeued_after(5), [""; 0], "the call about all nodes is still to come");
    assert_eq!(bed.refused("a", 0, 0, &["m"]), Some(Requeued::LeftOut));
}

#[test]
fn a_pod_is_not_requeued_again_until_kube_scheduler_calls_for_it() {
    let mut bed = Bed::with(&["a", "b"]);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), ["a"]);
    assert_eq!(bed.requeued_after(249), [""; 0]);
    assert_eq!(bed.requeued_after(1), ["b"]);
    assert_eq!(bed.ended, [Requeued::Unanswered]);
    assert_eq!(bed.refused("b", 1, 0, &["m", "n"]), Some(Requeued::Refused));
    bed.room("n");
    assert_eq!(bed.requeued_after(0), ["b"], "more room may be enough");
    bed.waiting.remove(&pod("b").uid);
    bed.room("m");
    assert_eq!(bed.requeued_after(0), [""; 0]);
    assert_eq!(bed.refused("a", 0, 0, &["m", "n"]), None, "too late to count");
    bed.room("m");
    assert_eq!(bed.requeued_after(0), ["a"]);
}

#[test]
fn a_slow_scheduler_is_given_more_time() {
    let mut bed = Bed::with(&["a", "b"]);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), ["a"]);
    bed.now = bed.now.plus(Duration::from_millis(200));
    assert_eq!(bed.refused("a", 0, 0, &["m", "n"]), Some(Requeued::Refused));
    assert_eq!(bed.requeued_after(0), ["b"]);
    assert_eq!(bed.requeued_after(799), [""; 0]);
    assert_eq!(bed.ended, []);
    bed.requeued_after(1);
    assert_eq!(bed.ended, [Requeued::Unanswered]);
}

#[test]
fn a_requeued_pod_that_is_gone_causes_no_delay() {
    let mut bed = Bed::with(&["a", "b"]);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), ["a"]);
    bed.waiting.remove(&pod("a").uid); // as the reply to the write says
    assert_eq!(bed.requeued_after(0), ["b"]);
    assert_eq!(bed.ended, [Requeued::Gone]);
}

#[test]
fn higher_priority_is_first_even_when_room_comes_in_parts() {
    let mut bed = Bed::new();
    bed.refused("trivial", 0, 0, &["m", "n"]);
    bed.refused("important", 1, 7, &["m", "n"]);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), ["important"]);
    bed.room("n");
    assert_eq!(bed.requeued_after(1), [""; 0], "one at a time");
    assert_eq!(bed.refused("important", 1, 7, &["m", "n"]), Some(Requeued::Refused));
    assert_eq!(bed.requeued_after(1), ["trivial"]);
    bed.room("n");
    assert_eq!(bed.refused("trivial", 0, 0, &["m", "n"]), Some(Requeued::Refused));
    assert_eq!(bed.requeued_after(1), ["important"]);
}

#[test]
fn room_that_appears_during_a_bind_is_checked() {
    let mut bed = Bed::with(&["a", "b"]);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), ["a"]);
    bed.room("n");
    bed.named("a", 0, 0);
    bed.waiting.fits(&pod("a").uid);
    bed.ledger.reserve(&pod("a"), "n", &share_request(500_000), bed.now).unwrap();
    bed.waiting.remove(&pod("a").uid);
    assert_eq!(bed.requeued_after(0), ["b"]);
}

#[test]
fn a_pod_about_to_be_scheduled_is_not_requeued_again() {
    let mut bed = Bed::with(&["a"]);
    bed.room("m");
    assert_eq!(bed.requeued_after(0), ["a"]);
    bed.room("n");
    assert_eq!(bed.requeued_after(1), [""; 0], "its call will see this room as well");
    bed.named("a", 0, 0);
    bed.room("n");
    assert_eq!(bed.requeued_after(1), ["a"], "this one may have come too late for it");
}

#[test]
fn a_failed_requeue_can_be_repeated() {
    let mut bed = Bed::with(&["a"]);
    bed.room("n");
    let step = bed.requeues.step(&bed.waiting, &bed.ledger, bed.now);
    assert_eq!(step.requeues.len(), 1);
    assert_eq!(bed.requeued_after(60_000), [""; 0], "it is still being written");
    bed.waiting.requeue_failed(&pod("a").uid);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), ["a"]);
    bed.waiting.begin_call(bed.waiting.pod(&pod("a").uid).unwrap().waiting, bed.now);
    let rejections = BTreeMap::from([(Rejection::NotReporting, 1)]);
    bed.waiting.refuse(&pod("a").uid, rejections, Some(bed.ledger.named_nodes(["n"].iter())));
    bed.room("n");
    let step = bed.requeues.step(&bed.waiting, &bed.ledger, bed.now);
    assert_eq!(step.requeues.len(), 1);
    bed.waiting.not_requeuable(&pod("a").uid, bed.now);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), [""; 0], "no process may requeue it");
}

#[test]
fn room_is_kept_for_a_pod_whose_other_requeue_may_fail() {
    for is_written in [false, true] {
        let mut bed = Bed::with(&["a"]);
        bed.room("m");
        let step = bed.requeues.step(&bed.waiting, &bed.ledger, bed.now);
        assert_eq!(step.requeues.len(), 1);
        bed.room("n");
        for _ in 0..3 {
            assert_eq!(bed.requeued_after(250), [""; 0], "it is still being written");
        }
        bed.ledger.reserve(&pod("other"), "m", &share_request(1_000_000), bed.now).unwrap();
        if is_written {
            bed.waiting.requeued(&pod("a").uid, bed.now);
            assert_eq!(bed.requeued_after(250), [""; 0], "its call sees both nodes");
            assert!(!bed.requeues.nodes.contains_key("n"));
        } else {
            bed.waiting.requeue_failed(&pod("a").uid);
            bed.room("m");
            assert_eq!(bed.requeued_after(250), ["a"], "for the other room");
        }
    }
}

#[test]
fn room_that_no_requeued_pod_can_use_is_not_kept() {
    let mut bed = Bed::new();
    bed.refused("a", 0, 0, &["m"]);
    bed.room("m");
    let step = bed.requeues.step(&bed.waiting, &bed.ledger, bed.now);
    assert_eq!(step.requeues.len(), 1);
    bed.room("n");
    assert_eq!(bed.requeued_after(0), [""; 0]);
    assert_eq!(bed.requeues.nodes.len(), 1, "its call did not name that node");
}

#[test]
fn room_from_before_the_watch_showed_the_pod_is_searched_once() {
    for has_room in [true, false] {
        let mut bed = Bed::new();
        bed.ledger.reserve(&pod("holder"), "n", &share_request(1_000_000), bed.now).unwrap();
        let waiting = Bed::waiting_pod("a", 0, 0);
        bed.waiting.begin_call(waiting.clone(), bed.now);
        let named = bed.ledger.named_nodes(["n"].iter());
        bed.waiting.refuse(&pod("a").uid, BTreeMap::new(), Some(named));
        if has_room {
            bed.ledger.forget(&pod("holder").uid);
        }
        bed.room("n");
        assert_eq!(bed.requeued_after(0), [""; 0], "the watch does not show it");
        assert!(bed.requeues.nodes.is_empty());
        assert!(bed.waiting.see(waiting.clone(), bed.now));
        let expected = if has_room { &["a"][..] } else { &[] };
        assert_eq!(bed.requeued_after(1), expected, "there is room on the other node, too");
        bed.waiting.see(waiting, bed.now);
        bed.waiting.requeue_failed(&pod("a").uid);
        assert!(bed.waiting.late(9).is_none_or(|groups| groups.is_empty()));
    }
}

#[test]
fn late_pods_with_equal_requests_share_one_search() {
    let mut bed = Bed::new();
    for node in ["n", "m"] {
        bed.ledger.reserve(&pod(node), node, &share_request(1_000_000), bed.now).unwrap();
    }
    for at in 0..1_000 {
        let waiting = Bed::waiting_pod(&format!("{at}"), 0, 0);
        bed.waiting.begin_call(waiting.clone(), bed.now);
        let named = bed.ledger.named_nodes(["n", "m"].iter());
        bed.waiting.refuse(&waiting.pod.uid, BTreeMap::new(), Some(named));
        bed.waiting.see(waiting, bed.now);
    }
    bed.ledger.forget(&pod("m").uid);
    assert_eq!(bed.requeued_after(1), ["0"]);
    assert!(bed.requeues.late.is_empty() && bed.waiting.late(1).is_none(), "in one step");
}

#[test]
fn a_pod_that_becomes_late_during_a_tick_is_checked_in_the_next() {
    let mut bed = Bed::new();
    let waiting = Bed::waiting_pod("a", 0, 0);
    bed.waiting.begin_call(waiting.clone(), bed.now);
    let named = bed.ledger.named_nodes(["n", "m"].iter());
    bed.waiting.refuse(&waiting.pod.uid, BTreeMap::new(), Some(named));
    bed.requeues.gather_late(&bed.waiting);
    bed.requeues.follow(|uid| bed.waiting.is_sending(uid), || bed.waiting.changes(CHANGES_AT_ONCE));
    bed.waiting.see(waiting, bed.now);
    bed.requeues.catch_up(&bed.ledger, bed.now);
    assert_eq!(bed.requeued_after(1), ["a"]);
}

#[test]
fn a_late_pod_is_not_requeued_while_its_call_is_being_answered() {
    for fits in [true, false] {
        let mut bed = Bed::new();
        let waiting = Bed::waiting_pod("a", 0, 0);
        bed.waiting.begin_call(waiting.clone(), bed.now);
        bed.waiting.see(waiting, bed.now);
        assert_eq!(bed.requeued_after(1), [""; 0], "the answer may be this room");
        if fits {
            bed.waiting.fits(&pod("a").uid);
            assert_eq!(bed.requeued_after(1), [""; 0]);
        } else {
            let named = bed.ledger.named_nodes(["n", "m"].iter());
            bed.waiting.refuse(&pod("a").uid, BTreeMap::new(), Some(named));
            assert_eq!(bed.requeued_after(1), ["a"], "the room came after the check of that node");
        }
    }
}

#[test]
fn a_requeue_that_ends_during_an_update_is_not_lost() {
    for ends_late in [true, false] {
        let mut bed = Bed::with(&["a"]);
        bed.room("m");
        let step = bed.requeues.step(&bed.waiting, &bed.ledger, bed.now);
        assert_eq!(step.requeues.len(), 1);
        let (waiting, uid) = (&bed.waiting, pod("a").uid);
        bed.requeues.follow(
            |sent| {
                let is_sending = waiting.is_sending(sent);
                if !ends_late {
                    waiting.requeue_failed(&uid);
                }
                is_sending
            },
            || {
                let changes = waiting.changes(9);
                if ends_late {
                    waiting.requeue_failed(&uid);
                }
                changes
            },
        );
        assert!(!bed.requeues.sending.is_empty() || !bed.requeues.order.is_empty());
    }
}
