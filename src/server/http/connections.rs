//! Connections: one for each agent of the cluster, and nearly all of them idle at any time.
//!
//! hyper holds 16 KiB of buffers for each connection that it has. So it has one only from the first
//! byte of a request until everything is answered. In between a connection is a socket and a small
//! task. Clients that send long requests, such as kube-scheduler, are few: hyper keeps their
//! connections, because it has learned to read them in large pieces.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use axum::Router;
use axum::serve::Listener;
use bytes::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

use crate::server::http::bell::awake;
use crate::server::http::exchange::{Exchange, Observed, Progress, answer};
use crate::server::http::limits::{Clients, Connection, LOOK_EVERY, Limits, Phase, open_files};
use crate::server::http::tls::{Handshake, Idle, shake_hands};

/// Longest head of a request. kube-scheduler and agents send hundreds of bytes, browsers thousands.
const LONGEST_HEAD: usize = 64 << 10;

/// Most headers of a request. The API server names each group of a user in one of its own.
const MOST_HEADERS: usize = 512;

/// Limits of a listener. It may use `part` of 64 parts of the files that this process may open.
pub(crate) fn limits(connections: usize, bytes: usize, part: usize) -> Limits {
    let most = open_files().map_or(usize::MAX, |files| (files / 64).saturating_mul(part));
    if most < connections {
        tracing::warn!(
            connections,
            possible = most,
            "the limit of open files allows fewer connections than this port takes: raise the hard limit of the container runtime (`ulimit -Hn`)"
        );
    }
    Limits::new(connections.min(most).max(1), bytes)
}

/// Serves every client until `stop`, and then those that still wait for an answer. Without a
/// handshake in plain text.
pub(crate) async fn serve(
    (listener, handshake): (TcpListener, Option<Handshake>),
    routes: Router,
    limits: Limits,
    stop: watch::Receiver<bool>,
) {
    let routes = routes.with_state(()); // made once, not per connection
    let stopped = stop.clone();
    let phase = if handshake.is_some() { Phase::Handshake } else { Phase::Idle };
    accept(listener, (Clients::new(limits), phase), stop, move |stream, connection| {
        let (handshake, routes, stop) = (handshake.clone(), routes.clone(), stopped.clone());
        async move {
            let Some(handshake) = handshake else {
                return attend(stream, connection, routes, stop).await;
            };
            // Boxed, so that the task stays small while the connection is idle.
            let stream = Box::pin(shake_hands(&handshake, stream, &connection)).await;
            if let Some(stream) = stream {
                connection.enter(Phase::Idle);
                attend(Box::new(stream), connection, routes, stop).await;
            }
        }
    })
    .await;
}

/// Runs `attend` for each connection that `clients` admits until `stop`, then waits for those that
/// are left. A connection begins in `phase`.
pub(crate) async fn accept<F: Future<Output = ()> + Send + 'static>(
    mut listener: TcpListener,
    (clients, phase): (Arc<Clients>, Phase),
    mut stop: watch::Receiver<bool>,
    attend: impl Fn(TcpStream, Arc<Connection>) -> F,
) {
    let (held, mut ended) = mpsc::channel::<Infallible>(1);
    let mut look = interval(LOOK_EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_open = true;
    while is_open {
        let (stream, address) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            _ = look.tick() => {
                clients.close_overdue();
                continue;
            }
            _ = stop.wait_for(|stop| *stop) => {
                is_open = false;
                continue;
            }
        };
        send_at_once(&stream);
        let Some(place) = clients.admit(address.ip(), phase) else {
            tracing::debug!(%address, "no room for a connection");
            continue;
        };
        let connection = Arc::clone(place.connection());
        let (served, held) = (attend(stream, Arc::clone(&connection)), held.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = served => {}
                () = connection.closing() => tracing::debug!(%address, "a connection was closed"),
            }
            drop((place, held));
        });
    }
    drop((listener, held));
    loop {
        tokio::select! {
            _ = ended.recv() => return, // no task sends: it returns when the last connection has ended
            _ = look.tick() => clients.close_overdue(),
        }
    }
}

/// Without this, a head and a body in two segments cost 40 ms per call (delayed acknowledgement).
pub(crate) fn send_at_once(stream: &TcpStream) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY on a connection");
    }
}

/// Serves one connection to its end.
async fn attend<S: Idle>(
    mut stream: S,
    connection: Arc<Connection>,
    routes: Router,
    mut stop: watch::Receiver<bool>,
) {
    loop {
        let said = tokio::select! {
            biased; // a request that came before the stop is answered
            said = stream.readable() => said,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        if said.is_err() {
            return;
        }
        // Boxed, so that the task stays small while the connection is idle.
        let talk = converse(stream, &connection, routes.clone(), stop.clone());
        match Box::pin(talk).await {
            Some(silent) => stream = silent,
            None => return,
        }
    }
}

/// Answers until the connection is idle, and returns it; `None` if the connection has ended.
pub(crate) async fn converse<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    connection: &Arc<Connection>,
    routes: Router,
    mut stop: watch::Receiver<bool>,
) -> Option<S> {
    let mut stop = pin!(async move {
        let _ = stop.wait_for(|stop| *stop).await;
    });
    let (mut stream, mut read_ahead, mut is_stopped) = (stream, Bytes::new(), false);
    loop {
        // If the client sent more than was answered, hyper keeps the connection to the end.
        let may_rest = read_ahead.is_empty();
        let may_rest = |seen: &Progress| may_rest && seen.stays_for.load(Ordering::Acquire) == 0;
        let progress = Progress::begin(connection)?;
        let seen = Arc::clone(&progress);
        let answer = service_fn(|request| answer(Exchange::begin(&seen), &routes, request));
        let socket =
            Observed { socket: TokioIo::new(stream), read_ahead, progress: Arc::clone(&progress) };
        let mut http = http1::Builder::new();
        let mut connection = http
            .max_header_size(LONGEST_HEAD)
            .max_headers(MOST_HEADERS)
            .serve_connection(socket, answer);
        let ended = awake(|context| {
            let mut poll = Pin::new(&mut connection).poll(context);
            if poll.is_pending() && !is_stopped && stop.as_mut().poll(context).is_ready() {
                is_stopped = true;
                Pin::new(&mut connection).graceful_shutdown();
                poll = Pin::new(&mut connection).poll(context);
            }
            match poll {
                Poll::Pending if progress.is_at_rest() && (is_stopped || may_rest(&progress)) => {
                    Poll::Ready(None)
                }
                poll => poll.map(Some),
            }
        });
        if let Some(ended) = ended.await {
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection broke");
            }
            return None;
        }
        let parts = connection.into_parts();
        stream = parts.io.socket.into_inner();
        read_ahead = parts.read_buf;
        if read_ahead.is_empty() || is_stopped {
            return Some(stream);
        }
    }
}

#[cfg(test)]
mod tests;
