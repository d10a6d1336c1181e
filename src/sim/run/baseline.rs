//! Placement rules of the literature, as the simulator of the FGD paper (USENIX ATC'23) has them.
//! The product's policies are compared with them.
//!
//! Scores are whole numbers from 0 to 100, larger is better, scaled by the largest node of the
//! public trace (128 cores, 8 GPUs). Among fractional GPUs all of them take the fullest that fits.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::hardware::units::{Demand, Share};
use crate::model::reservation::Reservation;
use crate::scoring::context::{ScoringContext, Taken, TakenList};
use crate::scoring::fragmentation::Uses;
use crate::scoring::strategy::PlacementCost;
use crate::waste::compiled_mix::CompiledMix;

/// Cores of the largest node, in thousandths.
const MAX_CPU: i64 = 128_000;

/// GPUs of the largest node, in millionths.
const MAX_GPU: i64 = 8_000_000;

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
    /// Least left of CPU and GPU after placement (Protean, OSDI'20).
    BestFit,
    /// Least new fragmentation (FGD, USENIX ATC'23). It knows the mix of the whole trace.
    Fgd,
}

impl PlacementCost for Baseline {
    fn name(&self) -> &'static str {
        match self {
            Self::Random { .. } => "random",
            Self::DotProd => "dotprod",
            Self::GpuClustering => "gpuclustering",
            Self::GpuPacking => "gpupacking",
            Self::BestFit => "bestfit",
            Self::Fgd => "fgd",
        }
    }

    fn is_repeatable(&self) -> bool {
        !matches!(self, Self::Random { .. })
    }

    fn uses_mix(&self) -> bool {
        matches!(self, Self::Fgd)
    }

    fn choose(&self, context: &ScoringContext<'_>, mix: &CompiledMix) -> (i64, TakenList) {
        let by_chance = |chance: u64, at: usize| {
            mixed(chance ^ mixed(u64::try_from(at).expect("positions are small")))
        };
        let fullest = || context.first_by(|(at, _)| context.rooms[*at].free.share);
        match self {
            Self::Random { chance } => {
                let taken = context.first_by(|(at, _)| by_chance(*chance, *at));
                (random_score(context, *chance), taken)
            }
            Self::DotProd => (dot_product_score(context), fullest()),
            Self::GpuClustering => (clustering_score(context), fullest()),
            Self::GpuPacking => scored(fullest(), |taken| packing_score(context, taken)),
            Self::BestFit => scored(fullest(), |taken| best_fit_score(context, taken)),
            Self::Fgd => least_fragmenting(context, mix),
        }
    }
}

fn scored(taken: TakenList, score: impl Fn(&[Taken]) -> i64) -> (i64, TakenList) {
    (score(&taken), taken)
}

/// The devices with the highest score. Whole devices of one class are equal, so the first ones are
/// taken; of others each is scored alone, then all together.
fn least_fragmenting(context: &ScoringContext<'_>, mix: &CompiledMix) -> (i64, TakenList) {
    let uses = Uses::of(&mix.typical, context.rooms);
    let usability = uses.on(&mix.typical, context.rooms);
    let before = usability.fragments(context.host_free.cpu);
    let score = |taken: &[Taken]| {
        let after = usability.fragments_after(taken, context.host_left().cpu);
        i64::from(usability.score(before, after))
    };
    if context.compiled.count() == 0 || (context.compiled.is_whole() && context.is_of_one_class()) {
        let taken = TakenList::from_slice(&context.fits[..context.compiled.count()]);
        return (score(&taken), taken);
    }
    let alone = |fit: &Taken| Reverse(score(std::slice::from_ref(fit)));
    let (Reverse(first_score), taken) = context.first_of_distinct_by(alone);
    let score = if taken.len() == 1 { first_score } else { score(&taken) };
    (score, taken)
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

fn best_fit_score(context: &ScoringContext<'_>, taken: &[Taken]) -> i64 {
    let gpu = free_gpu(context) - taken.iter().map(|(_, demand)| whole(demand.share)).sum::<i64>();
    let cpu = i64_of(context.host_left().cpu.milli());
    // 100 (1 - cpu / MAX_CPU / 2 - gpu / MAX_GPU / 2), rounded toward zero
    (100 * MAX_CPU * MAX_GPU - 50 * (cpu * MAX_GPU + gpu * MAX_CPU)) / (MAX_CPU * MAX_GPU)
}

fn dot_product_score(context: &ScoringContext<'_>) -> i64 {
    let requested: i64 =
        context.fits.iter().take(context.compiled.count()).map(|(_, d)| whole(d.share)).sum();
    let square = |max: i64| i128::from(max) * i128::from(max);
    let cpu =
        i128::from(context.host_free.cpu.milli()) * i128::from(context.compiled.host.cpu.milli());
    let gpu = i128::from(free_gpu(context)) * i128::from(requested);
    let unit = square(MAX_CPU) * square(MAX_GPU);
    let score = (100 * unit - 50 * (cpu * square(MAX_GPU) + gpu * square(MAX_CPU))) / unit;
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
    let is_free = |free: Demand| free.share == Share::WHOLE;
    let free = context.rooms.iter().filter(|room| is_free(room.free)).count();
    let count = |number: usize| i64::try_from(number).expect("a node has few devices");
    if free == context.rooms.len() {
        return (33 - count(free)).max(count(free));
    }
    let opened = taken.iter().filter(|(at, _)| is_free(context.rooms[*at].free)).count();
    if opened > 0 {
        return (50 - count(opened)).max(33);
    }
    let left: i64 = taken.iter().map(|(at, _)| whole(context.rooms[*at].free.share) / 10_000).sum();
    (100 - left / 10).max(50)
}

fn free_gpu(context: &ScoringContext<'_>) -> i64 {
    context.rooms.iter().map(|room| whole(room.free.share)).sum()
}

fn whole(share: Share) -> i64 {
    i64_of(share.millionths())
}

fn i64_of(value: u64) -> i64 {
    i64::try_from(value).expect("amounts of one node are far below 2^63")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::device_state::HoldRule;
    use crate::scoring::cost::{Cost, LocalCost};
    use crate::scoring::strategy::{CustomCost, Strategy};
    use crate::scoring::{fixture, plan};

    /// The score of the best placement, and the position of its first device.
    fn place(baseline: Baseline, node: &str, request: &str) -> (i64, Option<usize>) {
        let (node, classes) = fixture::node(node);
        let compiled = fixture::compiled_request(request, &classes);
        let mix = fixture::compiled("", &node, &classes);
        let strategy = Strategy::Custom(CustomCost::new(baseline));
        let place = plan::evaluate(&node, &compiled, &strategy, &mix, HoldRule::Respected).unwrap();
        let LocalCost::Ranked(Cost::Custom { score: Reverse(score) }) = place.local_cost else {
            panic!("{place:?}")
        };
        (score, place.taken.first().map(|(position, _)| *position))
    }

    #[test]
    fn scores_are_those_of_the_formulas() {
        let half = "fraction=0.5 cpu=4000";
        for (baseline, node, request, score, device) in [
            // 100 (1 - 12000 / 128000 / 2 - 1 / 8 / 2) = 89.06
            (Baseline::BestFit, "B:1000/1000 A:500/1000", half, 89, 1),
            // 100 (1 - 12000 / 128000 / 2 - 0.5 / 8 / 2) = 92.2
            (Baseline::BestFit, "A:500/1000 B:500/1000", half, 92, 0),
            // 100 - 50 (16 x 4 / 128^2 + 1.5 x 0.5 / 8^2) = 99.2
            (Baseline::DotProd, "B:1000/1000 A:500/1000", half, 99, 1),
            // 100 - 50 (16 x 16 / 128^2 + 8 x 4 / 8^2) = 74.2
            (Baseline::DotProd, EIGHT, "whole count=4 cpu=16000", 74, 0),
            // one class, its own: 75 + 25 (8 - 1.5) / 8 = 95.3
            (Baseline::GpuClustering, "B:1000/1000 A:500/1000", half, 95, 1),
            // one class, another: 25 (8 - 1.5) / 8 = 20.3
            (Baseline::GpuClustering, "B:1000/1000 A:500/1000", "whole", 20, 0),
            // two classes, its own among them: 50 + 25 (8 - 1.5) / 8 = 70.3
            (Baseline::GpuClustering, "A:500/1000 B:1000/1000 C:0/1000", half, 70, 0),
            // no class: 25 + 25 (8 - 2) / 8 = 43.75
            (Baseline::GpuClustering, "A:1000/1000 B:1000/1000", half, 43, 0),
            // a used GPU with half of it free: 100 - 50 / 10
            (Baseline::GpuPacking, "B:1000/1000 A:500/1000", half, 95, 1),
            // a free GPU of a used node: 50 - 1
            (Baseline::GpuPacking, "B:1000/1000 A:500/1000", "whole", 49, 0),
            // an empty node of two: 33 - 2
            (Baseline::GpuPacking, "A:1000/1000 B:1000/1000", half, 31, 0),
        ] {
            let found = place(baseline, node, request);
            assert_eq!(found, (score, Some(device)), "{baseline:?}: {request} on {node}");
        }
    }

    const EIGHT: &str = "A:1000/1000 B:1000/1000 C:1000/1000 D:1000/1000 \
                         E:1000/1000 F:1000/1000 G:1000/1000 H:1000/1000";

    #[test]
    fn the_caller_provides_randomness_and_every_device_can_be_drawn() {
        let draw = |chance| place(Baseline::Random { chance }, EIGHT, "fraction=0.5");
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
            Baseline::BestFit,
        ] {
            assert_eq!(place(baseline, "A:500/1000", "cpu=1000").1, None, "{baseline:?}");
        }
    }
}
