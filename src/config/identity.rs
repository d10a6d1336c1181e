//! The sections `tls` and `agents` of the configuration: how this process proves itself, and who may
//! call it.

use std::path::PathBuf;

use garde::Validate;
use serde::Deserialize;

use crate::config::values::{filled, is_dns_name, plain_name};

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
    /// A name in the certificate that kube-scheduler shows.
    #[garde(custom(dns_name))]
    pub scheduler_name: String,
    /// A name in the certificates of all replicas.
    #[garde(custom(dns_name))]
    pub replica_name: String,
}

impl Default for TlsConfig {
    fn default() -> Self {
        let file = |name: &str| PathBuf::from("/etc/gpupack/tls").join(name);
        Self {
            certificate_file: file("tls.crt"),
            key_file: file("tls.key"),
            ca_file: file("ca.crt"),
            scheduler_name: "gpupack-scheduler".to_owned(),
            replica_name: "gpupack-extender".to_owned(),
        }
    }
}

/// Checked section `agents`. It counts only with `tls`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Validate)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
#[garde(allow_unvalidated)]
pub struct AgentsConfig {
    /// For whom the tokens of agents are made.
    #[garde(custom(plain_name))]
    pub audience: String,
    /// Namespace of the agents.
    #[garde(custom(plain_name))]
    pub namespace: String,
    /// Their ServiceAccount.
    #[garde(custom(plain_name))]
    pub service_account: String,
}

impl Default for AgentsConfig {
    fn default() -> Self {
        Self {
            audience: "gpupack".to_owned(),
            namespace: "gpupack-agents".to_owned(),
            service_account: "gpupack-agent".to_owned(),
        }
    }
}

impl AgentsConfig {
    /// Their user name at the API server.
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.service_account)
    }
}

/// A rule for the name in a certificate.
fn dns_name(text: &str, (): &()) -> garde::Result {
    match is_dns_name(text) {
        true => Ok(()),
        false => Err(garde::Error::new("it must be a DNS name, as certificates have it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};

    #[test]
    fn every_key_is_read_and_faults_name_the_section() {
        let text = "tls: { certificate_file: /c, key_file: /k, ca_file: /a, scheduler_name: s.x, \
            replica_name: r }\nagents: { audience: u, namespace: n, service_account: a }";
        let config = Config::from_yaml(text).unwrap();
        let expected = TlsConfig {
            certificate_file: "/c".into(),
            key_file: "/k".into(),
            ca_file: "/a".into(),
            scheduler_name: "s.x".to_owned(),
            replica_name: "r".to_owned(),
        };
        assert_eq!(config.tls, Some(expected));
        assert_eq!(config.agents.user(), "system:serviceaccount:n:a");
        assert!(keys_of("agents").iter().all(|key| text.contains(&format!("{key}:"))));
        let text = "tls: { key_file: '', scheduler_name: s.x., replica_name: 10.0.0.1, name: x }\n\
            agents: { audience: '', namespace: a/b }";
        let faults = Config::from_yaml(text).unwrap_err();
        assert_eq!(faults.faults.len(), 6, "{faults}");
    }
}
