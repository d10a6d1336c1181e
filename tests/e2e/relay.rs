//! A network between one client and the API server that can be cut and slowed down.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Passes connections on, byte by byte.
pub(crate) struct Relay {
    /// Where it listens.
    pub(crate) address: SocketAddr,
    is_cut: watch::Sender<bool>,
    delay_ms: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Relay {
    /// A sound network in front of `to`.
    pub(crate) async fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it listens");
        let is_cut = watch::Sender::new(false);
        let delay_ms = Arc::new(AtomicU64::new(0));
        let task = tokio::spawn(serve(listener, to, is_cut.subscribe(), Arc::clone(&delay_ms)));
        Self { address, is_cut, delay_ms, task }
    }

    /// Cuts all connections, and accepts none; or no longer.
    pub(crate) fn cut(&self, is_cut: bool) {
        self.is_cut.send_replace(is_cut);
    }

    /// Delays each packet, in both directions.
    pub(crate) fn delay(&self, time: Duration) {
        self.delay_ms.store(u64::try_from(time.as_millis()).expect("short"), Relaxed);
    }
}

async fn serve(
    listener: TcpListener,
    to: SocketAddr,
    is_cut: watch::Receiver<bool>,
    delay_ms: Arc<AtomicU64>,
) {
    while let Ok((from, _)) = listener.accept().await {
        if *is_cut.borrow() {
            continue;
        }
        let (mut is_cut, delay_ms) = (is_cut.clone(), Arc::clone(&delay_ms));
        tokio::spawn(async move {
            let Ok(to) = TcpStream::connect(to).await else { return };
            let (from_in, from_out) = from.into_split();
            let (to_in, to_out) = to.into_split();
            tokio::select! {
                () = pass(from_in, to_out, &delay_ms) => {}
                () = pass(to_in, from_out, &delay_ms) => {}
                _ = is_cut.wait_for(|is_cut| *is_cut) => {}
            }
        });
    }
}

async fn pass(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    delay_ms: &AtomicU64,
) {
    let mut packet = vec![0; 16 << 10];
    while let Ok(length @ 1..) = from.read(&mut packet).await {
        tokio::time::sleep(Duration::from_millis(delay_ms.load(Relaxed))).await;
        if to.write_all(&packet[..length]).await.is_err() {
            return;
        }
    }
}
