//! Serves TLS with a certificate that is read again when its files change.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use crate::server::http::connections::{Rest, accept, converse, limits};
use crate::server::http::limits::{Clients, Connection, LOOK_EVERY, Phase};

/// Most connections at a time. An API server keeps a handful. The others are idle ones of unrelated
/// clients, of which the oldest give way.
const MAX_CONNECTIONS: usize = 4_096;

/// Most bytes held for all connections together. Each counts 16 KiB, and one review at most 8 MiB.
/// This is enough for several reviews beside 2,000 connections. Together with the memory for
/// working on reviews it stays far below the memory limit of the shipped manifest.
const MAX_IN_FLIGHT: usize = 60 << 20;

/// Bytes that a handshake may take. rustls assembles a first message of up to 64 KiB, whose pieces
/// may come slowly.
const HANDSHAKE: usize = 72 << 10;

/// How long open requests may delay the shutdown.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("cannot read `{}`: {fault}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        fault: io::Error,
    },
    /// Not PEM, or PEM without the expected item.
    #[error("`{}` holds no {kind} in PEM: {fault}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// The expected item.
        kind: &'static str,
        /// The error of the PEM reader.
        fault: rustls::pki_types::pem::Error,
    },
    /// Certificate and key do not match, or are of an unknown kind.
    #[error("certificate and key cannot be used together: {0}")]
    Pair(#[from] rustls::Error),
}

/// The files of certificate and key, and how often they are checked for changes.
#[derive(Clone, Debug)]
pub struct CertificateFiles {
    /// Certificate chain in PEM, the server's own first.
    pub certificate: PathBuf,
    /// Private key in PEM.
    pub key: PathBuf,
    /// How often both are read again.
    pub read_every: Duration,
}

/// Both files as read.
#[derive(PartialEq, Eq)]
struct Pair {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl CertificateFiles {
    fn read(&self) -> Result<Pair, CertificateError> {
        let read = |path: &PathBuf| {
            std::fs::read(path)
                .map_err(|fault| CertificateError::File { path: path.clone(), fault })
        };
        Ok(Pair { certificate: read(&self.certificate)?, key: read(&self.key)? })
    }

    /// The TLS configuration of a pair.
    fn checked(&self, pair: &Pair) -> Result<Arc<ServerConfig>, CertificateError> {
        let pem = |path: &PathBuf, kind| {
            let path = path.clone();
            move |fault| CertificateError::Pem { path, kind, fault }
        };
        let missing = || Err(rustls::pki_types::pem::Error::NoItemsFound);
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pair.certificate).collect();
        let chain = chain.and_then(|chain| if chain.is_empty() { missing() } else { Ok(chain) });
        let chain = chain.map_err(pem(&self.certificate, "certificate"))?;
        let key =
            PrivateKeyDer::from_pem_slice(&pair.key).map_err(pem(&self.key, "private key"))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        Ok(Arc::new(config))
    }
}

/// A listener with a valid certificate.
pub struct TlsService {
    listener: TcpListener,
    files: CertificateFiles,
    seen: Pair,
    config: watch::Sender<Arc<ServerConfig>>,
}

impl TlsService {
    /// Reads the certificate for the first time.
    ///
    /// # Errors
    /// [`CertificateError`]: without a certificate nothing is served.
    pub fn new(listener: TcpListener, files: CertificateFiles) -> Result<Self, CertificateError> {
        let seen = files.read()?;
        let config = watch::Sender::new(files.checked(&seen)?);
        Ok(Self { listener, files, seen, config })
    }

    /// Serves HTTP/1.1 until `stop`; answers open requests first, for at most 10 s.
    pub async fn serve(self, router: Router, stop: watch::Receiver<bool>) {
        let Self { listener, files, seen, config } = self;
        let current = config.subscribe();
        let reading = tokio::spawn(follow(files, seen, config));
        let clients = Clients::new(limits(MAX_CONNECTIONS, MAX_IN_FLIGHT, 48));
        let mut stopped = stop.clone();
        let of_each = stop.clone();
        let attend = move |stream, connection| {
            let acceptor = TlsAcceptor::from(Arc::clone(&current.borrow()));
            attend(acceptor, stream, connection, router.clone(), of_each.clone())
        };
        let late = async move {
            let _ = stopped.wait_for(|stop| *stop).await;
            tokio::time::sleep(END_LIMIT).await;
        };
        tokio::select! {
            () = accept(listener, (clients, Phase::Handshake), stop, attend) => {}
            () = late => tracing::warn!("open requests were cut off"),
        }
        reading.abort();
    }
}

/// Serves one connection to its end.
async fn attend(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    connection: Arc<Connection>,
    router: Router,
    stop: watch::Receiver<bool>,
) {
    // Room appears when others of its address have stalled. It waits until the handshake times out.
    while !connection.hold(HANDSHAKE) {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let accepted = acceptor.accept(stream).await;
    connection.release(HANDSHAKE);
    match accepted {
        Ok(stream) => {
            connection.enter(Phase::Idle);
            Box::pin(converse(stream, &connection, router, stop, Rest::Never)).await;
        }
        Err(error) => tracing::debug!(%error, "no TLS handshake"),
    }
}

/// Reads the files again periodically. A pair that is not valid, for instance because only one file
/// is written yet, leaves the last valid one in use.
async fn follow(files: CertificateFiles, mut seen: Pair, config: watch::Sender<Arc<ServerConfig>>) {
    loop {
        tokio::time::sleep(files.read_every).await;
        let pair = match files.read() {
            Ok(pair) if pair == seen => continue,
            Ok(pair) => pair,
            Err(error) => {
                tracing::warn!(%error, "the old certificate stays in use");
                continue;
            }
        };
        match files.checked(&pair) {
            Ok(checked) => {
                config.send_replace(checked);
                tracing::info!(file = %files.certificate.display(), "certificate read again");
            }
            Err(error) => tracing::warn!(%error, "the old certificate stays in use"),
        }
        seen = pair;
    }
}

#[cfg(test)]
mod tests {
    use rustls::server::ResolvesServerCertUsingSni;

    use super::*;
    use crate::kube_api::admission::review::MOST_REVIEW_BYTES;
    use crate::server::api::webhook::{LARGE_AT_ONCE, LARGE_REVIEW, MAX_BODY_BYTES, THREADS};
    use crate::server::http::limits::Limits;

    /// Half of the memory limit in `deploy/webhook.yaml`. Idle it takes about 15 MiB.
    const MOST_BYTES: usize = 128 << 20;

    /// Bytes that one byte of a small review may take: `{"a":` is an object, which takes 700.
    const OF_A_BYTE: usize = 700 / 5;

    #[test]
    fn concurrent_requests_use_at_most_half_of_the_memory_limit() {
        let large = LARGE_AT_ONCE * (MOST_REVIEW_BYTES + MAX_BODY_BYTES);
        // Each other thread works on a small review, or assembles a body from its pieces.
        let other = MAX_BODY_BYTES.max(LARGE_REVIEW * OF_A_BYTE);
        let most = MAX_IN_FLIGHT + large + (THREADS - LARGE_AT_ONCE) * other;
        assert!(most <= MOST_BYTES, "{} MiB", most >> 20);
        let connections = (MAX_IN_FLIGHT - MAX_BODY_BYTES) / (16 << 10);
        assert!(connections >= 2_000, "{connections} beside a review");
    }

    #[tokio::test]
    async fn handshakes_count_the_bytes_that_they_may_use() {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(ResolvesServerCertUsingSni::new()));
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let clients = Clients::new(Limits::new(8, 2 * HANDSHAKE));
        let (_stop, stopped) = watch::channel(false);
        let (mut silent, mut attending) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            silent.push(TcpStream::connect(listener.local_addr().unwrap()).await.unwrap());
            let (stream, from) = listener.accept().await.unwrap();
            let place = clients.admit(from.ip(), Phase::Handshake).unwrap();
            let (acceptor, stopped) = (acceptor.clone(), stopped.clone());
            attending.push(tokio::spawn(async move {
                let connection = Arc::clone(place.connection());
                attend(acceptor, stream, connection, Router::new(), stopped).await;
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
