//! Figures of each node, kept until the node changes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::ledger::nodes::node_entry::NodeEntry;
use crate::model::node_state::NodeState;
use crate::scoring::device_figures::DeviceFigures;
use crate::scoring::fragmentation::PackingSums;
use crate::waste::compiled_mix::CompiledMix;
use crate::waste::request_mix::Mix;
use wire::ids::{ModelName, PoolName};

/// By position of the node, with its version.
#[derive(Debug)]
pub(crate) struct PerNode<T>(Vec<Option<(u64, T)>>);

impl<T> Default for PerNode<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> PerNode<T> {
    /// Measures the nodes that have changed. `measure` knows the first `classes` device classes; a
    /// node with a newer one is measured next time.
    pub(crate) fn refresh(
        &mut self,
        node_table: &[Arc<NodeEntry>],
        classes: usize,
        measure: impl Fn(&NodeState) -> T,
    ) {
        self.0.resize_with(node_table.len(), || None);
        for (node_entry, known) in node_table.iter().zip(&mut self.0) {
            let version = node_entry.version.load(Ordering::Acquire);
            if known.as_ref().is_none_or(|(seen, _)| *seen != version) {
                let (seen, found) = node_entry.look(|version, node_state| {
                    (version, node_state.is_of_classes(classes).then(|| measure(node_state)))
                });
                *known = found.map(|found| (seen, found));
            }
        }
    }

    /// What is known of each node, by position.
    pub(crate) fn all(&self) -> impl Iterator<Item = Option<&T>> {
        self.0.iter().map(|known| known.as_ref().map(|(_, found)| found))
    }
}

/// A GPU model in a pool.
pub type ModelInPool = (ModelName, PoolName);

/// Keeps the figures of each node until it changes.
#[derive(Debug, Default)]
pub(crate) struct FleetGauge {
    /// Generation of the mix that the figures are measured against.
    pub(crate) generation: Option<u64>,
    pub(crate) nodes: PerNode<OfNode>,
}

/// The pool of a node, and the figures of its devices by model.
pub(crate) type OfNode = (PoolName, Vec<(ModelName, DeviceFigures)>);

/// Measures the packing of a cluster against a mix, and keeps the result of each node.
#[derive(Debug)]
pub struct Gauge {
    /// The mix; `None` for that of the ledger.
    pub(crate) mix: Option<Mix>,
    pub(crate) compiled: Arc<CompiledMix>,
    /// What the mix was compiled for: the count of classes, or the ledger's mix generation.
    pub(crate) basis: Option<u64>,
    pub(crate) nodes: PerNode<PackingSums>,
}

impl Gauge {
    /// A gauge for a given mix, so that two clusters can be compared by one measure.
    pub fn new(mix: Mix) -> Self {
        Self { mix: Some(mix), ..Self::default() }
    }

    /// The results of the last use, by position.
    pub(crate) fn packings(&self) -> impl Iterator<Item = PackingSums> {
        self.nodes.all().map(|known| known.copied().unwrap_or_default())
    }
}

impl Default for Gauge {
    /// A gauge for the mix that the ledger has at the time.
    fn default() -> Self {
        let compiled = Arc::new(CompiledMix::none());
        Self { mix: None, compiled, basis: None, nodes: PerNode::default() }
    }
}
