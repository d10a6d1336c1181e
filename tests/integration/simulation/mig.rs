//! GPUs in MIG mode, and the part of their agents that makes instances as it is ordered.
//!
//! The orders that stand, the plan, its attempts and the file of what was made are those that ship. The
//! driver is a model: a call takes its time, may fail, and refuses to remove what is in use.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use agent::mig::attempts::Attempts;
use agent::mig::on_demand::MigOnDemand;
use agent::mig::plan::{
    self, GpuInstance, GpuLayout, Layouts, MigPlan, MigStep, NumberedProfile, Unfinished, Units,
    Work,
};
use rand::Rng;
use rand::seq::IndexedRandom;
use serde_json::{Value, json};
use wire::api::state::{DeviceKind, MigPlacement};
use wire::device::Slot;
use wire::report::bodies::{DeviceReport, MigOrders, MigProfileReport};
use wire::units::Timestamp;

use super::faults::Fault;
use super::nodes::Gpu;
use super::settings::Settings;
use super::{What, World};

const MODEL: &str = "NVIDIA A30";

/// Memory of such a GPU.
pub(super) const GPU_MIB: u64 = 24_576;

/// Its profiles: name, MiB, units, starts.
pub(super) const PROFILES: [(&str, u64, u32, &[u32]); 4] = [
    ("1g.6gb", 5_952, 1, &[0, 1, 2, 3]),
    ("1g.6gb+me", 5_952, 1, &[0, 1, 2, 3]),
    ("2g.12gb", 11_968, 2, &[0, 2]),
    ("4g.24gb", 24_000, 4, &[0]),
];

/// The agent looks again after this time.
const LOOK_EVERY: u64 = 5_000;

/// How the driver names instances.
#[derive(Clone, Copy, Debug)]
enum Naming {
    /// Each gets a new UUID.
    New,
    /// One that is made again at the same place gets the same UUID until the next boot.
    OfBoot,
    /// Also after it.
    OfPlace,
}

/// The GPUs of a node, and what its agent does about their instances.
#[derive(Debug)]
pub(super) struct MigNode {
    naming: Naming,
    /// Whether it takes over what others made.
    adopts: bool,
    /// Whether it has yet to do so.
    has_to_adopt: bool,
    /// What it took over.
    pub(super) adopted: BTreeSet<String>,
    pub(super) gpus: Vec<GpuLayout>,
    folder: tempfile::TempDir,
    pub(super) on_demand: MigOnDemand,
    attempts: Attempts,
    /// How often the node has booted: no earlier instance is left then.
    pub(super) era: u64,
    /// For which run of the agent its calls are.
    run: u64,
    /// The step that goes on.
    working: Option<MigStep>,
    /// For when it looks again.
    next: Option<u64>,
    /// How many instances were made.
    made: u32,
    /// Those that an administrator made.
    pub(super) foreign: BTreeSet<String>,
    /// Until then the node boots.
    pub(super) down_until: u64,
    /// Until then the driver refuses to make or remove anything.
    refuses_until: u64,
    /// Until then a monitor has all instances open that are there.
    held_until: u64,
    /// Since when no pod has an instance.
    pub(super) idle: BTreeMap<String, u64>,
}

fn profiles() -> Vec<NumberedProfile> {
    let row = |(id, (name, memory_mib, size, starts)): (u32, (&str, u64, u32, &[u32]))| {
        let report = MigProfileReport {
            profile: name.to_owned(),
            memory_mib,
            sm_count: None,
            size,
            starts: starts.to_vec(),
        };
        NumberedProfile { id, most: 4, report }
    };
    (0..).zip(PROFILES).map(row).collect()
}

fn layout(gpu: &Gpu) -> GpuLayout {
    GpuLayout {
        uuid: gpu.id.clone(),
        is_in_mig_mode: true,
        profiles: profiles(),
        instances: Vec::new(),
    }
}

/// What the profile of an instance is.
pub(super) fn row(instance: &GpuInstance) -> (&'static str, u64) {
    let (name, mib, ..) = PROFILES[usize::try_from(instance.profile).expect("small")];
    (name, mib)
}

impl MigNode {
    pub(super) fn new(gpus: &[Gpu], settings: &Settings) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let on_demand = booted(folder.path(), 0);
        Self {
            naming: [Naming::New, Naming::OfBoot, Naming::OfPlace]
                [usize::try_from(settings.seed / 25 % 3).expect("small")],
            adopts: settings.adopts,
            has_to_adopt: settings.adopts,
            adopted: BTreeSet::new(),
            gpus: gpus.iter().map(layout).collect(),
            folder,
            on_demand,
            attempts: Attempts::default(),
            era: 0,
            run: 0,
            working: None,
            next: None,
            made: 0,
            foreign: BTreeSet::new(),
            down_until: 0,
            refuses_until: 0,
            held_until: 0,
            idle: BTreeMap::new(),
        }
    }

    /// The instances that have a UUID, with their GPU.
    pub(super) fn instances(&self) -> impl Iterator<Item = (&str, &GpuLayout, &GpuInstance)> {
        self.gpus.iter().flat_map(|gpu| {
            let named = gpu.instances.iter().filter_map(|it| Some((it.devices.first()?, it)));
            named.map(move |(uuid, it)| (&**uuid, gpu, it))
        })
    }

    /// The instances of a GPU.
    pub(super) fn instances_of(&self, gpu: &str) -> Vec<String> {
        let own = self.instances().filter(|(_, on, _)| on.uuid == gpu);
        own.map(|(uuid, ..)| uuid.to_owned()).collect()
    }

    pub(super) fn has(&self, uuid: &str) -> bool {
        self.instances().any(|(id, ..)| id == uuid)
    }

    fn layouts(&self) -> Layouts {
        Layouts { gpus: self.gpus.clone(), ..Layouts::default() }
    }

    /// Another GPU takes the place of one.
    pub(super) fn replace(&mut self, at: usize, gpu: &Gpu) {
        self.gpus[at] = layout(gpu);
    }

    /// Whether an instance is, or was, on one of the GPUs that are here.
    pub(super) fn is_of_gpus(&self, uuid: &str) -> bool {
        self.gpus.iter().any(|gpu| uuid.starts_with(&format!("MIG-{}-at-", gpu.uuid)))
    }

    /// Notes what became of what was begun.
    fn look(&self) -> Vec<Unfinished> {
        let mut made = self.on_demand.made();
        made.settle(&self.gpus).expect("the file can be written");
        made.unfinished().to_vec()
    }

    /// The devices of the node, as its agent reports them, and the uses of those that have any.
    pub(super) fn sampled(&self) -> (Vec<DeviceReport>, Vec<Gpu>) {
        let changes = self.on_demand.made().changes();
        let (mut devices, mut used) = self.devices();
        let is_shown = |device: &DeviceReport| !self.on_demand.is_making(device);
        devices.retain(is_shown);
        self.on_demand.mark(&mut devices, changes);
        used.retain(|used| devices.iter().any(|device| device.uuid == used.id));
        (devices, used)
    }

    /// The same without who made them.
    pub(super) fn devices(&self) -> (Vec<DeviceReport>, Vec<Gpu>) {
        let (mut devices, mut used) = (Vec::new(), Vec::new());
        for (index, gpu) in (0..).zip(&self.gpus) {
            let new = |id: &str, kind| DeviceReport::new(id.to_owned(), index, MODEL.into(), kind);
            let mig_profiles = gpu.profiles.iter().map(|it| it.report.clone()).collect();
            devices.push(DeviceReport {
                memory_mib: GPU_MIB,
                mig_profiles,
                ..new(&gpu.uuid, DeviceKind::MigParent)
            });
            for instance in &gpu.instances {
                let ((profile, mib), Units { start, size }) = (row(instance), instance.slot);
                for uuid in &instance.devices {
                    devices.push(DeviceReport {
                        memory_mib: mib,
                        parent: Some(gpu.uuid.clone()),
                        mig_profile: Some(profile.to_owned()),
                        mig_placement: Some(MigPlacement { start, size }),
                        ..new(uuid, DeviceKind::MigInstance)
                    });
                    used.push(Gpu { id: uuid.clone(), mib });
                }
            }
        }
        (devices, used)
    }

    /// Whether the agent knows that it made this instance.
    pub(super) fn has_made(&self, device: &DeviceReport) -> bool {
        self.on_demand.made().has_made(device)
    }

    /// What the agent says of its orders: those that failed, and what they promise.
    pub(super) fn answers(&self) -> [(&'static str, Value); 2] {
        [
            ("migFailures", json!(self.on_demand.failures())),
            ("migPromises", json!(self.on_demand.promises())),
        ]
    }

    /// Learns what a replica orders, or that it gives no orders. Returns whether other ones stand.
    pub(super) fn learn(&self, link: usize, orders: Option<&Value>, now: u64) -> bool {
        let before = self.on_demand.orders();
        match orders {
            Some(orders) => {
                let orders = serde_json::from_value::<Option<MigOrders>>(orders.clone());
                let now = Timestamp::from_millis(now);
                self.on_demand.learn(link, orders.expect("orders"), now);
            }
            None => self.on_demand.lose(link),
        }
        self.on_demand.orders() != before
    }

    /// Carries out a step, or its first half alone.
    fn carry_out(&mut self, step: &MigStep, is_half: bool, is_busy: impl Fn(&str) -> bool) -> bool {
        let (salt, place) = match self.naming {
            Naming::New => (u64::from(self.made), String::new()),
            Naming::OfBoot => (self.era, format!("-{}", step.begun.slot.start)),
            Naming::OfPlace => (0, format!("-{}", step.begun.slot.start)),
        };
        let uuid = format!("MIG-{}-at-{}{place}-{salt}", step.begun.gpu, step.begun.profile);
        let devices = if is_half { Vec::new() } else { vec![uuid] };
        let Some(gpu) = self.gpus.iter_mut().find(|it| it.uuid == step.begun.gpu) else {
            return false;
        };
        let at = |id: u32| gpu.instances.iter().position(|it| it.id == id);
        match step.work {
            Work::Remove(id) => {
                let Some(at) = at(id) else { return false };
                let devices = &gpu.instances[at].devices;
                // It looks whether that is still the one, just before it destroys it.
                if *devices != step.devices || devices.iter().any(|uuid| is_busy(uuid)) {
                    return false;
                }
                match is_half {
                    true => gpu.instances[at].devices.clear(),
                    false => drop(gpu.instances.remove(at)),
                }
            }
            Work::Make => {
                self.made += 1;
                let (id, profile, slot) = (self.made, step.begun.profile, step.begun.slot);
                let units = |it: Units| Slot { start: it.start, size: it.size }.units();
                let has_media = |profile: u32| profile == 1;
                let is_taken = |it: &GpuInstance| {
                    units(it.slot) & units(slot) != 0 || has_media(it.profile) && has_media(profile)
                };
                if gpu.instances.iter().any(is_taken) {
                    return false;
                }
                gpu.instances.push(GpuInstance { id, profile, slot, devices });
            }
            Work::Complete(id) => {
                let Some(at) = at(id) else { return false };
                gpu.instances[at].devices = devices;
                self.made += 1; // no other one gets its UUID
            }
        }
        true
    }
}

/// One half of a round: what to remove, or what to make.
type Planner = fn(&MigOrders, &Layouts, &[Unfinished]) -> MigPlan;

/// What an agent knows that starts in this boot.
fn booted(folder: &Path, boot: u64) -> MigOnDemand {
    let proc_root = folder.join("proc");
    let random = proc_root.join("sys/kernel/random");
    std::fs::create_dir_all(&random).expect("a folder");
    std::fs::write(random.join("boot_id"), format!("boot-{boot}\n")).expect("a file");
    MigOnDemand::new(folder, &proc_root)
}

/// The devices on which a pod runs by its placement, each with its place if gpupack makes it.
pub(super) fn devices_of(placement: &Value) -> Vec<(String, Value)> {
    let devices = placement["devices"].as_array().into_iter().flatten();
    let other = Some(&placement["guest_mig"]).filter(|it| it.is_object());
    let other = other.filter(|_| placement["home"].is_array());
    let place = |it: &Value| other.unwrap_or(&it["mig"]).clone();
    let named = devices.map(|it| (it["id"].as_str().unwrap_or_default().to_owned(), place(it)));
    named.collect()
}

impl World {
    /// Lets the agent of a node look at its instances after this time, or earlier.
    pub(super) fn plan_mig(&mut self, node: usize, time: u64) {
        let due = self.now + time;
        let Some(mig) = &mut self.nodes[node].mig else { return };
        if mig.next.is_none_or(|next| due < next || next < self.now) {
            mig.next = Some(due);
            let run = mig.run;
            self.after(time, What::MigRound { node, run });
        }
    }

    /// The agent learns what a replica orders in an answer; without one its orders end.
    pub(super) fn learn_orders(&mut self, node: usize, link: usize, orders: Option<&Value>) {
        let Some(mig) = &self.nodes[node].mig else { return };
        if mig.learn(link, orders, self.now) {
            let time = self.rng.random_range(1..20);
            self.plan_mig(node, time);
        }
    }

    /// One look of the agent at its instances, as `agent::nvml::maker` has it; it begins one step.
    pub(super) fn mig_round(&mut self, node: usize, run: u64) {
        let now = self.now;
        let Some(mig) = self.nodes[node].mig.as_mut().filter(|mig| mig.run == run) else { return };
        mig.next = mig.next.filter(|next| *next > now);
        if mig.working.is_some() {
            return;
        }
        if std::mem::take(&mut mig.has_to_adopt) {
            let count = mig.on_demand.made().adopt(&mig.gpus, &BTreeSet::new());
            count.expect("the file can be written");
            mig.adopted.append(&mut mig.foreign);
            self.nodes[node].devices_changed();
        }
        let Some(mig) = &mut self.nodes[node].mig else { return };
        let (orders, layouts) = (mig.on_demand.orders(), mig.layouts());
        let mut open = BTreeSet::new();
        for planner in [plan::removals as Planner, plan::makes] {
            let unfinished = mig.look();
            let own = mig.on_demand.made().own(&orders);
            let mut plan = planner(&own, &layouts, &unfinished);
            open.extend(plan.orders());
            for (order, error) in std::mem::take(&mut plan.failures) {
                mig.attempts.refuse(order, error);
            }
            mig.on_demand.note_failures(mig.attempts.failures());
            mig.attempts.hold_back(&mut plan, Timestamp::from_millis(now));
            if let Some(step) = plan.steps.into_iter().next() {
                mig.on_demand.made().begin(step.begun.clone()).expect("the file can be written");
                return self.begin_step(node, step);
            }
        }
        mig.attempts.keep(&open);
        mig.on_demand.note_failures(mig.attempts.failures());
        let again = mig.attempts.next().map_or(LOOK_EVERY, |at| at.millis().saturating_sub(now));
        self.plan_mig(node, again.clamp(1, LOOK_EVERY));
    }

    /// The agent calls the driver.
    fn begin_step(&mut self, node: usize, step: MigStep) {
        let most = if self.hits(Fault::SlowMig, 20) { 12_000 } else { 900 };
        let time = self.rng.random_range(10..most);
        let Some(mig) = &mut self.nodes[node].mig else { return };
        mig.working = Some(step);
        let run = mig.run;
        self.after(time, What::MigDone { node, run });
    }

    /// A call of the driver ends.
    pub(super) fn mig_done(&mut self, node: usize, run: u64) {
        let is_refused = self.hits(Fault::MigRefused, 10);
        let is_faulty = self.is_faulty();
        let Some(mig) = self.nodes[node].mig.as_mut().filter(|mig| mig.run == run) else { return };
        let Some(step) = mig.working.take() else { return };
        let is_held = matches!(step.work, Work::Remove(_)) && self.now < mig.held_until;
        let refuses = is_refused || is_faulty && (is_held || self.now < mig.refuses_until);
        let is_done = !refuses && self.change_instance(node, &step, false);
        let now = Timestamp::from_millis(self.now);
        let Some(mig) = &mut self.nodes[node].mig else { return };
        let gpu = mig.gpus.iter().find(|gpu| gpu.uuid == step.begun.gpu).cloned();
        if let Some(gpu) = gpu.filter(|_| !is_done && step.begun.is_new) {
            mig.on_demand.made().refused(&step.begun, &gpu);
        }
        mig.look();
        match is_done {
            true => mig.attempts.succeed(&step.order),
            false => {
                let obstacle = step.refused("In use by another client".to_owned());
                mig.attempts.fail(&step.order, obstacle, now);
            }
        }
        mig.on_demand.note_failures(mig.attempts.failures());
        self.plan_mig(node, 1);
    }

    /// The driver changes an instance, wholly or by half.
    fn change_instance(&mut self, node: usize, step: &MigStep, is_half: bool) -> bool {
        let processes = &self.processes;
        let is_busy = |uuid: &str| processes.values().any(|process| process.uses(uuid));
        let Some(mig) = &mut self.nodes[node].mig else { return false };
        let before: BTreeSet<String> = mig.instances().map(|(uuid, ..)| uuid.to_owned()).collect();
        let is_done = mig.carry_out(step, is_half, is_busy);
        let after: BTreeMap<String, u64> =
            mig.instances().map(|(uuid, _, it)| (uuid.to_owned(), row(it).1)).collect();
        let gone: Vec<&String> = before.iter().filter(|uuid| !after.contains_key(*uuid)).collect();
        let has = |uuid: &String| {
            let placed = self.api.pods.iter().filter(|(_, pod)| pod.is_placed());
            let mut on = placed.filter(|(_, pod)| pod.written().iter().any(|(id, ..)| id == uuid));
            on.next().map(|(uid, _)| uid.clone())
        };
        let is_foreign = |uuid: &&&String| mig.foreign.contains(**uuid);
        let broken = gone
            .iter()
            .find_map(|uuid| has(uuid).map(|uid| format!("{uuid} is removed, which {uid} has")));
        let broken = broken.or_else(|| {
            let foreign = gone.iter().find(is_foreign);
            foreign.map(|uuid| format!("{uuid} is removed, which others made"))
        });
        broken.into_iter().for_each(|broken| self.broke(broken));
        self.reported.extend(after);
        self.nodes[node].devices_changed();
        is_done
    }

    /// The agent of a node ends, and another one begins. A call of the driver may be carried out,
    /// by half, or not at all.
    pub(super) fn restart_maker(&mut self, node: usize) {
        let kind = self.rng.random_range(0..3);
        let is_lost = self.hits(Fault::LostList, 25);
        let Some(mig) = &mut self.nodes[node].mig else { return };
        mig.run += 1;
        mig.next = None;
        let (working, boot) = (mig.working.take(), mig.era);
        if let Some(step) = working.filter(|_| kind > 0) {
            self.change_instance(node, &step, kind == 1);
        }
        let Some(mig) = &mut self.nodes[node].mig else { return };
        if is_lost {
            let _ = std::fs::remove_file(mig.folder.path().join("made.json"));
        }
        mig.on_demand = booted(mig.folder.path(), boot);
        mig.attempts = Attempts::default();
        mig.has_to_adopt = mig.adopts;
        self.plan_mig(node, 10);
    }

    /// Something happens to a node with MIG.
    pub(super) fn mig_chaos(&mut self) {
        if !self.is_faulty() {
            return;
        }
        let time = self.rng.random_range(1_000..5_000);
        self.after(time, What::MigChaos);
        let node = self.rng.random_range(0..self.nodes.len());
        let kinds = [Fault::Reboot, Fault::MigRefused, Fault::ForeignInstance];
        let Some(kind) = kinds.choose(&mut self.rng).copied() else { return };
        let time = self.rng.random_range(500..8_000);
        if !self.has(kind) || self.is_resting() {
            return;
        }
        self.disturb(20_000);
        match kind {
            Fault::Reboot => self.reboot(node, time),
            Fault::MigRefused => {
                let Some(mig) = &mut self.nodes[node].mig else { return };
                match time % 2 {
                    0 => mig.refuses_until = self.now + time,
                    _ => mig.held_until = self.now + 5 * time,
                }
            }
            _ => self.make_by_hand(node),
        }
    }

    /// A node boots: no process and no instance is left, and it is back after this time.
    fn reboot(&mut self, node: usize, time: u64) {
        let name = self.nodes[node].name.clone();
        self.restart_agent(node);
        let Some(mig) = &mut self.nodes[node].mig else { return };
        for gpu in &mut mig.gpus {
            gpu.instances.clear();
        }
        mig.foreign.clear();
        mig.era += 1;
        mig.on_demand = booted(mig.folder.path(), mig.era);
        mig.down_until = self.now + time;
        self.nodes[node].devices_changed();
        self.processes.retain(|_, process| process.node != name);
        self.disturb(time + 20_000);
    }

    /// An administrator makes an instance where there is room.
    fn make_by_hand(&mut self, node: usize) {
        let (at, profile) = (self.rng.random_range(0..2), self.rng.random_range(0..3));
        let Some(mig) = &self.nodes[node].mig else { return };
        let gpu = &mig.gpus[at];
        let row = &gpu.profiles[profile];
        let Some(start) = row.report.starts.choose(&mut self.rng).copied() else { return };
        let slot = Units { start, size: row.report.size };
        let place = wire::report::bodies::MakeInstance {
            gpu: gpu.uuid.clone(),
            profile: row.report.profile.clone(),
            start,
        };
        let begun = Unfinished { gpu: gpu.uuid.clone(), profile: row.id, slot, is_new: true };
        // What the agent is about to make itself, nobody could tell from this one after a crash.
        if mig.on_demand.made().unfinished().contains(&begun) {
            return;
        }
        let (order, devices) = (plan::MigOrder::to_make(place), Vec::new());
        let step = MigStep { order, work: Work::Make, begun, devices };
        if !self.change_instance(node, &step, false) {
            return;
        }
        let Some(mig) = &mut self.nodes[node].mig else { return };
        let gpu = mig.gpus[at].instances.last().and_then(|it| it.devices.first()).cloned();
        mig.adopted.retain(|uuid| Some(uuid) != gpu.as_ref());
        mig.foreign.extend(gpu);
    }
}
