//! The section `advice` of the configuration: where to read what pods used before the start.

use serde::de::Error;
use serde::{Deserialize, Deserializer};

use runtime::http_client::plain_address;

/// Checked section `advice`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
pub struct AdviceConfig {
    /// Address of the Prometheus that scrapes the agents, without a final slash, if any.
    #[serde(rename = "prometheus_url", deserialize_with = "plain_http")]
    pub series_url: Option<String>,
}

fn plain_http<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(from).unwrap_or_default();
    plain_address(&text).map(Some).map_err(|fault| {
        D::Error::custom(format_args!(
            "{fault}; it must be an address such as `http://prometheus.monitoring:9090`: plain HTTP"
        ))
    })
}

#[cfg(test)]
mod tests {
    use crate::config::file::{Config, tests::keys_of};

    #[test]
    fn every_key_is_read_and_no_server_is_queried_by_default() {
        let text = "advice: { prometheus_url: 'http://p.m:9090/prom/' }";
        let series_url = Some("http://p.m:9090/prom".to_owned());
        assert_eq!(Config::from_yaml(text).unwrap().advice.series_url, series_url);
        assert!(keys_of("advice").iter().all(|key| text.contains(&format!("{key}:"))));
        assert_eq!(Config::from_yaml("advice:").unwrap().advice.series_url, None);
    }

    #[test]
    fn only_plain_addresses_are_accepted() {
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
    }
}
