//! One request and its answer in hyper: whether hyper has more to do, and what is held for them.

use std::convert::Infallible;
use std::io;
use std::io::IoSlice;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::{Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::time::{Sleep, sleep};
use tower::ServiceExt;
use tower_http::timeout::DeadlineBody;

use crate::http::listener_limits::Connection;
use crate::http::respond::error_body;
use crate::http::tls::Idle;

/// What hyper holds for each connection. More is counted as it grows.
const BUFFERS: usize = 16 << 10;

/// Bytes that the session of TLS may keep of a connection that is idle, such as a change of its key.
const LITTLE: usize = 1 << 10;

/// Overhead per piece of a body. A body may come in pieces of one byte.
const PIECE: usize = 64;

/// The address of the client, an extension of each request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerAddress(pub(crate) IpAddr);

/// What hyper still has to do on a connection, as seen from outside, and the bytes held for it.
pub(crate) struct Progress {
    connection: Arc<Connection>,
    /// Whether hyper may wait for more of a request: bytes have come that may begin a head, or a body
    /// was dropped before its end.
    has_begun: AtomicBool,
    /// Whether bytes were written and not flushed since.
    is_unflushed: AtomicBool,
    /// Whether there was no room for the body of the request.
    is_over: AtomicBool,
    /// Bytes counted for hyper's buffers.
    buffers: AtomicUsize,
}

/// Owners of a [`Progress`] beside its open requests: the conversation, and its socket.
const OWNERS: usize = 2;

impl Progress {
    /// `None` if there is no room for another conversation, of which `read_ahead` bytes were read.
    pub(crate) fn begin(connection: &Arc<Connection>, read_ahead: usize) -> Option<Arc<Self>> {
        let buffers = BUFFERS.max(read_ahead);
        connection.hold(buffers).then(|| {
            Arc::new(Self {
                connection: Arc::clone(connection),
                has_begun: (read_ahead > 0).into(),
                is_unflushed: false.into(),
                is_over: false.into(),
                buffers: buffers.into(),
            })
        })
    }

    /// Whether a request is not answered, or hyper does not have its whole answer yet.
    fn is_under_way(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > OWNERS
    }

    /// Whether every request is answered, the answer is on its way, and nothing more follows; or may
    /// not follow, because the service `is_stopped`. Called when hyper waits.
    pub(crate) fn is_at_rest(self: &Arc<Self>, is_stopped: bool) -> bool {
        let is_under_way = self.is_under_way();
        fence(Ordering::Acquire); // what open requests noted before they ended
        let is_unflushed = self.is_unflushed.load(Ordering::Acquire);
        let has_begun = self.has_begun.load(Ordering::Acquire);
        !(is_under_way || is_unflushed || has_begun && !is_stopped)
    }

    /// Counts the growth of what is read and not answered. Returns whether there is room.
    fn reads_into(&self, bytes: usize) -> bool {
        let more = bytes.saturating_sub(self.buffers.load(Ordering::Acquire));
        let is_room = more == 0 || self.connection.hold(more);
        if is_room {
            self.buffers.fetch_add(more, Ordering::AcqRel);
        }
        is_room
    }

    /// The answer to send: `overloaded` if there is no room for the request or the answer. A stream
    /// has one message at a time, and is not counted.
    fn given(&self, response: Response<Body>) -> Response<Body> {
        let length = response.body().size_hint().exact();
        self.connection.set_at_work(length.is_none());
        let length = usize::try_from(length.unwrap_or(0)).unwrap_or(usize::MAX);
        let is_over = self.is_over.load(Ordering::Acquire);
        if is_over || !self.connection.hold_answer(length) { overloaded() } else { response }
    }

    fn flushed(self: &Arc<Self>) {
        if self.is_unflushed.swap(false, Ordering::AcqRel) && !self.is_under_way() {
            self.connection.hold_only(self.buffers.load(Ordering::Acquire));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.connection.hold_only(0);
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

/// Answers a request. It is open until it is answered and both bodies are dropped, which share
/// `progress`.
pub(crate) async fn answer(
    progress: Arc<Progress>,
    routes: &Router,
    request: Request<Incoming>,
) -> Result<Response<impl HttpBody<Data = Bytes, Error = axum::Error> + use<>>, Infallible> {
    let connection = &progress.connection;
    progress.has_begun.store(false, Ordering::Release);
    progress.is_over.store(false, Ordering::Release);
    connection.set_at_work(request.body().is_end_stream());
    let mut request = request.map(|body| {
        let body = RequestBody { body, is_read: false, progress: Arc::clone(&progress) };
        Body::new(DeadlineBody::new(connection.limits().body, body))
    });
    request.extensions_mut().insert(PeerAddress(connection.address));
    if let Some(peer) = connection.peer.get() {
        request.extensions_mut().insert(peer.clone());
    }
    let response = routes.clone().oneshot(request).await?;
    let response = progress.given(response);
    // hyper drops the body when it has all of it.
    Ok(response.map(|body| body.inspect_frame(move |_| _ = &progress)))
}

/// The body of a request.
struct RequestBody {
    body: Incoming,
    is_read: bool,
    progress: Arc<Progress>,
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if !self.is_end_stream() {
            self.progress.has_begun.store(true, Ordering::Release);
        }
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
        if matches!(poll, Poll::Ready(None)) {
            self.is_read = true;
            self.progress.connection.set_at_work(true);
        }
        if let Poll::Ready(Some(Ok(frame))) = &poll
            && let Some(piece) = frame.data_ref()
            && !self.progress.connection.hold(piece.len() + PIECE)
        {
            self.progress.is_over.store(true, Ordering::Release);
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

/// A socket that notes what hyper reads and writes, and breaks when the client takes nothing of an
/// answer for too long. Bytes that were read before come first.
pub(crate) struct Observed<S> {
    pub(crate) socket: TokioIo<S>,
    pub(crate) read_ahead: Bytes,
    pub(crate) progress: Arc<Progress>,
    pub(crate) stalled: Option<Pin<Box<Sleep>>>,
}

impl<S: Idle> Observed<S> {
    fn socket(&mut self) -> Pin<&mut TokioIo<S>> {
        Pin::new(&mut self.socket)
    }

    /// The same, or an error if the socket has taken nothing for too long.
    fn in_time<T>(
        &mut self,
        poll: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.stalled = None;
            return poll;
        }
        let limit = self.progress.connection.limits().answer;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

fn too_many_bytes() -> Poll<io::Result<()>> {
    Poll::Ready(Err(io::Error::other("too many bytes are held")))
}

impl<S: Idle> Read for Observed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut room: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.read_ahead.is_empty() {
            let part = self.read_ahead.len().min(room.remaining());
            room.put_slice(&self.read_ahead.split_to(part));
            return Poll::Ready(Ok(()));
        }
        let most = room.remaining();
        if !self.progress.reads_into(most) {
            return too_many_bytes();
        }
        let poll = self.socket().poll_read(context, room);
        // A client that sends much of a record, and never its end, has begun a head that must end.
        let kept = self.socket.inner_mut().kept(poll.is_ready());
        let is_kept = kept > LITTLE;
        if is_kept && !self.progress.reads_into(most.max(BUFFERS) + kept) {
            return too_many_bytes();
        }
        if (poll.is_ready() || is_kept) && !self.progress.is_under_way() {
            self.progress.has_begun.store(true, Ordering::Release);
        }
        poll
    }
}

impl<S: Idle> Write for Observed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.progress.is_unflushed.store(true, Ordering::Release);
        let poll = self.socket().poll_write(context, bytes);
        self.in_time(poll, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.progress.is_unflushed.store(true, Ordering::Release);
        let poll = self.socket().poll_write_vectored(context, parts);
        self.in_time(poll, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = self.socket().poll_flush(context);
        if matches!(poll, Poll::Ready(Ok(()))) {
            self.progress.flushed();
        }
        self.in_time(poll, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket().poll_shutdown(context)
    }
}
