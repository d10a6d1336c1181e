//! Placement annotations that another client edited: reported, and written back from the ledger.
//!
//! The watch only notes the pod. A loop reads the pod again, compares it with the ledger, and
//! writes the ledger's placement on exactly that version. Each further edit is answered more
//! slowly, so two writers that fight cost the API server little.

use std::sync::Arc;
use std::time::Duration;

use crate::bind::start_limits::client_limits;
use crate::metrics::labels::EditResult;
use crate::shared::app::App;
use crate::shared::edited::KnownPlacement;
use engine::model::reservation::{Placement, PodRef, ReservationState};
use kube_api::pod::seen_pod::SeenPod;
use kube_api::request::placement::encode;
use kube_api::request::written::patch_to;
use kube_api::write::events::NoticeReason;
use kube_api::write::outcome::PatchOutcome;
use kube_api::write::target::PodKey;
use wire::ids::{NodeName, PodUid};
use wire::mutation::{Mutation, mutated};

/// Pause between two looks for placements to write back.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Looks between two sweeps. A sweep forgets pods without a reservation: their Binding failed.
const LOOKS_PER_SWEEP: u32 = 600;

/// Compares the annotations of a bound pod with what gpupack wrote. An edit of the placement itself
/// is a ledger event.
pub(crate) fn see_written(app: &App, seen: &SeenPod) {
    let (Ok(Some(placement)), Some(node)) = (&seen.placement, &seen.node) else { return };
    let uid = &seen.pod.uid;
    let known = app.pods.edits.written().get(uid).cloned();
    let is_same = known.as_ref().is_some_and(|known| known.written == seen.annotations.written);
    if is_same || app.ledger.reservation(uid).is_none_or(|held| held.placement != *placement) {
        return;
    }
    // What the leader writes is no edit, such as another limit.
    let is_follower = app.lead.has_replicas() && !app.lead.leading.is_here();
    if known.is_some_and(|known| known.is_of(placement)) && !is_follower {
        return tell_edited(app, &seen.pod, node);
    }
    // First seen after a start; or noted for a Binding of ours, while another Binding succeeded.
    app.pods
        .edits
        .written()
        .insert(uid.clone(), KnownPlacement::new(seen.annotations.written.clone(), placement));
}

/// Writes an event that the placement was edited, and notes the pod to be written back.
pub(crate) fn tell_edited(app: &App, pod: &PodRef, node: &NodeName) {
    app.metrics.placement_edit(EditResult::Seen);
    let note = format!(
        "its annotations under placed.gpupack.dev/ were edited or removed while it is bound to node \
         {node}: they change nothing of what it holds, and are written back"
    );
    app.tell(pod, NoticeReason::PlacementEdited, note);
    app.pods.edits.note(pod, app.clock.now());
}

pub(crate) async fn restoring(app: &Arc<App>) {
    let mut looks = app.outside.every(LOOK_EVERY);
    for look in 1_u32.. {
        looks.tick().await;
        restore_edited(app).await;
        if look.is_multiple_of(LOOKS_PER_SWEEP) {
            let is_held = |uid: &PodUid| app.ledger.reservation(uid).is_some();
            app.pods.edits.written().retain(|uid, _| is_held(uid));
            app.room.moves.sweep(is_held);
        }
    }
}

/// Writes back the placements that are due now.
pub async fn restore_edited(app: &App) {
    if !app.lead.leading.is_here() {
        app.pods.edits.follows();
        return;
    }
    if mutated(Mutation::EditNotRestored) {
        return;
    }
    app.pods.edits.led_since(app.clock.now());
    for pod in app.pods.edits.take_due(app.clock.now()) {
        let result = match restore(app, &pod).await {
            Ok(true) => EditResult::Restored,
            Ok(false) => continue,
            Err(fault) => {
                tracing::warn!(pod_uid = %pod.uid, %pod, fault, "could not restore an edited placement");
                app.pods.edits.note_failed(&pod, app.clock.now());
                EditResult::Failed
            }
        };
        app.metrics.placement_edit(result);
    }
}

/// Whether the MIG instances that are written on a pod may have been made after those that the ledger knows: by the
/// orders of a leader before, of which this one has no report yet, or while this process was frozen.
fn may_be_newer(app: &App, seen: &SeenPod, held: &Placement) -> bool {
    let Ok(Some(written)) = &seen.placement else { return false };
    let are_others = written.devices != held.devices && written.is_on_spots_of(held);
    let now = app.clock.now();
    let led_since = app.lead.has_replicas().then(|| app.pods.edits.led_since(now));
    let since = led_since.max(app.lead.pulse.resumed(now));
    are_others
        && since.is_some_and(|since| !app.ledger.is_sampled_after(&held.node, since))
        && !mutated(Mutation::OlderInstanceWritten)
}

/// Writes the ledger's placement on a pod that shows another one. Whether that was needed.
async fn restore(app: &App, pod: &PodRef) -> Result<bool, String> {
    let held = app.ledger.reservation(&pod.uid);
    let Some(held) = held.filter(|held| held.state == ReservationState::Confirmed) else {
        return Ok(false);
    };
    let key = PodKey::of(pod).map_err(|fault| fault.to_string())?;
    let read = app.writer.read_back(&key).await.map_err(|cause| cause.to_string())?;
    let Some(read) = read else { return Ok(false) };
    // Again: a move that was written meanwhile is no edit.
    let Some(held) = app.ledger.reservation(&held.pod.uid) else { return Ok(false) };
    let seen = SeenPod::from_api(&read);
    let known = app.pods.edits.written().get(&pod.uid).cloned();
    let known = known.filter(|known| known.is_of(&held.placement)).map(|known| known.written);
    let is_same = known.as_ref().is_none_or(|known| *known == seen.annotations.written);
    let is_ours = is_same && seen.placement.as_ref() == Ok(&Some(held.placement.clone()));
    if is_ours || seen.pod.uid != pod.uid {
        return Ok(false);
    }
    if app.is_of_later(&seen) {
        app.pods.edits.note(pod, app.clock.now()); // it may be gone
        return Ok(false);
    }
    // One that moves to another instance is called home before: that one may be gone, too.
    if held.changes_instances() && !held.is_going_home()
        || may_be_newer(app, &seen, &held.placement)
    {
        app.pods.edits.note(pod, app.clock.now());
        return Ok(false);
    }
    let mut annotations = encode(&held.placement).map_err(|fault| fault.to_string())?;
    match known {
        Some(known) => annotations.extend(known.kept()),
        None => {
            let at_start = app.ledger.at_start(&pod.uid);
            annotations.extend(client_limits(app, &held.placement, at_start).annotations());
        }
    }
    app.pods.edits.wrote(&pod.uid, &held.placement.node, &annotations);
    let patch = patch_to(&annotations, &read.metadata.annotations.unwrap_or_default());
    let version = seen.resource_version.as_str();
    match app.writer.write_placement(&key, &pod.uid, version, seen.fence.by, &patch).await {
        PatchOutcome::Patched { .. } => {
            tracing::warn!(pod_uid = %pod.uid, %pod, node = %held.placement.node, "the placement annotations of a pod were not those of the ledger: gpupack wrote them");
            Ok(true)
        }
        PatchOutcome::Gone => Ok(false),
        PatchOutcome::Conflict => Err("the pod changed meanwhile".to_owned()),
        PatchOutcome::Refused { code, message } => Err(format!("refused with {code}: {message}")),
        PatchOutcome::Undecided { cause } => Err(cause.to_string()),
    }
}
