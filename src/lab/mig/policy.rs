//! The policies that are compared: ours, and published ones as they can be read.

use crate::mig::fleet::MigFleet;
use crate::mig::mig_worlds::MigStage;
use engine::hardware::layouts::{LayoutId, Layouts, ProfileIndex, Start};
use engine::waste::mig::class::{MigClass, MigClassId};
use engine::waste::mig::decision::{Decision, MigCandidate, Scratch};
use engine::waste::mig::mix::MigMix;
use engine::waste::mig::window::MigWindow;

/// A rule by which GPU and start are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MigPolicy {
    /// The potential of [`engine::waste::mig::decision`].
    Ours,
    /// The same; for a request that fits nowhere, one running instance is moved.
    OursWithMove,
    /// The formula of FGD (USENIX ATC'23) on MIG: the free units that a request of the mix cannot use, on
    /// average over the mix; the least increase wins.
    Fgd,
    /// HAMi since August 2026: the GPU with the fewest free units; there the start that leaves the longest
    /// free run, then most legal placements.
    Hami,
    /// The fragmentation score of arXiv 2511.18906: the sizes of all blocked starts of the profiles that
    /// would fit by free units; the least increase wins.
    Mfi,
    /// The first GPU, the lowest start: InstaSlice, and DRA without a score.
    FirstFit,
}

impl MigPolicy {
    /// All, ours first.
    pub const ALL: [Self; 6] =
        [Self::Ours, Self::OursWithMove, Self::Fgd, Self::Hami, Self::Mfi, Self::FirstFit];

    /// Its name in the output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "gpupack",
            Self::OursWithMove => "gpupack, one move",
            Self::Fgd => "fgd",
            Self::Hami => "hami",
            Self::Mfi => "mfi",
            Self::FirstFit => "first-fit",
        }
    }
}

/// What one start costs; smaller is better.
type Cost = (i64, Start);

/// By class, layout and profile: the best start.
type StartTable = Vec<Vec<Vec<Option<Cost>>>>;

/// A policy at work: it learns the mix as requests come.
#[derive(Debug)]
pub(crate) struct Chooser<'a> {
    policy: MigPolicy,
    stage: &'a MigStage,
    window: MigWindow<usize>,
    mix: MigMix,
    scratch: Scratch,
    /// Of the policies that compare by a table.
    table: StartTable,
}

impl<'a> Chooser<'a> {
    pub(crate) fn new(policy: MigPolicy, stage: &'a MigStage) -> Self {
        let window = MigWindow::default();
        let mix = MigMix::learned(&stage.classes, &stage.types, &stage.ids, &window);
        let scratch = Scratch::default();
        let mut chooser = Self { policy, stage, window, mix, scratch, table: StartTable::new() };
        chooser.table = match policy {
            MigPolicy::Ours | MigPolicy::OursWithMove => StartTable::new(),
            MigPolicy::Fgd => chooser.fgd(),
            MigPolicy::Hami => table(stage, |layouts, from, to| {
                let free = i64::from(layouts.free_units(from));
                let runs = i64::from(longest_run(layouts, to));
                let placements: u32 =
                    layouts.profiles().map(|profile| layouts.fits(to, profile)).sum();
                free * 1_000_000 - runs * 1_000 - i64::from(placements)
            }),
            MigPolicy::Mfi => {
                table(stage, |layouts, from, to| blocked(layouts, to) - blocked(layouts, from))
            }
            MigPolicy::FirstFit => table(stage, |_, _, _| 0),
        };
        chooser
    }

    /// Notes a request before it is placed.
    pub(crate) fn observe(&mut self, request: usize, kind: usize) {
        // the others know no mix
        let learns = [MigPolicy::Ours, MigPolicy::OursWithMove, MigPolicy::Fgd];
        if !learns.contains(&self.policy) || !self.window.observe(&request, self.stage.ids[kind]) {
            return;
        }
        let MigStage { classes, types, ids, .. } = self.stage;
        self.mix = MigMix::learned(classes, types, ids, &self.window);
        if self.policy == MigPolicy::Fgd {
            self.table = self.fgd();
        }
    }

    /// The potentials of now.
    pub(crate) fn decision<'b>(&'b mut self, fleet: &MigFleet<'b>, kind: usize) -> Decision<'b>
    where
        'a: 'b,
    {
        let (mix, supply) = (&self.mix, fleet.supply());
        let kind = &self.stage.kinds[kind];
        Decision::new(&self.stage.classes, mix, supply, kind, &mut self.scratch)
    }

    /// GPU and start for a request; `None` if it fits nowhere.
    pub(crate) fn choose(&mut self, fleet: &MigFleet<'_>, kind: usize) -> Option<(usize, Start)> {
        if matches!(self.policy, MigPolicy::Ours | MigPolicy::OursWithMove) {
            let chosen = self.decision(fleet, kind).choose(fleet.candidates())?;
            return Some((chosen.device, chosen.start));
        }
        let costs = fleet.candidates().filter_map(|MigCandidate { device, class, layout }| {
            let profile = self.stage.kinds[kind].on(class)?;
            let (cost, start) = self.table[class.0][layout.position()][profile.position()]?;
            Some((cost, device, start))
        });
        let (_, gpu, start) = costs.min()?;
        Some((gpu, start))
    }

    fn fgd(&self) -> StartTable {
        let weights: Vec<f64> = self.mix.weights().map(|(_, weight)| weight).collect();
        let kinds: Vec<_> = self.mix.weights().map(|(id, _)| self.stage.types.kind(id)).collect();
        let tables = (0..self.stage.classes.len()).map(|class| {
            let layouts = self.stage.classes[class].layouts();
            let unusable = layouts.ids().map(|layout| {
                let free = layouts.free_units(layout);
                let part = kinds.iter().zip(&weights).map(|(kind, weight)| {
                    let used =
                        kind.on(MigClassId(class)).map(|profile| usable(layouts, layout, profile));
                    weight * f64::from(free - used.unwrap_or(0))
                });
                millionths(part.sum())
            });
            let unusable: Vec<i64> = unusable.collect();
            class_table(layouts, |from, to| unusable[to.position()] - unusable[from.position()])
        });
        tables.collect()
    }
}

fn millionths(value: f64) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "units of a GPU are few")]
    {
        libm::floor(value * 1e6) as i64
    }
}

/// The best start of each layout and profile by a cost of the layouts before and after.
fn table(stage: &MigStage, cost: impl Fn(&Layouts, LayoutId, LayoutId) -> i64) -> StartTable {
    let layouts = stage.classes.iter().map(MigClass::layouts);
    layouts.map(|layouts| class_table(layouts, |from, to| cost(layouts, from, to))).collect()
}

fn class_table(
    layouts: &Layouts,
    cost: impl Fn(LayoutId, LayoutId) -> i64,
) -> Vec<Vec<Option<Cost>>> {
    let by_layout = layouts.ids().map(|from| {
        let best = layouts.profiles().map(|profile| {
            layouts.starts(from, profile).map(|(start, to)| (cost(from, to), start)).min()
        });
        best.collect()
    });
    by_layout.collect()
}

/// The free units that instances of a profile can use.
fn usable(layouts: &Layouts, layout: LayoutId, profile: ProfileIndex) -> u32 {
    match layouts.fits(layout, profile) {
        0 => 0,
        _ => layouts.free_units(layout),
    }
}

/// The longest run of free units.
fn longest_run(layouts: &Layouts, layout: LayoutId) -> u32 {
    let (mut longest, mut own) = (0, 0);
    for unit in 0..layouts.geometry().axis {
        own = if layouts.mask(layout) >> unit & 1 == 0 { own + 1 } else { 0 };
        longest = longest.max(own);
    }
    longest
}

/// Sizes of the starts that are not free, of profiles with no more units than are free.
fn blocked(layouts: &Layouts, layout: LayoutId) -> i64 {
    let (mask, free) = (layouts.mask(layout), layouts.free_units(layout));
    let profiles = layouts.geometry().profiles.iter().filter(|profile| profile.size <= free);
    let blocked = profiles.flat_map(|profile| {
        let starts = profile.starts.iter();
        let taken = starts.filter(move |start| profile.units(**start) & mask != 0);
        taken.map(|_| i64::from(profile.size))
    });
    blocked.sum()
}
