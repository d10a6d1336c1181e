//! When the agent ends so that its container is made again: pure decisions.
//!
//! The library and the rights to devices that a container has are those of the time when it was made. One that was
//! made before the driver was loaded has no library. After a driver was replaced, or the rights were taken away, the
//! library refuses to start for as long as the container lives. A container without the right to monitor MIG sees the
//! instances that existed when it was made. Kubelet makes a container again when its process ends.

use std::time::Duration;

use crate::gpu::sample::ProbeError;
use crate::mig::capabilities::ListedInstances;
use wire::units::Timestamp;

/// The exit code by which the agent has its container made again: "temporary failure" of `sysexits.h`. No other end
/// has it.
pub const MADE_AGAIN: u8 = 75;

/// How long the library may refuse to start, without another answer in between.
pub const REFUSED_FOR: Duration = Duration::from_secs(60);

/// How long the kernel's list of MIG instances has to stay the same: a reconfiguration changes it many times.
const SETTLED_FOR: Duration = Duration::from_secs(5);

/// Why the container has to be made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Renewal {
    /// The module was loaded after the container was made, and the library is missing.
    #[error(
        "NVIDIA's kernel driver was loaded after this container was made, so that it has no library: the agent ends, \
         so that its container is made again"
    )]
    ModuleAppeared,
    /// The library or the rights are those of another driver.
    #[error(
        "NVIDIA's library has refused to start for {} s, as it does for ever in a container with the library, or the \
         rights, of another driver: the agent ends, so that its container is made again; if that does not help, \
         compare `/proc/driver/nvidia/version` with the driver's libraries on this node, or reboot it",
        REFUSED_FOR.as_secs()
    )]
    Refused,
    /// MIG instances were made after the container.
    #[error(
        "MIG instances were made after this container, so that it has no right to see them: the agent ends, so that \
         its container is made again; if that does not help, see `InstancesHidden` in docs/agent.md"
    )]
    InstancesHidden,
}

/// What speaks for another container.
#[derive(Debug, Default)]
pub(crate) struct Renewals {
    /// Whether the kernel's module was loaded at the last look; none before the first.
    is_loaded: Option<bool>,
    /// Whether it has appeared since the last answer of the library.
    has_appeared: bool,
    /// Since when the library has answered alone that it refuses to start.
    refused_since: Option<Timestamp>,
    /// The kernel's list of MIG instances when the process began.
    first_list: ListedInstances,
    /// A later one, by which instances are hidden, and since when it is the same.
    newer_list: Option<(ListedInstances, Timestamp)>,
}

impl Renewals {
    /// Of a process that began with the kernel's module loaded, or not; `None` if that is not known. The kernel listed
    /// these MIG instances then.
    pub(crate) fn since(was_loaded: Option<bool>, listed: Option<ListedInstances>) -> Self {
        let first_list = listed.unwrap_or_default();
        Self { is_loaded: was_loaded, first_list, ..Self::default() }
    }

    /// Learns the kernel's list while instances are hidden; `None` while none is. Returns why the container has to be
    /// made again, if so: once for each list, since the next process begins with this one.
    pub(crate) fn learn_hidden(
        &mut self,
        listed: Option<ListedInstances>,
        now: Timestamp,
    ) -> Option<Renewal> {
        let listed = listed.filter(|listed| *listed != self.first_list);
        let before = self.newer_list.take();
        self.newer_list = listed.map(|listed| match before {
            Some((known, since)) if known == listed => (known, since),
            Some(_) | None => (listed, now),
        });
        let (_, since) = self.newer_list.as_ref()?;
        (now.since(*since) >= SETTLED_FOR).then_some(Renewal::InstancesHidden)
    }

    /// Learns whether the kernel's module is loaded; `None` if that cannot be read. Returns whether it has appeared.
    pub(crate) fn look(&mut self, is_loaded: Option<bool>) -> bool {
        let Some(is_loaded) = is_loaded else { return false };
        let has_appeared = self.is_loaded.replace(is_loaded) == Some(false) && is_loaded;
        self.has_appeared |= has_appeared;
        has_appeared
    }

    /// Whether the kernel's module was loaded at the last look.
    pub(crate) fn is_loaded(&self) -> Option<bool> {
        self.is_loaded
    }

    /// Learns what the library answered `now`: nothing, or why no GPU can be read. Returns why the container has to be
    /// made again, if so. A call that does not return is no answer: a slow library counts by its answers alone.
    pub(crate) fn settle(
        &mut self,
        failure: Option<&ProbeError>,
        refused_for: Duration,
        now: Timestamp,
    ) -> Option<Renewal> {
        if matches!(failure, Some(ProbeError::Closed { .. })) {
            self.refused_since = None; // what appeared meanwhile counts once the library may be open
            return None;
        }
        let has_appeared = std::mem::take(&mut self.has_appeared);
        if matches!(failure, Some(ProbeError::Hangs { .. })) {
            return None;
        }
        let is_refused = failure.is_some_and(ProbeError::is_of_start);
        self.refused_since = is_refused.then(|| self.refused_since.unwrap_or(now));
        if has_appeared && matches!(failure, Some(ProbeError::LibraryMissing { .. })) {
            return Some(Renewal::ModuleAppeared);
        }
        let since = self.refused_since?;
        (now.since(since) >= refused_for).then_some(Renewal::Refused)
    }

    /// Time until the library has refused for long enough, if it does.
    pub(crate) fn left(&self, refused_for: Duration, now: Timestamp) -> Option<Duration> {
        self.refused_since.map(|since| refused_for.saturating_sub(now.since(since)))
    }
}

/// Whether the list of the kernel's modules has NVIDIA's driver.
pub(crate) fn has_driver(modules: &str) -> bool {
    modules.lines().any(|line| line.split_ascii_whitespace().next() == Some("nvidia"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing() -> ProbeError {
        ProbeError::LibraryMissing { library: "l".into(), cause: "c".to_owned() }
    }

    fn refused() -> ProbeError {
        ProbeError::Refused { what: "start", cause: "c".to_owned() }
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_millis(seconds * 1_000)
    }

    #[test]
    fn only_the_module_itself_counts() {
        for (modules, expected) in [
            ("nvidia 57933824 18 nvidia_uvm, Live 0x0 (PO)\n", true),
            ("ext4 1 2 - Live 0x0\nnvidia 1 0 - Loading 0x0\n", true),
            ("nvidia_uvm 1 0 - Live 0x0\nnvidiafb 1 0 - Live 0x0\n", false),
            ("i2c_core 1 1 nvidia, Live 0x0\n", false),
            ("", false),
        ] {
            assert_eq!(has_driver(modules), expected, "{modules}");
        }
    }

    #[test]
    fn a_module_that_appears_ends_an_agent_without_library_once() {
        let mut renewals = Renewals::default();
        let settle = |renewals: &mut Renewals, failure: &ProbeError| {
            renewals.settle(Some(failure), REFUSED_FOR, at(1))
        };
        assert!(!renewals.look(None) && !renewals.look(Some(false)) && !renewals.look(None));
        assert_eq!(settle(&mut renewals, &missing()), None);
        assert!(renewals.look(Some(true)));
        assert_eq!(settle(&mut renewals, &missing()), Some(Renewal::ModuleAppeared));
        assert!(!renewals.look(Some(true)), "it was there");
        assert_eq!(settle(&mut renewals, &missing()), None);
        assert!(!renewals.look(Some(false)) && renewals.look(Some(true)));
        assert_eq!(settle(&mut renewals, &ProbeError::DriverNotLoaded), None, "it has a library");
        assert_eq!(settle(&mut renewals, &missing()), None, "that was another time");
        let closed = ProbeError::Closed { why: "upgrade".to_owned() };
        assert!(!renewals.look(Some(false)) && renewals.look(Some(true)));
        assert_eq!(settle(&mut renewals, &closed), None, "not while the driver is replaced");
        assert_eq!(settle(&mut renewals, &missing()), Some(Renewal::ModuleAppeared));
        let mut there = Renewals::default();
        assert!(!there.look(Some(true)));
        assert_eq!(settle(&mut there, &missing()), None, "no loop");
    }

    #[test]
    fn a_library_that_takes_longer_than_a_minute_to_refuse_counts_too() {
        let mut renewals = Renewals::default();
        let mut settle = |failure: &ProbeError, seconds: u64| {
            renewals.settle(Some(failure), REFUSED_FOR, at(seconds))
        };
        let hangs = ProbeError::Hangs { seconds: 60 };
        assert_eq!(settle(&hangs, 60), None, "it has not answered");
        assert_eq!(settle(&refused(), 70), None, "one answer");
        assert_eq!(settle(&hangs, 135), None, "no answer is no reason to end");
        assert_eq!(settle(&refused(), 145), Some(Renewal::Refused));
    }

    #[test]
    fn a_new_list_of_instances_counts_once_it_is_the_same_for_some_seconds() {
        let list = |ids: &[u32]| Some(ListedInstances::from([(0, ids.iter().copied().collect())]));
        let mut renewals = Renewals::since(Some(true), list(&[1]));
        let mut learn = |ids: Option<&[u32]>, seconds: u64| {
            renewals.learn_hidden(ids.and_then(list), at(seconds))
        };
        assert_eq!(learn(Some(&[1]), 0), None);
        assert_eq!(learn(Some(&[1]), 60), None, "a new container would be the same");
        assert_eq!(learn(Some(&[1, 2]), 61), None);
        assert_eq!(learn(Some(&[1, 2]), 65), None);
        assert_eq!(learn(Some(&[1, 2, 3]), 66), None, "it still changes");
        assert_eq!(learn(Some(&[1, 2, 3]), 70), None);
        assert_eq!(learn(None, 71), None, "nothing is hidden");
        assert_eq!(learn(Some(&[1, 2, 3]), 72), None);
        assert_eq!(learn(Some(&[1, 2, 3]), 77), Some(Renewal::InstancesHidden));
        let mut renewals = Renewals::since(Some(false), None);
        assert_eq!(renewals.learn_hidden(list(&[4]), at(0)), None);
        assert_eq!(renewals.learn_hidden(list(&[4]), at(5)), Some(Renewal::InstancesHidden));
    }

    #[test]
    fn a_minute_of_refusals_alone_counts() {
        for between in [None, Some(ProbeError::DriverNotLoaded)] {
            let mut renewals = Renewals::default();
            let mut settle = |failure: Option<&ProbeError>, seconds: u64| {
                renewals.settle(failure, REFUSED_FOR, at(seconds))
            };
            assert_eq!(settle(Some(&refused()), 10), None);
            assert_eq!(settle(Some(&ProbeError::DriverMismatch), 69), None);
            assert_eq!(settle(between.as_ref(), 70), None);
            assert_eq!(settle(Some(&refused()), 75), None);
            assert_eq!(settle(Some(&refused()), 134), None);
            assert_eq!(settle(Some(&refused()), 135), Some(Renewal::Refused));
            assert_eq!(renewals.left(REFUSED_FOR, at(100)), Some(Duration::from_secs(35)));
        }
    }
}
