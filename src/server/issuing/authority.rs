//! The CA of gpupack in its Secret.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::ByteString;
use rustls::pki_types::CertificateDer;

use crate::issuing::checked::{self, CertificateFault, CheckedCa, to_pem};
use crate::issuing::pair::make_ca;
use crate::rotation::plan::{UnixTime, Validity};

/// The key of the bundle, in each Secret and in the ConfigMap.
pub const BUNDLE: &str = "ca.crt";
/// The key of the CA's private key.
const KEY: &str = "ca.key";
/// The CA that a version before was to sign with next, and its key. Nothing reads them.
pub const NEXT: [&str; 2] = ["next.crt", "next.key"];

/// A CA begins so long ago, for clocks that are late.
const EARLIER: Duration = Duration::from_secs(86_400);

/// A CA lasts ten years.
const LIFE: Duration = Duration::from_secs(3_650 * 86_400);

/// The data of a Secret.
pub type SecretData = BTreeMap<String, ByteString>;

/// The value of a key; empty without one.
pub fn value_of<'a>(data: &'a SecretData, key: &str) -> &'a [u8] {
    data.get(key).map_or(&[][..], |value| &value.0)
}

/// The CA of gpupack.
#[derive(Clone)]
pub struct Authority {
    pub signer: CheckedCa,
    /// Others that clients trust until they end: a version before had the next CA and earlier ones in the bundle.
    others: Vec<CertificateDer<'static>>,
}

impl Authority {
    /// Reads the Secret: the CA that signs is the one of the key. An empty Secret has none.
    ///
    /// # Errors
    /// [`CertificateFault`] if the key is of none that can sign.
    pub fn read(data: &SecretData, now: UnixTime) -> Result<Option<Self>, CertificateFault> {
        let (bundle, key) = (value_of(data, BUNDLE), value_of(data, KEY));
        if bundle.is_empty() && key.is_empty() {
            return Ok(None);
        }
        let all = checked::many(BUNDLE, bundle)?;
        let signers = all.iter().map(|der| checked::ca(BUNDLE, to_pem(der).as_bytes(), key));
        let signer = signers.reduce(Result::or).unwrap_or(Err(CertificateFault::Pem(BUNDLE)))?;
        let others = all.into_iter().filter(|der| {
            let ends_later = checked::validity(der).is_some_and(|validity| validity.ends > now);
            *der != signer.der && ends_later && checked::is_ca(der)
        });
        Ok(Some(Self { others: others.collect(), signer }))
    }

    /// Makes a CA.
    ///
    /// # Errors
    /// No randomness.
    pub fn make(now: UnixTime) -> Result<Self, rcgen::Error> {
        let validity = Validity { starts: now.minus(EARLIER), ends: now.plus(LIFE) };
        // Each has another name, so that clients do not try the keys of one after the other.
        let name = format!("gpupack CA {:08x}", rand::random::<u32>());
        let pair = make_ca(&name, validity)?;
        let signer = checked::ca(BUNDLE, pair.certificate.as_bytes(), pair.key.as_bytes())
            .map_err(|_| rcgen::Error::CouldNotParseCertificate)?;
        Ok(Self { signer, others: Vec::new() })
    }

    /// What the Secret is to have.
    pub fn data(&self) -> SecretData {
        let values = [(BUNDLE, self.bundle()), (KEY, self.signer.pair.key.clone())];
        values.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.into()))).collect()
    }

    /// All CAs that clients are to trust, in PEM: the one that signs first.
    pub fn bundle(&self) -> String {
        [&self.signer.der].into_iter().chain(&self.others).map(to_pem).collect()
    }
}
