//! The nodes and GPUs of a scenario: one description for the API server, for the simulated agents
//! and for the checker.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::Serialize;

/// The file that `gpupack agent --simulate` plays.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Fleet {
    /// How long the processes of a pod live after the pod is gone.
    pub(crate) process_linger_ms: u64,
    /// How many percent of its memory a pod uses, by `namespace/name`; of others 60.
    pub(crate) use_percent_of: BTreeMap<String, u32>,
    /// The nodes, in any order.
    pub(crate) nodes: Vec<FleetNode>,
    /// Where each UUID is: node and GPU. Made at the first query, when the fleet is complete.
    #[serde(skip)]
    places: OnceLock<BTreeMap<String, (usize, usize)>>,
}

/// One simulated node.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct FleetNode {
    /// Name of the Node object.
    pub(crate) name: String,
    /// Allocatable CPU in thousandths.
    pub(crate) cpu_milli: u64,
    /// Allocatable memory in MiB.
    pub(crate) memory_mib: u64,
    /// Its GPUs, by NVML index.
    pub(crate) gpus: Vec<FleetGpu>,
}

/// One simulated GPU.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct FleetGpu {
    /// NVML's identifier, unique in the fleet.
    pub(crate) uuid: String,
    /// NVML's product name.
    pub(crate) model: String,
    /// NVML's total.
    pub(crate) memory_mib: u64,
    /// Of that, what the driver keeps for itself.
    pub(crate) reserved_mib: u64,
}

impl FleetGpu {
    /// Memory that can be given to pods.
    pub(crate) fn capacity_mib(&self) -> u64 {
        self.memory_mib - self.reserved_mib
    }
}

/// A kind of GPU: product name, NVML total, driver's reserve.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Model(&'static str, u64, u64);

/// 80 GiB.
pub(crate) const A100: Model = Model("NVIDIA A100-SXM4-80GB", 81_920, 600);
/// 24 GiB.
pub(crate) const A10: Model = Model("NVIDIA A10", 23_028, 493);
/// 16 GiB.
pub(crate) const T4: Model = Model("Tesla T4", 15_360, 435);

impl Fleet {
    /// An empty fleet whose processes end with their pods.
    pub(crate) fn new() -> Self {
        Self {
            process_linger_ms: 0,
            use_percent_of: BTreeMap::new(),
            nodes: Vec::new(),
            places: OnceLock::new(),
        }
    }

    /// Adds `count` nodes of `gpus` GPUs. Names and UUIDs start with the prefix's letters, so that
    /// no scenario sees a UUID of another.
    pub(crate) fn with(
        mut self,
        prefix: &str,
        count: usize,
        (gpus, model): (usize, Model),
    ) -> Self {
        let Model(product, memory_mib, reserved_mib) = model;
        let group: u32 = prefix.bytes().fold(0, |hash, b| hash.wrapping_mul(31) ^ u32::from(b));
        for node in 0..count {
            let gpus = (0..gpus).map(|gpu| FleetGpu {
                uuid: format!("GPU-{group:08x}-0000-4000-8000-{:012x}", node * 100 + gpu),
                model: product.to_owned(),
                memory_mib,
                reserved_mib,
            });
            self.nodes.push(FleetNode {
                name: format!("{prefix}-{node:02}"),
                cpu_milli: 64_000,
                memory_mib: 262_144,
                gpus: gpus.collect(),
            });
        }
        self
    }

    /// Names its only node.
    pub(crate) fn named(mut self, name: &str) -> Self {
        assert_eq!(self.nodes.len(), 1, "one name for one node");
        name.clone_into(&mut self.nodes[0].name);
        self
    }

    /// Lets processes live that long after their pod is gone.
    pub(crate) fn lingering(mut self, process_linger_ms: u64) -> Self {
        self.process_linger_ms = process_linger_ms;
        self
    }

    /// Lets a pod use this percentage of its memory.
    pub(crate) fn using(mut self, pod: &str, percent: u32) -> Self {
        self.use_percent_of.insert(pod.to_owned(), percent);
        self
    }

    /// Writes the fleet file. Returns its path.
    pub(crate) fn write(&self, folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(format!("{name}.fleet.json"));
        let text = serde_json::to_string_pretty(self).expect("a fleet has no odd keys");
        std::fs::write(&path, text).expect("the work folder is writable");
        path
    }

    /// The number of GPUs.
    pub(crate) fn gpus(&self) -> usize {
        self.nodes.iter().map(|node| node.gpus.len()).sum()
    }

    /// The GPU of that UUID, with the name of its node.
    pub(crate) fn device(&self, uuid: &str) -> Option<(&str, &FleetGpu)> {
        let places = self.places.get_or_init(|| {
            let mut places = BTreeMap::new();
            for (at, node) in self.nodes.iter().enumerate() {
                let gpus = node.gpus.iter().enumerate();
                places.extend(gpus.map(|(index, gpu)| (gpu.uuid.clone(), (at, index))));
            }
            places
        });
        let (node, gpu) = places.get(uuid)?;
        let node = &self.nodes[*node];
        Some((node.name.as_str(), &node.gpus[*gpu]))
    }

    /// The UUIDs of one node, by NVML index.
    pub(crate) fn uuids(&self, node: &str) -> Vec<&str> {
        let node = self.nodes.iter().find(|candidate| candidate.name == node);
        let node = node.expect("the node is in the fleet");
        node.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect()
    }
}
