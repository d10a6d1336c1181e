//! Placement rules of the literature beside those of `gpupack simulate`, as the simulator of the FGD paper
//! (USENIX ATC'23) has them.
//!
//! Scores are whole numbers from 0 to 100, larger is better, scaled by the largest node of the
//! public trace (128 cores, 8 GPUs). Among fractional GPUs all of them take the fullest that fits.

use std::collections::BTreeSet;

use engine::model::reservation::Reservation;
use engine::scoring::context::{ScoringContext, Taken, TakenList};
use engine::scoring::strategy::PlacementCost;
use engine::waste::compiled_mix::CompiledMix;
use sim::run::baseline::{MAX_CPU, MAX_GPU, free_gpu, whole};
use wire::units::Share;

/// A placement rule of the literature.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Baseline {
    /// A random node and GPU that fit. The call passes the chance.
    Random {
        /// One draw of the caller's generator per call.
        chance: u64,
    },
    /// Least dot product of what is free and what is requested (Tetris, SIGCOMM'14).
    DotProd,
    /// Nodes that hold pods of the same number of GPUs first (Gandiva, OSDI'18).
    GpuClustering,
    /// Used GPUs first, then free GPUs of used nodes, then empty nodes (MLaaS, NSDI'22).
    GpuPacking,
}

impl PlacementCost for Baseline {
    fn name(&self) -> &'static str {
        match self {
            Self::Random { .. } => "random",
            Self::DotProd => "dotprod",
            Self::GpuClustering => "gpuclustering",
            Self::GpuPacking => "gpupacking",
        }
    }

    fn is_repeatable(&self) -> bool {
        !matches!(self, Self::Random { .. })
    }

    fn choose(&self, context: &ScoringContext<'_>, _mix: &CompiledMix) -> (i64, TakenList) {
        match self {
            Self::Random { chance } => {
                let taken = context.first_by(|(at, _)| {
                    mixed(chance ^ mixed(u64::try_from(*at).expect("positions are small")))
                });
                (random_score(context, *chance), taken)
            }
            Self::DotProd => (dot_product_score(context), context.fullest()),
            Self::GpuClustering => (clustering_score(context), context.fullest()),
            Self::GpuPacking => {
                let taken = context.fullest();
                (packing_score(context, &taken), taken)
            }
        }
    }
}

/// A bijection that scatters its input: the finalizer of SplitMix64 (Steele et al., OOPSLA'14).
fn mixed(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn random_score(context: &ScoringContext<'_>, chance: u64) -> i64 {
    let name = context.node.name().as_str();
    let seed = name.as_bytes().chunks(8).fold(chance, |hash, part| {
        mixed(part.iter().fold(hash, |word, byte| word.rotate_left(8) ^ u64::from(*byte)))
    });
    i64::try_from(seed >> 1).expect("63 bits fit")
}

fn dot_product_score(context: &ScoringContext<'_>) -> i64 {
    let requested: i64 =
        context.fits.iter().take(context.compiled.count()).map(|(_, d)| whole(d.share)).sum();
    let cpu =
        i128::from(context.host_free.cpu.milli()) * i128::from(context.compiled.host.cpu.milli());
    let gpu = i128::from(free_gpu(context)) * i128::from(requested);
    let [most_cpu, most_gpu] = [MAX_CPU, MAX_GPU].map(|most| i128::from(most) * i128::from(most));
    let unit = most_cpu * most_gpu;
    let score = (100 * unit - 50 * (cpu * most_gpu + gpu * most_cpu)) / unit;
    i64::try_from(score).expect("a score is at most 100")
}

fn clustering_score(context: &ScoringContext<'_>) -> i64 {
    if context.compiled.count() == 0 {
        return 0;
    }
    let own = class_of(context.compiled.count(), context.compiled.is_whole());
    let present: BTreeSet<usize> =
        context.node.reservations().values().filter_map(class_of_tenant).collect();
    let used = 25 * (MAX_GPU - free_gpu(context)) / MAX_GPU;
    match (present.contains(&own), present.len()) {
        (true, 1) => 75 + used,
        (true, _) => 50 + used,
        (false, 0) => 25 + used,
        (false, _) => used,
    }
}

/// Class of a pod: 0 for a share of a GPU, else its number of GPUs.
fn class_of(count: usize, is_whole: bool) -> usize {
    if is_whole { count } else { 0 }
}

fn class_of_tenant(tenant: &Reservation) -> Option<usize> {
    let devices = &tenant.placement.devices;
    let first = devices.first()?;
    Some(class_of(devices.len(), first.demand.share == Share::WHOLE))
}

fn packing_score(context: &ScoringContext<'_>, taken: &[Taken]) -> i64 {
    if taken.is_empty() {
        return 0;
    }
    let free = context.rooms.iter().filter(|room| room.free.share == Share::WHOLE).count();
    let opened = taken.iter().map(|(at, _)| context.rooms[*at].free.share);
    let opened = opened.filter(|share| *share == Share::WHOLE).count();
    let is_empty = free == context.rooms.len();
    let [free, opened] =
        [free, opened].map(|count| i64::try_from(count).expect("a node has few devices"));
    if is_empty {
        return (33 - free).max(free);
    }
    if opened > 0 {
        return (50 - opened).max(33);
    }
    let left: i64 = taken.iter().map(|(at, _)| whole(context.rooms[*at].free.share) / 10_000).sum();
    (100 - left / 10).max(50)
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::num::NonZeroU32;

    use super::*;
    use engine::hardware::device_class::DeviceClasses;
    use engine::hardware::inventory::NodeInventory;
    use engine::hardware::pool::ConfiguredIsolation;
    use engine::model::device_state::HoldRule;
    use engine::model::fit::{CompiledRequest, HostRule};
    use engine::model::node_state::NodeState;
    use engine::model::request::{Amount, GpuRequest};
    use engine::model::reservation::{
        BorrowedMemory, Departure, PlacedDevice, Placement, PodRef, ReservationState,
    };
    use engine::scoring::cost::{Cost, LocalCost};
    use engine::scoring::plan;
    use engine::scoring::strategy::{CustomCost, Strategy};
    use wire::device::{Device, DeviceIndex, DeviceKind, Health};
    use wire::ids::{DeviceId, ModelName, NodeName, PodUid, PoolName};
    use wire::units::Demand;
    use wire::units::{HostAmount, MemMib, MilliCpu, Timestamp};

    const HALF: Amount = Amount::Fraction(Share::from_millionths(500_000));

    /// A pod that holds these thousandths of a device.
    fn tenant(id: &DeviceId, held: u64) -> Reservation {
        let memory = MemMib::new(held);
        let demand = Demand { memory, share: Share::from_millionths(held * 1000) };
        Reservation {
            pod: PodRef { uid: PodUid::new(id.to_string()), name: "tenant".into() },
            placement: Placement {
                node: NodeName::new("n"),
                devices: vec![PlacedDevice { id: id.clone(), demand }],
                isolation: ConfiguredIsolation::None,
                guest: None,
                spots: Vec::new(),
            },
            host: HostAmount::ZERO,
            state: ReservationState::Confirmed,
            request: None,
            tenure: None,
            departure: Departure::Stays,
            borrowed: BorrowedMemory::Free,
            is_hung: false,
        }
    }

    /// A node with 16 cores, and GPUs with these thousandths free.
    fn node(free: &[u64]) -> (NodeState, DeviceClasses) {
        let mut node = NodeState::new(NodeName::new("n"), MemMib::ZERO);
        let host = HostAmount { cpu: MilliCpu::new(16_000), memory: MemMib::new(65_536) };
        node.see_node(host, PoolName::new(""));
        let device = |index: u32| Device {
            id: DeviceId::new(&format!("GPU-{index}")).unwrap(),
            index: DeviceIndex(index),
            model: ModelName::new("T4"),
            total: MemMib::new(1000),
            reserved: MemMib::ZERO,
            kind: DeviceKind::Gpu,
            health: Health::Healthy,
        };
        let devices: Vec<Device> = (0..).zip(free).map(|(index, _)| device(index)).collect();
        let mut classes = DeviceClasses::default();
        node.replace_inventory(&NodeInventory::new(devices.clone()).unwrap(), &mut classes);
        node.observe(&[], Timestamp::START);
        for (device, free) in devices.iter().zip(free).filter(|(_, free)| **free < 1000) {
            node.allocate(tenant(&device.id, 1000 - free));
        }
        (node, classes)
    }

    /// The score of the best placement, and the position of its first device. The pod requests devices and
    /// thousandths of a core.
    fn place(
        baseline: Baseline,
        free: &[u64],
        amount: Option<Amount>,
        count: u32,
        cpu: u64,
    ) -> (i64, Option<usize>) {
        let (node, classes) = node(free);
        let gpu = amount.map(|amount| GpuRequest::several(amount, NonZeroU32::new(count).unwrap()));
        let host = HostAmount { cpu: MilliCpu::new(cpu), memory: MemMib::ZERO };
        let compiled = CompiledRequest::new(gpu, host, HostRule::Checked, &classes);
        let (strategy, mix) = (Strategy::Custom(CustomCost::new(baseline)), CompiledMix::none());
        let place = plan::evaluate(&node, &compiled, &strategy, &mix, HoldRule::Respected).unwrap();
        let LocalCost::Ranked(Cost::Custom { score: Reverse(score) }) = place.local_cost else {
            panic!("{place:?}")
        };
        (score, place.taken.first().map(|(position, _)| *position))
    }

    #[test]
    fn scores_are_those_of_the_formulas() {
        let (half, whole) = (Some(HALF), Some(Amount::Whole));
        for (baseline, free, amount, (count, cpu), expected) in [
            // 100 - 50 (16 x 4 / 128^2 + 1.5 x 0.5 / 8^2) = 99.2
            (Baseline::DotProd, &[1000, 500][..], &half, (1, 4_000), (99, 1)),
            // 100 - 50 (16 x 16 / 128^2 + 8 x 4 / 8^2) = 74.2
            (Baseline::DotProd, &[1000; 8], &whole, (4, 16_000), (74, 0)),
            // one class, its own: 75 + 25 (8 - 1.5) / 8 = 95.3
            (Baseline::GpuClustering, &[1000, 500], &half, (1, 4_000), (95, 1)),
            // one class, another: 25 (8 - 1.5) / 8 = 20.3
            (Baseline::GpuClustering, &[1000, 500], &whole, (1, 0), (20, 0)),
            // two classes, its own among them: 50 + 25 (8 - 1.5) / 8 = 70.3
            (Baseline::GpuClustering, &[500, 1000, 0], &half, (1, 4_000), (70, 0)),
            // no class: 25 + 25 (8 - 2) / 8 = 43.75
            (Baseline::GpuClustering, &[1000, 1000], &half, (1, 4_000), (43, 0)),
            // a used GPU with half of it free: 100 - 50 / 10
            (Baseline::GpuPacking, &[1000, 500], &half, (1, 4_000), (95, 1)),
            // a free GPU of a used node: 50 - 1
            (Baseline::GpuPacking, &[1000, 500], &whole, (1, 0), (49, 0)),
            // an empty node of two: 33 - 2
            (Baseline::GpuPacking, &[1000, 1000], &half, (1, 4_000), (31, 0)),
        ] {
            let (score, device) = place(baseline, free, amount.clone(), count, cpu);
            assert_eq!((score, device.unwrap()), expected, "{baseline:?}: {amount:?} on {free:?}");
        }
    }

    #[test]
    fn the_caller_provides_randomness_and_every_device_can_be_drawn() {
        let draw = |chance| place(Baseline::Random { chance }, &[1000; 8], Some(HALF), 1, 0);
        assert_eq!(draw(1), draw(1));
        let devices: BTreeSet<_> = (0..100).map(|chance| draw(chance).1).collect();
        assert_eq!(devices.len(), 8);
        let scores: BTreeSet<_> = (0..100).map(|chance| draw(chance).0).collect();
        assert_eq!(scores.len(), 100);
    }

    #[test]
    fn a_pod_without_gpu_takes_no_device() {
        for baseline in [
            Baseline::Random { chance: 1 },
            Baseline::DotProd,
            Baseline::GpuClustering,
            Baseline::GpuPacking,
        ] {
            assert_eq!(place(baseline, &[500], None, 1, 1000).1, None, "{baseline:?}");
        }
    }
}
