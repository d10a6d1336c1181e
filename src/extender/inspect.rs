//! What people and tools may look at: the whole model as JSON, and why a pod waits.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;

use super::app::App;
use super::details::DetailsView;
use super::guard::{OverUserView, excesses, over_users};
use super::mends::{kubelet_mend, mends, verdict};
use super::pods::{self, PodView, reservation_state};
use super::proposals::{MoveView, views};
use super::sharing::SharingView;
use super::tenants::{TenantView, tenants};
use crate::ledger::details::NodeDetails;
use crate::ledger::protection::DriverLimits;
use crate::ledger::waiting::WaitingState;
use crate::packing::device::{DeviceKind, Health};
use crate::packing::fit::Misfit;
use crate::packing::fragmentation::Packing;
use crate::packing::moves::MOST_MOVES;
use crate::packing::node::{DeviceBooks, NodeLedger, NodeState};

/// The whole model.
#[derive(Debug, Serialize)]
pub struct State {
    /// How full and fragmented the cluster is.
    pub packing: PackingView,
    /// All nodes, by name.
    pub nodes: Vec<NodeView>,
    /// All pods that are placed or wait.
    pub pods: Vec<PodView>,
}

/// How full and fragmented the cluster is. Shares in millionths of a GPU, ratios in millionths.
#[derive(Debug, Default, Serialize)]
pub struct PackingView {
    /// Devices that can hold tenants.
    pub devices: u64,
    /// Devices with at least one tenant.
    pub occupied: u64,
    /// Devices with more booked than they have.
    pub overbooked: u64,
    /// Booked share over capacity.
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
    /// Its name.
    pub name: String,
    /// Its pool; empty where it has none.
    pub pool: String,
    /// `never_reported`, `reporting`, `silent` or `gone`.
    pub state: &'static str,
    /// Processor time that it offers to pods, in thousandths of a core.
    pub cpu_milli: u64,
    /// Main memory that it offers to pods.
    pub memory_mib: u64,
    /// Processor time left, in thousandths of a core.
    pub free_cpu_milli: u64,
    /// Main memory left.
    pub free_memory_mib: u64,
    /// Version of its driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Newest CUDA that its driver can run.
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
    /// What ails it, and where it sits.
    #[serde(flatten)]
    pub details: DetailsView,
    /// Schedulable memory.
    pub capacity_mib: u64,
    /// Memory that is booked.
    pub booked_mib: u64,
    /// Share that is booked.
    pub booked_share_millionths: u64,
    /// Memory held back by claims.
    pub claimed_mib: u64,
    /// Share held back by claims.
    pub claimed_share_millionths: u64,
    /// Memory that can be placed on.
    pub free_mib: u64,
    /// Share that can be placed on.
    pub free_share_millionths: u64,
    /// Memory in use as the agent saw it.
    pub used_mib: Option<u64>,
    /// Memory in use that no booking covers.
    pub unbooked_mib: u64,
    /// Memory used by processes of no pod that holds anything on the node, as of the last list.
    pub foreign_mib: u64,
    /// Pods that use more of it than they may, by UID; not all of them are tenants.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub over_users: Vec<OverUserView>,
    /// Whether more is booked than there is.
    pub overbooked: bool,
    /// Its tenants, by UID.
    pub tenants: Vec<TenantView>,
}

/// The whole model as it is now.
pub fn state(app: &App) -> State {
    let nodes = app.ledger.nodes();
    State {
        packing: PackingView::of(&app.ledger.packing()),
        nodes: nodes.iter().map(|node| node_view(app, node)).collect(),
        pods: pods::all(app, &nodes),
    }
}

/// One node as it is now; `None` where there is none of that name.
pub fn node(app: &App, name: &str) -> Option<NodeView> {
    let node = app.ledger.node(name).filter(|node| !node.is_forgettable());
    node.map(|node| node_view(app, &node))
}

/// The state of a node as JSON has it.
pub(super) fn state_name(state: NodeState) -> &'static str {
    match state {
        NodeState::NeverReported => "never_reported",
        NodeState::Reporting => "reporting",
        NodeState::Silent => "silent",
        NodeState::Gone => "gone",
    }
}

fn node_view(app: &App, node: &NodeLedger) -> NodeView {
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
    (node, limits): (&NodeLedger, DriverLimits),
    details: &NodeDetails,
    books: &DeviceBooks,
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
        claimed_mib: books.claimed().memory.mib(),
        claimed_share_millionths: books.claimed().share.millionths(),
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

/// Why a pod waits.
#[derive(Debug, Default, Serialize)]
pub struct Explanation {
    /// `namespace/name`.
    pub pod: String,
    /// One sentence.
    pub verdict: String,
    /// Nodes that would take it now, the first twenty by name.
    pub fits_on: Vec<String>,
    /// Nodes that would take it now.
    pub fitting_nodes: usize,
    /// Why the others refuse, the closest first.
    pub refusals: Vec<RefusalView>,
    /// The smallest changes that would help, the closest obstacle's first.
    pub mends: Vec<String>,
    /// The cheapest moves of running pods that would make room, where some few do.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub moves: Vec<MoveView>,
    /// Each node that refuses, by name.
    pub nodes: Vec<NodeRefusal>,
}

/// One node that refuses.
#[derive(Debug, Serialize)]
pub struct NodeRefusal {
    /// Its name.
    pub name: String,
    /// The constant reason.
    pub reason: &'static str,
    /// What is missing there.
    pub missing: String,
}

/// Nodes that refuse for one reason.
#[derive(Debug, Serialize)]
pub struct RefusalView {
    /// The constant reason.
    pub reason: &'static str,
    /// How many nodes.
    pub nodes: usize,
    /// The closest of them.
    pub closest_node: String,
    /// What is missing there.
    pub missing: String,
    /// Whether room that others leave could cure it.
    pub curable_by_room: bool,
}

/// Nodes that are named in an explanation.
const NAMED: usize = 20;

/// Why a pod waits, or where it is placed; `None` for a pod that is not known.
pub fn explain_named(app: &App, namespace: &str, name: &str) -> Option<Explanation> {
    if let Some(waiting) = app.waiting.named(namespace, name) {
        return Some(explain(app, &waiting));
    }
    let pod = format!("{namespace}/{name}");
    let refused = app.pending.iter().find_map(|pending| {
        let is_it = *pending.pod.name == *pod;
        pending.request.as_ref().err().filter(|_| is_it).map(ToString::to_string)
    });
    if let Some(fault) = refused {
        return Some(Explanation {
            verdict: format!("its GPU request is refused: {fault}"),
            pod,
            mends: vec![
                "mend the annotation in the pod's template and create the pod anew".to_owned(),
            ],
            ..Explanation::default()
        });
    }
    let nodes = app.ledger.nodes();
    let held = nodes.iter().find_map(|node| {
        node.reservations().values().find(|held| *held.pod.name == *pod).map(|held| (node, held))
    });
    let (node, held) = held?;
    let devices: Vec<&str> =
        held.placement.devices.iter().map(|device| device.id.as_str()).collect();
    Some(Explanation {
        verdict: format!(
            "placed on node {}, {} ({}){}",
            node.name(),
            devices.join(", "),
            reservation_state(held),
            excesses(&app.ledger.details(node.name().as_str()), &held.pod.uid)
        ),
        pod,
        fits_on: vec![node.name().to_string()],
        fitting_nodes: 1,
        ..Explanation::default()
    })
}

/// Why a pod waits, on the books of this moment.
pub fn explain(app: &App, waiting: &WaitingState) -> Explanation {
    let question = &waiting.waiting.question;
    let nodes = app.ledger.nodes();
    let names: Vec<&str> = nodes.iter().map(|node| node.name().as_str()).collect();
    let answers = app.ledger.answers(question, &names);
    let mut fits_on = Vec::new();
    let mut by_reason: BTreeMap<&'static str, (usize, Misfit, &str)> = BTreeMap::new();
    for (name, answer) in names.iter().zip(&answers) {
        match answer {
            Ok(_) => fits_on.push((*name).to_owned()),
            Err(misfit) => {
                let entry = by_reason.entry(misfit.reason()).or_insert((0, *misfit, name));
                entry.0 += 1;
                if entry.1 != *misfit && entry.1.closer(*misfit) == *misfit {
                    (entry.1, entry.2) = (*misfit, name);
                }
            }
        }
    }
    let mut groups: Vec<_> = by_reason.into_iter().collect();
    groups.sort_by_key(|(_, (_, misfit, _))| Reverse(misfit.closeness()));
    let fitting_nodes = fits_on.len();
    fits_on.truncate(NAMED);
    let refusing = names.iter().zip(&answers).filter_map(|(name, answer)| {
        let misfit = answer.err()?;
        let (name, reason) = ((*name).to_owned(), misfit.reason());
        Some(NodeRefusal { name, reason, missing: misfit.missing() })
    });
    let way = match fitting_nodes {
        0 => app.ledger.moves(question, MOST_MOVES),
        _ => None,
    };
    Explanation {
        moves: way.map(|way| views(&way.moves)).unwrap_or_default(),
        nodes: refusing.collect(),
        pod: waiting.waiting.pod.to_string(),
        verdict: verdict(fitting_nodes, nodes.len(), groups.first().map(|group| group.1.1)),
        fits_on,
        fitting_nodes,
        mends: mends(question, &nodes, groups.iter().map(|group| group.1.1))
            .into_iter()
            .chain(kubelet_mend(&app.ledger, &nodes).filter(|_| fitting_nodes == 0))
            .collect(),
        refusals: groups
            .into_iter()
            .map(|(reason, (nodes, misfit, closest))| RefusalView {
                reason,
                nodes,
                closest_node: closest.to_owned(),
                missing: misfit.missing(),
                curable_by_room: misfit.is_curable_by_room(),
            })
            .collect(),
    }
}
