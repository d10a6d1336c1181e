//! The loops of the agent: one that samples each node, and one for each pair of node and extender.
//!
//! They share little: the sampler publishes its newest sample, each link sends the newest one when
//! it can, and the replies' bookings flow back to the sampler. So an extender that is away costs
//! neither samples nor the conversation with its peers, and nothing ever ends because of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::Rng;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use super::cadence::Cadence;
use super::client::{AddressError, ExtenderClient};
use super::fleet::Fleet;
use super::probe::{Probe, ProbeError, ProcessSampling, Sample};
use super::session::{Answer, Contact, ContactChange, Next, NodeBooks, Session};
use super::simulated::SimulatedProbe;
use crate::clock::Clock;

/// What the agent needs to know, whatever it reports.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Addresses of the extender's replicas; each gets every report.
    pub extenders: Vec<String>,
    /// Time between reports of one node.
    pub period: Duration,
    /// The clock of this process.
    pub clock: Clock,
}

/// Why the agent ends before it is told to.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// An address that cannot be used.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// A loop ended: a defect of ours, and better restarted than silent.
    #[error("a loop of the agent ended: {cause}")]
    LoopEnded {
        /// What is known.
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

/// Plays all nodes of `fleet` in one process, their reports spread over the period, until `stop` is
/// done.
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
    /// Time between reports of one node.
    period: Duration,
    /// The clock of this process.
    clock: Clock,
    /// The replicas of the extender.
    extenders: Vec<Arc<Extender>>,
    /// The loops; dropping them ends them.
    loops: JoinSet<()>,
}

/// One replica of the extender, as all nodes of this process see it.
struct Extender {
    /// The way to it.
    client: ExtenderClient,
    /// When it last answered anyone.
    contact: Mutex<Contact>,
}

/// What the loops of one node share.
struct Node {
    /// Its name.
    name: String,
    /// What the extenders say is booked on it.
    books: Mutex<NodeBooks>,
    /// Told when the bookings changed.
    news: Notify,
}

impl Node {
    /// The bookings; held for moments only, never across an await.
    fn books(&self) -> MutexGuard<'_, NodeBooks> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Agent {
    /// Prepares the way to the extenders.
    fn new(config: &AgentConfig) -> Result<Self, AgentError> {
        let extenders = config.extenders.iter().map(|url| {
            let client = ExtenderClient::new(url)?;
            Ok(Arc::new(Extender { client, contact: Mutex::new(Contact::new(config.clock.now())) }))
        });
        Ok(Self {
            instance: format!("{:032x}", rand::random::<u128>()),
            period: config.period,
            clock: config.clock,
            extenders: extenders.collect::<Result<_, AddressError>>()?,
            loops: JoinSet::new(),
        })
    }

    /// Starts the loops of one node.
    fn start(&mut self, name: &str, probe: impl Probe + 'static, phase: Duration) {
        let node = Arc::new(Node {
            name: name.to_owned(),
            books: Mutex::new(NodeBooks::new(self.extenders.len())),
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
                clock: self.clock,
                is_refused: false,
            };
            self.loops.spawn(link.run());
        }
        let sampler = Sampler {
            node,
            may_block: probe.may_block(),
            probe: Arc::new(Mutex::new(probe)),
            cadence: Cadence::new(self.period),
            clock: self.clock,
            samples,
            told: Told::default(),
        };
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

/// Samples one node.
struct Sampler<P> {
    /// The node.
    node: Arc<Node>,
    /// Whether the probe must not run on a thread of the event loop.
    may_block: bool,
    /// Reads the devices. Behind a lock, so that it survives a panic below it.
    probe: Arc<Mutex<P>>,
    /// When to sample what.
    cadence: Cadence,
    /// The clock of this process.
    clock: Clock,
    /// The newest sample, for the links.
    samples: watch::Sender<Option<Arc<Sample>>>,
    /// What is in the log already.
    told: Told,
}

/// What was last said about a node's devices, so that the log has changes only.
#[derive(Default, PartialEq, Eq)]
struct Told {
    /// Why nothing can be read.
    failure: Option<ProbeError>,
    /// Devices known and unhealthy.
    unhealthy: Vec<String>,
    /// Devices that did not answer.
    unreadable: usize,
}

impl<P: Probe + 'static> Sampler<P> {
    /// Samples for ever.
    async fn run(mut self, phase: Duration) {
        tokio::time::sleep(phase).await;
        loop {
            let began = self.clock.now();
            let sample = self.sample().await;
            self.tell(&sample);
            let has_failed = sample.is_err();
            if let Ok(sample) = sample {
                self.samples.send_replace(Some(Arc::new(sample)));
            }
            // A pod that begins to drain shortens the pause.
            loop {
                let pause = if has_failed {
                    self.cadence.pause_after_failure()
                } else {
                    self.cadence.pause(&self.node.books().draining())
                };
                let left = pause.saturating_sub(self.clock.now().since(began));
                if left.is_zero() {
                    break;
                }
                tokio::select! {
                    () = tokio::time::sleep(left) => {}
                    () = self.node.news.notified() => {}
                }
            }
        }
    }

    /// Takes one sample; takes it again with processes where it departs from the books.
    async fn sample(&mut self) -> Result<Sample, ProbeError> {
        let (bookings, draining) = {
            let books = self.node.books();
            (books.merged(), books.draining())
        };
        let now = self.clock.now();
        self.probe.lock().unwrap_or_else(PoisonError::into_inner).observe(&bookings, now);
        let mut processes = self.cadence.sampling(&draining, now);
        let mut sample = self.read(processes).await?;
        if processes == ProcessSampling::Skip && self.cadence.departs(&sample, &bookings) {
            processes = ProcessSampling::List;
            sample = self.read(processes).await?;
        }
        if processes == ProcessSampling::List {
            self.cadence.learn_lists(&sample, now);
        }
        Ok(sample)
    }

    /// Asks the probe, where it does no harm.
    async fn read(&self, processes: ProcessSampling) -> Result<Sample, ProbeError> {
        let (probe, now) = (Arc::clone(&self.probe), self.clock.now());
        let read =
            move || probe.lock().unwrap_or_else(PoisonError::into_inner).sample(processes, now);
        if !self.may_block {
            return read();
        }
        let ended = tokio::task::spawn_blocking(read).await;
        ended.unwrap_or_else(|error| Err(ProbeError::Interrupted { cause: error.to_string() }))
    }

    /// Writes to the log what has changed.
    fn tell(&mut self, sample: &Result<Sample, ProbeError>) {
        let told = match sample {
            Ok(sample) => {
                let unhealthy = sample.inventory.iter().filter(|device| !device.healthy);
                Told {
                    failure: None,
                    unhealthy: unhealthy.map(|device| device.uuid.clone()).collect(),
                    unreadable: sample.unreadable,
                }
            }
            Err(error) => Told { failure: Some(error.clone()), ..Told::default() },
        };
        if told == self.told {
            return;
        }
        let node = &self.node.name;
        match &told {
            Told { failure: Some(error), .. } => {
                tracing::error!(%node, %error, "the GPUs cannot be read, nothing is reported");
            }
            Told { unhealthy, unreadable, .. } if !unhealthy.is_empty() || *unreadable > 0 => {
                tracing::warn!(%node, ?unhealthy, unreadable, "some GPUs are not usable");
            }
            Told { .. } => tracing::info!(%node, "all GPUs can be read"),
        }
        self.told = told;
    }
}

/// Reports one node to one extender.
struct Link {
    /// The node.
    node: Arc<Node>,
    /// Position of the extender in the configuration.
    position: usize,
    /// The extender.
    extender: Arc<Extender>,
    /// The state of the conversation.
    session: Session,
    /// The newest sample.
    newest: watch::Receiver<Option<Arc<Sample>>>,
    /// The clock of this process.
    clock: Clock,
    /// Whether the log has that this node's reports are refused.
    is_refused: bool,
}

impl Link {
    /// Reports until the sampler ends.
    async fn run(mut self) {
        // Ends with the process: the sampler never drops its end before.
        while self.newest.changed().await.is_ok() {
            let mut next = Next::HelloNow;
            while next == Next::HelloNow {
                next = self.exchange().await;
            }
            if let Next::Pause(pause) = next {
                // Half of it by chance, so that many agents do not come back at one moment.
                let part = rand::rng().random_range(500..=1_000_u32);
                tokio::time::sleep(pause.saturating_mul(part) / 1_000).await;
            }
        }
    }

    /// One report and its answer.
    async fn exchange(&mut self) -> Next {
        let (session, newest) = (&mut self.session, &mut self.newest);
        // The first sample is there: links wait for it before they come here.
        let Some(mut sample) = newest.borrow_and_update().clone() else { return Next::NextSample };
        let answer = self.extender.client.put(&self.node.name, || {
            if let Some(newer) = newest.borrow_and_update().clone() {
                sample = newer;
            }
            session.report(&sample)
        });
        let answer = answer.await;
        let next = session.settle(&answer);
        self.tell(&answer);
        let mut books = self.node.books();
        match answer {
            Answer::Reply(reply) => {
                if books.learn(self.position, reply.bookings) {
                    self.node.news.notify_one();
                }
            }
            Answer::SessionExpired => {}
            Answer::Refused { .. } | Answer::Away { .. } => books.lose(self.position),
        }
        next
    }

    /// Writes to the log what has changed: about the extender once, whatever the number of nodes,
    /// about this node's reports for itself.
    fn tell(&mut self, answer: &Answer) {
        let (node, extender) = (&self.node.name, self.extender.client.address());
        let was_refused = self.is_refused;
        self.is_refused = matches!(answer, Answer::Refused { .. });
        match answer {
            Answer::Refused { error } if !was_refused => {
                tracing::error!(%node, extender, error, "the extender refuses this node's reports");
            }
            Answer::Reply(_) if was_refused => {
                tracing::info!(%node, extender, "the extender takes this node's reports again");
            }
            Answer::Reply(_)
            | Answer::Refused { .. }
            | Answer::SessionExpired
            | Answer::Away { .. } => {}
        }
        let mut contact = self.extender.contact.lock().unwrap_or_else(PoisonError::into_inner);
        match contact.settle(answer, self.clock.now()) {
            Some(ContactChange::Lost { error }) => {
                tracing::warn!(extender, error, "the extender is lost, trying on");
            }
            Some(ContactChange::Found) => {
                tracing::info!(extender, "the extender answers again");
            }
            None => {}
        }
    }
}
