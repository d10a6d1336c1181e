//! The client for plain HTTP: of agents to extenders, of commands to an extender, and of the extender
//! to a Prometheus. Only calls to the API server have another one, that of `kube`.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::causes::with_causes;

/// Longest time to connect. Shorter than what callers allow for an answer, so that an agent of a node
/// whose extender's address is dead tries several times before the node counts as not reporting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long an idle connection is kept: longer than any sensible period of reports.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);

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
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let http = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .build(connector);
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
