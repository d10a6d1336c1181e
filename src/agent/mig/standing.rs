//! Which orders about MIG instances stand: those of the newest leader, by its last reply.

use crate::report::wire::MigOrders;

/// Most orders of one reply that are obeyed: a node of 16 GPUs has 112 instances at most.
const MAX_ORDERS: usize = 512;

/// The orders that the agent obeys at this moment.
///
/// Orders of an older term than the newest one seen are ignored: that leader was replaced. The
/// orders of a replica end with its next reply, and when it does not answer: then another replica
/// may have given a pod the instance that was to go.
#[derive(Debug, Default)]
pub(crate) struct StandingOrders {
    /// The newest term of any replica.
    term: u64,
    /// The orders that stand, with the number of the link to the replica that gave them.
    given: Option<(usize, MigOrders)>,
}

impl StandingOrders {
    /// Learns what the replica with this link says now. Returns whether other orders stand.
    pub(crate) fn learn(&mut self, link: usize, orders: Option<MigOrders>) -> bool {
        let sane = orders.filter(|orders| {
            let is_sane = orders.make.len() + orders.remove.len() <= MAX_ORDERS;
            if !is_sane {
                tracing::error!(MAX_ORDERS, "a reply has too many orders about MIG instances");
            }
            is_sane && orders.term >= self.term
        });
        match sane {
            Some(orders) => {
                self.term = orders.term;
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
    pub(crate) fn orders(&self) -> Option<&MigOrders> {
        self.given.as_ref().map(|(_, orders)| orders)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::wire::MakeInstance;

    fn orders(term: u64, start: u32) -> MigOrders {
        let (gpu, profile) = ("GPU-a".to_owned(), "1g.10gb".to_owned());
        MigOrders { term, make: vec![MakeInstance { gpu, profile, start }], remove: Vec::new() }
    }

    #[test]
    fn the_last_reply_of_the_newest_leader_counts() {
        let mut standing = StandingOrders::default();
        assert!(!standing.learn(1, None));
        assert!(standing.learn(1, Some(orders(5, 0))));
        assert!(!standing.learn(1, Some(orders(5, 0))), "no news");
        assert!(!standing.learn(2, None), "a follower");
        assert!(!standing.lose(2));
        assert_eq!(standing.orders(), Some(&orders(5, 0)));
        assert!(standing.learn(2, Some(orders(6, 1))), "a new leader");
        assert!(!standing.learn(1, Some(orders(5, 0))), "the old leader does not know yet");
        assert_eq!(standing.orders(), Some(&orders(6, 1)));
        assert!(standing.learn(2, None), "nothing is left to do");
        assert!(!standing.learn(1, Some(orders(5, 0))), "the term is kept");
        assert_eq!(standing.orders(), None);
    }

    #[test]
    fn orders_end_with_the_answers_of_the_replica_that_gave_them() {
        let mut standing = StandingOrders::default();
        standing.learn(1, Some(orders(5, 0)));
        assert!(standing.lose(1));
        assert_eq!(standing.orders(), None);
        assert!(standing.learn(1, Some(orders(5, 0))), "it answers again");
        assert!(standing.learn(1, Some(orders(4, 0))), "an older term from the same replica");
        assert_eq!(standing.orders(), None);
        let many = MigOrders { make: vec![orders(7, 0).make[0].clone(); 513], ..orders(7, 0) };
        assert!(!standing.learn(1, Some(many)));
        assert_eq!(standing.orders(), None, "too many to be true");
    }
}
