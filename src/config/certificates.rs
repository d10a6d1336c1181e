//! The section `certificates` of the configuration: whether gpupack makes its certificates itself.

use std::time::Duration;

use garde::Validate;
use serde::Deserialize;

use crate::config::values::{each, is_dns_name, seconds};
use crate::rotation::plan::Rules;

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
    /// How long a CA lasts.
    #[serde(rename = "ca_seconds", deserialize_with = "seconds::<80, 630_720_000, _>")]
    pub ca: Duration,
    /// Until all clients have read a changed CA.
    #[serde(rename = "spread_seconds", deserialize_with = "seconds::<5, 604_800, _>")]
    pub spread: Duration,
    /// Further names of the extender.
    #[garde(custom(each(is_dns_name, "a list of DNS names, as certificates have them")))]
    pub names: Vec<String>,
}

impl Default for CertificatesConfig {
    fn default() -> Self {
        const DAY: u64 = 86_400;
        Self {
            make: false,
            publish_ca_bundles: false,
            certificate: Duration::from_secs(90 * DAY),
            ca: Duration::from_secs(5 * 365 * DAY),
            spread: Duration::from_secs(3_600),
            names: Vec::new(),
        }
    }
}

impl CertificatesConfig {
    /// How long things last.
    pub fn rules(&self) -> Rules {
        Rules { certificate: self.certificate, ca: self.ca, spread: self.spread }
    }

    /// What does not fit together, if something does not.
    pub(crate) fn fault(&self, has_tls: bool) -> Option<String> {
        let Rules { certificate, ca, spread } = self.rules();
        let least = |key: &str, value: Duration, least: u64, of: &str| {
            let value = value.as_secs();
            format!(
                "`certificates.{key}: {value}` is not allowed: it must be {least} or more, four times `{of}`"
            )
        };
        if !has_tls {
            return Some("`certificates` is not allowed without `tls`".to_owned());
        }
        if certificate < 4 * spread {
            let (key, of) = ("certificate_seconds", "spread_seconds");
            return Some(least(key, certificate, 4 * spread.as_secs(), of));
        }
        let (key, of) = ("ca_seconds", "certificate_seconds");
        (ca < 4 * certificate).then(|| least(key, ca, 4 * certificate.as_secs(), of))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};

    #[test]
    fn every_key_is_read_and_faults_name_the_section() {
        let text = "tls: {}\ncertificates: { make: true, publish_ca_bundles: true, certificate_seconds: 60, \
            ca_seconds: 240, spread_seconds: 15, names: [a.example] }";
        let expected = CertificatesConfig {
            make: true,
            publish_ca_bundles: true,
            certificate: Duration::from_secs(60),
            ca: Duration::from_secs(240),
            spread: Duration::from_secs(15),
            names: vec!["a.example".to_owned()],
        };
        let config = Config::from_yaml(text).unwrap();
        assert_eq!(config.certificates, Some(expected));
        assert!(keys_of("certificates").iter().all(|key| text.contains(&format!("{key}:"))));
        let text = "tls: {}\ncertificates: { make: 1, certificate_seconds: 19, ca_seconds: x, spread_seconds: 4, \
            names: ['a b'], rotate: true }";
        let faults = Config::from_yaml(text).unwrap_err();
        assert_eq!(faults.faults.len(), 6, "{faults}");
        assert!(faults.faults.iter().all(|fault| fault.contains("certificates")), "{faults}");
    }

    #[test]
    fn lifetimes_that_leave_no_time_for_a_change_are_refused() {
        let faults = |text: &str| Config::from_yaml(text).unwrap_err().to_string();
        let of = |section: &str| faults(&format!("tls: {{}}\ncertificates: {{ {section} }}"));
        assert!(faults("certificates: { make: true }").contains("without `tls`"));
        assert!(of("names: [a.example.]").contains("names"), "no certificate fits that name");
        assert!(of("certificate_seconds: 3600").contains("must be 14400 or more"));
        assert!(of("ca_seconds: 86400").contains("must be 31104000 or more"));
        let rules = CertificatesConfig::default();
        assert_eq!(rules.fault(true), None);
    }
}
