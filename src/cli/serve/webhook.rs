//! `gpupack webhook`: flags of the admission webhook, and its start and end as a process.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::serve::extender::config_file;
use kube_api::admission::rules::Admission;
use runtime::certificates::{CertificateFiles, Certificates, READ_EVERY};
use runtime::process::logging::{self, LogArgs};
use runtime::process::signals::stop_signal;
use server::api::webhook::{THREADS, serve};

/// Flags of `gpupack webhook`. It reads the extender's configuration: both must agree on the names
/// of the schedulers.
#[derive(Debug, Args)]
pub struct WebhookArgs {
    /// Configuration file (YAML), the same as the extender's; without it everything has its default
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Level and format of the log lines.
    #[command(flatten)]
    log: LogArgs,
}

/// Serves the API server until SIGTERM or SIGINT.
///
/// # Errors
/// An invalid configuration, an address that cannot be listened on, or an invalid certificate.
pub fn run(args: &WebhookArgs) -> Result<()> {
    let config = config_file(args.config.as_deref())?;
    let level = args.log.level_flag().unwrap_or(&config.log_level);
    logging::start(level, args.log.format_flag().unwrap_or(config.log_format))?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build()?;
    runtime.block_on(async move {
        let requests = config.request_rules();
        let settings = config.webhook;
        let listener = TcpListener::bind(settings.listen)
            .await
            .with_context(|| format!("cannot listen on {}", settings.listen))?;
        tracing::info!(address = %listener.local_addr()?, "listening");
        let files = CertificateFiles {
            own: Some((settings.certificate_file.clone(), settings.key_file.clone())),
            ca: None,
            read_every: READ_EVERY,
        };
        let certificates = Certificates::read(files)?;
        let (stop, stopped) = watch::channel(false);
        let requested = stop_signal()?;
        tokio::spawn(async move {
            requested.await;
            tracing::info!("stopping");
            stop.send_replace(true);
        });
        let admission = Admission::new(settings, config.scheduler_names).under(requests);
        serve(listener, certificates, Arc::new(admission), stopped).await;
        Ok(())
    })
}
