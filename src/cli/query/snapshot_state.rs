//! A cluster in a live extender, as a snapshot has it.

use std::num::NonZeroU32;

use crate::api::state;
use crate::api::state::{DeviceKind, Node, NodeReporting, Pod, PodState, State};
use crate::hardware::device::ModelFilter;
use crate::hardware::units::{HostAmount, MemMib, MilliCpu, Share};
use crate::model::request::{Amount, GpuRequest};
use crate::sim::snapshot::state::{ClusterGpu, ClusterNode, ClusterPod};

/// Nodes that exist, and pods that have not ended.
pub(crate) fn cluster(state: State) -> (Vec<ClusterNode>, Vec<ClusterPod>) {
    let nodes = state.nodes.into_iter().filter(|node| node.state != NodeReporting::Gone);
    let pods = state.pods.into_iter().filter(|pod| pod.state != PodState::Draining);
    (nodes.map(cluster_node).collect(), pods.map(cluster_pod).collect())
}

/// Running pods with GPUs. The extender does not report which models they accept.
pub(crate) fn of_unknown_models(state: &State) -> usize {
    state.pods.iter().filter(|pod| pod.node.is_some() && pod.devices > 0).count()
}

fn cluster_node(node: Node) -> ClusterNode {
    let of_kind = |kind| node.devices.iter().filter(move |device| device.kind == kind);
    let gpu = |gpu: &state::Device| ClusterGpu {
        model: gpu.model.clone(),
        memory: MemMib::new(gpu.capacity_mib),
    };
    ClusterNode {
        host: host(&node.capacity),
        gpus: of_kind(DeviceKind::Gpu).map(gpu).collect(),
        mig_gpus: of_kind(DeviceKind::MigParent).count(),
        name: node.name,
    }
}

fn cluster_pod(pod: Pod) -> ClusterPod {
    ClusterPod {
        gpu: request(&pod),
        name: if pod.pod.is_empty() { pod.pod_uid } else { pod.pod },
        node: pod.node,
        host: host(&pod.host),
        created_unix_seconds: pod.created_unix_seconds,
    }
}

/// The GPUs that a pod requests or holds.
fn request(pod: &Pod) -> Option<GpuRequest> {
    let count = NonZeroU32::new(pod.devices)?;
    let share = pod.share_millionths.map(Share::from_millionths);
    let memory = pod.device_memory_mib.map(MemMib::new);
    let amount = match (share, memory) {
        // Neither share nor memory: for the format, MIG instances and replicas are alike.
        _ if pod.mig_profile.is_some() => Amount::SharedSlot,
        (None, None) => Amount::SharedSlot,
        (Some(share), _) if share >= Share::WHOLE => Amount::Whole,
        (Some(share), None) => Amount::Fraction(share),
        (None, Some(memory)) => Amount::Memory(memory),
        (Some(share), Some(memory)) => Amount::FractionAndMemory(share, memory),
    };
    let models = ModelFilter::new(pod.models.iter().map(String::as_str));
    Some(GpuRequest { models, ..GpuRequest::several(amount, count) })
}

fn host(amount: &state::HostAmount) -> HostAmount {
    HostAmount { cpu: MilliCpu::new(amount.cpu_milli), memory: MemMib::new(amount.memory_mib) }
}
