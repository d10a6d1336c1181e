//! A pod as gpupack sees it. One conversion reads it from the watch, from a kube-scheduler body and
//! from the webhook.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::config::pods::requests::RequestRules;
use crate::containers::injection::takes_devices;
use crate::pod::gpu_container::{GpuContainer, wanted_containers};
use crate::pod::host::host_amount;
use crate::pod::pod_fields::PodFields;
use crate::pod::seen_parts::{
    DEFAULT_SCHEDULER, MOST_ANNOTATIONS, PodAnnotations, PodContainers, PodFence, PodKeys, PodLife,
    PodScheduling, node_name,
};
use crate::pod::start_failure::StartFailure;
use crate::request::annotations::{parse_group, parse_request};
use crate::request::other_keys::{check, other_keys};
use crate::request::placement::{PlacementError, decode, refuse_reserved_keys};
use crate::request::request_error::RequestError;
use crate::request::resources::{
    ContainerKind, ContainerRequest, ShortMarker, markers_of, short_marker,
};
use crate::request::usable::{WORKLOAD, check_class, check_use, workload_of};
use engine::ledger::change::facts::{MoveFact, PodFact};
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::suggest::waiting::WaitingPod;
use engine::model::request::{GpuRequest, Movable, PodGroup, Purpose};
use engine::model::reservation::{Placement, PodRef};
use engine::usage::starts::WantedContainers;
use runtime::causes::shown_long;
use wire::ids::{NodeName, PodUid};
use wire::mutation::{Mutation, mutated};
use wire::units::HostAmount;

/// Longest name of an object in Kubernetes (a DNS subdomain).
pub const LONGEST_NAME: usize = 253;

/// Longest name of a namespace in Kubernetes (a DNS label).
pub const LONGEST_NAMESPACE: usize = 63;

/// Longest UID that is accepted; those of the API server have 36 bytes.
pub const LONGEST_UID: usize = 64;

/// What gpupack needs of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenPod {
    /// UID and `namespace/name`.
    pub pod: PodRef,
    pub namespace: String,
    pub name: String,
    /// The version of the object that this was read from.
    pub resource_version: String,
    /// The node to which it is bound.
    pub node: Option<NodeName>,
    /// The CPU and host memory that it requests.
    pub host: HostAmount,
    /// Its GPU request; `None` for a pod that requests no GPU.
    pub request: Result<Option<GpuRequest>, RequestError>,
    /// The group of pods with which it starts; `None` also if that is not valid.
    pub group: Option<PodGroup>,
    /// Its placement; `None` for a pod without a node, whatever its annotations say.
    pub placement: Result<Option<Placement>, PlacementError>,
    pub keys: PodKeys,
    pub containers: PodContainers,
    pub scheduling: PodScheduling,
    pub life: PodLife,
    pub fence: PodFence,
    pub annotations: PodAnnotations,
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
        let purpose = purpose_of(labels);
        let request = request.map(|request| Some(GpuRequest { purpose, ..request? }));
        let (request, gpu) = movable(pod, request);
        let has_gpu = !is_unbound && matches!(request, Ok(Some(_)));
        Self {
            pod: PodRef {
                uid: PodUid::new(metadata.uid.as_deref().unwrap_or_default()),
                name: format!("{namespace}/{name}").into(),
            },
            namespace,
            name,
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            host: spec.map_or(HostAmount::ZERO, host_amount),
            request,
            group: parse_group(annotations).ok().flatten(),
            placement: node.as_ref().map_or(Ok(None), |node| decode(annotations, node)),
            node,
            keys: PodKeys {
                workload: labels.get(WORKLOAD).cloned(),
                others: other_keys(annotations, &containers),
                markers: markers_of(&containers),
            },
            containers: PodContainers {
                gpu,
                takes_devices: spec.is_some_and(takes_devices),
                start_failure: StartFailure::of(pod),
                wanted: if has_gpu { wanted_containers(pod) } else { WantedContainers::default() },
            },
            scheduling: PodScheduling::of(pod, is_unbound),
            life: PodLife::of(pod),
            fence: PodFence::of(annotations),
            annotations: PodAnnotations::of(annotations, is_unbound),
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
            is_terminal: self.life.is_terminal,
            wants_gpu: !matches!(self.request, Ok(None)),
            request,
            placement: self.placement.as_ref().ok().cloned().flatten(),
            bound_by_us: false,
            moves: MoveFact { has_left: self.has_left(), ..MoveFact::default() },
            tenure: self.life.tenure(self.scheduling.priority),
        }
    }

    /// Whether it has a node, and lacks a placement or a request that can be read, as one that requests a GPU has
    /// both.
    pub fn is_unreadable(&self) -> bool {
        let is_whole = matches!(
            (&self.request, &self.placement),
            (Ok(Some(_)), Ok(Some(_))) | (Ok(None), Ok(None))
        );
        self.node.is_some() && !self.life.is_terminal && !is_whole
    }

    /// Whether it has left the device where it was a guest, after its move was written.
    fn has_left(&self) -> bool {
        let placement = self.placement.as_ref().ok().and_then(Option::as_ref);
        let leaving = placement.and_then(|placement| placement.guest.as_ref()?.leaving.as_ref());
        let container = self.containers.gpu.as_ref();
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
            if let Some(full) = self.annotations.full() {
                return Some(full);
            }
            // It did not come through the webhook, or its annotations or the prices have changed.
            if rules.needs_markers
                && let Some(short) =
                    short_marker(&rules.meant(request), &rules.prices, self.keys.markers)
            {
                let ShortMarker { marker, has, needed } = short;
                return Some(RequestError::Marker { marker, has, needed });
            }
        }
        // The cluster's own scheduler also serves pods that request nothing from gpupack.
        let is_ours = request.is_some() || self.scheduling.scheduler != DEFAULT_SCHEDULER;
        if !is_ours {
            return None;
        }
        let used = self.check_use(request, rules);
        used.and_then(|()| check(rules, request, &self.keys.others)).err()
    }

    /// Refuses what pods of its namespace may not use. Without a GPU request the label means nothing.
    fn check_use(
        &self,
        request: Option<&GpuRequest>,
        rules: &RequestRules,
    ) -> Result<(), RequestError> {
        let label = self.keys.workload.as_deref().filter(|_| request.is_some());
        let class = workload_of(rules, label, &self.scheduling.priority_class)?;
        check_class(rules, &self.namespace, class, self.scheduling.priority)?;
        request.map_or(Ok(()), |request| check_use(rules, &self.namespace, request))
    }

    /// Checks the length of all fields that are kept, because any client may have sent the pod.
    fn refuse_long_fields(&self) -> Result<(), PodFault> {
        let (node, nominated) = (self.node.as_ref(), self.scheduling.nominated.as_ref());
        let fields = [
            ("metadata.uid", self.pod.uid.as_str().len(), LONGEST_UID),
            ("metadata.namespace", self.namespace.len(), LONGEST_NAMESPACE),
            ("metadata.name", self.name.len(), LONGEST_NAME),
            ("metadata.resourceVersion", self.resource_version.len(), LONGEST_NAME),
            ("metadata.annotations", self.annotations.bytes, MOST_ANNOTATIONS),
            (
                "metadata.labels",
                self.keys.workload.as_ref().map_or(0, String::len),
                LONGEST_NAMESPACE,
            ),
            ("spec.nodeName", node.map_or(0, |node| node.as_str().len()), LONGEST_NAME),
            ("spec.schedulerName", self.scheduling.scheduler.len(), LONGEST_NAME),
            ("spec.priorityClassName", self.scheduling.priority_class.len(), LONGEST_NAME),
            (
                "status.nominatedNodeName",
                nominated.map_or(0, |node| node.as_str().len()),
                LONGEST_NAME,
            ),
        ];
        let long = fields.into_iter().find(|(_, bytes, most)| bytes > most);
        long.map_or(Ok(()), |(field, bytes, most)| Err(PodFault::TooLong { field, bytes, most }))
    }

    /// The same as one that waits with `query`.
    pub fn waiting_with(&self, query: PlacementRequest) -> WaitingPod {
        WaitingPod {
            pod: self.pod.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
            query,
            priority: self.scheduling.priority,
            may_preempt: self.scheduling.may_preempt,
            created_unix_seconds: self.life.created_unix_seconds,
            controller: self.life.controller,
            group: self.group.clone(),
            edition: self.scheduling.edition,
        }
    }
}

/// The label of a pod that finds out what containers get on a node. A policy lets only those have it that can do nothing
/// else; without the policy, a pod with it comes to a node where it may get no GPU.
const PROBE: &str = "gpupack.dev/probe";

/// What a pod is for.
fn purpose_of(labels: &BTreeMap<String, String>) -> Purpose {
    match labels.get(PROBE).map(String::as_str) {
        Some("true") => Purpose::Probe,
        Some(_) | None => Purpose::Work,
    }
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
