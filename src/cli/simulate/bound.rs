//! The output of `gpupack simulate --bound`: per seed, how much any policy could have allocated.

use serde::Serialize;

use crate::cli::simulate::figures::{mean, rounded};
use crate::sim::bound::upper_bound::{Bound, Bounds};

/// The bounds of each seed, in the order of the seeds.
#[derive(Debug, Default)]
pub(crate) struct SeedBounds(pub(crate) Vec<(i64, Bounds)>);

/// One of the bounds: its name in a table, its name elsewhere, and its field.
type Kind = (&'static str, &'static str, fn(&Bounds) -> Bound);

/// Both bounds, the one that always holds first.
const KINDS: [Kind; 2] = [
    ("≤ any policy", "bound_any", |bounds| bounds.any),
    ("≤ faithful policy", "bound_faithful", |bounds| bounds.faithful),
];

/// The meaning of the bounds.
pub(crate) const LEGEND: &str = "\
≤ any policy     what no policy exceeds, even one that knows all arrivals, refuses pods and moves others
≤ faithful       the same for policies that lose no pod that arrived before FGD lost its first one
";

/// A bound in JSON: the mean over the seeds, then each of them, in percent.
#[derive(Serialize)]
pub(crate) struct JsonBound {
    at_100: Option<f64>,
    last: Option<f64>,
    runs: Vec<JsonSeed>,
}

#[derive(Serialize)]
struct JsonSeed {
    seed: i64,
    at_100: Option<f64>,
    last: f64,
}

/// Both bounds in JSON.
#[derive(Serialize)]
pub(crate) struct JsonBounds {
    any: JsonBound,
    faithful: JsonBound,
}

impl SeedBounds {
    /// Rows of a table: name, at 100 %, at the end. Empty without `--bound`.
    pub(crate) fn rows(&self) -> Vec<[String; 3]> {
        let cell = |values: Vec<f64>| {
            mean(&values).map_or_else(|| "-".to_owned(), |mean| format!("{mean:.2}"))
        };
        let row = |(name, _, of): Kind| {
            let at_100 = self.0.iter().filter_map(|(_, bounds)| of(bounds).at_100);
            let last = self.0.iter().map(|(_, bounds)| of(bounds).last);
            [name.to_owned(), cell(at_100.collect()), cell(last.collect())]
        };
        KINDS.into_iter().filter(|_| !self.0.is_empty()).map(row).collect()
    }

    /// Rows of a CSV file: name, seed, at 100 %, at the end.
    pub(crate) fn csv_rows(&self) -> Vec<String> {
        let row = |(seed, bounds): &(i64, Bounds), (_, name, of): Kind| {
            let Bound { at_100, last } = of(bounds);
            let at_100 = at_100.map(|value| value.to_string()).unwrap_or_default();
            format!("{name},{seed},{at_100},{last}")
        };
        KINDS.iter().flat_map(|kind| self.0.iter().map(|seed| row(seed, *kind))).collect()
    }

    /// Both bounds; `None` without `--bound`.
    pub(crate) fn json(&self) -> Option<JsonBounds> {
        let bound = |(_, _, of): Kind| {
            let runs: Vec<JsonSeed> = self
                .0
                .iter()
                .map(|(seed, bounds)| {
                    let Bound { at_100, last } = of(bounds);
                    JsonSeed { seed: *seed, at_100, last }
                })
                .collect();
            let at_100: Vec<f64> = runs.iter().filter_map(|run| run.at_100).collect();
            let last: Vec<f64> = runs.iter().map(|run| run.last).collect();
            JsonBound { at_100: mean(&at_100).map(rounded), last: mean(&last).map(rounded), runs }
        };
        let [any, faithful] = KINDS;
        (!self.0.is_empty()).then(|| JsonBounds { any: bound(any), faithful: bound(faithful) })
    }
}
