//! Calls are answered by the replica that leads. Any other one waits a moment to become it, then
//! refuses the call and closes the connection: the Service names the leader.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use tokio::sync::watch;

use crate::http::respond::refusal;
use control::shared::app::App;
use control::shared::leader::Leader;
use control::shared::log_limit::LogLimit;

/// Longest wait of a verb while no replica leads: as long as a take-over takes after a leader died.
const VERBS_WITHIN: Duration = Duration::from_secs(5);

/// The same of a query of people.
const PAGE_WITHIN: Duration = Duration::from_secs(2);

/// Longest wait while another replica leads, or may by now: the Service soon names that one. Without a
/// pause, kube-scheduler would try one pod after the other meanwhile.
const ELSEWHERE_WITHIN: Duration = Duration::from_millis(500);

/// A constant text, since kube-scheduler may show it.
const NOT_LEADING: &str = "this replica of gpupack does not lead: call the Service `gpupack`, which names the \
    one that does; if none does, look at the Lease that the configuration names, and at the logs of the replicas";

static LOGGED: LogLimit = LogLimit::new();

/// For whom a listener is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    Verbs,
    Page,
}

impl Port {
    fn label(self) -> &'static str {
        match self {
            Self::Verbs => "verbs",
            Self::Page => "page",
        }
    }
}

/// What the calls of one listener share.
#[derive(Clone)]
pub(crate) struct Door {
    pub(crate) app: Arc<App>,
    pub(crate) port: Port,
}

/// When a call arrived, on the precise clock: an extension of each request that the leader answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallArrival(Duration);

impl CallArrival {
    /// For how long the call is under way.
    pub(crate) fn spent(&self, app: &App) -> Duration {
        app.clock.precise().saturating_sub(self.0)
    }
}

/// Answers if this replica leads, or comes to lead in time.
pub(crate) async fn by_leader(
    State(door): State<Door>,
    mut request: Request,
    next: Next,
) -> Response {
    let Door { app, port } = &door;
    request.extensions_mut().insert(CallArrival(app.clock.precise()));
    let mut news = app.lead.leading.subscribe();
    if !app.leads() {
        door.until_leading(&mut news).await;
    }
    let is_bind = *port == Port::Verbs && request.uri().path() == "/v1/bind";
    // Before the look whether this replica leads: one that hands over waits for such calls.
    let open = is_bind.then(|| app.binding.binds.begin_call());
    if !app.leads() {
        if let Some(left_out) = LOGGED.admits(("not leading", port.label()), app.clock.precise()) {
            tracing::warn!(path = %request.uri().path(), left_out, "refused a call: this replica does not lead");
        }
        let headers = [(header::RETRY_AFTER, "1"), (header::CONNECTION, "close")];
        return (headers, refusal(StatusCode::SERVICE_UNAVAILABLE, NOT_LEADING)).into_response();
    }
    let answer = while_leading(next.run(request).await, news);
    drop(open);
    answer
}

impl Door {
    /// Waits until this replica leads, for a moment.
    async fn until_leading(&self, news: &mut watch::Receiver<Leader>) {
        let Self { app, port } = self;
        let limit = match port {
            Port::Verbs => VERBS_WITHIN.min(app.config.scheduler_timeout / 2),
            Port::Page => PAGE_WITHIN,
        };
        let began = app.clock.precise();
        loop {
            let most = match *news.borrow_and_update() {
                Leader::Here => return,
                Leader::Unknown => limit,
                Leader::Elsewhere | Leader::Lapsed => limit.min(ELSEWHERE_WITHIN),
            };
            let left = most.saturating_sub(app.clock.precise().saturating_sub(began));
            if !matches!(tokio::time::timeout(left, news.changed()).await, Ok(Ok(()))) {
                return;
            }
        }
    }
}

/// Ends a stream of events when this replica leads no more, so that the browser asks again.
fn while_leading(response: Response, mut news: watch::Receiver<Leader>) -> Response {
    let kind = response.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    if !kind.is_some_and(|kind| kind.starts_with(b"text/event-stream")) {
        return response;
    }
    let changed = Box::pin(async move {
        let _ = news.wait_for(|now| *now != Leader::Here).await;
    });
    response.map(|body| Body::from_stream(body.into_data_stream().take_until(changed)))
}
