//! Restarts pods that use no GPU on another GPU of their node, where they may use more: where a pool says so.
//!
//! The same two writes as for a move home: the annotations, so that a container which starts from then on gets
//! the other device, then the CPU request. After the first one the pod counts on both devices. It may start on the
//! other at any time, and runs at home until then: so a process that stops in between leaves a guest like any other.

use std::sync::Arc;

use crate::control::bind::client_limits::least_at_start;
use crate::control::bind::recall::{
    Known, LOOK_AGAIN, NO_RESTART, Next, Read, Resized, STAY_FOR, TRY_AGAIN, read, resize,
};
use crate::control::shared::app::{App, ClusterTruth, Truth};
use crate::kube_api::pod::seen_pod::SeenPod;
use crate::kube_api::write::events::NoticeReason;
use crate::kube_api::write::outcome::PatchOutcome;
use crate::kube_api::write::target::PodKey;
use crate::ledger::change::spread::Respread;
use crate::metrics::moves::{MoveReason, MoveResult};
use crate::model::reservation::{Move, Reservation, ReservationState};

/// What this task has begun to write.
struct Begun {
    /// The container before, with its CPU request.
    before: Move,
    /// Whether kubelet is to restart it.
    is_ordered: bool,
}

/// Restarts of each node the pod that gains most, each in a task of its own.
pub(crate) fn respread(app: &Arc<App>) {
    let Truth::Cluster(_) = &app.truth else { return }; // the demo plays kubelet
    if !app.leading.is_here() || !app.is_fenced() {
        return;
    }
    for chosen in app.moves.begin_respreads(&app.ledger, app.clock.now()) {
        let worker = Arc::clone(app);
        app.outside.spawn(async move {
            let _ends = Ends { app: &worker, chosen: &chosen };
            carry_out(&worker, &chosen).await;
        });
    }
}

/// Ends a task, also one that panics.
struct Ends<'a> {
    app: &'a App,
    chosen: &'a Respread,
}

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        // Whatever came of it: from now on lists say where it runs.
        self.app.ledger.moved_out(&self.chosen.pod.uid);
        self.app.moves.end_respread(&self.chosen.pod.uid);
    }
}

async fn carry_out(app: &Arc<App>, chosen: &Respread) {
    let Truth::Cluster(cluster) = &app.truth else { return };
    let Ok(key) = PodKey::of(&chosen.pod) else { return };
    let began = app.clock.now();
    if !app.ledger.lend(chosen, began) {
        return;
    }
    let mut begun = None;
    while app.clock.now().since(began) < STAY_FOR && app.leading.is_here() {
        match step(app, cluster, (chosen, &key), &mut begun).await {
            Next::Done => return,
            Next::After(pause) => app.outside.sleep(pause).await,
        }
    }
}

/// The pod as the ledger has it, while it is the guest that this task made of it.
fn still_chosen(app: &App, chosen: &Respread) -> Option<Reservation> {
    let held = app.ledger.reservation(&chosen.pod.uid)?;
    let guest = held.placement.guest.as_ref()?;
    let is_it = guest.on == chosen.to
        && guest.leaving.is_none()
        && held.is_arriving()
        && held.state == ReservationState::Confirmed;
    is_it.then_some(held)
}

async fn step(
    app: &Arc<App>,
    cluster: &ClusterTruth,
    (chosen, key): (&Respread, &PodKey),
    begun: &mut Option<Begun>,
) -> Next {
    let pod = &chosen.pod;
    // Another pod needs the room: what is written, and whether it has started there, is the same to a recall.
    let Some(held) = still_chosen(app, chosen) else { return Next::Done };
    let Read { seen, annotations, pending } = match read(cluster, pod, key).await {
        Ok(read) => read,
        Err(next) => return next,
    };
    let written = seen.placement.as_ref().ok().and_then(Option::as_ref);
    let is_written = written.is_some_and(|written| written.guest == held.placement.guest);
    let (Some(container), Some(guest)) = (&seen.gpu_container, &held.placement.guest) else {
        return give_up(app, chosen, NO_RESTART);
    };
    let known = Known { pod, key, held: &held, guest, annotations: &annotations };
    let Begun { before, is_ordered } = begun.get_or_insert_with(|| {
        let id = container.id.as_str().into();
        Begun { before: Move { container: id, cpu_milli: container.cpu_milli }, is_ordered: false }
    });
    let is_resized = container.cpu_milli != before.cpu_milli;
    if !is_written && !*is_ordered {
        return write(app, cluster, (chosen, &known), &seen, begun).await;
    }
    // Also one that crashed: then it has started elsewhere, too.
    if container.has_left(before) || *container.id != *before.container {
        app.metrics.moved(MoveReason::Respread, MoveResult::Done);
        return Next::Done;
    }
    if !is_resized {
        return match resize(cluster, (pod, key), &seen).await {
            Resized::Accepted => {
                *is_ordered = true;
                app.moves.moved(&pod.uid, app.clock.now());
                tell(app, chosen);
                Next::After(LOOK_AGAIN)
            }
            Resized::Undecided => {
                app.moves.moved(&pod.uid, app.clock.now()); // it may have arrived
                Next::After(TRY_AGAIN)
            }
            Resized::Not(next) => next,
            Resized::Refused(fault) => {
                take_back(app, cluster, (chosen, &known), &seen, &fault).await
            }
        };
    }
    match pending {
        Some(pending) => {
            let fault = format!("kubelet does not carry out its resize: {pending}");
            take_back(app, cluster, (chosen, &known), &seen, &fault).await
        }
        None => Next::After(LOOK_AGAIN),
    }
}

/// The first write: from now on its container starts elsewhere.
async fn write(
    app: &Arc<App>,
    cluster: &ClusterTruth,
    (chosen, known): (&Respread, &Known<'_>),
    seen: &SeenPod,
    begun: &mut Option<Begun>,
) -> Next {
    let uid = &chosen.pod.uid;
    let placement = (&known.held.placement, app.ledger.at_start(uid));
    match known.write(app, cluster, placement, &seen.resource_version).await {
        PatchOutcome::Patched { .. } => Next::After(LOOK_AGAIN),
        PatchOutcome::Gone => Next::Done,
        PatchOutcome::Undecided { .. } => Next::After(TRY_AGAIN),
        PatchOutcome::Conflict => {
            *begun = None;
            Next::After(LOOK_AGAIN)
        }
        PatchOutcome::Refused { code, message } => {
            give_up(app, chosen, &format!("refused with {code}: {message}"))
        }
    }
}

/// Takes back the first write, since the second one has no effect: it stays at home.
async fn take_back(
    app: &Arc<App>,
    cluster: &ClusterTruth,
    (chosen, known): (&Respread, &Known<'_>),
    seen: &SeenPod,
    fault: &str,
) -> Next {
    let home = known.held.placement.at_home();
    let placement = (&home, least_at_start(app, known.held));
    match known.write(app, cluster, placement, &seen.resource_version).await {
        PatchOutcome::Patched { .. } => give_up(app, chosen, fault),
        PatchOutcome::Gone => Next::Done,
        PatchOutcome::Conflict | PatchOutcome::Refused { .. } | PatchOutcome::Undecided { .. } => {
            Next::After(TRY_AGAIN)
        }
    }
}

/// Notes that a pod stays at home, and cannot be moved.
fn give_up(app: &App, chosen: &Respread, fault: &str) -> Next {
    let Respread { pod, home, .. } = chosen;
    app.ledger.stay_home(&pod.uid);
    if app.moves.stick(&pod.uid) {
        app.metrics.moved(MoveReason::Respread, MoveResult::Failed);
        tracing::warn!(pod_uid = %pod.uid, %pod, fault, "a pod cannot be moved to an idle GPU: it stays where it is");
        let note = format!(
            "it cannot be moved to an idle GPU, and stays on {home}: {fault}; check `kubectl describe` of the \
             pod, and that `rbac.moves` of the chart is `true`"
        );
        app.tell(pod, NoticeReason::GpuMoveFailed, note);
    }
    Next::Done
}

fn tell(app: &App, chosen: &Respread) {
    let Respread { pod, node, home, to } = chosen;
    tracing::info!(pod_uid = %pod.uid, %pod, %node, from = %home, %to, "moved to an idle GPU");
    let note = format!(
        "moved from {home}, which it is allocated, to {to} on node {node}, where it may use more: it used no \
         GPU; its container is restarted"
    );
    app.tell(pod, NoticeReason::GpuMoved, note);
}
