use std::collections::BTreeMap;

use super::*;
use crate::config::guard::PreemptionConfig;
use crate::control::room::standing::StandingRules;
use crate::hardware::units::Share;
use crate::ledger::fixture::{bound, hello, ledger, pod, see_node, share_query, uid};
use crate::ledger::nodes::state::Ledger;
use crate::ledger::suggest::preemptors::Preemptors;
use crate::ledger::suggest::together::BoundGroups;
use crate::ledger::suggest::waiting::{WaitingPod, WaitingPods};
use crate::model::rejection::Rejection;
use crate::model::request::PodGroup;

/// A ledger with nodes `n` (GPUs A, B) and `m` (GPU C), and pods that wait.
struct Bed {
    ledger: Ledger,
    waiting: WaitingPods,
    preemptors: Preemptors,
    bound: BoundGroups,
    holds: StandingHolds,
    now: Timestamp,
}

impl Bed {
    fn new() -> Self {
        let ledger = ledger("A B");
        see_node(&ledger, "m");
        ledger.report("m", &hello("y", 1, "C"), Timestamp::START).unwrap();
        Self {
            ledger,
            waiting: WaitingPods::default(),
            preemptors: Preemptors::default(),
            bound: BoundGroups::default(),
            holds: StandingHolds::default(),
            now: Timestamp::START,
        }
    }

    /// A pod of a group of this size, with a whole GPU, was refused.
    fn refused(&self, name: &str, group: &str, size: u32) {
        let waiting = WaitingPod {
            pod: pod(name),
            namespace: "team".to_owned(),
            name: name.to_owned(),
            query: share_query(1_000_000),
            priority: 0,
            may_preempt: true,
            created_unix_seconds: 1_000,
            group: Some(PodGroup { name: group.into(), size }),
        };
        self.waiting.see(waiting.clone(), self.now);
        self.waiting.begin_call(waiting, self.now);
        let named = self.ledger.named_nodes(["m", "n"].iter());
        let why = BTreeMap::from([(Rejection::GroupWaits, 2)]);
        self.waiting.refuse(&uid(name), why, Some(named));
    }

    /// The pods for which room is kept this much later; what is noted on pods; what is no longer.
    fn kept_after(&mut self, seconds: u64) -> (Vec<String>, usize, usize) {
        self.now = self.now.plus(Duration::from_secs(seconds));
        let rules = StandingRules {
            after: Duration::from_secs(1),
            at_most: Share::WHOLE,
            preemption: PreemptionConfig::default(),
            group_timeout: Duration::from_secs(60),
        };
        let facts = (&self.waiting, &self.preemptors, &self.ledger, &self.bound);
        let step = self.holds.step(facts, rules, (self.now, 2_000));
        let kept = self.ledger.standing_nodes().into_keys().map(|uid| uid.to_string());
        (kept.collect(), step.noted.len(), step.abandoned.len())
    }
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

#[test]
fn a_group_gets_room_when_all_of_its_pods_wait_and_fit() {
    let mut bed = Bed::new();
    bed.refused("a", "g", 2);
    assert_eq!(bed.kept_after(1), (vec![], 0, 0), "one of two");
    bed.refused("b", "g", 2);
    assert_eq!(bed.kept_after(1), (names(&["a", "b"]), 2, 0));
    assert_eq!(bed.kept_after(1), (names(&["a", "b"]), 0, 0), "noted once");
    // A second group does not get a part of what it needs.
    bed.refused("c", "h", 2);
    bed.refused("d", "h", 2);
    assert_eq!(bed.kept_after(1), (names(&["a", "b"]), 0, 0), "one GPU is left");
    for name in ["a", "b"] {
        let node = bed.ledger.standing_nodes()[&uid(name)].clone();
        bed.ledger.reserve(&pod(name), node.as_str(), &share_query(1_000_000), bed.now).unwrap();
        bed.waiting.remove(&uid(name));
    }
    assert_eq!(bed.kept_after(5), (vec![], 0, 0));
    bed.ledger.audit().unwrap();
}

#[test]
fn room_of_a_group_that_is_not_bound_in_time_is_given_up_as_a_whole() {
    let mut bed = Bed::new();
    for name in ["a", "b", "c"] {
        bed.refused(name, "g", 3);
    }
    assert_eq!(bed.kept_after(1).0, names(&["a", "b", "c"]));
    assert_eq!(bed.kept_after(59).0, names(&["a", "b", "c"]));
    assert_eq!(bed.kept_after(1), (vec![], 0, 3));
    assert_eq!(bed.kept_after(59), (vec![], 0, 0), "a pause");
    assert_eq!(bed.kept_after(2).0, names(&["a", "b", "c"]));
}

#[test]
fn pods_that_are_bound_count() {
    let mut bed = Bed::new();
    bed.bound.see(&uid("x"), ("team".into(), "g".into()));
    bed.bound.see(&uid("x"), ("team".into(), "g".into()));
    bed.bound.see(&uid("y"), ("other".into(), "g".into()));
    bed.ledger.see_pod(&bound("x", "n", "A", 1_000_000), bed.now);
    bed.refused("a", "g", 3);
    assert_eq!(bed.kept_after(1).0, names(&[]), "two of three");
    bed.refused("b", "g", 3);
    assert_eq!(bed.kept_after(1).0, names(&["a", "b"]));
    bed.bound.forget(&uid("x"));
    assert_eq!(bed.bound.count(), 1);
}
