//! The signals that end a service.

use tokio::signal::unix::{SignalKind, signal};

/// Returns when the process is asked to end: Ctrl-C or SIGTERM.
pub(super) async fn stopped() {
    let interrupt = tokio::signal::ctrl_c();
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => {
            tokio::select! {
                _ = interrupt => {}
                _ = terminate.recv() => {}
            }
        }
        Err(error) => {
            tracing::warn!(%error, "SIGTERM cannot be listened to");
            let _ = interrupt.await;
        }
    }
}
