//! Decisions on small clusters, and on random histories.

use proptest::prelude::*;

use super::*;
use crate::hardware::mig::GEOMETRIES;
use crate::waste::mig::types::{TypeId, Types};
use crate::waste::mig::window::MigWindow;

/// GPUs of these geometries, and a type per profile that all of them serve by the place in the list.
struct Cluster {
    classes: Vec<MigClass>,
    types: Types,
    ids: Vec<TypeId>,
    gpus: Vec<(MigClassId, LayoutId)>,
    supply: MigSupply,
    window: MigWindow<usize>,
    mix: MigMix,
    scratch: Scratch,
    running: Vec<(usize, Start, TypeId)>,
    came: usize,
}

impl Cluster {
    fn new(geometries: &[usize], gpus_each: usize) -> Self {
        let classes: Vec<MigClass> =
            geometries.iter().map(|at| MigClass::new(&GEOMETRIES[*at]).unwrap()).collect();
        let profile = |class: &MigClass, at: usize| class.layouts().profiles().nth(at);
        let mut types = Types::default();
        let ids = (0..6).map(|at| MigType::new(classes.iter().map(|class| profile(class, at))));
        let ids: Vec<TypeId> = ids.filter_map(|kind| types.id(&kind)).collect();
        let mut supply = MigSupply::none(&classes);
        let gpus: Vec<_> = (0..classes.len())
            .flat_map(|class| vec![(MigClassId(class), LayoutId::EMPTY); gpus_each])
            .collect();
        gpus.iter().for_each(|(class, layout)| supply.add(&classes, *class, *layout));
        let window = MigWindow::default();
        let mix = MigMix::learned(&classes, &types, &ids, &window);
        let (scratch, running) = (Scratch::default(), Vec::new());
        Self { classes, types, ids, gpus, supply, window, mix, scratch, running, came: 0 }
    }

    fn choose(&mut self, kind: TypeId) -> Option<Chosen<usize>> {
        let kind = self.types.kind(kind);
        let gpus = self.gpus.iter().enumerate().map(|(device, (class, layout))| MigCandidate {
            device,
            class: *class,
            layout: *layout,
        });
        Decision::new(&self.classes, &self.mix, &self.supply, kind, &mut self.scratch).choose(gpus)
    }

    fn come(&mut self, kind: TypeId) -> Option<Chosen<usize>> {
        self.came += 1;
        if self.window.observe(&self.came, kind) {
            self.mix = MigMix::learned(&self.classes, &self.types, &self.ids, &self.window);
        }
        let chosen = self.choose(kind)?;
        self.put(chosen.device, chosen.start, kind);
        Some(chosen)
    }

    fn put(&mut self, gpu: usize, start: Start, kind: TypeId) {
        let (class, layout) = self.gpus[gpu];
        let profile = self.types.kind(kind).on(class).unwrap();
        let with = self.classes[class.0].layouts().put(layout, profile, start);
        let with = with.expect("the start is legal and free");
        self.supply.change(&self.classes, class, layout, with);
        self.supply.start(kind);
        self.gpus[gpu].1 = with;
        self.running.push((gpu, start, kind));
    }

    fn end(&mut self, at: usize) {
        let (gpu, start, kind) = self.running.swap_remove(at);
        let (class, layout) = self.gpus[gpu];
        let without = self.classes[class.0].layouts().take(layout, start).unwrap();
        self.supply.change(&self.classes, class, layout, without);
        self.supply.end(kind);
        self.gpus[gpu].1 = without;
    }

    /// The counters, counted again.
    fn recounted(&self) -> MigSupply {
        let mut supply = MigSupply::none(&self.classes);
        self.gpus.iter().for_each(|(class, layout)| supply.add(&self.classes, *class, *layout));
        self.running.iter().for_each(|(.., kind)| supply.start(*kind));
        supply
    }
}

/// With weights of exactly a sixth and no spots' worth, the waste decides: its check values are in
/// `mask_waste`. Here all terms together are checked against a computation by hand.
#[test]
fn the_cost_is_the_difference_of_two_potentials() {
    let mut cluster = Cluster::new(&[2], 1);
    let one = cluster.ids[0];
    let (mix, supply) = (&cluster.mix, &cluster.supply);
    let kind = cluster.types.kind(one);
    let class = MigClassId(0);
    let mut decision = Decision::new(&cluster.classes, mix, supply, kind, &mut cluster.scratch);
    // F = 8, S = (7, 4, 3, 2, 1, 1), N = 0: w̄ = 21/6, and √ of 1 in both places
    let units = [1.0, 2.0, 2.0, 4.0, 4.0, 8.0];
    let spots = [7.0, 4.0, 3.0, 2.0, 1.0, 1.0];
    let scale = 20.0 * (21.0 / 6.0) * (21.0 / 6.0);
    let worth = |at: usize| units[at] / 6.0 / scale * (9.0 / (spots[at] + 1.0_f64)).powi(2);
    let empty = -0.353 - (0..6).map(|at| worth(at) * spots[at]).sum::<f64>();
    let found = decision.potential(class, LayoutId::EMPTY) as f64 / 1e12;
    assert!((found - empty).abs() < 0.001, "{found}, not {empty}");
    let first = cluster.classes[0].layouts().profiles().next().unwrap();
    let with = cluster.classes[0].layouts().put(LayoutId::EMPTY, first, Start(0)).unwrap();
    let left = [6.25, 3.25, 2.25, 1.25, 0.25, 0.25];
    let after = -0.052 - (0..6).map(|at| worth(at) * left[at]).sum::<f64>();
    let found = decision.potential(class, with) as f64 / 1e12;
    assert!((found - after).abs() < 0.001, "{found}, not {after}");
    let (cost, _) = decision.best(class, LayoutId::EMPTY).unwrap();
    let potentials = cluster.classes[0].layouts().starts(LayoutId::EMPTY, first);
    let now = decision.potential(class, LayoutId::EMPTY);
    let least = potentials.map(|(_, with)| decision.potential(class, with) - now).min();
    assert_eq!(Some(cost), least.map(MigCost));
}

#[test]
fn the_smallest_instance_does_not_waste_the_eighth_unit() {
    for gpus in [1, 100] {
        let mut cluster = Cluster::new(&[2], gpus);
        let chosen = cluster.choose(cluster.ids[0]).unwrap();
        assert_eq!(chosen.device, 0);
        assert_eq!(chosen.start, Start(4), "not 6, where most profiles still fit");
    }
}

#[test]
fn ties_go_to_the_fullest_gpu_then_to_the_first_one() {
    let mut cluster = Cluster::new(&[1], 4);
    assert_eq!(cluster.come(cluster.ids[5]).unwrap().device, 0);
    let next = cluster.come(cluster.ids[3]).unwrap();
    assert_eq!(next.device, 1, "the first of equal GPUs");
    assert_eq!(
        cluster.come(cluster.ids[4]).unwrap().device,
        1,
        "what is left there is worth least"
    );
    for _ in 0..2 {
        assert!(cluster.come(cluster.ids[5]).is_some());
    }
    assert_eq!(cluster.come(cluster.ids[0]), None, "all is taken");
}

#[test]
fn a_request_that_only_one_class_serves_keeps_its_room() {
    // Class 0 and 1 are equal; type 0 is a whole GPU of either, type 1 one of class 1 only.
    let mut cluster = Cluster::new(&[1, 1], 2);
    let whole = cluster.classes[0].layouts().profiles().last();
    let only = cluster.types.id(&MigType::new([None, whole])).unwrap();
    cluster.ids.push(only);
    cluster.mix = MigMix::of(&cluster.classes, &cluster.types, [(cluster.ids[5], 5), (only, 5)]);
    // whatever the order of devices
    cluster.gpus.reverse();
    let chosen = cluster.choose(cluster.ids[5]).unwrap();
    assert_eq!(cluster.gpus[chosen.device].0, MigClassId(0));
    let chosen = cluster.choose(only).unwrap();
    assert_eq!(cluster.gpus[chosen.device].0, MigClassId(1));
}

fn history() -> impl Strategy<Value = (usize, Vec<(usize, usize)>)> {
    (0..3_usize, prop::collection::vec((0..6_usize, 0..64_usize), 1..120))
}

/// Plays requests and departures; returns where all went.
fn play(fleet: usize, steps: &[(usize, usize)]) -> (Cluster, Vec<Option<Chosen<usize>>>) {
    let mut cluster = Cluster::new([&[0][..], &[2], &[0, 2, 6]][fleet], 3);
    let mut chosen = Vec::new();
    for (kind, ends) in steps {
        if *ends < cluster.running.len() && *ends < 16 {
            cluster.end(*ends);
        }
        let kind = cluster.ids[kind % cluster.ids.len()];
        chosen.push(cluster.come(kind));
    }
    (cluster, chosen)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// `put` also checks that each start is legal and free.
    #[test]
    fn kept_counters_equal_recounted_ones((fleet, steps) in history()) {
        let (cluster, _) = play(fleet, &steps);
        let (kept, recounted) = (&cluster.supply, cluster.recounted());
        prop_assert_eq!(kept.free_units(), recounted.free_units());
        for id in &cluster.ids {
            let kind = cluster.types.kind(*id);
            prop_assert_eq!(kept.fits(kind), recounted.fits(kind));
            prop_assert_eq!(kept.running(*id), recounted.running(*id));
        }
    }

    #[test]
    fn the_same_requests_get_the_same_places((fleet, steps) in history()) {
        prop_assert_eq!(play(fleet, &steps).1, play(fleet, &steps).1);
    }

    #[test]
    fn the_choice_is_the_least_of_all_placements((fleet, steps) in history(), kind in 0..6_usize) {
        let (mut cluster, _) = play(fleet, &steps);
        let kind = cluster.ids[kind % cluster.ids.len()];
        let chosen = cluster.choose(kind).map(|chosen| (chosen.cost, chosen.device, chosen.start));
        let request = cluster.types.kind(kind);
        let mut scratch = Scratch::default();
        let (mix, supply) = (&cluster.mix, &cluster.supply);
        let mut decision = Decision::new(&cluster.classes, mix, supply, request, &mut scratch);
        let mut all = Vec::new();
        for (device, (class, layout)) in cluster.gpus.iter().enumerate() {
            let Some(profile) = request.on(*class) else { continue };
            let layouts = cluster.classes[class.0].layouts();
            for (start, with) in layouts.starts(*layout, profile) {
                let cost = decision.potential(*class, with) - decision.potential(*class, *layout);
                all.push((MigCost(cost), layouts.free_units(*layout), device, start));
            }
        }
        prop_assert_eq!(chosen, all.into_iter().min().map(|(cost, _, gpu, at)| (cost, gpu, at)));
    }
}
