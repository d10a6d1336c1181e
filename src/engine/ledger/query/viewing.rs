//! What a page shows of all nodes: those that changed, with what agents report beside the state;
//! the devices that a request could get; where room is fragmented. Nothing here changes anything.

use std::collections::BTreeSet;

use crate::ledger::nodes::node_entry::NodeEntry;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::own_room::OwnRoom;
use crate::ledger::query::queries::PlacementRequest;
use crate::model::device_state::HoldRule;
use crate::model::fit::CompiledRequest;
use crate::model::node_state::NodeState;
use crate::scoring::fragmentation::PackingSums;
use crate::scoring::plan;
use crate::usage::node_details::NodeDetails;
use wire::ids::NodeName;

impl Ledger {
    /// Lets `look` see each node with what its agent reports beside the state, one after the other,
    /// in no order. The node is locked meanwhile, so `look` must be short and must not call the
    /// ledger. Gone nodes without pods are shown too: see [`NodeState::is_forgettable`].
    pub fn look_into_each(&self, mut look: impl FnMut(&NodeState, &NodeDetails)) {
        let node_table = self.node_table();
        node_table.present().for_each(|at| show(&node_table[at], &mut look));
    }

    /// The same for the nodes whose state changed since `seen`, which moves to now; a new reader
    /// begins with zero. If `seen` is too old to be remembered, all nodes are shown: O(changes).
    pub fn look_into_changed(
        &self,
        seen: &mut u64,
        mut look: impl FnMut(&NodeState, &NodeDetails),
    ) {
        let changed: Option<BTreeSet<usize>> = self.changes().since(seen).map(Iterator::collect);
        let node_table = self.node_table(); // as young as the changes: it has all that they name
        match changed {
            None => node_table.present().for_each(|at| show(&node_table[at], &mut look)),
            Some(nodes) => {
                nodes
                    .iter()
                    .filter_map(|at| node_table.get(*at))
                    .for_each(|node_entry| show(node_entry, &mut look));
            }
        }
    }

    /// Each node that fits, in no order, with the positions of all its devices that the pod could
    /// get, which has `own` room: O(nodes × devices). It holds and keeps nothing.
    pub fn fitting(&self, query: &PlacementRequest, own: &OwnRoom) -> Vec<(NodeName, Vec<usize>)> {
        let node_table = self.node_table();
        let (compiled, known) = {
            let cluster = self.cluster();
            (query.compile(&cluster.classes), cluster.classes.count())
        };
        let all = node_table.present().map(|at| &node_table[at]);
        let fitting = all.filter_map(|node_entry| {
            let positions = match own.on(&node_entry.name) {
                Some(node_state) => fitting_in(node_state, &compiled, known),
                None => fitting_in(&node_entry.read(), &compiled, known),
            };
            Some((node_entry.name.clone(), positions?))
        });
        fitting.collect()
    }

    /// How full and how fragmented each node is, by the typical requests, in no order. A vacant
    /// position counts as an empty node without a name.
    pub fn packing_by_node(&self) -> Vec<(NodeName, PackingSums)> {
        let mut gauge = self.gauge.lock();
        self.packing_by(&mut gauge);
        let node_table = self.node_table();
        node_table.iter().map(|node_entry| node_entry.name.clone()).zip(gauge.packings()).collect()
    }
}

/// The devices that a pod could get in this state of a node, if the request is compiled for their classes, the
/// first `classes`. Those of a class that came since are shown next time.
fn fitting_in(
    node_state: &NodeState,
    compiled: &CompiledRequest,
    classes: usize,
) -> Option<Vec<usize>> {
    let is_known = node_state.is_of_classes(classes);
    is_known.then(|| plan::fitting(node_state, compiled, HoldRule::Respected).ok()).flatten()
}

fn show(node_entry: &NodeEntry, look: &mut impl FnMut(&NodeState, &NodeDetails)) {
    let node_state = node_entry.read();
    look(&node_state, &node_entry.details.lock());
}
