//! Refuses what gives a container access to a GPU that is not its own, whatever its variables say.
//! Of this, operators can only allow ResourceClaims. Everything else is up to
//! [`pod_security`](crate::admission::pod_security).
//!
//! This does not stop every pod: one that the webhook does not see is limited only by the rules of
//! its namespace (Pod Security).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PodSpec, SecurityContext, Volume};

use crate::admission::pod_security;
use crate::config::allowed::{HostFolder, LIFTING_CAPABILITIES, plain};
use crate::config::webhook::WebhookConfig;
use crate::containers::admission_error::AdmissionError;
use crate::containers::container_view::ContainerView;
use crate::request::request_error::shown;

/// Paths of a node with GPU devices or what controls them; `*` stands for the rest of a name.
const GUARDED_PATHS: [&str; 7] = [
    "/dev/nvidia*",
    "/run/nvidia*",
    "/run/cdi",
    "/etc/cdi",
    "/usr/local/nvidia",
    "/proc",
    "/sys/fs/cgroup",
];

/// The beginning of the paths in a container by which mounts name devices to NVIDIA's runtime (`/var/run`
/// is `/run`). What follows is a name, with or without a slash (`requestsFromMounts` of the container toolkit).
const DEVICE_MOUNTS: &str = "/run/nvidia-container-devices";

/// Prefixes of annotations that name devices to container runtimes and their plugins: containerd,
/// NVIDIA's NRI plugin, NRI's device injector and CRI-O. The policy `gpupack-request` has the same
/// list.
const DEVICE_ANNOTATIONS: [&str; 7] = [
    "cdi.k8s.io/",
    "nvidia.cdi.k8s.io/",
    "cdi-devices.noderesource.dev/",
    "devices.noderesource.dev/",
    "cdi-devices.nri.io/",
    "devices.nri.io/",
    "io.kubernetes.cri-o.Devices",
];

/// Refuses what concerns a whole pod: namespaces and paths of its node, also the folder of MPS,
/// devices by annotation or ResourceClaim, and what exceeds *baseline*. It ignores the volume
/// `ours`, which gpupack adds.
///
/// # Errors
/// The first [`AdmissionError`] found.
pub(crate) fn refuse_pod(
    annotations: &BTreeMap<String, String>,
    spec: &PodSpec,
    settings: &WebhookConfig,
    ours: Option<&Volume>,
) -> Result<(), AdmissionError> {
    for (field, value) in [("hostPID", spec.host_pid), ("hostIPC", spec.host_ipc)] {
        if value == Some(true) {
            return Err(AdmissionError::HostNamespace { field });
        }
    }
    for volume in spec.volumes.iter().flatten().filter(|volume| Some(*volume) != ours) {
        let Some(source) = &volume.host_path else { continue };
        if let Some(guarded) = reached(&source.path, &settings.mps_folder) {
            let (volume, path) = (shown(&volume.name), shown(&source.path));
            let guarded = guarded.to_owned();
            return Err(AdmissionError::HostPath { volume, path, guarded });
        }
    }
    let named =
        annotations.keys().find(|key| DEVICE_ANNOTATIONS.iter().any(|part| key.starts_with(part)));
    if let Some(key) = named {
        return Err(AdmissionError::DeviceAnnotation { key: shown(key) });
    }
    let claim = spec.resource_claims.iter().flatten().next();
    if let Some(claim) = claim.filter(|_| !settings.allow_resource_claims) {
        return Err(AdmissionError::ResourceClaim { claim: shown(&claim.name) });
    }
    pod_security::check_pod(annotations, spec, settings, ours)
}

/// Refuses what concerns one container.
///
/// # Errors
/// The first [`AdmissionError`] found.
pub(crate) fn refuse_container(
    container: &ContainerView<'_>,
    settings: &WebhookConfig,
) -> Result<(), AdmissionError> {
    if container.security.and_then(|security| security.privileged) == Some(true) {
        return Err(AdmissionError::Privileged { container: shown(container.name) });
    }
    if let Some(capability) = container.security.and_then(capability) {
        let container = shown(container.name);
        return Err(AdmissionError::Capability { container, capability });
    }
    match container.mounts.iter().find(|mount| names_device(&mount.mount_path)) {
        Some(mount) => {
            let (container, path) = (shown(container.name), shown(&mount.mount_path));
            Err(AdmissionError::DeviceMount { container, path })
        }
        None => pod_security::check_container(container, settings),
    }
}

/// Whether a mount at this path names a device to NVIDIA's runtime.
fn names_device(path: &str) -> bool {
    plain(path).starts_with(DEVICE_MOUNTS)
}

/// The first capability by which a container can undo its confinement.
fn capability(security: &SecurityContext) -> Option<String> {
    let added = security.capabilities.as_ref()?.add.as_ref()?;
    added.iter().find(|name| lifts_confinement(name)).map(|name| shown(name))
}

fn lifts_confinement(capability: &str) -> bool {
    let name = capability.to_ascii_uppercase();
    LIFTING_CAPABILITIES.contains(&name.strip_prefix("CAP_").unwrap_or(&name))
}

/// The forbidden path that a mount of `path` exposes: the same path, one above or one below it.
fn reached<'a>(path: &str, folder: &'a HostFolder) -> Option<&'a str> {
    let path = plain(path);
    let places = GUARDED_PATHS.into_iter().chain([folder.as_str()]);
    places.into_iter().find(|guarded| {
        let place = plain(guarded.trim_end_matches('*'));
        let is_inside = match guarded.ends_with('*') {
            true => path.starts_with(&place),
            false => is_within(&path, &place),
        };
        is_inside || path == "/" || is_within(&place, &path)
    })
}

/// Whether a path is the folder, or below it.
fn is_within(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_to_gpus_are_recognized_in_parents_and_children() {
        for (path, expected) in [
            ("/dev/nvidia0", Some("/dev/nvidia*")),
            ("/dev/nvidia-caps/nvidia-cap1", Some("/dev/nvidia*")),
            ("/dev", Some("/dev/nvidia*")),
            ("/dev/", Some("/dev/nvidia*")),
            ("/", Some("/dev/nvidia*")),
            ("", Some("/dev/nvidia*")),
            ("//dev/./shm/../nvidiactl", Some("/dev/nvidia*")),
            ("/var/run/nvidia/driver", Some("/run/nvidia*")),
            ("/run", Some("/run/nvidia*")),
            ("/var/run/cdi", Some("/run/cdi")),
            ("/etc/cdi/x.yaml", Some("/etc/cdi")),
            ("/usr/local", Some("/usr/local/nvidia")),
            ("/usr/local/nvidia/lib64", Some("/usr/local/nvidia")),
            ("/proc/1/root", Some("/proc")),
            ("/sys", Some("/sys/fs/cgroup")),
            ("/dev/shm", None),
            ("/dev/infiniband", None),
            ("/data/nvidia", None),
            ("/processed", None),
            ("/usr/local/nvidia-data", None),
            ("/etc/ssl", None),
            ("/var/lib", None),
            ("/mnt/../srv", None),
            ("/run/gpupack/mps", Some("/var/run/gpupack/mps")),
            ("/var/run/gpupack", Some("/var/run/gpupack/mps")),
            ("/run/gpupack/mps/GPU-a/pipe", Some("/var/run/gpupack/mps")),
            ("/run/gpupack/mps-data", None),
        ] {
            assert_eq!(reached(path, &"/var/run/gpupack/mps".parse().unwrap()), expected, "{path}");
        }
    }
}
