//! Agents: they sample their nodes and report, one report at a time.

use std::collections::BTreeSet;

use agent::gpu::lent_limits::{Containers, LentLimits, LimitDriver};
use agent::gpu::library_gate::LibraryGate;
use rand::Rng;
use runtime::step::outside::StepEvent;
use serde_json::{Value, json};
use server::api::reports;
use wire::api::state::DeviceKind;
use wire::ids::PodUid;
use wire::units::Timestamp;

use super::faults::Fault;
use super::kubelets::Process;
use super::nodes::Gpu;
use super::{MOST_REPLICAS, What, World};

/// The beginning of a run, in milliseconds since 1970.
const SIMULATED_UNIX_MILLIS: u64 = 1_767_225_600_000;

/// An agent gives up waiting for a reply after this time.
const TIMEOUT: u64 = 2_000;

#[derive(Clone, Debug, Default)]
pub(super) struct Agent {
    run: u64,
    /// What it says to each replica.
    links: [Link; MOST_REPLICAS],
    /// The limits of memory that it sets.
    limits: LentLimits,
    /// Whether it may have the driver open.
    pub(super) gate: LibraryGate,
    /// When it began.
    pub(super) began: u64,
    /// Whether its own container has no driver.
    pub(super) is_blind: bool,
    /// Whether it has had it open.
    pub(super) has_opened: bool,
}

#[derive(Clone, Debug, Default)]
struct Link {
    session: Option<u64>,
    sequence: u64,
    /// How many reports were sent.
    attempts: u64,
    /// Whether the last one has no reply yet.
    is_sent: bool,
    /// Failures since the last reply.
    failures: u32,
    /// Whether the extender does not know the inventory as it is now.
    owes: bool,
    /// Whether the last report has it.
    carries: bool,
}

impl Agent {
    /// An agent that begins now. Its reports have numbers from that time on.
    pub(super) fn begun(run: u64, now: u64) -> Self {
        let link = Link { sequence: SIMULATED_UNIX_MILLIS + now, ..Link::default() };
        Self { run, began: now, links: std::array::from_fn(|_| link.clone()), ..Self::default() }
    }

    /// Carries out the orders about limits.
    pub(super) fn set_limits(
        &self,
        gpus: &BTreeSet<String>,
        containers: &Containers,
        driver: &impl LimitDriver,
    ) {
        let orders = self.limits.orders();
        let now = Timestamp::from_millis(0);
        self.limits.carry_out(orders.as_ref(), gpus, Ok(containers), driver, now);
    }

    /// The next reports have the inventory. Those under way go on.
    pub(super) fn renew(&mut self) {
        for link in &mut self.links {
            (link.owes, link.carries) = (true, false);
        }
    }
}

/// Which report this is.
#[derive(Clone, Debug)]
pub(super) struct From {
    node: usize,
    agent: usize,
    /// The replica that it is for.
    to: usize,
    run: u64,
    sequence: u64,
    attempt: u64,
    /// The session that it names.
    session: Option<u64>,
    is_lie: bool,
    sent: u64,
    /// The era of the instances of its node.
    era: u64,
}

impl From {
    /// Which report this event is: node, run and attempt.
    pub(super) fn of(what: &What) -> Option<(usize, u64, u64)> {
        match what {
            What::Reported { from, .. } => Some((from.node, from.run, from.attempt)),
            _ => None,
        }
    }
}

/// Status and body.
pub(super) type Reply = (u16, Value);

impl World {
    pub(super) fn restart_agent(&mut self, node: usize) {
        let now = self.now;
        let node_model = &mut self.nodes[node];
        let agent = Agent::begun(node_model.agents[0].run + 1, now);
        node_model.agents[0] = Agent { is_blind: now < node_model.blind_until, ..agent };
        self.restart_maker(node);
    }

    /// Another agent reports for the node, too, until the faults are over.
    pub(super) fn second_agent(&mut self, node: usize) {
        if self.nodes[node].agents.len() == 1 {
            self.nodes[node].agents.push(Agent::begun(1_000 + self.count, self.now));
            self.after(1, What::Report { node, agent: 1 });
        }
    }

    pub(super) fn report(&mut self, node: usize, agent: usize) {
        if agent > 0 && !self.is_faulty() {
            self.nodes[node].agents.truncate(1);
            return;
        }
        let again = self.rng.random_range(300..1_500);
        self.after(again, What::Report { node, agent });
        let lies = self.has(Fault::Lie) && self.now < self.nodes[node].lies_until;
        if std::mem::replace(&mut self.nodes[node].has_lied, lies) != lies {
            self.nodes[node].devices_changed();
        }
        let is_silent = self.has(Fault::Silence) && self.now < self.nodes[node].silent_until;
        let is_silent = is_silent || self.nodes[node].is_down(self.now);
        let is_silent = is_silent || !self.has_sample(node, agent);
        if self.settings.has_driver_limits && !self.nodes[node].is_down(self.now) {
            self.set_limits(node, agent);
        }
        for to in 0..self.replicas.len() {
            if !is_silent {
                self.report_to(node, agent, to);
            }
        }
    }

    fn report_to(&mut self, node: usize, agent: usize, to: usize) {
        let Some(replica) = &self.replicas[to] else { return };
        let (life, is_deaf) = (replica.life, self.now < replica.deaf_until);
        if self.nodes[node].agents[agent].links[to].is_sent {
            return; // it waits for the reply
        }
        let body = self.sample(node, agent, to).to_string();
        let run = self.nodes[node].agents[agent].run;
        let link = &mut self.nodes[node].agents[agent].links[to];
        (link.is_sent, link.attempts) = (true, link.attempts + 1);
        let Link { session, sequence, attempts: attempt, .. } = *link;
        let is_lie = body.contains("\"lie\"");
        let (sent, era) = (self.now, self.nodes[node].mig.as_ref().map_or(0, |mig| mig.era));
        let from = From { node, agent, to, run, sequence, attempt, session, is_lie, sent, era };
        self.after(TIMEOUT, What::Replied { from: from.clone(), reply: None });
        if self.hits(Fault::ReportLoss, 5) || is_deaf {
            return;
        }
        let late = if self.hits(Fault::ReportDelay, 4) { 15_000 } else { 30 };
        let way = self.rng.random_range(1..late);
        self.after(way, What::Reported { life, from, body });
    }

    /// A new report about the node as it is now.
    fn sample(&mut self, at: usize, agent: usize, to: usize) -> Value {
        if self.hits(Fault::PartialReport, 10) {
            self.nodes[at].partial_until = self.now + self.rng.random_range(1..4_000);
        }
        let partial_until = self.nodes[at].partial_until;
        let is_partial = self.has(Fault::PartialReport) && self.now < partial_until;
        let lies = self.has(Fault::Lie) && self.now < self.nodes[at].lies_until;
        let other = (at + 1) % self.nodes.len();
        let mut gpus = self.nodes[at].gpus.clone();
        if lies && other != at {
            gpus.extend(self.nodes[other].gpus.first().cloned());
        }
        let (name, run) = (self.nodes[at].name.clone(), self.nodes[at].agents[agent].run);
        let divided = self.nodes[at].mig.as_ref().map(|mig| (mig.sampled(), mig.answers()));
        let (mut inventory, mut answers, mut parents) = (None, None, Vec::new());
        if let Some(((devices, used), answer)) = divided {
            gpus = used;
            let divided = devices.iter().filter(|it| it.kind == DeviceKind::MigParent);
            parents.extend(divided.map(|it| it.uuid.clone()));
            (inventory, answers) = (Some(devices), Some(answer));
        }
        let mut uses = self.uses_seen(at, agent, &gpus);
        let in_force = self.nodes[at].agents[agent].limits.in_force();
        let containers = self.containers_on(at, agent);
        let speaker = &mut self.nodes[at].agents[agent].links[to];
        // As `agent::node::session` does it: two lists that may lack news would free a drain.
        let is_first = speaker.session.is_none();
        let is_again = speaker.failures == 1 || speaker.failures > 1 && is_first;
        speaker.sequence += u64::from(!is_again);
        let may_lack_news = speaker.failures > 1 && !is_first;
        if is_partial {
            match partial_until % 2 {
                0 => uses.truncate(1), // one device could not be read
                _ => {
                    let first = uses.first_mut().and_then(Value::as_object_mut);
                    first.map(|device| device.remove("processes"));
                }
            }
        }
        for device in uses.iter_mut().filter(|_| may_lack_news) {
            device.as_object_mut().map(|device| device.remove("processes"));
        }
        // Of a GPU in MIG mode nothing is said but that it answers.
        uses.extend(parents.iter().map(|gpu| json!({"id": gpu, "healthy": true})));
        let mut report = json!({
            "apiVersion": "gpupack.dev/v1alpha1", "agent": format!("{name}-{run}"),
            "sequence": speaker.sequence, "devices": uses,
        });
        for (name, answer) in answers.into_iter().flatten().chain(containers) {
            report[name] = answer;
        }
        if self.settings.has_driver_limits {
            report["memoryLimits"] = serde_json::to_value(in_force).expect("it is JSON");
        }
        if lies {
            report["lie"] = true.into(); // for the checks: the extender ignores what it does not know
        }
        if let Some(session) = speaker.session {
            report["session"] = session.into();
        }
        speaker.carries = speaker.session.is_none() || speaker.owes;
        if speaker.carries {
            let device = |(index, gpu): (usize, &Gpu)| {
                json!({"id": gpu.id, "index": index, "model": "A100", "memoryMib": gpu.mib,
                    "reservedMib": 0, "kind": "Gpu", "healthy": true})
            };
            report["inventory"] = match inventory {
                Some(inventory) => json!(inventory),
                None => gpus.iter().enumerate().map(device).collect(),
            };
        }
        report
    }

    /// The same as an agent sees it: of the devices it knows nothing without the driver.
    fn uses_seen(&self, at: usize, agent: usize, gpus: &[Gpu]) -> Vec<Value> {
        let node = &self.nodes[at];
        let is_closed = self.settings.has_upgrades && !node.has_open(agent);
        if !is_closed && !node.agents[agent].is_blind {
            return self.uses_on(&node.name, gpus);
        }
        let unread = |gpu: &Gpu| json!({"id": gpu.id, "healthy": false, "fault": "DriverAway"});
        gpus.iter().map(unread).collect()
    }

    /// What is used of these devices of a node.
    fn uses_on(&self, node: &str, devices: &[Gpu]) -> Vec<Value> {
        let uses = devices.iter().map(|gpu| {
            let here = self.processes.iter().filter(|(_, process)| process.node == node);
            let mut processes = Vec::new();
            for (uid, process) in here {
                let lives = self.api.pods.get(uid).is_some_and(|pod| !pod.is_terminal);
                for (_, mib) in process.listed(self.now, lives).filter(|(id, _)| **id == *gpu.id) {
                    processes.push(json!({"pid": 7, "podUid": uid, "memoryMib": mib}));
                }
            }
            let used: u64 = processes.iter().filter_map(|it| it["memoryMib"].as_u64()).sum();
            json!({"id": gpu.id, "usedMib": used, "healthy": true, "processes": processes})
        });
        uses.collect()
    }

    pub(super) fn reported(&mut self, life: u64, from: From, body: &str) {
        let now = self.now;
        let Some(replica) = self.process(life) else { return }; // the agent hears nothing
        replica.set_time(now);
        let name = format!("node-{}", from.node);
        let (draining, of) = (replica.draining(&name), &self.nodes[from.node]);
        let (status, reply) = reports::answer(&replica.app, &name, body.as_bytes());
        let is_freed = |uid: &String| {
            let is_here = |(id, _): &(String, u64)| of.has_device(id);
            let runs = |process: &Process| process.devices.iter().any(is_here);
            replica.app.ledger.reservation(&PodUid::new(uid.as_str())).is_none()
                && self.processes.get(uid).is_some_and(runs)
        };
        let freed = draining.iter().find(|uid| is_freed(uid));
        let freed = freed.map(|uid| format!("a report frees the devices of {uid}, which runs"));
        let reply: Value = serde_json::from_slice(&reply).unwrap_or_default();
        freed.into_iter().for_each(|freed| self.broke(freed));
        if status.as_u16() == 200 {
            self.check_reply_about_library(life, &name, &reply);
            self.taken(life, &from, body, &reply);
        }
        if !self.hits(Fault::ReportLoss, 5) {
            let reply = Some((status.as_u16(), reply));
            let way = self.rng.random_range(1..30);
            self.after(way, What::Replied { from, reply });
        }
        self.step(life, StepEvent::Changed);
    }

    /// The extender has taken a report: it is of the newest session, and names no device of another
    /// node that reports.
    fn taken(&mut self, life: u64, from: &From, body: &str, reply: &Value) {
        let session = reply["session"].as_u64();
        let (now, gpus) = (self.now, self.nodes[from.node].gpus.clone());
        let other = &self.nodes[(from.node + 1) % self.nodes.len()].gpus[0].id;
        let lie = Some(other.clone()).filter(|id| body.contains(&format!("\"{id}\"")));
        let are_lists_noted = self.settings.lends_memory;
        let Some(replica) = self.process_mut(life) else { return };
        let newest = replica.sessions.get(&from.node).copied();
        let (mut broken, mut claimed) = (None, None);
        if from.session.is_some() && from.session != newest {
            let spoken = from.session;
            broken =
                Some(format!("a report of session {spoken:?} was taken, {newest:?} is newest"));
        }
        replica.sessions.extend(session.map(|session| (from.node, session)));
        let is_hello = body.contains("inventory");
        let last = replica.last.get(&(from.node, from.run)).copied();
        let is_new = last.is_none_or(|sequence| sequence < from.sequence);
        if !is_new && reply["outcome"] == "Accepted" {
            broken = Some(format!("report {} came twice or late, and was taken", from.sequence));
        }
        if let Some(id) = lie.filter(|_| is_hello && is_new && from.is_lie) {
            claimed = Some(id.clone());
            let owner = replica.owners.insert(id.clone(), from.node);
            let is_heard = |at: &usize| replica.heard.get(at).is_some_and(|at| now < at + 12_000);
            if owner.filter(|owner| *owner != from.node).is_some_and(|owner| is_heard(&owner)) {
                broken = Some(format!("node-{} took {id} of a node that reports", from.node));
            }
        }
        if is_new && reply["outcome"] == "Accepted" {
            replica.note_shown(body, from.sent, now);
            replica.eras.insert(from.node, from.era);
            replica.note_starts((from.node, from.run), body, now);
            if are_lists_noted {
                replica.note_lists(body, now);
            }
            if replica.old.contains(&(from.node, from.run, from.attempt)) {
                broken = Some(format!("report {} of before a freeze was taken", from.sequence));
            }
        }
        if is_new {
            replica.last.insert((from.node, from.run), from.sequence);
        }
        if !from.is_lie && is_hello {
            // One of before a replacement may come late: then nobody has the new device for a while.
            let is_there = |id: &String| body.contains(&format!("\"{id}\""));
            replica.owners.retain(|id, owner| *owner != from.node || is_there(id));
        }
        if !from.is_lie && is_new {
            replica.heard.insert(from.node, now);
            if is_hello {
                let is_named = |gpu: &&Gpu| body.contains(&format!("\"{}\"", gpu.id));
                let named = gpus.iter().filter(is_named);
                replica.owners.extend(named.map(|gpu| (gpu.id.clone(), from.node)));
            }
        }
        self.claimed.extend(claimed);
        for gpu in gpus {
            let most = self.reported.entry(gpu.id).or_default();
            *most = gpu.mib.max(*most);
        }
        if let Some(broken) = broken {
            self.broke(broken);
        }
    }

    pub(super) fn replied(&mut self, from: &From, reply: Option<Reply>) {
        let Some(agent) = self.nodes[from.node].agents.get_mut(from.agent) else { return };
        let (run, limits, agent_gate) = (agent.run, &agent.limits, &agent.gate);
        let link = &mut agent.links[from.to];
        if (run, link.attempts) != (from.run, from.attempt) || !link.is_sent {
            return; // an earlier report, or an earlier run
        }
        link.is_sent = false;
        let is_accepted =
            |it: &&Reply| it.1["outcome"] == "Accepted" && link.has_session(&it.1["session"]);
        let taken = reply.as_ref().filter(|(status, _)| *status == 200);
        let accepted = taken.filter(is_accepted).map(|(_, reply)| reply);
        let orders = accepted.map(|reply| reply["migOrders"].clone());
        let is_void = taken.is_some() && orders.is_none();
        match accepted {
            Some(reply) => {
                let orders = serde_json::from_value(reply["memoryLimits"].clone()).ok();
                limits.learn(from.to, orders, Timestamp::from_millis(self.now));
            }
            None if taken.is_none() => limits.lose(from.to),
            None => {}
        }
        match taken {
            Some((_, reply)) => {
                let closed = reply["closeLibrary"].as_str().map(str::to_owned);
                agent_gate.learn(from.to, closed);
            }
            None => agent_gate.lose(from.to),
        }
        link.settle(reply.as_ref());
        if let Some((status, reply)) = reply.filter(|(status, _)| !STATUSES.contains(status)) {
            self.broke(format!("a report was answered with {status}: {reply}"));
        }
        self.check_gate(from.node, from.agent);
        if !is_void {
            self.learn_orders(from.node, from.to, orders.as_ref());
        }
    }
}

/// The statuses of answers to reports.
const STATUSES: [u16; 5] = [200, 404, 409, 422, 503];

impl Link {
    fn has_session(&self, session: &Value) -> bool {
        self.session.is_none_or(|own| Some(own) == session.as_u64())
    }

    /// Learns the answer, or that there is none.
    fn settle(&mut self, reply: Option<&Reply>) {
        let Some((status, reply)) = reply else {
            self.failures += 1;
            return;
        };
        match status {
            200 => {
                (self.session, self.failures) = (reply["session"].as_u64(), 0);
                self.owes &= !(self.carries && reply["outcome"] == "Accepted");
            }
            503 => self.failures += 1,
            404 | 422 => self.session = None,
            409 => {
                let was_hello = u32::from(self.session.take().is_none());
                (self.failures, self.sequence) =
                    (self.failures + was_hello, self.sequence + u64::from(was_hello));
            }
            _ => {}
        }
    }
}
