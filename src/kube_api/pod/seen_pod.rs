//! A pod as gpupack sees it. One conversion reads it from the watch, from a kube-scheduler body and
//! from the webhook.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::config::pods::requests::RequestRules;
use crate::containers::injection::takes_devices;
use crate::pod::gpu_container::GpuContainer;
use crate::pod::host::host_amount;
use crate::pod::pod_fields::PodFields;
use crate::pod::start_failure::StartFailure;
use crate::request::annotations::{parse_group, parse_request};
use crate::request::other_keys::{OtherKey, check, other_keys};
use crate::request::placement::{
    FENCE, FenceWriter, HOLD, PLACED_PREFIX, PlacementError, decode, fence_digest,
    refuse_reserved_keys,
};
use crate::request::request_error::RequestError;
use crate::request::resources::{
    ContainerKind, ContainerRequest, MARKERS, ShortMarker, markers_of, short_marker,
};
use crate::request::room_note::RoomNote;
use crate::request::usable::{WORKLOAD, check_class, check_use, workload_of};
use crate::request::written::WrittenAnnotations;
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::model::request::{GpuRequest, Movable, PodGroup};
use engine::model::reservation::{Controller, Placement, PodRef, Tenure};
use runtime::causes::shown_long;
use wire::ids::{NodeName, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::HostAmount;

/// The scheduler of pods that name none. It may also serve pods that gpupack does not.
pub(crate) const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// Longest name of an object in Kubernetes (a DNS subdomain).
pub const LONGEST_NAME: usize = 253;

/// Longest name of a namespace in Kubernetes (a DNS label).
pub const LONGEST_NAMESPACE: usize = 63;

/// Longest UID that is accepted; those of the API server have 36 bytes.
pub const LONGEST_UID: usize = 64;

/// Most bytes of all annotations of an object in Kubernetes.
const MOST_ANNOTATIONS: usize = 256 << 10;

/// Most bytes of a pod's annotations with those of a Binding. The rest is room for the annotation
/// that [`write_fence`](crate::write::writer::ApiWriter::write_fence) writes.
pub(crate) const MAX_ANNOTATION_BYTES: usize = MOST_ANNOTATIONS - 1024;

/// Most annotations of a pod that are not gpupack's own. The shipped policies allow no more, and
/// refuse even gpupack's writes on a pod with more than 1,100 in total.
pub const MAX_ANNOTATIONS: usize = 1_000;

/// What gpupack needs of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenPod {
    /// UID and `namespace/name`.
    pub pod: PodRef,
    pub namespace: String,
    pub name: String,
    /// The node to which it is bound.
    pub node: Option<NodeName>,
    /// The scheduler that it names, or the default one.
    pub scheduler_name: String,
    /// The CPU and host memory that it requests.
    pub host: HostAmount,
    /// Its GPU request; `None` for a pod that requests no GPU.
    pub request: Result<Option<GpuRequest>, RequestError>,
    /// The container with the GPU, if the pod may be moved.
    pub gpu_container: Option<GpuContainer>,
    /// The group of pods with which it starts; `None` also if that is not valid.
    pub group: Option<PodGroup>,
    /// The class of workloads that its label names.
    pub workload: Option<String>,
    /// Its keys that concern GPUs of another scheduler.
    pub other_keys: Vec<OtherKey>,
    /// What its markers say, in the order of [`MARKERS`].
    pub markers: [u64; MARKERS.len()],
    /// Whether a container takes its devices from the placement, as the admission webhook or the
    /// pod's template says. Otherwise it runs without the GPU of its placement.
    pub takes_devices: bool,
    /// Its placement; `None` for a pod without a node, whatever its annotations say.
    pub placement: Result<Option<Placement>, PlacementError>,
    /// What gpupack wrote with its placement, if it has a node.
    pub written: WrittenAnnotations,
    /// The container that could not be started with its device, if any.
    pub start_failure: Option<StartFailure>,
    /// What made it, if a controller did.
    pub controller: Option<Controller>,
    /// Whether that is a Job: its pods end whatever becomes of others.
    pub is_of_job: bool,
    /// Whether it has ended: all its containers have stopped and none will start again.
    pub is_terminal: bool,
    /// Whether it has ended with success.
    pub has_succeeded: bool,
    /// Whether its deletion was requested. It may still run and hold its GPU.
    pub is_deleting: bool,
    /// When it is to have ended then, in seconds since 1970.
    pub ends_unix_seconds: i64,
    /// Whether a scheduling gate prevents its scheduling.
    pub is_gated: bool,
    /// Its priority; zero where none is set.
    pub priority: i32,
    /// Its priority class; empty without one.
    pub priority_class: String,
    /// Whether less important pods may be evicted for it (`preemptionPolicy` is not `Never`).
    pub may_preempt: bool,
    /// When it was created, in seconds since 1970; zero if unknown.
    pub created_unix_seconds: i64,
    /// When kubelet saw it, or else when it was created.
    pub started_unix_seconds: i64,
    /// The version of the object that this was read from.
    pub resource_version: String,
    /// The process of gpupack that last requeued, fenced or bound it, if any.
    pub fenced_by: Option<FenceWriter>,
    /// Digest of that write, different for each; the same in every process.
    pub fence: u64,
    /// Digest of what others may edit of a pod that waits, and of its condition `PodScheduled`.
    pub edition: u64,
    /// The room that gpupack is making for it, if it has no node.
    pub room_note: Option<RoomNote>,
    /// The node on which a preemption made room for it.
    pub nominated: Option<NodeName>,
    /// Bytes of all its annotations, keys and values. The API server allows 256 KiB, and a Binding
    /// that exceeds them makes the pod unwritable forever.
    pub annotation_bytes: usize,
    /// The number of its annotations that are not gpupack's own.
    pub annotation_count: usize,
}

/// Why a JSON text is not a pod that can be scheduled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PodFault {
    /// Not the JSON of a pod.
    #[error("the pod cannot be read: {fault}")]
    Json {
        /// The error of the JSON parser, with line and column, cut.
        fault: String,
    },
    /// A required field is missing or empty.
    #[error("the pod has no `{field}`")]
    Missing { field: &'static str },
    /// A field is longer than Kubernetes allows.
    #[error(
        "`{field}` of the pod has `{bytes}` bytes, more than the `{most}` that Kubernetes allows"
    )]
    TooLong {
        field: &'static str,
        /// Its length, in bytes.
        bytes: usize,
        /// The maximum, in bytes.
        most: usize,
    },
}

impl SeenPod {
    /// Reads a pod of the API server. Missing fields are empty, never an error: one odd pod must
    /// not stop a watch.
    pub fn from_api(pod: &Pod) -> Self {
        let metadata = &pod.metadata;
        let spec = pod.spec.as_ref();
        let status = pod.status.as_ref();
        let namespace = metadata.namespace.clone().unwrap_or_default();
        let name = metadata.name.clone().unwrap_or_default();
        let none = BTreeMap::new();
        let annotations = metadata.annotations.as_ref().unwrap_or(&none);
        let labels = metadata.labels.as_ref().unwrap_or(&none);
        let node = node_name(spec.and_then(|spec| spec.node_name.as_deref()));
        let is_unbound = node.is_none();
        let reserved = match &node {
            None => refuse_reserved_keys(annotations.keys().chain(labels.keys())),
            Some(_) => Ok(()),
        };
        let containers = spec.map(container_requests).unwrap_or_default();
        let request = reserved.and_then(|()| parse_request(annotations, &containers));
        let (request, gpu_container) = movable(pod, request);
        let phase = status.and_then(|status| status.phase.as_deref());
        let nominated = status.and_then(|status| status.nominated_node_name.as_deref());
        let scheduler = spec.and_then(|spec| spec.scheduler_name.clone());
        let class = spec.and_then(|spec| spec.priority_class_name.clone());
        let policy = spec.and_then(|spec| spec.preemption_policy.as_deref());
        let created = metadata.creation_timestamp.as_ref();
        let started = status.and_then(|status| status.start_time.as_ref());
        let deletion = metadata.deletion_timestamp.as_ref();
        Self {
            pod: PodRef {
                uid: PodUid::new(metadata.uid.as_deref().unwrap_or_default()),
                name: format!("{namespace}/{name}").into(),
            },
            namespace,
            name,
            scheduler_name: scheduler.unwrap_or_else(|| DEFAULT_SCHEDULER.to_owned()),
            host: spec.map_or(HostAmount::ZERO, host_amount),
            request,
            gpu_container,
            group: parse_group(annotations).ok().flatten(),
            workload: labels.get(WORKLOAD).cloned(),
            other_keys: other_keys(annotations, &containers),
            markers: markers_of(&containers),
            takes_devices: spec.is_some_and(takes_devices),
            placement: node.as_ref().map_or(Ok(None), |node| decode(annotations, node)),
            written: node.as_ref().map(|_| WrittenAnnotations::of(annotations)).unwrap_or_default(),
            node,
            start_failure: StartFailure::of(pod),
            controller: controller_of(metadata),
            is_of_job: owner_of(metadata).is_some_and(|owner| owner.kind == "Job"),
            is_terminal: matches!(phase, Some("Succeeded" | "Failed")),
            has_succeeded: phase == Some("Succeeded"),
            is_deleting: deletion.is_some(),
            ends_unix_seconds: deletion.map_or(0, |time| time.0.as_second()),
            is_gated: spec.is_some_and(|s| s.scheduling_gates.iter().flatten().next().is_some()),
            priority: spec.and_then(|spec| spec.priority).unwrap_or(0),
            priority_class: class.unwrap_or_default(),
            may_preempt: policy != Some("Never"),
            created_unix_seconds: created.map_or(0, |time| time.0.as_second()),
            started_unix_seconds: started.or(created).map_or(0, |time| time.0.as_second()),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            fenced_by: annotations.get(FENCE).map(|value| FenceWriter::of(value)),
            fence: fence_digest(annotations.get(FENCE)),
            edition: if is_unbound { edition_of(pod) } else { 0 },
            room_note: if is_unbound { room_note(annotations) } else { None },
            nominated: node_name(nominated),
            annotation_bytes: annotations.iter().map(|(key, value)| key.len() + value.len()).sum(),
            annotation_count: annotations
                .keys()
                .filter(|key| !key.starts_with(PLACED_PREFIX))
                .count(),
        }
    }

    /// The pod as a fact for the ledger, the same for every reader. `request` is the pod's own,
    /// which equal pods may share. The pod alone does not say which process bound it,
    /// nor what the operator's rules are.
    pub fn fact(&self, request: Option<Arc<GpuRequest>>) -> PodFact {
        PodFact {
            pod: self.pod.clone(),
            node: self.node.clone(),
            host: self.host,
            is_terminal: self.is_terminal,
            wants_gpu: !matches!(self.request, Ok(None)),
            request,
            placement: self.placement.as_ref().ok().cloned().flatten(),
            bound_by_us: false,
            moves: MoveFact { has_left: self.has_left(), ..MoveFact::default() },
            tenure: Tenure {
                priority: self.priority,
                started_unix_seconds: self.started_unix_seconds,
                is_ending: self.is_deleting,
                ends_unix_seconds: self.ends_unix_seconds,
                controller: self.controller.filter(|_| !self.is_of_job),
                protection: None,
            },
        }
    }

    /// Whether it has a node, and lacks a placement or a request that can be read, as one that requests a GPU has
    /// both.
    pub fn is_unreadable(&self) -> bool {
        let is_whole = matches!(
            (&self.request, &self.placement),
            (Ok(Some(_)), Ok(Some(_))) | (Ok(None), Ok(None))
        );
        self.node.is_some() && !self.is_terminal && !is_whole
    }

    /// Whether it has left the device where it was a guest, after its move was written.
    fn has_left(&self) -> bool {
        let placement = self.placement.as_ref().ok().and_then(Option::as_ref);
        let leaving = placement.and_then(|placement| placement.guest.as_ref()?.leaving.as_ref());
        let container = self.gpu_container.as_ref();
        leaving.zip(container).is_some_and(|(leaving, container)| container.has_left(leaving))
    }

    /// Reads a pod from the JSON that kube-scheduler or the webhook sends.
    ///
    /// # Errors
    /// [`PodFault`] if it is not a pod, or has no UID, namespace or name for the ledger.
    pub fn from_json(json: &str) -> Result<Self, PodFault> {
        let fields: PodFields = serde_json::from_str(json)
            .map_err(|error| PodFault::Json { fault: shown_long(&error) })?;
        let seen = Self::from_api(&Pod::from(fields));
        let fields = [
            ("metadata.uid", seen.pod.uid.as_str()),
            ("metadata.namespace", seen.namespace.as_str()),
            ("metadata.name", seen.name.as_str()),
        ];
        let missing = fields.into_iter().find(|(_, value)| value.is_empty());
        match missing.map(|(field, _)| field) {
            Some(field) => Err(PodFault::Missing { field }),
            None => seen.refuse_long_fields().map(|()| seen),
        }
    }

    /// Reads a pod of the API server under the operator's rules: see [`SeenPod::judge`].
    pub fn judged(pod: &Pod, rules: &RequestRules) -> Self {
        let mut seen = Self::from_api(pod);
        seen.judge(rules);
        seen
    }

    /// Refuses its request if its annotations are full or the operator's rules forbid it, but only
    /// while it waits: a pod with a node keeps what it got.
    pub fn judge(&mut self, rules: &RequestRules) {
        if self.node.is_none()
            && let Ok(request) = &self.request
            && let Some(error) = self.objection(request.as_ref(), rules)
        {
            self.request = Err(error);
        }
    }

    fn objection(
        &self,
        request: Option<&GpuRequest>,
        rules: &RequestRules,
    ) -> Option<RequestError> {
        if let Some(request) = request {
            if let Some(full) = self.full_annotations() {
                return Some(full);
            }
            // It did not come through the webhook, or its annotations or the prices have changed.
            if rules.needs_markers
                && let Some(short) =
                    short_marker(&rules.meant(request), &rules.prices, self.markers)
            {
                let ShortMarker { marker, has, needed } = short;
                return Some(RequestError::Marker { marker, has, needed });
            }
        }
        // The cluster's own scheduler also serves pods that request nothing from gpupack.
        let is_ours = request.is_some() || self.scheduler_name != DEFAULT_SCHEDULER;
        if !is_ours {
            return None;
        }
        let used = self.check_use(request, rules);
        used.and_then(|()| check(rules, request, &self.other_keys)).err()
    }

    /// Refuses what pods of its namespace may not use. Without a GPU request the label means nothing.
    fn check_use(
        &self,
        request: Option<&GpuRequest>,
        rules: &RequestRules,
    ) -> Result<(), RequestError> {
        let label = self.workload.as_deref().filter(|_| request.is_some());
        let class = workload_of(rules, label, &self.priority_class)?;
        check_class(rules, &self.namespace, class, self.priority)?;
        request.map_or(Ok(()), |request| check_use(rules, &self.namespace, request))
    }

    /// The error if its annotations leave no room for a placement. No process of gpupack with these
    /// limits then posts a Binding with a placement for this version of it.
    pub fn full_annotations(&self) -> Option<RequestError> {
        let (count, bytes) = (self.annotation_count, self.annotation_bytes);
        if count > MAX_ANNOTATIONS {
            return Some(RequestError::ManyAnnotations { count, most: MAX_ANNOTATIONS });
        }
        let most = MAX_ANNOTATION_BYTES;
        (bytes > most).then_some(RequestError::FullAnnotations { bytes, most })
    }

    /// Checks the length of all fields that are kept, because any client may have sent the pod.
    fn refuse_long_fields(&self) -> Result<(), PodFault> {
        let (node, nominated) = (self.node.as_ref(), self.nominated.as_ref());
        let fields = [
            ("metadata.uid", self.pod.uid.as_str().len(), LONGEST_UID),
            ("metadata.namespace", self.namespace.len(), LONGEST_NAMESPACE),
            ("metadata.name", self.name.len(), LONGEST_NAME),
            ("metadata.resourceVersion", self.resource_version.len(), LONGEST_NAME),
            ("metadata.annotations", self.annotation_bytes, MOST_ANNOTATIONS),
            ("metadata.labels", self.workload.as_ref().map_or(0, String::len), LONGEST_NAMESPACE),
            ("spec.nodeName", node.map_or(0, |node| node.as_str().len()), LONGEST_NAME),
            ("spec.schedulerName", self.scheduler_name.len(), LONGEST_NAME),
            ("spec.priorityClassName", self.priority_class.len(), LONGEST_NAME),
            (
                "status.nominatedNodeName",
                nominated.map_or(0, |node| node.as_str().len()),
                LONGEST_NAME,
            ),
        ];
        let long = fields.into_iter().find(|(_, bytes, most)| bytes > most);
        long.map_or(Ok(()), |(field, bytes, most)| Err(PodFault::TooLong { field, bytes, most }))
    }
}

/// The label of the pods of a Deployment's ReplicaSet: the last part of that one's name, by revision.
const REVISION: &str = "pod-template-hash";

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

/// The RuntimeClass that a pod names.
pub(crate) fn class_of(spec: &PodSpec) -> Option<&str> {
    spec.runtime_class_name.as_deref().filter(|class| !class.is_empty())
}

/// The containers of a pod for the request parser: regular ones first, in their order.
pub fn container_requests(spec: &PodSpec) -> Vec<ContainerRequest> {
    let regular = spec.containers.iter().map(|c| container_request(c, ContainerKind::Regular));
    let init = spec.init_containers.iter().flatten();
    regular.chain(init.map(|c| container_request(c, ContainerKind::Init))).collect()
}

fn container_request(container: &Container, kind: ContainerKind) -> ContainerRequest {
    let mut requested = BTreeMap::new();
    if let Some(resources) = &container.resources {
        // The API server requires that request and limit of an extended resource are equal.
        let lists: [Option<&BTreeMap<String, Quantity>>; 2] =
            [resources.requests.as_ref(), resources.limits.as_ref()];
        for (resource, amount) in lists.into_iter().flatten().flatten() {
            requested.insert(resource.clone(), amount.0.clone());
        }
    }
    ContainerRequest { name: container.name.clone(), kind, resources: requested }
}

/// The note of the room that is kept for a pod, if one is on it and can be read.
fn room_note(annotations: &BTreeMap<String, String>) -> Option<RoomNote> {
    annotations.get(HOLD).and_then(|text| RoomNote::read(text))
}

fn node_name(name: Option<&str>) -> Option<NodeName> {
    name.filter(|name| !name.is_empty()).map(NodeName::new)
}

/// The request of a pod, and its container with the GPU if the pod may be moved. A pod that did not come
/// through the webhook cannot be, whatever it says.
fn movable(
    pod: &Pod,
    request: Result<Option<GpuRequest>, RequestError>,
) -> (Result<Option<GpuRequest>, RequestError>, Option<GpuContainer>) {
    match request {
        Ok(Some(request))
            if request.movable == Movable::Restart || mutated(Mutation::RestartsUnasked) =>
        {
            let container = GpuContainer::of(pod, &request);
            let movable = container.as_ref().map_or(Movable::Never, |_| Movable::Restart);
            (Ok(Some(GpuRequest { movable, ..request })), container)
        }
        request => (request, None),
    }
}

#[cfg(test)]
mod tests;
