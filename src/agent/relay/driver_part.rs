//! The part of an agent that has the driver, and the rights that it needs. It opens no port, has no token, and hears of
//! the cluster only what the other part sends over a socket: [`Orders`].
//!
//! Sampler, MIG maker and daemons of MPS are those of an agent that is one process. In place of links there is this
//! loop, so that the other part counts as the only extender.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::gpu::clearing::Clearing;
use crate::gpu::sample::{Probe, Sample};
use crate::node::config::{AgentConfig, AgentNode};
use crate::node::run::{Agent, AgentError};
use crate::relay::conversation::{Conversation, Ended, Ends, next};
use crate::relay::messages::{LONGEST_ORDERS, LONGEST_SEEN, LibraryUse, Orders, Seen};
use runtime::clock::Clock;

/// Time between two looks: at the connection, and for changes of which no task is notified.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The other part has this number, as the link to an extender has one.
const OTHER_PART: usize = 0;

/// What this part is connected to.
#[derive(Debug)]
pub struct DriverPart {
    /// Where the other part listens.
    pub socket: PathBuf,
    /// UUIDs of the devices that kubelet hands out, as the other part says.
    pub of_kubelet: watch::Sender<Option<BTreeSet<String>>>,
}

/// Samples the node `name` by `probe` for the other part, until `stop` is done or only a new container helps.
///
/// # Errors
/// [`AgentError::MadeAgain`].
pub async fn run_driver_part(
    config: &AgentConfig,
    name: &str,
    part: DriverPart,
    probe: impl Probe + 'static,
    stop: impl Future<Output = ()>,
) -> Result<(), AgentError> {
    let mut agent = Agent::new(config)?;
    let started = agent.start(name, probe, Duration::ZERO);
    let relay = Relay {
        node: started.node,
        part,
        newest: started.newest,
        seen: watch::Sender::new(Seen::default()),
        clock: config.clock,
        conversation: None,
        is_lost: false,
    };
    agent.spawn(relay.run());
    agent.run(stop).await
}

/// The loop in place of links.
struct Relay {
    node: Arc<AgentNode>,
    part: DriverPart,
    newest: watch::Receiver<Option<Arc<Sample>>>,
    /// What the other part is to know.
    seen: watch::Sender<Seen>,
    clock: Clock,
    conversation: Option<Conversation>,
    /// Whether the log says that there is no connection.
    is_lost: bool,
}

impl Relay {
    /// Relays until the sampler ends.
    async fn run(mut self) {
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.show();
            tokio::select! {
                orders = next::<Orders>(&mut self.conversation) => match orders {
                    Ok(orders) if !orders.is_sane() => self.lose(&Ended::Absurd),
                    Ok(orders) => self.learn(orders),
                    Err(ended) => self.lose(&ended),
                },
                changed = self.newest.changed() => if changed.is_err() { return },
                _ = looks.tick() => self.look().await,
            }
        }
    }

    /// Passes on what is seen now, if it has changed.
    fn show(&mut self) {
        let sample = self.newest.borrow_and_update().clone();
        let clear_outcome = self.node.clearing.as_ref().and_then(Clearing::outcome);
        self.seen.send_if_modified(|known| {
            let is_same =
                known.sample.as_ref().map(Arc::as_ptr) == sample.as_ref().map(Arc::as_ptr);
            // An outcome comes with a new sample, if there is any: a list that was sent twice would count twice.
            let is_new = !is_same || (sample.is_none() && known.clear_outcome != clear_outcome);
            *known = Seen { sample, clear_outcome };
            is_new
        });
    }

    /// Looks after the connection.
    async fn look(&mut self) {
        if self.conversation.as_ref().is_some_and(Conversation::is_silent) {
            self.lose(&Ended::Silent);
        }
        if self.conversation.is_some() {
            return;
        }
        match UnixStream::connect(&self.part.socket).await {
            Ok(stream) => {
                tracing::info!(node = %self.node.name, "connected to the part of the agent that reports");
                let ends = Ends { reads: LONGEST_ORDERS, writes: LONGEST_SEEN };
                let begun = Conversation::begin(stream, ends, self.seen.subscribe(), self.clock);
                (self.conversation, self.is_lost) = (Some(begun), false);
            }
            Err(error) if !self.is_lost => {
                let socket = self.part.socket.display();
                tracing::warn!(node = %self.node.name, %socket, %error, "cannot connect to the part of the agent that reports, trying on");
                self.is_lost = true;
            }
            Err(_) => {}
        }
    }

    /// Learns what extenders say.
    fn learn(&self, orders: Orders) {
        let (node, now) = (&self.node, self.clock.now());
        let mut allocations = node.allocations();
        if allocations.learn(OTHER_PART, Some(orders.allocations)) {
            node.news.notify_one();
        }
        if !orders.is_answered {
            allocations.lose(OTHER_PART);
        }
        drop(allocations);
        match (&node.gate, orders.library) {
            (None, _) | (_, LibraryUse::Unknown) => {}
            (Some(gate), LibraryUse::Open) => gate.learn(OTHER_PART, None),
            (Some(gate), LibraryUse::Closed(why)) => gate.learn(OTHER_PART, Some(why)),
        }
        if let Some(mig) = &node.mig {
            mig.learn(OTHER_PART, orders.mig, now);
        }
        if let Some(limits) = &node.limits {
            limits.learn(OTHER_PART, orders.limits, now);
        }
        if let Some(clearing) = &node.clearing {
            clearing.learn(OTHER_PART, orders.clear, now);
        }
        let Some(of_kubelet) = orders.of_kubelet else { return }; // what was known before counts
        self.part.of_kubelet.send_if_modified(|known| {
            let is_new = known.as_ref() != Some(&of_kubelet);
            *known = Some(of_kubelet);
            is_new
        });
    }

    /// Ends the conversation. Orders end with it; allocations, and whether the library may be open, stay.
    fn lose(&mut self, ended: &Ended) {
        tracing::warn!(node = %self.node.name, cause = %ended, "the part of the agent that reports is lost");
        self.conversation = None;
        self.node.allocations().lose(OTHER_PART);
        self.node.lose_orders(OTHER_PART);
        if let Some(gate) = &self.node.gate {
            gate.lose(OTHER_PART);
        }
    }
}
