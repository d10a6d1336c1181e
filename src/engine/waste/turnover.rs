//! Turnover: which part of the pods that come is matched by pods that end.
//!
//! It is 0 in a cluster that fills and 1 in one that stays as full as it is. It tells the policy
//! whether room that is taken comes back.

/// Arrivals after which one counts for a third (1 / e) of what the newest counts.
const MEMORY: u64 = 1_000;

/// A pod, or a turnover of 1: counts are in millionths.
pub(crate) const ONE: u64 = 1_000_000;

/// Pods that came and pods that ended, older ones counting less: each arrival makes all earlier ones
/// count a thousandth less. Whole numbers, so the same history gives the same turnover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Turnover {
    come: u64,
    gone: u64,
}

impl Turnover {
    /// A pod has come.
    pub(crate) fn come(&mut self) {
        self.come += ONE - self.come / MEMORY;
        self.gone -= self.gone / MEMORY;
    }

    /// A pod that ran has ended. In a cluster that empties, no more count than came.
    pub(crate) fn end(&mut self) {
        self.gone = (self.gone + ONE).min(self.come);
    }

    /// Pods that ran and ended before the process started, as far as those tell that run: when these were
    /// created, in seconds since 1970, in any order.
    ///
    /// While nothing ends, half of the pods that run have come in the later half of the time since the
    /// oldest of them. If more have, others that came earlier have ended. A time of zero is unknown.
    pub(crate) fn recall(&mut self, running: impl Iterator<Item = i64>) {
        let mut created: Vec<i64> = running.filter(|created| *created > 0).collect();
        created.sort_unstable();
        let (Some(oldest), Some(newest)) = (created.first(), created.last()) else { return };
        let [span, later] = [*oldest, created[(created.len() - 1) / 2]]
            .map(|created| u128::from(newest.abs_diff(created)));
        let ended = span.saturating_sub(2 * later);
        let share = (ended * u128::from(ONE)).checked_div(span).unwrap_or(0);
        let pods = u64::try_from(created.len()).unwrap_or(u64::MAX).min(MEMORY);
        let ended = pods.saturating_mul(u64::try_from(share).unwrap_or(ONE));
        self.gone = self.gone.saturating_add(ended).min(self.come);
    }

    /// The turnover, in millionths: 0 to 1,000,000.
    pub(crate) fn millionths(self) -> u64 {
        (self.gone * ONE).checked_div(self.come).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn percent(turnover: Turnover) -> u64 {
        turnover.millionths() / 10_000
    }

    #[test]
    fn it_is_zero_in_a_fill_and_one_where_as_many_end_as_come() {
        let mut turnover = Turnover::default();
        assert_eq!(percent(turnover), 0);
        (0..5_000).for_each(|_| turnover.come());
        assert_eq!(percent(turnover), 0);
        for _ in 0..5_000 {
            turnover.come();
            turnover.end();
        }
        assert_eq!(percent(turnover), 99);
        // what is long ago counts less: e^-1 after as many arrivals as it remembers
        (0..1_000).for_each(|_| turnover.come());
        assert_eq!(percent(turnover), 36);
    }

    #[test]
    fn a_cluster_that_empties_is_not_remembered_for_longer_than_others() {
        let mut turnover = Turnover::default();
        turnover.end();
        assert_eq!(percent(turnover), 0, "one that came before the process started");
        (0..3_000).for_each(|_| turnover.come());
        (0..100_000).for_each(|_| turnover.end());
        assert_eq!(percent(turnover), 100);
        (0..3_000).for_each(|_| turnover.come());
        assert_eq!(percent(turnover), 4);
    }

    #[test]
    fn running_pods_tell_what_has_ended_before() {
        let recalled = |created: &[i64]| {
            let mut turnover = Turnover::default();
            created.iter().for_each(|_| turnover.come());
            turnover.recall(created.iter().copied());
            percent(turnover)
        };
        let fill: Vec<i64> = (1..=100).map(|at| 1_000_000 + 60 * at).collect();
        assert_eq!(recalled(&fill), 0, "as many came early as late");
        // of those that came each minute, half have ended after each 10 minutes
        let steady: Vec<i64> = (0..12)
            .flat_map(|age| (0..1_i64 << (11 - age)).map(move |_| 1_000_000 - 600 * age))
            .collect();
        assert!(recalled(&steady) >= 80, "{}", recalled(&steady));
        // most are old, and nothing came for long: no sign that any has ended
        assert_eq!(recalled(&[1_000, 1_000, 1_000, 2_000]), 0);
        for nothing in [&[][..], &[5], &[7, 7, 7], &[0, 0, 9], &[i64::MIN, -1, 9]] {
            assert_eq!(recalled(nothing), 0, "{nothing:?}");
        }
        assert!(recalled(&[1, i64::MAX, i64::MAX - 1, i64::MAX]) >= 74, "no overflow");
    }

    proptest! {
        #[test]
        fn it_is_never_more_than_one(ends in prop::collection::vec(any::<bool>(), 0..5_000)) {
            let mut turnover = Turnover::default();
            for is_end in ends {
                if is_end { turnover.end() } else { turnover.come() }
                prop_assert!(turnover.millionths() <= ONE);
            }
        }
    }
}
