//! Holes: what is left of a shared GPU, and how much of it will never be used.
//!
//! A hole of level *l* (thousandths of a GPU that are free in both dimensions) is filled from the sizes
//! that are asked of single GPUs. Nobody chooses what comes, but of the pods that come the best one can
//! be put there: the expected waste `H(l)` is that of the best of [`CHOICES`] pods, and of the hole it
//! leaves in turn. With the sizes `s ≤ l` in the order of `H(l − s)`, and `S(i)` the part of all pods
//! that come after the first *i* of them,
//!
//! ```text
//! H(0) = 0,   H(l) = Σ H(l − s(i)) (S(i−1)^K − S(i)^K) + l S(last)^K
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use super::device::{ClassId, ClassKind, DeviceClass, DeviceClasses, PerClass};
use super::mix::RequestType;
use super::request::Demand;
use super::units::{MemMib, Share};

/// Levels of a device: thousandths.
const LEVELS: usize = 1000;

/// Pods among which the one for a hole is chosen, `K`. With one the worst is feared, with very many
/// every hole seems useful; 8 to 128 differ by 0.2 points on the public trace.
const CHOICES: f64 = 45.0;

/// How often each size was asked for, by thousandths of a device.
type Sizes = BTreeMap<usize, u64>;

/// The expected waste of holes on each class of device, in GPUs.
#[derive(Clone, Debug)]
pub(super) struct Holes {
    by_class: PerClass<Option<Class>>,
}

#[derive(Clone, Debug)]
struct Class {
    capacity: MemMib,
    waste: Arc<[f64]>,
}

impl Holes {
    /// The holes of `classes` where `types` are asked for, each with its number.
    ///
    /// Accepted models are left out of it: who wants another model alone may still be the one that
    /// fits the hole on the next node.
    pub(super) fn new(types: &[(RequestType, u64)], classes: &DeviceClasses) -> Self {
        let mut known: Vec<(Sizes, Arc<[f64]>)> = Vec::new();
        let by_class = classes.map(|class| {
            (class.kind == ClassKind::Gpu).then(|| {
                let sizes = sizes_on(types, class);
                let found = known.iter().find(|(law, _)| *law == sizes);
                let waste = found.map_or_else(|| expected(&sizes).into(), |(_, it)| Arc::clone(it));
                known.push((sizes, Arc::clone(&waste)));
                Class { capacity: class.capacity, waste }
            })
        });
        Self { by_class }
    }

    /// Expected waste of a device with this left, in GPUs; none where it cannot be shared.
    pub(super) fn waste(&self, class: ClassId, left: Demand) -> Option<f64> {
        let Class { capacity, waste } = self.by_class.of(class).as_ref()?;
        let memory = Share::ratio(left.memory, *capacity).unwrap_or(Share::ZERO);
        let level = left.share.min(memory).millionths() / 1000;
        Some(waste[usize::try_from(level).unwrap_or(LEVELS).min(LEVELS)])
    }
}

/// How often which size, in thousandths of a device, is asked of a single device of the class.
fn sizes_on(types: &[(RequestType, u64)], class: &DeviceClass) -> Sizes {
    let mut sizes = BTreeMap::new();
    for (kind, count) in types {
        let Some(request) = kind.gpu.as_ref().filter(|request| request.count.get() == 1) else {
            continue;
        };
        let Ok(demand) = request.amount.demand_of(class.capacity) else { continue };
        let memory = Share::ratio(demand.memory, class.capacity).unwrap_or(Share::WHOLE);
        let size = demand.share.max(memory).millionths().div_ceil(1000).clamp(1, 1000);
        *sizes.entry(usize::try_from(size).unwrap_or(LEVELS)).or_default() += count;
    }
    sizes
}

/// `H(l)` for every level, in GPUs.
fn expected(sizes: &Sizes) -> Vec<f64> {
    let total = float(sizes.values().sum::<u64>().max(1));
    let mut waste = vec![0.0];
    for level in 1..=LEVELS {
        let fitting = sizes.range(..=level);
        let mut left: Vec<(f64, f64)> =
            fitting.map(|(size, count)| (waste[level - size], float(*count) / total)).collect();
        left.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut mean, mut rest, mut chance) = (0.0, 1.0_f64, 1.0);
        for (waste, part) in left {
            rest = (rest - part).max(0.0);
            let later = libm::pow(rest, CHOICES);
            mean += waste * (chance - later);
            chance = later;
        }
        waste.push(mean + chance * float(u64::try_from(level).unwrap_or(u64::MAX)) / 1000.0);
    }
    waste
}

fn float(value: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "estimates need no more than 53 bits")]
    {
        value as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn law(sizes: &[(usize, u64)]) -> Vec<f64> {
        expected(&sizes.iter().copied().collect())
    }

    fn check(waste: &[f64], expected: &[(usize, f64)]) {
        for (level, gpus) in expected {
            assert!((waste[*level] - gpus).abs() < 1e-9, "{level}: {}, not {gpus}", waste[*level]);
        }
    }

    #[test]
    fn what_no_size_fits_is_wasted_whole() {
        check(&law(&[]), &[(0, 0.0), (1, 0.001), (1000, 1.0)]);
        let halves = law(&[(500, 3)]);
        check(&halves, &[(499, 0.499), (500, 0.0), (501, 0.001), (800, 0.3), (1000, 0.0)]);
    }

    #[test]
    fn the_best_of_many_pods_fills_a_hole() {
        // Half of the pods ask for 0.3, half for 0.5: of 45 pods one of each comes all but surely.
        let waste = law(&[(300, 1), (500, 1)]);
        let never = libm::pow(0.5, CHOICES);
        check(&waste, &[(300, 0.3 * never), (600, 0.0), (800, 0.0), (900, 0.0), (1000, 0.0)]);
        // A size that one pod in a hundred has comes with 1 - 0.99^45 = 36 %.
        let rare = law(&[(1000, 99), (250, 1)]);
        check(&rare, &[(250, 0.25 * libm::pow(0.99, CHOICES))]);
    }

    #[test]
    fn more_room_never_wastes_more_than_it_adds() {
        let waste = law(&[(70, 3), (110, 7), (330, 20), (500, 10), (810, 30), (1000, 30)]);
        for (level, waste) in (0..).zip(waste) {
            assert!((0.0..=f64::from(level) / 1000.0 + 1e-12).contains(&waste), "{level}");
        }
    }
}
