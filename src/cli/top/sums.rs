//! The sums of a node, for its row.

use std::collections::BTreeSet;

use wire::api::state::{Device, DeviceAmount, DeviceKind, Health, Node};

/// Sums over the devices of a node.
#[derive(Debug)]
pub(crate) struct Sums {
    pub(crate) models: BTreeSet<String>,
    pub(crate) gpus: usize,
    pub(crate) empty: usize,
    pub(crate) unhealthy: usize,
    pub(crate) overallocated: usize,
    pub(crate) tenants: usize,
    pub(crate) capacity_mib: u64,
    pub(crate) allocated: DeviceAmount,
    /// `None` if some device does not report it.
    pub(crate) used_mib: Option<u64>,
    /// Largest free share of one healthy device.
    pub(crate) largest_free_share_millionths: u64,
}

/// The sum of numbers from a server, which may be out of range.
fn total(amounts: impl Iterator<Item = u64>) -> u64 {
    amounts.fold(0, u64::saturating_add)
}

/// How many devices are so.
fn count(devices: &[Device], is_so: impl Fn(&Device) -> bool) -> usize {
    devices.iter().filter(|device| is_so(device)).count()
}

impl Sums {
    /// The sums of `node`.
    pub(crate) fn of(node: &Node) -> Self {
        let devices = &node.devices;
        let holding = || devices.iter().filter(|device| device.kind != DeviceKind::MigParent);
        let used: Option<Vec<u64>> = holding().map(|device| device.used_mib).collect();
        let tenants = holding().flat_map(|device| &device.tenants);
        let (hidden, seen): (Vec<_>, Vec<_>) =
            tenants.map(|tenant| tenant.pod_uid.as_str()).partition(|uid| uid.is_empty());
        let free = holding().filter(|device| device.health == Health::Healthy);
        Self {
            models: devices.iter().map(|device| device.model.clone()).collect(),
            gpus: count(devices, |device| device.kind != DeviceKind::MigInstance),
            empty: holding().filter(|device| device.tenants.is_empty()).count(),
            unhealthy: count(devices, |device| device.health != Health::Healthy),
            overallocated: count(devices, |device| device.overallocated),
            tenants: hidden.len() + seen.into_iter().collect::<BTreeSet<_>>().len(),
            capacity_mib: total(holding().map(|device| device.capacity_mib)),
            allocated: DeviceAmount {
                memory_mib: total(holding().map(|device| device.allocated.memory_mib)),
                share_millionths: total(holding().map(|device| device.allocated.share_millionths)),
            },
            used_mib: used.map(|used| total(used.into_iter())),
            largest_free_share_millionths: free
                .map(|device| device.free.share_millionths)
                .max()
                .unwrap_or(0),
        }
    }
}
