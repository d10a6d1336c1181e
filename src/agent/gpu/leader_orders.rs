//! Which orders of a kind stand: those of the newest leader, by its last reply.

use std::time::Duration;

use wire::mutation::{Mutation, mutated};
use wire::report::bodies::{LimitOrders, MigOrders};
use wire::units::Timestamp;

/// How long a term counts after its last reply. A single extender takes its term from the clock, which may
/// have been set back when it starts again; and no leader gives orders for so long after its term.
const TERM_COUNTS_FOR: Duration = Duration::from_secs(30);

/// Most orders of one reply that are obeyed: a node of 16 GPUs has 112 instances at most, and fewer
/// than a thousand pods.
const MAX_ORDERS: usize = 4_096;

/// All orders of one kind in a reply.
pub(crate) trait Orders: PartialEq {
    /// What they are about.
    const ABOUT: &'static str;

    /// Term of the leader that gives them.
    fn term(&self) -> u64;

    /// How many they are.
    fn count(&self) -> usize;
}

impl Orders for MigOrders {
    const ABOUT: &'static str = "MIG instances";

    fn term(&self) -> u64 {
        self.term
    }

    fn count(&self) -> usize {
        self.make.len() + self.remove.len()
    }
}

impl Orders for LimitOrders {
    const ABOUT: &'static str = "limits of memory";

    fn term(&self) -> u64 {
        self.term
    }

    fn count(&self) -> usize {
        self.gpus.iter().map(|gpu| 1 + gpu.pods.len()).sum()
    }
}

/// The orders that the agent obeys at this moment.
///
/// Orders of an older term than the newest one of the last 30 s are ignored: that leader was replaced. The
/// orders of a replica end with its next reply, and when it does not answer: then another replica
/// may have given a pod the instance that was to go.
#[derive(Debug)]
pub(crate) struct StandingOrders<O> {
    /// The newest term of any replica, and when it was heard last.
    newest: Option<(u64, Timestamp)>,
    /// The orders that stand, with the number of the link to the replica that gave them.
    given: Option<(usize, O)>,
}

impl<O> Default for StandingOrders<O> {
    fn default() -> Self {
        Self { newest: None, given: None }
    }
}

impl<O: Orders> StandingOrders<O> {
    /// Learns what the replica with this link says now. Returns whether other orders stand.
    pub(crate) fn learn(&mut self, link: usize, orders: Option<O>, now: Timestamp) -> bool {
        let newest = self.newest.filter(|(_, heard)| now.since(*heard) < TERM_COUNTS_FOR);
        let newest = newest.map_or(0, |(term, _)| term);
        let sane = orders.filter(|orders| {
            let is_sane = orders.count() <= MAX_ORDERS;
            if !is_sane {
                tracing::error!(MAX_ORDERS, "a reply has too many orders about {}", O::ABOUT);
            }
            is_sane && (orders.term() >= newest || mutated(Mutation::OldOrdersObeyed))
        });
        match sane {
            Some(orders) => {
                self.newest = Some((orders.term(), now));
                let is_new = self.orders() != Some(&orders);
                self.given = Some((link, orders));
                is_new
            }
            None => self.lose(link),
        }
    }

    /// Learns that the replica with this link gives no orders, or does not answer. Returns whether
    /// its orders stood.
    pub(crate) fn lose(&mut self, link: usize) -> bool {
        self.given.take_if(|(by, _)| *by == link).is_some()
    }

    /// The orders that stand.
    pub(crate) fn orders(&self) -> Option<&O> {
        self.given.as_ref().map(|(_, orders)| orders)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::report::bodies::MakeInstance;

    fn orders(term: u64, start: u32) -> MigOrders {
        let (gpu, profile) = ("GPU-a".to_owned(), "1g.10gb".to_owned());
        let make = vec![MakeInstance { gpu, profile, start }];
        MigOrders { term, make, ..MigOrders::default() }
    }

    /// Learns at this time, in seconds.
    fn learn(
        at: u64,
        standing: &mut StandingOrders<MigOrders>,
        link: usize,
        told: Option<MigOrders>,
    ) -> bool {
        standing.learn(link, told, Timestamp::from_millis(at * 1_000))
    }

    #[test]
    fn the_last_reply_of_the_newest_leader_counts() {
        let mut standing = StandingOrders::default();
        assert!(!learn(0, &mut standing, 1, None));
        assert!(learn(0, &mut standing, 1, Some(orders(5, 0))));
        assert!(!learn(0, &mut standing, 1, Some(orders(5, 0))), "no news");
        assert!(!learn(0, &mut standing, 2, None), "a follower");
        assert!(!standing.lose(2));
        assert_eq!(standing.orders(), Some(&orders(5, 0)));
        assert!(learn(0, &mut standing, 2, Some(orders(6, 1))), "a new leader");
        assert!(
            !learn(0, &mut standing, 1, Some(orders(5, 0))),
            "the old leader does not know yet"
        );
        assert_eq!(standing.orders(), Some(&orders(6, 1)));
        assert!(learn(0, &mut standing, 2, None), "nothing is left to do");
        assert!(!learn(0, &mut standing, 1, Some(orders(5, 0))), "the term is kept");
        assert_eq!(standing.orders(), None);
    }

    #[test]
    fn orders_end_with_the_answers_of_the_replica_that_gave_them() {
        let mut standing = StandingOrders::default();
        learn(0, &mut standing, 1, Some(orders(5, 0)));
        assert!(standing.lose(1));
        assert_eq!(standing.orders(), None);
        assert!(learn(0, &mut standing, 1, Some(orders(5, 0))), "it answers again");
        assert!(
            learn(0, &mut standing, 1, Some(orders(4, 0))),
            "an older term from the same replica"
        );
        assert_eq!(standing.orders(), None);
        let many =
            MigOrders { make: vec![orders(7, 0).make[0].clone(); MAX_ORDERS + 1], ..orders(7, 0) };
        assert!(!learn(0, &mut standing, 1, Some(many)));
        assert_eq!(standing.orders(), None, "too many to be true");
    }
    #[test]
    fn a_term_counts_for_half_a_minute_after_its_last_reply() {
        let mut standing = StandingOrders::default();
        learn(0, &mut standing, 1, Some(orders(9, 0)));
        learn(20, &mut standing, 1, Some(orders(9, 0)));
        assert!(learn(49, &mut standing, 1, Some(orders(5, 1))), "the orders before end");
        assert_eq!(standing.orders(), None, "it may be an old leader");
        assert!(learn(50, &mut standing, 1, Some(orders(5, 1))), "the clock was set back");
        assert_eq!(standing.orders(), Some(&orders(5, 1)));
    }
}
