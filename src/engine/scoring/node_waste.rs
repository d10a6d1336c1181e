//! The expected waste of one node, and how a placement there changes it.
//!
//! The former, the [`NodeWaste`], is the same for all requests. So it is kept until the node or the
//! mix changes.

use std::cell::Cell;
use std::cmp::Reverse;

use crate::model::fit::Room;
use crate::scoring::context::{Making, NodeWaste, ScoringContext, Taken, TakenList};
use crate::scoring::fragmentation::{Usability, Uses};
use crate::waste::expected_waste::ExpectedWaste;
use crate::waste::mix_rows::MixRows;
use crate::waste::numbers::fixed;
use crate::waste::scarcity::WasteChange;

/// The devices that leave the node with the least expected waste, and the change.
pub(crate) fn choose(
    expected_waste: &ExpectedWaste,
    context: &ScoringContext<'_>,
    typical: &MixRows,
    making: &Making,
) -> (WasteChange, TakenList) {
    let node_waste = context.node_waste.get_or_init(|| NodeWaste::of(expected_waste, context));
    let usability = node_waste.uses.on(&expected_waste.requests_of_several, context.rooms);
    let node =
        NodeOfRequest { expected_waste, context, node_waste, usability, after: Cell::new(None) };
    let (change, taken) = if context.makes_instances() {
        // Places of one class differ in what they leave of their GPU.
        let taken = context.first_by(|fit| {
            let change = node.change_by_making(std::slice::from_ref(fit), making);
            (Reverse(change), context.free_units(fit.0))
        });
        (node.change_by_making(&taken, making), taken)
    } else if context.compiled.count() == 0
        || (context.compiled.is_whole() && context.is_of_one_class())
    {
        let taken = context.any();
        (node.change(&taken), taken)
    } else {
        // Devices of several classes may gain the same; then the one that others need less is
        // taken.
        let uses = (!context.is_of_one_class()).then(|| Uses::of(typical, context.rooms));
        let usability = uses.as_ref().map(|uses| uses.on(typical, context.rooms));
        let left = context.host_left().cpu;
        let ((gain, spared, _), taken) = context.first_of_distinct_by(|fit| {
            let fit = std::slice::from_ref(fit);
            let (gain, spared) = node.change(fit);
            let wanted = usability.map(|all| all.fragments_after(fit, left));
            (Reverse(gain), Reverse(spared), wanted)
        });
        (if taken.len() == 1 { (gain.0, spared.0) } else { node.change(&taken) }, taken)
    };
    let class = taken.first().map_or(node_waste.class, |(at, _)| context.rooms[*at].class);
    let share = match taken.len() {
        0 => node_waste.free,
        _ => taken.iter().map(|(_, demand)| demand.share.millionths()).sum(),
    };
    let share = i64::try_from(share).expect("a node has few GPUs");
    (WasteChange { gain: change.0, spared: change.1, class, share }, taken)
}

/// One node for one request: what is the same for all its devices is computed once.
struct NodeOfRequest<'a> {
    expected_waste: &'a ExpectedWaste,
    context: &'a ScoringContext<'a>,
    node_waste: &'a NodeWaste,
    usability: Usability<'a>,
    /// What `ExpectedWaste::host` says after a share is taken, for the last such share.
    after: Cell<Option<(u64, f64)>>,
}

impl NodeOfRequest<'_> {
    /// The waste that taking these devices avoids, and the room for several devices that it keeps,
    /// both in millionths of a GPU.
    fn change(&self, taken: &[Taken]) -> (i64, i64) {
        let mut residuals = 0.0;
        let mut share = 0;
        for (position, demand) in taken {
            let Room { class, free, .. } = self.context.rooms[*position];
            let left = free.checked_sub(*demand).expect("only what fits is tried");
            residuals += self.expected_waste.residual(class, free)
                - self.expected_waste.residual(class, left);
            if self.expected_waste.residuals.knows(class) {
                share += demand.share.millionths();
            }
        }
        let left = self.context.host_left();
        let host = match self.after.get() {
            Some((known, host)) if known == share => host,
            _ => self.expected_waste.host(self.node_waste.free - share, left),
        };
        self.after.set(Some((share, host)));
        let several = self.expected_waste.several(self.usability.fragments_after(taken, left.cpu));
        (
            fixed(residuals + self.node_waste.host - host - self.expected_waste.taking(share), 1e6),
            fixed(self.node_waste.several - several, 1e6),
        )
    }

    /// The same where MIG instances are to be made: the waste avoided less what that costs.
    fn change_by_making(&self, taken: &[Taken], making: &Making) -> (i64, i64) {
        let (gain, spared) = self.change(taken);
        (gain - making.of(taken), spared)
    }
}
