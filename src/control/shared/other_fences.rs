//! Waiting pods that were touched last by another process of gpupack which says that it started later.
//!
//! That process is responsible for them, as long as it may live. It may be gone all the same: the clocks of two
//! nodes differ, or a touch came late. Two processes overlap for seconds, while the older one stops. So one
//! that has not touched a pod again for long is gone, by this process's own clock.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::hardware::device::PodUid;
use crate::hardware::units::Timestamp;

/// From then on the process that made a touch is gone: ten times what Kubernetes gives the one it stops.
pub const GONE_AFTER: Duration = Duration::from_secs(300);

/// The touches of other processes on waiting pods that the watch shows, with the time when each was first seen.
#[derive(Debug, Default)]
pub struct OtherFences {
    pods: Mutex<BTreeMap<PodUid, OtherFence>>,
}

#[derive(Clone, Copy, Debug)]
struct OtherFence {
    digest: u64,
    /// When it was first seen.
    at: Timestamp,
    /// Whether [`OtherFences::newly_old`] has listed it.
    is_listed: bool,
}

impl OtherFences {
    /// Notes the touch with this digest, which the watch shows on a pod.
    pub fn see(&self, uid: &PodUid, touch: u64, now: Timestamp) {
        let seen = OtherFence { digest: touch, at: now, is_listed: false };
        match self.pods().entry(uid.clone()) {
            Entry::Occupied(known) if known.get().digest == touch => {}
            Entry::Occupied(mut known) => _ = known.insert(seen),
            Entry::Vacant(free) => _ = free.insert(seen),
        }
    }

    /// Forgets a pod that does not wait any more, or that this process touched last.
    pub fn forget(&self, uid: &PodUid) {
        self.pods().remove(uid);
    }

    /// Whether the touch is the last one that was seen on the pod, for so long that its process is gone.
    pub fn is_old(&self, uid: &PodUid, touch: u64, now: Timestamp) -> bool {
        let known = self.pods().get(uid).copied();
        known.is_some_and(|seen| seen.digest == touch && now.since(seen.at) >= GONE_AFTER)
    }

    /// The pods whose touch became old since the last call.
    pub fn newly_old(&self, now: Timestamp) -> Vec<PodUid> {
        let mut pods = self.pods();
        let old = pods.iter_mut().filter_map(|(uid, seen)| {
            let is_new = !seen.is_listed && now.since(seen.at) >= GONE_AFTER;
            seen.is_listed |= is_new;
            is_new.then(|| uid.clone())
        });
        old.collect()
    }

    /// How many pods there are.
    pub fn count(&self) -> usize {
        self.pods().len()
    }

    fn pods(&self) -> MutexGuard<'_, BTreeMap<PodUid, OtherFence>> {
        self.pods.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touch_is_old_when_none_followed_for_long() {
        let touches = OtherFences::default();
        let uid = PodUid::new("a");
        let at = |seconds: u64| Timestamp::from_millis(seconds * 1_000);
        assert!(!touches.is_old(&uid, 1, at(1_000)), "it was not seen");
        touches.see(&uid, 1, at(0));
        touches.see(&uid, 1, at(200));
        assert!(!touches.is_old(&uid, 1, at(299)) && touches.newly_old(at(299)).is_empty());
        assert!(touches.is_old(&uid, 1, at(300)));
        assert_eq!(touches.newly_old(at(300)), std::slice::from_ref(&uid));
        assert_eq!(touches.newly_old(at(301)), [], "once");
        assert!(!touches.is_old(&uid, 2, at(300)), "the pod was touched again");
        touches.see(&uid, 2, at(310));
        assert!(!touches.is_old(&uid, 2, at(609)) && touches.is_old(&uid, 2, at(610)));
        assert_eq!(touches.newly_old(at(610)), std::slice::from_ref(&uid));
        touches.forget(&uid);
        assert_eq!((touches.is_old(&uid, 2, at(900)), touches.count()), (false, 0));
    }
}
