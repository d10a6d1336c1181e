//! The requests of a mix, weighted: scarcity prices and expected waste are made from them.

use std::collections::BTreeMap;

use crate::model::request::GpuRequest;
use crate::waste::numbers::{fixed, float};
use crate::waste::supply::NodeShapes;

/// Part of GPU demand that is for whole nodes, by the prior.
pub(crate) const WHOLE_NODES: f64 = 0.3;

/// A type of request, with how often it was seen.
pub(crate) struct WeightedRequest<'a> {
    /// `None` for a pod without a GPU.
    pub(crate) request: Option<&'a GpuRequest>,
    /// CPU, in thousandths of a core.
    pub(crate) cpu: f64,
    /// Host memory, in MiB: the mean.
    pub(crate) memory: f64,
    /// How often it was seen.
    pub(crate) weight: f64,
    /// Share on all its devices together: the mean over the cluster's GPUs that it accepts.
    pub(crate) gpus: f64,
}

/// The prior for requests of whole nodes, which counts until enough requests have come. Such a job
/// is rare and large, and waits longest if no node is left for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WholeNodePrior {
    /// The weight of the prior, 0 to 1.
    pub(crate) weight: f64,
}

impl WholeNodePrior {
    /// After this many requests, if the prior counts as `counts_for`.
    pub(crate) fn after(requests: f64, counts_for: f64) -> Self {
        Self { weight: counts_for / (requests + counts_for) }
    }

    /// The part of all GPU demand for whole nodes that the prior adds, in millionths.
    pub(crate) fn added(self) -> u64 {
        fixed(self.weight * WHOLE_NODES, 1e6).unsigned_abs()
    }

    /// What remains of a part of the demand that was seen.
    pub(crate) fn known(self, part: u64) -> u64 {
        fixed(float(part) * (1.0 - self.weight), 1.0).unsigned_abs()
    }

    /// The same for all demand by number of devices.
    pub(crate) fn by_count(self, node_shapes: &NodeShapes, parts: &mut BTreeMap<usize, f64>) {
        parts.values_mut().for_each(|part| *part *= 1.0 - self.weight);
        let largest = usize::try_from(node_shapes.largest()).unwrap_or(usize::MAX);
        if largest > 1 {
            *parts.entry(largest).or_default() += self.weight * WHOLE_NODES;
        }
    }
}
