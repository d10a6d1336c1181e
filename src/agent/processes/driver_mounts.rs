//! Which containers of pods that hold devices got the driver when they were made.
//!
//! A container that started before the driver was loaded runs without it, and without any error. NVIDIA's runtime
//! mounts each library of the driver as a file of its own, by CDI or by `libnvidia-container`, before the first program
//! of the container starts. Mounts of a container never change, so each is looked at once. The extender
//! knows which containers of a pod are to have the devices; here all are alike.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use crate::gpu::sample::is_draining;
use crate::processes::mounts::Mounts;
use crate::processes::pods::{
    BootTicks, MAX_CGROUP_BYTES, MAX_PROCESSES, PodsByProcess, container_in_cgroup, read_lossily,
};
use wire::ids::PodUid;
use wire::report::bodies::{Allocation, ContainerReport};
use wire::report::report_limits::MAX_CONTAINERS;
use wire::units::Timestamp;

/// Most bytes of a process's table of mounts. Above that its container stays unknown.
const MAX_MOUNTS_BYTES: u64 = 1 << 20;

/// How long after its start a pod is looked for in each sample: without a GPU many programs end within seconds.
const NEW_FOR: Duration = Duration::from_secs(60);

/// Time between two looks at the process table while some pod has no known container.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The same if all have: containers may start again or be more than one.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// How often a container is looked at that is not clear. While its mounts are made, it is not.
const MOST_LOOKS: u32 = 5;

/// Most bytes of a map of user ids.
const MAX_MAP_BYTES: u64 = 4_096;

/// Most containers of one pod that are kept. A container that is restarted is another one.
const MAX_OF_POD: usize = 32;

/// The containers of the pods of one node.
#[derive(Debug, Default)]
pub(crate) struct DriverMounts {
    /// When each pod that holds devices was first named, and whether it drains.
    pods: BTreeMap<PodUid, NamedPod>,
    /// The containers that were found, by pod and id.
    containers: BTreeMap<(PodUid, String), Container>,
    /// When the process table was last read.
    looked: Option<Timestamp>,
    /// When this process began.
    agent_began: Option<BootTicks>,
}

/// A pod of the allocations.
#[derive(Clone, Copy, Debug)]
struct NamedPod {
    since: Timestamp,
    is_draining: bool,
}

/// A container that was found.
#[derive(Clone, Copy, Debug)]
struct Container {
    /// Its oldest process.
    pid: u32,
    began: BootTicks,
    /// Whether a library of the driver is mounted in it; `None` while that is not clear.
    has_driver: Option<bool>,
    /// Whether that process still ran when it was last looked at.
    is_running: bool,
    /// How often it was looked at.
    looks: u32,
}

impl Container {
    /// Whether to look no more: it is clear, or was not for some looks, as with a sandbox.
    fn is_settled(&self) -> bool {
        self.has_driver.is_some() || self.looks >= MOST_LOOKS
    }
}

impl DriverMounts {
    /// Learns the allocations on the node, and forgets pods that are gone.
    pub(crate) fn observe(&mut self, allocations: &[Allocation], now: Timestamp) {
        let named = allocations.iter().map(|allocation| {
            let uid = PodUid::new(allocation.pod_uid.clone());
            let since = self.pods.get(&uid).map_or(now, |known| known.since);
            (uid, NamedPod { since, is_draining: is_draining(allocation) })
        });
        self.pods = named.collect();
        self.containers.retain(|(uid, _), _| self.pods.contains_key(uid));
    }

    /// Looks for new containers, if it is time to.
    pub(crate) fn look(&mut self, processes: &PodsByProcess, now: Timestamp) {
        if self.pods.values().all(|pod| pod.is_draining) {
            return;
        }
        let waited = self.looked.map(|looked| now.since(looked));
        if waited.is_some_and(|waited| waited < self.pause(now)) {
            return;
        }
        for container in self.containers.values_mut().filter(|container| container.is_running) {
            container.is_running = processes.running_since(container.pid) == Some(container.began);
        }
        if waited.is_some_and(|waited| waited < LOOK_AGAIN) && self.are_all_known(now) {
            return;
        }
        self.looked = Some(now);
        self.agent_began = self.agent_began.or_else(|| processes.running_since(std::process::id()));
        for ((uid, id), oldest) in self.unknown(processes) {
            self.learn((uid, id), oldest, processes);
        }
    }

    /// The containers whose mounts are known.
    pub(crate) fn reports(&self) -> Vec<ContainerReport> {
        // Those that run first, then the newest.
        let mut all: Vec<_> = self.containers.iter().collect();
        all.sort_by_key(|(_, container)| (!container.is_running, Reverse(container.began)));
        let known = all.into_iter().filter_map(|((uid, id), container)| {
            let has_driver = container.has_driver?;
            let is_older = self.agent_began.is_some_and(|agent| container.began < agent);
            let (pod_uid, id) = (uid.to_string(), id.clone());
            Some(ContainerReport { pod_uid, id, has_driver, is_older })
        });
        let mut reports: Vec<ContainerReport> = known.take(MAX_CONTAINERS).collect();
        reports.sort_by(|a, b| (&a.pod_uid, &a.id).cmp(&(&b.pod_uid, &b.id)));
        reports
    }

    /// Time between two looks.
    fn pause(&self, now: Timestamp) -> Duration {
        let is_new = |pod: &NamedPod| !pod.is_draining && now.since(pod.since) < NEW_FOR;
        if self.pods.values().any(is_new) { Duration::ZERO } else { LOOK_EVERY }
    }

    /// Whether no pod is new, and each has a running container with the driver, or two that are known: one of them may
    /// be its sandbox.
    fn are_all_known(&self, now: Timestamp) -> bool {
        let mut pods = self.pods.iter().filter(|(_, pod)| !pod.is_draining);
        pods.all(|(uid, pod)| {
            let of_pod = || self.containers.iter().filter(|((of, _), _)| of == uid);
            let known = of_pod().filter(|(_, it)| it.is_running && it.is_settled());
            let has_driver = known.clone().any(|(_, it)| it.has_driver == Some(true));
            now.since(pod.since) >= NEW_FOR
                && (has_driver || known.count() > 1)
                && of_pod().all(|(_, it)| it.is_settled())
        })
    }

    /// The oldest process of each container of these pods that is not known or has no known process.
    fn unknown(&self, processes: &PodsByProcess) -> BTreeMap<(PodUid, String), (BootTicks, u32)> {
        let entries = std::fs::read_dir(&processes.root).into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let mut oldest: BTreeMap<(PodUid, String), (BootTicks, u32)> = BTreeMap::new();
        for pid in pids.take(MAX_PROCESSES) {
            let folder = processes.folder_of(pid);
            let Some(text) = read_lossily(&folder.join("cgroup"), MAX_CGROUP_BYTES) else {
                continue;
            };
            let Some(key) = container_in_cgroup(&text) else { continue };
            let is_sought = self.pods.get(&key.0).is_some_and(|pod| !pod.is_draining);
            let known = self.containers.get(&key);
            let is_known = known.is_some_and(|it| it.is_running && it.is_settled());
            if !is_sought || is_known {
                continue;
            }
            let Some(began) = processes.running_since(pid) else { continue };
            let found = (began, pid);
            let first = oldest.entry(key).or_insert(found);
            *first = (*first).min(found);
        }
        oldest
    }

    /// Notes the container with this oldest process.
    fn learn(
        &mut self,
        key: (PodUid, String),
        (began, pid): (BootTicks, u32),
        processes: &PodsByProcess,
    ) {
        let known = self.containers.get(&key);
        let looks = known.map_or(0, |known| known.looks).saturating_add(1);
        let has_driver =
            known.and_then(|known| known.has_driver).or_else(|| has_driver(pid, &key.0, processes));
        // It may have ended during the read, and its id be another's.
        if processes.running_since(pid) != Some(began) {
            return;
        }
        let of_pod = self.containers.iter().filter(|((uid, _), _)| *uid == key.0);
        if of_pod.clone().count() >= MAX_OF_POD
            && let Some(first) = of_pod.min_by_key(|(_, it)| it.began).map(|(first, _)| first)
        {
            let first = first.clone();
            self.containers.remove(&first);
        }
        let container = Container { pid, began, has_driver, is_running: true, looks };
        self.containers.insert(key, container);
    }
}

/// Whether the process `pid` of a container of this pod sees a library of the driver; `None` if that is not clear.
///
/// Before a container is whole, its process sees what the host sees: mounts are made before it changes its root. A
/// program that has changed its root, or its users, sees less than its container has: so that no tenant can feign a
/// missing driver, the files that kubelet mounts in each container must be there.
fn has_driver(pid: u32, pod: &PodUid, processes: &PodsByProcess) -> Option<bool> {
    let mounts = |pid: u32| Mounts::of(&processes.folder_of(pid), MAX_MOUNTS_BYTES).ok();
    let users = |pid: u32| read_lossily(&processes.folder_of(pid).join("uid_map"), MAX_MAP_BYTES);
    let inside = mounts(pid)?;
    let root = inside.root()?;
    let is_container = root != mounts(1)?.root()?;
    let is_whole = inside.has_files_of(pod) && users(pid) == users(1);
    inside.has_driver(pod).filter(|has_driver| is_container && (*has_driver || is_whole))
}

#[cfg(test)]
mod tests;
