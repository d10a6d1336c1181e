//! Processes of pods that hold nothing on the node, device by device.

use std::time::Duration;

use super::super::device::PodUid;
use super::super::units::Timestamp;
use super::{CLEAN_REPORTS_TO_FREE, DeviceBooks, ProcessUse};

/// Pods without a reservation whose processes are remembered for one device. Any of them keeps the device
/// from being given away whole, so more need not be known.
const MAX_LEFTOVERS: usize = 64;

/// What is known of the processes of a pod that holds nothing on the node: it has ended, and a restart has
/// forgotten that it was there, or it was seen again after its drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leftover {
    /// When the first list showed them.
    since: Timestamp,
    /// Lists after that, one after the other, without them.
    clean_reports: u32,
    /// Whether they have been there for so long that only their use counts.
    pub(super) is_over: bool,
}

impl DeviceBooks {
    /// Takes in which pods a list of processes shows that hold nothing on the node.
    pub(in crate::packing) fn see_leftovers(
        &mut self,
        list: &[ProcessUse],
        now: Timestamp,
        holds: impl Fn(&PodUid) -> bool,
    ) {
        let seen = || list.iter().filter_map(|process| process.pod.as_ref());
        for (uid, leftover) in &mut self.leftovers {
            let is_shown = seen().any(|seen| seen == uid);
            leftover.clean_reports = if is_shown { 0 } else { leftover.clean_reports + 1 };
        }
        self.leftovers.retain(|_, leftover| leftover.clean_reports < CLEAN_REPORTS_TO_FREE);
        let fresh = Leftover { since: now, clean_reports: 0, is_over: false };
        for uid in seen().filter(|uid| !holds(uid)) {
            if self.leftovers.len() < MAX_LEFTOVERS && !self.leftovers.contains_key(uid) {
                self.leftovers.insert(uid.clone(), fresh);
            }
        }
    }

    /// Notes that a pod holds something on the node, so that its processes are its own.
    pub(in crate::packing) fn forget_leftover(&mut self, uid: &PodUid) {
        self.leftovers.remove(uid);
    }

    /// Whether [`DeviceBooks::end_leftovers`] would end anything now.
    pub(in crate::packing) fn is_leftover_due(&self, limit: Duration, now: Timestamp) -> bool {
        self.leftovers.values().any(|leftover| leftover.is_due(limit, now))
    }

    /// Lets processes that have been there for `limit` count by their use alone.
    pub(in crate::packing) fn end_leftovers(&mut self, limit: Duration, now: Timestamp) {
        let all = self.leftovers.iter_mut().map(|(_, leftover)| leftover);
        all.filter(|leftover| leftover.is_due(limit, now)).for_each(|due| due.is_over = true);
    }
}

impl Leftover {
    fn is_due(&self, limit: Duration, now: Timestamp) -> bool {
        !self.is_over && now.since(self.since) >= limit
    }
}
