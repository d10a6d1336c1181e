//! Placement annotations that somebody else edited: reported, and written back from the ledger.
//!
//! The watch only notes the pod. A loop reads the pod again, compares it with the ledger, and writes what
//! the ledger has on exactly that version. An editor that does it again and again is answered ever more
//! slowly, so two writers that fight cost the API server little.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::MissedTickBehavior;

use super::app::{App, ClusterTruth, Truth};
use super::bind::client_limits;
use crate::cluster::events::NoticeReason;
use crate::cluster::placement::{decode, encode};
use crate::cluster::pod::SeenPod;
use crate::cluster::target::PodKey;
use crate::cluster::write::TouchOutcome;
use crate::cluster::written::{Written, patch_to, placement_mark};
use crate::metrics::EditResult;
use crate::packing::device::{NodeName, PodUid};
use crate::packing::reservation::{Placement, PodRef, ReservationState};
use crate::packing::units::Timestamp;

/// Time between two looks for placements to write back.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Most placements written back at one look.
const WRITES_PER_LOOK: usize = 20;

/// Pause after the first write for a pod; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// A pod that was not edited for this long begins with the first pause again. Longer than any pause.
const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Most pods noted at once. One beyond it is noted at its next change, or at the next list.
const MAX_EDITED: usize = 10_000;

/// Looks between two in which pods are forgotten that are not in the books: a Binding that came to nothing.
const LOOKS_PER_SWEEP: u32 = 600;

/// What is written on bound pods, and the pods of which somebody else edited it.
#[derive(Default)]
pub struct Edits {
    edits: Mutex<BTreeMap<PodUid, Edit>>,
    /// As gpupack wrote it, or as it was first seen after a start: the configuration may have been another
    /// when it was written.
    written: Mutex<BTreeMap<PodUid, Known>>,
}

/// What is known to be written on a pod.
#[derive(Clone)]
struct Known {
    written: Written,
    /// Of the placement that it was written with. The pod may get another one: from a Binding of another
    /// process, where ours does not land.
    placement: u64,
}

impl Known {
    fn new(written: Written, placement: &Placement) -> Self {
        Self { written, placement: placement_mark(placement) }
    }

    fn is_of(&self, placement: &Placement) -> bool {
        self.placement == placement_mark(placement)
    }
}

struct Edit {
    pod: PodRef,
    /// When to write; none while nothing is to be written.
    due: Option<Timestamp>,
    writes: u32,
    last: Timestamp,
}

impl Edits {
    fn edits(&self) -> MutexGuard<'_, BTreeMap<PodUid, Edit>> {
        self.edits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn written(&self) -> MutexGuard<'_, BTreeMap<PodUid, Known>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what gpupack is about to write on a pod that is on `node`, or will be.
    pub(super) fn wrote(
        &self,
        uid: &PodUid,
        node: &NodeName,
        annotations: &BTreeMap<String, String>,
    ) {
        if let Ok(Some(placement)) = decode(annotations, node) {
            let known = Known::new(Written::of(annotations), &placement);
            self.written().insert(uid.clone(), known);
        }
    }

    /// Forgets what was written on a pod: it is gone, or its Binding has not landed.
    pub(super) fn forget(&self, uid: &PodUid) {
        self.written().remove(uid);
    }

    /// Of how many pods it is known what was written on them.
    pub fn written_count(&self) -> usize {
        self.written().len()
    }

    /// Notes that a pod was edited, or that it was not possible to write back.
    fn note(&self, pod: &PodRef, now: Timestamp) {
        let mut edits = self.edits();
        let is_full = edits.len() >= MAX_EDITED;
        match edits.get_mut(&pod.uid) {
            Some(edit) if edit.due.is_none() => edit.due = Some(edit.last.plus(pause(edit.writes))),
            None if !is_full => {
                let edit = Edit { pod: pod.clone(), due: Some(now), writes: 0, last: now };
                edits.insert(pod.uid.clone(), edit);
            }
            Some(_) | None => {}
        }
    }

    /// The pods to write now, each of which counts as written by that.
    fn take_due(&self, now: Timestamp) -> Vec<PodRef> {
        let mut edits = self.edits();
        edits.retain(|_, edit| edit.due.is_some() || now.since(edit.last) < FORGET_AFTER);
        let due = edits.values_mut().filter(|edit| edit.due.is_some_and(|due| due <= now));
        due.take(WRITES_PER_LOOK)
            .map(|edit| {
                (edit.due, edit.last) = (None, now);
                edit.writes = edit.writes.saturating_add(1);
                edit.pod.clone()
            })
            .collect()
    }

    /// How many pods are noted.
    pub fn count(&self) -> usize {
        self.edits().len()
    }
}

fn pause(writes: u32) -> Duration {
    let doubled = 1_u32.checked_shl(writes.saturating_sub(1)).unwrap_or(u32::MAX);
    FIRST_PAUSE.saturating_mul(doubled).min(LONGEST_PAUSE)
}

/// Compares what is written on a bound pod with what gpupack wrote. Of the placement itself the ledger tells.
pub(super) fn see_written(app: &App, seen: &SeenPod) {
    let (Ok(Some(placement)), Some(node)) = (&seen.placement, &seen.node) else { return };
    let uid = &seen.pod.uid;
    let known = app.edits.written().get(uid).cloned();
    let is_same = known.as_ref().is_some_and(|known| known.written == seen.written);
    if is_same || app.ledger.reservation(uid).is_none_or(|held| held.placement != *placement) {
        return;
    }
    if known.is_some_and(|known| known.is_of(placement)) {
        return tell_edited(app, &seen.pod, node);
    }
    // First seen after a start; or it was noted for a Binding of ours, and another one has landed.
    app.edits.written().insert(uid.clone(), Known::new(seen.written.clone(), placement));
}

/// Tells that the placement of a pod was edited, and notes it to be written back.
pub(super) fn tell_edited(app: &App, pod: &PodRef, node: &NodeName) {
    app.metrics.placement_edit(EditResult::Seen);
    let note = format!(
        "its annotations under placed.gpupack.dev/ were edited or removed while it is bound to node \
         {node}: they change nothing of what it holds, and are written back"
    );
    app.tell(pod, NoticeReason::PlacementEdited, note);
    app.edits.note(pod, app.clock.now());
}

/// Writes back what was edited, until the process ends.
pub(super) async fn restoring(app: &Arc<App>) {
    let mut interval = tokio::time::interval(LOOK_EVERY);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for look in 1_u32.. {
        interval.tick().await;
        restore_edited(app).await;
        if look.is_multiple_of(LOOKS_PER_SWEEP) {
            let is_held = |uid: &PodUid| app.ledger.reservation(uid).is_some();
            app.edits.written().retain(|uid, _| is_held(uid));
        }
    }
}

/// Writes back the placements that are due now.
pub async fn restore_edited(app: &App) {
    let Truth::Cluster(cluster) = &app.truth else { return };
    for pod in app.edits.take_due(app.clock.now()) {
        let result = match restore(app, cluster, &pod).await {
            Ok(true) => EditResult::Restored,
            Ok(false) => continue,
            Err(fault) => {
                tracing::warn!(pod_uid = %pod.uid, %pod, fault, "could not write an edited placement back");
                app.edits.note(&pod, app.clock.now());
                EditResult::Failed
            }
        };
        app.metrics.placement_edit(result);
    }
}

/// Writes what the ledger has of a pod, where the pod says something else. Whether that was needed.
async fn restore(app: &App, cluster: &ClusterTruth, pod: &PodRef) -> Result<bool, String> {
    let held = app.ledger.reservation(&pod.uid);
    let Some(held) = held.filter(|held| held.state == ReservationState::Confirmed) else {
        return Ok(false);
    };
    let key = PodKey::of(pod).map_err(|fault| fault.to_string())?;
    let read = cluster.writer.read_back(&key).await.map_err(|cause| cause.to_string())?;
    let Some(read) = read else { return Ok(false) };
    let seen = SeenPod::from_api(&read);
    let known = app.edits.written().get(&pod.uid).cloned();
    let known = known.filter(|known| known.is_of(&held.placement)).map(|known| known.written);
    let is_same = known.as_ref().is_none_or(|known| *known == seen.written);
    let is_ours = is_same && seen.placement.as_ref() == Ok(&Some(held.placement.clone()));
    if is_ours || seen.pod.uid != pod.uid {
        return Ok(false);
    }
    let mut annotations = encode(&held.placement).map_err(|fault| fault.to_string())?;
    match known {
        Some(known) => annotations.extend(known.limits()),
        None => annotations.extend(client_limits(app, &held.placement).annotations()),
    }
    app.edits.wrote(&pod.uid, &held.placement.node, &annotations);
    let patch = patch_to(&annotations, &read.metadata.annotations.unwrap_or_default());
    let version = &seen.resource_version;
    match cluster.writer.write_placement(&key, &pod.uid, version, &patch).await {
        TouchOutcome::Touched { .. } => {
            tracing::warn!(pod_uid = %pod.uid, %pod, node = %held.placement.node, "somebody edited the placement of a pod: it was written back");
            Ok(true)
        }
        TouchOutcome::Gone => Ok(false),
        TouchOutcome::Conflict => Err("the pod changed meanwhile".to_owned()),
        TouchOutcome::Refused { code, message } => Err(format!("refused with {code}: {message}")),
        TouchOutcome::Undecided { cause } => Err(cause.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::fixture::{pod, seconds};

    fn due(edits: &Edits, second: u64) -> usize {
        edits.take_due(seconds(second)).len()
    }

    #[test]
    fn an_editor_that_goes_on_is_answered_ever_more_slowly() {
        let edits = Edits::default();
        let mut written = Vec::new();
        for second in 0..2_000 {
            edits.note(&pod("p"), seconds(second));
            if due(&edits, second) == 1 {
                written.push(second);
            }
        }
        assert_eq!(written[..6], [0, 1, 3, 7, 15, 31]);
        let pauses: Vec<u64> = written.windows(2).map(|two| two[1] - two[0]).collect();
        assert_eq!((pauses.iter().max(), written.len()), (Some(&300), 14));
    }

    #[test]
    fn a_pod_that_is_left_alone_is_forgotten() {
        let edits = Edits::default();
        edits.note(&pod("p"), seconds(0));
        assert_eq!((due(&edits, 0), due(&edits, 1), edits.count()), (1, 0, 1));
        assert_eq!((due(&edits, 600), edits.count()), (0, 0));
    }

    #[test]
    fn few_are_written_at_once_and_few_are_kept() {
        let edits = Edits::default();
        (0..MAX_EDITED + 5).for_each(|at| edits.note(&pod(&format!("{at}")), seconds(0)));
        assert_eq!((due(&edits, 0), edits.count()), (WRITES_PER_LOOK, MAX_EDITED));
    }
}
