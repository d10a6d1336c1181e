//! Reports of the node agents: sessions, order, and what they change in the ledger.
//!
//! An agent's first report, the hello, has no session and the full inventory; the agent gets a
//! session number, larger than any before. Reports of an older session are refused, so an agent
//! that was replaced cannot report for its node. Sequence numbers grow while an agent runs; a
//! repeated or late report changes nothing. The numbers of the last few agents are kept, since two
//! may report in turn while one replaces the other.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use crate::hardware::device_class::ClassId;
use crate::hardware::inventory::NodeInventory;
use crate::ledger::nodes::changes::Session;
use crate::ledger::nodes::node_entry::NodeEntry;
use crate::ledger::nodes::state::{ClusterModel, Ledger};
use crate::model::event::{LedgerEvent, StateBefore};
use crate::model::node_state::{NodeReporting, NodeState};
use crate::model::reservation::Reservation;
use crate::scoring::guests;
use wire::device::InventoryError;
use wire::ids::{DeviceId, NodeName, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::seen::DeviceUse;
use wire::units::Timestamp;

/// Most device classes of all nodes, some times what large clusters have. More would make each
/// call slow, and a client can report what it likes.
pub const MAX_CLASSES: usize = 512;

/// Classes up to which none is forgotten.
const CLASSES_BEFORE_REUSE: usize = 64;

/// Whether a sequence number began with the time of the start of its agent, in milliseconds since 1970. Those
/// of older versions began with zero.
fn is_dated(sequence: u64) -> bool {
    sequence >= 1_000_000_000_000
}

/// What an agent reports, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeReport {
    /// Identity of the running agent; a new one each time it starts.
    pub agent: String,
    /// The session that it belongs to; `None` for a hello.
    pub session: Option<u64>,
    /// Grows with every report of this agent, from the time of its start on, in milliseconds since 1970.
    pub sequence: u64,
    /// The devices, if they changed; always in a hello.
    pub inventory: Option<NodeInventory>,
    /// Use of the devices.
    pub uses: Vec<DeviceUse>,
    /// The version of the allocations that the agent has.
    pub allocations_version: Option<u64>,
}

/// The result of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The session of the agent's next reports.
    pub session: u64,
    /// Whether it was applied; a repeated or late report is not.
    pub is_taken: bool,
    /// The version of what is allocated on the node.
    pub allocations_version: u64,
    /// What is allocated on the node; `None` if the agent already has this version.
    pub allocations: Option<Vec<Reservation>>,
    /// What the change means for others.
    pub events: Vec<LedgerEvent>,
}

/// Why a report is refused; nothing of it was applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReportRefusal {
    /// The cluster has no such node.
    #[error("node `{node}` does not exist: create the Node object first")]
    UnknownNode {
        /// The name.
        node: String,
    },
    /// The session is not the newest; the agent must send a hello.
    #[error("session `{session}` is not the current session of this node: say hello")]
    OldSession {
        /// The session of the report.
        session: u64,
    },
    /// A hello that may have been sent before one that the ledger has taken, while another agent
    /// reports.
    #[error(
        "report `{sequence}` of this agent came after report `{last}`, and another agent reported \
         since: say hello with a higher number"
    )]
    LateHello {
        /// Its sequence number.
        sequence: u64,
        /// The last one of its agent.
        last: u64,
    },
    /// A hello of an agent that began before the one that reports.
    #[error(
        "this agent began before another one, which reports for this node: stop one of them, or wait until \
         the other has been silent"
    )]
    EarlierAgent {
        /// Its sequence number, which began with the time of its start.
        sequence: u64,
        /// The last one of the other agent.
        last: u64,
    },
    /// A hello without inventory.
    #[error("a hello must carry the inventory")]
    NoInventory,
    /// A device of another node that reports.
    #[error("device `{device}` belongs to node `{owner}`, which is neither deleted nor silent")]
    DeviceOfOtherNode {
        /// The device.
        device: DeviceId,
        /// Its owner.
        owner: NodeName,
    },
    /// A device of a new class, while the cluster has as many classes as the ledger keeps.
    #[error(
        "the nodes of the cluster have devices of `{count}` kinds (by model, memory and MIG \
         profile), and no more than {MAX_CLASSES} are kept: correct the reports of other nodes"
    )]
    TooManyClasses {
        /// How many there would be.
        count: usize,
    },
    /// An inventory that cannot be true.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
}

impl ReportRefusal {
    fn unknown(node: &str) -> Self {
        Self::UnknownNode { node: node.to_owned() }
    }

    /// Short name for the log; a closed set.
    pub fn label(&self) -> &'static str {
        match self {
            Self::UnknownNode { .. } => "unknown_node",
            Self::OldSession { .. } => "old_session",
            Self::LateHello { .. } => "late_hello",
            Self::EarlierAgent { .. } => "earlier_agent",
            Self::NoInventory => "no_inventory",
            Self::DeviceOfOtherNode { .. } => "device_of_other_node",
            Self::TooManyClasses { .. } => "too_many_classes",
            Self::Inventory(_) => "inventory",
        }
    }
}

/// The session that a report goes on with; `None` if it begins a new one. Repeated is one of the same agent,
/// fresh a session whose last report is not old.
fn checked_session(
    session: &Session,
    report: &NodeReport,
    is_repeated: bool,
    is_fresh: bool,
) -> Result<Option<u64>, ReportRefusal> {
    let is_known_agent = session.agent == report.agent && session.id.is_some();
    let last_of_earlier =
        if is_known_agent { None } else { session.last_of_earlier(&report.agent) };
    let (sequence, last) = (report.sequence, session.sequence);
    // Else the late hello of an agent that has ended would bring its inventory back.
    let are_dated = is_dated(sequence) && is_dated(last);
    let is_of_earlier = !is_known_agent && is_fresh && are_dated && sequence < last;
    match (report.session, session.id) {
        (Some(spoken), Some(id)) if spoken == id && is_known_agent => Ok(Some(id)),
        (Some(_), Some(id)) if mutated(Mutation::OldSessionTaken) => Ok(Some(id)),
        (Some(spoken), _) => Err(ReportRefusal::OldSession { session: spoken }),
        (None, Some(id)) if is_repeated => Ok(Some(id)),
        (None, _) if last_of_earlier.is_some_and(|last| sequence <= last) => {
            Err(ReportRefusal::LateHello { sequence, last: last_of_earlier.unwrap_or_default() })
        }
        (None, Some(_)) if is_of_earlier => Err(ReportRefusal::EarlierAgent { sequence, last }),
        (None, _) if report.inventory.is_none() => Err(ReportRefusal::NoInventory),
        (None, _) => Ok(None),
    }
}

/// What is to be said of the MIG instances of an inventory: those that cannot be, and those of which NVML and
/// the table say different things, unless they were there `before`.
fn about_instances(
    node: &NodeName,
    inventory: &NodeInventory,
    before: &[DeviceId],
) -> Vec<LedgerEvent> {
    let impossible = inventory.faults().iter().map(|(device, fault)| LedgerEvent::Impossible {
        node: node.clone(),
        device: device.clone(),
        fault: fault.clone(),
    });
    let new = inventory.not_in_table().filter(|(id, _)| !before.contains(id));
    let not_in_table = new.map(|(_, spot)| LedgerEvent::NotInTable { node: node.clone(), spot });
    impossible.chain(not_in_table).collect()
}

/// The GPUs of a new inventory whose lists give no geometry, unless the `node` knows that.
fn without_geometry(node: &NodeState, inventory: &NodeInventory) -> Vec<LedgerEvent> {
    if !node.rule().mig.makes() {
        return Vec::new();
    }
    let faults = inventory.mig().listed.iter();
    let faults = faults.filter_map(|(device, geometry)| Some((device, geometry.as_ref().err()?)));
    let new = faults.filter(|(device, fault)| node.mig().list_fault(device) != Some(*fault));
    let events = new.map(|(device, fault)| LedgerEvent::NoGeometry {
        node: node.name().clone(),
        device: device.clone(),
        fault: fault.clone(),
    });
    events.collect()
}

impl Ledger {
    /// Applies a report of `node`'s agent, received at `now` on the extender's clock.
    ///
    /// # Errors
    /// [`ReportRefusal`]; nothing has changed then.
    pub fn report(
        &self,
        node: &str,
        report: &NodeReport,
        now: Timestamp,
    ) -> Result<Receipt, ReportRefusal> {
        let _stays = self.stay();
        let at = self.position(node).ok_or_else(|| ReportRefusal::unknown(node))?;
        let node_entry = self.node_entry(at);
        let mut session = node_entry.session.lock();
        let last_report = {
            let node_state = node_entry.read();
            if node_state.is_forgettable() {
                return Err(ReportRefusal::unknown(node));
            }
            node_state.last_report()
        };
        let is_known_agent = session.agent == report.agent && session.id.is_some();
        let is_repeated = is_known_agent
            && report.sequence <= session.sequence
            && !mutated(Mutation::RepeatedReportTaken);
        let is_fresh = last_report.is_some_and(|at| now.since(at) <= self.settings.stale_after);
        let current = match checked_session(&session, report, is_repeated, is_fresh)? {
            Some(current) => current,
            None => self.next_session.fetch_add(1, Ordering::AcqRel),
        };
        let mut events = Vec::new();
        if !is_repeated {
            if let Some(inventory) = &report.inventory {
                events.extend(self.take_inventory(at, inventory)?);
                node_entry.look(|_, node_state| self.teams.see_all(node_state));
            }
            let (freed, reported) = node_entry.change_if(|node_state| {
                let before = StateBefore::of(node_state);
                if !is_known_agent {
                    node_state.forget_clean_reports();
                    node_state.note_new_agent(&report.uses);
                }
                let freed: Vec<PodUid> = node_state.observe(&report.uses, now);
                let is_any_called = !guests::recall_stranded(node_state).is_empty();
                // Nearly every report changes nothing; then kept answers about the node stay.
                let is_same = freed.is_empty() && !is_any_called && before.is_that_of(node_state);
                let is_news = !is_same;
                let reported = if is_news { before.events(node_state) } else { Vec::new() };
                ((freed, reported), is_news)
            });
            events.extend(reported);
            if !is_known_agent {
                session.replace_agent(&report.agent);
            }
            (session.id, session.sequence) = (Some(current), report.sequence);
            drop(session);
            if !freed.is_empty() {
                self.drop_index(at, &freed);
            }
        }
        let known = report.allocations_version.filter(|_| report.session.is_some());
        let (allocations_version, allocations) = node_entry.look(|version, node_state| {
            let is_news = known != Some(version);
            (version, is_news.then(|| node_state.reservations().values().cloned().collect()))
        });
        let is_taken = !is_repeated;
        Ok(Receipt { session: current, is_taken, allocations_version, allocations, events })
    }

    /// Gives new pods nothing of the devices of a node, or of all nodes, until its next report: a pod
    /// may have run there that this ledger never had, and its processes may not have ended.
    pub fn wait_for_reports(&self, node: Option<&str>) {
        if mutated(Mutation::UnseenRunForgotten) {
            return;
        }
        let _stays = self.stay();
        let present: Vec<usize> = match node {
            Some(name) => self.position(name).into_iter().collect(),
            None => self.node_table().present().collect(),
        };
        for at in present {
            self.node_entry(at).change(|node_state| node_state.wait_for_use(&[]));
        }
    }

    /// Replaces a node's inventory. A device moves here from another node only if that one is
    /// deleted or silent.
    fn take_inventory(
        &self,
        at: usize,
        inventory: &NodeInventory,
    ) -> Result<Vec<LedgerEvent>, ReportRefusal> {
        let mut cluster = self.cluster_mut(); // one inventory at a time: two nodes may name one device
        let mut moved = Vec::new();
        for device in inventory.devices() {
            let owner = self.owners.get(&device.id).map(|owner| *owner);
            let Some(owner) = owner.filter(|owner| *owner != at) else { continue };
            let node_entry = self.node_entry(owner);
            let node_state = node_entry.read();
            let is_taken = matches!(node_state.state(), NodeReporting::Reporting);
            if is_taken && !mutated(Mutation::DeviceOfOtherNodeTaken) {
                let owner = node_state.name().clone();
                return Err(ReportRefusal::DeviceOfOtherNode { device: device.id.clone(), owner });
            }
            moved.push((owner, device.id.clone()));
        }
        let node_entry = self.node_entry(at);
        self.make_room_for_classes(&mut cluster, &node_entry, inventory)?;
        for (owner, device) in moved {
            self.node_entry(owner).change(|node_state| node_state.lose_device(&device));
        }
        let (before, no_geometry) = {
            let node_state = node_entry.read();
            let devices = node_state.devices().iter();
            let before: Vec<DeviceId> = devices.map(|device| device.device().id.clone()).collect();
            (before, without_geometry(&node_state, inventory))
        };
        for gone in before.iter().filter(|id| !inventory.devices().iter().any(|d| d.id == **id)) {
            self.owners.remove_if(gone, |_, owner| *owner == at);
        }
        for device in inventory.devices() {
            self.owners.insert(device.id.clone(), at);
        }
        let mut events = about_instances(&node_entry.name, inventory, &before);
        events.extend(no_geometry);
        self.are_shapes_old.store(true, Ordering::Release);
        // Also before the first inventory: the UUIDs that are written may be of before a boot.
        let earlier = node_entry.look(|_, node_state| {
            let mut held = node_state.reservations().values();
            let is_made = held.any(|held| !held.placement.spots.is_empty());
            is_made.then(|| node_state.reservations().clone())
        });
        cluster.change_classes(|classes| {
            events.extend(self.change_node(at, |node_state| {
                node_state.replace_inventory(inventory, classes);
                node_state.wait_for_use(&before);
                guests::recall_excess(node_state);
            }));
        });
        if let Some(earlier) = earlier {
            let (again, lost) = node_entry.look(|_, node_state| {
                (node_state.made_again(&earlier), node_state.lost_instances(&earlier))
            });
            events.extend(again.into_iter().map(|pod| LedgerEvent::MadeAgain { pod }));
            let node = &node_entry.name;
            let lost = lost.into_iter();
            events.extend(lost.map(|(pod, device)| LedgerEvent::InstanceLost {
                pod,
                node: node.clone(),
                device,
            }));
        }
        Ok(events)
    }

    /// Forgets classes that no device has any more, if the inventory brings new ones: compiling
    /// requests and the mix takes time for each class. The devices that it replaces do not count.
    fn make_room_for_classes(
        &self,
        cluster: &mut ClusterModel,
        node_entry: &NodeEntry,
        inventory: &NodeInventory,
    ) -> Result<(), ReportRefusal> {
        let rule = node_entry.read().rule();
        let makeable = inventory.makeable(rule);
        let devices = inventory.devices().iter().chain(&makeable);
        let classes = devices.map(|device| inventory.mig().class_of(device, rule));
        let (known, new): (BTreeSet<_>, BTreeSet<_>) = classes
            .collect::<BTreeSet<_>>()
            .into_iter()
            .map(|class| (cluster.classes.known(&class), class))
            .partition(|(id, _)| id.is_some());
        if new.is_empty() || cluster.classes.kept() + new.len() <= CLASSES_BEFORE_REUSE {
            return Ok(());
        }
        let mut used: BTreeSet<ClassId> = known.into_iter().filter_map(|(id, _)| id).collect();
        used.extend(cluster.node_shapes().shapes().map(|(shape, _)| shape.class));
        for other in self.node_table().iter().filter(|other| other.name != node_entry.name) {
            used.extend(other.read().classes());
        }
        let count = used.len() + new.len();
        if count > MAX_CLASSES || !cluster.classes.can_name(new.len()) {
            return Err(ReportRefusal::TooManyClasses { count });
        }
        cluster.classes.keep_only(&used);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
