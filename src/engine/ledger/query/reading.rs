//! Copies and figures for readers. Nothing here changes anything.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dashmap::Entry;

use crate::ledger::nodes::per_node::{Gauge, PerNode};
use crate::ledger::nodes::state::Ledger;
use crate::model::node_state::{AuditError, NodeReporting, NodeState};
use crate::model::reservation::{PodRef, Reservation, ReservationState};
use crate::scoring::fragmentation::{PackingSums, stranded_by_device};
use crate::scoring::guests::{self, BurstRoom};
use crate::waste::compiled_mix::CompiledMix;
use crate::waste::request_mix::Mix;
use crate::waste::supply::NodeShapes;
use wire::device::DeviceKind;
use wire::ids::{DeviceId, MigProfile, NodeName, PodUid};
use wire::units::{MemMib, Share, Timestamp};

/// Whether *filter* can be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Pods and nodes have not been listed yet.
    NotListed,
    /// Nodes that have pods have not reported yet.
    AwaitingReports {
        /// How many.
        nodes: usize,
    },
    /// Yes.
    Ready,
}

/// What pods borrow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lent {
    /// How many run on another device than their own.
    pub guests: usize,
    /// What these request of the devices where they run.
    pub share: Share,
    /// Memory that pods use above their requests where their pool lends it.
    pub memory: MemMib,
    /// How many pods may use more than they request, of compute and of memory, by how much of that is free, in the
    /// order of [`BurstRoom::ALL`].
    pub bursts: [[usize; 3]; 2],
}

/// Adds the pods of a node that may use more than they request. One with several devices counts by the worst of
/// them.
fn count_bursts(node: &NodeState, counts: &mut [[usize; 3]; 2]) {
    let mut worst: BTreeMap<&PodUid, [Option<BurstRoom>; 2]> = BTreeMap::new();
    for device in node.devices() {
        for (uid, rooms) in guests::burst_rooms(node, device) {
            let known = worst.entry(uid).or_default();
            for (known, room) in known.iter_mut().zip(rooms) {
                *known = (*known).max(room);
            }
        }
    }
    for rooms in worst.values() {
        for (counts, room) in counts.iter_mut().zip(rooms) {
            for (count, one) in counts.iter_mut().zip(BurstRoom::ALL) {
                *count += usize::from(*room == Some(one));
            }
        }
    }
}

impl Ledger {
    /// Whether *filter* can be answered now. Once true, it stays true: nodes that come later are
    /// rejected one by one until they are reported.
    pub fn readiness(&self, now: Timestamp) -> Readiness {
        if self.is_ready.load(Ordering::Acquire) {
            return Readiness::Ready;
        }
        let readiness = self.look_whether_ready(now);
        self.is_ready.fetch_or(readiness == Readiness::Ready, Ordering::AcqRel);
        readiness
    }

    /// Whether pods and nodes have been listed.
    pub fn is_listed(&self) -> bool {
        self.is_listed.load(Ordering::Acquire)
    }

    /// How many positions there are: of nodes, also gone ones, and vacant ones.
    pub fn node_count(&self) -> usize {
        self.node_table().len()
    }

    fn look_whether_ready(&self, now: Timestamp) -> Readiness {
        if !self.is_listed() {
            return Readiness::NotListed;
        }
        let listed_at = Timestamp::from_millis(self.listed_at.load(Ordering::Acquire));
        if now.since(listed_at) >= self.settings.warm_up {
            return Readiness::Ready;
        }
        let node_table = self.node_table();
        let awaited = node_table.iter().filter(|node_entry| {
            let node_state = node_entry.read();
            node_state.state() == NodeReporting::NeverReported
                && !node_state.reservations().is_empty()
        });
        match awaited.count() {
            0 => Readiness::Ready,
            nodes => Readiness::AwaitingReports { nodes },
        }
    }

    /// A copy of the state of one node.
    pub fn node(&self, name: &str) -> Option<NodeState> {
        self.position(name).map(|at| self.node_entry(at).read().clone())
    }

    /// Copies of the state of all nodes, by name.
    pub fn nodes(&self) -> Vec<NodeState> {
        let mut nodes: Vec<NodeState> =
            self.node_table().iter().map(|node_entry| node_entry.read().clone()).collect();
        nodes.retain(|node| !node.is_forgettable());
        nodes.sort_by(|a, b| a.name().cmp(b.name()));
        nodes
    }

    /// Lets `look` see the state of each node, one after the other, in no order, without a copy.
    /// The node is locked meanwhile, so `look` must be short and must not call the ledger.
    pub fn look_at_each(&self, mut look: impl FnMut(&NodeState)) {
        for node_entry in self.node_table().iter() {
            let node_state = node_entry.read();
            if !node_state.is_forgettable() {
                look(&node_state);
            }
        }
    }

    /// The reporting state of each position, in no order; [`NodeReporting::Gone`] where no node is.
    pub fn node_states(&self) -> Vec<NodeReporting> {
        self.node_table().iter().map(|node_entry| node_entry.read().state()).collect()
    }

    /// The pods that have part of a device.
    pub fn tenants(&self, node: &str, device: &DeviceId) -> Vec<PodRef> {
        let held = self
            .held_on(node, |held| held.placement.devices.iter().any(|placed| placed.id == *device));
        held.into_iter().map(|held| held.pod).collect()
    }

    /// The bound pods that run on a device as guests and can go home. Not those that move to or from a MIG instance.
    pub fn guests_on(&self, node: &str, device: &DeviceId) -> Vec<Reservation> {
        self.held_on(node, |held| {
            let is_guest = held.guest_on() == Some(device) && !held.has_both();
            is_guest && held.state == ReservationState::Confirmed
        })
    }

    fn held_on(&self, node: &str, is_one: impl Fn(&Reservation) -> bool) -> Vec<Reservation> {
        let Some(at) = self.position(node) else { return Vec::new() };
        let node_entry = self.node_entry(at);
        let node_state = node_entry.read();
        let held = node_state.reservations().values();
        held.filter(|held| is_one(held)).cloned().collect()
    }

    /// The profiles of all MIG instances that are there or can be made. Agents may report any name: only usual ones.
    pub fn mig_profiles(&self) -> BTreeSet<MigProfile> {
        let mut profiles = BTreeSet::new();
        self.look_at_each(|node_state| {
            let devices = node_state.devices().iter();
            let there = devices.filter_map(|device| match &device.device().kind {
                DeviceKind::MigInstance { profile, .. } => Some(profile),
                DeviceKind::Gpu | DeviceKind::MigParent => None,
            });
            let makeable = node_state.spots().iter().map(|device| &device.makeable.spot.profile);
            for profile in there.chain(makeable).filter(|profile| profile.has_usual_name()) {
                if !profiles.contains(profile) {
                    profiles.insert(profile.clone());
                }
            }
        });
        profiles
    }

    /// What pods borrow now.
    pub fn lent(&self) -> Lent {
        let mut lent = Lent::default();
        self.look_at_each(|node_state| {
            for device in node_state.devices() {
                lent.guests += device.guests().len();
                let shares = device.guests().values().map(|guest| guest.demand.share);
                lent.share =
                    shares.fold(lent.share, |sum, one| sum.checked_add(one).unwrap_or(sum));
                let memory = guests::memory_lent(node_state, device);
                lent.memory = lent.memory.checked_add(memory).unwrap_or(lent.memory);
            }
            count_bursts(node_state, &mut lent.bursts);
        });
        lent
    }

    /// Ended pods whose processes still run after `drain_limit`: their room is not free.
    pub fn overdue_drains(&self, now: Timestamp) -> usize {
        let limit = self.settings.drain_limit;
        self.node_table()
            .iter()
            .map(|node_entry| node_entry.read().overdue_drains(limit, now))
            .sum()
    }

    /// The reservation of a pod.
    pub fn reservation(&self, uid: &PodUid) -> Option<Reservation> {
        let at = self.pods.get(uid).map(|at| *at)?;
        self.node_entry(at).read().reservation(uid).cloned()
    }

    /// The free share of the nodes with at least `gpus` wholly free GPUs, in millionths of a GPU.
    pub fn free_on_nodes_with(&self, gpus: usize) -> u64 {
        self.supply().on_nodes_with(gpus)
    }

    /// How full and how fragmented the cluster is, by the typical requests that it sees.
    pub fn packing(&self) -> PackingSums {
        self.packing_by(&mut self.gauge.lock())
    }

    /// The same by a gauge. Only nodes that changed since its last use are measured: O(changed
    /// nodes × typical requests × devices + nodes).
    pub fn packing_by(&self, gauge: &mut Gauge) -> PackingSums {
        let classes = {
            let cluster = self.cluster();
            let basis = match gauge.mix {
                None => cluster.mix_generation,
                Some(_) => {
                    u64::try_from(cluster.classes.count()).expect("lengths fit into 64 bits")
                }
            };
            if gauge.basis != Some(basis) {
                gauge.compiled = match &gauge.mix {
                    None => Arc::clone(&cluster.compiled),
                    Some(mix) => {
                        Arc::new(CompiledMix::of(mix, &cluster.classes, &NodeShapes::default()))
                    }
                };
                (gauge.basis, gauge.nodes) = (Some(basis), PerNode::default());
            }
            cluster.classes.count()
        };
        let mix = &gauge.compiled;
        gauge
            .nodes
            .refresh(&self.node_table(), classes, |node_state| PackingSums::of(node_state, mix));
        let nodes = gauge.nodes.all().flatten().copied();
        nodes.fold(PackingSums::default(), PackingSums::and)
    }

    /// The free share of each GPU that the requests of `mix` cannot use, in no order.
    pub fn stranded_against(&self, mix: &Mix) -> Vec<Share> {
        let mix = CompiledMix::of(mix, &self.cluster().classes, &NodeShapes::default());
        let node_table = self.node_table();
        let stranded =
            node_table.iter().flat_map(|node_entry| stranded_by_device(&node_entry.read(), &mix));
        stranded.map(|(_, share)| share).collect()
    }

    /// The pods with a hold, and the node of each.
    pub fn held_nodes(&self) -> BTreeMap<PodUid, NodeName> {
        let held = self.holds.iter();
        held.map(|held| (held.key().clone(), self.node_entry(*held.value()).name.clone())).collect()
    }

    /// How many holds there are now.
    pub fn hold_count(&self) -> usize {
        self.holds.len()
    }

    /// How many entries the tables have that grow with pods, nodes or calls, by name.
    #[doc(hidden)] // for tests, which compare them with their bounds
    pub fn entries(&self) -> Vec<(&'static str, usize)> {
        let node_table = self.node_table();
        let (mut held, mut sketches) = (0, 0);
        for at in node_table.present() {
            held += node_table[at].read().entries();
            sketches += node_table[at].details.lock().entries();
        }
        vec![
            ("nodes", node_table.count()),
            ("domains", self.domains.lock().len()),
            ("pods", self.pods.len()),
            ("holds", self.holds.len()),
            ("devices", self.owners.len()),
            ("ended", self.ended().count()),
            ("mix", self.window.lock().pods()),
            ("shapes", self.shapes.count()),
            ("held", held),
            ("sketches", sketches),
        ]
    }

    /// Checks the derived sums of every node.
    ///
    /// # Errors
    /// One [`AuditError`] per node whose sums differ.
    pub fn audit(&self) -> Result<(), Vec<AuditError>> {
        let mut faults: Vec<_> = self
            .node_table()
            .iter()
            .filter_map(|node_entry| node_entry.read().audit().err())
            .collect();
        faults.extend(self.audit_teams());
        if faults.is_empty() { Ok(()) } else { Err(faults) }
    }

    /// The pods that count for their team although they have nothing, or have something and do not.
    fn audit_teams(&self) -> Vec<AuditError> {
        if self.teams.rules().is_none() {
            return Vec::new();
        }
        let mut faults = Vec::new();
        for uid in self.teams.counted() {
            let Entry::Vacant(_held) = self.pods.entry(uid.clone()) else { continue };
            let has_room = self.standing.lock().contains_key(&uid);
            if !has_room && self.teams.counts(&uid) {
                faults.push(AuditError::Team { pod: uid });
            }
        }
        self.look_at_each(|node_state| {
            let held = node_state.reservations().keys().filter(|uid| !self.teams.counts(uid));
            faults.extend(held.map(|uid| AuditError::Team { pod: uid.clone() }));
        });
        faults
    }
}
