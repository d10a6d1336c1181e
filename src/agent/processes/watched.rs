//! Processes of pods, whose end shows in the process table without a call of NVML.
//!
//! The end of a process may be the end of its pod. So the agent lists processes at once, and soon
//! learns from a reply whether the pod drains. Of a pod without a listed process, any process of
//! its control group is watched.

use std::collections::BTreeMap;

use crate::gpu::sample::is_draining;
use crate::processes::draining::running;
use crate::processes::pods::{BootTicks, PodsByProcess};
use wire::ids::PodUid;
use wire::report::bodies::{Allocation, DeviceUse};

/// Most processes of a node that are watched: one read of a small file each in every period.
const MAX_WATCHED: usize = 256;

/// The watched processes of one node.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    /// When each began, and the UID of its pod, by process id.
    processes: BTreeMap<u32, (BootTicks, PodUid)>,
    /// UIDs of the pods that hold devices and are not known to drain.
    pods: Vec<PodUid>,
}

impl Watched {
    /// Learns the allocations on the node.
    pub(crate) fn observe(&mut self, allocations: &[Allocation]) {
        let running = allocations.iter().filter(|allocation| !is_draining(allocation));
        self.pods = running.map(|allocation| PodUid::new(allocation.pod_uid.clone())).collect();
    }

    /// Learns the lists in `uses`. Processes that no list shows any longer stay: they may use a GPU
    /// again, and their end counts, too.
    pub(crate) fn learn(&mut self, uses: &[DeviceUse], processes: &PodsByProcess) {
        let listed = uses.iter().flat_map(|device| device.processes.iter().flatten());
        for process in listed {
            if let Some(uid) = &process.pod_uid {
                self.watch(process.pid, &PodUid::new(uid.clone()), processes);
            }
        }
        if uses.iter().any(|device| device.processes.is_some()) {
            let sought: Vec<&PodUid> = self.pods.iter().filter(|uid| self.lacks(uid)).collect();
            if !sought.is_empty() {
                for (uid, pid) in running(&sought, &BTreeMap::new(), processes) {
                    self.watch(pid, &uid, processes);
                }
            }
        }
    }

    /// Watches a process that runs.
    fn watch(&mut self, pid: u32, pod: &PodUid, processes: &PodsByProcess) {
        if self.processes.len() >= MAX_WATCHED || self.processes.contains_key(&pid) {
            return;
        }
        if let Some(began) = processes.running_since(pid) {
            self.processes.insert(pid, (began, pod.clone()));
        }
    }

    /// Forgets processes that have ended. Returns whether there were any.
    pub(crate) fn forget_ended(&mut self, processes: &PodsByProcess) -> bool {
        let before = self.processes.len();
        self.processes.retain(|pid, (began, _)| processes.running_since(*pid) == Some(*began));
        self.processes.len() < before
    }

    /// Whether a pod has no watched process, so that the agent would not see its end.
    pub(crate) fn lacks_a_pod(&self) -> bool {
        self.pods.iter().any(|uid| self.lacks(uid))
    }

    /// Whether no process of the pod `uid` is watched.
    fn lacks(&self, uid: &PodUid) -> bool {
        !self.processes.values().any(|(_, pod)| pod == uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::api::condition::DeviceFault;
    use wire::report::bodies::{AllocationState, ProcessUse};

    /// A process table with these processes: id, state and start.
    fn table(processes: &[(u32, char, u64)]) -> (tempfile::TempDir, PodsByProcess) {
        let folder = tempfile::tempdir().unwrap();
        for (pid, state, began) in processes {
            let path = folder.path().join(pid.to_string());
            std::fs::create_dir_all(&path).unwrap();
            let zeros = "0 ".repeat(18);
            let stat = format!("{pid} (a) b) {state} {zeros}{began} 0\n");
            std::fs::write(path.join("stat"), stat).unwrap();
        }
        let pods = PodsByProcess::new(folder.path());
        (folder, pods)
    }

    fn lists(processes: &[(u32, Option<&str>)]) -> Vec<DeviceUse> {
        let process = |(pid, pod): &(u32, Option<&str>)| ProcessUse {
            pid: *pid,
            pod_uid: pod.map(str::to_owned),
            memory_mib: None,
        };
        let processes = Some(processes.iter().map(process).collect());
        let unread = DeviceUse::unread("GPU-a".to_owned(), DeviceFault::Lost);
        vec![DeviceUse { processes, ..unread }]
    }

    fn allocation(uid: &str, state: AllocationState) -> Allocation {
        Allocation {
            pod_uid: uid.to_owned(),
            pod: "d/p".to_owned(),
            state,
            devices: Vec::new(),
            is_guest: false,
        }
    }

    #[test]
    fn the_end_of_a_listed_process_of_a_pod_is_seen_once() {
        let mut watched = Watched::default();
        let (_table, all) = table(&[(7, 'S', 100), (8, 'S', 100), (9, 'S', 100)]);
        watched.learn(&lists(&[(7, Some("p")), (8, Some("q")), (9, None)]), &all);
        assert!(!watched.forget_ended(&all));
        watched.learn(&lists(&[]), &all);
        let (_table, fewer) = table(&[(7, 'S', 100), (8, 'Z', 100)]);
        assert!(watched.forget_ended(&fewer), "8 is a zombie; it was in no list any longer");
        assert!(!watched.forget_ended(&fewer), "known");
        let (_table, reused) = table(&[(7, 'S', 200)]);
        assert!(watched.forget_ended(&reused), "another process has its id");
        assert!(watched.processes.is_empty(), "9 is in no pod");
    }

    #[test]
    fn a_pod_without_a_known_process_is_not_watched() {
        let (_table, all) = table(&[(7, 'S', 100)]);
        let mut watched = Watched::default();
        assert!(!watched.lacks_a_pod(), "none is there");
        watched.observe(&[allocation("p", AllocationState::Confirmed)]);
        assert!(watched.lacks_a_pod(), "its end would not be seen");
        watched.learn(&lists(&[(7, Some("p"))]), &all);
        assert!(!watched.lacks_a_pod());
        watched.observe(&[
            allocation("p", AllocationState::Assumed),
            allocation("q", AllocationState::Draining),
        ]);
        assert!(!watched.lacks_a_pod(), "that q has ended is known");
        watched.forget_ended(&table(&[]).1);
        assert!(watched.lacks_a_pod());
        watched.learn(&lists(&[(8, Some("p"))]), &all);
        assert!(watched.lacks_a_pod(), "a process that cannot be read is not watched");
    }

    #[test]
    fn of_a_pod_without_a_listed_process_another_one_is_watched() {
        let uid = "0d5ab2f3-58e1-4f5c-9a4b-1c7d3c1e8f00";
        let (folder, all) = table(&[(7, 'S', 100)]);
        let group = format!("0::/kubepods/pod{uid}/x");
        std::fs::write(folder.path().join("7/cgroup"), group).unwrap();
        let mut watched = Watched::default();
        watched.observe(&[allocation(uid, AllocationState::Confirmed)]);
        watched.learn(&[], &all);
        assert!(watched.lacks_a_pod(), "the process table is read with lists alone");
        watched.learn(&lists(&[]), &all);
        assert!(!watched.lacks_a_pod(), "the shell of a notebook, say");
        assert!(watched.forget_ended(&table(&[]).1));
    }

    #[test]
    fn only_so_many_processes_are_watched() {
        let pids: Vec<u32> = (1..=300).collect();
        let (_table, all) = table(&pids.iter().map(|pid| (*pid, 'S', 1)).collect::<Vec<_>>());
        let mut watched = Watched::default();
        let list: Vec<_> = pids.iter().map(|pid| (*pid, Some("p"))).collect();
        watched.learn(&lists(&list), &all);
        assert_eq!(watched.processes.len(), MAX_WATCHED);
    }
}
