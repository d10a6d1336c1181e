//! The best that GPUs in MIG mode can hold, if instances could be moved at will and cut into parts.
//!
//! A GPU holds at most one of its *fill patterns*: how many instances of each profile there are when none
//! can be added, 28 on eight units. GPUs of a class hold any mean of them.

use std::collections::BTreeSet;

use crate::lp::{Limit, LinearProgram};
use engine::hardware::layouts::{LayoutId, Layouts};
use engine::waste::mig::class::MigClass;
use engine::waste::mig::types::MigType;

/// Parts of a unit that do not count: less than any instance has.
const NOTHING: f64 = 1e-6;

/// What GPUs of some classes can hold of some types of requests.
#[derive(Clone, Debug)]
pub(crate) struct MigPacking {
    kinds: Vec<MigType>,
    /// Units of each type.
    units: Vec<f64>,
    classes: Vec<Patterns>,
}

#[derive(Clone, Debug)]
struct Patterns {
    gpus: f64,
    profiles: usize,
    patterns: Vec<Vec<u32>>,
}

impl MigPacking {
    /// Of these numbers of GPUs per class.
    pub(crate) fn of(classes: &[MigClass], gpus: &[usize], kinds: &[MigType]) -> Self {
        let units = kinds.iter().map(|kind| f64::from(kind.units(classes).unwrap_or(0)));
        let patterns = classes.iter().zip(gpus).map(|(class, gpus)| Patterns {
            gpus: *gpus as f64,
            profiles: class.layouts().profiles().count(),
            patterns: fill_patterns(class.layouts()),
        });
        Self { units: units.collect(), kinds: kinds.to_vec(), classes: patterns.collect() }
    }

    /// Units of each type, of memory.
    pub(crate) fn units(&self) -> &[f64] {
        &self.units
    }

    /// The most units that fit of these numbers of requests per type.
    pub(crate) fn most_units(&self, counts: &[f64]) -> f64 {
        let mut program = LinearProgram::default();
        let mut of_kind = Vec::new();
        for ((kind, units), count) in self.kinds.iter().zip(&self.units).zip(counts) {
            // what does not come has no place in the program
            let accepted = kind.accepted().filter(|_| *count > 0.0);
            let columns: Vec<usize> = accepted.map(|_| program.variable(*units, *count)).collect();
            if *count > 0.0 {
                let terms = columns.iter().map(|column| (*column, 1.0)).collect();
                program.row(terms, Limit::AtMost, *count);
            }
            of_kind.push(columns);
        }
        self.limit(&mut program, &of_kind);
        maximum(program)
    }

    /// Whether all these requests fit.
    pub(crate) fn holds(&self, counts: &[f64]) -> bool {
        let all: f64 = self.units.iter().zip(counts).map(|(units, count)| units * count).sum();
        self.most_units(counts) >= all - NOTHING
    }

    /// The most requests that fit if the types have these parts of them: load 1.0.
    pub(crate) fn most_requests(&self, parts: &[f64]) -> f64 {
        let mut program = LinearProgram::default();
        let most: f64 = self.classes.iter().map(|class| class.gpus * 16.0).sum();
        let all = program.variable(1.0, most);
        let mut of_kind = Vec::new();
        for (kind, part) in self.kinds.iter().zip(parts) {
            let columns: Vec<usize> =
                kind.accepted().map(|_| program.variable(0.0, most)).collect();
            let terms = columns.iter().map(|column| (*column, -1.0)).chain([(all, *part)]);
            program.row(terms.collect(), Limit::AtMost, 0.0);
            of_kind.push(columns);
        }
        self.limit(&mut program, &of_kind);
        maximum(program)
    }

    /// The rows of the GPUs: what is put on a class has room in its patterns.
    fn limit(&self, program: &mut LinearProgram, of_kind: &[Vec<usize>]) {
        for (id, class) in self.classes.iter().enumerate() {
            let filled: Vec<usize> =
                class.patterns.iter().map(|_| program.variable(0.0, class.gpus)).collect();
            for at in 0..class.profiles {
                let room = filled.iter().zip(&class.patterns);
                let room = room.map(|(column, pattern)| (*column, -f64::from(pattern[at])));
                let mut terms: Vec<(usize, f64)> = room.collect();
                for (kind, columns) in self.kinds.iter().zip(of_kind) {
                    let put = kind.accepted().zip(columns);
                    let put =
                        put.filter(|((on, profile), _)| on.0 == id && profile.position() == at);
                    terms.extend(put.map(|(_, column)| (*column, 1.0)));
                }
                program.row(terms, Limit::AtMost, 0.0);
            }
            let terms = filled.into_iter().map(|column| (column, 1.0)).collect();
            program.row(terms, Limit::AtMost, class.gpus);
        }
    }
}

/// The maximum of a program that holds nothing, at least.
fn maximum(program: LinearProgram) -> f64 {
    program.maximum().expect("these programs are bounded, and small")
}

/// How many instances of each profile a GPU has when none can be added; patterns that are part of another
/// one are left out.
fn fill_patterns(layouts: &Layouts) -> Vec<Vec<u32>> {
    let profiles = layouts.profiles().count();
    let mut seen = BTreeSet::new();
    let mut new = vec![(LayoutId::EMPTY, vec![0; profiles])];
    let mut found = BTreeSet::new();
    while let Some((layout, pattern)) = new.pop() {
        let mut is_full = true;
        for profile in layouts.profiles() {
            for (_, with) in layouts.starts(layout, profile) {
                is_full = false;
                let mut more = pattern.clone();
                more[profile.position()] += 1;
                if seen.insert((with, more.clone())) {
                    new.push((with, more));
                }
            }
        }
        if is_full {
            found.insert(pattern);
        }
    }
    // Each is part of itself.
    let whole =
        found.iter().filter(|own| found.iter().filter(|other| is_part(own, other)).count() == 1);
    whole.cloned().collect()
}

/// Whether a pattern has no more of anything than another one.
fn is_part(pattern: &[u32], other: &[u32]) -> bool {
    pattern.iter().zip(other).all(|(own, all)| own <= all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mig::mig_worlds::MIXES;
    use engine::hardware::mig::GEOMETRIES;

    fn packing(gpus: usize) -> MigPacking {
        let classes = [MigClass::new(&GEOMETRIES[2]).unwrap()];
        let kinds = classes[0].layouts().profiles().map(|profile| MigType::new([Some(profile)]));
        let kinds: Vec<MigType> = kinds.collect();
        MigPacking::of(&classes, &[gpus], &kinds)
    }

    #[test]
    fn eight_units_have_28_fill_patterns() {
        let patterns = &packing(1).classes[0].patterns;
        assert_eq!(patterns.len(), 28);
        assert!(patterns.contains(&vec![0, 0, 0, 0, 0, 1]));
        assert!(patterns.contains(&vec![0, 0, 0, 2, 0, 0]));
        assert!(patterns.contains(&vec![7, 0, 0, 0, 0, 0]), "the eighth unit is wasted");
        assert!(patterns.contains(&vec![6, 1, 0, 0, 0, 0]), "or used by the last one");
        assert!(!patterns.contains(&vec![5, 1, 0, 0, 0, 0]), "one more can be added");
    }

    #[test]
    fn the_mixes_can_be_held_at_the_rates_of_the_design() {
        let jobs = [2.286, 3.636, 1.720, 2.154, 2.540, 1.928, 3.182, 3.721, 2.759];
        for ((name, weights), expected) in MIXES.iter().zip(jobs) {
            let all: u32 = weights.iter().sum();
            let parts = weights.map(|weight| f64::from(weight) / f64::from(all));
            let found = packing(1).most_requests(&parts);
            assert!((found - expected).abs() < 0.000_51, "{name}: {found}, not {expected}");
        }
    }

    #[test]
    fn the_most_units_are_those_of_the_best_packing() {
        let two = packing(2);
        for (counts, units) in [
            ([0, 0, 0, 0, 0, 3], 16.0),
            ([0, 0, 0, 3, 1, 0], 16.0),
            ([0, 0, 0, 0, 2, 1], 8.0 + 4.0),
            ([14, 0, 0, 0, 0, 0], 14.0),
            ([15, 0, 0, 0, 0, 0], 14.0),
            ([0, 1, 0, 0, 0, 2], 16.0),
            ([0, 0, 7, 0, 0, 0], 12.0),
        ] {
            let found = two.most_units(&counts.map(f64::from));
            assert!((found - units).abs() < 1e-5, "{counts:?}: {found}, not {units}");
        }
        assert!(two.holds(&[14.0, 0.0, 0.0, 0.0, 0.0, 0.0]));
        assert!(!two.holds(&[15.0, 0.0, 0.0, 0.0, 0.0, 0.0]));
    }
}
