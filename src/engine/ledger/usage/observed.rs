//! What the ledger notes of the reports beside the amounts: use, isolation, conditions.

use std::collections::BTreeSet;

use crate::hardware::spots::Spot;
use crate::ledger::nodes::state::Ledger;
use crate::model::device_state::Verification;
use crate::model::event::LedgerEvent;
use crate::model::isolation::{DriverLimits, Mode, Rules};
use crate::model::node::intake::Start;
use crate::model::node_state::NodeState;
use crate::model::reservation::{Placement, ReservationState};
use crate::usage::history::{History, Usage, allocated};
use crate::usage::node_details::{DetailsReport, NodeDetails, verification};
use crate::usage::samples::{BEYOND, OverLimitPod, UnallocatedUse};
use crate::usage::starts::{PodStart, Starts, WantedContainers};
use crate::usage::tenant_isolation::TenantsByMode;
use wire::ids::{DeviceId, PodUid};
use wire::seen::DeviceUse;
use wire::units::{MemMib, Timestamp};

impl Ledger {
    /// Notes which isolation of devices is verified now, and returns the events of that.
    pub(crate) fn set_verification(
        &self,
        at: usize,
        found: &[(DeviceId, Verification)],
    ) -> Vec<LedgerEvent> {
        if found.is_empty() {
            return Vec::new();
        }
        // A pod that was refused for lack of isolation may fit again, though nothing became free.
        let is_room = found.iter().any(|(_, verification)| *verification != Verification::Missing);
        let mut events: Vec<LedgerEvent> = is_room
            .then(|| LedgerEvent::Room(self.node_entry(at).name.clone()))
            .into_iter()
            .collect();
        events.extend(self.change_node(at, |node_state| {
            for (id, verification) in found {
                node_state.set_verification(id, *verification);
            }
        }));
        events
    }

    /// Tenants by mode: how many have it configured, and how many have it verified. A pod counts
    /// once for each of its devices.
    pub fn isolation(&self, limits: DriverLimits) -> TenantsByMode {
        let mut tenants: TenantsByMode = Mode::ALL.into_iter().map(|mode| (mode, (0, 0))).collect();
        for node_entry in self.node_table().iter() {
            let node_state = node_entry.read();
            let details = node_entry.details.lock();
            for device in node_state.devices() {
                for (uid, held) in device.tenants() {
                    let found = details.isolation.of(device, uid, *held, limits);
                    tenants.entry(found.configured).or_default().0 += 1;
                    tenants.entry(found.verified).or_default().1 += 1;
                }
            }
        }
        tenants
    }
}

impl Ledger {
    /// All over-limit pods, node by node in no order.
    pub fn over_limit_pods(&self) -> Vec<OverLimitPod> {
        let node_table = self.node_table();
        let pods = node_table.iter().flat_map(|node_entry| {
            let node_state = node_entry.read();
            node_entry.details.lock().usage_samples.over_limit_pods(&node_state)
        });
        pods.collect()
    }

    /// What is used beyond what is allocated, in the whole cluster.
    pub fn outside(&self) -> UnallocatedUse {
        let mut outside = UnallocatedUse::default();
        for node_entry in self.node_table().iter() {
            let node_state = node_entry.read();
            let details = node_entry.details.lock();
            for over in details.usage_samples.over_limit_pods(&node_state) {
                outside.over_limit_pods += 1;
                outside.excess = sum(outside.excess, over.seen.excess());
            }
            for on in details.usage_samples.devices.values() {
                outside.untracked = sum(outside.untracked, on.untracked);
            }
        }
        outside
    }
}

fn sum(a: MemMib, b: MemMib) -> MemMib {
    a.checked_add(b).unwrap_or(BEYOND)
}

impl Ledger {
    /// The placed pods of which nothing is known from before the start of the process.
    pub fn pods_without_history(&self) -> Vec<PodUid> {
        let mut pods = Vec::new();
        for node_entry in self.node_table().iter() {
            let node_state = node_entry.read();
            let details = node_entry.details.lock();
            let placed = node_state.reservations().iter();
            let placed = placed.filter(|(_, held)| held.state == ReservationState::Confirmed);
            let new = placed
                .map(|(uid, _)| uid)
                .filter(|uid| details.usages.of(uid).is_none_or(|usage| usage.before.is_none()));
            pods.extend(new.cloned());
        }
        pods
    }

    /// Adds what was measured of a pod before the process started to its sketch, once. Returns
    /// whether the pod is still there.
    pub fn recall_use(&self, uid: &PodUid, history: &History) -> bool {
        let Some(at) = self.pods.get(uid).map(|at| *at) else { return false };
        let node_entry = self.node_entry(at);
        let node_state = node_entry.read();
        let Some(held) = node_state.reservation(uid) else { return false };
        if history.stretches.iter().any(Option::is_some) {
            let details = &mut *node_entry.details.lock();
            let usage = details.usages.0.entry(uid.clone());
            // By its history, it is known from the start on.
            let usage = usage.or_insert_with(|| Usage::new(Timestamp::START));
            usage.recall(history, allocated(held));
        }
        true
    }
}

impl Ledger {
    /// Notes what an accepted report of `node` says beside the state. Returns the news: over-limit
    /// pods, untracked memory, pods whose configured isolation was not verified in time.
    pub fn note(
        &self,
        node: &str,
        uses: &[DeviceUse],
        mut report: DetailsReport,
        rules: Rules,
        now: Timestamp,
    ) -> Vec<LedgerEvent> {
        let _stays = self.stay();
        let Some(at) = self.position(node) else { return Vec::new() };
        let node_entry = self.node_entry(at);
        let not_made = report.mig_failures.iter().filter(|failed| failed.removed.is_none());
        let not_made: Vec<_> =
            not_made.map(|failed| (Spot::of_failed(failed), failed.hidden)).collect();
        let held_open = report.mig_failures.iter().filter_map(|failed| failed.removed.clone());
        let held_open: BTreeSet<DeviceId> = held_open.collect();
        let limits = report.limits.take().map(|(_, gpus)| gpus).unwrap_or_default();
        let (mut events, found, started) = node_entry.look(|version, node_state| {
            let mut details = node_entry.details.lock();
            details.prune(version, node_state);
            let events = details.take(node_state, uses, report, rules, now);
            (events, verification(node_state, &details), details.started(node_state))
        });
        events.extend(self.note_starts(at, started, now));
        events.extend(self.set_verification(at, &found));
        if !node_entry.look(|_, node_state| node_state.has_limits(&limits)) {
            events.extend(self.change_node(at, |node_state| node_state.note_limits(limits)));
        }
        if !node_entry.look(|_, node_state| node_state.has_held_open(&held_open)) {
            events.extend(self.change_node(at, |node_state| node_state.note_held_open(&held_open)));
        }
        if !not_made.is_empty() {
            events
                .extend(self.change_node(at, |node_state| node_state.note_failures(not_made, now)));
        }
        events
    }

    /// Notes what a pod says of the containers that are to have its devices.
    pub fn see_containers(
        &self,
        uid: &PodUid,
        wanted: &WantedContainers,
        now: Timestamp,
    ) -> Vec<LedgerEvent> {
        let _stays = self.stay();
        let Some(at) = self.pods.get(uid).map(|at| *at) else { return Vec::new() };
        let node_entry = self.node_entry(at);
        let started = node_entry.look(|_, node_state| {
            let Some(held) = node_state.reservation(uid) else { return Vec::new() };
            let mut details = node_entry.details.lock();
            match details.starts.want(&held.pod.uid, wanted) {
                true => details.started(node_state),
                false => Vec::new(),
            }
        });
        self.note_starts(at, started, now)
    }

    /// Notes which pods have started. A node on which the last ones did not get their GPU takes no more.
    fn note_starts(&self, at: usize, started: Vec<PodStart>, now: Timestamp) -> Vec<LedgerEvent> {
        if started.is_empty() {
            return Vec::new();
        }
        let node_entry = self.node_entry(at);
        let note = |node_state: &mut NodeState| {
            for it in started.iter().filter(|it| it.is_sign) {
                node_state.note_start(&it.pod.uid, it.start, now);
            }
        };
        let mut closes = false;
        let mut events = self.change_node(at, |node_state| {
            let was_doubtful = node_state.intake().is_doubtful();
            note(node_state);
            closes = node_state.intake().is_doubtful() && !was_doubtful;
        });
        let blind = started.into_iter().filter(|it| it.start == Start::Blind);
        events.extend(blind.map(|PodStart { pod, container, .. }| LedgerEvent::Blind {
            pod,
            node: node_entry.name.clone(),
            container,
        }));
        events.extend(closes.then(|| LedgerEvent::BlindNode(node_entry.name.clone())));
        events
    }

    /// How many pods did not get their GPU, and how many nodes take no more for that.
    pub fn blind(&self) -> (usize, usize) {
        let (mut pods, mut nodes) = (0, 0);
        for node_entry in self.node_table().iter() {
            let node_state = node_entry.read();
            nodes += usize::from(node_state.intake().is_doubtful());
            pods += node_entry.details.lock().starts.blind(&node_state).count();
        }
        (pods, nodes)
    }

    /// Whether the pods of a node got their GPU.
    pub fn starts(&self, node: &str) -> Starts {
        let known = self.position(node).map(|at| self.node_entry(at).details.lock().starts.clone());
        known.unwrap_or_default()
    }

    /// Why the agent could not make the MIG instances of a placement, as its last report says.
    pub fn why_not_made(&self, placement: &Placement) -> Option<String> {
        let at = self.position(placement.node.as_str())?;
        let node_entry = self.node_entry(at);
        let held_open = node_entry.look(|_, node_state| {
            let mut placed = placement.devices.iter();
            placed.find_map(|placed| node_state.held_open_at(&placed.id)).cloned()
        });
        let details = node_entry.details.lock();
        let held_open = held_open.and_then(|id| details.why_not_removed(&id));
        held_open
            .or_else(|| details.why_not_made(placement.spots.iter().flatten()).map(str::to_owned))
    }

    /// What is known of a node beside its state; empty for an unknown node.
    pub fn details(&self, node: &str) -> NodeDetails {
        let known = self.position(node).map(|at| self.node_entry(at).details.lock().clone());
        known.unwrap_or_default()
    }
}
