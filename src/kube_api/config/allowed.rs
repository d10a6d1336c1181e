//! Keys of the section `webhook`: what GPU pods may have beyond Pod Security *baseline*.

use std::str::FromStr;

use serde::Deserialize;

use crate::config::values::{NoContext, each, is_key_of_kubernetes, is_plain};

/// A path without empty parts, `.` and `..`, and with `/run` for its link `/var/run`.
pub fn plain(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    if parts.starts_with(&["var", "run"]) {
        parts.remove(0);
    }
    format!("/{}", parts.join("/"))
}

/// A folder of every node, valid in a manifest: absolute, of letters, digits, `.`, `_` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct HostFolder(String);

impl HostFolder {
    /// The default folder of MPS.
    pub(crate) fn mps() -> Self {
        Self("/run/gpupack/mps".to_owned())
    }

    /// The path.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether `path` is exactly this folder. Nothing below it counts: a client that can write
    /// there may leave a link to any path of the node, and the container runtime follows it.
    pub fn is_at(&self, path: &str) -> bool {
        path.split('/').all(|part| part != "..") && plain(path) == plain(&self.0)
    }
}

impl FromStr for HostFolder {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.strip_prefix('/').filter(|_| text.len() <= 200);
        match parts.is_some_and(|parts| parts.split('/').all(is_plain_part)) {
            true => Ok(Self(text.to_owned())),
            false => Err("it must be an absolute path of letters, digits, `.`, `_` and `-` such \
                          as `/run/gpupack/mps`"),
        }
    }
}

fn is_plain_part(part: &str) -> bool {
    let is_dots = part == "." || part == "..";
    !is_dots && is_word(part, "._-")
}

impl TryFrom<String> for HostFolder {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// Capabilities by which a container can undo its confinement to devices: never allowed.
pub const LIFTING_CAPABILITIES: [&str; 2] = ["ALL", "SYS_ADMIN"];

/// RuntimeClasses of NVIDIA's runtime, as the GPU Operator names them: never without GPUs.
pub const NVIDIA_CLASSES: [&str; 3] = ["nvidia", "nvidia-cdi", "nvidia-legacy"];

/// A name of letters, digits and the characters `extra`.
fn is_word(text: &str, extra: &str) -> bool {
    (1..=253).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || extra.contains(c))
}

/// A rule for capabilities.
pub(crate) fn capabilities(names: &[String], _: &NoContext) -> garde::Result {
    let allowed =
        "a list of capabilities in capitals without `CAP_`, and neither `ALL` nor `SYS_ADMIN`";
    each(is_harmless_capability, allowed)(names, &())
}

fn is_harmless_capability(text: &str) -> bool {
    let is_plain = is_word(text, "_") && !text.starts_with("CAP_");
    is_plain && text.to_ascii_uppercase() == text && !LIFTING_CAPABILITIES.contains(&text)
}

/// A rule for kernel parameters.
pub(crate) fn sysctls(names: &[String], _: &NoContext) -> garde::Result {
    each(|text| is_word(text, "-._/"), "a list of names such as `net.core.somaxconn`")(names, &())
}

/// A rule for variables of NVIDIA.
pub(crate) fn variables(names: &[String], _: &NoContext) -> garde::Result {
    let allowed = "a list of names that begin with `NVIDIA_` and choose no device and no memory";
    each(is_harmless_variable, allowed)(names, &())
}

fn is_harmless_variable(text: &str) -> bool {
    let owned = ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_GPU_MEMORY_", "NVIDIA_MIG_"];
    let is_owned = owned.iter().any(|name| text.starts_with(name));
    text.starts_with("NVIDIA_") && is_word(text, "_") && !is_owned
}

/// The RuntimeClasses that give no GPU unless the configuration says otherwise.
pub(crate) const CLASSES_WITHOUT_GPUS: [&str; 3] = ["crun", "kata", "runc"];

/// A rule for RuntimeClasses that give no GPU; `runtime_class` is the one that gives GPUs. It may be one
/// of the default, which a configuration need not repeat without it.
pub(crate) fn classes(runtime_class: Option<&str>) -> impl FnOnce(&[String], &()) -> garde::Result {
    let is_legal = move |text: &str| {
        let is_other = runtime_class != Some(text) || CLASSES_WITHOUT_GPUS.contains(&text);
        is_word(text, "-.") && !NVIDIA_CLASSES.contains(&text) && is_other
    };
    each(is_legal, "a list of RuntimeClasses, none of them NVIDIA's")
}

/// A rule for keys of taints that GPU pods tolerate. Those of Kubernetes are not among them: with
/// `node.kubernetes.io/unschedulable` GPU pods would be placed on cordoned nodes.
pub(crate) fn taints(keys: &[String], _: &NoContext) -> garde::Result {
    let allowed = "a list of keys of taints such as `nvidia.com/gpu`, none of Kubernetes' own";
    each(|key| is_plain(key) && !is_key_of_kubernetes(key), allowed)(keys, &())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::Config;

    #[test]
    fn access_to_every_gpu_cannot_be_allowed() {
        for bad in [
            "allowed_capabilities: [SYS_ADMIN]",
            "allowed_capabilities: [all]",
            "allowed_capabilities: [CAP_SYS_ADMIN]",
            "allowed_capabilities: IPC_LOCK",
            "allowed_host_paths: [/]",
            "allowed_host_paths: [data]",
            "allowed_variables: [NVIDIA_VISIBLE_DEVICES]",
            "allowed_variables: [NVIDIA_MIG_CONFIG_DEVICES]",
            "allowed_variables: [GPUPACK_MEMORY_MIB]",
            "runtime_classes_without_gpus: [kata, nvidia-cdi]",
            "runtime_class: mine, runtime_classes_without_gpus: [mine]",
            "max_grace_period_seconds: 29",
            "allow_host_network: 7",
            "tolerated_taints: nvidia.com/gpu",
            "tolerated_taints: ['']",
            "tolerated_taints: ['nvidia.com/gpu=present:NoSchedule']",
            "tolerated_taints: [node.kubernetes.io/unschedulable]",
            "tolerated_taints: [gpu, node.cloudprovider.kubernetes.io/shutdown]",
        ] {
            let faults = Config::from_yaml(&format!("webhook: {{{bad}}}")).unwrap_err();
            assert_eq!(faults.faults.len(), 1, "{bad}: {faults}");
        }
        let default = Config::from_yaml("webhook: {runtime_class: runc}").unwrap().webhook;
        assert_eq!(default.runtime_classes_without_gpus, CLASSES_WITHOUT_GPUS);
        let none = "webhook: {runtime_classes_without_gpus: [], allowed_host_paths: []}";
        assert!(Config::from_yaml(none).unwrap().webhook.runtime_classes_without_gpus.is_empty());
        let folder: HostFolder = "/data".parse().unwrap();
        assert!(folder.is_at("/data/") && folder.is_at("//data/."));
        for other in ["/data/a", "/data/a/..", "/data/../etc", "/database", "/", ""] {
            assert!(!folder.is_at(other), "{other}");
        }
    }
}
