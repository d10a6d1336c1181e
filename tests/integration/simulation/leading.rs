//! Several replicas: who leads, and what they say to each other.

use std::time::Duration;

use control::lead::informing::{take_follower, take_message};
use control::shared::leader::Replica;
use futures::FutureExt;
use hyper::Request;
use kube_api::write::leader_lease::LeaseName;
use kube_api::write::target::PodKey;
use rand::Rng;
use runtime::step::outside::{ApiAnswer, CallId, Lost, StepEvent};

use super::faults::Fault;
use super::{Sent, What, World};

/// What a process is among others.
pub(super) fn replica(place: usize, life: u64) -> Replica {
    let pod = format!("gpupack-{place}");
    let address = format!("http://replica-{life}:8080");
    Replica {
        identity: Replica::identity(&pod, life),
        pod: PodKey::new("gpu-system", &pod).expect("a name"),
        lease: LeaseName { namespace: "gpu-system".to_owned(), name: "gpupack".to_owned() },
        holds_for: Duration::from_secs(3),
        address,
        secret: format!("secret-{life}"),
    }
}

impl World {
    /// The replica that the Lease names, if it runs.
    pub(super) fn leader(&self) -> Option<usize> {
        let lease = self.api.lease.as_ref()?;
        let holder = lease["spec"]["holderIdentity"].as_str()?;
        let life = u64::from_str_radix(holder.rsplit_once('_')?.1, 16).ok()?;
        self.replicas.iter().position(|it| it.as_ref().is_some_and(|it| it.life == life))
    }

    /// A list that a process wants.
    pub(super) fn plan_list(&mut self, life: u64) {
        let Some(replica) = self.process_mut(life) else { return };
        if replica.is_listed && !replica.is_list_due && replica.app.pods.lists.is_wanted() {
            replica.is_list_due = true;
            let time = self.rng.random_range(5..500);
            self.after(time, What::Listed { life });
        }
    }

    /// A process that another one has replaced ends, and so does one that has handed over.
    pub(super) fn end_replaced(&mut self, life: u64) {
        let Some(replica) = self.process(life) else { return };
        if replica.app.lead.replaced().now_or_never().is_some() {
            self.after(0, What::Crash { life });
        }
    }

    /// Sends a message to another replica.
    pub(super) fn send_message(
        &mut self,
        life: u64,
        id: CallId,
        request: Box<Request<Vec<u8>>>,
        within: u64,
    ) {
        let host = request.uri().host().unwrap_or_default();
        let to = host.trim_start_matches("replica-").parse().unwrap_or_default();
        let way = self.rng.random_range(0..5);
        let lost = |what| What::Answer { life, id, answer: Err(what) };
        if self.process(to).is_none() {
            let fault = "connection refused".to_owned();
            return self.after(way, lost(Lost::Transport { fault }));
        }
        self.after(within, lost(Lost::Timeout));
        if self.hits(Fault::Loss, 5) {
            return;
        }
        let way = if self.hits(Fault::Delay, 5) { way + within * 4 } else { way };
        self.after(way, What::Message { life, to, id, request: Sent(request) });
    }

    /// A message reaches another replica.
    pub(super) fn message(&mut self, life: u64, to: u64, id: CallId, request: &Request<Vec<u8>>) {
        let now = self.now;
        let Some(replica) = self.process(to) else { return };
        replica.set_time(now);
        let app = &replica.app;
        let body = request.body();
        let is_taken = match request.uri().path() {
            "/v1/replicas/bindings" => {
                take_message(app, serde_json::from_slice(body).expect("a message"))
            }
            "/v1/replicas/join" => {
                take_follower(app, serde_json::from_slice(body).expect("a message"))
            }
            path => panic!("a replica sent {path}"),
        };
        if is_taken && request.uri().path() == "/v1/replicas/bindings" {
            self.note_told(life, to, body);
        }
        let status = if is_taken { 200 } else { 409 };
        let way = self.rng.random_range(0..5);
        if !self.hits(Fault::Loss, 5) {
            let answer = Ok(ApiAnswer { status, body: Some(Vec::new()), date: None });
            self.after(way, What::Answer { life, id, answer });
        }
        self.step(to, StepEvent::Changed);
    }

    /// At the end one replica leads, and all others could.
    pub(super) fn check_replicas(&self) -> Result<(), String> {
        let running: Vec<_> = self.replicas.iter().flatten().collect();
        let leading = running.iter().filter(|it| it.app.lead.leading.is_here()).count();
        if leading != 1 {
            return Err(format!("{leading} replicas lead at the end: {:?}", self.api.lease));
        }
        let leader = running.iter().find(|it| it.app.lead.leading.is_here());
        let own =
            leader.and_then(|it| it.app.lead.replica.as_ref()).map(|it| it.pod.name().to_owned());
        if !self.api.labeled.iter().eq(&own) {
            return Err(format!("{own:?} leads, but {:?} have the label", self.api.labeled));
        }
        match running.iter().find(|it| !it.app.lead.is_informed()) {
            Some(behind) => {
                Err(format!("process {} follows uninformed: {:?}", behind.life, self.api.lease))
            }
            None => Ok(()),
        }
    }
}
