//! `PUT /v1/nodes/{node}/report`: decodes, hands over to the ledger, encodes.

use axum::http::StatusCode;

use crate::api::error::{Error, ErrorReason};
use crate::api::kind::{ApiVersion, ReplyKind};
use crate::control::shared::app::App;
use crate::control::shared::log_limit::LogLimit;
use crate::hardware::device::DeviceId;
use crate::ledger::change::reports::ReportRefusal;
use crate::ledger::query::reading::Readiness;
use crate::metrics::labels::ReportResult;
use crate::model::isolation::Rules;
use crate::model::node_state::InstanceOrders;
use crate::protocol::messages::to_json;
use crate::report::wire::{Allocation, MakeInstance, MigOrders, Outcome, Reply, Report, WholeGpu};
use crate::usage::node_details::DetailsReport;

/// Limits how often refused reports are logged.
static LOGGED: LogLimit = LogLimit::new();

/// Status and JSON body of the answer to a report.
pub fn answer(app: &App, node: &str, body: &[u8]) -> (StatusCode, Vec<u8>) {
    if !app.ledger.is_listed() {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "nodes are not listed yet", None);
    }
    if app.pulse.was_frozen(app.clock.now()) {
        let error = "gpupack was frozen, and the report may be older than that: send a new one";
        return refuse(StatusCode::SERVICE_UNAVAILABLE, error, None);
    }
    let report = match Report::from_json(body) {
        Ok(report) => report,
        Err(error) => {
            app.metrics.report(ReportResult::Refused, None);
            return refuse(StatusCode::UNPROCESSABLE_ENTITY, &error.to_string(), None);
        }
    };
    let now = app.clock.now();
    match app.ledger.report(node, &report.facts, now) {
        Ok(receipt) => {
            let result =
                if receipt.is_taken { ReportResult::Accepted } else { ReportResult::Ignored };
            let last = receipt.last_report.filter(|_| receipt.is_taken);
            app.metrics.report(result, last.map(|last| now.since(last)));
            app.outbox.push(receipt.events);
            if receipt.is_taken {
                let rules = Rules {
                    tolerance: app.config.guard.tolerance,
                    limits: app.driver_limits(),
                    grace: app.config.guard.grace,
                    max_limit: app.config.max_limit,
                };
                let seen = (&report.facts.uses[..], of_this_term(app, report.details));
                app.outbox.push(app.ledger.note(node, seen, rules, now));
            }
            let allocations = receipt.allocations.as_ref();
            let allocations = allocations.map(|held| held.iter().map(Allocation::from_reservation));
            let reply = Reply {
                api_version: ApiVersion::default(),
                kind: ReplyKind::default(),
                session: receipt.session,
                outcome: if receipt.is_taken { Outcome::Accepted } else { Outcome::Ignored },
                allocations_version: Some(receipt.allocations_version),
                allocations: allocations.map(|held| held.collect()),
                mig_orders: mig_orders(app, node),
            };
            (StatusCode::OK, to_json(&reply))
        }
        Err(refusal) => {
            app.metrics.report(ReportResult::Refused, None);
            let (status, reason) = match &refusal {
                ReportRefusal::UnknownNode { .. } => (StatusCode::NOT_FOUND, None),
                ReportRefusal::OldSession { .. }
                | ReportRefusal::LateHello { .. }
                | ReportRefusal::EarlierAgent { .. } => {
                    (StatusCode::CONFLICT, Some(ErrorReason::SessionExpired))
                }
                ReportRefusal::NoInventory
                | ReportRefusal::DeviceOfOtherNode { .. }
                | ReportRefusal::TooManyClasses { .. }
                | ReportRefusal::Inventory(_) => {
                    // One agent may send many; its log has the answers.
                    if let Some(left_out) =
                        LOGGED.admits(("report", refusal.label()), app.clock.precise())
                    {
                        tracing::warn!(node, error = %refusal, left_out, "report refused");
                    }
                    (StatusCode::UNPROCESSABLE_ENTITY, None)
                }
            };
            refuse(status, &refusal.to_string(), reason)
        }
    }
}

/// Without the orders of another leader that an agent obeys: their numbers mean nothing here.
fn of_this_term(app: &App, details: DetailsReport) -> DetailsReport {
    let is_own = |(term, _): &(u64, _)| Some(*term) == app.acts_in();
    DetailsReport { wholes: details.wholes.filter(is_own), ..details }
}

/// What the agent of a node is to do about MIG instances, if this replica gives orders.
fn mig_orders(app: &App, node: &str) -> Option<MigOrders> {
    let term = app.acts_in()?;
    if !app.leading.is_here() || !app.is_fenced() || app.readiness() != Readiness::Ready {
        return None;
    }
    let InstanceOrders { make, remove, whole } = app.ledger.instance_orders(node)?;
    let make = make.into_iter().map(|spot| MakeInstance {
        gpu: spot.gpu.to_string(),
        profile: spot.profile.to_string(),
        start: spot.start,
    });
    let remove = remove.iter().map(DeviceId::to_string).collect();
    let whole = whole.into_iter().map(|(gpu, number)| WholeGpu { gpu: gpu.to_string(), number });
    Some(MigOrders { term, make: make.collect(), remove, whole: whole.collect() })
}

fn refuse(status: StatusCode, error: &str, reason: Option<ErrorReason>) -> (StatusCode, Vec<u8>) {
    (status, to_json(&Error { reason, ..Error::new(error.to_owned()) }))
}
