//! Pods that another gpupack process wrote last (requeue, fence or placement), whose start it says was
//! later.
//!
//! That process is responsible for them as long as it may live. But it may be gone: the clocks of
//! two nodes differ, or a write came late. Two processes overlap for seconds, while the older one
//! stops. So a process that has not written a pod again for long is gone, by this process's own
//! clock.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use wire::ids::PodUid;
use wire::units::Timestamp;

/// After this time the process that wrote is gone: ten times the grace that Kubernetes gives a pod.
pub const GONE_AFTER: Duration = Duration::from_secs(300);

/// The writes of other processes on waiting pods, with the time when the watch first showed each.
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
    /// Whether it was there before this process began, so that its process is gone.
    is_before: bool,
}

impl OtherFence {
    fn is_old(&self, now: Timestamp) -> bool {
        self.is_before || now.since(self.at) >= GONE_AFTER
    }
}

impl OtherFences {
    /// Notes the write with this digest, which the watch shows on a pod.
    pub fn see(&self, uid: &PodUid, fence: u64, now: Timestamp) {
        self.note(uid, OtherFence { digest: fence, at: now, is_listed: false, is_before: false });
    }

    /// Notes the write with this digest, which the first list of this process shows on a pod: the clock was set
    /// back since.
    pub fn see_before(&self, uid: &PodUid, fence: u64, now: Timestamp) {
        self.note(uid, OtherFence { digest: fence, at: now, is_listed: false, is_before: true });
    }

    fn note(&self, uid: &PodUid, seen: OtherFence) {
        match self.pods().entry(uid.clone()) {
            Entry::Occupied(known) if known.get().digest == seen.digest => {}
            Entry::Occupied(mut known) => _ = known.insert(seen),
            Entry::Vacant(free) => _ = free.insert(seen),
        }
    }

    /// Forgets a pod that no longer waits, or that this process wrote last.
    pub fn forget(&self, uid: &PodUid) {
        self.pods().remove(uid);
    }

    /// Whether this write is the last one seen on the pod, and so old that its process is gone.
    pub fn is_old(&self, uid: &PodUid, fence: u64, now: Timestamp) -> bool {
        let known = self.pods().get(uid).copied();
        known.is_some_and(|seen| seen.digest == fence && seen.is_old(now))
    }

    /// The pods whose last write became old since the last call.
    pub fn newly_old(&self, now: Timestamp) -> Vec<PodUid> {
        let mut pods = self.pods();
        let old = pods.iter_mut().filter_map(|(uid, seen)| {
            let is_new = !seen.is_listed && seen.is_old(now);
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
    fn a_fence_is_old_when_no_other_followed_for_long() {
        let fences = OtherFences::default();
        let uid = PodUid::new("a");
        let at = |seconds: u64| Timestamp::from_millis(seconds * 1_000);
        assert!(!fences.is_old(&uid, 1, at(1_000)), "it was not seen");
        fences.see(&uid, 1, at(0));
        fences.see(&uid, 1, at(200));
        assert!(!fences.is_old(&uid, 1, at(299)) && fences.newly_old(at(299)).is_empty());
        assert!(fences.is_old(&uid, 1, at(300)));
        assert_eq!(fences.newly_old(at(300)), std::slice::from_ref(&uid));
        assert_eq!(fences.newly_old(at(301)), [], "once");
        assert!(!fences.is_old(&uid, 2, at(300)), "the pod was fenced again");
        fences.see(&uid, 2, at(310));
        assert!(!fences.is_old(&uid, 2, at(609)) && fences.is_old(&uid, 2, at(610)));
        assert_eq!(fences.newly_old(at(610)), std::slice::from_ref(&uid));
        fences.forget(&uid);
        assert_eq!((fences.is_old(&uid, 2, at(900)), fences.count()), (false, 0));
    }

    #[test]
    fn a_fence_of_before_the_start_is_old_at_once() {
        let (fences, uid) = (OtherFences::default(), PodUid::new("a"));
        let at = |seconds: u64| Timestamp::from_millis(seconds * 1_000);
        fences.see_before(&uid, 1, at(0));
        fences.see(&uid, 1, at(1));
        assert!(fences.is_old(&uid, 1, at(1)), "the watch shows the same one");
        fences.see(&uid, 2, at(2));
        assert!(!fences.is_old(&uid, 2, at(3)), "it was written since");
    }
}
