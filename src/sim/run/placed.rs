//! Where pods are at the end of a replay, and what is free then.
//!
//! A trace may say where pods run. They stay there if that is wanted, and are seen like pods after
//! a restart of the extender; the others are placed by the policy.

use std::collections::BTreeMap;

use crate::run::cluster::{FreeOnDevice, SimCluster};
use crate::run::policy::SimPolicy;
use crate::trace::dimensions::{DeviceAt, TracePlacement};
use crate::trace::forms::share_text;
use crate::trace::read::{TraceNode, TracePod};
use engine::ledger::change::reports::ReportRefusal;

/// The end of a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// The pods in the order in which they came, each where it was placed; without a place if no
    /// node fitted it.
    pub pods: Vec<TracePod>,
    /// What is free on each device. GPUs in MIG mode are left out: their instances have pods.
    pub free: Vec<FreeOnDevice>,
}

/// A trace whose pods run where nothing is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementFault {
    #[error("pod `{pod}`, column `node`: the node file has no node `{node}`")]
    Node { pod: String, node: String },
    #[error("pod `{pod}`, column `devices`: node `{node}` has no device `{device}`")]
    Device { pod: String, node: String, device: DeviceAt },
}

/// Lets pods that run stay where they are, and come before those that wait.
///
/// # Errors
/// [`PlacementFault`] if such a node or device is not in the node file.
pub fn keep_placements(nodes: &[TraceNode], pods: &mut [TracePod]) -> Result<(), PlacementFault> {
    let names: BTreeMap<&str, &TraceNode> =
        nodes.iter().map(|node| (node.name.as_str(), node)).collect();
    for pod in pods.iter() {
        let Some(TracePlacement { node, devices, .. }) = pod.placed() else { continue };
        let found = names
            .get(node.as_str())
            .ok_or_else(|| PlacementFault::Node { pod: pod.name.clone(), node: node.clone() })?;
        let missing = devices.iter().find(|(at, _)| !found.has_device(*at));
        if let Some((device, _)) = missing {
            return Err(PlacementFault::Device {
                pod: pod.name.clone(),
                node: node.clone(),
                device: *device,
            });
        }
    }
    pods.sort_by_key(|pod| pod.placed().is_none());
    Ok(())
}

/// Places pods one after the other; none ends.
///
/// # Errors
/// [`ReportRefusal::Inventory`] for a node with more GPUs than a node can have.
pub fn end_of(
    nodes: &[TraceNode],
    pods: &[TracePod],
    policy: SimPolicy,
    seed: i64,
) -> Result<End, ReportRefusal> {
    let mut cluster = SimCluster::new(nodes, pods, policy, seed, 0)?;
    let mut placed = pods.to_vec();
    for (arrival, pod) in placed.iter_mut().enumerate() {
        cluster.meet(arrival, pod);
        let seat = cluster.place(arrival, pod);
        pod.place(seat.and_then(|seat| cluster.placement(arrival, seat)));
    }
    Ok(End { pods: placed, free: cluster.free() })
}

/// What is free, as a file.
///
/// # Errors
/// None that is known: rows are written to memory.
pub fn free_csv(free: &[FreeOnDevice]) -> Result<Vec<u8>, csv::Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(["node", "device", "model", "free_memory_mib", "free_milli"])?;
    for FreeOnDevice { node, device, model, free } in free {
        let (memory, share) = (free.memory.mib().to_string(), share_text(free.share));
        let device = device.to_string();
        writer.write_record([node, device.as_str(), model.as_str(), &memory, &share])?;
    }
    writer.into_inner().map_err(|error| error.into_error().into())
}
