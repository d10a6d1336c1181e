//! The pods whose containers this process restarts so that they run elsewhere or give memory back, and how often
//! it may do so.

use std::time::Duration;

use dashmap::{DashMap, DashSet};

use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};
use wire::units::Timestamp;

/// The pods that are being restarted.
#[derive(Default)]
pub struct Moving {
    going_on: DashSet<PodUid>,
    /// Those that cannot be moved.
    stuck: DashSet<PodUid>,
    /// When memory was taken back of each pod.
    restarts: DashMap<PodUid, Vec<Timestamp>>,
    /// Which container of each pod the runtime last refused to start with its device.
    refused: DashMap<PodUid, Box<str>>,
}

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
        self.refused.remove(uid);
    }

    /// Forgets pods that have nothing any more: a move may have been noted after their end.
    pub(crate) fn sweep(&self, is_held: impl Fn(&PodUid) -> bool) {
        self.stuck.retain(|uid| is_held(uid));
        self.restarts.retain(|uid, _| is_held(uid));
        self.refused.retain(|uid, _| is_held(uid));
    }

    /// Notes that the runtime refuses to start a container of a pod with its device.
    pub(crate) fn refuse(&self, uid: &PodUid, container: &str) {
        self.refused.insert(uid.clone(), container.into());
    }

    /// The container of a pod that the runtime last refused to start with its device.
    pub(crate) fn refused(&self, uid: &PodUid) -> Option<Box<str>> {
        self.refused.get(uid).map(|container| container.clone())
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
        self.going_on.len() + self.stuck.len() + self.restarts.len() + self.refused.len()
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
}
