//! Suggestions for the pods that wait, kept per different request.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::hardware::device::PodUid;
use crate::hardware::units::Timestamp;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::suggest::search::Suggestion;

/// Suggestions are searched for again after this time: others may be cheaper by then.
pub(crate) const FRESH_FOR: Duration = Duration::from_secs(5);

/// Most different requests that are kept, some kilobytes each; beyond it the oldest goes.
pub(crate) const MOST_KEPT: usize = 500;

/// Most pods that wait for an event why they wait; the others get one at their next refusal.
pub(crate) const MOST_UNTOLD: usize = 10_000;

/// Suggestions by request, and pods that are to get an event.
#[derive(Default)]
pub struct Reasons {
    kept: Mutex<BTreeMap<PlacementRequest, (Timestamp, Vec<Suggestion>)>>,
    pub(crate) untold: Mutex<BTreeSet<PodUid>>,
    pub(crate) refused: Notify,
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

    /// The suggestions kept for a request, without those that no longer help. `None` if nothing is
    /// kept, or nothing of it helps any more. Looks at one node for each.
    pub fn known(&self, ledger: &Ledger, query: &PlacementRequest) -> Option<Vec<Suggestion>> {
        let mut known = self.kept.lock().get(query)?.1.clone();
        let were = known.len();
        known.retain(|suggestion| ledger.still_helps(query, suggestion));
        (were == 0 || !known.is_empty()).then_some(known)
    }

    /// The suggestions for a request as of now. Looks at every node about ten times.
    pub fn found(
        &self,
        ledger: &Ledger,
        query: &PlacementRequest,
        now: Timestamp,
    ) -> Vec<Suggestion> {
        let suggestions = ledger.suggestions(query);
        let mut kept = self.kept.lock();
        if kept.len() >= MOST_KEPT && !kept.contains_key(query) {
            let oldest = kept.iter().min_by_key(|(_, (at, _))| *at).map(|(known, _)| known.clone());
            oldest.and_then(|oldest| kept.remove(&oldest));
        }
        kept.insert(query.clone(), (now, suggestions.clone()));
        suggestions
    }

    /// The same, or what was found within `FRESH_FOR` and still helps.
    pub fn recent(
        &self,
        ledger: &Ledger,
        query: &PlacementRequest,
        now: Timestamp,
    ) -> Vec<Suggestion> {
        let is_fresh = |at: Timestamp| now.since(at) < FRESH_FOR;
        let is_fresh = self.kept.lock().get(query).is_some_and(|(at, _)| is_fresh(*at));
        let known = if is_fresh { self.known(ledger, query) } else { None };
        known.unwrap_or_else(|| self.found(ledger, query, now))
    }
}
