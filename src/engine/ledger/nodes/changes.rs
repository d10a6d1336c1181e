//! The nodes that changed, in order: a reader that keeps something per node checks only these.

use std::collections::{BTreeSet, VecDeque};

use wire::ids::PodUid;

/// Changes that are remembered: at 4 bytes each 256 KiB.
const REMEMBERED: usize = 65_536;

/// The positions of the nodes that changed last.
#[derive(Default)]
pub(crate) struct Changes {
    /// Changes that are forgotten.
    forgotten: u64,
    nodes: VecDeque<u32>,
}

impl Changes {
    /// Notes that the node at a position has changed.
    pub(crate) fn note(&mut self, at: usize) {
        if self.nodes.len() == REMEMBERED {
            self.nodes.pop_front();
            self.forgotten += 1;
        }
        self.nodes.push_back(u32::try_from(at).expect("a cluster has fewer nodes"));
    }

    /// The nodes that changed since `seen`, by position, some of them several times; moves `seen`
    /// to now. `None` if `seen` is too old to be remembered: then any node may have changed. A new
    /// reader begins with zero.
    pub(crate) fn since<'a>(
        &'a self,
        seen: &mut u64,
    ) -> Option<impl ExactSizeIterator<Item = usize> + use<'a>> {
        let remembered = u64::try_from(self.nodes.len()).expect("lengths fit into 64 bits");
        let known = std::mem::replace(seen, self.forgotten + remembered);
        let skipped = known.checked_sub(self.forgotten)?;
        let skipped = usize::try_from(skipped).expect("no more than are remembered");
        let nodes = self.nodes.range(skipped..);
        Some(nodes.map(|at| usize::try_from(*at).expect("a position in memory")))
    }
}

/// Ended pods that are remembered, so that a late event cannot add them again. More than end in a
/// cluster between an event and its late copy; 100 bytes each.
pub(crate) const REMEMBERED_ENDS: usize = 20_000;

/// The pods that ended last, so that a late event cannot add them again.
#[derive(Default)]
pub(crate) struct EndedPods {
    order: VecDeque<PodUid>,
    uids: BTreeSet<PodUid>,
}

impl EndedPods {
    pub(crate) fn remember(&mut self, uid: &PodUid) {
        if self.uids.insert(uid.clone()) {
            self.order.push_back(uid.clone());
        }
        if self.order.len() > REMEMBERED_ENDS
            && let Some(oldest) = self.order.pop_front()
        {
            self.uids.remove(&oldest);
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.uids.len()
    }

    pub(crate) fn contains(&self, uid: &PodUid) -> bool {
        self.uids.contains(uid)
    }
}

/// Agents of a node that are remembered besides the current one. Two are there at times, when one
/// replaces the other.
const MAX_EARLIER_AGENTS: usize = 8;

/// The agent whose reports are accepted for a node now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Session {
    pub(crate) id: Option<u64>,
    pub(crate) agent: String,
    pub(crate) sequence: u64,
    /// The agents before this one, the latest last, each with its last sequence number.
    earlier: Vec<(String, u64)>,
}

impl Session {
    /// The last sequence number that was accepted of an agent which is not the current one.
    pub(crate) fn last_of_earlier(&self, agent: &str) -> Option<u64> {
        self.earlier.iter().find(|(earlier, _)| earlier == agent).map(|(_, sequence)| *sequence)
    }

    /// Another agent reports from now on.
    pub(crate) fn replace_agent(&mut self, agent: &str) {
        self.earlier.retain(|(earlier, _)| earlier != agent);
        let before = std::mem::replace(&mut self.agent, agent.to_owned());
        if self.id.is_some() {
            self.earlier.push((before, self.sequence));
        }
        if self.earlier.len() > MAX_EARLIER_AGENTS {
            self.earlier.remove(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(since: Option<impl Iterator<Item = usize>>) -> Option<Vec<usize>> {
        since.map(Iterator::collect)
    }

    #[test]
    fn each_reader_sees_each_change_once() {
        let mut changes = Changes::default();
        let (mut early, mut late) = (0, 0);
        changes.note(3);
        changes.note(1);
        assert_eq!(named(changes.since(&mut early)), Some(vec![3, 1]));
        assert_eq!(named(changes.since(&mut early)), Some(vec![]));
        changes.note(3);
        assert_eq!(named(changes.since(&mut early)), Some(vec![3]));
        assert_eq!(named(changes.since(&mut late)), Some(vec![3, 1, 3]));
    }

    #[test]
    fn a_reader_that_was_away_too_long_is_informed() {
        let mut changes = Changes::default();
        let mut seen = 0;
        (0..=REMEMBERED).for_each(|at| changes.note(at));
        assert_eq!(named(changes.since(&mut seen)), None);
        assert_eq!(named(changes.since(&mut seen)), Some(vec![]));
        (0..REMEMBERED).for_each(|at| changes.note(at));
        assert_eq!(named(changes.since(&mut seen)).map(|nodes| nodes.len()), Some(REMEMBERED));
    }
}
