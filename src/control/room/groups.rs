//! Groups of pods that start together or not at all: room for all of them is kept at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::room::group_rooms::{Missed, Started, amount};
use crate::room::owners::{Owner, TURN, editions};
use crate::room::standing::{Facts, GROUP_TIMEOUT, Held, StandingHolds, StandingRules, Step};
use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::suggest::preemption::FoundRoom;
use engine::ledger::suggest::requeue::NamedNodes;
use engine::ledger::suggest::together::{GroupKey, agreed_size, group_key};
use engine::ledger::suggest::waiting::{WaitingPod, WaitingState};
use engine::model::fit::HostRule;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::units::Timestamp;

/// Pods of groups for which one step looks at all nodes.
const SEARCHES: usize = 512;

/// Requests that one step tries on nodes with new room.
const MOST_TRIES: usize = 5_000;

/// A group that did not fit is looked at again when a node has more room that one of its pods could use, or after
/// this time: what else changes is rare.
const MISSED_FOR: Duration = Duration::from_secs(60);

/// The same for one that fits and cannot start: its owner or team has as much as it may, or it is not its turn.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// What was found for a group.
struct Found<'a> {
    key: &'a GroupKey,
    pods: &'a [WaitingState],
    rooms: &'a [(PodUid, FoundRoom)],
}

impl Found<'_> {
    /// What is kept for it in each pool, in millionths of a GPU.
    fn amounts(&self) -> BTreeMap<&PoolName, u64> {
        let mut amounts = BTreeMap::new();
        for (_, room) in self.rooms {
            *amounts.entry(&room.pool).or_default() += amount(room);
        }
        amounts
    }

    /// What its pods count there for their team, in millionths of a GPU.
    fn charge(&self, ledger: &Ledger) -> u64 {
        let of = |uid: &PodUid| self.pods.iter().find(|state| state.waiting.pod.uid == *uid);
        let charges = self.rooms.iter().filter_map(|(uid, room)| {
            Some(ledger.room_charge(&of(uid)?.waiting, room).millionths())
        });
        charges.sum()
    }
}

/// The groups in the order in which room is looked for, the pods of each too. The one at which the last step
/// stopped is the first.
fn in_order(
    groups: BTreeMap<GroupKey, Vec<WaitingState>>,
    next: Option<GroupKey>,
) -> Vec<(GroupKey, Vec<WaitingState>)> {
    let mut groups: Vec<_> = groups.into_iter().collect();
    for (_, pods) in &mut groups {
        pods.sort_by(|a, b| a.waiting.order().cmp(&b.waiting.order()));
    }
    groups.sort_by(|(_, a), (_, b)| a[0].waiting.order().cmp(&b[0].waiting.order()));
    let first = groups.iter().position(|(key, _)| Some(key) == next.as_ref());
    groups.rotate_left(first.unwrap_or(0));
    groups
}

impl StandingHolds {
    /// Keeps room for the groups whose pods all wait, if there is room for all of them.
    pub(crate) fn start_groups(
        &mut self,
        facts: Facts<'_>,
        rules: StandingRules,
        now: Timestamp,
        step: &mut Step,
    ) {
        let (waiting, _, ledger, bound) = facts;
        let mut groups: BTreeMap<GroupKey, Vec<WaitingState>> = BTreeMap::new();
        waiting.look_at_each(|state| {
            if let Some(group) = &state.waiting.group {
                let key = group_key(&state.waiting.namespace, group);
                groups.entry(key).or_default().push(state.clone());
            }
        });
        self.groups.in_turn.retain(|key| groups.contains_key(key));
        let new_rooms = std::mem::take(&mut self.groups.new_rooms);
        let mut tries = 0;
        self.groups.missed.retain(|key, missed| {
            let pods = groups.get(key).map(Vec::as_slice).unwrap_or_default();
            let mut ends = || missed.ends_early && is_of_use(&new_rooms, pods, ledger, &mut tries);
            missed.until > now && !pods.is_empty() && !ends()
        });
        let mut searches = 0;
        for (key, mut pods) in in_order(groups, self.groups.next.take()) {
            let sizes = pods.iter().filter_map(|it| it.waiting.group.as_ref()).map(|it| it.size);
            let sizes = sizes.chain(bound.sizes_of(&key)).collect();
            let Ok(size) = agreed_size(sizes) else { continue }; // its pods get an event
            let needed = size.saturating_sub(bound.count_of(&key)).max(1);
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
            let owner = Owner::of(&pods[0].waiting, ledger);
            if self.owners.is_paused(&owner, pods.iter().map(|it| &it.waiting), now)
                || !may_have_all(&pods, needed, ledger)
            {
                continue;
            }
            pods.retain(is_called);
            pods.truncate(needed);
            let named =
                pods.iter().map(|it| (it.waiting.pod.uid.clone(), it.named.clone())).collect();
            if self.groups.missed.get(&key).is_some_and(|missed| missed.pods == named) {
                continue;
            }
            searches += needed;
            if searches > SEARCHES && searches > needed {
                self.groups.next = Some(key); // the next step goes on
                return;
            }
            let rooms = ledger.fit_together(&pods);
            let found = rooms.as_deref().map(|rooms| Found { key: &key, pods: &pods, rooms });
            let is_open = |found: &Found<'_>| self.may_start(found, &owner, (facts, rules), now);
            if found.as_ref().is_some_and(|found| !is_open(found)) {
                let until = now.plus(LOOK_AGAIN_AFTER);
                self.groups.missed.insert(key, Missed { pods: named, until, ends_early: false });
                continue;
            }
            let is_found = found.is_some();
            if !found.is_some_and(|found| self.start(&found, owner, facts, now, step)) {
                // Room that is given back is no news.
                let pause = if is_found { LOOK_AGAIN_AFTER } else { MISSED_FOR };
                let (until, ends_early) = (now.plus(pause), !is_found);
                self.groups.missed.insert(key, Missed { pods: named, until, ends_early });
            }
        }
    }

    /// Gives up the room of groups before the first pod was bound: if one of them is gone or its room is, or if
    /// nothing binds them although all of the room is free.
    pub(crate) fn end_groups(&mut self, facts: Facts<'_>, now: Timestamp, step: &mut Step) {
        let (waiting, _, ledger, bound) = facts;
        let has_place = |uid: &PodUid| ledger.reservation(uid).is_some();
        let started = std::mem::take(&mut self.groups.started);
        let mut started: Vec<(GroupKey, Started)> = started.into_iter().collect();
        started.sort_by_key(|(_, group)| group.since);
        let mut waits_long: BTreeSet<PoolName> = BTreeSet::new();
        for (key, group) in started {
            let has_begun = bound.count_of(&key) > 0 || group.pods.iter().any(has_place);
            if has_begun || !group.pods.iter().any(|uid| self.held.contains_key(uid)) {
                continue;
            }
            let is_whole = |uid| waiting.has(uid) && self.held.contains_key(uid);
            let waited = now.since(group.since);
            let is_turn_of_other = group.pools.iter().any(|pool| waits_long.contains(pool));
            let is_any_gone = group.pods.iter().any(|uid| !waiting.has(uid));
            if !group.pods.iter().all(is_whole) {
                if is_any_gone {
                    self.owners.leave(&group.owner, waited, now);
                }
                self.give_up_group(&group, facts, step);
            } else if waited >= group.wait {
                let known = |uid| waiting.pod(uid).map(|state| state.waiting);
                let pods: Vec<WaitingPod> = group.pods.iter().filter_map(known).collect();
                self.owners.fail(&group.owner, editions(&pods), now);
                self.give_up_group(&group, facts, step);
            } else if waited >= TURN && is_turn_of_other {
                self.groups.in_turn.insert(key);
                self.give_up_group(&group, facts, step);
            } else {
                waits_long.extend(group.pools.iter().filter(|_| waited >= TURN).cloned());
                self.groups.started.insert(key, group);
            }
        }
        self.groups.waits_long = waits_long;
    }

    fn give_up_group(
        &mut self,
        group: &Started,
        (waiting, preemptors, ledger, _): Facts<'_>,
        step: &mut Step,
    ) {
        for uid in group.pods.iter().filter(|uid| self.held.remove(*uid).is_some()) {
            if let (Some(state), Some(node)) = (waiting.pod(uid), preemptors.node(uid)) {
                step.given_up.push((state.waiting.pod, node));
            }
            step.events.extend(ledger.give_up_room(uid));
            step.abandon(uid, waiting, preemptors);
        }
    }

    /// Whether the owner of a group may have so much kept now, in each pool.
    fn may_start(
        &self,
        found: &Found<'_>,
        owner: &Owner,
        ((_, _, ledger, _), rules): (Facts<'_>, StandingRules),
        now: Timestamp,
    ) -> bool {
        let (first, amounts) = (&found.pods[0].waiting, found.amounts());
        let is_others_turn = amounts.keys().any(|pool| self.groups.waits_long.contains(*pool));
        if self.groups.in_turn.contains(found.key) && is_others_turn {
            return false;
        }
        if ledger.teams.left(&first.namespace).is_some_and(|left| found.charge(ledger) > left) {
            return false; // of a small GPU a pod counts more than it requests
        }
        let sizes = ledger.pool_sizes(&first.query);
        amounts.into_iter().all(|(pool, wanted)| {
            let of = (pool, &sizes);
            let amounts = self.amounts(&first.pod.uid, owner, of, (wanted, rules.at_most));
            self.owners.may_keep(owner, amounts, now)
        })
    }

    /// Keeps the room of all pods, or of none. Returns whether it is kept.
    fn start(
        &mut self,
        found: &Found<'_>,
        owner: Owner,
        (_, preemptors, ledger, _): Facts<'_>,
        now: Timestamp,
        step: &mut Step,
    ) -> bool {
        let Found { key, pods, rooms } = found;
        for (uid, room) in *rooms {
            step.events.extend(ledger.keep_found(uid, room).1);
        }
        // Others may have taken some of it since it was found. From now on none can.
        let is_free = |state: &WaitingState| {
            let WaitingPod { pod, query, .. } = &state.waiting;
            let query = PlacementRequest { host_rule: HostRule::Checked, ..query.clone() };
            ledger.fits_in_room_of(&pod.uid, &query, None).is_some()
        };
        if !pods.iter().all(|state| is_free(state) && ledger.count_kept(&state.waiting)) {
            step.events.extend(rooms.iter().flat_map(|(uid, _)| ledger.give_up_room(uid)));
            return false;
        }
        self.owners.begin(&owner, now);
        self.groups.in_turn.remove(*key);
        let all = pods.iter().map(|state| state.waiting.pod.uid.clone()).collect();
        let pools = rooms.iter().map(|(_, room)| room.pool.clone()).collect();
        let wait = self.owners.wait(&owner, GROUP_TIMEOUT);
        let started = Started { pods: all, owner, pools, since: now, wait };
        self.groups.started.insert(GroupKey::clone(key), started);
        for state in *pods {
            let (pod, uid) = (&state.waiting, &state.waiting.pod.uid);
            let Some((_, room)) = rooms.iter().find(|(of, _)| of == uid) else { continue };
            let until = now.plus(wait);
            self.held.insert(uid.clone(), Held::of_group(pod, room, (now, until), ledger));
            preemptors.keep(uid, room.node.clone(), pod.priority);
            step.noted.push((pod.clone(), room.node.clone())); // this makes kube-scheduler look
        }
        true
    }
}

/// Whether one of these pods fits on one of the nodes. Most pods of a group request the same. After many `tries`
/// it is taken for granted: the search says.
fn is_of_use(
    nodes: &BTreeSet<NodeName>,
    pods: &[WaitingState],
    ledger: &Ledger,
    tries: &mut usize,
) -> bool {
    let shapes: BTreeSet<(&PlacementRequest, Option<&NamedNodes>)> =
        pods.iter().map(|it| (&it.waiting.query, it.named.as_deref())).collect();
    *tries += nodes.len() * shapes.len();
    *tries > MOST_TRIES
        || nodes
            .iter()
            .any(|node| shapes.iter().any(|(query, of)| ledger.fits_now(node, query, *of)))
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
