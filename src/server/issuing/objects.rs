//! The objects in which certificates are kept, as they were read, and what they mean for the plan.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use serde_json::{Value, json};

use crate::issuing::authority::{Authority, BUNDLE, NEXT, SecretData, value_of};
use crate::issuing::checked::{Checked, ExpectedCertificate, certificate};
use crate::issuing::pair::{Pair, Usage};
use crate::rotation::plan::{
    BundlePlace, CertificateOwner, SeenBundle, SeenCertificate, SeenObjects, UnixTime,
};

/// The key of the certificate in a Secret.
pub const CERTIFICATE: &str = "tls.crt";
/// The key of its private key.
const KEY: &str = "tls.key";

/// The Secret of the CA, and the ConfigMap of agents.
pub const CA: &str = "gpupack-ca";
/// The configuration of the webhook.
pub const WEBHOOKS: &str = "gpupack";
/// The APIService.
pub const API_SERVICE: &str = "v1.inspection.gpupack.dev";

/// The Secret of an owner.
pub fn secret_of(owner: CertificateOwner) -> &'static str {
    match owner {
        CertificateOwner::Extender => "gpupack-extender-tls",
        CertificateOwner::Scheduler => "gpupack-scheduler-tls",
        CertificateOwner::Webhook => "gpupack-webhook-tls",
    }
}

/// What an owner is on connections.
pub fn usage_of(owner: CertificateOwner) -> Usage {
    match owner {
        CertificateOwner::Extender => Usage::Both,
        CertificateOwner::Scheduler => Usage::Client,
        CertificateOwner::Webhook => Usage::Server,
    }
}

/// The objects. One that is `None` is not there, or may not be read.
#[derive(Clone, Default)]
pub struct Objects {
    pub certificates: BTreeMap<CertificateOwner, Secret>,
    pub agents: Option<ConfigMap>,
    pub webhooks: Option<MutatingWebhookConfiguration>,
    pub api_service: Option<APIService>,
    /// The Secret of the CA. It is read last: see [`crate::rotation::plan`].
    pub ca: Secret,
    /// When that was, by the clock of the API server, if it says so.
    pub read_at: Option<UnixTime>,
}

/// The names that the certificate of each owner has.
pub type CertificateNames = BTreeMap<CertificateOwner, Vec<String>>;

/// What objects mean.
pub struct Meaning {
    pub seen: SeenObjects,
    /// The certificate of the extender, if it can be used.
    pub own: Option<Pair>,
    /// What is wrong in which object, for the log.
    pub faults: Vec<(&'static str, String)>,
}

impl Objects {
    /// What they mean now, with this CA.
    pub fn meaning(
        &self,
        ca: Option<&Authority>,
        names: &CertificateNames,
        now: UnixTime,
    ) -> Meaning {
        let mut faults = Vec::new();
        let mut own = None;
        let mut certificates = BTreeMap::new();
        for owner in CertificateOwner::ALL {
            let Some(secret) = self.certificates.get(&owner) else {
                certificates.insert(owner, SeenCertificate::NoSecret);
                continue;
            };
            let empty = SecretData::new();
            let data = secret.data.as_ref().unwrap_or(&empty);
            let (pem, key) = (value_of(data, CERTIFICATE), value_of(data, KEY));
            let is_empty = pem.is_empty() && key.is_empty();
            let names = names.get(&owner).map_or(&[][..], Vec::as_slice);
            let Some(ca) = ca.filter(|_| !is_empty) else {
                certificates.insert(owner, SeenCertificate::Unusable);
                continue;
            };
            let expected =
                ExpectedCertificate { names, usage: usage_of(owner), ca: &ca.signer, now };
            let seen = match certificate(pem, key, expected) {
                Ok(Checked { pair, validity, is_by_signer }) => {
                    own = own.or_else(|| (owner == CertificateOwner::Extender).then_some(pair));
                    let has_bundle = value_of(data, BUNDLE) == ca.bundle().as_bytes();
                    SeenCertificate::Made { ends: validity.ends, is_by_signer, has_bundle }
                }
                Err(fault) => {
                    faults.push((secret_of(owner), fault.to_string()));
                    SeenCertificate::Unusable
                }
            };
            certificates.insert(owner, seen);
        }
        let bundle = ca.map(Authority::bundle).unwrap_or_default();
        let places = BundlePlace::ALL.into_iter().map(|place| (place, self.bundle(place, &bundle)));
        let bundles = places.collect();
        let ca = ca.map(|ca| ca.signer.validity);
        let has_next_ca =
            self.ca.data.iter().any(|data| NEXT.iter().any(|key| data.contains_key(*key)));
        Meaning { seen: SeenObjects { ca, has_next_ca, certificates, bundles }, own, faults }
    }

    /// Whether a place has this bundle.
    pub fn bundle(&self, place: BundlePlace, bundle: &str) -> SeenBundle {
        let is_bundle = |text: &Option<ByteString>| {
            text.as_ref().is_some_and(|text| text.0 == bundle.as_bytes())
        };
        let found = match place {
            BundlePlace::Agents => self.agents.as_ref().map(|map| {
                let text = map.data.as_ref().and_then(|data| data.get(BUNDLE));
                text.is_some_and(|text| text == bundle)
            }),
            BundlePlace::Webhooks => self.webhooks.as_ref().map(|all| {
                let mut each = all.webhooks.iter().flatten();
                each.all(|webhook| is_bundle(&webhook.client_config.ca_bundle))
            }),
            BundlePlace::ApiService => self.api_service.as_ref().map(|service| {
                service.spec.as_ref().is_some_and(|spec| is_bundle(&spec.ca_bundle))
            }),
        };
        match found {
            None => SeenBundle::Absent,
            Some(true) => SeenBundle::Current,
            Some(false) => SeenBundle::Outdated,
        }
    }
}

/// A Secret with these values, in place of what it has under the same keys.
pub fn with_data(secret: &Secret, values: SecretData) -> Secret {
    let mut secret = secret.clone();
    secret.data.get_or_insert_default().extend(values);
    secret
}

/// The Secret of the CA without the one that was to sign next.
pub fn without_next(secret: &Secret) -> Secret {
    let mut secret = secret.clone();
    secret.data.get_or_insert_default().retain(|key, _| !NEXT.contains(&key.as_str()));
    secret
}

/// The values of the Secret of a certificate.
pub fn certificate_data(pair: Pair, bundle: &str) -> SecretData {
    let values = [(CERTIFICATE, pair.certificate), (KEY, pair.key), (BUNDLE, bundle.to_owned())];
    values.into_iter().map(|(key, text)| (key.to_owned(), ByteString(text.into()))).collect()
}

/// A ConfigMap with this bundle.
pub fn with_bundle(map: &ConfigMap, bundle: &str) -> ConfigMap {
    let mut map = map.clone();
    map.data.get_or_insert_default().insert(BUNDLE.to_owned(), bundle.to_owned());
    map
}

/// The fields of a configuration of webhooks that name this bundle.
pub fn webhook_fields(all: &MutatingWebhookConfiguration, bundle: &str) -> Value {
    let bundle = ByteString(bundle.into());
    let each = all.webhooks.iter().flatten();
    let each =
        each.map(|webhook| json!({"name": webhook.name, "clientConfig": {"caBundle": &bundle}}));
    json!({"webhooks": each.collect::<Vec<_>>()})
}

/// The fields of an APIService that name this bundle.
pub fn api_service_fields(bundle: &str) -> Value {
    json!({"spec": {"caBundle": ByteString(bundle.into())}})
}
