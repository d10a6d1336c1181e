//! Why a pod's GPU request is refused: one text for the user, one for kube-scheduler.
//!
//! Users see the same error at admission, as a pod event and in `explain`. It names the annotation,
//! its value, what is allowed and the fix. kube-scheduler gets [`RequestError::reason`] instead, in
//! which no value appears: it retries a pod at full speed when the reason changes.

use engine::model::request::MAX_DEVICES_PER_POD;
use wire::ids::MAX_DEVICE_MEMORY;
use wire::units::{MemMib, Share};

/// A request that is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A fraction that is not a decimal in (0, 1] with at most 5 decimals.
    #[error(
        "annotation `{key}` is `{value}`: write a decimal above 0 and up to 1 with at most \
         5 decimals, for instance `0.5`"
    )]
    Fraction { key: String, value: String },
    /// Memory that is not a positive whole number of MiB.
    #[error(
        "annotation `{key}` is `{value}`: write a whole number of MiB from 1 to {max} without a \
         unit, for instance `8192`",
        max = MAX_DEVICE_MEMORY.mib()
    )]
    MemoryMib { key: String, value: String },
    /// Memory that is not a quantity with a unit.
    #[error(
        "annotation `{key}` is `{value}`: write an amount of memory with its unit, above 0 and up \
         to {max}Mi, for instance `8Gi`",
        max = MAX_DEVICE_MEMORY.mib()
    )]
    MemoryQuantity { key: String, value: String },
    /// A device count out of range.
    #[error(
        "annotation `{key}` is `{value}`: write a whole number of devices from 1 to \
         {MAX_DEVICES_PER_POD}"
    )]
    DeviceCount { key: String, value: String },
    /// A count of a container resource out of range.
    #[error(
        "container `{container}` requests `{value}` of `{resource}`: whole numbers from 1 to {max} \
         are allowed"
    )]
    ResourceCount { container: String, resource: String, value: String, max: u32 },
    /// A container that the pod does not have.
    #[error("annotation `{key}` names the container `{value}`: use one of the pod's own: {known}")]
    Container {
        key: String,
        value: String,
        /// The containers of the pod, each in backticks.
        known: String,
    },
    /// A name that is longer than any that exists. The ledger keeps it with the request.
    #[error("the {what} `{value}` is longer than {most} bytes: use a shorter name")]
    LongName {
        what: &'static str,
        value: String,
        /// The maximum, in bytes.
        most: usize,
    },
    /// A model filter that is no list of names.
    #[error(
        "annotation `{key}` is `{value}`: write up to {names} names of GPU models separated by `|`, \
         such as `A100|H100`, {max} bytes in all: letters, digits, blanks, `-./()+_`, a letter or \
         digit first; remove others, which exclude nothing",
        names = crate::request::request_error::MAX_MODELS,
        max = crate::request::request_error::MAX_MODEL_FILTER
    )]
    Model { key: String, value: String },
    /// A policy that does not exist.
    #[error("annotation `{key}` is `{value}`: use `binpack`, `spread` or `fragmentation`")]
    Policy { key: String, value: String },
    /// A kind of isolation that does not exist.
    #[error("annotation `{key}` is `{value}`: use `none`, `memory` or `hardware`")]
    Isolation { key: String, value: String },
    /// A class of workloads that does not exist.
    #[error("label `gpupack.dev/workload` is `{value}`: use {known}")]
    Workload { value: String, known: String },
    /// A class of workloads that is not that of the pod's `PriorityClass`.
    #[error(
        "label `gpupack.dev/workload` is `{value}`, but the pod has another PriorityClass than `{class}`: \
         only the webhook follows the label, when a pod is created. Create the pod again with \
         `priorityClassName: {class}`"
    )]
    WorkloadIgnored {
        /// The value of the label.
        value: String,
        /// The `PriorityClass` of that class of workloads.
        class: String,
    },
    /// What the operator does not allow in the namespace.
    #[error(
        "pods of the namespace `{namespace}` may not use the {what} `{value}`: for `{key}` use {allowed}"
    )]
    NotAllowed {
        /// What kind of thing it is.
        what: &'static str,
        /// The one that the pod uses.
        value: String,
        namespace: String,
        /// The annotation or label that chooses it.
        key: &'static str,
        allowed: String,
    },
    /// A group of pods without a valid name or size.
    #[error(
        "annotations `gpupack.dev/group` and `gpupack.dev/group-size` are `{name}` and `{size}`: set both, \
         a name of up to 63 lower-case letters, digits and `-`, and a number of pods from 2 to {most}",
        most = engine::model::request::MAX_GROUP
    )]
    Group { name: String, size: String },
    /// A limit below the request.
    #[error(
        "annotation `{key}` is `{value}`, less than the request of `{request}`: raise the limit to \
         at least the request, or remove it"
    )]
    LimitBelowRequest {
        /// The annotation of the limit.
        key: String,
        value: String,
        request: String,
    },
    /// A limit in another style than the request, or without a request.
    #[error(
        "annotation `{key}` is `{value}`, but the pod has no `{missing}`: a limit stands beside a \
         request of its own style, so add `{missing}` or remove the limit"
    )]
    LimitStyle {
        /// The annotation of the limit.
        key: String,
        value: String,
        /// The missing annotation of the request.
        missing: String,
    },
    /// An annotation that qualifies a GPU request, on a pod without one.
    #[error(
        "annotation `{key}` is `{value}`, but the pod requests no part of a GPU: add \
         `gpu-fraction` (0 to 1) or `gpu-memory` (MiB), or remove `{key}`"
    )]
    Orphan { key: String, value: String },
    /// Two annotations that give different values for one quantity.
    #[error(
        "annotations `{key}` (`{value}`) and `{other_key}` (`{other_value}`) disagree: keep one of \
         them"
    )]
    Disagreement { key: String, value: String, other_key: String, other_value: String },
    /// Annotations that give the GPU to different containers.
    #[error(
        "annotation `{key}` gives the GPU to container `{container}`, and `{other_key}` to \
         `{other_container}`: one container of a pod gets it, so keep the keys of one, or split the pod"
    )]
    SeveralContainers {
        key: String,
        /// The container that it names.
        container: String,
        other_key: String,
        /// The container that this one names.
        other_container: String,
    },
    /// Part of a GPU and a whole device in one pod.
    #[error(
        "annotation `{key}` is `{value}`, and container `{container}` requests `{resource}`: a pod \
         gets either part of a GPU or whole devices, so remove one of the two"
    )]
    TwoKinds {
        key: String,
        value: String,
        /// The container with the resource.
        container: String,
        resource: String,
    },
    /// Whole devices in several containers, or several such resources in one container.
    #[error(
        "container `{container}` requests `{resource}` and container `{other_container}` \
         requests `{other_resource}`: one container of a pod may request one kind of GPU, so remove one of \
         the two, or split the pod"
    )]
    SeveralRequests {
        /// The first container.
        container: String,
        resource: String,
        /// The other container, or the same one.
        other_container: String,
        other_resource: String,
    },
    /// An annotation with one of our prefixes that does not exist.
    #[error(
        "annotation `{key}` is unknown: {known} are the keys of that name; correct or remove it"
    )]
    UnknownKey {
        key: String,
        /// The keys that exist, each in backticks.
        known: &'static str,
    },
    /// A container resource by which another scheduler, or kubelet, gives GPUs.
    #[error(
        "container `{container}` requests `{resource}`, which gpupack does not serve: {instead}, and \
         remove `{resource}`; where it is no GPU, the operator lists it in `other_resources`"
    )]
    OtherResource { container: String, resource: String, instead: &'static str },
    /// An annotation by which users request, limit or choose GPUs of another scheduler.
    #[error(
        "annotation `{key}` belongs to another scheduler, and gpupack ignores it: {instead}, and \
         remove `{key}`"
    )]
    OtherAnnotation { key: String, instead: &'static str },
    /// A value that does not say whether the pod may be moved.
    #[error("annotation `gpupack.dev/movable` is `{value}`: use `never` or `restart`")]
    Movable { value: String },
    /// A time in which a moved container cannot end, or one for a pod that is not moved.
    #[error(
        "annotation `gpupack.dev/move-grace-seconds` is `{value}`: it must be 0 to 30, beside \
         `gpupack.dev/movable: restart`"
    )]
    MoveGrace { value: String },
    /// Less memory than the operator allows to request.
    #[error(
        "the pod requests {memory} of GPU memory: the least that is given here is {least}, so raise \
         `gpu-memory` or `gpu-fraction`; a CUDA context alone takes some 500 MiB"
    )]
    SmallMemory {
        memory: MemMib,
        /// The minimum: `min_memory_mib`.
        least: MemMib,
    },
    /// A limit above what the operator allows.
    #[error(
        "the pod's limit is {limit} of a GPU: `gpu-fraction.limit` may be at most {most} here, so \
         lower it"
    )]
    LimitAboveMax {
        limit: Share,
        /// The maximum: `max_limit`.
        most: Share,
    },
    /// A key that only gpupack writes.
    #[error(
        "`{key}` is written only by gpupack when it places the pod: remove it from the pod or its \
         template"
    )]
    ReservedKey { key: String },
    /// Annotations that leave no room for the placement.
    #[error(
        "its annotations have `{bytes}` bytes, and with more than `{most}` no placement can be written: \
         remove some"
    )]
    FullAnnotations {
        /// Their length, keys and values.
        bytes: usize,
        /// The maximum that leaves room, in bytes.
        most: usize,
    },
    /// A marker that says less than the request counts.
    #[error(
        "its resource `{marker}` is `{has}`, and quotas must count `{needed}` for its request: create \
         the pod again, so that the webhook writes the markers"
    )]
    Marker { marker: &'static str, has: u64, needed: u64 },
    /// More annotations than the shipped admission policies allow.
    #[error(
        "it has `{count}` annotations, and gpupack writes on no pod with more than `{most}` of others: \
         remove some from its template"
    )]
    ManyAnnotations {
        /// The number of annotations that are not gpupack's own.
        count: usize,
        most: usize,
    },
}

impl RequestError {
    /// Short name for metrics; a closed set.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Fraction { .. } => "fraction",
            Self::MemoryMib { .. } | Self::MemoryQuantity { .. } => "memory",
            Self::DeviceCount { .. } => "device_count",
            Self::ResourceCount { .. } => "resource_count",
            Self::Container { .. } => "container",
            Self::LongName { .. } => "long_name",
            Self::Model { .. } => "model",
            Self::Policy { .. } => "policy",
            Self::Isolation { .. } => "isolation",
            Self::Workload { .. } => "workload",
            Self::WorkloadIgnored { .. } => "workload_ignored",
            Self::NotAllowed { .. } => "not_allowed",
            Self::Group { .. } => "group",
            Self::LimitBelowRequest { .. } => "limit_below_request",
            Self::LimitStyle { .. } => "limit_style",
            Self::Orphan { .. } => "orphan",
            Self::Disagreement { .. } => "disagreement",
            Self::SeveralContainers { .. } => "several_containers",
            Self::TwoKinds { .. } => "two_kinds",
            Self::SeveralRequests { .. } => "several_requests",
            Self::UnknownKey { .. } => "unknown_key",
            Self::OtherResource { .. } => "other_resource",
            Self::OtherAnnotation { .. } => "other_annotation",
            Self::Movable { .. } => "movable",
            Self::MoveGrace { .. } => "move_grace",
            Self::SmallMemory { .. } => "small_memory",
            Self::LimitAboveMax { .. } => "limit_above_max",
            Self::ReservedKey { .. } => "reserved_key",
            Self::FullAnnotations { .. } => "full_annotations",
            Self::Marker { .. } => "marker",
            Self::ManyAnnotations { .. } => "many_annotations",
        }
    }

    /// Constant text for kube-scheduler, without any value of the pod.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Fraction { .. } => "GPU request refused: a fraction is not a decimal in (0, 1]",
            Self::MemoryMib { .. } => "GPU request refused: memory is not a whole number of MiB",
            Self::MemoryQuantity { .. } => {
                "GPU request refused: memory is not a quantity with a unit"
            }
            Self::DeviceCount { .. } => "GPU request refused: the device count is out of range",
            Self::ResourceCount { .. } => {
                "GPU request refused: a GPU resource of a container is out of range"
            }
            Self::Container { .. } => {
                "GPU request refused: it names a container that the pod does not have"
            }
            Self::LongName { .. } => "GPU request refused: a name is too long",
            Self::Model { .. } => "GPU request refused: the model filter is no list of model names",
            Self::Policy { .. } => "GPU request refused: the policy is unknown",
            Self::Isolation { .. } => "GPU request refused: the isolation is unknown",
            Self::Workload { .. } => "GPU request refused: the class of workloads is unknown",
            Self::WorkloadIgnored { .. } => {
                "GPU request refused: its label chooses another class of workloads than it has"
            }
            Self::NotAllowed { .. } => {
                "GPU request refused: it uses what is not allowed in its namespace"
            }
            Self::Group { .. } => "GPU request refused: name or size of its group is invalid",
            Self::LimitBelowRequest { .. } => "GPU request refused: a limit is below its request",
            Self::LimitStyle { .. } => "GPU request refused: a limit has no request of its style",
            Self::Orphan { .. } => "GPU request refused: a key qualifies a request that is missing",
            Self::Disagreement { .. } => "GPU request refused: two annotations disagree",
            Self::SeveralContainers { .. } => {
                "GPU request refused: two annotations name different containers"
            }
            Self::TwoKinds { .. } => {
                "GPU request refused: it requests part of a GPU and whole devices"
            }
            Self::SeveralRequests { .. } => {
                "GPU request refused: it requests several kinds of GPU, or GPUs in several containers"
            }
            Self::UnknownKey { .. } => "GPU request refused: an annotation is unknown",
            Self::OtherResource { .. } => {
                "GPU request refused: a container resource is not served by gpupack"
            }
            Self::OtherAnnotation { .. } => {
                "GPU request refused: an annotation belongs to another scheduler"
            }
            Self::Movable { .. } => "GPU request refused: whether it may be moved is not clear",
            Self::MoveGrace { .. } => {
                "GPU request refused: the time for a move is out of range, or it may not be moved"
            }
            Self::SmallMemory { .. } => "GPU request refused: too little memory is requested",
            Self::LimitAboveMax { .. } => {
                "GPU request refused: a limit is above what the operator allows"
            }
            Self::ReservedKey { .. } => {
                "GPU request refused: it carries a key that only gpupack writes"
            }
            Self::FullAnnotations { .. } => {
                "GPU request refused: the pod's annotations leave no room for the placement"
            }
            Self::Marker { .. } => {
                "GPU request refused: its markers say less than its request counts for quotas"
            }
            Self::ManyAnnotations { .. } => "GPU request refused: the pod has too many annotations",
        }
    }
}

/// The first 64 characters of `text`, escaped: no control character gets into a message.
pub fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(64).flat_map(char::escape_debug).collect();
    if text.chars().nth(64).is_some() {
        shown.push('…');
    }
    shown
}

/// Longest model filter, in bytes.
pub(crate) const MAX_MODEL_FILTER: usize = 512;

/// Most names in a model filter.
pub(crate) const MAX_MODELS: usize = 32;
