//! Residuals: what is left of a shared GPU, and how much of it will never be used.
//!
//! A residual of level *l* (thousandths of a GPU that are free in both dimensions) is filled with
//! the sizes that pods request. Which size comes is given, but where it goes is a choice. Sizes
//! that fill residuals well are sought after, others are not: each size `s` has a price `p(s)`. The
//! waste of a residual is that of its cheapest filling,
//!
//! ```text
//! H(l) = −T ln ( e^(−l/T) + Σ e^(−(p(s) + H(l − s))/T) ),   H(0) = 0
//! ```
//!
//! a minimum made smooth by `T` over "leave it" (which wastes *l*) and "put *s* there". At these
//! prices, empty GPUs that are filled so take the sizes in the proportions in which they are
//! requested. A size that is requested often and fits few residuals becomes cheap, a rare size that
//! fills them dear. They are found in rounds, as in Sinkhorn's balancing of a matrix. Their mean
//! over the requests is zero, so a placement as such gains nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::hardware::device_class::{ClassId, DeviceClass, DeviceClasses, PerClass};
use crate::waste::numbers::float;
use crate::waste::request_mix::{RequestType, Tally};
use wire::units::{Demand, MemMib, Share};

/// Levels of a device: thousandths.
const LEVELS: usize = 1000;

/// Steps of a table: hundredths of a device; between them the rest is waste.
const STEPS: usize = 100;

/// How much dearer than the cheapest a filling may be and still count, in steps: the `T` above.
const SOFTNESS: f64 = 1.0;

/// How often each size was requested, in thousandths of a device.
type Sizes = BTreeMap<usize, u64>;

/// The expected waste of residuals on each device class, in GPUs.
#[derive(Clone, Debug)]
pub(crate) struct Residuals {
    by_class: PerClass<Option<Class>>,
}

#[derive(Clone, Debug)]
struct Class {
    capacity: MemMib,
    waste: Arc<[f64]>,
}

impl Residuals {
    /// The residuals of `classes`, for `types` with their counts.
    ///
    /// Accepted models are ignored: a pod that accepts another model only may still be the one that
    /// fits the residual on the next node.
    pub(crate) fn new(
        types: &[(RequestType, Tally)],
        classes: &DeviceClasses,
        rounds: usize,
    ) -> Self {
        let mut known: Vec<(Sizes, Arc<[f64]>)> = Vec::new();
        let by_class = classes.map(|class| {
            class.is_shareable().then(|| {
                let sizes = sizes_on(types, class);
                let waste = match known.iter().find(|(known, _)| *known == sizes) {
                    Some((_, waste)) => Arc::clone(waste),
                    None => expected(&sizes, rounds).into(),
                };
                known.push((sizes, Arc::clone(&waste)));
                Class { capacity: class.capacity, waste }
            })
        });
        Self { by_class }
    }

    pub(crate) fn knows(&self, class: ClassId) -> bool {
        self.by_class.of(class).is_some()
    }

    /// Expected waste of the residual `left`, in GPUs; below zero if it is sought after. `None` if
    /// the class cannot be shared.
    pub(crate) fn waste(&self, class: ClassId, left: Demand) -> Option<f64> {
        let Class { capacity, waste } = self.by_class.of(class).as_ref()?;
        let memory = left.memory.mib().saturating_mul(1000) / capacity.mib().max(1);
        let level = memory.min(left.share.millionths() / 1000);
        Some(waste[usize::try_from(level).unwrap_or(LEVELS).min(LEVELS)])
    }
}

/// How often each size, in thousandths of a device, is requested of a single device of the class.
fn sizes_on(types: &[(RequestType, Tally)], class: &DeviceClass) -> Sizes {
    let mut sizes = BTreeMap::new();
    for (kind, tally) in types {
        let Some(request) = kind.gpu.as_ref().filter(|request| request.count.get() == 1) else {
            continue;
        };
        let Ok(demand) = request.amount.demand_of(class) else { continue };
        let memory = Share::ratio(demand.memory, class.capacity).unwrap_or(Share::WHOLE);
        let size = demand.share.max(memory).millionths().div_ceil(1000).clamp(1, 1000);
        *sizes.entry(usize::try_from(size).unwrap_or(LEVELS)).or_default() += tally.pods;
    }
    sizes
}

/// `H(l)` for every level, in GPUs.
fn expected(sizes: &Sizes, rounds: usize) -> Vec<f64> {
    let mut steps: BTreeMap<usize, f64> = BTreeMap::new();
    let total = float(sizes.values().sum());
    for (size, count) in sizes {
        *steps.entry(size.div_ceil(LEVELS / STEPS)).or_default() += float(*count) / total;
    }
    let steps: Vec<(usize, f64)> = steps.into_iter().collect();
    let leave: Vec<f64> = (0..=STEPS).map(|left| libm::exp(-small(left) / SOFTNESS)).collect();
    let mut pull: Vec<f64> = steps.iter().map(|(_, part)| *part).collect();
    for _ in 0..rounds {
        let taken = taken_from_empty(&steps, &pull, &values(&steps, &pull, &leave));
        let all: f64 = taken.iter().sum();
        let mut mean = 0.0;
        for ((pull, taken), (_, part)) in pull.iter_mut().zip(&taken).zip(&steps) {
            *pull /= libm::sqrt((taken / all / part).max(1e-9));
            mean += part * libm::log(*pull);
        }
        let level = libm::exp(-mean);
        pull.iter_mut().for_each(|pull| *pull *= level);
    }
    let values = values(&steps, &pull, &leave);
    let waste = (0..=LEVELS).map(|level| {
        let whole = -SOFTNESS * libm::log(values[level * STEPS / LEVELS]) / small(STEPS);
        whole + small(level % (LEVELS / STEPS)) / small(LEVELS)
    });
    waste.collect()
}

/// `e^(−H/T)` by what is left, in steps, at the prices `pull`, which is `e^(−p/T)`.
fn values(steps: &[(usize, f64)], pull: &[f64], leave: &[f64]) -> Vec<f64> {
    let mut values = vec![1.0];
    for left in 1..=STEPS {
        let fitting = steps.iter().zip(pull).take_while(|((size, _), _)| *size <= left);
        let filled: f64 = fitting.map(|((size, _), pull)| pull * values[left - size]).sum();
        values.push(leave[left] + filled);
    }
    values
}

/// How often each size is put on a GPU that was empty.
fn taken_from_empty(steps: &[(usize, f64)], pull: &[f64], values: &[f64]) -> Vec<f64> {
    let mut taken = vec![0.0; steps.len()];
    let mut reached = vec![0.0; STEPS + 1];
    reached[STEPS] = 1.0;
    for left in (1..=STEPS).rev() {
        let here = reached[left] / values[left];
        for (at, ((size, _), pull)) in steps.iter().zip(pull).enumerate() {
            if *size > left {
                break;
            }
            let part = here * pull * values[left - size];
            taken[at] += part;
            reached[left - size] += part;
        }
    }
    taken
}

fn small(value: usize) -> f64 {
    f64::from(u32::try_from(value).expect("levels are small"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::waste::weights::WasteWeights;

    fn law(sizes: &[(usize, u64)]) -> Vec<f64> {
        expected(&sizes.iter().copied().collect(), WasteWeights::default().price_rounds)
    }

    fn check(waste: &[f64], expected: &[(usize, f64)]) {
        for (level, gpus) in expected {
            assert!((waste[*level] - gpus).abs() < 1e-9, "{level}: {}, not {gpus}", waste[*level]);
        }
    }

    #[test]
    fn room_that_fits_no_size_is_wasted_entirely() {
        let halves = law(&[(500, 3)]);
        // the price is zero, as it is the only size
        check(&halves, &[(0, 0.0), (1, 0.001), (490, 0.49), (499, 0.499), (500, 0.0), (800, 0.3)]);
        check(&law(&[(1000, 9)]), &[(300, 0.3), (999, 0.999), (1000, 0.0)]);
    }

    #[test]
    fn scarce_sizes_have_a_price_and_valuable_residuals() {
        // Every 0.7 leaves a residual for a 0.3: as many as come go there, and nothing is wasted.
        let even = law(&[(700, 1), (300, 1)]);
        assert!(even[1000].abs() < 0.02, "{}", even[1000]);
        // With few of them most of these residuals are wasted. So an empty GPU is worth less when
        // it takes a 0.7, and a residual of 0.3 is worth less than one of 1.0 in proportion.
        let rare = law(&[(700, 9), (300, 1)]);
        assert!(rare[300] > 0.2, "{}", rare[300]);
        assert!(rare[300] > even[300], "{} against {}", rare[300], even[300]);
    }

    #[test]
    fn no_residual_wastes_more_than_itself() {
        let waste = law(&[(70, 3), (110, 7), (330, 20), (500, 10), (810, 30), (1000, 30)]);
        for (level, waste) in (0..).zip(waste) {
            assert!(waste <= f64::from(level) / 1000.0 + 1e-9, "{level}: {waste}");
        }
    }
}
