//! Room that is kept for a pod is used as soon as it is free, however long pods take to end.

use std::collections::BTreeMap;

use engine::ledger::query::reading::Readiness;
use engine::model::reservation::PlacedDevice;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use wire::ids::{NodeName, PodUid};

use super::api::{Pod, Template};
use super::checks::is_later;
use super::nodes::Node;
use super::replica::Replica;
use super::scheduler::Scheduler;
use super::{QUIET_FOR, What, World};

/// Room that is kept for a pod is free no longer than this before the pod is bound.
const BOUND_WITHIN: u64 = 3_000;

/// The same of a pod for which kube-scheduler may call only after its back-off.
const CALLED_WITHIN: u64 = 12_500;

/// Pods that hang for ever, at most.
const MOST_HUNG: usize = 2;

/// How long after its time to end a pod counts as hung; one that has ended, after its end.
const HUNG_AFTER: u64 = 30_000;

/// Processes see that a node takes no pods within this time.
const SEEN_WITHIN: u64 = 20_000;

/// Applications whose pods are made again.
const APPS: u64 = 6;

/// What became of room that was kept.
#[derive(Default)]
pub(super) struct Seen {
    /// Since when a pod fits in the room that is kept for it, and since when kube-scheduler could try it.
    free_since: BTreeMap<PodUid, (u64, u64)>,
    /// How many pods hang.
    hung: usize,
    /// Nodes that took no pods at some time.
    left: BTreeMap<String, u64>,
}

/// How long the processes of a pod take to end, in ms; `u64::MAX`: they never do.
fn slow_end(rng: &mut ChaCha8Rng, pod: Option<&Pod>, seen: &mut Seen) -> u64 {
    let grace = pod.map_or(30_000, Pod::grace);
    match rng.random_range(0..20) {
        0..8 => rng.random_range(0..1_000),
        8..14 => rng.random_range(1_000..15_000),
        14..18 => rng.random_range(0..grace),
        18 => rng.random_range(grace..=120_000), // longer than it may
        _ if seen.hung < MOST_HUNG => {
            seen.hung += 1;
            u64::MAX
        }
        _ => rng.random_range(0..grace),
    }
}

impl World {
    /// How long the processes of a pod take to end, where pods end slowly.
    pub(super) fn ends_after(&mut self, uid: &str) -> u64 {
        match self.is_faulty() {
            true => slow_end(&mut self.rng, self.api.pods.get(uid), &mut self.kept_room),
            false => self.rng.random_range(0..5_000),
        }
    }

    /// The ReplicaSet of a new pod, if it has one.
    pub(super) fn owner(&mut self) -> Option<(u64, u64)> {
        let has_one = self.settings.has_slow_ends && self.rng.random_range(0..2) == 0;
        has_one.then(|| (self.rng.random_range(0..APPS), self.rng.random_range(0..3)))
    }

    /// Makes others in the place of pods whose deletion was requested, and that have a controller.
    pub(super) fn replace_deleted(&mut self) {
        for of in std::mem::take(&mut self.api.deleted) {
            if self.settings.has_slow_ends {
                let time = self.rng.random_range(20..300);
                self.after(time, What::MadeAgain { of: Box::new(of) });
            }
        }
    }

    pub(super) fn make_again(&mut self, of: Template) {
        if self.now > self.settings.faults_for + QUIET_FOR / 2 {
            return;
        }
        self.created += 1;
        let name = format!("again-{}", self.created);
        self.api.create(&format!("pod-{}", self.created), self.now, Template { name, ..of });
    }

    /// Whether the processes of a pod never end.
    pub(super) fn hangs(&self, uid: &str) -> bool {
        self.processes.get(uid).is_some_and(|process| process.ends == Some(u64::MAX))
    }

    /// Notes that a node takes no pods, or takes them again.
    pub(super) fn note_left(&mut self, node: String) {
        self.kept_room.left.insert(node, self.now);
    }

    /// Whether the pods that were asked to go for a pod left no room: their node takes no pods since, or one of them
    /// hangs.
    pub(super) fn is_first_set_in_vain(&self, holder: &str) -> bool {
        let Some((node, before, since)) = self.preempted.evicted_for(holder) else { return false };
        let has_left = self.kept_room.left.get(node).is_some_and(|at| *at + SEEN_WITHIN >= since);
        let is_there =
            |uid: &String| self.processes.contains_key(uid) || self.api.pods.contains_key(uid);
        has_left || self.now > since + HUNG_AFTER && before.iter().any(is_there)
    }

    /// Where pods end slowly and nothing else fails, kept room is not left idle once all of it is free, beside what
    /// is kept there before it. What kube-scheduler is trying, or backs off from, counts as used.
    pub(super) fn check_kept_room(&mut self) -> Result<(), String> {
        let is_away = self.schedulers.iter().any(|it| it.away_until > self.now);
        let is_calm = self.now > self.disturbed_until && !is_away && self.settings.has_slow_ends;
        let serving = self.replicas[self.serving()].as_ref();
        let replica = serving.filter(|it| {
            let is_ready = it.app.lead.leading.is_here() && it.app.readiness() == Readiness::Ready;
            is_calm && is_ready && !it.is_frozen
        });
        let Some(replica) = replica else {
            self.kept_room.free_since.clear();
            return Ok(());
        };
        let mut free = BTreeMap::new();
        for uid in replica.app.ledger.standing_nodes().into_keys() {
            if !self.fits_in_its_room(replica, &uid) {
                continue;
            }
            let known = self.kept_room.free_since.get(&uid).copied();
            let (since, idle_since) = known.unwrap_or((self.now, self.now));
            let tries = |it: &Scheduler| it.tries_or_backs_off(uid.as_str(), self.now);
            let is_tried = self.schedulers.iter().any(tries);
            free.insert(uid, (since, if is_tried { self.now } else { idle_since }));
        }
        self.kept_room.free_since = free;
        let is_late = |(_, (since, idle_since)): &(&PodUid, &(u64, u64))| {
            self.now - *since > CALLED_WITHIN || self.now - *idle_since > BOUND_WITHIN
        };
        match self.kept_room.free_since.iter().find(is_late) {
            Some((uid, (since, _))) => {
                let kept = replica.app.ledger.standing_nodes();
                Err(format!("{uid} fits since {since} ms where room is kept for it: {kept:?}"))
            }
            None => Ok(()),
        }
    }

    fn fits_in_its_room(&self, replica: &Replica, uid: &PodUid) -> bool {
        let pod = self.api.pods.get(uid.as_str()).filter(|pod| pod.node.is_none());
        let Some(pod) = pod.filter(|pod| !pod.is_deleting) else { return false };
        let ledger = &replica.app.ledger;
        let victims = replica.app.room.preemptors.victims(uid);
        if victims.iter().any(|victim| ledger.has_pod(victim)) {
            return false;
        }
        if is_later(replica, pod) {
            return false; // it may not be bound by this process, until that one is gone
        }
        let query = replica.app.query(&self.api.change(pod).seen);
        let fits = query.and_then(|query| ledger.fits_in_room_of(uid, &query, None));
        let node = fits.or_else(|| free_room_of_first(replica, uid));
        let node =
            self.nodes.iter().find(|it| node.as_ref().is_some_and(|on| on.as_str() == it.name));
        // Pods that end have their CPUs until they are gone.
        let is_usable = |node: &Node| {
            let has_cpus = Node::has_cpus(self.cpus_taken(&node.name), pod);
            node.is_cordoned || node.suits(pod) && has_cpus
        };
        node.is_some_and(is_usable) && replica.app.pods.is_shown_waiting(uid)
    }
}

/// The node where room is kept for a pod before that of all others, if all that is kept for it is free there beside
/// what is allocated.
fn free_room_of_first(replica: &Replica, uid: &PodUid) -> Option<NodeName> {
    let ledger = &replica.app.ledger;
    let node = ledger.standing_nodes().get(uid)?.clone();
    let mut node_state = ledger.node(node.as_str())?;
    let rooms = node_state.standing_holds().clone();
    let first = rooms.iter().min_by_key(|(uid, hold)| (hold.kept_for, (*uid).clone()))?;
    rooms.keys().for_each(|other| _ = node_state.stand_down(other));
    let is_free = |placed: &PlacedDevice| {
        let mut devices = node_state.devices().iter();
        let device = devices.find(|device| device.device().id == placed.id);
        device.is_some_and(|device| device.free().checked_sub(placed.demand).is_some())
    };
    let hold = &rooms[uid];
    let has_host = node_state.host_free().left_after(hold.host).checked_add(hold.host)
        == Some(node_state.host_free());
    let is_all_free = has_host && hold.placement.devices.iter().all(is_free);
    (first.0 == uid && is_all_free).then_some(node)
}
