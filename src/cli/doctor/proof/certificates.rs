//! Whether certificates are valid, and belong to the CA that their clients trust.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, Error, RootCertStore};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::certificates::is_named;
use crate::cli::base::reader::{Read, Unread};
use crate::cli::doctor::finding::{Findings, Of, short};
use crate::issuing::checked::to_pem;

/// Renewals come weeks before the end: with less than this, none came.
const SOON_SECONDS: i64 = 14 * 86_400;

/// What to do then. Certificates end with their CA at the latest.
const NOT_RENEWED: &str = "see why it was not renewed: the log of the leader, or `kubectl describe certificate` \
     with cert-manager; if the CA of gpupack ends, replace it: docs/install.md#replace-the-ca";

/// The certificates of a Secret. Keys are never kept.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Shown {
    /// Each file that holds no key.
    files: BTreeMap<String, Vec<u8>>,
}

impl Shown {
    /// Keeps certificates, and no key.
    pub(crate) fn of(data: BTreeMap<String, ByteString>) -> Self {
        let is_kept = |text: &[u8]| !text.windows(11).any(|part| part == b"PRIVATE KEY");
        let files = data.into_iter().map(|(name, text)| (name, text.0));
        Self { files: files.filter(|(_, text)| is_kept(text)).collect() }
    }

    /// The chain of a handshake, as if it were in this file.
    pub(crate) fn seen(file: &str, chain: &[CertificateDer<'_>]) -> Self {
        let text: String = chain.iter().map(to_pem).collect();
        Self { files: [(file.to_owned(), text.into_bytes())].into() }
    }

    /// A file.
    pub(crate) fn file(&self, name: &str) -> Option<&[u8]> {
        self.files.get(name).map(Vec::as_slice)
    }

    fn chain(&self, file: &str) -> Result<Vec<CertificateDer<'static>>, String> {
        let text = self.files.get(file).ok_or_else(|| format!("it has no `{}`", short(file)))?;
        certificates(text)
    }
}

/// The certificates of a text in PEM, at least one.
fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let chain = chain.map_err(|error| format!("it is no PEM: {error}"))?;
    if chain.is_empty() { Err("it has no certificate".to_owned()) } else { Ok(chain) }
}

/// One who trusts a certificate, and how.
pub(crate) struct Trust<'a> {
    /// Where its CA stands, for people.
    pub(crate) from: &'a str,
    /// Its CA in PEM; `None` if it has none.
    pub(crate) ca: Option<&'a [u8]>,
    /// The name that it calls.
    pub(crate) name: &'a str,
    /// How to set that CA.
    pub(crate) fix: &'a str,
}

/// A certificate of gpupack, as its Secret has it.
pub(crate) struct Served<'a> {
    /// Name of the check.
    pub(crate) check: &'static str,
    /// Where it was seen, for people.
    pub(crate) from: &'a str,
    /// The file with the chain, of its path the last part.
    pub(crate) file: &'a str,
    /// What it holds.
    pub(crate) shown: &'a Read<Shown>,
}

/// The findings about a certificate and those who trust it.
pub(crate) fn served(it: &Served<'_>, trusts: &[Trust<'_>], now_unix_seconds: i64) -> Findings {
    let of = Of(it.check);
    let what = short(it.from);
    let make = "see who makes it: Certificates in docs/install.md; where gpupack does, the leader's log says why not";
    let shown = match it.shown {
        Ok(shown) => shown,
        Err(Unread::Absent) => {
            return vec![of.problem(format!("{what} does not exist: its pods cannot start"), make)];
        }
        Err(why) => return vec![of.unread(&what, why)],
    };
    let chain = match shown.chain(it.file) {
        Ok(chain) => chain,
        Err(why) => return vec![of.problem(format!("{what}: {why}"), make)],
    };
    let mut found = Findings::new();
    let days = match ends(&chain[0]) {
        Err(why) => return vec![of.problem(format!("{what}: {why}"), make)],
        Ok(end) => end.saturating_sub(now_unix_seconds),
    };
    match days {
        ..=0 => found
            .push(of.problem(format!("{what}: it ended {} days ago", -days / 86_400), NOT_RENEWED)),
        1..SOON_SECONDS => found
            .push(of.warning(format!("{what}: it ends in {} days", days / 86_400), NOT_RENEWED)),
        _ => {}
    }
    for trust in trusts {
        if let Err(why) = trusted(&chain, trust, now_unix_seconds) {
            let text = format!("{what} does not fit {}: {why}", trust.from);
            found.push(of.problem(text, trust.fix));
        }
    }
    if found.is_empty() {
        let by: Vec<&str> = trusts.iter().map(|trust| trust.from).collect();
        let by = if by.is_empty() { String::new() } else { format!("; fits {}", by.join(", ")) };
        found.push(of.ok(format!("{what}: ends in {} days{by}", days / 86_400)));
    }
    found
}

/// The API server passes queries on to the extender.
pub(crate) fn api_service(service: &Read<APIService>, has_tls: bool) -> Findings {
    let of = Of("queries through the API server");
    let service = match service {
        Ok(service) => service,
        Err(Unread::Absent) if !has_tls => return Findings::new(),
        Err(Unread::Absent) => {
            return vec![of.warning(
                "there is no APIService: page and command line need a port of their own",
                "set apiService.enabled in the values of the chart, or kubectl apply -f deploy/api-service.yaml",
            )];
        }
        Err(why) => return vec![of.unread("the APIService", why)],
    };
    if !has_tls {
        return vec![of.problem(
            "there is an APIService, but the extender has no `tls`",
            "set `tls` (docs/configuration.md), or kubectl delete apiservice v1.inspection.gpupack.dev",
        )];
    }
    let status = service.status.as_ref().and_then(|status| status.conditions.as_ref());
    let available = status.into_iter().flatten().find(|it| it.type_ == "Available");
    vec![match available {
        Some(condition) if condition.status == "True" => of.ok("the APIService is available"),
        Some(condition) => of.problem(
            format!(
                "the APIService is not available: {}",
                short(condition.message.as_deref().unwrap_or_default())
            ),
            "check its caBundle, the network policy for port 8081, and that a replica leads",
        ),
        None => of.warning("the API server has not tried the APIService yet", "run it again"),
    }]
}

/// When a certificate ends, in seconds since 1970.
fn ends(certificate: &CertificateDer<'_>) -> Result<i64, String> {
    let (_, read) = X509Certificate::from_der(certificate)
        .map_err(|error| format!("its certificate cannot be read: {error}"))?;
    Ok(read.validity().not_after.timestamp())
}

/// Whether one with this CA believes this chain. That it has ended is said elsewhere.
fn trusted(
    chain: &[CertificateDer<'static>],
    trust: &Trust<'_>,
    now_unix_seconds: i64,
) -> Result<(), String> {
    let (own, others) = chain.split_first().ok_or("it is empty")?;
    let ca = trust.ca.filter(|ca| !ca.is_empty()).ok_or("no caBundle is set")?;
    let ca = certificates(ca)?;
    let name = ServerName::try_from(trust.name.to_owned())
        .map_err(|_| format!("`{}` is no name of a server", short(trust.name)))?;
    if !is_named(own, &name) {
        return Err(format!("the certificate lacks the name {}", short(trust.name)));
    }
    if ca.contains(own) {
        return Ok(()); // it signs itself, and is trusted as it is
    }
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(ca);
    if added == 0 {
        return Err("caBundle holds no certificate of a CA".to_owned());
    }
    let provider = Arc::new(default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider);
    let verifier = verifier.build().map_err(|error| error.to_string())?;
    let now = UnixTime::since_unix_epoch(Duration::from_secs(now_unix_seconds.unsigned_abs()));
    match verifier.verify_server_cert(own, others, &name, &[], now) {
        Ok(_) => Ok(()),
        Err(Error::InvalidCertificate(
            CertificateError::Expired | CertificateError::ExpiredContext { .. },
        )) => Ok(()),
        Err(Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            Err("the CA has not signed it".to_owned())
        }
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::commands::CheckState;
    use crate::api::commands::CheckState::{NotChecked, Ok as Good, Problem, Warning};
    use crate::cli::doctor::finding::states;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

    const NAME: &str = "gpupack-webhook.gpu-system.svc";

    /// A CA, and a certificate of it that ends with 2030.
    fn pair() -> (String, String) {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_after = rcgen::date_time_ymd(2040, 1, 1);
        let key = KeyPair::generate().unwrap();
        let ca = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        let mut own = CertificateParams::new(vec![NAME.to_owned()]).unwrap();
        own.not_after = rcgen::date_time_ymd(2031, 1, 1);
        let own_key = KeyPair::generate().unwrap();
        (ca, own.signed_by(&own_key, &issuer).unwrap().pem())
    }

    fn shown(certificate: &str) -> Read<Shown> {
        let file = |text: &str| ByteString(text.as_bytes().to_vec());
        let key = file("-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n");
        let files = [("tls.crt".to_owned(), file(certificate)), ("tls.key".to_owned(), key)];
        Ok(Shown::of(files.into()))
    }

    fn check(shown: &Read<Shown>, ca: Option<&str>, name: &str, now: i64) -> Vec<CheckState> {
        let trust = Trust { from: "caBundle", ca: ca.map(str::as_bytes), name, fix: "set it" };
        let it = Served { check: "c", from: "Secret s", file: "tls.crt", shown };
        let found = served(&it, &[trust], now);
        assert!(found.iter().all(|finding| !finding.found.contains("PRIVATE")), "{found:?}");
        states(&found)
    }

    const IN_2026: i64 = 1_780_000_000;
    const NEAR_THE_END: i64 = 1_924_992_000 - 3 * 86_400; // the end of 2030, less three days
    const IN_2035: i64 = 2_051_222_400;

    #[test]
    fn a_certificate_fits_its_ca_its_name_and_the_time() {
        let ((ca, own), (other_ca, _)) = (pair(), pair());
        let good = shown(&own);
        assert_eq!(check(&good, Some(&ca), NAME, IN_2026), [Good]);
        assert_eq!(check(&good, Some(&format!("{other_ca}{ca}")), NAME, IN_2026), [Good]);
        let many = other_ca.repeat(60) + &ca;
        assert_eq!(check(&good, Some(&many), NAME, IN_2026), [Good], "all are read");
        assert_eq!(check(&good, Some(&own), NAME, IN_2026), [Good], "trusted as it is");
        assert_eq!(check(&good, Some(&ca), NAME, NEAR_THE_END), [Warning]);
        assert_eq!(check(&good, Some(&ca), NAME, IN_2035), [Problem], "ended, and said once");
        assert_eq!(check(&good, Some(&other_ca), NAME, IN_2026), [Problem]);
        assert_eq!(check(&good, Some(&ca), "other.gpu-system.svc", IN_2026), [Problem]);
        assert_eq!(check(&good, None, NAME, IN_2026), [Problem]);
        assert_eq!(check(&good, Some(""), NAME, IN_2026), [Problem]);
        assert_eq!(check(&good, Some("no PEM"), NAME, IN_2026), [Problem]);
        assert_eq!(check(&good, Some(&ca), "no name", IN_2026), [Problem]);
    }

    #[test]
    fn the_api_service_is_available_where_there_is_tls() {
        let of = |status: &str| {
            let condition =
                serde_json::json!({"type": "Available", "status": status, "message": "m"});
            let service =
                serde_json::json!({"metadata": {}, "status": {"conditions": [condition]}});
            Ok(serde_json::from_value(service).unwrap())
        };
        let check = |service: &Read<APIService>, has_tls| states(&api_service(service, has_tls));
        assert_eq!(check(&of("True"), true), [Good]);
        assert_eq!(check(&of("False"), true), [Problem]);
        assert_eq!(check(&of("True"), false), [Problem]);
        assert_eq!(check(&Ok(APIService::default()), true), [Warning]);
        assert_eq!(check(&Err(Unread::Absent), true), [Warning]);
        assert_eq!(check(&Err(Unread::Absent), false), []);
        assert_eq!(check(&Err(Unread::Failed(String::new())), true), [NotChecked]);
    }

    #[test]
    fn hostile_and_missing_secrets_are_findings() {
        let (ca, _) = pair();
        for (text, state) in [
            ("", Problem),
            ("junk", Problem),
            ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", Problem),
        ] {
            assert_eq!(check(&shown(text), Some(&ca), NAME, IN_2026), [state], "{text}");
        }
        assert_eq!(check(&Err(Unread::Absent), Some(&ca), NAME, IN_2026), [Problem]);
        let forbidden = Err(Unread::Forbidden("get secrets s".to_owned()));
        assert_eq!(check(&forbidden, Some(&ca), NAME, IN_2026), [NotChecked]);
        assert_eq!(check(&Ok(Shown::default()), Some(&ca), NAME, IN_2026), [Problem]);
    }
}
