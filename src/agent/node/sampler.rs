//! The loop that samples one node.
//!
//! If the driver is away, reports go on: once the devices are known, they report that all
//! are unhealthy. It then places no pod there, and keeps what is allocated. A call that does not
//! return is waited for beside the loop, and not repeated meanwhile.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::gpu::sample::{Probe, ProbeError, ProcessSampling, Sample, is_draining};
use crate::node::cadence::Cadence;
use crate::node::config::{AgentConfig, AgentNode};
use crate::node::metrics::AgentMetrics;
use runtime::clock::Clock;
use wire::report::bodies::{Allocation, DeviceUse};

/// How long a read may take before its devices count as unknown: longer than the library takes to
/// open on nodes of 16 GPUs, shorter than the time after which an extender calls a node silent.
const HANGS_AFTER: Duration = Duration::from_secs(5);

/// Samples one node.
pub(crate) struct Sampler<P> {
    node: Arc<AgentNode>,
    reader: Reader<P>,
    /// When to sample and when to list.
    cadence: Cadence,
    clock: Clock,
    /// The newest sample, for the links.
    samples: watch::Sender<Option<Arc<Sample>>>,
    metrics: Option<AgentMetrics>,
    /// The last state in the log.
    logged: LoggedState,
}

/// Calls a probe on a thread where it may block.
struct Reader<P> {
    /// Whether the probe must not run on a thread of the event loop.
    may_block: bool,
    /// The probe, behind a lock, so that it survives a panic below it.
    probe: Arc<Mutex<P>>,
    /// A read that has taken too long and still runs.
    overdue: Option<JoinHandle<Result<Sample, ProbeError>>>,
}

/// The last logged state of a node's devices, so that the log has changes only.
#[derive(Default, PartialEq, Eq)]
struct LoggedState {
    /// Why nothing can be read.
    failure: Option<ProbeError>,
    /// Unhealthy devices, each with its fault.
    unhealthy: Vec<String>,
    /// Number of devices that did not answer.
    unreadable: usize,
}

impl<P: Probe + 'static> Sampler<P> {
    /// Samples `node` by `probe`, as `config` says, for `samples`.
    pub(crate) fn new(
        node: Arc<AgentNode>,
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
            logged: LoggedState::default(),
        }
    }

    /// Samples forever.
    pub(crate) async fn run(mut self, phase: Duration) {
        tokio::time::sleep(phase).await;
        loop {
            let began = self.clock.now();
            let allocations: Arc<[Allocation]> = self.node.allocations().merged().into();
            let sample = self.sample(&allocations).await;
            self.log_changes(&sample);
            let has_failed = sample.is_err();
            let last = self.samples.borrow().clone();
            // If nothing was ever read, no device is known.
            let shown = match sample {
                Ok(sample) => Some(sample),
                Err(_) => last.map(|last| last.without_driver()),
            };
            if let Some(shown) = shown {
                if let Some(metrics) = &self.metrics {
                    metrics.show(&self.node.name, &shown, &allocations);
                }
                self.samples.send_replace(Some(Arc::new(shown)));
            }
            // A pod that starts to drain shortens the pause. A MIG instance that was made ends it: a
            // pod may wait for its UUID.
            loop {
                let pause = if has_failed {
                    self.cadence.pause_after_failure()
                } else {
                    self.cadence.pause(&self.node.allocations().draining())
                };
                let left = pause.saturating_sub(self.clock.now().since(began));
                if left.is_zero() {
                    break;
                }
                tokio::select! {
                    () = tokio::time::sleep(left) => {}
                    () = self.node.news.notified() => {}
                    () = self.node.mig_changed() => break,
                    () = self.node.limits_ordered() => break,
                }
            }
        }
    }

    /// Takes one sample, and again with processes if its use differs from the last lists.
    async fn sample(&mut self, allocations: &Arc<[Allocation]>) -> Result<Sample, ProbeError> {
        let now = self.clock.now();
        let mut processes = self.cadence.sampling(&self.node.allocations().draining(), now);
        let mut sample = self.reader.read(allocations, processes, self.clock).await?;
        let is_listed = processes == ProcessSampling::List || sample.has_lists();
        if !is_listed && self.cadence.needs_list(&sample, allocations) {
            processes = ProcessSampling::List;
            sample = self.reader.read(allocations, processes, self.clock).await?;
        }
        if processes == ProcessSampling::List || sample.has_lists() {
            self.cadence.learn_lists(&sample, now);
        }
        let draining = allocations.iter().filter(|allocation| is_draining(allocation));
        sample.draining = draining.map(|allocation| allocation.pod_uid.clone()).collect();
        sample.has_unwatched_pods |= allocations.iter().any(|allocation| allocation.is_guest);
        if let Some(mig) = &self.node.mig {
            sample.mig_failures = mig.failures();
        }
        if let Some(limits) = &self.node.limits {
            sample.memory_limits = Some(limits.in_force());
            // A pod may wait until they are in force, or come.
            sample.has_unwatched_pods |= !allocations.is_empty();
        }
        Ok(sample)
    }

    /// Logs what has changed.
    fn log_changes(&mut self, sample: &Result<Sample, ProbeError>) {
        let logged = match sample {
            Ok(sample) => {
                let unhealthy = sample.uses.iter().filter(|device| !device.healthy).map(described);
                let (unhealthy, unreadable) = (unhealthy.collect(), sample.unreadable);
                LoggedState { failure: None, unhealthy, unreadable }
            }
            Err(error) => LoggedState { failure: Some(error.clone()), ..LoggedState::default() },
        };
        if logged == self.logged {
            return;
        }
        let node = &self.node.name;
        match &logged {
            LoggedState { failure: Some(error), .. } => {
                tracing::error!(%node, %error, "the GPUs cannot be read, none takes new tenants");
            }
            LoggedState { unhealthy, unreadable, .. }
                if !unhealthy.is_empty() || *unreadable > 0 =>
            {
                tracing::warn!(%node, ?unhealthy, unreadable, "some GPUs are not usable");
            }
            LoggedState { .. } => tracing::info!(%node, "all GPUs can be read"),
        }
        self.logged = logged;
    }
}

impl<P: Probe + 'static> Reader<P> {
    /// Reads the probe after passing it the allocations. The result of an overdue read is old: it
    /// only shows that the driver answers again.
    async fn read(
        &mut self,
        allocations: &Arc<[Allocation]>,
        processes: ProcessSampling,
        clock: Clock,
    ) -> Result<Sample, ProbeError> {
        if let Some(overdue) = self.overdue.take() {
            let _ = self.wait(overdue).await?;
        }
        let (probe, allocations) = (Arc::clone(&self.probe), Arc::clone(allocations));
        let read = move || {
            let mut probe = probe.lock();
            let now = clock.now();
            probe.observe(&allocations, now);
            probe.sample(processes, now)
        };
        if !self.may_block {
            return read();
        }
        self.wait(tokio::task::spawn_blocking(read)).await?
    }

    /// Waits for a read, for a limited time.
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

/// An unhealthy device and its fault.
fn described(device: &DeviceUse) -> String {
    let fault = device.fault.map_or_else(|| "unhealthy".to_owned(), |fault| format!("{fault:?}"));
    match device.last_xid {
        Some(xid) => format!("{}: {fault}, last Xid {xid}", device.uuid),
        None => format!("{}: {fault}", device.uuid),
    }
}
