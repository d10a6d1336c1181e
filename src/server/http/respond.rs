//! Answers as JSON, and refusals.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, SemaphorePermit};

use kube_api::protocol::messages::to_json;
use wire::api::error::{Error, ErrorReason};

/// Most characters of a path that an error repeats.
const LONGEST_SHOWN: usize = 100;

/// Above this size a body needs a permit and is answered on a blocking thread. Parsing it takes
/// several times its own memory, and so long that other requests of a worker would wait. 5,000 node
/// names take about 200 KiB.
pub(crate) const LARGE_BODY: usize = 512 << 10;

/// The query of a call. One that cannot be read is refused with an [`Error`].
pub(crate) struct ReadQuery<T>(pub(crate) T);

impl<S: Sync, T: DeserializeOwned> FromRequestParts<S> for ReadQuery<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Response> {
        let query = Query::try_from_uri(&parts.uri);
        query
            .map(|Query(query)| Self(query))
            .map_err(|error| refusal(StatusCode::BAD_REQUEST, &error.body_text()))
    }
}

/// The body of a call. One that is too long is refused with an [`Error`].
pub(crate) struct ReadBody(pub(crate) Bytes);

impl<S: Send + Sync> FromRequest<S> for ReadBody {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
        let body = Bytes::from_request(request, state).await;
        body.map(Self).map_err(|rejection| match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => {
                let error = "the body is longer than this path reads; `max_body_mib` limits those \
                    of filter, prioritize and preempt";
                refusal(StatusCode::PAYLOAD_TOO_LARGE, error)
            }
            status => refusal(status, &rejection.body_text()),
        })
    }
}

/// A part of the path. One that is not UTF-8 is refused with an [`Error`].
pub(crate) struct ReadPath(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for ReadPath {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        let path = Path::from_request_parts(parts, state).await;
        path.map(|Path(path)| Self(path))
            .map_err(|rejection| refusal(rejection.status(), &rejection.body_text()))
    }
}

/// The answer for a path that is not there. `paths` says what the port has, and what another.
pub(crate) fn unknown_path(uri: &Uri, paths: &str) -> Response {
    let error = format!("this port has no `{}`: {paths}", shown(uri));
    let reason = Some(ErrorReason::UnknownPath);
    json(StatusCode::NOT_FOUND, to_json(&Error { reason, ..Error::new(error) }))
}

/// The answer for a path that has other methods; axum adds the header `Allow`.
pub(crate) async fn wrong_method(uri: Uri) -> Response {
    let path = shown(&uri);
    let error = format!("`{path}` has other methods: use one of those in the header `Allow`");
    refusal(StatusCode::METHOD_NOT_ALLOWED, &error)
}

fn shown(uri: &Uri) -> String {
    uri.path().chars().take(LONGEST_SHOWN).collect()
}

pub(crate) fn json(status: StatusCode, body: Vec<u8>) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

pub(crate) fn encoded<T: serde::Serialize>(value: &T) -> Response {
    json(StatusCode::OK, to_json(value))
}

pub(crate) fn error_body(error: &str) -> Vec<u8> {
    to_json(&Error::new(error.to_owned()))
}

pub fn refusal(status: StatusCode, error: &str) -> Response {
    json(status, error_body(error))
}

/// Answers at once, or, if the body is large, once it has a permit.
///
/// # Errors
/// The refusal if `answer` panics.
pub(crate) async fn with_permit<T: Send + 'static>(
    permits: &'static Semaphore,
    body: Bytes,
    answer: impl FnOnce(&[u8]) -> T + Send + 'static,
) -> Result<T, Response> {
    if body.len() <= LARGE_BODY {
        return Ok(answer(&body));
    }
    let permit = permits.acquire().await.expect("the semaphore is never closed");
    work_with(permit, move || answer(&body)).await
}

/// Works off the threads that answer calls. The work owns the permit: a client that closes the connection does not
/// end it.
///
/// # Errors
/// The refusal if `work` panics.
pub(crate) async fn work_with<T: Send + 'static>(
    permit: SemaphorePermit<'static>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Response> {
    let worked = tokio::task::spawn_blocking(move || {
        let _turn = permit;
        work()
    });
    worked.await.map_err(|_| refusal(StatusCode::INTERNAL_SERVER_ERROR, "a fault in gpupack"))
}
