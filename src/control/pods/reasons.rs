//! Suggestions for the pods that wait, found in the background and kept per different request. A
//! search of every node takes too long for a verb, and for a page that reloads.
//!
//! A kept suggestion is checked again before it is shown. One that no longer helps is left out.

use std::collections::{BTreeMap, BTreeSet};

use crate::pods::wording;
use crate::shared::app::App;
use engine::ledger::suggest::waiting::WaitingState;
use kube_api::write::events::NoticeReason;
use wire::api::waiting::Obstacle;
use wire::ids::PodUid;

/// Pods whose suggestions are kept fresh: those that the page names.
const KEPT_FRESH: usize = 100;

/// Different requests of theirs that are searched for at a time.
const MOST_REQUESTS: usize = 20;

/// The next refused pod to which an event is due that says why it waits.
pub fn next_untold(app: &App) -> Option<PodUid> {
    loop {
        let uid = app.reasons.untold.lock().pop_first()?;
        if app.is_due(&uid, NoticeReason::NoGpuFits) {
            return Some(uid);
        }
    }
}

/// Writes an event to a refused pod why it waits.
pub fn tell(app: &App, uid: &PodUid) {
    if !app.pods.pending.contains_key(uid) {
        return;
    }
    let Some(state) = app.waiting.pod(uid) else { return };
    if state.refused.as_ref().is_none_or(BTreeMap::is_empty) {
        return;
    }
    let (pod, why) = (&state.waiting, app.why_now(&state));
    if why.obstacle == Obstacle::KubeScheduler && is_about_to_go_on(app, &state) {
        return;
    }
    let found = match why.is_helped() {
        true => app.reasons.recent(&app.ledger, pod, app.clock.now()),
        false => Vec::new(),
    };
    let profiles = wording::profiles(&app.ledger);
    // Who reads the event may know nothing of other namespaces.
    let sees = &|namespace: &str| namespace == &*pod.namespace;
    let suggestions = why.suggestions(app, pod, &profiles, found, sees);
    app.tell(&pod.pod, NoticeReason::NoGpuFits, why.sentence(&suggestions));
}

/// Whether kube-scheduler has reason to call for a pod again, or is binding it: there is nothing to report.
fn is_about_to_go_on(app: &App, state: &WaitingState) -> bool {
    let (pod, named) = (&state.waiting, state.named.as_deref());
    app.ledger.reservation(&pod.pod.uid).is_some()
        || app.ledger.fits_in_room_of(&pod.pod.uid, &pod.query, named).is_some()
        || app.ledger.fits_on_named(state)
}

/// Keeps the suggestions of the pods that have waited for longest fresh.
pub fn look_again(app: &App) {
    let waiting = app.waiting.all().into_iter().filter(|state| state.refused.is_some());
    let mut different = BTreeSet::new();
    for WaitingState { waiting: pod, .. } in waiting.take(KEPT_FRESH) {
        let own = (!app.ledger.own_room(&pod.pod.uid).is_empty()).then(|| pod.pod.uid.clone());
        if different.len() < MOST_REQUESTS && different.insert((pod.query.clone(), own)) {
            app.reasons.recent(&app.ledger, &pod, app.clock.now());
        }
    }
}
