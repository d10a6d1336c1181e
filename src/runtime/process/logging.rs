//! Log lines on stderr, as text or JSON, with a level that can change while the program runs.

use std::sync::Arc;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Deserialize;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, reload};

/// Changes the filter of the log lines, or says why a text is none.
pub type SetLogLevel = dyn Fn(&str) -> Result<(), String> + Send + Sync;

/// Flags about log lines.
#[derive(Clone, Debug, Default, Args)]
pub struct LogArgs {
    /// Level or filter, for instance `info` or `info,gpupack=debug`
    #[arg(long, value_name = "FILTER")]
    log_level: Option<String>,
    /// Format of log lines
    #[arg(long, value_enum)]
    log_format: Option<LogFormat>,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people
    #[default]
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
        self.log_format.unwrap_or_default()
    }

    /// The level of the flag.
    pub fn level_flag(&self) -> Option<&str> {
        self.log_level.as_deref()
    }

    /// The format of the flag.
    pub fn format_flag(&self) -> Option<LogFormat> {
        self.log_format
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

/// Checks a level, or a filter such as `info,gpupack=debug`. A word that is no level would be the name of
/// a module, and silence all others.
///
/// # Errors
/// What it must be.
pub fn check(filter: &str) -> Result<(), &'static str> {
    match filter.split(',').map(str::trim).all(is_directive) {
        true => Ok(()),
        false => {
            Err("it must be a level (error, warn, info, debug, trace, off) or a filter such as \
                      `info,gpupack=debug`")
        }
    }
}

fn is_directive(text: &str) -> bool {
    !text.is_empty() && (text.contains(['=', '[']) || text.parse::<LevelFilter>().is_ok())
}

fn read(filter: &str) -> Result<EnvFilter, String> {
    let parsed = match check(filter) {
        Ok(()) => EnvFilter::builder().parse(filter).map_err(|cause| cause.to_string()),
        Err(cause) => Err(cause.to_owned()),
    };
    parsed.map_err(|cause| format!("log level `{filter}` cannot be used: {cause}"))
}
