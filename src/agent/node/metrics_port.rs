//! The ports on which Prometheus reads the agent's metrics, and kubelet its condition. Any client that reaches the node
//! may connect, so what clients can hold is limited: places, and the length and time of a request.
//!
//! An answer to `/livez` shows that the event loop turns, since it comes from there. It never depends on NVML or an
//! extender. `/readyz` is well while reports are accepted.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use http_body_util::Full;
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus::TEXT_FORMAT;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use crate::node::metrics::AgentMetrics;
use crate::upkeep::condition::LastAccepted;
use runtime::clock::Clock;

/// Connections at a time. A further one takes the place of the oldest: a scrape takes milliseconds.
const PLACES: usize = 32;

/// Longest time of a connection, which has one request.
const WITHIN: Duration = Duration::from_secs(10);

/// Most bytes of a head.
const LONGEST_HEAD: usize = 16 << 10;

/// Pause when no connection can be accepted, for instance because all files are open.
const PAUSE: Duration = Duration::from_secs(1);

/// What a port shows.
#[derive(Clone, Debug)]
pub struct Shown {
    /// The metrics; none on a port for probes alone.
    pub metrics: Option<AgentMetrics>,
    /// When a report was last accepted.
    pub accepted: LastAccepted,
    pub clock: Clock,
}

/// Opens the port.
///
/// # Errors
/// The error of the operating system, for instance if the port is in use.
pub fn listen(address: SocketAddr) -> std::io::Result<std::net::TcpListener> {
    std::net::TcpListener::bind(address)
}

/// Answers `GET /livez`, `/readyz` and, if there are metrics, `/metrics` on `listener` forever.
///
/// # Errors
/// The error of the operating system about the listener.
pub fn serve(
    shown: Shown,
    listener: std::net::TcpListener,
) -> BoxFuture<'static, std::io::Result<()>> {
    Box::pin(async move {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let mut open: VecDeque<AbortHandle> = VecDeque::new();
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                sleep(PAUSE).await;
                continue;
            };
            open.retain(|connection| !connection.is_finished());
            if open.len() >= PLACES
                && let Some(oldest) = open.pop_front()
            {
                oldest.abort();
            }
            let connection = attend(stream, shown.clone());
            open.push_back(tokio::spawn(timeout(WITHIN, connection)).abort_handle());
        }
    })
}

/// Serves one connection to its end.
async fn attend(stream: TcpStream, shown: Shown) {
    let answer = service_fn(|request| std::future::ready(answer(&shown, &request)));
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .max_buf_size(LONGEST_HEAD)
        .serve_connection(TokioIo::new(stream), answer);
    let _ = served.await.inspect_err(|error| tracing::debug!(%error, "a connection broke"));
}

fn answer<B>(shown: &Shown, request: &Request<B>) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut response = Response::new(Full::default());
    let is_known = matches!(request.uri().path(), "/livez" | "/readyz")
        || shown.metrics.is_some() && request.uri().path() == "/metrics";
    if !is_known {
        *response.status_mut() = StatusCode::NOT_FOUND;
    } else if !matches!(*request.method(), Method::GET | Method::HEAD) {
        *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
        response.headers_mut().insert(ALLOW, "GET, HEAD".parse().expect("it is a header"));
    } else if request.uri().path() == "/livez" {
        *response.body_mut() = "the event loop turns\n".into();
    } else if request.uri().path() == "/readyz" {
        let is_ready = shown.accepted.is_recent(shown.clock.now());
        *response.status_mut() =
            if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        *response.body_mut() = match is_ready {
            true => "an extender accepted a report in the last 30 s\n".into(),
            false => "no extender accepted a report in the last 30 s: see the agent's log\n".into(),
        };
    } else if let Some(metrics) = &shown.metrics {
        *response.body_mut() = metrics.text().into();
        let format = TEXT_FORMAT.parse().expect("it is a header");
        response.headers_mut().insert(CONTENT_TYPE, format);
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn serving() -> SocketAddr {
        serving_of(Some(AgentMetrics::new())).await
    }

    async fn serving_of(metrics: Option<AgentMetrics>) -> SocketAddr {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let shown = Shown { metrics, accepted: LastAccepted::default(), clock: Clock::start() };
        tokio::spawn(serve(shown, listener));
        address
    }

    async fn asked(address: SocketAddr, request: &str) -> String {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(request.as_bytes()).await.unwrap();
        let mut heard = String::new();
        client.read_to_string(&mut heard).await.unwrap();
        heard
    }

    #[tokio::test]
    async fn prometheus_gets_the_series_and_others_what_is_wrong() {
        let address = serving().await;
        let heard = asked(address, "GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert!(heard.starts_with("HTTP/1.1 200") && heard.contains("build_info"), "{heard}");
        for (request, status) in [("GET /", "404"), ("POST /metrics", "405")] {
            let heard = asked(address, &format!("{request} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
            assert!(heard.starts_with(&format!("HTTP/1.1 {status}")), "{heard}");
        }
    }

    #[tokio::test]
    async fn a_port_for_probes_has_no_metrics() {
        let address = serving_of(None).await;
        for (path, status) in [("/livez", "200"), ("/readyz", "503"), ("/metrics", "404")] {
            let heard = asked(address, &format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
            assert!(heard.starts_with(&format!("HTTP/1.1 {status}")), "{heard}");
        }
    }

    #[tokio::test]
    async fn clients_that_hold_places_or_send_long_heads_are_closed() {
        let address = serving().await;
        let mut crowd = Vec::new();
        for _ in 0..2 * PLACES {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET /metrics HTTP/1.1\r\nx: ").await.unwrap();
            crowd.push(client);
        }
        let scrape = asked(address, "GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert!(scrape.starts_with("HTTP/1.1 200"), "{scrape}");
        let mut heard = Vec::new();
        let _ = crowd[0].read_to_end(&mut heard).await; // ends, with a reset perhaps
        assert!(heard.is_empty());
        let long = format!("GET /metrics HTTP/1.1\r\nx: {}", "x".repeat(LONGEST_HEAD));
        assert!(asked(address, &long).await.starts_with("HTTP/1.1 431"));
    }
}
