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
pub(super) struct Candidate {
    /// How good it is: the key of its rank.
    pub(super) key: u128,
    /// Its place in the order of all names: decides between equals.
    pub(super) order: u32,
}

/// A choice that is being made, one node after the other.
pub(super) struct Choosing {
    most: usize,
    /// The best so far, the worst of them on top.
    best: BinaryHeap<Candidate>,
    /// The best of each failure domain.
    by_domain: Vec<Option<Candidate>>,
    refused: [usize; Misfit::LABELS.len()],
}

impl Choosing {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most: most.max(1),
            best: BinaryHeap::new(),
            by_domain: Vec::new(),
            refused: [0; Misfit::LABELS.len()],
        }
    }

    /// Notes nodes that do not fit.
    #[inline]
    pub(super) fn refused(&mut self, misfit: &Misfit, nodes: usize) {
        self.refused[misfit.position()] += nodes;
    }

    /// Notes a node that fits, in the failure domain of that number; zero for none.
    #[inline]
    pub(super) fn fits(&mut self, node: Candidate, domain: u32) {
        if domain > 0 {
            self.leads(node, domain);
        }
        if self.best.len() < self.most {
            self.best.push(node);
        } else if self.best.peek().is_some_and(|worst| node < *worst)
            && let Some(mut worst) = self.best.peek_mut()
        {
            *worst = node;
        }
    }

    /// Notes a node that may be the best one of its failure domain.
    #[inline]
    fn leads(&mut self, node: Candidate, domain: u32) {
        let domain = usize::try_from(domain).expect("a number in memory");
        if self.by_domain.len() <= domain {
            self.by_domain.resize(domain + 1, None);
        }
        let first = &mut self.by_domain[domain];
        if first.is_none_or(|first| node < first) {
            *first = Some(node);
        }
    }

    /// The choice. `name` tells the names by their order.
    pub(super) fn end(self, name: impl Fn(u32) -> NodeName) -> Choice {
        let mut kept: Vec<Candidate> = self.by_domain.into_iter().flatten().collect();
        kept.sort_unstable();
        kept.truncate(self.most / 2);
        for node in self.best.into_sorted_vec() {
            if kept.len() < self.most && !kept.contains(&node) {
                kept.push(node);
            }
        }
        kept.sort_unstable();
        let kept = kept.iter().map(|node| name(node.order)).collect();
        Choice { kept, refused: self.refused }
    }
}
