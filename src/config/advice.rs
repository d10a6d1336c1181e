//! The section `advice` of the configuration: where to read what pods used before the start.

use std::time::Duration;

use hyper::Uri;

use crate::config::reader::Reader;

/// Checked section `advice`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdviceConfig {
    /// Address of the Prometheus that scrapes the agents, without a final slash, if any.
    pub series_url: Option<String>,
    /// How far back to read.
    pub look_back: Duration,
}

impl Default for AdviceConfig {
    fn default() -> Self {
        Self { series_url: None, look_back: Duration::from_secs(24 * 3_600) }
    }
}

/// All keys of the section, in the order of the docs.
pub const KEYS: [&str; 2] = ["prometheus_url", "look_back_hours"];

impl AdviceConfig {
    /// Takes the section's keys out of `reader`.
    pub(crate) fn read(reader: &mut Reader) -> Self {
        let hours = reader.number("look_back_hours", 1..=168, 24);
        let look_back = Duration::from_secs(hours * 3_600);
        let given = reader.take("prometheus_url");
        let url = given.as_ref().and_then(|value| value.as_str()).and_then(plain_address);
        if let (Some(value), None) = (&given, &url) {
            let allowed = "an address such as `http://prometheus.monitoring:9090`: plain HTTP, without \
                           a user, query or fragment";
            reader.fault("prometheus_url", value, allowed);
        }
        Self { series_url: url, look_back }
    }
}

/// A plain HTTP address, without its final slash; `None` for any other text.
fn plain_address(text: &str) -> Option<String> {
    let address: Uri = text.parse().ok()?;
    let is_http = address.scheme_str() == Some("http");
    let is_plain = address.query().is_none() && !text.contains(['#', '@']);
    let has_host = address.host().is_some_and(|host| !host.is_empty());
    (is_http && is_plain && has_host).then(|| text.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::Config;

    #[test]
    fn every_key_is_read_and_nobody_is_asked_unless_named() {
        let text = "advice: { prometheus_url: 'http://p.m:9090/prom/', look_back_hours: 168 }";
        let series_url = Some("http://p.m:9090/prom".to_owned());
        let expected = AdviceConfig { series_url, look_back: Duration::from_secs(604_800) };
        assert_eq!(Config::from_yaml(text).unwrap().advice, expected);
        assert!(KEYS.iter().all(|key| text.contains(&format!("{key}:"))));
        assert_eq!(Config::from_yaml("advice:").unwrap().advice.series_url, None);
    }

    #[test]
    fn only_plain_addresses_are_taken() {
        for bad in [
            "''",
            "7",
            "p:9090",
            "https://p:9090",
            "http://",
            "http:///x",
            "ftp://p",
            "http://a b",
            "http://user:secret@p",
            "http://p/?query=x",
            "http://p/#x",
        ] {
            let faults = Config::from_yaml(&format!("advice: {{ prometheus_url: {bad} }}"));
            let faults = faults.expect_err(bad);
            let said = faults.to_string();
            assert!(
                said.contains("`advice.prometheus_url: ") && said.contains("plain HTTP"),
                "{said}"
            );
        }
        let faults = Config::from_yaml("advice: { look_back_hours: 0, look_back: 3 }").unwrap_err();
        assert_eq!(faults.faults.len(), 2, "{faults}");
    }
}
