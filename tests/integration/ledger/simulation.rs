//! A small cluster lives through faults, step by step from a seed: lost, repeated and late messages, two
//! schedulers at once, crashes, deleted nodes and restarts of the ledger. After every step the books
//! are held against what is true outside.
//!
//! A failure prints its seed and step. `tests/integration/simulation.rs` has the whole control core.

mod cluster;
mod schedulers;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::harness::ledger::{DEVICE_MIB, add_node, fraction, pod, request_of, seconds, settings};
use cluster::{Agent, Api, Kubelets, NODES, inventory, taken};
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::nodes::state::{Ledger, Settings};
use engine::ledger::query::queries::PlacementRequest;
use engine::model::policy::Policy;
use engine::model::request::Amount;
use engine::model::reservation::{Placement, ReservationState, Tenure};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use schedulers::{Binding, Scheduler};
use wire::ids::PodUid;
use wire::units::{Demand, HostAmount, MemMib, Share, Timestamp};

const STEPS: u64 = 1200;

/// Most pods at a time: about twice as many as fit.
const PODS: usize = 40;

/// A Binding that is undecided for this long is looked into.
const UNDECIDED: Duration = Duration::from_secs(2);

/// Seeds that once failed, and how many others are run.
const FAILED_SEEDS: [u64; 1] = [14];
const SEEDS: u64 = 10;

/// Settings of the ledger after this many restarts. What is seen on a device is exact here.
fn exact(restarts: u64) -> Settings {
    let unmanaged_tolerance = MemMib::ZERO;
    Settings { first_session: 1 + 1_000_000 * restarts, unmanaged_tolerance, ..settings() }
}

/// Everything there is.
struct Bed {
    rng: ChaCha8Rng,
    now: Timestamp,
    ledger: Ledger,
    restarts: u64,
    api: Api,
    kubelets: Kubelets,
    agents: [Agent; 4],
    schedulers: [Scheduler; 2],
    bindings: Vec<Binding>,
    queries: BTreeMap<PodUid, PlacementRequest>,
    created: u64,
    placed: u64,
}

impl Bed {
    fn new(seed: u64) -> Self {
        let ledger = Ledger::new(exact(0));
        let mut api = Api::default();
        for (at, node) in NODES.iter().enumerate() {
            add_node(&ledger, node, &inventory(at), seconds(0));
            api.set_node(at, true);
        }
        Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            now: seconds(1),
            ledger,
            restarts: 0,
            api,
            kubelets: Kubelets::default(),
            agents: Default::default(),
            schedulers: Default::default(),
            bindings: Vec::new(),
            queries: BTreeMap::new(),
            created: 0,
            placed: 0,
        }
    }

    fn step(&mut self) {
        self.now = Timestamp::from_millis(self.now.millis() + self.rng.random_range(0..60));
        let at = self.rng.random_range(0..NODES.len());
        let (rng, ledger, now) = (&mut self.rng, &self.ledger, self.now);
        match rng.random_range(0..1000) {
            0..80 => self.create(),
            80..330 => self.schedule(),
            330..450 => self.deliver_binding(),
            450..600 => self.api.watch(rng, ledger, now),
            600..630 => self.api.repeat(rng, ledger, now),
            630..700 => self.kubelets.sync(rng, &self.api, now),
            700..850 if self.api.nodes.contains(&at) => {
                self.agents[at].speak(rng, at, &self.kubelets, ledger, now);
            }
            850..860 => self.agents[at].arrive_late(rng, at, ledger, now),
            860..865 => self.agents[at].restart(),
            865..925 => self.end_some_pod(),
            925..960 => drop(ledger.tick(now)),
            960..985 => self.look_into_undecided(),
            985..990 => self.bind_past_us(at),
            990..993 => self.change_node(at),
            993..996 => self.restart(),
            _ => self.now = Timestamp::from_millis(now.millis() + rng.random_range(0..4000)),
        }
    }

    fn create(&mut self) {
        if self.api.pods.len() >= PODS {
            return;
        }
        self.created += 1;
        let rng = &mut self.rng;
        let amount = match rng.random_range(0..10) {
            0..5 => fraction([100_000, 200_000, 333_330, 500_000][rng.random_range(0..4)]),
            5..7 => Amount::Memory(MemMib::new(rng.random_range(1..DEVICE_MIB))),
            7 => Amount::FractionAndMemory(
                Share::from_millionths(rng.random_range(1..1_000_000)),
                MemMib::new(rng.random_range(1..DEVICE_MIB)),
            ),
            _ => Amount::Whole,
        };
        let count = if rng.random_bool(0.2) { 2 } else { 1 };
        let policy = Policy::ALL[rng.random_range(0..Policy::ALL.len())];
        let pod = pod(&format!("pod-{}", self.created));
        self.queries.insert(pod.uid.clone(), request_of(amount, count, policy));
        self.api.create(PodFact {
            pod,
            node: None,
            host: HostAmount::ZERO,
            is_terminal: false,
            request: None,
            wants_gpu: true,
            placement: None,
            bound_by_us: true,
            moves: MoveFact::default(),
            tenure: Tenure::default(),
        });
    }

    fn some_pod(&mut self, is_bound: bool) -> Option<PodUid> {
        let pods = self.api.pods.iter().filter(|(_, pod)| pod.fact.node.is_some() == is_bound);
        let uids: Vec<&PodUid> = pods.map(|(uid, _)| uid).collect();
        (!uids.is_empty()).then(|| uids[self.rng.random_range(0..uids.len())].clone())
    }

    fn end_some_pod(&mut self) {
        let is_bound = self.rng.random_bool(0.9);
        let Some(uid) = self.some_pod(is_bound) else { return };
        if self.rng.random_bool(0.5) { self.api.finish(&uid) } else { self.api.delete(&uid) }
    }

    fn bind_past_us(&mut self, at: usize) {
        if let Some(uid) = self.some_pod(false) {
            self.api.bind_bare(&uid, at);
        }
    }

    fn change_node(&mut self, at: usize) {
        let exists = self.api.nodes.contains(&at);
        self.api.set_node(at, !exists);
        if exists {
            self.kubelets.lose_node(at);
        } else {
            self.agents[at].restart();
        }
    }

    /// The extender is killed and comes back: pending pods are fenced first, so that what is still
    /// under way from its former life conflicts.
    fn restart(&mut self) {
        self.restarts += 1;
        self.ledger = Ledger::new(exact(self.restarts));
        let pending = self.api.pods.iter().filter(|(_, pod)| pod.fact.node.is_none());
        for uid in pending.map(|(uid, _)| uid.clone()).collect::<Vec<_>>() {
            self.api.patch(&uid);
        }
        self.api.list(&self.ledger, self.now);
        self.schedulers = Default::default();
        self.agents.iter_mut().for_each(Agent::lose_connections);
        for (uid, process) in &mut self.kubelets.processes {
            let lives = self.api.pods.get(uid).is_some_and(|pod| !pod.fact.is_terminal);
            process.is_stranded |= !lives;
        }
    }

    // --- checkers --------------------------------------------------------------------------------

    fn check(&self) -> Result<(), String> {
        self.ledger.audit().map_err(|faults| format!("{faults:?}"))?;
        let whole = Demand { memory: MemMib::new(DEVICE_MIB), share: Share::WHOLE };
        for node in self.ledger.nodes() {
            for device in node.devices() {
                whole
                    .checked_sub(device.allocated())
                    .ok_or_else(|| format!("{} is allocated over capacity", device.device().id))?;
            }
        }
        self.check_bound_pods()?;
        self.check_processes(whole)
    }

    /// Every pod that is bound with our placement is allocated with it, from its Binding on.
    fn check_bound_pods(&self) -> Result<(), String> {
        for (uid, pod) in &self.api.pods {
            let Some(written) = pod.fact.placement.as_ref() else { continue };
            if pod.fact.is_terminal {
                continue;
            }
            let nodes = self.ledger.nodes();
            let holding = nodes.iter().filter(|node| node.reservation(uid).is_some()).count();
            let held = self.ledger.reservation(uid);
            if holding != 1 || held.as_ref().map(|held| &held.placement) != Some(written) {
                return Err(format!(
                    "{uid} is bound with {written:?}, and {holding} nodes hold {held:?}"
                ));
            }
        }
        Ok(())
    }

    /// On no GPU do pods that are bound or still running take more than it has.
    fn check_processes(&self, whole: Demand) -> Result<(), String> {
        let bound = self.api.pods.values().filter(|pod| !pod.fact.is_terminal);
        let mut placements: BTreeMap<PodUid, Placement> = bound
            .filter_map(|pod| Some((pod.fact.pod.uid.clone(), pod.fact.placement.clone()?)))
            .collect();
        for (uid, process) in &self.kubelets.processes {
            let mut placement = process.placement.clone();
            if process.is_stranded {
                // its share is in no ledger after a restart; its memory is seen as unallocated use
                placement.devices.iter_mut().for_each(|device| device.demand.share = Share::ZERO);
            }
            placements.insert(uid.clone(), placement);
        }
        for (device, sum) in taken(placements.values()) {
            if whole.checked_sub(sum).is_none() {
                let here: Vec<_> = placements
                    .iter()
                    .filter(|(_, p)| p.devices.iter().any(|d| d.id.as_str() == device))
                    .collect();
                return Err(format!("{device} carries {sum:?}: {here:#?}"));
            }
        }
        Ok(())
    }

    /// The faults end. What was reported must be true, and everything must end.
    fn settle(&mut self) -> Result<(), String> {
        while !self.bindings.is_empty() {
            self.deliver_binding();
        }
        self.api.watch_all(&mut self.rng, &self.ledger, self.now);
        self.now = Timestamp::from_millis(self.now.millis() + 60_000);
        self.look_into_undecided();
        self.api.watch_all(&mut self.rng, &self.ledger, self.now);
        self.ledger.tick(self.now);
        self.check()?;
        let assumed = |state| matches!(state, ReservationState::Assumed { .. });
        let nodes = self.ledger.nodes();
        let undecided: Vec<_> = nodes
            .iter()
            .flat_map(|node| node.reservations().values())
            .filter(|held| assumed(held.state))
            .collect();
        if !undecided.is_empty() || self.ledger.hold_count() > 0 {
            return Err(format!("undecided forever: {undecided:?}"));
        }
        for uid in self.api.pods.keys().cloned().collect::<Vec<_>>() {
            self.api.delete(&uid);
        }
        self.api.watch_all(&mut self.rng, &self.ledger, self.now);
        self.now = Timestamp::from_millis(self.now.millis() + 60_000);
        self.ledger.tick(self.now);
        let rest: Vec<_> =
            self.ledger.nodes().into_iter().filter(|n| !n.reservations().is_empty()).collect();
        if rest.is_empty() { Ok(()) } else { Err(format!("allocated forever: {rest:?}")) }
    }
}

fn run(seed: u64) -> u64 {
    let mut bed = Bed::new(seed);
    for step in 0..STEPS {
        bed.step();
        if let Err(fault) = bed.check() {
            panic!("seed {seed}, step {step}: {fault}");
        }
    }
    if let Err(fault) = bed.settle() {
        panic!("seed {seed}, at the end: {fault}");
    }
    bed.placed
}

#[test]
fn the_ledger_is_correct_after_any_failure() {
    let placed: u64 = FAILED_SEEDS.into_iter().chain(0..SEEDS).map(run).sum();
    assert!(placed > 20 * SEEDS, "only {placed} pods were placed: nothing was tried");
}
