//! The signals that end a service.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

/// Listens from now on; what it returns ends when the process is asked to end: Ctrl-C or SIGTERM.
///
/// # Errors
/// What the operating system says about listening.
pub(crate) fn stop_asked() -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
