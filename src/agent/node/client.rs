//! The HTTP side of the conversation with one extender, on kept-alive connections.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use hyper::http::request::Builder;
use hyper::{Request, StatusCode};
use tokio::sync::Semaphore;

use crate::node::session::ExtenderAnswer;
use runtime::certificates::ServerProof;
use runtime::http_client::{HttpClient, address_with};
use wire::api::error::{Error, ErrorReason};
use wire::report::bodies::{
    LibraryAnswer, MAX_BODY_BYTES, Reply, Report, library_path, report_path,
};

/// Longest time from the first byte to the last. A slower extender counts as away.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Concurrent reports to one extender, when one process plays many nodes.
const REPORTS_IN_FLIGHT_MAX: usize = 64;

/// How extender and agent prove to each other who they are.
#[derive(Clone, Debug, Default)]
pub struct Proof {
    /// That of the extender; without it addresses are plain text.
    pub server: Option<ServerProof>,
    /// The file with the token of the agent's pod. It is read for each report: kubelet renews it.
    pub token_file: Option<PathBuf>,
}

impl Proof {
    /// The scheme of the extender's addresses.
    pub(crate) fn scheme(&self) -> &'static str {
        if self.server.is_some() { "https" } else { "http" }
    }

    /// The value of the header with the token.
    fn authorization(&self) -> Result<Option<String>, String> {
        let Some(file) = &self.token_file else { return Ok(None) };
        let token = std::fs::read_to_string(file)
            .map_err(|error| format!("cannot read the token `{}`: {error}", file.display()))?;
        Ok(Some(format!("Bearer {}", token.trim())))
    }
}

/// One extender.
#[derive(Debug)]
pub struct ExtenderClient {
    /// Its address without a final slash.
    base: String,
    proof: Proof,
    http: HttpClient,
    /// Limits the reports in flight. Each extender has its own, so that one that hangs does not
    /// delay the others.
    permits: Semaphore,
}

/// Why an address cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the address of an extender cannot be used: {0}")]
pub struct AddressError(pub(crate) String);

impl ExtenderClient {
    /// A client of the extender at `url`; it connects at the first use.
    ///
    /// # Errors
    /// [`AddressError`] if `url` is not an address of the right scheme.
    pub fn new(url: &str, proof: Proof) -> Result<Self, AddressError> {
        let base = address_with(proof.scheme(), url).map_err(AddressError)?;
        let http = HttpClient::with(proof.server.clone(), TIMEOUT, MAX_BODY_BYTES);
        Ok(Self { base, proof, http, permits: Semaphore::new(REPORTS_IN_FLIGHT_MAX) })
    }

    /// The address, for logs.
    pub fn address(&self) -> &str {
        &self.base
    }

    /// Waits for a permit, calls `write`, and sends the report. It is written last, so that it is
    /// as recent as possible.
    pub async fn put(&self, node: &str, write: impl FnOnce() -> Report) -> ExtenderAnswer {
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        let body = serde_json::to_vec(&write()).expect("a report has no map and cannot fail");
        let request = Request::put(format!("{}{}", self.base, report_path(node)))
            .header(CONTENT_TYPE, "application/json");
        let token = match self.proof.authorization() {
            Ok(token) => token,
            Err(error) => return ExtenderAnswer::Refused { error },
        };
        match self.exchange(request, token, body).await {
            Ok((status, body)) => read(status, &body),
            Err(error) => ExtenderAnswer::Away { error },
        }
    }

    /// Asks whether NVIDIA's library may be open on a node. Why it is to be closed, or `None`.
    ///
    /// # Errors
    /// Why the extender does not say so: it refuses, or is away.
    pub async fn library(&self, node: &str) -> Result<Option<String>, Box<ExtenderAnswer>> {
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        let request = Request::get(format!("{}{}", self.base, library_path(node)));
        let token = self.proof.authorization();
        let token = token.map_err(|error| Box::new(ExtenderAnswer::Refused { error }))?;
        match self.exchange(request, token, Vec::new()).await {
            Ok((status, body)) => read_library(status, &body),
            Err(error) => Err(Box::new(ExtenderAnswer::Away { error })),
        }
    }

    /// Sends a request with a token and a body.
    async fn exchange(
        &self,
        mut request: Builder,
        token: Option<String>,
        body: Vec<u8>,
    ) -> Result<(StatusCode, Bytes), String> {
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token);
        }
        let request = request.header(ACCEPT, "application/json");
        let request = request.body(Full::new(Bytes::from(body)));
        self.http.exchange(request.map_err(|error| error.to_string())?).await
    }
}

/// The meaning of an answer to the question whether the library may be open. An extender of an earlier version
/// does not know the path, and then it may.
fn read_library(status: StatusCode, body: &[u8]) -> Result<Option<String>, Box<ExtenderAnswer>> {
    match status {
        StatusCode::OK => match serde_json::from_slice::<LibraryAnswer>(body) {
            Ok(answer) => Ok(answer.close_library),
            Err(error) => {
                let error = format!("its answer cannot be read: {error}");
                Err(Box::new(ExtenderAnswer::Refused { error }))
            }
        },
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => Ok(None),
        status if status.is_client_error() => {
            Err(Box::new(ExtenderAnswer::Refused { error: status.to_string() }))
        }
        status => Err(Box::new(ExtenderAnswer::Away { error: status.to_string() })),
    }
}

/// The meaning of an answer.
fn read(status: StatusCode, body: &[u8]) -> ExtenderAnswer {
    if status == StatusCode::OK {
        return match serde_json::from_slice::<Reply>(body) {
            Ok(reply) => ExtenderAnswer::Reply(reply),
            Err(error) => {
                ExtenderAnswer::Refused { error: format!("its reply cannot be read: {error}") }
            }
        };
    }
    let refusal = serde_json::from_slice::<Error>(body).ok();
    let reason = refusal.as_ref().and_then(|refusal| refusal.reason);
    if status == StatusCode::CONFLICT && reason == Some(ErrorReason::SessionExpired) {
        return ExtenderAnswer::SessionExpired;
    }
    let error = refusal
        .map_or_else(|| status.to_string(), |refusal| format!("{status}: {}", refusal.error));
    let is_away = status.is_server_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::NOT_FOUND);
    // Not found: the extender does not know the node yet.
    if is_away { ExtenderAnswer::Away { error } } else { ExtenderAnswer::Refused { error } }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(error: &str, reason: Option<ErrorReason>) -> Vec<u8> {
        serde_json::to_vec(&Error { reason, ..Error::new(error.to_owned()) }).unwrap()
    }

    #[test]
    fn an_answer_is_classified_by_status_and_reason() {
        let expired = &error("old", Some(ErrorReason::SessionExpired));
        let reply = br#"{"apiVersion":"gpupack.dev/v1alpha1","kind":"Reply","session":3,"outcome":"Accepted","novelty":1}"#;
        let far =
            br#"{"apiVersion":"gpupack.dev/v9","kind":"Reply","session":3,"outcome":"Accepted"}"#;
        for (status, body, meaning) in [
            (200, &reply[..], "Reply"),
            (200, far, "Refused"),
            (200, b"<html>", "Refused"),
            (409, expired, "SessionExpired"),
            (409, b"", "Refused"),
            (422, &error("absurd", None), "Refused"),
            (404, b"", "Away"),
            (429, b"", "Away"),
            (503, &error("starting", None), "Away"),
        ] {
            let answer = format!("{:?}", read(StatusCode::from_u16(status).unwrap(), body));
            assert!(answer.starts_with(meaning), "{status}: {answer}");
        }
    }

    #[test]
    fn an_extender_of_an_earlier_version_lets_the_library_be_open() {
        let closed =
            br#"{"apiVersion":"gpupack.dev/v1alpha1","kind":"LibraryAnswer","closeLibrary":"a=b"}"#;
        let open = br#"{"apiVersion":"gpupack.dev/v1alpha1","kind":"LibraryAnswer"}"#;
        for (status, body, meaning) in [
            (200, &closed[..], Some(Some("a=b"))),
            (200, open, Some(None)),
            (200, b"<html>", None),
            (404, b"", Some(None)),
            (405, b"", Some(None)),
            (403, b"", None),
            (503, b"", None),
        ] {
            let read = read_library(StatusCode::from_u16(status).unwrap(), body).ok();
            assert_eq!(read.as_ref().map(|closed| closed.as_deref()), meaning, "{status}");
        }
    }

    #[tokio::test]
    async fn only_http_addresses_are_accepted() {
        let client = |url: &str| ExtenderClient::new(url, Proof::default());
        assert_eq!(client("http://a:1/").unwrap().address(), "http://a:1");
        for bad in ["", "a:1", "https://a:1", "http://a b", "http://a:1/?x=1", "ftp://a"] {
            assert!(client(bad).is_err(), "{bad}");
        }
    }
}
