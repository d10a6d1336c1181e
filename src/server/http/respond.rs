//! Answers as JSON, and refusals.

use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;

use crate::api::error::Error;
use crate::protocol::messages::to_json;

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

pub(crate) fn json(status: StatusCode, body: Vec<u8>) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

pub(crate) fn encoded<T: serde::Serialize>(value: &T) -> Response {
    json(StatusCode::OK, to_json(value))
}

pub(crate) fn error_body(error: &str) -> Vec<u8> {
    to_json(&Error { error: error.to_owned(), ..Error::default() })
}

pub(crate) fn refusal(status: StatusCode, error: &str) -> Response {
    json(status, error_body(error))
}
