//! Upgrades of drivers by the GPU Operator, and changes of GPUs by MIG Manager: the labels of nodes, what is done to
//! their pods, and what agents may have open meanwhile.

use std::collections::BTreeMap;

use engine::model::reservation::ReservationState;
use rand::Rng;
use rand::seq::IndexedRandom;
use serde_json::Value;
use server::api::reports;
use wire::driver_work::{DriverWork, MigChange, UpgradeState};
use wire::ids::PodUid;

use super::blind::check_starts_end;
use super::faults::Fault;
use super::nodes::Node;
use super::replica::Replica;
use super::{What, World};

/// A Binding may be posted for so long after its process has seen that its node takes no pods.
const BINDS_FOR: u64 = 10_000;

/// The Operator gives up a drain, or a driver that cannot be unloaded, after this time.
const GIVES_UP_AFTER: u64 = 15_000;

/// Answers of processes whose watch was behind count no longer after this time.
const KNOWN_WITHIN: u64 = 6_000;

/// What NVIDIA's tools do with the driver of a node.
#[derive(Debug, Default)]
pub(super) struct NodeWork {
    upgrade: Option<UpgradeState>,
    mig: Option<MigChange>,
    /// Since when the label has this value.
    since: u64,
    /// Whether the driver is not loaded.
    is_away: bool,
    /// Whether an upgrade has ended here: the label stays, with another value.
    was_upgraded: bool,
}

impl NodeWork {
    /// As its Node object has them.
    pub(super) fn labels(&self) -> BTreeMap<String, String> {
        let done = self.was_upgraded.then_some("upgrade-done");
        let upgrade = self.upgrade.map(UpgradeState::value).or(done);
        let upgrade = upgrade.map(|value| (DriverWork::UPGRADE_LABEL, value));
        let mig = self.mig.map(|change| (DriverWork::MIG_LABEL, change.value()));
        let labels = upgrade.into_iter().chain(mig);
        labels.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    /// Why it takes no new pods with GPUs.
    fn refuses(&self) -> Option<String> {
        let refuses = |state: &UpgradeState| {
            !matches!(state, UpgradeState::Required | UpgradeState::NodeMaintenance)
        };
        let upgrade = self.upgrade.filter(refuses).map(|state| state.value().to_owned());
        upgrade.or_else(|| self.mig.map(|change| change.value().to_owned()))
    }

    /// Whether the driver must not be open.
    fn closes(&self) -> bool {
        let upgrade = self.upgrade.is_some_and(|state| {
            (UpgradeState::PodDeletion..=UpgradeState::PodRestart).contains(&state)
        });
        upgrade || self.mig.is_some()
    }

    /// Whether the upgrade of its driver has begun and has not ended.
    fn is_upgrading(&self) -> bool {
        self.upgrade.is_some_and(|state| state != UpgradeState::Required)
    }
}

impl Node {
    /// Whether an agent of it has the driver open.
    pub(super) fn has_open(&self, agent: usize) -> bool {
        !self.work.is_away && self.agents[agent].gate.keeps_closed().is_none()
    }
}

/// What a watch of nodes has shown.
#[derive(Default)]
pub(super) struct SeenWorks {
    /// Why each node takes no new pods, and since when.
    refusing: BTreeMap<String, (String, u64)>,
    /// Since when the driver of each must be closed.
    closing: BTreeMap<String, u64>,
}

impl SeenWorks {
    pub(super) fn see(&mut self, nodes: &[Node], now: u64) {
        for node in nodes {
            let since = self.refusing.remove(&node.name).map_or(now, |(_, since)| since);
            let refuses = node.work.refuses().map(|why| (node.name.clone(), (why, since)));
            self.refusing.extend(refuses);
            let since = self.closing.remove(&node.name).unwrap_or(now);
            self.closing.extend(node.work.closes().then(|| (node.name.clone(), since)));
        }
    }

    /// Why a node takes no new pods, by what the watch has shown.
    pub(super) fn refusing(&self, node: &str) -> Option<&str> {
        self.refusing.get(node).map(|(why, _)| &**why)
    }
}

impl World {
    /// NVIDIA's tools go on: one node after another is upgraded.
    pub(super) fn driver_tools(&mut self) {
        let time = self.rng.random_range(200..2_000);
        self.after(time, What::DriverTools);
        let begins = self.hits(Fault::DriverUpgrade, 20);
        let is_any = self.nodes.iter().any(|node| node.work.upgrade.is_some());
        if begins && !is_any {
            // All nodes wait at once.
            (0..self.nodes.len()).for_each(|at| self.set_upgrade(at, UpgradeState::Required));
        }
        let all: Vec<usize> = (0..self.nodes.len()).collect();
        let waits = |at: &&usize| self.nodes[**at].work.upgrade == Some(UpgradeState::Required);
        let waiting: Vec<usize> = all.iter().filter(waits).copied().collect();
        match all.iter().find(|at| self.nodes[**at].work.is_upgrading()) {
            Some(at) => self.go_on_with(*at),
            None if !self.is_faulty() => waiting.iter().for_each(|at| self.end_upgrade(*at)),
            None => {
                let next = waiting.choose(&mut self.rng).copied();
                next.into_iter().for_each(|at| self.set_upgrade(at, UpgradeState::Cordon));
            }
        }
        self.manage_mig();
    }

    fn set_upgrade(&mut self, at: usize, state: UpgradeState) {
        let now = self.now;
        let work = &mut self.nodes[at].work;
        (work.upgrade, work.since) = (Some(state), now);
        self.labels_changed();
    }

    fn end_upgrade(&mut self, at: usize) {
        let work = &mut self.nodes[at].work;
        (work.upgrade, work.was_upgraded) = (None, true);
        self.labels_changed();
    }

    fn cordon(&mut self, at: usize, is_cordoned: bool) {
        self.nodes[at].is_cordoned = is_cordoned;
        self.note_left(self.nodes[at].name.clone());
        self.nodes_changed();
    }

    /// The next step of an upgrade, as `ApplyState` of NVIDIA/k8s-operator-libs takes it.
    fn go_on_with(&mut self, at: usize) {
        let (now, is_faulty) = (self.now, self.is_faulty());
        let work = &self.nodes[at].work;
        let (state, since) = (work.upgrade.expect("it goes on"), work.since);
        let is_late = now > since + GIVES_UP_AFTER || !is_faulty;
        let fails = self.hits(Fault::UpgradeFailure, 10);
        let drains = self.has(Fault::UpgradeDrain);
        let next = match state {
            UpgradeState::Cordon => {
                self.cordon(at, true);
                Some(UpgradeState::WaitForJobs)
            }
            UpgradeState::WaitForJobs => Some(UpgradeState::PodDeletion),
            // Those that request GPUs of NVIDIA's device plugin: ours stay.
            UpgradeState::PodDeletion if fails => Some(UpgradeState::Failed),
            UpgradeState::PodDeletion if drains => Some(UpgradeState::Drain),
            UpgradeState::PodDeletion => Some(UpgradeState::PodRestart),
            UpgradeState::Drain => match self.drain(at) {
                true => Some(UpgradeState::PodRestart),
                false => is_late.then_some(UpgradeState::Failed),
            },
            UpgradeState::PodRestart => self.restart_driver(at, is_late),
            UpgradeState::Validation if fails => Some(UpgradeState::Failed),
            UpgradeState::Validation => Some(UpgradeState::Uncordon),
            UpgradeState::Uncordon if self.nodes[at].is_cordoned => {
                self.cordon(at, false);
                None
            }
            UpgradeState::Uncordon => return self.end_upgrade(at),
            // Until its pod works again, or a person helps.
            UpgradeState::Failed if self.rng.random_range(0..4) == 0 || !is_faulty => {
                self.nodes[at].work.is_away = false;
                Some(UpgradeState::Uncordon)
            }
            _ => None,
        };
        next.into_iter().for_each(|next| self.set_upgrade(at, next));
    }

    /// Evicts all pods of a node. Returns whether they are gone.
    fn drain(&mut self, at: usize) -> bool {
        let name = self.nodes[at].name.clone();
        let on = self.api.pods.iter().filter(|(_, pod)| pod.node.as_ref() == Some(&name));
        let on: Vec<String> = on.map(|(uid, _)| uid.clone()).collect();
        on.iter().for_each(|uid| self.api.delete(uid));
        on.is_empty()
    }

    /// The pod of the driver unloads it, if no process has it open, and loads the new one.
    fn restart_driver(&mut self, at: usize, is_late: bool) -> Option<UpgradeState> {
        let node = &self.nodes[at];
        if node.work.is_away {
            let is_made_again = self.rng.random_range(0..2) == 0;
            self.nodes[at].work.is_away = false;
            if is_made_again {
                self.restart_agent(at);
            }
            return Some(UpgradeState::Validation);
        }
        let is_used = self.processes.values().any(|process| process.node == node.name)
            || (0..node.agents.len()).any(|agent| node.has_open(agent));
        self.nodes[at].work.is_away = !is_used;
        (is_used && is_late).then_some(UpgradeState::Failed)
    }

    /// MIG Manager changes the GPUs of a node, at times with a boot.
    fn manage_mig(&mut self) {
        let (at, begins) =
            (self.rng.random_range(0..self.nodes.len()), self.hits(Fault::MigChange, 8));
        let before: Vec<Option<MigChange>> = self.nodes.iter().map(|it| it.work.mig).collect();
        for node in &mut self.nodes {
            let next = match node.work.mig {
                Some(MigChange::Pending) if self.rng.random_range(0..3) == 0 => {
                    Some(MigChange::Rebooting).filter(|_| self.rng.random_range(0..2) == 0)
                }
                Some(MigChange::Rebooting) if self.rng.random_range(0..3) == 0 => None,
                same => same,
            };
            node.work.mig = next.filter(|_| self.now < self.settings.faults_for);
        }
        if begins && self.nodes[at].work.upgrade.is_none() {
            self.nodes[at].work.mig.get_or_insert(MigChange::Pending);
        }
        if self.nodes.iter().map(|it| it.work.mig).ne(before) {
            self.labels_changed();
        }
    }

    /// Whether an agent has something to report: it has had the driver open. Before that it asks whether it may.
    pub(super) fn has_sample(&mut self, node: usize, agent: usize) -> bool {
        if !self.settings.has_upgrades {
            return true;
        }
        if !self.nodes[node].agents[agent].has_opened {
            self.ask_about_library(node, agent);
        }
        let is_open = self.nodes[node].has_open(agent);
        let agent = &mut self.nodes[node].agents[agent];
        agent.has_opened |= is_open;
        agent.has_opened
    }

    fn ask_about_library(&mut self, node: usize, agent: usize) {
        let name = self.nodes[node].name.clone();
        for to in 0..self.replicas.len() {
            let is_lost = self.hits(Fault::ReportLoss, 20);
            let Some(replica) = self.replicas[to].as_ref().filter(|it| !it.is_frozen) else {
                continue;
            };
            replica.set_time(self.now);
            let (status, answer) = reports::library(&replica.app, &name);
            let life = replica.life;
            let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
            let gate = &self.nodes[node].agents[agent].gate;
            if is_lost || status.as_u16() != 200 {
                gate.lose(to);
                continue;
            }
            gate.learn(to, answer["closeLibrary"].as_str().map(str::to_owned));
            self.check_reply_about_library(life, &name, &answer);
        }
    }
}

// --- promises ------------------------------------------------------------------------------------

impl World {
    /// No pod is bound to a node by a process that had seen that it takes none when it reserved the room.
    pub(super) fn check_work(
        &self,
        replica: &Replica,
        uid: &str,
        node: &str,
    ) -> Result<(), String> {
        let Some((why, since)) = replica.works.refusing.get(node) else { return Ok(()) };
        let held = replica.app.ledger.reservation(&PodUid::new(uid));
        let reserved = match held.map(|held| held.state) {
            Some(ReservationState::Assumed { since }) => replica.started + since.millis(),
            _ => return Ok(()),
        };
        if reserved > *since || self.now > since + BINDS_FOR {
            return Err(format!(
                "{uid} is bound to {node}, with {why} since {since} ms, reserved at {reserved} ms"
            ));
        }
        Ok(())
    }

    /// A process says that the driver is to be closed where its watch has shown that, and nowhere else.
    pub(super) fn check_reply_about_library(&mut self, life: u64, node: &str, reply: &Value) {
        let Some(replica) = self.process(life).filter(|it| it.is_listed) else { return };
        let is_closing = replica.works.closing.contains_key(node);
        let answer = &reply["closeLibrary"];
        if answer.is_string() != is_closing {
            self.broke(format!("the driver of {node} is to be closed: {is_closing}, not {answer}"));
        }
    }

    /// While the driver is replaced no agent opens it, if all processes know that.
    pub(super) fn check_gate(&mut self, node: usize, agent: usize) {
        let node = &self.nodes[node];
        let is_open = |agent: usize| node.agents[agent].gate.keeps_closed().is_none();
        if !node.work.is_away || !is_open(agent) {
            return;
        }
        let knows = |replica: &Replica| {
            let since = replica.works.closing.get(&node.name);
            since.is_some_and(|since| since + KNOWN_WITHIN < self.now) || !replica.is_listed
        };
        if self.processes().all(knows) {
            self.broke(format!("an agent of {} opens the driver while it is replaced", node.name));
        }
    }

    /// At the end all drivers are there, and nodes take pods.
    pub(super) fn check_works_end(&self, replica: &Replica) -> Result<(), String> {
        check_starts_end(replica)?;
        if !self.settings.has_upgrades {
            return Ok(());
        }
        for node in replica.app.ledger.nodes() {
            let work = node.driver_work();
            if work != DriverWork::default() || node.placeable().is_err() {
                let (name, refused) = (node.name(), node.placeable());
                return Err(format!("{name} takes no pods at the end: {work:?}, {refused:?}"));
            }
        }
        Ok(())
    }
}
