//! Generated fleets with the models of real clusters, for the demo and the benches.

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::simulated::fleet::{Fleet, FleetGpu, FleetInstance, FleetNode, default_use_percent};
use engine::hardware::mig::Geometry;
use wire::ids::{MigProfile, ModelName};
use wire::units::MemMib;

impl Fleet {
    /// A fleet of `nodes` nodes with `gpus_per_node` GPUs each, with the models of real clusters,
    /// one model per node. The same arguments give the same fleet, on every machine.
    pub fn mixed(nodes: usize, gpus_per_node: usize, seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let weights: u32 = MODELS.iter().map(|model| model.weight).sum();
        let nodes = (0..nodes).map(|position| {
            let mut drawn = random.random_range(0..weights);
            let model = MODELS.iter().find(|model| {
                let hit = drawn < model.weight;
                drawn = drawn.wrapping_sub(model.weight);
                hit
            });
            let model = model.expect("a number below the sum of weights hits one of them");
            model.node(format!("node-{position:05}"), gpus_per_node)
        });
        Self {
            process_linger_ms: 0,
            use_percent: default_use_percent(),
            use_percent_of: BTreeMap::new(),
            nodes: nodes.collect(),
        }
    }
}

/// The pool whose GPUs are cut into slots.
pub const SLOTS_POOL: &str = "slots";
/// The pool whose GPUs have MIG instances.
pub const MIG_POOL: &str = "mig";

impl Fleet {
    /// Puts the last node into [`SLOTS_POOL`] and the one before it into [`MIG_POOL`], with A100
    /// GPUs of four instances each. A fleet of fewer than three nodes stays as it is.
    pub fn pooled(mut self) -> Self {
        if let [_, .., mig, slots] = self.nodes.as_mut_slice() {
            slots.pool = Some(SLOTS_POOL.to_owned());
            let model = &MODELS[1];
            let instances = ["3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"].map(|name| {
                let total = MemMib::new(model.memory_mib);
                let geometry = Geometry::of(&ModelName::new(model.name), total)?;
                let profile = MigProfile::new(name);
                let memory_mib = geometry.profile(&profile)?.memory_mib;
                Some(FleetInstance { uuid: None, profile: name.to_owned(), memory_mib })
            });
            let mut cut = model.node(mig.name.clone(), mig.gpus.len());
            for gpu in &mut cut.gpus {
                gpu.mig = instances.iter().flatten().cloned().collect();
            }
            *mig = FleetNode { pool: Some(MIG_POOL.to_owned()), ..cut };
        }
        self
    }
}

/// A product that generated fleets contain.
struct Model {
    /// Product name as NVML spells it.
    name: &'static str,
    /// Total memory as NVML reports it.
    memory_mib: u64,
    /// Reserve of the driver; varies a little with its version.
    reserved_mib: u64,
    /// Cores of the host per GPU.
    cores: u64,
    host_gib: u64,
    /// How many of 100 nodes have it.
    weight: u32,
}

/// Names and memory from public outputs of `nvidia-smi -q`; hosts as clouds sell them.
const MODELS: [Model; 7] = [
    model("NVIDIA A100-SXM4-80GB", 81_920, 634, 16, 128, 25),
    model("NVIDIA A100-SXM4-40GB", 40_960, 581, 12, 96, 15),
    model("NVIDIA H100 80GB HBM3", 81_559, 551, 24, 256, 20),
    model("NVIDIA H200", 143_771, 619, 24, 256, 10),
    model("NVIDIA L4", 23_034, 476, 12, 48, 10),
    model("Tesla T4", 15_360, 450, 8, 32, 10),
    model("NVIDIA A10", 23_028, 512, 12, 64, 10),
];

/// One row of the table above.
const fn model(
    name: &'static str,
    memory_mib: u64,
    reserved_mib: u64,
    cores: u64,
    host_gib: u64,
    weight: u32,
) -> Model {
    Model { name, memory_mib, reserved_mib, cores, host_gib, weight }
}

impl Model {
    /// A node with `gpu_count` of these GPUs.
    fn node(&self, name: String, gpu_count: usize) -> FleetNode {
        let gpu = FleetGpu {
            uuid: None,
            model: self.name.to_owned(),
            memory_mib: self.memory_mib,
            reserved_mib: self.reserved_mib,
            mig: Vec::new(),
        };
        let gpus = vec![gpu; gpu_count];
        let gpu_count = u64::try_from(gpu_count).unwrap_or(u64::MAX).max(1);
        FleetNode {
            name,
            cpu_milli: self.cores.saturating_mul(1_000).saturating_mul(gpu_count),
            memory_mib: self.host_gib.saturating_mul(1_024).saturating_mul(gpu_count),
            pool: None,
            gpus,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_generated_fleet_is_mixed_valid_and_always_the_same() {
        let fleet = Fleet::mixed(200, 8, 42);
        assert_eq!(fleet, Fleet::mixed(200, 8, 42));
        assert_ne!(fleet, Fleet::mixed(200, 8, 43));
        fleet.check().unwrap();
        let models: BTreeSet<&str> =
            fleet.nodes.iter().map(|node| node.gpus[0].model.as_str()).collect();
        assert_eq!(models.len(), MODELS.len());
        let text = serde_json::to_string(&fleet).unwrap();
        assert_eq!(Fleet::from_json(&text).unwrap(), fleet);
        assert_eq!(Fleet::mixed(2, 8, 42).pooled(), Fleet::mixed(2, 8, 42));
        let pooled = Fleet::mixed(5, 2, 42).pooled();
        pooled.check().unwrap();
        let pools: Vec<Option<&str>> =
            pooled.nodes.iter().map(|node| node.pool.as_deref()).collect();
        assert_eq!(pools, [None, None, None, Some(MIG_POOL), Some(SLOTS_POOL)]);
        assert_eq!(pooled.nodes[3].inventory().len(), 2 * (1 + 4));
        assert!(Fleet::mixed(3, 0, 1).nodes.iter().all(|node| node.inventory().is_empty()));
    }
}
