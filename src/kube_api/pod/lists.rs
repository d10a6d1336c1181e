//! Lists of all pods: which are complete, and whether a newer one is wanted.

use parking_lot::Mutex;

use crate::step::news::News;

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
}

impl Default for Numbers {
    /// The first list is wanted.
    fn default() -> Self {
        Self { wanted: 1, begun: 0, complete: 0 }
    }
}

impl Lists {
    /// Wants a list that shows everything that has happened so far, and returns its number.
    pub fn want(&self) -> u64 {
        self.change(|it| it.wanted = it.wanted.max(it.begun + 1)).wanted
    }

    /// Notes that a list begins, and returns its number.
    pub fn begin(&self) -> u64 {
        self.change(|it| it.begun = it.wanted).begun
    }

    /// Notes that a list is complete.
    pub fn complete(&self, number: u64) {
        self.change(|it| it.complete = it.complete.max(number));
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
        lists.complete(second);
        assert!(lists.completed(wanted).now_or_never().is_some());
    }
}
