//! Figures over several seeds: means, standard deviations, and differences seed by seed.

use std::cmp::Ordering;

use serde::Serialize;

use wire::units::Share;

/// The difference between two policies, seed by seed, for the same pods.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Paired {
    pub(crate) mean: f64,
    /// Its standard deviation over the seeds; `None` for a single seed.
    pub(crate) sd: Option<f64>,
    /// Seeds with the better figure.
    pub(crate) wins: usize,
    pub(crate) seeds: usize,
}

impl Paired {
    /// `ours` less `theirs`, in the order of the seeds; a better figure is `better` than the other.
    /// `None` if no seed has both.
    pub(crate) fn of(
        ours: &[Option<f64>],
        theirs: &[Option<f64>],
        better: Ordering,
    ) -> Option<Self> {
        let both = ours.iter().zip(theirs).filter_map(|(ours, theirs)| Some((*ours)? - (*theirs)?));
        let differences: Vec<f64> = both.map(rounded).collect();
        let wins = differences.iter().filter(|off| off.total_cmp(&0.0) == better);
        Some(Self {
            mean: rounded(mean(&differences)?),
            sd: deviation(&differences),
            wins: wins.count(),
            seeds: differences.len(),
        })
    }

    /// Mean with sign and, for several seeds, standard deviation.
    pub(crate) fn cell(self, digits: usize) -> String {
        let mean = self.mean;
        match self.sd {
            None => format!("{mean:+.digits$}"),
            Some(sd) => format!("{mean:+.digits$} ± {sd:.digits$}"),
        }
    }

    /// Number of seeds won, of all.
    pub(crate) fn won(self) -> String {
        format!("{}/{}", self.wins, self.seeds)
    }

    /// Both cells of a row.
    pub(crate) fn cells(paired: Option<Self>) -> [String; 2] {
        match paired {
            Some(paired) => [paired.cell(2), paired.won()],
            None => ["-", "-"].map(str::to_owned),
        }
    }
}

/// A share in percent, to four decimals, which is all it has.
pub fn percent(share: Share) -> f64 {
    share.millionths() as f64 / 10_000.0
}

/// `part` of `whole` in percent, to four decimals; zero if `whole` is zero.
pub fn percent_of(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { rounded(part as f64 * 100.0 / whole as f64) }
}

/// To four decimals: enough to compare, without noise of floating point.
pub fn rounded(value: f64) -> f64 {
    let rounded = (value * 10_000.0).round() / 10_000.0;
    if rounded == 0.0 { 0.0 } else { rounded } // never -0
}

/// The mean; `None` for no values.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The standard deviation of a sample; `None` for less than two values.
pub(crate) fn deviation(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|_| values.len() > 1)?;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some(rounded((squares / (values.len() - 1) as f64).sqrt()))
}

/// Mean and, for several values, standard deviation.
pub(crate) fn cell(values: &[f64], digits: usize) -> String {
    match (mean(values), deviation(values)) {
        (None, _) => "-".to_owned(),
        (Some(mean), None) => format!("{mean:.digits$}"),
        (Some(mean), Some(sd)) => format!("{mean:.digits$} ± {sd:.digits$}"),
    }
}

/// The mean alone.
pub fn mean_cell(values: &[f64], digits: usize) -> String {
    mean(values).map_or_else(|| "-".to_owned(), |mean| format!("{mean:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_computed_per_seed() {
        let ours = [Some(96.0), Some(96.5), None, Some(95.0)];
        let theirs = [Some(95.0), Some(95.0), Some(1.0), Some(95.0)];
        let paired = Paired::of(&ours, &theirs, Ordering::Greater).unwrap();
        assert_eq!((paired.wins, paired.seeds), (2, 3));
        assert_eq!((paired.cell(2), paired.won()), ("+0.83 ± 0.76".to_owned(), "2/3".to_owned()));
        let lower = Paired::of(&theirs, &ours, Ordering::Less).unwrap();
        assert_eq!((lower.cell(1), lower.wins), ("-0.8 ± 0.8".to_owned(), 2));
        let one = Paired::of(&ours[..1], &theirs[..1], Ordering::Less).unwrap();
        assert_eq!((one.cell(2), one.won()), ("+1.00".to_owned(), "0/1".to_owned()));
        assert_eq!(Paired::of(&[None], &[Some(1.0)], Ordering::Less), None);
        assert_eq!(Paired::of(&[], &[], Ordering::Less), None);
    }

    #[test]
    fn an_empty_figure_differs_from_zero() {
        assert_eq!((cell(&[], 2), cell(&[1.0], 2)), ("-".to_owned(), "1.00".to_owned()));
        assert_eq!(cell(&[1.0, 2.0], 1), "1.5 ± 0.7");
        assert_eq!(mean_cell(&[1.0, 2.0], 1), "1.5");
        assert_eq!((percent_of(1, 3), percent_of(1, 0)), (33.3333, 0.0));
        assert_eq!(rounded(-0.000_01).to_string(), "0");
    }
}
