//! A replica that follows, until it leads.

use std::sync::Arc;
use std::time::Duration;

use crate::lead::informing::join;
use crate::shared::app::App;
use crate::shared::in_flight::{HeldPod, NamedPod};
use crate::shared::leader::{Leader, Replica};
use crate::shared::log_limit::LogLimit;
use kube_api::write::leader_lease::{HeldLease, LeaseAnswer};
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// Pause between two looks at the Lease of another replica.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Pause before a failed read or write is tried again.
pub(crate) const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// A replica that has not listed pods and nodes leaves a free Lease this long to one that has.
const WARM_FIRST: Duration = Duration::from_secs(2);

static LOGGED: LogLimit = LogLimit::new();

pub(crate) struct LeadCandidate<'a> {
    pub(crate) app: &'a Arc<App>,
    pub(crate) replica: &'a Replica,
    seen: Option<SeenLease>,
}

/// The Lease, as it was last read.
struct SeenLease {
    /// Its version is empty while there is none.
    held: HeldLease,
    /// When that version was first seen.
    since: Timestamp,
}

/// What begins with a term.
pub(crate) struct Won {
    pub(crate) held: HeldLease,
    /// When the claim was sent.
    pub(crate) sent: Timestamp,
    /// What the last leader said may be on its way, and its holds; `None` if this replica did not
    /// hear all of it.
    pub(crate) heard: Option<(Vec<NamedPod>, Vec<HeldPod>)>,
}

/// A claim whose answer was lost.
struct Tried {
    own: HeldLease,
    sent: Timestamp,
    was_informed: bool,
}

impl<'a> LeadCandidate<'a> {
    pub(crate) fn new(app: &'a Arc<App>, replica: &'a Replica) -> Self {
        Self { app, replica, seen: None }
    }

    /// Follows until this replica leads; `None` if it is to stop.
    pub(crate) async fn follow(mut self) -> Option<Won> {
        let mut tried: Option<Tried> = None;
        let mut joined = None;
        while !self.app.lead.leaving.is_set() {
            let lease = &self.replica.lease;
            let free = match self.app.writer.read_lease(lease, self.within()).await {
                LeaseAnswer::Is(held) => {
                    if let Some(Tried { own, sent, was_informed }) = tried.take()
                        && (&held.holder, held.term) == (&own.holder, own.term)
                    {
                        return Some(self.win(*held, sent, was_informed));
                    }
                    self.see(*held)
                }
                LeaseAnswer::Missing => self.see_none(),
                LeaseAnswer::Changed => None,
                LeaseAnswer::Failed(cause) => {
                    if let Some(left_out) =
                        LOGGED.admits(("lease", "unread"), self.app.clock.precise())
                    {
                        tracing::warn!(%cause, lease = %lease.name, left_out, "could not read the Lease: is the role in rbac.yaml applied?");
                    }
                    self.app.outside.sleep(AGAIN_AFTER).await;
                    continue;
                }
            };
            let Some(free) = free else {
                self.join(&mut joined).await;
                self.rest().await;
                continue;
            };
            let (sent, own) = (self.app.clock.now(), self.claim(&free));
            let was_informed = free.informed.contains(&self.replica.identity)
                || mutated(Mutation::UninformedTrusted);
            match self.app.writer.write_lease(lease, &own, self.within()).await {
                LeaseAnswer::Is(held) => return Some(self.win(*held, sent, was_informed)),
                LeaseAnswer::Failed(_) => tried = Some(Tried { own, sent, was_informed }),
                LeaseAnswer::Missing | LeaseAnswer::Changed => {}
            }
            self.app.outside.sleep(AGAIN_AFTER).await;
        }
        None
    }

    /// Notes what the Lease says. The Lease, if this replica may take it now.
    fn see(&mut self, held: HeldLease) -> Option<HeldLease> {
        let now = self.app.clock.now();
        let known = self.seen.as_ref().filter(|seen| seen.held.version == held.version);
        let since = known.map_or(now, |seen| seen.since);
        let is_free = self.is_free(&held, since);
        self.seen = Some(SeenLease { held: held.clone(), since });
        if is_free {
            self.app.lead.leading.set(Leader::Unknown);
            return Some(held);
        }
        self.app.lead.heard.listen(held.term, &held.secret);
        self.app.lead.set_informed(held.informed.contains(&self.replica.identity));
        self.app.lead.leading.set(holder_of(&held));
        None
    }

    /// Notes that there is no Lease: it was deleted, or this is the first start. Its last holder
    /// may still lead.
    fn see_none(&mut self) -> Option<HeldLease> {
        let last = self.seen.take().map(|seen| (seen.held, seen.since));
        let (held, since) = match last {
            Some((held, since)) if held.version.is_empty() => (held, since),
            Some((held, _)) => {
                let none = HeldLease { version: String::new(), informed: Vec::new(), ..held };
                (none, self.app.clock.now())
            }
            None => (
                HeldLease { holds_for: self.replica.holds_for, ..HeldLease::default() },
                self.app.clock.now(),
            ),
        };
        let is_free = self.app.clock.now() >= self.expiry(&held, since);
        let free = is_free.then(|| held.clone());
        self.seen = Some(SeenLease { held, since });
        self.app.lead.leading.set(Leader::Unknown);
        free
    }

    fn is_free(&self, held: &HeldLease, since: Timestamp) -> bool {
        if self.app.clock.now() >= self.expiry(held, since) {
            return true;
        }
        // One that knows all Bindings on their way comes first.
        let is_first = held.informed.is_empty() || held.informed.contains(&self.replica.identity);
        let is_own_pod = Replica::pod_of(&held.holder) == Replica::pod_of(&self.replica.identity);
        is_first && (held.is_handed_over() || is_own_pod)
    }

    /// When this replica may take a Lease that is not renewed.
    fn expiry(&self, held: &HeldLease, since: Timestamp) -> Timestamp {
        if mutated(Mutation::LeaseTakenEarly) {
            return since.plus(held.holds_for / 3);
        }
        let patience = if self.app.ledger.is_listed() { Duration::ZERO } else { WARM_FIRST };
        since.plus(held.holds_for.max(Duration::from_secs(1)) + patience)
    }

    /// Asks the leader for its messages, if it does not name this replica yet.
    async fn join(&self, joined: &mut Option<Timestamp>) {
        let (Some(SeenLease { held, .. }), now) = (&self.seen, self.app.clock.now()) else {
            return;
        };
        let is_due = joined.is_none_or(|at| now.since(at) >= LOOK_EVERY);
        let is_informed = held.informed.contains(&self.replica.identity);
        if is_due && !is_informed && !held.holder.is_empty() && self.app.ledger.is_listed() {
            *joined = Some(now);
            join(self.app, self.replica, held).await;
        }
    }

    async fn rest(&self) {
        let now = self.app.clock.now();
        let expiry = self.seen.as_ref().map(|SeenLease { held, since }| self.expiry(held, *since));
        let pause = expiry.map_or(AGAIN_AFTER, |expiry| expiry.since(now).min(LOOK_EVERY));
        self.app.outside.sleep(pause).await;
    }

    /// The Lease with this replica as its holder.
    fn claim(&self, free: &HeldLease) -> HeldLease {
        let now = self.app.clock.unix_micros();
        let Replica { identity, holds_for, address, secret, .. } = self.replica;
        HeldLease {
            version: free.version.clone(),
            holder: identity.clone(),
            holds_for: *holds_for,
            term: self.app.clock.unix_seconds().max(free.term.saturating_add(1)),
            handed_over: 0,
            transitions: free.transitions.saturating_add(1),
            acquired: now,
            renewed: now,
            address: address.clone(),
            informed: Vec::new(),
            secret: secret.clone(),
        }
    }

    /// Begins the term. A follower that was informed knows every Binding that may still arrive.
    fn win(self, held: HeldLease, sent: Timestamp, was_informed: bool) -> Won {
        let heard = self.app.lead.heard.close();
        let bindings = heard.0.len();
        tracing::info!(term = held.term, was_informed, bindings, "this replica leads");
        self.app.writer.term().begin(held.term, valid_until(self.replica, sent));
        self.app.lead.set_leading(self.app.clock.now());
        Won { held, sent, heard: was_informed.then_some(heard) }
    }

    /// Time for one call about the Lease.
    fn within(&self) -> Duration {
        within(self.replica)
    }
}

/// The leader that a Lease names.
pub(crate) fn holder_of(held: &HeldLease) -> Leader {
    if held.holder.is_empty() { Leader::Unknown } else { Leader::Elsewhere }
}

/// Until when a replica may write after a renewal was sent.
pub(crate) fn valid_until(replica: &Replica, sent: Timestamp) -> Timestamp {
    sent.plus(replica.holds_for * 5 / 6)
}

/// Time for one call about the Lease.
pub(crate) fn within(replica: &Replica) -> Duration {
    replica.holds_for / 3
}
