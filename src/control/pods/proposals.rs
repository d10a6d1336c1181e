//! Moves of running pods that would help: proposed to operators, never made.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::control::shared::app::App;
use crate::ledger::query::questions::PlacementRequest;
use crate::ledger::suggest::displacement::MOST_MOVES;
use crate::ledger::suggest::moves::{Move, Relocation};
use crate::ledger::suggest::waiting::WaitingState;
use crate::model::reservation::Placement;

/// Most different requests of waiting pods that are searched for at once, most important pods
/// first.
const MOST_REQUESTS: usize = 20;

/// Most GPUs that are proposed to be emptied.
const MOST_GPUS: usize = 20;

/// What could be moved.
#[derive(Debug, Default, Serialize)]
pub struct Proposals {
    /// For pods that no node fits, the most important first; one pod stands for all equal requests.
    pub to_place: Vec<PlaceProposal>,
    /// GPUs that can be emptied onto others in use. Only while nothing waits.
    pub to_empty: Vec<EmptyProposal>,
}

/// Moves that make room for a waiting pod.
#[derive(Debug, Serialize)]
pub struct PlaceProposal {
    /// `namespace/name`.
    pub pod: String,
    /// Waiting pods with the same request.
    pub pods: usize,
    /// Where it would fit after the moves.
    pub to: PlaceView,
    /// The moves.
    pub moves: Vec<MoveView>,
}

/// Moves that leave a GPU without tenants.
#[derive(Debug, Serialize)]
pub struct EmptyProposal {
    /// The node.
    pub node: String,
    /// UUID of the GPU.
    pub device: String,
    /// The moves.
    pub moves: Vec<MoveView>,
}

/// One pod that would move.
#[derive(Debug, Serialize)]
pub struct MoveView {
    /// `namespace/name`.
    pub pod: String,
    /// Where it runs.
    pub from: PlaceView,
    /// Where it would run.
    pub to: PlaceView,
}

/// A node and devices of it.
#[derive(Debug, Serialize)]
pub struct PlaceView {
    /// The node.
    pub node: String,
    /// UUIDs of the devices.
    pub devices: Vec<String>,
}

impl PlaceView {
    fn of(placement: &Placement) -> Self {
        let devices = placement.devices.iter().map(|device| device.id.to_string());
        Self { node: placement.node.to_string(), devices: devices.collect() }
    }
}

/// The moves of a relocation, for JSON.
pub fn views(moves: &[Move]) -> Vec<MoveView> {
    let view = |one: &Move| MoveView {
        pod: one.pod.to_string(),
        from: PlaceView::of(&one.from),
        to: PlaceView::of(&one.to),
    };
    moves.iter().map(view).collect()
}

/// What could be moved now. Looks at every node for each different request: tens of milliseconds in
/// a large cluster.
pub fn proposals(app: &App) -> Proposals {
    let mut waiting: Vec<(WaitingState, usize)> = Vec::new();
    let mut known: BTreeMap<PlacementRequest, usize> = BTreeMap::new();
    for state in app.waiting.all().into_iter().filter(|state| state.refused.is_some()) {
        match known.get(&state.waiting.question) {
            Some(at) => waiting[*at].1 += 1,
            None if waiting.len() == MOST_REQUESTS => {}
            None => {
                known.insert(state.waiting.question.clone(), waiting.len());
                waiting.push((state, 1));
            }
        }
    }
    if waiting.is_empty() {
        let found = app.ledger.emptyings(MOST_MOVES, MOST_GPUS).into_iter();
        let view = found.map(|found| EmptyProposal {
            node: found.node.to_string(),
            device: found.device.to_string(),
            moves: views(&found.moves),
        });
        return Proposals { to_empty: view.collect(), ..Proposals::default() };
    }
    let place = |(state, pods): (WaitingState, usize)| {
        let Relocation { placement, moves } =
            app.ledger.moves(&state.waiting.question, MOST_MOVES)?;
        let pod = state.waiting.pod.to_string();
        Some(PlaceProposal { pod, pods, to: PlaceView::of(&placement), moves: views(&moves) })
    };
    Proposals { to_place: waiting.into_iter().filter_map(place).collect(), ..Proposals::default() }
}
