//! Makes CAs, and certificates that they sign: ECDSA on P-256.

use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use crate::rotation::plan::{UnixTime, Validity};

/// A certificate and its private key, both in PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Pair {
    pub certificate: String,
    /// Its key in PKCS #8.
    pub key: String,
}

/// What the owner of a certificate is on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    Server,
    Client,
    Both,
}

impl Usage {
    /// Whether its owner is a server.
    pub fn is_server(self) -> bool {
        self != Self::Client
    }

    /// Whether its owner is a client.
    pub fn is_client(self) -> bool {
        self != Self::Server
    }
}

/// A certificate that is to be signed.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Its DNS names and addresses, the first one also as common name.
    pub names: &'a [String],
    pub usage: Usage,
    pub validity: Validity,
}

/// Makes a CA that can sign certificates, and no other CA.
///
/// # Errors
/// No randomness.
pub fn make_ca(name: &str, validity: Validity) -> Result<Pair, rcgen::Error> {
    let mut params = params(Vec::new(), name, validity)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?.pem();
    Ok(Pair { certificate, key: key.serialize_pem() })
}

/// Makes a key, and a certificate of it by this CA.
///
/// # Errors
/// A CA that cannot be read, or names that are not valid in a certificate.
pub fn sign(ca: &Pair, wanted: Wanted<'_>) -> Result<Pair, rcgen::Error> {
    let issuer = Issuer::from_ca_cert_pem(&ca.certificate, KeyPair::from_pem(&ca.key)?)?;
    let common = wanted.names.first().map_or("", String::as_str);
    let mut params = params(wanted.names.to_vec(), common, wanted.validity)?;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    let usages = [
        (wanted.usage.is_server(), ExtendedKeyUsagePurpose::ServerAuth),
        (wanted.usage.is_client(), ExtendedKeyUsagePurpose::ClientAuth),
    ];
    params.extended_key_usages =
        usages.into_iter().filter_map(|(is_used, usage)| is_used.then_some(usage)).collect();
    params.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?.pem();
    Ok(Pair { certificate, key: key.serialize_pem() })
}

fn params(
    names: Vec<String>,
    common: &str,
    validity: Validity,
) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, common);
    let at = |time: UnixTime| {
        rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(time.0.min(LAST_SECOND))
    };
    (params.not_before, params.not_after) = (at(validity.starts), at(validity.ends));
    Ok(params)
}

/// The end of the year 9999: dates of certificates have four digits.
const LAST_SECOND: u64 = 253_402_300_799;
