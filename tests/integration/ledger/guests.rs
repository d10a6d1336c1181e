//! Random lives of pods that borrow: where they start, who calls them home, lost and late writes, crashes
//! of containers, restarts of the ledger; and what they use of memory, which every second seed lends. After
//! each step the invariants of guests are checked, on the ledger and on what really runs.
//!
//! `GUEST_STEPS` is the number of steps (20,000 without it), `GUEST_SEED` the first of the seeds.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use engine::hardware::inventory::NodeInventory;
use engine::hardware::pool::{Borrow, ConfiguredIsolation, InstanceUse, PoolRule};
use engine::ledger::change::commits::ToPost;
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::queries::PlacementRequest;
use engine::model::device_state::DeviceState;
use engine::model::policy::Policy;
use engine::model::request::{Amount, GpuRequest, Limit, Movable};
use engine::model::reservation::{
    BorrowedMemory, Departure, Guest, MoveHome, PlacedDevice, Placement, ReservationState,
};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use wire::device::{Device, DeviceIndex, DeviceKind, Health};
use wire::ids::{DeviceId, MigProfile, ModelName, NodeName, PodUid, PoolName};
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{Demand, MemMib, Share, Timestamp};

use crate::harness::ledger::{
    DEVICE_MIB, add_node, bound, device_id, fraction, gpus, host, pod, request_of, restarted,
};

const NODES: [&str; 2] = ["a", "b"];
const GPUS: u32 = 3;

/// Most pods at a time.
const PODS: usize = 14;

#[expect(clippy::disallowed_methods, reason = "chosen for a run by hand")]
fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
}

/// A pod as the API server has it, and what runs of it.
#[derive(Clone, Debug)]
struct LivePod {
    request: GpuRequest,
    written: Placement,
    cpu_milli: u64,
    actual_cpu_milli: u64,
    container: u64,
    runs_on: Vec<DeviceId>,
    /// What its processes use of the memory of each device; `None` if it has none.
    uses: Option<MemMib>,
}

/// Processes of a container that has ended, which are still there for so many steps.
#[derive(Debug)]
struct Leftover {
    uid: PodUid,
    on: DeviceId,
    steps: u32,
}

impl LivePod {
    /// What it requests of a device, or uses if that is more.
    fn takes(&self) -> MemMib {
        let requested = self.written.devices[0].demand.memory;
        self.uses.map_or(requested, |used| used.max(requested))
    }
}

/// The node of a device.
fn node_of(id: &DeviceId) -> String {
    let node = NODES.iter().find(|node| id.as_str().contains(&format!("{node}-")));
    (*node.expect("its name says so")).to_owned()
}

struct Bed {
    rng: ChaCha8Rng,
    now: u64,
    ledger: Ledger,
    restarts: u64,
    sequence: u64,
    created: u64,
    pods: BTreeMap<PodUid, LivePod>,
    /// Reserved, and not posted yet.
    binding: BTreeMap<PodUid, GpuRequest>,
    leftovers: Vec<Leftover>,
    /// Those that cannot be moved.
    stuck: BTreeSet<PodUid>,
    /// Restarts that were ordered to take memory back.
    giving_back: BTreeSet<PodUid>,
    /// Devices on which some pod took what others request, until it gives that back.
    overdrawn: BTreeSet<DeviceId>,
    lends_memory: bool,
    shares_instances: bool,
    /// Devices that no inventory has now.
    missing: BTreeSet<DeviceId>,
    counts: BTreeMap<&'static str, u64>,
}

fn new_ledger(restarts: u64, lends_memory: bool, shares_instances: bool) -> Ledger {
    let borrow = match lends_memory {
        true => Borrow::Memory { most: Share::WHOLE },
        false => Borrow::Compute,
    };
    let instances = if shares_instances { InstanceUse::Shared } else { InstanceUse::Whole };
    restarted(restarts, PoolRule { borrow, instances, ..PoolRule::default() })
}

/// A GPU in MIG mode with as many instances as other nodes have GPUs.
fn instances(node: &str) -> NodeInventory {
    let parent = Device {
        id: device_id(&format!("{node}-gpu")),
        index: DeviceIndex(0),
        model: ModelName::new("A100"),
        total: MemMib::new(DEVICE_MIB * u64::from(GPUS)),
        reserved: MemMib::ZERO,
        kind: DeviceKind::MigParent,
        health: Health::Healthy,
    };
    let instance = |index| Device {
        id: device_id(&format!("{node}-{index}")),
        index: DeviceIndex(index + 1),
        total: MemMib::new(DEVICE_MIB),
        kind: DeviceKind::MigInstance {
            parent: parent.id.clone(),
            profile: MigProfile::new("2g.20gb"),
        },
        ..parent.clone()
    };
    let devices = (0..GPUS).map(instance).chain([parent.clone()]).collect();
    NodeInventory::new(devices).expect("inventories in tests are sound")
}

impl Bed {
    fn new(seed: u64) -> Self {
        let mut bed = Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            now: 0,
            ledger: new_ledger(0, seed % 2 == 1, seed % 5 > 2),
            restarts: 0,
            sequence: 0,
            created: 0,
            pods: BTreeMap::new(),
            binding: BTreeMap::new(),
            leftovers: Vec::new(),
            stuck: BTreeSet::new(),
            giving_back: BTreeSet::new(),
            overdrawn: BTreeSet::new(),
            lends_memory: seed % 2 == 1,
            shares_instances: seed % 5 > 2,
            missing: BTreeSet::new(),
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
        self.rng.random_ratio(1, many)
    }

    /// The lists of nodes and pods, and the first reports.
    fn begin(&mut self) {
        for node in NODES {
            self.ledger.see_node(&NodeName::new(node), host(), PoolName::new("p"));
        }
        let all: Vec<PodUid> = self.pods.keys().cloned().collect();
        all.iter().for_each(|uid| self.see(uid, false));
        self.ledger.set_listed(self.at());
        for node in NODES {
            self.report(node, true);
        }
    }

    fn fact(&self, uid: &PodUid, is_of_other: bool) -> PodFact {
        let live = &self.pods[uid];
        let leaving = live.written.guest.as_ref().and_then(|guest| guest.leaving.as_ref());
        let has_left = leaving.is_some_and(|leaving| {
            *leaving.container != *live.container.to_string()
                && live.cpu_milli != leaving.cpu_milli
                && live.actual_cpu_milli == live.cpu_milli
        });
        let moves = MoveFact { has_left, is_of_other, is_of_earlier: false };
        let request = Some(live.request.clone().into());
        PodFact { request, moves, ..bound(uid.as_str(), &live.written) }
    }

    fn see(&mut self, uid: &PodUid, is_of_other: bool) {
        let fact = self.fact(uid, is_of_other);
        let borrowed = |bed: &Self| bed.ledger.reservation(uid).map(|held| held.borrowed);
        let before = borrowed(self);
        self.ledger.see_pod(&fact, self.at());
        if before.is_some() && borrowed(self).is_some() {
            assert_eq!(borrowed(self), before, "{uid}: seeing it again changes nothing");
        }
    }

    fn report(&mut self, node: &str, is_hello: bool) {
        self.sequence += 1;
        let all = match self.shares_instances {
            true => instances(node),
            false => gpus(node, GPUS, "A100", DEVICE_MIB),
        };
        let there = all.devices().iter().filter(|it| !self.missing.contains(&it.id));
        let inventory = NodeInventory::new(there.cloned().collect()).expect("it is sound");
        let process = |(uid, memory): (&PodUid, MemMib)| ProcessUse {
            pod: Some(uid.clone()),
            memory: Some(memory),
        };
        let shared = inventory.devices().iter().filter(|it| it.kind != DeviceKind::MigParent);
        let uses = shared.map(|device| {
            let live = self.pods.iter().filter(|(_, it)| it.runs_on.contains(&device.id));
            let live = live.filter_map(|(uid, it)| Some((uid, it.uses?)));
            let left = self.leftovers.iter().filter(|it| it.on == device.id);
            let left = left.map(|it| (&it.uid, MemMib::new(1)));
            let processes: Vec<ProcessUse> = live.chain(left).map(process).collect();
            let mut used = processes.iter().filter_map(|it| it.memory);
            DeviceUse {
                used: used.try_fold(MemMib::ZERO, MemMib::checked_add),
                processes: Some(processes),
                ..DeviceUse::idle(device.id.clone())
            }
        });
        let uses = uses.collect();
        let report = NodeReport {
            allocations_version: None,
            agent: format!("agent-{node}"),
            session: None,
            sequence: self.sequence,
            inventory: Some(inventory),
            uses,
        };
        let before = self.ledger.recalled(Some(node)).len();
        let taken = self.ledger.report(node, &report, self.at());
        assert!(taken.is_ok() || !is_hello, "{taken:?}");
        if self.ledger.recalled(Some(node)).len() > before {
            self.count("called home by a report");
        }
    }

    /// A device is not there any more, or is again.
    fn vanish(&mut self) {
        let node = *NODES.choose(&mut self.rng).expect("some");
        let device = device_id(&format!("{node}-{}", self.rng.random_range(0..GPUS)));
        if !self.missing.remove(&device) && self.missing.is_empty() {
            self.missing.insert(device);
        }
        self.report(node, false);
    }

    fn request(&mut self) -> PlacementRequest {
        let part = |millionths| Amount::Fraction(Share::from_millionths(millionths));
        let amounts = [part(125_000), part(250_000), part(500_000), Amount::Whole];
        let amount = amounts.choose(&mut self.rng).expect("some").clone();
        let count = if amount == Amount::Whole && self.one_in(4) { 2 } else { 1 };
        let query = request_of(amount.clone(), count, Policy::BinPack);
        let mut gpu = GpuRequest::several(amount.clone(), NonZeroU32::new(count).expect("some"));
        if amount != Amount::Whole && !self.one_in(4) {
            gpu.limit = Some(Limit::Fraction(Share::WHOLE));
            gpu.movable = Movable::Restart;
        }
        PlacementRequest { gpu: Some(gpu), ..query }
    }

    fn bind(&mut self) {
        if self.pods.len() + self.binding.len() >= PODS {
            return;
        }
        self.created += 1;
        let uid = PodUid::new(format!("p{}", self.created));
        let query = self.request();
        let node = NODES.choose(&mut self.rng).expect("some");
        let reserved = self.ledger.reserve_for_bind(&pod(uid.as_str()), node, &query, self.at());
        let Ok((placement, _)) = reserved else { return };
        let gpu = query.gpu.expect("it requests a GPU");
        self.count(match placement.guest.is_some() {
            true if self.shares_instances => "guests of instances",
            true => "guests",
            false => "at home",
        });
        self.binding.insert(uid, gpu);
    }

    /// Posts a Binding once no guest is left, or gives it up.
    fn post(&mut self) {
        let Some(uid) = self.any(|bed| bed.binding.keys().cloned().collect()) else { return };
        let request = self.binding[&uid].clone();
        let ToPost { placement, waits_for, is_short, .. } =
            self.ledger.to_post(&uid).expect("it is reserved");
        if !waits_for.is_empty() || is_short {
            let is_stuck = waits_for.iter().any(|uid| self.stays(uid));
            if is_stuck || waits_for.is_empty() || self.one_in(12) {
                self.count("given up");
                self.binding.remove(&uid);
                self.ledger.forget(&uid);
            }
            return;
        }
        self.binding.remove(&uid);
        if self.one_in(8) {
            self.ledger.forget(&uid); // refused
            return;
        }
        let live = LivePod {
            runs_on: placement.runs_on(),
            request,
            written: placement,
            cpu_milli: 10,
            actual_cpu_milli: 10,
            container: 1,
            uses: self.rng.random::<bool>().then_some(MemMib::new(1)),
        };
        self.pods.insert(uid.clone(), live);
        if self.one_in(4) {
            self.see(&uid, false); // the answer was lost
        } else {
            self.ledger.confirm(&uid);
        }
    }

    fn any<T>(&mut self, all: impl Fn(&Self) -> Vec<T>) -> Option<T> {
        let mut all = all(self);
        if all.is_empty() {
            return None;
        }
        let at = self.rng.random_range(0..all.len());
        Some(all.swap_remove(at))
    }

    /// One step of a move: what `control/bind/recall.rs` does, with writes that are lost.
    fn go_home(&mut self) {
        let Some(recalled) = self.any(|bed| bed.ledger.recalled(None)) else { return };
        let uid = recalled.uid;
        let held = self.ledger.reservation(&uid).expect("it is recalled");
        let guest = held.placement.guest.clone().expect("it is a guest");
        if held.state != ReservationState::Confirmed || !self.pods.contains_key(&uid) {
            return;
        }
        if self.stuck.contains(&uid) {
            return self.settle(&uid);
        }
        if guest.leaving.is_none() && self.ledger.let_stay(&uid) {
            return self.count("stayed");
        }
        if guest.leaving.is_none() && self.ledger.waits_for_memory_at_home(&uid) {
            return self.count("waited for memory");
        }
        if self.one_in(7) {
            return self.cannot_move(&uid);
        }
        let (is_applied, is_answered) = (!self.one_in(5), !self.one_in(5));
        let live = self.pods.get_mut(&uid).expect("it is there");
        let is_written = guest.leaving.is_some() && live.written.guest.as_ref() == Some(&guest);
        match &guest.leaving {
            Some(leaving) if is_written && live.cpu_milli == leaving.cpu_milli => {
                if is_applied {
                    live.cpu_milli = if live.cpu_milli > 1 { live.cpu_milli - 1 } else { 2 };
                    self.count("ordered");
                }
            }
            Some(_) if is_written => self.see(&uid, false),
            earlier => {
                let container = live.container.to_string().into();
                let leaving = MoveHome { container, cpu_milli: live.cpu_milli };
                self.ledger.write_move(&uid, Some(leaving.clone()));
                if is_applied {
                    live.written.guest = Some(Guest { leaving: Some(leaving), ..guest.clone() });
                } else if is_answered && earlier.is_none() {
                    self.ledger.write_move(&uid, None); // a conflict
                }
            }
        }
    }

    /// The resize is refused, so what was written is taken back, and the pod keeps what it has.
    fn cannot_move(&mut self, uid: &PodUid) {
        let live = self.pods.get_mut(uid).expect("it is there");
        let leaving = live.written.guest.as_ref().and_then(|guest| guest.leaving.clone());
        if leaving.is_some_and(|leaving| live.cpu_milli != leaving.cpu_milli) {
            return; // it was resized
        }
        if let Some(guest) = &mut live.written.guest {
            guest.leaving = None;
        }
        self.ledger.write_move(uid, None);
        self.stuck.insert(uid.clone());
    }

    fn settle(&mut self, uid: &PodUid) {
        let held = self.ledger.reservation(uid).expect("it is there");
        let is_settling = held.departure == Departure::Settling;
        if !is_settling && !self.ledger.settle_guest(uid) || self.one_in(3) {
            return; // later, or the write fails
        }
        let held = self.ledger.reservation(uid).expect("it is there");
        self.pods.get_mut(uid).expect("it is there").written = held.settled_placement();
        self.ledger.settled(uid);
        self.stuck.remove(uid);
        self.count("settled");
    }

    /// Kubelet carries out a resize, or a container ends by its own fault.
    fn restart_container(&mut self) {
        let is_due = |live: &LivePod| live.cpu_milli != live.actual_cpu_milli;
        let due: Vec<PodUid> =
            self.pods.iter().filter(|(_, it)| is_due(it)).map(|(uid, _)| uid.clone()).collect();
        let uid = match due.first() {
            Some(uid) if !self.one_in(3) => Some(uid.clone()),
            _ => self.any(|bed| bed.pods.keys().cloned().collect()),
        };
        let Some(uid) = uid else { return };
        let is_crash = self.one_in(6);
        let live = self.pods.get_mut(&uid).expect("it is there");
        if live.cpu_milli == live.actual_cpu_milli && !is_crash {
            return;
        }
        let left = std::mem::replace(&mut live.runs_on, live.written.runs_on());
        live.container += 1;
        live.actual_cpu_milli = live.cpu_milli;
        let next = self.rng.random::<bool>().then_some(MemMib::new(1));
        let had_process = std::mem::replace(&mut live.uses, next).is_some();
        if had_process && !is_crash {
            self.leave(&uid, &left);
        }
        self.count("restarts");
    }

    fn leave(&mut self, uid: &PodUid, on: &[DeviceId]) {
        for on in on {
            let steps = self.rng.random_range(0..6);
            self.leftovers.push(Leftover { uid: uid.clone(), on: on.clone(), steps });
        }
    }

    fn end(&mut self) {
        let Some(uid) = self.any(|bed| bed.pods.keys().cloned().collect()) else { return };
        let live = self.pods.remove(&uid).expect("it is there");
        if live.uses.is_some() {
            self.leave(&uid, &live.runs_on);
        }
        self.ledger.end_pod(&uid, self.at());
    }

    /// A program takes other memory: what nobody requests who runs there, or sometimes more.
    fn allocate(&mut self) {
        let Some(uid) = self.any(|bed| bed.pods.keys().cloned().collect()) else { return };
        let is_greedy = self.one_in(4);
        let part = self.rng.random_range(1..=DEVICE_MIB);
        let live = &self.pods[&uid];
        let ([on], [placed]) = (&live.runs_on[..], &live.written.devices[..]) else { return };
        let (on, requested) = (on.clone(), placed.demand.memory);
        if self.missing.contains(&on) {
            return;
        }
        let may_borrow = self.lends_memory && live.request.movable == Movable::Restart;
        let memory = if may_borrow { MemMib::new(part) } else { MemMib::new(part).min(requested) };
        let others =
            self.pods.iter().filter(|(it, live)| **it != uid && live.runs_on.contains(&on));
        let used = others.clone().filter_map(|(_, it)| it.uses).map(MemMib::mib).sum::<u64>();
        if used + memory.mib() > DEVICE_MIB {
            return; // its allocation fails
        }
        let coming = self.coming_to(&on);
        let taken: u64 = others.map(|(_, live)| live.takes().mib()).sum();
        let is_overdrawn = taken + coming + memory.max(requested).mib() > DEVICE_MIB;
        if memory > requested && is_overdrawn && !is_greedy {
            return;
        }
        self.count(if memory > requested { "borrowed" } else { "allocated" });
        if memory > requested && is_overdrawn {
            self.overdrawn.insert(on.clone());
        }
        self.pods.get_mut(&uid).expect("it is there").uses = Some(memory);
        if memory > requested {
            self.report(&node_of(&on), false); // an agent lists at once what has grown
        }
    }

    /// What those request who are on their way to a device.
    fn coming_to(&self, on: &DeviceId) -> u64 {
        let node = self.ledger.node(&node_of(on)).expect("it is there");
        let device = node.devices().iter().find(|it| it.device().id == *on);
        let running = device.into_iter().flat_map(DeviceState::running);
        let coming = running.filter(|(it, _)| !self.runs_on(it, on));
        coming.map(|(_, demand)| demand.memory.mib()).sum()
    }

    fn runs_on(&self, uid: &PodUid, on: &DeviceId) -> bool {
        self.pods.get(uid).is_some_and(|live| live.runs_on.contains(on))
    }

    /// One step of taking memory back: what `control/bind/take_back.rs` does.
    fn give_back(&mut self) {
        for due in self.ledger.to_give_back(None) {
            self.ledger.note_borrowed(&due.uid, BorrowedMemory::GivingBack);
            self.giving_back.insert(due.uid);
        }
        let Some(uid) = self.any(|bed| bed.giving_back.iter().cloned().collect()) else { return };
        if self.ledger.owes_memory(&uid).is_none() || !self.pods.contains_key(&uid) {
            self.ledger.end_giving_back(&uid);
            self.giving_back.remove(&uid);
            return self.count("gave back");
        }
        if self.one_in(10) {
            self.ledger.note_borrowed(&uid, BorrowedMemory::Kept);
            self.giving_back.remove(&uid);
            return self.count("kept");
        }
        let live = self.pods.get_mut(&uid).expect("it is there");
        if live.cpu_milli == live.actual_cpu_milli {
            live.cpu_milli = if live.cpu_milli > 1 { live.cpu_milli - 1 } else { 2 };
        }
    }

    fn restart(&mut self) {
        self.restarts += 1;
        self.ledger = new_ledger(self.restarts, self.lends_memory, self.shares_instances);
        self.giving_back.clear();
        self.binding.clear();
        self.stuck.clear();
        self.begin();
    }

    fn step(&mut self) {
        self.now += self.rng.random_range(0..300);
        for leftover in &mut self.leftovers {
            leftover.steps = leftover.steps.saturating_sub(1);
        }
        self.leftovers.retain(|it| it.steps > 0);
        let is_over = |id: &DeviceId| self.taken_on(id) + self.coming_to(id) > DEVICE_MIB;
        let over = self.overdrawn.iter().filter(|id| is_over(id)).cloned().collect();
        self.overdrawn = over;
        match self.rng.random_range(0..100) {
            0..16 => self.bind(),
            16..30 => self.post(),
            30..42 => self.go_home(),
            42..54 => self.allocate(),
            54..60 => self.give_back(),
            60..72 => self.restart_container(),
            72..78 => {
                if let Some(uid) = self.any(|bed| bed.pods.keys().cloned().collect()) {
                    self.see(&uid, false);
                }
            }
            78..90 => {
                let node = *NODES.choose(&mut self.rng).expect("some");
                self.report(node, false);
            }
            90..98 => self.end(),
            98 if self.one_in(2) => self.vanish(),
            98 => {
                self.ledger.tick(self.at());
            }
            _ if self.one_in(4) => self.restart(),
            _ => {}
        }
    }

    /// What holds on the ledger, and what really runs.
    fn check(&self) {
        assert_eq!(self.ledger.audit(), Ok(()));
        let whole = Demand { memory: MemMib::new(DEVICE_MIB), share: Share::WHOLE };
        for name in NODES {
            let node = self.ledger.node(name).expect("it is there");
            for device in node.devices() {
                let id = &device.device().id;
                assert!(!device.is_overallocated(), "{id}: more is allocated than there is");
                let with_guests = device.allocated().checked_add(device.lent());
                let rest = with_guests.and_then(|taken| whole.checked_sub(taken));
                assert!(rest.is_some(), "{id}: guests stay in allocated room");
                for uid in device.guests().keys() {
                    let held = node.reservation(uid).expect("a guest is allocated something");
                    let request = held.request.as_ref().expect("it is known");
                    assert_eq!(request.movable, Movable::Restart, "{uid}");
                    assert_eq!(held.placement.devices.len(), 1, "{uid}");
                    assert_ne!(held.placement.devices[0].id, *id, "{uid} is at home");
                }
            }
        }
        let mut running: BTreeMap<&DeviceId, Demand> = BTreeMap::new();
        for live in self.pods.values() {
            for (id, placed) in live.runs_on.iter().zip(&live.written.devices) {
                let sum = running.entry(id).or_insert(Demand::ZERO);
                *sum = sum.checked_add(placed.demand).expect("small");
            }
        }
        for (id, sum) in running {
            assert!(whole.checked_sub(sum).is_some(), "{id}: {sum:?} run there");
            let taken = self.taken_on(id);
            let is_known = self.overdrawn.contains(id);
            assert!(is_known || taken <= DEVICE_MIB, "{id}: {taken} MiB are used and requested");
        }
    }

    /// What all who run on a device request, or use if that is more.
    fn taken_on(&self, id: &DeviceId) -> u64 {
        let here = self.pods.values().filter(|live| live.runs_on.contains(id));
        here.map(|live| live.takes().mib()).sum()
    }

    /// Whether a pod neither leaves nor gives memory back.
    fn stays(&self, uid: &PodUid) -> bool {
        self.stuck.contains(uid) || self.ledger.stays_with_memory(uid)
    }

    fn waits_in_vain(&self, uid: &PodUid) -> bool {
        let to_post = self.ledger.to_post(uid).expect("it is reserved");
        let is_stuck = to_post.waits_for.iter().any(|uid| self.stays(uid));
        is_stuck || (to_post.is_short && to_post.waits_for.is_empty())
    }

    /// Without more faults every recalled pod is at home or stays, and each Binding can be posted.
    fn calm_down(&mut self) {
        self.missing.clear();
        for _ in 0..600 {
            self.now += 100;
            self.leftovers.clear();
            while self.binding.keys().any(|uid| self.waits_in_vain(uid)) {
                self.post();
            }
            (0..PODS).for_each(|_| self.give_back());
            let recalled = self.ledger.recalled(None);
            for _ in 0..=recalled.len() {
                self.go_home();
            }
            let all: Vec<PodUid> = self.pods.keys().cloned().collect();
            for uid in all {
                let live = self.pods.get_mut(&uid).expect("it is there");
                if live.cpu_milli != live.actual_cpu_milli {
                    live.runs_on = live.written.runs_on();
                    live.container += 1;
                    live.actual_cpu_milli = live.cpu_milli;
                    live.uses = None;
                }
                self.see(&uid, false);
            }
            NODES.iter().for_each(|node| self.report(node, false));
        }
        self.check();
        // Each bind looks at its own pod again and again.
        self.binding.keys().for_each(|uid| drop(self.ledger.to_post(uid)));
        for uid in self.binding.keys() {
            let to_post = self.ledger.to_post(uid).expect("it is reserved");
            assert_eq!(to_post.waits_for, [], "{uid} waits forever");
        }
        for name in NODES {
            let node = self.ledger.node(name).expect("it is there");
            for (uid, held) in node.reservations() {
                let is_there = matches!(held.departure, Departure::Stays | Departure::Gone);
                assert!(is_there, "{uid}: {held:?}");
                if let Some(live) = self.pods.get(uid) {
                    assert_eq!(live.runs_on, held.placement.runs_on(), "{uid} runs elsewhere");
                }
            }
        }
    }
}

#[test]
fn guests_only_have_free_room_and_every_pod_gets_what_it_requests() {
    let (steps, first): (u64, u64) = (number("GUEST_STEPS", 20_000), number("GUEST_SEED", 0));
    let seeds = steps.div_ceil(500);
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in first..first + seeds {
        let mut bed = Bed::new(seed);
        for step in 0..500 {
            let stepped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                bed.step();
                bed.check();
            }));
            assert!(stepped.is_ok(), "seed {seed}, step {step}: see above");
        }
        let calm = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bed.calm_down()));
        assert!(calm.is_ok(), "seed {seed}, after the last step: see above");
        for (what, count) in bed.counts {
            *counts.entry(what).or_default() += count;
        }
    }
    println!("{counts:?}");
    let guests = ["guests", "guests of instances", "at home"];
    let moves = ["ordered", "stayed", "restarts", "settled", "given up", "called home by a report"];
    let memory = ["borrowed", "gave back", "kept", "waited for memory"];
    for what in guests.iter().chain(&moves).chain(&memory) {
        assert!(counts.contains_key(*what), "{what} was never tried: {counts:?}");
    }
}

/// A process that takes over from one of the version before may see only then what that one wrote. As an edit that would
/// be written back, and the pod would start where nothing is counted for it.
#[test]
fn a_pod_that_an_earlier_process_moves_elsewhere_counts_there() {
    let (uid, at) = (PodUid::new("p"), Timestamp::START);
    let on = |ledger: &Ledger| ledger.reservation(&uid).unwrap().placement.guest;
    for (is_of_earlier, borrow, is_movable, counts) in [
        (true, Borrow::Compute, true, true),
        (false, Borrow::Compute, true, false),
        (true, Borrow::None, true, false),
        (true, Borrow::Compute, false, false),
    ] {
        let rule = PoolRule { borrow, ..PoolRule::default() };
        let ledger = restarted(0, rule);
        add_node(&ledger, "a", &gpus("a", GPUS, "A100", DEVICE_MIB), at);
        ledger.see_node(&NodeName::new("a"), host(), PoolName::new("p"));
        ledger.set_listed(at);
        let movable = if is_movable { Movable::Restart } else { Movable::Never };
        let request = GpuRequest { movable, ..GpuRequest::one(fraction(500_000)) };
        let demand = Demand { memory: MemMib::new(5_000), share: Share::from_millionths(500_000) };
        let home = Placement {
            node: NodeName::new("a"),
            devices: vec![PlacedDevice { id: device_id("a-0"), demand }],
            isolation: ConfiguredIsolation::None,
            guest: None,
            spots: Vec::new(),
        };
        let guest = Some(Guest { on: device_id("a-1"), spot: None, leaving: None });
        let elsewhere = Placement { guest: guest.clone(), ..home.clone() };
        let fact = |placement: &Placement, moves| PodFact {
            request: Some(request.clone().into()),
            moves,
            ..bound("p", placement)
        };
        ledger.see_pod(&fact(&home, MoveFact::default()), at);
        ledger.see_pod(&fact(&elsewhere, MoveFact { is_of_earlier, ..MoveFact::default() }), at);
        assert_eq!(on(&ledger), if counts { guest } else { None });
    }
}

/// It may have been frozen until then. Where nobody needs the room of the guest, it has that from then on.
#[test]
fn a_guest_that_an_earlier_process_lets_stay_is_allocated_where_it_runs() {
    let (uid, at) = (PodUid::new("p"), Timestamp::START);
    for (is_of_earlier, is_needed, counts) in
        [(true, false, true), (false, false, false), (true, true, false)]
    {
        let rule = PoolRule { borrow: Borrow::Compute, ..PoolRule::default() };
        let ledger = restarted(0, rule);
        add_node(&ledger, "a", &gpus("a", GPUS, "A100", DEVICE_MIB), at);
        ledger.see_node(&NodeName::new("a"), host(), PoolName::new("p"));
        ledger.set_listed(at);
        let request =
            GpuRequest { movable: Movable::Restart, ..GpuRequest::one(fraction(500_000)) };
        let demand = Demand { memory: MemMib::new(5_000), share: Share::from_millionths(500_000) };
        let on = |id: &str, guest: Option<&str>| Placement {
            node: NodeName::new("a"),
            devices: vec![PlacedDevice { id: device_id(id), demand }],
            isolation: ConfiguredIsolation::None,
            guest: guest.map(|on| Guest { on: device_id(on), spot: None, leaving: None }),
            spots: Vec::new(),
        };
        let fact = |placement: &Placement, moves| PodFact {
            request: Some(request.clone().into()),
            moves,
            ..bound("p", placement)
        };
        ledger.see_pod(&fact(&on("a-0", Some("a-1")), MoveFact::default()), at);
        if is_needed {
            let whole = Demand { memory: MemMib::new(9_000), share: Share::WHOLE };
            let mut other = on("a-1", None);
            other.devices[0].demand = whole;
            ledger.see_pod(&bound("q", &other), at);
        }
        let stays = MoveFact { is_of_earlier, ..MoveFact::default() };
        ledger.see_pod(&fact(&on("a-1", None), stays), at);
        let held = ledger.reservation(&uid).unwrap();
        let device = if counts { "a-1" } else { "a-0" };
        assert_eq!(held.placement.devices[0].id, device_id(device), "{held:?}");
        assert_eq!(held.placement.guest.is_some(), !counts, "{held:?}");
    }
}
