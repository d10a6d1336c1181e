use std::collections::BTreeMap;

use super::*;
use crate::kube_api::request::room_note::RoomNote;
use crate::ledger::fixture::{bound, free, hello, ledger, pod, see_node, share_query, uid};
use crate::ledger::suggest::together::BoundGroups;
use crate::model::rejection::Rejection;

fn rules() -> StandingRules {
    let preemption = PreemptionConfig { enabled: false, ..PreemptionConfig::default() };
    StandingRules {
        after: Duration::from_secs(60),
        at_most: Share::from_millionths(500_000),
        preemption,
        group_timeout: Duration::from_secs(60),
    }
}

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
        let (waiting, holds) = (WaitingPods::default(), StandingHolds::default());
        let preemptors = Preemptors::default();
        let bound = BoundGroups::default();
        Self { ledger, waiting, preemptors, bound, holds, now: Timestamp::START }
    }

    /// A pod `a`, `b`, `c` has half of each GPU.
    fn half_full() -> Self {
        let bed = Self::new();
        for (name, node, device) in [("a", "n", "A"), ("b", "n", "B"), ("c", "m", "C")] {
            bed.bind(name, node, device, 500_000);
        }
        bed
    }

    fn bind(&self, name: &str, node: &str, device: &str, millionths: u64) {
        self.ledger.see_pod(&bound(name, node, device, millionths), self.now);
    }

    /// A pod of the age and priority was refused on these nodes.
    fn refused(&self, name: &str, (millionths, age, priority): (u64, i64, i32), nodes: &[&str]) {
        let pod = WaitingPod {
            pod: pod(name),
            namespace: "team".to_owned(),
            name: name.to_owned(),
            query: share_query(millionths),
            priority,
            may_preempt: true,
            group: None,
            created_unix_seconds: 1_000 - age,
        };
        self.waiting.see(pod.clone(), self.now);
        self.waiting.begin_call(pod, self.now);
        let short = Rejection::Share { short: Share::from_millionths(1) };
        let named = self.ledger.named_nodes(nodes.iter());
        self.waiting.refuse(&uid(name), BTreeMap::from([(short, nodes.len())]), Some(named));
    }

    /// The pods that are requeued this much later, with their nodes.
    fn step_after(&mut self, seconds: u64) -> Vec<(String, String)> {
        self.now = self.now.plus(Duration::from_secs(seconds));
        let wall = 1_000 + i64::try_from(self.now.millis() / 1_000).unwrap();
        let facts = (&self.waiting, &self.preemptors, &self.ledger, &self.bound);
        let step = self.holds.step(facts, rules(), (self.now, wall));
        let ready = step.ready.into_iter().map(|(node, pod)| {
            self.waiting.requeued(&pod.pod.uid, self.now);
            (pod.name, node.as_str().to_owned())
        });
        ready.collect()
    }

    /// Which pods have room kept, and where.
    fn kept(&self) -> Vec<(String, String)> {
        let kept = self.ledger.standing_nodes().into_iter();
        kept.map(|(uid, node)| (uid.as_str().to_owned(), node.as_str().to_owned())).collect()
    }
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
}

#[test]
fn room_is_kept_for_the_first_of_a_line_until_it_is_bound() {
    let mut bed = Bed::new();
    bed.bind("a", "n", "A", 600_000);
    bed.bind("b", "n", "B", 900_000);
    bed.bind("c", "m", "C", 700_000);
    bed.refused("large", (1_000_000, 30, 0), &["m", "n"]);
    assert_eq!((bed.step_after(0), bed.kept()), (vec![], vec![]), "it has waited for 30 s");
    assert_eq!((bed.step_after(30), bed.kept()), (vec![], pairs(&[("large", "n")])));
    assert_eq!(free(&bed.ledger), [0, 100], "nothing else gets what is free of the GPU");
    bed.ledger.end_pod(&uid("a"), bed.now);
    for sequence in [2, 3] {
        bed.ledger
            .report("n", &crate::ledger::fixture::report("x", 7, sequence, "A B"), bed.now)
            .unwrap();
    }
    assert_eq!(free(&bed.ledger), [0, 100], "nor what becomes free");
    let query = share_query(1_000_000);
    assert_eq!(bed.ledger.fits_in_room_of(&uid("large"), &query, None), Some(NodeName::new("n")));
    assert_eq!(bed.step_after(1), pairs(&[("large", "n")]));
    bed.ledger.hold(&uid("large"), "n", &query, bed.now);
    assert_eq!(free(&bed.ledger), [0, 100], "counted once");
    let placement = bed.ledger.reserve(&pod("large"), "n", &query, bed.now).unwrap();
    assert_eq!(placement.devices[0].id.as_str(), "A");
    bed.waiting.remove(&uid("large"));
    assert_eq!((bed.step_after(1), bed.kept()), (vec![], vec![]));
    bed.ledger.audit().unwrap();
}

#[test]
fn one_pod_of_a_pool_has_room_kept_and_a_more_important_one_takes_it_over() {
    let mut bed = Bed::half_full();
    bed.refused("old", (1_000_000, 300, 0), &["m"]);
    bed.refused("young", (900_000, 100, 0), &["m", "n"]);
    bed.step_after(0);
    assert_eq!(bed.kept(), pairs(&[("old", "m")]), "by age");
    bed.refused("important", (900_000, 90, 1), &["n"]);
    bed.step_after(1);
    assert_eq!(bed.kept(), pairs(&[("important", "n")]), "by priority");
    bed.waiting.remove(&uid("important"));
    bed.step_after(1);
    assert_eq!(bed.kept(), pairs(&[("old", "m")]));
    // One that fits in the room kept for a less important pod gets it at once.
    bed.refused("urgent", (400_000, 70, 2), &["m"]);
    assert_eq!(bed.step_after(1), pairs(&[("urgent", "m")]));
    assert_eq!(bed.kept(), pairs(&[("urgent", "m")]));
}

#[test]
fn room_moves_only_to_where_less_is_lacking() {
    let mut bed = Bed::new();
    bed.bind("a", "n", "A", 600_000);
    bed.bind("b", "n", "B", 900_000);
    bed.bind("c", "m", "C", 700_000);
    bed.refused("large", (1_000_000, 100, 0), &["m", "n"]);
    bed.step_after(0);
    assert_eq!(bed.kept(), pairs(&[("large", "n")]));
    bed.bind("d", "m", "C", 100_000);
    bed.step_after(1);
    assert_eq!(bed.kept(), pairs(&[("large", "n")]));
    bed.ledger.end_pod(&uid("c"), bed.now);
    let report = crate::ledger::fixture::report("y", 8, 2, "C");
    for sequence in [2, 3] {
        let report = crate::ledger::change::reports::NodeReport { sequence, ..report.clone() };
        bed.ledger.report("m", &report, bed.now).unwrap();
    }
    bed.step_after(1);
    assert_eq!(bed.kept(), pairs(&[("large", "m")]));
    assert_eq!(free(&bed.ledger), [400, 100]);
}

#[test]
fn room_moves_away_from_a_node_that_takes_no_pods() {
    let mut bed = Bed::half_full();
    bed.refused("large", (1_000_000, 100, 0), &["m", "n"]);
    bed.step_after(0);
    let (from, to) = ("m", "n");
    assert_eq!(bed.kept(), pairs(&[("large", from)]));
    bed.ledger.see_unschedulable(&NodeName::new(from), true);
    bed.step_after(1);
    assert_eq!(bed.kept(), pairs(&[("large", to)]));
    bed.ledger.see_unschedulable(&NodeName::new(to), true);
    bed.step_after(1);
    assert_eq!(bed.kept(), vec![]);
}

#[test]
fn a_pod_that_is_not_bound_leaves_its_room_to_others_for_a_while() {
    let mut bed = Bed::new();
    for (name, node, device) in [("a", "n", "A"), ("b", "n", "B")] {
        bed.bind(name, node, device, 500_000);
    }
    bed.refused("stuck", (1_000_000, 100, 0), &["m"]);
    bed.refused("next", (1_000_000, 90, 0), &["m"]);
    assert_eq!(bed.step_after(0), pairs(&[("stuck", "m")]), "all of it is free");
    assert_eq!(bed.step_after(1), vec![], "a requeue is under way");
    bed.step_after(30);
    assert_eq!(bed.kept(), pairs(&[("stuck", "m")]));
    bed.step_after(40);
    assert_eq!(bed.kept(), pairs(&[("next", "m")]));
    bed.waiting.remove(&uid("next"));
    bed.step_after(1);
    assert_eq!(bed.kept(), vec![], "a minute of pause");
    bed.step_after(60);
    assert_eq!(bed.kept(), pairs(&[("stuck", "m")]));
    bed.waiting.remove(&uid("stuck"));
    bed.step_after(1);
    assert_eq!(bed.kept(), vec![]);
    bed.step_after(10_000);
    assert!(bed.holds.pauses.is_empty(), "nothing is remembered of pods that are gone");
}

#[test]
fn much_of_a_small_pool_is_not_kept() {
    for (count, is_kept) in [(1, true), (2, false)] {
        let mut bed = Bed::new();
        for (name, device) in [("a", "A"), ("b", "B")] {
            bed.bind(name, "n", device, 500_000);
        }
        bed.refused("large", (1_000_000, 100, 0), &["n"]);
        let mut pod = bed.waiting.pod(&uid("large")).unwrap().waiting;
        pod.query.gpu.as_mut().unwrap().count = count.try_into().unwrap();
        let _ = bed.waiting.see(pod.clone(), bed.now);
        bed.waiting.begin_call(pod, bed.now);
        let short = Rejection::DevicesTaken { fitting: 0 };
        bed.waiting.refuse(&uid("large"), BTreeMap::from([(short, 1)]), None);
        bed.step_after(0);
        assert_eq!(!bed.kept().is_empty(), is_kept, "{count} of three devices");
    }
}

#[test]
fn a_pod_in_whose_way_room_is_kept_gets_it_before_that_is_kept_again() {
    let mut bed = Bed::half_full();
    bed.refused("large", (1_000_000, 100, 0), &["m"]);
    bed.step_after(0);
    assert_eq!(bed.kept(), pairs(&[("large", "m")]));
    bed.refused("urgent", (400_000, 30, 1), &["m"]); // not old enough for room of its own
    bed.refused("important", (400_000, 90, 1), &["m"]);
    bed.step_after(1);
    assert_eq!(bed.kept(), pairs(&[("important", "m")]));
    bed.waiting.remove(&uid("important"));
    bed.step_after(1);
    assert_eq!(bed.kept(), vec![]);
    bed.step_after(5);
    assert_eq!(bed.kept(), pairs(&[("large", "m")]));
}

#[test]
fn room_of_which_nothing_more_becomes_free_is_given_up() {
    let mut bed = Bed::new();
    bed.bind("service", "m", "C", 100_000);
    bed.refused("large", (1_000_000, 100, 0), &["m"]);
    bed.step_after(0);
    bed.step_after(1_799);
    assert_eq!(bed.kept(), pairs(&[("large", "m")]));
    bed.step_after(1);
    assert_eq!(bed.kept(), vec![]);
    bed.step_after(60);
    assert_eq!(bed.kept(), pairs(&[("large", "m")]), "after a pause");
    // An edit does not begin the times again.
    bed.refused("large", (900_000, 100, 0), &["m"]);
    bed.refused("large", (950_000, 100, 0), &["m"]);
    bed.step_after(1);
    bed.step_after(60);
    assert_eq!(bed.kept(), vec![], "the second pause is longer");
}

#[test]
fn a_later_process_keeps_the_room_of_an_earlier_one() {
    let note = |node: &str| RoomNote { node: NodeName::new(node), victims: BTreeSet::new() };
    let mut bed = Bed::half_full();
    bed.bind("d", "n", "A", 300_000); // B and C lack less
    bed.refused("large", (1_000_000, 60, 0), &["m", "n"]);
    bed.refused("other", (1_000_000, 70, 0), &["m", "n"]);
    bed.refused("young", (1_000_000, 50, 9), &["m", "n"]);
    let noted = [("large", "n"), ("young", "m"), ("other", "n")];
    let noted: Vec<_> = noted.iter().map(|(name, node)| (uid(name), note(node))).collect();
    let facts = (&bed.waiting, &bed.preemptors, &bed.ledger, &bed.bound);
    let step = bed.holds.resume(&noted, facts, (rules(), bed.now, 1_000));
    assert_eq!(
        bed.kept(),
        pairs(&[("other", "n")]),
        "one of a pool, by age; `young` has not waited"
    );
    let lost: Vec<&str> = step.abandoned.iter().map(|pod| &*pod.name).collect();
    assert_eq!(lost, ["young", "large"], "their notes go");
    bed.step_after(0);
    assert_eq!(bed.kept(), pairs(&[("other", "n")]), "and it stays");
    assert!(bed.preemptors.end(&uid("other")), "its note goes when it ends");
}
