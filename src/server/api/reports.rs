//! `PUT /v1/nodes/{node}/report`: decodes, hands over to the ledger, encodes. And the question whether an agent may
//! open NVIDIA's library.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::http::StatusCode;

use crate::reports::checked_report::CheckedReport;
use crate::reports::reply::allocation;
use control::metrics::labels::ReportResult;
use control::shared::app::App;
use control::shared::log_limit::LogLimit;
use engine::hardware::spots::Spot;
use engine::ledger::change::reports::ReportRefusal;
use engine::ledger::query::queries::PromisedSpots;
use engine::ledger::query::reading::Readiness;
use engine::model::isolation::Rules;
use engine::model::node_state::{InstanceOrders, NodeReporting};
use engine::scoring::lent_memory::OrderedLimits;
use engine::usage::node_details::DetailsReport;
use kube_api::protocol::messages::to_json;
use wire::api::error::{Error, ErrorReason};
use wire::api::kind::{ApiVersion, ReplyKind};
use wire::ids::{DeviceId, PodUid};
use wire::report::bodies::{
    ClearOrders, GpuLimits, LibraryAnswer, LimitOrders, MakeInstance, MigOrders, MigPromise,
    Outcome, PodLimit, Reply,
};
use wire::report::report_limits::MAX_MIG_PROMISES;
use wire::units::Timestamp;

/// How long a pod that is no longer alone on its GPU may still use memory up to its limit: six regular lists of
/// processes, and the time that Kubernetes gives a pod to end.
const GRACE: Duration = Duration::from_secs(30);

/// Limits how often refused reports are logged.
static LOGGED: LogLimit = LogLimit::new();

/// Status and JSON body of the answer to a report.
pub fn answer(app: &App, node: &str, body: &[u8]) -> (StatusCode, Vec<u8>) {
    if !app.ledger.is_listed() {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "nodes are not listed yet", None);
    }
    if app.lead.pulse.was_frozen(app.clock.now()) {
        let error = "gpupack was frozen, and the report may be older than that: send a new one";
        return refuse(StatusCode::SERVICE_UNAVAILABLE, error, None);
    }
    let report = match CheckedReport::from_json(body) {
        Ok(report) => report.sized(&app.config.models.sizes()),
        Err(error) => {
            app.metrics.report(ReportResult::Refused);
            return refuse(StatusCode::UNPROCESSABLE_ENTITY, &error.to_string(), None);
        }
    };
    let now = app.clock.now();
    match app.ledger.report(node, &report.facts, now) {
        Ok(receipt) => {
            let result =
                if receipt.is_taken { ReportResult::Accepted } else { ReportResult::Ignored };
            app.metrics.report(result);
            app.outbox.push(receipt.events);
            if receipt.is_taken {
                let rules = Rules {
                    tolerance: app.config.guard.tolerance,
                    limits: app.config.webhook.memory_limit.driver_limits(),
                    grace: GRACE,
                    max_limit: app.config.max_limit,
                };
                let details = of_this_term(app, report.details);
                app.outbox.push(app.ledger.note(node, &report.facts.uses, details, rules, now));
            }
            if let Some(outcome) = report.clear_outcome.filter(|_| receipt.is_taken) {
                app.clears.learn(node, &outcome, now);
            }
            keep_promises(app, node, report.promises.filter(|_| receipt.is_taken), now);
            let allocations = receipt.allocations.as_ref();
            let reply = Reply {
                api_version: ApiVersion::default(),
                kind: ReplyKind::default(),
                session: receipt.session,
                outcome: if receipt.is_taken { Outcome::Accepted } else { Outcome::Ignored },
                allocations_version: Some(receipt.allocations_version),
                allocations: allocations.map(|held| held.iter().map(allocation).collect()),
                mig_orders: mig_orders(app, node),
                memory_limits: limit_orders(app, node),
                clear_orders: clear_orders(app, node, now),
                close_library: app.ledger.closes_library(node),
            };
            (StatusCode::OK, to_json(&reply))
        }
        Err(refusal) => refused(app, node, &refusal),
    }
}

/// The answer to a report that the ledger refuses.
fn refused(app: &App, node: &str, refusal: &ReportRefusal) -> (StatusCode, Vec<u8>) {
    app.metrics.report(ReportResult::Refused);
    let (status, reason) = match refusal {
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
            if let Some(left_out) = LOGGED.admits(("report", refusal.label()), app.clock.precise())
            {
                tracing::warn!(node, error = %refusal, left_out, "report refused");
            }
            (StatusCode::UNPROCESSABLE_ENTITY, None)
        }
    };
    refuse(status, &refusal.to_string(), reason)
}

/// Status and JSON body of the answer to an agent that asks whether it may open the library. It changes nothing.
pub fn library(app: &App, node: &str) -> (StatusCode, Vec<u8>) {
    if !app.ledger.is_listed() {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "nodes are not listed yet", None);
    }
    // Its Node object is there before an agent is. A watch that is behind does not know its labels.
    if app.ledger.node(node).is_none_or(|known| known.state() == NodeReporting::Gone) {
        let error = format!("node `{node}` is not known yet");
        return refuse(StatusCode::SERVICE_UNAVAILABLE, &error, None);
    }
    let close_library = app.ledger.closes_library(node);
    (StatusCode::OK, to_json(&LibraryAnswer { close_library, ..LibraryAnswer::default() }))
}

/// Without the orders of another leader that an agent obeys: their numbers mean nothing here.
fn of_this_term(app: &App, details: DetailsReport) -> DetailsReport {
    let limits = details.limits.map(|(term, mut gpus)| {
        if Some(term) != app.writer.acts_in() {
            gpus.values_mut().for_each(|number| *number = 0);
        }
        (term, gpus)
    });
    DetailsReport { limits, ..details }
}

/// The term in which this replica gives orders to agents; `None` if it gives none.
pub(crate) fn ordering_term(app: &App) -> Option<u64> {
    let may = app.leads() && app.lead.is_fenced() && app.readiness() == Readiness::Ready;
    app.writer.acts_in().filter(|_| may)
}

/// The GPU of a node that is to be cleared, if this replica gives orders. Its term is there without an order, too: so
/// the agent hears no more of an earlier leader.
fn clear_orders(app: &App, node: &str, now: Timestamp) -> Option<Box<ClearOrders>> {
    let term = ordering_term(app)?;
    Some(Box::new(ClearOrders { term, order: app.clears.order_for(node, term, now) }))
}

/// The limits of memory that the agent of a node is to set, if this replica gives orders.
fn limit_orders(app: &App, node: &str) -> Option<LimitOrders> {
    let (term, orders) = (ordering_term(app)?, app.ledger.limit_orders(node)?);
    let gpus = orders.into_iter().map(|OrderedLimits { gpu, number, limits }| GpuLimits {
        gpu: gpu.to_string(),
        number,
        pods: limits
            .into_iter()
            .map(|(uid, limit, keeps_more)| PodLimit {
                pod_uid: uid.to_string(),
                limit_mib: limit.mib(),
                keeps_more,
            })
            .collect(),
    });
    Some(LimitOrders { term, gpus: gpus.collect() })
}

/// Keeps the places of MIG instances for the pods to which an earlier leader has promised them, if this replica
/// leads now. Those that wait get them at their next bind. Not for a pod of a group, which starts with the others.
fn keep_promises(
    app: &App,
    node: &str,
    reported: Option<(u64, BTreeMap<PodUid, Vec<Spot>>)>,
    now: Timestamp,
) {
    let own = app.writer.acts_in().filter(|_| app.leads() && app.lead.is_fenced());
    let earlier = reported.filter(|(term, _)| own.is_some_and(|own| own != *term));
    let Some((_, promises)) = earlier else { return };
    for (uid, spots) in &promises {
        let Some(state) = app.waiting.pod(uid) else { continue };
        let query = &state.waiting.query;
        if state.waiting.group.is_none() && app.is_known_to_wait(uid, query) {
            let unbound = app.unbound(uid, now);
            let promised = PromisedSpots { pod: uid, node, spots };
            let kept = app
                .ledger
                .keep_promise(promised, query, now, || app.waiting.may_hold(uid, now, unbound));
            if let Some(events) = kept {
                tracing::info!(pod_uid = %uid, node, "the place of a MIG instance that an earlier leader promised is kept");
                app.outbox.push(events);
            }
        }
    }
}

/// What the agent of a node is to do about MIG instances, if this replica gives orders.
fn mig_orders(app: &App, node: &str) -> Option<MigOrders> {
    let term = ordering_term(app)?;
    let InstanceOrders { make, remove, promises } = app.ledger.instance_orders(node)?;
    let make = make.into_iter().map(|spot| MakeInstance {
        gpu: spot.gpu.to_string(),
        profile: spot.profile.to_string(),
        start: spot.start,
    });
    let remove = remove.iter().map(DeviceId::to_string).collect();
    let promises =
        promises.into_iter().take(MAX_MIG_PROMISES).map(|(uid, Spot { gpu, profile, start })| {
            MigPromise {
                pod_uid: uid.to_string(),
                gpu: gpu.to_string(),
                profile: profile.to_string(),
                start,
            }
        });
    Some(MigOrders { term, make: make.collect(), remove, promises: promises.collect() })
}

fn refuse(status: StatusCode, error: &str, reason: Option<ErrorReason>) -> (StatusCode, Vec<u8>) {
    (status, to_json(&Error { reason, ..Error::new(error.to_owned()) }))
}
