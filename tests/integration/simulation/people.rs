//! Users and other clients: they create, edit, end and delete pods.

use std::collections::BTreeMap;

use rand::Rng;
use rand::seq::IndexedRandom;

use super::api::{Instances, PLACEMENT, Template};
use super::faults::Fault;
use super::nodes::ZONES;
use super::scheduler::PROFILES;
use super::teams::TEAMS;
use super::{Caller, GPU_MIB, QUIET_FOR, What, World};

/// Names that are used again, as those of a StatefulSet.
pub(super) const NAMES: u64 = 40;

/// How much of the memory that they request pods use, in percent.
const USES: &[u64] = &[100, 100, 100, 100, 100, 100, 100, 5, 5, 160];

/// How often a placement is edited at most: the pauses before it is written back double.
const MOST_EDITS: u32 = 4;

impl World {
    pub(super) fn users(&mut self) {
        if self.now > self.settings.faults_for + QUIET_FOR / 2 {
            return;
        }
        if self.is_resting() {
            return self.after(self.asleep_until - self.now, What::Users);
        }
        let is_busy = self.is_faulty() && !self.settings.is_calm;
        let pause = if is_busy { 400 } else { 2_000 };
        let mut time = self.rng.random_range(20..pause);
        if self.settings.is_calm && self.rng.random_range(0..6) == 0 {
            time += 20_000; // nothing else makes kube-scheduler look again
        }
        self.after(time, What::Users);
        let creates = if self.is_faulty() { 60 } else { 40 };
        if self.rng.random_range(0..100) < creates && self.api.pods.len() < self.settings.pods {
            return self.create();
        }
        self.trouble();
        let uids: Vec<&String> = self.api.pods.keys().collect();
        let Some(uid) = uids.choose(&mut self.rng).map(|uid| (*uid).clone()) else { return };
        let kind = self.rng.random_range(0..10);
        let by_force = self.has(Fault::Force);
        let forced = if self.settings.rate > 1 { 6..9 } else { 8..9 };
        let Some(pod) = self.api.pods.get_mut(&uid) else { return };
        match (kind, &pod.node) {
            (0..3, Some(_)) => pod.is_terminal = true,
            (kind, Some(_)) if by_force && forced.contains(&kind) => return self.api.remove(&uid),
            (3..=7, Some(_)) => return self.api.delete(&uid),
            (0..2, None) => return self.api.remove(&uid),
            (9, None) => {
                _ = pod.annotations.insert("example.com/edited".to_owned(), self.now.to_string())
            }
            _ => return,
        }
        self.api.changed(&uid);
    }

    fn create(&mut self) {
        self.created += 1;
        let uid = format!("pod-{}", self.created);
        let name = format!("web-{}", self.created % NAMES);
        if self.api.pods.values().any(|pod| pod.of.name == name) {
            return; // that one has to end first
        }
        let kind = self.rng.random_range(0..10);
        let is_little = self.settings.has_extremes && kind < 5;
        let annotations = self.request_of(kind);
        let (mig, mut annotations) = match self.settings.has_mig {
            true => self.request_of_mig(),
            false => (None, annotations),
        };
        self.let_move(&mut annotations);
        let zone = ZONES.choose(&mut self.rng).copied();
        let team = match self.settings.has_teams {
            true => *TEAMS.choose(&mut self.rng).expect("some"),
            false => TEAMS[0],
        };
        let mut of = Template {
            name,
            team,
            scheduler: match self.rng.random_range(0..3) {
                0 => self.schedulers[self.schedulers.len() - 1].name,
                _ => PROFILES[0],
            },
            priority: self.rng.random_range(0..3),
            is_protected: self.settings.has_classes && self.created.is_multiple_of(3),
            cpu: [1, 1, 2, 8].choose(&mut self.rng).copied().expect("some"),
            zone: zone.filter(|_| self.rng.random_range(0..4) == 0),
            tolerates: self.rng.random_range(0..3) > 0,
            uses: if is_little { &[5] } else { USES }.choose(&mut self.rng).copied().expect("some"),
            mig,
            owner: self.owner(),
            annotations,
            is_marked: self.settings.has_blind_starts,
        };
        self.join(&mut of);
        if self.settings.lends_memory && of.annotations.contains_key("gpupack.dev/movable") {
            of.uses = of.uses.min(100); // what it uses above its request comes and goes
        }
        self.api.create(&uid, self.now, of);
        let is_over = |uid: &String| self.api.pods.get(uid).is_none_or(|pod| !pod.is_placed());
        let is_late = self.settings.has_rests && self.processes.keys().any(is_over);
        let percent = if is_late { 60 } else { 15 };
        if self.hits(Fault::Lag, percent) {
            // kube-scheduler calls before the extender's watch shows the pod.
            let (until, at) = (self.now + 5_000, self.serving());
            self.replicas[at].iter_mut().for_each(|it| it.stuck_until = it.stuck_until.max(until));
            self.disturb(7_000);
            self.rest(20_000); // nothing else makes kube-scheduler look at the pod again
            if is_late && self.rng.random_range(0..2) == 0 {
                // Room appears before that, and is for no other pod.
                let soon = self.now + self.rng.random_range(100..1_000);
                let over = self.processes.values_mut().filter(|process| process.ends.is_some());
                over.for_each(|process| process.ends = Some(soon));
                self.leave_waiting(&uid);
            }
        }
    }

    /// The request of a pod of this kind, as annotations.
    fn request_of(&mut self, kind: u32) -> BTreeMap<String, String> {
        let has_extremes = self.settings.has_extremes;
        let request = match kind {
            0..5 if has_extremes => vec![("gpu-fraction", "0.1".to_owned())],
            5..8 if has_extremes => vec![("gpu-fraction", "1".to_owned())],
            0..5 => {
                let share = ["0.1", "0.25", "0.5", "0.75"].choose(&mut self.rng).expect("some");
                vec![("gpu-fraction", (*share).to_owned())]
            }
            5..7 => {
                let mib: u64 = self.rng.random_range(100..GPU_MIB);
                vec![("gpu-memory", mib.to_string())]
            }
            7 => vec![
                ("gpu-fraction", "0.5".to_owned()),
                ("gpu-fraction-num-devices", "2".to_owned()),
            ],
            8 => vec![],
            _ => vec![("gpu-fraction", "1".to_owned())],
        };
        request.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }

    /// The request of a pod where GPUs are in MIG mode: instances, or annotations.
    fn request_of_mig(&mut self) -> (Option<Instances>, BTreeMap<String, String>) {
        let of = |profile| (Some((profile, 1)), BTreeMap::new());
        match self.rng.random_range(0..10) {
            0..3 => of("1g.6gb"),
            3 => (Some(("1g.6gb", 2)), BTreeMap::new()),
            4 => of("1g.6gb+me"),
            5..7 => of("2g.12gb"),
            7 => of("4g.24gb"),
            8 => {
                let mib = self.rng.random_range(1_000..GPU_MIB).to_string();
                let request = [("gpu-memory", &*mib), ("gpupack.dev/isolation", "hardware")];
                (None, request.map(|(key, value)| (key.to_owned(), value.to_owned())).into())
            }
            _ => (None, BTreeMap::new()),
        }
    }

    /// Lets most pods with part of one GPU use all of it, and be moved.
    fn let_move(&mut self, annotations: &mut BTreeMap<String, String>) {
        let is_part = annotations.get("gpu-fraction").is_some_and(|share| share != "1");
        let may_be_moved = self.settings.has_guests && is_part && annotations.len() == 1;
        if may_be_moved && self.rng.random_range(0..4) > 0 {
            for (key, value) in [("gpu-fraction.limit", "1"), ("gpupack.dev/movable", "restart")] {
                annotations.insert(key.to_owned(), value.to_owned());
            }
        } else if may_be_moved && self.settings.lends_memory {
            annotations.insert("gpu-fraction.limit".to_owned(), "1".to_owned()); // it borrows nothing
        }
    }

    /// All other pods that wait are removed, so that no other one can use the next room.
    pub(super) fn leave_waiting(&mut self, uid: &str) {
        let others = self.api.pods.iter().filter(|(_, pod)| pod.node.is_none());
        let others: Vec<String> = others.map(|(other, _)| other.clone()).collect();
        others.iter().filter(|other| **other != uid).for_each(|other| self.api.remove(other));
    }

    /// Calls and edits that no client should make.
    fn trouble(&mut self) {
        let uids: Vec<&String> = self.api.pods.keys().collect();
        let Some(uid) = uids.choose(&mut self.rng).map(|uid| (*uid).clone()) else { return };
        let node = self.rng.random_range(0..self.nodes.len());
        if self.hits(Fault::Trial, 15) {
            self.after(1, What::Trial { uid: uid.clone(), left: 12 });
        }
        if self.hits(Fault::MadeUp, 10) {
            self.after(1, What::Trial { uid: format!("made-up-{}", self.now), left: 1 });
        }
        // kube-scheduler decided otherwise, or not yet; the extender knows where *filter* passed it.
        let is_known =
            self.process(self.serving_life()).is_some_and(|it| it.passed.contains_key(&uid));
        if self.hits(Fault::MadeUp, 15) && is_known {
            let caller = Caller { by: None, cycle: 0, uid: uid.clone() };
            let node = self.nodes[node].name.clone();
            self.send_bind(caller, &node);
        }
        // An edit that comes before the extender has seen the pod bound is a fact from outside.
        let is_settled = self.process(self.serving_life()).is_some_and(|it| it.confirms(&uid));
        if self.hits(Fault::Edit, 20)
            && is_settled
            && let Some(pod) = self.api.pods.get_mut(&uid)
            && pod.edits < MOST_EDITS
            && let Some(written) = pod.annotations.get_mut(PLACEMENT)
        {
            pod.edits += 1;
            *written = smaller(written);
            self.api.changed(&uid);
        }
    }
}

/// A placement of half the memory.
fn smaller(written: &str) -> String {
    let mut placement: serde_json::Value = serde_json::from_str(written).unwrap_or_default();
    for device in placement["devices"].as_array_mut().into_iter().flatten() {
        device["mib"] = (device["mib"].as_u64().unwrap_or_default() / 2).into();
    }
    placement.to_string()
}
