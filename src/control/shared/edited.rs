//! Pods whose placement another client edited, and what gpupack wrote on them.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use engine::model::reservation::{Placement, PodRef};
use kube_api::request::placement::decode;
use kube_api::request::written::{WrittenAnnotations, placement_mark};
use wire::ids::{NodeName, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// Most placements written back in one look.
pub(crate) const WRITES_PER_LOOK: usize = 20;

/// Pause after the first write for a pod; it doubles with each further write.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause.
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// The longest pause after a write that failed: that is no edit by others.
const LONGEST_AFTER_FAILURE: Duration = Duration::from_secs(16);

/// After this time without an edit a pod starts with the first pause again. Longer than any pause.
pub(crate) const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Most pods noted at a time. Beyond it a pod is noted at its next change, or at the next list.
pub(crate) const MAX_EDITED: usize = 10_000;

/// What is written on bound pods, and the pods on which another client edited it.
#[derive(Default)]
pub struct Edits {
    pub(crate) edits: Mutex<BTreeMap<PodUid, Edit>>,
    /// As gpupack wrote it, or as it was first seen after a start. The configuration may have been
    /// another when it was written.
    pub(crate) written: Mutex<BTreeMap<PodUid, KnownPlacement>>,
    /// Since when this process has led, as far as it was looked at.
    led_since: Mutex<Option<Timestamp>>,
}

#[derive(Clone)]
pub(crate) struct KnownPlacement {
    pub(crate) written: WrittenAnnotations,
    /// The mark of the placement that it was written with. The pod may get another placement, from
    /// a Binding of another process, if ours fails.
    pub(crate) placement: u64,
    /// Whether this process has written it, or was about to.
    pub(crate) is_own: bool,
}

impl KnownPlacement {
    /// What another process wrote.
    pub(crate) fn new(written: WrittenAnnotations, placement: &Placement) -> Self {
        Self { written, placement: placement_mark(placement), is_own: false }
    }

    pub(crate) fn is_of(&self, placement: &Placement) -> bool {
        self.placement == placement_mark(placement)
    }
}

pub(crate) struct Edit {
    pub(crate) pod: PodRef,
    /// When to write; `None` while nothing is to be written.
    pub(crate) due: Option<Timestamp>,
    writes: u32,
    last: Timestamp,
}

impl Edits {
    pub(crate) fn edits(&self) -> MutexGuard<'_, BTreeMap<PodUid, Edit>> {
        self.edits.lock()
    }

    /// Since when this process leads, at the latest.
    pub(crate) fn led_since(&self, now: Timestamp) -> Timestamp {
        *self.led_since.lock().get_or_insert(now)
    }

    /// Notes that it does not lead.
    pub(crate) fn follows(&self) {
        *self.led_since.lock() = None;
    }

    pub(crate) fn written(&self) -> MutexGuard<'_, BTreeMap<PodUid, KnownPlacement>> {
        self.written.lock()
    }

    /// Notes what gpupack is about to write on a pod that is on `node`, or will be.
    pub(crate) fn wrote(
        &self,
        uid: &PodUid,
        node: &NodeName,
        annotations: &BTreeMap<String, String>,
    ) {
        if let Ok(Some(placement)) = decode(annotations, node) {
            let known = KnownPlacement {
                is_own: true,
                ..KnownPlacement::new(WrittenAnnotations::of(annotations), &placement)
            };
            self.written().insert(uid.clone(), known);
        }
    }

    /// Notes that what gpupack was about to write did not arrive, and what was `before`, unless something else
    /// has been noted since.
    pub(crate) fn did_not_write(
        &self,
        uid: &PodUid,
        before: Option<KnownPlacement>,
        annotations: &BTreeMap<String, String>,
    ) {
        let mut written = self.written();
        if written
            .get(uid)
            .is_some_and(|known| known.written == WrittenAnnotations::of(annotations))
        {
            match before {
                Some(before) => drop(written.insert(uid.clone(), before)),
                None => drop(written.remove(uid)),
            }
        }
    }

    /// Forgets what was written on a pod: it is gone, or its Binding failed.
    pub(crate) fn forget(&self, uid: &PodUid) {
        self.written().remove(uid);
    }

    /// For how many pods it is noted what was written on them.
    pub fn written_count(&self) -> usize {
        self.written().len()
    }

    /// Notes that a pod was edited.
    pub(crate) fn note(&self, pod: &PodRef, now: Timestamp) {
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

    /// Notes that a write failed, such as one that another webhook refused.
    pub(crate) fn note_failed(&self, pod: &PodRef, now: Timestamp) {
        self.note(pod, now);
        if let Some(edit) = self.edits().get_mut(&pod.uid) {
            let latest = edit.last.plus(LONGEST_AFTER_FAILURE);
            edit.due = edit.due.map(|due| due.min(latest));
        }
    }

    /// Notes a pod that has other MIG instances now: what is on it is old, however often it was written before.
    pub(crate) fn note_made_again(&self, pod: &PodRef, now: Timestamp) {
        self.note(pod, now);
        if let Some(edit) = self.edits().get_mut(&pod.uid)
            && !mutated(Mutation::MadeAgainLate)
        {
            edit.due = Some(now);
        }
    }

    /// The pods to write now. Each of them then counts as written.
    pub(crate) fn take_due(&self, now: Timestamp) -> Vec<PodRef> {
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

pub(crate) fn pause(writes: u32) -> Duration {
    let doubled = 1_u32.checked_shl(writes.saturating_sub(1)).unwrap_or(u32::MAX);
    FIRST_PAUSE.saturating_mul(doubled).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use crate::shared::edited::{Edits, MAX_EDITED, WRITES_PER_LOOK};
    use engine::ledger::ledger_fixture::{pod, seconds};

    fn due(edits: &Edits, second: u64) -> usize {
        edits.take_due(seconds(second)).len()
    }

    #[test]
    fn repeated_edits_are_reverted_with_growing_pauses() {
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
    fn an_instance_that_was_made_again_is_written_at_once() {
        let edits = Edits::default();
        for second in 0..40 {
            edits.note(&pod("p"), seconds(second));
            due(&edits, second);
        }
        edits.note(&pod("p"), seconds(40));
        assert_eq!(due(&edits, 40), 0, "others edit it all the time");
        edits.note_made_again(&pod("p"), seconds(40));
        edits.note_made_again(&pod("new"), seconds(40));
        assert_eq!(due(&edits, 40), 2);
    }

    #[test]
    fn a_write_that_failed_is_made_again_soon() {
        let edits = Edits::default();
        let mut written = Vec::new();
        edits.note(&pod("p"), seconds(0));
        for second in 0..100 {
            if due(&edits, second) == 1 {
                written.push(second);
                edits.note_failed(&pod("p"), seconds(second));
            }
        }
        assert_eq!(written, [0, 1, 3, 7, 15, 31, 47, 63, 79, 95]);
    }

    #[test]
    fn an_inactive_pod_is_forgotten() {
        let edits = Edits::default();
        edits.note(&pod("p"), seconds(0));
        assert_eq!((due(&edits, 0), due(&edits, 1), edits.count()), (1, 0, 1));
        assert_eq!((due(&edits, 600), edits.count()), (0, 0));
    }

    #[test]
    fn edits_written_per_tick_and_kept_edits_are_bounded() {
        let edits = Edits::default();
        (0..MAX_EDITED + 5).for_each(|at| edits.note(&pod(&format!("{at}")), seconds(0)));
        assert_eq!((due(&edits, 0), edits.count()), (WRITES_PER_LOOK, MAX_EDITED));
    }
}
