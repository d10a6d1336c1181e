//! What a run is like: which kinds of faults it has, and how long and large it is.

use std::collections::BTreeSet;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::MOST_REPLICAS;
use super::faults::Fault;

/// Kinds of faults that do harm together.
const THEMES: [&[Fault]; 3] = [
    // Writes, while processes come and go.
    &[
        Fault::Crash,
        Fault::Overlap,
        Fault::Freeze,
        Fault::Stop,
        Fault::Loss,
        Fault::Delay,
        Fault::Denial,
        Fault::Conflict,
        Fault::Force,
        Fault::SchedulerRestart,
    ],
    // What agents say of nodes.
    &[
        Fault::Crash,
        Fault::Overlap,
        Fault::Silence,
        Fault::AgentRestart,
        Fault::SecondAgent,
        Fault::ReportLoss,
        Fault::ReportDelay,
        Fault::PartialReport,
        Fault::Replacement,
        Fault::SlowPlugin,
        Fault::Force,
    ],
    // What watches and kube-schedulers know.
    &[
        Fault::Lag,
        Fault::Relist,
        Fault::StuckWatch,
        Fault::SchedulerRestart,
        Fault::SecondScheduler,
        Fault::GiveUp,
        Fault::SlowPlugin,
        Fault::Trial,
        Fault::Overload,
        Fault::Conflict,
        Fault::Force,
    ],
];

/// Kinds of its theme that a focused run has.
const OF_THEME: usize = 5;

/// How much more often they happen.
const RATES: [u32; 2] = [2, 4];

/// How long other faults last in a run in which a process breaks once, in ms.
const BREAKING_FOR: u64 = 10_000;

/// The same in a run in which a node that takes no pods tries some, in ms.
const TRIALS_FOR: u64 = 420_000;

/// Seeds of a test run.
const SEEDS: u64 = 60;

/// What a run is like. The seed decides what is not set here.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) seed: u64,
    pub(super) faults: BTreeSet<Fault>,
    pub(super) nodes: usize,
    /// Most pods at a time: about twice as many as fit.
    pub(super) pods: usize,
    /// Faults end after this time, in ms.
    pub(super) faults_for: u64,
    /// Whether faults are rare, and users do little: then no other change hides what a fault did.
    pub(super) is_calm: bool,
    /// Whether nothing else happens for a while after some rare faults, for the same reason.
    pub(super) has_rests: bool,
    /// How much more often faults happen. A *focused* run has few kinds of them, which belong together,
    /// so that rare ones meet.
    pub(super) rate: u32,
    /// Whether pods request either all of a GPU or little, and use less, and end late.
    pub(super) has_extremes: bool,
    /// Whether the operator lets gpupack evict pods for more important ones.
    pub(super) preempts: bool,
    /// Whether teams have shares.
    pub(super) has_teams: bool,
    /// Whether some pods have a class of workloads that protects them.
    pub(super) has_classes: bool,
    /// Whether pods borrow what is idle on their node.
    pub(super) has_guests: bool,
    /// Whether they borrow memory, too.
    pub(super) lends_memory: bool,
    /// Whether MPS limits the memory that they take.
    pub(super) limits_memory: bool,
    /// Whether the driver does, by limits that the agents set.
    pub(super) has_driver_limits: bool,
    /// Whether some pods are of groups that start together.
    pub(super) has_groups: bool,
    /// Whether pods take up to two minutes to end, hang for ever, and are made again at once.
    pub(super) has_slow_ends: bool,
    /// Whether the GPUs are in MIG mode, and instances are made on demand.
    pub(super) has_mig: bool,
    /// Whether their agents take over what others made when they start.
    pub(super) adopts: bool,
    /// Whether NVIDIA's tools upgrade drivers, and change GPUs.
    pub(super) has_upgrades: bool,
    /// Whether containers start without the driver.
    pub(super) has_blind_starts: bool,
    /// Replicas of the extender. A single one has no Lease.
    pub(super) replicas: usize,
    /// What breaks the process that serves, and right before which event.
    pub(super) breaks: Option<(Fault, u64)>,
}

/// How many replicas a seed has.
fn replicas_of(seed: u64) -> usize {
    [1, 2, 1, 3][usize::try_from(seed % 4).expect("small")]
}

/// Kinds of faults of one theme.
fn focused(rng: &mut ChaCha8Rng) -> BTreeSet<Fault> {
    let theme = THEMES.choose(rng).expect("some");
    theme.choose_multiple(rng, OF_THEME).copied().collect()
}

/// For how many milliseconds faults begin.
fn faults_for(has_slow_ends: bool, is_long: bool) -> u64 {
    match (has_slow_ends, is_long) {
        (true, _) => 240_000,
        (false, true) => 100_000,
        (false, false) => 30_000,
    }
}

impl Settings {
    /// A third of the seeds has all kinds of faults, the others about half of them; a third is calm.
    /// Some last so long that gpupack gives up waiting for the API server. A fifth is focused.
    pub(super) fn of(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x5EED);
        let has_all = seed.is_multiple_of(3);
        let chosen = |_: &&Fault| has_all || rng.random_range(0..2) == 0;
        let mut faults: BTreeSet<Fault> =
            Fault::WITHOUT_MIG.iter().filter(chosen).copied().collect();
        let is_focused = seed % 5 == 3;
        if is_focused {
            faults = focused(&mut rng);
        }
        let replicas = replicas_of(seed);
        if replicas > 1 {
            // A follower that starts believes what it sees: the shipped policies forbid edits.
            faults.remove(&Fault::Edit);
        }
        let has_mig = matches!(seed % 25, 4 | 11 | 23);
        if has_mig {
            // One agent of a node makes instances, and says which devices are its own.
            faults.retain(|kind| !matches!(kind, Fault::Lie | Fault::SecondAgent));
            let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x316);
            let chosen = |_: &&Fault| has_all || rng.random_range(0..2) == 0;
            faults.extend(Fault::OF_MIG.iter().filter(chosen));
        }
        let has_driver_limits = matches!(seed % 100, 7 | 37 | 67);
        if has_driver_limits {
            // One agent of a node sets limits.
            faults.retain(|kind| !matches!(kind, Fault::Lie | Fault::SecondAgent));
        }
        let has_upgrades = matches!(seed % 25, 9 | 14);
        if has_upgrades {
            let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0xD21);
            let chosen = |_: &&Fault| has_all || rng.random_range(0..4) > 0;
            faults.extend(Fault::OF_UPGRADES.iter().filter(chosen));
        }
        let has_blind_starts = matches!(seed % 25, 10 | 24);
        if has_blind_starts {
            // Which agent is the newest decides whether its node takes pods.
            faults.retain(|kind| !matches!(kind, Fault::Lie | Fault::SecondAgent));
            faults.insert(Fault::BlindStarts);
        }
        // Until a trial, and two of them after another.
        let has_trials = seed % 50 == 35;
        let has_slow_ends = seed % 10 == 6 && !has_mig;
        if has_slow_ends {
            // Whether kept room is used shows only where little else fails.
            faults.retain(|kind| *kind == Fault::Cordon || seed % 30 == 6);
        }
        let is_long = seed % 8 == 5 || is_focused && faults.contains(&Fault::Denial);
        // Instances are made, and containers restarted, only if not too much fails.
        let is_calm = seed % 3 == 1 && !is_focused;
        let has_rests = seed / 4 % 2 == 1;
        Self {
            preempts: seed.is_multiple_of(2),
            has_teams: seed % 4 == 2 && !has_mig,
            has_classes: seed % 6 == 4,
            has_groups: seed % 10 == 7 || has_slow_ends && seed % 20 == 16,
            has_slow_ends,
            has_guests: seed % 5 == 2,
            lends_memory: matches!(seed % 25, 7 | 12 | 17),
            has_mig,
            adopts: has_mig && seed / 50 % 3 == 2,
            limits_memory: matches!(seed % 50, 32 | 37 | 42) && !has_driver_limits,
            has_driver_limits,
            has_upgrades,
            has_blind_starts,
            seed,
            faults,
            nodes: if has_trials { 2 } else { 4 },
            pods: if has_trials { 8 } else { 30 },
            faults_for: if has_trials { TRIALS_FOR } else { faults_for(has_slow_ends, is_long) },
            is_calm,
            has_rests,
            rate: if is_focused { *RATES.choose(&mut rng).expect("some") } else { 1 },
            has_extremes: is_focused && rng.random_range(0..2) == 0,
            replicas,
            breaks: None,
        }
    }

    /// A short run of a seed, in which processes end and freeze only once.
    pub(super) fn breaking(seed: u64, breaks: Option<(Fault, u64)>) -> Self {
        let mut settings = Self { faults_for: BREAKING_FOR, breaks, ..Self::of(seed) };
        settings.faults.retain(|kind| !Fault::OF_PROCESS.contains(kind));
        settings
    }

    /// How to run it again.
    pub(super) fn command(&self) -> String {
        let without: Vec<String> = Fault::ALL
            .iter()
            .filter(|kind| !self.faults.contains(kind))
            .map(|kind| format!("{kind:?}"))
            .collect();
        let Self { seed, nodes, pods, faults_for, replicas, .. } = self;
        let breaks = self.breaks.map(|(kind, event)| format!("SIM_BREAKS={kind:?}:{event} "));
        let breaks = breaks.unwrap_or_default();
        format!(
            "{breaks}SIM_SEED={seed} SIM_WITHOUT={} SIM_NODES={nodes} SIM_PODS={pods} SIM_FAULTS_MS={faults_for} \
             SIM_REPLICAS={replicas} \
             cargo test --test integration simulation::the",
            without.join(",")
        )
    }
}

/// The value of an environment variable.
#[expect(clippy::disallowed_methods, reason = "a test has no flags")]
pub(super) fn text(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

pub(super) fn number(name: &str) -> Option<u64> {
    text(name).map(|text| text.parse().expect("a number"))
}

/// Whether a run is of the kind that the environment requests, if it names one.
pub(super) fn of_kind() -> impl Fn(&Settings) -> bool {
    let only = text("SIM_ONLY");
    move |settings| match only.as_deref() {
        Some("lent") => settings.lends_memory,
        Some("limits") => settings.has_driver_limits,
        Some("mig") => settings.has_mig,
        Some("slow_ends") => settings.has_slow_ends,
        Some("blind") => settings.has_blind_starts,
        Some("upgrades") => settings.has_upgrades,
        Some(other) => {
            panic!("SIM_ONLY is lent, limits, mig, slow_ends, upgrades or blind, not {other}")
        }
        None => true,
    }
}

/// The runs that the environment requests.
pub(super) fn chosen() -> impl Iterator<Item = Settings> {
    let first = number("SIM_SEED").or_else(|| number("SIM_FROM")).unwrap_or(0);
    let count = if text("SIM_SEED").is_some() { 1 } else { number("SIM_SEEDS").unwrap_or(SEEDS) };
    let size = |name| number(name).map(|number| usize::try_from(number).expect("a small number"));
    let all = (first..first + count).map(Settings::of);
    all.filter(of_kind()).map(move |mut settings| {
        if let Some(without) = text("SIM_WITHOUT") {
            let without: Vec<&str> = without.split(',').collect();
            let named = |kind: &&Fault| !without.contains(&format!("{kind:?}").as_str());
            settings.faults = Fault::ALL.iter().filter(named).copied().collect();
        }
        settings.nodes = size("SIM_NODES").unwrap_or(settings.nodes);
        settings.pods = size("SIM_PODS").unwrap_or(settings.pods);
        settings.replicas = size("SIM_REPLICAS").unwrap_or(settings.replicas).min(MOST_REPLICAS);
        if settings.replicas > 1 {
            settings.faults.remove(&Fault::Edit);
        }
        settings.faults_for = number("SIM_FAULTS_MS").unwrap_or(settings.faults_for);
        settings.breaks = text("SIM_BREAKS").map(|text| {
            let (kind, event) = text.split_once(':').expect("a kind of fault, and an event");
            let kind = Fault::OF_PROCESS.into_iter().find(|it| format!("{it:?}") == kind);
            (kind.expect("a fault of processes"), event.parse().expect("a number"))
        });
        settings
    })
}
