//! Suggestions for the pods that wait, found in the background and kept per different request. A
//! search of every node takes too long for a verb, and for a page that reloads.
//!
//! A kept suggestion is checked again before it is shown. One that no longer helps is left out.

use std::collections::BTreeSet;

use crate::control::pods::wording;
use crate::control::shared::app::App;
use crate::hardware::device::PodUid;
use crate::kube_api::write::events::NoticeReason;
use crate::ledger::query::queries::PlacementRequest;

/// Pods whose suggestions are kept fresh: those that the page names.
const KEPT_FRESH: usize = 100;

/// Different requests of theirs that are searched for at a time.
const MOST_REQUESTS: usize = 20;

/// The next refused pod to which an event is due that says why it waits.
pub(crate) fn next_untold(app: &App) -> Option<PodUid> {
    loop {
        let uid = app.reasons.untold.lock().pop_first()?;
        if app.is_due(&uid, NoticeReason::NoGpuFits) {
            return Some(uid);
        }
    }
}

/// Writes an event to a refused pod why it waits.
pub(crate) fn tell(app: &App, uid: &PodUid) {
    if !app.pending.contains_key(uid) {
        return;
    }
    let Some(state) = app.waiting.pod(uid) else { return };
    let Some(rejections) = state.refused.filter(|rejections| !rejections.is_empty()) else {
        return;
    };
    let query = &state.waiting.query;
    let mut suggestions = app.reasons.recent(&app.ledger, query, app.clock.now());
    suggestions.retain(|it| app.may_do(&state.waiting.namespace, it));
    // Who reads the event may know nothing of other namespaces.
    let sees = |namespace: &str| namespace == &*state.waiting.namespace;
    let profiles = wording::profiles(&app.ledger);
    let found = (&profiles, &suggestions[..]);
    let suggestions = wording::suggestions(query, found, rejections.keys().copied(), &sees);
    app.tell(
        &state.waiting.pod,
        NoticeReason::NoGpuFits,
        wording::sentence(&rejections, &suggestions),
    );
}

/// Keeps the suggestions of the pods that have waited for longest fresh.
pub(crate) fn look_again(app: &App) {
    let waiting = app.waiting.all().into_iter().filter(|state| state.refused.is_some());
    let queries = waiting.take(KEPT_FRESH).map(|state| state.waiting.query);
    let different: BTreeSet<PlacementRequest> = queries.collect();
    for query in different.iter().take(MOST_REQUESTS) {
        app.reasons.recent(&app.ledger, query, app.clock.now());
    }
}
