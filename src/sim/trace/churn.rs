//! Churn: pods drawn from a trace come at random and stay for a random time, so that the cluster is
//! as full as configured and always changes.
//!
//! Arrivals are Poisson, lifetimes exponential, as in the classical loss system (Erlang). Filling
//! an empty cluster would take several lifetimes. So it starts with as many pods as would run by
//! then: a Poisson number, each with a whole lifetime left, since exponential lifetimes have no
//! memory. They were packed without any departure, so one mean lifetime of warm-up follows; then
//! three are measured. All is drawn before anything is placed, so every policy of a seed gets the
//! same pods at the same times for the same lifetimes.

use std::num::NonZeroU64;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::trace::exponential::{MEAN_TICKS, exponential};
use crate::trace::read::{TraceNode, TracePod};
use crate::trace::schedule::{PodArrival, Schedule, TimeUnit, TimedWorkload, load_micro};
use crate::trace::workload::{ARRIVALS_MAX, WorkloadError, capacity_milli, demand_milli};

/// Mean lifetimes before figures count.
const WARM_UP: u64 = 1;
/// Mean lifetimes that are measured.
const MEASURED: u64 = 3;

/// Keeps these draws separate from those of the policy `random`, which has the same seed.
const STREAM: u64 = 1;

/// Which node wins a tie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeOrder {
    /// The seed shuffles the nodes, sorted by name.
    Shuffled,
    /// The upper one in the file.
    AsIs,
}

/// Pods drawn from `pods` that keep `load` times the GPUs of `nodes` busy on average if none is
/// lost.
///
/// # Errors
/// Any [`WorkloadError`] about the load.
pub fn churn(
    nodes: Vec<TraceNode>,
    pods: Vec<TracePod>,
    load: f64,
    order: NodeOrder,
    seed: i64,
) -> Result<TimedWorkload, WorkloadError> {
    let load_micro = load_micro(load)?;
    let capacity = capacity_milli(&nodes);
    if capacity == 0 {
        return Err(WorkloadError::NoGpus { nodes: nodes.len() });
    }
    let demand = demand_milli(&pods);
    let choices = u64::try_from(pods.len()).ok().and_then(NonZeroU64::new);
    let Some(choices) = choices.filter(|_| demand > 0) else {
        return Err(WorkloadError::NoDemand { pods: pods.len() });
    };
    // Arrivals per mean lifetime are load x capacity / mean demand.
    let per_lifetime = load_micro * u128::from(capacity) * u128::from(choices.get());
    let gap_unit = u128::from(demand) * 1_000_000;
    let expected = per_lifetime / gap_unit * u128::from(1 + WARM_UP + MEASURED);
    if expected > ARRIVALS_MAX as u128 {
        return Err(WorkloadError::TooManyArrivals { load });
    }
    let mut chance = chance_of(seed);
    let nodes = ranked(nodes, order, &mut chance);
    let window = WARM_UP * MEAN_TICKS..(WARM_UP + MEASURED) * MEAN_TICKS;
    let mut arrivals = Vec::new();
    // As many pods come within one mean lifetime as run at any time: these are the first ones.
    let (standing, end) = (u128::from(MEAN_TICKS), u128::from(MEAN_TICKS + window.end));
    // Counted in 2^-20 ticks, so that rounding does not add up.
    let mut at_fine = 0_u128;
    loop {
        at_fine += ((u128::from(exponential(&mut chance)) << 20) * gap_unit) / per_lifetime;
        let at = at_fine >> 20;
        if at >= end {
            let schedule = Schedule { arrivals, window, unit: TimeUnit::Lifetime };
            return Ok(TimedWorkload { nodes, pods, schedule });
        }
        let at = u64::try_from(at.saturating_sub(standing)).expect("no later than the end");
        let pod = index_below(choices, &mut chance);
        let stays = Some(exponential(&mut chance).max(1));
        arrivals.push(PodArrival { pod, at, stays });
    }
}

/// The nodes in tie-break order.
pub fn ranked(
    mut nodes: Vec<TraceNode>,
    order: NodeOrder,
    chance: &mut impl RngCore,
) -> Vec<TraceNode> {
    if order == NodeOrder::Shuffled {
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        for last in (1..nodes.len()).rev() {
            let choices = u64::try_from(last + 1).ok().and_then(NonZeroU64::new);
            let choices = choices.expect("at least two, and a list is no longer than 2^64");
            nodes.swap(last, index_below(choices, chance));
        }
    }
    nodes
}

/// The generator of all that `seed` decides except the policy.
pub(crate) fn chance_of(seed: i64) -> ChaCha8Rng {
    let mut chance = ChaCha8Rng::seed_from_u64(seed.cast_unsigned());
    chance.set_stream(STREAM);
    chance
}

/// A uniform number below `choices`, without bias: Lemire, "Fast Random Integer Generation in an
/// Interval" (2019).
pub fn index_below(choices: NonZeroU64, chance: &mut impl RngCore) -> usize {
    let too_few = choices.get().wrapping_neg() % choices;
    loop {
        let wide = u128::from(chance.next_u64()) * u128::from(choices.get());
        if wide & u128::from(u64::MAX) >= u128::from(too_few) {
            return usize::try_from(wide >> 64).expect("below the length of a list");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, gpus: u32) -> TraceNode {
        let [name, model] = [name, "T4"].map(str::to_owned);
        TraceNode { name, cpu_milli: 1, memory_mib: 1, gpus, model, more: None }
    }

    fn pod(name: &str, num_gpu: u32, gpu_milli: u32) -> TracePod {
        TracePod {
            name: name.to_owned(),
            cpu_milli: 1,
            memory_mib: 1,
            num_gpu,
            gpu_milli,
            gpu_spec: Vec::new(),
            creation_time: None,
            deletion_time: None,
            more: None,
        }
    }

    fn churned(load: f64, seed: i64) -> Result<TimedWorkload, WorkloadError> {
        let nodes = ["d", "c", "b", "a"].map(|name| node(name, 250)).to_vec();
        let pods = vec![pod("x", 0, 0), pod("y", 1, 500), pod("z", 2, 1000)];
        churn(nodes, pods, load, NodeOrder::Shuffled, seed)
    }

    #[test]
    fn the_requested_load_is_generated() {
        let TimedWorkload { pods, schedule, .. } = churned(0.9, 7).unwrap();
        let demand = |arrival: &PodArrival| pods[arrival.pod].demand_milli() as f64;
        let (standing, later): (Vec<PodArrival>, Vec<PodArrival>) =
            schedule.arrivals.iter().partition(|arrival| arrival.at == 0);
        let load = standing.iter().map(demand).sum::<f64>() / 1_000_000.0;
        assert!((load - 0.9).abs() < 0.05, "{load}");
        let work = later.iter().map(|arrival| demand(arrival) * arrival.stays.unwrap() as f64);
        let load = work.sum::<f64>() / (1_000_000.0 * schedule.window.end as f64);
        assert!((load - 0.9).abs() < 0.05, "{load}");
        // 900,000 milli over (0 + 500 + 2000) / 3 are 1,080 arrivals in a mean lifetime.
        let expected = 1080.0 * 5.0;
        assert!((schedule.arrivals.len() as f64 / expected - 1.0).abs() < 0.05);
        for kind in 0..3 {
            let share = schedule.arrivals.iter().filter(|arrival| arrival.pod == kind).count();
            assert!((share as f64 * 3.0 / expected - 1.0).abs() < 0.1, "{kind}: {share}");
        }
        assert!(schedule.arrivals.is_sorted_by_key(|arrival| arrival.at));
        assert!(schedule.arrivals.iter().all(|arrival| arrival.at < schedule.window.end));
    }

    #[test]
    fn equal_seeds_give_equal_results_and_other_seeds_do_not() {
        assert_eq!(churned(0.5, 3).unwrap(), churned(0.5, 3).unwrap());
        let first = churned(0.5, 3).unwrap();
        assert_ne!(first.schedule, churned(0.5, 4).unwrap().schedule);
        let orders: Vec<_> = (0..20).map(|seed| churned(0.5, seed).unwrap().nodes).collect();
        assert!(orders.iter().any(|nodes| *nodes != orders[0]));
        let nodes = ["d", "c"].map(|name| node(name, 1)).to_vec();
        let as_is = churn(nodes.clone(), vec![pod("y", 1, 500)], 0.5, NodeOrder::AsIs, 3).unwrap();
        assert_eq!(as_is.nodes, nodes);
    }

    #[test]
    fn an_unreachable_load_is_rejected() {
        for load in [0.0, -1.0, 10.1, f64::NAN, f64::INFINITY, 1e-9] {
            let refused = churned(load, 1).unwrap_err();
            assert!(matches!(refused, WorkloadError::MeanLoad { .. }), "{refused}");
        }
        let churn = |gpus, milli, load| {
            churn(vec![node("a", gpus)], vec![pod("x", 1, milli)], load, NodeOrder::AsIs, 1)
        };
        assert_eq!(churn(0, 1, 0.9), Err(WorkloadError::NoGpus { nodes: 1 }));
        assert_eq!(churn(1, 0, 0.9), Err(WorkloadError::NoDemand { pods: 1 }));
        assert_eq!(churn(256, 1, 10.0), Err(WorkloadError::TooManyArrivals { load: 10.0 }));
        assert!(churn(1, 1000, 0.000_001).unwrap().schedule.arrivals.is_empty());
    }
}
