//! How much of a cluster any policy could allocate: upper bounds to compare results with.
//!
//! This module knows no policy. The caller says where a policy first lost a pod, for the second
//! bound.

use engine::model::request::Isolation;
use sim::run::curve::{FULL_LOAD, column_of};
use sim::trace::dimensions::MoreOfNode;
use sim::trace::read::{TraceNode, TracePod};
use sim::trace::workload::Workload;

use crate::bound::relaxation::most_allocated;
use crate::lp::LpError;

/// Allocation in percent of the cluster's GPUs, rounded up to hundredths, so no figure of a
/// [`sim::run::curve::Curve`] that the bound holds for is above it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// At 100 % arrived load, at its upper end of 100.5 %; `None` if the load ends before.
    pub at_100: Option<f64>,
    /// After the last arrival.
    pub last: f64,
}

/// Both bounds of a workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Holds for every policy: it may know all arrivals, refuse any pod and move pods for free.
    pub any: Bound,
    /// Holds for a policy that loses no pod before the caller's first lost one. It, too, may know
    /// all arrivals and move pods.
    pub faithful: Bound,
}

/// Why there is no bound.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BoundError {
    /// Requests or nodes that the linear program does not know.
    #[error(
        "the bounds know whole GPUs and shares of one GPU only: `{what}` has more in its optional \
         columns"
    )]
    Dimensions {
        /// The pod or node.
        what: String,
    },
    /// The pods that must be placed do not fit.
    #[error(
        "the first `{forced}` arrivals cannot all be placed, so every policy has lost some of them"
    )]
    Forced {
        /// How many pods.
        forced: usize,
    },
    /// The solver did not find the bound.
    #[error("no bound is proven: {fault}")]
    Unsolved {
        /// What the solver reports.
        fault: String,
    },
}

/// The bounds of `workload`. `first_lost` is the position, from 0, of the first arrival that a
/// policy to compare with lost ([`sim::run::replay::Run::first_lost`]); `None` if it lost
/// none.
///
/// # Errors
/// Any [`BoundError`]: a number that is not proven is never returned.
pub fn bounds(workload: &Workload, first_lost: Option<usize>) -> Result<Bounds, BoundError> {
    if let Some(what) = beyond(workload) {
        return Err(BoundError::Dimensions { what });
    }
    let arrivals = workload.arrivals.len();
    let kept = first_lost.unwrap_or(arrivals).min(arrivals);
    Ok(Bounds { any: bound(workload, 0)?, faithful: bound(workload, kept)? })
}

/// A pod or node whose rules the linear program does not know.
fn beyond(workload: &Workload) -> Option<String> {
    let pod = workload.arrivals.iter().find(|pod| is_beyond(pod)).map(|pod| pod.name.clone());
    pod.or_else(|| {
        workload.nodes.iter().find(|node| is_divided(node)).map(|node| node.name.clone())
    })
}

fn is_beyond(pod: &TracePod) -> bool {
    let is_part_of_several = pod.num_gpu > 1 && pod.gpu_milli < 1000;
    let is_more = pod.more.as_deref().is_some_and(|more| {
        more.amount.is_some() || more.isolation != Isolation::None || more.placed.is_some()
    });
    is_part_of_several || is_more
}

fn is_divided(node: &TraceNode) -> bool {
    node.more.as_deref().is_some_and(|more| {
        // Memory of GPUs alone changes nothing: pods request shares of it.
        let gpu_memory = more.gpu_memory.clone();
        *more != MoreOfNode { gpu_memory, ..MoreOfNode::default() }
    })
}

/// The bound for policies that place all of the first `forced` arrivals.
fn bound(workload: &Workload, forced: usize) -> Result<Bound, BoundError> {
    let capacity = workload.capacity_milli();
    let percent_at = |arrived: usize| {
        let forced = forced.min(arrived);
        match most_allocated(&workload.nodes, &workload.arrivals[..arrived], forced) {
            Ok(milli) => Ok(percent_up(milli, capacity)),
            Err(LpError::Infeasible) => Err(BoundError::Forced { forced }),
            Err(fault @ (LpError::Unsolved(_) | LpError::Gap { .. })) => {
                Err(BoundError::Unsolved { fault: fault.to_string() })
            }
        }
    };
    Ok(Bound {
        at_100: arrivals_at_100(workload).map(percent_at).transpose()?,
        last: percent_at(workload.arrivals.len())?,
    })
}

/// How many pods have arrived at the end of the column of 100 % load, or before the pod that jumps
/// over it; `None` if the load ends before.
fn arrivals_at_100(workload: &Workload) -> Option<usize> {
    let capacity = workload.capacity_milli();
    let mut arrived_milli = 0;
    let columns = workload.arrivals.iter().map(|pod| {
        arrived_milli += pod.demand_milli();
        column_of(arrived_milli, capacity)
    });
    let columns: Vec<u64> = columns.collect();
    columns.last().filter(|column| **column >= FULL_LOAD)?;
    Some(columns.partition_point(|column| *column <= FULL_LOAD))
}

/// `milli` in percent of `capacity`, rounded up to hundredths; zero without capacity.
fn percent_up(milli: u64, capacity: u64) -> f64 {
    if capacity == 0 {
        return 0.0;
    }
    (milli * 10_000).div_ceil(capacity) as f64 / 100.0
}

#[cfg(test)]
mod tests;
