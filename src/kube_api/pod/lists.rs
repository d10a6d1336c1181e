//! Lists of all pods: which are complete, and whether a newer one is wanted.

use parking_lot::Mutex;

use runtime::step::news::News;

/// The lists of pods that the watch makes. They are numbered from 1.
#[derive(Default)]
pub struct Lists {
    numbers: Mutex<Numbers>,
    news: News,
}

#[derive(Clone, Copy)]
struct Numbers {
    /// The newest list that is wanted.
    wanted: u64,
    /// The newest list that has begun.
    begun: u64,
    /// The newest list that is complete.
    complete: u64,
    /// How many lists have begun, also those that were not wanted, and whether one goes on.
    count: u64,
    is_listing: bool,
}

impl Default for Numbers {
    /// The first list is wanted.
    fn default() -> Self {
        Self { wanted: 1, begun: 0, complete: 0, count: 0, is_listing: false }
    }
}

impl Lists {
    /// Wants a list that shows everything that has happened so far, and returns its number.
    pub fn want(&self) -> u64 {
        self.change(|numbers| numbers.wanted = numbers.wanted.max(numbers.begun + 1)).wanted
    }

    /// Notes that a list begins, and returns its number.
    pub fn begin(&self) -> u64 {
        let begins = self.change(|Numbers { wanted, begun, count, is_listing, .. }| {
            (*begun, *count, *is_listing) = (*wanted, *count + 1, true);
        });
        begins.begun
    }

    /// Notes that a list is complete.
    pub fn complete(&self, number: u64) {
        self.change(|Numbers { complete, is_listing, .. }| {
            (*complete, *is_listing) = (number.max(*complete), false);
        });
    }

    /// How many lists there were; `None` while one goes on. What was read before a list may be older
    /// than what it has shown.
    pub fn count(&self) -> Option<u64> {
        let Numbers { count, is_listing, .. } = self.numbers();
        (!is_listing).then_some(count)
    }

    /// Whether the list of this number, or a newer one, is complete.
    pub fn is_complete(&self, number: u64) -> bool {
        self.numbers().complete >= number
    }

    /// Whether a list is wanted that has not begun.
    pub fn is_wanted(&self) -> bool {
        let Numbers { wanted, begun, .. } = self.numbers();
        wanted > begun
    }

    /// The number of the newest list that is wanted.
    pub fn newest(&self) -> u64 {
        self.numbers().wanted
    }

    /// Waits until a newer list is wanted than this.
    pub async fn wanted_after(&self, number: u64) {
        self.news.until(|| self.newest() > number).await;
    }

    /// Waits until the list of this number, or a newer one, is complete.
    pub async fn completed(&self, number: u64) {
        self.news.until(|| self.is_complete(number)).await;
    }

    fn numbers(&self) -> Numbers {
        *self.numbers.lock()
    }

    fn change(&self, change: impl FnOnce(&mut Numbers)) -> Numbers {
        let mut numbers = self.numbers.lock();
        change(&mut numbers);
        let changed = *numbers;
        drop(numbers);
        self.news.ring();
        changed
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_list_that_began_earlier_does_not_do() {
        let lists = Lists::default();
        assert_eq!(
            (lists.want(), lists.is_wanted()),
            (1, true),
            "none has begun: the first will do"
        );
        let first = lists.begin();
        assert!(!lists.is_wanted() && lists.wanted_after(first).now_or_never().is_none());
        let wanted = lists.want();
        assert_eq!((wanted, lists.want()), (2, 2));
        assert!(lists.is_wanted() && lists.wanted_after(first).now_or_never().is_some());
        lists.complete(first);
        assert!(lists.completed(wanted).now_or_never().is_none());
        let second = lists.begin();
        assert_eq!(lists.count(), None, "one goes on");
        lists.complete(second);
        assert!(lists.completed(wanted).now_or_never().is_some());
        let third = lists.begin();
        lists.complete(third);
        assert_eq!((third, lists.count()), (second, Some(3)), "the third was not wanted");
    }
}
