//! Keys of the section `webhook`: what GPU pods may have beyond Pod Security *baseline*.

use std::str::FromStr;

use crate::config::reader::Reader;

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
#[derive(Clone, Debug, PartialEq, Eq)]
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
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let is_plain = |part: &str| {
            let is_legal = |c: char| c.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&c);
            !part.is_empty() && part != "." && part != ".." && part.chars().all(is_legal)
        };
        let parts = text.strip_prefix('/').ok_or(())?;
        let is_sound = text.len() <= 200 && parts.split('/').all(is_plain);
        if is_sound { Ok(Self(text.to_owned())) } else { Err(()) }
    }
}

/// Capabilities by which a container can undo its confinement to devices: never allowed.
pub const LIFTING_CAPABILITIES: [&str; 2] = ["ALL", "SYS_ADMIN"];

/// RuntimeClasses of NVIDIA's runtime, as the GPU Operator names them: never without GPUs.
pub const NVIDIA_CLASSES: [&str; 3] = ["nvidia", "nvidia-cdi", "nvidia-legacy"];

/// Whether GPU pods may use the network of their node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostNetwork {
    /// They may use neither it nor its ports.
    #[default]
    Refused,
    /// They may.
    Allowed,
}

/// Whether GPU pods may have ResourceClaims for devices of DRA drivers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResourceClaims {
    /// They may not: the pod does not say which devices a ResourceClaim is for.
    #[default]
    Refused,
    /// They may: no DRA driver gives out GPUs of gpupack's nodes.
    Allowed,
}

/// What GPU pods may have, and pods that share nodes with them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// Capabilities that GPU pods may add, beyond those of *baseline*; without `CAP_`.
    pub capabilities: Vec<String>,
    /// Folders of the node that they may mount, each only as a whole.
    pub host_paths: Vec<HostFolder>,
    /// Whether they may use the network of their node.
    pub host_network: HostNetwork,
    /// Kernel parameters that they may set, beyond those of *baseline*.
    pub sysctls: Vec<String>,
    /// Variables `NVIDIA_…` that they may set, beyond the harmless ones.
    pub variables: Vec<String>,
    /// RuntimeClasses that give no GPU.
    pub classes_without_gpus: Vec<String>,
    /// Whether they may have ResourceClaims.
    pub resource_claims: ResourceClaims,
    /// Longest grace period of a GPU pod, in seconds.
    pub max_grace_seconds: u64,
}

impl Default for Allowed {
    fn default() -> Self {
        Self {
            capabilities: Vec::new(),
            host_paths: Vec::new(),
            host_network: HostNetwork::default(),
            sysctls: Vec::new(),
            variables: Vec::new(),
            classes_without_gpus: ["crun", "kata", "runc"].map(str::to_owned).into(),
            resource_claims: ResourceClaims::default(),
            max_grace_seconds: 600,
        }
    }
}

/// A list of texts, which may be empty.
fn list<T: FromStr>(
    reader: &mut Reader,
    key: &str,
    allowed: &str,
    default: Vec<T>,
    is_legal: impl Fn(&str) -> bool,
) -> Vec<T> {
    let Some(value) = reader.take(key) else { return default };
    let item = |item: &serde_yaml_ng::Value| {
        item.as_str().filter(|text| is_legal(text)).and_then(|text| text.parse().ok())
    };
    let items: Option<Vec<T>> =
        value.as_sequence().and_then(|items| items.iter().map(item).collect());
    items.unwrap_or_else(|| {
        reader.fault(key, &value, allowed);
        default
    })
}

impl Allowed {
    /// Takes its keys out of `reader`. `runtime_class` is the one that gives GPUs.
    pub(crate) fn read(reader: &mut Reader, runtime_class: Option<&str>) -> Self {
        let default = Self::default();
        let is_word = |text: &str, extra: &str| {
            let is_legal = |c: char| c.is_ascii_alphanumeric() || extra.contains(c);
            (1..=253).contains(&text.len()) && text.chars().all(is_legal)
        };
        let is_capability = |text: &str| {
            let is_plain = is_word(text, "_") && !text.starts_with("CAP_");
            is_plain && text.to_ascii_uppercase() == text && !LIFTING_CAPABILITIES.contains(&text)
        };
        let is_class = |text: &str| {
            is_word(text, "-.") && !NVIDIA_CLASSES.contains(&text) && runtime_class != Some(text)
        };
        let is_variable = |text: &str| {
            let owned = ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_GPU_MEMORY_", "NVIDIA_MIG_"];
            let is_owned = owned.iter().any(|name| text.starts_with(name));
            text.starts_with("NVIDIA_") && is_word(text, "_") && !is_owned
        };
        Self {
            capabilities: list(
                reader,
                "allowed_capabilities",
                "a list of capabilities in capitals without `CAP_`, and neither `ALL` nor `SYS_ADMIN`",
                default.capabilities,
                is_capability,
            ),
            host_paths: list(
                reader,
                "allowed_host_paths",
                "a list of absolute paths of letters, digits, `.`, `_` and `-` such as `/data`",
                default.host_paths,
                |_| true,
            ),
            host_network: reader.switch(
                "allow_host_network",
                [HostNetwork::Refused, HostNetwork::Allowed],
                default.host_network,
            ),
            sysctls: list(
                reader,
                "allowed_sysctls",
                "a list of names such as `net.core.somaxconn`",
                default.sysctls,
                |text| is_word(text, "-._/"),
            ),
            variables: list(
                reader,
                "allowed_variables",
                "a list of names that begin with `NVIDIA_` and choose no device and no memory",
                default.variables,
                is_variable,
            ),
            classes_without_gpus: list(
                reader,
                "runtime_classes_without_gpus",
                "a list of RuntimeClasses, none of them NVIDIA's",
                default.classes_without_gpus,
                is_class,
            ),
            resource_claims: reader.switch(
                "allow_resource_claims",
                [ResourceClaims::Refused, ResourceClaims::Allowed],
                default.resource_claims,
            ),
            max_grace_seconds: reader.number(
                "max_grace_period_seconds",
                30..=604_800,
                default.max_grace_seconds,
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::Config;

    #[test]
    fn what_would_open_a_way_to_every_gpu_cannot_be_allowed() {
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
        ] {
            let faults = Config::from_yaml(&format!("webhook: {{{bad}}}")).unwrap_err();
            assert_eq!(faults.faults.len(), 1, "{bad}: {faults}");
        }
        let none = "webhook: {runtime_classes_without_gpus: [], allowed_host_paths: []}";
        assert!(Config::from_yaml(none).unwrap().webhook.allowed.classes_without_gpus.is_empty());
        let folder: HostFolder = "/data".parse().unwrap();
        assert!(folder.is_at("/data/") && folder.is_at("//data/."));
        for other in ["/data/a", "/data/a/..", "/data/../etc", "/database", "/", ""] {
            assert!(!folder.is_at(other), "{other}");
        }
    }
}
