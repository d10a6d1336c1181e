//! Requests of the extender on their way to the API server, and what is promised of them.

use std::collections::BTreeSet;

use hyper::Request;
use kube_api::request::placement::{FENCE, FenceWriter, HOLD};
use kube_api::request::room_note::RoomNote;
use rand::Rng;
use runtime::step::outside::{ApiAnswer, CallId, Lost, StepEvent};
use serde_json::Value;
use wire::ids::PodUid;

use super::api::{PLACEMENT, Pod, is_dry_run, refusal};
use super::faults::Fault;
use super::replica::{Replica, api_seconds};
use super::{Answers, GPU_MIB, Sent, What, World};
use crate::simulation::scheduling::HTTP_TIMEOUT;

/// A node that has not reported for so long takes no pods: `report_stale_seconds`, and a look each
/// second.
const SILENT_FOR: u64 = 15_000 + 2_000;

/// How long a bind goes on.
const BINDS_FOR: u64 = 10_000;

/// The longest time that an answer takes.
const SLOW: u64 = 1_500;

/// How long a process is frozen at least, so that another one binds a pod of its Binding meanwhile.
const LONG: u64 = 8_000;

/// How long a request that is lost may delay a requeue: its timeout, and the next attempt.
pub(super) const REQUEST_LOST: u64 = 9_000;

/// The same for one that is answered with an error.
const REQUEST_REFUSED: u64 = 3_000;

fn version_of(metadata: &Value) -> &str {
    metadata["resourceVersion"].as_str().unwrap_or_default()
}

fn is_requeue(request: &Request<Vec<u8>>) -> bool {
    String::from_utf8_lossy(request.body()).contains(" requeue-")
}

impl World {
    /// Decides what becomes of a request of the extender.
    pub(super) fn send(
        &mut self,
        life: u64,
        id: CallId,
        request: Box<Request<Vec<u8>>>,
        within: u64,
    ) {
        self.note_sent(life, id, &request);
        if request.uri().path().ends_with("/binding")
            && let Err(broken) = self.check_binding(life, &request)
        {
            self.broke(broken);
        }
        if request.uri().path().ends_with("/binding")
            && let Err(broken) = self.check_trials(life, &request)
        {
            self.broke(broken);
        }
        if self.settings.lends_memory
            && let Err(broken) = self.check_borrowed(life, &request)
        {
            self.broke(broken);
        }
        if self.settings.has_mig {
            self.check_mig_write((life, id), &request);
        }
        // The worst times to crash, and to be replaced, are those of a write.
        let is_write = request.method() != "GET";
        let soon = self.rng.random_range(0..8);
        let mut is_held = false; // by the network, longer than the process lives
        if self.is_resting() {
            // The process lives on.
        } else if is_write && self.hits(Fault::Crash, 2) {
            is_held = self.hits(Fault::Delay, 70);
            self.after(soon, What::Crash { life });
            if let Some(uid) = self.api.uid_of(request.uri().path())
                && self.hits(Fault::Denial, 40)
            {
                self.deny(uid); // so that the next process cannot fence it
            }
        } else if is_write && self.hits(Fault::Overlap, 1) {
            self.after(soon, What::Freeze { life, at_least: 0 });
        } else if is_write && self.hits(Fault::Stop, 1) {
            self.after(soon, What::Stop { life });
        }
        if is_held {
            let late = self.rng.random_range(200..8_000);
            let (request, answers) = (Sent(request), Answers::Never);
            return self.after(late, What::Request { life, id, request, answers });
        }
        let is_requeue = is_requeue(&request);
        let path = request.uri().path().to_owned();
        let disturbed_until = self.disturbed_until;
        self.go(life, id, request, within);
        if is_requeue && self.settings.has_rests && self.disturbed_until != disturbed_until {
            // It failed. Half of the time no other pod can use the room.
            let uid = self.api.uid_of(&path);
            if self.rng.random_range(0..2) == 0 {
                self.leave_waiting(uid.as_deref().unwrap_or_default());
            }
            self.rest(30_000);
        }
    }

    /// Decides what the network does with a request.
    fn go(&mut self, life: u64, id: CallId, request: Box<Request<Vec<u8>>>, within: u64) {
        let way = self.rng.random_range(0..5);
        let lost = |what| What::Answer { life, id, answer: Err(what) };
        let is_refused = self.settings.has_rests && is_requeue(&request);
        let refused = if is_refused { 30 } else { 6 };
        let is_binding = request.uri().path().ends_with("/binding");
        let uid = self.api.uid_of(request.uri().path()).filter(|_| is_binding);
        let bound = uid.clone();
        let request = |answers| What::Request { life, id, request: Sent(request), answers };
        if let Some(uid) = uid
            && self.hits(Fault::Denial, 3)
        {
            // So that it cannot be settled, and that no next call makes gpupack settle it.
            if self.settings.has_rests && self.hits(Fault::SchedulerRestart, 60) {
                let away = [50_000, 100_000][self.rng.random_range(0..2)];
                (0..self.schedulers.len()).for_each(|by| self.restart_scheduler(by, away));
                self.deny_for(uid, away * 2 / 3);
                self.rest(away * 9 / 10);
            } else {
                self.deny(uid);
            }
            self.disturb(REQUEST_LOST);
            self.after(within, lost(Lost::Timeout));
            if self.rng.random_range(0..2) == 0 {
                self.after(way, request(Answers::Never));
            }
            return;
        }
        if is_binding && self.hits(Fault::Overlap, 5) {
            self.replace_within(life);
            return self.after(within, lost(Lost::Timeout));
        }
        if self.now < self.outage_until && self.is_faulty() {
            self.disturb(REQUEST_LOST);
            let time = if self.rng.random_range(0..2) == 0 { within } else { way };
            let fault = "connection refused".to_owned();
            return self.after(time, lost(Lost::Transport { fault }));
        }
        if self.hits(Fault::Loss, 3) {
            self.disturb(REQUEST_LOST); // it never arrives
            self.after(within, lost(Lost::Timeout));
        } else if self.hits(Fault::Loss, 3) {
            self.disturb(REQUEST_LOST); // it arrives, and no answer comes
            self.after(within, lost(Lost::Timeout));
            self.after(way, request(Answers::Never));
            if is_binding && self.hits(Fault::Force, 30) {
                // It is bound, runs, and is gone, before the process learns any of it.
                self.stick(life, within + 2_000);
                let time = way + self.rng.random_range(500..within);
                bound.into_iter().for_each(|uid| self.after(time, What::Removed { uid }));
            }
        } else if self.hits(Fault::Loss, 3) {
            self.disturb(REQUEST_LOST);
            let fault = "connection reset".to_owned();
            self.after(way, lost(Lost::Transport { fault }));
            if self.rng.random_range(0..2) == 0 {
                self.after(0, request(Answers::Never));
            }
        } else if self.hits(Fault::Delay, 4) {
            self.disturb(REQUEST_LOST);
            let late = within + self.rng.random_range(0..20_000);
            self.after(within, lost(Lost::Timeout));
            self.after(late, request(Answers::Never));
        } else if self.hits(Fault::Overload, refused) {
            self.disturb(REQUEST_REFUSED);
            let code = [429, 500, 503, 504][self.rng.random_range(0..4)];
            self.after(way, request(Answers::Status(code)));
        } else if self.hits(Fault::Overload, 2) {
            self.disturb(REQUEST_REFUSED);
            self.after(way, request(Answers::DoneBut(504)));
        } else {
            self.after(way, request(Answers::Arrives));
        }
    }

    /// A Binding never arrives, and its process is frozen. kube-scheduler begins again, and calls the
    /// process that takes its place. The first one knows nothing of that when it goes on.
    fn replace_within(&mut self, life: u64) {
        self.disturb(REQUEST_LOST);
        self.after(0, What::Freeze { life, at_least: LONG });
        self.stick(life, 20_000);
        if self.has(Fault::SchedulerRestart) {
            (0..self.schedulers.len()).for_each(|by| self.restart_scheduler(by, 0));
        }
    }

    /// The watch of a process shows nothing for this time.
    fn stick(&mut self, life: u64, time: u64) {
        let until = self.now + time;
        self.process_mut(life).into_iter().for_each(|replica| replica.stuck_until = until);
    }

    /// A request reaches the API server.
    pub(super) fn request(
        &mut self,
        life: u64,
        id: CallId,
        request: &Request<Vec<u8>>,
        answers: Answers,
    ) {
        let is_read = request.method() == "GET";
        let uid = self.api.uid_of(request.uri().path());
        if !is_read && !self.is_resting() && self.hits(Fault::Conflict, 3) {
            if let Some(pod) = uid.as_ref().and_then(|uid| self.api.pods.get_mut(uid)) {
                let version = pod.version.to_string();
                pod.annotations.insert("example.com/seen".to_owned(), version);
            }
            uid.iter().for_each(|uid| self.api.changed(uid));
            if request.uri().path().ends_with("/binding") && self.hits(Fault::Overlap, 10) {
                self.after(0, What::Freeze { life, at_least: 0 }); // the answer comes when another one has fenced
            }
        }
        if !matches!(answers, Answers::Status(_)) {
            self.note_write((life, id), request, uid.as_deref());
        }
        self.api.now = self.now;
        let resize = uid.as_ref().and_then(|uid| self.resize_of(request, uid));
        let lease = self.api.lease.clone().filter(|_| request.uri().path().contains("/leases"));
        let (code, body) = match answers {
            Answers::Status(code) => refusal(code, "as this test wants"),
            Answers::Arrives | Answers::Never => self.api.answer(request),
            Answers::DoneBut(code) => {
                self.api.answer(request);
                refusal(code, "as this test wants")
            }
        };
        if let Some(uid) = uid.as_deref().filter(|_| self.settings.has_mig) {
            self.note_era((life, id), uid, request);
        }
        if code == 200
            && request.method() == "PATCH"
            && let Some(uid) = &uid
        {
            let version = self.api.pods.get(uid).map_or(0, |pod| pod.version);
            self.written.insert((life, uid.clone()), version);
        }
        if let Some(uid) = &uid {
            match resize {
                Some(kind) => self.resized(life, uid, kind, code),
                None => self.limited(life, uid, request, code),
            }
        }
        if request.uri().path().contains("/leases") {
            self.note_lease(life, id, lease.as_ref());
        }
        if self.api.denied.contains_key(uid.as_deref().unwrap_or_default()) {
            self.disturb(REQUEST_LOST);
        }
        if answers != Answers::Never {
            let date = Some(api_seconds(self.now));
            let answer = Ok(ApiAnswer { status: code, body: Some(body.into_bytes()), date });
            let is_gone = code == 200 && self.is_removed_now(life, uid.as_deref());
            let is_slow = is_gone || uid.is_some() && self.hits(Fault::Delay, 3);
            let way = match (is_gone, is_slow) {
                (true, _) => self.rng.random_range(SLOW / 5..3 * SLOW),
                (false, true) => self.rng.random_range(0..SLOW),
                (false, false) => self.rng.random_range(0..5),
            };
            self.after(way, What::Answer { life, id, answer });
        }
    }

    /// Somebody removes a pod that a request has just found bound. The watch of the process shows that
    /// before the answer comes, or begins again with a list without the pod.
    fn is_removed_now(&mut self, life: u64, uid: Option<&str>) -> bool {
        let is_bound = |uid: &&str| self.api.pods.get(*uid).is_some_and(Pod::is_placed);
        let Some(uid) = uid.filter(is_bound) else { return false };
        let is_removed = self.hits(Fault::Force, if self.settings.has_rests { 60 } else { 20 });
        if is_removed {
            self.api.remove(uid);
            self.stick(life, 0);
            self.process_mut(life).into_iter().for_each(|replica| replica.deaf_until = 0);
            if self.hits(Fault::Relist, 50) {
                let time = self.rng.random_range(5..100);
                self.after(time, What::Listed { life });
            }
        }
        is_removed
    }

    /// An answer reaches the extender.
    pub(super) fn answer(&mut self, life: u64, id: CallId, answer: Result<ApiAnswer, Lost>) {
        let body = answer.as_ref().ok().and_then(|answer| answer.body.as_deref());
        let pod: Value = serde_json::from_slice(body.unwrap_or_default()).unwrap_or_default();
        let uid = PodUid::new(pod["metadata"]["uid"].as_str().unwrap_or_default());
        let is_about = self.is_about(life, id, uid.as_str());
        let gone = self.gone_of(life, id, &answer);
        self.note_answer(life, id, &answer);
        let was_waiting = self.process(life).is_some_and(|it| it.app.pods.is_shown_waiting(&uid));
        self.step(life, StepEvent::Answered { id, answer });
        if let Err(broken) = gone.map_or(Ok(()), |uid| self.check_gone(life, &uid)) {
            self.broke(broken);
        }
        if is_about
            && was_waiting
            && let Err(broken) = self.check_answer(life, &pod)
        {
            self.broke(broken);
        }
    }

    /// A process that has given up the room which an earlier one noted pauses.
    fn note_given_up(&mut self, life: u64, uid: Option<&str>, metadata: &Value) {
        let has_ended = metadata["annotations"].get(HOLD).is_some_and(Value::is_null);
        if let Some(uid) = uid.filter(|_| has_ended)
            && let Some(replica) = self.process_mut(life)
        {
            replica.stood.insert(uid.to_owned());
        }
    }

    /// Checks the note of a room, if a write has one and is not refused for its version.
    fn note_room(&mut self, life: u64, uid: Option<&str>, metadata: &Value) {
        if let Some(note) = metadata["annotations"].get(HOLD)
            && let Some(pod) = uid.and_then(|uid| self.api.pods.get(uid))
            && *version_of(metadata) == *pod.version.to_string()
        {
            let note = note.as_str().and_then(RoomNote::read);
            let (holder, priority) = (uid.unwrap_or_default(), pod.of.priority);
            self.note_victims(holder, note.as_ref());
            let times = (self.now, self.is_first_set_in_vain(holder));
            let noted = self.preempted.note(life, (holder, priority), note, times);
            noted.err().into_iter().for_each(|broken| self.broke(broken));
        }
    }

    /// Checks a write that arrives: who may post a Binding, and what may be overwritten.
    fn note_write(
        &mut self,
        (life, id): (u64, CallId),
        request: &Request<Vec<u8>>,
        uid: Option<&str>,
    ) {
        let path = request.uri().path();
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let metadata = &body["metadata"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        // Without a placement nothing is allocated: two such Bindings bind the pod once.
        if path.ends_with("/binding") && metadata["annotations"].is_object() {
            let key = (text(&metadata["uid"]), text(&metadata["resourceVersion"]));
            let own = self.written.get(&(life, key.0.clone())).copied();
            let is_void = own > key.1.parse().ok();
            let first =
                if is_void { life } else { *self.posted.entry(key.clone()).or_insert(life) };
            if first != life {
                self.broke(format!("processes {first} and {life} posted a Binding of {key:?}"));
            }
            let own = text(&metadata["annotations"][FENCE]);
            // A replica knows the Bindings of earlier leaders; a process alone has to write first.
            let is_alone = self.settings.replicas == 1;
            let is_foreign = |was: &&String| {
                let (was, own) = (FenceWriter::of(was), FenceWriter::of(&own));
                was > own || is_alone && was != own
            };
            let pod = uid.and_then(|uid| self.api.pods.get(uid));
            let pod = pod.filter(|pod| pod.node.is_none() && pod.version.to_string() == key.1);
            if let Some(was) = pod.and_then(|pod| pod.annotations.get(FENCE)).filter(is_foreign) {
                self.broke(format!("`{own}` binds a version that `{was}` fenced"));
            }
            // A late one may name an earlier pod of the same name.
            if let Err(broken) = self.check_group(&key.0) {
                self.broke(broken);
            }
        }
        let is_of_pod = body["deleteOptions"]["preconditions"]["uid"].as_str() == uid;
        if path.ends_with("/eviction")
            && is_of_pod
            && let Some(pod) = uid.and_then(|uid| self.api.pods.get(uid))
        {
            let is_excused = pod.takes.iter().any(|(id, ..)| self.excused.contains(id));
            let is_kept = uid.is_some_and(|uid| self.lent.keeps(uid));
            let is_over = self.settings.faults.contains(&Fault::Eviction)
                && (pod.overuses() || is_excused || is_kept);
            // Only as an over-quota pod one goes whose class protects it.
            let priority = if pod.of.is_protected { i64::MAX - 1 } else { pod.of.priority };
            let is_asked = uid.is_some_and(|uid| self.preempted.may_evict(uid, priority));
            if !is_over && !is_asked && !is_dry_run(&body) {
                self.broke(format!("{uid:?} is evicted, which was not requested"));
            } else if !is_over && !is_dry_run(&body) {
                self.preempted.evicted(uid.unwrap_or_default(), (life, id));
            }
        }
        self.note_room(life, uid, metadata);
        self.note_given_up(life, uid, metadata);
        let written = metadata["annotations"][FENCE].as_str().unwrap_or_default();
        let version = &metadata["resourceVersion"];
        let pod = uid.and_then(|uid| self.api.pods.get(uid));
        // The first fence of a process goes on any version: it is older than all that it wrote.
        let is_first = written.contains(" start-") || written.contains(" settle-");
        if let Some(pod) = pod.filter(|_| request.method() == "PATCH" && !written.is_empty())
            && !is_first
            && (version.is_null() || *version == *pod.version.to_string())
        {
            let is_later = |was: &String| FenceWriter::of(was) > FenceWriter::of(written);
            if pod.annotations.get(FENCE).is_some_and(is_later) {
                let was = &pod.annotations[FENCE];
                self.broke(format!("`{written}` overwrites the fence `{was}` of a later process"));
            }
        }
    }

    /// What is promised of a Binding when it is posted.
    fn check_binding(&self, life: u64, request: &Request<Vec<u8>>) -> Result<(), String> {
        let Some(replica) = self.process(life) else { return Ok(()) };
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        let metadata = &body["metadata"];
        if !metadata["uid"].is_string() || !metadata["resourceVersion"].is_string() {
            return Err(format!("a Binding without preconditions: {body}"));
        }
        let uid = metadata["uid"].as_str().unwrap_or_default();
        let node = body["target"]["name"].as_str().unwrap_or_default();
        if let Some(since) = replica.stopping_since.filter(|since| *since < self.now) {
            return Err(format!("{uid} is bound by a process that stops since {since} ms"));
        }
        match replica.calls.get(uid) {
            Some(called) if self.now > called + HTTP_TIMEOUT => {
                return Err(format!("{uid} is bound for a call of {called} ms, which has ended"));
            }
            Some(_) => {}
            None => return Err(format!("{uid} is bound without a call")),
        }
        if metadata["annotations"].is_null() {
            return Ok(()); // no GPU
        }
        self.check_leftovers(replica, uid, &body)?;
        self.check_guests(uid, &body)?;
        if self.settings.lends_memory {
            self.check_memory(replica, uid, &body)?;
        }
        self.check_node(replica, uid, node)
    }

    /// No pod gets all of a device on which a process of an ended pod runs, once reports show it.
    fn check_leftovers(&self, replica: &Replica, uid: &str, body: &Value) -> Result<(), String> {
        let placement = body["metadata"]["annotations"][PLACEMENT].as_str().unwrap_or_default();
        let placement: Value = serde_json::from_str(placement).unwrap_or_default();
        let called = replica.calls.get(uid).copied().unwrap_or_default();
        for device in placement["devices"].as_array().into_iter().flatten() {
            let (id, mib) = (device["id"].as_str().unwrap_or_default(), device["mib"].as_u64());
            // One that was made for the pod is new.
            if !replica.sampled.contains_key(id) && !self.is_made(id) {
                return Err(format!("{uid} gets {id}, which no report has named"));
            }
            let is_left = |((other, on), since): &(&(String, String), &u64)| {
                let is_over = self.api.pods.get(other).is_none_or(|pod| !pod.is_placed());
                let is_held =
                    || replica.app.ledger.reservation(&PodUid::new(other.as_str())).is_some();
                on == id && **since < called && is_over && !is_held()
            };
            if let Some(((other, _), _)) = replica.shown.iter().find(is_left)
                && self.processes.contains_key(other)
                && mib >= self.reported.get(id).copied()
            {
                return Err(format!("{uid} gets all of {id}, where {other} still runs"));
            }
        }
        Ok(())
    }

    /// No pod is bound while a guest still runs in its room.
    fn check_guests(&self, uid: &str, body: &Value) -> Result<(), String> {
        let placement = body["metadata"]["annotations"][PLACEMENT].as_str().unwrap_or_default();
        let placement: Value = serde_json::from_str(placement).unwrap_or_default();
        for device in placement["devices"].as_array().into_iter().flatten() {
            let id = device["id"].as_str().unwrap_or_default();
            if self.excused.contains(id) || self.claimed.contains(id) {
                continue;
            }
            let takes = |pod: &Pod| {
                let mine = pod.takes.iter().filter(|(on, ..)| on == id);
                mine.map(|(_, mib, _)| mib).sum::<u64>()
            };
            let placed = self.api.pods.values().filter(|pod| pod.is_placed());
            let allocated: u64 = placed.map(takes).sum();
            let guests = self.processes.iter().filter(|(other, process)| {
                let pod = self.api.pods.get(*other).filter(|pod| pod.is_placed());
                pod.is_some_and(|pod| takes(pod) == 0 && pod.is_movable()) && process.ends.is_none()
            });
            let on = guests.flat_map(|(_, it)| it.occupies(self.now)).filter(|(on, _)| on == id);
            let borrowed: u64 = on.map(|(_, mib)| mib).sum();
            let own = device["mib"].as_u64().unwrap_or_default();
            let has = self.reported.get(id).copied().unwrap_or(GPU_MIB);
            if borrowed > 0 && allocated + borrowed + own > has {
                return Err(format!("{uid} is bound to {id}, where guests still run"));
            }
        }
        Ok(())
    }

    fn check_node(&self, replica: &Replica, uid: &str, node: &str) -> Result<(), String> {
        let passed = replica.passed.get(uid).filter(|_| !replica.unfiltered.contains(uid));
        if passed.is_some_and(|passed| !passed.contains(node)) {
            return Err(format!("{uid} is bound to {node}, and *filter* passed {passed:?}"));
        }
        self.check_work(replica, uid, node)?;
        match self.silent_since(replica, node, SILENT_FOR + BINDS_FOR) {
            Some(heard) => {
                Err(format!("{uid} is bound to {node}, which reported at {heard} ms last"))
            }
            None => Ok(()),
        }
    }

    /// When a process has heard of this node last, if that is so long ago.
    fn silent_since(&self, replica: &Replica, node: &str, time: u64) -> Option<u64> {
        let at = self.nodes.iter().position(|it| it.name == node)?;
        let heard = replica.heard.get(&at).copied().unwrap_or_default();
        let heard = heard.max(replica.thawed).max(replica.started);
        let is_silent = self.now > heard + time;
        (is_silent && self.nodes[at].agents.len() == 1 && !self.lied(at)).then_some(heard)
    }

    /// *filter* passes no silent node for a pod that requests a GPU, but one where its Binding may
    /// still arrive.
    pub(super) fn check_passed(
        &self,
        life: u64,
        uid: &str,
        names: &BTreeSet<String>,
    ) -> Result<(), String> {
        let Some(replica) = self.process(life) else { return Ok(()) };
        let is_held = || replica.app.ledger.reservation(&PodUid::new(uid)).is_some();
        for node in names {
            let heard = self.silent_since(replica, node, SILENT_FOR);
            if let Some(heard) = heard.filter(|_| !is_held()) {
                return Err(format!("{uid} may go to {node}, which reported at {heard} ms last"));
            }
            if let Some(work) = replica.works.refusing(node).filter(|_| !is_held()) {
                return Err(format!("{uid} may go to {node}, with {work}"));
            }
        }
        Ok(())
    }

    /// Whether the node's agent lies, so that its own reports are not counted as heard.
    fn lied(&self, at: usize) -> bool {
        self.settings.faults.contains(&Fault::Lie) && self.nodes[at].lies_until > 0
    }
}
