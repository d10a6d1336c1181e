//! *bind*, the one command: reserves on the current ledger, then posts devices and node in one
//! write.
//!
//! Only a *definite* refusal by the API server takes the reservation back. While the outcome of a
//! Binding is open, the reservation stays and the caller gets no answer. kube-scheduler then times
//! out, which is better than an `Error` for a pod that is bound.
//!
//! No Binding is posted after the process began to stop, for a version of the pod that another
//! process wrote, or when its answer could come after kube-scheduler has given up: in these cases
//! others may take the room as free.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{Either, select};
use tokio::sync::oneshot;

use crate::bind::made_up_calls::{check_made_up, check_passed, is_shown, read_pod};
use crate::bind::recall::recall;
use crate::bind::settle::{gone, see_other_binding, settle, settled_bound, taken_back};
use crate::bind::start_limits::client_limits;
use crate::bind::take_back::take_back;
use crate::metrics::labels::{BindResult, Outcome, VerbAnswer};
use crate::metrics::mig::MakeResult;
use crate::shared::app::App;
use crate::shared::bind_error::BindError;
use crate::shared::bind_locks::BindLock;
use crate::shared::in_flight::NamedPod;
use crate::shared::log_limit::LogLimit;
use engine::ledger::change::commits::{ReserveError, ToMake};
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::query::reading::Readiness;
use engine::ledger::suggest::standing::Holder;
use engine::model::device_state::KeptFor;
use engine::model::rejection::Rejection;
use engine::model::reservation::{Placement, PodRef, Reservation, ReservationState};
use engine::scoring::device_figures::Size;
use kube_api::config::file::Config;
use kube_api::pod::seen_pod::SeenPod;
use kube_api::protocol::bounds::ProtocolError;
use kube_api::protocol::messages::{ExtenderBindingArgs, ExtenderBindingResult};
use kube_api::write::outcome::{BindOutcome, Fenced};
use kube_api::write::target::{BindTarget, PodKey};
use wire::ids::{NodeName, PodUid};
use wire::mutation::{Mutation, mutated};

/// Most posts of a Binding, or fences before it, in one bind. Each further one needs a change of
/// the pod within milliseconds, so a third is hardly ever seen.
const ATTEMPTS: u32 = 4;

/// Time for the call and its answer on the network between kube-scheduler and gpupack.
const WAY_BACK: Duration = Duration::from_millis(500);

/// Pause between two looks whether the guests of a device have left it.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// How long the caller is still answered after the process began to stop. The next process settles
/// a bind that is undecided by then.
const LAST_ANSWER_WITHIN: Duration = Duration::from_secs(1);

static LOGGED: LogLimit = LogLimit::new();

/// One call of *bind*.
struct Call<'a> {
    app: &'a Arc<App>,
    args: &'a ExtenderBindingArgs,
    /// When it arrived, on the precise clock.
    arrived: Duration,
    /// How long it was under way before that.
    spent: Duration,
}

impl Call<'_> {
    fn check_time(&self) -> Result<(), BindError> {
        let Config { api_timeout, scheduler_timeout, .. } = self.app.config;
        let here = self.app.clock.precise().saturating_sub(self.arrived);
        let answered_after = self.spent + here + api_timeout;
        if self.app.lead.is_stopping() {
            return Err(BindError::Stopping);
        }
        if answered_after + WAY_BACK > scheduler_timeout && !mutated(Mutation::LateBind) {
            return Err(BindError::TooLate);
        }
        Ok(())
    }

    /// Whether the pod may be bound to the node: our scheduler has it, and *filter* passed it
    /// there.
    fn check_passed(&self, pod: &SeenPod) -> Result<(), BindError> {
        let app = self.app;
        if !app.config.serves(&pod.scheduling.scheduler) {
            return Err(BindError::NotOurs { scheduler: pod.scheduling.scheduler.clone() });
        }
        if pod.scheduling.is_gated {
            return Err(BindError::Gated);
        }
        if mutated(Mutation::UnpassedBind) {
            return Ok(());
        }
        check_passed(app, &pod.pod.uid, &self.args.node)?;
        // The room of all of its group is kept until it is bound.
        let uid = &pod.pod.uid;
        let has_room = || app.ledger.has_standing(uid) || app.ledger.reservation(uid).is_some();
        match pod.group.is_none() || has_room() || mutated(Mutation::GroupIgnored) {
            true => Ok(()),
            false => Err(BindError::NotPassed),
        }
    }
}

/// Answers *bind*. The work goes on when the caller hangs up.
///
/// # Errors
/// [`ProtocolError`] for a body that is no binding.
pub async fn bind(app: &Arc<App>, body: &[u8]) -> Result<VerbAnswer, ProtocolError> {
    bind_after(app, body, Duration::ZERO).await
}

/// The same for a call that has waited for so long already, here or at another replica.
///
/// # Errors
/// [`ProtocolError`] for a body that is no binding.
pub async fn bind_after(
    app: &Arc<App>,
    body: &[u8],
    spent: Duration,
) -> Result<VerbAnswer, ProtocolError> {
    let arrived = app.clock.precise();
    let args = ExtenderBindingArgs::parse(body)?;
    let worker = Arc::clone(app);
    let (sender, decided) = oneshot::channel();
    let task = async move {
        let result = bind_pod(&Call { app: &worker, args: &args, arrived, spent }).await;
        match &result {
            Ok(()) => worker.metrics.bind(BindResult::Bound),
            Err(error) => {
                worker.metrics.bind(error.result());
                tell_failed(&worker, &args, error);
            }
        }
        let _ = sender.send(result); // unless the caller has hung up
    };
    app.outside.spawn(task);
    let stopped = pin!(app.stopped_for(LAST_ANSWER_WITHIN));
    let result = match select(decided, stopped).await {
        Either::Left((result, _)) => result,
        Either::Right(_) => Ok(Err(BindError::Undecided)),
    };
    let error = match result {
        Ok(Ok(())) => String::new(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the bind was aborted because of a bug in gpupack".to_owned(),
    };
    let outcome = if error.is_empty() { Outcome::Ok } else { Outcome::Refused };
    Ok((ExtenderBindingResult { error }.to_json(), outcome))
}

/// Logs why a bind failed. Pods that the watch does not show have a limit of their own.
fn tell_failed(app: &App, args: &ExtenderBindingArgs, error: &BindError) {
    let is_known = app.pods.pending.contains_key(&PodUid::new(args.pod_uid.as_str()));
    let reason = (if is_known { "waiting" } else { "unknown" }, error.result().label());
    let Some(left_out) = LOGGED.admits(reason, app.clock.precise()) else { return };
    let error = error.to_string();
    tracing::warn!(
        pod_uid = ?args.pod_uid, pod = ?args.pod_name, node = ?args.node, ?error, left_out, "bind failed"
    );
}

async fn bind_pod(call: &Call<'_>) -> Result<(), BindError> {
    let Call { app, args, .. } = *call;
    let uid = PodUid::new(args.pod_uid.as_str());
    let _place = app.binding.binds.place(&uid, is_shown(app, &uid))?;
    check_made_up(app, &uid, &args.node)?;
    // A bind that waits longer could only end in [`BindError::TooLate`].
    let lock = app.outside.within(app.config.scheduler_timeout, app.binding.binds.take(&uid)).await;
    let mut lock = lock.ok_or(BindError::TooLate)?;
    if settle_earlier(call, &mut lock).await? || is_bound_there(app, &uid, &args.node) {
        return Ok(()); // a repeated call
    }
    call.check_time()?;
    let known = app.pods.pending.get(&uid).map(|pod| Arc::clone(&pod));
    let is_ready = app.readiness() == Readiness::Ready;
    let pod = match known {
        Some(pod) => pod,
        None => read_pod(app, args).await?,
    };
    let node = NodeName::new(args.node.as_str());
    if let Some(bound_to) = &pod.node {
        // Else the watch may have shown that it is gone, and nothing would show that again.
        if is_shown(app, &uid) {
            see_other_binding(app, &pod);
        }
        return if *bound_to == node { Ok(()) } else { Err(BindError::BoundElsewhere) };
    }
    if let Err(error) = &pod.request {
        return Err(BindError::Request(error.reason()));
    }
    call.check_passed(&pod)?;
    let Some(query) = app.query(&pod) else {
        if !is_ready && mutated(Mutation::PlainPodWaits) {
            return Err(BindError::WarmingUp);
        }
        // Only the pod's GPUs are not known yet, and it requests none.
        let target = |pod: &SeenPod| Ok(BindTarget::without_gpu(pod, &node)?);
        return decide(call, &mut lock, &pod, target).await;
    };
    if !is_ready {
        return Err(BindError::WarmingUp);
    }
    app.outbox.push(app.ledger.drop_hold_elsewhere(&uid, &args.node));
    let has_kept = Kept::of(app, &uid);
    let now = app.clock.now();
    let (_, events) = app.ledger.reserve_for_bind(&pod.pod, &args.node, &query, now)?;
    app.outbox.push(events);
    bind_reserved(call, &mut lock, &pod, (&query, has_kept)).await
}

/// Binds a pod that has a reservation.
async fn bind_reserved(
    call: &Call<'_>,
    lock: &mut BindLock<'_>,
    pod: &SeenPod,
    kept: (&PlacementRequest, Kept),
) -> Result<(), BindError> {
    let (Call { app, args, .. }, uid) = (call, &pod.pod.uid);
    recall(app, Some(&args.node));
    take_back(app, Some(&args.node));
    let placement = match wait_for_guests(call, &pod.pod).await {
        Ok(placement) => placement,
        Err(error) => {
            let error = taken_back(app, lock, uid, error);
            keep_room(call, pod, kept, &error);
            return Err(error);
        }
    };
    if let Err(error) = post(call, lock, pod, &placement).await {
        // An earlier Binding of the pod to this node has succeeded.
        if is_bound_there(app, uid, &args.node) {
            return Ok(());
        }
        if matches!(error, BindError::Lost) {
            keep_room(call, pod, kept, &error);
        }
        return Err(error);
    }
    app.tell_placed(pod, &placement);
    app.tell_small(pod, &placement);
    placed(app, pod, &placement);
    Ok(())
}

/// What was kept for a pod before its bind.
#[derive(Clone, Copy)]
enum Kept {
    /// Room until it is bound.
    Standing(KeptFor),
    /// At most a hold.
    Hold,
}

impl Kept {
    fn of(app: &App, uid: &PodUid) -> Self {
        app.ledger.kept_for(uid).map_or(Self::Hold, Self::Standing)
    }
}

/// Keeps the room of a pod that could not be bound yet, so that its next bind gets it. That its instances are
/// not made is no reason to keep it again and again.
fn keep_room(
    call: &Call<'_>,
    pod: &SeenPod,
    (query, kept): (&PlacementRequest, Kept),
    error: &BindError,
) {
    let (Call { app, args, .. }, uid) = (call, &pod.pod.uid);
    if let Kept::Standing(kept_for) = kept {
        let node = NodeName::new(args.node.as_str());
        let first = Holder::first(uid, &pod.namespace, query);
        let holder = Holder { controller: pod.life.controller, kept_for, ..first };
        let (_, events) = app.ledger.stand_again(holder, &node, |_| true);
        app.outbox.push(events);
        // Other pods of the team may have got meanwhile what this one counted.
        let is_counted = app.ledger.count_kept_of((uid, &pod.namespace), query);
        // Looked at last, as the loop that gives room up may do so at any time. What it has given up would
        // never end.
        if is_counted && app.room.preemptors.node(uid).is_some() {
            return;
        }
        app.outbox.push(app.ledger.give_up_room(uid));
    }
    let now = app.clock.now();
    let is_counted =
        matches!(error, BindError::Making | BindError::NotMade { .. } | BindError::Lost);
    if !is_counted || app.may_hold(uid) {
        app.outbox.push(app.ledger.hold(uid, &args.node, query, now));
    }
}

/// Waits until no guest is left on the devices of a pod and its MIG instances are made, and returns its
/// placement.
async fn wait_for_guests(call: &Call<'_>, pod: &PodRef) -> Result<Placement, BindError> {
    let app = call.app;
    let (began, mut waited_for) = (app.clock.precise(), BTreeSet::new());
    let mut was_to_make = false;
    loop {
        let to_post = app.ledger.to_post(&pod.uid).ok_or_else(|| gone(pod))?;
        if to_post.is_gone {
            return Err(ReserveError::Rejection(Rejection::NoDevices).into());
        }
        let waited = app.clock.precise().saturating_sub(began);
        let profiles = to_post.placement.spots.iter().flatten().map(|spot| &spot.profile);
        if to_post.instance == ToMake::Failed {
            app.metrics.mig_ordered(profiles, MakeResult::Failed);
            let cause = app.ledger.why_not_made(&to_post.placement);
            return Err(BindError::NotMade { cause });
        }
        let is_made = to_post.instance == ToMake::Nothing || mutated(Mutation::UnmadeBound);
        let may_go = to_post.waits_for.is_empty() && !to_post.is_short;
        if is_made && (may_go || mutated(Mutation::GuestsIgnored)) {
            if !waited_for.is_empty() {
                app.metrics.recalled_for_bind(waited);
            }
            // All devices of a pod have one profile.
            if let Some(profile) = profiles.clone().next().filter(|_| was_to_make) {
                app.metrics.waited_for_mig(profile, waited);
            }
            app.metrics.mig_ordered(profiles, MakeResult::Made);
            return Ok(to_post.placement);
        }
        was_to_make |= !is_made;
        waited_for.extend(to_post.waits_for);
        let stays =
            |uid: &PodUid| app.room.moves.is_stuck(uid) || app.ledger.stays_with_memory(uid);
        let is_stuck = waited_for.iter().any(stays);
        if is_stuck || waited >= app.config.recall || call.check_time().is_err() {
            return Err(if is_made { BindError::Recalling } else { BindError::Making });
        }
        app.outside.sleep(LOOK_AGAIN).await;
    }
}

fn placed(app: &App, pod: &SeenPod, placement: &Placement) {
    let uid = &pod.pod.uid;
    app.settle_pod(uid);
    let created = u64::try_from(pod.life.created_unix_seconds).unwrap_or(0);
    if let Ok(Some(request)) = &pod.request
        && created > 0
    {
        let waited = app.api_seconds().saturating_sub(created);
        app.metrics.placed(Size::of(request), waited);
    }
    let devices: Vec<&str> = placement.devices.iter().map(|device| device.id.as_str()).collect();
    tracing::info!(
        pod_uid = %uid, pod = %pod.pod, node = %placement.node, devices = devices.join(","), "placed"
    );
}

/// Settles the Binding that an earlier call left undecided, before this call does anything. Whether
/// that Binding bound the pod to the node of this call.
async fn settle_earlier(call: &Call<'_>, lock: &mut BindLock<'_>) -> Result<bool, BindError> {
    let Some(target) = lock.on_its_way.clone() else { return Ok(false) };
    if settle(call.app, lock, &target).await? {
        return Ok(target.node().as_str() == call.args.node);
    }
    taken_back(call.app, lock, target.uid(), BindError::Undecided);
    Ok(false)
}

/// Whether the pod has a Confirmed reservation on this node.
fn is_bound_there(app: &App, uid: &PodUid, node: &str) -> bool {
    let is_it = |held: &Reservation| {
        held.state == ReservationState::Confirmed && held.placement.node.as_str() == node
    };
    app.ledger.reservation(uid).is_some_and(|held| is_it(&held))
}

/// Posts a Binding with this placement.
async fn post(
    call: &Call<'_>,
    lock: &mut BindLock<'_>,
    pod: &SeenPod,
    placement: &Placement,
) -> Result<(), BindError> {
    let (app, uid) = (call.app, &pod.pod.uid);
    let limits = client_limits(app, placement, app.ledger.at_start(uid));
    let target = |pod: &SeenPod| {
        check_reserved(app, uid, placement)?;
        Ok(BindTarget::new(pod, placement, &limits)?)
    };
    decide(call, lock, pod, target).await
}

/// Whether the devices of a pod are still there that are about to be posted: a node may have lost one
/// meanwhile, or a MIG instance, which is made again then.
fn check_reserved(app: &App, uid: &PodUid, placement: &Placement) -> Result<(), BindError> {
    match app.ledger.may_post(uid, placement) || mutated(Mutation::GoneInstanceBound) {
        true => Ok(()),
        false => Err(BindError::Lost),
    }
}

/// Posts the Binding that `target` makes of the pod until it is decided, and updates the ledger. A
/// pod without a GPU request is not in the ledger; it is bound as kube-scheduler would bind it.
async fn decide(
    call: &Call<'_>,
    lock: &mut BindLock<'_>,
    pod: &SeenPod,
    target: impl Fn(&SeenPod) -> Result<BindTarget, BindError>,
) -> Result<(), BindError> {
    let app = call.app;
    let mut pod = match own_version(call, pod).await {
        Ok(pod) => pod,
        Err(error) => return Err(taken_back(app, lock, &pod.pod.uid, error)),
    };
    for _ in 0..ATTEMPTS {
        let announced = announce(call, &pod).await;
        let checked = announced.and_then(|()| call.check_time()).and_then(|()| target(&pod));
        let target = match checked {
            Ok(target) => target,
            Err(error) => return Err(taken_back(app, lock, &pod.pod.uid, error)),
        };
        *lock.on_its_way = Some(target.clone());
        app.binding.unseen_binds.insert(target.uid().clone(), app.clock.precise());
        app.pods.edits.wrote(target.uid(), target.node(), target.annotations());
        match app.writer.bind(&target).await {
            BindOutcome::Bound => {
                settled_bound(app, lock, target.uid());
                return Ok(());
            }
            BindOutcome::Gone => {
                return Err(taken_back(app, lock, target.uid(), gone(target.key())));
            }
            BindOutcome::Refused { code, message } => {
                return Err(taken_back(
                    app,
                    lock,
                    target.uid(),
                    BindError::Refused { code, message },
                ));
            }
            BindOutcome::Conflict => {}
            BindOutcome::Undecided { cause } => {
                tracing::warn!(pod_uid = %target.uid(), %cause, "Binding is undecided");
                if mutated(Mutation::UndecidedForgotten) {
                    return Err(taken_back(app, lock, target.uid(), BindError::Undecided));
                }
            }
        }
        if settle(app, lock, &target).await? {
            return Ok(());
        }
        pod = unbound_again(app, lock, &target, &pod).await?;
    }
    Err(taken_back(app, lock, &pod.pod.uid, BindError::Unsteady))
}

/// Makes sure that a successor of this leader knows that a Binding may be on its way. Nothing is
/// allocated before this process has fenced those of others.
async fn announce(call: &Call<'_>, pod: &SeenPod) -> Result<(), BindError> {
    let Call { app, args, .. } = call;
    if pod.request == Ok(None) {
        return Ok(());
    }
    if app.lead.replica.is_some() {
        let key = PodKey::of(&pod.pod)?;
        app.binding.in_flight.announce(NamedPod::new(&key, &pod.pod.uid, &args.node)).await;
    }
    if app.lead.is_fenced() { Ok(()) } else { Err(BindError::WarmingUp) }
}

/// The pod in a version that no other process wrote last. If a process that is gone did, the pod is
/// fenced first, so that no late Binding of that process can succeed.
async fn own_version(call: &Call<'_>, pod: &SeenPod) -> Result<SeenPod, BindError> {
    let (mut pod, requested) = (pod.clone(), &pod.request);
    if mutated(Mutation::ForeignVersionBound) {
        return Ok(pod);
    }
    for _ in 0..ATTEMPTS {
        match call.app.fenced(&pod) {
            Ordering::Equal if pod.request == *requested => return Ok(pod),
            Ordering::Equal => return Err(BindError::Unsteady),
            Ordering::Greater => return Err(BindError::OtherProcess),
            Ordering::Less => {}
        }
        call.check_time()?;
        let (key, uid, version) = (PodKey::of(&pod.pod)?, &pod.pod.uid, &pod.resource_version);
        let value = format!("own-{version}");
        pod = match call.app.writer.fence_pod(&key, uid, Some(version), &value).await {
            Fenced::Waiting { pod } => *pod,
            Fenced::Open { pod: Some(now), .. } if now.resource_version != *version => *now,
            Fenced::Open { cause, .. } => return Err(BindError::Unfenced { cause }),
            Fenced::Gone => return Err(gone(&key)),
            Fenced::Bound { pod } => {
                see_other_binding(call.app, &pod);
                return Err(BindError::BoundElsewhere);
            }
        };
    }
    Err(BindError::Unsteady)
}

/// The pod in its newest version, for another attempt. Its request must be the same.
async fn unbound_again(
    app: &App,
    lock: &mut BindLock<'_>,
    target: &BindTarget,
    before: &SeenPod,
) -> Result<SeenPod, BindError> {
    let uid = target.uid();
    let read = match app.writer.read_back(target.key()).await {
        Err(cause) => {
            let pod = target.key().to_string();
            return Err(taken_back(app, lock, uid, BindError::Unreadable { pod, cause }));
        }
        Ok(read) => read.map(|pod| SeenPod::judged(&pod, &app.request_rules)),
    };
    let Some(pod) = read.filter(|pod| pod.pod.uid == *uid) else {
        return Err(taken_back(app, lock, uid, gone(target.key())));
    };
    if pod.node.is_some() {
        see_other_binding(app, &pod);
        return Err(taken_back(app, lock, uid, BindError::BoundElsewhere));
    }
    let is_foreign = app.fenced(&pod) != Ordering::Equal;
    if is_foreign && !mutated(Mutation::ForeignVersionAdopted) {
        // That other process may have allocated the room to others.
        return Err(taken_back(app, lock, uid, BindError::OtherProcess));
    }
    if pod.request != before.request {
        return Err(taken_back(app, lock, uid, BindError::Unsteady));
    }
    Ok(pod)
}
