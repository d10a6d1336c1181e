//! Kubelets: they start and end containers, and remove pods whose containers have ended.

use rand::Rng;

use super::faults::Fault;
use super::lent::{Lent, limit_at_start};
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
    /// Whether it uses no GPU now, so that no list shows it.
    pub(super) is_idle: bool,
    /// Whether its container has no driver.
    pub(super) is_blind: bool,
    /// When its container restarts, because its pod was resized.
    restarts: Option<u64>,
    /// What is left of its last container, and until when.
    left: (Vec<(String, u64)>, u64),
    pub(super) lent: Lent,
}

impl Process {
    /// The devices that it uses or may use at any time, each with its MiB.
    pub(super) fn occupies(&self, now: u64) -> impl Iterator<Item = &(String, u64)> {
        let left = self.left.0.iter().filter(move |_| now < self.left.1);
        self.devices.iter().chain(left)
    }

    /// The same as agents list it: of an ended pod they also list processes that use no GPU.
    pub(super) fn listed(&self, now: u64, lives: bool) -> impl Iterator<Item = (&str, u64)> {
        let running = self.devices.iter().filter(move |_| !(self.is_idle && lives));
        let has_none = self.is_idle && self.lent.is_on;
        let running = running.map(move |(id, mib)| (&**id, if has_none { 0 } else { *mib }));
        let left = self.left.0.iter().filter(move |_| now < self.left.1);
        let other = left.chain(self.lent.listed(now));
        running.chain(other.map(|(id, mib)| (&**id, *mib)))
    }

    /// The devices that it uses or may use from now on. In runs that lend memory, a program that uses no
    /// memory when its pod ends allocates none any more.
    pub(super) fn may_use(&self, now: u64, lives: bool) -> impl Iterator<Item = &(String, u64)> {
        let is_over = self.lent.is_on && self.is_idle && !lives;
        self.occupies(now).skip(if is_over { self.devices.len() } else { 0 })
    }

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
        let mut ending = Vec::new();
        for (uid, process) in &mut self.processes {
            let pod = self.api.pods.get(uid);
            let lives = pod.is_some_and(|pod| !pod.is_deleting && !pod.is_terminal);
            if !lives && process.ends.is_none() && self.settings.has_slow_ends {
                ending.push(uid.clone());
            } else if !lives && process.ends.is_none() {
                // Some do not end when they are told to.
                let lingers = self.rng.random_range(0..one_of) == 0 && is_faulty;
                let most = if lingers { 25_000 } else { 5_000 };
                process.ends = Some(self.now + self.rng.random_range(0..most));
            }
        }
        if self.settings.has_slow_ends && !is_faulty {
            let soon = self.now + 5_000;
            let slow = self.processes.values_mut().filter_map(|it| it.ends.as_mut());
            slow.filter(|ends| **ends < u64::MAX).for_each(|ends| *ends = soon.min(*ends));
        }
        for uid in ending {
            let ends = self.now.saturating_add(self.ends_after(&uid));
            self.processes.get_mut(&uid).expect("it is there").ends = Some(ends);
        }
        self.restart_containers();
        let (mut gone, mut new) = (Vec::new(), Vec::new());
        for (uid, pod) in &self.api.pods {
            match (&pod.node, self.processes.contains_key(uid)) {
                (Some(_), false) if pod.is_deleting || pod.is_terminal => gone.push(uid.clone()),
                (Some(_), false) => new.push(uid.clone()),
                _ => {}
            }
        }
        for uid in new {
            if self.starts_on_instances(&uid) {
                self.start_container(&uid);
            }
        }
        if self.settings.lends_memory {
            self.use_memory();
        }
        gone.iter().for_each(|uid| self.api.remove(uid));
    }

    /// Carries out changes of CPU requests, for which containers restart. Some restart by their own fault.
    fn restart_containers(&mut self) {
        let (now, is_faulty) = (self.now, self.is_faulty());
        let lends_memory = self.settings.lends_memory;
        let (mut due, mut pending) = (Vec::new(), Vec::new());
        for (uid, process) in self.processes.iter_mut().filter(|(_, it)| it.ends.is_none()) {
            let Some(pod) = self.api.pods.get(uid).filter(|pod| pod.is_movable()) else { continue };
            let is_resized = pod.container.cpu_milli != pod.container.actual_cpu_milli;
            if is_resized && process.restarts.is_none() {
                let most = if is_faulty { 6_000 } else { 1_500 };
                process.restarts = Some(now + self.rng.random_range(0..most));
                if lends_memory && !pod.is_moving() && self.rng.random_range(0..12) == 0 {
                    pending.push(uid.clone());
                }
            }
            if self.rng.random_range(0..3) == 0 && !lends_memory {
                process.is_idle = !process.is_idle;
            }
            let crashes = is_faulty && self.rng.random_range(0..60) == 0;
            if crashes || process.restarts.is_some_and(|at| at <= now) {
                due.push(uid.clone());
            }
        }
        for uid in pending {
            if let Some(pod) = self.api.pods.get_mut(&uid) {
                pod.container.is_pending = true;
            }
            self.api.changed(&uid);
            self.lent.pended.insert(uid);
        }
        for uid in due {
            self.restart_container(&uid);
        }
    }

    /// The next container gets the devices that the annotations name now.
    fn restart_container(&mut self, uid: &str) {
        let (now, is_faulty) = (self.now, self.is_faulty());
        let by_driver = self.settings.has_driver_limits;
        let (Some(pod), Some(process)) = (self.api.pods.get_mut(uid), self.processes.get_mut(uid))
        else {
            return;
        };
        let is_resized = process.restarts.take().is_some_and(|at| at <= now);
        pod.container.starts += 1;
        let before = process.devices.clone();
        for (device, (id, ..)) in process.devices.iter_mut().zip(pod.written()) {
            device.0 = id;
        }
        let mut parts = process.devices.iter().zip(&pod.takes);
        if parts.any(|((_, used), (_, mib, _))| used > mib) {
            self.excused.extend(process.devices.iter().map(|(id, _)| id.clone()));
        }
        process.lent.limit = limit_at_start(pod, by_driver);
        let (moves, mut lent_until) = (before != process.devices, None);
        if is_resized {
            pod.container.actual_cpu_milli = pod.container.cpu_milli;
            pod.container.is_pending = false;
            let is_left = !process.is_idle && moves;
            let most = if is_faulty { 9_000 } else { 1_500 };
            let until = now + self.rng.random_range(0..most);
            lent_until = Some(until).filter(|_| process.lent.is_on && !process.is_idle);
            process.left = (if is_left { before.clone() } else { Vec::new() }, until);
        }
        process.lent.ends(&before, moves, lent_until);
        process.is_idle = self.rng.random_range(0..3) == 0;
        self.begins(uid);
        if is_resized {
            self.note_restarted(uid);
        }
        self.api.changed(uid);
    }

    /// The container runtime reads the annotations once.
    fn start_container(&mut self, uid: &str) {
        let is_over = self.has(Fault::OverLimit) && !self.settings.has_driver_limits;
        let Some(pod) = self.api.pods.get(uid) else { return };
        let overuses = is_over && pod.overuses() && !self.settings.has_mig;
        let may_overuse = is_over && !self.settings.has_mig; // an instance has no more
        let percent = if may_overuse { pod.of.uses } else { pod.of.uses.min(100) };
        let used = |mib: u64| mib * percent / 100 + if overuses { 500 } else { 0 };
        // Kubelet may have begun with the pod as it was when it was bound.
        let is_old = self.settings.has_guests && self.rng.random_range(0..3) == 0;
        let written = if is_old && pod.is_movable() { pod.first.clone() } else { pod.written() };
        let devices: Vec<_> = written
            .into_iter()
            .zip(&pod.takes)
            .map(|((id, ..), (_, mib, _))| (id, used(*mib)))
            .collect();
        let (node, bound) = (pod.node.clone().unwrap_or_default(), pod.bound);
        if overuses {
            self.excused.extend(devices.iter().map(|(id, _)| id.clone()));
        }
        let is_idle = pod.is_movable() && self.rng.random_range(0..3) == 0;
        let process = Process {
            node,
            devices,
            ends: None,
            bound,
            started: self.now,
            is_idle,
            is_blind: false,
            restarts: None,
            left: (Vec::new(), 0),
            lent: Lent {
                is_on: self.settings.lends_memory,
                limit: limit_at_start(pod, self.settings.has_driver_limits),
                ..Lent::default()
            },
        };
        self.processes.insert(uid.to_owned(), process);
        if self.settings.has_blind_starts {
            self.note_container(uid);
        }
        self.begins(uid);
        if let Some(pod) = self.api.pods.get_mut(uid).filter(|pod| pod.restarts_on_resize()) {
            pod.container.starts += 1;
            self.api.changed(uid);
        }
    }
}
