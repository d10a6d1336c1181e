//! Groups of pods that start together or not at all: room for all of them is kept at once.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::control::room::standing::{Facts, Held, StandingHolds, Step};
use crate::hardware::device::PodUid;
use crate::hardware::units::Timestamp;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::PlacementRequest;
use crate::ledger::suggest::preemption::FoundRoom;
use crate::ledger::suggest::together::{GroupKey, group_key};
use crate::ledger::suggest::waiting::{WaitingPod, WaitingState};
use crate::model::fit::HostRule;

/// Pods of groups for which one step looks at all nodes.
const SEARCHES: usize = 512;

/// A group that does not fit is not looked at again for this long; each time for twice as long, up to the
/// second.
const IN_VAIN_FOR: Duration = Duration::from_secs(3);
const LONGEST_IN_VAIN: Duration = Duration::from_secs(60);

impl StandingHolds {
    /// Keeps room for the groups whose pods all wait, if there is room for all of them.
    pub(crate) fn start_groups(
        &mut self,
        facts: Facts<'_>,
        timeout: Duration,
        now: Timestamp,
        step: &mut Step,
    ) {
        let (waiting, _, ledger, bound) = facts;
        self.end_incomplete(facts, step);
        self.evictions.groups.retain(|_, it| now.since(it.0) < LONGEST_IN_VAIN);
        let mut groups: BTreeMap<GroupKey, Vec<WaitingState>> = BTreeMap::new();
        waiting.look_at_each(|state| {
            if let Some(group) = &state.waiting.group {
                let key = group_key(&state.waiting.namespace, group);
                groups.entry(key).or_default().push(state.clone());
            }
        });
        let mut groups: Vec<(GroupKey, Vec<WaitingState>)> = groups.into_iter().collect();
        for (_, pods) in &mut groups {
            pods.sort_by(|a, b| a.waiting.order().cmp(&b.waiting.order()));
        }
        groups.sort_by(|(_, a), (_, b)| a[0].waiting.order().cmp(&b[0].waiting.order()));
        let mut searches = 0;
        for (key, mut pods) in groups {
            let first = &pods[0].waiting;
            let size = first.group.as_ref().map_or(0, |group| group.size);
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            let needed = size.saturating_sub(bound.count_of(&key)).max(1);
            let in_vain = self.evictions.groups.get(&key).copied();
            if in_vain.is_some_and(|(until, _)| until > now) {
                continue;
            }
            for state in pods.iter().filter(|it| it.named.is_none() && it.is_answered) {
                self.call_again(&state.waiting, step);
            }
            let rests = |state: &WaitingState| {
                let uid = &state.waiting.pod.uid;
                self.held.contains_key(uid) || self.is_paused(uid, now)
            };
            let is_called = |state: &WaitingState| state.named.is_some() && state.is_answered;
            if pods.iter().any(rests) || pods.iter().filter(|it| is_called(it)).count() < needed {
                continue;
            }
            if !may_have_all(&pods, needed, ledger) {
                continue;
            }
            searches += needed;
            if searches > SEARCHES && searches > needed {
                return; // the next step goes on
            }
            pods.retain(is_called);
            pods.truncate(needed);
            let found = ledger.fit_together(&pods);
            let times = (now, now.plus(timeout));
            if !found.is_some_and(|found| self.start(&key, &pods, &found, facts, times, step)) {
                let pause = in_vain.map_or(IN_VAIN_FOR, |(_, next)| next);
                let next = (2 * pause).min(LONGEST_IN_VAIN);
                self.evictions.groups.insert(key, (now.plus(pause), next));
            }
        }
    }

    /// Gives up the room of groups one of whose pods is gone before the first was bound.
    fn end_incomplete(&mut self, facts: Facts<'_>, step: &mut Step) {
        let (waiting, preemptors, ledger, bound) = facts;
        let has_place = |uid: &PodUid| ledger.reservation(uid).is_some();
        let is_gone = |uid: &PodUid| !waiting.has(uid) && !has_place(uid);
        let mut started = std::mem::take(&mut self.started);
        started.retain(|key, pods| {
            let has_begun = bound.count_of(key) > 0 || pods.iter().any(has_place);
            if has_begun || !pods.iter().any(|uid| self.held.contains_key(uid)) {
                return false;
            }
            if !pods.iter().any(is_gone) {
                return true;
            }
            for uid in pods.iter().filter(|uid| self.held.remove(*uid).is_some()) {
                step.events.extend(ledger.give_up_room(uid));
                step.abandon(uid, waiting, preemptors);
            }
            false
        });
        self.started = started;
    }

    /// Keeps the room of all pods, or of none. Returns whether it is kept.
    fn start(
        &mut self,
        key: &GroupKey,
        pods: &[WaitingState],
        found: &[(PodUid, FoundRoom)],
        (_, preemptors, ledger, _): Facts<'_>,
        times: (Timestamp, Timestamp),
        step: &mut Step,
    ) -> bool {
        for (uid, room) in found {
            step.events.extend(ledger.keep_found(uid, room).1);
        }
        // Others may have taken some of it since it was found. From now on none can.
        let is_free = |state: &WaitingState| {
            let WaitingPod { pod, query, .. } = &state.waiting;
            let query = PlacementRequest { host_rule: HostRule::Checked, ..query.clone() };
            ledger.fits_in_room_of(&pod.uid, &query, None).is_some()
        };
        if !pods.iter().all(|state| is_free(state) && ledger.count_kept(&state.waiting)) {
            step.events.extend(found.iter().flat_map(|(uid, _)| ledger.give_up_room(uid)));
            return false;
        }
        let all = pods.iter().map(|state| state.waiting.pod.uid.clone()).collect();
        self.started.insert(key.clone(), all);
        for state in pods {
            let (pod, uid) = (&state.waiting, &state.waiting.pod.uid);
            let Some((_, room)) = found.iter().find(|(of, _)| of == uid) else { continue };
            self.held.insert(uid.clone(), Held::of_group(pod, room, times));
            preemptors.keep(uid, room.node.clone(), pod.priority);
            step.noted.push((pod.clone(), room.node.clone())); // this makes kube-scheduler look
        }
        true
    }
}

/// Whether their teams may have what the first pods of a group request together.
fn may_have_all(pods: &[WaitingState], count: usize, ledger: &Ledger) -> bool {
    let first = pods.first().map(|state| &state.waiting);
    let Some(left) = first.and_then(|pod| ledger.teams.left(&pod.namespace)) else { return true };
    let charges = pods.iter().take(count).filter_map(|state| state.waiting.query.gpu.as_ref());
    let sum: u64 = charges.map(|gpu| ledger.teams.charge(gpu).millionths()).sum();
    sum <= left
}

#[cfg(test)]
mod tests;
