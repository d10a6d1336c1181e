//! The loop that samples one node.
//!
//! If the driver is away, reports go on: once the devices are known, they report that all
//! are unhealthy. It then places no pod there, and keeps what is allocated. A call that does not
//! return is waited for beside the loop, and not repeated meanwhile. While the library is being
//! opened, or a MIG instance is being made or removed, the last sample is repeated: that is slow, and no fault. The
//! loop ends if only a new container helps.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::gpu::sample::{Probe, ProbeError, ProcessSampling, Sample, is_draining};
use crate::mig::on_demand::MigOnDemand;
use crate::node::cadence::{Cadence, PROBE_RETRY};
use crate::node::config::{AgentConfig, AgentNode};
use crate::node::metrics::AgentMetrics;
use crate::upkeep::condition::Upkeep;
use crate::upkeep::renewal::{Renewal, Renewals};
use runtime::clock::Clock;
use wire::api::condition::DeviceFault;
use wire::report::bodies::{Allocation, DeviceUse};
use wire::units::Timestamp;

/// How long a read of the open library may take before its devices count as unknown, and how often the last sample is
/// repeated while the library opens, or a MIG instance is made or removed: shorter than the time after which an extender
/// calls a node silent.
const HANGS_AFTER: Duration = Duration::from_secs(5);

/// How long the library may take to open, with the first look at all devices: 10 to 30 s on large nodes whose driver
/// is not kept initialized.
const OPENS_WITHIN: Duration = Duration::from_secs(60);

/// Time between two looks whether the driver's module is loaded, while nothing can be read.
const LOOK_EVERY: Duration = Duration::from_secs(1);

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
    upkeep: Upkeep,
    /// What speaks for a new container.
    renewals: Renewals,
    /// Whether it waits for clients of MPS before it ends.
    is_outdated: bool,
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
    overdue: Option<Running>,
    /// The changes of MIG instances for which a read may wait.
    mig: Option<MigOnDemand>,
}

/// A read in progress.
struct Running {
    read: JoinHandle<Result<Sample, ProbeError>>,
    /// How long it may take.
    within: Duration,
    /// When it began, or was last seen to wait for a change.
    began: Timestamp,
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
        let mig = node.mig.clone();
        let upkeep = config.upkeep.clone();
        Self {
            node,
            reader: Reader { may_block, probe: Arc::new(Mutex::new(probe)), overdue: None, mig },
            cadence: Cadence::new(config.period),
            clock: config.clock,
            samples,
            metrics: config.metrics.clone(),
            renewals: Renewals::since(upkeep.was_loaded, upkeep.listed_instances()),
            upkeep,
            is_outdated: false,
            logged: LoggedState::default(),
        }
    }

    /// Samples until only a new container helps.
    pub(crate) async fn run(mut self, phase: Duration) -> Renewal {
        self.look();
        tokio::time::sleep(phase).await;
        loop {
            let began = self.clock.now();
            let allocations: Arc<[Allocation]> = self.node.allocations().merged().into();
            let sample = self.sample(&allocations).await;
            self.log_changes(&sample);
            let failure = sample.as_ref().err().cloned();
            if let Some(renewal) = self.settle(&sample).await {
                return renewal;
            }
            self.refuse_orders(failure.as_ref());
            if let Some(shown) = self.shown(sample) {
                if let Some(metrics) = &self.metrics {
                    metrics.show(&self.node.name, &shown, &allocations);
                }
                self.samples.send_replace(Some(Arc::new(shown)));
            }
            match failure {
                None => self.rest(began).await,
                Some(ProbeError::Opening) => {} // it is waited for
                Some(_) => self.rest_after_failure(began).await,
            }
        }
    }

    /// Ends the order to clear a GPU if no GPU can be read.
    fn refuse_orders(&self, failure: Option<&ProbeError>) {
        let is_away = failure.is_some_and(|failure| *failure != ProbeError::Opening);
        if let Some(clearing) = self.node.clearing.as_ref().filter(|_| is_away) {
            clearing.refuse(DeviceFault::DriverAway);
        }
    }

    /// What to report after a read. If nothing was ever read, no device is known.
    fn shown(&self, sample: Result<Sample, ProbeError>) -> Option<Sample> {
        let last = self.samples.borrow().clone();
        match sample {
            Ok(sample) => Some(sample),
            Err(ProbeError::Opening) => last.map(|last| Sample::clone(&last).without_lists()),
            Err(_) if self.is_outdated => last.map(|last| last.unread(DeviceFault::AgentOutdated)),
            Err(_) => last.map(|last| last.unread(DeviceFault::DriverAway)),
        }
    }

    /// Waits for the next sample. A pod that starts to drain shortens the pause. A MIG instance that was made ends it:
    /// a pod may wait for its UUID.
    async fn rest(&mut self, began: Timestamp) {
        loop {
            let pause = self.cadence.pause(&self.node.allocations().draining());
            let left = pause.saturating_sub(self.clock.now().since(began));
            if left.is_zero() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(left) => {}
                () = self.node.news.notified() => {}
                () = self.node.mig_changed() => return,
                () = self.node.limits_ordered() => return,
                () = self.node.clear_ordered() => return,
                () = self.node.gate_changed() => return,
            }
        }
    }

    /// Waits for the next attempt after a failed one. The driver's module ends the wait when it appears.
    async fn rest_after_failure(&mut self, began: Timestamp) {
        let mut pause = self.cadence.pause_after_failure();
        if self.is_outdated {
            pause = pause.min(PROBE_RETRY);
        } else if let Some(left) = self.renewals.left(self.upkeep.refused_for, began) {
            pause = pause.min(left.max(LOOK_EVERY));
        }
        loop {
            let left = pause.saturating_sub(self.clock.now().since(began));
            if left.is_zero() {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(left.min(LOOK_EVERY)) => {}
                () = self.node.clear_ordered() => return,
                () = self.node.gate_changed() => return,
            }
            if self.look() {
                self.cadence.learn_failure(None); // what failed before says nothing about it
                return;
            }
        }
    }

    /// Looks whether the driver's module is loaded. Returns whether it has appeared.
    fn look(&mut self) -> bool {
        self.renewals.look(self.upkeep.is_module_loaded())
    }

    /// Learns how a read ended. Returns why the container has to be made again, once nothing is in the way.
    async fn settle(&mut self, sample: &Result<Sample, ProbeError>) -> Option<Renewal> {
        let failure = sample.as_ref().err();
        if failure == Some(&ProbeError::Opening) {
            return None;
        }
        self.cadence.learn_failure(failure);
        let now = self.clock.now();
        let found = self.renewals.settle(failure, self.upkeep.refused_for, now);
        let is_hiding = sample.as_ref().is_ok_and(hides_instances);
        let listed = is_hiding.then(|| self.upkeep.listed_instances()).flatten();
        let found = self.renewals.learn_hidden(listed, now).or(found);
        let is_held = found.is_some() && self.upkeep.has_clients().await;
        if let Some(metrics) = &self.metrics {
            metrics.show_outdated(&self.node.name, is_held);
        }
        if let (Some(cause), true, false) = (&found, is_held, self.is_outdated) {
            tracing::error!(node = %self.node.name, %cause, "clients of MPS would end with this container: the agent waits until they have left; drain the GPU pods of this node");
        }
        self.is_outdated = is_held;
        found.filter(|_| !is_held)
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
            Err(ProbeError::Opening) => return,
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
            LoggedState { failure: Some(ProbeError::Closed { why }), .. } => {
                tracing::info!(%node, why, "NVIDIA's library is closed, no GPU takes new tenants");
            }
            LoggedState { failure: Some(error), .. } => {
                tracing::error!(%node, %error, "the GPUs cannot be read, none takes new tenants");
                if matches!(error, ProbeError::LibraryMissing { .. }) {
                    self.advise();
                }
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

impl<P> Sampler<P> {
    /// Logs what becomes of an agent without library.
    fn advise(&self) {
        let node = &self.node.name;
        match self.renewals.is_loaded() {
            Some(false) => {
                tracing::info!(%node, "waiting for NVIDIA's kernel module: when it is loaded, the agent ends, so that its container is made again with the library")
            }
            Some(true) => {
                tracing::error!(%node, "NVIDIA's kernel module is loaded, but this container has no library, and the agent does not end for it: when NVIDIA's container toolkit is set up on this node, delete the agent's pod; check its RuntimeClass")
            }
            None => {}
        }
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
            self.wait(overdue, clock).await?;
        }
        let within = if self.probe.lock().is_open() { HANGS_AFTER } else { OPENS_WITHIN };
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
        let read = tokio::task::spawn_blocking(read);
        self.wait(Running { read, within, began: clock.now() }, clock).await
    }

    /// Waits for a read, for a limited time.
    async fn wait(&mut self, mut running: Running, clock: Clock) -> Result<Sample, ProbeError> {
        match tokio::time::timeout(HANGS_AFTER, &mut running.read).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => Err(ProbeError::Interrupted { cause: error.to_string() }),
            Err(_) => {
                let (within, now) = (running.within, clock.now());
                if self.mig.as_ref().is_some_and(|mig| mig.is_changing(now)) {
                    running.began = now;
                }
                let is_late = now.since(running.began) >= within;
                self.overdue = Some(running);
                match is_late {
                    true => Err(ProbeError::Hangs { seconds: within.as_secs() }),
                    false => Err(ProbeError::Opening),
                }
            }
        }
    }
}

/// Whether GPUs of a sample have MIG instances that the driver hides from this process.
fn hides_instances(sample: &Sample) -> bool {
    sample.uses.iter().any(|device| device.fault == Some(DeviceFault::InstancesHidden))
}

/// An unhealthy device and its fault.
fn described(device: &DeviceUse) -> String {
    let fault = device.fault.map_or_else(|| "unhealthy".to_owned(), |fault| format!("{fault:?}"));
    match device.last_xid {
        Some(xid) => format!("{}: {fault}, last Xid {xid}", device.uuid),
        None => format!("{}: {fault}", device.uuid),
    }
}
