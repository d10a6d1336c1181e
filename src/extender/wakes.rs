//! Whom to wake, and when, for room that appeared: one pod at a time per node.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::ledger::books::Ledger;
use crate::ledger::waiting::{WaitingPod, WaitingPods, Wake};
use crate::packing::device::{NodeName, PodUid};
use crate::packing::units::Timestamp;

/// A pod that was woken and is still waiting after this time will not take the room: kube-scheduler
/// asks within milliseconds, in-tree filters or a queue of thousands may hold it longer.
const NEXT_AFTER: Duration = Duration::from_secs(2);

/// Nodes with new room, and the pods that were woken for it. One pod at a time is woken per node; the
/// next one only when the first did not take the room, so that nothing is woken in vain.
#[derive(Default)]
pub struct Wakes {
    nodes: BTreeMap<NodeName, Chain>,
}

/// The pods woken for the room of one node.
struct Chain {
    tried: BTreeSet<PodUid>,
    last: Option<PodUid>,
    due: Timestamp,
}

impl Wakes {
    /// Notes room that appeared.
    pub fn room(&mut self, nodes: Vec<NodeName>, now: Timestamp) {
        for node in nodes {
            self.nodes.insert(node, Chain { tried: BTreeSet::new(), last: None, due: now });
        }
    }

    /// How long until a chain is due.
    pub fn rest(&self, now: Timestamp) -> Duration {
        let next = self.nodes.values().map(|chain| chain.due).min();
        next.map_or(Duration::from_secs(3600), |due| due.since(now))
    }

    /// The pods to wake now, each with the node that has room for it.
    pub fn due(
        &mut self,
        waiting: &WaitingPods,
        ledger: &Ledger,
        now: Timestamp,
    ) -> Vec<(NodeName, WaitingPod)> {
        let mut woken = Vec::new();
        self.nodes.retain(|node, chain| {
            // The last one took a place, here or elsewhere, or it ended and takes none.
            let took = |last: &PodUid| ledger.reservation(last).is_some();
            if chain.last.as_ref().is_some_and(took) {
                return false;
            }
            let waits = |last: &PodUid| waiting.has(last);
            if chain.due > now && chain.last.as_ref().is_none_or(waits) {
                return true;
            }
            match waiting.to_wake(ledger, node, &chain.tried, now) {
                Wake::Nobody => return false,
                Wake::Later(due) => chain.due = due,
                Wake::Pod(pod) => {
                    chain.tried.insert(pod.pod.uid.clone());
                    chain.last = Some(pod.pod.uid.clone());
                    chain.due = now.plus(NEXT_AFTER);
                    woken.push((node.clone(), *pod));
                }
            }
            true
        });
        woken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::fixture::{asks, hello, ledger, pod, seconds, see_node};

    fn node() -> NodeName {
        NodeName::new("n")
    }

    /// A ledger with node `n` of one GPU, and pods that wait for half of it, the first the oldest.
    fn bed(names: &[&str]) -> (Ledger, WaitingPods) {
        let waiting = WaitingPods::default();
        for (name, age) in names.iter().zip(0..) {
            let pod = WaitingPod {
                pod: pod(name),
                namespace: "team".to_owned(),
                name: (*name).to_owned(),
                question: asks(500_000),
                priority: 0,
                created_unix_seconds: age,
            };
            waiting.ask(pod, seconds(0));
        }
        (ledger("A"), waiting)
    }

    fn woken(pods: &[(NodeName, WaitingPod)]) -> Vec<&str> {
        pods.iter().map(|(_, pod)| pod.name.as_str()).collect()
    }

    #[test]
    fn the_next_one_is_woken_only_where_the_first_took_no_room() {
        for (took, next) in [(true, vec![]), (false, vec!["b"])] {
            let (ledger, waiting) = bed(&["a", "b"]);
            let mut wakes = Wakes::default();
            wakes.room(vec![node()], seconds(1));
            assert_eq!(woken(&wakes.due(&waiting, &ledger, seconds(1))), ["a"]);
            assert_eq!(woken(&wakes.due(&waiting, &ledger, seconds(2))), [""; 0]);
            if took {
                ledger.reserve(&pod("a"), "n", &asks(500_000), seconds(2)).unwrap();
                waiting.remove(&pod("a").uid);
            }
            assert_eq!(woken(&wakes.due(&waiting, &ledger, seconds(3))), next);
        }
    }

    #[test]
    fn a_woken_pod_that_ends_leaves_the_room_to_the_next_one_at_once() {
        let (ledger, waiting) = bed(&["a", "b"]);
        let mut wakes = Wakes::default();
        wakes.room(vec![node()], seconds(1));
        assert_eq!(woken(&wakes.due(&waiting, &ledger, seconds(1))), ["a"]);
        waiting.remove(&pod("a").uid);
        assert_eq!(woken(&wakes.due(&waiting, &ledger, seconds(1))), ["b"]);
        waiting.remove(&pod("b").uid);
        assert_eq!(woken(&wakes.due(&waiting, &ledger, seconds(1))), [""; 0]);
        assert!(wakes.nodes.is_empty());
    }

    #[test]
    fn room_elsewhere_a_moment_later_wakes_the_same_pod_again() {
        let (ledger, waiting) = bed(&["a"]);
        let other = hello("y", 1, "B");
        see_node(&ledger, "m");
        ledger.report("m", &other, seconds(0)).unwrap();
        let mut wakes = Wakes::default();
        wakes.room(vec![NodeName::new("m")], seconds(1));
        assert_eq!(woken(&wakes.due(&waiting, &ledger, seconds(1))), ["a"]);
        let soon = Timestamp::from_millis(1500);
        wakes.room(vec![node()], soon);
        assert_eq!(woken(&wakes.due(&waiting, &ledger, soon)), [""; 0]);
        assert_eq!(wakes.rest(soon), Duration::from_millis(500));
        let again = wakes.due(&waiting, &ledger, seconds(2));
        assert_eq!((woken(&again), &again[0].0), (vec!["a"], &node()));
    }
}
