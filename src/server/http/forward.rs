//! Calls at a replica that does not lead: they go on to the one that does.
//!
//! While no replica leads, or its connection fails, a call waits for news, so that a change of the
//! leader costs callers a moment and no error. What only reads is sent again when an answer is lost.
//! A *bind* is not: once its bytes may have been read, the caller gets no answer until kube-scheduler
//! gives up, since an `Error` would say that the pod is not bound.
//!
//! A forwarded call says for how long it is under way, and is never forwarded again.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use tokio::sync::{Semaphore, watch};

use crate::certificates::ServerProof;
use crate::control::shared::app::App;
use crate::control::shared::leader::{Addresses, Leader};
use crate::control::shared::log_limit::LogLimit;
use crate::http_client::{StreamingClient, Unanswered};
use crate::metrics::labels::ForwardResult;
use crate::server::http::respond::{ReadBody, refusal};

/// Header of a forwarded call: for how many milliseconds it was under way. No page can make a browser
/// send a header with this prefix.
pub const FORWARDED_HEADER: &str = "sec-gpupack-forwarded";

/// Header of the refusal by a replica that was taken for the leader. The call has done nothing there.
const NOT_LEADING: HeaderName = HeaderName::from_static("gpupack-not-leading");

/// Longest wait of a verb for a leader: as long as a take-over takes after a leader died.
const VERBS_WITHIN: Duration = Duration::from_secs(5);

/// Longest wait at a replica whose Lease has lapsed. A new connection may go to another leader:
/// kube-scheduler keeps several to this one, and each is closed with the answer.
const LAPSED_WITHIN: Duration = Duration::from_millis(500);

/// Longest wait of people for a leader.
const PAGE_WITHIN: Duration = Duration::from_secs(2);

/// How long a replica that was taken for the leader waits to become it: the others may know first.
const BECOMES_WITHIN: Duration = Duration::from_millis(500);

/// Longest time to connect. Replicas are near; a leader whose machine is gone does not answer at all.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);

/// Longest time until the head of an answer for people. Their queries wait for a permit first.
const PAGE_ANSWERS_WITHIN: Duration = Duration::from_secs(30);

/// Pause before the next attempt, if there is no news.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a *bind* whose answer is lost still waits after the process began to stop.
const LAST_ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Largest answer to a *bind*: one text.
const LONGEST_BOUND: usize = 64 << 10;

/// Calls of a listener that wait for a leader or its answer. Each may need a connection of its own.
const MOST_CALLS: usize = 512;

/// Answers are constant texts, since kube-scheduler may show them.
const NO_LEADER: &str = "no replica of gpupack leads: look at the Lease that the configuration names, \
    and at the logs of the replicas";
const NO_ANSWER: &str = "the replica of gpupack that leads does not answer: look at its log";

static LOGGED: LogLimit = LogLimit::new();

/// Headers about one connection, not about the call, and those that the client writes itself.
const OF_CONNECTION: [HeaderName; 11] = [
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::EXPECT,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// A listener of this replica, and of the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// That of kube-scheduler.
    Verbs,
    /// That of people.
    Page,
}

impl Port {
    /// Its name in the log and in metrics.
    fn label(self) -> &'static str {
        match self {
            Self::Verbs => "verbs",
            Self::Page => "page",
        }
    }
}

/// What the calls of one listener share.
pub struct Forward {
    app: Arc<App>,
    port: Port,
    client: StreamingClient,
    calls: Semaphore,
}

/// When a call arrived: an extension of each request that may be forwarded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    /// On the precise clock of this replica.
    at: Duration,
    /// How long it was under way before, by the replica that forwards it.
    before: Duration,
}

impl Arrival {
    /// For how long the call is under way.
    pub(crate) fn spent(&self, app: &App) -> Duration {
        self.before + app.clock.precise().saturating_sub(self.at)
    }
}

/// How an attempt ended.
enum Attempt {
    Answered(Response),
    /// It may be made again.
    Failed(String),
    /// The leader may have acted on it.
    Lost(String),
    /// No answer in time.
    Late,
}

impl Forward {
    /// Forwards calls of this listener. With `proof` the leader proves who it is.
    pub fn new(app: Arc<App>, port: Port, proof: Option<ServerProof>) -> Arc<Self> {
        let client = StreamingClient::new(CONNECT_WITHIN, proof);
        Arc::new(Self { app, port, client, calls: Semaphore::new(MOST_CALLS) })
    }

    fn is_bind(&self, uri: &Uri) -> bool {
        self.port == Port::Verbs && uri.path() == "/v1/bind"
    }

    /// Longest wait for a leader. kube-scheduler gives up soon after twice this time.
    fn waits(&self) -> Duration {
        match self.port {
            Port::Verbs => VERBS_WITHIN.min(self.app.config.scheduler_timeout / 2),
            Port::Page => PAGE_WITHIN,
        }
    }

    /// Longest time until the head of an answer.
    fn answers(&self) -> Duration {
        match self.port {
            Port::Verbs => self.app.config.scheduler_timeout,
            Port::Page => PAGE_ANSWERS_WITHIN,
        }
    }
}

/// Answers here if this replica leads, else hands the call on.
pub(crate) async fn to_leader(
    State(forward): State<Arc<Forward>>,
    mut request: Request,
    next: Next,
) -> Response {
    let app = &forward.app;
    let before = match under_way(request.headers()) {
        Ok(before) => before,
        Err(error) => return refusal(StatusCode::BAD_REQUEST, &error),
    };
    let arrival = Arrival { at: app.clock.precise(), before: before.unwrap_or_default() };
    request.extensions_mut().insert(arrival);
    let mut news = app.leading.subscribe();
    let is_bind = forward.is_bind(request.uri());
    let open = is_bind.then(|| app.binds.begin_call());
    if app.leads() {
        return while_leading(next.run(request).await, news, Leader::Here);
    }
    drop(open);
    let (parts, body) = request.into_parts();
    let body = match ReadBody::from_request(Request::from_parts(parts.clone(), body), &()).await {
        Ok(ReadBody(body)) => body,
        Err(refused) => return refused,
    };
    let call = Call { forward: &forward, parts: &parts, body: &body, arrival };
    let answered = match before {
        None => {
            let (answered, result) = call.to_leader(&mut news).await;
            app.metrics.forwarded(forward.port.label(), result);
            answered
        }
        Some(_) => call.until_leading(&mut news).await,
    };
    match answered {
        Some(mut response) => {
            if forward.port == Port::Verbs {
                // The next connection goes to the leader, as its Service does.
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert(header::CONNECTION, close);
            }
            response
        }
        None => {
            let request = Request::from_parts(parts, Body::from(body));
            let _open = is_bind.then(|| app.binds.begin_call());
            while_leading(next.run(request).await, news, Leader::Here)
        }
    }
}

/// How long a forwarded call was under way; `None` for one that comes from a client.
fn under_way(headers: &HeaderMap) -> Result<Option<Duration>, String> {
    let Some(written) = headers.get(FORWARDED_HEADER) else { return Ok(None) };
    let millis = written.to_str().ok().and_then(|text| text.parse::<u32>().ok());
    let error = || format!("header `{FORWARDED_HEADER}` is no number of milliseconds");
    millis.map(|millis| Some(Duration::from_millis(millis.into()))).ok_or_else(error)
}

/// Ends a stream of events when the leader changes, so that the browser asks again.
fn while_leading(
    response: Response,
    mut news: watch::Receiver<Leader>,
    leader: Leader,
) -> Response {
    let kind = response.headers().get(header::CONTENT_TYPE);
    if !kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream")) {
        return response;
    }
    let changed = Box::pin(async move {
        let _ = news.wait_for(|now| *now != leader).await;
    });
    response.map(|body| Body::from_stream(body.into_data_stream().take_until(changed)))
}

/// The headers that are handed on.
fn handed_on(headers: &HeaderMap) -> HeaderMap {
    let named = headers.get_all(header::CONNECTION).iter().filter_map(|it| it.to_str().ok());
    let named: Vec<String> = named
        .flat_map(|names| names.split(',').map(|name| name.trim().to_ascii_lowercase()))
        .collect();
    let is_kept = |name: &HeaderName| {
        !OF_CONNECTION.contains(name) && !named.iter().any(|other| other == name.as_str())
    };
    let kept = headers.iter().filter(|(name, _)| is_kept(name));
    kept.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// A call that arrived while another replica led, or none.
struct Call<'a> {
    forward: &'a Forward,
    parts: &'a Parts,
    body: &'a Bytes,
    arrival: Arrival,
}

impl Call<'_> {
    fn is_bind(&self) -> bool {
        self.forward.is_bind(&self.parts.uri)
    }

    /// What is left of `limit` since the client sent the call.
    fn left(&self, limit: Duration) -> Duration {
        limit.saturating_sub(self.arrival.spent(&self.forward.app))
    }

    /// The answer of the leader, or a refusal; `None` if this replica has become the leader.
    async fn to_leader(
        &self,
        news: &mut watch::Receiver<Leader>,
    ) -> (Option<Response>, ForwardResult) {
        let limit = self.forward.waits();
        let permit = tokio::time::timeout(self.left(limit), self.forward.calls.acquire()).await;
        if !matches!(permit, Ok(Ok(_))) {
            let refused = self.refused("too many calls wait for a leader");
            return (Some(refused), ForwardResult::NoLeader);
        }
        let mut cause = "none is known".to_owned();
        loop {
            let leader = news.borrow_and_update().clone();
            match &leader {
                Leader::Here => return (None, ForwardResult::Led),
                Leader::Unknown | Leader::Lapsed => {}
                Leader::Elsewhere(addresses) => match self.send(addresses, &leader, news).await {
                    Attempt::Answered(response) => {
                        let response = while_leading(response, news.clone(), leader);
                        return (Some(response), ForwardResult::Answered);
                    }
                    Attempt::Failed(error) => cause = error,
                    Attempt::Lost(error) => {
                        return (Some(self.lost(&error).await), ForwardResult::NoAnswer);
                    }
                    Attempt::Late => {
                        return (Some(self.late("no answer in time")), ForwardResult::NoAnswer);
                    }
                },
            }
            let has_lapsed = *news.borrow() == Leader::Lapsed;
            let left = self.left(if has_lapsed { limit.min(LAPSED_WITHIN) } else { limit });
            if left.is_zero() {
                return (Some(self.refused(&cause)), ForwardResult::NoLeader);
            }
            let _ = tokio::time::timeout(left.min(PAUSE), news.changed()).await;
        }
    }

    /// Waits a moment to become the leader, for which another replica takes this one; else the answer
    /// says that nothing was done.
    async fn until_leading(&self, news: &mut watch::Receiver<Leader>) -> Option<Response> {
        let becomes = news.wait_for(|now| *now == Leader::Here);
        if matches!(tokio::time::timeout(BECOMES_WITHIN, becomes).await, Ok(Ok(_))) {
            return None;
        }
        let mut response = self.refused("another replica takes this one for the leader");
        response.headers_mut().insert(NOT_LEADING, HeaderValue::from_static("1"));
        Some(response)
    }

    /// Sends the call to the leader once.
    async fn send(
        &self,
        addresses: &Addresses,
        leader: &Leader,
        news: &mut watch::Receiver<Leader>,
    ) -> Attempt {
        let request = match self.request(addresses) {
            Ok(request) => request,
            Err(error) => return Attempt::Failed(error),
        };
        let answered = tokio::select! {
            answered = self.forward.client.send(request) => answered,
            // A frozen leader never answers: what only reads goes to the next one.
            _ = news.wait_for(|now| now != leader), if !self.is_bind() => {
                return Attempt::Failed("the leader changed".to_owned());
            }
            () = tokio::time::sleep(self.left(self.forward.answers())) => return Attempt::Late,
        };
        match answered {
            Ok(answer) if answer.headers().contains_key(NOT_LEADING) => {
                Attempt::Failed("the replica that leads does not know it".to_owned())
            }
            Ok(answer) => {
                let (head, body) = answer.into_parts();
                let body = match self.received(body).await {
                    Ok(body) => body,
                    Err(error) => return Attempt::Lost(error),
                };
                let mut response = body.into_response();
                *response.status_mut() = head.status;
                *response.headers_mut() = handed_on(&head.headers);
                if let Some(length) = head.headers.get(header::CONTENT_LENGTH) {
                    response.headers_mut().insert(header::CONTENT_LENGTH, length.clone());
                }
                Attempt::Answered(response)
            }
            Err(Unanswered::Unsent(error)) => Attempt::Failed(error),
            Err(Unanswered::Lost(error)) if self.is_bind() => Attempt::Lost(error),
            Err(Unanswered::Lost(error)) => Attempt::Failed(error),
        }
    }

    /// The body of an answer. That of a *bind* is read first, since a part of it says nothing.
    async fn received(&self, body: Incoming) -> Result<Body, String> {
        if !self.is_bind() {
            return Ok(Body::new(body));
        }
        let whole = Limited::new(body, LONGEST_BOUND).collect();
        match tokio::time::timeout(self.left(self.forward.answers()), whole).await {
            Ok(Ok(whole)) => Ok(Body::from(whole.to_bytes())),
            Ok(Err(error)) => Err(format!("the answer broke off: {error}")),
            Err(_) => Err("the answer broke off".to_owned()),
        }
    }

    /// The call as the leader gets it. It has the host that the client named: the leader, which has the
    /// same `allowed_hosts`, judges it like one of its own.
    fn request(&self, addresses: &Addresses) -> Result<Request<Full<Bytes>>, String> {
        let base = match self.forward.port {
            Port::Verbs => &addresses.verbs,
            Port::Page => &addresses.page,
        };
        let uri = &self.parts.uri;
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let mut request = Request::builder()
            .method(self.parts.method.clone())
            .uri(format!("{base}{path}"))
            .body(Full::new(self.body.clone()))
            .map_err(|error| format!("address `{base}` of the leader cannot be used: {error}"))?;
        let headers = request.headers_mut();
        *headers = handed_on(&self.parts.headers);
        if let Some(host) = uri.authority().and_then(|it| HeaderValue::from_str(it.as_str()).ok()) {
            headers.insert(header::HOST, host);
        }
        let spent = self.arrival.spent(&self.forward.app).as_millis();
        let spent = HeaderValue::from(u32::try_from(spent).unwrap_or(u32::MAX));
        headers.insert(HeaderName::from_static(FORWARDED_HEADER), spent);
        Ok(request)
    }

    /// Nothing was done: the client may try again.
    fn refused(&self, cause: &str) -> Response {
        self.log("a call found no leader", cause);
        let again = [(header::RETRY_AFTER, "1")];
        (again, refusal(StatusCode::SERVICE_UNAVAILABLE, NO_LEADER)).into_response()
    }

    /// The leader may have acted on a *bind*: silence until kube-scheduler gives up.
    async fn lost(&self, cause: &str) -> Response {
        let app = &self.forward.app;
        tokio::select! {
            () = tokio::time::sleep(self.left(self.forward.answers())) => {}
            () = app.stopped_for(LAST_ANSWER_WITHIN) => {}
        }
        self.late(cause)
    }

    fn late(&self, cause: &str) -> Response {
        self.log("the leader did not answer", cause);
        refusal(StatusCode::GATEWAY_TIMEOUT, NO_ANSWER)
    }

    fn log(&self, what: &'static str, cause: &str) {
        let port = self.forward.port.label();
        if let Some(left_out) = LOGGED.admits((what, port), self.forward.app.clock.precise()) {
            tracing::warn!(path = %self.parts.uri.path(), cause, left_out, "{what}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(all: &[(&'static str, &'static str)]) -> HeaderMap {
        let all = all
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        all.collect()
    }

    #[test]
    fn headers_about_the_connection_are_not_handed_on() {
        let all = headers(&[
            ("connection", "close, X-Mine"),
            ("x-mine", "1"),
            ("transfer-encoding", "chunked"),
            ("content-length", "3"),
            ("expect", "100-continue"),
            ("host", "gpupack.gpu-system.svc:8081"),
            ("if-none-match", "W/\"1\""),
            ("sec-gpupack-client", "gpupack"),
        ]);
        let kept = handed_on(&all);
        let mut names: Vec<&str> = kept.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["host", "if-none-match", "sec-gpupack-client"]);
    }

    #[test]
    fn a_forwarded_call_says_for_how_long_it_is_under_way() {
        let of = |value| under_way(&headers(&[(FORWARDED_HEADER, value)]));
        assert_eq!(under_way(&HeaderMap::new()).unwrap(), None);
        assert_eq!(of("0").unwrap(), Some(Duration::ZERO));
        assert_eq!(of("4500").unwrap(), Some(Duration::from_millis(4_500)));
        for bad in ["", "-1", "1.5", "soon", "4294967296"] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }
}
