//! What pods use of each device beside what they have of it: over-limit pods, untracked memory.
//!
//! Lists of processes are the only source: each list of a device is one sample of all pods on it.
//! Nothing here frees or takes room; the state of a device subtracts such use from its free memory.
//! A process of unknown use makes no pod an over-limit pod.

use std::time::Duration;

use litemap::LiteMap;

use crate::hardware::pool::Borrow;
use crate::model::event::LedgerEvent;
use crate::model::isolation::Rules;
use crate::model::node_state::{NodeReporting, NodeState};
use crate::model::reservation::{PodRef, Reservation};
use wire::ids::{DeviceId, NodeName, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::seen::DeviceUse;
use wire::units::{MemMib, Share, Timestamp};

/// What was seen on the devices of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageSamples {
    /// As of the last list of each device, by UUID.
    pub(crate) devices: LiteMap<DeviceId, OnDevice>,
}

/// What the last list of processes of a device shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OnDevice {
    /// Pods with a reservation on the node, as far as the driver can say what they use.
    pub pods: LiteMap<PodUid, Use>,
    /// Memory used by processes without a reservation on the node.
    pub untracked: MemMib,
    /// Whether the limit of each tenant counts, listed or not: a list that leaves a pod out, or
    /// does not know what it uses, takes no grace from it.
    limit_states: LiteMap<PodUid, LimitState>,
}

/// What one pod uses of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// Memory of all its processes.
    pub used: MemMib,
    /// What it may use: what it has, or its limit if that is more and counts now.
    pub allowed: MemMib,
    /// Successive lists up to the last that show more than that and the tolerance.
    pub lists_over: u32,
}

/// Whether the limit of a pod counts: only while no other pod runs on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LimitState {
    /// Others were there before it.
    #[default]
    Shared,
    /// It is alone.
    Alone,
    /// Others came; until then it may go down to what it has.
    Until(Timestamp),
}

impl LimitState {
    /// The state at the next list.
    fn next(self, is_alone: bool, now: Timestamp, grace: Duration) -> Self {
        match self {
            _ if is_alone => Self::Alone,
            Self::Alone => Self::Until(now.plus(grace)),
            Self::Shared | Self::Until(_) => self,
        }
    }

    /// Whether a limit counts.
    fn tolerates(self, now: Timestamp) -> bool {
        match self {
            Self::Shared => false,
            Self::Alone => true,
            Self::Until(end) => now < end,
        }
    }
}

impl Use {
    /// What it uses beyond what it may.
    pub fn excess(&self) -> MemMib {
        self.used.checked_sub(self.allowed).unwrap_or(MemMib::ZERO)
    }
}

/// A pod that uses more of a device than it may, beyond the tolerance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverLimitPod {
    /// Its node.
    pub node: NodeName,
    /// The device.
    pub device: DeviceId,
    /// What it uses there.
    pub seen: Use,
    /// What it has.
    pub held: Reservation,
    /// Whether the node's agent reports in time, so that this is up to date.
    pub is_current: bool,
}

/// What is used beyond what is allocated, in the whole cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnallocatedUse {
    /// Pods that use more of a device than they may.
    pub over_limit_pods: u64,
    /// What they use beyond that.
    pub excess: MemMib,
    /// Memory used by processes without a reservation on their node.
    pub untracked: MemMib,
}

impl UsageSamples {
    /// What the last list of a device shows; `None` before the first.
    pub fn on(&self, device: &DeviceId) -> Option<&OnDevice> {
        self.devices.get(device)
    }

    /// What the last list of each device shows, by UUID.
    pub fn devices(&self) -> impl Iterator<Item = (&DeviceId, &OnDevice)> {
        self.devices.iter()
    }

    /// How many pods are kept, once for each device.
    pub(crate) fn count(&self) -> usize {
        self.devices.values().map(|on| on.pods.len().max(on.limit_states.len())).sum()
    }

    /// Forgets devices and pods that the node does not have.
    pub(crate) fn prune(&mut self, node_state: &NodeState) {
        let devices = node_state.devices();
        self.devices.retain(|id, _| devices.iter().any(|known| known.device().id == *id));
        for (_, on) in self.devices.iter_mut() {
            on.pods.retain(|uid, _| node_state.reservation(uid).is_some());
            on.limit_states.retain(|uid, _| node_state.reservation(uid).is_some());
        }
    }

    /// Applies the lists of a report. Use within the tolerance of what is allowed is ignored.
    pub(crate) fn take(
        &mut self,
        node_state: &NodeState,
        uses: &[DeviceUse],
        rules: Rules,
        now: Timestamp,
    ) -> Vec<LedgerEvent> {
        let tolerance = rules.tolerance;
        let mut events = Vec::new();
        for seen in uses {
            // Kept ids share the texts of the node's state, so that the report can be freed.
            let mut ids = node_state.devices().iter().map(|known| &known.device().id);
            let id = ids.find(|known| **known == seen.id).cloned();
            let (Some(id), Some(list)) = (id, &seen.processes) else { continue };
            let before = self.devices.remove(&id);
            let limit_states = limit_states(node_state, &id, before.as_ref(), now, rules.grace);
            let before = before.unwrap_or_default();
            let most = list.len().min(node_state.reservations().len());
            let pods = LiteMap::with_capacity(most);
            let mut on = OnDevice { pods, untracked: MemMib::ZERO, limit_states };
            let mut unknown = Vec::new();
            for process in list {
                let holder = process.pod.as_ref().and_then(|uid| node_state.reservation(uid));
                let holder = holder.map(|held| &held.pod.uid);
                let sum = match holder {
                    Some(uid) => &mut on.pods.entry(uid.clone()).or_default().used,
                    None => &mut on.untracked,
                };
                match process.memory {
                    Some(memory) => *sum = sum.checked_add(memory).unwrap_or(BEYOND),
                    None => unknown.extend(holder.cloned()),
                }
            }
            on.pods.retain(|uid, _| !unknown.contains(uid));
            for (uid, used) in &mut on.pods {
                let Some(held) = node_state.reservation(uid) else { continue };
                let limit_state = on.limit_states.get(uid);
                let is_tolerated = limit_state.is_some_and(|state| state.tolerates(now));
                // Nothing takes back what a pod of a pool that lends compute has of memory. A pool that lends
                // memory says itself how much each may use.
                let by_limit = node_state.rule().borrow == Borrow::None;
                let most = if is_tolerated && by_limit { rules.max_limit } else { Share::ZERO };
                used.allowed = allowed(node_state, held, &seen.id, most);
                // Lists that were judged by less than it may use now prove nothing.
                let earlier = before.pods.get(uid).filter(|before| before.allowed >= used.allowed);
                let earlier = earlier.map_or(0, |earlier| earlier.lists_over);
                if used.excess() > tolerance {
                    used.lists_over = earlier.saturating_add(1);
                }
                if used.lists_over == 1 && !held.is_draining() {
                    events.push(LedgerEvent::Overuse {
                        node: node_state.name().clone(),
                        device: seen.id.clone(),
                        pod: held.pod.clone(),
                        used: used.used,
                        allowed: used.allowed,
                    });
                }
            }
            if on.untracked > tolerance && before.untracked <= tolerance {
                events.push(LedgerEvent::Untracked {
                    node: node_state.name().clone(),
                    device: seen.id.clone(),
                    used: on.untracked,
                });
            }
            self.devices.insert(id, on);
        }
        events
    }

    /// The over-limit pods with a reservation on the node, by device and UID, without those that may use more now
    /// than when the last list came: that may have been before the watch showed where they run.
    pub(crate) fn over_limit_pods(&self, node_state: &NodeState) -> Vec<OverLimitPod> {
        let mut all = Vec::new();
        for (device, on) in &self.devices {
            for (uid, seen) in on.pods.iter().filter(|(_, seen)| seen.lists_over > 0) {
                let Some(held) = node_state.reservation(uid) else { continue };
                if allowed(node_state, held, device, Share::ZERO) > seen.allowed {
                    continue;
                }
                all.push(OverLimitPod {
                    node: node_state.name().clone(),
                    device: device.clone(),
                    seen: *seen,
                    held: held.clone(),
                    is_current: node_state.state() == NodeReporting::Reporting,
                });
            }
        }
        all
    }
}

impl OverLimitPod {
    /// The pod.
    pub fn pod(&self) -> &PodRef {
        &self.held.pod
    }
}

/// More than any device has: stands for a sum of use that overflows its type.
pub(crate) const BEYOND: MemMib = MemMib::new(u64::MAX);

/// Whether the limits of all tenants of a device count at this list, from the list `before`.
fn limit_states(
    node_state: &NodeState,
    device: &DeviceId,
    before: Option<&OnDevice>,
    now: Timestamp,
    grace: Duration,
) -> LiteMap<PodUid, LimitState> {
    let device_state = node_state.devices().iter().find(|known| known.device().id == *device);
    let Some(device_state) = device_state else { return LiteMap::new() };
    let is_alone = device_state.running().count() == 1;
    let states = device_state.running().map(|(uid, _)| {
        let state = match before {
            // A tenant from before the first list may have been alone until now.
            None => LimitState::Alone,
            Some(before) => before.limit_states.get(uid).copied().unwrap_or_default(),
        };
        (uid.clone(), state.next(is_alone, now, grace))
    });
    states.collect()
}

/// What a pod may use of a device: what it has there, or its limit if that is more, but of the
/// limit at most the share `most` of the device. Without a part of the device, nothing.
fn allowed(node_state: &NodeState, held: &Reservation, device: &DeviceId, most: Share) -> MemMib {
    let uid = &held.pod.uid;
    let device_state = node_state.devices().iter().find(|known| known.device().id == *device);
    let Some(device_state) = device_state else { return MemMib::ZERO };
    let guest = device_state.guests().get(uid).map(|guest| guest.demand);
    let allocated = device_state.tenants().get(uid).copied().or(guest);
    let Some(allocated) = allocated else { return MemMib::ZERO };
    let capacity = device_state.capacity().memory;
    let limit = held.request.as_ref().and_then(|request| request.limit);
    let limit = limit.map_or(MemMib::ZERO, |limit| {
        limit.at_most(most, capacity).memory_of(device_state.rule().replicas, capacity)
    });
    let lent = device_state.memory_limit(uid).unwrap_or(MemMib::ZERO);
    if mutated(Mutation::EvictsWithinShare) {
        return MemMib::new(allocated.memory.mib() / 2);
    }
    allocated.memory.max(limit).max(lent)
}

#[cfg(test)]
mod tests;
