//! Plays worlds under several policies, each seed with the same requests.

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::ops::Range;

use cli::simulate::jobs::on_all_cores;

use crate::mig::bound::{filled, freely_repacked, least_blocked};
use crate::mig::mig_worlds::{MigStage, MigWorld};
use crate::mig::packing::MigPacking;
use crate::mig::play::{FullLoad, churn, fill};
use crate::mig::policy::MigPolicy;
use crate::mig::requests::{Arrivals, Request, requests};

/// When requests count, in mean lifetimes from the first arrival; its end is that of the run.
const MEASURED: Range<f64> = 4.0..25.0;

/// The same where the mix changes: what comes after that counts, for 15 mean lifetimes.
const CHANGED: Range<f64> = 15.0..30.0;

/// Arrivals without an end go on up to about this load, so that each policy refuses one.
const MOST_FILLED: f64 = 1.5;

/// What is compared.
#[derive(Clone, Debug)]
pub struct Comparing {
    /// What comes.
    pub worlds: Vec<MigWorld>,
    /// GPUs of each fleet.
    pub gpus: NonZeroUsize,
    /// Requests that come and end, at this load; `None` for requests that come only.
    pub load: Option<f64>,
    /// Seeds of the requests.
    pub seeds: Vec<u64>,
    /// The policies.
    pub policies: Vec<MigPolicy>,
    /// Whether bounds are computed: that takes longer than everything else.
    pub bounds: Bounds,
    /// Runs at a time; by default one per core.
    pub jobs: Option<NonZeroUsize>,
}

/// Whether bounds are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bounds {
    /// They are not.
    None,
    /// They are.
    All,
}

/// The figures of one world and seed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct MigRun {
    /// By policy: blocked demand in percent, or allocated units in percent of all.
    pub(crate) figures: Vec<f64>,
    /// By policy: the load of the first loss in percent; without an end only.
    pub(crate) first_losses: Vec<f64>,
    /// By policy: requests for which an instance was moved, in percent of the requests.
    pub(crate) moves: Vec<f64>,
    /// Bounds of the same figure, by name.
    pub(crate) bounds: Vec<(&'static str, f64)>,
}

/// Plays all worlds and seeds; the result is by world and seed.
pub(crate) fn runs(comparing: &Comparing) -> Vec<Vec<MigRun>> {
    let stages: Vec<MigStage> =
        comparing.worlds.iter().map(|world| MigStage::new(*world, comparing.gpus.get())).collect();
    let seeds = &comparing.seeds;
    let tasks: Vec<(&MigStage, u64)> =
        stages.iter().flat_map(|stage| seeds.iter().map(move |seed| (stage, *seed))).collect();
    let Ok(runs) = on_all_cores(&tasks, comparing.jobs, |(stage, seed)| -> Result<_, Infallible> {
        Ok(play(comparing, stage, *seed))
    });
    runs.chunks(seeds.len()).map(<[MigRun]>::to_vec).collect()
}

fn play(comparing: &Comparing, stage: &MigStage, seed: u64) -> MigRun {
    let packing = MigPacking::of(&stage.classes, &stage.gpus, &stage.kinds);
    let [first, second] = [0, 1].map(|half| {
        let weights = &stage.weights[half];
        let all: u32 = weights.iter().sum();
        let parts: Vec<f64> =
            weights.iter().map(|weight| f64::from(*weight) / f64::from(all)).collect();
        let units: f64 = packing.units().iter().zip(&parts).map(|(units, part)| units * part).sum();
        Half { weights: weights.as_slice(), full: packing.most_requests(&parts), units }
    });
    let Some(load) = comparing.load else {
        // one mean lifetime has load 1.0 on average
        let coming = requests(stage.world, seed, &[first.arrivals(1.0, MOST_FILLED)]);
        let full = FullLoad { requests: rounded(first.full), units: first.full * first.units };
        return filling(comparing, stage, &packing, &coming, full);
    };
    let is_change = matches!(stage.world, MigWorld::Change(..));
    let measured = if is_change { CHANGED } else { MEASURED };
    let stretches = match is_change {
        true => vec![first.arrivals(load, measured.start), second.arrivals(load, measured.end)],
        false => vec![first.arrivals(load, measured.end)],
    };
    let coming = requests(stage.world, seed, &stretches);
    churning(comparing, stage, &packing, &coming, &measured)
}

/// What comes in one half of a world.
struct Half<'a> {
    weights: &'a [u32],
    /// Requests of load 1.0.
    full: f64,
    /// Units of a request on average.
    units: f64,
}

impl<'a> Half<'a> {
    fn arrivals(&self, load: f64, until: f64) -> Arrivals<'a> {
        Arrivals { weights: self.weights, rate: load * self.full, until }
    }
}

fn filling(
    comparing: &Comparing,
    stage: &MigStage,
    packing: &MigPacking,
    coming: &[Request],
    full: FullLoad,
) -> MigRun {
    let all: f64 = stage.classes.iter().zip(&stage.gpus).fold(0.0, |all, (class, gpus)| {
        all + f64::from(class.layouts().geometry().axis) * *gpus as f64
    });
    let mut run = MigRun::default();
    for policy in &comparing.policies {
        let filled = fill(stage, coming, full, *policy);
        run.figures.push(100.0 * filled.units / all);
        run.first_losses.push(filled.first_loss);
    }
    if comparing.bounds == Bounds::All {
        run.bounds.push(("bound", 100.0 * filled(packing, coming, full.requests) / all));
    }
    run
}

fn churning(
    comparing: &Comparing,
    stage: &MigStage,
    packing: &MigPacking,
    coming: &[Request],
    measured: &Range<f64>,
) -> MigRun {
    let mut run = MigRun::default();
    for policy in &comparing.policies {
        let blocked = churn(stage, coming, measured, *policy);
        run.figures.push(blocked.percent());
        run.moves.push(100.0 * blocked.moves as f64 / blocked.requests.max(1) as f64);
    }
    if comparing.bounds == Bounds::All {
        run.bounds.push(("lower bound", least_blocked(packing, coming, measured)));
        let free = freely_repacked(packing, coming, measured).percent();
        run.bounds.push(("free repacking", free));
    }
    run
}

fn rounded(value: f64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a number of requests, which is not negative"
    )]
    {
        libm::round(value) as usize
    }
}
