//! `gpupack webhook-cert`: a certificate for the webhook, for clusters without cert-manager.
//!
//! It prints a Secret and keeps nothing. It drops the key of the authority that signs the
//! certificate, so that no one can sign another one that the API server trusts.

use std::io;
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use serde_json::{Value, json};

use crate::clock::Clock;

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
    let pair = pair(args, now).context("cannot make a certificate")?;
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
        "stringData": {"ca.crt": pair.authority, "tls.crt": pair.certificate, "tls.key": pair.key},
    }))
}

/// A signed pair and the authority to trust, in PEM.
struct SignedPair {
    authority: String,
    certificate: String,
    key: String,
}

fn pair(args: &WebhookCertArgs, now: u64) -> Result<SignedPair, rcgen::Error> {
    let (service, namespace) = (&args.service, &args.namespace);
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.distinguished_name.push(DnType::CommonName, format!("{service} authority"));
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    // The names by which the API server calls a service.
    let names = ["svc", "svc.cluster.local"].map(|end| format!("{service}.{namespace}.{end}"));
    let mut certificate = CertificateParams::new([&names, &*args.name].concat())?;
    certificate.distinguished_name.push(DnType::CommonName, service);
    certificate.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    certificate.use_authority_key_identifier_extension = true;
    // From yesterday, for clocks that are late.
    let begin = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(now.saturating_sub(DAY));
    let end = begin + Duration::from_secs((args.days + 1) * DAY);
    for params in [&mut authority, &mut certificate] {
        (params.not_before, params.not_after) = (begin, end);
    }
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let certificate = certificate.signed_by(&key, &authority)?;
    Ok(SignedPair {
        authority: authority.pem(),
        certificate: certificate.pem(),
        key: key.serialize_pem(),
    })
}
