//! Kubelets: they start and end containers, and remove pods whose containers have ended.

use rand::Rng;

use super::faults::Fault;
use super::{What, World};

/// The processes of a pod.
pub(super) struct Process {
    pub(super) node: String,
    /// What they use of each device, in MiB.
    pub(super) devices: Vec<(String, u64)>,
    /// When they end, once their pod does.
    pub(super) ends: Option<u64>,
    /// When their pod was bound.
    pub(super) bound: u64,
    pub(super) started: u64,
}

impl Process {
    pub(super) fn uses(&self, device: &str) -> bool {
        self.devices.iter().any(|(id, _)| id == device)
    }
}

impl World {
    pub(super) fn kubelets(&mut self) {
        let time = self.rng.random_range(200..1_200);
        self.after(time, What::Kubelets);
        let is_over = |ends: Option<u64>| ends.is_some_and(|ends| ends <= self.now);
        let processes = self.processes.iter().filter(|(_, process)| is_over(process.ends));
        let ended: Vec<String> = processes.map(|(uid, _)| uid.clone()).collect();
        for uid in ended {
            self.processes.remove(&uid);
            if self.api.pods.get(&uid).is_some_and(|pod| pod.is_deleting || pod.is_terminal) {
                self.api.remove(&uid);
            }
        }
        let is_faulty = self.is_faulty();
        let one_of = if self.settings.has_extremes { 2 } else { 8 };
        for (uid, process) in &mut self.processes {
            let pod = self.api.pods.get(uid);
            let lives = pod.is_some_and(|pod| !pod.is_deleting && !pod.is_terminal);
            if !lives && process.ends.is_none() {
                // Some do not end when they are told to.
                let lingers = self.rng.random_range(0..one_of) == 0 && is_faulty;
                let most = if lingers { 25_000 } else { 5_000 };
                process.ends = Some(self.now + self.rng.random_range(0..most));
            }
        }
        let (mut gone, mut new) = (Vec::new(), Vec::new());
        for (uid, pod) in &self.api.pods {
            match (&pod.node, self.processes.contains_key(uid)) {
                (Some(_), false) if pod.is_deleting || pod.is_terminal => gone.push(uid.clone()),
                (Some(_), false) => new.push(uid.clone()),
                _ => {}
            }
        }
        new.iter().for_each(|uid| self.start_container(uid));
        gone.iter().for_each(|uid| self.api.remove(uid));
    }

    /// The container runtime reads the annotations once.
    fn start_container(&mut self, uid: &str) {
        let is_over = self.has(Fault::OverLimit);
        let Some(pod) = self.api.pods.get(uid) else { return };
        let overuses = is_over && pod.overuses();
        let percent = if is_over { pod.of.uses } else { pod.of.uses.min(100) };
        let used = |mib: u64| mib * percent / 100 + if overuses { 500 } else { 0 };
        let devices: Vec<_> =
            pod.takes.iter().map(|(id, mib, _)| (id.clone(), used(*mib))).collect();
        let (node, bound) = (pod.node.clone().unwrap_or_default(), pod.bound);
        if overuses {
            self.excused.extend(devices.iter().map(|(id, _)| id.clone()));
        }
        self.processes.insert(
            uid.to_owned(),
            Process { node, devices, ends: None, bound, started: self.now },
        );
    }
}
