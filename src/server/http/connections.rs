//! Connections: one for each agent of the cluster, and nearly all of them idle at any time.
//!
//! hyper holds 16 KiB of buffers for each connection that it has. So it has one only from the first
//! byte of a request until everything is answered. In between a connection is a socket and a small
//! task.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use axum::Router;
use axum::serve::Listener;
use bytes::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::http::bell::awake;
use crate::http::exchange::{Observed, Progress, answer};
use crate::http::listener_limits::{Clients, Connection, ListenerLimits, open_files};
use crate::http::tls::{Handshake, Idle, shake_hands};

/// Longest head of a request. kube-scheduler and agents send hundreds of bytes, browsers thousands.
const LONGEST_HEAD: usize = 64 << 10;

/// Most headers of a request. The API server names each group of a user in one of its own.
const MOST_HEADERS: usize = 512;

/// Limits of a listener. It may use `part` of 64 parts of the files that this process may open.
pub(crate) fn limits(connections: usize, bytes: usize, part: usize) -> ListenerLimits {
    let most = open_files().map_or(usize::MAX, |files| (files / 64).saturating_mul(part));
    if most < connections {
        tracing::warn!(
            connections,
            possible = most,
            "the limit of open files allows fewer connections than this port takes: raise the hard limit of the container runtime (`ulimit -Hn`)"
        );
    }
    ListenerLimits::new(connections.min(most).max(1), bytes)
}

/// What each connection of a listener needs.
struct Port {
    handshake: Option<Handshake>,
    clients: Arc<Clients>,
    routes: Router,
    stop: watch::Receiver<bool>,
}

/// Serves every client until `stop`, and then those that still wait for an answer. Without a
/// handshake in plain text.
pub(crate) async fn serve(
    mut listener: TcpListener,
    handshake: Option<Handshake>,
    routes: Router,
    limits: ListenerLimits,
    mut stop: watch::Receiver<bool>,
) {
    let clients = Clients::new(limits);
    // Where clients must show a certificate, they are admitted once they have.
    let arriving = match handshake.as_ref().is_some_and(Handshake::is_proof) {
        true => Clients::new(Handshake::limits(limits)),
        false => Arc::clone(&clients),
    };
    let routes = routes.with_state(()); // made once, not per connection
    let port = Arc::new(Port { handshake, clients, routes, stop: stop.clone() });
    let mut served = JoinSet::new();
    loop {
        let (stream, address) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            Some(_) = served.join_next() => continue,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        send_at_once(&stream);
        match arriving.admit(address.ip()) {
            Some(connection) => _ = served.spawn(Arc::clone(&port).meet(stream, connection)),
            None => tracing::debug!(%address, "no room for a connection"),
        }
    }
    drop(listener);
    while served.join_next().await.is_some() {}
}

impl Port {
    async fn meet(self: Arc<Self>, stream: TcpStream, connection: Arc<Connection>) {
        let Some(handshake) = &self.handshake else { return self.attend(stream, connection).await };
        let shaken = timeout(
            connection.limits().handshake,
            connection.unless_closed(shake_hands(handshake, stream, &connection)),
        );
        // Boxed, so that the task stays small while the connection is idle.
        let Ok(Some(Some(stream))) = Box::pin(shaken).await else { return };
        if let Some(connection) = self.clients.admit_proven(connection) {
            self.attend(Box::new(stream), connection).await;
        }
    }

    async fn attend(&self, stream: impl Idle, connection: Arc<Connection>) {
        let talk = pin!(attend(stream, &connection, &self.routes, self.stop.clone()));
        connection.unless_closed(talk).await;
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
    connection: &Arc<Connection>,
    routes: &Router,
    mut stop: watch::Receiver<bool>,
) {
    let mut read_ahead = Bytes::new();
    loop {
        if read_ahead.is_empty() {
            read_ahead = Bytes::new(); // frees the buffer that it is a part of
            let said = tokio::select! {
                biased; // a request that came before the stop is answered
                said = timeout(connection.limits().idle, stream.readable()) => said,
                _ = stop.wait_for(|stop| *stop) => return,
            };
            if !matches!(said, Ok(Ok(()))) {
                return;
            }
        }
        // Boxed, so that the task stays small while the connection is idle.
        let talk = converse(stream, read_ahead, connection, routes, stop.clone());
        match Box::pin(talk).await {
            Some(silent) => (stream, read_ahead) = silent,
            None => return,
        }
    }
}

/// Answers until the connection is idle, and returns it, with what was read and is not answered;
/// `None` if the connection has ended.
pub(crate) async fn converse<S: Idle>(
    stream: S,
    read_ahead: Bytes,
    connection: &Arc<Connection>,
    routes: &Router,
    mut stop: watch::Receiver<bool>,
) -> Option<(S, Bytes)> {
    let mut stop = pin!(stop.wait_for(|stop| *stop));
    let mut is_stopped = false;
    let progress = Progress::begin(connection, read_ahead.len())?;
    let answer = service_fn(|request| answer(Arc::clone(&progress), routes, request));
    let (socket, stalled) = (TokioIo::new(stream), None);
    let socket = Observed { socket, read_ahead, progress: Arc::clone(&progress), stalled };
    let mut talk = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(connection.limits().head)
        .max_header_size(LONGEST_HEAD)
        .max_headers(MOST_HEADERS)
        .serve_connection(socket, answer);
    let ended = awake(|context| {
        let mut poll = Pin::new(&mut talk).poll(context);
        if poll.is_pending() && !is_stopped && stop.as_mut().poll(context).is_ready() {
            is_stopped = true;
            Pin::new(&mut talk).graceful_shutdown();
            poll = Pin::new(&mut talk).poll(context);
        }
        match poll {
            Poll::Pending if progress.is_at_rest(is_stopped) => Poll::Ready(None),
            poll => poll.map(Some),
        }
    });
    match ended.await {
        None if is_stopped => None,
        None => {
            let parts = talk.into_parts();
            let (stream, unread) = (parts.io.socket.into_inner(), parts.io.read_ahead);
            // hyper also rests between many requests at once, before it has read all of them.
            let read_ahead = match unread.is_empty() {
                true => parts.read_buf,
                false => [parts.read_buf, unread].concat().into(),
            };
            Some((stream, read_ahead))
        }
        Some(ended) => {
            let _ = ended.inspect_err(|error| tracing::debug!(%error, "a connection broke"));
            None
        }
    }
}

#[cfg(test)]
mod tests;
