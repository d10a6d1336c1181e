//! What the cluster as a whole has, and has free: what no single node knows.
//!
//! [`NodeShapes`] change when nodes come and go, [`Supply`] with every reservation. Both count GPUs
//! that may be shared and take new tenants. MIG instances are not counted: they differ too much
//! from GPUs in size.

use std::collections::BTreeMap;

use crate::hardware::device_class::ClassId;
use crate::model::device_state::DeviceState;
use crate::model::node_state::NodeState;
use crate::waste::numbers::float;
use wire::device::DeviceKind;
use wire::units::HostAmount;

/// Nodes with this many wholly free GPUs or more are counted together.
const MOST_WHOLE: usize = 16;

fn shareable(node: &NodeState) -> impl Iterator<Item = &DeviceState> {
    let devices = if node.placeable().is_ok() { node.devices() } else { &[] };
    devices.iter().filter(|device_state| {
        device_state.is_placeable() && device_state.device().kind == DeviceKind::Gpu
    })
}

/// Nodes that are equal when they are empty.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeShape {
    /// Class of its first GPU. Nodes with GPUs of several classes are rare.
    pub class: ClassId,
    /// Its GPUs.
    pub gpus: u64,
    /// All its CPU and host memory.
    pub host: HostAmount,
}

/// The nodes by shape.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeShapes {
    shapes: BTreeMap<NodeShape, u64>,
}

impl NodeShapes {
    /// Counts a node, unless it takes no pods now.
    pub fn count(&mut self, node: &NodeState) {
        let mut gpus = shareable(node);
        let Some(first) = gpus.next() else { return };
        let gpus = 1 + gpus.count();
        let shape = NodeShape {
            class: first.class(),
            gpus: u64::try_from(gpus).expect("a node has few devices"),
            host: node.host_capacity(),
        };
        *self.shapes.entry(shape).or_default() += 1;
    }

    /// GPUs of all nodes.
    pub fn gpus(&self) -> u64 {
        self.shapes().map(|(shape, nodes)| nodes * shape.gpus).sum()
    }

    /// GPUs of the node that has the most.
    pub fn largest(&self) -> u64 {
        self.shapes().map(|(shape, _)| shape.gpus).max().unwrap_or(0)
    }

    /// CPU of all nodes, in thousandths of a core, and their host memory in MiB: an estimate.
    pub(crate) fn host(&self) -> (f64, f64) {
        self.shapes().fold((0.0, 0.0), |(cpu, memory), (shape, nodes)| {
            let host = shape.host;
            (
                cpu + float(nodes) * float(host.cpu.milli()),
                memory + float(nodes) * float(host.memory.mib()),
            )
        })
    }

    /// The shapes, each with its number of nodes.
    pub fn shapes(&self) -> impl Iterator<Item = (&NodeShape, u64)> {
        self.shapes.iter().map(|(shape, nodes)| (shape, *nodes))
    }
}

/// What one node adds to the [`Supply`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSupply {
    free: Vec<(ClassId, u64)>,
    whole: usize,
}

impl NodeSupply {
    /// The node as it is now. Holds do not count: they last for milliseconds.
    pub fn of(node: &NodeState) -> Self {
        let mut supply = Self::default();
        for device_state in shareable(node) {
            let free = device_state.unallocated();
            let millionths = free.share.millionths();
            match supply.free.iter_mut().find(|(class, _)| *class == device_state.class()) {
                Some((_, sum)) => *sum += millionths,
                None => supply.free.push((device_state.class(), millionths)),
            }
            supply.whole += usize::from(free == device_state.capacity());
        }
        supply
    }

    fn total(&self) -> u64 {
        self.free.iter().map(|(_, millionths)| *millionths).sum()
    }
}

/// Free share of the cluster's GPUs, in millionths of a GPU: by class, and by how many GPUs of
/// their node are wholly free.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Supply {
    /// By class and by wholly free GPUs of the node.
    by_class: Vec<[u64; MOST_WHOLE + 1]>,
    by_whole: [u64; MOST_WHOLE + 1],
}

fn subtract(sum: &mut u64, part: u64) {
    *sum = sum.checked_sub(part).expect("only what was added is subtracted");
}

impl Supply {
    /// Replaces what a node adds.
    ///
    /// # Panics
    /// If `before` was never added: our own arithmetic is broken.
    pub fn replace(&mut self, before: &NodeSupply, after: &NodeSupply) {
        for (class, millionths) in &after.free {
            let known = self.by_class.len().max(class.position() + 1);
            self.by_class.resize(known, [0; MOST_WHOLE + 1]);
            self.by_class[class.position()][after.whole.min(MOST_WHOLE)] += millionths;
        }
        self.by_whole[after.whole.min(MOST_WHOLE)] += after.total();
        for (class, millionths) in &before.free {
            let of_class = &mut self.by_class[class.position()];
            subtract(&mut of_class[before.whole.min(MOST_WHOLE)], *millionths);
        }
        subtract(&mut self.by_whole[before.whole.min(MOST_WHOLE)], before.total());
    }

    /// Free share of all GPUs.
    pub fn free(&self) -> u64 {
        self.by_whole.iter().sum()
    }

    /// Free share of the GPUs of a class.
    pub fn of_class(&self, class: usize) -> u64 {
        self.by_class.get(class).map_or(0, |of_class| of_class.iter().sum())
    }

    /// How many classes there may be.
    pub fn classes(&self) -> usize {
        self.by_class.len()
    }

    /// Free share of the GPUs of a class on nodes that have a wholly free GPU, but fewer than `gpus`.
    pub fn beside_nodes_with(&self, gpus: usize, class: usize) -> u64 {
        let room = 1..gpus.clamp(1, MOST_WHOLE);
        self.by_class.get(class).map_or(0, |of_class| of_class[room].iter().sum())
    }

    /// Free share of the nodes that have at least `gpus` wholly free GPUs.
    pub fn on_nodes_with(&self, gpus: usize) -> u64 {
        self.by_whole[gpus.min(MOST_WHOLE)..].iter().sum()
    }
}
