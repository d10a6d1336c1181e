//! The cluster around the ledger: a fake API server with a watch, kubelets with processes, agents on
//! a network that loses, repeats and delays.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use engine::hardware::inventory::NodeInventory;
use engine::ledger::change::facts::PodFact;
use engine::ledger::change::reports::NodeReport;
use engine::ledger::nodes::state::Ledger;
use engine::model::reservation::{PlacedDevice, Placement};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::seen::{DeviceUse, ProcessUse};
use wire::units::{Demand, MemMib, Timestamp};

use crate::harness::ledger::{DEVICE_MIB, gpus, host, seen};

pub(crate) const NODES: [&str; 4] = ["a", "b", "c", "d"];

/// Longest time a process outlives its pod: less than the drain limit.
const AFTERLIFE_MS: u64 = 15_000;

pub(crate) fn inventory(at: usize) -> NodeInventory {
    let count = [2, 3, 4, 1][at];
    gpus(NODES[at], count, ["T4", "A100"][at % 2], DEVICE_MIB)
}

/// A pod as the API server has it.
#[derive(Clone, Debug)]
pub(crate) struct ApiPod {
    pub(crate) fact: PodFact,
    /// Its resource version.
    pub(crate) version: u64,
}

/// One event of the watch on a pod.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "few are on their way")]
enum PodEvent {
    Seen(PodFact),
    Gone(PodUid),
}

/// The API server, and what its watch has not sent yet.
#[derive(Default)]
pub(crate) struct Api {
    pub(crate) pods: BTreeMap<PodUid, ApiPod>,
    pub(crate) nodes: BTreeSet<usize>,
    untold: BTreeMap<PodUid, VecDeque<PodEvent>>,
    untold_nodes: BTreeMap<usize, VecDeque<bool>>,
    reported: Vec<PodEvent>,
}

impl Api {
    pub(crate) fn create(&mut self, fact: PodFact) {
        let uid = fact.pod.uid.clone();
        self.pods.insert(uid.clone(), ApiPod { fact, version: 1 });
        self.tell(&uid);
    }

    fn tell(&mut self, uid: &PodUid) {
        let event = match self.pods.get(uid) {
            Some(pod) => PodEvent::Seen(pod.fact.clone()),
            None => PodEvent::Gone(uid.clone()),
        };
        self.untold.entry(uid.clone()).or_default().push_back(event);
    }

    /// The Binding subresource: succeeds once, on the version that its sender has read.
    pub(crate) fn bind(&mut self, uid: &PodUid, version: u64, placement: &Placement) -> bool {
        let Some(pod) = self.pods.get_mut(uid) else { return false };
        if pod.version != version || pod.fact.node.is_some() {
            return false;
        }
        pod.fact.node = Some(placement.node.clone());
        pod.fact.placement = Some(placement.clone());
        pod.version += 1;
        self.tell(uid);
        true
    }

    /// Another scheduler binds the pod to a node, without a placement.
    pub(crate) fn bind_bare(&mut self, uid: &PodUid, at: usize) {
        let Some(pod) = self.pods.get_mut(uid).filter(|pod| pod.fact.node.is_none()) else {
            return;
        };
        pod.fact.node = Some(NodeName::new(NODES[at]));
        pod.version += 1;
        self.tell(uid);
    }

    /// Writes a fence on a pod, so that a Binding under way conflicts.
    pub(crate) fn patch(&mut self, uid: &PodUid) {
        if let Some(pod) = self.pods.get_mut(uid) {
            pod.version += 1;
        }
    }

    pub(crate) fn finish(&mut self, uid: &PodUid) {
        if let Some(pod) = self.pods.get_mut(uid) {
            pod.fact.is_terminal = true;
            pod.version += 1;
            self.tell(uid);
        }
    }

    pub(crate) fn delete(&mut self, uid: &PodUid) {
        if self.pods.remove(uid).is_some() {
            self.tell(uid);
        }
    }

    pub(crate) fn set_node(&mut self, at: usize, exists: bool) {
        if exists {
            self.nodes.insert(at)
        } else {
            self.nodes.remove(&at)
        };
        self.untold_nodes.entry(at).or_default().push_back(exists);
    }

    /// Sends the ledger one unsent fact, of a random object.
    pub(crate) fn watch(&mut self, rng: &mut ChaCha8Rng, ledger: &Ledger, now: Timestamp) {
        self.untold.retain(|_, events| !events.is_empty());
        let choice = rng.random_range(0..=self.untold.len());
        if let Some(event) = self.untold.values_mut().nth(choice).and_then(VecDeque::pop_front) {
            tell_pod(ledger, &event, now);
            self.reported.push(event);
            return;
        }
        let at = rng.random_range(0..NODES.len());
        if let Some(exists) = self.untold_nodes.entry(at).or_default().pop_front() {
            tell_node(ledger, at, exists);
        }
    }

    /// Sends the ledger a fact again, perhaps long after.
    pub(crate) fn repeat(&self, rng: &mut ChaCha8Rng, ledger: &Ledger, now: Timestamp) {
        if !self.reported.is_empty() {
            tell_pod(ledger, &self.reported[rng.random_range(0..self.reported.len())], now);
        }
    }

    pub(crate) fn watch_all(&mut self, rng: &mut ChaCha8Rng, ledger: &Ledger, now: Timestamp) {
        let rest = |api: &Self| {
            api.untold.values().any(|events| !events.is_empty())
                || api.untold_nodes.values().any(|events| !events.is_empty())
        };
        while rest(self) {
            self.watch(rng, ledger, now);
        }
    }

    /// Lists everything to a fresh ledger; its watch starts there.
    pub(crate) fn list(&mut self, ledger: &Ledger, now: Timestamp) {
        self.untold.clear();
        self.untold_nodes.clear();
        self.reported.clear();
        for at in &self.nodes {
            tell_node(ledger, *at, true);
        }
        for pod in self.pods.values() {
            ledger.see_pod(&pod.fact, now);
        }
        ledger.set_listed(now);
    }
}

fn tell_pod(ledger: &Ledger, event: &PodEvent, now: Timestamp) {
    match event {
        PodEvent::Seen(fact) => drop(ledger.see_pod(fact, now)),
        PodEvent::Gone(uid) => drop(ledger.end_pod(uid, now)),
    }
}

fn tell_node(ledger: &Ledger, at: usize, exists: bool) {
    let name = NodeName::new(NODES[at]);
    if exists {
        ledger.see_node(&name, host(), PoolName::new(""));
    } else {
        ledger.lose_node(&name);
    }
}

/// The processes of a pod on its node.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pub(crate) placement: Placement,
    ends: Option<Timestamp>,
    /// Whether the ledger was restarted after the pod had ended: then only its memory is seen.
    pub(crate) is_stranded: bool,
}

/// All kubelets.
#[derive(Default)]
pub(crate) struct Kubelets {
    pub(crate) processes: BTreeMap<PodUid, Process>,
}

impl Kubelets {
    /// Starts what is bound, and ends what has no living pod, some time after.
    pub(crate) fn sync(&mut self, rng: &mut ChaCha8Rng, api: &Api, now: Timestamp) {
        for (uid, pod) in &api.pods {
            let Some(placement) = &pod.fact.placement else { continue };
            let is_here = api.nodes.iter().any(|at| placement.node.as_str() == NODES[*at]);
            if is_here && !pod.fact.is_terminal && rng.random_bool(0.5) {
                self.processes.entry(uid.clone()).or_insert_with(|| Process {
                    placement: placement.clone(),
                    ends: None,
                    is_stranded: false,
                });
            }
        }
        for (uid, process) in &mut self.processes {
            let lives = api.pods.get(uid).is_some_and(|pod| !pod.fact.is_terminal);
            if !lives && process.ends.is_none() {
                let after = rng.random_range(0..AFTERLIFE_MS);
                process.ends = Some(Timestamp::from_millis(now.millis() + after));
            }
        }
        self.processes.retain(|_, process| process.ends.is_none_or(|ends| now < ends));
    }

    pub(crate) fn lose_node(&mut self, at: usize) {
        self.processes.retain(|_, process| process.placement.node.as_str() != NODES[at]);
    }

    /// What an agent of the node sees now.
    pub(crate) fn uses(&self, at: usize) -> Vec<DeviceUse> {
        let seen_on = |id: &wire::ids::DeviceId| {
            let mut total = MemMib::ZERO;
            let mut processes = Vec::new();
            for (uid, process) in &self.processes {
                for placed in process.placement.devices.iter().filter(|placed| placed.id == *id) {
                    total = total.checked_add(placed.demand.memory).expect("small amounts");
                    let memory = Some(placed.demand.memory);
                    processes.push(ProcessUse { pod: Some(uid.clone()), memory });
                }
            }
            DeviceUse { used: Some(total), processes: Some(processes), ..seen(id, []) }
        };
        inventory(at).devices().iter().map(|device| seen_on(&device.id)).collect()
    }
}

/// The agent of one node, and its messages that are still on their way.
#[derive(Default)]
pub(crate) struct Agent {
    starts: u64,
    session: Option<u64>,
    sequence: u64,
    late: Vec<NodeReport>,
}

impl Agent {
    pub(crate) fn restart(&mut self) {
        *self = Self { starts: self.starts + 1, ..Self::default() };
    }

    /// Samples and sends; the report or its reply may be lost, repeated or late.
    pub(crate) fn speak(
        &mut self,
        rng: &mut ChaCha8Rng,
        at: usize,
        kubelets: &Kubelets,
        ledger: &Ledger,
        now: Timestamp,
    ) {
        self.sequence += 1;
        let report = NodeReport {
            allocations_version: None,
            agent: format!("{}-{}", NODES[at], self.starts),
            session: self.session,
            sequence: self.sequence,
            inventory: self.session.is_none().then(|| inventory(at)),
            uses: kubelets.uses(at),
        };
        if rng.random_bool(0.1) {
            self.late.push(report.clone());
            self.late.truncate(3);
        }
        if rng.random_bool(0.1) {
            return; // lost
        }
        let receipt = ledger.report(NODES[at], &report, now);
        if rng.random_bool(0.9) {
            self.session = receipt.ok().map(|receipt| receipt.session);
        }
    }

    /// An old message arrives now.
    pub(crate) fn arrive_late(
        &mut self,
        rng: &mut ChaCha8Rng,
        at: usize,
        ledger: &Ledger,
        now: Timestamp,
    ) {
        if !self.late.is_empty() {
            let report = self.late.remove(rng.random_range(0..self.late.len()));
            drop(ledger.report(NODES[at], &report, now));
        }
    }

    /// The connections of the agent end with the ledger that they led to.
    pub(crate) fn lose_connections(&mut self) {
        self.late.clear();
    }
}

/// Sum of what `placements` take of each device.
pub(crate) fn taken<'a>(
    placements: impl Iterator<Item = &'a Placement>,
) -> BTreeMap<String, Demand> {
    let mut taken: BTreeMap<String, Demand> = BTreeMap::new();
    for PlacedDevice { id, demand } in placements.flat_map(|placement| &placement.devices) {
        let sum = taken.entry(id.to_string()).or_default();
        *sum = sum.checked_add(*demand).expect("small amounts");
    }
    taken
}
