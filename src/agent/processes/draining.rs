//! Ended pods that hold devices, and whose containers still run without using a GPU.
//!
//! NVML lists processes that use a GPU. A launcher between two workers, or a program that loads a
//! model on the CPU, is not listed yet, but may be soon. So while a pod drains, the agent searches
//! its control group, and lists one process there, without memory, on each device that it holds.

use std::collections::BTreeMap;

use crate::gpu::sample::is_draining;
use crate::processes::pods::{
    MAX_CGROUP_BYTES, MAX_STAT_BYTES, PodsByProcess, is_running, pod_in_cgroup, read_lossily,
};
use wire::ids::PodUid;
use wire::report::bodies::{Allocation, DeviceUse, ProcessUse};
use wire::report::report_limits::MAX_PROCESSES_PER_DEVICE;

/// The pods that drain on one node.
#[derive(Debug, Default)]
pub(crate) struct Draining {
    /// The devices of each, by UUID.
    devices: BTreeMap<PodUid, Vec<String>>,
    /// The last known process of each. It is checked first, because reading the whole process table
    /// each time is expensive.
    running: BTreeMap<PodUid, u32>,
}

impl Draining {
    /// Learns the allocations on the node.
    pub(crate) fn observe(&mut self, allocations: &[Allocation]) {
        let draining = allocations.iter().filter(|allocation| is_draining(allocation));
        let devices = draining.map(|allocation| {
            let uuids = allocation.devices.iter().map(|part| part.uuid.clone());
            (PodUid::new(allocation.pod_uid.clone()), uuids.collect())
        });
        self.devices = devices.collect();
    }

    /// Adds a process of each pod that still runs to the lists in `uses`, unless one is listed.
    pub(crate) fn complete(&mut self, uses: &mut [DeviceUse], processes: &PodsByProcess) {
        if !uses.iter().any(|device| device.processes.is_some()) {
            return;
        }
        let sought: Vec<&PodUid> =
            self.devices.keys().filter(|uid| !is_listed(uid, uses)).collect();
        self.running = running(&sought, &self.running, processes);
        for (uid, pid) in &self.running {
            let held = self.devices.get(uid).into_iter().flatten();
            for uuid in held {
                let device = uses.iter_mut().find(|device| device.uuid == *uuid);
                let Some(device) = device else { continue };
                let Some(list) = &mut device.processes else { continue };
                if list.len() < MAX_PROCESSES_PER_DEVICE {
                    let pod_uid = Some(uid.to_string());
                    list.push(ProcessUse { pid: *pid, pod_uid, memory_mib: Some(0) });
                } else {
                    // From a list without it the pod would seem to have ended.
                    device.processes = None;
                    device.tenants.clear();
                }
            }
        }
    }
}

/// Whether a list has a process of this pod.
fn is_listed(uid: &PodUid, uses: &[DeviceUse]) -> bool {
    let mut listed = uses.iter().flat_map(|device| device.processes.iter().flatten());
    listed.any(|process| process.pod_uid.as_deref() == Some(uid.as_str()))
}

/// A process of each pod in `sought` that has one; those in `known` are checked first.
pub(crate) fn running(
    sought: &[&PodUid],
    known: &BTreeMap<PodUid, u32>,
    processes: &PodsByProcess,
) -> BTreeMap<PodUid, u32> {
    let mut found = BTreeMap::new();
    for pid in known.values() {
        found.extend(running_pod(*pid, sought, processes).map(|uid| (uid, *pid)));
    }
    if found.len() < sought.len() {
        let entries = std::fs::read_dir(&processes.root).into_iter().flatten().flatten();
        for pid in entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
            found.extend(running_pod(pid, sought, processes).map(|uid| (uid, pid)));
        }
    }
    found
}

/// The pod of a process that runs, if it is one of those in `sought`.
fn running_pod(pid: u32, sought: &[&PodUid], processes: &PodsByProcess) -> Option<PodUid> {
    let folder = processes.folder_of(pid);
    let uid = pod_in_cgroup(&read_lossily(&folder.join("cgroup"), MAX_CGROUP_BYTES)?)?;
    let is_sought =
        sought.contains(&&uid) && is_running(&read_lossily(&folder.join("stat"), MAX_STAT_BYTES)?);
    is_sought.then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::api::condition::DeviceFault;
    use wire::report::bodies::{AllocatedDevice, AllocationState};

    const UID: &str = "0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f00";
    const OTHER: &str = "9f8e7d6c5b4a39281706f5e4d3c2b1a0";

    /// A process table in a folder of its own.
    struct Table(tempfile::TempDir);

    impl Table {
        fn process(&self, pid: u32, state: char, cgroup: &str) {
            let folder = self.0.path().join(pid.to_string());
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("stat"), format!("{pid} (a) R (b) {state} 1 1\n")).unwrap();
            std::fs::write(folder.join("cgroup"), cgroup).unwrap();
        }

        fn end(&self, pid: u32) {
            std::fs::remove_dir_all(self.0.path().join(pid.to_string())).unwrap();
        }
    }

    fn allocation(uid: &str, state: AllocationState) -> Allocation {
        let part = |uuid: &str| AllocatedDevice {
            uuid: uuid.to_owned(),
            memory_mib: 1_000,
            share_millionths: 10,
        };
        let devices = vec![part("GPU-a"), part("GPU-b"), part("GPU-gone")];
        Allocation {
            pod_uid: uid.to_owned(),
            pod: "d/p".to_owned(),
            state,
            devices,
            is_guest: false,
        }
    }

    /// Lists of two devices, with one process of each named pod.
    fn lists(on_b: Option<&str>) -> Vec<DeviceUse> {
        let device = |uuid: &str, pod: Option<&str>| {
            let process = |pod: &str| ProcessUse {
                pid: 1,
                pod_uid: Some(pod.to_owned()),
                memory_mib: Some(7),
            };
            let processes = Some(pod.map(process).into_iter().collect());
            DeviceUse { processes, ..DeviceUse::unread(uuid.to_owned(), DeviceFault::Lost) }
        };
        vec![device("GPU-a", None), device("GPU-b", on_b)]
    }

    /// Pods, processes and MiB on each device.
    fn shown(uses: &[DeviceUse]) -> String {
        let device = |device: &DeviceUse| {
            let Some(list) = &device.processes else { return "?".to_owned() };
            let process = |process: &ProcessUse| {
                let pod = if process.pod_uid.as_deref() == Some(UID) { "p" } else { "q" };
                format!("{pod}{}={}", process.pid, process.memory_mib.unwrap())
            };
            list.iter().map(process).collect::<Vec<_>>().join(" ")
        };
        uses.iter().map(device).collect::<Vec<_>>().join(" | ")
    }

    #[test]
    fn a_container_of_an_ended_pod_counts_until_its_last_process_ends() {
        let table = Table(tempfile::tempdir().unwrap());
        let pods = PodsByProcess::new(table.0.path());
        let mut draining = Draining::default();
        let mut check = |expected: &str, why: &str| {
            let mut uses = lists(None);
            draining.complete(&mut uses, &pods);
            assert_eq!(shown(&uses), expected, "{why}");
            draining.observe(&[allocation(UID, AllocationState::Draining)]);
        };
        let group = format!("0::/kubepods/pod{UID}/x");
        table.process(7, 'S', &group);
        table.process(9, 'S', &format!("0::/kubepods/pod{OTHER}/x"));
        std::fs::write(table.0.path().join("uptime"), "1.00 1.00").unwrap();
        check(" | ", "no pod drains");
        check("p7=0 | p7=0", "its container runs");
        table.process(8, 'D', &group);
        table.end(7);
        check("p8=0 | p8=0", "another process of it runs");
        table.process(8, 'Z', &group);
        check(" | ", "what waits to be reaped runs nothing");
        table.process(8, 'R', &format!("0::/kubepods/pod{OTHER}/x"));
        check(" | ", "its id has passed on");
        table.end(8);
        check(" | ", "it has ended");
    }

    #[test]
    fn live_listed_or_unread_pods_add_no_processes() {
        let table = Table(tempfile::tempdir().unwrap());
        let pods = PodsByProcess::new(table.0.path());
        table.process(7, 'S', &format!("0::/kubepods/pod{UID}/x"));
        for (state, mut uses, expected) in [
            (AllocationState::Confirmed, lists(None), " | "),
            (AllocationState::Assumed, lists(None), " | "),
            (AllocationState::Draining, lists(Some(UID)), " | p1=7"),
            (AllocationState::Draining, lists(Some(OTHER)), "p7=0 | q1=7 p7=0"),
        ] {
            let mut draining = Draining::default();
            draining.observe(&[allocation(UID, state)]);
            draining.complete(&mut uses, &pods);
            assert_eq!(shown(&uses), expected, "{state:?}");
            uses.iter_mut().for_each(|device| device.processes = None);
            draining.complete(&mut uses, &pods);
            assert_eq!(shown(&uses), "? | ?");
        }
    }

    #[test]
    fn a_full_process_list_counts_as_missing() {
        let table = Table(tempfile::tempdir().unwrap());
        table.process(7, 'S', &format!("0::/kubepods/pod{UID}/x"));
        let mut uses = lists(Some(OTHER));
        let process = uses[1].processes.as_ref().unwrap()[0].clone();
        uses[1].processes = Some(vec![process; MAX_PROCESSES_PER_DEVICE]);
        let mut draining = Draining::default();
        draining.observe(&[allocation(UID, AllocationState::Draining)]);
        draining.complete(&mut uses, &PodsByProcess::new(table.0.path()));
        assert_eq!(shown(&uses), "p7=0 | ?");
    }
}
