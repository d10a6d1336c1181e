//! The section `certificates` of the configuration: whether gpupack makes its certificates itself.

use std::time::Duration;

use garde::Validate;
use serde::Deserialize;

use crate::config::values::{each, is_dns_name, seconds};

/// Checked section `certificates`. It counts only with `tls`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Validate)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
#[garde(allow_unvalidated)]
pub struct CertificatesConfig {
    /// Whether the extender makes a CA and certificates; otherwise it only publishes the CA of `tls`.
    pub make: bool,
    /// Whether it writes a CA that it did not make into `caBundle` of webhook and APIService.
    pub publish_ca_bundles: bool,
    /// How long a certificate lasts.
    #[serde(rename = "certificate_seconds", deserialize_with = "seconds::<20, 31_536_000, _>")]
    pub certificate: Duration,
    /// Further names of the extender.
    #[garde(custom(each(is_dns_name, "a list of DNS names, as certificates have them")))]
    pub names: Vec<String>,
}

impl Default for CertificatesConfig {
    fn default() -> Self {
        Self {
            make: false,
            publish_ca_bundles: false,
            certificate: Duration::from_secs(90 * 86_400),
            names: Vec::new(),
        }
    }
}

impl CertificatesConfig {
    /// How often to look for what is due.
    pub fn look_every(&self) -> Duration {
        (self.certificate / 32).clamp(Duration::from_secs(1), Duration::from_secs(60))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};

    #[test]
    fn every_key_is_read_and_faults_name_the_section() {
        let text = "tls: {}\ncertificates: { make: true, publish_ca_bundles: true, certificate_seconds: 60, \
            names: [a.example] }";
        let expected = CertificatesConfig {
            make: true,
            publish_ca_bundles: true,
            certificate: Duration::from_secs(60),
            names: vec!["a.example".to_owned()],
        };
        let config = Config::from_yaml(text).unwrap();
        assert_eq!(config.certificates, Some(expected));
        assert!(keys_of("certificates").iter().all(|key| text.contains(&format!("{key}:"))));
        let text = "tls: {}\ncertificates: { make: 1, certificate_seconds: 19, names: ['a b'], rotate: true }";
        let faults = Config::from_yaml(text).unwrap_err();
        assert_eq!(faults.faults.len(), 4, "{faults}");
        assert!(faults.faults.iter().all(|fault| fault.contains("certificates")), "{faults}");
    }

    #[test]
    fn the_section_needs_tls_and_names_that_certificates_can_have() {
        let faults = |text: &str| Config::from_yaml(text).unwrap_err().to_string();
        assert!(faults("certificates: { make: true }").contains("without `tls`"));
        let text = "tls: {}\ncertificates: { names: [a.example.] }";
        assert!(faults(text).contains("names"), "no certificate fits that name");
    }
}
