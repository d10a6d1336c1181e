//! Nodes: what they have, and what the API server and agents say about them.

use kube_api::pod::watched::NodeFacts;
use wire::ids::NodeName;
use wire::units::{HostAmount, MemMib, MilliCpu};

use super::agents::Agent;
use super::api::Pod;
use super::mig::{self, MigNode};
use super::settings::Settings;
use super::upgrades::NodeWork;
use super::{GPU_MIB, World};

const GPUS: usize = 2;

/// CPUs of a node.
const CPUS: u64 = 24;

pub(super) const ZONES: [&str; 2] = ["east", "west"];

#[derive(Clone, Debug)]
pub(super) struct Gpu {
    pub(super) id: String,
    pub(super) mib: u64,
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) zone: &'static str,
    /// Whether only pods that tolerate it run here.
    pub(super) is_tainted: bool,
    pub(super) is_cordoned: bool,
    pub(super) gpus: Vec<Gpu>,
    pub(super) agents: Vec<Agent>,
    /// Until then its agents do not report.
    pub(super) silent_until: u64,
    /// Until then they leave out a device, or the processes of one.
    pub(super) partial_until: u64,
    /// Until then they name a device of another node, too.
    pub(super) lies_until: u64,
    pub(super) has_lied: bool,
    /// What is divided of its GPUs, in the runs with MIG.
    pub(super) mig: Option<MigNode>,
    /// Until then containers start without the driver; zero: they have it.
    pub(super) blind_until: u64,
    /// What NVIDIA's tools do with its driver.
    pub(super) work: NodeWork,
}

impl Node {
    pub(super) fn new(at: usize, settings: &Settings) -> Self {
        let name = format!("node-{at}");
        let mib = if settings.has_mig { mig::GPU_MIB } else { GPU_MIB };
        let gpu = |gpu| Gpu { id: format!("{name}-{gpu}"), mib };
        let gpus: Vec<Gpu> = (0..GPUS).map(gpu).collect();
        let mig = settings.has_mig.then(|| MigNode::new(&gpus, settings));
        Self {
            zone: ZONES[at % 2],
            is_tainted: at == 3,
            is_cordoned: false,
            gpus,
            agents: vec![Agent::begun(0, 0)],
            silent_until: 0,
            partial_until: 0,
            lies_until: 0,
            has_lied: false,
            mig,
            blind_until: 0,
            work: NodeWork::default(),
            name,
        }
    }

    /// The GPUs that it has now.
    pub(super) fn gpu_ids(&self) -> impl Iterator<Item = &str> {
        self.gpus.iter().map(|gpu| &*gpu.id)
    }

    /// Whether it has this GPU or MIG instance.
    pub(super) fn has_device(&self, id: &str) -> bool {
        self.gpu_ids().any(|gpu| gpu == id) || self.mig.as_ref().is_some_and(|mig| mig.has(id))
    }

    /// Whether it boots.
    pub(super) fn is_down(&self, now: u64) -> bool {
        self.mig.as_ref().is_some_and(|mig| now < mig.down_until)
    }

    /// The next reports have the inventory again.
    pub(super) fn devices_changed(&mut self) {
        self.agents.iter_mut().for_each(Agent::renew);
    }

    pub(super) fn facts(&self) -> NodeFacts {
        let host = HostAmount { cpu: MilliCpu::new(CPUS * 1_000), memory: MemMib::new(1 << 18) };
        NodeFacts {
            name: NodeName::new(self.name.as_str()),
            host,
            is_unschedulable: self.is_cordoned,
            is_ready: true,
            labels: self.work.labels(),
        }
    }

    /// Whether kube-scheduler may choose it for this pod, if it has the CPUs.
    pub(super) fn suits(&self, pod: &Pod) -> bool {
        let is_allowed = !self.is_tainted || pod.of.tolerates;
        !self.is_cordoned && is_allowed && pod.of.zone.is_none_or(|zone| zone == self.zone)
    }

    /// Whether a pod fits beside others that take these CPUs.
    pub(super) fn has_cpus(taken: u64, pod: &Pod) -> bool {
        taken + pod.of.cpu <= CPUS
    }
}

impl World {
    /// Lets watches and kube-schedulers see the nodes.
    pub(super) fn nodes_changed(&mut self) {
        self.nodes_version += 1;
        let now = self.now;
        self.schedulers.iter_mut().for_each(|scheduler| scheduler.see_nodes(now));
        (0..self.schedulers.len()).for_each(|by| self.plan_schedule(by, 1));
    }

    /// The same of what kube-scheduler does not look at.
    pub(super) fn labels_changed(&mut self) {
        self.nodes_version += 1;
    }

    /// CPUs that bound pods take of a node.
    pub(super) fn cpus_taken(&self, node: &str) -> u64 {
        let is_there = |pod: &&Pod| pod.is_placed() && pod.node.as_deref() == Some(node);
        self.api.pods.values().filter(is_there).map(|pod| pod.of.cpu).sum()
    }
}
