//! For which waiting pods less important ones are evicted, and which.
//!
//! A pod of ours that may preempt, and that was refused for want of GPU room on nodes that
//! kube-scheduler accepts, or for which kube-scheduler would evict pods. The room is kept from the
//! first eviction until the pod is bound. So no pod ends in vain, and never a second one for the
//! same room.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::room::owners::Owner;
use crate::room::standing::{
    Evictions, Facts, GROUP_TIMEOUT, Held, InVain, Line, RoomOrder, StandingHolds, StandingRules,
    Step, earlier,
};
use engine::ledger::nodes::state::Ledger;
use engine::ledger::nodes::teams::{OverQuota, TeamPod};
use engine::ledger::suggest::preemption::{FoundRoom, PlannedVictims, RoomRequest};
use engine::ledger::suggest::preemptors::{Ended, Preemptors};
use engine::ledger::suggest::standing::Holder;
use engine::ledger::suggest::together::group_key;
use engine::ledger::suggest::waiting::{WaitingPod, WaitingPods, WaitingState};
use engine::model::device_state::KeptFor;
use engine::model::reservation::Tenure;
use engine::model::workload::Protection;
use kube_api::config::preemption::PreemptionConfig;
use kube_api::request::room_note::{MOST_VICTIMS, RoomNote};
use wire::ids::PodUid;
use wire::units::Timestamp;

/// Pods for which one step searches all nodes.
const SEARCHES: usize = 16;

/// A pod that a budget protects is not tried again for this long.
const PROTECTED_FOR: Duration = Duration::from_secs(30);

/// Nor for this long, if others went and it could not.
const PARTLY_FOR: Duration = Duration::from_secs(600);

/// A line for whose pods no room can be made is not looked at again for this long; each time for twice as
/// long, up to the second.
const IN_VAIN_FOR: Duration = Duration::from_secs(5);
const LONGEST_IN_VAIN: Duration = Duration::from_secs(60);

/// By how much a time of creation may be too early.
const SECOND: Duration = Duration::from_secs(1);

/// How long a pod waits for room that others leave anyway. They may take hours to end.
const AWAITS_FOR: Duration = Duration::from_secs(60);

/// How long nothing is evicted after the API server said that gpupack may not.
const DENIED_FOR: Duration = Duration::from_secs(600);

/// Protected pods, and pods that searched in vain, that are remembered.
const MOST_REMEMBERED: usize = 10_000;

impl StandingHolds {
    /// Goes on with the room that an earlier process was making, as far as it still can be made.
    /// Returns what is to be done.
    pub fn resume(
        &mut self,
        noted: &[(PodUid, RoomNote)],
        facts: Facts<'_>,
        (rules, now, unix_seconds): (StandingRules, Timestamp, i64),
    ) -> Step {
        let (waiting, preemptors, ledger, bound) = facts;
        let mut step = Step::default();
        let noted = noted.iter().filter_map(|(uid, note)| Some((waiting.pod(uid)?.waiting, note)));
        let mut noted: Vec<(WaitingPod, &RoomNote)> = noted.collect();
        let kept_for =
            |pod: &WaitingPod, note: &RoomNote| match (&pod.group, note.victims.is_empty()) {
                (Some(_), _) => KeptFor::Group,
                (None, false) => KeptFor::Preemptor,
                (None, true) => KeptFor::Line,
            };
        noted.sort_by(|(a, of), (b, other)| {
            (kept_for(a, of), a.order()).cmp(&(kept_for(b, other), b.order()))
        });
        for (pod, note) in noted {
            let uid = &pod.pod.uid;
            if let Some(group) = &pod.group {
                // Others of it run already: it goes on. Else all of it, or none.
                let again = (bound.count_of(&group_key(&pod.namespace, group)) > 0).then(|| {
                    ledger.stand_again(Holder::of(&pod, KeptFor::Group), &note.node, |_| true)
                });
                let until = Some(now.plus(GROUP_TIMEOUT));
                self.go_on(&pod, again, until, (preemptors, ledger), now, &mut step);
                continue;
            }
            if note.victims.is_empty() {
                self.stand_again(&pod, &note.node, facts, (rules, now, unix_seconds), &mut step);
                continue;
            }
            let has_gone = |victim: &PodUid| !ledger.has_pod(victim) || ledger.is_leaving(victim);
            if !rules.preemption.enabled || !note.victims.iter().any(has_gone) {
                step.abandoned.push(pod); // none has gone: it begins as any other
                continue;
            }
            let (over, of) = (ledger.teams.over_quota(), ledger.team_pod(&pod));
            let victim = |uid: &PodUid, tenure: Tenure, has_gpu: bool| {
                let is_noted = pod.may_preempt && note.victims.contains(uid);
                let facts = (&over, &of);
                let is_open =
                    is_noted && !is_protected((uid, tenure), facts, rules.preemption, unix_seconds);
                over.victim(&of, uid, tenure, has_gpu).filter(|_| is_open)
            };
            let (none, leaving) = (PlannedVictims::new(), self.leaving(preemptors, pod.priority));
            let request = RoomRequest {
                uid,
                namespace: &pod.namespace,
                query: &pod.query,
                named: None,
                planned: &none,
                victim: &victim,
                leaving: &leaving,
                leaving_is_gone: true,
                is_passed: &|_| false,
            };
            let found = ledger.find_room_again(&note.node, &request);
            let is_kept = found
                .is_some_and(|found| self.begin(&pod, found, facts, (true, &over), now, &mut step));
            if !is_kept {
                self.pause(uid, now); // some went, and no second set of pods goes for it soon
                step.abandoned.push(pod);
            }
        }
        step
    }

    /// Chooses pods to evict.
    pub(crate) fn make_room(
        &mut self,
        facts: Facts<'_>,
        rules: PreemptionConfig,
        (now, unix_seconds): (Timestamp, i64),
        step: &mut Step,
    ) {
        let (waiting, preemptors, ledger, _) = facts;
        self.settle_ended(facts, now, step);
        let evictions = &mut self.evictions;
        evictions.protected.retain(|_, until| *until > now);
        evictions.lines.retain(|_, it| now.since(it.until) < LONGEST_IN_VAIN);
        evictions.awaits.retain(|uid, _| waiting.has(uid));
        evictions.denied = evictions.denied.filter(|until| *until > now);
        if self.evictions.denied.is_some() {
            return;
        }
        // Times of creation are whole seconds.
        let created_by = earlier(unix_seconds, rules.after + SECOND);
        let due: Cell<Option<Timestamp>> = Cell::new(None);
        let is_old = |state: &WaitingState| {
            let old_at = state.refused_since.map(|since| since.plus(rules.after));
            // Of one that another process refused, the age counts.
            let is_old =
                old_at.map_or(state.waiting.created_unix_seconds <= created_by, |at| at <= now);
            if !is_old {
                due.set([due.get(), old_at].into_iter().flatten().min());
            }
            is_old
        };
        let (mut lowest, mut searches) = (None, 0);
        loop {
            let mut firsts = waiting.firsts_apart(
                |it| self.may_evict(it, is_old, facts, now),
                |pod| ledger.team_line(pod),
            );
            step.due = due.get();
            if firsts.is_empty() {
                return;
            }
            let over = ledger.teams.over_quota();
            firsts.sort_by_key(|first| !ledger.team_pod(&first.waiting).is_guaranteed);
            let mut is_found = false;
            for first in firsts {
                let pod = &first.waiting;
                let is_owed = ledger.team_pod(pod).is_guaranteed;
                let made = self.rooms_made(pod, is_owed, waiting, ledger);
                if searches >= SEARCHES {
                    return;
                }
                if made >= rules.at_once {
                    continue;
                }
                let lowest = *lowest.get_or_insert_with(|| ledger.lowest_priority());
                let is_planned = preemptors.planned(&pod.pod.uid, now).is_some();
                let is_lowest =
                    lowest.is_none_or(|lowest| pod.priority <= lowest) && !is_planned && !is_owed;
                let mut is_kept = false;
                if first.named.is_none() && !is_planned && !is_lowest {
                    self.call_again(pod, step);
                } else if !is_lowest {
                    searches += 1;
                    if let Some(found) =
                        self.search(&first, facts, (rules, &over), (now, unix_seconds))
                    {
                        is_kept = self.begin(pod, found, facts, (false, &over), now, step);
                    }
                }
                if !is_kept {
                    self.evictions.note_in_vain(&first, (is_planned, ledger.team_line(pod)), now);
                }
                is_found |= is_kept;
            }
            if !is_found {
                return;
            }
        }
    }

    /// Whether pods may be evicted for a pod now. `is_old` says whether it was refused for long enough.
    fn may_evict(
        &self,
        state: &WaitingState,
        is_old: impl Fn(&WaitingState) -> bool,
        (_, preemptors, ledger, _): Facts<'_>,
        now: Timestamp,
    ) -> bool {
        let pod = &state.waiting;
        let uid = &pod.pod.uid;
        let lacks_room = || state.closest().is_some_and(|(why, _)| why.is_met_by_room());
        let is_refused = || state.is_answered && is_old(state);
        let is_planned = || preemptors.planned(uid, now).is_some();
        pod.may_preempt
            && pod.group.is_none()
            && ((lacks_room() && is_refused()) || is_planned())
            && !self.held.get(uid).is_some_and(Held::is_made)
            && !self.is_paused(uid, now)
            && !self.owners.is_paused(&Owner::of(pod, ledger), [pod], now)
            // It may still name other pods. A room could not be noted either.
            && !preemptors.is_note_open(uid)
            && !self.evictions.is_in_vain(state, (is_planned(), ledger.team_line(pod)), now)
            && ledger.team_may_have(pod)
    }

    /// How many rooms are being made before that of a pod. Those for less important pods are in the way of
    /// none; only those of other guaranteed pods are in the way of one that is guaranteed.
    fn rooms_made(
        &self,
        pod: &WaitingPod,
        is_owed: bool,
        waiting: &WaitingPods,
        ledger: &Ledger,
    ) -> usize {
        let is_guaranteed = |other: &PodUid| {
            waiting.pod(other).is_some_and(|other| ledger.team_pod(&other.waiting).is_guaranteed)
        };
        let counts = |(other, held): &(&PodUid, &Held)| match is_owed {
            true => is_guaranteed(other),
            false => held.priority() >= pod.priority,
        };
        self.held.iter().filter(|(_, held)| held.is_made()).filter(counts).count()
    }

    /// Has kube-scheduler call for a pod whose nodes this process does not know, once.
    pub(crate) fn call_again(&mut self, pod: &WaitingPod, step: &mut Step) {
        let called = &mut self.evictions.called;
        if called.len() < MOST_REMEMBERED && called.insert(pod.pod.uid.clone()) {
            step.call_again.push(pod.clone());
        }
    }

    /// Takes in how evictions ended before the first pod went.
    fn settle_ended(
        &mut self,
        (waiting, preemptors, ledger, _): Facts<'_>,
        now: Timestamp,
        step: &mut Step,
    ) {
        for (uid, ended) in preemptors.take_ended() {
            let Some(held) = self.held.remove(&uid) else { continue };
            if !held.is_made() {
                self.held.insert(uid, held);
                continue;
            }
            step.events.extend(ledger.give_up_room(&uid));
            step.abandon(&uid, waiting, preemptors);
            match ended {
                Ended::Protected(pods) => self.evictions.protect(pods, now.plus(PROTECTED_FOR)),
                Ended::Partly(pods) => {
                    self.evictions.protect(pods, now.plus(PARTLY_FOR));
                    self.pause(&uid, now);
                }
                Ended::Again => {}
                Ended::Denied => self.evictions.denied = Some(now.plus(DENIED_FOR)),
                Ended::Failed => self.pause(&uid, now),
            }
        }
    }

    /// The pods that have been asked to go, or are about to be: not for a room that a pod of this priority
    /// may take over, before they are asked.
    fn leaving(&self, preemptors: &Preemptors, priority: i32) -> BTreeSet<PodUid> {
        let stays = |(uid, held): &(&PodUid, &Held)| {
            held.priority() >= priority || preemptors.is_asked(uid)
        };
        let rooms = self.held.iter().filter(stays);
        rooms.filter_map(|(_, held)| held.victims.as_ref()).flatten().cloned().collect()
    }

    fn search(
        &mut self,
        WaitingState { waiting: pod, named, .. }: &WaitingState,
        (waiting, preemptors, ledger, _): Facts<'_>,
        (rules, over): (PreemptionConfig, &OverQuota),
        (now, unix_seconds): (Timestamp, i64),
    ) -> Option<FoundRoom> {
        let uid = &pod.pod.uid;
        let planned = preemptors.planned(uid, now).unwrap_or_default();
        let is_free = |victim: &PodUid| !self.evictions.protected.contains_key(victim);
        let may_go = |victim: &PodUid| is_free(victim) && !ledger.is_hung(victim);
        let mut planned: PlannedVictims = PlannedVictims::clone(&planned);
        planned.retain(|_, victims| victims.iter().all(may_go));
        let of = ledger.team_pod(pod);
        let victim = |uid: &PodUid, tenure: Tenure, has_gpu: bool| {
            let is_open =
                is_free(uid) && !is_protected((uid, tenure), (over, &of), rules, unix_seconds);
            over.victim(&of, uid, tenure, has_gpu).filter(|_| is_open)
        };
        let is_less = |other: &PodUid| {
            let held = self.held.get(other);
            held.is_some_and(|held| held.may_be_passed_by(pod, other, waiting, ledger))
        };
        let leaving = self.leaving(preemptors, pod.priority);
        let awaits = self.evictions.awaits.get(uid).copied();
        let request = RoomRequest {
            uid,
            namespace: &pod.namespace,
            query: &pod.query,
            named: named.as_deref(),
            planned: &planned,
            victim: &victim,
            leaving: &leaving,
            leaving_is_gone: awaits.is_none_or(|since| now.since(since) < AWAITS_FOR),
            is_passed: &is_less,
        };
        let found = ledger.find_room(&request)?;
        if found.victims.is_empty() && found.passed.is_empty() {
            // It is free, or will be: the pod is requeued then.
            self.evictions.awaits.entry(uid.clone()).or_insert(now);
            return None;
        }
        (found.victims.len() <= MOST_VICTIMS).then_some(found)
    }

    /// Keeps the room that was found, and orders the evictions. Returns whether it is kept.
    fn begin(
        &mut self,
        pod: &WaitingPod,
        found: FoundRoom,
        (waiting, preemptors, ledger, _): Facts<'_>,
        (is_begun, over): (bool, &OverQuota),
        now: Timestamp,
        step: &mut Step,
    ) -> bool {
        let uid = &pod.pod.uid;
        let of = ledger.team_pod(pod);
        let victims = found.victims.iter().map(|victim| &victim.uid);
        let owed: BTreeSet<PodUid> =
            victims.filter(|uid| over.is_owed_by(uid, &of)).cloned().collect();
        // It may count more there than its request does alone.
        let charge = ledger.room_charge(pod, &found);
        let is_owed = owed.is_empty() || ledger.teams.guarantees(uid, &pod.namespace, charge);
        if !is_owed || !ledger.teams.fits_limit(uid, &pod.namespace, charge) {
            return false;
        }
        let (is_kept, events) = ledger.keep_found(uid, &found);
        step.events.extend(events);
        if !is_kept || !ledger.count_kept(pod) {
            step.events.extend(ledger.stand_down(uid));
            return false;
        }
        // What was evicted for less important ones is for this pod now.
        let mut gone = BTreeSet::new();
        for other in &found.passed {
            let victims = self.held.get(other).and_then(|held| held.victims.clone());
            let was_asked = self.pass(other, (waiting, preemptors), now, step);
            gone.extend(victims.into_iter().flatten().filter(|_| was_asked));
        }
        gone.extend(found.victims.iter().map(|victim| victim.uid.clone()));
        let after = preemptors.unasked_on(&found.node);
        let number = preemptors.begin(uid, (found.node.clone(), pod.priority), gone.clone());
        let mut held = Held::made(pod, &found, gone, (now, ledger));
        held.wait = self.owners.wait(&held.owner, held.wait);
        self.owners.begin(&held.owner, now);
        self.held.insert(uid.clone(), held);
        if is_begun || found.victims.is_empty() {
            preemptors.ask(uid, number);
        }
        let FoundRoom { node, victims, .. } = found;
        if !victims.is_empty() {
            let pod = pod.clone();
            step.evict.push(RoomOrder { pod, number, node, victims, owed, is_begun, after });
        }
        true
    }
}

/// Whether a pod may not be evicted for this one yet.
fn is_protected(
    (uid, tenure): (&PodUid, Tenure),
    (over, preemptor): (&OverQuota, &TeamPod),
    rules: PreemptionConfig,
    unix_seconds: i64,
) -> bool {
    let default = i64::try_from(rules.protect.as_secs()).unwrap_or(i64::MAX);
    let (started, is_owed) = (tenure.started_unix_seconds, over.is_owed_by(uid, preemptor));
    Protection::holds(tenure.protection, started, unix_seconds, default, is_owed)
}

impl Evictions {
    fn protect(&mut self, pods: BTreeSet<PodUid>, until: Timestamp) {
        let room = MOST_REMEMBERED.saturating_sub(self.protected.len());
        self.protected.extend(pods.into_iter().take(room).map(|pod| (pod, until)));
    }

    /// The line of a pod. A plan is for one pod.
    fn line(state: &WaitingState, (is_planned, team): (bool, Option<(String, bool)>)) -> Line {
        let named = state.named.as_ref().map_or(0, |named| Arc::as_ptr(named).addr());
        let of = if is_planned { Err(state.waiting.pod.uid.clone()) } else { Ok(named) };
        (state.waiting.query.clone(), of, team)
    }

    /// Whether no room could be made for a pod of this line, of this priority or above.
    fn is_in_vain(
        &self,
        state: &WaitingState,
        of: (bool, Option<(String, bool)>),
        now: Timestamp,
    ) -> bool {
        let known = self.lines.get(&Self::line(state, of));
        known.is_some_and(|it| it.until > now && state.waiting.priority <= it.priority)
    }

    fn note_in_vain(
        &mut self,
        state: &WaitingState,
        of: (bool, Option<(String, bool)>),
        now: Timestamp,
    ) {
        let line = Self::line(state, of);
        let next = self.lines.get(&line).map_or(IN_VAIN_FOR, |it| it.next);
        if self.lines.len() < MOST_REMEMBERED || self.lines.contains_key(&line) {
            let priority = state.waiting.priority;
            let (until, next) = (now.plus(next), (2 * next).min(LONGEST_IN_VAIN));
            let _named = state.named.clone();
            self.lines.insert(line, InVain { priority, until, next, _named });
        }
    }
}

#[cfg(test)]
mod tests;
