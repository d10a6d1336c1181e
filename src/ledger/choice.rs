//! The best few of many nodes: what *filter* leaves to kube-scheduler in a large cluster.
//!
//! kube-scheduler decodes, wraps and scores every node that is left to it; in a cluster of 5,000 nodes that
//! takes it longer than all the rest. What it could still object to after filter depends on where a node is
//! (a volume that cannot be attached in that zone), so the best nodes of several failure domains are among
//! the few.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::packing::fit::Misfit;

/// Which nodes of a list to keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Indices of the nodes to keep, the best first: the best of each failure domain, for at most half of
    /// them, and else the best of all. None where no node fits.
    pub kept: Vec<usize>,
    /// How many nodes do not fit, by reason, in the order of [`Misfit::LABELS`].
    pub refused: [usize; Misfit::LABELS.len()],
}

/// A node that fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate<'a> {
    /// How good it is: the key of its rank.
    pub(super) key: u128,
    /// Its name: decides between equals.
    pub(super) name: &'a str,
    /// Its place in the list.
    pub(super) index: usize,
}

impl Candidate<'_> {
    fn order(&self) -> (u128, &str, usize) {
        (self.key, self.name, self.index)
    }
}

impl Ord for Candidate<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.order().cmp(&other.order())
    }
}

impl PartialOrd for Candidate<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// A choice that is being made, one node after the other.
pub(super) struct Choosing<'a> {
    most: usize,
    /// The best so far, the worst of them on top.
    best: BinaryHeap<Candidate<'a>>,
    /// The best of each failure domain.
    by_domain: Vec<Option<Candidate<'a>>>,
    refused: [usize; Misfit::LABELS.len()],
}

impl<'a> Choosing<'a> {
    pub(super) fn new(most: usize) -> Self {
        Self {
            most: most.max(1),
            best: BinaryHeap::new(),
            by_domain: Vec::new(),
            refused: [0; Misfit::LABELS.len()],
        }
    }

    /// Notes a node that does not fit.
    #[inline]
    pub(super) fn refused(&mut self, misfit: &Misfit) {
        self.refused[misfit.position()] += 1;
    }

    /// Notes a node that fits, in the failure domain of that number; zero for none.
    #[inline]
    pub(super) fn fits(&mut self, node: Candidate<'a>, domain: u32) {
        if domain > 0 {
            self.leads(node, domain);
        }
        if self.best.len() < self.most {
            self.best.push(node);
        } else if let Some(mut worst) = self.best.peek_mut()
            && node < *worst
        {
            *worst = node;
        }
    }

    /// Notes a node that may be the best one of its failure domain.
    fn leads(&mut self, node: Candidate<'a>, domain: u32) {
        let domain = usize::try_from(domain).expect("a number in memory");
        if self.by_domain.len() <= domain {
            self.by_domain.resize(domain + 1, None);
        }
        let first = &mut self.by_domain[domain];
        if first.is_none_or(|first| node < first) {
            *first = Some(node);
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
        Choice { kept: kept.iter().map(|node| node.index).collect(), refused: self.refused }
    }
}
