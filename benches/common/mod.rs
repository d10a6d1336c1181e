//! A cluster for the benches: nodes of 8 GPUs of four models, half full of mixed pods, from a seed.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use engine::hardware::inventory::NodeInventory;
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::{Ledger, Settings};
use engine::ledger::query::queries::PlacementRequest;
use engine::model::fit::HostRule;
use engine::model::policy::Policy;
use engine::model::request::{Amount, GpuRequest};
use engine::model::reservation::PodRef;
use engine::scoring::strategy::Strategy;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use wire::device::{Device, DeviceIndex, DeviceKind, Health};
use wire::ids::{DeviceId, ModelName, NodeName, PodUid, PoolName};
use wire::seen::DeviceUse;
use wire::units::{HostAmount, MemMib, MilliCpu, Share, Timestamp};

const MODELS: [(&str, u64); 4] = [
    ("Tesla T4", 15_360),
    ("NVIDIA L40S", 46_068),
    ("NVIDIA A100-SXM4-80GB", 81_920),
    ("NVIDIA H100 80GB HBM3", 81_559),
];

const GPUS_PER_NODE: u32 = 8;

/// A cluster and the names of its nodes.
pub(crate) struct Cluster {
    pub(crate) ledger: Ledger,
    pub(crate) names: Vec<String>,
}

pub(crate) fn host() -> HostAmount {
    HostAmount { cpu: MilliCpu::new(128_000), memory: MemMib::new(1 << 20) }
}

pub(crate) fn pod(uid: &str) -> PodRef {
    PodRef { uid: PodUid::new(uid), name: Arc::from(uid) }
}

/// A request with kube-scheduler's checks trusted, as the extender evaluates it.
pub(crate) fn requests(gpu: GpuRequest, policy: Policy) -> PlacementRequest {
    PlacementRequest {
        gpu: Some(gpu),
        host: HostAmount { cpu: MilliCpu::new(4000), memory: MemMib::new(8192) },
        host_rule: HostRule::Trusted,
        strategy: Strategy::Policy(policy),
    }
}

/// Shares of half a dozen sizes, amounts of memory, whole GPUs, and pairs.
pub(crate) fn some_request(rng: &mut ChaCha8Rng) -> GpuRequest {
    let share = |millionths| Amount::Fraction(Share::from_millionths(millionths));
    let amount = match rng.random_range(0..10) {
        0..6 => {
            share([100_000, 200_000, 250_000, 333_330, 500_000, 750_000][rng.random_range(0..6)])
        }
        6..8 => Amount::Memory(MemMib::new(1024 * rng.random_range(2..12))),
        _ => Amount::Whole,
    };
    let count = if rng.random_bool(0.1) { 2 } else { 1 };
    GpuRequest::several(amount, NonZeroU32::new(count).expect("one or two"))
}

fn inventory(node: usize) -> NodeInventory {
    let (model, mib) = MODELS[node % MODELS.len()];
    let devices = (0..GPUS_PER_NODE).map(|index| Device {
        id: DeviceId::new(&format!("GPU-{node}-{index}")).expect("a legal id"),
        index: DeviceIndex(index),
        model: ModelName::new(model),
        total: MemMib::new(mib),
        reserved: MemMib::new(512),
        kind: DeviceKind::Gpu,
        health: Health::Healthy,
    });
    NodeInventory::new(devices.collect()).expect("a sound inventory")
}

/// A ledger without any node.
pub(crate) fn empty() -> Ledger {
    Ledger::new(Settings {
        hold_for: Duration::from_secs(5),
        stale_after: Duration::from_secs(10),
        drain_limit: Duration::from_secs(30),
        warm_up: Duration::ZERO,
        unmanaged_tolerance: MemMib::new(256),
        first_session: 1,
    })
}

/// What the agent of a node says first: its devices, and that nothing runs there.
pub(crate) fn hello(node: usize, name: &str) -> NodeReport {
    let inventory = inventory(node);
    let idle = |device: &Device| DeviceUse::idle(device.id.clone());
    NodeReport {
        allocations_version: None,
        agent: name.to_owned(),
        session: None,
        sequence: 1,
        uses: inventory.devices().iter().map(idle).collect(),
        inventory: Some(inventory),
    }
}

/// `nodes` nodes, each with half of its share allocated; the request mix is that of the pods.
pub(crate) fn cluster(nodes: usize) -> Cluster {
    let ledger = empty();
    let mut rng = ChaCha8Rng::seed_from_u64(2026);
    let names: Vec<String> = (0..nodes).map(|node| format!("node-{node:05}")).collect();
    for (node, name) in names.iter().enumerate() {
        ledger.see_node(&NodeName::new(name.as_str()), host(), PoolName::new(""));
        ledger.report(name, &hello(node, name), Timestamp::START).expect("a hello is accepted");
        fill(&ledger, name, &mut rng);
    }
    let allocation = ledger.packing().allocation().millionths();
    assert!((450_000..650_000).contains(&allocation), "{allocation} millionths are allocated");
    Cluster { ledger, names }
}

fn fill(ledger: &Ledger, node: &str, rng: &mut ChaCha8Rng) {
    let half = u64::from(GPUS_PER_NODE) * Share::WHOLE.millionths() / 2;
    let mut allocated = 0;
    for serial in 0.. {
        if allocated >= half {
            return;
        }
        let query = requests(some_request(rng), Policy::BinPack);
        let pod = pod(&format!("{node}-{serial}"));
        if let Ok(placement) = ledger.reserve(&pod, node, &query, Timestamp::START) {
            let shares = placement.devices.iter().map(|device| device.demand.share.millionths());
            allocated += shares.sum::<u64>();
            ledger.learn(pod.uid, &query);
        }
    }
}
