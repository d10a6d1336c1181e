//! The loops of the agent: one sampler for each node, and one link for each pair of node and
//! extender.
//!
//! They share little. The sampler publishes its newest sample, each link sends the newest one when
//! it can, and the allocations in the replies flow back to the sampler. So an extender that is away
//! delays neither samples nor the conversation with its peers, and never ends anything.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use crate::agent::gpu::probe::Probe;
use crate::agent::node::client::{AddressError, ExtenderClient};
use crate::agent::node::config::{AgentConfig, Extender, Node};
use crate::agent::node::link::Link;
use crate::agent::node::sampler::Sampler;
use crate::agent::node::session::{Contact, NodeAllocations, Session};
use crate::agent::simulated::fleet::Fleet;
use crate::agent::simulated::probe::SimulatedProbe;

/// Why the agent ends before `stop`.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// An address that cannot be used.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// A loop ended because of a bug in gpupack; a restart is better than silence.
    #[error("a loop of the agent ended: {cause}")]
    LoopEnded {
        /// The known details.
        cause: String,
    },
}

/// Reports the node `name` as `probe` sees it, until `stop` is done.
///
/// # Errors
/// [`AgentError`] for an address that cannot be used.
pub async fn run_node(
    config: &AgentConfig,
    name: &str,
    probe: impl Probe + 'static,
    stop: impl Future<Output = ()>,
) -> Result<(), AgentError> {
    let mut agent = Agent::new(config)?;
    agent.start(name, probe, Duration::ZERO);
    agent.run(stop).await
}

/// Plays all nodes of `fleet` in one process, with their reports spread over the period, until
/// `stop` is done.
///
/// # Errors
/// [`AgentError`] for an address that cannot be used.
pub async fn run_fleet(
    config: &AgentConfig,
    fleet: &Fleet,
    stop: impl Future<Output = ()>,
) -> Result<(), AgentError> {
    let mut agent = Agent::new(config)?;
    let count = u32::try_from(fleet.nodes.len()).unwrap_or(u32::MAX).max(1);
    for (position, node) in (0..count).zip(&fleet.nodes) {
        let phase = config.period.saturating_mul(position) / count;
        agent.start(&node.name, SimulatedProbe::new(fleet, node), phase);
    }
    agent.run(stop).await
}

/// All loops of one process.
struct Agent {
    /// Random id of this run.
    instance: String,
    config: AgentConfig,
    /// The replicas of the extender.
    extenders: Vec<Arc<Extender>>,
    /// The loops; dropping them ends them.
    loops: JoinSet<()>,
}

impl Agent {
    /// Creates the clients of the extenders.
    fn new(config: &AgentConfig) -> Result<Self, AgentError> {
        let extenders = config.extenders.iter().map(|url| {
            let client = ExtenderClient::new(url)?;
            Ok(Arc::new(Extender { client, contact: Mutex::new(Contact::default()) }))
        });
        Ok(Self {
            instance: format!("{:032x}", rand::random::<u128>()),
            config: config.clone(),
            extenders: extenders.collect::<Result<_, AddressError>>()?,
            loops: JoinSet::new(),
        })
    }

    /// Starts the loops of one node.
    fn start(&mut self, name: &str, probe: impl Probe + 'static, phase: Duration) {
        let node = Arc::new(Node {
            name: name.to_owned(),
            allocations: Mutex::new(NodeAllocations::new(self.extenders.len())),
            news: Notify::new(),
        });
        let (samples, newest) = watch::channel(None);
        for (position, extender) in self.extenders.iter().enumerate() {
            let link = Link {
                node: Arc::clone(&node),
                position,
                extender: Arc::clone(extender),
                session: Session::new(self.instance.clone()),
                newest: newest.clone(),
                clock: self.config.clock,
                period: self.config.period,
                sent: self.config.clock.now(),
                is_refused: false,
            };
            self.loops.spawn(link.run());
        }
        let sampler = Sampler::new(node, probe, &self.config, samples);
        self.loops.spawn(sampler.run(phase));
    }

    /// Runs all loops until `stop` is done.
    async fn run(mut self, stop: impl Future<Output = ()>) -> Result<(), AgentError> {
        let ended = tokio::select! {
            () = stop => None,
            ended = self.loops.join_next(), if !self.loops.is_empty() => ended,
        };
        self.loops.shutdown().await;
        match ended {
            None => Ok(()),
            Some(Ok(())) => Err(AgentError::LoopEnded { cause: "no reason given".to_owned() }),
            Some(Err(error)) => Err(AgentError::LoopEnded { cause: error.to_string() }),
        }
    }
}
