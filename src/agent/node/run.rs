//! The loops of the agent: one sampler for each node, and one link for each pair of node and
//! replica of the extender.
//!
//! They share little. The sampler publishes its newest sample, each link sends the newest one when
//! it can, and the allocations in the replies flow back to the sampler. So an extender that is away
//! delays neither samples nor the conversation with its peers, and never ends anything.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};

use crate::gpu::sample::{Probe, Sample};
use crate::node::client::{AddressError, ExtenderClient};
use crate::node::config::{AgentConfig, AgentNode, Extender};
use crate::node::link::Link;
use crate::node::replicas::{ExtenderTarget, Family};
use crate::node::sampler::Sampler;
use crate::node::session::Session;
use crate::upkeep::renewal::Renewal;
use wire::units::Timestamp;

/// How long an address that no name resolves to any more keeps its reports, if it answers.
const ABSENT_FOR: Duration = Duration::from_secs(60);

/// Why the agent ends before `stop`.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// An address that cannot be used.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Only a new container helps.
    #[error("{cause}")]
    MadeAgain { cause: Renewal },
    /// A loop ended because of a bug in gpupack; a restart is better than silence.
    #[error("a loop of the agent ended: {cause}")]
    LoopEnded { cause: String },
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

/// A node, as a probe sees it.
pub struct ProbedNode<P> {
    /// Its name in Kubernetes.
    pub name: String,
    pub probe: P,
}

/// Reports all these nodes from one process, spread over the period, until `stop` is done.
///
/// # Errors
/// [`AgentError`] for an address that cannot be used.
pub async fn run_nodes<P: Probe + 'static>(
    config: &AgentConfig,
    nodes: Vec<ProbedNode<P>>,
    stop: impl Future<Output = ()>,
) -> Result<(), AgentError> {
    let mut agent = Agent::new(config)?;
    let count = u32::try_from(nodes.len()).unwrap_or(u32::MAX).max(1);
    for (position, node) in (0..count).zip(nodes) {
        let phase = config.period.saturating_mul(position) / count;
        agent.start(&node.name, node.probe, phase);
    }
    agent.run(stop).await
}

/// All loops of one process.
pub(crate) struct Agent {
    /// Random id of this run.
    instance: String,
    /// When it began, in milliseconds since 1970.
    began_unix_millis: u64,
    config: AgentConfig,
    /// The addresses of the configuration, each with the family of addresses in use.
    targets: Vec<(Arc<ExtenderTarget>, Family)>,
    nodes: Vec<Reported>,
    /// The links of all nodes, by the address of the extender.
    links: BTreeMap<String, Links>,
    /// Number of the newest link.
    newest_link: usize,
    /// Notified when an extender is lost, or an address is new.
    news: Arc<Notify>,
    /// The loops; dropping them ends them. One may find out that the container has to be made again.
    loops: JoinSet<Option<Renewal>>,
}

/// A node, and its newest sample.
#[derive(Clone)]
pub(crate) struct Reported {
    pub(crate) node: Arc<AgentNode>,
    pub(crate) newest: watch::Receiver<Option<Arc<Sample>>>,
}

/// A node, and where its samples go.
pub(crate) struct Added {
    pub(crate) node: Arc<AgentNode>,
    pub(crate) samples: watch::Sender<Option<Arc<Sample>>>,
}

/// The links of all nodes to one extender.
struct Links {
    number: usize,
    extender: Arc<Extender>,
    loops: Vec<AbortHandle>,
    /// Since when no name resolves to its address.
    absent: Option<Timestamp>,
}

impl Links {
    /// Whether the extender does not answer.
    fn is_lost(&self) -> bool {
        self.extender.contact.lock().is_lost()
    }
}

impl Agent {
    /// Reads the addresses of the extenders.
    pub(crate) fn new(config: &AgentConfig) -> Result<Self, AgentError> {
        let scheme = config.proof.scheme();
        let targets = config.extenders.iter();
        let targets =
            targets.map(|url| Ok((Arc::new(ExtenderTarget::new(scheme, url)?), Family::V4)));
        Ok(Self {
            instance: format!("{:032x}", rand::random::<u128>()),
            began_unix_millis: u64::try_from(config.clock.unix_micros() / 1_000).unwrap_or(0),
            config: config.clone(),
            targets: targets.collect::<Result<_, AddressError>>()?,
            nodes: Vec::new(),
            links: BTreeMap::new(),
            newest_link: 0,
            news: Arc::default(),
            loops: JoinSet::new(),
        })
    }

    /// Starts to sample a node. Its links follow.
    pub(crate) fn start(
        &mut self,
        name: &str,
        probe: impl Probe + 'static,
        phase: Duration,
    ) -> Reported {
        let Added { node, samples } = self.add(name);
        let reported = Reported { node: Arc::clone(&node), newest: samples.subscribe() };
        let sampler = Sampler::new(node, probe, &self.config, samples);
        self.loops.spawn(async move { Some(sampler.run(phase).await) });
        reported
    }

    /// Runs one more loop, which does not end earlier.
    pub(crate) fn spawn(&mut self, ends: impl Future<Output = ()> + Send + 'static) {
        self.loops.spawn(without_renewal(ends));
    }

    /// Adds a node whose samples come from elsewhere.
    pub(crate) fn add(&mut self, name: &str) -> Added {
        let node = Arc::new(AgentNode {
            name: name.to_owned(),
            allocations: Mutex::default(),
            news: Notify::new(),
            mig: self.config.mig.clone(),
            limits: self.config.limits.clone(),
            clearing: self.config.clearing.clone(),
            gate: self.config.gate.clone(),
        });
        let (samples, newest) = watch::channel(None);
        self.nodes.push(Reported { node: Arc::clone(&node), newest });
        Added { node, samples }
    }

    /// Brings the links in line with the addresses. An address that no name resolves to any more keeps
    /// its links while the extender there answers, for a minute: then another pod may have it.
    fn update_links(&mut self) {
        for (target, family) in &mut self.targets {
            let mut urls = target.urls(*family).into_iter();
            if target.is_dual() && urls.all(|url| self.links.get(&url).is_some_and(Links::is_lost))
            {
                *family = family.other();
            }
        }
        let wanted: BTreeSet<String> =
            self.targets.iter().flat_map(|(target, family)| target.urls(*family)).collect();
        let now = self.config.clock.now();
        self.links.retain(|url, links| {
            let is_wanted = wanted.contains(url);
            links.absent = if is_wanted { None } else { links.absent.or(Some(now)) };
            let is_recent = links.absent.is_some_and(|since| now.since(since) < ABSENT_FOR);
            let is_kept = is_wanted || is_recent && !links.is_lost();
            if !is_kept {
                tracing::info!(extender = url, "no longer reporting to this extender");
                links.loops.iter().for_each(AbortHandle::abort);
                self.nodes.iter().for_each(|reported| reported.node.forget(links.number));
            }
            is_kept
        });
        for url in wanted {
            if !self.links.contains_key(&url) {
                self.link(url);
            }
        }
    }

    /// Starts to report all nodes to the extender at this address.
    fn link(&mut self, url: String) {
        let client = match ExtenderClient::new(&url, self.config.proof.clone()) {
            Ok(client) => client,
            Err(error) => return tracing::debug!(%error, "an address of the extender"),
        };
        let lost = Arc::clone(&self.news);
        let extender = Arc::new(Extender { client, contact: Mutex::default(), lost });
        tracing::info!(extender = url, "reporting to an extender");
        self.newest_link += 1;
        let number = self.newest_link;
        let links = self.nodes.iter().map(|reported| Link {
            node: Arc::clone(&reported.node),
            number,
            extender: Arc::clone(&extender),
            session: Session::new(self.instance.clone(), self.began_unix_millis),
            newest: reported.newest.clone(),
            clock: self.config.clock,
            period: self.config.period,
            accepted: self.config.upkeep.accepted.clone(),
            sent: self.config.clock.now(),
            is_refused: false,
        });
        let loops = links.map(|link| self.loops.spawn(without_renewal(link.run()))).collect();
        self.links.insert(url, Links { number, extender, loops, absent: None });
    }

    /// Runs all loops until `stop` is done.
    pub(crate) async fn run(mut self, stop: impl Future<Output = ()>) -> Result<(), AgentError> {
        for (target, _) in self.targets.iter().filter(|(target, _)| target.is_name()) {
            let (resolver, news) = (self.config.resolver.clone(), Arc::clone(&self.news));
            self.loops.spawn(without_renewal(Arc::clone(target).look(resolver, news)));
        }
        let (mut stop, news) = (pin!(stop), Arc::clone(&self.news));
        let ended = loop {
            self.update_links();
            tokio::select! {
                () = &mut stop => break None,
                Some(ended) = self.loops.join_next() => match ended {
                    Err(error) if error.is_cancelled() => {} // a link that was ended
                    ended => break Some(ended),
                },
                () = tokio::time::sleep(ABSENT_FOR / 4) => {}
                () = news.notified() => {
                    self.targets.iter().for_each(|(target, _)| target.look_again());
                }
            }
        };
        self.loops.shutdown().await;
        match ended {
            None => Ok(()),
            Some(Ok(Some(cause))) => Err(AgentError::MadeAgain { cause }),
            Some(Ok(None)) => Err(AgentError::LoopEnded { cause: "no reason given".to_owned() }),
            Some(Err(error)) => Err(AgentError::LoopEnded { cause: error.to_string() }),
        }
    }
}

/// A loop that does not know of the driver.
async fn without_renewal(ends: impl Future<Output = ()>) -> Option<Renewal> {
    ends.await;
    None
}
