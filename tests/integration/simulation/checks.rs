//! The promises, checked after each event and at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use engine::ledger::query::own_room::OwnRoom;
use engine::ledger::query::reading::Readiness;
use engine::ledger::query::team_limit::PodInNamespace;
use engine::model::reservation::{Departure, Placement, Reservation, ReservationState};
use kube_api::request::placement::{FENCE, FenceWriter};
use wire::ids::{NodeName, PodUid};
use wire::units::MemMib;

use super::api::{Pod, Take};
use super::faults::Fault;
use super::nodes::Node;
use super::replica::Replica;
use super::requests::REQUEST_LOST;
use super::scheduler::Scheduler;
use super::{GPU_MIB, QUIET_FOR, World};

/// Room that appears must be used within this time.
const USED_WITHIN: u64 = 2_000;

/// And without faults within this time, whatever kube-scheduler does: its longest back-off is 10 s.
/// Standing holds end at any time, so room may appear shortly before the end.
const TRIED_WITHIN: u64 = 12_500;

/// Events between two comparisons of a ledger, if nothing has changed at the API server.
const COMPARE_EVERY: u64 = 8;

/// Events between two audits of the ledger.
const AUDIT_EVERY: u64 = 50;

/// A fence at the start may miss what was bound in the last milliseconds, this many.
const MEANWHILE: u64 = 20;

/// A hold may stay this long after its time: a tick, and the time to the next event.
const HELD_BEYOND: u64 = 2_500;

/// How long a hold lasts: `hold_seconds`.
const HELD_FOR: u64 = 10_000;

/// How long a bind waits for guests at most, with the default timeouts.
const BINDS_FOR: Duration = Duration::from_secs(5);

/// Devices of an ended pod are free after two reports, in seconds.
const DRAINED_WITHIN: u64 = 15;

/// Guests that are called home are there after this time, without faults: the restart of a container,
/// what is left of the last one, and two reports, some of which are lost.
const LEFT_WITHIN: u64 = 25_000;

/// How long agents obey a term after its last reply.
const TERM_COUNTS_FOR: u64 = 30_000;

/// After this time room is held for a pod as if it had not been before.
const HELD_ANEW: u64 = 300_000;

impl World {
    pub(super) fn check(&mut self) -> Result<(), String> {
        if let Some(broken) = self.broken.take() {
            return Err(broken);
        }
        let (length, now) = (self.api.log.len(), self.now);
        let is_news = std::mem::replace(&mut self.checked, length) != length;
        let is_turn = self.events.is_multiple_of(COMPARE_EVERY);
        if is_news || is_turn {
            self.check_devices()?;
            self.note_groups();
            self.check_leaving()?;
            if self.settings.has_mig {
                self.check_units()?;
            }
            if self.settings.has_teams {
                self.check_limits()?;
                self.note_over_quota();
            }
        }
        for replica in self.replicas.iter().flatten().chain(&self.overlapping) {
            let is_caught_up = replica.is_listed && replica.seen == length && !replica.is_list_due;
            if is_caught_up && (replica.checked != length || is_turn) {
                self.check_ledger(replica)?;
            }
        }
        self.check_first_answer()?;
        self.check_open()?;
        let is_audited = self.events.is_multiple_of(AUDIT_EVERY);
        for replica in self.replicas.iter_mut().flatten().chain(&mut self.overlapping) {
            replica.checked = replica.seen;
            if is_turn {
                check_holds(replica, now)?;
            }
            if is_audited {
                replica.app.ledger.audit().map_err(|faults| format!("{faults:?}"))?;
                if replica.has_failed() {
                    return Err("a loop of the control core panicked".to_owned());
                }
            }
        }
        if is_turn && self.settings.lends_memory {
            self.check_lent()?;
        }
        if is_turn && self.settings.has_mig {
            self.note_idle();
        }
        if is_turn { self.check_standing() } else { Ok(()) }
    }

    /// Before a process answers the first call, it knows each pod that is bound, also those that were
    /// bound during its start.
    fn check_first_answer(&mut self) -> Result<(), String> {
        let at = self.serving();
        let Some(replica) = self.replicas[at].as_mut().filter(|it| !it.was_ready) else {
            return Ok(());
        };
        // One that was frozen may not know yet that another one leads; it binds nothing.
        let is_answering =
            replica.app.lead.leading.is_here() && replica.may_write() && !replica.is_frozen;
        if !is_answering || replica.app.readiness() != Readiness::Ready {
            return Ok(());
        }
        replica.was_ready = true;
        for (uid, pod) in self.api.pods.iter().filter(|(_, pod)| pod.is_placed()) {
            let is_known = || replica.app.ledger.reservation(&PodUid::new(uid.as_str())).is_some();
            if !pod.takes.is_empty() && pod.bound + MEANWHILE < self.now && !is_known() {
                let (node, bound) = (&pod.node, pod.bound);
                return Err(format!("ready without {uid}, bound to {node:?} at {bound} ms"));
            }
        }
        let replica = self.replicas[at].as_ref();
        replica.map_or(Ok(()), |replica| self.check_unseen(replica))
    }

    /// Then nothing is free of a device where a pod still runs that the process never knew, before a
    /// report says what runs there.
    fn check_unseen(&self, replica: &Replica) -> Result<(), String> {
        let led = replica.started + replica.app.lead.since().millis();
        let heard = |node: &str| {
            let at = self.nodes.iter().position(|it| it.name == node);
            at.and_then(|at| replica.heard.get(&at)).copied().unwrap_or_default()
        };
        for (uid, process) in self.processes.iter().filter(|(_, process)| process.bound < led) {
            let is_held = replica.app.ledger.reservation(&PodUid::new(uid.as_str())).is_some();
            let Some(node) = replica.app.ledger.node(&process.node).filter(|_| !is_held) else {
                continue;
            };
            let free = node.devices().iter().filter(|it| it.free().memory > MemMib::ZERO);
            let mut free = free.map(|device| device.device().id.as_str().to_owned());
            let is_unseen = |id: &String| {
                let is_shown = replica.shown.contains_key(&(uid.clone(), id.clone()));
                // Also one of before says what is used, if it was sent while the pod ran. It may lack the
                // list of processes, as may one that comes later.
                let is_read = replica.sampled.get(id).is_some_and(|at| process.started <= *at);
                process.uses(id) && !is_shown && !is_read && heard(&process.node) < led
            };
            if let Some(id) = free.find(is_unseen) {
                return Err(format!(
                    "{id} is free for process {}, and {uid} runs there unseen",
                    replica.life
                ));
            }
        }
        Ok(())
    }

    /// No device has more allocated than it has, and no processes use more than it has.
    fn check_devices(&self) -> Result<(), String> {
        let mut taken: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for pod in self.api.pods.values().filter(|pod| pod.is_placed()) {
            for (device, mib, share) in &pod.takes {
                let sum = taken.entry(device).or_default();
                *sum = (sum.0 + mib, sum.1 + share);
            }
        }
        let guests: Vec<Take> = self.guests().collect();
        for (device, mib, share) in &guests {
            let sum = taken.entry(device).or_default();
            *sum = (sum.0 + mib, sum.1 + share);
        }
        taken.retain(|id, _| !self.claimed.contains(*id));
        let has = |id: &str| self.reported.get(id).copied().unwrap_or(GPU_MIB);
        let is_over =
            |(id, (mib, share)): &(&&str, &(u64, u64))| *mib > has(id) || *share > 1_000_000;
        if let Some((device, sum)) = taken.iter().find(is_over) {
            return Err(format!("{device} is allocated above its capacity: {sum:?}"));
        }
        let mut used: BTreeMap<&str, u64> = BTreeMap::new();
        for (uid, process) in &self.processes {
            let lives = self.api.pods.get(uid).is_some_and(Pod::is_placed);
            for (id, mib) in process.may_use(self.now, lives) {
                *used.entry(id).or_default() += mib;
            }
        }
        // The reports of an agent that lies are refused: what runs on its node is not known.
        let has_lied = |id: &str| {
            self.nodes.iter().any(|it| it.lies_until > 0 && it.gpu_ids().any(|known| known == id))
        };
        used.retain(|id, mib| {
            let is_excused = self.excused.contains(*id) || self.claimed.contains(*id);
            *mib > has(id) && !is_excused && !has_lied(id)
        });
        match used.first_key_value() {
            Some((id, mib)) => Err(format!("processes use {mib} MiB of {id}")),
            None => Ok(()),
        }
    }

    /// Guests that are called home get there, if no fault prevents it.
    fn check_leaving(&mut self) -> Result<(), String> {
        let Some(replica) = self.replicas[self.serving()].as_ref() else { return Ok(()) };
        let mut leaving = BTreeMap::new();
        replica.app.ledger.look_at_each(|node| {
            let held = node.reservations().iter().filter(|(_, held)| held.is_going_home());
            // Of a pod that was deleted no container starts again, and its program may take its time. Nor does one on a
            // MIG instance whose GPU is gone.
            let lives = |uid: &PodUid| {
                let pod = self.api.pods.get(uid.as_str());
                pod.is_some_and(|pod| !pod.is_deleting && !pod.is_terminal && !self.is_lost(pod))
            };
            for (uid, _) in held.filter(|(uid, _)| lives(uid)) {
                let since = self.leaving_since.get(uid).copied().unwrap_or(self.now);
                leaving.insert(uid.clone(), since);
            }
        });
        self.leaving_since = leaving;
        // The last request that is lost may be one of those that call it home.
        let begin = (self.settings.faults_for + REQUEST_LOST).min(self.disturbed_until);
        let is_late = |since: u64| self.now > since.max(begin) + LEFT_WITHIN;
        match self.leaving_since.iter().find(|(_, since)| is_late(**since)) {
            Some((uid, since)) => Err(format!("since {since} ms {uid} is on its way home")),
            None => Ok(()),
        }
    }

    /// What pods take of devices where they are guests, by their annotations.
    fn guests(&self) -> impl Iterator<Item = Take> {
        let placed = self.api.pods.values().filter(|pod| pod.is_placed() && pod.is_guest());
        placed.flat_map(Pod::written)
    }

    /// With everything seen, the ledger is what the API server says: each bound pod is allocated
    /// where it is bound, and nothing else is, but what is being bound or drained.
    fn check_ledger(&self, replica: &Replica) -> Result<(), String> {
        let is_serving = self.overlapping.as_ref().is_none_or(|it| it.life != replica.life);
        let ledger = &replica.app.ledger;
        for (uid, pod) in &self.api.pods {
            if !pod.is_placed() || pod.takes.is_empty() {
                continue;
            }
            let held = ledger.reservation(&PodUid::new(uid.as_str()));
            let is_right = held.as_ref().is_some_and(|held| {
                let is_there = Some(held.placement.node.as_str()) == pod.node.as_deref();
                // A guest that cannot be moved is soon written as one that is at home.
                let is_settled = pod.is_guest() && held_takes(held) == pod.written();
                // The watch may show that before the answer to the write comes. Both are allocated until then.
                let is_settling = held.departure == Departure::Settling
                    && takes_of(&held.settled_placement()) == pod.takes;
                let is_on_places = !pod.places().is_empty() && places_of(held) == pod.home_places();
                let is_right =
                    held_takes(held) == pod.takes || is_settled || is_settling || is_on_places;
                is_there && (!is_serving || is_right)
            });
            if !is_right {
                let (node, takes) = (&pod.node, &pod.takes);
                return Err(format!(
                    "{uid} is bound to {node:?} with {takes:?}, and held is {held:?}"
                ));
            }
        }
        let mut broken = None;
        ledger.look_at_each(|node| {
            for (uid, held) in node.reservations() {
                let pod = self.api.pods.get(uid.as_str());
                let is_right = match held.state {
                    ReservationState::Assumed { .. } => pod.is_some_and(|pod| pod.node.is_none()),
                    ReservationState::Confirmed => pod.is_some_and(Pod::is_placed),
                    ReservationState::Draining { .. } => pod.is_none_or(|pod| pod.is_terminal),
                };
                if !is_right {
                    let pod = pod.map(|pod| (&pod.node, pod.is_terminal));
                    broken = Some(format!("{uid} is {pod:?}, and held is {held:?}"));
                }
            }
        });
        broken.map_or(Ok(()), Err)
    }

    /// The faults are over: nothing is undecided, and nothing waits that fits.
    pub(super) fn check_end(&self) -> Result<(), String> {
        let Some(replica) = &self.replicas[self.serving()] else {
            return Err("no extender at the end".to_owned());
        };
        if replica.app.readiness() != Readiness::Ready {
            return Err(format!("not ready at the end: {:?}", replica.app.readiness()));
        }
        self.check_replicas()?;
        // What was evicted may end with the last event.
        if replica.seen == self.api.log.len() {
            self.check_ledger(replica)?;
        }
        let now = replica.app.clock.now();
        for node in replica.app.ledger.nodes() {
            // A bind may wait for guests, or for memory, at any time.
            let is_being_left = self.settings.lends_memory
                || self.settings.has_mig
                || node.reservations().values().any(Reservation::is_going_home);
            let is_left = |held: &&Reservation| match held.state {
                ReservationState::Confirmed => false,
                // A pod may be evicted for a more important one at any time.
                ReservationState::Draining { since, .. } => {
                    let has_lasted = now.since(since) >= Duration::from_secs(DRAINED_WITHIN);
                    has_lasted && !self.hangs(held.pod.uid.as_str())
                }
                ReservationState::Assumed { since } => {
                    !(is_being_left && now.since(since) < BINDS_FOR)
                }
            };
            if let Some(left) = node.reservations().values().find(is_left) {
                return Err(format!("undecided at the end: {left:?}"));
            }
            // A bind that ended because guests had not left is tried again by kube-scheduler, seconds later.
            let is_tried_again = |uid: &PodUid| {
                let ended = self.recalled_for.get(uid.as_str());
                ended.is_some_and(|ended| self.now < ended + HELD_FOR + HELD_BEYOND)
            };
            let is_tried = |uid: &PodUid| self.schedulers.iter().any(|it| it.tries(uid.as_str()));
            let is_idle = |uid: &&PodUid| !is_tried_again(uid) && !is_tried(uid);
            if let Some(uid) = node.holds().keys().find(is_idle) {
                return Err(format!("room is still held for {uid} at the end"));
            }
        }
        self.check_mig_end().and_then(|()| self.check_works_end(replica))?;
        self.check_uuids(replica)?;
        // A MIG instance is its pod's as a whole, whatever amounts are written.
        let edited = |pod: &&Pod| {
            let (written, takes) = (pod.allocated(), &pod.takes);
            let is_same = match pod.places().is_empty() {
                true => written == *takes,
                false => ids_of(&written) == ids_of(takes),
            };
            // Of a later process nothing shows within the run that it is gone.
            pod.is_placed() && !is_same && !is_later(replica, pod)
        };
        if let Some(pod) = self.api.pods.values().find(edited) {
            return Err(format!("an edit is left at the end: {:?}", pod.annotations));
        }
        let is_late = |uid: &PodUid| {
            let waited = self.waited_for_memory(uid.as_str()).unwrap_or_default();
            let waited = waited.max(self.obeyed_from());
            let since = self.fits_since.get(uid).map(|since| waited.max(*since));
            // A slow driver makes instances one after another, and guests may leave slowly: binds fail meanwhile, and
            // are tried again later.
            let tries = |it: &Scheduler| it.tries_or_backs_off(uid.as_str(), self.now);
            let is_tried = self.schedulers.iter().any(tries);
            let recalled = self.recalled_for.get(uid.as_str());
            let is_recalled = recalled.is_some_and(|ended| self.now - ended < TRIED_WITHIN);
            let is_excused = is_tried && (self.settings.has_mig || is_recalled);
            since.is_some_and(|since| self.now - since > TRIED_WITHIN) && !is_excused
        };
        match self.waiting_that_fit(replica).find(|(uid, _)| is_late(uid)) {
            Some((uid, node)) => Err(format!(
                "since {} ms {}",
                self.fits_since[&uid],
                self.waits_and_fits(&uid, node)
            )),
            None => Ok(()),
        }
    }

    /// When agents obey orders about MIG instances at the latest. A single process takes its term from the clock, and
    /// may start with an older one when that was set back: agents obey the newer one for a while.
    fn obeyed_from(&self) -> u64 {
        let is_alone = self.settings.replicas == 1 && self.has(Fault::ClockStep);
        if self.settings.has_mig && is_alone {
            self.settings.faults_for + TERM_COUNTS_FOR
        } else {
            0
        }
    }

    /// At the end the ledger has the devices that are written on the pods, MIG instances that were made again
    /// included.
    fn check_uuids(&self, replica: &Replica) -> Result<(), String> {
        let ledger = &replica.app.ledger;
        let differs = |(uid, pod): &(&String, &Pod)| {
            let held = ledger.reservation(&PodUid::new(uid.as_str()));
            let is_seen = replica.seen == self.api.log.len() && pod.is_placed();
            let is_late = pod.bound + DRAINED_WITHIN * 1_000 < self.now;
            let is_late = is_late && !self.is_lost(pod) && !is_later(replica, pod);
            let has_others = |held: &[Take]| match pod.places().is_empty() {
                true => *held != *pod.takes,
                false => ids_of(held) != ids_of(&pod.takes),
            };
            is_seen && is_late && held.is_some_and(|held| has_others(&held_takes(&held)))
        };
        if let Some((uid, pod)) = self.api.pods.iter().find(differs) {
            let held = ledger.reservation(&PodUid::new(uid.as_str()));
            return Err(format!("{uid} has {:?}, and held at the end is {held:?}", pod.takes));
        }
        Ok(())
    }

    /// The pods that wait and fit on a node that kube-scheduler would choose, each with that node.
    fn waiting_that_fit(&self, replica: &Replica) -> impl Iterator<Item = (PodUid, &Node)> {
        let waiting = self.api.pods.iter().filter(|(_, pod)| pod.node.is_none());
        waiting.filter_map(|(uid, pod)| {
            let uid = PodUid::new(uid.as_str());
            let node = self.node_for(replica, &uid, pod)?;
            Some((uid, node))
        })
    }

    fn waits_and_fits(&self, uid: &PodUid, node: &Node) -> String {
        let summary: Vec<_> = self.schedulers.iter().map(|it| it.summary()).collect();
        format!("{uid} waits and fits on {}: {summary:#?}", node.name)
    }

    /// A node that kube-scheduler would choose for a pod without one, and where it fits.
    fn node_for(&self, replica: &Replica, uid: &PodUid, pod: &Pod) -> Option<&Node> {
        let is_hidden = self.tried_until.get(uid.as_str()).is_some_and(|until| self.now < *until);
        if pod.is_deleting || is_hidden || is_later(replica, pod) {
            return None;
        }
        if !replica.app.pods.is_shown_waiting(uid) {
            return None;
        }
        let has_own_room = replica.app.room.preemptors.is_asked(uid) || pod.has_group();
        if has_own_room && !self.is_room_free(replica, uid, pod) {
            return None; // pods have been asked to go for it, or its group waits: it goes nowhere else
        }
        let seen = &self.api.change(pod).seen;
        let query = replica.app.query(seen);
        let ledger = &replica.app.ledger;
        let gpu = query.as_ref().and_then(|query| query.gpu.as_ref());
        if !gpu.is_none_or(|gpu| ledger.teams.may_have(uid, pod.of.team, gpu)) {
            return None;
        }
        let above = replica.app.room.preemptors.nodes_above(seen.scheduling.priority);
        let above: BTreeSet<&str> = above.iter().map(NodeName::as_str).collect();
        let fitting = query.as_ref().map(|query| {
            let mut fitting = ledger.fitting(query, &OwnRoom::default());
            let nodes: Vec<String> = fitting.iter().map(|(node, _)| node.to_string()).collect();
            let mut answers = ledger.answers(query, &nodes);
            let named = PodInNamespace { uid, namespace: pod.of.team };
            ledger.limit_to_team(named, query, &nodes, &mut answers);
            let mut answers = answers.iter();
            fitting.retain(|_| answers.next().is_some_and(Result::is_ok));
            fitting
        });
        let kept = query.and_then(|query| ledger.fits_in_room_of(uid, &query, None));
        let is_kept = |node: &Node| kept.as_ref().is_some_and(|it| it.as_str() == node.name);
        let fits = |node: &&Node| match &fitting {
            Some(_) if pod.has_group() => is_kept(node), // and nowhere else
            Some(fitting) => {
                fitting.iter().any(|(name, _)| name.as_str() == node.name) || is_kept(node)
            }
            // No GPU: only what is kept of a host may be in its way.
            None => {
                !(above.contains(node.name.as_str())
                    && ledger.takes_kept_host(&node.name, seen.host))
            }
        };
        let suits =
            |node: &&Node| node.suits(pod) && Node::has_cpus(self.cpus_taken(&node.name), pod);
        self.nodes.iter().filter(suits).find(fits)
    }

    /// Whether all of the room that is kept for a pod is free, and those that made way are gone: until
    /// then they have CPU and host memory of the node.
    fn is_room_free(&self, replica: &Replica, uid: &PodUid, pod: &Pod) -> bool {
        let victims = replica.app.room.preemptors.victims(uid);
        if victims.iter().any(|victim| replica.app.ledger.has_pod(victim)) {
            return false;
        }
        let query = replica.app.query(&self.api.change(pod).seen);
        query.is_some_and(|it| replica.app.ledger.fits_in_room_of(uid, &it, None).is_some())
    }

    /// Room is offered to a pod that can use it. kube-scheduler's back-off counts as trying. While a
    /// fault has its effects nothing is promised.
    pub(super) fn check_room_is_used(&mut self) -> Result<(), String> {
        if self.now < self.looks_again {
            return Ok(());
        }
        self.looks_again = self.now + 250;
        if self.now >= self.settings.faults_for {
            let replica = self.replicas[self.serving()].as_ref();
            let fitting = replica.into_iter().flat_map(|replica| self.waiting_that_fit(replica));
            // Of each pod: when one gets the room kept for it, that of another may become free.
            let since = |uid: &PodUid| self.fits_since.get(uid).copied().unwrap_or(self.now);
            self.fits_since = fitting.map(|(uid, _)| (uid.clone(), since(&uid))).collect();
        }
        let is_disturbed = self.now < self.disturbed_until;
        let replica = self.replicas[self.serving()].as_ref();
        let is_idle = self.schedulers.iter().all(|scheduler| scheduler.is_idle());
        let replica = replica.filter(|replica| {
            let is_ready = replica.app.lead.leading.is_here()
                && !replica.is_frozen
                && replica.app.readiness() == Readiness::Ready;
            is_ready && is_idle && !is_disturbed
        });
        let Some((uid, node)) = replica.and_then(|replica| self.waiting_that_fit(replica).next())
        else {
            self.unused_since = None;
            return Ok(());
        };
        let since = self.unused_since.unwrap_or(self.now);
        if self.now - since > USED_WITHIN {
            let found = self.waits_and_fits(&uid, node);
            return Err(format!("for {} ms nothing was tried, but {found}", self.now - since));
        }
        self.unused_since = Some(since);
        Ok(())
    }

    /// When nothing is left to happen.
    pub(super) fn ends(&self) -> u64 {
        self.settings.faults_for + QUIET_FOR
    }
}

/// Whether another process, whose clock is ahead, wrote the pod last: it is left alone for 300 s.
pub(super) fn is_later(replica: &Replica, pod: &Pod) -> bool {
    let written = pod.annotations.get(FENCE).map(|text| FenceWriter::of(text));
    written > replica.maker() && written.is_some()
}

fn ids_of(takes: &[Take]) -> Vec<&str> {
    takes.iter().map(|(id, ..)| &**id).collect()
}

/// Where the MIG instances of a pod lie.
fn places_of(held: &Reservation) -> Vec<(String, String, u32)> {
    let spots = held.placement.spots.iter().flatten();
    spots.map(|it| (it.gpu.to_string(), it.profile.to_string(), it.start)).collect()
}

fn held_takes(held: &Reservation) -> Vec<Take> {
    takes_of(&held.placement)
}

fn takes_of(placement: &Placement) -> Vec<Take> {
    let devices = placement.devices.iter();
    let take = |placed: &engine::model::reservation::PlacedDevice| {
        let demand = placed.demand;
        (placed.id.as_str().to_owned(), demand.memory.mib(), demand.share.millionths())
    };
    devices.map(take).collect()
}

/// Holds end in time, only pods that the watch shows get one, and those that nothing binds share little room.
fn check_holds(replica: &mut Replica, now: u64) -> Result<(), String> {
    let is_running = !replica.is_frozen && now > replica.thawed + HELD_BEYOND;
    let (ledger, first_holds) = (&replica.app.ledger, &mut replica.holds);
    let (mut broken, mut held_long, mut devices) = (None, 0, 0);
    ledger.look_at_each(|node| {
        devices += node.devices().len() as u64;
        for (uid, hold) in node.holds() {
            let until = replica.started + hold.expires.millis();
            if is_running && until + HELD_BEYOND < now {
                broken = Some(format!("room is held for {uid} since {until} ms"));
            }
            if uid.as_str().starts_with("made-up") {
                broken = Some(format!("room is held for {uid}"));
            }
            let made = until.saturating_sub(HELD_FOR);
            let first = first_holds.entry(uid.as_str().to_owned()).or_insert(made);
            if made >= *first + HELD_ANEW {
                *first = made;
            }
            // One that was made when the watch showed the pod, or after a bind that failed, does not count.
            if made > *first + 2 * HELD_FOR {
                let placed = hold.placement.devices.iter();
                held_long += placed.map(|it| it.demand.share.millionths()).sum::<u64>();
            }
        }
    });
    // Some of them may have gone since room was held.
    let known = &mut replica.devices;
    if known.back().is_none_or(|(_, last)| *last != devices) {
        known.push_back((now, devices));
    }
    while known.get(1).is_some_and(|(since, _)| since + HELD_FOR + HELD_BEYOND < now) {
        known.pop_front();
    }
    let devices = known.iter().map(|(_, devices)| *devices).max().unwrap_or_default();
    let at_most = devices * replica.app.config.standing_hold_at_most.millionths();
    if held_long > at_most + 2_000_000 {
        broken = Some(format!("{held_long} millionths are held for pods that nothing binds"));
    }
    broken.map_or(Ok(()), Err)
}
