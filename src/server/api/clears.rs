//! `PUT /v1/gpus/{gpu}`: orders that an agent forgets the faults of past events on a GPU, and waits for the outcome.

use std::time::Duration;

use axum::extract::{FromRequest, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use tokio::sync::Semaphore;

use crate::api::people::MayClear;
use crate::api::reports::ordering_term;
use crate::http::exchange::PeerAddress;
use crate::http::respond::{ReadBody, ReadPath, encoded, refusal};
use crate::page::service::{Service, too_long};
use control::clearing::{ClearRefusal, Ended, MOST_OPEN, NewOrder, OrderId, Standing, Wanted};
use control::shared::app::App;
use engine::model::node_state::NodeReporting;
use kube_api::pod::seen_pod::LONGEST_NAME;
use wire::api::commands::{ClearRequest, Cleared};
use wire::api::error::Error;
use wire::api::kind::{ApiVersion, ClearedKind};
use wire::device::DeviceKind;
use wire::ids::DeviceId;

/// How long one call waits for the outcome: the API server ends a call after a minute.
const WAITS: Duration = Duration::from_secs(5);

/// Pause between two looks whether an order has ended.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Calls that wait at a time: one for each order. A call holds a connection of the page's listener, and those of the
/// API server all come from one address.
static WAITING: Semaphore = Semaphore::const_new(MOST_OPEN);

/// Why a GPU is not cleared.
#[derive(Debug, thiserror::Error)]
enum ClearError {
    #[error("this replica gives no orders now: try again")]
    NotReady,
    #[error("too many calls wait for an outcome: try again")]
    TooManyWait,
    #[error("node `{node}` is not known here")]
    UnknownNode { node: String },
    #[error("node `{node}` has no GPU `{gpu}`")]
    UnknownGpu { node: String, gpu: DeviceId },
    #[error("`{id}` is a MIG instance: name its GPU")]
    Instance { id: DeviceId },
    #[error("the agent of node `{node}` does not report")]
    Silent { node: String },
    #[error(transparent)]
    Refused(#[from] ClearRefusal),
    #[error(
        "the order `{id}` ended with its leader: look whether the GPU takes tenants, and clear it again"
    )]
    OtherLeader { id: OrderId },
}

impl ClearError {
    fn status(&self) -> StatusCode {
        match self {
            Self::NotReady | Self::TooManyWait => StatusCode::SERVICE_UNAVAILABLE,
            Self::UnknownNode { .. } | Self::UnknownGpu { .. } | Self::Instance { .. } => {
                StatusCode::NOT_FOUND
            }
            Self::Silent { .. } | Self::Refused(_) | Self::OtherLeader { .. } => {
                StatusCode::CONFLICT
            }
        }
    }
}

/// Orders that the agent of a node forgets the faults of past events on one GPU and its MIG instances.
///
/// The first answer has the id of the order. Call it again with `order`: it then waits for the outcome, for 5 s. Without a
/// result in the answer, call it once more; an order ends within 60 s.
/// Without TLS only the loopback interface may call it.
#[utoipa::path(put, path = "/v1/gpus/{gpu}", operation_id = "clearGpu", tag = "people", params(
    ("gpu" = String, Path, description = "UUID of the GPU."),
), request_body = ClearRequest, responses(
    (status = 200, description = "How the order stands.", body = Cleared),
    (status = 400, description = "The GPU, the node or the body cannot be read.", body = Error),
    (status = 403, description = "The caller may not `update` the resource `gpus`.", body = Error),
    (status = 404, description = "No node has this name, or it has no such GPU.", body = Error),
    (status = 409, description = "Another order is in the way, or the leader has changed since.", body = Error),
    (status = 503, description = "This replica does not lead, or is not ready: try again later.", body = Error),
))]
pub(crate) async fn clear(
    State(service): State<Service>,
    ReadPath(gpu): ReadPath,
    request: Request,
) -> Response {
    let user = match caller(&request) {
        Some(user) => user,
        None => {
            let error = "without TLS, GPUs can be cleared from the loopback interface only: use `kubectl port-forward`";
            return refusal(StatusCode::FORBIDDEN, error);
        }
    };
    let body = match ReadBody::from_request(request, &()).await {
        Ok(ReadBody(body)) => body,
        Err(refused) => return refused,
    };
    let bad = |error: &str| refusal(StatusCode::BAD_REQUEST, error);
    let request: ClearRequest = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => return bad(&format!("send a body such as {{\"node\": \"n\"}}: {error}")),
    };
    if request.node.len() > LONGEST_NAME {
        return too_long("node", LONGEST_NAME);
    }
    let gpu = match DeviceId::new(&gpu) {
        Ok(gpu) => gpu,
        Err(error) => return bad(&error.to_string()),
    };
    let wanted = Wanted { node: &request.node, gpu: &gpu };
    // Who gives an order learns its id at once: one who had to ask without it would give another.
    let cleared = match request.order.as_deref().map(str::parse) {
        None => given(&service.app, wanted, &user).map(|id| answer(wanted, id, None)),
        Some(Ok(id)) => waited(&service.app, wanted, id).await,
        Some(Err(())) => return bad("`order` is that of an earlier answer"),
    };
    match cleared {
        Ok(cleared) => encoded(&cleared),
        Err(error) => refusal(error.status(), &error.to_string()),
    }
}

/// Who calls, for the log, if that caller may clear GPUs.
fn caller(request: &Request) -> Option<String> {
    if let Some(MayClear { user }) = request.extensions().get() {
        return Some(user.clone());
    }
    let from = request.extensions().get::<PeerAddress>();
    let is_near = from.is_some_and(|PeerAddress(from)| from.is_loopback());
    is_near.then(|| "a client on the loopback interface".to_owned())
}

/// Gives the order.
fn given(app: &App, wanted: Wanted<'_>, user: &str) -> Result<OrderId, ClearError> {
    let Wanted { node, gpu } = wanted;
    let term = ordering_term(app).ok_or(ClearError::NotReady)?;
    let known = app.ledger.node(node);
    let known = known.ok_or_else(|| ClearError::UnknownNode { node: node.to_owned() })?;
    match known.devices().iter().find(|it| it.device().id == *gpu).map(|it| &it.device().kind) {
        None => {
            return Err(ClearError::UnknownGpu { node: node.to_owned(), gpu: gpu.clone() });
        }
        Some(DeviceKind::MigInstance { .. }) => {
            return Err(ClearError::Instance { id: gpu.clone() });
        }
        Some(DeviceKind::Gpu | DeviceKind::MigParent) => {}
    }
    let (stale_after, now) = (app.config.stale_after, app.clock.now());
    if known.state() != NodeReporting::Reporting || known.is_stale(stale_after, now) {
        return Err(ClearError::Silent { node: node.to_owned() });
    }
    // What came later than the last report is not what a person has seen.
    let details = app.ledger.details(node);
    let fault_event = details.conditions.get(gpu).and_then(|condition| condition.fault_event);
    let id = app.clears.give(NewOrder { wanted, fault_event, term }, now)?;
    tracing::info!(node, %gpu, user, order = %id, "a GPU is to be cleared");
    Ok(id)
}

/// How the order stands, unless too many calls wait already.
async fn waited(app: &App, wanted: Wanted<'_>, id: OrderId) -> Result<Cleared, ClearError> {
    let _turn = WAITING.try_acquire().map_err(|_| ClearError::TooManyWait)?;
    outcome(app, wanted, id).await
}

/// How the order stands once it has ended, or after [`WAITS`].
async fn outcome(app: &App, wanted: Wanted<'_>, id: OrderId) -> Result<Cleared, ClearError> {
    let began = app.clock.precise();
    loop {
        let term = ordering_term(app).ok_or(ClearError::NotReady)?;
        let is_over = app.clock.precise().saturating_sub(began) >= WAITS;
        match app.clears.standing(wanted, id, term, app.clock.now()) {
            Standing::Ended(ended) => return Ok(answer(wanted, id, Some(ended))),
            Standing::GoingOn if is_over => return Ok(answer(wanted, id, None)),
            Standing::GoingOn => tokio::time::sleep(LOOK_EVERY).await,
            Standing::Unknown => return Err(ClearError::OtherLeader { id }),
        }
    }
}

fn answer(wanted: Wanted<'_>, id: OrderId, ended: Option<Ended>) -> Cleared {
    Cleared {
        api_version: ApiVersion::default(),
        kind: ClearedKind::default(),
        node: wanted.node.to_owned(),
        gpu: wanted.gpu.to_string(),
        order: id.to_string(),
        result: ended.map(|ended| ended.result),
        fault: ended.and_then(|ended| ended.fault),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use engine::ledger::ledger_fixture;
    use kube_api::config::file::Config;
    use runtime::clock::{Clock, SimulatedTime};
    use wire::api::condition::ClearResult;
    use wire::units::Timestamp;

    #[tokio::test]
    async fn calls_that_wait_are_as_many_as_orders() {
        let ledger = Arc::new(ledger_fixture::ledger("A"));
        let app = App::alone(ledger, Config::default(), Clock::start());
        app.ledger.set_listed(app.clock.now());
        app.lead.set_fenced();
        let gpu = DeviceId::new("A").unwrap();
        let wanted = Wanted { node: "n", gpu: &gpu };
        let id = given(&app, wanted, "jane").unwrap();
        let all = (0..=MOST_OPEN).map(|_| waited(&app, wanted, id));
        let mut all: futures::stream::FuturesUnordered<_> = all.collect();
        let refused = futures::StreamExt::next(&mut all).await.unwrap().unwrap_err();
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE, "{refused}");
        drop(all);
        assert_eq!(WAITING.available_permits(), MOST_OPEN, "a call that ends makes room");
    }

    #[tokio::test]
    async fn an_order_without_an_answer_ends_after_a_minute() {
        static TIME: SimulatedTime = SimulatedTime::starting(1_900_000_000);
        let ledger = Arc::new(ledger_fixture::ledger("A"));
        let app = App::alone(ledger, Config::default(), Clock::simulated(&TIME));
        app.ledger.set_listed(app.clock.now());
        app.lead.set_fenced();
        let gpu = DeviceId::new("A").unwrap();
        let wanted = Wanted { node: "n", gpu: &gpu };
        let id = given(&app, wanted, "jane").unwrap();
        let later = async |millis: u64| {
            let pass = async {
                tokio::time::sleep(LOOK_EVERY).await;
                TIME.set(Timestamp::from_millis(millis));
            };
            let (cleared, ()) = tokio::join!(outcome(&app, wanted, id), pass);
            cleared.unwrap().result
        };
        assert_eq!(later(5_000).await, None, "the caller asks again");
        assert_eq!(later(59_999).await, None);
        assert_eq!(later(60_000).await, Some(ClearResult::NoAnswer));
    }
}
