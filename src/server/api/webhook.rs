//! The admission webhook over HTTP: limits and status codes. [`Admission`] alone decides what is
//! admitted.
//!
//! It is a process of its own, with any number of replicas: the answer needs no ledger, and
//! creating pods must not wait for a restart of the extender.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, middleware};
use tokio::sync::Semaphore;

use crate::clock::Clock;
use crate::control::shared::log_limit::LogLimit;
use crate::kube_api::admission::rules::Admission;
use crate::server::http::browser;

/// Largest body that is read. An API server takes objects of up to 3 MiB, and a review holds at
/// most two versions of one.
pub(crate) const MAX_BODY_BYTES: usize = 8 << 20;

/// Threads of the process: the number of reviews worked on at a time, whatever their size.
pub const THREADS: usize = 2;

/// How long a body may take to arrive. An API server sends it at once.
const BODY_LIMIT: Duration = Duration::from_secs(5);

/// Above this size a review needs a permit: a pod takes many times the size of its text.
pub(crate) const LARGE_REVIEW: usize = 64 << 10;

/// Reviews of that size that are worked on at a time.
pub(crate) const LARGE_AT_ONCE: usize = 1;

static LARGE_REVIEWS: Semaphore = Semaphore::const_new(LARGE_AT_ONCE);

/// Limits how often refused pods and other calls are logged: any client may call.
static LOGGED: LogLimit = LogLimit::new();

/// For [`LOGGED`] alone: admission depends on no time.
static CLOCK: LazyLock<Clock> = LazyLock::new(Clock::start);

/// The routes: `/webhook` for the API server, `/healthz` for kubelet.
pub fn router(admission: Arc<Admission>) -> Router {
    Router::new()
        .route("/webhook", post(review))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .route("/healthz", get(|| async { "ok\n" }))
        // Its certificate names only its own hosts, so no page reaches it by another name.
        .layer(middleware::from_fn_with_state(browser::Hosts::None, browser::guard))
        .with_state(admission)
}

async fn review(State(admission): State<Arc<Admission>>, request: Request) -> Response {
    let body = match tokio::time::timeout(BODY_LIMIT, Bytes::from_request(request, &())).await {
        Ok(Ok(body)) => body,
        Ok(Err(rejection)) => return rejection.into_response(),
        Err(_) => {
            return (StatusCode::REQUEST_TIMEOUT, "the body came too slowly\n").into_response();
        }
    };
    let is_large = body.len() > LARGE_REVIEW;
    let _turn = if is_large { LARGE_REVIEWS.acquire().await.ok() } else { None };
    match admission.review(&body) {
        Ok(answer) => {
            match &answer.refusal {
                None => tracing::debug!(pod = %answer.pod, "admitted"),
                Some(refusal) => {
                    let reason = refusal.label();
                    if let Some(left_out) = LOGGED.admits(("refused", reason), CLOCK.precise()) {
                        tracing::info!(pod = %answer.pod, reason, %refusal, left_out, "refused");
                    }
                }
            }
            let kind = [(header::CONTENT_TYPE, "application/json")];
            (kind, answer.review).into_response()
        }
        Err(fault) => {
            if let Some(left_out) = LOGGED.admits(("fault", fault.label()), CLOCK.precise()) {
                tracing::warn!(%fault, left_out, "a call that is not an admission review of a pod");
            }
            (StatusCode::BAD_REQUEST, format!("{fault}\n")).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tower::ServiceExt;

    use super::*;
    use crate::config::webhook::WebhookConfig;

    #[tokio::test]
    async fn large_reviews_wait_for_a_permit() {
        let rules = Admission::new(WebhookConfig::default(), vec!["gpupack".to_owned()]);
        let routes = router(Arc::new(rules));
        let send = |bytes: usize| {
            let call = Request::post("/webhook").header("content-type", "application/json");
            let call = call.body(Body::from(" ".repeat(bytes))).unwrap();
            tokio::time::timeout(Duration::from_millis(200), routes.clone().oneshot(call))
        };
        let all = LARGE_REVIEWS.acquire().await.unwrap();
        assert!(send(LARGE_REVIEW + 1).await.is_err(), "it did not wait");
        let status = send(LARGE_REVIEW).await.unwrap().unwrap().status();
        assert_eq!(status, StatusCode::BAD_REQUEST);
        drop(all);
        assert!(send(LARGE_REVIEW + 1).await.is_ok());
    }
}
