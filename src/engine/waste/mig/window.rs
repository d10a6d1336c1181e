//! The last requests for MIG instances, from which the mix is learned.

use std::collections::{BTreeSet, VecDeque};

use crate::waste::mig::types::TypeId;

/// Requests in the window. With 4,000 of them, as for shared GPUs, a change of the mix is noticed too late:
/// up to 14 points more of the demand were blocked.
pub const MIG_WINDOW: usize = 500;

/// Arrivals between two looks at the mix until [`SETTLED`]. The first ones come at powers of two.
const LOOK_EVERY: u64 = 64;

/// Arrivals between two looks after that.
const LOOK_LATER: u64 = 50;

/// Arrivals after which looks are more frequent.
const SETTLED: u64 = 1_000;

/// The last 500 requests. `P` names a pod, which counts once.
#[derive(Clone, Debug)]
pub struct MigWindow<P> {
    order: VecDeque<(P, TypeId)>,
    seen: BTreeSet<P>,
    /// By type.
    counts: Vec<u64>,
    arrivals: u64,
}

impl<P> Default for MigWindow<P> {
    fn default() -> Self {
        let (order, seen) = (VecDeque::new(), BTreeSet::new());
        Self { order, seen, counts: Vec::new(), arrivals: 0 }
    }
}

impl<P: Clone + Ord> MigWindow<P> {
    /// Notes the request of a pod. Returns whether to make the mix again: the pod is none of the last
    /// 500, and it is the 1st, 2nd, 4th, … 64th, 128th, 192nd, …, or from 1,000 on each 50th.
    pub fn observe(&mut self, pod: &P, kind: TypeId) -> bool {
        if !self.seen.insert(pod.clone()) {
            return false;
        }
        self.order.push_back((pod.clone(), kind));
        if self.counts.len() <= kind.position() {
            self.counts.resize(kind.position() + 1, 0);
        }
        self.counts[kind.position()] += 1;
        if self.order.len() > MIG_WINDOW
            && let Some((oldest, kind)) = self.order.pop_front()
        {
            self.seen.remove(&oldest);
            self.counts[kind.position()] -= 1;
        }
        self.arrivals += 1;
        match self.arrivals {
            early if early < LOOK_EVERY => early.is_power_of_two(),
            some if some < SETTLED => some.is_multiple_of(LOOK_EVERY),
            many => many.is_multiple_of(LOOK_LATER),
        }
    }

    /// How many requests of the window are of the type.
    pub fn count(&self, kind: TypeId) -> u64 {
        self.counts.get(kind.position()).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::waste::mig::types::{MigType, Types};

    #[test]
    fn the_mix_is_made_again_at_the_arrivals_of_the_design() {
        let kind = Types::default().id(&MigType::new([])).unwrap();
        let mut window = MigWindow::default();
        let due: Vec<u64> = (1..=1_200).filter(|pod| window.observe(pod, kind)).collect();
        let early = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256];
        assert_eq!(due[..10], early);
        assert_eq!(due[due.len() - 6..], [960, 1_000, 1_050, 1_100, 1_150, 1_200]);
        assert!(!window.observe(&1_200, kind), "a pod counts once");
        assert_eq!(window.count(kind), 500);
    }

    #[test]
    fn the_oldest_request_is_forgotten() {
        let mut types = Types::default();
        let [old, new, none] = [0, 1, 2]
            .map(|classes| types.id(&MigType::new(std::iter::repeat_n(None, classes))).unwrap());
        let mut window = MigWindow::default();
        window.observe(&0, old);
        let due = (1..500).filter(|pod| window.observe(pod, new)).count();
        assert_eq!(due, 6 + 6, "2 to 32, and 64 to 448 by 64s, less one");
        assert_eq!([old, new, none].map(|kind| window.count(kind)), [1, 499, 0]);
        window.observe(&500, new);
        assert_eq!([old, new, none].map(|kind| window.count(kind)), [0, 500, 0]);
        window.observe(&0, old);
        assert_eq!([old, new, none].map(|kind| window.count(kind)), [1, 499, 0]);
    }
}
