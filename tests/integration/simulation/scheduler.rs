//! A model of kube-scheduler: a serial scheduling cycle, concurrent binds, back-off, and pods that are
//! parked until something makes it look at them again.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use super::api::{Change, Pod, Template};
use super::faults::Fault;
use super::nodes::Node;
use super::settings::Settings;

/// Back-off after an attempt: doubled from the first to the last, in ms.
const BACK_OFF: [u64; 2] = [1_000, 10_000];

/// Parked pods are looked at again after this time, in ms.
const FLUSH: u64 = 300_000;

/// The profiles that call gpupack.
pub(super) const PROFILES: [&str; 2] = ["gpupack", "gpupack-other"];

/// One attempt to schedule a pod, up to its bind.
pub(super) struct Cycle {
    pub(super) number: u64,
    pub(super) uid: String,
    pub(super) pod: Pod,
    /// Whether a node was left out for lack of CPU.
    lacks_cpu: bool,
}

struct Parked {
    since: u64,
    /// Whether the end of another pod may help.
    lacks_cpu: bool,
}

/// What a pod takes of its node.
struct Taken {
    node: String,
    cpu: u64,
    priority: i64,
}

pub(super) struct Scheduler {
    pub(super) name: &'static str,
    /// How much of the API server's log its watch has shown.
    pub(super) seen: usize,
    /// For when it goes on.
    pub(super) next: Option<u64>,
    /// When it is back after a restart; 0 if it is there.
    pub(super) away_until: u64,
    /// The pods without a node, as its watch shows them.
    pods: BTreeMap<String, Pod>,
    /// Pods that are bound, or being bound.
    taken: BTreeMap<String, Taken>,
    active: BTreeSet<(Reverse<i64>, u64, String)>,
    /// Until when a pod may not be tried again.
    backing_off: BTreeMap<String, u64>,
    parked: BTreeMap<String, Parked>,
    attempts: BTreeMap<String, u32>,
    /// Pods that are being bound.
    pub(super) binding: BTreeMap<String, u64>,
    pub(super) cycle: Option<Cycle>,
}

impl Scheduler {
    pub(super) fn new(name: &'static str) -> Self {
        Self {
            name,
            seen: 0,
            next: None,
            away_until: 0,
            pods: BTreeMap::new(),
            taken: BTreeMap::new(),
            active: BTreeSet::new(),
            backing_off: BTreeMap::new(),
            parked: BTreeMap::new(),
            attempts: BTreeMap::new(),
            binding: BTreeMap::new(),
            cycle: None,
        }
    }

    /// One, or two: with a profile each, or both with the same.
    pub(super) fn all(settings: &Settings) -> Vec<Self> {
        let is_same = ChaCha8Rng::seed_from_u64(settings.seed ^ 2).random_range(0..2) == 0;
        let other = if is_same { PROFILES[0] } else { PROFILES[1] };
        let has_two = settings.faults.contains(&Fault::SecondScheduler);
        [PROFILES[0], other].into_iter().take(1 + usize::from(has_two)).map(Self::new).collect()
    }

    /// Whether it tries a pod just now.
    pub(super) fn tries(&self, uid: &str) -> bool {
        let is_tried = self.cycle.as_ref().is_some_and(|cycle| cycle.uid == uid);
        is_tried || self.binding.contains_key(uid)
    }

    /// Whether it tries a pod just now, or again only later.
    pub(super) fn tries_or_backs_off(&self, uid: &str, now: u64) -> bool {
        let is_later = self.backing_off.get(uid).is_some_and(|until| *until > now);
        self.tries(uid) || is_later && !self.parked.contains_key(uid)
    }

    /// Takes in what the watch shows.
    pub(super) fn see(&mut self, change: &Change, now: u64) {
        let Change { uid, pod, is_deleted, .. } = change;
        let Some(node) = pod.node.clone().filter(|_| !*is_deleted && !pod.is_terminal) else {
            // What an extender refused is tried again after any event about an assigned pod.
            if (*is_deleted || pod.is_terminal) && self.taken.remove(uid).is_some() {
                self.move_parked(now, |_| true);
            }
            return self.see_waiting(change, now);
        };
        let is_new = self.pods.remove(uid).is_some() || !self.taken.contains_key(uid);
        self.forget(uid);
        let taken = Taken { node, cpu: pod.of.cpu, priority: pod.of.priority };
        self.taken.insert(uid.clone(), taken);
        if is_new {
            self.move_parked(now, |_| true); // an assigned pod may be what others wait for
        }
    }

    fn see_waiting(&mut self, change: &Change, now: u64) {
        let Change { uid, pod, is_deleted, .. } = change;
        let is_ours = pod.of.scheduler == self.name;
        if *is_deleted || pod.node.is_some() || pod.is_deleting || !is_ours {
            self.pods.remove(uid);
            return self.forget(uid);
        }
        let before = self.pods.insert(uid.clone(), pod.clone());
        match before {
            None => self.activate(uid, now),
            Some(before) if before.version != pod.version && self.parked.remove(uid).is_some() => {
                self.activate(uid, now);
            }
            Some(_) => {}
        }
    }

    fn forget(&mut self, uid: &str) {
        self.active.retain(|(.., other)| other != uid);
        self.backing_off.remove(uid);
        self.parked.remove(uid);
        self.attempts.remove(uid);
    }

    fn move_parked(&mut self, now: u64, which: impl Fn(&Parked) -> bool) {
        let moved: Vec<String> =
            self.parked.extract_if(.., |_, parked| which(parked)).map(|(uid, _)| uid).collect();
        moved.iter().for_each(|uid| self.activate(uid, now));
    }

    /// The nodes changed.
    pub(super) fn see_nodes(&mut self, now: u64) {
        self.move_parked(now, |_| true);
    }

    /// Makes the pod ready to be tried, now or after its back-off.
    fn activate(&mut self, uid: &str, now: u64) {
        if self.backing_off.get(uid).is_some_and(|until| *until > now) {
            return; // it comes when that is over
        }
        self.backing_off.remove(uid);
        let priority = self.pods.get(uid).map_or(0, |pod| pod.of.priority);
        self.active.insert((Reverse(priority), now, uid.to_owned()));
    }

    /// Begins the next cycle, if none goes on and a pod is ready.
    pub(super) fn begin(&mut self, now: u64, number: u64) -> bool {
        let over: Vec<String> = self
            .backing_off
            .iter()
            .filter(|(uid, until)| **until <= now && !self.parked.contains_key(*uid))
            .map(|(uid, _)| uid.clone())
            .collect();
        over.iter().for_each(|uid| self.activate(uid, now));
        self.move_parked(now, |parked| now - parked.since >= FLUSH);
        if self.cycle.is_some() {
            return false;
        }
        while let Some((.., uid)) = self.active.pop_first() {
            let Some(pod) = self.pods.get(&uid) else { continue };
            if self.binding.contains_key(&uid) {
                continue;
            }
            self.cycle = Some(Cycle { number, pod: pod.clone(), uid, lacks_cpu: false });
            return true;
        }
        false
    }

    /// When it has something to do without an event.
    pub(super) fn due(&self, now: u64) -> Option<u64> {
        if self.cycle.is_some() {
            return None;
        }
        if !self.active.is_empty() {
            return Some(now);
        }
        let waiting = self.backing_off.iter().filter(|(uid, _)| !self.parked.contains_key(*uid));
        waiting.map(|(_, until)| *until).min()
    }

    /// The nodes that it calls about for the pod of this cycle.
    pub(super) fn feasible(&mut self, nodes: &[Node]) -> Vec<String> {
        let Some(cycle) = &mut self.cycle else { return Vec::new() };
        let mut named = Vec::new();
        for node in nodes.iter().filter(|node| node.suits(&cycle.pod)) {
            let there =
                self.taken.iter().filter(|(uid, it)| it.node == node.name && **uid != cycle.uid);
            if Node::has_cpus(there.map(|(_, it)| it.cpu).sum(), &cycle.pod) {
                named.push(node.name.clone());
            } else {
                cycle.lacks_cpu = true;
            }
        }
        named
    }

    /// Per node that suits the pod of this cycle, the pods that it would evict there: those of lower
    /// priority, if there are any.
    pub(super) fn victims(&self, nodes: &[Node]) -> BTreeMap<String, Vec<String>> {
        let Some(cycle) = &self.cycle else { return BTreeMap::new() };
        let is_less = |it: &Taken| it.priority < cycle.pod.of.priority;
        let on = |node: &Node| {
            let there = self.taken.iter().filter(|(_, it)| it.node == node.name && is_less(it));
            there.map(|(uid, _)| uid.clone()).take(1).collect::<Vec<_>>()
        };
        let suiting = nodes.iter().filter(|node| node.suits(&cycle.pod));
        let plans = suiting.map(|node| (node.name.clone(), on(node)));
        plans.filter(|(_, victims)| !victims.is_empty()).collect()
    }

    /// The cycle with this number, if it still goes on.
    pub(super) fn current(&self, number: u64) -> Option<&Cycle> {
        self.cycle.as_ref().filter(|cycle| cycle.number == number)
    }

    fn back_off(&mut self, uid: &str, now: u64) {
        let attempts = self.attempts.entry(uid.to_owned()).or_default();
        *attempts += 1;
        let [first, last] = BACK_OFF;
        let pause = (first << (*attempts - 1).min(4)).min(last);
        self.backing_off.insert(uid.to_owned(), now + pause);
    }

    /// No node fits: the pod is parked.
    pub(super) fn park(&mut self, now: u64) {
        let Some(Cycle { uid, lacks_cpu, .. }) = self.cycle.take() else { return };
        if self.pods.contains_key(&uid) {
            self.back_off(&uid, now);
            self.parked.insert(uid, Parked { since: now, lacks_cpu });
        }
    }

    /// The cycle failed: the pod is tried again after its back-off.
    pub(super) fn fail(&mut self, now: u64) {
        let Some(Cycle { uid, .. }) = self.cycle.take() else { return };
        self.try_again(&uid, now);
    }

    /// A bind failed.
    pub(super) fn try_again(&mut self, uid: &str, now: u64) {
        self.binding.remove(uid);
        if self.pods.contains_key(uid) {
            self.taken.remove(uid);
            self.back_off(uid, now);
            self.move_parked(now, |parked| parked.lacks_cpu);
        }
    }

    /// The pod is assumed on its node, and its bind begins, unless it is bound or gone by now.
    pub(super) fn assume(&mut self, node: &str) -> bool {
        let Some(Cycle { uid, number, pod, .. }) = self.cycle.take() else { return false };
        let waits = self.pods.contains_key(&uid);
        if waits {
            let Template { cpu, priority, .. } = pod.of;
            self.taken.insert(uid.clone(), Taken { node: node.to_owned(), cpu, priority });
            self.binding.insert(uid, number);
        }
        waits
    }

    /// Whether no pod is tried, and none will be soon: all that wait are parked.
    pub(super) fn is_idle(&self) -> bool {
        let is_busy = self.cycle.is_some() || !self.binding.is_empty() || !self.active.is_empty();
        let is_away = self.away_until > 0;
        !is_busy && !is_away && self.backing_off.keys().all(|uid| self.parked.contains_key(uid))
    }

    /// What is not bound and not parked, for a failure's message.
    pub(super) fn summary(&self) -> Value {
        json!({
            "active": self.active.len(), "parked": self.parked.keys().collect::<Vec<_>>(),
            "backingOff": self.backing_off, "binding": self.binding,

            "cycle": self.cycle.as_ref().map(|cycle| &cycle.uid),
        })
    }
}
