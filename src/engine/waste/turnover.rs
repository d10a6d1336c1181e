//! Turnover: which part of the GPU room that pods take comes back because others end.
//!
//! It is near 0 in a cluster that fills and near 1 in one that stays as full as it is.

use wire::units::Share;

/// GPUs taken after which one counts for a third (1 / e) of what the newest counts.
const MEMORY: u64 = 1_000;

/// GPUs taken by which nothing ended, as a prior: the first pods that end say little.
const PRIOR: u64 = 50;

/// A GPU, or a turnover of 1: both are counted in millionths.
pub(crate) const ONE: u64 = 1_000_000;

/// Most GPUs of one pod that count: as many as a node has.
const MOST: u64 = 16;

/// Fewest pods whose ages tell anything.
const FEW: usize = 16;

/// What pods have taken when they started, and given back when they ended. Older ones count less: each GPU
/// that is taken makes all earlier ones count a thousandth less. Whole numbers, so the same history gives
/// the same turnover. Pods count by their share, or else many small ones would speak for a few large ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Turnover {
    taken: u64,
    given_back: u64,
}

/// When a pod was created that has run, in seconds since 1970 (zero if unknown), and what it took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EarlierStart {
    pub(crate) created: i64,
    pub(crate) share: Share,
    pub(crate) has_ended: bool,
}

fn counted(share: Share) -> u64 {
    share.millionths().min(MOST * ONE)
}

impl Turnover {
    /// A pod has started with this share of all its GPUs together.
    pub(crate) fn start(&mut self, share: Share) {
        let share = counted(share);
        for sum in [&mut self.taken, &mut self.given_back] {
            *sum -= *sum / MEMORY * share / ONE;
        }
        self.taken += share;
    }

    /// A pod that ran has ended. In a cluster that empties, no more counts than was taken.
    pub(crate) fn end(&mut self, share: Share) {
        self.given_back = (self.given_back + counted(share)).min(self.taken);
    }

    /// Counts again from the pods that the API server lists when the process starts, oldest first. Of pods
    /// that are deleted it lists nothing, but the ages of the others tell of them.
    ///
    /// While nothing ends, half of the pods have come in the later half of the time since the oldest. If more
    /// have, some that came earlier are gone. Some very old ones are left out, which may be of another time.
    pub(crate) fn recall(&mut self, pods: &[EarlierStart]) {
        *self = Self::default();
        for pod in pods {
            self.start(pod.share);
            if pod.has_ended {
                self.end(pod.share);
            }
        }
        let created: Vec<i64> = pods.iter().map(|pod| pod.created).filter(|at| *at > 0).collect();
        let (Some(newest), true) = (created.last(), created.len() >= FEW) else { return };
        let [all, later] = [created.len() / 64 + 1, (created.len() - 1) / 2]
            .map(|place| u128::from(newest.abs_diff(created[place])));
        let gone = (all.saturating_sub(2 * later) * u128::from(self.taken)).checked_div(all);
        let gone = u64::try_from(gone.unwrap_or(0)).unwrap_or(u64::MAX);
        self.given_back = self.given_back.saturating_add(gone).min(self.taken);
    }

    /// The turnover, in millionths: 0 to 1,000,000.
    pub(crate) fn millionths(self) -> u64 {
        self.given_back * ONE / (self.taken + PRIOR * ONE)
    }
}

#[cfg(test)]
mod tests {
    use std::iter::zip;

    use proptest::prelude::*;

    use super::*;

    const GPU: Share = Share::WHOLE;

    fn percent(turnover: Turnover) -> u64 {
        turnover.millionths() / 10_000
    }

    #[test]
    fn it_is_zero_in_a_fill_and_near_one_where_as_many_end_as_start() {
        let mut turnover = Turnover::default();
        assert_eq!(percent(turnover), 0);
        (0..5_000).for_each(|_| turnover.start(GPU));
        assert_eq!(percent(turnover), 0);
        for _ in 0..5_000 {
            turnover.start(GPU);
            turnover.end(GPU);
        }
        assert_eq!(percent(turnover), 94);
        // what is long ago counts less: e^-1 after as many GPUs as it remembers
        (0..1_000).for_each(|_| turnover.start(GPU));
        assert_eq!(percent(turnover), 34);
    }

    #[test]
    fn the_first_pods_that_end_say_little() {
        let mut turnover = Turnover::default();
        turnover.start(GPU);
        turnover.end(GPU);
        assert_eq!(percent(turnover), 1);
    }

    #[test]
    fn many_small_pods_do_not_speak_for_large_ones() {
        let mut turnover = Turnover::default();
        (0..500).for_each(|_| turnover.start(GPU));
        for _ in 0..3_000 {
            let small = Share::from_millionths(10_000);
            turnover.start(small);
            turnover.end(small);
        }
        assert_eq!(percent(turnover), 6);
        let absurd = Share::from_millionths(u64::MAX);
        (0..1_000).for_each(|_| turnover.start(absurd));
        (0..1_000).for_each(|_| turnover.end(absurd));
        assert!(turnover.millionths() <= ONE);
    }

    #[test]
    fn a_cluster_that_empties_is_not_remembered_for_longer_than_others() {
        let mut turnover = Turnover::default();
        turnover.end(GPU);
        assert_eq!(percent(turnover), 0, "one that came before the process started");
        (0..3_000).for_each(|_| turnover.start(GPU));
        (0..100_000).for_each(|_| turnover.end(GPU));
        assert_eq!(percent(turnover), 95);
        (0..3_000).for_each(|_| turnover.start(GPU));
        assert_eq!(percent(turnover), 4);
    }

    #[test]
    fn the_pods_that_are_listed_tell_which_are_not() {
        let recalled = |created: &[i64], ended: usize| {
            let mut turnover = Turnover::default();
            (0..9).for_each(|_| turnover.start(GPU)); // seen before the list was complete
            let pods = zip(created, 0..).map(|(created, at)| EarlierStart {
                created: *created,
                share: GPU,
                has_ended: at < ended,
            });
            turnover.recall(&pods.collect::<Vec<_>>());
            percent(turnover)
        };
        let fill: Vec<i64> = (1..=600).map(|at| 1_000_000 + 60 * at).collect();
        assert_eq!(recalled(&fill, 0), 0, "as many came early as late");
        assert_eq!(recalled(&fill, 300), 38, "the older half is listed as ended, none is gone");
        // of those that came every 10 minutes, half are gone after 10 minutes more
        let steady: Vec<i64> = (0..10)
            .flat_map(|step| (0..1_i64 << step).map(move |_| 1_000_000 + 600 * step))
            .collect();
        assert!(recalled(&steady, 0) >= 60, "{}", recalled(&steady, 0));
        // one of another time beside a fill
        assert_eq!(recalled(&[&[5], &fill[..]].concat(), 0), 0);
        // most are old, and nothing came for long: no sign that any is gone
        assert_eq!(recalled(&[vec![1_000; 30], vec![2_000]].concat(), 0), 0);
        for nothing in [vec![], vec![5], vec![7; 40], vec![0; 40], vec![i64::MIN; 40]] {
            assert_eq!(recalled(&nothing, 0), 0, "{nothing:?}");
        }
        let wide = [vec![1; 3], vec![i64::MAX; 20]].concat();
        assert!(recalled(&wide, 0) > 0, "no overflow");
    }

    proptest! {
        #[test]
        fn it_is_never_more_than_one(
            pods in prop::collection::vec((any::<bool>(), 0..20_000_000_u64), 0..5_000),
        ) {
            let mut turnover = Turnover::default();
            for (is_end, share) in pods {
                let share = Share::from_millionths(share);
                if is_end { turnover.end(share) } else { turnover.start(share) }
                prop_assert!(turnover.millionths() <= ONE);
            }
        }
    }
}
