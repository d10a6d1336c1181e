//! Admission of pods: what is refused, and what is written into a pod before it exists.
//!
//! A pure function of the review and the configuration: no ledger, no API server. So several
//! replicas give the same answer. Applied to its own result it changes nothing. It refuses all pods
//! with annotations or labels that only gpupack writes. Besides:
//!
//! | Pod | Result |
//! |---|---|
//! | requests a GPU, of one of our schedulers or without one | checked and completed |
//! | requests a GPU of kubelet's device plugin | unchanged; see `leave_to_kubelet` |
//! | no GPU, but a RuntimeClass not listed as one without GPUs | refused, blanked or unchanged |
//! | no GPU, of a scheduler only for gpupack | checked and blanked, as it may run beside GPU pods |
//! | others, also of other schedulers | unchanged |
//!
//! The templates of Jobs, and of other objects as configured, are treated like the pods that will be made of them,
//! so that Kueue, which counts by templates, counts what gpupack's pods request.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Pod, PodSpec, PodTemplateSpec};
use kube::Resource;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse};
use serde::Deserialize;
use serde_json::Value;

use crate::admission::confinement::{refuse_container, refuse_pod};
use crate::admission::review::{
    ReviewFault, ReviewRequest, Templates, name_of, request, with_jobs,
};
use crate::admission::templates::{is_counted_by_template, templates};
use crate::config::allowed::NVIDIA_CLASSES;
use crate::config::pods::requests::RequestRules;
use crate::config::webhook::{
    MemoryLimit, THREAD_CAP, TemplatePath, ThreadCap, Unmanaged, WebhookConfig,
};
use crate::containers::admission_error::AdmissionError;
use crate::containers::container_view::{ContainerList, ContainerView, containers};
use crate::containers::injection::{Changes, Clients, Owned, blank, granted};
use crate::containers::mps;
use crate::pod::seen_parts::{DEFAULT_SCHEDULER, scheduler_of};
use crate::pod::seen_pod::{class_of, container_requests};
use crate::request::annotations::{
    CONTAINER, DEVICE_COUNT, FRACTION, MAX_MOVE_GRACE, parse_move_grace, parse_request,
};
use crate::request::other_keys::{check, other_keys};
use crate::request::placement::refuse_reserved_keys;
use crate::request::request_error::{RequestError, shown};
use crate::request::resources::{
    ContainerRequest, ShortMarker, WHOLE, has_request, markers, markers_of, only, short_marker,
};
use crate::request::usable::{WORKLOAD, check_class, check_use, chosen};
use engine::model::request::{GpuRequest, Movable};
use engine::model::workload::WorkloadClass;

/// How long a container may take to end when it is moved, if the pod does not say.
const MOVE_GRACE_SECONDS: u32 = 5;
/// The API server's default of `terminationGracePeriodSeconds`.
const DEFAULT_GRACE: u32 = 30;

/// The subresource that adds containers to a running pod.
const EPHEMERAL: &str = "ephemeralcontainers";

/// An answer to a review.
#[derive(Clone, Debug)]
pub struct AdmissionAnswer {
    /// The review to send back.
    pub review: Vec<u8>,
    /// The pod, or the object with templates of pods: namespace and name, or the prefix of a name that the API
    /// server will complete.
    pub object: String,
    /// Why it is refused; `None` if it is admitted.
    pub refusal: Option<AdmissionError>,
}

/// Who gives a pod its GPU.
enum GpuSource {
    Managed(Box<GpuRequest>),
    Kubelet,
    /// Another scheduler, or the pod requests none.
    Unmanaged,
}

/// What is admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    /// A pod that is created.
    Pod,
    /// A template of pods that may be created later.
    Template,
    /// The template of an object that was there before.
    OldTemplate,
}

/// The rules of admission, as configured.
#[derive(Clone, Debug)]
pub struct Admission {
    settings: WebhookConfig,
    templates: Templates,
    scheduler_names: Vec<String>,
    requests: RequestRules,
}

impl Admission {
    /// Rules for pods of these schedulers. GPU pods that name none of them get the first.
    pub fn new(settings: WebhookConfig, scheduler_names: Vec<String>) -> Self {
        let templates = with_jobs(&settings.templates);
        Self { settings, templates, scheduler_names, requests: RequestRules::default() }
    }

    /// The same with these rules for requests.
    #[must_use]
    pub fn under(self, requests: RequestRules) -> Self {
        Self { requests, ..self }
    }

    /// Answers the body of an admission call.
    ///
    /// # Errors
    /// [`ReviewFault`] if it is not a review of a pod or of templates, and so cannot be answered.
    pub fn review(&self, body: &[u8]) -> Result<AdmissionAnswer, ReviewFault> {
        let missing = ReviewFault::Missing { field: "request.object" };
        match request(body, &self.templates)? {
            ReviewRequest::Pod(request) => {
                let pod = request.object.as_ref().ok_or(missing)?;
                let decided = match request.sub_resource.as_deref().unwrap_or_default() {
                    "" => self.admit(pod, Subject::Pod, namespace(&request)),
                    EPHEMERAL => self.admit_ephemeral(pod, request.old_object.as_ref()),
                    other => return Err(of_part(&request.resource.resource, other)),
                };
                answer(&request, name_of(&request, &pod.metadata), decided)
            }
            ReviewRequest::Templates(request, paths) => {
                let object = request.object.as_ref().ok_or(missing)?;
                if let Some(part) = request.sub_resource.as_deref().filter(|part| !part.is_empty())
                {
                    return Err(of_part(&request.resource.resource, part));
                }
                let (old, namespace) = (request.old_object.as_ref(), namespace(&request));
                let decided = self.admit_templates(object, old, paths, namespace)?;
                answer(&request, name_of(&request, &object.metadata), decided)
            }
        }
    }

    /// The changes of the templates of an object that is created or changed.
    ///
    /// Of an object that changes, only those templates are completed that were complete before: others may have
    /// fields that cannot change any more, and a refusal could keep the object from being deleted.
    fn admit_templates(
        &self,
        object: &DynamicObject,
        old: Option<&DynamicObject>,
        paths: &[TemplatePath],
        namespace: &str,
    ) -> Result<Result<Changes, AdmissionError>, ReviewFault> {
        let before = old.map(|old| templates(&old.data, paths)).transpose()?.unwrap_or_default();
        let mut changes = Changes::default();
        let subject = if old.is_some() { Subject::OldTemplate } else { Subject::Template };
        for (place, template) in templates(&object.data, paths)? {
            if let Some(before) = before.get(&place)
                && !self
                    .admit_template(before, subject, namespace)?
                    .is_ok_and(|needed| needed.is_empty())
            {
                continue;
            }
            match self.admit_template(template, subject, namespace)? {
                Ok(more) => changes.append(more.within(&place, template)),
                Err(error) => {
                    let place = shown(place.to_string().trim_start_matches('/'));
                    return Ok(Err(AdmissionError::Template { place, error: Box::new(error) }));
                }
            }
        }
        Ok(Ok(changes))
    }

    /// The changes of a template: those of a pod that is made of it.
    fn admit_template(
        &self,
        template: &Value,
        subject: Subject,
        namespace: &str,
    ) -> Result<Result<Changes, AdmissionError>, ReviewFault> {
        let read = PodTemplateSpec::deserialize(template);
        let template = read.map_err(ReviewFault::json)?;
        let metadata = template.metadata.unwrap_or_default();
        let pod = Pod { metadata, spec: template.spec, status: None };
        Ok(self.admit(&pod, subject, namespace))
    }

    /// The changes of a pod that is created, or of a template.
    ///
    /// # Errors
    /// [`AdmissionError`] if it is refused.
    fn admit(
        &self,
        pod: &Pod,
        subject: Subject,
        namespace: &str,
    ) -> Result<Changes, AdmissionError> {
        let none = BTreeMap::new();
        let annotations = pod.metadata.annotations.as_ref().unwrap_or(&none);
        let labels = pod.metadata.labels.as_ref().unwrap_or(&none);
        refuse_reserved_keys(annotations.keys().chain(labels.keys()))?;
        let Some(spec) = &pod.spec else { return Ok(Changes::default()) };
        match self.gpu_source(annotations, spec)? {
            GpuSource::Managed(request) => {
                if subject == Subject::Pod && is_counted_by_template(annotations, labels) {
                    self.refuse_uncounted(spec, &request)?;
                }
                let label = labels.get(WORKLOAD).map(String::as_str);
                let class = self.check_class(label, spec, namespace)?;
                check_use(&self.requests, namespace, &request)?;
                let mut changes = self.complete(annotations, spec, &request)?;
                // Of a Job that is there it could not change any more. The pods of its template get it.
                if let Some(class) = class.filter(|_| subject != Subject::OldTemplate) {
                    changes.prioritize(spec, &class.priority_class);
                }
                Ok(changes)
            }
            GpuSource::Kubelet => self.leave_to_kubelet(spec),
            GpuSource::Unmanaged => {
                if self.is_beside(spec) {
                    // It may have pods evicted that have a GPU, for CPU or memory.
                    self.check_class(None, spec, namespace)?;
                }
                self.keep_out(annotations, spec)
            }
        }
    }

    /// The class of workloads of a pod with this label. Refuses one that its namespace may not use.
    fn check_class(
        &self,
        label: Option<&str>,
        spec: &PodSpec,
        namespace: &str,
    ) -> Result<Option<&WorkloadClass>, RequestError> {
        let rules = &self.requests;
        let named = spec.priority_class_name.as_deref().unwrap_or_default();
        let class = chosen(rules, label)?.or_else(|| rules.workloads.of(named));
        check_class(rules, namespace, class, spec.priority.unwrap_or_default())?;
        Ok(class)
    }

    /// Refuses a pod that came with less than it counts.
    fn refuse_uncounted(&self, spec: &PodSpec, request: &GpuRequest) -> Result<(), AdmissionError> {
        let written = markers_of(&container_requests(spec));
        match short_marker(&self.requests.meant(request), &self.requests.prices, written) {
            Some(ShortMarker { marker, has, needed }) => {
                Err(AdmissionError::KueueMarker { marker, has, needed })
            }
            None => Ok(()),
        }
    }

    /// Who gives the pod its GPU.
    fn gpu_source(
        &self,
        annotations: &BTreeMap<String, String>,
        spec: &PodSpec,
    ) -> Result<GpuSource, RequestError> {
        let scheduler = scheduler_of(spec);
        let containers = container_requests(spec);
        let left = match containers.iter().any(|container| has_request(container, |_| true)) {
            true => GpuSource::Kubelet,
            false => GpuSource::Unmanaged,
        };
        let is_named = self.scheduler_names.iter().any(|name| name == scheduler);
        if !is_named && scheduler != DEFAULT_SCHEDULER {
            return Ok(left);
        }
        // The cluster's own scheduler also serves pods whose GPU comes from kubelet.
        let is_ours = |resource: &str| {
            scheduler != DEFAULT_SCHEDULER
                || (self.settings.take_over_whole_gpus && resource == WHOLE)
        };
        let ours: Vec<ContainerRequest> =
            containers.iter().map(|container| only(container, is_ours)).collect();
        let others = other_keys(annotations, &containers);
        if parse_request(annotations, &ours)?.is_none() {
            if scheduler != DEFAULT_SCHEDULER {
                check(&self.requests, None, &others)?;
            }
            return Ok(left);
        }
        // Now with all resources: a pod must not request GPUs of both gpupack and kubelet.
        let request = parse_request(annotations, &containers)?;
        check(&self.requests, request.as_ref(), &others)?;
        Ok(request.map_or(left, |request| GpuSource::Managed(Box::new(request))))
    }

    /// Checks and completes a pod of ours.
    fn complete(
        &self,
        annotations: &BTreeMap<String, String>,
        spec: &PodSpec,
        request: &GpuRequest,
    ) -> Result<Changes, AdmissionError> {
        if let Some(node) = spec.node_name.as_deref().filter(|node| !node.is_empty()) {
            return Err(AdmissionError::NodeName { node: shown(node) });
        }
        self.check_grace(spec)?;
        let clients = match self.settings.memory_limit {
            MemoryLimit::Mps if mps::is_client(request)? => Clients::Granted,
            MemoryLimit::Mps | MemoryLimit::Driver | MemoryLimit::None => Clients::None,
        };
        let volume = (clients == Clients::Granted).then(|| mps::volume(&self.settings.mps_folder));
        refuse_pod(annotations, spec, &self.settings, volume.as_ref())?;
        let all = containers(spec);
        let mut changes = Changes::default();
        self.direct(spec, &mut changes)?;
        let has_volume = mps::has_volume(spec, volume.as_ref())?;
        if let Some(volume) = volume.filter(|_| !has_volume) {
            changes.volume(spec, &volume);
        }
        let taken = container_requests(spec)
            .into_iter()
            .find(|container| has_request(container, |name| name == WHOLE));
        let first = spec.containers.first().map_or("", |container| container.name.as_str());
        let gpu_container = request.container.as_deref().unwrap_or(first);
        let mut wanted = Vec::new();
        if taken.is_some() {
            wanted.push((FRACTION, "1".to_owned()));
            wanted.push((DEVICE_COUNT, request.count.to_string()));
        }
        if !gpu_container.is_empty() && (taken.is_some() || request.container.is_none()) {
            // Saved, because another webhook may insert a container before the first one.
            wanted.push((CONTAINER, gpu_container.to_owned()));
        }
        changes.annotate(annotations, &wanted);
        let (mut granted, blank) = (granted(request, self.settings.memory_limit), blank());
        let mut mounts = Vec::new();
        if clients == Clients::Granted {
            granted.extend(mps::variables(self.settings.thread_cap));
            changes.warning = (self.settings.thread_cap == ThreadCap::Share).then_some(THREAD_CAP);
            mounts.extend(mps::mounts());
        }
        let meant = self.requests.meant(request);
        let markers: Vec<_> = markers(&meant, &self.requests.prices).collect();
        for container in &all {
            refuse_container(container, &self.settings)?;
            let gets_gpu = container.name == gpu_container && !container.is_ephemeral();
            let owned = self.owned(clients);
            changes.variables(container, if gets_gpu { &granted } else { &blank }, owned)?;
            changes.mounts(container, if gets_gpu { &mounts } else { &[] })?;
            if !container.is_ephemeral() {
                changes.mark(container, if gets_gpu { &markers } else { &[] });
            }
            if taken.as_ref().is_some_and(|taken| taken.name == container.name) {
                changes.take_over(container);
            }
            if gets_gpu && request.movable == Movable::Restart {
                refuse_unmovable(spec, container)?;
                changes.restart_on_resize(container);
            }
        }
        if request.movable == Movable::Restart {
            let own = spec.termination_grace_period_seconds;
            let own = own.and_then(|seconds| u32::try_from(seconds).ok());
            // The API server has set its default already if the pod has none.
            let own = own.filter(|seconds| *seconds != DEFAULT_GRACE);
            let grace = parse_move_grace(annotations)?.or(own).unwrap_or(MOVE_GRACE_SECONDS);
            if grace > MAX_MOVE_GRACE {
                let fault = "its `terminationGracePeriodSeconds` is above 30: lower it, or set \
                     `gpupack.dev/move-grace-seconds`";
                return Err(AdmissionError::Movable { fault });
            }
            changes.end_within(spec, grace);
        }
        Ok(changes)
    }

    /// Sets scheduler and RuntimeClass where the pod names none, and lets it on nodes of gpupack that
    /// have a taint.
    fn direct(&self, spec: &PodSpec, changes: &mut Changes) -> Result<(), AdmissionError> {
        let scheduler = scheduler_of(spec);
        if !self.scheduler_names.iter().any(|name| name == scheduler)
            && let Some(ours) = self.scheduler_names.first()
        {
            changes.set("schedulerName", ours);
        }
        changes.tolerate(spec, &self.settings.tolerated_taints);
        let Some(expected) = self.settings.runtime_class.as_deref() else {
            return match class_of(spec).filter(|class| self.leads_to_gpus(class)) {
                Some(class) => Err(AdmissionError::UnknownRuntimeClass { class: shown(class) }),
                None => Ok(()),
            };
        };
        match class_of(spec) {
            None => changes.set("runtimeClassName", expected),
            Some(found) if found == expected => {}
            Some(found) => {
                let (found, expected) = (shown(found), expected.to_owned());
                return Err(AdmissionError::RuntimeClass { found, expected });
            }
        }
        Ok(())
    }

    /// Leaves a pod to kubelet's device plugin, unless it names its node and a RuntimeClass that
    /// may give GPUs. On a node that never had the plugin, kubelet ignores the resource, and
    /// NVIDIA's runtime would give it what its variables or its image name.
    fn leave_to_kubelet(&self, spec: &PodSpec) -> Result<Changes, AdmissionError> {
        let node = spec.node_name.as_deref().filter(|node| !node.is_empty());
        match (node, class_of(spec)) {
            (Some(node), Some(class))
                if self.settings.unmanaged != Unmanaged::Allow && self.leads_to_gpus(class) =>
            {
                Err(AdmissionError::NodeName { node: shown(node) })
            }
            _ => Ok(Changes::default()),
        }
    }

    /// Prevents that a pod without a GPU request gets a GPU by its RuntimeClass.
    fn keep_out(
        &self,
        annotations: &BTreeMap<String, String>,
        spec: &PodSpec,
    ) -> Result<Changes, AdmissionError> {
        let mut changes = Changes::default();
        if !self.is_confined(spec) {
            return Ok(changes);
        }
        if let Some(class) = class_of(spec).filter(|class| self.leads_to_gpus(class))
            && self.settings.unmanaged == Unmanaged::Refuse
        {
            let (is_nvidias, class) = (self.is_nvidias(class), shown(class));
            return Err(match is_nvidias {
                true => AdmissionError::UnmanagedRuntimeClass { class },
                false => AdmissionError::UnknownRuntimeClass { class },
            });
        }
        refuse_pod(annotations, spec, &self.settings, None)?;
        for container in &containers(spec) {
            refuse_container(container, &self.settings)?;
            changes.variables(container, &blank(), self.owned(Clients::None))?;
        }
        Ok(changes)
    }

    /// Whether a pod without a GPU request must obey the rules for GPU pods: if its runtime may
    /// give GPUs, or if its scheduler is only for gpupack, so that it may run beside them. Pods of
    /// the cluster's own scheduler may too, but their node is not known yet.
    fn is_confined(&self, spec: &PodSpec) -> bool {
        let is_suspect = class_of(spec).is_some_and(|class| self.leads_to_gpus(class));
        self.settings.unmanaged != Unmanaged::Allow && (self.is_beside(spec) || is_suspect)
    }

    /// Whether its scheduler is only for gpupack.
    fn is_beside(&self, spec: &PodSpec) -> bool {
        let scheduler = scheduler_of(spec);
        let is_named = self.scheduler_names.iter().any(|name| name == scheduler);
        is_named && scheduler != DEFAULT_SCHEDULER
    }

    /// Refuses a pod that could keep its GPU for long after its deletion. gpupack does not shorten
    /// the grace period silently: the pod may need it, for instance to save its work.
    fn check_grace(&self, spec: &PodSpec) -> Result<(), AdmissionError> {
        let most = self.settings.max_grace_period_seconds;
        match spec.termination_grace_period_seconds {
            Some(seconds) if u64::try_from(seconds).is_ok_and(|seconds| seconds > most) => {
                Err(AdmissionError::GracePeriod { seconds, most })
            }
            _ => Ok(()),
        }
    }

    fn owned(&self, clients: Clients) -> Owned<'_> {
        Owned { clients, allowed: &self.settings.allowed_variables }
    }

    /// The changes of containers that are added to a running pod. Nothing else may change now.
    ///
    /// # Errors
    /// [`AdmissionError`] if one of them could get access to a GPU.
    fn admit_ephemeral(&self, pod: &Pod, old: Option<&Pod>) -> Result<Changes, AdmissionError> {
        let none = BTreeMap::new();
        let annotations = pod.metadata.annotations.as_ref().unwrap_or(&none);
        let mut changes = Changes::default();
        let Some(spec) = &pod.spec else { return Ok(changes) };
        let is_confined = match self.gpu_source(annotations, spec) {
            // To debug a pod, users need not fix its request.
            Ok(GpuSource::Managed(_)) | Err(_) => true,
            Ok(GpuSource::Kubelet) => false,
            Ok(GpuSource::Unmanaged) => self.is_confined(spec),
        };
        if !is_confined {
            return Ok(changes);
        }
        let old = old.and_then(|old| old.spec.as_ref()).map(containers).unwrap_or_default();
        let old = old.iter().filter(|container| container.is_ephemeral());
        let present: BTreeSet<&str> = old.map(|container| container.name).collect();
        let now = containers(spec);
        let now = now.iter().filter(|container| container.is_ephemeral());
        for added in now.filter(|container| !present.contains(container.name)) {
            refuse_container(added, &self.settings)?;
            changes.variables(added, &blank(), self.owned(Clients::None))?;
            changes.mounts(added, &[])?;
        }
        Ok(changes)
    }

    /// Whether a RuntimeClass may use NVIDIA's runtime, under any name.
    fn leads_to_gpus(&self, class: &str) -> bool {
        !self.settings.runtime_classes_without_gpus.iter().any(|listed| listed == class)
    }

    /// Whether a RuntimeClass is one of NVIDIA, by its usual names or the configuration.
    fn is_nvidias(&self, class: &str) -> bool {
        NVIDIA_CLASSES.contains(&class) || self.settings.runtime_class.as_deref() == Some(class)
    }
}

/// Refuses a pod that kubelet could not restart in place for a move.
fn refuse_unmovable(spec: &PodSpec, container: &ContainerView<'_>) -> Result<(), AdmissionError> {
    let fault = if spec.restart_policy.as_deref() == Some("Never") {
        "its `restartPolicy` is `Never`: a move restarts its container, so use `Always` or `OnFailure`"
    } else if container.list != ContainerList::Regular {
        "its GPU is for an init container, which cannot be resized: give it to a regular one"
    } else if spec.resources.is_some() {
        "it has `spec.resources`, which keep kubelet from restarting one container: set the resources \
         of its containers instead"
    } else {
        return Ok(());
    };
    Err(AdmissionError::Movable { fault })
}

/// The answer to a request.
fn answer<K: Resource>(
    request: &AdmissionRequest<K>,
    object: String,
    decided: Result<Changes, AdmissionError>,
) -> Result<AdmissionAnswer, ReviewFault> {
    let mut response = AdmissionResponse::from(request);
    let warning = decided.as_ref().ok().and_then(|changes| changes.warning);
    response.warnings = warning.map(|text| vec![text.to_owned()]);
    let (response, refusal) = match decided {
        Ok(changes) => match changes.into_patch() {
            None => (response, None),
            Some(patch) => {
                let patched = response.with_patch(patch);
                (patched.map_err(|error| ReviewFault::Json { fault: error.to_string() })?, None)
            }
        },
        Err(error) => (response.deny(&error), Some(error)),
    };
    let review = serde_json::to_vec(&response.into_review())
        .map_err(|error| ReviewFault::Json { fault: error.to_string() })?;
    Ok(AdmissionAnswer { review, object, refusal })
}

/// The namespace of what is reviewed.
fn namespace<K: Resource>(request: &AdmissionRequest<K>) -> &str {
    request.namespace.as_deref().unwrap_or_default()
}

/// The fault of a review of a part of an object that is not checked.
fn of_part(resource: &str, part: &str) -> ReviewFault {
    ReviewFault::Resource { resource: shown(&format!("{resource}/{part}")) }
}

#[cfg(test)]
mod beside;
#[cfg(test)]
mod movable;
#[cfg(test)]
mod of_templates;
#[cfg(test)]
mod tests;
