//! A ledger with a few nodes for the tests of this layer.

use std::time::Duration;

use crate::hardware::inventory::NodeInventory;
use crate::hardware::pool::ConfiguredIsolation;
use crate::ledger::change::facts::{MoveFact, PodFact};
use crate::ledger::change::reports::{NodeReport, Receipt, ReportRefusal};
use crate::ledger::nodes::state::{Ledger, Settings};
use crate::ledger::query::queries::PlacementRequest;
use crate::model::fit::HostRule;
use crate::model::node_state::NodeState;
use crate::model::policy::Policy;
use crate::model::request::{Amount, GpuRequest};
use crate::model::reservation::{PlacedDevice, Placement, PodRef, Tenure};
use crate::scoring::strategy::Strategy;
use wire::device::{Device, DeviceIndex, DeviceKind, FailedMigOrder, Health};
use wire::ids::{DeviceId, MigProfile, ModelName, NodeName, PodUid, PoolName};
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{Demand, HostAmount, MemMib, Share, Timestamp};

/// Holds last 5 s, nodes are silent after 10 s, drains end after 30 s.
pub fn settings() -> Settings {
    Settings {
        hold_for: Duration::from_secs(5),
        stale_after: Duration::from_secs(10),
        drain_limit: Duration::from_secs(30),
        warm_up: Duration::from_secs(10),
        unmanaged_tolerance: MemMib::ZERO,
        first_session: 7,
    }
}

/// A time.
pub fn seconds(seconds: u64) -> Timestamp {
    Timestamp::from_millis(1000 * seconds)
}

/// A UID.
pub fn uid(text: &str) -> PodUid {
    PodUid::new(text)
}

/// A pod whose name is its UID.
pub fn pod(text: &str) -> PodRef {
    PodRef { uid: uid(text), name: text.into() }
}

/// GPUs of 1000 MiB, named in one text: `A B`.
pub fn inventory(names: &str) -> NodeInventory {
    let devices = names.split_whitespace().zip(0..).map(|(name, index)| Device {
        id: DeviceId::new(name).expect("a legal id"),
        index: DeviceIndex(index),
        model: ModelName::new("T4"),
        total: MemMib::new(1000),
        reserved: MemMib::ZERO,
        kind: DeviceKind::Gpu,
        health: Health::Healthy,
    });
    NodeInventory::new(devices.collect()).expect("a sound inventory")
}

/// An order about the instance of `gpu` at this unit that could not be carried out, to remove it if it has an id.
pub fn failed_mig_order(gpu: &str, start: u32, removed: Option<&str>) -> FailedMigOrder {
    FailedMigOrder {
        gpu: DeviceId::new(gpu).expect("a name"),
        profile: MigProfile::new("1g.6gb"),
        start,
        removed: removed.map(|id| DeviceId::new(id).expect("a name")),
        error: "process 7 uses it".to_owned(),
        hidden: None,
    }
}

/// What an agent sees on the devices of `names`: healthy, and a process of each of `pods`.
pub fn uses(names: &str, pods: &[&str]) -> Vec<DeviceUse> {
    let process = |pod: &&str| ProcessUse { pod: Some(uid(pod)), memory: None };
    let seen = |name: &str| DeviceUse {
        processes: Some(pods.iter().map(process).collect()),
        ..DeviceUse::idle(DeviceId::new(name).expect("a legal id"))
    };
    names.split_whitespace().map(seen).collect()
}

/// A hello of `agent` with the devices of `names`.
pub fn hello(agent: &str, sequence: u64, names: &str) -> NodeReport {
    NodeReport {
        agent: agent.to_owned(),
        session: None,
        sequence,
        inventory: Some(inventory(names)),
        uses: uses(names, &[]),
        allocations_version: None,
    }
}

/// A report of the use of the devices of `names`.
pub fn report(agent: &str, session: u64, sequence: u64, names: &str) -> NodeReport {
    NodeReport { session: Some(session), inventory: None, ..hello(agent, sequence, names) }
}

/// A ledger of one node `n` with the devices of `names`; its agent `x` reports in session 7.
pub fn ledger(names: &str) -> Ledger {
    let ledger = Ledger::new(settings());
    see_node(&ledger, "n");
    let receipt = say(&ledger, &hello("x", 1, names)).expect("a hello is accepted");
    assert_eq!(receipt.session, 7);
    ledger
}

/// The watch sees a node.
pub fn see_node(ledger: &Ledger, name: &str) {
    ledger.see_node(&NodeName::new(name), HostAmount::ZERO, PoolName::new(""));
}

/// The agent of node `n` reports.
pub fn say(ledger: &Ledger, report: &NodeReport) -> Result<Receipt, ReportRefusal> {
    ledger.report("n", report, Timestamp::START)
}

/// A request for a share of one GPU, in millionths.
pub fn share_request(millionths: u64) -> PlacementRequest {
    PlacementRequest {
        gpu: Some(GpuRequest::one(Amount::Fraction(Share::from_millionths(millionths)))),
        host: HostAmount::ZERO,
        host_rule: HostRule::Trusted,
        strategy: Strategy::Policy(Policy::BinPack),
    }
}

/// The pod as the API server shows it: bound to `node`, with that share of `device`.
pub fn bound(pod_uid: &str, node: &str, device: &str, millionths: u64) -> PodFact {
    let share = Share::from_millionths(millionths);
    let demand = Demand { memory: share.of(MemMib::new(1000)), share };
    let id = DeviceId::new(device).expect("a legal id");
    PodFact {
        pod: pod(pod_uid),
        node: Some(NodeName::new(node)),
        host: HostAmount::ZERO,
        is_terminal: false,
        wants_gpu: true,
        request: Some(GpuRequest::one(Amount::Fraction(share)).into()),
        placement: Some(Placement {
            node: NodeName::new(node),
            devices: vec![PlacedDevice { id, demand }],
            isolation: ConfiguredIsolation::None,
            guest: None,
            spots: Vec::new(),
        }),
        bound_by_us: true,
        moves: MoveFact::default(),
        tenure: Tenure::default(),
    }
}

/// The state of a node.
pub fn node(ledger: &Ledger, name: &str) -> NodeState {
    ledger.node(name).expect("the node is known")
}

/// Free share of each device of node `n` in thousandths; holds count as taken.
pub fn free(ledger: &Ledger) -> Vec<u64> {
    let node = node(ledger, "n");
    node.devices().iter().map(|device| device.free().share.millionths() / 1000).collect()
}
