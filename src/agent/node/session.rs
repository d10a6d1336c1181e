//! What to send next to an extender: the pure half of the conversation in [`wire::report::bodies`].
//!
//! There is one [`Session`] for each pair of node and extender. [`NodeAllocations`] merges the answers of
//! all extenders of one node. Neither does I/O or reads a clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::gpu::sample::{Sample, is_draining};
use crate::node::cadence::MEMORY_STEP_MIB;
use wire::api::kind::{ApiVersion, ReportKind};
use wire::report::bodies::{
    Allocation, ContainerReport, DeviceReport, DeviceUse, DriverReport, Outcome, Reply, Report,
};
use wire::units::Timestamp;

/// Pause after the first failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Longest time between two reports that were accepted. A node is silent after three of these.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// Longest pause while an extender is away. Retries of 5,000 nodes are then less than 5,000 a second.
const AWAY_PAUSE_MAX: Duration = Duration::from_secs(2);

/// Pause after a report that was refused: the next one is likely to be refused, too.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// An extender that answers no node for this time after the first failure is lost.
const LOST_AFTER: Duration = Duration::from_secs(2);

/// The answer to a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtenderAnswer {
    Reply(Reply),
    /// It belongs to an older session.
    SessionExpired,
    /// It was refused: sending it again does not help.
    Refused {
        /// The error in the extender's words.
        error: String,
    },
    /// No answer, or a request to try later.
    Away {
        error: String,
    },
}

/// The next step after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    NextSample,
    /// Report the same sample again as a hello.
    NewSession,
    /// Report the newest sample after this time, to which the caller adds a random part.
    Pause(Duration),
}

/// The state of the conversation with one extender about one node.
#[derive(Debug)]
pub struct Session {
    /// Random id of this run of the agent.
    agent: String,
    /// The session issued by the extender.
    number: Option<u64>,
    /// Sequence number of the last report.
    sequence: u64,
    /// The inventory and driver in the last report, until it is answered.
    sent: Option<Owned>,
    /// The inventory and driver that the extender knows.
    known: Option<Owned>,
    /// The use in the last report, until it is answered.
    sent_uses: Vec<DeviceUse>,
    /// The use in the last report, if that was accepted.
    known_uses: Option<Vec<DeviceUse>>,
    /// The containers in the last report, until it is answered.
    sent_containers: Option<Arc<[ContainerReport]>>,
    /// The containers that the extender knows, in this session.
    known_containers: Arc<[ContainerReport]>,
    /// Version of the allocations in the last reply of this session.
    allocations_version: Option<u64>,
    /// Draining pods, by the extender's last word, by UID.
    draining: BTreeSet<String>,
    /// Failures since the last reply.
    failures: u32,
}

/// What a node owns, which a report repeats only after a change.
#[derive(Debug)]
struct Owned {
    inventory: Arc<[DeviceReport]>,
    driver: Option<DriverReport>,
}

impl Owned {
    /// Whether `sample` shows the same.
    fn is_in(&self, sample: &Sample) -> bool {
        let is_same = Arc::ptr_eq(&self.inventory, &sample.inventory);
        (is_same || self.inventory == sample.inventory) && self.driver == sample.driver
    }
}

impl Session {
    /// A conversation that begins with a hello, of an agent that began then, in milliseconds since 1970.
    pub fn new(agent: impl Into<String>, began_unix_millis: u64) -> Self {
        Self {
            agent: agent.into(),
            number: None,
            sequence: began_unix_millis,
            sent: None,
            known: None,
            sent_uses: Vec::new(),
            known_uses: None,
            sent_containers: None,
            known_containers: Arc::default(),
            allocations_version: None,
            draining: BTreeSet::new(),
            failures: 0,
        }
    }

    /// Whether to report `sample`, when the last report was sent `elapsed` ago and the next sample
    /// comes after `period`. A heartbeat comes with the sample that is nearest to its time.
    ///
    /// Each list of processes is reported, since the extender judges pods by them. Between lists a
    /// sample is reported if it shows a change that matters to placement or to people: utilization
    /// does not. While the agent would not see the end of a pod, each sample is reported, since the
    /// reply says that the pod drains. So is each sample of a node whose agent makes MIG instances,
    /// since a pod may wait for the order in the reply, and each after a report that was not accepted.
    pub fn needs(&self, sample: &Sample, elapsed: Duration, period: Duration) -> bool {
        let Some(known_uses) = &self.known_uses else { return true };
        sample.has_lists()
            || sample.has_unwatched_pods
            || sample.containers != self.known_containers
            || awaits_orders(sample)
            || elapsed + period / 2 >= HEARTBEAT
            || !self.known.as_ref().is_some_and(|known| known.is_in(sample))
            || known_uses.len() != sample.uses.len()
            || known_uses.iter().zip(&sample.uses).any(|(known, seen)| has_changed(known, seen))
    }

    /// The report to send about `sample`. It carries the inventory unless the extender has it.
    ///
    /// After the first failure it repeats the last sequence number; a hello does so after each
    /// failure. Of several reports with one number the extender accepts one.
    pub fn report(&mut self, sample: &Sample) -> Report {
        let is_again = self.failures == 1 || (self.failures > 1 && self.number.is_none());
        self.sequence += u64::from(!is_again);
        let is_known = self.known.as_ref().is_some_and(|known| known.is_in(sample));
        let is_sent = self.number.is_some() && is_known;
        self.sent = (!is_sent).then(|| Owned {
            inventory: Arc::clone(&sample.inventory),
            driver: sample.driver.clone(),
        });
        let uses = sample.uses.iter();
        let uses =
            uses.map(|seen| DeviceUse { processes: None, tenants: Vec::new(), ..seen.clone() });
        self.sent_uses = uses.collect();
        let has_news = self.number.is_none() || sample.containers != self.known_containers;
        let containers = Arc::clone(&sample.containers);
        self.sent_containers = has_news.then_some(containers).filter(|all| {
            self.number.is_some() || !all.is_empty() // a hello says nothing of none
        });
        Report {
            api_version: ApiVersion::default(),
            kind: ReportKind::default(),
            agent: self.agent.clone(),
            session: self.number,
            sequence: self.sequence,
            inventory: self.sent.as_ref().map(|owned| owned.inventory.to_vec()),
            driver: self.sent.as_ref().and_then(|owned| owned.driver.clone()),
            allocations_version: self.number.and(self.allocations_version),
            devices: self.uses(sample),
            mig_failures: sample.mig_failures.clone(),
            memory_limits: sample.memory_limits.clone(),
            mig_promises: None,
            clear_outcome: None,
            containers: self.sent_containers.as_ref().map(|all| all.to_vec()),
        }
    }

    /// The use in `sample`. The lists are left out if the sample was taken before a pod was known
    /// to drain, or if news about drains may be lost. The agent did not look for processes of that
    /// pod then, and two such lists would free its room. Between two replies at most one report
    /// with lists is accepted.
    fn uses(&self, sample: &Sample) -> Vec<DeviceUse> {
        let mut uses = sample.uses.clone();
        let may_lack_news = self.number.is_some() && self.failures > 1;
        if may_lack_news || !self.draining.is_subset(&sample.draining) {
            for device in &mut uses {
                device.processes = None;
                device.tenants.clear();
            }
        }
        uses
    }

    /// Whether the orders in this reply count, which answers the newest report: the report was
    /// accepted, in the session that it names. Call it before [`Session::settle`].
    pub fn obeys(&self, reply: &Reply) -> bool {
        let is_same = self.number.is_none_or(|number| number == reply.session);
        reply.outcome == Outcome::Accepted && is_same
    }

    /// Learns the answer, and returns the next step.
    pub fn settle(&mut self, answer: &ExtenderAnswer) -> Next {
        let sent = self.sent.take();
        let sent_uses = std::mem::take(&mut self.sent_uses);
        let sent_containers = self.sent_containers.take();
        self.known_uses = None;
        match answer {
            ExtenderAnswer::Reply(reply) => {
                self.number = Some(reply.session);
                self.allocations_version = reply.allocations_version;
                self.failures = 0;
                self.known_uses = (reply.outcome == Outcome::Accepted).then_some(sent_uses);
                if let Some(allocations) = &reply.allocations {
                    let draining = allocations.iter().filter(|allocation| is_draining(allocation));
                    let uids = draining.map(|allocation| allocation.pod_uid.clone());
                    self.draining = uids.collect();
                }
                if let (Outcome::Accepted, Some(sent)) = (reply.outcome, sent) {
                    self.known = Some(sent);
                }
                if let (Outcome::Accepted, Some(sent)) = (reply.outcome, sent_containers) {
                    self.known_containers = sent;
                }
                Next::NextSample
            }
            ExtenderAnswer::SessionExpired => {
                let was_hello = self.number.take().is_none();
                (self.known, self.known_containers) = (None, Arc::default());
                if !was_hello {
                    return Next::NewSession;
                }
                self.sequence += 1; // one with this number was taken before, then another agent's
                self.back_off()
            }
            ExtenderAnswer::Refused { .. } => {
                // Whatever was wrong, start again: the extender gets everything once more.
                self.number = None;
                (self.known, self.known_containers) = (None, Arc::default());
                Next::Pause(REFUSED_PAUSE)
            }
            ExtenderAnswer::Away { .. } => self.back_off(),
        }
    }

    /// The pause after one more failure.
    fn back_off(&mut self) -> Next {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(8));
        self.failures = self.failures.saturating_add(1);
        Next::Pause(pause.min(AWAY_PAUSE_MAX))
    }
}

/// Whether orders about MIG instances may come with the reply, or one of them failed.
fn awaits_orders(sample: &Sample) -> bool {
    !sample.mig_failures.is_empty()
        || sample.inventory.iter().any(|device| !device.mig_profiles.is_empty())
}

/// Whether a device has changed so that the extender should know within a period. `processes` and
/// `tenants` are not compared, since each list is reported.
fn has_changed(known: &DeviceUse, seen: &DeviceUse) -> bool {
    let has_moved = match (known.used_mib, seen.used_mib) {
        (Some(known), Some(seen)) => known.abs_diff(seen) > MEMORY_STEP_MIB,
        (known, seen) => known != seen,
    };
    has_moved || known.uuid != seen.uuid || condition(known) != condition(seen)
}

/// What of a device's use is news whenever it changes.
fn condition(device: &DeviceUse) -> impl PartialEq {
    (device.healthy, device.fault, device.last_xid, device.fault_event, device.mps)
}

/// Whether an extender answers any node of this process: logged once, not once per node.
#[derive(Debug, Default)]
pub struct Contact {
    /// When it first failed to answer since its last answer.
    failing_since: Option<Timestamp>,
    /// Whether it was found lost since.
    is_lost: bool,
}

/// A change to log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContactChange {
    Lost { error: String },
    Found,
}

impl Contact {
    /// Whether it answers no node since some time.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Learns that `answer` came, or failed to come, at `now`. Returns the change to log.
    pub fn settle(&mut self, answer: &ExtenderAnswer, now: Timestamp) -> Option<ContactChange> {
        match answer {
            ExtenderAnswer::Away { error } => {
                let since = *self.failing_since.get_or_insert(now);
                let is_news = !self.is_lost && now.since(since) >= LOST_AFTER;
                self.is_lost |= is_news;
                is_news.then(|| ContactChange::Lost { error: error.clone() })
            }
            ExtenderAnswer::Reply(_)
            | ExtenderAnswer::SessionExpired
            | ExtenderAnswer::Refused { .. } => {
                self.failing_since = None;
                std::mem::take(&mut self.is_lost).then_some(ContactChange::Found)
            }
        }
    }
}

/// The allocations on one node, as its extenders report them.
#[derive(Debug, Default)]
pub struct NodeAllocations {
    /// One entry per extender that has replied, by the number of its link.
    extenders: BTreeMap<usize, ExtenderAllocations>,
    /// What extenders said last that are forgotten, until another one replies.
    left: Vec<Allocation>,
}

/// The state of one extender.
#[derive(Clone, Debug, Default)]
struct ExtenderAllocations {
    /// Whether its last answer was a reply.
    is_live: bool,
    /// Its last allocations.
    allocations: Vec<Allocation>,
}

impl NodeAllocations {
    /// Learns the allocations of the extender with this link; `None` if they are unchanged. Returns
    /// whether that is news.
    pub fn learn(&mut self, link: usize, allocations: Option<Vec<Allocation>>) -> bool {
        self.left.clear();
        let extender = self.extenders.entry(link).or_default();
        let changed = allocations.filter(|allocations| extender.allocations != *allocations);
        let is_new = !extender.is_live || changed.is_some();
        extender.is_live = true;
        if let Some(allocations) = changed {
            extender.allocations = allocations;
        }
        is_new
    }

    /// Learns that the extender with this link did not reply.
    pub fn lose(&mut self, link: usize) {
        if let Some(extender) = self.extenders.get_mut(&link) {
            extender.is_live = false;
        }
    }

    /// Forgets the extender with this link.
    pub fn forget(&mut self, link: usize) {
        self.lose(link);
        if !self.is_any_live() {
            self.left = self.merged();
        }
        self.extenders.remove(&link);
    }

    /// Whether any extender replies.
    pub(crate) fn is_any_live(&self) -> bool {
        self.extenders.values().any(|extender| extender.is_live)
    }

    /// One allocation per pod, in the furthest state that an extender knows. Only extenders that
    /// reply count. If none does, the last known ones stay, so that pods outlive their extenders.
    pub fn merged(&self) -> Vec<Allocation> {
        let is_any_live = self.is_any_live();
        let counted = self.extenders.values().filter(|extender| extender.is_live || !is_any_live);
        let left = self.left.iter().filter(|_| !is_any_live);
        let mut merged: BTreeMap<&str, &Allocation> = BTreeMap::new();
        for allocation in counted.flat_map(|extender| &extender.allocations).chain(left) {
            let known = merged.entry(&allocation.pod_uid).or_insert(allocation);
            if allocation.state > known.state {
                *known = allocation;
            }
        }
        merged.into_values().cloned().collect()
    }

    /// The draining ones that shorten the pause. Without extenders that reply there are none, since
    /// no extender waits for the end of a process.
    pub fn draining(&self) -> Vec<Allocation> {
        let live = self.extenders.values().filter(|extender| extender.is_live);
        let allocations = live.flat_map(|extender| &extender.allocations);
        allocations.filter(|allocation| is_draining(allocation)).cloned().collect()
    }
}

#[cfg(test)]
mod tests;
