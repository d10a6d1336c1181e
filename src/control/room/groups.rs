//! Groups of pods that start together or not at all: room for all of them is kept at once.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::control::room::standing::{Facts, Held, StandingHolds, Step};
use crate::hardware::device::PodUid;
use crate::hardware::units::Timestamp;
use crate::ledger::suggest::preemption::FoundRoom;
use crate::ledger::suggest::together::GroupKey;
use crate::ledger::suggest::waiting::WaitingState;

/// Pods of groups for which one step looks at all nodes.
const SEARCHES: usize = 512;

/// A group that does not fit is not looked at again for this long.
const IN_VAIN_FOR: Duration = Duration::from_secs(3);

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
        let mut groups: BTreeMap<GroupKey, Vec<WaitingState>> = BTreeMap::new();
        waiting.look_at_each(|state| {
            if let Some(group) = &state.waiting.group {
                let key = (state.waiting.namespace.as_str().into(), group.name.clone());
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
            let rests = |state: &WaitingState| {
                let uid = &state.waiting.pod.uid;
                let is_in_vain = self.evictions.in_vain.get(uid).is_some_and(|until| *until > now);
                self.held.contains_key(uid) || self.is_paused(uid, now) || is_in_vain
            };
            let is_called = |state: &WaitingState| state.named.is_some() && state.is_answered;
            if pods.iter().any(rests) || pods.iter().filter(|it| is_called(it)).count() < needed {
                continue;
            }
            searches += needed;
            if searches > SEARCHES && searches > needed {
                return; // the next step goes on
            }
            pods.retain(is_called);
            pods.truncate(needed);
            match ledger.fit_together(&pods) {
                Some(found) => self.start(&pods, &found, facts, (now, now.plus(timeout)), step),
                None => {
                    let uid = pods[0].waiting.pod.uid.clone();
                    self.evictions.in_vain.insert(uid, now.plus(IN_VAIN_FOR));
                }
            }
        }
    }

    /// Keeps the room of all pods, or of none.
    fn start(
        &mut self,
        pods: &[WaitingState],
        found: &[(PodUid, FoundRoom)],
        (_, preemptors, ledger, _): Facts<'_>,
        times: (Timestamp, Timestamp),
        step: &mut Step,
    ) {
        for (at, (uid, room)) in found.iter().enumerate() {
            let (is_kept, events) = ledger.keep_found(uid, room);
            step.events.extend(events);
            if !is_kept {
                let kept = found[..at].iter();
                step.events.extend(kept.flat_map(|(other, _)| ledger.stand_down(other)));
                return;
            }
        }
        for state in pods {
            let (pod, uid) = (&state.waiting, &state.waiting.pod.uid);
            let Some((_, room)) = found.iter().find(|(of, _)| of == uid) else { continue };
            self.held.insert(uid.clone(), Held::of_group(pod, room, times));
            preemptors.keep(uid, room.node.clone(), pod.priority);
            step.noted.push((pod.clone(), room.node.clone())); // this makes kube-scheduler look
        }
    }
}

#[cfg(test)]
mod tests;
