//! A linear program over bounded variables, and a bound on its maximum that holds whatever the
//! solver returns.
//!
//! The solver (`clarabel`, an interior-point method) ends near the optimum, not on it. So its
//! prices of the rows are only a proposal. By weak duality *any* prices, not negative for rows that
//! are limits from above, give
//! `maximum <= sum of price * limit + sum over the variables of max(0, value - priced use) * upper`
//! (Neumaier and Shcherbina, "Safe bounds in linear and mixed-integer linear programming", 2004).
//! This module computes that sum. A bad solution makes the bound loose, never wrong; one that is
//! looser than [`GAP_MAX`] is an error. That needs prices, so the solver is not `microlp`, a
//! simplex method in less code: it finds the same maxima as fast, but does not return prices.

use std::ops::Range;

use clarabel::algebra::CscMatrix;
use clarabel::solver::SupportedConeT::{NonnegativeConeT, ZeroConeT};
use clarabel::solver::{
    DefaultSettingsBuilder, DefaultSolution, DefaultSolver, IPSolver, SolverStatus,
};

/// Largest accepted distance between what the solver reached and what is proven, as a part of the
/// proven maximum: a hundredth of the 0.01 points that results are rounded to.
const GAP_MAX: f64 = 1e-6;

/// Such a distance that is always accepted: too small to matter if the maximum is near zero.
const GAP_FLOOR: f64 = 1e-6;

/// Most iterations; the public traces need 20 to 40.
const ITERATIONS_MAX: u32 = 200;

/// Maximizes a sum over variables between zero and an upper limit.
#[derive(Debug, Default)]
pub(crate) struct LinearProgram {
    /// Value of each variable, and its upper limit.
    variables: Vec<(f64, f64)>,
    rows: Vec<Row>,
}

/// How a row is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Limit {
    /// The sum equals it.
    Exactly,
    /// The sum is at most it.
    AtMost,
}

/// A limited sum.
#[derive(Debug)]
struct Row {
    limit: Limit,
    at: f64,
    /// Variables and their factors; none twice.
    terms: Vec<(usize, f64)>,
}

/// Why the maximum is not known.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum LpError {
    /// No values satisfy all rows.
    #[error("the limits contradict each other")]
    Infeasible,
    /// The solver gave up.
    #[error("the solver ended after `{iterations}` steps with `{status}`")]
    Unsolved {
        /// The solver's own status.
        status: String,
        /// Steps it made.
        iterations: u32,
    },
    /// What the solver reached and what is proven are too far apart.
    #[error("the solver reached `{reached}`, but no bound below `{proven}` is proven")]
    Gap {
        /// The sum at the solver's values.
        reached: f64,
        /// The smallest bound that is proven.
        proven: f64,
    },
}

impl LinearProgram {
    /// Adds a variable from zero to `upper` that counts `value` in the sum. Returns its position.
    pub(crate) fn variable(&mut self, value: f64, upper: f64) -> usize {
        self.variables.push((value, upper));
        self.variables.len() - 1
    }

    pub(crate) fn variables(&self) -> Range<usize> {
        0..self.variables.len()
    }

    pub(crate) fn row(&mut self, terms: Vec<(usize, f64)>, limit: Limit, at: f64) {
        self.rows.push(Row { limit, at, terms });
    }

    /// A number that the sum cannot exceed, within [`GAP_MAX`] of what it can reach.
    ///
    /// # Errors
    /// Any [`LpError`].
    pub(crate) fn maximum(mut self) -> Result<f64, LpError> {
        // The solver needs the rows of a kind together.
        self.rows.sort_by_key(|row| row.limit);
        let empty = |row: &&Row| row.terms.is_empty();
        let is_met = |row: &Row| match row.limit {
            Limit::Exactly => row.at == 0.0,
            Limit::AtMost => row.at >= 0.0,
        };
        if !self.rows.iter().filter(empty).all(is_met) {
            return Err(LpError::Infeasible);
        }
        self.rows.retain(|row| !row.terms.is_empty());
        if self.variables.is_empty() {
            return Ok(0.0);
        }
        let solution = self.solution()?;
        match solution.status {
            // The gap shows whether "almost" is good enough.
            SolverStatus::Solved | SolverStatus::AlmostSolved => {}
            SolverStatus::PrimalInfeasible => return Err(LpError::Infeasible),
            status => {
                let (status, iterations) = (format!("{status:?}"), solution.iterations);
                return Err(LpError::Unsolved { status, iterations });
            }
        }
        let (reached, proven) = (-solution.obj_val, self.proven(&solution.z));
        let allowed = (proven.abs() * GAP_MAX).max(GAP_FLOOR);
        // A comparison with NaN is false as well.
        if (proven - reached).abs() <= allowed {
            return Ok(proven);
        }
        Err(LpError::Gap { reached, proven })
    }

    /// The solver's result. Its form: minimize `q x` with `b - A x` in the cones. That a variable
    /// is not negative is a row as well.
    fn solution(&self) -> Result<DefaultSolution<f64>, LpError> {
        let (rows, columns) = (self.rows.len(), self.variables.len());
        let mut entries = (Vec::new(), Vec::new(), Vec::new());
        let signs = self.variables().map(|variable| (rows + variable, variable, -1.0));
        let terms = self.rows.iter().enumerate().flat_map(|(at, row)| {
            row.terms.iter().map(move |(variable, factor)| (at, *variable, *factor))
        });
        for (row, column, factor) in terms.chain(signs) {
            entries.0.push(row);
            entries.1.push(column);
            entries.2.push(factor);
        }
        let (rows_at, columns_at, factors) = entries;
        let a = CscMatrix::new_from_triplets(rows + columns, columns, rows_at, columns_at, factors);
        let q: Vec<f64> = self.variables.iter().map(|(value, _)| -value).collect();
        let mut b: Vec<f64> = self.rows.iter().map(|row| row.at).collect();
        b.resize(rows + columns, 0.0);
        let equal = self.rows.iter().filter(|row| row.limit == Limit::Exactly).count();
        let cones = [ZeroConeT(equal), NonnegativeConeT(rows - equal + columns)];
        let unsolved = |status: String| LpError::Unsolved { status, iterations: 0 };
        let settings = DefaultSettingsBuilder::default()
            .verbose(false)
            .max_iter(ITERATIONS_MAX)
            .build()
            .map_err(|error| unsolved(error.to_string()))?;
        let none = CscMatrix::zeros((columns, columns));
        let mut solver = DefaultSolver::new(&none, &q, &a, &b, &cones, settings)
            .map_err(|error| unsolved(error.to_string()))?;
        solver.solve();
        Ok(solver.solution)
    }

    /// The bound of the module's first paragraph at `prices`, one per row and maybe more.
    fn proven(&self, prices: &[f64]) -> f64 {
        let mut left: Vec<f64> = self.variables.iter().map(|(value, _)| *value).collect();
        let mut sum = 0.0;
        for (row, price) in self.rows.iter().zip(prices) {
            let price = match row.limit {
                Limit::Exactly => *price,
                Limit::AtMost => price.max(0.0),
            };
            sum += price * row.at;
            for (variable, factor) in &row.terms {
                left[*variable] -= price * factor;
            }
        }
        let rest = left.iter().zip(&self.variables).map(|(left, (_, upper))| left.max(0.0) * upper);
        sum + rest.sum::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two goods of values 3 and 2: at most 4 in all; the first plus 3 times the other at most 6.
    fn goods() -> LinearProgram {
        let mut lp = LinearProgram::default();
        let (x, y) = (lp.variable(3.0, 10.0), lp.variable(2.0, 10.0));
        lp.row(vec![(x, 1.0), (y, 1.0)], Limit::AtMost, 4.0);
        lp.row(vec![(x, 1.0), (y, 3.0)], Limit::AtMost, 6.0);
        lp
    }

    fn near(found: Result<f64, LpError>, expected: f64) {
        let found = found.unwrap();
        assert!((found - expected).abs() < 1e-4, "{found}, expected {expected}");
        assert!(found >= expected - 1e-9, "{found} is below {expected}");
    }

    #[test]
    fn the_maximum_is_found_and_never_underestimated() {
        near(goods().maximum(), 12.0);
        let mut exact = goods();
        exact.row(vec![(1, 1.0)], Limit::Exactly, 1.0);
        near(exact.maximum(), 11.0);
        near(LinearProgram::default().maximum(), 0.0);
    }

    #[test]
    fn any_prices_give_a_bound() {
        for prices in [[0.0, 0.0], [3.0, 0.0], [-5.0, 1.0], [2.5, 0.5], [1e6, 1e6]] {
            assert!(goods().proven(&prices) >= 12.0, "{prices:?}");
        }
        assert_eq!(goods().proven(&[3.0, 0.0]), 12.0);
        assert_eq!(goods().proven(&[]), 50.0, "without prices, the sum of everything");
    }

    #[test]
    fn an_infeasible_program_is_an_error() {
        let mut contradiction = goods();
        contradiction.row(vec![(0, -1.0)], Limit::AtMost, -5.0);
        assert_eq!(contradiction.maximum(), Err(LpError::Infeasible));
        let mut empty = goods();
        empty.row(Vec::new(), Limit::Exactly, 1.0);
        assert_eq!(empty.maximum(), Err(LpError::Infeasible));
        let mut odd = goods();
        odd.row(vec![(0, f64::NAN)], Limit::AtMost, 1.0);
        assert!(matches!(odd.maximum(), Err(LpError::Unsolved { .. } | LpError::Gap { .. })));
    }
}
