//! Processes of the extender: their steps, lists and watches.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use engine::hardware::pool::{Borrow, MigUse, PoolRule, PoolRules};
use kube_api::config::file::Config;
use kube_api::config::pods::workloads::WorkloadKeys;
use kube_api::config::webhook::MemoryLimit;
use kube_api::pod::watch::WatchEvent;
use rand::Rng;
use runtime::step::outside::{Action, StepEvent};
use wire::ids::PoolName;
use wire::units::Share;

use super::api::PROTECTED;
use super::faults::Fault;
use super::replica::Replica;
use super::scheduler::PROFILES;
use super::settings::number;
use super::teams;
use super::{What, Work, World};

/// The answer to *bind* while a process starts.
const WARMING_UP: &str = "gpupack is warming up";

/// The answer to *bind* if guests did not leave in time.
const WAITS_FOR_GUESTS: &str = "pods that borrow room of its GPUs are being moved";

/// The answer to *bind* if its MIG instance is not made in time.
const WAITS_FOR_MIG: &str = "MIG instance";

/// The answer to *bind* if its time is over before the Binding is posted.
const NO_TIME_LEFT: &str = "no time is left to bind the pod";

impl World {
    pub(super) fn processes(&self) -> impl Iterator<Item = &Replica> {
        self.replicas.iter().flatten().chain(&self.overlapping)
    }

    /// The process with this life, if it runs or is frozen.
    pub(super) fn process(&self, life: u64) -> Option<&Replica> {
        self.processes().find(|replica| replica.life == life)
    }

    pub(super) fn process_mut(&mut self, life: u64) -> Option<&mut Replica> {
        let running = self.replicas.iter_mut().flatten().chain(&mut self.overlapping);
        running.into_iter().find(|replica| replica.life == life)
    }

    /// The replica to which calls go.
    pub(super) fn serving(&self) -> usize {
        let named = self.leader();
        named.or_else(|| self.replicas.iter().position(Option::is_some)).unwrap_or_default()
    }

    /// The life of the process to which calls go, or zero.
    pub(super) fn serving_life(&self) -> u64 {
        self.replicas[self.serving()].as_ref().map_or(0, |replica| replica.life)
    }

    /// Runs a step of the process with this life, and schedules what it wants done.
    pub(super) fn step(&mut self, life: u64, event: StepEvent) {
        let now = self.now;
        let Some(replica) = self.process_mut(life).filter(|replica| !replica.is_frozen) else {
            return;
        };
        let actions = replica.step(event, now);
        let answers = self.answered.lock().expect("no panic").len();
        if let Some(replica) = self.process_mut(life) {
            replica.under_way -= answers;
        }
        for action in actions {
            match action {
                Action::Work(work) => {
                    let time = self.rng.random_range(0..20);
                    self.after(time, What::Work { life, work: Work(work) });
                }
                Action::Call { id, request, within } => {
                    let within = u64::try_from(within.as_millis()).expect("short");
                    match request.uri().authority() {
                        Some(_) => self.send_message(life, id, request, within),
                        None => self.send(life, id, request, within),
                    }
                }
            }
        }
        self.plan_timer(life);
        self.plan_list(life);
        self.end_replaced(life);
        let answered = std::mem::take(&mut *self.answered.lock().expect("no panic"));
        for (caller, called, error) in answered {
            let replica = self.process_mut(life);
            let open = replica.and_then(|replica| replica.open_calls.get_mut(&caller.uid));
            open.into_iter().for_each(|open| _ = open.remove(&called));
            if error.contains("a bug in gpupack") {
                self.broke(format!("the bind of {} panicked", caller.uid));
            }
            let is_plain = self.api.pods.get(&caller.uid).is_some_and(|pod| !pod.wants_gpu());
            if is_plain && error == WARMING_UP {
                self.broke(format!("{} has no GPU, and waits for the start", caller.uid));
            }
            // The last moment of its time may be the one in which they have left.
            let may_wait = self.settings.lends_memory || self.settings.has_mig;
            let waited = may_wait && error.contains(NO_TIME_LEFT);
            let waits = [WAITS_FOR_GUESTS, WAITS_FOR_MIG].iter().any(|text| error.contains(text));
            if waited || waits {
                self.recalled_for.insert(caller.uid.clone(), self.now);
            }
            if self.hits(Fault::GiveUp, 4) {
                self.disturb(15_000);
                continue; // kube-scheduler hears nothing
            }
            let time = self.rng.random_range(0..4);
            self.after(time, What::Bound { caller, error: Some(error) });
        }
    }

    fn plan_timer(&mut self, life: u64) {
        let Some(replica) = self.process_mut(life) else { return };
        let Some(due) = replica.due() else { return };
        if replica.next_due.is_none_or(|next| due < next) {
            replica.next_due = Some(due);
            self.after(due.saturating_sub(self.now), What::Due { life });
        }
    }

    pub(super) fn start(&mut self, to: usize) {
        if self.replicas[to].is_some() {
            return;
        }
        self.lives += 1;
        self.disturb(10_000);
        let life = self.lives;
        let ahead = self.rng.random_range(0..3) + self.clocks_ahead[to];
        let place = (self.replicas.len() > 1).then_some(to);
        self.replicas[to] = Some(Replica::start(life, self.now, ahead, self.config(), place));
        let time = self.rng.random_range(5..500);
        self.after(time, What::Listed { life });
        self.step(life, StepEvent::Changed);
    }

    /// What the operator has configured.
    fn config(&self) -> Config {
        let mut config = Config::default();
        config.guard.evict = self.settings.faults.contains(&Fault::Eviction);
        config.preemption.enabled = self.settings.preempts;
        if let Some(seconds) = number("SIM_EVICTS_AFTER") {
            config.preemption.after = Duration::from_secs(seconds);
        }
        config.standing_hold_after = Duration::from_secs(self.standing_after());
        config.scheduler_names = PROFILES.map(str::to_owned).into();
        if self.settings.has_teams {
            teams::configure(&mut config);
        }
        if self.settings.has_classes {
            let class = WorkloadKeys { preemptible: false, ..WorkloadKeys::default() };
            config.workloads = BTreeMap::from([(PROTECTED.to_owned(), class)]);
        }
        if self.settings.has_mig {
            let rule = PoolRule { mig: MigUse::OnDemand, ..PoolRule::default() };
            config.pools = PoolRules::new([(PoolName::new(""), rule)]);
        }
        if self.settings.has_guests {
            let borrow = match self.settings.lends_memory {
                true => Borrow::Memory { most: Share::WHOLE },
                false => Borrow::Compute,
            };
            if self.settings.limits_memory {
                config.webhook.memory_limit = MemoryLimit::Mps;
            }
            let driver_limits = self.settings.has_driver_limits;
            if driver_limits {
                config.webhook.memory_limit = MemoryLimit::Driver;
            }
            let rule = PoolRule { borrow, driver_limits, ..PoolRule::default() };
            config.pools = PoolRules::new([(PoolName::new(""), rule)]);
        }
        config
    }

    /// The lists of nodes and pods.
    pub(super) fn list(&mut self, life: u64) {
        if self.now < self.outage_until && self.is_faulty() {
            let time = self.outage_until - self.now + self.rng.random_range(0..1_000);
            return self.after(time, What::Listed { life });
        }
        let (now, version) = (self.now, self.nodes_version);
        let is_first = self.process(life).is_some_and(|replica| !replica.is_listed);
        if is_first && self.hits(Fault::Delay, 20) {
            self.arrive_late();
        }
        let is_replaced = self.overlapping.as_ref().is_some_and(|it| it.life == life);
        let running = self.replicas.iter_mut().flatten().chain(&mut self.overlapping);
        let Some(replica) = running.into_iter().find(|replica| replica.life == life) else {
            return;
        };
        replica.set_time(now);
        if !replica.is_listed {
            replica.nodes.take(WatchEvent::ListBegins);
            self.nodes
                .iter()
                .for_each(|node| _ = replica.nodes.take(WatchEvent::Seen(node.facts())));
            replica.nodes.take(WatchEvent::ListEnds);
            replica.nodes_seen = version;
            replica.works.see(&self.nodes, now);
        }
        // Lists of pods and nodes, and the watches that go on after them.
        (0..4).for_each(|_| replica.hear_date(now));
        replica.is_list_due = false;
        let number = replica.app.pods.lists.begin();
        replica.pods.take(WatchEvent::ListBegins);
        for pod in self.api.pods.values_mut() {
            if !replica.is_listed && !is_replaced && pod.node.is_some() {
                // What is written counts when it is first seen.
                let written = pod.allocated();
                let before = std::mem::replace(&mut pod.takes, written);
                if before != pod.takes {
                    self.excused.extend(before.into_iter().map(|(id, ..)| id));
                }
            }
            let change = &self.api.log[pod.logged];
            replica.pods.take(WatchEvent::Seen(change.seen.clone()));
            replica.note_named(&change.uid, &change.pod, now);
        }
        replica.pods.take(WatchEvent::ListEnds);
        replica.app.pods.lists.complete(number);
        replica.seen = self.api.log.len();
        if !replica.is_listed {
            replica.is_listed = true;
            replica.app.ledger.set_listed(replica.app.clock.now());
        }
        self.step(life, StepEvent::Changed);
    }

    /// What processes that are gone have sent arrives now: what a new one has just listed is old.
    fn arrive_late(&mut self) {
        let lives: BTreeSet<u64> = self.processes().map(|replica| replica.life).collect();
        let is_late =
            |what: &What| matches!(what, What::Request { life, .. } if !lives.contains(life));
        let late: Vec<What> =
            self.agenda.extract_if(.., |_, what| is_late(what)).map(|(_, what)| what).collect();
        for what in late {
            let time = self.rng.random_range(0..30);
            self.after(time, what);
        }
    }

    pub(super) fn watch(&mut self, life: u64) {
        if self.process(life).is_none() {
            return;
        }
        let is_cut = self.now < self.outage_until && self.is_faulty();
        let (relists, repeats) = (self.hits(Fault::Relist, 2), self.hits(Fault::Relist, 5));
        let most = self.rng.random_range(1..6);
        let now = self.now;
        let running = self.replicas.iter_mut().flatten().chain(&mut self.overlapping);
        let Some(replica) = running.into_iter().find(|replica| replica.life == life) else {
            return;
        };
        replica.is_watch_due = false;
        if is_cut {
            return;
        }
        if relists {
            return self.list(life); // 410 Gone: it begins again
        }
        replica.set_time(now);
        let first = replica.seen.saturating_sub(usize::from(repeats));
        let last = self.api.log.len().min(replica.seen + most);
        for change in &self.api.log[first..last] {
            let pod = change.seen.clone();
            let event =
                if change.is_deleted { WatchEvent::Deleted(pod) } else { WatchEvent::Seen(pod) };
            replica.pods.take(event);
            replica.note_named(&change.uid, &change.pod, now);
        }
        replica.seen = last;
        self.step(life, StepEvent::Changed);
    }

    pub(super) fn see_nodes(&mut self, life: u64) {
        let (now, version) = (self.now, self.nodes_version);
        let running = self.replicas.iter_mut().flatten().chain(&mut self.overlapping);
        let Some(replica) = running.into_iter().find(|replica| replica.life == life) else {
            return;
        };
        replica.set_time(now);
        replica.is_nodes_due = false;
        replica.nodes_seen = version;
        self.nodes.iter().for_each(|node| _ = replica.nodes.take(WatchEvent::Seen(node.facts())));
        replica.works.see(&self.nodes, now);
        self.step(life, StepEvent::Changed);
    }

    /// After each event: watches notice what is new.
    pub(super) fn follow_up(&mut self) {
        if self.now < self.outage_until && self.is_faulty() {
            return;
        }
        let (length, version) = (self.api.log.len(), self.nodes_version);
        let (mut pods, mut nodes) = (Vec::new(), Vec::new());
        for replica in self.replicas.iter_mut().flatten().chain(&mut self.overlapping) {
            let is_listed = replica.is_listed;
            let is_stuck = self.now < replica.stuck_until;
            if is_listed && !is_stuck && replica.seen < length && !replica.is_watch_due {
                replica.is_watch_due = true;
                pods.push(replica.life);
            }
            if is_listed && replica.nodes_seen < version && !replica.is_nodes_due {
                replica.is_nodes_due = true;
                nodes.push(replica.life);
            }
        }
        for life in pods {
            let time = self.lag();
            self.after(time, What::Watch { life });
        }
        for life in nodes {
            let time = self.lag();
            self.after(time, What::SeeNodes { life });
        }
        for by in 0..self.schedulers.len() {
            if self.schedulers[by].seen < length {
                let time = self.lag();
                self.plan_schedule(by, time);
            }
        }
    }

    /// How far a watch is behind: more than some milliseconds now and then.
    fn lag(&mut self) -> u64 {
        let is_slow = self.rng.random_range(0..10) == 0;
        let most = match self.hits(Fault::Lag, 4) {
            true => 3_000,
            false if is_slow => 300,
            false => 30,
        };
        if most > 300 {
            self.disturb(8_000);
        }
        self.rng.random_range(0..most)
    }
}
