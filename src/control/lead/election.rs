//! Which replica leads: the one that the Lease names, as long as it renews it.
//!
//! A leader renews the Lease three times within the time that it holds it for, and stops writing
//! before that time is over on its own clock, counted from before the renewal was sent. A follower
//! counts the same time from when it first saw that renewal, so it takes over later. Clocks of two
//! machines are never compared. If they run at different speeds, or a process is frozen in the middle
//! of a write, the versions that the successor fences still make that write fail.
//!
//! A process leads once. If another one has led after it, it is to start again.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{Either, select};

use crate::bind::start_fence::{Scope, fence};
use crate::lead::candidate::{AGAIN_AFTER, LeadCandidate, Won, holder_of, valid_until, within};
use crate::shared::app::App;
use crate::shared::leader::{Leader, Replica};
use kube_api::write::leader_lease::{HeldLease, LeaseAnswer};
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// How long calls are refused after the Lease was given away, before and after a successor is known: until
/// the Service names that one.
const REFUSES_FOR: Duration = Duration::from_secs(2);

/// Pause between two looks at the label of the leader, and after one that failed.
const LABELS_EVERY: Duration = Duration::from_secs(10);
const LABEL_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Binds that go on get this time before the Lease is given to another replica.
const LAST_BINDS: Duration = Duration::from_secs(1);

/// Follows and leads until the process ends.
pub(crate) async fn electing(app: &Arc<App>) {
    let Some(replica) = &app.lead.replica else {
        fence(app, Scope::All).await;
        return;
    };
    let Some(won) = LeadCandidate::new(app, replica).follow().await else {
        return app.lead.set_stopping();
    };
    let Won { held, sent, heard } = won;
    app.outside.spawn(keep_label(Arc::clone(app)));
    let scope = match heard {
        Some((bindings, holds)) => Scope::Known { bindings, holds },
        None => Scope::All,
    };
    let leader = Leads { app, replica };
    let fencing = fence(app, scope).then(async |is_done| {
        if is_done {
            std::future::pending::<()>().await;
        }
    });
    let ended = match select(leader.lead(held, sent).boxed(), fencing.boxed()).await {
        Either::Left((end, _)) => end,
        Either::Right(((), _)) => End::Replaced, // the Lease expires
    };
    match ended {
        End::Replaced => {
            tracing::error!("this replica leads no more: it starts again as a follower");
            app.writer.term().end();
            app.lead.leading.set(Leader::Unknown);
            app.lead.replaced.set();
        }
        End::HandedOver => {
            app.outside.spawn(watch_successor(Arc::clone(app)));
            let mut leader = app.lead.leading.subscribe();
            let known = leader.wait_for(|leader| *leader == Leader::Elsewhere);
            app.outside.within(REFUSES_FOR, known).await;
            app.outside.sleep(REFUSES_FOR).await;
            app.lead.set_stopping();
        }
    }
}

struct Leads<'a> {
    app: &'a Arc<App>,
    replica: &'a Replica,
}

enum End {
    Replaced,
    HandedOver,
}

impl Leads<'_> {
    /// Renews the Lease until another replica has it.
    async fn lead(&self, mut held: HeldLease, sent: Timestamp) -> End {
        let Self { app, replica } = self;
        let mut due = sent.plus(replica.holds_for / 3);
        loop {
            let left = due.since(app.clock.now());
            tokio::select! {
                biased;
                () = app.lead.leaving.wait() => return self.hand_over(held).await,
                () = app.binding.in_flight.is_to_be_written() => {}
                () = app.outside.sleep(left) => {}
            }
            let (sent, informed) = (app.clock.now(), app.binding.in_flight.informed());
            due = sent.plus(replica.holds_for / 3);
            let renewed = app.clock.unix_micros().max(held.renewed + 1);
            let next = HeldLease { renewed, informed: informed.clone(), ..held.clone() };
            match app.writer.write_lease(&replica.lease, &next, within(replica)).await {
                LeaseAnswer::Is(now) => {
                    held = HeldLease { version: now.version, ..next };
                    app.writer.term().renew(valid_until(replica, sent));
                    app.binding.in_flight.written(&informed);
                    app.lead.leading.set(Leader::Here);
                }
                LeaseAnswer::Changed | LeaseAnswer::Missing | LeaseAnswer::Failed(_) => {
                    match self.reread(held).await {
                        Some(known) => held = known,
                        None => return End::Replaced,
                    }
                    app.outside.sleep(AGAIN_AFTER).await;
                    due = app.clock.now();
                }
            }
            app.leads(); // notes that the term has ended, if it has
        }
    }

    /// The Lease to renew after a renewal failed, in its newest version; `None` if another replica has
    /// led, or may have.
    async fn reread(&self, held: HeldLease) -> Option<HeldLease> {
        match self.app.writer.read_lease(&self.replica.lease, within(self.replica)).await {
            LeaseAnswer::Is(now) if (&now.holder, now.term) == (&held.holder, held.term) => {
                let renewed = held.renewed.max(now.renewed);
                Some(HeldLease { version: now.version, renewed, ..held })
            }
            LeaseAnswer::Is(_) => None,
            LeaseAnswer::Missing if self.app.writer.term().is_valid() => {
                Some(HeldLease { version: String::new(), ..held })
            }
            LeaseAnswer::Missing => None,
            LeaseAnswer::Changed | LeaseAnswer::Failed(_) => Some(held),
        }
    }

    /// Lets the binds that go on end, and gives the Lease away. New calls wait for the successor.
    async fn hand_over(&self, held: HeldLease) -> End {
        let Self { app, replica } = self;
        app.lead.leading.set(Leader::Unknown);
        let began = app.clock.now();
        let waits = !mutated(Mutation::HandsOverAtOnce);
        while waits && app.binding.binds.are_open() && app.clock.now().since(began) < LAST_BINDS {
            app.outside.sleep(Duration::from_millis(5)).await;
        }
        app.writer.term().end();
        let next = HeldLease {
            holder: String::new(),
            handed_over: held.term,
            informed: app.binding.in_flight.informed(),
            ..held.clone()
        };
        let mut answer = app.writer.write_lease(&replica.lease, &next, within(replica)).await;
        if !matches!(answer, LeaseAnswer::Is(_))
            && let Some(now) = self.reread(held).await
        {
            let next = HeldLease { version: now.version, ..next };
            answer = app.writer.write_lease(&replica.lease, &next, within(replica)).await;
        }
        let is_given = matches!(answer, LeaseAnswer::Is(_));
        tracing::info!(is_given, "gave the Lease away");
        End::HandedOver
    }
}

/// Notes who leads next, so that calls that still come here need not wait long.
async fn watch_successor(app: Arc<App>) {
    let Some(replica) = &app.lead.replica else { return };
    loop {
        let answer = app.writer.read_lease(&replica.lease, within(replica)).await;
        if let LeaseAnswer::Is(held) = answer
            && held.holder != replica.identity
        {
            app.lead.leading.set(holder_of(&held));
        }
        app.outside.sleep(AGAIN_AFTER).await;
    }
}

/// Keeps the label that the Service selects on the pod of this replica alone, while it leads. A leader that ended
/// may have left it on another one, and others may take it away.
async fn keep_label(app: Arc<App>) {
    let Some(replica) = &app.lead.replica else { return };
    while !app.lead.is_stopping() && !app.lead.replaced.is_set() {
        let mut pause = LABEL_AGAIN_AFTER;
        if app.writer.term().is_valid() {
            match app.writer.label_leader(&replica.pod).await {
                Ok(()) => pause = LABELS_EVERY,
                Err(cause) => tracing::warn!(%cause, "could not label the pod of the leader alone"),
            }
        }
        app.outside.sleep(pause).await;
    }
}

#[cfg(test)]
mod tests;
