//! Which replica acts. All replicas observe; one posts Bindings, requeues and evictions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use crate::shared::in_flight::Heard;
use kube_api::write::leader_lease::LeaseName;
use kube_api::write::target::PodKey;
use runtime::step::news::Flag;
use runtime::step::pulse::Pulse;
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// The replica that acts, as this one knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leader {
    /// This replica: it answers kube-scheduler and writes.
    Here,
    Elsewhere,
    /// None is known. One appears within seconds.
    Unknown,
    /// This replica led until it could not renew the Lease. Another one may lead by now, and this one
    /// does not hear of it.
    Lapsed,
}

/// One of several replicas, before it leads or follows.
#[derive(Clone, Debug)]
pub struct Replica {
    /// Differs from that of every other process, also of an earlier one of this pod.
    pub identity: String,
    /// The pod it runs in.
    pub pod: PodKey,
    /// The Lease that says which replica leads.
    pub lease: LeaseName,
    /// How long a leader that does not renew the Lease keeps it.
    pub holds_for: Duration,
    /// Where it takes messages of the others, such as `http://10.0.0.7:8080`.
    pub address: String,
    /// What the Lease has while this replica leads, so that no other client can speak for it.
    pub secret: String,
}

impl Replica {
    /// The identity of a process in this pod. `random` separates it from earlier ones.
    pub fn identity(pod: &str, random: u64) -> String {
        format!("{pod}_{random:x}")
    }

    /// Whether a text has the form of an identity: it is named in the Lease, in a list.
    pub fn is_identity(text: &str) -> bool {
        text.rsplit_once('_').is_some_and(|(pod, random)| {
            (1..=253).contains(&pod.len())
                && pod.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'))
                && (1..=16).contains(&random.len())
                && random.chars().all(|c| c.is_ascii_hexdigit())
        })
    }

    /// The name of the pod in which a process of this identity runs.
    pub fn pod_of(identity: &str) -> &str {
        identity.rsplit_once('_').map_or(identity, |(pod, _)| pod)
    }
}

/// The leader, with news when it changes.
pub struct Leading(watch::Sender<Leader>);

impl Leading {
    /// At the start of a process. Without other replicas it leads.
    pub fn new(has_replicas: bool) -> Self {
        Self(watch::Sender::new(if has_replicas { Leader::Unknown } else { Leader::Here }))
    }

    /// The leader now.
    pub fn now(&self) -> Leader {
        *self.0.borrow()
    }

    /// Whether this replica acts.
    pub fn is_here(&self) -> bool {
        matches!(*self.0.borrow(), Leader::Here)
    }

    /// Notes the leader.
    pub fn set(&self, leader: Leader) {
        self.0.send_if_modified(|known| {
            let is_new = *known != leader;
            *known = leader;
            is_new
        });
    }

    /// Notes that this replica cannot renew its Lease, if it leads and its term has ended. Also a renewal that
    /// is just noted counts.
    pub(crate) fn lapse(&self, has_ended: impl Fn() -> bool) -> bool {
        self.0.send_if_modified(|known| {
            let lapses = *known == Leader::Here && has_ended();
            if lapses {
                *known = Leader::Lapsed;
            }
            lapses
        })
    }

    /// For news about it.
    pub fn subscribe(&self) -> watch::Receiver<Leader> {
        self.0.subscribe()
    }
}

/// Whether this process acts, and what it is asked to do about that.
pub struct Lead {
    /// This process among its replicas; `None` if there are no others.
    pub replica: Option<Replica>,
    pub leading: Leading,
    /// What the leader says, while this replica follows.
    pub heard: Heard,
    /// Whether the process was frozen.
    pub pulse: Pulse,
    /// Whether the leader's Lease names this replica as one that knows all Bindings on their way.
    is_informed: AtomicBool,
    /// When this replica began to lead, in milliseconds on the clock.
    since: AtomicU64,
    /// Whether this replica is to hand over.
    pub(crate) leaving: Flag,
    /// Whether another replica leads after this one.
    pub(crate) replaced: Flag,
    /// Whether no Binding of an earlier run can succeed any more.
    is_fenced: AtomicBool,
    stopping: Flag,
}

impl Lead {
    /// At the start of a process: one of several replicas does not lead yet.
    pub fn new(replica: Option<Replica>) -> Self {
        Self {
            leading: Leading::new(replica.is_some()),
            replica,
            heard: Heard::default(),
            pulse: Pulse::default(),
            is_informed: AtomicBool::new(false),
            since: AtomicU64::new(0),
            leaving: Flag::default(),
            replaced: Flag::default(),
            is_fenced: AtomicBool::new(false),
            stopping: Flag::default(),
        }
    }

    /// Whether this process is one of several replicas.
    pub(crate) fn has_replicas(&self) -> bool {
        self.replica.is_some()
    }

    /// Notes that the process began to stop. From now on it posts no Binding, since another process
    /// may allocate the same room.
    pub fn set_stopping(&self) {
        self.stopping.set();
    }

    /// Whether the process is stopping.
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_set() && !mutated(Mutation::StopIgnored)
    }

    /// Notes that no Binding of an earlier run can succeed any more.
    pub fn set_fenced(&self) {
        self.is_fenced.store(true, Ordering::Release);
    }

    /// Whether no Binding of an earlier run can succeed any more.
    pub fn is_fenced(&self) -> bool {
        self.is_fenced.load(Ordering::Acquire)
    }

    /// Notes whether the leader's Lease names this replica as one that knows all Bindings on their
    /// way.
    pub(crate) fn set_informed(&self, is_informed: bool) {
        self.is_informed.store(is_informed, Ordering::Release);
    }

    /// Whether this replica could lead at once: it leads, or it knows what the leader knows.
    pub fn is_informed(&self) -> bool {
        self.leading.is_here() || !self.has_replicas() || self.is_informed.load(Ordering::Acquire)
    }

    /// Notes that this replica begins to lead now.
    pub(crate) fn set_leading(&self, now: Timestamp) {
        self.since.store(now.millis(), Ordering::Release);
        self.leading.set(Leader::Here);
    }

    /// When this replica began to lead.
    pub fn since(&self) -> Timestamp {
        Timestamp::from_millis(self.since.load(Ordering::Acquire))
    }

    /// Makes this replica hand over to another one, and then stop. Without others it stops at once.
    pub fn leave(&self) {
        self.leaving.set();
        if !self.has_replicas() {
            self.set_stopping();
        }
    }

    /// Waits until the process begins to stop.
    pub async fn stopped(&self) {
        self.stopping.wait().await;
    }

    /// Waits until another replica leads after this one. This process knows nothing of its own then
    /// that still holds: it is to start again.
    pub async fn replaced(&self) {
        self.replaced.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_leader_whose_term_has_ended_lapses() {
        let leading = Leading::new(false);
        assert!(!leading.lapse(|| false) && leading.is_here());
        assert!(leading.lapse(|| true));
        assert_eq!(leading.now(), Leader::Lapsed);
        leading.set(Leader::Unknown);
        assert!(!leading.lapse(|| true));
        assert_eq!(leading.now(), Leader::Unknown);
    }

    #[test]
    fn an_identity_is_one_word_that_names_its_pod() {
        let identity = Replica::identity("gpupack-7d4f-x2", u64::MAX);
        assert!(Replica::is_identity(&identity), "{identity}");
        assert_eq!(Replica::pod_of(&identity), "gpupack-7d4f-x2");
        for bad in ["", "a", "_1", "a_", "a b_1", "a_1 b_2", "A_1", "a_g", "a_11111111111111111"] {
            assert!(!Replica::is_identity(bad), "{bad}");
        }
        assert!(!Replica::is_identity(&format!("{}_1", "a".repeat(254))));
    }
}
