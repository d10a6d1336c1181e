//! The client for HTTP: of agents to extenders, of commands to an extender, and of the extender to a
//! Prometheus. Only calls to the API server have another one, that of `kube`.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Builder, Client};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use parking_lot::Mutex;

use crate::causes::with_causes;
use crate::certificates::ServerProof;

/// Longest time to connect. Shorter than what callers allow for an answer, so that an agent of a node
/// whose extender's address is dead tries several times before the node counts as not reporting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long an idle connection is kept: longer than any sensible period of reports.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);

/// A plain HTTP address, without its final slash.
///
/// # Errors
/// What is wrong with it. It never names a password in the address.
pub fn plain_address(text: &str) -> Result<String, String> {
    address_with("http", text)
}

/// An address with this scheme, `http` or `https`, without its final slash.
///
/// # Errors
/// What is wrong with it. It never names a password in the address.
pub fn address_with(scheme: &str, text: &str) -> Result<String, String> {
    let address = checked_address(scheme, text);
    address.map_err(|cause| format!("`{}` is no address: {cause}", without_user(text)))
}

fn checked_address(scheme: &str, text: &str) -> Result<String, String> {
    let address: Uri = text.parse().map_err(|cause| format!("{cause}"))?;
    let cause = match address.scheme_str() {
        _ if text.contains('@') => "a user or a password is not supported",
        Some("https") if scheme == "http" => {
            "TLS is not supported yet, or needs the certificate of a CA"
        }
        Some("http") if scheme == "https" => {
            "it is plain text, and a CA is given: write https://HOST:PORT for TLS"
        }
        Some("http" | "https") if text.contains(['?', '#']) => "it has a query or a fragment",
        Some("http" | "https") if address.host().is_some_and(|host| !host.is_empty()) => {
            return Ok(text.trim_end_matches('/').to_owned());
        }
        _ => return Err(format!("write {scheme}://HOST:PORT")),
    };
    Err(cause.to_owned())
}

/// A text without what stands before the last `@` of an address in it: it may be a password.
pub fn without_user(text: &str) -> String {
    match text.split_once("://").and_then(|(scheme, rest)| Some((scheme, rest.rsplit_once('@')?))) {
        Some((scheme, (_, host))) => format!("{scheme}://…@{host}"),
        None => text.to_owned(),
    }
}

impl ServerProof {
    fn connector(&mut self, within: Duration) -> Option<HttpsConnector<HttpConnector>> {
        let config = self.tls.borrow_and_update().client()?.as_ref().clone();
        let builder = HttpsConnectorBuilder::new().with_tls_config(config).https_only();
        let names = FixedServerNameResolver::new(self.name.clone());
        let mut plain = connector(within);
        plain.enforce_http(false);
        Some(builder.with_server_name_resolver(names).enable_http1().wrap_connector(plain))
    }
}

/// A client for plain text, or one that follows the certificates.
#[derive(Debug)]
enum Connections {
    Plain(Client<HttpConnector, Full<Bytes>>),
    Tls(Box<Mutex<TlsConnections>>),
}

#[derive(Debug)]
struct TlsConnections {
    proof: ServerProof,
    within: Duration,
    builder: Builder,
    made: Option<Client<HttpsConnector<HttpConnector>, Full<Bytes>>>,
}

impl Connections {
    fn new(builder: Builder, within: Duration, proof: Option<ServerProof>) -> Self {
        match proof {
            None => Self::Plain(builder.build(connector(within))),
            Some(proof) => Self::Tls(Box::new(Mutex::new(TlsConnections {
                proof,
                within,
                builder,
                made: None,
            }))),
        }
    }

    async fn request(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, String> {
        let answer = match self {
            Self::Plain(client) => client.request(request).await,
            Self::Tls(connections) => {
                let client = connections.lock().client();
                client.ok_or("there is no certificate of a CA")?.request(request).await
            }
        };
        answer.map_err(|error| with_causes(&error))
    }
}

impl TlsConnections {
    /// The client for new connections with the newest certificates.
    fn client(&mut self) -> Option<Client<HttpsConnector<HttpConnector>, Full<Bytes>>> {
        if self.made.is_none() || self.proof.tls.has_changed().unwrap_or_default() {
            self.made = Some(self.builder.build(self.proof.connector(self.within)?));
        }
        self.made.clone()
    }
}

/// A client that keeps its connections open.
#[derive(Debug)]
pub struct HttpClient {
    http: Connections,
    /// Longest time from the first byte of a request to the last one of its answer.
    within: Duration,
    /// Largest answer that is read.
    max_bytes: usize,
}

impl HttpClient {
    /// A client with these limits of an answer. It connects at the first use.
    pub fn new(within: Duration, max_bytes: usize) -> Self {
        Self::with(None, within, max_bytes)
    }

    /// The same for servers that prove who they are.
    pub fn with(proof: Option<ServerProof>, within: Duration, max_bytes: usize) -> Self {
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE_TIMEOUT);
        Self { http: Connections::new(builder, CONNECT_TIMEOUT, proof), within, max_bytes }
    }

    /// Status and whole body of the answer, whatever the status.
    ///
    /// # Errors
    /// No whole answer in time, or one that is too large, as text.
    pub async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), String> {
        let exchange = async {
            let answer = self.http.request(request).await?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), self.max_bytes).collect().await;
            let body = body.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
                Some(_) => format!("the answer has more than {} bytes", self.max_bytes),
                None => format!("the answer broke off: {error}"),
            })?;
            Ok((status, body.to_bytes()))
        };
        tokio::time::timeout(self.within, exchange)
            .await
            .unwrap_or_else(|_| Err(format!("no answer within {} s", self.within.as_secs())))
    }
}

fn connector(within: Duration) -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(within));
    connector
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
