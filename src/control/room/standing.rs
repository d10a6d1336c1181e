//! Who gets a standing hold, and when it ends. What is evicted for it is decided in `preempting`.
//!
//! In each pool one pod at most: the first of the line, by priority and then by age, of those that
//! were refused for want of room and have waited for `standing_hold_after_seconds`. It keeps at most
//! what it requests, so a pool never has more than one request idle.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::room::group_rooms::{GroupRooms, amount};
use crate::room::owners::{Amounts, Owner, Owners, editions};
use engine::ledger::change::hung::Hung;
use engine::ledger::nodes::state::Ledger;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::suggest::preemption::FoundRoom;
use engine::ledger::suggest::preemptors::Preemptors;
use engine::ledger::suggest::requeue::NamedNodes;
use engine::ledger::suggest::standing::{Holder, Standing};
use engine::ledger::suggest::together::BoundGroups;
use engine::ledger::suggest::waiting::{WaitingPod, WaitingPods, WaitingState};
use engine::model::device_state::KeptFor;
use engine::model::event::LedgerEvent;
use engine::model::reservation::PodRef;
use kube_api::config::preemption::PreemptionConfig;
use wire::ids::{NodeName, PodUid, PoolName};
use wire::mutation::{Mutation, mutated};
use wire::units::{Share, Timestamp};

/// How long a pod whose room is free may take to be bound. Then something else is in its way, and
/// the room is for others.
const BOUND_WITHIN: Duration = Duration::from_secs(60);

/// The first pause of such a pod; each one is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_secs(60);

/// The longest.
const LONGEST_PAUSE: Duration = Duration::from_secs(1_800);

/// How long room is kept while nothing more of it becomes free.
const STUCK_AFTER: Duration = Duration::from_secs(1_800);

/// The pause of a pod whose room a more important pod gets, so that this one is bound first.
const MADE_WAY_FOR: Duration = Duration::from_secs(5);

/// Pauses that are remembered.
const MOST_PAUSES: usize = 10_000;

/// Pods for which one step looks at all nodes.
const SEARCHES: usize = 16;

/// How often pods that hang are looked for, on all nodes.
const HUNG_EVERY: Duration = Duration::from_secs(1);

/// How long room that is being made is kept while nothing more of it becomes free: pods may take
/// minutes to end.
const MADE_WITHIN: Duration = Duration::from_secs(600);

/// The standing holds of this process, and what is remembered of them.
#[derive(Default)]
pub struct StandingHolds {
    pub(crate) held: BTreeMap<PodUid, Held>,
    pauses: BTreeMap<PodUid, Pause>,
    /// Pods whose team was at its limit and that were called again.
    pub(crate) team_calls: BTreeMap<PodUid, TeamCall>,
    pub(crate) groups: GroupRooms,
    /// The owners whose room was not used.
    pub(crate) owners: Owners,
    /// When pods that hang were looked for last.
    hung_noted: Option<Timestamp>,
    pub(crate) evictions: Evictions,
}

/// A pod that was called again when its team could have more.
pub(crate) struct TeamCall {
    /// When its last call began, which found the team at its limit.
    pub(crate) call: Timestamp,
    /// Until when the next call is waited for.
    pub(crate) until: Timestamp,
    pub(crate) pause: Duration,
    /// Whether it did not come in time before.
    pub(crate) is_late: bool,
    /// What the team could have more then, in millionths of a GPU.
    pub(crate) left: u64,
}

/// A standing hold.
pub(crate) struct Held {
    query: PlacementRequest,
    priority: i32,
    pub(crate) pool: PoolName,
    /// Who is to blame if it is not used.
    pub(crate) owner: Owner,
    /// What it takes at most, in millionths of a GPU.
    pub(crate) amount: u64,
    /// Since when all of its room is free.
    ready: Option<Timestamp>,
    /// For how long it was before.
    idle: Duration,
    /// For how long it is kept while it is free.
    pub(crate) wait: Duration,
    /// The least that it ever lacked, and since when.
    least: (u64, Timestamp),
    /// The pods that are evicted for it; `None` if it waits for what becomes free.
    pub(crate) victims: Option<BTreeSet<PodUid>>,
    /// Until when all pods of its group are to be bound, if it is in one.
    until: Option<Timestamp>,
}

impl Held {
    fn new(pod: &WaitingPod, pool: PoolName, least: (u64, Timestamp), ledger: &Ledger) -> Self {
        let (query, priority, owner) = (pod.query.clone(), pod.priority, Owner::of(pod, ledger));
        let (amount, idle) = (ledger.most_of(&query), Duration::ZERO);
        let (ready, victims, until, wait) = (None, None, None, BOUND_WITHIN);
        Self { query, priority, pool, owner, amount, ready, idle, wait, least, victims, until }
    }

    /// The standing hold of a pod for which room is being made.
    pub(crate) fn made(
        pod: &WaitingPod,
        found: &FoundRoom,
        victims: BTreeSet<PodUid>,
        (now, ledger): (Timestamp, &Ledger),
    ) -> Self {
        let least = (u64::MAX, now);
        Self { victims: Some(victims), ..Self::new(pod, found.pool.clone(), least, ledger) }
    }

    /// The hold of a pod that starts with its group.
    pub(crate) fn of_group(
        pod: &WaitingPod,
        found: &FoundRoom,
        (now, until): (Timestamp, Timestamp),
        ledger: &Ledger,
    ) -> Self {
        let (least, until, amount) = ((u64::MAX, now), Some(until), amount(found));
        Self { until, amount, ..Self::new(pod, found.pool.clone(), least, ledger) }
    }

    /// For how long all of its room has been free.
    fn idle(&self, now: Timestamp) -> Duration {
        self.idle + self.ready.map_or(Duration::ZERO, |since| now.since(since))
    }

    /// Whether it is that of the first of a line.
    fn is_standing(&self) -> bool {
        self.victims.is_none() && self.until.is_none()
    }

    /// Whether another pod may have its room: a more important one; where teams have shares, first one that
    /// is guaranteed. Room that pods of a team leave is for no other team.
    pub(crate) fn may_be_passed_by(
        &self,
        pod: &WaitingPod,
        own: &PodUid,
        waiting: &WaitingPods,
        ledger: &Ledger,
    ) -> bool {
        if self.until.is_some() {
            return false;
        }
        let is_less = self.priority < pod.priority;
        let Some(own) = ledger.teams.rules().and_then(|_| waiting.pod(own)) else { return is_less };
        // One order for all, or rooms would go round in a circle.
        let (own, pod) = (ledger.team_pod(&own.waiting), ledger.team_pod(pod));
        let is_less = (own.is_guaranteed, own.priority) < (pod.is_guaranteed, pod.priority);
        is_less && (own.team == pod.team || !self.is_made())
    }

    /// The priority of its pod.
    pub(crate) fn priority(&self) -> i32 {
        self.priority
    }

    /// Whether room is being made for it.
    pub(crate) fn is_made(&self) -> bool {
        self.victims.is_some()
    }
}

/// What the choice depends on.
pub(crate) type Facts<'a> = (&'a WaitingPods, &'a Preemptors, &'a Ledger, &'a BoundGroups);

/// Pods with this request whose last call named the nodes at this address, or the pod of a plan; where
/// teams have shares, of this namespace, within what is guaranteed or not.
pub(crate) type Line = (PlacementRequest, Result<usize, PodUid>, Option<(String, bool)>);

/// That no room could be made for a pod of a line.
pub(crate) struct InVain {
    /// For this priority; a lower one cannot do better.
    pub(crate) priority: i32,
    pub(crate) until: Timestamp,
    /// How long the next pause is.
    pub(crate) next: Duration,
    pub(crate) _named: Option<Arc<NamedNodes>>,
}

/// What is remembered of pods for which room was made, or could not be.
#[derive(Default)]
pub(crate) struct Evictions {
    /// Pods that budgets protected lately, until then.
    pub(crate) protected: BTreeMap<PodUid, Timestamp>,
    /// Lines for whose pods no room could be made.
    pub(crate) lines: BTreeMap<Line, InVain>,
    /// Pods for which pods that leave anyway would make room, since then.
    pub(crate) awaits: BTreeMap<PodUid, Timestamp>,
    /// Pods that this process has had called again, since no call for them named nodes.
    pub(crate) called: BTreeSet<PodUid>,
    /// gpupack has no right to evict, as far as it knows until then.
    pub(crate) denied: Option<Timestamp>,
}

struct Pause {
    until: Timestamp,
    next: Duration,
}

/// What has changed.
#[derive(Debug, Default)]
pub struct Step {
    /// Pods whose room is free: kube-scheduler is to look at them.
    pub ready: Vec<(NodeName, WaitingPod)>,
    /// Pods that got a standing hold, and where.
    pub begun: Vec<(PodRef, Standing)>,
    /// Pods for which room is kept on this node, with no eviction, from now on.
    pub noted: Vec<(WaitingPod, NodeName)>,
    /// Pods that lost it although they wait: nothing bound them, or nothing more became free.
    pub given_up: Vec<(PodRef, NodeName)>,
    /// Pods that kube-scheduler is to call again.
    pub call_again: Vec<WaitingPod>,
    /// Pods without a GPU whose node keeps nothing of its host any more that they would take.
    pub open_hosts: Vec<PodRef>,
    /// Pods for which others are to be evicted.
    pub evict: Vec<RoomOrder>,
    /// Pods whose room is not kept any more. They may have got other room since.
    pub abandoned: Vec<WaitingPod>,
    /// Pods that should have ended and have not, and hold devices.
    pub hung: Vec<Hung>,
    /// When to look again, if before the next tick.
    pub due: Option<Timestamp>,
    /// What this means for others.
    pub events: Vec<LedgerEvent>,
}

/// Evict these pods for that one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomOrder {
    pub pod: WaitingPod,
    /// The number of the room.
    pub number: u64,
    /// The node with the room.
    pub node: NodeName,
    pub victims: Vec<PodRef>,
    /// Those of them that go only because they are over the quota of another team.
    pub owed: BTreeSet<PodUid>,
    /// Whether an earlier process may have evicted some of them.
    pub is_begun: bool,
    /// Rooms on the same node that were found before, by pod and number, and whose victims were not asked
    /// yet. This one relies on what they leave.
    pub after: Vec<(PodUid, u64)>,
}

impl Step {
    /// Notes that no room is kept for a pod any more. Returns whether a pod was asked to go for it.
    pub(crate) fn abandon(
        &mut self,
        uid: &PodUid,
        waiting: &WaitingPods,
        preemptors: &Preemptors,
    ) -> bool {
        let ended = preemptors.end(uid);
        if ended.is_noted
            && let Some(state) = waiting.pod(uid)
        {
            self.abandoned.push(state.waiting);
        }
        ended.was_asked
    }

    /// Lets kube-scheduler look at a pod whose room is free, unless it is about to.
    pub(crate) fn tell(
        &mut self,
        uid: &PodUid,
        node: NodeName,
        waiting: &WaitingPods,
        ledger: &Ledger,
    ) {
        if let Some(arrival) = ledger.arrival(node.as_str())
            && !mutated(Mutation::StandingUntold)
            && let Some(pod) = waiting.requeue(uid, arrival)
        {
            self.ready.push((node, pod));
        }
    }
}

/// How long the room for a group is kept until all of its pods are bound.
pub(crate) const GROUP_TIMEOUT: Duration = Duration::from_secs(60);

/// When room is kept, and how much.
#[derive(Clone, Copy, Debug)]
pub struct StandingRules {
    /// How long a pod waits before; zero: none ever is.
    pub after: Duration,
    /// Most of the devices of a pool; one may always be kept.
    pub at_most: Share,
    pub preemption: PreemptionConfig,
}

impl StandingHolds {
    /// Without what another process may hold now. If this one leads again soon, its pauses still count.
    pub(crate) fn without_lead(self) -> Self {
        Self { pauses: self.pauses, owners: self.owners, ..Self::default() }
    }

    /// Notes on which nodes room appeared.
    pub fn note_rooms(&mut self, nodes: BTreeSet<NodeName>) {
        self.groups.new_rooms.extend(nodes);
    }

    /// What is to be done now; `unix_seconds` is the time at the API server. Looks at all waiting
    /// pods, and for some of them at all nodes: not for a thread that answers calls.
    pub fn step(
        &mut self,
        facts: Facts<'_>,
        rules: StandingRules,
        (now, unix_seconds): (Timestamp, i64),
    ) -> Step {
        let (waiting, preemptors, ledger, _) = facts;
        let mut step = Step::default();
        if self.hung_noted.is_none_or(|at| now.since(at) >= HUNG_EVERY) {
            self.hung_noted = Some(now);
            step.hung = ledger.note_hung(now, unix_seconds);
        }
        self.pauses.retain(|uid, pause| waiting.has(uid) || pause.until > now);
        self.owners.tick(now);
        self.end_groups(facts, now, &mut step);
        let held = std::mem::take(&mut self.held);
        for (uid, held) in held {
            match self.keep(&uid, held, facts, now, &mut step) {
                Some(held) => _ = self.held.insert(uid, held),
                None => _ = step.abandon(&uid, waiting, preemptors),
            }
        }
        self.evictions.called.retain(|uid| waiting.has(uid));
        self.call_teams(facts, now, &mut step);
        self.start_groups(facts, rules, now, &mut step);
        if rules.preemption.enabled {
            self.make_room(facts, rules.preemption, (now, unix_seconds), &mut step);
        }
        if !rules.after.is_zero() {
            self.give_all(facts, rules, (now, unix_seconds), &mut step);
        }
        // A more important pod may have taken over the room since. Its victims are not asked.
        step.evict.retain(|order| preemptors.is_making(&order.pod.pod.uid, order.number));
        let is_open = |node: &NodeName, host| !ledger.takes_kept_host(node.as_str(), host);
        step.open_hosts = preemptors.take_refused(is_open);
        step
    }

    /// Gives the first pods of lines standing holds.
    fn give_all(
        &mut self,
        facts: Facts<'_>,
        rules: StandingRules,
        (now, unix_seconds): (Timestamp, i64),
        step: &mut Step,
    ) {
        let (waiting, _, ledger, _) = facts;
        let created_by = earlier(unix_seconds, rules.after);
        let may = |state: &WaitingState| {
            let pod = &state.waiting;
            let waits_for_room = || state.closest().is_some_and(|(why, _)| why.is_met_by_room());
            let is_paused = || self.is_paused(&pod.pod.uid, now);
            let has_other = || self.held.get(&pod.pod.uid).is_some_and(|held| !held.is_standing());
            let is_owner_paused = || self.owners.is_paused(&Owner::of(pod, ledger), [pod], now);
            pod.created_unix_seconds <= created_by
                && waits_for_room()
                && ledger.team_may_have(pod)
                && !is_paused()
                && pod.group.is_none()
                && !has_other()
                && !is_owner_paused()
        };
        let firsts = waiting.firsts_apart(may, |pod| ledger.team_line(pod));
        let all = if firsts.is_empty() { BTreeSet::new() } else { ledger.pools() };
        let mut searches = 0;
        for first in &firsts {
            if searches >= SEARCHES && !self.held.contains_key(&first.waiting.pod.uid) {
                continue;
            }
            let is_search = self.give(first, (&all, rules.at_most), facts, now, step);
            searches += usize::from(is_search);
        }
    }

    /// What becomes of a standing hold.
    fn keep(
        &mut self,
        uid: &PodUid,
        mut held: Held,
        (waiting, preemptors, ledger, _): Facts<'_>,
        now: Timestamp,
        step: &mut Step,
    ) -> Option<Held> {
        let known = waiting.pod(uid);
        if known.as_ref().is_some_and(|state| state.waiting.query != held.query) {
            self.pause(uid, now); // an edit does not begin the times again
        }
        let state = known.filter(|state| state.waiting.query == held.query);
        let is_gone = state.is_none();
        let standing = ledger.standing(uid, &held.query);
        let (Some(state), Some(standing)) = (state, standing) else {
            // A bind takes what is kept, and may have to wait before it posts.
            let is_being_bound = waiting.has(uid) && ledger.assumed_on(uid, &held.query).is_some();
            if is_being_bound || mutated(Mutation::StandingStays) {
                (held.idle, held.ready) = (held.idle(now), None);
                return Some(held);
            }
            let is_bound = ledger.reservation(uid).is_some();
            if is_bound && !waiting.has(uid) {
                self.owners.used(&held.owner);
            } else if is_gone && !is_bound {
                self.leave(&held, now);
            }
            step.events.extend(ledger.give_up_room(uid)); // bound, gone, changed, or an ill device
            let is_lost = is_lost(uid, &held, preemptors, ledger);
            if held.is_made() && waiting.has(uid) && !is_lost && !mutated(Mutation::SecondVictims) {
                self.pause(uid, now);
            }
            return None;
        };
        if is_lost(uid, &held, preemptors, ledger) {
            step.events.extend(ledger.give_up_room(uid)); // it is looked for elsewhere, at once
            return None;
        }
        (held.priority, held.pool) = (state.waiting.priority, standing.pool);
        if standing.lacks < held.least.0 {
            held.least = (standing.lacks, now);
        }
        let is_any_there = held.victims.iter().flatten().any(|victim| ledger.has_pod(victim));
        let is_ready = !is_any_there && ledger.fits_in_room_of(uid, &held.query, None).is_some();
        if !is_ready {
            held.idle = held.idle(now); // the use of a GPU may come and go
        }
        held.ready = is_ready.then(|| held.ready.unwrap_or(now));
        let is_over = held.until.is_some_and(|until| until <= now);
        let is_unbound = is_ready && held.idle(now) >= held.wait;
        let is_late = is_over || held.until.is_none() && is_unbound;
        let stuck_after = match &held.victims {
            None => STUCK_AFTER,
            Some(_) if is_any_there => MADE_WITHIN,
            Some(_) => BOUND_WITHIN, // they have gone, and others have the room
        };
        let is_stuck = !is_ready && now.since(held.least.1) >= stuck_after;
        if is_late || is_stuck {
            if is_late {
                self.owners.fail(&held.owner, editions([&state.waiting]), now);
            }
            if !(held.is_made() && mutated(Mutation::SecondVictims)) {
                self.pause(uid, now);
            }
            step.given_up.push((state.waiting.pod.clone(), standing.node));
            step.events.extend(ledger.give_up_room(uid));
            return None;
        }
        if is_ready {
            step.tell(uid, standing.node, waiting, ledger);
        }
        Some(held)
    }

    /// Notes that room of a pod ends before the pod was late. It may have been free.
    fn leave(&mut self, held: &Held, now: Timestamp) {
        self.owners.leave(&held.owner, held.idle(now), now);
    }

    /// Lets others have the room for a while, each time for longer.
    pub(crate) fn pause(&mut self, uid: &PodUid, now: Timestamp) {
        let pause = self.next_pause(uid);
        self.rest(uid, now.plus(pause), (2 * pause).min(LONGEST_PAUSE));
    }

    fn next_pause(&self, uid: &PodUid) -> Duration {
        self.pauses.get(uid).map_or(FIRST_PAUSE, |pause| pause.next)
    }

    /// Ends the room of a less important pod for a more important one. Returns whether a pod was asked
    /// to go for it.
    pub(crate) fn pass(
        &mut self,
        uid: &PodUid,
        (waiting, preemptors): (&WaitingPods, &Preemptors),
        now: Timestamp,
        step: &mut Step,
    ) -> bool {
        if let Some(held) = self.held.remove(uid) {
            self.leave(&held, now);
        }
        let was_asked = step.abandon(uid, waiting, preemptors);
        // No second set of pods goes for it soon.
        let pause = if was_asked { FIRST_PAUSE } else { MADE_WAY_FOR };
        self.rest(uid, now.plus(pause), self.next_pause(uid));
        was_asked
    }

    fn rest(&mut self, uid: &PodUid, until: Timestamp, next: Duration) {
        if self.pauses.len() < MOST_PAUSES || self.pauses.contains_key(uid) {
            self.pauses.insert(uid.clone(), Pause { until, next });
        }
    }

    pub(crate) fn is_paused(&self, uid: &PodUid, now: Timestamp) -> bool {
        self.pauses.get(uid).is_some_and(|pause| pause.until > now)
    }

    /// Gives a pod room in a pool where no pod of its priority or above has some. Returns whether
    /// it looked at all nodes.
    fn give(
        &mut self,
        first: &WaitingState,
        (all, at_most): (&BTreeSet<PoolName>, Share),
        facts: Facts<'_>,
        now: Timestamp,
        step: &mut Step,
    ) -> bool {
        let (waiting, preemptors, ledger, _) = facts;
        let WaitingState { waiting: pod, named, .. } = first;
        let uid = &pod.pod.uid;
        let named = named.as_deref();
        if self.is_paused(uid, now) {
            return false; // it has just made way
        }
        self.make_way(pod, named, facts, now, step);
        let taken: BTreeSet<&PoolName> = self
            .held
            .iter()
            .filter(|(other, held)| *other != uid && held.is_standing())
            .filter(|(other, held)| !held.may_be_passed_by(pod, other, waiting, ledger))
            .map(|(_, held)| &held.pool)
            .collect();
        let mut open: BTreeSet<PoolName> =
            all.iter().filter(|pool| !taken.contains(pool)).cloned().collect();
        if open.is_empty() {
            return false;
        }
        let sizes = ledger.pool_sizes(&pod.query);
        let owner = Owner::of(pod, ledger);
        let wanted = ledger.most_of(&pod.query);
        open.retain(|pool| {
            let amounts = self.amounts(uid, &owner, (pool, &sizes), (wanted, at_most));
            self.owners.may_keep(&owner, amounts, now)
        });
        let may =
            |pool: &PoolName| open.contains(pool) && may_keep(&sizes, pool, at_most, &pod.query);
        if !open.iter().any(may) {
            return true; // its own room stays: it was allowed
        }
        let (standing, events) = ledger.stand(Holder::of(pod, KeptFor::Line), named, may);
        step.events.extend(events);
        let Some(standing) = standing.filter(|_| ledger.count_kept(pod)) else {
            step.events.extend(ledger.stand_down(uid));
            self.held.remove(uid);
            step.abandon(uid, waiting, preemptors);
            return true;
        };
        let others = self.held.extract_if(.., |other, held| {
            other != uid && held.pool == standing.pool && held.is_standing()
        });
        let others: Vec<(PodUid, Held)> = others.collect();
        for (other, held) in &others {
            self.leave(held, now);
            step.abandon(other, waiting, preemptors);
            step.events.extend(ledger.give_up_room(other));
        }
        let before = self.held.get(uid);
        // Of one that was there, `keep` has said.
        let is_ready = ledger.fits_in_room_of(uid, &pod.query, None).is_some();
        let ready = before.map_or(is_ready.then_some(now), |held| held.ready);
        let idle = before.map_or(Duration::ZERO, |held| held.idle);
        let least = before.map_or((standing.lacks, now), |held| held.least);
        let held = Held::new(pod, standing.pool.clone(), least, ledger);
        let wait = self.owners.wait(&held.owner, BOUND_WITHIN);
        let wait = before.map_or(wait, |held| held.wait);
        let held = Held { ready, idle, wait, ..held };
        self.owners.begin(&held.owner, now);
        let is_new = self.held.insert(uid.clone(), held).is_none();
        if preemptors.keep(uid, standing.node.clone(), pod.priority) {
            step.noted.push((pod.clone(), standing.node.clone()));
        }
        if is_ready {
            step.tell(uid, standing.node.clone(), waiting, ledger);
        }
        if is_new {
            step.begun.push((pod.pod.clone(), standing));
        }
        true
    }

    /// What a pod would have kept in a pool, beside what others of its scope have there.
    pub(crate) fn amounts(
        &self,
        uid: &PodUid,
        owner: &Owner,
        (pool, sizes): (&PoolName, &BTreeMap<PoolName, u64>),
        (wanted, at_most): (u64, Share),
    ) -> Amounts {
        let others = self.held.iter().filter(|(other, held)| *other != uid && held.pool == *pool);
        let of_scope = others.filter(|(_, held)| held.owner.scope() == owner.scope());
        let kept = of_scope.map(|(_, held)| held.amount).sum();
        let devices = sizes.get(pool).copied().unwrap_or(0);
        let at_most = devices.saturating_mul(at_most.millionths()).max(Share::WHOLE.millionths());
        Amounts { wanted, kept, at_most }
    }

    /// Goes on with a standing hold that an earlier process made for one that still waits long enough.
    pub(crate) fn stand_again(
        &mut self,
        pod: &WaitingPod,
        node: &NodeName,
        (waiting, preemptors, ledger, _): Facts<'_>,
        (rules, now, unix_seconds): (StandingRules, Timestamp, i64),
        step: &mut Step,
    ) {
        let uid = &pod.pod.uid;
        let is_old = pod.created_unix_seconds <= earlier(unix_seconds, rules.after);
        let sizes = ledger.pool_sizes(&pod.query);
        let may = |pool: &PoolName| {
            let is_taken = self.held.values().any(|held| held.pool == *pool && held.is_standing());
            !is_taken && may_keep(&sizes, pool, rules.at_most, &pod.query)
        };
        let again = (is_old && !rules.after.is_zero())
            .then(|| ledger.stand_again(Holder::of(pod, KeptFor::Line), node, may));
        let standing = self.go_on(pod, again, None, (preemptors, ledger), now, step);
        if let Some(standing) = standing.filter(|it| it.lacks == 0) {
            step.tell(uid, standing.node, waiting, ledger);
        }
    }

    /// Takes over room that the ledger keeps `again`, with nothing to evict for it. If it keeps none, the
    /// note goes. `until`: when the room of a group ends.
    pub(crate) fn go_on(
        &mut self,
        pod: &WaitingPod,
        again: Option<(Option<Standing>, Vec<LedgerEvent>)>,
        until: Option<Timestamp>,
        (preemptors, ledger): (&Preemptors, &Ledger),
        now: Timestamp,
        step: &mut Step,
    ) -> Option<Standing> {
        let (standing, events) = again.unwrap_or_default();
        step.events.extend(events);
        let Some(standing) = standing.filter(|_| ledger.count_kept(pod)) else {
            step.events.extend(ledger.stand_down(&pod.pod.uid));
            step.abandoned.push(pod.clone());
            return None;
        };
        let least = (standing.lacks, now);
        let mut held = Held { until, ..Held::new(pod, standing.pool.clone(), least, ledger) };
        held.wait = self.owners.wait(&held.owner, held.wait);
        self.held.insert(pod.pod.uid.clone(), held);
        preemptors.keep(&pod.pod.uid, standing.node.clone(), pod.priority);
        Some(standing)
    }

    /// Ends standing holds of less important pods in whose room the pod fits now.
    fn make_way(
        &mut self,
        pod: &WaitingPod,
        named: Option<&NamedNodes>,
        (waiting, preemptors, ledger, _): Facts<'_>,
        now: Timestamp,
        step: &mut Step,
    ) {
        let ends = self.held.iter().filter(|(other, held)| {
            held.may_be_passed_by(pod, other, waiting, ledger)
                && ledger.fits_in_place_of(other, &pod.query, named).is_some()
        });
        let ends: Vec<PodUid> = ends.map(|(other, _)| other.clone()).collect();
        for other in ends {
            step.events.extend(ledger.give_up_room(&other));
            self.pass(&other, (waiting, preemptors), now, step);
        }
    }
}

/// Whether the room of a pod can never be used: its node takes no new pods or is gone, or one that was to leave
/// it hangs.
fn is_lost(uid: &PodUid, held: &Held, preemptors: &Preemptors, ledger: &Ledger) -> bool {
    let has_left = preemptors.node(uid).is_some_and(|node| !ledger.takes_pods(&node));
    has_left || held.victims.iter().flatten().any(|victim| ledger.is_hung(victim))
}

/// The time on the wall clock this much earlier.
pub(crate) fn earlier(unix_seconds: i64, by: Duration) -> i64 {
    unix_seconds.saturating_sub(i64::try_from(by.as_secs()).unwrap_or(i64::MAX))
}

/// Whether a pool is large enough to keep what a request takes.
fn may_keep(
    sizes: &BTreeMap<PoolName, u64>,
    pool: &PoolName,
    at_most: Share,
    query: &PlacementRequest,
) -> bool {
    let count = query.gpu.as_ref().map_or(0, |request| u64::from(request.count.get()));
    let devices = sizes.get(pool).copied().unwrap_or(0);
    let most = u128::from(devices) * u128::from(at_most.millionths());
    count <= 1 || u128::from(count) * u128::from(Share::WHOLE.millionths()) <= most
}

#[cfg(test)]
mod tests;
