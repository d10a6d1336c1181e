//! Looks over all nodes for one that takes a changed request.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::MutexGuard;

use crate::hardware::device_class::DeviceClasses;
use crate::hardware::spots::Spot;
use crate::ledger::nodes::node_entry::NodeEntry;
use crate::ledger::nodes::state::ClusterModel;
use crate::ledger::query::own_room::OwnRoom;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::suggest::displacement::Clearing;
use crate::model::device_state::HoldRule;
use crate::model::fit::CompiledRequest;
use crate::model::node_state::NodeState;
use crate::model::reservation::PodRef;
use crate::scoring::plan;
use wire::ids::NodeName;
use wire::units::MemMib;

/// All nodes as one pod sees them, and what a request takes of their devices. It has its own list of
/// classes, so that it locks only one node at a time.
pub(crate) struct Search<'a> {
    node_table: &'a [Arc<NodeEntry>],
    own: &'a OwnRoom,
    pub(crate) classes: DeviceClasses,
}

/// A node that is looked at.
pub(crate) enum Looked<'a> {
    /// It is locked meanwhile.
    Locked(MutexGuard<'a, NodeState>),
    /// Room is kept there for the pod, and counts as free.
    WithOwn(&'a NodeState),
}

impl Deref for Looked<'_> {
    type Target = NodeState;

    fn deref(&self) -> &NodeState {
        match self {
            Self::Locked(node_state) => node_state,
            Self::WithOwn(node_state) => node_state,
        }
    }
}

impl<'a> Search<'a> {
    pub(crate) fn new(
        node_table: &'a [Arc<NodeEntry>],
        own: &'a OwnRoom,
        cluster: &ClusterModel,
    ) -> Self {
        Self { node_table, own, classes: cluster.classes.clone() }
    }

    /// The nodes by position, each locked while it is read. Leaves out a node that got devices of a
    /// new class since the search began. Calls have the processor first, between two nodes.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (&'a NodeName, Looked<'a>)> {
        let (known, own) = (self.classes.count(), self.own);
        self.node_table.iter().filter_map(move |node_entry| {
            std::thread::yield_now();
            let node_state = match own.on(&node_entry.name) {
                Some(node_state) => Looked::WithOwn(node_state),
                None => Looked::Locked(node_entry.read()),
            };
            node_state.is_of_classes(known).then_some((&node_entry.name, node_state))
        })
    }

    /// The first node, by position, for which `is_it` is true.
    pub(crate) fn find(&self, is_it: impl Fn(&NodeState) -> bool) -> Option<NodeName> {
        self.nodes().find(|(_, node_state)| is_it(node_state)).map(|(name, _)| name.clone())
    }

    pub(crate) fn first(&self, query: &PlacementRequest) -> Option<NodeName> {
        let compiled = query.compile(&self.classes);
        self.find(|node_state| plan::fits(node_state, &compiled, HoldRule::Respected))
    }

    /// The largest size from `least` up to but without `named` at which some node fits. At the
    /// sizes `whole` a request may fit where smaller ones do not: a pod with a whole device needs
    /// no isolation. So may the size next to `named`, on a device with slots. For all other sizes,
    /// if one fits, each smaller one does, as long as the least memory of a part is ignored. So
    /// that is checked at the end, for the size that was found.
    pub(crate) fn largest(
        &self,
        lever: Lever,
        (least, named): (u64, u64),
        whole: &[u64],
        make: impl Fn(u64) -> PlacementRequest,
    ) -> Option<Suggestion> {
        let most = named.checked_sub(1).filter(|most| *most >= least)?;
        let compiled = |size| {
            let mut query = make(size);
            query.gpu.iter_mut().for_each(|gpu| gpu.min_memory = MemMib::ZERO);
            query.compile(&self.classes)
        };
        let above = |size: &u64| (least..=most).contains(size);
        let sizes: BTreeSet<u64> = whole.iter().copied().filter(above).chain([most]).collect();
        let special: Vec<(u64, CompiledRequest)> =
            sizes.into_iter().map(|size| (size, compiled(size))).collect();
        let mut best: Option<(u64, NodeName)> = None;
        let mut next = (least, compiled(least));
        for (name, node_state) in self.nodes() {
            let fits =
                |compiled: &CompiledRequest| plan::fits(&node_state, compiled, HoldRule::Respected);
            let known = best.as_ref().map(|(size, _)| *size);
            let mut better = special.iter().rev().take_while(|(size, _)| Some(*size) > known);
            let mut found =
                better.find(|(_, compiled)| fits(compiled)).map(|(size, _)| *size).max(known);
            let from = found.map_or(least, |size| size + 1);
            if from != next.0 {
                next = (from, compiled(from));
            }
            if from <= most && fits(&next.1) {
                let (mut low, mut high) = (from, most);
                while low < high {
                    let middle = low + (high - low).div_ceil(2);
                    if fits(&compiled(middle)) { low = middle } else { high = middle - 1 }
                }
                found = Some(low);
            }
            if let Some(size) = found.filter(|size| Some(*size) > known)
                && plan::fits(&node_state, &make(size).compile(&self.classes), HoldRule::Respected)
            {
                best = Some((size, name.clone()));
                if size == most {
                    break;
                }
            }
        }
        let (size, node) = best?;
        Some(Suggestion { node, change: Change::Request(lever, Box::new(make(size))) })
    }
}

/// A change after which a waiting pod fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suggestion {
    /// A node where it fits then.
    pub node: NodeName,
    /// The change.
    pub change: Change,
}

/// What changes. In the order of the suggestions: what costs nothing first, then what the pod's
/// owner can do, then what costs other pods, then what an operator can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing but time: the room is held for pods that are about to be bound.
    HeldElsewhere,
    /// Nothing but time: the room is kept for the first pod of the line.
    KeptForFirst,
    /// Nothing but time: these pods have ended, and their processes may still use the room.
    Ending(Vec<PodRef>),
    /// The pod makes this request instead.
    Request(Lever, Box<PlacementRequest>),
    /// These pods end; none of them could stay.
    End(Ends),
    /// gpupack gets this many GPUs of kubelet, on nodes where the pod would then fit.
    Kubelet(usize),
    /// This many unhealthy GPUs work again, on nodes where the pod would then fit.
    Heal(usize),
}

/// Pods that would have to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ends {
    /// Which, and what they have.
    pub way: Clearing,
    /// The same pods, those with the least first.
    pub pods: Vec<PodRef>,
    /// The MIG instances that are removed then.
    pub instances: Vec<Spot>,
}

/// Which part of a request changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lever {
    /// Less compute share; of a plain fraction, less memory too.
    Share,
    /// Less memory.
    Memory,
    /// Less CPU.
    Cpu,
    /// Less host memory.
    HostMemory,
    /// Fewer devices.
    Devices,
    /// Another MIG profile.
    Profile,
    /// One more model is accepted.
    Model,
    /// A whole GPU instead of a part.
    Whole,
    /// Weaker isolation is accepted.
    Isolation,
}
