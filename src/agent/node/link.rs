//! The loop that reports one node to one extender.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use tokio::sync::watch;

use crate::gpu::clearing::Clearing;
use crate::gpu::sample::Sample;
use crate::mig::on_demand::MigOnDemand;
use crate::node::config::{AgentNode, Extender};
use crate::node::session::{ContactChange, ExtenderAnswer, Next, Session};
use crate::upkeep::condition::LastAccepted;
use runtime::clock::Clock;
use wire::report::bodies::{ClearOutcome, Outcome, Report};
use wire::units::Timestamp;

/// Longest time between two questions of an agent that has nothing to report yet.
const ASK_EVERY: Duration = Duration::from_secs(2);

/// Reports one node to one extender.
pub(crate) struct Link {
    pub(crate) node: Arc<AgentNode>,
    /// Number of the link to this extender.
    pub(crate) number: usize,
    pub(crate) extender: Arc<Extender>,
    /// The state of the conversation.
    pub(crate) session: Session,
    pub(crate) newest: watch::Receiver<Option<Arc<Sample>>>,
    pub(crate) clock: Clock,
    pub(crate) period: Duration,
    /// When a report of this process was last accepted.
    pub(crate) accepted: LastAccepted,
    /// When the last report was sent.
    pub(crate) sent: Timestamp,
    /// Whether the log says that this node's reports are refused.
    pub(crate) is_refused: bool,
}

impl Link {
    /// Reports until the sampler ends.
    pub(crate) async fn run(mut self) {
        self.ask_for_library().await;
        // Ends with the process: the sampler never drops its end earlier.
        while self.newest.changed().await.is_ok() {
            let elapsed = self.clock.now().since(self.sent);
            let has_outcome = self.clear_outcome().is_some();
            let is_needed = |sample: &Arc<Sample>| {
                has_outcome || self.session.needs(sample, elapsed, self.period)
            };
            if !self.newest.borrow_and_update().as_ref().is_some_and(is_needed) {
                continue;
            }
            let mut next = Next::NewSession;
            while next == Next::NewSession {
                next = self.exchange().await;
            }
            if let Next::Pause(pause) = next {
                // Half of the pause is random, so that agents do not all come back together.
                let part = rand::rng().random_range(500..=1_000_u32);
                tokio::time::sleep(pause.saturating_mul(part) / 1_000).await;
            }
        }
    }

    /// Asks whether NVIDIA's library may be open, until there is something to report: the replies say so from
    /// then on.
    async fn ask_for_library(&mut self) {
        if self.node.gate.is_none() {
            return;
        }
        while self.newest.borrow().is_none() {
            if let Some(failure) = self.ask().await {
                self.log_changes(&failure);
            }
            let part = rand::rng().random_range(500..=1_000_u32);
            tokio::select! {
                () = tokio::time::sleep(ASK_EVERY.saturating_mul(part) / 1_000) => {}
                seen = self.newest.wait_for(Option::is_some) => if seen.is_err() { return },
            }
        }
        // The first sample is news for the loop of reports.
        self.newest.mark_changed();
    }

    /// Asks once. Returns what went wrong.
    async fn ask(&mut self) -> Option<ExtenderAnswer> {
        let gate = self.node.gate.clone()?;
        match self.extender.client.library(&self.node.name).await {
            Ok(closed) => {
                gate.learn(self.number, closed);
                // It answers, whatever it says about reports.
                self.settle_contact(&ExtenderAnswer::SessionExpired);
                None
            }
            Err(failure) => {
                gate.lose(self.number);
                Some(*failure)
            }
        }
    }

    /// What became of the order to clear a GPU.
    fn clear_outcome(&self) -> Option<ClearOutcome> {
        self.node.clearing.as_ref().and_then(Clearing::outcome)
    }

    /// One report and its answer.
    async fn exchange(&mut self) -> Next {
        let clear_outcome = self.clear_outcome();
        let (session, newest) = (&mut self.session, &mut self.newest);
        self.sent = self.clock.now();
        // The first sample exists: links wait for it before they come here.
        let Some(mut sample) = newest.borrow_and_update().clone() else { return Next::NextSample };
        let answer = self.extender.client.put(&self.node.name, || {
            let newer = newest.borrow_and_update().clone();
            // A list is not lost to a later sample without one.
            if let Some(newer) = newer.filter(|newer| newer.has_lists() || !sample.has_lists()) {
                sample = newer;
            }
            let promises = self.node.mig.as_ref().and_then(MigOnDemand::promises);
            let clear_outcome = clear_outcome.clone();
            Report { mig_promises: promises, clear_outcome, ..session.report(&sample) }
        });
        let answer = answer.await;
        self.take_orders(&answer);
        if matches!(&answer, ExtenderAnswer::Reply(reply) if reply.outcome == Outcome::Accepted) {
            self.accepted.note(self.clock.now());
        }
        let next = self.session.settle(&answer);
        self.log_changes(&answer);
        let is_refused = matches!(answer, ExtenderAnswer::Refused { .. });
        self.take_allocations(answer);
        if is_refused {
            // It takes no report of this node, and may say all the same what is done with the driver.
            self.ask().await;
        }
        next
    }

    /// Takes the allocations in an answer.
    fn take_allocations(&self, answer: ExtenderAnswer) {
        let mut allocations = self.node.allocations();
        match answer {
            ExtenderAnswer::Reply(reply) => {
                if allocations.learn(self.number, reply.allocations) {
                    self.node.news.notify_one();
                }
            }
            ExtenderAnswer::SessionExpired => {}
            ExtenderAnswer::Refused { .. } | ExtenderAnswer::Away { .. } => {
                allocations.lose(self.number);
            }
        }
    }

    /// Takes the orders in an answer. They end with an answer that is none.
    fn take_orders(&self, answer: &ExtenderAnswer) {
        let AgentNode { mig, limits, clearing, gate, .. } = &*self.node;
        if let Some(gate) = gate {
            match answer {
                ExtenderAnswer::Reply(reply) => {
                    gate.learn(self.number, reply.close_library.clone())
                }
                ExtenderAnswer::SessionExpired => {}
                ExtenderAnswer::Refused { .. } | ExtenderAnswer::Away { .. } => {
                    gate.lose(self.number);
                }
            }
        }
        match answer {
            ExtenderAnswer::Reply(reply) if self.session.obeys(reply) => {
                let now = self.clock.now();
                if let Some(mig) = mig {
                    mig.learn(self.number, reply.mig_orders.clone(), now);
                }
                if let Some(limits) = limits {
                    limits.learn(self.number, reply.memory_limits.clone(), now);
                }
                if let Some(clearing) = clearing {
                    clearing.learn(self.number, reply.clear_orders.as_deref().cloned(), now);
                }
            }
            // It answers an older report, or one of another session: the next one counts.
            ExtenderAnswer::Reply(_) => {}
            ExtenderAnswer::SessionExpired
            | ExtenderAnswer::Refused { .. }
            | ExtenderAnswer::Away { .. } => self.node.lose_orders(self.number),
        }
    }

    /// Logs changes: those of the extender once, whatever the number of nodes, and those of this
    /// node's reports for each node.
    fn log_changes(&mut self, answer: &ExtenderAnswer) {
        let (node, extender) = (&self.node.name, self.extender.client.address());
        let was_refused = self.is_refused;
        self.is_refused = matches!(answer, ExtenderAnswer::Refused { .. });
        match answer {
            ExtenderAnswer::Refused { error } if !was_refused => {
                tracing::error!(%node, extender, error, "the extender refuses this node's agent");
            }
            ExtenderAnswer::Reply(_) if was_refused => {
                tracing::info!(%node, extender, "the extender takes this node's reports again");
            }
            ExtenderAnswer::Reply(_)
            | ExtenderAnswer::Refused { .. }
            | ExtenderAnswer::SessionExpired
            | ExtenderAnswer::Away { .. } => {}
        }
        self.settle_contact(answer);
    }

    /// Learns whether the extender answers, and logs a change.
    fn settle_contact(&self, answer: &ExtenderAnswer) {
        let extender = self.extender.client.address();
        let mut contact = self.extender.contact.lock();
        match contact.settle(answer, self.clock.now()) {
            Some(ContactChange::Lost { error }) => {
                tracing::warn!(extender, error, "the extender is lost, trying on");
                self.extender.lost.notify_one();
            }
            Some(ContactChange::Found) => {
                tracing::info!(extender, "the extender answers again");
            }
            None => {}
        }
    }
}
