//! Restarts pods that use no GPU on another GPU of their node, where they may use more: where a pool says so.
//!
//! The same two writes as for a move home: the annotations, so that a container which starts from then on gets
//! the other device, then the CPU request. After the first one the pod counts on both devices. It may start on the
//! other at any time, and runs at home until then: so a process that stops in between leaves a guest like any other.

use std::sync::Arc;
use std::time::Duration;

use crate::control::bind::client_limits::least_at_start;
use crate::control::bind::recall::{
    Known, LOOK_AGAIN, NO_RESTART, Next, Read, Resized, STAY_FOR, TRY_AGAIN, note_stuck, read,
    resize,
};
use crate::control::shared::app::{App, ClusterTruth, Truth};
use crate::hardware::units::Timestamp;
use crate::kube_api::pod::seen_pod::SeenPod;
use crate::kube_api::write::events::NoticeReason;
use crate::kube_api::write::outcome::PatchOutcome;
use crate::kube_api::write::target::PodKey;
use crate::ledger::change::spread::Respread;
use crate::metrics::moves::{MoveReason, MoveResult};
use crate::model::reservation::{Move, Reservation, ReservationState};
use crate::mutation::{Mutation, mutated};

/// After the first write was taken back: how long the status of the pod is watched. A container may have started
/// elsewhere before, of which kubelet tells only then.
const WATCHED_FOR: Duration = Duration::from_secs(5);

/// What this task has begun to write.
struct Begun {
    /// The container before, with its CPU request.
    before: Move,
    /// Whether kubelet is to restart it.
    is_ordered: bool,
    /// When the first write was taken back, and what was refused; `None` if the pod uses its GPU again.
    taken_back: Option<(Timestamp, Option<String>)>,
}

/// A restart that goes on. Ends when it is dropped, also after a panic.
struct Task<'a> {
    app: &'a Arc<App>,
    chosen: &'a Respread,
    /// The version of the pod for which the first write was sent, unless it is known not to have arrived.
    sent: Option<String>,
    begun: Option<Begun>,
}

impl Drop for Task<'_> {
    fn drop(&mut self) {
        let (app, uid) = (self.app, &self.chosen.pod.uid);
        match self.sent.is_none() && app.leading.is_here() {
            true => app.ledger.stay_home(self.chosen), // nothing is written
            // Whatever came of it: from now on lists say where it runs.
            false => app.ledger.moved_out(uid),
        }
        app.moves.end_respread(uid);
    }
}

/// Restarts of each node the pod that gains most, each in a task of its own.
pub(crate) fn respread(app: &Arc<App>) {
    // The demo plays kubelet. And without a Lease nothing says that a later process has begun, which may give the
    // other GPU to another pod meanwhile.
    let has_lease = app.truth.has_replicas() || mutated(Mutation::RestsWithoutLease);
    if !has_lease || !app.leading.is_here() || !app.is_fenced() {
        return;
    }
    for chosen in app.moves.begin_respreads(&app.ledger, app.clock.now()) {
        let worker = Arc::clone(app);
        app.outside.spawn(async move {
            let mut task = Task { app: &worker, chosen: &chosen, sent: None, begun: None };
            carry_out(&mut task).await;
        });
    }
}

async fn carry_out(task: &mut Task<'_>) {
    let Task { app, chosen, .. } = *task;
    let Truth::Cluster(cluster) = &app.truth else { return };
    let Ok(key) = PodKey::of(&chosen.pod) else { return };
    let began = app.clock.now();
    if !app.ledger.lend(chosen, began) {
        return;
    }
    while app.clock.now().since(began) < STAY_FOR && app.leading.is_here() {
        match step(task, cluster, &key).await {
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

async fn step(task: &mut Task<'_>, cluster: &ClusterTruth, key: &PodKey) -> Next {
    let Task { app, chosen, .. } = *task;
    let pod = &chosen.pod;
    // Another pod needs the room: what is written, and whether it has started there, is the same to a recall.
    let Some(held) = still_chosen(app, chosen) else { return Next::Done };
    let Read { seen, annotations, pending } = match read(app, cluster, pod, key).await {
        Ok(read) => read,
        Err(next) => return next,
    };
    if still_chosen(app, chosen).is_none() {
        return Next::Done;
    }
    let written = seen.placement.as_ref().ok().and_then(Option::as_ref);
    let is_written = written.is_some_and(|written| written.guest == held.placement.guest);
    let is_taken_back = task.begun.as_ref().is_some_and(|begun| begun.taken_back.is_some());
    if !is_written && !is_taken_back {
        task.sent.take_if(|version| *version != seen.resource_version); // it did not arrive
    }
    let (Some(container), Some(guest)) = (&seen.gpu_container, &held.placement.guest) else {
        // Once written, it may have started elsewhere.
        return if task.sent.is_some() { Next::Done } else { stay(app, chosen, Some(NO_RESTART)) };
    };
    let known = Known { pod, key, held: &held, guest, annotations: &annotations };
    let begun = task.begun.get_or_insert_with(|| {
        let before =
            Move { container: container.id.as_str().into(), cpu_milli: container.cpu_milli };
        Begun { before, is_ordered: false, taken_back: None }
    });
    let is_same = container.is_running && *container.id == *begun.before.container
        || mutated(Mutation::TakenBackBlindly);
    if let Some((at, fault)) = begun.taken_back.clone() {
        if !is_same {
            return write_again(app, cluster, &known, &seen).await;
        }
        if is_written {
            return take_back(begun, (app, cluster), &known, &seen, fault).await; // it did not arrive
        }
        let is_over =
            app.clock.now().since(at) >= WATCHED_FOR || mutated(Mutation::TakenBackBlindly);
        return if is_over { stay(app, chosen, fault.as_deref()) } else { Next::After(TRY_AGAIN) };
    }
    // Reading it may have taken long.
    let is_at_rest =
        app.ledger.is_at_rest(chosen, app.clock.now()) || mutated(Mutation::RestBelieved);
    if !is_written && !begun.is_ordered {
        // One that may still arrive is written again, then taken back.
        if !is_at_rest && task.sent.is_none() {
            return Next::Done;
        }
        return write(task, cluster, &known, &seen).await;
    }
    // Also one that crashed: then it has started elsewhere, too.
    if container.has_left(&begun.before) || *container.id != *begun.before.container {
        app.metrics.moved(MoveReason::Respread, MoveResult::Done);
        return Next::Done;
    }
    let fault =
        match order(begun, (app, cluster, chosen), &known, &seen, (is_at_rest, pending)).await {
            Ok(next) => return next,
            Err(fault) => fault,
        };
    // One that has ended starts elsewhere.
    if is_same {
        take_back(begun, (app, cluster), &known, &seen, fault).await
    } else {
        Next::After(TRY_AGAIN)
    }
}

/// The first write: from now on its container starts elsewhere.
async fn write(
    task: &mut Task<'_>,
    cluster: &ClusterTruth,
    known: &Known<'_>,
    seen: &SeenPod,
) -> Next {
    let Task { app, chosen, .. } = *task;
    let placement = (&known.held.placement, app.ledger.at_start(&chosen.pod.uid));
    let before = task.sent.replace(seen.resource_version.clone());
    let next = match known.write(app, cluster, placement, &seen.resource_version).await {
        PatchOutcome::Patched { .. } => return Next::After(LOOK_AGAIN),
        PatchOutcome::Undecided { .. } => return Next::After(TRY_AGAIN),
        PatchOutcome::Gone => Next::Done,
        PatchOutcome::Conflict => {
            // An earlier one may have arrived just before, and its container may have started since.
            task.begun.take_if(|_| before.is_none());
            Next::After(LOOK_AGAIN)
        }
        PatchOutcome::Refused { code, message } => {
            stay(app, chosen, Some(&format!("refused with {code}: {message}")))
        }
    };
    task.sent = before;
    next
}

/// The second write, and what kubelet makes of it: it restarts the container. An error if that is not to be any
/// more: what is refused, or `None` if the pod uses its GPU again.
async fn order(
    begun: &mut Begun,
    (app, cluster, chosen): (&Arc<App>, &ClusterTruth, &Respread),
    known: &Known<'_>,
    seen: &SeenPod,
    (is_at_rest, pending): (bool, Option<String>),
) -> Result<Next, Option<String>> {
    let is_resized =
        seen.gpu_container.as_ref().map(|it| it.cpu_milli) != Some(begun.before.cpu_milli);
    match pending {
        Some(pending) if is_resized => {
            return Err(Some(format!("kubelet does not carry out its resize: {pending}")));
        }
        None if is_resized => return Ok(Next::After(LOOK_AGAIN)),
        _ if !is_at_rest => return Err(None),
        _ => {}
    }
    let next = match resize(cluster, (known.pod, known.key), seen).await {
        Resized::Accepted => {
            begun.is_ordered = true;
            tell(app, chosen);
            LOOK_AGAIN
        }
        Resized::Undecided => TRY_AGAIN, // it may have arrived
        Resized::Not(next) => return Ok(next),
        Resized::Refused(fault) => return Err(Some(fault)),
    };
    app.moves.moved(&known.pod.uid, app.clock.now());
    Ok(Next::After(next))
}

/// Takes back the first write, since the second one has no effect, or is not to be made any more: it stays at home.
async fn take_back(
    begun: &mut Begun,
    (app, cluster): (&Arc<App>, &ClusterTruth),
    known: &Known<'_>,
    seen: &SeenPod,
    fault: Option<String>,
) -> Next {
    let home = known.held.placement.at_home();
    let placement = (&home, least_at_start(app, known.held));
    match known.write(app, cluster, placement, &seen.resource_version).await {
        // One without an answer may have arrived.
        PatchOutcome::Patched { .. } | PatchOutcome::Undecided { .. } => {
            begun.taken_back = Some((app.clock.now(), fault));
            Next::After(TRY_AGAIN)
        }
        PatchOutcome::Gone => Next::Done,
        PatchOutcome::Conflict | PatchOutcome::Refused { .. } => Next::After(TRY_AGAIN),
    }
}

/// Writes once more that it is a guest: it may have started elsewhere before that was taken back.
async fn write_again(
    app: &Arc<App>,
    cluster: &ClusterTruth,
    known: &Known<'_>,
    seen: &SeenPod,
) -> Next {
    let placement = (&known.held.placement, app.ledger.at_start(&known.pod.uid));
    match known.write(app, cluster, placement, &seen.resource_version).await {
        PatchOutcome::Patched { .. } | PatchOutcome::Gone => Next::Done,
        PatchOutcome::Conflict | PatchOutcome::Refused { .. } | PatchOutcome::Undecided { .. } => {
            Next::After(TRY_AGAIN)
        }
    }
}

/// Notes that a pod stays at home, and with a fault that it cannot be moved.
fn stay(app: &App, chosen: &Respread, fault: Option<&str>) -> Next {
    let Respread { pod, home, .. } = chosen;
    app.ledger.stay_home(chosen);
    if let Some(fault) = fault {
        let what = format!("it cannot be moved to an idle GPU, and stays on {home}");
        note_stuck(app, pod, MoveReason::Respread, &what, fault);
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
