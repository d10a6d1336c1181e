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

use crate::base::reader::{Read, Unread};
use crate::doctor::finding::{Findings, Found, known, or_ok, short};
use crate::doctor::table::*;
use runtime::certificates::is_named;
use server::issuing::checked::to_pem;
use wire::api::commands::Check;

/// Renewals come weeks before the end: with less than this, none came.
const SOON_SECONDS: i64 = 14 * 86_400;

/// The certificates of a Secret. Keys are never kept.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct ShownFiles {
    /// Each file that holds no key.
    files: BTreeMap<String, Vec<u8>>,
}

impl ShownFiles {
    /// Keeps certificates, and no key.
    pub(crate) fn of(data: BTreeMap<String, ByteString>) -> Self {
        let files = data.into_iter().map(|(name, text)| (name, text.0));
        Self { files: files.filter(|(_, text)| !has_key(text)).collect() }
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

fn has_key(text: &[u8]) -> bool {
    text.windows(11).any(|part| part == b"PRIVATE KEY")
}

/// The certificates of a text in PEM, at least one.
fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let chain = chain.map_err(|error| format!("it is no PEM: {error}"))?;
    if chain.is_empty() { Err("it has no certificate".to_owned()) } else { Ok(chain) }
}

/// One who trusts a certificate, and how.
pub(crate) struct Trust {
    /// Where its CA stands, for people.
    pub(crate) from: &'static str,
    /// Its CA in PEM; `None` if it has none.
    pub(crate) ca: Option<Vec<u8>>,
    /// The name that it calls.
    pub(crate) name: String,
    /// How to set that CA.
    pub(crate) fix: &'static str,
}

/// A certificate of gpupack, as its Secret has it.
pub(crate) struct Served {
    pub(crate) check: &'static str,
    /// Where it was seen, for people.
    pub(crate) from: String,
    /// The file with the chain, of its path the last part.
    pub(crate) file: String,
    pub(crate) shown: Read<ShownFiles>,
    pub(crate) trusts: Vec<Trust>,
}

/// The findings about a certificate and those who trust it.
pub(crate) fn served(certificate: &Served, now_unix_seconds: i64) -> Found {
    let what = short(&certificate.from);
    let none = |why: String| NO_CERTIFICATE.of(certificate.check).with([&what, &why]);
    let shown = match &certificate.shown {
        Ok(shown) => shown,
        Err(Unread::Absent) => return Err(NO_SECRET.of(certificate.check).with([&what])),
        Err(why) => return Err(CERTIFICATE.of(certificate.check).unread([&what], why)),
    };
    let chain = shown.chain(&certificate.file).map_err(none)?;
    let left = ends(&chain[0]).map_err(none)?.saturating_sub(now_unix_seconds);
    let days = left / 86_400;
    let mut found = Findings::new();
    match left {
        ..=0 => found.push(ENDED.of(certificate.check).with([&what, &-days])),
        1..SOON_SECONDS => found.push(ENDS_SOON.of(certificate.check).with([&what, &days])),
        _ => {}
    }
    found.extend(certificate.trusts.iter().filter_map(|trust| {
        let why = trusted(&chain, trust, now_unix_seconds).err()?;
        Some(UNFIT.of(certificate.check).with([&what, &trust.from, &why, &trust.fix]))
    }));
    let by: Vec<&str> = certificate.trusts.iter().map(|trust| trust.from).collect();
    let by = if by.is_empty() { String::new() } else { format!("; fits {}", by.join(", ")) };
    or_ok(found, || CERTIFICATE_OK.of(certificate.check).with([&what, &days, &by]))
}

/// The API server passes queries on to the extender.
pub(crate) fn api_service(service: &Read<APIService>, has_tls: bool) -> Found {
    let service = match known(service, &API_SERVICE) {
        Err(_) if matches!(service, Err(Unread::Absent)) => {
            return Ok(has_tls.then(|| NO_API_SERVICE.with([])).into_iter().collect());
        }
        known => known?,
    };
    if !has_tls {
        return Err(API_SERVICE_PLAIN.with([]));
    }
    let mut conditions =
        service.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let line: Check = match conditions.find(|condition| condition.type_ == "Available") {
        Some(condition) if condition.status == "True" => API_SERVICE_OK.with([]),
        Some(condition) => {
            API_SERVICE_DOWN.with([&short(condition.message.as_deref().unwrap_or_default())])
        }
        None => API_SERVICE_NEW.with([]),
    };
    Ok(vec![line])
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
    trust: &Trust,
    now_unix_seconds: i64,
) -> Result<(), String> {
    let (own, others) = chain.split_first().ok_or("it is empty")?;
    let ca = trust.ca.as_ref().filter(|ca| !ca.is_empty()).ok_or("no caBundle is set")?;
    let ca = certificates(ca)?;
    let name = ServerName::try_from(trust.name.clone())
        .map_err(|_| format!("`{}` is no name of a server", short(&trust.name)))?;
    if !is_named(own, &name) {
        return Err(format!("the certificate lacks the name {}", short(&trust.name)));
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
    use crate::doctor::finding::{lines, states};
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    use wire::api::commands::CheckState;
    use wire::api::commands::CheckState::{NotChecked, Ok as Good, Problem, Warning};

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

    fn shown(certificate: &str) -> Read<ShownFiles> {
        let file = |text: &str| ByteString(text.as_bytes().to_vec());
        let key = file("-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n");
        let files = [("tls.crt".to_owned(), file(certificate)), ("tls.key".to_owned(), key)];
        Ok(ShownFiles::of(files.into()))
    }

    fn check(shown: &Read<ShownFiles>, ca: Option<&str>, name: &str, now: i64) -> Vec<CheckState> {
        let ca = ca.map(|ca| ca.as_bytes().to_vec());
        let trust = Trust { from: "caBundle", ca, name: name.to_owned(), fix: "set it" };
        let (from, file) = ("Secret s".to_owned(), "tls.crt".to_owned());
        let (shown, trusts) = (shown.clone(), vec![trust]);
        let found = lines(served(&Served { check: "c", from, file, shown, trusts }, now));
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
        let check =
            |service: &Read<APIService>, has_tls| states(&lines(api_service(service, has_tls)));
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
        assert_eq!(check(&Ok(ShownFiles::default()), Some(&ca), NAME, IN_2026), [Problem]);
    }
}
