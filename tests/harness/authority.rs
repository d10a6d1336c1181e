//! A CA of a test, and certificates that it makes.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

/// The end of 2035: as good as never.
const LAST_SECOND: u64 = 2_082_758_399;

/// A CA.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its certificate in PEM.
    pub(crate) certificate: String,
}

/// A certificate and its key, in PEM.
pub(crate) struct Pair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

/// A client that trusts these CAs (PEM), and shows this certificate, or a chain of them.
pub(crate) fn client_config(ca: &str, shown: Option<&Pair>) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(ca.as_bytes()) {
        roots.add(root.expect("a certificate")).expect("a certificate of a CA");
    }
    let config =
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions of the provider")
            .with_root_certificates(roots);
    match shown {
        None => config.with_no_client_auth(),
        Some(Pair { certificate, key }) => {
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("a key");
            let chain = CertificateDer::pem_slice_iter(certificate.as_bytes());
            let chain = chain.collect::<Result<_, _>>().expect("certificates");
            config.with_client_auth_cert(chain, key).expect("its key")
        }
    }
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("randomness");
        let certificate = params.self_signed(&key).expect("a sound certificate").pem();
        Self { issuer: Issuer::new(params, key), certificate }
    }

    /// A certificate of a server and client with this name, also as its common name.
    pub(crate) fn pair(&self, name: &str) -> Pair {
        self.pair_of(&[name])
    }

    /// The same with several names, the first one also as its common name.
    pub(crate) fn pair_of(&self, names: &[&str]) -> Pair {
        self.pair_until(names, LAST_SECOND)
    }

    /// The same that ends at this time, in seconds since 1970.
    pub(crate) fn pair_until(&self, names: &[&str], ends: u64) -> Pair {
        let all: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(all).expect("DNS names");
        params.distinguished_name.push(DnType::CommonName, names[0]);
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(ends);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().expect("randomness");
        let certificate = params.signed_by(&key, &self.issuer).expect("a sound certificate").pem();
        Pair { certificate, key: key.serialize_pem() }
    }

    /// Writes `ca.crt`, `tls.crt` and `tls.key`.
    pub(crate) fn write(&self, folder: &Path, pair: &Pair) {
        for (name, text) in
            [("ca.crt", &self.certificate), ("tls.crt", &pair.certificate), ("tls.key", &pair.key)]
        {
            std::fs::write(folder.join(name), text).expect("the folder is writable");
        }
    }
}
