//! Suggestions for the pods that wait, found in the background and kept per different request. A
//! search of every node takes too long for a verb, and for a page that reloads.
//!
//! A kept suggestion is checked again before it is shown. One that no longer helps is left out.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::control::pods::wording;
use crate::control::shared::app::App;
use crate::hardware::device::PodUid;
use crate::kube_api::write::events::NoticeReason;
use crate::ledger::query::queries::PlacementRequest;

/// Pause between two looks at the pods that wait the longest.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Pods whose suggestions are kept fresh: those that the page names.
const KEPT_FRESH: usize = 100;

/// Different requests of theirs that are searched for at a time.
const MOST_REQUESTS: usize = 20;

/// Writes events to refused pods why they wait, and keeps the suggestions of the first pods fresh.
pub(crate) async fn explaining(app: &Arc<App>) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = app.reasons.refused.notified() => {}
            _ = looks.tick() => rested(app, look_again).await,
        }
        loop {
            let Some(uid) = app.reasons.untold.lock().pop_first() else { break };
            if app.is_due(&uid, NoticeReason::NoGpuFits) {
                rested(app, move |app| tell(app, &uid)).await;
            }
        }
    }
}

/// Does work off the threads that answer calls, then rests for as long as it took. So it uses half
/// of one core at most.
async fn rested(app: &Arc<App>, work: impl FnOnce(&App) + Send + 'static) {
    let worker = Arc::clone(app);
    let started = app.clock.precise();
    if tokio::task::spawn_blocking(move || work(&worker)).await.is_err() {
        tracing::error!("a bug in the search for suggestions, please report this");
    }
    tokio::time::sleep(app.clock.precise().saturating_sub(started)).await;
}

fn tell(app: &App, uid: &PodUid) {
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
    let suggestions = wording::suggestions(query, &suggestions, rejections.keys().copied(), &sees);
    app.tell(
        &state.waiting.pod,
        NoticeReason::NoGpuFits,
        wording::sentence(&rejections, &suggestions),
    );
}

fn look_again(app: &App) {
    let waiting = app.waiting.all().into_iter().filter(|state| state.refused.is_some());
    let queries = waiting.take(KEPT_FRESH).map(|state| state.waiting.query);
    let different: BTreeSet<PlacementRequest> = queries.collect();
    for query in different.iter().take(MOST_REQUESTS) {
        app.reasons.recent(&app.ledger, query, app.clock.now());
    }
}
