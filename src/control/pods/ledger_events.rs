//! Ledger events as log lines and events on the pods that they concern.

use crate::bind::edits::tell_edited;
use crate::pods::memory_guard::{
    OverLimitUse, UnverifiedIsolation, report_over_limit, report_untracked_memory,
    report_unverified_isolation,
};
use crate::pods::wording::blind_note;
use crate::shared::app::App;
use crate::shared::log_limit::LogLimit;
use engine::hardware::spots::Spot;
use engine::model::event::LedgerEvent;
use engine::model::reservation::PodRef;
use kube_api::write::events::NoticeReason;
use wire::device::Health;
use wire::ids::{DeviceId, NodeName};
use wire::mutation::{Mutation, mutated};

/// Whether a line about a report may be written now; then how many were left out since the last. An
/// agent can report another inventory each time.
fn admitted(app: &App, reason: &'static str) -> Option<u64> {
    static LOGGED: LogLimit = LogLimit::new();
    LOGGED.admits(("report", reason), app.clock.precise())
}

/// Writes a ledger event to the log, and to the pods that it concerns.
pub(crate) fn tell(app: &App, event: &LedgerEvent) {
    match event {
        LedgerEvent::Room(_) => {}
        LedgerEvent::Overallocated { node, device } => {
            if let Some(left_out) = admitted(app, "overallocated") {
                tracing::error!(%node, %device, left_out, "more is allocated on a device than it has: bound by others, a smaller replacement, or a forged annotation");
            }
            let note = format!(
                "its device {device} on node {node} is overallocated: gpupack places nothing more there and removes nothing"
            );
            tell_tenants(app, node, device, NoticeReason::Overallocated, &note);
        }
        LedgerEvent::DeviceLost { node, device, health } => tell_lost(app, node, device, *health),
        LedgerEvent::Impossible { node, device, fault } => {
            if let Some(left_out) = admitted(app, "impossible") {
                tracing::error!(%node, %device, %fault, left_out, "an impossible MIG instance is reported: gpupack places nothing on it");
            }
        }
        LedgerEvent::NotInTable { node, spot: Spot { gpu, profile, start } } => {
            if let Some(left_out) = admitted(app, "not in the table") {
                tracing::warn!(%node, %gpu, %profile, start, left_out, "NVML lists a MIG profile at this unit of a GPU, the table of gpupack does not have it: the list of NVML counts");
            }
        }
        LedgerEvent::NoGeometry { node, device, fault } => {
            if let Some(left_out) = admitted(app, "no geometry") {
                tracing::warn!(%node, %device, %fault, left_out, "what NVML lists for a GPU says too little to choose places: MIG instances are made there at the first free one");
            }
        }
        LedgerEvent::Unplaced { pod, node } => {
            tracing::warn!(pod_uid = %pod.uid, %pod, %node, "a pod with a GPU request runs without a placement of gpupack: only its observed use counts");
            let note = format!(
                "runs on node {node} without a placement of gpupack: only the memory that it is seen to use counts"
            );
            app.tell(pod, NoticeReason::PlacedByOthers, note);
        }
        LedgerEvent::MadeAgain { .. } if mutated(Mutation::MadeAgainUnwritten) => {}
        LedgerEvent::MadeAgain { pod } => {
            tracing::info!(pod_uid = %pod.uid, %pod, "a MIG instance was made again: its new UUID is written on the pod");
            app.pods.edits.note_made_again(pod, app.clock.now());
        }
        LedgerEvent::InstanceLost { pod, node, device } => {
            tell_instance_lost(app, pod, node, device);
        }
        LedgerEvent::PlacementEdited { pod, node } => tell_edited(app, pod, node),
        LedgerEvent::Overuse { node, device, pod, used, allowed } => {
            report_over_limit(app, pod, *allowed, &OverLimitUse { node, device, used: *used });
        }
        LedgerEvent::Untracked { node, device, used } => {
            report_untracked_memory(app, &OverLimitUse { node, device, used: *used });
        }
        LedgerEvent::NoIsolation { node, device, pod, configured, limit } => {
            let found =
                UnverifiedIsolation { node, device, configured: *configured, limit: *limit };
            report_unverified_isolation(app, pod, &found);
        }
        LedgerEvent::Blind { pod, node, container } => {
            if let Some(left_out) = admitted(app, "blind") {
                tracing::warn!(pod_uid = %pod.uid, %pod, %node, container, left_out, "a container started without its GPU");
            }
            app.tell(pod, NoticeReason::GpuStartFailed, blind_note(node, container));
        }
        LedgerEvent::BlindNode(node) => {
            let Some(left_out) = admitted(app, "blind node") else { return };
            tracing::warn!(%node, left_out, "the last pods that started on the node did not get their GPU: it gets no new pods until there is a sign that containers get it, and one as a trial after five minutes");
        }
        LedgerEvent::NotReporting(node) => {
            tracing::warn!(%node, "the node's agent is not reporting: the node gets no new pods");
        }
    }
}

/// Says that a device with tenants has vanished, or takes no new ones.
fn tell_lost(app: &App, node: &NodeName, device: &DeviceId, health: Option<Health>) {
    let what = match health {
        None => "has vanished",
        Some(Health::KubeletOwned) => "is allocated by kubelet, also to other pods",
        Some(Health::Healthy | Health::Unhealthy) => "is ill",
    };
    if let Some(left_out) = admitted(app, what) {
        tracing::error!(%node, %device, left_out, "a device that holds pods {what}");
    }
    let fix = match health {
        None if is_made_again(app, node, device) => {
            "; it is made again once its GPU is in MIG mode, with an agent that makes instances"
        }
        None => "; delete the pod to get another one",
        Some(_) => "",
    };
    let note = format!(
        "its device {device} on node {node} {what}: it stays allocated, nothing more is placed there{fix}"
    );
    tell_tenants(app, node, device, NoticeReason::DeviceLost, &note);
    let when = if health.is_some() { " and this lasts for a minute" } else { "" };
    for held in app.ledger.guests_on(node.as_str(), device) {
        let Some(home) = held.placement.devices.first().map(|placed| &placed.id) else { continue };
        let note = format!(
            "the device {device} on node {node}, where it runs as a guest, {what}: its container is restarted on its \
             own one, {home}, if that one is sound{when}"
        );
        app.tell(&held.pod, NoticeReason::DeviceLost, note);
    }
}

/// Whether a device that has vanished is a MIG instance that gpupack made for a pod.
fn is_made_again(app: &App, node: &NodeName, device: &DeviceId) -> bool {
    let tenants = app.ledger.tenants(node.as_str(), device).into_iter();
    let mut held = tenants.filter_map(|pod| app.ledger.reservation(&pod.uid));
    held.any(|held| held.placement.parts().any(|(at, spot)| at.id == *device && spot.is_some()))
}

/// Says that the MIG instance is gone that was made for a pod.
fn tell_instance_lost(app: &App, pod: &PodRef, node: &NodeName, device: &DeviceId) {
    if let Some(left_out) = admitted(app, "instance lost") {
        tracing::warn!(pod_uid = %pod.uid, %pod, %node, %device, left_out, "the MIG instance of a pod is gone, by a boot or because another program destroyed it: its place stays allocated, and it is made again there");
    }
    let note = format!(
        "its MIG instance {device} on node {node} is gone, by a boot or because another program destroyed it: \
         its place stays allocated, and it is made again there with another UUID; restart its container if that \
         still runs"
    );
    app.tell(pod, NoticeReason::DeviceLost, note);
}

fn tell_tenants(app: &App, node: &NodeName, device: &DeviceId, reason: NoticeReason, note: &str) {
    for pod in app.ledger.tenants(node.as_str(), device) {
        app.tell(&pod, reason, note.to_owned());
    }
}
