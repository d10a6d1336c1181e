//! What would help the pods that wait, found in the background and kept per different request: looking
//! at every node takes too long for a verb, and for a page that asks again and again.
//!
//! What is kept is looked at again before it is told: a remedy that no longer helps is left out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::app::App;
use super::mends;
use crate::cluster::events::NoticeReason;
use crate::ledger::books::Ledger;
use crate::ledger::questions::Question;
use crate::ledger::remedies::Remedy;
use crate::packing::device::PodUid;
use crate::packing::units::Timestamp;

/// What was found is looked for anew after this time: other remedies may be cheaper by then.
const FRESH_FOR: Duration = Duration::from_secs(5);

/// Different requests that are kept, some kilobytes each; beyond it the oldest goes.
const MOST_KEPT: usize = 500;

/// Pods that wait to be told why; beyond it others hear at their next refusal.
const MOST_UNTOLD: usize = 10_000;

/// Pause between two looks at the pods that wait the longest.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Pods whose remedies are kept fresh: those that the page names.
const KEPT_FRESH: usize = 100;

/// Different requests of theirs that are looked into in one go.
const MOST_REQUESTS: usize = 20;

/// Remedies by request, and pods that are to be told.
#[derive(Default)]
pub struct Reasons {
    kept: Mutex<BTreeMap<Question, (Timestamp, Vec<Remedy>)>>,
    pub(super) untold: Mutex<BTreeSet<PodUid>>,
    pub(super) refused: Notify,
}

impl Reasons {
    /// Notes that a pod was refused everywhere, so that it is told why and what would help. Never waits.
    pub fn refused(&self, uid: &PodUid) {
        let mut untold = locked(&self.untold);
        if untold.len() < MOST_UNTOLD {
            untold.insert(uid.clone());
            self.refused.notify_one();
        }
    }

    /// How many requests and pods are kept.
    pub(super) fn count(&self) -> usize {
        locked(&self.kept).len() + locked(&self.untold).len()
    }

    /// The remedies that are kept of a request, without those that no longer help; none where nothing is
    /// kept, or nothing of it helps any more. Looks at one node for each.
    pub fn known(&self, ledger: &Ledger, question: &Question) -> Option<Vec<Remedy>> {
        let mut known = locked(&self.kept).get(question)?.1.clone();
        let were = known.len();
        known.retain(|remedy| ledger.still_helps(question, remedy));
        (were == 0 || !known.is_empty()).then_some(known)
    }

    /// The remedies for a request as they are now. Looks at every node some ten times.
    pub fn found(&self, ledger: &Ledger, question: &Question, now: Timestamp) -> Vec<Remedy> {
        let remedies = ledger.remedies(question);
        let mut kept = locked(&self.kept);
        if kept.len() >= MOST_KEPT && !kept.contains_key(question) {
            let oldest = kept.iter().min_by_key(|(_, (at, _))| *at).map(|(known, _)| known.clone());
            oldest.and_then(|oldest| kept.remove(&oldest));
        }
        kept.insert(question.clone(), (now, remedies.clone()));
        remedies
    }

    /// The same, or what was found a moment ago and still helps.
    pub fn recent(&self, ledger: &Ledger, question: &Question, now: Timestamp) -> Vec<Remedy> {
        let is_fresh = |at: Timestamp| now.since(at) < FRESH_FOR;
        let is_fresh = locked(&self.kept).get(question).is_some_and(|(at, _)| is_fresh(*at));
        let known = if is_fresh { self.known(ledger, question) } else { None };
        known.unwrap_or_else(|| self.found(ledger, question, now))
    }
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells refused pods why they wait, and keeps the remedies of the first of them fresh.
pub(super) async fn explaining(app: &Arc<App>) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = app.reasons.refused.notified() => {}
            _ = looks.tick() => rested(app, look_again).await,
        }
        loop {
            let Some(uid) = locked(&app.reasons.untold).pop_first() else { break };
            if app.is_to_be_told(&uid, NoticeReason::NoGpuFits) {
                rested(app, move |app| tell(app, &uid)).await;
            }
        }
    }
}

/// Does work off the threads that answer questions, and rests for as long as it took: one half of one
/// core at most.
async fn rested(app: &Arc<App>, work: impl FnOnce(&App) + Send + 'static) {
    let worker = Arc::clone(app);
    let started = app.clock.precise();
    if tokio::task::spawn_blocking(move || work(&worker)).await.is_err() {
        tracing::error!("a fault while looking for what would help a pod, please report this");
    }
    tokio::time::sleep(app.clock.precise().saturating_sub(started)).await;
}

fn tell(app: &App, uid: &PodUid) {
    if !app.pending.contains_key(uid) {
        return;
    }
    let Some(state) = app.waiting.pod(uid) else { return };
    let Some(misfits) = state.refused.filter(|misfits| !misfits.is_empty()) else { return };
    let question = &state.waiting.question;
    let remedies = app.reasons.recent(&app.ledger, question, app.clock.now());
    let mends = mends::mends(question, &remedies, misfits.keys().copied());
    app.tell(&state.waiting.pod, NoticeReason::NoGpuFits, mends::sentence(&misfits, &mends));
}

fn look_again(app: &App) {
    let waiting = app.waiting.all().into_iter().filter(|state| state.refused.is_some());
    let questions = waiting.take(KEPT_FRESH).map(|state| state.waiting.question);
    let different: BTreeSet<Question> = questions.collect();
    for question in different.iter().take(MOST_REQUESTS) {
        app.reasons.recent(&app.ledger, question, app.clock.now());
    }
}
