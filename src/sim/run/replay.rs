//! Replays a workload on the ledger of a simulated cluster: one event loop for arrivals alone, for
//! the trace's own times and for churn.
//!
//! Pods come one at a time. One that no node fits is lost, or waits. Each time that a pod ends, the
//! waiting pods are tried on its node, by priority, then the oldest first. They do not fit on the
//! others, as they did not before. A pod that ends makes room for pods that come at the same time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use crate::run::cluster::{Seat, SimCluster};
use crate::run::curve::Curve;
use crate::run::policy::SimPolicy;
use crate::run::queue::WaitingLines;
use crate::run::service::{Account, ClassFigures, Moment, NewPod, PodClass};
use crate::trace::read::TracePod;
use crate::trace::schedule::{PodArrival, Schedule, TimeUnit, TimedWorkload};
use crate::trace::workload::Workload;
use engine::ledger::change::reports::ReportRefusal;
use wire::units::Share;

/// Load in percent before which a lost pod is the policy's fault, not the cluster's.
const EARLY_LOAD: u64 = 90;

/// Load at which policies are compared, in percent.
const FULL_LOAD: u64 = 100;

/// Result of one replay of arrivals under one policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The name of the policy.
    pub policy: &'static str,
    /// The seed of the workload, and of what policies draw.
    pub seed: i64,
    pub arrivals: u64,
    /// Pods that no node fitted.
    pub lost: u64,
    /// Of those, the ones lost while less than 90 % of the cluster's GPUs had been requested.
    pub lost_before_90: u64,
    /// The first lost arrival, counted from zero.
    pub first_lost: Option<usize>,
    /// Moves of running pods that made room for others.
    pub moves: u64,
    pub curve: Curve,
    /// State of the cluster each time the load reached another whole percent.
    pub samples: Vec<Sample>,
    /// State of the cluster after the last arrival.
    pub end: Sample,
    /// What was stranded at 100 % arrived load, or at the end if the load ends before.
    pub stranded: Stranded,
}

/// State of the cluster after an arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// The load that had arrived, in whole percent of the cluster's GPUs, rounded down.
    pub load_percent: u64,
    /// Fragmentation ratio of the free room, against the mix of the whole trace.
    pub fragmentation: Share,
    pub efficiency: Share,
    pub empty_gpus: u64,
}

/// How many GPUs have how much free share that typical requests cannot use: by that share in
/// thousandths of a GPU, rounded down.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stranded(pub BTreeMap<u64, u64>);

/// Result of one replay with times under one policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimedRun {
    /// The name of the policy.
    pub policy: &'static str,
    /// The seed of the schedule, and of what policies draw.
    pub seed: i64,
    pub unit: TimeUnit,
    /// The GPUs of the cluster, in thousandths.
    pub capacity_milli: u64,
    /// The figures of all pods.
    pub all: ClassFigures,
    pub by_class: [(PodClass, ClassFigures); 4],
    /// Moves of running pods that made room for others, warm-up included.
    pub moves: u64,
    /// The cluster over time, warm-up included.
    pub moments: Vec<Moment>,
    /// Position of the first one that is measured.
    pub first_measured: usize,
    /// What was stranded at the end.
    pub stranded: Stranded,
}

/// What happens to a pod that no node fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overflow {
    /// It is lost and not tried again.
    Lost,
    /// It waits until a node has room.
    Queued,
}

impl Run {
    /// Fragmentation ratio at 100 % arrived load; `None` if the load ends before.
    #[must_use]
    pub fn fragmentation_at_100(&self) -> Option<Share> {
        self.samples.iter().find(|sample| sample.load_percent >= FULL_LOAD).map(|s| s.fragmentation)
    }
}

impl Stranded {
    fn of(cluster: &SimCluster) -> Self {
        let mut gpus = BTreeMap::new();
        for share in cluster.stranded() {
            *gpus.entry(share.millionths() / 1000).or_default() += 1;
        }
        Self(gpus)
    }

    /// The GPUs of both.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        for (milli, gpus) in &other.0 {
            *self.0.entry(*milli).or_default() += gpus;
        }
        self
    }

    /// For each amount in thousandths of a GPU that occurs: how many GPUs have at most that
    /// stranded.
    #[must_use]
    pub fn cumulative(&self) -> Vec<(u64, u64)> {
        let mut gpus = 0;
        let sums = self.0.iter().map(|(milli, count)| {
            gpus += count;
            (*milli, gpus)
        });
        sums.collect()
    }
}

/// Replays the arrivals of `workload` under `policy`. No pod ends. A pod that no node fits is lost,
/// unless at most `most_moves` moves of running pods make room for it. After every arrival
/// `progress` is called with their number.
///
/// # Errors
/// [`ReportRefusal::Inventory`] for a node with more GPUs than a node can have.
pub fn replay(
    workload: &Workload,
    policy: SimPolicy,
    seed: i64,
    most_moves: usize,
    progress: impl FnMut(usize),
) -> Result<Run, ReportRefusal> {
    let cluster = SimCluster::new(&workload.nodes, &workload.population, policy, seed, most_moves)?;
    let curve = Curve::new(workload.capacity_milli());
    let end = sample(&cluster, &curve);
    let run = Run {
        policy: policy.name,
        seed,
        arrivals: 0,
        lost: 0,
        lost_before_90: 0,
        first_lost: None,
        moves: 0,
        curve,
        samples: vec![end],
        end,
        stranded: Stranded::default(),
    };
    let schedule = Schedule::in_order(workload.arrivals.len());
    let pods = &workload.arrivals;
    let mut replay = Replay::new(cluster, pods, &schedule, Overflow::Lost, run);
    replay.play(progress);
    let (cluster, mut run) = (replay.cluster, replay.watcher);
    run.end = sample(&cluster, &run.curve);
    run.moves = cluster.moves();
    if run.stranded == Stranded::default() {
        run.stranded = Stranded::of(&cluster);
    }
    Ok(run)
}

/// What is done in a replay with times for a pod that no node fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplayRules {
    pub overflow: Overflow,
    /// Most moves of running pods that make room for it.
    pub most_moves: usize,
    /// How long the first of the waiting pods waits, in ticks, until room is kept for it (a standing
    /// hold); `None`: none ever is.
    pub standing_after: Option<u64>,
}

/// Replays `workload` at its times under `policy` and `rules`. After every arrival `progress` is
/// called with their number.
///
/// # Errors
/// [`ReportRefusal::Inventory`] for a node with more GPUs than a node can have.
pub fn replay_timed(
    workload: &TimedWorkload,
    policy: SimPolicy,
    seed: i64,
    rules: ReplayRules,
    progress: impl FnMut(usize),
) -> Result<TimedRun, ReportRefusal> {
    let TimedWorkload { nodes, pods, schedule } = workload;
    let cluster = SimCluster::new(nodes, pods, policy, seed, rules.most_moves)?;
    let account = Account::new(schedule.window.clone());
    let mut replay = Replay::new(cluster, pods, schedule, rules.overflow, account);
    replay.standing_after = rules.standing_after;
    replay.play(progress);
    let waiting = replay.queue.all().map(|arrival| {
        let arrival = schedule.arrivals[arrival];
        (&pods[arrival.pod], arrival.at)
    });
    let closed = replay.watcher.close(&replay.cluster, waiting);
    let early = closed.moments.iter().take_while(|moment| moment.at < schedule.window.start);
    Ok(TimedRun {
        policy: policy.name,
        seed,
        unit: schedule.unit,
        capacity_milli: replay.cluster.capacity_milli(),
        all: closed.all,
        by_class: closed.by_class,
        moves: replay.cluster.moves(),
        first_measured: early.count(),
        moments: closed.moments,
        stranded: Stranded::of(&replay.cluster),
    })
}

/// Keeps the figures of a replay. Each call reports what has just happened.
trait Watcher {
    /// Time moves on to `now`.
    fn pass(&mut self, _now: u64, _cluster: &SimCluster) {}
    /// A pod came; it was placed, or not.
    fn arrive(&mut self, new: NewPod<'_>, cluster: &SimCluster);
    /// A pod that came at `since` was placed.
    fn start(&mut self, _pod: &TracePod, _since: u64, _seat: Seat) {}
    /// A pod that was placed there ended.
    fn end(&mut self, _pod: &TracePod, _seat: Seat) {}
    /// A pod begins to wait.
    fn wait(&mut self, _pod: &TracePod) {}
    /// A pod waits no longer.
    fn wait_over(&mut self, _pod: &TracePod) {}
}

/// A replay in progress.
struct Replay<'w, W> {
    cluster: SimCluster,
    pods: &'w [TracePod],
    schedule: &'w Schedule,
    overflow: Overflow,
    watcher: W,
    /// The pods that will end, the next one on top: time, arrival, seat.
    ends: BinaryHeap<Reverse<(u64, usize, Seat)>>,
    queue: WaitingLines,
    /// How long a pod waits until room is kept for it; `None`: none ever is.
    standing_after: Option<u64>,
    /// The waiting pod for which room is kept.
    head: Option<(usize, usize)>,
}

impl<'w, W: Watcher> Replay<'w, W> {
    fn new(
        cluster: SimCluster,
        pods: &'w [TracePod],
        schedule: &'w Schedule,
        overflow: Overflow,
        watcher: W,
    ) -> Self {
        let queue = WaitingLines::new(if overflow == Overflow::Queued { pods } else { &[] });
        let (ends, standing_after, head) = (BinaryHeap::new(), None, None);
        Self { cluster, pods, schedule, overflow, watcher, ends, queue, standing_after, head }
    }

    fn play(&mut self, mut progress: impl FnMut(usize)) {
        for (index, arrival) in self.schedule.arrivals.iter().enumerate() {
            self.end_until(arrival.at);
            self.watcher.pass(arrival.at, &self.cluster);
            self.arrive(index, *arrival);
            progress(index + 1);
        }
        self.end_until(self.schedule.window.end);
    }

    fn arrive(&mut self, index: usize, arrival: PodArrival) {
        let pod = &self.pods[arrival.pod];
        self.cluster.meet(index, pod);
        let is_hopeless = self.overflow == Overflow::Queued && self.queue.has_equal(arrival.pod);
        let seat = if is_hopeless { None } else { self.cluster.place(index, pod) };
        let new = NewPod { pod, stays: arrival.stays, is_placed: seat.is_some() };
        self.watcher.arrive(new, &self.cluster);
        match (seat, self.overflow) {
            (Some(seat), _) => self.start(index, seat, arrival.at),
            (None, Overflow::Lost) => {}
            (None, Overflow::Queued) => {
                self.queue.join(index, arrival.pod);
                self.watcher.wait(pod);
            }
        }
    }

    fn start(&mut self, index: usize, seat: Seat, now: u64) {
        let arrival = self.schedule.arrivals[index];
        self.watcher.start(&self.pods[arrival.pod], arrival.at, seat);
        if let Some(end) = arrival.stays.and_then(|stays| now.checked_add(stays)) {
            self.ends.push(Reverse((end, index, seat)));
        }
    }

    /// Ends the pods that end up to `now`, and gives their room to waiting pods.
    fn end_until(&mut self, now: u64) {
        while let Some(Reverse((at, index, seat))) = self.next_end(now) {
            self.watcher.pass(at, &self.cluster);
            let node = self.cluster.end(index, seat);
            self.watcher.end(&self.pods[self.schedule.arrivals[index].pod], seat);
            self.fill(node, at);
            self.stand(node, at);
        }
    }

    /// Keeps what becomes free for the first of the waiting pods, by priority and then by age, that has
    /// waited long enough.
    fn stand(&mut self, changed: usize, now: u64) {
        let Some(after) = self.standing_after else { return };
        loop {
            let fronts = self.queue.fronts();
            let is_new = !fronts.iter().any(|(_, index, line)| Some((*index, *line)) == self.head);
            if is_new {
                let arrivals = &self.schedule.arrivals;
                let next = fronts.iter().find(|(_, index, _)| now - arrivals[*index].at >= after);
                self.head = next.map(|(_, index, line)| (*index, *line));
            }
            let Some((index, line)) = self.head else { return };
            let pod = &self.pods[self.schedule.arrivals[index].pod];
            let Some(seat) = self.cluster.stand(index, pod, (!is_new).then_some(changed)) else {
                return;
            };
            self.head = None;
            self.watcher.wait_over(pod);
            self.start(index, seat, now);
            self.queue.leave(line);
            self.fill(seat.node, now);
        }
    }

    fn next_end(&mut self, now: u64) -> Option<Reverse<(u64, usize, Seat)>> {
        let is_due = self.ends.peek().is_some_and(|Reverse((at, ..))| *at <= now);
        if is_due { self.ends.pop() } else { None }
    }

    /// Gives the room of a node to waiting pods, by priority, then the oldest first. A kind of pod
    /// that does not fit once does not fit later either: each placement only takes room.
    fn fill(&mut self, node: usize, now: u64) {
        let mut fronts = self.queue.fronts();
        while let Some((_, index, line)) = fronts.pop_first() {
            let pod = &self.pods[self.schedule.arrivals[index].pod];
            let Some(seat) = self.cluster.place_on(node, index, pod) else { continue };
            self.watcher.wait_over(pod);
            self.start(index, seat, now);
            fronts.extend(self.queue.leave(line));
        }
    }
}

impl Watcher for Run {
    fn arrive(&mut self, new: NewPod<'_>, cluster: &SimCluster) {
        let NewPod { pod, is_placed, .. } = new;
        let before = self.curve.percent_arrived();
        self.curve.arrive(pod.demand_milli(), cluster.used_milli());
        let now = self.curve.percent_arrived();
        if !is_placed && self.first_lost.is_none() {
            self.first_lost = usize::try_from(self.arrivals).ok();
        }
        self.arrivals += 1;
        self.lost += u64::from(!is_placed);
        self.lost_before_90 += u64::from(!is_placed && now < EARLY_LOAD);
        if now > before {
            self.samples.push(sample(cluster, &self.curve));
        }
        if before < FULL_LOAD && now >= FULL_LOAD {
            self.stranded = Stranded::of(cluster);
        }
    }
}

impl Watcher for Account {
    fn pass(&mut self, now: u64, cluster: &SimCluster) {
        self.pass(now, cluster);
    }

    fn arrive(&mut self, new: NewPod<'_>, _cluster: &SimCluster) {
        self.arrive(new);
    }

    fn start(&mut self, pod: &TracePod, since: u64, seat: Seat) {
        self.start(pod, since, seat.micro);
    }

    fn end(&mut self, pod: &TracePod, seat: Seat) {
        self.end(pod, seat.micro);
    }

    fn wait(&mut self, pod: &TracePod) {
        self.wait(pod);
    }

    fn wait_over(&mut self, pod: &TracePod) {
        self.wait_over(pod);
    }
}

fn sample(cluster: &SimCluster, curve: &Curve) -> Sample {
    let packing = cluster.packing();
    Sample {
        load_percent: curve.percent_arrived(),
        fragmentation: packing.fragmentation(),
        efficiency: packing.efficiency(),
        empty_gpus: packing.devices - packing.occupied,
    }
}

#[cfg(test)]
mod tests;
