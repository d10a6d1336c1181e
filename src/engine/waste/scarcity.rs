//! Scarcity prices: what the cluster is short of, from what is free now, the same for all nodes.
//!
//! A placement is costed on its node alone, and that cost is kept until the node changes. What the
//! whole cluster runs out of is a factor applied afterwards. So one bind anywhere changes all costs
//! without a look at any node.

use std::collections::BTreeMap;

use crate::hardware::device_class::{ClassId, DeviceClasses};
use crate::waste::demand::{WeightedRequest, WholeNodePrior};
use crate::waste::numbers::{fixed, float};
use crate::waste::supply::{NodeShapes, Supply};
use crate::waste::weights::WasteWeights;

/// Part of the cluster's GPUs below which the nodes that can take a request are few.
const FEW: f64 = 0.25;

/// Part of the cluster's GPUs: with less other room, the price of keeping nodes whole falls.
const OTHER_ROOM: f64 = 0.05;

/// A tenth of a GPU, in millionths: added to free room, so that nothing is divided by zero.
const ROUND: f64 = 1e5;

/// How a placement changes the expected waste of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WasteChange {
    /// Expected waste that it avoids, in millionths of a GPU.
    pub gain: i64,
    /// Room for requests of several devices that it keeps, in millionths of a GPU.
    pub spared: i64,
    /// Class of its devices; for a pod without a GPU, of the devices of its node.
    pub class: ClassId,
    /// Share that it takes, or that is free beside a pod without a GPU, in millionths of a GPU.
    pub share: i64,
}

/// The current prices, in thousandths of a GPU per GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScarcityPrices {
    several: i64,
    by_class: Vec<i64>,
}

impl ScarcityPrices {
    #[cfg(test)]
    pub(crate) fn of(several: i64, by_class: &[i64]) -> Self {
        Self { several, by_class: by_class.to_vec() }
    }

    /// The cost of a placement, in billionths of a GPU: smaller is better.
    #[inline]
    pub fn cost(&self, waste_change: &WasteChange) -> i64 {
        let scarce = self.by_class.get(waste_change.class.position()).copied().unwrap_or(0);
        scarce * waste_change.share - 1000 * waste_change.gain - self.several * waste_change.spared
    }
}

/// The demand that not every node can serve.
#[derive(Clone, Debug)]
pub(crate) struct Scarcity {
    /// Parts of all GPU demand by number of devices, for more than one.
    by_count: Vec<(usize, f64)>,
    bound: Vec<Bound>,
    /// Parts of all GPU demand for more than one device, together.
    several_part: f64,
    /// All GPUs, in millionths.
    all: f64,
    weights: WasteWeights,
}

/// Demand that only some classes of devices can serve.
#[derive(Clone, Debug)]
struct Bound {
    classes: Vec<usize>,
    part: f64,
    /// Because few nodes are large enough, not because of the models it accepts.
    is_by_size: bool,
}

impl Scarcity {
    /// What of `kinds`, which together request `demand` GPUs, not every node shape can serve.
    pub(crate) fn new(
        kinds: &[WeightedRequest<'_>],
        demand: f64,
        classes: &DeviceClasses,
        node_shapes: &NodeShapes,
        prior: WholeNodePrior,
        weights: &WasteWeights,
    ) -> Self {
        let mut by_count: BTreeMap<usize, f64> = BTreeMap::new();
        let mut sets: BTreeMap<(Vec<usize>, bool), f64> = BTreeMap::new();
        for kind in kinds {
            let Some(request) = kind.request else { continue };
            let part = kind.weight * kind.gpus / demand;
            let count = usize::try_from(request.count.get()).unwrap_or(usize::MAX);
            if count > 1 {
                *by_count.entry(count).or_default() += part;
            }
            let accepts = classes.map(|class| request.demand_on(class).is_ok());
            let accepted = classes_of(node_shapes, |shape| *accepts.of(shape.class));
            let large = classes_of(node_shapes, |shape| {
                let memory = float(shape.host.memory.mib());
                *accepts.of(shape.class)
                    && shape.gpus >= u64::from(request.count.get())
                    && float(shape.host.cpu.milli()) >= kind.cpu
                    && memory >= kind.memory
            });
            if large.is_few(node_shapes) {
                let is_by_size = large.classes != accepted.classes;
                *sets.entry((large.classes, is_by_size)).or_default() += part;
            } else if accepted.is_partial(node_shapes) {
                *sets.entry((accepted.classes, false)).or_default() += part;
            }
        }
        for (full, _) in node_shapes.shapes() {
            let alike = classes_of(node_shapes, |shape| {
                let host = (full.host.cpu, full.host.memory);
                shape.gpus >= full.gpus && shape.host.cpu >= host.0 && shape.host.memory >= host.1
            });
            if alike.is_few(node_shapes) {
                let pods: f64 = kinds.iter().map(|kind| kind.weight).sum();
                let part = pods / weights.rare_one_in * float(full.gpus) / demand;
                *sets.entry((alike.classes, true)).or_default() += part;
            }
        }
        prior.by_count(node_shapes, &mut by_count);
        let bound = sets.into_iter().map(|((classes, is_by_size), part)| Bound {
            classes,
            part,
            is_by_size,
        });
        Self {
            several_part: by_count.values().sum(),
            by_count: by_count.into_iter().collect(),
            bound: bound.collect(),
            all: float(node_shapes.gpus()) * 1e6,
            weights: *weights,
        }
    }

    /// The least price of room for several devices. Such requests may come although none has come
    /// for long. So nodes on which the largest one fits are kept while there is other room, on
    /// classes that no demand is bound to.
    fn kept_nodes(&self, supply: &Supply) -> f64 {
        let Some((largest, _)) = self.by_count.last() else { return 0.0 };
        let by_model = self.bound.iter().filter(|bound| !bound.is_by_size);
        let other = (0..supply.classes())
            .filter(|class| !by_model.clone().any(|bound| bound.classes.contains(class)));
        let other: f64 = other.map(|class| float(supply.beside_nodes_with(*largest, class))).sum();
        let enough = OTHER_ROOM * self.all;
        // What is kept is weighed by the demand for several devices, which may be next to nothing.
        self.weights.kept_nodes / self.several_part.max(1e-4) * (other / enough.max(1.0)).min(1.0)
    }

    /// The prices for a pod with or without a GPU request. A pod without one takes no model away,
    /// but it may take the CPU that few large nodes have.
    pub(crate) fn prices(&self, supply: &Supply, has_gpu: bool) -> ScarcityPrices {
        let free = float(supply.free());
        let needs = self.by_count.iter();
        let needs =
            needs.map(|(count, part)| part * free / (float(supply.on_nodes_with(*count)) + ROUND));
        let short = needs.fold(0.0, f64::max).min(1.0);
        let mut by_class: Vec<f64> = Vec::new();
        for bound in self.bound.iter().filter(|bound| has_gpu || bound.is_by_size) {
            let there: f64 = bound.classes.iter().map(|class| float(supply.of_class(*class))).sum();
            for class in &bound.classes {
                by_class.resize(by_class.len().max(class + 1), 0.0);
                by_class[*class] += bound.part * free / (there + ROUND);
            }
        }
        let WasteWeights { scarce, several, .. } = self.weights;
        let by_class = by_class.iter().map(|short| fixed(scarce * short.min(1.0), 1e3));
        ScarcityPrices {
            several: fixed((several * short * short * short).max(self.kept_nodes(supply)), 1e3),
            by_class: by_class.collect(),
        }
    }
}

struct Part {
    classes: Vec<usize>,
    gpus: f64,
}

fn classes_of(
    node_shapes: &NodeShapes,
    is_in: impl Fn(&crate::waste::supply::NodeShape) -> bool,
) -> Part {
    let (mut classes, mut gpus) = (Vec::new(), 0.0);
    for (shape, nodes) in node_shapes.shapes().filter(|(shape, _)| is_in(shape)) {
        classes.push(shape.class.position());
        gpus += float(nodes * shape.gpus);
    }
    classes.sort_unstable();
    classes.dedup();
    Part { classes, gpus }
}

impl Part {
    fn is_few(&self, node_shapes: &NodeShapes) -> bool {
        !self.classes.is_empty() && self.gpus < FEW * float(node_shapes.gpus())
    }

    fn is_partial(&self, node_shapes: &NodeShapes) -> bool {
        !self.classes.is_empty() && self.gpus < float(node_shapes.gpus())
    }
}

#[cfg(test)]
mod tests;
