//! A small linear program by the simplex method, and a bound on its maximum that holds whatever the
//! arithmetic did.
//!
//! `maximize c x, A x <= b, x >= 0` where no `b` is negative, so that all zeros are a start. The programs
//! of this module have some fifty variables and are solved thousands of times; the interior-point solver of
//! `--features bound` is made for large ones. As there, the result is computed again from the prices of the
//! rows, by weak duality, so errors of rounding make it loose, never wrong.

/// Most accepted distance between what was reached and what is proven, as a part of the former.
const GAP_MAX: f64 = 1e-7;

/// Numbers closer to zero are zero.
const NOTHING: f64 = 1e-9;

/// Steps after which the order of columns decides, so that no cycle lasts.
const STEPS_BY_VALUE: usize = 200;

/// Steps after which the program is given up.
const STEPS_MAX: usize = 10_000;

/// A linear program.
#[derive(Clone, Debug, Default)]
pub(crate) struct Program {
    /// Value of each variable, and an upper limit that the rows imply.
    columns: Vec<(f64, f64)>,
    /// Variables with their factors, and the limit of their sum.
    rows: Vec<(Vec<(usize, f64)>, f64)>,
}

impl Program {
    /// Adds a variable that counts `value`. `most` is a number that the rows do not let it exceed.
    pub(crate) fn column(&mut self, value: f64, most: f64) -> usize {
        self.columns.push((value, most));
        self.columns.len() - 1
    }

    /// Adds a limit from above, zero or more.
    pub(crate) fn row(&mut self, terms: Vec<(usize, f64)>, limit: f64) {
        self.rows.push((terms, limit));
    }

    /// The maximum, rounded up by 10⁻⁷ of it at most.
    ///
    /// # Panics
    /// If the method does not end, or ends where nothing is proven: rows that contradict `most`.
    pub(crate) fn maximum(&self) -> f64 {
        let (columns, rows) = (self.columns.len(), self.rows.len());
        let width = columns + rows + 1;
        let mut table = vec![0.0; (rows + 1) * width];
        for (at, (terms, limit)) in self.rows.iter().enumerate() {
            let row = &mut table[at * width..][..width];
            terms.iter().for_each(|(column, factor)| row[*column] += factor);
            row[columns + at] = 1.0;
            row[width - 1] = *limit;
        }
        for (at, (value, _)) in self.columns.iter().enumerate() {
            table[rows * width + at] = -value;
        }
        for step in 0..STEPS_MAX {
            let Some(column) = entering(&table[rows * width..][..width - 1], step) else { break };
            let Some(row) = leaving(&table, (rows, width), column) else { break };
            pivot(&mut table, width, (row, column));
        }
        let reached = table[rows * width + width - 1];
        let proven = self.proven(&table[rows * width + columns..][..rows]);
        assert!(
            proven - reached <= GAP_MAX * reached.max(1.0),
            "the program reached {reached}, but {proven} is proven"
        );
        proven
    }

    /// `sum of price * limit + sum of max(0, value - priced use) * most`, at any prices.
    fn proven(&self, prices: &[f64]) -> f64 {
        let mut left: Vec<f64> = self.columns.iter().map(|(value, _)| *value).collect();
        let mut sum = 0.0;
        for ((terms, limit), price) in self.rows.iter().zip(prices) {
            let price = price.max(0.0);
            sum += price * limit;
            terms.iter().for_each(|(column, factor)| left[*column] -= price * factor);
        }
        let rest = left.iter().zip(&self.columns).map(|(left, (_, most))| left.max(0.0) * most);
        sum + rest.sum::<f64>()
    }
}

/// The variable that gains most, later the first that gains; `None` at the maximum.
fn entering(values: &[f64], step: usize) -> Option<usize> {
    let mut gains = values.iter().enumerate().filter(|(_, value)| **value < -NOTHING);
    if step >= STEPS_BY_VALUE {
        return gains.next().map(|(column, _)| column);
    }
    gains.min_by(|a, b| a.1.total_cmp(b.1)).map(|(column, _)| column)
}

/// The row that limits the variable first; `None` if none does.
fn leaving(table: &[f64], (rows, width): (usize, usize), column: usize) -> Option<usize> {
    let of = |row: usize, at: usize| table[row * width + at];
    let limits = (0..rows).filter(|row| of(*row, column) > NOTHING);
    limits.min_by(|a, b| {
        let at = |row: usize| of(row, width - 1) / of(row, column);
        at(*a).total_cmp(&at(*b))
    })
}

fn pivot(table: &mut [f64], width: usize, (row, column): (usize, usize)) {
    let by = table[row * width + column];
    table[row * width..][..width].iter_mut().for_each(|value| *value /= by);
    let own = table[row * width..][..width].to_vec();
    for (at, other) in table.chunks_exact_mut(width).enumerate() {
        let factor = other[column];
        if at != row && factor != 0.0 {
            other.iter_mut().zip(&own).for_each(|(value, own)| *value -= factor * own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two goods of values 3 and 2: at most 4 in all; the first plus 3 times the other at most 6.
    fn goods() -> Program {
        let mut program = Program::default();
        let (x, y) = (program.column(3.0, 10.0), program.column(2.0, 10.0));
        program.row(vec![(x, 1.0), (y, 1.0)], 4.0);
        program.row(vec![(x, 1.0), (y, 3.0)], 6.0);
        program
    }

    #[test]
    fn the_maximum_is_found_and_never_underestimated() {
        let near = |found: f64, expected: f64| {
            assert!((expected..expected + 1e-6).contains(&found), "{found}, not {expected}");
        };
        near(goods().maximum(), 12.0);
        let mut fewer = goods();
        fewer.row(vec![(0, 1.0)], 2.5);
        near(fewer.maximum(), 7.5 + 2.0 * 3.5 / 3.0);
        near(Program::default().maximum(), 0.0);
    }

    #[test]
    fn any_prices_give_a_bound() {
        for prices in [[0.0, 0.0], [3.0, 0.0], [-5.0, 1.0], [2.5, 0.5], [1e6, 1e6]] {
            assert!(goods().proven(&prices) >= 12.0, "{prices:?}");
        }
        assert_eq!(goods().proven(&[3.0, 0.0]), 12.0);
    }

    #[test]
    #[should_panic(expected = "is proven")]
    fn a_program_without_a_limit_has_no_maximum() {
        let mut program = Program::default();
        program.column(1.0, f64::INFINITY);
        program.maximum();
    }
}
