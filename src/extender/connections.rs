//! Connections: one for each agent of the cluster, and nearly all of them idle at any moment.
//!
//! hyper holds 16 KiB of buffers for a connection as long as it has it. So it has one only from the first
//! byte of a request until everything is answered; in between a connection is a socket and a small task.
//! Whoever sends long requests, as kube-scheduler does, is not many: there hyper stays, since it has learnt to
//! read them in large pieces.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::{Request, Response};
use axum::serve::Listener;
use bytes::Bytes;
use futures::task::AtomicWaker;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tower::ServiceExt;

/// Bytes of a body from which a request is long: several times what an agent sends each second.
const LONG: u64 = 32 << 10;

/// For how many requests hyper stays after a long one.
const STAYS_FOR: usize = 16;

/// How long nothing may be said: the peer may have vanished without a word. Clients let go of idle connections
/// sooner, agents after 90 s.
const SILENT_FOR: Duration = Duration::from_secs(600);

/// Serves whoever connects until `stop`, and then whoever still waits for an answer.
pub(super) async fn serve(
    mut listener: TcpListener,
    routes: Router,
    mut stop: watch::Receiver<bool>,
) {
    let routes = routes.with_state(()); // made once, not with each connection
    let (held, mut ended) = mpsc::channel::<Infallible>(1);
    loop {
        let (stream, _) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        send_at_once(&stream);
        let (routes, stop, held) = (routes.clone(), stop.clone(), held.clone());
        tokio::spawn(async move {
            attend(stream, routes, stop).await;
            drop(held);
        });
    }
    drop((listener, held));
    let _ = ended.recv().await; // nobody sends: it returns when the last connection has ended
}

/// Without this a head and a body in two segments cost 40 ms per call (delayed acknowledgement).
pub(super) fn send_at_once(stream: &TcpStream) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY on a connection");
    }
}

/// Serves one connection to its end.
async fn attend(mut stream: TcpStream, routes: Router, mut stop: watch::Receiver<bool>) {
    loop {
        let said = tokio::select! {
            biased; // what was said before the end is answered
            said = timeout(SILENT_FOR, stream.readable()) => said,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        let Ok(Ok(())) = said else { return };
        // In a box, so that the task is small while nothing is said.
        match Box::pin(converse(stream, routes.clone(), stop.clone())).await {
            Some(silent) => stream = silent,
            None => return,
        }
    }
}

/// Answers what comes until nothing is under way, and gives the connection back; none where it has ended.
async fn converse(
    stream: TcpStream,
    routes: Router,
    mut stop: watch::Receiver<bool>,
) -> Option<TcpStream> {
    let mut stop = pin!(async move {
        let _ = stop.wait_for(|stop| *stop).await;
    });
    let (mut stream, mut read_ahead, mut is_stopped) = (stream, Bytes::new(), false);
    loop {
        // Whoever sent more than was answered is hyper's to the end.
        let is_sound = read_ahead.is_empty();
        let may_rest = |seen: &Progress| is_sound && seen.stays_for.load(Ordering::Acquire) == 0;
        let progress = Arc::<Progress>::default();
        let seen = Arc::clone(&progress);
        let answer = service_fn(|request| answer(Turn::begin(&seen), &routes, request));
        let socket =
            Observed { socket: TokioIo::new(stream), read_ahead, progress: Arc::clone(&progress) };
        let mut connection = http1::Builder::new().serve_connection(socket, answer);
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

/// How often something may call itself before others have their turn.
const MOST_TURNS: usize = 8;

/// Polls until there is nothing left to do. What calls itself has another turn at once, as happens with each
/// body: tokio would take that for work to share, and wake another thread for it.
async fn awake<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    let bell = Arc::<Bell>::default();
    let waker = Waker::from(Arc::clone(&bell));
    poll_fn(|context| {
        bell.task.register(context.waker());
        bell.has_rung.store(false, Ordering::SeqCst);
        for _ in 0..MOST_TURNS {
            bell.is_heard.store(true, Ordering::SeqCst);
            let polled = poll(&mut Context::from_waker(&waker));
            bell.is_heard.store(false, Ordering::SeqCst);
            if polled.is_ready() || !bell.has_rung.swap(false, Ordering::SeqCst) {
                return polled;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// Wakes a task, unless that is awake and will look whether it has rung.
#[derive(Default)]
struct Bell {
    task: AtomicWaker,
    is_heard: AtomicBool,
    has_rung: AtomicBool,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.has_rung.store(true, Ordering::SeqCst);
        if !self.is_heard.load(Ordering::SeqCst) {
            self.task.wake();
        }
    }
}

/// What hyper has to do on a connection, seen from outside.
#[derive(Default)]
struct Progress {
    /// Requests that are not yet answered, or whose answer is not yet taken.
    under_way: AtomicUsize,
    /// Whether something was written and not flushed since.
    is_unflushed: AtomicBool,
    /// Whether the body of a request was given up: hyper may still have to read it.
    is_cut: AtomicBool,
    /// For how many requests hyper stays, whatever they are.
    stays_for: AtomicUsize,
}

impl Progress {
    /// Whether everything that was asked is answered, the answer is on its way, and nothing more can come
    /// of it. Asked when hyper waits, which has read all there is then.
    fn is_at_rest(&self) -> bool {
        self.under_way.load(Ordering::Acquire) == 0
            && !self.is_unflushed.load(Ordering::Acquire)
            && !self.is_cut.load(Ordering::Acquire)
    }

    fn note(&self, body: &Incoming) {
        let is_long = body.size_hint().upper().is_none_or(|length| length > LONG);
        let left = self.stays_for.load(Ordering::Acquire).saturating_sub(1);
        self.stays_for.store(if is_long { STAYS_FOR } else { left }, Ordering::Release);
    }
}

/// A request under way: as long as it is not answered, or something of its bodies is left.
struct Turn(Arc<Progress>);

impl Turn {
    fn begin(progress: &Arc<Progress>) -> Self {
        progress.under_way.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(progress))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}

async fn answer(
    turn: Turn,
    routes: &Router,
    request: Request<Incoming>,
) -> Result<Response<Answer>, Infallible> {
    turn.0.note(request.body());
    let asked = Turn::begin(&turn.0);
    let request = request.map(|body| Body::new(Asked { body, is_read: false, turn: asked }));
    let response = routes.clone().oneshot(request).await?;
    Ok(response.map(|body| Answer { body, _turn: turn }))
}

/// The body of a request.
struct Asked {
    body: Incoming,
    is_read: bool,
    turn: Turn,
}

impl Drop for Asked {
    fn drop(&mut self) {
        if !self.is_end_stream() {
            self.turn.0.is_cut.store(true, Ordering::Release);
        }
    }
}

impl HttpBody for Asked {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let poll = Pin::new(&mut self.body).poll_frame(context);
        self.is_read |= matches!(poll, Poll::Ready(None));
        poll
    }

    fn is_end_stream(&self) -> bool {
        self.is_read || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer; hyper drops it when it has all of it.
struct Answer {
    body: Body,
    _turn: Turn,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A socket of which it is seen whether everything written is flushed. What was read of it before is read
/// first.
struct Observed {
    socket: TokioIo<TcpStream>,
    read_ahead: Bytes,
    progress: Arc<Progress>,
}

impl Observed {
    fn socket(&mut self) -> Pin<&mut TokioIo<TcpStream>> {
        Pin::new(&mut self.socket)
    }
}

impl Read for Observed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut room: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if self.read_ahead.is_empty() {
            return self.socket().poll_read(context, room);
        }
        let part = self.read_ahead.len().min(room.remaining());
        room.put_slice(&self.read_ahead.split_to(part));
        Poll::Ready(Ok(()))
    }
}

impl Write for Observed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.progress.is_unflushed.store(true, Ordering::Release);
        self.socket().poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.progress.is_unflushed.store(true, Ordering::Release);
        self.socket().poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = self.socket().poll_flush(context);
        if matches!(poll, Poll::Ready(Ok(()))) {
            self.progress.is_unflushed.store(false, Ordering::Release);
        }
        poll
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket().poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests;
