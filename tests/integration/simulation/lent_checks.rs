//! What is promised of memory that pods use above their request, in the runs whose pool lends it.
//!
//! Lists of agents are late, so no promise is about the moment: a program may take what others request
//! until a list has shown it. What is promised of a Binding and of a move home is that a list has shown
//! enough memory since it was decided; of a restart, that the last list shows why it is needed; and of a
//! device, that what its pods request is there again some time after it was taken.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use engine::model::reservation::{BorrowedMemory, Departure, Reservation, ReservationState};
use hyper::Request;
use kube_api::request::placement::MPS_MEMORY;
use serde_json::Value;
use wire::ids::PodUid;

use super::World;
use super::api::{PLACEMENT, Pod};
use super::lent::{client_limit, requested};
use super::replica::Replica;
use super::scheduling::HTTP_TIMEOUT;

/// Use above a request that counts as nothing: `unmanaged_tolerance_mib`.
const TOLERANCE: u64 = 128;

/// Without faults, memory that others request is back this long after it was taken, or after the last
/// restart for that: two lists, the restart of a container, and what is left of the last one.
const BACK_WITHIN: u64 = 20_000;

/// Most restarts of a pod by one process for memory; a run is shorter than the time in which they count.
const MOST_RESTARTS: usize = 3;

/// A process gives up a container that has not ended after this time.
const ENDS_WITHIN: u64 = 60_000;

/// How long lists are kept: as long as a call of *bind* lasts.
const KEPT_FOR: u64 = HTTP_TIMEOUT;

/// The last lists of a device that a process took: when, and what each pod uses.
pub(super) type Lists = BTreeMap<String, VecDeque<(u64, BTreeMap<String, u64>)>>;

/// What has happened to lent memory.
#[derive(Default)]
pub(super) struct Seen {
    /// Since when memory that pods request is used by borrowers, by device.
    lacks_since: BTreeMap<String, u64>,
    /// When a container on a device was last ordered to restart for memory.
    ordered_on: BTreeMap<String, u64>,
    /// When each process sent such orders for each pod, and how many of them were carried out.
    sent: BTreeMap<(u64, String), Vec<u64>>,
    done: BTreeMap<(u64, String), usize>,
    /// The guests whose move home each process has begun.
    begun: BTreeSet<(u64, String)>,
    /// When the last move of each pod to another MIG instance began.
    pub(super) changes_since: BTreeMap<String, u64>,
    /// How many pods were written as allocated another MIG instance, to which they had moved.
    pub(super) moved_instances: usize,
    /// When each process read each pod last.
    read: BTreeMap<(u64, String), u64>,
    /// The orders that were refused, by process and pod.
    refused: BTreeSet<(u64, String)>,
    /// Pods whose resize kubelet did not carry out at once.
    pub(super) pended: BTreeSet<String>,
    /// Pods whose memory some process could not take back, and since when.
    kept: BTreeMap<String, u64>,
    /// The moves home that are complete, by pod: the container and its CPU request before.
    came_home: BTreeSet<(String, String)>,
}

impl Seen {
    /// How many containers were restarted to take memory back.
    pub(super) fn taken_back(&self) -> usize {
        self.done.values().sum()
    }

    /// Whether some process could not take back the memory of a pod.
    pub(super) fn keeps(&self, uid: &str) -> bool {
        self.kept.contains_key(uid)
    }
}

/// What a resize is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resize {
    /// To move a guest home.
    Move,
    /// To move a pod to another MIG instance.
    Instance,
    /// To take memory back.
    TakeBack,
}

/// The move that is written on a pod, as text.
fn written_move(pod: &Pod) -> Option<Value> {
    let text = pod.annotations.get(PLACEMENT)?;
    let placement: Value = serde_json::from_str(text).ok()?;
    placement.get("moved").filter(|moved| moved.is_object()).cloned()
}

impl Pod {
    /// Whether kubelet has yet to carry out a resize for its move home.
    pub(super) fn is_moving(&self) -> bool {
        let before = self.container.actual_cpu_milli;
        written_move(self).is_some_and(|moved| moved["cpu_milli"] == before)
    }
}

/// The placement in what is sent about a pod.
fn written_placement(body: &Value) -> Value {
    let text = body["metadata"]["annotations"][PLACEMENT].as_str().unwrap_or_default();
    serde_json::from_str(text).unwrap_or_default()
}

/// What counts of the memory that a pod uses.
pub(super) fn counted(requested: u64, used: u64) -> u64 {
    if used > requested + TOLERANCE { used } else { requested }
}

/// What counts of a pod where it runs: what it took when it was bound, whatever amounts others wrote since.
fn counts(pod: &Pod, id: &str) -> u64 {
    let written = pod.written();
    if written.len() != pod.takes.len() {
        return requested(pod, id);
    }
    let of_device = written.iter().zip(&pod.takes).filter(|((on, ..), _)| on == id);
    of_device.map(|(_, (_, mib, _))| mib).sum()
}

/// What a list shows of a pod.
fn shown(list: &BTreeMap<String, u64>, uid: &str) -> u64 {
    list.get(uid).copied().unwrap_or_default()
}

impl Replica {
    /// Notes the lists of a report that is taken.
    pub(super) fn note_lists(&mut self, report: &str, now: u64) {
        let report: Value = serde_json::from_str(report).unwrap_or_default();
        for device in report["devices"].as_array().into_iter().flatten() {
            let (Some(id), Some(all)) = (device["id"].as_str(), device["processes"].as_array())
            else {
                continue;
            };
            let mut list = BTreeMap::new();
            for process in all {
                let uid = process["podUid"].as_str().unwrap_or_default().to_owned();
                *list.entry(uid).or_default() += process["memoryMib"].as_u64().unwrap_or_default();
            }
            let lists = self.lists.entry(id.to_owned()).or_default();
            lists.push_back((now, list));
            while lists.get(1).is_some_and(|(at, _)| at + KEPT_FOR < now) {
                lists.pop_front();
            }
        }
    }

    /// The lists of a device that counted at some time since then.
    fn lists_since(&self, id: &str, since: u64) -> impl Iterator<Item = &BTreeMap<String, u64>> {
        let all: Vec<_> = self.lists.get(id).into_iter().flatten().collect();
        let first = all.iter().rposition(|(at, _)| *at <= since).unwrap_or(0);
        all.into_iter().skip(first).map(|(_, list)| list)
    }
}

impl World {
    /// Whether nothing is promised of a device: a fault from outside uses it.
    pub(super) fn is_excused(&self, id: &str) -> bool {
        let lies = self.nodes.iter().any(|it| it.lies_until > 0 && it.gpu_ids().any(|at| at == id));
        let is_gone = self.capacity(id) == 0; // and with it all that ran there
        self.excused.contains(id) || self.claimed.contains(id) || lies || is_gone
    }

    /// Whether each list of a device since then shows too little memory for those who run there, and one
    /// that comes. What some use above their request is left out.
    fn has_lacked(
        &self,
        (replica, since): (&Replica, u64),
        id: &str,
        coming: (&str, u64),
        leaves_out: impl Fn(&str) -> bool,
    ) -> bool {
        let others = self.api.pods.iter().filter(|(uid, pod)| pod.is_placed() && **uid != coming.0);
        let others: Vec<(&String, u64)> = others
            .filter(|(_, pod)| pod.written().iter().any(|(on, ..)| on == id))
            .map(|(uid, pod)| (uid, counts(pod, id)))
            .collect();
        let taken = |list: &BTreeMap<String, u64>| -> u64 {
            let used = |uid: &str| if leaves_out(uid) { 0 } else { shown(list, uid) };
            others.iter().map(|(uid, requested)| counted(*requested, used(uid))).sum()
        };
        let mut lists = replica.lists_since(id, since).peekable();
        lists.peek().is_some() && lists.all(|list| taken(list) + coming.1 > self.capacity(id))
    }

    /// A pod is bound only after a list has shown the memory that it requests.
    pub(super) fn check_memory(
        &self,
        replica: &Replica,
        uid: &str,
        body: &Value,
    ) -> Result<(), String> {
        let placement = written_placement(body);
        let version = body["metadata"]["resourceVersion"].as_str().unwrap_or_default();
        if self.api.pods.get(uid).is_some_and(|pod| pod.version.to_string() != version) {
            return Ok(()); // the API server refuses it
        }
        // Several clients may call at the same time: it may be the bind of the first one.
        let open = replica.open_calls.get(uid).and_then(BTreeSet::first);
        let called = open.copied().unwrap_or_default();
        for device in placement["devices"].as_array().into_iter().flatten() {
            let id = device["id"].as_str().unwrap_or_default();
            let coming = (uid, device["mib"].as_u64().unwrap_or_default());
            if !self.is_excused(id) && self.has_lacked((replica, called), id, coming, |_| false) {
                let last = replica.lists_since(id, u64::MAX).last();
                return Err(format!(
                    "{uid} is bound to {id}, where no list shows its memory: {last:?}"
                ));
            }
        }
        Ok(())
    }

    /// A guest moves home only after a list has shown the memory that it requests there, beside what cannot
    /// be taken back. A process that does not know whether its write arrived goes on with the move.
    fn check_move(&self, life: u64, uid: &str, placement: &Value) -> Result<(), String> {
        let Some(replica) = self.process(life) else { return Ok(()) };
        let device = &placement["devices"][0];
        let (Some(id), Some(mib)) = (device["id"].as_str(), device["mib"].as_u64()) else {
            return Ok(());
        };
        // It is decided when the pod is read.
        let read = self.lent.read.get(&(life, uid.to_owned())).copied();
        let since = read.unwrap_or_default();
        let is_kept = |other: &str| {
            let held = replica.app.ledger.reservation(&PodUid::new(other));
            // Of two guests that leave one goes first.
            let follows = |held: &Reservation| held.is_going_home() && other > uid;
            held.is_some_and(|held| held.borrowed == BorrowedMemory::Kept || follows(&held))
        };
        let lacks = || self.has_lacked((replica, since), id, (uid, mib), is_kept);
        if !self.is_excused(id) && lacks() {
            let last = replica.lists_since(id, u64::MAX).last();
            return Err(format!(
                "{uid} moves home to {id}, where no list shows its memory: {last:?}"
            ));
        }
        Ok(())
    }

    /// What a process sends about pods that borrow.
    pub(super) fn check_borrowed(
        &mut self,
        life: u64,
        request: &Request<Vec<u8>>,
    ) -> Result<(), String> {
        let Some(uid) = self.api.uid_of(request.uri().path()) else { return Ok(()) };
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        if request.method() == "GET" {
            self.lent.read.insert((life, uid.clone()), self.now);
        }
        let placement = written_placement(&body);
        let is_guest = self.api.pods.get(&uid).is_some_and(Pod::is_guest);
        let is_move = is_guest && placement["moved"].is_object() && body["metadata"]["uid"] == *uid;
        if is_move && self.lent.begun.insert((life, uid.clone())) {
            self.check_move(life, &uid, &placement)?;
        }
        self.check_resize(life, request, &uid)
    }

    /// What a resize of a pod in its newest version is for.
    pub(super) fn resize_of(&self, request: &Request<Vec<u8>>, uid: &str) -> Option<Resize> {
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let pod = self.api.pods.get(uid)?;
        let is_resize = request.uri().path().ends_with("/resize");
        let version = &body["metadata"]["resourceVersion"];
        if !is_resize || body["metadata"]["uid"] != uid || *version != *pod.version.to_string() {
            return None; // the API server refuses it
        }
        let is_open = |moved: &Value| moved["cpu_milli"] == pod.container.cpu_milli;
        let is_move = written_move(pod).is_some_and(|moved| is_open(&moved));
        Some(match () {
            () if is_move => Resize::Move,
            () if pod.changes_instances() => Resize::Instance,
            () => Resize::TakeBack,
        })
    }

    /// A process sends a resize: only of a pod that may be restarted, and only if it must be.
    pub(super) fn check_resize(
        &mut self,
        life: u64,
        request: &Request<Vec<u8>>,
        uid: &str,
    ) -> Result<(), String> {
        let Some(kind) = self.resize_of(request, uid) else {
            if request.uri().path().ends_with("/resize") {
                // Of an older version. Without an answer it counts as a restart all the same.
                self.lent.sent.entry((life, uid.to_owned())).or_default().push(self.now);
            }
            return Ok(());
        };
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let (Some(pod), Some(replica)) = (self.api.pods.get(uid), self.process(life)) else {
            return Ok(());
        };
        if !pod.is_movable() {
            return Err(format!("{uid} is restarted, and its owner has not allowed that"));
        }
        let cpu = body["spec"]["containers"][0]["resources"]["requests"]["cpu"].as_str();
        let cpu: u64 = cpu.and_then(|cpu| cpu.strip_suffix('m')?.parse().ok()).unwrap_or_default();
        let is_placement = body["metadata"]["annotations"].is_object();
        if is_placement || cpu.abs_diff(pod.container.cpu_milli) != 1 {
            return Err(format!("{uid} is not only restarted: {body}"));
        }
        if kind == Resize::Instance {
            return Ok(());
        }
        let moved = written_move(pod).map(|moved| (uid.to_owned(), moved.to_string()));
        if kind == Resize::Move {
            let is_home = moved.is_some_and(|moved| self.lent.came_home.contains(&moved));
            return match is_home {
                true => Err(format!("{uid} is restarted to go home, and is at home")),
                false => Ok(()),
            };
        }
        // One that is a guest by what is written may still run at home.
        let at: Vec<String> =
            pod.written().into_iter().chain(pod.allocated()).map(|(id, ..)| id).collect();
        // Not what is written: others may have edited that.
        let requested: u64 = pod.takes.iter().map(|(_, mib, _)| mib).sum();
        if client_limit(pod).is_some_and(|limit| limit > requested) {
            return Err(format!("{uid} is restarted for memory, and may take it again"));
        }
        let key = (life, uid.to_owned());
        let needed = |id: &String| match self.is_excused(id) {
            true => Ok(()),
            false => check_needed(replica, uid, id, self.capacity(id)),
        };
        let Some(id) = at.iter().find(|id| needed(id).is_ok()).or(at.first()) else {
            return Err(format!("{uid} is restarted, and nothing is written on it"));
        };
        needed(id)?;
        self.lent.sent.entry(key).or_default().push(self.now);
        self.lent.ordered_on.insert(id.clone(), self.now);
        Ok(())
    }

    /// A resize has reached the API server.
    pub(super) fn resized(&mut self, life: u64, uid: &str, kind: Resize, code: u16) {
        let key = (life, uid.to_owned());
        if matches!(code, 403 | 422) {
            self.lent.refused.insert(key.clone());
        }
        if kind == Resize::TakeBack && matches!(code, 200 | 504) {
            let done = self.lent.done.entry(key).or_default();
            *done += 1;
            if *done > MOST_RESTARTS {
                let done = *done;
                self.broke(format!("process {life} restarts {uid} {done} times for memory"));
            }
        }
    }

    /// A write has reached the API server that may lower the limit of a pod.
    pub(super) fn limited(&mut self, life: u64, uid: &str, request: &Request<Vec<u8>>, code: u16) {
        let is_limit = || String::from_utf8_lossy(request.body()).contains(MPS_MEMORY);
        // One of an older version is refused, too, before its version is looked at.
        let is_resize = request.uri().path().ends_with("/resize");
        if matches!(code, 403 | 422) && request.method() == "PATCH" && (is_resize || is_limit()) {
            self.lent.refused.insert((life, uid.to_owned()));
        }
    }

    /// The container of a pod starts again, with its resize carried out.
    pub(super) fn note_restarted(&mut self, uid: &str) {
        let Some(pod) = self.api.pods.get(uid) else { return };
        let is_done = |moved: &Value| moved["cpu_milli"] != pod.container.cpu_milli;
        if let Some(moved) = written_move(pod).filter(is_done) {
            self.lent.came_home.insert((uid.to_owned(), moved.to_string()));
        }
    }

    /// What pods request is there, or borrowers are made to give it back.
    pub(super) fn check_lent(&mut self) -> Result<(), String> {
        self.note_kept()?;
        let mut since = BTreeMap::new();
        for id in self.nodes.iter().flat_map(|node| node.gpu_ids()) {
            if self.is_lacking(id) {
                let before = self.lent.lacks_since.get(id).copied();
                since.insert(id.to_owned(), before.unwrap_or(self.now));
            }
        }
        self.lent.lacks_since = since;
        let begin = self.settings.faults_for.max(self.disturbed_until);
        let is_late = |(id, since): &(&String, &u64)| {
            let ordered = self.lent.ordered_on.get(*id).copied().unwrap_or_default();
            self.now > (**since).max(begin).max(ordered) + BACK_WITHIN
        };
        match self.lent.lacks_since.iter().find(is_late) {
            Some((id, since)) => Err(format!("since {since} ms memory of {id} is lacking")),
            None => Ok(()),
        }
    }

    /// When a bind of a pod ended last that waited for memory, if a restart was ordered for that, or a process
    /// gave that up. It waits for several if a program takes memory again at once, and each time
    /// kube-scheduler tries it again.
    pub(super) fn waited_for_memory(&self, uid: &str) -> Option<u64> {
        let ended = self.recalled_for.get(uid).filter(|_| self.settings.lends_memory)?;
        let mut done = self.lent.ordered_on.values().chain(self.lent.kept.values());
        done.any(|at| at + HTTP_TIMEOUT > *ended).then_some(*ended)
    }

    /// Whether pods on a device lack what they request, and would not if borrowers gave theirs back.
    fn is_lacking(&self, id: &str) -> bool {
        if self.is_excused(id) {
            return false;
        }
        let (mut all, mut least) = (0, 0);
        let uids: BTreeSet<&String> = self.api.pods.keys().chain(self.processes.keys()).collect();
        for uid in uids {
            let pod = self.api.pods.get(uid).filter(|pod| pod.is_placed() && !pod.is_deleting);
            let process = self.processes.get(uid);
            let used = process.map_or(0, |process| process.used(id, self.now));
            let requested = pod.map_or(0, |pod| requested(pod, id));
            let counts = counted(requested, used);
            let gives_back = pod.is_some_and(Pod::is_movable) && !self.lent.keeps(uid);
            all += counts;
            least += if gives_back { requested } else { counts };
        }
        all > self.capacity(id) && least <= self.capacity(id)
    }

    /// Memory is left to a pod only if it could not be taken back.
    fn note_kept(&mut self) -> Result<(), String> {
        let mut kept = BTreeSet::new();
        for replica in self.replicas.iter().flatten().chain(&self.overlapping) {
            replica.app.ledger.look_at_each(|node| {
                let held = node.reservations().iter();
                let held = held.filter(|(_, it)| it.borrowed == BorrowedMemory::Kept);
                kept.extend(held.map(|(uid, _)| (replica.life, uid.as_str().to_owned())));
            });
        }
        for key in kept.into_iter().filter(|(_, uid)| self.api.pods.contains_key(uid)) {
            let sent = self.lent.sent.get(&key).map_or(&[][..], |all| all);
            let is_old = sent.first().is_some_and(|at| at + ENDS_WITHIN <= self.now);
            let is_refused = self.lent.refused.contains(&key) || self.lent.pended.contains(&key.1);
            if sent.len() < MOST_RESTARTS && !is_old && !is_refused {
                return Err(format!("process {} leaves memory to {}: {sent:?}", key.0, key.1));
            }
            self.lent.kept.entry(key.1).or_insert(self.now);
        }
        Ok(())
    }
}

/// Only a pod that uses more than it requests is restarted for memory, and only where the last list shows
/// less than all there request.
fn check_needed(replica: &Replica, uid: &str, id: &str, capacity: u64) -> Result<(), String> {
    let Some(list) = replica.lists_since(id, u64::MAX).last() else {
        return Err(format!("{uid} is restarted, and no list of {id} is known"));
    };
    let mut requests: BTreeMap<String, u64> = BTreeMap::new();
    replica.app.ledger.look_at_each(|node| {
        for (other, held) in node.reservations() {
            requests.insert(other.as_str().to_owned(), requested_on(held, id));
        }
    });
    let request = |other: &str| requests.get(other).copied().unwrap_or_default();
    let all: BTreeSet<&str> = requests.keys().chain(list.keys()).map(|it| &**it).collect();
    let taken: u64 = all.iter().map(|it| counted(request(it), shown(list, it))).sum();
    if taken <= capacity || counted(request(uid), shown(list, uid)) <= request(uid) {
        return Err(format!("{uid} is restarted, and no memory of {id} is missing: {list:?}"));
    }
    Ok(())
}

/// What a pod requests of a device where it runs or will run, as a process knows.
fn requested_on(held: &Reservation, id: &str) -> u64 {
    let is_ending = matches!(held.state, ReservationState::Draining { .. });
    let runs_on = held.placement.runs_on();
    let is_here = runs_on.iter().any(|on| on.as_str() == id);
    // One that cannot be moved counts in both places.
    let counts_on_both = held.departure == Departure::Settling;
    let comes = held.is_going_home() || counts_on_both || is_ending;
    let placed = held.placement.devices.iter();
    let placed = placed.filter(|it| is_here || comes && it.id.as_str() == id);
    placed.map(|it| it.demand.memory.mib()).max().unwrap_or_default()
}
