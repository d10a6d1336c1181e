//! Which instances have device nodes here: those that the agent made or took over, at each look at the instances, and
//! between looks by the files alone. So they come back after a restart of the agent and of the driver's container.

use std::collections::{BTreeMap, BTreeSet};

use crate::mig::device_nodes::{DeviceNodes, InstanceNumber, NodeError};
use crate::mig::made::{MadeInstances, Standing};
use crate::mig::plan::{GpuInstance, GpuLayout, Nodeless};

/// The device nodes of the instances that were made here.
#[derive(Debug)]
pub(crate) struct KeptNodes {
    nodes: DeviceNodes,
    /// The instances at the newest look.
    own: BTreeMap<InstanceNumber, Kept>,
    /// Whether there may be others.
    expects_look: bool,
}

/// An instance whose nodes are kept.
#[derive(Debug, Default)]
struct Kept {
    /// UUIDs of its devices.
    devices: Vec<String>,
    /// Why its nodes could not be made, or not be looked for.
    error: Option<String>,
    /// Whether they are missing, as far as they could be looked for.
    is_nodeless: bool,
}

/// A GPU at a look: what there is on it, and its minor number.
pub(crate) struct LookedAt<'a> {
    pub(crate) gpu: &'a mut GpuLayout,
    pub(crate) minor: Result<u32, String>,
}

impl KeptNodes {
    /// Before the first look.
    pub(crate) fn new(nodes: DeviceNodes) -> Self {
        Self { nodes, own: BTreeMap::new(), expects_look: true }
    }

    /// Whether the instances have to be looked at, so that it is known which nodes to keep.
    pub(crate) fn expects_look(&self) -> bool {
        self.expects_look
    }

    /// Notes that other instances are to have nodes.
    pub(crate) fn expect_look(&mut self) {
        self.expects_look = true;
    }

    /// Notes that all GPUs were looked at.
    pub(crate) fn note_look(&mut self) {
        self.expects_look = false;
    }

    /// Lets the nodes of the instances on a GPU be there. A new instance without them has no devices then: it is not
    /// ready. Returns these.
    pub(crate) fn look(&mut self, at: LookedAt<'_>, standings: &[Standing]) -> Vec<Nodeless> {
        let LookedAt { gpu, minor } = at;
        let mut nodeless = Vec::new();
        let mut there = BTreeSet::new();
        for (instance, standing) in gpu.instances.iter_mut().zip(standings) {
            if *standing == Standing::Other {
                continue;
            }
            let ensured = match self.nodes.are_needed() {
                Ok(true) => minor.clone().and_then(|gpu| {
                    let number = InstanceNumber { gpu, id: instance.id };
                    there.insert(number);
                    let ensured = self.ensure(number).map_err(|error| error.to_string());
                    let kept = self.own.entry(number).or_default();
                    kept.devices.clone_from(&instance.devices);
                    ensured
                }),
                Ok(false) => Ok(()),
                Err(error) => Err(error.to_string()),
            };
            if let (Err(error), Standing::New) = (ensured, standing) {
                let devices = std::mem::take(&mut instance.devices);
                let (gpu, slot) = (gpu.uuid.clone(), instance.slot);
                nodeless.push(Nodeless { gpu, slot, devices, error });
            }
        }
        if let Ok(minor) = minor {
            let is_kept = |it: &InstanceNumber| it.gpu != minor || there.contains(it);
            self.own.retain(|number, _| is_kept(number));
        }
        nodeless
    }

    /// Lets all nodes be there, without a look at the instances.
    pub(crate) fn renew(&mut self) {
        let all: Vec<InstanceNumber> = self.own.keys().copied().collect();
        for number in all {
            if let Err(NodeError::NoInstance { .. }) = self.ensure(number) {
                // It is gone: with a driver that was loaded again, or by others.
                self.own.remove(&number);
            }
        }
    }

    /// UUIDs of the instances whose nodes are missing.
    pub(crate) fn nodeless(&self) -> BTreeSet<String> {
        let all = self.own.values().filter(|kept| kept.is_nodeless);
        all.flat_map(|kept| kept.devices.iter().cloned()).collect()
    }

    fn ensure(&mut self, number: InstanceNumber) -> Result<(), NodeError> {
        let result = self.nodes.ensure(number);
        let error = result.as_ref().err().map(ToString::to_string);
        let known = self.own.entry(number).or_default();
        if let Some(error) = error.as_ref().filter(|_| known.error != error) {
            let InstanceNumber { gpu, id } = number;
            tracing::warn!(gpu, instance = id, error, "a MIG instance has no device nodes");
        }
        known.error = error;
        known.is_nodeless = match result {
            Ok(()) => false,
            // It could not be looked for them.
            Err(NodeError::NoNode { .. }) => known.is_nodeless,
            Err(_) => true,
        };
        result
    }
}

/// How each instance of a GPU stands to those that were made here.
pub(crate) fn standings(made: &MadeInstances, gpu: &GpuLayout) -> Vec<Standing> {
    gpu.instances.iter().map(|it: &GpuInstance| made.standing(gpu, it)).collect()
}
