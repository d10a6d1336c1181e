//! Draws the pods and nodes of a stress world from those of a trace.
//!
//! A *kind* is a part of the pods of a trace, such as those that take a share of a GPU. The arrivals
//! of a world are pods of one kind after the other. Pods without a GPU come among them, as many per
//! requested GPU as in the whole trace.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use engine::hardware::device_class::DeviceClass;
use sim::trace::churn::index_below;
use sim::trace::read::{TraceNode, TracePod};
use sim::trace::workload::{ARRIVALS_MAX, WorkloadError, capacity_milli, demand_milli};

/// A part of the pods of a trace that request GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PodsKind {
    /// All of them.
    All,
    /// Less than a whole GPU.
    Shares,
    /// Less than half of one.
    Small,
    /// At least half of one GPU, and at most a whole one.
    Large,
    /// More than one GPU.
    Several,
}

impl PodsKind {
    fn has(self, pod: &TracePod) -> bool {
        let milli = pod.demand_milli();
        milli > 0
            && match self {
                Self::All => true,
                Self::Shares => milli < 1000,
                Self::Small => milli < 500,
                Self::Large => (500..=1000).contains(&milli),
                Self::Several => pod.num_gpu > 1,
            }
    }
}

/// How one kind follows on the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KindChange {
    /// At once.
    Abrupt,
    /// From the middle of one kind to the middle of the next, more and more pods are of the next.
    Gradual,
}

/// The generator of all that `seed` decides in the world of this name.
pub(crate) fn chance_of(world: &str, seed: i64) -> ChaCha8Rng {
    let mut chance = ChaCha8Rng::seed_from_u64(seed.cast_unsigned());
    // FNV-1a: worlds that come later leave the draws of the others as they are.
    let stream = world.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    chance.set_stream(stream);
    chance
}

/// The pods of one kind, and how much they request on average.
struct Pool<'p> {
    pods: Vec<&'p TracePod>,
    choices: NonZeroU64,
    mean_milli: u64,
}

impl<'p> Pool<'p> {
    fn of(pods: &'p [TracePod], kind: PodsKind) -> Result<Self, WorkloadError> {
        let found: Vec<&TracePod> = pods.iter().filter(|pod| kind.has(pod)).collect();
        let choices = u64::try_from(found.len()).ok().and_then(NonZeroU64::new);
        let choices = choices.ok_or(WorkloadError::NoDemand { pods: pods.len() })?;
        let demand: u64 = found.iter().map(|pod| pod.demand_milli()).sum();
        Ok(Self { pods: found, choices, mean_milli: (demand / choices).max(1) })
    }

    fn draw(&self, chance: &mut impl RngCore) -> &'p TracePod {
        self.pods[index_below(self.choices, chance)]
    }
}

/// Arrivals of `load_percent` of the GPUs of `nodes`: pods of each of `kinds` in turn, each for the
/// same part of the load.
///
/// # Errors
/// [`WorkloadError::NoDemand`] if `pods` has none of a kind, or another one about the load.
pub(crate) fn arrivals(
    nodes: &[TraceNode],
    pods: &[TracePod],
    kinds: &[PodsKind],
    change: KindChange,
    load_percent: u64,
    chance: &mut impl RngCore,
) -> Result<Vec<TracePod>, WorkloadError> {
    let target = match capacity_milli(nodes) * load_percent / 100 {
        0 => return Err(WorkloadError::NoGpus { nodes: nodes.len() }),
        target => target,
    };
    let pools = kinds.iter().map(|kind| Pool::of(pods, *kind));
    let pools = pools.collect::<Result<Vec<Pool<'_>>, WorkloadError>>()?;
    let without_gpu: Vec<&TracePod> = pods.iter().filter(|pod| pod.demand_milli() == 0).collect();
    let all_demand = demand_milli(pods).max(1);
    let mut drawn = Vec::new();
    let (mut arrived, mut among) = (0, 0);
    while arrived < target {
        if drawn.len() >= ARRIVALS_MAX {
            return Err(WorkloadError::TooManyArrivals { load: load_percent as f64 / 100.0 });
        }
        let pool = &pools[turn(&pools, change, arrived, target, chance)];
        let pod = pool.draw(chance);
        arrived += pod.demand_milli();
        push(&mut drawn, pod);
        let due = u128::from(arrived) * without_gpu.len() as u128 / u128::from(all_demand);
        while let Some(choices) = NonZeroU64::new(without_gpu.len() as u64)
            && among < due
        {
            push(&mut drawn, without_gpu[index_below(choices, chance)]);
            among += 1;
        }
    }
    Ok(drawn)
}

fn push(drawn: &mut Vec<TracePod>, pod: &TracePod) {
    let name = format!("{}-{}", pod.name, drawn.len());
    drawn.push(TracePod { name, ..pod.clone() });
}

/// Which pool the next pod is of.
fn turn(
    pools: &[Pool<'_>],
    change: KindChange,
    arrived: u64,
    target: u64,
    chance: &mut impl RngCore,
) -> usize {
    let count = pools.len() as u64;
    match change {
        KindChange::Abrupt => index(arrived * count / target),
        KindChange::Gradual => {
            // Half a part of the first kind alone, and half a part of the last one.
            let at = (arrived * count * 1000 / target).clamp(500, count * 1000 - 501) - 500;
            let (now, of_next) = (index(at / 1000), at % 1000);
            let next = (now + 1).min(pools.len() - 1);
            // By demand, not by number: large pods come less often.
            let next_weight = of_next * pools[now].mean_milli;
            let now_weight = (1000 - of_next) * pools[next].mean_milli;
            let all = NonZeroU64::new(next_weight + now_weight).unwrap_or(NonZeroU64::MIN);
            if (index_below(all, chance) as u64) < next_weight { next } else { now }
        }
    }
}

fn index(at: u64) -> usize {
    usize::try_from(at).expect("one of a few kinds")
}

/// `count` nodes with GPUs, each at most once if there are enough of them.
pub(crate) fn fleet(
    nodes: &[TraceNode],
    count: usize,
    chance: &mut impl RngCore,
) -> Result<Vec<TraceNode>, WorkloadError> {
    let with_gpus: Vec<&TraceNode> = nodes.iter().filter(|node| node.gpus > 0).collect();
    if with_gpus.is_empty() {
        return Err(WorkloadError::NoGpus { nodes: nodes.len() });
    }
    let mut left: Vec<&TraceNode> = Vec::new();
    let mut drawn = Vec::new();
    for place in 0..count {
        if left.is_empty() {
            left.clone_from(&with_gpus);
        }
        let choices = NonZeroU64::new(left.len() as u64).unwrap_or(NonZeroU64::MIN);
        let node = left.swap_remove(index_below(choices, chance));
        drawn.push(TraceNode { name: format!("{}-{place}", node.name), ..node.clone() });
    }
    Ok(drawn)
}

/// Those of `pods` that some node of `nodes` can run while it is empty. The others say nothing about
/// a policy.
pub(crate) fn possible(nodes: &[TraceNode], pods: &[TracePod]) -> Vec<TracePod> {
    let shapes = nodes.iter().map(|node| {
        let mut devices: BTreeMap<DeviceClass, u32> = BTreeMap::new();
        for device in node.devices(0).unwrap_or_default() {
            *devices.entry(DeviceClass::of(&device.device, node.rule())).or_default() += 1;
        }
        (node.cpu_milli, node.memory_mib, devices)
    });
    let shapes: BTreeSet<_> = shapes.collect();
    let fitting = pods.iter().filter(|pod| {
        let request = pod.request();
        shapes.iter().rev().any(|(cpu_milli, memory_mib, devices)| {
            let accepted = devices.iter().filter(|(class, _)| {
                request.as_ref().is_some_and(|request| request.demand_on(class).is_ok())
            });
            *cpu_milli >= pod.cpu_milli
                && *memory_mib >= pod.memory_mib
                && accepted.map(|(_, devices)| devices).sum::<u32>() >= pod.num_gpu
        })
    });
    fitting.cloned().collect()
}

/// Brings things into a random order.
pub(crate) fn shuffle<T>(all: &mut [T], chance: &mut impl RngCore) {
    for last in (1..all.len()).rev() {
        let choices = NonZeroU64::new(last as u64 + 1).unwrap_or(NonZeroU64::MIN);
        all.swap(last, index_below(choices, chance));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sim::trace::read::{parse_nodes, parse_pods};

    fn trace() -> (Vec<TraceNode>, Vec<TracePod>) {
        let nodes = "sn,cpu_milli,memory_mib,gpu,model\na,64000,1000,8,T4\nb,9000,1000,0,\n";
        let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\ns,1000,1,1,200,\n\
                    l,1000,1,1,600,\nw,1000,1,1,1000,\nm,9000,1,4,1000,\nn,1000,1,0,0,\n\
                    x,1000,1,1,300,A100\nc,99000,1,1,300,\n";
        let nodes = parse_nodes("nodes", nodes.as_bytes()).unwrap();
        (nodes, parse_pods("pods", pods.as_bytes()).unwrap())
    }

    fn drawn(kinds: &[PodsKind], change: KindChange) -> Vec<TracePod> {
        let (nodes, pods) = trace();
        let fleet = vec![nodes[0].clone(); 50];
        arrivals(&fleet, &pods, kinds, change, 100, &mut chance_of("w", 7)).unwrap()
    }

    #[test]
    fn kinds_follow_one_another_at_equal_parts_of_the_load() {
        let pods = drawn(&[PodsKind::Several, PodsKind::Small], KindChange::Abrupt);
        let with_gpu: Vec<&TracePod> = pods.iter().filter(|pod| pod.num_gpu > 0).collect();
        let large = with_gpu.iter().take_while(|pod| pod.num_gpu == 4).count();
        assert_eq!(large, 50, "half of 400 GPUs");
        assert!(with_gpu[large..].iter().all(|pod| pod.gpu_milli < 500));
        assert!(demand_milli(&pods).abs_diff(400_000) < 4000);
        // one pod has no GPU, and the others request 6.4
        let without = pods.len() - with_gpu.len();
        assert_eq!(without, 400_000 / 6400);
    }

    #[test]
    fn a_gradual_change_mixes_kinds_by_their_demand() {
        let pods = drawn(&[PodsKind::Several, PodsKind::Shares], KindChange::Gradual);
        let (mut arrived, mut large) = (0, [0; 4]);
        for pod in &pods {
            arrived += pod.demand_milli();
            if pod.num_gpu > 1 {
                large[usize::try_from((arrived - 1) / 100_000).unwrap().min(3)] += 1;
            }
        }
        // of 25 pods of 4 GPUs per quarter: all, three quarters, one quarter, none
        assert!(large[0] >= 24 && large[3] <= 1, "{large:?}");
        assert!((12..=24).contains(&large[1]) && (1..=12).contains(&large[2]), "{large:?}");
    }

    #[test]
    fn draws_depend_on_world_and_seed_alone() {
        let (nodes, pods) = trace();
        let draw = |world: &str, seed| {
            let chance = &mut chance_of(world, seed);
            arrivals(&nodes, &pods, &[PodsKind::All], KindChange::Abrupt, 500, chance).unwrap()
        };
        assert_eq!(draw("w", 1), draw("w", 1));
        assert_ne!(draw("w", 1), draw("w", 2));
        assert_ne!(draw("w", 1), draw("v", 1));
    }

    #[test]
    fn pods_that_no_empty_node_fits_are_left_out() {
        let (nodes, pods) = trace();
        let names: Vec<String> = possible(&nodes, &pods).into_iter().map(|pod| pod.name).collect();
        assert_eq!(names, ["s", "l", "w", "m", "n"]);
        let fleet = fleet(&nodes, 3, &mut chance_of("w", 1)).unwrap();
        assert!(fleet.iter().all(|node| node.gpus == 8), "drawn again if there are too few");
        let none = arrivals(
            &nodes,
            &pods[..1],
            &[PodsKind::Several],
            KindChange::Abrupt,
            9,
            &mut chance_of("", 0),
        );
        assert_eq!(none, Err(WorkloadError::NoDemand { pods: 1 }));
    }
}
