//! The best few of many nodes: what *filter* leaves to kube-scheduler in a large cluster.
//!
//! kube-scheduler decodes, wraps and scores every node that is left to it; in a cluster of 5,000 nodes that
//! takes it longer than all the rest. What it could still object to after filter depends on where a node is
//! (a volume that cannot be attached in that zone), so the best nodes of several failure domains are among
//! the few.

use std::collections::BinaryHeap;

use crate::packing::device::NodeName;
use crate::packing::fit::Misfit;

/// Which nodes of a list to keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The nodes to keep, the best first: the best of each failure domain, for at most half of them, and else
    /// the best of all. None where no node fits.
    pub kept: Vec<NodeName>,
    /// How many nodes do not fit, by reason, in the order of [`Misfit::LABELS`].
    pub refused: [usize; Misfit::LABELS.len()],
}

/// A node that fits. The better one is less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate<'a> {
    /// How good it is: the key of its rank.
    pub(super) key: u128,
    /// Its name: decides between equals.
    pub(super) name: &'a NodeName,
}

/// A choice that is being made, one node after the other.
pub(super) struct Choosing<'a> {
    most: usize,
    /// The best so far, the worst of them on top.
    best: BinaryHeap<Candidate<'a>>,
    /// The key of that worst one.
    worst: u128,
    /// The best of each failure domain.
    by_domain: Vec<Option<Candidate<'a>>>,
    refused: [usize; Misfit::LABELS.len()],
}

impl<'a> Choosing<'a> {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most: most.max(1),
            best: BinaryHeap::new(),
            worst: u128::MAX,
            by_domain: Vec::new(),
            refused: [0; Misfit::LABELS.len()],
        }
    }

    /// Notes nodes that do not fit.
    #[inline]
    pub(super) fn refused(&mut self, misfit: &Misfit, nodes: usize) {
        self.refused[misfit.position()] += nodes;
    }

    /// Notes a node that fits, by its key, in the failure domain of that number; zero for none. Most are not
    /// among the best, and of those nothing else is asked.
    #[inline]
    pub(super) fn fits(&mut self, key: u128, domain: u32, node: impl Fn() -> Candidate<'a>) {
        if domain > 0 {
            self.leads(key, domain, &node);
        }
        if self.best.len() < self.most {
            self.best.push(node());
        } else if key <= self.worst {
            let node = node();
            if let Some(mut worst) = self.best.peek_mut()
                && node < *worst
            {
                *worst = node;
            }
        } else {
            return;
        }
        self.worst = self.best.peek().map_or(u128::MAX, |worst| worst.key);
    }

    /// Notes a node that may be the best one of its failure domain.
    #[inline]
    fn leads(&mut self, key: u128, domain: u32, node: &impl Fn() -> Candidate<'a>) {
        let domain = usize::try_from(domain).expect("a number in memory");
        if self.by_domain.len() <= domain {
            self.by_domain.resize(domain + 1, None);
        }
        let first = &mut self.by_domain[domain];
        if first.is_none_or(|first| key <= first.key && node() < first) {
            *first = Some(node());
        }
    }

    /// The choice.
    pub(super) fn end(self) -> Choice {
        let mut kept: Vec<Candidate<'a>> = self.by_domain.into_iter().flatten().collect();
        kept.sort_unstable();
        kept.truncate(self.most / 2);
        for node in self.best.into_sorted_vec() {
            if kept.len() < self.most && !kept.contains(&node) {
                kept.push(node);
            }
        }
        kept.sort_unstable();
        Choice { kept: kept.iter().map(|node| node.name.clone()).collect(), refused: self.refused }
    }
}
