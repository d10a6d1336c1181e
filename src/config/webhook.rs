//! The section `webhook` of the configuration: the listener of the admission webhook, and rules
//! that differ between clusters.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::config::allowed::{Allowed, HostFolder};
use crate::config::reader::Reader;

/// Who serves pods that request `nvidia.com/gpu` and name no scheduler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WholeGpus {
    /// Kubelet's device plugin: they stay unchanged.
    #[default]
    Kubelet,
    /// gpupack: they get its annotations instead.
    TakenOver,
}

/// What happens to a pod without a GPU request whose RuntimeClass may give GPUs. With NVIDIA's, an
/// image that sets `NVIDIA_VISIBLE_DEVICES=all`, as CUDA images do, gets every GPU of its node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unmanaged {
    /// The pod is refused.
    #[default]
    Refuse,
    /// The pod keeps the class, and its containers get no GPU.
    Blank,
    /// The pod stays unchanged: gpupack does not keep it away from any GPU.
    Allow,
}

/// What limits a container to its allocated memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryLimit {
    /// Nothing that the webhook sets up.
    #[default]
    None,
    /// NVIDIA's container toolkit (1.20.1 and later, driver r615 and later, cgroup v2). It reads
    /// the limit from the container's environment and refuses a container if it cannot set it.
    Driver,
    /// MPS: each container that shares a GPU is a client of that GPU's daemon, and its own
    /// environment says how much memory it may take.
    Mps,
}

/// Whether MPS clients are also limited to a part of the SMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThreadCap {
    /// They are not: each may use all of them while the others are idle.
    #[default]
    None,
    /// Each to its share, but not on Hopper GPUs, where a report says that percentages below 100
    /// leave parts of results unwritten.
    Share,
    /// On those too, rounded down to percentages without a known fault.
    ShareOnHopper,
}

/// Checked section `webhook`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookConfig {
    /// Address of the TLS listener.
    pub listen: SocketAddr,
    /// Certificate chain in PEM, the server's own first.
    pub certificate_file: PathBuf,
    /// Private key in PEM.
    pub key_file: PathBuf,
    /// RuntimeClass of GPU pods; `None` if NVIDIA's runtime is the default of the nodes.
    pub runtime_class: Option<String>,
    /// What happens to pods without a GPU request whose RuntimeClass may give GPUs.
    pub unmanaged: Unmanaged,
    /// Who serves pods with `nvidia.com/gpu`.
    pub whole_gpus: WholeGpus,
    /// What limits a container to its memory.
    pub memory_limit: MemoryLimit,
    /// Folder of every node with the MPS pipe folders, one for each GPU.
    pub mps_folder: HostFolder,
    /// Whether MPS limits compute.
    pub thread_cap: ThreadCap,
    /// What GPU pods may have beyond *baseline*.
    pub allowed: Allowed,
}

impl Default for WebhookConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8443)),
            certificate_file: PathBuf::from("/etc/gpupack/tls/tls.crt"),
            key_file: PathBuf::from("/etc/gpupack/tls/tls.key"),
            runtime_class: Some("nvidia".to_owned()),
            unmanaged: Unmanaged::default(),
            whole_gpus: WholeGpus::default(),
            memory_limit: MemoryLimit::default(),
            mps_folder: HostFolder::mps(),
            thread_cap: ThreadCap::default(),
            allowed: Allowed::default(),
        }
    }
}

/// All keys of the section, in the order of the docs.
pub const KEYS: [&str; 17] = [
    "listen",
    "certificate_file",
    "key_file",
    "runtime_class",
    "unmanaged_runtime_class",
    "take_over_whole_gpus",
    "memory_limit",
    "mps_folder",
    "mps_thread_percentage",
    "allowed_capabilities",
    "allowed_host_paths",
    "allow_host_network",
    "allowed_sysctls",
    "allowed_variables",
    "runtime_classes_without_gpus",
    "allow_resource_claims",
    "max_grace_period_seconds",
];

impl WebhookConfig {
    /// Takes the section's keys out of `reader`.
    pub(crate) fn read(reader: &mut Reader) -> Self {
        let default = Self::default();
        let file = |text: Option<String>, default| text.map_or(default, PathBuf::from);
        let runtime_class = reader
            .text("runtime_class")
            .map_or(default.runtime_class, |class| (class != "none").then_some(class));
        Self {
            allowed: Allowed::read(reader, runtime_class.as_deref()),
            listen: reader.parsed("listen", "an address such as `0.0.0.0:8443`", default.listen),
            certificate_file: file(reader.text("certificate_file"), default.certificate_file),
            key_file: file(reader.text("key_file"), default.key_file),
            runtime_class,
            unmanaged: reader.word(
                "unmanaged_runtime_class",
                &[
                    ("refuse", Unmanaged::Refuse),
                    ("blank", Unmanaged::Blank),
                    ("allow", Unmanaged::Allow),
                ],
                default.unmanaged,
            ),
            whole_gpus: reader.switch(
                "take_over_whole_gpus",
                [WholeGpus::Kubelet, WholeGpus::TakenOver],
                default.whole_gpus,
            ),
            memory_limit: reader.word(
                "memory_limit",
                &[
                    ("none", MemoryLimit::None),
                    ("driver", MemoryLimit::Driver),
                    ("mps", MemoryLimit::Mps),
                ],
                default.memory_limit,
            ),
            mps_folder: reader.parsed(
                "mps_folder",
                "an absolute path of letters, digits, `.`, `_` and `-` such as `/run/gpupack/mps`",
                default.mps_folder,
            ),
            thread_cap: reader.word(
                "mps_thread_percentage",
                &[
                    ("none", ThreadCap::None),
                    ("share", ThreadCap::Share),
                    ("share_even_on_hopper", ThreadCap::ShareOnHopper),
                ],
                default.thread_cap,
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::allowed::{HostNetwork, ResourceClaims};
    use crate::config::file::Config;

    #[test]
    fn every_key_is_read() {
        let text = "webhook:\n  listen: 0.0.0.0:9\n  certificate_file: /c\n  key_file: /k\n  \
            runtime_class: none\n  unmanaged_runtime_class: blank\n  take_over_whole_gpus: true\n  \
            memory_limit: mps\n  mps_folder: /a/b.c\n  mps_thread_percentage: share\n  \
            allowed_capabilities: [IPC_LOCK]\n  allowed_host_paths: [/data]\n  \
            allow_host_network: true\n  allowed_sysctls: [a.b]\n  \
            allowed_variables: [NVIDIA_GDS]\n  runtime_classes_without_gpus: [wasm]\n  \
            allow_resource_claims: true\n  max_grace_period_seconds: 60\n";
        let expected = WebhookConfig {
            listen: "0.0.0.0:9".parse().unwrap(),
            certificate_file: PathBuf::from("/c"),
            key_file: PathBuf::from("/k"),
            runtime_class: None,
            unmanaged: Unmanaged::Blank,
            whole_gpus: WholeGpus::TakenOver,
            memory_limit: MemoryLimit::Mps,
            mps_folder: "/a/b.c".parse().unwrap(),
            thread_cap: ThreadCap::Share,
            allowed: Allowed {
                capabilities: vec!["IPC_LOCK".to_owned()],
                host_paths: vec!["/data".parse().unwrap()],
                host_network: HostNetwork::Allowed,
                sysctls: vec!["a.b".to_owned()],
                variables: vec!["NVIDIA_GDS".to_owned()],
                classes_without_gpus: vec!["wasm".to_owned()],
                resource_claims: ResourceClaims::Allowed,
                max_grace_seconds: 60,
            },
        };
        assert_eq!(Config::from_yaml(text).unwrap().webhook, expected);
        assert!(KEYS.iter().all(|key| text.contains(&format!("{key}:"))));
        assert_eq!(Config::from_yaml("webhook:").unwrap().webhook, WebhookConfig::default());
    }

    #[test]
    fn a_folder_of_the_nodes_is_absolute_and_plain() {
        let folder = |text: &str| {
            Config::from_yaml(&format!("webhook: {{mps_folder: '{text}'}}"))
                .map(|config| config.webhook)
        };
        for good in ["/run/gpupack/mps", "/mps", "/a-b/c_d/.e"] {
            assert_eq!(folder(good).unwrap().mps_folder.as_str(), good);
        }
        let long = format!("/{}", "a".repeat(200));
        for bad in [
            "/",
            "run/mps",
            "/run/",
            "/run//mps",
            "/run/../etc",
            "/run/./mps",
            "/a b",
            "/$(A)",
            &long,
        ] {
            let faults = folder(bad).unwrap_err().to_string();
            assert!(faults.contains("`webhook.mps_folder:"), "{faults}");
        }
    }

    #[test]
    fn faults_name_the_section() {
        let text = "webhook:\n  take_over_whole_gpus: maybe\n  memory_limit: cgroup\n  lisen: x\n  \
            unmanaged_runtime_class: [a]\n";
        let faults = Config::from_yaml(text).unwrap_err();
        assert_eq!(faults.faults.len(), 4, "{faults}");
        for part in [
            "`webhook.take_over_whole_gpus: maybe`",
            "`true` or `false`",
            "`none`, `driver` or `mps`",
            "`webhook.lisen` is unknown",
            "`refuse`, `blank` or `allow`",
        ] {
            assert!(faults.to_string().contains(part), "{part} in {faults}");
        }
        let faults = Config::from_yaml("webhook: 7\n").unwrap_err();
        assert!(faults.to_string().contains("`webhook: 7`"), "{faults}");
    }
}
