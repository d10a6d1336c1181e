//! One bind of a pod at a time.
//!
//! Two kube-schedulers may bind one pod to one node at once, on the same reservation. If the first
//! is refused and takes the reservation back while the second Binding is on its way, the pod could
//! be bound without a reservation until the watch shows it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dashmap::DashMap;
use tokio::sync::{Mutex, OwnedMutexGuard, Semaphore, SemaphorePermit};

use crate::shared::bind_error::BindError;
use kube_api::write::target::BindTarget;
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};

/// The Binding that is on its way for a pod. If its reply is lost, the API server is read for it.
type OnItsWay = Option<BindTarget>;

/// The bind locks, by pod. A pod whose Binding is decided has none.
#[derive(Default)]
pub struct BindLocks {
    locks: DashMap<PodUid, Arc<Mutex<OnItsWay>>>,
    /// Calls of *bind* that are being answered here.
    calls: AtomicUsize,
    /// How many binds may run concurrently.
    pub(crate) limits: BindLimits,
}

/// Most concurrent binds: of pods that the watch shows waiting for a GPU, and as many of others.
const MOST_BINDS: usize = 512;

/// Most binds that wait for the lock of one pod: one for each of two kube-schedulers.
const MOST_WAITING: usize = 2;

/// Most pods read concurrently, of those that the watch does not show; as many of the others.
const MOST_READS: usize = 16;

/// How many binds may run concurrently. Pods that may be forged have separate permits.
pub(crate) struct BindLimits {
    known: Semaphore,
    others: Semaphore,
    known_reads: Semaphore,
    other_reads: Semaphore,
}

impl Default for BindLimits {
    fn default() -> Self {
        let [known, others] = [MOST_BINDS; 2].map(Semaphore::new);
        let [known_reads, other_reads] = [MOST_READS; 2].map(Semaphore::new);
        Self { known, others, known_reads, other_reads }
    }
}

impl BindLimits {
    /// A permit for one bind, of a pod that the watch shows or of another one.
    pub(crate) fn place(&self, is_known: bool) -> Result<SemaphorePermit<'_>, BindError> {
        let places = if is_known { &self.known } else { &self.others };
        places.try_acquire().map_err(|_| BindError::TooMany)
    }

    /// The permits to read a pod, for pods that the watch shows or for others.
    pub(crate) fn reads(&self, is_known: bool) -> &Semaphore {
        if is_known { &self.known_reads } else { &self.other_reads }
    }
}

/// The bind lock of one pod. Other binds of the pod wait until it is dropped.
pub struct BindLock<'a> {
    locks: &'a BindLocks,
    uid: PodUid,
    /// The pod's undecided Binding; it outlives the lock.
    pub on_its_way: OwnedMutexGuard<OnItsWay>,
}

/// A call of *bind*, until it is answered.
pub struct OpenCall<'a>(&'a AtomicUsize);

impl Drop for OpenCall<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl BindLocks {
    /// Counts a call of *bind*. It is counted before the look whether this replica leads. So one that
    /// hands over knows of each call that it let in, also of those that have no lock yet.
    pub fn begin_call(&self) -> OpenCall<'_> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        OpenCall(&self.calls)
    }

    /// Whether a call of *bind* is being answered, or a Binding is undecided.
    pub fn are_open(&self) -> bool {
        self.calls.load(Ordering::SeqCst) > 0 || self.count() > 0
    }

    /// A permit for one bind of this pod. An error if too many others wait for its lock: while its
    /// Binding is undecided, each of them would take a permit from other pods.
    pub(crate) fn place(
        &self,
        uid: &PodUid,
        is_known: bool,
    ) -> Result<SemaphorePermit<'_>, BindError> {
        // The map and the bind that goes on hold one reference each.
        let waiting = self.locks.get(uid).map_or(0, |lock| Arc::strong_count(&lock));
        if waiting >= 2 + MOST_WAITING {
            return Err(BindError::TooMany);
        }
        self.limits.place(is_known)
    }

    /// Waits for the pod's bind lock.
    pub async fn take(&self, uid: &PodUid) -> BindLock<'_> {
        let mut lock = Arc::clone(&self.locks.entry(uid.clone()).or_default());
        if mutated(Mutation::NoBindLock) {
            lock = Arc::default();
        }
        BindLock { locks: self, uid: uid.clone(), on_its_way: lock.lock_owned().await }
    }

    /// The pod's bind lock, unless a bind of it goes on.
    pub fn try_take(&self, uid: &PodUid) -> Option<BindLock<'_>> {
        let lock = Arc::clone(&self.locks.entry(uid.clone()).or_default());
        let on_its_way = lock.try_lock_owned().ok()?;
        Some(BindLock { locks: self, uid: uid.clone(), on_its_way })
    }

    /// Whether the pod is being bound, or is undecided.
    pub(crate) fn has(&self, uid: &PodUid) -> bool {
        self.locks.contains_key(uid)
    }

    /// How many pods are being bound, or are undecided.
    pub(crate) fn count(&self) -> usize {
        self.locks.len()
    }

    /// The pods whose Binding is undecided and for which no bind goes on.
    pub fn abandoned(&self) -> Vec<PodUid> {
        // A `try_take` at the end of a bind may have kept that bind from removing its entry.
        self.locks.retain(|_, lock| Arc::strong_count(lock) > 1 || is_abandoned(lock));
        let pods = self.locks.iter().filter(|entry| is_abandoned(entry.value()));
        pods.map(|entry| entry.key().clone()).collect()
    }
}

/// Whether no bind goes on, and its Binding is undecided.
fn is_abandoned(lock: &Mutex<OnItsWay>) -> bool {
    lock.try_lock().is_ok_and(|on| on.is_some())
}

impl Drop for BindLock<'_> {
    fn drop(&mut self) {
        // Two references, the map's and this one's: no bind waits. New ones come only by the map.
        let is_decided = self.on_its_way.is_none();
        let locks = &self.locks.locks;
        locks.remove_if(&self.uid, |_, lock| is_decided && Arc::strong_count(lock) <= 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binds_of_unconfirmed_pods_displace_no_other_bind() {
        let limits = BindLimits::default();
        let made_up: Vec<_> = (0..MOST_BINDS).map(|_| limits.place(false).unwrap()).collect();
        assert!(matches!(limits.place(false), Err(BindError::TooMany)));
        assert!(limits.place(true).is_ok());
        drop(made_up);
        assert!(limits.place(false).is_ok());
    }

    #[tokio::test]
    async fn few_binds_wait_for_the_bind_lock_of_one_pod() {
        let locks = BindLocks::default();
        let (one, other) = (PodUid::new("one"), PodUid::new("other"));
        let first = locks.take(&one).await;
        let mut waiting = Vec::new();
        for _ in 0..MOST_WAITING {
            assert!(locks.place(&one, true).is_ok());
            let mut next = Box::pin(locks.take(&one));
            assert!(futures::poll!(next.as_mut()).is_pending());
            waiting.push(next);
        }
        assert!(matches!(locks.place(&one, true), Err(BindError::TooMany)));
        assert!(locks.place(&other, true).is_ok());
        drop(waiting.pop());
        assert!(locks.place(&one, true).is_ok(), "one has given up");
        drop((first, waiting));
    }

    #[tokio::test]
    async fn binds_of_one_pod_run_one_at_a_time_and_leave_no_lock() {
        let locks = BindLocks::default();
        let (one, other) = (PodUid::new("one"), PodUid::new("other"));
        let first = locks.take(&one).await;
        let apart = locks.take(&other).await;
        let mut second = Box::pin(locks.take(&one));
        assert!(futures::poll!(second.as_mut()).is_pending());
        drop(first);
        assert_eq!(locks.locks.len(), 2, "one waits for it");
        drop(second.await);
        drop(apart);
        assert!(locks.locks.is_empty());
    }
}
