//! Restarts pods on other MIG instances of their node, where a pool says so, so that a pod that waits fits.
//!
//! The other instance is made first. Then the same two writes as for a move home: the annotations, so that a container
//! which starts from then on gets the other device, then the CPU request. After the first one the pod counts on both
//! devices. It may start on the other at any time, and runs at home until then.
//!
//! Once the pod runs there alone, a third write allocates it that one, and the agent removes its old one. A pod whose
//! move a later process finds unfinished is called home.

use std::sync::Arc;
use std::time::Duration;

use crate::control::bind::client_limits::least_at_start;
use crate::control::bind::recall::{
    Known, LOOK_AGAIN, NO_RESTART, Next, Read, Resized, TRY_AGAIN, note_stuck, read, resize, settle,
};
use crate::control::shared::app::{App, ClusterTruth, Truth};
use crate::hardware::units::Timestamp;
use crate::kube_api::pod::seen_pod::SeenPod;
use crate::kube_api::write::events::NoticeReason;
use crate::kube_api::write::outcome::PatchOutcome;
use crate::kube_api::write::target::PodKey;
use crate::ledger::suggest::making_way::{MakingWay, OtherInstance};
use crate::metrics::moves::MoveReason;
use crate::model::reservation::{Departure, Move, Placement, Reservation, ReservationState};

/// After the first write was taken back: how long the status of the pod is watched. A container may have started
/// elsewhere before, of which kubelet tells only then.
const WATCHED_FOR: Duration = Duration::from_secs(5);

/// How long the agent may take to make another MIG instance. It may have to wait for an earlier one to go.
const MADE_WITHIN: Duration = Duration::from_secs(20);

/// How long a task stays with a move, longer than a container may take to end and the next one to start: another task
/// would call the pod home.
const STAY_FOR: Duration = Duration::from_secs(300);

/// What this task has begun to write.
struct Begun {
    /// The container before, with its CPU request.
    before: Move,
    /// Whether kubelet is to restart it.
    is_ordered: bool,
    /// When the first write was taken back, and what was refused; `None` if no pod waits for it any more.
    taken_back: Option<(Timestamp, Option<String>)>,
}

/// A move that goes on. Ends when it is dropped, also after a panic.
struct Task<'a> {
    app: &'a Arc<App>,
    way: &'a MakingWay,
    /// The version of the pod for which the first write was sent, unless it is known not to have arrived.
    sent: Option<String>,
    begun: Option<Begun>,
}

impl Drop for Task<'_> {
    fn drop(&mut self) {
        let (app, uid) = (self.app, &self.way.pod.uid);
        match self.sent.is_none() && app.leading.is_here() {
            // Nothing is written.
            true => app.outbox.push(app.ledger.stay_home(self.way)),
            // Whatever came of it: from now on lists say where it runs.
            false => app.ledger.moved_out(uid),
        }
        app.moves.end_change(uid);
    }
}

/// Moves pods to other MIG instances so that waiting ones fit, each in a task of its own.
pub(crate) async fn make_way(app: &Arc<App>) {
    if !may_move(app) {
        return;
    }
    let worker = Arc::clone(app);
    let choose = move || {
        let unix_seconds = i64::try_from(worker.api_seconds()).unwrap_or(i64::MAX);
        let times = (worker.clock.now(), unix_seconds);
        worker.moves.begin_making_way(&worker.ledger, &worker.waiting, times)
    };
    match app.outside.work(choose).await {
        Some(chosen) => begin(app, chosen),
        None => tracing::error!("a bug in the choice of pods that make way, please report this"),
    }
}

/// Has the pods called home whose moves to other MIG instances no task carries out any more.
pub(crate) fn call_back(app: &App) {
    if app.leading.is_here() && app.is_fenced() {
        app.ledger.call_back(|uid| app.moves.is_changing(uid));
    }
}

/// Whether pods are moved. The demo plays kubelet. And without a Lease nothing says that a later process has begun,
/// which may give the other device to another pod meanwhile.
fn may_move(app: &App) -> bool {
    app.truth.has_replicas() && app.leading.is_here() && app.is_fenced()
}

fn begin(app: &Arc<App>, chosen: Vec<MakingWay>) {
    for way in chosen {
        let worker = Arc::clone(app);
        app.outside.spawn(async move {
            let mut task = Task { app: &worker, way: &way, sent: None, begun: None };
            carry_out(&mut task).await;
        });
    }
}

async fn carry_out(task: &mut Task<'_>) {
    let Task { app, way, .. } = *task;
    let Truth::Cluster(cluster) = &app.truth else { return };
    let Ok(key) = PodKey::of(&way.pod) else { return };
    let began = app.clock.now();
    if !app.ledger.promise_other(way) {
        return;
    }
    while app.clock.now().since(began) < STAY_FOR && app.leading.is_here() {
        match step_aside(task, cluster, &key, began).await {
            Next::Done => return,
            Next::After(pause) => app.outside.sleep(pause).await,
        }
    }
}

/// The pod as the ledger has it, while it is the guest that this task made of it.
fn still_chosen(app: &App, way: &MakingWay) -> Option<Reservation> {
    let held = app.ledger.reservation(&way.pod.uid)?;
    let guest = held.placement.guest.as_ref()?;
    let is_it = way.is_to(guest)
        && guest.leaving.is_none()
        && held.is_arriving()
        && held.state == ReservationState::Confirmed;
    is_it.then_some(held)
}

/// What comes next, by what has become of the other instance.
async fn step_aside(
    task: &mut Task<'_>,
    cluster: &ClusterTruth,
    key: &PodKey,
    began: Timestamp,
) -> Next {
    let Task { app, way, .. } = *task;
    let uid = &way.pod.uid;
    // One that has ended counts on both until its processes are gone, and nothing is written on it any more.
    let is_taken = |held: Reservation| {
        held.departure == Departure::Settling && held.state == ReservationState::Confirmed
    };
    match app.ledger.other_instance(way) {
        Some(OtherInstance::Promised) if task.sent.is_none() => {
            let is_late = app.clock.now().since(began) >= MADE_WITHIN;
            match (is_late, is_wanted(app, way)) {
                (true, _) => stay(app, way, Some("its other MIG instance was not made in time")),
                (false, false) => stay(app, way, None),
                (false, true) => Next::After(LOOK_AGAIN),
            }
        }
        Some(OtherInstance::Failed) if task.sent.is_none() => {
            stay(app, way, Some("its other MIG instance could not be made"))
        }
        Some(OtherInstance::Made) if app.ledger.has_moved_out(uid) => Next::After(LOOK_AGAIN),
        Some(OtherInstance::Made) => step(task, cluster, key).await,
        Some(OtherInstance::Taken) => {
            app.ledger.settle_other(way);
            Next::After(Duration::ZERO)
        }
        None if app.ledger.reservation(uid).is_some_and(is_taken) => {
            settle(app, cluster, &way.pod, key).await
        }
        // It has gone, such as by a restart of the machine, or the pod is called home.
        Some(OtherInstance::Promised | OtherInstance::Failed) | None => Next::Done,
    }
}

/// Whether the pod still waits for which another one is moved.
fn is_wanted(app: &App, way: &MakingWay) -> bool {
    app.waiting.has(&way.waits.uid)
}

/// Whether an earlier process has moved a pod, which the watch does not show yet.
fn has_moved_before(written: Option<&Placement>, held: &Reservation) -> bool {
    written.is_none_or(|it| it.guest.is_some() || !it.is_on_spots_of(&held.placement))
}

async fn step(task: &mut Task<'_>, cluster: &ClusterTruth, key: &PodKey) -> Next {
    let Task { app, way, .. } = *task;
    let pod = &way.pod;
    // Another pod needs the room: what is written, and whether it has started there, is the same to a recall.
    let Some(held) = still_chosen(app, way) else { return Next::Done };
    let Read { seen, annotations, pending, .. } = match read(app, cluster, pod, key).await {
        Ok(read) => read,
        Err(next) => return next,
    };
    if still_chosen(app, way).is_none() {
        return Next::Done;
    }
    let written = seen.placement.as_ref().ok().and_then(Option::as_ref);
    let is_written = written.is_some_and(|written| written.guest == held.placement.guest);
    if !is_written && task.sent.is_none() && has_moved_before(written, &held) {
        app.see_bound(&seen);
        return stay(app, way, None);
    }
    let is_taken_back = task.begun.as_ref().is_some_and(|begun| begun.taken_back.is_some());
    if !is_written && !is_taken_back {
        task.sent.take_if(|version| *version != seen.resource_version); // it did not arrive
    }
    let (Some(container), Some(guest)) = (&seen.gpu_container, &held.placement.guest) else {
        // Once written, it may have started elsewhere.
        return if task.sent.is_some() { Next::Done } else { stay(app, way, Some(NO_RESTART)) };
    };
    let known = Known { pod, key, held: &held, guest, annotations: &annotations };
    let begun = task.begun.get_or_insert_with(|| {
        let before =
            Move { container: container.id.as_str().into(), cpu_milli: container.cpu_milli };
        Begun { before, is_ordered: false, taken_back: None }
    });
    let is_same = container.is_running && *container.id == *begun.before.container;
    if let Some((at, fault)) = begun.taken_back.clone() {
        if !is_same {
            return write_again(app, cluster, &known, &seen).await;
        }
        if is_written {
            return take_back(begun, (app, cluster), &known, &seen, fault).await; // it did not arrive
        }
        let is_over = app.clock.now().since(at) >= WATCHED_FOR;
        return if is_over { stay(app, way, fault.as_deref()) } else { Next::After(TRY_AGAIN) };
    }
    // Reading it may have taken long.
    let is_wanted = is_wanted(app, way);
    if !is_written && !begun.is_ordered {
        // One that may still arrive is written again, then taken back.
        if !is_wanted && task.sent.is_none() {
            return Next::Done;
        }
        if task.sent.is_none() && !app.ledger.may_start(&pod.uid) {
            return Next::After(LOOK_AGAIN);
        }
        return write(task, cluster, &known, &seen).await;
    }
    if container.has_left(&begun.before) {
        app.ledger.moved_out(&pod.uid);
        return Next::After(LOOK_AGAIN);
    }
    let fault = match order(begun, (app, cluster, way), &known, &seen, (is_wanted, pending)).await {
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
    let Task { app, way, .. } = *task;
    let placement = (&known.held.placement, app.ledger.at_start(&way.pod.uid));
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
            stay(app, way, Some(&format!("refused with {code}: {message}")))
        }
    };
    task.sent = before;
    next
}

/// The second write, and what kubelet makes of it: it restarts the container. An error if that is not to be any
/// more: what is refused, or `None` if no pod waits for it any more.
async fn order(
    begun: &mut Begun,
    (app, cluster, way): (&Arc<App>, &ClusterTruth, &MakingWay),
    known: &Known<'_>,
    seen: &SeenPod,
    (is_wanted, pending): (bool, Option<String>),
) -> Result<Next, Option<String>> {
    let is_resized =
        seen.gpu_container.as_ref().map(|it| it.cpu_milli) != Some(begun.before.cpu_milli);
    match pending {
        Some(pending) if is_resized => {
            return Err(Some(format!("kubelet does not carry out its resize: {pending}")));
        }
        None if is_resized => return Ok(Next::After(LOOK_AGAIN)),
        _ if !is_wanted => return Err(None),
        _ => {}
    }
    let next = match resize(cluster, (known.pod, known.key), seen).await {
        Resized::Accepted => {
            begun.is_ordered = true;
            tell(app, way);
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
fn stay(app: &App, way: &MakingWay, fault: Option<&str>) -> Next {
    let MakingWay { pod, home, .. } = way;
    app.outbox.push(app.ledger.stay_home(way));
    if let Some(fault) = fault {
        let what = format!("it cannot be moved to another MIG instance, and stays on {home}");
        note_stuck(app, pod, MoveReason::Instance, &what, fault);
    }
    Next::Done
}

fn tell(app: &App, MakingWay { pod, node, home, spot, waits }: &MakingWay) {
    let to = format!("a MIG instance {} of {}", spot.profile, spot.gpu);
    let is_own = waits.namespace() == pod.namespace();
    let waits = if is_own { waits.to_string() } else { "another pod".to_owned() };
    let why = format!("so that {waits} fits, which waits");
    tracing::info!(pod_uid = %pod.uid, %pod, %node, from = %home, to, why, "moved");
    let note = format!(
        "moved from {home}, which it is allocated, to {to} on node {node}, {why}; its container is restarted"
    );
    app.tell(pod, NoticeReason::GpuMoved, note);
}
