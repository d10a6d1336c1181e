//! A fleet whose pods use more than they request now and then, on the ledger of the extender: how much of
//! that they get, and what it costs others.
//!
//! Tenants of a GPU that compute at the same time take equal turns, as under time slicing. A restart takes
//! 3 s; a burst that it broke begins again 30 s later.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use crate::bursts::world::{Burst, BurstKind, BurstWorld, Comer, HOUR, Habits, Ms, SECOND};
use engine::hardware::pool::{PoolRule, PoolRules, Replicas};
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::change::reports::{NodeReport, ReportRefusal};
use engine::ledger::nodes::state::Ledger;
use engine::model::device_state::CLEAN_REPORTS_TO_FREE;
use engine::model::reservation::{Guest, MoveHome, Placement, PodRef, Tenure};
use sim::run::cluster::{add_node, pool_of, untimed_ledger};
use sim::trace::read::TraceNode;
use wire::ids::{DeviceId, PodUid};
use wire::seen::ProcessUse;
use wire::units::{HostAmount, MemMib, Timestamp};

/// From the order until all who had to go have left.
const RESTART: Ms = 3 * SECOND;

/// From there until the burst begins again.
const AGAIN: Ms = 30 * SECOND;

/// How long memory is kept after a burst at most.
const KEPT: Ms = HOUR;

/// Pods that wait longer for their GPU count as waiting.
const PATIENCE: Ms = 10 * SECOND;

/// What one run gave.
#[derive(Clone, Copy, Debug, Default)]
pub struct BurstFigures {
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

impl BurstFigures {
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

/// A part of all; zero if that is nothing.
fn part(of: f64, all: f64) -> f64 {
    if all > 0.0 { of / all } else { 0.0 }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum BurstEvent {
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
struct RunningBurst {
    burst: Burst,
    began: Ms,
    /// In microseconds of a whole GPU.
    left: u64,
}

/// A pod that runs.
struct Live {
    uid: PodUid,
    node: usize,
    /// The devices where it runs, over all nodes, with what it requests of their memory. Only one with a
    /// single device has a limit or moves.
    on: Vec<(usize, u64)>,
    /// The most memory that it may use of its device.
    limit: u64,
    /// Millionths of a GPU, over all devices.
    share: u64,
    habits: Habits,
    running: Option<RunningBurst>,
    /// What a restart broke.
    broken: Option<Burst>,
    /// Memory in use of its device.
    memory: u64,
    starts: u32,
    speeds: u32,
    bursts: u32,
    since: Ms,
}

impl Live {
    /// What it uses of the memory of a device. One with several uses what it requests there.
    fn uses(&self, gpu: usize) -> Option<u64> {
        let (_, request) = self.on.iter().find(|(at, _)| *at == gpu)?;
        let is_single = self.on.len() == 1;
        Some(if is_single || self.memory == 0 { self.memory } else { *request })
    }

    /// What it requests of a device, or uses if that is more.
    fn takes(&self, gpu: usize) -> Option<u64> {
        let (_, request) = self.on.iter().find(|(at, _)| *at == gpu)?;
        Some(self.uses(gpu)?.max(*request))
    }
}

struct BurstFleet {
    seed: u64,
    window: (Ms, Ms),
    ledger: Ledger,
    reports: Vec<NodeReport>,
    gpus: BTreeMap<DeviceId, usize>,
    devices: Vec<OfDevice>,
    /// Devices that can have pods.
    placeable: u64,
    comers: Vec<Comer>,
    live: BTreeMap<usize, Live>,
    waiting: VecDeque<usize>,
    events: BinaryHeap<Reverse<(Ms, u64, BurstEvent)>>,
    pushed: u64,
    allocated: u64,
    allocated_since: Ms,
    figures: BurstFigures,
}

/// A device of the fleet.
struct OfDevice {
    /// Its memory.
    mib: u64,
    /// The same in the parts of the world.
    parts: u64,
    /// What is used by processes of no pod.
    other_use: u64,
    lends_memory: bool,
    replicas: Option<Replicas>,
    /// The pods that run there.
    tenants: BTreeSet<usize>,
    /// Those that compute there now.
    busy: BTreeSet<usize>,
    /// Until when it is counted what they have computed.
    advanced: Ms,
}

impl OfDevice {
    fn parts_of(&self, mib: u64) -> u64 {
        mib * self.parts / self.mib.max(1)
    }
}

/// Plays a world where all nodes lend as this rule says.
///
/// # Errors
/// A node that the ledger refuses.
pub fn play(world: &BurstWorld, seed: u64, rule: PoolRule) -> Result<BurstFigures, ReportRefusal> {
    let mut fleet = BurstFleet::new(world, seed, rule)?;
    let end = world.ends;
    while let Some(Reverse((now, _, event))) = fleet.events.pop() {
        if now >= end {
            break;
        }
        match event {
            BurstEvent::Comes(pod) => fleet.comes(pod, now),
            BurstEvent::Begins(pod, start) => fleet.begins(pod, start, now),
            BurstEvent::Done(pod, speed) => fleet.done(pod, speed, now),
            BurstEvent::Frees(pod, burst) => fleet.frees(pod, burst, now),
            BurstEvent::Ends(pod) => fleet.ends(pod, now),
        }
    }
    Ok(fleet.close(end))
}

/// The rule of a node's own pool, which lends as `rule` says.
fn lending(node: &TraceNode, rule: PoolRule) -> PoolRule {
    PoolRule { borrow: rule.borrow, ..node.rule() }
}

impl BurstFleet {
    fn new(world: &BurstWorld, seed: u64, rule: PoolRule) -> Result<Self, ReportRefusal> {
        let ledger = untimed_ledger();
        let rules: BTreeSet<PoolRule> =
            world.nodes.iter().map(|node| lending(node, rule)).collect();
        ledger.share_by(PoolRules::new(rules.iter().map(|rule| (pool_of(*rule), *rule))));
        let (mut reports, mut gpus, mut devices) = (Vec::new(), BTreeMap::new(), Vec::new());
        for (rank, node) in world.nodes.iter().enumerate() {
            let (report, _) = add_node(&ledger, rank, node, lending(node, rule))?;
            for (found, seen) in node.devices(rank)?.iter().zip(&report.uses) {
                let mib = found.device.capacity().mib();
                let device = OfDevice {
                    mib,
                    parts: world.parts.unwrap_or(mib),
                    other_use: 0,
                    lends_memory: rule.borrow.lends_memory(),
                    replicas: node.rule().replicas,
                    tenants: BTreeSet::new(),
                    busy: BTreeSet::new(),
                    advanced: 0,
                };
                let other_use = device.parts_of(seen.used.unwrap_or(MemMib::ZERO).mib());
                gpus.insert(found.device.id.clone(), devices.len());
                devices.push(OfDevice { other_use, ..device });
            }
            reports.push(report);
        }
        ledger.set_listed(Timestamp::START);
        let placeable = world.nodes.iter().map(|node| node.capacity_milli() / 1000).sum();
        let mut fleet = Self {
            seed,
            window: (world.begins, world.ends),
            ledger,
            reports,
            gpus,
            live: BTreeMap::new(),
            waiting: VecDeque::new(),
            placeable,
            devices,
            events: BinaryHeap::new(),
            pushed: 0,
            allocated: 0,
            allocated_since: 0,
            figures: BurstFigures::default(),
            comers: world.comers.clone(),
        };
        for pod in 0..fleet.comers.len() {
            fleet.push(fleet.comers[pod].comes, BurstEvent::Comes(pod));
        }
        Ok(fleet)
    }

    fn push(&mut self, at: Ms, event: BurstEvent) {
        self.pushed += 1;
        self.events.push(Reverse((at, self.pushed, event)));
    }

    fn is_measured(&self, now: Ms) -> bool {
        now >= self.window.0
    }

    fn comes(&mut self, pod: usize, now: Ms) {
        let is_whole = self.comers[pod].kind == BurstKind::Whole;
        self.figures.whole_pods += u64::from(is_whole && self.is_measured(now));
        if !self.place(pod, now) {
            self.waiting.push_back(pod);
        }
    }

    /// Places a pod as *filter*, *prioritize* and *bind* do. Whether it fits.
    fn place(&mut self, pod: usize, now: Ms) -> bool {
        let (query, at) = (self.comers[pod].query.clone(), Timestamp::from_millis(now));
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
        self.start(pod, uid, node_at, &to_post.placement, now);
        let Comer { kind, comes, stays, .. } = self.comers[pod];
        if kind == BurstKind::Whole && now - comes > PATIENCE && self.is_measured(comes) {
            self.figures.whole_waited += 1;
        }
        self.account_allocated(now);
        let live = self.live.get_mut(&pod).expect("just placed");
        self.allocated += live.share;
        let begins = now + delay + live.habits.gap(kind, now);
        self.push(begins, BurstEvent::Begins(pod, 0));
        self.push(now + delay + stays, BurstEvent::Ends(pod));
        true
    }

    /// A pod runs where it is placed.
    fn start(&mut self, pod: usize, uid: PodUid, node: usize, placement: &Placement, now: Ms) {
        let demands = placement.devices.iter().map(|placed| placed.demand);
        let share = demands.clone().map(|demand| demand.share.millionths()).sum();
        let runs_on = placement.runs_on();
        let gpus = runs_on.iter().map(|id| self.gpus[id]);
        let on: Vec<(usize, u64)> = gpus
            .zip(demands)
            .map(|(gpu, demand)| (gpu, self.devices[gpu].parts_of(demand.memory.mib())))
            .collect();
        for (gpu, _) in &on {
            self.devices[*gpu].tenants.insert(pod);
        }
        let limit = self.comers[pod].query.gpu.as_ref().and_then(|gpu| gpu.limit);
        let limit = on.first().map_or(0, |(gpu, request)| {
            let device = &self.devices[*gpu];
            let most = MemMib::new(device.mib);
            let Some(limit) = limit else { return *request };
            let limit = limit.memory_of(device.replicas, most).min(most);
            device.parts_of(limit.mib()).max(*request)
        });
        let live = Live {
            uid,
            node,
            on,
            limit,
            share,
            habits: Habits::of(self.seed, pod),
            running: None,
            broken: None,
            memory: 0,
            starts: 0,
            speeds: 0,
            bursts: 0,
            since: now,
        };
        self.live.insert(pod, live);
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
            let next =
                recalled.iter().find(|guest| !self.ledger.waits_for_memory_at_home(&guest.uid));
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
        let leaving = MoveHome { container: "1".into(), cpu_milli: 10 };
        self.ledger.write_move(uid, Some(leaving.clone()));
        let held = self.ledger.reservation(uid).expect("a guest is there");
        let on = held.placement.guest.as_ref().expect("it is a guest").on.clone();
        let written = Placement {
            guest: Some(Guest { on, spot: None, leaving: Some(leaving) }),
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
            moves: MoveFact { has_left: true, ..MoveFact::default() },
            tenure: Tenure::default(),
        };
        self.ledger.see_pod(&fact, Timestamp::from_millis(now));
        let node = self.runs_on(pod, &home);
        (0..CLEAN_REPORTS_TO_FREE).for_each(|_| self.report(node, now));
    }

    /// A pod with one device runs on another one from now on. Returns its node.
    fn runs_on(&mut self, pod: usize, to: &DeviceId) -> usize {
        let live = self.live.get_mut(&pod).expect("it runs");
        let to = self.gpus[to];
        for (gpu, _) in &mut live.on {
            self.devices[*gpu].tenants.remove(&pod);
            *gpu = to;
            self.devices[to].tenants.insert(pod);
        }
        live.node
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
            self.push(now + RESTART + AGAIN, BurstEvent::Begins(pod, start));
        }
    }

    fn begins(&mut self, pod: usize, start: u32, now: Ms) {
        let (is_measured, may_take) = (self.is_measured(now), self.may_take(pod));
        let (Some(live), comer) = (self.live.get_mut(&pod), &self.comers[pod]) else { return };
        if live.starts != start || live.running.is_some() {
            return;
        }
        let broken = live.broken.take();
        let request = live.on.first().map_or(0, |(_, request)| *request);
        let burst = broken.unwrap_or_else(|| live.habits.burst(comer.kind, request, live.limit));
        let is_counted = comer.kind.has_bursts() && is_measured && broken.is_none();
        if is_counted {
            self.figures.bursts += 1;
            self.figures.demanded += burst.work as f64;
        }
        if burst.memory > request && burst.memory > may_take {
            self.figures.refused += u64::from(is_counted);
            let gap = live.habits.gap(comer.kind, now);
            let start = live.starts;
            return self.push(now + gap, BurstEvent::Begins(pod, start));
        }
        live.memory = burst.memory;
        live.bursts += 1;
        live.running =
            Some(RunningBurst { burst, began: now, left: burst.work.saturating_mul(1_000) });
        let node = live.node;
        for gpu in self.devices_of(pod) {
            self.advance(gpu, now);
            self.devices[gpu].busy.insert(pod);
            self.pace(gpu, now);
        }
        self.report(node, now);
    }

    /// The most memory that a pod may use now: what no other pod that runs there requests or uses.
    fn may_take(&self, pod: usize) -> u64 {
        let Some(&(gpu, _)) = self.live.get(&pod).and_then(|live| live.on.first()) else {
            return 0;
        };
        let device = &self.devices[gpu];
        if !device.lends_memory || !self.comers[pod].kind.has_bursts() {
            return 0;
        }
        let others = device.tenants.iter().filter(|other| **other != pod);
        let taken = others.filter_map(|other| self.live.get(other)?.takes(gpu));
        device.parts.saturating_sub(device.other_use + taken.sum::<u64>())
    }

    fn done(&mut self, pod: usize, speed: u32, now: Ms) {
        if self.live.get(&pod).is_none_or(|live| live.speeds != speed) {
            return;
        }
        let kind = self.comers[pod].kind;
        self.leave(pod, now);
        let is_measured = self.is_measured(now);
        let live = self.live.get_mut(&pod).expect("just seen");
        let Some(RunningBurst { burst, began, .. }) = live.running.take() else { return };
        if kind.has_bursts() && is_measured {
            self.figures.completed += 1;
            self.figures.slowdown += (now - began) as f64 / burst.work as f64;
        }
        if is_measured && kind.has_bursts() && self.window.0 <= began {
            self.figures.delivered += burst.work as f64;
        }
        let (node, number, start) = (live.node, live.bursts, live.starts);
        let gap = live.habits.gap(kind, now);
        if burst.keeps {
            self.push(now + KEPT, BurstEvent::Frees(pod, number));
        } else {
            live.memory = 0;
            self.report(node, now);
        }
        self.push(now + gap, BurstEvent::Begins(pod, start));
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
        for (gpu, _) in &live.on {
            self.devices[*gpu].tenants.remove(&pod);
        }
        self.account(self.comers[pod].kind, &live, now);
        self.account_allocated(now);
        self.allocated -= live.share;
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
    fn account(&mut self, kind: BurstKind, live: &Live, now: Ms) {
        if !kind.has_bursts() || !self.is_measured(now) {
            return;
        }
        let begins = self.window.0;
        self.figures.notebook_time += (now - live.since.max(begins)) as f64;
        if let Some(running) = live.running.as_ref().filter(|running| running.began >= begins) {
            let done = running.burst.work.saturating_sub(running.left / 1_000);
            self.figures.delivered += done as f64;
        }
    }

    /// A pod computes no more where it runs.
    fn leave(&mut self, pod: usize, now: Ms) {
        for gpu in self.devices_of(pod) {
            self.advance(gpu, now);
            if self.devices[gpu].busy.remove(&pod) {
                self.pace(gpu, now);
            }
        }
    }

    fn devices_of(&self, pod: usize) -> Vec<usize> {
        self.live
            .get(&pod)
            .map(|live| live.on.iter().map(|(gpu, _)| *gpu).collect())
            .unwrap_or_default()
    }

    /// What is computed on a GPU until now: those who are busy take equal turns.
    fn advance(&mut self, gpu: usize, now: Ms) {
        let device = &mut self.devices[gpu];
        let turns = u64::try_from(device.busy.len()).expect("few").max(1);
        let each = (now - device.advanced) * 1_000 / turns;
        device.advanced = now;
        for pod in &device.busy {
            let running = self.live.get_mut(pod).and_then(|live| live.running.as_mut());
            if let Some(running) = running.filter(|running| running.left < u64::MAX) {
                running.left = running.left.saturating_sub(each);
            }
        }
    }

    /// When each who is busy on a GPU will be done, if nothing changes there.
    fn pace(&mut self, gpu: usize, now: Ms) {
        let busy = &self.devices[gpu].busy;
        let turns = u64::try_from(busy.len()).expect("few");
        let mut due = Vec::new();
        for pod in busy {
            let Some(live) = self.live.get_mut(pod) else { continue };
            live.speeds += 1;
            let left = live.running.as_ref().map(|running| running.left);
            if let Some(left) = left.filter(|left| *left < u64::MAX) {
                due.push((
                    now + (left * turns).div_ceil(1_000),
                    BurstEvent::Done(*pod, live.speeds),
                ));
            }
        }
        due.into_iter().for_each(|(at, event)| self.push(at, event));
    }

    fn report(&mut self, node: usize, now: Ms) {
        let report = &mut self.reports[node];
        for seen in &mut report.uses {
            let gpu = self.gpus[&seen.id];
            let device = &self.devices[gpu];
            let outside =
                seen.processes.iter().flatten().filter(|process| process.pod.is_none()).cloned();
            let own = device.tenants.iter().filter_map(|pod| {
                let live = self.live.get(pod)?;
                let memory = live.uses(gpu).filter(|parts| *parts > 0)?;
                let memory = MemMib::new(memory * device.mib / device.parts.max(1));
                Some(ProcessUse { pod: Some(live.uid.clone()), memory: Some(memory) })
            });
            let processes: Vec<ProcessUse> = outside.chain(own).collect();
            let used = processes.iter().filter_map(|process| process.memory).map(MemMib::mib).sum();
            (seen.used, seen.processes) = (Some(MemMib::new(used)), Some(processes));
        }
        report.sequence += 1;
        let taken = self.ledger.report(&report.agent, report, Timestamp::from_millis(now));
        taken.expect("the agent reports in its session and sends no inventory");
    }

    /// Accounts for what was allocated until now.
    fn account_allocated(&mut self, now: Ms) {
        let begins = self.window.0;
        let time = now.max(begins) - self.allocated_since.max(begins);
        let all = self.placeable as f64;
        self.figures.time += time as f64 * all;
        self.figures.allocated += time as f64 * self.allocated as f64 / 1e6;
        self.allocated_since = now;
    }

    fn close(mut self, end: Ms) -> BurstFigures {
        self.account_allocated(end);
        for gpu in 0..self.devices.len() {
            self.advance(gpu, end);
        }
        for (pod, live) in std::mem::take(&mut self.live) {
            self.account(self.comers[pod].kind, &live, end);
        }
        let late = self.waiting.iter().filter(|pod| {
            let comer = &self.comers[**pod];
            comer.kind == BurstKind::Whole && self.is_measured(comer.comes)
        });
        self.figures.whole_waited += late.count() as u64;
        self.figures
    }
}

/// Pods are named by their number.
fn number(uid: &PodUid) -> usize {
    uid.as_str().parse().expect("pods are named by their number")
}

#[cfg(test)]
mod tests;
