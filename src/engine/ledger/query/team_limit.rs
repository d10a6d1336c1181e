//! Where a pod that a node has room for would give its team too much.
//!
//! A pod counts at least the part of the GPUs that it gets ([`crate::ledger::nodes::teams`]). That part is
//! larger on a smaller GPU, so each node is looked at as *bind* does. Only pods of teams that have
//! nearly all they may have are looked at.

use crate::ledger::nodes::state::{ClusterModel, Ledger};
use crate::ledger::query::queries::{NodeAnswer, PlacementRequest};
use crate::model::device_state::HoldRule;
use crate::model::fit::CompiledRequest;
use crate::model::node_state::NodeState;
use crate::model::rejection::Rejection;
use crate::model::reservation::Placement;
use crate::scoring::plan;
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};

/// A pod and its namespace, which says what team it is of.
#[derive(Clone, Copy, Debug)]
pub struct PodInNamespace<'a> {
    /// The pod.
    pub uid: &'a PodUid,
    /// Its namespace.
    pub namespace: &'a str,
}

impl Ledger {
    /// Refuses a pod on those of `nodes` that fit and where it would count more than its team may have.
    /// `answers` are those of [`Ledger::answers`] for these nodes.
    pub fn limit_to_team(
        &self,
        pod: PodInNamespace<'_>,
        query: &PlacementRequest,
        nodes: &[impl AsRef<str>],
        answers: &mut [NodeAnswer],
    ) {
        if !self.is_near_limit(pod, query) {
            return;
        }
        let _stays = self.stay();
        let cluster = self.cluster();
        let compiled = query.compile(&cluster.classes);
        let gpu = query.gpu.as_ref();
        let rejection = match gpu.is_none_or(|gpu| self.teams.may_have(pod.uid, pod.namespace, gpu))
        {
            true => Rejection::TeamLimitHere,
            false => Rejection::TeamLimit, // wherever it is placed
        };
        for (node, answer) in nodes.iter().zip(answers).filter(|(_, answer)| answer.is_ok()) {
            if self.is_beyond(pod, query, &compiled, &cluster, node.as_ref()) {
                *answer = Err(rejection);
            }
        }
    }

    /// Whether a pod would count more on a node where it fits than its team may have.
    pub fn is_limited_on(
        &self,
        pod: PodInNamespace<'_>,
        query: &PlacementRequest,
        node: &str,
    ) -> bool {
        if !self.is_near_limit(pod, query) {
            return false;
        }
        let _stays = self.stay();
        let cluster = self.cluster();
        let compiled = query.compile(&cluster.classes);
        self.is_beyond(pod, query, &compiled, &cluster, node)
    }

    /// Whether a team may have what its pod would count with a placement on a node.
    pub(crate) fn may_have_placed(
        &self,
        pod: PodInNamespace<'_>,
        query: &PlacementRequest,
        node_state: &NodeState,
        placement: &Placement,
    ) -> bool {
        let Some(gpu) = &query.gpu else { return true };
        let charge = self.teams.placed_charge(node_state, placement, Some(gpu));
        self.teams.fits_limit(pod.uid, pod.namespace, charge)
    }

    /// Whether it depends on the node if a team may have what its pod requests.
    pub(crate) fn is_near_limit(&self, pod: PodInNamespace<'_>, query: &PlacementRequest) -> bool {
        let Some(gpu) = &query.gpu else { return false };
        let may_have = self.teams.may_have_anywhere(pod.uid, pod.namespace, gpu);
        !may_have && !mutated(Mutation::TeamLimitUnchecked)
    }

    fn is_beyond(
        &self,
        pod: PodInNamespace<'_>,
        query: &PlacementRequest,
        compiled: &CompiledRequest,
        cluster: &ClusterModel,
        node: &str,
    ) -> bool {
        let Some(at) = self.position(node) else { return false };
        let node_entry = self.node_entry(at);
        let node_state = node_entry.read();
        let on_hold = node_state.holds().get(pod.uid).map(|hold| hold.placement.clone());
        let (mix, rule) = (&cluster.compiled, HoldRule::Respected);
        let placement = on_hold.or_else(|| {
            let place = plan::evaluate(&node_state, compiled, &query.strategy, mix, rule);
            Some(plan::placement(&node_state, &place.ok()?))
        });
        placement
            .is_some_and(|placement| !self.may_have_placed(pod, query, &node_state, &placement))
    }
}
