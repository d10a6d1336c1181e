//! How many of the free units of a GPU in MIG mode will probably never be used.
//!
//! The same estimate as for shared GPUs ([`crate::waste::residual`]), over masks of taken units in place
//! of levels:
//!
//! ```text
//! H(mask) = −T ln ( e^(−free units/T) + Σ e^(−(p(q) + H(mask ∪ run))/T) ),   H(all taken) = 0
//! ```
//!
//! The sum is over the profiles *q* and the starts at which they fit. The prices `p` are those at which
//! empty GPUs, filled so, take the profiles in the proportions in which they are requested.

use crate::hardware::layouts::Layouts;
use crate::waste::numbers::float;

/// The `T` above, in units of memory: 0.05 to 0.2 block equally many requests within 3 %.
const SOFTNESS: f64 = 0.1;

/// Turns in which the prices are found, as for shared GPUs.
const TURNS: u32 = 60;

/// The masks of a geometry, with what leads from one to another.
#[derive(Clone, Debug)]
pub(crate) struct MaskGraph {
    /// By mask, in rising order of the taken units: `e^(−free units/T)`.
    leave: Vec<f64>,
    /// By mask: each profile and start that fits, as the profile and the mask after it.
    steps: Vec<Vec<(usize, usize)>>,
    /// The mask of each layout.
    of_layout: Vec<usize>,
    profiles: usize,
}

impl MaskGraph {
    pub(crate) fn of(layouts: &Layouts) -> Self {
        let mut masks: Vec<u32> = layouts.ids().map(|id| layouts.mask(id)).collect();
        let of_layout = masks.clone();
        masks.sort_unstable();
        masks.dedup();
        let geometry = layouts.geometry();
        let free_units = masks.iter().map(|mask| geometry.axis - mask.count_ones());
        let leave = free_units.map(|units| libm::exp(-float(u64::from(units)) / SOFTNESS));
        let steps = masks.iter().map(|mask| {
            let mut steps = Vec::new();
            for (at, profile) in geometry.profiles.iter().enumerate() {
                let with = profile.free_starts(*mask).map(|start| mask | profile.units(start));
                steps.extend(with.map(|with| (at, position(&masks, with))));
            }
            steps
        });
        Self {
            leave: leave.collect(),
            steps: steps.collect(),
            of_layout: of_layout.into_iter().map(|mask| position(&masks, mask)).collect(),
            profiles: geometry.profiles.len(),
        }
    }

    /// `H` of each layout in millionths of a unit, rounded down. `parts` has the part of the requests
    /// that each profile has; their sum is one, and a profile that is never requested has none.
    pub(crate) fn waste(&self, parts: &[f64]) -> Vec<i64> {
        let mut pull = parts.to_vec();
        for _ in 0..TURNS {
            let taken = self.taken_from_empty(&pull);
            let all: f64 = taken.iter().sum();
            let mut mean = 0.0;
            for ((pull, taken), part) in pull.iter_mut().zip(&taken).zip(parts) {
                if *part > 0.0 {
                    *pull /= libm::sqrt((taken / all / part).max(1e-9));
                    mean += part * libm::log(*pull);
                }
            }
            let level = libm::exp(-mean);
            pull.iter_mut().for_each(|pull| *pull *= level);
        }
        let values = self.values(&pull);
        let by_mask = values.iter().map(|value| whole(-SOFTNESS * libm::log(*value) * 1e6));
        let by_mask: Vec<i64> = by_mask.collect();
        self.of_layout.iter().map(|mask| by_mask[*mask]).collect()
    }

    /// `e^(−H/T)` of each mask at the prices `pull`, which is `e^(−p/T)`.
    fn values(&self, pull: &[f64]) -> Vec<f64> {
        let mut values = vec![0.0; self.leave.len()];
        for mask in (0..values.len()).rev() {
            let filled = self.steps[mask].iter().map(|(profile, to)| pull[*profile] * values[*to]);
            values[mask] = self.leave[mask] + filled.sum::<f64>();
        }
        values
    }

    /// How often each profile is put on a GPU that was empty.
    fn taken_from_empty(&self, pull: &[f64]) -> Vec<f64> {
        let values = self.values(pull);
        let mut taken = vec![0.0; self.profiles];
        let mut reached = vec![0.0; values.len()];
        reached[0] = 1.0;
        for mask in 0..values.len() {
            let here = reached[mask] / values[mask];
            for (profile, to) in &self.steps[mask] {
                let part = here * pull[*profile] * values[*to];
                taken[*profile] += part;
                reached[*to] += part;
            }
        }
        taken
    }
}

fn position(masks: &[u32], mask: u32) -> usize {
    masks.binary_search(&mask).expect("each mask is one of a layout")
}

/// The whole part, rounded down.
pub(crate) fn whole(value: f64) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "clamped; NaN is zero")]
    {
        libm::floor(value.clamp(-1e17, 1e17)) as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::layouts::{LayoutId, Start};
    use crate::hardware::mig::GEOMETRIES;

    fn near(waste: i64, units: f64) -> bool {
        (waste as f64 / 1e6 - units).abs() < 0.000_51
    }

    #[test]
    fn the_waste_of_eight_units_is_that_of_the_design() {
        let layouts = Layouts::of(&GEOMETRIES[2]).unwrap();
        let waste = MaskGraph::of(&layouts).waste(&[1.0 / 6.0; 6]);
        for (taken, units) in [
            (0, -0.353),
            (0b1, -0.052),
            (0b1_0000, -0.085),
            (0b100_0000, 0.717),
            (0b11, -0.062),
            (0b11_0000, -0.106),
            (0b1100_0000, -0.283),
            (0b1111, 0.013),
            (0b1111_0000, -0.213),
            (0b111_0000, 0.787),
            (0b11_1111, 0.189),
            (0b111_1111, 1.0),
            (0b1111_1111, 0.0),
        ] {
            let layout = layouts.ids().find(|id| layouts.mask(*id) == taken).unwrap();
            let found = waste[layout.position()];
            assert!(near(found, units), "{taken:b}: {found}, not {units}");
        }
    }

    #[test]
    fn the_smallest_profile_at_the_seventh_unit_wastes_the_eighth() {
        let layouts = Layouts::of(&GEOMETRIES[2]).unwrap();
        let waste = MaskGraph::of(&layouts).waste(&[1.0 / 6.0; 6]);
        let one = layouts.profile("1g.10gb").unwrap();
        let best = layouts.starts(LayoutId::EMPTY, one).min_by_key(|(_, id)| waste[id.position()]);
        assert_eq!(best.unwrap().0, Start(4));
        let (worst, _) = layouts
            .starts(LayoutId::EMPTY, one)
            .max_by_key(|(_, id)| waste[id.position()])
            .unwrap();
        assert_eq!(worst, Start(6));
    }

    #[test]
    fn units_that_no_request_fits_are_wasted_entirely() {
        for geometry in GEOMETRIES.iter() {
            let layouts = Layouts::of(geometry).unwrap();
            let mut parts = vec![0.0; geometry.profiles.len()];
            let waste = MaskGraph::of(&layouts).waste(&parts);
            for id in layouts.ids() {
                assert!(near(waste[id.position()], f64::from(layouts.free_units(id))));
            }
            // only whole GPUs: the price is zero, as it is the only profile
            *parts.last_mut().unwrap() = 1.0;
            let waste = MaskGraph::of(&layouts).waste(&parts);
            for id in layouts.ids() {
                let free = if id == LayoutId::EMPTY { 0 } else { layouts.free_units(id) };
                assert!(near(waste[id.position()], f64::from(free)), "{id:?}");
            }
        }
    }
}
