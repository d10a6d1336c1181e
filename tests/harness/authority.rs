//! A CA of a test, and certificates that it makes.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

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

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("randomness");
        let certificate = params.self_signed(&key).expect("a sound certificate").pem();
        Self { issuer: Issuer::new(params, key), certificate }
    }

    /// A certificate of a server and client with this name.
    pub(crate) fn pair(&self, name: &str) -> Pair {
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a DNS name");
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
