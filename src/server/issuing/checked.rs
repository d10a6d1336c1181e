//! Certificates as they are read from Secrets: whatever somebody put there is checked first.

use pem::{EncodeConfig, LineEnding, Pem};
use rcgen::{KeyPair, PublicKeyData};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, TrustAnchor, UnixTime as TlsTime};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use crate::issuing::pair::{Pair, Usage};
use crate::rotation::plan::{UnixTime, Validity};
use runtime::certificates::is_named;

/// Most bytes of one value: a certificate of ours takes less than 2 KiB. All in it are read: one that is left
/// out would be missed only when its owner is refused.
const MOST_BYTES: usize = 64 << 10;

/// Why a certificate cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateFault {
    /// More bytes than any of ours has.
    #[error(
        "`{0}` is longer than {MOST_BYTES} bytes: leave out what is not of gpupack's certificates"
    )]
    Long(&'static str),
    /// Not PEM, or nothing of this kind in it.
    #[error("`{0}` is not in PEM")]
    Pem(&'static str),
    /// Not a certificate, or one of an unknown form.
    #[error("`{0}` is no certificate that can be read")]
    Form(&'static str),
    /// Not a key, or one of another certificate.
    #[error("the key is not that of the certificate `{0}`")]
    Key(&'static str),
    /// It may not sign certificates.
    #[error("`{0}` is no certificate of a CA")]
    NoCa(&'static str),
    #[error("the certificate `{0}` has ended, or is not valid yet")]
    Time(&'static str),
    #[error("the certificate has not the name `{0}`")]
    Name(String),
}

/// A CA with its key.
#[derive(Clone)]
pub struct CheckedCa {
    pub pair: Pair,
    pub der: CertificateDer<'static>,
    pub validity: Validity,
}

/// The one certificate in a PEM text, and when it is valid.
fn one(
    what: &'static str,
    pem: &[u8],
) -> Result<(CertificateDer<'static>, Validity), CertificateFault> {
    let first = many(what, pem)?.into_iter().next();
    let der = first.ok_or(CertificateFault::Pem(what))?;
    let validity = validity(&der).ok_or(CertificateFault::Form(what))?;
    Ok((der, validity))
}

/// All certificates in a PEM text.
///
/// # Errors
/// [`CertificateFault::Long`], [`CertificateFault::Pem`].
pub fn many(
    what: &'static str,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, CertificateFault> {
    if pem.len() > MOST_BYTES {
        return Err(CertificateFault::Long(what));
    }
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    found.map_err(|_| CertificateFault::Pem(what))
}

/// When a certificate is valid.
pub fn validity(der: &CertificateDer<'_>) -> Option<Validity> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let found = certificate.validity();
    let starts = u64::try_from(found.not_before.timestamp()).ok().map(UnixTime)?;
    let ends = u64::try_from(found.not_after.timestamp()).ok().map(UnixTime)?;
    Some(Validity { starts, ends })
}

/// The key, if it is that of the certificate.
fn key_of(
    what: &'static str,
    der: &CertificateDer<'_>,
    key: &[u8],
) -> Result<String, CertificateFault> {
    if key.len() > MOST_BYTES {
        return Err(CertificateFault::Long("key"));
    }
    let text = std::str::from_utf8(key).map_err(|_| CertificateFault::Key(what))?;
    let pair = KeyPair::from_pem(text).map_err(|_| CertificateFault::Key(what))?;
    let (_, certificate) =
        X509Certificate::from_der(der).map_err(|_| CertificateFault::Form(what))?;
    match certificate.public_key().raw == pair.subject_public_key_info() {
        true => Ok(pair.serialize_pem()),
        false => Err(CertificateFault::Key(what)),
    }
}

/// Reads a CA. It may have ended.
///
/// # Errors
/// [`CertificateFault`].
pub fn ca(what: &'static str, pem: &[u8], key: &[u8]) -> Result<CheckedCa, CertificateFault> {
    let (der, validity) = one(what, pem)?;
    let key = key_of(what, &der, key)?;
    match is_ca(&der) {
        true => Ok(CheckedCa { pair: Pair { certificate: to_pem(&der), key }, der, validity }),
        false => Err(CertificateFault::NoCa(what)),
    }
}

/// Whether it may sign certificates, and clients can trust it.
pub fn is_ca(der: &CertificateDer<'_>) -> bool {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else { return false };
    let may_sign = match certificate.key_usage() {
        Ok(usage) => usage.is_none_or(|usage| usage.value.key_cert_sign()),
        Err(_) => false,
    };
    certificate.is_ca() && may_sign && webpki::anchor_from_trusted_cert(der).is_ok()
}

/// A certificate of a server or client that can be used now.
pub struct Checked {
    pub pair: Pair,
    pub validity: Validity,
    /// Whether this CA has signed it.
    pub is_by_signer: bool,
}

/// What is wanted of a certificate that is read.
#[derive(Clone, Copy)]
pub struct ExpectedCertificate<'a> {
    /// The names that it must have.
    pub names: &'a [String],
    pub usage: Usage,
    /// The CA that signs now.
    pub ca: &'a CheckedCa,
    pub now: UnixTime,
}

/// Reads the certificate of a server or client.
///
/// # Errors
/// [`CertificateFault`] if it cannot be used.
pub fn certificate(
    pem: &[u8],
    key: &[u8],
    expected: ExpectedCertificate<'_>,
) -> Result<Checked, CertificateFault> {
    const WHAT: &str = "tls.crt";
    let (der, validity) = one(WHAT, pem)?;
    let key = key_of(WHAT, &der, key)?;
    if !validity.contains(expected.now) {
        return Err(CertificateFault::Time(WHAT));
    }
    for name in expected.names {
        let named = ServerName::try_from(name.as_str()).is_ok_and(|name| is_named(&der, &name));
        if !named {
            return Err(CertificateFault::Name(name.clone()));
        }
    }
    let is_by_signer = is_signed_by(&der, &expected);
    Ok(Checked { pair: Pair { certificate: to_pem(&der), key }, validity, is_by_signer })
}

/// Whether clients that trust this CA accept the certificate now, for what it is meant.
fn is_signed_by(der: &CertificateDer<'_>, expected: &ExpectedCertificate<'_>) -> bool {
    let Ok(anchor) = webpki::anchor_from_trusted_cert(&expected.ca.der) else { return false };
    let anchors: [TrustAnchor<'_>; 1] = [anchor];
    let Ok(end) = webpki::EndEntityCert::try_from(der) else { return false };
    let now = TlsTime::since_unix_epoch(std::time::Duration::from_secs(expected.now.0));
    let usages = [
        (expected.usage.is_server(), webpki::KeyUsage::server_auth()),
        (expected.usage.is_client(), webpki::KeyUsage::client_auth()),
    ];
    usages.into_iter().filter(|(is_used, _)| *is_used).all(|(_, usage)| {
        let algorithms = webpki::ALL_VERIFICATION_ALGS;
        end.verify_for_usage(algorithms, &anchors, &[], now, usage, None, None).is_ok()
    })
}

/// A certificate in PEM.
pub fn to_pem(der: &CertificateDer<'_>) -> String {
    let lines = EncodeConfig::new().set_line_ending(LineEnding::LF);
    pem::encode_config(&Pem::new("CERTIFICATE", der.to_vec()), lines)
}
