//! One running instance is moved for a request that fits nowhere.

use crate::mig::fleet::{Instance, MigFleet};
use crate::mig::policy::Chooser;
use engine::hardware::layouts::{LayoutId, Start};
use engine::waste::mig::decision::Decision;

/// Where an instance goes, and then the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct InstanceMove {
    /// By both GPUs, in 10⁻¹² units.
    cost: i128,
    /// The request whose instance moves.
    moved: usize,
    /// Its new place.
    to: (usize, Start),
    /// The start of the new instance, on the GPU that was left.
    start: Start,
}

/// Moves the instance for which the sum of the potentials rises least, also within its GPU. Returns where
/// the request fits after that; `None` if no single move helps.
pub(crate) fn one_move(
    fleet: &mut MigFleet<'_>,
    chooser: &mut Chooser<'_>,
    kind: usize,
) -> Option<(usize, Start)> {
    let mut decision = chooser.decision(fleet, kind);
    let best = fleet
        .instances()
        .filter_map(|(moved, instance)| best_of(fleet, &mut decision, moved, instance, kind))
        .min()?;
    let instance = fleet.end(best.moved).expect("it runs");
    let (gpu, start) = best.to;
    fleet.put(best.moved, Instance { gpu, start, ..instance });
    Some((instance.gpu, best.start))
}

/// The best way to put the request in place of an instance, and that elsewhere.
fn best_of(
    fleet: &MigFleet<'_>,
    decision: &mut Decision<'_>,
    moved: usize,
    instance: Instance,
    kind: usize,
) -> Option<InstanceMove> {
    let (class, layout) = fleet.gpu(instance.gpu);
    let kinds = &fleet.stage().kinds;
    let profile = kinds[kind].on(class)?;
    let layouts = fleet.layouts(class);
    let left = layouts.take(layout, instance.start)?;
    let after: Vec<(Start, LayoutId)> = layouts.starts(left, profile).collect();
    if after.is_empty() {
        return None;
    }
    let now = decision.potential(class, layout);
    let mut best: Option<InstanceMove> = None;
    let mut offer = |cost, to, start| {
        let own = InstanceMove { cost, moved, to, start };
        best = Some(best.map_or(own, |best| best.min(own)));
    };
    // within its GPU
    for (start, with) in &after {
        let own = kinds[instance.kind].on(class)?;
        for (to, both) in layouts.starts(*with, own) {
            offer(decision.potential(class, both) - now, (instance.gpu, to), *start);
        }
    }
    // to another one, where it costs least whatever comes here
    let here = after.iter().map(|(start, with)| (decision.potential(class, *with) - now, *start));
    let (here, start) = here.min()?;
    let mut there = None;
    for other in fleet.candidates_but(instance.gpu) {
        let Some(own) = kinds[instance.kind].on(other.class) else { continue };
        let before = decision.potential(other.class, other.layout);
        for (to, with) in fleet.layouts(other.class).starts(other.layout, own) {
            let cost = decision.potential(other.class, with) - before;
            let own = (cost, other.device, to);
            there = Some(there.map_or(own, |best: (i128, usize, Start)| best.min(own)));
        }
    }
    if let Some((cost, gpu, to)) = there {
        offer(here + cost, (gpu, to), start);
    }
    best
}
