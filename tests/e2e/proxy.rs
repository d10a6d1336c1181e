//! A faulty network between the extender and the API server.
//!
//! Plain HTTP on loopback towards the extender, TLS towards the API server, always as the
//! extender's user. Everything is passed on, watches included; requests that create a Binding meet
//! with the faults that are set, drawn from a seeded generator.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use kube::Client;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// What happens to Bindings, in percent of them; the rest is passed on unharmed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    /// Passed on; the reply is dropped and the connection closed.
    pub(crate) drop_reply_percent: u32,
    /// Passed on; the reply comes after `delay`.
    pub(crate) delay_percent: u32,
    /// Passed on after `delay`, even if the extender has ended meanwhile.
    pub(crate) hold_percent: u32,
    /// Answered 500 or 429 without being passed on.
    pub(crate) refuse_percent: u32,
    /// How late a delayed reply or a held request is.
    pub(crate) delay: Duration,
}

/// How many Bindings met with which fault.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Harm {
    /// All Bindings that were posted.
    pub(crate) bindings: u32,
    /// Replies thrown away.
    pub(crate) dropped: u32,
    /// Replies delayed.
    pub(crate) delayed: u32,
    /// Requests passed on late.
    pub(crate) held: u32,
    /// Refused by the proxy.
    pub(crate) refused: u32,
}

enum Fate {
    PassOn,
    DropReply,
    Delay(Duration),
    Hold(Duration),
    Refuse(StatusCode),
}

struct Chance {
    faults: Faults,
    generator: ChaCha8Rng,
    harm: Harm,
}

impl Chance {
    fn fate(&mut self) -> Fate {
        let faults = self.faults;
        let draw = self.generator.random_range(0..100);
        let dropped = faults.drop_reply_percent;
        let delayed = dropped + faults.delay_percent;
        let held = delayed + faults.hold_percent;
        let refused = held + faults.refuse_percent;
        self.harm.bindings += 1;
        if draw < dropped {
            self.harm.dropped += 1;
            Fate::DropReply
        } else if draw < delayed {
            self.harm.delayed += 1;
            Fate::Delay(faults.delay)
        } else if draw < held {
            self.harm.held += 1;
            Fate::Hold(faults.delay)
        } else if draw < refused {
            self.harm.refused += 1;
            let busy = self.generator.random_bool(0.5);
            Fate::Refuse(if busy {
                StatusCode::TOO_MANY_REQUESTS
            } else {
                StatusCode::INTERNAL_SERVER_ERROR
            })
        } else {
            Fate::PassOn
        }
    }
}

/// The running proxy.
pub(crate) struct Proxy {
    address: SocketAddr,
    chance: Arc<Mutex<Chance>>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port. `upstream` is a client with the extender's token.
    pub(crate) async fn start(upstream: Client, faults: Faults, seed: u64) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let generator = ChaCha8Rng::seed_from_u64(seed);
        let chance = Arc::new(Mutex::new(Chance { faults, generator, harm: Harm::default() }));
        let task = tokio::spawn(serve(listener, upstream, Arc::clone(&chance)));
        Self { address, chance, task }
    }

    /// The server for the extender's kubeconfig.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sets what happens from now on.
    pub(crate) fn set(&self, faults: Faults) {
        self.chance.lock().unwrap_or_else(PoisonError::into_inner).faults = faults;
    }

    /// What was done so far.
    pub(crate) fn harm(&self) -> Harm {
        self.chance.lock().unwrap_or_else(PoisonError::into_inner).harm
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(listener: TcpListener, upstream: Client, chance: Arc<Mutex<Chance>>) {
    loop {
        let Ok((socket, _)) = listener.accept().await else { continue };
        let _without_delay = socket.set_nodelay(true);
        let (upstream, chance) = (upstream.clone(), Arc::clone(&chance));
        tokio::spawn(async move {
            let service = service_fn(|request| answer(request, upstream.clone(), &chance));
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(socket), service);
            // An error here is a reply that was dropped on purpose, or a client that disconnected.
            let _ended = connection.await;
        });
    }
}

/// The reply. An error makes hyper close the connection without one.
async fn answer(
    request: Request<Incoming>,
    upstream: Client,
    chance: &Mutex<Chance>,
) -> Result<Response<Body>, &'static str> {
    let binds = request.method() == Method::POST && request.uri().path().ends_with("/binding");
    let fate = if binds {
        chance.lock().unwrap_or_else(PoisonError::into_inner).fate()
    } else {
        Fate::PassOn
    };
    match fate {
        Fate::PassOn => Ok(pass_on(request, upstream, Duration::ZERO).await),
        Fate::Hold(delay) => Ok(pass_on(request, upstream, delay).await),
        Fate::DropReply => {
            let _lost = pass_on(request, upstream, Duration::ZERO).await;
            Err("the reply is dropped on purpose")
        }
        Fate::Delay(delay) => {
            let reply = pass_on(request, upstream, Duration::ZERO).await;
            tokio::time::sleep(delay).await;
            Ok(reply)
        }
        Fate::Refuse(status) => Ok(refusal(status)),
    }
}

async fn pass_on(request: Request<Incoming>, upstream: Client, hold: Duration) -> Response<Body> {
    let (mut head, body) = request.into_parts();
    // The client upstream sets these itself.
    for name in [header::HOST, header::AUTHORIZATION, header::CONNECTION] {
        head.headers.remove(name);
    }
    let Ok(body) = body.collect().await else {
        return refusal(StatusCode::BAD_REQUEST);
    };
    let bytes: Bytes = body.to_bytes();
    // A task of its own: what was sent to the API server is carried out also when the extender
    // dies meanwhile, as on a real network.
    let sent = tokio::spawn(async move {
        tokio::time::sleep(hold).await;
        upstream.send(Request::from_parts(head, kube::client::Body::from(bytes))).await
    });
    match sent.await {
        Ok(Ok(response)) => {
            let mut response = response.map(Body::new);
            response.headers_mut().remove(header::CONNECTION);
            response.headers_mut().remove(header::TRANSFER_ENCODING);
            response
        }
        Ok(Err(_)) | Err(_) => refusal(StatusCode::BAD_GATEWAY),
    }
}

/// An answer in the API server's form.
fn refusal(status: StatusCode) -> Response<Body> {
    let reason =
        if status == StatusCode::TOO_MANY_REQUESTS { "TooManyRequests" } else { "InternalError" };
    let text = serde_json::json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "refused by the faulty network", "reason": reason, "code": status.as_u16(),
    });
    let mut response = Response::new(Body::from(text.to_string()));
    *response.status_mut() = status;
    let json = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
