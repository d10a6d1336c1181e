//! Facts from outside: twice, late, in another order, after a restart, and beyond all reason.

use std::collections::BTreeMap;

use engine::hardware::inventory::NodeInventory;
use engine::hardware::pool::ConfiguredIsolation;
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::per_node::Gauge;
use engine::ledger::nodes::state::Ledger;
use engine::model::reservation::{PlacedDevice, Placement, Tenure};
use proptest::prelude::*;
use wire::device::{Device, DeviceIndex, DeviceKind, Health};
use wire::ids::{ModelName, NodeName, PodUid, PoolName};
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{Demand, HostAmount, MemMib, MilliCpu, Share};

use crate::harness::histories::{Event, NODES, Player, history, inventory, query, snapshots};
use crate::harness::ledger::{
    DEVICE_MIB, add_node, device_id, gpus, host, pod, seconds, seen, settings,
};

/// One fact of the API server.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a history has few of them")]
enum Fact {
    Node(usize),
    NodeGone(usize),
    Bound(PodFact),
    End(PodUid),
}

fn apply(ledger: &Ledger, fact: &Fact) {
    match fact {
        Fact::Node(at) => {
            ledger.see_node(&NodeName::new(NODES[*at]), host(), PoolName::new("pool"));
        }
        Fact::NodeGone(at) => ledger.lose_node(&NodeName::new(NODES[*at])),
        Fact::Bound(fact) => drop(ledger.see_pod(fact, seconds(0))),
        Fact::End(uid) => drop(ledger.end_pod(uid, seconds(0))),
    }
}

/// The life of a pod as a watch shows it: pending, bound, perhaps ended.
fn life_of_pod() -> impl Strategy<Value = (usize, u64, bool, bool)> {
    (0..NODES.len(), 1..600_000_u64, any::<bool>(), any::<bool>())
}

fn facts_of_pod(at: usize, (node, share, is_placed, ends): (usize, u64, bool, bool)) -> Vec<Fact> {
    let share = Share::from_millionths(share);
    let demand = Demand { memory: share.of(MemMib::new(DEVICE_MIB)), share };
    let id = device_id(&format!("{}-{}", NODES[node], at % 2));
    let placement = Placement {
        node: NodeName::new(NODES[node]),
        devices: vec![PlacedDevice { id, demand }],
        isolation: ConfiguredIsolation::None,
        guest: None,
        spots: Vec::new(),
    };
    let bound = PodFact {
        pod: pod(&format!("pod-{at}")),
        node: Some(NodeName::new(NODES[node])),
        host: HostAmount { cpu: MilliCpu::new(100), memory: MemMib::new(100) },
        is_terminal: false,
        request: None,
        wants_gpu: true,
        placement: is_placed.then_some(placement),
        bound_by_us: false,
        moves: MoveFact::default(),
        tenure: Tenure::default(),
    };
    let pending = PodFact { node: None, placement: None, ..bound.clone() };
    let mut facts = vec![Fact::Bound(pending), Fact::Bound(bound.clone())];
    if ends {
        facts.push(Fact::Bound(PodFact { is_terminal: true, ..bound.clone() }));
        facts.push(Fact::End(bound.pod.uid));
    }
    facts
}

/// The lives of some nodes and pods, each in its own order.
fn lives() -> impl Strategy<Value = Vec<Vec<Fact>>> {
    let nodes = prop::collection::vec(any::<bool>(), NODES.len());
    let pods = prop::collection::vec(life_of_pod(), 0..8);
    (nodes, pods).prop_map(|(nodes, pods)| {
        let nodes = nodes.into_iter().enumerate().map(|(at, stays)| {
            if stays { vec![Fact::Node(at)] } else { vec![Fact::Node(at), Fact::NodeGone(at)] }
        });
        let pods = pods.into_iter().enumerate().map(|(at, life)| facts_of_pod(at, life));
        nodes.chain(pods).collect()
    })
}

/// Mixes lives: each keeps its order, and pods' facts come again later as `choices` says.
fn interleave(lives: &[Vec<Fact>], choices: &[prop::sample::Index]) -> Vec<Fact> {
    let mut rest: Vec<&[Fact]> = lives.iter().map(Vec::as_slice).collect();
    let mut reported: Vec<Fact> = Vec::new();
    let mut choices = choices.iter().cycle();
    while rest.iter().any(|life| !life.is_empty()) {
        let choice = choices.next().expect("cycled choices do not end");
        let open: Vec<usize> = (0..rest.len()).filter(|at| !rest[*at].is_empty()).collect();
        let at = open[choice.index(open.len())];
        reported.push(rest[at][0].clone());
        rest[at] = &rest[at][1..];
        let again = reported[choice.index(reported.len())].clone();
        if choice.index(3) == 0 && matches!(again, Fact::Bound(_) | Fact::End(_)) {
            reported.push(again);
        }
    }
    reported
}

/// Reports of the existing nodes: nothing runs. Long after everything.
fn settle(ledger: &Ledger) {
    for node in ledger.nodes() {
        let name = node.name().as_str();
        let devices = gpus(name, 2, "T4", DEVICE_MIB);
        let hello = NodeReport {
            allocations_version: None,
            agent: "settler".to_owned(),
            session: None,
            sequence: 1,
            uses: devices.devices().iter().map(|device| seen(&device.id, [])).collect(),
            inventory: Some(devices),
        };
        if node.state() != engine::model::node_state::NodeReporting::Gone {
            ledger.report(name, &hello, seconds(50)).expect("a hello is accepted");
        }
    }
    ledger.tick(seconds(55));
}

fn ledger_after(facts: &[Fact]) -> Ledger {
    let ledger = Ledger::new(settings());
    for fact in facts {
        apply(&ledger, fact);
    }
    settle(&ledger);
    ledger
}

/// Amounts up to the limits of the types, and around those of a device.
fn absurd() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(u64::MAX), 0..30_000_u64, any::<u64>()]
}

fn wild_placement(node: usize) -> impl Strategy<Value = Placement> {
    let device = (0..NODES.len(), 0..6_usize, 0..4_u32, absurd(), absurd());
    prop::collection::vec(device, 0..4).prop_map(move |devices| Placement {
        node: NodeName::new(NODES[node]),
        devices: devices
            .into_iter()
            .map(|(node, kind, index, memory, share)| PlacedDevice {
                id: device_id(&format!("{}-{kind}-{index}", NODES[node])),
                demand: Demand {
                    memory: MemMib::new(memory),
                    share: Share::from_millionths(share),
                },
            })
            .collect(),
        isolation: ConfiguredIsolation::None,
        guest: None,
        spots: Vec::new(),
    })
}

fn wild_pod() -> impl Strategy<Value = PodFact> {
    (0..NODES.len())
        .prop_flat_map(|node| {
            (0..8_usize, absurd(), absurd(), prop::option::of(wild_placement(node)), any::<bool>())
                .prop_map(move |(at, cpu, memory, placement, is_terminal)| PodFact {
                    pod: pod(&format!("pod-{at}-0")),
                    node: Some(NodeName::new(NODES[node])),
                    host: HostAmount { cpu: MilliCpu::new(cpu), memory: MemMib::new(memory) },
                    is_terminal: is_terminal && at % 4 == 0,
                    request: None,
                    wants_gpu: true,
                    placement,
                    bound_by_us: false,
                    moves: MoveFact::default(),
                    tenure: Tenure::default(),
                })
        })
        .boxed()
}

/// Devices of any node, any memory, any kind; the id says neither.
fn wild_devices() -> impl Strategy<Value = Vec<Device>> {
    let device = (0..NODES.len(), 0..6_usize, 0..4_u32, absurd(), absurd(), any::<bool>());
    prop::collection::vec(device, 0..5).prop_map(|devices| {
        let device = |(node, kind, index, total, reserved, is_mig)| Device {
            id: device_id(&format!("{}-{kind}-{index}", NODES[node])),
            index: DeviceIndex(index),
            model: ModelName::new(["T4", "A100", ""][kind % 3]),
            total: MemMib::new(total),
            reserved: MemMib::new(reserved),
            kind: if is_mig { DeviceKind::MigParent } else { DeviceKind::Gpu },
            health: Health::Healthy,
        };
        devices.into_iter().map(device).collect()
    })
}

fn wild_uses() -> impl Strategy<Value = Vec<DeviceUse>> {
    let process =
        (prop::option::of(0..8_usize), prop::option::of(absurd())).prop_map(|(pod, memory)| {
            ProcessUse {
                pod: pod.map(|at| PodUid::new(format!("pod-{at}-0"))),
                memory: memory.map(MemMib::new),
            }
        });
    let processes = prop::option::of(prop::collection::vec(process, 0..3));
    let device = (0..NODES.len(), 0..6_usize, 0..4_u32, prop::option::of(absurd()), processes);
    prop::collection::vec(device, 0..5).prop_map(|uses| {
        let seen =
            |(node, kind, index, used, processes): (usize, _, _, Option<u64>, _)| DeviceUse {
                id: device_id(&format!("{}-{kind}-{index}", NODES[node])),
                used: used.map(MemMib::new),
                busy_percent: Some(255),
                health: Health::Healthy,
                processes,
            };
        uses.into_iter().map(seen).collect()
    })
}

#[derive(Clone, Debug)]
enum Wild {
    Event(Event),
    Pod(PodFact),
    Report(usize, Option<Vec<Device>>, Vec<DeviceUse>),
}

fn wild() -> impl Strategy<Value = Vec<Wild>> {
    let report = (0..NODES.len(), prop::option::of(wild_devices()), wild_uses());
    let step = prop_oneof![
        3 => crate::harness::histories::event().prop_map(Wild::Event),
        2 => wild_pod().prop_map(Wild::Pod),
        2 => report.prop_map(|(at, devices, uses)| Wild::Report(at, devices, uses)),
    ];
    prop::collection::vec(step, 1..40)
}

fn wild_report(player: &Player, at: usize, devices: Option<Vec<Device>>, uses: Vec<DeviceUse>) {
    let inventory = devices.and_then(|devices| NodeInventory::new(devices).ok());
    let report = NodeReport {
        agent: "wild".to_owned(),
        session: None,
        sequence: u64::MAX,
        inventory,
        uses,
        allocations_version: None,
    };
    drop(player.ledger.report(NODES[at], &report, player.now));
}

proptest! {
    #![proptest_config(super::config())]

    #[test]
    fn facts_give_the_same_ledger_twice_and_in_any_object_order(
        lives in lives(),
        one in prop::collection::vec(any::<prop::sample::Index>(), 40),
        other in prop::collection::vec(any::<prop::sample::Index>(), 40),
    ) {
        let (one, other) = (interleave(&lives, &one), interleave(&lives, &other));
        let (left, right) = (ledger_after(&one), ledger_after(&other));
        prop_assert_eq!(snapshots(&left), snapshots(&right), "{:?}\n{:?}", one, other);
        for fact in one.iter().filter(|fact| !matches!(fact, Fact::Node(_) | Fact::NodeGone(_))) {
            apply(&left, fact);
        }
        prop_assert_eq!(snapshots(&left), snapshots(&right));
    }

    #[test]
    fn a_rebuilt_ledger_equals_the_live_one(history in history()) {
        let mut live = Player::new();
        for event in &history {
            live.play(event);
        }
        for fact in live.bound.values() {
            live.ledger.see_pod(fact, live.now); // the watch has caught up
        }
        live.settle();
        live.ledger.stand_down_all(); // chosen again, from the pods that wait
        let mut rebuilt = Player::new_like(&live);
        for at in &live.present {
            rebuilt.play(&Event::SeeNode(*at));
        }
        for fact in live.bound.values() {
            rebuilt.ledger.see_pod(fact, rebuilt.now);
        }
        rebuilt.settle();
        prop_assert_eq!(snapshots(&live.ledger), snapshots(&rebuilt.ledger));
    }

    #[test]
    fn no_outside_fact_stops_the_ledger(
        steps in wild(),
        queries in prop::collection::vec(query(), 1..3),
    ) {
        let mut player = Player::new();
        for step in steps {
            match step {
                Wild::Event(event) => drop(player.play(&event)),
                Wild::Pod(fact) => drop(player.ledger.see_pod(&fact, player.now)),
                Wild::Report(at, devices, uses) => wild_report(&player, at, devices, uses),
            }
            prop_assert_eq!(player.ledger.audit(), Ok(()));
            for query in &queries {
                super::check_answers(&player.ledger, query)?;
            }
            let afresh = player.ledger.packing_by(&mut Gauge::default());
            prop_assert_eq!(player.ledger.packing(), afresh);
        }
        for query in &queries {
            for node in NODES {
                let answer = player.ledger.answers(query, &[node]).remove(0);
                let reserved = player.ledger.reserve(&pod("probe"), node, query, player.now);
                prop_assert!(answer.is_err() || reserved.is_ok(), "{:?}", reserved);
                player.ledger.forget(&PodUid::new("probe"));
            }
        }
    }

    #[test]
    fn an_overallocated_device_offers_nothing_and_the_others_all(
        facts in prop::collection::vec(wild_pod(), 1..6),
    ) {
        let ledger = Ledger::new(settings());
        for node in NODES {
            add_node(&ledger, node, &inventory(node, 0), seconds(0));
        }
        for fact in &facts {
            ledger.see_pod(fact, seconds(0));
        }
        for node in ledger.nodes() {
            for device in node.devices() {
                if device.is_overallocated() {
                    prop_assert_eq!(device.free(), Demand::ZERO);
                } else {
                    let left = device.capacity().checked_sub(device.allocated());
                    prop_assert_eq!(Some(device.free()), left);
                }
            }
        }
        let placed: BTreeMap<PodUid, &PodFact> =
            facts.iter().filter(|fact| !fact.is_terminal).map(|f| (f.pod.uid.clone(), f)).collect();
        prop_assert!(placed.len() <= 8);
    }
}
