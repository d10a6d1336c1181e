//! The GPUs of this node, read through NVML. Only this file and its folder use `nvml-wrapper`.
//!
//! All state has UUIDs as keys, because NVML's indices change between boots and its handles end
//! with a MIG instance. Handles are kept while the library is open, and each sample reads their
//! UUIDs. The library is opened at the first sample, and again after a reload of the driver. Dropping
//! the probe closes it, since a driver cannot be unloaded while a process has the library open.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nvml_wrapper::Nvml;

use crate::gpu::clearing::Clearing;
use crate::gpu::health::{GpuEvent, GpuHealth};
use crate::gpu::lent_limits::{Containers, LentLimits};
use crate::gpu::library_gate::LibraryGate;
use crate::gpu::sample::{Probe, ProbeError, ProcessSampling, Sample};
use crate::mig::on_demand::MigOnDemand;
use crate::mps::daemons::MpsDaemons;
use crate::nvml::cgroup_limits::{MemoryLimits, OpenDriver};
use crate::nvml::details::Details;
use crate::nvml::library::{Handles, LIBRARY};
use crate::nvml::raw::{EventDevice, EventSet};
use crate::nvml::sweep::{Failure, SeenDevice, Sweep, Sweeper};
use crate::nvml::trouble::{Trouble, unless_unsupported};
use crate::nvml::utilization::Utilization;
use crate::nvml::{details, instances, library};
use crate::processes::draining::Draining;
use crate::processes::driver_mounts::DriverMounts;
use crate::processes::pods::PodsByProcess;
use crate::processes::watched::Watched;
use crate::upkeep::condition::{CAPABILITIES, is_module_loaded};
use wire::api::condition::{ClearResult, DeviceFault};
use wire::api::state::DeviceKind;
use wire::ids::{MAX_DEVICES_PER_NODE, PodUid};
use wire::report::bodies::{
    Allocation, ClearOrder, DeviceReport, DeviceUse, DriverReport, MigProfileReport,
};
use wire::units::Timestamp;

/// How long the library stays open while a GPU is lost or needs a reset; it doubles each time. An open
/// library does not see the effect of a reset, and prevents some resets. Opening takes up to half a
/// minute on large nodes, and no GPU is read meanwhile.
const REOPEN_AFTER: Duration = Duration::from_secs(30);

/// Longest such time.
const REOPEN_AFTER_MAX: Duration = Duration::from_secs(120);

/// Reads the GPUs of this node.
pub struct NvmlProbe {
    library: PathBuf,
    /// Finds the pod of a process.
    pods: PodsByProcess,
    /// The MPS daemons, if the agent watches them.
    mps: Option<MpsDaemons>,
    /// What the agent made, if it makes MIG instances.
    on_demand: Option<MigOnDemand>,
    /// The limits that are ordered, if the agent sets any.
    lent_limits: Option<LentLimits>,
    /// Which GPU a person wants to be cleared, if the agent obeys that.
    clearing: Option<Clearing>,
    /// Whether the library may be open; without one it may.
    gate: Option<LibraryGate>,
    /// The library while it is open.
    open: Option<Opened>,
    /// How long it stays open while a GPU is away.
    reopen_after: Duration,
    /// Devices as they were last read successfully, by UUID; reported for a lost device.
    known: BTreeMap<String, DeviceReport>,
    /// Health of each GPU, by UUID; outlives the library.
    health: BTreeMap<String, GpuHealth>,
    /// Xids that have no effect, beside those of applications.
    ignored_xids: BTreeSet<u64>,
    /// Ended pods that hold devices, and their running processes.
    draining: Draining,
    /// Processes whose end is seen without NVML.
    watched: Watched,
    /// Which containers of pods that hold devices have the driver.
    driver_mounts: DriverMounts,
    /// The kernel's list of MIG instances.
    capabilities: PathBuf,
}

/// The open library, and the state that is valid as long as it is open.
struct Opened {
    nvml: Nvml,
    since: Timestamp,
    handles: Handles,
    /// How often instances were changed here before the last sweep.
    changes: u64,
    /// The set of events; none if it cannot be created.
    events: Option<EventSet>,
    /// UUID of each GPU with registered events, by the identity of its handle.
    registered: BTreeMap<usize, String>,
    details: BTreeMap<String, Details>,
    driver: Option<DriverReport>,
    /// Reads and sets memory limits; none if the driver has none.
    limits: Option<MemoryLimits>,
    /// The last read utilization of each GPU's processes, by UUID.
    utilization_seen: BTreeMap<String, Utilization>,
    /// What can be made on each GPU in MIG mode, by UUID.
    mig_profiles: BTreeMap<String, Vec<MigProfileReport>>,
    /// UUIDs of the GPUs that have MIG instances which the library hides.
    hiding: BTreeSet<String>,
}

impl NvmlProbe {
    /// A probe that loads `library`, or NVIDIA's own by default, at the first sample.
    pub fn new(library: Option<PathBuf>, pods: PodsByProcess) -> Self {
        let library = library.unwrap_or_else(|| PathBuf::from(LIBRARY));
        let (known, health) = (BTreeMap::new(), BTreeMap::new());
        let (draining, watched) = (Draining::default(), Watched::default());
        let capabilities = pods.root.join(CAPABILITIES);
        Self {
            library,
            pods,
            mps: None,
            on_demand: None,
            lent_limits: None,
            clearing: None,
            gate: None,
            open: None,
            reopen_after: REOPEN_AFTER,
            known,
            health,
            ignored_xids: BTreeSet::new(),
            draining,
            watched,
            driver_mounts: DriverMounts::default(),
            capabilities,
        }
    }

    /// The same probe, which reads the kernel's list of MIG instances in this folder.
    #[must_use]
    pub fn with_capabilities(self, capabilities: PathBuf) -> Self {
        Self { capabilities, ..self }
    }

    /// The same probe, which also reads the limits of MPS clients.
    #[must_use]
    pub fn with_mps(self, daemons: MpsDaemons) -> Self {
        Self { mps: Some(daemons), ..self }
    }

    /// The same probe, which also reports what the agent can make and has made.
    #[must_use]
    pub fn with_mig(self, on_demand: MigOnDemand) -> Self {
        Self { on_demand: Some(on_demand), ..self }
    }

    /// The same probe, which also sets limits of memory.
    #[must_use]
    pub fn with_limits(self, lent_limits: LentLimits) -> Self {
        Self { lent_limits: Some(lent_limits), ..self }
    }

    /// The same probe, which also forgets past events of a GPU that a person clears.
    #[must_use]
    pub fn with_clearing(self, clearing: Clearing) -> Self {
        Self { clearing: Some(clearing), ..self }
    }

    /// The same probe, for which these Xids have no effect.
    #[must_use]
    pub fn ignoring(self, ignored_xids: BTreeSet<u64>) -> Self {
        Self { ignored_xids, ..self }
    }

    /// The same probe, which opens the library only while this allows it.
    #[must_use]
    pub fn with_gate(self, gate: LibraryGate) -> Self {
        Self { gate: Some(gate), ..self }
    }

    /// Sets the limits of memory that are ordered.
    fn set_limits(&self, open: &Opened, inventory: &[DeviceReport], now: Timestamp) {
        let Some(lent) = &self.lent_limits else { return };
        let limits = open.limits.as_ref().filter(|limits| limits.can_set());
        let Some(limits) = limits else { return lent.set_none() };
        let orders = lent.orders();
        if orders.as_ref().is_some_and(|orders| lent.are_done(orders, now)) {
            return;
        }
        let gpus = inventory.iter().filter(|device| device.kind == DeviceKind::Gpu);
        let limited = gpus.filter(|gpu| gpu.can_limit_memory).map(|gpu| gpu.uuid.clone()).collect();
        let pods = orders.iter().flat_map(|orders| &orders.gpus).flat_map(|gpu| &gpu.pods);
        let pods: BTreeSet<PodUid> = pods.map(|pod| PodUid::new(&*pod.pod_uid)).collect();
        let containers = match pods.is_empty() {
            true => Ok(Containers::new()),
            false => self.pods.containers_of(&pods),
        };
        let driver = OpenDriver { nvml: &open.nvml, handles: &open.handles, limits };
        lent.carry_out(orders.as_ref(), &limited, containers.as_ref(), &driver, now);
    }

    /// Clears the GPU that a person wants to be cleared, if it answers now.
    fn clear(&mut self, sweep: &Sweep) {
        let Some(clearing) = &self.clearing else { return };
        let Some(ClearOrder { gpu, fault_event, .. }) = clearing.open_order() else { return };
        // It may answer in part: of its instances, for instance, it may say that it needs a reset.
        let has_failed =
            sweep.failures.iter().any(|failure| failure.uuid.as_deref() == Some(&*gpu));
        let is_seen = sweep.seen.iter().any(|device| device.report.uuid == gpu);
        let answers = is_seen && !has_failed;
        let cleared = match self.health.get_mut(&gpu).filter(|_| answers) {
            Some(health) => health.clear(fault_event).map_err(Some),
            None => {
                let absent = self.known.get(&gpu);
                Err(absent.and_then(|known| absent_device(known, &sweep.failures).usage.fault))
            }
        };
        let (result, fault) = match cleared {
            Ok(true) => (ClearResult::Cleared, None),
            Ok(false) => (ClearResult::NothingToClear, None),
            Err(fault) => (ClearResult::Refused, fault),
        };
        clearing.settle(&gpu, result, fault);
    }

    /// Opens the library.
    fn open(&self, now: Timestamp) -> Result<Opened, ProbeError> {
        let nvml = library::open(&self.library)?;
        let driver = details::driver(&nvml);
        let (registered, details) = (BTreeMap::new(), BTreeMap::new());
        let limits = MemoryLimits::find(&self.library);
        Ok(Opened {
            nvml,
            since: now,
            handles: Handles::default(),
            changes: 0,
            events: None,
            registered,
            details,
            driver,
            limits,
            utilization_seen: BTreeMap::new(),
            mig_profiles: BTreeMap::new(),
            hiding: BTreeSet::new(),
        })
    }

    /// Walks over all devices.
    fn sweep(
        &mut self,
        open: &mut Opened,
        processes: ProcessSampling,
        changes: u64,
        now: Timestamp,
    ) -> Result<Sweep, ProbeError> {
        open.read_events(&self.known, &mut self.health, &self.ignored_xids, now)?;
        // Another process may have made instances.
        let may_have_new = processes == ProcessSampling::List || changes != open.changes;
        open.changes = changes;
        let sweeper = Sweeper {
            nvml: &open.nvml,
            handles: &mut open.handles,
            may_have_new,
            events: open.events.as_ref(),
            registered: &mut open.registered,
            details: &mut open.details,
            health: &mut self.health,
            known: &self.known,
            limits: open.limits.as_ref(),
            pods: &self.pods,
            utilization_seen: &mut open.utilization_seen,
            mps: self.mps.as_ref(),
            mig_profiles: self.on_demand.as_ref().map(|_| &mut open.mig_profiles),
            capabilities: &self.capabilities,
            hiding: &mut open.hiding,
            now,
            processes,
        };
        sweeper.sweep()
    }

    /// The sample of a sweep, with the known devices that did not answer. `changes` says how often
    /// instances were changed here before the sweep.
    fn settle(&mut self, sweep: Sweep, open: &mut Opened, changes: u64) -> Sample {
        let Sweep { seen, mut failures } = sweep;
        let mut seen = distrust_duplicates(seen);
        seen.retain(|device| {
            let cannot_be = Failure::of_absurd(&device.report, &device.usage);
            let is_sane = cannot_be.is_none();
            failures.extend(cannot_be);
            is_sane
        });
        let answered: BTreeSet<String> =
            seen.iter().map(|device| device.report.uuid.clone()).collect();
        if !failures.is_empty() {
            let absent = self.known.values().filter(|known| !answered.contains(&known.uuid));
            seen.extend(absent.map(|known| absent_device(known, &failures)));
        }
        for device in &seen {
            if let (Some(DeviceFault::Lost | DeviceFault::ResetRequired), Some(health)) =
                (device.usage.fault, self.health.get_mut(&device.report.uuid))
            {
                health.learn_absence();
            }
        }
        let there: BTreeSet<String> =
            seen.iter().map(|device| device.report.uuid.clone()).collect();
        seen.retain(|device| {
            device.report.parent.as_ref().is_none_or(|parent| there.contains(parent))
        });
        if let Some(on_demand) = &self.on_demand {
            seen.retain(|device| !on_demand.is_making(&device.report));
        }
        seen.truncate(MAX_DEVICES_PER_NODE);
        open.details.retain(|uuid, _| there.contains(uuid));
        open.utilization_seen.retain(|uuid, _| there.contains(uuid));
        open.mig_profiles.retain(|uuid, _| there.contains(uuid));
        open.hiding.retain(|uuid| there.contains(uuid));
        self.health.retain(|uuid, _| there.contains(uuid));
        seen.iter_mut().for_each(|device| {
            let lacks_nodes = |it: &MigOnDemand| it.lacks_nodes(&device.report.uuid);
            if device.usage.fault.is_none() && self.on_demand.as_ref().is_some_and(lacks_nodes) {
                device.usage.fault = Some(DeviceFault::NodesMissing);
            }
            self.judge(device, &open.details);
        });
        self.known =
            seen.iter().map(|device| (device.report.uuid.clone(), device.report.clone())).collect();
        let xids = self.health.iter().map(|(uuid, health)| (uuid.clone(), health.counts()));
        let (mut inventory, uses): (Vec<_>, Vec<_>) =
            seen.into_iter().map(|device| (device.report, device.usage)).unzip();
        inventory.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        if let Some(on_demand) = &self.on_demand {
            on_demand.mark(&mut inventory, changes);
        }
        Sample {
            inventory: inventory.into(),
            uses,
            driver: open.driver.clone(),
            xids: xids.collect(),
            unreadable: failures.len(),
            has_unwatched_pods: false,
            draining: BTreeSet::new(),
            mig_failures: Vec::new(),
            memory_limits: None,
            containers: Arc::default(),
        }
    }

    /// Sets the health of a device: its own fault, or that of its GPU by events and recovery
    /// actions. Adds its NVLink neighbors, which are known only after all devices were read.
    fn judge(&self, device: &mut SeenDevice, details: &BTreeMap<String, Details>) {
        let SeenDevice { report, usage } = device;
        let gpu = report.parent.as_ref().unwrap_or(&report.uuid);
        if let Some(health) = self.health.get(gpu) {
            let instance = details.get(&report.uuid).and_then(|details| details.instance);
            let own = health.fault(instance);
            usage.fault = match usage.fault {
                // A size that the operator gives ends this one, and must not end another with it.
                Some(
                    DeviceFault::NoMemory
                    | DeviceFault::UnknownUse
                    | DeviceFault::InstancesHidden
                    | DeviceFault::NodesMissing,
                ) => own.or(usage.fault),
                fault => fault.or(own),
            };
            usage.last_xid = health.last_xid();
            usage.fault_event = health.newest_event().filter(|_| report.parent.is_none());
        }
        usage.healthy = usage.fault.is_none();
        report.healthy = usage.healthy;
        if details.contains_key(&report.uuid) {
            // A GPU in MIG mode has no traffic with others.
            report.neighbors = match report.kind {
                DeviceKind::Gpu => details::neighbors(details, &report.uuid),
                DeviceKind::MigParent | DeviceKind::MigInstance => Vec::new(),
            };
        }
        if !report.has_believable_details() {
            *report = report.clone().without_details();
        }
    }
}

impl Opened {
    /// Passes on new events. They are optional: if they fail, the next sample creates the set
    /// again, and recovery actions are read without them.
    fn read_events(
        &mut self,
        known: &BTreeMap<String, DeviceReport>,
        health: &mut BTreeMap<String, GpuHealth>,
        ignored_xids: &BTreeSet<u64>,
        now: Timestamp,
    ) -> Result<(), ProbeError> {
        if self.events.is_none() {
            self.registered.clear();
            match unless_unsupported(EventSet::create(&self.nvml)) {
                Ok(set) => self.events = set,
                Err(Trouble::Library(error)) => return Err(error),
                Err(Trouble::Unsupported | Trouble::Device(_)) => {}
            }
        }
        let Some(set) = &self.events else { return Ok(()) };
        match unless_unsupported(set.read(&self.nvml)) {
            Ok(events) => {
                for (device, event) in events.into_iter().flatten() {
                    let event = event.unless_ignored(ignored_xids);
                    for gpu in self.gpus_of(device, event, known) {
                        let instances =
                            known.values().filter(|device| device.parent.as_ref() == Some(&gpu));
                        let event = event.of_known_instance(|id| {
                            let mut details =
                                instances.filter_map(|device| self.details.get(&device.uuid));
                            details.any(|details| details.instance == Some(id))
                        });
                        health.entry(gpu).or_default().strike(event, now);
                    }
                }
            }
            Err(Trouble::Library(error)) => return Err(error),
            Err(Trouble::Unsupported | Trouble::Device(_)) => {
                if let Some(set) = self.events.take() {
                    set.free(&self.nvml);
                }
            }
        }
        Ok(())
    }

    /// The GPUs that an event may be about. A handle that no call has returned may name its
    /// GPU; if it does not, every GPU is suspect, as for NVIDIA's device plugin.
    fn gpus_of(
        &self,
        device: EventDevice,
        event: GpuEvent,
        known: &BTreeMap<String, DeviceReport>,
    ) -> Vec<String> {
        if let Some(uuid) = self.registered.get(&device.identity()) {
            return vec![uuid.clone()];
        }
        match device.uuid(&self.nvml).map(|uuid| (known.get(&uuid), uuid)) {
            Ok((Some(device), uuid)) => vec![device.parent.clone().unwrap_or(uuid)],
            Ok((None, uuid)) => {
                tracing::warn!(uuid, ?event, "an event of a GPU that is not reported");
                Vec::new()
            }
            Err(error) => {
                tracing::warn!(?event, %error, "an event of an unknown GPU: all are suspect");
                let gpus = known.values().filter(|device| device.parent.is_none());
                gpus.map(|gpu| gpu.uuid.clone()).collect()
            }
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(set) = self.events.take() {
            set.free(&self.nvml);
        }
    }
}

impl Failure {
    /// The failure of a device that reports impossible values. The extender would refuse every
    /// report of a node with such a device.
    fn of_absurd(report: &DeviceReport, usage: &DeviceUse) -> Option<Self> {
        let sane = report.is_believable() && usage.is_believable();
        (!sane).then(|| Self { uuid: Some(report.uuid.clone()), fault: DeviceFault::Absurd })
    }
}

/// Keeps one of several devices with the same UUID, as unhealthy: it is unknown which of them a
/// container would get.
fn distrust_duplicates(seen: Vec<SeenDevice>) -> Vec<SeenDevice> {
    let mut kept: Vec<SeenDevice> = Vec::with_capacity(seen.len());
    for device in seen {
        match kept.iter_mut().find(|known| known.report.uuid == device.report.uuid) {
            Some(first) => {
                (first.usage.fault, first.usage.processes) = (Some(DeviceFault::UuidTwice), None);
                first.usage.tenants.clear();
            }
            None => kept.push(device),
        }
    }
    kept
}

/// The report of a known device that did not answer: its size stays, its use is unknown. Its fault
/// is that of its own failure, else of its GPU's, else of one without a UUID.
fn absent_device(known: &DeviceReport, failures: &[Failure]) -> SeenDevice {
    let failure_of =
        |uuid: Option<&String>| failures.iter().find(|failure| failure.uuid.as_ref() == uuid);
    let failure = failure_of(Some(&known.uuid))
        .or_else(|| known.parent.as_ref().and_then(|parent| failure_of(Some(parent))))
        .or_else(|| failure_of(None));
    let fault = failure.map_or(DeviceFault::NotAnswering, |failure| failure.fault);
    SeenDevice { report: known.clone(), usage: DeviceUse::unread(known.uuid.clone(), fault) }
}

impl Probe for NvmlProbe {
    fn sample(&mut self, processes: ProcessSampling, now: Timestamp) -> Result<Sample, ProbeError> {
        let sample = self.take_sample(processes, now);
        let is_driver_away = match &sample {
            Ok(_) => false,
            Err(ProbeError::Closed { .. }) => is_module_loaded(&self.pods.root) == Some(false),
            Err(_) => true,
        };
        if is_driver_away {
            // Whatever was wrong with a GPU, the driver starts again.
            self.health.values_mut().for_each(GpuHealth::learn_absence);
        }
        sample
    }

    fn observe(&mut self, allocations: &[Allocation], now: Timestamp) {
        self.draining.observe(allocations);
        self.driver_mounts.observe(allocations, now);
        self.watched.observe(allocations);
    }

    fn is_open(&self) -> bool {
        // Empty places of a GPU in MIG mode are looked up with each list.
        self.open.as_ref().is_some_and(|open| !open.handles.have_vacancies())
    }
}

impl NvmlProbe {
    /// The MIG profiles that the driver lists for each GPU, by UUID, in MIG mode or not.
    ///
    /// # Errors
    /// [`ProbeError`] if they cannot be read.
    #[doc(hidden)] // for tests on hardware
    pub fn listed_mig_profiles(
        &self,
    ) -> Result<BTreeMap<String, Vec<MigProfileReport>>, ProbeError> {
        let all = instances::listed(&library::open(&self.library)?)?;
        let reports = all.into_iter().map(|(uuid, profiles)| {
            (uuid, profiles.into_iter().map(|profile| profile.report).collect())
        });
        Ok(reports.collect())
    }

    /// Reads all devices; opens the library if necessary.
    fn take_sample(
        &mut self,
        processes: ProcessSampling,
        now: Timestamp,
    ) -> Result<Sample, ProbeError> {
        if let Some(why) = self.gate.as_ref().and_then(LibraryGate::keeps_closed) {
            self.open = None;
            return Err(ProbeError::Closed { why });
        }
        let is_new = self.open.is_none();
        let mut open = match self.open.take() {
            Some(open) => open,
            None => self.open(now)?,
        };
        let has_ended = self.watched.forget_ended(&self.pods);
        let changes = self.on_demand.as_ref().map_or(0, |on_demand| on_demand.made().changes());
        // Of a device that is new here, only its list may say what is in use.
        let needs_list = has_ended || is_new || changes != open.changes;
        let processes = if needs_list { ProcessSampling::List } else { processes };
        let sweep = self.sweep(&mut open, processes, changes, now)?;
        self.clear(&sweep);
        if processes == ProcessSampling::List {
            let driver = open.driver.as_ref();
            open.driver = driver.map(|driver| details::with_modules(driver, &self.pods.root));
        }
        let mut sample = self.settle(sweep, &mut open, changes);
        self.draining.complete(&mut sample.uses, &self.pods);
        self.watched.learn(&sample.uses, &self.pods);
        sample.has_unwatched_pods = self.watched.lacks_a_pod();
        self.driver_mounts.look(&self.pods, now);
        sample.containers = self.driver_mounts.reports().into();
        self.set_limits(&open, &sample.inventory, now);
        if let Some(daemons) = &self.mps {
            daemons.learn(&sample.inventory);
        }
        let is_any_away = sample.uses.iter().any(|device| {
            matches!(device.fault, Some(DeviceFault::Lost | DeviceFault::ResetRequired))
        });
        // Kept only now: after an error of the whole library, the next sample opens it again.
        if !is_any_away {
            self.reopen_after = REOPEN_AFTER;
        }
        if is_any_away && now.since(open.since) >= self.reopen_after {
            self.reopen_after = (2 * self.reopen_after).min(REOPEN_AFTER_MAX);
        } else {
            self.open = Some(open);
        }
        Ok(sample)
    }
}

impl std::fmt::Debug for NvmlProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NvmlProbe")
            .field("library", &self.library)
            .field("is_open", &self.open.is_some())
            .field("devices", &self.known.len())
            .finish_non_exhaustive()
    }
}
