//! What a class of GPUs in MIG mode has in tables, whatever is requested of it.

use std::sync::Arc;

use crate::hardware::layouts::{LayoutError, LayoutId, Layouts, ProfileIndex};
use crate::hardware::mig::Geometry;
use crate::waste::mig::mask_waste::MaskGraph;

/// How far [`spots`] looks ahead: an exponential time whose mean is this part of a mean lifetime, a third. With
/// 2 to 20 as many requests are blocked, within 3 %.
const LOOK_AHEAD: u64 = 3;

/// Spots and weights are kept in millionths.
pub(crate) const MILLION: u64 = 1_000_000;

/// The number of a class among those of a [`crate::waste::mig::types::MigType`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MigClassId(pub usize);

/// The tables of one class: GPUs of one geometry, about which requests do not differ. Cheap to clone.
#[derive(Clone, Debug)]
pub struct MigClass {
    layouts: Arc<Layouts>,
    spots: Arc<[u64]>,
    graph: Arc<MaskGraph>,
}

impl MigClass {
    /// Counts the layouts of a geometry.
    ///
    /// # Errors
    /// Any [`LayoutError`].
    pub fn new(geometry: &Geometry) -> Result<Self, LayoutError> {
        let layouts = Layouts::of(geometry)?;
        let (spots, graph) = (spots(&layouts).into(), MaskGraph::of(&layouts).into());
        Ok(Self { layouts: layouts.into(), spots, graph })
    }

    /// Its layouts.
    pub fn layouts(&self) -> &Layouts {
        &self.layouts
    }

    /// How many instances of the profile a GPU can probably take soon if none comes meanwhile, in
    /// millionths: the free starts of today and of the layouts after its next departures.
    pub fn spots(&self, layout: LayoutId, profile: ProfileIndex) -> u64 {
        self.spots_of(layout)[profile.position()]
    }

    /// The same for all profiles.
    pub(crate) fn spots_of(&self, layout: LayoutId) -> &[u64] {
        let profiles = self.layouts.geometry().profiles.len();
        &self.spots[layout.position() * profiles..][..profiles]
    }

    /// The waste of each layout in millionths of a unit, if the profiles are requested in these parts.
    pub(crate) fn waste(&self, parts: &[f64]) -> Vec<i64> {
        self.graph.waste(parts)
    }
}

/// `A(ℓ) = (3 n(ℓ) + Σ A(ℓ without t)) / (3 + k)` by layout and profile, in millionths, rounded down. The
/// sum is over the *k* runs *t* of the layout, *n* are the free starts.
fn spots(layouts: &Layouts) -> Vec<u64> {
    let mut spots: Vec<u64> = Vec::new();
    let profiles = layouts.profiles().count();
    for layout in layouts.ids() {
        let without: Vec<LayoutId> = layouts
            .runs(layout)
            .map(|(start, _)| layouts.take(layout, start).expect("a run begins there"))
            .collect();
        for profile in layouts.profiles() {
            let now = LOOK_AHEAD * u64::from(layouts.fits(layout, profile)) * MILLION;
            let later = without.iter();
            let later = later.map(|left| spots[left.position() * profiles + profile.position()]);
            let later: u64 = later.sum();
            let runs = u64::try_from(without.len()).expect("runs are few");
            spots.push((now + later) / (LOOK_AHEAD + runs));
        }
    }
    spots
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::layouts::Start;
    use crate::hardware::mig::GEOMETRIES;

    #[test]
    fn the_spots_of_eight_units_are_those_of_the_design() {
        let class = MigClass::new(&GEOMETRIES[2]).unwrap();
        let layouts = class.layouts();
        let put = |name: &str| {
            layouts.put(LayoutId::EMPTY, layouts.profile(name).unwrap(), Start(0)).unwrap()
        };
        for (layout, expected) in [
            (LayoutId::EMPTY, [7.0, 4.0, 3.0, 2.0, 1.0, 1.0]),
            (put("1g.10gb"), [6.25, 3.25, 2.25, 1.25, 0.25, 0.25]),
            (put("2g.20gb"), [5.5, 3.25, 2.25, 1.25, 0.25, 0.25]),
        ] {
            let found: Vec<u64> =
                layouts.profiles().map(|profile| class.spots(layout, profile)).collect();
            let found: Vec<f64> = found.iter().map(|spots| *spots as f64 / 1e6).collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_gpu_never_expects_fewer_spots_than_it_has_or_more_than_an_empty_one() {
        for geometry in GEOMETRIES.iter() {
            let class = MigClass::new(geometry).unwrap();
            let layouts = class.layouts();
            for (layout, profile) in
                layouts.ids().flat_map(|id| layouts.profiles().map(move |profile| (id, profile)))
            {
                let spots = class.spots(layout, profile);
                assert!(spots <= class.spots(LayoutId::EMPTY, profile), "{layout:?}");
                let runs = u64::try_from(layouts.runs(layout).count()).unwrap();
                let now = u64::from(layouts.fits(layout, profile)) * MILLION;
                assert!(spots >= now * LOOK_AHEAD / (LOOK_AHEAD + runs), "{layout:?}");
            }
        }
    }
}
