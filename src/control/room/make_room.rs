//! Evicts pods for a more important one: dry runs first, then a note on the pod, then the evictions.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};

use crate::metrics::guard::{EvictionReason, EvictionResult};
use crate::pods::requeue_write::{Note, requeue_value, write_own};
use crate::room::standing::RoomOrder;
use crate::shared::app::App;
use engine::ledger::suggest::preemptors::Ended;
use engine::ledger::suggest::waiting::WaitingPod;
use engine::model::reservation::PodRef;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::request::room_note::RoomNote;
use kube_api::write::events::NoticeReason;
use kube_api::write::evict::{EvictOutcome, EvictionRun};
use kube_api::write::outcome::{Cause, PatchOutcome};
use kube_api::write::target::PodKey;
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// Victims that are asked to go side by side.
const AT_ONCE: usize = 16;

/// Pause before evictions that a budget forbids are tried again, once others have gone.
const BLOCKED_PAUSE: Duration = Duration::from_secs(10);

/// Pause between two looks at a room on which this one relies.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// How often budgets may forbid an eviction once others have gone. One budget may have allowed each of
/// two evictions alone.
const MOST_REFUSALS: u32 = 4;

/// Pause before evictions are tried again whose outcome is not known.
const OPEN_PAUSE: Duration = Duration::from_secs(1);

/// Pause before a note about room is tried again; each one is twice as long as the one before, up to the
/// second. A pod that may never be changed costs a write per pause.
const NOTE_AGAIN_AFTER: Duration = Duration::from_secs(1);
const LONGEST_NOTE_PAUSE: Duration = Duration::from_secs(60);

/// The last pause before kube-scheduler is made to call again, if a write got no clear answer.
const LAST_CALL_PAUSE: Duration = Duration::from_secs(4);

/// Evicts what the order names, in a task of its own.
pub(crate) fn make_room(app: &Arc<App>, order: RoomOrder) {
    let worker = Arc::clone(app);
    app.outside.spawn(async move {
        let uid = order.pod.pod.uid.clone();
        if let Some(ended) = evict_all(&worker, &order).await {
            worker.room.preemptors.ended(&uid, order.number, ended);
            worker.room.new_rooms.look();
        }
    });
}

/// Writes a note on a waiting pod, in a task of its own. kube-scheduler looks at the pod again. A note about
/// room is tried until it is written or another one is to be: with a wrong one, a later process would go on with
/// room that this one no longer keeps.
pub(crate) fn write_note(app: &Arc<App>, pod: WaitingPod, note: Note) {
    let number = match note {
        Note::None => None,
        Note::Room(_) | Note::NoRoom => Some(app.room.preemptors.owe_note(&pod.pod.uid)),
    };
    let worker = Arc::clone(app);
    app.outside.spawn(async move {
        let (uid, mut pause) = (&pod.pod.uid, NOTE_AGAIN_AFTER);
        loop {
            let outcome = write_own(&worker, &pod, &note).await;
            tracing::debug!(pod_uid = %uid, ?note, ?outcome, "a note on a waiting pod");
            let Some(number) = number else {
                // The next step does not call for the pod again before the call was to come.
                let is_lost = matches!(outcome, PatchOutcome::Undecided { .. });
                let is_over = worker.lead.is_stopping() || !worker.waiting.has(uid);
                if !is_lost || pause > LAST_CALL_PAUSE || is_over {
                    return;
                }
                worker.outside.sleep(pause).await;
                pause *= 2;
                continue;
            };
            if matches!(outcome, PatchOutcome::Patched { .. } | PatchOutcome::Gone) {
                return worker.room.preemptors.note_written(uid, number);
            }
            worker.outside.sleep(pause).await;
            pause = (2 * pause).min(LONGEST_NOTE_PAUSE);
            if worker.lead.is_stopping() || !worker.room.preemptors.owes_note(uid, number) {
                return;
            }
        }
    });
}

/// Makes kube-scheduler look at a pod without a GPU again.
pub(crate) fn wake(app: &Arc<App>, pod: PodRef) {
    let worker = Arc::clone(app);
    app.outside.spawn(async move {
        let Ok(key) = PodKey::of(&pod) else { return };
        let value = requeue_value(&worker);
        let Ok(Some(read)) = worker.writer.read_back(&key).await else { return };
        let seen = SeenPod::from_api(&read);
        // The fence of a later process stays.
        let is_own = worker.writer.fenced(seen.fence) != Ordering::Greater;
        if seen.pod.uid != pod.uid || seen.node.is_some() || !is_own {
            return;
        }
        let version = Some(&*seen.resource_version);
        let outcome = worker.writer.write_fence(&key, &pod.uid, version, &value).await;
        tracing::debug!(pod_uid = %pod.uid, ?outcome, "nothing of its node is kept any more");
    });
}

/// Writes the note of a room on its pod. The error is how the room ends; `None` if the pod is gone, which the
/// loop sees.
async fn write_room(app: &App, order: &RoomOrder) -> Result<(), Option<Ended>> {
    let uid = &order.pod.pod.uid;
    let victims = order.victims.iter().map(|victim| victim.uid.clone()).collect();
    let note = RoomNote { node: order.node.clone(), victims };
    // From now on it may arrive, also without an answer.
    let was_noted = app.room.preemptors.note(uid, order.number, true);
    match write_own(app, &order.pod, &Note::Room(note)).await {
        PatchOutcome::Patched { .. } => Ok(()),
        PatchOutcome::Gone => Err(None),
        outcome => {
            let is_open = matches!(outcome, PatchOutcome::Undecided { .. });
            app.room.preemptors.note(uid, order.number, was_noted || is_open);
            tracing::warn!(pod_uid = %uid, ?outcome, "no pod is evicted for it: it cannot be written");
            Err(Some(Ended::Failed))
        }
    }
}

/// Waits until the pods of the rooms on which this one relies were asked to go. Whether they were.
async fn others_were_asked(app: &App, order: &RoomOrder) -> bool {
    for (other, number) in &order.after {
        while !app.room.preemptors.was_asked(other, *number).unwrap_or(true) {
            app.outside.sleep(LOOK_AGAIN).await;
        }
        if app.room.preemptors.was_asked(other, *number).is_none() {
            return false;
        }
    }
    true
}

/// Evicts all victims. `None` once all were asked to go, or if that is no longer wanted.
async fn evict_all(app: &App, order: &RoomOrder) -> Option<Ended> {
    let (uid, began) = (&order.pod.pod.uid, app.clock.now());
    if !others_were_asked(app, order).await {
        return Some(Ended::Again);
    }
    if !order.is_begun {
        if let Some(ended) = try_all(app, order).await {
            return Some(ended);
        }
        if let Err(ended) = write_room(app, order).await {
            return ended;
        }
        // None goes in vain, and no other room relies on what these leave.
        let kept = kept_by_teams(app, order);
        if !kept.is_empty() {
            return Some(Ended::Protected(kept));
        }
        tell_preemptor(app, order);
    }
    let mut left: Vec<&PodRef> = order.victims.iter().collect();
    let mut is_any_gone = order.is_begun;
    let mut refusals = 0;
    while app.room.preemptors.ask(uid, order.number) && app.lead.leading.is_here() {
        let (mut blocked, mut open) = (Vec::new(), Vec::new());
        let kept = kept_by_teams(app, order);
        let (stays, goes): (Vec<_>, Vec<_>) =
            std::mem::take(&mut left).into_iter().partition(|victim| kept.contains(&victim.uid));
        blocked.extend(stays);
        let ask = |victim: &'_ &PodRef| ask_to_go(app, (*victim).clone(), (order, began));
        let asked: Vec<_> = goes.iter().map(ask).collect();
        let asked: Vec<Asked> = stream::iter(asked).buffered(AT_ONCE).collect().await;
        for (victim, asked) in goes.into_iter().zip(asked) {
            match asked {
                Asked::Unwanted => return None,
                Asked::Replaced => return Some(Ended::Failed),
                Asked::Unread => open.push(victim),
                Asked::Answered(EvictOutcome::Evicted | EvictOutcome::Gone) => is_any_gone = true,
                Asked::Answered(EvictOutcome::Undecided { .. }) => {
                    is_any_gone = true; // perhaps
                    open.push(victim);
                }
                Asked::Answered(EvictOutcome::Blocked { .. } | EvictOutcome::Refused { .. }) => {
                    blocked.push(victim);
                }
            }
        }
        refusals += u32::from(!blocked.is_empty());
        let protected = || blocked.iter().map(|victim| victim.uid.clone()).collect();
        if !is_any_gone && open.is_empty() {
            return Some(Ended::Protected(protected()));
        }
        if refusals >= MOST_REFUSALS {
            return Some(Ended::Partly(protected()));
        }
        let pause = if open.is_empty() { BLOCKED_PAUSE } else { OPEN_PAUSE };
        left = open.into_iter().chain(blocked).collect();
        if left.is_empty() {
            return None;
        }
        app.outside.sleep(pause).await;
    }
    None
}

/// What became of the request that a victim goes.
enum Asked {
    /// It was not sent: the room is not wanted any more.
    Unwanted,
    /// Nor then: a later process has bound the pod or written on it.
    Replaced,
    /// Nor then: it is not known whether one has.
    Unread,
    Answered(EvictOutcome),
}

/// Asks a victim to go, if that is still wanted.
async fn ask_to_go(app: &App, victim: PodRef, (order, began): (&RoomOrder, Timestamp)) -> Asked {
    if !app.room.preemptors.is_making(&order.pod.pod.uid, order.number) {
        return Asked::Unwanted;
    }
    match is_replaced(app, order, began).await {
        Some(true) => Asked::Replaced,
        Some(false) => Asked::Answered(evict(app, &victim, order).await),
        None => Asked::Unread,
    }
}

/// Whether this process was frozen since it `began` with a room, and a later one has bound the pod or written on it
/// meanwhile: that one has not seen who is to go now, and may have others go. A Lease would have ended. `None` if the pod
/// cannot be read.
async fn is_replaced(app: &App, order: &RoomOrder, began: Timestamp) -> Option<bool> {
    let resumed = app.lead.pulse.resumed(app.clock.now());
    if resumed.is_none_or(|resumed| resumed < began) || mutated(Mutation::FrozenEvicts) {
        return Some(false);
    }
    let Ok(key) = PodKey::of(&order.pod.pod) else { return Some(true) };
    let read = app.writer.read_back(&key).await.ok()?;
    let Some(seen) = read.map(|pod| SeenPod::from_api(&pod)) else { return Some(true) };
    let is_bound = seen.node.is_some();
    if is_bound {
        app.see_bound(&seen);
    }
    let is_other = seen.pod.uid != order.pod.pod.uid;
    Some(is_bound || is_other || app.fenced(&seen) == Ordering::Greater)
}

/// The victims that were to go only because they are over the quota of their team, and may not go now: the
/// teams may have more or less than they had when this was decided.
fn kept_by_teams(app: &App, order: &RoomOrder) -> BTreeSet<PodUid> {
    if order.owed.is_empty() {
        return BTreeSet::new();
    }
    let is_guaranteed = app.ledger.team_pod(&order.pod).is_guaranteed;
    let over = app.ledger.teams.over_quota();
    let is_kept =
        |uid: &&PodUid| app.ledger.has_pod(uid) && !(is_guaranteed && over.pods.contains(*uid));
    order.owed.iter().filter(is_kept).cloned().collect()
}

/// Dry runs: nothing is evicted unless each victim may be.
async fn try_all(app: &App, order: &RoomOrder) -> Option<Ended> {
    let mut protected: BTreeSet<PodUid> = BTreeSet::new();
    let tried: Vec<_> = order.victims.iter().map(|victim| try_one(app, victim.clone())).collect();
    let tried: Vec<Option<EvictOutcome>> = stream::iter(tried).buffered(AT_ONCE).collect().await;
    for (victim, outcome) in order.victims.iter().zip(tried) {
        let Some(outcome) = outcome else {
            protected.insert(victim.uid.clone()); // no such name exists
            continue;
        };
        match outcome {
            EvictOutcome::Evicted | EvictOutcome::Gone => {}
            // It has several budgets: the API server evicts no such pod, and answers 500.
            EvictOutcome::Undecided { cause: Cause::Status { code: 500, message } }
            | EvictOutcome::Blocked { message } => {
                tracing::info!(pod_uid = %victim.uid, pod = %victim, message, "not evicted: protected by a budget");
                app.metrics.evicted(EvictionReason::Preemption, EvictionResult::Blocked);
                protected.insert(victim.uid.clone());
            }
            EvictOutcome::Refused { code, message } => {
                tracing::error!(
                    code,
                    message,
                    "no pod is evicted for more important ones: apply deploy/evict.yaml, or set `preemption.enabled: false`"
                );
                app.metrics.evicted(EvictionReason::Preemption, EvictionResult::Failed);
                return Some(Ended::Denied);
            }
            EvictOutcome::Undecided { cause } => {
                tracing::warn!(pod_uid = %victim.uid, pod = %victim, %cause, "not evicted: the dry run has no outcome");
                app.metrics.evicted(EvictionReason::Preemption, EvictionResult::Failed);
                return Some(Ended::Failed);
            }
        }
    }
    (!protected.is_empty()).then_some(Ended::Protected(protected))
}

/// A dry run of one eviction; `None` for a pod that cannot exist.
async fn try_one(app: &App, victim: PodRef) -> Option<EvictOutcome> {
    let key = PodKey::of(&victim).ok()?;
    Some(app.writer.evict(&key, &victim.uid, EvictionRun::Dry).await)
}

/// Evicts one victim, and says so.
async fn evict(app: &App, victim: &PodRef, order: &RoomOrder) -> EvictOutcome {
    let Ok(key) = PodKey::of(victim) else { return EvictOutcome::Gone };
    let outcome = app.writer.evict(&key, &victim.uid, EvictionRun::Real).await;
    let (pod, node) = (&order.pod.pod, &order.node);
    let result = match &outcome {
        EvictOutcome::Evicted => {
            tracing::info!(pod_uid = %victim.uid, %victim, %node, preemptor = %pod, "evicted for another pod");
            let note = match order.owed.contains(&victim.uid) {
                true => format!(
                    "evicted from node {node}: its team has more GPUs than are guaranteed to it, and another \
                     team needs what is guaranteed"
                ),
                false => format!(
                    "evicted from node {node}: a pod of priority {} needs its GPU room",
                    order.pod.priority
                ),
            };
            app.tell(victim, NoticeReason::GpuPreempted, note);
            EvictionResult::Evicted
        }
        EvictOutcome::Gone => EvictionResult::Gone,
        EvictOutcome::Blocked { message } => {
            tracing::info!(pod_uid = %victim.uid, %victim, message, "protected by a budget now: tried again");
            EvictionResult::Blocked
        }
        EvictOutcome::Refused { code, message } => {
            tracing::error!(pod_uid = %victim.uid, %victim, code, message, "may not evict a pod: tried again");
            EvictionResult::Failed
        }
        EvictOutcome::Undecided { cause } => {
            tracing::warn!(pod_uid = %victim.uid, %victim, %cause, "the outcome of an eviction is not known: tried again");
            EvictionResult::Failed
        }
    };
    app.metrics.evicted(EvictionReason::Preemption, result);
    outcome
}

fn tell_preemptor(app: &App, RoomOrder { pod, node, victims, owed, .. }: &RoomOrder) {
    let what = if owed.is_empty() { "less important" } else { "over-quota" };
    let note = match victims.len() {
        1 => format!("1 {what} pod is evicted from node {node} for it"),
        count => format!("{count} {what} pods are evicted from node {node} for it"),
    };
    app.tell(&pod.pod, NoticeReason::GpuRoomMade, note);
}
