//! Nodes and requests of the tests, written as text.
//!
//! A node is a list of devices, `A:500/1000@T4`: name, free and total memory in MiB, and model (by
//! default `GPU`). The free share is the same part as the free memory, or follows a comma:
//! `A:500/1000,0.2`. One tenant has what is not free. `A!` is unhealthy; `A=1g.5gb` is a MIG
//! instance of that profile, of a parent `mig` that is added behind all others.
//!
//! A request is a list of words: `fraction=0.5`, `memory=300`, `whole`, `mig=1g.5gb`, `slot`,
//! `count=2`, `model=T4`, `cpu=1000`, `isolation=memory`.
//!
//! The rule of a pool is such a list too: `replicas=4`, `shared` (MIG instances), `mps`, `driver`.

use std::num::NonZeroU32;

use crate::hardware::device_class::DeviceClasses;
use crate::hardware::inventory::NodeInventory;
use crate::hardware::pool::{ConfiguredIsolation, Enforcement, InstanceUse, PoolRule, Replicas};
use crate::model::fit::{CompiledRequest, HostRule};
use crate::model::node_state::NodeState;
use crate::model::request::{Amount, GpuRequest, Isolation};
use crate::model::reservation::{
    BorrowedMemory, Departure, PlacedDevice, Placement, PodRef, Reservation, ReservationState,
};
use crate::waste::compiled_mix::CompiledMix;
use crate::waste::request_mix::{Mix, RequestType, Tally};
use crate::waste::supply::NodeShapes;
use wire::device::{Device, DeviceIndex, DeviceKind, Health, ModelFilter};
use wire::ids::{DeviceId, MigProfile, ModelName, NodeName, PodUid, PoolName};
use wire::units::{Demand, HostAmount, MemMib, MilliCpu, Share, Timestamp};

/// Millionths of a decimal fraction.
fn millionths(text: &str) -> Share {
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let millionths = number(whole) * 1_000_000 + number(&format!("{rest:0<6}"));
    Share::from_millionths(millionths)
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("`{text}` is not a number"))
}

/// One device of the text, and what is allocated on it.
fn device(text: &str, index: u32) -> (Device, Demand) {
    let (name, rest) = text.split_once(':').expect("a device is `name:free/total`");
    let (amounts, model) = rest.split_once('@').unwrap_or((rest, "GPU"));
    let (memory, free_share) = match amounts.split_once(',') {
        Some((memory, share)) => (memory, Some(millionths(share))),
        None => (amounts, None),
    };
    let (free, total) = memory.split_once('/').expect("memory is `free/total`");
    let (free, total) = (MemMib::new(number(free)), MemMib::new(number(total)));
    let free_share = free_share.or_else(|| Share::ratio(free, total)).unwrap_or(Share::ZERO);
    let parent = DeviceId::new("mig").expect("a legal id");
    let (name, kind) = match name.split_once('=') {
        Some((name, profile)) => {
            (name, DeviceKind::MigInstance { parent, profile: MigProfile::new(profile) })
        }
        None if name == "mig" => (name, DeviceKind::MigParent),
        None => (name, DeviceKind::Gpu),
    };
    let health = if name.ends_with('!') { Health::Unhealthy } else { Health::Healthy };
    let device = Device {
        id: DeviceId::new(name.trim_end_matches('!')).expect("a legal id"),
        index: DeviceIndex(index),
        model: ModelName::new(model),
        total,
        reserved: MemMib::ZERO,
        kind,
        health,
    };
    let allocated = Demand {
        memory: total.checked_sub(free).expect("free memory is a part of the total"),
        share: Share::WHOLE.checked_sub(free_share).expect("free share is a part of one"),
    };
    (device, allocated)
}

/// The node of the text, with 16 cores free, and the classes of its devices.
pub fn node(text: &str) -> (NodeState, DeviceClasses) {
    let mut classes = DeviceClasses::default();
    let node = node_of(text, &mut classes);
    (node, classes)
}

/// The same as one of several nodes.
pub fn node_of(text: &str, classes: &mut DeviceClasses) -> NodeState {
    let mut words: Vec<&str> = text.split_whitespace().collect();
    if text.contains('=') {
        words.push("mig:8000/8000");
    }
    let (devices, allocated): (Vec<Device>, Vec<Demand>) =
        words.iter().zip(0..).map(|(word, index)| device(word, index)).unzip();
    let mut node = NodeState::new(NodeName::new("n"), MemMib::ZERO);
    let host = HostAmount { cpu: MilliCpu::new(16_000), memory: MemMib::new(65_536) };
    node.see_node(host, PoolName::new(""));
    let ids: Vec<DeviceId> = devices.iter().map(|device| device.id.clone()).collect();
    let inventory = NodeInventory::new(devices).expect("a sound inventory");
    node.replace_inventory(&inventory, classes);
    node.observe(&[], Timestamp::START);
    for (id, demand) in ids.into_iter().zip(allocated).filter(|(_, held)| *held != Demand::ZERO) {
        node.allocate(tenant(&format!("of-{id}"), vec![PlacedDevice { id, demand }]));
    }
    node
}

/// The rule of the text.
pub fn rule(text: &str) -> PoolRule {
    let mut rule = PoolRule::default();
    for word in text.split_whitespace() {
        match word {
            "shared" => rule.instances = InstanceUse::Shared,
            "mps" => rule.enforcement = Enforcement::Mps,
            "driver" => rule.enforcement = Enforcement::Driver,
            other => {
                let count = other.strip_prefix("replicas=").map(number).expect("a word of a rule");
                let count = u32::try_from(count).expect("few slots");
                rule.replicas = Some(Replicas::new(count).expect("a legal number of slots"));
            }
        }
    }
    rule
}

fn isolation_of(name: &str) -> Isolation {
    match name {
        "memory" => Isolation::Memory,
        "hardware" => Isolation::Hardware,
        other => panic!("`{other}` is not an isolation"),
    }
}

/// A pod with `devices` and no host resources.
pub fn tenant(name: &str, devices: Vec<PlacedDevice>) -> Reservation {
    Reservation {
        pod: PodRef { uid: PodUid::new(name), name: name.into() },
        placement: Placement {
            node: NodeName::new("n"),
            devices,
            isolation: ConfiguredIsolation::None,
            guest: None,
            spots: Vec::new(),
        },
        host: HostAmount::ZERO,
        state: ReservationState::Confirmed,
        request: None,
        tenure: None,
        departure: Departure::Stays,
        borrowed: BorrowedMemory::Free,
        is_hung: false,
    }
}

/// The GPU request of the text, and its CPU.
pub fn request(text: &str) -> (Option<GpuRequest>, MilliCpu) {
    let mut amount = None;
    let (mut count, mut models, mut cpu) =
        (NonZeroU32::MIN, ModelFilter::default(), MilliCpu::ZERO);
    let mut isolation = Isolation::None;
    for word in text.split_whitespace() {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        match key {
            "fraction" => {
                amount = Some(match amount {
                    Some(Amount::Memory(mib)) => Amount::FractionAndMemory(millionths(value), mib),
                    _ => Amount::Fraction(millionths(value)),
                });
            }
            "memory" => {
                let mib = MemMib::new(number(value));
                amount = Some(match amount {
                    Some(Amount::Fraction(share)) => Amount::FractionAndMemory(share, mib),
                    _ => Amount::Memory(mib),
                });
            }
            "whole" => amount = Some(Amount::Whole),
            "mig" => amount = Some(Amount::MigInstance(MigProfile::new(value))),
            "slot" => amount = Some(Amount::SharedSlot),
            "count" => count = value.parse().expect("a count is a number above zero"),
            "model" => models = ModelFilter::new(value.split('|')),
            "cpu" => cpu = MilliCpu::new(number(value)),
            "isolation" => isolation = isolation_of(value),
            other => panic!("`{other}` is not a word of a request"),
        }
    }
    let gpu =
        amount.map(|amount| GpuRequest { models, isolation, ..GpuRequest::several(amount, count) });
    (gpu, cpu)
}

/// The request of the text, compiled for `classes`; the host is checked.
pub fn compiled_request(text: &str, classes: &DeviceClasses) -> CompiledRequest {
    let (gpu, cpu) = request(text);
    let host = HostAmount { cpu, memory: MemMib::ZERO };
    CompiledRequest::new(gpu, host, HostRule::Checked, classes)
}

/// A mix of requests, separated by `;`, each with its weight in front: `3 fraction=0.5; 1 whole`.
pub fn mix(text: &str) -> Mix {
    let counts = text.split(';').filter(|part| !part.trim().is_empty()).map(|part| {
        let (weight, request_text) = part.trim().split_once(' ').expect("a weight and a request");
        let (gpu, cpu) = request(request_text);
        let tally = Tally { pods: number(weight), memory: 0 };
        (RequestType::new(gpu.as_ref(), cpu), tally)
    });
    Mix::of(&counts.collect())
}

/// The mix of the text, compiled for a cluster of this one node.
pub fn compiled(text: &str, node: &NodeState, classes: &DeviceClasses) -> CompiledMix {
    let mut node_shapes = NodeShapes::default();
    node_shapes.count(node);
    CompiledMix::of(&mix(text), classes, &node_shapes)
}
