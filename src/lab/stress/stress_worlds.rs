//! The stress worlds: loads that differ from those on which policies are usually compared.
//!
//! Each world is made from any trace, and decided by its name and a seed. Mixes change while the
//! cluster fills, fleets are small or half empty, pods come in another order or have other sizes.

use std::num::NonZeroU64;

use rand_chacha::rand_core::RngCore;

use crate::stress::draw::{self, KindChange, PodsKind, chance_of};
use engine::model::request::Amount;
use sim::trace::churn::{NodeOrder, index_below, ranked};
use sim::trace::read::{TraceNode, TracePod, parse_nodes, parse_pods, size_up};
use sim::trace::table::TraceError;
use sim::trace::workload::{Workload, WorkloadError};
use wire::units::{MemMib, Share};

/// Load up to which a world replays, in percent of the GPUs.
const LOAD: u64 = 130;

/// The fractions, in thousandths, of the world `ten-fractions`, and how many pods come.
const TEN: [u32; 10] = [100, 250, 500, 200, 1000, 300, 750, 400, 150, 650];
const TEN_PODS: usize = 2000;
const TEN_NODES: usize = 200;

/// A world.
#[derive(Debug, Clone, Copy)]
pub struct StressWorld {
    /// The name that users type.
    pub name: &'static str,
    /// What is compared there.
    pub measure: Measure,
    make: Make,
}

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// Allocated GPUs.
    Allocation,
    /// How full the GPUs in use are: there is room for all pods.
    Efficiency,
}

#[derive(Debug, Clone, Copy)]
enum Make {
    /// On all nodes, pods of these kinds in turn.
    Mix(&'static [PodsKind], KindChange),
    /// On this many nodes of the trace.
    Fleet(usize),
    /// The same, up to this load in percent.
    Filled(usize, u64),
    /// The same with pods that request memory.
    Memory(usize, u64),
    /// All pods in another order.
    Order(PodOrder),
    /// Requested shares times this many hundredths.
    Sizes(u32),
    /// Requested shares rounded up to quarters.
    Quarters,
    /// Nodes with this many hundredths of their CPU.
    Cpu(u64),
    /// The ten fractions on equal nodes.
    Ten,
}

#[derive(Debug, Clone, Copy)]
enum PodOrder {
    /// The smallest request first.
    Rising,
    /// The largest first.
    Falling,
    /// Runs of fifty equal pods.
    Runs,
}

const fn mix(name: &'static str, kinds: &'static [PodsKind], change: KindChange) -> StressWorld {
    StressWorld { name, measure: Measure::Allocation, make: Make::Mix(kinds, change) }
}

const fn world(name: &'static str, make: Make) -> StressWorld {
    StressWorld { name, measure: Measure::Allocation, make }
}

const fn filled(name: &'static str, nodes: usize, load: u64) -> StressWorld {
    StressWorld { name, measure: Measure::Efficiency, make: Make::Filled(nodes, load) }
}

/// All worlds, in the order of the documentation.
pub const WORLDS: [StressWorld; 32] = {
    use PodsKind::{All, Large, Several, Shares, Small};
    [
        mix("shares-several", &[Shares, Several], KindChange::Abrupt),
        mix("several-shares", &[Several, Shares], KindChange::Abrupt),
        mix("small-large", &[Small, Large], KindChange::Abrupt),
        mix("large-small", &[Large, Small], KindChange::Abrupt),
        mix("shares-several-shares", &[Shares, Several, Shares], KindChange::Abrupt),
        mix("several-shares-several", &[Several, Shares, Several], KindChange::Abrupt),
        mix("small-large-small", &[Small, Large, Small], KindChange::Abrupt),
        mix("all-several-all", &[All, Several, All], KindChange::Abrupt),
        mix("shares-several-twice", &[Shares, Several, Shares, Several], KindChange::Abrupt),
        mix("shares-several-slowly", &[Shares, Several], KindChange::Gradual),
        mix("several-shares-slowly", &[Several, Shares], KindChange::Gradual),
        mix("shares-several-shares-slowly", &[Shares, Several, Shares], KindChange::Gradual),
        mix("small-large-small-slowly", &[Small, Large, Small], KindChange::Gradual),
        mix(
            "shares-several-twice-slowly",
            &[Shares, Several, Shares, Several],
            KindChange::Gradual,
        ),
        world("order-rising", Make::Order(PodOrder::Rising)),
        world("order-falling", Make::Order(PodOrder::Falling)),
        world("order-runs", Make::Order(PodOrder::Runs)),
        world("sizes-80", Make::Sizes(80)),
        world("sizes-115", Make::Sizes(115)),
        world("sizes-quarters", Make::Quarters),
        world("cpu-85", Make::Cpu(85)),
        world("fleet-4", Make::Fleet(4)),
        world("fleet-8", Make::Fleet(8)),
        world("fleet-12", Make::Fleet(12)),
        world("fleet-30", Make::Fleet(30)),
        world("fleet-100", Make::Fleet(100)),
        filled("filled-8", 8, 80),
        filled("filled-20", 20, 80),
        StressWorld {
            name: "filled-20-memory",
            measure: Measure::Efficiency,
            make: Make::Memory(20, 80),
        },
        filled("filled-100", 100, 80),
        filled("filled-300", 300, 80),
        StressWorld { name: "ten-fractions", measure: Measure::Efficiency, make: Make::Ten },
    ]
};

/// Why there is no such world.
#[derive(Debug, thiserror::Error)]
pub enum StressError {
    /// No workload can be made.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// A world that is written here is not valid.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

impl StressWorld {
    /// The worlds whose names begin with `start`.
    pub fn named(start: &str) -> impl Iterator<Item = Self> {
        let exact = WORLDS.iter().any(|world| world.name == start);
        WORLDS.into_iter().filter(move |world| match exact {
            true => world.name == start,
            false => !start.is_empty() && world.name.starts_with(start),
        })
    }

    /// What one replay of this world is, made from a trace.
    ///
    /// # Errors
    /// [`WorkloadError::NoDemand`] if the trace has no pods of a kind that the world needs.
    pub fn workload(
        &self,
        nodes: &[TraceNode],
        pods: &[TracePod],
        seed: i64,
    ) -> Result<Workload, StressError> {
        let chance = &mut chance_of(self.name, seed);
        let (mut nodes, arrivals) = match self.make {
            Make::Mix(kinds, change) => {
                (shuffled(nodes, chance), drawn(nodes, pods, kinds, change, LOAD, chance)?)
            }
            Make::Fleet(count) => on_fleet(nodes, pods, count, LOAD, chance)?,
            Make::Filled(count, load) => on_fleet(nodes, pods, count, load, chance)?,
            Make::Memory(count, load) => {
                let nodes = draw::fleet(nodes, count, chance)?;
                let mut pods = with_memory(pods, chance);
                size_up(&nodes, &mut pods);
                let arrivals =
                    drawn(&nodes, &pods, &[PodsKind::All], KindChange::Abrupt, load, chance)?;
                (nodes, arrivals)
            }
            Make::Order(order) => {
                let all = drawn(nodes, pods, &[PodsKind::All], KindChange::Abrupt, LOAD, chance)?;
                (shuffled(nodes, chance), ordered(all, order, chance))
            }
            Make::Sizes(percent) => {
                let resized = |milli: u32| (milli * percent).div_ceil(100);
                (shuffled(nodes, chance), with_sizes(nodes, pods, resized, chance)?)
            }
            Make::Quarters => {
                let resized = |milli: u32| milli.div_ceil(250) * 250;
                (shuffled(nodes, chance), with_sizes(nodes, pods, resized, chance)?)
            }
            Make::Cpu(percent) => {
                let all = drawn(nodes, pods, &[PodsKind::All], KindChange::Abrupt, LOAD, chance)?;
                let mut nodes = shuffled(nodes, chance);
                nodes.iter_mut().for_each(|node| node.cpu_milli = node.cpu_milli * percent / 100);
                (nodes, all)
            }
            Make::Ten => ten_fractions(chance)?,
        };
        nodes.iter_mut().enumerate().for_each(|(at, node)| node.name = format!("{at:05}"));
        Ok(Workload { nodes, population: arrivals.clone(), arrivals })
    }
}

fn shuffled(nodes: &[TraceNode], chance: &mut impl RngCore) -> Vec<TraceNode> {
    ranked(nodes.to_vec(), NodeOrder::Shuffled, chance)
}

fn drawn(
    nodes: &[TraceNode],
    pods: &[TracePod],
    kinds: &[PodsKind],
    change: KindChange,
    load: u64,
    chance: &mut impl RngCore,
) -> Result<Vec<TracePod>, WorkloadError> {
    draw::arrivals(nodes, &draw::possible(nodes, pods), kinds, change, load, chance)
}

fn on_fleet(
    nodes: &[TraceNode],
    pods: &[TracePod],
    count: usize,
    load: u64,
    chance: &mut impl RngCore,
) -> Result<(Vec<TraceNode>, Vec<TracePod>), WorkloadError> {
    let nodes = draw::fleet(nodes, count, chance)?;
    let pods = drawn(&nodes, pods, &[PodsKind::All], KindChange::Abrupt, load, chance)?;
    Ok((nodes, pods))
}

/// Pods whose shares of one GPU have another size, at most a whole GPU. Pods that request another
/// amount stay as they are, and so do those whose limit is set by their share.
fn with_sizes(
    nodes: &[TraceNode],
    pods: &[TracePod],
    resized: impl Fn(u32) -> u32,
    chance: &mut impl RngCore,
) -> Result<Vec<TracePod>, WorkloadError> {
    let mut pods = pods.to_vec();
    for pod in pods.iter_mut().filter(|pod| requests_share_alone(pod)) {
        pod.gpu_milli = resized(pod.gpu_milli).clamp(1, 1000);
    }
    drawn(nodes, &pods, &[PodsKind::All], KindChange::Abrupt, LOAD, chance)
}

/// Whether `gpu_milli` says all that the pod requests of its one GPU.
fn requests_share_alone(pod: &TracePod) -> bool {
    let more = pod.more.as_deref();
    let is_plain = more.is_none_or(|more| more.amount.is_none() && more.limit.is_none());
    pod.num_gpu == 1 && pod.gpu_milli < 1000 && is_plain
}

/// Of the pods with a share, by chance: a third request memory instead, as much of 16 GiB, and a
/// third request half as much or half as much again beside it. All in whole GiB, at most 15.
fn with_memory(pods: &[TracePod], chance: &mut impl RngCore) -> Vec<TracePod> {
    let [three, two] = [NonZeroU64::MIN.saturating_add(2), NonZeroU64::MIN.saturating_add(1)];
    let mut pods = pods.to_vec();
    for pod in pods.iter_mut().filter(|pod| requests_share_alone(pod)) {
        let memory = |halves: u32| {
            let gib = (pod.gpu_milli * halves * 16).div_ceil(2000).min(15);
            MemMib::new(u64::from(gib) * 1024)
        };
        let amount = match index_below(three, chance) {
            0 => continue,
            1 => Amount::Memory(memory(2)),
            _ => {
                let halves = if index_below(two, chance) == 0 { 1 } else { 3 };
                let share = Share::from_millionths(u64::from(pod.gpu_milli) * 1000);
                Amount::FractionAndMemory(share, memory(halves))
            }
        };
        pod.more.get_or_insert_default().amount = Some(amount);
    }
    pods
}

fn ordered(mut pods: Vec<TracePod>, order: PodOrder, chance: &mut impl RngCore) -> Vec<TracePod> {
    let size = |pod: &TracePod| (pod.demand_milli(), pod.cpu_milli, pod.memory_mib);
    pods.sort_by(|a, b| size(a).cmp(&size(b)).then_with(|| a.gpu_spec.cmp(&b.gpu_spec)));
    match order {
        PodOrder::Rising => pods,
        PodOrder::Falling => {
            pods.reverse();
            pods
        }
        PodOrder::Runs => {
            let mut runs: Vec<&[TracePod]> = pods.chunks(50).collect();
            draw::shuffle(&mut runs, chance);
            runs.concat()
        }
    }
}

fn ten_fractions(chance: &mut impl RngCore) -> Result<(Vec<TraceNode>, Vec<TracePod>), TraceError> {
    let mut nodes = String::from("sn,cpu_milli,memory_mib,gpu,model\n");
    for at in 0..TEN_NODES {
        nodes += &format!("n{at},128000,1048576,8,A100\n");
    }
    let mut pods = String::from("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n");
    for (at, milli) in TEN.iter().cycle().take(TEN_PODS).enumerate() {
        pods += &format!("p{at},1000,4096,1,{milli}\n");
    }
    let nodes = parse_nodes("nodes", nodes.as_bytes())?;
    let mut pods = parse_pods("pods", pods.as_bytes())?;
    draw::shuffle(&mut pods, chance);
    Ok((nodes, pods))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use engine::model::request::GpuRequest;
    use sim::trace::workload::{capacity_milli, demand_milli};

    fn trace() -> (Vec<TraceNode>, Vec<TracePod>) {
        let nodes = "sn,cpu_milli,memory_mib,gpu,model\na,64000,9000,8,T4\nb,32000,9000,4,T4\n";
        let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\ns,1000,1,1,200\n\
                    l,1000,1,1,610\nw,1000,1,1,1000\nm,9000,1,4,1000\nn,1000,1,0,0\n";
        let nodes = parse_nodes("nodes", nodes.as_bytes()).unwrap();
        (nodes, parse_pods("pods", pods.as_bytes()).unwrap())
    }

    #[test]
    fn every_world_is_made_from_any_trace_and_by_its_seed_alone() {
        let (nodes, pods) = trace();
        let mut names = BTreeSet::new();
        for world in WORLDS {
            assert!(names.insert(world.name));
            let workload = world.workload(&nodes, &pods, 3).unwrap();
            assert_eq!(workload, world.workload(&nodes, &pods, 3).unwrap(), "{}", world.name);
            let (load, gpus) = (demand_milli(&workload.arrivals), capacity_milli(&workload.nodes));
            let least = if world.measure == Measure::Efficiency { 50 } else { LOAD };
            assert!(load * 100 >= gpus * least, "{}: {load} of {gpus}", world.name);
            let unique: BTreeSet<&str> =
                workload.arrivals.iter().map(|pod| pod.name.as_str()).collect();
            assert_eq!(unique.len(), workload.arrivals.len(), "{}", world.name);
        }
    }

    #[test]
    fn a_trace_without_pods_of_a_kind_has_no_such_world() {
        let (nodes, pods) = trace();
        let world = StressWorld::named("shares-several").next().unwrap();
        assert!(world.workload(&nodes, &pods[..3], 1).is_err());
    }

    #[test]
    fn worlds_are_found_by_name_or_by_its_start() {
        let names = |start| StressWorld::named(start).map(|world| world.name).collect::<Vec<_>>();
        assert_eq!(names("ten"), ["ten-fractions"]);
        assert_eq!(names("shares-several"), ["shares-several"]);
        assert_eq!(names("sizes"), ["sizes-80", "sizes-115", "sizes-quarters"]);
        assert!(names("").is_empty() && names("x").is_empty());
    }

    #[test]
    fn other_orders_and_sizes_keep_the_rest() {
        let (nodes, pods) = trace();
        let arrivals = |name| {
            StressWorld::named(name).next().unwrap().workload(&nodes, &pods, 5).unwrap().arrivals
        };
        let demands: Vec<u64> =
            arrivals("order-rising").iter().map(TracePod::demand_milli).collect();
        assert!(demands.is_sorted());
        let sizes: BTreeSet<u32> = arrivals("sizes-quarters").iter().map(|p| p.gpu_milli).collect();
        assert_eq!(sizes, [0, 250, 750, 1000].into());
        let sizes: BTreeSet<u32> = arrivals("sizes-80").iter().map(|pod| pod.gpu_milli).collect();
        assert_eq!(sizes, [0, 160, 488, 1000].into());
    }

    #[test]
    fn pods_that_request_another_amount_keep_their_size() {
        let (nodes, _) = trace();
        let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_memory_mib,limit_milli\n\
                    s,1000,1,1,200,,\nb,1000,1,1,200,5000,\nm,1000,1,1,,5000,\n\
                    l,1000,1,1,210,,300\nd,1000,1,1,200.5,,\n";
        let mut pods = parse_pods("pods", pods.as_bytes()).unwrap();
        size_up(&nodes, &mut pods);
        let known: BTreeMap<String, (u32, Option<GpuRequest>)> =
            pods.iter().map(|pod| (pod.name.clone(), (pod.gpu_milli, pod.request()))).collect();
        for name in ["sizes-80", "sizes-115", "sizes-quarters"] {
            let world = StressWorld::named(name).next().unwrap();
            let arrivals = world.workload(&nodes, &pods, 5).unwrap().arrivals;
            let mut resized = BTreeSet::new();
            for pod in arrivals {
                let (of, _) = pod.name.split_once('-').unwrap();
                let is_same = known[of] == (pod.gpu_milli, pod.request());
                assert_ne!(is_same, of == "s", "{name}: {pod:?}");
                resized.insert(of.to_owned());
            }
            assert_eq!(resized.len(), pods.len(), "{name}");
        }
    }

    #[test]
    fn pods_of_the_memory_world_request_memory_that_every_gpu_has() {
        let (nodes, pods) = trace();
        let world = StressWorld::named("filled-20-memory").next().unwrap();
        let of = |pod: &TracePod| pod.more.as_ref().and_then(|more| more.amount.clone());
        let gib = |gib: u64| MemMib::new(gib * 1024);
        let both = |milli: u64, memory| {
            Some(Amount::FractionAndMemory(Share::from_millionths(milli * 1000), gib(memory)))
        };
        let mut amounts: BTreeSet<Option<Amount>> = BTreeSet::new();
        for seed in 1..=60 {
            let arrivals = world.workload(&nodes, &pods, seed).unwrap().arrivals;
            for pod in &arrivals {
                let is_sized = of(pod) != Some(Amount::Memory(gib(4))) || pod.gpu_milli == 267;
                assert!(is_sized, "what 4 GiB are of a T4: {pod:?}");
            }
            amounts.extend(arrivals.iter().map(of));
        }
        // of 200 and 610 thousandths
        let known = [
            None,
            Some(Amount::Memory(gib(4))),
            Some(Amount::Memory(gib(10))),
            both(200, 2),
            both(200, 5),
            both(610, 5),
            both(610, 15),
        ];
        assert_eq!(amounts, known.into());
    }
}
