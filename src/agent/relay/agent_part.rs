//! The part of an agent that speaks to the network. It has neither the driver nor any right: the part of the driver
//! sends samples over a socket, and carries out what extenders order.
//!
//! Links and ports are those of an agent that is one process. In place of the sampler there is this loop.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::geteuid;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::gpu::sample::Sample;
use crate::node::config::{AgentConfig, AgentNode};
use crate::node::metrics::AgentMetrics;
use crate::node::run::{Agent, AgentError};
use crate::relay::conversation::{Conversation, Ended, Ends, SILENT_AFTER, next};
use crate::relay::messages::{LONGEST_ORDERS, LONGEST_SEEN, LibraryUse, Orders, Seen};
use runtime::clock::Clock;
use wire::api::condition::DeviceFault;
use wire::units::Timestamp;

/// Time between two looks at what stands, for changes of which no task is notified.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Time between two repetitions of the last sample, while there is no newer one: shorter than the time after which an
/// extender calls a node silent.
const REPEAT_EVERY: Duration = Duration::from_secs(5);

/// Pause when no connection can be accepted, for instance because all files are open.
const PAUSE: Duration = Duration::from_secs(1);

/// What the part of the driver needs from here beside orders.
#[derive(Debug)]
pub struct AgentPart {
    /// Where the part of the driver connects.
    pub socket: UnixListener,
    /// UUIDs of the devices that kubelet hands out, once these are known.
    pub of_kubelet: watch::Receiver<Option<BTreeSet<String>>>,
}

/// Opens the socket for the part of the driver, which is root or the same user; one of an earlier run is replaced.
///
/// # Errors
/// The error of the operating system.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Reports the node `name` as the part of the driver sees it, until `stop` is done.
///
/// # Errors
/// [`AgentError`] for an address that cannot be used.
pub async fn run_agent_part(
    config: &AgentConfig,
    name: &str,
    part: AgentPart,
    stop: impl Future<Output = ()>,
) -> Result<(), AgentError> {
    let mut agent = Agent::new(config)?;
    let added = agent.add(name);
    let relay = Relay {
        node: added.node,
        part,
        orders: watch::Sender::new(Orders::default()),
        samples: added.samples,
        metrics: config.metrics.clone(),
        clock: config.clock,
        conversation: None,
        has_sample: false,
        current: config.clock.now(),
        repeated: config.clock.now(),
        is_away: false,
    };
    agent.spawn(relay.run());
    agent.run(stop).await
}

/// The loop in place of the sampler.
struct Relay {
    node: Arc<AgentNode>,
    part: AgentPart,
    /// What the part of the driver is to know.
    orders: watch::Sender<Orders>,
    /// The newest sample, for the links.
    samples: watch::Sender<Option<Arc<Sample>>>,
    metrics: Option<AgentMetrics>,
    clock: Clock,
    conversation: Option<Conversation>,
    /// Whether a sample came in this conversation.
    has_sample: bool,
    /// When the last sample was known to be current.
    current: Timestamp,
    /// When it was last repeated.
    repeated: Timestamp,
    /// Whether the devices count as not readable, since the other part is away.
    is_away: bool,
}

impl Relay {
    /// Relays forever.
    async fn run(mut self) {
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.order();
            tokio::select! {
                accepted = self.part.socket.accept() => match accepted {
                    Ok((stream, _)) => self.take(stream),
                    Err(_) => sleep(PAUSE).await,
                },
                seen = next(&mut self.conversation) => {
                    if let Err(ended) = seen.and_then(|seen| self.learn(seen)) {
                        self.lose(&ended);
                    }
                }
                () = self.node.news.notified() => {}
                () = self.node.mig_ordered() => {}
                () = self.node.limits_ordered() => {}
                () = self.node.clear_ordered() => {}
                () = self.node.gate_changed() => {}
                _ = looks.tick() => self.look(),
            }
        }
    }

    /// Passes on what extenders say now, if it has changed.
    fn order(&self) {
        let now = orders(&self.node, self.part.of_kubelet.borrow().clone());
        self.orders.send_if_modified(|known| {
            let is_new = *known != now;
            *known = now;
            is_new
        });
    }

    /// Takes a connection in place of the one before, if it is from root or from the same user.
    fn take(&mut self, stream: UnixStream) {
        let user = stream.peer_cred().map(|peer| peer.uid());
        if !user.is_ok_and(|user| user == 0 || user == geteuid().as_raw()) {
            return tracing::warn!(node = %self.node.name, "refused a connection of another user");
        }
        tracing::info!(node = %self.node.name, "the part of the agent with the driver is connected");
        let ends = Ends { reads: LONGEST_SEEN, writes: LONGEST_ORDERS };
        let begun = Conversation::begin(stream, ends, self.orders.subscribe(), self.clock);
        (self.conversation, self.has_sample) = (Some(begun), false);
    }

    /// Learns what the other part has seen.
    fn learn(&mut self, seen: Seen) -> Result<(), Ended> {
        if !seen.is_sane() {
            return Err(Ended::Absurd);
        }
        if let (Some(clearing), Some(outcome)) = (&self.node.clearing, seen.clear_outcome) {
            clearing.note(outcome);
        }
        let Some(sample) = seen.sample else { return Ok(()) };
        // The first one of a connection may have been here before, and two lists free what a pod held.
        let is_repeated = !std::mem::replace(&mut self.has_sample, true);
        (self.current, self.is_away) = (self.clock.now(), false);
        self.show(if is_repeated { Sample::clone(&sample).without_lists().into() } else { sample });
        Ok(())
    }

    /// Ends the conversation.
    fn lose(&mut self, ended: &Ended) {
        tracing::warn!(node = %self.node.name, cause = %ended, "the part of the agent with the driver is lost");
        (self.conversation, self.has_sample) = (None, false);
    }

    /// Without new samples the last one is repeated for some seconds, as while the library is opened. Then no device can
    /// be read.
    fn look(&mut self) {
        if self.conversation.as_ref().is_some_and(Conversation::is_silent) {
            self.lose(&Ended::Silent);
        }
        let now = self.clock.now();
        if self.has_sample {
            self.current = now;
            return;
        }
        let is_away = now.since(self.current) >= SILENT_AFTER;
        let is_news = is_away && !self.is_away;
        if !is_news && now.since(self.repeated) < REPEAT_EVERY {
            return;
        }
        (self.repeated, self.is_away) = (now, is_away);
        let last = self.samples.borrow().clone();
        let Some(last) = last else { return };
        if is_news {
            tracing::error!(node = %self.node.name, "the GPUs cannot be read without the part of the agent with the driver, none takes new tenants: see the log of its container");
        }
        if let Some(clearing) = self.node.clearing.as_ref().filter(|_| is_away) {
            clearing.refuse(DeviceFault::DriverAway);
        }
        self.show(Arc::new(match is_away {
            true => last.unread(DeviceFault::DriverAway),
            false => Sample::clone(&last).without_lists(),
        }));
    }

    /// Publishes a sample.
    fn show(&self, sample: Arc<Sample>) {
        if let Some(metrics) = &self.metrics {
            let name = &self.node.name;
            metrics.show(name, &sample, &self.node.allocations().merged());
            let outdated = Some(DeviceFault::AgentOutdated);
            metrics.show_outdated(name, sample.uses.iter().any(|seen| seen.fault == outdated));
        }
        self.samples.send_replace(Some(sample));
    }
}

/// What stands on a node.
fn orders(node: &AgentNode, of_kubelet: Option<BTreeSet<String>>) -> Orders {
    let allocations = node.allocations();
    let (merged, is_answered) = (allocations.merged(), allocations.is_any_live());
    drop(allocations);
    Orders {
        allocations: merged,
        is_answered,
        library: node.gate.as_ref().map_or(LibraryUse::Unknown, |gate| match gate.said() {
            None => LibraryUse::Unknown,
            Some(None) => LibraryUse::Open,
            Some(Some(why)) => LibraryUse::Closed(why),
        }),
        mig: node.mig.as_ref().and_then(|mig| mig.standing()),
        limits: node.limits.as_ref().and_then(|limits| limits.orders()),
        clear: node.clearing.as_ref().and_then(|clearing| clearing.standing()),
        of_kubelet,
    }
}
