//! The loop that samples one node.
//!
//! A driver that is away is no reason for silence: once the node's devices are known, the extender is
//! told that none of them can be used, so that it places nothing there, and keeps what is booked. A
//! call that does not come back is waited for beside the loop, never called a second time meanwhile.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::agent::gpu::probe::{Probe, ProbeError, ProcessSampling, Sample};
use crate::agent::node::cadence::Cadence;
use crate::agent::node::config::{AgentConfig, Node};
use crate::agent::node::metrics::AgentMetrics;
use crate::clock::Clock;
use crate::report::condition::Ailment;
use crate::report::wire::{Booking, BookingState, DeviceUse};

/// How long a read may take before its devices count as unknown: longer than the library takes to
/// open on nodes of 16 GPUs, shorter than an extender takes to count a node as silent.
const HANGS_AFTER: Duration = Duration::from_secs(5);

/// Samples one node.
pub(crate) struct Sampler<P> {
    /// The node.
    node: Arc<Node>,
    /// Reads the devices.
    reader: Reader<P>,
    /// When to sample what.
    cadence: Cadence,
    /// The clock of this process.
    clock: Clock,
    /// The newest sample, for the links.
    samples: watch::Sender<Option<Arc<Sample>>>,
    /// Where figures of the GPUs go.
    metrics: Option<AgentMetrics>,
    /// What was last said in the log.
    told: Told,
}

/// Asks a probe, where it does no harm.
struct Reader<P> {
    /// Whether the probe must not run on a thread of the event loop.
    may_block: bool,
    /// The probe. Behind a lock, so that it survives a panic below it.
    probe: Arc<Mutex<P>>,
    /// A read that has taken too long and is still on its way.
    overdue: Option<JoinHandle<Result<Sample, ProbeError>>>,
}

/// What was last said about a node's devices, so that the log has changes only.
#[derive(Default, PartialEq, Eq)]
struct Told {
    /// Why nothing can be read.
    failure: Option<ProbeError>,
    /// Devices known and unhealthy, each with its ailment.
    unhealthy: Vec<String>,
    /// Devices that did not answer.
    unreadable: usize,
}

impl<P: Probe + 'static> Sampler<P> {
    /// Samples `node` by `probe`, as `config` says, for `samples`.
    pub(crate) fn new(
        node: Arc<Node>,
        probe: P,
        config: &AgentConfig,
        samples: watch::Sender<Option<Arc<Sample>>>,
    ) -> Self {
        let may_block = probe.may_block();
        Self {
            node,
            reader: Reader { may_block, probe: Arc::new(Mutex::new(probe)), overdue: None },
            cadence: Cadence::new(config.period),
            clock: config.clock,
            samples,
            metrics: config.metrics.clone(),
            told: Told::default(),
        }
    }

    /// Samples for ever.
    pub(crate) async fn run(mut self, phase: Duration) {
        tokio::time::sleep(phase).await;
        loop {
            let began = self.clock.now();
            let bookings: Arc<[Booking]> = self.node.books().merged().into();
            let sample = self.sample(&bookings).await;
            self.tell(&sample);
            let has_failed = sample.is_err();
            let last = self.samples.borrow().clone();
            // Nothing was ever read: then nothing is known to be there.
            let shown = sample.ok().or_else(|| last.map(|last| last.without_driver()));
            if let Some(shown) = shown {
                if let Some(metrics) = &self.metrics {
                    metrics.show(&self.node.name, &shown, &bookings);
                }
                self.samples.send_replace(Some(Arc::new(shown)));
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
    async fn sample(&mut self, bookings: &Arc<[Booking]>) -> Result<Sample, ProbeError> {
        let now = self.clock.now();
        let mut processes = self.cadence.sampling(&self.node.books().draining(), now);
        let mut sample = self.reader.read(bookings, processes, self.clock).await?;
        if processes == ProcessSampling::Skip && self.cadence.departs(&sample, bookings) {
            processes = ProcessSampling::List;
            sample = self.reader.read(bookings, processes, self.clock).await?;
        }
        if processes == ProcessSampling::List {
            self.cadence.learn_lists(&sample, now);
        }
        let draining = bookings.iter().filter(|it| it.state == BookingState::Draining);
        sample.draining = draining.map(|it| it.pod_uid.clone()).collect();
        Ok(sample)
    }

    /// Writes to the log what has changed.
    fn tell(&mut self, sample: &Result<Sample, ProbeError>) {
        let told = match sample {
            Ok(sample) => Told {
                failure: None,
                unhealthy: sample.uses.iter().filter(|it| !it.healthy).map(ailing).collect(),
                unreadable: sample.unreadable,
            },
            Err(error) => Told { failure: Some(error.clone()), ..Told::default() },
        };
        if told == self.told {
            return;
        }
        let node = &self.node.name;
        match &told {
            Told { failure: Some(error), .. } => {
                tracing::error!(%node, %error, "the GPUs cannot be read, none takes new tenants");
            }
            Told { unhealthy, unreadable, .. } if !unhealthy.is_empty() || *unreadable > 0 => {
                tracing::warn!(%node, ?unhealthy, unreadable, "some GPUs are not usable");
            }
            Told { .. } => tracing::info!(%node, "all GPUs can be read"),
        }
        self.told = told;
    }
}

impl<P: Probe + 'static> Reader<P> {
    /// Asks the probe, after telling it what is booked. The answer of a read that was overdue is old:
    /// it only shows that the driver answers again.
    async fn read(
        &mut self,
        bookings: &Arc<[Booking]>,
        processes: ProcessSampling,
        clock: Clock,
    ) -> Result<Sample, ProbeError> {
        if let Some(overdue) = self.overdue.take() {
            let _ = self.wait(overdue).await?;
        }
        let (probe, bookings) = (Arc::clone(&self.probe), Arc::clone(bookings));
        let read = move || {
            let mut probe = probe.lock();
            let now = clock.now();
            probe.observe(&bookings, now);
            probe.sample(processes, now)
        };
        if !self.may_block {
            return read();
        }
        self.wait(tokio::task::spawn_blocking(read)).await?
    }

    /// Waits for a read, but not for ever.
    async fn wait(
        &mut self,
        mut read: JoinHandle<Result<Sample, ProbeError>>,
    ) -> Result<Result<Sample, ProbeError>, ProbeError> {
        match tokio::time::timeout(HANGS_AFTER, &mut read).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Ok(Err(ProbeError::Interrupted { cause: error.to_string() })),
            Err(_) => {
                self.overdue = Some(read);
                Err(ProbeError::Hangs { seconds: HANGS_AFTER.as_secs() })
            }
        }
    }
}

/// An unhealthy device and why it is so.
fn ailing(device: &DeviceUse) -> String {
    let ailment = device.ailment.map_or("unhealthy", Ailment::name);
    match device.last_xid {
        Some(xid) => format!("{}: {ailment}, last Xid {xid}", device.uuid),
        None => format!("{}: {ailment}", device.uuid),
    }
}
