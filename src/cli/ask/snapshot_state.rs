//! A cluster in a live extender: the part of `/v1/state` that a snapshot needs.

use std::num::NonZeroU32;

use serde::Deserialize;

use crate::hardware::device::ModelFilter;
use crate::hardware::units::{HostAmount, MemMib, MilliCpu, Share};
use crate::model::request::{Amount, GpuRequest};
use crate::sim::snapshot::state::{ClusterGpu, ClusterNode, ClusterPod};

/// The whole state.
#[derive(Debug, Deserialize)]
pub(crate) struct State {
    nodes: Vec<Node>,
    pods: Vec<Pod>,
}

#[derive(Debug, Deserialize)]
struct Node {
    name: String,
    state: String,
    cpu_milli: u64,
    memory_mib: u64,
    devices: Vec<Device>,
}

#[derive(Debug, Deserialize)]
struct Device {
    model: String,
    kind: String,
    capacity_mib: u64,
}

#[derive(Debug, Deserialize)]
struct Pod {
    pod_uid: String,
    pod: String,
    node: Option<String>,
    state: String,
    cpu_milli: u64,
    memory_mib: u64,
    devices: u32,
    share_millionths: Option<u64>,
    device_memory_mib: Option<u64>,
    mig_profile: Option<String>,
    models: Vec<String>,
    created_unix_seconds: Option<u64>,
}

impl State {
    /// Nodes that exist, and pods that have not ended.
    pub(crate) fn into_cluster(self) -> (Vec<ClusterNode>, Vec<ClusterPod>) {
        let nodes = self.nodes.into_iter().filter(|node| node.state != "gone");
        let pods = self.pods.into_iter().filter(|pod| pod.state != "draining");
        (nodes.map(Node::into_cluster).collect(), pods.map(Pod::into_cluster).collect())
    }

    /// Running pods with GPUs. The extender does not report which models they accept.
    pub(crate) fn of_unknown_models(&self) -> usize {
        self.pods.iter().filter(|pod| pod.node.is_some() && pod.devices > 0).count()
    }
}

impl Node {
    fn into_cluster(self) -> ClusterNode {
        let mig_gpus = self.devices.iter().filter(|device| device.kind == "mig_parent").count();
        let gpus = self.devices.into_iter().filter(|device| device.kind == "gpu");
        ClusterNode {
            name: self.name,
            host: host(self.cpu_milli, self.memory_mib),
            gpus: gpus
                .map(|gpu| ClusterGpu { model: gpu.model, memory: MemMib::new(gpu.capacity_mib) })
                .collect(),
            mig_gpus,
        }
    }
}

impl Pod {
    fn into_cluster(self) -> ClusterPod {
        let gpu = self.request();
        ClusterPod {
            name: if self.pod.is_empty() { self.pod_uid } else { self.pod },
            node: self.node,
            host: host(self.cpu_milli, self.memory_mib),
            gpu,
            created_unix_seconds: self.created_unix_seconds,
        }
    }

    /// The GPUs that it requests or holds.
    fn request(&self) -> Option<GpuRequest> {
        let count = NonZeroU32::new(self.devices)?;
        let share = self.share_millionths.map(Share::from_millionths);
        let memory = self.device_memory_mib.map(MemMib::new);
        let amount = match (share, memory) {
            // Neither share nor memory: for the format, MIG instances and replicas are alike.
            _ if self.mig_profile.is_some() => Amount::SharedSlot,
            (None, None) => Amount::SharedSlot,
            (Some(share), _) if share >= Share::WHOLE => Amount::Whole,
            (Some(share), None) => Amount::Fraction(share),
            (None, Some(memory)) => Amount::Memory(memory),
            (Some(share), Some(memory)) => Amount::FractionAndMemory(share, memory),
        };
        let models = ModelFilter::new(self.models.iter().map(String::as_str));
        Some(GpuRequest { models, ..GpuRequest::several(amount, count) })
    }
}

fn host(cpu_milli: u64, memory_mib: u64) -> HostAmount {
    HostAmount { cpu: MilliCpu::new(cpu_milli), memory: MemMib::new(memory_mib) }
}
