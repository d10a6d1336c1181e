//! What *filter* passed: the nodes on which a pod may be bound now.
//!
//! Only nodes that *filter* passed in the last 15 minutes are bound to, since kube-scheduler has
//! its own reasons against the others. The table is bounded: 16 bytes per node, at most `MAX_NODES`
//! nodes per pod and `MAX_PODS` pods, `MAX_UNSEEN` of them not shown by the watch. So a client that
//! makes up pods cannot push out real ones. Nor can one that names the UID of another pod remove
//! what was passed for that: each call adds nodes, and only time removes them.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use wire::ids::{NodeName, PodUid};
use wire::units::Timestamp;

/// How long a pod may be bound where *filter* passed it: the longest time that kube-scheduler lets
/// a pod wait for permission (`maxTimeout` of its framework).
pub const PASSED_FOR: Duration = Duration::from_secs(15 * 60);

/// Most nodes that are remembered of a pod. If *filter* leaves more to kube-scheduler
/// (`keep_best: 0`), it may take any, and the reservation alone decides.
const MAX_NODES: usize = 256;

/// Most pods that are remembered; then the oldest are forgotten. With 50 nodes each: 20 MB.
const MAX_PODS: usize = 20_000;

/// Most of them that the watch has not shown.
const MAX_UNSEEN: usize = 4_096;

/// Whether a pod may be bound to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    /// *Filter* passed it on other nodes only.
    Elsewhere,
    /// No call for it, or too long ago.
    Unknown,
}

#[derive(Debug)]
struct Passed {
    at: Timestamp,
    /// When any node was passed.
    any: Option<Timestamp>,
    /// Digests of the names, with the time of the last call that passed each, oldest first.
    nodes: Vec<(Timestamp, u64)>,
    /// The node to hold room on once the watch shows the pod.
    to_hold: Option<NodeName>,
    order: u64,
    is_seen: bool,
}

#[derive(Debug, Default)]
struct PassedTable {
    pods: BTreeMap<PodUid, Passed>,
    /// Pods that the watch has shown, in the order of their last calls.
    seen: BTreeMap<u64, PodUid>,
    unseen: BTreeMap<u64, PodUid>,
    next: u64,
}

/// What *filter* passed lately.
#[derive(Debug, Default)]
pub struct PassedPods {
    inner: Mutex<PassedTable>,
}

impl PassedPods {
    /// Notes where *filter* passed a pod, in addition to earlier nodes; `None` means any node.
    pub fn pass<'a>(
        &self,
        uid: &PodUid,
        nodes: Option<impl ExactSizeIterator<Item = &'a str>>,
        is_seen: bool,
        now: Timestamp,
    ) {
        let nodes = nodes.filter(|nodes| nodes.len() <= MAX_NODES);
        let mut inner = self.inner();
        let before = inner.remove(uid);
        let was_seen = before.as_ref().is_some_and(|before| before.is_seen);
        let (mut any, mut known) =
            before.map(|before| (before.any, before.nodes)).unwrap_or_default();
        match nodes {
            None => any = Some(now),
            Some(nodes) => {
                any = any.filter(|_| !is_seen);
                let digests: BTreeSet<u64> = nodes.map(digest).collect();
                known.retain(|(at, node)| now.since(*at) < PASSED_FOR && !digests.contains(node));
                known.extend(digests.into_iter().map(|node| (now, node)));
                known.drain(..known.len().saturating_sub(MAX_NODES));
            }
        }
        let is_seen = is_seen || was_seen;
        let order = inner.next;
        inner.next += 1;
        inner.list(is_seen).insert(order, uid.clone());
        let passed = Passed { at: now, any, nodes: known, to_hold: None, order, is_seen };
        inner.pods.insert(uid.clone(), passed);
        inner.shrink();
    }

    /// Notes to hold room for a pod on `node` as soon as the watch shows it.
    pub fn hold_later(&self, uid: &PodUid, node: &str) {
        if let Some(passed) = self.inner().pods.get_mut(uid) {
            passed.to_hold = Some(NodeName::new(node));
        }
    }

    /// Notes that the watch shows a pod waiting. Returns the node to hold room on, if one was
    /// noted.
    pub fn see(&self, uid: &PodUid) -> Option<NodeName> {
        let mut inner = self.inner();
        let passed = inner.pods.get_mut(uid)?;
        let to_hold = passed.to_hold.take();
        let (order, was_seen) = (passed.order, std::mem::replace(&mut passed.is_seen, true));
        if !was_seen {
            inner.unseen.remove(&order);
            inner.seen.insert(order, uid.clone());
            inner.shrink();
        }
        to_hold
    }

    /// Whether a pod may be bound to `node`.
    pub fn verdict(&self, uid: &PodUid, node: &str, now: Timestamp) -> Verdict {
        match self.inner().pods.get(uid) {
            Some(passed) if now.since(passed.at) < PASSED_FOR => {
                let node = digest(node);
                let mut passes =
                    passed.nodes.iter().filter(|(_, known)| *known == node).map(|(at, _)| *at);
                let is_recent = |at: Timestamp| now.since(at) < PASSED_FOR;
                let is_passed = passed.any.is_some_and(is_recent) || passes.any(is_recent);
                if is_passed { Verdict::Passed } else { Verdict::Elsewhere }
            }
            Some(_) | None => Verdict::Unknown,
        }
    }

    /// Forgets a pod that is bound, gone, or no longer fits any node.
    pub fn forget(&self, uid: &PodUid) {
        self.inner().remove(uid);
    }

    /// Forgets what is too old for a bind.
    pub fn tick(&self, now: Timestamp) {
        let mut inner = self.inner();
        for is_seen in [false, true] {
            while let Some(uid) = inner.list(is_seen).first_key_value().map(|(_, uid)| uid.clone())
                && inner.pods.get(&uid).is_some_and(|passed| now.since(passed.at) >= PASSED_FOR)
            {
                inner.remove(&uid);
            }
        }
    }

    fn inner(&self) -> MutexGuard<'_, PassedTable> {
        self.inner.lock()
    }
}

impl PassedTable {
    fn list(&mut self, is_seen: bool) -> &mut BTreeMap<u64, PodUid> {
        if is_seen { &mut self.seen } else { &mut self.unseen }
    }

    fn remove(&mut self, uid: &PodUid) -> Option<Passed> {
        let passed = self.pods.remove(uid)?;
        self.list(passed.is_seen).remove(&passed.order);
        Some(passed)
    }

    fn shrink(&mut self) {
        if self.unseen.len() > MAX_UNSEEN
            && let Some((_, oldest)) = self.unseen.pop_first()
        {
            self.pods.remove(&oldest);
        }
        if self.pods.len() > MAX_PODS
            && let Some((_, oldest)) = self.seen.pop_first()
        {
            self.pods.remove(&oldest);
        }
    }
}

/// The digest of a node's name; the same in every process.
fn digest(node: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    node.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_millis(seconds * 1_000)
    }

    fn pass(passed: &PassedPods, uid: &str, nodes: &[&str], seconds: u64) {
        passed.pass(&PodUid::new(uid), Some(nodes.iter().copied()), false, at(seconds));
    }

    #[test]
    fn a_passed_pod_is_remembered_per_node_for_15_minutes() {
        let passed = PassedPods::default();
        let uid = PodUid::new("a");
        let verdict = |node, seconds| passed.verdict(&uid, node, at(seconds));
        assert_eq!(verdict("n1", 0), Verdict::Unknown);
        pass(&passed, "a", &["n2", "n1"], 0);
        assert_eq!((verdict("n1", 899), verdict("n3", 0)), (Verdict::Passed, Verdict::Elsewhere));
        assert_eq!(verdict("n1", 900), Verdict::Unknown);
        pass(&passed, "a", &["n3"], 10);
        assert_eq!((verdict("n1", 10), verdict("n3", 10)), (Verdict::Passed, Verdict::Passed));
        assert_eq!((verdict("n1", 900), verdict("n3", 900)), (Verdict::Elsewhere, Verdict::Passed));
        passed.pass(&uid, None::<std::iter::Empty<&str>>, true, at(10));
        assert_eq!(verdict("anywhere", 10), Verdict::Passed);
        passed.tick(at(909));
        assert_eq!(verdict("n3", 909), Verdict::Passed);
        passed.tick(at(910));
        assert_eq!(passed.inner().pods.len(), 0);
        assert!(passed.inner().seen.is_empty() && passed.inner().unseen.is_empty());
    }

    #[test]
    fn the_nodes_of_the_latest_calls_about_a_pod_are_kept() {
        let passed = PassedPods::default();
        let uid = PodUid::new("a");
        let names: Vec<String> = (0..MAX_NODES + 1).map(|at| format!("n{at}")).collect();
        names.iter().for_each(|name| pass(&passed, "a", &[name.as_str()], 0));
        let verdict = |node: &str| passed.verdict(&uid, node, at(1));
        assert_eq!((verdict("n0"), verdict("n1")), (Verdict::Elsewhere, Verdict::Passed));
        // A call without a GPU request may pass any node; one about few nodes keeps that.
        passed.pass(&uid, None::<std::iter::Empty<&str>>, false, at(1));
        pass(&passed, "a", &["n1"], 1);
        assert_eq!(verdict("n0"), Verdict::Passed);
        // Unless the watch shows that the pod requests a GPU.
        passed.pass(&uid, Some(["n1"].into_iter()), true, at(1));
        assert_eq!(verdict("n0"), Verdict::Elsewhere);
    }

    #[test]
    fn room_is_held_once_the_watch_shows_the_pod() {
        let passed = PassedPods::default();
        passed.hold_later(&PodUid::new("a"), "n1");
        assert_eq!(passed.see(&PodUid::new("a")), None, "filter has not passed it");
        pass(&passed, "a", &["n1"], 0);
        passed.hold_later(&PodUid::new("a"), "n1");
        assert_eq!(passed.see(&PodUid::new("a")), Some(NodeName::new("n1")));
        assert_eq!(passed.see(&PodUid::new("a")), None, "once");
    }

    #[test]
    fn forged_pods_displace_each_other_and_no_real_pod() {
        let passed = PassedPods::default();
        pass(&passed, "real", &["n1"], 0);
        passed.see(&PodUid::new("real"));
        for number in 0..2 * MAX_UNSEEN {
            pass(&passed, &format!("made-up-{number}"), &["n1"], 0);
        }
        assert_eq!(passed.verdict(&PodUid::new("real"), "n1", at(1)), Verdict::Passed);
        assert_eq!(passed.inner().pods.len(), MAX_UNSEEN + 1);
        for number in 0..2 * MAX_PODS {
            let uid = PodUid::new(format!("pod-{number}"));
            passed.pass(&uid, Some(["n1"].into_iter()), true, at(2));
        }
        assert_eq!(passed.inner().pods.len(), MAX_PODS);
        let inner = passed.inner();
        assert_eq!(inner.seen.len() + inner.unseen.len(), MAX_PODS);
    }
}
