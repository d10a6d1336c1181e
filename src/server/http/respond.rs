//! Answers as JSON, and refusals.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::protocol::messages::to_json;

pub(crate) fn json(status: StatusCode, body: Vec<u8>) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

pub(crate) fn encoded<T: serde::Serialize>(value: &T) -> Response {
    json(StatusCode::OK, to_json(value))
}

pub(crate) fn refusal(status: StatusCode, error: &str) -> Response {
    let body = serde_json::json!({ "error": error }).to_string().into_bytes();
    json(status, body)
}
