//! Pools with slots and isolation: no slot twice, isolation wherever a neighbor requires it.

use engine::hardware::inventory::NodeInventory;
use engine::hardware::pool::{
    ConfiguredIsolation, Enforcement, InstanceUse, PoolRule, PoolRules, Replicas,
};
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::Ledger;
use engine::model::device_state::DeviceState;
use engine::model::node_state::NodeState;
use engine::model::policy::Policy;
use engine::model::rejection::Rejection;
use engine::model::request::{Amount, GpuRequest, Isolation};
use proptest::prelude::*;
use wire::device::Device;
use wire::ids::{NodeName, PoolName};
use wire::seen::DeviceUse;
use wire::units::{Demand, MemMib, Share};

use crate::harness::histories::pool;
use crate::harness::ledger::{
    add_node, fraction, gpus, host, pod, request_of, seconds, seen, settings,
};

/// What holds for the tenants of one device, for any past and present pool.
pub(crate) fn check_tenants(node: &NodeState, device: &DeviceState) -> Result<(), TestCaseError> {
    let held = || device.tenants().keys().filter_map(|uid| node.reservation(uid));
    let wants = |isolation| {
        let is_wanted = |request: &std::sync::Arc<GpuRequest>| request.isolation == isolation;
        held().any(|held| held.request.as_ref().is_some_and(is_wanted))
    };
    let tenants = device.tenants().len();
    prop_assert!(!wants(Isolation::Hardware) || tenants == 1, "not alone: {device:?}");
    if wants(Isolation::Memory) && tenants > 1 {
        let all_held = held().all(|held| held.placement.isolation != ConfiguredIsolation::None);
        prop_assert!(all_held, "beside an unisolated tenant: {device:?}");
    }
    check_slots(device)
}

/// Slots are counted exactly, as far as all tenants hold whole ones.
fn check_slots(device: &DeviceState) -> Result<(), TestCaseError> {
    let Some(replicas) = device.rule().replicas else { return Ok(()) };
    let capacity = device.capacity().memory;
    let slots_of = |held: &Demand| {
        let slots = replicas.slots_for(*held, capacity);
        (replicas.amount(slots, capacity) == *held).then_some(slots)
    };
    let Some(taken) = device.tenants().values().map(slots_of).sum::<Option<u32>>() else {
        return Ok(()); // placed under another rule
    };
    prop_assert!(taken <= replicas.count(), "a slot twice: {device:?}");
    if let Some((all, free)) = device.slots()
        && device.on_hold() == Demand::ZERO
        && device.unallocated_use() == MemMib::ZERO
        && !device.is_unread()
    {
        prop_assert_eq!((all, free), (replicas.count(), replicas.count() - taken));
    }
    Ok(())
}

fn slots_of_pool(count: u32) -> PoolRules {
    let replicas = Replicas::new(count);
    let rule = PoolRule { replicas, instances: InstanceUse::Shared, ..PoolRule::default() };
    PoolRules::new([(pool(0), rule)])
}

/// A request that takes one slot or more of a device with these replicas.
fn slot_request() -> impl Strategy<Value = (Amount, u32)> {
    let amount = prop_oneof![
        2 => Just(Amount::SharedSlot),
        2 => (1..=100_000_u64).prop_map(|five| Amount::Fraction(Share::from_millionths(five * 10))),
        1 => (1..=9_999_u64).prop_map(|mib| Amount::Memory(MemMib::new(mib))),
        1 => (1..=1_000_000_u64, 1..=9_999_u64).prop_map(|(share, mib)| {
            Amount::FractionAndMemory(Share::from_millionths(share), MemMib::new(mib))
        }),
    ];
    (amount, 1..=2_u32)
}

proptest! {
    #![proptest_config(super::config())]

    /// Against plain counting: a device of R slots takes a request for k of them exactly as long as k
    /// are left.
    #[test]
    fn slots_are_allocated_until_none_is_left(
        count in Replicas::MIN..=Replicas::MAX,
        mib in 64..10_000_u64,
        steps in prop::collection::vec((slot_request(), any::<bool>()), 1..80),
    ) {
        let ledger = Ledger::new(settings());
        ledger.share_by(slots_of_pool(count));
        let devices = gpus("a", 2, "T4", mib);
        add_node(&ledger, "a", &devices, seconds(0));
        ledger.see_node(&NodeName::new("a"), host(), pool(0));
        let mut held: Vec<(usize, Vec<usize>, u32)> = Vec::new();
        let mut left = [count; 2];
        for (at, ((amount, number), ends_one)) in steps.into_iter().enumerate() {
            if ends_one && let Some((first, on, slots)) = held.pop() {
                ledger.forget(&pod(&format!("p{first}")).uid);
                on.into_iter().for_each(|device| left[device] += slots);
            }
            let exact = match &amount {
                Amount::SharedSlot => Demand { memory: MemMib::ZERO, share: Share::ZERO },
                Amount::Fraction(share) => Demand { memory: MemMib::ZERO, share: *share },
                Amount::Memory(memory) => Demand { memory: *memory, share: Share::ZERO },
                Amount::FractionAndMemory(share, memory) => {
                    Demand { memory: *memory, share: *share }
                }
                other => return Err(TestCaseError::fail(format!("{other:?}"))),
            };
            let all = u64::from(count);
            let slots = (1..=count).find(|slots| {
                let slots = u64::from(*slots);
                exact.memory.mib() * all <= slots * mib
                    && exact.share.millionths() * all <= slots * 1_000_000
            });
            let slots = slots.unwrap_or(count); // more memory than there is: refused below
            let query = request_of(amount, number, Policy::Spread);
            let uid = format!("p{at}");
            let reserved = ledger.reserve(&pod(&uid), "a", &query, seconds(0));
            let fitting = left.iter().filter(|left| **left >= slots).count();
            let fits = exact.memory.mib() <= mib && u32::try_from(fitting).is_ok_and(|n| n >= number);
            prop_assert_eq!(reserved.is_ok(), fits, "{:?} with {:?} left of {}", query, left, count);
            let Ok(placement) = reserved else { continue };
            let on: Vec<usize> = placement.devices.iter().map(|placed| {
                let is_it = |device: &Device| device.id == placed.id;
                devices.devices().iter().position(is_it).expect("a device of the node")
            }).collect();
            on.iter().for_each(|device| left[*device] -= slots);
            held.push((at, on, slots));
            let node = ledger.node("a").expect("it is there");
            for (device, left) in node.devices().iter().zip(left) {
                prop_assert_eq!(device.slots(), Some((count, left)));
            }
        }
        prop_assert_eq!(ledger.audit(), Ok(()));
    }

    /// Against a list of who is where: a pod gets a place exactly as long as some GPU has the room, holds
    /// the isolation that the pod requires, and requires no isolation of the pod that it lacks.
    #[test]
    fn isolation_is_always_kept(steps in prop::collection::vec(step(), 1..80)) {
        let mut bed = Bed::new();
        for (at, step) in steps.iter().enumerate() {
            bed.play(at, step)?;
            for node in bed.ledger.nodes() {
                for device in node.devices() {
                    check_tenants(&node, device)?;
                }
            }
        }
        prop_assert_eq!(bed.ledger.audit(), Ok(()));
    }
}

/// Memory of each of the two GPUs of the bed.
const GPU_MIB: u64 = 10_000;

/// What happens to a node of two GPUs.
#[derive(Clone, Debug)]
enum Step {
    /// A pod requests that many tenths of a GPU.
    Reserve(u64, Isolation),
    /// The pod that came this many pods ago ends.
    Leave(usize),
    /// The pool's isolation changes.
    Protect(Enforcement),
    /// A process outside the ledger uses that much of a GPU, or stops.
    Untracked(usize, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let isolation = prop_oneof![
        3 => Just(Isolation::None),
        3 => Just(Isolation::Memory),
        1 => Just(Isolation::Hardware),
    ];
    prop_oneof![
        6 => (prop::sample::select(vec![1, 1, 2, 4, 10]), isolation)
            .prop_map(|(tenths, isolation)| Step::Reserve(tenths, isolation)),
        3 => (0..6_usize).prop_map(Step::Leave),
        2 => prop::sample::select(vec![Enforcement::None, Enforcement::Mps, Enforcement::Driver])
            .prop_map(Step::Protect),
        1 => (0..2_usize, prop::sample::select(vec![0, 0, 1_000])).prop_map(|(gpu, mib)| {
            Step::Untracked(gpu, mib)
        }),
    ]
}

/// A tenant as the list has it.
struct Tenant {
    uid: String,
    gpu: usize,
    tenths: u64,
    isolation: Isolation,
    is_held: bool,
}

/// A node of two GPUs, and a list of its tenants that is independent of the ledger.
struct Bed {
    ledger: Ledger,
    devices: NodeInventory,
    enforcement: Enforcement,
    untracked: [u64; 2],
    tenants: Vec<Tenant>,
    reports: u64,
}

impl Bed {
    fn new() -> Self {
        let ledger = Ledger::new(settings());
        let guards = [Enforcement::None, Enforcement::Mps, Enforcement::Driver];
        let rule = |enforcement| PoolRule { enforcement, ..PoolRule::default() };
        ledger.share_by(PoolRules::new(guards.map(|it| (PoolName::new(it.name()), rule(it)))));
        let devices = gpus("a", 2, "T4", GPU_MIB);
        add_node(&ledger, "a", &devices, seconds(0));
        Self {
            ledger,
            devices,
            enforcement: Enforcement::None,
            untracked: [0; 2],
            tenants: Vec::new(),
            reports: 1,
        }
    }

    fn play(&mut self, at: usize, step: &Step) -> Result<(), TestCaseError> {
        match step {
            Step::Reserve(tenths, isolation) => self.reserve(at, *tenths, *isolation)?,
            Step::Leave(ago) => {
                if let Some(last) = self.tenants.len().checked_sub(1 + ago) {
                    let gone = self.tenants.remove(last);
                    self.ledger.forget(&pod(&gone.uid).uid);
                }
            }
            Step::Protect(enforcement) => {
                self.enforcement = *enforcement;
                self.ledger.see_node(
                    &NodeName::new("a"),
                    host(),
                    PoolName::new(enforcement.name()),
                );
            }
            Step::Untracked(gpu, mib) => {
                self.untracked[*gpu] = *mib;
                self.report();
            }
        }
        Ok(())
    }

    /// The agent sees only use without a reservation.
    fn report(&mut self) {
        self.reports += 1;
        let uses = self.devices.devices().iter().zip(self.untracked).map(|(device, mib)| {
            DeviceUse { used: Some(MemMib::new(mib)), ..seen(&device.id, []) }
        });
        let report = NodeReport {
            allocations_version: None,
            agent: "agent-a".to_owned(),
            session: None,
            sequence: self.reports,
            inventory: Some(self.devices.clone()),
            uses: uses.collect(),
        };
        self.ledger.report("a", &report, seconds(0)).expect("the agent says hello again");
    }

    /// Whether a GPU would take such a pod.
    fn admits(&self, gpu: usize, tenths: u64, isolation: Isolation) -> bool {
        let there = || self.tenants.iter().filter(|tenant| tenant.gpu == gpu);
        let taken: u64 = there().map(|tenant| tenant.tenths).sum();
        let is_room = taken + tenths <= 10
            && (taken + tenths) * GPU_MIB / 10 + self.untracked[gpu] <= GPU_MIB;
        let is_held = self.enforcement != Enforcement::None;
        is_room
            && (tenths == 10
                || match isolation {
                    Isolation::None => {
                        is_held || there().all(|tenant| tenant.isolation != Isolation::Memory)
                    }
                    Isolation::Memory => {
                        let all_held = there().all(|tenant| tenant.is_held);
                        is_held && all_held && self.untracked[gpu] == 0
                    }
                    Isolation::Hardware => false,
                })
    }

    fn reserve(
        &mut self,
        at: usize,
        tenths: u64,
        isolation: Isolation,
    ) -> Result<(), TestCaseError> {
        let share = fraction(tenths * 100_000);
        let mut query = request_of(share, 1, Policy::BinPack);
        query.gpu.as_mut().expect("a GPU is requested").isolation = isolation;
        let fitting: Vec<usize> =
            (0..2).filter(|gpu| self.admits(*gpu, tenths, isolation)).collect();
        let uid = format!("pod-{at}");
        let reserved = self.ledger.reserve(&pod(&uid), "a", &query, seconds(0));
        prop_assert_eq!(reserved.is_ok(), !fitting.is_empty(), "{:?}: {:?}", query, reserved);
        let Ok(placement) = reserved else { return Ok(()) };
        let mut devices = self.devices.devices().iter();
        let gpu = devices.position(|device| device.id == placement.devices[0].id);
        let gpu = gpu.filter(|gpu| fitting.contains(gpu)).expect("one of those that fit");
        let is_held = tenths == 10 || self.enforcement != Enforcement::None;
        prop_assert_eq!(placement.isolation != ConfiguredIsolation::None, is_held);
        self.tenants.push(Tenant { uid, gpu, tenths, isolation, is_held });
        Ok(())
    }
}

/// One GPU under MPS with a tenant that needs all to be held: what the pool's rule makes of the next.
#[test]
fn a_pool_that_loses_isolation_adds_no_neighbors_to_pods_that_require_it() {
    let ledger = Ledger::new(settings());
    let guarded = PoolRule { enforcement: Enforcement::Mps, ..PoolRule::default() };
    ledger.share_by(PoolRules::new([(pool(0), guarded)]));
    let devices: NodeInventory = gpus("a", 1, "T4", 1000);
    add_node(&ledger, "a", &devices, seconds(0));
    let name = NodeName::new("a");
    ledger.see_node(&name, host(), pool(0));
    let quarter = request_of(fraction(250_000), 1, Policy::BinPack);
    let mut needy = quarter.clone();
    needy.gpu.as_mut().expect("a GPU is requested").isolation = Isolation::Memory;
    ledger.reserve(&pod("needy"), "a", &needy, seconds(0)).expect("it is isolated");
    assert_eq!(ledger.answers(&quarter, &["a"])[0].err(), None);

    let events = ledger.see_node(&name, host(), pool(1));
    assert_eq!(events.len(), 1, "pods that waited may fit now: {events:?}");
    assert_eq!(ledger.answers(&quarter, &["a"])[0].err(), Some(Rejection::IsolatedTenant));
    assert_eq!(ledger.answers(&needy, &["a"])[0].err(), Some(Rejection::NoIsolation));
    assert_eq!(ledger.see_node(&name, host(), pool(1)), [], "nothing changed");
    ledger.forget(&pod("needy").uid);
    assert_eq!(ledger.answers(&quarter, &["a"])[0].err(), None);
}
