//! The signals that end a service.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

/// Listens from now on. The returned future ends on Ctrl-C or SIGTERM.
///
/// # Errors
/// The error of the operating system.
pub fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
