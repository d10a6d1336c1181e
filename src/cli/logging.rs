//! Log lines on stderr, as text or JSON, with a level that can be changed while the program runs.

use std::sync::Arc;

use anyhow::{Context, Result};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, reload};

use crate::config::LogFormat;
use crate::extender::server::SetLogLevel;

/// Starts logging; returns what changes the filter later.
///
/// # Errors
/// A filter that cannot be read, or logging that was started before.
pub(super) fn start(filter: &str, format: LogFormat) -> Result<Arc<SetLogLevel>> {
    let parsed = EnvFilter::builder()
        .parse(filter)
        .with_context(|| format!("log level `{filter}` is not a level or filter"))?;
    let (layer, handle) = reload::Layer::new(parsed);
    let registry = tracing_subscriber::registry().with(layer);
    match format {
        LogFormat::Text => {
            registry.with(fmt::layer().with_writer(std::io::stderr).with_target(false)).try_init()
        }
        LogFormat::Json => registry
            .with(fmt::layer().json().flatten_event(true).with_writer(std::io::stderr))
            .try_init(),
    }
    .context("logging was started before")?;
    Ok(Arc::new(move |filter: &str| {
        let parsed = EnvFilter::builder()
            .parse(filter)
            .map_err(|error| format!("log level `{filter}` is not a level or filter: {error}"))?;
        handle.reload(parsed).map_err(|error| error.to_string())
    }))
}
