//! The mix of requests for MIG instances, and what the free units of each class waste under it.

use crate::waste::mig::class::{MigClass, MigClassId};
use crate::waste::mig::types::{MigType, TypeId, Types};
use crate::waste::mig::window::MigWindow;
use crate::waste::numbers::float;

/// The most frequent types count, so that a decision takes as long on every cluster.
const MOST_TYPICAL: usize = 32;

/// What a type has beside its requests, so that none that may come is worth nothing.
const PRIOR: f64 = 0.5;

/// One type of the mix.
#[derive(Clone, Debug)]
pub(crate) struct Typical {
    pub(crate) id: TypeId,
    pub(crate) kind: MigType,
    /// Its part of the requests; all parts add up to one.
    pub(crate) weight: f64,
    /// Its units on the class where they are fewest.
    pub(crate) units: f64,
}

/// A mix, compiled for the classes of a cluster. Making it takes about half a millisecond per class.
#[derive(Clone, Debug)]
pub struct MigMix {
    typical: Vec<Typical>,
    /// `w̄`: units of a request, on average.
    mean_units: f64,
    /// By class and layout, in millionths of a unit.
    waste: Vec<Vec<i64>>,
}

impl MigMix {
    /// The mix of the requests in a window. The types in `usual` count even if none came, each as half a
    /// request: those that the profiles of the classes make possible.
    pub fn learned<P: Clone + Ord>(
        classes: &[MigClass],
        types: &Types,
        usual: &[TypeId],
        window: &MigWindow<P>,
    ) -> Self {
        let listed = types.ids().filter(|id| window.count(*id) > 0 || usual.contains(id));
        Self::of(classes, types, listed.map(|id| (id, window.count(id))))
    }

    /// The mix of types that came so often. Those that no class serves are left out, and so are the rarest
    /// above 32.
    pub fn of(
        classes: &[MigClass],
        types: &Types,
        counts: impl IntoIterator<Item = (TypeId, u64)>,
    ) -> Self {
        let served = counts.into_iter().filter_map(|(id, count)| {
            let kind = types.kind(id);
            let units = kind.units(classes)?;
            Some((count, Typical { id, kind: kind.clone(), weight: 0.0, units: f64::from(units) }))
        });
        let mut typical: Vec<(u64, Typical)> = served.collect();
        typical.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.kind.cmp(&b.1.kind)));
        typical.truncate(MOST_TYPICAL);
        let all: f64 = typical.iter().map(|(count, _)| float(*count) + PRIOR).sum();
        let weighted = typical
            .into_iter()
            .map(|(count, kind)| Typical { weight: (float(count) + PRIOR) / all, ..kind });
        let typical: Vec<Typical> = weighted.collect();
        let waste = classes.iter().zip(0..);
        let waste = waste.map(|(class, id)| class.waste(&parts(class, MigClassId(id), &typical)));
        Self {
            mean_units: typical.iter().map(|kind| kind.weight * kind.units).sum(),
            waste: waste.collect(),
            typical,
        }
    }

    /// The types, the most frequent first.
    pub(crate) fn typical(&self) -> &[Typical] {
        &self.typical
    }

    pub(crate) fn mean_units(&self) -> f64 {
        self.mean_units
    }

    /// By layout, in millionths of a unit.
    pub(crate) fn waste_of(&self, class: MigClassId) -> &[i64] {
        &self.waste[class.0]
    }

    /// What each type has of the requests, the most frequent first.
    pub fn weights(&self) -> impl Iterator<Item = (TypeId, f64)> + use<'_> {
        self.typical.iter().map(|kind| (kind.id, kind.weight))
    }
}

/// What each profile of a class has of the requests that accept the class.
fn parts(class: &MigClass, id: MigClassId, typical: &[Typical]) -> Vec<f64> {
    let mut parts = vec![0.0; class.layouts().profiles().count()];
    for Typical { kind, weight, .. } in typical {
        if let Some(profile) = kind.on(id) {
            parts[profile.position()] += weight;
        }
    }
    let all: f64 = parts.iter().sum();
    if all > 0.0 {
        parts.iter_mut().for_each(|part| *part /= all);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::mig::GEOMETRIES;

    /// A class of A30 and one of A100, and types: for each profile of the first alone, and the same with
    /// the second's profile of the same place.
    fn two() -> (Vec<MigClass>, Types, Vec<TypeId>) {
        let classes: Vec<MigClass> =
            [0, 2].map(|at| MigClass::new(&GEOMETRIES[at]).unwrap()).into();
        let mut types = Types::default();
        let both = classes[0].layouts().profiles().zip(classes[1].layouts().profiles());
        let kinds = both
            .flat_map(|(a, b)| [MigType::new([Some(a), None]), MigType::new([Some(a), Some(b)])]);
        let ids = kinds.map(|kind| types.id(&kind).unwrap()).collect();
        (classes, types, ids)
    }

    #[test]
    fn types_that_never_came_count_as_half_a_request() {
        let (classes, types, ids) = two();
        let mut window = MigWindow::default();
        assert_eq!((0..10).filter(|pod| window.observe(pod, ids[3])).count(), 4);
        let mix = MigMix::learned(&classes, &types, &ids, &window);
        let weights: Vec<(TypeId, f64)> = mix.weights().collect();
        assert_eq!(weights.len(), 6);
        assert_eq!(weights[0], (ids[3], 10.5 / 13.0));
        assert!(weights[1..].iter().all(|(_, weight)| *weight == 0.5 / 13.0));
        // the second profile has two units on both, the third four on A30 and two on A100
        assert_eq!(mix.typical()[0].units, 2.0);
        let last = mix.typical().iter().find(|kind| kind.id == ids[5]).unwrap();
        assert_eq!(last.units, 2.0);
        let none = MigMix::learned(&classes, &types, &[], &window);
        assert_eq!(none.weights().collect::<Vec<_>>(), [(ids[3], 1.0)]);
    }

    #[test]
    fn each_class_wastes_what_the_requests_that_accept_it_cannot_use() {
        let (classes, types, ids) = two();
        // only whole A30: no unit of the other class can be used
        let mix = MigMix::of(&classes, &types, [(ids[4], 7)]);
        for (class, id) in classes.iter().zip([0, 1].map(MigClassId)) {
            let layouts = class.layouts();
            for layout in layouts.ids() {
                let is_used = id.0 == 0 && layouts.mask(layout) == 0;
                let wasted = if is_used { 0 } else { layouts.free_units(layout) };
                let found = mix.waste_of(id)[layout.position()];
                assert!((found - i64::from(wasted) * 1_000_000).abs() <= 1, "{found}");
            }
        }
    }

    #[test]
    fn the_rarest_types_above_32_are_left_out() {
        let classes: Vec<MigClass> =
            [1, 2].map(|at| MigClass::new(&GEOMETRIES[at]).unwrap()).into();
        let mut types = Types::default();
        let second = || classes[1].layouts().profiles();
        let pairs = classes[0].layouts().profiles().flat_map(|a| second().map(move |b| (a, b)));
        let ids: Vec<TypeId> =
            pairs.map(|(a, b)| types.id(&MigType::new([Some(a), Some(b)])).unwrap()).collect();
        let counts = ids.iter().zip(1..).map(|(id, count)| (*id, count));
        let mix = MigMix::of(&classes, &types, counts);
        let kept: Vec<TypeId> = mix.weights().map(|(id, _)| id).collect();
        assert_eq!(kept, ids.iter().rev().take(32).copied().collect::<Vec<_>>());
        let all: f64 = mix.weights().map(|(_, weight)| weight).sum();
        assert!((all - 1.0).abs() < 1e-12);
    }
}
