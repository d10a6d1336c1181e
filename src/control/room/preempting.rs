//! For which waiting pods less important ones are evicted, and which.
//!
//! A pod of ours that may preempt, and that was refused for want of GPU room on nodes that
//! kube-scheduler accepts, or for which kube-scheduler would evict pods. The room is kept from the
//! first eviction until the pod is bound. So no pod ends in vain, and never a second one for the
//! same room.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::config::guard::PreemptionConfig;
use crate::control::room::standing::{Facts, Held, RoomOrder, StandingHolds, StandingRules, Step};
use crate::hardware::device::PodUid;
use crate::hardware::units::Timestamp;
use crate::kube_api::request::room_note::{MOST_VICTIMS, RoomNote};
use crate::ledger::suggest::preemption::{FoundRoom, PlannedVictims, RoomRequest};
use crate::ledger::suggest::preemptors::Ended;
use crate::ledger::suggest::waiting::{WaitingPod, WaitingState};
use crate::model::reservation::Tenure;

/// Pods for which one step searches all nodes.
const SEARCHES: usize = 16;

/// A pod that a budget protects is not tried again for this long.
const PROTECTED_FOR: Duration = Duration::from_secs(30);

/// A pod for which no room can be made is not looked at again for this long.
const IN_VAIN_FOR: Duration = Duration::from_secs(5);

/// How long nothing is evicted after the API server said that gpupack may not.
const DENIED_FOR: Duration = Duration::from_secs(600);

/// Protected pods, and pods that searched in vain, that are remembered.
const MOST_REMEMBERED: usize = 10_000;

impl StandingHolds {
    /// Goes on with the room that an earlier process was making, as far as it still can be made.
    /// Returns what is to be done.
    pub fn resume(
        &mut self,
        earlier: &[(PodUid, RoomNote)],
        facts: Facts<'_>,
        (rules, now, unix_seconds): (StandingRules, Timestamp, i64),
    ) -> Step {
        let (waiting, preemptors, ledger, _) = facts;
        let mut step = Step::default();
        let noted =
            earlier.iter().filter_map(|(uid, note)| Some((waiting.pod(uid)?.waiting, note)));
        let mut noted: Vec<(WaitingPod, &RoomNote)> = noted.collect();
        noted.sort_by(|(a, _), (b, _)| a.order().cmp(&b.order()));
        for (pod, note) in noted {
            let uid = &pod.pod.uid;
            if pod.group.is_some() {
                step.abandoned.push(pod); // all of its group, or none
                continue;
            }
            if note.victims.is_empty() {
                self.stand_again(&pod, &note.node, facts, (rules, now, unix_seconds), &mut step);
                continue;
            }
            if !rules.preemption.enabled {
                step.abandoned.push(pod);
                continue;
            }
            let noted = |uid: &PodUid, _: Tenure| note.victims.contains(uid);
            let (none, leaving) = (PlannedVictims::new(), self.leaving());
            let may_evict: &dyn Fn(&PodUid, Tenure) -> bool =
                if pod.may_preempt { &noted } else { &|_, _| false };
            let request = RoomRequest {
                uid,
                query: &pod.query,
                priority: pod.priority,
                named: None,
                planned: &none,
                may_evict,
                leaving: &leaving,
                is_passed: &|_| false,
            };
            let found = ledger.find_room_again(&note.node, &request);
            if found.is_some_and(|found| self.begin(&pod, found, facts, true, now, &mut step)) {
                preemptors.ask(uid);
            } else {
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
        evictions.in_vain.retain(|_, until| *until > now);
        evictions.denied = evictions.denied.filter(|until| *until > now);
        if self.evictions.denied.is_some() {
            return;
        }
        let after = i64::try_from(rules.after.as_secs()).unwrap_or(i64::MAX);
        let created_by = unix_seconds.saturating_sub(after);
        let may = |holds: &Self, state: &WaitingState| {
            let WaitingState { waiting: pod, named, .. } = state;
            let uid = &pod.pod.uid;
            let lacks_room = || state.closest().is_some_and(|(why, _)| why.is_met_by_room());
            let is_refused = || named.is_some() && pod.created_unix_seconds <= created_by;
            pod.may_preempt
                && pod.group.is_none()
                && ((is_refused() && lacks_room()) || preemptors.planned(uid, now).is_some())
                && !holds.held.get(uid).is_some_and(Held::is_made)
                && !holds.is_paused(uid, now)
                && !holds.evictions.in_vain.contains_key(uid)
        };
        let mut lowest = None;
        let mut searches = 0;
        loop {
            let firsts = waiting.firsts(|state| may(self, state));
            let mut is_found = false;
            for first in firsts {
                let made = self.held.values().filter(|held| held.is_made()).count();
                if searches >= SEARCHES || made >= rules.at_once {
                    return;
                }
                let lowest = *lowest.get_or_insert_with(|| ledger.lowest_priority());
                let uid = &first.waiting.pod.uid;
                let is_lowest = lowest.is_none_or(|lowest| first.waiting.priority <= lowest)
                    && preemptors.planned(uid, now).is_none();
                searches += usize::from(!is_lowest);
                let found = if is_lowest {
                    None
                } else {
                    self.search(&first, facts, rules, (now, unix_seconds))
                };
                is_found |= found.is_some_and(|found| {
                    self.begin(&first.waiting, found, facts, false, now, step)
                });
                if !preemptors.has(uid) && self.evictions.in_vain.len() < MOST_REMEMBERED {
                    self.evictions.in_vain.insert(uid.clone(), now.plus(IN_VAIN_FOR));
                }
            }
            if !is_found {
                return;
            }
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
            step.events.extend(ledger.stand_down(&uid));
            step.abandon(&uid, waiting, preemptors);
            match ended {
                Ended::Protected(pods) => {
                    let room = MOST_REMEMBERED.saturating_sub(self.evictions.protected.len());
                    let until = now.plus(PROTECTED_FOR);
                    let pods = pods.into_iter().take(room).map(|pod| (pod, until));
                    self.evictions.protected.extend(pods);
                }
                Ended::Denied => self.evictions.denied = Some(now.plus(DENIED_FOR)),
                Ended::Failed => self.pause(&uid, now),
            }
        }
    }

    /// The pods that have been asked to go, or are about to be.
    fn leaving(&self) -> BTreeSet<PodUid> {
        self.held.values().filter_map(|held| held.victims.as_ref()).flatten().cloned().collect()
    }

    fn search(
        &self,
        WaitingState { waiting: pod, named, .. }: &WaitingState,
        (_, preemptors, ledger, _): Facts<'_>,
        rules: PreemptionConfig,
        (now, unix_seconds): (Timestamp, i64),
    ) -> Option<FoundRoom> {
        let uid = &pod.pod.uid;
        let planned = preemptors.planned(uid, now).unwrap_or_default();
        let is_free = |victim: &PodUid| !self.evictions.protected.contains_key(victim);
        let mut planned: PlannedVictims = PlannedVictims::clone(&planned);
        planned.retain(|_, victims| victims.iter().all(is_free));
        let protect = i64::try_from(rules.protect.as_secs()).unwrap_or(i64::MAX);
        let started_by = unix_seconds.saturating_sub(protect);
        let may_evict = |victim: &PodUid, tenure: Tenure| {
            is_free(victim) && tenure.started_unix_seconds <= started_by
        };
        let is_less = |other: &PodUid| {
            let held = self.held.get(other);
            held.is_some_and(|held| held.may_be_passed() && held.priority() < pod.priority)
        };
        let leaving = self.leaving();
        let request = RoomRequest {
            uid,
            query: &pod.query,
            priority: pod.priority,
            named: named.as_deref(),
            planned: &planned,
            may_evict: &may_evict,
            leaving: &leaving,
            is_passed: &is_less,
        };
        ledger.find_room(&request).filter(|found| found.victims.len() <= MOST_VICTIMS)
    }

    /// Keeps the room that was found, and orders the evictions. Returns whether it is kept.
    fn begin(
        &mut self,
        pod: &WaitingPod,
        found: FoundRoom,
        (waiting, preemptors, ledger, _): Facts<'_>,
        is_begun: bool,
        now: Timestamp,
        step: &mut Step,
    ) -> bool {
        let uid = &pod.pod.uid;
        let (is_kept, events) = ledger.keep_found(uid, &found);
        step.events.extend(events);
        if !is_kept {
            return false;
        }
        for other in &found.passed {
            self.pass(other, now);
            step.abandon(other, waiting, preemptors);
        }
        self.held.insert(uid.clone(), Held::made(pod, &found, now));
        preemptors.begin(uid, found.node.clone(), pod.priority);
        let FoundRoom { node, victims, .. } = found;
        if !victims.is_empty() {
            step.evict.push(RoomOrder { pod: pod.clone(), node, victims, is_begun });
        }
        true
    }
}

#[cfg(test)]
mod tests;
