//! The sections `guard` and `preemption` of the configuration: for what pods are evicted. The memory
//! guard is for pods that use more GPU memory than they may.

use std::time::Duration;

use serde::Deserialize;

use crate::config::values::seconds;
use wire::units::MemMib;

/// Checked section `guard`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
pub struct GuardConfig {
    /// Whether an over-limit pod is evicted, not only reported.
    pub evict: bool,
    /// Use up to this much beyond what a pod may use does not count. No key: tests have other values.
    #[serde(skip)]
    pub tolerance: MemMib,
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self { evict: false, tolerance: MemMib::new(128) }
    }
}

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

    #[test]
    fn every_key_is_read_and_nothing_is_evicted_by_default() {
        let text = "guard: { evict: true }";
        let expected = GuardConfig { evict: true, ..GuardConfig::default() };
        assert_eq!(Config::from_yaml(text).unwrap().guard, expected);
        assert!(keys_of("guard").iter().all(|key| text.contains(&format!("{key}:"))));
        assert!(!Config::from_yaml("guard:").unwrap().guard.evict);
    }

    #[test]
    fn faults_name_the_section() {
        let text = "guard: { evict: sure, evicts: true }";
        let faults = Config::from_yaml(text).unwrap_err();
        assert_eq!(faults.faults.len(), 2, "{faults}");
        for part in ["`guard.evict: sure`", "guard.evicts"] {
            assert!(faults.to_string().contains(part), "{part} in {faults}");
        }
    }
}
