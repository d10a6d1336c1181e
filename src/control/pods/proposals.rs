//! Moves of running pods that would help: proposed to operators, never made.

use std::collections::BTreeMap;

use crate::shared::app::App;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::suggest::displacement::MOST_MOVES;
use engine::ledger::suggest::moves::{Move, Relocation};
use engine::ledger::suggest::waiting::WaitingState;
use engine::model::reservation::Placement;
use wire::api::moves;
use wire::api::moves::{EmptyProposal, Location, MoveProposals, PlaceProposal};

/// Most different requests of waiting pods that are searched for at once, most important pods
/// first.
const MOST_REQUESTS: usize = 20;

/// Most GPUs that are proposed to be emptied.
const MOST_GPUS: usize = 20;

fn location(placement: &Placement) -> Location {
    let devices = placement.devices.iter().map(|device| device.id.to_string());
    Location { node: placement.node.to_string(), device_ids: devices.collect() }
}

/// The moves of a relocation.
pub fn listed(moves: &[Move]) -> Vec<moves::Move> {
    let views = moves.iter().map(|one| moves::Move {
        pod: one.pod.to_string(),
        from: location(&one.from),
        to: location(&one.to),
    });
    views.collect()
}

/// What could be moved now, for waiting pods of namespaces that the reader `sees`.
pub fn proposals(app: &App, sees: &dyn Fn(&str) -> bool) -> MoveProposals {
    if app.waiting.all().iter().any(|state| state.refused.is_some()) {
        return MoveProposals { to_place: to_place(app, sees), ..MoveProposals::default() };
    }
    let found = app.ledger.emptyings(MOST_MOVES, MOST_GPUS).into_iter();
    let view = found.map(|found| EmptyProposal {
        node: found.node.to_string(),
        device_id: found.device.to_string(),
        moves: listed(&found.moves),
    });
    MoveProposals { to_empty: view.collect(), ..MoveProposals::default() }
}

/// The moves that make room for waiting pods of namespaces that the reader `sees`. Looks at every node for each
/// different request: tens of milliseconds in a large cluster.
fn to_place(app: &App, sees: &dyn Fn(&str) -> bool) -> Vec<PlaceProposal> {
    let mut waiting: Vec<(WaitingState, usize)> = Vec::new();
    let mut known: BTreeMap<PlacementRequest, usize> = BTreeMap::new();
    let mut refused = app.waiting.all();
    refused.retain(|state| state.refused.is_some() && sees(&state.waiting.namespace));
    for state in refused {
        match known.get(&state.waiting.query) {
            Some(at) => waiting[*at].1 += 1,
            None if waiting.len() == MOST_REQUESTS => {}
            None => {
                known.insert(state.waiting.query.clone(), waiting.len());
                waiting.push((state, 1));
            }
        }
    }
    let proposals = waiting.into_iter().filter_map(|(state, pods)| {
        let own = app.ledger.own_room(&state.waiting.pod.uid);
        let found = app.ledger.moves(&state.waiting.query, &own, MOST_MOVES)?;
        let Relocation { placement, moves } = found;
        let pod = state.waiting.pod.to_string();
        Some(PlaceProposal { pod, pods, to: location(&placement), moves: listed(&moves) })
    });
    proposals.collect()
}
