//! What one node's free room is worth as it is, and what a place there changes of it.
//!
//! The former, the [`Outlook`], is the same for all that is asked of the node, so it is kept until the
//! node or the mix changes.

use std::cell::Cell;
use std::cmp::Reverse;

use crate::model::fit::Room;
use crate::scoring::context::{Outlook, Scene, Taken, TakenList};
use crate::scoring::fragmentation::{Usability, Uses};
use crate::waste::expected_waste::Forecast;
use crate::waste::mix_rows::MixRows;
use crate::waste::numbers::fixed;
use crate::waste::scarcity::Worth;

/// The devices whose use leaves the node's room worth most, and by how much.
pub(crate) fn choose(
    forecast: &Forecast,
    scene: &Scene<'_>,
    typical: &MixRows,
) -> (Worth, TakenList) {
    let outlook = scene.outlook.get_or_init(|| Outlook::of(forecast, scene));
    let usability = outlook.uses.on(&forecast.requests_of_several, scene.rooms);
    let node = Node { forecast, scene, outlook, usability, after: Cell::new(None) };
    let (change, taken) =
        if scene.ask.count() == 0 || (scene.ask.is_whole() && scene.is_of_one_class()) {
            let taken = scene.any();
            (node.change(&taken), taken)
        } else {
            // Devices of several classes may be worth the same; then it counts who wants them.
            let uses = (!scene.is_of_one_class()).then(|| Uses::of(typical, scene.rooms));
            let usability = uses.as_ref().map(|uses| uses.on(typical, scene.rooms));
            let left = scene.host_left().cpu;
            let alone = |fit: &Taken| {
                let fit = std::slice::from_ref(fit);
                let (gain, spared) = node.change(fit);
                let wanted = usability.map(|all| all.fragments_after(fit, left));
                (Reverse(gain), Reverse(spared), wanted)
            };
            let ((gain, spared, _), taken) = scene.first_of_distinct_by(alone);
            (if taken.len() == 1 { (gain.0, spared.0) } else { node.change(&taken) }, taken)
        };
    let class = taken.first().map_or(outlook.class, |(at, _)| scene.rooms[*at].class);
    let share = match taken.len() {
        0 => outlook.free,
        _ => taken.iter().map(|(_, demand)| demand.share.millionths()).sum(),
    };
    let share = i64::try_from(share).expect("a node has few GPUs");
    (Worth { gain: change.0, spared: change.1, class, share }, taken)
}

/// One node for one question: what is the same for all its devices is worked out once.
struct Node<'a> {
    forecast: &'a Forecast,
    scene: &'a Scene<'a>,
    outlook: &'a Outlook,
    usability: Usability<'a>,
    /// Waste of the host's making after a share is taken, for the share that was asked for last.
    after: Cell<Option<(u64, f64)>>,
}

impl Node<'_> {
    /// The waste that taking these devices avoids, and the room for several that it spares, both in
    /// millionths of a GPU.
    fn change(&self, taken: &[Taken]) -> (i64, i64) {
        let mut holes = 0.0;
        let mut share = 0;
        for (position, demand) in taken {
            let Room { class, free, .. } = self.scene.rooms[*position];
            let left = free.checked_sub(*demand).expect("only what fits is tried");
            holes += self.forecast.hole(class, free) - self.forecast.hole(class, left);
            if self.forecast.holes.knows(class) {
                share += demand.share.millionths();
            }
        }
        let left = self.scene.host_left();
        let host = match self.after.get() {
            Some((known, host)) if known == share => host,
            _ => self.forecast.host(self.outlook.free - share, left),
        };
        self.after.set(Some((share, host)));
        let several = self.forecast.several(self.usability.fragments_after(taken, left.cpu));
        (fixed(holes + self.outlook.host - host, 1e6), fixed(self.outlook.several - several, 1e6))
    }
}
