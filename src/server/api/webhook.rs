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
use futures::future::BoxFuture;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use crate::http::tls::{Handshake, ShownCertificate};
use crate::http::{browser, connections};
use control::shared::log_limit::LogLimit;
use kube_api::admission::rules::Admission;
use runtime::certificates::Certificates;
use runtime::clock::Clock;

/// Largest body that is read. An API server takes objects of up to 3 MiB, and a review holds at
/// most two versions of one.
const MAX_BODY_BYTES: usize = 8 << 20;

/// Threads of the process: the number of reviews worked on at a time, whatever their size.
pub const THREADS: usize = 2;

/// How long a body may take to arrive. An API server sends it at once.
const BODY_LIMIT: Duration = Duration::from_secs(5);

/// Above this size a review needs a permit: a pod takes many times the size of its text.
const LARGE_REVIEW: usize = 64 << 10;

/// Reviews of that size that are worked on at a time.
const LARGE_AT_ONCE: usize = 1;

static LARGE_REVIEWS: Semaphore = Semaphore::const_new(LARGE_AT_ONCE);

/// Limits how often refused pods and other calls are logged: any client may call.
static LOGGED: LogLimit = LogLimit::new();

/// For [`LOGGED`] alone: admission depends on no time.
static CLOCK: LazyLock<Clock> = LazyLock::new(Clock::start);

/// Most connections at a time. An API server keeps a handful. The others are idle ones of unrelated
/// clients, of which the oldest give way.
const MAX_CONNECTIONS: usize = 4_096;

/// Most bytes held for all connections together. Each counts 16 KiB, and one review at most 8 MiB.
/// This is enough for several reviews beside 2,000 connections. Together with the memory for
/// working on reviews it stays far below the memory limit of the shipped manifest.
const MAX_IN_FLIGHT: usize = 60 << 20;

/// How long open requests may delay the shutdown.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Serves the API server over TLS until `stop`; answers open requests first, for at most 10 s.
pub fn serve(
    listener: TcpListener,
    certificates: Certificates,
    admission: Arc<Admission>,
    stop: watch::Receiver<bool>,
) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let handshake =
            Handshake { tls: certificates.current(), clients: ShownCertificate::Nothing };
        let limits = connections::limits(MAX_CONNECTIONS, MAX_IN_FLIGHT, 48);
        let mut stopped = stop.clone();
        let late = async move {
            let _ = stopped.wait_for(|stop| *stop).await;
            tokio::time::sleep(END_LIMIT).await;
        };
        tokio::select! {
            () = connections::serve(listener, Some(handshake), router(admission), limits, stop) => {}
            () = certificates.follow() => {}
            () = late => tracing::warn!("open requests were cut off"),
        }
    })
}

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
                None => tracing::debug!(object = %answer.object, "admitted"),
                Some(refusal) => {
                    let reason = refusal.label();
                    if let Some(left_out) = LOGGED.admits(("refused", reason), CLOCK.precise()) {
                        tracing::info!(object = %answer.object, reason, %refusal, left_out, "refused");
                    }
                }
            }
            let kind = [(header::CONTENT_TYPE, "application/json")];
            (kind, answer.review).into_response()
        }
        Err(fault) => {
            if let Some(left_out) = LOGGED.admits(("fault", fault.label()), CLOCK.precise()) {
                tracing::warn!(%fault, left_out, "a call that is not an admission review of a pod or template");
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
    use kube_api::admission::review::MOST_REVIEW_BYTES;
    use kube_api::config::webhook::WebhookConfig;

    /// Half of the memory limit in `deploy/webhook.yaml`. Idle it takes about 15 MiB.
    const MOST_BYTES: usize = 128 << 20;

    /// Bytes that one byte of a small review may take: `{"a":` is an object, which takes 700.
    const OF_A_BYTE: usize = 700 / 5;

    #[test]
    fn concurrent_requests_use_at_most_half_of_the_memory_limit() {
        let large = LARGE_AT_ONCE * (MOST_REVIEW_BYTES + MAX_BODY_BYTES);
        // Each other thread works on a small review, or assembles a body from its pieces.
        let other = MAX_BODY_BYTES.max(LARGE_REVIEW * OF_A_BYTE);
        let most = MAX_IN_FLIGHT + large + (THREADS - LARGE_AT_ONCE) * other;
        assert!(most <= MOST_BYTES, "{} MiB", most >> 20);
        let connections = (MAX_IN_FLIGHT - MAX_BODY_BYTES) / (16 << 10);
        assert!(connections >= 2_000, "{connections} beside a review");
    }

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
