//! What the tests of the ledger share: settings, devices, pods and requests in few words.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use engine::hardware::inventory::NodeInventory;
use engine::hardware::pool::{PoolRule, PoolRules};
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::{Ledger, Settings};
use engine::ledger::query::queries::PlacementRequest;
use engine::model::fit::HostRule;
use engine::model::policy::Policy;
use engine::model::request::{Amount, GpuRequest};
use engine::model::reservation::{Placement, PodRef, Tenure};
use engine::scoring::strategy::Strategy;
use wire::device::{Device, DeviceIndex, DeviceKind, Health};
use wire::ids::{DeviceId, ModelName, NodeName, PodUid, PoolName};
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{HostAmount, MemMib, MilliCpu, Share, Timestamp};

/// Memory of a device where a test does not care.
pub(crate) const DEVICE_MIB: u64 = 10_000;

/// Holds last 5 s, nodes are silent after 10 s, drains end after 30 s.
pub(crate) fn settings() -> Settings {
    Settings {
        hold_for: Duration::from_secs(5),
        stale_after: Duration::from_secs(10),
        drain_limit: Duration::from_secs(30),
        warm_up: Duration::from_secs(10),
        unmanaged_tolerance: MemMib::new(100),
        first_session: 1,
    }
}

/// The ledger of a process that was started so often before. It shares the devices of pool `p` by this rule,
/// is ready at once, and tolerates no memory.
pub(crate) fn restarted(restarts: u64, rule: PoolRule) -> Ledger {
    let ledger = Ledger::new(Settings {
        first_session: 1 + 1_000_000 * restarts,
        warm_up: Duration::ZERO,
        unmanaged_tolerance: MemMib::ZERO,
        ..settings()
    });
    ledger.share_by(PoolRules::new([(PoolName::new("p"), rule)]));
    ledger
}

/// What the API server says of a bound pod that this process placed so. It shows no request.
pub(crate) fn bound(uid: &str, written: &Placement) -> PodFact {
    PodFact {
        pod: pod(uid),
        node: Some(written.node.clone()),
        host: HostAmount::ZERO,
        is_terminal: false,
        wants_gpu: true,
        request: None,
        placement: Some(written.clone()),
        bound_by_us: true,
        moves: MoveFact::default(),
        tenure: Tenure::default(),
    }
}

pub(crate) fn seconds(seconds: u64) -> Timestamp {
    Timestamp::from_millis(1000 * seconds)
}

/// 16 cores and 64 GiB.
pub(crate) fn host() -> HostAmount {
    HostAmount { cpu: MilliCpu::new(16_000), memory: MemMib::new(65_536) }
}

pub(crate) fn device_id(text: &str) -> DeviceId {
    DeviceId::new(text).expect("ids in tests are legal")
}

/// GPUs `<node>-0`, `<node>-1`, … of one model.
pub(crate) fn gpus(node: &str, count: u32, model: &str, mib: u64) -> NodeInventory {
    let devices = (0..count).map(|index| Device {
        id: device_id(&format!("{node}-{index}")),
        index: DeviceIndex(index),
        model: ModelName::new(model),
        total: MemMib::new(mib),
        reserved: MemMib::ZERO,
        kind: DeviceKind::Gpu,
        health: Health::Healthy,
    });
    NodeInventory::new(devices.collect()).expect("inventories in tests are sound")
}

pub(crate) fn pod(uid: &str) -> PodRef {
    PodRef { uid: PodUid::new(uid), name: Arc::from(format!("default/{uid}")) }
}

pub(crate) fn fraction(millionths: u64) -> Amount {
    Amount::Fraction(Share::from_millionths(millionths))
}

/// A request for `amount` on `count` devices and no host resources.
pub(crate) fn request_of(amount: Amount, count: u32, policy: Policy) -> PlacementRequest {
    let count = NonZeroU32::new(count).expect("a count in a test is not zero");
    PlacementRequest {
        gpu: Some(GpuRequest::several(amount, count)),
        host: HostAmount::ZERO,
        host_rule: HostRule::Trusted,
        strategy: Strategy::Policy(policy),
    }
}

/// What an agent sees of a device that is healthy and whose processes belong to `pods`.
pub(crate) fn seen<'a>(id: &DeviceId, pods: impl IntoIterator<Item = &'a PodUid>) -> DeviceUse {
    let process = |uid: &PodUid| ProcessUse { pod: Some(uid.clone()), memory: None };
    let processes = Some(pods.into_iter().map(process).collect());
    DeviceUse { processes, ..DeviceUse::idle(id.clone()) }
}

/// A node with an agent that has said hello and sees no process.
pub(crate) fn add_node(ledger: &Ledger, name: &str, inventory: &NodeInventory, now: Timestamp) {
    ledger.see_node(&NodeName::new(name), host(), PoolName::new(""));
    let report = NodeReport {
        allocations_version: None,
        agent: format!("agent-{name}"),
        session: None,
        sequence: 1,
        inventory: Some(inventory.clone()),
        uses: inventory.devices().iter().map(|device| seen(&device.id, [])).collect(),
    };
    ledger.report(name, &report, now).expect("a hello with an inventory is accepted");
}
