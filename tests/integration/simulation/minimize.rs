//! Runs seeds, and makes a run that fails smaller.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::World;
use super::faults::Fault;
use super::settings::Settings;

/// What a run was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ran {
    pub(super) events: u64,
    /// Those before faults ended.
    pub(super) early: u64,
    /// Versions of bound pods.
    pub(super) bound: usize,
    /// Pods that were evicted for more important ones.
    pub(super) preempted: u64,
    /// Restarts to take memory back.
    pub(super) taken_back: usize,
    /// How many pods moved to other MIG instances.
    pub(super) moved: usize,
    /// A digest of everything that happened, if it was traced.
    pub(super) digest: u64,
}

impl Ran {
    pub(super) fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.early += other.early;
        self.bound += other.bound;
        self.preempted += other.preempted;
        self.taken_back += other.taken_back;
        self.moved += other.moved;
        self.digest = self.digest.wrapping_add(other.digest);
    }
}

impl fmt::Display for Ran {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { events, bound, preempted, taken_back, moved, .. } = self;
        write!(
            to,
            "{events} events, {bound} versions of bound pods, {preempted} evictions for more important ones, \
             {taken_back} restarts for memory, {moved} moves to other MIG instances"
        )
    }
}

/// Runs once. The error says which promise was broken, and after that the last events, if traced.
pub(super) fn run(settings: &Settings, is_traced: bool) -> Result<Ran, String> {
    let mut world = World::new(settings.clone(), is_traced);
    let ended = catch_unwind(AssertUnwindSafe(|| world.run()));
    let ended = ended.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("a panic: {}", text.unwrap_or_default()))
    });
    match ended {
        Ok(()) => Ok(world.ran()),
        Err(broken) => Err(format!(
            "seed {}, event {} at {} ms of {}: {broken}\n{}",
            settings.seed,
            world.events,
            world.now,
            world.ends(),
            Vec::from(world.trace).join("\n")
        )),
    }
}

/// Smaller runs that may still fail, those that leave most out first.
fn smaller(settings: &Settings) -> Vec<Settings> {
    let mut tries = Vec::new();
    if settings.faults_for > 4_000 {
        tries.push(Settings { faults_for: settings.faults_for / 2, ..settings.clone() });
        tries.push(Settings { faults_for: settings.faults_for * 3 / 4, ..settings.clone() });
    }
    if settings.nodes > 1 {
        tries.push(Settings { nodes: settings.nodes - 1, ..settings.clone() });
    }
    if settings.pods > 1 {
        tries.push(Settings { pods: settings.pods / 2, ..settings.clone() });
        tries.push(Settings { pods: settings.pods - 1, ..settings.clone() });
    }
    if settings.replicas > 2 {
        tries.push(Settings { replicas: 2, ..settings.clone() });
    }
    for kind in Fault::ALL.iter().filter(|kind| settings.faults.contains(kind)) {
        let mut without = settings.clone();
        without.faults.remove(kind);
        tries.push(without);
    }
    tries
}

/// The smallest run found that still fails, in at most this many runs.
pub(super) fn minimize(failing: &Settings, mut budget: u32) -> Settings {
    let mut smallest = failing.clone();
    'again: loop {
        for next in smaller(&smallest) {
            if budget == 0 {
                return smallest;
            }
            budget -= 1;
            if run(&next, false).is_err() {
                smallest = next;
                continue 'again;
            }
        }
        return smallest;
    }
}
