//! What facts from outside may do to a node's books, and what they may not.

use super::super::device::{DeviceIndex, ModelName};
use super::super::reservation::{PlacedDevice, Protection};
use super::*;

/// A node with two GPUs, `A` and `B`, of 1000 MiB, whose agent has reported.
fn node() -> NodeLedger {
    let mut node = NodeLedger::new(NodeName::new("n"), MemMib::new(10));
    node.see_node(cores(8000), PoolName::new(""));
    node.replace_inventory(&inventory(&["A", "B"], 1000), &mut DeviceClasses::default());
    node.observe(&[clean("A"), clean("B")], Timestamp::START);
    node
}

fn cores(milli: u64) -> HostAmount {
    HostAmount { cpu: MilliCpu::new(milli), memory: MemMib::new(milli) }
}

fn id(text: &str) -> DeviceId {
    DeviceId::new(text).unwrap()
}

fn uid(text: &str) -> PodUid {
    PodUid::new(text)
}

fn inventory(ids: &[&str], mib: u64) -> NodeInventory {
    let devices = ids.iter().zip(0..).map(|(name, index)| Device {
        id: id(name),
        index: DeviceIndex(index),
        model: ModelName::new("T4"),
        total: MemMib::new(mib),
        reserved: MemMib::ZERO,
        kind: DeviceKind::Gpu,
        health: Health::Healthy,
    });
    NodeInventory::new(devices.collect()).unwrap()
}

fn clean(device: &str) -> DeviceUse {
    DeviceUse {
        id: id(device),
        used: Some(MemMib::ZERO),
        busy_percent: None,
        health: Health::Healthy,
        processes: Some(Vec::new()),
    }
}

/// A device in use by processes, given as pod and memory.
fn used(device: &str, mib: u64, processes: &[(Option<&str>, Option<u64>)]) -> DeviceUse {
    let process = |(pod, memory): &(Option<&str>, Option<u64>)| ProcessUse {
        pod: pod.map(uid),
        memory: memory.map(MemMib::new),
    };
    DeviceUse {
        used: Some(MemMib::new(mib)),
        processes: Some(processes.iter().map(process).collect()),
        ..clean(device)
    }
}

fn demand(mib: u64, millionths: u64) -> Demand {
    Demand { memory: MemMib::new(mib), share: Share::from_millionths(millionths) }
}

fn placement(device: &str, demand: Demand) -> Placement {
    let devices = vec![PlacedDevice { id: id(device), demand }];
    Placement { node: NodeName::new("n"), devices, protection: Protection::None }
}

fn held(pod: &str, device: &str, demand: Demand) -> Reservation {
    Reservation {
        pod: PodRef { uid: uid(pod), name: pod.into() },
        placement: placement(device, demand),
        host: cores(1000),
        state: ReservationState::Confirmed,
    }
}

fn free(node: &NodeLedger) -> Vec<(u64, u64)> {
    let free = node.devices().iter().map(DeviceBooks::free);
    free.map(|free| (free.memory.mib(), free.share.millionths())).collect()
}

#[test]
fn amounts_beyond_any_type_overbook_their_device_and_nothing_else() {
    let mut node = node();
    node.book(held("p", "A", demand(u64::MAX, u64::MAX)));
    node.book(held("q", "A", demand(1, 1)));
    node.book(Reservation {
        host: HostAmount { cpu: MilliCpu::new(u64::MAX), memory: MemMib::new(u64::MAX) },
        ..held("r", "A", demand(u64::MAX, 0))
    });
    node.observe(&[used("A", 700, &[(Some("p"), Some(700))]), clean("B")], Timestamp::START);
    assert_eq!(node.audit(), Ok(()));
    assert_eq!(free(&node), [(0, 0), (1000, 1_000_000)]);
    assert!(node.devices()[0].is_overbooked() && !node.devices()[1].is_overbooked());
    assert_eq!(node.host_free(), HostAmount::ZERO);
    for pod in ["p", "q", "r"] {
        assert!(node.remove(&uid(pod)));
    }
    node.observe(&[clean("A"), clean("B")], Timestamp::START);
    assert_eq!(free(&node), [(1000, 1_000_000), (1000, 1_000_000)]);
}
