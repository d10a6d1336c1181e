//! The clients for plain HTTP: of agents to extenders, of commands to an extender, and of the extender
//! to a Prometheus and to the replica that leads. Only calls to the API server have another one, that
//! of `kube`.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::causes::with_causes;

/// Longest time to connect. Shorter than what callers allow for an answer, so that an agent of a node
/// whose extender's address is dead tries several times before the node counts as not reporting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long an idle connection is kept: longer than any sensible period of reports.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);

/// A plain HTTP address, without its final slash.
///
/// # Errors
/// What is wrong with it. It never names a password in the address.
pub(crate) fn plain_address(text: &str) -> Result<String, String> {
    let fault = |cause: &str| format!("`{}` is no address: {cause}", without_user(text));
    let address: Uri = text.parse().map_err(|cause| fault(&format!("{cause}")))?;
    match address.scheme_str() {
        _ if text.contains('@') => Err(fault("a user or a password is not supported")),
        Some("https") => Err(fault("TLS is not supported yet")),
        Some("http") if text.contains(['?', '#']) => Err(fault("it has a query or a fragment")),
        Some("http") if address.host().is_some_and(|host| !host.is_empty()) => {
            Ok(text.trim_end_matches('/').to_owned())
        }
        _ => Err(fault("write http://HOST:PORT")),
    }
}

/// A text without what stands before the last `@` of an address in it: it may be a password.
pub(crate) fn without_user(text: &str) -> String {
    match text.split_once("://").and_then(|(scheme, rest)| Some((scheme, rest.rsplit_once('@')?))) {
        Some((scheme, (_, host))) => format!("{scheme}://…@{host}"),
        None => text.to_owned(),
    }
}

/// A client that keeps its connections open.
#[derive(Debug)]
pub(crate) struct HttpClient {
    http: Client<HttpConnector, Full<Bytes>>,
    /// Longest time from the first byte of a request to the last one of its answer.
    within: Duration,
    /// Largest answer that is read.
    max_bytes: usize,
}

impl HttpClient {
    /// A client with these limits of an answer. It connects at the first use.
    pub(crate) fn new(within: Duration, max_bytes: usize) -> Self {
        let http = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .build(connector(CONNECT_TIMEOUT));
        Self { http, within, max_bytes }
    }

    /// Status and whole body of the answer, whatever the status.
    ///
    /// # Errors
    /// No whole answer in time, or one that is too large, as text.
    pub(crate) async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), String> {
        let exchange = async {
            let answer = self.http.request(request).await.map_err(|error| with_causes(&error))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), self.max_bytes).collect().await;
            let body = body.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
                Some(_) => format!("the answer has more than {} bytes", self.max_bytes),
                None => format!("the answer broke off: {error}"),
            })?;
            Ok((status, body.to_bytes()))
        };
        let late = |_| Err(format!("no answer within {} s", self.within.as_secs()));
        tokio::time::timeout(self.within, exchange).await.unwrap_or_else(late)
    }
}

fn connector(within: Duration) -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(within));
    connector
}

/// Why a request has no answer.
#[derive(Debug)]
pub(crate) enum Unanswered {
    /// No connection: the server has nothing of it.
    Unsent(String),
    /// The server may have read it.
    Lost(String),
}

/// A client that hands on answers while they come. Each request has a connection of its own, since one
/// that was kept may be dead: then it is not known whether the server has read the request.
#[derive(Debug)]
pub(crate) struct StreamingClient(Client<HttpConnector, Full<Bytes>>);

impl StreamingClient {
    /// A client that tries to connect for so long.
    pub(crate) fn new(connect_within: Duration) -> Self {
        let builder = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).to_owned();
        Self(builder.build(connector(connect_within)))
    }

    /// The head of the answer, whatever the status; its body comes later.
    ///
    /// # Errors
    /// No head, and whether the server may have read the request.
    pub(crate) async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, Unanswered> {
        self.0.request(request).await.map_err(|error| {
            let is_unsent = error.is_connect();
            let error = with_causes(&error);
            if is_unsent { Unanswered::Unsent(error) } else { Unanswered::Lost(error) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_plain_http_and_its_faults_name_no_password() {
        assert_eq!(plain_address("http://a:1/b/"), Ok("http://a:1/b".to_owned()));
        for (bad, cause) in [
            ("", "empty"),
            ("a:1", "http://HOST:PORT"),
            ("https://a", "TLS"),
            ("http://", "empty"),
            ("http://a/?b", "query"),
            ("http://a/#b", "fragment"),
            ("http://user:secret@a", "user"),
            ("https://user:sec@ret@a", "user"),
        ] {
            let fault = plain_address(bad).unwrap_err();
            assert!(fault.contains(cause) && !fault.contains("sec"), "{bad}: {fault}");
        }
    }
}
