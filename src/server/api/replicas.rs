//! What replicas tell each other.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;

use crate::http::respond::{ReadBody, refusal, with_permit};
use crate::page::service::Service;
use control::lead::informing::{take_follower, take_message};
use control::shared::in_flight::{Join, Message};
use wire::api::error::Error;

/// One large message is read at a time.
static LARGE_MESSAGES: Semaphore = Semaphore::const_new(1);

/// Largest message: the pods whose Bindings may be on their way.
pub(crate) const LONGEST_MESSAGE: usize = 8 << 20;

/// What the leader tells a follower: the Bindings that may be on their way.
#[utoipa::path(post, path = "/v1/replicas/bindings", operation_id = "takeBindings", tag = "replicas",
    request_body = Object, responses(
    (status = 200, description = "This replica knows them now.", body = Object),
    (status = 400, description = "The body cannot be read.", body = Error),
    (status = 409, description = "This replica does not follow that leader, or has no lists yet.", body = Error),
))]
pub(crate) async fn bindings(State(service): State<Service>, ReadBody(body): ReadBody) -> Response {
    let answer = with_permit(&LARGE_MESSAGES, body, move |body| {
        answered(body, |message: Message| take_message(&service.app, message))
    });
    answer.await.unwrap_or_else(|refused| refused)
}

/// A follower that wants to know the Bindings that may be on their way.
#[utoipa::path(post, path = "/v1/replicas/join", operation_id = "joinLeader", tag = "replicas",
    request_body = Object, responses(
    (status = 200, description = "It gets messages from now on.", body = Object),
    (status = 400, description = "The body cannot be read.", body = Error),
    (status = 409, description = "This replica does not lead in that term, or fences Bindings yet.", body = Error),
))]
pub(crate) async fn join(State(service): State<Service>, ReadBody(body): ReadBody) -> Response {
    let app = &service.app;
    answered(&body, |join: Join| take_follower(app, join))
}

fn answered<T: DeserializeOwned>(body: &[u8], take: impl FnOnce(T) -> bool) -> Response {
    match serde_json::from_slice(body) {
        Ok(message) => answer(take(message)),
        Err(error) => refusal(StatusCode::BAD_REQUEST, &error.to_string()),
    }
}

fn answer(is_taken: bool) -> Response {
    match is_taken {
        true => Json(serde_json::json!({})).into_response(),
        false => refusal(StatusCode::CONFLICT, "not in this term, or not yet"),
    }
}
