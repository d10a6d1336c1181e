//! Takes memory back that pods use above their request, when other pods that run on the GPU request it.
//!
//! The CPU request of the container is changed in place, for which kubelet restarts it. Its devices stay the
//! same, so nothing is written before, unless MPS limits its memory: then first that it gets no more than it
//! requests from now on. A process that stops after a write leaves nothing behind: whether memory is missing is
//! seen in the lists of processes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::bind::recall::{
    Ends, LOOK_AGAIN, NO_RESTART, Next, Read, Resized, STAY_FOR, TRY_AGAIN, names, read, resize,
};
use crate::bind::start_limits::{client_limits, least_at_start};
use crate::metrics::moves::{MoveReason, MoveResult};
use crate::shared::app::App;
use engine::ledger::change::commits::Debt;
use engine::model::reservation::{BorrowedMemory, MoveHome, PodRef};
use kube_api::pod::gpu_container::GpuContainer;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::request::placement::{MPS_MEMORY, encode};
use kube_api::request::written::owned;
use kube_api::write::events::NoticeReason;
use kube_api::write::outcome::PatchOutcome;
use kube_api::write::target::PodKey;
use wire::ids::{DeviceId, NodeName};
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// Age of the end of a container from which on a list shows only what ran after it.
pub(crate) const SAMPLED_WITHIN: Duration = Duration::from_secs(1);

/// A restart that was ordered.
struct Order {
    node: NodeName,
    device: DeviceId,
    /// The container before, with its CPU request.
    before: MoveHome,
    /// When its end was seen.
    ended: Option<Timestamp>,
}

/// Takes back what pods of a node, or of all nodes, use above their request and others lack, each in a
/// task of its own.
pub fn take_back(app: &Arc<App>, node: Option<&str>) {
    if !app.lead.leading.is_here() || !app.lead.is_fenced() {
        return;
    }
    for pod in app.ledger.to_give_back(node) {
        if app.room.moves.begin(&pod.uid) {
            app.outbox.push(app.ledger.note_borrowed(&pod.uid, BorrowedMemory::GivingBack));
            let worker = Arc::clone(app);
            app.outside.spawn(async move {
                let _ends = Ends { app: &worker, uid: &pod.uid };
                give_back(&worker, &pod).await;
            });
        }
    }
}

async fn give_back(app: &Arc<App>, pod: &PodRef) {
    let Ok(key) = PodKey::of(pod) else { return };
    let (began, mut order) = (app.clock.now(), None);
    while app.clock.now().since(began) < STAY_FOR && app.lead.leading.is_here() {
        match step(app, (pod, &key), &mut order).await {
            Next::Done => return,
            Next::After(pause) => app.outside.sleep(pause).await,
        }
    }
    if app.lead.leading.is_here() && order.is_some_and(|order| order.ended.is_none()) {
        failed(app, pod, "its container has not ended within a minute");
    }
}

/// Once a restart is ordered, it is followed until a list shows what came of it, also if no pod needs that
/// any more.
async fn step(app: &Arc<App>, (pod, key): (&PodRef, &PodKey), order: &mut Option<Order>) -> Next {
    if let Some(Order { node, device, ended: Some(ended), .. }) = order {
        let listed = app.ledger.listed(node.as_str(), device);
        if listed.is_none_or(|listed| listed <= ended.plus(SAMPLED_WITHIN)) {
            return Next::After(LOOK_AGAIN);
        }
        app.metrics.moved(MoveReason::TakeBack, MoveResult::Done);
        return Next::Done;
    }
    let Read { seen, annotations, pending, .. } = match read(app, pod, key).await {
        Ok(read) => read,
        Err(next) => return next,
    };
    let Some(container) = &seen.containers.gpu else {
        return failed(app, pod, NO_RESTART);
    };
    let is_open = |order: &Order| container.cpu_milli == order.before.cpu_milli;
    if order.take_if(|order| is_open(order)).is_some() {
        return Next::After(TRY_AGAIN); // it did not arrive, or was taken back
    }
    let Some(order) = order else {
        let read = (&seen, container, &annotations);
        return order_restart(app, (pod, key), read, order).await;
    };
    if container.has_left(&order.before) {
        order.ended = Some(app.clock.now());
    } else if let Some(pending) = pending {
        return failed(app, pod, &format!("kubelet does not carry out its resize: {pending}"));
    }
    Next::After(LOOK_AGAIN)
}

/// Makes kubelet restart the container, unless that was done often in vain.
async fn order_restart(
    app: &Arc<App>,
    (pod, key): (&PodRef, &PodKey),
    (seen, container, annotations): (&SeenPod, &GpuContainer, &BTreeMap<String, String>),
    order: &mut Option<Order>,
) -> Next {
    let Some(debt) = app.ledger.owes_memory(&pod.uid) else { return Next::Done };
    if !app.room.moves.may_restart(&pod.uid, app.clock.now()) {
        return failed(app, pod, "it was restarted several times, and took it again each time");
    }
    if let Some(next) = lower_limit(app, (pod, key), (seen, annotations)).await {
        return next;
    }
    let before =
        MoveHome { container: container.id.as_str().into(), cpu_milli: container.cpu_milli };
    let (node, device) = (debt.node.clone(), debt.device.clone());
    let ordered = Order { node, device, before, ended: None };
    let (resized, next) = match resize(app, (pod, key), seen).await {
        Resized::Accepted => (true, LOOK_AGAIN),
        // It may still arrive, and counts.
        Resized::Undecided => (false, TRY_AGAIN),
        Resized::Not(next) => return next,
        Resized::Refused(fault) => return failed(app, pod, &fault),
    };
    app.room.moves.restarted(&pod.uid, app.clock.now());
    if resized {
        tell(app, pod, &debt);
    }
    *order = Some(ordered);
    Next::After(next)
}

/// Writes that the container may take what it requests from its next start on, where MPS lets it take more.
/// What to do next if that was to be written; then the pod has another version.
async fn lower_limit(
    app: &App,
    (pod, key): (&PodRef, &PodKey),
    (seen, annotations): (&SeenPod, &BTreeMap<String, String>),
) -> Option<Next> {
    let known = app.pods.edits.written().get(&pod.uid).cloned();
    let kept: BTreeMap<String, String> =
        known.iter().flat_map(|known| known.written.kept()).collect();
    let is_client = kept.contains_key(MPS_MEMORY) || annotations.contains_key(MPS_MEMORY);
    if !is_client || mutated(Mutation::LimitStays) {
        return None;
    }
    let held = app.ledger.reservation(&pod.uid)?;
    let least = Some(least_at_start(app, &held)?);
    let limits = client_limits(app, &held.placement, least);
    let limit = limits.annotations().remove(MPS_MEMORY)?;
    if annotations.get(MPS_MEMORY) == Some(&limit) {
        return None;
    }
    // Not what other clients may have written on it meanwhile.
    let mut all = encode(&held.placement).unwrap_or_default();
    all.extend(if known.is_some() { kept } else { owned(annotations).collect() });
    all.insert(MPS_MEMORY.to_owned(), limit.clone());
    app.pods.edits.wrote(&pod.uid, &held.placement.node, &all);
    let patch = BTreeMap::from([(MPS_MEMORY.to_owned(), Some(limit))]);
    let version = seen.resource_version.as_str();
    let outcome = app.writer.write_placement(key, &pod.uid, version, seen.fence.by, &patch).await;
    if matches!(outcome, PatchOutcome::Conflict | PatchOutcome::Refused { .. }) {
        app.pods.edits.did_not_write(&pod.uid, known, &all);
    }
    Some(match outcome {
        PatchOutcome::Patched { .. } => Next::After(Duration::ZERO),
        PatchOutcome::Gone => Next::Done,
        PatchOutcome::Conflict => Next::After(LOOK_AGAIN),
        PatchOutcome::Undecided { .. } => Next::After(TRY_AGAIN),
        PatchOutcome::Refused { code, message } => {
            failed(app, pod, &format!("its limit was refused with {code}: {message}"))
        }
    })
}

fn tell(app: &App, pod: &PodRef, debt: &Debt) {
    let Debt { node, device, borrowed, .. } = debt;
    let needed_by = names(app, node.as_str(), device, pod.namespace());
    tracing::info!(pod_uid = %pod.uid, %pod, %node, %device, %borrowed, needed_by, "memory is taken back");
    let note = format!(
        "{borrowed} of {device} on node {node} are taken back that it uses above its request, because \
         {needed_by} needs them; its container is restarted"
    );
    app.tell(pod, NoticeReason::GpuMemoryTakenBack, note);
}

/// Notes that memory cannot be taken back from a pod: from now on it may use no more than its request.
fn failed(app: &App, pod: &PodRef, fault: &str) -> Next {
    app.outbox.push(app.ledger.note_borrowed(&pod.uid, BorrowedMemory::Kept));
    app.metrics.moved(MoveReason::TakeBack, MoveResult::Failed);
    tracing::warn!(pod_uid = %pod.uid, %pod, fault, "memory above the request of a pod cannot be taken back");
    let note = format!(
        "the memory that it uses above its request cannot be taken back, so no other pod is placed \
         there: {fault}; make it use less, or request more"
    );
    app.tell(pod, NoticeReason::GpuMoveFailed, note);
    Next::Done
}
