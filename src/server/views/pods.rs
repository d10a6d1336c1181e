//! The pods of `/v1/state`: what each one requests or holds.

use control::shared::app::App;
use engine::hardware::pool::ConfiguredIsolation;
use engine::ledger::suggest::waiting::WaitingPod;
use engine::model::node_state::NodeState;
use engine::model::request::{Amount, GpuRequest, Isolation, Limit};
use engine::model::reservation::{Reservation, ReservationState};
use engine::usage::starts::Sight;
use wire::api::state::{
    HostAmount, IsolationMode, Pod, PodRequest, PodSight, PodState, RequestedIsolation,
};
use wire::device::DeviceKind;
use wire::ids::{DeviceId, PodUid};
use wire::units;
use wire::units::{MemMib, Share};

/// A pod of which only CPU and host memory matter.
fn bare(uid: &PodUid, state: PodState, host: units::HostAmount) -> Pod {
    Pod {
        pod_uid: uid.to_string(),
        pod: String::new(),
        node: None,
        state,
        host: host_amount(host),
        devices: 0,
        share_millionths: None,
        device_memory_mib: None,
        mig_profile: None,
        models: Vec::new(),
        request: None,
        isolation: None,
        priority: None,
        created_unix_seconds: None,
        start_failure: None,
        seen: None,
    }
}

/// A pod with devices.
fn placed(node: &NodeState, held: &Reservation) -> Pod {
    let placed = &held.placement.devices;
    let mig_profile = placed.first().and_then(|first| profile(node, &first.id));
    let isolation = match held.placement.isolation {
        ConfiguredIsolation::None => IsolationMode::None,
        ConfiguredIsolation::Mps => IsolationMode::Mps,
        ConfiguredIsolation::Driver => IsolationMode::Driver,
        ConfiguredIsolation::Hardware if mig_profile.is_some() => IsolationMode::Mig,
        ConfiguredIsolation::Hardware => IsolationMode::Whole,
    };
    Pod {
        pod: held.pod.name.to_string(),
        node: Some(node.name().to_string()),
        devices: count(placed.len()),
        share_millionths: placed.iter().map(|device| device.demand.share.millionths()).max(),
        device_memory_mib: placed.iter().map(|device| device.demand.memory.mib()).max(),
        mig_profile,
        request: held.request.as_deref().map(request_of),
        isolation: Some(isolation),
        ..bare(&held.pod.uid, reservation_state(held), held.host)
    }
}

/// A waiting pod.
fn of_waiting(waiting: &WaitingPod) -> Pod {
    let without_gpu = Pod {
        pod: waiting.pod.name.to_string(),
        priority: Some(waiting.priority),
        created_unix_seconds: u64::try_from(waiting.created_unix_seconds)
            .ok()
            .filter(|seconds| *seconds > 0),
        ..bare(&waiting.pod.uid, PodState::Waiting, waiting.query.host)
    };
    let Some(request) = &waiting.query.gpu else { return without_gpu };
    let request = request_of(request);
    Pod {
        devices: request.devices,
        share_millionths: request.share_millionths,
        device_memory_mib: request.memory_mib,
        mig_profile: request.mig_profile.clone(),
        models: request.models.clone(),
        request: Some(request),
        ..without_gpu
    }
}

/// What a pod requests.
fn request_of(request: &GpuRequest) -> PodRequest {
    let (share, memory, mig_profile) = match &request.amount {
        Amount::Fraction(share) => (Some(*share), None, None),
        Amount::Memory(memory) => (None, Some(*memory), None),
        Amount::FractionAndMemory(share, memory) => (Some(*share), Some(*memory), None),
        Amount::Whole => (Some(Share::WHOLE), None, None),
        Amount::MigInstance(profile) => (None, None, Some(profile.to_string())),
        Amount::SharedSlot => (None, None, None),
    };
    let (limit_share, limit_memory) = match request.limit {
        Some(Limit::Fraction(share)) => (Some(share), None),
        Some(Limit::Memory(memory)) => (None, Some(memory)),
        None => (None, None),
    };
    PodRequest {
        devices: request.count.get(),
        share_millionths: share.map(Share::millionths),
        memory_mib: memory.map(MemMib::mib),
        mig_profile,
        slot: request.amount == Amount::SharedSlot,
        models: request.models.names().map(str::to_owned).collect(),
        isolation: match request.isolation {
            Isolation::None => RequestedIsolation::None,
            Isolation::Memory => RequestedIsolation::Memory,
            Isolation::Hardware => RequestedIsolation::Hardware,
        },
        limit_share_millionths: limit_share.map(Share::millionths),
        limit_memory_mib: limit_memory.map(MemMib::mib),
        policy: request.policy.map(|policy| policy.name().to_owned()),
        min_memory_mib: request.min_memory.mib(),
        by_instance: request.by_instance,
    }
}

/// The state of a reservation.
pub(crate) fn reservation_state(held: &Reservation) -> PodState {
    match held.state {
        ReservationState::Assumed { .. } => PodState::Assumed,
        ReservationState::Confirmed => PodState::Confirmed,
        ReservationState::Draining { .. } => PodState::Draining,
    }
}

/// CPU and host memory.
pub(crate) fn host_amount(host: units::HostAmount) -> HostAmount {
    HostAmount { cpu_milli: host.cpu.milli(), memory_mib: host.memory.mib() }
}

fn profile(node: &NodeState, id: &DeviceId) -> Option<String> {
    let mut devices = node.devices().iter().map(|device_state| device_state.device());
    match &devices.find(|device| device.id == *id)?.kind {
        DeviceKind::MigInstance { profile, .. } => Some(profile.to_string()),
        DeviceKind::Gpu | DeviceKind::MigParent => None,
    }
}

fn count(devices: usize) -> u32 {
    u32::try_from(devices).unwrap_or(u32::MAX)
}

/// The pods on a node, by UID, those without a GPU last.
pub(crate) fn on(app: &App, node: &NodeState) -> impl Iterator<Item = Pod> {
    let starts = app.ledger.starts(node.name().as_str());
    let placed = node.reservations().values().map(move |held| Pod {
        seen: Some(match starts.of(&held.pod.uid) {
            Sight::Unknown => PodSight::Unknown,
            Sight::Blind => PodSight::Blind,
            Sight::Seen => PodSight::Seen,
        }),
        start_failure: app
            .pods
            .start_failures
            .get(&held.pod.uid)
            .map(|failure| failure.to_string()),
        ..placed(node, held)
    });
    let others = node.others().iter().map(|(uid, other)| Pod {
        node: Some(node.name().to_string()),
        ..bare(uid, PodState::Confirmed, other.host)
    });
    placed.chain(others)
}

/// Shows the waiting pods, by priority, then the oldest first.
pub(crate) fn waiting(app: &App, show: impl FnMut(Pod)) {
    app.waiting.all().iter().map(|state| of_waiting(&state.waiting)).for_each(show);
}
