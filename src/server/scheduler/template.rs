//! Answers about full Node objects: read-only, as the nodes need not exist.
//!
//! For a node that the ledger knows, the ledger answers. Any other counts as an empty node with the
//! GPUs that its allocatable resources and the labels of GPU feature discovery name.

use control::shared::app::App;
use engine::hardware::device_class::DeviceClasses;
use engine::hardware::inventory::NodeInventory;
use engine::ledger::query::queries::{NodeAnswer, PlacementRequest};
use engine::model::node_state::NodeState;
use engine::model::rejection::Rejection;
use kube_api::config::file::Config;
use kube_api::pod::host::host_offer;
use kube_api::pod::labels::{is_of_gpus, labelled_gpus};
use kube_api::protocol::body_parts::NodeObject;
use wire::device::{Device, DeviceIndex, DeviceKind, Health};
use wire::ids::{DeviceId, NodeName, PoolName};
use wire::units::{MemMib, Timestamp};

/// The answer for each Node object, in their order. Changes nothing.
pub fn answers(app: &App, query: &PlacementRequest, objects: &[NodeObject<'_>]) -> Vec<NodeAnswer> {
    let ledger = &app.ledger;
    let names: Vec<&str> = objects.iter().map(|object| object.name.as_str()).collect();
    let mut answers = ledger.answers(query, &names);
    // The objects whose node the ledger does not know.
    let unknown = answers
        .iter()
        .enumerate()
        .filter(|(_, answer)| matches!(answer, Err(Rejection::UnknownNode | Rejection::NodeGone)));
    let places: Vec<usize> = unknown.map(|(at, _)| at).collect();
    if places.is_empty() {
        return answers;
    }
    let empty = ledger.answers_on(query, places.len(), |place, classes| {
        empty_node(&objects[places[place]], &app.config, classes)
    });
    for (at, answer) in places.into_iter().zip(empty) {
        answers[at] = answer;
    }
    answers
}

/// An empty node as the object describes it; `None` if it names no GPU or no memory.
fn empty_node(
    object: &NodeObject<'_>,
    config: &Config,
    classes: &mut DeviceClasses,
) -> Option<NodeState> {
    let labels = object.labels.entries(|key| is_of_gpus(key) || key == config.pool_label);
    let amounts =
        object.allocatable.entries(|key| is_of_gpus(key) || key == "cpu" || key == "memory");
    let label = |name: &str| labels.get(name).map(String::as_str);
    let allocatable = |name: &str| amounts.get(name).map(String::as_str);
    let gpus = labelled_gpus(label, allocatable)?;
    let devices: Option<Vec<Device>> = (0..gpus.count)
        .map(|index| {
            Some(Device {
                id: DeviceId::new(&format!("GPU-template-{index}")).ok()?,
                index: DeviceIndex(index),
                model: gpus.model.clone(),
                total: gpus.memory,
                reserved: MemMib::ZERO,
                kind: DeviceKind::Gpu,
                health: Health::Healthy,
            })
        })
        .collect();
    let inventory = NodeInventory::new(devices?).ok()?;
    let mut node = NodeState::new(NodeName::new(object.name.as_str()), MemMib::ZERO);
    let pool = PoolName::new(label(&config.pool_label).unwrap_or_default());
    node.share_by(config.pools.of(&pool), classes);
    node.see_node(host_offer(allocatable), pool);
    node.replace_inventory(&inventory, classes);
    node.observe(&[], Timestamp::START);
    Some(node)
}
