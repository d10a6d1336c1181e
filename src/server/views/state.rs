//! `GET /v1/state`: the whole ledger, or one node of it.

use serde::Serialize;

use crate::views::pods::host_amount;
use crate::views::viewer::Viewer;
use crate::views::{devices, pods};
use control::pods::memory_guard::Protection;
use control::shared::app::App;
use engine::model::node::intake::Intake;
use engine::model::node_state::{NodeReporting, NodeState};
use engine::scoring::fragmentation::PackingSums;
use kube_api::protocol::messages::to_json;
use wire::api::state;
use wire::api::state::{BlindStarts, Node, State};

/// The figures of a measurement.
pub fn packing(packing: &PackingSums) -> state::Packing {
    state::Packing {
        devices: packing.devices,
        occupied: packing.occupied,
        overallocated: packing.overallocated,
        allocation_millionths: packing.allocation().millionths(),
        efficiency_millionths: packing.efficiency().millionths(),
        fragmentation_millionths: packing.fragmentation().millionths(),
    }
}

/// The whole ledger as the JSON of a [`State`]. It is written node by node: 5,000 nodes make 40 MB,
/// and any other form of all at once takes several times that.
pub fn state(app: &App, viewer: &Viewer) -> Vec<u8> {
    let mut names = Vec::new();
    app.ledger.look_at_each(|node| names.push(node.name().clone()));
    names.sort_unstable();
    let packing = Some(packing(&app.ledger.packing()));
    let mut json = to_json(&State { packing, ..State::default() });
    let lists = br#"[],"pods":[]}"#;
    assert!(json.ends_with(lists), "the last fields of a state are its nodes and pods");
    json.truncate(json.len() - lists.len());
    let mut pods = Vec::new();
    json.push(b'[');
    for name in names {
        let Some(found) = app.ledger.node(name.as_str()) else { continue };
        push(&mut json, &node(app, &found, viewer));
        let seen = pods::on(app, &found).filter(|pod| viewer.sees_pod(&pod.pod));
        seen.for_each(|pod| push(&mut pods, &pod));
    }
    pods::waiting(app, |pod| {
        if viewer.sees_pod(&pod.pod) {
            push(&mut pods, &pod);
        }
    });
    json.extend_from_slice(br#"],"pods":["#);
    json.append(&mut pods);
    json.extend_from_slice(b"]}");
    json
}

/// Writes one more item of a list.
fn push<T: Serialize>(json: &mut Vec<u8>, item: &T) {
    if json.last().is_some_and(|last| *last != b'[') {
        json.push(b',');
    }
    json.extend_from_slice(&to_json(item));
}

/// One node and the pods on it; `None` if no node has this name.
pub fn state_of(app: &App, name: &str, viewer: &Viewer) -> Option<State> {
    let found = app.ledger.node(name).filter(|node| !node.is_forgettable())?;
    let pods = pods::on(app, &found).filter(|pod| viewer.sees_pod(&pod.pod)).collect();
    Some(State { nodes: vec![node(app, &found, viewer)], pods, ..State::default() })
}

/// Whether the agent of a node reports.
pub(crate) fn reporting(state: NodeReporting) -> state::NodeReporting {
    match state {
        NodeReporting::NeverReported => state::NodeReporting::NeverReported,
        NodeReporting::Reporting => state::NodeReporting::Reporting,
        NodeReporting::NotReporting => state::NodeReporting::NotReporting,
        NodeReporting::Gone => state::NodeReporting::Gone,
    }
}

fn node(app: &App, node: &NodeState, viewer: &Viewer) -> Node {
    let details = app.ledger.details(node.name().as_str());
    let protection = Protection::of(&app.config);
    let devices = node.devices().iter();
    let devices = devices.map(|found| devices::device(node, protection, &details, found)).collect();
    let lacks_uvm = details.driver.as_ref().is_some_and(|driver| driver.lacks_uvm);
    let (driver, cuda) = details.driver.map(|driver| (driver.version, driver.cuda)).unzip();
    let mut view = Node {
        name: node.name().to_string(),
        pool: node.pool().to_string(),
        state: reporting(node.state()),
        capacity: host_amount(node.host_capacity()),
        free: host_amount(node.host_free()),
        driver,
        cuda: cuda.flatten(),
        lacks_uvm,
        blind_starts: match node.intake() {
            Intake::Open { .. } => None,
            Intake::Closed { .. } => Some(BlindStarts::Closed),
            Intake::Trial => Some(BlindStarts::Trial),
            Intake::Tried { .. } => Some(BlindStarts::Tried),
        },
        devices,
    };
    viewer.hide_tenants(&mut view);
    view
}
