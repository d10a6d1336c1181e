//! The HTTP service: routes, limits and status codes. Handlers only decode, ask and encode.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use super::advice::AdviseQuery;
use super::app::App;
use super::explain::explain_named;
use super::inspect;
use super::protocol::{ProtocolError, to_json};
use super::verbs::{self, VerbAnswer};
use super::waiting::{self, WaitingQuery};
use super::{advice, bind, connections, page, preempt, proposals, reports, scrape};
use crate::ledger::reading::Readiness;
use crate::metrics::{Outcome, Verb};
use crate::report;

/// How long requests on their way may take at the end: less than the 30 seconds that Kubernetes gives.
const LAST_ANSWERS_WITHIN: Duration = Duration::from_secs(20);

/// Changes the log level while the service runs; the argument is a filter as in the configuration.
pub type SetLogLevel = dyn Fn(&str) -> Result<(), String> + Send + Sync;

/// What the routes need.
#[derive(Clone)]
pub struct Service {
    /// The extender.
    pub app: Arc<App>,
    /// Changes the log level.
    pub set_log_level: Arc<SetLogLevel>,
}

/// All routes.
pub fn router(service: Service) -> Router {
    let limit = service.app.config.max_body_bytes;
    Router::new()
        .route("/v1/filter", post(filter))
        .route("/v1/prioritize", post(prioritize))
        .route("/v1/bind", post(bind_pod))
        .route("/v1/preempt", post(preempt))
        .route("/v1/state", get(state))
        .route("/v1/explain", get(explain))
        .route("/v1/waiting", get(waiting_pods))
        .route("/v1/moves", get(moves))
        .route("/v1/advise", get(advise))
        .route("/v1/log-level", put(log_level))
        .route("/v1/{verb}", post(unknown_verb))
        .merge(page::routes())
        .layer(DefaultBodyLimit::max(limit))
        .route(
            "/v1/nodes/{node}/report",
            put(take_report).layer(DefaultBodyLimit::max(report::MAX_BODY_BYTES)),
        )
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/metrics/gpus", get(device_metrics))
        .with_state(service)
}

/// Serves until `stop`; requests on their way are answered first, as far as somebody takes the answer.
pub async fn serve(service: Service, listener: TcpListener, stop: watch::Receiver<bool>) {
    let app = Arc::clone(&service.app);
    let mut stopped = stop.clone();
    let late = async move {
        let _ = stopped.wait_for(|stop| *stop).await;
        app.live.close(); // a browser would listen for ever
        tokio::time::sleep(LAST_ANSWERS_WITHIN).await;
    };
    tokio::select! {
        () = connections::serve(listener, router(service), stop) => {}
        () = late => tracing::warn!("somebody does not take an answer: not waiting any longer"),
    }
}

async fn filter(State(service): State<Service>, body: Bytes) -> Response {
    let app = &service.app;
    let started = app.clock.precise();
    answered(app, Verb::Filter, started, verbs::filter(app, &body))
}

async fn prioritize(State(service): State<Service>, body: Bytes) -> Response {
    let app = &service.app;
    let started = app.clock.precise();
    answered(app, Verb::Prioritize, started, verbs::prioritize(app, &body))
}

async fn bind_pod(State(service): State<Service>, body: Bytes) -> Response {
    let app = &service.app;
    let started = app.clock.precise();
    let answer = bind::bind(app, &body).await;
    answered(app, Verb::Bind, started, answer)
}

async fn preempt(State(service): State<Service>, body: Bytes) -> Response {
    let app = &service.app;
    let started = app.clock.precise();
    answered(app, Verb::Preempt, started, preempt::preempt(&body))
}

fn answered(
    app: &App,
    verb: Verb,
    started: Duration,
    answer: Result<VerbAnswer, ProtocolError>,
) -> Response {
    let (response, outcome) = match answer {
        Ok((body, outcome)) => (json(StatusCode::OK, body), outcome),
        Err(error) => {
            tracing::warn!(verb = verb.label(), reason = error.reason(), %error, "malformed call");
            (refusal(StatusCode::BAD_REQUEST, &error.to_string()), Outcome::Error)
        }
    };
    app.metrics.verb(verb, outcome, app.clock.precise().saturating_sub(started));
    response
}

async fn unknown_verb(Path(verb): Path<String>) -> Response {
    let shown: String = verb.chars().take(40).collect();
    let error =
        format!("verb `{shown}` is unknown: there are filter, prioritize, preempt and bind");
    refusal(StatusCode::NOT_FOUND, &error)
}

async fn take_report(
    State(service): State<Service>,
    Path(node): Path<String>,
    body: Bytes,
) -> Response {
    let (status, body) = reports::answer(&service.app, &node, &body);
    json(status, body)
}

#[derive(Deserialize)]
struct StateQuery {
    node: Option<String>,
}

/// The whole model, or one node of it.
async fn state(State(service): State<Service>, Query(query): Query<StateQuery>) -> Response {
    let Some(name) = query.node else { return encoded(&inspect::state(&service.app)) };
    match inspect::node(&service.app, &name) {
        Some(node) => encoded(&node),
        None => {
            let shown: String = name.chars().take(253).collect();
            refusal(StatusCode::NOT_FOUND, &format!("node `{shown}` is not known here"))
        }
    }
}

#[derive(Deserialize)]
struct ExplainQuery {
    pod: Option<String>,
}

/// Looks that take long and go on at once; further ones wait for their turn. Nobody is asked for a name, and
/// each may take megabytes and walk over all nodes.
static LOOKS: Semaphore = Semaphore::const_new(4);

/// Looks for something that takes long, off the threads that answer questions.
pub(super) async fn look<T: Send + 'static>(
    app: &Arc<App>,
    look: impl FnOnce(&App) -> T + Send + 'static,
) -> Result<T, Response> {
    let app = Arc::clone(app);
    let Ok(turn) = LOOKS.acquire().await else {
        return Err(refusal(StatusCode::INTERNAL_SERVER_ERROR, "a fault in gpupack"));
    };
    let found = tokio::task::spawn_blocking(move || look(&app)).await;
    drop(turn);
    found.map_err(|_| refusal(StatusCode::INTERNAL_SERVER_ERROR, "a fault in gpupack"))
}

async fn moves(State(service): State<Service>) -> Response {
    let found = look(&service.app, proposals::proposals).await;
    found.map_or_else(|refused| refused, |found| encoded(&found))
}

async fn advise(State(service): State<Service>, Query(query): Query<AdviseQuery>) -> Response {
    let found = look(&service.app, move |app| advice::advise(app, &query)).await;
    found.map_or_else(|refused| refused, |found| encoded(&found))
}

async fn waiting_pods(
    State(service): State<Service>,
    Query(query): Query<WaitingQuery>,
) -> Response {
    let found = look(&service.app, move |app| waiting::waiting(app, &query)).await;
    found.map_or_else(|refused| refused, |found| encoded(&found))
}

async fn explain(State(service): State<Service>, Query(query): Query<ExplainQuery>) -> Response {
    let asked = query.pod.as_deref().and_then(|pod| pod.split_once('/'));
    let Some((namespace, name)) = asked else {
        let error = "say which pod: /v1/explain?pod=NAMESPACE/NAME";
        return refusal(StatusCode::BAD_REQUEST, error);
    };
    let (wanted, of) = (namespace.to_owned(), name.to_owned());
    match look(&service.app, move |app| explain_named(app, &wanted, &of)).await {
        Err(refused) => refused,
        Ok(Some(explanation)) => encoded(&explanation),
        Ok(None) => {
            let shown: String = format!("{namespace}/{name}").chars().take(320).collect();
            let error = format!(
                "pod `{shown}` is not known here: it does not exist, asks for no GPU, or is not one of \
                 our schedulers' ({})",
                service.app.config.scheduler_names.join(", ")
            );
            refusal(StatusCode::NOT_FOUND, &error)
        }
    }
}

async fn log_level(State(service): State<Service>, body: String) -> Response {
    match (service.set_log_level)(body.trim()) {
        Ok(()) => (StatusCode::OK, "ok\n").into_response(),
        Err(error) => refusal(StatusCode::UNPROCESSABLE_ENTITY, &error),
    }
}

async fn ready(State(service): State<Service>) -> Response {
    let (status, text) = match service.app.readiness() {
        Readiness::Ready => (StatusCode::OK, "ready\n".to_owned()),
        Readiness::NotListed => {
            (StatusCode::SERVICE_UNAVAILABLE, "pods and nodes are not listed yet\n".to_owned())
        }
        Readiness::AwaitingReports { nodes } => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("{nodes} nodes that hold pods have not reported yet\n"),
        ),
    };
    (status, text).into_response()
}

async fn metrics(State(service): State<Service>) -> Response {
    printed(look(&service.app, scrape::text).await)
}

async fn device_metrics(State(service): State<Service>) -> Response {
    printed(look(&service.app, scrape::devices).await)
}

/// Metrics in the text format.
fn printed(text: Result<Vec<u8>, Response>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    text.map_or_else(|refused| refused, |text| (kind, text).into_response())
}

fn json(status: StatusCode, body: Vec<u8>) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn encoded<T: serde::Serialize>(value: &T) -> Response {
    json(StatusCode::OK, to_json(value))
}

pub(super) fn refusal(status: StatusCode, error: &str) -> Response {
    let body = serde_json::json!({ "error": error }).to_string().into_bytes();
    json(status, body)
}
