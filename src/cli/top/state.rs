//! The part of `/v1/state` that `gpupack top` reads, and the JSON that it prints.

use serde::{Deserialize, Serialize};

/// The whole state.
#[derive(Debug, Deserialize)]
pub(crate) struct State {
    pub(crate) nodes: Vec<Node>,
}

/// One node.
#[derive(Debug, Deserialize)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) pool: String,
    pub(crate) state: String,
    pub(crate) devices: Vec<Device>,
}

/// One device.
#[derive(Debug, Deserialize)]
pub(crate) struct Device {
    pub(crate) id: String,
    pub(crate) index: u32,
    pub(crate) model: String,
    pub(crate) kind: String,
    pub(crate) profile: Option<String>,
    pub(crate) protection: String,
    pub(crate) healthy: bool,
    pub(crate) ailment: Option<String>,
    pub(crate) capacity_mib: u64,
    pub(crate) booked_mib: u64,
    pub(crate) booked_share_millionths: u64,
    pub(crate) free_mib: u64,
    pub(crate) free_share_millionths: u64,
    pub(crate) used_mib: Option<u64>,
    pub(crate) overbooked: bool,
    pub(crate) tenants: Vec<Tenant>,
}

/// One tenant of a device.
#[derive(Debug, Deserialize)]
pub(crate) struct Tenant {
    pub(crate) pod_uid: String,
    pub(crate) pod: String,
    pub(crate) state: String,
    pub(crate) memory_mib: u64,
    pub(crate) share_millionths: u64,
    pub(crate) used_mib: Option<u64>,
    pub(crate) intended: String,
    pub(crate) verified: String,
}

/// A list as printed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct List<'a, T> {
    pub(crate) api_version: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) items: &'a [T],
}

/// A node as printed.
#[derive(Debug, Serialize)]
pub(crate) struct NodeItem {
    pub(crate) name: String,
    pub(crate) pool: String,
    /// `reporting`, `silent`, `never_reported` or `gone`.
    pub(crate) state: String,
    pub(crate) models: Vec<String>,
    pub(crate) gpus: usize,
    pub(crate) empty_gpus: usize,
    pub(crate) unhealthy_gpus: usize,
    pub(crate) overbooked_gpus: usize,
    pub(crate) tenants: usize,
    pub(crate) capacity_mib: u64,
    pub(crate) booked_mib: u64,
    pub(crate) booked_share_millionths: u64,
    /// None if some device does not report it.
    pub(crate) used_mib: Option<u64>,
    /// Largest free share of one healthy device.
    pub(crate) largest_free_share_millionths: u64,
    pub(crate) largest_free_mib: u64,
}

/// A device as printed.
#[derive(Debug, Serialize)]
pub(crate) struct GpuItem {
    pub(crate) node: String,
    pub(crate) node_state: String,
    pub(crate) pool: String,
    pub(crate) index: u32,
    pub(crate) id: String,
    pub(crate) model: String,
    /// `gpu`, `mig_parent` or `mig_instance`.
    pub(crate) kind: String,
    pub(crate) profile: Option<String>,
    /// `ok`, `mig`, `overbooked`, the ailment or `unhealthy`, or the state of the node.
    pub(crate) state: String,
    pub(crate) protection: String,
    pub(crate) capacity_mib: u64,
    pub(crate) booked_mib: u64,
    pub(crate) booked_share_millionths: u64,
    pub(crate) free_mib: u64,
    pub(crate) free_share_millionths: u64,
    pub(crate) used_mib: Option<u64>,
    pub(crate) tenants: usize,
    /// Shares of the tenants, for the bar.
    #[serde(skip)]
    pub(crate) shares: Vec<u64>,
}

/// A tenant of a device as printed.
#[derive(Debug, Serialize)]
pub(crate) struct TenantItem {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) pod_uid: String,
    pub(crate) node: String,
    pub(crate) gpu_index: u32,
    pub(crate) gpu_id: String,
    /// `assumed`, `confirmed` or `draining`.
    pub(crate) state: String,
    pub(crate) share_millionths: u64,
    pub(crate) memory_mib: u64,
    pub(crate) used_mib: Option<u64>,
    pub(crate) protection_intended: String,
    pub(crate) protection_verified: String,
}

/// The sum of numbers from a server, which may be out of range.
fn total(amounts: impl Iterator<Item = u64>) -> u64 {
    amounts.fold(0, u64::saturating_add)
}

impl NodeItem {
    pub(crate) fn of(node: &Node) -> Self {
        let holding = || node.devices.iter().filter(|device| device.kind != "mig_parent");
        let mut models: Vec<String> = node.devices.iter().map(|it| it.model.clone()).collect();
        models.sort();
        models.dedup();
        let used: Option<Vec<u64>> = holding().map(|device| device.used_mib).collect();
        let free = || holding().filter(|device| device.healthy);
        let uids: std::collections::BTreeSet<&str> =
            holding().flat_map(|it| &it.tenants).map(|tenant| tenant.pod_uid.as_str()).collect();
        Self {
            name: node.name.clone(),
            pool: node.pool.clone(),
            state: node.state.clone(),
            models,
            gpus: node.devices.iter().filter(|device| device.kind != "mig_instance").count(),
            empty_gpus: holding().filter(|device| device.tenants.is_empty()).count(),
            unhealthy_gpus: node.devices.iter().filter(|device| !device.healthy).count(),
            overbooked_gpus: node.devices.iter().filter(|device| device.overbooked).count(),
            tenants: uids.len(),
            capacity_mib: total(holding().map(|device| device.capacity_mib)),
            booked_mib: total(holding().map(|device| device.booked_mib)),
            booked_share_millionths: total(holding().map(|it| it.booked_share_millionths)),
            used_mib: used.map(|used| total(used.into_iter())),
            largest_free_share_millionths: free()
                .map(|it| it.free_share_millionths)
                .max()
                .unwrap_or(0),
            largest_free_mib: free().map(|device| device.free_mib).max().unwrap_or(0),
        }
    }
}

impl GpuItem {
    pub(crate) fn of(node: &Node, device: &Device) -> Self {
        let state = match &device.ailment {
            _ if node.state != "reporting" => node.state.clone(),
            Some(ailment) => ailment.clone(),
            None if !device.healthy => "unhealthy".to_owned(),
            None if device.overbooked => "overbooked".to_owned(),
            None if device.kind == "mig_parent" => "mig".to_owned(),
            None => "ok".to_owned(),
        };
        Self {
            node: node.name.clone(),
            node_state: node.state.clone(),
            pool: node.pool.clone(),
            index: device.index,
            id: device.id.clone(),
            model: device.model.clone(),
            kind: device.kind.clone(),
            profile: device.profile.clone(),
            state,
            protection: device.protection.clone(),
            capacity_mib: device.capacity_mib,
            booked_mib: device.booked_mib,
            booked_share_millionths: device.booked_share_millionths,
            free_mib: device.free_mib,
            free_share_millionths: device.free_share_millionths,
            used_mib: device.used_mib,
            tenants: device.tenants.len(),
            shares: device.tenants.iter().map(|tenant| tenant.share_millionths).collect(),
        }
    }
}

impl TenantItem {
    pub(crate) fn of(node: &Node, device: &Device, tenant: &Tenant) -> Self {
        let (namespace, pod) = tenant.pod.split_once('/').unwrap_or(("", &tenant.pod));
        Self {
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            pod_uid: tenant.pod_uid.clone(),
            node: node.name.clone(),
            gpu_index: device.index,
            gpu_id: device.id.clone(),
            state: tenant.state.clone(),
            share_millionths: tenant.share_millionths,
            memory_mib: tenant.memory_mib,
            used_mib: tenant.used_mib,
            protection_intended: tenant.intended.clone(),
            protection_verified: tenant.verified.clone(),
        }
    }
}
