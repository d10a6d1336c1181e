//! The map of the page: nodes, GPUs and tenants in few bytes each, as there are up to 40,000 GPUs.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::views::state::reporting;
use engine::model::device_state::DeviceState;
use engine::model::isolation::{DriverLimits, Mode};
use engine::model::node_state::NodeState;
use engine::model::reservation::ReservationState;
use engine::scoring::guests::borrowers;
use engine::usage::node_details::NodeDetails;
use wire::api::page::{GpuCell, NodeCell, TenantCell};
use wire::device::{DeviceKind, Health};
use wire::units::{MemMib, Share};

/// Step of the shown memory in use, in thousandths of a device. The amount changes all the time,
/// and smaller steps cannot be seen on a map.
const USED_STEP: u64 = 20;

/// Names in the order in which they were first sent, each with its number then.
#[derive(Debug, Default)]
pub(crate) struct SentNames {
    names: Vec<(u64, String)>,
    positions: BTreeMap<String, usize>,
}

impl SentNames {
    /// The position of a name. A new name is sent under `number`.
    fn position(&mut self, name: &str, number: u64) -> usize {
        if let Some(position) = self.positions.get(name) {
            return *position;
        }
        self.names.push((number, name.to_owned()));
        self.positions.insert(name.to_owned(), self.names.len() - 1);
        self.names.len() - 1
    }

    /// The number of names.
    pub(crate) fn count(&self) -> usize {
        self.names.len()
    }

    /// All names, by position.
    pub(crate) fn all(&self) -> Vec<Cow<'_, str>> {
        self.names.iter().map(|(_, name)| Cow::Borrowed(name.as_str())).collect()
    }

    /// Names first sent after `number`, with their positions.
    pub(crate) fn after(&self, number: u64) -> Vec<(usize, Cow<'_, str>)> {
        let known = self.names.partition_point(|(sent, _)| *sent <= number);
        let fresh = self.names.iter().enumerate().skip(known);
        fresh.map(|(position, (_, name))| (position, Cow::Borrowed(name.as_str()))).collect()
    }
}

/// The names to which cells refer by position.
#[derive(Debug, Default)]
pub(crate) struct Legend {
    pub(crate) models: SentNames,
    pub(crate) namespaces: SentNames,
}

/// Input for a cell, beside the node's state.
pub(crate) struct Sight<'a> {
    pub(crate) details: &'a NodeDetails,
    pub(crate) limits: DriverLimits,
    pub(crate) legend: &'a mut Legend,
    /// The number under which new names are sent.
    pub(crate) number: u64,
}

/// The cell of a node.
pub(crate) fn node_cell(node: &NodeState, sight: &mut Sight<'_>) -> NodeCell {
    NodeCell {
        name: node.name().to_string(),
        state: reporting(node.state()),
        gpus: node
            .devices()
            .iter()
            .map(|device_state| gpu_cell(node, device_state, sight))
            .collect(),
    }
}

fn gpu_cell(node: &NodeState, device_state: &DeviceState, sight: &mut Sight<'_>) -> GpuCell {
    let (device, capacity) = (device_state.device(), device_state.capacity().memory);
    let flags = match device_state.health() {
        Health::Healthy => 0,
        Health::Unhealthy => 1,
        Health::KubeletOwned => 8,
    };
    let flags = flags
        + 2 * u8::from(device_state.is_overallocated())
        + 4 * u8::from(device.kind == DeviceKind::MigParent)
        + 16 * u8::from(matches!(device.kind, DeviceKind::MigInstance { .. }));
    let mut tenants = Vec::with_capacity(device_state.tenants().len());
    for (uid, held) in device_state.tenants() {
        let reservation = node.reservation(uid);
        let namespace = reservation.map_or("", |held| held.pod.namespace());
        let is_ended =
            reservation.is_some_and(|held| matches!(held.state, ReservationState::Draining { .. }));
        let found = sight.details.isolation.of(device_state, uid, *held, sight.limits);
        tenants.push(TenantCell((
            Some(sight.legend.namespaces.position(namespace, sight.number)),
            thousandths(held.share),
            thousandths_of(held.memory, capacity),
            u8::from(is_ended)
                + 2 * u8::from(found.verified == Mode::None)
                + 8 * u8::from(device_state.is_away(uid)),
        )));
    }
    for (uid, guest) in device_state.guests() {
        let namespace = node.reservation(uid).map_or("", |held| held.pod.namespace());
        tenants.push(TenantCell((
            Some(sight.legend.namespaces.position(namespace, sight.number)),
            thousandths(guest.demand.share),
            thousandths_of(guest.demand.memory, capacity),
            4,
        )));
    }
    for (uid, borrowed) in borrowers(node, device_state) {
        let namespace = node.reservation(uid).map_or("", |held| held.pod.namespace());
        let borrowed = stepped(borrowed, capacity);
        if borrowed > 0 {
            let position = sight.legend.namespaces.position(namespace, sight.number);
            tenants.push(TenantCell((Some(position), 0, borrowed, 16)));
        }
    }
    GpuCell((
        sight.legend.models.position(device.model.as_str(), sight.number),
        capacity.mib(),
        flags,
        thousandths_of(device_state.unallocated_use(), capacity),
        tenants,
        device_state.used().map(|used| stepped(used, capacity)),
    ))
}

pub(crate) fn thousandths(share: Share) -> u64 {
    share.millionths() / 1_000
}

fn thousandths_of(part: MemMib, whole: MemMib) -> u64 {
    Share::ratio(part, whole).map_or(0, thousandths)
}

/// Memory in use in thousandths of a device, rounded down to a step.
fn stepped(used: MemMib, capacity: MemMib) -> u64 {
    thousandths_of(used, capacity) / USED_STEP * USED_STEP
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use engine::hardware::device_class::DeviceClasses;
    use engine::hardware::pool::{Borrow, PoolRule};
    use engine::model::request::{Amount, GpuRequest, Limit, Movable};
    use engine::model::reservation::{PlacedDevice, Reservation};
    use engine::scoring::node_fixture::{node_of, tenant};
    use wire::ids::{DeviceId, PodUid};
    use wire::seen::{DeviceUse, ProcessUse};
    use wire::units::{Demand, Timestamp};

    /// A pod with half of a GPU that may borrow the other half.
    fn borrower(name: &str) -> Reservation {
        let demand = Demand { memory: MemMib::new(500), share: Share::from_millionths(500_000) };
        let placed = PlacedDevice { id: DeviceId::new("A").unwrap(), demand };
        let mut request = GpuRequest::one(Amount::Fraction(demand.share));
        (request.limit, request.movable) = (Some(Limit::Fraction(Share::WHOLE)), Movable::Restart);
        Reservation { request: Some(Arc::new(request)), ..tenant(name, vec![placed]) }
    }

    #[test]
    fn what_is_borrowed_has_cells_of_its_own() {
        let mut classes = DeviceClasses::default();
        let mut node = node_of("A:1000/1000 B:1000/1000", &mut classes);
        let borrow = Borrow::Memory { most: Share::WHOLE };
        node.share_by(PoolRule { borrow, ..PoolRule::default() }, &mut classes);
        for name in ["p", "q"] {
            node.allocate(borrower(name));
        }
        node.lend(&PodUid::new("q"), DeviceId::new("B").unwrap());
        let seen = |device: &str, pod: &str, mib: u64| DeviceUse {
            used: Some(MemMib::new(mib)),
            processes: Some(vec![ProcessUse {
                pod: Some(PodUid::new(pod)),
                memory: Some(MemMib::new(mib)),
            }]),
            ..DeviceUse::idle(DeviceId::new(device).unwrap())
        };
        let mut cells = |uses: [u64; 2]| {
            node.observe(&[seen("A", "p", uses[0]), seen("B", "q", uses[1])], Timestamp::START);
            let mut legend = Legend::default();
            let details = NodeDetails::default();
            let limits = DriverLimits::Unused;
            let mut sight = Sight { details: &details, limits, legend: &mut legend, number: 1 };
            let gpus = node_cell(&node, &mut sight).gpus;
            let tenants = |GpuCell(gpu): GpuCell| -> Vec<(u64, u64, u8)> {
                let parts = |TenantCell(cell): TenantCell| (cell.1, cell.2, cell.3 & !2);
                gpu.4.into_iter().map(parts).collect()
            };
            gpus.into_iter().map(tenants).collect::<Vec<_>>()
        };
        let (here, away, guest) = ((500, 500, 0), (500, 500, 8), (500, 500, 4));
        assert_eq!(cells([500, 0]), [vec![here, away], vec![guest]]);
        assert_eq!(cells([519, 500]), [vec![here, away], vec![guest]], "less than a step");
        let borrowed = |thousandths| (0, thousandths, 16);
        let [home, on] = [vec![here, away, borrowed(220)], vec![guest, borrowed(500)]];
        assert_eq!(cells([733, 1_000]), [home, on]);
    }

    #[test]
    fn a_name_is_sent_once() {
        let mut names = SentNames::default();
        assert_eq!(
            (names.position("a", 1), names.position("b", 1), names.position("a", 2)),
            (0, 1, 0)
        );
        assert_eq!(names.position("c", 3), 2);
        let all = [(0, "a"), (1, "b"), (2, "c")].map(|(at, name)| (at, Cow::Borrowed(name)));
        assert_eq!(names.after(0), all);
        assert_eq!(names.after(1), all[2..]);
        assert_eq!(names.after(3), []);
    }
}
