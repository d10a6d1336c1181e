//! The tenants of a device, as in `/v1/state`.

use serde::Serialize;

use crate::model::device_state::DeviceState;
use crate::model::isolation::DriverLimits;
use crate::model::node_state::NodeState;
use crate::server::views::pods::reservation_state;
use crate::usage::node_details::NodeDetails;

/// One tenant of a device.
#[derive(Debug, Serialize)]
pub struct TenantView {
    /// UID of the pod.
    pub pod_uid: String,
    /// `namespace/name`.
    pub pod: String,
    /// `assumed`, `confirmed` or `draining`.
    pub state: &'static str,
    /// Memory that it holds.
    pub memory_mib: u64,
    /// Share that it holds.
    pub share_millionths: u64,
    /// Memory in use, as of the last list of processes; none if the driver does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_mib: Option<u64>,
    /// The configured isolation of its memory: `none`, `mps`, `driver`, `mig`, or `whole` for a pod
    /// that has the device to itself.
    pub intended: &'static str,
    /// The verified isolation, with the same values.
    pub verified: &'static str,
}

/// The tenants of one device of `node`, by UID.
pub(crate) fn tenants(
    node: &NodeState,
    details: &NodeDetails,
    books: &DeviceState,
    limits: DriverLimits,
) -> Vec<TenantView> {
    let on = details.sightings.on(&books.device().id);
    let tenants = books.tenants().iter().map(|(uid, held)| {
        let reservation = node.reservation(uid);
        let protection = details.protections.of(books, (uid, *held), limits);
        TenantView {
            pod_uid: uid.to_string(),
            pod: reservation.map(|held| held.pod.name.to_string()).unwrap_or_default(),
            state: reservation.map_or("confirmed", reservation_state),
            memory_mib: held.memory.mib(),
            share_millionths: held.share.millionths(),
            used_mib: on.and_then(|on| on.pods.get(uid)).map(|seen| seen.used.mib()),
            intended: protection.intended.name(),
            verified: protection.verified.name(),
        }
    });
    tenants.collect()
}
