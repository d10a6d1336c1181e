//! The requests of a mix, weighed: what scarcity prices and expected waste are made from.

use std::collections::BTreeMap;

use crate::model::request::GpuRequest;
use crate::waste::numbers::{fixed, float};
use crate::waste::supply::NodeShapes;
use crate::waste::term::CostTerm;

/// Requests that what is believed beforehand counts for.
pub(crate) const PRIOR: f64 = 50.0;

/// Part of GPU demand that is believed beforehand to come for whole nodes.
pub(crate) const WHOLE_NODES: f64 = 0.3;

/// One type of request with what it is expected to take.
pub(crate) struct Kind<'a> {
    /// The request; none for a pod without GPU.
    pub(crate) request: Option<&'a GpuRequest>,
    /// Processor time, in thousandths of a core.
    pub(crate) cpu: f64,
    /// Main memory, in MiB: the mean.
    pub(crate) memory: f64,
    /// How often it was seen.
    pub(crate) weight: f64,
    /// Share on all its devices together: the mean over the cluster's GPUs that it accepts.
    pub(crate) gpus: f64,
}

/// What is believed of requests for whole nodes before much has been asked for: a job of that kind is
/// rare and large, and where no node is left for it when it comes, it waits longest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    /// Part of the belief that is not from requests.
    pub(crate) prior: f64,
}

impl Expected {
    /// After so many requests.
    pub(crate) fn after(requests: f64, left_out: Option<CostTerm>) -> Self {
        let counts_for = if left_out == Some(CostTerm::WholeNodes) { 0.0 } else { PRIOR };
        Self { prior: counts_for / (requests + counts_for) }
    }

    /// The part of all GPU demand that is taken to be for whole nodes, in millionths.
    pub(crate) fn prior(self) -> u64 {
        fixed(self.prior * WHOLE_NODES, 1e6).unsigned_abs()
    }

    /// What remains of a part of the demand that was seen.
    pub(crate) fn known(self, part: u64) -> u64 {
        fixed(float(part) * (1.0 - self.prior), 1.0).unsigned_abs()
    }

    /// The same for all demand by number of devices.
    pub(crate) fn by_count(self, node_shapes: &NodeShapes, parts: &mut BTreeMap<usize, f64>) {
        parts.values_mut().for_each(|part| *part *= 1.0 - self.prior);
        let largest = usize::try_from(node_shapes.largest()).unwrap_or(usize::MAX);
        if largest > 1 {
            *parts.entry(largest).or_default() += self.prior * WHOLE_NODES;
        }
    }
}
