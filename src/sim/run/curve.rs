//! Allocation against arrived load, computed as in the FGD paper (USENIX ATC'23, "Beware of
//! Fragmentation"), so that the figures compare.
//!
//! After every arrival, lost or not, there is a point: x is the GPU share that has arrived so far,
//! y the GPU share that is allocated, both in percent of the cluster's GPUs. x is rounded to a
//! whole percent and y to two decimals, halves to the even neighbor. The value of a column x is the
//! mean of the y of its points. All numbers are whole, except the means.

use std::collections::BTreeMap;

/// The load at which the paper compares policies, in percent.
pub const FULL_LOAD: u64 = 100;

/// The points of one replay, summed per column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Curve {
    capacity_milli: u64,
    arrived_milli: u64,
    last: u64,
    columns: BTreeMap<u64, Column>,
}

/// The points of one column. `y` is in hundredths of a percent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Column {
    points: u64,
    y_sum: u64,
    y_last: u64,
}

impl Curve {
    /// A curve without points for a cluster with `capacity_milli` thousandths of a GPU. A cluster
    /// without GPUs is always at zero.
    #[must_use]
    pub fn new(capacity_milli: u64) -> Self {
        Self { capacity_milli, arrived_milli: 0, last: 0, columns: BTreeMap::new() }
    }

    /// Notes an arrival of `demand_milli`, after which `used_milli` is allocated; both in
    /// thousandths of a GPU.
    pub fn arrive(&mut self, demand_milli: u64, used_milli: u64) {
        self.arrived_milli += demand_milli;
        let x = column_of(self.arrived_milli, self.capacity_milli);
        self.last = rounded_ratio(used_milli, 10_000, self.capacity_milli);
        let column = self.columns.entry(x).or_default();
        column.points += 1;
        column.y_sum += self.last;
        column.y_last = self.last;
    }

    /// Load that has arrived, in whole percent rounded down.
    #[must_use]
    pub fn percent_arrived(&self) -> u64 {
        (self.arrived_milli * 100).checked_div(self.capacity_milli).unwrap_or(0)
    }

    /// Each column that has points, as (x, mean y), both in percent.
    #[must_use]
    pub fn columns(&self) -> Vec<(u64, f64)> {
        self.columns.iter().map(|(x, column)| (*x, column.mean())).collect()
    }

    /// Allocation at 100 % arrived load, in percent; `None` if the load ends before.
    ///
    /// If a large pod jumps over the column, it is that of the point before.
    #[must_use]
    pub fn at_100(&self) -> Option<f64> {
        let reached = self.columns.range(FULL_LOAD..).next()?;
        if *reached.0 == FULL_LOAD {
            return Some(reached.1.mean());
        }
        let before = self.columns.range(..FULL_LOAD).next_back();
        Some(before.map_or(0.0, |(_, column)| hundredths(column.y_last)))
    }

    /// Allocation after the last arrival, in percent; zero without any.
    #[must_use]
    pub fn last(&self) -> f64 {
        hundredths(self.last)
    }
}

impl Column {
    fn mean(self) -> f64 {
        self.y_sum as f64 / self.points.max(1) as f64 / 100.0
    }
}

/// The column of a load: whole percent of the capacity, both in thousandths of a GPU.
pub fn column_of(arrived_milli: u64, capacity_milli: u64) -> u64 {
    rounded_ratio(arrived_milli, 100, capacity_milli)
}

fn hundredths(value: u64) -> f64 {
    value as f64 / 100.0
}

/// `part * unit / whole`, rounded half to even; zero if `whole` is zero.
fn rounded_ratio(part: u64, unit: u64, whole: u64) -> u64 {
    let scaled = part * unit;
    let Some(down) = scaled.checked_div(whole) else { return 0 };
    let rest = scaled % whole;
    let is_up = match (rest * 2).cmp(&whole) {
        std::cmp::Ordering::Less => false,
        std::cmp::Ordering::Equal => down % 2 == 1,
        std::cmp::Ordering::Greater => true,
    };
    down + u64::from(is_up)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_round_to_even() {
        for (part, unit, whole, expected) in
            [(1, 100, 200, 0), (3, 100, 200, 2), (5, 100, 200, 2), (7, 100, 200, 4), (2, 1, 3, 1)]
        {
            assert_eq!(rounded_ratio(part, unit, whole), expected, "{part} * {unit} / {whole}");
        }
        assert_eq!(rounded_ratio(5, 100, 0), 0);
    }

    /// Two GPUs. By hand: 1990 of 2000 arrived is 99.5 %, which goes to column 100 (99 is odd), as
    /// does 100.5 % with 2010; 2011 goes to 101.
    #[test]
    fn a_column_is_the_mean_of_the_arrivals_in_it() {
        let mut curve = Curve::new(2000);
        curve.arrive(1000, 1000); // 50 %, 50.00
        curve.arrive(990, 1990); // 99.5 % -> 100, 99.50
        curve.arrive(0, 1990); // CPU only: a point as well, 99.50
        curve.arrive(20, 1990); // 100.5 % -> 100, lost, 99.50
        curve.arrive(1, 1991); // 100.55 % -> 101, 99.55
        assert_eq!(curve.columns(), [(50, 50.0), (100, 99.5), (101, 99.55)]);
        assert_eq!((curve.at_100(), curve.last()), (Some(99.5), 99.55));
        assert_eq!(curve.percent_arrived(), 100);
        let mut uneven = Curve::new(2000);
        uneven.arrive(2000, 1000);
        uneven.arrive(1, 1001);
        uneven.arrive(1, 1001);
        // 50.00, 50.05 and 50.05
        assert!((uneven.at_100().unwrap() - 150.1 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn a_skipped_column_has_the_allocation_of_the_previous_one() {
        let mut curve = Curve::new(2000);
        assert_eq!((curve.at_100(), curve.last()), (None, 0.0));
        curve.arrive(1900, 1900);
        assert_eq!(curve.at_100(), None);
        curve.arrive(2000, 1900);
        assert_eq!(curve.at_100(), Some(95.0));
        let mut at_once = Curve::new(1000);
        at_once.arrive(2000, 0);
        assert_eq!(at_once.at_100(), Some(0.0));
    }

    #[test]
    fn a_cluster_without_gpus_stays_at_zero() {
        let mut curve = Curve::new(0);
        curve.arrive(1000, 0);
        assert_eq!((curve.at_100(), curve.last(), curve.percent_arrived()), (None, 0.0, 0));
        assert_eq!(curve.columns(), [(0, 0.0)]);
    }
}
