//! The trace's own creation and deletion times, run faster.
//!
//! Pods come `compress` times as fast as in the trace and stay as long as there, so that many
//! run at once: the load grows with the factor. The recorded span is a circle: pods that outlive it
//! run on in the next round. So at the start the copies of earlier rounds that still run are
//! placed, oldest first and unmeasured. Then one round is measured. The mean load is exactly as
//! requested: demand times lifetime over capacity times the round.

use crate::trace::churn::{NodeOrder, chance_of, ranked};
use crate::trace::read::{TraceNode, TracePod};
use crate::trace::schedule::{PodArrival, Schedule, TimeUnit, TimedWorkload, load_micro, micro};
use crate::trace::workload::{ARRIVALS_MAX, WorkloadError, capacity_milli};

/// Largest factor: a year in a third of a second.
const COMPRESS_MAX: f64 = 1e8;

/// How fast pods come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// This many times as fast as in the trace.
    Compress(f64),
    /// So fast that they need this multiple of the cluster's GPUs on average.
    Load(f64),
}

/// One pod with its times, in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stay {
    /// Position of the pod in its list.
    pub pod: usize,
    /// When it is created, from the start of the round.
    pub created: u64,
    /// How long it runs, at least one tick.
    pub stays: u64,
}

/// The pods of a trace at their own times.
///
/// # Errors
/// Any [`WorkloadError`] about times or load.
pub fn timeline(
    nodes: Vec<TraceNode>,
    pods: Vec<TracePod>,
    pace: Pace,
    order: NodeOrder,
    seed: i64,
) -> Result<TimedWorkload, WorkloadError> {
    let (mut stays, round) = stays(&pods)?;
    let compress = factor(&nodes, &pods, &stays, round, pace)?;
    let faster = |ticks: u64| {
        u64::try_from(u128::from(ticks) * 1_000_000 / compress).expect("no more than 2^64 ticks")
    };
    stays.iter_mut().for_each(|stay| stay.created = faster(stay.created));
    let schedule = in_rounds(&stays, faster(round).max(1));
    let too_many = WorkloadError::TooManyRunning { compress: compress as f64 / 1e6 };
    let schedule = schedule.ok_or(too_many)?;
    let nodes = ranked(nodes, order, &mut chance_of(seed));
    Ok(TimedWorkload { nodes, pods, schedule })
}

/// One round of `stays`, which are in order of creation, after the pods that earlier rounds have left
/// running; `None` if these are too many. A round has at least one tick.
#[must_use]
pub fn in_rounds(stays: &[Stay], round: u64) -> Option<Schedule> {
    let mut earlier = Vec::new();
    for stay in stays {
        let (at, end) = (stay.created, stay.created + stay.stays);
        // The copy of `back` rounds ago still runs if `end` is beyond that many rounds.
        for back in 1..=(end - 1) / round {
            if earlier.len() >= ARRIVALS_MAX {
                return None;
            }
            let arrival = PodArrival { pod: stay.pod, at: 0, stays: Some(end - back * round) };
            earlier.push((back * round - at.min(round), arrival));
        }
    }
    // The one created longest ago first; a stable sort leaves the rest in the order of the trace.
    earlier.sort_by_key(|(ago, _)| std::cmp::Reverse(*ago));
    let mut arrivals: Vec<PodArrival> = earlier.into_iter().map(|(_, arrival)| arrival).collect();
    arrivals.extend(stays.iter().map(|stay| PodArrival {
        pod: stay.pod,
        at: 1 + stay.created,
        stays: Some(stay.stays),
    }));
    Some(Schedule { arrivals, window: 1..1 + round, unit: TimeUnit::Second })
}

/// The stays in order of creation, and the span that they cover. Pods that still run at the end of
/// the trace end with it.
fn stays(pods: &[TracePod]) -> Result<(Vec<Stay>, u64), WorkloadError> {
    let ticks = TimeUnit::Second.ticks();
    let times = pods.iter().flat_map(|pod| [pod.creation_time, pod.deletion_time]);
    let last = times.flatten().max().unwrap_or(0);
    let stays = pods.iter().enumerate().map(|(place, pod)| {
        let name = || pod.name.clone();
        let created = pod.creation_time.ok_or_else(|| WorkloadError::NoTime { pod: name() })?;
        let deleted = pod.deletion_time.unwrap_or(last);
        let stays =
            deleted.checked_sub(created).ok_or_else(|| WorkloadError::Backwards { pod: name() })?;
        Ok(Stay { pod: place, created: created * ticks, stays: (stays * ticks).max(1) })
    });
    let mut stays = stays.collect::<Result<Vec<Stay>, WorkloadError>>()?;
    stays.sort_by_key(|stay| stay.created);
    let first = stays.first().map_or(0, |stay| stay.created);
    stays.iter_mut().for_each(|stay| stay.created -= first);
    // One second more, so that the last pod comes before the first of the next round.
    let round = stays.last().map_or(0, |stay| stay.created) + ticks;
    Ok((stays, round))
}

/// The factor in millionths.
fn factor(
    nodes: &[TraceNode],
    pods: &[TracePod],
    stays: &[Stay],
    round: u64,
    pace: Pace,
) -> Result<u128, WorkloadError> {
    let load = match pace {
        Pace::Compress(compress) => {
            return micro(compress, COMPRESS_MAX).ok_or(WorkloadError::Compress { compress });
        }
        Pace::Load(load) => load,
    };
    let capacity = capacity_milli(nodes);
    if capacity == 0 {
        return Err(WorkloadError::NoGpus { nodes: nodes.len() });
    }
    let work = stays.iter().map(|stay| (pods[stay.pod].demand_milli(), stay.stays));
    let work: u128 = work.map(|(milli, ticks)| u128::from(milli) * u128::from(ticks)).sum();
    if work == 0 {
        return Err(WorkloadError::NoDemand { pods: pods.len() });
    }
    let compress = load_micro(load)? * u128::from(capacity) * u128::from(round) / work;
    let shown = compress as f64 / 1e6;
    micro(shown, COMPRESS_MAX).map(|_| compress).ok_or(WorkloadError::Compress { compress: shown })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> TraceNode {
        let [name, model] = ["n", "T4"].map(str::to_owned);
        TraceNode { name, cpu_milli: 1, memory_mib: 1, gpus: 4, model, more: None }
    }

    /// A pod with one GPU, created and deleted at these seconds.
    fn pod(name: &str, created: Option<u64>, deleted: Option<u64>) -> TracePod {
        TracePod {
            name: name.to_owned(),
            cpu_milli: 1,
            memory_mib: 1,
            num_gpu: 1,
            gpu_milli: 1000,
            gpu_spec: Vec::new(),
            creation_time: created,
            deletion_time: deleted,
            more: None,
        }
    }

    fn played(pods: &[TracePod], pace: Pace) -> Result<TimedWorkload, WorkloadError> {
        timeline(vec![node()], pods.to_vec(), pace, NodeOrder::AsIs, 1)
    }

    /// Created at 1009, 1000 and 1004, for 5, 25 and no seconds; the round is 10 s.
    fn trace() -> Vec<TracePod> {
        let pods = [("a", 1009, 1014), ("b", 1000, 1025), ("c", 1004, 1004)];
        pods.map(|(name, created, deleted)| pod(name, Some(created), Some(deleted))).to_vec()
    }

    /// Arrivals as (pod, at, stays).
    fn check(pace: Pace, round: u64, expected: &[(usize, u64, u64)]) {
        let schedule = played(&trace(), pace).unwrap().schedule;
        let found = schedule.arrivals.iter().map(|a| (a.pod, a.at, a.stays.unwrap()));
        assert_eq!(found.collect::<Vec<_>>(), expected);
        assert_eq!(schedule.window, 1..1 + round);
    }

    #[test]
    fn leftovers_of_earlier_rounds_come_before_the_trace() {
        // b of two rounds ago has 5 s left, of the last round 15 s; a of the last round 4 s.
        let standing = [(1, 0, 5000), (1, 0, 15_000), (0, 0, 4000)];
        let round = [(1, 1, 25_000), (2, 4001, 1), (0, 9001, 5000)];
        check(Pace::Compress(1.0), 10_000, &[standing, round].concat());
        // Twice as fast: the round has 5 s.
        let standing = [(1, 0, 5000), (1, 0, 10_000), (1, 0, 15_000), (1, 0, 20_000), (0, 0, 4500)];
        let round = [(1, 1, 25_000), (2, 2001, 1), (0, 4501, 5000)];
        check(Pace::Compress(2.0), 5000, &[&standing[..], &round[..]].concat());
    }

    #[test]
    fn a_higher_load_comes_from_faster_arrivals() {
        // 30 GPU seconds in a round of 10 on 4 GPUs: a load of 0.75.
        let factor = |pace| played(&trace(), pace).unwrap().schedule.window.end - 1;
        assert_eq!(factor(Pace::Load(0.75)), 10_000);
        assert_eq!(factor(Pace::Load(1.5)), 5000);
        assert_eq!(factor(Pace::Load(3.0)), 2500);
    }

    #[test]
    fn a_pod_without_an_end_runs_to_the_end_of_the_trace() {
        let pods = [pod("a", Some(10), None), pod("b", Some(30), Some(50))];
        let schedule = played(&pods, Pace::Compress(1.0)).unwrap().schedule;
        let last = &schedule.arrivals[schedule.arrivals.len() - 2..];
        assert_eq!((last[0].stays, last[1].stays), (Some(40_000), Some(20_000)));
    }

    #[test]
    fn invalid_times_are_rejected() {
        let check = |pods: &[TracePod], pace, expected: &str| {
            assert_eq!(played(pods, pace).unwrap_err().to_string(), expected);
        };
        let whole = Pace::Compress(1.0);
        let none = "pod `a` has no `creation_time`: its file cannot be replayed by its own times";
        check(&[pod("a", None, Some(3))], whole, none);
        let backwards = "the `deletion_time` of pod `a` lies before its `creation_time`";
        check(&[pod("a", Some(4), Some(3))], whole, backwards);
        for factor in [0.0, -1.0, f64::NAN, 1e9] {
            let refused = played(&trace(), Pace::Compress(factor)).unwrap_err();
            assert!(matches!(refused, WorkloadError::Compress { .. }), "{refused}");
        }
        let full = "times `100000000` as fast, more than 4000000 pods would run at once";
        check(&[pod("a", Some(0), Some(1_000_000))], Pace::Compress(1e8), full);
        let idle = TracePod { num_gpu: 0, gpu_milli: 0, ..pod("a", Some(0), Some(9)) };
        check(
            &[idle],
            Pace::Load(0.5),
            "none of the `1` pods requests a GPU, so no load can be reached",
        );
        let refused = played(&trace(), Pace::Load(0.0)).unwrap_err();
        assert_eq!(refused, WorkloadError::MeanLoad { load: 0.0 });
    }
}
