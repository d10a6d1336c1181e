//! The shipped control core lives through faults in virtual time: one seed decides everything.
//!
//! Around it are models of the API server, kube-scheduler, agents and kubelets. Requests and answers
//! are lost, late or repeated; the watch is behind and begins again; the extender crashes, freezes and
//! goes on. After every event the promises are checked, and at the end, when the faults are over, that
//! no pod waits that fits.
//!
//! A failure prints its seed and the last events. `SIM_SEEDS=1000 cargo test --test integration
//! simulation::` runs more seeds.

mod api;
mod replica;
mod scheduler;

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};

use gpupack::control::bind::binding;
use gpupack::hardware::device::{NodeName, PodUid};
use gpupack::hardware::units::{HostAmount, MemMib, MilliCpu};
use gpupack::kube_api::pod::watch::WatchEvent;
use gpupack::kube_api::pod::watched::NodeFacts;
use gpupack::ledger::query::reading::Readiness;
use gpupack::model::reservation::ReservationState;
use gpupack::server::api::reports;
use gpupack::server::scheduler::verbs;
use gpupack::step::outside::{Action, Answer, CallId, Event, Lost};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use api::{Api, refusal, seen};
use replica::Replica;
use scheduler::Scheduler;

const NODES: usize = 4;
const GPUS: usize = 2;
const GPU_MIB: u64 = 10_000;

/// Most pods at a time: about twice as many as fit.
const PODS: usize = 30;

/// Faults end after this time, in ms.
const FAULTS_FOR: u64 = 90_000;

/// Time without faults and without changes, before nothing may wait that fits.
const QUIET_FOR: u64 = 60_000;

/// kube-scheduler's timeout of a call.
const HTTP_TIMEOUT: u64 = 10_000;

const SEEDS: u64 = 20;

/// Events that a failure prints.
const TRACED: usize = 80;

/// Events between two audits of the ledger.
const AUDIT_EVERY: u64 = 50;

/// What happens next.
#[derive(Debug)]
enum What {
    /// A request of the extender reaches the API server.
    Request { life: u64, id: CallId, request: Box<hyper::Request<Vec<u8>>>, answers: Answers },
    /// Its answer reaches the extender.
    Answer { life: u64, id: CallId, answer: Result<Answer, Lost> },
    /// Work on another thread is done.
    Work { life: u64, work: Work },
    /// A timer of the extender is due.
    Due { life: u64 },
    /// The watch shows the extender more of the log, or lists again.
    Watch { life: u64 },
    /// The first lists arrive.
    Listed { life: u64 },
    /// kube-scheduler's watch shows more, and a cycle may begin.
    Schedule,
    /// A verb of a cycle reaches the extender.
    Verb { cycle: u64, verb: Verb, body: String },
    /// Its answer reaches kube-scheduler; `None` if the connection failed or nothing came in time.
    Verbed { cycle: u64, verb: Verb, answer: Option<Value> },
    /// *bind* reaches the extender.
    Bind { uid: String, cycle: u64, body: String },
    /// Its answer reaches kube-scheduler.
    Bound { uid: String, cycle: u64, error: Option<String> },
    /// An agent reports.
    Report { node: usize },
    /// Kubelets look at their pods.
    Kubelets,
    /// Users create, end and delete pods.
    Users,
    /// Something breaks.
    Chaos,
    /// The extender starts again.
    Start,
    /// A frozen extender goes on.
    Thaw,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Filter,
    Prioritize,
}

/// How the answer to a request gets back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answers {
    Arrives,
    /// Nobody waits any more: the extender has timed out.
    Never,
    /// This status, and nothing is done.
    Status(u16),
    /// It is done, and the answer is this status.
    DoneBut(u16),
}

struct Work(Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Work {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str("work")
    }
}

#[derive(Default)]
struct Agent {
    session: Option<u64>,
    sequence: u64,
    run: u64,
}

/// A container on a node.
struct Process {
    node: String,
    devices: Vec<(String, u64)>,
    ends: Option<u64>,
}

/// Binds that the extender has answered: pod, cycle, error.
type Answered = Arc<Mutex<Vec<(String, u64, String)>>>;

struct World {
    rng: ChaCha8Rng,
    now: u64,
    count: u64,
    agenda: BTreeMap<(u64, u64), What>,
    api: Api,
    replica: Option<Replica>,
    lives: u64,
    /// What reached the extender while it was frozen.
    inbox: Vec<What>,
    is_watch_due: bool,
    next_due: Option<u64>,
    scheduler: Scheduler,
    is_schedule_due: bool,
    answered: Answered,
    agents: [Agent; NODES],
    processes: BTreeMap<String, Process>,
    /// Which life posted a Binding for a version of a pod.
    posted: BTreeMap<(String, String), u64>,
    created: u64,
    /// Whether events are noted: only when a failed seed is replayed.
    is_traced: bool,
    trace: VecDeque<String>,
    digest: DefaultHasher,
    events: u64,
}

impl World {
    fn new(seed: u64, is_traced: bool) -> Self {
        let mut world = Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            now: 0,
            count: 0,
            agenda: BTreeMap::new(),
            api: Api::default(),
            replica: None,
            lives: 0,
            inbox: Vec::new(),
            is_watch_due: false,
            next_due: None,
            scheduler: Scheduler::default(),
            is_schedule_due: false,
            answered: Answered::default(),
            agents: Default::default(),
            processes: BTreeMap::new(),
            posted: BTreeMap::new(),
            created: 0,
            is_traced,
            trace: VecDeque::new(),
            digest: DefaultHasher::new(),
            events: 0,
        };
        world.after(0, What::Start);
        world.after(100, What::Users);
        world.after(200, What::Kubelets);
        world.after(1_000, What::Chaos);
        for node in 0..NODES {
            world.after(node as u64 * 50, What::Report { node });
        }
        world
    }

    fn after(&mut self, time: u64, what: What) {
        self.count += 1;
        self.agenda.insert((self.now + time, self.count), what);
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.rng.random_range(0..100) < percent
    }

    fn is_faulty(&self) -> bool {
        self.now < FAULTS_FOR
    }

    fn run(&mut self) -> Result<(), String> {
        while self.now < FAULTS_FOR + QUIET_FOR {
            let ((at, _), what) = self.agenda.pop_first().ok_or("nothing happens any more")?;
            self.now = at;
            self.events += 1;
            if self.is_traced {
                let line = format!("{:>7} {what:?}", self.now);
                line.hash(&mut self.digest);
                self.trace.push_back(line.chars().take(400).collect());
                if self.trace.len() > TRACED {
                    self.trace.pop_front();
                }
            }
            self.happens(what);
            self.follow_up();
            self.check()?;
        }
        self.check_end()
    }

    /// What reaches a frozen extender waits.
    fn happens(&mut self, what: What) {
        let is_for_extender = matches!(
            what,
            What::Answer { .. }
                | What::Work { .. }
                | What::Due { .. }
                | What::Watch { .. }
                | What::Listed { .. }
                | What::Verb { .. }
                | What::Bind { .. }
        );
        if is_for_extender && self.replica.as_ref().is_some_and(|replica| replica.is_frozen) {
            self.inbox.push(what);
            return;
        }
        match what {
            What::Request { life, id, request, answers } => {
                self.request(life, id, &request, answers);
            }
            What::Answer { life, id, answer } => {
                self.step(Some(life), Event::Answered { id, answer });
            }
            What::Work { life, work } => {
                if self.alive(life) {
                    (work.0)();
                }
                self.step(Some(life), Event::Changed);
            }
            What::Due { life } => {
                self.next_due = None;
                self.step(Some(life), Event::Changed);
            }
            What::Watch { life } => self.watch(life),
            What::Listed { life } => self.list(life),
            What::Schedule => self.schedule(),
            What::Verb { cycle, verb, body } => self.verb(cycle, verb, &body),
            What::Verbed { cycle, verb, answer } => self.verbed(cycle, verb, answer),
            What::Bind { uid, cycle, body } => self.bind(uid, cycle, body),
            What::Bound { uid, cycle, error } => self.bound(&uid, cycle, error),
            What::Report { node } => self.report(node),
            What::Kubelets => self.kubelets(),
            What::Users => self.users(),
            What::Chaos => self.chaos(),
            What::Start => self.start(),
            What::Thaw => self.thaw(),
        }
    }

    fn alive(&self, life: u64) -> bool {
        self.replica.as_ref().is_some_and(|replica| replica.life == life)
    }

    // --- the extender ----------------------------------------------------------------------------

    /// Runs a step, and schedules what it wants done. `life`: only in that life.
    fn step(&mut self, life: Option<u64>, event: Event) {
        let Some(replica) = &self.replica else { return };
        if life.is_some_and(|life| replica.life != life) || replica.is_frozen {
            return;
        }
        let life = replica.life;
        for action in replica.step(event, self.now) {
            match action {
                Action::Work(work) => {
                    let time = self.rng.random_range(0..20);
                    self.after(time, What::Work { life, work: Work(work) });
                }
                Action::Call { id, request, within } => {
                    let within = u64::try_from(within.as_millis()).expect("short");
                    self.send(life, id, request, within);
                }
            }
        }
        self.plan_timer();
        let answered = std::mem::take(&mut *self.answered.lock().expect("no panic"));
        for (uid, cycle, error) in answered {
            let time = self.rng.random_range(0..4);
            self.after(time, What::Bound { uid, cycle, error: Some(error) });
        }
    }

    fn plan_timer(&mut self) {
        let Some(replica) = &self.replica else { return };
        let (life, Some(due)) = (replica.life, replica.due()) else { return };
        if self.next_due.is_none_or(|next| due < next) {
            self.next_due = Some(due);
            self.after(due.saturating_sub(self.now), What::Due { life });
        }
    }

    /// Decides what becomes of a request of the extender.
    fn send(&mut self, life: u64, id: CallId, request: Box<hyper::Request<Vec<u8>>>, within: u64) {
        let way = self.rng.random_range(0..5);
        let fate = if self.is_faulty() { self.rng.random_range(0..100) } else { 100 };
        let lost = |what| What::Answer { life, id, answer: Err(what) };
        match fate {
            0..4 => self.after(within, lost(Lost::Timeout)), // it never arrives
            4..8 => {
                // It arrives, and nobody hears of it.
                self.after(within, lost(Lost::Timeout));
                self.after(way, What::Request { life, id, request, answers: Answers::Never });
            }
            8..12 => {
                // It arrives after everybody has given up.
                let late = within + self.rng.random_range(0..20_000);
                self.after(within, lost(Lost::Timeout));
                self.after(late, What::Request { life, id, request, answers: Answers::Never });
            }
            12..15 => {
                let fault = "connection reset".to_owned();
                self.after(way, lost(Lost::Transport { fault }));
                if self.chance(50) {
                    self.after(0, What::Request { life, id, request, answers: Answers::Never });
                }
            }
            15..19 => {
                let code = [429, 500, 503, 504][usize::try_from(fate).expect("small") - 15];
                let answers = Answers::Status(code);
                self.after(way, What::Request { life, id, request, answers });
            }
            19..21 => {
                let answers = Answers::DoneBut(504);
                self.after(way, What::Request { life, id, request, answers });
            }
            _ => {
                self.after(way, What::Request { life, id, request, answers: Answers::Arrives });
            }
        }
    }

    /// A request reaches the API server.
    fn request(
        &mut self,
        life: u64,
        id: CallId,
        request: &hyper::Request<Vec<u8>>,
        answers: Answers,
    ) {
        if request.uri().path().ends_with("/binding") && !matches!(answers, Answers::Status(_)) {
            let body: Value = serde_json::from_slice(request.body()).expect("JSON");
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let metadata = &body["metadata"];
            let key = (text(&metadata["uid"]), text(&metadata["resourceVersion"]));
            let first = *self.posted.entry(key.clone()).or_insert(life);
            assert_eq!(first, life, "two processes posted a Binding of {key:?}");
        }
        let (code, body) = match answers {
            Answers::Status(code) => refusal(code, "as this test wants"),
            Answers::Arrives | Answers::Never => self.api.answer(request),
            Answers::DoneBut(code) => {
                self.api.answer(request);
                refusal(code, "as this test wants")
            }
        };
        if answers != Answers::Never {
            let answer = Ok(Answer { status: code, body: Some(body.to_string().into_bytes()) });
            let way = self.rng.random_range(0..5);
            self.after(way, What::Answer { life, id, answer });
        }
    }

    fn start(&mut self) {
        if self.replica.is_some() {
            return;
        }
        self.lives += 1;
        let drift = self.rng.random_range(0..3);
        self.replica = Some(Replica::start(self.lives, self.now, drift));
        self.next_due = None;
        self.is_watch_due = false;
        let time = self.rng.random_range(5..500);
        self.after(time, What::Listed { life: self.lives });
        self.step(None, Event::Changed);
    }

    /// The lists of nodes and pods.
    fn list(&mut self, life: u64) {
        if !self.alive(life) {
            return;
        }
        let Some(replica) = &mut self.replica else { return };
        replica.set_time(self.now);
        if !replica.is_listed {
            replica.nodes.take(WatchEvent::ListBegins);
            for at in 0..NODES {
                let host = HostAmount { cpu: MilliCpu::new(64_000), memory: MemMib::new(1 << 18) };
                let name = NodeName::new(node_name(at));
                let (is_unschedulable, labels) = (false, BTreeMap::new());
                let node = NodeFacts { name, host, is_unschedulable, labels };
                replica.nodes.take(WatchEvent::Seen(node));
            }
            replica.nodes.take(WatchEvent::ListEnds);
        }
        replica.pods.take(WatchEvent::ListBegins);
        for (uid, pod) in &self.api.pods {
            replica.pods.take(WatchEvent::Seen(seen(&pod.json(uid))));
        }
        replica.pods.take(WatchEvent::ListEnds);
        replica.seen = self.api.log.len();
        if !replica.is_listed {
            replica.is_listed = true;
            replica.app.ledger.set_listed(replica.app.clock.now());
        }
        self.step(Some(life), Event::Changed);
    }

    fn watch(&mut self, life: u64) {
        self.is_watch_due = false;
        if !self.alive(life) {
            return;
        }
        if self.is_faulty() && self.chance(2) {
            return self.list(life); // 410 Gone: it begins again
        }
        let repeats = self.is_faulty() && self.chance(5);
        let most = self.rng.random_range(1..6);
        let Some(replica) = &mut self.replica else { return };
        replica.set_time(self.now);
        let first = replica.seen.saturating_sub(usize::from(repeats));
        let last = self.api.log.len().min(replica.seen + most);
        for change in &self.api.log[first..last] {
            let pod = change.seen.clone();
            let event =
                if change.is_deleted { WatchEvent::Deleted(pod) } else { WatchEvent::Seen(pod) };
            replica.pods.take(event);
        }
        replica.seen = last;
        self.step(Some(life), Event::Changed);
    }

    /// After each event: watches notice what is new.
    fn follow_up(&mut self) {
        let behind = |seen| seen < self.api.log.len();
        let watches =
            self.replica.as_ref().is_some_and(|replica| replica.is_listed && behind(replica.seen));
        let schedules = behind(self.scheduler.seen);
        let lag = if self.is_faulty() && self.chance(5) { 3_000 } else { 30 };
        if watches && !self.is_watch_due {
            self.is_watch_due = true;
            let time = self.rng.random_range(0..lag);
            let life = self.lives;
            self.after(time, What::Watch { life });
        }
        if schedules && !self.is_schedule_due {
            self.is_schedule_due = true;
            let time = self.rng.random_range(0..lag);
            self.after(time, What::Schedule);
        }
    }

    // --- kube-scheduler --------------------------------------------------------------------------

    fn schedule(&mut self) {
        for change in &self.api.log[self.scheduler.seen..] {
            self.scheduler.see(change, self.now);
        }
        self.scheduler.seen = self.api.log.len();
        if self.scheduler.begin(self.now) {
            self.call(Verb::Filter, (0..NODES).map(node_name).collect());
        }
        self.is_schedule_due = true;
        let time = self.rng.random_range(20..60);
        self.after(time, What::Schedule);
    }

    fn call(&mut self, verb: Verb, nodes: Vec<String>) {
        let Some(cycle) = &self.scheduler.cycle else { return };
        let body = json!({"Pod": cycle.pod, "Nodes": null, "NodeNames": nodes}).to_string();
        let cycle = cycle.number;
        let way = self.rng.random_range(0..3);
        self.after(way, What::Verb { cycle, verb, body });
        self.after(HTTP_TIMEOUT, What::Verbed { cycle, verb, answer: None });
    }

    fn verb(&mut self, cycle: u64, verb: Verb, body: &str) {
        let way = self.rng.random_range(0..3);
        let Some(replica) = &self.replica else {
            self.after(way, What::Verbed { cycle, verb, answer: None });
            return;
        };
        replica.set_time(self.now);
        let answer = match verb {
            Verb::Filter => verbs::filter(&replica.app, body.as_bytes()),
            Verb::Prioritize => verbs::prioritize(&replica.app, body.as_bytes()),
        };
        let (answer, _) = answer.expect("a good body");
        let answer = serde_json::from_slice(&answer).expect("JSON");
        self.after(way, What::Verbed { cycle, verb, answer: Some(answer) });
        self.step(None, Event::Changed);
    }

    fn verbed(&mut self, number: u64, verb: Verb, answer: Option<Value>) {
        let Some(cycle) = self.scheduler.current(number) else { return };
        let uid = cycle.uid.clone();
        let Some(answer) = answer else {
            // A timeout of *filter* must not end the cycle that has come to *prioritize*.
            return self.scheduler.fail(self.now);
        };
        let names: Vec<String> = match verb {
            Verb::Filter if answer["Error"].as_str().is_some_and(|error| !error.is_empty()) => {
                return self.scheduler.fail(self.now);
            }
            Verb::Filter => serde_json::from_value(answer["NodeNames"].clone()).unwrap_or_default(),
            Verb::Prioritize => {
                let scores = answer.as_array().expect("a list");
                let best = scores.iter().max_by_key(|score| score["Score"].as_i64());
                best.and_then(|best| best["Host"].as_str()).map(str::to_owned).into_iter().collect()
            }
        };
        match &names[..] {
            [] => self.scheduler.park(self.now),
            _ if self.is_faulty() && self.chance(2) => self.scheduler.fail(self.now),
            [node] => {
                self.scheduler.assume();
                let name = &self.api.pods.get(&uid).map_or(uid.clone(), |pod| pod.name.clone());
                let body = json!({"PodName": name, "PodNamespace": "team", "PodUID": uid,
                    "Node": node});
                let way = self.rng.random_range(0..3);
                let (cycle, body) = (number, body.to_string());
                self.after(HTTP_TIMEOUT, What::Bound { uid: uid.clone(), cycle, error: None });
                self.after(way, What::Bind { uid, cycle, body });
            }
            _ => self.call(Verb::Prioritize, names),
        }
    }

    fn bind(&mut self, uid: String, cycle: u64, body: String) {
        let Some(replica) = &self.replica else {
            self.after(1, What::Bound { uid, cycle, error: None });
            return;
        };
        replica.set_time(self.now);
        let (app, answered) = (Arc::clone(&replica.app), Arc::clone(&self.answered));
        replica.app.outside.spawn(async move {
            let (answer, _) = binding::bind(&app, body.as_bytes()).await.expect("a good body");
            let answer: Value = serde_json::from_slice(&answer).expect("JSON");
            let error = answer["Error"].as_str().unwrap_or_default().to_owned();
            answered.lock().expect("no panic").push((uid, cycle, error));
        });
        self.step(None, Event::Changed);
    }

    fn bound(&mut self, uid: &str, cycle: u64, error: Option<String>) {
        if self.scheduler.binding.get(uid) != Some(&cycle) {
            return;
        }
        if error.as_deref() == Some("") {
            self.scheduler.binding.remove(uid);
        } else {
            self.scheduler.try_again(uid, self.now);
        }
    }

    // --- nodes -----------------------------------------------------------------------------------

    fn report(&mut self, node: usize) {
        let time = self.rng.random_range(300..1_500);
        self.after(time, What::Report { node });
        if self.is_faulty() && self.chance(1) {
            let run = self.agents[node].run + 1;
            self.agents[node] = Agent { run, ..Agent::default() };
        }
        let is_lost = self.is_faulty() && self.chance(5);
        let is_heard = !(self.is_faulty() && self.chance(5));
        let Some(replica) = self.replica.as_ref().filter(|replica| !replica.is_frozen) else {
            return;
        };
        let (name, agent) = (node_name(node), &mut self.agents[node]);
        agent.sequence += 1;
        let device = |at: usize| format!("{name}-{at}");
        let uses: Vec<Value> = (0..GPUS)
            .map(|at| {
                let here = self.processes.iter().filter(|(_, process)| process.node == name);
                let processes: Vec<Value> = here
                    .filter_map(|(uid, process)| {
                        let (_, mib) = process.devices.iter().find(|(id, _)| *id == device(at))?;
                        Some(json!({"pid": 7, "podUid": uid, "memoryMib": mib}))
                    })
                    .collect();
                let used: u64 = processes.iter().filter_map(|it| it["memoryMib"].as_u64()).sum();
                json!({"id": device(at), "usedMib": used, "healthy": true, "processes": processes})
            })
            .collect();
        let mut report = json!({
            "apiVersion": "gpupack.dev/v1alpha1", "agent": format!("{name}-{}", agent.run),
            "sequence": agent.sequence, "devices": uses,
        });
        match agent.session {
            Some(session) => report["session"] = session.into(),
            None => {
                let inventory = (0..GPUS).map(|at| {
                    json!({"id": device(at), "index": at, "model": "A100", "memoryMib": GPU_MIB,
                        "reservedMib": 0, "kind": "Gpu", "healthy": true})
                });
                report["inventory"] = inventory.collect();
            }
        }
        if is_lost {
            return;
        }
        replica.set_time(self.now);
        let (status, reply) = reports::answer(&replica.app, &name, report.to_string().as_bytes());
        if is_heard {
            let reply: Value = serde_json::from_slice(&reply).expect("JSON");
            agent.session = match status.as_u16() {
                200 => reply["session"].as_u64(),
                409 | 404 => None,
                503 => agent.session,
                _ => panic!("a report was refused: {reply}"),
            };
        }
        self.step(None, Event::Changed);
    }

    /// Kubelets start and end containers, and remove pods whose containers have ended.
    fn kubelets(&mut self) {
        let time = self.rng.random_range(200..1_200);
        self.after(time, What::Kubelets);
        let ended: Vec<String> = self
            .processes
            .iter()
            .filter(|(_, process)| process.ends.is_some_and(|ends| ends <= self.now))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in ended {
            self.processes.remove(&uid);
            if self.api.pods.get(&uid).is_some_and(|pod| pod.is_deleting || pod.is_terminal) {
                self.api.remove(&uid);
            }
        }
        for (uid, process) in &mut self.processes {
            let pod = self.api.pods.get(uid);
            let lives = pod.is_some_and(|pod| !pod.is_deleting && !pod.is_terminal);
            if !lives && process.ends.is_none() {
                process.ends = Some(self.now + self.rng.random_range(0..5_000));
            }
        }
        let mut gone = Vec::new();
        for (uid, pod) in &self.api.pods {
            let Some(node) = &pod.node else { continue };
            if self.processes.contains_key(uid) {
                continue;
            }
            if pod.is_deleting || pod.is_terminal {
                gone.push(uid.clone());
            } else {
                let devices = pod.takes.iter().map(|(id, mib, _)| (id.clone(), *mib)).collect();
                let process = Process { node: node.clone(), devices, ends: None };
                self.processes.insert(uid.clone(), process);
            }
        }
        gone.iter().for_each(|uid| self.api.remove(uid));
    }

    // --- people ----------------------------------------------------------------------------------

    fn users(&mut self) {
        if !self.is_faulty() {
            return;
        }
        let time = self.rng.random_range(20..600);
        self.after(time, What::Users);
        if self.chance(60) && self.api.pods.len() < PODS {
            self.created += 1;
            let uid = format!("pod-{}", self.created);
            let annotations = match self.rng.random_range(0..10) {
                0..5 => {
                    let share = ["0.1", "0.25", "0.5", "0.75"][self.rng.random_range(0..4)];
                    json!({"gpu-fraction": share})
                }
                5..7 => {
                    let mib: u64 = self.rng.random_range(100..GPU_MIB);
                    json!({"gpu-memory": mib.to_string()})
                }
                7 => json!({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "2"}),
                8 => json!({}),
                _ => json!({"gpu-fraction": "1"}),
            };
            let priority = self.rng.random_range(0..3);
            self.api.create(&uid, self.now, priority, annotations);
            return;
        }
        let uids: Vec<String> = self.api.pods.keys().cloned().collect();
        if uids.is_empty() {
            return;
        }
        let uid = uids[self.rng.random_range(0..uids.len())].clone();
        let kind = self.rng.random_range(0..10);
        let Some(pod) = self.api.pods.get_mut(&uid) else { return };
        match (kind, &pod.node) {
            (0..3, Some(_)) => pod.is_terminal = true,
            (3..8, Some(_)) => pod.is_deleting = true,
            (8, _) | (0, None) => return self.api.remove(&uid), // by force
            (9, None) => {
                pod.annotations.insert("example.com/edited".to_owned(), kind.to_string());
            }
            _ => return,
        }
        self.api.changed(&uid);
    }

    fn chaos(&mut self) {
        if !self.is_faulty() {
            return;
        }
        let time = self.rng.random_range(500..8_000);
        self.after(time, What::Chaos);
        let Some(replica) = &mut self.replica else { return };
        match self.rng.random_range(0..10) {
            0..3 => {
                self.replica = None; // SIGKILL
                self.inbox.clear();
                let time = self.rng.random_range(50..5_000);
                self.after(time, What::Start);
                for agent in &mut self.agents {
                    agent.session = None;
                }
            }
            3..5 if !replica.is_frozen => {
                replica.is_frozen = true;
                let time = self.rng.random_range(100..25_000);
                self.after(time, What::Thaw);
            }
            _ => {}
        }
    }

    fn thaw(&mut self) {
        let Some(replica) = &mut self.replica else { return };
        replica.is_frozen = false;
        self.next_due = None;
        for what in std::mem::take(&mut self.inbox) {
            self.after(0, what);
        }
        self.step(None, Event::Changed);
    }

    // --- checks ----------------------------------------------------------------------------------

    fn check(&self) -> Result<(), String> {
        let mut taken: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for pod in self.api.pods.values().filter(|pod| pod.node.is_some() && !pod.is_terminal) {
            for (device, mib, share) in &pod.takes {
                let sum = taken.entry(device).or_default();
                *sum = (sum.0 + mib, sum.1 + share);
            }
        }
        if let Some((device, sum)) =
            taken.iter().find(|(_, (mib, share))| *mib > GPU_MIB || *share > 1_000_000)
        {
            return Err(format!("{device} is allocated above its capacity: {sum:?}"));
        }
        if !self.api.ended_by_us.is_empty() {
            return Err(format!("gpupack ended {:?}", self.api.ended_by_us));
        }
        let Some(replica) = &self.replica else { return Ok(()) };
        if replica.is_listed && replica.seen == self.api.log.len() {
            self.check_ledger(replica)?;
        }
        Ok(())
    }

    /// With everything seen, each bound pod is allocated where it is bound.
    fn check_ledger(&self, replica: &Replica) -> Result<(), String> {
        let ledger = &replica.app.ledger;
        for (uid, pod) in &self.api.pods {
            let is_allocated = pod.node.is_some() && !pod.is_terminal && !pod.takes.is_empty();
            if !is_allocated {
                continue;
            }
            let held = ledger.reservation(&PodUid::new(uid.as_str()));
            let is_right = held.as_ref().is_some_and(|held| {
                Some(held.placement.node.as_str()) == pod.node.as_deref()
                    && held.placement.devices.len() == pod.takes.len()
            });
            if !is_right {
                return Err(format!("{uid} is bound to {:?}, and held is {held:?}", pod.node));
            }
        }
        if !self.events.is_multiple_of(AUDIT_EVERY) {
            return Ok(());
        }
        ledger.audit().map_err(|faults| format!("{faults:?}"))
    }

    /// The faults are over: nothing is undecided, and nothing waits that fits.
    fn check_end(&self) -> Result<(), String> {
        let Some(replica) = &self.replica else { return Err("no extender at the end".to_owned()) };
        if replica.app.readiness() != Readiness::Ready {
            return Err(format!("not ready at the end: {:?}", replica.app.readiness()));
        }
        self.check_ledger(replica)?;
        let assumed = |state| matches!(state, ReservationState::Assumed { .. });
        let nodes = replica.app.ledger.nodes();
        let held = nodes.iter().flat_map(|node| node.reservations().values());
        let undecided: Vec<_> = held.filter(|held| assumed(held.state)).collect();
        if !undecided.is_empty() {
            return Err(format!("undecided at the end: {undecided:?}"));
        }
        for pod in self.api.pods.iter().filter(|(_, pod)| pod.node.is_none() && !pod.is_deleting) {
            let seen = seen(&pod.1.json(pod.0));
            let query = replica.app.query(&seen);
            let fitting = query.map_or_else(Vec::new, |query| replica.app.ledger.fitting(&query));
            let is_without_gpu = seen.request == Ok(None);
            if !fitting.is_empty() || is_without_gpu {
                return Err(format!(
                    "{} waits and fits on {fitting:?}; kube-scheduler: {:#}",
                    pod.0,
                    self.scheduler.summary()
                ));
            }
        }
        Ok(())
    }
}

fn node_name(at: usize) -> String {
    format!("node-{at}")
}

/// Runs one seed: number of events, pods bound, and a digest of everything that happened.
fn run(seed: u64, is_traced: bool) -> Result<(u64, usize, u64), String> {
    let mut world = World::new(seed, is_traced);
    if let Err(fault) = world.run() {
        let trace: Vec<String> = world.trace.into();
        let trace = trace.join("\n");
        return Err(format!(
            "seed {seed}, event {} at {} ms: {fault}\n{trace}",
            world.events, world.now
        ));
    }
    let bound = world.api.log.iter().filter(|change| change.pod["spec"]["nodeName"].is_string());
    Ok((world.events, bound.count(), world.digest.finish()))
}

#[expect(clippy::disallowed_methods, reason = "a test has no flags for a number")]
fn seeds() -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    match number("SIM_SEED") {
        Some(only) => only..only + 1,
        None => 0..number("SIM_SEEDS").unwrap_or(SEEDS),
    }
}

#[test]
fn the_promises_hold_whatever_fails() {
    let clock = gpupack::clock::Clock::start();
    let (mut events, mut bound) = (0, 0);
    for seed in seeds() {
        let Ok((some, pods, _)) = run(seed, false) else {
            panic!("{}", run(seed, true).expect_err("a seed is replayed exactly"));
        };
        (events, bound) = (events + some, bound + pods);
    }
    let seconds = clock.precise().as_secs_f64();
    println!("{events} events in {seconds:.1} s, {bound} versions of bound pods");
}

#[test]
fn a_seed_is_replayed_exactly() {
    let first = run(7, true).expect("no fault");
    assert_eq!(first, run(7, true).expect("no fault"));
}
