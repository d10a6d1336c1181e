//! The HTTP service: routes, limits and status codes. Handlers only decode, query and encode.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Extension, FromRequest, Request, State};
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Router, middleware};
use futures::future::BoxFuture;
use rustls::pki_types::ServerName;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use crate::api::agents::{AgentAccess, prove};
use crate::api::people::{PeopleAccess, identify, identify_clear, identify_scrape};
use crate::api::queries::scrape as scraped;
use crate::api::replicas::LONGEST_MESSAGE;
use crate::api::{clears, queries, replicas, reports, resources, scrape};
use crate::http::exchange::PeerAddress;
use crate::http::leading::{CallArrival, Door, Port, by_leader};
use crate::http::listener_limits::PeerProof;
use crate::http::respond::{
    ReadBody, ReadPath, encoded, json, refusal, unknown_path, with_permit, wrong_method,
};
use crate::http::tls::{Handshake, ShownCertificate};
use crate::http::{browser, connections};
use crate::page::live;
use crate::page::service::{Service, too_long};
use crate::scheduler::{preempt, verbs};
use crate::views::viewer::Viewer;
use control::bind::binding;
use control::metrics::labels::{Outcome, Verb, VerbAnswer};
use control::shared::app::App;
use control::shared::log_limit::LogLimit;
use engine::ledger::query::reading::Readiness;
use kube_api::pod::seen_pod::LONGEST_NAME;
use kube_api::protocol::bounds::ProtocolError;
use runtime::certificates::{ServerProof, Tls};
use wire::api::error::{Error, LogLevel};
use wire::report::bodies;

/// How long open requests may take at shutdown: less than the 30 seconds that Kubernetes gives.
const LAST_ANSWERS_WITHIN: Duration = Duration::from_secs(20);

/// Connections of the page's listener. At most 64 browsers listen, and each has a few more.
const PAGE_CONNECTIONS: usize = 512;

/// Bytes held for them: answers not yet sent. The largest ones take tens of megabytes.
const PAGE_IN_FLIGHT: usize = 64 << 20;

/// Connections of the verbs' listener: some for each kube-scheduler and replica.
const VERB_CONNECTIONS: usize = 1_024;

/// Most connections of the listener for agents: one for each agent. Kubernetes supports 5,000 nodes.
const AGENT_CONNECTIONS: usize = 8_192;

/// Bytes held for the reports of agents, which take thousands each.
const REPORTS_IN_FLIGHT: usize = 64 << 20;

/// Connections of the listener of metrics and probes, and bytes held for them.
const METRICS_CONNECTIONS: usize = 128;
const METRICS_IN_FLIGHT: usize = 64 << 20;

/// Largest body of *bind*: four names.
const LONGEST_BIND: usize = 64 << 10;

/// Largest body that names a log level.
const LONGEST_LOG_LEVEL: usize = 4 << 10;

/// Largest body that says which GPU is to be cleared.
const LONGEST_CLEAR: usize = 4 << 10;

/// One body of that size is answered at a time, so that it takes one CPU core at most.
static LARGE_BODIES: Semaphore = Semaphore::const_new(1);

/// The same for reports: a report must not wait behind other large bodies.
static LARGE_REPORTS: Semaphore = Semaphore::const_new(1);

/// The paths of the only port, for an error.
pub const ALL_PATHS: &str = "docs/api.md lists the paths";

/// The paths of the port of the verbs, for an error.
const VERB_PATHS: &str = "it has /v1/filter, /v1/prioritize, /v1/preempt and /v1/bind; the page and \
    its queries are on the port of `page_listen`, reports on that of `agents_listen`, metrics and \
    health on that of `metrics_listen`";

/// The paths of the port of the agents, for an error.
const AGENT_PATHS: &str = "it takes the reports of agents alone; the calls of kube-scheduler are on \
    the port of `listen`, metrics and health on that of `metrics_listen`";

/// The paths of the port of metrics, for an error.
const METRIC_PATHS: &str = "it has /metrics, /metrics/gpus, /healthz, /readyz and /v1/log-level; the \
    page and its queries are on the port of `page_listen`";

/// The paths of the port of the page, for an error.
const PAGE_PATHS: &str = "it has the page and its queries; the calls of kube-scheduler are on the \
    port of `listen`, reports on that of `agents_listen`, metrics and health on that of `metrics_listen`";

/// After this time a client of the verbs must show its certificate again.
const SHOWN_AGAIN_AFTER: Duration = Duration::from_secs(600);

/// Pause between two looks whether a new leader is ready.
const READY_PAUSE: Duration = Duration::from_millis(20);

/// Limits how often malformed calls are logged.
static LOGGED: LogLimit = LogLimit::new();

/// All routes on one listener.
pub fn router(service: Service) -> Router {
    guarded(all_routes(&service), ALL_PATHS, service)
}

/// All routes, without the guard.
pub fn all_routes(service: &Service) -> Router<Service> {
    let own = agent_routes().merge(metric_routes()).merge(probe_routes()).merge(replica_routes());
    let queries = queries::routes().layer(Extension(Viewer::All));
    verb_routes(service).merge(own).merge(queries).merge(clear_routes())
}

/// Routes for kube-scheduler. The replica that leads answers them.
fn verb_routes(service: &Service) -> Router<Service> {
    let door = Door { app: Arc::clone(&service.app), port: Port::Verbs };
    let of_leader = middleware::from_fn_with_state(door, by_leader);
    let bind = Router::new().route("/v1/bind", post(bind_pod));
    Router::new()
        .route("/v1/filter", post(filter))
        .route("/v1/prioritize", post(prioritize))
        .route("/v1/preempt", post(preempt))
        .route_layer(of_leader.clone())
        .layer(at_most(service.app.config.max_body_bytes))
        .merge(bind.route_layer(of_leader).layer(at_most(LONGEST_BIND)))
}

/// The route that changes something for people.
fn clear_routes() -> Router<Service> {
    Router::new().route("/v1/gpus/{gpu}", put(clears::clear).layer(at_most(LONGEST_CLEAR)))
}

fn at_most(bytes: usize) -> DefaultBodyLimit {
    DefaultBodyLimit::max(bytes)
}

/// Routes for agents. Each replica answers them itself.
fn agent_routes() -> Router<Service> {
    Router::new()
        .route("/v1/nodes/{node}/report", put(take_report).layer(at_most(bodies::MAX_BODY_BYTES)))
        .route("/v1/nodes/{node}/library", get(library))
}

/// Routes for Prometheus and operators. Each replica answers them itself.
fn metric_routes() -> Router<Service> {
    Router::new()
        .route("/v1/log-level", put(log_level).layer(at_most(LONGEST_LOG_LEVEL)))
        .route("/metrics", get(metrics))
        .route("/metrics/gpus", get(device_metrics))
}

/// Routes for kubelet, which proves nothing. Each replica answers them itself.
fn probe_routes() -> Router<Service> {
    Router::new().route("/healthz", get(alive)).route("/readyz", get(ready))
}

/// The queries, for people whom `access` knows: as they are, and as a resource of the API server.
fn proven_queries(queries: Router<Service>, access: &Arc<PeopleAccess>) -> Router<Service> {
    let queries = queries.route_layer(middleware::from_fn_with_state(Arc::clone(access), identify));
    Router::new()
        .route(resources::VERSION_PATH, get(resources::discovery))
        .route(resources::RESOURCE_PATH, get(resources::to_page))
        .nest(resources::PAGE_PATH, queries.clone())
        .merge(queries)
}

/// The route that clears a GPU, for people who may do that: as it is, and as a resource of the API server.
fn proven_clears(clears: Router<Service>, access: &Arc<PeopleAccess>) -> Router<Service> {
    let proven = middleware::from_fn_with_state(Arc::clone(access), identify_clear);
    let clears = clears.route_layer(proven);
    Router::new().nest(resources::GROUP_PATH, clears.clone()).merge(clears)
}

/// Routes for other replicas: beside the verbs, since few clients may reach that port.
fn replica_routes() -> Router<Service> {
    Router::new()
        .route("/v1/replicas/bindings", post(replicas::bindings).layer(at_most(LONGEST_MESSAGE)))
        .route("/v1/replicas/join", post(replicas::join).layer(at_most(LONGEST_BIND)))
}

/// Routes that a page of another site cannot make a browser call. `paths` says which there are.
pub fn guarded(routes: Router<Service>, paths: &'static str, service: Service) -> Router {
    let hosts: browser::Hosts = Some(service.app.config.allowed_hosts.clone().into());
    let routes = routes.method_not_allowed_fallback(wrong_method);
    let routes = routes.fallback(move |uri: Uri| async move { unknown_path(&uri, paths) });
    routes.layer(middleware::from_fn_with_state(hosts, browser::guard)).with_state(service)
}

/// Serves everything on one listener until `stop`. It answers open requests first, if their clients
/// take the answers.
pub fn serve(
    service: Service,
    routes: Router,
    listener: TcpListener,
    stop: watch::Receiver<bool>,
) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config = &service.app.config;
        let limits = connections::limits(AGENT_CONNECTIONS, config.max_in_flight_bytes(), 48);
        let serving = connections::serve(listener, None, routes, limits, stop.clone());
        until_answered(&service, serving, stop).await;
    })
}

/// The listeners of the service.
pub struct Listeners {
    /// For kube-scheduler and the other replicas.
    pub verbs: TcpListener,
    pub agents: TcpListener,
    /// For people: the page and its queries.
    pub page: TcpListener,
    /// For kubelet's probes and Prometheus.
    pub metrics: TcpListener,
}

/// How the clients of each listener prove who they are.
pub struct Identities {
    /// The name in the certificate of kube-scheduler.
    pub scheduler: ServerName<'static>,
    /// The certificates, and the name in those of the replicas.
    pub replicas: ServerProof,
    pub agents: Arc<AgentAccess>,
    pub people: Arc<PeopleAccess>,
}

/// The same with a listener for each kind of client, with limits of its own. Without `identities` all
/// talk plain text, and clients prove nothing.
pub fn serve_apart(
    service: Service,
    listeners: Listeners,
    identities: Option<Identities>,
    stop: watch::Receiver<bool>,
) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let config = &service.app.config;
        // The last number: how many of 64 parts of the files that the process may open. The rest is for
        // connections that it makes itself.
        let verb_limits = connections::limits(VERB_CONNECTIONS, config.max_in_flight_bytes(), 8);
        let agent_limits = connections::limits(AGENT_CONNECTIONS, REPORTS_IN_FLIGHT, 38);
        let page_limits = connections::limits(PAGE_CONNECTIONS, PAGE_IN_FLIGHT, 8);
        let metric_limits = connections::limits(METRICS_CONNECTIONS, METRICS_IN_FLIGHT, 2);
        let door = Door { app: Arc::clone(&service.app), port: Port::Page };
        let of_leader = middleware::from_fn_with_state(door, by_leader);
        let mut page_routes = queries::routes().route_layer(of_leader.clone());
        let mut clear_routes = clear_routes().route_layer(of_leader);
        let (mut replica_routes, mut agent_routes) = (replica_routes(), agent_routes());
        let mut metric_routes = metric_routes();
        let (mut mutual, mut asking, mut open) = (None, None, None);
        let mut shown = None;
        if let Some(Identities { scheduler, replicas, agents, people }) = identities {
            let ServerProof { tls, name } = replicas;
            let is_replica = middleware::from_fn_with_state(name.clone(), named);
            replica_routes = replica_routes.route_layer(is_replica);
            agent_routes = agent_routes.route_layer(middleware::from_fn_with_state(agents, prove));
            page_routes = proven_queries(page_routes, &people);
            clear_routes = proven_clears(clear_routes, &people);
            metric_routes =
                metric_routes.route_layer(middleware::from_fn_with_state(people, identify_scrape));
            let handshake = |clients| Some(Handshake { tls: tls.clone(), clients });
            mutual = handshake(ShownCertificate::Name([scheduler, name].into()));
            shown = Some(tls.clone());
            asking = handshake(ShownCertificate::Anything);
            open = handshake(ShownCertificate::Nothing);
        } else {
            page_routes = page_routes.layer(Extension(Viewer::All));
        }
        let metric_routes = metric_routes.merge(probe_routes());
        let mut verb_routes = verb_routes(&service).merge(replica_routes);
        if let Some(tls) = shown {
            verb_routes =
                verb_routes.route_layer(middleware::from_fn_with_state(tls, still_proven));
        }
        let Listeners { verbs, agents, page, metrics } = listeners;
        let verb_routes = guarded(verb_routes, VERB_PATHS, service.clone());
        let agent_routes = guarded(agent_routes, AGENT_PATHS, service.clone());
        let page_routes = guarded(page_routes.merge(clear_routes), PAGE_PATHS, service.clone());
        let metric_routes = guarded(metric_routes, METRIC_PATHS, service.clone());
        let verbs = connections::serve(verbs, mutual, verb_routes, verb_limits, stop.clone());
        let agents =
            connections::serve(agents, open.clone(), agent_routes, agent_limits, stop.clone());
        let page = connections::serve(page, asking, page_routes, page_limits, stop.clone());
        let metrics = connections::serve(metrics, open, metric_routes, metric_limits, stop.clone());
        let serving = async move {
            tokio::join!(verbs, agents, page, metrics);
        };
        until_answered(&service, serving, stop.clone()).await;
    })
}

/// Passes a call on if the client's certificate has this name.
async fn named(
    State(name): State<ServerName<'static>>,
    peer: Option<Extension<PeerProof>>,
    request: Request,
    next: Next,
) -> Response {
    if peer.is_some_and(|Extension(peer)| peer.names.contains(&name)) {
        return next.run(request).await;
    }
    let error = format!("only a client whose certificate names `{}` may call this", name.to_str());
    refusal(StatusCode::FORBIDDEN, &error)
}

/// Passes a call on if the certificate that its client showed when it connected still counts: the CA may be
/// another one since. Now and then a client is to connect again, so that none goes on with a certificate that
/// has ended.
async fn still_proven(
    State(tls): State<watch::Receiver<Arc<Tls>>>,
    peer: Option<Extension<PeerProof>>,
    request: Request,
    next: Next,
) -> Response {
    let now = Arc::clone(&tls.borrow());
    let age = peer.as_ref().map(|Extension(peer)| peer.age());
    let counts = peer.is_some_and(|Extension(peer)| peer.counts_with(&now));
    let mut response = match counts {
        true => next.run(request).await,
        false => {
            let error = "the certificate of this client is not of the present CA: connect again";
            refusal(StatusCode::FORBIDDEN, error)
        }
    };
    if !counts || age.is_none_or(|age| age > SHOWN_AGAIN_AFTER) {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    response
}

async fn until_answered(
    service: &Service,
    serving: impl Future<Output = ()>,
    mut stop: watch::Receiver<bool>,
) {
    let late = async {
        let _ = stop.wait_for(|stop| *stop).await;
        service.live.close(); // a browser would listen forever
        tokio::time::sleep(LAST_ANSWERS_WITHIN).await;
    };
    tokio::select! {
        () = serving => {}
        () = live::run(&service.app, &service.live) => {}
        () = late => tracing::warn!("a client does not take its answer: not waiting any longer"),
    }
}

/// Which nodes fit a pod; called by kube-scheduler.
///
/// The bodies are `ExtenderArgs` and `ExtenderFilterResult` of
/// [k8s.io/kube-scheduler/extender/v1](https://pkg.go.dev/k8s.io/kube-scheduler/extender/v1).
#[utoipa::path(post, path = "/v1/filter", tag = "kube-scheduler", request_body = Object, responses(
    (status = 200, description = "An `ExtenderFilterResult`.", body = Object),
    (status = 400, description = "The body cannot be read.", body = Error),
))]
pub(crate) async fn filter(State(service): State<Service>, ReadBody(body): ReadBody) -> Response {
    let started = service.app.clock.precise();
    let answer = || {
        let app = Arc::clone(&service.app);
        with_permit(&LARGE_BODIES, body.clone(), move |body: &[u8]| verbs::filter(&app, body))
    };
    let mut answer_now = answer().await;
    if matches!(answer_now, Ok(Ok((_, Outcome::Error)))) && is_ready_soon(&service).await {
        answer_now = answer().await;
    }
    match answer_now {
        Ok(answer) => answered(&service.app, Verb::Filter, started, answer),
        Err(refused) => refused,
    }
}

/// Waits a moment for a leader that is not ready yet, since a new one only has to make late Bindings of
/// the old one fail. Whether it is ready now, also if it has become so since the caller last looked.
async fn is_ready_soon(service: &Service) -> bool {
    let app = &service.app;
    while app.readiness() == Readiness::NotListed && app.lead.leading.is_here() {
        if !service.early.may_wait(app.clock.precise()) {
            return false;
        }
        tokio::time::sleep(READY_PAUSE).await;
    }
    service.early.end();
    app.readiness() == Readiness::Ready
}

/// The score of each node for a pod; called by kube-scheduler.
///
/// The bodies are `ExtenderArgs` and `HostPriorityList` of
/// [k8s.io/kube-scheduler/extender/v1](https://pkg.go.dev/k8s.io/kube-scheduler/extender/v1).
#[utoipa::path(post, path = "/v1/prioritize", tag = "kube-scheduler", request_body = Object, responses(
    (status = 200, description = "A `HostPriorityList`.", body = Vec<Object>),
    (status = 400, description = "The body cannot be read.", body = Error),
))]
pub(crate) async fn prioritize(
    State(service): State<Service>,
    ReadBody(body): ReadBody,
) -> Response {
    let answer = with_permit(&LARGE_BODIES, body, move |body| {
        let app = &service.app;
        let started = app.clock.precise();
        answered(app, Verb::Prioritize, started, verbs::prioritize(app, body))
    });
    answer.await.unwrap_or_else(|refused| refused)
}

/// Reserves devices and posts the Binding of a pod; called by kube-scheduler.
///
/// The bodies are `ExtenderBindingArgs` and `ExtenderBindingResult` of
/// [k8s.io/kube-scheduler/extender/v1](https://pkg.go.dev/k8s.io/kube-scheduler/extender/v1).
#[utoipa::path(post, path = "/v1/bind", operation_id = "bindPod", tag = "kube-scheduler", request_body = Object, responses(
    (status = 200, description = "An `ExtenderBindingResult`.", body = Object),
    (status = 400, description = "The body cannot be read.", body = Error),
))]
pub(crate) async fn bind_pod(
    State(service): State<Service>,
    Extension(arrival): Extension<CallArrival>,
    ReadBody(body): ReadBody,
) -> Response {
    let app = &service.app;
    let started = app.clock.precise();
    is_ready_soon(&service).await;
    let answer = binding::bind_after(app, &body, arrival.spent(app)).await;
    answered(app, Verb::Bind, started, answer)
}

/// Which planned evictions are of use; called by kube-scheduler.
///
/// The bodies are `ExtenderPreemptionArgs` and `ExtenderPreemptionResult` of
/// [k8s.io/kube-scheduler/extender/v1](https://pkg.go.dev/k8s.io/kube-scheduler/extender/v1).
#[utoipa::path(post, path = "/v1/preempt", tag = "kube-scheduler", request_body = Object, responses(
    (status = 200, description = "An `ExtenderPreemptionResult`.", body = Object),
    (status = 400, description = "The body cannot be read.", body = Error),
))]
pub(crate) async fn preempt(State(service): State<Service>, ReadBody(body): ReadBody) -> Response {
    let answer = with_permit(&LARGE_BODIES, body, move |body| {
        let app = &service.app;
        let started = app.clock.precise();
        answered(app, Verb::Preempt, started, preempt::preempt(app, body))
    });
    answer.await.unwrap_or_else(|refused| refused)
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
            let (verb, reason, error) = (verb.label(), error.reason(), error.to_string());
            if let Some(left_out) = LOGGED.admits((verb, reason), app.clock.precise()) {
                tracing::warn!(verb, reason, ?error, left_out, "malformed call");
            }
            (refusal(StatusCode::BAD_REQUEST, &error), Outcome::Error)
        }
    };
    app.metrics.verb(verb, outcome, app.clock.precise().saturating_sub(started));
    response
}

/// The report of an agent about its node.
#[utoipa::path(put, path = "/v1/nodes/{node}/report", operation_id = "takeReport", tag = "agents", params(
    ("node" = String, Path, description = "Name of the node."),
), request_body = bodies::Report, responses(
    (status = 200, description = "The session, and the allocations if they changed.", body = bodies::Reply),
    (status = 400, description = "No node can have this name.", body = Error),
    (status = 404, description = "No node has this name.", body = Error),
    (status = 409, description = "`reason` is `SessionExpired`: the session is not the newest of this node.", body = Error),
    (status = 422, description = "The report cannot be true.", body = Error),
    (status = 503, description = "Nodes are not listed yet, or too much at once: try again later.", body = Error),
))]
pub(crate) async fn take_report(
    State(service): State<Service>,
    ReadPath(node): ReadPath,
    ReadBody(body): ReadBody,
) -> Response {
    if node.len() > LONGEST_NAME {
        return too_long("node", LONGEST_NAME);
    }
    let answer = with_permit(&LARGE_REPORTS, body, move |body| {
        let (status, body) = reports::answer(&service.app, &node, body);
        json(status, body)
    });
    answer.await.unwrap_or_else(|refused| refused)
}

/// Whether the agent of a node may open NVIDIA's library. It asks so before its first report.
#[utoipa::path(get, path = "/v1/nodes/{node}/library", operation_id = "getLibrary", tag = "agents", params(
    ("node" = String, Path, description = "Name of the node."),
), responses(
    (status = 200, description = "Whether it may be open.", body = bodies::LibraryAnswer),
    (status = 400, description = "No node can have this name.", body = Error),
    (status = 503, description = "The node is not listed yet: try again later.", body = Error),
))]
pub(crate) async fn library(State(service): State<Service>, ReadPath(node): ReadPath) -> Response {
    if node.len() > LONGEST_NAME {
        return too_long("node", LONGEST_NAME);
    }
    let (status, body) = reports::library(&service.app, &node);
    json(status, body)
}

/// Changes the log level while the extender runs.
#[utoipa::path(put, path = "/v1/log-level", operation_id = "setLogLevel", tag = "people",
    request_body = LogLevel, responses(
    (status = 200, description = "The new level.", body = LogLevel),
    (status = 400, description = "The body cannot be read.", body = Error),
    (status = 403, description = "Only the loopback interface may.", body = Error),
    (status = 422, description = "The level cannot be read.", body = Error),
))]
pub(crate) async fn log_level(State(service): State<Service>, request: Request) -> Response {
    let from = request.extensions().get::<PeerAddress>().copied();
    if !from.is_some_and(|PeerAddress(from)| from.is_loopback()) {
        let error = "the log level can be changed from the loopback interface only";
        return refusal(StatusCode::FORBIDDEN, error);
    }
    let body = match ReadBody::from_request(request, &()).await {
        Ok(ReadBody(body)) => body,
        Err(refused) => return refused,
    };
    let wanted = match serde_json::from_slice::<LogLevel>(&body) {
        Ok(wanted) => wanted,
        Err(error) => {
            let error = format!("send a body such as {{\"level\": \"debug\"}}: {error}");
            return refusal(StatusCode::BAD_REQUEST, &error);
        }
    };
    match (service.set_log_level)(wanted.level.trim()) {
        Ok(()) => encoded(&wanted),
        Err(error) => refusal(StatusCode::UNPROCESSABLE_ENTITY, &error),
    }
}

/// Whether the process answers, for the liveness probe.
#[utoipa::path(get, path = "/healthz", operation_id = "getLiveness", tag = "monitoring", responses(
    (status = 200, description = "It does.", body = String, content_type = "text/plain"),
))]
pub(crate) async fn alive() -> &'static str {
    "ok\n"
}

/// Whether the extender answers kube-scheduler, for the readiness probe. One that does not lead is ready
/// when it could lead.
#[utoipa::path(get, path = "/readyz", operation_id = "getReadiness", tag = "monitoring", responses(
    (status = 200, description = "It does.", body = String, content_type = "text/plain"),
    (status = 503, description = "Not yet, and why.", body = String, content_type = "text/plain"),
))]
pub(crate) async fn ready(State(service): State<Service>) -> Response {
    let app = &service.app;
    let refusal = app.outside.api_server().refuses();
    let cause = match app.readiness() {
        Readiness::Ready if !app.lead.is_informed() => {
            "this replica does not know yet which Bindings the leader has posted\n".to_owned()
        }
        Readiness::Ready if refusal.is_some_and(|refusal| refusal.is_lasting()) => String::new(),
        Readiness::Ready => return (StatusCode::OK, "ready\n").into_response(),
        Readiness::NotListed => "pods and nodes are not listed yet\n".to_owned(),
        Readiness::AwaitingReports { nodes } => {
            format!("{nodes} nodes that hold pods have not reported yet\n")
        }
    };
    // First: it may be why the rest is so.
    let refusal = refusal.map(|refusal| format!("{refusal}\n")).unwrap_or_default();
    (StatusCode::SERVICE_UNAVAILABLE, refusal + &cause).into_response()
}

/// Figures for Prometheus, in its text format.
#[utoipa::path(get, path = "/metrics", operation_id = "getMetrics", tag = "monitoring", responses(
    (status = 200, description = "The metrics.", body = String, content_type = "text/plain"),
))]
pub(crate) async fn metrics(State(service): State<Service>) -> Response {
    printed(scraped(&service.app, scrape::text).await)
}

/// The same with series for each GPU.
#[utoipa::path(get, path = "/metrics/gpus", operation_id = "getGpuMetrics", tag = "monitoring", responses(
    (status = 200, description = "The metrics.", body = String, content_type = "text/plain"),
))]
pub(crate) async fn device_metrics(State(service): State<Service>) -> Response {
    printed(scraped(&service.app, scrape::devices).await)
}

/// Metrics in the text format.
fn printed(text: Result<Vec<u8>, Response>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    text.map_or_else(|refused| refused, |text| (kind, text).into_response())
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::mpsc;

    use axum::body::Body;
    use tower::ServiceExt;

    use super::*;
    use crate::http::respond::LARGE_BODY;
    use engine::ledger::ledger_fixture::settings;
    use engine::ledger::nodes::state::Ledger;
    use kube_api::config::file::Config;
    use runtime::clock::{Clock, SimulatedTime};
    use wire::units::Timestamp;

    #[test]
    fn a_large_body_does_not_delay_other_requests() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let answer = |status: StatusCode| status.into_response();
        // A small body, and a large report.
        for (permits, length) in [(&LARGE_BODIES, LARGE_BODY), (&LARGE_REPORTS, LARGE_BODY + 1)] {
            let (is_answered, until_then) = mpsc::channel();
            let large = with_permit(&LARGE_BODIES, vec![0; LARGE_BODY + 1].into(), move |_| {
                let waited = until_then.recv_timeout(Duration::from_secs(20));
                answer(waited.map_or(StatusCode::REQUEST_TIMEOUT, |()| StatusCode::OK))
            });
            let other = with_permit(permits, vec![0; length].into(), move |_| {
                is_answered.send(()).expect("it is waited for");
                answer(StatusCode::OK)
            });
            let (large, other) = runtime.block_on(async { tokio::join!(large, other) });
            assert_eq!([large.unwrap().status(), other.unwrap().status()], [StatusCode::OK; 2]);
        }
    }

    #[tokio::test]
    async fn a_client_shows_its_certificate_again_now_and_then() {
        static TIME: SimulatedTime = SimulatedTime::starting(1_900_000_000);
        let tls = watch::Sender::new(Arc::new(Tls::default()));
        let peer = PeerProof {
            chain: Arc::default(),
            names: Arc::default(),
            tls: Arc::clone(&tls.borrow()),
            at: Timestamp::START,
            clock: Clock::simulated(&TIME),
        };
        let proven = middleware::from_fn_with_state(tls.subscribe(), still_proven);
        let routes = Router::new().route("/", get(alive)).route_layer(proven);
        let call = async |peer: Option<&PeerProof>| {
            let mut request = Request::new(Body::empty());
            peer.map(|peer| request.extensions_mut().insert(peer.clone()));
            let answer = routes.clone().oneshot(request).await.unwrap();
            (answer.status().as_u16(), answer.headers().contains_key(header::CONNECTION))
        };
        assert_eq!(call(Some(&peer)).await, (200, false));
        assert_eq!(call(None).await, (403, true));
        TIME.set(Timestamp::from_millis(600_001));
        assert_eq!(call(Some(&peer)).await, (200, true), "it is answered, and connects again");
        tls.send_replace(Arc::new(Tls::default()));
        assert_eq!(call(Some(&peer)).await, (403, true), "of another CA");
    }

    #[tokio::test]
    async fn a_call_that_found_no_ready_leader_a_moment_ago_is_answered_again() {
        static TIME: SimulatedTime = SimulatedTime::starting(1_900_000_000);
        let clock = Clock::simulated(&TIME);
        let ledger = Arc::new(Ledger::new(settings()));
        let app = Arc::new(App::alone(ledger, Config::default(), clock));
        let service = Service::new(Arc::clone(&app), Arc::new(|_| Ok(())));
        assert!(service.early.may_wait(app.clock.precise()));
        TIME.set(Timestamp::from_millis(2_001));
        assert!(!is_ready_soon(&service).await, "calls have waited long enough");
        app.ledger.set_listed(app.clock.now());
        app.lead.set_fenced();
        assert!(is_ready_soon(&service).await, "it need not wait");
    }

    #[tokio::test]
    async fn the_log_level_is_changed_only_from_the_loopback_interface() {
        let ledger = Arc::new(Ledger::new(settings()));
        let app = App::alone(ledger, Config::default(), Clock::start());
        let routes = router(Service::new(Arc::new(app), Arc::new(|_| Ok(()))));
        for (from, status) in
            [("127.0.0.1", 200), ("::1", 200), ("10.0.0.1", 403), ("fd00::1", 403)]
        {
            let request = Request::put("/v1/log-level").header("content-type", "application/json");
            let mut request = request.body(Body::from("{\"level\": \"debug\"}")).unwrap();
            let address: IpAddr = from.parse().unwrap();
            request.extensions_mut().insert(PeerAddress(address));
            let answer = routes.clone().oneshot(request).await.unwrap();
            assert_eq!(answer.status().as_u16(), status, "{from}");
        }
    }
}
