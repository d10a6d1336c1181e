//! The pods whose containers this process restarts so that they run elsewhere or give memory back, and how often
//! it may do so.

use std::collections::BTreeSet;
use std::time::Duration;

use dashmap::mapref::multiple::RefMulti;
use dashmap::{DashMap, DashSet};

use crate::hardware::device::{NodeName, PodUid};
use crate::hardware::units::Timestamp;
use crate::ledger::nodes::state::Ledger;
use crate::ledger::suggest::making_way::MakingWay;
use crate::ledger::suggest::waiting::WaitingPods;
use crate::model::reservation::{PodRef, Reservation};
use crate::mutation::{Mutation, mutated};

/// The pods that are being restarted.
#[derive(Default)]
pub struct Moving {
    /// Those with a task.
    going_on: DashSet<PodUid>,
    /// Those that cannot be moved.
    stuck: DashSet<PodUid>,
    /// When memory was taken back of each pod.
    restarts: DashMap<PodUid, Vec<Timestamp>>,
    /// When each pod was moved, home or to another MIG instance.
    moved: DashMap<PodUid, Vec<Timestamp>>,
    /// When the runtime last refused to start a container of each pod with its device, and which.
    refused: DashMap<PodUid, (Timestamp, Box<str>)>,
    /// The pods that are being moved to other MIG instances, with their namespaces.
    changing: DashMap<PodUid, String>,
    /// When pods of each node were.
    by_node: DashMap<NodeName, Vec<Timestamp>>,
    /// For which waiting pods that was done, and when.
    made_way: DashMap<PodUid, Timestamp>,
}

/// Most different requests of waiting pods for which others are moved at once, most important pods first.
const MOST_REQUESTS: usize = 20;

/// A pod must have waited so long before others are moved for it: most find a place within that.
const MOVE_AFTER: Duration = Duration::from_secs(10);

/// No other pod is moved for the same pod within this time.
const NOT_AGAIN_FOR: Duration = Duration::from_secs(300);

/// A pod that was moved home or to another MIG instance is not moved to another one within this time.
const STAYS: Duration = Duration::from_secs(600);

/// Most such moves of pods of one node, within an hour.
const MOST_OF_NODE: usize = 6;

/// How long such a move counts.
const HOUR: Duration = Duration::from_secs(3_600);

/// The part of the pods of a namespace that are moved so at the same time; one at least.
const PART_OF_NAMESPACE: usize = 10;

/// A pod that was moved so often within [`MOVES_COUNT`] stays where it is, unless another pod needs the room.
const MOST_MOVES: usize = 6;

/// How long a move counts.
const MOVES_COUNT: Duration = Duration::from_secs(6 * 3_600);

/// Most restarts of one pod to take memory back, within [`COUNTED_FOR`].
const MOST_RESTARTS: usize = 3;

/// How long such a restart counts.
const COUNTED_FOR: Duration = Duration::from_secs(600);

impl Moving {
    /// Begins a move. False if it goes on already.
    pub(crate) fn begin(&self, uid: &PodUid) -> bool {
        self.going_on.insert(uid.clone())
    }

    /// Ends the task of a move.
    pub(crate) fn end(&self, uid: &PodUid) {
        self.going_on.remove(uid);
    }

    /// Notes that a pod cannot be moved. False if that is known.
    pub(crate) fn stick(&self, uid: &PodUid) -> bool {
        self.stuck.insert(uid.clone())
    }

    /// Whether a pod cannot be moved.
    pub(crate) fn is_stuck(&self, uid: &PodUid) -> bool {
        self.stuck.contains(uid)
    }

    /// Notes that a pod need not be moved any more.
    pub(crate) fn unstick(&self, uid: &PodUid) {
        self.stuck.remove(uid);
    }

    /// Forgets a pod that has ended.
    pub(crate) fn forget(&self, uid: &PodUid) {
        self.stuck.remove(uid);
        self.restarts.remove(uid);
        self.moved.remove(uid);
        self.refused.remove(uid);
    }

    /// Forgets pods that have nothing any more: a move may have been noted after their end.
    pub(crate) fn sweep(&self, is_held: impl Fn(&PodUid) -> bool) {
        self.stuck.retain(|uid| is_held(uid));
        self.restarts.retain(|uid, _| is_held(uid));
        self.moved.retain(|uid, _| is_held(uid));
        self.refused.retain(|uid, _| is_held(uid));
    }

    /// Notes that the container of a pod is restarted on another device than before.
    pub(crate) fn moved(&self, uid: &PodUid, now: Timestamp) {
        note(&mut self.moved.entry(uid.clone()).or_default(), MOVES_COUNT, now);
    }

    /// Notes that the runtime refuses to start a container of a pod with its device.
    pub(crate) fn refuse(&self, uid: &PodUid, container: &str, now: Timestamp) {
        self.refused.insert(uid.clone(), (now, container.into()));
    }

    /// The container of a pod that the runtime last refused to start with its device.
    pub(crate) fn refused(&self, uid: &PodUid) -> Option<Box<str>> {
        self.refused.get(uid).map(|it| it.1.clone())
    }

    /// Whether the runtime refused to start a pod with its device within [`MOVES_COUNT`].
    fn is_refused(&self, uid: &PodUid, now: Timestamp) -> bool {
        self.refused.get(uid).is_some_and(|it| now.since(it.0) < MOVES_COUNT)
    }

    /// Whether a pod may be moved to another MIG instance.
    fn may_change(&self, uid: &PodUid, now: Timestamp) -> bool {
        let moved = self.moved.get(uid);
        let within = |time| moved.as_ref().map_or(0, |all| recent(all, time, now));
        within(MOVES_COUNT) < MOST_MOVES
            && within(STAYS) == 0
            && !self.is_stuck(uid)
            && !self.is_refused(uid, now)
            && !self.going_on.contains(uid)
    }

    /// Begins moves of pods to other MIG instances, for each waiting pod that fits nowhere at most one, as far as
    /// that is not too many. No pod is moved for a less important one.
    pub(crate) fn begin_making_way(
        &self,
        ledger: &Ledger,
        waiting: &WaitingPods,
        (now, unix_seconds): (Timestamp, i64),
    ) -> Vec<MakingWay> {
        self.made_way.retain(|_, at| now.since(*at) < NOT_AGAIN_FOR);
        let after = i64::try_from(MOVE_AFTER.as_secs()).unwrap_or(i64::MAX);
        let mut known = BTreeSet::new();
        let mut chosen = Vec::new();
        for state in waiting.all() {
            let pod = &state.waiting;
            let lacks_room = state.closest().is_some_and(|(why, _)| why.is_met_by_room());
            let has_waited = pod.created_unix_seconds <= unix_seconds.saturating_sub(after);
            let may = lacks_room
                && has_waited
                && state.is_answered
                && pod.group.is_none()
                && !self.made_way.contains_key(&pod.pod.uid)
                && ledger.team_may_have(pod);
            if !may || known.len() == MOST_REQUESTS || !known.insert(pod.query.clone()) {
                continue;
            }
            let may_move = |held: &Reservation| {
                let priority = held.tenure.map_or(i32::MAX, |tenure| tenure.priority);
                let is_more = priority > pod.priority;
                !is_more && self.may_change(&held.pod.uid, now)
            };
            let Some(found) = ledger.making_way(&state, may_move) else { continue };
            let movable = ledger.movable_pods();
            let movable = movable.get(found.pod.namespace()).copied().unwrap_or_default();
            if self.begin_change(&found.pod, &found.node, movable, now) {
                self.made_way.insert(found.waits.uid.clone(), now);
                chosen.push(found);
            }
        }
        chosen
    }

    /// Begins such a move; `movable` pods of its namespace may be moved. False if that would be too
    /// many at a time or within an hour.
    fn begin_change(&self, pod: &PodRef, node: &NodeName, movable: usize, now: Timestamp) -> bool {
        let same = |it: &RefMulti<'_, PodUid, String>| it.value() == pod.namespace();
        let at_once = self.changing.iter().filter(same).count();
        let of_node = self.by_node.get(node).map_or(0, |all| recent(&all, HOUR, now));
        if at_once >= (movable / PART_OF_NAMESPACE).max(1)
            || of_node >= MOST_OF_NODE
            || !self.begin(&pod.uid)
        {
            return false;
        }
        self.by_node.retain(|_, all| recent(all, HOUR, now) > 0);
        note(&mut self.by_node.entry(node.clone()).or_default(), HOUR, now);
        self.changing.insert(pod.uid.clone(), pod.namespace().to_owned());
        true
    }

    /// Whether such a move goes on.
    pub(crate) fn is_changing(&self, uid: &PodUid) -> bool {
        self.changing.contains_key(uid)
    }

    /// Ends the task of such a move.
    pub(crate) fn end_change(&self, uid: &PodUid) {
        self.changing.remove(uid);
        self.end(uid);
    }

    /// Whether a pod may be restarted once more to take memory back. Else one whose program takes it
    /// again each time would be restarted forever.
    pub(crate) fn may_restart(&self, uid: &PodUid, now: Timestamp) -> bool {
        let restarts = self.restarts.get(uid);
        restarts.is_none_or(|all| recent(&all, COUNTED_FOR, now) < MOST_RESTARTS)
            || mutated(Mutation::RestartsUnlimited)
    }

    /// Notes that a pod is restarted to take memory back.
    pub(crate) fn restarted(&self, uid: &PodUid, now: Timestamp) {
        note(&mut self.restarts.entry(uid.clone()).or_default(), COUNTED_FOR, now);
    }

    /// How many pods are noted.
    pub(crate) fn count(&self) -> usize {
        let of_pods = self.restarts.len() + self.moved.len() + self.changing.len();
        let of_pods = of_pods + self.made_way.len() + self.refused.len();
        self.going_on.len() + self.stuck.len() + of_pods + self.by_node.len()
    }
}

/// How many of these times are less than `time` ago.
fn recent(all: &[Timestamp], time: Duration, now: Timestamp) -> usize {
    all.iter().filter(|at| now.since(**at) < time).count()
}

/// Adds a time to those that are less than `time` ago.
fn note(all: &mut Vec<Timestamp>, time: Duration, now: Timestamp) {
    all.retain(|at| now.since(*at) < time);
    all.push(now);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_restarted_three_times_within_ten_minutes() {
        let (moves, uid) = (Moving::default(), PodUid::new("p"));
        let at = |seconds: u64| Timestamp::from_millis(1_000 * seconds);
        for seconds in [0, 100, 599] {
            assert!(moves.may_restart(&uid, at(seconds)), "{seconds}");
            moves.restarted(&uid, at(seconds));
        }
        assert!(!moves.may_restart(&uid, at(599)) && moves.may_restart(&uid, at(600)));
        assert!(moves.may_restart(&PodUid::new("q"), at(599)));
        moves.forget(&uid);
        assert_eq!(moves.count(), 0);
    }

    #[test]
    fn pods_are_moved_to_other_instances_seldom_and_a_few_at_a_time() {
        let moves = Moving::default();
        let at = |seconds: u64| Timestamp::from_millis(1_000 * seconds);
        let pod = |uid: &str| PodRef { uid: PodUid::new(uid), name: format!("a/{uid}").into() };
        let node = NodeName::new("n");
        let begin =
            |uid: &str, movable, now| moves.begin_change(&pod(uid), &node, movable, at(now));
        assert!(begin("p", 9, 0) && !begin("q", 19, 0), "one of fewer than 20");
        assert!(begin("q", 20, 0), "two of 20");
        let other = PodRef { uid: PodUid::new("r"), name: "b/r".into() };
        assert!(moves.begin_change(&other, &node, 1, at(0)), "another namespace");
        for uid in ["p", "q", "r"] {
            moves.end_change(&PodUid::new(uid));
        }
        for uid in ["s", "t", "u"] {
            assert!(begin(uid, 1, 3_599), "{uid}");
            moves.end_change(&PodUid::new(uid));
        }
        assert!(!begin("v", 1, 3_599) && begin("v", 1, 3_600), "six within an hour");
        moves.end_change(&PodUid::new("v"));

        let uid = PodUid::new("p");
        for seconds in [0, 600, 1_200, 1_800, 2_400, 3_000] {
            assert!(moves.may_change(&uid, at(seconds)), "{seconds}");
            moves.moved(&uid, at(seconds));
            assert!(!moves.may_change(&uid, at(seconds + 599)), "{seconds}");
        }
        assert!(!moves.may_change(&uid, at(21_599)), "six within six hours");
        assert!(moves.may_change(&uid, at(21_600)));
        moves.refuse(&uid, "main", at(90_000));
        assert!(!moves.may_change(&uid, at(111_599)), "another instance may be refused, too");
        assert!(moves.may_change(&uid, at(111_600)));
        moves.stick(&uid);
        assert!(!moves.may_change(&uid, at(120_000)));
        moves.forget(&uid);
        assert_eq!(moves.count(), 1, "the node");
        moves.moved(&uid, at(90_000));
        moves.stick(&uid);
        moves.sweep(|_| true);
        assert_eq!(moves.count(), 3);
        moves.sweep(|_| false);
        assert_eq!(moves.count(), 1);
    }
}
