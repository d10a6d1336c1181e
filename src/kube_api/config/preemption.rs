//! The section `preemption` of the configuration: for which pods less important ones are evicted.

use std::time::Duration;

use serde::Deserialize;

use crate::config::values::seconds;

/// Checked section `preemption`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
pub struct PreemptionConfig {
    /// Whether less important pods are evicted for a GPU pod that waits.
    pub enabled: bool,
    /// How long a pod waits before, from its first refusal.
    #[serde(rename = "after_seconds", deserialize_with = "seconds::<0, 86_400, _>")]
    pub after: Duration,
    /// How long each pod runs before it may be evicted.
    #[serde(rename = "protect_seconds", deserialize_with = "seconds::<0, 604_800, _>")]
    pub protect: Duration,
    /// Most pods for which room is made at once. No key: tests have other values.
    #[serde(skip)]
    pub at_once: usize,
}

impl Default for PreemptionConfig {
    fn default() -> Self {
        let (after, protect) = (Duration::from_secs(1), Duration::ZERO);
        Self { enabled: true, after, protect, at_once: 8 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};

    #[test]
    fn every_key_of_preemption_is_read() {
        let text = "preemption: { enabled: false, after_seconds: 60, protect_seconds: 7 }";
        let expected = PreemptionConfig {
            enabled: false,
            after: Duration::from_secs(60),
            protect: Duration::from_secs(7),
            at_once: 8,
        };
        assert_eq!(Config::from_yaml(text).unwrap().preemption, expected);
        assert!(keys_of("preemption").iter().all(|key| text.contains(&format!("{key}:"))));
        assert!(Config::from_yaml("preemption:").unwrap().preemption.enabled);
        let faults = Config::from_yaml("preemption: { enabled: 1, at: 3 }").unwrap_err();
        assert_eq!(faults.faults.len(), 2, "{faults}");
    }
}
