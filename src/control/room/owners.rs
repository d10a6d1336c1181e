//! Whose kept room nothing used, and what that owner has kept from then on.
//!
//! A pod whose volume cannot be provisioned passes *filter* and never gets to *bind*: kube-scheduler waits for
//! the volume for ten minutes. Room that is kept for it meanwhile is idle. An honest volume can take a minute, so
//! the first wait of an owner is that long. After that it is short, and seldom.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use engine::ledger::nodes::state::Ledger;
use engine::ledger::nodes::teams::TeamName;
use engine::ledger::suggest::waiting::WaitingPod;
use engine::model::reservation::Controller;
use wire::ids::PodUid;
use wire::units::Timestamp;

/// How long free room is kept for an owner whose room was not used before, or in whose namespace another one's was
/// not; and how long at most one group of a pool may wait for longer.
pub(crate) const TURN: Duration = Duration::from_secs(10);

/// The same for an owner whose own room was not used the last time.
pub(crate) const AGAIN: Duration = Duration::from_secs(5);

/// The first pause of such an owner; each one is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_secs(60);

/// The longest.
const LONGEST_PAUSE: Duration = Duration::from_secs(1_800);

/// Edits end a pause early no more often than this.
const EARLY_EVERY: Duration = Duration::from_secs(60);

/// For how long free room may be kept in sum for pods that end early, until one of them is bound.
const MOST_IDLE: Duration = Duration::from_secs(60);

/// Owners that are remembered; the first to be tried again are forgotten before others.
const MOST_OWNERS: usize = 10_000;

/// Who is to blame if kept room is not used.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Owner {
    scope: Scope,
    namespace: Arc<str>,
    /// None: pods of the namespace that nothing made.
    controller: Option<Controller>,
}

/// What bounds the room of several owners together: names of controllers are free.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    /// The team of the namespace, where teams have shares.
    Team(TeamName),
    /// The namespace: many people may share it.
    Namespace(Arc<str>),
}

impl Owner {
    pub(crate) fn of(pod: &WaitingPod, ledger: &Ledger) -> Self {
        let namespace: Arc<str> = pod.namespace.as_str().into();
        let scope = match ledger.teams.rules() {
            Some(_) => Scope::Team(ledger.teams.team_of(&namespace)),
            None => Scope::Namespace(Arc::clone(&namespace)),
        };
        Self { scope, namespace, controller: pod.controller }
    }

    pub(crate) fn scope(&self) -> &Scope {
        &self.scope
    }
}

/// An owner whose room was not used.
struct Failed {
    /// It pauses until then.
    until: Timestamp,
    /// How long the next pause is.
    next: Duration,
    /// Its pods at that time: an edit of one of them, or a new condition, ends the pause.
    pods: BTreeMap<PodUid, u64>,
    /// When that happened last.
    ended_early: Option<Timestamp>,
}

/// Room that an owner would have kept in a pool, in millionths of a GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Amounts {
    /// What is to be kept.
    pub(crate) wanted: u64,
    /// What is kept for others of its scope.
    pub(crate) kept: u64,
    /// The share of kept room of a scope in which room was not used.
    pub(crate) at_most: u64,
}

/// For how long free room was kept for pods that ended before they were late.
struct Idle {
    sum: Duration,
    /// When the last of them ended.
    last: Timestamp,
    /// For how long that of them was which ended then and was free for the longest time.
    longest: Duration,
}

/// The owners whose room was not used.
#[derive(Default)]
pub(crate) struct Owners {
    failed: BTreeMap<Owner, Failed>,
    /// The same of scopes, for groups that are larger than their share.
    scopes: BTreeMap<Scope, Failed>,
    /// Since a pod was bound in kept room.
    idle: BTreeMap<Owner, Idle>,
    scopes_idle: BTreeMap<Scope, Idle>,
}

impl Owners {
    /// Forgets owners of which nothing has been kept for long.
    pub(crate) fn tick(&mut self, now: Timestamp) {
        self.failed.retain(|_, it| now < it.until.plus(LONGEST_PAUSE));
        self.scopes.retain(|_, it| now < it.until.plus(LONGEST_PAUSE));
        self.idle.retain(|_, it| now < it.last.plus(LONGEST_PAUSE));
        self.scopes_idle.retain(|_, it| now < it.last.plus(LONGEST_PAUSE));
    }

    /// Whether nothing is kept for this owner now. An edit of one of these pods ends that, or a new condition.
    pub(crate) fn is_paused<'a>(
        &self,
        owner: &Owner,
        pods: impl IntoIterator<Item = &'a WaitingPod>,
        now: Timestamp,
    ) -> bool {
        let Some(failed) = self.failed.get(owner).filter(|it| it.until > now) else {
            return false;
        };
        let was_lately = failed.ended_early.is_some_and(|at| now.since(at) < EARLY_EVERY);
        let is_new = |pod: &WaitingPod| {
            failed.pods.get(&pod.pod.uid).is_some_and(|edition| *edition != pod.edition)
        };
        was_lately || !pods.into_iter().any(is_new)
    }

    /// Notes that room is kept for an owner from now on.
    pub(crate) fn begin(&mut self, owner: &Owner, now: Timestamp) {
        if let Some(failed) = self.failed.get_mut(owner).filter(|it| it.until > now) {
            (failed.until, failed.ended_early) = (now, Some(now));
        }
    }

    /// Whether so much may be kept for an owner that does not pause. More than the share only alone, and only after a
    /// whole pause of its scope: so a group of any size has its first try.
    pub(crate) fn may_keep(&self, owner: &Owner, amounts: Amounts, now: Timestamp) -> bool {
        let (own, scope) = (self.failed.get(owner), self.scopes.get(owner.scope()));
        if own.is_none() && scope.is_none() {
            return true;
        }
        if amounts.kept.saturating_add(amounts.wanted) <= amounts.at_most {
            return true;
        }
        let is_over = |it: &Failed| it.until <= now;
        amounts.kept == 0 && own.is_none_or(is_over) && scope.is_none_or(is_over)
    }

    /// How long free room is kept for an owner; `first`: the first time.
    pub(crate) fn wait(&self, owner: &Owner, first: Duration) -> Duration {
        match (self.failed.contains_key(owner), self.scopes.contains_key(owner.scope())) {
            (true, _) => AGAIN.min(first),
            (false, true) => TURN.min(first),
            (false, false) => first,
        }
    }

    /// Notes that the room of a pod ended that had been free for so long: the pod ended, was changed, or another one
    /// has the room. kube-scheduler may have backed off from it, so it has not failed; together they may not keep more
    /// idle than one that waits to the end.
    pub(crate) fn leave(&mut self, owner: &Owner, idle: Duration, now: Timestamp) {
        let scope = owner.scope();
        let all = add(&mut self.scopes_idle, scope, idle, now);
        if add(&mut self.idle, owner, idle, now) >= self.wait(owner, MOST_IDLE) {
            return self.fail(owner, BTreeMap::new(), now);
        }
        if all >= if self.scopes.contains_key(scope) { TURN } else { MOST_IDLE } {
            fail(&mut self.scopes, scope, BTreeMap::new(), now);
            self.scopes_idle.remove(scope);
        }
    }

    /// Notes that room which was free was not used by these pods.
    pub(crate) fn fail(&mut self, owner: &Owner, pods: BTreeMap<PodUid, u64>, now: Timestamp) {
        fail(&mut self.failed, owner, pods, now);
        fail(&mut self.scopes, owner.scope(), BTreeMap::new(), now);
        self.idle.remove(owner);
        self.scopes_idle.remove(owner.scope());
    }

    /// Notes that a pod was bound in room that was kept for it.
    pub(crate) fn used(&mut self, owner: &Owner) {
        self.failed.remove(owner);
        self.scopes.remove(owner.scope());
        self.idle.remove(owner);
        self.scopes_idle.remove(owner.scope());
    }
}

/// Adds to the idle time, and returns the sum. Several rooms that end together are one.
fn add<K: Clone + Ord>(
    all: &mut BTreeMap<K, Idle>,
    key: &K,
    idle: Duration,
    now: Timestamp,
) -> Duration {
    let known = all.get(key);
    let sum = known.map_or(Duration::ZERO, |it| it.sum);
    let longest = known.filter(|it| it.last == now).map_or(Duration::ZERO, |it| it.longest);
    let sum = sum + idle.saturating_sub(longest);
    if !idle.is_zero() && (known.is_some() || all.len() < MOST_OWNERS) {
        all.insert(key.clone(), Idle { sum, last: now, longest: longest.max(idle) });
    }
    sum
}

fn fail<K: Clone + Ord>(
    all: &mut BTreeMap<K, Failed>,
    key: &K,
    pods: BTreeMap<PodUid, u64>,
    now: Timestamp,
) {
    if let Some(failed) = all.get_mut(key)
        && failed.until > now
    {
        return failed.pods.extend(pods); // one failure of several rooms is one pause
    }
    if all.len() >= MOST_OWNERS && !all.contains_key(key) {
        let first = all.iter().min_by_key(|(_, it)| it.until).map(|(first, _)| first.clone());
        first.into_iter().for_each(|first| drop(all.remove(&first)));
    }
    let before = all.get(key);
    let pause = before.map_or(FIRST_PAUSE, |it| it.next);
    let ended_early = before.and_then(|it| it.ended_early);
    let (until, next) = (now.plus(pause), (2 * pause).min(LONGEST_PAUSE));
    all.insert(key.clone(), Failed { until, next, pods, ended_early });
}

/// The version of each pod that an owner may change.
pub(crate) fn editions<'a>(
    pods: impl IntoIterator<Item = &'a WaitingPod>,
) -> BTreeMap<PodUid, u64> {
    pods.into_iter().map(|pod| (pod.pod.uid.clone(), pod.edition)).collect()
}

#[cfg(test)]
mod tests;
