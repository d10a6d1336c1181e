//! Log lines on stderr, as text or JSON, with a level that can change while the program runs.

use std::fmt::Display;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, reload};

use kube_api::config::file::LogFormat;
use kube_api::config::values::log_filter;
use server::page::service::SetLogLevel;

/// Flags about log lines.
#[derive(Clone, Debug, Default, Args)]
pub struct LogArgs {
    /// Level or filter, for instance `info` or `info,gpupack=debug`
    #[arg(long, value_name = "FILTER")]
    log_level: Option<String>,
    /// Format of log lines
    #[arg(long, value_enum)]
    log_format: Option<LogFormatArg>,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormatArg {
    /// For people
    Text,
    /// One JSON object per line
    Json,
}

impl LogArgs {
    /// The level of the flag, or the default.
    pub fn level(&self) -> &str {
        self.log_level.as_deref().unwrap_or("info")
    }

    /// The format of the flag, or the default.
    pub fn format(&self) -> LogFormat {
        self.format_flag().unwrap_or_default()
    }

    /// The level of the flag.
    pub(crate) fn level_flag(&self) -> Option<&str> {
        self.log_level.as_deref()
    }

    /// The format of the flag.
    pub(crate) fn format_flag(&self) -> Option<LogFormat> {
        self.log_format.map(|format| match format {
            LogFormatArg::Text => LogFormat::Text,
            LogFormatArg::Json => LogFormat::Json,
        })
    }
}

/// Starts logging; returns a function that changes the filter later.
///
/// # Errors
/// A filter that cannot be read, or logging that was started before.
pub fn start(filter: &str, format: LogFormat) -> Result<Arc<SetLogLevel>> {
    let parsed = read(filter).map_err(anyhow::Error::msg)?;
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
    .context("logging is already started")?;
    Ok(Arc::new(move |filter: &str| {
        handle.reload(read(filter)?).map_err(|error| error.to_string())
    }))
}

fn read(filter: &str) -> Result<EnvFilter, String> {
    let fault = |cause: &dyn Display| format!("log level `{filter}` cannot be used: {cause}");
    log_filter(filter, &()).map_err(|cause| fault(&cause))?;
    EnvFilter::builder().parse(filter).map_err(|cause| fault(&cause))
}
