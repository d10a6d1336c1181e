//! Answers about full Node objects: read-only, for callers such as an autoscaler's simulation that
//! ask about nodes which may not exist yet.
//!
//! A node that the ledger knows is answered from its books. Any other is taken as an empty node with
//! the GPUs that its allocatable resources and the labels of GPU feature discovery name.

use super::protocol::NodeObject;
use crate::cluster::host::host_offer;
use crate::cluster::labels::labelled_gpus;
use crate::ledger::books::Ledger;
use crate::ledger::questions::{Answer, Question};
use crate::packing::device::{
    Device, DeviceClasses, DeviceId, DeviceIndex, DeviceKind, Health, NodeInventory, NodeName,
    PoolName,
};
use crate::packing::fit::Misfit;
use crate::packing::node::NodeLedger;
use crate::packing::units::{MemMib, Timestamp};

/// The answer for each Node object, in their order. Changes nothing.
pub fn answers(ledger: &Ledger, question: &Question, objects: &[NodeObject<'_>]) -> Vec<Answer> {
    let names: Vec<&str> = objects.iter().map(|object| object.name.as_str()).collect();
    let known = ledger.answers(question, &names);
    let answer = |(object, known): (&NodeObject<'_>, Answer)| match known {
        Err(Misfit::UnknownNode | Misfit::NodeGone) => answer_as_empty(ledger, question, object),
        answer => answer,
    };
    objects.iter().zip(known).map(answer).collect()
}

/// The answer for an object that stands for no node of the books: one that an autoscaler thinks of.
fn answer_as_empty(ledger: &Ledger, question: &Question, object: &NodeObject<'_>) -> Answer {
    let mut classes = DeviceClasses::default();
    let node = empty_node(object, &mut classes).ok_or(Misfit::NoDevices)?;
    ledger.answer_on(question, &node, &classes)
}

/// An empty node as the object describes it; `None` where it names no GPU or no memory.
fn empty_node(object: &NodeObject<'_>, classes: &mut DeviceClasses) -> Option<NodeLedger> {
    let label = |name: &str| object.labels.get(name).map(String::as_str);
    let allocatable = |name: &str| object.allocatable.get(name).map(String::as_str);
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
    let mut node = NodeLedger::new(NodeName::new(object.name.as_str()), MemMib::ZERO);
    node.see_node(host_offer(allocatable), PoolName::new(""));
    node.replace_inventory(&inventory, classes);
    node.observe(&[], Timestamp::START);
    Some(node)
}
