//! What a report says beside amounts: topology and condition of devices, limits of tenants. It is
//! checked like the rest. The ledger keeps it for people, and verifies isolation with it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use crate::api::condition::DeviceFault;
use crate::api::state::DeviceKind;
use crate::device;
use crate::device::{DeviceDetails, Health};
use crate::ids::{
    DeviceId, MAX_DEVICE_MEMORY, MAX_DEVICES_PER_NODE, MigProfile, ModelName, PodUid,
};
use crate::report::bodies::{ContainerReport, DeviceReport, DeviceUse, DriverReport, ProcessUse};
use crate::report::mig;
use crate::report::refusal::{ReportError, memory, text};
use crate::report::report_limits::{
    MAX_CONTAINERS, MAX_NAME_BYTES, MAX_PROCESSES_PER_DEVICE, MAX_SM_COUNT,
};
use crate::seen;
use crate::seen::{Condition, Driver, ReportedTenant, StartedContainer, StartedContainers};
use crate::units::MemMib;

/// Longest version of a driver in bytes; NVML's own buffer has 80.
const MAX_VERSION_BYTES: usize = 80;

/// Longest product name of a GPU in bytes; NVML's own buffer has 96.
const MAX_MODEL_BYTES: usize = 128;

/// Largest minor number in Linux.
const MAX_MINOR: u32 = (1 << 20) - 1;

/// Largest NUMA node in Linux with the largest kernel configuration.
const MAX_NUMA_NODE: u32 = 1023;

/// Most NVLinks between two GPUs that are accepted; in 2026 a GPU has 18 in total.
const MAX_LINKS: u32 = 1024;

impl DriverReport {
    /// Whether an extender would accept it.
    pub fn is_believable(&self) -> bool {
        driver(self.clone()).is_ok()
    }
}

impl DeviceReport {
    /// Whether an extender would accept its topology and its other details.
    pub fn has_believable_details(&self) -> bool {
        DeviceId::new(&self.uuid).is_ok_and(|id| device(&id, self).is_ok())
    }

    /// The same device without these details.
    pub fn without_details(self) -> Self {
        Self {
            memory_mib: self.memory_mib,
            reserved_mib: self.reserved_mib,
            parent: self.parent,
            mig_profile: self.mig_profile,
            healthy: self.healthy,
            ..Self::new(self.uuid, self.index, self.model, self.kind)
        }
    }
}

impl DeviceUse {
    /// Whether an extender would accept it.
    pub fn is_believable(&self) -> bool {
        DeviceId::new(&self.uuid).is_ok_and(|id| device_use(id, self.clone()).is_ok())
            && tenants(std::slice::from_ref(self)).is_ok()
    }
}

impl DeviceReport {
    /// Whether an extender would accept its name, kind and memory.
    pub fn is_believable(&self) -> bool {
        of_inventory(self.clone()).is_ok_and(|device| {
            device.reserved <= device.total && device.total <= MAX_DEVICE_MEMORY
        })
    }
}

/// Checks one device of an inventory.
pub fn of_inventory(report: DeviceReport) -> Result<device::Device, ReportError> {
    let id = DeviceId::new(&report.uuid)?;
    text("model", &report.model, MAX_MODEL_BYTES)?;
    let kind = match (report.kind, report.parent, report.mig_profile) {
        (DeviceKind::Gpu, None, None) => device::DeviceKind::Gpu,
        (DeviceKind::MigParent, None, None) => device::DeviceKind::MigParent,
        (DeviceKind::MigInstance, Some(parent), Some(profile)) => {
            text("migProfile", &profile, MAX_NAME_BYTES)?;
            device::DeviceKind::MigInstance {
                parent: DeviceId::new(&parent)?,
                profile: MigProfile::new(profile),
            }
        }
        (kind, _, _) => return Err(ReportError::Kind { uuid: id, kind }),
    };
    Ok(device::Device {
        id,
        index: device::DeviceIndex(report.index),
        model: ModelName::new(report.model),
        total: MemMib::new(report.memory_mib),
        reserved: MemMib::new(report.reserved_mib),
        health: match kind {
            // Its use may say that it lacks nothing else: then the size in the inventory counts.
            device::DeviceKind::Gpu if report.memory_mib == 0 => Health::Unhealthy,
            _ => health(report.healthy),
        },
        kind,
    })
}

/// Checks the driver of a node.
pub fn driver(report: DriverReport) -> Result<Driver, ReportError> {
    text("driver", &report.version, MAX_VERSION_BYTES)?;
    if let Some(cuda) = &report.cuda {
        text("cuda", cuda, MAX_VERSION_BYTES)?;
    }
    Ok(Driver { version: report.version, cuda: report.cuda, lacks_uvm: report.lacks_uvm })
}

/// Checks the details of each device of an inventory. It drops neighbors that are not in the
/// inventory.
pub fn devices(
    inventory: &[DeviceReport],
) -> Result<BTreeMap<DeviceId, DeviceDetails>, ReportError> {
    let mut all = BTreeMap::new();
    for report in inventory {
        let id = DeviceId::new(&report.uuid)?;
        let details = device(&id, report)?;
        all.insert(id, details);
    }
    let ids: BTreeSet<DeviceId> = all.keys().cloned().collect();
    for details in all.values_mut() {
        // Share copies of the ids: each of 8 GPUs names the 7 others.
        details.neighbors = std::mem::take(&mut details.neighbors)
            .into_iter()
            .filter_map(|(other, links)| Some((ids.get(&other)?.clone(), links)))
            .collect();
    }
    all.retain(|_, details| *details != DeviceDetails::default());
    Ok(all)
}

/// Checks the details of one device.
fn device(id: &DeviceId, report: &DeviceReport) -> Result<DeviceDetails, ReportError> {
    let is_instance = report.kind == DeviceKind::MigInstance;
    let is_of_instances =
        report.mig_placement.is_some() || report.sm_count.is_some() || report.made_here;
    if !is_instance && is_of_instances {
        return Err(ReportError::Kind { uuid: id.clone(), kind: report.kind });
    }
    let slot = report.mig_placement.map(|placement| mig::slot(id, placement)).transpose()?;
    if report.neighbors.len() > MAX_DEVICES_PER_NODE {
        return Err(ReportError::TooManyDevices { count: report.neighbors.len() });
    }
    let mut neighbors = BTreeMap::new();
    for neighbor in &report.neighbors {
        let other = DeviceId::new(&neighbor.id)?;
        within(id, "number of NVLinks", Some(neighbor.links), 1..=MAX_LINKS)?;
        if other == *id || neighbors.insert(other.clone(), neighbor.links).is_some() {
            return Err(ReportError::Neighbor { uuid: id.clone(), neighbor: other });
        }
    }
    Ok(DeviceDetails {
        minor: within(id, "minor number", report.minor, 0..=MAX_MINOR)?,
        numa_node: within(id, "NUMA node", report.numa_node, 0..=MAX_NUMA_NODE)?,
        neighbors: neighbors.into_iter().collect(),
        slot,
        sm_count: within(id, "number of multiprocessors", report.sm_count, 1..=MAX_SM_COUNT)?,
        multiprocessors: within(
            id,
            "number of multiprocessors",
            report.multiprocessors,
            1..=MAX_SM_COUNT,
        )?,
        addressing_mode: report.addressing_mode,
        is_size_configured: false, // agents have no configuration
        can_limit_memory: report.can_limit_memory,
        mig_profiles: mig::profiles(id, report)?,
        made_here: report.made_here,
    })
}

/// Checks that a number about the device `id`, if there is one, is in its range.
fn within(
    id: &DeviceId,
    field: &'static str,
    value: Option<u32>,
    range: RangeInclusive<u32>,
) -> Result<Option<u32>, ReportError> {
    match value {
        Some(value) if !range.contains(&value) => {
            Err(ReportError::Detail { uuid: id.clone(), field, value })
        }
        sane => Ok(sane),
    }
}

/// What the driver says about the tenants of each device whose processes were listed.
pub fn tenants(
    uses: &[DeviceUse],
) -> Result<BTreeMap<DeviceId, BTreeMap<PodUid, ReportedTenant>>, ReportError> {
    let mut all = BTreeMap::new();
    for seen in uses.iter().filter(|seen| seen.processes.is_some()) {
        let id = DeviceId::new(&seen.uuid)?;
        if seen.tenants.len() > MAX_PROCESSES_PER_DEVICE {
            return Err(ReportError::TooManyProcesses { uuid: id, count: seen.tenants.len() });
        }
        let mut of_device = BTreeMap::new();
        for tenant in &seen.tenants {
            text("podUid", &tenant.pod_uid, MAX_NAME_BYTES)?;
            let limit = tenant.limit_mib.map(|mib| memory(&id, mib)).transpose()?;
            let mps_limit = tenant.mps_limit_mib.map(|mib| memory(&id, mib)).transpose()?;
            // A limit without an MPS client means nothing.
            let mps_limit = mps_limit.filter(|_| tenant.is_mps_client);
            let (is_unlimited, is_mps_client) = (tenant.is_unlimited, tenant.is_mps_client);
            let busy_percent = tenant.busy_percent;
            if let Some(percent) = busy_percent.filter(|percent| *percent > 100) {
                return Err(ReportError::Busy { uuid: id, percent });
            }
            let reported =
                ReportedTenant { limit, is_unlimited, is_mps_client, mps_limit, busy_percent };
            of_device.insert(PodUid::new(tenant.pod_uid.clone()), reported);
        }
        all.insert(id, of_device);
    }
    Ok(all)
}

/// Checks which containers got the driver. What is too much is left out.
pub fn containers(mut reported: Vec<ContainerReport>) -> Result<StartedContainers, ReportError> {
    reported.truncate(MAX_CONTAINERS);
    let mut by_pod = StartedContainers::new();
    for ContainerReport { pod_uid, id, has_driver, is_older } in reported {
        text("containers.podUid", &pod_uid, MAX_NAME_BYTES)?;
        text("containers.id", &id, MAX_NAME_BYTES)?;
        by_pod
            .entry(PodUid::new(pod_uid))
            .or_default()
            .insert(id, StartedContainer { has_driver, is_older });
    }
    Ok(by_pod)
}

/// The fault, newest Xid and MPS state of the devices that have any of these.
pub fn conditions(uses: &[DeviceUse]) -> Result<BTreeMap<DeviceId, Condition>, ReportError> {
    let mut all = BTreeMap::new();
    for seen in uses {
        let condition = Condition {
            fault: seen.fault.filter(|_| !seen.healthy),
            last_xid: seen.last_xid,
            fault_event: seen.fault_event,
            mps: seen.mps,
        };
        if condition != Condition::default() {
            all.insert(DeviceId::new(&seen.uuid)?, condition);
        }
    }
    Ok(all)
}

pub(crate) fn health(healthy: bool) -> Health {
    if healthy { Health::Healthy } else { Health::Unhealthy }
}

/// Checks the observed use of one device.
pub fn device_use(id: DeviceId, reported: DeviceUse) -> Result<seen::DeviceUse, ReportError> {
    let used = reported.used_mib.map(|mib| memory(&id, mib)).transpose()?;
    if let Some(percent) = reported.busy_percent
        && percent > 100
    {
        return Err(ReportError::Busy { uuid: id, percent });
    }
    if let Some(processes) = &reported.processes
        && processes.len() > MAX_PROCESSES_PER_DEVICE
    {
        return Err(ReportError::TooManyProcesses { uuid: id, count: processes.len() });
    }
    let processes = reported.processes.map(|list| {
        list.into_iter().map(|process| checked_process(&id, process)).collect::<Result<_, _>>()
    });
    Ok(seen::DeviceUse {
        used,
        busy_percent: reported.busy_percent,
        health: match reported.fault {
            Some(DeviceFault::KubeletOwned) if !reported.healthy => Health::KubeletOwned,
            // The inventory says whether it has a size.
            Some(DeviceFault::NoMemory) => Health::Healthy,
            _ => health(reported.healthy),
        },
        processes: processes.transpose()?,
        id,
    })
}

/// Checks one process of the device `id`.
pub(crate) fn checked_process(
    id: &DeviceId,
    process: ProcessUse,
) -> Result<seen::ProcessUse, ReportError> {
    if let Some(uid) = &process.pod_uid {
        text("podUid", uid, MAX_NAME_BYTES)?;
    }
    let memory = process.memory_mib.map(|mib| memory(id, mib)).transpose()?;
    Ok(seen::ProcessUse { pod: process.pod_uid.map(PodUid::new), memory })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::condition::{DeviceFault, MpsState};
    use crate::api::state::{MigPlacement, Neighbor};
    use crate::report::bodies::TenantReport;
    use crate::units::MemMib;

    fn gpu(uuid: &str) -> DeviceReport {
        DeviceReport::new(uuid.to_owned(), 0, "M".to_owned(), DeviceKind::Gpu)
    }

    fn neighbor(uuid: &str, links: u32) -> Neighbor {
        Neighbor { id: uuid.to_owned(), links }
    }

    fn instance(slot: Option<(u32, u32)>, sm_count: Option<u32>) -> DeviceReport {
        let mig_placement = slot.map(|(start, size)| MigPlacement { start, size });
        DeviceReport { kind: DeviceKind::MigInstance, mig_placement, sm_count, ..gpu("MIG-a") }
    }

    #[test]
    fn details_are_accepted_within_their_limits_and_rejected_beyond() {
        let near = |neighbors: Vec<Neighbor>| DeviceReport { neighbors, ..gpu("GPU-a") };
        for (report, is_sane) in [
            (gpu("GPU-a"), true),
            (DeviceReport { minor: Some(MAX_MINOR), ..gpu("GPU-a") }, true),
            (DeviceReport { minor: Some(MAX_MINOR + 1), ..gpu("GPU-a") }, false),
            (DeviceReport { numa_node: Some(0), ..gpu("GPU-a") }, true),
            (DeviceReport { numa_node: Some(u32::MAX), ..gpu("GPU-a") }, false),
            (near(vec![neighbor("GPU-b", 18), neighbor("GPU-c", 1)]), true),
            (near(vec![neighbor("GPU-b", 0)]), false),
            (near(vec![neighbor("GPU-b", u32::MAX)]), false),
            (near(vec![neighbor("GPU-a", 1)]), false),
            (near(vec![neighbor("GPU-b", 1), neighbor("GPU-b", 1)]), false),
            (near(vec![neighbor("GPU,b", 1)]), false),
            (near((0..257).map(|n| neighbor(&format!("GPU-{n}"), 1)).collect()), false),
            (instance(Some((4, 4)), Some(60)), true),
            (instance(Some((0, 0)), None), false),
            (instance(Some((0, u32::MAX)), None), false),
            (instance(Some((u32::MAX, 1)), None), false),
            (instance(None, Some(0)), false),
            (DeviceReport { kind: DeviceKind::Gpu, ..instance(Some((0, 1)), None) }, false),
            (DeviceReport { made_here: true, ..instance(None, None) }, true),
            (DeviceReport { made_here: true, ..gpu("GPU-a") }, false),
        ] {
            assert_eq!(report.has_believable_details(), is_sane, "{report:?}");
            assert!(report.without_details().has_believable_details());
        }
    }

    #[test]
    fn missing_neighbors_are_left_out() {
        let near = vec![neighbor("GPU-b", 4), neighbor("GPU-gone", 4)];
        let all = devices(&[DeviceReport { neighbors: near, ..gpu("GPU-a") }, gpu("GPU-b")]);
        let all = all.unwrap();
        assert_eq!(all.len(), 1, "nothing is known of the other");
        let id = |text| DeviceId::new(text).unwrap();
        assert_eq!(all[&id("GPU-a")].neighbors, [(id("GPU-b"), 4)]);
    }

    #[test]
    fn only_unhealthy_devices_have_a_reason() {
        let sick = DeviceUse::unread("GPU-a".to_owned(), DeviceFault::Xid);
        let well =
            DeviceUse { healthy: true, ..DeviceUse::unread("GPU-b".to_owned(), DeviceFault::Xid) };
        let had = DeviceUse { last_xid: Some(31), ..well.clone() };
        let had = DeviceUse { uuid: "GPU-c".to_owned(), ..had };
        let all = conditions(&[sick, well, had]).unwrap();
        let rows: Vec<_> = all
            .iter()
            .map(|(id, condition)| (id.as_str(), condition.fault, condition.last_xid))
            .collect();
        assert_eq!(rows, [("GPU-a", Some(DeviceFault::Xid), None), ("GPU-c", None, Some(31))]);
    }

    #[test]
    fn tenant_data_is_sent_with_the_list_and_within_limits() {
        let tenant = |uid: &str, limit_mib| TenantReport {
            pod_uid: uid.to_owned(),
            limit_mib,
            is_unlimited: false,
            is_mps_client: true,
            mps_limit_mib: limit_mib.map(|mib| mib / 7),
            busy_percent: Some(100),
        };
        let busier = TenantReport { busy_percent: Some(101), ..tenant("p", None) };
        let beyond = TenantReport { mps_limit_mib: Some(u64::MAX), ..tenant("p", None) };
        let seen = |processes, tenants| DeviceUse {
            processes,
            tenants,
            ..DeviceUse::unread("GPU-a".to_owned(), DeviceFault::Xid)
        };
        let all = tenants(&[seen(Some(Vec::new()), vec![tenant("p", Some(7))])]).unwrap();
        let limit = Some(MemMib::new(7));
        let mps_limit = Some(MemMib::new(1));
        let busy_percent = Some(100);
        let reported = ReportedTenant {
            limit,
            is_unlimited: false,
            is_mps_client: true,
            mps_limit,
            busy_percent,
        };
        assert_eq!(all[&DeviceId::new("GPU-a").unwrap()][&PodUid::new("p")], reported);
        assert!(tenants(&[seen(None, vec![tenant("p", None)])]).unwrap().is_empty());
        let none = TenantReport { is_mps_client: false, ..tenant("p", Some(7)) };
        let all = tenants(&[seen(Some(Vec::new()), vec![none])]).unwrap();
        let reported = ReportedTenant { limit, busy_percent, ..ReportedTenant::default() };
        assert_eq!(all[&DeviceId::new("GPU-a").unwrap()][&PodUid::new("p")], reported);
        let long = tenant("p", Some(u64::MAX));
        for bad in [tenant("", None), tenant("p\n", None), long, beyond, busier] {
            let seen = seen(Some(Vec::new()), vec![bad]);
            assert!(!seen.is_believable(), "{seen:?}");
        }
        let many = seen(Some(Vec::new()), vec![tenant("p", None); 4_097]);
        assert!(!many.is_believable());
    }

    #[test]
    fn faults_and_mps_states_have_wire_names_and_may_be_missing_or_newer() {
        let read = |fields: &str| {
            let seen = format!(r#"{{"id":"GPU-a","healthy":false{fields}}}"#);
            let seen: DeviceUse = serde_json::from_str(&seen).unwrap();
            (seen.fault, seen.mps)
        };
        for (fields, expected) in [
            ("", (None, None)),
            (r#","fault":"UuidTwice""#, (Some(DeviceFault::UuidTwice), None)),
            (r#","fault":"TooHot","novelty":1"#, (Some(DeviceFault::Other), None)),
            (r#","mps":"Absent""#, (None, Some(MpsState::Absent))),
            (r#","mps":"Partitioned""#, (None, Some(MpsState::Other))),
        ] {
            assert_eq!(read(fields), expected, "{fields}");
        }
        let is_away = |mps| Condition { mps: Some(mps), ..Condition::default() }.is_mps_away();
        assert!([MpsState::Absent, MpsState::Faulted].into_iter().all(is_away));
        let others = [MpsState::Idle, MpsState::Serving, MpsState::Starting, MpsState::Other];
        assert!(!others.into_iter().any(is_away));
        let older = r#"{"podUid":"p","limitMib":7,"isMpsClient":true}"#;
        let older: TenantReport = serde_json::from_str(older).unwrap();
        assert_eq!((older.is_mps_client, older.mps_limit_mib), (true, None));
    }

    #[test]
    fn containers_are_named_by_pod_and_bounded() {
        let container = |pod: &str, id: &str, has_driver| ContainerReport {
            pod_uid: pod.to_owned(),
            id: id.to_owned(),
            has_driver,
            is_older: !has_driver,
        };
        let started = |has_driver| StartedContainer { has_driver, is_older: !has_driver };
        let id = "b2c0".repeat(16);
        let all = containers(vec![container("p", &id, true), container("p", "c", false)]).unwrap();
        let of_pod =
            BTreeMap::from([(id.clone(), started(true)), ("c".to_owned(), started(false))]);
        assert_eq!(all, StartedContainers::from([(PodUid::new("p"), of_pod)]));
        for (pod, id) in [("", "c"), ("p", ""), ("p", "c\n"), ("p", &*(id.clone() + "0"))] {
            assert!(containers(vec![container(pod, id, true)]).is_err(), "{pod} {id}");
        }
        let many = (0..9_999).map(|number| container("p", &number.to_string(), true)).collect();
        assert_eq!(containers(many).unwrap()[&PodUid::new("p")].len(), MAX_CONTAINERS);
    }

    #[test]
    fn a_driver_version_can_be_printed() {
        let report = |version: &str, cuda: Option<&str>| DriverReport {
            version: version.to_owned(),
            cuda: cuda.map(str::to_owned),
            lacks_uvm: false,
        };
        assert!(report("580.95.05", Some("13.0")).is_believable());
        assert!(report("580.95.05", None).is_believable());
        for bad in [report("", None), report("5\n", None), report(&"5".repeat(81), None)] {
            assert!(!bad.is_believable(), "{bad:?}");
        }
        assert!(!report("580", Some("")).is_believable());
    }
}
