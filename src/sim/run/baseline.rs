//! Placement rules of the literature, as the simulator of the FGD paper (USENIX ATC'23) has them.
//! The product's policies are compared with them.
//!
//! Scores are whole numbers from 0 to 100, larger is better. `bestfit` scales them by the largest node of
//! the public trace (128 cores, 8 GPUs), and takes the fullest GPU that fits.

use std::cmp::Reverse;

use engine::scoring::context::{ScoringContext, Taken, TakenList};
use engine::scoring::fragmentation::Uses;
use engine::scoring::strategy::PlacementCost;
use engine::waste::compiled_mix::CompiledMix;
use wire::units::Share;

/// Cores of the largest node, in thousandths.
pub const MAX_CPU: i64 = 128_000;

/// GPUs of the largest node, in millionths.
pub const MAX_GPU: i64 = 8_000_000;

/// A placement rule of the literature.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Baseline {
    /// Least left of CPU and GPU after placement (Protean, OSDI'20).
    BestFit,
    /// Least new fragmentation (FGD, USENIX ATC'23). It knows the mix of the whole trace.
    Fgd,
}

impl PlacementCost for Baseline {
    fn name(&self) -> &'static str {
        match self {
            Self::BestFit => "bestfit",
            Self::Fgd => "fgd",
        }
    }

    fn uses_mix(&self) -> bool {
        matches!(self, Self::Fgd)
    }

    fn choose(&self, context: &ScoringContext<'_>, mix: &CompiledMix) -> (i64, TakenList) {
        match self {
            Self::BestFit => {
                let taken = context.fullest();
                (best_fit_score(context, &taken), taken)
            }
            Self::Fgd => least_fragmenting(context, mix),
        }
    }
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
    let (Reverse(first_score), taken) =
        context.first_of_distinct_by(|fit| Reverse(score(std::slice::from_ref(fit))));
    let score = if taken.len() == 1 { first_score } else { score(&taken) };
    (score, taken)
}

fn best_fit_score(context: &ScoringContext<'_>, taken: &[Taken]) -> i64 {
    let gpu = free_gpu(context) - taken.iter().map(|(_, demand)| whole(demand.share)).sum::<i64>();
    let cpu = i64_of(context.host_left().cpu.milli());
    // 100 (1 - cpu / MAX_CPU / 2 - gpu / MAX_GPU / 2), rounded toward zero
    (100 * MAX_CPU * MAX_GPU - 50 * (cpu * MAX_GPU + gpu * MAX_CPU)) / (MAX_CPU * MAX_GPU)
}

/// The free share of the devices that a request may use, in millionths of a GPU.
pub fn free_gpu(context: &ScoringContext<'_>) -> i64 {
    context.rooms.iter().map(|room| whole(room.free.share)).sum()
}

/// A share, in millionths of a GPU.
pub fn whole(share: Share) -> i64 {
    i64_of(share.millionths())
}

fn i64_of(value: u64) -> i64 {
    i64::try_from(value).expect("amounts of one node are far below 2^63")
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::model::device_state::HoldRule;
    use engine::scoring::cost::{Cost, LocalCost};
    use engine::scoring::strategy::{CustomCost, Strategy};
    use engine::scoring::{node_fixture, plan};

    /// The score of the best placement, and the position of its first device.
    fn place(baseline: Baseline, node: &str, request: &str) -> (i64, Option<usize>) {
        let (node, classes) = node_fixture::node(node);
        let compiled = node_fixture::compiled_request(request, &classes);
        let mix = node_fixture::compiled("", &node, &classes);
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
        ] {
            let found = place(baseline, node, request);
            assert_eq!(found, (score, Some(device)), "{baseline:?}: {request} on {node}");
        }
    }

    #[test]
    fn a_pod_without_gpu_takes_no_device() {
        let placed = place(Baseline::BestFit, "A:500/1000", "cpu=1000");
        assert_eq!(placed.1, None);
    }
}
