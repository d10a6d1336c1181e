//! GPUs that are shared and divided by turns: their agents switch MIG mode as they are ordered.

use std::collections::{BTreeMap, BTreeSet};

use gpupack::agent::mig::plan::{Layouts, Order};
use gpupack::agent::mig::switching::{Switch, Switches, obeyed, switches};
use gpupack::hardware::device::DeviceId;
use gpupack::hardware::units::Timestamp;
use gpupack::model::reservation::{Reservation, ReservationState};
use gpupack::report::wire::MigOrders;

use super::World;
use super::mig::{MigNode, Working};

impl MigNode {
    /// The next switch of MIG mode, as `agent::nvml::maker` has it. Without one the orders whose switch waits or
    /// cannot be made; and then the agent says which GPUs it leaves out of MIG mode.
    pub(super) fn next_switch(
        &mut self,
        orders: &MigOrders,
        layouts: &Layouts,
        now: Timestamp,
    ) -> Result<BTreeSet<Order>, Switch> {
        let Switches { steps, failures } = switches(orders, layouts, Some(&BTreeSet::new()));
        let mut failed = BTreeSet::new();
        for (order, error) in failures {
            self.attempts.refuse(order.clone(), error);
            failed.insert(order);
        }
        for switch in steps {
            if !switch.orders.iter().all(|order| self.attempts.waits(order, now)) {
                return Err(switch);
            }
            failed.extend(switch.orders);
        }
        self.on_demand.obeys(obeyed(orders, layouts));
        Ok(failed)
    }

    /// Whether this is one of its GPUs, in any mode.
    pub(super) fn has_gpu(&self, id: &str) -> bool {
        self.gpus.iter().any(|gpu| gpu.uuid == id)
    }

    /// Whether this GPU is in MIG mode.
    pub(super) fn is_divided(&self, id: &str) -> bool {
        self.gpus.iter().any(|gpu| gpu.uuid == id && gpu.is_in_mig_mode)
    }

    /// Why a pod cannot be bound to this GPU now, if it is one.
    pub(super) fn hindrance(&self, id: &str) -> Option<&'static str> {
        let gpu = self.gpus.iter().find(|gpu| gpu.uuid == id)?;
        let is_it = |it: &Working| matches!(it, Working::Mode(it) if it.to_mig && it.gpu == id);
        match self.working.as_ref().is_some_and(is_it) {
            _ if gpu.is_in_mig_mode => Some("is in MIG mode"),
            true => Some("is being switched to MIG mode"),
            false => gpu.is_mig_pending.then_some("is in MIG mode after the next reset"),
        }
    }
}

impl World {
    /// In the ledger of the leader no GPU is shared and divided.
    pub(super) fn check_modes(&self) -> Result<(), String> {
        let Some(replica) = self.replicas[self.serving()].as_ref() else { return Ok(()) };
        let mut broken = None;
        replica.app.ledger.look_at_each(|node| {
            let all = node.reservations().values();
            let parts = all.flat_map(|held| held.placement.parts().map(move |it| (held, it)));
            let (mut shared, mut divided) = (BTreeMap::new(), BTreeMap::new());
            // A process that takes over may not have heard yet that a pod is gone, or that the instance of one which
            // ends is.
            let is_there = |held: &Reservation, id: &DeviceId| match held.state {
                ReservationState::Draining { .. } => {
                    node.devices().iter().any(|it| it.device().id == *id)
                }
                _ => self.api.pods.contains_key(held.pod.uid.as_str()),
            };
            for (held, (placed, spot)) in parts.filter(|(held, (it, _))| is_there(held, &it.id)) {
                match spot {
                    Some(spot) if !spot.profile.is_whole() => divided.insert(&spot.gpu, held),
                    Some(spot) => shared.insert(&spot.gpu, held),
                    None => shared.insert(&placed.id, held),
                };
            }
            for (gpu, held) in shared {
                if let Some(other) = divided.get(gpu) {
                    broken = Some(format!("{gpu} is shared by {held:?} and divided by {other:?}"));
                }
            }
        });
        broken.map_or(Ok(()), Err)
    }

    /// The driver switches the mode of a GPU that nothing uses. By half, it notes the mode for the next reset alone.
    pub(super) fn switch_mode(&mut self, node: usize, switch: &Switch, is_half: bool) -> bool {
        let Switch { gpu: id, to_mig, .. } = switch;
        let is_used = self.processes.values().any(|process| process.uses(id));
        let Some(mig) = &mut self.nodes[node].mig else { return false };
        let Some(gpu) = mig.gpus.iter_mut().find(|gpu| gpu.uuid == *id) else { return false };
        if is_used || !gpu.instances.is_empty() {
            return false;
        }
        gpu.is_mig_pending = *to_mig;
        if is_half {
            return true;
        }
        gpu.is_in_mig_mode = *to_mig;
        let has = |uid: &&String| {
            let pod = &self.api.pods[*uid];
            *to_mig && pod.is_placed() && pod.takes.iter().any(|(on, ..)| on == id)
        };
        if let Some(uid) = self.api.pods.keys().find(has).cloned() {
            self.broke(format!("{id} is switched to MIG mode, and {uid} has it"));
        }
        self.nodes[node].devices_changed();
        true
    }
}
