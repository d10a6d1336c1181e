//! The section `guard` of the configuration: whether pods are evicted that use more GPU memory than they
//! may.

use serde::Deserialize;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};

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
