//! What pods got in a replay with times: allocated, refused and waited for, in total and by class
//! of pod, and the state of the cluster over time.
//!
//! Sums are exact: amounts times ticks. A share is formed only for the result.

use std::ops::Range;

use crate::run::cluster::SimCluster;
use crate::trace::read::TracePod;
use wire::units::Share;

/// How often the state of the cluster is noted, evenly over the run.
const SAMPLES: u64 = 80;

/// Pods by the GPUs that they take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PodClass {
    CpuOnly,
    Fraction,
    Whole,
    Several,
}

impl PodClass {
    /// All classes.
    pub const ALL: [Self; 4] = [Self::CpuOnly, Self::Fraction, Self::Whole, Self::Several];

    /// The class of a pod.
    #[must_use]
    pub fn of(pod: &TracePod) -> Self {
        match (pod.num_gpu, pod.gpu_milli) {
            (0, _) => Self::CpuOnly,
            (1, ..1000) => Self::Fraction,
            (1, 1000..) => Self::Whole,
            (2.., _) => Self::Several,
        }
    }

    /// Its name, in tables and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CpuOnly => "cpu_only",
            Self::Fraction => "fraction",
            Self::Whole => "whole",
            Self::Several => "several",
        }
    }
}

/// Figures of the pods of one class, or of all pods, that came while it was measured.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClassFigures {
    pub arrivals: u64,
    /// What they requested, in thousandths of a GPU.
    pub demand_milli: u64,
    /// Pods that no node fitted when they came. They were lost or had to wait.
    pub blocked: u64,
    /// What those requested, in thousandths of a GPU.
    pub blocked_milli: u64,
    /// GPU time that all pods requested: thousandths of a GPU times the ticks that they stay. A pod that
    /// never ends counts up to the end of the measured time.
    pub demand_milli_ticks: u128,
    /// GPU time that blocked pods requested, likewise.
    pub blocked_milli_ticks: u128,
    /// GPU share that they had, the mean over time, as a share of all GPUs.
    pub allocation: Share,
    /// GPU share waited for, likewise.
    pub waiting: Share,
    /// Pods that waited when the run ended.
    pub still_waiting: u64,
    /// How long pods waited, in ticks; for pods that still wait, how long so far.
    pub waits: Waits,
}

impl ClassFigures {
    /// GPU time that blocked pods requested, as a share of what all pods requested.
    #[must_use]
    pub fn blocked_time(&self) -> Share {
        share(self.blocked_milli_ticks, self.demand_milli_ticks)
    }
}

/// Percentiles of waiting times by nearest rank, in ticks. A pod that does not wait counts as 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waits {
    pub p50: u64,
    /// Nine of ten wait no longer.
    pub p90: u64,
    /// 99 of 100 wait no longer.
    pub p99: u64,
    /// The longest.
    pub max: u64,
}

/// The state of the cluster at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    pub at: u64,
    /// Share of all GPUs that is allocated.
    pub allocation: Share,
    /// GPU share that pods wait for, as a share of all GPUs.
    pub waiting: Share,
    /// Fragmentation ratio of the free room, against the mix of the whole trace.
    pub fragmentation: Share,
    pub efficiency: Share,
    /// What is free on nodes that have as many wholly free GPUs as the largest pod requests, as a share of all GPUs.
    pub room_for_largest: Share,
}

/// A pod that has just come.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewPod<'p> {
    pub(crate) pod: &'p TracePod,
    /// How long it runs once it is placed, in ticks; `None` if it never ends.
    pub(crate) stays: Option<u64>,
    pub(crate) is_placed: bool,
}

/// The running sums of a replay.
pub(crate) struct Account {
    window: Range<u64>,
    now: u64,
    next_sample: u64,
    classes: [ClassAccount; 4],
    moments: Vec<Moment>,
}

#[derive(Default)]
struct ClassAccount {
    figures: ClassFigures,
    held_micro: u64,
    waiting_milli: u64,
    held_sum: u128,
    waiting_sum: u128,
    waits: Vec<u64>,
}

/// The result of [`Account::close`].
pub(crate) struct Closed {
    pub(crate) all: ClassFigures,
    pub(crate) by_class: [(PodClass, ClassFigures); 4],
    pub(crate) moments: Vec<Moment>,
}

impl Account {
    pub(crate) fn new(window: Range<u64>) -> Self {
        Self { window, now: 0, next_sample: 0, classes: Default::default(), moments: Vec::new() }
    }

    /// Time moves on to `now`; nothing has changed meanwhile.
    pub(crate) fn pass(&mut self, now: u64, cluster: &SimCluster) {
        while self.next_sample <= now.min(self.window.end) {
            self.moments.push(self.moment(cluster));
            // Each again from the whole, so that rounding does not add up.
            let seen = u128::try_from(self.moments.len()).unwrap_or(u128::MAX);
            let next = u128::from(self.window.end) * seen / u128::from(SAMPLES);
            self.next_sample = u64::try_from(next).unwrap_or(u64::MAX).max(self.next_sample + 1);
        }
        let from = self.now.max(self.window.start);
        let ticks = u128::from(now.min(self.window.end).saturating_sub(from));
        for class in &mut self.classes {
            class.held_sum += u128::from(class.held_micro) * ticks;
            class.waiting_sum += u128::from(class.waiting_milli) * ticks;
        }
        self.now = now;
    }

    fn moment(&self, cluster: &SimCluster) -> Moment {
        let packing = cluster.packing();
        let waiting: u64 = self.classes.iter().map(|class| class.waiting_milli).sum();
        let capacity = u128::from(cluster.capacity_milli());
        Moment {
            at: self.next_sample,
            allocation: packing.allocation(),
            waiting: share(u128::from(waiting), capacity),
            fragmentation: packing.fragmentation(),
            efficiency: packing.efficiency(),
            room_for_largest: share(cluster.room_for_largest_milli().into(), capacity),
        }
    }

    /// A pod came just now.
    pub(crate) fn arrive(&mut self, new: NewPod<'_>) {
        if !self.window.contains(&self.now) {
            return;
        }
        let demand = new.pod.demand_milli();
        let ticks = new.stays.unwrap_or(self.window.end - self.now);
        let time = u128::from(demand) * u128::from(ticks);
        let figures = &mut self.class(new.pod).figures;
        figures.arrivals += 1;
        figures.demand_milli += demand;
        figures.demand_milli_ticks += time;
        if !new.is_placed {
            figures.blocked += 1;
            figures.blocked_milli += demand;
            figures.blocked_milli_ticks += time;
        }
    }

    /// A pod that came at `since` was placed just now, and holds `micro` millionths of a GPU.
    pub(crate) fn start(&mut self, pod: &TracePod, since: u64, micro: u64) {
        let (now, is_counted) = (self.now, self.window.contains(&since));
        let class = self.class(pod);
        class.held_micro += micro;
        if is_counted {
            class.waits.push(now - since);
        }
    }

    /// A pod that held so much ended just now.
    pub(crate) fn end(&mut self, pod: &TracePod, micro: u64) {
        self.class(pod).held_micro -= micro;
    }

    /// A pod begins to wait.
    pub(crate) fn wait(&mut self, pod: &TracePod) {
        self.class(pod).waiting_milli += pod.demand_milli();
    }

    /// A pod waits no longer.
    pub(crate) fn wait_over(&mut self, pod: &TracePod) {
        self.class(pod).waiting_milli -= pod.demand_milli();
    }

    fn class(&mut self, pod: &TracePod) -> &mut ClassAccount {
        let class = PodClass::of(pod);
        let [cpu_only, fraction, whole, several] = &mut self.classes;
        match class {
            PodClass::CpuOnly => cpu_only,
            PodClass::Fraction => fraction,
            PodClass::Whole => whole,
            PodClass::Several => several,
        }
    }

    /// The figures, at the end of the window. `waiting` are the pods that still wait, with the time
    /// at which they came.
    pub(crate) fn close<'p>(
        mut self,
        cluster: &SimCluster,
        waiting: impl Iterator<Item = (&'p TracePod, u64)>,
    ) -> Closed {
        self.pass(self.window.end, cluster);
        let window = self.window.clone();
        for (pod, since) in waiting.filter(|(_, since)| window.contains(since)) {
            let end = window.end;
            let class = self.class(pod);
            class.figures.still_waiting += 1;
            class.waits.push(end - since);
        }
        let span = u128::from(self.window.end - self.window.start);
        let whole = u128::from(cluster.capacity_milli()) * span;
        let mut all = ClassAccount::default();
        for class in &mut self.classes {
            all.add(class);
        }
        let [cpu_only, fraction, whole_gpu, several] = self.classes;
        let by_class = [
            (PodClass::CpuOnly, cpu_only),
            (PodClass::Fraction, fraction),
            (PodClass::Whole, whole_gpu),
            (PodClass::Several, several),
        ];
        Closed {
            all: all.close(whole),
            by_class: by_class.map(|(class, account)| (class, account.close(whole))),
            moments: self.moments,
        }
    }
}

impl ClassAccount {
    fn add(&mut self, class: &Self) {
        let (sum, part) = (&mut self.figures, &class.figures);
        sum.arrivals += part.arrivals;
        sum.demand_milli += part.demand_milli;
        sum.blocked += part.blocked;
        sum.blocked_milli += part.blocked_milli;
        sum.demand_milli_ticks += part.demand_milli_ticks;
        sum.blocked_milli_ticks += part.blocked_milli_ticks;
        sum.still_waiting += part.still_waiting;
        self.held_sum += class.held_sum;
        self.waiting_sum += class.waiting_sum;
        self.waits.extend(&class.waits);
    }

    fn close(mut self, whole: u128) -> ClassFigures {
        self.waits.sort_unstable();
        let [p50, p90, p99, max] = [50, 90, 99, 100].map(|percent| {
            let rank = (self.waits.len() * percent).div_ceil(100).saturating_sub(1);
            self.waits.get(rank).copied().unwrap_or(0)
        });
        let waits = Waits { p50, p90, p99, max };
        ClassFigures {
            allocation: share(self.held_sum, whole * 1000),
            waiting: share(self.waiting_sum, whole),
            waits,
            ..self.figures
        }
    }
}

fn share(part: u128, whole: u128) -> Share {
    let millionths = (part * 1_000_000).checked_div(whole).unwrap_or(0);
    Share::from_millionths(u64::try_from(millionths).unwrap_or(u64::MAX))
}
