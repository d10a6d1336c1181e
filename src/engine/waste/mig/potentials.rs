//! What it costs to make an instance on a GPU, by the requests and the GPUs of a cluster at one time.
//!
//! The potential of each layout is computed once, when the mix or the layouts of the cluster have
//! changed. A question is then two look-ups in a table.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::hardware::device_class::{ClassKind, DeviceClass};
use crate::hardware::layouts::{LayoutId, Start};
use crate::hardware::mig::{Geometry, Profile};
use crate::hardware::spots::DividedGpu;
use crate::model::request::{Amount, GpuRequest};
use crate::waste::mig::class::{MigClass, MigClassId};
use crate::waste::mig::decision::{Decision, Scratch};
use crate::waste::mig::mig_supply::MigSupply;
use crate::waste::mig::mix::MigMix;
use crate::waste::mig::types::{MigType, TypeId, Types};
use crate::waste::request_mix::Mix;
use wire::ids::{MigProfile, ModelName};
use wire::units::MemMib;

/// Most geometries from lists of NVML that have potentials, those of the most GPUs: agents may report any list.
const MOST_LISTED: usize = 16;

/// The potentials of all layouts of the GPUs of a cluster.
#[derive(Clone, Debug, Default)]
pub struct Potentials {
    classes: Vec<(Arc<Geometry>, MigClass, Vec<i128>)>,
}

impl Potentials {
    /// Those under this mix, with these GPUs. A GPU whose instances lie where its geometry does not allow
    /// counts for nothing. The tables of geometries are taken from `earlier` ones.
    pub fn of(mix: &Mix, gpus: &[DividedGpu], earlier: &Self) -> Self {
        let geometries = geometries_of(gpus);
        let known = geometries.into_iter().filter_map(|geometry| {
            let earlier = earlier.class(geometry).cloned();
            Some((geometry, earlier.or_else(|| MigClass::new(geometry).ok())?))
        });
        let (geometries, classes): (Vec<_>, Vec<MigClass>) = known.unzip();
        let mut types = Types::default();
        let models = geometries.iter().map(|geometry| {
            let its = gpus.iter().filter(|gpu| gpu.geometry == **geometry);
            its.map(|gpu| &gpu.model).collect()
        });
        let models: Vec<BTreeSet<&ModelName>> = models.collect();
        let counts = counts(mix, &geometries, &models, &classes, &mut types);
        let mut supply = MigSupply::none(&classes);
        for gpu in gpus {
            let at = geometries.iter().position(|known| **known == gpu.geometry);
            let Some(at) = at else { continue };
            let Some(layout) = layout_of(&classes[at], &gpu.instances) else { continue };
            supply.add(&classes, MigClassId(at), layout);
            for (profile, _) in &gpu.instances {
                types.id(&named(&classes, profile)).into_iter().for_each(|id| supply.start(id));
            }
        }
        let mix = MigMix::of(&classes, &types, counts);
        let mut scratch = Scratch::default();
        let none = MigType::new([]);
        let mut decision = Decision::new(&classes, &mix, &supply, &none, &mut scratch);
        let potentials: Vec<Vec<i128>> = (0..classes.len())
            .map(|at| {
                let layouts = classes[at].layouts().ids();
                layouts.map(|layout| decision.potential(MigClassId(at), layout)).collect()
            })
            .collect();
        let all = geometries.into_iter().cloned().zip(classes).zip(potentials);
        Self { classes: all.map(|((geometry, class), all)| (geometry, class, all)).collect() }
    }

    fn entry(&self, geometry: &Arc<Geometry>) -> Option<&(Arc<Geometry>, MigClass, Vec<i128>)> {
        self.classes.iter().find(|(known, ..)| known == geometry)
    }

    fn class(&self, geometry: &Arc<Geometry>) -> Option<&MigClass> {
        self.entry(geometry).map(|(_, class, _)| class)
    }

    /// What it costs to make an instance on a GPU, in millionths of a GPU; below zero if the rest is worth
    /// more than before. `None` if its geometry has no potentials, or if it cannot have the instance there.
    pub fn cost(&self, gpu: &DividedGpu, profile: &MigProfile, start: u32) -> Option<i64> {
        let (_, class, potentials) = self.entry(&gpu.geometry)?;
        let before = layout_of(class, &gpu.instances)?;
        let layouts = class.layouts();
        let index = layouts.profile(profile.plain())?;
        let after = layouts.put(before, index, Start(start))?;
        let change = potentials[after.position()] - potentials[before.position()];
        i64::try_from(change / 1_000_000 / i128::from(gpu.geometry.axis.max(1))).ok()
    }
}

/// The geometries of GPUs, each once: those of the table, and the most frequent ones of lists.
fn geometries_of(gpus: &[DividedGpu]) -> Vec<&Arc<Geometry>> {
    let mut all: Vec<(&Arc<Geometry>, usize)> = Vec::new();
    for gpu in gpus {
        match all.iter_mut().find(|(known, _)| **known == gpu.geometry) {
            Some((_, count)) => *count += 1,
            None => all.push((&gpu.geometry, 1)),
        }
    }
    let (mut listed, table): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|(geometry, _)| geometry.is_listed());
    listed.sort_by_key(|(_, count)| Reverse(*count));
    let listed = listed.into_iter().take(MOST_LISTED);
    table.into_iter().chain(listed).map(|(geometry, _)| geometry).collect()
}

/// The layout of these instances; `None` if they cannot lie so.
fn layout_of(class: &MigClass, instances: &[(MigProfile, u32)]) -> Option<LayoutId> {
    let layouts = class.layouts();
    instances.iter().try_fold(LayoutId::EMPTY, |layout, (profile, start)| {
        let profile = layouts.profile(profile.plain())?;
        layouts.put(layout, profile, Start(*start))
    })
}

/// The type of the requests for a profile by its name.
fn named(classes: &[MigClass], profile: &MigProfile) -> MigType {
    MigType::new(classes.iter().map(|class| class.layouts().profile(profile.plain())))
}

/// How many instances of each type the mix requests. All profiles count, also those of which none came. A
/// request counts on the geometries for which it accepts one of the `models` that are there.
fn counts(
    mix: &Mix,
    geometries: &[&Arc<Geometry>],
    models: &[BTreeSet<&ModelName>],
    classes: &[MigClass],
    types: &mut Types,
) -> Vec<(TypeId, u64)> {
    let mut counts = BTreeMap::new();
    let profiles = geometries.iter().flat_map(|geometry| &geometry.profiles);
    for profile in profiles {
        if let Some(id) = types.id(&named(classes, &MigProfile::new(profile.name.as_str()))) {
            counts.entry(id).or_insert(0);
        }
    }
    for (kind, tally) in &mix.types {
        let Some(request) = &kind.gpu else { continue };
        let wants_instances = matches!(request.amount, Amount::MigInstance(_));
        if !wants_instances && !request.wants_any_instance() {
            continue;
        }
        let kinds = geometries.iter().zip(models).zip(classes);
        let kind = MigType::new(kinds.map(|((geometry, models), class)| {
            class.layouts().smallest(|profile| {
                models.iter().any(|model| serves(geometry, profile, model, request))
            })
        }));
        if kind.accepted().next().is_none() {
            continue;
        }
        if let Some(id) = types.id(&kind) {
            *counts.entry(id).or_insert(0) += tally.pods * u64::from(request.count.get());
        }
    }
    counts.into_iter().collect()
}

/// Whether an instance of the profile on a GPU of this model serves a request, which may name models.
fn serves(geometry: &Geometry, profile: &Profile, model: &ModelName, request: &GpuRequest) -> bool {
    let profile_there = match &request.amount {
        Amount::MigInstance(wanted) if wanted.plain() != profile.name => return false,
        Amount::MigInstance(wanted) => wanted.clone(),
        _ => MigProfile::new(profile.name.as_str()),
    };
    let class = DeviceClass {
        model: model.clone(),
        capacity: MemMib::new(profile.memory_mib),
        kind: ClassKind::MigInstance(profile_there),
        replicas: None,
        part: geometry.is_listed().then(|| geometry.part_of(profile)),
    };
    request.demand_on(&class).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::mig::GEOMETRIES;
    use crate::model::request::Isolation;
    use crate::waste::request_mix::{RequestType, Tally};
    use wire::device::{MakeableProfile, ModelFilter};
    use wire::units::MilliCpu;

    fn gpu(instances: &[(&str, u32)]) -> DividedGpu {
        let instances = instances.iter().map(|(name, start)| (MigProfile::new(*name), *start));
        let (model, geometry) =
            (ModelName::new("NVIDIA A100-SXM4-80GB"), Arc::clone(&GEOMETRIES[2]));
        DividedGpu { model, geometry, instances: instances.collect() }
    }

    /// The starts at which an instance of the profile costs least on an A100, by GPU.
    fn best(gpus: &[DividedGpu], profile: &str, starts: &[u32]) -> (usize, u32) {
        let potentials = Potentials::of(&Mix::default(), gpus, &Potentials::default());
        let profile = MigProfile::new(profile);
        let all = (0..gpus.len()).flat_map(|at| starts.iter().map(move |start| (at, *start)));
        let cost = |(at, start): (usize, u32)| potentials.cost(&gpus[at], &profile, start);
        let (_, best) = all.filter_map(|place| Some((cost(place)?, place))).min().unwrap();
        best
    }

    #[test]
    fn instances_go_where_they_waste_least() {
        // At unit 6 the smallest one would waste unit 7.
        let starts = [0, 1, 2, 3, 4, 5, 6];
        let (at, start) = best(&[gpu(&[])], "1g.10gb", &starts);
        assert!(at == 0 && start != 6, "{start}");
        // A GPU that is divided already, rather than an empty one.
        let two = [gpu(&[]), gpu(&[("3g.40gb", 0)])];
        assert_eq!(best(&two, "3g.40gb", &[0, 4]), (1, 4));
        assert_eq!(best(&two, "1g.10gb+me", &starts).0, 1);
        // Beside a run that is there, so that the larger runs stay whole.
        assert_eq!(best(&[gpu(&[("1g.10gb", 0)])], "1g.10gb", &starts), (0, 1));
    }

    /// The geometry that the list of NVML for a GPU of the table would give.
    fn listed(at: usize, total: u64) -> Arc<Geometry> {
        let profiles = GEOMETRIES[at].profiles.iter().map(|profile| MakeableProfile {
            profile: MigProfile::new(profile.name.as_str()),
            memory: MemMib::new(profile.memory_mib),
            sm_count: Some(profile.multiprocessors),
            size: profile.size,
            starts: profile.starts.clone(),
        });
        Geometry::listed(MemMib::new(total), &profiles.collect::<Vec<_>>()).unwrap().into()
    }

    #[test]
    fn places_cost_as_much_by_the_list_as_by_the_table() {
        for at in [2, 3] {
            let gpus = |geometry: &Arc<Geometry>| {
                let (one, three) = (&geometry.profiles[0].name, &geometry.profiles[3].name);
                [vec![], vec![(one, 6)], vec![(three, 4), (one, 1)]].map(|instances| {
                    let named =
                        |(name, start): (&String, u32)| (MigProfile::new(name.as_str()), start);
                    let instances = instances.into_iter().map(named).collect();
                    DividedGpu { geometry: Arc::clone(geometry), instances, ..gpu(&[]) }
                })
            };
            let costs = |geometry: &Arc<Geometry>| {
                let gpus = gpus(geometry);
                let potentials = Potentials::of(&Mix::default(), &gpus, &Potentials::default());
                let each = gpus.iter().flat_map(|gpu| {
                    let places = geometry.profiles.iter().flat_map(|profile| {
                        profile.starts.iter().map(move |start| (profile.name.as_str(), *start))
                    });
                    let cost = |(name, start)| potentials.cost(gpu, &MigProfile::new(name), start);
                    places.map(cost).collect::<Vec<_>>()
                });
                each.collect::<Vec<_>>()
            };
            let table = costs(&GEOMETRIES[at]);
            assert_eq!(costs(&listed(at, GEOMETRIES[at].total_mib)), table);
            assert!(table.iter().flatten().count() > 20, "{table:?}");
        }
    }

    #[test]
    fn the_lists_of_the_most_gpus_have_potentials() {
        let on = |geometry| DividedGpu { geometry, ..gpu(&[]) };
        let mut gpus: Vec<DividedGpu> = (0..40).map(|at| on(listed(2, 90_000 + at))).collect();
        gpus.extend([listed(3, 81_559), listed(3, 81_559)].map(on));
        gpus.push(gpu(&[]));
        let potentials = Potentials::of(&Mix::default(), &gpus, &Potentials::default());
        let cost =
            |gpu: &DividedGpu| potentials.cost(gpu, &MigProfile::new("3g.40gb"), 0).is_some();
        let known: Vec<usize> = (0..gpus.len()).filter(|at| cost(&gpus[*at])).collect();
        let first = MOST_LISTED - 1;
        assert_eq!(known, (0..first).chain([40, 41, 42]).collect::<Vec<_>>());
    }

    /// The cheaper one of half an A30 and a free H100 for a pod that both serve, under a mix of as many requests
    /// for these models as for any.
    fn cheaper(models: &[&str]) -> &'static str {
        let gpu = |model: &str, at: usize, instances| DividedGpu {
            model: ModelName::new(model),
            geometry: Arc::clone(&GEOMETRIES[at]),
            instances,
        };
        let half = vec![(MigProfile::new("2g.12gb"), 0)];
        let gpus = [gpu("NVIDIA A30", 0, half), gpu("NVIDIA H100 80GB HBM3", 3, Vec::new())];
        let counts = [models, &[]].map(|models| {
            let request = GpuRequest {
                models: ModelFilter::new(models.iter().copied()),
                isolation: Isolation::Hardware,
                ..GpuRequest::one(Amount::Memory(MemMib::new(5_120)))
            };
            (RequestType::new(Some(&request), MilliCpu::ZERO), Tally { pods: 100, memory: 0 })
        });
        let mix = Mix::of(&counts.into());
        let potentials = Potentials::of(&mix, &gpus, &Potentials::default());
        let cost = |at: usize, profile| {
            let starts = 0..7;
            let cost = |start| potentials.cost(&gpus[at], &MigProfile::new(profile), start);
            starts.filter_map(cost).min().unwrap()
        };
        if cost(0, "1g.6gb") < cost(1, "1g.10gb") { "A30" } else { "H100" }
    }

    #[test]
    fn a_request_counts_only_on_the_models_that_it_accepts() {
        assert_eq!(cheaper(&[]), "A30", "it is begun");
        assert_eq!(cheaper(&["A30", "H100"]), "A30");
        assert_eq!(cheaper(&["A30"]), "H100", "what is left of the A30 is for those that insist");
        assert_eq!(cheaper(&["A100"]), "A30", "no such GPU is there");
        // An instance by its product name: none of an A30 is so.
        assert_eq!(cheaper(&["MIG 1g.10gb"]), "A30");
        assert_eq!(cheaper(&["MIG 1g.6gb"]), "H100");
    }

    #[test]
    fn what_cannot_be_has_no_cost() {
        let potentials = Potentials::of(&Mix::default(), &[gpu(&[])], &Potentials::default());
        let cost = |gpu: &DividedGpu, profile: &str, start| {
            potentials.cost(gpu, &MigProfile::new(profile), start)
        };
        assert!(cost(&gpu(&[]), "3g.40gb", 4).is_some());
        assert_eq!(cost(&gpu(&[]), "3g.40gb", 2), None, "it cannot begin there");
        assert_eq!(cost(&gpu(&[("4g.40gb", 0)]), "1g.10gb", 3), None, "another one lies there");
        assert_eq!(cost(&gpu(&[]), "9g.90gb", 0), None, "no such profile");
        assert_eq!(cost(&gpu(&[("9g.90gb", 0)]), "1g.10gb", 3), None);
        let other = DividedGpu { geometry: Arc::clone(&GEOMETRIES[0]), ..gpu(&[]) };
        assert_eq!(cost(&other, "1g.6gb", 0), None, "no such GPU was there");
    }
}
