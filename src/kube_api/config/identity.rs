//! The sections `tls` and `agents` of the configuration: how this process proves itself, and who may
//! call it.

use std::path::PathBuf;

use garde::Validate;
use serde::Deserialize;

use crate::config::values::{filled, plain_name};

/// A name in the certificate that kube-scheduler shows.
pub const SCHEDULER_NAME: &str = "gpupack-scheduler";

/// For whom the tokens of agents are made.
pub const AUDIENCE: &str = "gpupack";

/// Checked section `tls`; its fields have the order of the docs. With it, kube-scheduler,
/// agents and other replicas prove who they are.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Validate)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
#[garde(allow_unvalidated)]
pub struct TlsConfig {
    /// Certificate chain in PEM, the own one first.
    #[garde(custom(filled))]
    pub certificate_file: PathBuf,
    /// Its private key in PEM.
    #[garde(custom(filled))]
    pub key_file: PathBuf,
    /// The CA of kube-scheduler and of the replicas, in PEM.
    #[garde(custom(filled))]
    pub ca_file: PathBuf,
}

impl Default for TlsConfig {
    fn default() -> Self {
        Self {
            certificate_file: PathBuf::from("/etc/gpupack/tls/tls.crt"),
            key_file: PathBuf::from("/etc/gpupack/tls/tls.key"),
            ca_file: PathBuf::from("/etc/gpupack/tls/ca.crt"),
        }
    }
}

/// Checked section `agents`. It counts only with `tls`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Validate)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
#[garde(allow_unvalidated)]
pub struct AgentsConfig {
    /// Namespace of the agents.
    #[garde(custom(plain_name))]
    pub namespace: String,
}

impl Default for AgentsConfig {
    fn default() -> Self {
        Self { namespace: "gpupack-agents".to_owned() }
    }
}

impl AgentsConfig {
    /// Their user name at the API server.
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{}:gpupack-agent", self.namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};

    #[test]
    fn every_key_is_read_and_faults_name_the_section() {
        let text =
            "tls: { certificate_file: /c, key_file: /k, ca_file: /a }\nagents: { namespace: n }";
        let config = Config::from_yaml(text).unwrap();
        let expected = TlsConfig {
            certificate_file: "/c".into(),
            key_file: "/k".into(),
            ca_file: "/a".into(),
        };
        assert_eq!(config.tls, Some(expected));
        assert_eq!(config.agents.user(), "system:serviceaccount:n:gpupack-agent");
        assert!(keys_of("agents").iter().all(|key| text.contains(&format!("{key}:"))));
        let text = "tls: { key_file: '', name: x }\nagents: { namespace: a/b }";
        let faults = Config::from_yaml(text).unwrap_err();
        assert_eq!(faults.faults.len(), 3, "{faults}");
    }
}
