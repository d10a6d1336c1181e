//! Mixes of requests for MIG instances, and the fleets that they come to.
//!
//! The mixes are invented, or in the style of papers: no public trace has requests for MIG instances.

use std::str::FromStr;

use engine::hardware::layouts::ProfileIndex;
use engine::hardware::mig::{GEOMETRIES, Geometry};
use engine::waste::mig::class::MigClass;
use engine::waste::mig::types::{MigType, TypeId, Types};

/// Weights of the six profiles of eight units: 1g, 1g with twice the memory, 2g, 3g, 4g, 7g.
type Weights = [u32; 6];

/// Mixes by name, in percent but for the first one.
pub(crate) const MIXES: [(&str, Weights); 9] = [
    ("uniform", [1, 1, 1, 1, 1, 1]),
    ("small", [40, 20, 20, 10, 5, 5]),
    ("large", [5, 10, 10, 20, 25, 30]),
    ("bimodal", [40, 10, 5, 5, 10, 30]),
    ("middle", [5, 15, 30, 30, 15, 5]),
    ("llm", [15, 5, 15, 40, 0, 25]),
    ("ones7", [80, 0, 0, 0, 0, 20]),
    ("threes", [45, 0, 25, 30, 0, 0]),
    ("odd", [10, 45, 5, 5, 30, 5]),
];

/// The world of two models: percent of the GPUs that the first class has, and of the requests that accept
/// only the first class and only the second one.
const MODELS: (usize, [u32; 2]) = (80, [10, 20]);

/// Name of that world.
const MODELS_NAME: &str = "models-80-20";

/// What comes to which GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigWorld {
    /// One of the nine mixes, on GPUs of one class.
    Mix(usize),
    /// It begins with one mix and has the other one from halfway on.
    Change(usize, usize),
    /// Two classes, 80 and 20 % of the GPUs, one at least. A fifth of the requests accept only the
    /// second, a tenth only the first; profiles are requested equally often.
    Models,
}

impl MigWorld {
    /// All nine mixes.
    pub fn mixes() -> Vec<Self> {
        (0..MIXES.len()).map(Self::Mix).collect()
    }

    /// Its name: of its mix, or of two mixes with `-` between.
    pub fn name(self) -> String {
        match self {
            Self::Mix(mix) => MIXES[mix].0.to_owned(),
            Self::Change(from, to) => format!("{}-{}", MIXES[from].0, MIXES[to].0),
            Self::Models => MODELS_NAME.to_owned(),
        }
    }

    /// Its own number, so that each world has other requests with the same seed.
    pub(crate) fn number(self) -> u64 {
        let number = match self {
            Self::Models => 0,
            Self::Mix(mix) => 1 + mix,
            Self::Change(from, to) => (1 + from) * (1 + MIXES.len()) + to,
        };
        u64::try_from(number).expect("worlds are few")
    }
}

impl FromStr for MigWorld {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        if name == MODELS_NAME {
            return Ok(Self::Models);
        }
        let change = name.split_once('-');
        let change =
            change.and_then(|(from, to)| Some(Self::Change(mix_named(from)?, mix_named(to)?)));
        mix_named(name).map(Self::Mix).or(change).ok_or_else(|| {
            let names = MIXES.map(|(name, _)| name).join(", ");
            format!(
                "no such mix: expected all, {names}, two of these with `-` between, or {MODELS_NAME}"
            )
        })
    }
}

/// The position of a mix.
fn mix_named(name: &str) -> Option<usize> {
    MIXES.iter().position(|(known, _)| *known == name)
}

/// One type of request of a world with its weights: in the first half, and in the second one.
struct WeightedKind {
    kind: MigType,
    weights: [u32; 2],
}

/// A world with the tables of its classes.
#[derive(Debug)]
pub(crate) struct MigStage {
    pub(crate) world: MigWorld,
    pub(crate) classes: Vec<MigClass>,
    /// GPUs of each class.
    pub(crate) gpus: Vec<usize>,
    pub(crate) types: Types,
    /// The types that can come.
    pub(crate) kinds: Vec<MigType>,
    /// Their numbers.
    pub(crate) ids: Vec<TypeId>,
    /// Weights of them: in the first half, and in the second one.
    pub(crate) weights: [Vec<u32>; 2],
}

impl MigStage {
    pub(crate) fn new(world: MigWorld, gpus: usize) -> Self {
        let geometries: &[&Geometry] = match world {
            MigWorld::Models => &[&GEOMETRIES[2], &GEOMETRIES[6]],
            MigWorld::Mix(_) | MigWorld::Change(..) => &[&GEOMETRIES[2]],
        };
        let classes = geometries.iter().map(|geometry| MigClass::new(geometry));
        let classes: Vec<MigClass> =
            classes.map(|class| class.expect("its tables are small")).collect();
        let kinds = kinds(world, &classes);
        let mut types = Types::default();
        let ids = kinds.iter().map(|kind| types.id(&kind.kind).expect("types are few")).collect();
        let weights = [0, 1].map(|half| kinds.iter().map(|kind| kind.weights[half]).collect());
        let gpus = match world {
            MigWorld::Mix(_) | MigWorld::Change(..) => vec![gpus],
            MigWorld::Models => {
                let first = gpus * MODELS.0 / 100;
                vec![first.max(1), (gpus - first).max(1)]
            }
        };
        let kinds = kinds.into_iter().map(|kind| kind.kind).collect();
        Self { world, classes, gpus, types, kinds, ids, weights }
    }

    /// Units of each type.
    pub(crate) fn units(&self) -> Vec<f64> {
        self.kinds.iter().map(|kind| f64::from(kind.units(&self.classes).unwrap_or(0))).collect()
    }
}

fn kinds(world: MigWorld, classes: &[MigClass]) -> Vec<WeightedKind> {
    let profiles: Vec<ProfileIndex> = classes[0].layouts().profiles().collect();
    let of_mixes = |weights: [usize; 2]| {
        let kinds = profiles.iter().map(|profile| WeightedKind {
            kind: MigType::new([Some(*profile)]),
            weights: weights.map(|mix| MIXES[mix].1[profile.position()]),
        });
        kinds.collect()
    };
    match world {
        MigWorld::Mix(mix) => of_mixes([mix, mix]),
        MigWorld::Change(from, to) => of_mixes([from, to]),
        MigWorld::Models => {
            let [first, second] = MODELS.1;
            let accepting = [[true, true], [true, false], [false, true]];
            let weights = [100 - first - second, first, second];
            let kinds = accepting.into_iter().zip(weights).flat_map(|(accepts, weight)| {
                profiles.iter().map(move |profile| WeightedKind {
                    kind: MigType::new(accepts.map(|accepts| accepts.then_some(*profile))),
                    weights: [weight; 2],
                })
            });
            kinds.collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worlds_have_names() {
        let mut worlds = MigWorld::mixes();
        worlds.extend([MigWorld::Change(7, 6), MigWorld::Models]);
        for world in worlds {
            assert_eq!(world.name().parse(), Ok(world));
        }
        for wrong in ["", "all", "uniform-", "small-huge", "models"] {
            assert!(wrong.parse::<MigWorld>().unwrap_err().contains("expected all, uniform"));
        }
    }

    #[test]
    fn weights_are_those_of_the_design() {
        for (name, weights) in &MIXES[1..] {
            assert_eq!(weights.iter().sum::<u32>(), 100, "{name}");
        }
        let models = MigStage::new(MigWorld::Models, 100);
        assert_eq!(models.gpus, [80, 20]);
        let of = |accepts: [bool; 2]| {
            let is_it = |kind: &MigType| {
                let mut has = [false; 2];
                kind.accepted().for_each(|(class, _)| has[class.0] = true);
                has == accepts
            };
            let own = models.kinds.iter().zip(&models.weights[0]).filter(|(kind, _)| is_it(kind));
            own.map(|(_, weight)| weight).sum::<u32>()
        };
        let all: u32 = models.weights[0].iter().sum();
        assert_eq!(of([true, false]) * 10, all);
        assert_eq!(of([false, true]) * 5, all);
        let change = MigStage::new(MigWorld::Change(7, 6), 10);
        assert_eq!(change.weights, [MIXES[7].1.to_vec(), MIXES[6].1.to_vec()]);
    }
}
