//! Why a pod is not admitted: a text for the client that creates it, with the fault and the fix.

use crate::request::request_error::RequestError;

/// Why a pod is refused at its creation, or a debug container is not added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// Its GPU request: the same text as from *filter* and in events.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// It may be moved, and kubelet could not restart its container in place.
    #[error("the pod may be moved (`gpupack.dev/movable: restart`), and {fault}")]
    Movable {
        /// What prevents it, and what to change.
        fault: &'static str,
    },
    /// It names its node, so no scheduler binds it.
    #[error(
        "the pod requests a GPU and names its node (`{node}`): which GPU it gets is decided with \
         its node, so remove `spec.nodeName`, or choose nodes by `nodeSelector` or affinity"
    )]
    NodeName {
        /// The node that it names.
        node: String,
    },
    /// It requests a GPU under a RuntimeClass that does not give it.
    #[error(
        "`runtimeClassName` is `{found}`: the GPU is provided by the RuntimeClass `{expected}`, \
         so set that, or leave it out"
    )]
    RuntimeClass {
        /// The RuntimeClass of the pod.
        found: String,
        expected: String,
    },
    /// It has NVIDIA's RuntimeClass and requests no GPU.
    #[error(
        "`runtimeClassName` is `{class}`, but the pod asks gpupack for no GPU: add `gpu-fraction` (0 to 1) \
         or `gpu-memory` (MiB) to its annotations and leave `schedulerName` out, or remove \
         `runtimeClassName`"
    )]
    UnmanagedRuntimeClass { class: String },
    /// It chooses its devices, or their memory.
    #[error(
        "container `{container}` sets `{variable}`: which GPU a container sees, and how much of it, \
         is decided when the pod is placed, so remove the variable"
    )]
    Variable { container: String, variable: String },
    /// Variables from a ConfigMap or Secret could have a name of ours.
    #[error(
        "container `{container}` imports variables (`envFrom`) with the prefix \
         `{prefix}`, which could make a `{variable}`: use another prefix"
    )]
    EnvFromPrefix {
        container: String,
        prefix: String,
        /// The variable that it could make.
        variable: &'static str,
    },
    /// It sees all devices of the node.
    #[error(
        "container `{container}` is privileged and would see every GPU of its node: remove \
         `securityContext.privileged`"
    )]
    Privileged { container: String },
    /// It may undo its own confinement.
    #[error(
        "container `{container}` adds the capability `{capability}`, which gives it access to GPUs that are not its own: remove it from `securityContext.capabilities`"
    )]
    Capability { container: String, capability: String },
    /// It sets a field that neither Pod Security *baseline* nor the operator allows.
    #[error(
        "{place} sets `{field}` to `{value}`: pods with a GPU, and pods that share nodes with them, may have \
         what the Pod Security standard `baseline` allows, so remove it{}",
        or_list_it(*key)
    )]
    NotAllowed {
        /// The pod or a container.
        place: String,
        field: &'static str,
        value: String,
        /// The key of the configuration by which an operator can allow it.
        key: Option<&'static str>,
    },
    /// It mounts a folder of the node that is not listed.
    #[error(
        "volume `{volume}` mounts `{path}` of the node: pods with a GPU, and pods that share nodes with them, \
         mount none but those that the cluster's operator lists under `webhook.allowed_host_paths`, so remove \
         it, take what is in a listed folder by `subPath` of the mount, or take a PersistentVolumeClaim or an \
         emptyDir"
    )]
    UnlistedHostPath {
        volume: String,
        /// Its path on the node.
        path: String,
    },
    /// It has resource claims, by which DRA drivers could give it devices.
    #[error(
        "the pod has the resource claim `{claim}`, so a DRA driver could give it GPUs that gpupack allocates \
         to others: remove `resourceClaims`, or have the cluster's operator set \
         `webhook.allow_resource_claims`"
    )]
    ResourceClaim {
        /// The claim's name in the pod.
        claim: String,
    },
    /// Its RuntimeClass may give GPUs.
    #[error(
        "`runtimeClassName` is `{class}`, and this runtime may provide GPUs: remove it, \
         or have the cluster's operator list it under `webhook.runtime_classes_without_gpus`"
    )]
    UnknownRuntimeClass { class: String },
    /// It may keep its GPU for too long after its deletion.
    #[error(
        "`terminationGracePeriodSeconds` is `{seconds}`: so long a deleted pod may keep its GPU, and here that \
         is at most `{most}` (`webhook.max_grace_period_seconds`), so set `{most}` or less"
    )]
    GracePeriod {
        /// The grace period of the pod.
        seconds: i64,
        most: u64,
    },
    /// It has access to processes of other pods.
    #[error(
        "the pod requests a GPU and sets `{field}`, which gives it access to the processes of its neighbors on the GPU: remove it"
    )]
    HostNamespace {
        /// The field of the pod.
        field: &'static str,
    },
    /// It mounts devices, or what controls them.
    #[error(
        "volume `{volume}` mounts `{path}` of the node, which contains GPU devices or what controls \
         them (`{guarded}`): remove it, or mount a folder that holds only the data you need"
    )]
    HostPath {
        volume: String,
        /// Its path on the node.
        path: String,
        /// The forbidden path that the mount exposes.
        guarded: String,
    },
    /// It names devices by a mount.
    #[error(
        "container `{container}` mounts something at `{path}`, which tells NVIDIA's runtime \
         devices: remove the mount"
    )]
    DeviceMount {
        container: String,
        /// The path in the container.
        path: String,
    },
    /// It requests parts of several GPUs where MPS limits the parts.
    #[error(
        "the pod requests parts of `{count}` GPUs: here who shares a GPU is a client of MPS, and a process can \
         be the client of one GPU's MPS daemon only, so request a part of one GPU, or for whole GPUs \
         (`gpu-fraction: \"1\"`)"
    )]
    SeveralUnderMps { count: u32 },
    /// One of its volumes has the name of ours.
    #[error(
        "volume `gpupack-mps` is not the volume that gpupack adds to MPS clients: give it another name"
    )]
    MpsVolume,
    /// It mounts what only MPS clients mount, or something else at the same path.
    #[error(
        "container `{container}` mounts something at `{path}` that only gpupack mounts: MPS needs \
         `/dev/shm` and `/run/gpupack-mps` of the container that gets the GPU, and the volume \
         `gpupack-mps` belongs to gpupack alone, so remove the mount"
    )]
    MpsMount {
        container: String,
        /// The path in the container.
        path: String,
    },
    /// Kueue admitted it, and counted less than it requests.
    #[error(
        "Kueue admitted the pod by a template that counts less: `{marker}` is `{has}` there, and this \
         request counts `{needed}`. Create the Job again, so that gpupack completes its template (other kinds \
         must be listed in `webhook.templates`), or write the markers into the template's limits"
    )]
    KueueMarker {
        marker: &'static str,
        /// What the pod came with.
        has: u64,
        needed: u64,
    },
    /// A template of pods that would be refused.
    #[error("`{place}`: {error}")]
    Template {
        /// The fields that lead to it.
        place: String,
        /// Why its pods would be refused.
        error: Box<Self>,
    },
    /// It names devices by an annotation.
    #[error("annotation `{key}` names devices for the container runtime: remove it")]
    DeviceAnnotation { key: String },
}

impl AdmissionError {
    /// Short name for logs; a closed set.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Request(error) => error.label(),
            Self::Movable { .. } => "movable",
            Self::NodeName { .. } => "node_name",
            Self::RuntimeClass { .. } => "runtime_class",
            Self::UnmanagedRuntimeClass { .. } => "unmanaged_runtime_class",
            Self::Variable { .. } => "variable",
            Self::EnvFromPrefix { .. } => "env_from_prefix",
            Self::Privileged { .. } => "privileged",
            Self::Capability { .. } => "capability",
            Self::NotAllowed { .. } => "not_allowed",
            Self::UnlistedHostPath { .. } => "unlisted_host_path",
            Self::ResourceClaim { .. } => "resource_claim",
            Self::UnknownRuntimeClass { .. } => "unknown_runtime_class",
            Self::GracePeriod { .. } => "grace_period",
            Self::HostNamespace { .. } => "host_namespace",
            Self::HostPath { .. } => "host_path",
            Self::DeviceMount { .. } => "device_mount",
            Self::SeveralUnderMps { .. } => "several_under_mps",
            Self::MpsVolume => "mps_volume",
            Self::MpsMount { .. } => "mps_mount",
            Self::KueueMarker { .. } => "kueue_marker",
            Self::Template { error, .. } => error.label(),
            Self::DeviceAnnotation { .. } => "device_annotation",
        }
    }
}

fn or_list_it(key: Option<&str>) -> String {
    key.map(|key| format!(", or have the cluster's operator allow it (`{key}`)"))
        .unwrap_or_default()
}
