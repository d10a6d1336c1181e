//! `gpupack webhook-cert`: a certificate for the webhook, for clusters without cert-manager.
//!
//! It prints a Secret and keeps nothing. It drops the key of the authority that signs the
//! certificate, so that no one can sign another one that the API server trusts.

use std::io;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use serde_json::{Value, json};

use crate::clock::Clock;
use crate::issuing::pair::{Pair, Usage, Wanted, make_ca, sign};
use crate::rotation::plan::{UnixTime, Validity};

/// Seconds of a day.
const DAY: u64 = 86_400;

/// Flags of `gpupack webhook-cert`.
#[derive(Debug, Args)]
pub struct WebhookCertArgs {
    /// Namespace of service and Secret
    #[arg(long, default_value = "gpu-system")]
    namespace: String,
    /// Name of the webhook's service
    #[arg(long, default_value = "gpupack-webhook")]
    service: String,
    /// A further name or address, for a webhook with a URL
    #[arg(long, value_name = "NAME")]
    name: Vec<String>,
    /// Name of the printed Secret
    #[arg(long, default_value = "gpupack-webhook-tls")]
    secret: String,
    /// Days from now until the certificate ends
    #[arg(long, default_value_t = 3650, value_parser = clap::value_parser!(u64).range(1..=36_500))]
    days: u64,
}

/// Prints the Secret.
///
/// # Errors
/// Names that are not valid in a certificate, or a closed standard output.
pub fn run(args: &WebhookCertArgs, clock: Clock) -> Result<()> {
    let secret = secret(args, clock.unix_seconds())?;
    let text = serde_json::to_string_pretty(&secret)?;
    writeln!(io::stdout().lock(), "{text}").context("cannot write to standard output")
}

fn secret(args: &WebhookCertArgs, now: u64) -> Result<Value> {
    let (authority, pair) = pair(args, now).context("cannot make a certificate")?;
    Ok(json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
        "metadata": {
            "name": args.secret, "namespace": args.namespace,
            "labels": {
                "app.kubernetes.io/name": "gpupack",
                "app.kubernetes.io/component": "webhook",
                "app.kubernetes.io/part-of": "gpupack",
            },
        },
        "stringData": {"ca.crt": authority, "tls.crt": pair.certificate, "tls.key": pair.key},
    }))
}

/// A signed pair and the CA to trust, in PEM. The key of the CA is dropped.
fn pair(args: &WebhookCertArgs, now: u64) -> Result<(String, Pair), rcgen::Error> {
    let (service, namespace) = (&args.service, &args.namespace);
    let day = Duration::from_secs(DAY);
    let now = UnixTime(now);
    // From yesterday, for clocks that are late.
    let validity =
        Validity { starts: now.minus(day), ends: now.plus(Duration::from_secs(args.days * DAY)) };
    let ca = make_ca(&format!("{service} authority"), validity)?;
    // The names by which the API server calls a service.
    let names = ["svc", "svc.cluster.local"].map(|end| format!("{service}.{namespace}.{end}"));
    let names = [&names, &*args.name].concat();
    let signed = sign(&ca, Wanted { names: &names, usage: Usage::Server, validity })?;
    Ok((ca.certificate, signed))
}
