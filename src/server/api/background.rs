//! Background loops: ticks, requeues, settled Bindings, audits. Each loop ends when `stop` is set.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::api::moves::MoveProposals;
use crate::control::bind::edits::{restoring, tell_edited};
use crate::control::bind::settle::settle_abandoned;
use crate::control::bind::start_fence::fence;
use crate::control::pods::memory_guard::{
    OverLimitUse, guarding, report_over_limit, report_untracked_memory, report_unverified_isolation,
};
use crate::control::pods::proposals::proposals;
use crate::control::pods::reasons::explaining;
use crate::control::pods::requeue::RequeueLoop;
use crate::control::pods::requeue_write::requeue;
use crate::control::pods::teams;
use crate::control::shared::app::{App, Truth};
use crate::control::shared::log_limit::LogLimit;
use crate::control::shared::outbox::rooms;
use crate::hardware::device::{DeviceId, Health, NodeName};
use crate::kube_api::write::events::NoticeReason;
use crate::ledger::query::reading::Readiness;
use crate::ledger::suggest::displacement::MOST_MOVES;
use crate::model::event::LedgerEvent;
use crate::server::history::recall::recalling;

/// Tick of the slow loop. Silence, holds and drains are exact to this.
const TICK: Duration = Duration::from_secs(1);

/// Ticks between two accounts of what teams hold.
const ACCOUNT_EVERY: u64 = 5;

/// Ticks between two audits of the whole ledger.
const AUDIT_EVERY: u64 = 60;

/// Pause between two searches for moves that would help.
const PROPOSE_EVERY: Duration = Duration::from_secs(30);

/// Pause after each choice of pods to requeue, as a multiple of the time that the choice took.
const PAUSE: u32 = 4;

/// Room that appears within this time is handled together. One API event often brings several.
const GATHER_FOR: Duration = Duration::from_millis(10);

/// Runs all loops until `stop`.
pub async fn run(app: Arc<App>, stop: watch::Receiver<bool>) {
    let mut stop = stop;
    tokio::select! {
        () = ticks(&app) => {}
        () = async { fence(&app).await; std::future::pending::<()>().await } => {}
        () = events(&app) => {}
        () = settling(&app) => {}
        () = restoring(&app) => {}
        () = proposing(&app) => {}
        () = guarding(&app) => {}
        () = explaining(&app) => {}
        () = async { recalling(&app).await; std::future::pending::<()>().await } => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

async fn ticks(app: &Arc<App>) {
    let mut interval = tokio::time::interval(TICK);
    let mut was_ready = false;
    for tick in 0_u64.. {
        interval.tick().await;
        let now = app.clock.now();
        app.outbox.push(app.ledger.tick(now));
        app.forget_unseen();
        app.take_over_waiting();
        if tick.is_multiple_of(ACCOUNT_EVERY) {
            teams::account(app);
        }
        if tick.is_multiple_of(AUDIT_EVERY) {
            audit(app);
        }
        let is_ready = app.readiness() == Readiness::Ready;
        if is_ready != was_ready {
            tracing::info!(is_ready, "readiness changed");
            was_ready = is_ready;
        }
    }
}

/// Reads what became of Bindings that no caller waits for. The API server may be slow: this loop
/// delays nothing else.
async fn settling(app: &Arc<App>) {
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        settle_abandoned(app).await;
    }
}

/// Keeps the figures about moves fresh, off the threads that answer calls.
async fn proposing(app: &Arc<App>) {
    let mut interval = tokio::time::interval(PROPOSE_EVERY);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let worker = Arc::clone(app);
        let found = tokio::task::spawn_blocking(move || proposals(&worker)).await;
        let Ok(MoveProposals { to_place, to_empty, .. }) = found else { continue };
        let mut placeable = [0; MOST_MOVES];
        for proposal in to_place {
            if let Some(pods) = placeable.get_mut(proposal.moves.len() - 1) {
                *pods += proposal.pods;
            }
        }
        app.metrics.set_moves(&placeable, to_empty.len());
    }
}

/// Compares the derived sums of every node with their sources.
fn audit(app: &App) {
    let faults = app.ledger.audit().err().unwrap_or_default();
    app.metrics.audited(faults.len());
    for fault in faults {
        tracing::error!(%fault, "the ledger's own arithmetic is broken, please report this");
    }
}

async fn events(app: &Arc<App>) {
    let mut requeues = RequeueLoop::default();
    loop {
        let taken = tokio::select! {
            taken = app.outbox.take() => taken,
            () = app.outbox.nudged() => Vec::new(),
            () = tokio::time::sleep(requeues.rest(app.clock.now())) => Vec::new(),
        };
        if !taken.is_empty() {
            tokio::time::sleep(GATHER_FOR).await;
        }
        for event in &taken {
            tell(app, event);
        }
        if let Truth::Cluster(_) = app.truth {
            requeues.room(rooms(&taken), app.clock.now());
            requeues = requeued(app, requeues).await;
        }
    }
}

/// Requeues the pods that are due. It chooses them off the threads that answer calls, and pauses
/// afterwards: it takes a fifth of a core at most, however much room appears.
async fn requeued(app: &Arc<App>, mut requeues: RequeueLoop) -> RequeueLoop {
    let started = app.clock.precise();
    let worker = Arc::clone(app);
    let work = move || {
        let step = requeues.step(&worker.waiting, &worker.ledger, worker.clock.now());
        (requeues, step)
    };
    let Ok((requeues, step)) = tokio::task::spawn_blocking(work).await else {
        tracing::error!("a bug in the choice of pods to requeue, please report this");
        app.waiting.change_all();
        return RequeueLoop::default();
    };
    step.ended.into_iter().for_each(|ended| app.requeued(Some(ended)));
    for (node, pod) in step.requeues {
        requeue(app, node, pod);
    }
    tokio::time::sleep(PAUSE * app.clock.precise().saturating_sub(started)).await;
    requeues
}

/// Whether a line about a report may be written now; then how many were left out since the last. An
/// agent can report another inventory each time.
fn admitted(app: &App, reason: &'static str) -> Option<u64> {
    static LOGGED: LogLimit = LogLimit::new();
    LOGGED.admits(("report", reason), app.clock.precise())
}

fn tell(app: &App, event: &LedgerEvent) {
    match event {
        LedgerEvent::Room(_) => {}
        LedgerEvent::Overallocated { node, device } => {
            if let Some(left_out) = admitted(app, "overallocated") {
                tracing::error!(%node, %device, left_out, "more is allocated on a device than it has: bound by others, a smaller replacement, or a forged annotation");
            }
            let note = format!(
                "its device {device} on node {node} is overallocated: gpupack places nothing more there and removes nothing"
            );
            tell_tenants(app, node, device, NoticeReason::Overallocated, &note);
        }
        LedgerEvent::DeviceLost { node, device, health } => {
            let what = match health {
                None => "has vanished",
                Some(Health::KubeletOwned) => "is allocated by kubelet, also to other pods",
                Some(Health::Healthy | Health::Unhealthy) => "is ill",
            };
            if let Some(left_out) = admitted(app, what) {
                tracing::error!(%node, %device, left_out, "a device that holds pods {what}");
            }
            let note = format!(
                "its device {device} on node {node} {what}: it stays allocated, nothing more is placed there"
            );
            tell_tenants(app, node, device, NoticeReason::DeviceLost, &note);
        }
        LedgerEvent::Impossible { node, device, fault } => {
            if let Some(left_out) = admitted(app, "impossible") {
                tracing::error!(%node, %device, %fault, left_out, "an impossible MIG instance is reported: gpupack places nothing on it");
            }
        }
        LedgerEvent::Unplaced { pod, node } => {
            tracing::warn!(pod_uid = %pod.uid, %pod, %node, "a pod with a GPU request runs without a placement of gpupack: only its observed use counts");
            let note = format!(
                "runs on node {node} without a placement of gpupack: only the memory that it is seen to use counts"
            );
            app.tell(pod, NoticeReason::PlacedByOthers, note);
        }
        LedgerEvent::PlacementEdited { pod, node } => tell_edited(app, pod, node),
        LedgerEvent::Overuse { node, device, pod, used, allowed } => {
            report_over_limit(app, pod, *allowed, &OverLimitUse { node, device, used: *used });
        }
        LedgerEvent::Untracked { node, device, used } => {
            report_untracked_memory(app, &OverLimitUse { node, device, used: *used });
        }
        LedgerEvent::NoIsolation { node, device, pod, configured, limit } => {
            report_unverified_isolation(app, pod, (*configured, *limit), (node, device));
        }
        LedgerEvent::NotReporting(node) => {
            tracing::warn!(%node, "the node's agent is not reporting: the node gets no new pods");
        }
    }
}

fn tell_tenants(app: &App, node: &NodeName, device: &DeviceId, reason: NoticeReason, note: &str) {
    for pod in app.ledger.tenants(node.as_str(), device) {
        app.tell(&pod, reason, note.to_owned());
    }
}
