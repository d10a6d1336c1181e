//! What is under way: Bindings that may still arrive, terms, and what each process was told.
//!
//! Most mistakes here do harm only when two rare things come together. These checks see them when
//! they are made.

use std::collections::{BTreeMap, BTreeSet};

use engine::model::reservation::ReservationState;
use hyper::Request;
use kube_api::request::placement::HOLD;
use kube_api::request::room_note::RoomNote;
use runtime::step::outside::{ApiAnswer, CallId, Lost};
use serde_json::Value;
use wire::ids::PodUid;

use super::World;
use super::people::NAMES;
use super::replica::Replica;

/// How long a Lease holds that is not renewed.
const HOLDS_FOR: u64 = 3_000;

/// How long binds may delay that a leader gives the Lease away.
const LAST_BINDS: u64 = 1_000;

/// A Binding is settled within this time, if nothing is wrong any more.
const SETTLED_WITHIN: u64 = 6_000;

/// The annotation of the Lease that names the informed followers.
const INFORMED: &str = "gpupack.dev/informed";

/// A Binding that was posted. It is open until its process learns what became of it.
#[derive(Debug)]
struct Binding {
    call: CallId,
    node: String,
    version: String,
    sent: u64,
}

/// What is under way.
#[derive(Default)]
pub(super) struct Open {
    /// The Bindings with a placement, by process and pod.
    bindings: BTreeMap<(u64, String), Binding>,
    /// What the requests that have no answer yet are about.
    requests: BTreeMap<(u64, CallId), About>,
    /// Until when each process may write, by the renewals that the API server took.
    terms: BTreeMap<u64, u64>,
    /// When the Lease was written last.
    leased: u64,
    /// Which Bindings each follower was told of.
    told: BTreeMap<u64, BTreeSet<(u64, String)>>,
}

/// The name that the pod with this UID was created with.
fn name_of(uid: &str) -> Option<String> {
    let number: u64 = uid.rsplit('-').next()?.parse().ok()?;
    Some(format!("web-{}", number % NAMES))
}

struct About {
    uid: Option<String>,
    is_binding: bool,
    is_write: bool,
    sent: u64,
}

impl World {
    /// Notes a request that a process sends. Only the one that leads may write.
    pub(super) fn note_sent(&mut self, life: u64, id: CallId, request: &Request<Vec<u8>>) {
        let path = request.uri().path();
        let (is_lease, is_write) = (path.contains("/leases"), request.method() != "GET");
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        if is_lease && is_write && body["spec"]["holderIdentity"].as_str().is_none_or(str::is_empty)
        {
            self.check_hand_over(life);
        }
        let named = body["metadata"]["uid"].as_str().map(str::to_owned);
        let uid = named.or_else(|| self.api.uid_of(path)); // names are used again
        let uid = uid.or_else(|| self.open_of(life, path));
        if let Some(note) = body["metadata"]["annotations"].get(HOLD) {
            let note = note.as_str().and_then(RoomNote::read);
            let holder = uid.as_deref().unwrap_or_default();
            self.preempted.sent((life, id), holder, note.as_ref());
        }
        let is_binding = path.ends_with("/binding") && body["metadata"]["annotations"].is_object();
        if self.replicas.len() > 1 && is_write && !is_lease && uid.is_some() {
            let until = self.open.terms.get(&life).copied().unwrap_or_default();
            if self.now >= until {
                self.broke(format!("process {life} writes, but its term ended at {until} ms"));
            }
        }
        if let Some(uid) = uid.clone().filter(|_| is_binding) {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let (node, version) =
                (text(&body["target"]["name"]), text(&body["metadata"]["resourceVersion"]));
            self.open
                .bindings
                .insert((life, uid), Binding { call: id, node, version, sent: self.now });
            self.check_told();
        }
        let about = About { uid, is_binding, is_write, sent: self.now };
        self.open.requests.insert((life, id), about);
    }

    /// The pod of an open Binding that a request is about, which is gone.
    fn open_of(&self, life: u64, path: &str) -> Option<String> {
        let mut open = self.open.bindings.keys().filter(|(of, _)| *of == life);
        let is_it = |(_, uid): &&(u64, String)| {
            name_of(uid).is_some_and(|name| path.ends_with(&format!("/{name}")))
        };
        open.find(is_it).map(|(_, uid)| uid.clone())
    }

    /// Before the process takes an answer: the pod of its open Binding that is gone by this answer.
    pub(super) fn gone_of(
        &self,
        life: u64,
        id: CallId,
        answer: &Result<ApiAnswer, Lost>,
    ) -> Option<String> {
        let uid = self.open.requests.get(&(life, id))?.uid.clone()?;
        let binding = self.open.bindings.get(&(life, uid.clone()))?;
        let is_gone = answer.as_ref().is_ok_and(|answer| answer.status == 404);
        (is_gone && binding.call != id).then_some(uid)
    }

    /// The Binding of a pod that is gone may have succeeded before: what it has stays taken while it
    /// runs.
    pub(super) fn check_gone(&self, life: u64, uid: &str) -> Result<(), String> {
        let Some(replica) = self.process(life).filter(|it| !it.is_frozen) else { return Ok(()) };
        let is_held = replica.app.ledger.reservation(&PodUid::new(uid)).is_some();
        if is_held || !self.processes.contains_key(uid) {
            return Ok(());
        }
        Err(format!("process {life} frees the room of {uid}, which is gone and runs"))
    }

    /// A leader that stops lets its binds end before it gives the Lease away, for a second.
    fn check_hand_over(&mut self, life: u64) {
        let now = self.now;
        let Some(replica) = self.process(life) else { return };
        let waits = replica.left.is_some_and(|left| now < left + LAST_BINDS);
        let count = replica.under_way;
        if waits && count > 0 {
            self.broke(format!("process {life} gives the Lease away while {count} binds go on"));
        }
    }

    /// Notes that the API server takes a Lease. Nobody takes it from a process that may still write.
    pub(super) fn note_lease(&mut self, life: u64, id: CallId, before: Option<&Value>) {
        let Some(lease) = self.api.lease.clone().filter(|lease| Some(lease) != before) else {
            return;
        };
        let (now, leased) = (self.now, std::mem::replace(&mut self.open.leased, self.now));
        let holder = |lease: &Value| lease["spec"]["holderIdentity"].as_str().map(str::to_owned);
        let pod_of = |holder: &String| holder.split('_').next().map(str::to_owned);
        let own = holder(&lease);
        if let Some(was) = before.and_then(holder).filter(|was| !was.is_empty())
            && Some(&was) != own.as_ref()
            && own.as_ref().and_then(pod_of) != pod_of(&was)
            && own.as_ref().is_some_and(|own| !own.is_empty())
            && now < leased + HOLDS_FOR
        {
            self.broke(format!("{own:?} takes the Lease of {was}, which was renewed at {leased}"));
        }
        let sent = self.open.requests.get(&(life, id)).map_or(now, |about| about.sent);
        let until = self.open.terms.entry(life).or_default();
        *until = (sent + HOLDS_FOR).max(*until);
        self.check_told();
    }

    /// Notes that a follower takes a message.
    pub(super) fn note_told(&mut self, from: u64, to: u64, message: &[u8]) {
        let message: Value = serde_json::from_slice(message).unwrap_or_default();
        let bindings = message["bindings"].as_array().into_iter().flatten();
        let told = bindings.filter_map(|pod| Some((from, pod["uid"].as_str()?.to_owned())));
        self.open.told.entry(to).or_default().extend(told);
    }

    /// Each follower that the Lease names knows each Binding that may still arrive.
    fn check_told(&mut self) {
        let Some(lease) = &self.api.lease else { return };
        let named = lease["metadata"]["annotations"][INFORMED].as_str().unwrap_or_default();
        let life_of = |identity: &str| u64::from_str_radix(identity.rsplit_once('_')?.1, 16).ok();
        let Some(leader) = lease["spec"]["holderIdentity"].as_str().and_then(life_of) else {
            return;
        };
        let named: Vec<u64> = named.split_whitespace().filter_map(life_of).collect();
        let mut untold = None;
        for follower in named.into_iter().filter(|life| self.process(*life).is_some()) {
            let told = self.open.told.get(&follower);
            let of_leader = self.open.bindings.keys().filter(|(life, _)| *life == leader);
            for binding in of_leader.filter(|(_, uid)| self.api.pods.contains_key(uid)) {
                if !told.is_some_and(|told| told.contains(binding)) {
                    untold = Some(format!("process {follower} was not told of {binding:?}"));
                }
            }
        }
        untold.into_iter().for_each(|untold| self.broke(untold));
    }

    /// Whether a request was about this pod, and not about an earlier one of its name.
    pub(super) fn is_about(&self, life: u64, id: CallId, uid: &str) -> bool {
        let about = self.open.requests.get(&(life, id));
        let number = uid.rsplit('-').next().and_then(|number| number.parse().ok());
        about.is_some_and(|about| about.is_write)
            || self.open.bindings.contains_key(&(life, uid.to_owned()))
            || number.is_some_and(|number: u64| number < NAMES)
    }

    /// Before the process takes an answer: whether it decides a Binding.
    pub(super) fn note_answer(&mut self, life: u64, id: CallId, answer: &Result<ApiAnswer, Lost>) {
        let Some(about) = self.open.requests.remove(&(life, id)) else { return };
        let (Some(uid), Ok(answer)) = (about.uid, answer) else { return };
        let key = (life, uid);
        let Some(binding) = self.open.bindings.get(&key) else { return };
        let is_own = about.is_binding && binding.call == id;
        let body: Value =
            serde_json::from_slice(answer.body.as_deref().unwrap_or_default()).unwrap_or_default();
        let is_newer = body["metadata"]["resourceVersion"]
            .as_str()
            .is_some_and(|version| version != binding.version);
        let is_decided = match answer.status {
            200..300 => is_own || is_newer || about.is_write && !about.is_binding,
            404 | 409 => is_own || about.is_write || answer.status == 404,
            400..500 => is_own && answer.status != 429,
            _ => false,
        };
        if is_decided {
            self.open.bindings.remove(&key);
        }
    }

    /// What a process was told is in its ledger at once.
    pub(super) fn check_answer(&self, life: u64, pod: &Value) -> Result<(), String> {
        let (uid, node) = (pod["metadata"]["uid"].as_str(), pod["spec"]["nodeName"].as_str());
        let (Some(uid), Some(node), Some(replica)) = (uid, node, self.process(life)) else {
            return Ok(());
        };
        let Some(known) = self.api.pods.get(uid).filter(|pod| pod.is_placed()) else {
            return Ok(());
        };
        let is_held = || replica.app.ledger.reservation(&PodUid::new(uid)).is_some();
        if replica.is_frozen || !replica.may_write() || known.takes.is_empty() || is_held() {
            return Ok(());
        }
        Err(format!("process {life} was told that {uid} is bound to {node}, and does not know it"))
    }

    /// A Binding that may still arrive keeps its room.
    pub(super) fn check_open(&mut self) -> Result<(), String> {
        if self.open.bindings.is_empty() {
            return Ok(());
        }
        let lives: BTreeSet<u64> = self.processes().map(|replica| replica.life).collect();
        self.open.bindings.retain(|(life, _), _| lives.contains(life));
        for ((life, uid), binding) in &self.open.bindings {
            let Some(replica) = self.process(*life).filter(|it| !it.is_frozen) else { continue };
            let waits = self.api.pods.get(uid).is_some_and(|pod| !pod.is_terminal);
            if waits && replica.app.ledger.reservation(&PodUid::new(uid.as_str())).is_none() {
                return Err(format!(
                    "process {life} keeps no room for {uid}, whose Binding may still arrive: {binding:?}"
                ));
            }
        }
        self.check_settled()
    }

    /// The process that leads finds out what became of its Bindings, also of those whose caller has
    /// given up.
    fn check_settled(&self) -> Result<(), String> {
        let leads = |replica: &&Replica| {
            !replica.is_frozen
                && replica.thawed + SETTLED_WITHIN < self.now
                && replica.app.lead.leading.is_here()
                && replica.stopping_since.is_none()
        };
        let Some(life) = self.replicas[self.serving()].as_ref().filter(leads).map(|it| it.life)
        else {
            return Ok(());
        };
        let is_late =
            |binding: &Binding| self.now > binding.sent.max(self.disturbed_until) + SETTLED_WITHIN;
        let waits = |uid: &str| self.api.pods.get(uid).is_some_and(|pod| pod.node.is_none());
        let own = self.open.bindings.iter().filter(|((of, _), _)| *of == life);
        match own.filter(|((_, uid), _)| waits(uid)).find(|(_, binding)| is_late(binding)) {
            Some(((_, uid), binding)) => {
                Err(format!("process {life} does not settle the Binding of {uid}: {binding:?}"))
            }
            None => Ok(()),
        }
    }

    /// The node of the Binding of this pod that is open at a process, if its request is for GPUs.
    pub(super) fn open_on(&self, life: u64, uid: &str) -> Option<&str> {
        let binding = self.open.bindings.get(&(life, uid.to_owned()))?;
        let held = self.process(life)?.app.ledger.reservation(&PodUid::new(uid))?;
        let is_assumed = matches!(held.state, ReservationState::Assumed { .. });
        is_assumed.then_some(&*binding.node)
    }
}
