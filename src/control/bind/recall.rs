//! Moves guests home whose room other pods are allocated.
//!
//! A move is two writes. The first changes the placement annotations: a container that starts from then
//! on gets the device at home. The second changes the CPU request of the container in place, for which
//! kubelet restarts it. After that the status of the pod shows that the container has ended, and reports
//! of the agent show that its processes have.
//!
//! The annotations alone say what is to be done, so a later process goes on where this one stopped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodCondition};

use crate::bind::start_limits::{client_limits, least_at_start};
use crate::metrics::moves::{MoveReason, MoveResult};
use crate::shared::app::App;
use engine::model::reservation::{
    Departure, Guest, MoveHome, Placement, PodRef, Reservation, ReservationState,
};
use kube_api::pod::gpu_container::GpuContainer;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::request::placement::{FENCE, FenceWriter, MPS_MEMORY, encode};
use kube_api::request::request_error::shown;
use kube_api::request::written::owned;
use kube_api::write::events::NoticeReason;
use kube_api::write::outcome::{Cause, PatchOutcome};
use kube_api::write::target::PodKey;
use wire::ids::{DeviceId, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::{Demand, Timestamp};

/// Pause before the next look at a move that goes on.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Pause before a write that failed is tried again.
pub(crate) const TRY_AGAIN: Duration = Duration::from_millis(500);

/// Pause before a restart that was refused is tried again.
const TRY_SLOWLY: Duration = Duration::from_secs(5);

/// How long kubelet may take to show that it restarts a container.
const SILENT_FOR: Duration = Duration::from_secs(60);

/// How long processes may be seen where a pod was a guest, after its container has ended there.
const LEFT_FOR: Duration = Duration::from_secs(30);

/// How long one task stays with a move. Then the next tick begins another one.
pub(crate) const STAY_FOR: Duration = Duration::from_secs(60);

/// What to do next about a move.
pub(crate) enum Next {
    /// Look again after this time.
    After(Duration),
    /// Nothing: it is done, not needed any more, or the pod is gone.
    Done,
}

/// Moves all guests of a node home that are recalled, or those of all nodes, each in a task of its own.
pub fn recall(app: &Arc<App>, node: Option<&str>) {
    if !app.lead.leading.is_here() || !app.lead.is_fenced() {
        return;
    }
    let failed: Vec<PodUid> = app.pods.start_failures.iter().map(|it| it.key().clone()).collect();
    for uid in failed.iter().filter(|uid| cannot_start(app, uid)) {
        app.ledger.call_home(uid);
    }
    for pod in app.ledger.going_home(node) {
        if app.room.moves.begin(&pod.uid) {
            let worker = Arc::clone(app);
            app.outside.spawn(async move {
                let _ends = Ends { app: &worker, uid: &pod.uid };
                send_home(&worker, &pod).await;
            });
        }
    }
}

/// Whether the runtime refuses now to start a pod with its device. Its status says so, also to a later process.
fn cannot_start(app: &App, uid: &PodUid) -> bool {
    let refused = app.room.moves.refused(uid);
    refused.is_some_and(|name| {
        app.pods.start_failures.get(uid).is_some_and(|failure| failure.is_of_device_of(&name))
    })
}

/// Ends a task, also one that panics.
pub(crate) struct Ends<'a> {
    pub(crate) app: &'a App,
    pub(crate) uid: &'a PodUid,
}

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.app.outbox.push(self.app.ledger.end_giving_back(self.uid));
        self.app.room.moves.end(self.uid);
    }
}

async fn send_home(app: &Arc<App>, pod: &PodRef) {
    let Ok(key) = PodKey::of(pod) else { return };
    let (began, mut waits) = (app.clock.now(), Waits::default());
    let is_young = || app.clock.now().since(began) < STAY_FOR;
    let stays = |waits: &Waits| is_young() || waits.kubelet.is_some() || waits.processes.is_some();
    while stays(&waits) && app.lead.leading.is_here() {
        match step(app, (pod, &key), &mut waits).await {
            Next::Done => return,
            Next::After(pause) => app.outside.sleep(pause).await,
        }
    }
}

/// Since when a move home waits.
#[derive(Default)]
struct Waits {
    /// Because others keep memory of its home that it requests.
    memory: Option<Timestamp>,
    /// For a sign of kubelet, which is to restart its container.
    kubelet: Option<Timestamp>,
    /// For the end of its processes where it was a guest.
    processes: Option<Timestamp>,
    /// Whether it was said that these do not end.
    is_told: bool,
    /// Whether the pod may still run at home, see [`may_be_home`].
    may_be_home: bool,
}

/// The next step of a move home.
async fn step(app: &Arc<App>, (pod, key): (&PodRef, &PodKey), waits: &mut Waits) -> Next {
    let Some(held) = app.ledger.reservation(&pod.uid) else { return Next::Done };
    let Some(guest) = held.placement.guest.clone() else { return Next::Done };
    match (held.state, held.departure) {
        (ReservationState::Assumed { .. }, _) => return Next::After(LOOK_AGAIN),
        (ReservationState::Draining { .. }, _)
        | (_, Departure::Stays | Departure::Arrives { .. }) => return Next::Done,
        (ReservationState::Confirmed, Departure::Restarted { since, .. }) => {
            return wait_for_processes(app, (pod, &held), since, waits);
        }
        (ReservationState::Confirmed, Departure::Gone) => {
            if !waits.is_told {
                app.metrics.moved(MoveReason::Recall, MoveResult::Done);
            }
            app.room.moves.unstick(&pod.uid); // kubelet was late
            return Next::Done;
        }
        (ReservationState::Confirmed, Departure::Settling) => {
            waits.kubelet = None;
            return settle(app, pod, key).await;
        }
        (ReservationState::Confirmed, Departure::Recalled) => {}
    }
    let lack = lack_at_home(app, pod, &mut waits.memory);
    if guest.leaving.is_none()
        && let Some(next) = before_move(app, pod, lack)
    {
        return next;
    }
    let read = match read(app, pod, key).await {
        Ok(read) => read,
        Err(next) => {
            waits.kubelet = None; // kubelet may not be able to say anything either
            return next;
        }
    };
    let Read { seen, annotations, .. } = &read;
    waits.may_be_home |= may_be_home(&guest, annotations);
    let Some(container) = &seen.containers.gpu else {
        return match guest.leaving {
            None => failed(app, pod, NO_RESTART),
            Some(_) => count_on_both(app, pod, NO_RESTART),
        };
    };
    if let Some(next) = catch_up(app, pod, &guest, seen) {
        return next;
    }
    let written = seen.placement.as_ref().ok().and_then(Option::as_ref);
    let is_written = guest.leaving.is_some()
        && written.is_some_and(|written| written.guest.as_ref() == Some(&guest));
    let known = Known { pod, key, held: &held, guest: &guest, annotations };
    match &guest.leaving {
        Some(leaving) if is_written => {
            go_on(app, &known, (&read, container, leaving), (lack, waits)).await
        }
        Some(_) | None => {
            let (container, cpu_milli) = (container.id.as_str().into(), container.cpu_milli);
            let leaving = MoveHome { container, cpu_milli };
            write(app, &known, (leaving, &seen.resource_version)).await
        }
    }
}

/// Whether a guest may have never left its home: the version before also let pods that used no GPU start elsewhere, and
/// may have ended right after it had written that.
fn may_be_home(guest: &Guest, annotations: &BTreeMap<String, String>) -> bool {
    let fence = annotations.get(FENCE);
    let is_of_before = fence.is_some_and(|value| FenceWriter::is_of_version_before(value));
    is_of_before && guest.leaving.is_none() && guest.spot.is_none()
}

/// Takes in what a read shows that the watch does not show yet, and that ends or changes a move home.
fn catch_up(app: &App, pod: &PodRef, guest: &Guest, seen: &SeenPod) -> Option<Next> {
    let written = seen.placement.as_ref().ok().and_then(Option::as_ref);
    let shows_move =
        written.and_then(|it| it.guest.as_ref()).is_some_and(|it| it.leaving.is_some());
    let has_started = cannot_start(app, &pod.uid) && seen.containers.start_failure.is_none();
    // An earlier process has written the move, or the container needs none any more.
    if guest.leaving.is_none() && (shows_move || has_started) {
        app.see_bound(seen);
        return Some(Next::After(LOOK_AGAIN));
    }
    // It was allocated the place where it is a guest.
    let is_settled =
        written.is_some_and(|it| it.guest.is_none() && it.runs_on() == [guest.on.clone()]);
    (is_settled && app.is_of_earlier(seen)).then(|| {
        app.see_bound(seen);
        Next::After(TRY_AGAIN)
    })
}

/// What is to be done after the first write.
async fn go_on(
    app: &Arc<App>,
    known: &Known<'_>,
    (Read { seen, pending, is_resizing, .. }, container, leaving): (
        &Read,
        &GpuContainer,
        &MoveHome,
    ),
    (lack, waits): (Lack, &mut Waits),
) -> Next {
    let is_ordered = container.cpu_milli != leaving.cpu_milli;
    let shows_sign = !is_ordered || pending.is_some() || *is_resizing;
    let now = app.clock.now();
    let is_ignored = is_ignored(&mut waits.kubelet, shows_sign, (now, app.lead.pulse.resumed(now)));
    let may_be_home = waits.may_be_home;
    if !is_ordered {
        return restart(app, known, (seen, lack, may_be_home)).await;
    }
    if let Some(pending) = pending {
        let fault = format!("kubelet does not carry out its resize: {pending}");
        return take_back(app, known, (seen, leaving, may_be_home), &fault).await;
    }
    app.see_bound(seen); // kubelet may be done
    match is_ignored {
        // The first write stays: a kubelet that is late, or cannot say so, may start the next container at home.
        true => count_on_both(app, known.pod, NO_SIGN),
        false => Next::After(TRY_AGAIN),
    }
}

/// Whether kubelet has shown no sign of a resize for [`SILENT_FOR`], and `silent` since when. No time counts in which
/// this process was frozen.
fn is_ignored(
    silent: &mut Option<Timestamp>,
    shows_sign: bool,
    (now, resumed): (Timestamp, Option<Timestamp>),
) -> bool {
    if shows_sign {
        *silent = None;
        return false;
    }
    lasts_for(silent, now, resumed) >= SILENT_FOR
}

/// Why a container was not restarted of which kubelet says nothing.
const NO_SIGN: &str =
    "kubelet did not carry out its resize within 60 s (check that it is 1.33 or newer)";

/// Why the container of a pod cannot be restarted that is not set up for that.
pub(crate) const NO_RESTART: &str =
    "its container does not restart when its CPU request is changed";

/// A pod as the API server has it now.
pub(crate) struct Read {
    pub(crate) seen: SeenPod,
    pub(crate) annotations: BTreeMap<String, String>,
    /// Why kubelet does not carry out its resize now, if it says so.
    pub(crate) pending: Option<String>,
    /// Whether kubelet says that it carries one out now.
    pub(crate) is_resizing: bool,
}

/// The pod as the API server has it now, or what to do without it.
pub(crate) async fn read(app: &App, pod: &PodRef, key: &PodKey) -> Result<Read, Next> {
    let read = match app.writer.read_back(key).await {
        Err(_) => return Err(Next::After(TRY_AGAIN)),
        Ok(Some(read)) if read.metadata.uid.as_deref() == Some(pod.uid.as_str()) => read,
        Ok(_) => return Err(Next::Done),
    };
    let seen = SeenPod::from_api(&read);
    if app.is_of_later(&seen) {
        return Err(Next::Done); // that one moves it
    }
    let (pending, is_resizing) = (pending_resize(&read), is_resizing(&read));
    let annotations = read.metadata.annotations.unwrap_or_default();
    Ok(Read { seen, annotations, pending, is_resizing })
}

/// Whether others keep memory of the home of a guest that it requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lack {
    None,
    /// A list may yet show the end of a process.
    Began,
    Lasts,
}

fn lack_at_home(app: &App, pod: &PodRef, lacks: &mut Option<Timestamp>) -> Lack {
    if app.ledger.changes_instances(&pod.uid) || !app.ledger.lacks_memory_at_home(&pod.uid) {
        *lacks = None;
        return Lack::None;
    }
    let now = app.clock.now();
    match lasts_for(lacks, now, app.lead.pulse.resumed(now)) >= app.config.recall / 2 {
        true => Lack::Lasts,
        false => Lack::Began,
    }
}

/// How long something lasts that is seen now, and `since` when. What was known before this process was frozen may be
/// old, so the time counts from when it `resumed`.
fn lasts_for(
    since: &mut Option<Timestamp>,
    now: Timestamp,
    resumed: Option<Timestamp>,
) -> Duration {
    now.since(*since.insert(since.unwrap_or(now).max(resumed.unwrap_or_default())))
}

/// Waits until lists show no process of a pod where it was a guest. It says so once if they still do after
/// [`LEFT_FOR`]. `shown` is when the last one did, or since when the container has ended.
fn wait_for_processes(
    app: &App,
    (pod, held): (&PodRef, &Reservation),
    shown: Timestamp,
    waits: &mut Waits,
) -> Next {
    let now = app.clock.now();
    let is_long = lasts_for(&mut waits.processes, now, app.lead.pulse.resumed(now)) >= LEFT_FOR;
    // Without lists nothing is seen: the node does not report.
    if waits.is_told || !is_long || now.since(shown) >= LEFT_FOR {
        return Next::After(LOOK_AGAIN);
    }
    let on = held.guest_on().map(ToString::to_string).unwrap_or_default();
    let (node, seconds) = (&held.placement.node, LEFT_FOR.as_secs());
    app.metrics.moved(MoveReason::Recall, MoveResult::Failed);
    tracing::warn!(pod_uid = %pod.uid, %pod, %node, on, "a pod that was moved home still has processes where it was");
    let note = format!(
        "{seconds} seconds after its container was restarted to move it home it still has a process on {on} of node \
         {node}: one that does not end, or its new container was started there; the room is free when that ends, so \
         delete the pod if it does not"
    );
    app.tell(pod, NoticeReason::GpuMoveFailed, note);
    waits.is_told = true;
    Next::After(LOOK_AGAIN)
}

/// Says that a guest is allocated the GPU on which it runs, because others keep memory of its own one.
fn tell_home_in_use(app: &App, pod: &PodRef) {
    app.metrics.moved(MoveReason::Recall, MoveResult::Failed);
    tracing::warn!(pod_uid = %pod.uid, %pod, "others keep memory of the home of a guest, which stays where it runs");
    let note = "it is allocated the GPU on which it runs: others use memory of its own one that it requests, and it \
                cannot be taken back from them; see what uses it with `gpupack top gpus`";
    app.tell(pod, NoticeReason::GpuMoveFailed, note.to_owned());
}

/// Says that a guest which cannot stay where it is does not go home yet.
fn tell_waits_for_home(app: &App, pod: &PodRef) {
    tracing::warn!(pod_uid = %pod.uid, %pod, "a guest that cannot stay where it is waits: others keep memory of its home");
    let note = "it goes home once others no longer use memory of its own GPU that it requests, which cannot be taken \
                back from them; see what uses it with `gpupack top gpus`";
    app.tell(pod, NoticeReason::GpuMoveFailed, note.to_owned());
}

/// What is to be done instead of the move of a guest, of which nothing is written yet.
fn before_move(app: &App, pod: &PodRef, lack: Lack) -> Option<Next> {
    let is_stranded = app.ledger.is_stranded(&pod.uid);
    // First: it is not to be called home again and again in vain.
    if app.room.moves.is_stuck(&pod.uid) && !app.ledger.changes_instances(&pod.uid) {
        if is_stranded {
            app.room.moves.unstick(&pod.uid); // that device is no place to stay
            return Some(Next::After(2 * TRY_SLOWLY));
        }
        return Some(match app.ledger.settle_guest(&pod.uid) {
            true => Next::After(Duration::ZERO),
            false => Next::After(LOOK_AGAIN),
        });
    }
    let cannot_start = cannot_start(app, &pod.uid);
    let has_to_go = cannot_start || is_stranded;
    // Before it stays: it would be called home again and again. Once *bind* has given up its room is its own.
    let settles = || !has_to_go && app.ledger.settle_guest(&pod.uid);
    if lack == Lack::Lasts && settles() {
        tell_home_in_use(app, pod);
        return Some(Next::After(Duration::ZERO));
    }
    if lack == Lack::Lasts && has_to_go && app.is_due(&pod.uid, NoticeReason::GpuMoveFailed) {
        tell_waits_for_home(app, pod);
    }
    if !cannot_start && app.ledger.let_stay(&pod.uid) {
        return Some(Next::Done); // the pod that needed its room is gone
    }
    // What others use of its home goes before it comes, and lists must show that it has left.
    let waits = lack != Lack::None
        || app.ledger.waits_for_memory_at_home(&pod.uid)
        || app.ledger.is_being_made(&pod.uid);
    let waits = waits && !mutated(Mutation::HomeMemoryIgnored);
    (waits || !app.ledger.may_go_home(&pod.uid)).then_some(Next::After(LOOK_AGAIN))
}

/// What is known of a pod that is moved.
pub(crate) struct Known<'a> {
    pub(crate) pod: &'a PodRef,
    pub(crate) key: &'a PodKey,
    pub(crate) held: &'a Reservation,
    pub(crate) guest: &'a Guest,
    pub(crate) annotations: &'a BTreeMap<String, String>,
}

impl Known<'_> {
    /// Its placement with this move.
    fn placement(&self, leaving: Option<MoveHome>) -> Placement {
        let guest = Some(Guest { leaving, ..self.guest.clone() });
        Placement { guest, ..self.held.placement.clone() }
    }

    /// Writes a placement on it, in the version of `resource_version`, and what it may take of its device at
    /// its next start where MPS limits that.
    pub(crate) async fn write(
        &self,
        app: &App,
        (placement, at_start): (&Placement, Option<Demand>),
        resource_version: &str,
    ) -> PatchOutcome {
        let mut annotations = match encode(placement) {
            Ok(annotations) => annotations,
            Err(error) => return PatchOutcome::Refused { code: 0, message: error.to_string() },
        };
        if self.annotations.contains_key(MPS_MEMORY) {
            annotations.extend(client_limits(app, placement, at_start).annotations());
        }
        let mut all: BTreeMap<String, String> = owned(self.annotations).collect();
        all.extend(annotations.clone());
        app.pods.edits.wrote(&self.pod.uid, &placement.node, &all);
        let patch = annotations.into_iter().map(|(key, value)| (key, Some(value))).collect();
        let uid = &self.pod.uid;
        let fenced_by = self.annotations.get(FENCE).map(|value| FenceWriter::of(value));
        app.writer.write_placement(self.key, uid, resource_version, fenced_by, &patch).await
    }
}

/// The first write: from now on its container starts at home.
async fn write(
    app: &Arc<App>,
    known: &Known<'_>,
    (leaving, resource_version): (MoveHome, &str),
) -> Next {
    let uid = &known.pod.uid;
    let placement = known.placement(Some(leaving.clone()));
    app.ledger.write_move(uid, Some(leaving));
    // Of a write without an answer it is not known that it did not arrive.
    let take_back = || {
        if known.guest.leaving.is_none() {
            app.ledger.write_move(uid, None);
        }
    };
    let at_start = app.ledger.at_start(uid);
    match known.write(app, (&placement, at_start), resource_version).await {
        PatchOutcome::Patched { .. } => Next::After(Duration::ZERO),
        PatchOutcome::Gone => Next::Done,
        PatchOutcome::Undecided { .. } => Next::After(TRY_AGAIN),
        PatchOutcome::Conflict => {
            take_back();
            Next::After(LOOK_AGAIN)
        }
        PatchOutcome::Refused { code, message } => {
            take_back();
            let is_open = known.guest.leaving.is_some();
            match is_open {
                true => Next::After(TRY_AGAIN),
                false => failed(app, known.pod, &format!("refused with {code}: {message}")),
            }
        }
    }
}

/// The second write: kubelet restarts its container. If it is refused, the first one is taken back.
async fn restart(
    app: &Arc<App>,
    known: &Known<'_>,
    (seen, lack, may_be_home): (&SeenPod, Lack, bool),
) -> Next {
    if lack != Lack::None || !app.ledger.may_go_home(&known.pod.uid) {
        return Next::After(TRY_AGAIN); // the first write is of an earlier process, or its agent fell silent since
    }
    match resize(app, (known.pod, known.key), seen).await {
        Resized::Accepted => {
            tell_moved(app, known);
            Next::After(LOOK_AGAIN)
        }
        Resized::Undecided => Next::After(TRY_AGAIN), // it may have arrived
        Resized::Not(next) => next,
        Resized::Refused(fault) => {
            let Some(leaving) = &known.guest.leaving else { return Next::Done };
            take_back(app, known, (seen, leaving, may_be_home), &fault).await
        }
    }
}

/// What became of a change for which kubelet restarts a container.
pub(crate) enum Resized {
    Accepted,
    /// It is not known whether it arrived.
    Undecided,
    /// It was not made, for a reason that passes or because the pod is gone.
    Not(Next),
    Refused(String),
}

/// Changes the CPU request of a container in one direction, or in the other if the first is refused.
pub(crate) async fn resize(app: &App, (pod, key): (&PodRef, &PodKey), seen: &SeenPod) -> Resized {
    let Some(container) = &seen.containers.gpu else { return Resized::Not(Next::Done) };
    let written = seen.placement.as_ref().ok().and_then(Option::as_ref);
    let moved = written.and_then(|it| it.guest.as_ref()?.leaving.as_ref());
    let mut fault = String::new();
    for cpu in container.resized(moved) {
        let version = seen.resource_version.as_str();
        match app.writer.resize(key, &pod.uid, version, &container.name, cpu).await {
            PatchOutcome::Patched { .. } => return Resized::Accepted,
            PatchOutcome::Gone => return Resized::Not(Next::Done),
            PatchOutcome::Conflict => return Resized::Not(Next::After(LOOK_AGAIN)),
            // It was not sent.
            PatchOutcome::Undecided { cause: Cause::NotLeading } => {
                return Resized::Not(Next::After(TRY_AGAIN));
            }
            PatchOutcome::Undecided { .. } => return Resized::Undecided,
            PatchOutcome::Refused { code, message } => {
                fault = format!("its resize was refused with {code}: {message}");
            }
        }
    }
    Resized::Refused(fault)
}

/// Takes back the first write, since the second one has no effect. Only while the container runs that
/// ran before, away from home: a later one may have started at home.
async fn take_back(
    app: &Arc<App>,
    known: &Known<'_>,
    (seen, leaving, may_be_home): (&SeenPod, &MoveHome, bool),
    fault: &str,
) -> Next {
    let uid = &known.pod.uid;
    if known.guest.spot.is_some() || may_be_home {
        return count_on_both(app, known.pod, fault);
    }
    let is_same = |seen: &SeenPod| {
        let container = seen.containers.gpu.as_ref();
        container.is_some_and(|it| it.is_running && *it.id == *leaving.container)
    };
    if !is_same(seen) {
        return count_on_both(app, known.pod, fault);
    }
    let placement = (&known.placement(None), least_at_start(app, known.held));
    match known.write(app, placement, &seen.resource_version).await {
        PatchOutcome::Patched { .. } => {
            app.ledger.write_move(uid, None);
            failed(app, known.pod, fault)
        }
        PatchOutcome::Gone => Next::Done,
        PatchOutcome::Conflict | PatchOutcome::Refused { .. } | PatchOutcome::Undecided { .. } => {
            Next::After(TRY_AGAIN)
        }
    }
}

/// Why kubelet does not carry out a resize of a pod now, if it says so.
fn pending_resize(pod: &Pod) -> Option<String> {
    let pending = condition(pod, "PodResizePending")?;
    let reason = pending.reason.as_deref().unwrap_or_default();
    let message = pending.message.as_deref().unwrap_or_default();
    Some(shown(&format!("{reason}: {message}")))
}

/// Whether kubelet says that it carries out a resize of a pod now: its container may take long to end.
fn is_resizing(pod: &Pod) -> bool {
    // Of one that failed kubelet says so as the reason, and tries again.
    condition(pod, "PodResizeInProgress").is_some_and(|it| it.reason.as_deref() != Some("Error"))
}

/// A condition of a pod, if it is met.
fn condition<'a>(pod: &'a Pod, name: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions?.iter().find(|it| it.type_ == name && it.status == "True")
}

/// The pods that are being bound to a device, for those who may see pods of a namespace.
pub(crate) fn names(app: &App, node: &str, device: &DeviceId, namespace: &str) -> String {
    let pods = app.ledger.binding_on(node, device);
    let own = pods.iter().filter(|pod| pod.namespace() == namespace).map(ToString::to_string);
    let own: Vec<String> = own.collect();
    match (own.is_empty(), pods.is_empty()) {
        (false, _) => own.join(", "),
        (true, false) => "a pod of another namespace".to_owned(),
        (true, true) => "another pod".to_owned(),
    }
}

fn tell_moved(app: &App, known: &Known<'_>) {
    let Known { pod, held, guest, .. } = known;
    let (node, from) = (&held.placement.node, &guest.on);
    let home = held.placement.devices.first().map(|placed| &placed.id);
    let Some(home) = home else { return };
    let why = match guest.spot {
        None if cannot_start(app, &pod.uid) => {
            "its container could not be started there".to_owned()
        }
        None if app.ledger.is_stranded(&pod.uid) => "that device is gone or ill".to_owned(),
        None => format!("{} needs the room", names(app, node.as_str(), from, pod.namespace())),
        Some(_) => "its move to another MIG instance was not finished".to_owned(),
    };
    tracing::info!(pod_uid = %pod.uid, %pod, %node, %from, to = %home, why, "moved home");
    let note = format!(
        "moved from {from} to {home} on node {node}, which it is allocated, because {why}; its container is \
         restarted"
    );
    app.tell(pod, NoticeReason::GpuMoved, note);
}

/// Notes that a pod cannot be moved, and `what` becomes of it, unless that is known.
pub(crate) fn note_stuck(app: &App, pod: &PodRef, reason: MoveReason, what: &str, fault: &str) {
    if app.ledger.reservation(&pod.uid).is_some() && app.room.moves.stick(&pod.uid) {
        app.metrics.moved(reason, MoveResult::Failed);
        tracing::warn!(pod_uid = %pod.uid, %pod, what, fault, "a pod cannot be moved");
        let note = format!(
            "{what}: {fault}; check `kubectl describe` of the pod, and that `rbac.moves` of the chart is `true`"
        );
        app.tell(pod, NoticeReason::GpuMoveFailed, note);
    }
}

/// Notes that a guest cannot be moved. The pods that wait for its room fail, and it gets the room.
fn failed(app: &App, pod: &PodRef, fault: &str) -> Next {
    if app.ledger.changes_instances(&pod.uid) {
        return count_on_both(app, pod, fault);
    }
    let what = match app.ledger.is_stranded(&pod.uid) {
        true => {
            "it cannot be moved home from a device that is gone or ill (delete it to get another place)"
        }
        false => "it cannot be moved, and is allocated the GPU on which it runs",
    };
    note_stuck(app, pod, MoveReason::Recall, what, fault);
    Next::After(LOOK_AGAIN)
}

/// Notes that a guest cannot be moved now of which it is not known where it runs: its container has started
/// since its move was written, and may not have seen that. It counts on both GPUs until it is restarted.
fn count_on_both(app: &App, pod: &PodRef, fault: &str) -> Next {
    let what = "it cannot be moved now, and counts on both GPUs until its container is restarted";
    note_stuck(app, pod, MoveReason::Recall, what, fault);
    // Not before the pod has gone that needed the room; of a lost device none is waited for.
    let counts = app.ledger.changes_instances(&pod.uid) || app.ledger.settle_guest(&pod.uid);
    match counts || app.ledger.is_stranded(&pod.uid) {
        true => Next::After(TRY_SLOWLY),
        false => Next::After(TRY_AGAIN),
    }
}

/// Tries again to restart a guest that counts on both GPUs.
async fn try_slowly(
    app: &Arc<App>,
    (known, leaving): (&Known<'_>, &MoveHome),
    Read { seen, pending, .. }: &Read,
) -> Next {
    let uid = &known.pod.uid;
    let Some(container) = seen.containers.gpu.as_ref().filter(|_| pending.is_none()) else {
        return Next::After(TRY_SLOWLY);
    };
    if container.cpu_milli == leaving.cpu_milli {
        if !app.ledger.may_go_home(uid) {
            return Next::After(TRY_SLOWLY);
        }
        match resize(app, (known.pod, known.key), seen).await {
            Resized::Accepted | Resized::Undecided => {}
            Resized::Not(next) => return next,
            Resized::Refused(_) => return Next::After(TRY_SLOWLY),
        }
    } else if !container.has_left(leaving) {
        return Next::After(TRY_SLOWLY); // kubelet may never carry it out
    }
    app.ledger.goes_on(uid);
    app.room.moves.unstick(uid);
    Next::After(LOOK_AGAIN)
}

/// Writes where a guest is allocated that cannot be moved. Until then it is allocated both, and one that may still run at
/// home stays so.
pub(crate) async fn settle(app: &Arc<App>, pod: &PodRef, key: &PodKey) -> Next {
    let Some(held) = app.ledger.reservation(&pod.uid) else { return Next::Done };
    let Some(guest) = held.placement.guest.clone() else { return Next::Done };
    let read = match read(app, pod, key).await {
        Ok(read) => read,
        Err(next) => return next,
    };
    let Read { seen, annotations, .. } = &read;
    if may_be_home(&guest, annotations) {
        return Next::After(TRY_SLOWLY);
    }
    let known = Known { pod, key, held: &held, guest: &guest, annotations };
    if let Some(leaving) = &guest.leaving {
        return try_slowly(app, (&known, leaving), &read).await;
    }
    let placement = (&held.settled_placement(), least_at_start(app, &held));
    match known.write(app, placement, &seen.resource_version).await {
        PatchOutcome::Patched { .. } => {
            app.outbox.push(app.ledger.settled(&pod.uid));
            app.room.moves.unstick(&pod.uid);
            Next::Done
        }
        PatchOutcome::Gone => Next::Done,
        PatchOutcome::Conflict | PatchOutcome::Refused { .. } | PatchOutcome::Undecided { .. } => {
            Next::After(TRY_AGAIN)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_resize_is_ignored_without_a_sign_for_a_minute_in_which_this_process_was_not_frozen() {
        let at = Timestamp::from_millis;
        let mut silent = None;
        for (now, shows_sign, resumed, expected) in [
            (5_000, false, None, false), // the resize was accepted
            (64_999, false, Some(4_000), false),
            (65_000, false, Some(4_000), true),
            (70_000, false, Some(70_000), false), // frozen for long
            (129_999, false, Some(70_000), false),
            (130_000, false, Some(70_000), true),
            (130_100, true, Some(70_000), false),
            (130_200, false, Some(70_000), false),
            (190_199, false, Some(70_000), false),
            (190_200, false, Some(70_000), true),
        ] {
            let times = (at(now), resumed.map(at));
            assert_eq!(is_ignored(&mut silent, shows_sign, times), expected, "{now}");
        }
    }

    #[test]
    fn kubelet_says_whether_it_carries_out_a_resize() {
        let of = |name: &str, status: &str| {
            let condition =
                json!({"type": name, "status": status, "reason": "Deferred", "message": "no CPU"});
            let pod = json!({"metadata": {}, "status": {"conditions": [condition]}});
            let pod: Pod = serde_json::from_value(pod).unwrap();
            (pending_resize(&pod), is_resizing(&pod))
        };
        assert_eq!(of("PodResizePending", "True"), (Some("Deferred: no CPU".to_owned()), false));
        assert_eq!(of("PodResizeInProgress", "True"), (None, true));
        assert_eq!(of("PodResizeInProgress", "False"), (None, false));
        assert_eq!(of("Ready", "True"), (None, false));
        let condition = json!({"type": "PodResizeInProgress", "status": "True", "reason": "Error"});
        let pod = json!({"metadata": {}, "status": {"conditions": [condition]}});
        assert!(!is_resizing(&serde_json::from_value(pod).unwrap()));
    }
}
