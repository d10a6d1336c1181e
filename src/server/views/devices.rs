//! The devices of `/v1/state`, with their tenants.

use crate::views::pods::reservation_state;
use control::pods::memory_guard::{Protection, over_limit_pods};
use engine::hardware::pool::{ConfiguredIsolation, InstanceUse};
use engine::model::device_state::{DeviceState, Origin, Verification};
use engine::model::isolation::Mode;
use engine::model::node_state::{NodeReporting, NodeState};
use engine::model::reservation::Reservation;
use engine::usage::node_details::NodeDetails;
use wire::api::state;
use wire::api::state::{
    Device, DeviceAmount, DeviceIsolation, FailedMigOrder, Guest, InstanceState, IsolationMode,
    MigPlacement, Neighbor, PlaceableProfile, PodState, Slots, Tenant, TenantIsolation,
};
use wire::device::{DeviceKind, Health};
use wire::ids::DeviceId;
use wire::units::{Demand, MemMib, Share};

/// One device of a node.
pub(crate) fn device(
    node: &NodeState,
    protection: Protection,
    details: &NodeDetails,
    device_state: &DeviceState,
) -> Device {
    let device = device_state.device();
    let (kind, mig_profile) = match &device.kind {
        DeviceKind::Gpu => (state::DeviceKind::Gpu, None),
        DeviceKind::MigParent => (state::DeviceKind::MigParent, None),
        DeviceKind::MigInstance { profile, .. } => {
            (state::DeviceKind::MigInstance, Some(profile.to_string()))
        }
    };
    let more = details.devices.get(&device.id).cloned().unwrap_or_default();
    let condition = details.conditions.get(&device.id).copied().unwrap_or_default();
    let neighbors = more.neighbors.iter();
    let on = details.usage_samples.on(&device.id);
    Device {
        id: device.id.to_string(),
        index: device.index.0,
        model: device.model.to_string(),
        kind,
        mig_profile,
        shared_instance: kind == state::DeviceKind::MigInstance
            && device_state.rule().instances == InstanceUse::Shared,
        mig_placement: device_state
            .slot()
            .map(|slot| MigPlacement { start: slot.start, size: slot.size }),
        instance: instance(device_state),
        mig_units: units(node, &device.id),
        placeable: placeable(node, &device.id),
        mig_failures: mig_failures(node, details, &device.id),
        compute_millionths: compute_of(node, details, device_state),
        sm_count: more.sm_count,
        slots: device_state.slots().map(|(total, free)| Slots { total, free }),
        isolation: isolation(device_state),
        health: match device_state.health() {
            Health::Healthy => state::Health::Healthy,
            Health::Unhealthy => state::Health::Unhealthy,
            Health::KubeletOwned => state::Health::KubeletOwned,
        },
        // A GPU without memory of its own may have a size.
        fault: condition.fault.filter(|_| device_state.health() != Health::Healthy),
        last_xid: condition.last_xid,
        mps: condition.mps,
        minor: more.minor,
        numa_node: more.numa_node,
        neighbors: neighbors
            .map(|(id, links)| Neighbor { id: id.to_string(), links: *links })
            .collect(),
        addressing_mode: more.addressing_mode,
        can_limit_memory: more.can_limit_memory,
        sets_memory_limits: node.limits().are_set(&device.id),
        capacity_mib: device.capacity().mib(),
        capacity_configured: more.is_size_configured,
        allocated: amount(device_state.allocated()),
        held: amount(device_state.on_hold()),
        free: amount(device_state.free()),
        used_mib: device_state.used().map(|used| used.mib()),
        used_beyond_allocated_mib: device_state.unallocated_use().mib(),
        untracked_mib: on.map_or(0, |on| on.untracked.mib()),
        over_limit_pods: on.map(|on| over_limit_pods(node, on)).unwrap_or_default(),
        overallocated: device_state.is_overallocated(),
        tenants: tenants(node, details, device_state, protection),
        guests: guests(node, details, device_state),
    }
}

/// How far an instance is that gpupack makes.
pub(crate) fn instance(device_state: &DeviceState) -> Option<InstanceState> {
    match device_state.origin() {
        Origin::Found => None,
        Origin::Promised => Some(InstanceState::Promised),
        Origin::Made if device_state.is_leaving() => Some(InstanceState::Leaving),
        Origin::Made => Some(InstanceState::Made),
    }
}

/// Into how many units a GPU is divided, if instances can be made on it.
fn units(node: &NodeState, gpu: &DeviceId) -> Option<u32> {
    let makeable = node.spots().iter().map(|spot| &spot.makeable);
    let own = makeable.filter(|makeable| makeable.spot.gpu == *gpu);
    own.map(|makeable| makeable.slot.start.saturating_add(makeable.slot.size)).max()
}

/// How many more instances of each profile can be made on a GPU.
fn placeable(node: &NodeState, gpu: &DeviceId) -> Vec<PlaceableProfile> {
    let all = node.placeable_instances(gpu).into_iter();
    all.map(|(profile, count)| PlaceableProfile { profile: profile.to_string(), count }).collect()
}

/// The orders about MIG instances of a GPU that its agent cannot carry out, while it reports.
fn mig_failures(node: &NodeState, details: &NodeDetails, gpu: &DeviceId) -> Vec<FailedMigOrder> {
    let is_known = node.state() == NodeReporting::Reporting;
    let own = details.mig_failures.iter().filter(|failure| is_known && failure.gpu == *gpu);
    let view = own.map(|failure| FailedMigOrder {
        profile: failure.profile.to_string(),
        start: failure.start,
        removal: failure.removed.is_some(),
        error: failure.error.clone(),
    });
    view.collect()
}

fn amount(demand: Demand) -> DeviceAmount {
    DeviceAmount { memory_mib: demand.memory.mib(), share_millionths: demand.share.millionths() }
}

/// The part of its GPU's compute that a MIG instance has, in millionths: by the multiprocessors that the driver lists,
/// else by the table of its model. Boards of one model differ: an H100 has 132 with SXM and 114 with PCIe.
fn compute_of(node: &NodeState, details: &NodeDetails, device_state: &DeviceState) -> Option<u64> {
    let device = device_state.device();
    let DeviceKind::MigInstance { parent, profile } = &device.kind else {
        return None;
    };
    let own = details.devices.get(&device.id).and_then(|more| more.sm_count);
    let all = details.devices.get(parent).and_then(|more| more.multiprocessors);
    if let (Some(own), Some(all)) = (own, all)
        && own <= all
    {
        return Some(u64::from(own) * Share::WHOLE.millionths() / u64::from(all));
    }
    let parent =
        node.devices().iter().map(DeviceState::device).find(|device| device.id == *parent)?;
    let share = node.mig().geometry_of(parent)?.compute_of(profile)?;
    Some(share.millionths())
}

fn isolation(device_state: &DeviceState) -> DeviceIsolation {
    let verification = match device_state.verification() {
        Verification::Configured => state::Verification::Pending,
        Verification::Verified => state::Verification::Verified,
        Verification::Missing => state::Verification::Missing,
    };
    let (configured, verification) = match device_state.configured_isolation() {
        ConfiguredIsolation::None => (IsolationMode::None, None),
        ConfiguredIsolation::Mps => (IsolationMode::Mps, Some(verification)),
        ConfiguredIsolation::Driver => (IsolationMode::Driver, Some(verification)),
        ConfiguredIsolation::Hardware => (IsolationMode::Mig, None),
    };
    DeviceIsolation { configured, verification }
}

fn mode(mode: Mode) -> IsolationMode {
    match mode {
        Mode::None => IsolationMode::None,
        Mode::Mps => IsolationMode::Mps,
        Mode::Driver => IsolationMode::Driver,
        Mode::Mig => IsolationMode::Mig,
        Mode::Whole => IsolationMode::Whole,
    }
}

/// The tenants of a device, by UID.
fn tenants(
    node: &NodeState,
    details: &NodeDetails,
    device_state: &DeviceState,
    protection: Protection,
) -> Vec<Tenant> {
    let tenants = device_state.tenants().iter().map(|(uid, held)| {
        let reservation = node.reservation(uid);
        let runs_on =
            reservation.and_then(Reservation::guest_on).filter(|_| device_state.is_away(uid));
        let runs_on = runs_on.unwrap_or(&device_state.device().id);
        let where_it_runs = node.devices().iter().find(|running| running.device().id == *runs_on);
        let limit = where_it_runs.and_then(|device| device.memory_limit(uid));
        let on = details.usage_samples.on(runs_on);
        let isolation = details.isolation.of(device_state, uid, *held, protection.limits);
        Tenant {
            pod_uid: uid.to_string(),
            pod: reservation.map(|held| held.pod.name.to_string()).unwrap_or_default(),
            state: reservation.map_or(PodState::Confirmed, reservation_state),
            allocated: amount(*held),
            limit_mib: limit.map(MemMib::mib),
            used_mib: on.and_then(|on| on.pods.get(uid)).map(|seen| seen.used.mib()),
            isolation: TenantIsolation {
                configured: mode(isolation.configured),
                verified: mode(isolation.verified),
                held_by: Some(protection.holder(isolation)),
            },
            runs_on: reservation.and_then(Reservation::guest_on).map(DeviceId::to_string),
            comes_home: reservation.is_some_and(Reservation::is_going_home),
            hangs: reservation.is_some_and(|held| held.is_hung),
        }
    });
    tenants.collect()
}

/// The guests of a device, by UID.
fn guests(node: &NodeState, details: &NodeDetails, device_state: &DeviceState) -> Vec<Guest> {
    let on = details.usage_samples.on(&device_state.device().id);
    let guests = device_state.guests().iter().map(|(uid, guest)| Guest {
        pod_uid: uid.to_string(),
        pod: node.reservation(uid).map(|held| held.pod.name.to_string()).unwrap_or_default(),
        borrowed: amount(guest.demand),
        leaving: guest.is_leaving,
        used_mib: on.and_then(|on| on.pods.get(uid)).map(|seen| seen.used.mib()),
    });
    guests.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::ledger::ledger_fixture::{failed_mig_order, ledger};
    use kube_api::config::file::Config;

    #[test]
    fn a_gpu_has_the_orders_about_its_instances_that_fail() {
        let node = ledger("A B").node("n").unwrap();
        let mut details = NodeDetails::default();
        let failed = [("A", Some("MIG-1")), ("A", None), ("C", None)];
        details.mig_failures =
            failed.map(|(gpu, removed)| failed_mig_order(gpu, 3, removed)).into();
        let protection = Protection::of(&Config::default());
        let view = |at: usize| device(&node, protection, &details, &node.devices()[at]);
        let shown = serde_json::to_value(view(0)).unwrap();
        let made =
            serde_json::json!({"profile": "1g.6gb", "start": 3, "error": "process 7 uses it"});
        let mut removed = made.clone();
        removed["removal"] = true.into();
        assert_eq!(shown["migFailures"], serde_json::json!([removed, made]));
        let other = serde_json::to_value(view(1)).unwrap();
        assert!(other.get("migFailures").is_none(), "{other}");
    }
}
