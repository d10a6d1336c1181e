//! Why a pod waits in one sentence, and the smallest changes that would help.

use crate::ledger::books::Ledger;
use crate::ledger::details::Condition;
use crate::ledger::questions::Question;
use crate::packing::fit::{Misfit, Room};
use crate::packing::node::{ClaimRule, NodeLedger};
use crate::report::Ailment;

/// What ails a device that kubelet hands out.
const KUBELET_OWNED: &str = Ailment::KubeletOwned.name();

/// One sentence on why a pod waits.
pub(super) fn verdict(fitting: usize, nodes: usize, closest: Option<Misfit>) -> String {
    match (fitting, closest) {
        (0, None) => "no node is known".to_owned(),
        (0, Some(misfit)) => {
            format!("none of {nodes} nodes fits; the closest obstacle: {}", misfit.reason())
        }
        (_, _) => format!(
            "{fitting} of {nodes} nodes fit now; if the pod still waits, kube-scheduler's own filters \
             refuse them (see its events)"
        ),
    }
}

/// What would give gpupack the devices that kubelet hands out by itself; nothing where there are none.
pub(super) fn kubelet_mend(ledger: &Ledger, nodes: &[NodeLedger]) -> Option<String> {
    let is_kubelets = |condition: &&Condition| condition.ailment == Some(KUBELET_OWNED);
    let of_node = |node: &NodeLedger| {
        ledger.details(node.name().as_str()).conditions.values().filter(is_kubelets).count()
    };
    let devices: usize = nodes.iter().map(of_node).sum();
    (devices > 0).then(|| {
        format!(
            "{devices} devices are kubelet's (its device plugin hands them out): take the plugin off \
             those nodes to give them to gpupack"
        )
    })
}

/// The smallest changes that would help: what would fit now, or what must become free.
pub(super) fn mends(
    question: &Question,
    nodes: &[NodeLedger],
    misfits: impl Iterator<Item = Misfit>,
) -> Vec<String> {
    let Some(request) = &question.gpu else { return Vec::new() };
    let rooms: Vec<Room> = nodes
        .iter()
        .filter(|node| node.placeable().is_ok())
        .flat_map(NodeLedger::devices)
        .filter(|books| books.is_placeable() && request.models.matches(&books.device().model))
        .map(|books| books.room(ClaimRule::Respected))
        .collect();
    let share = rooms.iter().map(|room| room.free.share).max();
    let memory = rooms.iter().map(|room| room.free.memory).max();
    let mut mends: Vec<String> = misfits.filter_map(Misfit::mend).collect();
    if let (Some(share), Some(memory)) = (share, memory) {
        mends.push(format!(
            "on an accepted model the largest free share of one GPU now is {share}, the largest free \
             memory of one GPU is {memory}: a request within one GPU's room starts at once"
        ));
    }
    mends.dedup();
    mends
}
