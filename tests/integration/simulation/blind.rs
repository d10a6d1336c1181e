//! Containers that start without the driver, and what each process knows of them.

use std::collections::{BTreeMap, BTreeSet};

use engine::model::rejection::Rejection;
use engine::model::reservation::ReservationState;
use hyper::Request;
use rand::Rng;
use serde_json::{Value, json};
use wire::ids::PodUid;

use super::api::Pod;
use super::faults::Fault;
use super::replica::Replica;
use super::{What, World};

/// After this time a node that takes no pods takes one as a trial.
const TRIAL_AFTER: u64 = 300_000;

/// How long a trial keeps others away of which no start is known.
const TRIED_FOR: u64 = 120_000;

/// What a process knows of containers that started.
#[derive(Default)]
pub(super) struct SeenStarts {
    nodes: BTreeMap<usize, SeenNode>,
    /// The pods whose containers its watch has shown.
    named: BTreeSet<String>,
    /// Whether a container that an agent reported has the driver, and its node. Without those that are older than
    /// their agent, and lack it.
    reported: BTreeMap<String, (usize, Option<bool>)>,
    /// The pods of which processes were listed.
    listed: BTreeSet<String>,
}

/// The same of one node.
#[derive(Default)]
struct SeenNode {
    /// The run of its agent.
    run: Option<u64>,
    /// The last pod, if it was blind.
    blind: Option<String>,
    /// Since when it takes no pods.
    closed: Option<u64>,
    /// The pod that was bound as a trial, and when its room was reserved.
    trial: Option<(String, u64)>,
}

impl SeenNode {
    fn opens(&mut self) {
        (self.blind, self.closed, self.trial) = (None, None, None);
    }

    /// A pod has started without the driver.
    fn lacks(&mut self, uid: &str, now: u64) {
        let is_trial = self.trial.as_ref().is_some_and(|(tried, _)| tried == uid);
        match (&self.closed, &self.blind) {
            (Some(_), _) if is_trial => (self.closed, self.trial) = (Some(now), None),
            (Some(_), _) => {}
            (None, Some(last)) if last != uid => self.closed = Some(now),
            (None, _) => self.blind = Some(uid.to_owned()),
        }
    }
}

impl SeenStarts {
    fn learn(&mut self, uid: &str, now: u64) {
        let Some((node, has_driver)) = self.reported.get(uid) else { return };
        let node = self.nodes.entry(*node).or_default();
        match has_driver {
            Some(true) => node.opens(),
            Some(false) => node.lacks(uid, now),
            None => {}
        }
    }
}

impl Replica {
    /// Notes what an accepted report says of containers.
    pub(super) fn note_starts(&mut self, (node, run): (usize, u64), report: &str, now: u64) {
        if !report.contains("\"containers\"") {
            return;
        }
        let report: Value = serde_json::from_str(report).unwrap_or_default();
        let devices = report["devices"].as_array().into_iter().flatten();
        let is_new = self.starts.nodes.entry(node).or_default().run.replace(run) != Some(run);
        if is_new && devices.clone().any(|device| device["healthy"] == true) {
            self.starts.nodes.entry(node).or_default().opens();
        }
        let held = |uid: &str| self.app.ledger.reservation(&PodUid::new(uid));
        let (mut lacking, mut having) = (Vec::new(), Vec::new());
        for container in report["containers"].as_array().into_iter().flatten() {
            let uid = container["podUid"].as_str().unwrap_or_default();
            if held(uid).is_none() || self.starts.reported.contains_key(uid) {
                continue;
            }
            let has_driver = container["hasDriver"] == true;
            let is_sign = has_driver || container["isOlder"] != true;
            self.starts.reported.insert(uid.to_owned(), (node, is_sign.then_some(has_driver)));
            let news = if has_driver { &mut having } else { &mut lacking };
            news.extend(self.starts.named.contains(uid).then(|| uid.to_owned()));
        }
        lacking.iter().chain(&having).for_each(|uid| self.starts.learn(uid, now));
        let listed = devices.filter_map(|device| device["processes"].as_array()).flatten();
        for uid in listed.filter_map(|process| process["podUid"].as_str()) {
            let is_new = held(uid).is_some() && self.starts.listed.insert(uid.to_owned());
            if is_new {
                self.starts.nodes.entry(node).or_default().opens();
            }
        }
    }

    /// Notes that the watch shows the container of a pod.
    pub(super) fn note_named(&mut self, uid: &str, pod: &Pod, now: u64) {
        let is_named = pod.container.is_named && !pod.is_terminal;
        if is_named && self.starts.named.insert(uid.to_owned()) {
            self.starts.learn(uid, now);
        }
    }
}

impl World {
    /// The container runtime of a node loses the driver for a while.
    pub(super) fn change_runtimes(&mut self) {
        let (time, node) =
            (self.rng.random_range(1_000..8_000), self.rng.random_range(0..self.nodes.len()));
        self.after(time, What::Runtimes);
        let (loses, least) = (self.hits(Fault::BlindStarts, 50), self.settings.faults_for / 2);
        let lasts = self.rng.random_range(5_000..least.max(6_000) * 2);
        if loses && self.nodes[node].blind_until == 0 {
            self.nodes[node].blind_until = (self.now + lasts).min(self.settings.faults_for);
        }
        for at in 0..self.nodes.len() {
            if self.nodes[at].blind_until <= self.now {
                self.nodes[at].blind_until = 0;
                if self.nodes[at].agents[0].is_blind {
                    self.restart_agent(at);
                }
            }
        }
    }

    /// Kubelet names the container of a pod. Without the driver it fails within seconds.
    pub(super) fn note_container(&mut self, uid: &str) {
        let (Some(pod), Some(process)) = (self.api.pods.get_mut(uid), self.processes.get_mut(uid))
        else {
            return;
        };
        let node = self.nodes.iter().find(|node| node.name == process.node);
        if !pod.wants_gpu() {
            return;
        }
        pod.container.is_named = true;
        if node.is_some_and(|node| self.now < node.blind_until) {
            process.is_blind = true;
            process.devices.clear();
            let time = self.rng.random_range(1_500..8_000);
            self.after(time, What::Ended { uid: uid.to_owned() });
        }
        self.api.changed(uid);
    }

    /// The containers with GPUs on a node, as its agent sees them.
    pub(super) fn containers_on(&self, node: usize, agent: usize) -> Option<(&'static str, Value)> {
        if !self.settings.has_blind_starts {
            return None;
        }
        let (node, began) = (&self.nodes[node], self.nodes[node].agents[agent].began);
        let here = self.processes.iter().filter(|(_, process)| process.node == node.name);
        let named = here
            .filter(|(uid, _)| self.api.pods.get(*uid).is_some_and(|pod| pod.container.is_named));
        let all = named.map(|(uid, process)| {
            json!({"podUid": uid, "id": uid, "hasDriver": !process.is_blind,
                "isOlder": process.started < began})
        });
        Some(("containers", all.collect()))
    }

    /// After two blind starts no pod is bound to a node but a trial, by a process that knows of them.
    pub(super) fn check_trials(
        &mut self,
        life: u64,
        request: &Request<Vec<u8>>,
    ) -> Result<(), String> {
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let uid = body["metadata"]["uid"].as_str().unwrap_or_default();
        let name = body["target"]["name"].as_str().unwrap_or_default();
        let Some(at) = self.nodes.iter().position(|node| node.name == name) else { return Ok(()) };
        let Some(replica) = self.process_mut(life) else { return Ok(()) };
        let ledger = &replica.app.ledger;
        let reserved = match ledger.reservation(&PodUid::new(uid)).map(|held| held.state) {
            Some(ReservationState::Assumed { since }) => replica.started + since.millis(),
            _ => return Ok(()),
        };
        let Some(node) = replica.starts.nodes.get_mut(&at) else { return Ok(()) };
        let Some(closed) = node.closed.filter(|closed| *closed < reserved) else { return Ok(()) };
        if reserved < closed + TRIAL_AFTER {
            return Err(format!(
                "{uid} is bound to {name}, where the last pods had no driver since {closed} ms"
            ));
        }
        let trial = node.trial.as_ref().filter(|(tried, since)| {
            let is_there = ledger.reservation(&PodUid::new(tried.as_str())).is_some();
            tried != uid && reserved < since + TRIED_FOR && is_there
        });
        if let Some((tried, since)) = trial {
            return Err(format!(
                "{uid} is bound to {name}, where {tried} is a trial since {since} ms"
            ));
        }
        node.trial = Some((uid.to_owned(), reserved));
        Ok(())
    }
}

/// At the end a process takes pods on each node but those whose last pods had no driver.
pub(super) fn check_starts_end(replica: &Replica) -> Result<(), String> {
    for (at, seen) in &replica.starts.nodes {
        let name = format!("node-{at}");
        let node = replica.app.ledger.node(&name);
        let refused = node.and_then(|node| node.placeable().err());
        if refused == Some(Rejection::BlindStarts) && seen.closed.is_none() {
            return Err(format!("{name} takes no pods for blind starts, and none is known"));
        }
    }
    Ok(())
}
