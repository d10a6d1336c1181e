//! Pods at rest whose restart is refused, and whose container ends just then: kubelet may have started the next
//! one before its status says so.

use std::collections::BTreeMap;

use gpupack::hardware::device::PodUid;
use gpupack::ledger::query::reading::Readiness;
use rand::Rng;

use super::faults::Fault;
use super::{What, World};

/// A watch that is behind may show only after this time where an earlier process let a pod start.
const COUNTED_WITHIN: u64 = 30_000;

impl World {
    /// A process has let a pod at rest start elsewhere. Sometimes it cannot have it restarted.
    pub(super) fn first_write(&mut self, uid: &str) {
        if !self.hits(Fault::Denial, 50) {
            return;
        }
        self.api.unresizable.insert(uid.to_owned());
        let time = self.rng.random_range(2_000..20_000);
        self.after(time, What::Resizable { uid: uid.to_owned() });
        if self.rng.random_range(0..2) == 0 {
            let time = self.rng.random_range(0..200);
            self.after(time, What::EndsUnseen { uid: uid.to_owned() });
        }
    }

    /// The container of a pod ends, and the next one starts before kubelet's status says so.
    pub(super) fn ends_unseen(&mut self, uid: &str) {
        let lives = |pod: &super::api::Pod| !pod.is_deleting && !pod.is_terminal;
        let pod = self.api.pods.get_mut(uid).filter(|pod| lives(pod) && pod.container.starts > 0);
        let (Some(pod), Some(process)) = (pod, self.processes.get_mut(uid)) else { return };
        pod.container.starts += 1;
        for (device, (id, ..)) in process.devices.iter_mut().zip(pod.written()) {
            device.0 = id;
        }
        process.is_idle = true;
        let (ended, started) = (self.rng.random_range(0..80), self.rng.random_range(500..8_000));
        self.after(ended, What::Shown { uid: uid.to_owned(), is_running: false });
        self.after(started, What::Shown { uid: uid.to_owned(), is_running: true });
    }

    /// Kubelet's status says that the container of a pod has ended, or that the next one runs.
    pub(super) fn show_container(&mut self, uid: &str, is_running: bool) {
        let Some(pod) = self.api.pods.get_mut(uid) else { return };
        pod.container.has_ended = !is_running;
        if is_running {
            pod.container.shown = pod.container.starts;
        }
        self.api.changed(uid);
    }

    /// A pod that runs counts where it runs, also while it uses no GPU.
    pub(super) fn check_counted(&mut self) -> Result<(), String> {
        let Some(replica) = self.replicas[self.serving()].as_ref() else { return Ok(()) };
        let is_ready = replica.app.leading.is_here() && replica.app.readiness() == Readiness::Ready;
        if !is_ready || replica.is_frozen || self.has(Fault::Edit) {
            return Ok(());
        }
        let mut uncounted = BTreeMap::new();
        for (uid, process) in &self.processes {
            let is_placed =
                self.api.pods.get(uid).is_some_and(|pod| pod.is_placed() && !pod.is_deleting);
            let pod = PodUid::new(uid.as_str());
            let Some(node) = replica.app.ledger.node(&process.node).filter(|_| is_placed) else {
                continue;
            };
            let mut there =
                node.devices().iter().filter(|it| process.uses(it.device().id.as_str()));
            if there.any(|it| !it.tenants().contains_key(&pod) && !it.guests().contains_key(&pod)) {
                let since = self.uncounted.get(uid).copied().unwrap_or(self.now);
                uncounted.insert(uid.clone(), since);
            }
        }
        self.uncounted = uncounted;
        let is_late = |since: &u64| self.now > since + COUNTED_WITHIN;
        match self.uncounted.iter().find(|(_, since)| is_late(since)) {
            Some((uid, since)) => {
                Err(format!("since {since} ms {uid} runs where it does not count"))
            }
            None => Ok(()),
        }
    }
}
