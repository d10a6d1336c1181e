//! The whole ledger as JSON, for people and tools.

use serde::Serialize;

use crate::control::pods::memory_guard::{OverLimitPodView, over_users};
use crate::control::shared::app::App;
use crate::hardware::device::{DeviceKind, Health};
use crate::model::device_state::DeviceState;
use crate::model::isolation::DriverLimits;
use crate::model::node_state::{NodeReporting, NodeState};
use crate::protocol::messages::to_json;
use crate::scoring::fragmentation::Packing;
use crate::server::views::details::DetailsView;
use crate::server::views::pods;
use crate::server::views::sharing::SharingView;
use crate::server::views::tenants::{TenantView, tenants};
use crate::usage::node_details::NodeDetails;

/// How full and fragmented the cluster is. Shares in millionths of a GPU, ratios in millionths.
#[derive(Debug, Default, Serialize)]
pub struct PackingView {
    /// Devices that can hold tenants.
    pub devices: u64,
    /// Devices with at least one tenant.
    pub occupied: u64,
    /// Overallocated devices.
    pub overbooked: u64,
    /// Allocated share over capacity.
    pub allocation_millionths: u64,
    /// Mean fullness of the occupied devices.
    pub efficiency_millionths: u64,
    /// Part of the free share that no typical request can use.
    pub fragmentation_millionths: u64,
}

impl PackingView {
    /// The figures of a measurement.
    pub fn of(packing: &Packing) -> Self {
        Self {
            devices: packing.devices,
            occupied: packing.occupied,
            overbooked: packing.overbooked,
            allocation_millionths: packing.allocation().millionths(),
            efficiency_millionths: packing.efficiency().millionths(),
            fragmentation_millionths: packing.fragmentation().millionths(),
        }
    }
}

/// One node.
#[derive(Debug, Serialize)]
pub struct NodeView {
    /// Name of the node.
    pub name: String,
    /// Its pool; empty if it has none.
    pub pool: String,
    /// `never_reported`, `reporting`, `silent` or `gone`.
    pub state: &'static str,
    /// CPU that it offers to pods, in thousandths of a core.
    pub cpu_milli: u64,
    /// Host memory that it offers to pods.
    pub memory_mib: u64,
    /// Free CPU, in thousandths of a core.
    pub free_cpu_milli: u64,
    /// Free host memory.
    pub free_memory_mib: u64,
    /// Version of its driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Newest CUDA version that its driver can run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuda: Option<String>,
    /// Its devices, by index.
    pub devices: Vec<DeviceView>,
}

/// One device.
#[derive(Debug, Serialize)]
pub struct DeviceView {
    /// UUID.
    pub id: String,
    /// NVML index.
    pub index: u32,
    /// Product name.
    pub model: String,
    /// `gpu`, `mig_parent` or `mig_instance`.
    pub kind: &'static str,
    /// MIG profile of an instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// How it is shared.
    #[serde(flatten)]
    pub sharing: SharingView,
    /// Whether it takes new tenants.
    pub healthy: bool,
    /// Its health and location.
    #[serde(flatten)]
    pub details: DetailsView,
    /// Schedulable memory.
    pub capacity_mib: u64,
    /// Allocated memory.
    pub booked_mib: u64,
    /// Allocated share.
    pub booked_share_millionths: u64,
    /// Memory in holds.
    pub claimed_mib: u64,
    /// Share in holds.
    pub claimed_share_millionths: u64,
    /// Free memory.
    pub free_mib: u64,
    /// Free share.
    pub free_share_millionths: u64,
    /// Memory in use, as the agent saw it.
    pub used_mib: Option<u64>,
    /// Memory in use beyond what is allocated.
    pub unbooked_mib: u64,
    /// Untracked memory, as of the last list of processes.
    pub foreign_mib: u64,
    /// Over-limit pods on it, by UID; not all of them are its tenants.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub over_users: Vec<OverLimitPodView>,
    /// Whether it is overallocated.
    pub overbooked: bool,
    /// Its tenants, by UID.
    pub tenants: Vec<TenantView>,
}

/// The current ledger as JSON: packing of the cluster, all nodes by name, and all placed or waiting
/// pods. It is written node by node: 5,000 nodes make 40 MB, and any other form of all at once
/// takes several times that.
pub fn state(app: &App) -> Vec<u8> {
    let mut names = Vec::new();
    app.ledger.look_at_each(|node| names.push(node.name().clone()));
    names.sort_unstable();
    let (mut nodes, mut pods) = (List::new(), List::new());
    for name in names {
        let Some(node) = app.ledger.node(name.as_str()) else { continue };
        nodes.push(&node_view(app, &node));
        pods::on(app, &node).for_each(|pod| pods.push(&pod));
    }
    pods::waiting(app, |pod| pods.push(&pod));
    let mut json = b"{\"packing\":".to_vec();
    json.extend_from_slice(&to_json(&PackingView::of(&app.ledger.packing())));
    json.extend_from_slice(b",\"nodes\":");
    json.append(&mut nodes.end());
    json.extend_from_slice(b",\"pods\":");
    json.append(&mut pods.end());
    json.push(b'}');
    json
}

/// A JSON list under construction.
struct List(Vec<u8>);

impl List {
    fn new() -> Self {
        Self(b"[".to_vec())
    }

    fn push<T: Serialize>(&mut self, item: &T) {
        if self.0.len() > 1 {
            self.0.push(b',');
        }
        self.0.extend_from_slice(&to_json(item));
    }

    fn end(mut self) -> Vec<u8> {
        self.0.push(b']');
        self.0
    }
}

/// One node as it is now; `None` if no node has this name.
pub fn node(app: &App, name: &str) -> Option<NodeView> {
    let node = app.ledger.node(name).filter(|node| !node.is_forgettable());
    node.map(|node| node_view(app, &node))
}

/// The JSON name of a node's state.
pub(crate) fn state_name(state: NodeReporting) -> &'static str {
    match state {
        NodeReporting::NeverReported => "never_reported",
        NodeReporting::Reporting => "reporting",
        NodeReporting::Silent => "silent",
        NodeReporting::Gone => "gone",
    }
}

fn node_view(app: &App, node: &NodeState) -> NodeView {
    let (host, free) = (node.host_capacity(), node.host_free());
    let details = app.ledger.details(node.name().as_str());
    let of_node = (node, app.driver_limits());
    let devices = node.devices().iter();
    let devices = devices.map(|books| device_view(of_node, &details, books)).collect();
    let (driver, cuda) = details.driver.map(|it| (it.version, it.cuda)).unzip();
    NodeView {
        name: node.name().to_string(),
        pool: node.pool().to_string(),
        state: state_name(node.state()),
        cpu_milli: host.cpu.milli(),
        memory_mib: host.memory.mib(),
        free_cpu_milli: free.cpu.milli(),
        free_memory_mib: free.memory.mib(),
        driver,
        cuda: cuda.flatten(),
        devices,
    }
}

fn device_view(
    (node, limits): (&NodeState, DriverLimits),
    details: &NodeDetails,
    books: &DeviceState,
) -> DeviceView {
    let device = books.device();
    let (kind, profile) = match &device.kind {
        DeviceKind::Gpu => ("gpu", None),
        DeviceKind::MigParent => ("mig_parent", None),
        DeviceKind::MigInstance { profile, .. } => ("mig_instance", Some(profile.to_string())),
    };
    let free = books.free();
    let on = details.sightings.on(&device.id);
    DeviceView {
        id: device.id.to_string(),
        index: device.index.0,
        model: device.model.to_string(),
        kind,
        profile,
        sharing: SharingView::of(node, books),
        healthy: books.health() == Health::Healthy,
        details: DetailsView::of(details, &device.id),
        capacity_mib: device.capacity().mib(),
        booked_mib: books.booked().memory.mib(),
        booked_share_millionths: books.booked().share.millionths(),
        claimed_mib: books.on_hold().memory.mib(),
        claimed_share_millionths: books.on_hold().share.millionths(),
        free_mib: free.memory.mib(),
        free_share_millionths: free.share.millionths(),
        used_mib: books.used().map(|used| used.mib()),
        unbooked_mib: books.unbooked().mib(),
        foreign_mib: on.map_or(0, |on| on.foreign.mib()),
        over_users: on.map(|on| over_users(node, on)).unwrap_or_default(),
        overbooked: books.is_overbooked(),
        tenants: tenants(node, details, books, limits),
    }
}
