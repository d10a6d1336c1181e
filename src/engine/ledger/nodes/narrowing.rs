//! The best few of many nodes: what *filter* leaves to kube-scheduler in a large cluster.
//!
//! kube-scheduler decodes, wraps and scores each node that is left to it. With 5,000 nodes that
//! takes longer than all the rest. What else can rule out a node after *filter* depends on where
//! the node is (a volume that cannot be attached in that zone), so the few include the best nodes
//! of several failure domains.

use fixedbitset::FixedBitSet;

use crate::ledger::nodes::answer_cache::Refused;
use crate::ledger::nodes::ranking::RankedNode;
use crate::ledger::nodes::table::index;
use wire::ids::NodeName;

/// Which nodes of a list to keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The nodes to keep, the best first: the best of each failure domain, for at most half of
    /// them, then the best of all. Empty if no node fits.
    pub kept: Vec<NodeName>,
    /// How many nodes do not fit, by reason.
    pub refused: Refused,
}

/// Which nodes of a list fit, with their costs as numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keys {
    /// For each name of the list, the index of its node in `keys`; `None` if it does not fit.
    pub places: Vec<Option<usize>>,
    /// The costs, each node once, in no order. See [`Cost::key`](crate::scoring::cost::Cost::key).
    pub keys: Vec<u128>,
    /// Index of the best one; of equals, the one with the first name.
    pub best: Option<usize>,
}

impl Keys {
    /// Of names of one node each, with the cost of each that fits.
    pub fn of<'a>(nodes: impl Iterator<Item = (&'a str, Option<u128>)>) -> Self {
        let (mut all, mut first) = (Self::default(), None);
        for (name, key) in nodes {
            let place = key.map(|key| {
                all.keys.push(key);
                all.keys.len() - 1
            });
            if let Some((key, place)) = key.zip(place)
                && first.is_none_or(|first| (key, name) < first)
            {
                (first, all.best) = (Some((key, name)), Some(place));
            }
            all.places.push(place);
        }
        all
    }
}

/// A choice in progress.
pub(crate) struct Choosing {
    most: usize,
    /// The best nodes, in their order.
    best: Vec<RankedNode>,
    /// The best node of each failure domain.
    by_domain: Vec<Option<RankedNode>>,
    /// Domains whose best node is one of the best of all.
    led: FixedBitSet,
}

impl Choosing {
    /// Begins with the best nodes of all, in their order.
    pub(crate) fn new(most: usize, best: Vec<RankedNode>, domain: impl Fn(usize) -> u32) -> Self {
        let (by_domain, led) = (Vec::new(), FixedBitSet::new());
        let mut choosing = Self { most, best: Vec::new(), by_domain, led };
        for node in &best {
            choosing.leads(*node, domain(node.at));
        }
        choosing.best = best;
        let led = choosing.by_domain.iter().enumerate().filter(|(_, first)| first.is_some());
        choosing.led = led.map(|(domain, _)| domain).collect();
        choosing
    }

    /// Whether the best node of the domain with that number is known; always true of domain zero.
    #[inline]
    pub(crate) fn is_led(&self, domain: u32) -> bool {
        domain == 0 || self.led.contains(index(domain))
    }

    /// Notes a node that may be the best one of its failure domain; zero means no domain.
    pub(crate) fn leads(&mut self, node: RankedNode, domain: u32) {
        if domain == 0 {
            return;
        }
        let domain = index(domain);
        if self.by_domain.len() <= domain {
            self.by_domain.resize(domain + 1, None);
        }
        let first = &mut self.by_domain[domain];
        if first.is_none_or(|first| node < first) {
            *first = Some(node);
        }
    }

    /// The positions of the chosen nodes, the best first.
    pub(crate) fn end(self) -> Vec<usize> {
        let mut first: Vec<RankedNode> = self.by_domain.into_iter().flatten().collect();
        first.sort_unstable();
        first.truncate(self.most / 2);
        let others = self.best.into_iter().filter(|node| !first.contains(node));
        let mut kept: Vec<RankedNode> = others.take(self.most - first.len()).collect();
        kept.extend(first);
        kept.sort_unstable();
        kept.iter().map(|node| node.at).collect()
    }
}
