//! The CA of gpupack in its Secret: the one that signs, the next one, and earlier ones that are still
//! trusted. All of it is in one object, so that it changes at once.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use k8s_openapi::ByteString;
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};

use crate::issuing::checked::{self, CertificateFault, CheckedCa, to_pem};
use crate::issuing::pair::{Validity, make_ca};
use crate::rotation::plan::{Rules, SeenCa, SeenNext, UnixTime};

/// The key of the bundle, in each Secret and in the ConfigMap.
pub const BUNDLE: &str = "ca.crt";
/// The key of the CA that signs.
const KEY: &str = "ca.key";
/// The CA that is to sign next.
const NEXT: &str = "next.crt";
/// Its key.
const NEXT_KEY: &str = "next.key";
/// What is known of the stages.
const ROTATION: &str = "rotation.json";

/// All keys of the Secret that are ours.
pub const OWN_KEYS: [&str; 5] = [BUNDLE, KEY, NEXT, NEXT_KEY, ROTATION];

/// Most bytes of [`ROTATION`] that are read.
const MOST_BYTES: usize = 16 << 10;

/// Most earlier CAs.
const MOST_OLD: usize = 16;

/// A CA begins so long ago, for clocks that are late.
const EARLIER: Duration = Duration::from_secs(86_400);

/// The data of a Secret.
pub type Data = BTreeMap<String, ByteString>;

/// The CA of gpupack.
#[derive(Clone)]
pub struct Authority {
    /// It signs.
    pub signer: CheckedCa,
    next: Option<Next>,
    old: Vec<Old>,
}

/// The CA that is to sign next.
#[derive(Clone)]
struct Next {
    ca: CheckedCa,
    added: UnixTime,
    published: Option<UnixTime>,
}

/// An earlier CA, without its key.
#[derive(Clone)]
struct Old {
    der: CertificateDer<'static>,
    until: UnixTime,
}

/// [`ROTATION`] as it is written. A field that is missing has its default.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Stages {
    added: u64,
    published: Option<u64>,
    /// By the SHA-256 of the certificate.
    old: BTreeMap<String, u64>,
}

/// What is in the Secret of the CA.
pub struct Found {
    /// The CA, if one can be used.
    pub authority: Option<Authority>,
    /// What is wrong, for the log.
    pub faults: Vec<String>,
}

impl Authority {
    /// Reads the Secret. An empty one has no CA and no fault.
    pub fn read(data: &Data) -> Found {
        let mut faults = Vec::new();
        let value = |key: &str| data.get(key).map_or(&[][..], |value| &value.0);
        if value(BUNDLE).is_empty() && value(KEY).is_empty() {
            return Found { authority: None, faults };
        }
        let (bundle, signer) = match of_bundle(value(BUNDLE), value(KEY)) {
            Ok(found) => found,
            Err(fault) => {
                faults.push(fault.to_string());
                return Found { authority: None, faults };
            }
        };
        let stages = match value(ROTATION) {
            [] => Stages::default(),
            text if text.len() > MOST_BYTES => {
                faults.push(format!("`{ROTATION}` is longer than {MOST_BYTES} bytes"));
                Stages::default()
            }
            text => serde_json::from_slice(text).unwrap_or_else(|error| {
                faults.push(format!("`{ROTATION}`: {error}"));
                Stages::default()
            }),
        };
        let mut next = None;
        if !value(NEXT).is_empty() {
            match checked::ca("next.crt", value(NEXT), value(NEXT_KEY)) {
                Ok(ca) => {
                    let (added, published) =
                        (UnixTime(stages.added), stages.published.map(UnixTime));
                    next = Some(Next { ca, added, published });
                }
                Err(fault) => faults.push(fault.to_string()),
            }
        }
        let is_other = |der: &CertificateDer<'_>| {
            *der != signer.der && next.as_ref().is_none_or(|next| next.ca.der != *der)
        };
        let old = bundle.into_iter().filter(is_other).filter_map(|der| {
            // One that we did not write down was not put there by us.
            let until = UnixTime(*stages.old.get(&sha256(&der))?);
            Some(Old { der, until })
        });
        let old = old.take(MOST_OLD).collect();
        Found { authority: Some(Self { signer, next, old }), faults }
    }

    /// Makes a CA.
    ///
    /// # Errors
    /// No randomness.
    pub fn make(rules: &Rules, now: UnixTime) -> Result<Self, rcgen::Error> {
        Ok(Self { signer: new_ca(rules, now)?, next: None, old: Vec::new() })
    }

    /// The same with another CA that is to sign next.
    ///
    /// # Errors
    /// No randomness.
    pub fn with_next(mut self, rules: &Rules, now: UnixTime) -> Result<Self, rcgen::Error> {
        self.next = Some(Next { ca: new_ca(rules, now)?, added: now, published: None });
        Ok(self)
    }

    /// The same with another time at which the bundle was in all places.
    #[must_use]
    pub fn published(mut self, at: Option<UnixTime>) -> Self {
        if let Some(next) = &mut self.next {
            next.published = at;
        }
        self
    }

    /// The same with the next CA as the one that signs. The key of the present one is forgotten, and it
    /// is trusted until this time.
    #[must_use]
    pub fn switched(mut self, until: UnixTime) -> Self {
        if let Some(next) = self.next.take() {
            let old = std::mem::replace(&mut self.signer, next.ca);
            self.old.push(Old { der: old.der, until });
        }
        self
    }

    /// The same without earlier CAs that are not needed any more.
    #[must_use]
    pub fn without_old(mut self, now: UnixTime) -> Self {
        self.old.retain(|old| old.until > now);
        self
    }

    /// What the Secret is to have.
    pub fn data(&self) -> Data {
        let next = self.next.as_ref();
        let stages = Stages {
            added: next.map_or(0, |next| next.added.0),
            published: next.and_then(|next| next.published).map(|at| at.0),
            old: self.old.iter().map(|old| (sha256(&old.der), old.until.0)).collect(),
        };
        let stages = serde_json::to_string(&stages).expect("numbers and texts are JSON");
        let mut data =
            vec![(BUNDLE, self.bundle()), (KEY, self.signer.pair.key.clone()), (ROTATION, stages)];
        if let Some(Next { ca, .. }) = next {
            data.push((NEXT, ca.pair.certificate.clone()));
            data.push((NEXT_KEY, ca.pair.key.clone()));
        }
        data.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.into()))).collect()
    }

    /// All CAs that clients are to trust, in PEM: the one that signs first.
    pub fn bundle(&self) -> String {
        let next = self.next.iter().map(|next| &next.ca.der);
        let old = self.old.iter().map(|old| &old.der);
        [&self.signer.der].into_iter().chain(next).chain(old).map(to_pem).collect()
    }

    /// A short name of the bundle.
    pub fn bundle_id(&self) -> String {
        sha256(self.bundle().as_bytes()).chars().take(16).collect()
    }

    /// As the plan sees it.
    pub fn seen(&self) -> SeenCa {
        let Validity { starts, ends } = self.signer.validity;
        let next = self.next.as_ref().map(|next| SeenNext {
            ends: next.ca.validity.ends,
            added: next.added,
            published: next.published,
        });
        SeenCa { starts, ends, next, old: self.old.iter().map(|old| old.until).collect() }
    }
}

/// The certificates of a bundle, and the one among them that has this key.
fn of_bundle(
    bundle: &[u8],
    key: &[u8],
) -> Result<(Vec<CertificateDer<'static>>, CheckedCa), CertificateFault> {
    let all = checked::many("ca.crt", bundle)?;
    let mut fault = CertificateFault::Pem("ca.crt");
    for der in &all {
        match checked::ca("ca.crt", to_pem(der).as_bytes(), key) {
            Ok(signer) => return Ok((all, signer)),
            Err(found) => fault = found,
        }
    }
    Err(fault)
}

fn new_ca(rules: &Rules, now: UnixTime) -> Result<CheckedCa, rcgen::Error> {
    let validity = Validity { starts: now.minus(EARLIER), ends: now.plus(rules.ca) };
    // Each has another name, so that clients do not try the keys of one after the other.
    let name = format!("gpupack CA {:08x}", rand::random::<u32>());
    let pair = make_ca(&name, validity)?;
    checked::ca("ca.crt", pair.certificate.as_bytes(), pair.key.as_bytes())
        .map_err(|_| rcgen::Error::CouldNotParseCertificate)
}

/// In hexadecimal digits.
fn sha256(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
