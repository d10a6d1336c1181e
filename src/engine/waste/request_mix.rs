//! The request mix: which requests the cluster sees, so that free room can be judged by use.
//!
//! As in FGD (USENIX ATC'23, "Beware of Fragmentation", section 4.2), requests are counted by type.
//! The most frequent types are typical, until they cover 95 % of all requests.

use std::collections::{BTreeMap, VecDeque};

use crate::model::request::GpuRequest;
use crate::waste::turnover::ONE;
use wire::ids::PodUid;
use wire::units::{MemMib, MilliCpu, Share};

/// Share of all requests that the typical ones cover, in percent (FGD's own default).
const COVERED_PERCENT: u64 = 95;

/// Requests in the window of a learned mix. It also bounds the memory. On the public trace `default`
/// the window costs 0.03 points against a mix that is known from the start.
pub const WINDOW: usize = 4000;

/// Arrivals between two looks at the mix. The first ones come at powers of two.
const LOOK_EVERY: u64 = 64;

/// Two mixes differ if this part of the requests is of other types, in percent.
const DIFFERENT_PERCENT: u128 = 6;

/// Two mixes also differ if their turnover does by this much, in millionths.
const OTHER_TURNOVER: u64 = ONE / 10;

/// What counts as one type of request: everything that decides where it fits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestType {
    /// The shape of the GPU request; `None` for a pod without a GPU.
    pub gpu: Option<GpuRequest>,
    /// CPU.
    pub cpu: MilliCpu,
}

impl RequestType {
    /// The type of a request.
    pub fn new(gpu: Option<&GpuRequest>, cpu: MilliCpu) -> Self {
        Self { gpu: gpu.map(GpuRequest::shape), cpu }
    }
}

/// How often a type of request was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Pods.
    pub pods: u64,
    /// Host memory of them all, in MiB.
    pub memory: u64,
}

impl Tally {
    /// Counts one more pod.
    pub fn count(&mut self, memory: MemMib) {
        self.pods += 1;
        self.memory = self.memory.saturating_add(memory.mib());
    }

    fn discount(&mut self, memory: MemMib) {
        self.pods -= 1;
        self.memory = self.memory.saturating_sub(memory.mib());
    }
}

/// The requests with their counts, the most frequent first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mix {
    pub(crate) types: Vec<(RequestType, Tally)>,
    typical: usize,
    /// Which part of the GPU room that pods take comes back because others end, in millionths.
    pub(crate) turnover: u64,
}

impl Mix {
    /// The mix of `counts`, the most frequent first; equally frequent types in their own order.
    pub fn of(counts: &BTreeMap<RequestType, Tally>) -> Self {
        let total: u64 = counts.values().map(|tally| tally.pods).sum();
        let mut types: Vec<_> = counts.iter().map(|(kind, count)| (kind.clone(), *count)).collect();
        types.sort_by(|a, b| b.1.pods.cmp(&a.1.pods).then_with(|| a.0.cmp(&b.0)));
        let mut covered = 0;
        let enough = types.iter().position(|(_, tally)| {
            covered += tally.pods;
            covered * 100 >= total * COVERED_PERCENT
        });
        let typical = enough.map_or(0, |last| last + 1);
        Self { types, typical, turnover: 0 }
    }

    /// The same where pods end, too.
    #[must_use]
    pub fn with_turnover(self, turnover: u64) -> Self {
        Self { turnover, ..self }
    }

    /// Whether 6 % of the requests are of other types than in `other`, or the turnover is another one, so
    /// that it pays to compute all nodes again. A window of thousands moves by half as much by chance.
    pub fn differs(&self, other: &Self) -> bool {
        self.turnover.abs_diff(other.turnover) > OTHER_TURNOVER || self.has_other_types(other)
    }

    fn has_other_types(&self, other: &Self) -> bool {
        let (ours, theirs) = (self.pods().max(1), other.pods().max(1));
        let mut pods: BTreeMap<&RequestType, (u64, u64)> = BTreeMap::new();
        for (kind, tally) in &self.types {
            pods.entry(kind).or_default().0 = tally.pods;
        }
        for (kind, tally) in &other.types {
            pods.entry(kind).or_default().1 = tally.pods;
        }
        // The sum of differences counts each pod twice: where it is missing and where it is more.
        let apart = pods.values().map(|(a, b)| (a * theirs).abs_diff(b * ours));
        let apart: u128 = apart.map(u128::from).sum();
        apart * 100 > 2 * DIFFERENT_PERCENT * u128::from(ours) * u128::from(theirs)
    }

    fn pods(&self) -> u64 {
        self.types.iter().map(|(_, tally)| tally.pods).sum()
    }

    /// The typical ones: the most frequent types, until they cover 95 % of all requests.
    pub fn typical(&self) -> &[(RequestType, Tally)] {
        &self.types[..self.typical]
    }
}

/// The mix learned from the last pods.
#[derive(Clone, Debug, Default)]
pub struct MixWindow {
    order: VecDeque<PodUid>,
    seen: BTreeMap<PodUid, (RequestType, MemMib)>,
    counts: BTreeMap<RequestType, Tally>,
    arrivals: u64,
    /// When the mix in use was made; `None` if it was not made of this window.
    used: Option<MixMoment>,
}

/// When a mix was made of a window.
#[derive(Clone, Copy, Debug)]
pub struct MixMoment {
    /// How many pods had come.
    arrivals: u64,
    /// The turnover, in millionths.
    turnover: u64,
}

/// A pod that came before the process started.
#[derive(Clone, Debug)]
pub struct EarlierPod {
    /// The pod.
    pub uid: PodUid,
    /// What it requests.
    pub kind: RequestType,
    /// Host memory that it requests.
    pub memory: MemMib,
    /// When it was created, in seconds since 1970; zero if unknown.
    pub created_unix_seconds: i64,
    /// What it has, or had, of all its GPUs together; nothing while it waits.
    pub share: Share,
    /// What has become of it.
    pub stage: Stage,
}

/// What has become of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It has no node yet.
    Waits,
    /// It has one.
    Runs,
    /// All its containers have stopped.
    Ended,
}

impl MixWindow {
    /// How many pods are remembered, at most [`WINDOW`].
    pub fn pods(&self) -> usize {
        self.order.len()
    }

    /// Notes a pod. Returns whether to look at the mix: the pod was new, and enough have come since the last
    /// look.
    pub fn observe(&mut self, uid: PodUid, kind: RequestType, memory: MemMib) -> bool {
        if self.seen.contains_key(&uid) {
            return false;
        }
        self.counts.entry(kind.clone()).or_default().count(memory);
        self.seen.insert(uid.clone(), (kind, memory));
        self.order.push_back(uid);
        if self.order.len() > WINDOW
            && let Some(oldest) = self.order.pop_front()
        {
            self.drop_pod(&oldest);
        }
        self.arrivals += 1;
        let is_early = self.arrivals < LOOK_EVERY;
        self.arrivals.is_multiple_of(LOOK_EVERY) || (is_early && self.arrivals.is_power_of_two())
    }

    /// Whether a mix made now, with this turnover, can differ from that in use: each new pod makes one pod
    /// of the window another one at most.
    pub fn can_differ(&self, turnover: u64) -> bool {
        let Some(used) = self.used else { return true };
        let new = u128::from(self.arrivals.saturating_sub(used.arrivals));
        let all = u128::try_from(self.order.len()).unwrap_or(u128::MAX);
        new * 100 > DIFFERENT_PERCENT.saturating_mul(all) || self.turns_otherwise(turnover)
    }

    /// Whether the turnover is another one than when the mix in use was made.
    pub fn turns_otherwise(&self, turnover: u64) -> bool {
        self.used.is_some_and(|used| turnover.abs_diff(used.turnover) > OTHER_TURNOVER)
    }

    /// When a mix is made that is made now, with this turnover.
    pub fn moment(&self, turnover: u64) -> MixMoment {
        MixMoment { arrivals: self.arrivals, turnover }
    }

    /// Notes that the mix is used that was made then; `None`: one that is not of this window.
    pub fn uses(&mut self, made_at: Option<MixMoment>) {
        self.used = made_at;
    }

    /// How often each type of request is in the window.
    pub fn counts(&self) -> &BTreeMap<RequestType, Tally> {
        &self.counts
    }

    /// The mix of the pods in the window.
    pub fn mix(&self) -> Mix {
        Mix::of(&self.counts)
    }

    fn drop_pod(&mut self, uid: &PodUid) {
        let Some((kind, memory)) = self.seen.remove(uid) else { return };
        if let Some(tally) = self.counts.get_mut(&kind) {
            tally.discount(memory);
            if tally.pods == 0 {
                self.counts.remove(&kind);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::request::Amount;
    use wire::units::Share;

    fn kind(millionths: u64) -> RequestType {
        let amount = Amount::Fraction(Share::from_millionths(millionths));
        RequestType::new(Some(&GpuRequest::one(amount)), MilliCpu::new(1000))
    }

    #[test]
    fn the_rarest_types_are_dropped_once_95_percent_are_covered() {
        let tally = |pods| Tally { pods, memory: 0 };
        let counts = [(kind(1), 94), (kind(2), 1), (kind(3), 4), (kind(4), 1)];
        let counts = counts.map(|(kind, pods)| (kind, tally(pods))).into();
        let mix = Mix::of(&counts);
        assert_eq!(mix.types.len(), 4);
        assert_eq!(mix.typical(), [(kind(1), tally(94)), (kind(3), tally(4))]);
        assert_eq!(Mix::of(&BTreeMap::new()).types, []);
    }

    #[test]
    fn the_window_forgets_the_oldest_and_counts_each_pod_once() {
        let mut window = MixWindow::default();
        for i in 0..=WINDOW {
            let size = if i == 0 { 500_000 } else { 250_000 };
            window.observe(PodUid::new(format!("{i}")), kind(size), MemMib::new(3));
            window.observe(PodUid::new(format!("{i}")), kind(size), MemMib::new(3));
        }
        let pods = u64::try_from(WINDOW).unwrap();
        let expected = (kind(250_000), Tally { pods, memory: 3 * pods });
        assert_eq!(window.mix().types, [expected]);
    }

    #[test]
    fn the_mix_difference_is_the_part_of_requests_of_another_type() {
        let mix = |pods: [u64; 2]| {
            let tally = |pods| Tally { pods, memory: 0 };
            Mix::of(&[(kind(1), tally(pods[0])), (kind(2), tally(pods[1]))].into())
        };
        let even = mix([50, 50]);
        for (other, differs) in [
            ([50, 50], false),
            ([500, 500], false),
            ([56, 44], false),
            ([57, 43], true),
            ([0, 10], true),
        ] {
            assert_eq!(even.differs(&mix(other)), differs, "{other:?}");
            assert_eq!(mix(other).differs(&even), differs, "{other:?}");
        }
        assert!(even.differs(&Mix::default()));
        assert!(!Mix::default().differs(&Mix::default()));
    }

    #[test]
    fn the_first_request_mixes_are_recomputed_quickly() {
        let mut window = MixWindow::default();
        let mut is_due =
            |i: &u64| window.observe(PodUid::new(format!("{i}")), kind(1), MemMib::ZERO);
        let rebuilds: Vec<u64> = (1..=2000).filter(&mut is_due).collect();
        assert_eq!(rebuilds[..9], [1, 2, 4, 8, 16, 32, 64, 128, 192]);
        assert_eq!(rebuilds[rebuilds.len() - 2..], [1920, 1984], "every 64th later on");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4))]

        #[test]
        fn a_mix_that_cannot_differ_is_not_made(
            sizes in prop::collection::vec(prop_oneof![4 => 1..3_u64, 1 => 1..2_000_u64], 1..6_000),
        ) {
            let mut window = MixWindow::default();
            let mut used = Mix::default();
            for (i, size) in (0_u64..).zip(sizes) {
                let uid = PodUid::new(format!("{i}"));
                if window.observe(uid, kind(size), MemMib::ZERO) {
                    let turnover = i / 1_000 * 40_000;
                    let mix = window.mix().with_turnover(turnover);
                    let can_differ = window.can_differ(turnover);
                    let differs = mix.differs(&used);
                    prop_assert!(can_differ || !differs, "after {} pods", window.arrivals);
                    if differs {
                        used = mix;
                        window.uses(Some(window.moment(turnover)));
                    }
                }
            }
        }
    }
}
