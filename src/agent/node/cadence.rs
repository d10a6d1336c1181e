//! When to sample, and when to list processes: pure decisions over the clock and the allocations.
//!
//! Reading memory costs microseconds. Listing processes costs milliseconds under a lock of the
//! driver that also stalls the workloads. So lists are read every five seconds, and for a minute
//! after the end of a pod, whose room is free only when lists show no process of it. They are also
//! read when use differs from the last list: it has grown, or it has changed and is above what is
//! allocated.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::gpu::sample::{ProbeError, ProcessSampling, Sample, is_draining};
use wire::report::bodies::Allocation;
use wire::units::Timestamp;

/// Longest time between two lists of processes.
const LIST_EVERY: Duration = Duration::from_secs(5);

/// Time between samples while a pod drains, so that its room is soon free.
const QUICK_PERIOD: Duration = Duration::from_millis(250);

/// How long the end of a pod shortens the pause. A process that hangs longer, maybe in the driver,
/// is checked as rarely as others, since each list stalls the workloads.
const QUICK_FOR: Duration = Duration::from_secs(60);

/// Time between attempts while nothing can be read; it doubles with each that the library refuses, since opening it is
/// slow.
pub(crate) const PROBE_RETRY: Duration = Duration::from_secs(5);

/// Longest such time.
const PROBE_RETRY_MAX: Duration = Duration::from_secs(60);

/// Change of a device's used memory above which its list is read early, and a sample is reported:
/// less than the context of one process, which takes hundreds of MiB.
pub(crate) const MEMORY_STEP_MIB: u64 = 64;

/// Decides when one node is sampled.
#[derive(Debug)]
pub struct Cadence {
    period: Duration,
    /// Time of the last lists of processes.
    listed: Option<Timestamp>,
    /// Used memory of each device at that time.
    listed_mib: BTreeMap<String, u64>,
    /// When each draining pod was first seen draining, by UID.
    drains: BTreeMap<String, Timestamp>,
    /// The time of the last sample.
    sampled: Timestamp,
    /// How often in a row the library has refused.
    refusals: u32,
}

impl Cadence {
    /// A cadence of one sample per `period`.
    pub fn new(period: Duration) -> Self {
        Self {
            period,
            listed: None,
            listed_mib: BTreeMap::new(),
            drains: BTreeMap::new(),
            sampled: Timestamp::START,
            refusals: 0,
        }
    }

    /// Whether the sample taken `now` lists processes.
    pub fn sampling(&mut self, allocations: &[Allocation], now: Timestamp) -> ProcessSampling {
        self.sampled = now;
        let draining = allocations.iter().filter(|allocation| is_draining(allocation));
        let uids = draining.map(|allocation| &allocation.pod_uid);
        self.drains =
            uids.map(|uid| (uid.clone(), *self.drains.get(uid).unwrap_or(&now))).collect();
        let is_due = self.listed.is_none_or(|listed| now.since(listed) >= LIST_EVERY);
        if is_due || self.has_recent_drain(allocations) {
            ProcessSampling::List
        } else {
            ProcessSampling::Skip
        }
    }

    /// Whether any pod has started to drain recently.
    fn has_recent_drain(&self, allocations: &[Allocation]) -> bool {
        let mut draining = allocations.iter().filter(|allocation| is_draining(allocation));
        draining.any(|allocation| {
            let since = self.drains.get(&allocation.pod_uid);
            since.is_none_or(|since| self.sampled.since(*since) < QUICK_FOR)
        })
    }

    /// Whether a sample without lists shows that lists are needed at once. That is so if a device
    /// uses more than at the last lists, or uses less, but still more than is allocated.
    ///
    /// Growth within what is allocated counts too: one tenant may use the idle share of another.
    /// Memory that comes and goes costs at most one extra list for each regular one, since only use
    /// beyond the last list counts as growth.
    pub fn needs_list(&self, sample: &Sample, allocations: &[Allocation]) -> bool {
        sample.uses.iter().any(|device| {
            let Some(used) = device.used_mib else { return false };
            let listed = self.listed_mib.get(&device.uuid).copied().unwrap_or(0);
            used.abs_diff(listed) > MEMORY_STEP_MIB
                && (used > listed || used > allocated_mib(allocations, &device.uuid))
        })
    }

    /// Learns that `sample`, taken `now`, has lists of processes.
    pub fn learn_lists(&mut self, sample: &Sample, now: Timestamp) {
        self.listed = Some(now);
        let used =
            sample.uses.iter().map(|device| (device.uuid.clone(), device.used_mib.unwrap_or(0)));
        self.listed_mib = used.collect();
    }

    /// Time from one sample to the next.
    pub fn pause(&self, allocations: &[Allocation]) -> Duration {
        if self.has_recent_drain(allocations) { self.period.min(QUICK_PERIOD) } else { self.period }
    }

    /// Learns why nothing can be read, if so. To look for a missing library, or to wait for a call, costs nothing.
    pub fn learn_failure(&mut self, failure: Option<&ProbeError>) {
        self.refusals = match failure {
            None
            | Some(
                ProbeError::LibraryMissing { .. }
                | ProbeError::Opening
                | ProbeError::Closed { .. }
                | ProbeError::Hangs { .. }
                | ProbeError::Interrupted { .. },
            ) => 0,
            Some(
                ProbeError::DriverNotLoaded
                | ProbeError::DriverMismatch
                | ProbeError::DriverTooOld { .. }
                | ProbeError::Refused { .. }
                | ProbeError::Driver { .. },
            ) => self.refusals.saturating_add(1),
        };
    }

    /// Time from a failed sample to the next.
    pub fn pause_after_failure(&self) -> Duration {
        let doublings = self.refusals.saturating_sub(1).min(8);
        let retry = PROBE_RETRY.saturating_mul(1 << doublings).min(PROBE_RETRY_MAX);
        self.period.max(retry)
    }
}

/// Allocated memory of the device `uuid`.
fn allocated_mib(allocations: &[Allocation], uuid: &str) -> u64 {
    let devices = allocations.iter().flat_map(|allocation| &allocation.devices);
    devices
        .filter(|part| part.uuid == uuid)
        .fold(0, |sum, part| sum.saturating_add(part.memory_mib))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use wire::api::condition::DeviceFault;
    use wire::report::bodies::{AllocatedDevice, AllocationState, DeviceUse};

    fn allocation(state: AllocationState) -> Allocation {
        let part =
            AllocatedDevice { uuid: "GPU-a".to_owned(), memory_mib: 1_000, share_millionths: 10 };
        Allocation {
            pod_uid: "p".to_owned(),
            pod: "d/p".to_owned(),
            state,
            devices: vec![part],
            is_guest: false,
        }
    }

    fn sample(used_mib: Option<u64>) -> Sample {
        let device =
            DeviceUse { used_mib, ..DeviceUse::unread("GPU-a".to_owned(), DeviceFault::Lost) };
        Sample {
            inventory: Vec::new().into(),
            uses: vec![device],
            driver: None,
            xids: BTreeMap::new(),
            unreadable: 0,
            has_unwatched_pods: false,
            draining: BTreeSet::new(),
            mig_failures: Vec::new(),
            memory_limits: None,
            containers: [].into(),
        }
    }

    #[test]
    fn lists_are_read_rarely_and_while_a_pod_drains() {
        let at = Timestamp::from_millis;
        let mut cadence = Cadence::new(Duration::from_secs(1));
        let (calm, draining) =
            ([allocation(AllocationState::Confirmed)], [allocation(AllocationState::Draining)]);
        assert_eq!(cadence.sampling(&calm, at(0)), ProcessSampling::List);
        cadence.learn_lists(&sample(Some(900)), at(0));
        assert_eq!(cadence.sampling(&calm, at(4_999)), ProcessSampling::Skip);
        assert_eq!(cadence.sampling(&calm, at(5_000)), ProcessSampling::List);
        assert_eq!(cadence.sampling(&draining, at(1)), ProcessSampling::List);
        assert_eq!(cadence.pause(&calm), Duration::from_secs(1));
        assert_eq!(cadence.pause(&draining), Duration::from_millis(250));
        assert_eq!(Cadence::new(Duration::from_millis(9)).pause(&draining).as_millis(), 9);
    }

    #[test]
    fn a_stuck_process_is_checked_as_rarely_as_others() {
        let at = Timestamp::from_millis;
        let mut cadence = Cadence::new(Duration::from_secs(1));
        let draining = [allocation(AllocationState::Draining)];
        for (millis, sampling, pause) in [
            (0, ProcessSampling::List, 250),
            (59_999, ProcessSampling::List, 250),
            (60_000, ProcessSampling::Skip, 1_000),
            (64_999, ProcessSampling::Skip, 1_000),
        ] {
            cadence.learn_lists(&sample(None), at(millis.min(60_000)));
            assert_eq!(cadence.sampling(&draining, at(millis)), sampling, "{millis}");
            assert_eq!(cadence.pause(&draining).as_millis(), pause, "{millis}");
        }
        let other =
            [Allocation { pod_uid: "q".to_owned(), ..allocation(AllocationState::Draining) }];
        assert_eq!(cadence.pause(&other).as_millis(), 250, "another one has begun to drain");
        assert_eq!(cadence.sampling(&draining, at(65_000)), ProcessSampling::List);
    }

    #[test]
    fn growth_and_use_beyond_what_is_allocated_are_listed_once() {
        let mut cadence = Cadence::new(Duration::from_secs(1));
        let allocations = [allocation(AllocationState::Confirmed)];
        cadence.learn_lists(&sample(Some(900)), Timestamp::START);
        for (used, needs_list) in
            [(None, false), (Some(0), false), (Some(964), false), (Some(965), true)]
        {
            assert_eq!(cadence.needs_list(&sample(used), &allocations), needs_list, "{used:?}");
        }
        cadence.learn_lists(&sample(Some(2_000)), Timestamp::START);
        assert!(
            !cadence.needs_list(&sample(Some(2_064)), &allocations),
            "known, and nearly unchanged"
        );
        assert!(cadence.needs_list(&sample(Some(2_065)), &allocations));
        assert!(
            !cadence.needs_list(&sample(Some(1_000)), &allocations),
            "less, and within what is allocated"
        );
        assert!(
            cadence.needs_list(&sample(Some(1_001)), &allocations),
            "less, and still beyond it"
        );
        assert!(cadence.needs_list(&sample(Some(900)), &[]), "use without any allocation");
    }

    #[test]
    fn a_library_that_refuses_is_opened_ever_more_rarely() {
        let mut cadence = Cadence::new(Duration::from_secs(1));
        let mut pauses = |failure: ProbeError| {
            let failures = std::iter::repeat_n(failure, 6);
            let pauses = failures.map(|failure| {
                cadence.learn_failure(Some(&failure));
                cadence.pause_after_failure().as_secs()
            });
            pauses.collect::<Vec<_>>()
        };
        assert_eq!(pauses(ProbeError::DriverNotLoaded), [5, 10, 20, 40, 60, 60]);
        assert_eq!(pauses(ProbeError::Hangs { seconds: 5 }), [5; 6]);
        let missing = ProbeError::LibraryMissing { library: "l".into(), cause: "c".to_owned() };
        assert_eq!(pauses(missing), [5; 6]);
    }
}
