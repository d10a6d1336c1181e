//! A simulated node as a probe: its allocations become processes, as if pods ran there.
//!
//! Each confirmed allocation runs one process per device, which uses a part of its memory. When the
//! allocation turns to draining or disappears, the process lives on for the fleet's linger time,
//! like a real one. Nothing here reads a clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::simulated::fleet::{Fleet, FleetNode};
use agent::gpu::sample::{Probe, ProbeError, ProcessSampling, Sample};
use wire::api::state::DeviceKind;
use wire::report::bodies::{Allocation, AllocationState, DeviceReport, DeviceUse, ProcessUse};
use wire::units::Timestamp;

/// A node without pods for this time is sampled, and so reports, like a real one. Otherwise an idle
/// fleet would cost the extender five times what real nodes cost.
const IDLE_AFTER: Duration = Duration::from_secs(60);

/// Plays the GPUs of one node.
#[derive(Debug)]
pub struct SimulatedProbe {
    /// The devices; they never change.
    inventory: Arc<[DeviceReport]>,
    /// How long processes outlive their allocation.
    linger: Duration,
    /// Percent of the allocated memory that they use.
    use_percent: u32,
    /// The same for single pods.
    use_percent_of: BTreeMap<String, u32>,
    /// Running processes, by pod UID.
    processes: BTreeMap<String, SimulatedProcess>,
    /// Process id of the next one.
    next_pid: u32,
    /// When it last had pods, or else was sampled first.
    idle_since: Option<Timestamp>,
}

/// The processes of one pod: one per device, all with one process id.
#[derive(Debug)]
struct SimulatedProcess {
    pid: u32,
    /// UUID and used MiB of each device.
    memory_mib: Vec<(String, u64)>,
    /// When it ends; none while the pod runs.
    ends: Option<Timestamp>,
}

impl SimulatedProbe {
    /// Plays `node` by the settings of `fleet`.
    pub fn new(fleet: &Fleet, node: &FleetNode) -> Self {
        Self {
            inventory: node.inventory().into(),
            linger: Duration::from_millis(fleet.process_linger_ms),
            use_percent: fleet.use_percent,
            use_percent_of: fleet.use_percent_of.clone(),
            processes: BTreeMap::new(),
            next_pid: 1_000,
            idle_since: None,
        }
    }

    /// Starts the process of a confirmed allocation, unless it runs already.
    fn start(&mut self, allocation: &Allocation) {
        if let Some(running) = self.processes.get_mut(&allocation.pod_uid) {
            running.ends = None;
            return;
        }
        let percent = self.use_percent_of.get(&allocation.pod).copied().unwrap_or(self.use_percent);
        let used = allocation.devices.iter().map(|part| {
            let mib = u128::from(part.memory_mib) * u128::from(percent) / 100;
            (part.uuid.clone(), u64::try_from(mib).unwrap_or(u64::MAX))
        });
        let process =
            SimulatedProcess { pid: self.next_pid, memory_mib: used.collect(), ends: None };
        self.next_pid = self.next_pid.wrapping_add(1).max(1_000);
        self.processes.insert(allocation.pod_uid.clone(), process);
    }

    /// The processes on the device `uuid`.
    fn processes_on(&self, uuid: &str) -> Vec<ProcessUse> {
        let mut list = Vec::new();
        for (pod_uid, process) in &self.processes {
            for (_, memory_mib) in process.memory_mib.iter().filter(|(on, _)| on == uuid) {
                list.push(ProcessUse {
                    pid: process.pid,
                    pod_uid: Some(pod_uid.clone()),
                    memory_mib: Some(*memory_mib),
                });
            }
        }
        list
    }
}

impl Probe for SimulatedProbe {
    /// Lists processes each time until the node has had no pods for a minute, whatever is
    /// requested: it costs nothing here. Each list is reported, and from the replies alone this node
    /// learns which pods come and end.
    fn sample(&mut self, processes: ProcessSampling, now: Timestamp) -> Result<Sample, ProbeError> {
        if !self.processes.is_empty() {
            self.idle_since = Some(now);
        }
        self.processes.retain(|_, process| process.ends.is_none_or(|ends| now < ends));
        let idle_since = *self.idle_since.get_or_insert(now);
        let sample = sample_of(&self.inventory, |uuid| self.processes_on(uuid));
        match processes {
            ProcessSampling::Skip if now.since(idle_since) >= IDLE_AFTER => {
                Ok(sample.without_lists())
            }
            ProcessSampling::Skip | ProcessSampling::List => Ok(sample),
        }
    }

    fn observe(&mut self, allocations: &[Allocation], now: Timestamp) {
        for allocation in
            allocations.iter().filter(|allocation| allocation.state == AllocationState::Confirmed)
        {
            self.start(allocation);
        }
        let states: BTreeMap<&str, AllocationState> = allocations
            .iter()
            .map(|allocation| (allocation.pod_uid.as_str(), allocation.state))
            .collect();
        for (pod_uid, process) in &mut self.processes {
            let ended = match states.get(pod_uid.as_str()) {
                Some(AllocationState::Assumed | AllocationState::Confirmed) => false,
                Some(AllocationState::Draining) | None => true,
            };
            if ended && process.ends.is_none() {
                process.ends = Some(now.plus(self.linger));
            }
        }
    }

    fn may_block(&self) -> bool {
        false
    }
}

/// A sample of devices that work, each with its processes.
pub(crate) fn sample_of(
    inventory: &Arc<[DeviceReport]>,
    mut processes_on: impl FnMut(&str) -> Vec<ProcessUse>,
) -> Sample {
    let uses = inventory.iter().map(|device| {
        let processes = processes_on(&device.uuid);
        let used_mib = processes.iter().filter_map(|process| process.memory_mib).sum();
        // Like the driver: of a GPU in MIG mode only its health is read.
        let whole = device.kind != DeviceKind::MigParent;
        let busy = if processes.is_empty() { 0 } else { 50 };
        DeviceUse {
            uuid: device.uuid.clone(),
            used_mib: whole.then_some(used_mib),
            busy_percent: (device.kind == DeviceKind::Gpu).then_some(busy),
            healthy: device.healthy,
            fault: None,
            last_xid: None,
            fault_event: None,
            mps: None,
            processes: whole.then_some(processes),
            tenants: Vec::new(),
        }
    });
    Sample {
        inventory: Arc::clone(inventory),
        uses: uses.collect(),
        driver: None,
        xids: BTreeMap::new(),
        unreadable: 0,
        has_unwatched_pods: false,
        mig_failures: Vec::new(),
        memory_limits: None,
        containers: [].into(),
        draining: BTreeSet::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::report::bodies::AllocatedDevice;

    fn probe() -> SimulatedProbe {
        let fleet = Fleet::from_json(
            r#"{"process_linger_ms":500,"nodes":[{"name":"n","cpu_milli":1,"memory_mib":1,"gpus":[
                {"uuid":"GPU-a","model":"M","memory_mib":1000},
                {"uuid":"GPU-b","model":"M","memory_mib":1000,
                 "mig":[{"uuid":"MIG-a","profile":"1g.5gb","memory_mib":500}]}]}]}"#,
        );
        let fleet = fleet.unwrap();
        SimulatedProbe::new(&fleet, &fleet.nodes[0])
    }

    fn allocation(pod_uid: &str, uuid: &str, state: AllocationState) -> Allocation {
        let part =
            AllocatedDevice { uuid: uuid.to_owned(), memory_mib: 500, share_millionths: 500_000 };
        let (pod_uid, pod) = (pod_uid.to_owned(), format!("default/{pod_uid}"));
        Allocation { pod_uid, pod, state, devices: vec![part], is_guest: false }
    }

    /// Used MiB and the pods on each device that can be read, at `millis`.
    fn seen(probe: &mut SimulatedProbe, millis: u64) -> String {
        let now = Timestamp::from_millis(millis);
        let sample = probe.sample(ProcessSampling::List, now).unwrap();
        let parts = sample.uses.iter().filter_map(|device| {
            let pods = device.processes.as_ref()?.iter().filter_map(|p| p.pod_uid.as_deref());
            let pods: Vec<&str> = pods.collect();
            (!pods.is_empty())
                .then(|| format!("{} {} {}", device.uuid, device.used_mib.unwrap(), pods.join("+")))
        });
        parts.collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn a_confirmed_reservation_drains_after_its_pod_ends() {
        let mut probe = probe();
        let at = Timestamp::from_millis;
        probe.observe(&[allocation("p", "GPU-a", AllocationState::Assumed)], at(0));
        assert_eq!(seen(&mut probe, 0), "", "bind may still fail");
        let running = [
            allocation("p", "GPU-a", AllocationState::Confirmed),
            allocation("q", "MIG-a", AllocationState::Confirmed),
        ];
        probe.observe(&running, at(10));
        assert_eq!(seen(&mut probe, 10), "GPU-a 300 p, MIG-a 300 q");
        probe.observe(&[allocation("p", "GPU-a", AllocationState::Draining)], at(100));
        assert_eq!(seen(&mut probe, 599), "GPU-a 300 p, MIG-a 300 q");
        probe.observe(&[allocation("p", "GPU-a", AllocationState::Draining)], at(599));
        assert_eq!(seen(&mut probe, 600), "");
    }

    #[test]
    fn a_node_that_is_idle_for_long_lists_processes_only_when_asked() {
        let mut probe = probe();
        let at = |seconds: u64| Timestamp::from_millis(1_000 * seconds);
        let lists = |probe: &mut SimulatedProbe, seconds, processes| {
            probe.sample(processes, at(seconds)).unwrap().has_lists()
        };
        assert!(lists(&mut probe, 100, ProcessSampling::Skip), "pods may come soon");
        assert!(lists(&mut probe, 159, ProcessSampling::Skip));
        assert!(!lists(&mut probe, 160, ProcessSampling::Skip));
        assert!(lists(&mut probe, 161, ProcessSampling::List));
        probe.observe(&[allocation("p", "GPU-a", AllocationState::Confirmed)], at(200));
        assert!(lists(&mut probe, 200, ProcessSampling::Skip));
        assert!(lists(&mut probe, 900, ProcessSampling::Skip), "its pod may end");
        probe.observe(&[], at(900));
        assert!(lists(&mut probe, 901, ProcessSampling::Skip), "the list that shows its end");
        assert!(!lists(&mut probe, 961, ProcessSampling::Skip));
    }

    #[test]
    fn a_restored_reservation_keeps_its_process() {
        let mut probe = probe();
        let confirmed = [allocation("p", "GPU-a", AllocationState::Confirmed)];
        probe.observe(&confirmed, Timestamp::from_millis(0));
        probe.observe(&[], Timestamp::from_millis(100));
        probe.observe(&confirmed, Timestamp::from_millis(200));
        assert_eq!(seen(&mut probe, 10_000), "GPU-a 300 p");
    }
}
