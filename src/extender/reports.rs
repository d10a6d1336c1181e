//! `PUT /v1/nodes/{node}/report`: decode, hand to the ledger, encode.

use axum::http::StatusCode;

use super::app::App;
use super::protocol::to_json;
use crate::ledger::reading::Readiness;
use crate::ledger::reports::ReportRefusal;
use crate::metrics::ReportResult;
use crate::packing::units::Timestamp;
use crate::report::checked::CheckedReport;
use crate::report::{Booking, Outcome, Refusal, Reply, Report, SCHEMA_VERSION};

/// Status and JSON body of the answer to a report.
pub fn answer(app: &App, node: &str, body: &[u8]) -> (StatusCode, Vec<u8>) {
    if app.ledger.readiness(app.clock.now()) == Readiness::NotListed {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "nodes are not listed yet", None);
    }
    let report = match Report::from_json(body) {
        Ok(report) => report,
        Err(error) => {
            app.metrics.report(ReportResult::Refused, None);
            return refuse(StatusCode::UNPROCESSABLE_ENTITY, &error.to_string(), None);
        }
    };
    let now = app.clock.now();
    let last = app.ledger.last_report(node);
    match app.ledger.report(node, &report.books, now) {
        Ok(receipt) => {
            let result =
                if receipt.is_taken { ReportResult::Accepted } else { ReportResult::Ignored };
            app.metrics
                .report(result, last.filter(|_| receipt.is_taken).map(|last| now.since(last)));
            app.outbox.push(receipt.effects);
            if receipt.is_taken {
                note(app, node, report, now);
            }
            let reply = Reply {
                schema_version: SCHEMA_VERSION,
                session: receipt.session,
                outcome: if receipt.is_taken { Outcome::Accepted } else { Outcome::Ignored },
                send_inventory: false,
                bookings: receipt.bookings.iter().map(Booking::from_reservation).collect(),
            };
            (StatusCode::OK, to_json(&reply))
        }
        Err(refusal) => {
            app.metrics.report(ReportResult::Refused, None);
            let (status, reason) = match &refusal {
                ReportRefusal::UnknownNode { .. } => (StatusCode::NOT_FOUND, None),
                ReportRefusal::OldSession { .. } => {
                    (StatusCode::CONFLICT, Some(Refusal::SESSION_EXPIRED))
                }
                ReportRefusal::NoInventory
                | ReportRefusal::ForeignDevice { .. }
                | ReportRefusal::Inventory(_) => {
                    tracing::warn!(node, error = %refusal, "report refused");
                    (StatusCode::UNPROCESSABLE_ENTITY, None)
                }
            };
            refuse(status, &refusal.to_string(), reason)
        }
    }
}

/// Notes what stands beside the books.
fn note(app: &App, node: &str, report: CheckedReport, now: Timestamp) {
    let CheckedReport { books, mut details } = report;
    let tenants = std::mem::take(&mut details.tenants);
    app.ledger.note_details(node, details);
    app.outbox.push(app.ledger.note_use(node, &books.uses, app.config.guard.tolerance));
    app.ledger.note_usage(node, &books.uses, now);
    let seen = (&books.uses[..], &tenants);
    app.outbox.push(app.ledger.note_protection(node, seen, app.driver_limits(), now));
}

fn refuse(status: StatusCode, error: &str, reason: Option<&str>) -> (StatusCode, Vec<u8>) {
    let body = Refusal { error: error.to_owned(), reason: reason.map(str::to_owned) };
    (status, to_json(&body))
}
