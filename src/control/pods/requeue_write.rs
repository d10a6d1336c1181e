//! Writes a requeue: a change of a waiting pod that makes kube-scheduler look at it again.

use std::cmp::Ordering;
use std::sync::Arc;
use std::time::Duration;

use crate::metrics::labels::RequeueResult;
use crate::shared::app::App;
use crate::shared::bind_error::BindError;
use engine::ledger::suggest::waiting::WaitingPod;
use engine::model::event::LedgerEvent;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::request::room_note::RoomNote;
use kube_api::write::outcome::PatchOutcome;
use kube_api::write::target::PodKey;
use wire::ids::NodeName;
use wire::mutation::{Mutation, mutated};

/// Pause after a failed write, before the room is offered again.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Pause after a refusal, before the pod can be requeued again. A webhook of the cluster that was
/// away is back, or a role; a pod that may never be changed costs a write per pause and free room.
const REFUSED_AGAIN_AFTER: Duration = Duration::from_secs(8);

/// How often a requeue is tried on a newer version of a pod that changed at the same time.
const REQUEUE_ATTEMPTS: u32 = 3;

/// Requeues a waiting pod: kube-scheduler looks at it again.
pub(crate) fn requeue(app: &Arc<App>, node: NodeName, pod: WaitingPod) {
    tracing::debug!(pod_uid = %pod.pod.uid, pod = %pod.pod, "requeued: room appeared");
    if mutated(Mutation::RequeueLost) {
        return app.waiting.requeued(&pod.pod.uid, app.clock.now());
    }
    let worker = Arc::clone(app);
    app.outside.spawn(async move {
        let app = worker;
        match write_own(&app, &pod, &Note::None).await {
            // A conflicting write by another client makes kube-scheduler look at the pod, too.
            PatchOutcome::Patched { .. } | PatchOutcome::Conflict => {
                app.waiting.requeued(&pod.pod.uid, app.clock.now());
            }
            PatchOutcome::Gone => {
                app.settle_pod(&pod.pod.uid); // the watch missed it or is late
                app.outbox.nudge();
            }
            PatchOutcome::Refused { code, message } => {
                app.waiting.not_requeuable(&pod.pod.uid, app.clock.now());
                app.metrics.requeued(RequeueResult::Failed);
                app.outbox.nudge();
                tracing::warn!(pod_uid = %pod.pod.uid, code, message, "not allowed to requeue a waiting pod");
                if !app.lead.is_stopping() {
                    app.outside.sleep(REFUSED_AGAIN_AFTER).await;
                    app.waiting.requeuable(&pod.pod.uid);
                    app.outbox.nudge();
                }
            }
            PatchOutcome::Undecided { cause } => {
                tracing::warn!(pod_uid = %pod.pod.uid, %cause, "could not requeue a waiting pod");
                app.metrics.requeued(RequeueResult::Failed);
                if mutated(Mutation::FailedRequeueForgotten) {
                    return app.waiting.not_requeuable(&pod.pod.uid, app.clock.now());
                }
                app.outside.sleep(AGAIN_AFTER).await;
                app.waiting.requeue_failed(&pod.pod.uid);
                app.outbox.push(vec![LedgerEvent::Room(node)]); // the room is still free for a waiting pod
            }
        }
    });
}

/// What is written beside.
#[derive(Debug)]
pub(crate) enum Note {
    None,
    /// Room is being made for the pod.
    Room(RoomNote),
    /// No room is being made for it any more.
    NoRoom,
}

impl Note {
    /// Whether it is still true, where room is kept on this node for the pod.
    fn holds(&self, node: Option<&NodeName>) -> bool {
        match self {
            Self::None => true,
            Self::Room(note) => node == Some(&note.node),
            Self::NoRoom => node.is_none(),
        }
    }

    /// The value of [`HOLD`]; the outer `None` leaves it as it is.
    fn value(&self) -> Option<Option<String>> {
        match self {
            Self::None => None,
            Self::Room(note) => note.value().map(Some),
            Self::NoRoom => Some(None),
        }
    }
}

/// A value that no other requeue of this pod has.
pub(crate) fn requeue_value(app: &App) -> String {
    format!("requeue-{}-{}", app.clock.unix_seconds(), app.clock.now().millis())
}

fn refused(code: u16, message: String) -> PatchOutcome {
    PatchOutcome::Refused { code, message }
}

/// Requeues a waiting pod, but never in a version that another process may own. A process that
/// started later relies on its own write being seen, and this write would hide it.
pub(crate) async fn write_own(app: &App, pod: &WaitingPod, note: &Note) -> PatchOutcome {
    let uid = &pod.pod.uid;
    let key = match PodKey::new(&pod.namespace, &pod.name) {
        Ok(key) => key,
        Err(error) => return refused(400, error.to_string()),
    };
    let Some(mut seen) = app.pods.pending.get(uid).map(|pod| Arc::clone(&pod)) else {
        return PatchOutcome::Gone; // it was bound meanwhile
    };
    let value = requeue_value(app);
    for _ in 0..REQUEUE_ATTEMPTS {
        if app.lead.is_stopping() {
            return refused(503, BindError::Stopping.to_string()); // the next process fences the pod
        }
        if !note.holds(app.room.preemptors.node(uid).as_ref()) {
            return PatchOutcome::Conflict; // another note follows
        }
        let is_later = app.fenced(&seen) == Ordering::Greater;
        if is_later && !mutated(Mutation::RequeueOverFence) {
            return refused(409, BindError::OtherProcess.to_string());
        }
        let version = Some(&*seen.resource_version);
        match app.writer.write_note(&key, uid, version, &value, note.value()).await {
            PatchOutcome::Conflict => {} // the watch is behind
            outcome => return outcome,
        }
        let read = match app.writer.read_back(&key).await {
            Err(cause) => return PatchOutcome::Undecided { cause },
            Ok(read) => read.map(|pod| SeenPod::from_api(&pod)),
        };
        let Some(now) = read.filter(|now| now.pod.uid == *uid) else { return PatchOutcome::Gone };
        if now.node.is_some() {
            app.see_bound(&now);
            return PatchOutcome::Gone;
        }
        seen = Arc::new(now);
    }
    PatchOutcome::Conflict
}
