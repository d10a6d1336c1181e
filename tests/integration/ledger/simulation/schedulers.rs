//! Two kube-schedulers that drive filter, prioritize and bind through one ledger, and the Bindings that
//! are on their way to the API server.

use engine::model::reservation::{Placement, ReservationState};
use rand::Rng;
use wire::ids::PodUid;

use super::cluster::NODES;
use super::{Bed, UNDECIDED};

/// Where one scheduler is with its pod.
#[derive(Default)]
pub(crate) enum Scheduler {
    #[default]
    Idle,
    /// It has called *filter* for this pod, and chosen a node.
    Queried(PodUid, &'static str),
}

/// A Binding that the API server has not decided yet.
pub(crate) struct Binding {
    uid: PodUid,
    version: u64,
    placement: Placement,
    /// The life of the extender that sent it and waits for the reply.
    restarts: u64,
}

impl Bed {
    pub(crate) fn schedule(&mut self) {
        let at = self.rng.random_range(0..self.schedulers.len());
        self.schedulers[at] = match std::mem::take(&mut self.schedulers[at]) {
            Scheduler::Idle => self.ask().unwrap_or_default(),
            Scheduler::Queried(uid, node) => {
                if self.rng.random_bool(0.95) {
                    self.reserve(uid, node);
                } // else it crashed, or the pod failed elsewhere
                Scheduler::Idle
            }
        };
    }

    /// filter and prioritize: the best node gets a hold.
    fn ask(&mut self) -> Option<Scheduler> {
        let uid = self.some_pod(false)?;
        let query = self.queries.get(&uid)?;
        if self.rng.random_bool(0.9) {
            self.ledger.drop_hold(&uid);
        }
        let answers = self.ledger.answers(query, &NODES);
        let fitting =
            NODES.iter().zip(answers).filter_map(|(node, answer)| Some((answer.ok()?, *node)));
        let (_, best) = fitting.min()?;
        self.ledger.hold(&uid, best, query, self.now);
        // another score may win, then the hold is on another node
        let is_ours = self.rng.random_bool(0.9);
        let node = if is_ours { best } else { NODES[self.rng.random_range(0..NODES.len())] };
        Some(Scheduler::Queried(uid, node))
    }

    /// bind: reserves and sends the Binding, unless the extender dies in between.
    fn reserve(&mut self, uid: PodUid, node: &str) {
        let Some(pod) = self.api.pods.get(&uid) else { return };
        let query = &self.queries[&uid];
        let reserved = self.ledger.reserve(&pod.fact.pod, node, query, self.now);
        let Ok(placement) = reserved else { return };
        if self.rng.random_bool(0.05) {
            return; // nothing was sent
        }
        let binding = Binding { uid, version: pod.version, placement, restarts: self.restarts };
        self.bindings.push(binding);
    }

    /// The API server decides on some Binding; its reply may be lost.
    pub(crate) fn deliver_binding(&mut self) {
        if self.bindings.is_empty() {
            return;
        }
        let at = self.rng.random_range(0..self.bindings.len());
        let binding = self.bindings.swap_remove(at);
        if self.rng.random_bool(0.05) {
            return; // it never arrives
        }
        let is_bound = self.api.bind(&binding.uid, binding.version, &binding.placement);
        self.placed += u64::from(is_bound);
        if self.rng.random_bool(0.2) || binding.restarts != self.restarts {
            return; // the reply is lost
        }
        if is_bound {
            self.ledger.confirm(&binding.uid);
        } else {
            self.read_back(&binding.uid);
        }
    }

    /// Bindings without a decision: the pod is fenced, so that a late one conflicts, and read.
    pub(crate) fn look_into_undecided(&mut self) {
        let is_overdue = |uid: &&PodUid| match self.ledger.reservation(uid).map(|held| held.state) {
            Some(ReservationState::Assumed { since }) => self.now.since(since) >= UNDECIDED,
            _ => false,
        };
        let overdue: Vec<_> = self.queries.keys().filter(is_overdue).cloned().collect();
        for uid in overdue {
            self.read_back(&uid);
        }
    }

    fn read_back(&mut self, uid: &PodUid) {
        self.api.patch(uid);
        match self.api.pods.get(uid) {
            None => drop(self.ledger.end_pod(uid, self.now)),
            Some(pod) if pod.fact.node.is_some() || pod.fact.is_terminal => {
                self.ledger.see_pod(&pod.fact, self.now);
            }
            Some(_) => drop(self.ledger.forget(uid)),
        }
    }
}
