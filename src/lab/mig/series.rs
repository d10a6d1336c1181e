//! Plays worlds under several policies, each seed with the same requests.

use std::convert::Infallible;
use std::num::NonZeroUsize;

use cli::simulate::jobs::on_all_cores;

use crate::mig::bound::{filled, freely_repacked, least_blocked};
use crate::mig::packing::Packing;
use crate::mig::play::{churn, fill};
use crate::mig::policy::MigPolicy;
use crate::mig::requests::{Arrivals, Request, requests};
use crate::mig::worlds::{Stage, World};

/// Mean lifetimes from the first arrival until requests count, and until the end.
const MEASURED: (f64, f64) = (4.0, 25.0);

/// The same where the mix changes: what comes after that counts, for 15 mean lifetimes.
const CHANGED: (f64, f64) = (15.0, 30.0);

/// Arrivals without an end go on up to about this load, so that each policy refuses one.
const MOST_FILLED: f64 = 1.5;

/// What is compared.
#[derive(Clone, Debug)]
pub struct Comparing {
    /// What comes.
    pub worlds: Vec<World>,
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
pub(crate) struct Run {
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
pub(crate) fn runs(comparing: &Comparing) -> Vec<Vec<Run>> {
    let stages: Vec<Stage> =
        comparing.worlds.iter().map(|world| Stage::new(*world, comparing.gpus.get())).collect();
    let seeds = &comparing.seeds;
    let tasks: Vec<(&Stage, u64)> =
        stages.iter().flat_map(|stage| seeds.iter().map(move |seed| (stage, *seed))).collect();
    let Ok(runs) = on_all_cores(&tasks, comparing.jobs, |(stage, seed)| -> Result<_, Infallible> {
        Ok(play(comparing, stage, *seed))
    });
    runs.chunks(seeds.len()).map(<[Run]>::to_vec).collect()
}

fn play(comparing: &Comparing, stage: &Stage, seed: u64) -> Run {
    let packing = Packing::of(&stage.classes, &stage.gpus, &stage.kinds);
    let [first, second] = [0, 1].map(|half| {
        let weights = &stage.weights[half];
        let all: u32 = weights.iter().sum();
        let parts: Vec<f64> =
            weights.iter().map(|weight| f64::from(*weight) / f64::from(all)).collect();
        let units: f64 = packing.units().iter().zip(&parts).map(|(units, part)| units * part).sum();
        (weights.as_slice(), packing.most_requests(&parts), units)
    });
    let Some(load) = comparing.load else {
        let (weights, rate, units) = first;
        // one mean lifetime has load 1.0 on average
        let coming = requests(stage.world, seed, &[Arrivals { weights, rate, until: MOST_FILLED }]);
        return filling(comparing, (stage, &packing), &coming, (rounded(rate), rate * units));
    };
    let is_change = matches!(stage.world, World::Change(..));
    let measured = if is_change { CHANGED } else { MEASURED };
    let stretch =
        |(weights, full, _): (_, f64, f64), until| Arrivals { weights, rate: load * full, until };
    let coming = match is_change {
        true => {
            requests(stage.world, seed, &[stretch(first, measured.0), stretch(second, measured.1)])
        }
        false => requests(stage.world, seed, &[stretch(first, measured.1)]),
    };
    churning(comparing, (stage, &packing), &coming, measured)
}

fn filling(
    comparing: &Comparing,
    (stage, packing): (&Stage, &Packing),
    coming: &[Request],
    full: (usize, f64),
) -> Run {
    let all: f64 = stage.classes.iter().zip(&stage.gpus).fold(0.0, |all, (class, gpus)| {
        all + f64::from(class.layouts().geometry().axis) * *gpus as f64
    });
    let mut run = Run::default();
    for policy in &comparing.policies {
        let filled = fill(stage, coming, full, *policy);
        run.figures.push(100.0 * filled.units / all);
        run.first_losses.push(filled.first_loss);
    }
    if comparing.bounds == Bounds::All {
        run.bounds.push(("bound", 100.0 * filled(packing, coming, full.0) / all));
    }
    run
}

fn churning(
    comparing: &Comparing,
    (stage, packing): (&Stage, &Packing),
    coming: &[Request],
    measured: (f64, f64),
) -> Run {
    let mut run = Run::default();
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
