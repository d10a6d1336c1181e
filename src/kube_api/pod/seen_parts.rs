//! The parts of a [`SeenPod`](crate::pod::seen_pod::SeenPod), each read from the pod alone.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::pod::gpu_container::GpuContainer;
use crate::pod::start_failure::StartFailure;
use crate::request::other_keys::OtherKey;
use crate::request::placement::{FENCE, FenceWriter, HOLD, PLACED_PREFIX, fence_digest};
use crate::request::request_error::RequestError;
use crate::request::resources::MARKERS;
use crate::request::room_note::RoomNote;
use crate::request::written::WrittenAnnotations;
use engine::model::reservation::{Controller, Tenure};
use engine::usage::starts::WantedContainers;
use wire::ids::NodeName;

/// The scheduler of pods that name none. It may also serve pods that gpupack does not.
pub(crate) const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// Most bytes of all annotations of an object in Kubernetes.
pub(crate) const MOST_ANNOTATIONS: usize = 256 << 10;

/// Most bytes of a pod's annotations with those of a Binding. The rest is room for the annotation
/// that [`write_fence`](crate::write::writer::ApiWriter::write_fence) writes.
pub(crate) const MAX_ANNOTATION_BYTES: usize = MOST_ANNOTATIONS - 1024;

/// Most annotations of a pod that are not gpupack's own. The shipped policies allow no more, and
/// refuse even gpupack's writes on a pod with more than 1,100 in total.
pub const MAX_ANNOTATIONS: usize = 1_000;

/// The label of the pods of a Deployment's ReplicaSet: the last part of that one's name, by revision.
const REVISION: &str = "pod-template-hash";

/// What made a pod, when it began, and whether it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodLife {
    /// What made it, if a controller did.
    pub controller: Option<Controller>,
    /// Whether that is a Job: its pods end whatever becomes of others.
    pub is_of_job: bool,
    /// When it was created, in seconds since 1970; zero if unknown.
    pub created_unix_seconds: i64,
    /// When kubelet saw it, or else when it was created.
    pub started_unix_seconds: i64,
    /// Whether it has ended: all its containers have stopped and none will start again.
    pub is_terminal: bool,
    /// Whether it has ended with success.
    pub has_succeeded: bool,
    /// Whether its deletion was requested. It may still run and hold its GPU.
    pub is_deleting: bool,
    /// When it is to have ended then, in seconds since 1970.
    pub ends_unix_seconds: i64,
}

/// What kube-scheduler looks at, beside what a pod requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodScheduling {
    /// The scheduler that it names, or the default one.
    pub scheduler: String,
    /// Its priority; zero where none is set.
    pub priority: i32,
    /// Its priority class; empty without one.
    pub priority_class: String,
    /// Whether less important pods may be evicted for it (`preemptionPolicy` is not `Never`).
    pub may_preempt: bool,
    /// Whether a scheduling gate prevents its scheduling.
    pub is_gated: bool,
    /// The node on which a preemption made room for it.
    pub nominated: Option<NodeName>,
    /// Digest of what others may edit of a pod that waits, and of its condition `PodScheduled`.
    pub edition: u64,
}

/// What gpupack needs of a pod's containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodContainers {
    /// The one with the GPU, if the pod may be moved.
    pub gpu: Option<GpuContainer>,
    /// Whether one takes its devices from the placement, as the admission webhook or the
    /// pod's template says. Otherwise it runs without the GPU of its placement.
    pub takes_devices: bool,
    /// The one that could not be started with its device, if any.
    pub start_failure: Option<StartFailure>,
    /// Those that are to have its devices, of a pod with a node and a GPU request.
    pub wanted: WantedContainers,
}

/// What the operator's rules judge beside the request of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodKeys {
    /// The class of workloads that its label names.
    pub workload: Option<String>,
    /// Its keys that concern GPUs of another scheduler.
    pub others: Vec<OtherKey>,
    /// What its markers say, in the order of [`MARKERS`].
    pub markers: [u64; MARKERS.len()],
}

/// The last write of gpupack on a pod that says who wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodFence {
    /// The process of gpupack that last requeued, fenced or bound it, if any.
    pub by: Option<FenceWriter>,
    /// Digest of that write, different for each; the same in every process.
    pub digest: u64,
}

/// What gpupack wrote into a pod's annotations besides, and what they leave room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodAnnotations {
    /// What gpupack wrote with its placement, if it has a node.
    pub written: WrittenAnnotations,
    /// The room that gpupack is making for it, if it has no node.
    pub room_note: Option<RoomNote>,
    /// Bytes of all its annotations, keys and values. The API server allows 256 KiB, and a Binding
    /// that exceeds them makes the pod unwritable forever.
    pub bytes: usize,
    /// The number of its annotations that are not gpupack's own.
    pub count: usize,
}

impl PodLife {
    pub(crate) fn of(pod: &Pod) -> Self {
        let (metadata, status) = (&pod.metadata, pod.status.as_ref());
        let phase = status.and_then(|status| status.phase.as_deref());
        let created = metadata.creation_timestamp.as_ref();
        let started = status.and_then(|status| status.start_time.as_ref());
        let deletion = metadata.deletion_timestamp.as_ref();
        Self {
            controller: controller_of(metadata),
            is_of_job: owner_of(metadata).is_some_and(|owner| owner.kind == "Job"),
            created_unix_seconds: created.map_or(0, |time| time.0.as_second()),
            started_unix_seconds: started.or(created).map_or(0, |time| time.0.as_second()),
            is_terminal: matches!(phase, Some("Succeeded" | "Failed")),
            has_succeeded: phase == Some("Succeeded"),
            is_deleting: deletion.is_some(),
            ends_unix_seconds: deletion.map_or(0, |time| time.0.as_second()),
        }
    }

    /// The same for the ledger, as far as the pod says it.
    pub(crate) fn tenure(&self, priority: i32) -> Tenure {
        Tenure {
            priority,
            started_unix_seconds: self.started_unix_seconds,
            is_ending: self.is_deleting,
            ends_unix_seconds: self.ends_unix_seconds,
            controller: self.controller.filter(|_| !self.is_of_job),
            protection: None,
        }
    }
}

impl PodScheduling {
    pub(crate) fn of(pod: &Pod, is_unbound: bool) -> Self {
        let spec = pod.spec.as_ref();
        let scheduler = spec.and_then(|spec| spec.scheduler_name.clone());
        let class = spec.and_then(|spec| spec.priority_class_name.clone());
        let policy = spec.and_then(|spec| spec.preemption_policy.as_deref());
        let status = pod.status.as_ref();
        Self {
            scheduler: scheduler.unwrap_or_else(|| DEFAULT_SCHEDULER.to_owned()),
            priority: spec.and_then(|spec| spec.priority).unwrap_or(0),
            priority_class: class.unwrap_or_default(),
            may_preempt: policy != Some("Never"),
            is_gated: spec.is_some_and(|s| s.scheduling_gates.iter().flatten().next().is_some()),
            nominated: node_name(status.and_then(|status| status.nominated_node_name.as_deref())),
            edition: if is_unbound { edition_of(pod) } else { 0 },
        }
    }
}

impl PodFence {
    pub(crate) fn of(annotations: &BTreeMap<String, String>) -> Self {
        let value = annotations.get(FENCE);
        Self { by: value.map(|value| FenceWriter::of(value)), digest: fence_digest(value) }
    }
}

impl PodAnnotations {
    pub(crate) fn of(annotations: &BTreeMap<String, String>, is_unbound: bool) -> Self {
        let others = annotations.keys().filter(|key| !key.starts_with(PLACED_PREFIX));
        let (written, room_note) = match is_unbound {
            true => (WrittenAnnotations::default(), room_note(annotations)),
            false => (WrittenAnnotations::of(annotations), None),
        };
        Self {
            written,
            room_note,
            bytes: annotations.iter().map(|(key, value)| key.len() + value.len()).sum(),
            count: others.count(),
        }
    }

    /// The error if they leave no room for a placement. No process of gpupack with these
    /// limits then posts a Binding with a placement for this version of the pod.
    pub fn full(&self) -> Option<RequestError> {
        let (count, bytes) = (self.count, self.bytes);
        if count > MAX_ANNOTATIONS {
            return Some(RequestError::ManyAnnotations { count, most: MAX_ANNOTATIONS });
        }
        let most = MAX_ANNOTATION_BYTES;
        (bytes > most).then_some(RequestError::FullAnnotations { bytes, most })
    }
}

/// A number that is another one after an edit of the metadata by others, or a new condition `PodScheduled`.
fn edition_of(pod: &Pod) -> u64 {
    let mut digest = DefaultHasher::new();
    let annotations = pod.metadata.annotations.iter().flatten();
    for edited in annotations.filter(|(key, _)| !key.starts_with(PLACED_PREFIX)) {
        edited.hash(&mut digest);
    }
    pod.metadata.labels.hash(&mut digest);
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    for condition in conditions.filter(|condition| condition.type_ == "PodScheduled") {
        (&condition.status, &condition.reason, &condition.message).hash(&mut digest);
    }
    digest.finish()
}

fn owner_of(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    let mut owners = metadata.owner_references.iter().flatten();
    owners.find(|owner| owner.controller == Some(true))
}

/// The controller of a pod. ReplicaSets of one Deployment are one: during an update a new one makes pods
/// in the place of those of the old one.
fn controller_of(metadata: &ObjectMeta) -> Option<Controller> {
    let owner = owner_of(metadata)?;
    let revision = metadata.labels.as_ref().and_then(|labels| labels.get(REVISION));
    let application = revision
        .filter(|_| owner.kind == "ReplicaSet")
        .and_then(|revision| owner.name.strip_suffix(revision.as_str())?.strip_suffix('-'));
    let mut digest = DefaultHasher::new();
    (metadata.namespace.as_deref().unwrap_or_default(), &owner.kind).hash(&mut digest);
    application.unwrap_or(&owner.uid).hash(&mut digest);
    Some(Controller(digest.finish()))
}

/// The scheduler that a pod names, or the default one.
pub(crate) fn scheduler_of(spec: &PodSpec) -> &str {
    spec.scheduler_name.as_deref().filter(|name| !name.is_empty()).unwrap_or(DEFAULT_SCHEDULER)
}

/// The note of the room that is kept for a pod, if one is on it and can be read.
fn room_note(annotations: &BTreeMap<String, String>) -> Option<RoomNote> {
    annotations.get(HOLD).and_then(|text| RoomNote::read(text))
}

pub(crate) fn node_name(name: Option<&str>) -> Option<NodeName> {
    name.filter(|name| !name.is_empty()).map(NodeName::new)
}
