//! The section `lease` of the configuration: how several replicas agree on the one that acts.

use std::time::Duration;

use garde::Validate;
use serde::Deserialize;

use crate::config::values::{plain_name, seconds};

/// Name of the Lease, as the Role `gpupack-lease` and the policies have it.
pub const LEASE_NAME: &str = "gpupack";

/// Checked section `lease`. It counts only for a process with a name among replicas.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Validate)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
#[garde(allow_unvalidated)]
pub struct LeaseConfig {
    /// Namespace of the Lease, and of the replicas' pods.
    #[garde(custom(plain_name))]
    pub namespace: String,
    /// How long a leader that does not renew it keeps it.
    #[serde(rename = "seconds", deserialize_with = "seconds::<2, 60, _>")]
    pub holds_for: Duration,
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self { namespace: "gpu-system".to_owned(), holds_for: Duration::from_secs(3) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};

    #[test]
    fn every_key_is_read_and_faults_name_the_section() {
        let text = "lease: { namespace: a, seconds: 7 }";
        let expected = LeaseConfig { namespace: "a".to_owned(), holds_for: Duration::from_secs(7) };
        assert_eq!(Config::from_yaml(text).unwrap().lease, expected);
        assert!(keys_of("lease").iter().all(|key| text.contains(&format!("{key}:"))));
        let text = "lease: { namespace: a/b, seconds: 1, renew: 2 }";
        let faults = Config::from_yaml(text).unwrap_err();
        assert_eq!(faults.faults.len(), 3, "{faults}");
        assert!(faults.faults.iter().all(|fault| fault.contains("lease")), "{faults}");
    }
}
