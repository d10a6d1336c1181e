//! Time to choose where a pod starts, and which guests go home, on a node of 8 GPUs with 64 pods.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use engine::hardware::device_class::DeviceClasses;
use engine::hardware::inventory::NodeInventory;
use engine::hardware::pool::{Borrow, ConfiguredIsolation, PoolRule};
use engine::model::node_state::NodeState;
use engine::model::request::{Amount, GpuRequest, Limit, Movable};
use engine::model::reservation::{
    BorrowedMemory, Departure, PlacedDevice, Placement, PodRef, Reservation, ReservationState,
};
use engine::scoring::guests;
use wire::device::{Device, DeviceIndex, DeviceKind, Health};
use wire::ids::{DeviceId, ModelName, NodeName, PodUid};
use wire::units::{Demand, HostAmount, MemMib, Share};

const GPUS: u32 = 8;
const MIB: u64 = 80_000;

fn id(gpu: u32) -> DeviceId {
    DeviceId::new(&format!("GPU-{gpu}")).expect("a legal id")
}

/// A pod with this part of a GPU, in sixteenths, which may be moved.
fn pod(name: &str, home: u32, sixteenths: u64) -> Reservation {
    let share = Share::from_millionths(sixteenths * 62_500);
    let memory = MemMib::new(sixteenths * MIB / 16);
    let mut request = GpuRequest::one(Amount::Fraction(share));
    (request.limit, request.movable) = (Some(Limit::Fraction(Share::WHOLE)), Movable::Restart);
    let devices = vec![PlacedDevice { id: id(home), demand: Demand { memory, share } }];
    let node = NodeName::new("n");
    Reservation {
        pod: PodRef { uid: PodUid::new(name), name: Arc::from(format!("d/{name}")) },
        placement: Placement {
            node,
            devices,
            isolation: ConfiguredIsolation::None,
            guest: None,
            spots: Vec::new(),
        },
        host: HostAmount::ZERO,
        state: ReservationState::Confirmed,
        request: Some(Arc::new(request)),
        tenure: None,
        departure: Departure::Stays,
        borrowed: BorrowedMemory::Free,
        is_hung: false,
    }
}

/// Four full GPUs with 16 pods each; half of these pods are guests of the other four GPUs.
fn node() -> NodeState {
    let mut node = NodeState::new(NodeName::new("n"), MemMib::ZERO);
    let device = |gpu| Device {
        id: id(gpu),
        index: DeviceIndex(gpu),
        model: ModelName::new("H100"),
        total: MemMib::new(MIB),
        reserved: MemMib::ZERO,
        kind: DeviceKind::Gpu,
        health: Health::Healthy,
    };
    let mut classes = DeviceClasses::default();
    let inventory = NodeInventory::new((0..GPUS).map(device).collect()).expect("sound");
    node.replace_inventory(&inventory, &mut classes);
    node.share_by(PoolRule { borrow: Borrow::Compute, ..PoolRule::default() }, &mut classes);
    for at in 0..64 {
        let held = pod(&at.to_string(), at / 16, 1);
        let uid = held.pod.uid.clone();
        node.allocate(held);
        if at % 2 == 0 {
            node.lend(&uid, id(4 + at / 16));
        }
    }
    assert_eq!(node.devices().iter().map(|it| it.guests().len()).sum::<usize>(), 32);
    node
}

fn planner(criterion: &mut Criterion) {
    let node = node();
    let newcomer = pod("newcomer", 7, 1);
    let mut asked = node.clone();
    asked.allocate(newcomer.clone());
    criterion.bench_function("guests/start_place/8 GPUs, 64 pods", |bench| {
        bench.iter(|| guests::start_place(black_box(&asked), black_box(&newcomer)));
    });
    let mut full = node.clone();
    full.allocate(pod("whole", 7, 16));
    let left = |node: &mut NodeState| guests::recall_excess(node).len();
    assert_eq!(left(&mut full.clone()), 8, "all guests of its GPU");
    criterion.bench_function("guests/recall_excess/8 GPUs, 64 pods, 8 go", |bench| {
        bench.iter_batched(|| full.clone(), |mut node| left(&mut node), BatchSize::SmallInput);
    });
    criterion.bench_function("guests/recall_excess/8 GPUs, 64 pods, none goes", |bench| {
        let mut node = node.clone();
        bench.iter(|| left(black_box(&mut node)));
    });
}

criterion_group!(benches, planner);
criterion_main!(benches);
