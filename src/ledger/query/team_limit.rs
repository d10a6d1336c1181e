//! Where a pod that a node has room for would give its team too much.
//!
//! A pod counts at least the part of the GPUs that it gets ([`crate::ledger::nodes::teams`]). That part is
//! larger on a smaller GPU, so *filter* looks at each node as *bind* does. Only pods of teams that have
//! nearly all they may have are looked at.

use crate::hardware::device::PodUid;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::{Answer, PlacementRequest};
use crate::model::device_state::HoldRule;
use crate::model::rejection::Rejection;
use crate::scoring::plan;

impl Ledger {
    /// Refuses a pod on those of `nodes` that fit and where it would count more than its team may have.
    /// `answers` are those of [`Ledger::answers`] for these nodes.
    pub fn limit_to_team(
        &self,
        (uid, namespace): (&PodUid, &str),
        query: &PlacementRequest,
        nodes: &[impl AsRef<str>],
        answers: &mut [Answer],
    ) {
        let Some(gpu) = &query.gpu else { return };
        if self.teams.may_have_anywhere(uid, namespace, gpu) {
            return;
        }
        let _stays = self.stay();
        let cluster = self.cluster();
        let compiled = query.compile(&cluster.classes);
        for (node, answer) in nodes.iter().zip(answers).filter(|(_, answer)| answer.is_ok()) {
            let Some(at) = self.position(node.as_ref()) else { continue };
            let node_entry = self.node_entry(at);
            let node_state = node_entry.read();
            let on_hold = node_state.holds().get(uid).map(|hold| hold.placement.clone());
            let (mix, rule) = (&cluster.compiled, HoldRule::Respected);
            let placement = on_hold.or_else(|| {
                let place = plan::evaluate(&node_state, &compiled, &query.strategy, mix, rule);
                Some(plan::placement(&node_state, &place.ok()?))
            });
            let Some(placement) = placement else { continue };
            let charge = self.teams.placed_charge(&node_state, &placement, Some(gpu));
            if !self.teams.fits_limit(uid, namespace, charge) {
                *answer = Err(Rejection::TeamLimitHere);
            }
        }
    }
}
