//! A model of kube-scheduler: a serial scheduling cycle, concurrent binds, back-off, and pods that are
//! parked until something makes it look at them again.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::api::Change;

/// Back-off after an attempt: doubled from the first to the last, in ms.
const BACK_OFF: [u64; 2] = [1_000, 10_000];

/// Parked pods are looked at again after this time, in ms.
const FLUSH: u64 = 300_000;

/// One attempt to schedule a pod, up to its bind.
pub(crate) struct Cycle {
    pub(crate) number: u64,
    pub(crate) uid: String,
    pub(crate) pod: Value,
}

#[derive(Default)]
pub(crate) struct Scheduler {
    /// How much of the API server's log its watch has shown.
    pub(crate) seen: usize,
    /// The pods without a node, as its watch shows them.
    pods: BTreeMap<String, Value>,
    active: BTreeSet<(Reverse<i64>, u64, String)>,
    /// Until when a pod may not be tried again.
    backing_off: BTreeMap<String, u64>,
    parked: BTreeMap<String, u64>,
    attempts: BTreeMap<String, u32>,
    /// Pods that are being bound.
    pub(crate) binding: BTreeMap<String, u64>,
    pub(crate) cycle: Option<Cycle>,
    count: u64,
}

impl Scheduler {
    /// Takes in what the watch shows.
    pub(crate) fn see(&mut self, change: &Change, now: u64) {
        let Change { uid, pod, is_deleted, .. } = change;
        let is_bound = pod["spec"]["nodeName"].is_string();
        if *is_deleted || is_bound || pod["metadata"]["deletionTimestamp"].is_string() {
            self.pods.remove(uid);
            self.forget(uid);
            if is_bound && !*is_deleted {
                self.move_parked(now); // an assigned pod may be what others wait for
            }
            return;
        }
        let before = self.pods.insert(uid.clone(), pod.clone());
        match before {
            None => self.activate(uid, now),
            Some(before) if before != *pod && self.parked.remove(uid).is_some() => {
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

    fn move_parked(&mut self, now: u64) {
        for uid in std::mem::take(&mut self.parked).into_keys() {
            self.activate(&uid, now);
        }
    }

    /// Makes the pod ready to be tried, now or after its back-off.
    fn activate(&mut self, uid: &str, now: u64) {
        if self.backing_off.get(uid).is_some_and(|until| *until > now) {
            return; // it comes when that is over
        }
        self.backing_off.remove(uid);
        let priority = self.pods.get(uid).and_then(|pod| pod["spec"]["priority"].as_i64());
        let priority = priority.unwrap_or_default();
        self.active.insert((Reverse(priority), now, uid.to_owned()));
    }

    /// Begins the next cycle, if none goes on and a pod is ready.
    pub(crate) fn begin(&mut self, now: u64) -> bool {
        let over: Vec<String> = self
            .backing_off
            .iter()
            .filter(|(uid, until)| **until <= now && !self.parked.contains_key(*uid))
            .map(|(uid, _)| uid.clone())
            .collect();
        over.iter().for_each(|uid| self.activate(uid, now));
        let flushed: Vec<String> = self
            .parked
            .iter()
            .filter(|(_, since)| now - **since >= FLUSH)
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in flushed {
            self.parked.remove(&uid);
            self.activate(&uid, now);
        }
        if self.cycle.is_some() {
            return false;
        }
        while let Some((.., uid)) = self.active.pop_first() {
            let Some(pod) = self.pods.get(&uid) else { continue };
            if self.binding.contains_key(&uid) {
                continue;
            }
            self.count += 1;
            self.cycle = Some(Cycle { number: self.count, pod: pod.clone(), uid });
            return true;
        }
        false
    }

    /// The cycle with this number, if it still goes on.
    pub(crate) fn current(&self, number: u64) -> Option<&Cycle> {
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
    pub(crate) fn park(&mut self, now: u64) {
        let Some(Cycle { uid, .. }) = self.cycle.take() else { return };
        if self.pods.contains_key(&uid) {
            self.back_off(&uid, now);
            self.parked.insert(uid, now);
        }
    }

    /// The cycle failed: the pod is tried again after its back-off.
    pub(crate) fn fail(&mut self, now: u64) {
        let Some(Cycle { uid, .. }) = self.cycle.take() else { return };
        self.try_again(&uid, now);
    }

    /// A bind failed.
    pub(crate) fn try_again(&mut self, uid: &str, now: u64) {
        self.binding.remove(uid);
        if self.pods.contains_key(uid) {
            self.back_off(uid, now);
        }
    }

    /// The pod is assumed on its node, and its bind begins.
    pub(crate) fn assume(&mut self) {
        if let Some(Cycle { uid, number, .. }) = self.cycle.take() {
            self.binding.insert(uid, number);
        }
    }

    /// What is not bound and not parked, for a failure's message.
    pub(crate) fn summary(&self) -> Value {
        json!({
            "active": self.active.len(), "parked": self.parked, "backingOff": self.backing_off,
            "binding": self.binding, "cycle": self.cycle.as_ref().map(|cycle| &cycle.uid),
        })
    }
}
