//! Whether a GPU may take new tenants, as far as the driver's events and its wishes tell.
//!
//! Pure: [`crate::agent::nvml::probe`] brings what the driver says. An Xid that is not an application's fault makes
//! the GPU (or the MIG instance that it names) sick. It is well again only when the driver says so:
//! after it wanted something done, and no longer does, or after the driver was loaded anew. Time alone
//! heals nothing. Where the driver tells what it wants (field 230), that counts, not a private table of
//! Xids.

use std::collections::BTreeMap;

use crate::report::condition::Ailment;

/// Xids that an application causes and only it suffers from. The device plugin and the DRA driver of
/// NVIDIA ignore the same ones.
const APPLICATION_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];

/// The Xid that says nothing but that the driver now wants something else to be done.
const RECOVERY_XID: u64 = 154;

/// What the driver wants to be done with a GPU: NVML's field 230, `nvmlDeviceGpuRecoveryAction_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryAction {
    /// Nothing.
    Nothing,
    /// Reset the GPU.
    Reset,
    /// Reboot the node.
    Reboot,
    /// End its traffic to other GPUs.
    DrainPeers,
    /// End its work, then reset it.
    DrainAndReset,
    /// Something that a later driver knows.
    Unknown(u64),
}

impl RecoveryAction {
    /// The action that NVML's number stands for.
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

    /// What it makes of the GPU; none where nothing is wanted.
    fn ailment(self) -> Option<Ailment> {
        match self {
            Self::Nothing => None,
            Self::Reset | Self::DrainAndReset | Self::Unknown(_) => Some(Ailment::ResetRequired),
            Self::Reboot => Some(Ailment::RebootRequired),
            Self::DrainPeers => Some(Ailment::DrainRequired),
        }
    }
}

/// Something that the driver tells by event about a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An Xid.
    Xid {
        /// Its number.
        number: u64,
        /// The GPU instance that it is about; none: the whole GPU.
        instance: Option<u32>,
    },
    /// The GPU is not available.
    Unavailable,
    /// The driver wants something else to be done.
    RecoveryChanged,
}

impl Event {
    /// The same event, of the whole GPU where it names an instance that is not known: better too many
    /// suffer for it than none.
    pub fn of_known_instance(self, is_known: impl FnOnce(u32) -> bool) -> Self {
        match self {
            Self::Xid { number, instance } => {
                Self::Xid { number, instance: instance.filter(|id| is_known(*id)) }
            }
            Self::Unavailable | Self::RecoveryChanged => self,
        }
    }
}

/// Xids of one GPU since the start of the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XidCounts {
    /// Faults of applications.
    pub application: u64,
    /// All others.
    pub device: u64,
}

/// What is known of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuHealth {
    /// What an event made of the whole GPU (none) or of one GPU instance.
    strikes: BTreeMap<Option<u32>, Ailment>,
    /// What the driver wants now.
    wish: Option<Ailment>,
    /// Whether the driver wanted something, or was away, since the last strike.
    was_treated: bool,
    /// Whether the driver has told what it wants since it was loaded.
    tells_wish: bool,
    /// Number of the newest Xid of all.
    last_xid: Option<u64>,
    /// Xids so far.
    counts: XidCounts,
}

impl GpuHealth {
    /// Takes in an event.
    pub fn strike(&mut self, event: Event) {
        let (instance, ailment) = match event {
            Event::RecoveryChanged => return,
            Event::Unavailable => (None, Ailment::Unavailable),
            Event::Xid { number, instance } => {
                self.last_xid = Some(number);
                if APPLICATION_XIDS.contains(&number) {
                    self.counts.application = self.counts.application.saturating_add(1);
                    return;
                }
                self.counts.device = self.counts.device.saturating_add(1);
                if number == RECOVERY_XID {
                    return;
                }
                (instance, Ailment::Xid)
            }
        };
        self.strikes.insert(instance, ailment);
        self.was_treated = self.wish.is_some();
    }

    /// Takes in what the driver wants now; none where it does not know the question. Call it only for
    /// a GPU that answers, and not when the question failed.
    pub fn learn_wish(&mut self, action: Option<RecoveryAction>) {
        if action.is_none() && self.tells_wish {
            return; // it did know the question
        }
        self.tells_wish = action.is_some();
        self.wish = action.and_then(RecoveryAction::ailment);
        if self.wish.is_some() {
            self.was_treated = true;
        } else if self.was_treated {
            self.strikes.clear();
            self.was_treated = false;
        }
    }

    /// Notes that the GPU did not answer because it is lost or needs a reset, or that the driver went
    /// away: when it answers again, it has been seen to.
    pub fn learn_absence(&mut self) {
        self.was_treated = true;
        self.tells_wish = false;
    }

    /// Whether its recovery action is to be read at once, not just now and then.
    pub fn is_in_doubt(&self) -> bool {
        !self.strikes.is_empty() || self.wish.is_some() || self.was_treated
    }

    /// What ails the GPU as a whole, or its instance `instance`.
    pub fn ailment(&self, instance: Option<u32>) -> Option<Ailment> {
        let struck = self.strikes.get(&None);
        let instance = instance.and_then(|id| self.strikes.get(&Some(id)));
        self.wish.or_else(|| struck.or(instance).copied())
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

    fn xid(number: u64) -> Event {
        Event::Xid { number, instance: None }
    }

    #[test]
    fn faults_of_applications_are_counted_and_harm_nobody() {
        let mut health = GpuHealth::default();
        for number in APPLICATION_XIDS {
            health.strike(xid(number));
            assert_eq!(health.ailment(None), None, "{number}");
            assert_eq!(health.last_xid(), Some(number));
        }
        assert!(!health.is_in_doubt());
        assert_eq!(health.counts(), XidCounts { application: 6, device: 0 });
        for number in [48, 62, 63, 64, 74, 79, 94, 95, 119, 120, 140, 143, 0, 999, u64::MAX] {
            let mut health = GpuHealth::default();
            health.strike(xid(number));
            assert_eq!(health.ailment(None), Some(Ailment::Xid), "{number}");
            assert_eq!(health.counts().device, 1);
        }
    }

    #[test]
    fn only_the_driver_heals() {
        let mut health = GpuHealth::default();
        health.strike(xid(79));
        for _ in 0..100 {
            health.learn_wish(Some(RecoveryAction::Nothing));
            assert_eq!(health.ailment(None), Some(Ailment::Xid), "time heals nothing");
        }
        health.learn_wish(Some(RecoveryAction::Reset));
        assert_eq!(health.ailment(None), Some(Ailment::ResetRequired));
        health.strike(xid(79));
        health.learn_wish(None);
        assert_eq!(health.ailment(None), Some(Ailment::ResetRequired), "silence is no consent");
        health.learn_wish(Some(RecoveryAction::Nothing));
        assert_eq!(health.ailment(None), None, "it was reset");
        assert_eq!(health.last_xid(), Some(79), "what happened is still told");
    }

    #[test]
    fn a_driver_that_tells_no_wish_heals_by_being_loaded_anew() {
        let mut health = GpuHealth::default();
        health.strike(xid(48));
        health.learn_wish(None);
        assert_eq!(health.ailment(None), Some(Ailment::Xid));
        health.learn_absence();
        assert_eq!(health.ailment(None), Some(Ailment::Xid), "not before it answers");
        assert!(health.is_in_doubt());
        health.learn_wish(None);
        assert_eq!(health.ailment(None), None);
        health.strike(xid(48));
        health.learn_wish(None);
        assert_eq!(health.ailment(None), Some(Ailment::Xid), "a new one counts anew");
    }

    #[test]
    fn a_wish_counts_without_any_event() {
        for (number, ailment) in [
            (0, None),
            (1, Some(Ailment::ResetRequired)),
            (2, Some(Ailment::RebootRequired)),
            (3, Some(Ailment::DrainRequired)),
            (4, Some(Ailment::ResetRequired)),
            (77, Some(Ailment::ResetRequired)),
        ] {
            let mut health = GpuHealth::default();
            health.strike(Event::RecoveryChanged);
            health.strike(xid(RECOVERY_XID));
            assert_eq!(health.ailment(None), None, "it says no more than: ask");
            health.learn_wish(Some(RecoveryAction::from_nvml(number)));
            assert_eq!(health.ailment(None), ailment, "{number}");
            health.learn_wish(Some(RecoveryAction::Nothing));
            assert_eq!(health.ailment(None), None);
        }
    }

    #[test]
    fn an_instance_suffers_alone_and_with_its_gpu() {
        let mut health = GpuHealth::default();
        health.strike(Event::Xid { number: 95, instance: Some(2) });
        assert_eq!(health.ailment(Some(2)), Some(Ailment::Xid));
        assert_eq!((health.ailment(Some(1)), health.ailment(None)), (None, None));
        health.strike(Event::Unavailable);
        assert_eq!(health.ailment(Some(1)), Some(Ailment::Unavailable));
        assert_eq!(health.ailment(None), Some(Ailment::Unavailable));
    }
}
