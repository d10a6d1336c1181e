//! A stand-in for kubelet that forwards ports of pods, and does nothing else: the API server reaches it as it
//! reaches kubelet.

use std::net::SocketAddr;
use std::sync::Arc;

use futures::{SinkExt, StreamExt};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_tungstenite::accept_hdr_async;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};

use crate::authority::Authority;

/// The protocol: the first byte of a message is its channel, of which each port has two.
const PROTOCOL: &str = "v4.channel.k8s.io";

/// The kubelet of one node.
pub(crate) struct Kubelet {
    /// Where it listens.
    pub(crate) port: u16,
    serving: JoinHandle<()>,
}

impl Kubelet {
    /// Forwards each port of each pod to this address.
    pub(crate) async fn forwarding_to(address: SocketAddr) -> Self {
        let pair = Authority::new().pair("kubelet");
        let chain = CertificateDer::from_pem_slice(pair.certificate.as_bytes());
        let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions of the provider")
            .with_no_client_auth()
            .with_single_cert(vec![chain.expect("a certificate")], key)
            .expect("they belong together");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        let _ended = forward(stream, address).await;
                    }
                });
            }
        });
        Self { port, serving }
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn forward(stream: TlsStream<TcpStream>, address: SocketAddr) -> Option<()> {
    let mut port = None;
    #[expect(clippy::result_large_err, reason = "the signature is tungstenite's")]
    let accepted = |request: &Request, mut response: Response| -> Result<Response, ErrorResponse> {
        let query = request.uri().query().unwrap_or_default();
        let values = query.split('&').filter_map(|part| part.strip_prefix("port="));
        port = values.filter_map(|value| value.parse::<u16>().ok()).next();
        let protocol = PROTOCOL.parse().expect("a value of a header");
        response.headers_mut().insert("sec-websocket-protocol", protocol);
        Ok(response)
    };
    let mut socket = accept_hdr_async(stream, accepted).await.ok()?;
    let [low, high] = port?.to_le_bytes();
    for channel in [0, 1] {
        socket.send(Message::binary(vec![channel, low, high])).await.ok()?;
    }
    let mut pod = TcpStream::connect(address).await.ok()?;
    let mut buffer = vec![0; 16 << 10];
    loop {
        tokio::select! {
            message = socket.next() => match message?.ok()? {
                Message::Binary(bytes) if bytes.first() == Some(&0) => {
                    pod.write_all(&bytes[1..]).await.ok()?;
                }
                Message::Close(_) => return None,
                _ => {}
            },
            read = pod.read(&mut buffer) => {
                let many = read.ok().filter(|many| *many > 0)?;
                let message = [&[0][..], &buffer[..many]].concat();
                socket.send(Message::binary(message)).await.ok()?;
            }
        }
    }
}
