//! Suggestions for the pods that wait, kept per different request.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::own_room::OwnRoom;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::suggest::search::Suggestion;
use engine::ledger::suggest::waiting::WaitingPod;
use wire::ids::PodUid;
use wire::units::Timestamp;

/// Suggestions are searched for again after this time: others may be cheaper by then.
pub(crate) const FRESH_FOR: Duration = Duration::from_secs(5);

/// Most different requests that are kept, some kilobytes each; beyond it the oldest goes.
pub(crate) const MOST_KEPT: usize = 500;

/// Most pods that wait for an event why they wait; the others get one at their next refusal.
pub(crate) const MOST_UNTOLD: usize = 10_000;

/// Whose suggestions are kept: pods with this request, or the one of them that has room of its own.
type SuggestionKey = (PlacementRequest, Option<PodUid>);

/// Suggestions by request, and pods that are to get an event.
#[derive(Default)]
pub struct Reasons {
    kept: Mutex<BTreeMap<SuggestionKey, (Timestamp, Vec<Suggestion>)>>,
    pub(crate) untold: Mutex<BTreeSet<PodUid>>,
    pub refused: Notify,
}

impl Reasons {
    /// Notes that every node refused a pod, so that it gets an event with suggestions. Never waits.
    pub fn refused(&self, uid: &PodUid) {
        let mut untold = self.untold.lock();
        if untold.len() < MOST_UNTOLD {
            untold.insert(uid.clone());
            self.refused.notify_one();
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.kept.lock().len() + self.untold.lock().len()
    }

    /// The suggestions kept for a pod, without those that no longer help. `None` if nothing is kept, or
    /// nothing of it helps any more. Looks at one node for each.
    pub fn known(&self, ledger: &Ledger, pod: &WaitingPod) -> Option<Vec<Suggestion>> {
        let (own, key) = room_and_key(ledger, pod);
        self.still_known(ledger, &own, &key)
    }

    fn still_known(
        &self,
        ledger: &Ledger,
        own: &OwnRoom,
        key: &SuggestionKey,
    ) -> Option<Vec<Suggestion>> {
        let mut known = self.kept.lock().get(key)?.1.clone();
        let were = known.len();
        known.retain(|suggestion| ledger.still_helps(&key.0, own, suggestion));
        (were == 0 || !known.is_empty()).then_some(known)
    }

    /// The suggestions for a pod as of now. Looks at every node about ten times.
    pub fn found(&self, ledger: &Ledger, pod: &WaitingPod, now: Timestamp) -> Vec<Suggestion> {
        let (own, key) = room_and_key(ledger, pod);
        self.search(ledger, &own, key, now)
    }

    fn search(
        &self,
        ledger: &Ledger,
        own: &OwnRoom,
        key: SuggestionKey,
        now: Timestamp,
    ) -> Vec<Suggestion> {
        let suggestions = ledger.suggestions(&key.0, own);
        let mut kept = self.kept.lock();
        if kept.len() >= MOST_KEPT && !kept.contains_key(&key) {
            let oldest = kept.iter().min_by_key(|(_, (at, _))| *at).map(|(known, _)| known.clone());
            oldest.and_then(|oldest| kept.remove(&oldest));
        }
        kept.insert(key, (now, suggestions.clone()));
        suggestions
    }

    /// The same, or what was found within `FRESH_FOR` and still helps.
    pub fn recent(&self, ledger: &Ledger, pod: &WaitingPod, now: Timestamp) -> Vec<Suggestion> {
        let (own, key) = room_and_key(ledger, pod);
        let kept_at = self.kept.lock().get(&key).map(|(at, _)| *at);
        let is_fresh = kept_at.is_some_and(|at| now.since(at) < FRESH_FOR);
        let known = if is_fresh { self.still_known(ledger, &own, &key) } else { None };
        known.unwrap_or_else(|| self.search(ledger, &own, key, now))
    }
}

/// The room of a pod, and whose suggestions are its own.
fn room_and_key(ledger: &Ledger, pod: &WaitingPod) -> (OwnRoom, SuggestionKey) {
    let own = ledger.own_room(&pod.pod.uid);
    let uid = (!own.is_empty()).then(|| pod.pod.uid.clone());
    (own, (pod.query.clone(), uid))
}
