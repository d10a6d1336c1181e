//! A fleet whose pods use more than they request now and then, on the ledger of the extender: how much of
//! that they get, and what it costs others.
//!
//! Tenants of a GPU that compute at the same time take equal turns, as under time slicing. A restart takes
//! 3 s; a burst that it broke begins again 30 s later.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::num::NonZeroU32;

use crate::hardware::device::{
    Device, DeviceId, DeviceIndex, DeviceKind, Health, ModelName, NodeName, PodUid, PoolName,
};
use crate::hardware::inventory::NodeInventory;
use crate::hardware::pool::{PoolRule, PoolRules};
use crate::hardware::units::{HostAmount, MemMib, MilliCpu, Share, Timestamp};
use crate::ledger::change::facts::{MoveFact, PodFact};
use crate::ledger::change::reports::NodeReport;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::model::device_state::{CLEAN_REPORTS_TO_FREE, DeviceUse, ProcessUse};
use crate::model::fit::HostRule;
use crate::model::policy::Policy;
use crate::model::request::{Amount, GpuRequest, Limit, Movable};
use crate::model::reservation::{Guest, Move, Placement, PodRef, Tenure};
use crate::scoring::strategy::Strategy;
use crate::sim::bursts::world::{Burst, Comer, DAY, HOUR, Habits, Kind, Ms, SECOND, comers};
use crate::sim::run::cluster::untimed_ledger;

const NODES: usize = 8;
const GPUS_EACH: usize = 8;
const GPU_MIB: u64 = 81_920;

/// From the order until all who had to go have left.
const RESTART: Ms = 3 * SECOND;

/// From there until the burst begins again.
const AGAIN: Ms = 30 * SECOND;

/// How long memory is kept after a burst at most.
const KEPT: Ms = HOUR;

/// Pods that wait longer for their GPU count as waiting.
const PATIENCE: Ms = 10 * SECOND;

/// Size and length of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Part of all GPUs that is requested on average.
    pub load: f64,
    /// Days until anything is measured.
    pub warm_up: u64,
    /// Days after that.
    pub days: u64,
    /// Seed of pods and bursts.
    pub seed: u64,
}

/// What one run gave.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Allocated GPU time, in milliseconds of a GPU, of all.
    allocated: f64,
    time: f64,
    bursts: u64,
    refused: u64,
    completed: u64,
    slowdown: f64,
    demanded: f64,
    delivered: f64,
    notebook_time: f64,
    recalls: u64,
    give_backs: u64,
    lost: u64,
    whole_pods: u64,
    whole_waited: u64,
}

impl Figures {
    /// Adds those of another seed.
    pub fn add(&mut self, other: &Self) {
        let Self { allocated, time, bursts, refused, completed, slowdown, demanded, .. } = other;
        let Self { delivered, notebook_time, recalls, give_backs, lost, .. } = other;
        self.allocated += allocated;
        self.time += time;
        self.bursts += bursts;
        self.refused += refused;
        self.completed += completed;
        self.slowdown += slowdown;
        self.demanded += demanded;
        self.delivered += delivered;
        self.notebook_time += notebook_time;
        self.recalls += recalls;
        self.give_backs += give_backs;
        self.lost += lost;
        self.whole_pods += other.whole_pods;
        self.whole_waited += other.whole_waited;
    }

    /// The figures of the table, by name.
    pub fn named(&self) -> [(&'static str, f64); 8] {
        let part = |of: f64, all: f64| if all > 0.0 { of / all } else { 0.0 };
        let per_100_hours =
            |count: u64| part(count as f64 * 100.0, self.notebook_time / HOUR as f64);
        [
            ("allocated_percent", 100.0 * part(self.allocated, self.time)),
            ("served_percent", 100.0 * part(self.delivered, self.demanded)),
            ("refused_percent", 100.0 * part(self.refused as f64, self.bursts as f64)),
            ("mean_slowdown", part(self.slowdown, self.completed as f64)),
            (
                "whole_waiting_percent",
                100.0 * part(self.whole_waited as f64, self.whole_pods as f64),
            ),
            ("recalls", per_100_hours(self.recalls)),
            ("give_backs", per_100_hours(self.give_backs)),
            ("lost", per_100_hours(self.lost)),
        ]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Comes(usize),
    /// With the number of the start of its container.
    Begins(usize, u32),
    /// With the number of the change of its speed.
    Done(usize, u32),
    /// With the number of the burst.
    Frees(usize, u32),
    Ends(usize),
}

/// A burst that goes on.
struct Running {
    burst: Burst,
    began: Ms,
    /// In microseconds of a whole GPU.
    left: u64,
}

/// A pod that runs.
struct Live {
    uid: PodUid,
    node: usize,
    /// The GPU where it runs, over all nodes.
    gpu: usize,
    habits: Habits,
    running: Option<Running>,
    /// What a restart broke.
    broken: Option<Burst>,
    /// Memory in use, in millionths of a GPU.
    memory: u64,
    starts: u32,
    speeds: u32,
    bursts: u32,
    since: Ms,
}

struct Fleet {
    setting: Setting,
    rule: PoolRule,
    ledger: Ledger,
    reports: Vec<NodeReport>,
    gpus: BTreeMap<DeviceId, usize>,
    comers: Vec<Comer>,
    live: BTreeMap<usize, Live>,
    waiting: VecDeque<usize>,
    busy: Vec<BTreeSet<usize>>,
    advanced: Vec<Ms>,
    events: BinaryHeap<Reverse<(Ms, u64, Event)>>,
    pushed: u64,
    allocated: u64,
    allocated_since: Ms,
    figures: Figures,
}

/// Plays the scenario where all nodes are in a pool of this rule.
pub fn play(setting: Setting, rule: PoolRule) -> Figures {
    let mut fleet = Fleet::new(setting, rule);
    let end = (setting.warm_up + setting.days) * DAY;
    while let Some(Reverse((now, _, event))) = fleet.events.pop() {
        if now >= end {
            break;
        }
        match event {
            Event::Comes(pod) => fleet.comes(pod, now),
            Event::Begins(pod, start) => fleet.begins(pod, start, now),
            Event::Done(pod, speed) => fleet.done(pod, speed, now),
            Event::Frees(pod, burst) => fleet.frees(pod, burst, now),
            Event::Ends(pod) => fleet.ends(pod, now),
        }
    }
    fleet.close(end)
}

impl Fleet {
    fn new(setting: Setting, rule: PoolRule) -> Self {
        let ledger = untimed_ledger();
        ledger.share_by(PoolRules::new([(PoolName::new(""), rule)]));
        let (mut reports, mut gpus) = (Vec::new(), BTreeMap::new());
        for node in 0..NODES {
            let name = NodeName::new(format!("node-{node}"));
            let host = HostAmount { cpu: MilliCpu::new(1 << 30), memory: MemMib::new(1 << 40) };
            ledger.see_node(&name, host, PoolName::new(""));
            let device = |index: usize| Device {
                id: DeviceId::new(&format!("GPU-{node}-{index}")).expect("a sound name"),
                index: DeviceIndex(u32::try_from(index).expect("few")),
                model: ModelName::new("H100"),
                total: MemMib::new(GPU_MIB),
                reserved: MemMib::ZERO,
                kind: DeviceKind::Gpu,
                health: Health::Healthy,
            };
            let devices: Vec<Device> = (0..GPUS_EACH).map(device).collect();
            let ids = devices.iter().map(|device| device.id.clone());
            gpus.extend(ids.zip(node * GPUS_EACH..));
            let uses = devices.iter().map(|device| DeviceUse::idle(device.id.clone())).collect();
            let mut report = NodeReport {
                agent: name.to_string(),
                session: None,
                sequence: 1,
                uses,
                inventory: Some(NodeInventory::new(devices).expect("a sound inventory")),
                allocations_version: None,
            };
            let receipt = ledger.report(name.as_str(), &report, Timestamp::START);
            report.session = Some(receipt.expect("a first report").session);
            report.inventory = None;
            reports.push(report);
        }
        ledger.set_listed(Timestamp::START);
        let days = setting.warm_up + setting.days;
        let comers = comers(setting.seed, NODES * GPUS_EACH, setting.load, days);
        let mut fleet = Self {
            setting,
            rule,
            ledger,
            reports,
            gpus,
            live: BTreeMap::new(),
            waiting: VecDeque::new(),
            busy: vec![BTreeSet::new(); NODES * GPUS_EACH],
            advanced: vec![0; NODES * GPUS_EACH],
            events: BinaryHeap::new(),
            pushed: 0,
            allocated: 0,
            allocated_since: 0,
            figures: Figures::default(),
            comers,
        };
        for pod in 0..fleet.comers.len() {
            fleet.push(fleet.comers[pod].comes, Event::Comes(pod));
        }
        fleet
    }

    fn push(&mut self, at: Ms, event: Event) {
        self.pushed += 1;
        self.events.push(Reverse((at, self.pushed, event)));
    }

    fn is_measured(&self, now: Ms) -> bool {
        now >= self.setting.warm_up * DAY
    }

    fn comes(&mut self, pod: usize, now: Ms) {
        let is_whole = self.comers[pod].kind == Kind::Whole;
        self.figures.whole_pods += u64::from(is_whole && self.is_measured(now));
        if !self.place(pod, now) {
            self.waiting.push_back(pod);
        }
    }

    fn query(&self, pod: usize) -> PlacementRequest {
        let Comer { kind, request, limit, .. } = self.comers[pod];
        let amount = match kind {
            Kind::Whole => Amount::Whole,
            _ => Amount::Fraction(Share::from_millionths(request)),
        };
        let mut gpu = GpuRequest::several(amount, NonZeroU32::MIN);
        if kind != Kind::Whole {
            gpu.limit = Some(Limit::Fraction(Share::from_millionths(limit)));
        }
        if kind == Kind::Notebook {
            gpu.movable = Movable::Restart;
        }
        PlacementRequest {
            gpu: Some(gpu),
            host: HostAmount::ZERO,
            host_rule: HostRule::Checked,
            strategy: Strategy::Policy(Policy::Fragmentation),
        }
    }

    /// Places a pod as *filter*, *prioritize* and *bind* do. Whether it fits.
    fn place(&mut self, pod: usize, now: Ms) -> bool {
        let (query, at) = (self.query(pod), Timestamp::from_millis(now));
        let uid = PodUid::new(pod.to_string());
        if self.comers[pod].comes == now {
            self.ledger.learn(uid.clone(), &query);
        }
        let Some((node, _)) = self.ledger.best(&query) else { return false };
        let named = PodRef { uid: uid.clone(), name: uid.as_str().into() };
        let reserved = self.ledger.reserve(&named, node.as_str(), &query, at);
        reserved.expect("what a query found is there: nothing else changes this ledger");
        let node_at = self.reports.iter().position(|report| report.agent == node.as_str());
        let node_at = node_at.expect("a node of the fleet");
        let delay = if self.make_way(node_at, now) { RESTART } else { 0 };
        let to_post = self.ledger.to_post(&uid).expect("it is reserved");
        assert!(
            to_post.waits_for.is_empty() && !to_post.is_short,
            "all have made way: {to_post:?}"
        );
        self.ledger.confirm(&uid);
        let runs_on = to_post.placement.runs_on();
        let gpu = self.gpus[runs_on.first().expect("one device")];
        self.live.insert(
            pod,
            Live {
                uid,
                node: node_at,
                gpu,
                habits: Habits::of(self.setting.seed, pod),
                running: None,
                broken: None,
                memory: 0,
                starts: 0,
                speeds: 0,
                bursts: 0,
                since: now,
            },
        );
        let Comer { kind, comes, stays, request, .. } = self.comers[pod];
        if kind == Kind::Whole && now - comes > PATIENCE && self.is_measured(comes) {
            self.figures.whole_waited += 1;
        }
        self.account_allocated(now);
        self.allocated += request;
        let live = self.live.get_mut(&pod).expect("just placed");
        let begins = now + delay + live.habits.gap(kind, now);
        self.push(begins, Event::Begins(pod, 0));
        self.push(now + delay + stays, Event::Ends(pod));
        true
    }

    /// Moves guests home and takes memory back, as *bind* waits for. Whether anything was restarted.
    fn make_way(&mut self, node: usize, now: Ms) -> bool {
        let name = self.reports[node].agent.clone();
        let mut is_any = false;
        loop {
            let giving_back = self.ledger.to_give_back(Some(&name));
            for pod in &giving_back {
                self.figures.give_backs += u64::from(self.is_measured(now));
                self.restart(number(&pod.uid), now);
            }
            self.report(node, now);
            let recalled = self.ledger.recalled(Some(&name));
            let next = recalled.iter().find(|it| !self.ledger.waits_for_memory_at_home(&it.uid));
            if let Some(guest) = next {
                self.figures.recalls += u64::from(self.is_measured(now));
                self.go_home(&guest.uid, now);
            }
            if giving_back.is_empty() && next.is_none() {
                return is_any;
            }
            is_any = true;
        }
    }

    /// One move home with both writes, the end of the container and two lists without it.
    fn go_home(&mut self, uid: &PodUid, now: Ms) {
        let pod = number(uid);
        let leaving = Move { container: "1".into(), cpu_milli: 10 };
        self.ledger.write_move(uid, Some(leaving.clone()));
        let held = self.ledger.reservation(uid).expect("a guest is there");
        let on = held.placement.guest.as_ref().expect("it is a guest").on.clone();
        let written = Placement {
            guest: Some(Guest { on, leaving: Some(leaving) }),
            ..held.placement.clone()
        };
        let home = written.devices.first().expect("one device").id.clone();
        self.restart(pod, now);
        let fact = PodFact {
            pod: held.pod.clone(),
            node: Some(written.node.clone()),
            host: HostAmount::ZERO,
            is_terminal: false,
            wants_gpu: true,
            request: held.request.clone(),
            placement: Some(written),
            bound_by_us: true,
            moves: MoveFact { has_left: true, is_of_other: false },
            tenure: Tenure::default(),
        };
        self.ledger.see_pod(&fact, Timestamp::from_millis(now));
        let live = self.live.get_mut(&pod).expect("it runs");
        live.gpu = self.gpus[&home];
        let node = live.node;
        (0..CLEAN_REPORTS_TO_FREE).for_each(|_| self.report(node, now));
    }

    /// The container of a pod is restarted: what it has in memory is lost.
    fn restart(&mut self, pod: usize, now: Ms) {
        self.leave(pod, now);
        let is_measured = self.is_measured(now);
        let live = self.live.get_mut(&pod).expect("it runs");
        self.figures.lost += u64::from(live.memory > 0 && is_measured);
        live.memory = 0;
        live.bursts += 1;
        if let Some(running) = live.running.take() {
            live.broken = Some(running.burst);
            live.starts += 1;
            let start = live.starts;
            self.push(now + RESTART + AGAIN, Event::Begins(pod, start));
        }
    }

    fn begins(&mut self, pod: usize, start: u32, now: Ms) {
        let (is_measured, may_take) = (self.is_measured(now), self.may_take(pod));
        let (Some(live), comer) = (self.live.get_mut(&pod), &self.comers[pod]) else { return };
        if live.starts != start || live.running.is_some() {
            return;
        }
        let broken = live.broken.take();
        let burst = broken.unwrap_or_else(|| live.habits.burst(comer));
        let is_counted = comer.kind == Kind::Notebook && is_measured && broken.is_none();
        if is_counted {
            self.figures.bursts += 1;
            self.figures.demanded += burst.work as f64;
        }
        if burst.memory > comer.request && burst.memory > may_take {
            self.figures.refused += u64::from(is_counted);
            let gap = live.habits.gap(comer.kind, now);
            let start = live.starts;
            return self.push(now + gap, Event::Begins(pod, start));
        }
        live.memory = burst.memory;
        live.bursts += 1;
        live.running = Some(Running { burst, began: now, left: burst.work.saturating_mul(1_000) });
        let (node, gpu) = (live.node, live.gpu);
        self.advance(gpu, now);
        self.busy[gpu].insert(pod);
        self.pace(gpu, now);
        self.report(node, now);
    }

    /// The most memory that a pod may use now: what no other pod that runs there requests or uses.
    fn may_take(&self, pod: usize) -> u64 {
        let Some(live) = self.live.get(&pod) else { return 0 };
        let lends = self.rule.borrow.lends_memory();
        if !lends || self.comers[pod].kind != Kind::Notebook {
            return 0;
        }
        let others = self.live.iter().filter(|(other, it)| **other != pod && it.gpu == live.gpu);
        let taken = others.map(|(other, it)| it.memory.max(self.comers[*other].request));
        1_000_000_u64.saturating_sub(taken.sum())
    }

    fn done(&mut self, pod: usize, speed: u32, now: Ms) {
        if self.live.get(&pod).is_none_or(|live| live.speeds != speed) {
            return;
        }
        let kind = self.comers[pod].kind;
        self.leave(pod, now);
        let is_measured = self.is_measured(now);
        let live = self.live.get_mut(&pod).expect("just seen");
        let Some(Running { burst, began, .. }) = live.running.take() else { return };
        if kind == Kind::Notebook && is_measured {
            self.figures.completed += 1;
            self.figures.slowdown += (now - began) as f64 / burst.work as f64;
        }
        if is_measured && kind == Kind::Notebook && self.setting.warm_up * DAY <= began {
            self.figures.delivered += burst.work as f64;
        }
        let (node, number, start) = (live.node, live.bursts, live.starts);
        let gap = live.habits.gap(kind, now);
        if burst.keeps {
            self.push(now + KEPT, Event::Frees(pod, number));
        } else {
            live.memory = 0;
            self.report(node, now);
        }
        self.push(now + gap, Event::Begins(pod, start));
    }

    fn frees(&mut self, pod: usize, burst: u32, now: Ms) {
        let Some(live) = self.live.get_mut(&pod).filter(|live| live.bursts == burst) else {
            return;
        };
        live.memory = 0;
        let node = live.node;
        self.report(node, now);
    }

    fn ends(&mut self, pod: usize, now: Ms) {
        self.leave(pod, now);
        let live = self.live.remove(&pod).expect("it runs");
        let Comer { kind, request, .. } = self.comers[pod];
        self.account(kind, &live, now);
        self.account_allocated(now);
        self.allocated -= request;
        self.ledger.end_pod(&live.uid, Timestamp::from_millis(now));
        (0..CLEAN_REPORTS_TO_FREE).for_each(|_| self.report(live.node, now));
        let waiting = std::mem::take(&mut self.waiting);
        for pod in waiting {
            if !self.place(pod, now) {
                self.waiting.push_back(pod);
            }
        }
    }

    /// What the pod got of a burst that goes on, and its time.
    fn account(&mut self, kind: Kind, live: &Live, now: Ms) {
        if kind != Kind::Notebook || !self.is_measured(now) {
            return;
        }
        let begins = self.setting.warm_up * DAY;
        self.figures.notebook_time += (now - live.since.max(begins)) as f64;
        if let Some(running) = live.running.as_ref().filter(|running| running.began >= begins) {
            let done = running.burst.work.saturating_sub(running.left / 1_000);
            self.figures.delivered += done as f64;
        }
    }

    /// A pod computes no more where it runs.
    fn leave(&mut self, pod: usize, now: Ms) {
        let Some(gpu) = self.live.get(&pod).map(|live| live.gpu) else { return };
        self.advance(gpu, now);
        if self.busy[gpu].remove(&pod) {
            self.pace(gpu, now);
        }
    }

    /// What is computed on a GPU until now: those who are busy take equal turns.
    fn advance(&mut self, gpu: usize, now: Ms) {
        let turns = u64::try_from(self.busy[gpu].len()).expect("few").max(1);
        let each = (now - self.advanced[gpu]) * 1_000 / turns;
        self.advanced[gpu] = now;
        for pod in &self.busy[gpu] {
            let running = self.live.get_mut(pod).and_then(|live| live.running.as_mut());
            if let Some(running) = running.filter(|running| running.left < u64::MAX) {
                running.left = running.left.saturating_sub(each);
            }
        }
    }

    /// When each who is busy on a GPU will be done, if nothing changes there.
    fn pace(&mut self, gpu: usize, now: Ms) {
        let turns = u64::try_from(self.busy[gpu].len()).expect("few");
        let mut due = Vec::new();
        for pod in &self.busy[gpu] {
            let Some(live) = self.live.get_mut(pod) else { continue };
            live.speeds += 1;
            let left = live.running.as_ref().map(|running| running.left);
            if let Some(left) = left.filter(|left| *left < u64::MAX) {
                due.push((now + (left * turns).div_ceil(1_000), Event::Done(*pod, live.speeds)));
            }
        }
        due.into_iter().for_each(|(at, event)| self.push(at, event));
    }

    fn report(&mut self, node: usize, now: Ms) {
        let report = &mut self.reports[node];
        for (index, seen) in report.uses.iter_mut().enumerate() {
            let gpu = node * GPUS_EACH + index;
            let here = self.live.values().filter(|live| live.gpu == gpu && live.memory > 0);
            let memory = |live: &Live| MemMib::new(live.memory * GPU_MIB / 1_000_000);
            let processes = here
                .map(|live| ProcessUse { pod: Some(live.uid.clone()), memory: Some(memory(live)) });
            let processes: Vec<ProcessUse> = processes.collect();
            let used = processes.iter().filter_map(|process| process.memory).map(MemMib::mib).sum();
            (seen.used, seen.processes) = (Some(MemMib::new(used)), Some(processes));
        }
        report.sequence += 1;
        let taken = self.ledger.report(&report.agent, report, Timestamp::from_millis(now));
        taken.expect("the agent reports in its session and sends no inventory");
    }

    /// Accounts for what was allocated until now.
    fn account_allocated(&mut self, now: Ms) {
        let begins = self.setting.warm_up * DAY;
        let time = now.max(begins) - self.allocated_since.max(begins);
        let all = (NODES * GPUS_EACH) as f64;
        self.figures.time += time as f64 * all;
        self.figures.allocated += time as f64 * self.allocated as f64 / 1e6;
        self.allocated_since = now;
    }

    fn close(mut self, end: Ms) -> Figures {
        self.account_allocated(end);
        for gpu in 0..self.busy.len() {
            self.advance(gpu, end);
        }
        for (pod, live) in std::mem::take(&mut self.live) {
            self.account(self.comers[pod].kind, &live, end);
        }
        let late = |pod: &&usize| {
            let comer = &self.comers[**pod];
            comer.kind == Kind::Whole && self.is_measured(comer.comes)
        };
        self.figures.whole_waited += self.waiting.iter().filter(late).count() as u64;
        self.figures
    }
}

/// Pods are named by their number.
fn number(uid: &PodUid) -> usize {
    uid.as_str().parse().expect("pods are named by their number")
}

#[cfg(test)]
mod tests;
