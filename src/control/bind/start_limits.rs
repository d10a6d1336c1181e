//! The limits that containers get when they start.

use std::cell::LazyCell;

use crate::shared::app::App;
use engine::model::reservation::{PlacedDevice, Placement, Reservation};
use kube_api::config::webhook::MemoryLimit;
use kube_api::containers::mps::ClientLimits;
use wire::device::DeviceKind;
use wire::units::Demand;

/// The limits for the containers of a pod with `placement`: what it is allocated, or under MPS what it may take
/// at its next start, if that is known.
pub(crate) fn client_limits(
    app: &App,
    placement: &Placement,
    at_start: Option<Demand>,
) -> ClientLimits {
    let settings = &app.config.webhook;
    // A copy, for a limit only.
    let node = LazyCell::new(|| app.ledger.node(placement.node.as_str()));
    let device = |placed: &PlacedDevice| {
        let mut devices = node.iter().flat_map(|node| node.devices());
        devices.find(|it| it.device().id == placed.id).map(|node_state| node_state.device())
    };
    match (settings.memory_limit, &placement.devices[..]) {
        (MemoryLimit::Mps, [placed]) => {
            let model = device(placed).map(|device| &device.model);
            ClientLimits::of(at_start.unwrap_or(placed.demand), model, settings.thread_cap)
        }
        (MemoryLimit::Driver, devices) => {
            let is_gpu = |placed| device(placed).is_some_and(|it| it.kind == DeviceKind::Gpu);
            // The NVIDIA container toolkit sets one amount on all of them.
            let least = devices.iter().map(|placed| placed.demand.memory).min();
            let least = least.filter(|_| devices.iter().all(is_gpu));
            least.map(ClientLimits::of_driver).unwrap_or_default()
        }
        (MemoryLimit::None | MemoryLimit::Mps, _) => ClientLimits::default(),
    }
}

/// What a pod may take at its next start if other pods run there: of memory what it requests.
pub(crate) fn least_at_start(app: &App, held: &Reservation) -> Option<Demand> {
    let [placed] = &held.placement.devices[..] else { return None };
    let at_start = app.ledger.at_start(&held.pod.uid)?;
    Some(Demand { memory: placed.demand.memory, ..at_start })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use engine::hardware::pool::ConfiguredIsolation;
    use engine::ledger::ledger_fixture::ledger;
    use kube_api::config::file::Config;
    use runtime::clock::Clock;
    use wire::ids::{DeviceId, NodeName};
    use wire::units::{MemMib, Share};

    /// The limits that are written for 250 MiB of each of these devices.
    fn limits(settings: &str, devices: &[&str]) -> String {
        let config = Config::from_yaml(&format!("webhook: {{{settings}}}")).unwrap();
        let app = App::alone(Arc::new(ledger("A")), config, Clock::start());
        let demand = Demand { memory: MemMib::new(250), share: Share::from_millionths(255_000) };
        let id = |name: &&str| PlacedDevice { id: DeviceId::new(name).unwrap(), demand };
        let devices = devices.iter().map(id).collect();
        let placement = Placement {
            node: NodeName::new("n"),
            devices,
            isolation: ConfiguredIsolation::None,
            guest: None,
            spots: Vec::new(),
        };
        let written = client_limits(&app, &placement, None).annotations();
        written.into_values().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn limits_of_clients_are_written_where_they_are_configured() {
        let capped = "memory_limit: mps, mps_thread_percentage: share";
        for (settings, devices, written) in [
            ("", &["A"][..], ""),
            ("memory_limit: driver", &["A"], "250 0"),
            ("memory_limit: driver", &["gone"], ""),
            ("memory_limit: mps", &["A"], "0=250M"),
            ("memory_limit: mps", &["A", "B"], ""),
            (capped, &["A"], "0=250M 25"),
            (capped, &["gone"], "0=250M 100"),
        ] {
            assert_eq!(limits(settings, devices), written, "{settings} {devices:?}");
        }
    }
}
