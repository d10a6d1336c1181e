//! A ledger, pods that wait, and the standing holds, for the tests of this layer.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::room::standing::{StandingHolds, StandingRules, Step};
use engine::ledger::change::facts::PodFact;
use engine::ledger::ledger_fixture::{bound, hello, ledger, pod, see_node, share_request};
use engine::ledger::nodes::state::Ledger;
use engine::ledger::suggest::preemptors::Preemptors;
use engine::ledger::suggest::together::BoundGroups;
use engine::ledger::suggest::waiting::{WaitingPod, WaitingPods};
use engine::model::rejection::Rejection;
use engine::model::reservation::Tenure;
use kube_api::config::preemption::PreemptionConfig;
use kube_api::request::room_note::RoomNote;
use wire::ids::PodUid;
use wire::units::{Share, Timestamp};

/// All nodes.
pub(crate) const ALL: &[&str] = &["m", "n"];

/// A ledger with nodes `n` (GPUs A, B) and `m` (GPU C), and pods that wait.
pub(crate) struct Bed {
    pub(crate) ledger: Ledger,
    pub(crate) waiting: WaitingPods,
    pub(crate) preemptors: Preemptors,
    pub(crate) bound: BoundGroups,
    pub(crate) holds: StandingHolds,
    pub(crate) now: Timestamp,
    pub(crate) rules: StandingRules,
}

impl Bed {
    /// Room is kept after this time.
    pub(crate) fn new(after: Duration) -> Self {
        let ledger = ledger("A B");
        see_node(&ledger, "m");
        ledger.report("m", &hello("y", 1, "C"), Timestamp::START).unwrap();
        let rules =
            StandingRules { after, at_most: Share::WHOLE, preemption: PreemptionConfig::default() };
        Self {
            ledger,
            waiting: WaitingPods::default(),
            preemptors: Preemptors::default(),
            bound: BoundGroups::default(),
            holds: StandingHolds::default(),
            now: Timestamp::START,
            rules,
        }
    }

    pub(crate) fn bind(
        &self,
        name: &str,
        node: &str,
        device: &str,
        millionths: u64,
        priority: i32,
    ) {
        let tenure = Tenure { priority, started_unix_seconds: 1_000, ..Tenure::default() };
        let fact = PodFact { tenure, ..bound(name, node, device, millionths) };
        self.ledger.see_pod(&fact, self.now);
    }

    /// The pod was refused on these nodes.
    pub(crate) fn refused(&self, pod: WaitingPod, nodes: &[&str]) {
        let uid = pod.pod.uid.clone();
        let why = match pod.group {
            None => Rejection::Share { short: Share::from_millionths(1) },
            Some(_) => Rejection::GroupWaits,
        };
        self.waiting.see(pod.clone(), self.now);
        self.waiting.begin_call(pod, self.now);
        let named = self.ledger.named_nodes(nodes.iter());
        self.waiting.refuse(&uid, BTreeMap::from([(why, nodes.len())]), Some(named));
    }

    /// What is to be done this much later. The tests begin at 1,000 s on the wall clock.
    pub(crate) fn step_after(&mut self, seconds: u64) -> Step {
        self.now = self.now.plus(Duration::from_secs(seconds));
        let wall = 1_000 + i64::try_from(self.now.millis() / 1_000).unwrap();
        let facts = (&self.waiting, &self.preemptors, &self.ledger, &self.bound);
        self.holds.step(facts, self.rules, (self.now, wall))
    }

    /// What is to be done with these notes of an earlier process.
    pub(crate) fn resume(&mut self, noted: &[(PodUid, RoomNote)]) -> Step {
        let facts = (&self.waiting, &self.preemptors, &self.ledger, &self.bound);
        self.holds.resume(noted, facts, (self.rules, self.now, 1_000))
    }

    /// Which pods have room kept, and where.
    pub(crate) fn kept(&self) -> Vec<(String, String)> {
        let kept = self.ledger.standing_nodes().into_iter();
        kept.map(|(uid, node)| (uid.as_str().to_owned(), node.as_str().to_owned())).collect()
    }
}

/// A pod that was created at 1,000 s and may preempt.
pub(crate) fn waiting_pod(name: &str, millionths: u64, priority: i32) -> WaitingPod {
    WaitingPod {
        pod: pod(name),
        namespace: "team".to_owned(),
        name: name.to_owned(),
        query: share_request(millionths),
        priority,
        may_preempt: true,
        created_unix_seconds: 1_000,
        controller: None,
        edition: 0,
        group: None,
    }
}
