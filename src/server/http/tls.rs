//! How a listener talks with its clients over TLS, if it does.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::http::listener_limits::{Connection, ListenerLimits, PeerProof};
use runtime::certificates::{ClientCertificate, Tls};

/// Bytes that a handshake may take. rustls assembles a first message of up to 64 KiB, whose pieces
/// may come slowly.
const HANDSHAKE: usize = 72 << 10;

/// How often a handshake for which there is no room looks for some.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How a listener talks with its clients over TLS.
#[derive(Clone)]
pub struct Handshake {
    /// How clients know the listener.
    pub tls: watch::Receiver<Arc<Tls>>,
    pub clients: ShownCertificate,
}

impl Handshake {
    /// Whether it proves who the client is.
    pub(crate) fn is_proof(&self) -> bool {
        matches!(self.clients, ShownCertificate::Name(_))
    }

    /// The limits of clients that have not proven it yet: a quarter as many connections as `proven`.
    pub(crate) fn limits(proven: ListenerLimits) -> ListenerLimits {
        let connections = (proven.connections / 4).max(1);
        ListenerLimits { connections, bytes: connections * HANDSHAKE, ..proven }
    }
}

/// What the clients of a listener show.
#[derive(Clone)]
pub enum ShownCertificate {
    Nothing,
    /// Any certificate, or none: it is checked with each request.
    Anything,
    /// A certificate of the CA, which has at least one of these names.
    Name(Arc<[ServerName<'static>]>),
}

impl ShownCertificate {
    fn certificate(&self) -> ClientCertificate {
        match self {
            Self::Nothing => ClientCertificate::None,
            Self::Anything => ClientCertificate::Requested,
            Self::Name(_) => ClientCertificate::Required,
        }
    }
}

/// A connection that may be idle without being read from.
pub(crate) trait Idle: AsyncRead + AsyncWrite + Unpin + Send {
    /// Waits for bytes or the end.
    fn readable(&self) -> impl Future<Output = io::Result<()>> + Send;

    /// Bytes that were taken from the socket since something `is_read`, and are not read yet.
    fn kept(&mut self, is_read: bool) -> usize;
}

impl Idle for TcpStream {
    fn readable(&self) -> impl Future<Output = io::Result<()>> + Send {
        Self::readable(self)
    }

    fn kept(&mut self, _: bool) -> usize {
        0
    }
}

/// The first request may come with the end of the handshake: then it has been read from the socket.
impl Idle for Box<TlsStream<CountedSocket>> {
    async fn readable(&self) -> io::Result<()> {
        let (socket, session) = self.get_ref();
        if session.wants_read() { socket.stream.readable().await } else { Ok(()) }
    }

    fn kept(&mut self, is_read: bool) -> usize {
        let socket = self.get_mut().0;
        if is_read {
            socket.taken = 0;
        }
        socket.taken
    }
}

/// A socket that counts what is read. rustls keeps up to 64 KiB of messages and records until their
/// end comes, and does not say how much.
pub(crate) struct CountedSocket {
    stream: TcpStream,
    taken: usize,
}

impl CountedSocket {
    fn stream(&mut self) -> Pin<&mut TcpStream> {
        Pin::new(&mut self.stream)
    }
}

impl AsyncRead for CountedSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = room.filled().len();
        let poll = self.stream().poll_read(context, room);
        self.taken += room.filled().len() - before;
        poll
    }
}

impl AsyncWrite for CountedSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stream().poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream().poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_shutdown(context)
    }
}

/// The handshake of a client, and what is known of it; `None` if it fails.
pub(crate) async fn shake_hands(
    Handshake { tls, clients }: &Handshake,
    stream: TcpStream,
    connection: &Connection,
) -> Option<TlsStream<CountedSocket>> {
    let tls = Arc::clone(&tls.borrow());
    let Some(config) = tls.server(clients.certificate()).map(Arc::clone) else {
        tracing::error!("the certificates are not enough for this listener");
        return None;
    };
    // Room appears when others of its address have stalled. It waits until the handshake times out.
    while !connection.hold(HANDSHAKE) {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let accepted = TlsAcceptor::from(config).accept(CountedSocket { stream, taken: 0 }).await;
    let stream = match accepted {
        Ok(stream) => stream,
        Err(error) => {
            tracing::debug!(%error, "no TLS handshake");
            return None;
        }
    };
    // What came after the handshake may have been read with its end.
    connection.hold_only(stream.get_ref().0.taken);
    let shown = stream.get_ref().1.peer_certificates();
    let (chain, clock) = (shown.unwrap_or_default().into(), connection.clock());
    let mut peer = PeerProof { chain, names: Arc::default(), tls, at: clock.now(), clock };
    if let ShownCertificate::Name(names) = clients {
        // Also of a resumed session, whose certificate rustls does not check again.
        let own = names.iter().filter(|name| peer.tls.accepts(&peer.chain, name));
        peer.names = own.cloned().collect();
        if peer.names.is_empty() {
            tracing::warn!(address = %connection.address, "a client shows a certificate of another name, or one that has ended");
            return None;
        }
    }
    if !peer.chain.is_empty() {
        let _ = connection.peer.set(peer); // there is one handshake
    }
    Some(stream)
}

#[cfg(test)]
mod tests {
    use rustls::ServerConfig;
    use rustls::server::ResolvesServerCertUsingSni;
    use tokio::net::TcpListener;

    use super::*;
    use crate::http::listener_limits::{Clients, ListenerLimits};

    #[tokio::test]
    async fn handshakes_count_the_bytes_that_they_may_use() {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(ResolvesServerCertUsingSni::new()));
        let tls = watch::Sender::new(Arc::new(Tls::of_server(config)));
        let handshake = Handshake { tls: tls.subscribe(), clients: ShownCertificate::Nothing };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let clients = Clients::new(ListenerLimits::new(8, 2 * HANDSHAKE));
        let (mut silent, mut attending) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            silent.push(TcpStream::connect(listener.local_addr().unwrap()).await.unwrap());
            let (stream, from) = listener.accept().await.unwrap();
            let connection = clients.admit(from.ip()).unwrap();
            let handshake = handshake.clone();
            attending.push(tokio::spawn(async move {
                assert!(shake_hands(&handshake, stream, &connection).await.is_none());
            }));
            tokio::task::yield_now().await;
        }
        assert_eq!(clients.held(), (3, 2 * HANDSHAKE), "no room for the third");
        drop(silent.drain(..2));
        while clients.held() != (1, HANDSHAKE) {
            tokio::time::sleep(LOOK_EVERY / 50).await; // until the client has room
        }
        drop(silent);
        for task in attending {
            task.await.unwrap();
        }
        assert_eq!(clients.held(), (0, 0));
    }
}
