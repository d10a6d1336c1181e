//! A linear program over bounded variables, and a bound on its maximum that holds whatever the
//! solver returns.
//!
//! What the solver (`microlp`, a simplex method) says of rows and variables is only a proposal. By weak
//! duality *any* prices of the rows, not negative for rows that are limits from above, give
//! `maximum <= sum of price * limit + sum over the variables of max(0, value - priced use) * upper`
//! (Neumaier and Shcherbina, "Safe bounds in linear and mixed-integer linear programming", 2004).
//! This module computes that sum. A bad solution makes the bound loose, never wrong; one that is
//! looser than [`GAP_MAX`] is an error. The solver returns no prices, so they are the solution of a second
//! program: the one whose minimum is the least such sum.

use microlp::{ComparisonOp, Error, OptimizationDirection, Problem, Variable};

/// Largest accepted distance between what the solver reached and what is proven, as a part of the
/// proven maximum: a hundredth of the 0.01 points that results are rounded to.
const GAP_MAX: f64 = 1e-6;

/// Such a distance that is always accepted: too small to matter if the maximum is near zero.
const GAP_FLOOR: f64 = 1e-6;

/// Maximizes a sum over variables between zero and an upper limit.
#[derive(Debug, Default)]
pub(crate) struct LinearProgram {
    /// Value of each variable, and its upper limit.
    variables: Vec<(f64, f64)>,
    rows: Vec<LimitedSum>,
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
struct LimitedSum {
    limit: Limit,
    at: f64,
    /// Variables and their factors; none twice.
    terms: Vec<(usize, f64)>,
}

impl LimitedSum {
    fn allows_zero(&self) -> bool {
        match self.limit {
            Limit::Exactly => self.at == 0.0,
            Limit::AtMost => self.at >= 0.0,
        }
    }
}

/// Why the maximum is not known.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum LpError {
    /// No values satisfy all rows.
    #[error("the limits contradict each other")]
    Infeasible,
    /// The solver gave up.
    #[error("the solver ended with `{0}`")]
    Unsolved(String),
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

    pub(crate) fn row(&mut self, terms: Vec<(usize, f64)>, limit: Limit, at: f64) {
        self.rows.push(LimitedSum { limit, at, terms });
    }

    /// A number that the sum cannot exceed, within [`GAP_MAX`] of what it can reach.
    ///
    /// # Errors
    /// Any [`LpError`].
    pub(crate) fn maximum(mut self) -> Result<f64, LpError> {
        if self.rows.iter().any(|row| row.terms.is_empty() && !row.allows_zero()) {
            return Err(LpError::Infeasible);
        }
        self.rows.retain(|row| !row.terms.is_empty());
        if self.variables.is_empty() {
            return Ok(0.0);
        }
        let (reached, proven) = (self.reached()?, self.proven(&self.prices()?));
        let allowed = (proven.abs() * GAP_MAX).max(GAP_FLOOR);
        // A comparison with NaN is false as well.
        if (proven - reached).abs() <= allowed {
            return Ok(proven);
        }
        Err(LpError::Gap { reached, proven })
    }

    /// The maximum that the solver finds.
    fn reached(&self) -> Result<f64, LpError> {
        let mut problem = Problem::new(OptimizationDirection::Maximize);
        let variables = self.variables.iter();
        let variables: Vec<Variable> =
            variables.map(|(value, upper)| problem.add_var(*value, (0.0, *upper))).collect();
        for row in &self.rows {
            let terms = row.terms.iter().map(|(variable, factor)| (variables[*variable], *factor));
            let limit = match row.limit {
                Limit::Exactly => ComparisonOp::Eq,
                Limit::AtMost => ComparisonOp::Le,
            };
            problem.add_constraint(terms.collect::<Vec<_>>(), limit, row.at);
        }
        let (objective, _) = solved(&problem, &[])?;
        Ok(objective)
    }

    /// The prices of the rows that prove most.
    fn prices(&self) -> Result<Vec<f64>, LpError> {
        let mut problem = Problem::new(OptimizationDirection::Minimize);
        let prices = self.rows.iter().map(|row| {
            let least = match row.limit {
                Limit::Exactly => f64::NEG_INFINITY,
                Limit::AtMost => 0.0,
            };
            problem.add_var(row.at, (least, f64::INFINITY))
        });
        let prices: Vec<Variable> = prices.collect();
        let mut uses: Vec<Vec<(Variable, f64)>> = vec![Vec::new(); self.variables.len()];
        for (row, price) in self.rows.iter().zip(&prices) {
            for (variable, factor) in &row.terms {
                uses[*variable].push((*price, *factor));
            }
        }
        for ((value, upper), mut uses) in self.variables.iter().zip(uses) {
            uses.push((problem.add_var(*upper, (0.0, f64::INFINITY)), 1.0));
            problem.add_constraint(uses, ComparisonOp::Ge, *value);
        }
        Ok(solved(&problem, &prices)?.1)
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

/// The optimum, and the values of these variables there.
fn solved(problem: &Problem, wanted: &[Variable]) -> Result<(f64, Vec<f64>), LpError> {
    let solution = match problem.solve() {
        Err(Error::Infeasible) => return Err(LpError::Infeasible),
        Err(error) => return Err(LpError::Unsolved(error.to_string())),
        Ok(outcome) => outcome.into_solution(),
    };
    let solution = solution.map_err(|_| LpError::Unsolved("no optimum".to_owned()))?;
    let values = wanted.iter().map(|variable| solution.var_value(*variable));
    Ok((solution.objective(), values.collect()))
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
        assert!(matches!(odd.maximum(), Err(LpError::Unsolved(_) | LpError::Gap { .. })));
    }
}
