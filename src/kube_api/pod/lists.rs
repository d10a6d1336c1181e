//! Lists of all pods: which are complete, and whether a newer one is wanted.

use tokio::sync::watch;

/// The lists of pods that the watch makes. They are numbered from 1.
pub struct Lists {
    /// The number of the newest list that is wanted.
    wanted: watch::Sender<u64>,
    /// The numbers of the newest list that has begun, and of the newest complete one.
    made: watch::Sender<(u64, u64)>,
}

impl Default for Lists {
    /// The first list is wanted.
    fn default() -> Self {
        Self { wanted: watch::Sender::new(1), made: watch::Sender::new((0, 0)) }
    }
}

impl Lists {
    /// Wants a list that shows everything that has happened so far, and returns its number.
    pub fn want(&self) -> u64 {
        let (begun, _) = *self.made.borrow();
        self.wanted.send_if_modified(|wanted| {
            let is_more = *wanted <= begun;
            *wanted = (*wanted).max(begun + 1);
            is_more
        });
        self.newest()
    }

    /// Notes that a list begins, and returns its number.
    pub fn begin(&self) -> u64 {
        let number = self.newest();
        self.made.send_modify(|made| made.0 = number);
        number
    }

    /// Notes that a list is complete.
    pub fn complete(&self, number: u64) {
        self.made.send_modify(|made| made.1 = made.1.max(number));
    }

    /// Whether the list of this number, or a newer one, is complete.
    pub fn is_complete(&self, number: u64) -> bool {
        self.made.borrow().1 >= number
    }

    /// Whether a list is wanted that has not begun.
    pub fn is_wanted(&self) -> bool {
        self.newest() > self.made.borrow().0
    }

    /// The number of the newest list that is wanted.
    pub fn newest(&self) -> u64 {
        *self.wanted.borrow()
    }

    /// Waits until a newer list is wanted than this.
    pub async fn wanted_after(&self, number: u64) {
        let _ = self.wanted.subscribe().wait_for(|wanted| *wanted > number).await;
    }

    /// Waits until the list of this number, or a newer one, is complete.
    pub async fn completed(&self, number: u64) {
        let _ = self.made.subscribe().wait_for(|(_, complete)| *complete >= number).await;
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
