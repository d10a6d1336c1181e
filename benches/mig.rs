//! How long it takes to choose where a MIG instance is made, and to keep the counters for that.
//!
//! *change* is one GPU that gets another layout; *question* the best start on 1,000 GPUs, once per layout and
//! once over all of them; *class* a new mix for one class. Run with `cargo bench --bench mig`.

use std::collections::BTreeMap;
use std::hint::black_box;

use criterion::Criterion;
use engine::hardware::layouts::{LayoutId, ProfileIndex};
use engine::hardware::mig::GEOMETRIES;
use engine::waste::mig::class::{MigClass, MigClassId};
use engine::waste::mig::decision::{Decision, MigCandidate, Scratch};
use engine::waste::mig::mig_supply::MigSupply;
use engine::waste::mig::mix::MigMix;
use engine::waste::mig::types::{MigType, TypeId, Types};

const GPUS: usize = 1_000;

const ONLY: MigClassId = MigClassId(0);

/// A fleet that has taken requests of all profiles in turn until it was almost full.
struct Fleet {
    classes: Vec<MigClass>,
    types: Types,
    ids: Vec<TypeId>,
    layouts: Vec<LayoutId>,
    supply: MigSupply,
    mix: MigMix,
}

impl Fleet {
    fn new() -> Self {
        let classes = vec![MigClass::new(&GEOMETRIES[2]).expect("its tables are small")];
        let mut types = Types::default();
        let profiles = classes[0].layouts().profiles();
        let ids = profiles.map(|profile| types.id(&MigType::new([Some(profile)])));
        let ids: Vec<TypeId> = ids.map(|id| id.expect("types are few")).collect();
        let mut supply = MigSupply::none(&classes);
        let layouts = vec![LayoutId::EMPTY; GPUS];
        layouts.iter().for_each(|layout| supply.add(&classes, ONLY, *layout));
        let mix = MigMix::of(&classes, &types, ids.iter().map(|id| (*id, 83)));
        let mut fleet = Self { classes, types, ids, layouts, supply, mix };
        let mut scratch = Scratch::default();
        for request in 0..2_200 {
            fleet.place(request % 6, &mut scratch);
        }
        fleet
    }

    fn place(&mut self, kind: usize, scratch: &mut Scratch) {
        let id = self.ids[kind];
        let Some(chosen) = self.decision(kind, scratch).choose(self.all()) else { return };
        let profile = self.profile(kind);
        let from = self.layouts[chosen.device];
        let to = self.classes[0].layouts().put(from, profile, chosen.start);
        let to = to.expect("the start is free");
        self.supply.change(&self.classes, ONLY, from, to);
        self.supply.start(id);
        self.layouts[chosen.device] = to;
    }

    fn profile(&self, kind: usize) -> ProfileIndex {
        self.types.kind(self.ids[kind]).on(ONLY).expect("each type is served")
    }

    fn decision<'a>(&'a self, kind: usize, scratch: &'a mut Scratch) -> Decision<'a> {
        let kind = self.types.kind(self.ids[kind]);
        Decision::new(&self.classes, &self.mix, &self.supply, kind, scratch)
    }

    fn all(&self) -> impl Iterator<Item = MigCandidate<usize>> {
        let layouts = self.layouts.iter().enumerate();
        layouts.map(|(device, layout)| MigCandidate { device, class: ONLY, layout: *layout })
    }

    /// The first GPU of each layout.
    fn firsts(&self) -> Vec<MigCandidate<usize>> {
        let mut firsts = BTreeMap::new();
        for gpu in self.all() {
            firsts.entry(gpu.layout).or_insert(gpu);
        }
        firsts.into_values().collect()
    }
}

/// The counters are those of all GPUs, and both ways to ask give one answer.
fn check(fleet: &Fleet, scratch: &mut Scratch) {
    let mut recounted = MigSupply::none(&fleet.classes);
    fleet.layouts.iter().for_each(|layout| recounted.add(&fleet.classes, ONLY, *layout));
    assert_eq!(recounted.free_units(), fleet.supply.free_units());
    assert!((200..2_000).contains(&fleet.supply.free_units()), "almost full");
    for kind in 0..6 {
        let all = fleet.decision(kind, scratch).choose(fleet.all());
        assert_eq!(all, fleet.decision(kind, scratch).choose(fleet.firsts()));
        assert!(all.is_some() || kind == 5, "only whole GPUs may be out");
    }
}

fn mig(criterion: &mut Criterion) {
    let fleet = Fleet::new();
    let mut scratch = Scratch::default();
    check(&fleet, &mut scratch);
    let layouts = fleet.classes[0].layouts();
    let (from, to) = layouts
        .ids()
        .find_map(|id| layouts.starts(id, fleet.profile(0)).next().map(|(_, to)| (id, to)))
        .expect("an empty GPU has room");
    let mut supply = MigSupply::none(&fleet.classes);
    supply.add(&fleet.classes, ONLY, from);
    criterion.bench_function("change", |bencher| {
        bencher.iter(|| {
            supply.change(&fleet.classes, ONLY, black_box(from), black_box(to));
            supply.change(&fleet.classes, ONLY, black_box(to), black_box(from));
        });
    });
    let firsts = fleet.firsts();
    let mut kind = 0;
    criterion.bench_function(&format!("question/{}-layouts", firsts.len()), |bencher| {
        bencher.iter(|| {
            kind = (kind + 1) % 6;
            fleet.decision(kind, &mut scratch).choose(black_box(&firsts).iter().copied())
        });
    });
    criterion.bench_function(&format!("question/{GPUS}-gpus"), |bencher| {
        bencher.iter(|| {
            kind = (kind + 1) % 6;
            fleet.decision(kind, &mut scratch).choose(black_box(&fleet).all())
        });
    });
    criterion.bench_function("class", |bencher| {
        let counts = || fleet.ids.iter().map(|id| (*id, 83));
        bencher.iter(|| MigMix::of(black_box(&fleet.classes), &fleet.types, counts()));
    });
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    mig(&mut criterion);
    criterion.final_summary();
}
