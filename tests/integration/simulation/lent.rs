//! Memory that programs use above what their pods request, in the runs whose pool lends it.
//!
//! A program's allocation succeeds if the GPU has that much unused memory, whoever requests it: nothing
//! else limits programs. So a pod may lack what it requests until another one has given it back. What a
//! program has not got it tries to get again.
//!
//! Where the driver limits programs, the agents set the limits by the shipped rules. Then no program ever lacks
//! what its pod requests.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use agent::gpu::lent_limits::{GroupLimit, LimitDriver, SetLimit};
use kube_api::request::placement::MPS_MEMORY;
use rand::Rng;

use super::api::Pod;
use super::kubelets::Process;
use super::lent_checks::counted;
use super::{QUIET_FOR, World};

/// What a process has beside what its pod requests, in such runs.
#[derive(Default)]
pub(super) struct Lent {
    /// Whether the run is one of these.
    pub(super) is_on: bool,
    /// What it uses above its request: nothing, or an amount of its only device.
    pub(super) borrowed: Vec<(String, u64)>,
    /// The most that its process may use of its device, if MPS or the driver limits that.
    pub(super) limit: Option<u64>,
    /// What is left of its last container beside what it requested elsewhere, and until when.
    pub(super) left: (Vec<(String, u64)>, u64),
}

impl Lent {
    pub(super) fn listed(&self, now: u64) -> impl Iterator<Item = &(String, u64)> {
        self.borrowed.iter().chain(self.left(now))
    }

    /// What is left of its last container.
    fn left(&self, now: u64) -> impl Iterator<Item = &(String, u64)> {
        self.left.0.iter().filter(move |_| now < self.left.1)
    }

    /// The container ends that had these devices; until then its processes are still there, if it was
    /// resized. The next one has other devices if it `moves`; what it requested there is counted elsewhere.
    pub(super) fn ends(&mut self, had: &[(String, u64)], moves: bool, until: Option<u64>) {
        let mut left = std::mem::take(&mut self.borrowed);
        left.extend(had.iter().filter(|_| !moves).cloned());
        self.left = until.map_or_else(Default::default, |until| (left, until));
    }
}

/// Whether the program of a pod takes all memory that it can get when it starts, as some frameworks do.
fn is_greedy(uid: &str) -> bool {
    uid.ends_with(['3', '8'])
}

impl World {
    /// Memory of a device, in MiB; zero for one that is gone.
    pub(super) fn capacity(&self, id: &str) -> u64 {
        let mut gpus = self.nodes.iter().flat_map(|node| &node.gpus);
        gpus.find(|gpu| gpu.id == id).map_or(0, |gpu| gpu.mib)
    }

    /// What processes use of a device now.
    fn in_use(&self, id: &str) -> u64 {
        let all = self.processes.values().flat_map(|process| process.listed(self.now, true));
        all.filter(|(on, _)| *on == id).map(|(_, mib)| mib).sum()
    }

    fn unused(&self, id: &str) -> u64 {
        self.capacity(id).saturating_sub(self.in_use(id))
    }

    /// What no pod requests or uses that runs on a device.
    fn spare(&self, id: &str) -> u64 {
        let here = self.api.pods.iter().filter(|(_, pod)| pod.is_placed());
        let taken = here.map(|(uid, pod)| {
            let requested = requested(pod, id);
            self.processes.get(uid).map_or(requested, |it| it.used(id, self.now).max(requested))
        });
        self.capacity(id).saturating_sub(taken.sum())
    }

    /// Lets a program that has just started allocate what its pod requests, if it wants that now.
    pub(super) fn begins(&mut self, uid: &str) {
        let is_busy = self.processes.get(uid).is_some_and(|it| it.lent.is_on && !it.is_idle);
        if is_busy {
            self.processes.entry(uid.to_owned()).and_modify(|it| it.is_idle = true);
            self.wake(uid);
        }
    }

    /// A program allocates what its pod requests: all of it or nothing.
    fn wake(&mut self, uid: &str) {
        let Some(process) = self.processes.get(uid) else { return };
        let has_room = process.devices.iter().all(|(id, mib)| *mib <= self.unused(id));
        let (device, is_movable) = (process.devices.first().cloned(), self.is_movable(uid));
        if !has_room {
            self.lacks(uid);
            return;
        }
        self.processes.entry(uid.to_owned()).and_modify(|it| it.is_idle = false);
        if let Some((id, _)) = device.filter(|_| is_movable && is_greedy(uid)) {
            self.borrow(uid, &id, self.unused(&id));
        }
    }

    /// A program cannot allocate what its pod requests. Where the driver limits others, that is a fault, unless what
    /// ended containers had is still there.
    fn lacks(&mut self, uid: &str) {
        let is_faulty = |(id, mib): &(String, u64)| {
            let others = self.processes.iter().filter(|(other, _)| *other != uid);
            let used = others.clone().map(|(other, process)| {
                let used = process.used(id, self.now);
                counted(
                    self.api.pods.get(other).map_or(0, |pod| requested(pod, id)).min(used),
                    used,
                )
            });
            let is_left = self.processes.values().any(|process| {
                let has_left = process.lent.left(self.now).any(|(on, _)| on == id);
                has_left || process.ends.is_some() && process.used(id, self.now) > 0
            });
            used.sum::<u64>() + mib > self.capacity(id).max(*mib)
                && !is_left
                && !self.is_excused(id)
        };
        let short = self.processes[uid].devices.iter().find(|it| is_faulty(it)).cloned();
        if let Some((id, mib)) = short.filter(|_| self.settings.has_driver_limits) {
            let beside = self.processes.iter().filter(|(_, it)| it.used(&id, self.now) > 0);
            let beside = beside.map(|(uid, it)| (uid, it.used(&id, self.now), it.lent.limit));
            let beside: Vec<_> = beside.collect();
            self.broke(format!("{uid} requests {mib} MiB of {id}, and has none beside {beside:?}"));
        }
    }

    /// An agent carries out the orders about limits that it has: each pod has one container.
    pub(super) fn set_limits(&mut self, node: usize, agent: usize) {
        let (name, now) = (&self.nodes[node].name, self.now);
        let gpus: BTreeSet<String> = self.nodes[node].gpu_ids().map(str::to_owned).collect();
        let here = self.processes.iter().filter(|(_, it)| it.node == *name && it.ends.is_none());
        let driver = Driver {
            limits: RefCell::new(
                here.clone().map(|(uid, it)| (uid.clone(), it.lent.limit)).collect(),
            ),
            used: here.map(|(uid, it)| (uid.clone(), it.allocated(now))).collect(),
        };
        let groups = driver.used.keys().map(|uid| (uid.clone(), BTreeSet::from([uid.clone()])));
        self.nodes[node].agents[agent].set_limits(&gpus, &groups.collect(), &driver);
        for (uid, limit) in driver.limits.into_inner() {
            self.processes.entry(uid).and_modify(|it| it.lent.limit = limit);
        }
    }

    fn is_movable(&self, uid: &str) -> bool {
        self.api.pods.get(uid).is_some_and(Pod::is_movable)
    }

    /// From now on a program uses so much above what its pod requests.
    fn borrow(&mut self, uid: &str, id: &str, mib: u64) {
        if let Some(process) = self.processes.get_mut(uid) {
            let own: u64 = process.devices.iter().map(|(_, mib)| mib).sum();
            let most = process.lent.limit.map_or(mib, |limit| limit.saturating_sub(own));
            let mib = mib.min(most);
            process.lent.borrowed = if mib > 0 { vec![(id.to_owned(), mib)] } else { Vec::new() };
        }
    }

    /// Programs take and free memory.
    pub(super) fn use_memory(&mut self) {
        let living = self.processes.iter().filter(|(_, process)| process.ends.is_none());
        let living: Vec<String> = living.map(|(uid, _)| uid.clone()).collect();
        let may_overdraw = self.now < self.settings.faults_for + QUIET_FOR / 2;
        for uid in living {
            let process = &self.processes[&uid];
            let is_movable = self.is_movable(&uid);
            let Some((id, used)) = process.devices.first().cloned() else { continue };
            let borrowed: u64 = process.lent.borrowed.iter().map(|(_, mib)| mib).sum();
            match (process.is_idle, self.rng.random_range(0..60)) {
                (true, 20..) if is_movable => {}
                (true, _) => self.wake(&uid),
                (false, 0) if is_movable => {
                    self.borrow(&uid, &id, 0);
                    self.processes.entry(uid).and_modify(|it| it.is_idle = true);
                }
                (false, 1) if is_movable => self.borrow(&uid, &id, 0),
                (false, 2..5) if is_movable && may_overdraw => {
                    let most = self.unused(&id) + borrowed;
                    let mib = self.rng.random_range(0..=most);
                    self.borrow(&uid, &id, mib);
                }
                (false, 5..15) if is_movable && may_overdraw => {
                    // What is spare without what it requests or uses itself.
                    let requested = self.api.pods.get(&uid).map_or(0, |pod| requested(pod, &id));
                    let own = requested.max(used + borrowed);
                    let most = (self.spare(&id) + own).saturating_sub(requested);
                    let mib = self.rng.random_range(0..=most.min(self.unused(&id) + borrowed));
                    self.borrow(&uid, &id, mib);
                }
                (false, _) => {}
            }
        }
    }
}

/// The driver of a node: the limit of each container in MiB, and what it uses of each GPU.
struct Driver {
    limits: RefCell<BTreeMap<String, Option<u64>>>,
    used: BTreeMap<String, Vec<(String, u64)>>,
}

impl LimitDriver for Driver {
    fn read(&self, gpu: &str, group: &str) -> Option<GroupLimit> {
        let limit = self.limits.borrow().get(group).copied()?;
        let used = self.used.get(group)?.iter().filter(|(on, _)| on == gpu);
        let used: u64 = used.map(|(_, mib)| mib).sum();
        // A container has a limit on the GPUs that it has.
        let has = self.used.get(group)?.iter().any(|(on, _)| on == gpu);
        Some(GroupLimit { limit: limit.filter(|_| has).map(|mib| mib << 20), used: used << 20 })
    }

    fn set(&self, _: &str, group: &str, bytes: u64) -> SetLimit {
        self.limits.borrow_mut().insert(group.to_owned(), Some(bytes >> 20));
        SetLimit::Done
    }
}

impl Process {
    /// What its container has of each of its devices now: what ended containers had is not its own.
    fn allocated(&self, _: u64) -> Vec<(String, u64)> {
        let own =
            self.devices.iter().map(|(id, mib)| (id.clone(), if self.is_idle { 0 } else { *mib }));
        own.chain(self.lent.borrowed.iter().cloned()).collect()
    }

    /// What it uses of a device now.
    pub(super) fn used(&self, id: &str, now: u64) -> u64 {
        self.listed(now, true).filter(|(on, _)| *on == id).map(|(_, mib)| mib).sum()
    }
}

/// What the next container of a pod may use of its device, if the driver or MPS limits that. The driver limits it to
/// what the pod requests.
pub(super) fn limit_at_start(pod: &Pod, is_by_driver: bool) -> Option<u64> {
    match (is_by_driver, &pod.written()[..]) {
        (true, [(_, mib, _)]) => Some(*mib),
        _ => client_limit(pod),
    }
}

/// The same if MPS limits it.
pub(super) fn client_limit(pod: &Pod) -> Option<u64> {
    let limit = pod.annotations.get(MPS_MEMORY)?.strip_prefix("0=")?.strip_suffix('M')?;
    limit.parse().ok()
}

/// What a pod requests of a device where it runs, by its annotations.
pub(super) fn requested(pod: &Pod, id: &str) -> u64 {
    pod.written().iter().filter(|(on, ..)| on == id).map(|(_, mib, _)| mib).sum()
}
