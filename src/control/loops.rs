//! The loops of the control core: ticks, requeues, settled Bindings, evictions, audits, and what a replica does
//! when it begins to lead.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::select;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use tokio::sync::oneshot;

use crate::bind::edits::restoring;
use crate::bind::recall::recall;
use crate::bind::restart_blind::restart_blind;
use crate::bind::settle::settle_abandoned;
use crate::bind::take_back::take_back;
use crate::lead::election::electing;
use crate::pods::chargeback::account;
use crate::pods::ledger_events::tell;
use crate::pods::memory_guard::guarding;
use crate::pods::requeue::RequeueLoop;
use crate::pods::requeue_write::{Note, requeue};
use crate::room::make_room::{make_room, wake, write_note};
use crate::room::standing::{StandingHolds, StandingRules, Step};
use crate::shared::app::App;
use crate::shared::outbox::rooms;
use engine::ledger::query::reading::Readiness;
use engine::model::event::LedgerEvent;
use engine::model::team::TeamRules;
use kube_api::request::room_note::RoomNote;
use runtime::step::outside::Ticks;
use wire::device::DeviceKind;
use wire::mutation::{Mutation, mutated};
use wire::units::{Share, Timestamp};

/// Tick of the slow loop. Silence, holds and drains are exact to this.
const TICK: Duration = Duration::from_secs(1);

/// Ticks between two accounts of what namespaces hold.
const ACCOUNT_EVERY: u64 = 5;

/// Ticks between two audits of the whole ledger.
const AUDIT_EVERY: u64 = 60;

/// Ticks between two looks for guests on their way home, where no pool lends.
const GUESTS_EVERY: u64 = 10;

/// Pause after each choice of pods to requeue, as a multiple of the time that the choice took.
const PAUSE: u32 = 4;

/// The longest such pause: the process may have been frozen meanwhile.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Room that appears within this time is handled together. One API event often brings several.
const GATHER_FOR: Duration = Duration::from_millis(10);

/// The loops run until this is dropped.
pub struct RunningLoops {
    end: oneshot::Sender<()>,
}

impl RunningLoops {
    /// Waits until a loop has panicked.
    pub async fn failed(&mut self) {
        self.end.closed().await;
    }
}

/// Starts the loops, in the steps of the extender's tasks.
#[must_use]
pub fn start(app: &Arc<App>) -> RunningLoops {
    let (end, ended) = oneshot::channel();
    let app = Arc::clone(app);
    let outside = app.outside.clone();
    app.lead.pulse.tick(app.clock.now()); // it can be frozen before its first tick
    outside.spawn(async move {
        let loops = FuturesUnordered::from_iter([
            ticks(&app).boxed(),
            electing(&app).boxed(),
            events(&app).boxed(),
            settling(&app).boxed(),
            restoring(&app).boxed(),
            guarding(&app).boxed(),
            standing(&app).boxed(),
        ]);
        select(ended, loops.collect::<()>()).await;
    });
    RunningLoops { end }
}

async fn ticks(app: &Arc<App>) {
    let mut next = app.outside.every(TICK);
    let (mut was_ready, mut warned) = (false, None);
    for tick in 0_u64.. {
        next.tick().await;
        let now = app.clock.now();
        app.lead.pulse.tick(now);
        app.outbox.push(app.ledger.tick(now));
        app.forget_unseen();
        app.doubt_fits();
        app.take_over_waiting();
        // Where no pool lends any more, guests may be left from before.
        let is_due = app.config.pools.lends() || tick.is_multiple_of(GUESTS_EVERY);
        if is_due && !mutated(Mutation::MoveAbandoned) {
            if app.lead.leading.is_here() && app.lead.is_fenced() {
                app.ledger.call_back();
            }
            recall(app, None);
            take_back(app, None);
        }
        if tick.is_multiple_of(ACCOUNT_EVERY) {
            beside(app, account).await;
        }
        if tick.is_multiple_of(AUDIT_EVERY) {
            beside(app, audit).await;
            warn_of_guarantees(app, &mut warned);
        }
        let is_ready = app.readiness() == Readiness::Ready;
        if is_ready != was_ready {
            tracing::info!(is_ready, "readiness changed");
            was_ready = is_ready;
        }
    }
}

/// Looks at the whole cluster on another thread: no bind waits for that.
async fn beside(app: &Arc<App>, look: fn(&App)) {
    let worker = Arc::clone(app);
    app.outside.work(move || look(&worker)).await.expect("a look panicked: so does its loop");
}

/// Keeps room for the first pods of lines, and makes room for important ones, while this process leads
/// and its ledger is whole.
async fn standing(app: &Arc<App>) {
    let (after, at_most) = (app.config.standing_hold_after, app.config.standing_hold_at_most);
    let preemption = app.config.preemption;
    if !preemption.enabled {
        tracing::info!(
            "no pod is evicted for more important GPU pods: `preemption.enabled` is false"
        );
    }
    let rules = StandingRules { after, at_most, preemption };
    let mut next = app.outside.every(TICK);
    let (mut holds, mut due) = (StandingHolds::default(), None);
    loop {
        until_next_look(app, &mut next, due.take()).await;
        let new_rooms = app.room.new_rooms.take();
        let is_ready = app.lead.leading.is_here() && app.ledger_readiness() == Readiness::Ready;
        if !is_ready {
            app.outbox.push(app.ledger.stand_down_all());
            holds = holds.without_lead();
            if !app.lead.leading.is_here() && !app.room.preemptors.is_following() {
                let noted =
                    app.pods.pending.iter().filter(|pod| pod.annotations.room_note.is_some());
                app.room.preemptors.follow(noted.map(|pod| pod.key().clone()));
            }
            continue;
        }
        let started = app.clock.precise();
        let worker = Arc::clone(app);
        let looked = app.outside.work(move || {
            let unix_seconds = i64::try_from(worker.api_seconds()).unwrap_or(i64::MAX);
            let times = (worker.clock.now(), unix_seconds);
            let facts = (
                &worker.waiting,
                &worker.room.preemptors,
                &*worker.ledger,
                &worker.room.bound_groups,
            );
            let earlier = worker.earlier_rooms();
            let mut resumed = Step::default();
            if !earlier.is_empty() && !mutated(Mutation::RoomNotResumed) {
                resumed = holds.resume(&earlier, facts, (rules, times.0, times.1));
            }
            worker.room.preemptors.lead();
            holds.note_rooms(new_rooms);
            let step = holds.step(facts, rules, times);
            (holds, [resumed, step])
        });
        let Some((kept, steps)) = looked.await else {
            tracing::error!("a bug in the choice of standing holds, please report this");
            app.outbox.push(app.ledger.stand_down_all());
            holds = StandingHolds::default();
            continue;
        };
        holds = kept;
        due = steps.iter().filter_map(|step| step.due).min();
        steps.into_iter().for_each(|step| carry_out(app, step));
        let took = app.clock.precise().saturating_sub(started);
        app.outside.sleep(pause_after(took)).await;
    }
}

/// Waits until kept room is to be looked at again: after a tick, at the time that the last look named, or as soon as
/// room has appeared.
async fn until_next_look(app: &App, ticks: &mut Ticks, due: Option<Timestamp>) {
    let now = app.clock.now();
    let until_due = due.map_or(TICK, |due| due.since(now).min(TICK));
    tokio::select! {
        biased;
        () = app.room.new_rooms.due() => app.outside.sleep(GATHER_FOR).await,
        () = ticks.tick() => {}
        () = app.outside.sleep(until_due) => {}
    }
}

/// Does what a step of the standing holds says.
fn carry_out(app: &Arc<App>, step: Step) {
    app.outbox.push(step.events);
    step.hung.iter().for_each(|hung| app.tell_hung(hung));
    step.ready.into_iter().for_each(|(node, pod)| requeue(app, node, pod));
    for (pod, standing) in step.begun.iter().filter(|(_, standing)| standing.lacks > 0) {
        app.tell_room_kept(pod, standing);
    }
    for (pod, node) in step.given_up {
        tracing::warn!(pod_uid = %pod.uid, %pod, %node, "nothing bound it, or nothing more became free: its room is left to others for a while");
    }
    // First: a pod may have other room by now.
    step.abandoned.into_iter().for_each(|pod| write_note(app, pod, Note::NoRoom));
    for (pod, node) in step.noted {
        write_note(app, pod, Note::Room(RoomNote { node, victims: BTreeSet::new() }));
    }
    step.call_again.into_iter().for_each(|pod| write_note(app, pod, Note::None));
    step.open_hosts.into_iter().for_each(|pod| wake(app, pod));
    step.evict.into_iter().for_each(|order| make_room(app, order));
}

/// Reads what became of Bindings that no caller waits for. The API server may be slow: this loop
/// delays nothing else.
async fn settling(app: &Arc<App>) {
    let mut next = app.outside.every(TICK);
    loop {
        next.tick().await;
        settle_abandoned(app).await;
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

/// Warns once if more is guaranteed to teams than there is.
fn warn_of_guarantees(app: &App, warned: &mut Option<u64>) {
    let Some(guaranteed) = app.ledger.teams.rules().map(TeamRules::guaranteed) else { return };
    let mut gpus = 0_u64;
    app.ledger.look_at_each(|node| {
        let kinds = node.devices().iter().map(|device_state| &device_state.device().kind);
        let physical = kinds.filter(|kind| !matches!(kind, DeviceKind::MigInstance { .. }));
        gpus += physical.map(|_| 1).sum::<u64>();
    });
    let is_too_much = guaranteed.millionths() > gpus.saturating_mul(Share::WHOLE.millionths());
    if is_too_much && app.ledger.is_listed() && *warned != Some(gpus) {
        tracing::warn!(%guaranteed, gpus, "more GPUs are guaranteed to teams than the cluster has: see `shares` in the configuration");
    }
    *warned = is_too_much.then_some(gpus);
}

async fn events(app: &Arc<App>) {
    let mut requeues = RequeueLoop::default();
    loop {
        let taken = tokio::select! {
            biased;
            taken = app.outbox.take() => taken,
            () = app.outbox.nudged() => Vec::new(),
            () = app.outside.sleep(requeues.rest(app.clock.now())) => Vec::new(),
        };
        if !taken.is_empty() {
            app.outside.sleep(GATHER_FOR).await;
        }
        if !app.lead.leading.is_here() {
            note_made_again(app, &taken);
            until_leading(app).await;
            requeues = RequeueLoop::default();
            continue;
        }
        for event in &taken {
            tell(app, event);
            if let LedgerEvent::Blind { pod, .. } = event {
                restart_blind(app, pod);
            }
        }
        let rooms = rooms(&taken);
        app.room.new_rooms.note(&rooms);
        requeues.room(rooms, app.clock.now());
        requeues = requeued(app, requeues).await;
    }
}

/// Lets another replica handle what appears until this one leads. Room that appeared meanwhile is
/// looked for.
async fn until_leading(app: &App) {
    let mut leader = app.lead.leading.subscribe();
    while !app.lead.leading.is_here() {
        tokio::select! {
            biased;
            _ = leader.changed() => {}
            taken = app.outbox.take() => note_made_again(app, &taken), // the leader sees the same
        }
    }
    app.waiting.change_all();
    app.waiting.take_over();
}

/// Notes the MIG instances that were made again. The leader writes their UUIDs, unless it ends before: then its
/// successor does.
fn note_made_again(app: &App, taken: &[LedgerEvent]) {
    for event in taken {
        if let LedgerEvent::MadeAgain { pod } = event {
            app.pods.edits.note_made_again(pod, app.clock.now());
        }
    }
}

/// Requeues the pods that are due. It chooses them off the threads that answer calls, and pauses
/// afterwards: it takes a fifth of a core at most, however much room appears.
async fn requeued(app: &Arc<App>, mut requeues: RequeueLoop) -> RequeueLoop {
    let started = app.clock.precise();
    let worker = Arc::clone(app);
    let chosen = app.outside.work(move || {
        let step = requeues.step(&worker.waiting, &worker.ledger, worker.clock.now());
        (requeues, step)
    });
    let Some((requeues, step)) = chosen.await else {
        tracing::error!("a bug in the choice of pods to requeue, please report this");
        app.waiting.change_all();
        return RequeueLoop::default();
    };
    step.ended.into_iter().for_each(|ended| app.requeued(Some(ended)));
    for (node, pod) in step.requeues {
        requeue(app, node, pod);
    }
    app.outside.sleep(pause_after(app.clock.precise().saturating_sub(started))).await;
    requeues
}

/// The pause after a choice that took so long.
fn pause_after(took: Duration) -> Duration {
    (PAUSE * took).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freeze_during_a_choice_does_not_prolong_the_pause() {
        let millis = Duration::from_millis;
        assert_eq!(pause_after(millis(5)), millis(20), "a fifth of a core");
        assert_eq!(pause_after(millis(7_000)), millis(1_000));
    }
}
