//! Memory that programs use above what their pods request, in the runs whose pool lends it.
//!
//! A program's allocation succeeds if the GPU has that much unused memory, whoever requests it: nothing
//! else limits programs. So a pod may lack what it requests until another one has given it back. What a
//! program has not got it tries to get again.

use gpupack::kube_api::request::placement::MPS_MEMORY;
use rand::Rng;

use super::api::Pod;
use super::kubelets::Process;
use super::{QUIET_FOR, World};

/// What a process has beside what its pod requests, in such runs.
#[derive(Default)]
pub(super) struct Lent {
    /// Whether the run is one of these.
    pub(super) is_on: bool,
    /// What it uses above its request: nothing, or an amount of its only device.
    pub(super) borrowed: Vec<(String, u64)>,
    /// The most that its process may use of its device, if MPS limits that.
    pub(super) limit: Option<u64>,
    /// What is left of its last container beside what it requested elsewhere, and until when.
    pub(super) left: (Vec<(String, u64)>, u64),
}

impl Lent {
    pub(super) fn listed(&self, now: u64) -> impl Iterator<Item = &(String, u64)> {
        let left = self.left.0.iter().filter(move |_| now < self.left.1);
        self.borrowed.iter().chain(left)
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
            return;
        }
        self.processes.entry(uid.to_owned()).and_modify(|it| it.is_idle = false);
        if let Some((id, _)) = device.filter(|_| is_movable && is_greedy(uid)) {
            self.borrow(uid, &id, self.unused(&id));
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

impl Process {
    /// What it uses of a device now.
    pub(super) fn used(&self, id: &str, now: u64) -> u64 {
        self.listed(now, true).filter(|(on, _)| *on == id).map(|(_, mib)| mib).sum()
    }
}

/// What the next container of a pod may use of its device, if MPS limits that.
pub(super) fn client_limit(pod: &Pod) -> Option<u64> {
    let limit = pod.annotations.get(MPS_MEMORY)?.strip_prefix("0=")?.strip_suffix('M')?;
    limit.parse().ok()
}

/// What a pod requests of a device where it runs, by its annotations.
pub(super) fn requested(pod: &Pod, id: &str) -> u64 {
    pod.written().iter().filter(|(on, ..)| on == id).map(|(_, mib, _)| mib).sum()
}
