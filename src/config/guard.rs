//! The section `guard` of the configuration: the memory guard, for pods that use more GPU memory
//! than they may.

use std::time::Duration;

use serde::Deserialize;

use crate::config::values::{mib, number, seconds};
use crate::hardware::units::MemMib;

/// Checked section `guard`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
pub struct GuardConfig {
    /// Whether an over-limit pod is evicted, not only reported.
    pub evict: bool,
    /// The number of successive lists of processes that must show a pod over its limit before it is
    /// evicted; at least 2.
    #[serde(deserialize_with = "number::<2, 1_000, _, _>")]
    pub after_samples: u32,
    /// Use up to this much beyond what a pod may use does not count.
    #[serde(rename = "tolerance_mib", deserialize_with = "mib::<0, 65_536, _>")]
    pub tolerance: MemMib,
    /// How long a pod that is no longer alone on its GPU may still use memory up to its limit.
    #[serde(rename = "grace_seconds", deserialize_with = "seconds::<0, 3_600, _>")]
    pub grace: Duration,
}

impl Default for GuardConfig {
    fn default() -> Self {
        let grace = Duration::from_secs(30);
        Self { evict: false, after_samples: 2, tolerance: MemMib::new(128), grace }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};

    #[test]
    fn every_key_is_read_and_nothing_is_evicted_by_default() {
        let text = "guard: { evict: true, after_samples: 3, tolerance_mib: 0, grace_seconds: 7 }";
        let expected = GuardConfig {
            evict: true,
            after_samples: 3,
            tolerance: MemMib::ZERO,
            grace: Duration::from_secs(7),
        };
        assert_eq!(Config::from_yaml(text).unwrap().guard, expected);
        assert!(keys_of("guard").iter().all(|key| text.contains(&format!("{key}:"))));
        assert!(!Config::from_yaml("guard:").unwrap().guard.evict);
    }

    #[test]
    fn faults_name_the_section() {
        let text = "guard: { evict: sure, after_samples: 1, tolerance_mib: -1, evicts: true }";
        let faults = Config::from_yaml(text).unwrap_err();
        assert_eq!(faults.faults.len(), 4, "{faults}");
        for part in
            ["`guard.evict: sure`", "2 to 1000", "`guard.tolerance_mib: -1`", "guard.evicts"]
        {
            assert!(faults.to_string().contains(part), "{part} in {faults}");
        }
    }
}
