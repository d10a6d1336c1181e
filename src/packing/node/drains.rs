//! The end of pods: what of a node is free at once, and what when no process of them is left.

use std::time::Duration;

use super::super::device::{Device, DeviceId, DeviceKind, PodUid};
use super::super::device_books::{CLEAN_REPORTS_TO_FREE, DeviceUse};
use super::super::reservation::{PlacedDevice, Reservation, ReservationState};
use super::super::units::{HostAmount, Timestamp};
use super::NodeLedger;

/// How long a list that shows a process of an ended pod counts as news: that of six lists of an agent.
const SHOWN_FOR: Duration = Duration::from_secs(30);

impl NodeLedger {
    /// Notes that the pod is terminal or gone. Its processor time and memory are free at once, its
    /// devices when its processes are gone, however long reports list them. That holds for a node that has not reported too: after a
    /// restart its agent may only be late, and where there is none nobody can be placed anyway.
    ///
    /// Returns whether the pod is out of the books now.
    pub fn drain(&mut self, uid: &PodUid, now: Timestamp) -> bool {
        let has_devices = |held: &&mut Reservation| !held.placement.devices.is_empty();
        let Some(reservation) = self.reservations.get_mut(uid).filter(has_devices) else {
            return self.remove(uid);
        };
        if !matches!(reservation.state, ReservationState::Draining { .. }) {
            reservation.state =
                ReservationState::Draining { since: now, clean_reports: 0, shown: None };
            reservation.host = HostAmount::ZERO;
            self.recompute();
        }
        false
    }

    /// Counts this report for every draining pod that it proves to be without a process; lists those
    /// with enough. A process that it does list holds the room. It proves nothing about a pod when it leaves out a device of the pod, or when
    /// processes were not sampled somewhere: they may run on any device. The parent of MIG instances
    /// has no processes of its own, so there is nothing to sample.
    pub(super) fn count_clean_report(&mut self, uses: &[DeviceUse], now: Timestamp) -> Vec<PodUid> {
        let is_parent = |seen: &DeviceUse| {
            let is_it =
                |device: &Device| device.kind == DeviceKind::MigParent && device.id == seen.id;
            self.devices.iter().any(|books| is_it(&books.device))
        };
        let is_complete = !uses.iter().any(|seen| seen.processes.is_none() && !is_parent(seen));
        let runs = |uid: &PodUid| {
            let mut processes = uses.iter().flat_map(|seen| seen.processes.iter().flatten());
            processes.any(|process| process.pod.as_ref() == Some(uid))
        };
        let present: Vec<&DeviceId> = self.devices.iter().map(|books| &books.device.id).collect();
        let is_seen = |placed: &PlacedDevice| {
            !present.contains(&&placed.id) || uses.iter().any(|seen| seen.id == placed.id)
        };
        let mut freed = Vec::new();
        for (uid, reservation) in &mut self.reservations {
            let is_covered = reservation.placement.devices.iter().all(is_seen);
            if let ReservationState::Draining { clean_reports, shown, .. } = &mut reservation.state
            {
                if runs(uid) {
                    (*clean_reports, *shown) = (0, Some(now));
                } else if is_complete && is_covered {
                    *clean_reports += 1;
                }
                if is_complete && *clean_reports >= CLEAN_REPORTS_TO_FREE {
                    freed.push(uid.clone());
                }
            }
        }
        freed
    }

    /// Whether [`NodeLedger::expire`] would end anything now.
    pub fn is_anything_due(&self, drain_limit: Duration, now: Timestamp) -> bool {
        self.claims.values().any(|claim| claim.expires <= now)
            || self.reservations.values().any(|held| is_drained(held, drain_limit, now))
            || self.devices.iter().any(|books| books.is_leftover_due(drain_limit, now))
    }

    /// Pods that have drained for `drain_limit`, and still do because reports list their processes.
    pub fn overdue_drains(&self, drain_limit: Duration, now: Timestamp) -> usize {
        let is_overdue = |held: &&Reservation| is_older(held, drain_limit, now);
        self.reservations.values().filter(is_overdue).count()
    }

    /// Ends drains that have lasted `drain_limit` without a process in sight, and claims that are due, and
    /// lets processes of pods that are gone count by their use alone after that time. Lists the pods.
    pub fn expire(&mut self, drain_limit: Duration, now: Timestamp) -> Vec<PodUid> {
        let overdue = |held: &Reservation| is_drained(held, drain_limit, now);
        let drained = self.reservations.iter().filter(|(_, held)| overdue(held));
        let claimed = self.claims.iter().filter(|(_, claim)| claim.expires <= now);
        let ended: Vec<PodUid> = drained
            .map(|(uid, _)| uid.clone())
            .chain(claimed.map(|(uid, _)| uid.clone()))
            .collect();
        for uid in &ended {
            self.unclaim(uid);
            if self.reservations.get(uid).is_some_and(overdue) {
                self.devices.iter_mut().for_each(|books| books.outlived(uid));
                self.remove(uid);
            }
        }
        if self.devices.iter().any(|books| books.is_leftover_due(drain_limit, now)) {
            self.devices.iter_mut().for_each(|books| books.end_leftovers(drain_limit, now));
            self.recompute_rooms();
        }
        ended
    }
}

/// Whether a pod has drained for so long.
fn is_older(held: &Reservation, drain_limit: Duration, now: Timestamp) -> bool {
    match held.state {
        ReservationState::Draining { since, .. } => now.since(since) >= drain_limit,
        ReservationState::Assumed { .. } | ReservationState::Confirmed => false,
    }
}

/// Whether a drain ends by time: it has lasted long enough, and no report says any more that a process of
/// the pod runs. What still runs may compute, and the room is not there.
fn is_drained(held: &Reservation, drain_limit: Duration, now: Timestamp) -> bool {
    let is_shown = match held.state {
        ReservationState::Draining { shown: Some(shown), .. } => {
            now.since(shown) < drain_limit.max(SHOWN_FOR)
        }
        _ => false,
    };
    is_older(held, drain_limit, now) && !is_shown
}
