//! Random lives of pods with MIG instances that are made on demand: orders that are carried out late, in
//! part or not at all, agents that restart, nodes that reboot, restarts of the ledger. After each step no
//! two pods have one instance, and a Binding names an instance that is there and that no other pod uses.
//! When all is quiet each pod runs on its own instance, and no other instance is left.
//!
//! Half of the seeds are of a model without a table, whose agent lists other things now and then.
//!
//! `MIG_STEPS` is the number of steps of all seeds (20,000 without it), `MIG_SEED` the first seed.

use std::collections::{BTreeMap, BTreeSet};

use engine::hardware::inventory::NodeInventory;
use engine::hardware::pool::{MigUse, PoolRule};
use engine::hardware::spots::Spot;
use engine::ledger::change::commits::ToMake;
use engine::ledger::change::facts::PodFact;
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::Ledger;
use engine::model::event::LedgerEvent;
use engine::model::node_state::InstanceOrders;
use engine::model::policy::Policy;
use engine::model::request::{Amount, GpuRequest, Isolation};
use engine::model::reservation::Placement;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use wire::device::{Device, DeviceDetails, DeviceIndex, DeviceKind, Health, MakeableProfile, Slot};
use wire::ids::{DeviceId, MigProfile, ModelName, NodeName, PodUid, PoolName};
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{MemMib, Share, Timestamp};

use crate::harness::ledger::{bound, host, pod, request_of, restarted};

const GPUS: [&str; 2] = ["GPU-a", "GPU-b"];
const NODE: &str = "n";

/// Profiles of an A30, and one with media engines: name, MiB, size, starts.
const PROFILES: [(&str, u64, u32, &[u32]); 4] = [
    ("1g.6gb", 5_952, 1, &[0, 1, 2, 3]),
    ("1g.6gb+me", 5_952, 1, &[0, 1, 2, 3]),
    ("2g.12gb", 11_968, 2, &[0, 2]),
    ("4g.24gb", 24_000, 4, &[0]),
];

#[expect(clippy::disallowed_methods, reason = "chosen for a run by hand")]
fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
}

fn id(text: &str) -> DeviceId {
    DeviceId::new(text).expect("a legal id")
}

/// Multiprocessors of the profiles, in their order.
const SM_COUNTS: [u32; 4] = [14, 14, 28, 56];

fn size_of(profile: &MigProfile) -> u32 {
    PROFILES.iter().find(|it| it.0 == profile.as_str()).expect("it is one of them").2
}

/// A pod as the API server has it.
#[derive(Debug)]
struct LivePod {
    request: GpuRequest,
    written: Placement,
    /// The instance on which its container runs.
    runs_on: Option<DeviceId>,
    /// In which run of the node it was bound, and its UUID written last.
    written_in: u64,
}

/// The node: what is there of MIG, and what its agent does.
#[derive(Debug, Default)]
struct Agent {
    boots: u64,
    made: u64,
    instances: BTreeMap<DeviceId, Spot>,
    orders: Option<InstanceOrders>,
    /// Being removed: no report names it any more.
    removing: BTreeSet<DeviceId>,
    name: u64,
    sequence: u64,
    /// Whether its GPUs are of a model without a table; and what its list says, which gives a geometry, another one,
    /// or none.
    is_unlisted: bool,
    list: u32,
}

impl Agent {
    fn inventory(&self) -> NodeInventory {
        let device = |id: DeviceId, index, total, kind| Device {
            id,
            index: DeviceIndex(index),
            model: ModelName::new(if self.is_unlisted { "NVIDIA B30" } else { "NVIDIA A30" }),
            total: MemMib::new(total),
            reserved: MemMib::ZERO,
            kind,
            health: Health::Healthy,
        };
        let mut details = BTreeMap::new();
        let rows = PROFILES.iter().zip(SM_COUNTS);
        let rows = rows.map(|((name, mib, size, starts), count)| MakeableProfile {
            profile: MigProfile::new(*name),
            memory: MemMib::new(*mib),
            sm_count: (self.list > 0).then_some(count * self.list),
            size: *size,
            starts: starts.to_vec(),
        });
        let mig_profiles: Vec<MakeableProfile> = rows.collect();
        let mut devices = Vec::new();
        for (gpu, index) in GPUS.iter().zip(0..) {
            let more =
                DeviceDetails { mig_profiles: mig_profiles.clone(), ..DeviceDetails::default() };
            details.insert(id(gpu), more);
            devices.push(device(id(gpu), index, 24_576, DeviceKind::MigParent));
        }
        for (uuid, spot) in self.seen() {
            let size = size_of(&spot.profile);
            let slot = Some(Slot { start: spot.start, size });
            let more = DeviceDetails { slot, made_here: true, ..DeviceDetails::default() };
            details.insert(uuid.clone(), more);
            let (parent, profile) = (spot.gpu.clone(), spot.profile.clone());
            let kind = DeviceKind::MigInstance { parent, profile };
            devices.push(device(uuid.clone(), 0, 5_952 * u64::from(size), kind));
        }
        NodeInventory::placed(devices, &details).expect("a sound inventory")
    }

    fn seen(&self) -> impl Iterator<Item = (&DeviceId, &Spot)> {
        self.instances.iter().filter(|(uuid, _)| !self.removing.contains(*uuid))
    }

    /// Makes an instance, as NVML does: not over another one.
    fn make(&mut self, spot: &Spot) -> bool {
        let mask = |it: &Spot| Slot { start: it.start, size: size_of(&it.profile) }.units();
        let has_media = |it: &Spot| it.profile.has_media();
        let mut others = self.instances.values().filter(|it| it.gpu == spot.gpu);
        let is_free =
            others.all(|it| mask(it) & mask(spot) == 0 && !(has_media(it) && has_media(spot)));
        if is_free {
            self.made += 1;
            self.instances.insert(id(&format!("MIG-{}", self.made)), spot.clone());
        }
        is_free
    }
}

struct Bed {
    rng: ChaCha8Rng,
    now: u64,
    ledger: Ledger,
    restarts: u64,
    created: u64,
    agent: Agent,
    pods: BTreeMap<PodUid, LivePod>,
    /// Reserved, and not posted yet.
    binding: BTreeMap<PodUid, GpuRequest>,
    /// Processes of pods that have ended, with the instance.
    left: BTreeMap<PodUid, DeviceId>,
    is_quiet: bool,
    counts: BTreeMap<&'static str, u64>,
}

fn new_ledger(restarts: u64) -> Ledger {
    restarted(restarts, PoolRule { mig: MigUse::OnDemand, ..PoolRule::default() })
}

impl Bed {
    fn new(seed: u64) -> Self {
        let mut bed = Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            now: 0,
            ledger: new_ledger(0),
            restarts: 0,
            created: 0,
            agent: Agent { is_unlisted: seed % 4 >= 2, ..Agent::default() },
            pods: BTreeMap::new(),
            binding: BTreeMap::new(),
            left: BTreeMap::new(),
            is_quiet: false,
            counts: BTreeMap::new(),
        };
        bed.begin();
        bed
    }

    fn at(&self) -> Timestamp {
        Timestamp::from_millis(self.now)
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn one_in(&mut self, many: u32) -> bool {
        !self.is_quiet && self.rng.random_ratio(1, many)
    }

    fn any<T: Clone>(&mut self, all: &[T]) -> Option<T> {
        all.choose(&mut self.rng).cloned()
    }

    /// The lists of nodes and pods.
    fn begin(&mut self) {
        self.ledger.see_node(&NodeName::new(NODE), host(), PoolName::new("p"));
        let all: Vec<PodUid> = self.pods.keys().cloned().collect();
        all.iter().for_each(|uid| self.see(uid));
        self.ledger.set_listed(self.at());
        self.report();
    }

    fn see(&mut self, uid: &PodUid) {
        let live = &self.pods[uid];
        let request = Some(live.request.clone().into());
        let fact = PodFact { request, ..bound(uid.as_str(), &live.written) };
        let events = self.ledger.see_pod(&fact, self.at());
        self.hear(&events);
    }

    /// Writes the new UUIDs of instances that were made again.
    fn hear(&mut self, events: &[LedgerEvent]) {
        for event in events {
            assert!(!matches!(event, LedgerEvent::PlacementEdited { .. }), "{event:?}");
            assert!(!matches!(event, LedgerEvent::Overallocated { .. }), "{event:?}");
            let LedgerEvent::MadeAgain { pod } = event else { continue };
            let held = self.ledger.reservation(&pod.uid).expect("it is bound");
            if self.one_in(4) {
                continue; // the write is lost; the watch shows the old one again
            }
            if let Some(live) = self.pods.get_mut(&pod.uid) {
                (live.written, live.written_in) = (held.placement, self.agent.boots);
                self.count("written again");
            }
        }
    }

    fn report(&mut self) {
        self.agent.sequence += 1;
        if self.agent.is_unlisted && self.one_in(5) {
            self.agent.list = self.rng.random_range(0..4);
            self.count("another list");
        }
        let inventory = self.agent.inventory();
        let uses = inventory.devices().iter().map(|device| {
            let live = self.pods.iter().filter(|(_, it)| it.runs_on.as_ref() == Some(&device.id));
            let left = self.left.iter().filter(|(_, on)| **on == device.id);
            let all = live.map(|(uid, _)| uid).chain(left.map(|(uid, _)| uid));
            let process =
                |uid: &PodUid| ProcessUse { pod: Some(uid.clone()), memory: Some(MemMib::new(1)) };
            let processes: Vec<ProcessUse> = all.map(process).collect();
            let used = MemMib::new(u64::try_from(processes.len()).expect("few"));
            match device.kind {
                DeviceKind::MigParent => {
                    let idle = DeviceUse::idle(device.id.clone());
                    DeviceUse { used: None, processes: None, ..idle }
                }
                _ => DeviceUse {
                    used: Some(used),
                    processes: Some(processes),
                    ..DeviceUse::idle(device.id.clone())
                },
            }
        });
        let uses = uses.collect();
        let report = NodeReport {
            allocations_version: None,
            agent: format!("agent-{}", self.agent.name),
            session: None,
            sequence: self.agent.sequence,
            inventory: Some(inventory),
            uses,
        };
        let receipt = self.ledger.report(NODE, &report, self.at()).expect("it is taken");
        self.hear(&receipt.events);
        let orders = self.ledger.instance_orders(NODE);
        if !self.one_in(6) {
            self.agent.orders = orders; // else the reply is lost, and the last orders stand
        }
    }

    /// Carries out one order, or begins to.
    fn obey(&mut self) {
        if let Some(uuid) = self.agent.removing.pop_first() {
            self.agent.instances.remove(&uuid); // it finishes what it began
            return self.count("removed");
        }
        let Some(orders) = self.agent.orders.clone() else { return };
        let busy = |uuid: &DeviceId| {
            self.pods.values().any(|it| it.runs_on.as_ref() == Some(uuid))
                || self.left.values().any(|on| on == uuid)
        };
        let to_remove: Vec<DeviceId> = orders
            .remove
            .iter()
            .filter(|uuid| {
                // One that is also to be there stays.
                let spot = self.agent.instances.get(*uuid);
                spot.is_some_and(|spot| !orders.make.contains(spot)) && !busy(uuid)
            })
            .cloned()
            .collect();
        if let Some(uuid) = self.any(&to_remove) {
            self.agent.removing.insert(uuid);
            return;
        }
        let is_missing = |spot: &Spot| !self.agent.seen().any(|(_, it)| it == spot);
        let to_make: Vec<Spot> = orders.make.iter().filter(|it| is_missing(it)).cloned().collect();
        if let Some(spot) = self.any(&to_make)
            && !self.one_in(3)
            && self.agent.make(&spot)
        {
            self.count("made");
        }
    }

    fn bind(&mut self) {
        let names = ["1g.6gb", "1g.6gb+me", "2g.12gb", "4g.24gb"];
        let profile = MigProfile::new(*names.choose(&mut self.rng).expect("some"));
        let count = if profile.as_str().starts_with("1g.6gb") && self.one_in(4) { 2 } else { 1 };
        let is_part = self.agent.is_unlisted && self.rng.random_range(0..8) == 4;
        let (amount, count) = match is_part {
            true => (Amount::Fraction(Share::from_millionths(250_000)), 1),
            false => (Amount::MigInstance(profile), count),
        };
        self.created += 1;
        let uid = PodUid::new(format!("p{}", self.created));
        let mut query = request_of(amount, count, Policy::BinPack);
        if let Some(gpu) = query.gpu.as_mut().filter(|_| is_part) {
            gpu.isolation = Isolation::Hardware;
        }
        let reserved = self.ledger.reserve_for_bind(&pod(uid.as_str()), NODE, &query, self.at());
        if reserved.is_ok() {
            if is_part {
                self.count("part");
            }
            self.binding.insert(uid, query.gpu.expect("it requests a GPU"));
        }
    }

    /// Posts a Binding once the instances are there, or gives it up.
    fn post(&mut self) {
        let all: Vec<PodUid> = self.binding.keys().cloned().collect();
        let Some(uid) = self.any(&all) else { return };
        let to_post = self.ledger.to_post(&uid).expect("it is reserved");
        if to_post.instance != ToMake::Nothing || to_post.is_gone {
            if self.one_in(10) {
                self.binding.remove(&uid);
                self.ledger.forget(&uid);
                self.count("given up");
            }
            return;
        }
        let request = self.binding.remove(&uid).expect("it is there");
        if self.one_in(10) {
            self.ledger.forget(&uid); // refused
            return;
        }
        self.posted_rightly(&uid, &to_post.placement);
        let live = LivePod {
            request,
            written: to_post.placement,
            runs_on: None,
            written_in: self.agent.boots,
        };
        self.pods.insert(uid.clone(), live);
        self.count("bound");
        if self.one_in(4) {
            self.see(&uid); // the answer was lost
        } else {
            self.ledger.confirm(&uid);
        }
    }

    /// What a Binding names is there, and no other pod has it. A node that has rebooted since its last
    /// report is not asked.
    fn posted_rightly(&self, uid: &PodUid, placement: &Placement) {
        for placed in &placement.devices {
            let mut others = self.pods.values().flat_map(|it| &it.written.devices);
            assert!(others.all(|it| it.id != placed.id), "{uid}: {placed:?} is another pod's");
            assert!(!self.left.values().any(|on| *on == placed.id), "{uid}: {placed:?} is in use");
            let is_there = self.agent.seen().any(|(uuid, _)| *uuid == placed.id);
            assert!(is_there || self.agent.sequence == 0, "{uid}: {placed:?} is not there");
        }
    }

    /// Kubelet starts a container on the instance that is written on its pod.
    fn start(&mut self) {
        let all = self.pods.iter().filter(|(_, it)| it.runs_on.is_none());
        let all: Vec<PodUid> = all.map(|(uid, _)| uid.clone()).collect();
        let Some(uid) = self.any(&all) else { return };
        let on = self.pods[&uid].written.devices[0].id.clone();
        let is_there = self.agent.instances.contains_key(&on);
        assert!(
            is_there || self.pods[&uid].written_in < self.agent.boots,
            "{uid} starts on {on}, which is not there"
        );
        let is_others = self.pods.values().any(|it| it.runs_on.as_ref() == Some(&on));
        assert!(!is_others, "{uid} starts on {on}, which is another pod's");
        if is_there {
            self.pods.get_mut(&uid).expect("it is there").runs_on = Some(on);
            self.count("started");
        }
    }

    fn end(&mut self) {
        let all: Vec<PodUid> = self.pods.keys().cloned().collect();
        let Some(uid) = self.any(&all) else { return };
        let live = self.pods.remove(&uid).expect("it is there");
        if let Some(on) = live.runs_on.filter(|_| self.one_in(2)) {
            self.left.insert(uid.clone(), on);
        }
        self.ledger.end_pod(&uid, self.at());
    }

    fn reboot(&mut self) {
        self.count("reboots");
        self.agent = Agent {
            boots: self.agent.boots + 1,
            made: self.agent.made,
            name: self.agent.name + 1,
            is_unlisted: self.agent.is_unlisted,
            list: self.agent.list,
            ..Agent::default()
        };
        self.left.clear();
        self.pods.values_mut().for_each(|live| live.runs_on = None);
        self.report();
    }

    fn restart_ledger(&mut self) {
        self.count("restarts");
        self.restarts += 1;
        self.ledger = new_ledger(self.restarts);
        self.binding.clear();
        self.begin();
    }

    fn step(&mut self) {
        self.now += 100;
        match self.rng.random_range(0..100) {
            0..18 => self.bind(),
            18..42 => self.post(),
            42..56 => self.start(),
            56..66 => self.end(),
            66..82 => self.report(),
            82..94 => self.obey(),
            94 => self.restart_ledger(),
            95 if self.one_in(3) => self.reboot(),
            96 => self.agent.name += 1,
            97 => self.ledger.tick(self.at()).clear(),
            _ => {
                let ended = self.left.keys().next().cloned();
                ended.and_then(|uid| self.left.remove(&uid));
            }
        }
        self.check();
    }

    fn check(&self) {
        let node = self.ledger.node(NODE).expect("it is there");
        assert_eq!(node.audit(), Ok(()));
        let mut taken: BTreeMap<DeviceId, u32> = BTreeMap::new();
        for held in node.reservations().values() {
            for spot in held.placement.spots.iter().flatten() {
                let own = Slot { start: spot.start, size: size_of(&spot.profile) }.units();
                let taken = taken.entry(spot.gpu.clone()).or_default();
                assert_eq!(*taken & own, 0, "two pods have {spot:?}");
                *taken |= own;
            }
        }
    }

    /// When nothing fails any more, each pod runs on its instance, and no other is left.
    fn settle(&mut self) {
        self.is_quiet = true;
        self.left.clear();
        for _ in 0..60 {
            self.now += 1_000;
            self.report();
            (0..4).for_each(|_| self.obey());
            self.post();
            let all: Vec<PodUid> = self.pods.keys().cloned().collect();
            all.iter().for_each(|uid| self.see(uid));
            self.start();
            self.check();
        }
        assert!(self.binding.is_empty(), "{:?}", self.binding.keys());
        let waits = self.pods.iter().find(|(_, live)| live.runs_on.is_none());
        assert!(waits.is_none(), "{waits:?} of {:?}", self.agent);
        let used: BTreeSet<&DeviceId> =
            self.pods.values().flat_map(|it| it.written.devices.iter().map(|it| &it.id)).collect();
        let there: BTreeSet<&DeviceId> = self.agent.instances.keys().collect();
        assert_eq!(used, there);
    }
}

#[test]
fn pods_run_on_instances_of_their_own_whatever_fails() {
    let (steps, first) = (number("MIG_STEPS", 20_000), number("MIG_SEED", 0));
    const STEPS: u64 = 400;
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in first..first + steps.div_ceil(STEPS) {
        let run = std::panic::AssertUnwindSafe(|| {
            let mut bed = Bed::new(seed);
            (0..STEPS).for_each(|_| bed.step());
            bed.settle();
            bed.counts
        });
        let found = std::panic::catch_unwind(run);
        let found = found.unwrap_or_else(|_| panic!("seed {seed}: MIG_SEED={seed} MIG_STEPS=1"));
        found.into_iter().for_each(|(what, times)| *counts.entry(what).or_default() += times);
    }
    let each = [
        "bound",
        "started",
        "made",
        "removed",
        "reboots",
        "restarts",
        "written again",
        "given up",
        "another list",
        "part",
    ];
    assert!(steps < 10_000 || each.iter().all(|what| counts.contains_key(what)), "{counts:?}");
}
