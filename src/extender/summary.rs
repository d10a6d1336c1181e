//! `GET /v1/summary`: what the first page shows, small enough to be asked for again and again. 40,000
//! GPUs come to about a megabyte, where `/v1/state` has thirty.

use std::collections::BTreeMap;

use serde::Serialize;

use super::app::App;
use super::inspect::{PackingView, state_name};
use super::waiting::{self, WaitingView};
use crate::ledger::reading::Readiness;
use crate::packing::device::{DeviceKind, Health};
use crate::packing::node::{DeviceBooks, NodeLedger};
use crate::packing::reservation::ReservationState;
use crate::packing::units::{MemMib, Share};

/// Waiting pods that are named; the most important and oldest ones.
const NAMED: usize = 100;

/// What the first page shows.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// Version of the running program.
    pub version: &'static str,
    /// `ready`, `not_listed` or `awaiting_reports`.
    pub readiness: &'static str,
    /// Nodes that hold pods and have not reported, while that is waited for.
    pub awaited_nodes: usize,
    /// How full and fragmented the cluster is.
    pub packing: PackingView,
    /// Pods that no node fitted last time.
    pub waiting: usize,
    /// The first 100 of them, the most important and oldest first.
    pub waiting_pods: Vec<WaitingView>,
    /// Product names; [`GpuCell`] has positions of this list.
    pub models: Vec<String>,
    /// Namespaces of tenants; [`TenantCell`] has positions of this list.
    pub namespaces: Vec<String>,
    /// The nodes, by name.
    pub nodes: Vec<NodeCell>,
}

/// One node of the map.
#[derive(Debug, Serialize)]
pub struct NodeCell {
    /// Its name.
    pub name: String,
    /// `never_reported`, `reporting`, `silent` or `gone`.
    pub state: &'static str,
    /// Its devices, by index.
    pub gpus: Vec<GpuCell>,
}

/// One device of the map: position of the model, capacity in MiB, `1` unhealthy + `2` overbooked +
/// `4` cut into MIG instances, use that no booking covers in thousandths, tenants.
#[derive(Debug, Serialize)]
pub struct GpuCell(pub usize, pub u64, pub u8, pub u64, pub Vec<TenantCell>);

/// One tenant of a device: position of its namespace, compute share and memory in thousandths of the
/// device, `1` when the pod has ended and its processes may still hold the device.
#[derive(Debug, Serialize)]
pub struct TenantCell(pub usize, pub u64, pub u64, pub u8);

/// Names in the order in which they were first seen.
#[derive(Default)]
struct Names {
    names: Vec<String>,
    positions: BTreeMap<String, usize>,
}

impl Names {
    fn position(&mut self, name: &str) -> usize {
        if let Some(position) = self.positions.get(name) {
            return *position;
        }
        self.names.push(name.to_owned());
        self.positions.insert(name.to_owned(), self.names.len() - 1);
        self.names.len() - 1
    }
}

/// The cluster as it is now: O(tenants).
pub fn summary(app: &App) -> Summary {
    let (mut models, mut namespaces) = (Names::default(), Names::default());
    let mut nodes = Vec::new();
    app.ledger.look_at_each(|node| nodes.push(node_cell(node, &mut models, &mut namespaces)));
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    let (readiness, awaited_nodes) = match app.readiness() {
        Readiness::Ready => ("ready", 0),
        Readiness::NotListed => ("not_listed", 0),
        Readiness::AwaitingReports { nodes } => ("awaiting_reports", nodes),
    };
    Summary {
        version: env!("CARGO_PKG_VERSION"),
        readiness,
        awaited_nodes,
        packing: PackingView::of(&app.ledger.packing()),
        waiting: app.waiting.refused_count(),
        waiting_pods: waiting::refused(app, NAMED),
        models: models.names,
        namespaces: namespaces.names,
        nodes,
    }
}

fn node_cell(node: &NodeLedger, models: &mut Names, namespaces: &mut Names) -> NodeCell {
    let gpus = node.devices().iter();
    NodeCell {
        name: node.name().to_string(),
        state: state_name(node.state()),
        gpus: gpus.map(|books| gpu_cell(node, books, models, namespaces)).collect(),
    }
}

fn gpu_cell(
    node: &NodeLedger,
    books: &DeviceBooks,
    models: &mut Names,
    namespaces: &mut Names,
) -> GpuCell {
    let (device, capacity) = (books.device(), books.capacity().memory);
    let flags = u8::from(books.health() != Health::Healthy)
        + 2 * u8::from(books.is_overbooked())
        + 4 * u8::from(device.kind == DeviceKind::MigParent);
    let tenants = books.tenants().iter().map(|(uid, held)| {
        let reservation = node.reservation(uid);
        let name = reservation.map_or("", |held| &held.pod.name);
        let namespace = name.split_once('/').map_or("", |(namespace, _)| namespace);
        let is_ended =
            reservation.is_some_and(|held| matches!(held.state, ReservationState::Draining { .. }));
        TenantCell(
            namespaces.position(namespace),
            thousandths(held.share),
            thousandths_of(held.memory, capacity),
            u8::from(is_ended),
        )
    });
    GpuCell(
        models.position(device.model.as_str()),
        capacity.mib(),
        flags,
        thousandths_of(books.unbooked(), capacity),
        tenants.collect(),
    )
}

fn thousandths(share: Share) -> u64 {
    share.millionths() / 1_000
}

fn thousandths_of(part: MemMib, whole: MemMib) -> u64 {
    Share::ratio(part, whole).map_or(0, thousandths)
}
