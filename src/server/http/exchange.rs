//! One request and its answer in hyper: how far both are, and what is held for them.

use std::convert::Infallible;
use std::io;
use std::io::IoSlice;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::{Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tower::ServiceExt;

use crate::server::http::limits::{Connection, Phase};
use crate::server::http::respond::error_body;

/// Bytes from which a body is long: several times what an agent sends between two lists of processes.
const LONG: u64 = 32 << 10;

/// For how many further requests hyper keeps a connection after a long one.
pub(crate) const STAYS_FOR: usize = 16;

/// What hyper holds for each connection. More is counted as it grows.
const BUFFERS: usize = 16 << 10;

/// Overhead per piece of a body. A body may come in pieces of one byte.
const PIECE: usize = 64;

/// The client makes progress when it has taken this many bytes of an answer.
const PROGRESS: usize = 64 << 10;

/// The address of the client, an extension of each request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerAddress(pub(crate) IpAddr);

/// What hyper still has to do on a connection, as seen from outside, and the bytes held for it.
pub(crate) struct Progress {
    connection: Arc<Connection>,
    /// Requests that are not answered, or whose answer the client has not taken yet.
    under_way: AtomicUsize,
    /// Whether bytes were written and not flushed since.
    is_unflushed: AtomicBool,
    /// Whether the body of a request was dropped early: hyper may still have to read it.
    is_cut: AtomicBool,
    /// For how many more requests hyper keeps the connection, whatever their length.
    pub(crate) stays_for: AtomicUsize,
    /// Whether there was no room for the body of the request.
    is_over: AtomicBool,
    /// Bytes counted for hyper's buffers.
    buffers: AtomicUsize,
    /// Bytes counted for the request.
    requested: AtomicUsize,
    /// Bytes counted for an answer that hyper does not have yet.
    pending: AtomicUsize,
    /// Bytes counted for answers that hyper has not yet written.
    unwritten: AtomicUsize,
    /// Bytes written since the last progress.
    written: AtomicUsize,
}

impl Progress {
    /// `None` if there is no room for another conversation.
    pub(crate) fn begin(connection: &Arc<Connection>) -> Option<Arc<Self>> {
        connection.hold(BUFFERS).then(|| {
            Arc::new(Self {
                connection: Arc::clone(connection),
                under_way: AtomicUsize::new(0),
                is_unflushed: AtomicBool::new(false),
                is_cut: AtomicBool::new(false),
                stays_for: AtomicUsize::new(0),
                is_over: AtomicBool::new(false),
                buffers: AtomicUsize::new(BUFFERS),
                requested: AtomicUsize::new(0),
                pending: AtomicUsize::new(0),
                unwritten: AtomicUsize::new(0),
                written: AtomicUsize::new(0),
            })
        })
    }

    /// Whether every request is answered, the answer is on its way, and nothing more follows.
    /// Called when hyper waits, which has read everything available by then.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.under_way.load(Ordering::Acquire) == 0
            && !self.is_unflushed.load(Ordering::Acquire)
            && !self.is_cut.load(Ordering::Acquire)
    }

    fn note(&self, body: &Incoming) {
        let is_long = body.size_hint().upper().is_none_or(|length| length > LONG);
        let left = self.stays_for.load(Ordering::Acquire).saturating_sub(1);
        self.stays_for.store(if is_long { STAYS_FOR } else { left }, Ordering::Release);
    }

    /// Counts the growth of hyper's read buffer. Returns whether there is room.
    fn reads_into(&self, bytes: usize) -> bool {
        let more = bytes.saturating_sub(self.buffers.load(Ordering::Acquire));
        let is_room = more == 0 || self.connection.hold(more);
        if is_room {
            self.buffers.fetch_add(more, Ordering::AcqRel);
        }
        is_room
    }

    /// Counts a piece of a body. Returns whether there is room.
    fn take_in(&self, piece: &Bytes) -> bool {
        let bytes = piece.len() + PIECE;
        let is_room = self.connection.hold(bytes);
        if is_room {
            self.requested.fetch_add(bytes, Ordering::AcqRel);
        } else {
            self.is_over.store(true, Ordering::Release);
        }
        is_room
    }

    /// Notes that bytes have come. On an idle connection they begin a head.
    fn head_begins(&self) {
        if self.connection.is_in(Phase::Idle) {
            self.connection.enter(Phase::Head);
        }
    }

    /// Ends the wait for the client's body.
    fn has_body(&self) {
        if self.connection.is_in(Phase::Body) {
            self.connection.enter(Phase::Work);
        }
    }

    /// The answer to send: `overloaded` if there is no room for the request or the answer.
    fn given(&self, response: Response<Body>) -> Response<Body> {
        self.connection.release(self.requested.swap(0, Ordering::AcqRel));
        let length = response.body().size_hint().exact().unwrap_or(0);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let held = if self.is_over.load(Ordering::Acquire) {
            None
        } else {
            self.connection.hold_answer(length)
        };
        self.connection.enter(Phase::Answer);
        match held {
            Some(bytes) => {
                self.pending.store(bytes, Ordering::Release);
                response
            }
            None => overloaded(),
        }
    }

    /// Notes that hyper has the answer or a further piece. Returns whether the piece has room.
    fn hand_over(&self, piece: usize) -> bool {
        let pending = self.pending.swap(0, Ordering::AcqRel);
        self.unwritten.fetch_add(pending, Ordering::AcqRel);
        if pending > 0 || piece == 0 {
            return true; // it was counted as a whole
        }
        let is_room = self.connection.hold(piece);
        if is_room {
            self.unwritten.fetch_add(piece, Ordering::AcqRel);
        }
        is_room
    }

    fn write(&self, poll: &Poll<io::Result<usize>>) {
        self.is_unflushed.store(true, Ordering::Release);
        if self.connection.is_in(Phase::Work) {
            return self.connection.enter(Phase::Answer);
        }
        if let Poll::Ready(Ok(bytes)) = poll
            && self.written.fetch_add(*bytes, Ordering::AcqRel) + bytes >= PROGRESS
            && self.connection.is_in(Phase::Answer)
        {
            self.written.store(0, Ordering::Release);
            self.connection.enter(Phase::Answer);
        }
    }

    fn flushed(&self) {
        self.is_unflushed.store(false, Ordering::Release);
        self.connection.release(self.unwritten.swap(0, Ordering::AcqRel));
        if self.connection.is_in(Phase::Answer) {
            self.written.store(0, Ordering::Release);
            let is_answered = self.under_way.load(Ordering::Acquire) == 0;
            self.connection.enter(if is_answered { Phase::Idle } else { Phase::Work });
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let held = [&self.buffers, &self.requested, &self.pending, &self.unwritten];
        self.connection.release(held.iter().map(|held| held.load(Ordering::Acquire)).sum());
    }
}

/// The answer if no more bytes can be held. It is sent so that the client can try again.
fn overloaded() -> Response<Body> {
    let error = "too many bytes are on their way to and from gpupack: try again later";
    let body = error_body(error);
    let head = [
        (header::CONTENT_TYPE, "application/json"),
        (header::CONNECTION, "close"),
        (header::RETRY_AFTER, "1"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (StatusCode::SERVICE_UNAVAILABLE, head, body).into_response()
}

/// An open request: it lives until the request is answered and both bodies are dropped.
pub(crate) struct Exchange(Arc<Progress>);

impl Exchange {
    pub(crate) fn begin(progress: &Arc<Progress>) -> Self {
        progress.under_way.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(progress))
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}

pub(crate) async fn answer(
    exchange: Exchange,
    routes: &Router,
    request: Request<Incoming>,
) -> Result<Response<Answer>, Infallible> {
    let progress = &exchange.0;
    progress.note(request.body());
    progress.is_over.store(false, Ordering::Release);
    let has_body = !request.body().is_end_stream();
    progress.connection.enter(if has_body { Phase::Body } else { Phase::Work });
    let requested = Exchange::begin(progress);
    let mut request =
        request.map(|body| Body::new(RequestBody { body, is_read: false, exchange: requested }));
    request.extensions_mut().insert(PeerAddress(progress.connection.address));
    if let Some(peer) = progress.connection.peer() {
        request.extensions_mut().insert(peer.clone());
    }
    let response = routes.clone().oneshot(request).await?;
    let response = progress.given(response);
    Ok(response.map(|body| Answer { body, exchange }))
}

/// The body of a request.
struct RequestBody {
    body: Incoming,
    is_read: bool,
    exchange: Exchange,
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if !self.is_end_stream() {
            self.exchange.0.is_cut.store(true, Ordering::Release);
        }
        self.exchange.0.has_body();
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let poll = Pin::new(&mut self.body).poll_frame(context);
        self.is_read |= matches!(poll, Poll::Ready(None));
        if let Poll::Ready(Some(Ok(frame))) = &poll
            && let Some(piece) = frame.data_ref()
            && !self.exchange.0.take_in(piece)
        {
            return Poll::Ready(Some(Err(axum::Error::new("too many bytes are held"))));
        }
        poll.map_err(axum::Error::new)
    }

    fn is_end_stream(&self) -> bool {
        self.is_read || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer; hyper drops it when it has all of it.
pub(crate) struct Answer {
    body: Body,
    exchange: Exchange,
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.exchange.0.hand_over(0);
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let poll = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &poll
            && !self.exchange.0.hand_over(frame.data_ref().map_or(0, Bytes::len))
        {
            return Poll::Ready(Some(Err(axum::Error::new("too many bytes are held"))));
        }
        poll
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A socket that records whether everything written is flushed. Bytes that were read before come
/// first.
pub(crate) struct Observed<S> {
    pub(crate) socket: TokioIo<S>,
    pub(crate) read_ahead: Bytes,
    pub(crate) progress: Arc<Progress>,
}

impl<S: Unpin> Observed<S> {
    fn socket(&mut self) -> Pin<&mut TokioIo<S>> {
        Pin::new(&mut self.socket)
    }
}

impl<S: AsyncRead + Unpin> Read for Observed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut room: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if self.read_ahead.is_empty() {
            if !self.progress.reads_into(room.remaining()) {
                return Poll::Ready(Err(io::Error::other("too many bytes are held")));
            }
            let poll = self.socket().poll_read(context, room);
            if matches!(poll, Poll::Ready(Ok(()))) {
                self.progress.head_begins();
            }
            return poll;
        }
        self.progress.head_begins(); // it came with the request before
        let part = self.read_ahead.len().min(room.remaining());
        room.put_slice(&self.read_ahead.split_to(part));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> Write for Observed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = self.socket().poll_write(context, bytes);
        self.progress.write(&poll);
        poll
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = self.socket().poll_write_vectored(context, parts);
        self.progress.write(&poll);
        poll
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = self.socket().poll_flush(context);
        if matches!(poll, Poll::Ready(Ok(()))) {
            self.progress.flushed();
        }
        poll
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket().poll_shutdown(context)
    }
}
