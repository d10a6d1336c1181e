//! The pods of `/v1/state`: what each one requests or holds.

use serde::Serialize;

use crate::control::shared::app::App;
use crate::hardware::device::{DeviceId, DeviceKind, PodUid};
use crate::hardware::units::{HostAmount, MemMib, Share};
use crate::ledger::suggest::waiting::WaitingPod;
use crate::model::node_state::NodeState;
use crate::model::request::Amount;
use crate::model::reservation::{Reservation, ReservationState};

/// One pod: a placed one with what it holds, or a waiting one with its request.
#[derive(Debug, Serialize)]
pub struct PodView {
    /// Its UID.
    pub pod_uid: String,
    /// `namespace/name`; empty if only the UID is known, as for pods without a GPU.
    pub pod: String,
    /// Its node; none while it waits.
    pub node: Option<String>,
    /// `assumed`, `confirmed`, `draining` or `waiting`.
    pub state: &'static str,
    /// CPU, in thousandths of a core.
    pub cpu_milli: u64,
    /// Host memory.
    pub memory_mib: u64,
    /// Number of devices.
    pub devices: u32,
    /// Compute share of each device; none if the request names none.
    pub share_millionths: Option<u64>,
    /// Memory of each device; none if the request names none.
    pub device_memory_mib: Option<u64>,
    /// MIG profile, if the devices are MIG instances.
    pub mig_profile: Option<String>,
    /// Models that a waiting pod accepts; empty for any. Empty for a placed pod, too.
    pub models: Vec<String>,
    /// Creation time in seconds since 1970; only of waiting pods.
    pub created_unix_seconds: Option<i64>,
    /// Why one of its containers cannot start, if its device is the cause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_failure: Option<String>,
}

impl PodView {
    /// A pod of which only CPU and host memory matter.
    fn bare(uid: &PodUid, state: &'static str, host: HostAmount) -> Self {
        Self {
            pod_uid: uid.to_string(),
            pod: String::new(),
            node: None,
            state,
            cpu_milli: host.cpu.milli(),
            memory_mib: host.memory.mib(),
            devices: 0,
            share_millionths: None,
            device_memory_mib: None,
            mig_profile: None,
            models: Vec::new(),
            created_unix_seconds: None,
            start_failure: None,
        }
    }

    /// A pod with devices.
    fn placed(node: &NodeState, held: &Reservation) -> Self {
        let placed = &held.placement.devices;
        let mig_profile = placed.first().and_then(|first| profile(node, &first.id));
        Self {
            pod: held.pod.name.to_string(),
            node: Some(node.name().to_string()),
            devices: count(placed.len()),
            share_millionths: placed.iter().map(|device| device.demand.share.millionths()).max(),
            device_memory_mib: placed.iter().map(|device| device.demand.memory.mib()).max(),
            mig_profile,
            ..Self::bare(&held.pod.uid, reservation_state(held), held.host)
        }
    }

    /// A waiting pod.
    fn waiting(waiting: &WaitingPod) -> Self {
        let bare = Self {
            pod: waiting.pod.name.to_string(),
            created_unix_seconds: Some(waiting.created_unix_seconds).filter(|seconds| *seconds > 0),
            ..Self::bare(&waiting.pod.uid, "waiting", waiting.question.host)
        };
        let Some(request) = &waiting.question.gpu else { return bare };
        let (share, memory, mig_profile) = match &request.amount {
            Amount::Fraction(share) => (Some(*share), None, None),
            Amount::Memory(memory) => (None, Some(*memory), None),
            Amount::FractionAndMemory(share, memory) => (Some(*share), Some(*memory), None),
            Amount::Whole => (Some(Share::WHOLE), None, None),
            Amount::MigInstance(profile) => (None, None, Some(profile.to_string())),
            Amount::SharedSlot => (None, None, None),
        };
        Self {
            devices: request.count.get(),
            share_millionths: share.map(Share::millionths),
            device_memory_mib: memory.map(MemMib::mib),
            mig_profile,
            models: request.models.names().map(str::to_owned).collect(),
            ..bare
        }
    }
}

/// The JSON name of a reservation's state.
pub(crate) fn reservation_state(held: &Reservation) -> &'static str {
    match held.state {
        ReservationState::Assumed { .. } => "assumed",
        ReservationState::Confirmed => "confirmed",
        ReservationState::Draining { .. } => "draining",
    }
}

fn profile(node: &NodeState, id: &DeviceId) -> Option<String> {
    let mut devices = node.devices().iter().map(|books| books.device());
    match &devices.find(|device| device.id == *id)?.kind {
        DeviceKind::MigInstance { profile, .. } => Some(profile.to_string()),
        DeviceKind::Gpu | DeviceKind::MigParent => None,
    }
}

fn count(devices: usize) -> u32 {
    u32::try_from(devices).unwrap_or(u32::MAX)
}

/// The pods on a node, by UID, those without a GPU last.
pub(crate) fn on(app: &App, node: &NodeState) -> impl Iterator<Item = PodView> {
    let placed = node.reservations().values().map(|held| PodView {
        start_failure: app.start_failures.get(&held.pod.uid).map(|failure| failure.to_string()),
        ..PodView::placed(node, held)
    });
    let others = node.others().iter().map(|(uid, host)| PodView {
        node: Some(node.name().to_string()),
        ..PodView::bare(uid, "confirmed", *host)
    });
    placed.chain(others)
}

/// Shows the waiting pods, by priority, then the oldest first.
pub(crate) fn waiting(app: &App, show: impl FnMut(PodView)) {
    app.waiting.all().iter().map(|state| PodView::waiting(&state.waiting)).for_each(show);
}
