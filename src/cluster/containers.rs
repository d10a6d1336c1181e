//! All containers of a pod alike: regular, init and ephemeral ones have types of their own.

use k8s_openapi::api::core::v1::{
    ContainerPort, EnvFromSource, EnvVar, Lifecycle, PodSpec, Probe, ResourceRequirements,
    SecurityContext, VolumeMount,
};

/// A list of containers in a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContainerList {
    /// What runs for the life of the pod.
    Regular,
    /// What runs before, sidecars included.
    Init,
    /// What was added to a running pod.
    Ephemeral,
}

impl ContainerList {
    /// The field of the pod's `spec`.
    pub(super) fn field(self) -> &'static str {
        match self {
            Self::Regular => "containers",
            Self::Init => "initContainers",
            Self::Ephemeral => "ephemeralContainers",
        }
    }
}

/// What matters of one container at admission.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContainerView<'a> {
    /// The list that it stands in.
    pub(super) list: ContainerList,
    /// Its place there.
    pub(super) index: usize,
    /// Its name.
    pub(super) name: &'a str,
    /// Its variables.
    pub(super) env: &'a [EnvVar],
    /// Where it takes further variables from.
    pub(super) env_from: &'a [EnvFromSource],
    /// Its rights.
    pub(super) security: Option<&'a SecurityContext>,
    /// Its mounts.
    pub(super) mounts: &'a [VolumeMount],
    /// Its resources.
    pub(super) resources: Option<&'a ResourceRequirements>,
    /// Its ports.
    pub(super) ports: &'a [ContainerPort],
    /// How kubelet asks whether it lives, is ready, and has started.
    pub(super) probes: [Option<&'a Probe>; 3],
    /// What kubelet does when it starts and ends.
    pub(super) lifecycle: Option<&'a Lifecycle>,
}

/// The containers of a pod: regular, init, ephemeral, each list in its order.
pub(super) fn containers(spec: &PodSpec) -> Vec<ContainerView<'_>> {
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
