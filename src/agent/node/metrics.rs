//! Metrics of this node's GPUs for Prometheus, on an endpoint of the agent's own.
//!
//! A node has few GPUs, so each has its own series here. The extender has them all and exports
//! sums only. `UUID`, `gpu` and `Hostname` are spelled as in DCGM's exporter, so that both can be
//! joined. What the driver does not report has no series: zero would be false.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus::{Encoder, GaugeVec, IntCounterVec, IntGaugeVec, Opts, Registry, TextEncoder};

use crate::gpu::sample::Sample;
use wire::report::bodies::{Allocation, DeviceReport, DeviceUse, ProcessUse};
use wire::units::Share;
use wire::units::busy_part;

/// Labels of every series of a GPU.
const LABELS: [&str; 4] = ["UUID", "gpu", "Hostname", "model"];

/// Labels of every series of a GPU's tenant. The UID separates pods that had the same name.
const TENANT_LABELS: [&str; 5] = ["UUID", "Hostname", "namespace", "pod", "uid"];

/// Metrics of the GPUs of all nodes of one process; a handle, cheap to copy.
#[derive(Clone, Debug)]
pub struct AgentMetrics(Arc<Mutex<Families>>);

/// The families, and the devices and tenants with series in them.
#[derive(Debug)]
struct Families {
    registry: Registry,
    memory: IntGaugeVec,
    busy: GaugeVec,
    healthy: IntGaugeVec,
    xids: IntCounterVec,
    share: GaugeVec,
    tenant_memory: IntGaugeVec,
    tenant_share: GaugeVec,
    tenant_busy: GaugeVec,
    outdated: IntGaugeVec,
    /// Labels of devices and of tenants, by node.
    shown: BTreeMap<String, (DeviceLabels, TenantLabels)>,
}

/// Labels of the devices with series.
type DeviceLabels = BTreeSet<[String; 4]>;

/// Labels of the tenants with series.
type TenantLabels = BTreeSet<[String; 5]>;

impl Default for AgentMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl AgentMetrics {
    /// All families, without any device.
    ///
    /// # Panics
    /// Never: the names are constants, and the registry is new.
    pub fn new() -> Self {
        let families = Families::new().expect("the names are constants, each used once");
        Self(Arc::new(Mutex::new(families)))
    }

    /// Shows a sample of `node`, and the allocations there.
    pub fn show(&self, node: &str, sample: &Sample, allocations: &[Allocation]) {
        self.0.lock().show(node, sample, allocations);
    }

    /// Shows whether the agent of `node` waits for clients of MPS before it ends, so that its container is made again.
    pub fn show_outdated(&self, node: &str, is_outdated: bool) {
        self.0.lock().outdated.with_label_values(&[node]).set(i64::from(is_outdated));
    }

    /// All series in Prometheus' text format.
    pub fn text(&self) -> Vec<u8> {
        let families = self.0.lock();
        let mut text = Vec::new();
        let encoded = TextEncoder::new().encode(&families.registry.gather(), &mut text);
        encoded.expect("writing to memory does not fail, and every family has a name");
        text
    }
}

impl Families {
    /// All families, registered and without any series of a device.
    fn new() -> prometheus::Result<Self> {
        let memory = Opts::new("gpupack_gpu_memory_bytes", "Memory of a device, by what it is.");
        let busy = Opts::new("gpupack_gpu_busy_ratio", "Part of the time in which a kernel ran.");
        let healthy = Opts::new("gpupack_gpu_healthy", "1 when the device may take new tenants.");
        let xids = Opts::new("gpupack_gpu_xid_errors_total", "Xids since the agent's start.");
        let share =
            Opts::new("gpupack_gpu_share_gpus", "Allocated compute share of a device, in GPUs.");
        let tenant_memory = Opts::new(
            "gpupack_tenant_memory_bytes",
            "Memory of a tenant on a device: allocated, used, and the limit that the driver confirms.",
        );
        let tenant_share = Opts::new(
            "gpupack_tenant_share_gpus",
            "Compute share of a device that a tenant holds.",
        );
        let tenant_busy = Opts::new(
            "gpupack_tenant_busy_ratio",
            "A tenant's part of the time in which a kernel ran on a device, by its part of the share.",
        );
        let outdated = Opts::new(
            "gpupack_agent_outdated",
            "1 while the agent's container has to be made again, and clients of MPS are in the way.",
        );
        let build = Opts::new("gpupack_build_info", "Always 1; the running version.")
            .const_label("version", env!("CARGO_PKG_VERSION"))
            .const_label("component", "agent");
        let families = Self {
            registry: Registry::new(),
            memory: IntGaugeVec::new(memory, &with(&LABELS, "kind"))?,
            busy: GaugeVec::new(busy, &LABELS)?,
            healthy: IntGaugeVec::new(healthy, &LABELS)?,
            xids: IntCounterVec::new(xids, &with(&LABELS, "class"))?,
            share: GaugeVec::new(share, &LABELS)?,
            tenant_memory: IntGaugeVec::new(tenant_memory, &with(&TENANT_LABELS, "kind"))?,
            tenant_share: GaugeVec::new(tenant_share, &TENANT_LABELS)?,
            tenant_busy: GaugeVec::new(tenant_busy, &TENANT_LABELS)?,
            outdated: IntGaugeVec::new(outdated, &["Hostname"])?,
            shown: BTreeMap::new(),
        };
        let build = prometheus::IntGauge::with_opts(build)?;
        build.set(1);
        families.registry.register(Box::new(build))?;
        families.registry.register(Box::new(families.memory.clone()))?;
        families.registry.register(Box::new(families.busy.clone()))?;
        families.registry.register(Box::new(families.healthy.clone()))?;
        families.registry.register(Box::new(families.xids.clone()))?;
        families.registry.register(Box::new(families.share.clone()))?;
        families.registry.register(Box::new(families.tenant_memory.clone()))?;
        families.registry.register(Box::new(families.tenant_share.clone()))?;
        families.registry.register(Box::new(families.tenant_busy.clone()))?;
        families.registry.register(Box::new(families.outdated.clone()))?;
        Ok(families)
    }

    /// Shows a sample.
    fn show(&mut self, node: &str, sample: &Sample, allocations: &[Allocation]) {
        let uses: BTreeMap<&str, &DeviceUse> =
            sample.uses.iter().map(|seen| (seen.uuid.as_str(), seen)).collect();
        let mut shown = BTreeSet::new();
        for device in sample.inventory.iter() {
            let labels = [&device.uuid, &device.index.to_string(), node, &device.model]
                .map(|label: &str| label.to_owned());
            if let Some(seen) = uses.get(device.uuid.as_str()) {
                self.show_device(&labels.each_ref().map(String::as_str), device, seen, allocations);
            }
            let counts = sample.xids.get(&device.uuid).copied().unwrap_or_default();
            for (class, count) in [("application", counts.application), ("device", counts.device)] {
                let series = self.xids.with_label_values(&with(&labels, class));
                if count < series.get() {
                    series.reset(); // the GPU was away, and its counts start again
                }
                series.inc_by(count.saturating_sub(series.get()));
            }
            shown.insert(labels);
        }
        let tenants = self.show_tenants(node, &uses, allocations);
        let (devices_before, tenants_before) = self
            .shown
            .insert(node.to_owned(), (shown.clone(), tenants.clone()))
            .unwrap_or_default();
        for gone in devices_before.difference(&shown) {
            self.forget(gone);
        }
        for gone in tenants_before.difference(&tenants) {
            let labels = gone.each_ref().map(String::as_str);
            for kind in ["allocated", "used", "limit"] {
                drop(self.tenant_memory.remove_label_values(&with(&labels, kind)));
            }
            drop(self.tenant_share.remove_label_values(&labels));
            drop(self.tenant_busy.remove_label_values(&labels));
        }
    }

    /// Shows the tenants of all devices of a node; returns their labels.
    fn show_tenants(
        &self,
        node: &str,
        uses: &BTreeMap<&str, &DeviceUse>,
        allocations: &[Allocation],
    ) -> TenantLabels {
        let mut shown = BTreeSet::new();
        for allocation in allocations {
            let (namespace, pod) = allocation.pod.split_once('/').unwrap_or(("", &allocation.pod));
            for part in &allocation.devices {
                let labels = [part.uuid.as_str(), node, namespace, pod, &allocation.pod_uid];
                let seen = uses.get(part.uuid.as_str());
                let used = seen.and_then(|seen| used_by(&allocation.pod_uid, seen));
                let tenant = seen.and_then(|seen| {
                    seen.tenants.iter().find(|tenant| tenant.pod_uid == allocation.pod_uid)
                });
                let limit = tenant.and_then(|tenant| tenant.limit_mib);
                let is_listed = seen.is_some_and(|seen| seen.processes.is_some());
                for (kind, mib) in
                    [("allocated", Some(part.memory_mib)), ("used", used), ("limit", limit)]
                {
                    let labels = with(&labels, kind);
                    match mib {
                        Some(mib) => self.tenant_memory.with_label_values(&labels).set(bytes(mib)),
                        // Between two lists the value of the last one stays.
                        None if is_listed => {
                            drop(self.tenant_memory.remove_label_values(&labels));
                        }
                        None => {}
                    }
                }
                self.tenant_share.with_label_values(&labels).set(gpus(part.share_millionths));
                if let Some(seen) = seen.filter(|_| is_listed) {
                    match load_of(&allocation.pod_uid, seen, allocations) {
                        Some(load) => {
                            let load = gpus(load.millionths());
                            self.tenant_busy.with_label_values(&labels).set(load);
                        }
                        None => drop(self.tenant_busy.remove_label_values(&labels)),
                    }
                }
                shown.insert(labels.map(str::to_owned));
            }
        }
        shown
    }

    /// Shows one device.
    fn show_device(
        &self,
        labels: &[&str; 4],
        device: &DeviceReport,
        seen: &DeviceUse,
        allocations: &[Allocation],
    ) {
        self.healthy.with_label_values(labels).set(i64::from(seen.healthy));
        match seen.busy_percent {
            Some(percent) => {
                self.busy.with_label_values(labels).set(f64::from(percent) / 100.0);
            }
            None => drop(self.busy.remove_label_values(labels)),
        }
        let held = held(&device.uuid, allocations);
        let allocated = held.values().fold(0, |sum: u64, mib| sum.saturating_add(*mib));
        let capacity = device.memory_mib.saturating_sub(device.reserved_mib);
        let parts = allocations.iter().flat_map(|allocation| &allocation.devices);
        let share = parts.filter(|part| part.uuid == device.uuid).map(|part| part.share_millionths);
        self.share.with_label_values(labels).set(gpus(share.fold(0, u64::saturating_add)));
        self.set_memory(labels, "capacity", Some(capacity));
        self.set_memory(labels, "reserved", Some(device.reserved_mib));
        self.set_memory(labels, "allocated", Some(allocated));
        self.set_memory(labels, "observed", seen.used_mib);
        if let Some(processes) = &seen.processes {
            let outside = OutsideUse::of(processes, &held);
            self.set_memory(labels, "over_limit", Some(outside.overuse_mib));
            self.set_memory(labels, "untracked", Some(outside.untracked_mib));
        } else if !seen.healthy {
            // The last list is out of date.
            self.set_memory(labels, "over_limit", None);
            self.set_memory(labels, "untracked", None);
        }
    }

    /// Sets one amount of memory, or removes its series.
    fn set_memory(&self, labels: &[&str; 4], kind: &str, mib: Option<u64>) {
        let labels = with(labels, kind);
        match mib {
            Some(mib) => self.memory.with_label_values(&labels).set(bytes(mib)),
            None => drop(self.memory.remove_label_values(&labels)),
        }
    }

    /// Removes all series of a device; it may have only some.
    fn forget(&self, labels: &[String; 4]) {
        let labels = labels.each_ref().map(String::as_str);
        for kind in ["capacity", "reserved", "allocated", "observed", "over_limit", "untracked"] {
            self.set_memory(&labels, kind, None);
        }
        drop(self.busy.remove_label_values(&labels));
        drop(self.healthy.remove_label_values(&labels));
        drop(self.share.remove_label_values(&labels));
        for class in ["application", "device"] {
            drop(self.xids.remove_label_values(&with(&labels, class)));
        }
    }
}

fn bytes(mib: u64) -> i64 {
    i64::try_from(mib.saturating_mul(1 << 20)).unwrap_or(i64::MAX)
}

/// A share in the unit of a gauge: GPUs.
#[expect(clippy::cast_precision_loss, reason = "a gauge is a float; the ledger is not")]
fn gpus(millionths: u64) -> f64 {
    millionths as f64 / 1e6
}

/// MiB in use by the processes of a pod, by the list; `None` without a list, and if the driver does
/// not report it for one of them.
fn used_by(uid: &str, seen: &DeviceUse) -> Option<u64> {
    let mut own =
        seen.processes.as_ref()?.iter().filter(|process| process.pod_uid.as_deref() == Some(uid));
    own.try_fold(0_u64, |sum, process| sum.checked_add(process.memory_mib?))
}

/// The part of the time in which a pod's kernels ran on a device with lists: as the driver reports
/// it, or else its part of the device's time by its share. `None` if no time is reported.
fn load_of(uid: &str, seen: &DeviceUse, allocations: &[Allocation]) -> Option<Share> {
    let list = seen.processes.as_ref()?;
    let tenant = seen.tenants.iter().find(|tenant| tenant.pod_uid == uid);
    if let Some(percent) = tenant.and_then(|tenant| tenant.busy_percent) {
        return Some(Share::from_millionths(u64::from(percent) * 10_000));
    }
    let busy = seen.busy_percent?;
    if !has_process_of(uid, list) {
        return Some(Share::ZERO);
    }
    let present = allocations.iter().filter(|allocation| has_process_of(&allocation.pod_uid, list));
    let present = present.map(|allocation| share_on(&seen.uuid, allocation));
    let present = Share::from_millionths(present.fold(0, u64::saturating_add));
    let own = allocations.iter().find(|allocation| allocation.pod_uid == uid);
    let own = own.map_or(0, |allocation| share_on(&seen.uuid, allocation));
    Some(busy_part(busy, Share::from_millionths(own), present))
}

/// Whether a list has a process of the pod with this UID.
fn has_process_of(uid: &str, list: &[ProcessUse]) -> bool {
    list.iter().any(|process| process.pod_uid.as_deref() == Some(uid))
}

/// Millionths of the device `uuid` that an allocation has.
fn share_on(uuid: &str, allocation: &Allocation) -> u64 {
    let parts = allocation.devices.iter().filter(|part| part.uuid == uuid);
    parts.map(|part| part.share_millionths).fold(0, u64::saturating_add)
}

/// The labels of a device or tenant and one more.
fn with<'a, T: AsRef<str>>(labels: &'a [T], more: &'a str) -> Vec<&'a str> {
    labels.iter().map(AsRef::as_ref).chain([more]).collect()
}

/// Allocated MiB of the device `uuid` by pod UID; zero for a pod with nothing of it.
fn held<'a>(uuid: &str, allocations: &'a [Allocation]) -> BTreeMap<&'a str, u64> {
    let mut held = BTreeMap::new();
    for allocation in allocations {
        held.entry(allocation.pod_uid.as_str()).or_default();
        for part in allocation.devices.iter().filter(|part| part.uuid == uuid) {
            let sum = held.entry(allocation.pod_uid.as_str()).or_insert(0_u64);
            *sum = sum.saturating_add(part.memory_mib);
        }
    }
    held
}

/// Memory in use outside of what is allocated.
#[derive(Debug, PartialEq, Eq)]
struct OutsideUse {
    /// Memory of pods beyond what they hold.
    overuse_mib: u64,
    /// Untracked memory: of processes of no pod that holds anything.
    untracked_mib: u64,
}

impl OutsideUse {
    /// The use of `processes` outside of what is `held`, without amounts that are not reported.
    fn of(processes: &[ProcessUse], held: &BTreeMap<&str, u64>) -> Self {
        let mut used: BTreeMap<Option<&str>, u64> = BTreeMap::new();
        for process in processes {
            let sum = used.entry(process.pod_uid.as_deref()).or_default();
            *sum = sum.saturating_add(process.memory_mib.unwrap_or(0));
        }
        let mut outside = Self { overuse_mib: 0, untracked_mib: 0 };
        for (pod, mib) in used {
            let (sum, beyond) = match pod.and_then(|pod| held.get(pod)) {
                Some(held) => (&mut outside.overuse_mib, mib.saturating_sub(*held)),
                None => (&mut outside.untracked_mib, mib),
            };
            *sum = sum.saturating_add(beyond);
        }
        outside
    }
}

#[cfg(test)]
mod tests;
