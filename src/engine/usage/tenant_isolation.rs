//! What limits the memory of tenants: what is configured, and what was verified on the node.
//!
//! Verified is only what was read back, or what the hardware is: a limit that the driver confirms,
//! limits of clients of a serving MPS daemon, a MIG instance. Clients of MPS must cooperate: a
//! program can evade its limit, so such limits never count as isolation by hardware.

use std::collections::BTreeMap;
use std::time::Duration;

use litemap::LiteMap;

use crate::hardware::pool::ConfiguredIsolation;
use crate::model::device_state::DeviceState;
use crate::model::event::LedgerEvent;
use crate::model::isolation::{DriverLimits, Mode};
use crate::model::node_state::NodeState;
use crate::model::reservation::ReservationState;
use wire::device::DeviceKind;
use wire::ids::{DeviceId, PodUid};
use wire::seen::{DeviceUse, ReportedTenant};
use wire::units::{Demand, Share, Timestamp};

/// How long processes of a pod may run before their configured isolation must be verified. Two
/// regular lists of processes come in this time.
pub const VERIFIED_WITHIN: Duration = Duration::from_secs(10);

/// The isolation of one tenant of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantIsolation {
    /// The configured mode.
    pub configured: Mode,
    /// The verified mode.
    pub verified: Mode,
}

impl TenantIsolation {
    fn of(mode: Mode) -> Self {
        Self { configured: mode, verified: mode }
    }
}

/// What a report shows of devices and of the pods on them.
#[derive(Clone, Copy)]
pub(crate) struct ReportedLists<'a> {
    /// The devices, those with processes whose list is new.
    pub(crate) uses: &'a [DeviceUse],
    /// What the driver says of pods, for each of these devices.
    pub(crate) tenants: &'a BTreeMap<DeviceId, BTreeMap<PodUid, ReportedTenant>>,
}

impl<'a> ReportedLists<'a> {
    pub(crate) fn device(self, id: &DeviceId) -> Option<&'a DeviceUse> {
        self.uses.iter().find(|seen| seen.id == *id)
    }

    pub(crate) fn tenant(self, device: &DeviceId, uid: &PodUid) -> Option<&'a ReportedTenant> {
        self.tenants.get(device)?.get(uid)
    }
}

/// What the driver confirms of the tenants of one node, as of the last list of each device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IsolationTable {
    pub(crate) devices: LiteMap<DeviceId, LiteMap<PodUid, SeenTenant>>,
}

/// One pod with processes on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeenTenant {
    pub(crate) reported: ReportedTenant,
    /// Since when its configured isolation could have been verified and was not.
    unverified: Option<Timestamp>,
    /// Whether this was reported.
    pub(crate) is_reported: bool,
}

impl IsolationTable {
    /// The isolation of a pod that has `held` of a device.
    pub fn of(
        &self,
        device_state: &DeviceState,
        uid: &PodUid,
        held: Demand,
        limits: DriverLimits,
    ) -> TenantIsolation {
        let device = &device_state.device().id;
        let seen = self.devices.get(device).and_then(|pods| pods.get(uid));
        let reported = seen.map(|seen| seen.reported).unwrap_or_default();
        tenant_isolation(device_state, uid, held, reported, limits)
    }

    /// How many pods are kept, once for each device.
    pub(crate) fn count(&self) -> usize {
        self.devices.values().map(LiteMap::len).sum()
    }

    /// Forgets devices that the node no longer has.
    pub(crate) fn prune(&mut self, node_state: &NodeState) {
        let devices = node_state.devices();
        self.devices.retain(|id, _| devices.iter().any(|known| known.device().id == *id));
    }

    /// Applies what the driver reports, for each device whose processes were listed.
    pub(crate) fn take(
        &mut self,
        node_state: &NodeState,
        lists: ReportedLists<'_>,
        limits: DriverLimits,
        now: Timestamp,
    ) -> Vec<LedgerEvent> {
        let mut events = Vec::new();
        for device in node_state.devices() {
            let id = &device.device().id;
            let list = lists.device(id).and_then(|seen| seen.processes.as_ref());
            let Some(list) = list else { continue };
            let before = self.devices.remove(id).unwrap_or_default();
            let mut all = LiteMap::with_capacity(device.tenants().len());
            for (uid, held) in device.tenants() {
                if !list.iter().any(|process| process.pod.as_ref() == Some(uid)) {
                    continue;
                }
                let reported = lists.tenant(id, uid).copied().unwrap_or_default();
                let earlier = before.get(uid);
                let found = tenant_isolation(device, uid, *held, reported, limits);
                let is_promised = match found.configured {
                    Mode::Driver => true,
                    Mode::Mps => {
                        limits == DriverLimits::OfClients
                            || device.configured_isolation() == ConfiguredIsolation::Mps
                    }
                    Mode::None | Mode::Mig | Mode::Whole => false,
                };
                let is_awaited = is_promised && found.verified != found.configured;
                let since = earlier.and_then(|earlier| earlier.unverified).unwrap_or(now);
                let mut seen = SeenTenant {
                    reported,
                    unverified: is_awaited.then_some(since),
                    is_reported: is_awaited && earlier.is_some_and(|earlier| earlier.is_reported),
                };
                let reservation = node_state.reservation(uid);
                let confirmed =
                    reservation.filter(|held| held.state == ReservationState::Confirmed);
                if let (true, false, Some(held)) = (is_awaited, seen.is_reported, confirmed)
                    && now.since(since) >= VERIFIED_WITHIN
                {
                    seen.is_reported = true;
                    events.push(LedgerEvent::NoIsolation {
                        node: node_state.name().clone(),
                        device: id.clone(),
                        pod: held.pod.clone(),
                        configured: found.configured,
                        limit: reported.limit.or(reported.mps_limit),
                    });
                }
                all.insert(uid.clone(), seen);
            }
            self.devices.insert(id.clone(), all);
        }
        events
    }
}

/// The isolation of a tenant with `held` of a device, from what the driver reports of it. A tenant
/// with a part of a MIG instance may have neighbors, like one with a part of a GPU. Where memory is lent, MPS may
/// let it take as much as it may use.
pub(crate) fn tenant_isolation(
    device_state: &DeviceState,
    uid: &PodUid,
    held: Demand,
    reported: ReportedTenant,
    limits: DriverLimits,
) -> TenantIsolation {
    // Facts from outside may give parts of it to others, too.
    let is_alone = device_state.tenants().len() <= 1 && !device_state.is_overallocated();
    let whole = held.share >= Share::WHOLE && held.memory >= device_state.capacity().memory;
    let has_all = is_alone && whole;
    match &device_state.device().kind {
        DeviceKind::MigInstance { .. } if has_all => return TenantIsolation::of(Mode::Mig),
        DeviceKind::Gpu if has_all => return TenantIsolation::of(Mode::Whole),
        DeviceKind::MigInstance { .. } | DeviceKind::Gpu | DeviceKind::MigParent => {}
    }
    let is_gpu = device_state.device().kind == DeviceKind::Gpu;
    let lent = device_state.memory_limit(uid).unwrap_or(held.memory);
    let is_held = reported.limit.is_some_and(|limit| limit <= lent);
    let is_held_by_mps = reported.mps_limit.is_some_and(|limit| limit <= lent);
    let is_promised = is_gpu && limits == DriverLimits::Configured;
    let configured = match device_state.configured_isolation() {
        ConfiguredIsolation::Driver => Mode::Driver,
        _ if is_held => Mode::Driver,
        ConfiguredIsolation::Mps => Mode::Mps,
        _ if is_promised => Mode::Driver,
        _ if limits == DriverLimits::OfClients || reported.is_mps_client => Mode::Mps,
        ConfiguredIsolation::None | ConfiguredIsolation::Hardware => Mode::None,
    };
    let verified = match (is_held, is_held_by_mps) {
        (true, _) => Mode::Driver,
        (false, true) => Mode::Mps,
        (false, false) => Mode::None,
    };
    TenantIsolation { configured, verified }
}

/// How many tenants have each mode configured, and how many have it verified.
pub type TenantsByMode = BTreeMap<Mode, (u64, u64)>;

#[cfg(test)]
mod tests;
