//! Which over-limit pod to evict next, if the operator wants that: a decision, and nothing else.
//!
//! The worst first, one at a time on each device, and only after several successive lists of
//! processes show it above what it may use. A pod within its share is never chosen, nor is one
//! without a reservation: gpupack does not know who owns it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::model::reservation::ReservationState;
use crate::usage::samples::OverLimitPod;
use wire::ids::{DeviceId, PodUid};
use wire::units::Timestamp;

/// Pause after the first refusal; each further one doubles it. Disruption budgets change when
/// replacements become ready, which takes some seconds at least.
const FIRST_PAUSE: Duration = Duration::from_secs(10);

/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// What the API server answered to an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionAnswer {
    /// The pod is ending, or is gone already.
    Ending,
    /// Not now: a disruption budget, or a fault.
    Refused,
    /// Unknown.
    Open,
}

/// Requested evictions, of pods that still have a reservation.
#[derive(Debug, Default)]
pub struct Evictions {
    attempts: BTreeMap<PodUid, Attempt>,
}

/// One of them.
#[derive(Debug)]
struct Attempt {
    /// The devices that the pod has, and the one of which it uses too much.
    devices: BTreeSet<DeviceId>,
    /// The answer; `None` while the request runs.
    answer: Option<EvictionAnswer>,
    /// When it may be requested again.
    again: Timestamp,
    /// How often it was refused.
    refusals: u32,
}

impl Attempt {
    /// Whether the pod may be about to end.
    fn may_be_ending(&self) -> bool {
        self.answer != Some(EvictionAnswer::Refused)
    }

    /// Whether another request makes sense `now`.
    fn is_due(&self, now: Timestamp) -> bool {
        matches!(self.answer, Some(EvictionAnswer::Refused | EvictionAnswer::Open))
            && now >= self.again
    }
}

/// The number of successive lists of processes that must show a pod over its limit before it is evicted.
const SURE_AFTER: u32 = 2;

impl Evictions {
    /// The over-limit pods to evict `now`: at most one per device, the worst first. They count as
    /// requested until [`Evictions::settle`] has the answer.
    ///
    /// `is_allocated` says whether a pod still has a reservation. A pod that a disruption budget keeps
    /// does not shield the next over-limit pod.
    pub fn choose(
        &mut self,
        mut over: Vec<OverLimitPod>,
        is_allocated: impl Fn(&PodUid) -> bool,
        now: Timestamp,
    ) -> Vec<OverLimitPod> {
        self.attempts.retain(|uid, _| is_allocated(uid));
        over.sort_by_key(|over| (Reverse(over.seen.excess()), over.pod().uid.clone()));
        let mut chosen = Vec::new();
        for candidate in over {
            let is_sure = candidate.is_current
                && is_allocated(&candidate.pod().uid)
                && candidate.held.state == ReservationState::Confirmed
                && candidate.seen.lists_over >= SURE_AFTER;
            let uid = &candidate.pod().uid;
            if !is_sure || self.attempts.get(uid).is_some_and(|attempt| !attempt.is_due(now)) {
                continue;
            }
            let held = candidate.held.placement.devices.iter().map(|placed| placed.id.clone());
            let devices: BTreeSet<_> = held.chain([candidate.device.clone()]).collect();
            let is_busy = self.attempts.iter().any(|(other, attempt)| {
                other != uid && attempt.may_be_ending() && !attempt.devices.is_disjoint(&devices)
            });
            if is_busy {
                continue;
            }
            let refusals = self.attempts.get(uid).map_or(0, |attempt| attempt.refusals);
            let attempt = Attempt { devices, answer: None, again: now, refusals };
            self.attempts.insert(uid.clone(), attempt);
            chosen.push(candidate);
        }
        chosen
    }

    /// Notes the answer to an eviction.
    pub fn settle(&mut self, uid: &PodUid, answer: EvictionAnswer, now: Timestamp) {
        let Some(attempt) = self.attempts.get_mut(uid) else { return };
        attempt.answer = Some(answer);
        match answer {
            EvictionAnswer::Ending => {}
            EvictionAnswer::Refused | EvictionAnswer::Open => {
                let pause = FIRST_PAUSE.saturating_mul(1 << attempt.refusals.min(8)).min(PAUSE_MAX);
                attempt.again = now.plus(pause);
                attempt.refusals = attempt.refusals.saturating_add(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::ledger_fixture::{bound, seconds, uid};
    use crate::model::reservation::{BorrowedMemory, Departure, Reservation};
    use crate::usage::samples::Use;
    use wire::ids::NodeName;
    use wire::units::{HostAmount, MemMib};

    /// `p` on `A` with `excess` MiB above its 500 MiB, in `lists_over` lists.
    fn over(pod: &str, device: &str, excess: u64, lists_over: u32) -> OverLimitPod {
        let fact = bound(pod, "n", device, 500_000);
        OverLimitPod {
            node: NodeName::new("n"),
            device: DeviceId::new(device).unwrap(),
            seen: Use { used: MemMib::new(500 + excess), allowed: MemMib::new(500), lists_over },
            held: Reservation {
                pod: fact.pod,
                placement: fact.placement.unwrap(),
                host: HostAmount::ZERO,
                state: ReservationState::Confirmed,
                request: fact.request,
                tenure: None,
                departure: Departure::Stays,
                borrowed: BorrowedMemory::Free,
                is_hung: false,
            },
            is_current: true,
        }
    }

    fn chosen(evictions: &mut Evictions, over: Vec<OverLimitPod>, at: u64) -> String {
        let chosen = evictions.choose(over, |_| true, seconds(at));
        chosen.iter().map(|over| over.pod().name.to_string()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_worst_over_limit_pod_is_first_and_one_per_device_at_a_time() {
        let mut evictions = Evictions::default();
        let all = || {
            vec![over("p", "A", 10, 9), over("q", "A", 20, 2), over("r", "B", 5, 2)]
                .into_iter()
                .chain([over("s", "C", 99, 1)])
                .collect::<Vec<_>>()
        };
        assert_eq!(chosen(&mut evictions, all(), 0), "q r", "`s` was seen once");
        assert_eq!(chosen(&mut evictions, all(), 9), "", "under way");
        evictions.settle(&uid("q"), EvictionAnswer::Ending, seconds(9));
        evictions.settle(&uid("r"), EvictionAnswer::Ending, seconds(9));
        assert_eq!(chosen(&mut evictions, all(), 999), "", "`q` and `r` are still ending");
        let gone = evictions.choose(all(), |pod| *pod != uid("q"), seconds(1_000));
        assert_eq!(gone.len(), 1);
        assert_eq!(*gone[0].pod().name, *"p", "`q` is gone");
    }

    #[test]
    fn a_refused_eviction_is_retried_with_growing_pauses() {
        let mut evictions = Evictions::default();
        let only = || vec![over("p", "A", 10, 2)];
        let mut attempt = Vec::new();
        for second in 0..1_000 {
            if chosen(&mut evictions, only(), second) == "p" {
                evictions.settle(&uid("p"), EvictionAnswer::Refused, seconds(second));
                attempt.push(second);
            }
        }
        assert_eq!(attempt, [0, 10, 30, 70, 150, 310, 610, 910]);
        let both = vec![over("p", "A", 10, 2), over("q", "A", 5, 2)];
        assert_eq!(chosen(&mut evictions, both, 1_000), "q", "`p` does not shield `q`");
    }

    #[test]
    fn an_undecided_eviction_blocks_its_device_and_is_retried() {
        let mut evictions = Evictions::default();
        let both = || vec![over("p", "A", 10, 2), over("q", "A", 5, 2)];
        assert_eq!(chosen(&mut evictions, both(), 0), "p");
        evictions.settle(&uid("p"), EvictionAnswer::Open, seconds(0));
        assert_eq!(chosen(&mut evictions, both(), 9), "", "`p` may be ending");
        assert_eq!(chosen(&mut evictions, both(), 10), "p");
        evictions.settle(&uid("nobody"), EvictionAnswer::Open, seconds(0));
    }

    #[test]
    fn old_events_and_undecided_pods_are_left_alone() {
        let mut evictions = Evictions::default();
        let silent = OverLimitPod { is_current: false, ..over("p", "A", 10, 9) };
        let mut ending = over("q", "A", 10, 9);
        ending.held.state =
            ReservationState::Draining { since: Timestamp::START, clean_reports: 0, shown: None };
        let mut assumed = over("r", "A", 10, 9);
        assumed.held.state = ReservationState::Assumed { since: Timestamp::START };
        assert_eq!(chosen(&mut evictions, vec![silent, ending, assumed], 0), "");
    }
}
