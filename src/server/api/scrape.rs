//! `GET /metrics` and `GET /metrics/gpus`: the metrics for Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use parking_lot::Mutex;

use crate::views::devices::instance;
use crate::views::teams;
use crate::views::viewer::Viewer;
use control::metrics::demand::{QueueFigures, TeamFigures};
use control::metrics::fleet::{FleetFigures, NodeCounts};
use control::metrics::guard::{BlindFigures, OutsideFigures};
use control::metrics::mig::{FailedMigOrders, MigFigures};
use control::metrics::moves::LentFigures;
use control::shared::app::App;
use engine::ledger::query::reading::{Lent, Readiness};
use engine::model::node_state::NodeReporting;
use engine::scoring::device_figures::Size;
use engine::usage::samples::UnallocatedUse;
use wire::api::state::InstanceState;
use wire::device::DeviceKind;
use wire::ids::MigProfile;
use wire::units::Share;

/// One scrape at a time: each sets the gauges of the fleet again.
static SCRAPING: Mutex<()> = Mutex::new(());

/// All families of the extender, as of now. A replica that does not lead has those about itself.
pub(crate) fn text(app: &App) -> Vec<u8> {
    let _alone = SCRAPING.lock();
    let is_leader = app.lead.leading.is_here();
    let nodes = service(app, is_leader);
    if !is_leader {
        return app.metrics.text_of_process();
    }
    let UnallocatedUse { over_limit_pods, excess, untracked } = app.ledger.outside();
    let Lent { guests, share, memory, bursts } = app.ledger.lent();
    app.metrics.set_lent(LentFigures { guests, share, memory, bursts });
    app.metrics.set_mig(&mig(app));
    app.metrics.set_failed_mig_orders(failed_mig_orders(app));
    app.metrics.set_overdue_drains(app.ledger.overdue_drains(app.clock.now()));
    let (blind_pods, blind_nodes) = app.ledger.blind();
    app.metrics.set_blind(BlindFigures { pods: blind_pods, nodes: blind_nodes });
    app.metrics.set_outside(OutsideFigures { over_limit_pods, excess, untracked });
    for (mode, (configured, verified)) in
        app.ledger.isolation(app.config.webhook.memory_limit.driver_limits())
    {
        app.metrics.set_tenants(mode.name(), configured, verified);
    }
    let fleet = FleetFigures { packing: app.ledger.packing(), kinds: app.ledger.fleet(), nodes };
    app.metrics.set_teams(&team_figures(app));
    app.metrics.set_fleet(&fleet, &queue(app));
    app.metrics.text()
}

/// The orders about MIG instances that agents cannot carry out, on nodes that report.
fn failed_mig_orders(app: &App) -> FailedMigOrders {
    let mut failed = FailedMigOrders::default();
    app.ledger.look_into_each(|node, details| {
        if node.state() == NodeReporting::Reporting {
            let all = &details.mig_failures;
            let removals = all.iter().filter(|failure| failure.removed.is_some()).count();
            failed.to_remove += u64::try_from(removals).unwrap_or(0);
            failed.to_make += u64::try_from(all.len() - removals).unwrap_or(0);
        }
    });
    failed
}

/// The MIG instances that gpupack makes, and those that it could make.
fn mig(app: &App) -> BTreeMap<MigProfile, MigFigures> {
    let mut all: BTreeMap<MigProfile, MigFigures> = BTreeMap::new();
    app.ledger.look_at_each(|node| {
        if node.spots().is_empty() {
            return;
        }
        for device_state in node.devices() {
            let device = device_state.device();
            for (profile, count) in node.placeable_instances(&device.id) {
                all.entry(profile).or_default().placeable += u64::try_from(count).unwrap_or(0);
            }
            let state = match instance(device_state) {
                None => continue,
                Some(InstanceState::Promised) => 0,
                Some(InstanceState::Made) => 1,
                Some(InstanceState::Leaving) => 2,
            };
            if let DeviceKind::MigInstance { profile, .. } = &device.kind {
                all.entry(profile.clone()).or_default().instances[state] += 1;
            }
        }
    });
    all
}

/// What each team may have and has.
fn team_figures(app: &App) -> Vec<TeamFigures> {
    let share = Share::from_millionths;
    let teams = teams::teams(app, &Viewer::All).into_iter();
    let figures = teams.map(|team| TeamFigures {
        guaranteed: share(team.guaranteed_millionths),
        at_most: team.at_most_millionths.map(share),
        used: share(team.used_millionths),
        over_quota: share(team.over_quota_millionths),
        waiting: u64::try_from(team.waiting).unwrap_or(u64::MAX),
        name: team.team,
    });
    figures.collect()
}

/// Sets the figures of the service itself. Returns how many nodes report.
fn service(app: &App, is_leader: bool) -> NodeCounts {
    let now = app.clock.now();
    let mut nodes = NodeCounts::default();
    let mut oldest = None;
    app.ledger.look_at_each(|node| match node.state() {
        NodeReporting::Reporting => {
            nodes.reporting += 1;
            oldest = oldest.max(node.last_report().map(|last| now.since(last)));
        }
        NodeReporting::NotReporting => nodes.not_reporting += 1,
        NodeReporting::NeverReported => nodes.never += 1,
        NodeReporting::Gone => {}
    });
    let heard = oldest.map_or(0, |age| app.clock.unix_seconds().saturating_sub(age.as_secs()));
    let refusal = app.outside.api_server().refuses();
    app.metrics.set_token_refused(refusal.map_or(Duration::ZERO, |refusal| refusal.lasted()));
    let is_refused = refusal.is_some_and(|refusal| refusal.is_lasting());
    let is_ready = is_leader && !is_refused && app.readiness() == Readiness::Ready;
    app.metrics.set_leader(is_leader);
    let (holds, standing) = (app.ledger.hold_count(), app.ledger.standing_count());
    app.metrics.set_service(is_ready, holds, standing, heard);
    nodes
}

/// The figures of the waiting pods.
fn queue(app: &App) -> QueueFigures {
    let mut queue = QueueFigures::default();
    app.waiting.look_at_each(|state| {
        let Some(request) = &state.waiting.query.gpu else { return };
        if state.refused.is_none() {
            return;
        }
        let reason = state.closest().map(|(rejection, _)| rejection.label());
        let size = Size::of(request);
        *queue.pods.entry((size, reason)).or_default() += 1;
        let created = u64::try_from(state.waiting.created_unix_seconds).unwrap_or(0);
        let oldest = queue.oldest.entry(reason).or_insert(created);
        *oldest = created.min(*oldest);
    });
    queue
}

/// Families of every single device, printed while walking the ledger. 40,000 GPUs make about 40 MB,
/// so they have a path of their own. Only the replica that leads has series. Agents export the same and more for their own devices.
pub(crate) fn devices(app: &App) -> Vec<u8> {
    let mut families: [String; 4] = [
        ("gpupack_device_share_gpus", "Allocated compute share, in GPUs."),
        ("gpupack_device_memory_bytes", "Memory: capacity, allocated, and seen in use."),
        ("gpupack_device_tenants", "Pods that hold a part of it."),
        ("gpupack_device_placeable", "1 where it may take tenants."),
    ]
    .map(|(name, help)| format!("# HELP {name} {help}\n# TYPE {name} gauge\n"));
    if !app.lead.leading.is_here() {
        return families.concat().into_bytes();
    }
    let mut labels = String::new();
    app.ledger.look_at_each(|node| {
        for device_state in node.devices() {
            labels.clear();
            let device = device_state.device();
            for (name, value) in [
                ("UUID", device.id.as_str()),
                ("Hostname", node.name().as_str()),
                ("model", device.model.as_str()),
                ("pool", node.pool().as_str()),
            ] {
                let _ = write!(labels, "{name}=\"");
                escape(value, &mut labels);
                labels.push_str("\",");
            }
            let _ = write!(labels, "gpu=\"{}\"", device.index.0);
            let [share, memory, tenants, placeable] = &mut families;
            let held = device_state.allocated();
            let (whole, rest) =
                (held.share.millionths() / 1_000_000, held.share.millionths() % 1_000_000);
            let _ = writeln!(share, "gpupack_device_share_gpus{{{labels}}} {whole}.{rest:06}");
            for (kind, amount) in [
                ("capacity", Some(device_state.capacity().memory)),
                ("allocated", Some(held.memory)),
                ("observed", device_state.used()),
            ] {
                let Some(amount) = amount else { continue };
                let bytes = amount.mib().saturating_mul(1 << 20);
                let _ = writeln!(
                    memory,
                    "gpupack_device_memory_bytes{{{labels},kind=\"{kind}\"}} {bytes}"
                );
            }
            let count = device_state.tenants().len();
            let _ = writeln!(tenants, "gpupack_device_tenants{{{labels}}} {count}");
            let is_open = u8::from(node.placeable().is_ok() && device_state.is_placeable());
            let _ = writeln!(placeable, "gpupack_device_placeable{{{labels}}} {is_open}");
        }
    });
    families.concat().into_bytes()
}

/// Writes a label value as the text format requires.
fn escape(value: &str, into: &mut String) {
    for letter in value.chars() {
        match letter {
            '\\' => into.push_str("\\\\"),
            '"' => into.push_str("\\\""),
            '\n' => into.push_str("\\n"),
            other => into.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use engine::ledger::ledger_fixture::{failed_mig_order, ledger, settings};
    use engine::model::isolation::{DriverLimits, Rules};
    use engine::usage::node_details::DetailsReport;
    use kube_api::config::file::Config;
    use runtime::clock::Clock;
    use wire::units::{MemMib, Timestamp};

    #[test]
    fn orders_about_mig_instances_that_fail_are_counted_while_their_node_reports() {
        let config = Config::from_yaml("{}").unwrap();
        let app = App::alone(Arc::new(ledger("A")), config, Clock::start());
        let removed = [Some("MIG-1"), None, Some("MIG-2")];
        let mig_failures = removed.map(|removed| failed_mig_order("A", 0, removed)).into();
        let rules = Rules {
            tolerance: MemMib::ZERO,
            limits: DriverLimits::Unused,
            grace: Duration::ZERO,
            max_limit: Share::WHOLE,
        };
        let check = |to_make: u64, to_remove: u64| {
            let text = String::from_utf8(text(&app)).unwrap();
            for (action, number) in [("make", to_make), ("remove", to_remove)] {
                let line = format!("gpupack_mig_failed_orders{{action=\"{action}\"}} {number}");
                assert!(text.lines().any(|shown| shown == line), "{line}: {text}");
            }
        };
        check(0, 0);
        let report = DetailsReport { mig_failures, ..DetailsReport::default() };
        app.ledger.note("n", &[], report, rules, Timestamp::START);
        check(1, 2);
        let later = Timestamp::START.plus(2 * settings().stale_after);
        app.ledger.tick(later);
        check(0, 0);
    }

    #[test]
    fn label_values_are_escaped() {
        let mut text = String::new();
        escape("a\"} 1\n\\b", &mut text);
        assert_eq!(text, "a\\\"} 1\\n\\\\b");
    }
}
