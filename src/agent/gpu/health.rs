//! Whether a GPU may take new tenants, by the driver's events and recovery actions.
//!
//! Pure: [`crate::nvml::probe`] passes in what the driver reports. An Xid that is not an
//! application's fault makes the GPU, or the MIG instance that it names, unhealthy. It is healthy
//! again only when the driver says so: after it requested an action and no longer does, or after
//! the driver was loaded again; or when a person clears it. Time alone changes nothing. If the
//! driver reports the action that it requests (field 230), that counts, not a private table of
//! Xids.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use wire::api::condition::DeviceFault;
use wire::units::Timestamp;

/// Xids that an application causes and that affect only it. NVIDIA's device plugin and DRA driver
/// ignore the same ones.
const APPLICATION_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];

/// The Xid that only says that the driver now requests another recovery action.
const RECOVERY_XID: u64 = 154;

/// The recovery action that the driver requests: field 230, `nvmlDeviceGpuRecoveryAction_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryAction {
    Nothing,
    Reset,
    Reboot,
    /// End its traffic to other GPUs.
    DrainPeers,
    /// End its work, then reset it.
    DrainAndReset,
    /// An action of a later driver.
    Unknown(u64),
}

impl RecoveryAction {
    /// The action for NVML's number.
    pub fn from_nvml(number: u64) -> Self {
        match number {
            0 => Self::Nothing,
            1 => Self::Reset,
            2 => Self::Reboot,
            3 => Self::DrainPeers,
            4 => Self::DrainAndReset,
            other => Self::Unknown(other),
        }
    }

    /// The fault that it stands for; `None` if no action is requested.
    fn fault(self) -> Option<DeviceFault> {
        match self {
            Self::Nothing => None,
            Self::Reset | Self::DrainAndReset | Self::Unknown(_) => {
                Some(DeviceFault::ResetRequired)
            }
            Self::Reboot => Some(DeviceFault::RebootRequired),
            Self::DrainPeers => Some(DeviceFault::DrainRequired),
        }
    }
}

/// An event of the driver about a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuEvent {
    Xid {
        number: u64,
        /// The GPU instance that it affects; `None`: the whole GPU.
        instance: Option<u32>,
    },
    /// An Xid that the operator has said to ignore.
    IgnoredXid { number: u64 },
    /// The GPU is not available.
    Unavailable,
    /// The driver requests another recovery action.
    RecoveryChanged,
}

impl GpuEvent {
    /// The same event, but for the whole GPU if it names an unknown instance. Too many devices are
    /// unhealthy then, rather than too few.
    pub fn of_known_instance(self, is_known: impl FnOnce(u32) -> bool) -> Self {
        match self {
            Self::Xid { number, instance } => {
                Self::Xid { number, instance: instance.filter(|id| is_known(*id)) }
            }
            Self::IgnoredXid { .. } | Self::Unavailable | Self::RecoveryChanged => self,
        }
    }

    /// The same event, but without effect if it is an Xid of the operator's list.
    #[must_use]
    pub fn unless_ignored(self, ignored: &BTreeSet<u64>) -> Self {
        match self {
            Self::Xid { number, .. } if ignored.contains(&number) => Self::IgnoredXid { number },
            Self::Xid { .. }
            | Self::IgnoredXid { .. }
            | Self::Unavailable
            | Self::RecoveryChanged => self,
        }
    }
}

/// Xids of one GPU since the start of the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct XidCounts {
    /// Of applications, and those that are ignored.
    pub application: u64,
    pub device: u64,
}

/// What is known of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuHealth {
    /// Faults by event, of the whole GPU (`None`) or of one GPU instance.
    strikes: BTreeMap<Option<u32>, DeviceFault>,
    /// When the newest of them was noted.
    newest: Option<Timestamp>,
    /// The fault of the recovery action that the driver requests now.
    wish: Option<DeviceFault>,
    /// Whether the driver requested an action, or was away, since the last strike.
    was_treated: bool,
    /// Whether the driver has reported its recovery action since it was loaded.
    tells_wish: bool,
    /// Whether the last read of the recovery action failed.
    is_unread: bool,
    /// Number of the newest Xid of any kind.
    last_xid: Option<u64>,
    counts: XidCounts,
}

impl GpuHealth {
    /// Takes in an event that is noted `now`.
    pub fn strike(&mut self, event: GpuEvent, now: Timestamp) {
        let (instance, fault) = match event {
            GpuEvent::RecoveryChanged => return,
            GpuEvent::Unavailable => (None, DeviceFault::Unavailable),
            GpuEvent::IgnoredXid { number } => {
                self.last_xid = Some(number);
                self.counts.application = self.counts.application.saturating_add(1);
                return;
            }
            GpuEvent::Xid { number, instance } => {
                self.last_xid = Some(number);
                if APPLICATION_XIDS.contains(&number) {
                    self.counts.application = self.counts.application.saturating_add(1);
                    return;
                }
                self.counts.device = self.counts.device.saturating_add(1);
                if number == RECOVERY_XID {
                    return;
                }
                (instance, DeviceFault::Xid)
            }
        };
        self.strikes.insert(instance, fault);
        self.newest = Some(now);
        self.was_treated = self.wish.is_some();
    }

    /// Takes in the requested recovery action; `None` if the driver does not know the field. Call
    /// it only for a GPU that answers, and not if the read failed.
    pub fn learn_wish(&mut self, action: Option<RecoveryAction>) {
        if action.is_none() && self.tells_wish {
            return; // it knew the field before
        }
        self.tells_wish = action.is_some();
        self.is_unread = false;
        self.wish = action.and_then(RecoveryAction::fault);
        if self.wish.is_some() {
            self.was_treated = true;
        } else if self.was_treated {
            self.strikes.clear();
            self.was_treated = false;
        }
    }

    /// Notes that the recovery action could not be read.
    pub fn miss_wish(&mut self) {
        self.is_unread = true;
    }

    /// Forgets past events, because a person has checked the GPU. `checked` is the newest one that was known then, as
    /// [`Self::newest_event`] names it. Returns whether there was one.
    ///
    /// # Errors
    /// What the driver requests, or a later event: that counts, and nothing is forgotten.
    pub fn clear(&mut self, checked: Option<u64>) -> Result<bool, DeviceFault> {
        if let Some(wish) = self.wish {
            return Err(wish);
        }
        if self.is_unread {
            return Err(DeviceFault::NotAnswering); // no answer is not "nothing"
        }
        if self.newest_event() != checked
            && let Some(fault) = self.strikes.values().next()
        {
            return Err(*fault);
        }
        self.was_treated = false;
        Ok(!std::mem::take(&mut self.strikes).is_empty())
    }

    /// Notes that the GPU did not answer because it is lost or needs a reset, or that the driver
    /// went away. When it answers again, it has been repaired.
    pub fn learn_absence(&mut self) {
        self.was_treated = true;
        self.tells_wish = false;
    }

    /// Whether its recovery action must be read at once, not only with lists of processes.
    pub fn is_in_doubt(&self) -> bool {
        !self.strikes.is_empty() || self.wish.is_some() || self.was_treated
    }

    /// The fault of the whole GPU, or of its instance `instance`.
    pub fn fault(&self, instance: Option<u32>) -> Option<DeviceFault> {
        let struck = self.strikes.get(&None);
        let instance = instance.and_then(|id| self.strikes.get(&Some(id)));
        self.wish.or_else(|| struck.or(instance).copied())
    }

    /// The newest event that has made the GPU or an instance unhealthy, by its time in ms; `None` if none is left.
    pub fn newest_event(&self) -> Option<u64> {
        self.newest.filter(|_| !self.strikes.is_empty()).map(Timestamp::millis)
    }

    /// Number of the newest Xid.
    pub fn last_xid(&self) -> Option<u64> {
        self.last_xid
    }

    /// Xids so far.
    pub fn counts(&self) -> XidCounts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn xid(number: u64) -> GpuEvent {
        GpuEvent::Xid { number, instance: None }
    }

    #[test]
    fn application_faults_are_counted_and_affect_no_other_pod() {
        let mut health = GpuHealth::default();
        for number in APPLICATION_XIDS {
            health.strike(xid(number), Timestamp::START);
            assert_eq!(health.fault(None), None, "{number}");
            assert_eq!(health.last_xid(), Some(number));
        }
        assert!(!health.is_in_doubt());
        assert_eq!(health.counts(), XidCounts { application: 6, device: 0 });
        for number in [48, 62, 63, 64, 74, 79, 94, 95, 119, 120, 140, 143, 0, 999, u64::MAX] {
            let mut health = GpuHealth::default();
            health.strike(xid(number), Timestamp::START);
            assert_eq!(health.fault(None), Some(DeviceFault::Xid), "{number}");
            assert_eq!(health.counts().device, 1);
        }
    }

    #[test]
    fn an_xid_that_is_ignored_is_counted_and_has_no_effect() {
        let ignored = BTreeSet::from([79, 154]);
        let mut health = GpuHealth::default();
        health.strike(xid(79).unless_ignored(&ignored), Timestamp::START);
        health.strike(
            GpuEvent::Xid { number: 79, instance: Some(2) }.unless_ignored(&ignored),
            Timestamp::START,
        );
        assert_eq!((health.fault(Some(2)), health.last_xid()), (None, Some(79)));
        assert_eq!(health.counts(), XidCounts { application: 2, device: 0 });
        health.strike(GpuEvent::Unavailable.unless_ignored(&ignored), Timestamp::START);
        assert_eq!(health.fault(None), Some(DeviceFault::Unavailable));
        health.strike(xid(48).unless_ignored(&ignored), Timestamp::START);
        assert_eq!(health.fault(None), Some(DeviceFault::Xid));
        health.learn_wish(Some(RecoveryAction::Reset));
        assert_eq!(
            health.fault(None),
            Some(DeviceFault::ResetRequired),
            "what the driver requests"
        );
    }

    #[test]
    fn only_the_driver_heals() {
        let mut health = GpuHealth::default();
        health.strike(xid(79), Timestamp::START);
        for _ in 0..100 {
            health.learn_wish(Some(RecoveryAction::Nothing));
            assert_eq!(health.fault(None), Some(DeviceFault::Xid), "time heals nothing");
        }
        health.learn_wish(Some(RecoveryAction::Reset));
        assert_eq!(health.fault(None), Some(DeviceFault::ResetRequired));
        health.strike(xid(79), Timestamp::START);
        health.learn_wish(None);
        assert_eq!(
            health.fault(None),
            Some(DeviceFault::ResetRequired),
            "no answer is not a recovery"
        );
        health.learn_wish(Some(RecoveryAction::Nothing));
        assert_eq!(health.fault(None), None, "it was reset");
        assert_eq!(health.last_xid(), Some(79), "past events are still reported");
    }

    #[test]
    fn a_driver_without_recovery_action_heals_when_reloaded() {
        let mut health = GpuHealth::default();
        health.strike(xid(48), Timestamp::START);
        health.learn_wish(None);
        assert_eq!(health.fault(None), Some(DeviceFault::Xid));
        health.learn_absence();
        assert_eq!(health.fault(None), Some(DeviceFault::Xid), "only after it answers");
        assert!(health.is_in_doubt());
        health.learn_wish(None);
        assert_eq!(health.fault(None), None);
        health.strike(xid(48), Timestamp::START);
        health.learn_wish(None);
        assert_eq!(health.fault(None), Some(DeviceFault::Xid), "a new event counts again");
    }

    #[test]
    fn a_person_can_clear_what_the_driver_does_not_hold() {
        let mut health = GpuHealth::default();
        assert_eq!(health.clear(health.newest_event()), Ok(false));
        health.strike(xid(63), Timestamp::START);
        health.strike(GpuEvent::Xid { number: 95, instance: Some(2) }, Timestamp::START);
        health.learn_wish(Some(RecoveryAction::Nothing));
        assert_eq!(health.clear(health.newest_event()), Ok(true));
        assert_eq!(
            (health.fault(None), health.fault(Some(2)), health.last_xid()),
            (None, None, Some(95))
        );
        assert!(!health.is_in_doubt());
        health.strike(xid(63), Timestamp::START);
        assert_eq!(health.fault(None), Some(DeviceFault::Xid), "a new event counts again");
        health.learn_wish(Some(RecoveryAction::Reboot));
        assert_eq!(health.clear(health.newest_event()), Err(DeviceFault::RebootRequired));
        assert_eq!(health.fault(None), Some(DeviceFault::RebootRequired));
    }

    #[test]
    fn a_person_clears_no_event_that_came_later() {
        let at = |seconds: u64| Timestamp::from_millis(seconds * 1_000);
        let mut health = GpuHealth::default();
        health.strike(xid(63), at(1));
        let checked = health.newest_event();
        assert_eq!(health.clear(None), Err(DeviceFault::Xid), "it came after the look");
        health.strike(GpuEvent::Xid { number: 63, instance: Some(2) }, at(2));
        assert_eq!(health.clear(checked), Err(DeviceFault::Xid), "the same Xid again");
        assert_eq!(health.fault(Some(2)), Some(DeviceFault::Xid), "nothing is forgotten");
        assert_eq!(health.clear(health.newest_event()), Ok(true));
        assert_eq!(health.clear(checked), Ok(false), "there is nothing any more");
        health.strike(GpuEvent::IgnoredXid { number: 63 }, at(3));
        assert_eq!(health.newest_event(), None, "what has no effect is no fault");
    }

    #[test]
    fn a_recovery_action_counts_without_an_event() {
        for (number, fault) in [
            (0, None),
            (1, Some(DeviceFault::ResetRequired)),
            (2, Some(DeviceFault::RebootRequired)),
            (3, Some(DeviceFault::DrainRequired)),
            (4, Some(DeviceFault::ResetRequired)),
            (77, Some(DeviceFault::ResetRequired)),
        ] {
            let mut health = GpuHealth::default();
            health.strike(GpuEvent::RecoveryChanged, Timestamp::START);
            health.strike(xid(RECOVERY_XID), Timestamp::START);
            assert_eq!(health.fault(None), None, "it only says: check the driver");
            health.learn_wish(Some(RecoveryAction::from_nvml(number)));
            assert_eq!(health.fault(None), fault, "{number}");
            health.learn_wish(Some(RecoveryAction::Nothing));
            assert_eq!(health.fault(None), None);
        }
    }

    #[test]
    fn an_instance_fails_alone_or_with_its_gpu() {
        let mut health = GpuHealth::default();
        health.strike(GpuEvent::Xid { number: 95, instance: Some(2) }, Timestamp::START);
        assert_eq!(health.fault(Some(2)), Some(DeviceFault::Xid));
        assert_eq!((health.fault(Some(1)), health.fault(None)), (None, None));
        health.strike(GpuEvent::Unavailable, Timestamp::START);
        assert_eq!(health.fault(Some(1)), Some(DeviceFault::Unavailable));
        assert_eq!(health.fault(None), Some(DeviceFault::Unavailable));
    }

    #[test]
    fn a_recovery_action_that_cannot_be_read_keeps_a_gpu_from_being_cleared() {
        let mut health = GpuHealth::default();
        health.strike(xid(119), Timestamp::START);
        health.miss_wish();
        assert_eq!(health.clear(health.newest_event()), Err(DeviceFault::NotAnswering));
        assert_eq!(health.fault(None), Some(DeviceFault::Xid), "nothing is forgotten");
        health.learn_wish(Some(RecoveryAction::Nothing));
        assert_eq!(health.clear(health.newest_event()), Ok(true));
        assert_eq!(health.fault(None), None);
    }
}
