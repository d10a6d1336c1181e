//! GPUs in MIG mode with their instances.

use std::collections::{BTreeMap, BTreeSet};

use crate::mig::mig_worlds::MigStage;
use engine::hardware::layouts::{LayoutId, Layouts, Start};
use engine::waste::mig::class::MigClassId;
use engine::waste::mig::decision::MigCandidate;
use engine::waste::mig::mig_supply::MigSupply;

/// An instance for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instance {
    pub(crate) gpu: usize,
    pub(crate) start: Start,
    /// Position of the request's type among those of the world.
    pub(crate) kind: usize,
}

/// All GPUs. Those of equal layout are kept together, since policies do not tell them apart.
#[derive(Debug)]
pub(crate) struct MigFleet<'a> {
    stage: &'a MigStage,
    gpus: Vec<(MigClassId, LayoutId)>,
    equal: BTreeMap<(MigClassId, LayoutId), BTreeSet<usize>>,
    supply: MigSupply,
    /// By request.
    instances: BTreeMap<usize, Instance>,
}

impl<'a> MigFleet<'a> {
    /// The empty GPUs of a world, the first class first.
    pub(crate) fn new(stage: &'a MigStage) -> Self {
        let mut fleet = Self {
            stage,
            gpus: Vec::new(),
            equal: BTreeMap::new(),
            supply: MigSupply::none(&stage.classes),
            instances: BTreeMap::new(),
        };
        for (class, gpus) in stage.gpus.iter().enumerate() {
            for _ in 0..*gpus {
                let state = (MigClassId(class), LayoutId::EMPTY);
                fleet.supply.add(&stage.classes, state.0, state.1);
                fleet.equal.entry(state).or_default().insert(fleet.gpus.len());
                fleet.gpus.push(state);
            }
        }
        fleet
    }

    pub(crate) fn stage(&self) -> &'a MigStage {
        self.stage
    }

    pub(crate) fn supply(&self) -> &MigSupply {
        &self.supply
    }

    pub(crate) fn layouts(&self, class: MigClassId) -> &'a Layouts {
        self.stage.classes[class.0].layouts()
    }

    /// Class and layout of a GPU.
    pub(crate) fn gpu(&self, gpu: usize) -> (MigClassId, LayoutId) {
        self.gpus[gpu]
    }

    /// The first GPU of each layout.
    pub(crate) fn candidates(&self) -> impl Iterator<Item = MigCandidate<usize>> + use<'_, 'a> {
        self.equal.iter().filter_map(|((class, layout), gpus)| {
            Some(MigCandidate { device: *gpus.first()?, class: *class, layout: *layout })
        })
    }

    /// The first GPU of each layout, `other` left out.
    pub(crate) fn candidates_but(
        &self,
        other: usize,
    ) -> impl Iterator<Item = MigCandidate<usize>> + use<'_, 'a> {
        self.equal.iter().filter_map(move |((class, layout), gpus)| {
            let device = *gpus.iter().find(|gpu| **gpu != other)?;
            Some(MigCandidate { device, class: *class, layout: *layout })
        })
    }

    /// The instances with their requests, the oldest request first.
    pub(crate) fn instances(&self) -> impl Iterator<Item = (usize, Instance)> + use<'_, 'a> {
        self.instances.iter().map(|(request, instance)| (*request, *instance))
    }

    /// Makes an instance for a request.
    ///
    /// # Panics
    /// If it cannot begin there, or a unit is taken.
    pub(crate) fn put(&mut self, request: usize, instance: Instance) {
        let (class, layout) = self.gpus[instance.gpu];
        let profile = self.stage.kinds[instance.kind].on(class).expect("its class accepts it");
        let with = self.layouts(class).put(layout, profile, instance.start);
        self.change(instance.gpu, with.expect("the start is legal and free"));
        self.supply.start(self.stage.ids[instance.kind]);
        self.instances.insert(request, instance);
    }

    /// Destroys the instance of a request. `None` if it has none.
    pub(crate) fn end(&mut self, request: usize) -> Option<Instance> {
        let instance = self.instances.remove(&request)?;
        let (class, layout) = self.gpus[instance.gpu];
        let without = self.layouts(class).take(layout, instance.start);
        self.change(instance.gpu, without.expect("the instance is there"));
        self.supply.end(self.stage.ids[instance.kind]);
        Some(instance)
    }

    fn drop_equal(&mut self, gpu: usize, class: MigClassId, layout: LayoutId) {
        if let Some(equal) = self.equal.get_mut(&(class, layout)) {
            equal.remove(&gpu);
            if equal.is_empty() {
                self.equal.remove(&(class, layout));
            }
        }
    }

    fn change(&mut self, gpu: usize, to: LayoutId) {
        let (class, from) = self.gpus[gpu];
        self.supply.change(&self.stage.classes, class, from, to);
        self.drop_equal(gpu, class, from);
        self.equal.entry((class, to)).or_default().insert(gpu);
        self.gpus[gpu].1 = to;
    }
}
