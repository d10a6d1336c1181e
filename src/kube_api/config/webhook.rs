//! The section `webhook` of the configuration: the listener of the admission webhook, and rules
//! that differ between clusters.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use garde::Validate;
use serde::{Deserialize, Deserializer};

use crate::config::allowed::{
    CLASSES_WITHOUT_GPUS, HostFolder, capabilities, classes, sysctls, taints, variables,
};
use crate::config::values::{NoContext, address, filled, is_plain, number};
use engine::model::isolation::DriverLimits;

/// What happens to a pod without a GPU request whose RuntimeClass may give GPUs. With NVIDIA's, an
/// image that sets `NVIDIA_VISIBLE_DEVICES=all`, as CUDA images do, gets every GPU of its node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
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

impl MemoryLimit {
    /// What the driver limits then.
    pub fn driver_limits(self) -> DriverLimits {
        match self {
            Self::None => DriverLimits::Unused,
            Self::Driver => DriverLimits::Configured,
            Self::Mps => DriverLimits::OfClients,
        }
    }
}

/// Whether MPS clients are also limited to a part of the SMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThreadCap {
    /// They are not: each may use all of them while the others are idle.
    #[default]
    None,
    /// Each to its share: see [`THREAD_CAP`].
    Share,
}

/// What [`ThreadCap::Share`] does, for people.
pub const THREAD_CAP: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of clients of MPS is the pod's part of its GPU \
    (`mps_thread_percentage: share`), and 100 on Hopper GPUs and unknown models: with less, results there were \
    silently incomplete";

/// Checked section `webhook`; its fields have the order of the docs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Validate)]
#[serde(default, deny_unknown_fields, expecting = "it must be a mapping of keys to values")]
#[garde(allow_unvalidated)]
pub struct WebhookConfig {
    /// Address of the TLS listener.
    #[serde(deserialize_with = "address")]
    pub listen: SocketAddr,
    /// Certificate chain in PEM, the server's own first.
    #[garde(custom(filled))]
    pub certificate_file: PathBuf,
    /// Private key in PEM.
    #[garde(custom(filled))]
    pub key_file: PathBuf,
    /// RuntimeClass of GPU pods; `None` if NVIDIA's runtime is the default of the nodes.
    #[serde(deserialize_with = "runtime_class")]
    #[garde(inner(custom(filled)))]
    pub runtime_class: Option<String>,
    /// What happens to pods without a GPU request whose RuntimeClass may give GPUs.
    #[serde(rename = "unmanaged_runtime_class")]
    pub unmanaged: Unmanaged,
    /// Whether gpupack serves pods that request `nvidia.com/gpu` and name no scheduler: they get
    /// its annotations instead. Otherwise kubelet's device plugin does, and they stay unchanged.
    pub take_over_whole_gpus: bool,
    /// What limits a container to its memory.
    pub memory_limit: MemoryLimit,
    /// Folder of every node with the MPS pipe folders, one for each GPU.
    pub mps_folder: HostFolder,
    /// Whether MPS limits compute.
    #[serde(rename = "mps_thread_percentage")]
    pub thread_cap: ThreadCap,
    /// Capabilities that GPU pods may add, beyond those of *baseline*; without `CAP_`.
    #[garde(custom(capabilities))]
    pub allowed_capabilities: Vec<String>,
    /// Folders of the node that they may mount, each only as a whole.
    pub allowed_host_paths: Vec<HostFolder>,
    /// Whether they may use the network of their node, and its ports.
    pub allow_host_network: bool,
    /// Kernel parameters that they may set, beyond those of *baseline*.
    #[garde(custom(sysctls))]
    pub allowed_sysctls: Vec<String>,
    /// Variables `NVIDIA_…` that they may set, beyond the harmless ones.
    #[garde(custom(variables))]
    pub allowed_variables: Vec<String>,
    /// RuntimeClasses that give no GPU.
    #[garde(custom(classes(self.runtime_class.as_deref())))]
    pub runtime_classes_without_gpus: Vec<String>,
    /// Whether they may have ResourceClaims, for devices of DRA drivers. A pod does not say which
    /// devices these are for, so no DRA driver may give out GPUs of gpupack's nodes.
    pub allow_resource_claims: bool,
    /// Longest grace period of a GPU pod, in seconds.
    #[serde(deserialize_with = "number::<30, 604_800, _, _>")]
    pub max_grace_period_seconds: u64,
    /// Keys of taints with the effect `NoSchedule` that GPU pods tolerate without saying so.
    #[garde(custom(taints))]
    pub tolerated_taints: Vec<String>,
    /// Where objects have templates of pods that are completed like pods: for resources such as
    /// `jobsets.jobset.x-k8s.io`. Those of Jobs are completed without being listed.
    #[garde(custom(with_templates))]
    pub templates: BTreeMap<String, Vec<TemplatePath>>,
}

/// The resource of Jobs, whose templates are always completed.
pub const JOBS: &str = "jobs.batch";

/// Fields that lead to templates of pods in an object, such as `spec/replicatedJobs/*/template`:
/// names, and `*` for all items of a list or all values of a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct TemplatePath(String);

impl TemplatePath {
    /// That of a Job, and of most kinds.
    pub fn of_jobs() -> Self {
        Self("spec/template".to_owned())
    }

    /// The names and `*`, from the object on.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        self.0.split('/')
    }
}

impl TryFrom<String> for TemplatePath {
    type Error = String;

    fn try_from(path: String) -> Result<Self, Self::Error> {
        let parts: Vec<&str> = path.split('/').collect();
        let is_legal = parts.len() > 1
            && parts.len() <= MOST_PARTS
            && parts[0] == "spec"
            && parts.iter().all(|part| *part == "*" || is_name(part))
            && parts.iter().filter(|part| **part == "*").count() <= MOST_STARS;
        match is_legal {
            true => Ok(Self(path)),
            false => Err(format!(
                "it must be a path such as `spec/replicatedJobs/*/template/spec/template`: `spec`, then \
                 names of fields, and `*` for all items of a list; at most {MOST_PARTS} parts, of which \
                 {MOST_STARS} are `*`"
            )),
        }
    }
}

fn is_name(part: &str) -> bool {
    (1..=63).contains(&part.len()) && part.chars().all(|c| c.is_ascii_alphanumeric())
}

/// Most parts of a path, and most of them that are `*`.
const MOST_PARTS: usize = 16;
const MOST_STARS: usize = 2;

/// A rule for templates.
fn with_templates(templates: &BTreeMap<String, Vec<TemplatePath>>, _: &NoContext) -> garde::Result {
    for (resource, paths) in templates {
        if !is_resource(resource) {
            return Err(garde::Error::new(format!(
                "`{resource}` must be the plural name and the group of a resource, such as \
                 `jobsets.jobset.x-k8s.io`"
            )));
        }
        if resource == JOBS {
            return Err(garde::Error::new(format!("`{JOBS}` is completed without being listed")));
        }
        if paths.is_empty() {
            return Err(garde::Error::new(format!("`{resource}` must have at least one path")));
        }
    }
    Ok(())
}

/// Whether a name has the form of a resource: a plural and a group.
fn is_resource(name: &str) -> bool {
    let parts = name.split_once('.');
    is_plain(name)
        && !name.contains('/')
        && parts.is_some_and(|(plural, group)| !plural.is_empty() && !group.is_empty())
}

impl Default for WebhookConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8443)),
            certificate_file: PathBuf::from("/etc/gpupack/tls/tls.crt"),
            key_file: PathBuf::from("/etc/gpupack/tls/tls.key"),
            runtime_class: Some("nvidia".to_owned()),
            unmanaged: Unmanaged::default(),
            take_over_whole_gpus: false,
            memory_limit: MemoryLimit::default(),
            mps_folder: HostFolder::mps(),
            thread_cap: ThreadCap::default(),
            allowed_capabilities: Vec::new(),
            allowed_host_paths: Vec::new(),
            allow_host_network: false,
            allowed_sysctls: Vec::new(),
            allowed_variables: Vec::new(),
            runtime_classes_without_gpus: CLASSES_WITHOUT_GPUS.map(str::to_owned).into(),
            allow_resource_claims: false,
            max_grace_period_seconds: 600,
            tolerated_taints: Vec::new(),
            templates: BTreeMap::new(),
        }
    }
}

fn runtime_class<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(Some(String::deserialize(from)?).filter(|class| class != "none"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::{Config, tests::keys_of};

    #[test]
    fn every_key_is_read() {
        let text = "webhook:\n  listen: 0.0.0.0:9\n  certificate_file: /c\n  key_file: /k\n  \
            runtime_class: none\n  unmanaged_runtime_class: blank\n  take_over_whole_gpus: true\n  \
            memory_limit: mps\n  mps_folder: /a/b.c\n  mps_thread_percentage: share\n  \
            allowed_capabilities: [IPC_LOCK]\n  allowed_host_paths: [/data]\n  \
            allow_host_network: true\n  allowed_sysctls: [a.b]\n  \
            allowed_variables: [NVIDIA_GDS]\n  runtime_classes_without_gpus: [wasm]\n  \
            allow_resource_claims: true\n  max_grace_period_seconds: 60\n  \
            tolerated_taints: [nvidia.com/gpu]\n  \
            templates: {jobsets.jobset.x-k8s.io: [spec/a/*/template]}\n";
        let expected = WebhookConfig {
            listen: "0.0.0.0:9".parse().unwrap(),
            certificate_file: PathBuf::from("/c"),
            key_file: PathBuf::from("/k"),
            runtime_class: None,
            unmanaged: Unmanaged::Blank,
            take_over_whole_gpus: true,
            memory_limit: MemoryLimit::Mps,
            mps_folder: "/a/b.c".parse().unwrap(),
            thread_cap: ThreadCap::Share,
            allowed_capabilities: vec!["IPC_LOCK".to_owned()],
            allowed_host_paths: vec!["/data".parse().unwrap()],
            allow_host_network: true,
            allowed_sysctls: vec!["a.b".to_owned()],
            allowed_variables: vec!["NVIDIA_GDS".to_owned()],
            runtime_classes_without_gpus: vec!["wasm".to_owned()],
            allow_resource_claims: true,
            max_grace_period_seconds: 60,
            tolerated_taints: vec!["nvidia.com/gpu".to_owned()],
            templates: BTreeMap::from([(
                "jobsets.jobset.x-k8s.io".to_owned(),
                vec![TemplatePath("spec/a/*/template".to_owned())],
            )]),
        };
        assert_eq!(Config::from_yaml(text).unwrap().webhook, expected);
        assert!(keys_of("webhook").iter().all(|key| text.contains(&format!("{key}:"))));
        assert_eq!(Config::from_yaml("webhook:").unwrap().webhook, WebhookConfig::default());
    }

    #[test]
    fn a_node_folder_is_absolute_and_normalized() {
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
    fn templates_have_a_resource_and_paths() {
        let read = |templates: &str| {
            Config::from_yaml(&format!("webhook: {{templates: {{{templates}}}}}"))
                .map(|config| config.webhook.templates)
        };
        let good = read("rayclusters.ray.io: [spec/headGroupSpec/template, spec/w/*/template]");
        let paths = &good.unwrap()["rayclusters.ray.io"];
        assert_eq!(paths[1].parts().collect::<Vec<_>>(), ["spec", "w", "*", "template"]);
        let long = format!("a.b: [spec{}]", "/a".repeat(16));
        for (bad, part) in [
            ("jobsets: [spec/template]", "the plural name and the group"),
            ("a/b.c: [spec/template]", "the plural name and the group"),
            (".b: [spec/template]", "the plural name and the group"),
            ("jobs.batch: [spec/template]", "without being listed"),
            ("a.b: []", "at least one path"),
            ("a.b: [template]", "`spec`, then"),
            ("a.b: [spec]", "`spec`, then"),
            ("a.b: [spec//template]", "`spec`, then"),
            ("a.b: [/spec/template]", "`spec`, then"),
            ("a.b: [spec/~1]", "`spec`, then"),
            ("a.b: [spec/*/*/*]", "`spec`, then"),
            (&long, "`spec`, then"),
            ("a.b: spec/template", "a.b"),
        ] {
            let faults = read(bad).unwrap_err().to_string();
            assert!(faults.contains(part) && faults.contains("`webhook.templates"), "{faults}");
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
            "expected a boolean",
            "expected one of `none`, `driver`, `mps`",
            "`webhook.lisen: x` is not allowed: unknown field",
            "`webhook.unmanaged_runtime_class: - a`",
        ] {
            assert!(faults.to_string().contains(part), "{part} in {faults}");
        }
        let faults = Config::from_yaml("webhook: 7\n").unwrap_err();
        assert!(faults.to_string().contains("`webhook: 7`"), "{faults}");
    }
}
