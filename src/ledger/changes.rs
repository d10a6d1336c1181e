//! The nodes that changed, in order: whoever keeps something per node looks only at those.

use std::collections::VecDeque;

/// Changes that are remembered: at 4 bytes each 256 KiB.
const REMEMBERED: usize = 65_536;

/// The positions of the nodes that changed last.
#[derive(Default)]
pub(super) struct Changes {
    /// Changes that are forgotten.
    forgotten: u64,
    nodes: VecDeque<u32>,
}

/// The changes since someone looked last.
pub(super) enum Since<'a> {
    /// Of these nodes, by position; one may be named several times.
    Nodes(Box<dyn Iterator<Item = usize> + 'a>),
    /// Too many to remember: of any node.
    Any,
}

impl Changes {
    /// Notes that the node at a position has changed.
    pub(super) fn note(&mut self, at: usize) {
        if self.nodes.len() == REMEMBERED {
            self.nodes.pop_front();
            self.forgotten += 1;
        }
        self.nodes.push_back(u32::try_from(at).expect("a cluster has fewer nodes"));
    }

    /// What has changed since `seen`, which is brought up to now. A newcomer begins with zero.
    pub(super) fn since(&self, seen: &mut u64) -> Since<'_> {
        let known = std::mem::replace(seen, self.forgotten + len(&self.nodes));
        match known.checked_sub(self.forgotten) {
            None => Since::Any,
            Some(skipped) => {
                let skipped = usize::try_from(skipped).expect("no more than are remembered");
                Since::Nodes(Box::new(
                    self.nodes
                        .range(skipped..)
                        .map(|at| usize::try_from(*at).expect("a position in memory")),
                ))
            }
        }
    }
}

fn len(nodes: &VecDeque<u32>) -> u64 {
    u64::try_from(nodes.len()).expect("lengths fit into 64 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(since: Since<'_>) -> Option<Vec<usize>> {
        match since {
            Since::Nodes(nodes) => Some(nodes.collect()),
            Since::Any => None,
        }
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
    fn who_has_not_looked_for_too_long_is_told_so() {
        let mut changes = Changes::default();
        let mut seen = 0;
        (0..=REMEMBERED).for_each(|at| changes.note(at));
        assert_eq!(named(changes.since(&mut seen)), None);
        assert_eq!(named(changes.since(&mut seen)), Some(vec![]));
        (0..REMEMBERED).for_each(|at| changes.note(at));
        assert_eq!(named(changes.since(&mut seen)).map(|nodes| nodes.len()), Some(REMEMBERED));
    }
}
