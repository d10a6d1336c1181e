//! Settles a Binding whose outcome is open, for the caller that waits for it and in a background
//! loop. Until then its reservation stays.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;

use crate::shared::app::App;
use crate::shared::bind_error::BindError;
use crate::shared::bind_locks::BindLock;
use engine::model::reservation::{PodRef, Reservation, ReservationState};
use kube_api::pod::seen_pod::SeenPod;
use kube_api::write::outcome::{Fenced, Settled};
use kube_api::write::target::{BindTarget, PodKey};
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};

/// Pause before the API server is called again about an undecided Binding.
const READ_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// A bind stays with its caller at least this long while undecided.
const STAY_FOR: Duration = Duration::from_secs(60);

/// How long it stays with a kube-scheduler that waits so long: never less than that, since an `Error` that
/// arrives marks a bound pod as failed. Then the background loop goes on alone.
fn stay_for(scheduler_timeout: Duration) -> Duration {
    STAY_FOR.max(scheduler_timeout)
}

/// This many Bindings that no caller waits for are settled concurrently.
const SETTLED_AT_ONCE: usize = 16;

/// Finds out whether a Binding bound the pod. On `false` this Binding can no longer succeed.
pub(crate) async fn settle(
    app: &Arc<App>,
    lock: &mut BindLock<'_>,
    target: &BindTarget,
) -> Result<bool, BindError> {
    let started = app.clock.now();
    loop {
        match app.writer.settle(target).await {
            Settled::Bound { .. } => {
                settled_bound(app, lock, target.uid());
                return Ok(true);
            }
            Settled::NotBound => return Ok(false),
            Settled::BoundElsewhere { pod } => {
                see_other_binding(app, &SeenPod::from_api(&pod));
                return Err(taken_back(app, lock, target.uid(), BindError::BoundElsewhere));
            }
            Settled::Gone => {
                ended_undecided(app, lock, target.uid());
                return Err(gone(target.key()));
            }
            Settled::StillUndecided { cause } => {
                tracing::warn!(pod_uid = %target.uid(), %cause, "Binding is still undecided");
                if app.clock.now().since(started) >= stay_for(app.config.scheduler_timeout) {
                    return Err(BindError::Undecided); // the background loop goes on
                }
                app.outside.sleep(READ_AGAIN_AFTER).await;
            }
        }
    }
}

/// Settles Bindings that no caller waits for, and reservations whose bind task has died.
pub async fn settle_abandoned(app: &Arc<App>) {
    if mutated(Mutation::AbandonedUnsettled) {
        return;
    }
    let mut pods: BTreeMap<PodUid, Option<PodRef>> =
        app.ledger.assumed().into_iter().map(|pod| (pod.uid.clone(), Some(pod))).collect();
    for uid in app.binding.binds.abandoned() {
        pods.entry(uid).or_default();
    }
    futures::stream::iter(pods)
        .for_each_concurrent(SETTLED_AT_ONCE, |(uid, assumed)| async move {
            let Some(mut lock) = app.binding.binds.try_take(&uid) else { return }; // it is seen to
            match (lock.on_its_way.clone(), assumed) {
                (Some(target), _) => settle_once(app, &mut lock, &target).await,
                (None, Some(pod)) => settle_dead(app, &mut lock, &pod).await,
                (None, None) => {} // it has been decided meanwhile
            }
        })
        .await;
}

/// Makes one attempt to settle a Binding.
async fn settle_once(app: &App, lock: &mut BindLock<'_>, target: &BindTarget) {
    let uid = target.uid();
    match app.writer.settle(target).await {
        Settled::Bound { .. } => settled_bound(app, lock, uid),
        Settled::BoundElsewhere { pod } => {
            see_other_binding(app, &SeenPod::from_api(&pod));
            taken_back(app, lock, uid, BindError::Undecided);
        }
        Settled::NotBound => {
            taken_back(app, lock, uid, BindError::Undecided);
        }
        Settled::Gone => ended_undecided(app, lock, uid),
        Settled::StillUndecided { .. } => {}
    }
}

/// Settles a reservation whose bind task has died. The pod is fenced: what the task posted, if
/// anything, succeeds before that or never.
async fn settle_dead(app: &App, lock: &mut BindLock<'_>, pod: &PodRef) {
    let is_assumed = |held: &Reservation| matches!(held.state, ReservationState::Assumed { .. });
    let still_assumed = app.ledger.reservation(&pod.uid).is_some_and(|held| is_assumed(&held));
    let Some(key) = PodKey::of(pod).ok().filter(|_| still_assumed) else { return };
    tracing::error!(pod_uid = %pod.uid, %pod, "the bind of this pod has died: checking what it did");
    let value = format!("settle-{}", app.clock.now().millis());
    match app.writer.fence_pod(&key, &pod.uid, None, &value).await {
        Fenced::Bound { pod } => {
            app.see_bound(&pod);
            app.binding.in_flight.ended(&pod.pod.uid, app.clock.now());
        }
        Fenced::Waiting { .. } => {
            taken_back(app, lock, &pod.uid, BindError::Undecided);
        }
        Fenced::Gone => ended_undecided(app, lock, &pod.uid),
        Fenced::Open { .. } => {}
    }
}

pub(crate) fn settled_bound(app: &App, lock: &mut BindLock<'_>, uid: &PodUid) {
    app.ledger.confirm(uid);
    *lock.on_its_way = None;
    app.binding.in_flight.ended(uid, app.clock.now());
}

/// Takes in a pod that another Binding bound. Our annotations were not written.
pub(crate) fn see_other_binding(app: &App, seen: &SeenPod) {
    app.pods.edits.forget(&seen.pod.uid);
    if !mutated(Mutation::OtherBindingUnseen) {
        app.see_bound(seen);
    }
}

pub(crate) fn taken_back(
    app: &App,
    lock: &mut BindLock<'_>,
    uid: &PodUid,
    error: BindError,
) -> BindError {
    app.binding.unseen_binds.remove(uid);
    *lock.on_its_way = None;
    app.binding.in_flight.ended(uid, app.clock.now());
    app.outbox.push(app.ledger.forget(uid));
    let is_bound = |held: Reservation| held.state == ReservationState::Confirmed;
    if !app.ledger.reservation(uid).is_some_and(is_bound) {
        app.pods.edits.forget(uid);
    }
    error
}

/// Notes that a pod is gone whose Binding may have succeeded before. It may have run: its devices
/// are free when its processes are.
fn ended_undecided(app: &App, lock: &mut BindLock<'_>, uid: &PodUid) {
    if !mutated(Mutation::GoneIsUnbound) {
        app.outbox.push(app.ledger.end_pod(uid, app.clock.now()));
    }
    taken_back(app, lock, uid, BindError::Undecided);
}

pub(crate) fn gone(pod: &impl ToString) -> BindError {
    BindError::Gone { pod: pod.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_undecided_bind_stays_longer_than_kube_scheduler_waits() {
        for (waits, stays) in [(10, 60), (60, 60), (120, 120)] {
            assert_eq!(stay_for(Duration::from_secs(waits)), Duration::from_secs(stays));
        }
    }
}
