//! What a page shows of all nodes: those that changed, with what agents say beside the books; which
//! devices a request could get; where room is fragmented. Nothing here changes anything.

use std::collections::BTreeSet;

use crate::hardware::device::NodeName;
use crate::ledger::nodes::node_entry::Slot;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::questions::PlacementRequest;
use crate::model::device_state::HoldRule;
use crate::model::node_state::NodeState;
use crate::scoring::fragmentation::Packing;
use crate::scoring::plan;
use crate::usage::node_details::NodeDetails;

impl Ledger {
    /// Lets `look` see each node with what its agent says beside the books, one after the other, in no
    /// particular order. Each node is held meanwhile, so `look` must be short and must not ask the
    /// ledger. Nodes that are forgotten are shown too: see [`NodeState::is_forgettable`].
    pub fn look_into_each(&self, mut look: impl FnMut(&NodeState, &NodeDetails)) {
        let slots = self.slots();
        slots.present().for_each(|at| show(&slots[at], &mut look));
    }

    /// The same for the nodes whose books have changed since `seen`, which is brought up to now; a
    /// newcomer begins with zero. Where that is too long ago to remember, all nodes are shown: O(changes).
    pub fn look_into_changed(
        &self,
        seen: &mut u64,
        mut look: impl FnMut(&NodeState, &NodeDetails),
    ) {
        let changed: Option<BTreeSet<usize>> = self.changes().since(seen).map(Iterator::collect);
        let slots = self.slots(); // as young as the changes: it has all that they name
        match changed {
            None => slots.present().for_each(|at| show(&slots[at], &mut look)),
            Some(nodes) => {
                nodes.iter().filter_map(|at| slots.get(*at)).for_each(|slot| show(slot, &mut look));
            }
        }
    }

    /// Each node that fits, in no particular order, with the positions of all its devices that the pod
    /// could get: O(nodes × devices). It claims nothing and keeps nothing.
    pub fn fitting(&self, question: &PlacementRequest) -> Vec<(NodeName, Vec<usize>)> {
        let slots = self.slots();
        let (ask, known) = {
            let world = self.world();
            (question.ask(&world.classes), world.classes.count())
        };
        let on = |slot: &Slot| {
            let books = slot.read();
            // Devices of a class that came this very moment are told of the next time.
            let is_known = books.is_of_classes(known);
            is_known.then(|| plan::fitting(&books, &ask, HoldRule::Respected).ok()).flatten()
        };
        let found = slots.present().map(|at| &slots[at]);
        found.filter_map(|slot| Some((slot.name.clone(), on(slot)?))).collect()
    }

    /// How full and how fragmented each node is, in no particular order, by the typical requests that
    /// the cluster sees.
    pub fn packing_by_node(&self) -> Vec<(NodeName, Packing)> {
        let mut gauge = self.gauge.lock();
        self.packing_by(&mut gauge);
        let slots = self.slots();
        slots.iter().map(|slot| slot.name.clone()).zip(gauge.packings()).collect()
    }
}

fn show(slot: &Slot, look: &mut impl FnMut(&NodeState, &NodeDetails)) {
    let books = slot.read();
    look(&books, &slot.details.lock());
}
