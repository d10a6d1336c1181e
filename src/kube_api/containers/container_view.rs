//! One view of all containers of a pod: regular, init and ephemeral ones have different types.

use k8s_openapi::api::core::v1::{
    ContainerPort, ContainerResizePolicy, EnvFromSource, EnvVar, EnvVarSource, Lifecycle,
    ObjectFieldSelector, PodSpec, Probe, ResourceRequirements, SecurityContext, VolumeMount,
};

/// A list of containers in a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContainerList {
    /// Those that run for the life of the pod.
    Regular,
    /// Those that run before them, and sidecars.
    Init,
    /// Those that were added to a running pod.
    Ephemeral,
}

impl ContainerList {
    /// The field of the pod's `spec`.
    pub(crate) fn field(self) -> &'static str {
        match self {
            Self::Regular => "containers",
            Self::Init => "initContainers",
            Self::Ephemeral => "ephemeralContainers",
        }
    }
}

/// What admission needs of one container.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContainerView<'a> {
    pub(crate) list: ContainerList,
    /// Its position in `list`.
    pub(crate) index: usize,
    pub(crate) name: &'a str,
    pub(crate) env: &'a [EnvVar],
    pub(crate) env_from: &'a [EnvFromSource],
    pub(crate) security: Option<&'a SecurityContext>,
    pub(crate) mounts: &'a [VolumeMount],
    pub(crate) resources: Option<&'a ResourceRequirements>,
    /// Which of its resources need a restart to change.
    pub(crate) resize: &'a [ContainerResizePolicy],
    pub(crate) ports: &'a [ContainerPort],
    /// Liveness, readiness and startup probe.
    pub(crate) probes: [Option<&'a Probe>; 3],
    pub(crate) lifecycle: Option<&'a Lifecycle>,
}

impl ContainerView<'_> {
    pub(crate) fn is_ephemeral(&self) -> bool {
        self.list == ContainerList::Ephemeral
    }
}

/// The containers of a pod: regular, init, ephemeral, each list in its order.
pub(crate) fn containers(spec: &PodSpec) -> Vec<ContainerView<'_>> {
    macro_rules! views {
        ($list:expr, $containers:expr) => {
            $containers.enumerate().map(|(index, container)| ContainerView {
                list: $list,
                index,
                name: &container.name,
                env: container.env.as_deref().unwrap_or_default(),
                env_from: container.env_from.as_deref().unwrap_or_default(),
                security: container.security_context.as_ref(),
                mounts: container.volume_mounts.as_deref().unwrap_or_default(),
                resources: container.resources.as_ref(),
                resize: container.resize_policy.as_deref().unwrap_or_default(),
                ports: container.ports.as_deref().unwrap_or_default(),
                probes: [
                    container.liveness_probe.as_ref(),
                    container.readiness_probe.as_ref(),
                    container.startup_probe.as_ref(),
                ],
                lifecycle: container.lifecycle.as_ref(),
            })
        };
    }
    let regular = views!(ContainerList::Regular, spec.containers.iter());
    let init = views!(ContainerList::Init, spec.init_containers.iter().flatten());
    let ephemeral = views!(ContainerList::Ephemeral, spec.ephemeral_containers.iter().flatten());
    regular.chain(init).chain(ephemeral).collect()
}

/// The UUIDs of the devices, for the workload.
pub const UUIDS_VARIABLE: &str = "GPUPACK_DEVICE_UUIDS";

/// A variable with this value.
pub(crate) fn literal(name: &str, value: &str) -> EnvVar {
    EnvVar { name: name.to_owned(), value: Some(value.to_owned()), ..EnvVar::default() }
}

/// A variable that kubelet sets from an annotation when the container starts.
pub(crate) fn placed(name: &str, annotation: &str) -> EnvVar {
    let field_path = format!("metadata.annotations['{annotation}']");
    let field = ObjectFieldSelector { field_path, api_version: None };
    let source = EnvVarSource { field_ref: Some(field), ..EnvVarSource::default() };
    EnvVar { name: name.to_owned(), value_from: Some(source), ..EnvVar::default() }
}
